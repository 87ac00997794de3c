"""Context parallelism: one sequence over several ranks, attention over all of it.

    api -> arguments -> index, flex
    api -> attention -> index, kernels, flex
    cost -> attention, index

`index` is pure arithmetic: who holds which positions. `api` is the object that a model gets, `arguments` says what is
wrong with a call, and `cost` what it moves. `attention` has Ulysses and the ring over blocks of queries and keys, which
are computed by `kernels` where there are some; `flex` has the masks of FlexAttention.
"""

from hyper_parallel.core.context_parallel.api import ContextParallel, context_parallel
from hyper_parallel.core.context_parallel.cost import AttentionTraffic, attention_traffic
from hyper_parallel.core.context_parallel.index import SequenceSplit

__all__ = ["ContextParallel", "SequenceSplit", "AttentionTraffic", "attention_traffic", "context_parallel"]
