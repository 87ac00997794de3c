"""Reports of a run: FLOPs against naive counts, memory, logs, pictures, TensorBoard."""

from __future__ import annotations

import io
import json
import math
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

import sim
from hyper_parallel.core.machine.description import peak_flops
from hyper_parallel.models import Llama, LlamaConfig, MoEConfig, MoELlama
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer import report
from hyper_parallel.trainer.metrics import flops_per_token, model_flops_utilisation
from hyper_parallel.trainer.report import (
    JsonlLog,
    Prediction,
    StepRecord,
    TensorBoardLog,
    TrainingDisplay,
    plot_log,
    prediction_table,
    read_log,
)

DENSE = LlamaConfig(num_hidden_layers=3, hidden_size=64, intermediate_size=80, vocab_size=50, tie_embeddings=True)
SPARSE = MoEConfig(num_hidden_layers=3, num_dense_layers=1, num_experts=5, experts_per_token=2, num_shared_experts=2)


def count_really(model: torch.nn.Module, tokens: torch.Tensor) -> int:
    """Count while the model computes; attention by its math, as its backward is counted with recompute otherwise."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    return counter.get_total_flops()


@pytest.mark.tier("test")
@pytest.mark.parametrize("seq_len", [16, 48])
def test_flops_are_those_that_the_whole_model_takes(seq_len: int) -> None:
    tokens = torch.zeros(2, seq_len, dtype=torch.long)
    assert flops_per_token(DENSE, seq_len) * tokens.numel() == count_really(Llama.build(DENSE), tokens)


@pytest.mark.tier("test")
def test_flops_of_experts_are_those_of_the_tokens_they_get() -> None:
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    config = replace(SPARSE, aux_loss_weight=0.0, bias_update_rate=0.0)
    found = flops_per_token(config, 32) * tokens.numel()
    assert found == pytest.approx(count_really(MoELlama.build(config), tokens), rel=0.01)
    more = replace(config, num_experts=50)
    assert flops_per_token(more, 32) - flops_per_token(config, 32) == 2 * 6 * 45 * config.hidden_size, "the routers'"


@pytest.mark.tier("test")
def test_counting_touches_no_generator_and_simulated_ranks_may_do_it() -> None:
    before = torch.get_rng_state()
    assert len(set(sim.run(flops_per_token, world_size=3, args=(replace(DENSE, vocab_size=51), 8)))) == 1
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A800 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307),
        ("AMD Instinct MI250X", 191.5),
        ("Ascend910B3", 313),
        ("Ascend910B4-1", 280),
        ("Ascend910B1", None),
        ("NVIDIA A10", None),
        ("NVIDIA L4", None),
        ("simulated rank", None),
        ("CPU (x86_64, 8 cores)", None),
    ],
)
def test_peaks_are_found_by_the_names_that_devices_say(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)
    utilisation = model_flops_utilisation(1_000, 1e12, name, world_size=4)
    assert utilisation == (None if tflops is None else pytest.approx(1_000 / tflops / 4))


def test_memory_is_that_of_the_process_on_the_cpu() -> None:
    cpu = get_platform("cpu")
    assert 10 * 2**20 < cpu.memory_stats().peak_allocated < cpu.total_memory()


def record(step: int, **more: object) -> StepRecord:
    return StepRecord(step, 5.0 / step, 0.1, 2.0, 0.5, 100.0, **more)  # type: ignore[arg-type]


PREDICTED = Prediction(0.25, 200.0, 3 * 2**20, "a laptop", memory_before=7)


def test_a_line_has_what_applies_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "below" / "log.jsonl"
    records = [
        record(1),
        record(2, valid_loss=1.5, mfu=0.4, memory_bytes=7, tokens=9, skipped=True),
        replace(record(3), loss=math.inf),
        record(4, memory_bytes=9, predicted=PREDICTED),
    ]
    with JsonlLog(str(path)) as log:
        for each in records:
            log.write(each)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert list(lines[0]) == ["step", "loss", "lr", "grad_norm", "seconds", "tokens_per_s"]
    assert lines[1]["skipped"] is True
    assert read_log(path) == records
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')
    assert read_log(path) == records


def test_a_run_that_goes_on_keeps_the_lines_before(tmp_path: Path) -> None:
    path = str(tmp_path / "log.jsonl")
    with JsonlLog(path) as log:
        for step in (1, 2, 3, 4):
            log.write(record(step))
    with JsonlLog(path, keep_steps=2) as log:
        log.write(record(3, tokens=5))
    assert [(each.step, each.tokens) for each in read_log(path)] == [(1, None), (2, None), (3, 5)]
    with JsonlLog(str(tmp_path / "new.jsonl"), keep_steps=2) as log:
        log.write(record(3))
    assert [each.step for each in read_log(tmp_path / "new.jsonl")] == [3]
    JsonlLog(path).__exit__(None, None, None)
    assert read_log(path) == []


def test_the_display_says_what_the_record_has() -> None:
    out = io.StringIO()
    with TrainingDisplay(Console(file=out, width=200), "8 ranks", steps=2) as display:
        display.on_step(record(1))
        display.on_step(record(2, mfu=0.4321, memory_bytes=3 * 2**30, valid_loss=1.5, skipped=True))
    assert out.getvalue().splitlines() == [
        "8 ranks: step 1/2  loss 5.000  100 tokens/s  grad 2.00",
        "8 ranks: step 2/2  loss 2.500  100 tokens/s  grad 2.00  MFU 43.2%  3.0 GiB  skipped  validation 1.500",
    ]


@pytest.mark.tier("test")
def test_a_picture_of_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [tmp_path / "one" / "train.jsonl", tmp_path / "two" / "train.jsonl"]
    for log in logs:
        with JsonlLog(str(log)) as file:
            file.write(record(1))
            file.write(record(2, valid_loss=3.0 if log is logs[0] else None))
    assert plot_log(logs, tmp_path / "new" / "loss.png")
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plot_log(logs, tmp_path / "without.png")
    assert not (tmp_path / "without.png").exists()


@pytest.mark.tier("test")
def test_predictions_are_drawn_where_a_log_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, blank = [], report.blank_figure

    def kept(*given: Any, **rest: Any) -> Any:
        figures.append(blank(*given, **rest))
        return figures[-1]

    monkeypatch.setattr(report, "blank_figure", kept)
    for name, more in (("told", {"predicted": PREDICTED, "memory_bytes": 7 + 2**20}), ("plain", {})):
        with JsonlLog(str(tmp_path / name)) as file:
            file.write(record(1, **more))
            file.write(record(2, **more))
    assert plot_log([tmp_path / "told"], tmp_path / "loss.png")
    lines = [[(line.get_linestyle(), *line.get_ydata()) for line in axes.lines] for axes in figures[0].axes[2:]]
    assert lines == [
        [("-", 100, 100), ("--", 200, 200)],
        [("-", 500, 500), ("--", 250, 250)],
        [("-", 1, 1), ("--", 3, 3)],
    ]
    assert plot_log([tmp_path / "plain"], tmp_path / "loss.png")
    assert plot_log([tmp_path / "plain", tmp_path / "told"], tmp_path / "loss.png")
    assert [len(figure.axes) for figure in figures] == [5, 3, 5]


def test_the_first_step_and_what_was_not_predicted_do_not_count() -> None:
    def cells(steps: list[StepRecord]) -> list[list[str]]:
        table = prediction_table(steps)
        assert table is not None
        return [list(column.cells) for column in table.columns[1:]]

    told = {"predicted": PREDICTED, "memory_bytes": 7 + 2**20}
    steps = [record(n, **told) for n in (1, 2, 3)]
    steps[0], steps[2] = replace(steps[0], seconds=90.0), replace(steps[2], memory_bytes=7 + 2**21)
    assert cells(steps) == [["500 ms", "100", "2.0 MiB"], ["250 ms", "200", "3.0 MiB"], ["-50 %", "+100 %", "+50 %"]]
    assert cells(steps[:1])[0] == ["90 s", "100", "1.0 MiB"]
    assert cells([record(1, predicted=PREDICTED)])[0] == ["500 ms", "100"]  # a device that does not count its memory
    assert prediction_table([record(1), record(2)]) is None
    assert prediction_table([]) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "it cannot be read"),
        ("", "no finished step"),
        ("hello\n", "it is no log"),
        ('{"a": 1}\n', "it is no log"),
        ("1\n", "it is no log"),
        pytest.param("[" * 100_000 + "\n", "it is no log", id="brackets"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    log = tmp_path / "log.jsonl"
    if content is not None:
        log.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        plot_log([log], tmp_path / "loss.png")
    assert "cannot plot" in str(error.value)
    assert "\n  try: " in str(error.value)
    with pytest.raises(ValueError, match="no log to draw"):
        plot_log([], tmp_path / "loss.png")


def test_without_tensorboard_one_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'hyper_parallel\[tensorboard\]'"):
        TensorBoardLog(tmp_path)
    with TensorBoardLog(None) as log:
        log.write(record(1))
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            written.append((folder, 0, purge_step or 0))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0, 0))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(report, "find_spec", lambda name: True)
    with TensorBoardLog(tmp_path) as log:
        log.write(record(2, mfu=0.5))
    assert written[0] == (str(tmp_path), 0, 0)
    assert written[-1] == ("closed", 0, 0)
    assert written[1:-1] == [
        ("train/loss", 2.5, 2),
        ("train/grad_norm", 2.0, 2),
        ("train/lr", 0.1, 2),
        ("speed/tokens_per_s", 100.0, 2),
        ("speed/seconds", 0.5, 2),
        ("speed/mfu", 0.5, 2),
    ]
    with TensorBoardLog(tmp_path, keep_steps=4):
        assert written[-1] == (str(tmp_path), 0, 5), "steps that a run takes again are shown once"
