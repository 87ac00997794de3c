"""torch's own distributed checkpoints, under the path and the names that users of the existing library know.

A `FileSystemReader` unpickles the metadata of its folder: read only folders that you have written.
"""

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, async_save, load, save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as get_optim_state_dict
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as set_optim_state_dict

__all__ = [
    "FileSystemReader",
    "FileSystemWriter",
    "async_save",
    "get_optim_state_dict",
    "load",
    "save",
    "set_optim_state_dict",
]
