"""Updates of torch's own optimizers, taken again from the gradients that each rank had.

Such an update is elementwise. So what a rank makes of its part of a gradient is what the optimizer of one device makes
of it, within a few roundings, however wide the bounds of the gradients are.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.core.dtensor.layout import Layout
from sim.explain.errors import ranks_phrase
from sim.prove.evidence import gap, magnitude, top, unit_roundoff
from sim.prove.judge import Finding
from sim.prove.record import copy_of, ranks_along

ROUNDINGS = 16.0
"""Units of rounding that a step is granted, of the largest element: Adam's chain from gradient to parameter has 12."""

_ELEMENTWISE = {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta"}
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}  # options that change no values
_MOST_SAID = 3
_FEWEST = 4  # wrong elements that are off by one number times the weights, so that it is no accident
_ELEMENTS = 65_536  # of all gradients, from which the factors of ranks are found
_ALIKE = 1e-6  # factors of which only rounding can tell the difference


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's own rounding is that of a few operations; what it makes of the gradients' is measured."""
    # The library's own AdamW computes as torch's does, of which it is a subclass; others' may do what they like.
    kind = next(kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("hyper_parallel."))
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """How an optimizer updates the parameters of one of its groups in one step.

    Attributes:
        kind: the optimizer's class.
        options: of the group.
        is_first: the optimizer has not stepped before.
    """

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    is_first: bool


@dataclass(frozen=True)
class UpdateStarts:
    """What an optimizer is about to do.

    Attributes:
        rules: of parameters that it updates element by element, by name.
        values: the parameters before the update, where their gradients are held as they are.
    """

    rules: Mapping[str, UpdateRule]
    values: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], hooks: int = 0
    ) -> UpdateStarts:
        """Note what an optimizer begins with.

        Args:
            optimizer: about to step.
            parameters: the model's, by name.
            hooks: how many of its hooks change nothing; with others, it is not the optimizer alone that updates.
        """
        own = {id(each): group for group in optimizer.param_groups for each in group["params"]}
        mine = {name: each for name, each in parameters.items() if id(each) in own}
        values = {name: copy_of(each) for name, each in mine.items() if _is_alike(each)}
        if not is_elementwise(optimizer) or _is_changed(optimizer, hooks):
            return cls({}, values)
        first = all(not state or float(state.get("step", 1)) == 0 for state in optimizer.state.values())
        rules = {id(group): UpdateRule(type(optimizer), _options(group), first) for group in optimizer.param_groups}
        return cls({name: rules[id(own[id(each)])] for name, each in mine.items()}, values)

    def joined(self, other: UpdateStarts) -> UpdateStarts:
        """Return these and those of another optimizer."""
        return UpdateStarts({**self.rules, **other.rules}, {**self.values, **other.values})


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    copied = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in copied.items()}


def _is_alike(parameter: nn.Parameter) -> bool:
    """Whether a gradient is held as its parameter is: else the optimizer puts it together first."""
    grad = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
        return parameter.placements == grad.placements
    return isinstance(parameter, DTensor) == isinstance(grad, DTensor) or grad is None


def _is_changed(optimizer: torch.optim.Optimizer, hooks: int) -> bool:
    """Whether hooks, or a `GradScaler`, take part in the step, so that it is more than the optimizer's own."""
    own = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return own > hooks or getattr(optimizer, "grad_scale", None) is not None


