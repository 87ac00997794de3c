"""Inputs, gradients and updates of a program that is proved, and its activations on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hyper_parallel.core.activations.offload import OffloadedBlock
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.api import from_local
from hyper_parallel.core.shard.spelling import LayoutTree, leaves
from hyper_parallel.platform import get_platform
from sim.explain.errors import RankFailed
from sim.late.switch import why_not
from sim.observers.races import look
from sim.patches.devices import has_named
from sim.prove.record import Declarations, mapped
from sim.prove.report import Report

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with."""


@dataclass(frozen=True)
class Given:
    """What a model with a plan is given, and what is declared of plain tensors.

    Attributes:
        names: of the inputs.
        positional: the inputs are positional.
        mesh: all ranks.
        cuts: which part of each input a rank is given.
        wrapped: inputs that are given as DTensors.
        said: what was declared.
    """

    names: tuple[str, ...]
    positional: bool
    mesh: Layout
    cuts: Mapping[str, LayoutTree]
    wrapped: frozenset[str]
    said: Declarations

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which plain inputs are split: ranks along them see different data."""
        return self._axes_of([key for key in self.cuts if key not in self.wrapped])

    @property
    def input_axes(self) -> tuple[str, ...]:
        """The axes over which any inputs are split, DTensors too: a rank's loss may be that of its part."""
        return self._axes_of(list(self.cuts))

    def _axes_of(self, keys: Sequence[str]) -> tuple[str, ...]:
        split = {
            name
            for key in keys
            for layout in leaves(self.cuts[key])
            for entry in layout.alias_placements or ()
            for name in ((entry,) if isinstance(entry, str) else entry)
        }
        return tuple(name for name in self.mesh.alias_name if name in split)

    def part_of(self, mesh: DeviceMesh) -> int:
        """Return a number that is the same on ranks that see the same data, as a training script would seed them."""
        number = 0
        for name, size in zip(self.mesh.alias_name, self.mesh.mesh_shape, strict=True):
            if name in self.data_axes:
                number = number * size + mesh.get_local_rank(name)
        return number

    def whole(self, values: Mapping[str, Any], rounded: torch.dtype, dtype: torch.dtype) -> Arguments:
        """Return copies of full inputs as a model takes them, rounded to one dtype and held in another."""
        return self._arguments({name: _whole(value, rounded, dtype) for name, value in values.items()})

    def part(self, values: Mapping[str, Any], dtype: torch.dtype, mesh: DeviceMesh, device: str) -> Arguments:
        """Return the calling rank's parts of full inputs, on a device."""
        parts = {}
        for name, value in values.items():
            wrapped = name in self.wrapped and mesh.size() > 1  # `shard_module` leaves a model on one rank as it is
            parts[name] = cut(_whole(value, dtype, dtype, device), self.cuts.get(name), mesh, wrapped)
        return self._arguments(parts)

    def _arguments(self, values: Mapping[str, Any]) -> Arguments:
        return (tuple(values.values()), {}) if self.positional else ((), dict(values))


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert real parameters and buffers to a dtype, and complex ones to that of its pairs.

    >>> tables = nn.Module()
    >>> tables.register_buffer("turns", torch.tensor([1j]))
    >>> converted(tables, torch.float64).turns  # nn.Module.to would drop the imaginary part
    tensor([0.+1.j], dtype=torch.complex128)
    """
    pairs = torch.complex128 if dtype == torch.float64 else torch.complex64

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(pairs) if tensor.is_complex() else tensor.to(dtype) if tensor.is_floating_point() else tensor

    return model._apply(convert)


def cotangents(outputs: Sequence[tuple[str, torch.Tensor]], seed: int) -> dict[str, torch.Tensor]:
    """Return a random tensor for each output that can be differentiated: the gradient of what would follow."""
    drawn = {}
    for index, (way, tensor) in enumerate(outputs):
        if tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex()):
            generator = torch.Generator().manual_seed(seed + 7 * index)
            parts = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor  # compared as pairs
            drawn[way] = torch.randn(parts.shape, generator=generator, dtype=torch.float64).to(parts.dtype)
    return drawn


def like(output: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of a gradient as what autograd wants for this output."""
    grad = grad.to(output.device)
    grad = torch.view_as_complex(grad.contiguous()) if output.is_complex() else grad
    if not isinstance(output, DTensor):
        return grad
    placements = [Replicate() if placement.is_partial() else placement for placement in output.placements]
    return DTensor.from_local(
        grad, output.device_mesh, placements, run_check=False, shape=output.shape, stride=output.stride()
    )


