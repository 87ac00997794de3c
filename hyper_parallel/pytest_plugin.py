"""Hooks of the pytest plugin: options, markers and the choice of backends.

They import neither torch nor `sim`: every pytest of an environment loads them, and only a test with `@sim.ranks` needs
more.
"""

from __future__ import annotations

import os
import re
from types import MappingProxyType
from typing import Any

import pytest

__all__ = ["MARKERS", "SIMULATED_BACKENDS"]

MARKERS = MappingProxyType(
    {
        "sim": "runs in this process on simulated ranks, or needs no ranks at all; no network, no accelerator",
        "gloo": "runs on real processes that communicate over gloo",
        "gpu": "needs GPUs; skips with a reason when there are too few",
        "npu": "needs NPUs (torch_npu and drivers); skips with a reason when there are too few",
    }
)
SIMULATED_BACKENDS = MappingProxyType({"gloo": "gloo", "nccl": "gpu", "hccl": "npu"})  # what --sim-backend runs
_DEVICES = MappingProxyType({"gpu": "cuda", "npu": "npu"})
_WANTED = pytest.StashKey[dict[str, bool]]()  # whether the bodies of a backend make items


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tests on ranks."""
    group = parser.getgroup("sim", "simulated ranks")
    group.addoption(
        "--sim-seed",
        type=int,
        default=os.environ.get("SIM_SEED", "0"),
        help="seed of the interleaving of simulated ranks (default: $SIM_SEED or 0)",
    )
    group.addoption(
        "--sim-backend",
        choices=tuple(SIMULATED_BACKENDS),
        help="run the tests of this backend (hccl: npu, nccl: gpu) on simulated ranks, which refuse to reduce what it "
        "refuses",
    )
    group.addoption(
        "--sim-device",
        choices=tuple(_DEVICES.values()),
        help="the device that the simulated ranks share, in bodies that also are for ranks with such a device each "
        "(npu without torch_npu: each has a late one of its own); with --sim-backend, in the tests of that backend",
    )
    group.addoption(
        "--require-devices",
        action="store_true",
        help="fail, instead of skip, a test that finds too few devices or ranks",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of the backends."""
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_report_header(config: pytest.Config) -> str:
    """Name the seed of the simulated ranks, the backend that they stand for, and their device."""
    backend, device = config.getoption("--sim-backend"), config.getoption("--sim-device")
    more = (f", backend {backend}" if backend else "") + (f", device {device}" if device else "")
    return f"sim: seed {config.getoption('--sim-seed')}{more}"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: Any) -> list[pytest.Item] | None:
    """Make no item of a body all of whose backends need devices that nobody asked for and that are not here."""
    backends = getattr(obj, "rank_backends", None)
    return [] if isinstance(backends, tuple) and not _wanted(backends, collector.config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the items of a body, one for each of its backends that can run here or is asked for."""
    backends = getattr(metafunc.function, "rank_backends", None)
    if not isinstance(backends, tuple):
        return
    wanted = _wanted(backends, metafunc.config)
    marks = metafunc.definition.own_markers
    for place, mark in enumerate(marks):
        if mark.name == "parametrize" and mark.args[0] == "rank_backend":
            cases = [case for case in mark.args[1] if case.values[0] in wanted]
            marks[place] = pytest.mark.parametrize("rank_backend", cases).mark


def _wanted(backends: tuple[str, ...], config: pytest.Config) -> tuple[str, ...]:
    wanted = config.stash.setdefault(_WANTED, {})
    for backend in backends:
        if backend not in wanted:
            of_a_device = backend in _DEVICES
            wanted[backend] = not of_a_device or _asked_for(backend, config) or _is_here(_DEVICES[backend])
    return tuple(backend for backend in backends if wanted[backend])


def _asked_for(backend: str, config: pytest.Config) -> bool:
    """Tell whether the command line names a backend, in -m, in -k or in the id of an item, or wants all devices."""
    if SIMULATED_BACKENDS.get(config.getoption("--sim-backend")) == backend:
        return True
    words = [config.getoption("markexpr"), config.getoption("keyword"), *config.args]
    return config.getoption("--require-devices") or any(re.search(rf"\b{backend}\b", word or "") for word in words)


def _is_here(device_type: str) -> bool:
    from hyper_parallel.platform import PlatformUnavailableError, get_platform

    try:
        return get_platform(device_type).device_count() > 0
    except PlatformUnavailableError:
        return False
