"""Checkpoints: saved from any mesh, loaded on any other, complete or not there at all.

    checkpointer -> api -> reader, writer -> shards, record -> files
                    checkpointer, api -> folders, errors

`api` has `save_checkpoint` and `load_checkpoint`, `checkpointer` the folder of a run. `shards` are the local
shards of tensors, `writer` and `reader` the plans of torch.distributed.checkpoint and, with `files`, safetensors with
checksums as its storage, `record` the checkpoint.json that says what lies where, `folders` names
that appear and vanish at once, and the lease of the run that writes them.
"""

from hyper_parallel.core.checkpoint.api import load_checkpoint, read_metadata, save_checkpoint
from hyper_parallel.core.checkpoint.checkpointer import Checkpointer, Saved
from hyper_parallel.core.checkpoint.errors import CheckpointError, LeaseLostError
from hyper_parallel.core.checkpoint.optimizer import (
    load_optimizer_scalars,
    model_tensors,
    optimizer_targets,
    optimizer_tensors,
)
from hyper_parallel.core.checkpoint.record import CheckpointMetadata

__all__ = [
    "CheckpointError",
    "CheckpointMetadata",
    "Checkpointer",
    "LeaseLostError",
    "Saved",
    "load_checkpoint",
    "load_optimizer_scalars",
    "model_tensors",
    "optimizer_targets",
    "optimizer_tensors",
    "read_metadata",
    "save_checkpoint",
]
