"""Marks of partial sums: the local tensors of `Partial` DTensors, and errors where one is used as if it were the sum.

`DTensor.to_local()` of a `Partial` hands out one rank's part of a sum. As long as only linear things happen to it
(it is moved, scaled, multiplied by a full value, added to another part), the sum over the ranks can still be taken
later. What is not linear gives another result on the parts than on the sum, without any error: `relu`, a product of
two parts, a constant that is added on every rank. A mode on the rank's thread looks at each operation of torch and
carries the mark along, by storage; communication ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter

from sim.comm.collectives import Call
from sim.comm.group import Endpoint, Message, Network, Slot
from sim.comm.observer import Observer
from sim.explain.errors import ReplicaMismatch
from sim.explain.lines import user_line
from sim.kernel.context import current_context
from sim.observers.spread import axis_names
from sim.ops import PLAIN, Level, OnOperations, Proceed, Subscriber, tensors_of, written_tensors

_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_FEWEST_TO_TIDY = 256


class RankPartials:
    """What is partial on one rank.

    Args:
        network: Of its world, which a misuse ends.
        rank: Whose tensors these are.
    """

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self._rank = rank
        # A storage that is gone is held weakly, so that no other one can take its number before its mark is dropped.
        self._marks: dict[int, tuple[StorageWeakRef, Mark]] = {}
        self._tidy_at = _FEWEST_TO_TIDY

    def __bool__(self) -> bool:
        return bool(self._marks)

    def take(self, x: DTensor, local: torch.Tensor) -> None:
        """Mark what `to_local` has returned, if it is a part of a reduction."""
        mark = _part_of(x)
        if mark is not None:
            wait = getattr(local, "wait", None)  # the result of a functional collective that nobody has waited for
            self.put([local if wait is None else wait()], mark)

    def put(self, tensors: Iterable[torch.Tensor], mark: Mark) -> None:
        """Mark tensors, and all views of them."""
        for tensor in tensors:
            if type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._marks[storage._cdata] = (StorageWeakRef(storage), mark)
        if len(self._marks) > self._tidy_at:
            self._marks = {key: entry for key, entry in self._marks.items() if not entry[0].expired()}
            self._tidy_at = max(_FEWEST_TO_TIDY, 2 * len(self._marks))

    def of(self, tensor: torch.Tensor) -> Mark | None:
        """The mark of a tensor, if it has one."""
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            return None
        entry = self._marks.get(tensor.untyped_storage()._cdata)
        return None if entry is None or entry[0].expired() else entry[1]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that tensors hold something else now."""
        if self._marks:
            for tensor in tensors:
                if type(tensor) in PLAIN and tensor.layout is torch.strided:
                    self._marks.pop(tensor.untyped_storage()._cdata, None)

    def clear(self) -> None:
        """Forget all: the rank's function has ended."""
        self._marks.clear()

    def refuse(self, name: str, mark: Mark, reason: str, on: torch.Tensor) -> ReplicaMismatch:
        """End the world because `name` was called on a part."""
        kind = f"{str(on.dtype).removeprefix('torch.')} {list(on.shape)}"
        error = ReplicaMismatch(
            f"rank {self._rank} used a part of a {mark.reduction} as if it were the {mark.reduction}: {reason}\n"
            f"  partial: {mark}, taken at {mark.line}\n"
            f"  used:    {user_line()}, by {name} on {kind}\n"
            "  try: x.redistribute(placements=[Replicate()]) before x.to_local(), or all_reduce the part first\n"
            f"  replay: {self._network.replay}"
        )
        self._network.scheduler.fail(error)
        return error


def _part_of(x: DTensor) -> Mark | None:
    """What the local tensor of a DTensor is a part of; None: of no reduction."""
    rows = zip(axis_names(x.device_mesh), x.device_mesh.shape, x.placements, strict=True)
    pending = [(name, size, str(getattr(p, "reduce_op", "sum"))) for name, size, p in rows if p.is_partial()]
    if not pending:
        return None
    kinds = dict.fromkeys(reduction for _, _, reduction in pending)
    ranks = math.prod(size for _, size, _ in pending)
    return Mark(" and ".join(kinds), tuple(name for name, _, _ in pending), ranks, user_line())


# -- the rank's operations -----------------------------------------------------------------------------------------


