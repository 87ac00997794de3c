"""Hand-written parallel code on local tensors inside a sharded model: `custom_shard`.

It follows torch's `local_map`, with these differences: inputs are redistributed, ambiguous gradients are errors, each
gradient takes one communication, and shards may be uneven.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from hyper_parallel.core.common.checks import check, check_shape
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.boundaries import ArgumentLayout, Arguments, spread
from hyper_parallel.core.shard.entry_exit import agreed_shape, enter, leave
from hyper_parallel.core.shard.local_module import resolved
from hyper_parallel.core.shard.spelling import LayoutTree, describe, layout_on, leaves, map_tree, read_layouts


def custom_shard(
    fn: Callable[..., Any],
    device_mesh: DeviceMesh,
    in_layouts: Any,
    out_layouts: Any,
    *,
    out_shapes: Any = None,
    in_grad_layouts: Any = None,
) -> Callable[..., Any]:
    """Make a function of DTensors that runs `fn` on this rank's shards.

        def rows_times_columns(x, w):  # w: this rank's rows of the weight
            return x @ w

        matmul = custom_shard(
            rows_times_columns,
            mesh,
            [("dp", "tp"), ("tp", "None")],
            Layout.from_device_mesh(mesh)("dp", "None", partial={"tp": "sum"}),
            out_shapes=lambda x, w: (x.shape[0], w.shape[1]),
        )
        y = matmul(x, w)

    DTensors are redistributed to their layouts, and `fn` gets this rank's shards of them; other arguments pass
    unchanged. The outputs become DTensors in the same container. If no argument with a layout is a DTensor, the outputs
    are returned unchanged, because the same function then runs on one device.

    Gradients. Over each axis of the mesh, the gradient of an input's shard is

    | the input is, over the axis | and the outputs | its gradient is |
    |---|---|---|
    | split | | the shard's |
    | pending as a sum | | the full one, equal on all ranks |
    | replicated | are all replicated | the full one: the ranks repeat the same work |
    | replicated | are all split or pending | to be added: each rank has done a share of the work |
    | replicated | differ in this | refused before `fn` runs, unless `in_grad_layouts` has it |

    Gradients of a pending average are added; a pending max, min or prod is refused. Outputs without a layout are
    ignored here, and are refused afterwards if they require a gradient that depends on the table. Each rank gets the
    full gradient of a replicated output and of a pending sum. The table covers arguments only, so pass weights
    as arguments.

    Communication, forward: one redistribution per input in another layout, and one exchange of shapes per split output
    without `out_shapes`. Backward: one redistribution per input, from the layout in the table to the input's layout,
    and one per output whose gradient arrives in another layout.

    Args:
        fn: the code for one rank.
        device_mesh: the mesh of all layouts.
        in_layouts: as in `ShardingPlan`: one layout, for the first argument; a list by position; or a dict by name.
            None: the argument is passed unchanged, even a DTensor.
        out_layouts: one layout; a list if `fn` returns a list or tuple; a dict if it returns a mapping. None: the
            output is returned unchanged.
        out_shapes: full sizes of the outputs, in elements: one shape, or a list or dict of shapes nested as
            `out_layouts`; or a function of the original arguments that returns these. None, also for one of several:
            the ranks exchange the shapes of their shards.
        in_grad_layouts: layouts of gradients, nested as `in_layouts`, where the table refuses or is wrong: split as the
            input, and e.g. `partial={"tp": "sum"}` where gradients are added. None: as in the table.

    Raises:
        TypeError: fn is not callable; `device_mesh` is no mesh; an output with a layout is no plain tensor.
        ValueError: layouts that cannot be read, that do not fit, or that are for missing arguments; a gradient that is
            refused; outputs that are nested differently from their layouts, or that have another shape than
            declared.
    """
    asked = f"cannot run {_name(fn)} on local shards"
    check(asked, "callable", "a function of local tensors", fn=fn)
    base = layout_on(device_mesh)
    outs = _own(read_layouts(f"{asked} (out_layouts)", out_layouts, base))
    ins = _read_inputs(asked, Arguments.of(fn), base, in_layouts, in_grad_layouts, list(leaves(outs)))
    code = _Code(asked, fn, ins, outs, out_shapes)
    return functools.wraps(fn, updated=())(lambda *args, **kwargs: code(args, kwargs))


class _Input(NamedTuple):
    """Layouts of one input and of its gradient.

    Attributes:
        layout: the target layout.
        grad_layout: layout of the shards' gradients; None: ambiguous or unknown.
        unclear: axes over which the gradient is ambiguous.
        by_rule: True if the outputs' layouts decide `grad_layout` over some axis.
    """

    layout: Layout
    grad_layout: Layout | None
    unclear: tuple[str, ...]
    by_rule: bool


@dataclass(frozen=True)
class _Inputs:
    """The places of the inputs, and their `_Input`s by layout id, because equal layouts can have different ones."""

    places: Sequence[ArgumentLayout]
    known: Mapping[int, _Input]


@dataclass(frozen=True)
class _Code:
    """A function with the layouts of its inputs and outputs."""

    asked: str
    fn: Callable[..., Any]
    inputs: _Inputs
    outputs: LayoutTree
    shapes: Any

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and any(known.unclear for known in self.inputs.known.values()):
            self._spread(args, kwargs, self._refuse_unclear)
        entered: list[_Input] = []

        def take(x: Any, layout: Layout) -> Any:
            if not isinstance(x, DTensor):
                return x
            known = self.inputs.known[id(layout)]
            grad = None if known.grad_layout is None else resolved(known.grad_layout, x.dim())
            shard = enter(x, resolved(layout, x.dim()), grad)
            entered.append(known if shard.requires_grad else known._replace(by_rule=False))
            return shard

        values, named = self._spread(args, kwargs, take)
        result = self.fn(*values, **named)
        if not entered:
            return result
        if any(known.by_rule for known in entered):
            self._check_left_alone(result)
        sizes = _Shapes(self.asked, self.outputs, self.shapes, args, kwargs)
        return spread("output of " + _name(self.fn), result, self.outputs, sizes.put_together)

    def _spread(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], move: Callable[[Any, Layout], Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Apply `move` to the arguments that have layouts."""
        values, named = list(args), dict(kwargs)
        for index, name, tree in self.inputs.places:
            where: Any = values if index is not None and index < len(values) else named
            key: Any = index if where is values else name
            if where is values or key in named:
                what = f"argument {index if name is None else name!r} of {_name(self.fn)}"
                where[key] = spread(what, where[key], tree, move)
            elif name is None:
                blame = f"there is a layout for argument {index}, and {len(values)} were given"
                raise InvalidValue(self.asked, blame, describe(tree), "as many layouts as arguments")
        return values, named

    def _refuse_unclear(self, x: Any, layout: Layout) -> Any:
        unclear = self.inputs.known[id(layout)].unclear
        if isinstance(x, DTensor) and x.requires_grad and unclear:
            names = ", ".join(map(repr, unclear))
            blame = (
                f"over {names} its gradients could be one gradient, computed by each rank, or partial sums to be "
                "added, as some outputs are replicated, and others are not"
            )
            if any(layout.partial.get(name, "sum") != "sum" for name in unclear):
                blame = f"over {names} copies are to be compared or multiplied, and whose counts is not known here"
            seen = f"layout: {layout}   outputs: {describe(self.outputs)}"
            hint = "in_grad_layouts=..., with partial={...} where they are to be added; or detach() the input"
            raise InvalidValue("cannot differentiate", blame, seen, hint)
        return x

    def _check_left_alone(self, result: Any) -> None:
        for leaf in _left_alone(result, self.outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not isinstance(leaf, DTensor):
                blame = (
                    "an output without a layout wants a gradient, and it depends on its layout whether the gradients "
                    "of inputs that all ranks hold are to be added"
                )
                seen = f"outputs: {describe(self.outputs)}   left alone: shape {tuple(leaf.shape)}"
                hint = "a layout for it, in_grad_layouts=..., or detach() for what is only looked at"
                raise InvalidValue(self.asked, blame, seen, hint)


# -- inputs ----------------------------------------------------------------------------------------------------------


def _own(tree: LayoutTree) -> Any:
    """Copy a tree, with a separate layout object in each place."""
    return map_tree(tree, lambda layout: layout._with(layout._splits, layout._specs, layout._partial))


def _read_inputs(
    asked: str, arguments: Arguments, base: Layout, in_layouts: Any, in_grad_layouts: Any, outs: Sequence[Layout]
) -> _Inputs:
    places = arguments.places(f"{asked} (in_layouts)", _own(read_layouts(f"{asked} (in_layouts)", in_layouts, base)))
    asked = f"{asked} (in_grad_layouts)"
    grads = {place[:2]: place.tree for place in arguments.places(asked, read_layouts(asked, in_grad_layouts, base))}
    known: dict[int, _Input] = {}
    for place in places:
        _match(asked, place.tree, grads.pop(place[:2], None), outs, known)
    for (index, name), tree in grads.items():
        blame = f"there is none in in_layouts for argument {index if name is None else name!r}"
        raise InvalidValue(asked, blame, describe(tree), "gradients of inputs that have layouts")
    return _Inputs(places, known)


def _match(asked: str, tree: Any, grads: Any, outs: Sequence[Layout], known: dict[int, _Input]) -> None:
    """Fill `known` with the inputs of a tree."""
    if isinstance(tree, Layout) and grads is None:
        known[id(tree)] = _by_rule(tree, outs)
    elif isinstance(tree, Layout) and isinstance(grads, Layout):
        if tree.reset_partial() != grads.reset_partial():
            blame, hint = "it is split otherwise than the input", "the same splits, and partial={...} where they add"
            raise InvalidValue(asked, blame, f"input: {tree}   gradient: {grads}", hint)
        known[id(tree)] = _Input(tree, grads, (), False)
    elif isinstance(tree, tuple) and (grads is None or (isinstance(grads, tuple) and len(grads) == len(tree))):
        for each, grad in zip(tree, grads or (None,) * len(tree), strict=True):
            _match(asked, each, grad, outs, known)
    elif isinstance(tree, Mapping) and (grads is None or (isinstance(grads, Mapping) and grads.keys() <= tree.keys())):
        for name, each in tree.items():
            _match(asked, each, (grads or {}).get(name), outs, known)
    elif tree is not None or grads is not None:
        blame, seen = "it is built otherwise than in_layouts", f"in_layouts: {describe(tree)}   this: {describe(grads)}"
        raise InvalidValue(asked, blame, seen, "one gradient per input, None for what the rule says")


def _by_rule(layout: Layout, outs: Sequence[Layout]) -> _Input:
    """Derive the gradient layout of an input from the outputs' layouts; see the table in `custom_shard`."""
    adding: list[str | None] = [None] * len(layout.mesh_shape)
    unclear, depends = [], False
    specs = layout._specs or ()
    for axis, (name, size) in enumerate(zip(layout.alias_name, layout.mesh_shape, strict=True)):
        pending = layout._partial[axis]
        if size == 1 or specs[axis] is not None or pending == "sum":
            continue
        replicated = [(out._specs or ())[axis] is None and out._partial[axis] is None for out in outs]
        depends = depends or pending is None
        if pending not in (None, "avg") or (pending is None and any(replicated) and not all(replicated)):
            unclear.append(name)
        elif pending == "avg" or not any(replicated):
            adding[axis] = "sum"
    grad = layout._with(layout._splits, layout._specs, tuple(adding))
    return _Input(layout, None if unclear or (depends and not outs) else grad, tuple(unclear), depends)


# -- outputs ---------------------------------------------------------------------------------------------------------


class _Shapes:
    """Makes DTensors of one call's outputs, with the declared shapes."""

    def __init__(self, asked: str, tree: LayoutTree, shapes: Any, args: Any, kwargs: Any) -> None:
        self._asked = asked
        self._declared: dict[int, tuple[int, ...]] = {}
        self._match(tree, shapes(*args, **kwargs) if callable(shapes) else shapes)

    def put_together(self, shard: Any, layout: Layout) -> DTensor:
        """Make a DTensor of an output, which is this rank's shard."""
        if not isinstance(shard, torch.Tensor) or isinstance(shard, DTensor):
            blame = f"an output that has a layout is a {type(shard).__name__}, not a plain tensor"
            hint = "local tensors, or None in out_layouts for what is left alone"
            raise InvalidType(self._asked, blame, f"layout: {layout}", hint)
        shape, known = self._declared.get(id(layout)), resolved(layout, shard.dim())
        if shape is None:
            live = any(known.mesh_shape[axis] > 1 for chain in known.splits(shard.dim()) for axis in chain)
            shape = agreed_shape(self._asked, shard, known) if live else tuple(shard.shape)
        return leave(shard, known, shape)

    def _match(self, tree: LayoutTree, shapes: Any) -> None:
        if shapes is None or tree is None:
            return
        if isinstance(tree, Layout):
            self._declared[id(tree)] = _checked_shape(self._asked, shapes, tree)
        elif isinstance(tree, Mapping):
            if not isinstance(shapes, Mapping) or not shapes.keys() <= tree.keys():
                raise self._unlike(tree, shapes)
            for name, shape in shapes.items():
                self._match(tree[name], shape)
        elif not isinstance(shapes, (list, tuple)) or len(shapes) != len(tree):
            raise self._unlike(tree, shapes)
        else:
            for each, shape in zip(tree, shapes, strict=True):
                self._match(each, shape)

    def _unlike(self, tree: LayoutTree, shapes: Any) -> ValueError:
        blame, seen = "out_shapes is built otherwise than out_layouts", f"out_layouts: {describe(tree)}"
        hint = "one shape per layout, None for one that the ranks exchange"
        return InvalidValue(self._asked, blame, f"{seen}   out_shapes: {shapes!r}", hint)


def _checked_shape(asked: str, shape: Any, layout: Layout) -> tuple[int, ...]:
    if isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape):
        return shape
    try:
        return check_shape(shape)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{asked} (out_shapes): {error}") from None


def _left_alone(value: Any, tree: LayoutTree) -> Iterator[Any]:
    """Yield the outputs without a layout."""
    if tree is None:
        yield from tree_leaves(value)
    elif isinstance(tree, Mapping) and isinstance(value, Mapping):
        for name, each in value.items():
            yield from _left_alone(each, tree.get(name))
    elif isinstance(tree, tuple) and isinstance(value, (list, tuple)):
        for each, part in zip(value, tree):  # noqa: B905 - different lengths are refused right after
            yield from _left_alone(each, part)


def _name(fn: object) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
