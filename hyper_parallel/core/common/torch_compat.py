"""Torch's wrappers seen through: code that `torch.compile` leaves alone, and names without what wrappers add."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch

__all__ = ["plain_name", "runs_eagerly"]

P = ParamSpec("P")
R = TypeVar("R")


def runs_eagerly(verb: Callable[P, R]) -> Callable[P, R]:
    """Return the verb as it is for those who call it, and as a break between two graphs for those who compile."""
    between = cast(Callable[P, R], torch._disable_dynamo(verb))

    @wraps(verb)
    def called(*args: P.args, **options: P.kwargs) -> R:
        return between(*args, **options) if torch.compiler.is_compiling() else verb(*args, **options)

    return called


_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod)\.")


def plain_name(name: str) -> str:
    """Take what activation checkpointing and torch.compile have added out of a name.

    >>> plain_name("layers.0._checkpoint_wrapped_module.mlp.w1.weight")
    'layers.0.mlp.w1.weight'

    Args:
        name: of a parameter, a buffer or a module.
    """
    return _WRAPPERS.sub("", name)
