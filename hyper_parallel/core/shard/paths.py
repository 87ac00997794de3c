"""Which parameters or modules a path in a plan means: `layers.*.mlp.w1.weight`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.messages import explain, nearest

_MOST_SHOWN = 12


class Match(NamedTuple):
    """What a plan says about one name.

    Attributes:
        key: the entry's own key in the plan.
        value: the entry.
    """

    key: str
    value: Any


@lru_cache(maxsize=4096)
def _pattern(path: str) -> re.Pattern[str]:
    """Return the expression for a path whose parts may hold globs."""
    parts = []
    for part in path.split("."):
        if part == "**":
            parts.append(r"(?:[^.]+\.)*")
        else:
            glob = translate(part).replace(r"(?s:", "(?:", 1)
            glob = glob.removesuffix(r"\Z").removesuffix(r"\z").replace(".*", "[^.]*")
            parts.append(glob + r"\.")
    return re.compile("".join(parts) + r"\Z")


def matches(path: str, name: str) -> bool:
    """Tell whether a path means a name: `*` stands for any one part or piece of one, `**` for any number of parts.

    The model itself, "", is meant by "" only.

    >>> matches("layers.*.w1.weight", "layers.0.w1.weight"), matches("layers.*.weight", "layers.0.w1.weight")
    (True, False)
    >>> matches("**.weight", "layers.0.w1.weight"), matches("**.weight", "weight"), matches("**", "a.b")
    (True, True, True)

    Args:
        path: as in a plan.
        name: the name of a parameter or module, without globs.
    """
    return path == name or (name != "" and is_glob(path) and bool(_pattern(path).match(f"{name}.")))


def is_glob(path: str) -> bool:
    """Tell whether a path holds a `*`.

    >>> is_glob("layers.*.w1"), is_glob("layers.0.w1")
    (True, False)
    """
    return "*" in path


def resolve(asked: str, entries: Mapping[str, tuple[str, Any]], names: Sequence[str], kind: str) -> dict[str, Match]:
    """Return what a plan says about each name, in the order of the names.

    >>> entries = {"**": ("**", "a"), "l.*.w": ("l.*.w", "b"), "l.0.w": ("l.0.w", "c")}
    >>> {name: match.value for name, match in resolve("", entries, ["l.0.w", "l.1.w", "n"], "parameter").items()}
    {'l.0.w': 'c', 'l.1.w': 'b', 'n': 'a'}

    The exact path counts before one with `*`, and that before one with `**`.

    Args:
        asked: the start of an error message, "cannot ...".
        entries: path -> (key as the user wrote it, value).
        names: what there is.
        kind: "parameter" or "module".

    Raises:
        ValueError: a path that means nothing; two of the same kind that mean the same and do not say the same.
    """
    found: dict[str, tuple[int, Match]] = {}
    for path, (key, value) in entries.items():
        hit = [name for name in names if matches(path, name)]
        if not hit:
            raise ValueError(_nothing(asked, path, key, names, kind))
        for name in hit:
            rank = 0 if path == name else 2 if "**" in path.split(".") else 1
            known = found.get(name)
            if known is not None and known[0] == rank and known[1].value != value:
                blame = f"{kind} {name!r} is meant by {known[1].key!r} and by {key!r}, which say different things"
                seen = f"{known[1].key}: {known[1].value}   {key}: {value}"
                hint = f"an entry for {name + key[len(path) :]!r} as well, which counts before both"
                raise ValueError(explain(asked, blame, seen, hint))
            if known is None or rank < known[0]:
                found[name] = rank, Match(key, value)
    return {name: found[name][1] for name in names if name in found}


def _nothing(asked: str, path: str, key: str, names: Iterable[str], kind: str) -> str:
    known, tail = [name for name in names if name], key[len(path) :]
    if not known:
        hint = f"{tail[1:]!r}, for the whole" if kind == "module" else "a model with parameters"
        return explain(asked, f"{key!r} is for a {kind} inside, and there is none", f"{kind}s: none", hint)
    blame = f"{key!r} means no {kind} of the model" if is_glob(path) else f"{path!r} is no {kind} of the model"
    shown = known if len(known) <= _MOST_SHOWN else [*known[:_MOST_SHOWN], f"... ({len(known)} in all)"]
    return explain(asked, blame, f"{kind}s: {', '.join(shown)}", _instead(path, tail, known, kind))


def _instead(path: str, tail: str, known: Sequence[str], kind: str) -> str:
    """Return the path that was probably meant."""
    if any(matches(f"**.{path}", name) for name in known):
        return f"{'**.' + path + tail!r}, as '*' stands for one part of a path only"
    inside = [name for name in known if name.startswith(f"{path}.")]
    if inside and len(inside) <= _MOST_SHOWN:
        return "one of " + ", ".join(map(repr, inside))
    near = nearest(path.replace("*", "0") + tail, [name + tail for name in known])
    if near.startswith("one of ") and len(known) > _MOST_SHOWN:
        return f"a name that model.named_{kind}s() has"
    return near
