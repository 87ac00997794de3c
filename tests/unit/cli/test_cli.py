"""The command line as a new user tries it: one clear message and an exit code for every mistake, never a traceback."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
import warm
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

import sim
from benchmarks.published import page
from benchmarks.published.__main__ import app as published
from benchmarks.published.compare import Outcome
from hyper_parallel import cli
from hyper_parallel.cli import kit, runs
from hyper_parallel.core.machine.toml_file import read_value
from hyper_parallel.platform.cpu import CpuPlatform
from hyper_parallel.trainer.config import Config, checked_value, load_config
from hyper_parallel.trainer.loop import RankPlace
from hyper_parallel.trainer.report import (
    StepRecord,
    TrainingDisplay,
    TrainResult,
    largest_difference,
    loss_table,
    read_log,
    traffic_table,
)
from sim.mesh import UnknownOperation, estimate_run, find_machine
from sim.mesh.pricing.measure import cpu_name
from sim.prove.training import reduced_run
from sim.script import estimate as script_estimate
from sim.script import launch, options

TINY = """
[model]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
[data]
max_bytes = 200_000
[train]
steps = 2
batch_size = 4
seq_len = 8
eval_sequences = 4
device = "cpu"
log = "log.jsonl"
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    Path("tiny.toml").write_text(TINY)
    return tmp_path


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ("--dp-shard 3 --sim 8", ["cannot place 8 ranks on these", "is 3, not world_size=8", "try: dp_shard=-1"]),
        ("--dp-replicate 3 --sim 8", ["cannot infer dp_shard: world_size=8 is not divisible by", "dp_replicate=3"]),
        ("--sim 0", ["error: cannot simulate 0 ranks: there is at least one", "try: --sim 8"]),
        ("train.seqlen=64", ["cannot set train.seqlen: unknown key 'seqlen'", "try: 'seq_len'"]),
        ("trian.steps=4", ["cannot set trian.steps: unknown section [trian]", "try: train.steps"]),
        ("num_parameters=4", ["set num_parameters: it names no section", "try: one of 'model', 'experts'"]),
        ("steps=4", ["set steps: it names no section", "try: train.steps"]),
        ("train.steps=few", ["cannot use [train]: steps is a str, not an int", "try: steps=1"]),
        ("train.steps=3 --steps 4", ["cannot use train.steps=3: the key has two values", "train.steps: 4 and 3"]),
        ("a.toml b.toml", ["a run has one file", "try: a.toml, and keys such as"]),
        ("missing.toml", ["error: cannot read the config 'missing.toml': no such file"]),
        ("tony.toml", ["'tony.toml': no such file", "try: 'tiny.toml'"]),
        ("--device cuda --sim 4", ["on cuda: simulated ranks compute on the CPU", "leave out --device"]),
        (
            "--seq-len 10000000 --device cpu --memory-limit-gb 1e9",
            ["cannot use the training part of the text: it has", "try: a smaller seq_len, or more text"],
        ),
        (
            "--device cpu --memory-limit-gb 0.001",
            ["cannot run in 1.0 MiB, which are allowed by memory_limit_gb: it needs at least", "try: a smaller hid"],
        ),
        ("--device cpu --log-file .", ["error: cannot write the log '.': it is a folder"]),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(arguments: str, messages: list[str]) -> None:
    code, output = invoke("train", *arguments.split())
    assert code == cli.USER_ERROR
    assert [message for message in messages if message not in output] == [], output
    assert "Traceback" not in output
    assert not Path("out").exists(), "nothing may be written before the checks are done"


HUGE = "99999999999"
BEYOND = "100000000000000000000"
OF_A_STEP = ("estimate", "--hardware", "h100-sxm", "--devices", "2", "--model", "moe")


