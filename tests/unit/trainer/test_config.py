"""Configs: what a file says, and what it says when it is wrong; the rate over time; checks before the start."""

from __future__ import annotations

import dataclasses
import re
import typing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.core.machine.toml_file import Schema, move
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models import LlamaConfig
from hyper_parallel.models.lora import LoraConfig
from hyper_parallel.platform import PlatformUnavailableError
from hyper_parallel.platform.cpu import CpuPlatform
from hyper_parallel.trainer import config as config_module
from hyper_parallel.trainer.config import (
    RUN,
    CheckpointConfig,
    Config,
    DataConfig,
    ExpertsConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    changed_text,
    config_text,
    load_config,
)
from hyper_parallel.trainer.loop import train
from hyper_parallel.trainer.optimizer import learning_rate
from hyper_parallel.trainer.preflight import available_memory, check_lora, check_machine, check_platform, plan_run

TOO_LONG = "has a name of more than 255 bytes, which file systems do not have"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("run.toml").write_text(text)
        return "run.toml"

    return write


def test_a_file_changes_what_it_names(write) -> None:
    config = load_config(
        write(
            """
            [model]
            hidden_size = 64
            [optimizer]
            lr = 1              # a whole number is a number
            [train]
            steps = 7
            device = "cpu"
            memory_limit_gb = 2
            [parallel]
            dp_replicate = 2
            reshard_after_forward = false
            """
        )
    )
    assert config == Config(
        model=LlamaConfig(hidden_size=64),
        optimizer=OptimizerConfig(lr=1.0),
        train=TrainConfig(steps=7, device="cpu", memory_limit_gb=2.0),
        parallel=ParallelConfig(dp_replicate=2, reshard_after_forward=False),
    )
    assert type(config.optimizer.lr) is float


def test_an_empty_file_is_the_default(write) -> None:
    assert load_config(write("")) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsteps = 3\nstpes = 3\n", ":3: unknown key 'stpes' in [train]\n  stpes = 3\n  try: 'steps'"),
        ("[data]\nx = 3\n", ":2: unknown key 'x' in [data]\n  x = 3\n  try: one of 'path', 'pattern', 'max_bytes',"),
        ("[model]\nsteps = 3\n", ":2: unknown key 'steps' in [model]\n  steps = 3\n  try: train.steps"),
        ("[trian]\nsteps = 3\n", ":1: unknown section [trian]\n  [trian]\n  try: 'train'"),
        ("steps = 3\n", ":1: 'steps' stands outside of a section\n  steps = 3\n  try: train.steps"),
        ("[train]\n  steps = 'many'\n", ":2: steps is a str, not an int\n  steps = 'many'\n  try: steps=1"),
        ("[train]\nsteps = true\n", ":2: steps is a bool, not an int\n  steps = true\n  try: "),
        ("train = { steps = 'x' }\n", ":1: steps is a str, not an int\n  train = { steps"),
        (
            "[optimizer]\nbeta1 = 0.5\nlr = -1.0\n",
            ":3: lr must be a finite number of at least 0\n  lr = -1.0\n  try: lr=0",
        ),
        (
            "[train]\n  steps 3\n",
            ":2: not valid TOML: expected '=' after a key in a key/value pair\n  steps 3\n        ^\n  try: key = ",
        ),
    ],
)
def test_a_mistake_is_pointed_at(write, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'cannot read the config run.toml{message}')}"):
        load_config(write(text))


# Wrong values of options that are words; those below are looked at by who reads the file, the device or the model.
WRONG_WORDS = {
    "optimizer.schedule": "cosinus",
    "train.model": "lama",
    "train.device": "cdua",
    "train.on_nonfinite": "skp",
    "parallel.schedule": "1f1br",
    "parallel.layers_per_stage": "1;2",
    "parallel.engine": "hdsp",
    **{f"precision.{key.name}": "bf61" for key in dataclasses.fields(PrecisionConfig)},
    "parallel.checkpointing": "ful",
    "experts.score": "soft",
}
FREE_WORDS = {"lora.targets", "data.path", "data.pattern", "data.tokenizer", "checkpoint.folder"}
FREE_WORDS |= {f"train.{name}" for name in ("log", "start_from", "hardware", "tensorboard")}


def options():
    for section in dataclasses.fields(Config):
        kind = type(getattr(Config(), section.name))
        for name, hint in typing.get_type_hints(kind).items():
            yield f"{section.name}.{name}", hint


def wrong_value(option: str, hint: object) -> object:
    if hint is bool:
        return "yes"
    if option in WRONG_WORDS:
        return WRONG_WORDS[option]
    return "" if option in FREE_WORDS else -2


