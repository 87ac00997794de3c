"""torch's DTensor and its functions, under the path of the existing library."""

from contextlib import nullcontext

from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor

__all__ = ["DTensor", "SkipDTensorDispatch", "distribute_module", "distribute_tensor"]


class SkipDTensorDispatch(nullcontext[None]):
    """Context manager without effect, because backward passes and optimizers accept DTensors.

    Code that computes on a rank's part calls `to_local()`.
    """
