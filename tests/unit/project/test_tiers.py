"""The tiers of this suite: where items are placed, what is said of slow ones, and that every run ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FOLDER, LATE, PROCESSES, TIERS

pytestmark = pytest.mark.tier("full")

ROOT = Path(__file__).parents[3]

# Above the limits of this suite's own runs, far enough that only what is meant to be slow is.
LOWER_LIMITS = '\nLIMITS["test"], TOO_SLOW["check"] = 0.2, 0.4\n'
SLOW = """
import time


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_quick(): ...


def test_slow():
    burn(0.5)


def test_slow_in_another_process():
    import subprocess, sys

    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"], check=True)
"""

# The process that one test starts is waited for in the next one, which then has its CPU time.
CHARGED = """
import subprocess, sys

LEFT = []


def test_leaves_a_process_behind():
    LEFT.append(subprocess.Popen([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"]))


def test_charged():
    for process in LEFT:
        process.wait()
"""


@pytest.fixture
def suite(tmp_path):
    """A suite of its own with this one's conftest, in which less is slow."""
    (tmp_path / "conftest.py").write_text((FOLDER / "conftest.py").read_text() + LOWER_LIMITS)
    (tmp_path / "test_slow.py").write_text(SLOW)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: x\n    tier: x\n    sim: x\n    gloo: x\n")

    def run(*options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    return run


def test_what_is_too_slow_is_named_and_fails_the_full_tier(suite, tmp_path):
    checked = suite("--tier", "check")
    assert checked.returncode == 0, checked.stdout
    full = suite("--tier", "full")
    assert full.returncode == 1
    for said in (checked.stdout, full.stdout):
        assert "3 items, " in said
        own = r"test_slow: 0\.[4-9] CPU-s \(0\.[4-9] its own, 0\.0 of processes\)"
        other = r"test_slow_in_another_process: [01]\.\d CPU-s \(0\.[0-3] its own, 0\.[4-9] of processes\)"
        for row in (own, other):
            row = rf"too slow for its tier \(pytest.mark.tier\): test_slow.py::{row}, in 'check': 0\.1"
            assert re.search(row, said), said
        assert "test_quick:" not in said
    assert "; alone" not in checked.stdout, "only the full tier fails by it"
    assert len(re.findall(r"; alone [01]\.\d CPU-s \(", full.stdout)) == 2
    marked = SLOW.replace("def test_slow", '@pytest.mark.tier("full")\ndef test_slow')
    (tmp_path / "test_slow.py").write_text(f"import pytest\n{marked}")
    assert suite("--tier", "full").returncode == 0


def test_what_is_slow_only_among_others_is_named_and_passes(suite, tmp_path):
    (tmp_path / "test_slow.py").write_text(CHARGED)
    full = suite("--tier", "full")
    assert full.returncode == 0, full.stdout
    row = r"slow among others, not alone \S+ test_slow.py::test_charged: 0\.[4-9] CPU-s .*; alone 0\.[0-3] "
    assert re.search(row, full.stdout), full.stdout
    assert "too slow" not in full.stdout


# Of a long list, some run in their tier, and the others in `deep`.
SOME = """
@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("n", range(7))
def test_some(n):
    print(f'item {n}')


@pytest.mark.tier("full", each=4)
@pytest.mark.parametrize("arm", ["one value"])
@pytest.mark.parametrize(("fault", "message"), [(None, ""), ("left out", "lost"), ("twice", "too much")])
@pytest.mark.parametrize("engine", ["ours", "theirs"])
def test_product(engine, fault, message, arm):
    print(f'{engine} {fault}.')
"""
# A file that does not stand for others: what simulated ranks run, processes run in `deep`.
ON_PROCESSES = """
@pytest.mark.parametrize("arm", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("sim", "gloo")])
def test_both(arm): ...


@pytest.mark.gloo
def test_on_processes_only(): ...
"""


def test_each_tier_runs_what_the_one_before_runs(suite, tmp_path):
    marks = {"check": "", "test": '@pytest.mark.tier("test")', "full": '@pytest.mark.tier("full")'}
    marks["deep"] = "@pytest.mark.slow"
    tests = "".join(f"{mark}\ndef test_{tier}(): ...\n" for tier, mark in marks.items())
    (tmp_path / "test_slow.py").write_text(f"import pytest\n{tests}{SOME}{ON_PROCESSES}")
    shown = {tier: suite("--tier", tier, "-s", "-v").stdout for tier in TIERS}
    for tier, number in zip(TIERS, (2, 7, 11, 20), strict=True):
        assert f" {number} passed" in shown[tier], shown[tier]
    assert re.findall(r"item (\d)", shown["test"]) == ["0", "3", "6"], shown["test"]
    kept = {"ours None.", "theirs left out.", "ours twice."}  # each engine and each fault
    assert set(re.findall(r"(?:ours|theirs) [\w ]+\.", shown["full"])) == kept
    assert "20 passed" in suite().stdout, "without a tier all run"


@pytest.mark.parametrize("names", [LATE, PROCESSES])
def test_files_that_stand_for_others_are_there(names):
    files = {path.stem.removeprefix("test_") for path in FOLDER.rglob("test_*.py")}
    assert names
    assert not names - files, "a name that is no file's puts no test of it into the tier full"


CACHES = """
from functools import cache


@cache
def kept():
    return set()


def test_keeps():
    kept().add(1)


def test_finds_it():
    assert kept() == {1}
"""


def test_what_a_file_has_cached_is_forgotten_after_it(suite, tmp_path):
    (tmp_path / "test_slow.py").write_text(CACHES)
    after = "import sys\n\ndef test_after():\n    assert sys.modules['test_slow'].kept() == set()\n"
    (tmp_path / "test_tail.py").write_text(after)
    assert "3 passed" in suite().stdout


def test_later_collections_of_garbage_leave_out_what_a_file_has_left(suite, tmp_path):
    left = "LEFT = []\n\ndef test_leaves():\n    LEFT.extend([] for _ in range(100))\n"
    (tmp_path / "test_slow.py").write_text(left)
    (tmp_path / "test_tail.py").write_text(
        "import gc\nimport sys\n\ndef test_after():\n    left = sys.modules['test_slow'].LEFT[0]\n"
        "    assert left == [] and not any(each is left for each in gc.get_objects())\n"
    )
    assert "2 passed" in suite().stdout


def test_a_test_that_stops_the_collection_of_garbage_stops_it_for_itself_alone(suite, tmp_path):
    (tmp_path / "test_slow.py").write_text(
        "import gc\n\ndef test_off():\n    gc.disable()\n\ndef test_after():\n    assert gc.isenabled()\n"
    )
    assert "2 passed" in suite().stdout


def test_a_run_in_which_interrupts_are_ignored_ends():
    """As under `nohup make test &`: a child inherits that SIGINT is ignored, unless a test sets it."""
    tests = "test_ctrl_c_stops_all_simulated_ranks_and_keeps_the_log or test_an_interrupt_in_this_process"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command = [*pytest_here, "tests/multidevice/trainer/test_trainer.py", "-k", tests]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    out, _ = process.communicate(timeout=200)
    assert "2 passed" in out, out
