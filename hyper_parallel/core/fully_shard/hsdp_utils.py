"""Modes of a parameter and states of its data, under the path that users of the existing library know."""

from hyper_parallel.core.fully_shard.unit import ShardedState
from hyper_parallel.core.fully_shard.utils import FullyShardParamMode

__all__ = ["FullyShardParamMode", "ShardedState"]
