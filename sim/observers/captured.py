"""Modules, optimizers and tensors that were made outside of the ranks: one object for all ranks.

Real ranks have one each. To read one from several ranks changes nothing; a second rank that uses one which is changed
meanwhile (wrapped, trained, or the output of a collective) would see what another rank has done to its own.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from sim.comm.collectives import Call
from sim.comm.group import Endpoint, Message, Slot
from sim.comm.observer import Observer
from sim.explain.callables import name_of
from sim.explain.errors import SimError
from sim.explain.lines import belongs_to_a_library, place, user_line
from sim.kernel.context import current_context

_SHARED = (nn.Module, torch.optim.Optimizer, torch.Tensor)


class Captured:
    """One such object, and who has used it.

    Attributes:
        name: What the function calls it.
        value: The object.
        made: Finds the line that has made it, or where it was given to the ranks.
    """

    def __init__(self, name: str, value: Any, made: Callable[[], str]) -> None:
        self.name, self.value, self.made = name, value, made
        self._users: dict[int, str] = {}
        self._state = _state_of(value)

    def use(self, *, changes: bool = False) -> None:
        """Note that the calling rank uses it, and raise SimError where it belongs to another rank."""
        context = current_context()
        if context is None:
            return
        first = not self._users
        self._users.setdefault(context.rank, user_line())
        if len(self._users) > 1:
            self.check(changes)
        elif first:
            self._state = _state_of(self.value)

    def check(self, changes: bool = False) -> None:
        """Raise SimError where several ranks have used it and it is not as it was."""
        if len(self._users) < 2 or not (changes or _state_of(self.value) != self._state):
            return
        (owner, _), *_, (second, _) = self._users.items()
        kind = type(self.value).__name__
        raise SimError(
            f"rank {second} used {self.name!r}, which belongs to rank {owner}: it was made outside of the ranks and is "
            f"one object for all of them, and it has been changed\n"
            f"  made: {self.made()} ({kind})\n"
            + "".join(f"  rank {rank} used it at {line}\n" for rank, line in list(self._users.items())[:4])
            + f"  try: make it inside of the function that the ranks run, or copy.deepcopy({self.name}) there"
        )

    def is_changed_by_others_than(self, rank: int) -> bool:
        """Whether it is not as it was, and not because of this rank alone."""
        return list(self._users) != [rank] and _state_of(self.value) != self._state


def _state_of(value: Any) -> object:
    """What changes when a module or a tensor is wrapped, written to or given a gradient."""
    if isinstance(value, torch.optim.Optimizer):
        return None
    tensors: list[Any] = [value]
    if isinstance(value, nn.Module):
        tensors = [each for part in _parts(value) for each in (*part._parameters.values(), *part._buffers.values())]
    tensors = [each for each in tensors if each is not None]
    return [(_version(each), _version(each.grad if each.is_leaf else None)) for each in tensors]


def _version(tensor: torch.Tensor | None) -> tuple[int, int]:
    """What is another one when a tensor is exchanged or written to."""
    return id(tensor), 0 if tensor is None or tensor.is_inference() else tensor._version


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _parts(child)


# -- what a function has from outside ----------------------------------------------------------------------------


def _captured(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Captured]:
    found: dict[int, Captured] = {}

    def add(name: str, value: Any, made: Callable[[], str]) -> None:
        inner = value if isinstance(value, (list, tuple)) and len(value) <= 64 else ()
        for key, each in [(name, value), *((f"{name}[{i}]", each) for i, each in enumerate(inner))]:
            if isinstance(each, _SHARED) and id(each) not in found:
                found[id(each)] = Captured(key, each, made)

    for function in _functions(fn, set()):
        for name, value in _names(function):
            add(name, value, functools.partial(_made_at, function.__code__, name))
    given = f"given to {name_of(fn)} at {user_line()}"
    for key, value in [*_bound(fn), *((f"args[{i}]", each) for i, each in enumerate(args)), *kwargs.items()]:
        add(key, value, lambda: given)
    return list(found.values())


def _bound(fn: Any) -> Iterator[tuple[str, Any]]:
    """What a method, or a function made with some of its arguments, has of its own."""
    while isinstance(fn, functools.partial):
        yield from [*((f"args[{i}]", each) for i, each in enumerate(fn.args)), *fn.keywords.items()]
        fn = fn.func
    if isinstance(fn, MethodType):
        yield "self", fn.__self__
        if not isinstance(fn.__self__, _SHARED):
            yield from ((f"self.{name}", each) for name, each in getattr(fn.__self__, "__dict__", {}).items())


def _functions(fn: Any, seen: set[int]) -> Iterator[FunctionType]:
    """A function, and those of the user's that it calls by name."""
    while isinstance(fn, (functools.partial, MethodType)):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    if not isinstance(fn, FunctionType) or id(fn) in seen or belongs_to_a_library(fn.__code__.co_filename):
        return
    seen.add(id(fn))
    yield fn
    for _, value in _names(fn):
        yield from _functions(value, seen)


