"""Interleavings that hypothesis draws: right programs do not depend on them, wrong ones fail in the simplest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import sim
from sim.kernel import threads
from sim.strategies import interleavings

pytestmark = pytest.mark.sim

# Seeds of its own and no database: an example found once must not decide what the next run finds.
ALONE = settings(database=None, derandomize=True, max_examples=300)


def simplest(fails: Callable[[tuple[int, ...]], bool], max_ranks: int = 3) -> tuple[int, ...]:
    return find(interleavings(max_ranks), fails, settings=ALONE)


# -- programs with a fault of order ------------------------------------------------------------------------------


def lost_update(account: dict[str, int]) -> None:
    """Every rank adds one to what it has read before it gave up its turn."""
    read = account["balance"]
    time.sleep(0)
    account["balance"] = read + 1


def last_writer(store: Any) -> str:
    """Whoever comes last decides, because nobody waits for rank 0 to have written."""
    store.set("config", f"of rank {dist.get_rank()}")
    dist.barrier()
    return store.get("config").decode()


def first_message() -> list[int] | None:
    """Rank 0 takes messages in the order in which they come."""
    if dist.get_rank():
        return dist.send(torch.tensor([dist.get_rank()]), 0)
    taken = []
    for _ in range(dist.get_world_size() - 1):
        dist.recv(message := torch.zeros(1, dtype=torch.int64))
        taken.append(int(message))
    return taken


def shared_list(log: list[int], barriers: int) -> None:
    for _ in range(barriers):
        dist.barrier()
    log.append(dist.get_rank())


def order_after(barriers: int, schedule: tuple[int, ...] | None, world_size: int = 3, **options: Any) -> list[int]:
    log: list[int] = []
    sim.run(shared_list, world_size, (log, barriers), schedule=schedule, **options)
    return log


def test_the_simplest_interleaving_in_which_another_rank_is_first():
    assert order_after(0, ()) == [0, 1, 2]
    assert simplest(lambda schedule: order_after(0, schedule)[0] != 0) == (1,)
    assert simplest(lambda schedule: order_after(0, schedule) == [2, 1, 0]) == (2, 1)
    assert simplest(lambda schedule: order_after(0, schedule)[-1] == 1) == (0, 1)


def test_a_fault_late_in_the_program_shrinks_to_the_turn_that_matters():
    usual = order_after(1, ())
    found = simplest(lambda schedule: order_after(1, schedule)[-1] != usual[-1])
    assert sum(found) == 1, "one turn out of line is enough"
    assert order_after(1, found) != usual


def test_a_shared_store_that_depends_on_who_comes_last():
    def says(schedule: tuple[int, ...]) -> set[str]:
        return set(sim.run(lambda: last_writer(dist.distributed_c10d._get_default_store()), 3, schedule=schedule))

    assert says(()) == {"of rank 2"}
    assert simplest(lambda schedule: says(schedule) != {"of rank 2"}) in {(1, 1), (0, 1), (2,)}


def test_messages_in_another_order():
    usual = sim.run(first_message, 4, schedule=())[0]
    found = simplest(lambda schedule: sim.run(first_message, 4, schedule=schedule)[0] != usual, 4)
    assert len(found) <= 3
    assert sim.run(first_message, 4, schedule=found)[0] != usual


def test_an_update_that_is_lost_in_every_interleaving_needs_none():
    def balance(schedule: tuple[int, ...]) -> int:
        account = {"balance": 0}
        sim.run(lost_update, 3, (account,), schedule=schedule)
        return account["balance"]

    assert simplest(lambda schedule: balance(schedule) < 3) == ()


def test_hypothesis_reports_the_shrunk_schedule_and_it_replays():
    @settings(ALONE, phases=[Phase.generate, Phase.shrink])
    @given(interleavings(4))
    def rank_0_is_first(schedule: tuple[int, ...]) -> None:
        def body() -> None:
            log.append(dist.get_rank())
            assert log[0] == 0, "rank 0 is not first"

        log: list[int] = []
        sim.run(body, 4, schedule=schedule)

    with pytest.raises(AssertionError, match="rank 0 is not first") as caught:
        rank_0_is_first()
    assert "schedule=(1,)" in "".join(caught.value.__notes__) if hasattr(caught.value, "__notes__") else True
    assert str(caught.value).endswith("replay: sim.run(..., world_size=4, seed=0, schedule=[1])")
    assert order_after(0, (1,), 4)[0] == 1
    assert threads.busy_threads() == 0


# -- what a right program gives ------------------------------------------------------------------------------------


def right_program() -> list[float]:
    """Collectives, messages, a store and a polled work: nothing in it depends on who comes first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([float(rank)])
    work = dist.all_reduce(total, async_op=True)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"key {rank}", str(rank * 10))
    from_left = torch.zeros(1)
    works = [dist.isend(torch.tensor([rank + 0.5]), (rank + 1) % size), dist.irecv(from_left, (rank - 1) % size)]
    while not work.is_completed():
        pass
    for each in works:
        each.wait()
    half = dist.new_group([r for r in range(size) if r % 2 == rank % 2], use_local_synchronization=True)
    dist.all_reduce(among := torch.tensor([float(rank)]), group=half)
    return [
        total.item(),
        from_left.item(),
        among.item(),
        float(store.get(f"key {(rank + 1) % size}")),
        torch.rand(1).item(),
    ]


