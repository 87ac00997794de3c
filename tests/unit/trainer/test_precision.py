"""What a run stores in the dtypes of [precision]: weights, frozen ones, gradients and moments, from start to export."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import sim
from hyper_parallel.core.checkpoint.api import load_checkpoint, read_metadata
from hyper_parallel.models import LlamaConfig
from hyper_parallel.models.lora import Adapter, LoraConfig, merge_adapters
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.config import Config, DataConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from hyper_parallel.trainer.loop import RankPlace, Trainer, train
from hyper_parallel.trainer.optimizer import ShardedAdamW
from hyper_parallel.trainer.preflight import plan_run
from hyper_parallel.trainer.saving import export_checkpoint

pytestmark = [pytest.mark.sim, pytest.mark.tier("test", each=3)]

RUN = Config(
    model=LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
    data=DataConfig(max_bytes=200_000),
    train=TrainConfig(steps=3, batch_size=8, seq_len=16, eval_sequences=4, device="cpu"),
)
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
# What is asked for, then the dtypes of trained weights with their gradients, moments, and frozen weights.
STORED: dict[str, tuple[dict[str, str], tuple[torch.dtype, ...]]] = {
    "default": ({}, (FP32, FP32, FP32)),
    "mixed": ({"param_dtype": "bf16"}, (FP32, FP32, BF16)),
    "pure": ({"param_dtype": "bf16", "master_dtype": "bf16"}, (BF16, BF16, BF16)),
    "moments wider": ({"param_dtype": "bf16", "master_dtype": "bf16", "moments_dtype": "fp32"}, (BF16, FP32, BF16)),
    "moments narrower": ({"moments_dtype": "bf16"}, (FP32, BF16, FP32)),
    "frozen wider": ({"param_dtype": "bf16", "frozen_dtype": "fp32"}, (FP32, FP32, FP32)),
    "reduced in bf16": (dict.fromkeys(("param_dtype", "master_dtype", "reduce_dtype"), "bf16"), (BF16, BF16, BF16)),
    "double": ({"param_dtype": "fp64"}, (FP64, FP64, FP64)),
}


def run_of(given: dict[str, str], rank: int = 0, **parallel: Any) -> Config:
    return replace(RUN, precision=PrecisionConfig(**given), lora=LoraConfig(rank)).with_changes("parallel", parallel)


def taken(config: Config) -> tuple[list[float], dict[str, set[torch.dtype]]]:
    """The losses of a rank, and the dtypes of what it has stored."""
    place = RankPlace.current()
    dims, platform = plan_run(config, place.world_size), get_platform("cpu")
    trainer = Trainer(config, dims, platform, place, dims.build_mesh("cpu"))
    found: dict[str, set[torch.dtype]] = {"trained": set(), "frozen": set(), "moments": set()}

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        found["trained"] |= {
            param.grad.dtype for _, param in trainer.model.named_parameters() if param.grad is not None
        }

    trainer.optimizer.register_step_pre_hook(note)
    losses = [trainer.step().loss for _ in range(config.train.steps)]
    for _, param in trainer.model.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        found["trained" if param.requires_grad else "frozen"].add(local.dtype)
        found["moments"] |= {value.dtype for key, value in trainer.optimizer.state[param].items() if key != "step"}
    return losses, found


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("name", STORED)
def test_each_rank_stores_what_is_asked_for(name: str, rank: int) -> None:
    given, (trained, moments, frozen) = STORED[name]
    ranks = sim.run(taken, 4, args=(run_of(given, rank, tp=2),))
    wanted = {"trained": {trained}, "moments": {moments}, "frozen": {frozen} if rank else set()}
    assert [found for _, found in ranks] == [wanted] * 4
    ((alone, found),) = sim.run(taken, 1, args=(run_of(given, rank),))
    assert found == wanted
    bound = {"double": 1e-12}.get(name, 2e-3 if "param_dtype" in given else 1e-5)
    assert all(losses == pytest.approx(alone, rel=bound) for losses, _ in ranks)


def test_a_frozen_base_computes_the_same_bits_in_half_of_the_memory() -> None:
    narrow, wide = (sim.run(taken, 2, args=(run_of(STORED[name][0], 4),))[0] for name in ("mixed", "frozen wider"))
    assert narrow[0] == wide[0]
    assert narrow[1] != wide[1]


@pytest.mark.parametrize("name", ["pure", "moments wider", "moments narrower"])
def test_a_run_goes_on_bit_for_bit_and_is_exported_as_it_is_stored(tmp_path: Path, name: str) -> None:
    given, (trained, moments, _) = STORED[name]
    losses, saved = [], []
    for folder, legs in ((tmp_path / "whole", (4,)), (tmp_path / "parts", (2, 4))):
        run = run_of(given, tp=2).with_changes("checkpoint", {"folder": str(folder)})
        for steps in legs:
            results = sim.run(train, 4, args=(run.with_changes("train", {"steps": steps}),))
        losses.append(results[0].losses[-2:])
        entries = read_metadata(folder / "step-00000004").tensors.items()
        saved.append({name: torch.empty(x.shape, dtype=x.dtype) for name, x in entries if "generator" not in name})
        load_checkpoint(folder / "step-00000004", saved[-1], strict=False)
    whole, parts = saved
    assert losses[0] == losses[1]
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert {x.dtype for name, x in whole.items() if name.startswith("model.")} == {trained}
    assert {x.dtype for name, x in whole.items() if "exp_avg" in name} == {moments}
    export_checkpoint(tmp_path / "parts", tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert {x.dtype for x in exported.values()} == {trained}
    assert torch.equal(exported["model.embed_tokens.weight"], whole["model.embed.weight"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"master_dtype": "bf16"}, "master_dtype rounds away what param_dtype computes\n  param_dtype: 'fp32'"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype rounds away what param_dtype computes\n"),
        ({"param_dtype": "fp64", "moments_dtype": "fp32"}, "fp64 is for comparing runs"),
        ({"master_dtype": "fp64"}, "fp64 is for comparing runs"),
        ({"frozen_dtype": ""}, "no kind of frozen_dtype ''"),
    ],
)
def test_dtypes_that_lose_data_or_contradict_each_other_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^cannot use \\[precision\\]: .*{re.escape(message)}") as caught:
        PrecisionConfig(**given)
    assert "\n  try: " in str(caught.value)


def test_muon_keeps_its_momentum_in_the_dtype_of_the_weights() -> None:
    muon = replace(run_of({"moments_dtype": "bf16"}), optimizer=OptimizerConfig(muon=True))
    with pytest.raises(ValueError, match=r"Muon keeps its momentum in .*\n  moments_dtype: 'bf16'.*\n  try: "):
        plan_run(muon, 1)
    assert plan_run(replace(muon, precision=PrecisionConfig("bf16", "bf16", "bf16")), 1).world_size == 1


@pytest.mark.parametrize(("stored", "moments"), [(FP32, BF16), (BF16, FP32)])
def test_an_update_computes_in_the_wider_dtype_and_rounds_once(stored: torch.dtype, moments: torch.dtype) -> None:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(64, dtype=stored))
    wide = torch.nn.Parameter(param.detach().to(FP32))
    ours = ShardedAdamW([{"params": [param], "moments": moments}], lr=0.1, weight_decay=0.1, fused=True)
    theirs = torch.optim.AdamW([wide], lr=0.1, weight_decay=0.1, fused=True)
    for _ in range(3):
        param.grad = torch.randn(64, dtype=stored)
        wide.grad = param.grad.to(FP32)
        ours.step()
        theirs.step()
        with torch.no_grad():
            wide.copy_(wide.to(stored))
            for key in ("exp_avg", "exp_avg_sq"):
                theirs.state[wide][key].copy_(theirs.state[wide][key].to(moments))
        assert torch.equal(param, wide.to(stored))
        assert torch.equal(ours.state[param]["exp_avg_sq"].to(FP32), theirs.state[wide]["exp_avg_sq"])


def test_adapters_are_added_in_fp32_and_rounded_once() -> None:
    layer = torch.nn.Linear(8, 8, bias=False, dtype=BF16)
    layer.lora = Adapter(8, 8, LoraConfig(rank=2), layer.weight).to(FP32)
    layer.lora.reset_parameters()
    with torch.no_grad():
        layer.lora.up.normal_()
    wanted = (layer.weight.float() + layer.lora.up @ layer.lora.down * layer.lora.scale).to(BF16)
    assert torch.equal(merge_adapters(layer)["weight"], wanted)
