"""Tensor parallelism that is found for models of transformers: what is split and proved, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import sim
from hyper_parallel.cli.runs import find_split
from hyper_parallel.models.found import Pair, can_share, find_pairs, search_pairs, split_pairs
from hyper_parallel.models.lora import Adapter, LoraConfig, with_lora
from hyper_parallel.trainer.config import Config, DataConfig, OptimizerConfig, TrainConfig
from hyper_parallel.trainer.loop import train

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "num_key_value_heads": 4,
}
NO_DROPOUT = dict.fromkeys(
    ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout", "dropout"), 0.0
)
OTHERS = {"phi3": {"pad_token_id": 0}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "gemma2": {"head_dim": 8}}

BOTH = ("attention", "feed-forward")
FOUND = {
    # the model, and which of its pairs the code of which can be split
    "gpt2": BOTH[1:],  # a fused weight holds all queries, then all keys, then all values
    "opt": BOTH,  # counts its heads, and has its feed-forward in the block, on tokens without rows
    "phi": BOTH,
    "phi3": (),  # fused, both of them
    "gpt_neox": BOTH,
    "gemma2": BOTH,
    "mistral": BOTH,
    "olmo": BOTH,
    "olmo2": BOTH[1:],  # norms over all heads
    "falcon": (),  # fused, and it adds in place to what the feed-forward returns
    "bloom": BOTH[1:],
    "gptj": BOTH,
    "starcoder2": BOTH,
    "stablelm": BOTH,
    "cohere": BOTH,
}
QUICK = ("gpt2", "opt", "phi3")


def settings_of(kind: str) -> Any:
    sizes = SIZES if kind != "falcon" else {name: size for name, size in SIZES.items() if "key_value" not in name}
    return transformers.AutoConfig.for_model(kind, **sizes, **NO_DROPOUT, **OTHERS.get(kind, {}))


def run_of(folder: Path) -> Config:
    run = Config(train=TrainConfig(model="transformers", start_from=str(folder)))
    return run.with_changes("parallel", {"tp": 2})


@pytest.mark.tier("full", each=2)
@pytest.mark.sim
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in FOUND]
)
def test_what_a_models_code_can_compute_on_parts_is_found_and_proved(kind: str, tmp_path: Path) -> None:
    settings_of(kind).save_pretrained(tmp_path)
    said = io.StringIO()
    if not FOUND[kind]:
        with pytest.raises(ValueError, match=r"cannot split the model over tp=2: no way to split(?s:.*)try: --tp 1"):
            find_split(Console(file=said), run_of(tmp_path))
        return
    split: Any = find_split(Console(file=said, width=200), run_of(tmp_path))
    pairs: Sequence[Pair] = split.keywords["pairs"]
    assert {BOTH[not pair.is_attention] for pair in pairs} == set(FOUND[kind])
    assert "proved on simulated ranks in" in said.getvalue()
    assert ("on every rank along tp as a whole" in said.getvalue()) == (len(FOUND[kind]) == 1)


RUN = Config(
    data=DataConfig(max_bytes=100_000),
    optimizer=OptimizerConfig(lr=1e-2, schedule="constant", warmup_steps=0),
    train=TrainConfig(steps=3, batch_size=8, seq_len=16, accumulate=2, eval_sequences=4, device="cpu"),
).with_changes("precision", {"param_dtype": "fp64"})


def made(kind: str, rank: int) -> nn.Module:
    model = with_lora(transformers.AutoModelForCausalLM.from_config(settings_of(kind)), LoraConfig(rank=rank))
    for module in model.modules():
        if isinstance(module, Adapter):
            module.reset_parameters()
    return model  # type: ignore[no-any-return]


@pytest.mark.tier("full", each=2)
@pytest.mark.sim
@pytest.mark.parametrize("rank", [0, 3])
def test_a_model_is_trained_on_tensor_and_data_parallel_ranks_as_on_one(rank: int) -> None:
    model = partial(made, "gpt2", rank)
    pairs = [pair for pair in find_pairs(model()) if not pair.is_attention]
    degrees = RUN.with_changes("parallel", {"tp": 2})
    kwargs = {"model": model, "split": partial(split_pairs, pairs=pairs)}
    ranks = sim.run(train, world_size=4, args=(degrees,), kwargs=kwargs)[0]
    assert ranks.layout == "4 ranks: dp_shard=2 x tp=2"
    assert ranks.losses == pytest.approx(train(RUN, model=model).losses, rel=1e-12)
    assert len(set(ranks.losses)) == 3


def test_pairs_are_chosen_that_are_proved_and_those_only_that_are_proved_together() -> None:
    attention, inner = Pair("h.*.attn", ("q", "k"), "dense"), Pair("h.*.mlp", ("fc1",), "fc2")
    asked: list[Sequence[Pair]] = []

    def prove(pairs: Sequence[Pair]) -> bool:
        asked.append(pairs)
        return all(not pair.is_attention or "heads" in pair.counts for pair in pairs)

    chosen = search_pairs([attention, inner], prove)
    assert [pair.place for pair in chosen] == ["h.*.attn", "h.*.mlp"]
    assert "heads" in chosen[0].counts
    assert asked[-1] == chosen
    assert len(search_pairs([attention, inner], lambda pairs: len(pairs) == 1)) == 1
    assert search_pairs([attention, inner], lambda pairs: False) == []


def test_ranks_must_share_heads_and_widths_evenly() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings_of("opt"))
    pairs = find_pairs(model)
    assert [(pair.place.rpartition(".")[2], pair.first, pair.last) for pair in pairs] == [
        ("*", ("fc1",), "fc2"),
        ("self_attn", ("k_proj", "v_proj", "q_proj"), "out_proj"),
    ]
    assert [[can_share(model, pair, ranks) for pair in pairs] for ranks in (2, 3, 4, 8)] == [
        [True, True],
        [True, False],
        [True, True],
        [True, False],  # the width of heads would do, their number does not
    ]
