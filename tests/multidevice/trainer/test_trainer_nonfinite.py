"""A loss that is not finite, in whole runs: what each policy does, the same on every rank."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sim
from hyper_parallel.core.checkpoint.writer import Writer
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer import loop
from hyper_parallel.trainer.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ExpertsConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from hyper_parallel.trainer.guards import NonFiniteError
from hyper_parallel.trainer.loop import train
from hyper_parallel.trainer.parallelize import Parallelized, ShareOfLoss
from hyper_parallel.trainer.report import read_log

TINY = Config(
    model=LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    ),
    data=DataConfig(max_bytes=200_000),
    experts=ExpertsConfig(num_experts=4, expert_intermediate_size=8, bias_update_rate=0.05),
    train=TrainConfig(steps=4, batch_size=4, seq_len=8, accumulate=2, eval_sequences=4, device="cpu"),
)
ARRANGED = [(2, {"dp_shard": 2}), (2, {"tp": 2}), (2, {"pp": 2}), (4, {"dp_replicate": 2, "cp": 2})]
pytestmark = pytest.mark.sim


def with_policy(policy: str, folder: Path, **changes: Any) -> Config:
    log = str(folder / "log.jsonl")
    return TINY.with_changes("train", {"on_nonfinite": policy, "log": log, **changes})


@pytest.fixture
def break_steps(monkeypatch: pytest.MonkeyPatch):
    """Make the loss infinite in some steps, in one micro-batch of one rank; of all ranks, where all have the same."""

    def set_up(steps: set[int], rank: int | None = 0) -> None:
        real = ShareOfLoss.__call__

        def broken(self: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = real(self, logits, targets)
            if not torch.is_grad_enabled():
                return loss
            calls = self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
            step, micro_batch = divmod(calls - 1, TINY.train.accumulate)
            here = dist.get_rank() if dist.is_initialized() else 0
            return loss * math.inf if (step + 1 in steps and micro_batch == 1 and rank in (here, None)) else loss

        monkeypatch.setattr(ShareOfLoss, "__call__", broken)

    return set_up


@pytest.mark.tier("test")
@pytest.mark.parametrize(("world_size", "degrees"), ARRANGED)
def test_stop_is_the_same_error_on_every_rank(
    tmp_path: Path, break_steps: Any, world_size: int, degrees: dict[str, int]
) -> None:
    break_steps({2}, rank=None if "tp" in degrees else world_size - 1)
    config = replace(with_policy("stop", tmp_path), parallel=ParallelConfig(**degrees))

    def body() -> str:
        with pytest.raises(NonFiniteError) as caught:
            train(config)
        return str(caught.value)

    raised = sim.run(body, world_size)
    assert raised[0].startswith("cannot take step 2: the loss is ")
    assert "try: on_nonfinite='dump'" in raised[0]
    assert raised == [raised[0]] * world_size
    assert [record.step for record in read_log(tmp_path / "log.jsonl")] == [1]


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("model", ["llama", "moe"])
@pytest.mark.parametrize(("world_size", "degrees"), ARRANGED)
def test_skip_leaves_the_step_out_and_goes_on(
    tmp_path: Path, break_steps: Any, world_size: int, degrees: dict[str, int], model: str
) -> None:
    break_steps({2}, rank=None if "tp" in degrees else world_size - 1)
    config = replace(with_policy("skip", tmp_path, model=model), parallel=ParallelConfig(**degrees))
    results = sim.run(train, world_size, args=(config,))
    assert [record.skipped for record in results[0].steps] == [False, True, False, False]
    assert [math.isfinite(record.loss) for record in results[0].steps] == [True, False, True, True]
    assert math.isfinite(results[0].valid_loss)
    for result in results:
        assert [record.skipped for record in result.steps] == [False, True, False, False]
        assert [repr(loss) for loss in result.losses] == [repr(loss) for loss in results[0].losses]
    assert [record.skipped for record in read_log(tmp_path / "log.jsonl")] == [False, True, False, False]
    assert [math.isfinite(record.loss) for record in read_log(tmp_path / "log.jsonl")] == [True, False, True, True]
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # which is called for NaN and Infinity: neither is JSON


def test_a_skipped_step_changes_nothing(tmp_path: Path, break_steps: Any) -> None:
    """Step 3 starts from the weights that step 1 has left; without a learning rate all steps do."""
    still = replace(TINY, optimizer=OptimizerConfig(lr=0.0, weight_decay=0.0))
    expected = train(still).losses
    break_steps({2})
    found = train(replace(with_policy("skip", tmp_path), optimizer=still.optimizer)).losses
    assert [found[0], *found[2:]] == [expected[0], *expected[2:]]


def test_too_many_in_a_row_are_too_many(tmp_path: Path, break_steps: Any) -> None:
    break_steps({2, 3, 4})
    with pytest.raises(NonFiniteError, match=r"cannot take step 4: .*after 2 steps in a row that were skipped"):
        train(with_policy("skip", tmp_path, max_skips=2))
    assert [record.skipped for record in read_log(tmp_path / "log.jsonl")] == [False, True, True]


def test_the_count_of_skips_survives_a_restart(tmp_path: Path, break_steps: Any) -> None:
    saving = CheckpointConfig(folder=str(tmp_path / "saved"), every=1)
    config = replace(with_policy("skip", tmp_path, max_skips=2, steps=3), checkpoint=saving)
    break_steps({2, 3})
    train(config)
    break_steps({1})  # of the run that goes on: step 4
    with pytest.raises(NonFiniteError, match=r"cannot take step 4: .*after 2 steps in a row"):
        train(config.with_changes("train", {"steps": 4}))


def test_dump_writes_what_each_rank_knows(tmp_path: Path, break_steps: Any) -> None:
    break_steps({2}, rank=1)
    config = replace(with_policy("dump", tmp_path), parallel=ParallelConfig(dp_shard=2))
    with pytest.raises(NonFiniteError, match=r"look at .*nonfinite/step-00000002"):
        sim.run(train, 2, args=(config,))
    folder = tmp_path / "nonfinite" / "step-00000002"
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [report["samples"] for report in reports] == [[4, 5], [6, 7]]
    assert [report["step"] for report in reports] == [2, 2]
    assert all(any(row["grad_nonfinite"] for row in report["parameters"]) for report in reports)
    assert not any(row["value_nonfinite"] for report in reports for row in report["parameters"])


def test_a_dump_blames_what_is_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping by a norm that is NaN would make all gradients NaN before they are written down."""
    original = loop.forward_backward

    def poisoned(model: Parallelized, *rest: Any) -> torch.Tensor:
        loss = original(model, *rest)
        grad: Any = dict(model.named_parameters())["layers.1.mlp.w2.weight"].grad
        grad.view(-1)[3] = math.nan
        return loss

    monkeypatch.setattr(loop, "forward_backward", poisoned)
    with pytest.raises(NonFiniteError, match="the gradient norm is nan"):
        train(with_policy("dump", tmp_path))
    dumped = json.loads((tmp_path / "nonfinite" / "step-00000001" / "rank-0.json").read_text())
    blamed = {row["name"]: row["grad_nonfinite"] for row in dumped["parameters"] if row["grad_nonfinite"]}
    assert blamed == {"layers.1.mlp.w2.weight": 1}


