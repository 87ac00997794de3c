"""Conventions of other trainers: messages between stages, tokens to experts, weights, heads, and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from benchmarks.published.lifetimes import allocate_as_fsdp2, free_after_last_use
from benchmarks.published.zero import broadcast_weights, fetch_weights, reduce_whole_gradients
from sim.mesh.job import Job
from sim.mesh.program import MEMORY_KINDS, Alloc, Comm, Event, Free, HostWait, Op, Program, Segment, Touch, Wait

__all__ = [
    "MegatronConventions",
    "cast_weights_once",
    "copy_gradients",
    "copy_to_nodes",
    "expose_weights",
    "gather_float8",
    "gather_heads",
    "keep_float8_weights",
    "measure_loss",
    "multiply_experts_in_float8",
    "slide_window",
    "split_dispatch",
]

DEVICES_PER_NODE = 8
"""Of the machines that the rows with such exchanges ran on."""


@dataclass(frozen=True)
class MegatronConventions:
    """What such a trainer does otherwise.

    Args:
        scatter_gather: with tensor parallelism that is not sequence-parallel: ranks along tp, which all have what goes
            from stage to stage, send a part each, and gather it on the other side (Narayanan et al. 2021, section 4.1).
        blocking_messages: the host waits for what comes from other stages before it issues more, as Megatron-LM's and
            DeepSpeed's pipelines do; else the device alone waits.
        waits_for_sends: the device waits for each message that it sends, as Megatron-LM's does unless it overlaps them;
            else as torch's schedules do.
        split_dispatch: with etp > 1: each rank along tp sends a part of the tokens to experts, and these gather them,
            as in Megatron-LM; else each of these ranks sends all of them.
        graph: what runs as a graph of operations, each value of which is freed after its last use: "model" (its forward
            and its backward), "step" (with the loss), or "" (nothing).
        fsdp2: with zero >= 2: buffers of weights and gradients are on the streams, and live as long, as torch's FSDP2
            has it: "root" (embedding, norm and head are one unit, and the last block is kept from forward to backward),
            "parts" (the embedding is a unit of its own, and of the blocks none is kept), or "" (as our engine has it).
        exposed_weights: with zero >= 2: weights are gathered, and gradients reduced, while nothing is computed.
        node_copies: one copy of a token goes to each node that has some of its experts, as with DeepEP; else one to
            each of its experts.
        gathers_heads: with tensor parallelism and norms of queries and keys: these are gathered after the norm, so that
            every rank turns those of all heads, as torchtitan's Qwen3 did before 2025-10-14.
        loss_metrics: how many metrics compute the loss of a micro-batch again, without gradients, as Composer's do.
        float8_weights: with float8: the weights that products read are kept in float8, and transposed beside, in place
            of bfloat16, as TransformerEngine's primary weights are on Hopper; else each micro-batch makes its own.
        float8_gathers: with float8 and sequence parallelism: what products in float8 read is cast before it is gathered
            along tp, and so are gradients, as TransformerEngine and torchao do it.
        float8_casts_once: with float8: weights are cast in the first forward of a step, and not for each micro-batch,
            as in Megatron-core.
        float8_experts: with float8: products of experts are in float8, too; else in bfloat16.
        gradient_copies: all gradients are copied to float32 before the first weight is updated, and live until the next
            step, as in Megatron-LM's distributed optimizer where gradients are reduced in another dtype.
        owned_weights: with zero == 1: a weight's state is owned by one rank as a whole: gradients are all-reduced in
            large buckets, and owners broadcast what they have updated, as in InternEvo of July 2023.
        fetched_weights: with zero == 3 and data parallelism alone: the host waits for everything before each module's
            weight is gathered and when it has come, as in DeepSpeed 0.3.13.
        keeps_maxima: selective checkpointing keeps the results of `abs` and `max` as well, which casts to float8 take
            of all that is multiplied, as torchtitan's did until 2025-02-04; where blocks are not compiled.
        window: tokens that one attends to, itself among them, in causal attention; 0: all before it.
    """

    scatter_gather: bool = False
    blocking_messages: bool = False
    waits_for_sends: bool = False
    split_dispatch: bool = False
    graph: str = ""
    fsdp2: str = ""
    exposed_weights: bool = False
    node_copies: bool = False
    gathers_heads: bool = False
    loss_metrics: int = 0
    float8_weights: bool = False
    float8_gathers: bool = False
    float8_casts_once: bool = False
    float8_experts: bool = False
    gradient_copies: bool = False
    owned_weights: bool = False
    fetched_weights: bool = False
    keeps_maxima: bool = False
    window: int = 0

    def __str__(self) -> str:
        said = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        return "; ".join(name if value is True else f"{name} {value}" for name, value in said.items() if value)

    @property
    def posts_early(self) -> bool:
        """Whether a receive may be posted before the host has got to it."""
        return not self.blocking_messages

    @property
    def kept_results(self) -> frozenset[Any]:
        """Operators whose results selective checkpointing keeps beside its own."""
        aten = torch.ops.aten
        return frozenset({aten.abs.default, aten.max.default}) if self.keeps_maxima else frozenset()

    def prepare_stage(self, job: Job, stage: Any, recorder: Any) -> None:
        """Let a stage send and receive as Megatron-LM's pipelines do, before its first micro-batch."""
        if self.blocking_messages:
            stage.after_message = lambda: recorder.emit(HostWait(None))
        if self.scatter_gather and job.dims.tp_enabled and not job.recipe.sequence_parallel:
            stage.group_of_parts = job.dims.get_mesh("tp").get_group()

    def rewrite(self, job: Job, program: Program) -> Program:
        """Return the program with what such a trainer does otherwise in its events."""
        if self.graph:
            program = free_after_last_use(program, with_loss=self.graph == "step")
        elif self.fsdp2 == "parts" and job.recipe.zero >= 2:
            config = job.model.config  # its embedding is split along tp, too
            size = config.vocab_size * config.hidden_size * job.recipe.precision.dtype("param").itemsize // job.dims.tp
            program = allocate_as_fsdp2(program, embedding=size)
        elif self.fsdp2 and job.recipe.zero >= 2:
            program = allocate_as_fsdp2(program, keeps_last=job.recipe.zero == 3)
        if self.exposed_weights and job.recipe.zero >= 2:
            program = expose_weights(program)
        if self.owned_weights and job.recipe.zero == 1:
            program = broadcast_weights(reduce_whole_gradients(program))
        if self.fetched_weights and job.recipe.zero == 3 and job.dims.dp_shard == job.dims.world_size:
            program = fetch_weights(program)
        if self.split_dispatch and job.dims.ep_enabled and job.dims.etp > 1:
            program = split_dispatch(program)
        if self.node_copies and job.dims.ep_enabled:
            config = job.model.config
            program = copy_to_nodes(program, config.num_experts, config.experts_per_token)
        if self.gathers_heads and job.dims.tp_enabled:
            program = gather_heads(program)
        if self.loss_metrics:
            program = measure_loss(program, job.model.config.vocab_size, self.loss_metrics)
        if self.window:
            program = slide_window(program, self.window)
        if self.float8_weights and "float8" in job.recipe.kernels:
            program = keep_float8_weights(program)
        if self.float8_gathers and "float8" in job.recipe.kernels:
            program = gather_float8(program)
        if self.float8_casts_once and "float8" in job.recipe.kernels:
            program = cast_weights_once(program)
        if self.float8_experts and "float8" in job.recipe.kernels:
            program = multiply_experts_in_float8(program)
        return copy_gradients(program) if self.gradient_copies else program


