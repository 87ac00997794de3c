"""The rounding bound of a whole computation, measured and not guessed: the same run with every op off by its rounding.

    with Perturbed(seed=1):                     # Monte Carlo arithmetic
        loss = model(x).sum()
        loss.backward()

Each op of the run gets inputs and results that are changed, at random, by as much as the op's own rounding can. How
far the outcome moves is how far any other order of the same sums can move it: on other shards, other ranks, another
device. (Parker 1997, "Monte Carlo Arithmetic", UCLA CSD-970002; here with the worst-case sizes of Higham's backward
error bounds instead of one rounding per operation, for an op is a black box whose order of summation is unknown.)
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from hyper_parallel.core.common.errors import InvalidValue
from sim.ops import PLAIN, Level, OnOperations, Proceed, tensors_of
from sim.prove.evidence import gap, largest, top, unit_roundoff

__all__ = ["AtenCall", "DoubleGroupedProducts", "Perturbed", "Rounding", "SAFETY", "deviation", "rounding_of"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ONCE = _words(
    "add sub rsub mul div true_divide sqrt rsqrt reciprocal exp exp2 log log2 tanh sigmoid sin cos pow square"
)
"""Elementwise ops whose result is the exact one, rounded (to a few units at most)."""

_EXACT = _words(
    """
    _foreach_copy _local_scalar_dense _reshape_alias _to_copy _unsafe_view abs alias amax amin arange argmax argmin
    argsort as_strided as_strided_scatter bitwise_and bitwise_not bitwise_or bucketize cat ceil clamp clamp_max
    clamp_min clone complex conj constant_pad_nd contiguous copy copysign detach diag_embed diagonal_scatter embedding
    empty_like eq equal erase fill flip floor full_like gather ge glu_jvp gt hardtanh hardtanh_backward heaviside histc
    index index_copy index_fill index_select isfinite isinf isnan isneginf isposinf kthvalue le lift lift_fresh
    logical_and logical_not logical_or logical_xor lt masked_fill masked_scatter masked_select max
    max_pool2d_with_indices max_pool2d_with_indices_backward maximum median min minimum mode nan_to_num narrow_copy ne
    neg new_empty new_empty_strided new_full new_ones new_zeros nonzero ones_like permute_copy relu repeat
    repeat_interleave resize roll round scalar_tensor searchsorted select_backward select_scatter set sgn sign signbit
    slice_backward slice_scatter sort split_copy split_with_sizes_copy stack take t_copy threshold threshold_backward
    topk
    transpose_copy tril triu trunc unique_consecutive unsafe_split unsafe_split_with_sizes view_copy where zero
    zeros_like
    """
)
"""Ops that move, choose or compare numbers, or change their sign, and round nothing."""

_CONTRACTIONS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "linear", "matmul", "inner", "_grouped_mm"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"), 1),
}
"""Matrix products, and which argument's last dim is summed over."""

_ALONG_DIM = _words(
    """
    sum nansum mean prod var std var_mean std_mean norm linalg_vector_norm logsumexp cumsum cumprod logcumsumexp
    _softmax_backward_data _log_softmax_backward_data
    """
)

# The running statistics of batch norm: the schema of the older operator does not say that it writes them.
_WRITTEN_UNSAID = {("native_batch_norm", "running_mean"), ("native_batch_norm", "running_var")}

_WHOLE = _words(
    """
    add sub rsub mul div sum nansum cumsum prod cumprod pow square floor_divide remainder fmod mm bmm addmm mv dot
    linear matmul scatter_add index_add index_put _index_put_impl scatter_reduce addcmul
    """
)
"""Ops that round nothing where what they take and what they return is whole numbers, such as counts in floats."""

_SOFTMAX = _words("_softmax _log_softmax _safe_softmax")

_INDEXED = _words(
    """
    index_add scatter_add scatter_reduce index_reduce embedding_dense_backward _embedding_bag
    _embedding_bag_forward_only _embedding_bag_dense_backward index_put _index_put_impl _unsafe_index_put
    """
)


