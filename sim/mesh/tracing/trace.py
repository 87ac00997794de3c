"""Run a step of the real model, plan and engine on one rank that lives alone, and write down what it does.

One recording is made for each *kind* of stage: those with the same layers around and in them do the same. The programs
of all ranks of a pipeline are put together from these, in the order of the real schedule.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.expert_parallel.router import Router, update_expert_bias
from hyper_parallel.core.fully_shard.clip import clip_grads_with_norm_
from hyper_parallel.core.fully_shard.comm import all_gather
from hyper_parallel.core.fully_shard.module import hold_parameters, reduce_gradients, release_parameters
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.boundary import Boundary, Meta
from hyper_parallel.core.pipeline.stage import Stage, StagePosition
from hyper_parallel.core.pipeline.tied import clip_grad_norm
from hyper_parallel.trainer.config import OptimizerConfig
from hyper_parallel.trainer.loop import communicate_gradients
from hyper_parallel.trainer.optimizer import build_optimizer
from sim.mesh.job import Job, StagePart
from sim.mesh.program import COMPUTE, HostWait, Place, Program
from sim.mesh.recipe import Routing
from sim.mesh.tracing.build import Built, build_stage
from sim.mesh.tracing.categories import find_categories, standing_blocks
from sim.mesh.tracing.fusion import fuse
from sim.mesh.tracing.kernels import AcceleratorKernels
from sim.mesh.tracing.lone import LoneWorld
from sim.mesh.tracing.losses import Loss
from sim.mesh.tracing.record import Recorder
from sim.mesh.tracing.stitch import Recording, expand, kept_layers, stitch

__all__ = ["RecordedStage", "record_stage", "trace"]

Key = tuple[str, int, str]
_TOKEN_AXES = ("dp_replicate", "dp_shard", "ep", "cp")  # along which ranks have other tokens


def trace(job: Job, *, every_layer: bool = False) -> list[Program]:
    """Return what each rank of the pipeline does in a step: one program per place along pp, or one in all.

    Ranks that differ in their place along other axes only do the same, so a program stands for all of them.

    Args:
        job: what is estimated.
        every_layer: record every layer, rather than a few and repeat what the middle ones do.
    """
    recordings: dict[Any, Recording] = {}
    parts = job.stages()
    for part in parts:
        kind = _kind(job, part)
        if kind not in recordings:
            recordings[kind] = record_stage(job, part, every_layer=every_layer)
    ready: dict[int, Recording] = {part.index: recordings[_kind(job, part)] for part in parts}
    programs = [fuse(program) for program in stitch(job, parts, ready)]
    conventions = job.recipe.conventions
    return programs if conventions is None else [conventions.rewrite(job, program) for program in programs]


def _kind(job: Job, part: StagePart) -> Any:
    layers = tuple(job.model.layer_kinds[layer] for layer in part.layers)
    ranks = {other.index: other.rank for other in job.stages()}
    near = tuple(ranks.get(part.index + step) == part.rank for step in (-1, 1))  # whose values need no message
    return (layers, part.is_first, part.is_last, near)


def record_stage(job: Job, part: StagePart, *, every_layer: bool = False) -> Recording:
    """Record a stage: building it, and the second of two steps, with three micro-batches at most.

    Args:
        job: what is estimated.
        part: the stage.
        every_layer: record all of its layers.
    """
    recorder = Recorder()
    kinds = [job.model.layer_kinds[layer] for layer in part.layers]
    few = (
        not every_layer
        and job.model.has_stages
        and job.recipe.optimizer != "adamw-foreach"
        and job.recipe.checkpoint_layers is None
    )
    kept = kept_layers(part.layers, kinds) if few else list(part.layers)
    with LoneWorld(job.dims.world_size, job.rank_of_stage_rank(part.rank), recorder) as world:
        recording = world.run_alone(_Run(job, part, kept, recorder).record)
    recording.groups = [group._replace(ranks=tuple(job.device_of(group.ranks))) for group in recorder.groups]
    return expand(recording, list(part.layers), kept)


class _Run:
    """One stage on the living rank."""

    def __init__(self, job: Job, part: StagePart, kept: list[int], recorder: Recorder) -> None:
        self.job, self.part, self.kept, self.recorder = job, part, kept, recorder
        self.count = 1
        self.segments: dict[Key, list[tuple[int | None, list[Any]]]] = {}
        self.built: Built

    def record(self) -> Recording:
        """Build, take a step to make the optimizer's state, and record the next one."""
        job, recorder = self.job, self.recorder
        _build_meshes(job.dims)
        # Of tensors without values torch cannot tell that they are detached.
        warnings.filterwarnings("ignore", message="To construct DTensor from torch.Tensor")
        with recorder.recording(), AcceleratorKernels(), _collecting(), self._naming():
            recorder.place = Place("build")
            built = self.built = build_stage(job, self.part, self.kept, recorder)
            (job.recipe.routing or Routing()).give_to(built.module, lambda: recorder.emit(HostWait(COMPUTE)))
            optimizer = None
            if built.replicated is None:
                optimizer = _optimizer(job, built.module)
            driver: Callable[[Built], None]
            driver = self._pipeline_step if job.dims.pp_enabled else self._plain_step
            for count in (1, min(job.microbatches, 3)):  # the first step makes the optimizer's state
                self.count = count
                recorder.cut()
                self.segments = {}
                driver(built)
                self._update(built, optimizer)
            standing = standing_blocks(recorder, built, optimizer)
            categories = find_categories(recorder, job, standing, self.segments)
        return Recording(
            groups=list(recorder.groups),
            places=list(recorder.places),
            categories=categories,
            sizes=dict(recorder.sizes),
            standing=standing,
            segments=self.segments,
        )

    def _naming(self) -> Any:
        naming = getattr(self.job.model, "naming", None)
        return nullcontext() if naming is None else naming()

    def _variant(self, index: int) -> str:
        if self.job.microbatches == 1:
            return "only"
        if index == 0:
            return "first"
        return "last" if index == self.count - 1 else "steady"

    def _close(self, name: str, variant: str) -> None:
        self.segments[name, self.part.index, variant] = self.recorder.chunks()

    # -- a step without a pipeline -------------------------------------------------------------------------------

    def _plain_step(self, built: Built) -> None:
        """Forward and backward of each micro-batch, as `Trainer.step` runs them."""
        job, recorder, spec = self.job, self.recorder, self.job.model
        self._close("begin", "only")
        for index in range(self.count):
            variant, is_last = self._variant(index), index == self.count - 1
            _reduce_now(built, is_last or job.recipe.reduce_each)
            recorder.place = Place("forward")
            inputs = spec.inputs(job.micro_batch, job.local_seq_len)
            output = _call(spec, built.module, inputs)
            kept = job.recipe.loss == "eager-kept" and not isinstance(output, DTensor)
            if kept:
                output = output.float()  # the model's own last operation, whose result the step holds on to
            loss = self._loss(output, inputs)
            if not kept:
                del output
            self._close("forward", variant)
            recorder.place = Place("backward")
            _backward([loss], [torch.ones_like(loss)])
            output = None
            del loss, inputs
            self._close("backward", variant)

    def _loss(self, output: Any, inputs: Any) -> torch.Tensor:
        """The loss of what the model has returned: of the recipe's kind, where the model returns logits."""
        spec = self.job.model
        self.recorder.begin(None)
        self.recorder.place = Place("loss")
        if spec.family == "custom":
            return spec.loss(output, inputs)
        return Loss.of(self.job.recipe)(output, inputs[0])

    # -- a step of a stage ---------------------------------------------------------------------------------------

    def _pipeline_step(self, built: Built) -> None:
        """All forwards, then all backwards, of a stage as torch's schedules run it; they change the order only."""
        job, recorder = self.job, self.recorder
        recorder.place = Place("forward")
        hold_parameters(built.module, before=lambda unit: recorder.begin(_layer_of(built, unit)))
        recorder.begin(None)
        stage = self._stage(built)
        self._close("begin", "only")
        spec = job.model
        losses: list[torch.Tensor] = []
        targets = []
        for index in range(self.count):
            recorder.place = Place("forward")
            targets.append(spec.inputs(job.micro_batch, job.local_seq_len))
            stage.targets = targets
            losses.append(self._forward(stage, index))
            self._close("forward", self._variant(index))
        for index in range(self.count):
            is_last = index == self.count - 1
            _reduce_now(built, is_last)
            recorder.place = Place("backward")
            self._backward(stage, index, losses)
            if is_last:
                recorder.place = Place("reduce")
                reduce_gradients(built.module, before=lambda unit: recorder.begin(_layer_of(built, unit)))
            self._close("backward", self._variant(index))
        losses.clear()
        targets.clear()
        release_parameters(built.module, failed=False)
        stage.end()

    def _stage(self, built: Built) -> RecordedStage:
        job, part = self.job, self.part
        spec, dims = job.model, job.dims
        group = dims.get_mesh("pp").get_group()
        boundary: Layout | None = None
        batch, seq, width = job.micro_batch, job.local_seq_len, spec.hidden_size
        assert width is not None, "a model with stages has a width"
        shape: tuple[int, ...] = (batch, seq, width)
        whole: tuple[int, ...] | None = None
        if dims.tp_enabled:
            boundary = Layout.from_device_mesh(dims.get_mesh("tp"))
            if job.recipe.sequence_parallel:
                boundary, whole = boundary("None", "tp", "None"), shape
                shape = (batch, math.ceil(seq / dims.tp), width)
            else:
                boundary, whole = boundary("None", "None", "None"), shape
        between = Meta(shape, job.recipe.dtype, whole)
        tokens = Meta((batch, seq), torch.int64)
        stage = RecordedStage(
            built.module,
            StagePosition(part.index, len(job.stages()), torch.device("cpu"), group, False),
            Boundary(boundary),
            [tokens if part.is_first else between],
            [] if part.is_last else [between],
            self._loss,
        )
        stage.begin([], training=True)
        stage.group_for_messages = group
        if job.recipe.conventions is not None:
            job.recipe.conventions.prepare_stage(job, stage, self.recorder)
        stage.rank_before, stage.rank_after = self._neighbours()
        return stage

    def _neighbours(self) -> tuple[int, int]:
        """The group ranks that have the stages before and after this one."""
        by_index = {part.index: part.rank for part in self.job.stages()}
        here = self.part.index
        return by_index.get(here - 1, -1), by_index.get(here + 1, -1)

    def _forward(self, stage: RecordedStage, index: int) -> Any:
        part, recorder = self.part, self.recorder
        if part.is_first:
            args = stage.targets[index]
        else:
            args = stage.receive(stage.received, stage.rank_before, part.rank)
        output = stage.run_forward(index, args)
        recorder.begin(None)
        if not part.is_last and stage.rank_after != part.rank:
            stage.send(output, stage.rank_after)
        stage.kept[index] = (args, output)
        return output if part.is_last else None

    def _backward(self, stage: RecordedStage, index: int, losses: list[Any]) -> None:
        part = self.part
        args, output = stage.kept.pop(index)
        if part.is_last:
            losses[index] = None
            _backward([output], [torch.ones_like(output)])
            del output
        else:
            outputs = [out for out in output if out.requires_grad]
            grads = stage.receive(stage.sent, stage.rank_after, part.rank)
            _backward(outputs, list(grads))
        for unit in stage._wider:  # gradients are added up in the dtype that they are reduced in
            self.recorder.begin(_layer_of(self.built, unit))
            unit.keep_gradients()
        self.recorder.begin(None)
        if not part.is_first:
            given = [arg.grad for arg in args if arg.grad is not None]
            if stage.rank_before != part.rank:
                stage.send(given, stage.rank_before)
        del args

    # -- what ends a step ----------------------------------------------------------------------------------------

    def _update(self, built: Built, optimizer: torch.optim.Optimizer | None) -> None:
        """Norm, scaling and update, as `Trainer.step` does, but that the norm is not looked at."""
        recorder, job = self.recorder, self.job
        recorder.place = Place("optimizer")
        for param in built.module.parameters():
            if param.grad is not None:
                grad = param.grad
                recorder.gradients.add(recorder.block_of(getattr(grad, "_local_tensor", grad)))
        if built.replicated is not None:
            built.replicated.finish()
            self._close("reduce", "only")
            recorder.place = Place("optimizer")
            built.replicated.step()
        else:
            assert optimizer is not None
            group = job.dims.get_mesh("pp").get_group() if job.dims.pp_enabled else None
            total = clip_grad_norm([built.module], math.inf, group)
            params = [param for param in built.module.parameters() if param.grad is not None]
            if params and job.recipe.clipping:
                clip_grads_with_norm_(params, 1.0, total)
            optimizer.step()
            optimizer.zero_grad()
            del total
        if any(isinstance(module, Router) for module in built.module.modules()):
            tokens = job.dims.mesh_over(*_TOKEN_AXES)
            update_expert_bias(built.module, [] if tokens is None else [tokens])
        self._close("optimizer", "only")


