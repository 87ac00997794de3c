"""Models that a caller makes: a causal language model of transformers, frozen parameters, and adapters of peft."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop_kit import plainly_trained
from torch import nn

import sim
from hyper_parallel.core.checkpoint.api import read_metadata
from hyper_parallel.trainer.config import CheckpointConfig, Config, DataConfig, OptimizerConfig, TrainConfig
from hyper_parallel.trainer.loop import train
from hyper_parallel.trainer.saving import export_checkpoint, export_given

RUN = Config(
    data=DataConfig(max_bytes=100_000),
    optimizer=OptimizerConfig(lr=1e-2, schedule="constant"),
    train=TrainConfig(steps=4, batch_size=8, seq_len=16, accumulate=2, eval_sequences=4, device="cpu"),
).with_changes("precision", {"param_dtype": "fp64"})


def gpt2() -> nn.Module:
    """A GPT-2, of which embeddings, which are the head, too, and the first block are frozen."""
    transformers = pytest.importorskip("transformers")
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts))
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    return model


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(7)  # the base of an adapter is the same whenever it is made
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted: nn.Module = peft.get_peft_model(llama(), settings)
    return adapted


def loaded(kind: str, folder: Path) -> Any:
    """What others make of an exported folder."""
    if kind == "lora":
        assert (folder / "adapter_config.json").exists()
        assert not (folder / "model.safetensors").exists()
        return pytest.importorskip("peft").PeftModel.from_pretrained(llama(), folder)
    return pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.tier("test")
@pytest.mark.sim
@pytest.mark.parametrize(("kind", "make"), [("gpt2", gpt2), ("lora", lora)])
def test_a_model_is_trained_as_by_a_plain_loop_whatever_the_ranks(
    kind: str, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(RUN.train.seed)
    plain = make().double().train()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    expected = plainly_trained(plain, RUN)
    # The norms of transformers' Llama compute in float32 whatever its weights are.
    close = {"rel": 1e-11 if kind == "gpt2" else 1e-5}
    assert train(RUN, model=make).losses == pytest.approx(expected, **close)

    saving = replace(RUN, checkpoint=CheckpointConfig(str(tmp_path / "run"), every=2))
    degrees = saving.with_changes("parallel", {"dp_replicate": 2})
    half = degrees.with_changes("train", {"steps": 2})
    first = sim.run(train, world_size=4, args=(half,), kwargs={"model": make})[0]
    rest = sim.run(train, world_size=2, args=(saving,), kwargs={"model": make})[0]
    assert first.layout == "4 ranks: dp_replicate=2 x dp_shard=2"
    assert rest.first_step == 3
    assert first.losses + rest.losses == pytest.approx(expected, **close)
    assert rest.parameters == sum(param.numel() for param in plain.parameters())

    trained = {name for name, param in plain.named_parameters() if param.requires_grad}
    saved = read_metadata(tmp_path / "run" / "step-00000004").tensors
    frozen = {name for name, _ in plain.named_parameters()} - trained
    assert not any(f"model.{name}" in saved or f"optimizer.{name}.exp_avg" in saved for name in frozen)
    assert all(f"model.{name}" in saved and f"optimizer.{name}.exp_avg" in saved for name in trained)

    torch.manual_seed(RUN.train.seed)
    export_given(tmp_path / "run", make(), tmp_path / "out")
    found, ids = loaded(kind, tmp_path / "out").eval(), torch.arange(20).view(2, 10)
    torch.testing.assert_close(found(ids).logits.double(), plain.eval()(ids).logits, rtol=1e-4, atol=1e-5)
    assert found.generate(input_ids=ids[:1], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 13)
    for name in frozen:
        assert torch.equal(plain.get_parameter(name), before[name])
    assert not all(torch.equal(plain.get_parameter(name), before[name]) for name in trained)


class Small(nn.Module):
    """A model of nobody's: it returns logits, and has no list of blocks."""

    def __init__(self, is_trained: bool = True) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.requires_grad_(is_trained)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.table(ids))
        return found


@pytest.mark.sim
def test_any_module_that_returns_logits_is_trained() -> None:
    alone = train(RUN, model=Small)
    ranks = sim.run(train, world_size=4, args=(RUN,), kwargs={"model": Small})[0]
    assert ranks.losses == pytest.approx(alone.losses, rel=1e-12)
    assert len(set(alone.losses)) == 4


