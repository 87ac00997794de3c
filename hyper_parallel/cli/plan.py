"""The command `plan`: the way of a tensor from one layout to another."""

from __future__ import annotations

from typing import Annotated

from hyper_parallel.cli.kit import mistakes_as_messages, option, stdout_console
from hyper_parallel.core.common.errors import InvalidValue


def plan(
    mesh: Annotated[str, option("Axes and their sizes, the last one fastest: dp=2,tp=4")],
    shape: Annotated[str, option("Sizes of the full tensor: 4096,4096")],
    source: Annotated[
        str,
        option(
            "Layout it has, one entry per dim: dp,None; several axes on one dim, outer first: dp+tp,None; "
            'reductions still to be taken: "None,None; tp=sum"',
            "--from",
        ),
    ],
    target: Annotated[str, option("Layout it should have, written as --from.", "--to")],
    dtype: Annotated[str, option("Of the tensor.")] = "float32",
    hardware: Annotated[
        str | None, option("A name such as h100-sxm, or a file, to take the least time; default: the fewest bytes.")
    ] = None,
    ranks_per_node: Annotated[int | None, option("If not the usual number for the hardware.")] = None,
    max_extra_bytes: Annotated[
        int | None, option("Most memory per rank besides its part of the source and of the result.")
    ] = None,
    steps_only: Annotated[bool, option("Print nothing but our steps.", "--steps-only")] = False,
) -> None:
    """Show how a tensor gets from one layout to another: our steps, torch's, and the least there is to move.

    hyper-parallel plan --mesh dp=2,tp=4 --shape 4096,4096 --from dp,None --to None,tp
    """
    with mistakes_as_messages():
        if hardware is None and ranks_per_node is not None:
            seen, hint = f"--ranks-per-node {ranks_per_node}", f"--hardware h100-sxm --ranks-per-node {ranks_per_node}"
            raise InvalidValue("cannot place ranks on nodes", "no --hardware says what joins them", seen, hint)
        from hyper_parallel.core.dtensor.text import parse_dtype, parse_layout, parse_mesh, parse_shape
        from hyper_parallel.core.machine import find_machine
        from hyper_parallel.core.redistribute import plan as plan_redistribution
        from hyper_parallel.core.redistribute.show import draw_plan

        axes, on = parse_mesh(mesh), None if hardware is None else find_machine(hardware)
        if on is not None and ranks_per_node is not None:
            on = on.with_figures(node__devices=ranks_per_node)
        src, dst = parse_layout(axes, source), parse_layout(axes, target)
        steps = plan_redistribution(
            src, dst, parse_shape(shape), parse_dtype(dtype), on, max_extra_bytes=max_extra_bytes
        )
        kind = "cpu" if on is not None and on.family == "cpu" else "cuda"
        drawn = draw_plan(steps, device_type=kind, steps_only=steps_only)
    stdout_console().print(drawn)
