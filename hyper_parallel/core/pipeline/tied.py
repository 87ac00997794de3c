"""A weight that the first and the last stage share, and the norm of gradients over all stages.

A tied embedding is two parameters in a pipeline: the table on the first stage, the head on the last. They start with
the same values, and every step adds their gradients up on both, so that the same optimizer keeps them the same. In a
norm over all stages they count once, as on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.checks import list_modules
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.fully_shard.clip import clip_grads_with_norm_, get_total_norm
from hyper_parallel.core.fully_shard.schedule import hsdp_sync_stream
from hyper_parallel.core.mesh.device_mesh import OwnerMesh
from hyper_parallel.core.pipeline.api import Pipeline
from hyper_parallel.core.pipeline.boundary import memory_of
from hyper_parallel.core.redistribute.api import redistribute

__all__ = ["TiedWeights", "clip_grad_norm"]

_ASKED = "cannot tie weights over stages"


class TiedWeights:
    """One weight that the first stage has under one name and the last stage under another.

        tied = TiedWeights(pipeline, first="embed.weight", last="head.weight")
        tied.copy_values()  # once, after the weights are filled or loaded

        loss = pipeline.step(tokens, targets)
        tied.add_gradients()
        clip_grad_norm(pipeline.stages, 1.0, pipeline.group, tied=tied)
        optimizer.step()

    Both have the same layout over the other axes, so that each rank adds up its own shard with that of one other rank.

    Communication: of this call, one all_gather of an object over the pipeline axis.

    Args:
        pipeline: of this rank. All ranks along the axis make the same call.
        first: name of the parameter in the first stage.
        last: name of the parameter in the last stage.

    Raises:
        ValueError: a stage has no parameter of that name; the two differ in shape, dtype, layout or `requires_grad`.
            On all ranks.
    """

    def __init__(self, pipeline: Pipeline, first: str = "embed.weight", last: str = "head.weight") -> None:
        self._group, self._device = pipeline.group, pipeline.device
        self._first = _Owned(pipeline.stages[0], first) if pipeline.has_first else None
        self._last = _Owned(pipeline.stages[-1], last) if pipeline.has_last else None
        first_seen, last_seen = (None if owned is None else owned.describe() for owned in (self._first, self._last))
        gathered = self._gather((first_seen, last_seen))
        self._ranks = tuple(
            next(rank for rank, both in enumerate(gathered) if both[place] is not None) for place in (0, 1)
        )
        one, other = (gathered[rank][place] for place, rank in enumerate(self._ranks))
        if one != other or not one[0]:
            blame = f"{first!r} of the first stage and {last!r} of the last differ"
            blame = blame if one[0] and other[0] else "a stage has no such parameter"
            seen = f"{first!r}: {one[1]}\n  {last!r}: {other[1]}"
            hint = "names of two parameters of one shape, split alike: embedding='vocabulary' with a split head"
            raise InvalidValue(_ASKED, blame, seen, hint)

    def _gather(self, mine: tuple[Any, Any]) -> list[tuple[Any, Any]]:
        """What each rank along the axis has to say of both parameters."""
        gathered: list[Any] = [None] * self._group.size()
        dist.all_gather_object(gathered, mine, group=self._group)
        return gathered

    @property
    def copies(self) -> list[nn.Parameter]:
        """The parameters of this rank that a norm over all stages is to leave out: that of the last stage."""
        return [] if self._last is None or self._is_one else [self._last.parameter]

    @property
    def _is_one(self) -> bool:
        """Whether the first stage is the last, and both names are of one parameter: then autograd sees to all."""
        first, last = self._first, self._last
        return first is not None and last is not None and first.parameter is last.parameter

    @torch.no_grad()
    def copy_values(self) -> None:
        """Give the last stage's parameter the values of the first stage's.

        Communication: its shard, from each rank of the first stage to one of the last.
        """
        if self._first is not None and self._last is not None:
            self._last.values.copy_(self._first.values)
        elif self._first is not None and self._first.is_here:
            dist.send(self._sent(self._first.values), group=self._group, group_dst=self._ranks[1])
        elif self._last is not None and self._last.is_here:
            received = torch.empty_like(self._sent(self._last.values))
            dist.recv(received, group=self._group, group_src=self._ranks[0])
            self._last.values.copy_(received)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """After a step, before clipping: give both parameters the sum of their gradients.

        Communication: its part of the gradient, between each rank of the first stage and one of the last, both ways.
        """
        hsdp_sync_stream()
        owned, peer = (self._first, 1) if self._first is not None else (self._last, 0)
        if self._is_one or owned is None or not owned.is_here or not owned.parameter.requires_grad:
            return
        if self._first is not None and self._last is not None:
            mine, other = self._first.gradient(), self._last.gradient()
            mine.add_(other)
            other.copy_(mine)
            return
        own = owned.gradient()
        sent = self._sent(own)
        received = torch.empty_like(sent)
        to = dist.get_global_rank(self._group, self._ranks[peer])
        exchange = [dist.P2POp(dist.isend, sent, to, self._group), dist.P2POp(dist.irecv, received, to, self._group)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        own.add_(received.to(own.device))  # both compute the same sum: it does not depend on the order of two

    def _sent(self, local: torch.Tensor) -> torch.Tensor:
        """What is sent of a shard: where the pipeline communicates, as it may be kept on the host."""
        return memory_of(local if local.is_meta else local.to(self._device))


class _Owned:
    """One of the two parameters; looked up each time: unsharded it is another object."""

    def __init__(self, stage: nn.Module, name: str) -> None:
        self._stage, self._name = stage, name

    @property
    def parameter(self) -> nn.Parameter:
        return self._stage.get_parameter(self._name)

    @property
    def is_here(self) -> bool:
        """Whether this rank has any of it: of one that has an owner, other ranks have nothing."""
        param = self.parameter
        return not isinstance(param, DTensor) or param.device_mesh.get_coordinate() is not None

    @property
    def values(self) -> torch.Tensor:
        param = self.parameter
        return (param._local_tensor if isinstance(param, DTensor) else param).detach()

    def gradient(self) -> torch.Tensor:
        """This rank's part of the gradient, to be changed in place; zeros where there was none."""
        param = self.parameter
        name = "main_grad" if param.grad is None and getattr(param, "main_grad", None) is not None else "grad"
        held = getattr(param, name)
        if held is None:
            held = param.grad = torch.zeros_like(param)
        if isinstance(held, DTensor) and isinstance(param, DTensor) and held.placements != param.placements:
            held = redistribute(held, Layout.of(param))
            setattr(param, name, held)
        return held._local_tensor if isinstance(held, DTensor) else held

    def describe(self) -> tuple[bool, str]:
        """Whether it is there, and what the other one must be like."""
        try:
            param = self.parameter
        except AttributeError:
            names = [name for name, _ in self._stage.named_parameters() if name.endswith(".weight")]
            return False, f"none; of the stage's: {', '.join(names[:4])}"
        layout = ""
        if isinstance(param, DTensor):
            where = Layout.of(param)
            layout = f" {where.alias_placements} on {where.alias_name}"
            if isinstance(param.device_mesh, OwnerMesh):
                layout += f", of rank {param.device_mesh.owner} alone"
        frozen = "" if param.requires_grad else ", frozen"
        return True, f"{tuple(param.shape)} {str(param.dtype).removeprefix('torch.')}{layout}{frozen}"


