"""The run that a command is given: a TOML file, and an option for every key of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hyper_parallel.cli.options import Given, options
from hyper_parallel.core.common.errors import InvalidValue, nearest

if TYPE_CHECKING:
    from hyper_parallel.models.llama import LlamaConfig
    from hyper_parallel.trainer.config import Config

ConfigFile = Annotated[
    Path | None, typer.Argument(help="TOML file of a run; what it leaves out keeps its default.", show_default=False)
]
StartFrom = Annotated[
    str | None,
    typer.Option(help="Folder of transformers: its model, and weights to start with.", rich_help_panel="Section train"),
]

_CONFIG, _LLAMA, _MOE = "hyper_parallel.trainer.config", "hyper_parallel.models.llama", "hyper_parallel.models.moe"
_LORA = "hyper_parallel.models.lora"
_DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "ulysses_degree", "pp", "ep", "etp", "fold_experts")


def _of(section: str, *fields: str, name: str = "", module: str = _CONFIG) -> Any:
    """Return options for keys of a section; without a default, since the file has them."""
    name = name or f"{section.capitalize()}Config"
    return options(section, module, name, *fields, panel=f"Section {section}", optional=True)


RUN_OPTIONS = (
    *_of("train", "model", "steps", "batch_size", "seq_len", "accumulate", "seed", "device"),
    *_of("train", "eval_every", "eval_sequences", "log=log_file", "tensorboard", "profile_steps"),
    *_of("train", "memory_snapshot", "memory_limit_gb"),
    *_of("train", "on_nonfinite", "max_skips", "stuck_after_s=stuck_after", "predict", "hardware"),
    *_of("parallel", *_DEGREES, "ranks_per_node", "schedule", "stages_per_rank", "layers_per_stage", "engine"),
    *_of("parallel", "param_dtype=precision", "reshard_after_forward", "reduce_each", "reshard_inputs", "tp_chunks"),
    *_of("parallel", "checkpointing", "compile", "whole_parameters"),
    *_of("optimizer", "muon", "lr", "warmup_steps", "schedule=lr_schedule", "min_lr_ratio", "beta1", "beta2"),
    *_of("optimizer", "weight_decay", "max_grad_norm"),
    *_of("checkpoint", "folder=checkpoint_dir", "every=save_every", "keep", "background", "resume", "resume_step"),
    *_of("data", "path=data", "pattern=data_pattern", "max_bytes=data_bytes", "ignored=data_ignored"),
    *_of("data", "tokenizer", "mask_prompts"),
    *_of("model", name="LlamaConfig", module=_LLAMA),
    *_of("experts", name="ExpertsConfig", module=_MOE),
    *_of("lora", *(f"{key}=lora_{key}" for key in ("rank", "alpha", "dropout", "targets")), module=_LORA),
)
"""One for each key of a run, but for `train.start_from`: it changes more than its own key."""


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
        given: by section of the config; other groups are the command's own. The model can also be a name of
            `sim.mesh.model_names()`.
        start_from: folder of transformers; its model becomes that of the run. None: the file's, if it names one.
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
    for section in {option.group: None for option in RUN_OPTIONS}:
        run = run.with_changes(section, given.get(section, {}))
    if start_from is not None:
        check_paths("cannot start", start_from=start_from)  # an empty one is a variable that is not set
    start_from = start_from or run.train.start_from
    if start_from is not None:
        run = with_shape_of(run, start_from, others=others)
        if model not in (None, run.train.model):
            raise ValueError(
                f"cannot start '{model}' from {run.train.start_from}: it holds a '{run.train.model}'\n"
                f"  --model {model}\n  try: leave out --model"
            )
        for section in ("model", "experts"):
            run = run.with_changes(section, given.get(section, {}))
        check_start(run)
    return run


def devices_of(run: Config, devices: int | None) -> int:
    """Return how many devices there are.

    Args:
        run: whose degrees count.
        devices: as given; None: as many as the degrees need.

    Raises:
        ValueError: none is given, and the degrees leave it open; or below 1.
    """
    if devices is None:
        axes = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
        devices = math.prod(getattr(run.parallel, axis) or 1 for axis in axes)
        if devices < 1:
            blame = "dp_shard=-1 takes what is left"
            raise InvalidValue("cannot place the model", blame, "--devices is missing", "--devices 8")
    if devices < 1:
        blame = "there must be a device at least"
        raise InvalidValue("cannot place the model", blame, f"--devices {devices}", "--devices 8")
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
