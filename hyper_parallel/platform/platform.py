"""The frameworks that a platform may be of, under the path that users of the existing library know."""

from enum import Enum

__all__ = ["PlatformType"]


class PlatformType(Enum):
    """The framework; there is one."""

    PYTORCH = "pytorch"
