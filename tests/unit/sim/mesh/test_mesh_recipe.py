"""Recipes: what they say, and what they refuse."""

import pickle

import pytest
import torch

from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.trainer.config import Config, OptimizerConfig, ParallelConfig, PrecisionConfig, TrainConfig
from sim.mesh.estimate import estimate
from sim.mesh.job import Job
from sim.mesh.models import find_model
from sim.mesh.recipe import Recipe, Routing


@pytest.mark.parametrize(
    ("given", "word", "dtype"),
    [
        ("bf16", "bf16", torch.bfloat16),
        ("bfloat16", "bf16", torch.bfloat16),
        (torch.bfloat16, "bf16", torch.bfloat16),
        ("fp16", "fp16", torch.float16),
        ("half", "fp16", torch.float16),
        ("double", "fp64", torch.float64),
        (torch.float32, "fp32", torch.float32),
        ("float32", "fp32", torch.float32),
    ],
)
def test_dtypes_have_one_spelling(given, word, dtype):
    recipe = Recipe(param_dtype=given, reduce_dtype=given)
    assert (recipe.param_dtype, recipe.dtype) == (word, dtype)
    assert (recipe.reduce_dtype, recipe.grad_dtype) == (word, dtype)
    assert recipe == Recipe(param_dtype=word, reduce_dtype=word)
    assert hash(recipe) == hash(Recipe(param_dtype=word, reduce_dtype=word))
    assert recipe.weight_dtype is (torch.float64 if word == "fp64" else torch.float32)
    assert Recipe(param_dtype=given, master="none").weight_dtype is dtype


def test_a_recipe_is_data():
    recipe = Recipe(checkpointing="full", checkpoint_layers=0, routing=Routing(shares=[1, 2]))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert len({recipe, Recipe(), Recipe()}) == 2
    assert Recipe().reshards_after_forward
    assert not Recipe(zero=2).reshards_after_forward


def test_parts():
    one, four = ParallelDims(), ParallelDims(pp=4, world_size=4)
    assert Recipe().parts(8, one) == 1
    assert Recipe().parts(8, four) == 8
    assert Recipe(microbatches=4).parts(8, four) == Recipe(microbatches=4).parts(8, one) == 4
    with pytest.raises(ValueError, match="cannot cut the batch into micro-batches") as error:
        Recipe(microbatches=3).parts(8, one)
    assert "batch=8 sequences on each data-parallel rank   microbatches=3" in str(error.value)
    assert "try: microbatches one of 1, 2, 4, 8" in str(error.value)


def test_descriptions():
    assert Recipe().describe() == "bf16 over fp32 weights, gradients reduced in fp32; ZeRO-3; adamw"
    pure = Recipe(master="none", reduce_dtype="bf16", zero=0, optimizer="sgd", sequence_parallel=False)
    assert pure.describe() == (
        "bf16 weights, no others behind them, gradients reduced in bf16; replicated weights; sgd; no sequence parallel"
    )
    much = Recipe(checkpointing="full", checkpoint_layers=3, compile=True, schedule="gpipe", routing=Routing.zipf(1))
    assert much.describe() == (
        "bf16 over fp32 weights, gradients reduced in fp32; ZeRO-3; full checkpointing of 3 layers; adamw; compile; "
        "schedule gpipe; routing zipf(1)"
    )
    assert Recipe(param_dtype="fp32").describe().startswith("fp32, gradients")
    assert Recipe(float8="tensorwise") == Recipe(float8=True)
    assert Recipe(float8=True).describe().endswith("; float8")
    assert Recipe(float8="rowwise").describe().endswith("; float8 rowwise")


