"""Causal attention over a sequence that four gloo processes share: ours, and torch's experimental ring.

Forward and backward of one layer's attention, with inputs that are split already. Protocol as for the engine. Torch's
`context_parallel` refuses tensors on the CPU ("does not have a sharding strategy registered"), as only kernels of GPUs
are registered with it. So its ring is called here as it calls it, with the CPU's kernel put in. Of Ulysses' exchange of
heads torch has nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import sim
from benchmarks.dims import in_turns
from benchmarks.engine import Protocol, _time, _with_interval, on_gloo, timed
from hyper_parallel.core.context_parallel import ContextParallel, SequenceSplit
from hyper_parallel.core.context_parallel.attention import Ring

RANKS, HEADS, HEAD_DIM = 4, 8, 64
DEGREES = {"ring": 1, "both": 2, "ulysses": 4}
ROTATIONS = {"gather": "allgather", "exchange": "alltoall"}
SHAPES = {(2, 512): (4, 9), (2, 2048): (1, 7)}
"""By sequences and tokens of the whole sequence: calls of a block, and blocks."""

PARTS = {(2, 2048): 5}
"""By sequences and tokens: blocks."""

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def contest(sequences: int, length: int, protocol: Protocol, *, blocks: tuple[int, int]) -> dict[str, list[float]]:
    """Run the protocol on the calling rank."""
    del protocol
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    views = {name: ContextParallel(mesh, degree) for name, degree in DEGREES.items()}
    calls: dict[str, Callable[[], None]] = {}
    for name in (*DEGREES, *ROTATIONS):
        view = views.get(name, views["ring"])  # torch splits as our ring does
        attend: Attend = view.attend if name in DEGREES else partial(_torch_attend, mesh.get_group(), ROTATIONS[name])
        whole = _whole(sequences, length)
        local = [view.split(x, dim=2).requires_grad_() for x in whole[:3]]
        grad = view.split(whole[3], dim=2)
        _check(name, view, attend, local, grad, whole)
        calls[name] = partial(_several, attend, local, grad, blocks[0])
    return in_turns(calls, *blocks)


def _whole(sequences: int, length: int) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the result."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(sequences, HEADS, length, HEAD_DIM, generator=draw) for _ in range(4)]


def _once(attend: Attend, local: list[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = attend(*local)
    return out, *torch.autograd.grad(out, local, grad)


def _several(attend: Attend, local: list[torch.Tensor], grad: torch.Tensor, times: int) -> None:
    for _ in range(times):
        _once(attend, local, grad)


def _check(name: str, view: Any, attend: Attend, local: Any, grad: torch.Tensor, whole: list[torch.Tensor]) -> None:
    """Refuse to time contestants that compute something else than attention on one device."""
    alone = [x.clone().requires_grad_() for x in whole[:3]]
    wanted = _once(partial(F.scaled_dot_product_attention, is_causal=True), alone, whole[3])
    near = 1e-4 if grad.dtype == torch.float32 else 3e-2
    for found, expected in zip(_once(attend, local, grad), wanted, strict=True):
        torch.testing.assert_close(
            found, view.split(expected, dim=2), rtol=near, atol=near, msg=partial(_differs, name)
        )


def _differs(name: str, found: str) -> str:
    return f"{name} computes something else: {found}"


def beside_sdpa(sequences: int, length: int, device: str, calls: int) -> dict[str, float]:
    """Seconds of a forward and backward: by ranks that share a device, and of the whole by the first of them alone.

    In bfloat16 where the device is a GPU: its fused kernels are of 16 bits.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    whole = [x.to(device, dtype) for x in _whole(sequences, length)]
    ways: dict[str, Callable[[], object]] = {}
    for name, degree in (("ring", 1), ("ulysses", dist.get_world_size())):
        view = ContextParallel(mesh, degree)
        local = [view.split(x, dim=2).requires_grad_() for x in whole[:3]]
        grad = view.split(whole[3], dim=2)
        _check(name, view, view.attend, local, grad, whole)
        ways[name] = partial(_once, view.attend, local, grad)
    alone = [x.clone().requires_grad_() for x in whole[:3]]
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    ways["SDPA of the whole, once"] = lambda: _once(causal, alone, whole[3]) if dist.get_rank() == 0 else None
    for way in ways.values():
        timed(way, 1, device)
    return {name: timed(way, calls, device) for name, way in ways.items()}


