"""The operations of a thread as one stream: one dispatch mode and one function mode, to which subscribers are added.

    class Counting(OnOperations):
        order, count = Level.COUNT, 0

        def handle(self, func, types, args, kwargs, proceed):
            self.count += 1
            return proceed(*args, **kwargs)

    with Counting() as counting:
        x + 1

The first subscriber of a thread installs the mode, the last one to leave removes it. Another mode, such as a user's,
divides the stream: subscribers that are added later are above it.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum, auto
from functools import partial
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from typing_extensions import Self

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that consist of no others, as DTensors do."""

Proceed = Callable[..., Any]


class Level(IntEnum):
    """Order of the subscribers: the least sees a call first, and of two equals the one entered later."""

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
    """A handler of calls of the thread that has entered it; a context manager.

    Attributes:
        order: its level among the others.
        only: the operations that it handles; None: all.
    """

    order: ClassVar[Level]
    only: ClassVar[frozenset[Any] | None] = None
    _mode: ClassVar[type[_Stream]]

    def handle(self, func: Any, types: Any, args: Any, kwargs: Mapping[str, Any], proceed: Proceed) -> Any:
        """Answer a call: look at it, change what is given or returned, or answer without the others.

        Those behind it see the operations that it calls itself; it and those before it do not.

        Args:
            func: an overload of an operation, or a function of torch.
            types: of the arguments that have torch's protocol.
            args: of the call.
            kwargs: likewise.
            proceed: calls those behind it, and `func` at last: as to call `func`, but faster.

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

    So no state has to be restored when a call raises, and the modes that torch keeps for a thread of autograd stay.

    Args:
        chain: its subscribers.
        entered: the mode that torch has been told of, in whose place this is.
    """

    _pop: ClassVar[Any]
    _push: ClassVar[Any]
    modes: ClassVar[Any]

    def __init__(self, chain: tuple[Subscriber, ...], entered: Any = None) -> None:
        super().__init__()
        self.chain = chain
        self.entered: Any = entered or self
        self._first, self._only = chain[0].handle, chain[0].only
        self._rest = type(self)(chain[1:]) if len(chain) > 1 else None
        self._known: dict[Any, Any] | None = {} if any(each.only is not None for each in chain) else None

    def _from(self, func: Any) -> Any:
        """Return the part of the stream that begins with the first one to be given `func`; None: nobody is."""
        if self._known is None:
            return self
        if func not in self._known:
            is_given = self._only is None or func in self._only
            self._known[func] = self if is_given else self._rest and self._rest._from(func)
        return self._known[func]

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
    def add(cls, subscriber: Subscriber) -> None:
        """Let a subscriber have the calls of the calling thread."""
        modes = cls.modes()
        if not modes or not isinstance(modes[-1], cls):
            cls((subscriber,)).__enter__()  # type: ignore[attr-defined]
            return
        top = cls._pop()
        before = [each for each in top.chain if each.order < subscriber.order]
        cls._push(cls((*before, subscriber, *top.chain[len(before) :]), top.entered))

    @classmethod
    def remove(cls, subscriber: Subscriber) -> None:
        """Undo the latest `add` of a subscriber."""
        above = []
        while not isinstance(mode := cls._pop(), cls) or subscriber not in mode.chain:
            above.append(mode)
        at = mode.chain.index(subscriber)
        left = mode.chain[:at] + mode.chain[at + 1 :]
        cls._push(cls(left, mode.entered) if left else mode)
        if not left:
            mode.entered.__exit__(None, None, None)
        for other in reversed(above):
            cls._push(other)


class _OpStream(_Stream, TorchDispatchMode):
    _pop = staticmethod(partial(torch._C._pop_torch_dispatch_stack, None))
    _push = staticmethod(torch._C._push_on_torch_dispatch_stack)
    modes = staticmethod(_get_current_dispatch_mode_stack)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = self._from(func)
        return func(*args, **(kwargs or {})) if stream is None else stream._handle(func, types, args, kwargs or {})


class _CallStream(_Stream, TorchFunctionMode):
    _pop = staticmethod(torch._C._pop_torch_function_stack)
    _push = staticmethod(torch._C._push_on_torch_function_stack)
    modes = staticmethod(_get_current_function_mode_stack)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, types, args, kwargs or {})


class OnOperations(Subscriber):
    """A subscriber of operations, as they are below autograd."""

    _mode = _OpStream


class OnFunctions(Subscriber):
    """A subscriber of calls of torch's functions, as the program makes them."""

    _mode = _CallStream


def subscribers() -> list[Subscriber]:
    """Return those that are given the operations of the calling thread, the first one first."""
    return [each for mode in reversed(_OpStream.modes()) if isinstance(mode, _OpStream) for each in mode.chain]


def mode_before_all() -> bool:
    """Return True if a mode of somebody else's is given the calling thread's operations before all subscribers are."""
    return any(not isinstance(mode, _OpStream) for mode in _OpStream.modes()[-1:])


# -- reading a call ----------------------------------------------------------------------------------------------------


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, those in lists, tuples and mappings too.

    >>> [len(tensor) for tensor in tensors_of((torch.ones(1), [torch.ones(2), 3], {"out": torch.ones(4)}))]
    [1, 2, 4]
    """
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
        elif isinstance(value, (dict, UserDict)):  # the latter of transformers
            found += tensors_of(value.values())
    return found


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank's part of a DTensor, and any other tensor as it is."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name, with the defaults of those that are not given."""
    schema = func._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    return defaults | {each.name: value for each, value in zip(schema, args, strict=False)} | dict(kwargs)


def written_tensors(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], but: str | None = None
) -> list[torch.Tensor]:
    """Return the tensors that an operation is given to write to, without those of the argument called `but`."""
    return tensors_of(
        args[place] if place < len(args) else kwargs.get(each.name)
        for place, each in enumerate(func._schema.arguments if func._schema.is_mutable else ())
        if each.alias_info is not None and each.alias_info.is_write and each.name != but
    )
