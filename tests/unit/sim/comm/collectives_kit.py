"""Every collective, as one function that ranks call."""

from __future__ import annotations

import torch
import torch.distributed as dist


def every_collective() -> list[tuple[str, tuple[int, ...]]]:
    """The device and the shape of each tensor that was sent or received."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(4, 2)
    dist.all_reduce(x)
    dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait()
    dist.broadcast(x, 0)
    dist.reduce(x, 1)
    parts = [torch.empty(4, 2) for _ in range(size)]
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(whole := torch.empty(4 * size, 2), x)
    dist.reduce_scatter_tensor(part := torch.empty(4, 2), whole)
    dist.scatter(part, parts if rank == 0 else None, src=0)
    dist.gather(part, parts if rank == 0 else None, dst=0)
    dist.all_to_all(parts, [torch.ones(4, 2) for _ in range(size)])
    dist.all_to_all_single(whole, torch.ones(4 * size, 2))
    sent = [1 + receiver for receiver in range(size)]
    received = torch.empty((1 + rank) * size, 2)
    dist.all_to_all_single(received, torch.ones(sum(sent), 2), [1 + rank] * size, sent)
    with dist._coalescing_manager():
        dist.all_reduce(x)
    works = [dist.isend(x, (rank + 1) % size), dist.irecv(y := torch.empty(4, 2), (rank - 1) % size)]
    for work in works:
        work.wait()
    dist.barrier()
    return [(str(t.device), tuple(t.shape)) for t in (x, *parts, whole, part, received, y)]
