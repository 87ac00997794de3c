"""Matrices of sharded parameters: which rank of a group computes which, and the exchange of their shards.

A parameter of two dims is one matrix, one of more dims a stack of them, as the weights of experts are. Only the mesh
axes that split its last two dims split a matrix; the ranks along them are its *group*. Axes that split the dims before
give whole matrices to different ranks already, and along all others ranks hold copies: neither communicates.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.groups import group_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.mesh.device_mesh import mesh_among
from hyper_parallel.core.redistribute.execute import all_to_all

Box = tuple[slice, slice]


class Matrix(NamedTuple):
    """One matrix, of which every member of a group holds a shard.

    Args:
        param: index of its parameter, in the list that was given.
        level: place in the rank's own stack of matrices; 0 for a parameter of two dims.
        shape: rows and columns of the whole matrix.
        boxes: what each member holds of it, in group order.
    """

    param: int
    level: int
    shape: tuple[int, int]
    boxes: tuple[Box, ...]

    def flops(self) -> int:
        """Return the cost of one iteration of `orthogonalize`, in multiplications and additions.

        >>> Matrix(0, 0, (4, 2), ()).flops()
        80
        """
        short, long = sorted(self.shape)
        return 4 * short * short * long + 2 * short**3

    def elements(self, member: int) -> int:
        """Return how many elements a member of the group holds."""
        rows, columns = self.boxes[member]
        return (rows.stop - rows.start) * (columns.stop - columns.start)


@dataclass(frozen=True)
class Sharing:
    """Matrices that one group of ranks holds, and the member that computes each.

    Args:
        ranks: of the group, sorted; the calling rank is one of them. None for matrices that lie on one rank.
        axes: names of the mesh axes that the group lies along.
        mesh: has these axes, and their process groups.
        matrices: in the order of the parameters.
        owners: the member that computes each matrix.
    """

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    mesh: DeviceMesh | None
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]

    def sends(self, member: int) -> list[int]:
        """Return how many elements a member sends to each on the way there, itself included (that stays)."""
        counts = [0] * len(self.ranks)
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            counts[owner] += matrix.elements(member) if owner != member else 0
        return counts

    def receives(self, member: int) -> list[int]:
        """Return how many elements a member receives from each on the way there."""
        owned = [matrix for matrix, owner in zip(self.matrices, self.owners, strict=True) if owner == member]
        return [
            0 if other == member else sum(matrix.elements(other) for matrix in owned)
            for other in range(len(self.ranks))
        ]


def share(params: Sequence[torch.Tensor]) -> list[Sharing]:
    """Return which rank computes which matrix, one `Sharing` for each group, by first need.

    All ranks of a group come to the same answer without communication: it depends on layouts and shapes alone. A rank
    that is not on a parameter's mesh has nothing of it.

    Args:
        params: DTensors and plain tensors of at least two dims.

    Raises:
        ValueError: a placement that a layout cannot say; see `Layout.of`.
    """
    groups: dict[tuple[int, ...], tuple[tuple[str, ...], DeviceMesh | None, list[Matrix]]] = {}
    for number, param in enumerate(params):
        ranks, axes, matrices = _matrices(number, param)
        mesh = mesh_among(param.device_mesh) if isinstance(param, DTensor) else None
        groups.setdefault(ranks, (axes, mesh, []))[2].extend(matrices)
    return [
        Sharing(ranks, axes, mesh, tuple(matrices), _owners(matrices, len(ranks)))
        for ranks, (axes, mesh, matrices) in groups.items()
        if matrices
    ]


def _matrices(number: int, param: torch.Tensor) -> tuple[tuple[int, ...], tuple[str, ...], list[Matrix]]:
    """Return the group that shares the rank's matrices of a parameter, its axes, and the matrices."""
    rows, columns = param.shape[-2:]
    if not isinstance(param, DTensor):
        count, whole = param.shape[:-2].numel(), (slice(0, rows), slice(0, columns))
        return (), (), [Matrix(number, index, (rows, columns), (whole,)) for index in range(count)]
    here = param.device_mesh.get_coordinate()
    if here is None:
        return (), (), []
    layout = Layout.of(param)
    splits = layout.splits(param.ndim)
    within = {axis for axis in (*splits[-2], *splits[-1]) if layout.mesh_shape[axis] > 1}
    places = np.arange(len(layout.rank_list)).reshape(layout.mesh_shape)
    members = places[tuple(slice(None) if axis in within else at for axis, at in enumerate(here))].ravel()
    ranks = np.array(layout.rank_list)[members]
    order = np.argsort(ranks)
    slices = layout.slices(param.shape)[members[order]]
    stack = [range(start, stop) for start, stop in slices[0, :-2].tolist()]  # the same on all members
    boxes = tuple((slice(*box[0]), slice(*box[1])) for box in slices[:, -2:].tolist())
    found = [Matrix(number, index, (rows, columns), boxes) for index, _ in enumerate(itertools.product(*stack))]
    axes = tuple(layout.alias_name[axis] for axis in sorted(within))
    return (tuple(ranks[order].tolist()) if len(ranks) > 1 else ()), axes, found


