"""Floors of candidates: the least time and memory that computing alone takes, with nothing of the weights to wait for.

A model that is split over tp, cp and ep only is recorded once for a size of micro-batch. Whatever shards its weights,
cuts it into stages or computes parts of it again does that much at least. What sharding adds to it, the copies of
gathered weights and of gradients, is learned from the estimates of a search. So a candidate whose floor is above the
best step is looked at without an estimate of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim.kernel.threads import collector_paused
from sim.mesh.cost import Pricing, ring_kernel_of
from sim.mesh.job import Job
from sim.mesh.memory import replay_memory
from sim.mesh.program import COMPUTE, MEMORY_KINDS, Op, Program
from sim.mesh.recipe import Recipe
from sim.mesh.replay.timeline import replay_time
from sim.mesh.searching.bounds import held_by_model, message_seconds, rates_of
from sim.mesh.searching.space import Candidate, Shape, layers_of_stages, owners_of
from sim.mesh.spec import ModelSpec
from sim.mesh.tracing.stitch import Action, orders
from sim.mesh.tracing.trace import trace

_LARGEST = 16
"""Sequences of a micro-batch at which a sequence takes least: kernels are not faster beyond."""
_PRODUCTS = ("matmul", "attention", "attention_backward")
_MOVES = ("copy", "cat", "add", "fill", "zero", "mul", "div")
_OF_WEIGHTS = frozenset({"parameters", "gathered weights", "gradients", "communication"})
_DONE_AGAIN = 0.7  # of a checkpointed block's forward: what comes after the last tensor for backward is not needed
_ALTERNATE = 0.25  # of the matrix products: every other one, whichever those are
_KEPT = 0.9  # of a layer's activations, on the stage that keeps most of them
_MOST = 2048
"""Stages times micro-batches of a schedule that is played."""


@dataclass(frozen=True)
class Floor:
    """What a micro-batch of a model takes at least, whole on one stage.

    Attributes:
        seconds: of forward and backward.
        products: seconds of the products of blocks in forward, attention included.
        matmuls: seconds of those without attention.
        moves: seconds of the other operations of blocks in forward.
        activations: bytes that backward needs.
        logits: bytes of them at the same time.
        forward: seconds of each block, without what the model waits for.
        backward: likewise.
        head: seconds of the product that gives logits, with its backward and the loss.
    """

    seconds: float
    products: float
    matmuls: float
    moves: float
    activations: int
    logits: int
    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    head: float = 0.0

    def again(self, candidate: Candidate) -> float:
        """Return seconds that a candidate computes again at least."""
        recipe = candidate.recipe
        if recipe.activations.first is not None or recipe.activations.every > 1 or recipe.activations.kind == "none":
            return 0.0
        moves = 0.0 if recipe.parallel.fuses else self.moves  # a compiler fuses them into what there is
        products = {"full": self.products, "alternate": _ALTERNATE * self.matmuls}.get(recipe.activations.kind, 0.0)
        return _DONE_AGAIN * (moves + products)


@dataclass(frozen=True)
class _Copies:
    """Seconds that sharding adds to each micro-batch: copies of unsharded size, however many shards there are.

    Attributes:
        forward: of weights that forward gathers.
        backward: of weights that backward gathers.
        gradients: to where they are reduced.
    """

    forward: float
    backward: float
    gradients: float


class Floors:
    """Floors of the candidates of a search.

    Args:
        model: that is searched for.
        shape: its numbers.
        hardware: that it runs on.
        seq_len: tokens of a sequence.
    """

    def __init__(self, model: ModelSpec, shape: Shape, hardware: Machine, seq_len: int) -> None:
        self.model, self.shape, self.hardware, self.seq_len = model, shape, hardware, seq_len
        self._known: dict[Any, Floor] = {}
        self._copies: dict[Any, _Copies] = {}
        self._again: dict[Any, float] = {}

    def learn(self, candidate: Candidate, programs: Sequence[Program]) -> None:
        """Take over from an estimate what its sharding adds to a micro-batch, for candidates that shard as much."""
        recipe = candidate.recipe
        if candidate.dims.pp == 1 and recipe.activations.kind != "none" and recipe.activations.first is None:
            seconds = min([_recomputed(program, self._pricing(recipe)) for program in programs])
            self._again[self._recomputes_as(candidate)] = seconds
        if self._shards(candidate) and recipe.zero == 3 and recipe.reductions == candidate.parts:
            pricing, key = self._pricing(recipe), self._shards_as(candidate)
            found = min([_copies(program, pricing) for program in programs], key=lambda copies: copies.gradients)
            self._copies[key] = min(found, self._copies.get(key, found), key=lambda copies: copies.gradients)

    def seconds(self, candidate: Candidate, *, known_only: bool = False) -> Iterator[float]:
        """Yield seconds that a step of a candidate takes at least: what costs little to know first, the most last.

        With `known_only`, only those that follow from what has been recorded so far.
        """
        yield self.arithmetic(candidate)
        for key, part in self._bases(candidate):
            if not known_only or key in self._known:
                yield self._seconds(candidate, self._of(key), part)
                if candidate.dims.pp > 1:
                    yield self._of_schedule(candidate, self._of(key), part)

    def _bases(self, candidate: Candidate) -> list[tuple[Any, float]]:
        """What is recorded for a candidate, and the part of it that is one of its micro-batches.

        First a large micro-batch of unsplit sequences, which many candidates share, then what is more and more like it.
        """
        size = candidate.batch // candidate.parts
        unsplit = dataclasses.replace(
            candidate.dims, cp=1, ulysses_degree=None, world_size=candidate.dims.world_size // candidate.dims.cp
        )
        large = self._key(candidate, _LARGEST)
        bases = [
            (self._key(dataclasses.replace(candidate, dims=unsplit), _LARGEST), size / _LARGEST / candidate.dims.cp),
            (large, size / _LARGEST),
        ]
        if size < _LARGEST:
            bases.append((self._key(candidate, size), 1.0))
        return list(dict.fromkeys(bases))

    def _seconds(self, candidate: Candidate, floor: Floor, part: float) -> float:
        each = part * floor.seconds + self._recomputed(candidate, floor, part)
        copies = self._copies.get(self._shards_as(candidate))
        if copies is not None and self._shards(candidate) and candidate.recipe.zero >= 2:
            # Gradients that are not reduced in each micro-batch are added up, which moves as much.
            each += copies.forward + copies.gradients + (copies.backward if candidate.recipe.zero == 3 else 0.0)
        return each * least_turns(candidate)

    def _of_schedule(self, candidate: Candidate, floor: Floor, part: float) -> float:
        """Return seconds of a step of a pipeline, whose stages need not compute equally long."""
        shape = self.shape
        alike = len(set(self.model.layer_kinds)) == 1
        again = self._recomputed(candidate, floor, part) / shape.layers if alike else 0.0
        added = self._added_up(candidate)
        stages = layers_of_stages(shape.layers, candidate)
        forward = [part * sum(floor.forward[one.start : one.stop]) for one in stages]
        backward = [part * sum(floor.backward[one.start : one.stop]) + (again + added) * len(one) for one in stages]
        backward[-1] += part * floor.head
        message = message_seconds(shape, candidate, self.seq_len, rates_of(self.hardware))
        return least_time(candidate, forward, backward, message)

    def _recomputed(self, candidate: Candidate, floor: Floor, part: float) -> float:
        """Return seconds of a micro-batch that are computed again: as an estimate had it, or at least."""
        return max(part * floor.again(candidate), self._again.get(self._recomputes_as(candidate), 0.0))

    def _recomputes_as(self, candidate: Candidate) -> Any:
        """What recomputation depends on."""
        size = candidate.batch // candidate.parts
        return self._key(candidate, size), candidate.recipe.activations

    def _added_up(self, candidate: Candidate) -> float:
        """Return seconds that a micro-batch takes at least to add up the gradients of a block, which a stage keeps."""
        copies, shape = self._copies.get(self._shards_as(candidate)), self.shape
        if copies is None or shape.experts or candidate.recipe.zero < 2 or candidate.dims.dp_shard == 1:
            return 0.0
        in_blocks = 1 - 2 * shape.vocab * shape.hidden / shape.parameters
        return copies.gradients * max(in_blocks, 0.0) / shape.layers

    def arithmetic(self, candidate: Candidate) -> float:
        """Return seconds that a device needs at its peak for the products of weights, of a candidate's step."""
        dims, recipe = candidate.dims, candidate.recipe
        dtypes = [recipe.precision.param_dtype, *(["fp8"] if "float8" in recipe.kernels else [])]
        peak = max(self.hardware.peak(dtype) for dtype in dtypes)
        embedding = self.shape.vocab * self.shape.hidden  # is looked up
        tokens = candidate.batch * self.seq_len / dims.cp
        # Of frozen weights no gradients, and below the first adapters none of activations.
        each = 4 - 2 / self.shape.layers if recipe.lora.is_on else 6
        return each * (self.model.num_active_parameters - embedding) * tokens / (dims.tp * dims.pp) / peak

    def bytes(self, candidate: Candidate) -> float:
        """Return bytes that the fullest rank allocates at least."""
        dims, recipe = candidate.dims, candidate.recipe
        standing, whole_gradients = held_by_model(self.shape, candidate)
        if recipe.checkpointing != "none":
            return standing
        key, part = self._bases(candidate)[-1]
        floor = self._of(key)
        if dims.pp == 1:
            kept = part if part == 1 else _KEPT * part  # not all of it grows with the sequences
            return standing + whole_gradients + kept * (floor.activations + floor.logits)
        return standing + _KEPT * part * floor.activations * min(dims.pp, candidate.parts) / dims.pp

    def _of(self, key: Any) -> Floor:
        if key not in self._known:
            self._known[key] = self._measured(key)
        return self._known[key]

    def _key(self, candidate: Candidate, micro_batch: int) -> Any:
        dims, recipe = candidate.dims, _recorded_as(candidate.recipe)
        return (dims.tp, dims.cp, dims.ulysses_degree, dims.ep, dims.etp, dims.fold_experts), recipe, micro_batch

    def _pricing(self, recipe: Recipe) -> Pricing:
        return Pricing(self.hardware, **recipe.pricing)

    def _shards(self, candidate: Candidate) -> bool:
        """Whether a candidate gathers weights for each micro-batch: a stage keeps those that it has gathered."""
        dims = candidate.dims
        return dims.pp == 1 and dims.dp_shard * dims.cp > 1

    def _shards_as(self, candidate: Candidate) -> Any:
        """What the copies of sharding depend on: weights on a rank when unsharded, and how they are computed with."""
        dims, (_, recipe, _) = candidate.dims, self._key(candidate, 1)
        return (dims.tp, dims.expert_ranks, dims.etp), recipe

    def _measured(self, key: Any) -> Floor:
        (tp, cp, ulysses, ep, etp, fold), recipe, micro_batch = key
        degrees = {"tp": tp, "cp": cp, "ep": ep, "etp": etp, "ulysses_degree": ulysses, "fold_experts": fold}
        dims = ParallelDims(**degrees, world_size=tp * cp * ep)
        kernel, machine = ring_kernel_of(self.hardware), self.hardware
        job = Job(self.model, dims, micro_batch, self.seq_len, recipe, ring_kernel=kernel, machine=machine)
        with collector_paused():
            (program,) = trace(job)
            pricing = self._pricing(recipe)
            computed = products = matmuls = moves = head = 0.0
            layers = {name: [0.0] * self.shape.layers for name in ("forward", "backward")}
            for name, layer, op in _computing(program):
                if _is_of_engine(op, program):
                    continue
                seconds = pricing.op(op).seconds
                computed += seconds
                if layer is not None:
                    layers[name][layer] += seconds
                elif op.kind == "matmul" or program.places[op.place].phase == "loss":
                    head += seconds
                if name == "forward" and layer is not None:
                    products += seconds * (op.kind in _PRODUCTS)
                    matmuls += seconds * (op.kind == "matmul")
                    moves += seconds * (op.kind not in _PRODUCTS)
            exposed = replay_time([program], pricing).slowest.exposed if tp * cp * ep > 1 else {}
            # Of "ep_cp" an unknown part is what waits for weights.
            over = "_".join(dims.expert_axes)
            axes = {"tp", "cp", "ep", f"{over}_nodes", f"{over}_node"} | ({over} if "tp" in dims.expert_axes else set())
            waited = sum([exposed.get(axis, 0.0) for axis in axes])
            held = replay_memory(program, None).by_category
        return Floor(
            seconds=computed + waited,
            products=products,
            matmuls=matmuls,
            moves=moves,
            activations=held.get("activations", 0),
            logits=held.get("logits", 0),
            forward=tuple(layers["forward"]),
            backward=tuple(layers["backward"]),
            head=head,
        )


