"""Modes of a parameter and states of its data, under the path that users of the existing library know."""

from hyper_parallel.core.fully_shard.hsdp_utils import FullyShardParamMode, ShardedState

__all__ = ["FullyShardParamMode", "ShardedState"]
