"""The command that measures a device: its parts at small sizes, what one that fails leaves, and what is made of it."""

import gc
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sim
from benchmarks import device
from benchmarks.device import PARTS, Kernels, Place, kernels_of, measure_all, table_of
from sim.late.switch import why_not

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*grouped_mm.*:UserWarning"),
]
PLACE = Place("cpu" if why_not() else "npu", small=True)
TABLES = {
    "engine": {"alone", "engine", "aims"},
    "predicted": {"predicted", "aims"},
    "redistribute": {"pairs", "redistribute", "aims"},
    "overhead": {"overhead"},
    "attention": {"attention"},
    "experts": {"experts"},
    "collectives": {"one rank"},
    "conformance": {"tests"},
    "hardware": {"hardware"},
    "bodies": {"tests"},
}


@pytest.mark.tier("full", each=4)
@pytest.mark.parametrize("part", TABLES)
def test_a_part_runs_where_there_is_no_device(part):
    tables = {}
    for table, row in PARTS[part][0](PLACE):
        tables.setdefault(table, []).append(row)
        json.dumps(row)
    assert set(tables) == TABLES[part]
    assert not any("error" in row for rows in tables.values() for row in rows)
    if part == "engine":
        engines = ["plain", "ours", "fused", "fsdp2"] * 2
        assert [[row["engine"] for row in tables[name]] for name in ("alone", "engine")] == [engines, engines]
        if not why_not():
            assert all(row["peak, MB"] > 0 for row in tables["alone"][:4])
    if part == "predicted":
        hows = [row["how"].partition(", ")[2] for row in tables["predicted"]]
        assert hows == ["", "full checkpointing", "compiled"]
    if part == "hardware":
        figures = {row["figure"]: row["value"] for row in tables["hardware"]}
        assert all(figures[name] > 0 for name in ("peak.fp32", "device.bandwidth", "device.memory", "host.collective"))
    if part == "collectives":
        assert len(tables["one rank"]) == 20
        assert {row["wrong"] + row["not as reductions_of says"] for row in tables["one rank"]} == {"nonenone"}
    if part in ("conformance", "bodies"):
        last = tables["tests"][-1]
        assert (last["failed"], last["passed"] > 0) == (0, True)


@pytest.mark.tier("test")
def test_an_engine_that_fails_is_a_row_and_the_others_are_measured(monkeypatch):
    def build(self, engine, mesh, built=device.Protocol.build):
        if engine == "fused":
            raise ValueError("no")
        return built(self, engine, mesh)

    monkeypatch.setattr(device.Protocol, "build", build)
    monkeypatch.setattr(device, "contest", lambda *_: pytest.fail("cut off"))
    rows = []
    with device.one_rank(PLACE.alone), pytest.raises(pytest.fail.Exception, match="cut off"):
        rows.extend(device._engines("here", PLACE.alone, lambda call, *args: call(*args)))
    assert [row["engine"] for _, row in rows] == ["plain", "ours", "fused", "fsdp2"]  # each before what comes after it
    assert [row.get("error") for _, row in rows] == [None, None, "ValueError: no", None]

    def fork() -> int | None:
        process = multiprocessing.get_context("fork").Process(target=abs, args=(1,))
        process.start()
        process.join(20)
        process.kill()
        return process.exitcode

    # torch's caches keep the group, which a process that another thread forks would free, and wait for its threads.
    gc.collect()
    assert sim.run(fork, 1) == [0]


@pytest.mark.tier("full")
def test_a_test_that_hangs_or_crashes_is_named_and_the_others_run(monkeypatch, tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import os, threading, pytest\n"
        "pytestmark = [pytest.mark.sim, pytest.mark.npu]\n"
        "def test_first(): pass\n"
        "def test_that_hangs(): threading.Event().wait()\n"
        "def test_that_crashes(): os.abort()\n"
        "def test_that_fails(): assert 1 == 2, 'no'\n"
        "def test_left(): pytest.skip()\n"
        "def test_last(): pass\n"
    )
    (tmp_path / "test_b.py").write_text("import not_here\n")
    monkeypatch.setattr(device, "HANGS_AFTER", 1)
    rows = list(device._pytest(PLACE, [str(tmp_path)]))
    assert rows[-1] == ("tests", {"passed": 2, "failed": 4, "skipped": 1})
    failed = {row["failed"].rpartition("::")[2]: row["why"] for table, row in rows if table == "failed"}
    names = {name for name in failed if "." not in name}
    assert names == {"test_that_hangs", "test_that_crashes", "test_that_fails"}
    assert "crashed while running" in failed["test_that_hangs"]
    assert failed["test_that_fails"] == "AssertionError: no"
    with pytest.raises(RuntimeError, match=r"pytest has ended with 4(?s:.*)unrecognized arguments: --odd"):
        list(device._pytest(PLACE, [str(tmp_path)], "--odd"))


