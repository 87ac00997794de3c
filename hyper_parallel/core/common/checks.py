"""Checks of public arguments: of values, and of those wrong kinds that Python and torch would take.

A wrong kind that ends in an error of theirs, before any communication and on every rank alike, is not checked here.
In each function, `asked` is the start of an error message, "cannot ...", and `given` holds arguments by name.
"""

from __future__ import annotations

import builtins
import dataclasses
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.errors import HyperParallelError, InvalidType, InvalidValue, class_name, nearest

_LONGEST_NAME = 255
MOST_COUNTED = 2**63 - 1
"""What torch and TOML count to: their numbers are int64, sizes in bytes among them."""

MOST_LISTED = 2**20
"""Most ranks of a mesh, layers, heads, experts and micro-batches. They are listed one by one, with objects of their own
for each: of a million these take gigabytes and minutes."""


class _Kind(NamedTuple):
    """What an argument may be: how people call it, how to tell, and an example of it."""

    noun: str
    accepts: Callable[[Any], bool]
    example: str


Kinds: TypeAlias = "str | type | tuple[str | type, ...]"


def _instance(noun: str, kind: Any, example: str) -> _Kind:
    return _Kind(noun, lambda value: isinstance(value, kind), example)


def _is_int(value: Any) -> bool:
    if type(value) is int:  # an abstract class takes ten times as long to ask
        return True
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    if type(value) in (float, int):
        return True
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, set, frozenset))


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, torch.Tensor))


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, torch.device) or (isinstance(value, str) and bool(torch.device(value)))
    except RuntimeError:  # no such name
        return False


_KINDS = MappingProxyType(
    {
        "None": _Kind("None", lambda value: value is None, "None"),
        "bool": _instance("a bool", bool, "True"),
        "int": _Kind("an int", _is_int, "1"),
        "float": _Kind("a number", _is_float, "1.0"),
        "str": _instance("a str", str, '"..."'),
        "list": _instance("a list", (list, tuple), "[...]"),
        "sequence": _Kind("a sequence", _is_sequence, "(2, 4)"),
        "iterable": _Kind("an iterable", _is_iterable, "[...]"),
        "device": _Kind("a device", _is_device, '"cpu"'),
        "mapping": _instance("a mapping", Mapping, "{...}"),
        "callable": _Kind("something to call", callable, "a function"),
        "tensor": _instance("a tensor", torch.Tensor, "torch.ones(4)"),
        "plain tensor": _Kind("a plain tensor", _is_plain, "x.to_local()"),
        "DTensor": _instance("a DTensor", DTensor, "distribute_tensor(x, layout)"),
        "dtype": _instance("a torch.dtype", torch.dtype, "torch.float32"),
        "floating dtype": _Kind("a floating-point torch.dtype", _is_floating, "torch.bfloat16"),
        "module": _instance("a module", torch.nn.Module, "model"),
        "mesh": _instance("a DeviceMesh", DeviceMesh, 'init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))'),
        "group": _instance("a process group", getattr(dist, "ProcessGroup", ()), "torch.distributed.new_group()"),
    }
)
"""The kinds of arguments; those with the names of Python's types are what annotations of fields say."""


def check(
    asked: str, kinds: Kinds, hint: str = "", error: type[HyperParallelError] = InvalidType, /, **given: object
) -> None:
    """Refuse arguments of another kind.

    >>> check("cannot save a checkpoint", "int | None", step="1")
    Traceback (most recent call last):
        ...
    hyper_parallel.InvalidType: cannot save a checkpoint: step is a str, not an int or None
      step: '1'
      try: step=1

    Args:
        asked: the start of an error message, "cannot ...".
        kinds: names of the table, with " | " between them, a class, or a tuple of both. An int is a float, too; a bool
            is neither.
        hint: what to try instead of an example of the first kind.
        error: what is raised.
        given: the arguments by name.
    """
    allowed = _allowed(kinds)
    for name, value in given.items():
        if not any(kind.accepts(value) for kind in allowed):
            raise error(*_wrong_kind(asked, kinds, name, value, hint))


