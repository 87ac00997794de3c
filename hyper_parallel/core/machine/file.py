"""Reader of hardware descriptions: figures with units, sources and evidence grades, in TOML.

```toml
schema = 1
title = "My accelerator, in nodes of 8"
family = "hopper"           # family whose curves of matmuls and kernels it uses
links = "nvlink4"           # links within a node
fabric = "infiniband"       # network between nodes

[sources]
sheet = "vendor's datasheet, 2025"

[device]
memory = { value = 80, unit = "GiB", grade = "datasheet", source = "sheet" }  # sold as 80 GB
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hyper_parallel.core.common.errors import nearest
from hyper_parallel.core.machine.toml_file import Schema, TomlFile, inline, toml_text

GRADES = ("measured", "calibrated", "datasheet", "assumed")
"""Evidence of a figure, the best first: measured on the device, fitted to measurements, its maker's word, assumed."""

_SI = MappingProxyType({"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15})
_UNITS: Mapping[str, dict[str, float]] = MappingProxyType(
    {
        "B": {f"{k}B": v for k, v in _SI.items()} | {f"{k}iB": 1024.0**i for i, k in enumerate("KMGT", start=1)},
        "B/s": {f"{k}B/s": v for k, v in _SI.items()} | {f"{k}bit/s": v / 8 for k, v in _SI.items()},
        "FLOP/s": {f"{k}FLOP/s": v for k, v in _SI.items()},
        "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
        "1": {"1": 1.0, "%": 0.01},
        "W": {"W": 1.0},
    }
)


class Figure(NamedTuple):
    """A number of a description.

    Attributes:
        value: in the basic unit: bytes, bytes per second, FLOP/s, seconds, or a plain number.
        unit: the basic unit: `B`, `B/s`, `FLOP/s`, `s`, `1`, `W`.
        grade: one of `GRADES`.
        source: where the number is from, e.g. "vendor's datasheet, 2025".
    """

    value: float
    unit: str
    grade: str
    source: str


class Kind(NamedTuple):
    """Requirements of a figure.

    Attributes:
        unit: its basic unit.
        required: True if every description has it.
        meaning: in words.
        zero: True if it may be 0.
    """

    unit: str
    required: bool
    meaning: str
    zero: bool = False


FIGURES: Mapping[str, Kind] = MappingProxyType(
    {
        "device.memory": Kind("B", True, "memory of a device, as it is sold"),
        "device.usable_memory": Kind("B", True, "memory of a device that programs can have"),
        "device.bandwidth": Kind("B/s", True, "of its memory"),
        "device.cores": Kind("1", True, "that each compute a tile of a matmul at a time"),
        "device.power": Kind("W", False, "power limit"),
        "device.workspace": Kind("B", False, "of matrix products, for each thread and stream", zero=True),
        "peak.bf16": Kind("FLOP/s", False, "dense bf16 matmuls"),
        "peak.fp16": Kind("FLOP/s", False, "dense fp16 matmuls"),
        "peak.fp32": Kind("FLOP/s", True, "fp32 matmuls with full precision"),
        "peak.tf32": Kind("FLOP/s", False, "dense TF32 matmuls"),
        "peak.fp64": Kind("FLOP/s", False, "fp64 matmuls"),
        "peak.fp8": Kind("FLOP/s", False, "dense fp8 matmuls"),
        "node.devices": Kind("1", True, "devices of a node"),
        "intra.bandwidth": Kind("B/s", True, "a device to the others of its node, one direction, all its links"),
        "intra.in_switch": Kind("B/s", False, "bus bandwidth of an all_reduce that the switch computes"),
        "intra.in_switch_from": Kind("1", False, "ranks from which the switch computes all_reduces"),
        "inter.bandwidth": Kind("B/s", True, "a device's share of its node's network adapters, one direction"),
        "inter.taper": Kind("1", False, "bandwidth lost at each doubling of nodes", zero=True),
        "host.op": Kind("s", True, "the host's time to issue an operation", zero=True),
        "host.collective": Kind("s", True, "the host's time to issue a communication", zero=True),
        "host.link": Kind("B/s", False, "between a device and its host, one direction"),
        "host.memory": Kind("B", False, "a device's share of its host's memory"),
        "host.bandwidth": Kind("B/s", False, "a device's share of the bandwidth of its host's memory"),
        "context.bytes": Kind("B", False, "memory of the driver's context", zero=True),
        "context.per_group": Kind("B", False, "memory of a communicator", zero=True),
    }
)
"""The figures of a description by name, `section.key` in the file."""

_TEXTS = ("name", "title", "family", "links", "topology", "fabric", "allocator", "backend")
_CHOICES = MappingProxyType({"topology": ("switch", "mesh"), "allocator": ("caching", "expandable", "none")})


MACHINE = Schema("hardware")
"""The format of descriptions."""


def read_machine_file(path: Path) -> dict[str, Any]:
    """Read a description, and return it as the arguments of `Machine`.

    Raises:
        ValueError: the file is missing or no TOML; an unknown or missing key; a figure without a number, unit, grade
            or source, or with a unit of another kind; half a device; more usable memory than memory.
    """
    file = MACHINE.read(path, "'h100-sxm', or the path of a TOML file")
    data = file.table()
    sources = data.pop("sources", {})
    made: dict[str, Any] = {"figures": {}, "curves": data.pop("curves", {})}
    sections = {name.split(".")[0] for name in FIGURES}
    for key, value in data.items():
        if key in _TEXTS:
            made[key] = _text(file, key, value)
        elif key in sections and isinstance(value, dict):
            for name, entry in value.items():
                made["figures"][f"{key}.{name}"] = _figure(file, f"{key}.{name}", entry, sources)
        else:
            hint = nearest(key, (*_TEXTS, *sorted(sections), "sources", "curves"))
            raise file.error(f"there is no {key!r}", hint, key)
    for name in ("title", "family"):
        if name not in made:
            seen = f"keys: {', '.join(data) or 'none'}"
            raise file.error(f"it does not say its {name}", f'{name} = "{path.stem}"', seen=seen)
    absent = [name for name, kind in FIGURES.items() if kind.required and name not in made["figures"]]
    if absent:
        kind = FIGURES[absent[0]]
        section, _, key = absent[0].partition(".")
        hint = f'[{section}] {key} = {{ value = ..., unit = "{kind.unit}", grade = "datasheet", source = "..." }}'
        blame = f"{absent[0]} is missing ({kind.meaning})"
        raise file.error(blame, hint, section, seen=f"missing: {', '.join(absent)}")
    _check_together(file, made["figures"])
    return made


def _check_together(file: TomlFile, figures: Mapping[str, Figure]) -> None:
    for name in ("node.devices", "device.cores", "intra.in_switch_from"):
        if name in figures and not figures[name].value.is_integer():
            raise file.error(f"{name} is not a whole number", "value = 8", *name.split("."))
    capacity, usable = (figures[f"device.{name}"].value for name in ("memory", "usable_memory"))
    if usable > capacity:
        blame, seen = "a program can have no more memory than there is", f"{usable:,.0f} B of {capacity:,.0f} B"
        hint = "memory in GiB, because a device that is sold with 80 GB has 80 GiB; or less usable_memory"
        raise file.error(blame, hint, "device", "usable_memory", seen=seen)


def write_machine_file(
    path: Path, texts: Mapping[str, str], figures: Mapping[str, Figure], curves: Mapping[str, Any]
) -> None:
    """Write a description as TOML."""
    names = {source: f"s{i}" for i, source in enumerate(dict.fromkeys(figure.source for figure in figures.values()), 1)}
    content: dict[str, Any] = {**texts, "sources": {name: source for source, name in names.items()}}
    for name, figure in figures.items():
        section, _, key = name.partition(".")
        content.setdefault(section, {})[key] = inline({**figure._asdict(), "source": names[figure.source]})
    path.write_text(toml_text({**content, "curves": curves}, MACHINE), encoding="utf-8")


def _text(file: TomlFile, key: str, value: object) -> str:
    choices = _CHOICES.get(key)
    if not isinstance(value, str) or (choices and value not in choices):
        hint = " or ".join(map(repr, choices)) if choices else f'{key} = "..."'
        raise file.error(f"{key} is not {'one of its choices' if choices else 'text'}", hint, key)
    return value


def _figure(file: TomlFile, name: str, entry: object, sources: dict[str, str]) -> Figure:
    keys = name.split(".")
    if name not in FIGURES:
        raise file.error(f"there is no figure {name!r}", nearest(name, FIGURES), *keys)
    kind = FIGURES[name]
    example = f'{{ value = 1, unit = "{kind.unit}", grade = "datasheet", source = "..." }}'
    if not isinstance(entry, dict):
        raise file.error(f"{name} is not a table with {', '.join(Figure._fields)}", example, *keys)
    if unknown := [key for key in entry if key not in Figure._fields]:
        raise file.error(f"{name} has an unknown key {unknown[0]!r}", nearest(unknown[0], Figure._fields), *keys)
    value, unit, grade, source = (entry.get(key) for key in Figure._fields)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not kind.zero):  # type: ignore[operator]
        raise file.error(f"the value of {name} is not a number above 0", example, *keys)
    if unit not in _UNITS[kind.unit]:
        units = [name for name in _UNITS[kind.unit] if len(name) > 1 or len(_UNITS[kind.unit]) < 5]
        raise file.error(f"{name} ({kind.meaning}) is not given in {unit!r}", f"one of {units}", *keys)
    if grade not in GRADES:
        raise file.error(f"the grade of {name} is not an evidence grade", f"one of {GRADES}", *keys)
    if not isinstance(source, str) or not source.strip():
        raise file.error(f"{name} has no source", 'source = "vendor\'s datasheet, 2025"', *keys)
    scaled = float(value) * _UNITS[kind.unit][unit]  # type: ignore[arg-type]
    return Figure(scaled, kind.unit, grade, sources.get(source, source))
