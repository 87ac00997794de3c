"""Choices between candidates, such as those of `topk` and `argmax`: recorded, and taken again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload

from hyper_parallel.core.dtensor.layout import Layout
from sim.ops import Level, OnOperations, Proceed, named_arguments
from sim.prove.evidence import gap, top
from sim.prove.infer import explanations, submesh
from sim.prove.record import local_of

_aten = torch.ops.aten

_CHOOSING = frozenset({
    _aten.topk.default, _aten.sort.default, _aten.sort.stable, _aten.max.dim, _aten.min.dim, _aten.argmax.default,
    _aten.argmin.default,
})  # fmt: skip

ChoiceKey: TypeAlias = tuple[str, str, int]
"""Which choice it is: the module's path, the operation, and how many there were before."""


class Choice(NamedTuple):
    """One choice.

    Attributes:
        given: the candidates.
        indices: those that were taken, along a dim.
        dim: which.
        is_ordered: the order of the indices counts.
    """

    given: torch.Tensor
    indices: torch.Tensor
    dim: int
    is_ordered: bool

    def taken(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the values of some candidates."""
        values = self.given.gather(self.dim, indices)
        return values if self.is_ordered else values.sort(self.dim).values


class Choices(OnOperations):
    """Record which candidates `topk`, `sort`, `max` and `argmax` take, or make them take others; a context manager.

    >>> with Choices(lambda: "gate") as first:
    ...     torch.tensor([1.0, 3.0, 3.0]).argmax()
    tensor(1)
    >>> with Choices(lambda: "gate", {("gate", "argmax", 0): torch.tensor([2])}):
    ...     torch.tensor([1.0, 3.0, 3.0]).argmax()
    tensor(2)

    Args:
        where: returns the path of the module that is running, None outside of modules.
        taken: indices to take, as they were recorded.
    """

    order, only = Level.CHOICES, _CHOOSING

    def __init__(self, where: Callable[[], str | None], taken: Mapping[ChoiceKey, torch.Tensor] | None = None) -> None:
        self._where, self._taken = where, taken or {}
        self._counts: dict[tuple[str, str], int] = {}
        self.made: dict[ChoiceKey, Choice] = {}

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Carry out a choice."""
        result = proceed(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:  # backward
            return result
        path, given = self._where(), args[0]
        if path is None or not given.is_floating_point() or not given.ndim:
            return result
        return self._chosen(path, func, local_of(given), named_arguments(func, args, kwargs), result)

    def _chosen(self, path: str, func: OpOverload, given: torch.Tensor, options: Mapping[str, Any], result: Any) -> Any:
        name, dim, indices = func._schema.name.partition("::")[2], options.get("dim"), result
        if not isinstance(result, torch.Tensor):
            indices = result[1]
        taken = local_of(indices)
        if dim is None:  # of all
            given, dim, taken = given.flatten(), 0, taken.reshape(1)
        elif not options.get("keepdim", True):
            taken = taken.unsqueeze(dim)
        number = self._counts[path, name] = self._counts.get((path, name), -1) + 1
        key = (path, name, number)
        other = self._taken.get(key)
        if other is not None and other.shape == taken.shape:
            taken = other
            chosen = other.reshape(indices.shape)
            values = given.gather(dim, other).reshape(indices.shape)
            result = chosen if isinstance(result, torch.Tensor) else (values, chosen)
        self.made[key] = Choice(given.clone(), taken.clone(), dim, bool(options.get("sorted", True)))
        return result


def free_choices(
    mine: Mapping[ChoiceKey, Choice],
    ranks: Sequence[Mapping[ChoiceKey, Choice]],
    mesh: Layout,
    bound: Callable[[ChoiceKey, torch.Tensor], float],
) -> dict[ChoiceKey, torch.Tensor]:
    """Return what the ranks chose otherwise than one device, all alike, between candidates within the bound.

    Those are the ranks that have chosen at all: of a pipeline, those of a stage.

    Args:
        mine: the choices of one device.
        ranks: those of each rank.
        mesh: all ranks.
        bound: called with a key and the candidates, returns what rounding can do to them.
    """
    found = {}
    for key, choice in mine.items():
        held = {rank: made[key] for rank, made in enumerate(ranks) if key in made}
        if not held or all(torch.equal(each.indices, choice.indices) for each in held.values()):
            continue
        limit = bound(key, choice.given)
        indices = _joined(choice, held, submesh(mesh, list(held)), limit)
        if indices is None or torch.equal(indices, choice.indices):  # parts of what one device chose
            continue
        if _is_free(choice, indices, limit):
            found[key] = indices
    return found


def agreed_words(taken: Iterable[ChoiceKey]) -> list[str]:
    """Say where one device chose as the ranks did."""
    places = ", ".join(dict.fromkeys(f"{op} of {path or 'the model'}" for path, op, _ in taken))
    return [f"in {places}, candidates lie within the bound: one device took those that the ranks chose"] * bool(places)


def _joined(choice: Choice, held: Mapping[int, Choice], mesh: Layout, limit: float) -> torch.Tensor | None:
    """Put the ranks' choices together; None where their candidates are no parts, or equal parts choose differently."""
    full = choice.given
    if any(each.given.ndim != full.ndim or each.dim != choice.dim for each in held.values()):
        return None
    for fit in explanations({rank: each.given for rank, each in held.items()}, full, mesh, limit):
        if fit.layout.is_partial() or fit.layout.splits(full.ndim)[choice.dim]:
            continue
        indices, boxes = choice.indices.clone(), []
        for each, box in zip(held.values(), fit.layout.slices(full.shape).tolist(), strict=True):
            boxes.append(tuple(slice(*ends) if dim != choice.dim else slice(None) for dim, ends in enumerate(box)))
            if indices[boxes[-1]].shape != each.indices.shape:
                return None
            indices[boxes[-1]] = each.indices
        alike = all(torch.equal(indices[box], each.indices) for each, box in zip(held.values(), boxes, strict=True))
        return indices if alike else None
    return None


def _is_free(choice: Choice, indices: torch.Tensor, limit: float) -> bool:
    """Whether rounding can make these out of the choice: candidates as large, each of them once."""
    once = bool((indices.sort(choice.dim).values.diff(dim=choice.dim) > 0).all())
    return once and top(gap(choice.taken(indices), choice.taken(choice.indices))) <= 2 * limit
