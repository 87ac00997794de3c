"""Modules whose code computes on local tensors: its arguments and parameters are this rank's shards during a call.

The layouts of the results decide how gradients of the shards are treated. Along an axis over which every result is
replicated, ranks repeat the same work, so that the gradient of a replicated argument is one gradient. If no result is
replicated there, each rank has done a share of the work, so that the gradients are partial sums.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.common.torch_compat import calls_compiled, runs_eagerly
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.chunks import Chunks, in_chunks
from hyper_parallel.core.shard.boundaries import Arguments, Inputs, remade, spread
from hyper_parallel.core.shard.entry_exit import (
    LayoutMark,
    ReshardedInputs,
    agreed_shape,
    cross,
    enter,
    leave,
    mark_of,
    marked,
    shard_shape,
)
from hyper_parallel.core.shard.region import LocalParameters, Region, Shown
from hyper_parallel.core.shard.spelling import LayoutTree, describe, leaves


def shared_axes(asked: str, produced: LayoutTree) -> frozenset[str]:
    """Return the axes over which ranks share the work, not repeat it, e.g. the axes of a pending sum.

    >>> layout = Layout((2, 4), ("dp", "tp"))
    >>> sorted(shared_axes("", layout("dp", "None", partial={"tp": "sum"})))
    ['dp', 'tp']

    Args:
        asked: the start of an error message, "cannot ...".
        produced: the layouts of the module's return values.

    Raises:
        ValueError: one result is replicated over some axis, and another is not.
    """
    found = list(leaves(produced))
    shared = set[str]()
    for axis, name in enumerate(found[0].alias_name if found else ()):
        replicated = [(layout._specs or ())[axis] is None and name not in layout.partial for layout in found]
        if found[0].mesh_shape[axis] > 1 and any(replicated) and not all(replicated):
            blame = (
                f"over axis {name!r} one result is replicated, and another one is not, so whether a rank's "
                "gradients are partial sums is ambiguous"
            )
            hint = "the same along that axis, or one module for each result"
            raise InvalidValue(asked, blame, f"results: {describe(produced)}", hint)
        if not all(replicated):
            shared.add(name)
    return frozenset(shared)


def _chunks_of(
    asked: str, given: int | tuple[int, int], inputs: LayoutTree, produced: LayoutTree, outputs: LayoutTree
) -> Chunks | None:
    """Return the layouts and count for a module in chunks; None if no axis of size > 1 communicates.

    Raises:
        ValueError: the module's pending sum is not scattered over the dim over which its input is gathered.
    """
    trees = (inputs, produced, outputs)
    found = [next(iter(tree.values())) if isinstance(tree, Mapping) and len(tree) == 1 else tree for tree in trees]
    taken, pending, split = [one[0] if isinstance(one, tuple) and len(one) == 1 else one for one in found]
    seen = "   ".join(
        f"{word}: {describe(tree)}" for word, tree in zip(("input", "local", "output"), trees, strict=True)
    )
    hint = 'input ("dp", "None", "None"), local a sum pending over tp, output ("dp", "tp", "None")'
    if not (isinstance(taken, Layout) and isinstance(pending, Layout) and isinstance(split, Layout)):
        raise InvalidValue(asked, "input_plan, local_plan and output_plan need one layout each", seen, hint)
    sums = [name for name, kind in pending.partial.items() if kind == "sum"]
    if taken.is_partial() or split.is_partial() or not sums or len(sums) != len(pending.partial):
        raise InvalidValue(asked, "its result is to be a pending sum, and nothing else pending", seen, hint)
    dims, live = set[int](), False
    for axis, name in enumerate(pending.alias_name):
        before, within, after = ((layout._specs or ())[axis] for layout in (taken, pending, split))
        if name in sums and before is None and after is not None:
            dims.add(after[0])
            live = live or pending.mesh_shape[axis] > 1
        elif name in sums or not before == within == after:
            blame = f"over axis {name!r} its input is not gathered where its result is scattered, or laid out otherwise"
            raise InvalidValue(asked, blame, seen, hint)
    if len(dims) != 1 or min(dims) < 0:
        blame = "the sum is scattered over several dims, or over one that is counted from the last"
        raise InvalidValue(asked, blame, seen, hint)
    (dim,), (count, along) = dims, given if isinstance(given, tuple) else (given, None)
    if along is not None and along > dim:
        blame = f"dim {along}, along which it is to be cut, is behind that over which its input is gathered"
        raise InvalidValue(asked, blame, seen, f"({count}, 0), or any dim up to {dim}")
    if not live:
        return None
    grad = _grad_layout_of(taken, frozenset(sums))
    assert grad is not None, "nothing is pending in it"
    return Chunks(count, dim, split, taken, grad, pending, along)


@runs_eagerly
def _shape_to_cut(asked: str, x: torch.Tensor, chunks: Chunks) -> tuple[int, ...]:
    """Return the sizes of the full tensor that is cut."""
    if x.dim() < chunks.dim + 2:
        blame = f"rows are cut along dim {chunks.dim}, which is the last one, or is not there"
        raise InvalidValue(asked, blame, f"argument: {tuple(x.shape)}", "no entry in chunks for it")
    mark = mark_of(x)
    return agreed_shape(asked, x, chunks.split) if mark is None else tuple(mark.shape)


def _live(axes: frozenset[str], produced: LayoutTree) -> list[str]:
    """Return the axes in `axes` of size > 1, in mesh order."""
    layout = next(leaves(produced), None)
    sizes = () if layout is None else zip(layout.alias_name, layout.mesh_shape, strict=True)
    return [name for name, size in sizes if size > 1 and name in axes]


class _Call(NamedTuple):
    """A running forward: the key of its shapes, the parameters replaced by shards, its look-up and its freed inputs."""

    key: Any
    shown: Shown
    lookup: Lookup | None
    resharded: ReshardedInputs | None


class LocalModule:
    """Hooks of one module that computes on local tensors.

    Args:
        name: the module's path.
        module: the module.
        produced: the layouts of its return values.
        inputs: the target layouts of its arguments.
        outputs: the target layouts of its results.
        region: state shared by all such modules of the model; tensors stay plain inside of an outer one.
        wraps: True to accept a plain tensor without a mark as a shard of a declared input.
        reshards: True to gather gathered inputs again in backward in place of keeping them.
        chunks: number of chunks of the rows, or a pair of it and the dim to cut; None: no chunks.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        produced: LayoutTree,
        inputs: LayoutTree,
        outputs: LayoutTree,
        region: Region,
        *,
        wraps: bool,
        reshards: bool = False,
        chunks: int | tuple[int, int] | None = None,
    ) -> None:
        self.where = f"module {name!r}" if name else "the model"
        self.what = f"output of {self.where}"
        self.chunks: Chunks | None = None
        if chunks is not None:
            self.chunks = _chunks_of(f"cannot run {self.where} in chunks", chunks, inputs, produced, outputs)
            if reshards:
                blame = "its input would be gathered again whole, and it is gathered in chunks"
                seen = f"chunks: {chunks}   reshard_inputs: it is named there"
                raise InvalidValue(f"cannot run {self.where} in chunks", blame, seen, "one of the two")
        if self.chunks is not None:  # inputs and outputs stay split, because `in_chunks` communicates
            produced = outputs = self.chunks.split
            inputs = dict.fromkeys(inputs, produced) if isinstance(inputs, Mapping) else produced
        self.produced, self.outputs = produced, outputs
        self.shared = shared_axes(f"cannot run {self.where} on local tensors", produced)
        self.inputs = Inputs(self.where, inputs, Arguments.of(module.forward), wrap=False)
        self.inputs.move = self._enter
        self.wraps, self.region, self.is_inner = wraps, region, region.has_outer(name)
        self._parameters = LocalParameters(self._grad_layout, region, self.where, _live(self.shared, produced))
        self._is_split = any(spec is not None for layout in leaves(produced) for spec in layout._specs or ())
        self._shapes: dict[Any, tuple[int, ...]] = {}  # global shapes that the ranks agreed on
        self._running: list[_Call] = []
        self._bare, self._seen_bare = 0, set[int]()  # inputs of a call without a known layout
        self._reshards = reshards
        self._resharded: ReshardedInputs | None = None  # of the call that is entering
        self._grads: dict[Layout, Layout | None] = {}
        self._layouts: dict[Any, tuple[DeviceMesh, Layout]] = {}

    @runs_eagerly
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace arguments and parameters by this rank's shards."""
        is_inside = bool(self.region.running)
        key = self._key((args, *kwargs.values()))
        self._bare = 0
        self._resharded = ReshardedInputs.of(self.where) if self._reshards else None
        args, kwargs = self.inputs(args, kwargs)
        if self.is_inner:
            self._check_bare(is_inside=is_inside)
        args = tuple([self._entered(value) for value in args])
        kwargs = {name: self._entered(value) for name, value in kwargs.items()}
        args, kwargs, lookup = begin_lookup(self.where, module, args, kwargs)
        self._running.append(_Call(key, self._parameters.show(module), lookup, self._resharded))
        self.region.running.append(key)
        if self._resharded is not None:
            self._resharded.begin()
            self._resharded = None
        return args, kwargs

    @runs_eagerly
    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        """Make DTensors of the returned shards; also called if the module has raised."""
        if not self._running:  # `before` has raised
            return None
        call = self._running.pop()
        self.region.running.pop()
        self._parameters.hide(call.shown, result)
        if call.resharded is not None:
            call.resharded.end(result)
        if call.lookup is not None:
            result = end_lookup(module, call.lookup, result)
        return None if result is None else self._leave(call, self.what, result, self.produced, self.outputs, ())

    @calls_compiled
    def in_chunks(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call the module's code chunk by chunk.

        Args:
            forward: the module's code.
            args: this rank's shard of the tensor to cut, unless given by name. With `Chunks.along` also other
                arguments, which every chunk gets whole.
            kwargs: the same by name.

        Raises:
            TypeError: the input is no tensor; there are other arguments without `along`; the result is no such tensor.
            ValueError: a tensor of too few dims.
        """
        assert self.chunks is not None, "it is called where there are some"
        asked, given = f"cannot run {self.where} in chunks", dict(enumerate(args)) | kwargs
        (place,) = self.inputs.places
        key: Any = place.index if place.index in given else place.name
        if not isinstance(given.get(key), torch.Tensor) or (len(given) > 1 and self.chunks.along is None):
            blame = "its rows are those of one tensor, and it was called with something else"
            seen = f"arguments: {', '.join(type(value).__name__ for value in given.values()) or 'none'}"
            hint = "no entry in chunks for it; with more arguments one of its dims too, (2, 0)"
            raise InvalidType(asked, blame, seen, hint)
        x: torch.Tensor = given[key]

        def computed(chunk: torch.Tensor) -> torch.Tensor:
            values: dict[Any, Any] = given | {key: chunk}
            result = forward(*[values.pop(index) for index in range(len(args))], **values)
            if not isinstance(result, torch.Tensor) or result.shape[:-1] != chunk.shape[:-1]:
                seen = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                blame = f"it returns no tensor with the rows of its argument, {tuple(chunk.shape)}"
                raise InvalidType(asked, blame, f"result: {seen}", "no entry in chunks for it")
            return result

        return in_chunks(computed, x, _shape_to_cut(asked, x, self.chunks), self.chunks)

    def _key(self, values: tuple[Any, ...]) -> Any:
        """Return a key for global shapes, which changes on all ranks or on none; None: no such key.

        The outermost module uses its arguments' global shapes, which plain tensors do not have: with 7 and with 8 rows,
        rank 0 can hold shards of equal size. Inner modules add the number of earlier calls.
        """
        running = self.region.running
        if not running:
            self.region.calls = 0
            return _shapes_of(values) if not self._is_split or _holds_dtensor(values) else None
        self.region.calls += 1
        if running[0] is None:
            return None
        return (running[0], self.region.calls, _shapes_of(values)) if self._is_split else running[0]

    # -- entry -------------------------------------------------------------------------------------------------------

    def _entered(self, value: Any) -> Any:
        """Take the shards of DTensors in arguments without a declared layout."""
        if isinstance(value, DTensor):
            return self._enter_as_it_is(value)
        if value is None or isinstance(value, (torch.Tensor, bool, int, float, str)):
            return value
        return tree_map_only(DTensor, self._enter_as_it_is, value)

    def _enter(self, x: Any, target: Layout) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        known = resolved(target, x.dim())
        if isinstance(x, DTensor):
            shard = self._noted(enter(x, known, self._grad_layout(known)), x, known)
            return shard if self.chunks is None else marked(shard, known, x.shape)
        mark = mark_of(x)
        if mark is not None:
            return self._noted(cross(x, mark, known, self._grad_layout(known)), x, known)
        if self.is_inner and not self.wraps and x.is_floating_point():
            blame = "it is a plain tensor, and nothing says which shard of the full tensor it is"
            hint = "a local_plan for the module that it comes from, or wrap_inputs=True if it is that shard already"
            raise InvalidValue("cannot take the shard", blame, f"layout: {target}", hint)
        self._bare += 1
        return self._wrapped(x, known) if self.wraps else x  # already this rank's shard

    def _noted(self, gathered: torch.Tensor, x: torch.Tensor, target: Layout) -> torch.Tensor:
        if self._resharded is not None:
            self._resharded.note(gathered, x, target)
        return gathered

    def _check_bare(self, *, is_inside: bool) -> None:
        """Refuse plain inputs that had marks before, because a reentrant checkpoint recomputes without marks."""
        if is_inside:
            self._seen_bare.add(self._bare)
        elif self._seen_bare and self._bare > max(self._seen_bare):
            blame = "nothing says which shards they are, as it did inside of the module that holds this one"
            hint = "checkpoint(..., use_reentrant=False), as the other kind computes with other tensors"
            raise InvalidValue(f"cannot take the inputs of {self.where}", blame, "inputs: plain tensors", hint)

    def _wrapped(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Declare a plain tensor a shard of a layout; its gradients are added where the ranks share the work."""
        grad_layout = self._grad_layout(layout)
        if grad_layout is None or not grad_layout.is_partial() or not (torch.is_grad_enabled() and x.requires_grad):
            return x
        split = any(layout.splits(x.dim()))
        shape = agreed_shape(f"cannot take an input of {self.where}", x, layout) if split else tuple(x.shape)
        return cross(x, LayoutMark(layout, torch.Size(shape)), layout, grad_layout)

    def _enter_as_it_is(self, x: DTensor) -> torch.Tensor:
        spec = x._spec
        key = (id(spec.mesh), spec.placements, spec.shape)
        known = self._layouts.get(key)
        if known is None:
            known = self._layouts[key] = spec.mesh, Layout.of(x)  # keeps the mesh, and so its id, alive
        return enter(x, known[1], self._grad_layout(known[1]))

    def _grad_layout(self, layout: Layout) -> Layout | None:
        """Return the layout of shards' gradients: as the shards, with pending sums where the ranks share the work."""
        known = self._grads.get(layout)
        if known is None or known.mesh is not layout.mesh:
            known = self._grads[layout] = _grad_layout_of(layout, self.shared)
        return known

    # -- exit --------------------------------------------------------------------------------------------------------

    def _leave(
        self, call: _Call, what: str, value: Any, produced: LayoutTree, wanted: LayoutTree, path: tuple[Any, ...]
    ) -> Any:
        if produced is None or value is None:
            return value
        if isinstance(produced, Layout):
            if type(value) is torch.Tensor:
                return self._whole(call, what, value, produced, wanted, path)
            return spread(
                what, value, produced, lambda shard, layout: self._whole(call, what, shard, layout, wanted, path)
            )
        if isinstance(produced, Mapping):
            names = wanted if isinstance(wanted, Mapping) else {}
            changed = spread(what, value, produced, lambda shard, _: shard)
            changed = copy.copy(value) if changed is value else changed
            for name, part in produced.items():
                changed[name] = self._leave(
                    call, f"entry {name!r} of {what}", value[name], part, names.get(name), (*path, name)
                )
            return changed
        checked = spread(what, value, produced, lambda shard, _: shard)
        ends = wanted if isinstance(wanted, tuple) else (None,) * len(produced)
        return remade(
            checked,
            [
                self._leave(call, f"entry {i} of {what}", each, part, end, (*path, i))
                for i, (each, part, end) in enumerate(zip(checked, produced, ends, strict=True))
            ],
        )

    def _whole(
        self, call: _Call, what: str, shard: Any, layout: Layout, wanted: LayoutTree, path: tuple[Any, ...]
    ) -> Any:
        if shard is None or isinstance(shard, (bool, int, float, complex, str)):
            return shard
        if not isinstance(shard, torch.Tensor):
            blame = f"it is a {type(shard).__name__}, not a tensor"
            hint = "a tensor, or a list, tuple or mapping of tensors"
            raise InvalidValue(f"cannot take the {what} as a local shard", blame, f"layout: {layout}", hint)
        if isinstance(shard, DTensor):
            blame, hint = "it is a DTensor already", "no local_plan for a module that returns DTensors"
            raise InvalidValue(f"cannot take the {what} as a local shard", blame, f"layout: {layout}", hint)
        layout = resolved(layout, shard.dim())
        target = resolved(wanted, shard.dim()) if isinstance(wanted, Layout) else None
        shape = torch.Size(self._shape(call, what, shard, layout, path))
        if not self.is_inner:
            return leave(shard, layout, shape, target)
        moved = shard if target is None else cross(shard, LayoutMark(layout, shape), target, None)
        return marked(moved, layout if target is None else target, shape)

    def _shape(
        self, call: _Call, what: str, shard: torch.Tensor, layout: Layout, path: tuple[Any, ...]
    ) -> tuple[int, ...]:
        """Return the global shape, which the ranks exchange at the first call with this key."""
        if not any(layout.splits(shard.dim())):
            return tuple(shard.shape)
        key = (path, call.key)
        known = None if call.key is None else self._shapes.get(key)
        if known is None:
            known = self._shapes[key] = agreed_shape(f"cannot take the {what} as a local shard", shard, layout)
        if not self.is_inner:  # `leave` checks it
            return known
        rank = dist.get_rank()
        if shard_shape(layout, torch.Size(known), rank) != tuple(shard.shape):
            blame = f"rank {rank} returned a shard of shape {tuple(shard.shape)}, and of {known} it has another one"
            hint = "code whose shapes follow from those of its arguments"
            raise InvalidValue(f"cannot take the {what} as a local shard", blame, f"layout: {layout}", hint)
        return known


def _grad_layout_of(layout: Layout, shared: frozenset[str]) -> Layout | None:
    """Return the layout of shards' gradients: as the shards, with pending sums over axes in `shared`.

    >>> layout = Layout((2, 4), ("dp", "tp"))
    >>> print(_grad_layout_of(layout("dp", "None"), frozenset({"tp"})))
    (dp) pending sum over tp on dp=2, tp=4

    Each copy of a pending average gets its share of the gradient, and shares add up. For a pending max, min or product,
    the gradient depends on the copies of all ranks.

    Raises:
        ValueError: a max, min or product is pending.
    """
    specs = layout._specs or ()
    sizes = dict(zip(layout.alias_name, layout.mesh_shape, strict=True))
    held = [name for name, spec in zip(layout.alias_name, specs, strict=True) if spec is None]
    pending = {name: layout.partial.get(name) for name in held if sizes[name] > 1}
    refused = [f"{kind} over {name!r}" for name, kind in pending.items() if kind in ("max", "min", "prod")]
    if refused:
        blame = f"{refused[0]} is pending, and whose copy counts is known only when all are compared"
        hint = "an input_plan that says where it should be"
        raise InvalidValue("cannot take a shard for a gradient", blame, f"layout: {layout}", hint)
    added = {name: "sum" for name, kind in pending.items() if kind == "avg" or (kind is None and name in shared)}
    if not added and not layout.is_partial():
        return layout
    return layout.reset_partial()(*_entries(layout), partial=added)


def resolved(layout: Layout, ndim: int) -> Layout:
    """Return a layout with dims counted from the start, e.g. 1 in place of -1 for two dims."""
    if all(spec is None or spec[0] >= 0 for spec in layout._specs or ()):
        return layout
    return layout.placement_to_tensor_map(ndim)


def _entries(layout: Layout) -> tuple[Any, ...]:
    written = layout.alias_placements
    if written is not None:  # without trailing "None"s: the cache key also serves fewer dims
        return written[: max((dim + 1 for dim, entry in enumerate(written) if entry != "None"), default=0)]
    specs = layout._specs or ()
    ndim = max((spec[0] + 1 for spec in specs if spec is not None), default=0)
    return layout.reset_partial().placement_to_tensor_map(ndim).alias_placements or ()


def _shapes_of(values: Any) -> tuple[Any, ...]:
    """Return the shapes of tensors, in containers of any depth, and the flags beside them."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value.shape)
        elif isinstance(value, (list, tuple)):
            found.append(_shapes_of(value))
        elif isinstance(value, Mapping):
            found.append(_shapes_of(list(value.values())))
        elif value is None or isinstance(value, (bool, str)):
            found.append(value)  # no numbers: if they differ by rank, only some ranks would exchange shapes
    return tuple(found)


def _holds_dtensor(values: Any) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            found = isinstance(value, DTensor)
        elif isinstance(value, (list, tuple)):
            found = _holds_dtensor(value)
        else:
            found = isinstance(value, Mapping) and _holds_dtensor(value.values())
        if found:
            return True
    return False


# -- embeddings split over the vocabulary ------------------------------------------------------------------------------
# Each rank looks up the tokens whose rows it holds. Other tokens get zeros, so that the sum over the ranks is the
# result (Megatron-LM, Shoeybi et al. 2019, section 3).


class Lookup(NamedTuple):
    """State of a look-up between `begin_lookup` and `end_lookup`.

    Attributes:
        outside: True for tokens whose rows other ranks hold.
        padding_idx: the module's original value, to restore.
    """

    outside: torch.Tensor
    padding_idx: int | None


def begin_lookup(
    where: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Lookup | None]:
    """Shift token ids to this rank's rows, if the module is an embedding split over its vocabulary.

    Args:
        where: the module, for messages.
        module: any module.
        args: positional arguments of its call.
        kwargs: keyword arguments of its call.

    Returns:
        The arguments, and the state for `end_lookup`; None as state for other modules.

    Raises:
        ValueError: some rank has no rows; the embedding has `max_norm`, `scale_grad_by_freq` or `sparse`.
    """
    weight: Any = module._parameters.get("weight")
    if not isinstance(module, nn.Embedding) or not isinstance(weight, DTensor):
        return args, kwargs, None
    asked = f"cannot look up tokens in {where} on local tensors"
    _check_options(asked, module, wants_gradient=weight.requires_grad)
    layout = Layout.of(weight)
    if not layout.splits(2)[0]:
        return args, kwargs, None
    if _has_empty_shard(layout, weight.shape):
        blame = f"some rank has none of the {weight.shape[0]} rows"
        raise InvalidValue(asked, blame, f"layout: {layout}", "fewer ranks along the axes that split the rows")
    shard = layout.local_slice(weight.shape)[0]
    ids = args[0] if args else kwargs["input"]
    local = ids - shard.start
    rows = shard.stop - shard.start
    outside = (local < 0) | (local >= rows)
    local = local.masked_fill(outside, 0)
    lookup = Lookup(outside, module.padding_idx)
    if module.padding_idx is not None:
        inside = shard.start <= module.padding_idx < shard.stop
        module.padding_idx = module.padding_idx - shard.start if inside else None
    return ((local, *args[1:]), kwargs, lookup) if args else (args, {**kwargs, "input": local}, lookup)


def end_lookup(module: nn.Module, lookup: Lookup, result: torch.Tensor | None) -> torch.Tensor | None:
    """Put zeros where other ranks have the rows, and restore the module.

    Args:
        module: the embedding.
        lookup: the state from `begin_lookup`.
        result: the module's result; None if it has raised.
    """
    module.padding_idx = lookup.padding_idx  # type: ignore[assignment]
    return None if result is None else result.masked_fill(lookup.outside.unsqueeze(-1), 0)


def _check_options(asked: str, module: nn.Embedding, *, wants_gradient: bool) -> None:
    """Refuse options that depend on tokens or values of other ranks."""
    if module.max_norm is not None:
        blame = "rows are shards or copies on several ranks, and max_norm changes them in each forward"
        raise InvalidValue(asked, blame, f"max_norm: {module.max_norm}", "max_norm=None")
    if wants_gradient and module.scale_grad_by_freq:
        blame = "scale_grad_by_freq counts how often a token is among those of a rank, not among all"
        raise InvalidValue(asked, blame, "scale_grad_by_freq: True", "scale_grad_by_freq=False")
    if wants_gradient and module.sparse:
        blame = "gradients go from rank to rank, which sparse ones cannot"
        raise InvalidValue(asked, blame, "sparse: True", "sparse=False")


@lru_cache(maxsize=1024)
def _has_empty_shard(layout: Layout, shape: torch.Size) -> bool:
    starts_and_stops = layout.slices(shape)[:, 0]
    return bool((starts_and_stops[:, 0] == starts_and_stops[:, 1]).any())
