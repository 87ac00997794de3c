"""Argument checks of a pipeline, the same on all ranks before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.core.common.checks import check, list_modules
from hyper_parallel.core.common.errors import InvalidType, InvalidValue, class_name
from hyper_parallel.core.fully_shard.unit import nested_units
from hyper_parallel.core.mesh.device_mesh import check_ascending

__all__ = [
    "LossFn",
    "as_tensors",
    "check_indices",
    "check_mesh",
    "check_split_backward",
    "check_units",
    "checked_stages",
]

_ASKED = "cannot make a pipeline"

LossFn = Callable[[Any, Any], torch.Tensor]
"""From what the last stage returned, and the targets of a micro-batch, to its share of the loss."""


def as_tensors(given: Any, what: str) -> tuple[torch.Tensor, ...]:
    """Return a tensor or several as a tuple."""
    values = tuple(given) if isinstance(given, (tuple, list)) and given else (given,)
    for value in values:
        check("cannot run the pipeline", "tensor", **{what: value})
    return values


def checked_stages(stages: Any) -> list[nn.Module]:
    """Return the stages as a list of modules."""
    found = list(stages) if isinstance(stages, nn.ModuleList) else list_modules(stages)
    if not found:
        raise InvalidType(_ASKED, "there are no stages", f"stages: {stages!r}", "Pipeline([stage], ...)")
    return found


def check_mesh(mesh: Any) -> None:
    """Refuse what is no mesh of one axis."""
    if mesh.ndim != 1:
        blame = f"mesh has {mesh.ndim} axes, and stages are along one"
        raise InvalidValue(_ASKED, blame, f"mesh: {mesh}", 'mesh["pp"]')
    check_ascending(_ASKED, mesh)  # or stages would change places


def check_indices(
    mine: tuple[int, ...], given: Sequence[int] | None, count: int, asked: int | None, schedule: str
) -> None:
    """Refuse numbers of stages that are not those of the schedule."""
    check(_ASKED, "list | None", stage_indices=given)  # on every rank, also where the numbers would do
    if given is not None and tuple(given) != mine:
        blame = f"{schedule} gives this rank other stages"
        seen = f"stage_indices: {list(given)}   the schedule's: {list(mine)}"
        raise InvalidValue(_ASKED, blame, seen, "stages_of_rank(schedule, rank, ranks), which says them")
    if asked is not None and asked != count:
        blame = f"every rank has as many stages as this one, which are {count} in all"
        seen = f"num_stages: {asked}   stages of this rank: {len(mine)}"
        raise InvalidValue(_ASKED, blame, seen, f"num_stages={count}")


def check_units(stages: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Refuse parameters that are split, or reduced, over ranks with other stages."""
    peers = dist.get_process_group_ranks(group)
    others = [rank for rank in peers if rank != dist.get_rank()]
    for stage in stages:
        for unit in nested_units(stage):
            over = {rank for reach in unit.groups() for rank in dist.get_process_group_ranks(reach)}
            wrong = [rank for rank in others if rank in over]
            if wrong:
                kind = class_name(unit.modules[0])
                blame = f"parameters of {kind} are shared with rank {wrong[0]}, which has other stages"
                hint = 'fully_shard(module, mesh=mesh["dp"]), a mesh without the pipeline axis; hsdp takes all ranks'
                raise InvalidValue(_ASKED, blame, f"pipeline ranks: {peers}   shared: {sorted(over)}", hint)


def check_split_backward(name: str, stages: Sequence[nn.Module], *, keep_gathered: bool) -> None:
    """Refuse what cannot have its backward in two parts."""
    if not keep_gathered:
        blame = f"{name!r} computes gradients of weights later, when parameters would be freed"
        raise InvalidValue(_ASKED, blame, "keep_gathered: False", "keep_gathered=True, or schedule='1f1b'")
    from torch._dynamo import OptimizedModule

    for stage in stages:
        for path, module in stage.named_modules():
            forward = module.forward  # what dynamo has to leave alone has the first mark, too
            by_hand = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
            if by_hand or isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
                blame = f"{name!r} computes gradients of inputs and weights apart, and {path!r} is compiled as one"
                raise InvalidValue(_ASKED, blame, f"seen: {class_name(module)}", "schedule='interleaved'")
