"""Initialisation of a model shard by shard: the same global values on every mesh.

    api -> filling -> target -> tiles

``filling`` is the mode under which modules fill their tensors, ``target`` a tensor that is being filled, ``tiles`` the
random numbers, which depend on an element's place and not on the rank.
"""