class _Operations(OnOperations):
    """Carries the marks along."""

    order = Level.PARTIALS

    def __init__(self, partials: RankPartials) -> None:
        self._partials = partials

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        if any(kind not in PLAIN for kind in types):
            # A DTensor, which takes care of its parts, so that they need not be looked at: apart from one operation.
            if func._opname == "_local_scalar_dense" and isinstance(args[0], DTensor):
                mark = _part_of(args[0])
                if mark is not None:
                    raise self._partials.refuse("item()", mark, "item() reads this rank's part", args[0]._local_tensor)
            return proceed(*args, **kwargs)
        return self._on_plain(func, args, kwargs, proceed) if self._partials else proceed(*args, **kwargs)

    def _on_plain(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        partials = self._partials
        written = written_tensors(func, args, kwargs)
        if func.namespace in _COMMUNICATION:
            result = proceed(*args, **kwargs)
            partials.forget([*tensors_of((result,)), *written])
            return result
        marks = [(tensor, mark) for tensor in tensors_of((args, kwargs)) if (mark := partials.of(tensor)) is not None]
        if not marks:
            return proceed(*args, **kwargs)
        try:
            mark = follow(func, args, kwargs, partials.of)
        except Misuse as misuse:
            tensor, seen = marks[0]
            raise partials.refuse(f"{func.namespace}.{func._opname}", seen, str(misuse), tensor) from None
        result = proceed(*args, **kwargs)
        if func._opname.startswith("_foreach_") and mark is not None:  # one operation on each entry of its lists
            touched = _entries(args, {id(tensor) for tensor, _ in marks})
            results = result if result is not None else args[0]
            self._carry([tensor for tensor, is_part in zip(results, touched, strict=True) if is_part], written, mark)
            return result
        self._carry(tensors_of((result,)), written, mark)
        return result

    def _carry(self, results: Sequence[torch.Tensor], written: Sequence[torch.Tensor], mark: Mark | None) -> None:
        if mark is None:
            self._partials.forget(tensor for tensor in written if _covers_its_storage(tensor))
        else:
            # What is written to a piece of a buffer says nothing about the rest, so the buffer stays as it is.
            into = {id(tensor) for tensor in written if not _covers_its_storage(tensor)}
            self._partials.put((tensor for tensor in results if id(tensor) not in into), mark)


def _entries(args: Sequence[Any], parts: set[int]) -> list[bool]:
    """Per entry of the lists that an operation is given, whether any of them is a part."""
    lists = [value for value in args if isinstance(value, (list, tuple)) and len(value) == len(args[0])]
    return [any(id(value) in parts for value in row) for row in zip(*lists, strict=True)]


def _covers_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


class Partials(Observer):
    """Follows what is partial on all ranks of a network."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._partials: dict[int, RankPartials] = {}

    def issued(self, endpoint: Endpoint, what: Slot | Message, call: Call | None) -> None:
        """Note that what a rank receives is a part of nothing any more."""
        if call is not None:
            self._of(endpoint.rank).forget(call.outputs)
        elif isinstance(what, Message) and what.who_waits == "recv":
            self._of(endpoint.rank).forget([what.tensor])

    def ended(self, endpoint: Endpoint) -> None:
        """Forget all: the rank's function has ended."""
        self._of(endpoint.rank).clear()

    def _of(self, rank: int) -> RankPartials:
        partials = self._partials.get(rank)
        if partials is None:
            partials = self._partials[rank] = RankPartials(self._network, rank)
        return partials

    def watching(self, endpoint: Endpoint) -> Iterable[Subscriber]:
        """Return who follows what is partial on a thread of the rank's."""
        return (_Operations(self._of(endpoint.rank)),)

    def follow_when_taken(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`DTensor.to_local` that marks parts of reductions."""

        def to_local(x: DTensor, *args: Any, **options: Any) -> torch.Tensor:
            local = original(x, *args, **options)
            context = current_context()
            if context is not None and context.network is self._network:
                self._of(context.rank).take(x, local)
            return local

        return to_local


# -- what is linear: tables of names of ATen operations; one that is in none counts as not linear ----------------------


class Mark(NamedTuple):
    """What a tensor is a part of: a reduction over axes, and where it was taken."""

    reduction: str
    axes: tuple[str, ...]
    ranks: int
    line: str

    def is_like(self, other: Mark) -> bool:
        """Whether the sum of the two is a part of the same kind."""
        return (self.reduction, self.axes, self.ranks) == (other.reduction, other.axes, other.ranks)

    def __str__(self) -> str:
        axes = ", ".join(map(repr, self.axes))
        return f"{self.reduction} over {'axis' if len(self.axes) == 1 else 'axes'} {axes} ({self.ranks} ranks)"


MarkOf = Callable[[torch.Tensor], Mark | None]


class Misuse(Exception):
    """Why an operation must not be called on a part."""


# fmt: off
# They look at sizes and strides only, or write what does not depend on what was there; or they only look at values.
_UNRELATED = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_same_size", "sym_size", "sym_stride", "sym_numel",
    "sym_storage_offset", "record_stream", "is_pinned", "is_set_to", "equal", "_local_scalar_dense", "fill_", "random_",
    "uniform_", "normal_", "bernoulli_", "exponential_",
})
# They move elements, or copies of them, and put zeros elsewhere: right for parts of any reduction.
_MOVES = frozenset({
    "clone", "contiguous", "flip", "roll", "repeat", "index", "index_select", "gather", "take", "_unsafe_view",
    "view_copy", "permute_copy", "transpose_copy", "expand_copy", "as_strided_copy", "select_copy", "slice_copy",
    "squeeze_copy", "unsqueeze_copy", "unfold_copy", "detach_copy", "split_with_sizes_copy", "_pin_memory",
})
# They are linear in their first argument, and their other tensors are indices.
_LINEAR = frozenset({
    "neg", "sum", "mean", "cumsum", "tril", "triu", "trace", "constant_pad_nd", "conj_physical", "select_backward",
    "slice_backward", "diagonal_backward", "unfold_backward", "embedding", "embedding_dense_backward", "zero",
    "_foreach_neg", "_foreach_zero",
})
# The product of two of their arguments: one may be partial.
_PRODUCTS = {
    "mul": (0, 1), "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1), "linear": (0, 1),
    "matmul": (0, 1), "outer": (0, 1), "_foreach_mul": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2),
    "addbmm": (1, 2), "addcmul": (1, 2), "_foreach_addcmul": (1, 2),
}
_WITH_BIAS = {"addmm": 0, "baddbmm": 0, "addmv": 0, "addbmm": 0, "addcmul": 0, "_foreach_addcmul": 0, "linear": 2}
# The sum of two of their arguments, or one or the other by element: both are parts of the same, or zero.
_SUMS = {
    "add": (0, 1), "sub": (0, 1), "rsub": (0, 1), "_foreach_add": (0, 1), "_foreach_sub": (0, 1), "index_add": (0, 3),
    "scatter_add": (0, 3), "where": (1, 2), "masked_fill": (0, 2),
}
_QUOTIENTS = frozenset({"div", "_foreach_div"})
_COLLECTIONS = frozenset({"cat", "stack"})
_COPIES = frozenset({"copy_", "_foreach_copy_", "copy", "_to_copy"})
# fmt: on


def follow(func: Any, args: Sequence[Any], kwargs: dict[str, Any], mark_of: MarkOf) -> Mark | None:
    """Say what the result of an operation is a part of; None: of nothing.

    Args:
        func: The overload of an ATen operation, some of whose tensors are parts.
        args: Its arguments.
        kwargs: Its keyword arguments.
        mark_of: What a tensor is a part of.

    Raises:
        Misuse: It is not linear in its parts.
    """
    name = func._opname
    if name in _UNRELATED:
        return None
    if name in _COPIES:
        return _copy(name, args, kwargs, mark_of)
    if func.is_view or name in _MOVES:
        return _of_first(name, args, kwargs, mark_of)
    if name in _COLLECTIONS:
        return _sum_of(name, list(tree_iter(args[0])), mark_of)
    plain = name.removesuffix("_")
    marks = [mark for leaf in tree_iter((args, kwargs)) if (mark := _mark(leaf, mark_of)) is not None]
    if marks[0].reduction not in ("sum", "avg"):
        raise Misuse(f"{name} of parts is not part of a {marks[0].reduction}")
    if plain in _LINEAR:
        return _of_first(name, args, kwargs, mark_of)
    if plain in _QUOTIENTS:
        return _quotient(name, args, kwargs, mark_of)
    if plain in _SUMS:
        return _sum(plain, name, args, mark_of)
    if plain in _PRODUCTS:
        return _product(plain, name, args, mark_of)
    raise Misuse(f"{name} is not linear")


def _mark(value: Any, mark_of: MarkOf) -> Mark | None:
    return mark_of(value) if isinstance(value, torch.Tensor) else None


def _of_all(value: Any, mark_of: MarkOf) -> Mark | None:
    return next((mark for leaf in tree_iter(value) if (mark := _mark(leaf, mark_of)) is not None), None)


def _of_first(name: str, args: Sequence[Any], kwargs: dict[str, Any], mark_of: MarkOf) -> Mark | None:
    """The mark of the first argument; the others must have none."""
    if _of_all((args[1:], kwargs), mark_of) is not None:
        raise Misuse(f"{name} takes a part where it needs a value")
    if name == "constant_pad_nd" and len(args) > 2 and args[2] != 0:
        raise Misuse(f"{name} puts {args[2]} next to it on every rank, which is counted once per rank")
    return _of_all(args[0], mark_of)


def _is_zero(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_meta and not bool(value.any())
    return isinstance(value, (int, float, complex)) and value == 0


def _sum_of(name: str, terms: Sequence[Any], mark_of: MarkOf) -> Mark | None:
    """The mark of a sum, or of a collection: all have the same one, or are zero."""
    marks = [_mark(term, mark_of) for term in terms]
    first = next((mark for mark in marks if mark is not None), None)
    if first is None:
        return None
    for term, mark in zip(terms, marks, strict=True):
        if mark is None and not _is_zero(term):
            raise Misuse(f"{name} puts it together with a full value, which is then counted {first.ranks} times")
        if mark is not None and not mark.is_like(first):
            raise Misuse(f"{name} puts it together with a part of another reduction: {mark}")
    return first


def _sum(plain: str, name: str, args: Sequence[Any], mark_of: MarkOf) -> Mark | None:
    terms = [args[place] for place in _SUMS[plain]]
    others = [value for place, value in enumerate(args) if place not in _SUMS[plain]]
    if _of_all(others, mark_of) is not None:
        raise Misuse(f"{name} takes a part where it needs a value")
    if isinstance(terms[0], (list, tuple)):
        return _pairwise(terms[0], terms[1], lambda a, b: _sum_of(name, [a, b], mark_of))
    return _sum_of(name, terms, mark_of)


def _quotient(name: str, args: Sequence[Any], kwargs: dict[str, Any], mark_of: MarkOf) -> Mark | None:
    if _of_all(args[1:], mark_of) is not None:
        raise Misuse(f"{name} divides by it")
    if kwargs.get("rounding_mode") is not None:
        raise Misuse(f"{name} rounds it to whole numbers")
    return _of_all(args[0], mark_of)


def _copy(name: str, args: Sequence[Any], kwargs: dict[str, Any], mark_of: MarkOf) -> Mark | None:
    """The mark of what is copied, unless its fractions are cut off."""
    source = args[0] if name == "_to_copy" else args[1]
    mark = _of_all(source, mark_of)
    target = kwargs.get("dtype") if name == "_to_copy" else getattr(args[0], "dtype", None)
    fractions = isinstance(source, torch.Tensor) and (source.is_floating_point() or source.is_complex())
    if mark is not None and fractions and target is not None and not (target.is_floating_point or target.is_complex):
        raise Misuse(f"{name} rounds it to whole numbers")
    return mark


def _product(plain: str, name: str, args: Sequence[Any], mark_of: MarkOf) -> Mark | None:
    one, other = (args[place] for place in _PRODUCTS[plain])
    if isinstance(one, (list, tuple)):
        mark = _pairwise(one, other, lambda a, b: _one_factor(name, a, b, mark_of))
    else:
        mark = _one_factor(name, one, other, mark_of)
    place = _WITH_BIAS.get(plain)
    bias = args[place] if place is not None and place < len(args) else None
    if bias is None:
        return mark
    if mark is None:  # the product is a full value, and a part is added to it
        raise Misuse(f"{name} adds to it a product of full values, which is then counted once per rank")
    for term in tree_iter(bias):
        held = _mark(term, mark_of)
        if held is None and not _is_zero(term):
            raise Misuse(f"{name} adds a bias in full, which is then counted {mark.ranks} times")
    return mark


def _one_factor(name: str, one: Any, other: Any, mark_of: MarkOf) -> Mark | None:
    mine, theirs = _mark(one, mark_of), _mark(other, mark_of)
    if mine is not None and theirs is not None:
        raise Misuse(f"{name} multiplies two parts")
    return mine or theirs


def _pairwise(one: Sequence[Any], other: Any, rule: Callable[[Any, Any], Mark | None]) -> Mark | None:
    others = other if isinstance(other, (list, tuple)) else [other] * len(one)
    marks = [rule(a, b) for a, b in zip(one, others, strict=True)]
    return next((mark for mark in marks if mark is not None), None)