@cache
def _recorded_as(recipe: Recipe) -> Recipe:
    """Return the recipe that a floor is recorded with: nothing that only repeats or arranges what there is."""
    return recipe.keeping("none", scheduled=False)


def _computing(program: Program) -> Iterator[tuple[str, int | None, Op]]:
    """Yield the operations of forward and backward, with the name of the segment and the layer."""
    for (name, _, _), segment in program.segments.items():
        for event in segment.events:
            if name in ("forward", "backward") and isinstance(event, Op) and event.stream == COMPUTE:
                yield name, program.places[event.place].layer, event


def _copies(program: Program, pricing: Pricing) -> _Copies:
    """Return the copies of one micro-batch: all of them do the same."""
    seconds = dict.fromkeys(("forward", "backward", "gradients"), 0.0)
    for name, _, op in _computing(program):
        of = _categories(op, program)
        if "parameters" in of or not _is_of_engine(op, program):
            continue  # a shard: the smaller, the more ranks there are
        kind = name if "gathered weights" in of else "gradients"
        seconds[kind] += pricing.op(op).seconds
    variants = len([1 for name, _, _ in program.segments if name == "forward"])
    return _Copies(**{kind: each / variants for kind, each in seconds.items()})


def _recomputed(program: Program, pricing: Pricing) -> float:
    """Return seconds of what one micro-batch computes again: all of them do the same."""
    again = [
        pricing.op(op).seconds
        for _, _, op in _computing(program)
        if program.places[op.place].recomputes and not _is_of_engine(op, program)
    ]
    return sum(again) / len([1 for name, _, _ in program.segments if name == "forward"])


