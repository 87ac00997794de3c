"""Checkpoints of a run: what it saves, what it resumes from, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as rates

import sim
from hyper_parallel.core.checkpoint import folders
from hyper_parallel.core.checkpoint.api import load_checkpoint, read_metadata, save_checkpoint
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer import loop
from hyper_parallel.trainer import saving as saver
from hyper_parallel.trainer.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ExpertsConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from hyper_parallel.trainer.data import IGNORED, RecordLoader, samples, state_from, state_text
from hyper_parallel.trainer.guards import StopRequest
from hyper_parallel.trainer.loop import train
from hyper_parallel.trainer.report import TrainResult, read_log
from hyper_parallel.trainer.saving import export_checkpoint, run_to_go_on_from

pytestmark = pytest.mark.tier("test")

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


@pytest.mark.tier("full", each=4)
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


@pytest.mark.tier("full", each=2)
@pytest.mark.sim
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_other_degrees_go_on_from_it(tmp_path: Path, model: str) -> None:
    base = replace(TINY, model=replace(TINY.model, tie_embeddings=True), precision=PrecisionConfig("fp64"))
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


LEGS: tuple[tuple[int, dict[str, Any], dict[str, Any]], ...] = (  # world size, degrees, and what else changes
    (2, {}, {}),
    (4, {}, {"accumulate": 1}),
    (4, {"tp": 2, "cp": 2, "ulysses_degree": 1}, {"accumulate": 4}),
    (2, {"pp": 2}, {"batch_size": 8}),
)


@pytest.mark.tier("full")
@pytest.mark.sim
def test_a_run_goes_on_in_the_middle_of_its_data_whatever_the_degrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps on each kind of ranks read what one device reads in one go, past the end of the first epoch."""
    (tmp_path / "text").write_bytes(bytes(number * 7 % 251 for number in range(450)))  # 50 windows to train on
    base = TINY.with_changes("data", {"path": str(tmp_path / "text"), "ignored": 0.0})
    base = base.with_changes("train", {"steps": 2 * len(LEGS), "batch_size": 16})
    read: list[tuple[range, list[list[int]]]] = []

    def recording(text: Any, part: range, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = samples(text, part, *arguments)
        read.append((part, inputs.tolist()))
        return inputs, targets

    monkeypatch.setattr(loop, "samples", recording)
    go_on(base, 1)
    whole = [sample for _, inputs in read for sample in inputs]
    assert len({str(sample) for sample in whole[:50]}) == 50, "an epoch has every window once"
    assert len({str(sample) for sample in whole}) == 50
    used, config = 0, saving(tmp_path / "run", base)
    for number, (world_size, degrees, changes) in enumerate(LEGS):
        config = replace(config.with_changes("train", {**changes, "steps": 2 * number + 2}), parallel=ParallelConfig())
        read.clear()
        result = go_on(config.with_changes("parallel", degrees), world_size)
        assert (result.first_step, len(result.steps)) == (2 * number + 1, 2)
        assert len(read) == 2 * world_size
        for _ in range(2):
            batch = range(used, used + config.train.batch_size)
            parts = {part.start: (part, inputs) for part, inputs in read if part.start in batch}
            assert [sample for first in sorted(parts) for sample in parts[first][0]] == list(batch)
            assert [sample for first in sorted(parts) for sample in parts[first][1]] == whole[used : batch.stop]
            assert all(inputs == parts[part.start][1] for part, inputs in read if part.start in batch)
            used = batch.stop


def test_a_run_from_before_the_text_was_shuffled_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, text = saving(tmp_path).with_changes("train", {"steps": 1}), saver._text
    with monkeypatch.context() as patch:
        patch.setattr(saver, "_text", lambda config: {key: text(config)[key] for key in text(config) if key != "order"})
        train(config)
    assert run_to_go_on_from(config) == (1, ["order: 'drawn' then, 'shuffled' now"])
    train(config.with_changes("train", {"steps": 2}))
    assert run_to_go_on_from(config) == (2, [])


def test_a_text_that_has_changed_is_told(tmp_path: Path) -> None:
    """The windows of an epoch are in another order then, and some are seen again."""
    text = tmp_path / "text.txt"
    text.write_text("the first text " * 200)
    config = saving(tmp_path / "run").with_changes("data", {"path": str(text)}).with_changes("train", {"steps": 1})
    train(config)
    assert run_to_go_on_from(config) == (1, [])
    config = config.with_changes("data", {"path": str(tmp_path / "link.txt")})
    (tmp_path / "link.txt").write_text("the other text " * 200)
    changes = run_to_go_on_from(config)
    assert changes is not None
    assert [change.split(":")[0] for change in changes[1]] == ["path", "crc32"]


def test_a_loader_that_forgets_goes_on_in_batches_of_another_size(tmp_path: Path) -> None:
    rows = torch.arange(16 * 9).view(16, 9)
    read = list[list[int]]()

    def make(size: int) -> Any:
        class Rows:
            def __iter__(self) -> Any:
                for some in rows.split(size):
                    read.append(some[:, 0].tolist())
                    yield some[:, :-1].contiguous(), some[:, 1:].contiguous()

        return Rows()

    config = saving(tmp_path, BASE.with_changes("train", {"batch_size": 4, "accumulate": 1}))
    train(config.with_changes("train", {"steps": 2}), data=lambda: make(4))
    read.clear()
    train(config.with_changes("train", {"steps": 3, "batch_size": 8}), data=lambda: make(8))
    assert read == [rows[:8, 0].tolist(), rows[8:, 0].tolist()], "the first is read past, the second trained on"


def test_records_in_another_order_than_before_are_told() -> None:
    def state(shuffle: int, seed: int) -> dict[str, Any]:
        loader = RecordLoader(RECORDS, BASE.with_changes("train", {"seed": seed}), shuffle=shuffle)
        next(iter(loader))
        return loader.state_dict()

    again = RecordLoader(RECORDS, BASE, shuffle=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(state(6, 0))
        again.load_state_dict({key: value for key, value in state(6, 0).items() if key != "order"})
        RecordLoader(RECORDS, BASE).load_state_dict(state(0, 1))
    for other in ((6, 1), (7, 0), (0, 0)):
        with pytest.warns(UserWarning, match=r"the order of before(?s:.*)now: shuffle=6, seed=0\n  try: "):
            again.load_state_dict(state(*other))


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
    ("section", "changes", "message"),
    [
        ("model", {"hidden_size": 32}, "hidden_size: 16 there, 32 here"),
        ("model", {"tie_embeddings": True}, "tie_embeddings: False there, True here"),
        ("train", {"model": "moe"}, "kind: 'llama' there, 'moe' here"),
        ("precision", {"param_dtype": "fp64"}, "precision: 'fp32' there, 'fp64' here"),
        ("precision", {"moments_dtype": "bf16"}, "moments: 'fp32' there, 'bf16' here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, section: str, changes: dict[str, Any], message: str
) -> None:
    config = saving(tmp_path).with_changes("train", {"steps": 1})
    train(config)
    with pytest.raises(ValueError) as caught:
        train(config.with_changes(section, changes))
    assert str(caught.value).startswith(f"cannot go on from {tmp_path / 'step-00000001'}: it is of another model\n")
    assert message in str(caught.value)
    where = {"model": "[model] and [experts]", "train": "model", "precision": "[precision]"}[section]
    assert str(caught.value).endswith(f"\n  try: the {where} it was saved with, or another folder")


@pytest.mark.parametrize("muon", [False, True])
def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, muon: bool) -> None:
    config = saving(tmp_path).with_changes("train", {"steps": 1}).with_changes("optimizer", {"muon": muon})
    train(config)
    other = config.with_changes("train", {"steps": 2}).with_changes("optimizer", {"muon": not muon})
    then, now = (str(each).lower() for each in (muon, not muon))
    message = rf"its optimizer is another one\n  muon: {then} there, {now} here\n  try: the optimizer it was saved with"
    with pytest.raises(ValueError, match=message):
        run_to_go_on_from(other)
    with pytest.raises(ValueError, match=message):
        train(other)
    assert len(train(config.with_changes("train", {"steps": 2})).losses) == 1


@pytest.mark.parametrize(
    "extra",
    [
        None,
        {"progress": {"steps": 1, "samples": 4, "skipped": 0}, "model": 3},
        {"progress": {"steps": 1, "samples": "4", "skipped": 0}, "model": {}},
        {"progress": {"steps": -1, "samples": 4, "skipped": 0}, "model": {}},
        {"progress": [], "model": {}},
        {"progress": {"steps": 1}, "model": {}},
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, extra: Any) -> None:
    save_checkpoint(tmp_path / "step-00000001", {}, extra)
    with pytest.raises(ValueError, match=r"not saved by hyper-parallel train\n  extra: .*\n  try: another folder"):
        train(saving(tmp_path))


def test_a_checkpoint_that_lacks_weights_is_not_exported(tmp_path: Path) -> None:
    train(saving(tmp_path / "run", every=0).with_changes("train", {"steps": 1}))
    found = tmp_path / "run" / "step-00000001"
    saved = read_metadata(found)
    some = {name: torch.empty(entry.shape) for name, entry in saved.tensors.items() if name.startswith("model.layers")}
    load_checkpoint(found, some, strict=False)
    save_checkpoint(tmp_path / "part", some, saved.extra)
    with pytest.raises(ValueError, match=r"model\.embed\.weight"):
        export_checkpoint(tmp_path / "part", tmp_path / "hf")
    assert not (tmp_path / "hf" / "config.json").exists()
    export_checkpoint(tmp_path / "run", tmp_path / "hf")
    assert (tmp_path / "hf" / "config.json").exists()


def test_a_longer_sequence_is_no_other_model(tmp_path: Path) -> None:
    train(saving(tmp_path).with_changes("train", {"steps": 1}))
    assert train(saving(tmp_path).with_changes("train", {"steps": 2, "seq_len": 300})).first_step == 2


@pytest.mark.sim
def test_starting_anew_in_a_folder_of_another_run_is_refused_on_every_rank(tmp_path: Path) -> None:
    train(saving(tmp_path).with_changes("train", {"steps": 1}))
    anew = saving(tmp_path, resume=False)
    message = (
        f"cannot start anew in this folder: it holds the checkpoints of another run\n"
        f"  there is: {tmp_path / 'step-00000001'}\n  try: another folder, or go on with --resume"
    )

    def body() -> str:
        with pytest.raises(ValueError) as caught:
            train(anew)
        return str(caught.value)

    assert sim.run(body, 2) == [message] * 2
    assert train(replace(anew, checkpoint=replace(anew.checkpoint, folder=str(tmp_path / "new")))).first_step == 1


@pytest.mark.sim
@pytest.mark.parametrize("background", [False, True])
def test_a_run_goes_back_to_a_step_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def steps() -> list[str]:
        return sorted(path.name.replace("step-0000000", "") for path in tmp_path.iterdir())

    config = saving(tmp_path, keep=3, background=background)
    whole = train(config.with_changes("train", {"steps": 5}))
    assert steps() == ["3", "4", "5"]
    missing = config.with_changes("checkpoint", {"resume_step": 2})
    message = (
        f"cannot load step 2 of {tmp_path}: there is no complete checkpoint of step 2\n"
        "  complete: step 3, step 4, step 5\n  try: one of those, or the latest"
    )
    with pytest.raises(RuntimeError) as caught:
        go_on(missing, 2)
    assert message in str(caught.value)
    back = config.with_changes("checkpoint", {"resume_step": 3}).with_changes("train", {"steps": 5})
    assert run_to_go_on_from(back) == (3, [])
    gone_back = train(back.with_changes("train", {"steps": 4}))
    assert gone_back.first_step == 4
    assert steps() == ["3", "4", "undone-4", "undone-5"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_to_go_on_from(back) == (4, []), "what torchrun restarts does not go back again"
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    again = train(back)
    assert numbers(again) == numbers(whole)[3:]
    assert steps() == ["3", "4", "5", "undone-4", "undone-4-2", "undone-5"]
    assert go_on(config.with_changes("train", {"steps": 6}), 2).first_step == 6, "the newest again"


def test_saving_needs_a_folder() -> None:
    for keep, asked in (
        (CheckpointConfig(every=2), "every 2 steps"),
        (CheckpointConfig(background=True), "in the background"),
    ):
        with pytest.raises(ValueError, match=f"cannot save {asked}: no folder is given"):
            train(replace(TINY, checkpoint=keep))


def test_going_back_needs_a_folder_to_go_back_in() -> None:
    for keep, message in (
        (CheckpointConfig(resume_step=3), "no folder is given\n  checkpoint.folder=None"),
        (CheckpointConfig(folder="out", resume=False, resume_step=3), "it is to start anew\n  checkpoint.folder='out'"),
    ):
        with pytest.raises(ValueError, match="cannot go back to step 3: " + re.escape(message)):
            train(replace(TINY, checkpoint=keep))
    with pytest.raises(ValueError, match="resume_step must be a finite number of at least 1"):
        CheckpointConfig(resume_step=0)


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
    assert (result.safe_step, result.last_save_failed) == (4, False)


@pytest.mark.sim
@pytest.mark.parametrize("background", [False, True])
def test_a_run_whose_last_save_failed_says_which_step_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def place(folder: Path, attempt: str) -> Path:
        if folder.name > "step-00000002":
            raise OSError(28, "No space left on device")
        return real(folder, attempt)

    real = folders.place
    monkeypatch.setattr(folders, "place", place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for world_size in (1, 2):
            result = go_on(saving(tmp_path, background=background), world_size)
            assert (result.safe_step, result.last_save_failed) == (2, True)
            assert len(result.save_failures) == 2
    monkeypatch.setattr(folders, "place", real)
    again = train(saving(tmp_path, background=background))
    assert (again.first_step, again.safe_step, again.last_save_failed) == (3, 4, False)
    nothing_to_do = train(saving(tmp_path))
    assert (nothing_to_do.safe_step, nothing_to_do.last_save_failed) == (4, False)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_refused_if_there_is_no_other(tmp_path: Path) -> None:
    config = saving(tmp_path).with_changes("train", {"steps": 1})
    train(config)
    damage(min((tmp_path / "step-00000001").glob("*.safetensors")))
    with pytest.raises(RuntimeError, match="step-00000001"):
        train(config.with_changes("train", {"steps": 2}))


@pytest.mark.sim
@pytest.mark.parametrize("file", ["data-00001.safetensors", "checkpoint.json"])
def test_a_run_goes_on_from_the_newest_checkpoint_that_is_sound_and_says_so(tmp_path: Path, file: str) -> None:
    config = saving(tmp_path / "run", every=1).with_changes("train", {"steps": 3})
    whole = sim.run(train, 2, args=(config,))[0]
    damage(tmp_path / "run" / "step-00000003" / file)
    with pytest.warns(UserWarning, match="step-00000003 cannot be loaded, and the one before is tried: ") as told:
        again = sim.run(train, 2, args=(config,))[0]
    assert len(told) == 1, "on rank 0 alone"
    assert again.first_step == 3
    assert numbers(again) == numbers(whole)[2:]
    there = sorted(path.name for path in (tmp_path / "run").glob("*step-*"))
    assert there == [f"step-0000000{step}" for step in (1, 2, 3)] + ["undone-step-00000003"]


@pytest.mark.sim
def test_a_checkpoint_is_not_taken_for_the_folder_of_a_run(tmp_path: Path) -> None:
    """It was begun anew in there."""
    run = tmp_path / "my run"
    config = saving(run).with_changes("train", {"steps": 1})
    train(config)
    inside = replace(config, checkpoint=CheckpointConfig(str(run / "step-00000001")))
    message = rf"it is a checkpoint, and not the folder of a run's\n.*\n  try: .*'{run}' --resume-step 1$"
    with pytest.raises(ValueError, match=message):
        run_to_go_on_from(inside)

    def body() -> str:
        with pytest.raises(ValueError, match=message) as caught:
            train(inside)
        return str(caught.value)

    assert len(set(sim.run(body, 2))) == 1
    assert not any(path.is_dir() for path in (run / "step-00000001").iterdir())


def test_what_has_the_name_of_a_checkpoint_does_not_end_a_run(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").write_text("precious")
    with pytest.warns(UserWarning, match="something else has that name"):
        result = train(saving(tmp_path))
    assert len(result.steps) == TINY.train.steps
    assert not result.last_save_failed
    assert len(result.save_failures) == 1
    assert (tmp_path / "step-00000001").read_text() == "precious"


def test_the_place_in_the_text_is_saved(tmp_path: Path) -> None:
    train(saving(tmp_path).with_changes("train", {"steps": 3}))
    extra = read_metadata(tmp_path / "step-00000003").extra
    assert extra is not None
    assert extra["progress"] == {"steps": 3, "samples": 12, "skipped": 0}
    assert extra["model"]["kind"] == "llama"
    json.dumps(extra)


class Counting:
    """A loader that counts upwards, and knows where it is."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        while True:
            self.place += 1
            ids = (torch.arange(16 * 9).view(16, 9) * 7 + 31 * self.place) % 256
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Forgetful(Counting):
    """A loader without a state: what was used is read again."""

    def __getattribute__(self, name: str) -> Any:
        if name.endswith("state_dict"):
            raise AttributeError(name)
        return super().__getattribute__(name)


RECORDS = [{"prompt": f"{number} + {number} = ", "completion": f"{2 * number}, of course. "} for number in range(29)]


class Streamed:
    """Records that know where they are, as those of datasets: each iteration begins where it was loaded."""

    def __init__(self) -> None:
        self.first = self.place = 0

    def __iter__(self) -> Any:
        self.place = self.first
        while self.place < len(RECORDS):
            self.place += 1
            yield RECORDS[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first, self.place = state["place"], 0  # it finds its place when it is read, and until then says another


class Unnumbered:
    """Records that can be read one after the other only."""

    def __iter__(self) -> Any:
        return iter(RECORDS)


BASE = TINY.with_changes("train", {"steps": 4, "batch_size": 16, "seq_len": 8})
LOADERS = {
    "with a state": Counting,
    "without": Forgetful,
    "records": lambda: RecordLoader(RECORDS, BASE),
    "records with a state": lambda: RecordLoader(Streamed(), BASE),
    "shuffled records": lambda: RecordLoader(RECORDS, BASE, shuffle=100),
    "shuffled records with a state": lambda: RecordLoader(Streamed(), BASE, shuffle=6),
    "shuffled records that are not numbered": lambda: RecordLoader(Unnumbered(), BASE, shuffle=29),
}


def test_records_are_read_one_after_the_other_and_over_again() -> None:
    config = BASE.with_changes("data", {"mask_prompts": False})
    text = "".join(each["prompt"] + each["completion"] for each in RECORDS).encode()
    batches = iter(RecordLoader(RECORDS, config))
    for number in range(20):
        inputs, targets = next(batches)
        stream = bytes(text[(number * 128 + place) % len(text)] for place in range(129))
        assert bytes(inputs.flatten().tolist()) == stream[:-1]
        assert bytes(targets.flatten().tolist()) == stream[1:]
    assert list(RecordLoader([], config)) == []
    long = [{"prompt": "p" * 700, "completion": "c"}] * 3
    for _, (_, targets) in zip(range(9), RecordLoader(long, BASE), strict=False):
        assert (targets != IGNORED).any(), "a batch in the middle of a prompt is left out"
    with pytest.raises(ValueError, match="none of their tokens counts as a target"):
        next(iter(RecordLoader([{"prompt": "p" * 700, "completion": ""}] * 3, BASE)))
    inputs, targets = next(iter(RecordLoader(RECORDS, BASE)))
    assert 0.3 < (targets == IGNORED).float().mean() < 0.6, "prompts do not count"
    with pytest.raises(ValueError, match="cannot read record 2 of the data: it has no text in 'text'"):
        next(iter(RecordLoader([RECORDS[0], {"body": ""}], config)))
    with pytest.raises(TypeError, match=r"records is a dict, not an iterable\n  records: {.*\n  try: .*split='train'"):
        RecordLoader({"train": RECORDS}, config)
    with pytest.raises(ValueError, match="the state is of something else"):
        RecordLoader(RECORDS, config).load_state_dict({"place": 3})


def order_of(records: Any, shuffle: int, seed: int = 0, passes: int = 3) -> list[int]:
    """The numbers of the records in the order in which a loader reads them."""
    config = BASE.with_changes("train", {"seed": seed})
    size, found, text = sum(len(each["prompt"] + each["completion"]) for each in RECORDS), b"", ""
    batches = iter(RecordLoader(records, config, shuffle=shuffle))
    while len(found) < size * passes:
        found += bytes(next(batches)[0].flatten().tolist())
    text = found[: size * passes].decode()
    return [int(each.partition(" + ")[0]) for each in text.split(", of course. ")[:-1]]


@pytest.mark.parametrize("shuffle", [29, 100, 6])
def test_shuffled_records_are_those_of_a_pass_in_an_order_of_its_own(shuffle: int) -> None:
    found = order_of(RECORDS, shuffle)
    passes = [found[first : first + 29] for first in (0, 29, 58)]
    assert all(sorted(each) == list(range(29)) for each in passes)
    assert len(set(map(tuple, passes))) == 3
    for each in passes:
        assert all(number // shuffle == place // shuffle for place, number in enumerate(each)), "within their block"
    assert found == order_of(Streamed(), shuffle) == order_of(Unnumbered(), shuffle)
    assert found != order_of(RECORDS, shuffle, seed=1)
    assert order_of(RECORDS, 0) == order_of(RECORDS, 1) == list(range(29)) * 3
    with pytest.raises(ValueError, match="shuffle must be at least 0"):
        order_of(RECORDS, -1)


@pytest.mark.parametrize("shuffle", [0, 6, 29])
@pytest.mark.parametrize("records", [lambda: RECORDS, Streamed, Unnumbered])
def test_records_go_on_from_any_place_within_a_block(records: Any, shuffle: int) -> None:
    """Over more than a pass; in blocks of 6 the 29 records stop at each of their places."""

    def batches(loader: RecordLoader, count: int) -> list[list[int]]:
        return [inputs.flatten().tolist() for inputs, _ in itertools.islice(loader, count)]

    config = BASE.with_changes("train", {"batch_size": 2})
    whole = batches(RecordLoader(records(), config, shuffle=shuffle), 64)
    places = set()
    for used in range(1, 61):
        stopped = RecordLoader(records(), config, shuffle=shuffle)
        batches(stopped, used)
        state = stopped.state_dict()
        places.add(state["read"] % 6)
        again = RecordLoader(records(), config, shuffle=shuffle)
        again.load_state_dict(state_from(state_text(state)))
        assert batches(again, 4) == whole[used : used + 4], f"after {used} batches, {state['read']} records"
    assert places == set(range(6))


@pytest.mark.tier("full", each=5)
@pytest.mark.sim
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_of_ones_own_goes_on_whatever_the_degrees(kind: str, tmp_path: Path) -> None:
    loader = LOADERS[kind]
    base = BASE.with_changes("train", {"steps": 7})  # more than a pass over the records
    whole = train(base, data=loader)
    assert whole.valid_loss is None
    config = saving(tmp_path, base)
    train(config.with_changes("train", {"steps": 2}), data=loader)
    degrees = config.with_changes("parallel", {"tp": 2})
    rest = sim.run(train, world_size=4, args=(degrees,), kwargs={"data": loader})[0]
    assert rest.first_step == 3
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-4)
    assert len(set(whole.losses)) == 7


SCHEDULERS = {
    "warmup": lambda opt: rates.SequentialLR(
        opt, [rates.LinearLR(opt, 0.1, total_iters=2), rates.ExponentialLR(opt, 0.5)], milestones=[2]
    ),
    "one cycle": lambda opt: rates.OneCycleLR(opt, max_lr=1e-2, total_steps=6),
    "plateau": lambda opt: rates.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=1.0),
}


@pytest.mark.sim
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_of_torch_goes_on_whatever_the_degrees(kind: str, tmp_path: Path) -> None:
    make = SCHEDULERS[kind]
    base = TINY.with_changes("train", {"steps": 5, "accumulate": 1})
    whole = train(base, lr_scheduler=make)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=base.optimizer.lr)
    scheduler, expected = make(optimizer), []
    for step in whole.steps:
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(*([step.loss] if kind == "plateau" else []))
    assert [step.lr for step in whole.steps] == expected
    assert len(set(expected)) > 2
    config = saving(tmp_path, base)
    train(config.with_changes("train", {"steps": 3}), lr_scheduler=make)
    degrees = config.with_changes("parallel", {"tp": 2})
    rest = sim.run(train, world_size=2, args=(degrees,), kwargs={"lr_scheduler": make})[0]
    assert [step.lr for step in rest.steps] == expected[3:]
    assert rest.losses == pytest.approx(whole.losses[3:], rel=1e-4)


def test_what_is_no_scheduler_is_refused() -> None:
    with pytest.raises(TypeError, match="lr_scheduler returns no scheduler of torch\n  returned: float"):
        train(TINY, lr_scheduler=lambda optimizer: 0.1)  # type: ignore[arg-type, return-value]


@pytest.mark.sim
def test_loaders_that_differ_among_ranks_are_refused_on_every_rank() -> None:
    config = TINY.with_changes("train", {"steps": 1, "batch_size": 16, "seq_len": 8})

    def body() -> str:
        def make() -> Counting:
            loader = Counting()
            loader.place = torch.distributed.get_rank()
            return loader

        with pytest.raises(ValueError, match="the ranks' loaders return other batches"):
            train(config, data=make)
        return "refused"

    assert sim.run(body, world_size=2) == ["refused"] * 2
