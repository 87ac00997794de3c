"""Faults that a review of the trainer has found, and that must not come back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sim
from hyper_parallel.core.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer import loop
from hyper_parallel.trainer.config import CheckpointConfig, Config, DataConfig, ParallelConfig, TrainConfig
from hyper_parallel.trainer.guards import NonFiniteError
from hyper_parallel.trainer.loop import train
from hyper_parallel.trainer.parallelize import Parallelized
from hyper_parallel.trainer.preflight import plan_run
from hyper_parallel.trainer.saving import export_checkpoint

TINY = Config(
    model=LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2),
    data=DataConfig(max_bytes=200_000),
    train=TrainConfig(steps=2, batch_size=4, seq_len=16, eval_sequences=4, device="cpu"),
)


def test_a_ring_under_selective_checkpointing() -> None:
    """The kernels' results are kept for backward, and must not be added to in place."""
    alone = train(TINY).losses
    degrees = ParallelConfig(cp=2, ulysses_degree=1, checkpointing="selective")
    ranks = sim.run(train, 2, args=(replace(TINY, parallel=degrees),))
    assert ranks[0].losses == pytest.approx(alone, rel=1e-5)


def test_a_rank_of_a_pipeline_has_something_to_do() -> None:
    degrees = ParallelConfig(pp=4, schedule="gpipe", layers_per_stage="1,0,0,1")
    with pytest.raises(ValueError, match="rank 1 of the pipeline would have nothing"):
        plan_run(replace(TINY, parallel=degrees), 4)
    plan_run(replace(TINY, parallel=replace(degrees, layers_per_stage="0,1,1,0")), 4)


def test_a_dump_blames_what_is_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping by a norm that is NaN would make all gradients NaN before they are written down."""
    original = loop.forward_backward

    def poisoned(model: Parallelized, *rest: Any) -> torch.Tensor:
        loss = original(model, *rest)
        named = dict(model.named_parameters())
        grad: Any = named["layers.1.mlp.w2.weight"].grad
        grad.view(-1)[3] = math.nan
        return loss

    monkeypatch.setattr(loop, "forward_backward", poisoned)
    run = replace(TINY, train=replace(TINY.train, on_nonfinite="dump", log=str(tmp_path / "log.jsonl")))
    with pytest.raises(NonFiniteError, match="the gradient norm is nan"):
        train(run)
    dumped = json.loads((tmp_path / "nonfinite" / "step-00000001" / "rank-0.json").read_text())
    blamed = {row["name"]: row["grad_nonfinite"] for row in dumped["parameters"] if row["grad_nonfinite"]}
    assert blamed == {"layers.1.mlp.w2.weight": 1}


def test_a_checkpoint_that_lacks_weights_is_not_exported(tmp_path: Path) -> None:
    train(replace(TINY, checkpoint=CheckpointConfig(folder=str(tmp_path / "run"))))
    found = tmp_path / "run" / "step-00000002"
    saved = read_metadata(found)
    some = {name: torch.empty(entry.shape) for name, entry in saved.tensors.items() if name.startswith("model.layers")}
    load_checkpoint(found, some, strict=False)
    save_checkpoint(tmp_path / "part", some, saved.extra)
    with pytest.raises(ValueError, match=r"model\.embed\.weight"):
        export_checkpoint(tmp_path / "part", tmp_path / "hf")
    assert not (tmp_path / "hf" / "config.json").exists()
    export_checkpoint(tmp_path / "run", tmp_path / "hf")
    assert (tmp_path / "hf" / "config.json").exists()
