"""Checkpoints to folders that transformers loads, and such folders to the start of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.core.checkpoint.api import load_checkpoint, read_metadata
from hyper_parallel.core.checkpoint.checkpointer import Checkpointer
from hyper_parallel.core.checkpoint.optimizer import model_tensors
from hyper_parallel.core.common.errors import explain
from hyper_parallel.models.hf_weights import export_huggingface, import_huggingface
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.moe import ExpertsConfig, MoEConfig, MoELlama
from hyper_parallel.trainer.config import Config

__all__ = ["check_start", "export_checkpoint", "with_shape_of"]

_FREE = frozenset({"max_seq_len", "init_std", "bias_update_rate", "aux_loss_weight"})
"""What two models may differ in and compute the same with the same weights."""


def export_checkpoint(checkpoint: str | Path, folder: str | Path, dtype: torch.dtype | None = None) -> LlamaConfig:
    """Write the weights of a checkpoint as a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

        export_checkpoint("out/run", "out/hf", torch.bfloat16)

    By one process, whatever ranks have saved it, with the whole model in its memory.

    Args:
        checkpoint: one of a run of this trainer, or the folder of a run, whose newest complete one is taken.
        folder: made if it is not there; refused if it has weights.
        dtype: to write weights in. Default: as they are.

    Returns:
        The model's shape.

    Raises:
        ValueError: no checkpoint of this trainer; see also `export_huggingface`.
        CheckpointError: it is damaged.
    """
    path = _newest(Path(checkpoint))
    metadata = read_metadata(path)
    extra = metadata.extra
    shape = extra.get("model") if isinstance(extra, dict) else None
    if not isinstance(shape, dict):
        blame = "it does not say which model it is of"
        hint = "a checkpoint of hyper-parallel train, or load_checkpoint and export_huggingface"
        raise ValueError(explain(f"cannot export {path}", blame, f"extra: {extra!r}"[:200], hint))
    kind, precision = shape.pop("kind"), shape.pop("precision")
    config = MoEConfig(**shape) if kind == "moe" else LlamaConfig(**shape)
    with torch.device("meta"):
        model: Llama = MoELlama(config) if isinstance(config, MoEConfig) else Llama(config)
    model = model.to(torch.float64 if precision == "fp64" else torch.float32).to_empty(device="cpu")
    tensors = model_tensors(model)
    if config.tie_embeddings:
        tensors.pop("model.head.weight", None)
    if lacking := [name for name in tensors if name not in metadata.tensors]:
        blame = f"it has no {lacking[0]!r}, nor {len(lacking) - 1} others of its model"
        hint = "the checkpoint of a whole model"
        raise ValueError(explain(f"cannot export {path}", blame, f"tensors: {len(metadata.tensors)}", hint))
    load_checkpoint(path, tensors, strict=False)  # the optimizer's state stays there
    if config.tie_embeddings and model.head is not None and model.embed is not None:
        model.head.weight = model.embed.weight
    export_huggingface(model.state_dict(), config, folder, dtype=dtype)
    return config


def _newest(path: Path) -> Path:
    """Return the newest checkpoint of a run's folder, or the folder itself if it is one."""
    with Checkpointer(path) as run:
        return run.latest() or path


def with_shape_of(run: Config, folder: str | Path) -> Config:
    """Return a run of the model whose weights are in a folder of transformers.

    Args:
        run: how to train it.
        folder: see `import_huggingface`.

    Raises:
        ValueError: as `import_huggingface`.
    """
    config, _ = import_huggingface(folder)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    dense = LlamaConfig(**{field.name: values[field.name] for field in dataclasses.fields(LlamaConfig)})
    changed: dict[str, Any] = {"model": dense}
    kind = "llama"
    if isinstance(config, MoEConfig):
        kind = "moe"
        changed["experts"] = ExpertsConfig(
            **{field.name: values[field.name] for field in dataclasses.fields(ExpertsConfig)}
        )
    return dataclasses.replace(run, **changed).with_changes("train", {"model": kind, "start_from": str(folder)})


def check_start(run: Config) -> None:
    """Refuse to start from weights of a model that computes something else with them, though their shapes may fit.

    Args:
        run: with `train.start_from`.

    Raises:
        ValueError: as `import_huggingface`; the model of the folder is not the run's.
    """
    assert run.train.start_from is not None, "the caller looks"
    theirs, _ = import_huggingface(run.train.start_from)
    there, here = dataclasses.asdict(theirs), dataclasses.asdict(run.shape())
    unlike = [name for name in {**here, **there} if name not in _FREE and there.get(name) != here.get(name)]
    if unlike:
        blame = f"its model has another {unlike[0]} than the run's"
        seen = "\n  ".join(f"{name}: {there.get(name)!r} there, {here.get(name)!r} here" for name in unlike)
        hint = "with_shape_of(config, folder), or the [model] and [experts] of the folder"
        raise ValueError(explain(f"cannot start from {run.train.start_from}", blame, seen, hint))
