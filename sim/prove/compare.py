"""Compares a model that is made parallel with the same model on one device, tensor by tensor, as things happen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hyper_parallel.core.dtensor.layout import Layout
from sim.explain.errors import ranks_phrase
from sim.prove.infer import Order, furthest, order_of
from sim.prove.judge import (
    CUT_OFF,
    Finding,
    Judged,
    absent,
    first_bug,
    incomparable,
    pending_words,
    row_of,
    settle,
    short,
    split_name,
    within,
)
from sim.prove.modes.draws import ModuleTensor
from sim.prove.modes.values import listed
from sim.prove.randomness import Draw, masks_problem, redrawn_row
from sim.prove.report import ReportRow
from sim.prove.runs import Given
from sim.prove.steps.boundaries import PlanJudge, PlanStep
from sim.prove.steps.comparison import Comparison, present
from sim.prove.steps.finder import Parts
from sim.prove.steps.names import NameMap
from sim.prove.steps.updates import ROUNDINGS
from sim.prove.steps.watch import Declared, LoopRecord, RecordedStep


class PlanComparison(Comparison):
    """Compares the steps of a model with a plan, where every call of a module on one device is one on the ranks.

    So each boundary is held against its like, with the layouts that DTensors declare; parameters keep their names.

    Args:
        given: what the ranks are given, and what is declared.
        expected: the record of one device.
        moved: records of one device, perturbed.
        ranks: the record of each rank.
        dtype: that ranks compute in.
        has_loss_fn: there is a loss beside what the model returns.
        has_optimizer: there are updates.
        has_second: the steps after the first have other inputs.
        stopped: the ranks have failed, so that only the steps before are compared.

    Attributes:
        step: the comparison of the step that is judged.
    """

    def __init__(
        self,
        given: Given,
        expected: LoopRecord,
        moved: Sequence[LoopRecord],
        ranks: Sequence[LoopRecord],
        dtype: torch.dtype,
        *,
        has_loss_fn: bool,
        has_optimizer: bool,
        has_second: bool = False,
        stopped: bool = False,
    ) -> None:
        super().__init__(expected, moved, ranks, given.mesh, {}, stopped=stopped)
        self._has_loss_fn, self._has_optimizer, self._has_second = has_loss_fn, has_optimizer, has_second
        self._judge = PlanJudge(given, expected, self.finder, dtype)
        self._held = PlanParameters(self, self._judge)
        self._buffers: dict[str, Finding] = {}
        self._is_end_compared = False
        self.step = self._step(0)

    def _step(self, number: int) -> PlanStep:
        return PlanStep(self, self._judge, number, has_loss_fn=self._has_loss_fn)

    def _find_names(self, given: Mapping[str, Any]) -> NameMap:
        """Return the map of tied parameters of which a rank has another name first; others have their own."""
        del given
        same = {name: first for rank in self.ranks for name, first in rank.same.items()}
        firsts = {same.get(name, name): name for name in self.expected.initial}
        return NameMap({first: ((name,), 0) for first, name in firsts.items() if first != name})

    def _parameters(self) -> Iterator[ReportRow]:
        """Judge the parameters and buffers as they were made."""
        yield from self._held.with_orders([row_of(event) for event in self._held.events()], self.step)
        yield from self._initial_buffers()

    def _of_step(self, number: int) -> list[ReportRow]:
        """Judge forward, backward and the optimizer's updates."""
        step = self.step = self._step(number) if number != self.step.number else self.step
        if len(step.theirs) < len(self.ranks):
            return []  # backward was not compared
        rows = [*step.forward_rows, *self._changed_buffers(), *([] if number else self._random_rows())]
        has_gone_back = all(each.gradients for each in step.theirs.values())
        redraw = redrawn_row(step.mine.redraw, [each.redraw for each in step.theirs.values()])
        rows += [redraw] if redraw is not None else []
        if not number:
            self._is_end_compared = self._is_compared(has_gone_back)
        if has_gone_back:
            rows += settle([*step.gradients(), *self._held.gradients(step)], step.graph.backward)
        rows = self._with_number(rows, number)
        if has_gone_back and self._has_optimizer:
            is_only = len(self.expected.steps) == 1 or (self._has_second and not number)
            rows += [row_of(event) for event in self._held.updates(step, is_only=is_only)]
        return [*rows, *(self._stepped_buffers() if has_gone_back else ())]

    def _of_forward(self, number: int) -> list[ReportRow]:
        self.step = self._step(number) if number != self.step.number else self.step
        return self._with_number([*self.step.forward_rows, *self._changed_buffers()], number)

    def _with_number(self, rows: Iterable[ReportRow], number: int) -> list[ReportRow]:
        return [replace(row, tensor=f"{row.tensor} in step {number + 1}") if number else row for row in rows]

    def _is_compared(self, has_gone_back: bool) -> bool:
        """Return True if a gradient tells something, where there are weights to train, or else a result does."""
        if self.expected.trained:
            return has_gone_back and any(
                bool(each.any()) for each in self.step.mine.gradients.values() if each is not None
            )
        return bool(self.step.mine.losses) or any(key[:2] == ("", "output") for key, _ in self.step.keys)

    def _is_unproved(self) -> bool:
        return not self._is_end_compared

    def _after_steps(self) -> list[ReportRow]:
        self._note_calls()
        owned = self._held.owned
        if owned:
            some = ", ".join(f"{path} on {ranks_phrase(ranks)}" for path, ranks in list(owned.items())[:4])
            more = f" and {len(owned) - 4} more" if len(owned) > 4 else ""
            self.notes.append(f"{some}{more}: other ranks do not have these modules, and do not call them")
        return []

    def _note_calls(self) -> None:
        every = [run.steps[0].called if run.steps else [] for run in self.ranks]
        for rank, called in enumerate(every):
            if called != every[0]:
                pairs = zip([*every[0], "(the end)"], [*called, "(the end)"], strict=False)
                at, (one, other) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
                self.notes.append(
                    f"ranks call modules in different order: call {at} is of {one or '(the model)'} on "
                    f"rank 0, of {other or '(the model)'} on rank {rank}"
                )
                return

    def _boundaries(self, step: int) -> Iterator[ModuleTensor]:
        for boundary in self.expected.steps[step].declared:
            full = self.expected.steps[step].calls[boundary[0]][boundary[1]]
            if full.is_floating_point():
                yield ModuleTensor(self.step.place(boundary), full, self._judge.bound("value", full))

    def _is_repeated(self, step: int, path: str) -> bool:
        del step, path
        return False  # calls are no micro-batches

    def _random_rows(self) -> Iterator[ReportRow]:
        """Compare the states of the generators with which the ranks drew random numbers."""
        drawn = [_by_place(run) for run in self.ranks]
        for place, draw in _by_place(self.expected).items():
            ranks = [run[place] for run in drawn if place in run]
            if len(ranks) < len(self.ranks):
                continue
            inputs = (self.step.value(each) for each in self.step.mine.declared if each[0][:2] == (draw.path, "input"))
            found = next(inputs, None)
            layout = found.found if found is not None else None
            split, rows = (_splitting(layout), _splitting(layout, 1)) if layout is not None else ([], [])
            problem = masks_problem(ranks, draw.shape, self.mesh, split, rows)
            row = ReportRow(draw.path, draw.op.rstrip("_"), "random", found=short(layout))
            yield row if problem is None else replace(row, verdict="bug", sentence=problem[0], suggestion=problem[1])

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _initial_buffers(self) -> Iterator[ReportRow]:
        """Judge buffers as they were made; ranks may have their own, if nobody changes it and its module is right."""
        bug, own, left = first_bug(self.step.forward_rows), list[str](), list[str]()
        for name, mine in self.expected.buffers.items():
            found = self._buffer(name, mine, [run.buffers for run in self.ranks], self._judge.bound("buffer", mine))
            if found is not None:
                self._buffers[name] = found
                row = self._buffer_row(name, found, "")
                to_blame = bug is not None and f"{bug.module}.".startswith(f"{row.module}." if row.module else "")
                is_own = row.verdict == "bug" and not to_blame and not self._is_changed(name)
                own += [name] if is_own else []
                yield replace(row, verdict="private") if is_own else row
            elif self._is_changed(name) and name not in self.expected.statistics:
                sentence, hint = "one device changes it, and no rank has a buffer of that name", "keep its name"
                row = ReportRow(*split_name(name), "buffer", verdict="not proved", sentence=sentence, suggestion=hint)
                yield row
            else:
                left.append(name)
        self.notes += [f"the ranks' own, which no step changes: {listed(own)}"] if own else []
        self.notes += [f"not compared, as no rank has them: {listed(left)}"] if left and not self.stopped else []

    def _states(self, name: str) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """Yield a buffer before the step, after its forward and after the step, on one device and on each rank."""
        for record in (self.expected, *self.ranks):
            steps, number = record.steps, self.step.number
            before = steps[number - 1].buffers if number else record.buffers
            step = steps[number] if number < len(steps) else RecordedStep()
            yield before.get(name), step.after_forward.get(name), step.buffers.get(name)

    def _is_changed(self, name: str) -> bool:
        """Return True if forward or a step changes a buffer, on one device or on a rank."""
        held = ([each for each in states if each is not None] for states in self._states(name))
        return any(not torch.equal(*pair) for states in held for pair in itertools.pairwise(states))

    def _buffer_row(self, name: str, found: Finding, when: str) -> ReportRow:
        """Return the row of a buffer; nothing adds up parts of it later, and each rank has statistics of its own."""
        module, tensor = split_name(name)
        holders = [run for run in self.ranks if name in run.buffers]
        # A count that is not saved, such as a router's of its tokens, may be added up where it is used.
        is_kept = any(name not in run.unsaved for run in holders)
        row = row_of(Judged(module, f"{tensor}{when}", "buffer", found, final=is_kept))
        if not when or row.verdict != "bug" or not all(name in run.statistics for run in holders):
            return row
        self.note(f"of each rank's own rows, as nothing synchronises them: the buffers of {module or 'the model'}")
        return replace(row, verdict="private", sentence="", suggestion="")

    def _changed_buffers(self) -> Iterator[ReportRow]:
        """Judge buffers that forward has changed, if they were right before it."""
        for name, mine in self.step.mine.after_forward.items():
            pairs = [(before, after) for before, after, _ in self._states(name)]
            if self._is_right_and_changed(name, pairs):
                bound = self._judge.bound("changed buffer", mine)
                found = self._buffer(name, mine, [step.after_forward for step in self.step.theirs.values()], bound)
                if found is not None:
                    yield self._buffer_row(name, found, " after forward")

    def _stepped_buffers(self) -> Iterator[ReportRow]:
        """Judge buffers that the step has changed since forward, such as moving averages, if they were right before."""
        for name, mine in self.step.mine.buffers.items():
            pairs = [(before, after) for _, before, after in self._states(name)]
            if self._is_right_and_changed(name, pairs):
                bound = self._judge.bound("stepped buffer", mine, ROUNDINGS * (self.step.number + 1))
                found = self._buffer(name, mine, [step.buffers for step in self.step.theirs.values()], bound)
                if found is not None:
                    yield self._buffer_row(name, found, f" after step {self.step.number + 1}")

    def _is_right_and_changed(
        self, name: str, pairs: Iterable[tuple[torch.Tensor | None, torch.Tensor | None]]
    ) -> bool:
        made = self._buffers.get(name)
        is_changed = any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs)
        return is_changed and made is not None and made.status == "right"

    def _buffer(
        self, name: str, mine: torch.Tensor, runs: Sequence[Mapping[str, torch.Tensor]], bound: float
    ) -> Finding | None:
        parts = {rank: buffers[name] for rank, buffers in enumerate(runs) if name in buffers}
        if 0 < len(parts) < len(runs):  # of a module that only some ranks have
            return self.finder.judge(parts).undeclared(parts, mine, bound)
        return self._judge.judged(parts, mine, bound) if parts else None