def _owners(matrices: Sequence[Matrix], members: int) -> tuple[int, ...]:
    """Give each matrix, the dearest first, to the member with the least work so far (Graham 1969).

    Among equals the one with the largest shard computes it, as that shard need not move.

    >>> thirds = tuple((slice(start, start + 1), slice(0, 2)) for start in range(3))
    >>> _owners([Matrix(number, 0, (3, 2), thirds) for number in range(4)], 3)
    (0, 1, 2, 0)
    """
    work, owners = [0] * max(members, 1), [0] * len(matrices)
    for place in sorted(range(len(matrices)), key=lambda place: -matrices[place].flops()):
        matrix = matrices[place]
        least = min(range(len(work)), key=lambda member: (work[member], -matrix.elements(member), member))
        owners[place] = least
        work[least] += matrix.flops()
    return tuple(owners)


class Exchange:
    """Shards of matrices on their way to the ranks that compute them, and back.

    Communication: one all_to_all in each direction. A rank sends its shards of the matrices of others and receives the
    others' shards of its own, which is the least that any exchange moves.

    Args:
        sharing: who computes what.
        shards: the rank's shard of each matrix, in its order, on the device that the group communicates with.
    """

    def __init__(self, sharing: Sharing, shards: Sequence[torch.Tensor]) -> None:
        self._sharing, self._shards = sharing, shards
        self._me = sharing.ranks.index(dist.get_rank()) if sharing.ranks else 0

    def owned(self) -> list[int]:
        """Return the places of the matrices that this rank computes."""
        return [place for place, owner in enumerate(self._sharing.owners) if owner == self._me]

    def gather(self) -> list[torch.Tensor]:
        """Return the matrices that this rank computes, whole."""
        matrices, owned = self._sharing.matrices, self.owned()
        if not self._sharing.ranks:
            return list(self._shards)
        arrived = self._move([self._shards[place] for place in self._outgoing()], there=True)
        wholes = {place: self._shards[place].new_empty(matrices[place].shape) for place in owned}
        for member, place in self._incoming():
            _part(wholes[place], matrices[place].boxes[member]).copy_(next(arrived))
        for place in owned:
            _part(wholes[place], matrices[place].boxes[self._me]).copy_(self._shards[place])
        return [wholes[place] for place in owned]

    def scatter(self, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the rank's shard of every matrix.

        Args:
            wholes: the matrices that this rank has computed, as `gather` has returned them.
        """
        matrices, by_place = self._sharing.matrices, dict(zip(self.owned(), wholes, strict=True))
        if not self._sharing.ranks:
            return list(wholes)
        sent = [_part(by_place[place], matrices[place].boxes[member]) for member, place in self._incoming()]
        arrived = self._move(sent, there=False)
        shards = {place: _part(whole, matrices[place].boxes[self._me]) for place, whole in by_place.items()}
        shards |= {place: next(arrived) for place in self._outgoing()}
        return [shards[place] for place in range(len(matrices))]

    def _outgoing(self) -> list[int]:
        """Return the places of the matrices of others, by owner."""
        owners = self._sharing.owners
        return sorted((place for place in range(len(owners)) if owners[place] != self._me), key=owners.__getitem__)

    def _incoming(self) -> list[tuple[int, int]]:
        """Return the members that hold shards of this rank's matrices, with the matrix's place, in order."""
        owned = self.owned()
        return [(member, place) for member in range(len(self._sharing.ranks)) if member != self._me for place in owned]

    def _move(self, shards: Sequence[torch.Tensor], *, there: bool) -> itertools.chain[torch.Tensor]:
        sharing = self._sharing
        sends, receives = sharing.sends(self._me), sharing.receives(self._me)
        like, matrices = self._shards[0], sharing.matrices
        shapes = [_shape(matrices[place].boxes[member]) for member, place in self._incoming()]
        if not there:
            sends, receives = receives, sends
            shapes = [_shape(matrices[place].boxes[self._me]) for place in self._outgoing()]
        packed = torch.cat([shard.reshape(-1) for shard in shards]) if shards else like.new_empty(0)
        arrived = like.new_empty(sum(receives))
        all_to_all(arrived, packed, receives, sends, group_of(sharing.ranks, sharing.axes, sharing.mesh)).wait()
        parts = arrived.split([rows * columns for rows, columns in shapes]) if shapes else ()
        return itertools.chain(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[box]


def _shape(box: Box) -> tuple[int, int]:
    rows, columns = box
    return rows.stop - rows.start, columns.stop - columns.start