# -- torch's ring ----------------------------------------------------------------------------------------------------


class _TorchRing(torch.autograd.Function):
    """Attention by torch's ring, and its gradients."""

    @staticmethod
    def forward(ctx: Any, group: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = torch_ring._templated_ring_attention(group, 2, _KERNEL, q, k, v, is_causal=True, dropout_p=0.0)
        ctx.group = group
        ctx.save_for_backward(q, k, v, *found[:2])
        return found[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        found = torch_ring._templated_ring_attention_backward(
            ctx.group, 2, _BACKWARD, grad, "grad_out", q, k, v, out, sums, is_causal=True, dropout_p=0.0
        )
        return None, *found[:3]


def _torch_attend(group: Any, rotation: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    torch_ring.set_rotate_method(rotation)
    return _TorchRing.apply(group, q, k, v)


# -- the ring, and what it is made of --------------------------------------------------------------------------------


def parts(sequences: int, length: int, protocol: Protocol, *, blocks: int) -> dict[str, list[float]]:
    """Measure CPU seconds of all ranks together, by contestant, on the calling rank.

    "parts" is the kernel's time of one attention over the whole sequence, on one device, and the exchange by itself:
    what the ring sends, without a computation.
    """
    del protocol
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    view = ContextParallel(mesh, 1)
    whole = _whole(sequences, length)
    local = [view.split(x, dim=2).requires_grad_() for x in whole[:3]]
    alone = [x.clone().requires_grad_() for x in whole[:3]]
    _check("ring", view, view.attend, local, view.split(whole[3], dim=2), whole)
    calls: dict[str, Callable[[], object]] = {
        "ring": partial(_once, view.attend, local, view.split(whole[3], dim=2)),
        "exchange": partial(_exchange, local[1].detach()),
        "whole": partial(_once, partial(F.scaled_dot_product_attention, is_causal=True), alone, whole[3]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*calls, "parts")}
    for block in range(1 + blocks):
        for name, call in calls.items():
            dist.barrier()
            start = time.process_time()
            call()
            took = torch.tensor([time.process_time() - start], dtype=torch.float64)
            dist.all_reduce(took)
            if block:
                seconds[name].append(took.item() / (RANKS if name == "whole" else 1))
    seconds["parts"] = [sum(pair) for pair in zip(seconds["whole"], seconds["exchange"], strict=True)]
    return seconds


def _exchange(keys: torch.Tensor) -> None:
    ranks = tuple(range(dist.get_world_size()))
    group = dist.group.WORLD
    assert group is not None
    ring = Ring(group, ranks, dist.get_rank(), SequenceSplit(len(ranks)))
    both = torch.stack((keys, keys))
    for _ in ring.travel(both):
        pass
    share = torch.zeros_like(both)
    for step, _ in enumerate(ring.travel(both)):
        share = ring.send(share).wait() if step else share


# -- masks of FlexAttention --------------------------------------------------------------------------------------------


MASKS: dict[str, Callable[..., torch.Tensor]] = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window of 256": lambda b, h, q, kv: (q >= kv) & (q - kv < 256),
    "4 documents": lambda b, h, q, kv: (q >= kv) & (q // 512 == kv // 512),
}
MASKED_TOKENS, MASKED_CALLS = 2048, 5


def masked() -> dict[str, list[float]]:
    """CPU seconds of all ranks together, by mask: of the ring, and of the mask as a tensor on one device."""
    view = ContextParallel(init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",)), 1)
    whole = _whole(1, MASKED_TOKENS)
    local = [view.split(x, dim=2).requires_grad_() for x in whole[:3]]
    grad = view.split(whole[3], dim=2)
    alone = [x.clone().requires_grad_() for x in whole[:3]]
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    ways: dict[str, tuple[Attend, Attend]] = {"causal, by attend": (view.attend, causal)}
    for name, rule in MASKS.items():
        blocks = create_block_mask(rule, None, None, MASKED_TOKENS, MASKED_TOKENS, device="cpu")
        seen = create_mask(rule, 1, 1, MASKED_TOKENS, MASKED_TOKENS, device="cpu")
        dense = partial(F.scaled_dot_product_attention, attn_mask=seen)
        ways[name] = partial(view.flex_attention, block_mask=blocks), dense
    found: dict[str, list[float]] = {}
    for name, (ours, theirs) in ways.items():
        for found_part, expected in zip(_once(ours, local, grad), _once(theirs, alone, whole[3]), strict=True):
            near = view.split(expected, dim=2)
            torch.testing.assert_close(found_part, near, rtol=1e-4, atol=1e-4, msg=partial(_differs, name))
        for _ in range(MASKED_CALLS):
            for kind, call in ((f"{name}/ring", partial(_once, ours, local, grad)), (f"{name}/one", None)):
                dist.barrier()
                start = time.thread_time()
                if call is not None:
                    call()
                elif dist.get_rank() == 0:
                    _once(theirs, alone, whole[3])
                took = torch.tensor([time.thread_time() - start], dtype=torch.float64)
                dist.all_reduce(took)
                found.setdefault(kind, []).append(took.item())
    return found


def masks_table() -> str:
    """CPU time of a ring with masks, on simulated ranks, as a Markdown table."""
    seconds = sim.run(masked, RANKS)[0]
    lines = [
        "| mask | scores that count | ring, CPU ms | mask as a tensor, one device, CPU ms | ring / one device |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in ("causal, by attend", *MASKS):
        rule = MASKS[name.partition(",")[0]]
        share = create_mask(rule, 1, 1, MASKED_TOKENS, MASKED_TOKENS, device="cpu").float().mean()
        ring, one = (median(seconds[f"{name}/{kind}"]) * 1e3 for kind in ("ring", "one"))
        lines.append(f"| {name} | {share:.1%} | {ring:.0f} | {one:.0f} | {ring / one:.2f} |")
    return "\n".join(lines)


# -- tables ----------------------------------------------------------------------------------------------------------


def table() -> str:
    """Times and ratios as a Markdown table."""
    names = (*DEGREES, *ROTATIONS)
    lines = [
        "| tokens | ring, ms | 2 x 2, ms | Ulysses, ms | torch's ring (all_gather), ms | torch's ring (all_to_all), ms "
        "| ring / torch's | 2 x 2 / torch's | Ulysses / torch's |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (sequences, length), blocks in SHAPES.items():
        result = on_gloo(RANKS, sequences, length, partial(contest, blocks=blocks))
        best = min(ROTATIONS, key=result.median)
        ratios = [_with_interval(*result.ratio(name, best)) for name in DEGREES]
        lines.append(f"| {sequences}x{length} | {' | '.join([_time(result, name) for name in names] + ratios)} |")
        print(lines[-1], flush=True)
    return "\n".join([*lines, "", *_parts_table()])


def _parts_table() -> list[str]:
    lines = [
        "| tokens | ring, CPU ms | one attention, CPU ms | exchange, CPU ms | ring / both |",
        "|---|--:|--:|--:|--:|",
    ]
    for sequences, length in PARTS:
        result = on_gloo(RANKS, sequences, length, partial(parts, blocks=PARTS[sequences, length]))
        times = " | ".join(_time(result, name) for name in ("ring", "whole", "exchange"))
        lines.append(f"| {sequences}x{length} | {times} | {_with_interval(*result.ratio('ring', 'parts'))} |")
        print(lines[-1], flush=True)
    return lines
