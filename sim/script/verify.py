"""`python -m sim verify --nproc 8 --reference one_device.py train.py`: a torchrun script beside its one-device form.

Both are executed unmodified, training loops included. Their first steps are compared, and the first difference is
reported.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from hyper_parallel.core.common.checks import read_int
from hyper_parallel.core.common.errors import InvalidType, InvalidValue, explain
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import mesh_lines
from sim.explain.errors import InFlightBufferRace, RankFailed, SimError
from sim.explain.failure import report_failure
from sim.kernel.context import current_rank
from sim.prove.evidence import read_mesh
from sim.prove.modes.choices import Choices
from sim.prove.modes.precision import WidePrecision
from sim.prove.modes.values import is_constant, listed
from sim.prove.randomness import DrawPlace
from sim.prove.report import Report
from sim.prove.steps.api import verify_step
from sim.prove.steps.comparison import Comparison
from sim.prove.steps.mutants import Mutant, put_in
from sim.prove.steps.names import roots_by_value
from sim.prove.steps.proof import Loop, RanksRecord, References, Taken
from sim.prove.steps.watch import LoopRecord, LoopWatch, PerturbedSteps
from sim.prove.verify import verify_plan
from sim.script.arguments import HARDWARE_HELP, new_parser
from sim.script.changes import without_compiler_and_workers
from sim.script.launch import (
    ScriptSource,
    execute_script,
    finish_views,
    prepare_views,
    read_script,
    script_folder_first,
)
from sim.script.options import Launch, launch_of
from sim.world import World, world

__all__ = ["main", "mesh_of_groups", "verify", "verify_script"]

FAILURE, USER_ERROR, INTERRUPTED = 1, 2, 130
_COMMAND = "python -m sim verify"
_RUNS = 3
_OF_DTYPES = re.compile(r"dtype|scalar type|\b(Float|Double|Half|BFloat16)\b|float(16|32|64)")
_MOST_SHOWN = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove a script from the command line of `python -m sim verify`, and return the exit code.

    0: ranks and one device compute the same. 1: they differ, or a rank has failed. 2: a usage error, e.g. a reference
    that fails. 130: Ctrl-C.
    """
    asked = vars(_parser().parse_args(arguments))
    own = {name: asked.pop(name) for name in ("reference", "steps", "mesh", "name", "all", "sensitivity")}
    try:
        launch = launch_of(_COMMAND, **asked)
        reference = _reference(launch, own["reference"])
        if own["steps"] < 1:
            blame, seen = "it compares one step or more", f"--steps: {own['steps']}"
            raise InvalidValue(f"cannot verify {launch.script}", blame, seen, "--steps 2")
        mesh = None if own["mesh"] is None else _mesh(launch, own["mesh"])
        names = _names(own["name"])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    start = time.perf_counter()
    beside = "itself" if reference.script == launch.script and own["reference"] is None else reference.script
    steps = f"{own['steps']} step{'s' * (own['steps'] > 1)}"
    print(f"{launch.script} on {launch.nproc} simulated ranks, and {beside} on one device: the first {steps} ...")
    sys.stdout.flush()
    unreadable = next((each for each in (launch, reference) if read_script(each) is None), None)
    if unreadable is not None:
        return FAILURE if unreadable is launch else USER_ERROR
    try:
        report = verify_script(launch, reference, own["steps"], mesh, names)
    except (SimError, KeyboardInterrupt) as error:
        return _failed(launch, reference, error)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    print(f"\n{report.table(verbose=own['all'])}")
    if own["sensitivity"] and report.bug is None:
        print(f"\n{report.sensitivity()}")
    print(f"took {time.perf_counter() - start:.1f} s")
    return 0 if report.ok else FAILURE


