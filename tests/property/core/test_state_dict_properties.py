"""Any layout on any mesh of the ranks loads into any sharding, and comes out again as it was."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.state_dict import get_model_state_dict, load_state_dict
from hyper_parallel.core.redistribute import from_local, redistribute
from sim.strategies import AXIS_NAMES, layouts

pytestmark = pytest.mark.sim

WAYS = ("layout", "slice", "whole", "part", "mixed ranks")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class Value(NamedTuple):
    """A parameter, and what is loaded into it."""

    shape: tuple[int, ...]
    dim: int  # that is sharded
    dtype: torch.dtype
    given_dtype: torch.dtype
    way: str
    source: Layout  # of a "layout"
    order: tuple[int, ...]  # of the ranks on its mesh


class Case(NamedTuple):
    """Two models on meshes of the same ranks; shrinks towards one rank and one small parameter, given whole."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    values: tuple[Value, ...]
    nested: bool


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 6), label="ranks")
    grids = [(ranks,), *((n, ranks // n) for n in range(1, ranks + 1) if ranks % n == 0)]
    first, second = draw(st.sampled_from(grids)), draw(st.sampled_from(grids))
    values = []
    for _ in range(draw(st.integers(1, 3), label="parameters")):
        shape = draw(st.lists(st.sampled_from((1, 0, 2, 3, 5, 7, 4, 8)), min_size=1, max_size=3).map(tuple))
        sizes = draw(st.sampled_from(grids))
        mesh = Layout(sizes, AXIS_NAMES[: len(sizes)])
        values.append(
            Value(
                shape,
                draw(st.integers(0, len(shape) - 1)),
                draw(st.sampled_from(DTYPES)),
                draw(st.sampled_from(DTYPES)),
                draw(st.sampled_from(WAYS)),
                draw(layouts(mesh, shape, partial=True, ordered=True)),
                tuple(draw(st.permutations(range(ranks)))),
            )
        )
    return Case(first, second, tuple(values), draw(st.booleans(), label="nested"))


class Holder(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.inner = nn.ParameterList(torch.zeros(v.shape, dtype=v.dtype) for v in values[1:])
        self.p0 = nn.Parameter(torch.zeros(values[0].shape, dtype=values[0].dtype))

    def forward(self):
        return self.p0


def model_of(case, shape):
    mesh = init_device_mesh("cpu", shape)
    model = Holder(case.values)
    dims = {id(p): v.dim for p, v in zip([model.p0, *model.inner], case.values, strict=True)}
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(dims[id(p)]))
    return nn.Sequential(model) if case.nested else model


def given_as(value, wanted, held, rank):
    """The value in the way that was drawn."""
    if value.way == "whole" or (value.way == "mixed ranks" and rank % 2):
        return wanted
    if value.way in ("part", "mixed ranks"):
        return distribute_tensor(wanted, held.device_mesh, held.placements, src_data_rank=None).to_local().clone()
    sizes = value.source.mesh_shape
    if value.way == "slice":  # every rank along the first axis has all of it on its own slice
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXIS_NAMES[: len(sizes)])[AXIS_NAMES[len(sizes) - 1]]
        return distribute_tensor(wanted, mesh, [Shard(len(value.shape) - 1)], src_data_rank=None)
    ranks = torch.tensor(value.order).view(sizes)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=value.source.alias_name)
    entries = value.source.alias_placements
    layout = Layout.from_device_mesh(mesh)(*entries, partial=value.source.partial)
    whole = layout.reset_partial()
    part = wanted[whole.local_slice(value.shape)].clone()  # distribute_tensor wants ranks in order
    return redistribute(from_local(part, whole, shape=value.shape), layout)


def whole_values(case):
    """Small integers, so that no dtype rounds them, and sums of parts are what they were."""
    generator = torch.Generator().manual_seed(len(case.values))
    return [torch.randint(-8, 9, v.shape, generator=generator).to(v.given_dtype) for v in case.values]


def loads_and_returns(case):
    wanted = whole_values(case)
    rank = torch.distributed.get_rank()
    first, second = model_of(case, case.first), model_of(case, case.second)
    held = first.state_dict()
    names = [name for name in held if name.endswith("p0")] + [name for name in held if not name.endswith("p0")]
    source = {
        name: given_as(value, whole, held[name], rank)
        for name, value, whole in zip(names, case.values, wanted, strict=True)
    }
    locals_before = {name: value._local_tensor.data_ptr() for name, value in held.items()}
    assert load_state_dict(first, source) == ([], [])
    for name, value, whole in zip(names, case.values, wanted, strict=True):
        found = first.state_dict()[name]
        assert isinstance(found, DTensor)
        assert found.placements == held[name].placements
        assert found._local_tensor.data_ptr() == locals_before[name]
        expected = whole.to(value.dtype)[Layout.of(found).local_slice(value.shape)]
        assert found.dtype == value.dtype
        assert torch.equal(found.to_local(), expected), name

    full = StateDictOptions(full_state_dict=True)
    assert load_state_dict(second, get_model_state_dict(first)) == ([], [])  # parts, over to the other mesh
    for model in (first, second):
        found = get_model_state_dict(model, options=full)
        assert list(found) == list(held)
        for name, value, whole in zip(names, case.values, wanted, strict=True):
            assert type(found[name]) is torch.Tensor
            assert torch.equal(found[name], whole.to(value.dtype)), name
    on_host = get_model_state_dict(second, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert list(on_host) == ([] if rank else list(held))
    return True


@pytest.mark.tier("full")
@given(cases())
def test_any_layout_loads_into_any_sharding_and_comes_out_whole(case):
    ranks = torch.Size(case.first).numel()
    assert all(sim.run(loads_and_returns, ranks, (case,)))


def test_the_check_sees_a_value_that_went_elsewhere(monkeypatch):
    """Were rows given to the next rank, it would show."""
    from hyper_parallel.core.fully_shard import state_dict

    right = state_dict._cut

    def wrong(whole, target):
        return right(whole, target).flip(0)

    monkeypatch.setattr(state_dict, "_cut", wrong)
    mesh = Layout((2,), ("dp",))
    value = Value((4, 2), 0, torch.float32, torch.float32, "whole", mesh("dp", None), (0, 1))
    with pytest.raises(AssertionError):
        sim.run(loads_and_returns, 2, (Case((2,), (2,), (value,), False),))
