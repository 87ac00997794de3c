"""Tiers of the suite: which items each runs, how much hypothesis tries there, and what items cost.

`pytest --tier check` (or `test`, `full`, `deep`) runs the items of that tier and of those before it; without the option
all items run. `tiers.json` lists what is too slow for `check` and for `test`, by measured CPU time; `pytest --tier full
--write-tiers` measures it anew. CPU time, because wall time also says what else the machine was doing.
"""

from __future__ import annotations

import gc
import json
import resource
import signal
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

TIERS = ("check", "test", "full", "deep")
# CPU seconds up to which an item is placed in a tier, and above which one that is there is too slow. The second is far
# larger: an import, the first call of an operator in a process, or a shared reference falls on whoever comes first.
LIMITS = {"check": 0.1, "test": 2.0, "full": 30.0}
TOO_SLOW = {"check": 4.0, "test": 15.0, "full": 200.0}
EXAMPLES = {"check": 10, "test": 10, "full": 100, "deep": 5_000}
FILE = Path(__file__).with_name("tiers.json")
COST = "cpu_s"
RANKS_COST = "ranks_cpu_s"  # of the processes that ran a body, see sim/testing/processes.py
TIER = pytest.StashKey[str]()
STARTED = pytest.StashKey[float]()

settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)  # the same for all who change code
settings.register_profile("quick", settings.get_profile("ci"), max_examples=EXAMPLES["test"])
settings.register_profile("deep", deadline=None, print_blob=True, max_examples=EXAMPLES["deep"])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "tiers of this suite")
    group.addoption("--tier", choices=TIERS, help="run the items of this tier and of those before it")
    group.addoption(
        "--write-tiers", action="store_true", help=f"place items anew in {FILE.name}, by what they cost now"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile"):
        profiles = {"check": "quick", "test": "quick", "deep": "deep"}
        settings.load_profile(profiles.get(config.getoption("--tier"), "ci"))
    if not hasattr(config, "workerinput"):  # not a worker of xdist: whoever reports
        config.pluginmanager.register(Costs(config), "costs")


@pytest.fixture
def interruptible() -> Generator[None, None, None]:
    """Let SIGINT interrupt this process and its children, also where a parent ignores it (`nohup`, some CI runners)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# -- which items a tier runs -----------------------------------------------------------------------------------------


def read_tiers() -> dict[str, dict[str, list[str]]]:
    """Return {tier: {file: names}}; a name is a function, or one item of it in brackets."""
    return json.loads(FILE.read_text())


def listed(tiers: dict[str, dict[str, list[str]]]) -> dict[str, str]:
    """Return the tier of each listed function or item, by its pytest id."""
    return {f"{file}::{name}": tier for tier, files in tiers.items() for file, names in files.items() for name in names}


def function_of(name: str) -> str:
    """Return a pytest id without parameters.

    >>> function_of("tests/unit/test_x.py::test_a[sim-1]")
    'tests/unit/test_x.py::test_a'
    """
    return name.partition("[")[0]


def tier_of(item: pytest.Item, places: dict[str, str]) -> str:
    if item.get_closest_marker("slow"):
        return "deep"
    if item.get_closest_marker("gpu") or item.get_closest_marker("npu"):
        return "full"  # also on simulated ranks, with --sim-backend
    # What processes are forked from takes seconds, and so do the references that properties share.
    shares = item.get_closest_marker("gloo") or item.path.parent.name == "property"
    quickest = "test" if shares else "check"
    return places.get(item.nodeid) or places.get(function_of(item.nodeid)) or quickest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    places = listed(read_tiers())
    for item in items:
        item.stash[TIER] = tier_of(item, places)
    if tier is None:
        return
    last = TIERS.index(tier)
    config.hook.pytest_deselected(items=[item for item in items if TIERS.index(item.stash[TIER]) > last])
    items[:] = [item for item in items if TIERS.index(item.stash[TIER]) <= last]


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later collection of garbage: it lives until the end."""
    gc.collect()
    gc.freeze()


# -- what items cost -------------------------------------------------------------------------------------------------


def cpu_s() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[STARTED] = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        ranks = sum(value for name, value in item.user_properties if name == RANKS_COST)
        report.user_properties.append((COST, cpu_s() - item.stash[STARTED] + ranks))
        drawn = bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))
        report.user_properties.append(("placed", (item.stash[TIER], drawn)))
    return report


def place(costs: dict[str, float], known: dict[str, dict[str, list[str]]]) -> dict[str, dict[str, list[str]]]:
    """Return what `tiers.json` says once `costs` are known; what has not run stays where it is.

    A function is listed by its name where all of its items belong to one tier, and by its items otherwise.
    """
    ran: dict[str, dict[str, str]] = defaultdict(dict)
    for name, cost in costs.items():
        ran[function_of(name)][name] = next((tier for tier, limit in LIMITS.items() if cost <= limit), "full")
    found = {name: tier for name, tier in listed(known).items() if function_of(name) not in ran}
    for function, items in ran.items():
        tiers = set(items.values())
        found |= {function: tiers.pop()} if len(tiers) == 1 else items
    placed: dict[str, dict[str, list[str]]] = {tier: {} for tier in ("test", "full")}
    for name, tier in sorted(found.items()):
        if tier != "check":
            file, _, short = name.partition("::")
            placed[tier].setdefault(file, []).append(short)
    return placed


class Costs:
    """What the items of a run have cost, and which of them cost more than their tier allows.

    A test with drawn inputs is placed by what it costs at the number of examples of the tier `test`.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.tier: str | None = config.getoption("--tier")
        self.writes: bool = config.getoption("--write-tiers")
        self.costs: dict[str, float] = {}
        self.scaled: dict[str, float] = {}  # to the examples of the tier `test`
        self.too_slow: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties)
        if report.when != "teardown" or COST not in found:
            return
        (tier, drawn), cost = found["placed"], found[COST]
        at_full_examples = drawn and self.tier not in ("check", "test")
        if cost > TOO_SLOW.get("full" if at_full_examples and tier != "deep" else tier, float("inf")):
            self.too_slow.append(f"{report.nodeid}: {cost:.1f} CPU-s, in {tier!r}: {LIMITS.get(tier)}")
        share = EXAMPLES["test"] / EXAMPLES["full"] if at_full_examples else 1.0
        self.costs[report.nodeid] = cost
        self.scaled[report.nodeid] = cost * share

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.writes:
            FILE.write_text(json.dumps(place(self.scaled, read_tiers()), indent=1) + "\n")
        elif self.too_slow and self.tier == "full" and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.tier is None or not self.costs:
            return
        files: Counter[str] = Counter()
        for name, cost in self.costs.items():
            files[name.partition("::")[0]] += cost
        total = sum(files.values())
        ten = sum(cost for _, cost in files.most_common(10))
        terminalreporter.section(f"CPU time of tier {self.tier}")
        terminalreporter.write_line(f"{len(self.costs)} items, {total:.0f} CPU-s, ten slowest files {ten / total:.0%}")
        for name, cost in files.most_common(10):
            terminalreporter.write_line(f"{cost:8.1f}  {name}")
        for row in self.too_slow:
            terminalreporter.write_line(f"too slow for its tier (tests/{FILE.name}): {row}")
