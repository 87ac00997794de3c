"""Seconds to wrap a model of 8 billion parameters, ours beside torch's FSDP2, and to fill one of 405 billion.

One rank in a world that moves nothing (torch's fake group) wraps a Llama of the shapes of Llama 3 8B, without data:
each layer, then the rest. The mesh is made before, and not counted. Each figure has a process of its own.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.engine import NAMES
from benchmarks.engine_counts import engines, one_rank
from benchmarks.toy import wrapper
from hyper_parallel import fully_shard, shard_module
from hyper_parallel.core.init.api import init_parameters
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.plans import llama_plan

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
LLAMA_3_405B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=16_384,
    intermediate_size=53_248,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    max_seq_len=128,
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


def cost_to_fill(sizes: tuple[int, ...], fill: Callable[[nn.Module], None]) -> tuple[float, float, float]:
    """CPU seconds, peak memory and the shards' memory in MiB for one layer of Llama 3 405B, by rank 0 of a mesh.

    Args:
        sizes: of the axes dp, over which `fully_shard` splits, and tp.
        fill: the `init_fn`.
    """
    torch.set_num_threads(1)
    with one_rank(math.prod(sizes)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model = Llama(replace(LLAMA_3_405B, num_hidden_layers=1))
        shard_module(model, mesh, llama_plan(model, mesh))
        layer = fully_shard(model.layers[0], mesh=mesh["dp"])
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        init_parameters(layer, 1, init_fn=fill)
        took, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        local = [p.to_local().nbytes for p in layer.parameters()]  # type: ignore[attr-defined]
        return took, (after - before) / 2**10, sum(local) / 2**20


def by_tiles(module: nn.Module) -> None:
    """Fill as most models do."""
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.02)


def truncated(module: nn.Module) -> None:
    """Fill by a truncated distribution."""
    for parameter in module.parameters(recurse=False):
        nn.init.trunc_normal_(parameter, std=0.02)


def unsharded(module: nn.Module) -> None:
    """Fill from a generator, which no tile can: each rank draws everything."""
    for parameter in module.parameters(recurse=False):
        parameter.data.normal_(std=0.02, generator=torch.Generator().manual_seed(1))


def filling_table() -> str:
    """Cost by mesh and kind of filling as a Markdown table."""
    lines = [
        "| ranks | dp, tp | filled | shards, MiB | peak, MiB | CPU, s | 126 layers, s |",
        "|--:|---|---|--:|--:|--:|--:|",
    ]
    for sizes in ((128, 1), (16, 8), (1024, 1), (128, 8)):
        for fill in (by_tiles, truncated, unsharded):
            if fill is unsharded and sizes != (1024, 1):
                continue  # the same on every mesh
            with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
                took, peak, held = pool.submit(cost_to_fill, sizes, fill).result()
            start = f"| {math.prod(sizes):,} | {sizes} | {fill.__name__.replace('_', ' ')} | {held:.0f} | {peak:.0f} |"
            lines.append(f"{start} {took:.2f} | {LLAMA_3_405B.num_hidden_layers * took:.0f} |")
    return "\n".join(lines)