def _parser() -> argparse.ArgumentParser:
    about = "Compare the steps of an unmodified torchrun script, on simulated ranks, with those of one device."
    parser = new_parser(_COMMAND, about, "--nproc 8 --reference one_device.py train.py --batch 4")
    parser.add_argument("--hardware", help=HARDWARE_HELP)
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--reference",
        metavar="FILE",
        help="what one device executes, with arguments of its own in the same quotes, else those of the script; "
        "default: the script itself, as its only rank",
    )
    group.add_argument("--steps", type=int, default=2, help="steps of training, after which both end (2)")
    group.add_argument("--mesh", help="axes of the ranks, dp=2,tp=4; default: as the groups that the script makes")
    group.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="RANKS=ONE",
        help="a parameter's name on the ranks, and on one device, several with commas for a fused one; * for a part",
    )
    group.add_argument("--all", action="store_true", help="print all tensors, not only the wrong ones")
    group.add_argument("--sensitivity", action="store_true", help="say which faults, put into the script, are found")
    return parser


def _reference(launch: Launch, asked: str | None) -> Launch:
    """Return the launch of the one-device form; by default the script itself as its only rank."""
    if asked is None:
        return replace(launch, nproc=1, show=())
    try:
        script, *arguments = shlex.split(asked) or [""]
    except ValueError as error:
        hint = "--reference 'one_device.py --batch 4'"
        seen = f"--reference: {asked!r}"
        raise InvalidValue(f"cannot verify {launch.script}", str(error).lower(), seen, hint) from None
    if not os.path.isfile(script):
        there = sorted(name for name in os.listdir(os.path.dirname(script) or ".") if name.endswith(".py"))
        hint = "a Python file that trains the same on one device; without --reference, the script itself as one rank"
        seen = f"here: {', '.join(there[:8]) or 'no Python files'}"
        raise InvalidValue(f"cannot verify {launch.script}", f"there is no reference {script!r}", seen, hint)
    if not launch.is_module and os.path.samefile(script, launch.script) and not arguments:
        arguments = list(launch.arguments)
    chosen = tuple(arguments) or launch.arguments
    return replace(launch, script=script, is_module=False, arguments=chosen, nproc=1, show=())


def _mesh(launch: Launch, asked: str) -> Layout:
    what = f"cannot verify {launch.script}"
    mesh = read_mesh(what, asked)
    if math.prod(mesh.mesh_shape) != launch.nproc:
        blame = f"its axes are of {math.prod(mesh.mesh_shape)} ranks, and there are {launch.nproc}"
        raise InvalidValue(what, blame, f"--mesh {asked} --nproc {launch.nproc}", f"--mesh dp={launch.nproc}")
    return Layout(mesh.mesh_shape, mesh.alias_name)


