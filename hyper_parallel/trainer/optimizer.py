"""The optimizer, its learning rate over time, and the update that ends a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hyper_parallel.core.common.errors import InvalidType
from hyper_parallel.core.fully_shard.clip import clip_grads_with_norm_
from hyper_parallel.core.optim.muon import Muon
from hyper_parallel.core.pipeline.tied import clip_grad_norm
from hyper_parallel.core.redistribute.api import redistribute
from hyper_parallel.trainer.config import OptimizerConfig
from hyper_parallel.trainer.data import state_from, state_text
from hyper_parallel.trainer.parallelize import Parallelized

MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


class ShardedAdamW(torch.optim.AdamW):
    """torch's AdamW, which hands the ranks' shards of DTensors to its kernels.

    Each element is updated by itself, so that nothing needs to know of layouts. torch would look for the layouts of all
    parameters together: in the first step that takes longer than all else, and in each step it compares all of them.
    The option `moments` of a group is the dtype that its moments are stored in.
    """

    def _init_group(self, group: dict[str, Any], params: list[Any], grads: list[Any], *state: list[Any]) -> bool:
        """Fill the lists of what is updated, as torch has it, with shards in place of DTensors."""
        for param in group["params"]:
            if param.grad is not None and not self.state[param]:
                step = torch.zeros((), dtype=torch.float32, device=param.device)
                first, second = (torch.zeros_like(param, dtype=group.get("moments")) for _ in range(2))
                self.state[param] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        has_complex = super()._init_group(group, params, grads, *state)
        for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
                grads[number] = redistribute(grad, param.device_mesh, param.placements)
        for tensors in (params, grads, *state):
            tensors[:] = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
        firsts, seconds, _, steps = state
        if any(param.dtype != first.dtype for param, first in zip(params, firsts, strict=True)):
            for updated in zip(params, grads, firsts, seconds, steps, strict=True):
                _update_in_the_widest(group, *updated)
            for tensors in (params, grads, *state):
                tensors.clear()  # torch's step has nothing left to do
        return has_complex


def _update_in_the_widest(group: dict[str, Any], *stored: torch.Tensor) -> None:
    """Update one parameter whose moments have another dtype: torch's kernel takes tensors of one dtype."""
    (param, _, first, second, step), (beta1, beta2) = stored, group["betas"]
    wide = [[x.to(torch.promote_types(param.dtype, first.dtype))] for x in stored[:4]]
    options = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize", "amsgrad", "fused")}
    adamw(wide[0], wide[1], wide[2], wide[3], [], [step], beta1=beta1, beta2=beta2, **options)
    for kept, (computed,) in zip((param, first, second), (wide[0], *wide[2:]), strict=True):
        if computed is not kept:
            kept.copy_(computed)


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, moments: torch.dtype | None = None
) -> torch.optim.Optimizer:
    """Build a fused AdamW that decays matrices and leaves norms alone, or Muon for all matrices within the blocks.

    Frozen parameters are left out.

    Parameters on different meshes, such as experts beside the rest, are groups of their own: torch updates the tensors
    of a group together, which must then be on one mesh.

    Args:
        named: parameters by name, split over ranks already, so that the optimizer's state is split like them.
        config: rates and decay.
        moments: the dtype that AdamW's moments are stored in; None, and Muon's: that of the parameters.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for name, param in named:
        if not param.requires_grad:
            continue
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        groups.setdefault((param.ndim >= 2, config.muon and is_hidden(name, param.ndim), mesh), []).append(param)
    # A pipeline stage without a layer has no parameters, and torch refuses no groups, but not an empty one.
    groups = groups or {(False, False, None): []}
    settings: list[dict[str, Any]] = [
        {"params": params, "weight_decay": config.weight_decay if decays else 0.0}
        | ({"use_muon": by_muon} if config.muon else {"moments": moments})
        for (decays, by_muon, _), params in groups.items()
    ]
    betas = (config.beta1, config.beta2)
    if config.muon:
        return Muon(settings, lr=config.lr, adjust_lr_fn="match_rms_adamw", betas=betas)
    return ShardedAdamW(settings, lr=config.lr, betas=betas, fused=True)


def is_hidden(name: str, ndim: int) -> bool:
    """Tell whether a parameter is a matrix within the blocks, which Muon can update.

    >>> is_hidden("layers.0.mlp.up.weight", 2), is_hidden("embed.weight", 2), is_hidden("norm.weight", 1)
    (True, False, False)
    """
    return ndim >= 2 and not any(end in name for end in ("embed", "head."))


_DECAY = 0.2  # of the steps after the warmup, after Hägele et al. 2024 (arXiv:2405.18392)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step number `step` (from 0) in a run of `steps`.

    >>> [learning_rate(step, 100, OptimizerConfig(lr=1.0, warmup_steps=10)) for step in (0, 9, 99)]
    [0.1, 1.0, 0.1]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step + 1 - config.warmup_steps) / max(steps - config.warmup_steps, 1)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 + 0.5 * math.cos(math.pi * progress),
        "wsd": min((1.0 - progress) / _DECAY, 1.0),
    }
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape[config.schedule])


class Rates:
    """Learning rates of a run: those of a named schedule, or of a scheduler of torch, whose state is saved.

    A scheduler steps an optimizer of its own, with one group of parameters, and the run's takes its rate: so its state
    is the same whatever the degrees.

    Args:
        config, steps: the named schedule of a run of so many steps; a scheduler starts from its `lr`.
        make: see `lr_scheduler` of `train`; None: the named schedule. A TypeError if it returns no scheduler of torch.
    """

    def __init__(self, config: OptimizerConfig, steps: int, make: MakeScheduler | None = None) -> None:
        self.config, self.steps = config, steps
        self.scheduler: Any = None
        if make is not None:
            self._steps = torch.optim.AdamW([nn.Parameter(torch.zeros(()))], config.lr, (config.beta1, config.beta2))
            self.scheduler = make(self._steps)
            if not isinstance(self.scheduler, LRScheduler):
                seen = f"returned: {type(self.scheduler).__name__}"
                hint = "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 100)"
                raise InvalidType("cannot train", "lr_scheduler returns no scheduler of torch", seen, hint)

    def of(self, step: int) -> float:
        """Return the learning rate of step number `step`, from 0: with a scheduler, of the step that it has come to."""
        if self.scheduler is None:
            return learning_rate(step, self.steps, self.config)
        return float(self._steps.param_groups[0]["lr"])

    def after_step(self, loss: float) -> None:
        """Let a scheduler step; `ReduceLROnPlateau` gets the loss of the run's step."""
        if self.scheduler is not None:
            self._steps.step()  # of no gradient: torch warns of a scheduler that steps before its optimizer
            self.scheduler.step(*([loss] if isinstance(self.scheduler, ReduceLROnPlateau) else []))

    def state(self) -> str | None:
        """Return a scheduler's state as text; None for a named schedule, which needs none."""
        if self.scheduler is None:
            return None
        return state_text({"scheduler": self.scheduler.state_dict(), "lr": self.of(0)})

    def go_on(self, state: str | None, steps: int) -> None:
        """Go on after so many steps: by a scheduler's `state`, or by as many steps of it where that is None."""
        if self.scheduler is None:
            return
        if state is None:
            for _ in range(steps):
                self.after_step(math.inf)
            return
        found = state_from(state)
        self.scheduler.load_state_dict(found["scheduler"])
        self._steps.param_groups[0]["lr"] = found["lr"]  # of which most schedulers compute the next


def update(optimizer: torch.optim.Optimizer, accepted: bool = True) -> None:
    """Update the parameters, unless the step was not `accepted`, and clear their gradients; also for a proof's step."""
    if accepted:
        optimizer.step()
    optimizer.zero_grad()


def clip_gradients(model: Parallelized, max_norm: float) -> float:
    """Scale all gradients down so that their norm over all parameters and ranks is at most `max_norm`.

    A norm that is inf or NaN scales nothing: the gradients still say which of them are to blame.

    Return the norm before, which is the same on every rank; a `max_norm` of 0 leaves the gradients as they are.

    Communication: as `get_total_norm`: one all_reduce of a number for each set of axes that parameters are split over.
    """
    group = None if model.pipeline is None else model.pipeline.group
    total = clip_grad_norm(model.parts, math.inf, group, tied=() if model.tied is None else model.tied)
    norm = float(total)
    if max_norm and math.isfinite(norm) and norm + 1e-6 > max_norm:  # below that the factor is 1
        clip_grads_with_norm_([param for part in model.parts for param in part.parameters()], max_norm, total)
    return norm
