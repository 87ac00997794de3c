"""Silent failures of parallel dimensions, checkpoints and the trainer, as a review has found them."""

from __future__ import annotations

import json
import math
import os
import threading
import weakref
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sim
from hyper_parallel import init_device_mesh
from hyper_parallel.core.checkpoint import Checkpointer, CheckpointError, load_checkpoint, record, save_checkpoint
from hyper_parallel.core.checkpoint.writer import Writer
from hyper_parallel.core.expert_parallel.experts import GroupedExperts
from hyper_parallel.core.pipeline import Pipeline
from hyper_parallel.models import Llama, LlamaConfig
from hyper_parallel.models.hf_weights import export_huggingface
from hyper_parallel.trainer import loop
from hyper_parallel.trainer.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ExpertsConfig,
    ParallelConfig,
    TrainConfig,
)
from hyper_parallel.trainer.loop import train

TINY = Config(
    model=LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4
    ),
    experts=ExpertsConfig(num_experts=4, expert_intermediate_size=8),
    data=DataConfig(max_bytes=200_000),
    train=TrainConfig(steps=1, batch_size=4, seq_len=8, eval_sequences=4, device="cpu"),
)

# -- checkpoints -----------------------------------------------------------------------------------------------------


def full() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0).view(2, 3), "none": torch.empty(0, 4), "step": torch.tensor(3)}


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Load what `whole` is, into tensors with other values."""
    found = {name: torch.full_like(tensor, 7) for name, tensor in full().items()}
    load_checkpoint(folder, found)
    return found


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a record as a program would that counts its checksum, too."""
    path = folder / record.NAME
    text = path.read_text()
    content = json.loads(text[text.find("\n") + 1 : -len(record._END)])
    change(content)
    text = json.dumps(content)
    path.write_text(record._BEGIN % (record.VERSION, zlib.crc32(text.encode())) + text + record._END)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda content: content["tensors"]["w"].update(boxes=[]), id="no box"),
        pytest.param(lambda content: content["tensors"]["w"]["boxes"][0].__setitem__(3, [1, 3]), id="half a box"),
        pytest.param(lambda content: content["tensors"]["w"]["boxes"][0].__setitem__(2, [1, 0]), id="beyond the end"),
        pytest.param(lambda content: content["tensors"]["w"]["boxes"][0].__setitem__(3, [6]), id="other dims"),
        pytest.param(lambda content: content["tensors"]["w"]["boxes"][0].__setitem__(1, 10**9), id="beyond the file"),
        pytest.param(lambda content: content["tensors"]["w"]["boxes"][0].__setitem__(1, -8), id="before the file"),
        pytest.param(lambda content: content["tensors"]["w"]["boxes"][0].__setitem__(0, -1), id="file -1"),
        pytest.param(lambda content: content["tensors"]["w"]["boxes"][0].__setitem__(0, 9), id="file 9"),
        pytest.param(lambda content: content["files"][0].update(name="../elsewhere"), id="another folder"),
        pytest.param(lambda content: content["files"][0].update(name=".."), id="the folder above"),
        pytest.param(lambda content: content["files"][0].update(crc32=[]), id="no checksums"),
        pytest.param(lambda content: content.update(block=0), id="blocks of nothing"),
        pytest.param(lambda content: content.update(world_size="two"), id="a word"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any]):
    folder = tmp_path / "saved"
    save_checkpoint(folder, full())
    rewrite(folder, lambda content: None)
    assert load(folder)["w"].equal(full()["w"]), "a record that was only written again is as good"
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
        load(folder)


def test_no_byte_of_a_checkpoint_can_change_without_a_word(tmp_path: Path):
    folder = tmp_path / "saved"
    save_checkpoint(folder, full(), {"lr": 0.1}, per_rank={"rng": torch.arange(3)})
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for place in range(0, len(good), 3):
            path.write_bytes(good[:place] + bytes([good[place] ^ 0x20]) + good[place + 1 :])
            with pytest.raises(CheckpointError):
                load(folder)
        path.write_bytes(good)
    assert load(folder)["w"].equal(full()["w"])


