"""The proof of training runs: right ones are proved, and each usual fault is found where it is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from zoo_kit import right

import sim
from hyper_parallel.core.pipeline.tied import TiedWeights
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer import loop, parallelize, parallelize_llama
from hyper_parallel.trainer.config import (
    Config,
    ExpertsConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from hyper_parallel.trainer.preflight import plan_run
from sim.prove import bound, evidence, training
from sim.prove.steps import compare
from sim.prove.training import MOST_RANKS, reduced_run, verify_run

pytestmark = pytest.mark.tier("full")

DENSE = Config(optimizer=OptimizerConfig(max_grad_norm=0.5))
TIED = dataclasses.replace(DENSE, model=LlamaConfig(tie_embeddings=True), train=TrainConfig(accumulate=2))
EXPERTS = dataclasses.replace(DENSE, train=TrainConfig(model="moe"), experts=ExpertsConfig(bias_update_rate=0.1))
FEW_EXPERTS = dataclasses.replace(EXPERTS, experts=ExpertsConfig(num_experts=2))


def of(run: Config, **parallel: object) -> Config:
    return run.with_changes("parallel", parallel)


# -- right runs --------------------------------------------------------------------------------------------------------

RIGHT = {
    "tp, dp": (of(DENSE, tp=2), 4),
    "fewer experts than ranks": (of(FEW_EXPERTS, tp=2), 8),
    "hsdp": (of(DENSE, engine="hsdp"), 2),
    "each micro-batch reduced": (of(TIED, tp=2, reduce_each=True), 4),
    "cp": (of(DENSE, cp=2, checkpointing="full"), 2),
    "experts on nodes": (of(EXPERTS, ep=4, ranks_per_node=2), 4),
    "pp, tied, accumulation": (of(TIED, pp=2), 2),
    "ep, etp": (of(EXPERTS, ep=2, tp=2, etp=1), 4),
    "experts that do not divide": (of(dataclasses.replace(EXPERTS, experts=ExpertsConfig(num_experts=6))), 4),
}


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_run_is_proved(name: str) -> None:
    report = right(verify_run(*RIGHT[name]))
    assert {row.kind for row in report.rows} >= {"parameter", "forward", "gradient", "update"}
    assert all(row.bound < 1e-6 for row in report.rows), "bounds of float64"
    if name == "tp, dp":
        assert {"found"} <= {row.outcome for row in report.sensitivity(6).rows} <= {"found", "none"}


STORED = {
    "pure": (PrecisionConfig("bf16", master_dtype="bf16"), 0),
    "moments wider": (PrecisionConfig("bf16", "bf16", "fp32"), 0),
    "moments narrower": (PrecisionConfig(moments_dtype="bf16"), 0),
    "frozen": (PrecisionConfig("bf16"), 2),
}


@pytest.mark.tier("test", each=2)
@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_in_another_dtype_than_asked_for_is_found(name: str) -> None:
    precision, rank = STORED[name]
    run = dataclasses.replace(of(DENSE, tp=2), precision=precision).with_changes("lora", {"rank": rank})
    right(verify_run(run, 2))
    opposite = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}
    if rank:
        as_asked = parallelize.in_dtype

        def held_wide(model: Any, stored: Callable[[Any], torch.dtype], buffers: torch.dtype) -> None:
            as_asked(model, lambda param: torch.promote_types(stored(param), torch.float32), buffers)

        fault: Any = mock.patch.object(parallelize, "in_dtype", held_wide)
        said = "embed.weight as it is stored: it is in float32 on ranks 0, 1, and bfloat16 is asked for"
    else:
        real, asked = loop.build_optimizer, precision.dtype("moments")
        fault = mock.patch.object(
            loop, "build_optimizer", lambda named, config, dtype: real(named, config, opposite.get(dtype, dtype))
        )
        said = f"exp_avg as it is stored: it is in {str(opposite[asked])[6:]} on ranks 0, 1, and {str(asked)[6:]} is"
    with fault:
        bug = verify_run(run, 2).bug
    assert bug is not None
    assert said in str(bug)


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize(
    ("experts", "parallel", "dims", "share"),
    [
        (2, {}, [1], 4),
        (2, {"ep": 2}, [0, 1], 4),
        (2, {"dp_replicate": 2}, [0], 2),
        (2, {"tp": 2}, [1, 0], 4),
        (6, {}, [1], 4),
        (6, {"ep": 2}, [0, 1], 4),
        (8, {}, [0], 4),
    ],
)
@sim.ranks(4, backends=("sim",))
def test_each_rank_holds_as_much_of_experts(
    ctx, experts: int, parallel: dict[str, int], dims: list[int], share: int
) -> None:
    run = of(dataclasses.replace(EXPERTS, experts=ExpertsConfig(num_experts=experts)), **parallel)
    degrees = plan_run(run, 4)
    degrees.build_mesh("cpu")
    built = parallelize_llama.parallelize_llama(run, degrees, torch.device("cpu"), parallelize.ShareOfLoss())
    weights = [param for name, param in built.named_parameters() if ".experts." in name]
    split = [placement.dim for placement in weights[0].placements if placement.is_shard()]
    assert (split, {weight.numel() / weight.to_local().numel() for weight in weights}) == (dims, {share})


def test_a_bound_that_is_wide_beside_its_tensor_is_named() -> None:
    with mock.patch.object(training, "_COARSE", 1e-18):
        report = verify_run(of(DENSE, tp=2), 2)
    assert report.ok
    (note,) = (note for note in report.notes if note.startswith("bounds are coarse"))
    for name in ("embed.weight of step 1", "loss of step 2", "norm of the gradients of step 1"):
        assert name in note


@pytest.mark.tier("test", each=2)
@pytest.mark.parametrize(
    ("module", "wide"),
    [(bound, {"SAFETY": 1e16}), (compare, {"_COARSE": 0.0, "_TINY": 0.0})],
    ids=["bounds", "gradients"],
)
def test_a_bound_that_is_as_wide_as_its_tensor_proves_nothing(module: Any, wide: dict[str, float]) -> None:
    with mock.patch.multiple(module, **wide):
        report = verify_run(of(DENSE, tp=2), 2)
    assert (report.bug, report.ok) == (None, False)
    assert {row.kind for row in report.not_proved} == {"forward", "gradient"}
    assert report.first.place in ("the model's count of tokens of step 1", "the model's loss of step 1")
    assert any(row.place == "the model's loss of step 1" for row in report.not_proved)
    assert "so wide beside its values" in report.first.sentence


@pytest.mark.tier("test")
def test_a_step_that_is_skipped_proves_nothing() -> None:
    run = DENSE.with_changes("train", {"on_nonfinite": "skip"}).with_changes("model", {"init_std": 1e300})
    with pytest.raises(sim.SimError, match="NonFiniteError"):
        verify_run(run, 2)


@pytest.mark.tier("test")
@pytest.mark.parametrize(("machine", "devices"), [(None, 1), (None, 2), ("h100-sxm", 1)])
def test_reports_say_where_ranks_of_several_nodes_have_no_machine(machine: str | None, devices: int) -> None:
    one: dict[str, Any] = {"model_fn": lambda: torch.nn.Linear(4, 4), "mesh_shape": "dp=2", "machine": machine}
    one["parallelize"] = lambda model, mesh: model
    with mock.patch.object(evidence, "find_machine", return_value=mock.Mock(devices_per_node=devices)):
        reports = [
            sim.verify_plan(inputs=(torch.ones(4, 4),), **one),
            sim.verify_step(lambda model, x: model(x).sum().backward(), batch=torch.ones(4, 4), **one),
            verify_run(DENSE.with_changes("train", {"hardware": machine}), 2),
        ]
    said = [any("planned for one unnamed node" in note for note in report.notes) for report in reports]
    assert said == [machine is None and devices == 1] * 3


# -- wrong ones --------------------------------------------------------------------------------------------------------


def found(run: Config, world_size: int, target: object, name: str, wrong: Callable[..., object]) -> str:
    """Return the sentence about a run whose ranks call another function, with the place; one device does not."""
    real = getattr(target, name)

    def called(*args: object, **kwargs: object) -> object:
        return (real if torch.distributed.get_world_size() == 1 else wrong)(*args, **kwargs)

    with mock.patch.object(target, name, called):
        report = verify_run(run, world_size)
    assert report.first is not None, "a fault that nobody sees"
    return f"{report.first.place}: {report.first.sentence}"


def with_gradients_times(factor: float, names: str = "") -> Callable[..., object]:
    """Return the trainer's forward and backward, after which the gradients of some parameters are scaled."""
    real = loop.forward_backward

    def scaled(model: parallelize.Parallelized, *rest: object) -> object:
        result = real(model, *rest)  # type: ignore[arg-type]
        for name, param in model.named_parameters():
            if names in name:
                param.grad.mul_(factor)
        return result

    return scaled


