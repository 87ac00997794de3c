"""Patches of Python itself while a world is alive, next to those of torch.

Random generators are each rank's own in every world. A world that runs a script also has a ``ProcessView`` per rank,
which these seams put in place. The list of all seams is in ``sim/torch_seams.py``.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import functools
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib import _bootstrap
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.multiprocessing

from sim.explain.errors import SimError
from sim.kernel.context import current_context
from sim.patches.locks import my_scheduler
from sim.script.modules import RankFinder, RankLocks
from sim.script.process_view import SLOTS, ForwardToRank

if TYPE_CHECKING:
    from sim.script.process_view import ProcessView
    from sim.world import RankContext, World

__all__ = ["PROCESS_SEAMS", "Generators"]

Undo = Callable[[], None]
Replacement = tuple[Any, str, Any]


class Generators:
    """One rank's default generators of ``random`` and of numpy, made when they are first used.

    >>> Generators(7).python.random() == random.Random(7).random()
    True
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @cached_property
    def python(self) -> random.Random:
        """What ``random.random()`` and the others draw from."""
        return random.Random(self._seed)

    @cached_property
    def numpy(self) -> np.random.RandomState:
        """What ``np.random.rand()`` and the others draw from."""
        return np.random.RandomState(np.random.MT19937(self._seed))


def _context() -> RankContext | None:
    return current_context()


def _view() -> ProcessView | None:
    context = _context()
    return None if context is None else context.view


def _replace(replacements: list[Replacement]) -> Undo:
    """Set attributes, and return what sets them back."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)

    def undo() -> None:
        for owner, name, value in reversed(originals):
            setattr(owner, name, value)

    return undo


# -- in every world ----------------------------------------------------------------------------------------------


def _dispatch(original: Callable[..., Any], generator: str, method: str) -> Callable[..., Any]:
    """``original`` outside of ranks; on a rank, ``method`` of its own generator."""

    @functools.wraps(original)
    def draw(*args: Any, **options: Any) -> Any:
        context = _context()
        if context is None:
            return original(*args, **options)
        return getattr(getattr(context.generators, generator), method)(*args, **options)

    return draw


@functools.cache
def _python_draws() -> list[Replacement]:
    shared = getattr(random, "_inst")  # noqa: B009 - unknown to its stubs
    bound = [n for n in dir(random) if getattr(getattr(random, n), "__self__", None) is shared]
    return [(random, name, _dispatch(getattr(random, name), "python", name)) for name in bound]


@functools.cache
def _numpy_draws() -> list[Replacement]:
    shared = np.random.mtrand._rand
    bound = [name for name in np.random.__all__ if getattr(getattr(np.random, name), "__self__", None) is shared]
    methods = {name: name for name in bound} | {"seed": "seed", "ranf": "random_sample", "sample": "random_sample"}
    return [(np.random, name, _dispatch(getattr(np.random, name), "numpy", to)) for name, to in methods.items()]


def _python_random(world: World) -> Undo:
    """``random.random`` and the others draw from the rank's own generator."""
    return _replace(_python_draws())


def _numpy_random(world: World) -> Undo:
    """``np.random.rand`` and the others draw from the rank's own generator."""
    return _replace(_numpy_draws())


def _process_exit(world: World) -> Undo:
    """``os._exit`` would end every rank; a process that a rank has started may call it."""
    original = os._exit

    def refuse_on_ranks(status: int) -> Any:
        context = _context()
        if context is None or os.getpid() != context.world.pid:
            original(status)
        raise SimError(
            f"rank {context.rank} called os._exit({status}), which would end all {world.world_size} simulated ranks\n"
            "  seen: every rank is a thread of this one process\n"
            "  try: sys.exit(status), which ends the calling rank alone"
        )

    return _replace([(os, "_exit", refuse_on_ranks)])


def _spawn(world: World) -> Undo:
    """``torch.multiprocessing.spawn`` starts ranks of its own, with which simulated ranks cannot communicate."""
    module = sys.modules["torch.multiprocessing.spawn"]
    original = torch.multiprocessing.start_processes

    @functools.wraps(original)
    def start_processes(fn: Any, *args: Any, **options: Any) -> Any:
        context = _context()
        if context is None:
            return original(fn, *args, **options)
        name = getattr(fn, "__name__", "main")
        raise SimError(
            f"rank {context.rank} called torch.multiprocessing.spawn({name}, ...): it starts processes as ranks, but "
            f"the {world.world_size} simulated ranks run already\n"
            f"  fn: {name}\n"
            f"  try: under torchrun and here alike, call {name}(int(os.environ['LOCAL_RANK']), ...) instead; or in a "
            f"program of your own: sim.run(lambda: {name}(dist.get_rank(), ...), world_size={world.world_size})"
        )

    return _replace(
        [(module, "start_processes", start_processes), (torch.multiprocessing, "start_processes", start_processes)]
    )


