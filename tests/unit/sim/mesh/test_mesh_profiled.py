"""Profiled and predicted steps broken down by kind, and the command that puts them side by side."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.common.tables import as_text
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.trainer.config import CheckpointConfig, Config, TrainConfig
from hyper_parallel.trainer.loop import train
from sim.mesh.estimate import estimate
from sim.mesh.pricing.profiled import (
    HOST,
    TimedSpan,
    break_down,
    compare_seconds,
    predicted_step,
    profiled_steps,
    rank_of_trace,
    read_trace,
    step_operations,
)
from sim.mesh.recipe import Recipe
from sim.mesh.report import comparison_dict, comparison_view


def event(name, start, duration, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration, "args": args}


STEP = event("ProfilerStep#2", 0.0, 100.0, "user_annotation")


def test_operations_count_once_and_what_is_left_is_the_hosts():
    events = [
        STEP,
        event("aten::linear", 10, 30),  # composite: what it calls has the kernel
        event("aten::t", 11, 2),  # a view
        event("aten::mm", 15, 20),
        event("aten::native_layer_norm", 50, 10),
        event("aten::fill_", 51, 2),  # inside of a kernel: its time is the norm's
        event("autograd::engine::evaluate_function: MmBackward0", 70, 20),
        event("aten::mm", 75, 10),
        event("aten::mm", 200, 10),  # of another step
    ]
    (step,) = profiled_steps({"traceEvents": events})
    assert step.step == pytest.approx(100e-6)
    assert step.kinds == pytest.approx({"matrix products": 30e-6, "norms": 10e-6, HOST: 60e-6})
    assert step.operations["aten.mm"] == (2, pytest.approx(30e-6))
    assert "aten.fill_" not in step.operations


def test_communication_is_exposed_only_where_nothing_computes():
    gloo = event("gloo:all_gather", 5, 40, "user_annotation", tid=2)
    (step,) = profiled_steps({"traceEvents": [STEP, event("aten::mm", 0, 20), gloo, event("aten::mm", 60, 40)]})
    expected = {"matrix products": 60e-6, "exposed all_gather": 25e-6, HOST: 15e-6}
    assert step.kinds == pytest.approx(expected)
    assert step.operations["all_gather"] == (1, pytest.approx(40e-6))


def test_kernels_of_a_gpu_belong_to_the_operations_that_launched_them():
    events = [
        event("ProfilerStep#2", 0, 50, "user_annotation"),
        event("aten::addmm", 1, 5, **{"External id": 7}),
        event("aten::copy_", 2, 1, **{"External id": 8}),  # of the same operation
        event("aten::mul", 10, 2, **{"External id": 9}),
        event("sm90_gemm", 20, 30, "kernel", tid=70, **{"External id": 7}),
        event("copy_kernel", 50, 10, "kernel", tid=70, **{"External id": 8}),
        event("elementwise", 80, 10, "kernel", tid=70, **{"External id": 9}),
        event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 55, 20, "kernel", tid=71),
        event("ProfilerStep#3", 50, 50, "user_annotation"),
        event("mystery", 95, 5, "kernel", tid=70),
    ]
    first, second = profiled_steps({"traceEvents": events})
    assert first.kinds == pytest.approx({"matrix products": 30e-6, HOST: 20e-6})
    expected = {"matrix products": 10e-6, "pointwise and reductions": 10e-6, "other": 5e-6}
    assert second.kinds == pytest.approx({**expected, "exposed reduce_scatter": 15e-6, HOST: 10e-6})


spans = st.lists(st.tuples(st.floats(-5, 15), st.floats(0, 6)), max_size=8)


@pytest.mark.tier("test")
@given(spans, spans)
def test_a_breakdown_adds_up_to_the_step(ops, comms):
    at, one_after_the_other = 0.0, []
    for start, long in ops:
        at += abs(start)
        one_after_the_other.append(TimedSpan(at - 2, at - 2 + long, "memory", "aten.add"))
        at += long
    found = break_down(
        0.0, 10.0, one_after_the_other, [TimedSpan(start, start + long, "send", "send") for start, long in comms]
    )
    assert sum(found.kinds.values()) == pytest.approx(10.0)
    assert min(found.kinds.values()) >= 0


@pytest.mark.parametrize(
    ("text", "blame"),
    [
        ("{", "it cannot be read as JSON"),
        ('{"traceEvents": 3}', "it has no traceEvents"),
        ('{"traceEvents": []}', "it has no operations"),
        (json.dumps([STEP, event("aten::view", 1, 1)]), "nothing that it has computed lies within a step"),
    ],
)
def test_what_is_no_trace_says_what_is_missing(tmp_path, text, blame):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"(?s)cannot compare with a trace.*{blame}.*--profile-steps 3"):
        read_trace(path)
    with pytest.raises(ValueError, match="it cannot be read as JSON"):
        read_trace(tmp_path / "missing.json")


@pytest.mark.tier("full")
def test_a_profiled_run_has_the_operations_of_the_estimate(tmp_path):
    config = Config(
        train=TrainConfig(
            steps=5, batch_size=2, seq_len=16, device="cpu", log=str(tmp_path / "log.jsonl"), profile_steps=2
        ),  # the validation comes after the fifth step, and is in none of the two that are profiled
        checkpoint=CheckpointConfig(),
    )
    config = config.with_changes("model", {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2})
    train(config)
    path = tmp_path / "profile.json"
    steps = step_operations(path)
    assert len(steps) == 2
    assert rank_of_trace(path) is None
    measured = read_trace(path)
    model = config.shape()
    made = estimate(model, ParallelDims(world_size=1), 2, 16, "laptop-cpu", Recipe().having(param_dtype="fp32"))
    predicted = predicted_step(made)
    for name in ("aten.mm", "aten.silu", "aten.silu_backward", "aten.rsqrt"):
        assert predicted.operations[name][0] == measured.operations[name][0] == len(steps[0][name])
    assert sum(predicted.kinds.values()) == pytest.approx(predicted.step) == pytest.approx(made.timeline.step)
    gaps = compare_seconds(predicted, measured)
    assert [abs(gap.predicted - gap.measured) for gap in gaps] == sorted(
        [abs(gap.predicted - gap.measured) for gap in gaps], reverse=True
    )
    text = as_text(comparison_view(predicted, measured))
    assert "matrix products" in text
    told = comparison_dict(predicted, measured)
    assert told["operations"]["aten.mm"]["measured"]["calls"] == measured.operations["aten.mm"][0]
    assert json.loads(json.dumps(told))["step"]["measured"] == measured.step


@pytest.mark.tier("test")
def test_a_run_without_profiled_steps_starts_no_profiler(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: pytest.fail("a profiler was made"))
    train(Config(train=TrainConfig(steps=1, batch_size=1, seq_len=8, device="cpu", log=str(tmp_path / "log.jsonl"))))
    assert not (tmp_path / "profile.json").exists()