@pytest.mark.parametrize(("option", "hint"), [each for each in options() if each[0] != "lora.targets"])
def test_a_wrong_value_is_refused_whatever_the_other_options_are(option: str, hint: object) -> None:
    """`Config()` has one rank: no pipeline, no experts, no context parallelism, no tensor parallelism."""
    section, _, name = option.partition(".")
    with pytest.raises((TypeError, ValueError), match=name):
        Config().with_changes(section, {name: wrong_value(option, hint)})


def test_a_word_close_to_the_right_one_is_corrected() -> None:
    for option, wrong in WRONG_WORDS.items():
        section, _, name = option.partition(".")
        with pytest.raises(ValueError, match=r"\n  try: (\w+=)?'\w") as caught:
            Config().with_changes(section, {name: wrong})
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"stages_per_rank": 3}}, "cannot schedule the pipeline: '1f1b' has exactly 1 per rank"),
        ({"parallel": {"layers_per_stage": "2,2"}}, "cannot use layers_per_stage='2,2': there is no pipeline"),
        ({"parallel": {"etp": 3}}, "cannot use etp=3 with tp=1"),
    ],
)
def test_what_no_run_can_have_is_refused_where_it_is_not_used(changes: dict[str, dict[str, Any]], message: str) -> None:
    config = Config()
    for section, values in changes.items():
        config = config.with_changes(section, values)
    with pytest.raises(ValueError, match=message):
        plan_run(config, 1)


def test_targets_of_no_adapters_are_those_of_the_model() -> None:
    with pytest.raises(ValueError, match=r"the model has no linear layer 'q_prj'[^$]*try: 'q_proj'"):
        check_lora(Config(lora=LoraConfig(targets="q_prj")))
    check_lora(Config(lora=LoraConfig(targets="q_proj")))


