"""Folders of Hugging Face: ours in transformers, and theirs in our models, compute the same; and what is refused."""

from __future__ import annotations

import builtins
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyper_parallel.models import Llama, LlamaConfig, MoEConfig, MoELlama
from hyper_parallel.models.hf_folder import check_normalizers, inside, load_by_transformers, read_settings
from hyper_parallel.models.hf_weights import export_huggingface, import_huggingface, load_huggingface, other_model
from hyper_parallel.trainer.config import Config, DataConfig, TrainConfig
from hyper_parallel.trainer.data import load_tokenizer
from hyper_parallel.trainer.loop import train
from hyper_parallel.trainer.saving import model_of_folder, with_shape_of

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_seq_len": 24,
    "rope_theta": 5_000.0,
    "norm_eps": 1e-6,
}
DENSE = LlamaConfig(**SIZES)  # type: ignore[arg-type]
SPARSE = MoEConfig(**SIZES, num_experts=6, experts_per_token=3, expert_intermediate_size=20, num_dense_layers=1)  # type: ignore[arg-type]
QWEN = replace(SPARSE, qk_norm=True, score="softmax", num_shared_experts=0, num_dense_layers=0, bias_update_rate=0.0)
LONG = {"rope_theta": 100.0, "rope_factor": 6.0, "rope_original_seq_len": 64}  # of four frequencies: one fast, one slow
CONFIGS = {
    "dense": DENSE,
    "dense, long": replace(DENSE, **LONG),  # type: ignore[arg-type]
    "experts, long": replace(SPARSE, **LONG, rope_low_freq_factor=0.5, rope_high_freq_factor=3),  # type: ignore[arg-type]
    "tied": replace(DENSE, tie_embeddings=True),
    "experts": replace(SPARSE, num_shared_experts=2, routed_scale=1.5),
    "no shared experts": replace(SPARSE, num_shared_experts=0),
    "experts, tied, weights as they are": replace(SPARSE, norm_weights=False, tie_embeddings=True),
    "wide heads": replace(DENSE, head_size=12),
    "norms of heads": replace(DENSE, qk_norm=True, head_size=6, tie_embeddings=True),
    "norms of heads, softmax": QWEN,
    "norms of heads, softmax, weights as they are": replace(QWEN, norm_weights=False, head_size=12),
}
TOKENS = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(3))


def build(config: LlamaConfig, seed: int = 0) -> Llama:
    """A model whose norms and router biases are not what they start with."""
    model = (MoELlama if isinstance(config, MoEConfig) else Llama).build(config, seed)
    generator = torch.Generator().manual_seed(seed)
    no_bias = isinstance(config, MoEConfig) and config.score == "softmax"
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1 and not (no_bias and name.endswith("router.bias")):
                tensor.add_(torch.empty_like(tensor).uniform_(-0.3, 0.3, generator=generator))
    return model.double() if not isinstance(config, MoEConfig) else model


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_transformers_computes_the_same_from_what_is_exported(config: LlamaConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = build(config)
    export_huggingface(model.state_dict(), config, tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert files == sorted(set(index["weight_map"].values()))
    assert all((tmp_path / file).stat().st_size < 20_000 + 4_000 for file in files), "4,000: the files' headers"
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    dtype = next(model.parameters()).dtype
    assert theirs.dtype == dtype
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (None, None)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_what_is_exported_comes_back_bit_for_bit(config: LlamaConfig, tmp_path: Path) -> None:
    model, other = build(config), build(config, seed=1)
    export_huggingface(model.state_dict(), config, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    found, load = import_huggingface(tmp_path)
    assert found == config
    load(other.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "glm4_moe", "qwen3_moe"])
def test_what_transformers_saves_is_loaded(kind: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    same = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 24,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(0)
    if kind == "llama":
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**same))
    elif kind == "qwen3":
        theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**same, head_dim=12))
    elif kind == "qwen3_moe":
        more = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
        theirs = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**same, **more))
        with torch.no_grad():
            for layer in theirs.model.layers:
                layer.mlp.gate.weight.normal_(std=0.1)
    else:
        more = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
        config = transformers.Glm4MoeConfig(**same, **more, partial_rotary_factor=1.0, head_dim=8)
        theirs = transformers.Glm4MoeForCausalLM(config)
        with torch.no_grad():
            for layer in theirs.model.layers[1:]:
                layer.mlp.gate.weight.normal_(std=0.1)
                layer.mlp.gate.e_score_correction_bias.uniform_(-0.5, 0.5)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    found, load = import_huggingface(tmp_path)
    assert (type(found), found.tie_embeddings, found.max_seq_len) == (
        MoEConfig if kind.endswith("moe") else LlamaConfig,
        tied,
        24,
    )
    model = (MoELlama if kind.endswith("moe") else Llama).build(found, seed=9)
    if kind == "qwen3_moe":
        model.layers[0].mlp.router.bias[0] = 1.0  # of a run before; there is none in the folder
    load(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("low", "high", "original"), [(1.0, 4.0, 64), (0.25, 8.0, 40), (2, 3, 100)])
