"""Reader and writer of TOML files: run files, plans, machine files, calibrations.

Files of users have a `Schema`: their first line is `schema = 1`, and the reader upgrades older files.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.core.common.errors import InvalidValue, nearest

_parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

Change = Callable[[dict[str, Any]], None]

_KEY = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[\w-]+)"""
_PLACE = re.compile(rf"\s*(\[*)\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*[\]=]")


def move(old: str, new: str) -> Change:
    """Return the change that moves a key. A file with both keys keeps both, and is refused later.

    >>> move("parallel.dtype", "precision.dtype")(file := {"parallel": {"dtype": "bf16"}}); file
    {'parallel': {}, 'precision': {'dtype': 'bf16'}}

    Args:
        old: old section and key, e.g. "train.rate".
        new: new section and key.
    """
    (section, key), (to_section, to_key) = old.split("."), new.split(".")

    def change(table: dict[str, Any]) -> None:
        here, there = table.get(section), table.get(to_section, {})
        if isinstance(here, dict) and key in here and isinstance(there, dict) and to_key not in there:
            if to_section not in table:
                table[to_section] = {}
            table[to_section][to_key] = here.pop(key)

    return change


@dataclass(frozen=True)
class Schema:
    """The format of a kind of file, with the changes that upgrade older files.

    >>> Schema("config", ((), (move("train.rate", "optimizer.lr"),))).version
    2

    Attributes:
        name: name of the kind, for messages.
        upgrades: changes from each version to the next, starting at version 0, which has no `schema` line.
    """

    name: str
    upgrades: tuple[tuple[Change, ...], ...] = ((),)

    @property
    def version(self) -> int:
        """The newest version, which is written."""
        return len(self.upgrades)

    def read(self, path: str | Path, hint: str = "a TOML file") -> TomlFile:
        """Read the text of a file; the error for a missing file has the closest name, or `hint`."""
        path = Path(path)
        try:
            return TomlFile(self, path, path.read_bytes().decode("utf-8-sig"))  # Notepad writes a byte order mark
        except UnicodeDecodeError:
            reason = "it is not UTF-8 text"
        except OSError as error:
            reason = "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        there = sorted(other.stem for other in path.parent.glob("*.toml"))
        near = nearest(path.stem, there) if there else "one of"
        hint = hint if near.startswith("one of") else f"'{path.with_name(near[1:-1])}.toml'"
        seen = f"TOML files there: {', '.join(f'{name}.toml' for name in there) or 'none'}"
        raise InvalidValue(f"cannot read the {self.name} '{path}'", reason, seen, hint) from None


