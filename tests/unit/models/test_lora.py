"""LoRA: adapters that are trained on any ranks as by a plain loop, saved alone, and exported for peft or merged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_loop_kit import plainly_trained
from safetensors.torch import load_file
from torch import nn

import sim
from hyper_parallel import cli, init_parameters
from hyper_parallel.core.checkpoint.api import read_metadata
from hyper_parallel.models import Llama, LlamaConfig, MoEConfig, MoELlama, export_huggingface
from hyper_parallel.models.lora import LoraConfig, with_lora
from hyper_parallel.trainer.config import CheckpointConfig, Config, DataConfig, OptimizerConfig, TrainConfig
from hyper_parallel.trainer.loop import train
from hyper_parallel.trainer.saving import export_checkpoint, run_to_go_on_from

pytestmark = pytest.mark.tier("test")

SHAPE = LlamaConfig(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_seq_len=32,
)
RUN = Config(
    model=SHAPE,
    lora=LoraConfig(rank=3, alpha=12.0),
    data=DataConfig(max_bytes=100_000),
    optimizer=OptimizerConfig(lr=1e-2, schedule="constant", warmup_steps=0),
    train=TrainConfig(steps=3, batch_size=8, seq_len=16, accumulate=2, eval_sequences=4, device="cpu"),
).with_changes("precision", {"param_dtype": "fp64"})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "base"
    export_huggingface(Llama.build(SHAPE, 3).state_dict(), SHAPE, folder)
    return folder


def starting_from(folder: Path, run: Config = RUN) -> Config:
    return run.with_changes("train", {"start_from": str(folder)})


class PlainLora(nn.Module):
    """A layer and its adapter, as papers write it."""

    def __init__(self, layer: nn.Linear, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Parameter(down.clone()), nn.Parameter(up.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 12.0 / 3 * (x @ self.down.T @ self.up.T)  # type: ignore[no-any-return]


class Plain(nn.Module):
    """The model of the run on one device, with adapters of the test's own in the named layers."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = Llama.build(SHAPE, 3).double().requires_grad_(False)
        drawn = init_parameters(with_lora(Llama(SHAPE).double(), RUN.lora), RUN.train.seed).state_dict()
        for path, module in list(self.model.named_modules()):
            if path.endswith(names):
                owner, _, last = path.rpartition(".")
                first = (drawn[f"{path}.lora.{name}"] for name in ("down", "up"))
                setattr(self.model.get_submodule(owner), last, PlainLora(module, *first))  # type: ignore[arg-type]

    def forward(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.model(ids))


@pytest.mark.tier("full")
@pytest.mark.sim
@pytest.mark.parametrize(
    ("targets", "names"),
    [("all-linear", ("wq", "wk", "wv", "wo", "w1", "w2", "w3")), ("q_proj, down_proj", ("wq", "w2"))],
)
def test_adapters_are_trained_as_by_a_plain_loop_whatever_the_ranks(
    targets: str, names: tuple[str, ...], base: Path, tmp_path: Path
) -> None:
    plain = Plain(names)
    expected = plainly_trained(plain, RUN)
    run = replace(starting_from(base), checkpoint=CheckpointConfig(str(tmp_path / "run"), every=2))
    run = run.with_changes("lora", {"targets": targets})
    first = run.with_changes("train", {"steps": 2}).with_changes("parallel", {"tp": 2})
    begun = sim.run(train, world_size=4, args=(first,))[0]
    ended = sim.run(train, world_size=2, args=(run.with_changes("parallel", {"pp": 2}),))[0]
    assert (begun.layout, ended.layout) == ("4 ranks: dp_shard=2 x tp=2", "2 ranks: pp=2")
    assert begun.losses + ended.losses == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) == 3

    trained = {
        f"layers.{layer}.{'attention' if name in ('wq', 'wk', 'wv', 'wo') else 'mlp'}.{name}.lora.{half}"
        for layer in (0, 1)
        for name in names
        for half in ("down", "up")
    }
    saved = set(read_metadata(tmp_path / "run" / "step-00000003").tensors)
    assert {name.removeprefix("model.") for name in saved if name.startswith("model.")} == trained
    assert {name.split(".", 1)[1].rsplit(".", 1)[0] for name in saved if name.endswith(".exp_avg")} == trained


