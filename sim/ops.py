"""The operations of a thread as one stream: one dispatch mode and one function mode, to which subscribers are added.

    class Counting(OnOperations):
        order = Order.COUNT
        count = 0

        def handle(self, func, types, args, kwargs, proceed):
            self.count += 1
            return proceed(*args, **kwargs)

    with Counting() as counting:
        x + 1

The first subscriber of a thread installs the mode, and the last one to leave removes it. A mode that is none of these,
such as a user's or torch's selective checkpointing, divides the stream: those that are added later are above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum, auto
from functools import partial
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

__all__ = ["OnFunctions", "OnOperations", "Order", "Proceed", "mode_before_all", "subscribers"]

Proceed = Callable[..., Any]


class Order(IntEnum):
    """Where a subscriber stands: the first one sees a call first, whatever the order of the `with` statements is.

    Of two at one place, the one that was added last sees it first.
    """

    # Calls of torch's functions, before autograd.
    KERNELS = auto()  # An accelerator's kernel stands for the call, so that all others see the calls of the kernel.
    LOSSES = auto()  # Only looks, at the loss that the program differentiates.
    READS = auto()  # Only looks; above the devices, which would take the tensor that is read away.
    LATE = auto()  # Asks for the device by its name, before MAPPED_DEVICE changes names.
    MAPPED_DEVICE = auto()  # Last, because the calls of all others may ask for the device that has no memory, too.

    # Operations, below autograd.
    RECORD = auto()  # Writes down what the program calls, and not what another subscriber makes of it.
    COUNT = auto()  # Likewise.
    CHOICES = auto()  # Above what changes values: it puts indices in place of those that the changed values give.
    PRECISION = auto()  # Above DRAWS and NOISE, whose random numbers and roundings have to be those of the wide dtype.
    DRAWS = auto()  # Above NOISE: what is put in place of random numbers is copied, which is exact.
    PRODUCTS = auto()  # Above NOISE, which changes each of the products that a grouped one consists of.
    NOISE = auto()  # The last one that changes values, so that it has all that is rounded.
    PARTIALS = auto()  # Above RACES: it lets DTensors pass as a whole, whose parts RACES has to see.
    RACES = auto()  # Last, because it looks at the memory that is touched in the end.


class Subscriber:
    """One that is given all calls of the thread that has entered it; a context manager.

    Attributes:
        order: where it stands among the others.
        only: the operations that it is given; None: all.
    """

    order: ClassVar[Order]
    only: ClassVar[frozenset[Any] | None] = None
    _mode: ClassVar[type[_Stream]]

    def handle(self, func: Any, types: Any, args: Any, kwargs: Mapping[str, Any], proceed: Proceed) -> Any:
        """Answer a call: look at it, change what is given or returned, or answer without others.

        The subscribers behind it see the operations that it calls itself; it and those before it do not.

        Args:
            func: an overload of an operation, or a function of torch.
            types: of the arguments that have torch's protocol.
            args: of the call.
            kwargs: likewise.
            proceed: calls the subscribers behind this one, and `func` at last: as to call `func`, but faster.

        Returns:
            The result; NotImplemented: a DTensor, say, shall ask again with its local tensors.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._mode.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.remove(self)


