"""AdamW and its learning rate over time."""

from __future__ import annotations

import math

import torch
from torch import nn

from hyper_parallel.core.fully_shard.clip import clip_grad_norm_
from hyper_parallel.trainer.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build a fused AdamW that decays matrices and leaves norms alone.

    Args:
        model: wrapped already, so that the optimizer's state is split like the weights.
        config: rates and decay.
    """
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


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
    shape = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape[config.schedule])


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients down so that their norm over all parameters and ranks is at most `max_norm`.

    Communication: as `clip_grad_norm_`, here one all_reduce of one number over the shard axis.

    Args:
        model: with its gradients.
        max_norm: 0 leaves the gradients as they are.

    Returns:
        The norm before, which is the same on every rank.
    """
    return float(clip_grad_norm_(model, max_norm or math.inf))
