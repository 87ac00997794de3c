"""The category of each block of memory."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from sim.mesh.program import Alloc, Free, Op
from sim.mesh.tracing.record import Recorder
from sim.mesh.tracing.stitch import Chunk, Key, Standing
from sim.ops import local_part

if TYPE_CHECKING:
    from sim.mesh.job import Job
    from sim.mesh.tracing.build import Built

ON_HOST = "offloaded activations"
"""Category of blocks that are in the host's memory."""


def standing_blocks(
    recorder: Recorder,
    built: Built,
    states: Iterable[tuple[torch.Tensor, str, int | None]],
    optimizer: torch.optim.Optimizer | None,
) -> list[Standing]:
    """Return the blocks that live between two steps, weights first, then an engine's states, the optimizer's, others.

    Args:
        recorder: of the steps.
        built: the stage.
        states: of an engine, each with its category and its layer.
        optimizer: None: the engine has it in it.
    """
    found: dict[int, Standing] = {}

    def note(tensor: torch.Tensor, category: str, layer: int | None) -> None:
        block = recorder.block_of(local_part(tensor))
        if block and block not in found and recorder.sizes[block]:
            found[block] = Standing(block, recorder.sizes[block], category, layer)

    layers = _layer_names(built)
    for name, weight in built.module.named_parameters():
        note(weight, "parameters", _layer_of(name, layers))
    for state in states:
        note(*state)
    if optimizer is not None:
        by_param = {id(param): name for name, param in built.module.named_parameters()}
        for param, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    note(value, "optimizer", _layer_of(by_param.get(id(param), ""), layers))
    for name, buffer in built.module.named_buffers():
        note(buffer, "parameters", _layer_of(name, layers))
    kept = {number for number, _ in built.blocks}
    for block in recorder.live_blocks():
        if block not in found and recorder.sizes[block]:
            layer = recorder.places[recorder.sources[block]].layer
            category = "communication" if block in recorder.gathered else "workspace"
            found[block] = Standing(block, recorder.sizes[block], category, layer if layer in kept else None)
    return list(found.values())


def _layer_names(built: Built) -> dict[str, int]:
    """The layer of each path of a block in the model."""
    numbers = {id(block): number for number, block in built.blocks}
    return {name: numbers[id(child)] for name, child in built.module.named_modules() if id(child) in numbers}


def _layer_of(name: str, layers: dict[str, int]) -> int | None:
    paths = itertools.accumulate(name.split("."), "{}.{}".format)
    return next((layers[path] for path in reversed([*paths]) if path in layers), None)


def find_categories(
    recorder: Recorder, job: Job, standing: list[Standing], segments: dict[Key, list[Chunk]]
) -> dict[int, str]:
    """Return what each block of a recording is for."""
    categories = {each.block: each.category for each in standing}
    freed: dict[int, Key] = {}
    taken: dict[int, Key] = {}
    in_loss: set[int] = set()  # blocks that the loss reads or makes
    weight_gradients: set[int] = set()  # those of a head or an embedding may be as large as the logits
    for key, chunks in segments.items():
        for _, events in chunks:
            for event in events:
                if isinstance(event, Alloc):
                    taken[event.block] = key
                elif isinstance(event, Free):
                    freed[event.block] = key
                elif not isinstance(event, Op):
                    continue
                elif recorder.places[event.place].phase == "loss":
                    in_loss.update([touch.block for touch in (*event.reads, *event.writes)])
                elif key[0].startswith("backward") and _makes_weight_gradient(event, weight_gradients):
                    weight_gradients.update([touch.block for touch in event.writes])
    logits = logit_sizes(job)
    data = re.compile(r"^(all_gather|reduce_scatter|all_reduce|all_to_all) (dp_|loss|shard|fsdp|ep|world|batch)")
    for block, key in taken.items():
        if block in categories:
            continue
        place = recorder.places[recorder.sources[block]]
        spread = recorder.gathered.get(block, "")
        size = recorder.sizes[block]
        if block in recorder.gradients:
            categories[block] = "gradients"
        elif block in recorder.refilled or (spread.startswith("all_gather") and data.match(spread)):
            categories[block] = "gathered weights"
        elif spread.startswith(("reduce_scatter", "all_reduce")) and data.match(spread):
            categories[block] = "communication"
        elif size in logits and (
            block in in_loss or (place.phase == "backward" and place.layer is None and block not in weight_gradients)
        ):
            categories[block] = "logits"
        elif key[0] in ("forward", "backward_input") and freed.get(block) != key:
            categories[block] = "activations"  # or what the gradients of weights need
        elif key[0].startswith("backward") and freed.get(block) != key:
            categories[block] = "gradients"  # added up over micro-batches, or waiting for the optimizer
        else:
            categories[block] = "workspace"
    return categories


def _makes_weight_gradient(op: Op, known: set[int]) -> bool:
    """Return True for a product of backward, an embedding's gradient, and a copy of either in another dtype."""
    if op.kind == "matmul" or op.name.startswith("aten.embedding_dense_backward"):
        return True
    return op.name.startswith("aten._to_copy") and all(touch.block in known for touch in op.reads)


def logit_sizes(job: Job) -> set[int]:
    """Return the bytes that logits of a micro-batch may have: blocks so large outside of layers are taken for them."""
    vocab = job.model.vocab_size
    if vocab is None:
        return set()
    tokens = job.micro_batch * job.local_seq_len
    parts = {vocab, math.ceil(vocab / job.dims.tp)}
    return {tokens * part * width for part in parts for width in (2, 4)}
