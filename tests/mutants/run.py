"""The mutation score: put bugs into the library one at a time, and see which of them the suite finds.

    python tests/mutants/run.py [--folder hyper_parallel/core/checkpoint] [--mutant NAME] [--lives] [--tier check]

One process collects the suite, and forks. First, items run unmutated with a mark at the start of every function of the
library. Which of them pass, what they cost and which functions they call is kept in `out/mutants/` until the library or
their file changes. Then each mutant is put into a fork by exchanging code (`exchange.py`). The items that call the
changed function run there until one fails. Processes that they start import the mutated file (`hook/`), as does a new
process for a mutant that cannot be exchanged. An item kills a mutant if it also fails alone.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import hashlib
import importlib
import json
import marshal
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from exchange import (
    CannotBeExchanged,
    Changes,
    Mutant,
    changes_of,
    exchange,
    functions,
    live_functions,
    mark,
    new_code,
    read_list,
)
from hypothesis import HealthCheck, Phase, settings

TIERS = ("check", "test", "full")
ROOT = Path.cwd()
OUT = ROOT / "out" / "mutants"
RECORD, OUTCOMES = OUT / "record.jsonl", OUT / "outcomes.jsonl"
LONGEST_S = 600.0  # of wall time, of an unmutated item

# As in the tiers, but what fails is not made smaller: that would take most of the time.
ONLY = {"phases": [Phase.explicit, Phase.generate], "suppress_health_check": [*HealthCheck]}
settings.register_profile("mutants", deadline=None, derandomize=True, max_examples=10, database=None, **ONLY)


def tier_of(item: pytest.Item) -> str:
    """Return the tier of an item, from the suite's conftest; "check" in a suite without."""
    conftest: Any = sys.modules.get("conftest")
    return item.stash[conftest.TIER] if hasattr(conftest, "TIER") else "check"


@cache
def mutants() -> list[Mutant]:
    return read_list(ROOT / "tests" / "mutants" / "list.toml")


@cache
def digest(files: Sequence[Path]) -> str:
    return hashlib.sha1(b"".join(each.read_bytes() for each in files)).hexdigest()[:12]


@cache
def distance(test: Path, mutant: Mutant) -> int:
    """Return 0 where a test file is of the mutated module, 1 where it names its folder, else 2."""
    text, (*_, folder, module) = test.read_text(), mutant.module.split(".")
    names, is_called = mutant.module.rpartition(".")[0] in text, folder in test.stem
    return (
        0 if mutant.module in text or module in test.stem or (names and is_called) else 1 if names or is_called else 2
    )


# -- items in a fork -------------------------------------------------------------------------------------------------


