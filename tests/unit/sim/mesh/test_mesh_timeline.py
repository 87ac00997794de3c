"""Replay of time: what it says of small programs, and that it agrees with a simulation without any shortcut."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from hyper_parallel.core.machine import find_machine
from sim.mesh.estimate import time_of
from sim.mesh.program import Await, Comm, CommGroup, Event, EventRecord, HostWait, Op, Place, Program, Segment, Wait
from sim.mesh.replay.spans import COMMUNICATION, EXPOSED, exposed_parts, spans
from sim.mesh.replay.timeline import Timeline, replay_time

US = 1e-6


@dataclass
class Price:
    seconds: float
    grade: str = "measured"
    spread: float = 0.1


class Prices:
    """An operation's FLOPs and a communication's bytes are its microseconds."""

    def __init__(self, host: float = 0.0, overlap_slowdown: float = 1.0, shares: bool = False) -> None:
        self.host = host
        self.overlap_slowdown = overlap_slowdown
        self.shares = shares

    def op(self, op: Op) -> Price:
        return Price(op.flops * US)

    def comm(self, comm: Comm, group: CommGroup, sharing: float = 1.0, *, rank: int | None = None) -> Price:
        del group, rank
        return Price(comm.size * US * (sharing if self.shares else 1.0))

    def host_seconds(self, event: Event, place: Place | None = None) -> float:
        del event, place
        return self.host * US


class OneQueue(Prices):
    """Those of a CPU, where half of a communication's time is on the processor that computes."""

    is_synchronous = True

    def __init__(self, host: float = 0.0) -> None:
        super().__init__(host, overlap_slowdown=1.5)

    def work_seconds(self, comm: Comm, group: CommGroup) -> float:
        del group
        return 0.5 * comm.size * US


def op(us: int, stream: int = 0, place: int = 0) -> Op:
    return Op("aten.mm", "matmul", us, (), (), "bfloat16", (), stream, place)


def comm(us: int, group: int, handle: int, stream: int = 0, kind: str = "all_gather", peer: int | None = None) -> Comm:
    return Comm(kind, group, us, us, "bfloat16", stream, handle, 0, peer)


def test_stragglers_are_counted_by_nodes() -> None:
    hardware = find_machine("h100-sxm")  # of 8 devices to a node
    general = {"straggler": 0.1, "spread": {"dense": {"nothing": 0.1}}}
    steps = {ranks: time_of(step_of(op(3)), ranks, hardware, general, 1e-6, 8.0).step.value for ranks in (2, 8, 32)}
    assert steps == pytest.approx({2: 3 * US, 8: 3 * US, 32: 3 * US * 1.2})


def one(events: list[Event], batches: int = 1, **more: Any) -> Program:
    program = Program(0, 8, 8, places=[Place("forward")])
    program.groups = [CommGroup("dp_shard", range(8)), CommGroup("tp", range(2))]
    program.segments["forward", 0, "steady"] = Segment("forward", 0, "steady", events)
    program.order = [(("forward", 0, "steady"), batch) for batch in range(batches)]
    for name, value in more.items():
        setattr(program, name, value)
    return program


def step_of(*events: Event, prices: Prices | None = None) -> Timeline:
    return replay_time([one(list(events))], prices or Prices())