@pytest.mark.parametrize(
    ("arguments", "message", "seen", "hint"),
    [
        ((*OF_A_STEP, "--seq-len", HUGE), "cannot configure a run: the bytes of attention", "seq_len: ", "seq_len"),
        ((*OF_A_STEP, "--batch-size", HUGE + "0" * 6), "the bytes of what a step computes", "batch_size: ", ""),
        ((*OF_A_STEP, "--vocab-size", BEYOND), "vocab_size is beyond 9,223,372,036,854,775,807", BEYOND, "vocab_size"),
        ((*OF_A_STEP, "--hidden-size", "99999999992"), "the bytes of its parameters are beyond", "", "hidden_size"),
        ((*OF_A_STEP, "--max-seq-len", HUGE + "0" * 6), "the bytes of the rotary tables", "", "max_seq_len"),
        ((*OF_A_STEP, "--num-hidden-layers", HUGE), "num_hidden_layers is above 1,048,576", HUGE, "num_hidden_layers"),
        ((*OF_A_STEP, "--num-experts", HUGE), "num_experts is above 1,048,576", HUGE, "num_experts"),
        ((*OF_A_STEP, "--expert-intermediate-size", HUGE + "0" * 6), "its parameters are beyond", "", ""),
        ((*OF_A_STEP, "--accumulate", HUGE), "accumulate is above 1,048,576", HUGE, "accumulate"),
        (("estimate", "--hardware", "h100-sxm", "--dp-replicate", HUGE), f"world_size={HUGE} ranks", "", "1048576"),
        (("search", "--hardware", "h100-sxm", "--devices", HUGE), "num_devices is above", HUGE, "num_devices"),
        (("train", "--num-hidden-layers", HUGE), "num_hidden_layers is above 1,048,576", HUGE, "num_hidden_layers"),
        (
            ("train", "--head-size", "64", "--num-attention-heads", HUGE, "--num-key-value-heads", "3"),
            "num_attention_heads is above 1,048,576",
            HUGE,
            "num_attention_heads",
        ),
        (("train", "--device", "cpu", "--eval-sequences", HUGE), "cannot run in", HUGE, "eval_sequences"),
        (("train", "--seed", BEYOND), "seed is beyond 9,223,372,036,854,775,807", BEYOND, "a smaller seed"),
        (("demo", "--steps", BEYOND), "steps is beyond 9,223,372,036,854,775,807", BEYOND, "a smaller steps"),
        (
            ("plan", "--mesh", "dp=99999999", "--shape", "8,8", "--from", "dp,None", "--to", "None,None"),
            "number of ranks is above 1,048,576",
            "number of ranks: 99999999",
            "a smaller number of ranks",
        ),
        (("verify", "--mesh", "dp=99999999"), "number of ranks is above", "99999999", "a smaller number"),
        (("verify", "--devices", HUGE), f"cannot list world_size={HUGE} ranks", "world_size", "at most"),
        (("hardware", "measure", "--processes", "1", "--threads", HUGE), "threads must be from 1 to", HUGE, "threads="),
    ],
)
def test_numbers_that_nobody_can_count_to_are_refused_at_once(
    arguments: tuple[str, ...], message: str, seen: str, hint: str
) -> None:
    code, output = invoke(*arguments)
    assert code == cli.USER_ERROR, output
    first, *middle, last = output.splitlines()
    assert first.startswith("error: cannot ")
    assert message in first
    assert seen in "".join(middle)
    assert last.startswith("  try: ")
    assert hint in last


def test_more_than_the_memory_of_the_machine_is_one_message() -> None:
    code, output = invoke("verify", "--seq-len", HUGE)
    assert code == cli.FAILURE
    assert output.startswith("error: cannot go on: the memory of this machine is too small")
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--start-from", ""), "cannot start: start_from is empty"),
        (("train", "--checkpoint-dir", ""), "cannot use [checkpoint]: folder is empty"),
        (("train", "--data", ""), "cannot use [data]: path is empty"),
        (("verify", "--mesh", ""), "cannot read a mesh"),
        (("export", ".", "out", "--tokenizer", ""), "cannot export: tokenizer is empty"),
        (("export", ".", ""), "cannot export: folder is empty"),
        (("export", "", "out"), "cannot export: checkpoint is empty"),
    ],
)
def test_a_variable_that_is_not_set_is_no_answer(arguments: tuple[str, ...], message: str) -> None:
    """As in `--start-from "$FOLDER"`: nothing is trained anew, or written to the folder that one is in."""
    code, output = invoke(*arguments)
    assert code == cli.USER_ERROR
    assert output.startswith(f"error: {message}")
    assert "\n  try: " in output


@pytest.mark.parametrize("has_matplotlib", [True, False])
@pytest.mark.parametrize("command", ["estimate", "plot", "sim estimate"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, has_matplotlib: bool
) -> None:
    if not has_matplotlib:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys.modules["sim.mesh.estimate"], "estimate_job", pytest.fail)
    monkeypatch.setattr(script_estimate, "record_script", pytest.fail)
    Path("script.py").write_text("")
    arguments = {
        "estimate": ("estimate", "--model", "llama", "--hardware", "h100-sxm", "--plot", "out.xyz"),
        "plot": ("plot", "log.jsonl", "--out", "out.xyz"),
        "sim estimate": ("--nproc", "2", "--hardware", "h100-sxm", "--plot", "out.xyz", "script.py"),
    }[command]
    if command == "sim estimate":
        code, output = script_estimate.main(arguments), capsys.readouterr().err
    else:
        code, output = invoke(*arguments)
    blame = (
        "cannot write the picture 'out.xyz': 'xyz' is no format" if has_matplotlib else "cannot draw 'out.xyz': matpl"
    )
    assert (code, output.count("Traceback")) == (cli.USER_ERROR, 0)
    assert output.startswith(f"error: {blame}")
    assert "\n  try: " in output


