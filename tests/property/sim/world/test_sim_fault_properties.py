"""Drawn faults: every surviving rank finishes, joins a new group or raises, in the same way each time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import sim
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim import faults
from sim.kernel import threads
from sim.strategies import fault_plans, parallel_dims

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")]

STEPS = 4
SEEDS = st.integers(0, 2**32)
REGIONS = ("backward", "optimizer")


def loop() -> list[float]:
    """Sums, one after the other."""
    sums = []
    for step in range(STEPS):
        x = torch.tensor([float(dist.get_rank() + step)])
        dist.all_reduce(x)
        sums.append(x.item())
    return sums


def data_parallel() -> list[float]:
    """Gradients that are reduced while the rest of them is computed, in regions."""
    weights = torch.zeros(3)
    for step in range(2):
        with sim.region("backward"):
            grads = [torch.full((1,), float(dist.get_rank() + step)) for _ in weights]
            works = []
            for grad in grads:
                sim.advance(0.1)
                works.append(dist.all_reduce(grad, dist.ReduceOp.AVG, async_op=True))
        with sim.region("optimizer"):
            for work in works:
                work.wait()
            weights -= torch.cat(grads)
            dist.barrier()
    return weights.tolist()


def ring() -> list[float]:
    """Messages to the next rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    got = []
    for step in range(STEPS):
        into = torch.zeros(1)
        mine = torch.tensor([float(rank * 10 + step)])
        works = [dist.isend(mine, (rank + 1) % size), dist.irecv(into, (rank - 1) % size)] if size > 1 else []
        for work in works:
            work.wait()
        got.append(into.item())
    return got


