"""Checks of the function that ranks are to call: refused where the call cannot be made, or would run nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, TypeVar

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidType

T = TypeVar("T")

_KINDS: dict[type, str] = {
    CoroutineType: "coroutine",
    AsyncGeneratorType: "asynchronous generator",
    GeneratorType: "generator",
}
_RUNS = {  # how a function runs what it has made
    "coroutine": "asyncio.run({}())",
    "asynchronous generator": "asyncio.run(collect({}())), with an async def collect that loops over it",
    "generator": "list({}())",
}


def name_of(fn: Callable[..., Any]) -> str:
    """What to call `fn` in a message.

    >>> name_of(len), name_of(functools.partial(print, 1)), name_of(functools.partial(print))
    ('len', 'functools.partial(print, ...)', 'functools.partial(print)')
    """
    name = getattr(fn, "__name__", None)
    if isinstance(name, str):
        return name
    if isinstance(fn, functools.partial):
        return f"functools.partial({name_of(fn.func)}{', ...' if fn.args or fn.keywords else ''})"
    return f"{type(fn).__name__}(...)"


def kind_of_lazy(fn: Callable[..., Any]) -> str | None:
    """What a call of `fn` makes, if all that it does is to make something that has yet to be run.

    >>> def batches():
    ...     yield 1
    >>> kind_of_lazy(batches), kind_of_lazy(len)
    ('generator', None)
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    call = fn
    if not inspect.isroutine(fn) and not inspect.isclass(fn):
        call = getattr(type(fn), "__call__", fn)  # noqa: B004 - it is looked at, and it is the class's that counts
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(call):
        return "coroutine"
    if inspect.isasyncgenfunction(call):
        return "asynchronous generator"
    return "generator" if inspect.isgeneratorfunction(call) else None


def check_result(result: T, fn: Callable[..., Any]) -> T:
    """Return `result` of `fn`, unless it is something that has yet to be run.

    Raises:
        TypeError: It is a coroutine, an asynchronous generator, or a generator that has not begun.
    """
    kind = _KINDS.get(type(result))
    if kind is None:
        return result
    if isinstance(result, GeneratorType):
        if inspect.getgeneratorstate(result) != inspect.GEN_CREATED or result.gi_code.co_name == "<genexpr>":
            return result
    elif isinstance(result, CoroutineType):
        result.close()  # or Python would say, too, that nobody has awaited it
    made = getattr(result, "__name__", "it")
    asked, blame = f"cannot take what {name_of(fn)} returned", f"it is {_a(kind)}, and nothing of it has run"
    hint = f"to run it on the rank, as in {_RUNS[kind].format(made)}"
    raise InvalidType(asked, blame, f"result: {made}(), which nobody has begun to run", hint)


def _a(kind: str) -> str:
    return f"an {kind}" if kind.startswith("a") else f"a {kind}"


def check_body(body: Callable[..., Any]) -> None:
    """Refuse a test body that would pass without having run."""
    kind = kind_of_lazy(body)
    if kind is None:
        return
    name = name_of(body)
    instead = (
        f"def {name}(ctx): ..., without a yield; what has to be set up and torn down belongs in a fixture"
        if kind == "generator"
        else f"def {name}(ctx): asyncio.run(work(ctx)), with all that is to run in an async def work(ctx)"
    )
    blame = "a call of it runs nothing yet, so that it would always pass"
    raise InvalidType(f"cannot run {name} on ranks", blame, f"body: {_a(kind)} function", instead)


def check_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, world_size: int
) -> dict[str, Any]:
    """Refuse what `fn(*args, **kwargs)` would only refuse on the ranks; returns the keyword arguments."""
    check("cannot run it on ranks", "callable", f"sim.run(train, world_size={world_size})", fn=fn)
    name = name_of(fn)
    hint = f"sim.run({name}, world_size={world_size}, args=(x,)), with the comma"
    check(f"cannot pass arguments to {name}", "list", hint, args=args)
    kind = kind_of_lazy(fn)
    if kind is not None:
        hint = f"a function that runs it, as in lambda: {_RUNS[kind].format(name)}"
        seen = f"fn: {_a(kind)} function"
        raise InvalidType(f"cannot run {name} on ranks", "a call of it runs nothing yet", seen, hint)
    hint = f"sim.run({name}, world_size={world_size}, kwargs={{'x': 1}})"
    check(f"cannot pass keyword arguments to {name}", "mapping | None", hint, kwargs=kwargs)
    _check_arguments(fn, name, args, kwargs or {}, world_size)
    return dict(kwargs or {})


def _check_arguments(
    fn: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any], world_size: int
) -> None:
    if not inspect.isroutine(fn) or hasattr(fn, "__signature__"):
        return
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (ValueError, TypeError):  # of functions written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as mistake:
        seen = f"args: {len(args)}; kwargs: {', '.join(map(str, kwargs)) or 'none'}; {name} takes {signature}"
        hint = f"sim.run({name}, world_size={world_size}, args=(...), kwargs={{...}})"
        raise InvalidType(f"cannot call {name} on ranks", str(mistake), seen, hint) from None