@given(interleavings(4), st.integers(2, 4))
def test_results_do_not_depend_on_the_interleaving(schedule: tuple[int, ...], world_size: int) -> None:
    assert sim.run(right_program, world_size, schedule=schedule) == sim.run(right_program, world_size)


@given(interleavings(3), st.integers(0, 3))
def test_one_schedule_is_one_interleaving(schedule: tuple[int, ...], barriers: int) -> None:
    first = order_after(barriers, schedule)
    assert first == order_after(barriers, schedule, seed=99), "the seed has no part in it"
    assert sorted(first) == [0, 1, 2]


@given(interleavings(3, max_turns=4))
def test_a_schedule_that_ends_goes_on_with_zeros(schedule: tuple[int, ...]) -> None:
    assert order_after(2, schedule) == order_after(2, (*schedule, 0, 0, 0))
    assert order_after(0, schedule) == order_after(0, tuple(place + 6 for place in schedule[:1]) + schedule[1:])


@given(interleavings(5, max_turns=7))
def test_what_is_drawn(schedule: tuple[int, ...]) -> None:
    assert len(schedule) <= 7
    assert set(schedule) <= set(range(5))
    assert not schedule or schedule[-1] > 0, "what a schedule does by itself is left out"


def test_every_order_is_drawn():
    seen = set()

    @settings(ALONE)
    @given(interleavings(3))
    def look(schedule: tuple[int, ...]) -> None:
        seen.add(tuple(order_after(0, schedule)))

    look()
    assert len(seen) == 6


def test_long_schedules_are_drawn():
    assert len(find(interleavings(4, max_turns=40), lambda schedule: len(schedule) == 40, settings=ALONE)) == 40


def test_a_schedule_goes_on_in_the_next_run_of_its_world():
    def body() -> None:
        log.append(dist.get_rank())

    log: list[int] = []
    with sim.world(2, schedule=[0, 1]) as world:
        world.run(body)
        world.run(body)
        world.run(body)
    assert log == [0, 1, 1, 0, 0, 1]


def test_a_rank_that_asks_again_and_again_leaves_the_others_their_turns():
    def body() -> None:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while not work.is_completed():
            pass

    for schedule in ((), (0,), (2, 2, 2), (1, 0, 1, 0, 1)):
        sim.run(body, 3, schedule=schedule)


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "kind", "seen"),
    [
        ([0, -1], ValueError, r"schedule\[1\]: -1"),
        ([1.5], TypeError, r"schedule\[0\]: 1.5"),
        ([True], TypeError, r"schedule\[0\]: True"),
        ("012", TypeError, r"schedule\[0\]: '0'"),
        ([None], TypeError, r"schedule\[0\]: None"),
    ],
)
def test_a_schedule_that_is_none(schedule, kind, seen):
    with pytest.raises(kind, match=rf"cannot make a world: schedule.*\n  {seen}\n  try: schedule=\[0, 2, 1\]"):
        sim.run(dist.barrier, 2, schedule=schedule)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"max_ranks": 0}, ValueError, "max_ranks must be at least 1"),
        ({"max_turns": -1}, ValueError, "max_turns must be at least 0"),
        ({"max_ranks": 2.0}, TypeError, "max_ranks is a float, not an int"),
        ({"max_turns": "all"}, TypeError, "max_turns is a str, not an int"),
    ],
)
def test_bounds_that_are_none(arguments, kind, message):
    with pytest.raises(kind, match=message):
        interleavings(**arguments)
