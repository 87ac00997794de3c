"""The run that a command is given: a TOML file, and an option for every key of it."""

from __future__ import annotations

import math
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hyper_parallel.cli.options import Given, options
from hyper_parallel.core.common.errors import InvalidValue, nearest

if TYPE_CHECKING:
    from hyper_parallel.models.llama import LlamaConfig
    from hyper_parallel.trainer.config import Config

RunWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE SECTION.KEY=VALUE",
        help="TOML file of a run; what it leaves out keeps its default. Other values of its keys, as parallel.tp=2.",
        show_default=False,
    ),
]
StartFrom = Annotated[
    str | None,
    typer.Option(help="Folder of transformers: its model, and weights to start with.", rich_help_panel="Section train"),
]

_MODELS = MappingProxyType({"model": "llama", "experts": "moe", "lora": "lora"})  # modules of sections


def _of(section: str, **called: str) -> Any:
    module = f"hyper_parallel.models.{_MODELS[section]}" if section in _MODELS else "hyper_parallel.trainer.config"
    return options(section, module, "LlamaConfig" if section == "model" else f"{section.capitalize()}Config", **called)


RUN_OPTIONS = (
    *_of("train", log="log_file", stuck_after_s="stuck_after", start_from=""),
    *_of("parallel"),
    *_of("precision", param_dtype="precision"),
    *_of("optimizer", schedule="lr_schedule"),
    *_of("checkpoint", folder="checkpoint_dir", every="save_every"),
    *_of("data", path="data", pattern="data_pattern", max_bytes="data_bytes", ignored="data_ignored"),
    *_of("model"),
    *_of("experts"),
    *_of("lora", rank="lora_rank", alpha="lora_alpha", dropout="lora_dropout", targets="lora_targets"),
)
"""One for each key of a run, but for `train.start_from`: it changes more than its own key."""

BUT_MODEL = tuple(option for option in RUN_OPTIONS if (option.section, option.field) != ("train", "model"))
"""For commands whose own option --model takes more than the trainer's models."""


def file_of(words: list[str] | None, given: Given) -> Path | None:
    """Return the file among the words of a run, and add what others say, such as "parallel.tp=2", to `given`.

    Raises:
        ValueError: two files, no such key (with the closest name), a value of another type, a key that is given twice.
    """
    files = [word for word in words or () if "=" not in word or Path(word).is_file()]
    if len(files) > 1:
        blame, hint = "a run has one file", f"{files[0]}, and keys such as parallel.tp=2"
        raise InvalidValue("cannot read a run", blame, f"files: {', '.join(files)}", hint)
    for word in words or ():
        if word in files:
            continue
        from hyper_parallel.core.machine.toml_file import read_value
        from hyper_parallel.trainer.config import checked_value

        place, _, text = word.partition("=")
        section, _, key = place.strip().rpartition(".")
        value = checked_value(section, key, read_value(text.strip()))
        if given.setdefault(section, {}).setdefault(key, value) != value:
            seen = f"{section}.{key}: {given[section][key]!r} and {value!r}"
            raise InvalidValue(f"cannot use {word}", "the key has two values", seen, "one of the two")
    return Path(files[0]) if files else None


def read_run(
    file: Path | None,
    given: Given,
    start_from: str | None = None,
    *,
    shape: LlamaConfig | None = None,
    others: bool = False,
) -> Config:
    """Return the run of a file, with what options say in place of what the file says.

    Args:
        file: see `load_config`; None: the defaults.
        given: by section. The model can also be a name of `sim.mesh.model_names()`.
        start_from: folder of transformers, whose model becomes the run's. None: the file's, if it names one.
        shape: of the model, in place of what the file says; options change it.
        others: also take folders with models that transformers alone knows.

    Raises:
        ValueError: as `load_config`; a value that a section refuses; a folder that holds another model; the name of a
            model that the trainer cannot train.
    """
    from hyper_parallel.core.common.checks import check_paths
    from hyper_parallel.trainer.config import MODELS, Config, load_config
    from hyper_parallel.trainer.saving import check_start, with_shape_of

    run = load_config(file) if file is not None else Config()
    model = given["train"].get("model")
    if shape is None and model is not None and model not in MODELS:
        shape = _known_shape(model)
    if shape is not None:
        run = run.with_shape(shape)
        model = run.train.model
        given = {**given, "train": {**given["train"], "model": model}}
    for section in {option.section: None for option in RUN_OPTIONS}:
        run = run.with_changes(section, given.get(section, {}))
    if start_from is not None:
        check_paths("cannot start", start_from=start_from)  # an empty one is a variable that is not set
    start_from = start_from or run.train.start_from
    if start_from is not None:
        run = with_shape_of(run, start_from, others=others)
        if model not in (None, run.train.model):
            asked, blame = f"cannot start '{model}' from {start_from}", f"it holds a '{run.train.model}'"
            raise InvalidValue(asked, blame, f"--model {model}", "leave out --model")
        for section in ("model", "experts"):
            run = run.with_changes(section, given.get(section, {}))
        check_start(run)
    return run


def devices_of(run: Config, devices: int | None) -> int:
    """Return how many devices there are: as given, or as many as the degrees of the run need.

    Raises:
        ValueError: none is given, and the degrees leave it open; or below 1.
    """
    if devices is None:
        from hyper_parallel.core.mesh.parallel_dims import AXIS_ORDER

        devices = math.prod(getattr(run.parallel, axis) or 1 for axis in AXIS_ORDER)
        blame, seen = "dp_shard=-1 takes what is left", "--devices is missing"
    else:
        blame, seen = "there must be a device at least", f"--devices {devices}"
    if devices < 1:
        raise InvalidValue("cannot place the model", blame, seen, "--devices 8")
    return devices


def _known_shape(name: str) -> LlamaConfig:
    """Return the shape of a model that the simulator knows by name, and the trainer can train."""
    from hyper_parallel.models import llama, moe
    from hyper_parallel.trainer.config import MODELS
    from sim.mesh.models import find_model, model_names

    if name not in model_names():
        hint = nearest(name, [*MODELS, *model_names()])
        known = ", ".join([*MODELS, *model_names()])
        raise InvalidValue("cannot find the model", f"there is no model {name!r}", f"models: {known}", hint)
    shape = find_model(name).config
    if type(shape) not in (llama.LlamaConfig, moe.MoEConfig):
        blame = "its attention is none of the trainer's"
        hint = f"hyper-parallel estimate --model {name}, or one of {', '.join(MODELS)}"
        raise InvalidValue(f"cannot train {name}", blame, f"it has a {type(shape).__name__}", hint)
    return cast("LlamaConfig", shape)
