"""The model of one stage on the one living rank, built as training does: the same plan, engine and order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from hyper_parallel.core.activations.api import ActivationPolicy, checkpointed
from hyper_parallel.core.activations.offload import ActivationOffload
from hyper_parallel.core.context_parallel.api import context_parallel
from hyper_parallel.core.expert_parallel.api import expert_parallel
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy
from hyper_parallel.core.pipeline.split import StageSlice
from hyper_parallel.core.shard.api import shard_module
from hyper_parallel.models.moe import MoELlama
from hyper_parallel.models.moe_plan import parallelize_moe as split_layers_and_experts
from hyper_parallel.trainer.config import Config, ParallelConfig
from hyper_parallel.trainer.parallelize import (
    BuildHooks,
    Parallelized,
    ShareOfLoss,
    in_dtype,
    shard_blocks,
    shard_units,
)
from hyper_parallel.trainer.parallelize_llama import parallelize_llama
from sim.mesh.job import Job, StagePart
from sim.mesh.program import Place
from sim.mesh.tracing.compiled import compile_block, compile_pieces
from sim.mesh.tracing.kernels import use_float8
from sim.mesh.tracing.losses import fuse_head
from sim.mesh.tracing.record import Recorder
from sim.mesh.tracing.replicated import Replicated
from sim.mesh.zoo import MLALlama, mla_plan


@dataclass
class Built:
    """A stage, ready to be run.

    Attributes:
        module: the model, or the stage.
        blocks: by the number of the layer.
        outer: what stands in the model in their places, with what is around them.
        replicated: the engine that keeps whole weights on every rank; None: `fully_shard` has the weights.
        trained: what the trainer's own function has built; None: it is not the trainer's model.
    """

    module: nn.Module
    blocks: list[tuple[int, nn.Module]]
    outer: list[tuple[int, nn.Module]]
    replicated: Replicated | None = None
    trained: Parallelized | None = None


def build_of_run(run: Config, job: Job, part: StagePart, layers: Collection[int], recorder: Recorder) -> Built:
    """Build a stage of a training run, with some of its layers, by the function that `Trainer` calls.

    Called on the living rank, while the recorder records.
    """
    blocks: list[tuple[int, nn.Module]] = []
    graphs: dict[Any, Any] = {}

    def follow(module: nn.Module) -> None:
        blocks.extend(job.model.blocks(module))
        for number, block in blocks:
            _follow(recorder, number, block, is_first=number == blocks[0][0])

    some: Any = layers  # fewer than a stage has, so that they need not follow each other
    kept = StageSlice(part.index, some, part.is_first, part.is_last)
    hooks = BuildHooks([kept], follow, lambda module: compile_pieces(module, graphs))
    device = torch.device("cpu")
    trained = parallelize_llama(run, job.dims, device, ShareOfLoss(), hooks)
    (module,) = trained.parts
    return Built(module, blocks, job.model.blocks(module), trained=trained)


def build_stage(job: Job, part: StagePart, layers: Collection[int], recorder: Recorder) -> Built:
    """Build a stage with some of its layers, in the order in which the trainer applies parallelisms.

    Called on the living rank, while the recorder records.
    """
    dims, recipe, spec = job.dims, job.recipe, job.model
    loss_in_head = recipe.fused_loss and spec.vocab_size is not None
    whole_weights = recipe.zero <= 1
    module = spec.build(job.seq_len, layers, embed=part.is_first, head=part.is_last, recipe=recipe)
    stored = recipe.dtype if whole_weights else recipe.weight_dtype
    in_dtype(module, lambda _: stored, buffers=stored if whole_weights or stored == torch.float64 else None)
    _split_tensors(job, module)
    if loss_in_head:
        fuse_head(module)
    if dims.cp_enabled and layers:
        context_parallel(module, dims.get_mesh("cp"), dims.ulysses_degree)
    blocks = spec.blocks(module)
    for number, block in blocks:
        if recipe.float8:
            use_float8(block, rowwise=recipe.float8 == "rowwise")
        _follow(recorder, number, block, is_first=number == blocks[0][0])
    outer = _checkpoint(job, part, module, blocks)
    if whole_weights:
        layers = {id(param): number for number, block in blocks for param in block.parameters()}
        return Built(module, blocks, outer, Replicated(module, dims, recipe, layers, recorder.begin))
    if recipe.engine == "hsdp":
        run = Config(parallel=ParallelConfig(engine="hsdp", reshard_after_forward=recipe.zero == 3))
        shard_blocks(module, [block for _, block in outer], dims, run)
        return Built(module, blocks, outer)
    casts = recipe.dtype not in (torch.float32, torch.float64)
    policy = MixedPrecisionPolicy(recipe.dtype, recipe.grad_dtype) if casts else MixedPrecisionPolicy()
    if dims.token_ranks > 1 or casts:
        whole, again = recipe.whole_parameters, recipe.zero == 3
        shard_units(module, [block for _, block in outer], dims, policy, reshard_after_forward=again, whole=whole)
        for unit in (*(block for _, block in outer), module):
            _sum_up(unit)
    return Built(module, blocks, outer)


def _sum_up(unit: Any) -> None:
    set_op = getattr(unit, "set_reduce_op_type", None)
    if set_op is not None:
        set_op("sum")


def _split_tensors(job: Job, module: nn.Module) -> None:
    """Tensor, sequence and expert parallelism."""
    dims, recipe = job.dims, job.recipe
    if type(module) is MoELlama and (recipe.sequence_parallel or not dims.tp_enabled):
        if dims.ep_enabled or dims.tp_enabled or dims.cp_enabled:
            options: dict[str, Any] = {"ep": dims.expert_axes, "reshard_inputs": recipe.reshard_inputs}
            options |= {"chunks": recipe.tp_chunks, "ranks_per_node": recipe.ranks_per_node}
            split_layers_and_experts(module, dims.build_mesh(), etp=dims.etp if dims.tp_enabled else None, **options)
        return
    if isinstance(module, MoELlama) and dims.ep_enabled:
        etp = dims.etp if dims.tp_enabled else None
        on_nodes = recipe.ranks_per_node
        expert_parallel(module, dims.build_mesh(), ep=dims.expert_axes, etp=etp, ranks_per_node=on_nodes)
    if not dims.tp_enabled:
        return
    mesh = dims.get_mesh("tp")
    if isinstance(module, MLALlama):
        along, again = recipe.sequence_parallel, recipe.reshard_inputs
        etp = dims.etp if along else None
        shard_module(module, mesh, mla_plan(module, mesh, etp=etp, sequence_parallel=along, reshard_inputs=again))
    elif (plan := job.model.plan(module, mesh, recipe)) is not None:
        shard_module(module, mesh, plan)


def _follow(recorder: Recorder, layer: int, block: nn.Module, *, is_first: bool) -> None:
    """Let the recorder know when a layer begins, forward and backward, and which of its children runs."""

    def begins(module: nn.Module, args: Any) -> None:
        del module
        place = recorder.place
        if place.phase == "forward":
            recorder.begin(layer)
            recorder.place = place._replace(layer=layer, module="", watched=recorder.is_watched)
            given = next((t for t in _tensors_in(args) if t.requires_grad), None)
            if is_first and given is not None:
                given.register_hook(backward_is_through)
        elif place.phase == "backward":
            recorder.place = place._replace(layer=layer, recomputes=True, watched=recorder.is_watched)

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        place = recorder.place._replace(recomputes=False, module="", watched=False)
        recorder.place = place
        if place.phase == "backward":
            return
        first = next((t for t in _tensors_in(output) if t.requires_grad), None)
        if first is not None:
            first.register_hook(backward_begins)

    def backward_begins(gradient: Any) -> None:
        del gradient
        recorder.begin(layer)
        recorder.place = Place("backward", layer)

    def backward_is_through(gradient: Any) -> None:
        del gradient
        recorder.begin(None)
        recorder.place = Place("backward")

    block.register_forward_pre_hook(begins, prepend=True)
    # Also where torch leaves the block by an error, as soon as all that backward needs has been computed again.
    block.register_forward_hook(ends, prepend=True, always_call=True)
    for name, child in block.named_children():

        def enters(module: nn.Module, args: Any, name: str = name) -> None:
            del module, args
            recorder.place = recorder.place._replace(module=name)

        def leaves(module: nn.Module, args: Any, output: Any) -> None:
            del module, args, output
            recorder.place = recorder.place._replace(module="")

        child.register_forward_pre_hook(enters, prepend=True)
        child.register_forward_hook(leaves)


def _tensors_in(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [tensor for each in output for tensor in _tensors_in(each)]
    if isinstance(output, dict):
        return [tensor for each in output.values() for tensor in _tensors_in(each)]
    return []


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


def _checkpoint(
    job: Job, part: StagePart, module: nn.Module, blocks: list[tuple[int, nn.Module]]
) -> list[tuple[int, nn.Module]]:
    """Compile blocks, and wrap those that backward computes again; returns what stands in the model in their places."""
    recipe = job.recipe
    graphs: dict[Any, Any] = {}
    policy = recipe.activations
    if recipe.conventions is not None and recipe.conventions.kept_results:
        said = {field.name: getattr(policy, field.name) for field in fields(policy)}
        policy = _KeepingMore(**said, results=recipe.conventions.kept_results)
    offload = ActivationOffload() if policy.offload else None
    chosen = {layer for number, layer in enumerate(part.layers) if policy.takes(number)}
    names = {id(child): name for name, child in module.named_modules()}
    outer: list[tuple[int, nn.Module]] = []
    for number, block in blocks:
        kind = policy.kind if number in chosen else "none"
        is_done = recipe.compile and compile_block(block, kind, graphs=graphs)
        wrapped = block
        if number in chosen:
            wrapped = checkpointed(block, replace(policy, recompute="none") if is_done else policy, offload)
        if wrapped is not block:
            parent, _, name = names[id(block)].rpartition(".")
            module.get_submodule(parent)._modules[name] = wrapped
        outer.append((number, wrapped))
    return outer
