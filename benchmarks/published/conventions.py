"""Conventions of the frameworks of published rows: how each trains, what a row states, and the model of its shape."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.published.gpt import GPTConfig
from benchmarks.published.megatron import MegatronConventions
from benchmarks.published.step import PublishedRecipe
from benchmarks.published.zoo import MLAConfig
from hyper_parallel.core.machine.toml_file import read_toml
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.moe import MoEConfig

__all__ = [
    "FOLDER",
    "CannotSay",
    "Row",
    "batch_of",
    "dims_of",
    "family_of",
    "hardware_of",
    "hardware_text",
    "kernel_of",
    "model_of",
    "recipe_of",
]

FOLDER = Path(__file__).resolve().parent / "data"
USUAL_VOCABULARY = 50304
"""GPT-2's, as Megatron pads it."""
LATENT: Mapping[str, Any] = MappingProxyType(
    {"latent_rank": 512, "plain_size": 128, "turned_size": 64, "value_size": 128}
)
"""Latent attention of DeepSeek-V2, V3 and those built like them: the same in the config.json of all."""
QUERY_RANK = 1536
"""Of those; in the ones of width 2048 (V2-Lite, Moonlight), queries are made of the residual stream."""

Row = Mapping[str, Any]


class CannotSay(Exception):
    """A row that cannot be a job; with the reason."""


@cache
def _tables() -> dict[str, Any]:
    return read_toml(FOLDER / "frameworks.toml")


def family_of(row: Row) -> dict[str, Any]:
    """Return what is usual in the row's framework, at its date; the last family is that of all others."""
    framework = str(row.get("framework", ""))
    for family in _tables()["family"]:
        if any(text.lower() in framework.lower() for text in family["match"]):
            usual = {key: value for key, value in family.items() if key not in ("since", "where", "match", "evidence")}
            for later in family.get("since", ()):
                if str(row.get("date", "")) >= later["date"]:
                    usual.update((key, value) for key, value in later.items() if key not in ("date", "evidence"))
            for some in family.get("where", ()):
                if all(text in str(row.get(key, "")) for key, text in some["row"].items()):
                    usual.update((key, value) for key, value in some.items() if key not in ("row", "evidence"))
            return usual
    raise CannotSay(f"nothing is known of the framework {framework!r}")


def kernel_of(row: Row, family: Mapping[str, Any]) -> str:
    """Return the attention kernel that is usual in the row's framework, or the latest that was public at its date."""
    usual, public = str(family["attention_kernel"]), {"flash1": "", **_tables()["public"]}
    older = [kernel for kernel, date in public.items() if kernel <= usual and date <= str(row.get("date", ""))]
    return max(older)


def hardware_text(row: Row) -> str:
    """Return what the row calls its device."""
    return str(row.get("hw_device", ""))


def hardware_of(row: Row) -> str:
    """Return the name of the description of the row's device."""
    for device in _tables()["device"]:
        if all(text in hardware_text(row) for text in device["match"]):
            return str(device["hardware"])
    raise CannotSay(f"there is no description of the device {hardware_text(row)!r}")