# Weights whose gathers are steps of the computation's own graph (MindSpore)


def expose_weights(program: Program) -> Program:
    """Return the program with communication between data-parallel ranks in the order of what is computed.

    It starts after what was queued to be computed, and what is computed next starts after it.

    Args:
        program: not changed.
    """
    shards = {number for number, group in enumerate(program.groups) if "dp_shard" in group.axis}
    segments = {}
    for key, segment in program.segments.items():
        events: list[Event] = []
        for event in segment.events:
            if isinstance(event, Comm) and event.group in shards:
                events += [event._replace(stream=0), Wait(event.handle, 0)]
            else:
                events.append(event)
        segments[key] = replace(segment, events=events)
    return replace(program, segments=segments)


# Tokens on their way to experts, where tensors are split within experts (Megatron-core, MoEAlltoAllTokenDispatcher)


def split_dispatch(program: Program) -> Program:
    """Return the program with exchanges along ep that are shared by the ranks along tp.

    In Megatron-LM, ranks along tp have parts of the sequence; each sends its own part's tokens along ep, and those
    along tp gather what they have got. Here every rank along tp is given the whole sequence first, and sends all of it:
    with tp ranks of a node, tp times as much between nodes. A program that was recorded of the latter is changed into
    the former: exchanges along ep are a part as large; one along tp follows those that bring tokens to experts, and
    precedes those that bring results back.

    Args:
        program: not changed; without a group along tp it is returned as it is.
    """
    return _with_more_along_tp(program, partial(_changed, program))