def _start_method(world: World) -> Undo:
    """``set_start_method`` may be called by every rank: each would call it once in a process of its own."""
    default: Any = multiprocessing.get_context.__self__  # type: ignore[attr-defined]
    original, before = multiprocessing.set_start_method, default._actual_context

    def set_start_method(method: Any, force: bool = False) -> None:
        context = _context()
        if context is None or context.view is not None or default._actual_context is None:
            original(method, force)
        elif method != default.get_start_method():
            raise RuntimeError(
                f"rank {context.rank} cannot set the start method {method!r}: another rank has set "
                f"{default.get_start_method()!r}\n"
                "  seen: ranks share the process\n  try: the same method on all ranks, or a context of its own: "
                f"multiprocessing.get_context({method!r})"
            )

    if world.contexts[0].view is None:
        default._actual_context = None  # as in a new process
    set_back = _replace(
        [
            (multiprocessing, "set_start_method", set_start_method),
            (torch.multiprocessing, "set_start_method", set_start_method),
        ]
    )

    def undo() -> None:
        set_back()
        default._actual_context = before

    return undo


def _child_environment(world: World) -> Undo:
    """A process that a rank starts inherits the rank's environment, as the rank's ``os.environ`` has it."""
    original: Callable[..., int] = _posixsubprocess.fork_exec
    environment_at = 5  # among the arguments, which have no names

    def fork_exec(*args: Any) -> int:
        context = _context()
        if context is None or args[environment_at] is not None or _is_fork_server(args[0]):
            return original(*args)
        own = [name + b"=" + value for name, value in context.environment.items()]
        return original(*args[:environment_at], own, *args[environment_at + 1 :])

    replacements: list[Replacement] = [(_posixsubprocess, "fork_exec", fork_exec)]
    if hasattr(subprocess, "_fork_exec"):  # Python 3.11 and later
        replacements.append((subprocess, "_fork_exec", fork_exec))
    return _replace(replacements)


def _is_fork_server(command: Sequence[Any]) -> bool:
    """Whether this starts multiprocessing's server, which all ranks share: it must not pass for one of them."""
    return any("multiprocessing.forkserver" in os.fsdecode(word) for word in command)


# -- where a script runs -----------------------------------------------------------------------------------------


def _process_view(world: World) -> Undo:
    """``__main__``, ``sys.argv``, streams and what else a script finds in its process: one copy per rank."""
    if world.contexts[0].view is None:
        return lambda: None
    restore = _replace([(owner, name, getattr(owner, name)) for owner, name in SLOTS])
    main, root, forward = sys.modules["__main__"], logging.root, ForwardToRank()
    root.addHandler(forward)

    def undo() -> None:
        restore()
        root.removeHandler(forward)
        sys.modules["__main__"] = main

    return undo


def _imports(world: World) -> Undo:
    """What a rank imports of user code and of some packages becomes its own; Python's locks by module name do, too."""
    finder = RankFinder(world.folder)
    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(place, finder)
    locks = RankLocks(vars(_bootstrap)["_module_locks"])
    lock: Any = vars(_bootstrap)["_ModuleLock"]
    restore = _replace([(_bootstrap, "_module_locks", locks), (lock, "acquire", _acquire_import(lock.acquire))])
    world.references.begin()

    def undo() -> None:
        world.references.end()
        restore()
        sys.meta_path.remove(finder)

    return undo


def _acquire_import(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Python's wait for another thread's import of the same module, giving up the turn to that thread."""

    def acquire(lock: Any) -> bool:
        scheduler, me = my_scheduler(), threading.get_ident()
        if scheduler is not None and lock.owner not in (None, me):
            others = {thread.ident for thread in (*scheduler.ranks, *scheduler.helpers)}
            while lock.owner != me and lock.owner in others:
                scheduler.poll()
        return original(lock)

    return acquire


def _exit_calls(world: World) -> Undo:
    """What a script registers with ``atexit`` runs when its rank ends."""
    register, unregister = atexit.register, atexit.unregister

    def register_on_rank(func: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        view = _view()
        if view is None:
            return register(func, *args, **options)
        view.at_exit.append(partial(func, *args, **options))
        return func

    def unregister_on_rank(func: Callable[..., Any]) -> None:
        view = _view()
        if view is None:
            unregister(func)
        else:
            view.at_exit = [call for call in view.at_exit if getattr(call, "func", None) != func]

    return _replace([(atexit, "register", register_on_rank), (atexit, "unregister", unregister_on_rank)])


def _signals(world: World) -> Undo:
    """A script may set signal handlers, which Python allows on the main thread only; no signal reaches a rank."""
    set_handler, get_handler = signal.signal, signal.getsignal

    def set_on_rank(number: int, handler: Any) -> Any:
        view = _view()
        if view is None:
            return set_handler(number, handler)
        before = get_on_rank(number)
        view.signals[number] = handler
        return before

    def get_on_rank(number: int) -> Any:
        view = _view()
        return view.signals[number] if view is not None and number in view.signals else get_handler(number)

    return _replace([(signal, "signal", set_on_rank), (signal, "getsignal", get_on_rank)])


PROCESS_SEAMS: tuple[Callable[[World], Undo], ...] = (
    _python_random,
    _numpy_random,
    _process_exit,
    _spawn,
    _start_method,
    _child_environment,
    _process_view,
    _imports,
    _exit_calls,
    _signals,
)


def _stop_ranks_in_child() -> None:
    """In a process that a rank has forked off: it is no rank, and would wait for ever for the others."""
    context = _context()
    if context is not None:
        context.world.scheduler.fatal = SimError(
            f"a process that rank {context.rank} started used one of the rank's process groups\n"
            f"  seen: process {os.getpid()}, forked off process {context.world.pid}\n"
            "  try: communicate from the rank itself, and let its processes load or compute only"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_ranks_in_child)
