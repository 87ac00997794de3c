"""Closed formulas for the time and memory of a published run: an independent twin of the mesh simulator.

The formulas are those that papers use for back-of-the-envelope estimates (Korthikanti et al. 2022, Narayanan et al.
2021): no trace, no allocator, no timeline. Where the simulator is far from both a row and this, it is the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30
SUSTAINED = {"a100": 0.72, "h100": 0.68, "h100-500w": 0.58, "910b": 0.70}
FLASH = {"flash1": 0.33, "flash2": 0.55, "flash3": 0.60}


@dataclass(frozen=True)
class Knobs:
    """What the formulas leave open."""

    matmul: Mapping[str, float] = field(
        default_factory=lambda: {"a100": 0.72, "h100": 0.68, "h100-500w": 0.58, "910b": 0.70}
    )
    bandwidth: float = 0.75
    exposed: float = 0.35
    eager: float = 2.2
    overhead_ms: float = 0.15


def device_of(row: Mapping[str, Any]) -> str:
    name = row["hw_device"]
    return "a100" if "A100" in name else "910b" if "910B" in name else "h100-500w" if "96GB" in name else "h100"


def parameters(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return parameters of a layer (all), of a layer (active per token), and of an embedding."""
    h, d = row["hidden"], row["head_dim"]
    attention = h * d * (2 * row["n_heads"] + 2 * row["n_kv_heads"])
    width = 3 if row["gated_mlp"] else 2
    if row.get("n_experts"):
        one = width * h * (row.get("moe_ffn") or row["ffn"])
        shared = row.get("n_shared_experts") or 0
        return (
            attention + one * (row["n_experts"] + shared),
            attention + one * (row["top_k"] + shared),
            row["vocab"] * h,
        )
    dense = attention + width * h * row["ffn"]
    return dense, dense, row["vocab"] * h


