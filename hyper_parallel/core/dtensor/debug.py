"""torch's own counter of collectives, under the path that users of the existing library know."""

from torch.distributed.tensor.debug import CommDebugMode

__all__ = ["CommDebugMode"]