@cache
def _allowed(kinds: Kinds) -> tuple[_Kind, ...]:
    if isinstance(kinds, tuple):
        return tuple(kind for each in kinds for kind in _allowed(each))
    if isinstance(kinds, type):
        return (_instance(_article(kinds), kinds, kinds.__name__),)
    return tuple(_KINDS[word] for word in kinds.split(" | "))


def _wrong_kind(asked: str, kinds: Kinds, name: str, value: object, hint: str) -> tuple[str, str, str, str]:
    allowed = _allowed(kinds)
    blame = f"{name} is {_a(value)}, not {' or '.join(kind.noun for kind in allowed)}"
    meant = f"torch.{value}" if kinds == "dtype" and isinstance(getattr(torch, str(value), None), torch.dtype) else ""
    return asked, blame, _seen(name, value), hint or f"{name}={meant or allowed[0].example}"


def check_fields(asked: str, values: Any) -> None:
    """Refuse fields of a dataclass that are not what their annotations say, as far as the table has those words.

    A field that has a class as its default factory is one of that class. An int is one that can be counted to.
    """
    for name, kinds in _fields(values.__class__):
        value = getattr(values, name)
        if kinds is not None:
            check(asked, kinds, **{name: value})
        if _is_int(value):
            _check_counted(asked, name, value)


@cache  # a search of layouts makes thousands of descriptions
def _fields(kind: type) -> tuple[tuple[str, Kinds | None], ...]:
    found = []
    for field in dataclasses.fields(kind):
        kinds = field.default_factory if isinstance(field.default_factory, type) else field.type
        is_known = isinstance(kinds, type) or all(word in _KINDS for word in kinds.split(" | "))
        found.append((field.name, kinds if is_known else None))
    return tuple(found)


def _check_counted(asked: str, name: str, value: int, hint: str = "") -> None:
    if abs(value) > MOST_COUNTED:
        blame = f"{name} is beyond {MOST_COUNTED:,}, to which torch counts"
        raise InvalidValue(asked, blame, _seen(name, value), hint or f"a smaller {name}")


def check_listed(asked: str, /, **given: int) -> None:
    """Refuse more of something than can be listed one by one, see `MOST_LISTED`."""
    for name, value in given.items():
        if value > MOST_LISTED:
            blame = f"{name} is above {MOST_LISTED:,}, and each takes objects of its own"
            raise InvalidValue(asked, blame, _seen(name, value), f"a smaller {name}")


def check_elements(asked: str, what: str, elements: int, /, **sizes: int) -> None:
    """Refuse tensors, such as "its parameters", of so many elements that nothing counts their bytes, at 8 for each.

    `sizes` are what makes them so many.
    """
    if elements > MOST_COUNTED // 8:
        blame = f"the bytes of {what} are beyond {MOST_COUNTED:,}, to which torch counts"
        seen = "   ".join(f"{name}: {size}" for name, size in sizes.items())
        raise InvalidValue(asked, blame, seen, f"a smaller {max(sizes, key=lambda name: sizes[name])}")


def check_least(asked: str, least: float, below: float = math.inf, /, **given: Any) -> None:
    """Refuse numbers under `least`, from `below` up, infinite ones and NaN; None has no bound.

    >>> check_least("cannot save a checkpoint", 0, step=-1)
    Traceback (most recent call last):
        ...
    hyper_parallel.InvalidValue: cannot save a checkpoint: step must be a finite number of at least 0
      step: -1
      try: step=0
    """
    for name, value in given.items():
        if value is not None and not least <= value < below:
            bounds = f"a finite number of at least {least}" if below == math.inf else f"at least {least}, below {below}"
            blame = f"{name} must be {bounds}"
            raise InvalidValue(asked, blame, _seen(name, value), f"{name}={least}")


