"""Experts of one rank: grouped products beside products of one expert after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from hyper_parallel.core.expert_parallel.experts import grouped, one_by_one
from hyper_parallel.platform import get_platform

SHAPES = ((8, 512, 128, 256), (32, 1024, 256, 256), (64, 256, 64, 64), (8, 4096, 256, 512))
"""Experts, rows, hidden size, inner size."""
BLOCKS, CALLS = 11, 4


def table() -> str:
    """CPU time of both as a Markdown table."""
    torch.set_num_threads(1)
    lines = [
        "| experts | rows | hidden, inner | grouped, ms | one by one, ms | grouped / one by one |",
        "|--:|--:|---|--:|--:|--:|",
    ]
    for count, rows, hidden, inner in SHAPES:
        group, loop = times_of(count, rows, hidden, inner)
        lines.append(f"| {count} | {rows} | {hidden}, {inner} | {group:.2f} | {loop:.2f} | {group / loop:.2f} |")
    return "\n".join(lines)


def times_of(
    count: int, rows: int, hidden: int, inner: int, device: str = "cpu", blocks: int = BLOCKS
) -> tuple[float, float]:
    """Milliseconds of a forward and backward of both, the medians over blocks: on a CPU those of the processor."""
    now, finish = time.process_time if device == "cpu" else time.perf_counter, get_platform(device).synchronize
    sizes = ((rows, hidden), (count, inner, hidden), (count, hidden, inner), (count, inner, hidden))
    given = [torch.randn(size, device=device).to(torch.bfloat16).requires_grad_() for size in sizes]
    grad = torch.randn(rows, hidden, device=device).to(torch.bfloat16)
    counts = torch.full((count,), rows // count, device=device)
    each = counts.tolist()
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: grouped(given[0], counts, *given[1:]),
        lambda: one_by_one(given[0], each, *given[1:]),
    ]
    found: list[list[float]] = [[], []]
    for block in range(1 + blocks):
        for way, seconds in zip(ways, found, strict=True):
            finish()
            start = now()
            for _ in range(CALLS):
                torch.autograd.grad(way(), given, grad)
            finish()
            if block:
                seconds.append((now() - start) / CALLS * 1e3)
    return median(found[0]), median(found[1])
