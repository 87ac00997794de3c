"""The model of one stage on the one living rank, built as training does: the same plan, engine and order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.activations.api import ActivationPolicy, checkpointed
from hyper_parallel.core.activations.offload import ActivationOffload
from hyper_parallel.core.context_parallel.api import context_parallel
from hyper_parallel.core.pipeline.split import StageSlice
from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.parallelize import (
    BuildHooks,
    Parallelized,
    ShareOfLoss,
    in_dtype,
    shard_blocks,
)
from hyper_parallel.trainer.parallelize_llama import parallelize_llama
from sim.mesh.job import Job, StagePart
from sim.mesh.program import Place
from sim.mesh.tracing.compiled import compile_block, compile_pieces
from sim.mesh.tracing.record import Recorder
from sim.ops import tensors_of


@dataclass
class Built:
    """A stage, ready to be run.

    Attributes:
        module: the model, or the stage.
        blocks: by the number of the layer.
        outer: what stands in the model in their places, with what is around them.
        trained: what the trainer's own function has built; None: it is not the trainer's model.
    """

    module: nn.Module
    blocks: list[tuple[int, nn.Module]]
    outer: list[tuple[int, nn.Module]]
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
            follow_block(recorder, number, block, is_first=number == blocks[0][0])

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
    stored = recipe.precision.dtype("master")
    module = spec.build(job.seq_len, layers, embed=part.is_first, head=part.is_last)
    in_dtype(module, lambda _: stored, buffers=stored if stored == torch.float64 else None)
    spec.split(module, dims, recipe)
    if dims.cp_enabled and layers:
        context_parallel(module, dims.get_mesh("cp"), dims.ulysses_degree)
    blocks = spec.blocks(module)
    for number, block in blocks:
        follow_block(recorder, number, block, is_first=number == blocks[0][0])
    outer = checkpoint_blocks(job, part, module, blocks, recipe.activations)
    shard_weights(job, module, outer)
    return Built(module, blocks, outer)


def shard_weights(job: Job, module: nn.Module, outer: list[tuple[int, nn.Module]]) -> None:
    """Shard the weights of a stage; `outer` is what stands in it in the places of its layers."""
    zero = max(job.recipe.zero, 2)  # without a stage of sharding another engine shards
    shard_blocks(module, [block for _, block in outer], job.dims, job.recipe.with_zero(zero))


def follow_block(recorder: Recorder, layer: int, block: nn.Module, *, is_first: bool) -> None:
    """Let the recorder know when a layer begins, forward and backward, and which of its children runs."""

    def begins(module: nn.Module, args: Any) -> None:
        del module
        place = recorder.place
        if place.phase == "forward":
            recorder.begin(layer)
            recorder.place = place._replace(layer=layer, module="", watched=recorder.is_watched)
            given = next((t for t in tensors_of(args) if t.requires_grad), None)
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
        first = next((t for t in tensors_of((output,)) if t.requires_grad), None)
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


def checkpoint_blocks(
    job: Job, part: StagePart, module: nn.Module, blocks: list[tuple[int, nn.Module]], policy: ActivationPolicy
) -> list[tuple[int, nn.Module]]:
    """Compile blocks, and wrap those that backward computes again; return what stands in the model in their places."""
    recipe = job.recipe
    graphs: dict[Any, Any] = {}
    offload = ActivationOffload() if policy.offload else None
    chosen = {layer for number, layer in enumerate(part.layers) if policy.takes(number)}
    names = {id(child): name for name, child in module.named_modules()}
    outer: list[tuple[int, nn.Module]] = []
    for number, block in blocks:
        kind = policy.kind if number in chosen else "none"
        is_done = recipe.parallel.fuses and compile_block(block, kind, graphs=graphs)
        wrapped = block
        if number in chosen:
            wrapped = checkpointed(block, replace(policy, recompute="none") if is_done else policy, offload)
        if wrapped is not block:
            parent, _, name = names[id(block)].rpartition(".")
            module.get_submodule(parent)._modules[name] = wrapped
        outer.append((number, wrapped))
    return outer
