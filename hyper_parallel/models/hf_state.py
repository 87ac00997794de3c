"""The tensors that a caller gives, against those that a config's model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hyper_parallel.core.common.errors import explain, nearest
from hyper_parallel.core.common.torch_compat import plain_name
from hyper_parallel.models.llama import LlamaConfig

__all__ = ["check_known", "plain_names", "some_of"]

_SHOWN = 6


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the names that they have in a model without wrappers.

    Args:
        state: tensors by name.
    """
    return {plain_name(name): tensor for name, tensor in state.items()}


def check_known(asked: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], config: LlamaConfig) -> None:
    """Refuse tensors that the model does not have, or has in another shape, and those without memory.

    Args:
        asked: the start of an error message, "cannot ...".
        tensors: by plain names; some of the model's are enough.
        expected: those of the config's model, on meta.
        config: the model's shape.

    Raises:
        ValueError: the first that does not fit.
    """
    for name, tensor in tensors.items():
        twin = "embed.weight" if name == "head.weight" and config.tie_embeddings else name
        if twin not in expected:
            blame, hint = f"the config's model has no {name!r}", nearest(name, expected)
            raise ValueError(explain(asked, blame, f"config: {config}", hint))
        if tensor.shape != expected[twin].shape:
            blame = f"{name!r} has another shape than in the config's model"
            seen = f"seen: {tuple(tensor.shape)}   config's: {tuple(expected[twin].shape)}   config: {config}"
            raise ValueError(explain(asked, blame, seen, "the config that the model was built from"))
        if tensor.is_meta:
            blame, hint = f"{name!r} is on meta, and has no memory", "init_parameters(model) before"
            raise ValueError(explain(asked, blame, f"device: {tensor.device}", hint))


def some_of(names: Sequence[str]) -> str:
    """Write names for people, not too many of them.

    >>> some_of(list("abcdefgh"))
    'a, b, c, d, e, f and 2 more'

    Args:
        names: in the order to show them in.
    """
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
