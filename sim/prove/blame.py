"""From single findings to rows, and to the first place that is to blame."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sim.prove.judge import Finding, pending_words, short
from sim.prove.record import Entry
from sim.prove.report import Row

__all__ = [
    "CUT_OFF",
    "Event",
    "Graph",
    "advised",
    "first_bug",
    "innermost",
    "leaf",
    "nodes_of",
    "row_of",
    "settle",
    "title_of",
]

_VERDICTS = {
    "pending": "pending",
    "private": "private",
    "absent": "skipped",
    "missing": "skipped",
    "wrong": "bug",
    "unexplained": "bug",
}

CUT_OFF = "look for what cuts it off: detach, no_grad, a collective in place, gradients that are not synchronised"


@dataclass
class Event:
    """One tensor that was judged.

    Attributes:
        module: path of its module.
        tensor: what it is called there.
        kind: as in `Row`.
        finding: what the ranks hold.
        nodes: where it stands in the graph of the model on one device; () where that is not known.
        final: nothing comes after it that could take a reduction.
        given: it has no history of its own, such as a table of constants; its nodes are of what is made with it.
    """

    module: str
    tensor: str
    kind: str
    finding: Finding
    nodes: tuple[Any, ...] = ()
    final: bool = False
    given: bool = False

    @property
    def place(self) -> str:
        """The tensor with its module."""
        return row_of(self).place


def row_of(event: Event) -> Row:
    """Return what the report says of an event."""
    found = event.finding
    verdict = _VERDICTS.get(found.status) or ("exact" if found.error == 0 else "rounding")
    if found.status == "pending" and event.final:
        verdict = "bug"
    return Row(
        event.module,
        event.tensor,
        event.kind,
        found.declared,
        short(found.found),
        found.error,
        found.bound,
        found.ratio,
        verdict,
        found.sentence,
        found.suggestion,
    )


def title_of(entry: Entry) -> str:
    """Name a tensor at a boundary, as "input x" or "output"."""
    name = entry.title.lstrip(".")
    return entry.key.side if name in ("", entry.key.side) else f"{entry.key.side} {name}"


def settle(events: Sequence[Event], later: Callable[[Event, Event], bool]) -> list[Row]:
    """Return the rows of events, forgiving what does no harm, with the place to blame marked as a bug.

    A tensor that nothing explains, and from which something right is computed, is a module's private matter. Where a
    tensor is wrong, and parts of a sum on the way to it were never added up, those are to blame. They were added up, in
    whatever way, where all ranks came to hold the same.

    Args:
        events: in the order in which they happen.
        later: whether the second of two events is computed from the first.
    """
    rows = [row_of(event) for event in events]
    # What is zero, but for rounding, comes out right whatever went wrong before it.
    told = [not event.finding.is_zero and not event.given for event in events]
    right = [at for at, event in enumerate(events) if event.finding.status == "right" and told[at]]
    ends = [event.finding.status for event in events if event.final]
    ends_well = bool(ends) and all(status == "right" for status in ends)
    for at, event in enumerate(events):
        healed = (
            event.finding.status == "unexplained"
            and not event.final
            and (any(other > at and later(event, events[other]) for other in right) if event.nodes else ends_well)
        )
        if healed:
            rows[at] = replace(rows[at], verdict="private", suggestion="")
    bug = next((at for at, row in enumerate(rows) if row.verdict == "bug"), None)
    if bug is None:
        return rows
    if not rows[bug].suggestion:
        rows[bug] = replace(rows[bug], suggestion=_window(events, bug, later))
    for at in range(bug):
        if rows[at].verdict not in ("pending", "skipped") or not later(events[at], events[bug]):
            continue
        if any(at < other and later(events[at], events[other]) for other in right):
            continue
        reduced = [e for e in range(at, bug + 1) if _was_reduced(events[at], events[e])]
        reduced = [e for e in reduced if e == bug or (later(events[at], events[e]) and later(events[e], events[bug]))]
        if not reduced:
            rows[at] = _to_blame(events[at], rows[at], events[bug])
        elif reduced[0] != bug:
            rows[reduced[0]] = _divided(rows[reduced[0]], events[reduced[0]], events[bug])
        break
    return rows


def _window(events: Sequence[Event], bug: int, later: Callable[[Event, Event], bool]) -> str:
    """Say where to look: from the last right tensor that leads to the wrong one."""
    harmed = events[bug]
    before = [
        event
        for event in events[:bug]
        if event.finding.status == "right"
        and (later(event, harmed) or (event.module == harmed.module and event.tensor.startswith("input")))
    ]
    last = next((event for event in reversed(before) if not event.finding.is_zero), before[-1] if before else None)
    return f"look at what is computed from {last.place}, which is right, to this" if last is not None else ""


def _was_reduced(event: Event, other: Event) -> bool:
    """Whether all ranks hold the same of a tensor, along the axes along which another one is pending."""
    found = event.finding.found
    return found is not None and found.is_partial() and set(found.partial) <= set(other.finding.alike)


def _divided(row: Row, event: Event, harmed: Event) -> Row:
    """Blame equal copies that would be right if they were added up."""
    found = event.finding.found
    assert found is not None
    axes = " and ".join(found.partial)
    copies = math.prod(found.mesh_shape[found.alias_name.index(name)] for name in found.partial)
    sentence = f"every part is 1/{copies} of what it should be: averaged once too often over {axes!r}"
    hint = f"the sum over {axes} there, and no mean or division"
    return replace(row, verdict="bug", sentence=f"{sentence}; and {harmed.place} is wrong", suggestion=hint)


def _to_blame(event: Event, row: Row, harmed: Event) -> Row:
    found = event.finding.found
    if event.finding.status != "pending" or found is None:
        hint = CUT_OFF if event.kind == "gradient" else row.suggestion
        if event.finding.status == "absent" and event.kind == "forward":
            called = f"{event.module or 'the model'} on all ranks"
            hint = f"call {called}; or, if each has modules of its own, look at how {harmed.place} is made of all"
        told = f"{event.finding.sentence}, and {harmed.place} is wrong"
        return replace(row, verdict="bug", sentence=told, suggestion=hint)
    axes = " and ".join(found.partial)
    op = "all_reduce (or reduce_scatter)"
    sentence = f"the ranks hold {pending_words(found)}, and nothing reduced it before {harmed.place}"
    how = "in the backward of its module" if event.kind == "gradient" else "after its module"
    return replace(row, verdict="bug", sentence=sentence, suggestion=f"{op} over {axes} {how}")


_ADVICE = {
    "parameter": "look at how the ranks make, load or split it",
    "buffer": "a broadcast of it, or the same change on all ranks",
    "forward": "look at what the ranks are given",
    "gradient": "look at the loss, and at whether the ranks' losses are added up or averaged",
    "update": "the gradients are right: look at what the optimizer does on each rank",
}


def advised(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with advice in the first that is a bug, where nobody knows anything better."""
    bug = first_bug(rows)
    return [
        replace(row, suggestion=_ADVICE.get(row.kind, "")) if row is bug and not row.suggestion else row for row in rows
    ]


