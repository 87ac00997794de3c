"""Calibration files: fitted, published or assumed figures of kernels and links, each with its source.

Four files, the later over the earlier: `curves.toml` (published by others, or assumed), `calibration.toml` (fitted
to tables of matmuls and collectives by `benchmarks/fit_costs.py`), `fit.toml` (fitted to published training runs) and
`spreads.toml` (how far estimates of these are off), all in `core/machine/data`. A section such as `[matmul.hopper]` has
figures, the `grade` of their evidence, its `source`, and `spread`: the standard deviation of the logarithm of measured
over predicted.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.machine.toml_file import read_toml

DATA = Path(__file__).parent / "data"
FILES = ("curves.toml", "calibration.toml", "fit.toml", "spreads.toml")


class _Device(Protocol):
    """What a calibration reads of a machine."""

    @property
    def name(self) -> str: ...

    @property
    def curves(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Calibration:
    """Figures by section.

    >>> load_calibration().replace({"matmul.hopper.sustained": 0.8}).section("matmul", "hopper")["sustained"]
    0.8

    Attributes:
        sections: as the files have them, one in the other.
    """

    sections: Mapping[str, Any]

    def section(self, *path: str) -> Mapping[str, Any]:
        """Return a section over that which stands at `default` in place of its second name."""
        if len(path) < 2:
            return self._at(path)
        return {**self._at((path[0], "default", *path[2:])), **self._at(path)}

    def _at(self, path: tuple[str, ...]) -> Mapping[str, Any]:
        here: Any = self.sections
        for name in path:
            here = here.get(name, {})
        return here

    def of(self, hardware: _Device, *path: str) -> dict[str, Any]:
        """Return the section of a device: that of its family, with what is known of the device itself over it.

        Args:
            hardware: the device.
            path: of the section, such as `("matmul", "hopper")`; a device's own has no family: `matmul`.
        """
        merged = _copy(self.section(*path))
        own = self.sections.get("device", {}).get(hardware.name, {})
        for over in (own.get(path[0]), hardware.curves.get(path[0])):
            if over is not None:
                for name in path[2:]:
                    over = over.get(name, {})
                _merge(merged, over)
        return merged

    def replace(self, changes: Mapping[str, Any]) -> Calibration:
        """Return it with other figures, by dotted path; a name that has dots itself is not possible here."""
        sections: dict[str, Any] = _copy(self.sections)
        for path, value in changes.items():
            *parents, last = path.split(".")
            if not parents:
                hint = nearest(path, sections)
                raise InvalidValue(f"cannot change {path!r}", "it names no section", "", f"'{hint}.name'")
            here = sections
            for name in parents:
                here = here.setdefault(name, {})
            here[last] = value
        return Calibration(sections)


@functools.cache
def load_calibration(folder: Path = DATA) -> Calibration:
    """Read the files of a folder; one that is not there is left out."""
    sections: dict[str, Any] = {}
    for name in FILES:
        path = folder / name
        if path.exists():
            _merge(sections, read_toml(path))
    return Calibration(sections)


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = _copy(value) if isinstance(value, Mapping) else value


def _copy(sections: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) if isinstance(value, Mapping) else value for name, value in sections.items()}
