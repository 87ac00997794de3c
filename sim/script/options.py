"""The launch of a script: which one, on how many ranks, and whose output is shown."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.machine import find_machine
from sim.script.arguments import read_arguments
from sim.script.modules import find_module
from sim.script.packages import check_own
from sim.world import MAX_RANKS

__all__ = ["Launch", "launch_of", "parse"]


@dataclass(frozen=True)
class Launch:
    """What to run, on how many ranks, and what to show of it.

    Attributes:
        script: Path of the script, as it was given; or the name of a module.
        is_module: Whether it is one, as for `python -m`.
        arguments: What the script finds behind its name in `sys.argv`.
        nproc: Number of ranks.
        seed: Of the interleaving and the ranks' initial random state.
        map_device: The kind of device (`cuda`, `npu`) whose place the CPU takes, if any.
        device: The kind of device that the ranks have, as in `sim.world`, if any.
        environment: Variables that each rank gets on top of torchrun's.
        check_races: As in `sim.world`.
        check_replicas: As in `sim.world`.
        check_identity: As in `sim.world`.
        hardware: What the ranks stand for, `machine` of `sim.world`.
        own: Packages of which each rank gets a copy, besides the built-in ones.
        show: The ranks whose standard output is shown; None: all.
        command: What a person types to start this, up to the options.
    """

    script: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    nproc: int = 1
    seed: int = 0
    map_device: str | None = None
    device: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    check_races: bool = False
    check_replicas: bool = False
    check_identity: bool = True
    hardware: str | None = None
    own: tuple[str, ...] = ()
    show: tuple[int, ...] | None = (0,)
    command: str = "python -m sim run"

    def replay(self) -> str:
        """The command that runs the same again.

        >>> Launch("train.py", arguments=("--steps", "3"), nproc=8, seed=5).replay()
        'python -m sim run --nproc 8 --seed 5 train.py --steps 3'
        """
        options = ["--nproc", str(self.nproc), "--seed", str(self.seed)]
        if self.map_device is not None:
            options += ["--map-device", self.map_device]
        if self.device is not None:
            options += ["--device", self.device]
        for name, value in self.environment.items():
            options += ["--env", f"{name}={value}"]
        options += ["--check-races"] * self.check_races + ["--check-replicas"] * self.check_replicas
        options += [] if self.check_identity else ["--check-identity", "off"]
        options += ["--hardware", self.hardware] if self.hardware else []
        options += ["--own", ",".join(self.own)] if self.own else []
        if self.is_module:
            options.append("-m")
        return f"{self.command} {shlex.join([*options, self.script, *self.arguments])}"


def parse(arguments: Sequence[str] | None = None, command: str = "python -m sim run") -> Launch:
    """What a command line asks for; `command` is what a person has typed before it.

    >>> parse(["--standalone", "--nproc-per-node", "2", "-m", "json.tool", "x.json"]).replay()
    'python -m sim run --nproc 2 --seed 0 -m json.tool x.json'

    Raises:
        ValueError: It cannot be run.
        SystemExit: It cannot be read, or asks for help.
    """
    return launch_of(command, **read_arguments(arguments, command))


def launch_of(
    command: str,
    script: str,
    arguments: Sequence[str],
    *,
    nproc: int,
    seed: int,
    map_device: str | None,
    env: Sequence[str],
    own: str,
    show: str,
    module: bool,
    device: str | None = None,
    check_races: bool = False,
    check_replicas: bool = False,
    check_identity: str = "on",
    hardware: str | None = None,
    nnodes: str = "1",
    most: int = MAX_RANKS,
) -> Launch:
    """What the options of a command line ask for, each as it was typed.

    Raises:
        ValueError: It cannot be run.
    """
    _check_machines(nnodes, script, command)
    _refuse_ranks_in_ranks(nproc)
    if not 1 <= nproc <= most:
        asked = f"cannot run {script} on {nproc} ranks"
        again = shlex.join(["--nproc", "8", *["-m"] * module, script])
        blame, hint = f"--nproc must be from 1 to {most:,}", f"{command} {again}"
        raise InvalidValue(asked, blame, f"--nproc: {nproc}", hint)
    if module:
        _check_module(script, nproc, command)
    else:
        _check_script(script, nproc, command)
    if hardware is not None:
        find_machine(hardware)
    packages = tuple(filter(None, own.split(",")))
    check_own(packages, "--own")
    return Launch(
        script=script,
        is_module=module,
        arguments=tuple(arguments),
        nproc=nproc,
        seed=seed,
        map_device=map_device,
        device=device,
        environment=_variables(env),
        check_races=check_races,
        check_replicas=check_replicas,
        check_identity=check_identity == "on",
        hardware=hardware,
        own=packages,
        show=_shown(show, nproc),
        command=command,
    )


def _refuse_ranks_in_ranks(nproc: int) -> None:
    present = [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if present:
        asked, seen = f"cannot start {nproc} simulated ranks", f"seen: {', '.join(present)} in the environment"
        hint = "start it without torchrun, and not from a script that runs on ranks"
        raise InvalidValue(asked, "this process is a rank already", seen, hint)


def _check_machines(nnodes: str, script: str, command: str) -> None:
    if nnodes not in ("1", "1:1"):
        asked, blame = f"cannot run {script} on more machines than one", "all simulated ranks are in this process"
        hint = f"{command} --nproc 16 {shlex.quote(script)}, with as many ranks as all machines have together"
        raise InvalidValue(asked, blame, f"--nnodes: {nnodes}, expected 1", hint)


def _check_module(name: str, nproc: int, command: str) -> None:
    if find_module(name, [os.getcwd(), *sys.path]) is None:
        is_path = name.endswith(".py") or os.sep in name
        alone = f"{command} --nproc {nproc} {shlex.quote(name)}"
        better = alone if is_path else "it in the folder that the module is in"
        asked, blame = f"cannot run the module {name} on {nproc} ranks", "there is none in Python source"
        seen = f"-m: {name}, expected a module, or a package with a __main__.py, as for python -m"
        raise InvalidValue(asked, blame, seen, better)


def _check_script(script: str, nproc: int, command: str) -> None:
    path = Path(script)
    if os.path.isfile(path):  # of pathlib's, a name that is too long raises
        return
    is_folder = os.path.isdir(path)
    what = "is a folder" if is_folder else "is no regular file" if os.path.exists(path) else "does not exist"
    folder = path if is_folder else path.parent
    there = sorted(each.name for each in folder.glob("*.py")) if os.path.isdir(folder) else []
    close = difflib.get_close_matches(path.name, there, n=1) or there[:1]
    better = os.path.normpath(os.path.join(folder, close[0])) if close else "the path of a Python file"
    hint = f"{command} --nproc {nproc} {shlex.quote(better)}" if close else better
    raise InvalidValue(f"cannot run {script} on {nproc} ranks", f"it {what}", f"script: {path.absolute()}", hint)


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            blame = "--env takes a name, an equals sign and a value"
            raise InvalidValue("cannot set an environment variable", blame, f"--env: {pair!r}", "--env DEBUG=1")
        variables[name] = value
    return variables


def _shown(asked: str, nproc: int) -> tuple[int, ...] | None:
    if asked == "all":
        return None
    parts = asked.split(",")
    if all(part.strip().isdecimal() and int(part) < nproc for part in parts):
        return tuple(int(part) for part in parts)
    blame = f"--show takes ranks from 0 to {nproc - 1}, with commas, or all"
    raise InvalidValue("cannot show the output of ranks", blame, f"--show: {asked!r}", "--show 0, --show all")
