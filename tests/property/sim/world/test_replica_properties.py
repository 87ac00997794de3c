"""One element of one rank's copy is off: found where the layout says that another rank holds it too, and only there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import hyper_parallel as hp
import sim
from sim.strategies import interleavings, layouts, meshes, shapes

pytestmark = pytest.mark.sim


@st.composite
def cases(draw: st.DrawFn) -> tuple[hp.Layout, tuple[int, ...], int, int]:
    """A layout, a shape, the rank whose copy is off and its element; shrinks towards one rank and a scalar."""
    mesh, shape = draw(meshes(8, 3)), draw(shapes(max_size=5))
    layout = draw(layouts(mesh, shape, ordered=False, partial=("sum",)))
    return layout, shape, draw(st.sampled_from(layout.rank_list)), draw(st.integers(0, 10))


def replicas_of(layout: hp.Layout, rank: int) -> list[int]:
    """The naive twin: the ranks at the same place along every axis that splits or is partial."""
    where = {
        r: place
        for place, r in zip(
            torch.cartesian_prod(*map(torch.arange, layout.mesh_shape)).view(-1, len(layout.mesh_shape)).tolist(),
            layout.rank_list,
            strict=True,
        )
    }
    kept = [axis for axis, p in enumerate(layout.placements) if not p.is_replicate()]
    return [r for r in layout.rank_list if all(where[r][axis] == where[rank][axis] for axis in kept)]


def body(layout: hp.Layout, shape: tuple[int, ...], odd: int | None, place: int) -> int:
    """Returns the number of elements that the calling rank holds."""
    mesh = hp.init_device_mesh("cpu", layout.mesh_shape, mesh_dim_names=layout.alias_name)
    x = hp.distribute_tensor(torch.arange(float(torch.Size(shape).numel())).view(shape), layout.with_mesh(mesh))
    local = x._local_tensor
    if dist.get_rank() == odd and local.numel():
        local.view(-1)[place % local.numel()] += 0.5
    sim.check_replicas({"x": x})
    return local.numel()


@given(cases(), interleavings(8, max_turns=8))
def test_a_difference_is_found_where_there_are_copies(case: Any, schedule: tuple[int, ...]) -> None:
    layout, shape, odd, place = case
    world_size = len(layout.rank_list)
    held = sim.run(body, world_size, (layout, shape, None, place), schedule=schedule)
    copies = replicas_of(layout, odd)
    assert len(copies) == layout.repeat_num()
    if len(copies) == 1 or not held[odd]:
        sim.run(body, world_size, (layout, shape, odd, place), schedule=schedule)
        return
    with pytest.raises(sim.ReplicaMismatch) as caught:
        sim.run(body, world_size, (layout, shape, odd, place), schedule=schedule)
    text = str(caught.value)
    assert [int(rank) for rank in re.findall(r"^[* ] rank (\d+) ", text, re.MULTILINE)] == copies
    marked = [int(rank) for rank in re.findall(r"^\* rank (\d+) ", text, re.MULTILINE)]
    assert marked == ([odd] if len(copies) > 2 else [copies[1]]), "the minority, or the second of two"
    assert f"1 of {held[odd]} elements differ" in text
