"""Muon on any mix of layouts computes what `torch.optim.Muon` computes of the whole matrices."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.optim.matrices import share
from hyper_parallel.core.optim.muon import Muon
from hyper_parallel.core.redistribute.api import distribute_tensor, full_tensor
from hyper_parallel.core.redistribute.bounds import lower_bound
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.sim

STEPS = 2


class Drawn(NamedTuple):
    """A matrix, or a stack of them, on all axes of the mesh; without a layout it is a plain one."""

    shape: tuple[int, ...]
    layout: Layout | None
    grads: tuple[bool, ...]  # by step, whether there is a gradient


class Case(NamedTuple):
    """Shrinks towards one rank, one matrix, options as they are."""

    mesh: Layout
    params: tuple[Drawn, ...]
    options: dict[str, object]


@st.composite
def cases(draw):
    mesh = draw(meshes(8, 3))
    params = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(shapes(2, 3, max_size=6).filter(all))
        layout = draw(st.none() | layouts(mesh, shape))
        params.append(Drawn(shape, layout, tuple(draw(st.booleans()) or step == 0 for step in range(STEPS))))
    options = {"nesterov": draw(st.booleans()), "adjust_lr_fn": draw(st.sampled_from((None, "match_rms_adamw")))}
    return Case(mesh, tuple(params), options)


def values(shape, seed):
    # In float64, as shards of float32 may round a momentum to another bfloat16 than the whole does.
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_one_device(case):
    """The parameters after the steps of torch's optimizer, which has each matrix of a stack by itself."""
    wholes = [values(drawn.shape, number) for number, drawn in enumerate(case.params)]
    stacks = [[nn.Parameter(matrix.clone()) for matrix in (whole if whole.dim() == 3 else [whole])] for whole in wholes]
    optimizer = torch.optim.Muon([matrix for stack in stacks for matrix in stack], lr=0.1, **case.options)
    for step in range(STEPS):
        for number, (drawn, stack) in enumerate(zip(case.params, stacks, strict=True)):
            grad = values(drawn.shape, 100 * (step + 1) + number)
            for matrix, its in zip(stack, grad if grad.dim() == 3 else [grad], strict=True):
                matrix.grad = its.clone() if drawn.grads[step] else None
        optimizer.step()
    return [
        torch.stack([matrix.detach() for matrix in stack]).view_as(whole)
        for stack, whole in zip(stacks, wholes, strict=True)
    ]


def on_rank(case):
    mesh = init_device_mesh("cpu", case.mesh.mesh_shape, mesh_dim_names=case.mesh.alias_name)

    def placed(whole, drawn):
        if drawn.layout is None:
            return whole.clone()
        layout = Layout.from_device_mesh(mesh)(*drawn.layout.alias_placements)
        return distribute_tensor(whole.clone(), layout, src_data_rank=None)

    params = [
        nn.Parameter(placed(values(drawn.shape, number), drawn).detach()) for number, drawn in enumerate(case.params)
    ]
    optimizer = Muon(params, lr=0.1, **case.options)
    for step in range(STEPS):
        for number, (drawn, param) in enumerate(zip(case.params, params, strict=True)):
            grad = placed(values(drawn.shape, 100 * (step + 1) + number), drawn)
            param.grad = grad if drawn.grads[step] else None
        optimizer.step()
    _check_exchanges(params)
    pairs = zip(case.params, params, strict=True)
    return [x.detach() if drawn.layout is None else full_tensor(x.detach()) for drawn, x in pairs]


def _check_exchanges(params):
    """A rank receives what it lacks of the matrices that it computes, and work is shared as evenly as it can be."""
    rank = dist.get_rank()
    for sharing in share(params):
        me = sharing.ranks.index(rank) if sharing.ranks else 0
        work = [0] * max(1, len(sharing.ranks))
        for matrix, owner in zip(sharing.matrices, sharing.owners, strict=True):
            work[owner] += matrix.flops()
        dearest = max(matrix.flops() for matrix in sharing.matrices)
        assert max(work) <= sum(work) / len(work) + dearest, "Graham's bound"
        if sharing.ranks:
            assert sum(sharing.receives(me)) == _least(params, sharing, rank)


def _least(params, sharing, rank):
    """Elements that the calling rank must receive, as redistribution has it: each matrix goes to one rank."""
    total = 0
    for matrix, owner in zip(sharing.matrices, sharing.owners, strict=True):
        layout, there = Layout.of(params[matrix.param]), sharing.ranks[owner]
        entries = layout.alias_placements[-2:]  # of a stack: the ranks of the group hold the same matrices
        group = Layout(layout.mesh_shape, layout.alias_name, layout.rank_list)(*entries)
        bound = lower_bound(group, Layout((1,), ("owner",), (there,))(), matrix.shape, torch.int8)
        total += int(bound[sorted(layout.rank_list).index(there)]) * (there == rank)
    return total


def apart(got, wanted, case, number):
    """How far two results are from each other, beside how far the steps went.

    Products of a batch of small matrices round otherwise than those of one, to bfloat16, and the iterations amplify it.
    """
    went = wanted - values(case.params[number].shape, number)
    return ((got - wanted).norm() / went.norm().clamp(min=1e-12)).item()


@given(cases())
def test_any_mix_of_matrices(case):
    expected = on_one_device(case)
    for results in sim.run(on_rank, len(case.mesh.rank_list), (case,)):
        for number, (got, wanted) in enumerate(zip(results, expected, strict=True)):
            assert apart(got, wanted, case, number) < 0.05
