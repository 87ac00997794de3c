"""Swarms: many seeds, each with ranks, faults and an interleaving of its own; and the strategies that draw the same."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import find

import sim
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim.faults import Corrupt, Drop, Freeze, Kill, Slow, SlowLink
from sim.observers.faults.swarm import draw_faults
from sim.strategies import fault_plans, parallel_dims

pytestmark = pytest.mark.sim

ALL = (Kill, Freeze, Slow, SlowLink, Corrupt, Drop)


def total() -> float:
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.barrier()
    return x.item()


@pytest.mark.tier("test")
def test_a_program_that_loses_ranks_as_it_may_passes():
    assert sim.swarm(total, (1, 2, 3), seeds=range(30), kinds=ALL, check=lambda world, results: None) == 30


def forgets_the_others() -> None:
    """Goes wrong when a rank dies before the second operation, and only then."""
    dist.barrier()
    try:
        dist.barrier()
    except sim.RankLost:
        raise ValueError("what now?") from None


def test_the_first_failure_names_what_replays_it():
    with pytest.raises(sim.SwarmFailed) as caught:
        sim.swarm(forgets_the_others, 3, seeds=range(100), kinds=(Kill, Slow), max_faults=4)
    failure = caught.value
    (fault,) = failure.faults  # the others did not matter
    assert fault == Kill(fault.rank, at=1)
    text = str(failure).splitlines()
    assert text[0] == f"forgets_the_others fails on 3 ranks from seed {failure.seed} with 1 fault"
    assert text[1].startswith("  seen: RankFailed[ValueError]: rank ")
    assert text[1].endswith(" raised ValueError: what now?")
    assert text[2:] == [
        "  try: fix that first, then the same swarm again",
        f"  replay: sim.run(..., world_size=3, seed={failure.seed}, faults=[{fault!r}])",
    ]
    assert isinstance(failure.__cause__, ValueError)
    with pytest.raises(ValueError, match=r"what now\?"):
        sim.run(forgets_the_others, failure.world_size, seed=failure.seed, faults=failure.faults)


def test_a_check_that_fails():
    def nobody_may_be_lost(world: sim.World, results: list) -> None:
        assert None not in results, "somebody is missing"

    def survives() -> int:
        with suppress(sim.RankLost):
            dist.barrier()
        return 1

    with pytest.raises(sim.SwarmFailed, match="AssertionError: somebody is missing") as caught:
        sim.swarm(survives, 4, kinds=(Freeze,), check=nobody_may_be_lost)
    assert [type(each) for each in caught.value.faults] == [Freeze]


def test_what_fails_without_faults_is_found_first():
    with pytest.raises(sim.SwarmFailed, match=r"^<lambda> fails on 2 ranks from seed 5 without any fault\n") as caught:
        sim.swarm(lambda: int("x"), 2, seeds=[5])
    assert caught.value.faults == ()


def test_losses_that_must_not_end_a_run():
    with pytest.raises(sim.SwarmFailed, match="RankLost"):
        sim.swarm(total, 3, kinds=(Kill,), allow=())


@pytest.mark.tier("test")
def test_arguments_are_drawn_too():
    seen = set()

    def body(shape: tuple[int, int], scale: float = 1.0) -> None:
        assert shape[0] * shape[1] == dist.get_world_size()
        assert scale == 2.0
        seen.add(shape)

    def mesh(random: Random, world_size: int) -> tuple:
        rows = random.choice([size for size in range(1, world_size + 1) if world_size % size == 0])
        return ((rows, world_size // rows),)

    sim.swarm(body, (4, 6), mesh, {"scale": 2.0}, seeds=range(40), max_faults=0, machine="laptop-cpu")
    assert seen == {(1, 4), (2, 2), (4, 1), (1, 6), (2, 3), (3, 2), (6, 1)}


@pytest.mark.tier("test")
def test_meshes_are_drawn_too():
    seen = set()

    def body(sizes: tuple[int, ...], scale: float) -> None:
        assert dist.get_world_size() == sizes[0] * sizes[1]
        assert scale == 2.0
        seen.add(sizes)

    sim.swarm(body, (1, 4, 6), (2.0,), seeds=range(60), max_faults=0, mesh_axes=2)
    assert seen == {(1, 1), (1, 4), (2, 2), (4, 1), (1, 6), (2, 3), (3, 2), (6, 1)}


def test_a_failure_names_its_mesh():
    def body(sizes: tuple[int, ...]) -> None:
        assert sizes[-1] != 4, "too wide"

    with pytest.raises(sim.SwarmFailed) as caught:
        sim.swarm(body, 8, seeds=range(50), mesh_axes=3)
    assert caught.value.mesh in {(2, 1, 4), (1, 2, 4)}
    assert f"\n  mesh: {caught.value.mesh}, the first argument\n  try: fix that first" in str(caught.value)
    with pytest.raises(ValueError, match="cannot run a swarm: mesh_axes must be a finite number of at least 0"):
        sim.swarm(body, 8, mesh_axes=-1)


def test_what_ranks_cannot_call_is_no_failure_of_a_run():
    async def lazy() -> None:
        raise AssertionError

    for fn, args, said in ((lazy, (), "fn: a coroutine function"), (total, (1,), "cannot call total on ranks")):
        with pytest.raises(TypeError, match=said) as caught:
            sim.swarm(fn, 2, args)
        assert not isinstance(caught.value, sim.SwarmFailed)
        assert str(caught.value).count("  try: ") == 1


def test_faults_drawn_for_a_swarm():
    drawn = [draw_faults(Random(seed), 3, 5, ALL, 3) for seed in range(300)]
    assert {type(fault) for plan in drawn for fault in plan} == set(ALL)
    assert () in drawn
    assert max(map(len, drawn)) == 3
    for plan in drawn:
        assert len({fault.rank for fault in plan if isinstance(fault, (Kill, Freeze))}) < 3
        assert all(0 <= fault.at <= 5 for fault in plan if hasattr(fault, "at"))
    assert all(not draw_faults(Random(seed), 1, 5, (Drop, SlowLink, Kill), 3) for seed in range(50))


@pytest.mark.parametrize(
    ("options", "blame"),
    [
        ({"seeds": []}, "there is no run to make\n  seeds: 0, world_size: (2,)\n  try: "),
        ({"world_size": ()}, "there is no run to make\n  seeds: 100, world_size: ()\n  try: "),
        ({"kinds": ()}, "kinds: [] are no kinds of fault\n  known: sim.faults.Kill, sim.faults.Freeze, "),
        ({"kinds": (int,)}, "kinds: [<class 'int'>] are no kinds of fault\n  known: sim.faults.Kill, "),
        ({"max_faults": -1}, "max_faults must be a finite number of at least 0\n  max_faults: -1\n  try: max_faults=0"),
    ],
)
def test_swarms_that_cannot_be(options, blame):
    with pytest.raises(ValueError) as caught:
        sim.swarm(total, **{"world_size": 2, **options})
    assert str(caught.value).startswith(f"cannot run a swarm: {blame}")


# -- strategies ------------------------------------------------------------------------------------------------


@pytest.mark.tier("full")
def test_what_drawn_values_shrink_towards():
    assert find(fault_plans(3), lambda plan: True) == []
    assert find(fault_plans(3), bool) == [Kill(0, at=0)]
    assert find(fault_plans(3), lambda plan: any(isinstance(each, Drop) for each in plan)) == [Drop(0, 1, at=0)]
    assert find(parallel_dims(), lambda dims: True) == ParallelDims()
    assert find(parallel_dims(ranks=12), lambda dims: True) == ParallelDims(dp_shard=12, world_size=12)
    assert find(parallel_dims(ranks=12), lambda dims: dims.tp > 2).tp == 3


@pytest.mark.tier("full")
def test_every_kind_of_fault_and_moment_is_drawn():
    plans = fault_plans(3, regions=("backward",))
    for kind in ALL:
        assert find(plans, lambda plan, kind=kind: any(type(each) is kind for each in plan))
    for of in (int, str, tuple, float, type(sim.at_time(0))):
        assert find(plans, lambda plan, of=of: any(type(getattr(each, "at", None)) is of for each in plan))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fault_plans(0), "world_size must be at least 1\n  world_size: 0"),
        (lambda: fault_plans(2, max_faults=-1), "max_faults must be at least 0\n  max_faults: -1"),
        (lambda: fault_plans(2, max_operations=0), "max_operations must be at least 1\n  max_operations: 0"),
        (lambda: fault_plans(2, survivors=3), "survivors must be from 0 to 2\n"),
        (lambda: fault_plans(2, kinds=[]), r"kinds: \[\] are no kinds of fault\n  known: sim.faults.Kill, "),
        (lambda: parallel_dims(0), "max_ranks must be at least 1\n  max_ranks: 0"),
        (lambda: parallel_dims(ranks=0), ": ranks must be at least 1"),
    ],
)
def test_bounds_that_nothing_fits(make, message):
    with pytest.raises(ValueError, match=message):
        make()