@dataclass(frozen=True)
class TomlFile:
    """The text of a file, for reading, for errors with lines, and for changes."""

    schema: Schema
    path: Path
    text: str

    def table(self) -> dict[str, Any]:
        """Return the tables of the file, upgraded to the newest version."""
        try:
            table: dict[str, Any] = _parser.loads(self.text)
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, or deep brackets
            reason, _, place = str(error).partition(" (at ")
            at = re.search(r"line (\d+), column (\d+)", place)
            number = int(at[1]) if at else None
            seen = self._line(number)
            if at and (lines := self.text.splitlines()[int(at[1]) - 1 :]):
                before = lines[0][: int(at[2]) - 1].lstrip()
                seen += f"\n  {' ' * len(before)}^"
            blame = f"not valid TOML: {reason[:1].lower()}{reason[1:]}"
            hint = 'key = 3, or key = "text"; a key with dots stands in quotes, too'
            raise InvalidValue(f"cannot read {self.place(number)}", blame, seen, hint) from None
        version, newest = table.pop("schema", 0), self.schema.version
        if type(version) is not int or version < 0:
            raise self.error("schema is the version of the format", f"schema = {newest}", "schema")
        if version > newest:
            blame = f"a newer hyper_parallel wrote it: this one reads schema {newest} and older"
            raise self.error(blame, "pip install --upgrade hyper_parallel", "schema")
        for changes in self.schema.upgrades[version:]:
            for change in changes:
                change(table)
        return table

    def rewritten(self, changes: Mapping[str, Mapping[str, Any]]) -> str:
        r"""Return the text with other values and the newest schema; comments and order stay.

        >>> file = TomlFile(Schema("config"), Path(), "schema = 1\n\n[train]\nsteps = 3  # few\n")
        >>> print(file.rewritten({"train": {"steps": 4, "lr": 0.5}}).partition("[train]\n")[2])
        steps = 4  # few
        lr = 0.5
        <BLANKLINE>

        Args:
            changes: new values by section and key; None removes the key.
        """
        import tomlkit

        head = "" if "schema" in tomlkit.parse(self.text) else f"schema = 0\n{chr(10) * (self.text[:1] == '[')}"
        document: Any = tomlkit.parse(f"{head}{self.text}".rstrip("\n") + "\n")
        for upgrades in self.schema.upgrades[document["schema"] :]:
            for change in upgrades:
                change(document)
        document["schema"] = self.schema.version
        for section, values in changes.items():
            for key, value in values.items():
                if value is None:
                    document.get(section, {}).pop(key, None)
                    continue
                if section not in document:
                    document[section] = {}
                body = document[section].value.body
                end = next((at for at in range(len(body), 0, -1) if body[at - 1][0] is not None), 0)
                after = body[end:]  # blank lines and comments, which belong to the next section
                del body[end:]
                document[section][key] = value
                body.extend(after)
        return tomlkit.dumps(document)

    def error(self, blame: str, hint: str, *keys: str, seen: str = "") -> InvalidValue:
        """Return an error that shows the line of a key, below its tables, or `seen`; without a key, no line."""
        number = self.line(*keys)
        return InvalidValue(f"cannot read {self.place(number)}", blame, seen or self._line(number), hint)

    def place(self, number: int | None) -> str:
        """Format the kind of file, its path, and the line if known."""
        return f"the {self.schema.name} {self.path}" + (f":{number}" if number else "")

    def line(self, *keys: str) -> int | None:
        """Return the line number of a key; else of any key with its name, which may have moved; else of its table."""
        found = list(self._places())
        for end in (slice(len(keys)), slice(-1, None), slice(1)):
            number = next((number for number, place in found if place[end] == keys[end] != ()), None)
            if number is not None:
                return number
        return None

    def _places(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        table: tuple[str, ...] = ()
        for number, line in enumerate(self.text.splitlines(), start=1):
            if match := _PLACE.match(line):
                keys = tuple(key.strip("\"'") for key in re.findall(_KEY, match[2]))
                table = keys if match[1] else table
                yield number, keys if match[1] else (*table, *keys)

    def _line(self, number: int | None) -> str:
        lines = self.text.splitlines()
        return lines[number - 1].strip() if number and number <= len(lines) else f"file: {self.path}"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of the library, which has no schema."""
    return dict(_parser.loads(path.read_text(encoding="utf-8")))


def toml_text(content: Mapping[str, Any], schema: Schema | None = None, comment: str = "") -> str:
    r"""Format content as TOML.

    >>> toml_text({"plan": {"a.w": "tp"}}, comment="on two ranks")
    '# on two ranks\n\n[plan]\n"a.w" = "tp"\n'

    Args:
        content: plain values, then tables as mappings.
        schema: the schema of the file; None: none.
        comment: lines at the top of the file.
    """
    import tomlkit

    document = tomlkit.document()
    for line in comment.splitlines():
        document.add(tomlkit.comment(line))
    if schema is not None:
        document["schema"] = schema.version
    document.update(content)
    return tomlkit.dumps(document)


def read_value(text: str) -> Any:
    """Read a value of the command line: TOML, or a word without quotes, e.g. `full`.

    >>> read_value("2"), read_value("true"), read_value("full every 2")
    (2, True, 'full every 2')
    """
    try:
        return _parser.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def written(text: str) -> Any:
    r"""Return a value that `toml_text` writes with exactly this spelling, including comments.

    >>> toml_text({"error": written("0.110  # of 3 runs")})
    'error = 0.110  # of 3 runs\n'
    """
    import tomlkit

    return tomlkit.parse(f"value = {text}\n")["value"]


def inline(content: Mapping[str, Any]) -> Any:
    """Return a table that is written in one line."""
    import tomlkit

    table = tomlkit.inline_table()
    table.update(content)
    return table