class AtenCall(NamedTuple):
    """One call of an ATen op: its plain name and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        """All tensor arguments, those in lists too."""
        return tensors_of(self.arguments.values())

    def tensor(self, place: int) -> torch.Tensor:
        """The tensor argument at a place."""
        return self.tensors()[place]


class Rounding(NamedTuple):
    """By how many units a call may change its inputs and its results, and be as right as the real op."""

    inputs: float
    results: float


def rounding_of(function: OpOverload, op: AtenCall) -> Rounding | None:
    """Return how a call rounds, or None if it does not.

    >>> a = torch.ones(3, 5)
    >>> rounding_of(torch.ops.aten.mm.default, AtenCall("mm", {"self": a, "mat2": a.t()}))
    Rounding(inputs=5, results=2)
    >>> rounding_of(torch.ops.aten.relu.default, AtenCall("relu", {"self": a})) is None
    True

    A computed sum of n terms is the exact sum of terms that were changed by at most n units each, and so are matrix
    products, norms and means (Higham 2002, "Accuracy and Stability of Numerical Algorithms", ch. 3 and 4); basic
    arithmetic gives the exact result changed by one unit (ch. 2). Two stand for one, because a change by less than a
    unit can be rounded away.
    """
    name = op.name
    if name in ("index_put", "_index_put_impl", "_unsafe_index_put") and not op.arguments.get("accumulate"):
        return None
    if name == "scatter" and not op.arguments.get("reduce"):
        return None
    if name in _EXACT or function.is_view:
        return None
    if name in _SOFTMAX:  # each exponential is right; the sum that divides them all need not be
        return Rounding(2, max(2, _along_dim(op)))
    terms = _terms(op)
    if terms is not None:
        return Rounding(max(2, terms), 2)
    if torch.Tag.nondeterministic_seeded in function.tags:
        return None
    if name in _ONCE and op.arguments.get("alpha", 1) == 1:
        return Rounding(0, 2)
    if torch.Tag.pointwise in function.tags:
        return Rounding(2, 2)
    return Rounding(max((size for tensor in op.tensors() for size in tensor.shape), default=2), 2)


def _terms(op: AtenCall) -> int | None:
    """How many terms the sums have that a call takes; None for an op that is not known to take any."""
    name = op.name
    if name in _CONTRACTIONS:
        left = op.tensor(_CONTRACTIONS[name])
        batch = left.shape[0] if name == "addbmm" else 1
        return batch * left.shape[-1] if left.ndim else 1
    if name in _ALONG_DIM:
        return _along_dim(op)
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        found = [each for each in op.tensors() if each.ndim >= 3]
        return max(each.shape[-1] + each.shape[-2] for each in found)
    if name in _INDEXED:
        return _indices(op)
    shape = op.arguments.get("normalized_shape")
    if shape is not None:  # the gradients of weight and bias are sums over everything but the normalized dims
        row = math.prod(shape)
        return max(row, _largest(op) // max(row, 1)) if "backward" in name else row
    measure: Callable[[AtenCall], int] | None = _MEASURES.get(name)
    return measure(op) if measure else None


def _along_dim(op: AtenCall) -> int:
    full = op.tensor(0)
    dims = op.arguments.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or not full.ndim or not isinstance(dims, Sequence) or isinstance(dims, str):
        return _largest(op)
    return math.prod(full.shape[dim] for dim in dims)


def _indices(op: AtenCall) -> int:
    numbers = [each for each in op.tensors() if not (each.is_floating_point() or each.is_complex())]
    return max((each.numel() for each in numbers), default=1)


def _largest(op: AtenCall) -> int:
    return max((each.numel() for each in op.tensors()), default=1)


def _convolution(op: AtenCall) -> int:
    return max(1, math.prod(op.tensor(1).shape[1:]))


def _convolution_backward(op: AtenCall) -> int:
    grad, weight = op.arguments["grad_output"], op.arguments["weight"]
    return max(grad.numel() // max(1, grad.shape[1]), weight.numel())


_MEASURES: Mapping[str, Callable[[AtenCall], int]] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _indices),  # one term per target
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        _words("""
        mse_loss binary_cross_entropy smooth_l1_loss huber_loss kl_div
        native_batch_norm _native_batch_norm_legit native_batch_norm_backward native_group_norm
        native_group_norm_backward _batch_norm_with_update batch_norm_backward trace linalg_cross
        """),
        _largest,
    ),
}


SAFETY = 16.0
"""Rounding bound = SAFETY x the largest move seen in three runs.

