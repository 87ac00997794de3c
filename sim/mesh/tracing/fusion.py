"""Fusion: which operations a compiler makes one kernel of, and one event in place of theirs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from sim.mesh.program import MEMORY_KINDS, Alloc, Event, Free, Op, Place, Program, Segment, Touch
from sim.mesh.tracing.kinds import FUSION

# Fusion groups: the operations of a traced graph that a compiler makes one kernel of ----------------------------------
#
# The rules are those by which TorchInductor does it (`torch/_inductor/ir.py`, `scheduler.py`), in short:
#
# 1. What works element by element is computed where its result is read, again for each reader, and is not written,
#    unless a product of matrices or the graph's caller needs it, or it has several readers and reads much itself.
# 2. A reduction is written.
# 3. Two of what is written become one kernel if one reads the other or both read the same, and they go over the same
#    elements: a reduction goes over those that it reads. Reductions over different dims do not.
# 4. Products, attention, sorting and what else is no loop over elements stay what they are.

_VIEWS, _REDUCTIONS, _ELEMENTWISE = (FUSION[name] for name in ("views", "reductions", "elementwise"))
_READS_SHARED = 4  # what has several readers and reads more buffers than this is written (realize_reads_threshold)
_READS_ALONE = 8  # so is what reads more than this (realize_acc_reads_threshold)


@dataclass
class _FusedKernel:
    """What is computed together.

    Attributes:
        nodes: those that are written, or one that stays what it is.
        fuses: whether others may join.
        elements: that it goes over; those of a reduction's argument.
        rows: of a reduction: elements of its result and the dims it reduces; None: there is no reduction.
        reads: what it reads, with bytes.
        needs: what must have been written before.
    """

    nodes: list[fx.Node]
    fuses: bool
    elements: int
    rows: tuple[int, Any] | None
    reads: dict[fx.Node, int] = field(default_factory=dict)
    needs: set[fx.Node] = field(default_factory=set)


def order_by_kernel(graph: fx.Graph) -> fx.Graph:
    """Return the graph with what becomes one kernel in a row, and its number in `meta["kernel"]`.

    What is computed again for each reader is in the graph once for each of them. Views go with their readers.

    Args:
        graph: of functions, as `aot_function` traces them, with `meta["val"]`; numbers start from 0.
    """
    return _Ordering(graph).ordered()


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or _name(node) in _VIEWS


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_elementwise(node: fx.Node) -> bool:
    name = _name(node)
    if not name or name in _REDUCTIONS or _mutates(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    target: Any = node.target
    if name == "scatter" and len(node.args) == 4 and not isinstance(node.args[3], fx.Node):
        return isinstance(node.args[0], fx.Node) and _name(node.args[0]) == "full"  # is "where its index is"
    return name in _ELEMENTWISE or torch.Tag.pointwise in target.tags


def _is_reduction(node: fx.Node) -> bool:
    return _name(node) in _REDUCTIONS and isinstance(_first(node.meta.get("val")), torch.Tensor)


def _draws(node: fx.Node) -> bool:
    target: Any = node.target
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _first(value: Any) -> Any:
    return next((each for each in value if each is not None), None) if isinstance(value, (tuple, list)) else value


def _elements(node: fx.Node) -> int:
    value = _first(node.meta.get("val"))
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


def _bytes(node: fx.Node) -> int:
    value = _first(node.meta.get("val"))
    return int(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


class _Ordering:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.work = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self.written: set[fx.Node] = set()
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.work:
            self._settle(node)
        self.kernels = [self._kernel(node) for node in self.work if node in self.written]
        self.of = {node: kernel for kernel in self.kernels for node in kernel.nodes}

    # -- what is written

    def _settle(self, node: fx.Node) -> None:
        """Say of a node whether it is written, and which of what is written it reads."""
        reads = frozenset(
            source
            for given in node.all_input_nodes
            for source in ([given] if given in self.written or given.op == "placeholder" else self.sources[given])
        )
        self.sources[node] = reads
        if node.op != "call_function" or _is_view(node):
            return
        if not _is_elementwise(node) or _draws(node):
            self.written.add(node)
            return
        readers = list(self._readers(node))
        most = _READS_SHARED if len(readers) > 1 else _READS_ALONE
        if len(reads) > most or not all(_is_elementwise(reader) or _is_reduction(reader) for reader in readers):
            self.written.add(node)

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield who reads a node, or a view of it."""
        for user in node.users:
            if user.op == "call_function" and _is_view(user):
                yield from self._readers(user)
            else:
                yield user

    # -- kernels

    def _kernel(self, node: fx.Node) -> _FusedKernel:
        fuses = _is_elementwise(node) or _is_reduction(node)
        elements, rows = _elements(node), None
        if _is_reduction(node):
            argument = node.all_input_nodes[0]
            dims = node.args[1] if len(node.args) > 1 and not isinstance(node.args[1], torch.dtype) else None
            elements, rows = _elements(argument), (_elements(node), _side(argument, dims))
        kernel = _FusedKernel([node], fuses, elements, rows, needs=set(self.sources[node]))
        kernel.reads = {source: _bytes(source) for source in self.sources[node]}
        if _mutates(node):  # after all that has read what it changes
            changed = {each for given in node.all_input_nodes[:1] for each in (given, *self.sources.get(given, ()))}
            before = [other for other in self.work if other in self.written and self.place[other] < self.place[node]]
            kernel.needs.update(other for other in before if changed & self.sources[other])
        return kernel

    def _before(self) -> dict[int, set[int]]:
        """Return of each kernel those that it needs, and those that they need, by their ids."""
        found: dict[int, set[int]] = {}

        def search(kernel: _FusedKernel) -> set[int]:
            if id(kernel) not in found:
                found[id(kernel)] = set()
                for other in self._needs(kernel):
                    found[id(kernel)] |= {id(other)} | search(other)
            return found[id(kernel)]

        for kernel in self.kernels:
            search(kernel)
        return found

    def _needs(self, kernel: _FusedKernel) -> list[_FusedKernel]:
        return list({id(each): each for each in (self.of.get(node) for node in kernel.needs) if each}.values())

    def _fuse(self) -> None:
        while True:
            pairs: list[tuple[int, int, int, _FusedKernel, _FusedKernel]] = []
            for i, one in enumerate(self.kernels):
                for other in self.kernels[i + 1 :]:
                    if shared := self._shared(one, other):
                        distance = abs(self.place[one.nodes[0]] - self.place[other.nodes[0]])
                        pairs.append((-shared, distance, len(pairs), one, other))
            before = self._before()
            for *_, one, other in sorted(pairs):
                if self._may_join(one, other, before):
                    self._join(one, other)
                    break
            else:
                return

    def _shared(self, one: _FusedKernel, other: _FusedKernel) -> int:
        """Return how many bytes are not moved if two become one; 0: they do not go together."""
        if not (one.fuses and other.fuses and _same_elements(one, other)):
            return 0
        if _goes_back(one, other) or _goes_back(other, one):
            return 0
        passed = sum(size for node, size in other.reads.items() if node in one.nodes)
        passed += sum(size for node, size in one.reads.items() if node in other.nodes)
        first, second = sorted((one, other), key=lambda kernel: self.place[kernel.nodes[0]])
        start = self.place[first.nodes[-1]]
        if not passed and any(self.place[node] > start for node in second.needs):
            return 0  # what the first one reads would have to wait for the second, and take memory meanwhile
        return 2 * passed + sum(size for node, size in one.reads.items() if node in other.reads)

    def _may_join(self, one: _FusedKernel, other: _FusedKernel, before: dict[int, set[int]]) -> bool:
        """Tell whether nothing else has to run between two kernels."""
        for first, second in ((one, other), (other, one)):
            if any(each is not first and id(first) in before[id(each)] for each in self._needs(second)):
                return False
        return True

    def _join(self, one: _FusedKernel, other: _FusedKernel) -> None:
        one.nodes = sorted([*one.nodes, *other.nodes], key=self.place.__getitem__)
        one.elements = max(one.elements, other.elements)
        one.rows = one.rows or other.rows
        one.needs = (one.needs | other.needs) - set(one.nodes)
        one.reads = {node: size for node, size in {**one.reads, **other.reads}.items() if node not in one.nodes}
        self.of.update(dict.fromkeys(one.nodes, one))
        self.kernels.remove(other)

    # -- the new graph

    def ordered(self) -> fx.Graph:
        self._fuse()
        new, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                made[node] = new.node_copy(node, made.__getitem__)
        left = sorted(self.kernels, key=lambda kernel: self.place[kernel.nodes[0]])
        done, number = set[fx.Node](), 0
        while left:
            kernel = next(each for each in left if all(need in done for need in each.needs if need in self.of))
            left.remove(kernel)
            inlined: dict[fx.Node, fx.Node] = {}
            for node in kernel.nodes:
                made[node] = self._copy(new, node, made, inlined, number)
            done.update(kernel.nodes)
            number += 1
        last = next(iter(reversed(self.graph.nodes)))
        tail: dict[fx.Node, fx.Node] = {}
        new.node_copy(last, lambda node: self._made(new, node, made, tail, number))
        return new

    def _copy(self, new: fx.Graph, node: fx.Node, made: Any, inlined: Any, number: int) -> fx.Node:
        copied = new.node_copy(node, lambda given: self._made(new, given, made, inlined, number))
        copied.meta = {**node.meta, "kernel": number}
        return copied

    def _made(self, new: fx.Graph, node: fx.Node, made: Any, inlined: Any, number: int) -> fx.Node:
        if node in made:
            return made[node]
        if node not in inlined:
            inlined[node] = self._copy(new, node, made, inlined, number)
        return inlined[node]


