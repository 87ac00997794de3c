"""Tiers of the suite: which items each runs, how much hypothesis tries there, and what items cost.

`pytest --tier check` (or `test`, `full`, `deep`) runs the items of that tier and of those before it; without the option
all items run. A test is in `check` unless it is marked: `@pytest.mark.tier("full", each=3)` puts every third of its
items into `full`, of lists that are multiplied at least one with each value, and the others into `deep`. A run measures
the CPU time of each item and names those that cost too much for their tier; CPU time, because wall time depends on the
load of the machine.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

# A file may import a kit of another room. Last on the path, because all that is not of this suite is looked up first.
_ROOMS = (
    path.parent for top in ("unit", "multidevice", "property") for path in Path(__file__).parent.glob(f"{top}/**/*.py")
)
sys.path += sorted({str(room) for room in _ROOMS} - set(sys.path))

TIERS = ("check", "test", "full", "deep")
# CPU seconds up to which an item is placed in a tier, and above which one that is there is too slow. The second is far
# larger: an import, the first call of an operator in a process, or a shared reference falls on whoever comes first.
LIMITS = {"check": 0.1, "test": 1.0, "full": 30.0}
TOO_SLOW = {"check": 4.0, "test": 15.0, "full": 200.0}
FOLDER = Path(__file__).parent
# The files whose tests for NPUs stand for all others in the tier `full`: they say most of a device for their time.
CONFORMANCE = {
    *("conformance_async", "conformance_errors", "conformance_functional", "conformance_groups"),
    *("conformance_movement", "conformance_objects", "conformance_point_to_point", "conformance_reductions"),
}
LATE = CONFORMANCE | {"redistribute", "activations", "checkpoint_ranks", "layout_dtensor", "torch_libraries_on_sim"}
# The files whose tests on processes run below `deep` although simulated ranks run the same bodies.
PROCESSES = CONFORMANCE | {
    *("redistribute", "clip_norm", "checkpoint_ranks", "fully_shard", "hsdp", "sharded_state_dict", "shard_inner"),
    *("context_parallel", "trainer"),
}
COST = "cpu_s"
RANKS_COST = "ranks_cpu_s"  # of the processes that ran a body, see sim/testing/processes.py
TIER = pytest.StashKey[str]()
STARTED = pytest.StashKey[tuple[float, float]]()
CACHES: dict[str, list[Any]] = {}  # of each module that was loaded when the last test of a file had run

# Building all commands takes twenty times as long as reading the words of one call.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# Before torch is loaded, here and in all processes that tests start: a worker has a core, or less. With a thread for
# each core, those that wait for the next small matrix product spin meanwhile, which was up to two thirds of the CPU
# time of files that train on the main thread.
os.environ["OMP_NUM_THREADS"] = "1"

# Derandomized: the same for all who change code.
_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]  # a case is a training, or a rare one
for _name, _drawn in {"ci": {"derandomize": True, "max_examples": 10}, "deep": {"max_examples": 5_000}}.items():
    settings.register_profile(_name, deadline=None, print_blob=True, suppress_health_check=_SLOW, **_drawn)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "tiers of this suite")
    group.addoption("--tier", choices=TIERS, help="run the items of this tier and of those before it")
    group.addoption("--costs", metavar="FILE", help="write what each item costs to FILE, and judge none")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("deep" if config.getoption("--tier") == "deep" else "ci")
    if not hasattr(config, "workerinput"):  # not a worker of xdist: whoever reports
        config.pluginmanager.register(Costs(config), "costs")


@pytest.fixture
def interruptible() -> Generator[None, None, None]:
    """Let SIGINT interrupt this process and its children, also where a parent ignores it (`nohup`, some CI runners)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# -- which items a tier runs -----------------------------------------------------------------------------------------


def values_of(item: pytest.Item) -> set[tuple[int, ...]]:
    """Return which value an item has of each list that it is parametrised by."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    lists = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [each.replace(" ", "").split(",") if isinstance(each, str) else each for each in lists]
    return {(number, *(id(params[name]) for name in each)) for number, each in enumerate(names)}


def some_of(items: Sequence[pytest.Item], each: int) -> list[pytest.Item]:
    """Return every n-th of the items of one test, and for each value of several lists that none of them has one more.

    Where a fault and its right twin, or two engines, are values of a list, both run in the tier. A list of one value,
    the simulated ranks, does not count. Of a single list, the order says which run.
    """
    some = list(items[::each])
    values = set().union(*map(values_of, items))
    sizes = Counter(number for number, *_ in values)
    if sum(size > 1 for size in sizes.values()) > 1:
        missing = values - set().union(*map(values_of, some))
        while missing:
            some.append(max(items, key=lambda item: len(values_of(item) & missing)))
            missing -= values_of(some[-1])
    return some


def tiers_of(items: Sequence[pytest.Item]) -> list[str]:
    """Return the tier of each item."""
    found = []
    marked: dict[tuple[str, str, int], list[pytest.Item]] = defaultdict(list)
    functions = [item.nodeid.partition("[")[0] for item in items]
    on_processes = [item.get_closest_marker("gloo") for item in items]
    simulated = {name for name, gloo in zip(functions, on_processes, strict=True) if not gloo}
    for item, function, gloo in zip(items, functions, on_processes, strict=True):
        name = item.path.stem.removeprefix("test_")
        if item.get_closest_marker("slow") or (gloo and function in simulated and name not in PROCESSES):
            found.append("deep")
        elif item.get_closest_marker("gpu") or item.get_closest_marker("npu"):  # on simulated ranks: --sim-backend
            found.append("full" if name in LATE else "deep")
        elif mark := item.get_closest_marker("tier"):
            found.append(mark.args[0])
            marked[function, mark.args[0], mark.kwargs.get("each", 1)].append(item)
        else:
            # What processes are forked from takes seconds, and so do the references that properties share.
            found.append("test" if gloo or "property" in item.path.parts else "check")
    left = {item for (*_, each), some in marked.items() if each > 1 for item in {*some} - {*some_of(some, each)}}
    return ["deep" if item in left else tier for item, tier in zip(items, found, strict=True)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    for item, found in zip(items, tiers_of(items), strict=True):
        item.stash[TIER] = found
    if tier is None:
        return
    last = TIERS.index(tier)
    config.hook.pytest_deselected(items=[item for item in items if TIERS.index(item.stash[TIER]) > last])
    items[:] = [item for item in items if TIERS.index(item.stash[TIER]) <= last]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave what is imported and collected out of every collection of garbage: it lives until the end.

    Python's collector would walk over all of it a dozen times while it grows.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Let garbage be collected as before, and forget what the tests of a file have cached once the last has run.

    torch's reader of flight recordings switches the collector off and leaves it so: the process then keeps all cycles,
    30 MB of them for some items. Syntax trees, references, and models in the keys of a cache would live until the end,
    and each full collection walks over all of them: a quarter of the CPU time of the files after `test_architecture`.
    What is left then (what libraries have imported or cached meanwhile) lives until the end, too, and is left out of
    later collections: a test that collects would otherwise cost more with each file that has run before it.
    """
    yield
    gc.enable()
    if nextitem is None or nextitem.path != item.path:
        forget_caches()
        gc.collect()
        gc.freeze()