A move is a random number, and so is the rounding it stands for, with a standard deviation that is at least twice
smaller (results are changed by up to 2 units, not 1; terms of a sum by n units, not 1). For one number alone, such as
a loss, the largest of three moves is below 1/16 of the rounding in 2.5 of 100,000 cases, if both are normal; for a
tensor, of which the largest move of all elements counts, practically never.
"""

FEW = 8.0
"""Roundings that any tensor is granted, in units of its largest element."""

_MOST = 2.0**-4  # a change that is larger would no longer be a small one, whatever the sum's length says
_SHORTEST_NOISE = 1 << 16

# -- the same run with every op perturbed ------------------------------------------------------------------------------


class Perturbed(OnOperations):
    """Run ATen ops with inputs and results changed at random by as much as their rounding can; a context manager.

    >>> x = torch.full((4,), 0.5, dtype=torch.float64)
    >>> with Perturbed(u_floor=2**-24, seed=0):  # as if float64 had float32's roundings
    ...     moved = (x * 3 - 1.5).abs().max().item()
    >>> 0 < moved < 1e-6
    True

    Forward and backward (on CPU it runs on the calling thread), optimizer steps, in-place ops, `out=` and lists of
    tensors are covered. What only moves, chooses or compares numbers is exact and stays so, and so do random numbers,
    whole numbers, sums and products of whole numbers that floats hold, such as counts, and single-element counters
    with a whole value. Arguments are never changed, but for those that the op itself writes. An op known to take sums
    of n terms has its inputs changed by n units, a basic one its results by 2, an unknown one its inputs by the size of
    its largest dim (`sim.prove.bound`). Sums of 16-bit numbers are taken in float32, as kernels do, and rounded to 16
    bits at the end.

    Plain tensors only: what other tensor types do inside is not seen.

    Args:
        u_floor: the least unit roundoff to assume; 2**-24 lets a float64 run show the roundings of a float32 one.
            Default: that of each tensor's own dtype.
        seed: draws the changes; the same seed and ops give the same ones.

    Raises:
        ValueError: u_floor is not between 0 and 1.
    """

    order = Level.NOISE

    def __init__(self, u_floor: float | None = None, seed: int = 0) -> None:
        floor = 0.0 if u_floor is None else float(u_floor)
        if not 0 <= floor < 1:
            hint = "u_floor=2**-24, the unit roundoff of float32"
            raise InvalidValue("cannot perturb a run", "u_floor is not in [0, 1)", f"u_floor: {u_floor}", hint)
        self._floor = floor
        self._draw = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._noise: dict[torch.dtype, torch.Tensor] = {}

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Run an op with its inputs and its results changed."""
        named = kwargs
        if _signature_of(func).is_exact:
            return proceed(*args, **named)
        op, written = _read(func, args, named)
        rounding = rounding_of(func, op) if any(map(_is_real, op.tensors())) else None
        if rounding is None:
            return proceed(*args, **named)
        if op.name in _WHOLE and self._are_whole(op.tensors()):
            return self._of_whole(proceed(*args, **named), written, rounding)
        if rounding.inputs:
            changed = {
                name: value if name in written else self._inputs(value, rounding.inputs)
                for name, value in op.arguments.items()
            }
            args = tuple(changed[name] for name in _signature_of(func).arguments[: len(args)])
            named = {name: changed[name] for name in named}
        return self._finished(proceed(*args, **named), written, rounding)

    def _finished(self, result: Any, written: Mapping[str, Any], rounding: Rounding) -> Any:
        """Change what an op has returned or written."""
        for tensor in tensors_of(written.values()):
            if _is_real(tensor) and not _is_counter(tensor):
                tensor.copy_(self._moved(tensor, rounding.results))
        own = [each for each in tensors_of((result,)) if not any(each is other for other in written.values())]
        return self._results(result, rounding.results) if not written or any(map(_is_real, own)) else result

    def _of_whole(self, result: Any, written: Mapping[str, Any], rounding: Rounding) -> Any:
        """Change what an op has made of whole numbers; a count that moved would flip the comparison that follows."""
        whole = self._are_whole(tensors_of((result, *written.values())))
        return result if whole else self._finished(result, written, rounding)

    def _are_whole(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all are whole numbers, and their sum in any order too, so that no order of an op rounds."""
        for tensor in filter(_is_real, tensors):
            if tensor.is_complex() or not tensor.numel():
                return False
            flat = tensor.detach().flatten()
            if float(flat[0]) % 1:  # one number tells of most tensors
                return False
            most = 1 / max(unit_roundoff(tensor.dtype), self._floor)
            if not bool((flat == flat.round()).all()) or not float(flat.abs().sum(dtype=torch.float64)) <= most:
                return False
        return True

    def _inputs(self, value: Any, units: float) -> Any:
        """Change inputs; a tensor without dims may stand for a Python number, and those are exact."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._inputs(each, units) for each in value)
        if not _is_real(value) or not value.ndim:
            return value
        # Kernels add up 16-bit numbers in float32; but parts of a sum that lie on several ranks are rounded to 16 bits.
        own, sums = unit_roundoff(value.dtype), unit_roundoff(torch.promote_types(value.dtype, torch.float32))
        return self._moved(value, max(units * max(sums, self._floor), own, self._floor), absolute=True)

    def _results(self, value: Any, units: float) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._results(each, units) for each in value)
        if not _is_real(value) or _is_counter(value):
            return value
        return self._moved(value, units)

    def _moved(self, tensor: torch.Tensor, units: float, absolute: bool = False) -> torch.Tensor:
        """Multiply each element by its own factor in [1 - eta, 1 + eta]."""
        unit = 1.0 if absolute else max(unit_roundoff(tensor.dtype), self._floor)
        noise, size = self._slice(tensor), min(units * unit, _MOST)
        if tensor.is_complex():
            moved = tensor * noise.mul(size).add_(1)
        else:  # in one pass
            moved = torch.addcmul(tensor, tensor, noise, value=size)
        if not tensor.numel() or cmath.isfinite(moved.sum().item()):
            return moved
        return torch.where(moved.isfinite(), moved, tensor)  # the largest finite number, as in a mask, must stay finite

    def _slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers in [-1, 1] in the shape of a tensor: a piece of one long row, from a random place."""
        real = tensor.dtype.to_real()
        count, row = tensor.numel(), self._noise.get(real)
        if row is None or len(row) < 2 * count:
            length = max(_SHORTEST_NOISE, 3 * count)
            row = torch.rand(length, generator=self._generator, dtype=torch.float64).mul_(2).sub_(1).to(real)
            self._noise[real] = row
        start = self._draw.randrange(len(row) - count + 1)
        return row[start : start + count].view(tensor.shape)


class DoubleGroupedProducts(OnOperations):
    """Take grouped matrix products in float64, for which torch has no kernel, group by group; a context manager.

    >>> tokens, experts = torch.randn(5, 8).double(), torch.randn(2, 8, 8).double()
    >>> with DoubleGroupedProducts():
    ...     made = torch._grouped_mm(tokens, experts, offs=torch.tensor([2, 5], dtype=torch.int32))
    >>> torch.equal(made[2:], tokens[2:] @ experts[1])
    True

    Backward takes grouped products too, and has to run within. Plain tensors only.
    """

    order, only = Level.PRODUCTS, frozenset({torch.ops.aten._grouped_mm.default})

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Take a product."""
        given = _read(func, args, kwargs)[0].arguments
        left, right = given["self"], given["mat2"]
        if left.dtype != torch.float64 or type(left) not in PLAIN or left.is_meta:
            return proceed(*args, **kwargs)
        made = _grouped_product(left, right, given.get("offs"))
        return made if given.get("bias") is None else made + given["bias"]


