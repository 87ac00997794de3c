"""Parameters that come into a model after it was wrapped, which no unit knows of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["Structure"]


class Structure:
    """The modules below a root, as they were when all parameters in them were known.

    Args:
        roots: The modules of the root's unit.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        self._seen: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any], int]] = []

    def check(self, known: Callable[[], Iterable[nn.Parameter]]) -> None:
        """Make sure, if a module or a parameter has come or gone, that every parameter is known.

        Args:
            known: Gives the parameters that are managed or were ignored.

        Raises:
            RuntimeError: One that needs a gradient is not: each rank would train its own copy.
        """
        if self._seen and not self._has_changed():
            return
        identities = {id(parameter) for parameter in known()}
        for root in self._roots:
            newcomers = [
                name
                for name, parameter in root.named_parameters()
                if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in identities
            ]
            if newcomers:
                raise RuntimeError(
                    f"parameters came into {type(root).__name__} after it was wrapped: {', '.join(newcomers)}\n"
                    "  seen: no unit reduces their gradients, so every rank would train its own copy\n"
                    "  try: add them before wrapping, wrap the module that brings them, or pass them in ignored_params"
                )
        modules = dict.fromkeys(module for root in self._roots for module in root.modules())
        self._seen = [
            (module._modules, tuple(module._modules.values()), module._parameters, len(module._parameters))
            for module in modules
        ]

    def _has_changed(self) -> bool:
        return any(
            len(parameters) != count or (children and tuple(children.values()) != before)
            for children, before, parameters, count in self._seen
        )
