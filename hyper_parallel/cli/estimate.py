"""The commands `estimate` and `search`: a training step on a mesh that nobody has."""

from __future__ import annotations

import json
import re
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyper_parallel import __version__
from hyper_parallel.cli import kit
from hyper_parallel.cli.kit import mistakes_as_messages, option
from hyper_parallel.cli.options import Given, with_options
from hyper_parallel.cli.run import BUT_MODEL, RunWords, StartFrom, devices_of, file_of, read_run
from hyper_parallel.core.common.errors import InvalidValue

if TYPE_CHECKING:
    from hyper_parallel.trainer.config import Config

GIB = 2**30
_OTHER, _OUT = "What is no part of a run", "What comes out"

# What `estimate` and `search` have in common beside fields of dataclasses
Routing = Annotated[
    float | None,
    option("Skew of the loads of experts: expert i gets 1 / i ** so many; default: the same.", panel=_OTHER, min=0),
]
Model = Annotated[
    str | None, option("llama or moe; a name such as llama3-8b; module:function, or file.py:function, of your own.")
]
Json = Annotated[str | None, option("Write everything as JSON to this file; -: to the terminal.", "--json", panel=_OUT)]


@with_options(*BUT_MODEL)
def estimate(
    given: Given,
    words: RunWords = None,
    devices: Annotated[int | None, option("Devices in all; default: as many as the degrees need.")] = None,
    model: Model = None,
    start_from: StartFrom = None,
    routing: Routing = None,
    budget: Annotated[
        float | None,
        option(
            "GiB of a device: estimate the fastest checkpointing that needs no more, and say which it is.", panel=_OTHER
        ),
    ] = None,
    in_words: Annotated[bool, option("Say it in words, too, and what to change.", "--explain", panel=_OUT)] = False,
    tries: Annotated[int, option("How many of these changes to estimate.", "--try", panel=_OUT, min=0)] = 0,
    plot: Annotated[Path | None, option("PNG file: the timeline and the memory of a step.", panel=_OUT)] = None,
    trace: Annotated[Path | None, option("JSON file for ui.perfetto.dev: the timeline.", panel=_OUT)] = None,
    compare: Annotated[
        Path | None, option("Trace of torch.profiler, as of train --profile-steps, to put beside.", panel=_OUT)
    ] = None,
    json_file: Json = None,
) -> None:
    """Say whether a step of a run fits into memory, how long it takes, and where the time goes. No device is needed.

    The file and the options of the run are those of train:
    hyper-parallel estimate run.toml --hardware h100-sxm --devices 64 --tp 8

    The exit code is 3 if it does not fit.
    """
    with mistakes_as_messages():
        _, run, spec, hardware = _read(words, given, model, start_from)
        from sim.mesh.estimate import estimate_job
        from sim.mesh.job import Job
        from sim.mesh.recipe import Routing
        from sim.mesh.searching.budget import NoPolicyFits, fit_job

        kit.check_can_draw(plot)
        _check_files(trace, json_file)
        if budget is not None and "checkpointing" in given["parallel"]:
            blame, seen = "a budget chooses the checkpointing", f"--checkpointing {given['parallel']['checkpointing']}"
            raise InvalidValue(f"cannot use --budget {budget:g}", blame, seen, "one of both options")
        job = Job.of_run(
            run, devices_of(run, devices), model=spec, routing=None if routing is None else Routing.zipf(routing)
        )
        with kit.busy(f"estimating {job.model.name} on {job.dims.world_size:,} devices"):
            try:
                found = estimate_job(job, hardware) if budget is None else fit_job(job, hardware, budget * GIB)
            except NoPolicyFits as error:
                kit.say_error(str(error))
                raise typer.Exit(kit.DOES_NOT_FIT) from None
        _show_estimate(found, tries if in_words or tries else None, plot, trace, compare, json_file)
        if budget is not None and json_file != "-":
            kit.print_wide(f'\nthe fastest within {budget:g} GiB: --checkpointing "{found.recipe.activations}"')
    if not found.memory.fits():
        raise typer.Exit(kit.DOES_NOT_FIT)


def _hardware(named: str | None) -> str:
    """Return the hardware that the run names."""
    if named is None:
        asked, blame, seen = "cannot estimate a step", "nothing says on which hardware", "train.hardware: None"
        raise InvalidValue(asked, blame, seen, "--hardware with a name that `hyper-parallel hardware` lists")
    return named


