"""torch's own DTensor, under the path that users of the existing library know."""

from torch.distributed.tensor import DTensor

__all__ = ["DTensor"]
