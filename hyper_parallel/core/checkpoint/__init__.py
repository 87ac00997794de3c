"""Checkpoints: saved from any mesh, loaded on any other, complete or not there at all.

parts.py       what a rank has of each tensor
planning.py    who writes and who reads what: torch.distributed.checkpoint's planners
writer.py, reader.py, files.py    safetensors files with checksums: its storage
record.py, exact.py    checkpoint.json: what is in it and where, and all that is no tensor
folders.py     names that appear and vanish as a whole
api.py         save_checkpoint, load_checkpoint, read_metadata
checkpointer.py, staging.py    the checkpoints of a run, also written in the background
optimizer.py   the state of an optimizer by parameter name
errors.py      how all ranks learn that one has failed
"""

from hyper_parallel.core.checkpoint.api import load_checkpoint, read_metadata, save_checkpoint
from hyper_parallel.core.checkpoint.checkpointer import Checkpointer, Saved
from hyper_parallel.core.checkpoint.errors import CheckpointError
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
    "Saved",
    "load_checkpoint",
    "load_optimizer_scalars",
    "model_tensors",
    "optimizer_targets",
    "optimizer_tensors",
    "read_metadata",
    "save_checkpoint",
]
