"""Activations that blocks keep for backward: computed again, or on the host until backward comes.

api -> offload -> platform, common
"""

from hyper_parallel.core.activations.api import ActivationPolicy, blocks_of, checkpoint_blocks

__all__ = ["ActivationPolicy", "blocks_of", "checkpoint_blocks"]