class Scaled(Small):
    """Its logits have a temperature, which is a parameter without a dim, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale


class OneOfMany(Scaled):
    """Its scale is one element of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3, 3), 0.5)[:1, 1])


def test_a_parameter_of_one_element_with_any_stride_is_trained() -> None:
    assert train(RUN, model=OneOfMany).losses == pytest.approx(train(RUN, model=Scaled).losses, rel=1e-6)


@pytest.mark.tier("test")
@pytest.mark.sim
def test_a_parameter_without_a_dim_is_trained(tmp_path: Path) -> None:
    config = RUN.with_changes("checkpoint", {"folder": str(tmp_path), "every": 2})
    alone = train(RUN, model=Scaled)
    ranks = sim.run(train, world_size=2, args=(config,), kwargs={"model": Scaled})[0]
    assert ranks.losses == pytest.approx(alone.losses, rel=1e-12)
    shutil.rmtree(tmp_path / "step-00000004")
    again = sim.run(train, world_size=4, args=(config,), kwargs={"model": Scaled})[0]
    assert again.losses == pytest.approx(alone.losses[2:], rel=1e-12)


class Normed(Small):
    """A batch norm without synchronisation: each rank's running statistics are those of its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.table(ids).transpose(1, 2)).transpose(1, 2))
        return found

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder)


@pytest.mark.sim
def test_each_ranks_statistics_of_a_batch_norm_are_saved(tmp_path: Path) -> None:
    models: dict[int, nn.Module] = {}

    def body(config: Config) -> list[float]:
        def make() -> nn.Module:
            return models.setdefault(torch.distributed.get_rank(), Normed())

        models.pop(torch.distributed.get_rank(), None)
        return list(train(config, model=make).losses)

    def statistics() -> list[list[float]]:
        return [models[rank].get_buffer("norm.running_mean").tolist() for rank in range(2)]

    whole = RUN.with_changes("checkpoint", {"folder": str(tmp_path / "whole")})
    losses, expected = sim.run(body, world_size=2, args=(whole,))[0], statistics()
    assert expected[0] != expected[1]
    export_given(tmp_path / "whole", Normed(), tmp_path / "exported")
    assert torch.load(tmp_path / "exported")["norm.running_mean"].tolist() == pytest.approx(expected[0], rel=1e-6)

    parts = RUN.with_changes("checkpoint", {"folder": str(tmp_path / "parts"), "every": 2})
    sim.run(body, world_size=2, args=(parts,))
    shutil.rmtree(tmp_path / "parts" / "step-00000004")
    assert sim.run(body, world_size=2, args=(parts,))[0] == losses[2:]
    assert statistics() == expected
    with pytest.raises(ValueError, match=r"each of 2 ranks has saved its own 'model.norm.running_mean', and 4 load it"):
        sim.run(body, world_size=4, args=(parts,))


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("parallel", {"tp": 2}, "it is split by data parallelism only\\n  degrees: tp=2"),
        ("parallel", {"checkpointing": "full"}, r"checkpointing is for \[model\]"),
        ("train", {"start_from": "folder"}, r"start_from is for \[model\]"),
    ],
)
@pytest.mark.sim
def test_what_only_our_models_can_do_is_refused(section: str, changes: dict[str, Any], message: str) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=message):
            train(RUN.with_changes(section, changes), model=Small)

    sim.run(body, world_size=2)


@pytest.mark.sim
def test_models_that_cannot_be_trained_are_refused_on_every_rank() -> None:
    def body() -> None:
        torch.manual_seed(torch.distributed.get_rank())
        own = Small()
        with pytest.raises(ValueError, match="the ranks' models have other weights"):
            train(RUN, model=lambda: own)
        with pytest.raises(ValueError, match="none of its parameters is to be trained"):
            train(RUN, model=lambda: Small(is_trained=False))

    sim.run(body, world_size=2)


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path) -> None:
    config = replace(RUN, checkpoint=CheckpointConfig(str(tmp_path))).with_changes("train", {"steps": 1})
    train(config, model=Small)
    with pytest.raises(ValueError, match=r"it is of a Small, which train\(config, model=...\) was given"):
        export_checkpoint(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="it is of another model"):
        export_given(tmp_path, gpt2(), tmp_path / "out")
    with pytest.raises(TypeError, match="a Small cannot write itself"):
        export_given(tmp_path, Small(), tmp_path / "out")
    with pytest.raises(ValueError, match=r"cannot go on from .*: it is of another model"):
        train(config.with_changes("train", {"steps": 2}))