@pytest.mark.tier("test")
def test_an_export_to_a_file_is_one_message() -> None:
    Path("tiny.toml").write_text(TINY)
    assert invoke("train", "tiny.toml", "--checkpoint-dir", "run")[0] == 0
    code, output = invoke("export", "run", "tiny.toml")
    assert code == cli.USER_ERROR
    assert output.startswith("error: cannot export to tiny.toml: rank 0 could not write\n  seen: ")


FULL = Path("/dev/full")


@pytest.mark.tier("test")
@pytest.mark.skipif(not FULL.exists(), reason="the system has no device that is full")
@pytest.mark.parametrize(
    "command",
    [
        ("hyper_parallel.cli", "--help"),
        ("hyper_parallel.cli", "--version"),
        ("hyper_parallel.cli", "hardware"),
        ("hyper_parallel.cli", "train", "--dump-config"),
        ("hyper_parallel.cli", "train", "tiny.toml", "--sim", "2"),
        ("sim", "--help"),
        ("sim", "run", "--help"),
    ],
    ids=" ".join,
)
def test_an_output_that_takes_nothing_more_is_one_message(command: tuple[str, ...]) -> None:
    Path("tiny.toml").write_text(TINY)
    with FULL.open("w") as full:
        process = warm.WarmPopen([sys.executable, "-m", *command], stdout=full, stderr=subprocess.PIPE, text=True)
        _, said = process.communicate(timeout=300)
    assert process.returncode == cli.FAILURE
    first, seen, hint = said.splitlines()
    assert first == "error: cannot write the output: no space left on device"
    assert seen.startswith("  seen: ")
    assert hint.startswith("  try: ")


@pytest.mark.tier("test")
@pytest.mark.parametrize("command", [("train", "tiny.toml", "--sim", "2"), ("hardware",)], ids=" ".join)
def test_a_reader_that_has_gone_is_told_nothing(command: tuple[str, ...]) -> None:
    Path("tiny.toml").write_text(TINY)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        arguments = [sys.executable, "-m", "hyper_parallel.cli", *command]
        process = warm.WarmPopen(arguments, stdout=gone, stderr=subprocess.PIPE, text=True)
        _, said = process.communicate(timeout=300)
    assert (process.returncode, said) == (cli.FAILURE, "")


@pytest.mark.parametrize(
    ("encoding", "name"), [("utf-8", "\udcff.txt"), ("ascii", "\N{LATIN SMALL LETTER E WITH ACUTE}")]
)
def test_names_that_the_output_cannot_write_are_written_otherwise(
    monkeypatch: pytest.MonkeyPatch, encoding: str, name: str
) -> None:
    """Names of files are bytes, which need not be of the encoding of the terminal."""
    written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", written)
    with kit.output_written():
        kit.stdout_console().print(f"log: {name}")
    said = f"log: {name}\n".encode(encoding, "backslashreplace")
    assert written.buffer.getvalue() == said  # type: ignore[attr-defined]


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_npu_without_torch_npu_says_what_to_install() -> None:
    code, output = invoke("train", "--device", "npu")
    assert code == cli.USER_ERROR
    assert output.startswith(
        "error: cannot use platform 'npu': the package torch_npu is not installed; try: pip install"
    )
    assert output.count("\n") == 1, "one sentence"


def test_words_with_values_change_keys_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config_of(monkeypatch, "optimizer.lr=1", "parallel.checkpointing=full every 2", "data.pattern='*.c'")
    assert (run.optimizer.lr, run.parallel.checkpointing, run.data.pattern) == (1.0, "full every 2", "*.c")
    assert invoke("verify", "tiny.toml", "parallel.dp_shard=2", "train.batch_size=4")[0] == 0


@pytest.mark.tier("test")
def test_a_reduced_run_is_the_one_that_is_verified() -> None:
    words = ("tiny.toml", "model.hidden_size=64", "parallel.dp_shard=2", "train.device=cuda", "--reduced")
    code, output = invoke("train", *words, "--dump-config")
    assert code == 0, output
    Path("small.toml").write_text(output)
    run = load_config("tiny.toml").with_changes("model", {"hidden_size": 64}).with_changes("parallel", {"dp_shard": 2})
    small = reduced_run(run, 2)[0].with_changes("train", {"steps": run.train.steps})
    assert load_config("small.toml") == replace(small, precision=run.precision)
    code, output = invoke("train", *words)
    assert code == 0, output
    assert output.startswith("reduced: hidden_size 64 -> ")
    assert "2 simulated ranks: step 2/2" in output
    code, output = invoke("train", *words, "lora.rank=2")
    assert (code, output.split(":")[1]) == (cli.USER_ERROR, " cannot train the reduced run of adapters")


@pytest.mark.parametrize("arguments", [("--steps", "many"), ("--colour", "red")])
def test_flags_that_do_not_parse_exit_with_2(arguments: tuple[str, ...]) -> None:
    code, output = invoke("train", *arguments)
    assert code == cli.USER_ERROR
    assert "Traceback" not in output


