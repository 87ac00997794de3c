"""The command `verify`: a plan compared with one device, on simulated ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli.kit import FAILURE, mistakes_as_messages, stdout_console
from hyper_parallel.cli.options import Given, options, with_options

__all__ = ["verify"]


@with_options(
    *options(
        "sizes",
        "hyper_parallel.cli.subject",
        "LlamaSizes",
        *("layers", "hidden", "heads", "kv_heads", "vocab", "seq_len", "batch", "tied"),
    )
)
def verify(
    model: Annotated[
        str, typer.Option(help="llama, or module:function of your own, where the function returns the model.")
    ] = "llama",
    mesh: Annotated[str, typer.Option(help="Axes and their sizes, the last one fastest.")] = "dp=2,tp=4",
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="TOML file, see --show-plan; default: the plan that ships with llama.")
    ] = None,
    parallelize: Annotated[
        str | None, typer.Option(help="module:function, called with model and mesh, in place of a plan.")
    ] = None,
    show_plan: Annotated[
        bool, typer.Option("--show-plan", help="Print the plan as TOML, and compare nothing.")
    ] = False,
    *,
    given: Given,
    tp: Annotated[str, typer.Option(help="Axis that splits heads, width and vocabulary; None: none does.")] = "tp",
    sequence_parallel: Annotated[bool, typer.Option(help="Split the residual stream over the sequence.")] = True,
    vocab_parallel: Annotated[bool, typer.Option(help="Split embedding and head.")] = True,
    dtensors: Annotated[bool, typer.Option("--dtensors", help="Compute on DTensors, not on local tensors.")] = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="Argument of a model of your own: 4,16 floats, 4,16:100 numbers below 100."),
    ] = None,
    input_layout: Annotated[
        list[str] | None, typer.Option(help="Which part of an argument a rank has: dp,None; default: as the plan says.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="What ranks compute in: float64, or float32.")] = "float64",
    seed: Annotated[int, typer.Option(help="Of weights, inputs and simulated interleaving.")] = 0,
    everything: Annotated[bool, typer.Option("--all", help="Print all tensors, not only the wrong ones.")] = False,
) -> None:
    """Prove on simulated ranks that a plan computes what one device computes; else name the first module that errs.

    hyper-parallel verify --show-plan > plan.toml; hyper-parallel verify --plan plan.toml

    Exit code 0: right; 1: the plan is wrong, or ranks failed; 2: a mistake in what was asked.
    """
    from hyper_parallel.cli.subject import LlamaSizes, Subject, llama_subject, own_subject, verify_subject
    from hyper_parallel.core.shard.plan_file import plan_text

    with mistakes_as_messages():
        subject: Subject
        if model == "llama":
            if inputs or parallelize is not None:
                raise ValueError(
                    f"cannot verify the llama: {'--input' if inputs else '--parallelize'} is for a model of your own\n"
                    f"  --model {model}\n  try: --model module:function, or --batch and --seq-len, or --plan"
                )
            subject = llama_subject(
                mesh,
                LlamaSizes(**given["sizes"]),
                plan_path=plan_file,
                tp=tp,
                options={
                    "sequence_parallel": sequence_parallel,
                    "vocab_parallel": vocab_parallel,
                    "local": not dtensors,
                },
                input_layouts=input_layout or (),
                dtype=dtype,
                seed=seed,
            )
        else:
            subject = own_subject(
                model,
                mesh,
                inputs or (),
                plan_path=plan_file,
                parallelize=parallelize,
                input_layouts=input_layout or (),
                dtype=dtype,
                seed=seed,
            )
        if show_plan:
            stdout_console().file.write(plan_text(subject.shown_plan(), subject.mesh))
            raise typer.Exit()
        correct = verify_subject(stdout_console(), subject, everything)
    raise typer.Exit(0 if correct else FAILURE)