def _with_more_along_tp(program: Program, change: Callable[[Segment, int, int], list[Event]]) -> Program:
    """Return the program with collectives along tp put in.

    Args:
        program: without a group along tp it is returned as it is.
        change: given a segment, the number of that group and the first handle that nobody has, its events.
    """
    along_tp = next((number for number, group in enumerate(program.groups) if group.axis == "tp"), None)
    if along_tp is None:
        return program
    handle = 1 + max((e.handle for s in program.segments.values() for e in s.events if isinstance(e, Comm)), default=0)
    segments = {}
    for key, segment in program.segments.items():
        events = change(segment, along_tp, handle)
        handle += len(events) - len(segment.events)
        segments[key] = replace(segment, events=events)
    return replace(program, segments=segments)


def _changed(program: Program, segment: Segment, along_tp: int, handle: int) -> list[Event]:
    """Return the events of a segment; exchanges bring tokens to experts and results back in turn."""
    parts = len(program.groups[along_tp].ranks)
    events: list[Event] = []
    after: dict[int, list[Event]] = {}  # by the handle that is waited for
    goes_out = True
    for event in segment.events:
        if isinstance(event, Wait) and event.handle in after:
            events += [event, *after.pop(event.handle)]
            continue
        is_counts = isinstance(event, Comm) and event.dtype.startswith("int")
        if not isinstance(event, Comm) or event.op != "all_to_all" or is_counts:
            events.append(event)
            continue
        if program.groups[event.group].axis != "ep":
            events.append(event)
            continue
        op = "all_gather" if goes_out else "reduce_scatter"
        moved = event.size - event.size // parts
        within = event._replace(op=op, group=along_tp, moved=moved, handle=handle, messages=1)
        pair: list[Event] = [within, Wait(handle, event.stream)]
        handle += 1
        exchange = event._replace(size=event.size // parts, moved=event.moved // parts)
        if goes_out:
            after[event.handle] = pair
            events.append(exchange)
        else:
            events += [*pair, exchange]
        goes_out = not goes_out
    return events


# Tokens on their way to experts, one copy for each node (DeepEP)


def copy_to_nodes(program: Program, experts: int, per_token: int) -> Program:
    """Return the program with exchanges of experts over nodes that carry one copy of a token for each node.

    Every token goes to `per_token` different experts. Where all are equally likely, they are on
    n * (1 - C(experts - experts / n, per_token) / C(experts, per_token)) of n nodes at the mean. What a node hands on
    within itself goes over faster links at the same time, and is taken to cost nothing beside.

    Args:
        program: not changed; exchanges within a node stay as they are.
        experts: of a layer.
        per_token: that a token goes to.
    """
    parts = [_copies(group.ranks, experts, per_token) for group in program.groups]
    is_of_experts = [group.axis.startswith("ep") for group in program.groups]

    def changed(event: Event) -> Event:
        if not isinstance(event, Comm) or event.op != "all_to_all" or event.dtype.startswith("int"):
            return event
        if not is_of_experts[event.group]:
            return event
        part = parts[event.group]
        return event._replace(size=int(event.size * part), moved=int(event.moved * part))

    segments = {
        key: replace(segment, events=[changed(event) for event in segment.events])
        for key, segment in program.segments.items()
    }
    return replace(program, segments=segments)


def _copies(ranks: Sequence[int], experts: int, per_token: int) -> float:
    """Return the copies that go over the network, as a part of one for each expert."""
    nodes = len({rank // DEVICES_PER_NODE for rank in ranks})
    if nodes == 1:
        return 1.0
    missed = math.comb(experts - experts // nodes, per_token) / math.comb(experts, per_token)
    return min(1.0, nodes * (1 - missed) / per_token)


# Queries and keys that are gathered behind their norms (torchtitan's Qwen3 until October 2025)


def gather_heads(program: Program) -> Program:
    """Return the program with queries and keys of all heads on every rank, from their norms to attention.

    torchtitan gave these norms the style `NoParallel`, whose output is replicated: DTensor gathers it along tp and
    copies the parts together, rotates what all ranks have, repeats all keys for each query head, and copies each rank's
    heads out for attention, which stays split. Backward does not: the gradients of attention are split. No memory is
    taken for it.

    Args:
        program: not changed; without a group along tp it is returned as it is.
    """
    return _with_more_along_tp(program, partial(_with_all_heads, program))


def _with_all_heads(program: Program, segment: Segment, along_tp: int, handle: int) -> list[Event]:
    parts = len(program.groups[along_tp].ranks)
    changed: list[Event] = []
    norms: list[int] = []  # where they are in `changed`
    for event in segment.events:
        if isinstance(event, Op) and event.name.endswith("_fused_rms_norm"):
            norms.append(len(changed))
        if not isinstance(event, Op) or event.kind != "attention" or len(norms) < 2:
            changed.append(event)
            continue
        (queries, keys), behind = [changed[at] for at in norms[-2:]], changed[norms[-1] + 1 :]
        del changed[norms[-1] + 1 :]
        assert isinstance(queries, Op)
        assert isinstance(keys, Op)
        for norm in (queries, keys):
            block, part = norm.writes[0]
            whole = parts * part
            changed.append(
                Comm("all_gather", along_tp, whole, whole - part, norm.dtype, norm.stream, handle, norm.place)
            )
            changed += [Wait(handle, norm.stream), _copy(norm, block, whole, whole)]
            handle += 1
        changed += [_wider(one, parts) if isinstance(one, Op) and one.kind in MEMORY_KINDS else one for one in behind]
        (block, mine), (_, fewer) = queries.writes[0], keys.writes[0]
        changed += [_copy(queries, block, parts * fewer, parts * mine), *[_copy(queries, block, mine, mine)] * 2, event]
        norms.clear()
    return changed


def _copy(like: Op, block: int, read: int, written: int) -> Op:
    touches = (Touch(block, read),), (Touch(block, written),)
    return Op("aten.clone", "memory", 0, *touches, like.dtype, (), like.stream, like.place)


def _wider(op: Op, parts: int) -> Op:
    reads, writes = ([Touch(block, parts * size) for block, size in side] for side in (op.reads, op.writes))
    return op._replace(reads=tuple(reads), writes=tuple(writes))


# Metrics of the loss (Composer)


def measure_loss(program: Program, vocabulary: int, metrics: int) -> Program:
    """Return the program with the loss computed again by metrics, at the end of each forward.

    Under autocast torch computes cross entropy in float32: each metric makes a float32 copy of the logits, and a
    log-softmax of it. No memory is taken for them.

    Args:
        program: not changed.
        vocabulary: columns of the logits.
        metrics: that compute it.
    """
    segments = {}
    for key, segment in program.segments.items():
        products = [event for event in segment.events if isinstance(event, Op) and event.kind == "matmul"]
        head = products[-1] if products and key[0] == "forward" else None
        events: list[Event] = list(segment.events)
        if head is not None and head.shape[2] == vocabulary:
            block, size = head.writes[0]
            copy, wide = Touch(block, 3 * size), Touch(block, 4 * size)  # 2 bytes to 4; 4 to 4
            cast = head._replace(name="aten._to_copy", kind="memory", flops=0, reads=(copy,), writes=(), shape=())
            softmax = cast._replace(name="aten._log_softmax", reads=(wide,), dtype="float32")
            events += [cast, softmax] * metrics
        segments[key] = replace(segment, events=events)
    return replace(program, segments=segments)


# Attention to the nearest tokens (Mistral)


def slide_window(program: Program, window: int) -> Program:
    """Return the program with causal attention of which each token sees the last ones alone.

    A fused kernel computes the blocks that are seen: as much as attention that is not causal, over as many keys as a
    token sees at the mean.

    Args:
        program: not changed; attention over as many tokens as a window has, or fewer, stays as it is.
        window: tokens, itself among them.
    """

    def changed(event: Event) -> Event:
        if not isinstance(event, Op) or event.kind not in ("attention", "attention_backward") or not event.shape:
            return event
        *heads, queries, keys, size, causal = event.shape
        if not causal or queries != keys or keys <= window:
            return event
        seen, all_of_them = queries * window - window * (window - 1) // 2, queries * (queries + 1) // 2
        shape = (*heads, queries, round(seen / queries), size, 0)
        return event._replace(shape=shape, flops=event.flops * seen // all_of_them)

    segments = {
        key: replace(segment, events=[changed(event) for event in segment.events])
        for key, segment in program.segments.items()
    }
    return replace(program, segments=segments)


# Weights in float8, and gradients in float32 (TransformerEngine, Megatron-LM's distributed optimizer)


def keep_float8_weights(program: Program) -> Program:
    """Return the program without memory for what products in float8 read of weights.

    On Hopper such a product wants both of its matrices along what is summed over: TransformerEngine keeps primary
    weights of one byte per element, and from the first backward on their transposes, of another one
    (`Float8TensorStorage.update_usage`). That is what weights in bfloat16 take, which are not there then. What casts
    them is left in the program: only memory changes.

    Args:
        program: not changed.
    """
    multiplied, casts = _multiplied(program), _cast_of_weights(program)
    operations = [event for segment in program.segments.values() for event in segment.events if isinstance(event, Op)]
    return _without(program, {touch.block for op in operations if casts(op) for touch in op.writes} & multiplied)


def _multiplied(program: Program) -> set[int]:
    """Return the blocks that products in float8 read."""
    operations = [event for segment in program.segments.values() for event in segment.events if isinstance(event, Op)]
    return {touch.block for op in operations if op.name == "aten._scaled_mm" for touch in op.reads}


def _cast_of_weights(program: Program) -> Callable[[Event], bool]:
    """Return what tells whether an event casts a weight, and nothing else, for products in float8."""
    weights = {block for block, name in program.categories.items() if name == "parameters"}
    large = {e.block for s in program.segments.values() for e in s.events if isinstance(e, Alloc) and e.bytes > _SCALE}
    multiplied = _multiplied(program) - weights

    def casts(event: Event) -> bool:
        if not isinstance(event, Op) or event.kind not in ("fused", *MEMORY_KINDS):
            return False
        read = {touch.block for touch in event.reads}
        made = {touch.block for touch in event.writes}
        return bool(read & weights and not (read - weights) & large and made & multiplied)

    return casts


_SCALE = 512
"""Bytes of the smallest block: a scale, or a maximum."""


def _without(program: Program, gone: set[int]) -> Program:
    """Return the program with some blocks never taken."""
    segments = {
        key: replace(
            segment, events=[e for e in segment.events if not (isinstance(e, Alloc | Free) and e.block in gone)]
        )
        for key, segment in program.segments.items()
    }
    return replace(program, segments=segments)


def cast_weights_once(program: Program) -> Program:
    """Return the program with weights that are cast to float8 in the first forward of a step alone.

    Weights do not change within a step. Megatron-core tells TransformerEngine's layers which micro-batch is the first
    (`is_first_microbatch`), and these keep what they have cast, and its transpose, until the next step
    (`get_weight_workspace`). No memory is taken for it.

    Args:
        program: not changed; with one micro-batch, only what is computed again casts no more.
    """
    casts, segments = _cast_of_weights(program), dict(program.segments)
    for key, segment in program.segments.items():
        if key[0] == "backward" or (key[0] == "forward" and key[2] in ("steady", "last")):
            segments[key] = replace(segment, events=[event for event in segment.events if not casts(event)])
    return replace(program, segments=segments)


def gather_float8(program: Program) -> Program:
    """Return the program with gathers along tp of a byte for each element, where products in float8 read what comes.

    Each rank casts its part, and what comes is copied into the transpose that gradients of weights read. In
    TransformerEngine the norm writes float8, and what a layer gets in backward is cast before it is gathered (1.13:
    `_LayerNormLinear.forward`, `grad_output_preprocess`); torchao's `Float8ColwiseParallel`, `PrepareFloat8ModuleInput`
    and `NoopFwToFloat8BwDynamic` cast before DTensor gathers, which is in the graph of a block that is compiled: there
    one kernel lays out what comes. No less memory is taken for it.

    Args:
        program: not changed; without a group along tp it is returned as it is.
    """
    along_tp = {number for number, group in enumerate(program.groups) if group.axis == "tp"}
    multiplied, segments = _multiplied(program), {}
    for key, segment in program.segments.items():
        changed: dict[int, list[Event]] = {}
        for at, event in enumerate(segment.events):
            if isinstance(event, Comm) and event.op == "all_gather" and event.group in along_tp:
                parts = len(program.groups[event.group].ranks)
                changed |= _gathered_float8(segment.events, at, event, parts, multiplied)
        events = [new for at, event in enumerate(segment.events) for new in changed.get(at, (event,))]
        segments[key] = replace(segment, events=events)
    return replace(program, segments=segments)


def _gathered_float8(
    events: Sequence[Event], at: int, gather: Comm, parts: int, multiplied: Container[int]
) -> dict[int, list[Event]]:
    """Return what stands for some events, by their numbers, if what is gathered is cast; else nothing does."""
    size, changed = gather.size // 2, dict[int, list[Event]]()
    for number in range(at + 1, len(events)):
        op = events[number]
        if not isinstance(op, Op):
            continue
        if op.name == "aten.cat" and not changed:
            one = (Touch(op.writes[0].block, size),)
            changed[number] = [op._replace(kind="fused", reads=one, writes=one, shape=())]
            continue
        made = [touch for touch in op.writes if touch.block in multiplied and touch.bytes == size]
        if not made or not any(touch.bytes == gather.size for touch in op.reads):
            break
        (block, _), whole = made[0], [touch for touch in op.reads if touch.bytes == gather.size]
        read = tuple(Touch(block, size) if touch in whole else touch for touch in op.reads)
        changed[number] = [op._replace(reads=read, writes=tuple(touch for touch in op.writes if touch != made[0]))]
        cast = op._replace(reads=(Touch(block, gather.size // parts),), writes=(Touch(block, size // parts),))
        changed[at] = [cast, gather._replace(size=size, moved=gather.moved // 2, dtype="float8_e4m3fn")]
        return changed
    return {}


def multiply_experts_in_float8(program: Program) -> Program:
    """Return the program with products of experts in float8, and what they read cast before its first one.

    Megatron-core's experts are TransformerEngine's layers, grouped or one by one (0.10: gpt_layer_specs.py,
    `_get_moe_module_spec`); these cast to rows and columns at once. Weights are cast once a step, which is left out. No
    less memory is taken for it.

    Args:
        program: not changed.
    """
    ready = {block for block, name in program.categories.items() if name == "parameters"}
    segments = dict(program.segments)
    for key in dict.fromkeys(key for key, _ in program.order):
        events: list[Event] = []
        for event in program.segments[key].events:
            if not isinstance(event, Op) or event.name != "aten._grouped_mm" or event.dtype != "bfloat16":
                events.append(event)
                continue
            halves = {touch: Touch(touch.block, touch.bytes // 2) for touch in event.reads if touch.bytes > _SCALE}
            for read, half in halves.items():
                if read.block not in ready:
                    cast = event._replace(name="aten._to_copy", kind="fused", flops=0, reads=(read,), shape=())
                    events.append(cast._replace(writes=(half, half)))
                    ready.add(read.block)
            reads = tuple(halves.get(touch, touch) for touch in event.reads)
            events.append(event._replace(reads=reads, dtype="float8_e4m3fn"))
        segments[key] = replace(program.segments[key], events=events)
    return replace(program, segments=segments)


def copy_gradients(program: Program) -> Program:
    """Return the program with copies of gradients that live until all weights are updated.

    Megatron-LM copies the gradients of all weights before it updates any (`_copy_model_grads_to_main_grads`), and lets
    the copies go when the next step begins. Here each buffer's are made before its own update; that they all live to
    the end comes to the same bytes.

    Args:
        program: not changed; one whose gradients need no copies is returned as it is.
    """
    gradients = {block for block, name in program.categories.items() if name == "gradients"}
    keys = [key for key, _ in program.order if key[0] == "optimizer"]
    copies: dict[int, None] = {}
    for key in keys:
        for event in program.segments[key].events:
            if (
                isinstance(event, Op)
                and event.kind in MEMORY_KINDS
                and {each.block for each in event.reads} & gradients
            ):
                copies.update(dict.fromkeys(touch.block for touch in event.writes if touch.block not in gradients))
    if not copies:
        return program
    segments = dict(program.segments)
    for key in keys:
        events = [e for e in segments[key].events if not (isinstance(e, Free) and e.block in copies)]
        segments[key] = replace(segments[key], events=events)
    last = segments[keys[-1]]
    segments[keys[-1]] = replace(last, events=[*last.events, *(Free(block) for block in copies)])
    return replace(program, segments=segments, categories=program.categories | dict.fromkeys(copies, "gradients"))
