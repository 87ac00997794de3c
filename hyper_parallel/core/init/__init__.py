"""Initialisation of a model shard by shard: the same global values on every mesh.

    api -> filling -> tiles

`filling` is the mode under which modules fill their tensors, `tiles` a tensor that is being filled, with random numbers
that depend on an element's place and not on the rank.
"""
