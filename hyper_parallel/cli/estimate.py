"""The commands `estimate` and `search`: a training step on a mesh that nobody has."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyper_parallel import __version__
from hyper_parallel.cli.kit import (
    DOES_NOT_FIT,
    INTERRUPTED,
    busy,
    check_can_draw,
    check_can_write,
    mistakes_as_messages,
    print_wide,
    say_error,
    sigterm_as_ctrl_c,
    stderr_console,
    stdout_console,
)
from hyper_parallel.cli.options import Given, with_options
from hyper_parallel.cli.run import RUN_OPTIONS, RunWords, StartFrom, devices_of, file_of, read_run
from hyper_parallel.core.common.errors import InvalidValue, nearest

if TYPE_CHECKING:
    from hyper_parallel.trainer.config import Config

GIB = 2**30
_RECIPE, _OUT = "Recipe", "What comes out"

_DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "ulysses_degree", "pp", "ep", "etp", "fold_experts")


def _option(help: str, panel: str | None = None, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **rest)


# What `estimate` and `search` have in common beside fields of dataclasses
Settings = Annotated[
    list[str] | None,
    _option("Any other field of sim.mesh.Recipe: loss=compiled, norm=eager, graphs=true ...", _RECIPE, "--set"),
]
Model = Annotated[
    str | None, _option("llama or moe; a name such as llama3-8b; module:function, or file.py:function, of your own.")
]
Json = Annotated[str | None, _option("Write everything as JSON to this file; -: to the terminal.", _OUT, "--json")]


_NO_MODEL = tuple(option for option in RUN_OPTIONS if (option.group, option.field) != ("train", "model"))


@with_options(*_NO_MODEL)
def estimate(
    given: Given,
    words: RunWords = None,
    devices: Annotated[int | None, _option("Devices in all; default: as many as the degrees need.")] = None,
    model: Model = None,
    start_from: StartFrom = None,
    settings: Settings = None,
    budget: Annotated[
        float | None,
        _option(
            "GiB of a device: estimate the fastest checkpointing that needs no more, and say which it is.", _RECIPE
        ),
    ] = None,
    in_words: Annotated[bool, _option("Say it in words, too, and what to change.", _OUT, "--explain")] = False,
    tries: Annotated[int, _option("How many of these changes to estimate.", _OUT, "--try", min=0)] = 0,
    plot: Annotated[Path | None, _option("PNG file: the timeline and the memory of a step.", _OUT)] = None,
    trace: Annotated[Path | None, _option("JSON file for ui.perfetto.dev: the timeline.", _OUT)] = None,
    compare: Annotated[
        Path | None, _option("Trace of torch.profiler, as of train --profile-steps, to put beside.", _OUT)
    ] = None,
    json_file: Json = None,
) -> None:
    """Say whether a step of a run fits into memory, how long it takes, and where the time goes. No device is needed.

    The file and the options of the run are those of train:
    hyper-parallel estimate run.toml --hardware h100-sxm --devices 64 --tp 8

    The exit code is 3 if it does not fit.
    """
    with _mistakes_as_messages():
        config = file_of(words, given)
        if config is None:  # before anything is imported
            _hardware(given["train"].get("hardware"))
        from sim.mesh.estimate import estimate_job
        from sim.mesh.job import Job
        from sim.mesh.searching.budget import NoPolicyFits, fit_job

        check_can_draw(plot)
        for path in (trace, None if json_file in (None, "-") else Path(str(json_file))):
            check_can_write(path)
        if budget is not None and "checkpointing" in given["parallel"]:
            blame, seen = "a budget chooses the checkpointing", f"--checkpointing {given['parallel']['checkpointing']}"
            raise InvalidValue(f"cannot use --budget {budget:g}", blame, seen, "one of both options")
        run, spec = _run(config, given, model, start_from)
        hardware = _hardware(run.train.hardware)
        job = Job.of_run(run, devices_of(run, devices), model=spec)
        if settings:
            job = dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, **_settings(settings)), run=None)
        with busy(f"estimating {job.model.name} on {job.dims.world_size:,} devices"):
            try:
                found = estimate_job(job, hardware) if budget is None else fit_job(job, hardware, budget * GIB)
            except NoPolicyFits as error:
                say_error(str(error))
                raise typer.Exit(DOES_NOT_FIT) from None
        _show_estimate(found, in_words or tries > 0, tries, plot, trace, compare, json_file)
        if budget is not None and json_file != "-":
            print_wide(f'\nthe fastest within {budget:g} GiB: --checkpointing "{found.recipe.activations}"')
    if not found.memory.fits():
        raise typer.Exit(DOES_NOT_FIT)


def _hardware(named: str | None) -> str:
    """Return the hardware that the run names."""
    if named is None:
        asked, blame, seen = "cannot estimate a step", "nothing says on which hardware", "train.hardware: None"
        raise InvalidValue(asked, blame, seen, "--hardware with a name that `hyper-parallel hardware` lists")
    return named


def _run(file: Path | None, given: Given, model: str | None, start_from: str | None) -> tuple[Config, Any]:
    """Return the run that was asked for, and its model if the trainer does not know it."""
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
        blame = "it has a shape of its own, which they are no part of"
        seen = f"given: {', '.join(changes)}"
        raise InvalidValue(f"cannot estimate {model} with options of [model]", blame, seen, "leave them out")
    run = read_run(file, given, start_from, shape=spec.config if spec is not None and is_trained else None)
    return run, None if is_trained else spec


def _show_estimate(
    found: Any,
    in_words: bool,
    tries: int,
    plot: Path | None,
    trace: Path | None,
    compare: Path | None,
    json_file: str | None,
) -> None:
    from sim.mesh.estimate import estimate as estimate_step
    from sim.mesh.explain import explain as in_prose
    from sim.mesh.pricing.profiled import predicted_step, rank_of_trace, read_trace
    from sim.mesh.report import comparison_dict, comparison_view, estimate_dict, estimate_view

    content = estimate_dict(found)
    measured = None if compare is None else read_trace(compare)
    if json_file != "-":
        print_wide(estimate_view(found))
        if in_words:
            with busy("estimating what could be changed"):
                said = in_prose(found, tries, estimate_step)
            print_wide("\n" + said.partition("\n\n")[2])  # without the headline, which is there already
    for path in (plot, trace):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            (found.timeline.plot if path is plot else found.timeline.to_chrome)(path)
            _say_written(path, json_file)
    if compare is not None and measured is not None:
        predicted = predicted_step(found, rank_of_trace(compare))
        content["compared"] = comparison_dict(predicted, measured)
        if json_file != "-":
            stdout_console().print()
            print_wide(comparison_view(predicted, measured))
    _write_json(content, json_file)


@with_options(*_NO_MODEL)
def search(
    given: Given,
    devices: Annotated[int, _option("Devices in all.", min=1)],
    words: RunWords = None,
    model: Model = None,
    start_from: StartFrom = None,
    memory_limit: Annotated[float | None, _option("GiB of a device; default: what the hardware has.")] = None,
    limit: Annotated[int, _option("Most candidates to estimate, before chunks of the best.", min=1)] = 24,
    settings: Settings = None,
    rows: Annotated[int, _option("Rows of the ranking to print.", _OUT, min=1)] = 10,
    write: Annotated[Path | None, _option("TOML file: the best run, for train.", _OUT)] = None,
    json_file: Json = None,
) -> None:
    """Rank the ways to train a run on a number of devices; what its file or an option says stays as it is.

    hyper-parallel search run.toml --hardware h100-sxm --devices 64 --write best.toml

    Ctrl-C or SIGTERM ends it: what it has found so far is printed. The exit code is 3 if nothing fits.
    """
    with _mistakes_as_messages():
        from sim.mesh.searching.explore import NothingFits
        from sim.mesh.searching.ranking import SearchBar, search_dict, search_view
        from sim.mesh.searching.search import search as search_ways
        from sim.mesh.spec import ModelSpec

        config = file_of(words, given)
        if config is None:
            _hardware(given["train"].get("hardware"))
        for path in (write, None if json_file in (None, "-") else Path(str(json_file))):
            check_can_write(path)
        run, spec = _run(config, given, model, start_from)
        hardware = _hardware(run.train.hardware)
        if spec is not None and write is not None:
            blame = "the trainer does not know the model, so that train cannot run what is written"
            raise InvalidValue(f"cannot write {write}", blame, f"--model {model}", "leave out --write")
        if run.lora.rank:
            asked, blame = "cannot search a run with adapters", "a search takes all weights to be trained"
            raise InvalidValue(asked, blame, f"lora.rank: {run.lora.rank}", "hyper-parallel estimate; or lora.rank=0")
        stays = _said(config, given)
        found = _settings(settings)
        found_model, recipes = _recipes(run, spec, stays, found)
        if write is not None and found:
            _check_writable_settings(write, run, recipes[0], found)
        degrees = {name: getattr(run.parallel, name) for name in stays & set(_DEGREES)}
        chunks: dict[str, Any] = {"tp_chunks": ()} if "tp_chunks" in stays else {}
        try:
            with SearchBar(stderr_console()) as bar, sigterm_as_ctrl_c():
                result = search_ways(
                    found_model,
                    hardware,
                    devices,
                    run.train.batch_size,
                    None if memory_limit is None else memory_limit * GIB,
                    seq_len=run.train.seq_len,
                    recipes=recipes,
                    fixed={name: size for name, size in degrees.items() if size not in (None, -1)},
                    limit=limit,
                    progress=bar.on_estimate,
                    layers_per_stage=run.parallel.stage_sizes(),
                    **chunks,
                    accepts=None if isinstance(spec, ModelSpec) else lambda one: _check_trained(run, one, devices),
                )
        except NothingFits as error:
            say_error(str(error))
            raise typer.Exit(DOES_NOT_FIT) from None
        if json_file != "-":
            print_wide(search_view(result, rows))
        if write is not None:
            from hyper_parallel.trainer.config import RUN, changed_text

            text = changed_text(None if config is None else RUN.read(config), arranged_run(run, result.best.candidate))
            write.parent.mkdir(parents=True, exist_ok=True)
            write.write_text(_provenance(result.best.estimate) + _PROVENANCE.sub("", text), encoding="utf-8")
            _say_written(write, json_file)
        _write_json(search_dict(result), json_file)
    if not result.complete:
        raise typer.Exit(INTERRUPTED)


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


_PROVENANCE = re.compile(r"^# found by: .*\n# on: .*\n# predicted, .*\n", re.MULTILINE)


def arranged_run(run: Config, candidate: Any) -> Config:
    """Return `run` with the parallel keys of a candidate of its search."""
    from hyper_parallel.core.activations import ActivationPolicy

    dims, recipe, sizes = candidate.dims, candidate.recipe, candidate.layers_per_stage
    policy = ActivationPolicy.of(recipe.checkpointing)
    piped = dims.pp > 1
    arranged: dict[str, Any] = {
        **{name: getattr(dims, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")},
        "ulysses_degree": dims.ulysses_degree if dims.cp > 1 else None,
        "etp": dims.etp if dims.ep > 1 or dims.fold_experts else None,
        "fold_experts": dims.fold_experts,
        "ranks_per_node": recipe.ranks_per_node,
        "schedule": recipe.schedule,
        "stages_per_rank": recipe.stages_per_rank if piped else None,
        "layers_per_stage": None if sizes is None else ",".join(map(str, sizes)),
        "checkpointing": str(
            dataclasses.replace(policy, every=recipe.checkpoint_every, first=recipe.checkpoint_layers)
        ),
        "reshard_after_forward": recipe.zero == 3,
        "reduce_each": recipe.reduce_each,
        "reshard_inputs": recipe.reshard_inputs,
        "tp_chunks": recipe.tp_chunks,
        "whole_parameters": recipe.whole_parameters,
    }
    train = dataclasses.replace(run.train, accumulate=candidate.parts)
    return dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **arranged), train=train)


def _check_trained(run: Config, candidate: Any, devices: int) -> None:
    """Raise what `train` would raise of a candidate."""
    from sim.mesh.job import Job

    Job.of_run(arranged_run(run, candidate), devices)


def _check_writable_settings(write: Path, run: Config, recipe: Any, settings: dict[str, Any]) -> None:
    """Raise if a file for `train` has no key for a field given by --set, because it would describe another run."""
    from hyper_parallel.core.mesh.parallel_dims import ParallelDims
    from sim.mesh.job import Job
    from sim.mesh.searching.space import Candidate

    alone = dataclasses.replace(recipe, microbatches=None, schedule="1f1b", stages_per_rank=None)
    written = Job.of_run(arranged_run(run, Candidate(ParallelDims(), alone, run.train.batch_size)), 1).recipe
    lost = [name for name, value in settings.items() if getattr(written, name) != value]
    if lost:
        blame = f"it has no key for {' and '.join(lost)}, so that train would not run what was searched"
        seen = ", ".join(f"--set {name}={settings[name]}" for name in lost)
        raise InvalidValue(f"cannot write {write}", blame, seen, "leave out --write, or these --set")


def _said(file: Path | None, given: Given) -> set[str]:
    """Return the keys of [parallel], and accumulate, that the file or an option says."""
    from hyper_parallel.trainer.config import RUN

    table = {} if file is None else RUN.read(file).table()
    parallel, train = ({**table.get(section, {}), **given[section]} for section in ("parallel", "train"))
    return {*parallel, *({"accumulate"} & train.keys())}


def _recipes(run: Config, spec: Any, stays: set[str], settings: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the model of a run, and the recipes to try: what nothing says of checkpointing, ZeRO and reductions."""
    from sim.mesh.job import Job
    from sim.mesh.searching.space import CHECKPOINTINGS

    alone: dict[str, Any] = dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep"), 1) | dict.fromkeys(
        ("dp_shard", "ulysses_degree", "etp", "stages_per_rank", "layers_per_stage")
    )
    parallel = dataclasses.replace(run.parallel, **alone, schedule="1f1b")
    whole = dataclasses.replace(run, parallel=parallel, train=dataclasses.replace(run.train, accumulate=1))
    job = Job.of_run(whole, 1, model=spec)
    said_1f1b = "schedule" in stays and run.parallel.schedule == "1f1b"  # which has one stage on each rank
    recipe = dataclasses.replace(
        job.recipe,
        schedule=run.parallel.schedule,
        stages_per_rank=run.parallel.stages_per_rank or (1 if said_1f1b else None),
        microbatches=run.train.accumulate if "accumulate" in stays else None,
    )
    levels = [recipe.checkpointing] if "checkpointing" in stays else CHECKPOINTINGS
    stages = [3 if run.parallel.reshard_after_forward else 2] if "reshard_after_forward" in stays else [3, 2]
    reductions = [run.parallel.reduce_each] if "reduce_each" in stays else [False, True]
    return job.model, [
        dataclasses.replace(recipe, checkpointing=level, **{"zero": zero, "reduce_each": each, **settings})
        for level in levels
        for zero in stages
        for each in reductions
    ]