class TestOneRank:
    def test_operations_of_a_stream_follow_each_other(self) -> None:
        assert step_of(op(3), op(4)).step == pytest.approx(7 * US)

    def test_a_host_that_issues_slower_than_the_device_computes_sets_the_pace(self) -> None:
        timeline = step_of(op(3), op(4), prices=Prices(host=10))
        assert timeline.step == pytest.approx(20 * US)
        assert timeline.ranks[0].host == pytest.approx(13 * US)

    def test_what_the_host_computes_delays_what_it_issues_next(self) -> None:
        host = Op("aten.add_", "on_host", 4, (), (), "float32", (), 0, 0)
        timeline = step_of(op(3), HostWait(0), host, op(2))
        assert timeline.step == pytest.approx(9 * US)
        assert timeline.ranks[0].host == pytest.approx(4 * US)
        assert timeline.ranks[0].compute == pytest.approx(5 * US)
        assert step_of(op(3), host, op(2)).step == pytest.approx(5 * US)  # beside the device, if it waits for nothing

    def test_copies_to_the_host_and_from_it_go_at_once_and_slow_nothing_down(self) -> None:
        def step(*events: Event) -> Timeline:
            program = one(list(events))
            program.groups = [CommGroup("host to device", ()), CommGroup("device to host", ()), CommGroup("tp", (0, 1))]
            return replay_time([program], Prices(overlap_slowdown=1.5, shares=True))

        ways = comm(6, 0, 1, stream=1, kind="copy_to_device"), comm(6, 1, 2, stream=2, kind="copy_to_host")
        waits = Wait(1, 1), Wait(2, 2), EventRecord(1, 1), EventRecord(2, 2), Await(1, 0), Await(2, 0)
        found = step(*ways, op(8), *waits, op(1))
        assert found.step == pytest.approx(9 * US)
        assert not found.ranks[0].exposed
        found = step(*ways, op(2), *waits, op(1))  # each way is busy all the time
        assert found.step == pytest.approx(6 * US)
        assert sum(found.ranks[0].exposed.values()) == pytest.approx(3 * US)
        assert step(comm(6, 2, 1), op(8), Wait(1, 0), op(1)).step == pytest.approx(12 * US)  # tp does slow it down

    def test_communication_beside_computation_is_not_exposed(self) -> None:
        timeline = step_of(comm(5, 0, 1), op(7), Wait(1, 0), op(1))
        assert timeline.step == pytest.approx(8 * US)
        assert sum(timeline.ranks[0].exposed.values()) == 0
        assert timeline.ranks[0].communication["dp_shard"] == pytest.approx(5 * US)

    def test_what_computation_waits_for_is_exposed_on_its_axis(self) -> None:
        timeline = step_of(comm(5, 0, 1), op(2), Wait(1, 0), op(1), comm(4, 1, 2), Wait(2, 0), op(1))
        assert timeline.step == pytest.approx(11 * US)
        assert dict(timeline.ranks[0].exposed) == pytest.approx({"tp": 4 * US, "dp_shard": 3 * US})

    def test_collectives_of_a_group_follow_each_other(self) -> None:
        timeline = step_of(comm(5, 0, 1), comm(5, 0, 2), Wait(2, 0), op(1))
        assert timeline.step == pytest.approx(11 * US)

    def test_a_communication_starts_after_what_is_queued_on_its_stream(self) -> None:
        events = [op(6), EventRecord(1, 0), Await(1, 3), comm(5, 0, 1, stream=3), op(2), Wait(1, 0), op(1)]
        timeline = step_of(*events)
        assert timeline.step == pytest.approx(12 * US)
        assert timeline.ranks[0].exposed == pytest.approx({"dp_shard": 3 * US})

    def test_waiting_through_another_stream_is_blamed_on_the_communication(self) -> None:
        events = [comm(5, 0, 1), Wait(1, 4), EventRecord(9, 4), op(1), Await(9, 0), op(1)]
        assert step_of(*events).ranks[0].exposed == pytest.approx({"dp_shard": 4 * US})

    def test_a_host_that_waits_issues_nothing_meanwhile(self) -> None:
        timeline = step_of(op(10), HostWait(0), op(1), prices=Prices(host=2))
        assert timeline.step == pytest.approx(14 * US)  # the next step is issued while the last operation runs
        everything = step_of(op(1), comm(6, 0, 1), comm(4, 1, 2), HostWait(None), op(2))
        assert everything.step == pytest.approx(9 * US), "the device computes behind the longer communication"

    def test_communication_that_is_left_over_delays_the_next_step(self) -> None:
        program = one([op(1), comm(5, 0, 1)])
        program.segments["forward", 0, "steady"].events.insert(0, Wait(1, 0))
        timeline = replay_time([program], Prices())
        assert timeline.step == pytest.approx(6 * US)
        assert timeline.ranks[0].exposed == pytest.approx({"dp_shard": 5 * US})

    def test_groups_on_the_same_links_slow_each_other_down(self) -> None:
        events = [comm(10, 0, 1), comm(4, 1, 2, stream=1), Wait(1, 0), Wait(2, 0), op(1)]
        alone = step_of(*events)
        shared = step_of(*events, prices=Prices(shares=True))
        assert alone.step == pytest.approx(11 * US)
        # both go at half their pace while they overlap: neither first nor last, and not longer than one after the other
        assert alone.step < shared.step <= 15 * US + 1e-12

    def test_computation_is_slower_beside_communication(self) -> None:
        timeline = step_of(comm(5, 0, 1), op(10), prices=Prices(overlap_slowdown=1.2))
        assert timeline.step == pytest.approx(11 * US)
        two = comm(4, 0, 1), comm(6, 1, 2)  # of different links: both from 0 on, so that 4 us count once
        assert step_of(*two, op(10), prices=Prices(overlap_slowdown=1.5)).step == pytest.approx(13 * US)

    def test_communication_of_a_cpu_takes_as_much_of_the_processor_whatever_is_computed_beside_it(self) -> None:
        for beside in ([op(20)], [op(1)] * 20):
            timeline = step_of(comm(10, 0, 1), *beside, Wait(1, 0), op(1), prices=OneQueue())
            assert timeline.step == pytest.approx(26 * US)
            assert timeline.ranks[0].compute == pytest.approx(21 * US)
            assert timeline.ranks[0].exposed == pytest.approx({"dp_shard": 5 * US})
        for few in (0, 1, 4):  # what is waited for takes no longer than it does
            found = step_of(comm(10, 0, 1), *[op(1)] * few, Wait(1, 0), op(1), prices=OneQueue())
            assert found.step == pytest.approx(11 * US)
        found = step_of(comm(10, 0, 1), *[op(0)] * 9, Wait(1, 0), op(1), prices=OneQueue(host=1))
        assert found.step == pytest.approx((1 + 5 + 9 + 2) * US)  # nor does Python run beside it for nothing

    def test_where_the_time_goes_adds_up(self) -> None:
        events = [comm(5, 0, 1), op(2), Wait(1, 0), op(1), comm(4, 1, 2), Wait(2, 0), op(1)]
        rank = (timeline := step_of(*events, prices=Prices(host=1))).ranks[0]
        assert rank.compute + sum(rank.exposed.values()) + rank.bubble + rank.host == pytest.approx(timeline.step)

    def test_evidence_is_counted_by_kind_and_axis(self) -> None:
        evidence = step_of(op(2), comm(5, 0, 1)).ranks[0].evidence
        assert evidence.seconds["matmul"] == pytest.approx({"measured": 2 * US})
        assert evidence.seconds["dp_shard"] == pytest.approx({"measured": 5 * US})
        assert evidence.spreads["matmul"] == pytest.approx(0.1 * 2 * US)

    def test_optimizer_is_told_apart(self) -> None:
        program = one([op(5)])
        program.segments["optimizer", -1, "only"] = Segment("optimizer", -1, "only", [op(2)])
        program.order.append((("optimizer", -1, "only"), -1))
        timeline = replay_time([program], Prices())
        assert timeline.ranks[0].optimizer == pytest.approx(2 * US)
        assert timeline.step == pytest.approx(7 * US)

    def test_nothing_to_run_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="cannot replay a step: programs: there is nothing to run"):
            replay_time([], Prices())


