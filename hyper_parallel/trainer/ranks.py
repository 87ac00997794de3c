"""Communication of a training step outside of the model: sums of numbers, and the vote to stop."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hyper_parallel.core.mesh.parallel_dims import ParallelDims


class Ranks:
    """The groups of a run that numbers are added up over, of the calling rank.

    Args:
        dims: the degrees; their mesh is built, unless `meshed` is False.
        meshed: False for one process without torch.distributed.
        device: where the numbers are.
        dtype: that losses are added up in, of weights; not every device has float64.
    """

    def __init__(self, dims: ParallelDims, meshed: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.batch_rank, self.batch_ranks = 0, dims.batch_ranks
        self.world: dist.ProcessGroup | None = None
        self.tokens: dist.ProcessGroup | None = None
        self.stages: dist.ProcessGroup | None = None
        if not meshed:
            return
        self.world = dist.group.WORLD
        # Ranks with other tokens: those of the mesh's "loss", and those along ep.
        tokens = dims.mesh_over("dp_replicate", "dp_shard", "ep", "cp")
        self.tokens = None if tokens is None else tokens.get_group()
        self.stages = dims.get_mesh("pp").get_group() if dims.pp_enabled else None
        batch = [axis for axis in ("dp_replicate", "dp_shard", "ep") if axis in dims.mesh_axes]
        for axis in batch:
            mesh = dims.get_mesh(axis)
            self.batch_rank = self.batch_rank * mesh.size() + mesh.get_local_rank()

    def over_tokens(self, value: torch.Tensor) -> torch.Tensor:
        """Add up a number over the ranks with other tokens; ranks along tp and pp have the same."""
        if self.tokens is not None:
            dist.all_reduce(value, group=self.tokens)
        return value

    def over_shares(self, share: torch.Tensor) -> float:
        """Add up shares of the loss, which only the last stage of a pipeline has, the others zeros."""
        total = share.detach().to(self.dtype, copy=True)
        if self.stages is not None:
            dist.all_reduce(total, group=self.stages)
        return self.over_tokens(total).item()

    def any(self, flag: bool) -> bool:
        """Tell, alike on every rank, whether any rank says yes."""
        if self.world is None or dist.get_world_size() == 1:
            return flag
        value = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())
