"""Random numbers in a model that is compared: taken out of the computation, and looked at instead."""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from hyper_parallel.core.dtensor.layout import Layout
from sim.explain.errors import ranks_phrase
from sim.ops import Level, OnOperations, Proceed, local_part, named_arguments
from sim.prove.record import local_of, ranks_along, tensors_in
from sim.prove.report import ReportRow

_aten = torch.ops.aten

_RRELU = (_aten.rrelu_with_noise, _aten.rrelu_with_noise_)

_IN_PLACE = (
    _aten._to_copy, _aten._unsafe_view, _aten.alias, _aten.clone, _aten.detach, _aten.expand, _aten.select,
    _aten.slice, _aten.squeeze, _aten.unsqueeze, _aten.view,
)  # fmt: skip
"""Ops that leave numbers in their order, besides those that compute element by element."""

THE_STEP = "the step"
"""Stands for a module's path where a step draws outside of modules."""

DrawPlace: TypeAlias = tuple[str, str, int, int]
"""Which draw it is: the module's path, the operation, how many there were before in the step, and how many steps."""


class Draw(NamedTuple):
    """One use of random numbers.

    Attributes:
        path: the innermost module that was running.
        op: torch's name of the operation.
        shape: of what was drawn.
        state: a fingerprint of the generator before it.
        spread: for a DTensor, whose parts torch itself makes differ or agree.
        is_again: in activations that a checkpoint computes again, now or later.
    """

    path: str
    op: str
    shape: tuple[int, ...]
    state: str
    spread: bool = False
    is_again: bool = False


@dataclass
class DrawUse:
    """What becomes of random numbers.

    Attributes:
        drawn: the numbers, as they were drawn; the rank's part of a DTensor's.
        state: a fingerprint of the generator before it.
        given: what they were put on, such as the input of dropout; None where that was not seen.
        shape: of the numbers when they were put on it: another one, where a part was taken of them.
        place: which draw it is, by the names of who drew.
        spread: for a DTensor, whose parts torch itself makes differ or agree.
    """

    drawn: torch.Tensor
    state: str
    given: torch.Tensor | None = None
    shape: tuple[int, ...] = ()
    place: DrawPlace = ("", "", 0, 0)
    spread: bool = False


