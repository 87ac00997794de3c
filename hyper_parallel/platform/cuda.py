"""NVIDIA (and, through the same names, AMD) GPUs: nccl."""

from __future__ import annotations

import torch

from hyper_parallel.platform.accelerator import AcceleratorPlatform
from hyper_parallel.platform.base import PlatformUnavailableError

__all__ = ["CudaPlatform"]


class CudaPlatform(AcceleratorPlatform):
    """GPUs through `torch.cuda` and nccl.

    Raises:
        PlatformUnavailableError: this torch is a build without CUDA, or no GPU is usable.
    """

    device_type = "cuda"
    backend = "nccl"

    def __init__(self) -> None:
        if torch.version.cuda is None and torch.version.hip is None:
            raise PlatformUnavailableError(
                f"cannot use platform 'cuda': this torch ({torch.__version__}) is a build without CUDA; "
                "install a CUDA build of torch (https://pytorch.org/get-started/locally) on a machine with a GPU"
            )
        if not torch.cuda.is_available():
            raise PlatformUnavailableError(
                f"cannot use platform 'cuda': torch {torch.__version__} is built for CUDA but sees no usable GPU; "
                "check that nvidia-smi lists one, that the driver is new enough and that CUDA_VISIBLE_DEVICES does "
                "not hide it"
            )
        super().__init__()
