"""Masks and changed scores of FlexAttention, for queries and keys of any positions of a whole sequence.

A `BlockMask` says of tiles of scores whether nothing, all, or what `mask_mod` says of them is seen. So what a rank has
to compute is cut into pieces: nothing is computed where nothing is seen, and no mask is made where all is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_NOTHING, _SOME, _ALL = 0, 1, 2
_ROWS_OF_TILES = 8  # in each interval of queries: more of them skip more, and call more kernels


class FlexPiece(NamedTuple):
    """Some queries and keys, by their positions in the whole sequence.

    Attributes:
        queries: [start, stop).
        keys: [start, stop).
        seen: whether every query sees every key; else `mask_mod` says.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    seen: bool


@dataclass(frozen=True)
class BlockStates:
    """What a `BlockMask` says of each tile.

    Attributes:
        states: (batch or 1, heads or 1, tiles of queries, tiles of keys): 0 nothing is seen, 1 some, 2 all; int8.
        on_host: the same, on the host.
        sizes: queries and keys of a tile.
    """

    states: Tensor
    on_host: Tensor
    sizes: tuple[int, int]

    @classmethod
    def of(cls, mask: Any) -> BlockStates:
        """Read a `BlockMask`; the host waits for its tensors."""
        rows, columns = mask.BLOCK_SIZE
        tiles = -(-mask.seq_lengths[1] // columns)
        states = _SOME * _dense(mask.kv_num_blocks, mask.kv_indices, tiles)
        if mask.full_kv_num_blocks is not None:
            states = states.maximum(_ALL * _dense(mask.full_kv_num_blocks, mask.full_kv_indices, tiles))
        return cls(states, states.cpu(), (rows, columns))

    def pieces(self, queries: tuple[int, int], keys: tuple[int, int]) -> Iterator[FlexPiece]:
        """Yield what is seen of two intervals: rows of tiles, and in each the runs of keys that are alike."""
        rows, columns = self.sizes
        start, stop = queries
        left = keys[0] // columns
        step = rows * max(1, -(-(stop - start) // (rows * _ROWS_OF_TILES)))
        while start < stop:
            end = min(stop, (start // step + 1) * step)
            tiles = self.on_host[:, :, start // rows : -(-end // rows), left : -(-keys[1] // columns)].flatten(0, 2)
            least, most = tiles.amin(0).tolist(), tiles.amax(0).tolist()
            kinds = [low if low == high else _SOME for low, high in zip(least, most, strict=True)]
            for kind, run in groupby(enumerate(kinds, left), key=lambda each: each[1]):
                of_run = [place for place, _ in run]
                if kind != _NOTHING:
                    ends = (max(keys[0], of_run[0] * columns), min(keys[1], (of_run[-1] + 1) * columns))
                    yield FlexPiece((start, end), ends, kind == _ALL)
            start = end

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the states of single scores: (batch or 1, heads or 1, queries, keys)."""
        rows, columns = self.sizes
        return self.states[:, :, queries // rows][..., keys // columns]

    def of_heads(self, heads: slice) -> BlockStates:
        """Return those of some heads."""
        if self.states.shape[1] == 1:
            return self
        return replace(self, states=self.states[:, heads], on_host=self.on_host[:, heads])


def _dense(counts: Tensor, indices: Tensor, tiles: int) -> Tensor:
    """Return 1 where a tile is among the first `counts` of `indices`, else 0."""
    named = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    places = torch.where(named, indices, tiles).to(torch.int64)
    dense = torch.zeros(*indices.shape[:-1], tiles + 1, dtype=torch.int8, device=indices.device)
    return dense.scatter_(-1, places, 1)[..., :tiles]


@dataclass(frozen=True)
class Flex:
    """What changes scores, for some queries and keys.

    Attributes:
        score_mod: of a score and its batch, head, query and key: the score that it becomes.
        mask_mod: of batch, head, query and key: whether it is seen. None: all is.
        blocks: of the `BlockMask` that `mask_mod` is of.
        heads: numbers of the heads among all.
        queries: positions in the whole sequence.
        keys: likewise.
    """

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    blocks: BlockStates | None
    heads: Tensor
    queries: Tensor
    keys: Tensor

    def of(self, piece: FlexPiece) -> Flex | None:
        """Return that of a piece of the whole sequence; None: nothing changes its scores."""
        if self.score_mod is None and piece.seen:
            return None
        mask_mod = None if piece.seen else self.mask_mod
        places = (torch.arange(*ends, device=self.heads.device) for ends in (piece.queries, piece.keys))
        return Flex(self.score_mod, mask_mod, self.blocks, self.heads, *places)

    def applied(self, scores: Tensor, rows: slice) -> Tensor:
        """Return scores (batch, heads, queries of `rows`, keys) as they go into the softmax; the given ones stay."""
        changed = scores.clone() if self.score_mod is None else self._changed(scores, rows)
        if self.mask_mod is None or self.blocks is None:
            return changed
        seen = _over_all(self.mask_mod)(*self._places(scores.shape[0], rows))
        states = self.blocks.seen(self.queries[rows], self.keys)
        return changed.masked_fill(((states == _SOME) & ~seen) | (states == _NOTHING), -torch.inf)

    def through(self, scores: Tensor, rows: slice, grad: Tensor) -> Tensor:
        """Return the gradient of scores, given that of what `applied` made of them, zero where nothing is seen."""
        if self.score_mod is None:
            return grad
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            changed = self._changed(leaf, rows)
            if not changed.requires_grad:
                return torch.zeros_like(grad)
        return torch.autograd.grad(changed, leaf, grad.to(changed.dtype), materialize_grads=True)[0]

    def _changed(self, scores: Tensor, rows: slice) -> Tensor:
        assert self.score_mod is not None
        changed: Tensor = _over_all(self.score_mod, scores=True)(scores, *self._places(scores.shape[0], rows))
        return changed.to(scores.dtype)

    def _places(self, batch: int, rows: slice) -> tuple[Tensor, ...]:
        return torch.arange(batch, device=self.keys.device), self.heads, self.queries[rows], self.keys


def _over_all(function: Callable[..., Tensor], *, scores: bool = False) -> Callable[..., Tensor]:
    """Let a function of single numbers take all of a batch, of heads, of queries and of keys."""
    first = (0,) if scores else ()
    for place in reversed(range(4)):
        dims = tuple(0 if other == place else None for other in range(4))
        function = torch.vmap(function, in_dims=(*first, *dims))
    return function


def example_score(score_mod: ScoreMod, device: torch.device) -> Any:
    """Return what a function makes of one score; it wants a gradient if it depends on other tensors that do."""
    with torch.enable_grad():
        number = torch.zeros((), dtype=torch.int64, device=device)
        return score_mod(torch.zeros((), device=device), number, number, number, number)