def _grouped_product(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """Multiply the groups of rows, columns or summed elements that end at the offsets; zero after the last one."""
    if offs is None:
        return torch.bmm(left, right)
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if left.ndim == right.ndim == 2:
        return torch.stack([left[:, group] @ right[group] for group in groups])
    if left.ndim == 2:
        parts = [left[group] @ right[at] for at, group in enumerate(groups)]
        rest = left.new_zeros(len(left) - ends[-1], right.shape[-1])
        return torch.cat([*parts, rest])
    parts = [left[at] @ right[:, group] for at, group in enumerate(groups)]
    return torch.cat([*parts, left.new_zeros(left.shape[1], right.shape[1] - ends[-1])], 1)


def deviation(
    run: Callable[[], Mapping[str, torch.Tensor]], *, runs: int = 3, u_floor: float | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Run once plainly and a few times perturbed: the plain results, and how far each moved at most.

    >>> x = torch.linspace(0, 1, 1000)
    >>> base, moved = deviation(lambda: {"sum": x.sum()})
    >>> error = abs(base["sum"].double() - x.double().sum()).item()
    >>> error <= SAFETY * moved["sum"] < 1.0
    True

    SAFETY x the move bounds how far another order of the same computation can be off. Costs `runs` + 1 runs, the
    perturbed ones 2 to 5 times as long as the plain one. The default random generators start each run alike and are
    left as the plain run leaves them.

    Args:
        run: does the whole computation, from the same start each time, and returns the results by name.
        runs: how many perturbed runs.
        u_floor: as for `Perturbed`.

    Raises:
        ValueError: runs is below 1, or a run that returns other names or shapes than the first.
    """
    asked = "cannot measure a deviation"
    if runs < 1:
        raise InvalidValue(asked, "runs is below 1", f"runs: {runs}", "runs=3")
    start = torch.get_rng_state()
    base = {name: tensor.detach().clone() for name, tensor in run().items()}
    after = torch.get_rng_state()
    moved = dict.fromkeys(base, 0.0)
    for index in range(runs):
        torch.set_rng_state(start)
        with Perturbed(u_floor, index):
            again = {name: tensor.detach() for name, tensor in run().items()}
        for name in dict.fromkeys([*base, *again]):
            if name not in base or name not in again or base[name].shape != again[name].shape:
                seen = f"first run: {_shape(base, name)}   perturbed run: {_shape(again, name)}"
                raise InvalidValue(asked, f"the runs return different {name!r}", seen, "a run that repeats itself")
            moved[name] = max(moved[name], top(gap(again[name], base[name])))
    torch.set_rng_state(after)
    return base, moved


def largest_move(full: torch.Tensor, moved: Iterable[torch.Tensor | None]) -> float:
    """Return how far a tensor was off at most in perturbed runs, some of which may not have it; 0 of whole numbers."""
    others = [other for other in moved if other is not None and other.shape == full.shape and full.is_floating_point()]
    return max(filter(math.isfinite, [top(gap(other, full)) for other in others]), default=0.0)


def bound_of(
    full: torch.Tensor, moved: Iterable[torch.Tensor | None], dtype: torch.dtype | None = None, floor: float = FEW
) -> float:
    """Return what rounding can do to a tensor: some times what it did in perturbed runs, or a few units."""
    units = floor * unit_roundoff(dtype or full.dtype) * largest(full)
    return max(SAFETY * largest_move(full, moved), units, torch.finfo(torch.float64).tiny)


class _Signature(NamedTuple):
    """What the schema of an op says.

    Attributes:
        name: plain, as `AtenCall` has it.
        arguments: names, in order.
        writes: names of those that the op writes.
        is_exact: it rounds nothing, whatever its arguments.
    """

    name: str
    arguments: tuple[str, ...]
    writes: tuple[str, ...]
    is_exact: bool


@cache
def _signature_of(func: OpOverload) -> _Signature:
    schema, name = func._schema.arguments, func._schema.name.partition("::")[2]
    plain = name if name.startswith("__") else name.removeprefix("_foreach_").rstrip("_")
    writes = [
        each.name
        for each in schema
        if (each.alias_info is not None and each.alias_info.is_write) or (name, each.name) in _WRITTEN_UNSAID
    ]
    return _Signature(plain, tuple(each.name for each in schema), tuple(writes), plain in _EXACT or func.is_view)


def _read(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[AtenCall, dict[str, Any]]:
    """Name the arguments of a call, and pick those that it writes."""
    signature = _signature_of(func)
    given = {**dict(zip(signature.arguments, args, strict=False)), **kwargs}
    written = {name: given[name] for name in signature.writes if given.get(name) is not None}
    return AtenCall(signature.name, given), written


def _is_real(value: Any) -> bool:
    """Whether this is a plain tensor that can be changed a little: no whole numbers, no fp8, none without values."""
    if type(value) not in PLAIN or value.is_meta:
        return False
    return value.is_complex() or (value.is_floating_point() and value.element_size() > 1)


def _is_counter(tensor: torch.Tensor) -> bool:
    """Whether this is one whole number, such as an optimizer's step count: those are exact."""
    if tensor.numel() != 1 or tensor.is_complex() or tensor.is_meta:
        return False
    return float(tensor.detach()).is_integer()


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "nothing"
