"""Means of random operations: what a proof puts in place of random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

__all__ = ["is_random", "mean_of", "put_mean"]

_aten = torch.ops.aten

_Given: TypeAlias = Mapping[str, Any]
"""Arguments of an operation, by name."""


def is_random(func: OpOverload) -> bool:
    """Whether an operation may draw random numbers; dropout of a fused attention does so only where p is not 0."""
    return torch.Tag.nondeterministic_seeded in func.tags


def mean_of(func: OpOverload) -> Callable[[Any, _Given], Any] | None:
    """Return what overwrites the result of a random operation by its mean; None: there is nothing for it."""
    return _MEANS.get(func.overloadpacket)


def put_mean(func: OpOverload, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Overwrite what a random operation has drawn by what it gives on average.

    Whole numbers get the middle of their range, and a choice of indices is always the same: that of the first that are
    possible.

    >>> put_mean(_aten.exponential_.default, torch.zeros(2), (torch.zeros(2), 4.0), {})
    tensor([0.2500, 0.2500])

    Args:
        func: the operation, one that `mean_of` knows.
        result: what it returned; changed in place.
        args, kwargs: what it was given.
    """
    arguments = func._schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= {each.name: value for each, value in zip(arguments, args, strict=False)}
    return _MEANS[func.overloadpacket](result, {**given, **kwargs})


def _filled(result: torch.Tensor, value: Any) -> torch.Tensor:
    """Fill with a number, or with the numbers of a tensor; whole numbers are rounded."""
    if isinstance(value, torch.Tensor):
        value = value if result.is_floating_point() else value.round()
        return result.copy_(value)
    return result.fill_(value if result.is_floating_point() or result.is_complex() else round(value))


def _always(value: float) -> Callable[[torch.Tensor, _Given], torch.Tensor]:
    return lambda result, given: _filled(result, value)


def _bernoulli(result: torch.Tensor, given: _Given) -> torch.Tensor:
    """`bernoulli(p)` draws by a tensor of probabilities, the other forms by a number or a tensor beside it."""
    return _filled(result, given["p"] if given.get("p") is not None else given["self"])


def _dropout(result: Any, given: _Given) -> Any:
    """`native_dropout` returns what is left, scaled, and the mask; backward scales the mask in the same way."""
    out, mask = result
    chance, x = given["p"], given["input"] if "input" in given else given["self"]
    return out.copy_(x).mul_(1 / (1 - chance) if chance < 1 else 0.0), mask.fill_(True)


def _normal(result: torch.Tensor, given: _Given) -> torch.Tensor:
    return _filled(result, given.get("mean", 0.0))


def _whole(result: torch.Tensor, given: _Given) -> torch.Tensor:
    """The middle of what `randint` and `random_` draw from; 0 where they draw from all that their dtype has."""
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    return result.fill_(0 if high is None else (int(low) + int(high) - 1) // 2)


def _permutation(result: torch.Tensor, given: _Given) -> torch.Tensor:
    return result.copy_(torch.arange(len(result)))


def _chosen(result: torch.Tensor, given: _Given) -> torch.Tensor:
    """Indices that `multinomial` may draw: the first ones, with replacement all the first."""
    first = (given["self"] > 0).int().argsort(dim=-1, descending=True, stable=True)
    return result.copy_(first[..., :1] if given["replacement"] else first[..., : result.shape[-1]])


_MEANS: Mapping[Any, Callable[[Any, _Given], Any]] = {
    _aten.native_dropout: _dropout,
    _aten._fused_dropout: _dropout,
    _aten.bernoulli: _bernoulli,
    _aten.bernoulli_: _bernoulli,
    _aten.rand: _always(0.5),
    _aten.rand_like: _always(0.5),
    _aten.uniform: lambda result, given: _filled(result, (given["from"] + given["to"]) / 2),
    _aten.uniform_: lambda result, given: _filled(result, (given["from"] + given["to"]) / 2),
    _aten.randn: _always(0.0),
    _aten.randn_like: _always(0.0),
    _aten.normal: _normal,
    _aten.normal_: _normal,
    _aten.normal_functional: _normal,
    _aten.exponential: lambda result, given: _filled(result, 1 / given["lambd"]),
    _aten.exponential_: lambda result, given: _filled(result, 1 / given["lambd"]),
    _aten.log_normal: lambda result, given: _filled(result, math.exp(given["mean"] + given["std"] ** 2 / 2)),
    _aten.log_normal_: lambda result, given: _filled(result, math.exp(given["mean"] + given["std"] ** 2 / 2)),
    _aten.cauchy: lambda result, given: _filled(result, given["median"]),
    _aten.cauchy_: lambda result, given: _filled(result, given["median"]),
    _aten.geometric: lambda result, given: _filled(result, 1 / given["p"]),
    _aten.geometric_: lambda result, given: _filled(result, 1 / given["p"]),
    _aten.poisson: lambda result, given: _filled(result, given["self"]),
    _aten.binomial: lambda result, given: _filled(result, given["count"] * given["prob"]),
    _aten._standard_gamma: lambda result, given: _filled(result, given["self"]),
    _aten._sample_dirichlet: lambda result, given: _filled(result, given["self"] / given["self"].sum(-1, True)),
    _aten.random: _whole,
    _aten.random_: _whole,
    _aten.randint: _whole,
    _aten.randint_like: _whole,
    _aten.randperm: _permutation,
    _aten.multinomial: _chosen,
}