def _read(
    words: list[str] | None, given: Given, model: str | None, start_from: str | None
) -> tuple[Path | None, Config, Any, str]:
    """Return the file of the run that was asked for, the run, its model if the trainer does not know it, and on what.

    Raises:
        ValueError: as `file_of`, `read_run` and `find_model`; no hardware, which is said before anything is imported.
    """
    file = file_of(words, given)
    if file is None:
        _hardware(given["train"].get("hardware"))
    from hyper_parallel.models.llama import LlamaConfig
    from hyper_parallel.models.moe import MoEConfig
    from hyper_parallel.trainer.config import MODELS
    from sim.mesh.models import find_model

    if model in MODELS:
        given["train"]["model"] = model
    spec = None if model in (None, *MODELS) else find_model(_model(str(model)))
    is_trained = spec is not None and type(spec.config) in (LlamaConfig, MoEConfig)
    changes = [*given["model"], *given["experts"]]
    if spec is not None and not is_trained and changes:
        blame, seen = "it has a shape of its own, which they are no part of", f"given: {', '.join(changes)}"
        raise InvalidValue(f"cannot estimate {model} with options of [model]", blame, seen, "leave them out")
    run = read_run(file, given, start_from, shape=spec.config if spec is not None and is_trained else None)
    return file, run, None if is_trained else spec, _hardware(run.train.hardware)


def _show_estimate(
    found: Any, tries: int | None, plot: Path | None, trace: Path | None, compare: Path | None, json_file: str | None
) -> None:
    """Print and write an estimate, in words as well unless `tries` is None, see `estimate`."""
    from sim.mesh.estimate import estimate as estimate_step
    from sim.mesh.explain import explain as in_prose
    from sim.mesh.pricing.profiled import predicted_step, rank_of_trace, read_trace
    from sim.mesh.report import comparison_dict, comparison_view, estimate_dict, estimate_view

    content = estimate_dict(found)
    measured = None if compare is None else read_trace(compare)
    if json_file != "-":
        kit.print_wide(estimate_view(found))
        if tries is not None:
            with kit.busy("estimating what could be changed"):
                said = in_prose(found, tries, estimate_step)
            kit.print_wide("\n" + said.partition("\n\n")[2])  # without the headline, which is there already
    for path in (plot, trace):
        if path is not None:
            (found.timeline.plot if path is plot else found.timeline.to_chrome)(path)
            _say_written(path, json_file)
    if compare is not None and measured is not None:
        predicted = predicted_step(found, rank_of_trace(compare))
        content["compared"] = comparison_dict(predicted, measured)
        if json_file != "-":
            kit.stdout_console().print()
            kit.print_wide(comparison_view(predicted, measured))
    _write_json(content, json_file)


@with_options(*BUT_MODEL)
def search(
    given: Given,
    devices: Annotated[int, option("Devices in all.", min=1)],
    words: RunWords = None,
    model: Model = None,
    start_from: StartFrom = None,
    memory_limit: Annotated[float | None, option("GiB of a device; default: what the hardware has.")] = None,
    limit: Annotated[int, option("Most candidates to estimate, before chunks of the best.", min=1)] = 24,
    routing: Routing = None,
    rows: Annotated[int, option("Rows of the ranking to print.", panel=_OUT, min=1)] = 10,
    write: Annotated[Path | None, option("TOML file: the best run, for train.", panel=_OUT)] = None,
    json_file: Json = None,
) -> None:
    """Rank the ways to train a run on a number of devices; what its file or an option says stays as it is.

    hyper-parallel search run.toml --hardware h100-sxm --devices 64 --write best.toml

    Ctrl-C or SIGTERM ends it: what it has found so far is printed. The exit code is 3 if nothing fits.
    """
    with mistakes_as_messages():
        config, run, spec, hardware = _read(words, given, model, start_from)
        from hyper_parallel.core.mesh.parallel_dims import DEGREES
        from hyper_parallel.trainer.preflight import plan_run
        from sim.mesh.models import find_model
        from sim.mesh.recipe import Recipe, Routing
        from sim.mesh.searching.explore import NothingFits
        from sim.mesh.searching.ranking import SearchBar, search_dict, search_view
        from sim.mesh.searching.search import search as search_ways

        _check_files(write, json_file)
        if spec is not None and write is not None:
            blame = "the trainer does not know the model, so that train cannot run what is written"
            raise InvalidValue(f"cannot write {write}", blame, f"--model {model}", "leave out --write")
        stays = _said(config, given)
        found_model = find_model(run.shape()) if spec is None else spec
        degrees = {name: getattr(run.parallel, name) for name in stays.intersection(DEGREES)}
        sequences, length = run.batch_shape
        chunks: dict[str, Any] = {"tp_chunks": ()} if "tp_chunks" in stays else {}

        def accepts(one: Any) -> None:
            plan_run(arranged_run(run, one), devices)

        try:
            with SearchBar(kit.stderr_console()) as bar, kit.sigterm_as_ctrl_c():
                result = search_ways(
                    found_model,
                    hardware,
                    devices,
                    sequences,
                    None if memory_limit is None else memory_limit * GIB,
                    seq_len=length,
                    recipes=_recipes(Recipe.of(run, None if routing is None else Routing.zipf(routing)), stays),
                    fixed={name: size for name, size in degrees.items() if size not in (None, -1)},
                    limit=limit,
                    progress=bar.on_estimate,
                    layers_per_stage=run.parallel.stage_sizes(),
                    accumulate=run.micro_batches if "accumulate" in stays else None,
                    **chunks,
                    accepts=accepts if spec is None else None,
                )
        except NothingFits as error:
            kit.say_error(str(error))
            raise typer.Exit(kit.DOES_NOT_FIT) from None
        if json_file != "-":
            kit.print_wide(search_view(result, rows))
        if write is not None:
            from hyper_parallel.trainer.config import RUN, changed_text

            text = changed_text(None if config is None else RUN.read(config), arranged_run(run, result.best.candidate))
            write.write_text(_provenance(result.best.estimate) + _PROVENANCE.sub("", text), encoding="utf-8")
            _say_written(write, json_file)
        _write_json(search_dict(result), json_file)
    if not result.complete:
        raise typer.Exit(kit.INTERRUPTED)


