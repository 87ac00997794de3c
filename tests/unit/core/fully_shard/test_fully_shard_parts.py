"""The pieces of the sharded-parameter engine, each on its own, against a twin that is too simple to be wrong."""

import dataclasses
import itertools
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel.core.common.groups import group_of
from hyper_parallel.core.fully_shard import module as module_file
from hyper_parallel.core.fully_shard import reduce as reduce_file
from hyper_parallel.core.fully_shard.api import HSDPModule, fully_shard
from hyper_parallel.core.fully_shard.bucket import Bucket, Storage
from hyper_parallel.core.fully_shard.build import _portions
from hyper_parallel.core.fully_shard.comm import (
    Pending,
    all_gather,
    all_gather_each,
    all_reduce,
    reduce_scatter,
    reduce_scatter_each,
)
from hyper_parallel.core.fully_shard.hooks import (
    ForwardCall,
    cast,
    copy_aliases,
    mark_inputs,
    tensors_in,
    watch_outputs,
)
from hyper_parallel.core.fully_shard.param import ManagedParam, ParamSlot
from hyper_parallel.core.fully_shard.placement import (
    DataParallelMesh,
    ParameterPlacement,
    plain_placement,
    resolve_mesh,
)
from hyper_parallel.core.fully_shard.reduce import ALIGNMENT, FusedAllReduce, FusedAllReduces, GradientReducer
from hyper_parallel.core.fully_shard.schedule import followers
from hyper_parallel.core.fully_shard.unit import unit_of
from hyper_parallel.core.fully_shard.utils import FullyShardParamMode, MixedPrecisionPolicy
from hyper_parallel.core.hsdp.api import hsdp
from hyper_parallel.platform import get_platform

pytestmark = pytest.mark.sim

many = settings(max_examples=200)
few = settings(max_examples=40)

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3)


def placement(ranks, rank, dim):
    """Where a plain parameter lives that is split along `dim`, without any process group."""
    data = DataParallelMesh(None, None, ranks, rank, None, 1, get_platform("cpu"), 1)
    return ParameterPlacement(FullyShardParamMode.LOCAL_PARAM, None, (Shard(0 if dim is None else dim),), dim, data)


def numbered(shape):
    """A parameter in which no two elements are the same."""
    return nn.Parameter(torch.arange(1.0, 1 + math.prod(shape)).view(shape))


class FakeGroup:
    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


# -- who holds what ------------------------------------------------------------------------------------------------


@st.composite
def splits(draw):
    """A shape, one of its dims, and a number of ranks."""
    shape = draw(shapes)
    return shape, draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 9))


def parts_by_torch(full, dim, ranks):
    """`torch.chunk`, which leaves empty parts out."""
    chunks = list(torch.chunk(full, ranks, dim))
    return chunks + [full.narrow(dim, 0, 0)] * (ranks - len(chunks))


@pytest.mark.tier("test")
@many
@given(splits())
def test_parts_are_those_of_torch_chunk(split):
    shape, dim, ranks = split
    full = numbered(shape)
    wanted = parts_by_torch(full.detach(), dim, ranks)
    padded = set()
    for rank in range(ranks):
        param = ManagedParam("p", [], full, placement(ranks, rank, dim))
        assert torch.equal(param.shard_of(full.detach()), wanted[rank])
        assert param.local_shape == wanted[rank].shape
        assert param.local_numel == wanted[rank].numel() <= param.chunk
        assert [param.range_of(r)[1] - param.range_of(r)[0] for r in range(ranks)] == [w.shape[dim] for w in wanted]
        padded.add(param.chunk)
    assert len(padded) == 1  # every rank sends the same amount
    assert padded.pop() * ranks >= full.numel()


@pytest.mark.tier("test")
@many
@given(shapes)
def test_a_parameter_that_is_whole_is_one_part(shape):
    for full in (numbered(shape), numbered([])):
        param = ManagedParam("p", [], full, placement(4, 3, None))
        assert param.shard_of(full) is full
        assert (param.ranks, param.chunk, param.local_shape, param.contiguous_on_dim_0) == (
            1,
            full.numel(),
            full.shape,
            True,
        )


