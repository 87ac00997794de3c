"""Checks of single arguments: ints that are not bools, shapes, numbers of dims, ranks."""

import operator
from collections.abc import Sequence

import torch.distributed as dist

from hyper_parallel.core.dtensor.messages import explain


def check_int(value: object) -> int | None:
    """Return value as an int, or None for what is no int: a bool, a float, a str."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_shape(global_shape: object, seen: str) -> tuple[int, ...]:
    """Return a tensor's sizes as plain ints.

    Args:
        global_shape: what was given.
        seen: the line of the error message that shows the layout.

    Raises:
        TypeError: not a sequence of ints.
        ValueError: a negative size.
    """
    asked, seen = "cannot place a tensor", f"global_shape: {global_shape!r}   {seen}"
    if not isinstance(global_shape, Sequence) or isinstance(global_shape, str):
        blame = f"global_shape must be a sequence of ints, not {type(global_shape).__name__}"
        raise TypeError(explain(asked, blame, seen, "tensor.shape, such as (8, 4)"))
    shape = []
    for dim, given in enumerate(global_shape):
        size = check_int(given)
        if size is None:
            blame = f"the size of dim {dim} is a {type(given).__name__}, not an int"
            raise TypeError(explain(asked, blame, seen, "tensor.shape, such as (8, 4)"))
        if size < 0:
            raise ValueError(explain(asked, f"dim {dim} has size {size}", seen, "sizes from 0 up"))
        shape.append(size)
    return tuple(shape)


def check_ndim(ndim: object, seen: str) -> int:
    """Return a number of dims as a plain int.

    Raises:
        TypeError: not an int.
        ValueError: negative.
    """
    asked, hint = "cannot fill in a tensor map", "ndim=tensor.ndim"
    number = check_int(ndim)
    if number is None:
        raise TypeError(explain(asked, f"ndim is a {type(ndim).__name__}, not an int", seen, hint))
    if number < 0:
        raise ValueError(explain(asked, f"ndim is {number}", seen, hint))
    return number


def check_rank(rank: object, first: int, seen: str) -> int:
    """Return a rank as a plain int; for None the calling rank.

    Args:
        rank: what was given.
        first: a rank that would do, for the hint.
        seen: the line of the error message that shows the layout.

    Raises:
        TypeError: not an int.
        ValueError: None, and torch.distributed is not initialized.
    """
    asked = "cannot tell which part a rank holds"
    if rank is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
        blame = "no rank was given and torch.distributed is not initialized"
        raise ValueError(explain(asked, blame, seen, f"rank={first}"))
    number = check_int(rank)
    if number is None:
        raise TypeError(explain(asked, f"rank is a {type(rank).__name__}, not an int", seen, f"rank={first}"))
    return number