def test_a_save_under_way_is_finished_before_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_steps: Any
) -> None:
    over = threading.Event()
    write, error = Writer.write_data, loop.nonfinite_error

    def slow(self: Writer, *args: Any) -> Any:
        if self._step == 2:
            over.wait()
        return write(self, *args)

    def told(*args: Any, **kwargs: Any) -> Any:
        over.set()
        return error(*args, **kwargs)

    monkeypatch.setattr(Writer, "write_data", slow)
    monkeypatch.setattr(loop, "nonfinite_error", told)
    break_steps({3})
    with pytest.raises(ArithmeticError, match="the loss is inf"):
        train(replace(TINY, checkpoint=CheckpointConfig(folder=str(tmp_path), every=1, background=True)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_rate_that_is_far_too_high_ends_the_run(tmp_path: Path) -> None:
    config = replace(with_policy("stop", tmp_path), optimizer=OptimizerConfig(lr=1e30, warmup_steps=0))
    with pytest.raises(NonFiniteError, match=r"cannot take step [23]: the (loss|gradient norm) is (nan|inf)"):
        sim.run(train, 2, args=(config,))


@pytest.mark.tier("test", each=2)
@pytest.mark.parametrize(("world_size", "degrees"), [(1, {}), *ARRANGED])
def test_a_batch_without_a_target_is_no_step(tmp_path: Path, world_size: int, degrees: dict[str, int]) -> None:
    few = replace(TINY.with_changes("data", {"ignored": 0.97}), parallel=ParallelConfig(**degrees))
    config = few.with_changes("train", {"steps": 8, "on_nonfinite": "skip"})
    found = sim.run(train, world_size, args=(config,))[0]
    assert [record.skipped for record in found.steps] == [record.tokens == 0 for record in found.steps]
    assert {record.tokens == 0 for record in found.steps} == {True, False}
    assert all(math.isfinite(record.loss) == (record.tokens > 0) for record in found.steps)

    def body() -> str:
        with pytest.raises(NonFiniteError) as caught:
            train(few.with_changes("train", {"steps": 8}))
        return str(caught.value)

    raised = sim.run(body, world_size)
    first = next(record.step for record in found.steps if record.skipped)
    assert raised[0].startswith(f"cannot take step {first}: no target of its batch counts")
    assert "try: a larger batch_size" in raised[0]
    assert raised == [raised[0]] * world_size