def _names(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function refers to by name in the function around it, and in its module."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    for name in dict.fromkeys(_global_names(fn.__code__)):
        if name in fn.__globals__:
            yield name, fn.__globals__[name]


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _global_names(inner)


def _made_at(code: CodeType, name: str) -> str:
    """The last line that assigns to a name in the smallest function around `code`, or else in its file."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        tree = ast.Module([], [])
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    around: list[ast.AST] = [tree]
    around += [
        node
        for node in ast.walk(tree)
        if isinstance(node, kinds) and node.lineno < code.co_firstlineno <= (node.end_lineno or 0)
    ]
    lines: list[int] = []
    for scope in around:
        within = [
            node.lineno
            for node in ast.walk(scope)
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        ]
        lines = within or lines
    if lines:
        return place(code.co_filename, lines[-1])
    return f"outside of {code.co_name} ({place(code.co_filename, code.co_firstlineno)})"


# -- while ranks run ---------------------------------------------------------------------------------------------


class CapturedObjects(Observer):
    """Follows the captured objects of one run."""

    def __init__(self, captured: Sequence[Captured]) -> None:
        self._captured = captured
        self._modules = {id(each.value): each for each in captured if isinstance(each.value, nn.Module)}
        self._storages: dict[int, Captured] = {}
        self._written: dict[int, object] = {}  # by storage, the collective that has written to it first
        self._undos: list[Callable[[], None]] = []
        for each in captured:
            self._follow(each)
        if self._modules:
            self._follow_modules()

    def _follow(self, captured: Captured) -> None:
        value = captured.value
        if isinstance(value, torch.optim.Optimizer):
            hook = value.register_step_pre_hook(lambda *given: captured.use(changes=True))
            self._undos.append(hook.remove)
        elif isinstance(value, nn.Module):
            before = value.register_forward_pre_hook(lambda *given: captured.use())
            self._undos.append(before.remove)
        elif value.is_leaf and value.requires_grad:
            after = value.register_post_accumulate_grad_hook(lambda tensor: captured.use(changes=True))
            self._undos.append(after.remove)
        if isinstance(value, torch.Tensor):
            storage = _storage(value)
            if storage is not None:
                self._storages[storage] = captured

    def _follow_modules(self) -> None:
        """Whoever wraps a module, or makes an optimizer for it, asks for its parts."""
        original = nn.Module.named_modules

        @functools.wraps(original)
        def named_modules(module: nn.Module, *args: Any, **options: Any) -> Any:
            captured = self._modules.get(id(module))
            if captured is not None:
                captured.use()
            return original(module, *args, **options)

        nn.Module.named_modules = named_modules  # type: ignore[assignment, method-assign]
        self._undos.append(lambda: setattr(nn.Module, "named_modules", original))

    def issued(self, endpoint: Endpoint, what: Slot | Message, call: Call | None) -> None:
        """Note that the calling rank's part in a collective writes to tensors.

        Ranks that write to the same one in the same collective are a mismatch in any case.
        """
        for tensor in call.outputs if call is not None else ():
            storage = _storage(tensor) or 0
            if storage in self._storages and self._written.setdefault(storage, what) is not what:
                self._storages[storage].use(changes=True)
            elif storage in self._storages:
                self._storages[storage].use()

    def hint(self, rank: int) -> str:
        """What to add where `rank` has failed while it may have met with what another rank has changed."""
        changed = [each for each in self._captured if each.is_changed_by_others_than(rank)]
        return "".join(
            f"  seen: {each.name!r} is one object for all ranks, and another rank has changed it\n"
            f"  made: {each.made()}\n"
            for each in changed[:1]
        )

    def check(self) -> None:
        """Raise SimError if several ranks have used something that has changed since."""
        for each in self._captured:
            each.check()

    def end(self) -> None:
        """Follow nothing any more."""
        while self._undos:
            self._undos.pop()()


def _storage(tensor: torch.Tensor) -> int | None:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()._cdata if type(local) in (torch.Tensor, nn.Parameter) else None


def watch_captured(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> CapturedObjects | None:
    """Follow what all ranks would share when each calls `fn(*args, **kwargs)`; None if there is nothing."""
    captured = _captured(fn, args, kwargs)
    return CapturedObjects(captured) if captured else None