# -- from options to what the simulator takes --------------------------------------------------------------------------


def _settings(given: list[str] | None) -> dict[str, Any]:
    """Read fields of the recipe that have no option of their own, written as name=value."""
    from hyper_parallel.core.machine.toml_file import read_value
    from sim.mesh.recipe import Recipe, Routing

    fields = {field.name: field.default for field in dataclasses.fields(Recipe)}
    found: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = (part.strip() for part in text.partition("="))
        asked = f"cannot use --set {text}"
        if not equals or name not in fields:
            blame = f"the recipe has no field {name!r}" if equals else "it is not of the form name=value"
            raise InvalidValue(asked, blame, f"fields: {', '.join(fields)}", f"--set {nearest(name, fields)}=...")
        read = read_value(value.lower().removeprefix("zipf:"))
        if name == "routing" and type(read) not in (int, float):
            blame = "the skew of loads is a number, 0 for even ones"
            raise InvalidValue(asked, blame, f"given: {value!r}", "--set routing=zipf:0.5")
        is_switch = isinstance(fields[name], bool) and not (name == "float8" and value.endswith("wise"))
        if is_switch and not isinstance(read, bool):
            raise InvalidValue(asked, "it is neither true nor false", f"{name}: {value!r}", f"{name}=true")
        found[name] = Routing.zipf(read) if name == "routing" else value if isinstance(read, str) else read
    return found


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


# -- what a person sees ------------------------------------------------------------------------------------------------


@contextmanager
def _mistakes_as_messages() -> Iterator[None]:
    """Turn mistakes, and operations that have no price, into one message and exit code 2."""
    with mistakes_as_messages(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="To construct DTensor from torch.Tensor")  # torch, of fake tensors
        yield


def _write_json(content: dict[str, Any], where: str | None) -> None:
    if where is None:
        return
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    if where == "-":
        stdout_console().file.write(text)
        return
    path = Path(where)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    _say_written(path, where)


def _say_written(path: Path, json_file: str | None) -> None:
    (stderr_console() if json_file == "-" else stdout_console()).print(f"wrote {path}")
