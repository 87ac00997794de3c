"""`python -m sim run --nproc 8 script.py`: an unmodified script for torchrun, on simulated ranks.

Each rank executes the script as its own `__main__`, with torchrun's environment variables, its own `sys.argv`,
output streams, logging, random generators and copies of the user's modules.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from sim.explain.errors import exit_status
from sim.explain.failure import report_failure
from sim.kernel.context import current_context
from sim.script.modules import find_module
from sim.script.options import Launch, parse
from sim.script.output import ProcessView, RankStream
from sim.world import World, world

FAILURE, USER_ERROR = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script as the command line of `python -m sim run` says; return the exit code.

    0: every rank has ended well. 1: a rank has failed (or what it passed to `sys.exit`). 2: a mistake in what was
    asked. 130: Ctrl-C.
    """
    try:
        launch = parse(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    return run_script(launch)


def run_script(launch: Launch) -> int:
    """Run the script on the ranks, report its errors on the error output, and return the exit code."""
    source = read_script(launch)
    if source is None:
        return FAILURE
    try:
        ranks = world(
            launch.nproc,
            seed=launch.seed,
            init=False,
            machine=launch.hardware,
            check_races=launch.check_races,
            check_replicas=launch.check_replicas,
            check_identity=launch.check_identity,
            device=launch.device,
            map_device=launch.map_device,
            own=launch.own,
        )
    except ValueError as error:  # the device is not here
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    ranks.replay = launch.replay()
    with warnings.catch_warnings(), script_folder_first(source.folder):
        views = prepare_views(ranks, launch, source)
        try:
            with ranks:
                ranks.run(execute_script, args=(source.code, source.package))
        except BaseException as error:
            finish_views(views)
            return report_failure(error, launch.nproc, launch.map_device, ranks.replay)
        finish_views(views)
    return 0


class ScriptSource(NamedTuple):
    """A script that ranks are to execute.

    Attributes:
        code: what they execute.
        file: where it is from.
        folder: that `python script.py` would put first on `sys.path`.
        spec: of a module; None: it is no module.
    """

    code: CodeType
    file: str
    folder: str
    spec: ModuleSpec | None

    @property
    def package(self) -> str:
        """The package that a module is in; empty: none."""
        return "" if self.spec is None else self.spec.parent or ""


def read_script(launch: Launch) -> ScriptSource | None:
    """Return the compiled script; None: it is no Python, which has been said on the error output."""
    spec = find_module(launch.script, [os.getcwd(), *sys.path]) if launch.is_module else None
    file = os.path.abspath(launch.script) if spec is None else str(spec.origin)
    folder = os.path.dirname(file) if spec is None else os.getcwd()
    try:
        return ScriptSource(compile(Path(file).read_bytes(), file, "exec"), file, folder, spec)
    except (SyntaxError, ValueError) as error:
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        return None


# -- a rank ------------------------------------------------------------------------------------------------------


def prepare_views(ranks: World, launch: Launch, source: ScriptSource) -> list[ProcessView]:
    """Give each rank the process that the script will see, and return these."""
    file, spec = source.file, source.spec
    ranks.host.folder = source.folder
    extra = {os.fsencode(name): os.fsencode(value) for name, value in launch.environment.items()}
    torchrun = {b"TORCHELASTIC_RUN_ID": b"sim", b"TORCHELASTIC_RESTART_COUNT": b"0", b"TORCHELASTIC_MAX_RESTARTS": b"0"}
    shown = range(launch.nproc) if launch.show is None else launch.show
    plain = launch.show is not None and len(launch.show) == 1
    folder = ranks.host.folder
    theirs = find_module("sim", [folder]) or find_module("sim.__init__", [folder])
    has_sim = theirs is not None and not str(theirs.origin).startswith(
        os.path.dirname(os.path.dirname(__file__)) + os.sep
    )
    for context in ranks.contexts:
        rank = context.rank
        context.environment.update(torchrun | extra)
        out = RankStream(sys.stdout if rank in shown else None, "" if plain else f"[rank {rank}] ", like=sys.stdout)
        err = RankStream(sys.stderr, f"[rank {rank}] ")
        argv = [launch.script if spec is None else file, *launch.arguments]
        context.view = ProcessView(argv, sys.path, out, err)
        context.modules.main, context.modules.has_sim = _main_module(file, spec), has_sim
    return [context.view for context in ranks.contexts if context.view is not None]


def _main_module(file: str, spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __builtins__=__builtins__, __loader__=SourceFileLoader("__main__", file))
    if spec is not None:
        module.__dict__.update(__spec__=spec, __package__=spec.parent, __cached__=spec.cached)
    return module


def execute_script(code: CodeType, package: str) -> None:
    """Execute the script as the calling rank's `__main__`, then what it has registered with `atexit`.

    That is also called if the rank has failed, behind a `sys.excepthook` of the script's, but not if others have:
    torchrun ends these by a signal.
    """
    context = current_context()
    assert context is not None
    assert context.view is not None
    try:
        with as_main_thread(context.view):
            if package:
                importlib.import_module(package)
            exec(code, sys.modules["__main__"].__dict__)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and exit_status(error) == 0):
            if context.scheduler.fatal is None:
                context.view.run_hook(error)
                context.view.run_exit_calls()
            raise
    context.view.run_exit_calls()


@contextmanager
def as_main_thread(view: ProcessView) -> Iterator[None]:
    """Let the calling thread be the script's main thread, by name, too: logs show it."""
    view.thread = thread = threading.current_thread()
    name, thread.name = thread.name, "MainThread"
    try:
        yield
    finally:
        thread.name = name


def finish_views(views: Sequence[ProcessView]) -> None:
    """Show what ranks have written without ending the line."""
    for view in views:
        for stream in view.streams:
            stream.finish()


@contextmanager
def script_folder_first(folder: str) -> Iterator[None]:
    """What `python script.py` does to `sys.path`; the folder that `python -m` puts there is not searched."""
    before = list(sys.path)
    started_from = before[:1] if before[:1] in ([""], [os.getcwd()]) else []
    sys.path[:] = [folder, *before[len(started_from) :]]
    try:
        yield
    finally:
        sys.path[:] = before
