"""Token counts per expert where no value gives them: an input of an estimate, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.expert_parallel.experts import GroupedExperts, Loads

__all__ = ["Routing"]

_ASKED = "cannot route tokens to experts"


@dataclass(frozen=True)
class Routing:
    """What part of the tokens each expert gets.

    >>> Routing().counts(tokens=6, experts=4, per_token=2, ranks=2).tolist()
    [[3, 3, 3, 3], [3, 3, 3, 3]]
    >>> Routing(shares=[3, 1, 1, 1]).counts(tokens=6, experts=4, per_token=2, ranks=1).tolist()
    [[6, 2, 2, 2]]
    >>> round(Routing.zipf(1.0).imbalance(tokens=4096, experts=8, per_token=2, ranks=4), 2)
    2.21

    A token goes to an expert once, so none gets more than all tokens: what an expert's share has above that goes to the
    others. All ranks are taken to have equally many tokens, and every layer the same routing.

    Args:
        shares: of each expert, any positive numbers and zeros; they are divided by their sum. None: see `exponent`.
        exponent: without shares: expert i (from 1) has a share of 1 / i ** exponent; 0: all have the same.
        seed: counts are drawn, for each rank anew; None: they are the shares, rounded.

    Raises:
        TypeError: values of another type.
        ValueError: negative shares, or none above zero.
    """

    shares: Sequence[float] | None = None
    exponent: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.shares is not None:
            given = tuple(float(share) for share in self.shares)
            object.__setattr__(self, "shares", given)
            if not all(np.isfinite(given)) or min(given, default=-1.0) < 0 or sum(given) <= 0:
                blame = "shares are numbers of at least 0, some of them above"
                raise ValueError(
                    explain(_ASKED, blame, f"shares: {given}", "shares=[2, 1, 1], or Routing() for even ones")
                )
            if self.exponent:
                seen = f"shares: {len(given)} numbers   exponent: {self.exponent}"
                raise ValueError(explain(_ASKED, "there are both shares and an exponent", seen, "one of them"))
        if isinstance(self.exponent, bool) or not isinstance(self.exponent, int | float) or not 0 <= self.exponent < 64:
            blame = "exponent is not a number from 0 to 64"
            raise ValueError(explain(_ASKED, blame, f"exponent: {self.exponent!r}", "Routing.zipf(1.0)"))
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(explain(_ASKED, "seed is not an int of at least 0", f"seed: {self.seed!r}", "seed=0"))

    @classmethod
    def zipf(cls, exponent: float) -> Routing:
        """Return a routing in which expert i (from 1) has a share of 1 / i ** exponent."""
        return cls(exponent=exponent)

    def drawn(self, seed: int = 0) -> Routing:
        """Return one whose counts are drawn: what a router without bias does to alike experts, and more.

        >>> Routing().drawn(seed=1).counts(tokens=8, experts=4, per_token=1, ranks=2).sum(1).tolist()
        [8, 8]
        """
        return replace(self, seed=seed)

    @property
    def is_balanced(self) -> bool:
        """Whether all experts get the same, but for what does not divide."""
        return self.seed is None and not self.exponent and (self.shares is None or len(set(self.shares)) == 1)

    def describe(self) -> str:
        """Say in a few words what it is."""
        if self.shares is not None:
            words = f"by {len(self.shares)} shares"
        else:
            words = f"zipf({self.exponent:g})" if self.exponent else "balanced"
        return words if self.seed is None else f"{words}, drawn from seed {self.seed}"

    # Counts

    def counts(self, *, tokens: int, experts: int, per_token: int, ranks: int = 1) -> NDArray[np.int64]:
        """Return how many rows each rank has for each expert, (ranks, experts).

        Args:
            tokens: of each rank.
            experts: of a layer.
            per_token: how many different ones a token goes to.
            ranks: that have tokens of their own: those that share the experts.

        Raises:
            ValueError: shares for another number of experts, or more experts per token than have a share.
        """
        shares = self._shares(experts, per_token)
        rows, most = tokens * per_token, tokens
        if self.seed is None:
            exact = _capped(shares * rows, most)
            return np.stack([_rounded(exact, rows, most, rank) for rank in range(ranks)])
        drawn = []
        for rank in range(ranks):
            counts = np.random.default_rng((self.seed, rank)).multinomial(rows, shares)
            drawn.append(_rounded(_capped(counts.astype(np.float64), most), rows, most, rank))
        return np.stack(drawn)

    def received(self, *, tokens: int, experts: int, per_token: int, ranks: int) -> NDArray[np.int64]:
        """Return how many rows each rank computes, (ranks): for the experts it has, from all."""
        counts = self.counts(tokens=tokens, experts=experts, per_token=per_token, ranks=ranks)
        return counts.sum(0).reshape(ranks, -1).sum(1)

    def heaviest(self, *, tokens: int, experts: int, per_token: int, ranks: int) -> int:
        """Return the rank that computes most rows; all wait for it."""
        return int(self.received(tokens=tokens, experts=experts, per_token=per_token, ranks=ranks).argmax())

    def imbalance(self, *, tokens: int, experts: int, per_token: int, ranks: int) -> float:
        """Return the rows of the rank with most, by the mean of all ranks."""
        received = self.received(tokens=tokens, experts=experts, per_token=per_token, ranks=ranks)
        return float(received.max() / received.mean()) if received.any() else 1.0

    def choose(self, *, tokens: int, experts: int, per_token: int, ranks: int = 1, rank: int = 0) -> Tensor:
        """Return experts for each token of a rank that come to these counts, int64 (tokens, experts per token).

        >>> Routing(shares=[3, 1, 1, 1]).choose(tokens=3, experts=4, per_token=2).tolist()
        [[0, 1], [0, 2], [0, 3]]
        """
        counts = self.counts(tokens=tokens, experts=experts, per_token=per_token, ranks=ranks)[rank]
        # Nobody has more rows than there are tokens, so the rows of an expert never meet in one token.
        chosen = np.repeat(np.arange(experts), counts).reshape(per_token, tokens)
        return torch.from_numpy(np.ascontiguousarray(chosen.T))

    # In a model

    def give_to(self, model: nn.Module, waits: Callable[[], object] | None = None) -> None:
        """Let the experts of a model take their counts from here, as they cannot from tensors without values.

        Args:
            model: with `GroupedExperts`; whether they are split over ranks already makes no difference.
            waits: called where the host would wait for the device, to read counts.
        """

        def count(experts: GroupedExperts, chosen: Tensor, to: Tensor, come: Tensor | None) -> Loads:
            if waits is not None:
                waits()
            return self.loads(experts, chosen, to, come)

        for module in model.modules():
            if isinstance(module, GroupedExperts):
                module.count_rows = count

    def loads(self, experts: GroupedExperts, chosen: Tensor, to: Tensor, come: Tensor | None) -> Loads:
        """Count rows for `GroupedExperts`, as its `count_rows`."""
        per_token = chosen.shape[-1]
        sizes: dict[str, Any] = {
            "tokens": chosen.numel() // per_token,
            "experts": experts.num_experts,
            "per_token": per_token,
        }
        if experts.exchange is None or come is None:
            return Loads([], [], self.counts(**sizes)[0].tolist())
        group = experts.exchange.group
        ranks, here = group.size(), group.rank()
        counts = self.counts(**sizes, ranks=ranks).reshape(ranks, ranks, -1)  # from, to, expert
        return Loads(counts[here].sum(1).tolist(), counts[:, here].sum(1).tolist(), counts[:, here].sum(0).tolist())

    def _shares(self, experts: int, per_token: int) -> NDArray[np.float64]:
        if self.shares is None:
            shares = np.arange(1, experts + 1, dtype=np.float64) ** -self.exponent
        else:
            shares = np.array(self.shares, dtype=np.float64)
        if len(shares) != experts:
            seen = f"shares: {len(shares)} numbers   experts: {experts}"
            raise ValueError(explain(_ASKED, "there must be one share for each expert", seen, f"{experts} shares"))
        if (shares > 0).sum() < per_token:
            seen = f"shares: {self.shares}   experts per token: {per_token}"
            blame = f"a token goes to {per_token} different experts, and only {(shares > 0).sum()} have a share"
            raise ValueError(explain(_ASKED, blame, seen, f"{per_token} shares above 0"))
        return shares / shares.sum()


def _capped(exact: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Give what is above the most to those below it, by what they have."""
    exact, total = exact.copy(), exact.sum()
    full = np.zeros(len(exact), dtype=bool)
    while (over := (exact > most) & ~full).any():
        full |= over
        exact[full] = most
        free = exact[~full].sum()
        if free > 0:
            exact[~full] *= (total - most * full.sum()) / free
    return exact


def _rounded(exact: NDArray[np.float64], rows: int, most: int, rank: int) -> NDArray[np.int64]:
    """Round so that the sum is `rows`: the largest remainders go up, and of equal ones others on each rank."""
    counts = np.minimum(np.floor(exact + 1e-9).astype(np.int64), most)
    left = int(rows - counts.sum())
    if left:
        place = (np.arange(len(exact)) - rank * left) % len(exact)
        remainder = np.round(exact - counts, 6)
        order = np.lexsort((place, -remainder))
        while left > 0:
            room = [expert for expert in order if counts[expert] < most][:left]
            counts[room] += 1
            left -= len(room)
    return counts
