"""A plain loop over a model of transformers on one device: what a run of the trainer is compared with."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.data import load_corpus, samples
from hyper_parallel.trainer.optimizer import learning_rate


def plainly_trained(model: Any, config: Config) -> list[float]:
    """The losses of a model of transformers that a plain loop trains on one device, on the batches of a run."""
    corpus, train, rates = load_corpus(config.data), config.train, config.optimizer
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [[p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]]
    decays = (rates.weight_decay, 0.0)
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)],
        betas=(rates.beta1, rates.beta2),
    )
    losses = []
    for step in range(train.steps):
        batch = range(step * train.batch_size, (step + 1) * train.batch_size)
        inputs, targets = samples(corpus.train, batch, train.seq_len, train.seed)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train.steps, rates)
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.transpose(1, 2), targets, ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, rates.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
