"""Recipes: what they say, and what they refuse."""

import pickle
from dataclasses import fields, replace

import pytest
import torch

from benchmarks.published.step import PublishedRecipe
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.trainer.config import Config, OptimizerConfig, ParallelConfig, PrecisionConfig, TrainConfig
from sim.mesh.estimate import estimate
from sim.mesh.job import Job
from sim.mesh.models import find_model
from sim.mesh.recipe import Recipe, Routing


def test_a_recipe_is_data():
    recipe = Recipe().having(checkpointing="full first 1", routing=Routing(shares=[1, 2]))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert len({recipe, Recipe(), Recipe()}) == 2
    assert [PublishedRecipe().with_zero(stage).with_zero(3 - stage).zero for stage in range(4)] == [3, 2, 1, 0]
    assert (Recipe().with_zero(2), Recipe().with_zero(3)) == (Recipe().having(reshard_after_forward=False), Recipe())
    assert (recipe.checkpointing, recipe.activations.first) == ("full", 1)


def test_a_recipe_is_a_run():
    """Whatever a run says is in its recipe; what arranges ranks and data makes no other recording."""
    run = Config(
        parallel=ParallelConfig(tp=2, dp_replicate=2, layers_per_stage="1,2", compile=True),
        train=TrainConfig(steps=7, accumulate=2),
        optimizer=OptimizerConfig(muon=True, lr=1.0, max_grad_norm=3.0),
    )
    recipe = Recipe.of(run, Routing.zipf(1))
    assert all(getattr(recipe, each.name) == getattr(run, each.name) for each in fields(Config))
    usual = {"param_dtype": "fp32", "routing": Routing.zipf(1), "compile": True, "muon": True}
    assert recipe.bare(norm="eager") == Recipe().having(**usual, norm="eager")


def test_batches_that_cannot_be_cut():
    job = Job(find_model("llama-tiny"), ParallelDims(), 8, 16, Recipe().having(accumulate=4))
    assert (job.microbatches, job.micro_batch, job.recipe.train.batch_size) == (4, 2, 8)
    with pytest.raises(ValueError, match="8 sequences cannot be cut into 3 micro-batches") as error:
        replace(job, recipe=Recipe().having(accumulate=3))
    assert str(error.value).endswith("\n  batch: 8\n  try: accumulate = one of 1, 2, 4, 8")


def test_descriptions():
    assert Recipe().describe() == "bf16 over fp32 weights, gradients reduced in fp32; ZeRO-3; adamw"
    pure = PublishedRecipe().having(master_dtype="bf16", reduce_dtype="bf16", level=0, sequence_parallel=False)
    assert pure.describe() == (
        "bf16 weights, no others behind them, gradients reduced in bf16; replicated weights; adamw; "
        "level 0; no sequence parallel"
    )
    much = Recipe().having(
        checkpointing="full first 3", compile=True, schedule="gpipe", accumulate=2, routing=Routing.zipf(1)
    )
    assert much.describe() == (
        "bf16 over fp32 weights, gradients reduced in fp32; ZeRO-3; full checkpointing of 3 layers; adamw; "
        "2 micro-batches; schedule gpipe; compile; routing zipf(1)"
    )
    assert Recipe().having(param_dtype="fp32").describe().startswith("fp32, gradients")
    assert PublishedRecipe().having(float8="rowwise").describe().endswith("; float8 rowwise")


@pytest.mark.parametrize(
    ("given", "kind", "stated"),
    [
        ({"param_dtype": "bf61"}, ValueError, ("param_dtype: 'bf61'", "='bf16'")),
        ({"checkpointing": "selectiv"}, ValueError, ("selectiv", "selective")),
        ({"engine": "hspd"}, ValueError, ("engine: 'hspd'", "='hsdp'")),
        ({"compile": 1}, TypeError, ("compile: 1",)),
        ({"accumulate": 0}, ValueError, ("accumulate: 0",)),
        ({"tp_chunk": 2}, ValueError, ("there is no key 'tp_chunk'", "'tp_chunks'")),
        ({"norm": "eagr"}, ValueError, ("norm: 'eagr'", "='eager'")),
        ({"schedule": "1fib"}, ValueError, ("there is no schedule '1fib'", "try: '1f1b'")),
        ({"routing": "zipf"}, TypeError, ("routing is a str", "Routing.zipf(1.0)")),
    ],
    ids=str,
)
def test_what_is_no_recipe_is_refused(given, kind, stated):
    refused(Recipe, given, kind, stated)


@pytest.mark.parametrize(
    ("given", "kind", "stated"),
    [
        ({"level": 4}, ValueError, ("there is no kind of level '4'",)),
        ({"attention": "flas"}, ValueError, ("attention: 'flas'", "='flash'")),
        ({"graphs": 1}, TypeError, ("graphs: 1",)),
        ({"float8": "rowwise", "param_dtype": "fp32"}, ValueError, ("take and return bfloat16",)),
        ({"tp_chunks": 2, "sequence_parallel": False}, ValueError, ("nothing to overlap", "or tp_chunks=1")),
    ],
    ids=str,
)
def test_what_is_no_recipe_of_others_is_refused(given, kind, stated):
    refused(PublishedRecipe, given, kind, stated)


