"""The tool of the mutation score, on a small package of its own, and the list of this repository's mutants."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants.exchange import CannotBeExchanged, Mutant, assignments, functions, new_code, read_list

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tests" / "mutants" / "run.py"
MUTANTS = read_list(TOOL.with_name("list.toml"))

PACKAGE = """
import time
from dataclasses import dataclass
LIMIT = 10
class Counter:
    step = 2
    def add(self, a, b): return a + b
    @property
    def half(self): return 0.5
    def untested(self): return 7
def counter():
    n = 0
    def count():
        nonlocal n
        n += 1
        return n
    return count
def down(n):
    while n > 0: n -= 1
    return n
def default(n=3): return n
def in_another_process(): return 21
def called(): return 1
@dataclass
class Pair:
    one: int
    def twice(self):
        assert self.one
        return 2 * self.one
"""
TESTS = """
import subprocess, sys
from package.module import LIMIT, Counter, Pair, called, counter, default, down
SEEN = []
def test_add(): assert Counter().add(1, 2) == 3
def test_half_is_there(): assert Counter().half
def test_half(): assert Counter().half == 0.5
def test_step(): assert Counter.step == 2
def test_limit(): assert LIMIT == 10
def test_closure(): assert counter()() == 1
def test_down(): assert down(3) == 0
def test_twice(): assert Pair(2).twice() == 4
def test_default(): assert default() == 3
def test_in_another_process():
    code = "from package.module import in_another_process as f; import sys; sys.exit(f())"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 21
def test_notes_a_call(): SEEN.append(called())
def test_fails_after_another_item_only():
    called()
    assert SEEN != [2]
def test_fails_anyway(): assert Counter().untested() == 8
"""
KILLED = {
    "method": ("a + b", "a - b", "test_add"),
    "property": ("return 0.5", "return 0.25", "test_half"),
    "class attribute": ("step = 2", "step = 3", "test_step"),
    "constant that is imported by name": ("LIMIT = 10", "LIMIT = 11", "test_limit"),
    "closure": ("n += 1", "n += 2", "test_closure"),
    "loop without end": ("n -= 1", "time.sleep(60)", "test_down"),
    "default": ("n=3", "n=4", "test_default"),
    "method of a decorated class": ("2 * self.one", "3 * self.one", "test_twice"),
    "other process": ("return 21", "return 22", "test_in_another_process"),
}
LIVE = {
    "only called by what fails unmutated": ("return 7", "return 9"),
    "no failure alone": ("return 1\n", "return 2\n"),
}


@pytest.mark.tier("test")
def test_mutants_are_killed_by_the_items_that_call_them(tmp_path):
    changes = {name: (old, new) for name, (old, new, _) in KILLED.items()} | LIVE
    tables = [
        f'[["package/module.py"]]\nname = "{name}"\nkind = ""\nold = {json.dumps(old)}\nnew = {json.dumps(new)}\n'
        for name, (old, new) in changes.items()
    ]
    files = {
        "package/__init__.py": "",
        "package/module.py": PACKAGE,
        "tests/test_it.py": TESTS,
        "tests/mutants/list.toml": "\n".join([*tables, tables[0].replace("method", "other") + 'equivalent = "so"\n']),
        "pytest.ini": "[pytest]\n",
        "tests/conftest.py": 'import pytest\npytest.register_assert_rewrite("package.module")\n',
    }
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    plugins = "-p no:hyper_parallel_sim"  # whose import of torch takes two seconds

    def run(option):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": plugins}
        command = [sys.executable, str(TOOL), "--hangs", "10", option]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
        )

    done = run("--folder=package")
    rows = [json.loads(line) for line in (tmp_path / "out" / "mutants" / "outcomes.jsonl").read_text().splitlines()]
    killed = {row["mutant"]: row["by"].partition("::")[2] for row in rows if row["verdict"] == "killed"}
    assert killed == {name: by for name, (_, _, by) in KILLED.items()}, done.stdout + done.stderr
    assert [row["mutant"] for row in rows if row.get("how") == "hangs"] == ["loop without end"]
    assert [row["mutant"] for row in rows if "fresh" in row] == ["default"]
    assert {row["mutant"] for row in rows if row["verdict"] == "lives"} == LIVE.keys()
    for text in (done.stdout, run("--table").stdout):
        assert "| package | 9 | 2 | 1 | 82% |" in text
        assert "- package/module.py:10: only called by what fails unmutated" in text


def test_code_of_another_shape_is_not_exchanged():
    with pytest.raises(CannotBeExchanged):
        new_code(Path("file"), "def f(): return 1\n", "def f(): return (lambda: 1)()\n")
    changed = {
        "x = 1": "x = 1; y = 2",
        "@a\nclass C:\n  x = 1": "@a\nclass C:\n  x = 2",
        "def f(x=1): pass": "def f(x=2): pass",
        "x.y = 1": "x.y = 2",
    }
    for old, new in changed.items():
        with pytest.raises(CannotBeExchanged):
            list(assignments(ast.parse(old).body, ast.parse(new).body))


def test_a_place_is_the_innermost_function():
    source = "class C:\n    def f(self, x=1):\n        def g():\n            return 2\n        return g\n"
    assert [name for name, _ in functions(ast.parse(source))] == ["C.f", "C.f.g"]
    for old, place in (("return 2", "C.f.g"), ("return g", "C.f"), ("x=1", ""), ("class C", "")):
        assert Mutant("", "m.py", old, f"{old} ", "").place(source) == place


@pytest.mark.parametrize("folder", sorted({each.folder for each in MUTANTS}))
def test_every_mutant_of_the_list_applies(folder):
    for mutant in (each for each in MUTANTS if each.folder == folder):
        source = (ROOT / mutant.file).read_text()
        assert mutant.text(source) != source, mutant.name
        compile(mutant.text(source), mutant.file, "exec", ast.PyCF_ONLY_AST)


def test_a_mutant_that_does_not_apply_is_named():
    with pytest.raises(ValueError, match=r"gone: 'x' occurs 2 times in a.py, not once"):
        Mutant("gone", "a.py", "x", "y", "").text("x x")


def test_names_of_mutants_are_unique():
    assert len({each.name for each in MUTANTS}) == len(MUTANTS)
