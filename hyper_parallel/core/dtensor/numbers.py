"""A few numbers of every rank, told to all of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["gather_numbers"]


def gather_numbers(mine: Sequence[int], group: dist.ProcessGroup, device: torch.device | str) -> list[list[int]]:
    """Return the numbers of every rank of a group, in group order.

    Where tensors have no values, as in the mesh simulator, every rank is taken to have what this one has.

    Args:
        mine: this rank's; as many as all others have.
        group: the ranks.
        device: what the group communicates with.

    Communication: one all_gather of these numbers; backward none.
    """
    own = torch.tensor(list(mine), dtype=torch.int64).to(device)
    gathered = torch.empty(group.size() * len(mine), dtype=torch.int64, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own, group=group)
    if isinstance(gathered, FakeTensor):
        return [list(mine)] * group.size()
    rows: list[list[int]] = gathered.view(group.size(), -1).tolist()
    return rows
