"""Pictures and Perfetto files of a step."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_mesh_timeline import Prices, comm, one, op, pipeline

from sim.explain.errors import SimError
from sim.mesh.memory import replay_memory
from sim.mesh.program import Alloc, Await, EventRecord, Free, Place, Program, Segment, Wait
from sim.mesh.replay.spans import chrome_events
from sim.mesh.replay.timeline import Timeline, replay_time

MIB = 1 << 20


def a_step() -> Timeline:
    events: list[Any] = [comm(50, 0, 1), Alloc(1, 40 * MIB, 0), op(20), Wait(1, 0), Free(1), op(30, place=1)]
    aside = [EventRecord(1, 0), Await(1, 1), op(30, stream=1)]
    program = one([*events, comm(40, 1, 2), op(10, place=2), Wait(2, 0), *aside, op(30, place=2)])
    program.places = [Place("forward", 0), Place("forward", 1), Place("backward", 1)]
    program.categories = {1: "activations"}
    return replace(replay_time([program], Prices()), memory=[replay_memory(program)])


def stages(ranks: int, batches: int) -> Timeline:
    programs = pipeline(ranks, batches, message=2)
    for program in programs:
        for key in program.segments:
            event = Alloc(1, 30 * MIB, 0) if key[0] == "forward" else Free(1)
            program.segments[key].events.append(event)
        program.categories = {1: "activations"}
    memory = [replay_memory(program) for program in programs]
    return replace(replay_time(programs, Prices()), memory=memory)


class TestChrome:
    def test_each_rank_is_a_process_and_each_stream_a_thread(self) -> None:
        timeline = a_step()
        events = chrome_events(timeline).events
        names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
        threads = {"compute", "compute 1", "communication dp_shard", "communication tp", "waits"}
        assert names == {"rank 0 and 7 like it", *threads}

    def test_boxes_are_in_microseconds(self) -> None:
        timeline = a_step()
        events = chrome_events(timeline).events
        gathers = [event for event in events if event["name"] == "all_gather"]
        assert [event["dur"] for event in gathers] == pytest.approx([50, 40])
        exposed = [event for event in events if event.get("cat") == "exposed"]
        assert {event["name"] for event in exposed} == {"exposed dp_shard", "exposed tp"}

    def test_memory_is_a_counter_by_category(self) -> None:
        timeline = a_step()
        counters = [event for event in chrome_events(timeline).events if event["ph"] == "C"]
        assert {"activations": 40 * MIB} in [event["args"] for event in counters]
        assert {"reserved": 40 * MIB} in [event["args"] for event in counters]

    def test_the_file_is_json(self, tmp_path: Path) -> None:
        timeline = stages(3, 4)
        timeline.to_chrome(tmp_path / "step.json")
        found = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))
        assert {event["pid"] for event in found["traceEvents"]} == {0, 1, 2}
        assert {"micro-batch": 3} in [event.get("args") for event in found["traceEvents"]]


class TestPicture:
    @pytest.mark.tier("test")
    @pytest.mark.parametrize("ranks", [1, 3, 6])
    def test_it_has_the_size_of_a_screen(self, ranks: int, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        timeline = a_step() if ranks == 1 else stages(ranks, 8)
        timeline.plot(tmp_path / "step.png")
        header = (tmp_path / "step.png").read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        assert (int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")) == (1600, 900)

    @pytest.mark.tier("test")
    def test_computation_and_communication_of_a_rank_have_rows_and_what_is_exposed_has_a_colour(
        self, tmp_path: Path
    ) -> None:
        pytest.importorskip("matplotlib")
        timeline = a_step()
        timeline.plot(tmp_path / "step.svg")
        text = (tmp_path / "step.svg").read_text(encoding="utf-8")
        for words in ("compute", "stream 1", "dp_shard", "exposed communication", "communication, tp", "activations"):
            assert f"<!-- {words} -->" in text
        assert "#cc0000" in text

    @pytest.mark.tier("test")
    def test_a_step_without_communication_or_memory_is_drawn(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        replace(replay_time([one([op(3)])], Prices()), title="as named").plot(tmp_path / "step.png")
        assert (tmp_path / "step.png").stat().st_size > 1000

    def test_a_step_that_takes_no_time_is_drawn(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        program = Program(0, 1, 1, places=[Place("forward")])
        program.segments["forward", 0, "only"] = Segment("forward", 0, "only", [op(0)])
        program.order = [(("forward", 0, "only"), 0)]
        replay_time([program], Prices()).plot(tmp_path / "step.png")

    def test_another_ending_is_an_error(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        with pytest.raises(ValueError, match="'docx' is no format of a picture"):
            a_step().plot(tmp_path / "step.docx")

    def test_without_matplotlib_the_error_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = builtins.__import__

        def missing(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", missing)
        with pytest.raises(SimError, match="matplotlib is not installed"):
            a_step().plot(tmp_path / "step.png")
