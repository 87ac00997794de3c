"""Names of parallel parameters on one device: the same, given by a map, or found by values, fused ones too."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.common.torch_compat import flat_bytes
from hyper_parallel.core.dtensor.layout import Layout
from sim.prove.infer import explanations, submesh


@dataclass
class NameMap:
    """Which parameter of one device each parameter of the ranks stands for.

    Attributes:
        parts: for a name on the ranks, the names on one device, in the order in which they are fused, and the dim.
        rows: for a name on the ranks whose rows take turns, such as q, k and v of each head: where the rows of each
            name on one device are, in their order.
        orders: for a name on both sides, of which the ranks hold the rows in another regular order: that order.
        found: matches by values, in words.
        missing: names on the ranks that stand for nothing.
    """

    parts: dict[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)
    rows: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    orders: dict[str, torch.Tensor] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def translated(self, tensors: Mapping[str, Any], sizes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Return a rank's tensors by the names of one device, fused ones cut apart.

        Args:
            tensors: by the rank's names.
            sizes: shapes on one device, which say in what proportion a fused tensor is cut.
        """
        result: dict[str, Any] = {}
        for name, tensor in tensors.items():
            rows = self.rows.get(name, {})
            if rows and tensor is not None and len(tensor) == sum(map(len, rows.values())):
                result.update({each: tensor[torch.tensor(places)] for each, places in rows.items()})
                continue
            names, dim = self.parts.get(name, ((name,), 0))
            if len(names) == 1 or tensor is None:
                result.update(dict.fromkeys(names, tensor))
                continue
            each = [sizes[part][dim] for part in names]
            held, total = tensor.shape[dim], sum(each)
            cut = [held * size // total for size in each]
            result.update(zip(names, tensor.split([*cut[:-1], held - sum(cut[:-1])], dim), strict=True))
        return result

    def ordered(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return a tensor of one device with its rows as the ranks hold them."""
        return full[self.orders[name]] if name in self.orders else full

    def paths(self, of_ranks: Sequence[str], of_one: Sequence[str]) -> dict[str, str]:
        """Return which module of one device each module of the ranks stands for, as far as parameters tell."""
        there, found = set(of_one), dict[str, set[str]]()
        for name, (names, _) in self.parts.items():
            one, other = name.rpartition(".")[0], names[0].rpartition(".")[0]
            while len(names) == 1 and one and other:
                found.setdefault(one, set()).add(other)
                one, other = one.rpartition(".")[0], other.rpartition(".")[0]
        mapped = {path: next(iter(those)) for path, those in found.items() if len(those) == 1}
        taken = list(mapped.values())
        told = {path: other for path, other in mapped.items() if taken.count(other) == 1}
        result = {path: path for path in of_ranks if path in there and path not in told}
        result.update(told)
        return result


def read_names(asked: str, given: Mapping[str, Any], ranks: Sequence[str], one: Sequence[str]) -> dict[str, Any]:
    """Return a map of names, with its `*` filled in.

    >>> read_names("cannot", {"h.*.qkv": ["l.*.q", "l.*.k"]}, ["h.0.qkv", "x"], ["l.0.q", "l.0.k"])
    {'h.0.qkv': ('l.0.q', 'l.0.k')}
    """
    result: dict[str, Any] = {}
    for pattern, value in given.items():
        values = (value,) if isinstance(value, str) else tuple(each for each in value if isinstance(each, str))
        form = re.compile(re.escape(pattern).replace(r"\*", "([^.]+)"))
        fits = [(name, match) for name in ranks if (match := form.fullmatch(name))]
        if not fits:
            hint = nearest(pattern, list(ranks))
            raise InvalidValue(asked, f"no rank has a parameter {pattern!r}", f"names: {list(ranks)[:8]}", hint)
        for name, match in fits:
            filled = []
            for each in values:
                stars = iter(match.groups())
                filled.append("".join(next(stars, "*") if part == "*" else part for part in re.split(r"(\*)", each)))
            unknown = [each for each in filled if each not in one]
            if unknown:
                blame = f"one device has no parameter {unknown[0]!r}, which names[{pattern!r}] asks for"
                raise InvalidValue(asked, blame, f"names: {list(one)[:8]}", nearest(unknown[0], list(one)))
            result[name] = tuple(filled)
    return result


def roots_by_value(roots: Mapping[str, Mapping[str, torch.Tensor]], one: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return which module of one device each outermost module of a rank is, where its own name is another one's.

    A stage of a pipeline, or one of several experts, has the same name on every rank; its values tell which it is.

    >>> one = {"0.weight": torch.zeros(2), "1.weight": torch.ones(2), "1.bias": torch.ones(1)}
    >>> roots_by_value({"": {"weight": torch.ones(1)}}, one), roots_by_value({"": {"1.weight": torch.ones(2)}}, one)
    ({'': '1'}, {'': ''})
    """
    result: dict[str, str] = {}
    for root, held in roots.items():
        leaf = next(iter(held), None)
        suffix = f".{leaf}"
        within = [name[: -len(suffix)] for name in one if name.endswith(suffix)] + [""] * (leaf in one)
        places = [place for place in dict.fromkeys([root, *within]) if place not in result.values()]
        found = {at: [(part, one.get(f"{at}.{name}".lstrip("."))) for name, part in held.items()] for at in places}
        fits = (at for at, both in found.items() if all(of is not None and is_piece(part, of) for part, of in both))
        result[root] = next(fits, root) if leaf is not None else root
    return result


def is_piece(part: torch.Tensor, full: torch.Tensor) -> bool:
    """Whether a tensor is cut from another in one of the places that shards have."""
    if part.dim() != full.dim() or part.dtype != full.dtype:
        return False
    starts = [
        dict.fromkeys([*range(0, size - held + 1, max(held, 1)), size - held])
        for size, held in zip(full.shape, part.shape, strict=True)
    ]
    return not part.numel() or any(
        torch.equal(part, full[tuple(slice(at, at + held) for at, held in zip(place, part.shape, strict=True))])
        for place in itertools.product(*starts)
    )


def find_names(
    one: Mapping[str, torch.Tensor], ranks: Sequence[Mapping[str, torch.Tensor]], mesh: Layout, given: Mapping[str, Any]
) -> NameMap:
    """Return which parameters of one device those of the ranks stand for.

    Names that both have stand for each other; then what `given` says; then values are compared: a parameter that is
    another one on every rank, sharded or not, or several of them, one behind the other or in turns.
    """
    result = NameMap()
    theirs = list(dict.fromkeys(name for rank in ranks for name in rank))
    for name in theirs:
        if name in given:
            names = given[name]
            result.parts[name] = (names, _fused_dim([one[each].shape for each in names]))
        elif name in one:
            result.parts[name] = ((name,), 0)
            held = _held(ranks, name)
            if not all(is_piece(part, one[name]) for part in held.values()):
                _note_order(result, name, held, one[name])
    left = {name for names, _ in result.parts.values() for name in names}
    free = {name: tensor for name, tensor in one.items() if name not in left}
    late = []
    for name in theirs:
        if name in result.parts:
            continue
        parts = _held(ranks, name)
        likely = list(_candidates(parts, free, mesh))
        if len(likely) == 1 or (likely and not has_one_value(free[likely[0]])):
            _take(result, free, name, (likely[0],), 0)
            continue
        fused = _fused(parts, free) if not likely else None
        if fused is not None:
            _take(result, free, name, *fused)
        elif likely or not _take_turns(result, name, parts, free):
            late.append((name, likely))
    for name, likely in late:  # constants: by the module whose other parameters have told, else in order
        module, _, leaf = name.rpartition(".")
        of = {names[0].rpartition(".")[0] for other, (names, _) in result.parts.items() if module_of(other) == module}
        known = [each for each in likely if each in free and module_of(each) in of and each.endswith(leaf)]
        rest = known or [each for each in likely if each in free]
        siblings = [names for each, (names, _) in result.parts.items() if module_of(each) == module and len(names) > 1]
        beside = [f"{module_of(each)}.{leaf}" for each in siblings[0]] if siblings else []
        if beside and all(each in free for each in beside):
            _take(result, free, name, tuple(beside), 0)
        elif rest:
            _take(result, free, name, (rest[0],), 0)
        elif (copied := _copied(one, ranks, name)) is not None:
            result.parts[name] = ((copied,), 0)
        else:
            result.missing.append(name)
    return result


def _copied(one: Mapping[str, torch.Tensor], ranks: Sequence[Mapping[str, torch.Tensor]], name: str) -> str | None:
    """Return a parameter that some ranks have by another name, e.g. an embedding that is the last stage's head, too."""
    held = _held(ranks, name)
    others = [each for each in one if each != name and not any(each in ranks[rank] for rank in held)]
    fits = [each for each in others if all(is_piece(part, one[each]) for part in held.values())]
    return fits[0] if len(fits) == 1 and not has_one_value(one[fits[0]]) else None


def _held(ranks: Sequence[Mapping[str, torch.Tensor]], name: str) -> dict[int, torch.Tensor]:
    return {rank: held[name] for rank, held in enumerate(ranks) if name in held}


def _take_turns(result: NameMap, name: str, parts: Mapping[int, torch.Tensor], free: dict[str, torch.Tensor]) -> bool:
    """Note where the rows of others are in a parameter, if they take turns there; return whether they do.

    Other ranks have other rows, in the same turns.
    """
    of_ranks = _rows_of(parts, free)
    found = [
        {
            each: tuple(
                place for _, place in sorted((row, place) for place, (of, row) in enumerate(rows) if of == each)
            )
            for each in dict.fromkeys(sorted(of for of, _ in rows))
        }
        for rows in of_ranks
    ]
    if not found or any(each != found[0] for each in found) or not _is_regular(_joined(of_ranks)):
        return False
    rows = {each: found[0][each] for each in free if each in found[0]}
    result.parts[name], result.rows[name] = (tuple(rows), 0), rows
    words = " + ".join(f"{each} by {_run_words(_runs(places))}" for each, places in rows.items())
    result.found.append(f"{name} is {words}")
    for each in rows:
        free.pop(each)
    return True


def _note_order(result: NameMap, name: str, parts: Mapping[int, torch.Tensor], full: torch.Tensor) -> None:
    """Note in which order the ranks hold the rows of a parameter, if it is another one and regular."""
    joined = _joined(_rows_of(parts, {name: full}))
    order = [row for _, row in joined]
    if sorted(order) == list(range(len(full))) and (_is_regular(joined) or _is_regular(_inverse(order))):
        result.orders[name] = torch.tensor(order)
        result.found.append(f"{name} has its rows by {_run_words(_runs(order))}")


_Rows = list[tuple[str, int]]
"""For each row of a rank's tensor, of which tensor on one device it is a row, and which."""


def _rows_of(parts: Mapping[int, torch.Tensor], free: Mapping[str, torch.Tensor]) -> list[_Rows]:
    """Return of which tensors the ranks hold the rows, exactly; nothing where some row is of none, or of several."""
    first = next(iter(parts.values()))
    known: dict[bytes, tuple[str, int] | None] = {}
    for name, full in free.items():
        if full.dim() == first.dim() > 0 and full.shape[1:] == first.shape[1:] and full.dtype == first.dtype:
            for at, key in enumerate(_keys(full)):
                known[key] = None if key in known else (name, at)
    found = []
    for part in parts.values() if known else ():
        rows = [row for key in _keys(part) if (row := known.get(key)) is not None]
        if len(rows) < len(part):
            return []
        found.append(rows)
    return found


def _joined(of_ranks: Sequence[_Rows]) -> _Rows:
    """Put the rows of all ranks one behind the other, those of copies once."""
    return [row for rows in dict.fromkeys(map(tuple, of_ranks)) for row in rows]


def _keys(tensor: torch.Tensor) -> list[bytes]:
    rows, size = tensor.detach().contiguous(), math.prod(tensor.shape[1:]) * tensor.element_size()
    return [row.tobytes() for row in flat_bytes(rows).view(len(rows), size).numpy()]


def _inverse(order: Sequence[int]) -> _Rows:
    return [("", place) for place in sorted(range(len(order)), key=lambda place: order[place])]


def _is_regular(rows: Sequence[tuple[str, int]]) -> bool:
    """Whether runs of rows take turns, those of each turn one behind the other.

    >>> _is_regular([("q", 0), ("q", 1), ("k", 4), ("q", 2), ("q", 3), ("k", 5)])
    True
    >>> _is_regular([("q", 0), ("q", 1), ("k", 5), ("q", 2), ("q", 3), ("k", 4)])
    False
    """
    runs: list[list[Any]] = []
    for name, row in rows:
        if runs and runs[-1][0] == name and runs[-1][1] + runs[-1][2] == row:
            runs[-1][2] += 1
        else:
            runs.append([name, row, 1])
    periods = (period for period in range(2, len(runs) // 2 + 1) if len(runs) % period == 0)
    follow = [[name, row + count, count] for name, row, count in runs]
    return any(follow[:-period] == runs[period:] for period in periods)


def _runs(places: Sequence[int]) -> list[int]:
    """Return the lengths of what lies side by side."""
    starts = [at for at, place in enumerate(places) if not at or places[at - 1] + 1 != place]
    return [stop - start for start, stop in zip(starts, [*starts[1:], len(places)], strict=True)]


def _run_words(runs: Sequence[int]) -> str:
    return f"{runs[0]} row{'s' if runs[0] > 1 else ''} in turn"


def module_of(name: str) -> str:
    """Return the path of the module that has a parameter."""
    return name.rpartition(".")[0]


def _take(result: NameMap, free: dict[str, torch.Tensor], name: str, names: tuple[str, ...], dim: int) -> None:
    result.parts[name] = (names, dim)
    result.found.append(f"{name} is {' + '.join(names)}")
    for each in names:
        free.pop(each, None)


def has_one_value(tensor: torch.Tensor) -> bool:
    """Whether all elements are equal, if there are any."""
    return not tensor.numel() or bool((tensor == tensor.flatten()[0]).all())


def _candidates(parts: Mapping[int, torch.Tensor], free: Mapping[str, torch.Tensor], mesh: Layout) -> Iterator[str]:
    """Yield the names whose values the ranks hold, exactly."""
    here = submesh(mesh, list(parts))
    first = next(iter(parts.values()))
    for name, full in free.items():
        if full.dim() != first.dim() or any(
            -(-a // max(b, 1)) > len(parts) for a, b in zip(full.shape, first.shape, strict=True)
        ):
            continue
        try:
            fits = explanations(parts, full, here, 0.0)
        except ValueError:
            continue
        if any(not fit.layout.is_partial() for fit in fits):
            yield name


def _fused(parts: Mapping[int, torch.Tensor], free: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], int] | None:
    """Return the names whose parts a tensor holds one behind the other, and the dim; None: no such names."""
    first = next(iter(parts.values()))
    for dim in range(first.dim()):
        at, names = 0, list[str]()
        while at < first.shape[dim]:
            fits = (
                (name, length)
                for name, full in free.items()
                if name not in names and full.dim() == first.dim()
                for length in [full.shape[dim] // n for n in range(1, len(parts) + 1) if full.shape[dim] % n == 0]
                if at + length <= first.shape[dim] and _holds(full, first.narrow(dim, at, length), dim)
            )
            name, length = next(fits, ("", 0))
            if not length:
                break
            names.append(name)
            at += length
        if at == first.shape[dim] and len(names) > 1:
            return tuple(names), dim
    return None


def _holds(full: torch.Tensor, part: torch.Tensor, dim: int) -> bool:
    """Whether a part is one of the equal pieces of a tensor along a dim; constants tell nothing."""
    if has_one_value(part) or any(
        a != b for at, (a, b) in enumerate(zip(full.shape, part.shape, strict=True)) if at != dim
    ):
        return False
    return any(torch.equal(piece, part) for piece in full.split(part.shape[dim], dim))


def _fused_dim(shapes: Sequence[Sequence[int]]) -> int:
    """Return the dim along which tensors are fused: the one in which they may differ."""
    differ = [dim for dim in range(len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1]
    return differ[0] if differ else 0
