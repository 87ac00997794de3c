"""The search space: candidates, rejections, and the numbers that both depend on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.split import rank_of_stage, split_layers
from sim.mesh.recipe import Recipe
from sim.mesh.spec import ModelSpec

_DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "ep", "cp")


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        dims: the degrees.
        recipe: with the number of micro-batches.
        batch: sequences of a step on each data-parallel rank.
        layers_per_stage: of a pipeline; None: balanced, embedding and head counted as layers.
    """

    dims: ParallelDims
    recipe: Recipe
    batch: int
    layers_per_stage: tuple[int, ...] | None = None

    @property
    def degrees(self) -> str:
        """The degrees above 1, such as `dp_shard=8 tp=2`.

        >>> Candidate(ParallelDims(dp_shard=8, tp=2, world_size=16), Recipe(), 1).degrees
        'dp_shard=8 tp=2'
        """
        texts = [f"{name}={size}" for name in _DEGREES if (size := getattr(self.dims, name)) > 1]
        if self.dims.cp > 1:
            parts = {1: "ring", self.dims.cp: "ulysses"}
            texts.append(f"({parts.get(self.dims.ulysses_degree or 1, f'ulysses={self.dims.ulysses_degree}')})")
        if (self.dims.ep > 1 or self.dims.fold_experts) and self.dims.tp > 1:
            texts.append(f"etp={self.dims.etp}")
        if self.dims.fold_experts:
            texts.append("folded")
        return " ".join(texts) or "one device"

    @property
    def parts(self) -> int:
        """Micro-batches of a step."""
        return self.recipe.micro_batches

    @property
    def how(self) -> str:
        """What the recipe adds to the degrees, such as `ZeRO-3, full checkpointing, 1f1b of 16 x 1`."""
        texts = [f"ZeRO-{self.recipe.zero}" if self.recipe.zero else "replicated"]
        if self.recipe.checkpointing != "none":
            some = self.recipe.activations.first
            texts.append(f"{self.recipe.checkpointing} ckpt" + ("" if some is None else f" of {some}"))
        if self.dims.pp > 1:
            texts.append(f"{self.recipe.parallel.describe_pipeline()} of {self.parts} x {self.batch // self.parts}")
            if self.layers_per_stage is not None:
                texts.append(f"layers {','.join(map(str, self.layers_per_stage))}")
        elif self.parts > 1:
            texts.append(f"{self.parts} x {self.batch // self.parts} sequences")
        if self.recipe.reductions > 1:
            texts.append("reduced in each")
        if self.recipe.parallel.ranks_per_node is not None:
            texts.append("tokens once to each node")
        if self.recipe.input_gathers > 1:
            texts.append("inputs gathered again")
        if self.recipe.parallel.tp_chunks > 1:
            texts.append(f"{self.recipe.parallel.tp_chunks} tp chunks")
        if self.recipe.parallel.whole_parameters:
            texts.append("whole parameters")
        texts += ["compile"] if self.recipe.parallel.fuses else []
        return ", ".join((*texts, *self.recipe.kernels))

    def __str__(self) -> str:
        return f"{self.degrees}; {self.how}"


@dataclass(frozen=True)
class Rejected:
    """What cannot be run, or is not worth to be looked at.

    Attributes:
        what: the degrees, and the recipe where the degrees alone are fine.
        reason: of few words, the same for all that are rejected for it.
        detail: with the numbers.
        bytes_needed: memory that it needs at least, where that is the reason.
        candidate: None where the degrees are none at all.
    """

    what: str
    reason: str
    detail: str
    bytes_needed: float | None = None
    candidate: Candidate | None = None


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that candidates, and bounds of them, depend on; 0 where the model has no such thing.

    Attributes:
        layers: blocks.
        hidden: width of the residual stream.
        intermediate: joint width of the feed-forward that a token goes through.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: of both.
        vocab: tokens.
        parameters: all of them.
        expert_parameters: those in experts that are split over axis ep.
        experts: of a layer.
        experts_per_token: that a token goes to.
        flops_per_token: forward and backward.
        splits: whether tensors inside of layers can be split over axis tp.
        has_stages: whether a pipeline can be made of it.
        gated: whether the feed-forward multiplies two products of its input.
        joins_qkv: whether one product makes queries, keys and values.
        biased: whether products have biases, but for those that write to the residual stream.
        own_optimizer: whether the model brings its optimizer, whose state is not known.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    parameters: int
    flops_per_token: float
    expert_parameters: int = 0
    experts: int = 0
    experts_per_token: int = 0
    splits: bool = True
    has_stages: bool = True
    gated: bool = True
    joins_qkv: bool = False
    biased: bool = False
    own_optimizer: bool = False


@dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes:
        shape: of the model.
        num_devices: ranks.
        devices_per_node: devices that fast links join.
        global_batch: sequences of a step, over all ranks.
        seq_len: tokens of a sequence.
        recipes: to be tried with all degrees.
        accumulate: micro-batches of a step; None: several are tried.
        fixed: degrees that are given, by name.
        layers_per_stage: of every pipeline; None: several are tried.
    """

    shape: Shape
    num_devices: int
    devices_per_node: int
    global_batch: int
    seq_len: int
    recipes: Sequence[Recipe]
    fixed: dict[str, int] = field(default_factory=dict)
    layers_per_stage: tuple[int, ...] | None = None
    accumulate: int | None = None


CHECKPOINTINGS = ("none", "selective", "alternate", "full", "offload", "full offload")
"""What is tried of `parallel.checkpointing`."""


def default_recipes() -> tuple[Recipe, ...]:
    """Return the usual recipes: each checkpointing, ZeRO-3 and ZeRO-2, one reduction or several.

    Offload to the host is among them; a search tries it if nothing else fits.
    """
    return tuple(
        Recipe().with_savings(checkpointing, stage, each)
        for checkpointing in CHECKPOINTINGS
        for stage in (3, 2)
        for each in (False, True)
    )


def shape_of(spec: ModelSpec, seq_len: int) -> Shape:
    """Return the numbers of a model that bounds depend on."""

    def size(name: str, otherwise: int = 0) -> int:
        return int(getattr(spec.config, name, None) or otherwise) if hasattr(spec, "config") else otherwise

    hidden, heads = spec.hidden_size or 0, size("num_attention_heads")
    width, experts = size("intermediate_size", 4 * hidden), size("num_experts")
    expert_parameters = 0
    if experts:
        one = 3 * hidden * size("expert_intermediate_size")
        expert_parameters = sum(kind == "experts" for kind in spec.layer_kinds) * experts * one
        width = (size("experts_per_token") + size("num_shared_experts")) * size("expert_intermediate_size")
    return Shape(
        layers=spec.num_layers,
        hidden=hidden,
        intermediate=width,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("qk_size", size("head_dim", hidden // heads if heads else 0)),
        vocab=spec.vocab_size or 0,
        parameters=spec.num_parameters,
        flops_per_token=spec.flops_per_token(seq_len),
        expert_parameters=expert_parameters,
        experts=experts,
        experts_per_token=size("experts_per_token"),
        splits=_splits(spec),
        has_stages=spec.has_stages,
        gated=bool(getattr(getattr(spec, "config", None), "is_gated", True)),
        joins_qkv=bool(getattr(getattr(spec, "config", None), "joins_qkv", False)),
        biased=bool(getattr(getattr(spec, "config", None), "bias", False)),
        own_optimizer=getattr(getattr(spec, "config", None), "optimizer", None) is not None,
    )


def _splits(spec: ModelSpec) -> bool:
    """Whether tensors inside of layers can be split: a module of the user's needs a plan for it."""
    return spec.family != "custom" or getattr(spec.config, "plan", None) is not None


def layers_of_stages(layers: int, candidate: Candidate) -> list[range]:
    """Return the layers of each stage, in model order."""
    return _split(layers, len(owners_of(candidate)), candidate.layers_per_stage)


@functools.cache
def _split(layers: int, stages: int, sizes: tuple[int, ...] | None) -> list[range]:
    return split_layers(layers, stages, sizes=None if sizes is None else list(sizes))


def owners_of(candidate: Candidate) -> list[int]:
    """Return the place along the pipeline of the rank that has each stage."""
    parallel = candidate.recipe.parallel
    return _owners(parallel.pipeline.name, candidate.dims.pp, parallel.stages_each)


@functools.cache
def _owners(schedule: str, ranks: int, each: int) -> list[int]:
    return [rank_of_stage(schedule, stage, ranks, each) for stage in range(ranks * each)]