def clip_grad_norm(
    stages: Iterable[nn.Module],
    max_norm: float,
    stage_group: dist.ProcessGroup | None,
    *,
    tied: TiedWeights | Sequence[TiedWeights] = (),
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients of all stages down, in place, so that their norm taken together is at most `max_norm`.

    >>> stage = nn.Linear(2, 1, bias=False)
    >>> stage.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> clip_grad_norm([stage], 1.0, None), stage.weight.grad
    (tensor(5.), tensor([[0.6000, 0.8000]]))

    Every rank of every stage calls it. A stage without any parameter has no dtype: its norm is a float32.

    Communication: that of `get_total_norm`; the scaling needs none.

    Args:
        stages: of this rank.
        max_norm: from 0 up, inf for no limit.
        stage_group: the ranks along the pipeline axis; None where there is none.
        tied: weights that two stages share, after their gradients were added up; they count once.
        norm_type: the p of the norm.
        error_if_nonfinite: raise where the norm is inf or NaN.
        foreach: False for one kernel per gradient.

    Returns:
        The norm before, the same on every rank.

    Raises:
        TypeError, ValueError, RuntimeError: as `clip_grad_norm_`.
    """
    shared = (tied,) if isinstance(tied, TiedWeights) else tied
    params = [param for stage in list_modules(stages) for param in stage.parameters()]
    copies = {id(param) for one in shared for param in one.copies}
    counted = [param for param in params if id(param) not in copies]
    total = get_total_norm(counted, norm_type, error_if_nonfinite, foreach, stage_group=stage_group)
    clip_grads_with_norm_(params, max_norm, total, foreach)
    return total