def test_gradients_that_are_averaged_over_the_ranks() -> None:
    real = parallelize.shard_blocks

    def averaging(model: torch.nn.Module, *args: Any) -> None:
        real(model, *args)
        for unit in model.modules():
            if hasattr(unit, "set_reduce_op_type"):
                unit.set_reduce_op_type("avg")

    said = found(DENSE, 2, parallelize, "shard_blocks", averaging)
    assert said.startswith("the gradient of head.weight of step 1: every part is 1/2 of what it should be")


def test_gradients_that_are_never_reduced() -> None:
    said = found(of(DENSE, dp_shard=1, dp_replicate=2), 2, parallelize, "shard_blocks", lambda *given: None)
    assert said == "the gradient of head.weight of step 1: the ranks hold parts of a sum over dp_replicate, " + (
        "and nothing reduced it"
    )


@pytest.mark.tier("test")
def test_a_module_that_computes_otherwise() -> None:
    def coarser(self: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight, 1e-2)

    said = found(of(DENSE, tp=2), 2, torch.nn.RMSNorm, "forward", coarser)
    assert said.startswith("layers.0.attention_norm.output of step 1: ")


def test_a_loss_that_is_the_mean_of_each_rank() -> None:
    real = loop.RunGroups.over_tokens

    def own(self: loop.RunGroups, value: torch.Tensor) -> torch.Tensor:
        return value if value.dtype == torch.int64 else real(self, value)

    said = found(DENSE, 2, loop.RunGroups, "over_tokens", own)
    assert said.startswith("the model's count of tokens of step 1: every part is 1/2")


