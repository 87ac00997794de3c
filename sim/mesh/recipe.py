"""Recipe of a run whose step is estimated, and the routing of tokens to experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import Self

from hyper_parallel.core.activations import ActivationPolicy
from hyper_parallel.core.common.checks import check_choice
from hyper_parallel.core.common.errors import InvalidType, InvalidValue, nearest
from hyper_parallel.core.expert_parallel.experts import GroupedExperts, Loads
from hyper_parallel.trainer.config import DTYPES, Config, OptimizerConfig, ParallelConfig, PrecisionConfig

# Token counts per expert, an input of the estimate because fake tensors have no values; equal on every machine --------

_ROUTING = "cannot route tokens to experts"


@dataclass(frozen=True)
class Routing:
    """Distribution of tokens over experts.

    >>> Routing().counts(tokens=6, experts=4, per_token=2, ranks=2).tolist()
    [[3, 3, 3, 3], [3, 3, 3, 3]]
    >>> Routing(shares=[3, 1, 1, 1]).counts(tokens=6, experts=4, per_token=2, ranks=1).tolist()
    [[6, 2, 2, 2]]
    >>> Routing.zipf(1.0).heaviest(tokens=4096, experts=8, per_token=2, ranks=4)
    0

    A token visits an expert at most once, so no expert gets more than all tokens. The excess of an expert's share is
    spread over the others. All ranks are assumed to have equally many tokens, and all layers the same routing.

    Args:
        shares: one number of at least 0 per expert; they are divided by their sum. None: use `exponent`.
        exponent: without shares: expert i (from 1) has a share of 1 / i ** exponent; 0: equal shares.
        seed: draw counts at random, anew for each rank; None: the rounded shares.

    Raises:
        TypeError: a value of another type.
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
                raise InvalidValue(_ROUTING, blame, f"shares: {given}", "shares=[2, 1, 1], or Routing() for even ones")
            if self.exponent:
                seen = f"shares: {len(given)} numbers   exponent: {self.exponent}"
                raise InvalidValue(_ROUTING, "there are both shares and an exponent", seen, "one of them")
        if isinstance(self.exponent, bool) or not isinstance(self.exponent, int | float) or not 0 <= self.exponent < 64:
            blame = "exponent is not a number from 0 to 64"
            raise InvalidValue(_ROUTING, blame, f"exponent: {self.exponent!r}", "Routing.zipf(1.0)")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise InvalidValue(_ROUTING, "seed is not an int of at least 0", f"seed: {self.seed!r}", "seed=0")

    @classmethod
    def zipf(cls, exponent: float) -> Routing:
        """Return a routing in which expert i (from 1) has a share of 1 / i ** exponent."""
        return cls(exponent=exponent)

    def drawn(self, seed: int = 0) -> Routing:
        """Return a copy with random counts, e.g. as a router without bias treats experts of equal weights.

        >>> Routing().drawn(seed=1).counts(tokens=8, experts=4, per_token=1, ranks=2).sum(1).tolist()
        [8, 8]
        """
        return replace(self, seed=seed)

    def describe(self) -> str:
        """Return a short description, e.g. `zipf(1), drawn from seed 0`."""
        if self.shares is not None:
            words = f"by {len(self.shares)} shares"
        else:
            words = f"zipf({self.exponent:g})" if self.exponent else "balanced"
        return words if self.seed is None else f"{words}, drawn from seed {self.seed}"

    # Counts

    def counts(self, *, tokens: int, experts: int, per_token: int, ranks: int = 1) -> NDArray[np.int64]:
        """Return the number of rows from each rank to each expert, int64 (ranks, experts).

        Args:
            tokens: tokens per rank.
            experts: experts of a layer.
            per_token: number of different experts per token.
            ranks: number of ranks that share the experts, each with different tokens.

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
        """Return the number of rows that each rank computes for its experts, from all ranks, int64 (ranks,)."""
        counts = self.counts(tokens=tokens, experts=experts, per_token=per_token, ranks=ranks)
        return counts.sum(0).reshape(ranks, -1).sum(1)

    def visits(self, *, tokens: int, experts: int, per_token: int, ranks: int, nodes: int) -> NDArray[np.int64]:
        """Return the number of tokens of each rank that have experts on each node, int64 (ranks, nodes).

        >>> Routing().visits(tokens=1000, experts=4, per_token=2, ranks=1, nodes=2).tolist()
        [[833, 833]]

        Counts do not determine which experts are chosen together. Each is assumed to be chosen independently at its
        rate, given `per_token` choices in all (conditional Bernoulli sampling; Chen, Dempster and Liu 1994). With equal
        shares, all sets of `per_token` experts are equally likely.

        Args:
            tokens: tokens per rank.
            experts: experts of a layer, in order, equally many on each node.
            per_token: number of different experts per token.
            ranks: number of ranks that share the experts.
            nodes: number of nodes.
        """
        counts = self.counts(tokens=tokens, experts=experts, per_token=per_token, ranks=ranks)
        if not tokens:
            return np.zeros((ranks, nodes), dtype=np.int64)
        chance = (counts / tokens).reshape(ranks, nodes, -1)
        chosen = np.zeros((ranks, nodes, per_token + 1))  # distribution of the number of chosen experts on a node
        chosen[..., 0] = 1
        for one in np.moveaxis(chance, -1, 0)[..., None]:
            more = chosen[..., :-1] * one
            chosen *= 1 - one
            chosen[..., 1:] += more
        none = np.zeros((ranks, 1, per_token + 1))
        none[..., 0] = 1
        before, behind = [none[:, 0]], [none[:, 0]]
        for node in range(nodes):
            before.append(_either(before[-1], chosen[:, node]))
            behind.append(_either(behind[-1], chosen[:, -1 - node]))
        others = np.stack([_either(before[node], behind[-2 - node])[:, -1] for node in range(nodes)], axis=1)
        missed = chosen[..., 0] * others / before[-1][:, -1:]
        return np.rint(tokens * (1 - missed)).astype(np.int64)

    def heaviest(self, *, tokens: int, experts: int, per_token: int, ranks: int) -> int:
        """Return the rank that computes the most rows; all others wait for it."""
        return int(self.received(tokens=tokens, experts=experts, per_token=per_token, ranks=ranks).argmax())

    def choose(self, *, tokens: int, experts: int, per_token: int, ranks: int = 1, rank: int = 0) -> Tensor:
        """Return experts for each token of a rank that match its counts, int64 (tokens, experts per token).

        >>> Routing(shares=[3, 1, 1, 1]).choose(tokens=3, experts=4, per_token=2).tolist()
        [[0, 1], [0, 2], [0, 3]]
        """
        counts = self.counts(tokens=tokens, experts=experts, per_token=per_token, ranks=ranks)[rank]
        # No expert has more rows than there are tokens, so a token never gets the same expert twice.
        chosen = np.repeat(np.arange(experts), counts).reshape(per_token, tokens)
        return torch.from_numpy(np.ascontiguousarray(chosen.T))

    # In a model

    def give_to(self, model: nn.Module, waits: Callable[[], object] | None = None) -> None:
        """Make the experts of a model take their counts from this routing, because fake tensors have none to count.

        Args:
            model: contains `GroupedExperts`, split over ranks or not.
            waits: called where the host would wait for the device to read counts; None: no call.
        """

        def count(experts: GroupedExperts, chosen: Tensor, to: Tensor, come: Tensor | None) -> Loads:
            if waits is not None:
                waits()
            return self.loads(experts, chosen, to, come)

        for module in model.modules():
            if isinstance(module, GroupedExperts):
                module.count_rows = count

    def loads(self, experts: GroupedExperts, chosen: Tensor, to: Tensor, come: Tensor | None) -> Loads:
        """Return the row counts of `GroupedExperts`; this is a value for its attribute `count_rows`."""
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
        if experts.nodes is not None:
            nodes = experts.nodes.between.group.size()
            visits = self.visits(**sizes, ranks=ranks, nodes=nodes)
            near = counts.reshape(nodes, ranks // nodes, nodes, ranks // nodes, -1)
            node, place = divmod(here, ranks // nodes)
            return Loads(
                visits[here].tolist(),
                visits[place :: ranks // nodes, node].tolist(),
                counts[:, here].sum(0).tolist(),
                near[:, place, node].sum((0, 2)).tolist(),
                near[:, :, node, place].sum((0, 2)).tolist(),
            )
        return Loads(counts[here].sum(1).tolist(), counts[:, here].sum(1).tolist(), counts[:, here].sum(0).tolist())

    def _shares(self, experts: int, per_token: int) -> NDArray[np.float64]:
        if self.shares is None:
            shares = np.arange(1, experts + 1, dtype=np.float64) ** -self.exponent
        else:
            shares = np.array(self.shares, dtype=np.float64)
        if len(shares) != experts:
            seen = f"shares: {len(shares)} numbers   experts: {experts}"
            raise InvalidValue(_ROUTING, "there must be one share for each expert", seen, f"{experts} shares")
        if (shares > 0).sum() < per_token:
            seen = f"shares: {self.shares}   experts per token: {per_token}"
            blame = f"a token goes to {per_token} different experts, and only {(shares > 0).sum()} have a share"
            raise InvalidValue(_ROUTING, blame, seen, f"{per_token} shares above 0")
        return shares / shares.sum()


def _either(some: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convolve two count distributions, (ranks, most + 1) each."""
    most = some.shape[1]
    return np.stack([(some[:, : n + 1] * others[:, n::-1]).sum(1) for n in range(most)], axis=1)