@pytest.mark.parametrize(
    ("given", "kind", "stated"),
    [
        ({"param_dtype": "bf61"}, ValueError, ("param_dtype='bf61' is no dtype for this", "try: param_dtype='bf16'")),
        ({"param_dtype": torch.int8}, ValueError, ("param_dtype: torch.int8",)),
        ({"reduce_dtype": None}, ValueError, ("reduce_dtype=None is no dtype", "'bf16', 'fp16', 'fp32'")),
        ({"checkpointing": "selectiv"}, ValueError, ("try: checkpointing='selective'",)),
        ({"optimizer": "adam"}, ValueError, ("optimizer='adam' does not exist", "try: optimizer='adamw'")),
        ({"master": "bf16"}, ValueError, ("master='bf16' does not exist",)),
        ({"attention": "flas"}, ValueError, ("try: attention='flash'",)),
        ({"compile": 1}, TypeError, ("compile=1 is not True or False", "try: compile=True")),
        ({"microbatches": 0}, ValueError, ("microbatches=0 is below 1", "try: microbatches=1")),
        ({"microbatches": 2.0}, TypeError, ("microbatches=2.0 is a float, not an int",)),
        ({"zero": 4}, ValueError, ("zero=4 is no level of ZeRO", "zero=3: ")),
        ({"zero": True}, ValueError, ("zero=True is no level",)),
        ({"schedule": "1fib"}, ValueError, ("there is no schedule '1fib'", "try: '1f1b'")),
        ({"routing": "zipf"}, TypeError, ("routing='zipf' is a str, not a Routing", "Routing.zipf(1.0)")),
        ({"checkpoint_layers": 2}, ValueError, ("checkpointing='none'", 'try: checkpointing="full"')),
        ({"float8": True, "param_dtype": "fp32"}, ValueError, ("take and return bfloat16",)),
        ({"float8": "rowise"}, ValueError, ("no recipe of torchao that is known here", "try: float8='rowwise'")),
        ({"float8": None}, TypeError, ("float8=None is not True or False",)),
        ({"whole_parameters": True}, ValueError, ("optimizer='adamw'", 'try: optimizer="muon", zero=3')),
        ({"moments": "bf16", "optimizer": "muon"}, ValueError, ("zero=3", 'or optimizer="adamw"')),
        ({"moments": "fp8", "zero": 1}, ValueError, ("moments='fp8' does not exist",)),
        ({"stages_per_rank": 2}, ValueError, ("'1f1b' has 1 stage(s) on each rank", 'try: schedule="interleaved"')),
    ],
    ids=str,
)
def test_what_is_no_recipe_is_refused(given, kind, stated):
    with pytest.raises(kind) as error:
        Recipe(**given)
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
    assert job.recipe == Recipe(
        param_dtype="bf16",
        checkpointing="full",
        compile=True,
        schedule="interleaved",
        stages_per_rank=2,
        microbatches=4,
        zero=2,
        clipping=False,
    )
    hsdp = Job.of_run(Config(parallel=ParallelConfig(engine="hsdp"), precision=PrecisionConfig("fp64")), world_size=2)
    assert (hsdp.recipe.engine, hsdp.recipe.weight_dtype, hsdp.recipe.grad_dtype) == ("hsdp", *[torch.float64] * 2)


def test_a_run_that_cannot_be_trained_cannot_be_estimated():
    with pytest.raises(ValueError, match="cannot split batch_size=16"):
        Job.of_run(Config(), world_size=3)
    with pytest.raises(ValueError, match="cannot train with engine 'hsdp' and tp=2"):
        Job.of_run(Config(parallel=ParallelConfig(engine="hsdp", tp=2)), world_size=4)


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize(
    ("model", "degrees"), [("llama-tiny", {"dp_shard": 2, "tp": 2}), ("moe-tiny", {"dp_shard": 2, "ep": 2})]
)
def test_sgd_of_sharded_weights_saves_the_moments(model: str, degrees: dict[str, int]):
    dims = ParallelDims(**degrees, world_size=4)
    ranks = {
        name: estimate(
            model=model, dims=dims, batch=1, seq_len=16, hardware="h100-sxm", recipe=Recipe(optimizer=name)
        ).memory.classes[0]
        for name in ("adamw", "sgd")
    }
    moments = ranks["adamw"].by_category["optimizer"]
    assert ranks["sgd"].by_category.get("optimizer", 0) == 0 < moments
    assert ranks["adamw"].persistent - ranks["sgd"].persistent == moments


def test_a_recipe_without_master_weights_takes_what_its_run_does():
    dims, run = ParallelDims(dp_shard=2, world_size=2), Config(precision=PrecisionConfig("bf16", "bf16", "fp32"))
    recipe = Job.of_run(run, 2).recipe
    assert (recipe.master, recipe.moments, recipe.weight_dtype) == ("none", "fp32", torch.bfloat16)
    (rank,) = estimate("llama-tiny", dims, batch=1, seq_len=16, hardware="h100-sxm", recipe=recipe).memory.classes
    weights = rank.by_category["parameters"]
    assert rank.by_category["optimizer"] == pytest.approx(4 * weights, rel=0.02)


@pytest.mark.tier("full")
def test_moments_in_bfloat16_take_half():
    dims = ParallelDims(dp_shard=2, world_size=2)
    kept = {
        name: estimate(
            model="llama-tiny", dims=dims, batch=1, seq_len=16, hardware="h100-sxm", recipe=Recipe(zero=1, moments=name)
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
        return Job(find_model("llama-tiny"), dims, 4, 16, Recipe(**recipe))

    assert job(schedule="zbv", checkpointing="full").microbatches == 4
    assert job(schedule="interleaved", **blocks).microbatches == 4
    with pytest.raises(
        ValueError, match=r"(?s)^cannot train with schedule='zbv' and .*twice.*\n  try: schedule="
    ) as error:
        job(schedule="zbv", **blocks)
    assert next(iter(blocks)) in str(error.value)
