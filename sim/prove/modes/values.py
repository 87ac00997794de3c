"""Values behind which a fault hides: parameters of one value, and what no input reaches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from sim.prove.report import Report

__all__ = ["MadeAnewError", "check_varied", "is_constant", "listed", "proved_varied", "unreached", "vary"]

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

    Args:
        initials: parameters of each rank, by name.
        expected: those of one device.

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
    return f"{prefix}.{int(last) + 1}" if last.isdigit() else ""


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
