"""The functions that put a step between two calls, under the path that the documentation names."""

from hyper_parallel.core.fully_shard.module import (
    hold_parameters,
    reduce_gradients,
    release_parameters,
    units_with_wider_sums,
)

__all__ = ["hold_parameters", "reduce_gradients", "release_parameters", "units_with_wider_sums"]