def seconds(row: Mapping[str, Any], kernel: str, dims: Any, recipe: Any, knobs: Knobs | None = None) -> float:
    """Return the seconds of a step."""
    knobs = knobs or Knobs()
    layer, active, embedding = parameters(row)
    tp, pp, cp = dims.tp, dims.pp, dims.cp
    parts = recipe.microbatches or 1
    tokens = row["local_batch"] * row["seq_len"] / parts / cp  # of a micro-batch, on a rank
    layers = row["n_layers"] / pp
    peak = row["hw_peak_bf16_tflops"] * 1e12 * (1.75 if recipe.float8 else 1.0)
    bandwidth = {"a100": 2.0e12, "910b": 1.6e12, "h100": 3.35e12, "h100-500w": 2.4e12}[device_of(row)] * knobs.bandwidth
    small = min(1.0, (row["hidden"] / tp / 1536) ** 0.15)
    rate = peak * knobs.matmul[device_of(row)] * small
    passes = {
        "none": 3,
        "full": 4 - (1 - (recipe.checkpoint_layers or row["n_layers"]) / row["n_layers"]),
        "selective": 3.5,
    }
    matmul = 2 * active * tokens / tp * passes[recipe.checkpointing] / rate
    width = row["n_heads"] * row["head_dim"] / tp
    square = 4 * tokens * row["seq_len"] * width
    times = 3.5 + (1 if recipe.checkpointing == "full" else 0)
    if recipe.attention == "flash":
        attention = square / 2 * times / (row["hw_peak_bf16_tflops"] * 1e12 * FLASH[kernel])
    else:
        scores = tokens * row["seq_len"] * row["n_heads"] / tp
        attention = square * (times - 0.5) / rate + scores * 2 * 14 / bandwidth
    eager = knobs.eager if not recipe.compile and recipe.norm == "eager" else 1.4
    moved = (
        tokens
        * 2
        * (
            30 * row["hidden"] * (1 if recipe.sequence_parallel or tp == 1 else tp)
            + 14 * row["ffn" if row.get("ffn") else "hidden"]
        )
        / tp
    )
    pointwise = moved * eager * passes[recipe.checkpointing] / 3 / bandwidth
    tensor = 0.0
    if tp > 1:
        size = tokens * row["hidden"] * 2 * (tp - 1) / tp
        speed = 300e9 * 0.75 if "A100" in row["hw_device"] else 150e9 if "910B" in row["hw_device"] else 450e9 * 0.75
        if tp > 8:
            speed = row.get("inter_bw_gbytes_s_per_dev", 25) * 1e9
        tensor = size * (8 + (4 if recipe.checkpointing == "full" else 0)) / speed * (0.4 if recipe.tp_overlap else 1)
    block = max(
        matmul + attention + pointwise + tensor,
        knobs.overhead_ms * 1e-3 * (0 if recipe.graphs or recipe.compile else 20),
    )
    head = 6 * embedding * tokens / tp / rate + tokens * row["vocab"] / tp * 20 / bandwidth
    local = (layers * layer + embedding) / tp
    reduced = 4 if recipe.reduce_dtype == "fp32" else 2
    dp = dims.dp_size * dims.ep
    near = max(1, 8 // (tp * cp))  # ranks of a data-parallel group in a node: their network cards serve one ring
    slow = (row.get("inter_bw_gbytes_s_per_dev") or 25) * near * 0.8e9 if row["n_devices"] > 8 else 200e9
    step = parts * (layers * block + head / (pp if pp > 1 else 1))
    step *= 1 + (pp - 1) / (recipe.stages_per_rank or 1) / parts
    if recipe.zero >= 2:
        volume = local * (2 * 2 + reduced) * parts / slow
        step = max(step, volume) + knobs.exposed * min(step, volume) * 0.3
    elif dp > 1:
        volume = local * reduced * 2 / slow
        step += volume * (knobs.exposed if recipe.overlap_grad_reduce else 1.0)
    shards = dims.dp_shard * dims.ep * cp if recipe.zero else 1
    return step + local / shards * 30 / bandwidth


def memory(row: Mapping[str, Any], dims: Any, recipe: Any) -> float:
    """Return the peak bytes that are allocated."""
    layer, _, embedding = parameters(row)
    h, kv, f = row["hidden"], row["n_kv_heads"] * row["head_dim"], row.get("ffn") or row["hidden"] * 4
    tp, pp = dims.tp, dims.pp
    ends = 1 if row.get("tied_emb") or pp > 1 else 2
    tokens = row["local_batch"] * row["seq_len"] / (recipe.microbatches or 1) / dims.cp
    local = (row["n_layers"] / pp * layer + ends * embedding) / tp
    shards = dims.dp_shard * dims.ep * dims.cp
    reduced = 4 if recipe.reduce_dtype == "fp32" else 2
    if recipe.zero >= 2:
        states = (
            16 * local / shards + 2 * (ends * embedding + 3 * layer) / tp + reduced * (layer + ends * embedding) / tp
        )
        states += 2 * local if recipe.zero == 2 else 0
    else:
        states = local * (2 + reduced + 12 / (shards if recipe.zero else 1))
    alive = min(pp, recipe.microbatches or 1) if pp > 1 else 1
    if row.get("n_experts") or row["gated_mlp"]:
        full = 12 * h + 4 * kv + 8 * f
        kept = {"none": full, "full": 2 * h, "selective": 2 * (4 * h + kv + f)}[recipe.checkpointing]
    else:
        full = 34 * h + (5 * row["n_heads"] * row["seq_len"] if recipe.attention == "math" else 0)
        kept = {"none": full, "full": 2 * h, "selective": 20 * h}[recipe.checkpointing]
    spread = tp if recipe.sequence_parallel or recipe.checkpointing != "full" else 1
    logits = tokens * row["vocab"] / tp * (14 if recipe.loss == "eager" else 8) / (8 if recipe.fused_loss else 1)
    return (
        states
        + tokens * kept * row["n_layers"] / pp * alive / spread
        + max(logits if pp == 1 else 0, tokens * full / tp)
    )
