"""The policies of ``fully_shard``, under the module path that users of the existing library know."""

from hyper_parallel.core.fully_shard.policy import MixedPrecisionPolicy

__all__ = ["MixedPrecisionPolicy"]