@pytest.mark.sim
@pytest.mark.parametrize("background", [False, True])
def test_no_rank_is_left_waiting_if_the_first_cannot_look_into_the_folder(tmp_path: Path, background: bool):
    def body() -> list[Any]:
        run = Checkpointer(tmp_path / "run", async_save=background)
        if dist.get_rank() == 0:
            run._clean = lambda: os.listdir(tmp_path / "gone")
        ended = [run.save(1, full()), run.wait()]
        run.__dict__.pop("_clean", None)
        ended += [run.save(2, full()), run.wait()]
        run.close()
        return [(saved.step, saved.error) for saved in ended if saved is not None]

    with pytest.warns(UserWarning, match="step 1 has not been saved"):
        found = sim.run(body, 2)
    assert found[0] == found[1]
    (first, error), second = found[0]
    assert first == 1
    assert "No such file or directory" in error
    assert second == (2, None)


@pytest.mark.parametrize("background", [False, True])
def test_an_error_that_nobody_thought_of_is_told(tmp_path: Path, background: bool):
    def surprise(stage: str) -> None:
        if stage == "done":
            raise KeyError("surprise")

    run = Checkpointer(tmp_path / "run", async_save=background, on_stage=surprise)
    if background:
        run.save(1, full())
    with pytest.raises(KeyError, match="surprise"):
        run.wait() if background else run.save(1, full())


def test_a_save_under_way_is_finished_before_a_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    over = threading.Event()
    write, backward, error = Writer.write_data, loop.forward_backward, loop.nonfinite_error

    def slow(self: Writer, *args: Any) -> Any:
        if self._step == 2:
            over.wait()
        return write(self, *args)

    def told(*args: Any, **kwargs: Any) -> Any:
        over.set()
        return error(*args, **kwargs)

    steps = iter((1.0, 1.0))

    def broken(*args: Any) -> torch.Tensor:
        return backward(*args) * next(steps, math.nan)

    monkeypatch.setattr(Writer, "write_data", slow)
    monkeypatch.setattr(loop, "forward_backward", broken)
    monkeypatch.setattr(loop, "nonfinite_error", told)
    run = replace(TINY, checkpoint=CheckpointConfig(folder=str(tmp_path), every=1, background=True))
    run = run.with_changes("train", {"steps": 4})
    with pytest.raises(ArithmeticError, match="the loss is nan"):
        train(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


# -- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.sim
def test_weights_of_the_router_stay_float32_where_experts_are_a_unit_of_their_own(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    forward = GroupedExperts._run

    def watched(self: GroupedExperts, x: Tensor, chosen: Tensor, weights: Tensor, *sent: object) -> Tensor:
        seen.append((x.dtype, weights.dtype))
        return forward(self, x, chosen, weights, *sent)

    monkeypatch.setattr(GroupedExperts, "_run", watched)
    run = replace(TINY, parallel=ParallelConfig(param_dtype="bf16", ep=2)).with_changes("train", {"model": "moe"})
    sim.run(train, 2, args=(run,))
    assert set(seen) == {(torch.bfloat16, torch.float32)}


# -- weights from elsewhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 5e5}, {"norm_eps": 1e-3}, {"num_attention_heads": 2, "num_key_value_heads": 2}],
    ids=lambda change: next(iter(change)),
)
def test_weights_are_not_taken_from_a_model_that_computes_something_else(tmp_path: Path, change: dict[str, Any]):
    folder = tmp_path / "weights"
    export_huggingface(Llama.build(TINY.model).state_dict(), TINY.model, folder)
    run = TINY.with_changes("train", {"start_from": str(folder)})
    train(run)
    with pytest.raises(ValueError, match=f"another {next(iter(change))} than the run's"):
        train(replace(run, model=replace(TINY.model, **change)))


# -- pipelines -------------------------------------------------------------------------------------------------------


class Held:
    """Something that a graph holds."""


class Holding(torch.autograd.Function):
    """The identity, which keeps something in its graph that backward does not free, and counts what there is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: list[Any]) -> torch.Tensor:
        ctx.held = Held()
        held.append(weakref.ref(ctx.held))
        held[0] = max(held[0], sum(each() is not None for each in held[1:]))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held: list[Any] = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Holding.apply(self.linear(x), self.held)


def most_graphs(schedule: str, micro_batches: int) -> int:
    """Run a step on two stages; return how many micro-batches' graphs this rank had at a time."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    layer, rows = Layer(), torch.ones(micro_batches, 4)
    Pipeline([layer], mesh, schedule, micro_batches, lambda output, target: (output - target).square().sum()).step(
        rows, rows
    )
    return layer.held[0]


@pytest.mark.sim
def test_the_last_stage_keeps_no_graph_of_a_micro_batch_that_is_through():
    assert sim.run(most_graphs, 2, args=("1f1b", 6)) == [2, 1]
    assert sim.run(most_graphs, 2, args=("gpipe", 6)) == [6, 6], "all forwards come before the first backward"
