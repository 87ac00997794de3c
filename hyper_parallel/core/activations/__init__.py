"""Activations that blocks keep for backward: computed again, or on the host until backward comes.

api -> policy, offload -> platform, common
"""

from hyper_parallel.core.activations.api import blocks_of, checkpoint_blocks
from hyper_parallel.core.activations.policy import ActivationPolicy

__all__ = ["ActivationPolicy", "blocks_of", "checkpoint_blocks"]
