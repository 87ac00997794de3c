"""torch's own DTensor and its functions, under the path that users of the existing library know."""

from contextlib import nullcontext

from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor

__all__ = ["DTensor", "SkipDTensorDispatch", "distribute_module", "distribute_tensor"]


class SkipDTensorDispatch(nullcontext[None]):
    """Without effect: backward passes and optimizers take DTensors as they are.

    Code that is to compute on a rank's own part takes `to_local()`.
    """