def test_no_flag_is_short_for_one_of_torchruns() -> None:
    """torchrun reads a flag of the script as its own where it is the beginning of one, or two, of its own."""
    from torch.distributed.run import get_args_parser
    from typer.main import get_command

    theirs = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    commands = dict(get_command(cli.app).commands)  # type: ignore[attr-defined]
    del commands["simulate"]  # which is started in torchrun's place
    ours = [
        flag
        for command in commands.values()
        for param in command.params
        for flag in param.opts
        if flag.startswith("--")
    ]
    assert "--log-file" in ours
    assert "--log-dir" in theirs
    assert [(flag, other) for flag in ours for other in theirs if other.startswith(flag)] == []


def test_sim_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, output = invoke("train", "--sim", "2")
    assert code == cli.USER_ERROR
    assert "cannot simulate 2 ranks: this process is a rank already\n  RANK=0, WORLD_SIZE=2\n" in output


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    code, output = invoke("train")
    assert code == cli.USER_ERROR
    assert "cannot read torchrun's environment: LOCAL_RANK and WORLD_SIZE not set\n  RANK=0\n" in output


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "2", "LOCAL_RANK": "0"}, "RANK counts from 0, up to 1 of WORLD_SIZE=2"),
        ({"RANK": "0", "LOCAL_RANK": "2"}, "LOCAL_RANK counts from 0, up to 1 of the ranks on a machine"),
        ({"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 is more than all ranks"),
        ({"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "http"}, "MASTER_PORT is no number"),
        ({"RANK": "\N{SUPERSCRIPT TWO}", "LOCAL_RANK": "0"}, "not all of it are numbers\n  RANK=\N{SUPERSCRIPT TWO}"),
    ],
)
def test_a_launcher_of_ones_own_that_is_wrong_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(f"cannot read torchrun's environment: {message}")):
        RankPlace.from_environment()


def test_ranks_without_a_meeting_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    code, output = invoke("train")
    assert code == cli.USER_ERROR
    assert "MASTER_ADDR and MASTER_PORT not set\n  RANK=0, LOCAL_RANK=0, WORLD_SIZE=2\n  try: start the ranks" in output


def test_only_the_first_rank_reports_what_all_ranks_find(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert invoke("train", "--steps", "0") == (cli.USER_ERROR, "")


def test_a_run_alone_writes_its_log_and_says_so() -> None:
    code, output = invoke("train", "tiny.toml", "--steps", "3", "--eval-every", "2")
    assert code == 0, output
    lines = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert ["valid_loss" in line for line in lines] == [False, True, True]
    mean = sum(line["loss"] for line in lines) / 3
    assert f"loss {lines[0]['loss']:.3f} -> {mean:.3f} (mean of the last 3 steps)" in output
    assert f"held-back text: loss {lines[-1]['valid_loss']:.3f}" in output
    assert output.splitlines()[-1] == "log: log.jsonl"


@pytest.mark.tier("test")
def test_a_run_that_memory_is_too_small_for_says_so() -> None:
    code, output = invoke("train", "tiny.toml", "--max-seq-len", str(2**45))
    assert code == cli.FAILURE
    assert "error: cannot go on: the memory of this machine is too small for the sizes that were asked for\n" in output
    assert "Traceback" not in output


def test_steps_that_were_skipped_are_no_part_of_the_mean() -> None:
    few = ("--steps", "8", "--data-ignored", "0.98", "--on-nonfinite", "skip")
    code, output = invoke("train", "tiny.toml", *few)
    assert code == 0, output
    records = read_log("log.jsonl")
    taken = [record.loss for record in records if not record.skipped]
    assert 0 < len(taken) < len(records)
    assert f"-> {sum(taken) / len(taken):.3f} (mean of the last {len(taken)} steps)" in output
    assert f"skipped: {8 - len(taken)} of 8 steps" in output


@pytest.mark.tier("test")
def test_what_is_predicted_stands_beside_what_is_measured() -> None:
    code, output = invoke("train", "tiny.toml", "--hardware", "laptop-cpu")
    assert code == 0, output
    predicted = re.search(r"^predicted: (.*) a step, (.*) tokens/s, (.*) in tensors; priced for A laptop", output, re.M)
    assert predicted, output
    rows = [line.split() for line in output[output.index("measured   predicted") :].splitlines()[:4]]
    assert [row[0] for row in rows] == ["measured", "step", "tokens/s", "memory"]
    assert re.fullmatch(rf"step [\d.]+ m?s {re.escape(predicted[1])} {rows[1][-2]} %", " ".join(rows[1]))
    told = read_log("log.jsonl")
    step = estimate_run(load_config("tiny.toml"), 1, "laptop-cpu")
    for record in told:
        assert record.predicted is not None
        assert record.predicted.seconds == step.time.step.value
        assert record.predicted.memory_bytes == step.memory.peak
        assert record.predicted.memory_before > 10 * 2**20
        assert record.grown_bytes < record.memory_bytes
    code, output = invoke("train", "tiny.toml", "--hardware", "laptop-cpu", "--no-predict")
    assert "predicted" not in output
    plain = read_log("log.jsonl")
    assert [record.predicted for record in plain] == [None] * len(plain)
    assert [record.loss for record in plain] == [record.loss for record in told]


NAMES = ("--hardware", "laptop-cpu")


@pytest.mark.parametrize(
    ("arguments", "written", "error", "said"),
    [
        ((), None, None, "CPU.* is: it was not measured; try: hyper-parallel hardware measure"),
        ((), "A Cray-1", None, "CPU.* is: out/hardware.toml describes another machine; try: hyper-parallel hardware"),
        (("--hardware", "h100-sxm"), None, None, "other hardware: h100-sxm communicates by nccl, and .* by gloo; try"),
        (NAMES, None, UnknownOperation("no price\n\n  op: aten.foo\n  try: another"), "no price; try: another"),
        (NAMES, None, AssertionError(), "AssertionError; try: --no-predict"),
    ],
)
def test_a_run_without_a_prediction_trains_and_says_why_in_a_line(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], written: str | None, error: Exception | None, said: str
) -> None:
    if written is not None:
        find_machine("laptop-cpu").write(Path("hardware.toml"))
        text = re.sub(r'^title = ".*"', f'title = "{written}"', Path("hardware.toml").read_text(), flags=re.M)
        Path("out").mkdir()
        Path("out/hardware.toml").write_text(text)
    if error is not None:

        def fails(*_: object) -> None:
            raise error

        monkeypatch.setattr(sys.modules["sim.mesh.estimate"], "estimate_run", fails)
    code, output = invoke("train", "tiny.toml", *arguments)
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if "predict" in line]
    assert re.search(f"^nothing is predicted: .*{said}", line), line


