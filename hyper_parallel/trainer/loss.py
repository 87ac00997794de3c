"""Each rank's share of the loss: sums of its tokens' losses, over the number of tokens of the global batch.

With n tokens in the global batch that count (whose target is not `IGNORED`), on all ranks and in all micro-batches,

    loss = sum over ranks, micro-batches and tokens of cross_entropy / n

So shares are added up, and so are gradients: no rank, and no micro-batch, weighs more because few of its tokens count.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.api import from_local
from hyper_parallel.core.shard.loss import vocab_parallel_cross_entropy
from hyper_parallel.trainer.data import IGNORED


class ShareOfLoss:
    """Turns logits and targets of some of the tokens into their share of the mean over all of them.

    >>> share = ShareOfLoss()
    >>> share.counted = 6
    >>> round(share(torch.zeros(1, 3, 8), torch.tensor([[0, 1, IGNORED]])).item(), 4)  # 2 / 6 * log(8)
    0.6931

    Attributes:
        counted: tokens of the global batch that count; set before every step.
    """

    def __init__(self) -> None:
        self.counted: float = 1.0

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the share of these tokens, a plain tensor without dims.

        Args:
            logits: (batch, seq, vocab); a DTensor where tensor parallelism splits the vocabulary.
            targets: ids (batch, seq), `IGNORED` for tokens that do not count.

        Communication: see `vocab_parallel_cross_entropy`, along tp only.
        """
        if isinstance(logits, DTensor):
            rows = Layout.of(logits).reset_partial()("None", "None")
            targets = from_local(targets, rows)
        total = vocab_parallel_cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        if isinstance(total, DTensor):
            total = total.to_local()
        return total / max(self.counted, 1.0)