def test_every_section_is_written_and_read(write) -> None:
    config = Config(
        data=DataConfig(ignored=0.25),
        train=TrainConfig(model="moe", tensorboard="board", on_nonfinite="skip", max_skips=3, stuck_after_s=60.0),
        experts=ExpertsConfig(num_experts=16, score="softmax", aux_loss_weight=0.0),
        lora=LoraConfig(targets="q_proj,o_proj"),
        parallel=ParallelConfig(dp_shard=2, ep=2, schedule="interleaved", layers_per_stage="1,1,1,1", compile=True),
        checkpoint=CheckpointConfig(folder="saved", every=10, keep=2, background=True, resume=False),
    )
    assert load_config(write(config_text(config))) == config
    assert config.parallel.stage_sizes() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nmodel = 'mole'\n", "there is no kind of model 'mole'"),
        ("[data]\nignored = 1.0\n", "ignored must be at least 0, below 1"),
        (
            "[experts]\nexperts_per_token = 9\n",
            "cannot send each token to some of num_experts=8: experts_per_token must be from 1 to 8",
        ),
        ("[parallel]\nlayers_per_stage = '1,\N{SUPERSCRIPT TWO}'\n", "layers_per_stage must be numbers with commas"),
        (
            "[parallel]\ncheckpointing = 'full every \N{SUPERSCRIPT TWO}'\n",
            "a number is expected where '\N{SUPERSCRIPT TWO}' is",
        ),
        ("[data]\npath = ''\n", "path is empty"),
        ("[data]\npattern = '/text/*.txt'\n", "pattern is a path of its own, and chooses files within the folder"),
        ('[train]\nlog = "a\\u0000b"\n', "log has a zero byte"),
        (f"[checkpoint]\nfolder = 'out/{'r' * 256}'\n", f"folder {TOO_LONG}"),
        (f"[train]\nlog = '{'é' * 128}/log'\n", f"log {TOO_LONG}"),
        (f"[optimizer]\nlr = {'9' * 400}\n", "lr must be a finite number of at least 0"),
    ],
)
def test_a_mistake_in_any_section_shows_its_line(write, text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_config(write(text))
    first, shown, *_ = str(caught.value).splitlines()
    assert first == f"cannot read the config run.toml:2: {message}"
    assert shown.strip() == text.splitlines()[1]


@pytest.mark.parametrize("text", [f"[train]\nsteps = {'9' * 5000}\n", "a = " + "[" * 3000 + "]" * 3000])
def test_what_the_reader_of_toml_gives_up_on_is_no_toml(write, text: str) -> None:
    with pytest.raises(ValueError, match=r"^cannot read the config run\.toml: not valid TOML: (exceeds|maximum rec)"):
        load_config(write(text))


OLD = """\
[train]
steps = 7
[parallel]
dp_replicate = 2
checkpointing = "full"
"""


def test_a_file_of_0_1_is_read(write) -> None:
    run = load_config(write(OLD))
    assert (run.train.steps, run.parallel.dp_replicate, run.parallel.checkpointing) == (7, 2, "full")
    assert load_config(write(config_text(run))) == run
    assert load_config(write(f"schema = 1\n{OLD}")) == run
    assert load_config(write(f'{OLD}param_dtype = "bf16"\n')).precision == PrecisionConfig("bf16")


def test_an_upgrade_is_a_line_of_the_schema(write, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = move("parallel.replicas", "parallel.dp_replicate")
    monkeypatch.setattr(config_module, "RUN", Schema("config", ((moved,), (move("train.lr", "optimizer.lr"),))))
    old = OLD.replace("dp_replicate", "replicas") + "[optimizer]\nbeta1 = 0.5\n"
    run = load_config(write(old.replace("steps", "lr = 0.25\nsteps")))
    assert (run.parallel.dp_replicate, run.optimizer.lr, run.optimizer.beta1) == (2, 0.25, 0.5)
    assert config_text(run).startswith("schema = 2\n")
    with pytest.raises(ValueError, match=r"run.toml:3: lr must be a finite number of at least 0\n  lr = -2\n"):
        load_config(write(OLD.replace("[parallel]", "lr = -2\n[parallel]")))
    with pytest.raises(ValueError, match=r"run.toml:\d: unknown key 'replicas' in \[parallel\]"):
        load_config(write(f"schema = 1\n{old}"))
    with pytest.raises(ValueError, match=r"run.toml:\d: unknown key 'lr' in \[train\]\n.*\n  try: "):
        load_config(write(f"{OLD}[optimizer]\nlr = 1\n".replace("steps", "lr = 2\nsteps")))


KEPT = """\
# mine
[train]
steps = 7  # few
log = "a.jsonl"

# the degrees
[parallel]
tp = 2  # in a node

# where it lies
[checkpoint]
every = 3"""


def test_a_changed_run_keeps_the_comments_and_the_order_of_its_file(write) -> None:
    run = load_config(write(KEPT)).with_changes("parallel", {"tp": 4, "pp": 2}).with_changes("data", {"ignored": 0.5})
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, log=None))
    text = changed_text(RUN.read("run.toml"), run)
    expected = KEPT.replace('log = "a.jsonl"\n', "").replace("tp = 2  # in a node", "tp = 4  # in a node\npp = 2")
    assert text == f"schema = 1\n{expected}\n\n[data]\nignored = 0.5\n"
    assert load_config(write(text)) == run
    assert changed_text(RUN.read("run.toml"), run) == text, "nothing has changed"
    assert changed_text(None, Config()) == "schema = 1\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("schema = 2", "a newer hyper_parallel wrote it: this one reads schema 1 and older\n  schema = 2\n  try: pip"),
        ("schema = '1'", "schema is the version of the format\n  schema = '1'\n  try: schema = 1"),
    ],
)
def test_a_schema_that_is_not_known_is_refused(write, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^cannot read the config run.toml:1: {message}"):
        load_config(write(f"{line}\n{OLD}"))


def test_a_model_with_experts_has_their_shape() -> None:
    config = Config(train=TrainConfig(model="moe", seq_len=1_000), experts=ExpertsConfig(num_experts=16))
    shape = config.shape()
    assert (shape.num_experts, shape.max_seq_len) == (16, 1_000)  # type: ignore[attr-defined]
    assert shape.num_parameters() > Config().shape().num_parameters()


def test_a_missing_file_names_its_neighbour(write) -> None:
    write("")
    with pytest.raises(
        ValueError, match=r"^cannot read the config 'rum.toml': no such file\n  TOML .*: run.toml\n  try: 'run.toml'$"
    ):
        load_config("rum.toml")


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 7\r\n")  # as Notepad saves it
    assert load_config(path).train.steps == 7


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the config '.*': is a directory"):
        load_config(tmp_path)


def test_flags_change_single_keys_and_are_checked_alike() -> None:
    config = Config().with_changes("train", {"steps": 5, "seed": None})
    assert (config.train.steps, config.train.seed) == (5, 0)
    with pytest.raises(ValueError, match="steps must be a finite number of at least 1"):
        Config().with_changes("train", {"steps": 0})


def test_rotary_tables_grow_with_the_sequence() -> None:
    assert Config(train=TrainConfig(seq_len=1_000)).shape().max_seq_len == 1_000
    assert Config(train=TrainConfig(seq_len=8)).shape().max_seq_len == LlamaConfig().max_seq_len


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1), ("wsd", 1.0, 0.1)],
)
def test_the_rate_warms_up_and_decays(schedule: str, middle: float, last: float) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=10, schedule=schedule, min_lr_ratio=0.1)
    rates = [learning_rate(step, 110, config) for step in range(110)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[59] == pytest.approx(middle)
    assert rates[-1] == pytest.approx(last)
    assert all(a >= b for a, b in pairwise(rates[9:])), "never up again"


def test_a_run_shorter_than_its_warmup_has_a_rate() -> None:
    assert learning_rate(2, 3, OptimizerConfig(lr=1.0, warmup_steps=10)) == pytest.approx(0.3)


def test_the_plan_infers_dp_shard() -> None:
    dims = plan_run(Config(parallel=ParallelConfig(dp_replicate=2)), world_size=8)
    assert (dims.dp_replicate, dims.dp_shard) == (2, 4)


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (Config(parallel=ParallelConfig(dp_shard=3)), 8, "is 3, not world_size=8"),
        (Config(), 3, r"batch_size=16 sequences over 3 .*\n.*\n  try: batch_size = 15 or 18"),
        (Config(train=TrainConfig(batch_size=2)), 8, r"\n  try: batch_size = 8$"),
        (
            Config(train=TrainConfig(accumulate=3)),
            4,
            r"4 data-parallel ranks x accumulate=3 evenly: .*\n.*\n.* 12 or 24",
        ),
        (
            Config(model=LlamaConfig(vocab_size=128)),
            1,
            "its 256 byte values need a vocab_size of 256\n  model.vocab_size: 128",
        ),
    ],
)
def test_plans_that_cannot_work_are_refused(config: Config, world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_run(config, world_size)


class _Npu(CpuPlatform):
    """As far as its backend matters."""

    device_type, backend = "npu", "hccl"


def test_what_the_device_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = Config(precision=PrecisionConfig("fp64"), train=TrainConfig(steps=1, device="npu"))
    message = (
        "cannot train with param_dtype='fp64': hccl does not reduce float64\n"
        "  device: npu   backend: hccl\n"
        "  try: param_dtype='fp32' (--precision fp32), or --device cpu"
    )
    with pytest.raises(ValueError, match="cannot train") as caught:
        check_platform(config, _Npu())
    assert str(caught.value) == message
    check_platform(config, CpuPlatform())
    check_platform(Config(precision=PrecisionConfig("bf16")), _Npu())
    snapshots = Config(train=TrainConfig(steps=1, device="cpu", memory_snapshot=True))
    with pytest.raises(ValueError, match=r"cannot write memory snapshots: on cpu no allocator counts tensors"):
        train(snapshots)
    with pytest.raises(PlatformUnavailableError, match=r"cannot record memory: CPU .* has no allocator"):
        CpuPlatform().recorded_memory(tmp_path)
    monkeypatch.setattr("hyper_parallel.trainer.loop.get_platform", lambda device: _Npu())
    with pytest.raises(ValueError, match="hccl does not reduce float64"):
        train(config)


LARGE = Config(model=LlamaConfig(hidden_size=8_192, num_hidden_layers=80, intermediate_size=28_672))


def test_a_model_that_is_too_large_is_refused_with_the_numbers(tmp_path: Path) -> None:
    config = LARGE.with_changes("train", {"memory_limit_gb": 64.0})
    message = (
        r"cannot run in 64.0 GiB, which are allowed by memory_limit_gb: it needs at least 8\.4 TiB\n"
        r"  72,483,086,336 parameters   ranks on this machine: 8, of which each has 810.1 GiB of weights and AdamW "
        r"moments, 270.0 GiB of gradients, [\d.]+ GiB of activations\n  try: fewer ranks"
    )
    with pytest.raises(ValueError, match=message):
        check_machine(config, ParallelDims(dp_replicate=8, world_size=8), 8, on_host=True)
    check_machine(config, ParallelDims(dp_replicate=8, world_size=8), 8, on_host=False)


def test_the_free_memory_is_the_default_limit() -> None:
    free = available_memory()
    assert free is not None
    assert 2**28 < free < 2**46
    with pytest.raises(ValueError, match="are free on this machine"):
        check_machine(LARGE, ParallelDims(dp_shard=64, world_size=64), 64, on_host=True)


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    dims = ParallelDims(world_size=1)
    for log, message in ((tmp_path, "it is a folder"), (file / "train.jsonl", "'.*file' is no folder")):
        config = Config(data=DataConfig(max_bytes=200_000), train=TrainConfig(log=str(log)))
        with pytest.raises(ValueError, match=f"cannot write the log '.*': {message}"):
            check_machine(config, dims, 1, on_host=True)
    check_machine(config.with_changes("train", {"log": str(tmp_path / "new" / "a.jsonl")}), dims, 1, on_host=True)
    assert not (tmp_path / "new").exists(), "checking leaves no trace"
