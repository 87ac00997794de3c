"""A run as its step is estimated, and how tokens go to experts."""

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

# Token counts per expert where no value gives them: an input of an estimate, the same on every machine ----------------

_ROUTING = "cannot route tokens to experts"


@dataclass(frozen=True)
class Routing:
    """What part of the tokens each expert gets.

    >>> Routing().counts(tokens=6, experts=4, per_token=2, ranks=2).tolist()
    [[3, 3, 3, 3], [3, 3, 3, 3]]
    >>> Routing(shares=[3, 1, 1, 1]).counts(tokens=6, experts=4, per_token=2, ranks=1).tolist()
    [[6, 2, 2, 2]]
    >>> Routing.zipf(1.0).heaviest(tokens=4096, experts=8, per_token=2, ranks=4)
    0

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
        """Return one whose counts are drawn: what a router without bias does to alike experts, and more.

        >>> Routing().drawn(seed=1).counts(tokens=8, experts=4, per_token=1, ranks=2).sum(1).tolist()
        [8, 8]
        """
        return replace(self, seed=seed)

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

    def visits(self, *, tokens: int, experts: int, per_token: int, ranks: int, nodes: int) -> NDArray[np.int64]:
        """Return how many tokens of each rank have experts on each node, (ranks, nodes).

        >>> Routing().visits(tokens=1000, experts=4, per_token=2, ranks=1, nodes=2).tolist()
        [[833, 833]]

        Which experts are chosen together no counts say. Each is taken to be chosen independently of the others, as
        often as it is, with `per_token` of them in all (conditional Bernoulli sampling; Chen, Dempster and Liu 1994):
        without shares, all sets of so many experts are as likely.

        Args:
            tokens: as for `counts`, like the next three.
            experts: of which nodes have equally many, in order.
            per_token: as there.
            ranks: as there.
            nodes: how many.
        """
        counts = self.counts(tokens=tokens, experts=experts, per_token=per_token, ranks=ranks)
        if not tokens:
            return np.zeros((ranks, nodes), dtype=np.int64)
        chance = (counts / tokens).reshape(ranks, nodes, -1)
        chosen = np.zeros((ranks, nodes, per_token + 1))  # chances of so many experts of a node, chosen independently
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
        """Return the rank that computes most rows; all wait for it."""
        return int(self.received(tokens=tokens, experts=experts, per_token=per_token, ranks=ranks).argmax())

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
    """Return the chances of so many in all, (ranks, most + 1), of those of so many here and so many there."""
    most = some.shape[1]
    return np.stack([(some[:, : n + 1] * others[:, n::-1]).sum(1) for n in range(most)], axis=1)


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


# A run as the simulator takes it -------------------------------------------------------------------------------------

_ASKED = "cannot use this recipe"
_SECTIONS = ("parallel", "precision", "optimizer", "lora", "train")


@dataclass(frozen=True)
class Recipe(Config):
    """A run, and what an estimate of its step takes beside it.

    >>> recipe = Recipe().having(checkpointing="selective", reduce_each=True)
    >>> recipe.parallel.checkpointing, recipe.precision.param_dtype
    ('selective', 'bf16')
    >>> print(recipe.describe())
    bf16 over fp32 weights, gradients reduced in fp32; ZeRO-3; selective checkpointing; adamw; reduce each

    Model, degrees and batch may be left out: a `Job` fills them in.

    Args:
        precision: as in a run, with "bf16" as its default.
        routing: how tokens go to experts; None: evenly.
        norm: "fused": one kernel; "eager": one for each operation, with float32 copies, as on CPUs.

    Raises:
        TypeError: a value of another type.
        ValueError: a value that does not exist.
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
    def _hash(self) -> int:  # of 80 keys, and a search asks for it once for each candidate
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the hash: that of a text is another one in another process."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @classmethod
    def of(cls, run: Config, routing: Routing | None = None) -> Self:
        """Return the recipe of a run.

        Args:
            run: any.
            routing: how tokens go to experts; None: evenly.
        """
        return cls(**{each.name: getattr(run, each.name) for each in fields(Config)}, routing=routing)

    def having(self, **keys: Any) -> Self:
        """Return a copy with other values of keys.

        >>> Recipe().having(param_dtype="fp32", accumulate=4).train.accumulate
        4

        Args:
            keys: of [parallel], [precision], [optimizer], [lora] or [train], the first that has it; or `routing`,
                `norm`.

        Raises:
            TypeError: a value of another type.
            ValueError: no such key, or a value that the section refuses.
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
        """Return the names of fields that a run has not."""
        return [each.name for each in fields(self) if each.name not in Config.__dataclass_fields__]

    def bare(self, *, scheduled: bool = True, **keys: Any) -> Self:
        """Return a copy without model, data, degrees and batch, and with other keys: what recordings have in common.

        Args:
            scheduled: with the schedule of the pipeline; False: with the usual one.
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
        """Return a copy that saves memory otherwise; None leaves a key as it is.

        >>> Recipe().with_savings("full", 2).zero
        2

        Args:
            checkpointing: as in [parallel].
            stage: of ZeRO, see `zero`.
            reduce_each: reduce gradients after each micro-batch.
        """
        said = {"checkpointing": checkpointing, "reduce_each": reduce_each}
        changed = self.having(**{key: value for key, value in said.items() if value is not None})
        return changed if stage is None else changed.with_zero(stage)

    def keeping(self, checkpointing: str, *, scheduled: bool = True) -> Self:
        """Return a bare copy of ZeRO-3 that keeps gathered inputs, unsharded gradients, and blocks by a policy."""
        keys = {"checkpointing": checkpointing, "reduce_each": False, "reshard_inputs": False}
        return self.bare(scheduled=scheduled, **keys).with_zero(3)

    def with_zero(self, stage: int) -> Self:
        """Return a copy with another stage of ZeRO, see `zero`."""
        return self.having(reshard_after_forward=stage == 3)

    @property
    def reductions(self) -> int:
        """How often a step reduces gradients: once, or after each micro-batch."""
        return self.micro_batches if self.parallel.reduce_each else 1

    @property
    def input_gathers(self) -> int:
        """How often a step gathers the inputs of a module that is split over tp: in forward, or again in backward."""
        return 2 if self.parallel.reshard_inputs else 1

    # These differ in recipes of other trainers (benchmarks/published)

    @property
    def zero(self) -> int:
        """3: gathered weights are freed after forward; 2: they are kept until backward."""
        return 3 if self.parallel.reshard_after_forward else 2

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor parallelism splits activations between split modules over the sequence."""
        return True

    @property
    def steps(self) -> Any:
        """The `sim.mesh.tracing.trace.StageRun` that takes the step; None: that one, as our trainer does."""
        return None

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of other kernels that a step needs."""
        return ()

    @property
    def pricing(self) -> dict[str, Any]:
        """Arguments of `sim.mesh.cost.Pricing`.

        Torch runs schedules of several stages per rank by lists of actions, in which a receive stands where its sender
        has got to; in those of one stage a receive follows what the rank has computed before.
        """
        return {"posts_early": self.parallel.pipeline.name not in ("gpipe", "1f1b")}

    @property
    def activations(self) -> ActivationPolicy:
        """The policy of blocks, for a stage's layers numbered from 0 on."""
        return _policy(self.parallel.checkpointing)

    @property
    def checkpointing(self) -> str:
        """What backward computes again, and where the rest waits, whichever blocks that is for."""
        return _level(self.parallel.checkpointing)

    def describe(self) -> str:
        """Say in a line how a step is trained."""
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
        """The optimizer in a word."""
        return "muon" if self.optimizer.muon else "adamw"


def _said(word: str, value: Any) -> str:
    if isinstance(value, bool):
        return word if value else f"no {word}"
    return f"{word} {value.describe() if isinstance(value, Routing) else value}"


@functools.lru_cache(maxsize=256)  # a search asks each of its candidates several times
def _policy(checkpointing: str) -> ActivationPolicy:
    return ActivationPolicy.of(checkpointing)


@functools.lru_cache(maxsize=256)
def _level(checkpointing: str) -> str:
    return str(replace(_policy(checkpointing), every=1, first=None))
