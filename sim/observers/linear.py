"""The operations of torch that are linear in a partial sum, and so commute with its reduction.

`relu(a) + relu(b)` is not `relu(a + b)`, but `2 * a + 2 * b` is `2 * (a + b)`. The table is of names of ATen
operations; one that is not in it counts as not linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter

__all__ = ["Mark", "Misuse", "follow"]


class Mark(NamedTuple):
    """What a tensor is a part of: a reduction over axes, and where it was taken."""

    reduction: str
    axes: tuple[str, ...]
    ranks: int
    line: str

    def is_like(self, other: Mark) -> bool:
        """Whether the sum of the two is a part of the same kind."""
        return (self.reduction, self.axes, self.ranks) == (other.reduction, other.axes, other.ranks)

    def __str__(self) -> str:
        axes = ", ".join(map(repr, self.axes))
        return f"{self.reduction} over {'axis' if len(self.axes) == 1 else 'axes'} {axes} ({self.ranks} ranks)"


MarkOf = Callable[[torch.Tensor], Mark | None]


class Misuse(Exception):
    """Why an operation must not be called on a part."""


# fmt: off
# They look at sizes and strides only, or write what does not depend on what was there; or they only look at values.
_UNRELATED = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_same_size", "sym_size", "sym_stride", "sym_numel",
    "sym_storage_offset", "record_stream", "is_pinned", "is_set_to", "equal", "_local_scalar_dense", "fill_", "random_",
    "uniform_", "normal_", "bernoulli_", "exponential_",
})
# They move elements, or copies of them, and put zeros elsewhere: right for parts of any reduction.
_MOVES = frozenset({
    "clone", "contiguous", "flip", "roll", "repeat", "index", "index_select", "gather", "take", "_unsafe_view",
    "view_copy", "permute_copy", "transpose_copy", "expand_copy", "as_strided_copy", "select_copy", "slice_copy",
    "squeeze_copy", "unsqueeze_copy", "unfold_copy", "detach_copy", "split_with_sizes_copy", "_pin_memory",
})
# They are linear in their first argument, and their other tensors are indices.
_LINEAR = frozenset({
    "neg", "sum", "mean", "cumsum", "tril", "triu", "trace", "constant_pad_nd", "conj_physical", "select_backward",
    "slice_backward", "diagonal_backward", "unfold_backward", "embedding", "embedding_dense_backward", "zero",
    "_foreach_neg", "_foreach_zero",
})
# The product of two of their arguments: one may be partial.
_PRODUCTS = {
    "mul": (0, 1), "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1), "linear": (0, 1),
    "matmul": (0, 1), "outer": (0, 1), "_foreach_mul": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2),
    "addbmm": (1, 2), "addcmul": (1, 2), "_foreach_addcmul": (1, 2),
}
_WITH_BIAS = {"addmm": 0, "baddbmm": 0, "addmv": 0, "addbmm": 0, "addcmul": 0, "_foreach_addcmul": 0, "linear": 2}
# The sum of two of their arguments, or one or the other by element: both are parts of the same, or zero.
_SUMS = {
    "add": (0, 1), "sub": (0, 1), "rsub": (0, 1), "_foreach_add": (0, 1), "_foreach_sub": (0, 1), "index_add": (0, 3),
    "scatter_add": (0, 3), "where": (1, 2), "masked_fill": (0, 2),
}
_QUOTIENTS = frozenset({"div", "_foreach_div"})
_COLLECTIONS = frozenset({"cat", "stack"})
_COPIES = frozenset({"copy_", "_foreach_copy_", "copy", "_to_copy"})
# fmt: on


def follow(func: Any, args: Sequence[Any], kwargs: dict[str, Any], mark_of: MarkOf) -> Mark | None:
    """Say what the result of an operation is a part of; None: of nothing.

    Args:
        func: The overload of an ATen operation, some of whose tensors are parts.
        args: Its arguments.
        kwargs: Its keyword arguments.
        mark_of: What a tensor is a part of.

    Raises:
        Misuse: It is not linear in its parts.
    """
    name = func._opname
    if name in _UNRELATED:
        return None
    if name in _COPIES:
        return _copy(name, args, kwargs, mark_of)
    if _is_view(func) or name in _MOVES:
        return _of_first(name, args, kwargs, mark_of)
    if name in _COLLECTIONS:
        return _sum_of(name, list(tree_iter(args[0])), mark_of)
    plain = name.removesuffix("_")
    marks = [mark for leaf in tree_iter((args, kwargs)) if (mark := _mark(leaf, mark_of)) is not None]
    if marks[0].reduction not in ("sum", "avg"):
        raise Misuse(f"{name} of parts is not part of a {marks[0].reduction}")
    if plain in _LINEAR:
        return _of_first(name, args, kwargs, mark_of)
    if plain in _QUOTIENTS:
        return _quotient(name, args, kwargs, mark_of)
    if plain in _SUMS:
        return _sum(plain, name, args, mark_of)
    if plain in _PRODUCTS:
        return _product(plain, name, args, mark_of)
    raise Misuse(f"{name} is not linear")


def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def _mark(value: Any, mark_of: MarkOf) -> Mark | None:
    return mark_of(value) if isinstance(value, torch.Tensor) else None


def _of_all(value: Any, mark_of: MarkOf) -> Mark | None:
    return next((mark for leaf in tree_iter(value) if (mark := _mark(leaf, mark_of)) is not None), None)


def _of_first(name: str, args: Sequence[Any], kwargs: dict[str, Any], mark_of: MarkOf) -> Mark | None:
    """The mark of the first argument; the others must have none."""
    if _of_all((args[1:], kwargs), mark_of) is not None:
        raise Misuse(f"{name} takes a part where it needs a value")
    if name == "constant_pad_nd" and len(args) > 2 and args[2] != 0:
        raise Misuse(f"{name} puts {args[2]} next to it on every rank, which is counted once per rank")
    return _of_all(args[0], mark_of)


def _is_zero(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_meta and not bool(value.any())
    return isinstance(value, (int, float, complex)) and value == 0


def _sum_of(name: str, terms: Sequence[Any], mark_of: MarkOf) -> Mark | None:
    """The mark of a sum, or of a collection: all have the same one, or are zero."""
    marks = [_mark(term, mark_of) for term in terms]
    first = next((mark for mark in marks if mark is not None), None)
    if first is None:
        return None
    for term, mark in zip(terms, marks, strict=True):
        if mark is None and not _is_zero(term):
            raise Misuse(f"{name} puts it together with a full value, which is then counted {first.ranks} times")
        if mark is not None and not mark.is_like(first):
            raise Misuse(f"{name} puts it together with a part of another reduction: {mark}")
    return first


def _sum(plain: str, name: str, args: Sequence[Any], mark_of: MarkOf) -> Mark | None:
    terms = [args[place] for place in _SUMS[plain]]
    others = [value for place, value in enumerate(args) if place not in _SUMS[plain]]
    if _of_all(others, mark_of) is not None:
        raise Misuse(f"{name} takes a part where it needs a value")
    if isinstance(terms[0], (list, tuple)):
        return _pairwise(terms[0], terms[1], lambda a, b: _sum_of(name, [a, b], mark_of))
    return _sum_of(name, terms, mark_of)


def _quotient(name: str, args: Sequence[Any], kwargs: dict[str, Any], mark_of: MarkOf) -> Mark | None:
    if _of_all(args[1:], mark_of) is not None:
        raise Misuse(f"{name} divides by it")
    if kwargs.get("rounding_mode") is not None:
        raise Misuse(f"{name} rounds it to whole numbers")
    return _of_all(args[0], mark_of)


def _copy(name: str, args: Sequence[Any], kwargs: dict[str, Any], mark_of: MarkOf) -> Mark | None:
    """The mark of what is copied, unless its fractions are cut off."""
    source = args[0] if name == "_to_copy" else args[1]
    mark = _of_all(source, mark_of)
    target = kwargs.get("dtype") if name == "_to_copy" else getattr(args[0], "dtype", None)
    fractions = isinstance(source, torch.Tensor) and (source.is_floating_point() or source.is_complex())
    if mark is not None and fractions and target is not None and not (target.is_floating_point or target.is_complex):
        raise Misuse(f"{name} rounds it to whole numbers")
    return mark


def _product(plain: str, name: str, args: Sequence[Any], mark_of: MarkOf) -> Mark | None:
    one, other = (args[place] for place in _PRODUCTS[plain])
    if isinstance(one, (list, tuple)):
        mark = _pairwise(one, other, lambda a, b: _one_factor(name, a, b, mark_of))
    else:
        mark = _one_factor(name, one, other, mark_of)
    place = _WITH_BIAS.get(plain)
    bias = args[place] if place is not None and place < len(args) else None
    if bias is None:
        return mark
    if mark is None:  # the product is a full value, and a part is added to it
        raise Misuse(f"{name} adds to it a product of full values, which is then counted once per rank")
    for term in tree_iter(bias):
        held = _mark(term, mark_of)
        if held is None and not _is_zero(term):
            raise Misuse(f"{name} adds a bias in full, which is then counted {mark.ranks} times")
    return mark


def _one_factor(name: str, one: Any, other: Any, mark_of: MarkOf) -> Mark | None:
    mine, theirs = _mark(one, mark_of), _mark(other, mark_of)
    if mine is not None and theirs is not None:
        raise Misuse(f"{name} multiplies two parts")
    return mine or theirs


def _pairwise(one: Sequence[Any], other: Any, rule: Callable[[Any, Any], Mark | None]) -> Mark | None:
    others = other if isinstance(other, (list, tuple)) else [other] * len(one)
    marks = [rule(a, b) for a, b in zip(one, others, strict=True)]
    return next((mark for mark in marks if mark is not None), None)