def forget_caches() -> None:
    """Clear every `functools.cache` of a function of this folder."""
    folder = str(FOLDER)
    for name, module in list(sys.modules.items()):
        if name not in CACHES:
            ours = (getattr(module, "__file__", None) or "").startswith(folder)
            values = list(vars(module).values()) if ours else []
            CACHES[name] = [each for each in values if hasattr(each, "cache_clear") and each.__module__ == name]
        for cache in CACHES[name]:
            cache.cache_clear()


# -- what items cost -------------------------------------------------------------------------------------------------


def cpu_s() -> tuple[float, float]:
    """Return the CPU time of this process, and that of the processes that it has waited for."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[STARTED] = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        ranks = sum(value for name, value in item.user_properties if name == RANKS_COST)
        own, children = (now - then for now, then in zip(cpu_s(), item.stash[STARTED], strict=True))
        report.user_properties.append((COST, (own, children + ranks)))
        report.user_properties.append(("placed", item.stash[TIER]))
    return report


def written(cost: Sequence[float]) -> str:
    """Return the CPU time of an item as it is reported.

    >>> written((0.5, 19.1))
    '19.6 CPU-s (0.5 its own, 19.1 of processes)'
    """
    return f"{sum(cost):.1f} CPU-s ({cost[0]:.1f} its own, {cost[1]:.1f} of processes)"


def cost_alone(name: str, config: pytest.Config) -> list[float]:
    """Return the CPU time of one item, its own and that of its processes, in a process that runs no other item.

    An item can be charged with what an earlier one left behind: a process that is only now waited for, a thread.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "costs.json")
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", f"--costs={file}", name]
        for option in ("--tier", "--sim-backend", "--sim-device"):
            if value := config.getoption(option, None):
                command.append(f"{option}={value}")
        subprocess.run(command, cwd=config.rootpath, stdout=subprocess.DEVNULL, check=False)
        costs = json.loads(file.read_text()) if file.exists() else {}
        return costs.get(name, [float("inf"), 0.0])  # where it does not even run, the first verdict stands


class Costs:
    """What the items of a run have cost, and which of them cost more than their tier allows.

    The run fails by what is too slow for its tier when it runs alone, too.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tier: str | None = config.getoption("--tier")
        self.file: str | None = config.getoption("--costs")
        self.costs: dict[str, Sequence[float]] = {}
        self.limits: dict[str, tuple[str, float]] = {}  # tier and limit of what costs more
        self.alone: dict[str, Sequence[float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties)
        if report.when != "teardown" or COST not in found:
            return
        tier, cost = found["placed"], found[COST]
        limit = TOO_SLOW.get(tier, float("inf"))
        if sum(cost) > limit and not self.file:
            self.limits[report.nodeid] = tier, limit
        self.costs[report.nodeid] = cost

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.file:
            Path(self.file).write_text(json.dumps(self.costs))
        elif self.tier == "full" and session.exitstatus == pytest.ExitCode.OK:
            self.alone = {name: cost_alone(name, self.config) for name in self.limits}
            if any(sum(cost) > self.limits[name][1] for name, cost in self.alone.items()):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.tier is None or not self.costs:
            return
        files: Counter[str] = Counter()
        for name, cost in self.costs.items():
            files[name.partition("::")[0]] += sum(cost)
        total = sum(files.values())
        ten = sum(cost for _, cost in files.most_common(10))
        terminalreporter.section(f"CPU time of tier {self.tier}")
        terminalreporter.write_line(f"{len(self.costs)} items, {total:.0f} CPU-s, ten slowest files {ten / total:.0%}")
        for name, cost in files.most_common(10):
            terminalreporter.write_line(f"{cost:8.1f}  {name}")
        for name in self.limits:
            terminalreporter.write_line(self.verdict(name))

    def verdict(self, name: str) -> str:
        tier, limit = self.limits[name]
        row = f"(pytest.mark.tier): {name}: {written(self.costs[name])}, in {tier!r}: {LIMITS.get(tier)}"
        if name not in self.alone:
            return f"too slow for its tier {row}"
        kind = "too slow for its tier" if sum(self.alone[name]) > limit else "slow among others, not alone"
        return f"{kind} {row}; alone {written(self.alone[name])}"
