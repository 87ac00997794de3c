"""Context parallelism: one sequence over several ranks, attention over all of it.

    api -> attention -> flex
    api, attention -> index

`index` is pure arithmetic: who holds which positions, and the bytes that attention moves. `api` is the object that a
model gets, and says what is wrong with a call. `attention` has Ulysses and the ring over blocks of queries and keys,
which are computed by the device's kernels where it has some; `flex` has the masks of FlexAttention.
"""

from hyper_parallel.core.context_parallel.api import ContextParallel, context_parallel
from hyper_parallel.core.context_parallel.index import AttentionTraffic, SequenceSplit, attention_traffic

__all__ = ["ContextParallel", "SequenceSplit", "AttentionTraffic", "attention_traffic", "context_parallel"]