def _capped(exact: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Cap each entry at `most`, and spread the excess over the others in proportion."""
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
    """Round so that the sum is `rows`: largest remainders first, with ties broken differently on each rank."""
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


# A run as the simulator takes it -------------------------------------------------------------------------------------

_ASKED = "cannot use this recipe"
_SECTIONS = ("parallel", "precision", "optimizer", "lora", "train")


@dataclass(frozen=True)
class Recipe(Config):
    """A run, with the additional inputs of an estimate of its step.

    >>> recipe = Recipe().having(checkpointing="selective", reduce_each=True)
    >>> recipe.parallel.checkpointing, recipe.precision.param_dtype
    ('selective', 'bf16')
    >>> print(recipe.describe())
    bf16 over fp32 weights, gradients reduced in fp32; ZeRO-3; selective checkpointing; adamw; reduce each

    Model, degrees and batch may be left out, because a `Job` fills them in.

    Args:
        precision: as in a run, with "bf16" as the default.
        routing: distribution of tokens over experts; None: even.
        norm: "fused": one kernel; "eager": one kernel per operation, with float32 copies, as on CPUs.

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown value.
    """

    precision: PrecisionConfig = field(default_factory=functools.partial(PrecisionConfig, "bf16"))
    routing: Routing | None = None
    norm: str = "fused"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(_ASKED, "norm", self.norm, ("fused", "eager"))
        routing: object = self.routing
        if routing is not None and not isinstance(routing, Routing):
            blame, hint = f"routing is a {type(routing).__name__}", "Routing.zipf(1.0), or None for even loads"
            raise InvalidType(_ASKED, blame, f"routing: {routing!r}", hint)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # cached: it covers 80 keys, and a search needs it once per candidate
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the hash, because hashes of strings differ between processes."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @classmethod
    def of(cls, run: Config, routing: Routing | None = None) -> Self:
        """Return the recipe of a run.

        Args:
            run: any run.
            routing: distribution of tokens over experts; None: even.
        """
        return cls(**{each.name: getattr(run, each.name) for each in fields(Config)}, routing=routing)

    def having(self, **keys: Any) -> Self:
        """Return a copy with changed keys.

        >>> Recipe().having(param_dtype="fp32", accumulate=4).train.accumulate
        4

        Args:
            keys: keys of [parallel], [precision], [optimizer], [lora] or [train], the first section with the key; or
                `routing`, `norm`.

        Raises:
            TypeError: a value of another type.
            ValueError: an unknown key, or a value that the section refuses.
        """
        changes: dict[str, dict[str, Any]] = {}
        homes = {each.name: name for name in reversed(_SECTIONS) for each in fields(getattr(self, name))}
        homes |= dict.fromkeys(self._own(), "")
        for key, value in keys.items():
            if key not in homes:
                blame, hint = f"there is no key {key!r}", nearest(key, homes)
                raise InvalidValue(_ASKED, blame, f"{key}: {value!r}", hint)
            changes.setdefault(homes[key], {})[key] = value
        made = {home: replace(getattr(self, home), **given) for home, given in changes.items() if home}
        return replace(self, **made, **changes.get("", {}))

    def _own(self) -> list[str]:
        """Return the names of the fields that `Config` lacks."""
        return [each.name for each in fields(self) if each.name not in Config.__dataclass_fields__]

    def bare(self, *, scheduled: bool = True, **keys: Any) -> Self:
        """Return a copy without model, data, degrees and batch, with changed keys: the part that recordings share.

        Args:
            scheduled: keep the pipeline's schedule; False: use the default schedule.
            keys: as for `having`.
        """
        optimizer = OptimizerConfig(muon=self.optimizer.muon, max_grad_norm=float(self.optimizer.max_grad_norm > 0))
        empty = Config()
        others = {name: getattr(empty, name) for name in ("model", "experts", "data", "train", "checkpoint")}
        return replace(
            self, parallel=self.parallel.unplaced(scheduled=scheduled), optimizer=optimizer, **others
        ).having(**keys)

    def with_savings(
        self, checkpointing: str | None, stage: int | None = None, reduce_each: bool | None = None
    ) -> Self:
        """Return a copy with other memory savings; None leaves a key unchanged.

        >>> Recipe().with_savings("full", 2).zero
        2

        Args:
            checkpointing: as in [parallel].
            stage: ZeRO stage, see `zero`.
            reduce_each: reduce gradients after each micro-batch.
        """
        said = {"checkpointing": checkpointing, "reduce_each": reduce_each}
        changed = self.having(**{key: value for key, value in said.items() if value is not None})
        return changed if stage is None else changed.with_zero(stage)

    def keeping(self, checkpointing: str, *, scheduled: bool = True) -> Self:
        """Return a bare ZeRO-3 copy that keeps gathered inputs and unsharded gradients, with a checkpointing policy."""
        keys = {"checkpointing": checkpointing, "reduce_each": False, "reshard_inputs": False}
        return self.bare(scheduled=scheduled, **keys).with_zero(3)

    def with_zero(self, stage: int) -> Self:
        """Return a copy with another ZeRO stage, see `zero`."""
        return self.having(reshard_after_forward=stage == 3)

    @property
    def reductions(self) -> int:
        """Number of gradient reductions per step: one, or one per micro-batch."""
        return self.micro_batches if self.parallel.reduce_each else 1

    @property
    def input_gathers(self) -> int:
        """Number of gathers of a tp-split module's inputs per step: 1, or 2 if backward gathers again."""
        return 2 if self.parallel.reshard_inputs else 1

    # Overridden by the recipes of other trainers (benchmarks/published)

    @property
    def zero(self) -> int:
        """ZeRO stage: 3 frees gathered weights after forward; 2 keeps them until backward."""
        return 3 if self.parallel.reshard_after_forward else 2

    @property
    def sequence_parallel(self) -> bool:
        """Return True if tensor parallelism splits activations between its modules over the sequence."""
        return True

    @property
    def steps(self) -> Any:
        """The class that runs the step, a `sim.mesh.tracing.trace.StageRun`; None: the one of our trainer."""
        return None

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the step's special kernels, e.g. for `estimate.kernels_of`."""
        return ()

    @property
    def pricing(self) -> dict[str, Any]:
        """Keyword arguments of `sim.mesh.cost.Pricing`.

        Torch runs schedules with several stages per rank from lists of actions, in which a receive stands at its
        sender's progress. In schedules with one stage per rank, a receive follows the rank's earlier computation.
        """
        return {"posts_early": self.parallel.pipeline.name not in ("gpipe", "1f1b")}

    @property
    def activations(self) -> ActivationPolicy:
        """The policy for blocks, for a stage whose layers are numbered from 0."""
        return _policy(self.parallel.checkpointing)

    @property
    def checkpointing(self) -> str:
        """Recomputation and offload of a checkpointed block, without the choice of blocks, e.g. `selective`."""
        return _level(self.parallel.checkpointing)

    def describe(self) -> str:
        """Return one line on how a step is trained, e.g. `...; ZeRO-3; selective checkpointing; adamw`."""
        name_of = {dtype: name for name, dtype in DTYPES.items()}
        of = ("param", "master", "moments", "reduce")
        param, master, moments, reduced = (name_of[self.precision.dtype(each)] for each in of)
        behind = "" if param == master else f" over {master} weights"
        if param == master == "bf16":
            behind = " weights, no others behind them"
        level = f"ZeRO-{self.zero}" if self.zero else "replicated weights"
        words = [f"{param}{behind}, gradients reduced in {reduced}", level]
        if not (policy := self.activations).is_none:
            some = "" if policy.first is None else f" of {policy.first} layers"
            some += "" if policy.every == 1 else f", one of every {policy.every}"
            words.append(f"{self.checkpointing} checkpointing{some}")
        words.append(self.optimizer_name)
        words += [] if moments == master else [f"moments {moments}"]
        words += [] if self.optimizer.max_grad_norm > 0 else ["no clipping"]
        words += [f"lora rank {self.lora.rank}"] if self.lora.is_on else []
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        plain, said = type(self)(), {"reshard_after_forward", "checkpointing"}
        of_parallel = [each.name for each in fields(ParallelConfig) if each.name not in said]
        holders = (self.parallel.unplaced(), plain.parallel, of_parallel), (self, plain, self._own())
        for holder, usual, names in holders:
            for name in names:
                if (value := getattr(holder, name)) != getattr(usual, name):
                    words.append(_said(name.replace("_", " "), value))
        return "; ".join(words)

    @property
    def optimizer_name(self) -> str:
        """Short name of the optimizer."""
        return "muon" if self.optimizer.muon else "adamw"


def _said(word: str, value: Any) -> str:
    if isinstance(value, bool):
        return word if value else f"no {word}"
    return f"{word} {value.describe() if isinstance(value, Routing) else value}"


@functools.lru_cache(maxsize=256)  # a search reads it several times per candidate
def _policy(checkpointing: str) -> ActivationPolicy:
    return ActivationPolicy.of(checkpointing)


@functools.lru_cache(maxsize=256)
def _level(checkpointing: str) -> str:
    return str(replace(_policy(checkpointing), every=1, first=None))