@pytest.mark.tier("test")
@many
@given(splits())
def test_rows_cover_the_whole_exactly_once(split):
    shape, dim, ranks = split
    full = numbered(shape)
    param = ManagedParam("p", [], full, placement(ranks, 0, dim))
    wanted = parts_by_torch(full.detach(), dim, ranks)
    room = max(ranks * param.chunk, param.numel) if param.contiguous_on_dim_0 else param.numel
    flat = torch.full((room,), -1.0)
    flat[: param.numel] = full.detach().view(-1)
    wide = torch.full((ranks, param.chunk + 3), -2.0)
    rows = wide[:, 1 : param.chunk + 1]  # of any stride, with neighbours
    seen = torch.zeros(room)
    for (source, target), (count, _) in zip(param.rows_of(flat, rows), param.rows_of(seen, rows), strict=True):
        assert source.shape == target.shape
        target.copy_(source)
        count.add_(1)
    assert seen[: param.numel].eq(1).all()
    assert seen[param.numel :].eq(0).all()  # padding is nobody's
    for row, part in zip(rows, wanted, strict=True):
        assert torch.equal(row[: part.numel()], part.reshape(-1))
        assert row[part.numel() :].eq(-2).all()
    assert wide[:, 0].eq(-2).all()
    assert wide[:, param.chunk + 1 :].eq(-2).all()


def reducer_of(params, ranks):
    """All that packing needs of a reducer; `ranks` None: gradients are not split."""
    split = ranks is not None
    widths = [param.chunk if split else param.numel for param in params]
    return SimpleNamespace(
        scatter=FakeGroup(ranks) if split else None,
        rows=ranks or 1,
        _plan_for=params,
        _starts=[0, *itertools.accumulate(widths)],
        _width=lambda param: param.chunk if split else param.numel,
        _sizes=[*widths, len(params)],
        _flags=lambda used, like: like.new_ones((ranks or 1) * len(used)),
    )


def brute_row(params, dims, gradients, ranks, rank):
    """One element after the other: of each parameter this rank's part and its padding; then, who was used."""
    row = []
    for param, dim, gradient in zip(params, dims, gradients, strict=True):
        part = [] if gradient is None else parts_by_torch(gradient, dim, ranks)[rank].reshape(-1).tolist()
        row += part + [0.0] * (param.chunk - len(part))
    return row + [float(gradient is not None) for gradient in gradients]


