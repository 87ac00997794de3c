"""A step of other trainers: recipes of what ours cannot do, and how such a step is built and taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy

from benchmarks.published.float8 import use_float8
from benchmarks.published.losses import Loss, fuse_head
from benchmarks.published.megatron import MegatronConventions
from benchmarks.published.replicated import Replicated
from benchmarks.published.zoo import split_llama, use_kernels
from hyper_parallel.core.activations import ActivationPolicy
from hyper_parallel.core.common.checks import check_choice
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.context_parallel.api import context_parallel
from hyper_parallel.trainer.parallelize import in_dtype
from sim.mesh.job import Job
from sim.mesh.models import LlamaSpec
from sim.mesh.program import Comm, CommGroup, Place, Program, Wait
from sim.mesh.recipe import Recipe
from sim.mesh.tracing.build import Built, checkpoint_blocks, follow_block, shard_weights
from sim.mesh.tracing.trace import RecordedStage, StageRun

__all__ = ["PublishedRecipe", "PublishedRun"]


class PublishedRun(StageRun):
    """A stage as other trainers have it; its job has a `PublishedRecipe`."""

    all_at_once = ("adamw-foreach", "muon")
    _engine: Replicated | None = None
    _held: Any = None
    """Logits that the step holds on to."""

    @property
    def recipe(self) -> PublishedRecipe:
        """How the trainer trains."""
        recipe = self.job.recipe
        assert isinstance(recipe, PublishedRecipe), "whose property leads here"
        return recipe

    @property
    def is_trainers(self) -> bool:
        """Whether the trainer's own function takes the step: not of whole weights, or of logits that live on."""
        return super().is_trainers and self._engine is None and self.recipe.loss != "eager-kept"

    def build(self) -> Built:
        """Build the stage: in the order of `sim.mesh.tracing.build.build_stage`, with kernels and engine of others."""
        job, part, recorder = self.job, self.part, self.recorder
        dims, recipe, spec = job.dims, self.recipe, job.model
        module = spec.build(job.seq_len, self.kept, embed=part.is_first, head=part.is_last)
        use_kernels(module, recipe)
        whole = recipe.zero <= 1
        param = recipe.precision.dtype("param")
        dtype = param if whole else recipe.precision.dtype("master")
        in_dtype(module, lambda _: dtype, buffers=dtype if whole or param == torch.float64 else None)
        split = split_llama if type(spec) is LlamaSpec else spec.split
        split(module, dims, recipe)
        if recipe.fused_loss and spec.vocab_size is not None:
            fuse_head(module)
        if dims.cp_enabled and self.kept:
            context_parallel(module, dims.get_mesh("cp"), dims.ulysses_degree)
        blocks = spec.blocks(module)
        for number, block in blocks:
            if recipe.float8:
                use_float8(block, rowwise=recipe.float8 == "rowwise")
            follow_block(recorder, number, block, is_first=number == blocks[0][0])
        outer = checkpoint_blocks(job, part, module, blocks, _policy(recipe))
        if whole:
            layers = {id(param): number for number, block in blocks for param in block.parameters()}
            self._engine = Replicated(module, dims, recipe, layers, recorder.begin)
        else:
            shard_weights(job, module, outer)
        return Built(module, blocks, outer)

    def make_optimizer(self) -> torch.optim.Optimizer | None:
        """Make the optimizer; None: the engine has it in it."""
        if self._engine is not None:
            return None
        if self.recipe.foreach:
            params = [param for param in self.built.module.parameters() if param.requires_grad]
            return torch.optim.AdamW(params, lr=1e-3, foreach=True)
        return super().make_optimizer()

    def states(self) -> Iterable[tuple[torch.Tensor, str, int | None]]:
        """Yield the buffers of the engine."""
        for flat in () if self._engine is None else self._engine.flats:
            yield flat.grads, "gradients", flat.layer
            for state in (flat.master, flat.tick, *flat.moments):
                if state is not None:
                    yield state, "optimizer", flat.layer

    def communicate(self, flag: bool) -> None:
        """Let the next backward reduce gradients over ranks, or let it only add them up."""
        if self._engine is None:
            super().communicate(flag)
        else:
            self._engine.last = flag

    def plain_loss(self, inputs: Any) -> torch.Tensor:
        """Compute the loss of a micro-batch, whose logits may live on."""
        if self.recipe.loss != "eager-kept":
            return super().plain_loss(inputs)
        output = self.built.module(*inputs)
        if not isinstance(output, DTensor):
            output = self._held = output.float()  # the model's own last operation, whose result the step holds on to
        return self.start_loss(output, inputs)

    def loss(self, output: Any, targets: Any) -> torch.Tensor:
        """Return the loss of the recipe's kind."""
        recipe = self.recipe
        if recipe.loss == "library" and not recipe.fused_loss:
            return super().loss(output, targets)
        return Loss.of(recipe)(output, targets[0] if isinstance(targets, tuple) else targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a micro-batch, and let go of its logits."""
        super().backward(loss)
        self._held = None

    def begins_all_stages(self) -> bool:
        """Whether a rank of a pipeline has begun each of its stages before the first of them ends."""
        return self.recipe.conventions is None and super().begins_all_stages()

    def make_stage(self) -> RecordedStage:
        """Make the pipeline's stage, which with conventions waits for each message that it sends."""
        stage = super().make_stage()
        if (conventions := self.recipe.conventions) is not None:
            stage.sends_end = "each"
            conventions.prepare_stage(self.job, stage, self.recorder)
        return stage

    def run_backward(self, stage: RecordedStage, index: int, loss: Any) -> None:
        """Go backward through a micro-batch of a pipeline."""
        if self._engine is not None:
            self._engine.last = index == self.count - 1
        super().run_backward(stage, index, loss)

    def update(self, optimizer: Any, groups: Any) -> None:
        """End a step as the trainer does, or as an engine does that has the optimizer in it."""
        if self._engine is None:
            super().update(optimizer, groups)
            return
        self.end_backwards()
        self._engine.finish()
        self.close("reduce", "only")
        self.recorder.place = Place("optimizer")
        self._engine.step()
        self.balance(True)
        self.recorder.answer = None
        self.close("optimizer", "only")

    @staticmethod
    def finish(job: Job, programs: list[Program]) -> list[Program]:
        """Return the programs with what the trainer of the recipe does otherwise in their events."""
        if job.recipe.zero <= 1:
            _tie(job, programs)
        conventions: MegatronConventions | None = getattr(job.recipe, "conventions", None)
        return programs if conventions is None else [conventions.rewrite(job, program) for program in programs]


def _tie(job: Job, programs: list[Program]) -> None:
    """Exchange the gradient of a weight that two stages share, as the engine of whole weights leaves it."""
    ends = job.tied_ranks
    if ends is None or ends[0] == ends[1]:
        return
    vocab, width = job.model.vocab_size or 0, job.model.hidden_size or 0
    size = -(-vocab * width // job.dims.tp) * job.recipe.precision.dtype("reduce").itemsize
    first, last = (programs[rank] for rank in ends)
    devices = (first.rank, last.rank)
    for program in (first, last):
        program.groups.append(CommGroup("pp", devices))
        program.places.append(Place("optimizer", None, "tied weights"))
        key = next(key for key in program.segments if key[0] == "optimizer")
        handle = 1 + max(
            (e.handle for s in program.segments.values() for e in s.events if isinstance(e, Comm)), default=0
        )
        other = devices[1] if program is first else devices[0]
        group, place = len(program.groups) - 1, len(program.places) - 1
        give = Comm("send", group, size, size, "float32", 0, handle, place, other)
        get = Comm("recv", group, size, size, "float32", 0, handle + 1, place, other)
        program.segments[key] = dataclasses.replace(
            program.segments[key], events=[give, get, Wait(handle + 1, 0), *program.segments[key].events]
        )


def _policy(recipe: PublishedRecipe) -> ActivationPolicy:
    """Return the policy of blocks, which may keep more results than ours does."""
    policy, more = recipe.activations, recipe.conventions
    if more is None or not more.kept_results:
        return policy
    said = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    return _KeepingMore(**said, results=more.kept_results)


@dataclass(frozen=True)
class _KeepingMore(ActivationPolicy):
    """A policy that keeps results of more operators where it chooses among them at all."""

    results: frozenset[Any] = frozenset()

    def contexts(self) -> Callable[[], Any] | None:
        made = super().contexts()
        return None if made is None else partial(self._keeping, made)

    def _keeping(self, made: Callable[[], Any]) -> Any:
        modes = made()
        for mode in modes:
            if hasattr(mode, "policy_fn"):  # the second computation asks again before torch 2.13
                mode.policy_fn = partial(self._choose, mode.policy_fn)
        return modes

    def _choose(self, otherwise: Callable[..., Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op in self.results else otherwise(context, op, *args, **kwargs)


@dataclass(frozen=True)
class PublishedRecipe(Recipe):
    """How a step of another trainer is trained: as a `Recipe`, and these.

    A search tries such recipes, too, but its guesses take them for those of our trainer.

    Args:
        foreach: AdamW of one kernel for each operation on lists of tensors, in place of one for all.
        level: 1 or 0 where weights are replicated: 1 shards the optimizer state over data-parallel ranks (ZeRO's first
            stage: Rajbhandari et al. 2020, section 5.1); 0 is DDP. None: they are sharded as [parallel] says.
        fused_loss: head and loss for one chunk of the tokens at a time: all logits are never there.
        float8: matrix products of blocks in float8, as torchao's recipe "tensorwise" or "rowwise"; "": in bfloat16.
        sequence_parallel: with tensor parallelism, what lies between split modules is split over the sequence.
        attention: "flash", "math" or "math-recomputed". "math": scores and their softmax are made and kept; the last:
            made, and made again in backward (selective recomputation of Korthikanti et al. 2022, section 5).
        loss: "library": as `hyper_parallel.vocab_parallel_cross_entropy` and our trainer compute it; "eager":
            `F.cross_entropy` of a float32 copy of the logits; "eager-kept": and the logits live through backward;
            "chunked": of one part of the logits at a time; "compiled": one kernel.
        overlap_grad_reduce: with a level: gradients are reduced while backward goes on.
        overlap_param_gather: with level 1: new weights are gathered while the next forward goes on.
        tp_overlap: communication of tensor parallelism overlaps with matrix products.
        host: "eager": the host issues each operation of plain tensors; "dtensor": of DTensors, which costs it several
            times as much, as with torch's `parallelize_module` without compile.
        graphs: a step is replayed as one graph: the host costs nothing.
        conventions: what else the trainer does otherwise; None: nothing.
    """

    foreach: bool = False
    level: int | None = None
    fused_loss: bool = False
    float8: str = ""
    sequence_parallel: bool = True
    attention: str = "flash"
    loss: str = "library"
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    tp_overlap: bool = False
    host: str = "eager"
    graphs: bool = False
    conventions: MegatronConventions | None = None

    __hash__ = Recipe.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        asked, param = "cannot use this recipe", self.precision.param_dtype
        check_choice(asked, "level", str(self.level), ("None", "1", "0"))
        check_choice(asked, "float8", self.float8, ("", "tensorwise", "rowwise"))
        check_choice(asked, "attention", self.attention, ("flash", "math", "math-recomputed"))
        check_choice(asked, "loss", self.loss, ("library", "eager", "eager-kept", "chunked", "compiled"))
        check_choice(asked, "host", self.host, ("eager", "dtensor"))
        if self.float8 and param != "bf16":
            seen = f"float8={self.float8!r}, param_dtype={param!r}"
            blame = "matrix products in float8 take and return bfloat16"
            raise InvalidValue(asked, blame, seen, 'param_dtype="bf16"')
        again, chunks = self.input_gathers > 1, self.parallel.tp_chunks
        for name, given, off, what in (
            ("reshard_inputs", again, False, "gather again"),
            ("tp_chunks", chunks, 1, "overlap"),
        ):
            if given != off and not self.sequence_parallel:
                blame = f"without sequence parallelism no input is gathered, so that there is nothing to {what}"
                seen = f"{name}={given}, sequence_parallel=False"
                raise InvalidValue(asked, blame, seen, f"sequence_parallel=True, or {name}={off}")

    @property
    def zero(self) -> int:
        """The stage of ZeRO."""
        return super().zero if self.level is None else self.level

    def with_zero(self, stage: int) -> PublishedRecipe:
        """Return a copy with another stage of ZeRO, 0 and 1 among them."""
        return super().with_zero(stage).having(level=stage if stage <= 1 else None)

    @property
    def optimizer_name(self) -> str:
        """The optimizer in a word."""
        return "adamw-foreach" if self.foreach else super().optimizer_name

    @property
    def steps(self) -> type[PublishedRun]:
        """What takes the step."""
        return PublishedRun

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of other kernels that a step needs."""
        return ("float8",) if self.float8 else ()

    @property
    def pricing(self) -> dict[str, Any]:
        """Arguments of `sim.mesh.cost.Pricing`."""
        said = super().pricing | {name: getattr(self, name) for name in ("graphs", "tp_overlap", "host")}
        if self.conventions is not None and not self.conventions.posts_early:
            said["posts_early"] = False
        return said
