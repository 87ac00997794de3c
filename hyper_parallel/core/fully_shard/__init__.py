"""The sharded-parameter engine and its face ``fully_shard``.

``api`` (the call) -> ``schedule`` (when) -> ``bucket`` (gather) and ``reduce`` (gradients) -> ``param`` (one
parameter); ``mesh``, ``comm`` and ``policy`` serve them.
"""

from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.module import HSDPModule
from hyper_parallel.core.fully_shard.policy import MixedPrecisionPolicy

__all__ = ["HSDPModule", "MixedPrecisionPolicy", "fully_shard"]
