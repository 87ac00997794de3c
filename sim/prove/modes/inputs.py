"""Second inputs of a proof: rows in another order, masks that mask something, and values that are not all equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

Second = tuple[Any, str]
"""Inputs of a second step, and what is new in them, in words."""


def second_of(value: Any, seed: int) -> Second:
    """Return other inputs of the same shapes, and say what is new.

    Rows are in another order, all tensors alike. Floating values that are all equal are moved, each by itself. Where a
    mask of booleans is the same everywhere, the end of every other row is masked.

    >>> ids, mask = torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2, dtype=torch.bool)
    >>> (ids, mask), said = second_of((ids, mask), 0)
    >>> ids.tolist(), mask.tolist(), said
    ([[3, 4], [1, 2]], [[True, True], [True, False]], 'rows in another order, input 1 moved')

    Args:
        value: a tensor, or containers of them.
        seed: of what is moved.
    """
    generator, said, sizes = torch.Generator().manual_seed(seed), list[str](), set[int]()
    for _, tensor in tensors_in(value):
        sizes.update(tensor.shape[:1])
    turns = len(sizes) == 1 and sizes != {1}

    def change(tensor: torch.Tensor, way: str) -> torch.Tensor:
        result = tensor.detach().clone()
        if turns and tensor.dim() and not _counts(tensor):
            result = result.roll(1, 0)
        if not is_constant(tensor) or not _may_move(tensor):
            return result.requires_grad_(tensor.requires_grad)
        said.append(way)
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * _SPREAD
            result += noise.to(tensor.dtype)
        else:
            ends = result.flatten(0, -2)[1 if result.numel() > result.shape[-1] else 0 :: 2]
            ends[:, -max(1, tensor.shape[-1] // _SHARE) :] ^= True
        return result.requires_grad_(tensor.requires_grad)

    other = _mapped(value, change)
    words = ["rows in another order"] * turns + [f"input {listed(said)} moved"] * bool(said)
    return other, ", ".join(words)


def proved_once(value: Any, report: Report) -> Report:
    """Return the report of a proof with the given inputs alone, which says what they leave open.

    Args:
        value: the inputs.
        report: of the proof.
    """
    same = [way.lstrip(".") for way, tensor in tensors_in(value) if is_constant(tensor) and _may_move(tensor)]
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
        report = prove(True)
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


def _may_move(tensor: torch.Tensor) -> bool:
    """Whether other values are of the same kind: any of a float, and those of a mask with rows."""
    mask = tensor.dtype == torch.bool and tensor.dim() > 1 and tensor.shape[-1] > 1
    return tensor.is_floating_point() or mask


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