def _same_elements(one: _FusedKernel, other: _FusedKernel) -> bool:
    """Tell whether two kernels go over the same elements in the same order."""
    if one.rows is not None and other.rows is not None:
        return one.elements == other.elements and one.rows == other.rows
    plain, reduces = (one, other) if one.rows is None else (other, one)
    return plain.elements == reduces.elements or (reduces.rows is not None and plain.elements == reduces.rows[0])


def _goes_back(reduces: _FusedKernel, reads: _FusedKernel) -> bool:
    """Tell whether a kernel needs sums over the first dims of elements that it then goes over once more.

    Each of these sums has elements from all over the tensor, so that none is there before all have been read.
    """
    if reduces.rows is None or reduces.rows[1] != "first" or reads.elements != reduces.elements:
        return False
    return any(node in reads.needs for node in reduces.nodes if _is_reduction(node))


def _side(argument: fx.Node, dims: Any) -> str:
    """Tell which dims are reduced: all, the last ones, the first ones, or others."""
    value = argument.meta["val"]
    if dims is None or dims == []:
        return "all"
    given = {dim % max(value.dim(), 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
    live = [dim for dim in range(value.dim()) if value.shape[dim] != 1]
    reduced = [dim for dim in live if dim in given]
    if reduced == live:
        return "all"
    if reduced == live[len(live) - len(reduced) :]:
        return "last"
    return "first" if reduced == live[: len(reduced)] else str(reduced)


# One kernel where a compiler makes one of many operations: in what was recorded, one `Op` in place of several ---------
#
# `sim.mesh.tracing.compiled` numbers the kernels while the operations run, and a recorder writes the number into
# `Place.compiled`. Here operations in a row with one number become an `Op` of kind "fused":
#
# 1. It reads what its operations read of blocks that were there before them, each once.
# 2. It writes the blocks that are still there after it. The others vanish: such values stay in registers.
# 3. Where it is the last to read a block that a compiled graph has made, its result takes that block's place, if it
#    is as large: a compiler writes there.

_FUSABLE = frozenset({*MEMORY_KINDS, "random", "host", "fused"})
_NAMES_SHOWN = 4


def fuse(program: Program) -> Program:
    """Return the program with one operation for each kernel of what is compiled.

    What is not compiled, products of matrices, attention and communication stay as they are. The bytes that a kernel
    moves are those that its operations move to and from blocks that are there before or after them.
    """
    if not any(place.compiled for place in program.places):
        return program
    sizes = {
        event.block: event.bytes
        for segment in program.segments.values()
        for event in segment.events
        if isinstance(event, Alloc)
    }
    own = set[int]().union(*[_made_by_compiled(part.events, program.places) for part in program.segments.values()])
    segments = {
        key: Segment(part.name, part.stage, part.variant, fuse_events(part.events, program.places, sizes, own))
        for key, part in program.segments.items()
    }
    return replace(program, segments=segments)


def fuse_events(
    events: Sequence[Event], places: Sequence[Place], sizes: Mapping[int, int], own: Collection[int] | None = None
) -> list[Event]:
    """Return events with one operation for each kernel of what is compiled.

    >>> double = Op("aten.mul", "memory", 0, (Touch(1, 8),), (Touch(2, 8),), "float32", (), 0, 1)
    >>> negate = Op("aten.neg", "memory", 0, (Touch(2, 8),), (Touch(3, 8),), "float32", (), 0, 1)
    >>> recorded = [Alloc(2, 8, 0), double, Alloc(3, 8, 0), negate, Free(2)]
    >>> alloc, kernel = fuse_events(recorded, [Place("build"), Place("forward", compiled=1)], {1: 8, 2: 8, 3: 8})
    >>> kernel.name, kernel.reads, kernel.writes
    ('fused.mul_neg', (Touch(block=1, bytes=8),), (Touch(block=3, bytes=8),))

    Args:
        events: in the order of issue.
        places: that the events name.
        sizes: of blocks, in bytes, by number.
        own: blocks that compiled graphs have made, in whose place they may write. None: those made by these events.
    """
    result: list[Event] = []
    own = _made_by_compiled(events, places) if own is None else own
    for number, run in _runs(events, places):
        operations = [event for event in run if isinstance(event, Op)]
        if number and len(operations) > 1 and all(op.kind in _FUSABLE for op in operations):
            result += _one_kernel(run, operations, sizes, own)
        else:
            result += run
    return result


def _runs(events: Sequence[Event], places: Sequence[Place]) -> Iterator[tuple[int, list[Event]]]:
    """Yield the events of each kernel in a row, with its number, and what is between with 0.

    Taking and giving back memory goes with the operation before it; what is taken last, with the one after it.
    """
    number, run = 0, list[Event]()
    for event in events:
        if isinstance(event, (Alloc, Free)):
            run.append(event)
            continue
        new = places[event.place].compiled if isinstance(event, Op) else 0
        if new != number or not new:
            ahead = len(run)
            while ahead and isinstance(run[ahead - 1], Alloc):
                ahead -= 1
            yield number, run[:ahead]
            number, run = new, run[ahead:]
        run.append(event)
    yield number, run


def _made_by_compiled(events: Sequence[Event], places: Sequence[Place]) -> set[int]:
    return {
        touch.block
        for event in events
        if isinstance(event, Op) and places[event.place].compiled
        for touch in event.writes
    }


def _one_kernel(run: list[Event], operations: list[Op], sizes: Mapping[int, int], own: Collection[int]) -> list[Event]:
    taken = {event.block: event for event in run if isinstance(event, Alloc)}
    freed = {event.block for event in run if isinstance(event, Free)}
    read, written = dict[int, int](), dict[int, int]()
    for op in operations:
        for touch in op.reads:
            if touch.block not in taken and touch.block not in written:
                _add(read, touch, sizes)
        for touch in op.writes:
            if not (touch.block in taken and touch.block in freed):
                _add(written, touch, sizes)
    before: list[Event] = []
    after = [Free(block) for block in freed if block not in taken]
    new = [event for block, event in taken.items() if block not in freed]
    for event in new:
        fits = (free for free in after if free.block in read and sizes.get(free.block) == event.bytes)
        last = next((free for free in fits if free.block in own), None)
        if last is not None:
            after.remove(last)
            before.append(last)
    heaviest = max(operations, key=lambda op: op.bytes)
    kernel = Op(
        _fused_name(operations),
        "fused",
        sum(op.flops for op in operations),
        tuple(Touch(block, size) for block, size in read.items()),
        tuple(Touch(block, size) for block, size in written.items()),
        heaviest.dtype,
        (),
        operations[-1].stream,
        operations[-1].place,
    )
    return [*before, *new, kernel, *after]


def _add(found: dict[int, int], touch: Touch, sizes: Mapping[int, int]) -> None:
    """Count what is touched of a block: two operations that touch half of it each touch it all, but no more."""
    whole = max(sizes.get(touch.block, 0), touch.bytes)
    found[touch.block] = min(whole, found.get(touch.block, 0) + touch.bytes)


def _fused_name(operations: list[Op]) -> str:
    """Return a name made of those that a kernel's operations have most often."""
    names = Counter(op.name.rpartition(".")[2].strip("_") for op in operations if op.kind != "host")
    shown = [name for name, _ in names.most_common(_NAMES_SHOWN)]
    return "fused." + "_".join(shown)
