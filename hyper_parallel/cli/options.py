"""Options of commands that are fields of dataclasses: name, type, default and help come from there.

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
"""What the options of a command are given: values by group and field, those that are left out left out."""

_ROOT = Path(__file__).resolve().parents[2]  # `hyper_parallel` and `sim` lie beside each other, also when installed
_KINDS = MappingProxyType({"int": int, "float": float, "str": str, "bool": bool, "Any": str})


class _Declared(NamedTuple):
    """A field of a dataclass, as its source declares it.

    Attributes:
        kind: of its values, None aside.
        default: which it has; None also where the source computes it.
        help: first sentence about it in the docstring of the class.
    """

    kind: type
    default: Any
    help: str


class Option(NamedTuple):
    """An option of a command, and the field that it sets.

    Attributes:
        group: what the command calls the dataclass.
        field: name of the field.
        parameter: of the command, as typer takes it.
    """

    group: str
    field: str
    parameter: inspect.Parameter


def options(
    group: str, module: str, name: str, *fields: str, panel: str | None = None, optional: bool = False
) -> tuple[Option, ...]:
    """Return options for fields of a dataclass.

    >>> (steps, _) = options("train", "hyper_parallel.trainer.config", "TrainConfig", "steps", "log=log_file")
    >>> steps.parameter.name, steps.parameter.default
    ('steps', 100)

    A switch that is off by default has no name that turns it off.

    Args:
        group: see `Given`.
        module: that declares the dataclass; it is not imported.
        name: of the dataclass.
        fields: their names, none for all; "log=log_file" is the field log by the option --log-file.
        panel: heading of the help that they stand under.
        optional: they have no default: what a file or a search says stays where they are left out.
    """
    known = declared(module, name)
    return tuple(_option(group, known[text.partition("=")[0]], text, panel, optional) for text in fields or known)


def _option(group: str, found: _Declared, text: str, panel: str | None, optional: bool) -> Option:
    field, _, called = text.partition("=")
    parameter, default = called or field, None if optional else found.default
    flag = f"--{parameter.replace('_', '-')}"
    names = (flag,) if found.kind is bool and default is False else ()
    kind: Any = found.kind if default is not None else found.kind | None
    annotation = Annotated[kind, typer.Option(*names, help=found.help, rich_help_panel=panel)]
    kept = inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    return Option(group, field, kept)


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
            given: Given = {option.group: {} for option in chosen}
            for option in chosen:
                value = values.pop(option.parameter.name)
                if value is not None:
                    given[option.group][option.field] = value
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
    _Declared(kind=<class 'int'>, default=3, help='How many of the last checkpoints to keep.')
    """
    tree = ast.parse(_ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    said = _said_of_arguments(ast.get_docstring(found) or "")
    return MappingProxyType(
        {
            node.target.id: _Declared(_kind(node.annotation), _value(node.value), said.get(node.target.id, ""))
            for node in found.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    )


def _kind(annotation: ast.expr) -> type:
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]
    return next((_KINDS[name] for name in names if name in _KINDS), str)


def _value(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _said_of_arguments(docstring: str) -> dict[str, str]:
    """Return the first sentence about each argument, without quotes: help is no code."""
    _, _, section = docstring.partition("Args:\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section.partition("\n\n")[0], re.MULTILINE)
    return {name: _sentence(re.sub(r"\s+", " ", text)) for name, text in entries}


def _sentence(text: str) -> str:
    """Return the first sentence, with a capital letter."""
    first = re.split(r"(?<=[.])\s+(?=[A-Z\"\d])", text, maxsplit=1)[0].removesuffix(".")
    plain = re.sub(r"[\"`]", "", first).replace("None: ", "default: ")
    return f"{plain}." if first.startswith('"') else f"{plain[:1].upper()}{plain[1:]}."
