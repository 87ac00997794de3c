"""How long it takes to wrap a model of 8 billion parameters, ours beside torch's FSDP2, by size of the world.

One rank in a world that moves nothing (torch's fake group) wraps a Llama of the shapes of Llama 3 8B, without data:
each layer, then the rest. The mesh is made before, and not counted. Each figure has a process of its own.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.engine import NAMES
from benchmarks.engine_counts import engines, one_rank
from benchmarks.toy import wrapper
from hyper_parallel.models.llama import Llama, LlamaConfig

LLAMA_3_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_seq_len=8192,
    rope_theta=500_000.0,
)
MESHES = ((8,), (64,), (1024,), (32, 32))


def seconds_to_wrap(engine: str, sizes: tuple[int, ...], config: LlamaConfig = LLAMA_3_8B, times: int = 1) -> float:
    """The median over some models, each wrapped once, in the calling process; a model of one layer goes first."""
    torch.set_num_threads(1)
    wrap = wrapper(engine)
    took = []
    with one_rank(math.prod(sizes)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard")[-len(sizes) :])
        for number in range(1 + times):
            with torch.device("meta"):
                model = Llama(config if number else replace(config, num_hidden_layers=1))
            start = time.perf_counter()
            for layer in model.layers:
                wrap(layer, mesh=mesh)
            wrap(model, mesh=mesh)
            took.append(time.perf_counter() - start)
    return float(np.median(took[1:]))


def table(meshes: Sequence[tuple[int, ...]] = MESHES, config: LlamaConfig = LLAMA_3_8B) -> str:
    """Seconds by world and engine as a Markdown table."""
    chosen = engines()
    lines = [
        f"| ranks | mesh | {' | '.join(f'{NAMES[engine]}, s' for engine in chosen)} | FSDP2 / ours |",
        f"|--:|---|{'--:|' * len(chosen)}--:|",
    ]
    for sizes in meshes:
        found = {}
        for engine in chosen:
            times = 3 if engine != "fsdp2" else 1  # the others take a fraction of a second each
            with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
                found[engine] = pool.submit(seconds_to_wrap, engine, sizes, config, times).result()
        cells = [f"{seconds:.2f}" for seconds in found.values()]
        ratio = found["fsdp2"] / found["ours"]
        lines.append(f"| {math.prod(sizes):,} | {sizes} | {' | '.join(cells)} | {ratio:.0f} |")
    return "\n".join(lines)
