"""The course of a search: candidates, cheap bounds, estimates of those that may be the best.

The number of ways grows with the number of devices; an estimate takes seconds. So every candidate is looked at, the
most promising first, and every estimate corrects what is expected of the others; but one that cannot fit, or cannot be
faster than the best so far, is not estimated. A search that is interrupted, or that has used up its number of
estimates, returns the best so far, and says how much faster the best of what it left out could be.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hyper_parallel.core.common.errors import HyperParallelError, InvalidValue
from sim.mesh.cost import UnknownOperation
from sim.mesh.recipe import Recipe
from sim.mesh.report import gib
from sim.mesh.searching.bounds import Rates, guess_memory, guess_seconds, least_memory
from sim.mesh.searching.candidates import enumerate_candidates
from sim.mesh.searching.floors import Floors
from sim.mesh.searching.ranking import Found, SearchResult, chance_faster
from sim.mesh.searching.space import Candidate, Rejected, Space

_RESERVED = 1.08  # times what is guessed to be allocated, until estimates tell better
_USABLE = 0.98  # of the limit: contexts and communicators take memory, too
_LEVEL = {"none": 0, "selective": 1, "alternate": 2, "full": 3, "offload": 4, "full offload": 5}
_REFINED = 2  # of the fastest: they are tried in chunks
_EXPOSED = 0.02  # of a step: less exposed communication over tp is not worth what chunks cost
_PlainKind = tuple[int, int, str]  # degrees of tp and ep, and the checkpointing where both are 1

Progress = Callable[[int, int, str], None]
"""Told before each estimate, and at the end: how many are done, how many there will be, and what comes now."""


@dataclass
class Exploration:
    """One search, from candidates to the ranking.

    Args:
        space: what is searched.
        machine: what guesses need of the hardware.
        limit_bytes: of memory on a device.
        limit: most estimates; None: as many as it takes.
        title: what is searched, in words.
        floors: of time and memory; None: every candidate that may fit is estimated.
        tp_chunks: in which the fastest are tried, ascending.
    """

    space: Space
    machine: Rates
    limit_bytes: float
    limit: int | None
    title: str
    floors: Floors | None = None
    tp_chunks: tuple[int, ...] = ()
    found: list[Found] = field(default_factory=list)
    too_large: list[Found] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    time_ratios: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    memory_ratios: dict[str, list[float]] = field(default_factory=dict)
    guesses: dict[Candidate, tuple[float, float]] = field(default_factory=dict)
    slower: list[Candidate] = field(default_factory=list)
    first: frozenset[Candidate] = frozenset()
    left: list[Candidate] = field(default_factory=list)
    _done: int = 0

    def run(self, estimate: Callable[[Candidate], Any], progress: Progress) -> SearchResult:
        """Estimate the most promising candidates, one after the other; those with offload if no other one fits."""
        complete = True
        try:
            for recipes in _offload_last(self.space.recipes):
                self._look_at(dataclasses.replace(self.space, recipes=recipes), estimate, progress)
                if self.found or self.left:
                    break
            self._try_chunks(estimate, progress)
        except KeyboardInterrupt:
            complete = False
        if not self.found:
            raise self._nothing(complete, self.left)
        return SearchResult(
            self._ranked(),
            tuple(sorted(self.too_large, key=lambda one: one.bytes)),
            tuple(self.rejected),
            tuple(self.left),
            self.limit_bytes,
            complete,
            self.title,
            tuple(self.slower),
            self._gain(self.left),
        )

    def _look_at(self, space: Space, estimate: Callable[[Candidate], Any], progress: Progress) -> None:
        """Look at the candidates of a space, until none is left or as many are estimated as may be."""
        bounded = self._bounded(space)
        self.left = self._in_order(bounded)
        while self.left and (self.limit is None or self._done < self.limit):
            candidate = self.left[0]
            if not self._is_hopeless(candidate) and not self._is_slower(candidate):
                most = self._done + len(self.left)
                progress(self._done, most if self.limit is None else min(self.limit, most), str(candidate))
                self._add(candidate, estimate)
                self._done += 1
                self.left = self._in_order(self.left[1:])
            else:
                self._drop_first()
        progress(self._done, self._done, "")

    def _drop_first(self) -> None:
        """Leave out the candidate whose turn it is; the next best of its plain kind takes its place."""
        dropped = self.left.pop(0)
        if dropped not in self.first:
            return
        self.first -= {dropped}
        kind = self._kind(dropped)
        at = next((at for at, one in enumerate(self.left) if self._kind(one) == kind), None)
        if at is not None:
            self.left.insert(0, self.left.pop(at))
            self.first |= {self.left[0]}

    def _try_chunks(self, estimate: Callable[[Candidate], Any], progress: Progress) -> None:
        """Estimate the fastest anew, in chunks; those that are faster so come into the ranking.

        Chunks hide communication over tp, and change nothing else: it is enough to try them where that is exposed, and
        where the step without it would be the fastest. More chunks are tried where fewer have paid.
        """
        for entry in self._worth_chunks() if self.tp_chunks else ():
            fastest = entry.seconds
            for chunks in self.tp_chunks:
                recipe = entry.candidate.recipe.having(tp_chunks=chunks)
                candidate = dataclasses.replace(entry.candidate, recipe=recipe)
                self.guesses[candidate] = self.guesses[entry.candidate]
                before = len(self.found)
                progress(self._done, self._done + 1, str(candidate))
                self._add(candidate, estimate)
                self._done += 1
                if len(self.found) == before:
                    break
                if self.found[-1].seconds >= fastest:
                    self.found.pop()
                    break
                fastest = self.found[-1].seconds
        progress(self._done, self._done, "")

    def _worth_chunks(self) -> list[Found]:
        """The fastest that chunks may make the best, or that are it."""
        ordered = sorted(self.found, key=lambda one: one.seconds)
        best = ordered[0].seconds if ordered else 0.0
        worth = []
        for entry in ordered:
            over_tp, recipe = entry.estimate.time.exposed.get("tp"), entry.candidate.recipe
            exposed = 0.0 if over_tp is None else over_tp.value
            hides = recipe.parallel.tp_chunks == 1 and recipe.sequence_parallel
            if hides and exposed > _EXPOSED * entry.seconds and entry.seconds - exposed < best:
                worth.append(entry)
        return worth[:_REFINED]

    def _bounded(self, space: Space) -> dict[Candidate, tuple[float, float]]:
        """Candidates that may fit, each with guesses of its time and of its memory."""
        pending, known = {}, set(self.rejected)
        for entry in enumerate_candidates(space):
            if isinstance(entry, Rejected):
                if entry not in known:  # degrees that are none at all are none with every recipe
                    self.rejected.append(entry)
                continue
            least = least_memory(self.space.shape, entry, self.space.seq_len)
            if least > self.limit_bytes:
                detail = f"needs {gib(least)} at least, the limit is {gib(self.limit_bytes)}"
                self.rejected.append(Rejected(str(entry), "cannot fit (bound)", detail, least, entry))
                continue
            memory = max(least, guess_memory(self.space.shape, entry, self.space.seq_len))
            pending[entry] = guess_seconds(self.space.shape, entry, self.space.seq_len, self.machine), memory
        self.guesses.update(pending)
        return pending

    def _add(self, candidate: Candidate, estimate: Callable[[Candidate], Any]) -> None:
        try:
            entry = Found(candidate, estimate(candidate))
        except UnknownOperation:
            raise  # of the model, and so of every candidate
        except ValueError as error:
            detail = str(error).splitlines()[0]
            self.rejected.append(Rejected(str(candidate), "the trainer refuses it", detail, None, candidate))
            return
        seconds, memory = self.guesses[candidate]
        self.time_ratios.setdefault(_family(candidate), []).append(entry.seconds / seconds)
        self.memory_ratios.setdefault(candidate.recipe.checkpointing, []).append(entry.bytes / memory)
        if self.floors is not None:
            self.floors.learn(candidate, entry.estimate.programs)
        (self.found if entry.estimate.memory.fits(self.limit_bytes) else self.too_large).append(entry)

    def _in_order(self, pending: Iterable[Candidate]) -> list[Candidate]:
        score = self._scorer()
        self.first = self._plain(pending)
        return sorted(pending, key=lambda one: (one not in self.first, score(one, self.guesses[one])))

    def _plain(self, pending: Iterable[Candidate]) -> frozenset[Candidate]:
        """Return the layouts that people try first, whatever the guesses say.

        Those are data parallelism alone, the best at each checkpointing and the best that is sharded within a node and
        replicated between nodes, and with tensor or expert parallelism within a node, the best at each degree; each
        until one of its kind is estimated.
        """
        score, best = self._scorer(), dict[_PlainKind, Candidate]()
        done = {self._kind(entry.candidate) for entry in (*self.found, *self.too_large)}
        for one in pending:
            kind = self._kind(one)
            if kind is None or kind in done:
                continue
            if kind not in best or score(one, self.guesses[one]) < score(best[kind], self.guesses[best[kind]]):
                best[kind] = one
        return frozenset(best.values())

    def _kind(self, one: Candidate) -> _PlainKind | None:
        """Return which of the layouts that people try first it is; None: it is none of them."""
        dims = one.dims
        if dims.pp * dims.cp > 1 or min(dims.tp, dims.ep) > 1 or dims.tp * dims.ep > self.machine.devices_per_node:
            return None
        if dims.tp * dims.ep > 1:
            return dims.tp, dims.ep, ""
        hybrid = dims.dp_replicate > 1 and dims.dp_shard == self.machine.devices_per_node
        return 1, 1, "hybrid" if hybrid else one.recipe.checkpointing

    def _scorer(self) -> Callable[[Candidate, tuple[float, float]], float]:
        """Return seconds as the estimates so far correct the guess; more of them where memory is short."""
        known = {family: statistics.median(ratios) for family, ratios in self.time_ratios.items()}
        unknown = statistics.median(known.values()) if known else 1.0
        memory = {level: statistics.median(ratios) for level, ratios in self.memory_ratios.items()}

        def score(candidate: Candidate, guesses: tuple[float, float]) -> float:
            seconds, bytes_ = guesses
            bytes_ *= memory.get(candidate.recipe.checkpointing, _RESERVED)
            too_much = max(bytes_ / (_USABLE * self.limit_bytes) - 1, 0.0)
            return seconds * known.get(_family(candidate), unknown) * (1 + 10 * too_much)

        return score

    def _is_slower(self, candidate: Candidate) -> bool:
        """Whether a candidate cannot be faster than the best so far, or cannot fit, by its floors."""
        if not self.found:
            return False
        if self._is_in_vain(candidate):
            self.slower.append(candidate)
            return True
        if self.floors is None:
            return False
        best = min(entry.seconds for entry in self.found)
        floors = self.floors
        if any(seconds >= best for seconds in floors.seconds(candidate)):
            self.slower.append(candidate)
            return True
        least = floors.bytes(candidate)
        if least > self.limit_bytes:
            detail = f"needs {gib(least)} at least, the limit is {gib(self.limit_bytes)}"
            self.rejected.append(Rejected(str(candidate), "cannot fit (bound)", detail, least, candidate))
            return True
        return False

    def _gain(self, left: Sequence[Candidate]) -> float | None:
        """Return the part of the best step that the fastest of the candidates left could save; None: nobody knows."""
        if not left:
            return 0.0
        if self.floors is None:
            return None
        best = min(entry.seconds for entry in self.found)
        least = min(max(self.floors.seconds(candidate, known_only=True)) for candidate in left)
        return max(0.0, 1 - least / best)

    def _is_in_vain(self, candidate: Candidate) -> bool:
        """Whether the same with less recomputation, or less gathering, fits: this one can only be slower.

        Not so with offload: what is computed again need not be copied.
        """
        kept = candidate.recipe.checkpointing if candidate.recipe.activations.offload else None
        return any(
            kept in (None, entry.candidate.recipe.checkpointing)
            and entry.candidate.parts == candidate.parts
            and entry.candidate.dims == candidate.dims
            and _is_like(entry.candidate, candidate)
            and _is_larger(entry.candidate, candidate)
            for entry in self.found
        )

    def _is_hopeless(self, candidate: Candidate) -> bool:
        """Reject a candidate that needs more than one which does not fit."""
        for entry in self.too_large:
            if _is_like(entry.candidate, candidate) and _is_larger(candidate, entry.candidate):
                detail = f"needs more than {entry.candidate}, which takes {gib(entry.bytes)}"
                self.rejected.append(Rejected(str(candidate), "cannot fit (less does not)", detail, None, candidate))
                return True
        return False

    def _ranked(self) -> tuple[Found, ...]:
        ordered = sorted(self.found, key=lambda one: one.seconds)
        return tuple(
            Found(
                entry.candidate,
                entry.estimate,
                chance_faster(entry.estimate, ordered[at + 1].estimate) if at + 1 < len(ordered) else None,
            )
            for at, entry in enumerate(ordered)
        )

    def _nothing(self, complete: bool, left: Sequence[Candidate]) -> ValueError:
        """What to say when no candidate fits."""
        space = self.space
        asked = f"cannot train {self.title}"
        counts = Counter(entry.reason for entry in self.rejected).most_common(3)
        reasons = "; ".join(f"{count} x {reason}" for reason, count in counts)
        if not complete:
            seen = f"estimated so far: {len(self.too_large)}   left: {len(left)}"
            return InvalidValue(asked, "the search was interrupted before anything fitted", seen, "more time")
        bounded = [entry for entry in self.rejected if entry.bytes_needed is not None]
        if not self.too_large and not bounded:
            detail = self.rejected[-1].detail if self.rejected else "no degrees multiply to the devices"
            hint = f"another number of devices than {space.num_devices:,}, or a global batch that they divide"
            return InvalidValue(asked, "no degrees can be placed", f"{reasons or detail}: {detail}", hint)
        if self.too_large:
            closest = min(self.too_large, key=lambda one: one.bytes)
            needed = closest.bytes
            seen = f"{closest.candidate} is estimated to need {closest.excess(self.limit_bytes)}"
        else:
            nearest_bound = min(bounded, key=lambda entry: entry.bytes_needed or math.inf)
            needed = nearest_bound.bytes_needed or 0.0
            over = gib(needed - self.limit_bytes)
            seen = f"{nearest_bound.what} needs at least {gib(needed)}, {over} too much"
        blame = f"nothing fits into {gib(self.limit_bytes)}"
        seen = f"closest: {seen}\n  estimated: {len(self.too_large)}   not estimated: {reasons or 'none'}"
        more = math.ceil(space.num_devices * needed / self.limit_bytes)
        hint = f"about {_next_multiple(more, space.num_devices):,} devices, or shorter sequences"
        if left:
            hint = f"limit={2 * (self.limit or 0) or None}, as {len(left)} are not estimated yet; or {hint}"
        return NothingFits(asked, blame, seen, hint)


class NothingFits(HyperParallelError, ValueError):
    """A search in which every candidate needs more memory than there is."""


def _offload_last(recipes: Sequence[Recipe]) -> list[tuple[Recipe, ...]]:
    """Return recipes in the order of their turns: first those that keep activations on the device."""
    here = tuple(one for one in recipes if not one.activations.offload)
    away = tuple(one for one in recipes if one.activations.offload)
    return [group for group in (here, away) if group]


def _next_multiple(least: int, of: int) -> int:
    return -(-least // of) * of if least > of else 2 * of


def _family(candidate: Candidate) -> tuple[int, ...]:
    """What decides most about how far the guess is off."""
    dims = candidate.dims
    return dims.tp, dims.pp, dims.cp, dims.ep


def _is_like(one: Candidate, other: Candidate) -> bool:
    """Whether two differ at most in shards and copies, checkpointing, ZeRO level and micro-batches."""
    degrees = ("tp", "pp", "cp", "ep", "etp", "fold_experts", "ulysses_degree")
    return (
        one.layers_per_stage == other.layers_per_stage
        and (one.recipe.zero >= 2) == (other.recipe.zero >= 2)  # else another engine has the weights
        and all(getattr(one.dims, name) == getattr(other.dims, name) for name in degrees)
        and _unordered(one.recipe) == _unordered(other.recipe)
    )


@cache
def _unordered(recipe: Recipe) -> Recipe:
    """Return a recipe without the keys by which it keeps more, or less; which blocks it is for stays."""
    blocks = str(dataclasses.replace(recipe.activations, recompute="full", offload=False))
    return recipe.keeping(blocks)


def _is_larger(one: Candidate, other: Candidate) -> bool:
    """Whether the first keeps everything that the second one keeps, or more."""
    return (
        _LEVEL[one.recipe.checkpointing] <= _LEVEL[other.recipe.checkpointing]
        and one.recipe.zero <= other.recipe.zero
        and one.parts <= other.parts
        and (one.recipe.reductions > 1) <= (other.recipe.reductions > 1)
        and one.recipe.input_gathers <= other.recipe.input_gathers
        and one.dims.dp_shard <= other.dims.dp_shard
    )
