"""Races on buffers: touches of a buffer between the issue of an operation and its `wait`.

Each operation in flight has parts of memory that it reads (the rank may read them, too, but not write them) and parts
that it writes (the rank may do neither). A mode on the rank's thread looks at every operation of torch before it runs
and compares the memory of its arguments with those parts, byte by byte where they are interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from sim.comm.collectives import Call
from sim.comm.group import Endpoint, Message, Network, Slot
from sim.comm.observer import Observer, memory_of
from sim.explain.errors import InFlightBufferRace
from sim.explain.lines import user_line
from sim.kernel.waiting import Waitable
from sim.ops import PLAIN, Level, OnFunctions, OnOperations, Proceed, Subscriber, local_part, subscribers, tensors_of


class Part(NamedTuple):
    """The memory of a tensor: bytes from `first` to before `last` of a storage, all of them if it is dense."""

    tensor: torch.Tensor  # also keeps the memory from being given to another one
    storage: int
    first: int
    last: int
    dense: bool


class _Flight(NamedTuple):
    name: str
    line: str
    reads: tuple[Part, ...]
    writes: tuple[Part, ...]


class Flights:
    """What is in flight on one rank.

    Args:
        network: Of its world, which a race ends.
        rank: Whose operations these are.
    """

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self._rank = rank
        self.apart: str | None = None  # a type of device that keeps its own record
        self.follow: Callable[[Any, Any, Any, Any], None] | None = None  # enters an operation there, if it has to be
        self._flights: dict[Hashable, _Flight] = {}

    def issue(
        self,
        what: Hashable,
        name: str,
        line: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        follows: Callable[[Any], bool] = lambda earlier: False,
    ) -> None:
        """Note an operation that begins now; it must not touch what another one in flight writes, either.

        Unless it `follows` that one, as a copy does that a stream has behind it.
        """
        given, taken = tuple(self.parts(reads)), tuple(self.parts(writes))
        self.check(name, given, taken, line, follows)
        self._flights[what] = _Flight(name, line, given, taken)

    def complete(self, what: Hashable) -> None:
        """Note that the rank has waited for an operation."""
        self._flights.pop(what, None)

    def clear(self) -> None:
        """Forget all: the rank's function has ended."""
        self._flights.clear()

    def __bool__(self) -> bool:
        return bool(self._flights)

    def parts(self, tensors: Iterable[torch.Tensor]) -> Iterator[Part]:
        """The memory of tensors; not of a late device: there it is streams that have to wait, and not ranks."""
        for tensor in tensors:
            if tensor.device.type != self.apart and (part := part_of(tensor)) is not None:
                yield part

    def are_written(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return True if an operation in flight writes some of these tensors, which have no values yet."""
        written = [part for flight in self._flights.values() for part in flight.writes]
        return any(overlap(part, other) for part in self.parts(tensors) for other in written)

    def look(self, name: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """As `check`, of tensors."""
        self.check(name, self.parts(reads), self.parts(writes))

    def check(
        self,
        name: str,
        reads: Iterable[Part],
        writes: Iterable[Part],
        line: str | None = None,
        follows: Callable[[Any], bool] = lambda earlier: False,
    ) -> None:
        """Raise what there is to say if an operation called `name` touches what it must not."""
        accesses = [("reads", part) for part in reads] + [("writes", part) for part in writes]
        for verb, part in accesses:
            for what, flight in self._flights.items():
                if follows(what):
                    continue
                kept = "writes" if any(overlap(part, other) for other in flight.writes) else ""
                if not kept and verb == "writes" and any(overlap(part, other) for other in flight.reads):
                    kept = "reads"
                if kept:
                    self._raise(name, verb, part, flight, kept, line or user_line())

    def _raise(self, name: str, verb: str, part: Part, flight: _Flight, kept: str, line: str) -> None:
        shape = f"{str(part.tensor.dtype).removeprefix('torch.')} {list(part.tensor.shape)}"
        hint = "wait for the work that the operation returned first"
        if flight.name.startswith("a copy"):
            hint = "synchronize the stream, or an event that is recorded behind the copy, first"
        error = InFlightBufferRace(
            f"rank {self._rank} {verb} a buffer that {flight.name} {kept} and that it has not waited for\n"
            f"  issued:  {flight.line}\n"
            f"  touched: {line}, by {name} on {shape}\n"
            f"  try: {hint}{', or write to another tensor' if kept == 'reads' else ''}\n"
            f"  replay: {self._network.replay}"
        )
        self._network.scheduler.fail(error)
        raise error


# -- memory ----------------------------------------------------------------------------------------------------


def part_of(tensor: torch.Tensor) -> Part | None:
    """The memory of a tensor; None if it has none."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta:
        return None
    return extent_of(tensor)


def extent_of(tensor: torch.Tensor) -> Part:
    """The memory of a tensor that has elements; its data may be nowhere."""
    size = tensor.element_size()
    reach = int(sum((n - 1) * abs(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True)))
    first = int(tensor.storage_offset()) * size
    dense = reach + 1 == tensor.numel()
    return Part(tensor, tensor.untyped_storage()._cdata, first, first + (reach + 1) * size, dense)


def overlap(a: Part, b: Part) -> bool:
    """Whether two parts of memory have a byte in common."""
    if a.storage != b.storage or a.last <= b.first or b.last <= a.first:
        return False
    if a.dense and b.dense:
        return True
    first, last = min(a.first, b.first), max(a.last, b.last)
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        touched = torch.zeros(last - first, dtype=torch.bool)
        _bytes_of(touched, a, first).fill_(True)
        return bool(_bytes_of(touched, b, first).any())


def _bytes_of(memory: torch.Tensor, part: Part, first: int) -> torch.Tensor:
    """The bytes of a part, as a view of `memory`, which stands for its storage from `first` on."""
    size = part.tensor.element_size()
    strides = [step * size for step in part.tensor.stride()]
    return memory.as_strided((*part.tensor.shape, size), (*strides, 1), part.first - first)


# -- the rank's operations -------------------------------------------------------------------------------------

# They look at sizes and strides only, or wait before they look.
_HARMLESS = frozenset(
    {
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_same_size"),
        *("sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "_unsafe_view", "record_stream", "is_pinned"),
        *("wait_tensor", "_wrap_tensor_autograd"),
    }
)
# These read memory behind the dispatcher's back.
_CONSTANTS = frozenset({"bool", "Device", "float", "int", "number", "str"})  # as schemas call types without tensors
_LOOK = frozenset(
    {"tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__", "__repr__", "__format__"}
)


class _Accesses(OnOperations):
    """Looks at what every operation reads and writes."""

    order = Level.RACES

    def __init__(self, flights: Flights) -> None:
        self.flights = flights

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        if any(kind not in PLAIN and not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor, say: it comes back with the tensors it consists of
        flights = self.flights
        if flights and not is_harmless(func) and not _is_copy_of_device(func, args, flights.apart):
            reads, writes = accesses(func, args, kwargs)
            flights.check(f"{func.namespace}.{func._opname}", flights.parts(reads), flights.parts(writes))
        found = proceed(*args, **kwargs)
        if flights.follow is not None:
            flights.follow(func, args, kwargs, found)
        return found


def is_harmless(func: Any) -> bool:
    """Whether an operation looks at no values, and changes none."""
    return func._opname in _HARMLESS


def _is_copy_of_device(func: Any, args: Any, kind: str | None) -> bool:
    """Whether it is the copy of a device that keeps its own record: it may be late itself, and is entered there."""
    return func._opname == "copy_" and any(tensor.device.type == kind for tensor in args[:2])


def accesses(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors whose memory an operation reads, and those whose memory it writes. A view does neither."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for place, name, is_written in _accessed(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        tensors = writes if is_written else reads
        tensors += tensors_of((value,))
    return reads, writes


@cache
def _accessed(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """Of the arguments of an operation that may have tensors: place, name, and whether it writes them."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        is_written = alias is not None and alias.is_write
        is_constant = str(argument.type).removeprefix("Optional[").removeprefix("List[").rstrip("]") in _CONSTANTS
        if not is_constant and (is_written or not (func.is_view and alias is not None)):
            found.append((place, argument.name, is_written))
    return tuple(found)


class _Looks(OnFunctions):
    """Looks at the methods that read a tensor without an operation of torch."""

    order = Level.READS

    def __init__(self, flights: Flights) -> None:
        self._flights = flights

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        name = getattr(func, "__name__", "")
        if self._flights and name in _LOOK:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self._flights.check(name, self._flights.parts(tensors), ())
        return proceed(*args, **kwargs)


class Races(Observer):
    """Looks for races on all ranks of a network."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._flights: dict[int, Flights] = {}

    def issued(self, endpoint: Endpoint, what: Slot | Message, call: Call | None) -> None:
        """Note what a rank must not touch from now on."""
        line = what.line_of(endpoint.rank)
        reads, writes = memory_of(endpoint, what, call)
        self.of_rank(endpoint.rank).issue(what, what.describe(), line, reads, writes)

    def waited(self, endpoint: Endpoint, what: Waitable) -> None:
        """Release the memory of an operation."""
        self.of_rank(endpoint.rank).complete(what)

    def ended(self, endpoint: Endpoint) -> None:
        """Forget what is still in flight: the rank's function has ended."""
        self.of_rank(endpoint.rank).clear()

    def of_rank(self, rank: int) -> Flights:
        """What is in flight on a rank."""
        flights = self._flights.get(rank)
        if flights is None:
            flights = self._flights[rank] = Flights(self._network, rank)
        return flights

    def watching(self, endpoint: Endpoint) -> Iterable[Subscriber]:
        """Return who watches the operations of a thread of the rank's."""
        flights = self.of_rank(endpoint.rank)
        return _Accesses(flights), _Looks(flights)


def look(name: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
    """Raise `InFlightBufferRace` if an operation that runs past the modes of the calling rank must not touch tensors.

    Nothing is looked for where the rank's operations are not watched.

    Args:
        name: what touches them, for the message.
        reads, writes: tensors; of DTensors the rank's parts.
    """
    for watching in subscribers():
        if isinstance(watching, _Accesses) and watching.flights:
            watching.flights.look(name, map(local_part, reads), map(local_part, writes))


def is_awaited(tensor: torch.Tensor) -> bool:
    """Return True if the calling rank has not waited for the operation that writes a tensor, as far as it is watched.

    E.g. the result of an asynchronous exchange that one module hands on to another.
    """
    own = [local_part(tensor)]
    return any(isinstance(each, _Accesses) and each.flights.are_written(own) for each in subscribers())