class PlanParameters:
    """Compares the parameters of a model with a plan, their gradients and their updates.

    Args:
        whole: the comparison of all steps.
        judge: of single tensors.

    Attributes:
        made_as: the finding of each parameter as it was made.
        owned: modules that only some ranks have, and which ranks.
    """

    def __init__(self, whole: Comparison, judge: PlanJudge) -> None:
        self.whole, self._judge, self._every = whole, judge, range(len(whole.ranks))
        self.made_as: dict[str, Finding] = {}
        self.owned: dict[str, tuple[int, ...]] = {}
        self._orders: dict[str, Order] = {}  # of parameters in an order of elements that no layout describes

    def gradients(self, step: PlanStep) -> Iterator[Judged]:
        """Judge the gradients of parameters."""
        for name, mine in step.mine.gradients.items():
            made = self.made_as.get(name)
            if made is None:
                continue  # there is no such parameter, as was said before
            found = self._gradient(step, name, mine, made)
            yield Judged(*split_name(name), "gradient", found, (self.whole.expected.leaves[name],), True)

    def _gradient(self, step: PlanStep, name: str, mine: torch.Tensor | None, made: Finding) -> Finding:
        there = self._there(name, [each.gradients for each in step.theirs.values()])
        if mine is None or not bool(mine.count_nonzero()):
            if all(not bool(grad.count_nonzero()) for grad in there.values()):
                return Finding("right", made.found, made.declared)
            if mine is None:
                sentence = f"there is no gradient on one device, and one on {ranks_phrase(there)}"
                return incomparable(sentence, declared=made.declared)
        if not there:
            return incomparable("no rank has a gradient, and one device has", CUT_OFF, made.declared)
        bound = self._judge.bound("gradient", mine)
        if made.status == "absent":
            return self._of_owners(there, mine, bound)
        if len(there) < len(self.whole.ranks):
            return replace(absent(list(there), self._every, made.declared), status="wrong")
        if name in self._orders:
            return self._in_order(name, there, mine, bound)
        own = {rank: run.same.get(name, name) for rank, run in enumerate(self.whole.ranks)}
        said = {rank: each.gradients_declared.get(own[rank], Declared()) for rank, each in step.theirs.items()}
        layout = made.found.reset_partial() if made.found is not None else None
        if all(each.layout is not None for each in said.values()):
            found = self._judge.judged(there, mine, bound, said)
            known = next(iter(said.values())).known
            silent = found.found is not None and any(axis not in known for axis in found.found.partial)
            if made.status != "right" or found.status != "right" or not silent:
                return found  # else it is a part of a sum, along an axis that the gradient says nothing of
        found = self._judge.judged(there, mine, bound, None, layout)
        if found.status == "wrong" and found.found is not None and not found.found.is_partial():
            return replace(
                found, status="right", sentence="", suggestion=""
            )  # replicated, or sharded: the update shows it
        if found.status == "wrong" and found.found is not None:
            axes = " and ".join(found.found.partial)
            sentence = f"{pending_words(found.found)}: nothing adds up the gradients of ranks that share the parameter"
            hint = f"an all_reduce of gradients over {axes}, as DDP or fully_shard would do"
            return replace(found, sentence=sentence, suggestion=hint)
        return found

    def events(self) -> Iterator[Judged]:
        """Judge the parameters as they were made."""
        for name, mine in self.whole.expected.initial.items():
            found = self._made_of(name, mine)
            if found.status in ("right", "pending", "private", "absent"):
                self.made_as[name] = found
            yield Judged(*split_name(name), "parameter", found)
        for name, first in self.whole.expected.same.items():
            apart = [
                rank
                for rank, run in enumerate(self.whole.ranks)
                if name in run.same and first in run.same and run.same[name] != run.same[first]
            ]
            if apart:
                sentence = f"one tensor with {first} on one device, and a parameter of its own on {ranks_phrase(apart)}"
                found = Finding("wrong", sentence=sentence, suggestion=f"tie {name} to {first} again")
                yield Judged(*split_name(name), "parameter", found)

    def _made_of(self, name: str, mine: torch.Tensor) -> Finding:
        there = self._there(name, [run.initial for run in self.whole.ranks])
        if not there:
            sentence = "the parallel model has no parameter of that name, so nothing is known of it"
            return incomparable(sentence, "keep the names of the single-device model")
        if len(there) < len(self.whole.ranks):
            return self._of_some(name, mine, there)
        own = {rank: run.same.get(name, name) for rank, run in enumerate(self.whole.ranks)}
        said = {rank: run.declared[own[rank]] for rank, run in enumerate(self.whole.ranks)}
        bound = self._judge.bound("initial", mine)
        found = self._judge.judged(there, mine, bound, said, self._judge.given.said.parameters.get(name))
        if found.status != "unexplained":
            return found
        places = self._there(name, [run.places for run in self.whole.ranks])
        if len(places) == len(self.whole.ranks) and furthest(there, mine, places) == 0:
            self._orders[name] = places
            return Finding("right", bound=bound)
        order = order_of(there, mine)
        if order is None:
            return found
        self._orders[name] = order
        self.whole.note(f"{name} is held in an order that no layout says, and compared in that: {found.sentence}")
        return replace(found, status="private", error=0.0, ratio=0.0)

    def _of_some(self, name: str, mine: torch.Tensor, there: Parts) -> Finding:
        """Judge a parameter that some ranks do not have: right for experts, of which each rank calls only its own."""
        lacking = [rank for rank in self._every if rank not in there]
        sentence = f"{ranks_phrase(lacking)} {'has' if len(lacking) == 1 else 'have'} no such parameter"
        path = split_name(name)[0]
        if any(path in step.called for rank in lacking for step in self.whole.ranks[rank].steps[:1]):
            return incomparable(sentence)
        otherwise = f"{ranks_phrase(there)} alone {'has' if len(there) == 1 else 'have'} it, and not with its values"
        found = within(_furthest_copy(there, mine), self._judge.bound("initial", mine), otherwise)
        if found.status == "wrong":
            return found
        self.owned.setdefault(path, tuple(there))
        return Finding("absent", sentence=sentence)

    def _of_owners(self, parts: Parts, full: torch.Tensor, bound: float) -> Finding:
        """Compare what the ranks that have a parameter hold of it, or of its gradient."""
        have = "has" if len(parts) == 1 else "have"
        otherwise = f"it is not that of one device; {ranks_phrase(parts)} alone {have} it"
        return within(_furthest_copy(parts, full), bound, otherwise)

    def _in_order(self, name: str, parts: Parts, full: torch.Tensor, bound: float) -> Finding:
        """Compare parts of a parameter, or of its gradient, in the order in which the ranks hold it."""
        otherwise = "it is not that of one device, in the order in which the ranks hold the parameter"
        return within(furthest(parts, full, self._orders[name]), bound, otherwise)

    def with_orders(self, rows: list[ReportRow], step: PlanStep) -> list[ReportRow]:
        """Blame parameters in an order of their own, where forward goes wrong and nothing right is made of them."""
        if first_bug(step.forward_rows) is None:
            return rows
        right = [event for event in step.events if event.finding.status == "right" and not event.finding.is_zero]
        fine = [event for event in right if event.tensor.startswith("output")]
        for name in self._orders:
            made = Judged("", "", "parameter", Finding("right"), (self.whole.expected.leaves[name],))
            if not any(step.graph.forward(made, event) for event in fine):
                odd = (*split_name(name), "private")  # not those whose DTensors declare their order
                rows = [
                    replace(row, verdict="bug") if (row.module, row.tensor, row.verdict) == odd else row for row in rows
                ]
        return rows

    def _there(self, name: str, held: Sequence[Mapping[str, torch.Tensor | None]]) -> Parts:
        """Return each rank's tensor of a parameter, of the ranks that have one."""
        ranks = enumerate(zip(self.whole.ranks, held, strict=True))
        return present({rank: tensors.get(run.same.get(name, name)) for rank, (run, tensors) in ranks})

    def updates(self, step: PlanStep, *, is_only: bool) -> Iterator[Judged]:
        """Judge the parameters after the optimizer's step."""
        updates = self.whole.updates_of(step.number)
        for name, mine in step.mine.updates.items():
            made = self.made_as.get(name)
            if made is None:
                continue
            there = self._there(name, [each.updates for each in step.theirs.values()])
            bound = self._judge.bound("update", mine, ROUNDINGS * (step.number + 1))
            found = updates.judged(name, there, self._updated(step.number, name, mine, there, made, bound))
            module, tensor = split_name(name)
            title = tensor if is_only else f"{tensor} after step {step.number + 1}"
            yield Judged(module, title, "update", found)

    def _updated(
        self, number: int, name: str, mine: torch.Tensor, there: Parts, made: Finding, bound: float
    ) -> Finding:
        if made.status == "absent":
            return self._of_owners(there, mine, bound)
        if len(there) < len(self.whole.ranks):
            return replace(absent(list(there), self._every, made.declared), status="wrong")
        if name in self._orders:
            return self._in_order(name, there, mine, bound)
        found = replace(self._judge.judged(there, mine, bound, None, made.found), declared=made.declared)
        if found.status == "wrong" and made.status == "pending":
            sentence = "each rank holds a share of it and stepped on that; the sum is not what it should be"
            return replace(found, sentence=sentence, suggestion="replicate it on every rank, and add up its gradients")
        if found.status == "wrong" and self._is_unmoved(number, name, there):
            hint = "a step on the parameters themselves"
            return replace(found, sentence="no rank has changed it, one device has", suggestion=hint)
        return found

    def _is_unmoved(self, number: int, name: str, after: Parts) -> bool:
        """Return True if no rank has changed a parameter in the step."""
        for rank, run in enumerate(self.whole.ranks):
            before = run.weights(number).get(run.same.get(name, name))
            if before is None or rank not in after or not torch.equal(before, after[rank]):
                return False
        return True


def _furthest_copy(parts: Mapping[int, torch.Tensor], full: torch.Tensor) -> float:
    """Return how far copies are from a tensor at most; infinite for a part of it."""
    if any(part.shape != full.shape for part in parts.values()):
        return math.inf
    return max((float((part - full).abs().max()) for part in parts.values() if part.numel()), default=0.0)


def _splitting(layout: Layout, dims: int | None = None) -> list[str]:
    """Return the axes that split a tensor, or the first of its dims."""
    entries = (layout.alias_placements or ())[:dims]
    return [name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry) if name != "None"]


def _by_place(run: LoopRecord) -> dict[tuple[str, str, int], Draw]:
    """Return the random draws by module, operation and how many there were before."""
    found: dict[tuple[str, str, int], Draw] = {}
    count: dict[tuple[str, str], int] = {}
    for draw in run.draws:
        place = (draw.path, draw.op)
        number = count[place] = count.get(place, -1) + 1
        found[draw.path, draw.op, number] = draw
    return found
