"""Hints of refused runs: whoever sets the option that a hint names gets further than before."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.common.errors import HyperParallelError
from hyper_parallel.core.machine.toml_file import read_value
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.schedules import SCHEDULES
from hyper_parallel.platform.cpu import CpuPlatform
from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.preflight import (
    check_given,
    check_lora,
    check_memory,
    check_platform,
    plan_run,
)

DEGREES = st.sampled_from([1, 2, 2, 4])
VALUES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "train": {
        "model": st.sampled_from(["llama", "moe"]),
        "batch_size": st.sampled_from([2, 6, 16]),
        "seq_len": st.sampled_from([30, 128, 4096]),
        "accumulate": st.sampled_from([1, 2, 3]),
        "memory_limit_gb": st.sampled_from([1e-4, 1e-2, 0.5]),
        "memory_snapshot": st.booleans(),
    },
    "parallel": {
        **dict.fromkeys(("dp_replicate", "tp", "cp", "pp", "ep"), DEGREES),
        **dict.fromkeys(("fold_experts", "reduce_each", "whole_parameters", "compile"), st.booleans()),
        "dp_shard": st.sampled_from([1, 3, -1, -1]),
        "etp": st.sampled_from([1, 2]),
        "ulysses_degree": st.sampled_from([1, 2]),
        "ranks_per_node": st.sampled_from([2, 4]),
        "schedule": st.sampled_from(sorted(SCHEDULES)),
        "stages_per_rank": st.sampled_from([1, 2]),
        "layers_per_stage": st.sampled_from(["1,1", "2,2", "1,1,2"]),
        "engine": st.sampled_from(["fully_shard", "hsdp"]),
        "checkpointing": st.sampled_from(["none", "selective", "full", "full every 2", "offload", "full offload"]),
    },
    "precision": {"param_dtype": st.sampled_from(["fp32", "bf16", "fp64"])},
    "model": {"num_key_value_heads": st.sampled_from([1, 2, 4]), "vocab_size": st.sampled_from([128, 258])},
    "experts": {"num_experts": st.sampled_from([2, 8]), "expert_intermediate_size": st.sampled_from([30, 64])},
    "lora": {"rank": st.sampled_from([0, 4])},
    "optimizer": {"muon": st.booleans()},
    "checkpoint": {
        "folder": st.just("out/run"),
        "every": st.sampled_from([0, 5]),
        "background": st.booleans(),
        "resume": st.booleans(),
        "resume_step": st.just(3),
    },
}
CHOICES = [(section, key) for section, keys in VALUES.items() for key in keys]
FLAGS = {"precision": "param_dtype", "checkpoint_dir": "folder", "save_every": "every"}


class _Npu(CpuPlatform):
    device_type, backend = "npu", "hccl"


def faults(run: Config, ranks: int) -> dict[str, HyperParallelError]:
    """Return what each check before a run raises."""
    dims, found, way = ParallelDims(dp_shard=ranks, world_size=ranks), {}, run.parallel
    checks: dict[str, Callable[[], Any]] = {
        "plan": lambda: plan_run(run, ranks),
        "blocks": way.check_blocks,
        "platform": lambda: check_platform(run, _Npu()),
        "lora": lambda: check_lora(run),
        "given": lambda: check_given(run, dims),
        "memory": lambda: check_memory(run, dims, 1 if ranks < 4 else 4),
    }
    for name, check in checks.items():
        try:
            check()
        except HyperParallelError as error:
            found[name] = error
    return found


def named(error: HyperParallelError) -> Iterator[tuple[str, str, Any]]:
    """Yield the keys that a hint names with a value: section, key and value."""
    hint = str(error).rpartition("\n  try: ")[2]
    sections = {each.name: getattr(Config(), each.name) for each in dataclasses.fields(Config)}
    for word, text in re.findall(r"([a-z][\w-]*)(?: ?= ?| (?=['\d]))('[^']*'|[\w-]+)", hint):
        key = FLAGS.get(word.replace("-", "_"), word.replace("-", "_"))
        section = next((name for name in ("parallel", *sections) if hasattr(sections[name], key)), None)
        if section is not None and "..." not in text:
            yield section, key, text[1:-1] if text[0] == "'" else read_value(text.lower())
    switches = (("optimizer", "muon"), ("checkpoint", "resume"))
    yield from ((section, key, True) for section, key in switches if f"--{key}" in hint)


@pytest.mark.tier("full")
@settings(max_examples=max(300, settings.default.max_examples))  # each takes milliseconds
@given(st.data())
def test_a_hint_that_is_followed_does_not_come_back(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(CHOICES), max_size=8, unique=True))
    run, ranks = Config(), data.draw(st.sampled_from([1, 2, 4, 8]))
    for section, key in chosen:
        run = run.with_changes(section, {key: data.draw(VALUES[section][key], label=key)})
    for check, error in faults(run, ranks).items():
        for section, key, value in named(error):
            assert getattr(getattr(run, section), key) != value, f"the run has that: {error}"
            again = faults(run.with_changes(section, {key: value}), ranks).get(check)
            assert str(again) != str(error), f"{key}={value} changes nothing"
