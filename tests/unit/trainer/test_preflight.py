"""Errors before any rank starts: degrees that do not fit the model, each other, the text or the pipeline."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer.config import (
    CheckpointConfig,
    Config,
    ExpertsConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from hyper_parallel.trainer.preflight import check_machine, least_memory, plan_run
from sim.mesh.job import Job
from sim.mesh.memory import replay_memory
from sim.mesh.replay.allocator import PLAIN
from sim.mesh.tracing.trace import trace


def run(
    model: str = "llama", experts: ExpertsConfig | None = None, train: Any = None, dtype: str = "fp32", **parallel: Any
) -> Config:
    return Config(
        train=TrainConfig(**{"model": model, **(train or {})}),
        experts=experts or ExpertsConfig(),
        parallel=ParallelConfig(**parallel),
        precision=PrecisionConfig(dtype),
    )


ACCUMULATE = {"accumulate": 8}

REFUSED = [
    (
        run(ep=2),
        2,
        ["cannot split experts over ep=2: model 'llama' has none", "try: ep=1 with dp_shard=2, or model 'moe'"],
    ),
    (
        run(cp=2, fold_experts=True),
        2,
        ["cannot fold experts: model 'llama' has none", "try: fold_experts=False, or model 'moe'"],
    ),
    (
        run("moe", ExpertsConfig(num_experts=3), ep=2),
        2,
        ["num_experts=3 is not divisible by ep=2", "try: for num_experts, ep one of 1"],
    ),
    (
        run("moe", ExpertsConfig(num_experts=12), ep=4, ranks_per_node=3),
        4,
        ["cannot send tokens to each node once", "of which each node has [3, 1]", "try: ranks_per_node=None"],
    ),
    (
        run("moe", ExpertsConfig(expert_intermediate_size=33), tp=2),
        2,
        [
            "cannot split experts of expert_intermediate_size=33 over etp=2: it does not divide",
            "tp=2",
            "try: expert_intermediate_size=34, or etp=1",
        ],
    ),
    (
        run("moe", ep=2, tp=4, etp=2),
        8,
        ["cannot use etp=2 with ep=2 and tp=4", "over all ranks of axis 'tp' or not at all", "try: etp=4 or etp=1"],
    ),
    (
        run(train={"seq_len": 18}, cp=2, ulysses_degree=1),
        2,
        [
            "cannot split sequences of seq_len=18 over cp=2 and tp=1: every rank of a ring has an early and a late "
            "part, so that it must be a multiple of 4",
            "ulysses_degree=1",
            "try: seq_len = 16 or 20",
        ],
    ),
    (
        run(train={"seq_len": 17}, tp=2),
        2,
        ["seq_len=17 is not divisible by cp * tp=2", "try: for seq_len, cp * tp one of 1"],
    ),
    (
        run(cp=4, ulysses_degree=3),
        4,
        ["cannot use ulysses_degree=3 with cp=4", "try: ulysses_degree one of 1, 2, 4, or None for 4"],
    ),
    (run(cp=8), 8, ["num_attention_heads=4 is not divisible by tp * ulysses_degree=8", "one of 1, 2, 4"]),
    (run(tp=4), 4, ["num_key_value_heads=2 is not divisible by tp=4", "tp one of 1, 2"]),
    (
        run(pp=2),
        2,
        [
            "'1f1b' needs at least as many micro-batches as stages\n  accumulate: 1   stages: 2\n"
            "  try: accumulate=2, or schedule='gpipe'"
        ],
    ),
    (
        run(train=ACCUMULATE, pp=2, reduce_each=True),
        2,
        [
            "cannot reduce gradients in each micro-batch: a pipeline reduces those of all of them at once",
            "pp=2",
            "try: reduce_each=False",
        ],
    ),
    (
        run(train=ACCUMULATE, pp=2, schedule="zbv", checkpointing="alternate"),
        2,
        ["cannot train with schedule='zbv' and checkpointing='alternate': it goes backward twice", "'interleaved'"],
    ),
    (
        run(train=ACCUMULATE, pp=2, schedule="1f1b", stages_per_rank=3),
        2,
        ["'1f1b' has exactly 1 per rank", "stages_per_rank: 3"],
    ),
    (
        run(train=ACCUMULATE, pp=8),
        8,
        ["there are fewer layers than stages", "num_layers: 4   stages: 8", "try: at most 4 stages"],
    ),
    (
        run(train=ACCUMULATE, pp=2, layers_per_stage="1,2"),
        2,
        ["sizes add up to 3 layers, not 4", "try: layers_per_stage='2,2'"],
    ),
    (run(train=ACCUMULATE, pp=2, layers_per_stage="1,2,1"), 2, ["there are 3 sizes for 2 stages"]),
    (run(pp=4, schedule="gpipe", layers_per_stage="2,0,0,2"), 4, ["rank 1 of the pipeline would have nothing"]),
    (
        run(train=ACCUMULATE, pp=2, tp=2, engine="hsdp", dtype="bf16"),
        4,
        ["cannot train with engine 'hsdp' and tp=2, pp=2, param_dtype='bf16'", "try: engine 'fully_shard'"],
    ),
    (run("moe", ep=2, engine="hsdp"), 2, ["cannot train with engine 'hsdp' and ep=2"]),
    (run("moe", cp=2, fold_experts=True, engine="hsdp"), 2, ["cannot train with engine 'hsdp' and fold_experts=True"]),
    (run(whole_parameters=True), 2, ["cannot leave parameters whole with one rank", "muon: False", "try: --muon"]),
    (
        run(whole_parameters=True, engine="hsdp").with_changes("optimizer", {"muon": True}),
        2,
        ["cannot leave parameters whole with one rank", "engine: 'hsdp'", "try: --engine fully_shard"],
    ),
    (
        run("moe", train={"batch_size": 6}, dp_replicate=2, ep=2),
        4,
        ["cannot split batch_size=6 sequences over 4 data-parallel ranks", "try: batch_size = 4 or 8"],
    ),
    (
        run(train={"batch_size": 6, "accumulate": 4}, pp=2),
        2,
        ["batch_size=6 sequences over 1 data-parallel ranks x accumulate=4 evenly", "try: batch_size = 4 or 8"],
    ),
]


@pytest.mark.parametrize(("config", "world_size", "messages"), REFUSED)
def test_what_does_not_fit_is_refused_before_any_rank_starts(
    config: Config, world_size: int, messages: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        plan_run(config, world_size)
    assert [part for part in messages if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("config", "world_size", "degrees"),
    [
        (run(tp=2), 8, {"dp_shard": 4, "tp": 2}),
        (run(cp=2, tp=2), 8, {"dp_shard": 2, "cp": 2, "tp": 2}),
        (run("moe", ep=2, tp=2, etp=1), 8, {"dp_shard": 2, "ep": 2, "tp": 2}),
        (run(train=ACCUMULATE, pp=2, schedule="interleaved"), 4, {"dp_shard": 2, "pp": 2}),
        (run(train=ACCUMULATE, pp=2, schedule="looped-bfs", layers_per_stage="1,1,1,1"), 2, {"pp": 2}),
        (run(pp=4, schedule="gpipe", layers_per_stage="0,2,2,0"), 4, {"pp": 4}),
        (run(engine="hsdp", cp=2, dp_replicate=2), 8, {"dp_replicate": 2, "dp_shard": 2, "cp": 2}),
        (run(train={"seq_len": 18}, cp=2), 2, {"cp": 2}),  # heads are split, so that parts need no partner
    ],
)
def test_what_fits_is_not(config: Config, world_size: int, degrees: dict[str, int]) -> None:
    assert plan_run(config, world_size).mesh_axes == degrees


LARGE = run(train={"batch_size": 64, "seq_len": 256, "accumulate": 8})


def parts_of_least(config: Config, dims: ParallelDims) -> tuple[int, int]:
    """Return the least memory without activations, and these: a sequence twice as long has twice as many."""
    longer = config.with_changes("train", {"seq_len": 2 * config.train.seq_len})
    least = least_memory(config, dims)
    activations = least_memory(longer, dims) - least
    return least - activations, activations


@pytest.mark.parametrize(
    ("degrees", "state", "activations"),
    [
        ({"dp_shard": 4}, 4, 4),
        ({"dp_replicate": 4}, 1, 4),
        ({"tp": 2}, 2, 2),
        ({"cp": 2}, 2, 2),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 4, 8),
        ({"pp": 2}, 2, 2 / 1.5),  # the first stage has two micro-batches under way
    ],
)
def test_each_degree_takes_its_part_of_the_memory(degrees: dict[str, int], state: float, activations: float) -> None:
    narrow = LARGE.with_changes("model", {"vocab_size": 1})  # no logits, which no other stage has
    alone = parts_of_least(narrow, ParallelDims(world_size=1))
    here = parts_of_least(narrow, ParallelDims(**degrees, world_size=math.prod(degrees.values())))
    assert here[0] == pytest.approx(alone[0] / state, rel=1e-4)
    assert here[1] == pytest.approx(alone[1] / activations, rel=1e-2)


def test_checkpointed_blocks_keep_one_vector_per_token() -> None:
    tokens, hidden = 64 * 256 // 8, LARGE.model.hidden_size
    of = [
        parts_of_least(LARGE.with_changes("parallel", {"checkpointing": how}), ParallelDims(world_size=1))[1]
        for how in ("full", "selective", "none")
    ]
    assert of[0] == 4 * tokens * (4 * hidden + LARGE.model.vocab_size)
    assert of == sorted(of)
    assert 3 * of[0] < of[2]


SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=32,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
WIDE = dataclasses.replace(SMALL, hidden_size=256, intermediate_size=512)


@pytest.mark.tier("test", each=2)
@pytest.mark.parametrize(
    ("model", "world_size", "train", "parallel"),
    [
        (SMALL, 1, {"seq_len": 64, "batch_size": 16}, {"dtype": "fp64"}),
        (WIDE, 2, {}, {"reshard_after_forward": False, "dtype": "bf16"}),
        (WIDE, 2, {}, {"reshard_after_forward": False, "engine": "hsdp"}),
        (SMALL, 2, {"seq_len": 64, "accumulate": 2}, {"pp": 2}),
        (WIDE, 4, {"model": "moe"}, {"ep": 2, "tp": 2}),
    ],
)
def test_no_step_needs_less_than_the_least(
    model: LlamaConfig, world_size: int, train: dict[str, Any], parallel: dict[str, Any]
) -> None:
    """The replayed allocations of a step, mean over ranks, are above the bound, and near it."""
    config = dataclasses.replace(run(train={"batch_size": 4, "seq_len": 16, **train}, **parallel), model=model)
    job = Job.of_run(config, world_size)
    job = dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, norm="eager"))  # as on a CPU
    classes = [replay_memory(program, PLAIN) for program in trace(job)]
    mean = sum(one.peak_allocated * one.like for one in classes) / sum(one.like for one in classes)
    assert 0.4 * mean < least_memory(config, job.dims) <= mean


def test_a_file_that_is_no_log_is_not_overwritten(tmp_path: Path) -> None:
    file, dims = tmp_path / "notes.md", ParallelDims(world_size=1)
    config = Config(train=TrainConfig(log=str(file)))
    file.write_text("what I want to keep\n")
    with pytest.raises(
        ValueError, match=r"there is a file that is no log, and would be lost\n.*\n  try: --log-file .*jsonl"
    ):
        check_machine(config, dims, 1, on_host=True)
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="there is a file that is no log"):
        check_machine(config, dims, 1, on_host=True)
    for text in ("", '{"step": 1, "loss": 2.0}\n'):
        file.write_text(text)
        check_machine(config, dims, 1, on_host=True)


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    config = Config(checkpoint=CheckpointConfig(str(tmp_path / "link")))
    with pytest.raises(ValueError, match=r"cannot write checkpoints to '.*link': '.*link' is no folder\n"):
        check_machine(config, ParallelDims(world_size=1), 1, on_host=True)


def test_stages_are_told_as_they_are_typed() -> None:
    with pytest.raises(
        ValueError, match=r"sizes add up to 10 layers, not 4(?s:.*)try: layers_per_stage='2,2', or none"
    ):
        plan_run(run(pp=2, layers_per_stage="9,1", train={"accumulate": 2}), 2)