def test_a_norm_of_the_own_shards_only() -> None:
    def own(model: parallelize.Parallelized, max_norm: float) -> float:
        grads = [param.grad.to_local() for part in model.parts for param in part.parameters()]
        norm = float(torch.nn.utils.get_total_norm(grads))
        torch._foreach_mul_(grads, min(1.0, max_norm / (norm + 1e-6)))
        return norm

    assert found(DENSE, 2, loop, "clip_gradients", own).startswith("the gradient of the model's norm of the gradients")


def test_micro_batches_that_are_all_reduced_and_added_twice() -> None:
    run = DENSE.with_changes("train", {"accumulate": 2})
    said = found(run, 2, loop, "forward_backward", with_gradients_times(2))
    assert said.startswith("the gradient of head.weight of step 1: every part is 2 times what it should be")


def test_a_rank_that_decays_weights_otherwise() -> None:
    real = loop.build_optimizer

    def other(named: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig, *dtype: torch.dtype) -> Any:
        rank = torch.distributed.get_rank()
        return real(named, dataclasses.replace(config, weight_decay=config.weight_decay + 0.5 * rank), *dtype)

    said = found(DENSE, 2, loop, "build_optimizer", other)
    expected = "rank 1 steps with weight_decay=0.6, one device with weight_decay=0.1"
    assert said.startswith("embed.weight of step 1: ")
    assert said.endswith(f"; {expected}")


@pytest.mark.tier("test")
def test_tied_weights_whose_gradients_are_not_added() -> None:
    said = found(of(TIED, pp=2), 2, TiedWeights, "add_gradients", lambda self: None)
    over = "the ranks hold parts of a sum over pp, and nothing reduced it"
    assert said == f"the gradient of embed.weight of step 1: {over}"


def test_experts_whose_bias_each_rank_updates_by_its_own_tokens() -> None:
    real = parallelize_llama.update_expert_bias

    def own(model: torch.nn.Module, groups: object, **kwargs: bool) -> None:
        del groups
        real(model, [], **kwargs)

    said = found(of(EXPERTS, ep=2), 2, parallelize_llama, "update_expert_bias", own)
    assert "mlp.router.bias of step 1" in said


def test_gradients_of_experts_that_are_divided_by_the_ranks_of_the_others() -> None:
    said = found(of(EXPERTS, ep=2), 2, loop, "forward_backward", with_gradients_times(0.5, ".experts."))
    assert "mlp.experts." in said.partition(" of step 1: ")[0]
    assert "every part is 1/2 of what it should be" in said


# -- drawn right runs --------------------------------------------------------------------------------------------------


