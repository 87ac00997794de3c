"""Optimizers that need whole matrices of sharded parameters.

    muon -> matrices

`muon` is the optimizer, `matrices` says which rank computes which matrix, and moves their shards there and back.
"""

from hyper_parallel.core.optim.muon import Muon

__all__ = ["Muon"]