def batch_of(row: Row, dims: ParallelDims) -> int:
    """Return the sequences of a step on each data-parallel rank."""
    given = row.get("local_batch")
    return int(given if given is not None else row["global_batch"] // dims.batch_ranks)


def dims_of(row: Row, family: Mapping[str, Any], notes: list[str]) -> ParallelDims:
    """Return the degrees: where parameters are replicated, their optimizer state is shared by dp_shard ranks."""
    hardware_of(row)  # an unknown device is said first
    tp, cp, pp = (int(row.get(key) or 1) for key in ("tp", "cp", "pp"))
    dp = int(row.get("dp") or row["n_devices"] // (tp * cp * pp))
    zero = _zero(row, family)
    replicate = int(row.get("dp_replicate") or 1)
    if zero == 0:
        replicate = dp
    elif zero == 1 and "shard group" not in str(row.get("optimizer", "")):
        replicate = 1  # DeepSpeed's and Megatron's state is shared by all data-parallel ranks
    if dp % replicate:
        raise CannotSay(f"dp_replicate={replicate} does not divide dp={dp}")
    shard, ep, etp, fold = dp // replicate, int(row.get("ep") or 1), 1, False
    if ep > 1:
        # Ranks that have experts follow each other, those of tp and cp first: Megatron-LM's and torchtitan's meshes.
        fold = family.get("folds_experts", True) and tp * cp > 1 and ep % (tp * cp) == 0
        fold = fold and (family.get("etp") != "tp" or ep > shard)
        etp = tp if family.get("etp") == "tp" and not fold else 1
        if fold:
            notes.append(f"experts over {ep} ranks, those of tp={tp} and cp={cp} among them")
            ep //= tp * cp
        if shard % ep:
            raise CannotSay(f"ep={ep} with dp={dp}, tp={tp}: experts over ranks of other axes")
        shard //= ep
    return ParallelDims(
        dp_replicate=replicate,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        fold_experts=fold,
        ulysses_degree=int(row.get("ulysses") or 1) if cp > 1 else None,
        world_size=row["n_devices"],
    )


def _zero(row: Row, family: Mapping[str, Any]) -> int:
    stage = row.get("zero_stage") if family.get("says_zero", True) else None
    zero = int(family["zero"] if stage is None else stage)
    return 2 if zero == 3 and "never" in str(row.get("reshard_after_forward", "")) else zero


def recipe_of(row: Row, family: Mapping[str, Any], notes: list[str]) -> PublishedRecipe:
    """Return how the row trains: what it says goes over what is usual in its framework."""
    skip = (
        "name",
        "attention_kernel",
        "compiled_loss",
        "zero",
        "reduce_dtype",
        "etp",
        "folds_experts",
        "says_zero",
        "tp_host",
        "checkpointed",
        "ac_policy",
        "allocator",
    )
    said = {key: value for key, value in family.items() if key not in skip}
    precision = str(row.get("precision", ""))
    reduce = str(row.get("grad_reduce_dtype") or ("fp32" if "fp32 grad" in precision else family["reduce_dtype"]))
    said["reduce_dtype"] = "fp32" if reduce == "fp32" else "bf16"  # in whose place fp16 is as fast and as large
    said["moments_dtype"] = said.pop("moments", "fp32")
    said["compile"] = bool(row.get("compile"))
    said["float8"] = "rowwise" if row.get("fp8") == "rowwise" else "tensorwise" if row.get("fp8") else ""
    if said["float8"] and str(row["fp8"]).startswith("T"):
        said["compile"] = True  # TransformerEngine casts in the kernels around it, as a compiler would
    if (row.get("tp") or 1) > 1 and not said["compile"]:
        said["host"] = family.get("tp_host", "eager")
    if row.get("compile") is None:
        notes.append("whether it is compiled is not stated; taken as not")
    if isinstance(row.get("sp"), bool):
        said["sequence_parallel"] = row["sp"]
    if not said.get("sequence_parallel", True):
        said["reshard_inputs"] = False
    if row.get("async_tp") is True or str(row.get("async_tp", "")).startswith(("TE", "mc2")):
        said["tp_overlap"] = True
    if "foreach" in str(row.get("optimizer", "")):
        said["optimizer"] = "adamw-foreach"
    loss = str(row.get("loss_impl", ""))
    if "chunked" in loss:
        said["loss"] = "chunked"
    elif "fused" in loss or (said["compile"] and family.get("compiled_loss") and "not compiled" not in loss):
        said["loss"] = "compiled"
    attention = str(row.get("attn_type", ""))
    if any(word in attention for word in ("unfused", "no flash", "materialized")):
        said["attention"] = "math"
    elif "lash" in attention or "SDPA" in attention:
        said["attention"] = "flash"
    if "alternating sliding-window" in attention:
        notes.append("its sliding window is not modelled")
    elif "sliding-window" in attention:
        said["window"] = int(attention.partition("sliding-window")[2].split()[0])
    _checkpointing(row, family, said, notes)
    _schedule(row, said)
    otherwise = {field.name: said.pop(field.name, field.default) for field in dataclasses.fields(MegatronConventions)}
    said["foreach"] = said.pop("optimizer", "") == "adamw-foreach"
    more = MegatronConventions(**otherwise) if any(otherwise.values()) else None
    return PublishedRecipe().having(**said, conventions=more).with_zero(_zero(row, family))


def _checkpointing(row: Row, family: Mapping[str, Any], said: dict[str, Any], notes: list[str]) -> None:
    """Read the many spellings of what backward computes again."""
    policy = family.get("ac_policy", row.get("ac_policy"))
    text = str(policy or "none").lower()
    layers, stages = int(row["n_layers"]), int(row.get("pp") or 1)
    if policy != row.get("ac_policy"):
        notes.append(f"its checkpointing is taken as {policy}, which the code of its commit leaves alone")
    if policy is None:
        notes.append("activation checkpointing is not stated; taken as none")
    if text.startswith("none"):
        said["checkpointing"] = "none"
        if "select" in text and "[" in text:
            notes.append("what it recomputes beside is left out")
    elif "every 2nd layer" in text or "some blocks" in text:
        share = float(family.get("checkpointed", 0.5)) if "some" in text else 0.5
        said["checkpointing"] = f"full first {max(1, int(share * (layers // stages)))}"
        if "some" in text and "checkpointed" not in family:
            notes.append("how many blocks are checkpointed is not stated; taken as half")
    elif "on selected layers" in text:
        counts = [int(x) for x in text[text.index("[") + 1 : text.index("]")].split(",")]
        said["checkpointing"] = f"full first {max(1, round(sum(counts) / stages))}"
    elif text.startswith("full"):
        said["checkpointing"] = "full"
    elif text == "graph sac default":  # torchtitan's graph_trainer (memory_policy.py) saves all matrix products
        said["checkpointing"] = "selective"
    elif "op" in text.split(":")[-1].split() or "graph sac" in text:
        said["checkpointing"] = "alternate"
    elif text.startswith("selective"):
        if said.get("attention") == "math":
            said["attention"] = "math-recomputed"
        said["checkpointing"] = "none"
        if not ("attention core" in text or "core attention" in text or text.endswith("core_attn")):
            notes.append(f"of its checkpointing ({policy}) only attention is modelled")
    else:
        notes.append(f"its checkpointing ({policy}) is taken as none")
        said["checkpointing"] = "none"


def _schedule(row: Row, said: dict[str, Any]) -> None:
    pp, chunks, schedule = int(row.get("pp") or 1), int(row.get("vpp") or 1), str(row.get("schedule") or "")
    parts = row.get("n_microbatches") or row.get("grad_accum")
    if parts is None:
        micro = row.get("micro_batch") or (row["local_batch"] if pp == 1 else 1)
        parts = row["local_batch"] // micro
    elif parts * (row.get("micro_batch") or 0) * (row.get("grad_accum") or 1) == row.get("local_batch"):
        parts *= row.get("grad_accum") or 1  # a pipeline's micro-batches, several times over
    said["accumulate"] = int(parts)
    if pp == 1:
        return
    if schedule.startswith("ZB"):
        raise CannotSay(f"schedule {schedule}: one chunk on each rank and split backward")
    if chunks == -1:
        chunks = int(row["n_layers"]) // pp
    if chunks > 1:
        said.update(schedule="interleaved", stages_per_rank=chunks)
    elif said["accumulate"] < pp:
        said["schedule"] = "gpipe"  # the same, where none is left to be steady
    said["waits_for_sends"] = "schedule" in said


# Models


def model_of(row: Row, family: Mapping[str, Any], notes: list[str]) -> LlamaConfig | GPTConfig:
    """Return the model's shape."""
    arch = str(row.get("arch", ""))
    missing = [key for key in ("n_layers", "hidden", "n_heads", "seq_len") if not row.get(key)]
    if missing:
        raise CannotSay(f"the row lacks {', '.join(missing)}")
    if not row.get("vocab"):
        notes.append(f"its vocabulary is not stated; taken as {USUAL_VOCABULARY:,}")
        row = {**row, "vocab": USUAL_VOCABULARY}
    if row.get("n_experts"):
        return _moe(row, family)
    if row.get("gated_mlp") and "gpt (" not in arch:
        return _llama(row, family)
    return _gpt(row, family)


def _vocabulary(row: Row, family: Mapping[str, Any]) -> int:
    """Return the number of embeddings: Megatron and its kin, which replicate weights, pad it to 128 on each rank."""
    if _zero(row, family) >= 2:
        return int(row["vocab"])
    unit = 128 * int(row.get("tp") or 1)
    return math.ceil(row["vocab"] / unit) * unit


def _gpt(row: Row, family: Mapping[str, Any]) -> GPTConfig:
    arch = str(row.get("arch", ""))
    squared, mpt, bloom = "squared-relu" in arch, "MPT" in arch, "embed-layernorm" in arch
    dropout = 0.1 if arch == "gpt (megatron)" else 0.0
    return GPTConfig(
        vocab_size=_vocabulary(row, family),
        hidden_size=row["hidden"],
        num_hidden_layers=row["n_layers"],
        num_attention_heads=row["n_heads"],
        num_key_value_heads=row.get("n_kv_heads") or row["n_heads"],
        intermediate_size=row.get("ffn") or 4 * row["hidden"],
        head_size=row.get("head_dim"),
        max_seq_len=row["seq_len"],
        positions="rotary" if squared else "alibi" if bloom else "learned",
        activation="squared-relu" if squared else "swiglu" if row.get("gated_mlp") else "gelu",
        bias=not (squared or mpt),
        dropout=dropout,
        attention_dropout=dropout,
        tie_embeddings=bool(row.get("tied_emb", not squared)),
        embedding_norm=bloom,
    )


def _llama_shape(row: Row, family: Mapping[str, Any]) -> dict[str, Any]:
    shape = {
        "vocab_size": _vocabulary(row, family),
        "hidden_size": row["hidden"],
        "intermediate_size": row.get("ffn") or row.get("moe_ffn"),
        "num_hidden_layers": row["n_layers"],
        "num_attention_heads": row["n_heads"],
        "num_key_value_heads": row.get("n_kv_heads") or row["n_heads"],
        "max_seq_len": row["seq_len"],
        "tie_embeddings": bool(row.get("tied_emb")),
        "qk_norm": "qwen3" in str(row.get("model", "")),
    }
    if row.get("head_dim") and row["head_dim"] * row["n_heads"] != row["hidden"]:
        shape["head_size"] = row["head_dim"]
    return shape


def _llama(row: Row, family: Mapping[str, Any]) -> LlamaConfig:
    return LlamaConfig(**_llama_shape(row, family))


def _moe(row: Row, family: Mapping[str, Any]) -> MoEConfig:
    shape = _llama_shape(row, family) | {
        "num_experts": row["n_experts"],
        # Experts of a stated capacity compute and exchange as many tokens as it holds, in part padding.
        "experts_per_token": round((row.get("top_k") or 1) * (row.get("capacity_factor") or 1)),
        "expert_intermediate_size": row.get("moe_ffn") or row["ffn"],
        "num_shared_experts": row.get("n_shared_experts") or 0,
        "num_dense_layers": row.get("n_dense_layers") or 0,
        "bias_update_rate": 0.0,
        "aux_loss_weight": 0.0,
    }
    if not str(row.get("arch", "")).startswith("deepseek"):
        return MoEConfig(**shape)
    return MLAConfig(**shape, **LATENT, query_rank=QUERY_RANK if row["hidden"] > 2048 else 0)
