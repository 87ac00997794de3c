"""Initialisation of a model shard by shard: the same global values on every mesh.

    api -> filling -> elementwise -> draws -> parts -> random
           filling -> views -> parts

``filling`` is the mode under which modules fill their tensors, ``parts`` the local shards that look like whole tensors
meanwhile, ``random`` numbers that depend on an element's place and not on the rank.
"""