def groups() -> list[float]:
    """Sums in rows and columns, which loses some ranks at one moment and others at another."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [list(range(size))[start : start + 2] for start in range(0, size, 2)]
    columns = [list(range(size))[start::2] for start in range(min(2, size))]
    of_rows, of_columns = ([dist.new_group(members) for members in each] for each in (rows, columns))
    row = next(group for group, members in zip(of_rows, rows, strict=True) if rank in members)
    column = next(group for group, members in zip(of_columns, columns, strict=True) if rank in members)
    x = torch.tensor([float(rank)])
    for _ in range(2):
        dist.all_reduce(x, group=row)
        dist.all_reduce(x, group=column)
    return x.tolist()


def bits_of_survivors() -> list[int]:
    """Sums that go on without those that are lost, in a new group."""
    group, sums, failures = None, [], 0
    while len(sums) < STEPS:
        x = torch.tensor([2 ** dist.get_rank()])
        try:
            dist.all_reduce(x, group=group)
        except sim.RankLost as error:
            failures += 1
            assert failures < 20, "never comes together again"
            if group is not None:
                dist.destroy_process_group(group)
            left = [rank for rank in range(dist.get_world_size()) if rank not in error.ranks]
            group = dist.new_group(left, use_local_synchronization=True)
            continue
        sums.append(int(x.item()))
    return sums


def bits_of_the_elastic() -> list[int]:
    """The same with a smaller default group, in which ranks have new numbers."""
    me, size = dist.get_rank(), dist.get_world_size()
    sums, failures = [], 0
    while len(sums) < STEPS:
        x = torch.tensor([2**me])
        try:
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            dist.all_reduce(x)
        except sim.RankLost as error:
            failures += 1
            assert failures < 20, "never comes together again"
            if dist.is_initialized():
                dist.destroy_process_group()
            left = [rank for rank in range(size) if rank not in error.ranks]
            os.environ.update(RANK=str(left.index(me)), WORLD_SIZE=str(len(left)))
            continue
        assert x.item().bit_count() == dist.get_world_size()
        sums.append(int(x.item()))
    return sums


Plan = list[faults.Fault]
PROGRAMS = (loop, data_parallel, ring, groups)


def outcome(
    body: Callable[[], Any], world_size: int, plan: Plan, seed: int, **options: Any
) -> tuple[Any, list[sim.Event], list[faults.Happening], list[faults.Fault]]:
    """What came out, what was communicated, what happened and what did not; all ranks have ended."""
    with sim.world(world_size, seed=seed, faults=plan, **options) as world:
        try:
            found: Any = world.run(body)
        except sim.RankFailed as error:
            found = f"{type(error).__name__}: {error}"
        assert threads.busy_threads() == 0
        events = [event._replace(span=None) for event in world.trace.in_order()]
        return found, events, world.faults.log, world.faults.pending


@st.composite
def cases(draw: st.DrawFn, **options: Any) -> tuple[int, Plan]:
    world_size = draw(st.integers(1, 5))
    return world_size, draw(fault_plans(world_size, regions=REGIONS, **options))


def lost(log: list[faults.Happening]) -> set[int]:
    return {each.rank for each in log if isinstance(each.fault, (faults.Kill, faults.Freeze))}


@pytest.mark.parametrize("body", PROGRAMS)
@given(case=cases(), seed=SEEDS)
def test_every_rank_finishes_or_raises(body: Callable[[], Any], case: tuple[int, Plan], seed: int) -> None:
    world_size, plan = case
    found, _, log, _ = outcome(body, world_size, plan, seed, machine="laptop-cpu")
    if isinstance(found, str):
        assert lost(log) or any(isinstance(each.fault, faults.Drop) for each in log)
        assert found.startswith("RankFailed[RankLost]: ")
        assert found.endswith(f", faults={plan!r})")
    else:
        assert {rank for rank, result in enumerate(found) if result is None} == lost(log)


@given(body=st.sampled_from((*PROGRAMS, bits_of_survivors, bits_of_the_elastic)), case=cases(), seed=SEEDS)
def test_a_plan_and_a_seed_fix_everything(body: Callable[[], Any], case: tuple[int, Plan], seed: int) -> None:
    world_size, plan = case
    copy = eval(repr(plan), {"sim": sim})
    assert copy == plan
    kinds = (faults.Drop, faults.Corrupt) if body in (bits_of_survivors, bits_of_the_elastic) else ()
    plan, copy = ([each for each in faults_ if not isinstance(each, kinds)] for faults_ in (plan, copy))
    # As text, since corrupt data can be nan, which equals nothing.
    assert repr(outcome(body, world_size, plan, seed)) == repr(outcome(body, world_size, copy, seed))


@given(body=st.sampled_from(PROGRAMS), case=cases(), seed=SEEDS)
def test_what_does_not_happen_changes_nothing(body: Callable[[], Any], case: tuple[int, Plan], seed: int) -> None:
    world_size, plan = case
    # Past the last operation; and no link is slow where communication takes no time.
    never = [replace(each, at=1000) if hasattr(each, "at") else each for each in plan]
    never = [each for each in never if not isinstance(each, faults.Slow)]
    results, events, _, _ = outcome(body, world_size, [], seed)
    assert outcome(body, world_size, never, seed) == (results, events, [], never)


@pytest.mark.parametrize("body", [bits_of_survivors, bits_of_the_elastic])
@given(case=cases(kinds=(faults.Kill, faults.Freeze, faults.Slow, faults.SlowLink), max_operations=6), seed=SEEDS)
def test_survivors_come_together_again(body: Callable[[], Any], case: tuple[int, Plan], seed: int) -> None:
    world_size, plan = case
    results, _, log, _ = outcome(body, world_size, plan, seed)
    assert not isinstance(results, str), results
    survivors = set(range(world_size)) - lost(log)
    assert {rank for rank, result in enumerate(results) if result is not None} == survivors
    sums = results[min(survivors)]
    assert [results[rank] for rank in survivors] == [sums] * len(survivors)
    with_whom = [{rank for rank in range(world_size) if total >> rank & 1} for total in sums]
    assert all(survivors <= later <= earlier for earlier, later in pairwise(with_whom))


@given(case=cases(kinds=(faults.Corrupt,), max_operations=3), seed=SEEDS)
def test_the_log_says_which_bits_were_flipped(case: tuple[int, Plan], seed: int) -> None:
    world_size, plan = case

    def body() -> list[torch.Tensor]:
        mine = torch.arange(3) + 10 * dist.get_rank()
        kept = mine.clone()
        gathered = [torch.zeros(3, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        dist.broadcast(mine, src=0)
        total = torch.arange(2) + dist.get_rank()
        dist.all_reduce(total)
        assert dist.get_rank() or torch.equal(mine, kept)
        return [*gathered, mine, total]

    results, _, log, _ = outcome(body, world_size, plan, seed)
    ranks = range(world_size)
    given_ = [{"all_gather": torch.arange(3) + 10 * rank, "all_reduce": torch.arange(2) + rank} for rank in ranks]
    given_[0]["broadcast"] = torch.arange(3)
    for happening in log:
        for flip in happening.flips:
            data = given_[happening.rank][happening.op].view(torch.uint8)
            data[8 * flip.element + flip.bit // 8] ^= 1 << flip.bit % 8
    gathered = [each["all_gather"] for each in given_]
    total = torch.stack([each["all_reduce"] for each in given_]).sum(0)
    for rank, (*parts, copy, sum_) in enumerate(results):
        assert [part.tolist() for part in parts] == [part.tolist() for part in gathered]
        assert copy.tolist() == (torch.arange(3) if rank == 0 else given_[0]["broadcast"]).tolist()
        assert sum_.tolist() == total.tolist()


def trains(folder: str) -> list[float]:
    """Steps with momentum; rank 0 keeps the state of each step, and a run begins with what was kept last."""
    path, weight, momentum, begin = os.path.join(folder, "kept.pt"), torch.zeros(2), torch.zeros(2), 0
    if os.path.exists(path):
        weight, momentum, begin = torch.load(path)
    for step in range(begin, STEPS):
        grad = weight * 0.3 + torch.arange(2) * (dist.get_rank() + 1) / 7 + step
        with sim.region("backward"):
            dist.all_reduce(grad, dist.ReduceOp.AVG)
        momentum = 0.9 * momentum + grad
        weight = weight - 0.1 * momentum
        with sim.region("optimizer"):
            dist.barrier()
        if dist.get_rank() == 0:
            torch.save((weight, momentum, step + 1), path + ".new")
            os.replace(path + ".new", path)
    return weight.tolist()


@given(case=cases(kinds=(faults.Kill, faults.Freeze), max_operations=2 * STEPS, survivors=0), seed=SEEDS)
def test_training_goes_on_bit_for_bit(case: tuple[int, Plan], seed: int) -> None:
    world_size, plan = case
    with tempfile.TemporaryDirectory() as folder:
        expected = sim.run(trains, world_size, (folder,))
    with tempfile.TemporaryDirectory() as folder:
        outcome(lambda: trains(folder), world_size, plan, seed)
        assert sim.run(trains, world_size, (folder,), seed=seed + 1) == expected


@given(parallel_dims(max_ranks=256) | st.integers(1, 256).flatmap(lambda ranks: parallel_dims(ranks=ranks)))
def test_drawn_degrees_fit_the_ranks(dims: ParallelDims) -> None:
    assert 1 <= dims.dp_size * dims.non_dp_size == dims.world_size <= 256


@given(st.integers(1, 256).flatmap(lambda ranks: st.tuples(st.just(ranks), parallel_dims(ranks=ranks))))
def test_drawn_degrees_fit_exactly_where_asked(case: tuple[int, ParallelDims]) -> None:
    ranks, dims = case
    assert dims.world_size == ranks