@st.composite
def small_runs(draw: st.DrawFn) -> tuple[Config, int]:
    """Draw a run of at most 8 ranks that the trainer takes, in any of its kinds."""
    moe, two = draw(st.booleans()), st.sampled_from([1, 2])
    degrees = {axis: draw(two) for axis in ("dp_replicate", "dp_shard", "tp", "pp")}
    degrees |= {"cp": draw(st.sampled_from([1, 1, 2])), "ep": draw(two) if moe else 1}
    pp = degrees["pp"]
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zero-bubble"])) if pp > 1 else "1f1b"
    accumulate = 2 * pp if pp > 1 else draw(st.sampled_from([1, 2]))
    world_size = math.prod(degrees.values())
    assume(world_size <= 8)
    run = Config(
        model=LlamaConfig(tie_embeddings=draw(st.booleans()), qk_norm=draw(st.booleans()), num_hidden_layers=4),
        train=TrainConfig(model="moe" if moe else "llama", batch_size=16, accumulate=accumulate),
        optimizer=OptimizerConfig(max_grad_norm=draw(st.sampled_from([0.0, 0.5]))),
        experts=ExpertsConfig(num_shared_experts=draw(st.sampled_from([0, 1]))),
        parallel=ParallelConfig(
            **degrees,
            schedule=schedule,
            engine=draw(st.sampled_from(["fully_shard", "hsdp"])),
            checkpointing=draw(st.sampled_from(["none", "full", "selective"])),
            reshard_after_forward=draw(st.booleans()),
            reduce_each=pp == 1 and draw(st.booleans()),
        ),
    )
    try:
        plan_run(run, world_size)
    except ValueError:
        assume(False)
    return run, world_size


@settings(max_examples=max(2, settings().max_examples // 20))
@given(small_runs())
def test_right_runs_of_every_kind_are_proved(drawn: tuple[Config, int]) -> None:
    right(verify_run(*drawn))


# -- smaller runs ------------------------------------------------------------------------------------------------------


@st.composite
def large_runs(draw: st.DrawFn) -> tuple[Config, int]:
    """Draw a run of a cluster that the trainer takes."""
    degree = st.sampled_from([1, 1, 2, 3, 4, 8])
    tp, cp, ep = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4, 8])), draw(degree)
    replicate, shard, pp = draw(degree), draw(degree), draw(st.sampled_from([1, 1, 2, 4, 8]))
    degrees = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp, "cp": cp, "ep": ep, "pp": pp}
    moe = ep > 1 or draw(st.booleans())
    ulysses = draw(st.sampled_from([None, *(size for size in (1, 2, 4, 8) if cp % size == 0 and tp * size <= 32)]))
    schedule, each = draw(st.sampled_from([("1f1b", None), ("gpipe", None), ("interleaved", 2), ("zero-bubble", None)]))
    accumulate = draw(st.sampled_from([1, 2, 8, 16])) if pp == 1 else 2 * pp * (each or 1)
    run = Config(
        model=LlamaConfig(
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=11_008,
            num_hidden_layers=32,
            num_attention_heads=64,
            num_key_value_heads=draw(st.sampled_from([8, 64])),
            tie_embeddings=draw(st.booleans()),
            qk_norm=draw(st.booleans()),
        ),
        experts=ExpertsConfig(num_experts=24 * ep, num_dense_layers=draw(st.sampled_from([0, 3]))),
        train=TrainConfig(
            model="moe" if moe else "llama",
            batch_size=replicate * shard * ep * accumulate,
            seq_len=4096,
            accumulate=accumulate,
        ),
        parallel=ParallelConfig(
            **degrees,
            ulysses_degree=ulysses,
            schedule=schedule,
            stages_per_rank=each if pp > 1 else None,
            checkpointing=draw(st.sampled_from(["none", "full"])),
        ),
        precision=PrecisionConfig("bf16"),
    )
    return run, math.prod(degrees.values())


@pytest.mark.tier("test")
@given(large_runs())
def test_a_run_of_a_cluster_becomes_a_small_one_of_its_kind(drawn: tuple[Config, int]) -> None:
    run, world_size = drawn
    try:
        dims = plan_run(run, world_size)
    except ValueError:
        return
    small, ranks, said = reduced_run(run, world_size)
    few = plan_run(small, ranks)
    axes = sum(getattr(dims, axis) > 1 for axis in ("dp_replicate", "dp_shard", "ep", "cp", "tp", "pp"))
    assert few.world_size == ranks <= min(world_size, max(MOST_RANKS, 4 * 3**axes))
    for axis in ("dp_replicate", "dp_shard", "ep", "cp", "tp", "pp"):
        assert (getattr(few, axis) > 1) == (getattr(dims, axis) > 1), axis
        assert getattr(few, axis) <= getattr(dims, axis)
    assert small.shape().num_parameters() < 1_000_000
    assert small.train.batch_size * small.train.seq_len <= run.train.batch_size * run.train.seq_len
    grouped = run.model.num_attention_heads > run.model.num_key_value_heads
    assert (small.model.num_attention_heads > small.model.num_key_value_heads) == grouped
    assert (small.parallel.schedule, small.parallel.engine) == (run.parallel.schedule, run.parallel.engine)
    assert any(text.startswith("hidden_size 4096 -> ") for text in said)