def run(items: Sequence[pytest.Item], changes: Changes, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Make the changes in a fork and run items there; yield a row for each.

    Where the process dies or hangs, the row says so, and that is the last one.

    Args:
        limits: Seconds of wall time by item, after which it hangs.
    """
    read, write = os.pipe()
    temporary = tempfile.mkdtemp()
    pid = os.fork()
    if not pid:
        os.setsid()
        os.environ |= {"PYTEST_DEBUG_TEMPROOT": temporary, "TMPDIR": temporary}
        with contextlib.suppress(BaseException), os.fdopen(write, "w", buffering=1) as rows:
            for change, arguments in changes:
                change(*arguments)
            _run_all(items, rows)
        os._exit(0)
    os.close(write)
    told = b""
    try:
        for item in items:
            until, failed = time.monotonic() + limits.get(item.nodeid, LONGEST_S), ""
            while b"\n" not in told and not failed:
                is_told = select.select([read], [], [], max(until - time.monotonic(), 0.0))[0]
                more = os.read(read, 1 << 16) if is_told else b""
                failed = "" if more else "died" if is_told else "hangs"
                told += more
            line, _, told = told.partition(b"\n")
            yield {"item": item.nodeid, "failed": failed} if failed else json.loads(line)
            if failed:
                return
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.close(read)
        os.waitpid(pid, 0)
        shutil.rmtree(temporary, ignore_errors=True)


class Reports:
    """Whether the item that runs has failed."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or "failed" * report.failed


def _run_all(items: Sequence[pytest.Item], rows: Any) -> None:
    reports, hits = Reports(), set[int]()
    builtins.__hit__ = hits.add  # type: ignore[attr-defined]
    items[0].config.pluginmanager.register(reports)
    for item, following in zip(items, [*items[1:], None], strict=True):
        reports.failed = ""
        hits.clear()
        before = _cpu_s()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        own, others = (round(now - then, 3) for now, then in zip(_cpu_s(), before, strict=True))
        row = {"item": item.nodeid, "failed": reports.failed, "own": own, "others": others, "hits": sorted(hits)}
        print(json.dumps(row), file=rows, flush=True)


def _cpu_s() -> list[float]:
    """Return the CPU time of this process, and that of the processes that it has waited for."""
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return [each.ru_utime + each.ru_stime for each in times]


# -- which items call a function -------------------------------------------------------------------------------------


class Record:
    """What items did unmutated, by item: whether they passed, their CPU time, the functions that they called."""

    def __init__(self, items: Sequence[pytest.Item]) -> None:
        self.items = {each.nodeid: each for each in items}
        packages = sorted({each.file.partition("/")[0] for each in mutants()})
        files = [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]
        self.texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
        self.live = live_functions(ROOT, self.texts.keys())
        assert any(self.live.values()), f"{packages} are imported from elsewhere than {ROOT}"
        helpers = (each for each in sorted((ROOT / "tests").rglob("*.py")) if "mutants" not in each.parts)
        self.library = digest((*files, *(each for each in helpers if not each.name.startswith("test_"))))
        marked = OUT / f"marked-{self.library}"
        if not marked.exists():
            marked.write_bytes(marshal.dumps(self._marked()))
        self.keys, codes = marshal.loads(marked.read_bytes())
        self.marks = changes_of(codes, self.live)
        self.rows: dict[str, dict[str, Any]] = {}
        for line in RECORD.read_text().splitlines() if RECORD.exists() else ():
            row = json.loads(line)
            if row["item"] in self.items and row["digest"] == self._digest_of(row["item"]):
                self.rows[row["item"]] = row | {"hits": frozenset(row["hits"])}

    def _digest_of(self, name: str) -> str:
        return self.library + digest((self.items[name].path,))

    def _marked(self) -> tuple[list[tuple[str, str]], dict[str, dict[Any, CodeType]]]:
        """Return file and name of each function, by number, and by file the code that tells when it is called."""
        keys, codes = [], {}
        for file, text in self.texts.items():
            codes[file] = new_code(ROOT / file, text, mark(text, len(keys)))
            keys += [(file, name) for name, _ in functions(ast.parse(text))]
        return keys, codes

    def cost(self, item: pytest.Item) -> float:
        """Return the CPU time of an item and its processes."""
        return self.rows[item.nodeid]["own"] + self.rows[item.nodeid]["others"]

    def complete(self, items: Sequence[pytest.Item]) -> None:
        """Run the items of which nothing is known; those that fail with marks, again without."""
        unknown = [each for each in items if each.nodeid not in self.rows]
        self._run(unknown, self.marks)
        self._run([each for each in unknown if self.rows[each.nodeid]["failed"]], [])

    def _run(self, items: Sequence[pytest.Item], changes: Changes) -> None:
        with RECORD.open("a") as file:
            while items:
                for row in run(items, changes, {}):
                    items = items[1:]
                    row = {"own": 0.0, "others": 0.0, "hits": []} | row | {"digest": self._digest_of(row["item"])}
                    print(json.dumps(row), file=file, flush=True)
                    self.rows[row["item"]] = row | {"hits": frozenset(row["hits"])}

    def chosen(self, mutant: Mutant, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Return the items that pass unmutated and call the function, those that call little else first.

        Of items that start processes, or fail with marks, it is not known what they call: those of near files are
        chosen. Items that start processes come last.
        """
        place = mutant.place(self.texts[mutant.file])
        keys = ((file, name if place else "") for file, name in self.keys)
        numbers = {number for number, key in enumerate(keys) if key == (mutant.file, place)}
        found = []
        for item in (each for each in items if each.nodeid in self.rows):
            row = self.rows[item.nodeid]
            unknown = row["others"] > 0.1 or not row["hits"]
            if not row["failed"] and (row["hits"] & numbers or (unknown and distance(item.path, mutant) < 2)):
                found.append((row["others"] > 0.1, not row["hits"], len(row["hits"]), self.cost(item), item.nodeid))
        return [self.items[name] for *_, name in sorted(found)]


# -- mutants ---------------------------------------------------------------------------------------------------------


class Run:
    """The run of a list of mutants, a plugin of pytest that takes the place of its own loop over the items."""

    def __init__(self, chosen: list[Mutant], options: argparse.Namespace) -> None:
        self.mutants, self.options = chosen, options
        self.terminal = os.fdopen(os.dup(1), "w", buffering=1)  # pytest's own output is kept in a file

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("there are files that cannot be collected")
        tiers = TIERS[: TIERS.index(self.options.tier) + 1]
        self.tiers = {tier: [each for each in session.items if tier_of(each) == tier] for tier in tiers}
        for file in {each.file for each in mutants()}:
            importlib.import_module(Mutant("", file, "", "", "").module)
        with contextlib.suppress(ImportError):  # what the first item would import, in each fork anew
            for name in importlib.import_module("warm").PRELOAD:
                importlib.import_module(name)
        self.record = Record([each for items in self.tiers.values() for each in items])
        if self.options.fresh:
            Path(self.options.fresh).write_text(json.dumps(self.outcome(self.mutants[0], [])))
            return True
        jobs = self.options.jobs
        share = next((number for number in range(1, jobs) if not os.fork()), 0)
        for mutant in self.mutants[share::jobs]:
            self.judge(mutant)
        if share:
            os._exit(0)
        for _ in range(1, jobs):
            os.wait()
        return True

    def judge(self, mutant: Mutant) -> None:
        """Find out whether the suite kills a mutant, and keep it in `OUTCOMES`."""
        source = self.record.texts[mutant.file]
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder, "mutated.py")
            text.write_text(mutant.text(source))
            hook = str(Path(__file__).with_name("hook"))
            environment = {
                "MUTANT_FILE": str(ROOT / mutant.file),
                "MUTANT_TEXT": str(text),
                "PYTHONPATH": os.pathsep.join(filter(None, (hook, os.environ.get("PYTHONPATH")))),
            }
            try:
                changes = exchange(mutant, ROOT, source, self.record.live)
                outcome = self.outcome(mutant, [(os.environ.update, (environment,)), *changes])
            except CannotBeExchanged as reason:
                outcome = self.outcome_of_fresh_process(mutant, environment, Path(folder, "outcome.json"))
                outcome["fresh"] = str(reason)
        row = {"mutant": mutant.name, "change": [mutant.old, mutant.new], "tier": self.options.tier} | outcome
        with OUTCOMES.open("a") as file:
            print(json.dumps(row), file=file)
        told = " ".join(f"{value}" for value in outcome.values())
        print(time.strftime("%H:%M:%S"), f"{mutant.name}: {told}", file=self.terminal)

    def outcome_of_fresh_process(self, mutant: Mutant, environment: dict[str, str], answer: Path) -> dict[str, Any]:
        """Have another process collect the chosen items, with the mutated file."""
        items = [item for found in self.items(mutant) for item in found]
        costs = accumulate(map(self.record.cost, items))
        files = {str(item.path) for item, before in zip(items, costs, strict=True) if before < self.options.budget}
        command = [sys.executable, __file__, "--fresh", str(answer), "--mutant", mutant.name, "--tests", *files]
        for option in ("tier", "apart", "budget", "hangs"):
            command += [f"--{option}", str(getattr(self.options, option))]
        if not files:
            return {"verdict": "lives", "ran": 0}
        done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.DEVNULL, check=False)
        assert done.returncode != pytest.ExitCode.INTERNAL_ERROR, "see above"
        return json.loads(answer.read_text()) if answer.exists() else {"verdict": "killed", "by": "the collection"}

    def items(self, mutant: Mutant) -> Iterator[list[pytest.Item]]:
        """Yield the items that run with a mutant: of each tier those of near test files, then of the cheapest all."""
        for tier, apart in [*product(self.tiers, range(min(self.options.apart, 1) + 1)), (TIERS[0], 2)]:
            items = [each for each in self.tiers[tier] if distance(each.path, mutant) == apart <= self.options.apart]
            if not self.options.fresh:
                self.record.complete(items)
            yield self.record.chosen(mutant, items)

    def outcome(self, mutant: Mutant, changes: Changes) -> dict[str, Any]:
        """Run items in forks until one kills the mutant; one that fails only after others does not."""
        spent, ran = 0.0, 0
        for items in self.items(mutant):
            limits = {each.nodeid: self.options.hangs + 20 * self.record.cost(each) for each in items}
            while items and spent < self.options.budget:
                failed, first = "", True
                for row in run(items, changes, limits):
                    last, items, ran, failed = items[0], items[1:], ran + 1, row["failed"]
                    spent += row.get("own", 0.0) + row.get("others", 0.0)
                    if failed or spent > self.options.budget:
                        break
                    first = False
                if failed and (first or next(run([last], changes, limits))["failed"]):
                    found = {"verdict": "killed", "by": last.nodeid, "how": failed}
                    return found | {"cpu_s": round(spent, 1), "ran": ran}
            if spent >= self.options.budget:
                break
        return {"verdict": "lives", "cpu_s": round(spent, 1), "ran": ran}


def outcomes() -> dict[str, dict[str, Any]]:
    """Return the last outcome of each mutant that is still in the list as it was."""
    rows = [json.loads(line) for line in OUTCOMES.read_text().splitlines()] if OUTCOMES.exists() else []
    last = {(row["mutant"], *row["change"]): row for row in rows}
    found = {each.name: last.get((each.name, each.old, each.new)) for each in mutants()}
    found |= {each.name: {"verdict": "equivalent"} for each in mutants() if each.equivalent}
    return {name: row for name, row in found.items() if row is not None}


def table(chosen: Sequence[Mutant]) -> str:
    """Return the score of each folder as a table of Markdown, and a line for each mutant that lives."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    known, lives = outcomes(), []
    for mutant in chosen:
        verdict = known.get(mutant.name, {}).get("verdict", "not run")
        counts[mutant.folder][verdict] += 1
        counts["all"][verdict] += 1
        line = f"- {mutant.file}:{mutant.line((ROOT / mutant.file).read_text())}: {mutant.name}"
        lives += [line] if verdict == "lives" else []
    rows = ["| folder | killed | lives | equivalent | score |", "|---|--:|--:|--:|--:|"]
    for folder, found in sorted(counts.items(), key=lambda each: (each[0] == "all", each[0])):
        score = f"{found['killed'] / max(found['killed'] + found['lives'], 1):.0%}"
        rows.append(f"| {folder} | {found['killed']} | {found['lives']} | {found['equivalent']} | {score} |")
    return "\n".join([*rows, "", *lives])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default="", help="mutants of this folder only")
    parser.add_argument("--mutant", action="append", metavar="NAME", help="this one only; repeatable")
    parser.add_argument("--lives", action="store_true", help="only those that lived the last time")
    parser.add_argument("--tier", choices=TIERS, default="test", help="the dearest items that are run")
    parser.add_argument(
        "--apart", type=int, choices=(0, 1, 2), default=2, help="0: only test files that name the module"
    )
    parser.add_argument("--tests", nargs="*", default=[], metavar="FILE", help="items of these files only")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="CPU time for each mutant")
    parser.add_argument("--hangs", type=float, default=60.0, metavar="SECONDS", help="wall time of an item that hangs")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="only print the score of earlier runs")
    parser.add_argument("--fresh", help=argparse.SUPPRESS)  # where the outcome goes; the file is mutated, see hook/
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    chosen = [
        each
        for each in mutants()
        if each.folder.startswith(options.folder.rstrip("/"))
        and each.name in (options.mutant or [each.name])
        and (not options.lives or outcomes().get(each.name, {}).get("verdict") == "lives")
    ]
    if not options.table:
        loop = Run([each for each in chosen if not each.equivalent], options)
        log_file = OUT / ("fresh.log" if options.fresh else "pytest.log")
        with log_file.open("w") as log:
            os.dup2(log.fileno(), 1)
        near = [
            str(file)
            for file in sorted((ROOT / "tests").rglob("test_*.py"))
            if any(distance(file, each) <= options.apart for each in chosen)
        ]
        # pytest would rewrite asserts of the library, too, from the file that is not mutated.
        arguments = ["-q", "--tb=native", "--assert=plain", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
        arguments += options.tests or (near if options.apart < 2 else [])
        status = pytest.main(arguments, plugins=[loop])
        os.dup2(loop.terminal.fileno(), 1)
        if status != pytest.ExitCode.OK:
            print(f"pytest has failed, see {log_file}", file=sys.stderr)
            sys.exit(int(status))
    if not options.fresh:
        print(table(chosen))


if __name__ == "__main__":
    main()
