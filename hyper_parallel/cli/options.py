"""Options of commands that are fields of dataclasses: name, type and help come from there.

The declaration is read from the source of its module, which is not imported: torch takes seconds, and `--help` and
wrong options are answered before it.
"""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer

Given = dict[str, dict[str, Any]]
"""What the options of a command are given: values by section and field, those that are left out left out."""

_ROOT = Path(__file__).resolve().parents[2]  # `hyper_parallel` and `sim` lie beside each other, also when installed
_KINDS = MappingProxyType({"int": int, "float": float, "str": str, "bool": bool, "Any": str})


class _Declared(NamedTuple):
    """A field of a dataclass: the kind of its values, None aside, and the first sentence about it in the docstring."""

    kind: type
    help: str


class Option(NamedTuple):
    """An option of a command: the section and the field that it sets, and the parameter as typer takes it."""

    section: str
    field: str
    parameter: inspect.Parameter


def options(section: str, module: str, name: str, **called: str) -> tuple[Option, ...]:
    """Return an option for each field of a dataclass, without a default: what a file says stays where it is left out.

    >>> found = options("train", "hyper_parallel.trainer.config", "TrainConfig", log="log_file", start_from="")
    >>> [option.parameter.name for option in found if option.field in ("steps", "log", "start_from")]
    ['steps', 'log_file']

    Args:
        section: what `Given` calls the dataclass.
        module: that declares it; it is not imported.
        name: of the dataclass.
        called: by field, what its option is called; "" is for none.
    """
    known, found = declared(module, name), []
    for field, parameter in ({field: field for field in known} | called).items():
        kind, text = known[field]
        asked: Any = Annotated[kind | None, typer.Option(help=text, rich_help_panel=f"Section {section}")]
        if parameter:
            keyword = inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=asked)
            found.append(Option(section, field, keyword))
    return tuple(found)


def with_options(*chosen: Option) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command these options, in this order, in place of its argument `given: Given`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for name, own in inspect.signature(command).parameters.items():
            if name == "given":
                parameters += [option.parameter for option in chosen]
            else:
                parameters.append(own.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

        def run(**values: Any) -> None:
            given: Given = {option.section: {} for option in chosen}
            for option in chosen:
                value = values.pop(option.parameter.name)
                if value is not None:
                    given[option.section][option.field] = value
            command(given=given, **values)

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


# -- the declaration of a dataclass ------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def declared(module: str, name: str) -> Mapping[str, _Declared]:
    """Read the fields of a dataclass from the source of its module.

    >>> declared("hyper_parallel.trainer.config", "CheckpointConfig")["keep"]
    _Declared(kind=<class 'int'>, help='How many of the last checkpoints to keep.')
    """
    tree = ast.parse(_ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    said = _said_of_arguments(ast.get_docstring(found) or "")
    return MappingProxyType(
        {
            node.target.id: _Declared(_kind(node.annotation), said.get(node.target.id, ""))
            for node in found.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    )


def _kind(annotation: ast.expr) -> type:
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]
    return next((_KINDS[name] for name in names if name in _KINDS), str)


def _said_of_arguments(docstring: str) -> dict[str, str]:
    """Return the first sentence about each argument, with a capital letter and without quotes: help is no code."""
    _, _, section = docstring.partition("Args:\n")
    said: dict[str, str] = {}
    for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section.partition("\n\n")[0], re.MULTILINE):
        first = re.split(r"(?<=[.])\s+(?=[A-Z\"\d])", re.sub(r"\s+", " ", text), maxsplit=1)[0].removesuffix(".")
        plain = re.sub(r"[\"`]", "", first).replace("None: ", "default: ")
        said[name] = f"{plain}." if first.startswith('"') else f"{plain[:1].upper()}{plain[1:]}."
    return said
