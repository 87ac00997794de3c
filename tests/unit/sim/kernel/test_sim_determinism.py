"""`sim.check_determinism`: what it lets pass, and the first difference that it shows."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import sim
from sim.observers.determinism import first_difference

pytestmark = pytest.mark.sim


def differs(body, world_size=2, **options) -> str:
    with pytest.raises(sim.NonDeterminism) as caught:
        sim.check_determinism(body, world_size, **options)
    assert "  try:" in str(caught.value)
    assert f"\n  replay: sim.check_determinism(..., world_size={world_size}, seeds=[" in str(caught.value)
    return str(caught.value)


def reduced(value: float) -> float:
    x = torch.tensor([value])
    dist.all_reduce(x)
    return x.item()


@pytest.mark.tier("test")
def test_what_does_the_same():
    def body(x: torch.Tensor, *, scale: float) -> dict:
        torch.manual_seed(dist.get_rank())
        work = dist.all_reduce(y := x * scale + torch.rand(3), async_op=True)
        sim.advance(0.1)
        work.wait()
        return {"y": y, "nan": [math.nan, torch.tensor(math.nan)], "model": torch.nn.Linear(2, 2), "other": object()}

    results = sim.check_determinism(body, 4, (torch.ones(3),), {"scale": 2.0}, seeds=range(4), runs=3)
    assert len(results) == 4
    assert torch.equal(results[0]["y"], results[3]["y"])


class HashedByChance:
    """Ordered anew in each set, like an object whose hash is its address."""

    def __init__(self, size: int, draws: itertools.count) -> None:
        self.size, self.hash = size, next(draws) * 7919 % 31

    def __hash__(self) -> int:
        return self.hash


def test_the_order_of_a_set():
    draws = itertools.count()

    def body() -> None:
        for item in {HashedByChance(size, draws) for size in (1, 2, 3)}:
            dist.all_reduce(torch.ones(item.size))

    text = differs(body, 1)
    assert text.startswith("two runs from seed 0 differ in event 0 (shape)\n")
    assert text.count("rank 0  all_reduce #0 of group 'world', SUM") == 2
    assert text.count(f"test_sim_determinism.py:{body.__code__.co_firstlineno + 2} in body") == 2
    assert "because: rank 0 did something else" in text


def test_a_branch_taken_by_chance():
    coin = itertools.cycle([os.urandom(1) < b"\x00", True, False])  # as os.urandom goes, but sure to change

    def body() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            side.append(next(coin))
        dist.barrier()
        if side[-1]:
            dist.all_reduce(torch.ones(1))
        else:
            dist.broadcast(torch.ones(1), src=1)

    side: list[bool] = []
    text = differs(body, 2, runs=3)
    first = body.__code__.co_firstlineno
    assert "(operation)" in text
    assert f"test_sim_determinism.py:{first + 6} in body" in text
    assert f"test_sim_determinism.py:{first + 8} in body" in text


def test_data_that_differ_show_at_the_first_operation_on_them():
    numbers = itertools.count()

    def body() -> float:
        reduced(1.0)
        return reduced(next(numbers))

    text = differs(body)
    assert "(data)" in text
    assert "all_reduce #1 of group 'world', SUM" in text


def test_a_run_that_is_over_before_the_other():
    numbers = itertools.count()

    def body() -> None:
        for _ in range(1 + (next(numbers) == 0)):
            dist.barrier()

    text = differs(body, 1)
    assert "differ in event 1 (one run is over)" in text
    assert "run 2  has ended" in text


def test_virtual_times_that_differ():
    numbers = itertools.count()
    assert "(virtual time)" in differs(lambda: (sim.advance(next(numbers)), dist.barrier()), 1)


def test_results_that_differ():
    numbers = itertools.count()
    text = differs(lambda: {"loss": [1.0, float(next(numbers))]}, 1)
    assert text == (
        "run 1 and run 2 give different results on rank 0, at result['loss'][1]\n"
        "  run 1  0.0\n"
        "  run 2  1.0\n"
        "  try: look for a hash, the time, os.urandom, or a generator without a seed\n"
        "  replay: sim.check_determinism(..., world_size=1, seeds=[0], runs=2)"
    )


def test_results_of_one_element_with_any_stride():
    def body():
        dist.all_reduce(torch.ones(4)[::2][:1])
        return torch.arange(6.0).view(2, 3)[:1, 1]

    sim.check_determinism(body, 2)


def test_seeds_are_compared_by_results_and_not_by_order():
    order: list[int] = []

    def first_come() -> list[int]:
        if dist.get_rank() == 0:
            order.clear()
        dist.barrier()
        order.append(dist.get_rank())
        dist.barrier()
        return list(order)

    assert sim.check_determinism(lambda: sorted(first_come()), 4, seeds=range(5))[0] == [0, 1, 2, 3]
    assert len(sim.check_determinism(first_come, 4, seeds=[3])[0]) == 4
    text = differs(first_come, 4, seeds=range(5), runs=1)
    assert text.startswith("seed 0 and seed ")
    assert "which rank comes first" in text


def test_a_failure_of_each_run_is_raised_and_one_of_some_runs_is_a_difference():
    with pytest.raises(ZeroDivisionError, match="rank 0 raised"):
        sim.check_determinism(lambda: 1 // dist.get_rank(), 2, seeds=(0, 1))
    numbers = itertools.count()
    text = differs(lambda: 1 // next(numbers), 1)
    assert text == (
        "run 1 and run 2 end differently\n"
        "  run 1  rank 0 raised ZeroDivisionError: integer division or modulo by zero\n"
        "  run 2  returned\n"
        "  try: look at the failure first\n"
        "  replay: sim.check_determinism(..., world_size=1, seeds=[0], runs=2)"
    )


@pytest.mark.parametrize("communicates", [False, True])
def test_the_failure_of_one_run_is_shown_and_chained(communicates):
    numbers = itertools.count()

    def body() -> None:
        if next(numbers) == 1:
            raise ValueError("oops")
        if communicates:
            dist.barrier()

    with pytest.raises(sim.NonDeterminism) as caught:
        sim.check_determinism(body, 1)
    assert "rank 0 raised ValueError: oops\n" in str(caught.value)
    assert ("(one run is over)" in str(caught.value)) is communicates
    failure = caught.value.__cause__
    assert isinstance(failure, sim.RankFailed)
    assert isinstance(failure.__cause__, ValueError)


def test_failures_that_differ_further_down():
    numbers = itertools.count()

    def body() -> None:
        raise ValueError(f"oops\n  after {next(numbers)} steps")

    text = differs(body, 1)
    assert text.startswith("run 1 and run 2 end differently\n  run 1  after 0 steps\n  run 2  after 1 steps\n")


def test_a_deadlock_in_one_run_is_named():
    numbers = itertools.count()

    def body() -> None:
        if dist.get_rank() == 0 and next(numbers) == 1:
            return
        dist.barrier()

    with pytest.raises(sim.NonDeterminism, match=r"run 2 failed: Deadlock: no rank can run") as caught:
        sim.check_determinism(body, 2)
    assert isinstance(caught.value.__cause__, sim.Deadlock)


@pytest.mark.parametrize(("seeds", "runs"), [((), 2), ((0,), 1), ((0, 1), 0)])
def test_nothing_to_compare(seeds, runs):
    with pytest.raises(ValueError, match="two runs at least"):
        sim.check_determinism(dist.get_rank, 2, seeds=seeds, runs=runs)


@dataclass
class Outcome:
    loss: float
    grad: torch.Tensor


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        (1, 1.0, ""),
        ([1, 2], [1], ""),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ""),
        (Outcome(1.0, torch.zeros(2, 3)), Outcome(1.0, torch.eye(3)[1:]), ".grad[0, 1]"),
        (torch.tensor(0.0), torch.tensor(-0.0), "[]"),
        (torch.zeros(2), torch.zeros(2).bfloat16(), ""),
        (torch.zeros(2), torch.zeros(3), ""),
        ((torch.tensor([True, False]),), (torch.tensor([True, True]),), "[0][1]"),
        (torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False), ".state_dict()['weight'][0, 0]"),
        ("a" * 200, "b", ""),
    ],
)
def test_where_results_differ(one, other, where):
    found = first_difference(one, other)
    assert found is not None
    assert found[0] == where
    assert len(found[1]) < 100
    assert first_difference(one, one) is None