@pytest.mark.tier("test")
@many
@given(
    st.lists(st.tuples(splits(), st.booleans()), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_gradients_are_packed_row_by_row_and_padded_with_zeros(members, ranks, dtype, has_place):
    wholes = [numbered(shape) for (shape, _, _), _ in members]
    dims = [dim for (_, dim, _), _ in members]
    params = [ManagedParam("p", [], full, placement(ranks, 0, dim)) for full, dim in zip(wholes, dims, strict=True)]
    gradients = [full.detach().to(dtype) if used else None for full, (_, used) in zip(wholes, members, strict=True)]
    held = [None if gradient is None else gradient.reshape(-1) for gradient in gradients]
    reducer = reducer_of(params, ranks)
    width = reducer._starts[-1] + len(params)
    place = torch.full((ranks * width if has_place else 0,), 7.0)  # what memory may hold
    got = GradientReducer._packed(reducer, held, [used for _, used in members], place)
    assert got.data_ptr() == place.data_ptr() or not has_place
    assert got.view(ranks, width).tolist() == [brute_row(params, dims, gradients, ranks, r) for r in range(ranks)]
    assert held == [None] * len(held)  # freed one by one
    held = [None if gradient is None else gradient.reshape(-1) for gradient in gradients]
    rows = torch.full((ranks, width), 7.0)
    at_once = GradientReducer._pack_at_once(reducer, held, [used for _, used in members], rows)
    possible = (
        used and param.numel and param.contiguous_on_dim_0 for param, (_, used) in zip(params, members, strict=True)
    )
    assert at_once == all(possible)
    assert not at_once or torch.equal(rows, got.view(ranks, width))


def test_gradients_that_are_not_split_are_packed_as_one_row():
    params = [ManagedParam("p", [], numbered(shape), placement(2, 0, None)) for shape in ([2, 3], [], [4])]
    held = [torch.arange(6.0), torch.tensor([9.0]), None]
    got = GradientReducer._packed(reducer_of(params, None), held, [True, True, False], torch.full((14,), 7.0))
    assert got.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def brute_portions(sizes, limit):
    """Cut before whatever would go beyond the limit."""
    if limit < 0:
        return [list(range(len(sizes)))]
    portions = [[0]]
    for index in range(1, len(sizes)):
        if sum(sizes[i] for i in portions[-1]) + sizes[index] > limit:
            portions.append([])
        portions[-1].append(index)
    return portions


@pytest.mark.tier("test")
@many
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([torch.float32, torch.bfloat16, torch.complex128])), min_size=1
    ),
    st.sampled_from([-1, 0, 1, 8, 40, 100, 10**6]),
)
def test_portions_of_gradients(members, limit):
    params = [
        SimpleNamespace(index=index, numel=numel, local=torch.empty(0, dtype=dtype))
        for index, (numel, dtype) in enumerate(members)
    ]
    got = [[param.index for param in portion] for portion in _portions(params, limit)]
    sizes = [n * dtype.itemsize for n, dtype in members]
    assert got == brute_portions(sizes, limit)
    if limit == 0 and 0 not in sizes:
        assert got == [[index] for index in range(len(params))]


def test_slots_tell_a_module_that_keeps_its_own_list():
    plain, lstm = nn.Linear(2, 2), nn.LSTM(2, 2)
    for module, name in ((plain, "weight"), (lstm, "weight_ih_l0")):
        new = nn.Parameter(torch.zeros_like(getattr(module, name)))
        ParamSlot(module, name).show(new)
        assert getattr(module, name) is new
    assert any(weight is lstm.weight_ih_l0 for weight in lstm._flat_weights)


# -- buckets -------------------------------------------------------------------------------------------------------


def make_bucket(mesh, values, dims, *, flat=False, param_dtype=None, on_host=False):
    """A bucket over new parameters with these values; `dims`: where each is split, None: nowhere."""
    data = resolve_mesh(mesh, {"cpu"})
    owner = nn.ParameterList([nn.Parameter(value.clone()) for value in values])
    wholes = list(owner)
    params = [
        ManagedParam(
            f"p{index}",
            [ParamSlot(owner, str(index))],
            full,
            plain_placement(full, f"p{index}", data, lambda p, d=dim: Shard(d or 0), None, replicate=dim is None),
        )
        for index, (full, dim) in enumerate(zip(wholes, dims, strict=True))
    ]
    group = None if dims[0] is None else data.shard_group
    storage = Storage(get_platform("cpu"), flat=flat, on_host=on_host)
    bucket = Bucket(params, wholes, group, storage, param_dtype)
    bucket.show_shards()
    return bucket


def gather(bucket, **options):
    bucket.finish_gather(bucket.start_gather().wait(), **options)
    return [param.unsharded.detach().clone() for param in bucket.params]


@st.composite
def bucket_contents(draw):
    members = draw(st.lists(splits(), min_size=1, max_size=4))
    return [numbered(shape).detach() + 100 * i for i, (shape, _, _) in enumerate(members)], [
        dim for _, dim, _ in members
    ]