def _is_of_engine(op: Op, program: Program) -> bool:
    """Whether an operation moves weights or gradients: how many there are depends on how these are sharded."""
    moves = op.kind in MEMORY_KINDS and any(word in op.name for word in _MOVES)
    return moves and not _OF_WEIGHTS.isdisjoint(_categories(op, program))


def _categories(op: Op, program: Program) -> set[str | None]:
    return {program.categories.get(touch.block) for touch in (*op.reads, *op.writes)}


def least_turns(candidate: Candidate) -> float:
    """Return how often a step takes as long as the whole model for one micro-batch, whatever layers its stages have.

    Of a pipeline with one stage on each rank, rank i of p computes a part w_i of the m micro-batches, and waits for
    the first to come from the ranks before it, and to go back through them: m w_i + w_1 + ... + w_(i-1). The most of
    these is least where all are equal, 1 / (1 - (1 - 1/m)^p): later ranks compute less, for what they wait.
    """
    dims, recipe, parts = candidate.dims, candidate.recipe, candidate.parts
    if dims.pp == 1:
        return parts
    if recipe.parallel.pipeline.splits_backward or recipe.parallel.stages_each > 1:
        return parts / dims.pp
    return 1 / (1 - (1 - 1 / parts) ** dims.pp)


def least_time(candidate: Candidate, forward: Sequence[float], backward: Sequence[float], message: float) -> float:
    """Return seconds from the first forward to the last backward, if nothing else is waited for.

    Of schedules that split backward in two, nobody says how long either half is: there it is what the fullest rank
    computes, and so it is with many micro-batches, of which the first and the last matter little.

    Args:
        candidate: with a pipeline.
        forward: seconds of a micro-batch in each stage.
        backward: likewise.
        message: seconds that a micro-batch takes from one rank to the next.
    """
    parallel, ranks, parts, owners = candidate.recipe.parallel, candidate.dims.pp, candidate.parts, owners_of(candidate)
    if parallel.pipeline.splits_backward or len(owners) * parts > _MOST:
        busy = [0.0] * ranks
        for owner, *seconds in zip(owners, forward, backward, strict=True):
            busy[owner] += parts * sum(seconds)
        return max(busy)
    return _makespan(
        _orders(parallel.pipeline.name, ranks, parallel.stages_each, parts),
        owners,
        forward,
        backward,
        message,
    )


_orders = lru_cache(maxsize=64)(orders)


def _makespan(
    rows: Sequence[Sequence[Action]],
    owners: Sequence[int],
    forward: Sequence[float],
    backward: Sequence[float],
    message: float,
) -> float:
    """Return when the last action ends, each as soon as its rank is free and what it needs is there."""
    ends: dict[tuple[str, int, int], float] = {}
    at, free, last = [0] * len(rows), [0.0] * len(rows), len(forward) - 1
    waiting = True
    while waiting:
        waiting = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                kind, stage, batch = row[at[rank]]
                source = stage - 1 if kind == "forward" else stage + 1
                if 0 <= source <= last:
                    found = ends.get((kind, source, batch))
                    if found is None:
                        break
                    free[rank] = max(free[rank], found + (message if owners[source] != rank else 0.0))
                free[rank] += (forward if kind == "forward" else backward)[stage]
                ends[kind, stage, batch] = free[rank]
                at[rank] += 1
                waiting = True
    return max(free)
