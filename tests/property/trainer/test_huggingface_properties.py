"""Folders of Hugging Face from strangers: whatever is wrong with one, it is refused in a sentence of ours."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hyper_parallel.models import (
    Llama,
    LlamaConfig,
    MoEConfig,
    MoELlama,
    export_huggingface,
    import_huggingface,
    load_huggingface,
)

pytestmark = pytest.mark.sim
many = settings(
    max_examples=min(1_000, settings.default.max_examples)  # each copies a folder
)
SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "dense": Llama.build(LlamaConfig(**SIZES, rope_factor=2.0)),  # type: ignore[arg-type]
    "experts": MoELlama.build(
        MoEConfig(**SIZES, num_experts=2, expert_intermediate_size=4, num_dense_layers=1)  # type: ignore[arg-type]
    ),
}
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
INTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size",
        "first_k_dense_replace")  # fmt: skip
LENGTHS = ("max_position_embeddings", "original_max_position_embeddings")  # to be long is no mistake
FLOATS = ("rms_norm_eps", "initializer_range", "rope_theta", "routed_scaling_factor", "factor", "low_freq_factor",
          "high_freq_factor")  # fmt: skip
FLAGS = ("tie_word_embeddings", "norm_topk_prob", "attention_bias", "mlp_bias", "use_qk_norm")
NO_NUMBERS = ("x", "", [], [1], {}, {"a": 1}, True, False)
WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(INTS, (*NO_NUMBERS, -1, 1.5, float("nan"), float("inf"), 10_000_000, 2**63, 10**400)),
    **dict.fromkeys(LENGTHS, (*NO_NUMBERS, -1, 1.5, float("nan"), 2**63, 10**400)),
    **dict.fromkeys(FLOATS, (*NO_NUMBERS, -1, -1e-9, float("nan"), float("inf"), -float("inf"), 10**400)),
    **dict.fromkeys(FLAGS, ("x", [1], {"a": 1}, 2, -1)),
    "model_type": (None, "gpt2", [], {}, 5),
    "hidden_act": ("gelu", 5, []),
    "rope_type": ("yarn", "", 5, [], {}),
    "rope_parameters": ("x", 5, [1], ["llama3"]),
}
"""Values of config.json that do not go with the weights."""

TEXTS = (b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model_type": "llama"}', b"\0" * 64)


@pytest.fixture(scope="module")
def folders() -> Iterator[dict[str, Path]]:
    with tempfile.TemporaryDirectory() as root:
        for name, model in MODELS.items():
            export_huggingface(model.state_dict(), model.config, Path(root, name), max_shard_bytes=600)
        yield {name: Path(root, name) for name in MODELS}


def refused(kind: str, folder: Path) -> str:
    """Return what is said to who imports the folder, and then to who loads it; nothing may have changed by then."""
    model = MODELS[kind]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    said = []
    for call in (lambda: load_huggingface(model.state_dict(), folder), lambda: import_huggingface(folder)[1]({})):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    assert said, "nothing is wrong with the folder"
    assert all(text.startswith(("cannot load", "cannot import")) and "\n  try: " in text for text in said), said
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return said[0]


@many
@given(data=st.data())
def test_a_config_that_is_wrong_in_one_place(folders: dict[str, Path], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(MODELS)))
    right = json.loads((folders[kind] / CONFIG).read_text())
    key = data.draw(st.sampled_from([key for key in WRONG if key in right or key in right["rope_parameters"]]))
    value = data.draw(st.sampled_from(WRONG[key]))
    wrong = {**right, key: value}
    if key in right["rope_parameters"]:
        wrong["rope_parameters"] = {**right["rope_parameters"], key: value}
    with tempfile.TemporaryDirectory() as copy:
        for path in folders[kind].iterdir():
            if path.name != CONFIG:
                Path(copy, path.name).symlink_to(path)
        Path(copy, CONFIG).write_text(json.dumps(wrong))
        refused(kind, Path(copy))


@many
@given(data=st.data())
def test_a_file_that_is_not_what_its_name_says(folders: dict[str, Path], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(MODELS)))
    with tempfile.TemporaryDirectory() as copy:
        folder = Path(copy)
        shutil.copytree(folders[kind], folder, dirs_exist_ok=True)
        name = data.draw(st.sampled_from(sorted(path.name for path in folder.iterdir())))
        how = data.draw(st.sampled_from(sorted(DAMAGES)))
        size = st.integers(0, (folder / name).stat().st_size - 2)  # without the last byte, a JSON file is whole
        DAMAGES[how](folder / name, data.draw(size if how == "cut" else st.sampled_from(TEXTS)))
        refused(kind, folder)


def _replaced(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path, Any], Any]] = {
    "text": lambda path, text: path.write_bytes(text),
    "cut": os.truncate,
    "gone": lambda path, _: path.unlink(),
    "a folder": lambda path, _: _replaced(path, Path.mkdir),
    "a fifo": lambda path, _: _replaced(path, os.mkfifo),
    "a link to nothing": lambda path, _: _replaced(path, lambda path: path.symlink_to("nothing")),
    "a device": lambda path, _: _replaced(path, lambda path: path.symlink_to("/dev/zero")),
    "huge": lambda path, _: os.truncate(path, 2**40),
}


@pytest.mark.parametrize(
    "index",
    [
        [],
        5,
        {},
        {"weight_map": []},
        {"weight_map": ["a"]},
        {"weight_map": {}},
        {"weight_map": None},
        {"weight_map": {"model.norm.weight": 5}},
        {"weight_map": {"model.norm.weight": None}},
        {"weight_map": {"model.norm.weight": ".."}},
        {"weight_map": {"model.norm.weight": ""}},
        {"weight_map": {"model.norm.weight": "a\0b"}},
        {"weight_map": {f"model.layers.{'9' * 5000}.x": CONFIG}},
    ],
    ids=lambda index: json.dumps(index)[:50],
)
@pytest.mark.parametrize("kind", MODELS)
def test_an_index_that_leads_nowhere(folders: dict[str, Path], kind: str, index: Any, tmp_path: Path) -> None:
    shutil.copytree(folders[kind], tmp_path, dirs_exist_ok=True)
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused(kind, tmp_path)


@pytest.mark.parametrize("kind", MODELS)
def test_an_index_with_tensors_of_no_layer(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    shutil.copytree(folders[kind], tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"][f"model.layers.{'9' * 5000}.x"] = next(iter(index["weight_map"].values()))
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused(kind, tmp_path)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_floats(folders: dict[str, Path], dtype: torch.dtype, tmp_path: Path) -> None:
    shutil.copytree(folders["dense"], tmp_path, dirs_exist_ok=True)
    file = sorted(tmp_path.glob("*.safetensors"))[0]
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    assert "weights here are plain floating-point numbers" in refused("dense", tmp_path)


def test_nothing_is_wrong_with_what_is_broken_above(folders: dict[str, Path]) -> None:
    for kind, model in MODELS.items():
        found, load = import_huggingface(folders[kind])
        assert found == model.config
        load(model.state_dict())
