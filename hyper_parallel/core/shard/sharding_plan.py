"""Kept path of `ShardingPlan`, which lives in `plan`."""

from hyper_parallel.core.shard.plan import ShardingPlan

__all__ = ["ShardingPlan"]
