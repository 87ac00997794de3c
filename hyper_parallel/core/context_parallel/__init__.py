"""Context parallelism: one sequence over several ranks, attention over all of it.

``index`` (who holds which positions, pure arithmetic) -> ``api`` (the object that a model gets) -> ``ulysses`` (from a
split sequence to split heads and back) and ``ring`` (keys and values travel) -> ``blocks`` (some queries against some
keys), by ``kernels`` where there are some. ``arguments`` says what is wrong with a call, ``cost`` what it moves.
"""

from hyper_parallel.core.context_parallel.api import ContextParallel, context_parallel
from hyper_parallel.core.context_parallel.cost import AttentionTraffic, attention_traffic
from hyper_parallel.core.context_parallel.index import SequenceSplit

__all__ = ["ContextParallel", "SequenceSplit", "AttentionTraffic", "attention_traffic", "context_parallel"]