@pytest.mark.parametrize("arguments", [(), ("--no-predict",), ("--sim", "2")])
def test_hardware_that_nothing_describes_is_refused_also_where_nothing_is_predicted(arguments: tuple[str, ...]) -> None:
    code, output = invoke("train", "tiny.toml", "--hardware", "h100", *arguments)
    assert code == 2
    assert "cannot find the hardware 'h100': nothing has that name" in output
    assert "try: 'h100-sxm'" in output


def test_a_cpu_that_was_measured_is_found() -> None:
    title = f"{cpu_name()}, 2 processes of 1 cores, as measured"
    replace(find_machine("laptop-cpu"), title=title).write(Path("measured.toml"))
    Path("out").mkdir()
    Path("measured.toml").rename("out/hardware.toml")
    code, output = invoke("train", "tiny.toml")
    assert code == 0, output
    assert f"priced for {title} (this run: 1 of " in output


def test_simulated_ranks_are_not_compared_with_a_prediction() -> None:
    code, output = invoke("train", "tiny.toml", "--sim", "2", "--hardware", "laptop-cpu")
    assert code == 0, output
    assert "predict" not in output


def test_a_failure_while_training_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def burst(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(runs, "run_ranks", burst)
    code, output = invoke("train", "tiny.toml")
    assert code == cli.FAILURE
    assert "RuntimeError: out of luck" in output


def test_ctrl_c_is_exit_code_130_and_names_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run_ranks", interrupt)
    code, output = invoke("train", "tiny.toml")
    assert code == cli.INTERRUPTED
    assert output.splitlines()[-1] == "interrupted; the log so far is in log.jsonl"


@pytest.mark.tier("test")
@pytest.mark.sim
def test_simulated_ranks_give_the_losses_of_one_device() -> None:
    losses = []
    for extra in ((), ("--sim", "4", "--dp-replicate", "2")):
        code, output = invoke("train", "tiny.toml", *extra)
        assert code == 0, output
        losses.append([json.loads(line)["loss"] for line in Path("log.jsonl").read_text().splitlines()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 2


# By section: option, =key where it has another name, and what is given; nothing is given to a switch.
FLAGS = {
    "train": (
        "steps 7; batch-size 8; seq-len 16; accumulate 2; model moe; on-nonfinite skip; "
        "stuck-after=stuck_after_s 2.5; tensorboard board; no-predict; hardware h200; profile-steps 2; "
        "memory-snapshot; device cpu; eval-every 3; seed 5; log-file=log b.jsonl; memory-limit-gb 9; "
        "eval-sequences 2; max-skips 3"
    ),
    "checkpoint": "resume-step 3; checkpoint-dir=folder saved; save-every=every 4; keep 1; background; no-resume",
    "optimizer": (
        "lr 0.5; muon; warmup-steps 3; lr-schedule=schedule linear; min-lr-ratio 0.5; beta1 0.5; beta2 0.5; "
        "weight-decay 0.5; max-grad-norm 0.5"
    ),
    "parallel": (
        "dp-replicate 2; dp-shard 2; tp 2; cp 2; ulysses-degree 1; pp 2; ep 2; etp 1; fold-experts; "
        "ranks-per-node 8; schedule gpipe; layers-per-stage 1,2,1; engine hsdp; "
        "checkpointing selective; compile; stages-per-rank 2; no-reshard-after-forward; reduce-each; "
        "reshard-inputs; tp-chunks 2; whole-parameters"
    ),
    "precision": (
        "precision=param_dtype bf16; master-dtype fp32; moments-dtype fp32; frozen-dtype bf16; reduce-dtype fp32"
    ),
    "data": (
        "data=path texts; data-pattern=pattern *.md; data-bytes=max_bytes 999; tokenizer words; "
        "no-mask-prompts; data-ignored=ignored 0.5"
    ),
    "lora": "lora-rank=rank 4; lora-alpha=alpha 8; lora-dropout=dropout 0.1; lora-targets=targets q_proj,v_proj",
    "model": (
        "vocab-size 512; hidden-size 64; intermediate-size 80; num-hidden-layers 7; num-attention-heads 8; "
        "num-key-value-heads 2; max-seq-len 99; rope-theta 5e5; norm-eps 1e-6; init-std 0.01; tie-embeddings; "
        "head-size 16; qk-norm; rope-factor 8; rope-low-freq-factor 0.5; rope-high-freq-factor 8; "
        "rope-original-seq-len 64"
    ),
    "experts": (
        "num-experts 4; experts-per-token 1; num-shared-experts 0; expert-intermediate-size 24; "
        "num-dense-layers 1; score softmax; no-norm-weights; routed-scale 2.5; bias-update-rate 0; "
        "aux-loss-weight 0"
    ),
}


def flags() -> Iterator[tuple[str, str, str, str]]:
    for section, entries in FLAGS.items():
        for entry in entries.split("; "):
            word, _, given = entry.partition(" ")
            flag, _, key = word.partition("=")
            yield section, key or flag.removeprefix("no-").replace("-", "_"), f"--{flag}", given


def config_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Config:
    """Return the config that a command line asks for, without a check and without a run."""
    asked: list[Config] = []

    def keep(run: Config, sim: int | None) -> Config:
        asked.append(run)
        raise ValueError("seen")

    monkeypatch.setattr(runs, "check_run", keep)
    assert invoke("train", "tiny.toml", *arguments) == (cli.USER_ERROR, "error: seen\n")
    return asked[0]


@pytest.mark.parametrize(("section", "key", "flag", "given"), [*flags()])
def test_every_flag_changes_its_key_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, section: str, key: str, flag: str, given: str
) -> None:
    expected = checked_value(section, key, read_value(given) if given else not flag.startswith("--no-"))
    plain = config_of(monkeypatch)
    assert getattr(getattr(plain, section), key) != expected or (section, key) == ("train", "device")
    changed = config_of(monkeypatch, flag, *([given] if given else []))
    assert changed == plain.with_changes(section, {key: expected})
    assert getattr(getattr(changed, section), key) == expected
    assert config_of(monkeypatch, f"{section}.{key}={given or str(expected).lower()}") == changed, "the same in words"


def test_every_flag_of_train_is_in_the_table() -> None:
    from typer.main import get_command

    command = get_command(cli.app).commands["train"]  # type: ignore[attr-defined]
    known = {param.name for param in command.params if param.opts[0].startswith("--")}
    given = {flag.removeprefix("--no-").removeprefix("--").replace("-", "_") for _, _, flag, _ in flags()}
    assert known - given == {"sim", "reduced", "start_from", "dump_config"}, "these are read elsewhere"


def test_no_log_flag_and_no_log_key_write_to_a_folder_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tiny.toml").write_text(TINY.replace('log = "log.jsonl"\n', ""))
    assert config_of(monkeypatch).train.log == "out/train.jsonl"


@pytest.mark.tier("full")
@pytest.mark.sim
def test_a_run_with_several_dimensions_says_what_it_does_and_goes_on() -> None:
    flags = ("--sim", "4", "--model", "moe", "--ep", "2", "--pp", "2", "--accumulate", "2", "--checkpoint-dir", "saved")
    Path("tiny.toml").write_text(TINY.replace("num_hidden_layers = 1", "num_hidden_layers = 2"))
    code, output = invoke("train", "tiny.toml", *flags)
    assert code == 0, output
    assert output.startswith("Llama with 8 experts per layer, ")
    assert "4 ranks: ep=2 x pp=2" in output
    code, output = invoke("train", "tiny.toml", *flags)
    assert code == 0, output
    assert "nothing to do: the checkpoint is of the last step, 2\n" in output
    code, output = invoke("train", "tiny.toml", *flags, "--steps", "3")
    assert code == 0, output
    assert "went on from step 2\n" in output
    code, output = invoke("train", "tiny.toml", *flags, "--steps", "3", "--no-resume")
    assert code != 0
    assert "cannot start anew in this folder: it holds the checkpoints of another run" in output
    assert [json.loads(line)["step"] for line in Path("log.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--pp", "2", "--sim", "2"), ["'1f1b' needs at least as many micro-batches as stages", "try: accumulate=2"]),
        (("--model", "mole"), ["error: cannot find the model: there is no model 'mole'", "try: 'moe'"]),
        (("--ep", "2", "--sim", "2"), ["cannot split experts over ep=2: model 'llama' has none"]),
        (("--tp", "3", "--sim", "3"), ["num_attention_heads=4 is not divisible by tp=3"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_in_the_parallel_plan_is_exit_code_2(arguments: tuple[str, ...], messages: list[str]) -> None:
    code, output = invoke("train", "--device", "cpu", *arguments)
    assert code == cli.USER_ERROR, output
    assert [message for message in messages if message not in output] == [], output
    assert not Path("out").exists()


def test_float64_on_a_device_that_does_not_reduce_it_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    class Npu(CpuPlatform):
        device_type, backend = "npu", "hccl"

    monkeypatch.setattr(runs, "get_platform", lambda device: Npu())
    code, output = invoke("train", "--device", "npu", "--precision", "fp64")
    assert code == cli.USER_ERROR, output
    assert "param_dtype='fp64': hccl does not reduce float64" in output


def run_of(losses: list[float], valid_loss: float) -> TrainResult:
    steps = [StepRecord(number, loss, 0.1, 1.0, 0.5, 100.0) for number, loss in enumerate(losses, start=1)]
    steps[-1] = replace(steps[-1], valid_loss=valid_loss)
    return TrainResult(tuple(steps), valid_loss, parameters=10, layout="1 rank", device="CPU")


def text_of(table: Table) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_comparison_shows_first_and_last_step_and_finds_the_largest_difference() -> None:
    ranks = run_of([5.0 - 0.1 * step for step in range(20)], 3.0)
    single = run_of([loss + (0.25 if step == 6 else 0.0) for step, loss in enumerate(ranks.losses)], 3.5)
    assert largest_difference(ranks, single) == (0.25, 7)
    lines = text_of(loss_table({"8 ranks": ranks, "one device": single}))
    assert lines[0] == "step 8 ranks one device difference"
    assert lines[1] == "1 5.000000 5.000000 0.0e+00"
    assert lines[-2] == "20 3.100000 3.100000 0.0e+00"
    assert lines[-1] == "validation 3.000000 3.500000 5.0e-01"
    assert [int(line.split()[0]) for line in lines[1:-1]] == [1, 3, 6, 9, 12, 15, 18, 20]
    assert (ranks.seconds, ranks.tokens_per_s) == (10.0, 100.0)


def test_traffic_is_summed_over_axes() -> None:
    rows = [sim.Row("dp_shard", "all_gather", 1_200, 3 * 2**20, 2**19), sim.Row("dp", "all_reduce", 2, 1_536, 100)]
    assert text_of(traffic_table(rows)) == [
        "axis op collectives received per rank",
        "dp_shard all_gather 1,200 3.0 MiB 512.0 KiB",
        "dp all_reduce 2 1.5 KiB 100 B",
        "all 1,202 3.0 MiB",
    ]


def test_a_terminal_shows_a_bar_that_moves() -> None:
    out = io.StringIO()
    run = run_of([5.0, 4.0], 3.0)
    with TrainingDisplay(Console(file=out, force_terminal=True, width=100), "8 ranks", steps=2) as display:
        display.on_step(run.steps[0])
        assert "1/2" in out.getvalue()
        display.on_step(run.steps[1])
    assert "2/2" in out.getvalue()
    assert "loss 4.000  100 tokens/s" in out.getvalue()


@pytest.mark.tier("full")
@pytest.mark.sim
def test_the_demo_compares_and_draws() -> None:
    code, output = invoke("demo", "--steps", "2", "--out", "here")
    assert code == 0, output
    for expected in ("8 ranks: dp_replicate=2 x dp_shard=4", "largest difference in 2 steps", "dp_shard", "all_gather"):
        assert expected in output
    assert Path("here/loss.png").read_bytes().startswith(b"\x89PNG")
    ranks, single = (Path("here", name).read_text().splitlines() for name in ("8_ranks.jsonl", "one_device.jsonl"))
    assert len(ranks) == len(single) == 2


@pytest.mark.parametrize(
    "arguments",
    [("demo", "--out", "{}"), ("train", "--log-file", "{}/x.jsonl"), ("plot", "log.jsonl", "--out", "{}/x.png")],
)
@pytest.mark.parametrize("place", ["/proc/nope", "a_file/folder"])
def test_where_output_goes_is_checked_first(
    arguments: tuple[str, ...], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where permissions do not tell; nothing has run by then."""
    Path("a_file").touch()
    monkeypatch.setattr(runs, "describe_run", lambda *args, **options: pytest.fail("it has begun"))
    result = CliRunner().invoke(cli.app, [each.format(place) for each in arguments])
    assert result.exit_code == 2
    assert "cannot write" in result.output
    assert "Traceback" not in result.output


def test_weights_of_integers_are_not_exported() -> None:
    result = CliRunner().invoke(cli.app, ["export", "run", "folder", "--dtype", "int4"])
    assert result.exit_code == 2
    assert "cannot export weights in int4: " in result.output


def test_the_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"hyper_parallel 0.1.0, torch {metadata.version('torch')}\n")


def test_a_run_is_dumped_as_the_file_that_starts_it() -> None:
    given = ("train", "tiny.toml", "--model", "moe", "--lr", "1e-5", "--tp", "2", "--compile", "--seed", "7")
    code, output = invoke(*given, "--dump-config")
    Path("dumped.toml").write_text(output)
    assert code == 0
    dumped = load_config("dumped.toml")
    assert (dumped.train.model, dumped.optimizer.lr, dumped.parallel.tp) == ("moe", 1e-5, 2)
    assert (dumped.parallel.compile, dumped.train.seed, dumped.model.hidden_size) == (True, 7, 16)
    assert invoke("train", "dumped.toml", "--dump-config") == (0, output)
    assert "[parallel]" in output
    assert not Path("log.jsonl").exists(), "nothing has run"


HELP_WITHOUT_TORCH = """
import sys
from typer.testing import CliRunner
from hyper_parallel.cli import app

helps = [[name, "--help"] for name in sys.argv[1:]]
for arguments in (["--help"], ["--version"], *helps, ["hardware", "measure", "--help"]):
    assert CliRunner().invoke(app, arguments).exit_code == 0, arguments
wrong = [["train", "--stepz", "1"], ["train", "--steps", "many"], ["estimate"], ["no-such-command"]]
wrong += [["simulate", "x.py"], ["simulate", "--nproc", "2", "--map-device", "tpu", "x.py"]]
for arguments in wrong:
    assert CliRunner().invoke(app, arguments).exit_code == 2, arguments
assert "torch" not in sys.modules and "sim" not in sys.modules
"""


def click_command(app: typer.Typer) -> Any:
    """The command line as a group of click's commands."""
    return typer.main.get_command(app)


@pytest.mark.tier("test")
def test_help_and_wrong_options_come_before_torch() -> None:
    commands = list(click_command(cli.app).commands)
    assert {"train", "simulate", "verify"} < {*commands}
    done = subprocess.run(
        [sys.executable, "-c", HELP_WITHOUT_TORCH, *commands], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_script_is_started_with_the_options_of_the_simulators_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[options.Launch] = []
    monkeypatch.setattr(launch, "run_script", lambda asked: found.append(asked) or 7)
    Path("x.py").touch()
    given = "--nproc-per-node 2 --standalone --rdzv_backend c10d --nnodes 1 --seed 3 --map-device npu --env A=1"
    given += " --env B=2 --show all --own rich --check-races --check-replicas --check-identity off x.py"
    given += " --help -m -- --nproc 5"
    result = CliRunner().invoke(cli.app, ["simulate", *given.split()])
    assert result.exit_code == 7, result.output
    assert found == [options.parse(given.split(), "hyper-parallel simulate")]
    assert not found[0].check_identity
    assert found[0].arguments == ("--help", "-m", "--", "--nproc", "5")


def test_rows_to_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def rows(file: Path | None, **given: Any) -> str:
        calls.append((file, given))
        given["progress"](1, 2, Outcome("row-1", "source", "group", "2x H100 [tp2]", False, reason="unknown"))
        return "# Summary\n\n## The worst rows\nall of them"

    monkeypatch.setattr(page, "validate", rows)
    Path("rows.json").write_text("[]")
    result = CliRunner().invoke(published, ["rows.json", "--write", "page.md", "--cache", "here"])
    assert (result.exit_code, result.stdout) == (0, "# Summary\n\n")
    assert result.stderr == "1/2 row-1 2x H100 [tp2]: unknown\n"
    ((file, given),) = calls
    del given["progress"]
    assert file == Path("rows.json")
    assert given == {"write": Path("page.md"), "cache": Path("here"), "processes": 2}
    result = CliRunner().invoke(published, ["none.json"])
    assert (result.exit_code, "cannot validate: there is no file 'none.json'" in result.output) == (2, True)
