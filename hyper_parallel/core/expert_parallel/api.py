"""`expert_parallel`: the call that gives each rank some of the experts of a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.core.common.checks import check, check_least
from hyper_parallel.core.common.errors import InvalidValue, class_name, nearest
from hyper_parallel.core.common.groups import group_of
from hyper_parallel.core.common.torch_compat import note_replaced, refuse_lost
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.expert_parallel.experts import GroupedExperts, NodeGroups, SharedGroup
from hyper_parallel.core.expert_parallel.router import routers_of
from hyper_parallel.core.mesh.device_mesh import axes_of, check_ascending, flatten_axes
from hyper_parallel.core.redistribute.api import from_local
from hyper_parallel.core.shard.region import OWN_PARTS, is_unit

__all__ = ["exchange_of", "expert_parallel", "nodes_of", "read_axes", "split_over_nodes"]

_ASKED = "cannot split the experts"
_DEFAULTS = ("ep", "tp", "cp")  # axes that a mesh may lack


def expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    ep: str | Sequence[str] = "ep",
    tp: str = "tp",
    cp: str = "cp",
    etp: int | None = None,
    ranks_per_node: int | None = None,
) -> nn.Module:
    """Split the experts of a model over ranks, in place; tokens then go to the ranks that have their experts.

        mesh = init_device_mesh("npu", (2, 4, 2), mesh_dim_names=("dp_shard", "ep", "tp"))
        expert_parallel(model, mesh)
        shard_module(model, mesh["tp"], moe_plan(model, mesh["tp"]))  # the rest of the model, for tp
        for block in model.layers:
            fully_shard(block.mlp.experts, mesh=mesh["dp_shard"])  # experts are split over ep already
            fully_shard(block, mesh=mesh["dp_shard", "ep"]._flatten("fsdp"))  # all other ranks with different tokens

    Weights of every `GroupedExperts` become DTensors on the axes ep and tp, of which each rank keeps its experts. Ranks
    along ep have different tokens. Inside of an expert tp either splits the inner width (`etp` its degree): ranks along
    it are given the same tokens, and return partial sums. Or it splits nothing (`etp=1`): they are given different
    tokens, parts of the same sequences, for unsplit experts. What brings tokens there is the plan, see `moe_plan`.

    Experts may be split over the ranks of cp, and with `etp=1` over those of tp, as well: `ep=("ep", "cp", "tp")`, or
    without an axis of their own `ep=("cp", "tp")`. Ranks along these have different tokens, too, and exchange them.

    Communication: none now; see `GroupedExperts.forward`. Where no expert is split and tp there, its gradients are
    added up over tp, by one all_reduce per weight and backward.

    Args:
        model: a module with `GroupedExperts` and `Router` in it, whose weights are unsharded and equal on all ranks, or
            on the meta device. Before `fully_shard`.
        mesh: the mesh, with all its axes. An axis that it does not have counts as one rank.
        ep: the axis that splits the experts, or several, in mesh order.
        tp: the axis of tensor parallelism.
        cp: the axis that splits sequences, for the auxiliary loss.
        etp: the degree of tp, or 1. Default: the degree of tp; 1 where tp is one of `ep`.
        ranks_per_node: rank r sits on node r // ranks_per_node; with it, a token goes once to each node that has some
            of its experts, and from there to these. None: once to each expert. See `GroupedExperts.forward`.

    Returns:
        The model.

    Raises:
        TypeError: no mesh, ranks_per_node is no int.
        ValueError: no experts in the model; experts or an inner width that the ranks cannot share evenly; an `etp` that
            is neither; no such axis; axes out of mesh order, or whose ranks do not ascend; weights that are split
            already, that have a gradient or hooks, which would be lost, or that a module without experts has, too;
            experts of which some nodes would have more than others.
    """
    check(_ASKED, "int | None", ranks_per_node=ranks_per_node)
    check_least(_ASKED, 1, ranks_per_node=ranks_per_node)
    over = read_axes(_ASKED, mesh, ep)
    sizes = {"ep": math.prod(_size(mesh, "ep", name) for name in over)}
    sizes |= {"tp": _size(mesh, "tp", tp), "cp": _size(mesh, "cp", cp)}
    degree = (1 if tp in over else sizes["tp"]) if etp is None else etp
    found = _checked(model, sizes, degree, tp_has_experts=tp in over)
    splitting = [name for name in over if _size(mesh, "ep", name) > 1]
    held = tuple(name for name in axes_of(mesh).names if name in splitting or (name == tp and sizes["tp"] > 1))
    if held:
        layouts = _layouts(mesh[held], splitting, tp if degree > 1 else None)
        exchange, nodes = exchange_of(mesh, over), nodes_of(mesh, over, ranks_per_node)
        for holders in _holders(model):
            owner, name = holders[0]
            if isinstance(owner, GroupedExperts) and name in layouts:
                _split(holders, layouts[name])
        for fqn, experts in found:
            experts.__dict__[OWN_PARTS] = True
            experts.exchange, experts.nodes, experts.fqn = exchange, nodes, fqn
    between = (SharedGroup(mesh.get_group(tp)),) if sizes["tp"] > degree else ()
    along = (SharedGroup(mesh.get_group(cp)),) if sizes["cp"] > 1 else ()
    for _, router in routers_of(model):
        router.sequence_ranks, router.token_ranks, router.copies = (*along, *between), between, degree
    return model


def read_axes(asked: str, mesh: DeviceMesh, ep: str | Sequence[str]) -> tuple[str, ...]:
    """Return the axes that split the experts.

    Args:
        asked: the start of an error message, "cannot ...".
        mesh: the mesh, with all its axes.
        ep: as for `expert_parallel`.

    Raises:
        TypeError: no mesh.
        ValueError: names out of mesh order, or one of them twice.
    """
    if isinstance(ep, str):
        return (ep,)
    over = tuple(name for name in axes_of(mesh).names if name in ep)
    if tuple(name for name in ep if name in over) != over or len(set(ep)) < len(ep):
        blame, seen = "ep must hold each axis once, in mesh order", f"ep: {tuple(ep)}   mesh: {axes_of(mesh)}"
        raise InvalidValue(asked, blame, seen, f"ep={over}")
    return tuple(ep)


def _size(mesh: DeviceMesh, word: str, name: str) -> int:
    """Return the number of ranks along an axis that has a role."""
    axes = axes_of(mesh)
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    if name not in sizes and name not in _DEFAULTS:
        hint = f"{word}={nearest(name, axes.names)}"
        raise InvalidValue(_ASKED, f"{word}={name!r} is no axis of the mesh", f"mesh: {axes}", hint)
    return sizes.get(name, 1)


def exchange_of(mesh: DeviceMesh, over: Sequence[str]) -> SharedGroup | None:
    """Return the ranks that tokens go between; None: they stay where they are.

    Communication: a process group, if several axes split experts. So all ranks of the mesh call it, in the same order
    among their other groups, those too whose stage of a pipeline has no experts.

    Args:
        mesh: the mesh, with all its axes.
        over: the axes that split experts, in mesh order.

    Raises:
        ValueError: ranks along them that do not ascend.
    """
    names = [name for name in over if _size(mesh, "ep", name) > 1]
    if not names:
        return None
    with _disable_current_modes():  # the ranks are real numbers under a fake tensor mode too
        shared = mesh[names[0]] if len(names) == 1 else flatten_axes(mesh, names, "_".join(names))
    check_ascending(_ASKED, shared)  # or experts would change places
    return SharedGroup(shared.get_group())


def nodes_of(mesh: DeviceMesh, over: Sequence[str], ranks_per_node: int | None) -> NodeGroups | None:
    """Return the groups through which tokens go to each node once; None: they all stay on one, or nobody says nodes.

    Communication: two process groups, unless there are such. So ranks call it as they call `exchange_of`.

    Args:
        mesh: the mesh, with all its axes.
        over: the axes that split experts, in mesh order.
        ranks_per_node: as for `expert_parallel`.

    Raises:
        ValueError: nodes with more of the ranks than others.
    """
    names = [name for name in over if _size(mesh, "ep", name) > 1]
    if ranks_per_node is None or not names:
        return None
    axes = axes_of(mesh)
    along = [axes.index(name) for name in names]
    with _disable_current_modes():  # the ranks are real numbers under a fake tensor mode too
        behind = mesh.mesh.movedim(along, [*range(-len(along), 0)]).flatten(-len(along))
        groups: list[list[int]] = behind.reshape(-1, behind.shape[-1]).tolist()
    count, each = split_over_nodes(_ASKED, groups, ranks_per_node)
    if count == 1:
        return None
    own = next(ranks for ranks in groups if dist.get_rank() in ranks)
    place = own.index(dist.get_rank())
    between = own[place % each :: each]
    within = own[place // each * each :][:each]
    exchange = _group(mesh, names, between, "nodes")
    return NodeGroups(exchange, _group(mesh, names, within, "node") if each > 1 else None)


def split_over_nodes(asked: str, groups: Sequence[Sequence[int]], ranks_per_node: int) -> tuple[int, int]:
    """Return on how many nodes the ranks of each of some groups lie, and how many of them on each node.

    >>> split_over_nodes("cannot split", [[0, 2, 4, 6], [1, 3, 5, 7]], ranks_per_node=4)
    (2, 2)

    Args:
        asked: the start of an error message, "cannot ...".
        groups: their ranks, in ascending order.
        ranks_per_node: rank r sits on node r // ranks_per_node.

    Raises:
        ValueError: numbers that are not the same for all nodes and groups.
    """
    counts = [[*Counter(rank // ranks_per_node for rank in ranks).values()] for ranks in groups]
    found = {(len(each), count) for each in counts for count in each}
    if len(found) > 1:
        at = next(at for at, each in enumerate(counts) if each != counts[0] or len(set(each)) > 1)
        blame = "the ranks that share experts must lie equally many on each of equally many nodes"
        seen = f"ranks: {[*groups[at]]}, of which each node has {counts[at]}   ranks_per_node: {ranks_per_node}"
        raise InvalidValue(asked, blame, seen, "ranks_per_node=None, or another size of ep")
    return found.pop()


def _group(mesh: DeviceMesh, names: Sequence[str], ranks: list[int], word: str) -> SharedGroup:
    """Return the group of these ranks, which lie along some axes: that of one of them, if it has these ranks."""
    whole = exchange_of(mesh, names)
    assert whole is not None, "the axes have several ranks"
    if dist.get_process_group_ranks(whole.group) == ranks:
        return whole
    named = next((name for name in names if dist.get_process_group_ranks(mesh.get_group(name)) == ranks), None)
    return SharedGroup(group_of(tuple(ranks), (named or f"{'_'.join(names)}_{word}",), mesh))


def _checked(
    model: nn.Module, sizes: Mapping[str, int], etp: int, *, tp_has_experts: bool
) -> list[tuple[str, GroupedExperts]]:
    """Return the experts, by name."""
    seen = ", ".join(f"{word}={size}" for word, size in sizes.items()) + f", etp={etp}"
    if tp_has_experts and etp != 1:
        blame = "ranks along tp cannot both split experts and have experts of their own"
        raise InvalidValue(_ASKED, blame, seen, "etp=1, or an ep without the axis of tp")
    if etp not in (1, sizes["tp"]):
        blame = "inside of an expert tp splits either the inner width, on all its ranks, or nothing"
        raise InvalidValue(_ASKED, blame, seen, f"etp={sizes['tp']}, or etp=1")
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, GroupedExperts)]
    if not found:
        blame = f"there are none in this {class_name(model)}"
        raise InvalidValue(_ASKED, blame, seen, "a model with GroupedExperts, such as hyper_parallel.models.MoELlama")
    for name, experts in found:
        for word, size, degree in (
            ("num_experts", experts.num_experts, sizes["ep"]),
            ("inner_size", experts.inner_size, etp),
        ):
            if size % degree:
                axis = "ep" if word == "num_experts" else "etp"
                fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
                blame = f"the {degree} ranks of {axis} cannot share {word}={size} of {name!r} evenly"
                raise InvalidValue(_ASKED, blame, seen, f"{axis} one of {fits}")
        if is_unit(experts) or any(isinstance(weight, DTensor) for weight in experts.parameters()):
            blame = f"the weights of {name!r} are split already"
            raise InvalidValue(_ASKED, blame, seen, "expert_parallel once, before shard_module and fully_shard")
    _check_replaceable(model, found)
    return found


def _check_replaceable(model: nn.Module, found: list[tuple[str, GroupedExperts]]) -> None:
    """Refuse weights of which something would be lost: gradients, hooks, or that another module has them as well."""
    names = {module: name for name, module in model.named_modules()}
    holders = {id(places[0][0]._parameters[places[0][1]]): places for places in _holders(model)}
    for path, experts in found:
        for last in ("w1", "w2", "w3"):
            weight, name = experts.get_parameter(last), f"{path}.{last}".lstrip(".")
            refuse_lost(f"{_ASKED}: weight {name!r}", weight, "expert_parallel")
            for module, other in holders[id(weight)]:
                if not isinstance(module, GroupedExperts) or (other == "w2") != (last == "w2"):
                    blame = f"{name!r} is also {other!r} of {names[module] or 'the model'!r}, which needs it otherwise"
                    seen = f"shape: {tuple(weight.shape)}   the other module: {class_name(module)}"
                    raise InvalidValue(_ASKED, blame, seen, "a parameter of its own for each")


def _holders(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return for each parameter the modules that have it, with its names there."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            holders.setdefault(id(param), []).append((module, name))
    return list(holders.values())


def _layouts(mesh: DeviceMesh, over: Sequence[str], tp: str | None) -> dict[str, Layout]:
    base = Layout.from_device_mesh(mesh)
    first = tuple(over) or "None"
    inner = tp or "None"
    return {"w1": base(first, inner, "None"), "w2": base(first, "None", inner), "w3": base(first, inner, "None")}


def _split(holders: list[tuple[nn.Module, str]], layout: Layout) -> None:
    """Replace a parameter wherever it is: experts may share it."""
    owner, name = holders[0]
    full = owner.get_parameter(name)
    with torch.no_grad():
        part = full[layout.local_slice(tuple(full.shape))].clone(memory_format=torch.contiguous_format)
        new = nn.Parameter(from_local(part, layout, shape=full.shape), requires_grad=full.requires_grad)
    new.__dict__.update(full.__dict__)
    for module, last in holders:
        module._parameters[last] = new
    note_replaced(full, name, "expert_parallel")
