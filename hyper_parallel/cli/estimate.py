"""The commands `estimate` and `search`: a training step on a mesh that nobody has."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyper_parallel.cli.kit import (
    INTERRUPTED,
    busy,
    check_can_write,
    mistakes_as_messages,
    print_wide,
    stderr_console,
    stdout_console,
)
from hyper_parallel.cli.options import Given, options, with_options
from hyper_parallel.cli.run import RUN_OPTIONS, ConfigFile, StartFrom, devices_of, read_run
from hyper_parallel.core.common.errors import explain, nearest

if TYPE_CHECKING:
    pass

__all__ = ["estimate", "search"]

GIB = 2**30
_RECIPE, _OUT = "Recipe", "What comes out"

_DEGREES = options(
    "degrees",
    "hyper_parallel.trainer.config",
    "ParallelConfig",
    *("dp_replicate", "dp_shard", "tp", "cp", "ulysses_degree=ulysses", "pp", "ep", "etp"),
    panel="Parallel degrees",
    optional=True,
)


def _of_recipe(*fields: str, optional: bool = False) -> Any:
    return options("recipe", "sim.mesh.recipe", "Recipe", *fields, panel=_RECIPE, optional=optional)


_CHECKPOINTING, _ZERO = _of_recipe("checkpointing", "zero", optional=True)
_HOW = _of_recipe(
    *("compile", "schedule", "stages_per_rank", "microbatches", "param_dtype", "reduce_dtype"),
    *("master=weights_behind", "optimizer", "fused_loss", "float8", "attention", "sequence_parallel"),
)


def _option(help: str, panel: str | None = None, *names: str, **rest: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **rest)


# What `estimate` and `search` have in common beside fields of dataclasses
ModelName = Annotated[str, _option("Such as llama3-8b; or module:function, or file.py:function, of your own.")]
HardwareName = Annotated[str, _option("A name that `hyper-parallel hardware` lists, or the path of a TOML file.")]
SeqLen = Annotated[int, _option("Tokens of a sequence.")]
Settings = Annotated[
    list[str] | None,
    _option("Any other field of sim.mesh.Recipe: loss=compiled, norm=eager, graphs=true ...", _RECIPE, "--set"),
]
Json = Annotated[str | None, _option("Write everything as JSON to this file; -: to the terminal.", _OUT, "--json")]


_NO_MODEL = tuple(option for option in RUN_OPTIONS if (option.group, option.field) != ("train", "model"))


@with_options(*_NO_MODEL)
def estimate(
    given: Given,
    hardware: HardwareName,
    config: ConfigFile = None,
    devices: Annotated[int | None, _option("Devices in all; default: as many as the degrees need.")] = None,
    model: Annotated[
        str | None,
        _option("llama or moe; a name such as llama3-8b; module:function, or file.py:function, of your own."),
    ] = None,
    start_from: StartFrom = None,
    settings: Settings = None,
    in_words: Annotated[bool, _option("Say it in words, too, and what to change.", _OUT, "--explain")] = False,
    tries: Annotated[int, _option("How many of these changes to estimate.", _OUT, "--try", min=0)] = 0,
    plot: Annotated[Path | None, _option("PNG file: the timeline and the memory of a step.", _OUT)] = None,
    trace: Annotated[Path | None, _option("JSON file for ui.perfetto.dev: the timeline.", _OUT)] = None,
    json_file: Json = None,
) -> None:
    """Say whether a step of a run fits into memory, how long it takes, and where the time goes. No device is needed.

    The file and the options of the run are those of train:
    hyper-parallel estimate run.toml --hardware h100-sxm --devices 64 --tp 8
    """
    with _mistakes_as_messages():
        from sim.mesh.estimate import estimate_job

        for path in (plot, trace, None if json_file in (None, "-") else Path(str(json_file))):
            check_can_write(path)
        job = _job(config, given, devices, model, start_from, settings)
        with busy(f"estimating {job.model.name} on {job.dims.world_size:,} devices"):
            found = estimate_job(job, hardware)
        _show_estimate(found, in_words or tries > 0, tries, plot, trace, json_file)


def _job(
    file: Path | None,
    given: Given,
    devices: int | None,
    model: str | None,
    start_from: str | None,
    settings: list[str] | None,
) -> Any:
    """Return the step of the run that was asked for, of a model that the trainer knows or of another one."""
    from hyper_parallel.models.llama import LlamaConfig
    from hyper_parallel.models.moe import MoEConfig
    from hyper_parallel.trainer.config import MODELS
    from sim.mesh.job import Job
    from sim.mesh.models import find_model

    if model in MODELS:
        given["train"]["model"] = model
    spec = None if model in (None, *MODELS) else find_model(_model(str(model)))
    is_trained = spec is not None and type(spec.config) in (LlamaConfig, MoEConfig)
    changes = [*given["model"], *given["experts"]]
    if spec is not None and not is_trained and changes:
        blame = "it has a shape of its own, which they are no part of"
        seen = f"given: {', '.join(changes)}"
        raise ValueError(explain(f"cannot estimate {model} with options of [model]", blame, seen, "leave them out"))
    run = read_run(file, given, start_from, shape=spec.config if spec is not None and is_trained else None)
    job = Job.of_run(run, devices_of(run, devices), model=None if is_trained else spec)
    return dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, **_settings(settings)))


def _show_estimate(
    found: Any, in_words: bool, tries: int, plot: Path | None, trace: Path | None, json_file: str | None
) -> None:
    from sim.mesh.estimate import estimate as estimate_step
    from sim.mesh.explain import explain as in_prose
    from sim.mesh.report import estimate_dict, estimate_view

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
    _write_json(estimate_dict(found), json_file)


@with_options(*_DEGREES, _CHECKPOINTING, _ZERO, *_HOW)
def search(
    model: ModelName,
    hardware: HardwareName,
    devices: Annotated[int, _option("Devices in all.")],
    global_batch: Annotated[int, _option("Sequences of a step, over all ranks together.")],
    given: Given,
    seq_len: SeqLen = 4096,
    memory_limit: Annotated[float | None, _option("GiB of a device; default: what the hardware has.")] = None,
    limit: Annotated[int, _option("Most candidates to estimate.", min=1)] = 24,
    settings: Settings = None,
    rows: Annotated[int, _option("Rows of the ranking to print.", _OUT, min=1)] = 10,
    json_file: Json = None,
) -> None:
    """Rank the ways to train a model on a number of devices; what is given as an option stays as it is.

    hyper-parallel search --model llama3-8b --hardware h100-sxm --devices 64 --global-batch 128 --seq-len 8192

    Ctrl-C ends it: what it has found so far is printed.
    """
    recipe = given["recipe"]
    with _mistakes_as_messages():
        from sim.mesh.searching.ranking import SearchBar, search_dict, search_view
        from sim.mesh.searching.search import search as search_ways

        check_can_write(None if json_file in (None, "-") else Path(str(json_file)))
        levels = [recipe["checkpointing"]] if "checkpointing" in recipe else ["none", "selective", "full"]
        stages = [recipe["zero"]] if "zero" in recipe else [3, 2]
        recipes = [
            _recipe({**recipe, "checkpointing": level, "zero": zero}, settings) for level in levels for zero in stages
        ]
        with SearchBar(stderr_console()) as bar:
            result = search_ways(
                _model(model),
                hardware,
                devices,
                global_batch,
                None if memory_limit is None else memory_limit * GIB,
                seq_len=seq_len,
                recipes=recipes,
                fixed=given["degrees"],
                limit=limit,
                progress=bar.on_estimate,
            )
        if json_file != "-":
            print_wide(search_view(result, rows))
        _write_json(search_dict(result), json_file)
    if not result.complete:
        raise typer.Exit(INTERRUPTED)


# -- from options to what the simulator takes --------------------------------------------------------------------------


def _settings(given: list[str] | None) -> dict[str, Any]:
    """Read fields of the recipe that have no option of their own, written as name=value."""
    from sim.mesh.recipe import Recipe, Routing

    fields = {field.name: field.default for field in dataclasses.fields(Recipe)}
    found: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = (part.strip() for part in text.partition("="))
        asked = f"cannot use --set {text}"
        if not equals or name not in fields:
            blame = f"the recipe has no field {name!r}" if equals else "it is not of the form name=value"
            raise ValueError(
                explain(asked, blame, f"fields: {', '.join(fields)}", f"--set {nearest(name, fields)}=...")
            )
        if name == "routing":
            found[name] = Routing.zipf(_number(asked, value.removeprefix("zipf:")))
        elif isinstance(fields[name], bool):
            if value.lower() not in ("true", "false"):
                raise ValueError(explain(asked, "it is neither true nor false", f"{name}: {value!r}", f"{name}=true"))
            found[name] = value.lower() == "true"
        else:
            found[name] = int(value) if value.lstrip("-").isdigit() else value
    return found


def _number(asked: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        blame = "the skew of loads is a number, 0 for even ones"
        raise ValueError(explain(asked, blame, f"given: {text!r}", "--set routing=zipf:0.5")) from None


def _recipe(given: dict[str, Any], settings: list[str] | None) -> Any:
    """Build the recipe of what is given, and of what --set says."""
    from sim.mesh.recipe import Recipe

    return Recipe(**given | _settings(settings))


def _model(name: str) -> Any:
    """Return the name of a known model, or what a function of the user's returns."""
    from hyper_parallel.cli.subject import named_object

    path, colon, inside = name.partition(":")
    if not colon:
        return name
    made = (_in_file(Path(path), inside) if path.endswith(".py") else named_object("--model", name))()
    if isinstance(made, type) or callable(getattr(made, "parameters", None)):
        blame = f"it returned a {type(made).__name__}, and an estimate makes the model itself, without data"
        hint = "return sim.mesh.Custom(...), a LlamaConfig or a MoEConfig"
        raise ValueError(explain(f"cannot use --model {name}", blame, f"returned: {type(made).__name__}", hint))
    return made


def _in_file(path: Path, name: str) -> Any:
    """Return what a Python file calls by a name."""
    asked = f"cannot use --model {path}:{name}"
    if not path.is_file():
        files = ", ".join(sorted(file.name for file in Path.cwd().glob("*.py"))[:8]) or "none"
        raise ValueError(explain(asked, f"there is no file {str(path)!r}", f"Python files here: {files}", "its path"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a .py file"
    assert spec.loader is not None, "a .py file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        blame = f"{path.name} has no function {name!r}"
        hint = f"--model {path}:{functions[-1]}" if functions else "a function that returns sim.mesh.Custom(...)"
        raise ValueError(explain(asked, blame, f"it has: {', '.join(functions) or 'none'}", hint))
    return found


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