def pipeline(ranks: int, batches: int, forward: int = 5, backward: int = 10, message: int = 0) -> list[Program]:
    """One stage per rank, one operation per forward and backward, 1F1B."""
    programs = []
    for rank in range(ranks):
        program = Program(rank, 1, ranks, groups=[CommGroup("pp", ())], places=[Place("forward"), Place("backward")])
        there: list[Event] = [op(forward)]
        back: list[Event] = [op(backward, place=1)]
        if rank:
            there[:0] = [comm(message, 0, 1, kind="recv", peer=rank - 1), Wait(1, 0)]
            back.append(comm(message, 0, 4, kind="send", peer=rank - 1))
        if rank < ranks - 1:
            there.append(comm(message, 0, 2, kind="send", peer=rank + 1))
            back[:0] = [comm(message, 0, 3, kind="recv", peer=rank + 1), Wait(3, 0)]
        keys = ("forward", rank, "steady"), ("backward", rank, "steady")
        program.segments = {keys[0]: Segment(*keys[0], there), keys[1]: Segment(*keys[1], back)}
        ahead = min(batches, ranks - rank)
        program.order = [(keys[0], batch) for batch in range(ahead)]
        for batch in range(batches):
            program.order.append((keys[1], batch))
            if batch + ahead < batches:
                program.order.append((keys[0], batch + ahead))
        programs.append(program)
    return programs