@pytest.mark.parametrize("engine", ["fully_shard", "hsdp", "hsdp, traced"])
def test_recurrent_modules_do_not_move_what_is_gathered(engine, monkeypatch):
    def flatten(module: nn.RNNBase) -> None:
        """As with cuDNN, which the CPU lacks: the weights get memory of their own, and no version tells."""
        for weight in module._flat_weights:
            weight.data = weight.detach().clone()

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)

    def losses(wrap) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LSTM(5, 4, batch_first=True))
        wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        for _ in range(3):
            loss = model(torch.linspace(-1, 1, 30).view(3, 2, 5))[0].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def sharded() -> list[float]:
        if engine == "fully_shard":
            return losses(lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))))
        return losses(lambda model: hsdp(model, threshold=0, use_eager_hook=engine == "hsdp"))

    for found in sim.run(sharded, 2):
        assert found == pytest.approx(losses(lambda model: None), rel=1e-4)


@pytest.mark.tier("test")
@few
@given(bucket_contents(), st.integers(1, 4), st.booleans(), st.sampled_from([None, torch.float64]))
def test_a_bucket_gathers_what_was_put_into_it(contents, ranks, flat, param_dtype):
    values, dims = contents

    def rank():
        mesh = init_device_mesh("cpu", (ranks,))
        bucket = make_bucket(mesh, values, dims, flat=flat, param_dtype=param_dtype)
        for param, value, dim in zip(bucket.params, values, dims, strict=True):
            assert torch.equal(param.local, parts_by_torch(value, dim, ranks)[dist.get_rank()])
            assert param.sharded.shape == value.shape
        if flat:
            assert bucket.shards.numel() == sum(param.chunk for param in bucket.params)
            for param, start in zip(bucket.params, bucket.starts, strict=False):
                end = start + param.local_numel
                assert param.local_numel == 0 or param.local.data_ptr() == bucket.shards[start:].data_ptr()
                assert bucket.shards[end : start + param.chunk].eq(0).all()  # padding
        else:
            assert bucket.shards is None
        for _ in range(2):
            for got, value in zip(gather(bucket), values, strict=True):
                assert got.dtype == (param_dtype or value.dtype)
                assert torch.equal(got.to(value.dtype), value)
            assert bucket.gathered
            bucket.free()
            assert not bucket.gathered
            assert bucket.unsharded_buffer.untyped_storage().nbytes() == 0
            for param in bucket.params:  # as an optimizer does
                with torch.no_grad():
                    param.sharded.add_(1.0)
            values_now = [value + 1 for value in values]
            assert all(torch.equal(got.to(torch.float32), v) for got, v in zip(gather(bucket), values_now, strict=True))
            bucket.free()
            with torch.no_grad():
                for param in bucket.params:
                    param.sharded.sub_(1.0)
        return bucket.was_replaced()

    with sim.world(ranks) as world:
        assert world.run(rank) == [False] * ranks
        gathers = [event.op for event in world.trace.of_rank(0)]
    assert gathers == (["all_gather"] * 4 if ranks > 1 else [])  # one at a time, whatever is in it


@sim.ranks(2, backends=("sim",))
def test_parameters_of_other_dtypes_are_gathered_apart(ctx):
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).bfloat16())
    unit = unit_of(fully_shard(layers, mesh=init_device_mesh("cpu", (2,))))
    assert [[param.name for param in bucket.params] for bucket in unit.buckets] == [["0.weight"], ["1.weight"]]


