"""Wrapped models and their unsharded parameters and gradients, to compare with a run on one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rounding_kit import Alone, Results, bound_of, is_stand_in
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import sim
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.unit import unit_of


class Block(nn.Module):
    """A layer with a norm before it and its input added after it."""

    def __init__(self, width: int = 7, hidden: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def inputs(
    ctx: sim.RankTest, seed: int, shape: tuple[int, int], rank: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Inputs of a shape for one rank, or those of all ranks together."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ctx.world_size * shape[0], shape[1], generator=generator, dtype=torch.float64)
    x = x.to(dtype or ctx.float_dtype)
    return (x if rank is None else x[rank * shape[0] : (rank + 1) * shape[0]]).to(ctx.device)


def mesh_of(ctx: sim.RankTest, *shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
    """A mesh of all ranks, or of a shape."""
    shape = shape or (ctx.world_size,)
    return init_device_mesh(ctx.device_type, shape, mesh_dim_names=names[-len(shape) :])


def wrap_nested(model: Any, wrap: Any = fully_shard, **options: Any) -> Any:
    """Wrap each block, then the model."""
    for block in model.blocks:
        wrap(block, **options)
    return wrap(model, **options)


def compiled(ctx: sim.RankTest, model: nn.Module, backend: str | None) -> Any:
    """A model in one graph."""
    if is_stand_in(ctx):  # to try dtypes there, which graphs do not change, takes no graph
        return model
    torch._dynamo.reset()
    torch.fx.traceback.current_meta.clear()  # torch 2.11 leaves marks of checkpoints there that "eager" has seen
    return model if backend is None else torch.compile(model, backend=backend, fullgraph=True)


def full(tensor: Any) -> Any:
    """All of a DTensor, gathered by torch; what is none as it is. Shards on the host go to the mesh's device first."""
    if not isinstance(tensor, DTensor):
        return tensor
    kind = tensor.device_mesh.device_type
    return (tensor if tensor.device.type == kind else tensor.to(kind)).full_tensor()


def gradients(model: nn.Module) -> dict[str, Any]:
    """Unsharded gradients by name, None where there is none."""
    return {name: None if p.grad is None else full(p.grad.detach()) for name, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, Any]:
    """Unsharded parameters by name."""
    return {name: full(p.detach()) for name, p in model.named_parameters()}


def assert_near(
    ours: Results, theirs: Results, alone: Alone | None, *, eps: float | None = None, summands: int = 4096
) -> None:
    """Equal within rounding: in float64, batch, widths, layers and steps multiply to less than `summands`."""
    assert list(ours) == list(theirs)
    ours, theirs = (
        {name: each if each is None else each.cpu() for name, each in some.items()} for some in (ours, theirs)
    )
    for name, wanted in theirs.items():
        got = ours[name]
        assert (got is None) == (wanted is None), (name, got, wanted)
        if got is None or wanted is None:
            continue
        assert got.shape == wanted.shape, name
        if wanted.numel():
            bound = bound_of(wanted, theirs, alone, eps=eps, summands=summands)
            kind = torch.complex128 if wanted.is_complex() else torch.float64
            distance = (got.to(kind) - wanted.to(kind)).abs().max().item()
            assert distance <= bound, (name, distance, got, wanted)


def assert_as_one_device(ctx: sim.RankTest, ours: Any, theirs: Any, assert_close: Any) -> None:
    """Compare losses, of which one device has the mean over ranks, gradients and parameters."""
    for loss, wanted in zip(ours[0], theirs[0], strict=True):
        dist.all_reduce(loss)
        assert_close({"loss": loss / ctx.world_size}, {"loss": wanted})
    assert_close(ours[1], theirs[1])
    assert_close(ours[2], theirs[2])


def assert_freed(model: nn.Module) -> None:
    """Every unit is resharded: the modules show DTensors, and unsharded parameters have no memory."""
    for module in model.modules():
        unit = unit_of(module)
        for bucket in unit.buckets if unit else ():
            assert bucket.unsharded_buffer.untyped_storage().nbytes() == 0, type(module)
    assert all(isinstance(p, DTensor) for p in model.parameters())
