"""Ascend NPUs: hccl, through torch_npu, which is imported here, only when asked for, and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

from hyper_parallel.platform.accelerator import AcceleratorPlatform
from hyper_parallel.platform.base import PlatformUnavailableError

__all__ = ["NpuPlatform", "torch_npu_is_installed"]

_INSTALL = "pip install 'hyper_parallel[npu]' on a machine with the Ascend drivers and toolkit (CANN)"


class NpuPlatform(AcceleratorPlatform):
    """Ascend NPUs through torch_npu and hccl.

    Importing torch_npu renames torch's spare device slot ("privateuse1") to "npu", registers `torch.npu` as its device
    module and "hccl" as the `torch.distributed` backend of npu tensors; nothing else is needed.

    Raises:
        PlatformUnavailableError: torch_npu is not installed or cannot be imported, or no NPU is usable.
    """

    device_type = "npu"
    backend = "hccl"

    def __init__(self) -> None:
        _import_torch_npu()
        if not torch.get_device_module("npu").is_available():
            raise PlatformUnavailableError(
                "cannot use platform 'npu': torch_npu is installed but sees no usable NPU; check that npu-smi info "
                "lists one, that the environment script of the Ascend toolkit (CANN) was sourced and that "
                "ASCEND_RT_VISIBLE_DEVICES does not hide it"
            )
        super().__init__()


def torch_npu_is_installed() -> bool:
    """Tell whether torch_npu could be imported, without importing it."""
    return "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None


def _import_torch_npu() -> None:
    if not torch_npu_is_installed():
        raise PlatformUnavailableError(
            f"cannot use platform 'npu': the package torch_npu is not installed; try: {_INSTALL}"
        )
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        # Missing drivers show up as ImportError, OSError or RuntimeError, depending on which library is missing.
        reason = str(error).strip().splitlines()
        raise PlatformUnavailableError(
            "cannot use platform 'npu': torch_npu is installed but its import failed "
            f"({type(error).__name__}: {reason[0] if reason else 'no message'}); it needs the Ascend drivers and "
            f"toolkit (CANN) and the torch release it was built for, so try: {_INSTALL}"
        ) from error
