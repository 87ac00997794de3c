"""The norm over any mix of layouts is that of the parts, each counted once; and clipping scales by what torch does.

The naive twin knows nothing of groups: for each rank it collects the parts of all ranks that lie along the axes that
split a parameter, and takes the norm of all of them in float64.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.fully_shard.clip import clip_grad_norm_, get_total_norm
from hyper_parallel.core.redistribute.api import from_local
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.sim

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.complex64: 1e-5, torch.float64: 1e-5}


class Drawn(NamedTuple):
    """One parameter; `layout` is None for a plain one, else on the axes named in it, which may be some of the mesh."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    grad_layout: Layout | None  # where the gradient lies, perhaps with reductions pending
    has: tuple[bool, ...]  # per rank, whether there is a gradient
    main: bool  # in main_grad


class Case(NamedTuple):
    """Shrinks towards one rank, one parameter without dims and without a gradient, p = 2, no limit."""

    mesh: Layout
    params: tuple[Drawn, ...]
    p: float
    max_norm: float
    foreach: bool | None
    seed: int


@st.composite
def parameters(draw, mesh):
    shape, dtype = draw(shapes(0, 3, max_size=7)), draw(st.sampled_from(DTYPES))
    count, main = len(mesh.rank_list), draw(st.booleans())
    everywhere = draw(st.booleans())
    names = [name for name in mesh.alias_name if draw(st.booleans())]
    if not names:
        return Drawn(shape, dtype, None, None, (everywhere,) * count, main)
    sizes = tuple(size for size, name in zip(mesh.mesh_shape, mesh.alias_name, strict=True) if name in names)
    part = Layout(sizes, tuple(names))
    kind = draw(st.sampled_from(("alike", "missing", "pending", "elsewhere")))
    if kind in ("alike", "missing"):
        layout = draw(layouts(part, shape))
        some = tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
        return Drawn(shape, dtype, layout, layout, some if kind == "missing" else (everywhere,) * count, main)
    pending = draw(layouts(part, shape, ordered=False, partial=("sum", "avg")))
    layout = pending.reset_partial() if kind == "pending" else draw(layouts(part, shape, ordered=False))
    return Drawn(shape, dtype, layout, pending, (everywhere,) * count, main)


@st.composite
def cases(draw):
    mesh = draw(meshes(8, 3))
    return Case(
        mesh,
        tuple(draw(st.lists(parameters(mesh), min_size=1, max_size=5))),
        draw(st.sampled_from((2.0, 1.0, math.inf, 3.0, 0.5))),
        draw(st.sampled_from((math.inf, 1.0, 0.0, 1e6))),
        draw(st.sampled_from((None, True, False))),
        draw(st.integers(0, 2**16)),
    )


def whole_of(drawn, number):
    """Small whole numbers, which all dtypes hold and of which copies add up exactly."""
    index = torch.arange(math.prod(drawn.shape)).reshape(drawn.shape) + number
    if drawn.dtype.is_complex:
        return torch.complex(index % 5 - 2.0, index % 3 - 1.0)
    return (index % 4 - 1).to(drawn.dtype)


# -- the naive twin --------------------------------------------------------------------------------------------------


def along(mesh, rank, names):
    """The ranks that differ from this one along these axes only, in their order on the mesh."""
    ranks = np.arange(len(mesh.rank_list)).reshape(mesh.mesh_shape)
    place = np.unravel_index(rank, mesh.mesh_shape)
    index = tuple(slice(None) if name in names else at for name, at in zip(mesh.alias_name, place, strict=True))
    return np.ravel(ranks[index]).tolist()


def splitting(drawn):
    """The axes that split a parameter."""
    return {drawn.layout.alias_name[axis] for axes in drawn.layout.splits(len(drawn.shape)) for axis in axes}


def expected_norm(case, rank):
    parts = [torch.zeros(1, dtype=torch.complex128)]
    for number, drawn in enumerate(case.params):
        full = whole_of(drawn, number)
        if drawn.layout is None:
            parts += [full] * drawn.has[rank]
            continue
        on = along(case.mesh, rank, drawn.layout.alias_name)
        for other in along(case.mesh, rank, splitting(drawn)):
            if drawn.has[other]:
                parts.append(sim.scatter_full(full, drawn.layout, on.index(other)))
    everything = torch.cat([part.reshape(-1).to(torch.complex128) for part in parts])
    return torch.linalg.vector_norm(everything, case.p).item()


# -- on the ranks ----------------------------------------------------------------------------------------------------


def moved(layout, mesh):
    """The same layout on a mesh of other ranks."""
    return Layout.from_device_mesh(mesh)(*layout.alias_placements, partial=layout.partial)


def make(case, rank, mesh):
    """The parameters of one rank with their gradients."""
    made = []
    for number, drawn in enumerate(case.params):
        full = whole_of(drawn, number)
        if drawn.layout is None:
            value, grad = torch.zeros_like(full), full
        else:
            names = drawn.layout.alias_name
            on = mesh if names == case.mesh.alias_name else mesh[names]
            index = along(case.mesh, rank, names).index(rank)
            value, grad = (
                from_local(sim.scatter_full(x, y, index, seed=case.seed), moved(y, on), shape=drawn.shape)
                for x, y in ((torch.zeros_like(full), drawn.layout), (full, drawn.grad_layout))
            )
        param = nn.Parameter(value.detach())
        if drawn.has[rank]:
            setattr(param, "main_grad" if drawn.main else "grad", grad.detach())
        made.append(param)
    return made


def held(params):
    """The gradients as this rank holds them."""
    grads = [getattr(param, "main_grad", None) if param.grad is None else param.grad for param in params]
    return [x.to_local().clone() if isinstance(x, DTensor) else None if x is None else x.clone() for x in grads]


def on_rank(case):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", case.mesh.mesh_shape, mesh_dim_names=case.mesh.alias_name)
    params = make(case, rank, mesh)
    before = held(params)
    alone = get_total_norm(params, case.p, foreach=case.foreach)
    assert all(x is None or torch.equal(x, y) for x, y in zip(before, held(params), strict=True)), "it only looks"
    norm = clip_grad_norm_(iter(params), case.max_norm, case.p, foreach=case.foreach)
    assert torch.equal(norm, alone)
    assert norm.dtype == (torch.float64 if any(param.dtype == torch.float64 for param in params) else torch.float32)
    return norm.item(), before, held(params)


@given(cases())
def test_any_mix_of_parameters(case):
    count = len(case.mesh.rank_list)
    results = sim.run(on_rank, count, (case,), seed=case.seed)
    alike = all(len(set(drawn.has)) == 1 for drawn in case.params)
    event(f"gradients on {'all ranks or none' if alike else 'some ranks'}")
    if alike:
        assert len({norm.hex() for norm, _, _ in results}) == 1, "the same bits on every rank"
    for rank, (norm, before, after) in enumerate(results):
        expected = expected_norm(case, rank)
        assert norm == pytest.approx(expected, rel=1e-5), f"rank {rank}"
        factor = min(1.0, case.max_norm / (expected + 1e-6))
        for was, now in zip(before, after, strict=True):
            assert (was is None) == (now is None)
            if was is not None:
                wanted = (
                    (was.to(torch.complex128) * factor).to(was.dtype) if was.is_complex() else was.double() * factor
                )
                torch.testing.assert_close(now, wanted.to(was.dtype), rtol=TOLERANCE[was.dtype], atol=1e-7)