class NoRandomness(OnOperations):
    """Lets random operations draw as they would, and puts what they are on average in place of the result.

    So dropout does nothing, and uniform numbers are 1/2; one device and many ranks can be compared. Where both sides
    are given the same numbers, these are put in place, also where backward computes forward again: a draw from the
    same state of the generator is the same draw.

    Args:
        path: returns the module that is running.
        shared: numbers for forward, of the shape that is drawn.

    Attributes:
        draws: of the step's forward.
        again: of forwards that backward repeats in the step, as activation checkpointing does.
        uses: what became of the numbers, in all steps.
        repeats: whether backward has repeated a draw in any step.
        is_misfit: what was drawn has another shape than what is shared.
        bare: where numbers are drawn that nothing is put in place of, and by which operation.
    """

    order = Level.DRAWS

    def __init__(self, path: Callable[[], str], shared: Mapping[DrawPlace, torch.Tensor] | None = None) -> None:
        self.path = path
        self.draws: list[Draw] = []
        self.again: list[Draw] = []
        self.uses: dict[DrawPlace, DrawUse] = {}
        self.repeats = self.is_misfit = False
        self.bare: dict[str, None] = {}
        self._shared = shared or {}
        self._counts: dict[tuple[str, str, int], int] = {}
        self._by_state: dict[tuple[str, tuple[int, ...], str], torch.Tensor] = {}
        self._followed: list[tuple[torch.Tensor, DrawUse]] = []  # random numbers that were put on nothing yet

    @property
    def number_of_step(self) -> int:
        """How many steps came before; a loop counts them."""
        return 0

    def next_step(self) -> None:
        """Forget the draws of the step that is over."""
        self.draws, self.again = [], []
        self._followed.clear()

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Carry out an operation, without what is random of it."""
        if func is _aten.native_dropout_backward.default and args[2]:
            args = (*args[:2], 1.0)  # all that forward has let through as it is
        if not is_random(func):
            return self._follow(func, args, kwargs, proceed) if self._followed else proceed(*args, **kwargs)
        if func.overloadpacket in _RRELU:
            return self._rrelu(func, types, args, kwargs)
        if mean_of(func) is None:
            return self._bare(func, args, kwargs)
        result = self._drawn(func, types, args, kwargs)
        with torch.no_grad():
            if isinstance(result, torch.Tensor):
                numbers = self._numbers(func.overloadpacket.__name__, result)
                if numbers is not None:
                    local_part(result).copy_(numbers)
                    return result
            return put_mean(func, result, args, kwargs)

    def _bare(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Carry out an operation that has no mean, and note where it draws."""
        before = _fingerprint(kwargs.get("generator"))
        result = func(*args, **kwargs)
        if _fingerprint(kwargs.get("generator")) != before:
            self.bare[f"{self.path() or 'the model'} ({func.overloadpacket.__name__})"] = None
        return result

    def _rrelu(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiply what is below 0 by slopes, drawn as uniform numbers are, and leave what each was multiplied by."""
        given = named_arguments(func, args, kwargs)
        if not given["training"]:
            return func(*args, **kwargs)
        x, noise = given["self"], given["noise"]
        bounds = (torch.empty_like(x), float(given["lower"]), float(given["upper"]))
        draw, times = _aten.uniform_.default, _aten.mul.Tensor
        slopes = self.handle(draw, types, bounds, {"generator": given["generator"]}, draw)
        if self._followed:
            self._follow(times, (x, slopes), {}, times)
        noise.copy_(torch.where(x > 0, 1.0, slopes))
        out = x if func is _aten.rrelu_with_noise_.default else given.get("out")
        return x * noise if out is None else out.copy_(x * noise)

    def _numbers(self, op: str, result: torch.Tensor) -> torch.Tensor | None:
        """Return what is shared of a draw that has just been made; None: nothing."""
        draw = self._last
        alike = (op, draw.shape, draw.state)
        if torch._C._current_graph_task_id() != -1:
            return self._by_state.get(alike)
        kind = (draw.path, op, self.number_of_step)
        number = self._counts[kind] = self._counts.get(kind, -1) + 1
        place = (draw.path, op, number, self.number_of_step)
        part = local_part(result)
        use = self.uses[place] = DrawUse(part.clone(), draw.state, place=place, spread=draw.spread)
        self._followed.append((result, use))
        numbers = self._shared.get(place)
        if numbers is not None and numbers.shape != part.shape:
            self.is_misfit, numbers = True, None
        if numbers is not None:
            self._by_state[alike] = numbers
        return numbers

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], proceed: Proceed) -> Any:
        """Carry out an operation, and see what it puts random numbers on."""
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        index = next((at for at, (tensor, _) in enumerate(self._followed) if any(tensor is x for x in given)), None)
        if index is None or torch._C._current_graph_task_id() != -1:
            return proceed(*args, **kwargs)
        numbers, use = self._followed[index]
        random = {id(tensor) for tensor, _ in self._followed}
        others = [each for each in given if id(each) not in random and each.dim() and each.is_floating_point()]
        other = max(others, key=torch.Tensor.numel, default=numbers)
        is_scaled = torch.Tag.pointwise in func.tags and other.numel() < numbers.numel()  # such as by row, before
        if other is not numbers and not is_scaled:
            del self._followed[index]
            if use.given is None and _broadcasts(numbers, other):
                use.given, use.shape = local_of(other).clone(), tuple(local_part(numbers).shape)
            return proceed(*args, **kwargs)
        result = proceed(*args, **kwargs)
        if func.overloadpacket not in _IN_PLACE and torch.Tag.pointwise not in func.tags:
            del self._followed[index]  # such as a transpose, after which they lie elsewhere
        elif isinstance(result, torch.Tensor) and result is not numbers:
            self._followed.append((result, use))
        return result

    def noted(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Carry out an operation as it is; if it is random, note that it draws."""
        return self._drawn(func, types, args, kwargs) if mean_of(func) is not None else func(*args, **kwargs)

    def _drawn(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        spread = any(issubclass(kind, DTensor) for kind in types)
        state = _fingerprint(kwargs.get("generator"))
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        # Backward itself is not differentiated, what it repeats is.
        in_backward = torch._C._current_graph_task_id() != -1
        kept = self.draws if not in_backward else self.again if torch.is_grad_enabled() else []
        self.repeats = self.repeats or kept is self.again
        self._last = Draw(
            self.path(), func.overloadpacket.__name__, tuple(first.shape), state, spread, _is_checkpointed()
        )
        kept.append(self._last)
        return result


def bare_words(modes: Iterable[Any]) -> list[str]:
    """Say where random numbers are neither at their mean nor the same on both sides."""
    places = ", ".join(dict.fromkeys(place for mode in modes for place in mode.bare))
    return [f"random numbers of {places} are drawn as they are, by each for itself"] if places else []


def masks_problem(
    draws: Sequence[Draw], full: tuple[int, ...], mesh: Layout, split: Sequence[str], rows: Sequence[str] = ()
) -> tuple[str, str] | None:
    """Say what is wrong with the random numbers that the ranks drew at one place, and what to do; None: nothing.

    >>> tp = Layout((2,), ("tp",))
    >>> same = Draw("mlp.drop", "bernoulli_", (4,), "a")
    >>> masks_problem([same, same], (8,), tp, ["tp"])[0]
    'bernoulli_ draws the same numbers on ranks 0-1, which hold different parts over tp'
    >>> masks_problem([same, same._replace(state="b")], (8,), tp, ["tp"])
    >>> masks_problem([same, same._replace(state="b")], (4,), tp, [])[0]
    'bernoulli_ draws different numbers on ranks 0-1, which hold the same over tp'

    What is drawn once for all rows, such as a number by which a layer is left out, ranks may draw for theirs.

    >>> masks_problem([same._replace(shape=()), same._replace(shape=(), state="b")], (), tp, ["tp"], ["tp"])

    Args:
        draws: one per rank.
        full: the shape of what one device draws there.
        mesh: all ranks.
        split: the axes over which the module's input is split, as far as that is known.
        rows: those of them that split its first dim.
    """
    parts = _split_axes(draws[0].shape, full, mesh, split)
    if parts is None:
        return None
    own = set(rows) if draws[0].shape == full else set()
    for name, size in zip(mesh.alias_name, mesh.mesh_shape, strict=True):
        if size == 1 or name in own:
            continue
        for rank in mesh.rank_list:
            line = ranks_along(mesh, (name,), rank)
            states = {draws[other].state for other in line}
            if name in parts and len(states) < len(line):
                what = f"draws the same numbers on {ranks_phrase(line)}, which hold different parts over {name}"
                return f"{draws[0].op} {what}", f"a seed that differs along {name} for it"
            if name not in parts and len(states) > 1:
                what = f"draws different numbers on {ranks_phrase(line)}, which hold the same over {name}"
                return f"{draws[0].op} {what}", f"the same seed on all ranks along {name}"
    return None


def redrawn(draws: Sequence[Draw], again: Sequence[Draw]) -> Draw | None:
    """Return the first draw of forward that a recomputation has repeated with other numbers; None: there is none.

    >>> drop = Draw("mlp.drop", "native_dropout", (4,), "a")
    >>> redrawn([drop], [drop._replace(path="")]) is None
    True
    >>> redrawn([drop], [drop._replace(path="", state="b")]).path
    'mlp.drop'

    Args:
        draws: of forward.
        again: of what backward has repeated of it, in any order; with the path "" where that is not known.
    """
    states, repeated = {draw[1:5] for draw in draws}, {draw[1:5] for draw in again}
    odd = {draw[:3] for draw in again if draw[1:5] not in states}
    like = [draw for draw in draws if draw[:3] in odd or ("", *draw[1:3]) in odd]
    like = [draw for draw in like if draw.is_again] or like  # others draw once, whatever comes after them
    return next((draw for draw in like if draw[1:5] not in repeated), like[0] if like else None)


def redrawn_row(one: Draw | None, ranks: Sequence[Draw | None]) -> ReportRow | None:
    """Say where a recomputation in backward draws other random numbers than forward did; None: nowhere."""
    odd = [rank for rank, draw in enumerate(ranks) if draw is not None]
    draw = one or next((draw for draw in ranks if draw is not None), None)
    if draw is None:
        return None
    where = [*(["one device"] if one is not None else []), *([ranks_phrase(odd)] if odd else [])]
    sentence = f"backward computes it again with other random numbers, on {' and '.join(where)}"
    hint = "checkpoint(..., preserve_rng_state=True)"
    return ReportRow(draw.path, draw.op.rstrip("_"), "random", verdict="bug", sentence=sentence, suggestion=hint)


def _split_axes(
    local: tuple[int, ...], full: tuple[int, ...], mesh: Layout, split: Sequence[str]
) -> tuple[str, ...] | None:
    """Return the axes over which a tensor of some local size is split; None where that is not certain."""
    sizes = {name: size for name, size in zip(mesh.alias_name, mesh.mesh_shape, strict=True) if size > 1}
    if not math.prod(local):
        return None
    times = math.prod(full) / math.prod(local)
    fits = [
        chosen
        for number in range(len(sizes) + 1)
        for chosen in itertools.combinations(sizes, number)
        if math.prod(sizes[name] for name in chosen) == times
    ]
    given = {name for name in split if name in sizes}
    near = [chosen for chosen in fits if given <= set(chosen)] or [chosen for chosen in fits if set(chosen) <= given]
    return near[0] if len(near) == 1 else None


def _broadcasts(numbers: torch.Tensor, to: torch.Tensor) -> bool:
    """Whether numbers can be put on a tensor as they are, each on one element or on several."""
    sizes = itertools.zip_longest(reversed(numbers.shape), reversed(to.shape), fillvalue=1)
    return numbers.dim() <= to.dim() and all(size in (1, full) for size, full in sizes)


def _is_checkpointed() -> bool:
    """Whether a function that torch's activation checkpointing computes again is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def _fingerprint(generator: torch.Generator | None) -> str:
    state = (generator or torch.default_generator).get_state()
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


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
    """
    return _MEANS[func.overloadpacket](result, named_arguments(func, args, kwargs))


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
    """Dropout of devices in one operation returns what is left, and the mask that backward multiplies by."""
    out, mask = result
    chance, x = given["p"], given["input"] if "input" in given else given["self"]
    return out.copy_(x).mul_(float(chance < 1)), mask.fill_(True)


def _normal(result: torch.Tensor, given: _Given) -> torch.Tensor:
    return _filled(result, given.get("mean", 0.0))


def _whole(result: torch.Tensor, given: _Given) -> torch.Tensor:
    """The middle of what `randint` and `random_` draw from; 0 where they draw from all that their dtype has."""
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    return result.fill_(0 if high is None else (int(low) + int(high) - 1) // 2)


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
    _aten.randperm: lambda result, given: result.copy_(torch.arange(len(result))),
    _aten.multinomial: _chosen,
}
