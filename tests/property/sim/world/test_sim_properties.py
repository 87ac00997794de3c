"""Random programs of collectives: right in every interleaving, and never silent or stuck when a rank goes astray."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import sim
from sim.kernel import threads
from sim.trace import Event, Row, Trace

pytestmark = pytest.mark.sim

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "ring")
REDUCE_OPS = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum, "PRODUCT": np.multiply}


@dataclass(frozen=True)
class Step:
    """One collective: on which group, with which arguments, waited for at once or at the end of the program."""

    op: str
    group: int
    size: int
    root: int
    reduce_op: str
    deferred: bool


@dataclass(frozen=True)
class Program:
    """Ranks, the groups they make, and the steps that the members of each group take."""

    world_size: int
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Shrinks towards two ranks, the world as the only group, and one all_reduce of one element."""
    world_size = draw(st.integers(2, 5))
    everybody = tuple(range(world_size))
    members = st.sets(st.sampled_from(everybody), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    groups = (everybody, *draw(st.lists(members, max_size=3)))
    step = st.builds(
        Step,
        op=st.sampled_from(OPS),
        group=st.integers(0, len(groups) - 1),
        size=st.integers(1, 3),
        root=st.integers(0, world_size - 1),
        reduce_op=st.sampled_from(sorted(REDUCE_OPS, reverse=True)),
        deferred=st.booleans(),
    )
    steps = draw(st.lists(step, min_size=1, max_size=8))
    return Program(world_size, groups, tuple(replace(s, root=s.root % len(groups[s.group])) for s in steps))


def data_of(program: Program, number: int, rank: int, elements: int) -> np.ndarray:
    """Small whole numbers, so that sums and products are exact in any order."""
    return np.random.default_rng([number, rank]).integers(1, 4, elements).astype(np.float64)


def elements_of(program: Program, step: Step) -> int:
    """How many elements a rank brings along."""
    parts = len(program.groups[step.group]) if step.op in ("reduce_scatter", "all_to_all", "scatter") else 1
    return step.size * parts


def expected(program: Program, number: int, rank: int) -> list[float] | None:
    """The naive twin, in numpy: what `rank` holds after step `number`; None where it holds nothing new."""
    step = program.steps[number]
    members = program.groups[step.group]
    me, n = members.index(rank), len(members)
    given_ = [data_of(program, number, member, elements_of(program, step)) for member in members]
    reduced = REDUCE_OPS[step.reduce_op].reduce(given_)
    at_root = me == step.root
    answers = {
        "all_reduce": lambda: reduced,
        "all_gather": lambda: np.concatenate(given_),
        "reduce_scatter": lambda: reduced.reshape(n, -1)[me],
        "all_to_all": lambda: np.concatenate([part.reshape(n, -1)[me] for part in given_]),
        "broadcast": lambda: given_[step.root],
        "reduce": lambda: reduced if at_root else None,
        "gather": lambda: np.concatenate(given_) if at_root else None,
        "scatter": lambda: given_[step.root].reshape(n, -1)[me],
        "ring": lambda: given_[(me - 1) % n] if n > 1 else given_[0],
    }
    answer = answers[step.op]()
    return None if answer is None else answer.tolist()


def take(program: Program, number: int, groups: list) -> tuple[list, torch.Tensor | list[torch.Tensor] | None]:
    """Issue step `number` on the calling rank; returns the works to wait for, and where the result will be."""
    step = program.steps[number]
    members, group = program.groups[step.group], groups[step.group]
    rank, n = dist.get_rank(), len(members)
    x = torch.from_numpy(data_of(program, number, rank, elements_of(program, step)))
    root, at_root = members[step.root], members[step.root] == rank
    reduce_op = getattr(dist.ReduceOp, step.reduce_op)
    if step.op == "all_reduce":
        return [dist.all_reduce(x, reduce_op, group, async_op=True)], x
    if step.op == "broadcast":
        return [dist.broadcast(x, root, group, async_op=True)], x
    if step.op == "reduce":
        return [dist.reduce(x, root, reduce_op, group, async_op=True)], x if at_root else None
    if step.op == "all_gather":
        out = [torch.zeros_like(x) for _ in members]
        return [dist.all_gather(out, x, group, async_op=True)], out
    if step.op == "gather":
        out = [torch.zeros_like(x) for _ in members] if at_root else None
        return [dist.gather(x, out, root, group, async_op=True)], out
    if step.op == "ring":
        if n == 1:
            return [], x
        into, me = torch.zeros_like(x), members.index(rank)
        works = [dist.isend(x, members[(me + 1) % n], group), dist.irecv(into, members[(me - 1) % n], group)]
        return works, into
    into = torch.zeros(step.size, dtype=x.dtype)
    if step.op == "scatter":
        return [dist.scatter(into, list(x.split(step.size)) if at_root else None, root, group, async_op=True)], into
    if step.op == "reduce_scatter":
        return [dist.reduce_scatter(into, list(x.split(step.size)), reduce_op, group, async_op=True)], into
    out = torch.zeros_like(x)
    return [dist.all_to_all_single(out, x, group=group, async_op=True)], out


def run_program(program: Program) -> list[list[float] | None]:
    """The body of one rank: all its steps, and what it holds after each of them."""
    groups = [dist.new_group(list(ranks)) for ranks in program.groups]
    issued = []
    for number, step in enumerate(program.steps):
        if dist.get_rank() not in program.groups[step.group]:
            continue
        works, result = take(program, number, groups)
        if not step.deferred:
            for work in works:
                work.wait()
        issued.append((works, result))
    held: list[list[float] | None] = []
    for works, result in issued:
        for work in works:
            work.wait()
        if isinstance(result, list):
            result = torch.cat(result)
        held.append(None if result is None else result.tolist())
    return held


def outcome(program: Program, rank: int) -> list[list[float] | None]:
    steps = enumerate(program.steps)
    return [expected(program, number, rank) for number, step in steps if rank in program.groups[step.group]]


@given(programs(), st.integers(0, 2**32))
def test_results_are_right_whatever_the_interleaving(program: Program, seed: int) -> None:
    results = sim.run(run_program, program.world_size, (program,), seed=seed)
    assert results == [outcome(program, rank) for rank in range(program.world_size)]


@given(programs(), st.integers(0, 2**32), st.integers(0, 2**32))
def test_the_bytes_do_not_depend_on_the_interleaving(program: Program, seed: int, other: int) -> None:
    summaries = []
    for each in (seed, other):
        with sim.world(program.world_size, seed=each) as world:
            world.run(run_program, (program,))
        summaries.append([event._replace(group=tuple(sorted(event.group)), order=0) for event in world.trace.events])
    assert summaries[0] == summaries[1]


@st.composite
def perturbed_programs(draw: st.DrawFn) -> tuple[Program, Program, int]:
    """A program, and what one rank of it does instead: a step left out, of another op or of another size."""
    program = draw(programs())
    numbers = [i for i, step in enumerate(program.steps) if len(program.groups[step.group]) > 1]
    if not numbers:
        program = replace(program, steps=(*program.steps, replace(program.steps[0], group=0, root=0)))
        numbers = [len(program.steps) - 1]
    number = draw(st.sampled_from(numbers))
    step = program.steps[number]
    astray = draw(st.sampled_from(program.groups[step.group]))
    how = draw(st.sampled_from(["dropped", "other op", "other size"]))
    steps = list(program.steps)
    if how == "dropped":
        del steps[number]
    elif how == "other op":
        steps[number] = replace(step, op=draw(st.sampled_from([op for op in OPS if op != step.op])))
    else:
        steps[number] = replace(step, size=step.size + 1)
    return program, replace(program, steps=tuple(steps)), astray


@given(perturbed_programs(), st.integers(0, 2**32))
def test_a_rank_that_goes_astray_is_found(case: tuple[Program, Program, int], seed: int) -> None:
    program, other, astray = case

    def body() -> None:
        run_program(other if dist.get_rank() == astray else program)

    # A dropped step can leave exactly the same calls behind, if the next one on that group is its twin and the last
    # one is the one that nobody takes; that, too, is a step some rank never joins.
    with pytest.raises((sim.CollectiveMismatch, sim.Deadlock)):
        sim.run(body, program.world_size, seed=seed)
    assert threads.busy_threads() == 0


# -- what a trace still knows of events that it has forgotten -------------------------------------------------------


def by_axis(events: list[Event]) -> list[Row]:
    """The rows of a trace, counted from all its events."""
    counted: dict[tuple[str, str], set[tuple]] = {}
    moved: dict[tuple[str, str], dict[int, int]] = {}
    for event in (event for event in events if event.completed):
        once = (event.process_group, event.group, event.seq) if event.seq >= 0 else (event.order,)
        counted.setdefault((event.axis, event.op), set()).add(once)
        per_rank = moved.setdefault((event.axis, event.op), {})
        per_rank[event.rank] = per_rank.get(event.rank, 0) + event.recv_bytes
    axes = list(dict.fromkeys(axis for axis, _ in moved))
    return [
        Row(*key, len(counted[key]), sum(moved[key].values()), max(moved[key].values()))
        for key in sorted(moved, key=lambda key: (axes.index(key[0]), key[1]))
    ]


class Watched(Trace):
    """A trace that compares what it says with all events, each time that one comes."""

    def __init__(self, world_size: int, keep_events: int) -> None:
        super().__init__(world_size, keep_events)
        self.all = Trace(world_size)

    def add(self, event: Event) -> None:
        super().add(event)
        self.all.add(event)
        self.compare()

    def compare(self) -> None:
        events = self.all.events
        rows = by_axis(events)
        assert self.by_axis() == self.all.by_axis() == rows
        assert self.bytes() == sum(row.bytes for row in rows)
        for row in rows:
            assert self.bytes(axis=row.axis, op=row.op) == row.bytes
            assert max(self.bytes(row.axis, row.op, rank) for rank in range(self.world_size)) == row.bytes_per_rank
        kept = list(self.kept())
        assert self.forgotten() == len(events) - len(kept)
        for rank in range(self.world_size):
            mine = [event for event in events if event.rank == rank]
            assert self.count(rank) == len(mine)
            last = [event for event in kept if event.rank == rank]
            newest = mine[max(0, len(mine) - self._keep) :]
            assert last[len(last) - len(newest) :] == newest
            assert [event for event in mine if not event.completed] == [e for e in last if not e.completed]


@given(perturbed_programs(), st.booleans(), st.integers(0, 5), st.integers(0, 2**32))
def test_counts_and_sums_are_those_of_all_events(
    case: tuple[Program, Program, int], right: bool, keep_events: int, seed: int
) -> None:
    program, other, astray = case

    def body() -> None:
        run_program(program if right or dist.get_rank() != astray else other)

    with sim.world(program.world_size, seed=seed) as world:
        world.trace = Watched(program.world_size, keep_events)
        for _ in range(2):
            try:
                world.run(body)
            except (sim.CollectiveMismatch, sim.Deadlock):
                assert not right
                break
    world.trace.compare()
