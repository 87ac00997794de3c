"""Events of the trace, and their export to other tools: Perfetto, matplotlib, torch's analyser."""

from __future__ import annotations

import itertools
import json
import pickle
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sim
from sim.kernel.context import current_context
from sim.timeline.bars import lay_out, stack
from sim.timeline.export import flight_recorder
from sim.trace import Event, Span, Trace

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")]


def pipeline() -> None:
    """Collectives on three axes and messages between the stages, of a mesh of 8."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage, pipe = mesh.get_local_rank("pp"), mesh.get_group("pp")
    x, peer = torch.ones(64), dist.get_process_group_ranks(pipe)[1 - stage]
    if stage == 1:
        dist.recv(x, peer, group=pipe)
    for _ in range(2):
        sim.advance(1e-4 * (1 + (dist.get_rank() == 5)))
        dist.all_reduce(x, group=mesh.get_group("tp"))
    if stage == 0:
        dist.send(x, peer, group=pipe)
    work = dist.reduce_scatter_tensor(torch.zeros(32), x, group=mesh.get_group("dp"), async_op=True)
    sim.advance(1e-4)
    work.wait()
    dist.barrier()


def traced(body, world_size=8, **options) -> Trace:
    with sim.world(world_size, **options) as world:
        world.run(body)
    return world.trace


# -- what an event says ----------------------------------------------------------------------------------------


def test_what_an_event_says():
    def body() -> None:
        x = torch.ones(2, 3)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        dist.broadcast(x, src=1)
        dist.all_gather([torch.zeros(2, 3)] * 2, x)
        dist.barrier()
        dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)

    trace = traced(body, 2)
    reduce, broadcast, gather, barrier, send = trace.of_rank(0)
    recv = trace.of_rank(1)[-1]
    assert [e.reduce_op for e in trace.of_rank(1)] == ["MAX", "", "", "", ""]
    assert [e.root for e in trace.of_rank(0)] == [None, 1, None, None, None]
    assert (send.peer, recv.peer, gather.peer) == (1, 0, None)
    assert reduce.input_shapes == reduce.output_shapes == ((2, 3),)
    assert gather.output_shapes == ((2, 3), (2, 3))
    assert (broadcast.shape, barrier.shape, send.shape, recv.shape) == ((2, 3), (), (2, 3), (2, 3))
    assert send.name == "send to rank 1 in group 'world'"
    assert recv.name == "recv from rank 0 in group 'world'"
    assert broadcast.name == "broadcast #1 of group 'world'"
    assert all(e.members == (0, 1) and e.process_group == "0" for e in trace.events)
    assert send.span is recv.span


@pytest.mark.tier("test")
def test_the_order_of_issue_is_over_all_ranks_and_fixed_by_the_seed():
    def orders(seed: int) -> list[tuple[int, str]]:
        trace = traced(pipeline, seed=seed)
        assert [event.order for event in trace.in_order()] == list(range(len(trace.events)))
        for rank in range(8):
            mine = [event.order for event in trace.of_rank(rank)]
            assert mine == sorted(mine)
        return [(event.rank, event.op) for event in trace.in_order()]

    assert orders(1) == orders(1)
    assert len({tuple(orders(seed)) for seed in range(5)}) > 1


def test_a_receive_from_anybody_has_no_peer_when_it_comes_first():
    def body() -> None:
        if dist.get_rank() == 0:
            work = dist.irecv(torch.zeros(1))
            dist.barrier()
            work.wait()
        else:
            dist.barrier()
            dist.send(torch.ones(1), 0)

    trace = traced(body, 2)
    assert trace.of_rank(0)[0].peer is None
    assert trace.of_rank(0)[0].name == "recv from any rank in group 'world'"
    entries = flight_recorder(trace)[0]["entries"]
    assert "recv 0<-1" in entries[0]["profiling_name"]
    assert [entry["p2p_seq_id"] for entry in entries] == [1, 0], "messages are counted from 1 on, collectives are none"


# -- what it keeps ---------------------------------------------------------------------------------------------


def test_a_trace_keeps_the_last_events_and_says_so():
    everything, last = traced(pipeline, keep_events=None), traced(pipeline, keep_events=3)
    assert last.summary() == everything.summary()
    total = [everything.count(rank) for rank in range(8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (everything.forgotten(), len(everything.events)) == (0, sum(total))
    assert [last.count(rank) for rank in range(8)] == total
    assert [last.forgotten(rank) for rank in range(8)] == [each - 3 for each in total]
    text = (
        rf"the trace has the last 3 events of each rank; {sum(total) - 24} older ones are in its counts and sums only\n"
        r"  try: sim.world\(..., keep_events=None\), which keeps all"
    )
    for ask in (lambda: last.events, last.in_order):
        with pytest.warns(UserWarning, match=text) as warned:
            assert {(e.rank, e.order) for e in ask()} == {(e.rank, e.order) for e in last.kept()}
        assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match=text):
        assert [e.op for e in last.of_rank(0)] == [e.op for e in everything.of_rank(0)[-3:]]
    last.clear()
    assert (last.count(0), last.forgotten(), last.events) == (0, 0, [])
    assert last.bytes(axis="dp") == 0, "it exists, though nothing is left of it"


def test_an_event_stays_until_all_ranks_have_come():
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if dist.get_rank() == 0:
            early = dist.all_reduce(torch.ones(10), async_op=True)
        for _ in range(3):
            dist.barrier(group=mesh.get_group("tp"))
        if dist.get_rank() == 0:
            assert [e.op for e in current_context().network.trace.kept() if e.rank == 0] == ["all_reduce", "barrier"]
            early.wait()
        else:
            dist.all_reduce(torch.ones(10))

    trace = traced(body, 4, keep_events=1)
    assert trace.bytes(axis="world", op="all_reduce", rank=0) == 2 * 10 * 4 * 3 // 4
    assert [(row.axis, row.count) for row in trace.by_axis()] == [("world", 1), ("tp", 6)]


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_an_event_that_completes_late_is_counted_and_then_forgotten(keep):
    """Of four events each completes at one of the times after it was issued, or never: all such orders."""
    for completed_at in itertools.product(*(range(issued, 5) for issued in range(4))):
        trace, everything = Trace(1, keep), Trace(1)
        spans = [Span() for _ in range(4)]
        for now, issued in enumerate(spans):
            missing = [seq for seq in range(now) if completed_at[seq] >= now]
            event = Event(0, "all_reduce", "dp", (0,), now, 2**now, 2**now, "float32", "", span=issued)
            trace.add(event), everything.add(event)
            older = [e.seq for e in trace.kept() if e.seq <= now - keep]
            assert older == [seq for seq in (*missing, now) if seq <= now - keep], completed_at
            for seq, span in enumerate(spans[: now + 1]):
                span.end = float(now) if completed_at[seq] <= now else None
            assert trace.by_axis() == everything.by_axis()
            assert trace.bytes() == sum(2**seq for seq in range(now + 1) if completed_at[seq] <= now)


@pytest.mark.tier("test")
def test_exports_say_what_is_forgotten(tmp_path):
    pytest.importorskip("matplotlib")
    trace = traced(pipeline, keep_events=3)
    older = trace.forgotten()
    trace.to_chrome(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["otherData"] == {"left out": f"{older} older events"}
    labels = {e["pid"]: e["args"]["labels"] for e in content["traceEvents"] if e["name"] == "process_labels"}
    assert labels == {rank: f"without {trace.forgotten(rank)} older events" for rank in range(8)}
    trace.plot(tmp_path / "trace.svg")
    assert f"without {older} older events" in (tmp_path / "trace.svg").read_text()
    dumps = flight_recorder(trace)
    for rank, dump in enumerate(dumps):
        assert dump["left_out"] + len(dump["entries"]) == trace.count(rank)


def test_the_analyser_finds_nothing_wrong_in_what_a_trace_has_kept(tmp_path):
    def body() -> None:
        halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for _ in range(4):
            dist.all_reduce(torch.ones(2))
            if dist.get_rank() < 2:
                for _ in range(3):  # these ranks forget sooner
                    dist.all_reduce(torch.ones(3), group=halves.get_group("tp"))

    found = analysed(traced(body, 4, keep_events=5), tmp_path)
    assert [c.collective_name for c in found if not c.pass_check] == []
    assert {c.collective_state for c in found} == {"completed"}
    assert len(found) == 4 + 1


def test_how_many_events_to_keep():
    with pytest.raises(ValueError, match=r"cannot make a world: keep_events .*\n  keep_events: -1\n"):
        sim.world(2, keep_events=-1)
    with pytest.raises(TypeError):
        sim.world(2, keep_events="all")


# -- where they lie --------------------------------------------------------------------------------------------


def test_steps_where_no_time_has_passed():
    def body() -> None:
        halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(1), group=halves.get_group("tp"))
        dist.all_reduce(torch.ones(1), group=halves.get_group("dp"))
        dist.barrier()

    for seed in range(5):
        bars, timed = lay_out(traced(body, 4, seed=seed))
        assert not timed
        places = {(bar.event.rank, bar.event.axis): (bar.left, bar.right) for bar in bars}
        assert places[0, "tp"] == places[1, "tp"] == (0, 1)
        assert {places[rank, "dp"] for rank in range(4)} == {(1, 2)}
        assert {places[rank, "world"] for rank in range(4)} == {(2, 3)}


def test_bars_lie_in_as_many_lanes_as_overlap():
    assert stack([(2, 4), (0, 2), (1, 3), (3, 5)]) == [0, 0, 1, 1]


def test_virtual_time_where_some_has_passed():
    bars, timed = lay_out(traced(pipeline, machine="h100-sxm"))
    assert timed
    for bar in bars:
        assert bar.waits <= bar.left < bar.right
        assert bar.complete


# -- chrome ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [None, "a100-80gb"])
def test_chrome(tmp_path, machine):
    trace = traced(pipeline, machine=machine)
    trace.to_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(trace.events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(8)}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(row for (rank, _), row in rows.items() if rank == 0) == ["dp", "pp send", "tp", "world"]
    for event in slices:
        assert rows[event["pid"], event["tid"]].split()[0] == event["cat"]
    barrier = next(event for event in slices if event["name"] == "barrier")
    assert barrier["args"]["line"].startswith("test_trace_export.py:")
    by_row: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in slices:
        by_row.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_row.values():  # the format wants no slice that begins within another one and outlasts it
        spans.sort()
        assert all(left[1] <= right[0] + 1e-9 for left, right in itertools.pairwise(spans))


def test_arrows_join_the_members_of_an_operation(tmp_path):
    trace = traced(pipeline)
    trace.to_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    flows: dict[int, list[dict]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    assert len(flows) == 4 * 2 + 4 + 4 + 1  # tp twice, messages, dp, the barrier
    slices = {(e["pid"], e["tid"], e["ts"], e["name"]) for e in events if e["ph"] == "X"}
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", *["t"] * (len(flow) - 2), "f"]
        names = {e["name"] for e in flow} | {"send", "recv"}
        assert all(any((e["pid"], e["tid"], e["ts"], name) in slices for name in names) for e in flow)
    sent = [[event["pid"] for event in flow] for flow in flows.values() if flow[0]["name"] == "send"]
    assert sorted(sent) == [[rank, rank + 4] for rank in range(4)], "from the sender to the receiver"


# -- plot ------------------------------------------------------------------------------------------------------


@pytest.mark.tier("test")
@pytest.mark.parametrize("color", ["op", "axis"])
@pytest.mark.parametrize("machine", [None, "h100-sxm"])
def test_plot(tmp_path, color, machine):
    pytest.importorskip("matplotlib")
    traced(pipeline, machine=machine).plot(tmp_path / "trace.png", color=color)
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("machine", [None, "h100-sxm"])
def test_a_box_of_a_plot_has_four_corners_inside_the_row_of_its_rank(machine, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr("sim.timeline.plot.draw_shapes", lambda axes, shapes, **_: drawn.extend(shapes))
    traced(pipeline, machine=machine).plot(tmp_path / "trace.svg")
    assert drawn
    for shape in drawn:
        (left, right), (top, bottom) = (sorted({corner[axis] for corner in shape}) for axis in (0, 1))
        assert shape == [(left, top), (right, top), (right, bottom), (left, bottom)]
        assert round((top + bottom) / 2) - 0.5 < top < bottom < round((top + bottom) / 2) + 0.5


@pytest.mark.tier("test")
def test_plot_of_what_is_stuck_of_nothing_and_of_many_ranks(tmp_path):
    pytest.importorskip("matplotlib")
    stuck().plot(tmp_path / "stuck.svg")
    assert "not all ranks came" in (tmp_path / "stuck.svg").read_text()
    Trace(4).plot(tmp_path / "nothing.png")
    trace = Trace(256)
    for rank in range(256):
        trace.add(Event(rank, "barrier", "world", tuple(range(256)), 0, 0, 0, "-", "train.py:1 in f"))
    trace.plot(tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 10_000


def test_plot_refuses_what_it_cannot_do(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="cannot plot a trace: there is no kind of color 'rank'\n  color: 'rank'"):
        Trace(2).plot(tmp_path / "x.png", color="rank")
    with pytest.raises(
        ValueError, match=r"x\.foo': 'foo' is no format of a picture\n  path: .*\.png.*\n  try: '.*x\.png'"
    ):
        Trace(2).plot(tmp_path / "x.foo")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        sim.SimError, match=r"matplotlib is not installed\n.*\n  try: pip install 'hyper_parallel\[plot\]'"
    ):
        Trace(2).plot(tmp_path / "x.png")


# -- flight recorder -------------------------------------------------------------------------------------------


def analysed(trace: Trace, folder: Path):
    """What torch's analyser makes of the dumps: its table of collectives."""
    fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    if torch.__version__ < "2.12":
        pytest.skip("the analyser of torch 2.11 knows nccl and xccl only, not gloo")
    trace.to_flight_recorder(folder / "dumps")
    fr_trace.main([str(folder / "dumps"), "-o", str(folder / "analysis")])
    return pickle.loads((folder / "analysis").read_bytes())[1].collectives


