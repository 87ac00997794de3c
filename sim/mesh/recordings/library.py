"""Recordings of stages by what they depend on: a stage is recorded once, however often it is estimated."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from sim.mesh.job import Job, StagePart
from sim.mesh.program import Program
from sim.mesh.recordings.derive import Anchor, derive
from sim.mesh.spec import CustomSpec
from sim.mesh.tracing.stitch import Recording, sends_end

_MOST_EVENTS = 600_000  # about 300 MB
_MOST_OF_A_STEP = 60_000  # events; about 30 MB
_MOST_ANCHORS = 6  # of one kind with the same plans: with more, they do not follow from each other


class Library:
    """Recordings, those used last kept longest.

    Args:
        most_events: of all recordings together.
    """

    def __init__(self, most_events: int = _MOST_EVENTS) -> None:
        self.most_events = most_events
        self.made = 0
        self._kinds: OrderedDict[Hashable, list[Anchor]] = OrderedDict()
        self._events = 0
        self._last: tuple[Job, list[Program]] | None = None

    def programs(self, job: Job, make: Callable[[], list[Program]]) -> list[Program]:
        """Return what all ranks do in a step: that of the job before, if it is the same one, or it is made."""
        if self._last is not None and (self._last[0], self._last[0].machine) == (job, job.machine):
            return list(self._last[1])
        made = make()
        small = sum(len(segment.events) for program in made for segment in program.segments.values()) <= _MOST_OF_A_STEP
        self._last = (job, made) if small and _is_known(job) else None
        return list(made)

    def get(
        self, job: Job, part: StagePart, kept: Sequence[int], record: Callable[[], Recording], *, fresh: bool = False
    ) -> Recording:
        """Return the recording of a stage: one that is there, one that follows from those, or a new one.

        Args:
            job: what is estimated.
            part: the stage.
            kept: its layers that are recorded.
            record: makes a new one.
            fresh: always make a new one, and keep nothing.
        """
        kind = None if fresh else depends_on(job, part, kept)
        if kind is None:
            return record()
        anchors = self._kinds.setdefault(kind, [])
        self._kinds.move_to_end(kind)
        fitting = [anchor for anchor in anchors if anchor.holds_on(job.machine)]
        found = derive(fitting, job, part, kept)
        if found is not None:
            return found
        found = record()
        self.made += 1
        if len(fitting) == _MOST_ANCHORS:
            anchors.remove(fitting[0])
            self._events -= _size(fitting[0])
        anchors.append(Anchor(job, part, tuple(kept), found))
        self._events += _size(anchors[-1])
        self._forget()
        return found

    def clear(self) -> None:
        """Forget all recordings."""
        self._kinds.clear()
        self._events = 0
        self._last = None

    def _forget(self) -> None:
        while self._events > self.most_events and len(self._kinds) > 1:
            _, anchors = self._kinds.popitem(last=False)
            self._events -= sum(_size(anchor) for anchor in anchors)


recordings = Library()
"""Those of this process."""


def depends_on(job: Job, part: StagePart, kept: Sequence[int]) -> Hashable | None:
    """Return what a recording of a stage depends on in more than numbers; None: on more than can be said.

    Args:
        job: what is estimated.
        part: the stage.
        kept: its layers that are recorded.
    """
    if not _is_known(job):
        return None
    dims, recipe = job.dims, job.recipe
    kinds, schedule = job.model.layer_kinds, recipe.parallel.pipeline
    alone = recipe.parallel.engine != "fully_shard" or job.is_skewed or recipe.steps is not None
    if alone or recipe.optimizer_name == "muon":  # which matrices a rank computes depends on how many ranks there are
        return (job, part, tuple(kept))
    ranks = {each.index: each.rank for each in job.stages()}
    near = [ranks.get(part.index + step) for step in (-1, 1)]
    ends = job.tied_ranks
    affine = job.model.family == "llama" and job.micro_batch > 1  # tensors with a dim of 1 are laid out otherwise
    return (
        job.model,
        job.seq_len,
        None if affine else job.micro_batch,
        min(job.microbatches, 3),
        (dims.tp, dims.cp, dims.ep, dims.etp, dims.ulysses_degree, dims.fold_experts),
        job.ring_kernel if dims.ulysses_degree not in (None, dims.cp) else None,
        (dims.dp_replicate > 1, dims.dp_shard > 1, min(dims.pp, 3)),
        # Experts that do not divide over the ranks are split inside of each.
        _splits_experts(job),
        dims.pp > 1
        and (schedule.splits_backward, sends_end(recipe), schedule.begins_all_stages(job.microbatches, dims.pp)),
        (dims.pp, ends) if ends is not None and (part.is_first or part.is_last) else None,
        (part.is_first, part.is_last, tuple(rank == part.rank for rank in near)),
        tuple(kinds[layer] for layer in kept),
        len(part.layers) if recipe.activations.first is not None or recipe.activations.every > 1 else None,
        # Micro-batches matter when a recording is repeated, not when it is made.
        recipe.bare(scheduled=dims.pp == 1),
    )


def _is_known(job: Job) -> bool:
    """Whether a job says all: a module of the user's may be made in another way the next time."""
    return type(job) is Job and not isinstance(job.model, CustomSpec)


def _splits_experts(job: Job) -> bool:
    config, dims = getattr(job.model, "config", None), job.dims
    return bool((getattr(config, "num_experts", None) or 0) % (dims.expert_shards * dims.expert_ranks))


def _size(anchor: Anchor) -> int:
    return sum(len(events) for chunks in anchor.recording.segments.values() for _, events in chunks)
