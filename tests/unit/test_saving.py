"""What a run saves, what it goes on from, and what it refuses to."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sim
from hyper_parallel.core.checkpoint import folders
from hyper_parallel.core.checkpoint.api import read_metadata
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ExpertsConfig,
    ParallelConfig,
    TrainConfig,
)
from hyper_parallel.trainer.record import TrainResult, read_log
from hyper_parallel.trainer.stop import StopRequest
from hyper_parallel.trainer.trainer import train

TINY = Config(
    model=LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    ),
    data=DataConfig(max_bytes=200_000, ignored=0.1),
    experts=ExpertsConfig(num_experts=4, expert_intermediate_size=8, bias_update_rate=0.05),
    train=TrainConfig(steps=4, batch_size=4, seq_len=8, accumulate=2, eval_sequences=4, device="cpu"),
)


def saving(folder: Path, base: Config = TINY, **changes: Any) -> Config:
    return replace(base, checkpoint=CheckpointConfig(**{"folder": str(folder), "every": 1, "keep": 9, **changes}))


def numbers(result: TrainResult) -> list[tuple[float, float, float | None]]:
    return [(record.loss, record.grad_norm, record.valid_loss) for record in result.steps]


def forget_after(folder: Path, step: int) -> None:
    """Leave the folder as a run that was killed after this step."""
    for path in sorted(folder.glob("step-*")):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def go_on(config: Config, world_size: int) -> TrainResult:
    return train(config) if world_size == 1 else sim.run(train, world_size, args=(config,))[0]


@pytest.mark.sim
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("model", "tied", "world_size", "degrees"),
    [
        ("llama", False, 1, {}),
        ("llama", True, 2, {"pp": 2}),
        ("moe", False, 2, {"ep": 2}),
        ("llama", True, 4, {"dp_shard": 2, "tp": 2}),
    ],
    ids=["alone", "pipeline, tied", "experts", "dp x tp, tied"],
)
def test_a_run_goes_on_bit_for_bit(
    tmp_path: Path, model: str, tied: bool, world_size: int, degrees: dict[str, int], background: bool
) -> None:
    base = replace(TINY, model=replace(TINY.model, tie_embeddings=tied), parallel=ParallelConfig(**degrees))
    config = saving(tmp_path, base.with_changes("train", {"model": model}), background=background)
    whole = go_on(config, world_size)
    assert (whole.first_step, whole.save_failures) == (1, ())
    assert numbers(go_on(base.with_changes("train", {"model": model}), world_size)) == numbers(whole), "saving shows"
    forget_after(tmp_path, 2)
    rest = go_on(config, world_size)
    assert rest.first_step == 3
    assert numbers(rest) == numbers(whole)[2:]
    assert rest.valid_loss == whole.valid_loss


@pytest.mark.sim
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_other_degrees_go_on_from_it(tmp_path: Path, model: str) -> None:
    base = replace(TINY, model=replace(TINY.model, tie_embeddings=True), parallel=ParallelConfig(param_dtype="fp64"))
    config = saving(tmp_path, base.with_changes("train", {"model": model}))
    whole = train(config)
    others = [(2, {"pp": 2}), (2, {"tp": 2}), (4, {"dp_replicate": 2, "cp": 2})]
    others += [(2, {"ep": 2})] if model == "moe" else [(2, {"engine": "hsdp"})]
    before: tuple[int, dict[str, Any]] = (1, {})
    for world_size, degrees in [*others, (1, {})]:
        forget_after(tmp_path, 2)
        rest = go_on(config.with_changes("parallel", degrees), world_size)
        for found, expected in zip(rest.steps, whole.steps[2:], strict=True):
            numbers_of = [(record.loss, record.grad_norm) for record in (found, expected)]
            assert numbers_of[0] == pytest.approx(numbers_of[1], rel=1e-9), f"{degrees}, saved by {before}"
        assert rest.valid_loss == pytest.approx(whole.valid_loss, rel=1e-9), f"{degrees}, saved by {before}"
        before = (world_size, degrees)


def test_a_tied_head_is_saved_once(tmp_path: Path) -> None:
    tied = replace(TINY, model=replace(TINY.model, tie_embeddings=True)).with_changes("train", {"steps": 1})
    train(saving(tmp_path / "tied", tied))
    train(saving(tmp_path / "two", TINY.with_changes("train", {"steps": 1})))
    names = {kind: set(read_metadata(tmp_path / kind / "step-00000001").tensors) for kind in ("tied", "two")}
    assert names["two"] - names["tied"] == {name for name in names["two"] if "head.weight" in name} != set()
    assert names["tied"] < names["two"]


def test_nothing_is_left_to_do_after_the_last_step(tmp_path: Path) -> None:
    config = saving(tmp_path)
    train(config)
    again = train(config)
    assert (again.steps, again.first_step, again.valid_loss) == ((), 5, None)
    longer = train(config.with_changes("train", {"steps": 5}))
    assert (len(longer.steps), longer.first_step) == (1, 5)


@pytest.mark.parametrize(
    ("section", "changes", "told"),
    [
        ("model", {"hidden_size": 32}, "hidden_size: 16 there, 32 here"),
        ("model", {"tie_embeddings": True}, "tie_embeddings: False there, True here"),
        ("train", {"model": "moe"}, "kind: 'llama' there, 'moe' here"),
        ("parallel", {"param_dtype": "fp64"}, "precision: 'fp32' there, 'fp64' here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, section: str, changes: dict[str, Any], told: str
) -> None:
    config = saving(tmp_path).with_changes("train", {"steps": 1})
    train(config)
    with pytest.raises(ValueError) as caught:
        train(config.with_changes(section, changes))
    assert str(caught.value).startswith(f"cannot go on from {tmp_path / 'step-00000001'}: it is of another model\n")
    assert told in str(caught.value)
    assert str(caught.value).endswith("\n  try: the [model] and [experts] it was saved with, or another folder")


def test_a_longer_sequence_is_no_other_model(tmp_path: Path) -> None:
    train(saving(tmp_path).with_changes("train", {"steps": 1}))
    assert train(saving(tmp_path).with_changes("train", {"steps": 2, "seq_len": 300})).first_step == 2


@pytest.mark.sim
def test_starting_anew_in_a_folder_of_another_run_is_refused_on_every_rank(tmp_path: Path) -> None:
    train(saving(tmp_path).with_changes("train", {"steps": 1}))
    anew = saving(tmp_path, resume=False)
    told = (
        f"cannot start anew in this folder: it holds the checkpoints of another run\n"
        f"  there is: {tmp_path / 'step-00000001'}\n  try: another folder, or go on with --resume"
    )

    def body() -> str:
        with pytest.raises(ValueError) as caught:
            train(anew)
        return str(caught.value)

    assert sim.run(body, 2) == [told] * 2
    assert train(replace(anew, checkpoint=replace(anew.checkpoint, folder=str(tmp_path / "new")))).first_step == 1


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    train(saving(tmp_path, every=2, keep=1))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000004"]


def test_without_every_only_the_end_is_saved(tmp_path: Path) -> None:
    train(saving(tmp_path, every=0))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000004"]


@pytest.mark.sim
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(tmp_path: Path, world_size: int) -> None:
    whole, stop = go_on(TINY, world_size), StopRequest()
    log = tmp_path / "log.jsonl"
    config = saving(tmp_path / "run", every=0).with_changes("train", {"log": str(log)})

    def on_step(record: Any) -> None:
        if record.step == 1:
            stop.request("SIGTERM")

    arguments = (config, on_step, stop)
    first = train(*arguments) if world_size == 1 else sim.run(train, world_size, args=arguments)[0]
    assert first.stopped == "SIGTERM"
    assert [record.step for record in first.steps] == [1, 2], "the request came after step 1 was over"
    assert first.valid_loss is None
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002"]
    rest = go_on(config, world_size)
    assert (rest.stopped, rest.first_step) == (None, 3)
    assert numbers(first) + numbers(rest) == numbers(whole)
    assert [record.step for record in read_log(log)] == [1, 2, 3, 4], "the log goes on, too"


@pytest.mark.sim
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_disk_that_is_full_for_a_while_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, world_size: int
) -> None:
    whole = go_on(TINY, world_size)
    real = folders.os.rename
    full = True

    def rename(old: Any, new: Any) -> None:
        if full and "step-00000002" in str(new):
            raise OSError(28, "No space left on device")
        real(old, new)

    monkeypatch.setattr(folders.os, "rename", rename)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = go_on(saving(tmp_path, background=background), world_size)
    assert numbers(result) == numbers(whole)
    (failure,) = result.save_failures
    assert failure.startswith("step 2: cannot save")
    assert "No space left on device" in failure
    names = [path.name for path in sorted(tmp_path.iterdir()) if path.name.startswith("step-")]
    assert names == ["step-00000001", "step-00000003", "step-00000004"]


def test_a_damaged_checkpoint_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    config = saving(tmp_path).with_changes("train", {"steps": 1})
    train(config)
    (data, *_) = sorted((tmp_path / "step-00000001").glob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-3] ^= 1
    data.write_bytes(content)
    with pytest.raises(RuntimeError, match="step-00000001"):
        train(config.with_changes("train", {"steps": 2}))


def test_the_place_in_the_text_is_saved(tmp_path: Path) -> None:
    train(saving(tmp_path).with_changes("train", {"steps": 3}))
    extra = read_metadata(tmp_path / "step-00000003").extra
    assert extra is not None
    assert extra["progress"] == {"steps": 3, "samples": 12, "skipped": 0}
    assert extra["model"]["kind"] == "llama"
    json.dumps(extra)
