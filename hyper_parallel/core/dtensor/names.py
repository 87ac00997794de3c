"""Names of parameters as they are in a model that nothing wraps."""

from __future__ import annotations

import re

__all__ = ["plain_name"]

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod)\.")


def plain_name(name: str) -> str:
    """Take what activation checkpointing and torch.compile have added out of a name.

    >>> plain_name("layers.0._checkpoint_wrapped_module.mlp.w1.weight")
    'layers.0.mlp.w1.weight'

    Args:
        name: of a parameter, a buffer or a module.
    """
    return _WRAPPERS.sub("", name)
