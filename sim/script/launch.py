"""``python -m sim run --nproc 8 script.py``: an unmodified script for torchrun, on simulated ranks.

Each rank executes the script as its own ``__main__``, with torchrun's environment variables, its own ``sys.argv``,
output streams, logging, random generators and copies of the user's modules.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from sim.current import current_context
from sim.script.failure import report_failure
from sim.script.output import RankStream
from sim.script.process_view import ProcessView
from sim.seams.devices import KINDS
from sim.world import MAX_RANKS, World, world

__all__ = ["Launch", "main", "run_script"]

FAILURE, USER_ERROR = 1, 2


@dataclass(frozen=True)
class Launch:
    """What to run, on how many ranks, and what to show of it.

    Attributes:
        script: Path of the script, as it was given.
        arguments: What the script finds behind its name in ``sys.argv``.
        nproc: Number of ranks.
        seed: Of the interleaving and the ranks' initial random state.
        map_device: The kind of device (``cuda``, ``npu``) whose place the CPU takes, if any.
        environment: Variables that each rank gets on top of torchrun's.
        show: The ranks whose standard output is shown; None: all.
        command: What a person types to start this, up to the options.
    """

    script: str
    arguments: tuple[str, ...] = ()
    nproc: int = 1
    seed: int = 0
    map_device: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    show: tuple[int, ...] | None = (0,)
    command: str = "python -m sim run"

    def replay(self) -> str:
        """The command that runs the same again.

        >>> Launch("train.py", ("--steps", "3"), nproc=8, seed=5).replay()
        'python -m sim run --nproc 8 --seed 5 train.py --steps 3'
        """
        options = ["--nproc", str(self.nproc), "--seed", str(self.seed)]
        if self.map_device is not None:
            options += ["--map-device", self.map_device]
        for name, value in self.environment.items():
            options += ["--env", f"{name}={value}"]
        return f"{self.command} {shlex.join([*options, self.script, *self.arguments])}"


def main(arguments: Sequence[str] | None = None, command: str = "python -m sim run") -> int:
    """Run a script as the command line says; return the exit code.

    0: every rank has ended well. 1: a rank has failed (or what it passed to ``sys.exit``). 2: a mistake in what was
    asked. 130: Ctrl-C.
    """
    asked = _parser(command).parse_args(arguments)
    try:
        launch = _checked(asked, command)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    return run_script(launch)


def run_script(launch: Launch) -> int:
    """Run the script on the ranks, report what goes wrong on the error output, and return the exit code."""
    file = os.path.abspath(launch.script)
    try:
        code = compile(Path(file).read_bytes(), file, "exec")
    except (SyntaxError, ValueError) as error:
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        return FAILURE
    ranks = world(launch.nproc, seed=launch.seed, init=False)
    ranks.replay = launch.replay()
    ranks.folder = os.path.dirname(file)
    ranks.map_device = launch.map_device
    with warnings.catch_warnings(), _script_folder_first(ranks.folder):
        views = _prepare(ranks, launch, file)
        try:
            with ranks:
                ranks.run(_rank_main, args=(code,))
        except BaseException as error:
            _finish(views)
            return report_failure(error, launch.nproc, launch.map_device, ranks.replay)
        _finish(views)
    return 0


# -- a rank ------------------------------------------------------------------------------------------------------


def _prepare(ranks: World, launch: Launch, file: str) -> list[ProcessView]:
    """Give each rank the process that the script will see, and return these."""
    extra = {os.fsencode(name): os.fsencode(value) for name, value in launch.environment.items()}
    torchrun = {b"TORCHELASTIC_RUN_ID": b"sim", b"TORCHELASTIC_RESTART_COUNT": b"0", b"TORCHELASTIC_MAX_RESTARTS": b"0"}
    shown = range(launch.nproc) if launch.show is None else launch.show
    plain = launch.show is not None and len(launch.show) == 1
    for context in ranks.contexts:
        rank = context.rank
        context.environment.update(torchrun | extra)
        out = RankStream(sys.stdout if rank in shown else None, "" if plain else f"[rank {rank}] ", like=sys.stdout)
        err = RankStream(sys.stderr, f"[rank {rank}] ")
        argv = [launch.script, *launch.arguments]
        context.view = ProcessView(_main_module(file), argv, sys.path, out, err)
    return [context.view for context in ranks.contexts if context.view is not None]


def _main_module(file: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __builtins__=__builtins__, __loader__=SourceFileLoader("__main__", file))
    return module


def _rank_main(code: CodeType) -> None:
    """Execute the script as the calling rank's ``__main__``, then what it has registered with ``atexit``."""
    context = current_context()
    assert context is not None
    assert context.view is not None
    try:
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    context.view.run_exit_calls()