def _provenance(best: Any) -> str:
    """Return comments for the file of the best run of a search: where it is from, and what was predicted."""
    from sim.mesh.report import gib, interval, seconds

    step, memory = best.time.step, best.memory.interval
    return (
        f"# found by: {shlex.join(['hyper-parallel', *sys.argv[1:]])}\n"
        f"# on: {best.dims.world_size} x {best.hardware.title}; hyper_parallel {__version__}, {date.today()}\n"
        f"# predicted, with 80 % intervals: {seconds(step.value)} a step ({interval(step)}), {gib(memory.value)} "
        f"reserved on a device ({interval(memory, gib)})\n"
    )


def arranged_run(run: Config, candidate: Any) -> Config:
    """Return the run that a candidate of its search stands for."""
    from sim.mesh.job import Job
    from sim.mesh.models import find_model

    where = candidate.dims, candidate.batch, run.batch_shape[1]
    return Job(find_model(run.shape()), *where, candidate.recipe, candidate.layers_per_stage).recipe


_PROVENANCE = re.compile(r"^# found by: .*\n# on: .*\n# predicted, .*\n", re.MULTILINE)


def _said(file: Path | None, given: Given) -> set[str]:
    """Return the keys of [parallel], and accumulate, that the file or an option says."""
    from hyper_parallel.trainer.config import RUN

    table = {} if file is None else RUN.read(file).table()
    parallel, train = ({**table.get(section, {}), **given[section]} for section in ("parallel", "train"))
    return {*parallel, *({"accumulate"} & train.keys())}


def _recipes(recipe: Any, stays: set[str]) -> list[Any]:
    """Return the recipes to try: what nothing says of checkpointing, ZeRO and reductions."""
    from sim.mesh.searching.space import CHECKPOINTINGS

    if "schedule" in stays and recipe.parallel.pipeline.name == "1f1b":  # which has one stage on each rank
        recipe = recipe.having(stages_per_rank=1)
    levels = [None] if "checkpointing" in stays else CHECKPOINTINGS
    stages = [recipe.zero] if "reshard_after_forward" in stays else [3, 2]
    reductions = [None] if "reduce_each" in stays else [False, True]
    return [recipe.with_savings(level, stage, each) for level in levels for stage in stages for each in reductions]


def _model(name: str) -> Any:
    """Return the name of a known model, or what a function of the user's returns."""
    from hyper_parallel.cli.subject import named_object

    if ":" not in name:
        return name
    made = named_object("--model", name)()
    if isinstance(made, type) or callable(getattr(made, "parameters", None)):
        blame = f"it returned a {type(made).__name__}, and an estimate makes the model itself, without data"
        hint = "return sim.mesh.Custom(...), a LlamaConfig or a MoEConfig"
        raise InvalidValue(f"cannot use --model {name}", blame, f"returned: {type(made).__name__}", hint)
    return made


def _check_files(path: Path | None, json_file: str | None) -> None:
    """Refuse what cannot be written, and make the folders of what can."""
    kit.check_can_write(path)
    kit.check_can_write(None if json_file in (None, "-") else Path(str(json_file)))


def _write_json(content: dict[str, Any], where: str | None) -> None:
    if where is None:
        return
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    if where == "-":
        kit.stdout_console().file.write(text)
        return
    Path(where).write_text(text, encoding="utf-8")
    _say_written(Path(where), where)


def _say_written(path: Path, json_file: str | None) -> None:
    (kit.stderr_console() if json_file == "-" else kit.stdout_console()).print(f"wrote {path}")