@pytest.mark.sim
@pytest.mark.parametrize(
    "degrees",
    [{"ep": 2, "tp": 2, "etp": 1}, {"cp": 2, "checkpointing": "selective"}, {"tp": 2, "reshard_inputs": True}],
    ids=lambda degrees: next(iter(degrees)),
)
def test_adapters_of_a_model_with_experts_are_the_same_on_all_degrees(degrees: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 8, "num_dense_layers": 1}
    shape = MoEConfig(**{**vars(SHAPE), **sizes}, num_shared_experts=1)
    export_huggingface(MoELlama.build(shape, 3).state_dict(), shape, tmp_path / "base")
    run = starting_from(tmp_path / "base", RUN.with_shape(shape))
    ranks = 4 if "ep" in degrees else 2
    found = sim.run(train, world_size=ranks, args=(run.with_changes("parallel", degrees),))[0]
    assert found.losses == pytest.approx(train(run).losses, rel=1e-12)


def test_dropout_is_the_same_when_blocks_are_computed_again(base: Path) -> None:
    run = starting_from(base).with_changes("lora", {"dropout": 0.5})
    losses = train(run).losses
    assert train(run.with_changes("parallel", {"checkpointing": "full"})).losses == losses
    assert train(starting_from(base)).losses[2] != losses[2]


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    run = replace(starting_from(base), checkpoint=CheckpointConfig(str(folder)))
    train(run.with_changes("lora", {"targets": "v_proj,o_proj,gate_proj"}))
    return folder


IDS = torch.arange(20).view(2, 10)


def logits_of(folder: Path) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model.eval()(IDS).logits  # type: ignore[no-any-return]


def test_an_adapter_is_exported_as_peft_has_it_and_merged_it_computes_the_same(
    trained: Path, base: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    code = export_checkpoint(trained, tmp_path / "adapter")
    assert code == 2 * 3 * ((16 + 8) + (16 + 16) + (16 + 24))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 3, 12.0)
    assert settings["base_model_name_or_path"] == str(base)
    assert sorted(settings["target_modules"]) == ["gate_proj", "o_proj", "v_proj"]

    # By the names of transformers, W + alpha / rank * B A is what peft computes.
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        product = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        model.get_submodule(path).weight.data += 12.0 / 3 * product
    expected = model.eval()(IDS).logits
    assert not torch.allclose(expected, logits_of(base), atol=1e-3)

    export_checkpoint(trained, tmp_path / "merged", merge=True)
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-6, atol=1e-7)