class TestPipeline:
    @pytest.mark.parametrize(("ranks", "batches"), [(2, 2), (4, 8), (8, 8), (4, 33)])
    def test_one_forward_one_backward_takes_what_the_formula_says(self, ranks: int, batches: int) -> None:
        timeline = replay_time(pipeline(ranks, batches), Prices())
        assert timeline.step == pytest.approx((batches + ranks - 1) * 15 * US)
        for rank in timeline.ranks:
            assert rank.compute == pytest.approx(batches * 15 * US)
            assert rank.bubble == pytest.approx((ranks - 1) * 15 * US)

    def test_messages_are_exposed_and_waiting_for_other_stages_is_a_bubble(self) -> None:
        timeline = replay_time(pipeline(2, 1, message=3), Prices())
        assert timeline.step == pytest.approx(36 * US)
        last = timeline.ranks[1]
        assert last.exposed == pytest.approx({"pp": 3 * US})
        assert last.bubble == pytest.approx(18 * US)

    @pytest.mark.tier("test")
    def test_most_pieces_of_a_long_pipeline_are_not_simulated(self) -> None:
        timeline = replay_time(pipeline(4, 200, message=2), Prices(host=1))
        exact = replay_time(pipeline(4, 200, message=2), Prices(host=1), exact=True)
        assert timeline.step == pytest.approx(exact.step, rel=1e-6)
        assert exact.simulated == exact.played
        assert timeline.simulated < timeline.played / 10

    def test_a_message_of_a_cpu_takes_the_processor_of_who_sends_and_who_computes_when_it_comes(self) -> None:
        def step(before: int, beside: int, after: int) -> Timeline:
            sends: list[Event] = [op(before), comm(8, 0, 1, kind="send", peer=1), op(after)]
            receives: list[Event] = [comm(8, 0, 1, kind="recv", peer=0), op(beside), Wait(1, 0), op(1)]
            programs = []
            for rank, events in enumerate((sends, receives)):
                program = Program(rank, 1, 2, groups=[CommGroup("pp", ())], places=[Place("forward")])
                key = ("forward", rank, "only")
                program.segments[key] = Segment(*key, events)
                program.order = [(key, 0)]
                programs.append(program)
            return replay_time(programs, OneQueue())

        assert step(1, 1, 30).step == pytest.approx(35 * US)  # the sender is slowest
        found = step(1, 20, 1)
        assert found.step == pytest.approx(25 * US)
        assert found.ranks[1].exposed == pytest.approx({"pp": 4 * US})
        assert step(1, 1, 1).step == pytest.approx(9 * US)  # a receiver that waits notices nothing

    @pytest.mark.tier("test")
    def test_pieces_of_a_cpu_that_were_seen_before_are_not_simulated_again(self) -> None:
        timeline = replay_time(pipeline(4, 200, message=2), OneQueue(host=1))
        exact = replay_time(pipeline(4, 200, message=2), OneQueue(host=1), exact=True)
        assert timeline.step == pytest.approx(exact.step, rel=1e-6)
        assert timeline.step > replay_time(pipeline(4, 200), OneQueue(host=1)).step
        assert timeline.simulated < timeline.played / 10

    def test_ranks_that_wait_for_each_other_are_an_error(self) -> None:
        programs = pipeline(2, 2)
        programs[0].order.insert(0, programs[0].order.pop(2))  # backward before forward
        with pytest.raises(ValueError, match="its ranks wait for messages that are never sent") as caught:
            replay_time(programs, Prices())
        text = str(caught.value)
        assert "rank 0 in backward of stage 0, micro-batch 0, waits for message 0 of rank 1 on axis 'pp'" in text
        assert "rank 1 in forward of stage 1, micro-batch 0, waits for message 0 of rank 0 on axis 'pp'" in text
        assert "try: " in text

    def test_a_segment_that_sends_before_it_waits_is_no_deadlock(self) -> None:
        programs = []
        for rank in range(2):
            program = Program(rank, 1, 2, groups=[CommGroup("pp", ())], places=[Place("forward")])
            other = 1 - rank
            sends: list[Event] = [op(3), comm(1, 0, 1, kind="send", peer=other)]
            waits: list[Event] = [comm(1, 0, 2, kind="recv", peer=other), Wait(2, 0)]
            key = ("forward", rank, "only")
            program.segments[key] = Segment(*key, [*sends, *waits, op(3)])
            program.order = [(key, 0)]
            programs.append(program)
        assert replay_time(programs, Prices()).step == pytest.approx(7 * US)

    def test_messages_to_ranks_without_a_program_are_taken_to_be_alike(self) -> None:
        messages = [comm(4, 0, 1, kind="send", peer=3), comm(4, 0, 2, kind="recv", peer=5)]
        assert step_of(*messages, op(1), Wait(2, 0), op(1)).step == pytest.approx(5 * US)

    def test_stages_that_do_not_know_each_other_are_an_error(self) -> None:
        programs = pipeline(2, 2)
        programs[1].rank = 8
        with pytest.raises(ValueError, match="whose peer, rank 1, is in no program"):
            replay_time(programs, Prices())