def check_above(asked: str, bound: float, hint: str = "", /, **given: float) -> None:
    """Refuse numbers up to `bound`, infinite ones and NaN."""
    for name, value in given.items():
        if not bound < value < math.inf:
            blame = f"{name} must be a finite number above {bound}"
            raise InvalidValue(asked, blame, _seen(name, value), hint or f"{name}={bound + 1}")


def check_paths(asked: str, /, **given: str | None) -> None:
    """Refuse what is no path: empty text of a variable that is not set, zero bytes, what is too long; None is none."""
    for name, value in given.items():
        if value is not None and (not value or "\0" in value):
            blame = f"{name} {'has a zero byte' if value else 'is empty'}"
            raise InvalidValue(asked, blame, _seen(name, value), f"a path, or leave out {name}")
        longest = max(len(part.encode("utf-8", "surrogatepass")) for part in (value or "").split("/"))
        if longest > _LONGEST_NAME:  # the system says so where it is opened, to each that does
            seen = f"{name}: {value:.60}...   bytes: {longest}"
            blame = f"{name} has a name of more than {_LONGEST_NAME} bytes, which file systems do not have"
            raise InvalidValue(asked, blame, seen, "a shorter name")


def check_choice(asked: str, name: str, given: object, choices: Iterable[str], hint: str = "") -> None:
    """Refuse a word that is none of `choices`; the hint is the nearest of them."""
    known = list(choices)
    if not isinstance(given, str) or given not in known:
        near = nearest(given, known)
        more = len(known) <= 4 and near in map(repr, known)  # otherwise there are too many, or near names them all
        seen = _seen(name, given) + (f"   known: {', '.join(map(repr, known))}" if more else "")
        raise InvalidValue(asked, f"there is no kind of {name} {given!r}", seen, hint or f"{name}={near}")


def list_modules(given: torch.nn.Module | Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return a module, or several, as a list."""
    return [given] if isinstance(given, torch.nn.Module) else list(given)


def check_int(value: object) -> int | None:
    """Return value as an int, or None for what is no int: a bool, a float, a str."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def read_int(
    asked: str,
    name: str,
    value: object,
    least: float = -math.inf,
    hint: str = "",
    most: float = MOST_COUNTED,
    error: type[HyperParallelError] = InvalidType,
) -> int:
    """Return an argument as a plain int from `least` to `most`.

    >>> read_int("cannot save a checkpoint", "step", torch.tensor(3), 0)
    3

    Raises:
        TypeError: no int, or `error`.
        ValueError: outside of the bounds.
    """
    number = check_int(value)
    if number is None:
        raise error(*_wrong_kind(asked, "int", name, value, hint))
    if not least <= number <= most:
        if number > most == MOST_COUNTED:
            _check_counted(asked, name, number, hint)
        bounds = f"at least {least}" if most >= MOST_COUNTED else f"from {least} to {most}"
        hint = hint or f"{name}={least if number < least else most}"
        raise InvalidValue(asked, f"{name} must be {bounds}", _seen(name, value), hint)
    return number


def check_shape(global_shape: Any) -> tuple[int, ...]:
    """Return a tensor's sizes as plain ints; a TypeError of what is no int, a ValueError of what is negative."""
    asked, hint = "cannot place a tensor", "tensor.shape, such as (8, 4)"
    return tuple(
        read_int(asked, f"global_shape[{dim}]", size, 0, hint, math.inf) for dim, size in enumerate(global_shape)
    )


def _a(value: object) -> str:
    if value is None:
        return "None"
    return _article(type(value), class_name(value))


def _article(kind: type, name: str = "") -> str:
    name = name or kind.__name__
    if kind.__module__ != "builtins" and hasattr(builtins, name):  # numpy's bool is none
        name = f"{kind.__module__}.{name}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _seen(name: str, value: object) -> str:
    if isinstance(value, torch.Tensor):  # its numbers may differ between ranks, and are on a device
        return f"{name}: {type(value).__name__} of shape {tuple(value.shape)}"
    shown, *more = repr(value).splitlines() or [""]
    return f"{name}: {shown[:80]}{' ...' if more or len(shown) > 80 else ''}"