class RecordedStage(Stage):
    """A stage that is run micro-batch by micro-batch, by what a schedule would do around it."""

    group_for_messages: Any
    group_of_parts: Any = None
    """Ranks that all have what goes between stages, and each send a part; None: each sends all."""
    rank_before: int
    rank_after: int
    after_message: Callable[[], object] | None = None
    """What the host does when a message has come."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[int, Any] = {}

    def receive(self, metas: Any, source: int, own: int) -> tuple[torch.Tensor, ...]:
        """Get what another stage sends; from one of this rank it comes without communication."""
        made = []
        for meta in metas:
            tensor = torch.empty(meta.shape, dtype=meta.dtype)
            if source != own:
                part = self._part(tensor)
                self.group_for_messages.recv([part], source, 0).wait()
                if self.after_message is not None:
                    self.after_message()
                if part is not tensor:
                    all_gather(tensor, part, self.group_of_parts).wait()
            made.append(tensor.requires_grad_(tensor.dtype.is_floating_point and torch.is_grad_enabled()))
        return tuple(made)

    def send(self, tensors: Any, target: int) -> None:
        """Send what a stage returned, or its gradients."""
        for tensor in tensors:
            self.group_for_messages.send([self._part(tensor.detach().contiguous())], target, 0).wait()

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """What one rank sends and receives of a tensor."""
        if self.group_of_parts is None or tensor.numel() % self.group_of_parts.size():
            return tensor
        return tensor.flatten()[: tensor.numel() // self.group_of_parts.size()]

    def run_forward(self, index: int, args: Any) -> Any:
        """Compute the output of a micro-batch, or its loss."""
        self._micro_batch = index
        return self.forward_maybe_with_nosync(*args)


def _build_meshes(dims: ParallelDims) -> None:
    """Make all meshes that a step uses: where tensors have no values none can be made."""
    dims.build_mesh("cpu")
    dims.data_mesh()
    dims.mesh_over(*_TOKEN_AXES)
    dims.mesh_over("dp_shard", "ep", "cp")
    dims.mesh_over("dp_shard", "cp")
    dims.mesh_over("dp_replicate")
    if dims.ep_enabled:
        dims.data_mesh(experts=True)


def _call(spec: Any, module: nn.Module, inputs: Any) -> Any:
    call = getattr(spec, "call", None)
    return module(*inputs) if call is None else call(module, inputs)


def _layer_of(built: Built, unit: Any) -> int | None:
    """The layer that a unit of `fully_shard` belongs to; None: to none."""
    own = unit.modules[0]
    for number, outer in built.outer:
        if any(module is own for module in outer.modules()):
            return number
    return None


def _reduce_now(built: Built, flag: bool) -> None:
    """Let the next backward reduce gradients over ranks, or let it only add them up."""
    if built.replicated is not None:
        built.replicated.last = flag
    else:
        communicate_gradients(built.module, flag)


def _optimizer(job: Job, module: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in module.parameters() if param.requires_grad]
    if job.recipe.optimizer == "sgd":
        return torch.optim.SGD(params or [torch.nn.Parameter(torch.empty(0))], lr=1e-3, fused=bool(params))
    if job.recipe.optimizer == "adamw-foreach":
        return torch.optim.AdamW(params, lr=1e-3, foreach=True)
    return build_optimizer(module.named_parameters(), OptimizerConfig())


def _backward(outputs: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """Run backward as `torch.autograd.backward` does, which leaves function modes first: recomputation needs them."""
    torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextmanager
def _collecting() -> Iterator[None]:
    """Let memory go when its last reference does, and not when Python's collector happens to run."""
    import gc

    enabled = gc.isenabled()
    gc.collect(1)  # what the recording before has left; a walk over all that a process has takes longer than to record
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
