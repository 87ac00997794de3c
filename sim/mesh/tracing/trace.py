"""A recorded step of the real model, plan and engine on one rank that lives alone.

One recording is made for each *kind* of stage: those with the same layers around and in them do the same. The programs
of all ranks of a pipeline are put together from these, in the order of the real schedule.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor import DTensor

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.expert_parallel.router import Router, update_expert_bias
from hyper_parallel.core.fully_shard.comm import all_gather
from hyper_parallel.core.fully_shard.module import hold_parameters, release_parameters
from hyper_parallel.core.mesh.device_mesh import OwnerMesh, mesh_among
from hyper_parallel.core.mesh.parallel_dims import RANK_ORDER, ParallelDims
from hyper_parallel.core.pipeline.api import Pipeline
from hyper_parallel.core.pipeline.boundary import Boundary, Meta
from hyper_parallel.core.pipeline.stage import Stage, StagePosition
from hyper_parallel.core.pipeline.tied import TiedWeights
from hyper_parallel.trainer.loop import RunGroups, communicate_gradients, finish_step, training_step
from hyper_parallel.trainer.optimizer import build_optimizer
from hyper_parallel.trainer.parallelize import Parallelized, ShareOfLoss
from sim.kernel.threads import collector_paused
from sim.mesh.job import Job, StagePart
from sim.mesh.program import COMPUTE, HostWait, Place, Program
from sim.mesh.recipe import Routing
from sim.mesh.recordings.derive import Anchor, derive
from sim.mesh.recordings.library import recordings
from sim.mesh.tracing.build import Built, build_of_run, build_stage
from sim.mesh.tracing.categories import ON_HOST, find_categories, standing_blocks
from sim.mesh.tracing.fusion import fuse
from sim.mesh.tracing.kernels import AcceleratorKernels
from sim.mesh.tracing.kinds import having
from sim.mesh.tracing.lone import LoneWorld
from sim.mesh.tracing.record import Recorder
from sim.mesh.tracing.stitch import (
    Key,
    Recording,
    UsedPlan,
    Weight,
    expand,
    fullest_seat,
    kept_layers,
    sends_end,
    stitch,
    variant_of,
)
from sim.ops import local_part

_LARGE = float(2**60)
_TOKEN_AXES = ("dp_replicate", "dp_shard", "ep", "cp")  # along which ranks have other tokens


def trace(job: Job, *, every_layer: bool = False) -> list[Program]:
    """Return what each rank of the pipeline does in a step: one program per place along pp, or one in all.

    Ranks that differ in their place along other axes only do the same, so a program stands for all of them.

    Args:
        job: what is estimated.
        every_layer: record every layer, rather than a few and repeat what the middle ones do.
    """
    if every_layer:
        return _programs(job, every_layer=True)
    return recordings.programs(job, lambda: _programs(job))


def _programs(job: Job, *, every_layer: bool = False) -> list[Program]:
    by_kind: dict[Any, Anchor] = {}
    parts = job.stages()
    ready: dict[int, Recording] = {}
    for part in parts:
        kind, layers = _kind(job, part), list(part.layers)
        # What stages of one kind do is the same; who they do it with, and which layers these are, is not.
        # What is offloaded, and copied, does not follow from other degrees.
        derives = kind in by_kind and not job.recipe.activations.offload
        known = derive([by_kind[kind]], job, part, layers) if derives else None
        ready[part.index] = known or record_stage(job, part, every_layer=every_layer)
        by_kind.setdefault(kind, Anchor(job, part, tuple(layers), ready[part.index]))
    if (
        job.recipe.parallel.whole_parameters
        and not job.is_skewed
        and (seat := fullest_seat(job, parts, ready)) != job.seat
    ):
        return _programs(dataclasses.replace(job, seat=seat), every_layer=every_layer)  # the same on all of its ranks
    programs = [fuse(program) for program in stitch(job, parts, ready)]
    for program in programs:
        program.on_host = frozenset(block for block, name in program.categories.items() if name == ON_HOST)
    return _steps_of(job).finish(job, programs)


def _steps_of(job: Job) -> type[StageRun]:
    """Return the class that takes the step."""
    return job.recipe.steps or StageRun


def _kind(job: Job, part: StagePart) -> Any:
    layers = tuple(job.model.layer_kinds[layer] for layer in part.layers)
    ranks = {other.index: other.rank for other in job.stages()}
    near = tuple(ranks.get(part.index + step) == part.rank for step in (-1, 1))  # whose values need no message
    return (layers, part.is_first, part.is_last, near)


def record_stage(job: Job, part: StagePart, *, every_layer: bool = False) -> Recording:
    """Record a stage: building it, and the second of two steps, with three micro-batches at most."""
    kinds = [job.model.layer_kinds[layer] for layer in part.layers]
    steps = _steps_of(job)
    few = (
        not every_layer
        and job.model.has_stages
        and job.recipe.optimizer_name not in steps.all_at_once
        and job.recipe.activations.first is None
        and job.recipe.activations.every == 1
    )
    kept = kept_layers(part.layers, kinds) if few else list(part.layers)

    def record() -> Recording:
        recorder = Recorder()
        recorder.has_host = offloads
        recorder.ring_kernel, recorder.machine = job.ring_kernel, job.machine
        with LoneWorld(job.dims.world_size, job.rank_of_stage_rank(part.rank), recorder) as world:
            return world.run_alone(steps(job, part, kept, recorder).record)

    offloads = job.recipe.activations.offload
    recording = recordings.get(job, part, kept, record, fresh=every_layer or offloads)
    return expand(recording, list(part.layers), kept)


class StageRun:
    """One stage on the living rank, which is built and takes its step as with our trainer.

    `Recipe.steps` names a subclass, with methods of another trainer.
    """

    all_at_once: tuple[str, ...] = ("muon",)
    """Optimizers that work on all layers together, so that none is repeated."""

    def __init__(self, job: Job, part: StagePart, kept: list[int], recorder: Recorder) -> None:
        self.job, self.part, self.kept, self.recorder = job, part, kept, recorder
        self.count = 1
        self.segments: dict[Key, list[tuple[int | None, list[Any]]]] = {}
        self.built: Built

    def record(self) -> Recording:
        """Build, take a step to make the optimizer's state, and record the next one."""
        job, recorder = self.job, self.recorder
        _build_meshes(job.dims)
        groups = _Numbers(self)
        # Of tensors without values torch cannot tell that they are detached.
        warnings.filterwarnings("ignore", message="To construct DTensor from torch.Tensor")
        kernels = AcceleratorKernels(norms=job.recipe.norm == "fused")
        with recorder.recording(), kernels, _collecting(), job.model.naming():
            recorder.place = Place("build")
            built = self.built = self.build()
            (job.recipe.routing or Routing()).give_to(built.module, lambda: recorder.emit(HostWait(COMPUTE)))
            optimizer = self.make_optimizer()
            if self.is_trainers:
                built.module.register_forward_pre_hook(self._begin_micro_batch, prepend=True)
            for count in (1, min(job.microbatches, 3)):  # the first step makes the optimizer's state
                self.count, self.index = count, 0
                recorder.cut()
                self.segments = {}
                if self.is_trainers:
                    self._step(built, optimizer, groups)
                else:
                    self._step_of_others(built, optimizer, groups)
            standing = standing_blocks(recorder, built, self.states(), optimizer)
            categories = find_categories(recorder, job, standing, self.segments)
            categories.update(dict.fromkeys(recorder.on_host, ON_HOST))
        return Recording(
            groups=list(recorder.groups),
            places=list(recorder.places),
            categories=categories,
            sizes=dict(recorder.sizes),
            standing=standing,
            segments=self.segments,
            even=_even_shards(built.module, job.dims.dp_shard),
            splits=self._splits(),
            weights=self._weights(),
            plans=tuple([UsedPlan.of(*used) for used in recorder.plans]),
        )

    # -- parts that differ between trainers ------------------------------------------------------------------------

    @property
    def is_trainers(self) -> bool:
        """Whether the trainer's own function takes the step."""
        return self.job.model.family != "custom"

    def build(self) -> Built:
        """Build the stage, by the trainer's own function where it knows the model."""
        job = self.job
        if job.is_trained:
            return build_of_run(job.recipe, job, self.part, self.kept, self.recorder)
        return build_stage(job, self.part, self.kept, self.recorder)

    def make_optimizer(self) -> torch.optim.Optimizer | None:
        """Make the optimizer; None: an engine has it in it."""
        module, recipe = self.built.module, self.job.recipe
        if (make := getattr(self.job.model.config, "optimizer", None)) is not None:
            params = [param for param in module.parameters() if param.requires_grad]
            return make(params or [torch.nn.Parameter(torch.empty(0))])
        return build_optimizer(module.named_parameters(), recipe.optimizer, recipe.precision.dtype("moments"))

    def states(self) -> Iterable[tuple[torch.Tensor, str, int | None]]:
        """Return tensors that an engine keeps between steps, each with its category and its layer."""
        return ()

    def communicate(self, flag: bool) -> None:
        """Let the next backward reduce gradients over ranks, or let it only add them up."""
        communicate_gradients(self.built.module, flag)

    def loss(self, output: Any, targets: Any) -> torch.Tensor:
        """Return the loss of the model's output, and of its inputs or its targets."""
        if self.job.model.family == "custom":
            return self.job.model.loss(output, targets)
        return ShareOfLoss()(output, targets[0] if isinstance(targets, tuple) else targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a micro-batch, outside of a pipeline."""
        loss.backward()

    def begins_all_stages(self) -> bool:
        """Whether a rank of a pipeline has begun each of its stages before the first of them ends."""
        return self.job.recipe.parallel.pipeline.begins_all_stages(self.job.microbatches, self.job.dims.pp)

    @staticmethod
    def finish(job: Job, programs: list[Program]) -> list[Program]:
        """Return the programs of all ranks, as they are."""
        del job
        return programs

    def close(self, name: str, variant: str) -> None:
        """End a segment: what has been recorded since the last one's end."""
        self.segments[name, self.part.index, variant] = self.recorder.chunks()

    def _step(self, built: Built, optimizer: Any, groups: _Numbers) -> None:
        """Take a step as `Trainer.step` does."""
        job, recorder = self.job, self.recorder
        model = self._parallelized(built)
        recorder.place = Place("forward")
        (tokens,) = job.model.inputs(job.batch, job.local_seq_len)
        inputs = tokens[: self.count * job.micro_batch]
        targets = torch.empty_like(tokens)[: self.count * job.micro_batch]
        share: Any = self.start_loss if job.dims.pp_enabled else self._share
        groups.count(targets)
        training_step(
            model,
            optimizer,
            inputs,
            targets,
            share=share,
            groups=groups,
            **(job.recipe.step_options() | {"accumulate": self.count}),
        )
        recorder.answer = None
        del tokens, inputs, targets, model
        self.close("optimizer", "only")

    def _begin_micro_batch(self, module: nn.Module, args: Any) -> None:
        """Without a pipeline: what comes next is the forward of a micro-batch."""
        del module, args
        if self.job.dims.pp_enabled:
            return
        if self.index == 0:
            self.close("begin", "only")
        else:
            self.close("backward", variant_of(self.index - 1, self.count))
        self.recorder.place = Place("forward")

    def _share(self, logits: Any, targets: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch, after which comes its backward."""
        loss = self.start_loss(logits, targets)
        self.close("forward", variant_of(self.index, self.count))
        self.recorder.place = Place("backward")
        self.index += 1
        return loss

    def end_backwards(self) -> None:
        """All gradients are there: what comes next are numbers, and the update."""
        recorder = self.recorder
        if self.job.dims.pp_enabled:
            self.close("reduce", "only")
        else:
            self.close("backward", variant_of(self.count - 1, self.count))
        self._note_gradients()
        recorder.answer = _LARGE  # a norm that is above every limit: gradients are scaled down

    def _note_gradients(self) -> None:
        recorder = self.recorder
        recorder.place = Place("optimizer")
        for param in self.built.module.parameters():
            if param.grad is not None:
                grad = param.grad
                recorder.gradients.add(recorder.block_of(local_part(grad)))

    def _splits(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups over which weights are split, in their order; a weight of two stages counts once."""
        numbers = {tuple(group.ranks): number for number, group in enumerate(self.recorder.groups)}
        copies = {"head.weight"} if self.part.is_last and self.job.tied_ranks is not None else set()
        found: dict[tuple[int, ...], None] = {}
        for name, param in self.built.module.named_parameters():
            if not isinstance(param, DTensor) or name in copies:
                continue
            mesh, axes = mesh_among(param.device_mesh), enumerate(param.placements)
            split = [mesh.get_group(axis) for axis, each in axes if not (each.is_replicate() or each.is_partial())]
            ranks = [tuple(dist.get_process_group_ranks(group)) for group in split]
            found[tuple(dict.fromkeys([numbers[each] for each in ranks if each in numbers]))] = None
        return tuple(found)

    def _weights(self) -> tuple[Weight, ...]:
        """Return the weights that are split, and over which axes of ranks."""
        layers = {id(param): number for number, block in self.built.blocks for param in block.parameters()}
        sizes = [getattr(self.job.dims, axis) for axis in RANK_ORDER]
        found = []
        for param in self.built.module.parameters():
            if not isinstance(param, DTensor):
                continue
            among = mesh_among(param.device_mesh)
            axes: list[tuple[str, ...]] = []
            for at in range(among.ndim):
                ranks = dist.get_process_group_ranks(among.get_group(at))
                places = np.array(np.unravel_index(ranks, sizes))
                axes.append(tuple([axis for axis, along in zip(RANK_ORDER, places, strict=True) if len({*along}) > 1]))
            owner = (axes[-1], param.device_mesh.owner) if isinstance(param.device_mesh, OwnerMesh) else None
            by_dim = Layout.of(param).splits(param.ndim)
            splits = tuple(
                [tuple([axes[at] for at in some if owner is None or at < among.ndim - 1]) for some in by_dim]
            )
            found.append(Weight(layers.get(id(param)), param.element_size(), tuple(param.shape), splits, owner))
        return tuple(found)

    def balance(self, taken: bool) -> None:
        """Update the biases of routers."""
        built = self.built
        if built.trained is not None:
            built.trained.after_step(taken)
        elif any(isinstance(module, Router) for module in built.module.modules()):
            tokens = self.job.dims.mesh_over(*_TOKEN_AXES)
            update_expert_bias(built.module, [] if tokens is None else [tokens])

    def _step_of_others(self, built: Built, optimizer: Any, groups: _Numbers) -> None:
        """Take a step of any module, or one of another trainer."""
        if self.job.dims.pp_enabled:
            spec, size = self.job.model, (self.job.micro_batch, self.job.local_seq_len)
            self._run_stage(built, lambda: (spec.inputs(*size),) * 2)
        else:
            self._plain_step(built)
        self.update(optimizer, groups)

    def _plain_step(self, built: Built) -> None:
        """Forward and backward of each micro-batch."""
        job, recorder, spec = self.job, self.recorder, self.job.model
        self.close("begin", "only")
        for index in range(self.count):
            variant, is_last = variant_of(index, self.count), index == self.count - 1
            self.communicate(is_last or job.recipe.reductions > 1)
            recorder.place = Place("forward")
            inputs = spec.inputs(job.micro_batch, job.local_seq_len)
            loss = self.plain_loss(inputs)
            self.close("forward", variant)
            recorder.place = Place("backward")
            self.backward(loss)
            del loss, inputs
            if not is_last:
                self.close("backward", variant)

    def plain_loss(self, inputs: Any) -> torch.Tensor:
        """Compute the loss of a micro-batch, outside of a pipeline."""
        output = self.job.model.call(self.built.module, inputs)
        return self.start_loss(output, inputs)

    def start_loss(self, output: Any, targets: Any) -> torch.Tensor:
        """Begin the loss, and compute it."""
        self.recorder.begin(None)
        self.recorder.place = Place("loss")
        return self.loss(output, targets)

    def _parallelized(self, built: Built) -> Parallelized:
        """The model as the trainer has it, of this stage alone."""
        if not self.job.dims.pp_enabled:
            return Parallelized([built.module], after_step=self.balance)
        pipeline = _LonePipeline(self.job, self.part, built.module, lambda *batch: self._run_batch(built, *batch))
        ends = self.job.tied_ranks
        tied = None
        if ends is not None and (self.part.is_last or (self.part.is_first and ends[0] != ends[1])):
            tied = _LoneTiedWeights(pipeline, ends, self.recorder)
        return Parallelized([built.module], pipeline, tied=tied, after_step=self.balance)

    def _run_batch(self, built: Built, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Take the pipeline's step with the micro-batches of a batch."""
        pairs = zip(inputs.chunk(self.count), targets.chunk(self.count), strict=True)
        batches = (((some,), expected) for some, expected in pairs)
        return self._run_stage(built, lambda: next(batches))

    def _run_stage(self, built: Built, next_batch: Callable[[], tuple[Any, Any]]) -> torch.Tensor:
        """All forwards, then all backwards, of a stage as torch's schedules run it; they change the order only."""
        recorder = self.recorder
        recorder.place = Place("forward")
        hold_parameters(built.module, before=lambda unit: recorder.begin(_layer_of(built, unit)))
        recorder.begin(None)
        stage = self.make_stage()
        targets: list[Any] = []
        stage.begin(targets, training=True)
        self.close("begin", "only")
        losses: list[Any] = []
        for index in range(self.count):
            recorder.place = Place("forward")
            args, expected = next_batch()
            targets.append(expected)
            losses.append(stage.run_forward(index, args))
            del args, expected
            self.close("forward", variant_of(index, self.count))
        for index in range(self.count):
            self.run_backward(stage, index, losses[index])
        stage.wait_for_sends()
        losses.clear()
        targets.clear()
        stage.finish_reductions()
        release_parameters(built.module, failed=False)
        stage.end()
        return torch.zeros(())

    def run_backward(self, stage: RecordedStage, index: int, loss: Any) -> None:
        """Go backward through a micro-batch, at once or in two parts, and behind the last one reduce gradients."""
        recorder, is_last = self.recorder, index == self.count - 1
        recorder.place = Place("backward")
        name = "backward"
        stage.run_backward(index, loss, is_last=is_last)
        if stage.splits_backward:
            self.close("backward_input", variant_of(index, self.count))
            name = "backward_weight"
            stage.run_backward_weight(index, is_last=is_last)
        if is_last:
            recorder.place = Place("reduce")
            stage.perform_reduce_grad(1)
        self.close(name, variant_of(index, self.count))

    def make_stage(self) -> RecordedStage:
        """Make the pipeline's stage, ready for its first micro-batch."""
        job, part, built = self.job, self.part, self.built
        spec, dims = job.model, job.dims
        group, kind = dims.get_mesh("pp").get_group(), job.recipe.parallel.pipeline
        boundary = None
        batch, seq, width = job.micro_batch, job.local_seq_len, spec.hidden_size
        assert width is not None, "a model with stages has a width"
        shape: tuple[int, ...] = (batch, seq, width)
        whole: tuple[int, ...] | None = None
        if dims.tp_enabled:
            along, parts = ("tp", dims.tp) if job.recipe.sequence_parallel else ("None", 1)
            boundary = Layout.from_device_mesh(dims.get_mesh("tp"))("None", along, "None")
            whole, shape = shape, (batch, math.ceil(seq / parts), width)
        between = Meta(shape, job.recipe.precision.dtype("param"), whole)
        tokens = Meta((batch, seq), torch.int64)
        begun = self.begins_all_stages()
        stage = RecordedStage(
            built.module,
            StagePosition(part.index, len(job.stages()), torch.device("cpu"), group, kind.splits_backward, begun),
            Boundary(boundary),
            [tokens if part.is_first else between],
            [] if part.is_last else [between],
            self.start_loss,
            lambda unit: self.recorder.go_on(_layer_of(built, unit)),
        )
        stage.prepare(self.recorder, built, self.count, {part.index: part.rank for part in job.stages()})
        stage.sends_end = sends_end(job.recipe)
        return stage

    def update(self, optimizer: Any, groups: _Numbers) -> None:
        """End a step as the trainer does."""
        model = self._parallelized(self.built)
        if model.tied is not None:
            model.tied.add_gradients()
        limit = self.job.recipe.optimizer.max_grad_norm
        finish_step(model, optimizer, torch.zeros(()), groups=groups, max_grad_norm=limit)
        del model
        self.recorder.answer = None
        self.close("optimizer", "only")


class _Numbers(RunGroups):
    """Groups of the trainer's numbers, which a rank that lives alone never hears of; others do not ask them.

    Args:
        owner: the recording; it hears that all backwards are done.
    """

    def __init__(self, owner: StageRun) -> None:
        job = owner.job
        kept = torch.promote_types(job.recipe.precision.dtype("param"), torch.float32)
        super().__init__(job.dims, job.dims.world_size > 1, torch.device("cpu"), kept)
        self._owner = owner
        owner.recorder.reads = job.is_trained

    def count(self, targets: torch.Tensor) -> float:
        """Count tokens of all ranks, if the trainer takes the step."""
        owner = self._owner
        if not owner.job.is_trained:
            return 1.0
        owner.recorder.answer = _LARGE
        counted = super().count(targets)
        owner.recorder.answer = None
        owner.close("count", "only")
        return counted

    def over_shares(self, share: torch.Tensor) -> float:
        """Add up shares, if the trainer takes the step."""
        owner = self._owner
        owner.end_backwards()
        if not owner.job.is_trained:
            return 0.0
        loss = super().over_shares(share)
        owner.close("numbers", "only")
        return loss


class _LonePipeline(Pipeline):
    """The trainer's pipeline, of one stage that is run for itself.

    Args:
        job: what is estimated; its mesh is built.
        part: the stage.
        module: it.
        run: takes the step of a batch.
    """

    def __init__(self, job: Job, part: StagePart, module: nn.Module, run: Callable[..., torch.Tensor]) -> None:
        self.stages = [module]
        self.group = job.dims.get_mesh("pp").get_group()
        self.device = torch.device("cpu")  # where tensors without values are
        self.stage_indices, self.num_stages = (part.index,), len(job.stages())
        self._step = run

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Run forward and backward of a batch."""
        return self._step(inputs, targets)


class _LoneTiedWeights(TiedWeights):
    """A weight that two stages share, of which one is there; the other one is taken to be like it.

    Args:
        pipeline: of the stage.
        ends: ranks along the pipeline of the first stage and of the last.
        recorder: is told where its operations belong.
    """

    def __init__(self, pipeline: Pipeline, ends: tuple[int, int], recorder: Recorder) -> None:
        self._ends, self._recorder = ends, recorder
        super().__init__(pipeline)
        if ends[0] == ends[1]:  # one rank has both, which are recorded apart: the last stage stands for the first
            self._first = self._last

    @property
    def _is_one(self) -> bool:
        return False

    def _gather(self, mine: tuple[Any, Any]) -> list[tuple[Any, Any]]:
        known = mine[0] or mine[1]
        return [
            (known if rank == self._ends[0] else None, known if rank == self._ends[1] else None)
            for rank in range(self._group.size())
        ]

    def add_gradients(self) -> None:
        """Add up both gradients, of which the other one has the same shape."""
        before = self._recorder.place
        self._recorder.begin(None)
        self._recorder.place = Place("optimizer", None, "tied weights")
        super().add_gradients()
        self._recorder.place = before


class RecordedStage(Stage):
    """The stage that torch's schedules run, micro-batch by micro-batch, with what a schedule does around it."""

    group_of_parts: Any = None
    """Ranks that all have what goes between stages, and each send a part; None: each sends all."""
    after_message: Callable[[], object] | None = None
    """What the host does when a message has come."""
    sends_end: str = "each"
    """See `sends_end`."""

    def prepare(self, recorder: Recorder, built: Built, micro_batches: int, owners: dict[int, int]) -> None:
        """Do what a schedule does before its first micro-batch of all.

        Args:
            recorder: of what the stage does.
            built: the stage.
            micro_batches: of a step.
            owners: the rank along the pipeline of each stage.
        """
        self._recorder, self._built = recorder, built
        self._unwaited: list[int] = []  # handles of messages sent
        schedule = ScheduleGPipe(self, micro_batches, loss_fn=lambda loss, target: loss, scale_grads=False)
        self.has_backward = True
        # Torch asks the neighbours whether all shapes are known. Whoever they are, it is told yes.
        self.stage_index_to_group_rank = dict.fromkeys(owners, (self.group_rank + 1) % self.group_size)
        with having(recorder, asleep=True, answer=1.0):
            schedule._initialize_stage((), {})
        self.stage_index_to_group_rank = owners

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart."""
        return self._splits_backward

    def run_forward(self, index: int, args: Any) -> Any:
        """Receive what a micro-batch needs, compute, and send what comes of it; return the loss, if it is one."""
        if self._is_near(-1):
            with having(self._recorder, borrows=True):  # the stage before keeps it until its own backward
                given = tuple(torch.empty(meta.shape, dtype=meta.dtype) for meta in self.received)
            self.set_local_fwd_input(given, index)
            del given
        else:
            self._receive(self.get_fwd_recv_ops(index))
        output = self.forward_one_chunk(index, args, {}, save_forward_output=False)
        self._recorder.begin(None)
        if self.is_last:
            return output
        del output
        if not self._is_near(1):
            self._send(self.get_fwd_send_ops(index))
        return None

    def run_backward(self, index: int, loss: Any, *, is_last: bool) -> None:
        """Receive gradients, compute those of the inputs, and of the weights if they are not split, and send."""
        if index == 0 and self.sends_end == "phase":
            self.wait_for_sends()
        if self._is_near(1):
            self.set_local_bwd_input(tuple(torch.empty(meta.shape, dtype=meta.dtype) for meta in self.sent), index)
        else:
            self._receive(self.get_bwd_recv_ops(index))
        full = not self._splits_backward
        self.backward_one_chunk(index, loss=loss, full_backward=full, last_backward=full and is_last)
        self._recorder.begin(None)
        if self._is_near(-1):
            self.get_local_bwd_output(index)
        else:
            self._send(self.get_bwd_send_ops(index))

    def run_backward_weight(self, index: int, *, is_last: bool) -> None:
        """Compute the gradients of the weights."""
        self._recorder.place = Place("backward")
        self.backward_weight_one_chunk(index, last_backward=is_last)
        self._recorder.begin(None)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        """Compute the gradients of a micro-batch; those of weights, layer by layer."""
        if backward_type == "weight":
            groups = _InLayers(bwd_kwargs["param_groups"], self._recorder, self._built)
            bwd_kwargs = {**bwd_kwargs, "param_groups": groups}
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **kw)

    def wait_for_sends(self) -> None:
        """Let the device wait for what has been sent."""
        for handle in self._unwaited:
            self._recorder.wait_for(handle)
        self._unwaited.clear()

    def _is_near(self, step: int) -> bool:
        """Whether the stage before, or after, is one of this rank's."""
        return self.stage_index_to_group_rank.get(self.stage_index + step) == self.group_rank

    def _receive(self, ops: list[Any]) -> None:
        parts = [self._part(op.tensor) for op in ops]
        works = [op.op(part, op.peer, op.group) for op, part in zip(ops, parts, strict=True)]
        for op, part, work in zip(ops, parts, works, strict=True):
            work.wait()
            if self.after_message is not None:
                self.after_message()
            if part is not op.tensor:
                all_gather(op.tensor, part, self.group_of_parts).wait()

    def _send(self, ops: list[Any]) -> None:
        for op in ops:
            work = op.op(self._part(op.tensor), op.peer, op.group)
            if self.sends_end == "each":
                work.wait()
            else:
                self._unwaited.append(self._recorder.latest_handle)

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """What one rank sends and receives of a tensor."""
        if self.group_of_parts is None or tensor.numel() % self.group_of_parts.size():
            return tensor
        return tensor.flatten()[: tensor.numel() // self.group_of_parts.size()]


class _InLayers(list[Any]):
    """Groups of weights whose gradients torch computes together; a recorder hears to which layer the next one belongs.

    Args:
        groups: of torch's.
        recorder: is told.
        built: the stage whose weights they are.
    """

    def __init__(self, groups: list[Any], recorder: Recorder, built: Built) -> None:
        super().__init__(groups)
        self._recorder = recorder
        self._layers = {id(weight): number for number, block in built.outer for weight in block.parameters()}
        self._numbers = {id(weight): number for number, weight in enumerate(built.module.parameters())}

    def __iter__(self) -> Iterator[Any]:
        before: int | None = None
        for group in super().__iter__():
            # A set of torch's, in whatever order: layers that do the same are to do it in the same order.
            group["params"] = sorted(group["params"], key=lambda node: self._numbers[id(node.variable)])
            layers = {self._layers.get(id(node.variable)) for node in group["params"]}
            layer = layers.pop() if len(layers) == 1 else None
            if layer != before:
                self._recorder.begin(layer)
                before = layer
            self._recorder.place = Place("backward", layer)
            yield group
        self._recorder.begin(None)
        self._recorder.place = Place("backward")


def _build_meshes(dims: ParallelDims) -> None:
    """Make all meshes that a step uses: where tensors have no values none can be made."""
    dims.build_mesh("cpu")
    dims.data_mesh()
    dims.mesh_over(*_TOKEN_AXES)
    dims.mesh_over("dp_shard", "ep", "cp")
    dims.mesh_over("dp_shard", "cp")
    dims.mesh_over("dp_replicate")
    if dims.ep_enabled:
        dims.mesh_over(*dims.expert_axes)
        dims.data_mesh(experts=True)


def _layer_of(built: Built, unit: Any) -> int | None:
    """The layer that a unit of `fully_shard` belongs to; None: to none."""
    own = unit.modules[0]
    for number, outer in built.outer:
        if any(module is own for module in outer.modules()):
            return number
    return None


def _even_shards(module: nn.Module, shards: int) -> int:
    """Return a number such that whatever divides it splits all weights into shards of one size."""
    found = 0
    for param in module.parameters():
        if not isinstance(param, DTensor):
            continue
        for dim, size in enumerate(param.shape):
            ranks = [
                param.device_mesh.size(axis)
                for axis, placement in enumerate(param.placements)
                if getattr(placement, "dim", None) == dim
            ]
            others = math.prod(ranks) // shards if math.prod(ranks) % shards == 0 else math.prod(ranks)
            found = math.gcd(found, size // others if size % others == 0 else 1) if ranks else found
    return max(found, 1)


@contextmanager
def _collecting() -> Iterator[None]:
    """Collect what the recording before has left, and nothing during this one."""
    gc.collect(1)  # a walk over all that a process has takes longer than to record
    with collector_paused():
        yield