def failed(body, world_size: int, error: type[Exception]) -> Trace:
    world = sim.world(world_size)
    with world, pytest.raises(error):
        world.run(body)
    return world.trace


def stuck() -> Trace:
    def body() -> None:
        for _ in range(2):
            dist.all_reduce(torch.ones(3))
        if dist.get_rank() != 2:
            dist.all_reduce(torch.ones(3))

    return failed(body, 4, sim.Deadlock)


def test_the_analyser_finds_nothing_wrong_in_a_clean_run(tmp_path):
    found = analysed(traced(pipeline), tmp_path)
    assert len(found) == 4 * 2 + 4 + 4 + 1
    assert all(collective.pass_check for collective in found)
    assert {collective.collective_state for collective in found} == {"completed"}


def test_the_analyser_reads_every_operation(tmp_path):
    def body() -> None:
        rank, n = dist.get_rank(), 4
        x, full = torch.ones(8), torch.zeros(8 * n)
        dist.all_reduce(x)
        dist.reduce(x, dst=1)
        dist.broadcast(x.bfloat16(), src=2)
        dist.all_gather_into_tensor(full, x)
        dist.all_gather([torch.zeros(8) for _ in range(n)], x)
        sizes = [1, 2, 0, 4]
        dist.all_gather([torch.zeros(size) for size in sizes], torch.ones(sizes[rank]))
        dist.reduce_scatter_tensor(torch.zeros(2), x)
        dist.reduce_scatter(torch.zeros(8), list(full.chunk(n)))
        dist.all_to_all_single(torch.zeros(8), x)
        dist.all_to_all([torch.zeros(2)] * n, list(x.chunk(n)))
        dist.gather(x, [torch.zeros(8) for _ in range(n)] if rank == 3 else None, dst=3)
        dist.scatter(torch.zeros(8), [x] * n if rank == 0 else None, src=0)
        dist.barrier()
        after, before = torch.zeros(1), torch.zeros(1)
        ops = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, torch.zeros(8), (rank - 1) % n)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.send(before, rank + 1) if rank % 2 == 0 else dist.recv(after, rank - 1)

    found = analysed(traced(body, 4), tmp_path)
    assert [c.collective_name for c in found if not c.pass_check] == []
    assert len(found) == 13 + 4 + 2