def _finish(views: Sequence[ProcessView]) -> None:
    """Show what ranks have written without ending the line."""
    for view in views:
        for stream in view.streams:
            stream.finish()


@contextmanager
def _script_folder_first(folder: str) -> Iterator[None]:
    """What ``python script.py`` does to ``sys.path``; the folder that ``python -m`` puts there is not searched."""
    before = list(sys.path)
    started_from = before[:1] if before[:1] in ([""], [os.getcwd()]) else []
    sys.path[:] = [folder, *before[len(started_from) :]]
    try:
        yield
    finally:
        sys.path[:] = before


# -- the command line --------------------------------------------------------------------------------------------


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command,
        description="Run an unmodified torchrun script on simulated ranks, in this process and on the CPU.",
        epilog=f"example: {command} --nproc 8 --seed 5 train.py --steps 10",
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", "--nproc-per-node", "--nproc_per_node", type=int, required=True, help="ranks")
    parser.add_argument("--seed", type=int, default=0, help="fixes the interleaving of the ranks (0)")
    parser.add_argument("--map-device", choices=KINDS, help="put on the CPU what the script puts on this device")
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="a variable for every rank")
    parser.add_argument("--show", default="0", metavar="RANKS", help="whose standard output: 0 (default), 0,3 or all")
    parser.add_argument("script", help="a Python file that torchrun could start")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser


def _checked(asked: argparse.Namespace, command: str) -> Launch:
    """Check what was asked before any rank starts; raise ValueError."""
    _refuse_ranks_in_ranks(asked.nproc)
    if not 1 <= asked.nproc <= MAX_RANKS:
        raise ValueError(
            f"cannot run {asked.script} on {asked.nproc} ranks\n"
            f"  --nproc: {asked.nproc}, expected 1 to {MAX_RANKS:,}\n  try: {command} --nproc 8 {asked.script}"
        )
    _check_script(asked.script, asked.nproc, command)
    return Launch(
        script=asked.script,
        arguments=tuple(asked.arguments),
        nproc=asked.nproc,
        seed=asked.seed,
        map_device=asked.map_device,
        environment=_variables(asked.env),
        show=_shown(asked.show, asked.nproc),
        command=command,
    )


def _refuse_ranks_in_ranks(nproc: int) -> None:
    present = [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if present:
        raise ValueError(
            f"cannot start {nproc} simulated ranks: this process is a rank already\n"
            f"  seen: {', '.join(present)} in the environment\n"
            "  try: start it without torchrun, and not from a script that runs on ranks"
        )


def _check_script(script: str, nproc: int, command: str) -> None:
    path = Path(script)
    if path.is_file():
        return
    what = "is a folder" if path.is_dir() else "does not exist"
    folder = path if path.is_dir() else path.parent
    there = sorted(each.name for each in folder.glob("*.py")) if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, there, n=1) or there[:1]
    better = os.path.normpath(os.path.join(folder, close[0])) if close else "the path of a Python file"
    raise ValueError(
        f"cannot run {script} on {nproc} ranks: it {what}\n"
        f"  script: {path.absolute()}\n  try: {f'{command} --nproc {nproc} {better}' if close else better}"
    )


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(
                f"cannot set the environment variable {pair!r}\n  --env: a name, an equals sign and a value\n"
                "  try: --env DEBUG=1"
            )
        variables[name] = value
    return variables


def _shown(asked: str, nproc: int) -> tuple[int, ...] | None:
    if asked == "all":
        return None
    parts = asked.split(",")
    if all(part.strip().isdecimal() and int(part) < nproc for part in parts):
        return tuple(int(part) for part in parts)
    raise ValueError(
        f"cannot show the output of ranks {asked!r}\n  --show: ranks from 0 to {nproc - 1}, with commas, or all\n"
        "  try: --show 0, --show all"
    )
