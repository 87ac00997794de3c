"""One managed parameter: its shard, its whole, and which of the two its modules show."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.core.fully_shard.mesh import DataParallelMesh

__all__ = ["ShardedParam", "dtensor_like"]


@dataclass(frozen=True)
class Slot:
    """One place where a parameter is registered: ``module._parameters[name]``. Tied weights have several."""

    module: nn.Module
    name: str

    def show(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` here."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = parameter  # the same, cheaper
        else:  # the module wants to know: recurrent ones keep a second list of their weights
            setattr(self.module, self.name, parameter)


def dtensor_like(local: torch.Tensor, model: DTensor) -> DTensor:
    """A DTensor over ``local`` with the layout and global shape of ``model``; no autograd, no checks.

    ``DTensor.from_local`` does the same in ten times the time, which a step would pay once per parameter.
    """
    return DTensor(local, model._spec, requires_grad=False)


class ShardedParam:
    """A parameter split along dim 0 over the shard axis.

    Parts follow ``torch.chunk``: of size ``rows = ceil(dim 0 / shard axis)``, the last ones smaller or empty.
    Communication uses equal parts of ``rows`` rows; what is beyond the end is padding.

    Attributes:
        name: Full name in the module that was wrapped.
        slots: Where it is registered.
        attributes: What users have attached to the parameter, for shard and whole to keep.
        shape: Global shape.
        chunk: Elements of one padded part.
        local_shape: Shape of this rank's part, without padding.
        sharded: The parameter that optimizers and state dicts see: a DTensor.
        unsharded: The whole parameter, that forward and backward see; its storage is empty while resharded.
    """

    def __init__(self, name: str, slots: list[Slot], whole: nn.Parameter, mesh: DataParallelMesh) -> None:
        self.name = name
        self.slots = slots
        self.attributes = dict(whole.__dict__)
        self.shape = whole.shape
        self.numel = whole.numel()
        rows = -(-self.shape[0] // mesh.shard_size)
        per_row = prod(self.shape[1:])
        self.chunk = rows * per_row
        first = min(rows * mesh.shard_rank, self.shape[0])
        last = min(first + rows, self.shape[0])
        self.rows = slice(first, last)
        self.local_shape = torch.Size((last - first, *self.shape[1:]))
        self.local_numel = self.local_shape.numel()
        self.sharded: nn.Parameter
        self.unsharded: nn.Parameter

    def make_sharded(self, local: torch.Tensor, mesh: DataParallelMesh, whole: nn.Parameter) -> None:
        """Make the sharded parameter over ``local``, this rank's part."""
        stride = tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        dtensor = DTensor.from_local(
            local, mesh.mesh, mesh.placements, run_check=False, shape=self.shape, stride=stride
        )
        self.sharded = nn.Parameter(dtensor, requires_grad=whole.requires_grad)
        self.sharded.__dict__.update(self.attributes)

    @property
    def local(self) -> torch.Tensor:
        """This rank's part, as the sharded parameter holds it now."""
        held = self.sharded._local_tensor  # type: ignore[attr-defined]
        assert isinstance(held, torch.Tensor)
        return held

    def show(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` on the modules."""
        for slot in self.slots:
            slot.show(parameter)

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Add ``gradient``, flat and this rank's part, to the sharded parameter's."""
        part = gradient.view(self.local_shape)
        held = self.sharded.grad
        if held is None:
            self.sharded.grad = dtensor_like(part, self.sharded)  # type: ignore[arg-type]
        else:
            held._local_tensor.add_(part)  # type: ignore[attr-defined]

    def clear_gradient(self, *, set_to_none: bool) -> None:
        """Drop the gradients of shard and whole, or zero the shard's."""
        self.unsharded.grad = None
        if set_to_none:
            self.sharded.grad = None
        elif self.sharded.grad is not None:
            self.sharded.grad._local_tensor.zero_()  # type: ignore[attr-defined]
