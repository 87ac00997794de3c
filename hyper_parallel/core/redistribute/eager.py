"""What `torch.compile` leaves as it is: plans and process groups are not for tracing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def runs_eagerly(verb: Callable[P, R]) -> Callable[P, R]:
    """Return the verb as it is for those who call it, and as a break between two graphs for those who compile."""
    between = cast(Callable[P, R], torch._disable_dynamo(verb))

    @wraps(verb)
    def called(*args: P.args, **options: P.kwargs) -> R:
        return between(*args, **options) if torch.compiler.is_compiling() else verb(*args, **options)

    return called
