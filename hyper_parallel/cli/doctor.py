"""The command `doctor`: what is installed, which devices and backends there are, and what is missing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from types import MappingProxyType
from typing import NamedTuple

import typer
from rich.text import Text

from hyper_parallel import __version__
from hyper_parallel.cli.kit import FAILURE, busy, print_wide
from hyper_parallel.core.common.errors import readable_bytes
from hyper_parallel.core.common.tables import View, plain_table

# What each extra of the distribution is for; those for work on the library itself are left out.
_EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        "npu": "Ascend NPUs",
        "plot": "pictures of runs, timelines and estimates",
        "tensorboard": "train --tensorboard",
        "text": "tokenizers, chat templates, parquet files, folders of transformers",
        "test": "the tests, sim.strategies, @sim.ranks",
    }
)
_BACKENDS: Mapping[str, str] = MappingProxyType({"cpu": "gloo", "cuda": "nccl", "npu": "hccl"})
_WIDTH = 110  # columns
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[.*?\])?\s*([^;]*)(?:;(.*))?")
_BOUND = re.compile(r"(<|>=)\s*([\d.]+)")  # requirements of this library have no others


class _Finding(NamedTuple):
    """A line of a part of the report: what was looked for, what is there, what it is for or why it is not there.

    `remedy` is the command that puts it right; without what `stops`, training cannot start.
    """

    part: str
    name: str
    found: str = ""
    about: str = ""
    remedy: str = ""
    stops: bool = False


def doctor() -> None:
    """Say what is installed, which devices and backends there are, and what is missing, with the command that adds it.

    The exit code is 0 when training can start here, else 1.
    """
    with warnings.catch_warnings(), busy("looking around"):
        warnings.simplefilter("ignore")
        found = [*_machine(), *_packages(), *_of_torch()]
    print_wide(_view(found), _WIDTH)
    if any(each.stops for each in found):
        raise typer.Exit(FAILURE)


def _view(found: list[_Finding]) -> View:
    table = plain_table("", "", "found", "", left=4)
    table.columns[-1].no_wrap = False
    before = ""
    for each in found:
        style = "red" if each.stops else "" if each.found else "dim"
        part = each.part if each.part != before else ""
        table.add_row(part, each.name, each.found or "-", each.about, style=style)
        before = each.part
    remedies = dict.fromkeys((each.remedy, each.stops) for each in found if each.remedy)
    stops = [f"  {command}" for command, stop in remedies if stop]
    more = [f"  {command}" for command, stop in remedies if not stop]
    lines = [Text("\nto add what is missing, if you need it:\n" + "\n".join(more))] if more else []
    names = ", ".join(dict.fromkeys(each.name for each in found if each.stops))
    verdict = Text(f"\ntraining cannot start: {names}; try:\n" + "\n".join(stops), style="bold red")
    if not names:
        trains = next(each.name for each in found if each.part == "device" and each.found)
        verdict = Text(
            f"\ntraining can start, on {trains} with {_BACKENDS.get(trains, 'its own backend')}", style="bold"
        )
    return View(table, *lines, verdict)


# -- without torch -----------------------------------------------------------------------------------------------------


def _machine() -> Iterator[_Finding]:
    yield _Finding("machine", "system", f"{platform.system()} {platform.machine()}")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    there = os.cpu_count() or usable
    few = "" if usable == there else f"of {there}: the others are not for this process"
    yield _Finding("machine", "cores", f"{usable}", few)
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield _Finding("machine", "memory", readable_bytes(memory))
    beside = os.path.dirname(sys.executable)
    started = shutil.which("torchrun", path=os.pathsep.join([beside, os.environ.get("PATH", "")])) or ""
    other = "" if started else "python -m torch.distributed.run does the same"
    yield _Finding("machine", "torchrun", started, other)


def _packages() -> Iterator[_Finding]:
    """Yield Python, this library, what it requires, and what its extras are for."""
    yield _Finding("package", "Python", platform.python_version())
    yield _Finding("package", "hyper_parallel", __version__)
    try:
        required = metadata.requires("hyper_parallel") or []
    except metadata.PackageNotFoundError:  # a folder on PYTHONPATH: its requirements are written nowhere
        required = ["torch", "numpy", "rich", "typer", "safetensors", "tomlkit"]
    listed: dict[str, _Finding] = {}
    for extra in (None, *_EXTRAS):  # a package of several extras is in the first of them
        for text in required:
            name, versions, marker = _REQUIREMENT.fullmatch(text).groups("")  # type: ignore[union-attr]  # all match
            of = re.search(r"extra == ['\"](\w+)", marker)
            if (of and of[1]) == extra and name not in listed and not _is_for_other_pythons(marker):
                listed[name] = _package(name, versions.strip(), extra)
    yield from listed.values()
    there = _version("triton")
    why = "kernels that torch.compile makes for GPUs" + ("" if there else "; comes with a torch for CUDA")
    yield _Finding("package", "triton", there, why)


def _package(name: str, versions: str, extra: str | None) -> _Finding:
    """Look for a package: one without an extra is required, and must be of a version that is supported."""
    there = _version(name)
    fits = bool(there) and _satisfies(there, versions)
    shown = f"{there} (supported: {versions})" if there and not fits else there
    about = "" if extra is None else _EXTRAS[extra]
    own = f"pip install '{name}{versions}'" if extra is None else f"pip install 'hyper_parallel[{extra}]'"
    return _Finding("package", name, shown, about, "" if fits else own, stops=extra is None and not fits)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _is_for_other_pythons(marker: str) -> bool:
    below = re.search(r"python_version < ['\"]3\.(\d+)['\"]", marker)
    return below is not None and sys.version_info >= (3, int(below[1]))


def _satisfies(version: str, bounds: str) -> bool:
    """Tell whether a version is within bounds, by its numbers alone.

    >>> _satisfies("2.13.0+cpu", "<2.16,>=2.11"), _satisfies("2.16.0", "<2.16,>=2.11"), _satisfies("2.9", ">=2.11")
    (True, False, False)
    """
    has = _numbers(version)
    return all((has < _numbers(bound)) == (sign == "<") for sign, bound in _BOUND.findall(bounds))


def _numbers(version: str) -> list[int]:
    start = re.match(r"\d+(\.\d+)*", version)
    found = [int(part) for part in start[0].split(".")] if start else [0]
    return found + [0] * (4 - len(found))


# -- with torch --------------------------------------------------------------------------------------------------------


def _of_torch() -> Iterator[_Finding]:
    """Yield what torch finds, or why it cannot be imported."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # a library that is missing shows up as ImportError or OSError
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        wanted = "pip install --force-reinstall torch"
        yield _Finding("device", "torch", "", f"its import failed ({type(error).__name__}: {first})", wanted, True)
        return
    yield from (*_devices(), *_backends(), *_hardware())