def first_bug(rows: Iterable[Row]) -> Row | None:
    """Return the first row that is a bug."""
    return next((row for row in rows if row.verdict == "bug"), None)


class Graph:
    """What is computed from what, in autograd's graph of the model on one device.

    A node's ancestors are found once, and only for nodes that somebody asks about.
    """

    def __init__(self) -> None:
        self._known: dict[Any, frozenset[Any]] = {}

    def depends(self, node: Any, on: Any) -> bool:
        """Whether a node's value is computed from another's."""
        return on in self.before(node)

    def before(self, node: Any) -> frozenset[Any]:
        """Return the node and everything that it is computed from; leaves stand for themselves."""
        found = self._known.get(node)
        if found is None:
            seen, stack = {node}, [node]
            while stack:
                for earlier, _ in stack.pop().next_functions:
                    if earlier is not None and earlier not in seen:
                        seen.add(earlier)
                        stack.append(earlier)
            leaves = {getattr(each, "variable", None) for each in seen}
            found = self._known[node] = frozenset([*seen, *(id(leaf) for leaf in leaves if leaf is not None)])
        return found

    def forward(self, earlier: Event, later: Event) -> bool:
        """Whether the later tensor is computed from the earlier one."""
        return any(self.depends(node, on) for node in later.nodes for on in earlier.nodes if not isinstance(node, int))

    def backward(self, earlier: Event, later: Event) -> bool:
        """Whether the later gradient is computed from the earlier one."""
        return any(self.depends(node, on) for node in earlier.nodes for on in later.nodes if not isinstance(node, int))


def nodes_of(entry: Entry) -> tuple[Any, ...]:
    """Return where a tensor stands in the graph."""
    return () if entry.node is None else (entry.node,)


def leaf(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return where a parameter stands in the graph: nothing is before it."""
    return (id(parameter),)


def innermost(entries: Sequence[Entry]) -> Entry:
    """Of the boundaries at which one gradient was seen, return the one that says best who computed it.

    That is the input of the innermost module, or, where several modules share it, whatever gave it to them.
    """
    inputs = [entry for entry in entries if entry.key.side == "input"] or list(entries)
    depth = max(entry.key.path.count(".") for entry in inputs)
    deepest = [entry for entry in inputs if entry.key.path.count(".") == depth]
    return deepest[0] if len(deepest) == 1 else entries[0]