def refused(recipe, given, kind, stated):
    with pytest.raises(kind) as error:
        recipe().having(**given)
    assert str(error.value).startswith("cannot ")
    assert "\n  try: " in str(error.value)
    for words in stated:
        assert words in str(error.value)


# The step of a training run


def test_a_run_says_what_is_estimated():
    """Nothing of a run is lost that a step depends on."""
    parallel = ParallelConfig(
        dp_replicate=2,
        pp=2,
        schedule="interleaved",
        stages_per_rank=2,
        layers_per_stage="1,1,1,1",
        checkpointing="full",
        reshard_after_forward=False,
        compile=True,
    )
    train = TrainConfig(batch_size=64, seq_len=32, accumulate=4)
    how = {"precision": PrecisionConfig("bf16"), "optimizer": OptimizerConfig(max_grad_norm=0.0)}
    run = Config(train=train, parallel=parallel, **how)
    job = Job.of_run(run, world_size=16)
    assert job.dims == ParallelDims(dp_replicate=2, dp_shard=4, pp=2, world_size=16)
    assert (job.batch, job.seq_len, job.microbatches, job.layers_per_stage) == (8, 32, 4, (1, 1, 1, 1))
    assert job.model.num_parameters == run.shape().num_parameters()
    assert job.tokens_per_step == 64 * 32
    assert job.recipe == Recipe.of(replace(run, parallel=replace(parallel, dp_shard=4)))
    hsdp = Job.of_run(Config(parallel=ParallelConfig(engine="hsdp"), precision=PrecisionConfig("fp64")), world_size=2)
    dtypes = {hsdp.recipe.precision.dtype(of) for of in ("master", "reduce")}
    assert (hsdp.recipe.parallel.engine, dtypes) == ("hsdp", {torch.float64})


def test_a_run_that_cannot_be_trained_cannot_be_estimated():
    with pytest.raises(ValueError, match="cannot split batch_size=16"):
        Job.of_run(Config(), world_size=3)
    with pytest.raises(ValueError, match="cannot train with engine 'hsdp' and tp=2"):
        Job.of_run(Config(parallel=ParallelConfig(engine="hsdp", tp=2)), world_size=4)


def test_what_the_trainer_refuses_is_not_estimated():
    for refused, words in (
        ({"whole_parameters": True}, "cannot leave parameters whole"),
        ({"muon": True, "moments_dtype": "bf16"}, "cannot store the optimizer's state"),
        ({"engine": "hsdp"}, "cannot train with engine 'hsdp' and param_dtype='bf16'"),
    ):
        with pytest.raises(ValueError, match=words):
            Job(find_model("llama-tiny"), ParallelDims(), 4, 16, Recipe().having(**refused))


def test_a_recipe_without_master_weights_takes_what_its_run_does():
    dims, run = ParallelDims(dp_shard=2, world_size=2), Config(precision=PrecisionConfig("bf16", "bf16", "fp32"))
    recipe = Job.of_run(run, 2).recipe
    assert [recipe.precision.dtype(of) for of in ("master", "moments")] == [torch.bfloat16, torch.float32]
    (rank,) = estimate("llama-tiny", dims, batch=1, seq_len=16, hardware="h100-sxm", recipe=recipe).memory.classes
    weights = rank.by_category["parameters"]
    assert rank.by_category["optimizer"] == pytest.approx(4 * weights, rel=0.02)


@pytest.mark.tier("full")
def test_moments_in_bfloat16_take_half():
    dims = ParallelDims(dp_shard=2, world_size=2)
    kept = {
        name: estimate(
            model="llama-tiny",
            dims=dims,
            batch=1,
            seq_len=16,
            hardware="h100-sxm",
            recipe=PublishedRecipe().having(level=1, moments_dtype=name),
        ).memory.classes[0]
        for name in ("fp32", "bf16")
    }
    saved = kept["fp32"].persistent - kept["bf16"].persistent
    # Half of a rank's two moments, its part of all weights; beside it the master weights.
    assert saved == pytest.approx(4 * find_model("llama-tiny").num_parameters / 2, rel=0.02)
    assert kept["fp32"].by_category["optimizer"] == pytest.approx(3 * saved, rel=0.02)


@pytest.mark.parametrize("blocks", [{"checkpointing": "selective"}, {"checkpointing": "alternate"}, {"compile": True}])
def test_blocks_that_go_backward_once_are_refused_where_a_schedule_goes_twice(blocks):
    def job(**recipe):
        dims = ParallelDims(pp=2, world_size=2)
        return Job(find_model("llama-tiny"), dims, 4, 16, Recipe().having(**recipe, accumulate=4))

    assert job(schedule="zbv", checkpointing="full").microbatches == 4
    assert job(schedule="interleaved", **blocks).microbatches == 4
    with pytest.raises(
        ValueError, match=r"(?s)^cannot train with schedule='zbv' and .*twice.*\n  try: schedule="
    ) as error:
        job(schedule="zbv", **blocks)
    assert next(iter(blocks)) in str(error.value)
