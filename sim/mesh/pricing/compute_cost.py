"""Seconds of kernels: a roofline, under which small shapes fall short by known mechanisms.

A matmul is cut in tiles, of which each core computes one at a time: its time is that of its waves of tiles, each as
long as its inner dimension and a fixed prologue, and larger tiles reuse more of what they read. The library takes the
tiling that is over first. No matmul is faster than the best one measured, than its bytes allow, or than a kernel's
floor. Figures: `hyper_parallel/core/machine/data/calibration.toml`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

_ALIGNMENT = 16
"""Bytes: what tensor cores load at a time."""
_TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (256, 256))


class Price(NamedTuple):
    """What an event costs.

    Attributes:
        seconds: on an otherwise idle device.
        grade: evidence grade of the weakest figure that it rests on.
        bound: what bounds it: `compute`, `memory`, `latency`, `link`, `network`, `host`.
        spread: standard deviation of the logarithm of the true time over `seconds`.
    """

    seconds: float
    grade: str
    bound: str
    spread: float = 0.0


def matmul_seconds(
    curve: Mapping[str, Any], shape: tuple[int, ...], peak: float, cores: int, item: float, bandwidth: float
) -> tuple[float, str]:
    """Return the seconds of a batch of matmuls, and what bounds them.

    Args:
        curve: `floor_us`, `rate` (of the peak, inside of an endless tile), `prologue` (in steps of k), `edge`
            (a tile of m x n runs at 1/(1 + edge/m + edge/n)), `quantised` (how far a wave begun counts as a whole
            one), `cap` (of the peak: the best matmul of any shape), `sustained` (of that: in hours of training),
            `stream` (of the memory's bandwidth), `unaligned` (what is left of the rate where matrices of a batch do
            not start at multiples of 16 bytes, as heads of 108 elements).
        shape: (batch, m, n, k).
        peak: FLOP/s.
        cores: that compute tiles at once.
        item: bytes of an element.
        bandwidth: of the memory.
    """
    batch, m, n, k = shape
    flops = 2.0 * batch * m * n * k
    if not flops:
        return curve["floor_us"] * 1e-6, "latency"
    quantised, edge = curve["quantised"], curve["edge"]
    best = math.inf
    for tile_m, tile_n in _TILES:
        waves = batch * math.ceil(m / tile_m) * math.ceil(n / tile_n) / cores
        waves = 1.0 if waves < 1 else waves + quantised * (math.ceil(waves) - waves)
        best = min(best, waves * tile_m * tile_n * (1 + edge / tile_m + edge / tile_n))
    sustained = curve.get("sustained", 1.0)
    compute = best * 2 * (k + curve["prologue"]) * cores / (curve["rate"] * peak)
    compute = max(compute, flops / (curve["cap"] * peak)) / sustained
    if batch > 1 and (n * item % _ALIGNMENT or k * item % _ALIGNMENT):
        compute /= curve.get("unaligned", 1.0)
    memory = item * batch * (m * k + k * n + m * n) / (curve["stream"] * bandwidth)
    floor = curve["floor_us"] * 1e-6
    bound = "memory" if memory > compute else "compute"
    return floor + max(compute, memory), "latency" if floor > max(compute, memory) else bound


def attention_seconds(
    curve: Mapping[str, Any], shape: tuple[int, ...], peak: float, *, backward: bool, sustained: float = 1.0
) -> tuple[float, str]:
    """Return the seconds of a fused attention, and what bounds them.

    A causal one computes half of the square, and comes less close to the peak.

    Args:
        curve: `floor_us`; `forward` and `backward`: share of the peak at endless length by head size;
            `half_forward`, `half_backward`: length at which half of it is reached; `causal`: part of that share,
            `causal_length_forward`, `causal_length_backward`: part of its length that a causal one counts with.
        shape: (batch, heads, kv_heads, queries, keys, head_dim, is_causal).
        peak: FLOP/s.
        backward: five matmuls instead of two.
        sustained: share of the peak that is left in hours of training.
    """
    batch, heads, _, queries, keys, size, causal = shape
    name = "backward" if backward else "forward"
    square = 1.0 * batch * heads * queries * keys
    if causal:  # a query sees the keys up to its own place, counted from the end
        seen = queries * (2 * keys - queries + 1) / 2 if queries <= keys else keys * (keys + 1) / 2
        square = 1.0 * batch * heads * seen
    flops = (10 if backward else 4) * square * size
    length = keys * curve[f"causal_length_{name}"] if causal else keys
    share = _by_size(curve[name], size) * length / (length + curve[f"half_{name}"]) * (curve["causal"] if causal else 1)
    floor = curve["floor_us"] * 1e-6
    compute = flops / (share * peak * sustained)
    return floor + compute, "latency" if floor > compute else "compute"


def _by_size(shares: Mapping[str, float], size: int) -> float:
    """Return the share of the peak for a head size, between those of the nearest known ones."""
    known = sorted((int(name), share) for name, share in shares.items())
    for (low, a), (high, b) in itertools.pairwise(known):
        if low <= size <= high:
            return a + (b - a) * (size - low) / (high - low)
    return known[0][1] * size / known[0][0] if size < known[0][0] else known[-1][1]


def stream_seconds(
    curve: Mapping[str, Any], moved: float, bandwidth: float, share: str = "stream"
) -> tuple[float, str]:
    """Return the seconds of a kernel that is bounded by what it reads and writes.

    Args:
        curve: `floor_us`, the attained share of the bandwidth, and where caches matter: `cache_mib`, what they
            hold, and `cache_speedup`, how much faster they are.
        moved: bytes read and written.
        bandwidth: of the memory.
        share: name of the share: `stream`, `several` (tensors), `softmax`, `norm`, `norm_backward`, `random`,
            `optimizer`, `fused`; one that the curve lacks is that of `stream`.
    """
    floor = curve["floor_us"] * 1e-6
    memory = moved / (curve.get(share, curve["stream"]) * bandwidth)
    if moved and curve.get("cache_mib"):
        cached = 1 / (1 + (moved / 2**20 / curve["cache_mib"]) ** 2)
        memory *= 1 - cached + cached / curve["cache_speedup"]
    return floor + memory, "latency" if floor > memory else "memory"
