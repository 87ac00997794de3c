"""Training recipe: precision, activation checkpointing, sharding, the kernels used, and how tokens go to experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyper_parallel.core.activations import ActivationPolicy
from hyper_parallel.core.common.errors import InvalidType, InvalidValue, nearest
from hyper_parallel.core.expert_parallel.experts import GroupedExperts, Loads
from hyper_parallel.core.pipeline.schedules import find_schedule

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.parallel_dims import ParallelDims


# Token counts per expert where no value gives them: an input of an estimate, the same on every machine ----------------

_ROUTING = "cannot route tokens to experts"


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


# The training recipe: precision, activation checkpointing, sharding, and the kernels used -----------------------------

_ASKED = "cannot use this recipe"

_DTYPES = MappingProxyType(
    {
        **dict.fromkeys(("bf16", "bfloat16", torch.bfloat16), "bf16"),
        **dict.fromkeys(("fp16", "float16", "half", torch.float16), "fp16"),
        **dict.fromkeys(("fp32", "float32", "float", torch.float32), "fp32"),
        **dict.fromkeys(("fp64", "float64", "double", torch.float64), "fp64"),
    }
)
_TORCH = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64})

_COUNTS = ("checkpoint_layers", "checkpoint_every", "microbatches", "stages_per_rank", "tp_chunks", "ranks_per_node")


@dataclass(frozen=True)
class Recipe:
    """How a step is trained.

    >>> recipe = Recipe(param_dtype=torch.bfloat16, checkpointing="selective")
    >>> recipe.param_dtype, recipe.reduce_dtype, recipe.zero
    ('bf16', 'fp32', 3)
    >>> print(recipe.describe())
    bf16 over fp32 weights, gradients reduced in fp32; ZeRO-3; selective checkpointing; adamw

    Args:
        param_dtype: what weights are gathered and computed in: "bf16", "fp16", "fp32" or "fp64". Torch's own names
            work, too.
        reduce_dtype: what gradients are reduced in; those of weights in fp32 or fp64 are reduced as they are.
        master: "fp32": weights are kept in float32, beside those that are computed in. "none": there are only those.
        moments: what AdamW's moments are kept in, "fp32" or "bf16" (precision-aware optimizers); beside weights in
            fp64, fp64.
        checkpointing: what backward computes again: "none", "selective", "alternate" or "full". "full" blocks;
            "selective": all but matrix products and attention; "alternate": every other matrix product as well.
        checkpoint_layers: how many layers are checkpointed, the first ones of each stage; None: all.
        checkpoint_every: of every so many of these the first one is.
        compile: one kernel, by torch.compile, for what lies between matrix products.
        optimizer: "adamw" (fused); "muon" for matrices within the blocks, and AdamW for the rest; for a model of your
            own "sgd", without momentum.
        schedule: of the pipeline: "gpipe", "1f1b", "interleaved", "zero-bubble" ... See
            `hyper_parallel.core.pipeline.SCHEDULES`.
        microbatches: parts that a step's batch is cut into; None: one, or with a pipeline one for each sequence.
        stages_per_rank: stages on each rank of the pipeline; None: as the schedule has it.
        zero: 3: parameters, gradients and optimizer state are sharded, parameters freed after forward; 2: they are kept
            gathered until backward (`reshard_after_forward=False`).
        reshard_inputs: what split modules gather over the sequence is gathered again in backward, not kept.
        tp_chunks: with tensor parallelism, chunks in which attention (of sequences) and feed-forwards are
            computed, one gathered or reduced while another is computed.
        norm: "fused": one kernel; "eager": one for each operation, with float32 copies.
        reduce_each: without a pipeline: gradients are reduced after every micro-batch, so that they need no
            more memory than their shards; else they add up whole on every rank and are reduced once.
        whole_parameters: with Muon: each parameter of the blocks but experts is whole on one rank, so
            that Muon moves nothing.
        engine: what splits weights: "fully_shard", or "hsdp" where only data and context are parallel.
        clipping: gradients are scaled down to a norm; without, the norm is computed all the same, as the trainer does.
        routing: how tokens go to experts; None: evenly.
        ranks_per_node: where experts are split over several nodes of so many ranks: tokens go to each node once; None:
            to each expert.

    Raises:
        TypeError: a value of another type.
        ValueError: a value that does not exist, or some that contradict each other.
    """

    param_dtype: Any = "bf16"
    reduce_dtype: Any = "fp32"
    master: str = "fp32"
    moments: str = "fp32"
    checkpointing: str = "none"
    checkpoint_layers: int | None = None
    checkpoint_every: int = 1
    compile: bool = False
    optimizer: str = "adamw"
    schedule: str = "1f1b"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    zero: int = 3
    engine: str = "fully_shard"
    clipping: bool = True
    reshard_inputs: bool = False
    tp_chunks: int = 1
    whole_parameters: bool = False
    norm: str = "fused"
    reduce_each: bool = False
    routing: Routing | None = None
    ranks_per_node: int | None = None

    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            "master": ("fp32", "none"),
            "moments": ("fp32", "bf16"),
            "engine": ("fully_shard", "hsdp"),
            "checkpointing": ("none", "selective", "alternate", "full", "offload", "full offload"),
            "optimizer": ("adamw", "muon", "sgd"),
            "norm": ("fused", "eager"),
            "zero": (3, 2),
        }
    )

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            object.__setattr__(self, name, _dtype(name, getattr(self, name)))
        for name, choices in self.choices.items():
            given: object = getattr(self, name)
            if isinstance(given, bool) or given not in choices:
                hint = nearest(given, choices) if isinstance(given, str) else " or ".join(map(str, choices))
                raise InvalidValue(*_wrong(name, given, "does not exist", f"{name}={hint}"))
        for name in [field.name for field in dataclasses.fields(self) if isinstance(field.default, bool)]:
            if not isinstance(getattr(self, name), bool):
                raise InvalidType(*_wrong(name, getattr(self, name), "is not True or False", f"{name}=True"))
        for name in _COUNTS:
            _count(name, getattr(self, name), 0 if name == "checkpoint_layers" else 1)
        routing: object = self.routing
        find_schedule(self.schedule)
        if routing is not None and not isinstance(routing, Routing):
            hint = "Routing.zipf(1.0), or None for even loads"
            raise InvalidType(*_wrong("routing", routing, f"is a {type(routing).__name__}, not a Routing", hint))
        self._check_together()

    def _check_together(self) -> None:
        some = {"checkpoint_layers": self.checkpoint_layers} if self.checkpoint_layers is not None else {}
        some |= {"checkpoint_every": self.checkpoint_every} if self.checkpoint_every != 1 else {}
        if some and self.checkpointing == "none":
            seen = ", ".join(f"{name}={value}" for name, value in some.items()) + ", checkpointing='none'"
            blame = f"{next(iter(some))} says how many layers are checkpointed, and none is"
            raise InvalidValue(_ASKED, blame, seen, 'checkpointing="full"')
        if self.whole_parameters and (self.optimizer != "muon" or self.zero < 2 or self.engine != "fully_shard"):
            seen = f"whole_parameters=True, optimizer={self.optimizer!r}, zero={self.zero}, engine={self.engine!r}"
            blame = "parameters are left whole with one rank by fully_shard, for Muon"
            hint = 'optimizer="muon", zero=3, engine="fully_shard"'
            raise InvalidValue(_ASKED, blame, seen, hint)
        keeps_them = self.optimizer == "adamw" or (self.optimizer == "adamw-foreach" and self.zero <= 1)
        as_weights = self.optimizer != "sgd" and self.zero >= 2 and self.moment_dtype == self.weight_dtype
        if self.moments != "fp32" and not (keeps_them or as_weights):
            seen = f"moments={self.moments!r}, zero={self.zero}, optimizer={self.optimizer!r}"
            blame = "this optimizer keeps moments in the dtype of the weights that it updates"
            raise InvalidValue(_ASKED, blame, seen, 'moments="fp32", or optimizer="adamw"')
        kind = find_schedule(self.schedule)
        if self.stages_per_rank is not None and not kind.is_multi and self.stages_per_rank != kind.stages_per_rank:
            seen = f"stages_per_rank={self.stages_per_rank}, schedule={self.schedule!r}"
            blame = f"schedule {self.schedule!r} has {kind.stages_per_rank} stage(s) on each rank"
            raise InvalidValue(_ASKED, blame, seen, 'schedule="interleaved", or stages_per_rank=None')

    # These differ in recipes of other trainers (benchmarks/published)

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
        return {"posts_early": self.schedule not in ("gpipe", "1f1b")}

    @property
    def activations(self) -> ActivationPolicy:
        """The policy of blocks, for a stage's layers numbered from 0 on; with no layer at all, "none"."""
        return _policy(self.checkpointing, self.checkpoint_every, self.checkpoint_layers)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation."""
        return _TORCH[self.param_dtype]

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return _TORCH[self.reduce_dtype]

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the optimizer's weights."""
        return self.dtype if self.master == "none" or self.dtype == torch.float64 else torch.float32

    @property
    def moment_dtype(self) -> torch.dtype:
        """The dtype of the optimizer's moments."""
        return torch.float64 if self.dtype == torch.float64 else _TORCH[self.moments]

    @property
    def reshards_after_forward(self) -> bool:
        """Whether gathered weights are freed after forward."""
        return self.zero == 3

    def parts(self, batch: int, dims: ParallelDims) -> int:
        """Return the number of micro-batches of a step.

        >>> from hyper_parallel.core.mesh.parallel_dims import ParallelDims
        >>> Recipe().parts(8, ParallelDims(pp=4, world_size=4)), Recipe().parts(8, ParallelDims())
        (8, 1)

        Args:
            batch: sequences of a step on each data-parallel rank.
            dims: the degrees.

        Raises:
            ValueError: the batch cannot be cut into so many.
        """
        parts = self.microbatches or (batch if dims.pp_enabled else 1)
        if batch % parts:
            fits = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
            seen = f"batch={batch} sequences on each data-parallel rank   microbatches={parts}"
            raise InvalidValue(
                "cannot cut the batch into micro-batches", "it does not divide", seen, f"microbatches one of {fits}"
            )
        return parts

    def describe(self) -> str:
        """Return the recipe in one line, without its usual fields."""
        is_wide = self.param_dtype in ("fp32", "fp64")
        behind = "" if is_wide else f" over {self.master} weights"
        if self.master == "none" and not is_wide:
            behind = " weights, no others behind them"
        level = f"ZeRO-{self.zero}" if self.zero else "replicated weights"
        words = [f"{self.param_dtype}{behind}, gradients reduced in {self.reduce_dtype}", level]
        if self.checkpointing != "none":
            some = "" if self.checkpoint_layers is None else f" of {self.checkpoint_layers} layers"
            some += "" if self.checkpoint_every == 1 else f", one of every {self.checkpoint_every}"
            words.append(f"{self.checkpointing} checkpointing{some}")
        words.append(self.optimizer)
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        shown = {"param_dtype", "reduce_dtype", "master", "checkpointing", "optimizer", "zero"}
        shown |= {"checkpoint_layers", "checkpoint_every"}
        for name, default in usual.items():
            value = getattr(self, name)
            if name in shown or value == default:
                continue
            word = name.replace("_", " ")
            if isinstance(value, bool):
                words.append(word if value else f"no {word}")
            elif isinstance(value, Routing):
                words.append(f"routing {value.describe()}")
            else:
                words.append(f"{word} {value}")
        return "; ".join(words)


@functools.lru_cache(maxsize=256)  # a search asks each of its candidates several times
def _policy(checkpointing: str, every: int, layers: int | None) -> ActivationPolicy:
    if layers == 0:
        return ActivationPolicy()
    return dataclasses.replace(ActivationPolicy.of(checkpointing), every=every, first=layers)


def _dtype(name: str, given: Any) -> str:
    known = _DTYPES.get(given) if isinstance(given, str | torch.dtype) else None
    if known is None:
        words = ("bf16", "fp16", "fp32", "fp64")
        raise InvalidValue(*_wrong(name, given, "is no dtype for this", f"{name}={nearest(given, words)}"))
    return known


def _count(name: str, given: object, least: int) -> None:
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int):
        raise InvalidType(*_wrong(name, given, f"is a {type(given).__name__}, not an int", f"{name}={max(least, 1)}"))
    if given < least:
        raise InvalidValue(*_wrong(name, given, f"is below {least}", f"{name}={max(least, 1)}"))


def _wrong(name: str, given: object, why: str, hint: str) -> tuple[str, str, str, str]:
    return (_ASKED, f"{name}={given!r} {why}", f"{name}: {given!r}", hint)
