"""The training recipe: precision, activation checkpointing, sharding, and the kernels used."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.core.common.errors import explain, nearest
from hyper_parallel.core.pipeline.schedules import find_schedule
from sim.mesh.program import Program
from sim.mesh.routing import Routing

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.parallel_dims import ParallelDims

__all__ = ["Conventions", "Recipe"]

_ASKED = "cannot use this recipe"

_DTYPES = MappingProxyType(
    {
        **dict.fromkeys(("bf16", "bfloat16", torch.bfloat16), "bf16"),
        **dict.fromkeys(("fp16", "float16", "half", torch.float16), "fp16"),
        **dict.fromkeys(("fp32", "float32", "float", torch.float32), "fp32"),
    }
)
_TORCH = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32})

_CHOICES = MappingProxyType(
    {
        "master": ("fp32", "none"),
        "checkpointing": ("none", "selective", "alternate", "full"),
        "optimizer": ("adamw", "adamw-foreach", "sgd"),
        "attention": ("flash", "math", "math-recomputed"),
        "norm": ("fused", "eager"),
        "loss": ("library", "eager", "eager-kept", "chunked", "compiled"),
        "host": ("eager",),
    }
)
_FLAGS = (
    "compile",
    "fused_loss",
    "float8",
    "sequence_parallel",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "reduce_each",
    "tp_overlap",
    "graphs",
)
_ZERO = MappingProxyType(
    {
        3: "parameters, gradients and optimizer state are sharded, parameters freed after forward",
        2: "parameters, gradients and optimizer state are sharded, parameters kept gathered until backward",
        1: "parameters are replicated, optimizer state is sharded",
        0: "all is replicated",
    }
)


class Conventions:
    """What another trainer does otherwise during a step than ours: the hook for it, which itself changes nothing.

    A subclass is a frozen dataclass, whose `str` is for `Recipe.describe`.
    """

    @property
    def posts_early(self) -> bool:
        """Whether a receive may be posted before the host has got to it, where the schedule allows it."""
        return True

    def prepare_stage(self, job: Any, stage: Any, recorder: Any) -> None:
        """Change how a stage of a pipeline sends and receives: its `group_of_parts` and `after_message`.

        Args:
            job: the `Job` that is estimated.
            stage: a `RecordedStage`, before its first micro-batch.
            recorder: the `Recorder` of what it does.
        """

    def rewrite(self, job: Any, program: Program) -> Program:
        """Return what a rank does in a step, changed; what is given stays as it is."""
        return program


@dataclass(frozen=True)
class Recipe:
    """How a step is trained.

    >>> recipe = Recipe(param_dtype=torch.bfloat16, checkpointing="selective")
    >>> recipe.param_dtype, recipe.reduce_dtype, recipe.zero
    ('bf16', 'fp32', 3)
    >>> print(recipe.describe())
    bf16 over fp32 weights, gradients reduced in fp32; ZeRO-3; selective checkpointing; adamw

    Args:
        param_dtype: what weights are gathered and computed in: "bf16", "fp16" or "fp32". Torch's own names work, too.
        reduce_dtype: what gradients are reduced in.
        master: "fp32": weights are kept in float32, beside those that are computed in. "none": there are only those.
        checkpointing: what backward computes again: "none", "selective", "alternate" or "full". "full" blocks;
            "selective": all but matrix products and attention; "alternate": every other matrix product as well.
        checkpoint_layers: how many layers are checkpointed, the first ones of each stage; None: all.
        compile: one kernel, by torch.compile, for what lies between matrix products.
        optimizer: "adamw" (fused), "adamw-foreach" or "sgd".
        fused_loss: head and loss for one chunk of the tokens at a time: all logits are never there.
        float8: matrix products of blocks in float8.
        schedule: of the pipeline: "gpipe", "1f1b", "interleaved", "zero-bubble" ... See
            `hyper_parallel.core.pipeline.SCHEDULES`.
        microbatches: parts that a step's batch is cut into; None: one, or with a pipeline one for each sequence.
        stages_per_rank: stages on each rank of the pipeline; None: as the schedule has it.
        zero: 3, 2 (gathered until backward), 1 or 0 (weights replicated). 2 is `reshard_after_forward=False`; 1 shards
            the optimizer state over data-parallel ranks (Rajbhandari et al. 2020, section 5.1); 0
            is DDP.
        sequence_parallel: with tensor parallelism, what lies between split modules is split over the sequence.
        attention: "flash", "math" or "math-recomputed". "math": scores and their softmax are made and kept; the last:
            made, and made again in backward (selective recomputation of Korthikanti et al. 2022, section 5).
        norm: "fused": one kernel; "eager": one for each operation, with float32 copies.
        loss: "library": as `hyper_parallel.vocab_parallel_cross_entropy` and the trainer compute it; "eager":
            `F.cross_entropy` of a float32 copy of the logits; "eager-kept": and the logits live through backward;
            "chunked": of one part of the logits at a time; "compiled": one kernel.
        reduce_each: with zero >= 2 and no pipeline: gradients are reduced after every micro-batch, so that they need no
            more memory than their shards; else they add up whole on every rank and are reduced once.
        overlap_grad_reduce: with zero <= 1: gradients are reduced while backward goes on.
        overlap_param_gather: with zero == 1: new weights are gathered while the next forward goes on.
        tp_overlap: communication of tensor parallelism overlaps with matrix products.
        routing: how tokens go to experts; None: evenly.
        host: "eager": the host issues each operation.
        graphs: a step is replayed as one graph: the host costs nothing.
        conventions: what another trainer does otherwise; None: the step is that of our trainer.

    Raises:
        TypeError: a value of another type.
        ValueError: a value that does not exist, or some that contradict each other.
    """

    param_dtype: Any = "bf16"
    reduce_dtype: Any = "fp32"
    master: str = "fp32"
    checkpointing: str = "none"
    checkpoint_layers: int | None = None
    compile: bool = False
    optimizer: str = "adamw"
    fused_loss: bool = False
    float8: bool = False
    schedule: str = "1f1b"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    zero: int = 3
    sequence_parallel: bool = True
    attention: str = "flash"
    norm: str = "fused"
    loss: str = "library"
    reduce_each: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    tp_overlap: bool = False
    routing: Routing | None = None
    host: str = "eager"
    graphs: bool = False
    conventions: Conventions | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            object.__setattr__(self, name, _dtype(name, getattr(self, name)))
        for name, choices in _CHOICES.items():
            _one_of(name, getattr(self, name), choices)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(_wrong(name, getattr(self, name), "is not True or False", f"{name}=True"))
        for name in ("checkpoint_layers", "microbatches", "stages_per_rank"):
            _count(name, getattr(self, name), 0 if name == "checkpoint_layers" else 1)
        routing: object = self.routing
        if isinstance(self.zero, bool) or self.zero not in _ZERO:
            hint = "; ".join(f"zero={level}: {meaning}" for level, meaning in _ZERO.items())
            raise ValueError(_wrong("zero", self.zero, "is no level of ZeRO", hint))
        find_schedule(self.schedule)
        if routing is not None and not isinstance(routing, Routing):
            hint = "Routing.zipf(1.0), or None for even loads"
            raise TypeError(_wrong("routing", routing, f"is a {type(routing).__name__}, not a Routing", hint))
        conventions: object = self.conventions
        if conventions is not None and not isinstance(conventions, Conventions):
            why, hint = f"is a {type(conventions).__name__}, not a Conventions", "conventions=None"
            raise TypeError(_wrong("conventions", conventions, why, hint))
        self._check_together()

    def _check_together(self) -> None:
        if self.checkpoint_layers is not None and self.checkpointing == "none":
            seen = f"checkpoint_layers={self.checkpoint_layers}, checkpointing='none'"
            blame = "checkpoint_layers says how many layers are checkpointed, and none is"
            raise ValueError(explain(_ASKED, blame, seen, 'checkpointing="full"'))
        if self.float8 and self.param_dtype != "bf16":
            seen = f"float8=True, param_dtype={self.param_dtype!r}"
            blame = "matrix products in float8 take and return bfloat16"
            raise ValueError(explain(_ASKED, blame, seen, 'param_dtype="bf16"'))
        kind = find_schedule(self.schedule)
        if self.stages_per_rank is not None and not kind.is_multi and self.stages_per_rank != kind.stages_per_rank:
            seen = f"stages_per_rank={self.stages_per_rank}, schedule={self.schedule!r}"
            blame = f"schedule {self.schedule!r} has {kind.stages_per_rank} stage(s) on each rank"
            raise ValueError(explain(_ASKED, blame, seen, 'schedule="interleaved", or stages_per_rank=None'))

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in, as torch's."""
        return _TORCH[self.param_dtype]

    @property
    def grad_dtype(self) -> torch.dtype:
        """What gradients are reduced in, as torch's."""
        return _TORCH[self.reduce_dtype]

    @property
    def weight_dtype(self) -> torch.dtype:
        """What the optimizer's weights are kept in, as torch's."""
        return self.dtype if self.master == "none" else torch.float32

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
            raise ValueError(
                explain(
                    "cannot cut the batch into micro-batches", "it does not divide", seen, f"microbatches one of {fits}"
                )
            )
        return parts

    def describe(self) -> str:
        """Return one line with what the recipe says, what is as usual left out."""
        behind = "" if self.param_dtype == "fp32" else f" over {self.master} weights"
        if self.master == "none" and self.param_dtype != "fp32":
            behind = " weights, no others behind them"
        level = f"ZeRO-{self.zero}" if self.zero else "replicated weights"
        words = [f"{self.param_dtype}{behind}, gradients reduced in {self.reduce_dtype}", level]
        if self.checkpointing != "none":
            some = "" if self.checkpoint_layers is None else f" of {self.checkpoint_layers} layers"
            words.append(f"{self.checkpointing} checkpointing{some}")
        words.append(self.optimizer)
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        told = ("param_dtype", "reduce_dtype", "master", "checkpointing", "checkpoint_layers", "optimizer", "zero")
        for name, default in usual.items():
            value = getattr(self, name)
            if name in told or value == default:
                continue
            word = name.replace("_", " ")
            if isinstance(value, bool):
                words.append(word if value else f"no {word}")
            elif isinstance(value, Conventions):
                words.append(str(value))
            elif isinstance(value, Routing):
                words.append(f"routing {value.describe()}")
            else:
                words.append(f"{word} {value}")
        return "; ".join(words)


def _dtype(name: str, given: Any) -> str:
    known = _DTYPES.get(given) if isinstance(given, str | torch.dtype) else None
    if known is None:
        words = ("bf16", "fp16", "fp32")
        raise ValueError(_wrong(name, given, "is no dtype for this", f"{name}={nearest(given, words)}"))
    return known


def _one_of(name: str, given: object, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ValueError(_wrong(name, given, "does not exist", f"{name}={nearest(given, choices)}"))


def _count(name: str, given: object, least: int) -> None:
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(_wrong(name, given, f"is a {type(given).__name__}, not an int", f"{name}={max(least, 1)}"))
    if given < least:
        raise ValueError(_wrong(name, given, f"is below {least}", f"{name}={max(least, 1)}"))


def _wrong(name: str, given: object, why: str, hint: str) -> str:
    return explain(_ASKED, f"{name}={given!r} {why}", f"{name}: {given!r}", hint)
