"""The tiers of this suite: where items are placed, what is said of slow ones, and that every run ends."""

from __future__ import annotations

import ast
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FILE, TIERS, place, read_tiers

ROOT = Path(__file__).parents[3]

# Above the limits of this suite's own runs, far enough that only what is meant to be slow is.
LOWER_LIMITS = '\nLIMITS["test"], TOO_SLOW["check"] = 0.5, 1.0\n'
SLOW = """
import time


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_quick(): ...


def test_slow():
    burn(1.1)


def test_slow_in_another_process():
    import subprocess, sys

    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 1.1: pass"], check=True)
"""

# The process that one test starts is waited for in the next one, which then has its CPU time.
CHARGED = """
import subprocess, sys

LEFT = []


def test_leaves_a_process_behind():
    LEFT.append(subprocess.Popen([sys.executable, "-c", "import time\\nwhile time.process_time() < 1.1: pass"]))


def test_charged():
    for process in LEFT:
        process.wait()
"""


def functions(file: str) -> set[str]:
    """Return the tests of a file, as pytest writes them behind the file's name."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_what_is_listed_exists():
    for files in read_tiers().values():
        for file, names in files.items():
            assert {name.partition("[")[0] for name in names} <= functions(file), file


def test_a_function_is_listed_by_its_name_where_its_items_agree():
    costs = {"tests/a.py::test_x[1]": 0.1, "tests/a.py::test_x[2]": 0.3, "tests/a.py::test_y[1]": 3.0}
    costs |= {"tests/a.py::test_y[2]": 40.0, "tests/a.py::test_z": 0.1}
    known = {"test": {"tests/a.py": ["test_z"], "tests/b.py": ["test_w"]}, "full": {"tests/b.py": ["test_v[1]"]}}
    assert place(costs, known) == {
        "test": {"tests/a.py": ["test_x[2]"], "tests/b.py": ["test_w"]},
        "full": {"tests/a.py": ["test_y"], "tests/b.py": ["test_v[1]"]},
    }


@pytest.fixture
def suite(tmp_path):
    """A suite of its own with this one's conftest, in which less is slow."""
    (tmp_path / "conftest.py").write_text(FILE.with_name("conftest.py").read_text() + LOWER_LIMITS)
    (tmp_path / "test_slow.py").write_text(SLOW)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: x\n")
    (tmp_path / FILE.name).write_text('{"test": {}, "full": {}}')

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
        own = r"test_slow.py::test_slow: [1-9]\.\d CPU-s \([1-9]\.\d its own, 0\.0 of processes\)"
        other = r"test_slow.py::test_slow_in_another_process: [1-9]\.\d CPU-s \(0\.\d its own, [1-9]\.\d of processes\)"
        for row in (own, other):
            assert re.search(rf"too slow for its tier \(tests/tiers.json\): {row}, in 'check': 0\.1", said), said
        assert "test_quick:" not in said
    assert "; alone" not in checked.stdout, "only the full tier fails by it"
    assert len(re.findall(r"; alone [1-9]\.\d CPU-s \(", full.stdout)) == 2
    assert suite("--tier", "full", "--write-tiers").returncode == 0
    assert json.loads((tmp_path / FILE.name).read_text())["full"] == {
        "test_slow.py": ["test_slow", "test_slow_in_another_process"]
    }
    assert suite("--tier", "full").returncode == 0
    assert "1 passed, 2 deselected" in suite("--tier", "test").stdout


def test_what_is_slow_only_among_others_is_named_and_passes(suite, tmp_path):
    (tmp_path / "test_slow.py").write_text(CHARGED)
    full = suite("--tier", "full")
    assert full.returncode == 0, full.stdout
    row = r"slow among others, not alone \S+ test_slow.py::test_charged: [1-9]\.\d CPU-s .*; alone 0\.\d "
    assert re.search(row, full.stdout), full.stdout
    assert "too slow" not in full.stdout


def test_each_tier_runs_what_the_one_before_runs(suite, tmp_path):
    (tmp_path / "test_slow.py").write_text(
        "import pytest\n"
        + "".join(f"def test_{tier}(): ...\n" for tier in TIERS[:3])
        + "@pytest.mark.slow\ndef test_deep(): ...\n"
    )
    (tmp_path / FILE.name).write_text(
        '{"test": {"test_slow.py": ["test_test"]}, "full": {"test_slow.py": ["test_full"]}}'
    )
    for number, tier in enumerate(TIERS, start=1):
        assert f"{number} passed" in suite("--tier", tier).stdout, tier
    assert "4 passed" in suite().stdout, "without a tier all run"


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
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "tests/multidevice/trainer/test_trainer.py",
                "-k",
                tests,
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    out, _ = process.communicate(timeout=200)
    assert "2 passed" in out, out
