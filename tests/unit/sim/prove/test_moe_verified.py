"""The Llama with experts, split over ranks, proved by `sim.verify_plan`: every module's boundary, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sim
from hyper_parallel import fully_shard
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.models.moe_plan import parallelize_moe

pytestmark = pytest.mark.sim

CONFIG = MoEConfig(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_seq_len=8,
    num_experts=4,
    expert_intermediate_size=6,
    aux_loss_weight=0.0,  # a loss of its own, which the loss of the proof does not have
)
TEXT = torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(0))  # tp=2 cannot halve the sequence


def split(model: Any, mesh: Any, etp: int, op: str = "sum") -> None:
    parallelize_moe(model, mesh, logits="local", etp=etp)
    units: list[Any] = [fully_shard(model.layers[0].mlp.experts)]
    units += [fully_shard(part, mesh=mesh["ep"]) for part in (model.layers[0], model)]
    for unit in units:
        unit.set_reduce_op_type(op)


def proof(etp: int, op: str = "sum") -> Any:
    return sim.verify_plan(
        lambda: MoELlama.build(CONFIG),
        (TEXT,),
        "ep=2,tp=2",
        parallelize=lambda model, mesh: split(model, mesh, etp, op),
        input_layouts=[("ep", "None")],
        loss_fn=lambda logits, tokens: logits.square().sum() / 7,
        optimizer_fn=None,
    )


@pytest.mark.tier("test")
@pytest.mark.parametrize("etp", [1, 2])
def test_what_each_rank_computes_is_a_part_of_what_one_device_does(etp):
    report = proof(etp)
    assert report.ok, str(report)
    seen = {(row.module, row.kind) for row in report.rows}
    assert {("layers.0.mlp.experts", "forward"), ("layers.0.mlp.router", "forward")} <= seen


@pytest.mark.tier("full")
def test_gradients_that_are_averaged_are_noticed():
    report = proof(1, "avg")
    assert not report.ok
    assert "averaged once too often" in report.first.sentence