def _names(pairs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    names = {}
    for pair in pairs:
        theirs, equals, ones = pair.partition("=")
        if not equals or not theirs or not ones:
            hint = "--name 'blocks.*.qkv.weight=blocks.*.q.weight,blocks.*.k.weight,blocks.*.v.weight'"
            raise InvalidValue("cannot use --name", "it takes two names and an equals sign", f"{pair!r}", hint)
        names[theirs] = tuple(ones.split(","))
    return names


class _EnoughSteps(BaseException):
    """Signal that ends a script after its recorded steps; a `BaseException`, so that `except Exception` misses it."""


@dataclass(frozen=True)
class _ScriptLoop(Loop):
    """First steps of a script and of its one-device reference."""

    launch: Launch
    source: ScriptSource
    reference: Launch
    reference_source: ScriptSource
    steps: int
    mesh: Layout | None

    def on_one(self, taken: Taken | None, seed: int | None) -> LoopRecord:
        """Execute the reference."""
        numbers = [self.shared.one] if self.shared is not None else ()
        is_plain = taken is None and seed is None  # later runs would repeat the reference's warnings
        with nullcontext() if is_plain and not numbers else redirect_stderr(io.StringIO()):
            found = self._execute(self.reference, self.reference_source, seed, taken=taken, numbers=numbers)
        if found.stopped is not None:
            raise found.stopped
        return found.loops[0]

    def on_ranks(self, references: References, mutant: Mutant | None) -> RanksRecord:
        """Execute the script on its ranks, with `mutant` put into it if given."""
        numbers = self.shared.ranks if self.shared is not None else ()
        launch = self.launch if mutant is None and not numbers else replace(self.launch, show=())
        with redirect_stderr(io.StringIO()) if numbers else nullcontext():
            found = self._execute(launch, self.source, None, mutant, numbers=numbers, is_watched=launch is self.launch)
        if found.stopped is None and not any(step.updates for loop in found.loops for step in loop.steps):
            raise InvalidValue(*_no_steps(self.launch.script, "no rank has made a step"))
        return replace(found, loops=[_told_by_values(loop, references[0]) for loop in found.loops])

    def make(self) -> None:
        """Run the script's ranks until the first forward, and compare the shards that engines make."""
        first = replace(self, steps=0, launch=replace(self.launch, show=()))
        with redirect_stderr(io.StringIO()):
            found = first._execute(first.launch, self.source, None, compares=True)
        if found.stopped is not None:
            raise found.stopped

    def possible(self, mutants: list[Mutant]) -> list[Mutant]:
        """Keep the faults of communication only, because a script may make its parameters at any time."""
        return [mutant for mutant in mutants if mutant.axis]

    def mesh_of(self, found: RanksRecord) -> Layout:
        """Return the given mesh, or a mesh guessed from the script's process groups, or one axis `ranks`."""
        return self.mesh or self._guessed(found) or Layout((self.launch.nproc,), ("ranks",))

    def _guessed(self, found: RanksRecord) -> Layout | None:
        groups = [*found.groups, *((event.axis, event.members) for event in found.events)]
        return mesh_of_groups(self.launch.nproc, groups)

    def explained(self, report: Report, comparison: Comparison, found: RanksRecord) -> Report:
        """Add notes on causes that lie in two programs, e.g. a batch that grows with the ranks."""
        script, expected, loops = self.launch.script, comparison.expected, found.loops
        if not comparison.names.parts:
            blame = f"no parameter of {script} is one of {self.reference.script}, by its name or by its values"
            lone = next(loop for loop in loops if any(step.updates for step in loop.steps))
            seen = f"ranks: {_listed(lone)}   one device: {_listed(expected)}"
            raise InvalidValue(self.asked, blame, seen, "a reference that trains the same model, or --name RANKS=ONE")
        notes = [*report.notes, *_of_one_value(expected)]
        if self.mesh is None and self._guessed(found) is None:
            notes.append(
                "the groups of the script make no mesh, so that no axes are known; --mesh dp=2,tp=4 names them"
            )
        if self.reference.script == script and report.bug is not None and report.bug.kind == "parameter":
            notes.append(
                f"one device was {script} as its only rank; if its model depends on the ranks, --reference FILE"
            )
        elif not report.ok and _grows(expected, loops):
            notes.append(
                f"each rank takes as many rows as one device, and other ones: the batch grows with the ranks; "
                f"--reference FILE, one that takes the rows of all {self.launch.nproc} ranks"
            )
        rows = [_with_hint(row, "--name '<name on the ranks>={}'") for row in report.rows]
        return replace(report, rows=tuple(rows), notes=tuple(notes))

    def _execute(
        self,
        launch: Launch,
        source: ScriptSource,
        seed: int | None,
        mutant: Mutant | None = None,
        taken: Taken | None = None,
        numbers: Sequence[Mapping[DrawPlace, torch.Tensor]] = (),
        *,
        compares: bool = False,
        is_watched: bool = False,
    ) -> RanksRecord:
        found, changes = RanksRecord(), dict[str, None]()
        is_wide = self.dtype == torch.float64  # otherwise the proof is about the script's own dtypes
        loops: dict[int, LoopRecord] = {}

        def stop() -> None:
            raise _EnoughSteps

        def body() -> None:
            rank, is_plain = current_rank(), launch.nproc == 1 and seed is None
            assert rank is not None, "ranks execute scripts"
            own = numbers[rank] if numbers else None
            watch = LoopWatch(most=self.steps, on_more=stop, keeps_graph=is_plain, shared=own)
            loops[rank] = watch.record
            perturbed = nullcontext() if seed is None else PerturbedSteps(watch, seed)
            wide, choices = WidePrecision(self.dtype), Choices(lambda: watch.where if watch.is_inside else None, taken)
            watch.record.choices = choices.made
            found.wide.extend([wide] if is_wide else [])
            with suppress(_EnoughSteps), perturbed, watch, wide if is_wide else nullcontext(), choices:
                execute_script(source.code, source.package)

        options: dict[str, Any] = {"map_device": launch.map_device, "machine": launch.hardware, "own": launch.own}
        options |= {"check_races": is_watched, "check_replicas": compares}
        ranks = world(launch.nproc, seed=launch.seed, init=False, **options)
        ranks.replay = launch.replay()
        with (
            _default_dtype(self.dtype),
            warnings.catch_warnings(),
            script_folder_first(source.folder),
            without_compiler_and_workers(lambda change: changes.update({change: None})),
        ):
            warnings.filterwarnings("ignore", message="Using `torch.compile")  # warnings about hooks that we set
            views = prepare_views(ranks, launch, source)
            try:
                with ranks, put_in(ranks, mutant):
                    with found.until_stopped(loops, launch.nproc):
                        ranks.run(body)
                    waits = found.stopped is not None and not isinstance(found.stopped, RankFailed)
                    if waits and self._are_complete(loops, launch.nproc):
                        found.stopped = None  # a rank may wait for ended ranks after its last compared step
                    found.groups, found.events = list(_groups_of(ranks)), list(ranks.trace.kept())
            finally:
                finish_views(views)
        found.notes = list(changes)
        return found

    def _are_complete(self, loops: Mapping[int, LoopRecord], nproc: int) -> bool:
        return len(loops) == nproc and all(
            len(loop.steps) == self.steps and (loop.steps[-1].updates or not loop.initial) for loop in loops.values()
        )


def verify(program: Any, *given: Any, **options: Any) -> Report:
    """Prove that a parallel program computes on its ranks what it computes on one device.

    >>> from torch import nn
    >>> report = verify(lambda: nn.Linear(4, 2), (torch.randn(3, 4),), "dp=2", parallelize=lambda model, mesh: model)
    >>> report.ok
    True

    The type of `program` selects the form of proof, and its docstring has the arguments:

    - a function that makes a model: `verify_plan(model_fn, inputs, mesh_shape, plan, ...)`;
    - the same, with `step=`: `verify_step(step, model_fn, batch, mesh_shape, ...)`;
    - a `hyper_parallel.trainer.Config`, or the path of its TOML file: the first steps of that run. Give the number of
      ranks, as for `hyper-parallel verify`;
    - the path of a script: its first steps. Give the number of ranks, as for `python -m sim verify`, and options of the
      same names: `reference="one_device.py --batch 4"`, `arguments=["--batch", "4"]`, `steps=2`, `mesh="dp=2"`,
      `names={"<on the ranks>": "<on one device>"}`, `machine=`, `seed=`, `map_device="cuda"`, `own=`.

    Args:
            program: model function, Config, TOML path or script path.
            given: other positional arguments of its form.
            options: keyword arguments of its form.

    Returns:
            The rows that were compared and the first wrong one; print it, or call `raise_if_bug()`.

    Raises:
            TypeError: the program is of no such type. Each form raises its own errors besides.
    """
    if isinstance(program, (str, os.PathLike)) and os.fspath(program).endswith(".toml"):
        from hyper_parallel.trainer.config import load_config

        program = load_config(os.fspath(program))
    elif isinstance(program, (str, os.PathLike)):
        return _verify_file(os.fspath(program), *given, **options)
    trainer = sys.modules.get("hyper_parallel.trainer.config")  # a Config exists only if its module is imported
    if trainer is not None and isinstance(program, trainer.Config):
        from sim.prove.training import verify_run

        return verify_run(program, *given, **options)
    if not callable(program):
        blame = f"it is a {type(program).__name__}, and no program"
        hint = "a function that makes a model, a script's path, or a Config"
        raise InvalidType("cannot verify a program", blame, f"program: {program!r:.80}", hint)
    step = options.pop("step", None)
    return verify_plan(program, *given, **options) if step is None else verify_step(step, program, *given, **options)


def _verify_file(
    script: str,
    nproc: int,
    *,
    reference: str | None = None,
    arguments: Sequence[str] = (),
    mesh: str | None = None,
    machine: str | None = None,
    steps: int = 2,
    names: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    read_int(f"cannot verify {script}", "nproc", nproc, 1)
    read_int(f"cannot verify {script}", "steps", steps, 1)
    usual: dict[str, Any] = {"seed": 0, "map_device": None, "env": (), "own": "", "show": "0", "module": False}
    launch = launch_of(_COMMAND, script, arguments, nproc=nproc, hardware=machine, **{**usual, **options})
    one, axes = _reference(launch, reference), None if mesh is None else _mesh(launch, mesh)
    return verify_script(launch, one, steps, axes, names)


def verify_script(
    launch: Launch,
    reference: Launch,
    steps: int = 2,
    mesh: Layout | None = None,
    names: Mapping[str, Any] | None = None,
) -> Report:
    """Compare the first steps of a script on its ranks with those of its one-device form.

    Both run in float64, even where they name a smaller dtype. If that fails, both run in their own dtypes.

    Args:
            launch: the script and its number of ranks.
            reference: the one-device form.
            steps: number of optimizer steps, after which both end.
            mesh: axes of the ranks; None: guessed from the groups that the script makes.
            names: parameter names on the ranks -> names on one device; None: the same names.

    Raises:
            ValueError: a file cannot be read, or trains nothing.
            SimError: a rank has failed, or the one device.
    """
    asked, sources = f"cannot verify {launch.script}", [read_script(each) for each in (launch, reference)]
    if sources[0] is None or sources[1] is None:
        raise InvalidValue(asked, "a file cannot be read", "the error output has the reason", "a Python file's path")
    loop = _ScriptLoop(
        asked=asked,
        world_size=launch.nproc,
        dtype=torch.float64,
        names=names or {},
        machine=launch.hardware,
        launch=launch,
        source=sources[0],
        reference=reference,
        reference_source=sources[1],
        steps=steps,
        mesh=mesh,
    )
    try:
        return _prove(loop)
    except SimError as error:
        if isinstance(error, InFlightBufferRace) or not _OF_DTYPES.search(str(error)):
            raise
        said = str(error.__cause__ or error).splitlines()[0]
    report = _prove(replace(loop, dtype=torch.get_default_dtype()))
    return replace(report, notes=(*report.notes, f"in the script's own dtypes, as in float64: {said}"))


class _ReferenceFailed(SimError):
    """Failure of the one-device reference, not of a rank."""


def _prove(loop: _ScriptLoop) -> Report:
    try:
        references = loop.references()
    except SimError as error:
        raise _ReferenceFailed(str(error)) from error
    if not any(step.updates for step in references[0].steps):
        raise InvalidValue(*_no_steps(loop.reference.script, "one device has made no step"))
    return loop.proved(references)


def _failed(launch: Launch, reference: Launch, error: BaseException) -> int:
    if not isinstance(error, _ReferenceFailed):
        return report_failure(error, launch.nproc, launch.map_device, launch.replay())
    report_failure(error.__cause__ or error, 1, launch.map_device, reference.replay())
    itself = reference.script == launch.script
    who = f"{launch.script} as its only rank" if itself else f"the reference {reference.script}"
    hint = "--reference FILE, one that trains the same on one device" if itself else f"python {reference.script}"
    blame = f"{who} has failed on one device"
    print(f"error: {explain(f'cannot verify {launch.script}', blame, 'above', hint)}", file=sys.stderr)
    return USER_ERROR


def _no_steps(script: str, who: str) -> tuple[str, str, str, str]:
    blame = f"{who} in {script} when it ended"
    seen = "a step is a call of torch.optim.Optimizer.step, or a change of weights after backward and before a forward"
    return (f"cannot verify {script}", blame, seen, "a script that trains")


def _groups_of(ranks: World) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the axis and members of each process group, unused ones included."""
    for context in ranks.contexts:
        for group in context.c10d.pg_map:
            members = tuple(sorted(context.c10d.pg_group_ranks.get(group, ())))
            if members:
                yield context.axis_of(group.group_name, group.group_desc, members), members


def _told_by_values(loop: LoopRecord, expected: LoopRecord) -> LoopRecord:
    """Rename the outermost modules of a rank to the one device's names, matched by parameter values."""
    roots: dict[str, dict[str, torch.Tensor]] = {root: {} for root in loop.roots}
    for name, tensor in loop.initial.items():
        root = loop.root_of(name)
        roots.setdefault(root, {})[name[len(root) :].lstrip(".")] = tensor
    return loop.renamed(roots_by_value(roots, expected.initial))


def _grows(expected: LoopRecord, loops: Sequence[LoopRecord]) -> bool:
    """Return True if each rank takes as many rows as one device, and different ones."""
    first = [next(iter(loop.steps[0].calls.values()), [None])[0] for loop in (expected, *loops) if loop.steps]
    tensors = [tensor for tensor in first if tensor is not None]
    return (
        len(tensors) == len(loops) + 1
        and len({tensor.shape for tensor in tensors}) == 1
        and not all(torch.equal(tensors[0], tensor) for tensor in tensors)
    )


def _of_one_value(expected: LoopRecord) -> list[str]:
    """Return a note on inputs that had one value in all steps, e.g. a mask of ones, behind which a fault may hide."""
    found = []
    for path, side, way in expected.steps[0].calls:
        if side == "input" and path in expected.roots:
            values = [value for step in expected.steps for value in step.calls.get((path, side, way), [])]
            if is_constant(torch.cat([value.flatten() for value in values])):
                found.append(f"{way} of {path}" if path else way)
    return [f"a fault may hide behind input {listed(found)}: of one value"] if found else []


def _with_hint(row: Any, hint: str) -> Any:
    name = f"{row.module}.{row.tensor}" if row.module else row.tensor
    return replace(row, suggestion=hint.format(name)) if row.suggestion.startswith("names=") else row


def _listed(loop: LoopRecord) -> str:
    some = [f"{name} {tuple(tensor.shape)}" for name, tensor in loop.initial.items()]
    return ", ".join(some[:_MOST_SHOWN]) + (f" and {len(some) - _MOST_SHOWN} more" if len(some) > _MOST_SHOWN else "")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def mesh_of_groups(size: int, groups: Iterable[tuple[str, tuple[int, ...]]]) -> Layout | None:
    """Return the mesh with the fewest axes on which each group spans one or more axes; None if there is none.

    >>> mesh_of_groups(4, [("dp", (0, 2)), ("dp", (1, 3)), ("1: ranks 2-3", (2, 3))])
    Layout((2, 2), ('dp', 'axis1'))
    >>> mesh_of_groups(4, [("", (0, 1)), ("", (1, 2))]) is None
    True

    Args:
            size: number of ranks.
            groups: name and ranks of each group.
    """
    called: dict[frozenset[int], str] = {}
    for name, ranks in groups:
        known = called.setdefault(frozenset(ranks), "")
        called[frozenset(ranks)] = known or (name if name.isidentifier() and name != "world" else "")
    wanted = {ranks for ranks in called if 1 < len(ranks) < size}
    for shape in sorted(_factors(size), key=len):
        found = {axes: set(map(frozenset, mesh_lines(shape, axes).tolist())) for axes in _choices(len(shape))}
        if not wanted <= set().union(*found.values()):
            continue
        names: list[str] = []
        for axis in range(len(shape)):
            name = next((called[line] for line in found[axis,] if called.get(line)), "")
            fallback = "ranks" if len(shape) == 1 else f"axis{axis}"
            names.append(fallback if not name or name in names else name)
        return Layout(shape, tuple(names))
    return None


def _factors(size: int) -> Iterator[tuple[int, ...]]:
    """Yield the ordered factorizations of a number.

    >>> list(_factors(4))
    [(4,), (2, 2)]
    """
    yield (size,)
    for first in range(2, size // 2 + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in _factors(size // first))


def _choices(count: int) -> list[tuple[int, ...]]:
    return [axes for length in range(1, count + 1) for axes in itertools.combinations(range(count), length)]
