"""Bounds of a candidate in microseconds: a lower bound of its memory, and a rough step time.

A search skips what cannot fit by `least_memory`, and looks first at what promises most by `guess_seconds`
and `guess_memory`. None of them is shown as a result. All ask for the shape of the model, a candidate, and the tokens
of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from hyper_parallel.core.activations.api import ActivationPolicy
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.machine.links import Links, NodeSpread, collective_seconds
from hyper_parallel.core.pipeline.split import split_layers
from hyper_parallel.trainer.metrics import least_kept
from sim.mesh.cost import Pricing
from sim.mesh.searching.space import Candidate, Shape, layers_of_stages, owners_of

_MATMUL = 0.6  # of the peak: a guess that only orders candidates
_FEW = 400  # tokens of a micro-batch that take twice as long as they compute: weights are read, operations issued
_RECOMPUTED = {"none": 1.0, "selective": 1.04, "alternate": 1.11, "full": 1.25}  # forward has the faster kernels
_NARROWER = 0.07  # of compute, each time that tp doubles: products get narrower, and not all of a block is split
_BYTES_OF_LOGIT = 8  # at the worst moment of `hyper_parallel.vocab_parallel_cross_entropy`


@dataclass(frozen=True)
class Rates:
    """What bounds need of the hardware.

    Attributes:
        flops: that a device computes in a second at most, in the dtype of matrix products.
        devices_per_node: that fast links join.
        inside: bytes per second and device between devices of a node, at most.
        between: likewise between nodes.
        links: what collectives take on them.
        link: bytes per second between a device and its host.
    """

    flops: float
    devices_per_node: int
    inside: float
    between: float
    links: Links
    link: float = 32e9

    def collective(self, op: str, size: float, ranks: int, stride: int) -> float:
        """Return seconds of a collective as an estimate prices it.

        Args:
            op: such as `all_gather`.
            size: bytes of the full buffer.
            ranks: that take part.
            stride: devices from one of them to the next.
        """
        if ranks == 1:
            return 0.0
        near, nodes = -(-self.devices_per_node // stride), (ranks - 1) * stride // self.devices_per_node + 1
        return collective_seconds(self.links, op, size, NodeSpread(ranks, min(nodes, ranks), min(near, ranks)))[0]


def least_memory(shape: Shape, candidate: Candidate, seq_len: int) -> float:
    """Return bytes that the fullest rank needs at least: no candidate above the limit by this can fit.

    Weights, gradients and optimizer state are counted as ZeRO splits them (Rajbhandari et al. 2019, table 1). Of
    activations, what any implementation keeps: a block's input where it is checkpointed; else also what matrix products
    and attention read in backward. Pipelines have as many micro-batches under way as stages (Narayanan et al. 2021,
    section 2.2).
    """
    return _together(_state(shape, candidate), _activations(shape, candidate, seq_len), candidate)


def _together(state: tuple[float, float], activations: float, candidate: Candidate) -> float:
    """Add up what is there at the same time: the first micro-batch's gradients come as its activations go.

    Those that are still to be reduced over replicas wait in the dtype of the reduction.
    """
    (standing, gradients), recipe = state, candidate.recipe
    waiting = 0.0 if candidate.parts == 1 else gradients
    if recipe.precision.dtype("master").itemsize == 4 and candidate.dims.dp_replicate > 1:
        waiting *= recipe.precision.dtype("reduce").itemsize / 4
    return standing + max(gradients, waiting + activations)


def _on_a_rank(shape: Shape, candidate: Candidate) -> tuple[float, float]:
    """Parameters outside and inside of experts that a rank computes with."""
    dims = candidate.dims
    dense = (shape.parameters - shape.expert_parameters) / (dims.tp * dims.pp)
    inner = dims.etp if dims.ep > 1 or dims.fold_experts else dims.tp
    experts = shape.expert_parameters / (dims.expert_ranks * inner * dims.pp)
    return dense, experts


def _state(shape: Shape, candidate: Candidate) -> tuple[float, float]:
    """Weights with optimizer state, and gradients."""
    dims, recipe = candidate.dims, candidate.recipe
    computed = recipe.precision.dtype("param").itemsize
    weights = recipe.precision.dtype("master").itemsize
    has_master = weights > computed
    moments = (
        0
        if shape.own_optimizer
        else (1 if recipe.optimizer_name == "muon" else 2) * recipe.precision.dtype("moments").itemsize
    )
    if recipe.lora.is_on:  # adapters are taken to be nothing
        weights, moments, has_master = recipe.precision.dtype("frozen").itemsize, 0, False
    dense, experts = _on_a_rank(shape, candidate)
    standing = gradients = 0.0
    for parameters, shards in ((dense, dims.dp_shard * dims.ep * dims.cp), (experts, dims.expert_shards)):
        # A stage keeps what it gathers, or with one shard casts.
        is_whole = (shards > 1 and recipe.zero == 2) or (dims.pp > 1 and (shards > 1 or has_master))
        standing += parameters * ((weights + moments) / shards + is_whole * computed)
        gradients += 0 if recipe.lora.is_on else parameters * weights / shards
    return standing, gradients


def held_by_model(shape: Shape, candidate: Candidate) -> tuple[float, float]:
    """Return bytes of weights and optimizer state, and of gradients while micro-batches add theirs up."""
    standing, gradients = _state(shape, candidate)
    if candidate.dims.pp > 1 or candidate.parts == 1 or candidate.recipe.lora.is_on:
        return standing, 0.0
    if _gradients_wait(candidate):
        gradients = sum(_on_a_rank(shape, candidate)) * candidate.recipe.precision.dtype("param").itemsize
    return standing, gradients


def _activations(shape: Shape, candidate: Candidate, seq_len: int) -> float:
    dims, recipe = candidate.dims, candidate.recipe
    tokens = candidate.batch // candidate.parts * seq_len / dims.cp
    layers = shape.layers // dims.pp - recipe.lora.is_on  # below the first adapters nothing has a gradient
    width = recipe.precision.dtype("param").itemsize
    policy = recipe.activations
    checkpointed = sum(map(policy.takes, range(layers)))
    kept, per_layer = (_kept_of_block(shape, candidate, how) for how in ("none", policy.kind))
    per_layer = 0.0 if policy.offload else per_layer
    under_way = _under_way(candidate)
    bytes_ = tokens * under_way * (checkpointed * per_layer + (layers - checkpointed) * kept)
    if dims.pp == 1:
        bytes_ += tokens * shape.vocab / dims.tp * width
    return bytes_


def _kept_of_block(shape: Shape, candidate: Candidate, checkpointing: str) -> float:
    """Bytes that a block keeps of a token at least."""
    tp, width = candidate.dims.tp, candidate.recipe.precision.dtype("param").itemsize
    small = shape.hidden * width / tp
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim * width / tp
    return least_kept(checkpointing, small, attention, shape.intermediate * width / tp)


def _under_way(candidate: Candidate) -> int:
    """Micro-batches whose activations the first stage keeps at once."""
    if candidate.dims.pp == 1:
        return 1
    kind = candidate.recipe.parallel.pipeline
    if kind.rule == "any" and kind.name != "zbv":
        return candidate.parts
    return min(candidate.dims.pp, candidate.parts)


def guess_memory(shape: Shape, candidate: Candidate, seq_len: int) -> float:
    """Return about how many bytes the fullest rank allocates, to order candidates by.

    It is the most of these moments, of each rank of a pipeline with its own layers and micro-batches:

    - the loss: all that blocks keep for backward, and all logits;
    - backward of a block: what blocks keep, what this one computes again beyond it, and its gradients. ZeRO-3 has two
      gathered blocks and the gradients of one, and what is outside of blocks is gathered all the time;
    - backward of a pipeline's stage at its first block: its activations are gone, and the gradients of all of it are
      there in the dtype of computing, until they are added to those that wait in the dtype of the reduction;
    - the end of backward: all reduced gradients, with the first block's backward, or with the gradients of embedding
      and head and their copy in the dtype of the reduction.
    """
    kept, at_work = _guess_of_block(shape, candidate)
    if candidate.dims.pp == 1:
        return _guess_of_rank(shape, candidate, seq_len, 0, [shape.layers], kept, at_work)
    own: list[list[int]] = [[] for _ in range(candidate.dims.pp)]
    for owner, layers in zip(owners_of(candidate), layers_of_stages(shape.layers, candidate), strict=True):
        own[owner].append(len(layers))
    return max(_guess_of_rank(shape, candidate, seq_len, *each, kept, at_work) for each in enumerate(own))


def _guess_of_rank(
    shape: Shape,
    candidate: Candidate,
    seq_len: int,
    rank: int,
    own: Sequence[int],
    kept: Mapping[str, float],
    at_work: Mapping[str, float],
) -> float:
    """Return about how many bytes a rank of a pipeline allocates.

    Args:
        shape: of the model.
        candidate: that it belongs to.
        seq_len: tokens of a sequence.
        rank: along the pipeline.
        own: layers of each of its stages.
        kept: of a block and token, by the level of checkpointing.
        at_work: likewise.
    """
    dims, recipe, policy = candidate.dims, candidate.recipe, candidate.recipe.activations
    width, reduced = recipe.precision.dtype("param").itemsize, recipe.precision.dtype("reduce").itemsize
    tokens, mean = candidate.batch // candidate.parts * seq_len / dims.cp, sum(_on_a_rank(shape, candidate))
    owners, ends = owners_of(candidate), min(shape.vocab * shape.hidden / dims.tp, mean * dims.pp / 2)
    block = (mean * dims.pp - 2 * ends) / max(shape.layers, 1)
    parameters = sum(own) * block + ends * ((rank == owners[0]) + (rank == owners[-1]))
    standing, gradients = (parameters / max(mean, 1) * each for each in _state(shape, candidate))

    checkpointed = sum(_checkpointed(policy, layers) for layers in own)
    plain = sum(own) - checkpointed
    per_layer = min(2 / max(checkpointed, 1), 1.0) * kept[policy.kind] if policy.offload else kept[policy.kind]
    of_batch = tokens * (checkpointed * per_layer + plain * kept["none"])
    held = of_batch * _under_way_on(candidate, rank)
    in_block, in_loss, at_end = tokens * at_work[policy.kind if policy.takes(own[-1] - 1) else "none"], 0.0, 0.0
    if rank == owners[-1]:
        in_loss = tokens * (shape.vocab / dims.tp * _BYTES_OF_LOGIT + shape.hidden * width)

    wait, waiting = _gradients_wait(candidate), parameters * reduced
    is_sharded = dims.dp_shard * dims.ep * dims.cp > 1
    if wait and dims.pp > 1:
        in_block += max(parameters * width - of_batch, 0.0) / len(own)
        if not recipe.parallel.pipeline.begins_all_stages(candidate.parts, dims.pp):
            waiting = waiting / len(own) + gradients * (1 - 1 / len(own))
    elif is_sharded:
        in_block += block * (width if wait else 4)
    if is_sharded and dims.pp == 1:
        outside = 2 * ends * width if recipe.zero == 3 else 0.0
        in_block += 2 * block * width if recipe.zero == 3 else 0.0
        held += outside
        at_end = gradients + max(2 * ends * (width + reduced), in_block + outside)
    bytes_ = held + max(in_block, in_loss)
    if wait:
        return standing + waiting + bytes_
    return max(_together((standing, gradients), bytes_, candidate), standing + at_end)


@cache
def _checkpointed(policy: ActivationPolicy, layers: int) -> int:
    """Return how many layers of a stage a policy takes."""
    return sum(map(policy.takes, range(layers)))


def _guess_of_block(shape: Shape, candidate: Candidate) -> tuple[dict[str, float], dict[str, float]]:
    """Return bytes of a token that a block keeps at each level of checkpointing, and works with in its backward.

    Without checkpointing it is the inputs of norms, matrix products, attention and the activation; over tp, what is
    gathered for products. A norm operation by operation keeps two copies in float32. A compiler makes the activation
    again.

    Where results are kept, it is what goes into the block, what attention returns, and the results of all products
    ("selective"), or of every other one in their order and of all with a bias, which are another operator
    ("alternate"). The two that write to the residual stream are kept before ranks add them up, so that tp does not
    make them smaller; a graph of the whole block does not keep the last one, which no backward asks for. Grouped
    products of experts are never kept.

    Backward works with what it computes again beyond what is kept, with the gradients of the activation, of the
    residual stream and of what experts exchange, and with what is gathered over tp.
    """
    dims, recipe = candidate.dims, candidate.recipe
    width, compiles = recipe.precision.dtype("param").itemsize, recipe.parallel.fuses
    result = shape.hidden * width  # of a product that writes to the residual stream, before ranks add it up
    hidden, ffn = result / dims.tp, shape.intermediate * width / dims.tp
    query, key = (heads * shape.head_dim * width / dims.tp for heads in (shape.heads, shape.kv_heads))
    sent = (2 * shape.experts_per_token + 4 / width) * hidden if shape.experts else 0.0  # and the router's float32
    first = 2 if shape.gated else 1  # products of a feed-forward's input; then come the activation and the last one

    none = 2 * hidden + sent + 2 * (query + key) + first * ffn
    none += 2 * (result if dims.tp > 1 and recipe.input_gathers == 1 else hidden)
    none += (1 if compiles else first) * ffn
    if recipe.norm == "eager" and shape.gated and not compiles:  # others have no RMSNorm
        none += 2 * hidden / width * 8

    inputs = [query + 2 * key] if shape.joins_qkv else [query, key, key]
    routed = shape.expert_parameters / max(shape.experts * shape.layers * 3 * shape.hidden, 1) * shape.experts_per_token
    common = 1 - min(routed / max(shape.intermediate, 1), 1.0)  # of the feed-forward, outside of experts
    products = [(size, shape.biased) for size in inputs] + [(result, False)]
    products += [(ffn * common, shape.biased)] * first
    products += [] if compiles and dims.tp == 1 and not shape.experts else [(result, False)]
    with_bias, without = ([size for size, has_bias in products if has_bias == kind] for kind in (True, False))
    always = hidden + query + sum(with_bias)
    kept = {"none": none, "full": hidden}
    kept |= {"selective": always + sum(without), "alternate": always + sum(without[::2])}
    gradients = 2 * hidden + sent + (2 * result if dims.tp > 1 else 0.0) + first * ffn
    return kept, {level: max(none - bytes_, 0.0) + gradients for level, bytes_ in kept.items()}


def _gradients_wait(candidate: Candidate) -> bool:
    """Whether gradients are whole on each rank until the last micro-batch has added its own."""
    dims, recipe = candidate.dims, candidate.recipe
    is_split = dims.dp_shard * dims.ep * dims.cp * dims.pp > 1
    return recipe.reductions < candidate.parts and is_split


@cache
def even_time(shape: Shape, stages: int) -> tuple[int, ...]:
    """Return layers for stages that compute equally long: the head takes what it weighs, the embedding nothing."""
    head = _layers_in_head(shape)
    return tuple(len(layers) for layers in split_layers(shape.layers, stages, first_extra=0, last_extra=head))


def even_memory(shape: Shape, candidate: Candidate, seq_len: int) -> tuple[int, ...]:
    """Return layers for stages, one on each rank, that need equally much memory: the first keep more micro-batches."""
    dims = candidate.dims
    state = sum(_state(shape, candidate)) * dims.pp
    head = shape.vocab * shape.hidden / max(shape.parameters, 1) * state
    tokens = candidate.batch // candidate.parts * seq_len / dims.cp
    logits = tokens * shape.vocab / dims.tp * 12
    layer = max(state - 2 * head, 0.0) / shape.layers
    kept = _activations(shape, candidate, seq_len) / max(_under_way(candidate) * (shape.layers // dims.pp), 1)
    each = [layer + kept * min(dims.pp - stage, candidate.parts) for stage in range(dims.pp)]
    counts, needs = [1] * dims.pp, list(each)
    needs[0] += head
    needs[-1] += head + logits
    for _ in range(shape.layers - dims.pp):
        stage = min(range(dims.pp), key=lambda at: needs[at] + each[at])
        counts[stage] += 1
        needs[stage] += each[stage]
    return tuple(counts)


def _under_way_on(candidate: Candidate, rank: int) -> float:
    """Return the micro-batches whose activations a rank of a pipeline keeps at once, of all of its stages.

    Rounds of as many micro-batches as there are ranks, or of up to twice as many, go through one stage of a rank after
    the other (`Schedule1F1B`, `ScheduleInterleaved1F1B` and `ScheduleInterleavedZeroBubble` of torch): a rank begins
    with all of a round but in its last stage, and with one for each rank behind it, there and back.
    """
    ranks, parts, kind = candidate.dims.pp, candidate.parts, candidate.recipe.parallel.pipeline
    if ranks == 1:
        return 1
    if kind.rule == "any":
        return _under_way(candidate)
    each, behind = len(owners_of(candidate)) // ranks, ranks - 1 - rank
    if kind.rule == "stages":
        return min(parts, behind + 1)
    begun = (each - 1) * (parts // max(parts // ranks, 1)) + (1 if kind.splits_backward else 2) * behind + 1
    return min(parts, begun / each)


def guess_seconds(shape: Shape, candidate: Candidate, seq_len: int, machine: Rates) -> float:
    """Return about how long a step takes, to order candidates by.

    Compute at a part of the peak, the smaller the fewer tokens a micro-batch has and the more ranks share it, in a
    pipeline that of the fullest rank; of tensor and expert parallelism and of messages between stages all
    communication, of sharded weights and of gradients what compute does not hide; the bubble of the pipeline.
    """
    dims, recipe, parts = candidate.dims, candidate.recipe, candidate.parts
    tokens = candidate.batch * seq_len / dims.cp
    compute = tokens * shape.flops_per_token / (dims.tp * dims.pp) / (machine.flops * _MATMUL)
    compute *= (
        _RECOMPUTED[recipe.activations.kind] * (1.0 if recipe.parallel.fuses else 1.1) * (1 + _FEW * parts / tokens)
    )
    compute *= 1 + _NARROWER * math.log2(dims.tp)

    exposed = _of_tokens(shape, candidate, seq_len, machine, compute)
    of_weights = _of_weights(shape, candidate, machine, compute)
    if recipe.activations.offload:
        moved = tokens * _kept_of_block(shape, candidate, recipe.activations.kind) * shape.layers / dims.pp
        exposed += max(2 * moved / machine.link - compute, 0.0)  # to the host and back, while a device computes
    if dims.pp > 1:
        turns, waits = parts * len(owners_of(candidate)) // dims.pp, _waits(candidate)
        exposed += 2 * turns * message_seconds(shape, candidate, seq_len, machine)
        fullest = _fullest(shape, candidate)
        # The fullest rank waits for turns of the others, to begin and to end for one of each of them.
        compute *= fullest + (waits + 1 - fullest) / turns
        exposed *= 1 + waits / turns
    return compute + exposed + of_weights


def _waits(candidate: Candidate) -> int:
    """Return for how many of its stages' turns a rank waits in a step: to begin, to end, and between its stages.

    A micro-batch goes through all ranks before it comes to the next stage of the first one. Fewer micro-batches than
    ranks are through a stage before that, each time by as many turns as are missing. In a V nobody waits for it.
    """
    ranks, each = candidate.dims.pp, len(owners_of(candidate)) // candidate.dims.pp
    missing = max(ranks - candidate.parts, 0) if candidate.recipe.parallel.pipeline.style == "loop" else 0
    return ranks - 1 + (each - 1) * missing


def _of_tokens(shape: Shape, candidate: Candidate, seq_len: int, machine: Rates, compute: float) -> float:
    """Communication of activations along tp, ep and cp that compute does not hide."""
    dims, recipe, parts = candidate.dims, candidate.recipe, candidate.parts
    again = 4 / 3 if recipe.activations.kind == "full" else 1.0
    tokens, width = candidate.batch * seq_len / dims.cp, recipe.precision.dtype("param").itemsize
    layers, exposed = shape.layers / dims.pp, 0.0
    if dims.tp > 1:
        # Forward gathers and scatters twice in a block, and backward does as much.
        each = machine.collective("all_gather", tokens / parts * shape.hidden * width, dims.tp, 1)
        exposed += (7 + recipe.input_gathers) * again * layers * parts * each
    if dims.ep_enabled:
        passed = tokens * shape.hidden * width * layers
        speed = machine.inside if dims.ep * dims.tp * dims.cp <= machine.devices_per_node else machine.between
        if recipe.parallel.ranks_per_node is None:
            exposed += 4 * again * passed * shape.experts_per_token * (1 - 1 / dims.expert_ranks) / speed
        else:
            nodes = max(dims.ep * dims.tp * dims.cp // recipe.parallel.ranks_per_node, 1)
            visited = nodes * (1 - (1 - 1 / nodes) ** shape.experts_per_token)
            exposed += 4 * again * passed * visited * (1 - 1 / nodes) / machine.between
            exposed += 4 * again * passed * shape.experts_per_token / machine.inside
    if dims.cp > 1:
        ulysses = dims.ulysses_degree or dims.cp
        ring = dims.cp // ulysses
        one = tokens / parts * 2 * shape.head_dim / dims.tp * width  # a head's keys and values, or query and result
        kv = layers * parts * machine.collective("all_gather", one * shape.kv_heads * ring, ring, dims.tp * ulysses)
        exposed += max(3 * kv - 0.5 * compute, 0.1 * kv)  # a ring computes while it sends
        heads = machine.collective("all_to_all", one * (shape.heads + shape.kv_heads), ulysses, dims.tp)
        exposed += 2 * again * layers * parts * heads
    return exposed


def message_seconds(shape: Shape, candidate: Candidate, seq_len: int, machine: Rates) -> float:
    """Return seconds that a micro-batch takes at least from one stage to the next, on the fastest of these links."""
    dims, recipe = candidate.dims, candidate.recipe
    speed = machine.inside if dims.world_size // dims.pp < machine.devices_per_node else machine.between
    tokens = candidate.batch // candidate.parts * seq_len / dims.cp
    return tokens * shape.hidden * recipe.precision.dtype("param").itemsize / dims.tp / speed


def _fullest(shape: Shape, candidate: Candidate) -> float:
    """Return the layers of the rank that has most of them, of as many as all ranks have; the head counts as layers."""
    ranks, head = candidate.dims.pp, _layers_in_head(shape)
    own = [0.0] * ranks
    for owner, layers in zip(owners_of(candidate), layers_of_stages(shape.layers, candidate), strict=True):
        own[owner] += len(layers)
    own[owner] += head
    return max(own) * ranks / (shape.layers + head)


def _layers_in_head(shape: Shape) -> float:
    head = shape.vocab * shape.hidden
    return head / max(1.0, (shape.parameters - 2 * head) / max(shape.layers, 1))


def _of_weights(shape: Shape, candidate: Candidate, machine: Rates, compute: float) -> float:
    """Communication of weights and gradients that compute does not hide, a block at a time."""
    dims, recipe, parts = candidate.dims, candidate.recipe, candidate.parts
    shards = dims.dp_shard * dims.ep * dims.cp
    layers = max(shape.layers / dims.pp, 1.0)
    block = sum(_on_a_rank(shape, candidate)) / layers
    reduced = block * recipe.precision.dtype("reduce").itemsize
    gather = layers * machine.collective(
        "all_gather", block * recipe.precision.dtype("param").itemsize, shards, dims.tp
    )
    reduction = machine.collective("reduce_scatter", reduced, shards, dims.tp)
    copies = machine.collective("all_reduce", reduced / shards, dims.dp_replicate, dims.tp * shards)
    gathers = 2 * parts if recipe.zero == 3 and dims.pp == 1 else 1
    seconds = gathers * gather + recipe.reductions * layers * (reduction + copies)
    return max(seconds - 0.8 * compute, 0.05 * seconds)


@cache
def rates_of(hardware: Machine) -> Rates:
    """Return what bounds need of the hardware."""
    return Rates(
        flops=hardware.peak("bf16"),
        devices_per_node=hardware.devices_per_node,
        inside=hardware.value("intra.bandwidth"),
        between=hardware.value("inter.bandwidth"),
        links=Pricing(hardware).links,
        link=hardware.value("host.link", Rates.link),
    )
