"""TOML files of a `Config`: reading them, with messages that point at the mistake, and writing them.

[model]
hidden_size = 256

[train]
steps = 200

[parallel]
dp_replicate = 2        # dp_shard is inferred from the number of ranks
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

from hyper_parallel.trainer.config import Config

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


@dataclasses.dataclass(frozen=True)
class _Source:
    """The text of a config file, to point at."""

    path: Path
    lines: tuple[str, ...]

    def error(self, message: str, section: str | None = None, key: str | None = None, hint: str = "") -> ValueError:
        """Build the error; it shows the line of `key` in `section` when the key stands on a line of its own."""
        number = self._find(section, key)
        return self._at(number, key or section or "", message, hint)

    def syntax_error(self, error: ValueError) -> ValueError:
        """Build the error for text that is not TOML."""
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        reason = str(error).split(" (at ")[0]
        number, column = (int(place[1]), int(place[2]) - 1) if place else (None, 0)
        return self._at(number, "", f"not valid TOML: {reason[:1].lower()}{reason[1:]}", "", column)

    def _at(self, number: int | None, word: str, message: str, hint: str, column: int | None = None) -> ValueError:
        where, text = str(self.path), ""
        if number is not None and number <= len(self.lines):
            line = self.lines[number - 1].rstrip()
            begin = line.find(word) if column is None else column
            text = f"\n    {line}\n    {' ' * begin}{'^' * max(len(word), 1)}"
            where += f":{number}"
        return ValueError(f"{where}: {message}{text}{hint and f'{chr(10)}  {hint}'}")

    def _find(self, section: str | None, key: str | None) -> int | None:
        current = None
        for number, line in enumerate(self.lines, start=1):
            header = re.match(r"\s*\[\s*([^\]]+?)\s*\]", line)
            if header:
                current = header[1].strip("\"'")
                if key is None and current == section:
                    return number
            elif key is not None and current == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
                return number
        return None


def load_config(path: str | Path) -> Config:
    """Read a TOML file into a `Config`; what the file leaves out keeps its default.

    Args:
        path: the file.

    Raises:
        ValueError: the file is missing or is not TOML, an unknown section or key (with the closest name), a value of
            the wrong type or out of range. The message points at the line.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        near = difflib.get_close_matches(path.name, sorted(p.name for p in path.parent.glob("*.toml")), n=1)
        hint = f"\n  did you mean '{path.with_name(near[0])}'?" if near else ""
        raise ValueError(f"cannot read the config '{path}': {reason}{hint}") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"cannot read the config '{path}': it is not UTF-8 text") from None
    source = _Source(path, tuple(text.splitlines()))
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise source.syntax_error(error) from None
    return _build_config(table, source)


def config_text(config: Config) -> str:
    """Return the TOML file of a `Config`, with all keys that have a value; `load_config` reads it.

    >>> print(config_text(Config()).splitlines()[0])
    [model]
    """
    sections = []
    for section in _sections():
        values = dataclasses.asdict(getattr(config, section)).items()
        lines = [f"{key} = {_toml(value)}" for key, value in values if value is not None]
        sections.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(sections) + "\n"


def _toml(value: bool | int | float | str) -> str:
    return repr(value) if type(value) in (int, float) else json.dumps(value, ensure_ascii=False)


def _build_config(table: dict[str, Any], source: _Source) -> Config:
    sections = _sections()
    built: dict[str, Any] = {}
    for name, values in table.items():
        if isinstance(values, dict) and name in sections:
            built[name] = _build_section(sections[name], name, values, source)
        elif isinstance(values, dict):
            raise source.error(
                f"unknown section [{name}]", section=name, hint=_closest(name, list(sections), "sections")
            )
        else:
            raise source.error(
                f"'{name}' stands outside of a section", key=name, hint=_home_of(name, sections) or _all(sections)
            )
    return Config(**built)


def _sections() -> dict[str, type]:
    return {f.name: type(getattr(Config(), f.name)) for f in dataclasses.fields(Config)}


def _build_section(cls: type, section: str, values: dict[str, Any], source: _Source) -> Any:
    known = typing.get_type_hints(cls)
    for key, value in values.items():
        if key not in known:
            hint = _home_of(key, _sections()) or _closest(key, list(known), f"keys of [{section}]")
            raise source.error(f"unknown key '{key}' in [{section}]", section, key, hint)
        if not _fits(value, known[key]):
            got = str(value).lower() if isinstance(value, bool) else repr(value)
            raise source.error(f"'{key}' in [{section}] must be {_type_name(known[key])}, got {got}", section, key)
        if float in _members(known[key]):
            values = {**values, key: float(value)}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        # The dataclass names the key in its message; find it to show the line.
        blamed = next((key for key in values if re.search(rf"\b{key}\b", str(error))), None)
        message, _, hint = str(error).partition("\n")
        raise source.error(message, section, blamed, hint.strip()) from None


def _closest(word: str, names: list[str], what: str) -> str:
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"{what}: {', '.join(names)}"


def _home_of(key: str, sections: dict[str, type]) -> str:
    homes = [name for name, cls in sections.items() if key in typing.get_type_hints(cls)]
    return f"try: put it under [{homes[0]}]" if homes else ""


def _all(sections: dict[str, type]) -> str:
    return f"sections: {', '.join(sections)}"


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Tell whether a TOML value has the annotated type; an int is a float too, a bool is not an int."""
    allowed = _members(hint)
    return type(value) in allowed or (type(value) is int and float in allowed)


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a string in quotes", bool: "true or false"}
    return next(names[member] for member in _members(hint) if member in names)
