"""Rounding bounds of comparisons with one device: a priori in float64, measured where a backend reduces no float64.

In float64 the a-priori bound, unit roundoff times the number of summands, is far below any real difference. In float32
it is not, so there the bound is what the prover measures (`sim.prove.bound`): how far the results of a run on one
device move when every operation is off by its rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache

import torch

import sim
from sim.prove.bound import SAFETY, deviation

Results = Mapping[str, torch.Tensor | None]
Alone = Callable[[], Mapping[str, torch.Tensor]]
"""A run on one device: on the CPU, in float32 or the dtypes of a body's models, from the same start each time."""


@cache
def _measure(alone: Alone) -> tuple[dict[str, float], dict[str, float]]:
    """By result: the rounding bound, and the largest element."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        base, moved = deviation(alone)
    return {name: SAFETY * move for name, move in moved.items()}, {n: largest([tensor]) for n, tensor in base.items()}


def measured(alone: Alone, kind: str | None = None) -> float:
    """The rounding bound of a run on one device, relative to the size of the results.

    Args:
        alone: The run.
        kind: How the names of the results begin that are compared with each other's largest element. None: each has
            its own bound and its own largest element, and the worst case of all results counts.
    """
    bounds, sizes = _measure(alone)
    if kind is None:
        return max(bound / sizes[name] for name, bound in bounds.items() if bound)
    names = [name for name in bounds if name.startswith(kind)]
    return max(bounds[name] for name in names) / max(sizes[name] for name in names)


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest magnitude among all elements."""
    return max((tensor.cpu().abs().max().item() for tensor in tensors if tensor.numel()), default=0.0)


def tolerances(
    among: Iterable[torch.Tensor], alone: Alone, kind: str | None = None, *, rtol: float, atol: float
) -> dict[str, float]:
    """What `torch.testing.assert_close` is to take for these results: as given in float64, else as measured."""
    tensors = list(among)
    if any(tensor.dtype is torch.float64 for tensor in tensors):
        return {"rtol": rtol, "atol": atol}
    return {"rtol": 0.0, "atol": measured(alone, kind) * largest(tensors)}


def bound_of(
    wanted: torch.Tensor, among: Results, alone: Alone | None, *, eps: float | None = None, summands: int = 4096
) -> float:
    """How far a result may be from one device's.

    Args:
        wanted: One device's.
        among: All that are compared with it. If none of them is in float64, the bound is the measured one, as a part of
            the largest number among them.
        alone: What to measure; None: the a-priori bound is taken for any dtype.
        eps: Of the coarsest dtype computed in; None: of the result's own. A priori only.
        summands: What batch, widths, layers and steps multiply to at most. A priori only.
    """
    tensors = [tensor for tensor in among.values() if tensor is not None and tensor.numel()]
    if alone is None or any(tensor.dtype.to_real() is torch.float64 for tensor in tensors):
        return (eps or torch.finfo(wanted.dtype).eps) * summands * max(1.0, wanted.abs().max().item())
    return measured(alone) * largest(tensors)


def is_stand_in(ctx: sim.RankTest) -> bool:
    """Whether simulated ranks stand in for devices, which is to try dtypes; what costs seconds may be left out."""
    return ctx.backend in ("gpu", "npu") and sim.current_rank() is not None


def is_late(ctx: sim.RankTest) -> bool:
    """Whether ranks have late devices, which have no sparse tensors, and on which tests look for races."""
    return ctx.device_type == "npu" and sim.current_rank() is not None


def shorter(dtype: torch.dtype) -> torch.dtype:
    """The next shorter float dtype, for bodies in which two of them meet."""
    return torch.float32 if dtype is torch.float64 else torch.float16


def results(losses: list[torch.Tensor], gradients: Results, values: Results) -> dict[str, torch.Tensor]:
    """What a training run returns, under one name each."""
    named = {f"loss {step}": loss for step, loss in enumerate(losses)}
    named |= {f"gradient {name}": tensor for name, tensor in gradients.items() if tensor is not None}
    return named | {f"value {name}": tensor for name, tensor in values.items() if tensor is not None}
