"""The four-part error message, under its former path."""

from hyper_parallel.core.common.errors import explain, nearest

__all__ = ["explain", "nearest"]
