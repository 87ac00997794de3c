"""`train(config)` with every parallel dimension, and with products of them: the numbers are those of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rounding_kit import measured

import sim
from hyper_parallel.core.pipeline import SCHEDULES
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer.config import Config, DataConfig, ExpertsConfig, PrecisionConfig, TrainConfig
from hyper_parallel.trainer.loop import train
from hyper_parallel.trainer.report import TrainResult

pytestmark = pytest.mark.tier("test", each=2)

DENSE = Config(
    model=LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    ),
    data=DataConfig(max_bytes=200_000, ignored=0.2),
    train=TrainConfig(steps=2, batch_size=8, seq_len=16, accumulate=2, eval_sequences=6, device="cpu"),
    precision=PrecisionConfig("fp64"),
)
EXPERTS = replace(
    DENSE,
    train=replace(DENSE.train, model="moe"),
    experts=ExpertsConfig(num_experts=4, expert_intermediate_size=16, aux_loss_weight=0.1, bias_update_rate=0.05),
)
Numbers = dict[str, Any]

ZERO_BUBBLE = "zero-bubble" if SCHEDULES["zero-bubble"].is_available else "looped-bfs"  # before torch 2.13 it is wrong

DENSE_2 = [
    {"tp": 2},
    {"cp": 2, "ulysses_degree": 1},
    {"cp": 2, "ulysses_degree": 1, "checkpointing": "selective"},  # keeps results of kernels, which the ring adds up
    {"cp": 2, "ulysses_degree": 2, "checkpointing": "full"},
    {"pp": 2},
    {"pp": 2, "schedule": ZERO_BUBBLE},
    {"dp_replicate": 2},
    {"dp_shard": 2, "checkpointing": "selective"},
    {"dp_shard": 2, "reshard_after_forward": False},
    {"dp_shard": 2, "engine": "hsdp"},
]
DENSE_4 = [
    {"cp": 2, "ulysses_degree": 1, "tp": 2, "tp_chunks": 2},
    {"cp": 4, "ulysses_degree": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "dp_shard": 2, "engine": "hsdp"},
    {"pp": 2, "tp": 2, "checkpointing": "full"},
    {"pp": 2, "dp_shard": 2, "schedule": "interleaved"},
    {"dp_replicate": 2, "cp": 2},
    {"dp_replicate": 2, "tp": 2},
]
EXPERTS_2 = [
    {"ep": 2},
    {"pp": 2},
    {"tp": 2, "tp_chunks": 2},
    {"cp": 2, "ulysses_degree": 1},
    {"tp": 2, "etp": 1, "fold_experts": True},
    {"cp": 2, "fold_experts": True, "checkpointing": "selective"},
]
EXPERTS_4 = [
    {"ep": 2, "tp": 2, "etp": 1},
    {"ep": 2, "tp": 2, "etp": 2},
    {"ep": 2, "pp": 2},
    {"ep": 2, "cp": 2},
    {"ep": 2, "dp_replicate": 2},
    {"ep": 4, "checkpointing": "full"},
    {"ep": 2, "tp": 2, "etp": 1, "fold_experts": True},
    {"cp": 2, "tp": 2, "etp": 1, "fold_experts": True},
    {"cp": 2, "tp": 2, "etp": 2, "fold_experts": True},
]
EXPERTS_8 = [
    {"ep": 2, "dp_replicate": 2, "tp": 2, "etp": 1},
    {"ep": 2, "dp_shard": 2, "pp": 2, "tp": 1},
    {"ep": 2, "dp_shard": 2, "tp": 2, "etp": 1, "fold_experts": True},
    {"cp": 2, "dp_replicate": 2, "pp": 2, "fold_experts": True},
    {"cp": 2, "tp": 2, "pp": 2, "etp": 1, "fold_experts": True, "layers_per_stage": "4,0"},  # no experts on the last
]
WHOLE_4 = [
    {"dp_shard": 4, "whole_parameters": True},
    {"dp_replicate": 2, "tp": 2, "whole_parameters": True},
    {"pp": 2, "whole_parameters": True},
    {"ep": 2, "checkpointing": "full", "whole_parameters": True},
]
MUON_4 = [{"dp_shard": 4}, {"dp_shard": 4, "ep": 1}, *WHOLE_4]  # with "ep", experts
NO_GLOO = ("sim", "gpu", "npu")
GLOO = [  # of each way to communicate one
    {"tp": 2},
    {"cp": 2, "ulysses_degree": 1},
    {"pp": 2},
    {"dp_shard": 2, "engine": "hsdp"},
    {"ep": 2},
    {"cp": 4, "ulysses_degree": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"pp": 2, "dp_shard": 2, "schedule": "interleaved"},
    {"ep": 2, "tp": 2, "etp": 1},
    {"ep": 2, "pp": 2},
    {"cp": 2, "tp": 2, "etp": 1, "fold_experts": True},
]


def named(degrees: Numbers) -> str:
    return "-".join(f"{name}{value}" for name, value in degrees.items())


def numbers_of(result: TrainResult) -> Numbers:
    return {
        "losses": result.losses,
        "norms": [record.grad_norm for record in result.steps],
        "tokens": [record.tokens for record in result.steps],
        "valid": result.valid_loss,
    }


@pytest.fixture(scope="module")
def dense() -> Numbers:
    return numbers_of(train(DENSE))


@pytest.fixture(scope="module")
def experts() -> Numbers:
    return numbers_of(train(EXPERTS))


@pytest.fixture(scope="module")
def dense_by_muon(dense: Numbers) -> Numbers:
    return by_muon(DENSE, dense)


@pytest.fixture(scope="module")
def experts_by_muon(experts: Numbers) -> Numbers:
    return by_muon(EXPERTS, experts)


def by_muon(config: Config, by_adamw: Numbers) -> Numbers:
    """The numbers of Muon; a run by the other optimizer would be told apart."""
    found = numbers_of(train(config.with_changes("optimizer", {"muon": True})))
    assert found["losses"] != pytest.approx(by_adamw["losses"], rel=1e-6)
    return found


def in_float32() -> dict[str, torch.Tensor]:
    """The model that rounds most, on one device, of which the rounding is measured where there is no float64."""
    numbers = numbers_of(train(replace(EXPERTS, precision=PrecisionConfig())))
    return {name: torch.tensor(numbers[name]) for name in ("losses", "norms", "valid")}


@pytest.fixture
def rounding(request) -> float:
    """Measured before there are ranks: on them, training on the CPU would be on all of them."""
    return measured(in_float32) if "npu" in request.node.name else 0.0  # all others reduce float64


def check(ctx, config: Config, degrees: Numbers, alone: Numbers, rounding: float = 0.0) -> None:
    """Train on the ranks of `ctx`; all see the same numbers, and those are what one device sees."""
    exact = ctx.float_dtype is torch.float64
    run = config.with_changes("parallel", degrees).with_changes("train", {"device": ctx.device_type})
    run = replace(run, precision=PrecisionConfig("fp64" if exact else "fp32"))
    found = numbers_of(train(run))
    everyone: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(everyone, found)
    assert everyone == [found] * ctx.world_size, f"{named(degrees)}: every rank must see the same numbers"
    rel = 1e-9 if exact else rounding
    for what in ("tokens", "losses", "norms", "valid"):
        assert found[what] == pytest.approx(alone[what], rel=rel), f"{named(degrees)}: {what}"


@pytest.mark.parametrize("degrees", DENSE_2, ids=named)
@sim.ranks(2, backends=NO_GLOO)
def test_dense_on_two_ranks(ctx, dense: Numbers, degrees: Numbers, rounding: float):
    check(ctx, DENSE, degrees, dense, rounding)


@pytest.mark.parametrize("degrees", DENSE_4, ids=named)
@sim.ranks(4, backends=NO_GLOO)
def test_dense_on_four_ranks(ctx, dense: Numbers, degrees: Numbers, rounding: float):
    check(ctx, DENSE, degrees, dense, rounding)


@pytest.mark.parametrize("degrees", EXPERTS_2, ids=named)
@sim.ranks(2, backends=NO_GLOO)
def test_experts_on_two_ranks(ctx, experts: Numbers, degrees: Numbers, rounding: float):
    check(ctx, EXPERTS, degrees, experts, rounding)


@pytest.mark.tier("full", each=3)
@pytest.mark.parametrize("degrees", EXPERTS_4, ids=named)
@sim.ranks(4, backends=NO_GLOO)
def test_experts_on_four_ranks(ctx, experts: Numbers, degrees: Numbers, rounding: float):
    check(ctx, EXPERTS, degrees, experts, rounding)


@pytest.mark.tier("full", each=3)
@pytest.mark.parametrize("degrees", EXPERTS_8, ids=named)
@sim.ranks(8, backends=("sim",))
def test_experts_on_eight_simulated_ranks(ctx, experts: Numbers, degrees: Numbers):
    check(ctx, EXPERTS, degrees, experts)


def check_muon(ctx, config: Config, degrees: Numbers, alone: Numbers) -> None:
    """Train by Muon, with parameters that are shards, or whole on one rank."""
    check(ctx, config.with_changes("optimizer", {"muon": True}), degrees, alone)


@pytest.mark.parametrize("degrees", MUON_4, ids=named)
@sim.ranks(4, backends=("sim",))
def test_muon_on_four_simulated_ranks(ctx, dense_by_muon: Numbers, experts_by_muon: Numbers, degrees: Numbers):
    config, alone = (EXPERTS, experts_by_muon) if "ep" in degrees else (DENSE, dense_by_muon)
    check_muon(ctx, config, degrees, alone)


PURE = replace(DENSE, precision=PrecisionConfig("bf16", master_dtype="bf16"))


@pytest.fixture(scope="module")
def pure() -> Numbers:
    return numbers_of(train(PURE))


@pytest.mark.parametrize("degrees", [{}, {"tp": 2}], ids=named)
@sim.ranks(2, backends=("sim", "gloo", "gpu", "npu"))
def test_bf16_without_other_weights(ctx, pure: Numbers, dense: Numbers, degrees: Numbers):
    run = PURE.with_changes("parallel", degrees).with_changes("train", {"device": ctx.device_type})
    found = numbers_of(train(run))
    assert found["losses"] == pytest.approx(pure["losses"], rel=2e-3)
    assert found["losses"] != pytest.approx(dense["losses"], rel=1e-6), "bf16 must have been used"


# On processes, which cost seconds to start, one after the other; each pays anew for what simulated ranks, which train
# with all degrees, find out together.


def check_each(ctx, dense: list[Numbers], experts: list[Numbers], *alone: Numbers) -> None:
    for config, ways, wanted in zip((DENSE, EXPERTS), (dense, experts), alone, strict=True):
        for degrees in (each for each in ways if each in GLOO):
            check(ctx, config, degrees, wanted)


@pytest.mark.tier("full")
@sim.ranks(2, backends=("gloo",))
def test_two_processes(ctx, dense: Numbers, experts: Numbers):
    check_each(ctx, DENSE_2, EXPERTS_2, dense, experts)


@pytest.mark.tier("deep")
@sim.ranks(4, backends=("gloo",))
def test_four_processes(ctx, dense: Numbers, experts: Numbers, dense_by_muon: Numbers):
    check_each(ctx, DENSE_4, EXPERTS_4, dense, experts)
    check_muon(ctx, DENSE, WHOLE_4[0], dense_by_muon)


@sim.ranks(2, backends=("sim",))
def test_one_device_with_other_text_is_told_apart(ctx, dense: Numbers):
    """The comparison can fail: another seed is another run."""
    with pytest.raises(AssertionError, match="tp2"):
        check(ctx, DENSE.with_changes("train", {"seed": 1}), {"tp": 2}, dense)
