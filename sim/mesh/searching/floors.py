"""Floors of candidates: the least time and memory that computing alone takes, with nothing of the weights to wait for.

A model that is split over tp and cp only is recorded once for a size of micro-batch. Whatever shards its weights, cuts
it into stages or computes parts of it again does that much at least. So a candidate whose floor is above the best step
is looked at without an estimate of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.schedules import find_schedule
from sim.mesh.cost import Pricing
from sim.mesh.hardware import Hardware
from sim.mesh.job import Job
from sim.mesh.memory import replay_memory
from sim.mesh.program import COMPUTE, Op, Program
from sim.mesh.searching.bounds import held_by_model
from sim.mesh.searching.space import Candidate, Shape
from sim.mesh.spec import ModelSpec
from sim.mesh.timeline import replay_time
from sim.mesh.tracing.trace import trace

__all__ = ["Floor", "Floors"]

_LARGEST = 16
"""Sequences of a micro-batch at which a sequence takes least: kernels are not faster beyond."""
_PRODUCTS = ("matmul", "attention", "attention_backward")
_MOVES = ("copy", "cat", "add", "fill", "zero", "mul", "div")
_OF_WEIGHTS = ("parameters", "gathered weights", "gradients", "communication")
_DONE_AGAIN = 0.7  # of the products of a checkpointed block's forward: the last one is not needed again
_KEPT = 0.9  # of a layer's activations, on the stage that keeps most of them


@dataclass(frozen=True)
class Floor:
    """What a micro-batch of a model takes at least, whole on one stage.

    Attributes:
        seconds: of forward and backward.
        again: seconds of the products of blocks in forward.
        activations: bytes that backward needs.
        logits: bytes of them at the same time.
    """

    seconds: float
    again: float
    activations: int
    logits: int


class Floors:
    """Floors of the candidates of a search.

    Args:
        model: that is searched for.
        shape: its numbers.
        hardware: that it runs on.
        seq_len: tokens of a sequence.
    """

    def __init__(self, model: ModelSpec, shape: Shape, hardware: Hardware, seq_len: int) -> None:
        self.model, self.shape, self.hardware, self.seq_len = model, shape, hardware, seq_len
        self._known: dict[Any, Floor] = {}

    def seconds(self, candidate: Candidate, *, rough: bool = False) -> float:
        """Return seconds that a step of a candidate takes at least.

        Args:
            candidate: to be bounded.
            rough: from the floor of the largest micro-batch, which other candidates need as well.
        """
        size = candidate.batch // candidate.parts
        if rough and size < _LARGEST and not self._is_known(candidate, size):
            floor, part = self.of(candidate, _LARGEST), size / _LARGEST
        else:
            floor, part = self.of(candidate, size), 1.0
        each = floor.seconds
        if candidate.recipe.checkpointing == "full" and candidate.recipe.checkpoint_layers is None:
            each += _DONE_AGAIN * floor.again
        return each * part * (candidate.parts + _waits(candidate)) / candidate.dims.pp

    def arithmetic(self, candidate: Candidate) -> float:
        """Return seconds that a device needs at its peak for the products of weights, of a candidate's step.

        Args:
            candidate: to be bounded.
        """
        dims, recipe = candidate.dims, candidate.recipe
        peak = max(self.hardware.peak(recipe.param_dtype), self.hardware.peak("fp8") if recipe.float8 else 0.0)
        embedding = self.shape.vocab * self.shape.hidden  # is looked up
        tokens = candidate.batch * self.seq_len / dims.cp
        return 6 * (self.model.num_active_parameters - embedding) * tokens / (dims.tp * dims.pp) / peak

    def seconds_if_known(self, candidate: Candidate) -> float:
        """Return seconds that a step takes at least, by what has been recorded so far.

        Args:
            candidate: to be bounded.
        """
        size = candidate.batch // candidate.parts
        known = self._is_known(candidate, size) or (size < _LARGEST and self._is_known(candidate, _LARGEST))
        return max(self.arithmetic(candidate), self.seconds(candidate, rough=True) if known else 0.0)

    def bytes(self, candidate: Candidate) -> float:
        """Return bytes that the fullest rank allocates at least.

        Args:
            candidate: to be bounded.
        """
        dims, recipe = candidate.dims, candidate.recipe
        standing, whole_gradients = held_by_model(self.shape, candidate)
        if recipe.checkpointing != "none":
            return standing
        floor = self.of(candidate, candidate.batch // candidate.parts)
        if dims.pp == 1:
            return standing + whole_gradients + floor.activations + floor.logits
        return standing + _KEPT * floor.activations * min(dims.pp, candidate.parts) / dims.pp

    def of(self, candidate: Candidate, micro_batch: int) -> Floor:
        """Return the floor of a micro-batch of the model that a candidate splits over tp, cp and ep.

        Args:
            candidate: which.
            micro_batch: sequences.
        """
        key = self._key(candidate, micro_batch)
        if key not in self._known:
            self._known[key] = self._measured(key)
        return self._known[key]

    def _is_known(self, candidate: Candidate, micro_batch: int) -> bool:
        return self._key(candidate, micro_batch) in self._known

    def _key(self, candidate: Candidate, micro_batch: int) -> Any:
        dims = candidate.dims
        recipe = dataclasses.replace(
            candidate.recipe,
            checkpointing="none",
            checkpoint_layers=None,
            zero=3,
            microbatches=1,
            schedule="1f1b",
            stages_per_rank=None,
        )
        return (dims.tp, dims.cp, dims.ulysses_degree, dims.ep, dims.etp), recipe, micro_batch

    def _measured(self, key: Any) -> Floor:
        (tp, cp, ulysses, ep, etp), recipe, micro_batch = key
        dims = ParallelDims(tp=tp, cp=cp, ep=ep, etp=etp, ulysses_degree=ulysses, world_size=tp * cp * ep)
        job = Job(self.model, dims, micro_batch, self.seq_len, recipe)
        (program,) = trace(job)
        pricing = Pricing(self.hardware, graphs=recipe.graphs, tp_overlap=recipe.tp_overlap)
        computed = again = 0.0
        for (name, _, _), segment in program.segments.items():
            for event in segment.events:
                if name not in ("forward", "backward") or not isinstance(event, Op) or event.stream != COMPUTE:
                    continue
                seconds = pricing.op(event).seconds
                if not _is_of_engine(event, program):
                    computed += seconds
                if name == "forward" and event.kind in _PRODUCTS and program.places[event.place].layer is not None:
                    again += seconds
        waited = replay_time([program], pricing).slowest.exposed.get("tp", 0.0) if dims.tp_enabled else 0.0
        held = replay_memory(program, None).by_category
        return Floor(computed + waited, again, held.get("activations", 0), held.get("logits", 0))


def _is_of_engine(op: Op, program: Program) -> bool:
    """Whether an operation moves weights or gradients: how many there are depends on how these are sharded."""
    blocks = [touch.block for touch in (*op.reads, *op.writes)]
    moves = op.kind == "memory" and any(word in op.name for word in _MOVES)
    return moves and any(program.categories.get(block) in _OF_WEIGHTS for block in blocks)


def _waits(candidate: Candidate) -> float:
    """Return the micro-batches for which a rank of a pipeline waits, for its first one and after its last one."""
    dims, recipe = candidate.dims, candidate.recipe
    if dims.pp == 1:
        return 0.0
    kind = find_schedule(recipe.schedule)
    if kind.splits_backward:
        return 0.0
    return (dims.pp - 1) / kind.checked_stages_per_rank(recipe.stages_per_rank)