class _Stream:
    """A mode of torch that hands calls to the first of its subscribers. It never changes: others take its place.

    So it has no state to restore when a call raises, and what torch keeps of it (the modes of a thread of autograd)
    stays as it was.

    Args:
        chain: its subscribers.
        entered: the mode that torch has been told of, in whose place this is.
    """

    _pop: ClassVar[Any]
    _push: ClassVar[Any]
    _at: ClassVar[Any]
    _length: ClassVar[Any]

    def __init__(self, chain: tuple[Subscriber, ...], entered: Any = None) -> None:
        super().__init__()
        self.chain = chain
        self.entered: Any = entered or self
        self._first, self._only = chain[0].handle, chain[0].only
        self._rest = type(self)(chain[1:]) if len(chain) > 1 else None
        self._known: dict[Any, Any] | None = {} if any(each.only is not None for each in chain) else None

    def _from(self, func: Any) -> Self | None:
        """Return the part of the stream that begins with the first one to be given `func`; None: nobody is."""
        if self._known is None:
            return self
        if func not in self._known:
            is_given = self._only is None or func in self._only
            self._known[func] = self if is_given else self._rest and self._rest._from(func)
        found: Self | None = self._known[func]
        return found

    def _handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Hand a call to the first subscriber, while torch hands the calls that this one makes to the rest."""
        rest = self._rest
        if rest is None:
            return self._first(func, types, args, kwargs, func)
        self._push(rest)
        try:
            return self._first(func, types, args, kwargs, partial(rest._after, func, types))
        finally:
            self._pop()

    def _after(self, func: Any, types: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Hand on the call of the subscriber before, as torch would if that one called `func`."""
        if (top := self._pop()) is not self:  # the subscriber is in another mode, which has to see it
            self._push(top)
            return func(*args, **kwargs)
        try:
            stream = self._from(func)
            result = func(*args, **kwargs) if stream is None else stream._handle(func, types, args, kwargs)
        finally:
            self._push(self)
        return func(*args, **kwargs) if result is NotImplemented else result  # torch asks the types of arguments

    @classmethod
    def of_thread(cls) -> Iterator[Self]:
        """The parts of the calling thread's stream, the one that sees calls first at first."""
        for index in reversed(range(cls._length())):
            mode = cls._at(index)
            if isinstance(mode, cls):
                yield mode

    @classmethod
    def top(cls) -> Any:
        """The mode of the calling thread that sees calls first; None: there is none."""
        size = cls._length()
        return cls._at(size - 1) if size else None

    @classmethod
    def add(cls, subscriber: Subscriber) -> None:
        """Let a subscriber have the calls of the calling thread."""
        top = cls.top()
        if not isinstance(top, cls):
            cls((subscriber,)).__enter__()  # type: ignore[attr-defined]
            return
        before = [each for each in top.chain if each.order < subscriber.order]
        cls._pop()
        cls._push(cls((*before, subscriber, *top.chain[len(before) :]), top.entered))

    @classmethod
    def remove(cls, subscriber: Subscriber) -> None:
        """Undo the latest `add` of a subscriber."""
        above = []
        while not isinstance(mode := cls._pop(), cls) or subscriber not in mode.chain:
            above.append(mode)
        at = mode.chain.index(subscriber)
        if left := mode.chain[:at] + mode.chain[at + 1 :]:
            cls._push(cls(left, mode.entered))
        else:
            cls._push(mode)
            mode.entered.__exit__(None, None, None)
        for other in reversed(above):
            cls._push(other)


class _Operations(_Stream, TorchDispatchMode):
    _pop = staticmethod(partial(torch._C._pop_torch_dispatch_stack, None))
    _push = staticmethod(torch._C._push_on_torch_dispatch_stack)
    _at = staticmethod(torch._C._get_dispatch_stack_at)
    _length = staticmethod(torch._C._len_torch_dispatch_stack)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = self._from(func)
        return func(*args, **(kwargs or {})) if stream is None else stream._handle(func, types, args, kwargs or {})


class _Functions(_Stream, TorchFunctionMode):
    _pop = staticmethod(torch._C._pop_torch_function_stack)
    _push = staticmethod(torch._C._push_on_torch_function_stack)
    _at = staticmethod(torch._C._get_function_stack_at)
    _length = staticmethod(torch._C._len_torch_function_stack)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, types, args, kwargs or {})


class OnOperations(Subscriber):
    """A subscriber of operations, as they are below autograd."""

    _mode = _Operations


class OnFunctions(Subscriber):
    """A subscriber of calls of torch's functions, as the program makes them."""

    _mode = _Functions


def subscribers() -> list[Subscriber]:
    """Return who is given the operations of the calling thread, the first one first."""
    return [each for mode in _Operations.of_thread() for each in mode.chain]


def mode_before_all() -> bool:
    """Return True if a mode of somebody else's is given the calling thread's operations before all subscribers are."""
    return not isinstance(_Operations.top(), (_Operations, type(None)))
