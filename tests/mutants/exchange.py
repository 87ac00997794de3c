"""Mutants, and the exchange of a loaded module's code for that of another text of its file."""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Changes = list[tuple[Callable[..., object], tuple[Any, ...]]]


class CannotBeExchanged(Exception):
    """The mutant changes more than code of functions and plain assignments."""


@dataclass(frozen=True)
class Mutant:
    """A bug that is put into one file: `old`, which occurs in it once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    kind: str
    equivalent: str = ""

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0]

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def text(self, source: str) -> str:
        """Return the mutated text of the file."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {count} times in {self.file}, not once")
        return source.replace(self.old, self.new)

    def line(self, source: str) -> int:
        """Return the number of the first line that differs."""
        pairs = zip(source.splitlines(), self.text(source).splitlines(), strict=False)
        return next(number for number, (old, new) in enumerate(pairs, start=1) if old != new)

    def place(self, source: str) -> str:
        """Return the name of the innermost function that is changed; "" if none is."""
        line, nodes = self.line(source), functions(ast.parse(source))
        found = [name for name, node in nodes if node.body[0].lineno <= line <= node.end_lineno]
        return found[-1] if found else ""


def read_list(file: Path) -> list[Mutant]:
    """Read the mutants of a TOML file: a list of tables for each mutated file."""
    tables = tomllib.loads(file.read_text())
    return [Mutant(file=path, **each) for path, mutants in tables.items() for each in mutants]


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every function of a file under its name with those of the classes and functions around it."""
    for node in ast.iter_child_nodes(tree):
        name = f"{outer}{node.name}" if isinstance(node, DEFINITIONS) else ""
        if name and not isinstance(node, ast.ClassDef):
            yield name, node
        yield from functions(node, f"{name}." if name else outer)


def mark(source: str, first: int) -> ast.Module:
    """Return a file's tree with a call `__hit__(number)` at the start of every function, numbered from `first`."""
    tree = ast.parse(source)
    for number, (_, node) in enumerate([*functions(tree)], start=first):
        call = ast.parse(f"__hit__({number})").body[0]
        for part in ast.walk(call):
            ast.copy_location(part, node.body[0])
        node.body.insert(0 if ast.get_docstring(node) is None else 1, call)
    return tree


def live_functions(root: Path, files: Iterable[str]) -> dict[str, list[FunctionType]]:
    """Return all functions of this process by the file that they are written in."""
    gc.unfreeze()  # the collector lists nothing that is frozen
    found: dict[str, list[FunctionType]] = {str(root / file): [] for file in files}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in found:
            found[each.__code__.co_filename].append(each)
    gc.freeze()
    return {file: found[str(root / file)] for file in files}


def new_code(path: Path, source: str, new: str | ast.Module) -> dict[Any, CodeType]:
    """Return the new code of the functions of a file whose code changes, by `_identity` of the old."""
    pairs: list[Any] = [tuple(compile(each, str(path), "exec", dont_inherit=True) for each in (source, new))]
    for codes in pairs:  # grows meanwhile
        inner = [[each for each in code.co_consts if isinstance(each, CodeType)] for code in codes]
        names = [[each.co_name for each in found] for found in inner]
        if names[0] != names[1] or codes[0].co_freevars != codes[1].co_freevars:
            raise CannotBeExchanged("other functions or closures than before")
        pairs += zip(*inner, strict=True)
    return {_identity(old): other for old, other in pairs if old != other}


def changes_of(codes: dict[str, dict[Any, CodeType]], live: dict[str, list[FunctionType]]) -> Changes:
    """Return the changes that give live functions their new code."""
    found = [(each, of.get(_identity(each.__code__))) for file, of in codes.items() for each in live.get(file, ())]
    return [(setattr, (each, "__code__", code)) for each, code in found if code is not None]


def _identity(code: CodeType) -> Any:
    """Return a key that stays the same while Python specializes the code."""
    return code.co_name, code.co_firstlineno, getattr(code, "co_linetable", code.co_code)


def exchange(mutant: Mutant, root: Path, source: str, live: dict[str, list[FunctionType]]) -> Changes:
    """Return the changes that put a mutant into this process.

    Raises:
        CannotBeExchanged: It changes a signature, a decorator, an attribute of a decorated class, or a statement that
            does more than to assign to one name.
    """
    changes = changes_of({mutant.file: new_code(root / mutant.file, source, mutant.text(source))}, live)
    for owner, node in assignments(ast.parse(source).body, ast.parse(mutant.text(source)).body):
        changes.append((_assign, (sys.modules[mutant.module], owner, node)))
    if not changes:
        raise CannotBeExchanged("no function of this process has the code")
    return changes


def assignments(old: list[ast.stmt], new: list[ast.stmt], owner: str | None = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield the new assignments outside of functions, each with the name of its class.

    Args:
        owner: The class; "" for the module, None for one whose attributes are not all that an assignment makes.
    """
    if len(old) != len(new):
        raise CannotBeExchanged("another number of statements outside of functions")
    for before, after in zip(old, new, strict=True):
        if isinstance(before, DEFINITIONS) and _head(before) == _head(after):
            if isinstance(before, ast.ClassDef):
                is_plain = owner == "" and not before.decorator_list
                yield from assignments(before.body, after.body, before.name if is_plain else None)
        elif ast.dump(before) != ast.dump(after):
            if owner is None or not isinstance(after, ast.Assign) or not isinstance(after.targets[0], ast.Name):
                raise CannotBeExchanged(f"line {after.lineno}")
            yield owner, after


def _head(node: ast.AST) -> str:
    node = copy.copy(node)
    node.body = []  # type: ignore[attr-defined]
    return ast.dump(node)


def _assign(module: Any, owner: str, node: Any) -> None:
    """Assign to a name of a module, also where other modules have imported it, or of a class."""
    name, found = node.targets[0].id, {}
    exec(compile(ast.Module([node], []), module.__file__, "exec", dont_inherit=True), vars(module), found)
    before = getattr(module, name, None)
    shares = [each for each in list(sys.modules.values()) if getattr(each, "__dict__", {}).get(name) is before]
    for target in [getattr(module, owner)] if owner else [module] if name[0] == "_" else shares:
        setattr(target, name, found[name])