def test_peft_loads_what_is_exported(trained: Path, base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    export_checkpoint(trained, tmp_path / "adapter")
    export_checkpoint(trained, tmp_path / "merged", merge=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    found = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", autocast_adapter_dtype=False).eval()
    torch.testing.assert_close(found(IDS).logits, logits_of(tmp_path / "merged"), rtol=1e-6, atol=1e-7)
    automatic = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert automatic.generate(input_ids=IDS[:1], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 13)


def test_export_says_what_it_has_written_and_where_the_model_is(
    trained: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(*words: str) -> str:
        with pytest.raises(SystemExit):
            cli.app(["export", *words])
        return "".join(capsys.readouterr())

    assert "wrote 576 parameters to" in export(str(trained), str(tmp_path / "adapter"))
    assert "it has weights already" in export(str(trained), str(tmp_path / "adapter"))
    moved = base.rename(base.with_name("moved"))
    try:
        assert "there is no such folder" in export(str(trained), str(tmp_path / "merged"), "--merge")
        said = export(str(trained), str(tmp_path / "merged"), "--merge", "--base", str(moved))
        assert f"wrote {SHAPE.num_parameters():,} parameters to" in said
    finally:
        moved.rename(base)
    train(replace(RUN, lora=LoraConfig(), checkpoint=CheckpointConfig(str(tmp_path / "whole"))))
    for given in (["--merge"], ["--base", str(base)]):
        assert "it has all weights, and no adapters" in export(str(tmp_path / "whole"), str(tmp_path / "out"), *given)


@pytest.mark.tier("full", each=6)
@pytest.mark.sim
@pytest.mark.parametrize("rank", [0, 3])
def test_any_model_of_transformers_is_trained_from_its_folder_and_exported(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts)).eval()
    base.save_pretrained("gpt2")
    words = f"--start-from gpt2 --seq-len 16 --batch-size 4 --data-bytes 100000 --precision fp64 --lora-rank {rank}"

    def run(*more: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.app(["train", *words.split(), *more])
        said = "".join(capsys.readouterr())
        assert ended.value.code == 0, said
        return said

    def losses() -> list[float]:
        return [json.loads(line)["loss"] for line in Path("out/train.jsonl").read_text().splitlines()]

    assert "the gpt2 of gpt2, as transformers has it" in run("--steps", "4", "--no-predict")
    alone = losses()
    run("--steps", "2", "--sim", "2", "--checkpoint-dir", "run")
    said = run("--steps", "4", "--checkpoint-dir", "run", "--sim", "4", "--tp", "2")
    assert "goes on from step 2 in run" in said
    assert "tp=2 splits transformer.h.*.mlp; proved on simulated ranks" in said
    assert losses() == pytest.approx(alone, rel=1e-11)
    saved = read_metadata("run/step-00000004").tensors
    assert all(".lora." in name for name in saved if name.startswith("model.")) == bool(rank)

    count = export_checkpoint("run", tmp_path / "out", merge=rank > 0)
    assert count == sum(param.numel() for param in base.parameters())
    out = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    if rank:
        assert export_checkpoint("run", "adapter") == 2 * 3 * ((16 + 48) + (16 + 16) + 2 * (16 + 64))
        tensors = load_file("adapter/adapter_model.safetensors")
        assert json.loads(Path("adapter/adapter_config.json").read_text())["fan_in_fan_out"] is True
        for name in [name for name in tensors if name.endswith("lora_A.weight")]:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            product = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            base.get_submodule(path).weight.data += (2 * product.T).float()  # alpha is twice the rank
        torch.testing.assert_close(out(IDS).logits, base(IDS).logits, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(out(IDS).logits, transformers.GPT2LMHeadModel.from_pretrained("gpt2")(IDS).logits)
    with pytest.raises(ValueError, match="it is the model of a folder, and none is given"):
        TrainConfig(model="transformers")


def test_the_scale_is_alpha_in_ranks() -> None:
    assert (LoraConfig(rank=4, alpha=16).scale, LoraConfig(rank=16, alpha=4).scale, LoraConfig(rank=4).scale) == (
        4,
        0.25,
        2,
    )


def test_what_cannot_be_adapted_is_refused_before_a_step(base: Path, trained: Path) -> None:
    with pytest.raises(ValueError, match="the weights that they stand beside would be random"):
        train(RUN)
    run = starting_from(base)
    with pytest.raises(ValueError, match=r"the model has no linear layer 'qproj'(?s:.*)try: 'q_proj'"):
        train(run.with_changes("lora", {"targets": "v_proj,qproj"}))
    with pytest.raises(ValueError, match="no linear layer is left"):
        train(run.with_changes("lora", {"targets": ","}))
    with pytest.raises(ValueError, match="dropout must be at least 0, below 1"):
        run.with_changes("lora", {"dropout": 1.5})
    with pytest.raises(ValueError, match="set: start_from, lora"):
        train(run, model=lambda: Llama(SHAPE))
    other = replace(run, checkpoint=CheckpointConfig(str(trained)))
    with pytest.raises(ValueError, match="it is of another model\n  lora: "):
        train(other)
    with pytest.raises(ValueError, match="it is of another model\n  lora: "):
        train(replace(other, lora=LoraConfig()))


def test_other_weights_beside_the_same_adapters_are_told(base: Path, tmp_path: Path) -> None:
    """A checkpoint has the adapters alone, and those of one model say nothing beside the weights of another."""
    run = replace(starting_from(base), checkpoint=CheckpointConfig(str(tmp_path / "run")))
    train(run.with_changes("train", {"steps": 1}))
    assert run_to_go_on_from(run) == (1, [])
    shutil.copytree(base, other := str(tmp_path / "other"))
    told = f"start_from: {str(base)!r} then, {other!r} now"
    assert run_to_go_on_from(run.with_changes("train", {"start_from": other})) == (1, [told])
