"""The optimizer, its learning rate over time, and the update that ends a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.core.fully_shard.clip import clip_grads_with_norm_
from hyper_parallel.core.optim.muon import Muon
from hyper_parallel.core.pipeline.tied import clip_grad_norm
from hyper_parallel.trainer.config import OptimizerConfig
from hyper_parallel.trainer.parallelize import Parallelized


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build a fused AdamW that decays matrices and leaves norms alone, or Muon for all matrices within the blocks.

    Parameters on different meshes, such as experts beside the rest, are groups of their own: torch updates the tensors
    of a group together, which must then be on one mesh.

    Args:
        named: parameters by name, split over ranks already, so that the optimizer's state is split like them.
        config: rates and decay.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for name, param in named:
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        is_hidden = param.ndim >= 2 and not any(end in name for end in ("embed", "head."))
        groups.setdefault((param.ndim >= 2, config.muon and is_hidden, mesh), []).append(param)
    settings: list[dict[str, Any]] = [
        {"params": params, "weight_decay": config.weight_decay if decays else 0.0, "use_muon": by_muon}
        for (decays, by_muon, _), params in groups.items()
    ]
    # A pipeline stage without a layer has no parameters, and torch refuses no groups, but not an empty one.
    settings = settings or [{"params": [], "weight_decay": 0.0, "use_muon": False}]
    betas = (config.beta1, config.beta2)
    if config.muon:
        return Muon(settings, lr=config.lr, adjust_lr_fn="match_rms_adamw", betas=betas)
    for group in settings:
        del group["use_muon"]
    return torch.optim.AdamW(settings, lr=config.lr, betas=betas, fused=True)


_DECAY = 0.2  # of the steps after the warmup, after Hägele et al. 2024 (arXiv:2405.18392)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step number `step` (from 0) in a run of `steps`.

    >>> [learning_rate(step, 100, OptimizerConfig(lr=1.0, warmup_steps=10)) for step in (0, 9, 99)]
    [0.1, 1.0, 0.1]

    Args:
        step: number of the step, from 0.
        steps: steps in the run.
        config: highest rate, warmup and decay.
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


def update(optimizer: torch.optim.Optimizer, accepted: bool = True) -> None:
    """Update the parameters and clear their gradients: the end of a step of the trainer, and of a proof's.

    Args:
        optimizer: of the calling rank.
        accepted: False clears the gradients of a skipped step.
    """
    if accepted:
        optimizer.step()
    optimizer.zero_grad()


def clip_gradients(model: Parallelized, max_norm: float) -> float:
    """Scale all gradients down so that their norm over all parameters and ranks is at most `max_norm`.

    A norm that is inf or NaN scales nothing: the gradients still say which of them are to blame.

    Communication: as `get_total_norm`: one all_reduce of a number for each set of axes that parameters are split over.

    Args:
        model: with its gradients.
        max_norm: 0 leaves the gradients as they are.

    Returns:
        The norm before, which is the same on every rank.
    """
    group = None if model.pipeline is None else model.pipeline.group
    total = clip_grad_norm(model.parts, math.inf, group, tied=() if model.tied is None else model.tied)
    norm = float(total)
    if max_norm and math.isfinite(norm) and norm + 1e-6 > max_norm:  # below that the factor is 1
        clip_grads_with_norm_([param for part in model.parts for param in part.parameters()], max_norm, total)
    return norm
