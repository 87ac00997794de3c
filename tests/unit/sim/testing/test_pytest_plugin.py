"""The plugin, used as a project would: one body, four backends, in a pytest of its own."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm

import sim
from sim.late.switch import why_not
from sim.testing import backends
from sim.testing.processes import Watch, _would_run

ROOT = Path(__file__).parents[4]

BODIES = """
import pytest
import torch
import torch.distributed as dist

import sim


@sim.ranks(2)
def test_sum(ctx):
    x = torch.ones(1, device=ctx.device)
    dist.all_reduce(x)
    assert x.item() == ctx.world_size == dist.get_world_size()
    assert ctx.rank == dist.get_rank()


@pytest.fixture
def factor():
    return 3


@pytest.mark.parametrize("size", [1, 4])
@sim.ranks(2, backends=("sim", "gloo"))
def test_fixtures(ctx, factor, size, tmp_path):
    x = torch.full((size,), float(factor), device=ctx.device)
    dist.all_reduce(x)
    assert x.tolist() == [6.0] * size
    (tmp_path / str(ctx.rank)).write_text("seen")
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
"""

FAILING = """
import os
import signal
import time
import pytest
import torch
import torch.distributed as dist

import sim


@sim.ranks(2, backends=("sim", "gloo"))
def test_wrong_on_one(ctx):
    wanted = 41 + ctx.rank
    assert wanted == 41


@sim.ranks(2, backends=("sim",))
def test_stuck(ctx):
    if ctx.rank == 0:
        dist.barrier()


@sim.ranks(2, backends=("sim", "gloo"))
def test_skipped(ctx):
    pytest.skip("not for these ranks")


@sim.ranks(2, backends=("sim", "gloo"))
def test_skipped_by_one(ctx):
    if ctx.rank == 1:
        pytest.skip("not for this rank")


@sim.ranks(2, backends=("sim",))
def test_left_by_one(ctx):
    if ctx.rank == 1:
        pytest.skip("not for this rank either")
    dist.barrier()


@sim.ranks(2, backends=("sim", "gloo"))
def test_expected(ctx):
    dist.barrier()
    pytest.xfail("later")


@sim.ranks(2, backends=("sim", "gloo"))
def test_expected_of_one(ctx):
    if ctx.rank == 0:
        pytest.xfail("later, on this rank")


@sim.ranks(2, backends=("gloo",))
def test_wrong_while_another_waits(ctx):
    assert ctx.rank == 0, "this one is the cause"
    dist.barrier()


@sim.ranks(2, backends=("gloo",))
def test_killed(ctx):
    if ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@sim.ranks(2, backends=("gloo",))
def test_crashes(ctx):
    if ctx.rank == 1:
        os.write(2, b"double free or corruption (not really)\\n")
        os.abort()
    dist.barrier()


@sim.ranks(2, backends=("sim", "gloo"))
def test_lazy(ctx):
    return wait_for(ctx)


async def wait_for(ctx):
    assert False


@pytest.fixture
def unpicklable():
    return lambda: 1


@sim.ranks(2, backends=("sim", "gloo"))
def test_unpicklable(ctx, unpicklable):
    assert unpicklable() == 1
"""


@cache
def installed_plugins() -> list[str]:
    """Return the plugins of pytest that a new process finds."""
    code = "import importlib.metadata as m; print(*[e.name for e in m.entry_points(group='pytest11')])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def run_pytest(
    folder: Path, source: str, *arguments: str, launcher: tuple[str, ...] = (), start: Callable[..., Any] = warm.run
) -> subprocess.CompletedProcess:
    """Run pytest on `source` in a process of its own, with the plugin and without this project's settings."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -ra\n")
    (folder / "test_bodies.py").write_text(source)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SIM_SEED"))}
    environment["PYTHONPATH"] = str(ROOT)
    plugin = () if "hyper_parallel_sim" in installed_plugins() else ("-p", "hyper_parallel.pytest_plugin")
    known = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")  # the process starts with it
    options = ("-p", "no:cacheprovider", "-p", "no:xdist", *known, *plugin)
    return start(
        [sys.executable, *launcher, "-m", "pytest", *options, *arguments], cwd=folder, env=environment, timeout=120
    )


