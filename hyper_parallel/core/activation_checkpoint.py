"""torch's own activation checkpointing, under the path that users of the existing library know."""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

__all__ = ["CheckpointPolicy", "checkpoint", "checkpoint_wrapper"]