def test_no_test_is_of_two_parts():
    conformance, bodies = (device.files_of(part, Place("cuda")) for part in ("conformance", "bodies"))
    assert len(conformance) == 8
    assert not set(conformance) & set(bodies)
    assert len(conformance + bodies) == len(list((device.ROOT / "tests/multidevice").rglob("test_*.py")))


def test_a_part_that_fails_does_not_keep_the_others_from_being_measured(tmp_path):
    ends = {"experts": "", "attention": "sys.exit('crashed')", "overhead": "threading.Event().wait()", "hardware": ""}

    def start(command, **options):
        rows = '["t", {"n": 1}]\n["tests", {"passed": 1}]\n["tests", {"passed": 2}]\n'
        if command[3] == "hardware":
            rows += '["error", {"error": "ValueError: no"}]\n["cut off'
        Path(command[-1]).write_text(rows)
        code = f"import sys, threading; {ends[command[3]]}"
        return subprocess.Popen([sys.executable, "-c", code], **options)

    limited = dict(PARTS, overhead=(PARTS["overhead"][0], 0.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "PARTS", limited)
        found = measure_all(Place("cpu", small=True), list(ends), tmp_path, start=start)
        late = measure_all(Place("cpu", small=True), ["experts"], tmp_path / "late", minutes=0, start=start)
    parts = found["parts"]
    assert [parts[part]["error"] for part in ends] == [
        "",
        "it ended with status 1: crashed",
        "cut off after 0.5 s",
        "ValueError: no",
    ]
    assert all(entry["tables"] == {"t": [{"n": 1}], "tests": [{"passed": 2}]} for entry in parts.values())
    assert json.loads((tmp_path / "device.json").read_text()) == found
    assert "Failed: cut off after 0.5 s" in (tmp_path / "device.md").read_text()
    assert late["parts"]["experts"]["error"] == "no time was left for it"


def test_the_kernels_and_copies_of_a_profile_are_counted():
    def event(name, where="CUDA", us=2.0, annotation=False):
        return SimpleNamespace(
            name=name,
            device_type=SimpleNamespace(name=where),
            is_user_annotation=annotation,
            time_range=SimpleNamespace(elapsed_us=lambda: us),
        )

    events = [event("gemm"), event("add", us=1.0), event("Memcpy DtoD"), event("Memset"), event("aten::mm", "CPU")]
    found = kernels_of([*events, event("step", annotation=True)])
    assert found[:2] == Kernels(2, 2, 0)[:2]
    assert found.seconds == pytest.approx(7e-6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        torch.ones(2) + 1
    assert kernels_of(profiled.events()) == Kernels(0, 0, 0.0)  # its events have what is looked at


def test_an_aim_is_met_or_not_and_a_table_has_all_columns():
    (met,), (missed,), none = (list(device.aim("step", value, 0.97)) for value in (0.9, 1.0, None))
    assert (met[1]["met"], missed[1]["met"], none) == ("yes", "no", [])
    assert table_of([{"a": 1.0, "b": "x|y"}, {"a": 1234.5, "c": None}]).splitlines() == [
        "| a | b | c |",
        "|--:|---|---|",
        "| 1 | x\\|y | - |",
        "| 1,234 | - | - |",
    ]


def test_predicted_is_drawn_beside_measured(tmp_path):
    pytest.importorskip("matplotlib")
    figures = {"measured, ms": 2.0, "predicted, ms": 1.0, "measured, MB": 3.0, "predicted, MB": 4.0}
    rows = [{"hidden x layers": "2 x 2", "how": "one process", **figures}, {"how": "x", "error": "out of memory"}]
    device.draw({"parts": {"predicted": {"tables": {"predicted": rows}}}}, tmp_path / "device.svg")
    assert "<svg" in (tmp_path / "device.svg").read_text()
    device.draw({"parts": {}}, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


def test_the_ten_runs_are_of_real_size():
    cases = device.configurations(Place("cuda"))
    assert len(cases) == 10
    assert {case.model.hidden_size for case in cases} == {2048, 3072, 4096}
    assert {case.parallel.checkpointing for case in cases} == {"none", "selective", "full"}
    assert sum(case.parallel.compile for case in cases) == 3
    assert {case.processes for case in cases} == {1}
    assert sum(limit for _, limit in PARTS.values()) <= 600  # what is cut off by the eight minutes comes last


def test_an_unknown_part(capsys):
    with pytest.raises(SystemExit):
        device.main(["wheels", "--device", "cpu"])
    assert "no part is called 'wheels'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            device.main(["experts"])
        assert "cannot use platform 'cuda'" in capsys.readouterr().err
