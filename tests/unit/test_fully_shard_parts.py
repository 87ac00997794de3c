"""The pieces of the sharded-parameter engine, each on its own, against a twin that is too simple to be wrong."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sim
from hyper_parallel.core.fully_shard import module as module_file
from hyper_parallel.core.fully_shard.api import HSDPModule
from hyper_parallel.core.fully_shard.comm import Pending, all_gather, all_reduce, reduce_scatter
from hyper_parallel.core.fully_shard.mesh import DataParallelMesh
from hyper_parallel.core.fully_shard.param import ShardedParam, Slot
from hyper_parallel.core.fully_shard.passes import Pass, cast, copy_aliases, mark_inputs, tensors_in, watch_outputs
from hyper_parallel.core.fully_shard.policy import MixedPrecisionPolicy
from hyper_parallel.core.fully_shard.reduce import _put
from hyper_parallel.core.fully_shard.schedule import _neighbour
from hyper_parallel.platform import get_platform

pytestmark = pytest.mark.sim

many = settings(max_examples=200, deadline=None, print_blob=True)


def place(size, rank):
    """The mesh as ShardedParam sees it, without any process group."""
    return DataParallelMesh(None, None, size, rank, None, 1, get_platform("cpu"))


# -- who holds what ------------------------------------------------------------------------------------------------


@many
@given(rows=st.integers(0, 40), rest=st.lists(st.integers(0, 4), max_size=2), ranks=st.integers(1, 9))
def test_parts_are_those_of_torch_chunk(rows, rest, ranks):
    whole = nn.Parameter(torch.arange(float(torch.Size((rows, *rest)).numel())).view(rows, *rest))
    chunks = list(torch.chunk(whole.detach(), ranks))
    empty = whole.detach()[:0]  # torch.chunk leaves empty parts out
    padded = set()
    for rank in range(ranks):
        param = ShardedParam("p", [], whole, place(ranks, rank))
        part = chunks[rank] if rank < len(chunks) else empty
        assert torch.equal(whole.detach()[param.rows], part)
        assert param.local_shape == part.shape
        assert param.local_numel == part.numel() <= param.chunk
        padded.add(param.chunk)
    assert len(padded) == 1  # every rank sends the same amount
    assert padded.pop() * ranks >= whole.numel()


def brute_put(columns, gradient, adding):
    """One element after the other."""
    ranks, chunk = columns.shape
    for row in range(ranks):
        for column in range(chunk):
            index = row * chunk + column
            if index < gradient.numel():
                columns[row, column] = gradient[index] + (columns[row, column] if adding else 0)
            elif not adding:
                columns[row, column] = 0


@many
@given(st.data(), st.integers(1, 6), st.integers(0, 5), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_put_packs_row_by_row_and_pads_with_zeros(data, ranks, chunk, adding, dtype):
    numel = data.draw(st.integers(0, ranks * chunk))
    gradient = torch.arange(1.0, numel + 1).to(dtype)
    start = torch.full((ranks, chunk + 3), 7.0)
    got, wanted = start.clone(), start.clone()
    _put(got[:, 1 : chunk + 1], gradient, adding)
    brute_put(wanted[:, 1 : chunk + 1], gradient.float(), adding)
    assert torch.equal(got, wanted)  # neighbours (column 0 and the last two) are untouched as well


def test_slots_tell_a_module_that_keeps_its_own_list():
    plain, lstm = nn.Linear(2, 2), nn.LSTM(2, 2)
    for module, name in ((plain, "weight"), (lstm, "weight_ih_l0")):
        new = nn.Parameter(torch.zeros_like(getattr(module, name)))
        Slot(module, name).show(new)
        assert getattr(module, name) is new
    assert any(weight is lstm.weight_ih_l0 for weight in lstm._flat_weights)


# -- communication -------------------------------------------------------------------------------------------------


class CountingWork:
    def __init__(self, fails=0):
        self.waits = 0
        self.fails = fails

    def wait(self):
        self.waits += 1
        if self.waits <= self.fails:
            raise ConnectionError("lost")


def test_pending_waits_once_and_finishes_once():
    work, finished, result = CountingWork(), [], torch.ones(1)
    pending = Pending(work, result, lambda: finished.append(work.waits))
    assert [pending.wait(), pending.wait()] == [result, result]
    assert work.waits == 1
    assert finished == [1]  # after the wait, once
    assert Pending(None, result).wait() is result


def test_pending_is_not_through_when_wait_raises():
    finished = []
    pending = Pending(CountingWork(fails=1), torch.ones(1), lambda: finished.append(1))
    with pytest.raises(ConnectionError):
        pending.wait()
    assert finished == []
    pending.wait()
    assert finished == [1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("by_all_to_all", [True, False])
def test_collectives_of_the_engine(ranks, by_all_to_all):
    def rank():
        group = torch.distributed.group.WORLD
        me = torch.distributed.get_rank()
        source = torch.arange(2.0 * ranks) + 100 * me
        part = reduce_scatter(source.clone(), group, by_all_to_all=by_all_to_all).wait()
        gathered = all_gather(torch.empty(2 * ranks), part, group).wait()
        return gathered.tolist(), all_reduce(torch.tensor([float(me)]), group).wait().item()

    with sim.world(ranks) as world:
        results = world.run(rank)
        events = len(world.trace.of_rank(0))
    total = [ranks * i + 100.0 * sum(range(ranks)) for i in range(2 * ranks)]
    assert results == [(total, sum(range(ranks)))] * ranks
    assert events == (0 if ranks == 1 else 3)  # a group of one rank does not communicate


# -- passes --------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.heard = []

    def backward_reaches(self, a_pass):
        self.heard.append("reached")

    def backward_left(self, a_pass):
        self.heard.append("left")


def test_a_pass_hears_of_outputs_before_and_inputs_after():
    recorder = Recorder()
    a_pass = Pass(recorder)
    x, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    args, kwargs = mark_inputs(a_pass, (x, [frozen, x], 3), {"again": x, "text": "t"})
    assert args[0] is args[1][1] is kwargs["again"]
    assert args[0] is not x
    assert args[1][0] is frozen
    assert (args[2], kwargs["text"]) == (3, "t")
    inner = args[0] * 2
    inner.register_hook(lambda g: recorder.heard.append("inside"))
    out = inner + kwargs["again"]
    watch_outputs(a_pass, [out])
    (out * 3).sum().backward()
    assert recorder.heard == ["reached", "inside", "left"]
    assert x.grad.tolist() == [9.0, 9.0]
    assert mark_inputs(a_pass, (frozen,), {}) == ((frozen,), {})


@pytest.mark.parametrize("change", [lambda v, b: v.mul_(2), lambda v, b: b.mul_(2), lambda v, b: None])
def test_views_are_watched_through_changes_in_place(change):
    recorder = Recorder()
    base = torch.ones(3, 2, requires_grad=True) * 2
    view = base[1]
    watch_outputs(Pass(recorder), [view])
    change(view, base)
    view.sum().backward()
    assert "reached" in recorder.heard


@dataclasses.dataclass
class Box:
    inside: torch.Tensor
    label: str


def test_tensors_are_found_cast_and_copied_in_nests():
    a, b = torch.ones(2), torch.arange(2)
    tree = {"x": [a, (b, Box(a, "t"))], "y": None, "kind": Box}
    assert [id(t) for t in tensors_in(tree)] == [id(a), id(b), id(a)]
    low = cast([a, {"again": a, "int": b}], torch.bfloat16)
    assert low[0] is low[1]["again"]
    assert low[0].dtype == torch.bfloat16
    assert low[1]["int"] is b
    assert cast([a], torch.float32)[0] is a
    assert copy_aliases(tree, lambda t: False) is tree
    copied = copy_aliases([a, b], lambda t: t is b)
    assert copied[0] is a
    assert copied[1] is not b
    assert torch.equal(copied[1], b)


# -- small values --------------------------------------------------------------------------------------------------


def test_neighbours_in_a_recorded_order():
    a, b, c = object(), object(), object()
    order = [a, b, a, c]
    assert _neighbour(order, 0, a) == [b]
    assert _neighbour(order, 2, a) == [c]
    assert _neighbour(order, 3, c) == []  # the last
    assert _neighbour(order, 1, c) == []  # the order has changed since
    assert _neighbour(order, -1, a) == []
    assert _neighbour([], 0, a) == []


def test_a_policy_is_a_value():
    policy = MixedPrecisionPolicy(torch.bfloat16)
    assert policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert hash(policy) == hash(MixedPrecisionPolicy(torch.bfloat16))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = None


def test_one_generated_class_per_original():
    first = module_file.wrapped_class(nn.Linear)
    assert first is module_file.wrapped_class(nn.Linear)
    assert first is not module_file.wrapped_class(nn.Bilinear)
    assert first.__mro__[:3] == (first, HSDPModule, nn.Linear)
    assert (first.__name__, first.__module__) == ("HSDPLinear", nn.Linear.__module__)
