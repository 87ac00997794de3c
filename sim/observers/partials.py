"""Marks of partial sums: the local tensors of `Partial` DTensors, and errors where one is used as if it were the sum.

`DTensor.to_local()` of a `Partial` hands out one rank's part of a sum. As long as only linear things happen to it
(it is moved, scaled, multiplied by a full value, added to another part), the sum over the ranks can still be taken
later. What is not linear gives another result on the parts than on the sum, without any error: `relu`, a product of
two parts, a constant that is added on every rank. A mode on the rank's thread looks at each operation of torch and
carries the mark along, by storage; communication ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from sim.comm.collectives import Call
from sim.comm.endpoint import Endpoint
from sim.comm.group import Message, Network, Slot
from sim.comm.observer import Observer
from sim.explain.errors import ReplicaMismatch
from sim.explain.lines import user_line
from sim.kernel.context import current_context
from sim.observers.linear import Mark, Misuse, follow
from sim.observers.spread import axis_names

__all__ = ["Partials"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
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


class _Operations(TorchDispatchMode):
    """Carries the marks along."""

    def __init__(self, partials: RankPartials) -> None:
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

    @contextmanager
    def watching(self, endpoint: Endpoint) -> Iterator[None]:
        """Follow what is partial on the calling thread, which is one of the rank's."""
        with _Operations(self._of(endpoint.rank)):
            yield

    def follow_when_taken(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`DTensor.to_local` that marks parts of reductions."""

        def to_local(x: DTensor, *args: Any, **options: Any) -> torch.Tensor:
            local = original(x, *args, **options)
            context = current_context()
            if context is not None and context.network is self._network:
                self._of(context.rank).take(x, local)
            return local

        return to_local
