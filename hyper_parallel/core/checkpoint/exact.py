"""Values as JSON and back, exactly: what comes out equals what went in, with the same types."""

from __future__ import annotations

import json
import math
from typing import Any

from hyper_parallel.core.common.errors import explain

__all__ = ["decoded", "from_json", "to_json"]

_MARK = "$"  # starts the one key of an object that stands for something JSON does not have


def to_json(value: Any) -> str:
    """Return a value as one line of JSON that `from_json` reads back exactly.

    >>> to_json({"lr": 0.1, "best": float("inf"), "betas": (0.9, 0.95)})
    '{"lr": 0.1, "best": {"$float": "inf"}, "betas": {"$tuple": [0.9, 0.95]}}'

    Args:
        value: None, bools, ints, floats, strings, and lists, tuples and dicts with string keys of such.

    Raises:
        ValueError: something else is in it; the message says where.
    """
    return json.dumps(_encode(value, "extra"), allow_nan=False)


def from_json(text: str) -> Any:
    """Return the value that `to_json` was given.

    >>> from_json('{"best": {"$float": "-inf"}, "betas": {"$tuple": [0.9, 0.95]}}')
    {'best': -inf, 'betas': (0.9, 0.95)}
    """
    return decoded(json.loads(text))


def _encode(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):  # numpy's float64 is one, too
        value = float(value)
        return value if math.isfinite(value) else {f"{_MARK}float": repr(value)}
    if type(value) is list:
        return [_encode(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
    if type(value) is tuple:
        return {f"{_MARK}tuple": [_encode(entry, f"{where}[{index}]") for index, entry in enumerate(value)]}
    if isinstance(value, dict):
        wrong = next((key for key in value if type(key) is not str), None)
        if wrong is not None:
            blame = f"the key {wrong!r} of {where} is a {type(wrong).__name__}, and JSON has keys that are strings"
            raise ValueError(explain("cannot write extra values", blame, f"{where}: {value!r}", f"{str(wrong)!r}"))
        encoded = {key: _encode(entry, f"{where}[{key!r}]") for key, entry in value.items()}
        marked = any(key.startswith(_MARK) for key in encoded)
        return {f"{_MARK}dict": list(map(list, encoded.items()))} if marked else encoded
    blame = f"{where} is a {type(value).__name__}, which JSON does not have"
    hint = "numbers, strings, lists and dicts here; tensors among the tensors, or as per_rank"
    raise ValueError(explain("cannot write extra values", blame, f"got: {value!r}", hint))


def decoded(value: Any) -> Any:
    """Return what parsed JSON stands for."""
    if isinstance(value, list):
        return [decoded(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind == f"{_MARK}float":
            return float(content)
        if kind == f"{_MARK}tuple":
            return tuple(map(decoded, content))
        if kind == f"{_MARK}dict":
            return {key: decoded(entry) for key, entry in content}
    return {key: decoded(entry) for key, entry in value.items()}
