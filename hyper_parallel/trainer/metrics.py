"""Hardware utilisation: FLOPs of the model, peak FLOPs of the device, and the least that is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.machine.description import peak_flops
from hyper_parallel.models.llama import Llama, LlamaConfig


def model_flops_utilisation(
    tokens_per_s: float, flops_per_token: float | None, device_name: str, world_size: int
) -> float | None:
    """Return MFU: the model's FLOPs that a run computes, by the peak of all its devices; None if one is unknown.

    >>> model_flops_utilisation(1e6, 989.4e6, "NVIDIA H100 80GB HBM3", world_size=2)
    0.5

    Activation recompute does not count as work (Chowdhery et al. 2022, PaLM, appendix B). The peak is that of bf16,
    whatever the run computes in.
    `tokens_per_s` are of the global batch, and `device_name` is as `Platform.name()` returns it.
    """
    peak = peak_flops(device_name)
    return None if peak is None or flops_per_token is None else tokens_per_s * flops_per_token / (peak * world_size)


def least_kept(checkpointing: str, hidden: float, attention: float, inner: float) -> float:
    """Return what a block keeps of a token for its backward at least, whichever kernels compute it.

    >>> least_kept("full", 128, 384, 384), least_kept("none", 128, 384, 384)
    (128, 1280)

    A block keeps its input. One that is not checkpointed also keeps what attention reads and returns, and the two
    factors of the gated product; a selectively checkpointed one what attention reads and returns, or a part of it.

    Args:
        checkpointing: of the block, as in `ParallelConfig`.
        hidden, inner: width of the residual stream and of the feed-forward, in any unit; the result is in the same.
        attention: joint width of queries, keys, values and the result.
    """
    at_least = {"none": hidden + attention + 2 * inner, "selective": hidden + attention, "full": hidden}
    return at_least.get(checkpointing, hidden + attention / 4)


def count_flops(model_fn: Callable[[], Any], tokens: Tensor) -> int:
    """Return the FLOPs of one forward and backward of a model, counted by torch's FlopCounterMode; nothing is computed.

    >>> from torch import nn
    >>> count_flops(lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)), torch.zeros(1, 4).long())
    1920

    That is 3 x (2 x 4 x 8 x 10): forward, and in backward the gradients of the input and of the weight. Matrix products
    and attention count, which is as good as all; what recomputes activations is no part of the bare model.

    `model_fn` is called under `torch.device("meta")`; of `tokens`, its argument, only shape and dtype count.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = model_fn()
    counter = FlopCounterMode(display=False)
    with counter, torch.enable_grad():
        model(tokens.to("meta")).sum().backward()
    return int(counter.get_total_flops())


@lru_cache(maxsize=64)
def flops_per_token(config: LlamaConfig, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token, without activation recompute.

    >>> config = LlamaConfig()
    >>> matrices = config.num_parameters() - config.vocab_size * config.hidden_size - 9 * config.hidden_size
    >>> attention = 12 * config.num_hidden_layers * config.hidden_size * 128
    >>> flops_per_token(config, 128) == 6 * matrices + attention
    True

    The example is the formula of Chowdhery et al. 2022 (appendix B), which the count agrees with: 6 per weight of a
    matrix, and 12 x layers x width x length for attention, counted in full although half of it is masked. Of a mixture
    of experts, those that a token is sent to count, the shared ones, and the router.

    A pure function, whose results are kept: one or two blocks are counted on meta, and the rest follows, since blocks
    are equal.
    """
    shape = {field.name: getattr(config, field.name) for field in dataclasses.fields(LlamaConfig)}
    tokens = torch.empty(1, seq_len, dtype=torch.long, device="meta")

    def dense(layers: int, **changes: int) -> int:
        """Return the FLOPs of a sequence of full length."""
        sizes: dict[str, Any] = {**shape, "num_hidden_layers": layers, "max_seq_len": seq_len, **changes}
        return count_flops(lambda: Llama(LlamaConfig(**sizes)), tokens)

    one, two = dense(1), dense(2)
    total = one + (two - one) * (config.num_hidden_layers - 1)
    mixtures = config.num_hidden_layers - getattr(config, "num_dense_layers", config.num_hidden_layers)
    if mixtures:
        mixture: Any = config
        sparse = dense(1, intermediate_size=mixture.active_intermediate_size)
        router = 6 * config.hidden_size * mixture.num_experts * seq_len
        total += mixtures * (sparse - one + router)
    return total / seq_len
