"""The layout of a tensor's parts, also where ranks hold the rows of a batch in another order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from hyper_parallel.core.dtensor.layout import Layout
from sim.prove.faults import diagnose
from sim.prove.infer import in_orders, pad_pieces, pieces_of, split_axes, submesh
from sim.prove.judge import Finding, Judge, of_copies

Parts: TypeAlias = Mapping[int, torch.Tensor]
Permutation: TypeAlias = tuple[int, ...]


class Finder:
    """Finds the layout of parts, and keeps the orders of rows that were found: the next tensor often has the same.

    Args:
        mesh: the axes of all ranks.
        orders: permutations of the batch in which the ranks hold it, where they are known.
    """

    def __init__(self, mesh: Layout, orders: Sequence[Permutation] = ()) -> None:
        self.mesh, self.orders = mesh, list(dict.fromkeys(orders))
        self._pieces: list[Mapping[int, Permutation]] = []  # rows of each rank, where ranks have different numbers
        self._judges: dict[tuple[int, ...], Judge] = {}

    def judge(self, parts: Collection[int]) -> Judge:
        """Return the judge of tensors that these ranks alone have."""
        here = tuple(sorted(parts))
        is_whole = len(here) == len(self.mesh.rank_list)
        return self._judges.setdefault(here, Judge(submesh(self.mesh, here), is_whole=is_whole))

    def find(
        self, parts: Parts, full: torch.Tensor, bound: float, addends: Any = None, *, may_reorder: bool = False
    ) -> Finding:
        """Judge a tensor as it is, then in the known orders of rows; with `may_reorder`, look for new ones, too."""
        found = self.explained(parts, full, bound, may_reorder=may_reorder)
        if found is not None:
            return found
        judge, full = self.judge(parts), _as_parts(full, parts)
        found = self._of_pieces(judge.unexplained, parts, full, bound)
        found = found or judge.unexplained(parts, full, bound, addends)
        for mesh in split_axes(judge.mesh, next(iter(parts.values())), full):
            again = Judge(mesh).explained(parts, full, bound)
            found = of_copies(found, again) if again is not None else found
        return found

    def explained(self, parts: Parts, full: torch.Tensor, bound: float, *, may_reorder: bool = False) -> Finding | None:
        """Judge a tensor as `find` does; return None, without the far slower search for a cause, if it is wrong."""
        judge, full = self.judge(parts), _as_parts(full, parts)
        found = judge.explained(parts, full, bound)
        for mesh in split_axes(judge.mesh, next(iter(parts.values())), full) if found is None else ():
            again = Judge(mesh).explained(parts, full, bound)
            if again is not None and again.status == "right":
                return replace(again, found=None)
        if found is not None or not may_reorder:
            return found
        for other in in_orders(full, self.orders):
            found = judge.explained(parts, other, bound)
            if found is not None:
                return found
        found = self._of_pieces(judge.explained, parts, full, bound)
        held = pieces_of(parts, full, bound) if found is None else None
        if held is None:
            return found
        dim, pieces = held
        places = tuple(itertools.chain(*dict.fromkeys(pieces.values())))
        found = judge.explained(parts, full.index_select(dim, torch.tensor(places)), bound)
        if found is not None:
            self.orders.append(places)
            return found
        self._pieces.append(pieces)
        return self._of_pieces(judge.explained, parts, full, bound)

    def _of_pieces(
        self,
        judged: Callable[[Parts, torch.Tensor, float], Finding | None],
        parts: Parts,
        full: torch.Tensor,
        bound: float,
    ) -> Finding | None:
        """Judge a tensor of which ranks hold pieces of different lengths, where the pieces are known."""
        for pieces in self._pieces:
            even = pad_pieces(parts, full, pieces)
            found = judged(*even, bound) if even is not None else None
            if found is not None:
                return replace(found, found=None) if found.status == "right" else found  # no layout of this tensor
        return None

    def scale(self, parts: Parts, full: torch.Tensor, bound: float) -> float:
        """Return the factor by which a gradient is larger on the ranks than on one device; 1 if there is none."""
        sizes = [size for size in self.mesh.mesh_shape if size > 1]
        products = {math.prod(some) for count in range(len(sizes) + 1) for some in itertools.combinations(sizes, count)}
        for times in sorted(products):
            found = self.explained(parts, full * times, bound * times, may_reorder=True)
            if found is not None and found.status == "right":
                return float(times)
        fault = diagnose(parts, full, submesh(self.mesh, tuple(sorted(parts))), bound)
        return float(fault.factor) if fault is not None and fault.kind == "scaled" and fault.factor else 1.0


def _as_parts(full: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Return a tensor of integers in floating point, if one of its parts is."""
    is_float = full.dtype.is_floating_point
    return full if all(part.dtype.is_floating_point == is_float for part in parts.values()) else full.double()
