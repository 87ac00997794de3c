"""Values behind which a fault hides: parameters of one value, what no input reaches, and inputs of a second step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sim.prove.record import mapped, tensors_in
from sim.prove.report import Report, ReportRow

_SPREAD = 0.05  # of the values put in place: small beside 1, large beside rounding
_MOST = 4  # tensors that a note lists


def vary(model: nn.Module, seed: int, left: Collection[str] = ()) -> list[str]:
    """Move parameters of which all elements are equal, as zeros and ones, each element by itself; return their names.

    What is multiplied by zero can be anything, and a rank's part of ones is like any other part.

    >>> norm = nn.LayerNorm(4)
    >>> vary(norm, 0)
    ['weight', 'bias']
    >>> len(norm.bias.unique())
    4

    Args:
        model: changed in place.
        seed: the same changes for the same seed, name and shape.
        left: names of parameters that stay as they are.
    """
    changed = []
    for name, parameter in model.named_parameters():
        plain = type(parameter) is nn.Parameter and parameter.is_floating_point() and not parameter.is_meta
        if not plain or not parameter.requires_grad or name in left:
            continue
        values = parameter.detach()
        if not is_constant(values) and (values.numel() != 1 or bool(values.any())):
            continue
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        moves = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * _SPREAD
        with torch.no_grad():
            parameter.add_(moves.to(parameter.dtype))
        changed.append(name)
    return changed


def proved_varied(
    model_fn: Callable[[], nn.Module], seed: int, prove: Callable[[Callable[[], nn.Module], bool], Report]
) -> Report:
    """Prove a program with varied parameters, but for those that ranks give their values by themselves.

    Args:
        model_fn: makes the model.
        seed: see `vary`.
        prove: called with what makes the varied model, and whether anything is varied, so that `check_varied` applies.
    """
    left: frozenset[str] = frozenset()
    is_varied = True
    while True:
        varied: set[str] = set()
        try:
            report = prove(_varying(model_fn, seed, left, varied), is_varied)
        except MadeAnewError as error:
            anew = error.names & varied or varied  # under other names than on one device: nothing tells which
            left, is_varied = left | anew, anew != varied
        else:
            note = f"a fault may hide behind {listed(sorted(left))}: of one value, which ranks make anew"
            return replace(report, notes=(*report.notes, note) if left else report.notes)


def _varying(
    model_fn: Callable[[], nn.Module], seed: int, left: Collection[str], varied: set[str]
) -> Callable[[], nn.Module]:
    """Return a function that makes the same model, varied, and adds the names of what it varies to a set."""

    def made() -> nn.Module:
        model = model_fn()
        if isinstance(model, nn.Module):
            varied.update(vary(model, seed, left))
        return model

    return made


class MadeAnewError(Exception):
    """Ranks have parameters of one value where these were varied: they give them their values by themselves.

    Args:
        names: of the parameters.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = names