def _devices() -> Iterator[_Finding]:
    """Yield the kinds of devices, in the order in which training takes them."""
    from hyper_parallel.platform import PlatformUnavailableError, get_platform

    for kind in ("npu", "cuda", "cpu"):
        try:
            here = get_platform(kind)
        except PlatformUnavailableError as error:
            why, _, hint = str(error).partition(": ")[2].rpartition("; ")
            yield _Finding("device", kind, "", f"{why}; {hint}")
            continue
        count = here.device_count()
        many = f"{count} x " if count > 1 else ""
        yield _Finding("device", kind, f"{many}{here.name()}, {readable_bytes(here.total_memory())}")


def _backends() -> Iterator[_Finding]:
    """Yield the backends of communication; that of a device that is there must be, too."""
    import torch.distributed as dist

    from hyper_parallel.platform import get_platform

    there = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "hccl": dist.is_available() and hasattr(dist.Backend, "HCCL"),
    }
    needed = get_platform().backend
    for kind, name in _BACKENDS.items():
        stops = name == needed and not there[name]
        remedy = "pip install --force-reinstall torch" if stops else ""
        yield _Finding("backend", name, "yes" if there[name] else "", f"ranks on {kind}", remedy, stops)
    simulates = util.find_spec("sim") is not None
    yield _Finding("backend", "sim", "yes" if simulates else "", "ranks in one process, without a device")


def _hardware() -> Iterator[_Finding]:
    """Yield the description that estimates take for the device that training takes."""
    from hyper_parallel.cli.runs import hardware_here

    try:
        known = hardware_here()
    except ValueError as error:
        lines = str(error).splitlines()
        hint = lines[-1].strip().removeprefix("try: ")
        remedy = f"hyper-parallel train {hint}" if hint.startswith("--") else hint
        yield _Finding("estimates", "hardware", "", lines[0].partition(": ")[2], remedy)
    else:
        yield _Finding("estimates", "hardware", known.name, known.title)
