"""Load balance of experts in a training loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.expert_parallel.router import Router

__all__ = ["routers_of", "set_aux_scale", "take_aux", "update_expert_bias"]


def routers_of(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """Yield the routers of a model with their names, in its order."""
    check("cannot look for routers", "module", model=model)
    for name, module in model.named_modules():
        if isinstance(module, Router):
            yield name, module


def set_aux_scale(model: nn.Module, scale: float | None) -> None:
    """Say what the auxiliary losses of sequences are multiplied by, beside their weight.

        set_aux_scale(model, 1 / sequences_in_the_global_batch)

    With gradients that are added up over ranks and micro-batches, this makes the total loss the mean cross-entropy plus
    the weight times the mean over all sequences of the layers' auxiliary losses.

    Args:
        model: with routers.
        scale: None: 1 / the sequences that a router sees at a time.

    Raises:
        TypeError: an argument of another kind, as for the functions below.
    """
    check("cannot scale auxiliary losses", "float | None", scale=scale)
    for _, router in routers_of(model):
        router.aux_scale = scale


def take_aux(model: nn.Module) -> dict[str, Tensor]:
    """Return, and forget, the auxiliary losses since the last call, by name of the router.

    Each is the sum over the sequences that were trained on, of this rank's terms: over all ranks with different tokens
    (or shares of the work on the same) they add up to the sum over all sequences.

    Args:
        model: with routers.
    """
    taken = {}
    for name, router in routers_of(model):
        taken[name] = router.aux_sum.clone()
        router.aux_sum.zero_()
    return taken


@torch.no_grad()
def update_expert_bias(
    model: nn.Module, groups: Iterable[dist.ProcessGroup | DeviceMesh] = (), *, forget: bool = False
) -> None:
    """Lift the bias of experts that had fewer tokens than the mean, lower that of others, and count anew.

        optimizer.step()
        update_expert_bias(model, [mesh["dp_shard"], mesh["ep"], mesh["cp"]])

    bias += rate * sign(mean - count), as arXiv:2408.15664, algorithm 1. The counts are those of all backward passes
    since the last update, on all ranks with different tokens.

    Args:
        model: with routers. Of a pipeline stage, its own.
        groups: groups, or meshes of one axis, over which ranks have different rows or parts of sequences: all axes but
            tp and pp; one for several axes, or one for each, but none twice. What splits sequences only between a
            router and its experts, as tp does where each expert is whole, `expert_parallel` has noted.
        forget: only count anew, after a step that was not taken.

    Communication: per group one all_reduce of (layers, experts) counts; to forget, none.
    """
    check("cannot update the bias of experts", "bool", forget=forget)
    check("cannot update the bias of experts", "list", groups=groups)
    for number, group in enumerate(groups):
        if not isinstance(group, DeviceMesh):
            check("cannot update the bias of experts", "group", **{f"groups[{number}]": group})
    found = [router for _, router in routers_of(model)]
    if not found:
        return
    if forget:
        for router in found:
            router.counts.zero_()
        return
    for experts in sorted({router.num_experts for router in found}):
        _update([router for router in found if router.num_experts == experts], list(groups))


def _update(routers: list[Router], groups: list[dist.ProcessGroup | DeviceMesh]) -> None:
    counts = torch.stack([router.counts for router in routers])
    over = [group.get_group() if isinstance(group, DeviceMesh) else group for group in groups]
    over += [ranks.group for ranks in routers[0].token_ranks]
    for group in over:
        dist.all_reduce(counts, group=group)
    less = torch.sign(counts.sum(1, keepdim=True) - counts * counts.shape[1])  # of mean - count, in whole numbers
    for router, direction in zip(routers, less, strict=True):
        router.bias.add_(direction * router.bias_update_rate)
        router.counts.zero_()