@pytest.mark.tier("test")
def test_what_tp_cannot_split_evenly_stays_uneven() -> None:
    model = LlamaConfig(num_attention_heads=8, num_key_value_heads=4)
    for vocab, uneven in ((32_000, False), (32_002, True)):
        run = of(dataclasses.replace(DENSE, model=dataclasses.replace(model, vocab_size=vocab)), tp=4)
        small, ranks, _ = reduced_run(run, 32)
        assert (ranks, small.parallel.tp) == (4, 2)
        assert (small.model.vocab_size % 2 == 1) == uneven
        assert small.model.vocab_size >= 256


@pytest.mark.tier("test")
def test_few_ranks_keep_their_degrees_and_the_report_says_what_became_small() -> None:
    run = of(DENSE, tp=4).with_changes("model", {"num_key_value_heads": 4}).with_changes("train", {"batch_size": 12})
    small, ranks, said = reduced_run(run, 12)
    assert (ranks, small.parallel.tp, small.parallel.dp_shard) == (12, 4, 3)
    assert "hidden_size 128 -> 16" in said
    assert "param_dtype fp32 -> fp64" in said


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("parallel", "per_node", "few"),
    [({"ep": 64}, 8, 1), ({"ep": 16, "cp": 4, "fold_experts": True}, 8, 2), ({"ep": 64}, 64, None)],
)
def test_experts_stay_on_several_nodes(parallel: dict[str, Any], per_node: int, few: int | None) -> None:
    run = of(EXPERTS.with_changes("experts", {"num_experts": 64}), **parallel, ranks_per_node=per_node)
    run = run.with_changes("train", {"batch_size": 128, "seq_len": 64})
    assert reduced_run(run, 128)[0].parallel.ranks_per_node == few


@pytest.mark.tier("test")
def test_a_run_that_is_refused_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="cannot split batch_size=3"):
        verify_run(DENSE.with_changes("train", {"batch_size": 3}), 2)
    with pytest.raises(ValueError, match="cannot reduce gradients in each micro-batch: a pipeline"):
        verify_run(of(TIED, pp=2, reduce_each=True), 2)


# -- the one verb ------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch, torch.distributed as dist
RANKS
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def squared(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def scaled(model: torch.nn.Module, mesh: Any) -> None:
    model.register_forward_hook(lambda module, args, output: 2 * output)


@pytest.mark.tier("check")
def test_the_one_verb_takes_models_and_steps() -> None:
    model, x, wrong = lambda: torch.nn.Linear(4, 2), torch.ones(4, 4), {"parallelize": scaled}
    one = sim.verify(model, (x,), "dp=2", **wrong)
    assert one.rows == sim.verify_plan(model, (x,), "dp=2", **wrong).rows
    assert one.first.place == "the model's output"
    one = sim.verify(model, x, "dp=2", step=squared, **wrong)
    assert one.rows == sim.verify_step(squared, model, x, "dp=2", **wrong).rows
    assert one.first.place == "the model's loss"
    with pytest.raises(TypeError, match="cannot verify a program: it is a int"):
        sim.verify(3, 2)


@pytest.mark.tier("test")
def test_the_one_verb_takes_runs_and_scripts(tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text("[parallel]\ntp = 2\n")
    assert sim.verify(tmp_path / "run.toml", 2).rows == sim.verify(Config(parallel=ParallelConfig(tp=2)), 2).rows
    (tmp_path / "train.py").write_text(SCRIPT.replace("RANKS", "dist.init_process_group()"))
    (tmp_path / "one.py").write_text(SCRIPT.replace("RANKS", ""))
    train, reference = tmp_path / "train.py", f"{tmp_path}/one.py"
    assert sim.verify(train, 2, reference=reference, mesh="dp=2").mesh == "dp=2"
    with pytest.raises(ValueError, match=r"cannot run .*nothing.py on 2 ranks: it does not exist"):
        sim.verify(tmp_path / "nothing.py", 2)
    (tmp_path / "one.py").write_text("")
    with pytest.raises(ValueError, match="one device has made no step"):
        sim.verify(train, 2, reference=reference)
    with pytest.raises(TypeError, match="steps"):
        sim.verify(train, 2, steps="2")