class UpdateReplay:
    """Updates the parameters of a rank step by step, as the optimizers of one device would.

    >>> rule = UpdateRule(torch.optim.SGD, {"lr": 0.5}, True)
    >>> UpdateReplay().step({"w": rule}, {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 2.0])})
    {'w': tensor([0.5000, 0.0000])}
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[nn.Parameter, torch.optim.Optimizer]] = {}

    def step(
        self,
        rules: Mapping[str, UpdateRule],
        values: Mapping[str, torch.Tensor | None],
        gradients: Mapping[str, torch.Tensor | None],
    ) -> dict[str, torch.Tensor]:
        """Return the parameters after a step, by name; without those of which something is not known."""
        wanted: dict[str, torch.Tensor] = {}
        for name in rules:
            value, grad = values.get(name), gradients.get(name)
            if value is not None and (grad is None or grad.shape == value.shape) and value.is_floating_point():
                wanted[name] = value
        self._begin({name: value for name, value in wanted.items() if rules[name].is_first}, rules)
        # Of those that one device updates, and of which something is not known here, the state is lost.
        self._held = {name: held for name, held in self._held.items() if name in wanted or name not in rules}
        steady = [name for name in wanted if name in self._held]
        for name in steady:
            (parameter, optimizer), rule = self._held[name], rules[name]
            grad = gradients.get(name)
            with torch.no_grad():
                parameter.copy_(wanted[name])
            parameter.grad = None if grad is None else grad.to(parameter.dtype)
            group = next(each for each in optimizer.param_groups if each["params"][0] is parameter)
            group.update(rule.options)
        # Imported here: whoever imports `sim` needs no trainer.
        from hyper_parallel.trainer.optimizer import update

        for optimizer in {id(optimizer): optimizer for _, optimizer in self._held.values()}.values():
            update(optimizer)
        return {name: self._held[name][0].detach().clone() for name in steady}

    def _begin(self, values: Mapping[str, torch.Tensor], rules: Mapping[str, UpdateRule]) -> None:
        kinds = dict.fromkeys(rules[name].kind for name in values)
        for kind in kinds:
            made = {name: nn.Parameter(value.clone()) for name, value in values.items() if rules[name].kind is kind}
            optimizer = kind([{**rules[name].options, "params": [each]} for name, each in made.items()], lr=1.0)  # type: ignore[call-arg]
            self._held.update({name: (each, optimizer) for name, each in made.items()})


class UpdatesOfStep:
    """The updates of one step on all ranks, beside what one device's optimizer makes of what they had.

    Args:
        rules: of one device, by name.
        starts: of each rank: what its optimizer began with, by the names of one device.
        gradients: of each rank, by the same names.
        replays: of each rank, which have seen the steps before.
        steps: how many have been taken, with this one.
    """

    def __init__(
        self,
        rules: Mapping[str, UpdateRule],
        starts: Mapping[int, UpdateStarts],
        gradients: Mapping[int, Mapping[str, torch.Tensor | None]],
        replays: Mapping[int, UpdateReplay],
        steps: int,
    ) -> None:
        self._rules, self._starts, self._steps = rules, starts, steps
        self._again = {rank: replays[rank].step(rules, each.values, gradients[rank]) for rank, each in starts.items()}

    def judged(self, name: str, parts: Mapping[int, torch.Tensor], found: Finding) -> Finding:
        """Return a finding on a parameter after the step, with what is wrong with the optimizer alone.

        Args:
            name: of the parameter, on one device.
            parts: what the ranks hold of it.
            found: beside the update of one device, with a bound that says how far rounding moves gradients, too.
        """
        if name not in self._rules or found.status not in ("right", "wrong", "unexplained"):
            return found
        odd, error, bound = self._stray(name, parts)
        others = [rank for rank in parts if self._has_others(name, rank)]
        words = self._options(name, odd or others) or self._as_far(name, odd, parts, bound)
        if found.status != "right":
            return replace(found, sentence="; ".join(filter(None, (found.sentence, words))))
        if not odd:
            return found
        words = words or f"{ranks_phrase(odd)} make{'s' * (len(odd) == 1)} another update of it than one device would"
        found = replace(found, status="wrong", error=error, bound=bound, ratio=error / bound)
        hint = "the optimizer's options and state of one device, on all ranks"
        return replace(found, sentence=f"{words}, from the same gradient", suggestion=hint)

    def _stray(self, name: str, parts: Mapping[int, torch.Tensor]) -> tuple[list[int], float, float]:
        """Return the ranks with another update than that of one device's optimizer, the largest error, its bound.

        What is zero but for rounding may differ between ranks that hold the same, and of these each may have the update
        of another, as with optimizers whose states are sharded.
        """
        again = {rank: tensors[name] for rank, tensors in self._again.items() if name in tensors}
        odd, worst, limit = [], 0.0, 0.0
        for rank, part in parts.items():
            own = again.get(rank)
            if own is None or own.shape != part.shape or not part.numel():
                continue
            size = max(magnitude(each) for each in (part, own, self._starts[rank].values[name]))
            bound = max(ROUNDINGS * self._steps * unit_roundoff(part.dtype) * size, torch.finfo(torch.float64).tiny)
            error = top(gap(part, own))
            if not error <= bound:
                error = min(top(gap(part, each)) for each in again.values() if each.shape == part.shape)
            if not error <= bound:
                odd.append(rank)
                worst, limit = max((error, bound), (worst, limit))
        return odd, worst, limit

    def _has_others(self, name: str, rank: int) -> bool:
        rule = self._starts[rank].rules.get(name) if rank in self._starts else None
        return rule is not None and bool(_differences(self._rules[name], rule))

    def _options(self, name: str, ranks: Sequence[int]) -> str:
        return other_options(self._rules[name], {rank: self._starts[rank].rules.get(name) for rank in ranks})

    def _as_far(self, name: str, ranks: Sequence[int], parts: Mapping[int, torch.Tensor], bound: float) -> str:
        """Say how many times as far some ranks move a parameter, if all of them and all elements as many."""
        factors = []
        for rank in ranks:
            value = self._starts[rank].values[name]
            moved, wanted = parts[rank] - value, self._again[rank][name] - value
            square = float(wanted.square().sum())
            factor = float((moved * wanted).sum()) / square if square else 0.0
            if top(gap(moved, wanted * factor)) > 2 * bound * max(1.0, abs(factor)):
                return ""
            factors.append(factor)
        if not factors or not math.isclose(min(factors), max(factors), rel_tol=_ALIKE):
            return ""
        return (
            f"{ranks_phrase(ranks)} move{'s' * (len(ranks) == 1)} it {factors[0]:.4g} times as far as one device would"
        )


def other_options(one: UpdateRule, ranks: Mapping[int, UpdateRule | None]) -> str:
    """Say which options ranks have otherwise than one device; "": none, or not all of these ranks the same.

    >>> one = UpdateRule(torch.optim.SGD, {"lr": 0.1, "momentum": 0}, True)
    >>> other_options(one, {1: UpdateRule(torch.optim.SGD, {"lr": 0.2, "momentum": 0}, True)})
    'rank 1 steps with lr=0.2, one device with lr=0.1'
    """
    said = {rank: _differences(one, rule) if rule is not None else None for rank, rule in ranks.items()}
    first = next(iter(said.values()), None)
    if not first or any(each != first for each in said.values()):
        return ""
    theirs, mine = (", ".join(each[:_MOST_SAID]) for each in zip(*first, strict=True))
    return f"{ranks_phrase(ranks)} step{'s' if len(ranks) == 1 else ''} with {theirs}, one device with {mine}"


def _differences(one: UpdateRule, other: UpdateRule) -> list[tuple[str, str]]:
    if one.kind is not other.kind:
        return [(other.kind.__name__, one.kind.__name__)]
    names = [name for name in one.options if name not in _HOW and name in other.options]
    pairs = [(name, other.options[name], one.options[name]) for name in names]
    lost = [("no state of the steps before", "it")] if other.is_first and not one.is_first else []
    return lost + [(f"{name}={_plain(a)}", f"{name}={_plain(b)}") for name, a, b in pairs if _plain(a) != _plain(b)]


def _plain(value: Any) -> str:
    return f"{value.item():g}" if isinstance(value, torch.Tensor) and value.numel() == 1 else repr(value)


# -- one cause of all wrong gradients ----------------------------------------------------------------------------------


class RankGradients(NamedTuple):
    """All gradients of a rank in one step, flattened, one parameter behind the other; nan where not known."""

    wanted: torch.Tensor  # its parts of one device's
    plain: torch.Tensor  # the same, when one device's backward ended
    bounds: torch.Tensor  # of rounding, per element of `wanted`
    taken: torch.Tensor  # by its optimizer
    raw: torch.Tensor  # when its backward ended
    weights: torch.Tensor  # before the step

    @staticmethod
    def cause_of(ranks: Mapping[int, RankGradients], mesh: Layout) -> tuple[str, str] | None:
        """Return one cause of all wrong gradients, and a remedy, if one explains them within rounding."""
        sizes = {name: size for name, size in zip(mesh.alias_name, mesh.mesh_shape, strict=True) if size > 1}
        ways = [axes for count in range(len(sizes) + 1) for axes in itertools.combinations(sizes, count)]
        copies, every = [math.prod(sizes[name] for name in axes) for axes in ways], list(ranks.values())
        clipped = itertools.chain.from_iterable(
            (_clipped_apart(ranks, mesh, axes), _clipped_by_value(ranks, mesh, axes)) for axes in ways
        )
        return next(filter(None, clipped), None) or _off_by_weights(every, copies) or _off_by_factor(every, copies)


def _off_by_factor(ranks: Sequence[RankGradients], copies: Sequence[int]) -> tuple[str, str] | None:
    """Say so if all gradients are the right ones times one number, which is no number of ranks."""
    factor = _multiple([(each.taken, each.wanted, each.bounds) for each in ranks])
    if not factor or any(math.isclose(max(factor, 1 / factor), count, rel_tol=_ALIKE) for count in copies):
        return None
    words = f"all gradients are {factor:.4g} times what they should be"
    own = _multiple([(each.wanted, each.plain, each.bounds) for each in ranks])
    if not own or math.isclose(own, 1, rel_tol=_ALIKE):
        return words, "one scale of losses, or of gradients, on the ranks and on one device"
    words += f": one device multiplies its own by {own:.4g} after backward, and the ranks by {factor * own:.4g}"
    return words, "unscale and clip on the ranks as one device does: divide by the scale first, then clip"


def _off_by_weights(ranks: Sequence[RankGradients], copies: Sequence[int]) -> tuple[str, str] | None:
    """Say so if what is wrong with the gradients are the weights, or their signs, times one number."""
    for power, words in (1, "the weights"), (0, "the signs of the weights"):
        odd = [gap(each.taken, each.wanted) > 2 * each.bounds for each in ranks]
        bases = [each.weights.sign() * each.weights.abs() ** power * at for each, at in zip(ranks, odd, strict=True)]
        both = list(zip(ranks, bases, strict=True))
        off = _multiple([(each.taken - each.wanted, base, each.bounds) for each, base in both])
        if off is None or max(int(base.count_nonzero()) for base in bases) < _FEWEST:
            continue
        own = _multiple([(each.wanted - each.plain, base, each.bounds) for each, base in both])
        hint = "add a decay or a penalty of the weights once: after the sum over ranks, or 1/ranks of it on each"
        if not own:
            return f"the gradients are off by {off:.4g} times {words}: by a decay or a penalty of the weights", hint
        times = round(1 + off / own, 6)
        if not times:
            return f"the gradients lack the decay of one device, which is {own:.4g} times {words}", hint
        words = f"{times:.4g} times the decay of one device, which is {own:.4g} times {words}"
        is_each = any(math.isclose(times, count, rel_tol=_ALIKE) for count in copies)
        return f"the gradients have {words}{': each rank adds it before the sum' * is_each}", hint
    return None


def _clipped_apart(ranks: Mapping[int, RankGradients], mesh: Layout, axes: Sequence[str]) -> tuple[str, str] | None:
    """Say so if each rank clips by the norm of its own gradients, before they are reduced over some axes, if any."""
    factors, pairs = dict[int, float](), []
    for rank, own in ranks.items():
        group = ranks_along(mesh, axes, rank)
        raws = [ranks[each].raw for each in group if each in ranks]
        is_known = all(len(each) == len(own.taken) and bool(each.isfinite().all()) for each in (*raws, own.taken))
        if len(raws) < len(group) or not is_known:
            return None
        step = max(1, len(own.taken) // _ELEMENTS)
        columns, taken = torch.stack([each[::step] for each in raws], 1), own.taken[::step]
        found = torch.linalg.lstsq(columns, taken[:, None]).solution.flatten()
        few = ROUNDINGS * len(group) * unit_roundoff(taken.dtype) * max(magnitude(taken), magnitude(columns))
        if not top(gap(columns @ found, taken)) <= few:
            return None
        factors[rank] = float(found[group.index(rank)])
        pairs.append((own.wanted, functools.reduce(torch.add, raws), own.bounds))
    raw = {rank: own.raw for rank, own in ranks.items()}
    if _multiple(pairs) is None or not any(_are_of_one_limit(factors, raw, times) for times in {1, len(group)}):
        return None
    over = " and ".join(map(repr, axes))
    norms = ", ".join(f"{float(each.norm()):.4g} on rank {rank}" for rank, each in list(raw.items())[:_MOST_SAID])
    if not axes:
        hint = "clip by one norm, with the squares of all ranks added up"
        return f"each rank clips by the norm of its own parts, not of all: {norms}", hint
    words = f"each rank clips its gradients by their own norm, before they are reduced over {over}: {norms}"
    return words, f"clip after the all_reduce over {over}"


def _clipped_by_value(ranks: Mapping[int, RankGradients], mesh: Layout, axes: Sequence[str]) -> tuple[str, str] | None:
    """Explain gradients that each rank clips by value before their reduction over some axes, e.g. with DDP's hooks.

    The limit is the largest gradient of one device, which clips after the reduction.
    """
    limit = max((magnitude(each.wanted) for each in ranks.values()), default=0.0)
    times: set[float] = set()
    is_clipped = False
    for rank, own in ranks.items() if axes and limit else ():
        group = ranks_along(mesh, axes, rank)
        raws = [ranks[each].raw for each in group if each in ranks and len(ranks[each].raw) == len(own.taken)]
        if len(raws) < len(group) or not all(bool(each.isfinite().all()) for each in raws):
            return None
        is_clipped = is_clipped or max(map(magnitude, raws)) > limit
        factor = _multiple([(own.taken, torch.stack(raws).clamp(-limit, limit).sum(0), own.bounds)])
        times.add(round(factor * len(group), 6) if factor else 0.0)
    if not is_clipped or times not in ({1.0}, {float(len(group))}):
        return None
    over = " and ".join(map(repr, axes))
    words = f"each rank clips its gradients by value, to {limit:.4g}, before they are reduced over {over}"
    return words, f"clip after the all_reduce over {over}"


def _multiple(pairs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> float | None:
    """Return the number of times that the first of each pair is the second, within bounds; None: there is none."""
    square = sum(float(base.square().sum()) for _, base, _ in pairs)
    factor = sum(float((each * base).sum()) for each, base, _ in pairs) / square if square else 0.0
    slack = 2 * max(1.0, abs(factor))
    return factor if all(bool((gap(each, base * factor) <= slack * most).all()) for each, base, most in pairs) else None


def _are_of_one_limit(factors: Mapping[int, float], raw: Mapping[int, torch.Tensor], times: int) -> bool:
    """Return True if so many times each factor is the one that brings a rank's norm down to a limit of all."""
    norms = {rank: float(each.norm()) for rank, each in raw.items()}
    few = _ALIKE + max(64 * unit_roundoff(each.dtype) for each in raw.values())
    few += 1e-6 / max(min(norms.values()), 1e-6)  # torch.nn.utils.clip_grad_norm_ adds that to the norm
    own = {rank: factor * times for rank, factor in factors.items()}
    if max(own.values()) > 1 + few or max(own.values()) - min(own.values()) <= 2 * few:
        return False
    limits = [factor * norms[rank] for rank, factor in own.items() if factor < 1 - few]
    most = min(limits) * (1 + few)  # of one rank alone it is any number; one such as 0.5 is no accident
    is_plain = len(limits) > 1 or math.isclose(limits[0], float(f"{limits[0]:.2g}"), rel_tol=few)
    return is_plain and max(limits) <= most and all(norms[rank] <= most for rank in own if own[rank] >= 1 - few)
