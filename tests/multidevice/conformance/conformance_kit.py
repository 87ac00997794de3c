"""Helpers of the conformance tests: each rank's contribution, and the comparison of results.

Every rank can work out what every other one contributes, so each result is compared with the obvious formula over
all ranks' contributions, the same on every backend. Where a backend lacks something, the body leaves out that backend.
"""

from __future__ import annotations

import torch

HOST = ("sim", "gloo")  # backends that take what the CPU can do: integers, tags, layouts, an open choice of dtypes
NOT_GLOO = ("sim", "gpu", "npu")


def values(ctx, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What `rank` brings along: small whole numbers, exact in every dtype, different on every rank."""
    count = int(torch.Size(shape).numel())
    numbers = (torch.arange(count) * 3 + rank * 5 + 1) % 7 + 1
    if dtype is torch.bool:
        numbers = numbers % 2
    elif dtype.is_complex:
        numbers = torch.complex(numbers.double(), numbers.double() * 2 - rank)
    return numbers.to(dtype).reshape(shape).to(ctx.device)


def all_values(ctx, *shape: int, dtype: torch.dtype = torch.float32, group=None) -> torch.Tensor:
    """What the ranks of a group bring along (None: all of them), stacked in group order."""
    ranks = range(ctx.world_size) if group is None else group
    return torch.stack([values(ctx, rank, *shape, dtype=dtype) for rank in ranks])


def zeros(ctx, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=ctx.device)


def zero_list(ctx, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One tensor for each rank to receive into."""
    return [zeros(ctx, *shape, dtype=dtype) for _ in range(ctx.world_size)]


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal to the last bit, in shape and in dtype; of dtypes without arithmetic, as fp32."""
    assert found.dtype == wanted.dtype
    if found.dtype.itemsize == 1 and found.is_floating_point():
        found, wanted = found.float(), wanted.float()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def same_list(found: list[torch.Tensor], wanted) -> None:
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


def next_and_previous(ctx) -> tuple[int, int]:
    return (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
