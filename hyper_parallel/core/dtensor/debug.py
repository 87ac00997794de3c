"""torch's counter of collectives, under the path of the existing library."""

from torch.distributed.tensor.debug import CommDebugMode

__all__ = ["CommDebugMode"]