@sim.ranks(4, backends=("sim",))
def test_a_group_of_a_mesh_is_taken_for_its_own_ranks_only(ctx):
    mesh, me = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), dist.get_rank()
    own, other = (me % 2, me % 2 + 2), (me // 2 * 2, me // 2 * 2 + 1)
    assert group_of(own, ("dp",), mesh) is mesh.get_group("dp")
    assert tuple(dist.get_process_group_ranks(group_of(other, ("dp",), mesh))) == other


@pytest.mark.parametrize("flat", [True, False])
@sim.ranks(2, backends=("sim",))
def test_a_bucket_notices_that_its_parts_were_replaced(ctx, flat):
    values = [numbered([3, 2]).detach(), numbered([4, 5]).detach()]
    bucket = make_bucket(init_device_mesh("cpu", (2,)), values, [0, 1], flat=flat)
    before = bucket.version
    with torch.no_grad():
        bucket.params[1].sharded.mul_(2)
    versions = [before != bucket.version, bucket.was_replaced()]
    owner = bucket.params[0].slots[0].module
    owner.double()
    versions.append(bucket.was_replaced())
    bucket.take_over()
    versions.append(bucket.was_replaced())
    assert [got.dtype for got in gather(bucket)] == [torch.float64] * 2
    assert torch.equal(bucket.params[1].unsharded, values[1].double() * 2)
    assert (bucket.shards is not None) == flat
    if flat:  # still one buffer, and optimizers change it
        assert bucket.shards.dtype == torch.float64
        with torch.no_grad():
            bucket.params[0].sharded.zero_()
        assert bucket.shards[: bucket.params[0].local_numel].eq(0).all()
    bucket.free()
    assert versions == [True, False, True, False]


def test_parameters_that_are_whole_are_used_where_they_are():
    values = [numbered([3, 2]).detach(), torch.tensor(2.5)]

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        bucket = make_bucket(mesh, values, [None, None])
        assert bucket.aliased
        assert all(torch.equal(got, value) for got, value in zip(gather(bucket), values, strict=True))
        assert [param.unsharded.data_ptr() for param in bucket.params] == [p.local.data_ptr() for p in bucket.params]
        bucket.free()
        assert torch.equal(bucket.params[0].unsharded, values[0])  # nothing to free
        copied = make_bucket(mesh, values, [None, None], param_dtype=torch.bfloat16)
        assert not copied.aliased
        assert [got.tolist() for got in gather(copied)] == [value.tolist() for value in values]
        copied.free()
        assert copied.unsharded_buffer.untyped_storage().nbytes() == 0

    with sim.world(2) as world:
        world.run(rank)
        assert world.trace.events == []


def test_a_kept_shard_is_the_ranks_own_and_gaps_of_what_is_sent_are_zero():
    def rank():
        mesh, me = init_device_mesh("cpu", (4,)), dist.get_rank()
        bucket = make_bucket(mesh, [numbered([6, 3]).detach()], [0], flat=False)
        bucket.post_forward_mesh = (group_of((me // 2 * 2, me // 2 * 2 + 1), ("shard",)), me % 2)
        gather(bucket, keep_post_forward_shard=True)
        place = torch.full((bucket.starts[-1],), math.nan)
        bucket._pack(place)
        return bucket.post_forward_shard.tolist(), place.tolist()

    full = [*range(1, 19), *[0.0] * 6]  # 4 shards of two rows; the last one has none
    for me, (kept, packed) in enumerate(sim.run(rank, 4)):
        assert kept == full[me % 2 * 12 : me % 2 * 12 + 12]
        assert packed == full[me * 6 : me * 6 + 6]


@pytest.mark.tier("test")
@few
@given(bucket_contents(), st.sampled_from([1, 2, 4]))
def test_a_smaller_world_gathers_the_same(contents, size):
    values, dims = contents

    def rank():
        mesh, me = init_device_mesh("cpu", (4,)), dist.get_rank()
        bucket = make_bucket(mesh, values, dims)
        members = tuple(range(me // size * size, me // size * size + size))
        bucket.post_forward_mesh = (group_of(members, ("shard",)), me % size)
        gather(bucket, keep_post_forward_shard=True)
        assert bucket.post_forward_shard.numel() == 4 * bucket.starts[-1] // size
        bucket.free()
        assert all(torch.equal(got, value) for got, value in zip(gather(bucket), values, strict=True))
        assert bucket.post_forward_shard is None  # used once
        bucket.free()
        gather(bucket)

    with sim.world(4) as world:
        world.run(rank)
        gathers = [len(event.group) for event in world.trace.of_rank(0) if event.op == "all_gather"]
    assert gathers == [4, size, 4] if size > 1 else [4, 4]


# -- one all_reduce for several units ------------------------------------------------------------------------------


@pytest.mark.tier("test")
@many
@given(
    st.lists(st.integers(0, 300), max_size=12),
    st.integers(1, 2000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_places_in_a_shared_buffer_are_aligned_and_disjoint(sizes, capacity, dtype):
    shared = FusedAllReduce(FakeGroup(1), capacity, torch.empty(0, dtype=dtype))
    shared.buffer.fill_(7)
    step = ALIGNMENT // dtype.itemsize
    filled = 0
    for number, size in enumerate(sizes):
        start = -(-filled // step) * step
        place = shared.take(size)
        assert (place is None) == (start + size > capacity)
        if place is None:
            continue
        assert place.numel() == size
        assert place.storage_offset() == start
        assert start * dtype.itemsize % 512 == 0
        assert shared.buffer[filled:start].eq(0).all()  # gaps are reduced as well: let them be numbers
        assert place.eq(7).all()  # so far nobody's
        place.fill_(-number - 1)
        filled = start + size
    assert shared.filled == filled
    assert shared.buffer[filled:].eq(7).all()
    shared.close()
    assert shared.take(0) is None


def test_a_shared_all_reduce_starts_when_it_is_closed_and_all_are_there():
    def rank():
        group = dist.group.WORLD
        shared = FusedAllReduce(group, 1000, torch.empty(0))
        first, second = shared.take(3), shared.take(2)
        log = []

        def note():
            log.append(shared._work is not None)

        first.fill_(1.0)
        shared.arrived(), note()
        shared.close(), note()
        second.fill_(dist.get_rank())
        shared.arrived(), note()
        shared.wait()
        shared.wait()
        return log, first.tolist(), second.tolist()

    with sim.world(3) as world:
        assert world.run(rank) == [([False, False, True], [3.0] * 3, [3.0] * 2)] * 3
        events = world.trace.of_rank(0)
    assert [event.op for event in events] == ["all_reduce"]
    assert events[0].input_shapes == ((130,),)  # 3, a gap up to 128, 2; not the whole buffer


def test_shares_close_what_is_full_and_part_groups_and_dtypes(monkeypatch):
    monkeypatch.setattr(reduce_file, "FUSED_BYTES", 4 * 1024)
    one, other = FakeGroup(1), FakeGroup(1)
    single, double = torch.empty(0), torch.empty(0, dtype=torch.float64)
    shares = FusedAllReduces(total=10**6)
    a, first = shares.place(one, 500, single)
    assert a.buffer.numel() == 1024
    assert first.numel() == 500
    b, _ = shares.place(one, 500, single)
    assert b is a
    assert not a.closed
    c, large = shares.place(one, 5000, single)
    assert c is not a
    assert a.closed  # no more come
    assert large.numel() == c.buffer.numel() == 5000  # one that is too large has a buffer to itself
    d, _ = shares.place(other, 10, single)
    e, _ = shares.place(one, 10, double)
    half, _ = shares.place(other, 10, torch.empty(0, dtype=torch.bfloat16))  # beside `d`, which has room
    assert len({id(x) for x in (a, c, d, e, half)}) == 5
    assert (e.buffer.dtype, half.buffer.dtype) == (torch.float64, torch.bfloat16)
    assert e.buffer.numel() == 512  # 4 KB
    shares.close()
    assert all(x.closed for x in (a, c, d, e))
    f, _ = shares.place(other, 10, single)
    assert f is not d
    small, _ = FusedAllReduces(total=64).place(one, 10, single)
    assert small.buffer.numel() == 16  # no larger than all units together need


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
@pytest.mark.parametrize("has_place", [True, False])
def test_collectives_of_the_engine(ranks, by_all_to_all, has_place):
    def rank():
        group, me = dist.group.WORLD, dist.get_rank()
        source = torch.arange(2.0 * ranks) + 100 * me
        place = torch.full((4,), -1.0)
        out = place[1:3] if has_place else None
        part = reduce_scatter(source.clone(), group, by_all_to_all=by_all_to_all, out=out).wait()
        assert not has_place or (part.data_ptr() == out.data_ptr() and place[0] == place[3] == -1)
        gathered = all_gather(torch.empty(2 * ranks), part, group).wait()
        return gathered.tolist(), all_reduce(torch.tensor([float(me)]), group).wait().item()

    with sim.world(ranks) as world:
        results = world.run(rank)
        events = len(world.trace.of_rank(0))
    total = [ranks * i + 100.0 * sum(range(ranks)) for i in range(2 * ranks)]
    assert results == [(total, sum(range(ranks)))] * ranks
    assert events == (0 if ranks == 1 else 3)  # a group of one rank does not communicate


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_several_tensors_in_one_operation(ranks):
    sizes = (2, 0, 3, 1)

    def rank():
        group, me = dist.group.WORLD, dist.get_rank()
        parts = [torch.arange(float(size)) + 10 * i + 100 * me for i, size in enumerate(sizes)]
        gathered = torch.full((ranks * sum(sizes),), -1.0)
        targets = list(gathered.split([ranks * size for size in sizes]))
        assert all_gather_each(targets, parts, group, gathered).wait() is gathered
        for i, (target, size) in enumerate(zip(targets, sizes, strict=True)):
            assert torch.equal(target, torch.cat([torch.arange(float(size)) + 10 * i + 100 * r for r in range(ranks)]))
        kept = torch.full((sum(sizes),), -1.0)
        assert reduce_scatter_each(list(kept.split(sizes)), [t + me for t in targets], group, kept).wait() is kept
        wanted = [ranks * part + sum(range(ranks)) for part in parts]
        assert torch.equal(kept, torch.cat(wanted))

    with sim.world(ranks) as world:
        world.run(rank)
        assert [event.op for event in world.trace.of_rank(0)] == (
            [] if ranks == 1 else ["all_gather", "reduce_scatter"]
        )


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sending_from_where_gradients_are_changes_no_bit(shape, dtype):
    """Packed and copied out, or not; with a parameter that only some ranks use, one that none does, and padding."""

    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.sometimes, self.never = nn.Linear(3, 7), nn.Linear(3, 7), nn.Linear(3, 2)

        def forward(self, x, both):
            return self.used(x) + (self.sometimes(x) if both else 0)

    def rank(each):
        torch.manual_seed(0)
        model = fully_shard(Some().to(dtype), mesh=init_device_mesh("cpu", shape))
        me, unit = dist.get_rank(), unit_of(model)
        for reducer in unit.reducers:
            reducer.sends_each &= each
        for bucket in unit.buckets:
            bucket._can_gather_each &= each
        for step in range(3):
            model.set_requires_gradient_sync(step != 1)
            (model(torch.full((2, 3), 0.5 + me + step, dtype=dtype), both=me == 1).float().square().mean()).backward()
        assert model.never.weight.grad is None
        return [p.grad.to_local() for p in model.parameters() if p.grad is not None]

    ranks = math.prod(shape)
    together, apart = (sim.run(rank, ranks, (each,)) for each in (True, False))
    for ours, theirs in zip(together, apart, strict=True):
        assert len(ours) == len(theirs) == 4
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# -- passes --------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.heard = []

    def pre_backward(self, call):
        self.heard.append("reached")

    def post_backward(self, call):
        self.heard.append("left")


def test_a_pass_hears_of_outputs_before_and_inputs_after():
    recorder = Recorder()
    call = ForwardCall(recorder)
    x, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    args, kwargs = mark_inputs(call, (x, [frozen, x], 3), {"again": x, "text": "t"})
    assert args[0] is args[1][1] is kwargs["again"]
    assert args[0] is not x
    assert args[1][0] is frozen
    assert (args[2], kwargs["text"]) == (3, "t")
    inner = args[0] * 2
    inner.register_hook(lambda g: recorder.heard.append("inside"))
    out = inner + kwargs["again"]
    watch_outputs(call, [out])
    (out * 3).sum().backward()
    assert recorder.heard == ["reached", "inside", "left"]
    assert x.grad.tolist() == [9.0, 9.0]
    assert mark_inputs(call, (frozen,), {}) == ((frozen,), {})


@pytest.mark.parametrize("change", [lambda v, b: v.mul_(2), lambda v, b: b.mul_(2), lambda v, b: None])
def test_views_are_watched_through_changes_in_place(change):
    recorder = Recorder()
    base = torch.ones(3, 2, requires_grad=True) * 2
    view = base[1]
    watch_outputs(ForwardCall(recorder), [view])
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


@dataclasses.dataclass(frozen=True)
class Frozen:
    inside: Box
    more: list


@dataclasses.dataclass
class Derived:
    x: torch.Tensor
    twice: torch.Tensor = dataclasses.field(init=False)
    never: torch.Tensor = dataclasses.field(init=False)
    made: int = 0

    def __post_init__(self):
        self.twice = 2 * self.x
        self.made += 1
        self.label = "kept"


@dataclasses.dataclass(slots=True)
class Slots:
    x: torch.Tensor


def test_dataclasses_are_cast_and_copied_and_stay_what_they_are():
    a = torch.ones(2)
    frozen = Frozen(Box(a, "t"), [Box(a, "u"), Slots(a)])
    low = cast({"frozen": frozen}, torch.bfloat16)["frozen"]
    assert type(low) is Frozen
    assert low.inside.inside is low.more[0].inside
    assert low.inside.inside is low.more[1].x
    assert low.inside.inside.dtype == torch.bfloat16
    assert (low.inside.label, low.more[0].label) == ("t", "u")
    assert frozen.inside.inside is a, "the caller's own"
    derived = cast(Derived(a), torch.bfloat16)
    assert (derived.x.dtype, derived.twice.dtype, derived.made, derived.label) == (torch.bfloat16,) * 2 + (1, "kept")
    assert cast(frozen, torch.float32) is frozen
    assert cast(Box, torch.bfloat16) is Box
    copied = copy_aliases([frozen], lambda t: t is a)[0]
    assert copied.inside.inside is not a
    assert torch.equal(copied.inside.inside, a)


# -- small values --------------------------------------------------------------------------------------------------


def test_followers_in_a_recorded_order():
    a, b, c = object(), object(), object()
    assert followers([a, b, a, c]) == {a: [c], b: [a], c: []}  # of one that ran twice: what came after the last time
    assert followers([a, b, a]) == {a: [], b: [a]}
    assert followers([]) == {}


def test_a_policy_is_a_value():
    policy = MixedPrecisionPolicy(torch.bfloat16)
    assert policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert hash(policy) == hash(MixedPrecisionPolicy(torch.bfloat16))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_is_used_twice_is_gathered_and_reduced_once_per_backward(use_reentrant):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.again = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            x = self.plain(x)
            for _ in range(2):
                x = checkpoint(self.again, x, use_reentrant=use_reentrant)
            return x

    def rank():
        model = Twice()
        calls = []
        model.again.register_forward_pre_hook(lambda m, args: calls.append(1))
        for module in (model.plain, model.again, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        with torch.no_grad():
            model(torch.ones(2, 3))
        for _ in range(3):
            model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        assert len(calls) == 2 + 3 * 4

    with sim.world(2) as world:
        world.run(rank)
    seen = Counter(event.op for event in world.trace.of_rank(0))
    # In the evaluation `plain` once and `again` twice; the root has no parameters. In a step each use is gathered, and
    # once more what backward comes to.
    # Reentrant checkpointing runs a backward of its own for each use, none of which knows of the other.
    uses = 2 if use_reentrant else 1
    assert seen == {"all_gather": 3 + 3 * (3 + 1 + uses), "reduce_scatter": 3 * (1 + uses)}


def test_one_generated_class_per_original():
    first = module_file.wrapped_class(nn.Linear)
    assert first is module_file.wrapped_class(nn.Linear)
    assert first is not module_file.wrapped_class(nn.Bilinear)
    order = first.__mro__
    assert order[0] is first
    assert order.index(HSDPModule) < order.index(nn.Linear)
    assert (first.__name__, first.__module__) == ("HSDPLinear", nn.Linear.__module__)