def counts(result: subprocess.CompletedProcess) -> dict[str, int]:
    last = [line for line in result.stdout.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    assert last, result.stdout + result.stderr
    return {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)", last[-1]) if word != "s"}


@pytest.mark.tier("full")
def test_one_body_has_four_arms(tmp_path):
    result = run_pytest(tmp_path, BODIES, "-v", "--sim-seed=7")
    out = result.stdout
    assert result.returncode == 0, out
    assert "sim: seed 7" in out
    assert "test_sum[sim] PASSED" in out
    assert "test_sum[gloo] PASSED" in out
    for size in (1, 4):
        for backend in ("sim", "gloo"):
            assert f"test_fixtures[{backend}-{size}] PASSED" in out
    assert counts(result) == {"passed": 6}, "nothing is made for devices that are not here and were not asked for"
    asked = run_pytest(tmp_path, BODIES, "-v", "-m", "gpu or npu").stdout
    for backend, device in (("gpu", "cuda"), ("npu", "npu")):
        assert re.search(rf"test_sum\[{backend}\] SKIPPED", asked)
        assert re.search(rf"needs 2 {device} devices[:,]", asked), "the reason says how many"


@pytest.mark.parametrize("there", [1, 2])
def test_a_body_needs_as_many_devices_as_ranks(monkeypatch, there):
    monkeypatch.setattr(backends, "get_platform", lambda kind: SimpleNamespace(device_count=lambda: there))
    for name in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    if there == 2:
        backends._need_ranks("gpu", 2, required=True)
        return
    for required, outcome in ((False, pytest.skip.Exception), (True, pytest.fail.Exception)):
        with pytest.raises(outcome, match="needs 2 cuda devices, found 1"):
            backends._need_ranks("gpu", 2, required=required)


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("asked", [("-k", "gpu"), ("test_bodies.py::test_sum[gpu]",), ("--require-devices",)])
def test_items_for_devices_are_made_when_they_are_asked_for(tmp_path, asked):
    source = f"{BODIES}\n\n@sim.ranks(1, backends=('gpu',))\ndef test_gpu(ctx): ...\n"
    result = run_pytest(tmp_path, source, *asked, "-v", "--collect-only")
    assert "test_sum[gpu]" in result.stdout
    assert ("test_gpu[gpu]" in result.stdout) == ("::" not in asked[0])


@pytest.mark.tier("full")
def test_markers_choose_arms_and_devices_can_be_required(tmp_path):
    result = run_pytest(tmp_path, BODIES, "-m", "gpu or npu", "--require-devices", "-q")
    assert result.returncode == 1
    assert counts(result) == {"failed": 2, "deselected": 6}
    assert result.stdout.count("(--require-devices)") >= 2


DTYPES = """
import torch
import torch.distributed as dist

import sim


def reduced(ctx, dtype):
    x = torch.ones(1, device=ctx.device, dtype=dtype)
    dist.all_reduce(x)
    return x.item()


@sim.ranks(2, backends=("sim", "npu"))
def test_asks(ctx):
    assert (ctx.float_dtype is torch.float64) == ctx.reductions.takes(torch.float64) == (ctx.backend == "sim")
    assert reduced(ctx, ctx.float_dtype) == 2.0
    assert (ctx.device_type, dist.get_backend()) == ("cpu", {"sim": "sim", "npu": "hccl"}[ctx.backend])


@sim.ranks(2, backends=("sim", "npu"), check_races=True)
def test_does_not_ask(ctx):
    assert reduced(ctx, torch.float64) == 2.0


@sim.ranks(2, backends=("npu", "gpu"))
def test_without_a_sim_arm(ctx):
    assert reduced(ctx, torch.float32) == 2.0
"""


@pytest.mark.tier("full")
def test_the_npu_arm_on_simulated_ranks(tmp_path):
    result = run_pytest(tmp_path, DTYPES, "-v", "-m", "sim or npu", "--sim-backend=hccl", "--require-devices")
    out = result.stdout
    assert "sim: seed 0, backend hccl" in out
    assert counts(result) == {"passed": 4, "failed": 1, "deselected": 1}
    for passed in ("asks[sim]", "asks[npu]", "does_not_ask[sim]", "without_a_sim_arm[npu]"):
        assert f"test_{passed} PASSED" in out
    assert "test_does_not_ask[npu] FAILED" in out
    assert "InvalidType: cannot all_reduce float64 by ReduceOp.SUM: hccl does not reduce this dtype" in out
    assert "replay: pytest 'test_bodies.py::test_does_not_ask[npu]' --sim-seed=0 --sim-backend=hccl" in out


LATE = """
import torch

import sim


@sim.ranks(2)
def test_forgets_to_wait(ctx):
    x = torch.ones(8, device=ctx.device)
    if ctx.device_type == "npu":
        with torch.npu.stream(torch.npu.Stream()):
            x * 2
"""


@pytest.mark.tier("full")
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_races_are_looked_for_on_late_devices(tmp_path):
    result = run_pytest(tmp_path, LATE, "-v", "-m", "sim or npu", "--sim-device=npu", "--sim-backend=hccl")
    assert counts(result) == {"passed": 1, "failed": 1, "deselected": 1}, "with a backend, the device is for its tests"
    assert "test_forgets_to_wait[npu] FAILED" in result.stdout
    assert "InFlightBufferRace: rank 0 reads a buffer on stream 1 that the default stream writes" in result.stdout
    assert "--sim-seed=0 --sim-backend=hccl --sim-device=npu" in result.stdout


@pytest.mark.tier("full")
def test_other_device_arms_stay_on_devices(tmp_path):
    result = run_pytest(tmp_path, DTYPES, "-m", "npu or gpu", "--sim-backend=nccl")
    assert counts(result) == {"passed": 1, "skipped": 3, "deselected": 2}
    assert "needs 2 npu devices" in result.stdout


@pytest.mark.tier("full")
def test_failures_are_shown(tmp_path):
    result = run_pytest(tmp_path, FAILING, "--sim-seed=5", "-v")
    out = result.stdout
    plain = re.sub(r"^E   ", "", out, flags=re.MULTILINE)
    assert result.returncode == 1, out
    assert "test_wrong_on_one[gloo] FAILED" in out
    gloo = out[out.index("test_wrong_on_one[gloo] _") :]
    gloo = gloo[: gloo.index("test_stuck")]
    assert "--- rank 1 ---" in gloo
    assert "--- rank 0 ---" not in gloo
    assert "assert wanted == 41" in gloo
    assert "rank 1 raised AssertionError" in out
    assert "replay: pytest 'test_bodies.py::test_wrong_on_one[sim]' --sim-seed=5" in out
    assert "no rank can run: 1 of 2 ranks wait" in out
    assert "replay: pytest 'test_bodies.py::test_stuck[sim]' --sim-seed=5" in out
    assert "test_skipped[sim] SKIPPED" in out
    assert "test_skipped[gloo] SKIPPED" in out
    assert "only rank 1 of 2 skipped: not for this rank" in out
    assert "only rank 1 of 2 skipped: not for this rank either\nno rank can run: 1 of 2 ranks wait" in plain
    for backend in ("sim", "gloo"):
        assert f"test_expected[{backend}] XFAIL (later)" in out
        assert f"test_expected_of_one[{backend}] FAILED" in out
        assert f"test_lazy[{backend}] FAILED" in out
    assert "only rank 0 of 2 xfailed: later, on this rank" in out
    assert "--- rank 0 ---\nxfailed: later, on this rank" in plain
    assert out.count("InvalidType: cannot take what test_lazy returned: it is a coroutine, and nothing of it") >= 2
    assert "test_unpicklable[sim] PASSED" in out
    assert "the arguments of test_unpicklable cannot be sent to other processes" in out
    assert "fixtures: unpicklable" in out
    after = plain[plain.index("test_wrong_while_another_waits[gloo] _") :]
    lost = after[after.index("--- rank 0 ---") : after.index("--- rank 1 ---")].strip().splitlines()
    assert len(lost) == 2, "that a peer is gone is one line"
    assert after.index("AssertionError: this one is the cause") > after.index("--- rank 1 ---"), "the cause comes last"
    assert "the process ended without an answer (SIGKILL: perhaps out of memory)" in out
    assert "test_crashes[gloo] FAILED" in out
    assert "the process ended without an answer (SIGABRT)" in out
    assert "Fatal Python error: Aborted" in out, "and where it was"
    assert "double free or corruption (not really)" in out, "what a process printed is shown"


@pytest.mark.tier("full")
@pytest.mark.gloo
def test_under_torchrun(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = run_pytest(tmp_path, BODIES, "-m", "gloo", "-k", "test_sum", "-q", launcher=launcher)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("1 passed") == 2, "each of the two ranks runs it"


@pytest.mark.tier("deep")
@pytest.mark.gloo
def test_under_torchrun_with_fewer_ranks_than_a_body_wants(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    source = BODIES.replace("@sim.ranks(2)", "@sim.ranks(4)")
    result = run_pytest(tmp_path, source, "-m", "gloo", "-k", "test_sum", "-ra", launcher=launcher)
    assert result.stdout.count("1 skipped") == 2, result.stdout + result.stderr
    assert "needs 4 ranks, torchrun started 2" in result.stdout
    required = run_pytest(tmp_path, source, "-m", "gloo", "-k", "test_sum", "--require-devices", launcher=launcher)
    assert "needs 4 ranks, torchrun started 2 (--require-devices)" in required.stdout
    assert required.returncode != 0


STUCK = """
import torch
import torch.distributed as dist
import sim


@sim.ranks(2)
def test_other_operations(ctx):
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.barrier()


@sim.ranks(2, backends=("gloo",))
def test_one_is_missing(ctx):
    if ctx.rank == 0:
        dist.irecv(torch.ones(1), 1).wait()


@sim.ranks(2, backends=("gloo",))
def test_a_long_computation(ctx):
    if ctx.rank == 0:
        import time

        while time.process_time() < 3.0:
            pass
    dist.barrier()


from sim.testing.processes import Watch

Watch._BEAT_S = 0.25  # of a second, so that the tests here take a fourth of their time
"""


def test_a_watched_process_lets_go_of_what_it_computed(monkeypatch):
    """A frame that the watch keeps would keep tensors too: autograd copies a gradient that somebody else has."""
    monkeypatch.setattr(Watch, "_BEAT_S", 0.001)
    watch = Watch(lambda waits: None)
    watch.start()

    def compute():
        value = torch.ones(1)
        time.sleep(0.02)
        return weakref.ref(value)

    try:
        kept = sum(compute()() is not None for _ in range(10))
        assert kept <= 3, "more than a look that was under way when the function returned"
    finally:
        watch.end()
        watch.join()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel what threads do")
def test_who_waits_for_a_core_is_not_who_waits_for_another_rank():
    """On a machine under load, a process may be without a core for as long as one that is stuck."""
    asleep, stopped = threading.Event(), threading.Event()

    def compute():
        while not stopped.is_set():
            torch.ones(256, 256) @ torch.ones(256, 256)

    def is_seen(runs):
        return any(_would_run() is runs or time.sleep(0.01) for _ in range(500))

    sleeper = threading.Thread(target=asleep.wait, daemon=True)
    computer = threading.Thread(target=compute, daemon=True)
    sleeper.start()
    assert is_seen(False), "once it sleeps"
    computer.start()
    try:
        assert is_seen(True)
    finally:
        stopped.set()
        asleep.set()
        computer.join()


@pytest.mark.tier("full")
@pytest.mark.gloo
def test_processes_that_wait_for_each_other_are_named(tmp_path):
    result = run_pytest(tmp_path, STUCK, "-m", "gloo", "-v", "--durations=3", "--durations-min=0")
    plain = re.sub(r"^E   ", "", result.stdout, flags=re.MULTILINE)
    assert (
        "cannot go on: ranks 0-1 wait in communication, and no other rank is left to join them\n"
        "  rank 0: all_reduce, test_bodies.py:10 in test_other_operations\n"
        "  rank 1: barrier, test_bodies.py:12 in test_other_operations\n"
        "  try: pytest 'test_bodies.py::test_other_operations[sim]': simulated ranks name the operations that differ"
    ) in plain
    assert (
        "  rank 0: wait, test_bodies.py:18 in test_one_is_missing\n  rank 1: the end, it has run its body\n"
    ) in plain
    assert "test_a_long_computation[gloo] PASSED" in plain, "who waits for a rank that works is not stuck"


@pytest.mark.tier("full")
@pytest.mark.gloo
def test_ranks_of_torchrun_that_wait_for_each_other_are_named(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = run_pytest(tmp_path, STUCK, "-m", "gloo", "-k", "test_other_operations", "-v", launcher=launcher)
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert "rank 0: all_reduce, test_bodies.py:10 in test_other_operations" in said, said


QUIET = """
import sys


def test_nothing_else_is_imported():
    assert "hyper_parallel.pytest_plugin" in sys.modules
    assert not {"torch", "sim", "numpy"} & set(sys.modules)
"""


@pytest.mark.tier("full")
def test_a_project_without_ranks_does_not_pay_for_them(tmp_path):
    cold = partial(subprocess.run, capture_output=True, text=True, check=False)
    result = run_pytest(tmp_path, QUIET, "-q", start=cold)
    assert result.returncode == 0, result.stdout


@pytest.mark.tier("full")
def test_a_seed_that_is_no_number(tmp_path):
    result = run_pytest(tmp_path, BODIES, "--sim-seed=x")
    assert result.returncode == 4
    assert "argument --sim-seed: invalid int value: 'x'" in result.stderr


@pytest.mark.parametrize("size", [0, -1, True, "2", None])
def test_a_number_of_ranks_that_is_none(size):
    kind = ValueError if type(size) is int else TypeError
    with pytest.raises(kind, match=r"cannot run a test on several ranks: world_size .*\n.*\n  try: @sim.ranks\(4\)"):
        sim.ranks(size)


def test_the_parentheses_are_forgotten():
    with pytest.raises(TypeError, match=r"try: @sim\.ranks"):

        @sim.ranks
        def test_body(ctx): ...


@pytest.mark.parametrize("backends", [(), ("cpu",), ("sim", "tpu")])
def test_an_unknown_arm(backends):
    with pytest.raises(ValueError, match=r"there is no kind of backend .*\n.*\n  try: backends=\('sim', 'gloo'\)"):
        sim.ranks(2, backends=backends)


def test_a_body_without_the_context():
    with pytest.raises(TypeError, match="try: def test_body"):

        @sim.ranks(2)
        def test_body(): ...


def test_a_body_of_which_a_call_runs_nothing():
    with pytest.raises(TypeError) as found:

        @sim.ranks(2, backends=("sim", "gloo"))
        async def test_body(ctx):
            raise AssertionError

    assert str(found.value) == (
        "cannot run test_body on ranks: a call of it runs nothing yet, so that it would always pass\n"
        "  body: a coroutine function\n"
        "  try: def test_body(ctx): asyncio.run(work(ctx)), with all that is to run in an async def work(ctx)"
    )
    with pytest.raises(TypeError) as found:

        @sim.ranks(2)
        def test_generator(ctx):
            yield
            raise AssertionError

    assert str(found.value) == (
        "cannot run test_generator on ranks: a call of it runs nothing yet, so that it would always pass\n"
        "  body: a generator function\n"
        "  try: def test_generator(ctx): ..., without a yield; what has to be set up and torn down belongs in a fixture"
    )
    with pytest.raises(TypeError, match="body: an asynchronous generator function"):

        @sim.ranks(2)
        async def test_both(ctx):
            yield


def test_a_method():
    with pytest.raises(TypeError) as found:

        class TestBodies:
            @sim.ranks(2, backends=("sim", "gloo"))
            def test_body(self, ctx): ...

    assert str(found.value) == (
        "cannot make ranks of test_a_method.<locals>.TestBodies.test_body: it is a method, which the processes of a "
        "backend could not find\n"
        "  backends: gloo start processes\n"
        "  try: backends=('sim',), or a function of the module: def test_body(ctx): ..."
    )
    with pytest.raises(TypeError, match=r"try: def test_body\(self, ctx\)"):

        class TestNothing:
            @sim.ranks(2, backends=("sim",))
            def test_body(self): ...


class TestMethods:
    number = 7

    @sim.ranks(2, backends=("sim",))
    @pytest.mark.parametrize("factor", [1, 2])
    def test_a_method_on_simulated_ranks(self, ctx, factor, tmp_path):
        assert tmp_path.is_dir()
        x = torch.tensor([float(self.number * factor)])
        dist.all_reduce(x)
        assert x.item() == 7.0 * factor * ctx.world_size


LONELY = """
import subprocess

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

import sim


@sim.ranks(2, backends=("sim",))
def test_sum(ctx):
    x = torch.full((1,), float(ctx.rank), device=ctx.device)
    dist.all_reduce(x)
    assert x.item() == 1.0


@pytest.mark.sim
@settings(max_examples=20)
@given(sim.strategies.interleavings(3), sim.strategies.shapes(1, 2))
def test_drawn(schedule, shape):
    def body():
        dist.all_reduce(x := torch.ones(shape))
        return x.flatten().tolist()

    assert sim.run(body, 3, schedule=schedule)[2] == [3.0] * torch.Size(shape).numel()


@sim.ranks(2, backends=("sim",))
def test_the_seed_is_known(ctx):
    assert ctx.seed == 11


@sim.ranks(2, backends=("sim",), check_races=True)
def test_race(ctx):
    dist.all_reduce(x := torch.ones(2), async_op=True)
    x.sum()


def test_not_on_ranks():
    with pytest.raises(AssertionError, match="wants more"):
        subprocess.run("true")


@sim.ranks(2, backends=("sim",), check_replicas=True)
def test_copies(ctx):
    sim.check_replicas(torch.tensor(float(ctx.rank)), group=dist.group.WORLD)
"""

OFFLINE = """
import socket, subprocess, sys, threading
import pytest

def refuse(*args, **options):
    raise AssertionError("a test on simulated ranks wants more than its process")

class Watch:
    def pytest_runtest_setup(self):
        for owner, name in [(socket, "socket"), (socket, "create_connection"), (subprocess, "Popen")]:
            setattr(owner, name, refuse)
        import multiprocessing.process
        multiprocessing.process.BaseProcess.start = refuse

sys.exit(pytest.main(sys.argv[1:], plugins=[Watch()]))
"""


def entry_points() -> list[str]:
    """The lines of this project's pyproject.toml that pytest finds the plugin by."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.entry-points.pytest11]\n")[2]
    return section.partition("\n\n")[0].replace('"', "").splitlines()


@pytest.fixture
def other_project(tmp_path):
    """A project that has nothing of this one but the installed packages: no conftest, no ini file, no plugin option."""
    site, project = tmp_path / "site", tmp_path / "project"
    installed = site / "hyper_parallel-0.dist-info"
    installed.mkdir(parents=True)
    for package in ("hyper_parallel", "sim"):
        (site / package).symlink_to(ROOT / package)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: hyper_parallel\nVersion: 0\n")
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *entry_points(), ""]))
    (project / "tests").mkdir(parents=True)
    (project / "pyproject.toml").write_text('[project]\nname = "lonely"\nversion = "0"\n')
    (project / "tests" / "test_lonely.py").write_text(LONELY)
    (project / "offline.py").write_text(OFFLINE)

    def run(*command: str) -> subprocess.CompletedProcess:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SIM_"))}
        environment["PYTHONPATH"] = str(site)
        return subprocess.run(
            [sys.executable, *command, "-p", "no:cacheprovider", "-p", "no:xdist"],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.tier("full")
def test_a_project_that_only_installs_the_package_and_has_no_network_and_no_other_process(other_project):
    result = other_project("offline.py", "-m", "sim", "--sim-seed=11", "--strict-markers", "-v")
    out = result.stdout
    assert "sim: seed 11" in out, out + result.stderr
    for name in ("test_sum[sim]", "test_drawn", "test_the_seed_is_known[sim]"):
        assert f"{name} PASSED" in out, out
    assert "test_race[sim] FAILED" in out
    assert "InFlightBufferRace" in out
    assert "test_copies[sim] FAILED" in out
    assert "ReplicaMismatch: the copies of 'argument 0' along axis 'world' differ" in out
    assert "replay: pytest 'tests/test_lonely.py::test_copies[sim]' --sim-seed=11" in out
    assert counts(result) == {"failed": 2, "passed": 3, "deselected": 1}
    guarded = other_project("offline.py", "-k", "test_not_on_ranks")
    assert counts(guarded)["passed"] == 1, "the guard would have noticed"


def test_every_strategy_says_what_it_shrinks_towards():
    page = (ROOT / "docs" / "testing.md").read_text()
    public = [name for name, value in vars(sim.strategies).items() if inspect.isfunction(value) and name[0] != "_"]
    own = [name for name in public if getattr(sim.strategies, name).__module__ == "sim.strategies"]
    assert {"interleavings", "layouts", "meshes"} <= set(own)
    for name in own:
        assert "Shrinks towards" in getattr(sim.strategies, name).__doc__, name
        assert f"| `{name}(" in page, f"docs/testing.md does not list {name}"


def test_strategies_without_hypothesis(monkeypatch):
    assert sim.strategies, "imported, whichever tests ran before, so that it can be taken away"
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "sim.strategies", raising=False)
    monkeypatch.delattr(sim, "strategies", raising=False)
    with pytest.raises(
        ImportError, match=r"sim\.strategies needs hypothesis.*\n  try: pip install 'hyper_parallel\[te"
    ):
        sim.strategies  # noqa: B018 - looking it up imports it


def test_what_sim_does_not_have():
    with pytest.raises(AttributeError, match="module 'sim' has no attribute 'strategy'"):
        sim.strategy  # noqa: B018