def check_varied(initials: Collection[Mapping[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse parameters of one value that one device does not have.

    Raises:
        MadeAnewError: there are some.
    """
    anew = {
        name
        for initial in initials
        for name, values in initial.items()
        if is_constant(values) and not (name in expected and is_constant(expected[name]))
    }
    if anew:
        raise MadeAnewError(frozenset(anew))


def is_constant(values: torch.Tensor) -> bool:
    """Whether there are several elements, all equal and finite."""
    return values.numel() > 1 and bool(values.isfinite().all() and (values == values.flatten()[0]).all())


def unreached(
    steps: Sequence[Mapping[str, torch.Tensor | None]], trained: Collection[str] = (), tables: Collection[str] = ()
) -> list[str]:
    """Say of which parameters, or of which of their rows, the gradient is zero: no input has looked at them.

    >>> grad = torch.ones(6, 2)
    >>> grad[2:4] = 0
    >>> gradients = {"embed.weight": grad, "head.weight": grad, "experts.1.up": None, "experts.2.up": None}
    >>> for note in unreached([{**gradients, "experts.0.up": grad[:2]}], gradients, ["embed.weight"]):
    ...     print(note)
    rows 2 to 3 of embed.weight were never looked up: a fault there is not seen
    no input reaches head.weight[2:4], experts.1 to experts.2: a fault there is not seen

    Args:
        steps: gradients of one device, by name, for each step.
        trained: those parameters that want one: an expert that is never called has none.
        tables: those parameters of which rows are looked up, such as a vocabulary's.
    """
    whole, parts, rows = list[str](), dict[str, str](), list[str]()
    for name in steps[0] if steps else ():
        grads = [grad for step in steps if (grad := step.get(name)) is not None]
        if not grads:
            whole += [name] if name in trained and any(grad is not None for grad in steps[0].values()) else []
            continue
        if not grads[0].ndim or not grads[0].numel():
            continue
        zero = torch.stack([(grad == 0).reshape(len(grad), -1).all(1) for grad in grads]).all(0)
        if zero.all():
            whole.append(name)
        elif zero.any() and name in tables:
            rows.append(f"{_listed_rows(zero)} of {name}")
        elif zero.any():
            parts[name] = f"{name}[{_ranges(zero)}]"
    of_modules = _modules_of(whole, list(steps[0]) if steps else [])
    found = [parts.get(name, of_modules.get(name)) for name in (steps[0] if steps else ())]
    listed_parts = [text for text in found if text is not None]
    notes = [f"{listed(rows)} were never looked up"] if rows else []
    notes += [f"no input reaches {listed(listed_parts)}"] if listed_parts else []
    return [f"{note}: a fault there is not seen" for note in notes]


def _modules_of(names: Sequence[str], every: Sequence[str]) -> dict[str, str]:
    """Return, for the first of them, the modules to which parameters belong, where all of a module are among them."""
    chosen = set(names)
    found: dict[str, str] = {}
    for name in names:
        path = name
        while "." in path:
            parent = path.rpartition(".")[0]
            if any(other.startswith(f"{parent}.") and other not in chosen for other in every):
                break
            path = parent
        found.setdefault(path, name)
    result: dict[str, str] = {}
    run: list[str] = []  # modules of a list, one after the other
    for path in found:
        if not run or _next_of(run[-1]) != path:
            run = [path]
        else:
            run.append(path)
        result[found[run[0]]] = run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"
    return result


def _next_of(path: str) -> str:
    prefix, _, last = path.rpartition(".")
    return f"{prefix}.{int(last) + 1}" if last.isdecimal() else ""


def listed(texts: Sequence[str]) -> str:
    """List as many as one reads."""
    return ", ".join(texts[:_MOST]) + (f" and {len(texts) - _MOST} more" if len(texts) > _MOST else "")


def _spans(chosen: torch.Tensor) -> list[tuple[int, int]]:
    """Return where runs of True start and stop."""
    edges = torch.diff(chosen.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return list(zip(starts, stops, strict=True))


def _ranges(chosen: torch.Tensor) -> str:
    texts = [str(a) if b == a + 1 else f"{a}:{b}" for a, b in _spans(chosen)]
    return ", ".join(texts[:_MOST]) + (", ..." if len(texts) > _MOST else "")


def _listed_rows(chosen: torch.Tensor) -> str:
    texts = [str(a) if b == a + 1 else f"{a} to {b - 1}" for a, b in _spans(chosen)]
    return f"row{'s' * (int(chosen.sum()) > 1)} {listed(texts)}"


# -- inputs of a second step: rows in another order that count differently, and values that are not all equal ----------

_MOST_ELEMENTS = 2**20  # elements of parameters, on all ranks: so many are cheap
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

    other = mapped(value, change)
    words = [f"input {listed(ways)} {word}" for word, ways in said.items()]
    return other, ", ".join(["rows in another order"] * turns + words)


def _uneven(values: torch.Tensor, way: str, shapes: Sequence[torch.Size]) -> str:
    """Let rows count differently by whole numbers or booleans, in place, and say how; "": they are no such values."""
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
    """Return the report of a proof with the given inputs alone, which says what they leave open."""
    return _with_hidden(report, value)


def _with_hidden(report: Report, *values: Any) -> Report:
    """Note which inputs have one value, in all steps; whole numbers that count, such as lengths, among them."""
    ways = [{way.lstrip(".") for way, each in tensors_in(x) if is_constant(each) and each.dim()} for x in values]
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
    if not isinstance(model, nn.Module) or ranks * sum(each.numel() for each in model.parameters()) > _MOST_ELEMENTS:
        return proved_once(value, prove(False))
    what = f"a second step ({second[1] or 'the same inputs'})"
    try:
        report = _with_hidden(prove(True), value, second[0])
    except Exception as error:  # of the user's program, which raises it again if it is not due to the inputs
        report = proved_once(value, prove(False))
        lines = str(error).splitlines() or [""]
        return replace(report, notes=(*report.notes, f"{what} was not compared: {type(error).__name__}: {lines[0]}"))
    rows = [replace(row, tensor=row.tensor.removesuffix(" of step 1")) for row in report.rows]
    if report.bug is not None and not _is_second(report.bug):
        return replace(report, rows=tuple(row for row in rows if not _is_second(row)))
    # What was not compared at all has no bound, and stays.
    wide = [row.place for row in rows if row.verdict == "not proved" and _is_second(row) and row.bound]
    kept = tuple(row for row in rows if row.place not in wide or row.verdict != "not proved")
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
