"""An embedding whose table is split over the vocabulary, on local tensors.

Each rank looks up the tokens that it has rows of. The other tokens get zeros, so that the sum over the ranks is the
whole (Megatron-LM, Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.messages import explain

__all__ = ["Lookup", "begin_lookup", "end_lookup"]


class Lookup(NamedTuple):
    """A look-up under way.

    Attributes:
        outside: which tokens other ranks have rows of.
        padding_idx: the module's own, to put back.
    """

    outside: torch.Tensor
    padding_idx: int | None


def begin_lookup(
    where: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Lookup | None]:
    """Number the tokens as this rank's rows are numbered, if the module is an embedding split over its vocabulary.

    Args:
        where: the module, for messages.
        module: any.
        args: what it is called with.
        kwargs: likewise.

    Returns:
        The arguments, and what `end_lookup` needs.

    Raises:
        ValueError: some rank has no rows; the embedding renormalises them, or has gradients of a kind that is refused.
    """
    weight: Any = module._parameters.get("weight")
    if not isinstance(module, nn.Embedding) or not isinstance(weight, DTensor):
        return args, kwargs, None
    asked = f"cannot look up tokens in {where} on local tensors"
    _check_options(asked, module, wants_gradient=weight.requires_grad)
    layout = Layout.of(weight)
    if not layout.splits(2)[0]:
        return args, kwargs, None
    if _has_empty_part(layout, weight.shape):
        blame = f"some rank has none of the {weight.shape[0]} rows"
        raise ValueError(explain(asked, blame, f"layout: {layout}", "fewer ranks along the axes that split the rows"))
    part = layout.local_slice(weight.shape)[0]
    ids = args[0] if args else kwargs["input"]
    local = ids - part.start
    rows = part.stop - part.start
    outside = (local < 0) | (local >= rows)
    local = local.masked_fill(outside, 0)
    lookup = Lookup(outside, module.padding_idx)
    if module.padding_idx is not None:
        inside = part.start <= module.padding_idx < part.stop
        module.padding_idx = module.padding_idx - part.start if inside else None
    return ((local, *args[1:]), kwargs, lookup) if args else (args, {**kwargs, "input": local}, lookup)


def end_lookup(module: nn.Module, lookup: Lookup, result: torch.Tensor | None) -> torch.Tensor | None:
    """Put zeros where other ranks have the rows, and the module back as it was.

    Args:
        module: the embedding.
        lookup: what `begin_lookup` returned.
        result: what the module has looked up; None if it has raised.
    """
    module.padding_idx = lookup.padding_idx  # type: ignore[assignment]
    return None if result is None else result.masked_fill(lookup.outside.unsqueeze(-1), 0)


def _check_options(asked: str, module: nn.Embedding, *, wants_gradient: bool) -> None:
    """Refuse what depends on the tokens, or on the numbers, of other ranks."""
    if module.max_norm is not None:
        blame = "rows are parts or copies on several ranks, and max_norm changes them in each forward"
        raise ValueError(explain(asked, blame, f"max_norm: {module.max_norm}", "max_norm=None"))
    if wants_gradient and module.scale_grad_by_freq:
        blame = "scale_grad_by_freq counts how often a token is among those of a rank, not among all"
        raise ValueError(explain(asked, blame, "scale_grad_by_freq: True", "scale_grad_by_freq=False"))
    if wants_gradient and module.sparse:
        blame = "gradients go from rank to rank, which sparse ones cannot"
        raise ValueError(explain(asked, blame, "sparse: True", "sparse=False"))


@lru_cache(maxsize=1024)
def _has_empty_part(layout: Layout, shape: torch.Size) -> bool:
    starts_and_stops = layout.slices(shape)[:, 0]
    return bool((starts_and_stops[:, 0] == starts_and_stops[:, 1]).any())