def test_the_analyser_names_the_rank_that_is_missing(tmp_path):
    found = analysed(stuck(), tmp_path)
    assert [collective.missing_ranks for collective in found] == [None, None, {2}]
    assert found[-1].collective_seq_id == 3
    assert found[-1].collective_state == "scheduled"
    assert found[-1].collective_frames[0]["filename"] == "test_trace_export.py"


def test_the_analyser_names_a_mismatch(tmp_path):
    def body() -> None:
        dist.barrier()
        x = torch.ones(4)
        dist.broadcast(x, src=0) if dist.get_rank() == 1 else dist.all_reduce(x)

    found = analysed(failed(body, 3, sim.CollectiveMismatch), tmp_path)
    assert [collective.pass_check for collective in found] == [True, False]
    (wrong,) = found[-1].mismatch_collectives.items()
    assert wrong[0] == 1
    assert wrong[1].type_of_mismatch.state.name == "COLLECTIVE_TYPE_MISMATCH"


def test_the_analyser_names_a_send_without_a_recv(tmp_path):
    def body() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 2)

    found = analysed(failed(body, 3, sim.Deadlock), tmp_path)
    assert [collective.missing_ranks for collective in found] == [None, {2}]
    assert found[-1].expected_ranks == {0, 2}


def test_what_a_dump_says_about_time():
    def body() -> None:
        sim.advance(0.25)
        dist.barrier()

    with sim.world(2, cost=lambda op, load: 0.5) as world:
        world.run(body)
    entry = flight_recorder(world.trace)[1]["entries"][0]
    assert entry["time_created_ns"] == entry["time_discovered_started_ns"] == 250_000_000
    assert entry["time_discovered_completed_ns"] == 750_000_000
    assert entry["duration_ms"] == 500.0