def test_rotary_tables_for_longer_sequences_are_those_of_transformers(
    key: str, low: float, high: float, original: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {
        "rope_type": "llama3",
        "factor": 6.0,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 200}
    config = transformers.LlamaConfig(**sizes, **heads, rope_parameters={**rope, "rope_theta": 300.0})
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    if key == "rope_scaling":  # as releases before 5 write it
        del written["rope_parameters"]
        (tmp_path / "config.json").write_text(json.dumps({**written, "rope_theta": 300.0, "rope_scaling": rope}))
    found, load = import_huggingface(tmp_path)
    model = Llama.build(found, seed=9)
    load(model.state_dict())
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(200)[None])
    torch.testing.assert_close(model.cos, cos[0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(model.sin, sin[0], rtol=1e-4, atol=2e-5)
    tokens = torch.randint(0, 61, (2, 200), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
        plain = Llama.build(replace(found, rope_factor=1.0), seed=9)
        load(plain.state_dict())
        assert not torch.allclose(plain(tokens), model(tokens), rtol=1e-5, atol=1e-5), "the scaling changes nothing"


def test_weights_are_converted_and_the_bias_of_a_router_is_not(tmp_path: Path) -> None:
    model = build(SPARSE)
    export_huggingface(model.state_dict(), SPARSE, tmp_path, dtype=torch.bfloat16)
    written = load_file(tmp_path / "model.safetensors")
    single = [name for name, tensor in written.items() if tensor.dtype != torch.bfloat16]
    assert single == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)]
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    other = build(SPARSE, seed=1)
    load_huggingface(other.state_dict(), tmp_path)
    for name, tensor in model.state_dict().items():
        rounded = tensor if name.endswith("router.bias") else tensor.bfloat16().float()
        assert torch.equal(other.state_dict()[name], rounded), name


def test_a_stage_and_an_untied_model_take_what_they_need(tmp_path: Path) -> None:
    config = replace(DENSE, tie_embeddings=True)
    export_huggingface(build(config).state_dict(), config, tmp_path)
    last = Llama.build(config, seed=5).keep(range(2, 3), embed=False, head=True)
    names = list(last.state_dict())
    load_huggingface({name.replace("layers.2.", "layers.2._checkpoint_wrapped_module."): x
                      for name, x in last.state_dict().items()}, tmp_path)  # fmt: skip
    full = build(config).state_dict()
    assert "head.weight" in names
    assert "embed.weight" not in names
    for name in names:
        assert torch.equal(last.state_dict()[name], full[name].float()), name


def refused_with(error: pytest.ExceptionInfo[ValueError], *parts: str) -> None:
    text = str(error.value)
    assert "\n  try: " in text
    for part in parts:
        assert part in text, text


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    export_huggingface(build(DENSE).state_dict(), DENSE, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled") as error:
        import_huggingface(tmp_path)
    refused_with(error, "files: pytorch_model.bin", "run any code")
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no safetensors file") as error:
        import_huggingface(tmp_path)
    refused_with(error, "model.safetensors is damaged")


def test_folders_that_do_not_fit_are_refused_before_anything_changes(tmp_path: Path) -> None:
    export_huggingface(build(DENSE).state_dict(), DENSE, tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    right, shape = load_file(file), json.loads(config.read_text())
    model = Llama.build(DENSE, seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrong = {
        "tensors are missing\n  missing: model.norm.weight": {k: v for k, v in right.items() if "model.norm" not in k},
        "does not, and without which": {**right, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)},
        "'model.norm.weight' has another shape": {**right, "model.norm.weight": torch.ones(31)},
    }
    for message, tensors in wrong.items():
        save_file(tensors, file)
        with pytest.raises(ValueError, match="cannot load") as error:
            load_huggingface(model.state_dict(), tmp_path)
        refused_with(error, message)
    save_file(right, file)
    size = file.stat().st_size
    with open(file, "r+b") as handle:
        handle.truncate(size - 100)
    with pytest.raises(ValueError, match="damaged") as error:
        load_huggingface(model.state_dict(), tmp_path)
    refused_with(error, "model.safetensors")
    save_file(right, file)
    for key, value, message in [
        ("hidden_act", "gelu", "hidden_act = 'silu' only"),
        ("attention_bias", True, "attention_bias = False only"),
        ("head_dim", 16, "'layers.0.attention.wq.weight' has another shape than in the config's model"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1.0}, "rope_type = 'default' only"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1.0, "factor": 8.0}, "has no low_freq_factor"),
        ("model_type", "gpt2", "no model here for model_type 'gpt2'"),
        ("vocab_size", None, "config.json has no vocab_size"),
        ("hidden_size", 64, "'embed.weight' has another shape than in the config's model"),
        ("intermediate_size", 64, "'layers.0.mlp.w1.weight' has another shape than in the config's model"),
    ]:
        config.write_text(json.dumps({**shape, key: value}))
        with pytest.raises(ValueError, match="cannot load") as error:
            load_huggingface(model.state_dict(), tmp_path)
        refused_with(error, message)
    config.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        import_huggingface(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        import_huggingface(tmp_path / "elsewhere")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_index_whose_file_is_not_there_is_refused(tmp_path: Path) -> None:
    export_huggingface(build(DENSE).state_dict(), DENSE, tmp_path, max_shard_bytes=20_000)
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match="files that the index names are missing") as error:
        import_huggingface(tmp_path)
    refused_with(error, lost.name)


def test_glm_models_that_compute_something_else_are_refused(tmp_path: Path) -> None:
    export_huggingface(build(SPARSE).state_dict(), SPARSE, tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    for key, value in [("use_qk_norm", True), ("n_group", 4), ("partial_rotary_factor", None)]:
        changed = {**shape, key: value}
        if key == "partial_rotary_factor":
            del changed[key], changed["rope_parameters"]  # then it is one half
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=key):
            import_huggingface(tmp_path)


def test_exports_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    state = build(DENSE).state_dict()
    stage = {name: tensor for name, tensor in state.items() if "layers.1." not in name}
    dense, normed = replace(QWEN, num_dense_layers=3), replace(SPARSE, qk_norm=True)
    biased = build(QWEN).state_dict()
    biased["layers.2.mlp.router.bias"][3] = 0.1
    for given, config, message in [
        (stage, DENSE, "tensors of the model are missing\n  missing: layers.1.attention_norm.weight"),
        ({**state, "layers.0.mlp.w4.weight": state["norm.weight"]}, DENSE, "has no 'layers.0.mlp.w4.weight'"),
        (state, replace(DENSE, intermediate_size=64), "'layers.0.mlp.w1.weight' has another shape"),
        (build(dense).state_dict(), dense, "its Qwen3MoeForCausalLM has num_dense_layers=0 only"),
        (build(normed).state_dict(), normed, "its Glm4MoeForCausalLM has qk_norm=False only"),
        (biased, QWEN, "changes what the router chooses"),
    ]:
        with pytest.raises(ValueError, match="cannot export") as error:
            export_huggingface(given, config, tmp_path / "new")
        refused_with(error, message)
    assert not (tmp_path / "new").exists()
    with torch.device("meta"):
        empty = Llama(DENSE).state_dict()
    with pytest.raises(ValueError, match="is on meta") as error:
        export_huggingface(empty, DENSE, tmp_path / "new")
    refused_with(error, "init_parameters")
    with pytest.raises(ValueError, match="max_shard_bytes"):
        export_huggingface(state, DENSE, tmp_path, max_shard_bytes=0)
    export_huggingface(state, DENSE, tmp_path / "new")
    with pytest.raises(ValueError, match="is on meta"):
        load_huggingface(empty, tmp_path / "new")
    with pytest.raises(ValueError, match="has weights already") as error:
        export_huggingface(state, DENSE, tmp_path / "new")
    refused_with(error, "seen: model.safetensors")


@pytest.mark.parametrize(
    ("file", "blame", "hint"),
    [
        (None, "there is no such folder", "nothing is fetched: hf download some/model --local-dir FOLDER"),
        ("some/model/adapter_config.json", "it holds an adapter, and no model", "export --merge"),
        ("some/model/step-00000003/record", "it holds checkpoints of a run", "hyper-parallel export some/model out/hf"),
        ("some/model/weights", "config.json cannot be read", "the folder that save_pretrained"),
    ],
)
def test_a_folder_of_something_else_is_called_what_it_is(
    file: str | None, blame: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if file is not None:
        Path(file).parent.mkdir(parents=True)
        Path(file).touch()
    with pytest.raises(ValueError, match=rf"cannot import some/model: {blame}\n(?s:.*)try: .*{hint}"):
        import_huggingface("some/model")


@pytest.mark.tier("test")
def test_weights_are_not_taken_from_a_model_that_computes_something_else(tmp_path: Path) -> None:
    model = replace(DENSE, vocab_size=256, num_key_value_heads=4)
    export_huggingface(build(model).state_dict(), model, tmp_path)
    settings = TrainConfig(steps=1, batch_size=4, seq_len=8, eval_sequences=4, device="cpu", start_from=str(tmp_path))
    run = Config(model=model, data=DataConfig(max_bytes=200_000), train=settings)
    train(run)
    for change in [{"rope_theta": 5e5}, {"norm_eps": 1e-3}, {"num_attention_heads": 2, "num_key_value_heads": 2}]:
        with pytest.raises(ValueError, match=f"another {next(iter(change))} than the run's"):
            train(replace(run, model=replace(model, **change)))


def loaded_by_transformers(folder: Path) -> Any:
    pytest.importorskip("transformers")
    return model_of_folder(Config(train=TrainConfig(model="transformers", start_from=str(folder))))


READERS = (import_huggingface, loaded_by_transformers)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in several files."""
    export_huggingface(build(DENSE).state_dict(), DENSE, tmp_path / "model", max_shard_bytes=20_000)
    return tmp_path / "model"


def move_out(folder: Path, name: str) -> Path:
    """Move a file of a folder to the one above."""
    return (folder / name).rename(folder.parent / name)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("how", ["..", "absolute", "link", "link to a folder", "linked index", "linked config"])
def test_a_name_or_a_link_that_leaves_the_folder_is_refused(how: str, read: Any, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = sorted(set(content["weight_map"].values()))[0]
    named = first
    if how in ("..", "absolute"):
        outside = move_out(folder, first)
        named = f"../{first}" if how == ".." else str(outside)
    elif how == "link to a folder":
        (folder / "weights").symlink_to(folder.parent)
        move_out(folder, first)
        named = f"weights/{first}"
    else:
        name = {"link": first, "linked index": index.name, "linked config": "config.json"}[how]
        (folder / name).symlink_to(move_out(folder, name))
    if named != first:
        moved = {tensor: named if file == first else file for tensor, file in content["weight_map"].items()}
        index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ValueError, match="is outside of the folder") as error:
        read(folder)
    refused_with(error, f"it is: {folder.parent.resolve()}", "cp -rL")


@pytest.mark.parametrize("read", READERS)
def test_a_snapshot_in_the_cache_of_the_hub_is_read_by_its_links(read: Any, folder: Path) -> None:
    """Files of `models--x--y/snapshots/REVISION` are links to `models--x--y/blobs`; links to elsewhere stay refused."""
    home = folder.parent / "hub" / "models--x--y"
    snapshot, blobs = home / "snapshots" / "4ac1", home / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"{number:040x}", snapshot))
    read(snapshot)
    (folder.parent / "linked").symlink_to(snapshot)
    read(folder.parent / "linked")
    with pytest.raises(ValueError, match="is outside of the folder"):
        inside("cannot read", snapshot, f"../../blobs/{0:040x}")  # links of the cache lead there, and no name
    blobs.rename(home.parent / "blobs")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(next((home.parent / "blobs").iterdir()))
    with pytest.raises(ValueError, match=r"'config\.json' is outside of the folder"):
        read(snapshot)


def test_transformers_too_reads_no_pickled_weights(folder: Path) -> None:
    whole = loaded_by_transformers(folder).state_dict()
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink()
    torch.save(whole, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="its weights are pickled") as error:
        loaded_by_transformers(folder)
    refused_with(error, "files: pytorch_model.bin", "save_pretrained")


CODE = "open({marker!r}, 'w').close()\nfrom transformers import {base} as Own\n"


@pytest.mark.parametrize("kind", ["AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"])
def test_code_of_a_folder_is_not_run_whatever_stdin_says(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda text="": asked.append(text) or "yes")
    bases = {
        "AutoConfig": "LlamaConfig",
        "AutoTokenizer": "PreTrainedTokenizerFast",
        "AutoModelForCausalLM": "LlamaForCausalLM",
    }
    for each, base in bases.items():
        (folder / f"code_{each.lower()}.py").write_text(CODE.format(marker=str(tmp_path / "ran"), base=base))
    own = {each: f"code_{each.lower()}.Own" for each in bases}
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "own", "auto_map": own}))
    words = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [own["AutoTokenizer"]] * 2}}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match="cannot look: it is code of the folder, which is never run") as error:
        load_by_transformers("cannot look", kind, folder, "")
    refused_with(error, "train(config, model=...)")
    with pytest.raises(ValueError, match="there is no model here for model_type 'own'"):
        with_shape_of(Config(), folder, others=True)
    assert (asked, (tmp_path / "ran").exists()) == ([], False)


def test_attention_from_a_hub_is_refused(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    kernel = {"attn_implementation": "kernels-community/flash-attn3"}
    (folder / "config.json").write_text(json.dumps({**settings, **kernel}))
    with pytest.raises(ValueError, match="its attention is code of a hub"):
        loaded_by_transformers(folder)


LARGE = [
    {"num_hidden_layers": 100_000},
    {"n_layer": 100_000},
    {"text_config": {"num_hidden_layers": 10**12}},
    {"num_hidden_layers": 1_000, "num_local_experts": 1_000},
    {"n_routed_experts": 10**6},
]


@pytest.mark.parametrize("large", LARGE)
def test_more_layers_and_experts_than_can_be_built_are_refused(large: dict[str, Any], folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **large}))
    for read in (*READERS, other_model, lambda path: with_shape_of(Config(), path, others=True)):
        with pytest.raises(ValueError, match="more layers and experts than are built") as error:
            read(folder)
        refused_with(error, "1024 layers, and 65536 experts in all layers, at most")


@pytest.mark.parametrize(("layers", "experts"), [(126, 1), (1_000, 8), (94, 128), (61, 384), (24, 2_048)])
def test_the_largest_models_there_are_can_be_described(layers: int, experts: int, tmp_path: Path) -> None:
    counts = {
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "num_experts_per_tok": 10**6,
        "vocab_size": 10**6,
    }
    (tmp_path / "config.json").write_text(json.dumps(counts))
    assert read_settings("", tmp_path) == counts


def replaced(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*normalizers: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(normalizers)}


@pytest.mark.parametrize(
    ("normalizer", "growth"),
    [
        (replaced("a", "a" * 10_000), "10,000"),
        (sequence(*[replaced("a", "aa")] * 32), "4,294,967,296"),
        (sequence(sequence(*[replaced(" *", "xyz", "Regex")] * 4)), "256"),
        (sequence(*[replaced(r"\p{L}*", "xyz", "Regex")] * 4), "256"),  # a pattern that Python's does not have
        ({"type": "Prepend", "prepend": "x" * 100}, "100"),
    ],
)
def test_normalizers_that_may_blow_text_up_are_refused(normalizer: Any, growth: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": normalizer}))
    with pytest.raises(ValueError, match=f"may write {growth} characters in place of one"):
        check_normalizers("cannot load", tmp_path)
    with pytest.raises(ValueError, match=f"cannot load the tokenizer .*: its normalizers may write {growth} char"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        {"type": "NFC"},
        sequence({"type": "Prepend", "prepend": "\u2581"}, replaced(" ", "\u2581")),  # Llama 2's
        sequence({"type": "Precompiled", "precompiled_charsmap": "AAAA"}, replaced(" {2,}", "\u2581", "Regex")),  # T5's
        sequence(replaced("``", '"'), replaced("''", '"'), {"type": "NFKD"}, {"type": "Lowercase"}),  # ALBERT's
        sequence(*[replaced(r"\s+", " ", "Regex")] * 9, {"type": "Strip", "strip_left": True, "strip_right": True}),
    ],
)
def test_normalizers_of_known_models_are_taken(normalizer: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": normalizer}))
    check_normalizers("cannot load", tmp_path)