def averages(model: nn.Module) -> bool:
    """Whether a wrapper takes the mean of gradients, as data parallelism does."""
    names = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "HSDPModule", "HSDPCell"}
    return any(kind.__name__ in names for module in model.modules() for kind in type(module).__mro__)


# -- values ------------------------------------------------------------------------------------------------------------


def cut(value: Any, tree: LayoutTree, mesh: DeviceMesh, wrapped: bool) -> Any:
    """Return the calling rank's part of a full value, with the same containers.

    Args:
        value: a tensor, a container of them, or anything else, which stays as it is.
        tree: layouts; None: the full tensor.
        mesh: the mesh of all ranks.
        wrapped: return DTensors.
    """
    if isinstance(value, torch.Tensor):
        if not isinstance(tree, Layout):
            return value
        grad = value.requires_grad
        part = value.detach()[tree.local_slice(value.shape)].clone()
        if wrapped:
            part = from_local(part, tree.with_mesh(mesh), shape=value.shape)
        return part.detach().requires_grad_(grad)
    if isinstance(value, Mapping):
        return {key: cut(entry, _at(tree, key), mesh, wrapped) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [cut(entry, _at(tree, index), mesh, wrapped) for index, entry in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _at(tree: LayoutTree, place: Any) -> LayoutTree:
    if isinstance(tree, Mapping):
        return tree.get(place)
    return tree[place] if isinstance(tree, tuple) and place < len(tree) else tree if isinstance(tree, Layout) else None


def _whole(value: Any, rounded: torch.dtype, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Copy a full input to a device, floating values rounded to one dtype and held in another."""

    def copied(tensor: torch.Tensor, way: str) -> torch.Tensor:
        del way
        copy = tensor.detach().clone()
        copy = copy.to(rounded).to(dtype) if copy.is_floating_point() else copy
        return copy.to(device).requires_grad_(tensor.requires_grad)

    return mapped(value, copied)


# -- on a device -------------------------------------------------------------------------------------------------------


def offload_device() -> str | None:
    """Return a device on which ranks move activations to the host: a real one, or a late one; None: there is none."""
    kind = get_platform().device_type
    if kind != "cpu" and not has_named("npu"):
        return kind
    return None if why_not() else "npu"


def offloaded_of(model: nn.Module) -> list[OffloadedBlock]:
    """Return the blocks of a model whose activations wait on the host."""
    return [module for module in model.modules() if isinstance(module, OffloadedBlock)]


def offload_words(device: str | None, why: str = "") -> str:
    """Say that moving activations is proved, on which devices; or why it is not.

    Args:
        device: see `offload_device`.
        why: "": it is, if there is a device.
    """
    if device is None or why:
        return f"that activations go to the host and back is not proved: {why or why_not()}"
    return f"activations go to the host and back on {device} devices without a race, and all is the same"


NOTHING_MOVED = "all that blocks keep is too small, or the last block's"


def proved_on_device(report: Report, prove: Callable[[str], Report], why: str = "") -> Report:
    """Add to a right report of a model with offloaded blocks what ranks say that move their activations.

    Args:
        report: of ranks without memory of their own, which move nothing.
        prove: takes the same steps on a device, and compares; of a report without rows nothing was moved.
        why: this cannot be done; "": it can.
    """
    device, again = offload_device(), None
    if device is not None and not why:
        try:
            again = prove(device)
            why = "" if again.rows else NOTHING_MOVED
        except RankFailed as error:
            if "same device" not in str(error):
                raise
            why = str(error).splitlines()[0]  # the program makes tensors on the CPU and uses them beside its inputs
    if again is None or again.bug is None:
        return replace(report, notes=(*report.notes, offload_words(device, why)))
    sentence = "it is right where nothing is moved, and wrong where activations go to the host and back"
    first, *rows = [row for row in again.rows if row.verdict == "bug"]
    first = replace(first, sentence=sentence, suggestion="")
    return replace(report, rows=(*report.rows, first, *rows), mutants=None)


def look_at_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Raise `InFlightBufferRace` if an operation is in flight on a gradient or its parameter when backward is over.

    The proof and the optimizer use them past the modes that watch the rank.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    look("the update", [each.grad for each in trained if each.grad is not None], trained)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer of proofs that ask for none in particular."""
    return torch.optim.AdamW(parameters, lr=1e-3)