# -- without any shortcut ---------------------------------------------------------------------------------------------


class Naive:
    """All ranks, all micro-batches, event by event, in absolute time; a rank that lacks a message waits its turn."""

    def __init__(self, programs: list[Program], host: float) -> None:
        self.host_cost = host * US
        self.sent: dict[tuple[int, int], list[float]] = {}
        self.step_ends: list[list[float]] = []
        runs = [self.run(program) for program in programs]
        alive = list(runs)
        while alive:
            alive = [run for run in alive if next(run, "over") != "over"]

    def run(self, program: Program) -> Any:
        host, tails, queues, done, marks = 0.0, {}, {}, {}, {}
        received: dict[int, int] = {}
        ends: list[float] = []
        self.step_ends.append(ends)
        for _ in range(2):
            for key, batch in program.order:
                for event in program.segments[key].events:
                    if isinstance(event, Op):
                        host += self.host_cost
                        tails[event.stream] = max(host, tails.get(event.stream, 0.0)) + event.flops * US
                    elif isinstance(event, Comm):
                        host += self.host_cost
                        ready = max(host, tails.get(event.stream, 0.0))
                        if event.op == "recv":
                            number = received.get(event.peer, 0)
                            received[event.peer] = number + 1
                            message = ("message", event.peer, number, ready, event)
                            done[event.handle] = done[event.handle, batch] = message
                            continue
                        lane = (event.group, event.op, event.peer)
                        ready = max(ready, queues.get(lane, 0.0))
                        queues[lane] = ready + event.size * US
                        done[event.handle] = done[event.handle, batch] = queues[lane]
                        if event.op == "send":
                            self.sent.setdefault((program.rank, event.peer), []).append(ready)
                    elif isinstance(event, Wait):
                        found = done.get((event.handle, batch), done.get(event.handle, 0.0))
                        if isinstance(found, tuple):
                            _, peer, number, posted, message = found
                            while len(self.sent.get((peer, program.rank), [])) <= number:
                                yield "waits"
                            found = max(posted, self.sent[peer, program.rank][number]) + message.size * US
                        tails[event.stream] = max(tails.get(event.stream, 0.0), found)
                    elif isinstance(event, EventRecord):
                        marks[event.event] = tails.get(event.stream, 0.0)
                    elif isinstance(event, Await):
                        tails[event.stream] = max(tails.get(event.stream, 0.0), marks.get(event.event, 0.0))
                    elif isinstance(event, HostWait):
                        host = max(host, tails.get(event.stream, 0.0))
            ends.append(max(tails.values()))

    @property
    def step(self) -> float:
        return max(ends[1] for ends in self.step_ends) - max(ends[0] for ends in self.step_ends)


