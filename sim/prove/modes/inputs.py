"""Second inputs of a proof: rows in another order that count differently, and values that are not all equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sim.prove.modes.values import is_constant, listed
from sim.prove.record import tensors_in
from sim.prove.report import Report, ReportRow

__all__ = ["Second", "proved_once", "proved_twice", "second_of"]

_SPREAD = 0.05  # as that of parameters: small beside 1, large beside rounding
_MOST = 2**20  # elements of parameters, on all ranks: so many are cheap
_SHARE = 4  # of a row, what a mask masks
_IGNORED = -100  # what losses of torch leave out

Second = tuple[Any, str]
"""Inputs of a second step, and what is new in them, in words."""


def second_of(value: Any, seed: int) -> Second:
    """Return other inputs of the same shapes, and say what is new.

    Rows are in another order, all tensors alike. Floating values that are all equal are moved, each by itself. What
    rows count by differs from row to row, so that it differs from rank to rank: a mask that is the same everywhere
    masks the ends of rows, the last row's more than those of others; a mask that leaves all rows as many, or labels of
    which some are -100, leave the last row fewer; lengths that are all that of the rows are shorter in some.

    >>> ids, mask = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2, dtype=torch.bool)
    >>> (ids, mask), said = second_of((ids, mask), 0)
    >>> ids.tolist(), mask.tolist(), said
    ([[3, 4], [1, 2]], [[True, True], [True, False]], 'rows in another order, input 1 masks ends of rows')

    Args:
        value: a tensor, or containers of them.
        seed: of what is moved.
    """
    generator, said, shapes = torch.Generator().manual_seed(seed), dict[str, list[str]](), list[torch.Size]()
    for _, tensor in tensors_in(value):
        shapes.append(tensor.shape)
    sizes = {size for shape in shapes for size in shape[:1]}
    turns = len(sizes) == 1 and sizes != {1}

    def change(tensor: torch.Tensor, way: str) -> torch.Tensor:
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if turns and tensor.dim() and not _counts(tensor):
            result = result.roll(1, 0)
        if tensor.is_floating_point():
            if is_constant(tensor):
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * _SPREAD
                result += noise.to(tensor.dtype)
                said.setdefault("moved", []).append(way)
            return result.requires_grad_(tensor.requires_grad)
        word = _uneven(result, way, shapes)
        if word:
            said.setdefault(word, []).append(way)
        return result

    other = _mapped(value, change)
    words = [f"input {listed(ways)} {word}" for word, ways in said.items()]
    return other, ", ".join(["rows in another order"] * turns + words)


def _uneven(values: torch.Tensor, way: str, shapes: Sequence[torch.Size]) -> str:
    """Let rows count differently by whole numbers or booleans, in place, and say how; "": they are no such values.

    Args:
        values: an input.
        way: its name.
        shapes: of all inputs.
    """
    if values.dim() == 1 and is_constant(values) and (len(values), int(values[0])) in [shape[:2] for shape in shapes]:
        values -= torch.tensor(_counts_of_rows(len(values), int(values[0])), dtype=values.dtype)
        return "is shorter in some rows"
    if _is_mask(values) and is_constant(values):
        rows = values.view(-1, values.shape[-1])
        for row, count in zip(rows, _counts_of_rows(*rows.shape), strict=True):
            row[values.shape[-1] - count :] = 1 - int(row[0])
        return "masks ends of rows"
    if values.dim() > 1 and (values.dtype == torch.bool or _is_named_mask(values, way)):
        return "masks more of the last row" if _mask_more(values.view(-1, values.shape[-1])) else ""
    return f"has more {_IGNORED}" if values.dtype != torch.bool and _ignore_more(values) else ""


def _mask_more(rows: torch.Tensor) -> bool:
    """Let the last row go on one place earlier as it ends, where all rows count as many; say whether it does."""
    kept = (rows[-1] != rows[-1, -1]).nonzero().flatten()
    if len(kept) < 2 or len(rows.int().sum(-1).unique()) > 1:
        return False
    rows[-1, kept[-1]] = rows[-1, -1]
    return True


def _ignore_more(labels: torch.Tensor) -> bool:
    """Ignore the first half of one row's labels, where some are ignored already; say whether that is so."""
    if not labels.dim() or not bool((labels == _IGNORED).any()):
        return False
    if labels.dim() == 1:  # without rows: the last one, if the rank that has it is likely to have another
        chosen = bool((labels[-2:] != _IGNORED).all()) and len(labels) > 1
        labels[-1:] = _IGNORED if chosen else labels[-1:]
        return chosen
    for row in reversed(list(labels.view(-1, labels.shape[-1]))):
        there = (row != _IGNORED).nonzero().flatten()
        if len(there) > 1:
            row[there[: len(there) // 2]] = _IGNORED  # models shift labels, and may not look at the first
            return True
    return False


def _counts_of_rows(rows: int, length: int) -> list[int]:
    """Return how much of each row's end is masked: of every other row something, of the last one more.

    >>> _counts_of_rows(4, 8), _counts_of_rows(1, 8)
    ([0, 2, 0, 4], [2])
    """
    few = min(max(1, length // _SHARE), length - 1)
    counts = [few if row % 2 or rows == 1 else 0 for row in range(rows)]
    if rows > 1:
        counts[-1] = min(2 * few, length - 1)
    return counts


def proved_once(value: Any, report: Report) -> Report:
    """Return the report of a proof with the given inputs alone, which says what they leave open.

    Args:
        value: the inputs.
        report: of the proof.
    """
    return _with_hidden(report, value)


def _with_hidden(report: Report, *values: Any) -> Report:
    """Note which inputs have one value, in all steps; whole numbers that count, such as lengths, among them."""
    ways = [
        {way.lstrip(".") for way, tensor in tensors_in(value) if is_constant(tensor) and tensor.dim()}
        for value in values
    ]
    same = [way for way in (way.lstrip(".") for way, _ in tensors_in(values[0])) if all(way in each for each in ways)]
    note = f"a fault may hide behind input {listed(same)}: of one value"
    return replace(report, notes=(*report.notes, note)) if same else report


def proved_twice(
    made: Callable[[], Any], ranks: int, value: Any, second: Second, prove: Callable[[bool], Report]
) -> Report:
    """Prove one step, and a second one with other inputs where that is cheap.

    It is cheap where all ranks together have up to a million parameters, counted as if each had them all. What a second
    step does not prove, as an optimizer has made its bounds wide, is left out; so is all of it where the program does
    not take such inputs. A note says so.

    Args:
        made: makes the model.
        ranks: how many.
        value: the inputs of the first step.
        second: its inputs, see `second_of`.
        prove: with the second step, or without.
    """
    with torch.random.fork_rng(devices=[]):
        model = made()
    if not isinstance(model, nn.Module) or ranks * sum(each.numel() for each in model.parameters()) > _MOST:
        return proved_once(value, prove(False))
    what = f"a second step ({second[1] or 'the same inputs'})"
    try:
        report = _with_hidden(prove(True), value, second[0])
    except Exception as error:  # of the user's program, which raises it again if it is not due to the inputs
        report = proved_once(value, prove(False))
        lines = str(error).splitlines() or [""]
        return replace(report, notes=(*report.notes, f"{what} was not compared: {type(error).__name__}: {lines[0]}"))
    rows = [replace(row, tensor=row.tensor.removesuffix(" of step 1")) for row in report.rows]
    if report.first is not None and not _is_second(report.first):
        first = replace(report.first, tensor=report.first.tensor.removesuffix(" of step 1"))
        return replace(report, first=first, rows=tuple(row for row in rows if not _is_second(row)))
    wide = [row.place for row in rows if row.verdict == "not proved" and _is_second(row)]
    kept = tuple(row for row in rows if not (row.verdict == "not proved" and _is_second(row)))
    note = f"{what} is compared" + (f", but for {listed(wide)}, whose bounds are wide" if wide else "")
    return replace(report, rows=kept, notes=(note, *report.notes))


def _is_second(row: ReportRow) -> bool:
    return row.tensor.endswith(" step 2")


def _is_mask(values: torch.Tensor) -> bool:
    """Whether values may be a mask of rows: booleans, or whole numbers that are all 1."""
    if values.dim() < 2 or values.shape[-1] < 2 or values.is_floating_point() or values.is_complex():
        return False
    return values.dtype == torch.bool or bool((values == 1).all())


def _is_named_mask(values: torch.Tensor, way: str) -> bool:
    """Whether whole numbers are 0 and 1, and called a mask."""
    whole = not values.is_floating_point() and not values.is_complex()
    return whole and "mask" in way and bool(((values == 0) | (values == 1)).all())


def _counts(tensor: torch.Tensor) -> bool:
    """Whether a tensor is 0, 1, 2, ...: positions, and no rows."""
    return tensor.dim() == 1 and torch.equal(tensor.long(), torch.arange(len(tensor)))


def _mapped(value: Any, change: Callable[[torch.Tensor, str], Any], way: str = "") -> Any:
    if isinstance(value, torch.Tensor):
        return change(value, way)
    if isinstance(value, Mapping):
        return {name: _mapped(each, change, f"{way}.{name}".strip(".")) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_mapped(each, change, f"{way}.{at}".strip(".")) for at, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
