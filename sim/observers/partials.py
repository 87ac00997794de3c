"""Follows the local tensors of ``Partial`` DTensors, and finds where one is used as if it were the whole.

``DTensor.to_local()`` of a ``Partial`` hands out one rank's part of a sum. As long as only linear things happen to it
(it is moved, scaled, multiplied by what is whole, added to another part), the sum over the ranks can still be taken
later. What is not linear gives another result on the parts than on the sum, without any error: ``relu``, a product of
two parts, a constant that is added on every rank. A mode on the rank's thread looks at each operation of torch and
carries the mark along, by storage; communication ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from sim.explain.errors import ReplicaMismatch
from sim.explain.lines import user_line
from sim.kernel.context import current_context
from sim.observers.linear import Misuse, follow
from sim.observers.spread import axis_names

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["Mark", "Partials", "follow_when_taken", "watching"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_FEWEST_TO_TIDY = 256


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


class Partials:
    """What is partial on one rank.

    Args:
        world: Its world, which a misuse ends.
        rank: Whose tensors these are.
    """

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self._rank = rank
        # A storage that is gone is held weakly, so that no other one can take its number before its mark is dropped.
        self._marks: dict[int, tuple[StorageWeakRef, Mark]] = {}
        self._tidy_at = _FEWEST_TO_TIDY

    def __bool__(self) -> bool:
        return bool(self._marks)

    def take(self, x: DTensor, local: torch.Tensor) -> None:
        """Mark what ``to_local`` has returned, if it is a part of a reduction."""
        mark = _part_of(x)
        if mark is not None:
            wait = getattr(local, "wait", None)  # the result of a functional collective that nobody has waited for
            self.put([local if wait is None else wait()], mark)

    def put(self, tensors: Iterable[torch.Tensor], mark: Mark) -> None:
        """Mark tensors, and all views of them."""
        for tensor in tensors:
            if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._marks[storage._cdata] = (StorageWeakRef(storage), mark)
        if len(self._marks) > self._tidy_at:
            self._marks = {key: entry for key, entry in self._marks.items() if not entry[0].expired()}
            self._tidy_at = max(_FEWEST_TO_TIDY, 2 * len(self._marks))

    def of(self, tensor: torch.Tensor) -> Mark | None:
        """The mark of a tensor, if it has one."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return None
        entry = self._marks.get(tensor.untyped_storage()._cdata)
        return None if entry is None or entry[0].expired() else entry[1]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that tensors hold something else now."""
        if self._marks:
            for tensor in tensors:
                if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                    self._marks.pop(tensor.untyped_storage()._cdata, None)

    def clear(self) -> None:
        """Forget all: the rank's function has ended."""
        self._marks.clear()

    def refuse(self, name: str, mark: Mark, reason: str, on: torch.Tensor) -> ReplicaMismatch:
        """End the world because ``name`` was called on a part."""
        kind = f"{str(on.dtype).removeprefix('torch.')} {list(on.shape)}"
        error = ReplicaMismatch(
            f"rank {self._rank} used a part of a {mark.reduction} as if it were the {mark.reduction}: {reason}\n"
            f"  partial: {mark}, taken at {mark.line}\n"
            f"  used:    {user_line()}, by {name} on {kind}\n"
            "  try: x.redistribute(placements=[Replicate()]) before x.to_local(), or all_reduce the part first\n"
            f"  replay: {self._world.replay}"
        )
        self._world.scheduler.fail(error)
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


class _Operations(TorchDispatchMode):
    """Carries the marks along."""

    def __init__(self, partials: Partials) -> None:
        super().__init__()
        self._partials = partials

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _PLAIN for kind in types):
            # A DTensor, which takes care of its parts, so that they need not be looked at: apart from one operation.
            if func._opname == "_local_scalar_dense" and isinstance(args[0], DTensor):
                mark = _part_of(args[0])
                if mark is not None:
                    raise self._partials.refuse("item()", mark, "item() reads this rank's part", args[0]._local_tensor)
            return func(*args, **kwargs)
        if not self._partials:
            return func(*args, **kwargs)
        return self._on_plain(func, args, kwargs)

    def _on_plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        partials = self._partials
        written = [leaf for place in _written(func) for leaf in _tensors(_argument(func, place, args, kwargs))]
        if func.namespace in _COMMUNICATION:
            result = func(*args, **kwargs)
            partials.forget([*_tensors(result), *written])
            return result
        marks = [(tensor, mark) for tensor in _tensors((args, kwargs)) if (mark := partials.of(tensor)) is not None]
        if not marks:
            return func(*args, **kwargs)
        try:
            mark = follow(func, args, kwargs, partials.of)
        except Misuse as misuse:
            tensor, seen = marks[0]
            raise partials.refuse(f"{func.namespace}.{func._opname}", seen, str(misuse), tensor) from None
        result = func(*args, **kwargs)
        if func._opname.startswith("_foreach_") and mark is not None:  # one operation on each entry of its lists
            touched = _entries(args, {id(tensor) for tensor, _ in marks})
            results = result if result is not None else args[0]
            self._carry([tensor for tensor, is_part in zip(results, touched, strict=True) if is_part], written, mark)
            return result
        self._carry(_tensors(result), written, mark)
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


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]


def _written(func: Any) -> list[int]:
    """The places of the arguments that an operation writes to."""
    arguments = func._schema.arguments
    return [i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]


def _argument(func: Any, place: int, args: Any, kwargs: Any) -> Any:
    return args[place] if place < len(args) else kwargs.get(func._schema.arguments[place].name)


def _covers_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


@contextmanager
def watching(partials: Partials | None, *, until_the_end: bool = True) -> Iterator[None]:
    """Follow what is partial on the calling thread, if there is something to follow it for.

    A helper thread's end, unlike that of the rank's function, leaves what other threads hold as it is.
    """
    if partials is None:
        yield
        return
    try:
        with _Operations(partials):
            yield
    finally:
        if until_the_end:
            partials.clear()


def follow_when_taken(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``DTensor.to_local`` that marks parts of reductions."""

    def to_local(self: DTensor, *args: Any, **options: Any) -> torch.Tensor:
        local = original(self, *args, **options)
        context = current_context()
        if context is not None and context.partials is not None:
            context.partials.take(self, local)
        return local

    return to_local
