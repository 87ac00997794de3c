"""Tensors to compare in an object of the user's, and the ranks that each of them is sharded over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from sim.comm.group import Endpoint, without_modes

_ASKED = "cannot compare the copies"


class Spread(NamedTuple):
    """The ranks that a tensor is spread over: in mesh order, the sizes and names of the axes, and which replicate."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    replicated: tuple[bool, ...]
    layout: str


def spread_of(x: DTensor) -> Spread | None:
    """How a DTensor is spread; None if the calling rank is not on its mesh."""
    mesh, placements = x.device_mesh, x.placements
    if mesh.get_coordinate() is None:
        return None
    sizes, names = tuple(mesh.shape), axis_names(mesh)
    rows = zip(names, sizes, placements, strict=True)
    layout = ", ".join(f"{name}={size}: {placement!r}" for name, size, placement in rows)
    return Spread(_ranks_of(mesh), sizes, names, tuple(p.is_replicate() for p in placements), layout)


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes, as `Layout.from_device_mesh` gives them."""
    return tuple(mesh.mesh_dim_names or (f"axis{axis}" for axis in range(mesh.ndim)))


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(without_modes(lambda: mesh.mesh.flatten().tolist()))


def spread_of_group(endpoint: Endpoint, group: dist.ProcessGroup | DeviceMesh) -> Spread:
    """How a plain tensor is spread of which all ranks of a group or a mesh hold copies.

    Raises:
        TypeError: The group is none.
        ValueError: The calling rank is not in it.
    """
    check(_ASKED, "group | mesh", "group=mesh['dp'], or group=dist.group.WORLD", group=group)
    if isinstance(group, DeviceMesh):
        sizes, names, ranks = tuple(group.shape), axis_names(group), _ranks_of(group)
    else:
        ranks = tuple(dist.get_process_group_ranks(group))
        sizes, names = (len(ranks),), (endpoint.axis_of(group.group_name, group.group_desc, ranks),)
    if endpoint.rank not in ranks:
        blame = f"rank {endpoint.rank} is not in the group"
        raise InvalidValue(_ASKED, blame, f"group: ranks {list(ranks)}", "call it on the ranks of the group only")
    layout = ", ".join(f"{name}={size}: equal copies" for name, size in zip(names, sizes, strict=True))
    return Spread(ranks, sizes, names, (True,) * len(sizes), layout)


class Leaf(NamedTuple):
    """A tensor, what to call it, and how it is spread; None: a DTensor says so itself, of others nothing is known."""

    name: str
    tensor: torch.Tensor
    spread: Spread | None = None


def leaves(endpoint: Endpoint, things: Sequence[Any], spread: Spread | None) -> Iterator[Leaf]:
    """Every tensor of the arguments that says how it is spread, or that the group says it for.

    Raises:
        TypeError: Of a tensor, or of all of a module or an optimizer, nobody says how it is spread.
    """
    for place, thing in enumerate(things):
        yield from _walk(endpoint, thing, "", f"argument {place}", spread)


def _walk(endpoint: Endpoint, thing: Any, path: str, fallback: str, spread: Spread | None) -> Iterator[Leaf]:
    if thing is None:
        return
    if isinstance(thing, torch.Tensor):
        if spread is None and not isinstance(thing, DTensor):
            asked, blame = f"{_ASKED} of {path or fallback!r}", "a plain tensor does not say who holds copies"
            seen = f"seen: {str(thing.dtype).removeprefix('torch.')} {list(thing.shape)}"
            raise InvalidType(asked, blame, seen, "check_replicas(x, group=mesh['dp']), or a DTensor")
        yield from _with_grad(path or fallback, thing, spread)
    elif isinstance(thing, torch.nn.Module):
        found = list(_of_module(endpoint, thing, f"{path}." if path else "", spread))
        yield from _known(found, thing, path or fallback)
    elif isinstance(thing, torch.optim.Optimizer):
        yield from _known(list(of_optimizer(thing, spread)), thing, path or fallback)
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from _walk(endpoint, value, f"{path}.{key}" if path else str(key), fallback, spread)
    elif isinstance(thing, (list, tuple)):
        for place, value in enumerate(thing):
            yield from _walk(endpoint, value, f"{path or fallback}[{place}]", fallback, spread)
    else:
        asked, seen = f"{_ASKED} of {path or fallback!r}", f"seen: {type(thing).__name__}"
        hint = "DTensors, modules, optimizers, or lists and dicts of them"
        raise InvalidType(asked, "it holds no tensors", seen, hint)


def _of_module(endpoint: Endpoint, module: torch.nn.Module, prefix: str, spread: Spread | None) -> Iterator[Leaf]:
    """The tensors of a module; a `DistributedDataParallel` in it knows whose copies its own are."""
    parallel: dict[int, Spread] = {}  # by what its process group keeps equal
    left_out: set[int] = set()
    for each in module.modules():
        if isinstance(each, DistributedDataParallel):
            over = spread_of_group(endpoint, each.process_group)
            ignored = {f"module.{name}" for name in each.parameters_to_ignore}
            for name, parameter in each.named_parameters():
                if name in ignored:
                    left_out.add(id(parameter))
                else:
                    parallel[id(parameter)] = over
            left_out |= {id(buffer) for buffer in each.buffers()}  # made equal at the next forward pass
    tensors: list[tuple[str, torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if id(tensor) not in left_out or spread is not None:
            yield from _with_grad(prefix + name, tensor, spread or parallel.get(id(tensor)))


def _known(found: list[Leaf], owner: Any, what: str) -> list[Leaf]:
    """What was found in a module or an optimizer, of which something has to say how it is spread."""
    if found and not any(leaf.spread is not None or isinstance(leaf.tensor, DTensor) for leaf in found):
        count = f"{len(found)} plain tensor{'s' if len(found) > 1 else ''}"
        blame = "nothing in it says who holds copies: without group=, DTensors and DistributedDataParallel do"
        seen = f"seen: {type(owner).__name__} with {count}, {found[0].name!r} first"
        hint = "check_replicas(x, group=dist.group.WORLD), or group=mesh['dp']"
        raise InvalidType(f"{_ASKED} of {what!r}", blame, seen, hint)
    return found


def _with_grad(name: str, tensor: torch.Tensor, spread: Spread | None) -> Iterator[Leaf]:
    yield Leaf(name, tensor, spread)
    if tensor.is_leaf and tensor.grad is not None:
        yield Leaf(f"{name}.grad", tensor.grad, spread)


def of_optimizer(optimizer: torch.optim.Optimizer, spread: Spread | None = None) -> Iterator[Leaf]:
    """The parameters of an optimizer and their gradients; by name, if it was made of named parameters."""
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"param_groups[{number}][{i}]" for i in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            yield from _with_grad(name, parameter, spread)


def named(leaves: Sequence[Leaf]) -> dict[str, Leaf]:
    """The tensors by name, made distinct where two modules use one name; a tensor counts once under a name."""
    found: dict[str, Leaf] = {}
    for leaf in leaves:
        if leaf.name in found and found[leaf.name].tensor is leaf.tensor:
            continue
        unique, count = leaf.name, 1
        while unique in found:
            count += 1
            unique = f"{leaf.name} ({count})"
        found[unique] = leaf
    return found
