"""`python -m sim estimate --nproc 1024 --hardware h100-sxm script.py`: memory and time of a torchrun script's steps.

The unmodified script runs as one rank of the world, or as several, on tensors without data. What it does between two
updates of its optimizer is recorded, priced and replayed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from hyper_parallel.cli.kit import DOES_NOT_FIT, check_can_draw, check_can_write
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.machine.calibration import load_calibration
from hyper_parallel.core.machine.description import Machine, find_machine
from sim.comm.trace import Event
from sim.explain.failure import report_failure
from sim.kernel.context import current_rank
from sim.mesh.cost import Pricing
from sim.mesh.estimate import MemoryEstimate, TimeEstimate, memory_of, time_of
from sim.mesh.program import Op, Program
from sim.mesh.replay.timeline import Timeline, replay_time
from sim.mesh.report import compute_note, memory_dict, memory_notes, memory_table, percent, terms_dict, time_table
from sim.mesh.spec import failed_in, module_title
from sim.mesh.tracing.lone import MAX_LONE_RANKS, FewRanksWorld
from sim.script.arguments import new_parser
from sim.script.launch import (
    ScriptSource,
    execute_script,
    finish_views,
    prepare_views,
    read_script,
    script_folder_first,
)
from sim.script.options import Launch, launch_of
from sim.script.recording import EnoughSteps, NeedsRank, ScriptRecorder, StandIn, recorders_in_place
from sim.world import WorldOptions

FAILURE, USER_ERROR = 1, 2
_COMMAND = "python -m sim estimate"
_WIDTH = 120
_MOST_RANKS = 64  # that are run together because they send messages to each other
_MOST_LINES = 12  # of the script that are shown


@dataclass(frozen=True)
class ScriptEstimate:
    """What a step of a script needs.

    Attributes:
        title: what was estimated.
        hardware: that it runs on.
        world_size: ranks in all.
        steps: that were recorded.
        memory: of the ranks that were run.
        time: of a step.
        timeline: of the recorded steps.
        programs: what the ranks do in them.
        stand_ins: lines of the script that ask for values which depend on data.
        changes: lines of the script that are run otherwise than it says, and how.
        unpriced: operations that are priced by the bytes that they move, because nothing else is known of them.
    """

    title: str
    hardware: Machine
    world_size: int
    steps: int
    memory: MemoryEstimate
    time: TimeEstimate
    timeline: Timeline
    programs: list[Program] = field(repr=False)
    stand_ins: tuple[StandIn, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    unpriced: tuple[str, ...] = ()

    def view(self) -> Group:
        """Return its tables, to be printed by rich."""
        notes = [compute_note(self), f"{percent(self.time.mfu.value)} of the device's peak"]
        if self.unpriced:
            notes.append(f"priced by the bytes they move, as nothing else is known of them: {', '.join(self.unpriced)}")
        ranks = ", ".join(str(program.rank) for program in self.programs)
        return Group(
            Text(f"{self.title}\n{self.steps} step{'s' * (self.steps > 1)} recorded, rank {ranks}"),
            Text(),
            Text("Memory of a rank, where it is fullest", style="bold"),
            memory_table(self),
            Text("\n".join(memory_notes(self))),
            Text(),
            Text("Time of a step", style="bold"),
            time_table(self),
            Text("\n".join(notes)),
            *self._values_view(),
            *self._changes_view(),
        )

    def _values_view(self) -> list[Text]:
        if not self.stand_ins:
            return []
        lines = [
            f"  {each.line}: {each.asked}, was given {each.given}"
            + (f" ({each.count} times)" if each.count > 1 else "")
            for each in self.stand_ins[:_MOST_LINES]
        ]
        left = len(self.stand_ins) - len(lines)
        lines += [f"  and {left} more"] if left else []
        heading = "Values that depend on data, at which the host waits for the device"
        return [Text(), Text(heading, style="bold"), Text("\n".join(lines))]

    def _changes_view(self) -> list[Text]:
        if not self.changes:
            return []
        lines = [f"  {line}: {what}" for line, what in self.changes]
        return [Text(), Text("Run otherwise than the script says", style="bold"), Text("\n".join(lines))]

    def to_dict(self) -> dict[str, Any]:
        """Return it as data for JSON: bytes, seconds, and intervals."""
        return {
            "title": self.title,
            "hardware": self.hardware.name,
            "world_size": self.world_size,
            "ranks": [program.rank for program in self.programs],
            "steps": self.steps,
            "memory": memory_dict(self.memory),
            "time": terms_dict(self) | {"of_peak": self.time.mfu.value},
            "stand_ins": [vars(each) for each in self.stand_ins],
            "changes": [list(each) for each in self.changes],
            "priced_by_bytes": list(self.unpriced),
        }


@dataclass(frozen=True)
class RecordedScript:
    """What ranks of a script do in its steps.

    Attributes:
        recorders: of the ranks that were run, by rank.
        events: of their communication in the recorded steps, by rank.
    """

    recorders: dict[int, ScriptRecorder]
    events: dict[int, list[Event]]

    @property
    def programs(self) -> list[Program]:
        """What the ranks do."""
        return [each.program for each in self.recorders.values() if each.program is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimate a script as the command line of `python -m sim estimate` says; return the exit code.

    0: here is the estimate. 1: the script has failed, or makes no steps. 2: a mistake in what was asked. 3: it does
    not fit into memory. 130: Ctrl-C.
    """
    asked = vars(_parser().parse_args(arguments))
    own = {name: asked.pop(name) for name in ("hardware", "ranks", "warmup", "steps", "json", "trace", "plot")}
    try:
        hardware = find_machine(own["hardware"])
        asked["map_device"] = asked["map_device"] or _device_of(hardware)
        launch = launch_of(f"{_COMMAND} --hardware {shlex.quote(own['hardware'])}", most=MAX_LONE_RANKS, **asked)
        ranks = _ranks(own["ranks"], launch.nproc)
        _check_steps(own["warmup"], own["steps"])
        check_can_write(None if own["trace"] is None else Path(own["trace"]))
        check_can_draw(None if own["plot"] is None else Path(own["plot"]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    source = read_script(launch)
    if source is None:
        return FAILURE
    try:
        recorded = record_script(launch, source, hardware, ranks, own["warmup"], own["steps"])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILURE
    if isinstance(recorded, int):
        return recorded
    found = estimate_script(recorded, launch, hardware, own["steps"])
    if own["json"]:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        console = Console(highlight=False, emoji=False)
        console.width = max(console.width, _WIDTH)
        console.print(found.view())
    if own["trace"]:
        found.timeline.to_chrome(own["trace"])
    if own["plot"]:
        found.timeline.plot(own["plot"])
    return 0 if found.memory.fits() else DOES_NOT_FIT


def _parser() -> argparse.ArgumentParser:
    about = "Estimate memory and time of an unmodified torchrun script's steps, on any number of devices."
    parser = new_parser(_COMMAND, about, "--nproc 1024 --hardware h100-sxm train.py --batch 4")
    group = parser.add_argument_group("what is estimated")
    group.add_argument("--hardware", required=True, help="a name, such as h100-sxm, or the path of a TOML file")
    group.add_argument("--ranks", default="0", help="ranks to run: 0 (default), 0,3 or all")
    group.add_argument("--warmup", type=int, default=1, help="steps of the optimizer that are left out (1)")
    group.add_argument("--steps", type=int, default=2, help="steps of the optimizer to record after them (2)")
    group.add_argument("--json", action="store_true", help="print the estimate as JSON")
    group.add_argument("--trace", metavar="FILE", help="write the timeline for https://ui.perfetto.dev")
    group.add_argument("--plot", metavar="FILE", help="draw the timeline (needs matplotlib)")
    return parser


def _device_of(hardware: Machine) -> str | None:
    """The device that scripts for a hardware name."""
    return {"nccl": "cuda", "hccl": "npu"}.get(hardware.backend)


def _ranks(asked: str, nproc: int) -> tuple[int, ...]:
    if asked == "all":
        return tuple(range(nproc))
    parts = [part.strip() for part in asked.split(",")]
    if all(part.isdecimal() and int(part) < nproc for part in parts):
        return tuple(sorted({int(part) for part in parts}))
    seen, hint = f"--ranks: {asked}", "--ranks 0, --ranks 0,3 or --ranks all"
    raise InvalidValue("cannot choose the ranks to run", f"ranks go from 0 to {nproc - 1}", seen, hint)


def _check_steps(warmup: int, steps: int) -> None:
    if warmup < 0 or steps < 1:
        blame = "it takes one step or more, after none or more"
        seen = f"--warmup {warmup} --steps {steps}"
        raise InvalidValue("cannot record the steps of a script", blame, seen, "--warmup 1 --steps 2")


# -- running -------------------------------------------------------------------------------------------------------


def record_script(
    launch: Launch, source: ScriptSource, hardware: Machine, ranks: Sequence[int], warmup: int, steps: int
) -> RecordedScript | int:
    """Run a script on some ranks of its world, and return what they do; or the exit code of one that failed.

    Raises:
        ValueError: it has made too few steps.
    """
    chosen = set(ranks)
    while True:
        outcome = _run(launch, source, hardware, sorted(chosen), warmup, steps)
        if not isinstance(outcome, set):
            break
        chosen |= outcome
    if isinstance(outcome, int):
        return outcome
    for recorder in outcome.recorders.values():
        if recorder.program is None:
            raise InvalidValue(*_too_few(launch, recorder))
        recorder.program.like = max(1, launch.nproc // len(outcome.recorders))
    return outcome


def _run(
    launch: Launch, source: ScriptSource, hardware: Machine, ranks: Sequence[int], warmup: int, steps: int
) -> RecordedScript | int | set[int]:
    """Run the script as some ranks of its world.

    Returns:
        What they do; the exit code of a script that has failed; or the ranks that have to be run, too, as one of these
        sends to them or receives from them.
    """
    on_accelerator = hardware.family != "cpu"
    recorders = {rank: ScriptRecorder(rank, warmup, steps, on_accelerator=on_accelerator) for rank in ranks}
    for recorder in recorders.values():
        recorder.machine = hardware
    options = WorldOptions(
        seed=launch.seed,
        init=False,
        map_device=launch.map_device,
        own=launch.own,
        keep_events=None,
        check_identity=False,
    )
    world = FewRanksWorld(launch.nproc, recorders, options)
    world.replay = launch.replay()
    _place_on_node(world, hardware)
    needed: set[int] = set()

    def needs(rank: int) -> None:
        if rank not in recorders and len(recorders) < _MOST_RANKS:
            needed.add(rank)
            raise NeedsRank(rank)

    for rank, recorder in recorders.items():
        recorder.needs = needs
        recorder.count_events = partial(world.trace.count, rank)
    with warnings.catch_warnings(), script_folder_first(source.folder):
        views = prepare_views(world, launch, source)
        try:
            with world, recorders_in_place(recorders, launch.map_device):
                world.run(_execute, (recorders, source))
                events = {rank: world.trace.of_rank(rank)[slice(*each.traced)] for rank, each in recorders.items()}
        except BaseException as error:
            if needed:
                return needed
            finish_views(views)
            return report_failure(error, launch.nproc, launch.map_device, launch.replay(), _where(error, launch))
        finish_views(views)
    return RecordedScript(recorders, events)


def _where(error: BaseException, launch: Launch) -> str:
    """Name the module and torch's operation that have failed, and say how to tell whose mistake it is."""
    cause = error.__cause__ or error
    modules, operation = failed_in(cause)
    if not operation or "\n  try: " in str(cause):
        return ""
    who = f", in {module_title(modules[-1], modules[0])}" if modules else ""
    command = shlex.join(["python", "-m", "sim", "run", launch.script, *launch.arguments])
    hint = f"{command}, with real values; if it fails as well, other sizes or another dtype"
    return f"  operation: {operation}{who}\n  try: {hint}\n"


def _place_on_node(world: FewRanksWorld, hardware: Machine) -> None:
    """Let a rank know its number on its node."""
    each = min(hardware.devices_per_node, world.world_size)
    for context in world.contexts:
        node, number = divmod(context.rank, each)
        local = {"LOCAL_RANK": number, "LOCAL_WORLD_SIZE": each, "GROUP_RANK": node}
        local["GROUP_WORLD_SIZE"] = -(-world.world_size // each)
        context.environment.update({os.fsencode(k): os.fsencode(str(v)) for k, v in local.items()})


def _execute(recorders: dict[int, ScriptRecorder], source: ScriptSource) -> None:
    rank = current_rank()
    assert rank is not None, "ranks execute scripts"
    with recorders[rank].modes(), suppress(EnoughSteps):
        execute_script(source.code, source.package)


def _too_few(launch: Launch, recorder: ScriptRecorder) -> tuple[str, str, str, str]:
    wanted = recorder.warmup + recorder.steps
    made = "no step of an optimizer" if not recorder.done else f"{recorder.done} of {wanted} steps of an optimizer"
    blame = f"rank {recorder.rank} has made {made} when it ended"
    seen = f"--warmup {recorder.warmup} --steps {recorder.steps}; a step is a call of torch.optim.Optimizer.step"
    fewer = recorder.done - recorder.warmup
    hint = f"--warmup {recorder.warmup} --steps {fewer}" if fewer > 0 else "a script that trains for longer"
    return (f"cannot estimate a step of {launch.script}", blame, seen, hint)


# -- pricing -------------------------------------------------------------------------------------------------------


def estimate_script(recorded: RecordedScript, launch: Launch, hardware: Machine, steps: int) -> ScriptEstimate:
    """Price and replay what a script does."""
    programs = recorded.programs
    figures = load_calibration()
    general = figures.of(hardware, "estimate", hardware.family)
    memory = memory_of(programs, hardware, general)
    timeline = replay_time(programs, Pricing(hardware, figures, posts_early=True))
    at_peak = max(_seconds_at_peak(program, hardware) for program in programs) / steps
    time = time_of(timeline, launch.nproc, hardware, general, at_peak, 0.0, steps)
    title = f"{os.path.basename(launch.script)} on {launch.nproc:,} x {hardware.title}"
    timeline.memory, timeline.title = memory.classes, title
    counts: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for recorder in recorded.recorders.values():
        for key, count in recorder.stand_ins.items():
            counts[key] += count
    return ScriptEstimate(
        title=title,
        hardware=hardware,
        world_size=launch.nproc,
        steps=steps,
        memory=memory,
        time=time,
        timeline=timeline,
        programs=programs,
        stand_ins=tuple(StandIn(*key, count) for key, count in counts.items()),
        changes=tuple(dict.fromkeys(each for one in recorded.recorders.values() for each in one.changes)),
        unpriced=tuple(sorted(set().union(*[each.unpriced for each in recorded.recorders.values()]))),
    )


def _seconds_at_peak(program: Program, hardware: Machine) -> float:
    flops: defaultdict[str, int] = defaultdict(int)
    for segment, _ in program.segments_in_order():
        for event in segment.events:
            if isinstance(event, Op) and event.flops:
                flops[event.dtype] += event.flops
    return sum(count / hardware.peak(dtype) for dtype, count in flops.items())
