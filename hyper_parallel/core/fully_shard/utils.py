"""The policies of `fully_shard`, under the module path that users of the existing library know."""

from __future__ import annotations

from hyper_parallel.core.fully_shard.policy import (
    CPUOffloadPolicy,
    FullyShardParamMode,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimizerLevel,
)

__all__ = [
    "CPUOffloadPolicy",
    "FullyShardParamMode",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimizerLevel",
]
