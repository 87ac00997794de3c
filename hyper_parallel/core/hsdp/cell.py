"""The methods that a module wrapped by ``hsdp`` gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.fully_shard.fsdp2 import nested_traced_units, nested_units
from hyper_parallel.core.fully_shard.module import ManagedModule
from hyper_parallel.core.fully_shard.unit import Unit, is_wrapped, unit_of

__all__ = ["HSDPCell", "shown"]


class HSDPCell(ManagedModule):
    """Mixed into the class of every module that :func:`hsdp` has wrapped.

    Methods raise ``ValueError`` for an argument of the wrong kind, and when called on a module that was never wrapped.
    """

    def set_requires_grad_sync(self, requires_grad_sync: bool) -> None:
        """Whether the next backwards end a cycle of accumulation: their gradients are reduced over all ranks.

        True at first. False: gradients add up. Without ``enable_grad_accumulation`` nothing is communicated, and each
        rank keeps its own whole gradients; with it, ``param.acc_grad`` shows what has added up, and at level2 and
        level3 gradients are reduce_scattered in every backward. ``param.grad`` gets the sum in the synced step.
        Reaches all nested cells.
        """
        if not isinstance(requires_grad_sync, bool):
            raise ValueError(
                explain(
                    f"set_requires_grad_sync cannot use {shown(requires_grad_sync)}",
                    "the flag is True or False",
                    f"seen: a {type(requires_grad_sync).__name__}",
                    "set_requires_grad_sync(True)",
                )
            )
        _check_wrapped(self, "set_requires_grad_sync")
        for traced in nested_traced_units(self):
            traced.set_requires_grad_sync(requires_grad_sync)
        for unit in nested_units(self):  # type: ignore[arg-type]
            if unit.options.show_sums and unit.splits_gradients:
                unit.options.requires_all_reduce = requires_grad_sync
            else:
                unit.options.requires_gradient_sync = requires_grad_sync

    def zero_grads(self) -> None:
        """Clear gradients and what adds up in ``acc_grad``. Reaches all nested cells."""
        _check_wrapped(self, "zero_grads")
        self.zero_grad()

    def set_forward_prefetch_cells(self, hsdp_cell_list: Sequence[HSDPCell]) -> None:
        """Gather these cells' parameters while this one's forward computes (default: the cell that came next).

        An empty list: none.
        """
        _check_wrapped(self, "set_forward_prefetch_cells")
        chosen = _units("set_forward_prefetch_cells", hsdp_cell_list)
        unit = unit_of(self)  # type: ignore[arg-type]
        if unit is not None:  # a traced cell gathers where the graph says
            unit.forward_prefetch = chosen

    def set_backward_prefetch_cells(self, hsdp_cell_list: Sequence[HSDPCell]) -> None:
        """Gather these cells' parameters while this one's backward computes (default: the one that came before).

        An empty list: none.
        """
        _check_wrapped(self, "set_backward_prefetch_cells")
        chosen = _units("set_backward_prefetch_cells", hsdp_cell_list)
        unit = unit_of(self)  # type: ignore[arg-type]
        if unit is not None:
            unit.backward_prefetch = chosen


def _check_wrapped(module: Any, method: str) -> None:
    if not isinstance(module, nn.Module) or not is_wrapped(module):
        raise ValueError(
            explain(
                f"{method} cannot do anything for a {type(module).__name__}",
                "it was never wrapped",
                f"seen: a {type(module).__name__} without sharded parameters of its own",
                "hsdp(module) first",
            )
        )


def _units(method: str, cells: Any) -> list[Unit]:
    if not isinstance(cells, (list, tuple)):
        raise ValueError(
            explain(
                f"{method} cannot use {shown(cells)}",
                "it takes a list or tuple of cells",
                f"seen: a {type(cells).__name__}",
                f"{method}([model.layers[1]])",
            )
        )
    for index, cell in enumerate(cells):
        if not isinstance(cell, HSDPCell) or not is_wrapped(cell):  # type: ignore[arg-type]
            raise ValueError(
                explain(
                    f"{method} cannot use item {index}, a {type(cell).__name__}",
                    "it was not wrapped by hsdp",
                    f"seen: {len(cells)} items",
                    "hsdp(that_module) first",
                )
            )
    return [unit for cell in cells if (unit := unit_of(cell)) is not None]


def shown(value: Any) -> str:
    """What was given, on one line: a module's or a tensor's text is long.

    >>> shown("level4"), shown(nn.Sequential(nn.Tanh()))
    ("'level4'", 'Sequential( ...')
    """
    first, *more = repr(value).splitlines()
    return first if len(first) <= 80 and not more else f"{first[:80]} ..."