def drawn(seed: int) -> tuple[list[Program], float]:
    """A pipeline with drawn stages: streams, events, collectives that are waited for later or never."""
    draw = random.Random(seed)
    ranks, batches = draw.choice([(1, 3), (2, 5), (3, 7), (4, 4)])
    programs = pipeline(ranks, batches, message=draw.randrange(4))
    for program in programs:
        program.groups += [CommGroup("dp_shard", range(8)), CommGroup("tp", range(4))]
        handle = 10
        for segment in program.segments.values():
            events = list(segment.events)
            for _ in range(draw.randrange(12)):
                handle += 1
                stream = draw.choice([0, 0, 0, 1, 2])
                at = draw.randrange(len(events) + 1)
                kind = draw.randrange(5)
                if kind == 0:
                    events.insert(at, op(draw.randrange(9)))
                elif kind == 1:
                    more: list[Event] = [comm(draw.randrange(20), draw.choice([1, 2]), handle, stream)]
                    events[at:at] = more
                    if draw.random() < 0.8:
                        events.insert(draw.randrange(len(events) + 1), Wait(handle, 0))  # even before: of the last time
                elif kind == 2:
                    source = draw.choice([0, 1, 2])
                    events[at:at] = [EventRecord(handle, source), Await(handle, stream)]
                elif kind == 3:
                    events.insert(at, op(draw.randrange(9), stream=stream))
                elif draw.random() < 0.2:
                    events.insert(at, HostWait(0))
            segment.events[:] = events
    return programs, draw.choice([0.0, 1.0, 4.0])


@pytest.mark.parametrize("seed", range(150))
def test_shortcuts_change_nothing(seed: int) -> None:
    programs, host = drawn(seed)
    naive = Naive(programs, host).step
    assert replay_time(programs, Prices(host=host), exact=True).step == pytest.approx(naive, rel=1e-9, abs=1e-12)
    # rounding the state to a nanosecond, in pieces of microseconds
    assert replay_time(programs, Prices(host=host)).step == pytest.approx(naive, rel=2e-3, abs=1e-8)


@pytest.mark.parametrize("seed", range(40))
def test_where_the_time_goes_adds_up_whatever_the_program(seed: int) -> None:
    programs, host = drawn(seed)
    timeline = replay_time(programs, Prices(host=host))
    for rank in timeline.ranks:
        parts = rank.compute + sum(rank.exposed.values()) + rank.bubble + rank.host
        assert parts >= timeline.step * (1 - 1e-6)
        assert min(rank.compute, rank.bubble, rank.host, *rank.exposed.values()) >= 0


# -- as boxes ---------------------------------------------------------------------------------------------------------


class TestSpans:
    def test_layers_are_joined(self) -> None:
        program = one([op(1, place=0), op(2, place=0), op(3, place=1)])
        program.places = [Place("forward", 0), Place("forward", 1)]
        timeline = replay_time([program], Prices())
        assert [span.name for span in spans(timeline, "op")] == ["aten.mm"] * 3
        layers = spans(timeline, "layer")
        assert [(span.name, span.kind) for span in layers] == [("0", "forward"), ("1", "forward")]
        assert layers[0].end - layers[0].start == pytest.approx(3 * US)
        assert len(spans(timeline, limit=2)) == 2
        assert [span.name for span in spans(timeline, limit=1)] == ["0"]  # of micro-batch 0

    def test_exposed_parts_lie_inside_of_their_communication(self) -> None:
        timeline = step_of(comm(5, 0, 1), op(2), Wait(1, 0), op(1))
        found = spans(timeline)
        (part,) = exposed_parts(found)
        (moved,) = [span for span in found if span.kind == COMMUNICATION]
        assert part.kind == EXPOSED
        assert part.lane == "dp_shard"
        assert (moved.end - moved.start, part.end - part.start) == pytest.approx((5 * US, 3 * US))

    def test_a_detail_that_there_is_not_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="detail=one of 'op', 'layer', 'segment'"):
            spans(step_of(op(1)), "module")

    def test_the_moment_of_an_event_is_when_the_device_gets_there(self) -> None:
        timeline = step_of(op(3), op(4))
        assert timeline.when(0, 0, 0) == pytest.approx(3 * US)
        assert timeline.when(0, 0, 1) == pytest.approx(7 * US)
        assert timeline.when(0, -1, 0) == 0
