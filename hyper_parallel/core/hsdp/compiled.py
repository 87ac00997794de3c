"""Sharded parameters without module hooks: the gather is part of the forward, for `torch.compile` to trace.

What optimizers and state dicts see stays registered: the shard, a DTensor. While one of a unit's modules runs its
forward, `module.weight` is unsharded instead: a property of the module's class gathers it, once per forward, by
functional collectives that have a gradient. Nothing is swapped, so there is nothing for Dynamo to break on. In short:

    forward   all_gather over the shard axis
    backward  level1: all_reduce over all data-parallel ranks, then the own rows
              level2, level3: reduce_scatter over the shard axis, then all_reduce over the replicate axis
    level3    the unsharded parameter is not kept for backward: it is gathered again

All of that is in the graph that Dynamo sees. Only accumulation of gradients is not: there the gradient goes to a leaf
of its own (a *sink*), and a hook of that leaf hands it to the engine's `GradientReducer`, after the graph's backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hyper_parallel.core.common.errors import InvalidState
from hyper_parallel.core.common.groups import on_wire
from hyper_parallel.core.common.torch_compat import computes_again, record_function
from hyper_parallel.core.fully_shard.bucket import Storage
from hyper_parallel.core.fully_shard.build import FoundParameter, Grouping, make_buckets, own_modules
from hyper_parallel.core.fully_shard.hooks import refuse_lazy
from hyper_parallel.core.fully_shard.placement import ParameterPlacement
from hyper_parallel.core.fully_shard.reduce import FusedAllReduces, GradientReducer
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy, UnitOptions

# -- collectives, in the form that is the same in a graph and out of it -----------------------------------------------


@dataclass(frozen=True)
class _TracedCollectives:
    """How to gather one parameter and reduce its gradient: constants that fit into a graph, so groups go by name.

    Attributes:
        shard: The group that holds the shards, in equal rows of dim 0; None: there are none to gather from.
        size: How many ranks that are.
        rank: The calling rank's place among them.
        scatter: Reduce_scatter over `shard` first; False: take the own rows in the end.
        groups: All_reduce over these, one after the other.
        scale: Factor on the result; None: leave it, and leave out `groups`, for a reducer does both later.
        dtype: Of the reduction; None: the gradient's own.
    """

    shard: str | None
    size: int
    rank: int
    scatter: bool
    groups: tuple[str, ...]
    scale: float | None
    dtype: torch.dtype | None

    @classmethod
    def of(cls, reducer: GradientReducer, options: UnitOptions) -> _TracedCollectives:
        """What `reducer` would do, for a graph to do it."""
        placement = reducer.params[0].placement
        size, group = placement.shard_size, reducer.bucket.group
        return cls(
            shard=None if group is None or size == 1 else group.group_name,
            size=size,
            rank=placement.shard_rank,
            scatter=reducer.scatter is not None,
            groups=tuple(group.group_name for group in reducer.replicas),
            scale=options.gradient_scale / reducer.ranks,
            dtype=options.mp_policy.reduce_dtype,
        )


def _run(collective: str, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    issue = getattr(torch.ops._c10d_functional, collective)
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(issue(tensor.contiguous(), *arguments))
    return result


def _all_gather(rows: torch.Tensor, recipe: _TracedCollectives) -> torch.Tensor:
    if recipe.shard is None:
        return rows.view_as(rows)
    sent = on_wire(rows)
    with record_function("FSDP::all_gather"):
        gathered = _run("all_gather_into_tensor", sent, recipe.size, recipe.shard)
    return gathered if sent is rows else gathered.view(rows.dtype)


def _reduced(gradient: torch.Tensor, recipe: _TracedCollectives) -> torch.Tensor:
    scale = recipe.scale
    if recipe.dtype is not None and gradient.is_floating_point():
        gradient = gradient.to(recipe.dtype)
    # fp16 could overflow in the sum, so it is scaled before; everything else after, on the smaller tensor.
    early = gradient.dtype == torch.float16
    if scale is not None and early:
        gradient = gradient * scale
    if recipe.scatter and recipe.shard is not None:
        gradient = _run("reduce_scatter_tensor", gradient, "sum", recipe.size, recipe.shard)
    if scale is None:
        return gradient
    for group in recipe.groups:
        gradient = _run("all_reduce", gradient, "sum", group)
    if not recipe.scatter and recipe.shard is not None:
        rows = gradient.shape[0] // recipe.size
        gradient = gradient.narrow(0, recipe.rank * rows, rows)
    if not early and scale != 1.0:
        return gradient * scale
    return gradient if recipe.scatter else gradient.clone()  # own rows alone, not a view that keeps all of it


class _Unsharded(torch.autograd.Function):
    """`unsharded`; its gradient is reduced and goes to `source`: the rows that it was gathered from, or a sink."""

    @staticmethod
    def forward(ctx: Any, unsharded: torch.Tensor, source: torch.Tensor, recipe: _TracedCollectives) -> torch.Tensor:
        ctx.recipe = recipe
        ctx.dtype = source.dtype
        return unsharded.view_as(unsharded)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            asked = "hsdp cannot differentiate the gradients of its parameters"
            blame = "their reduction over ranks has no derivative"
            seen = "seen: create_graph=True, for parameters of a cell"
            hint = "create_graph=False, or autograd.grad(loss, [x], create_graph=True) for inputs only"
            raise InvalidState(asked, blame, seen, hint)
        if not torch.compiler.is_compiling() and gradients[0].layout is not torch.strided:
            asked, seen = "hsdp cannot reduce gradients", f"seen: {gradients[0].layout} {tuple(gradients[0].shape)}"
            blame, hint = "the gradient of a parameter of this shape is sparse", "nn.Embedding(sparse=False)"
            raise InvalidState(asked, blame, seen, hint)
        return None, _reduced(gradients[0], ctx.recipe).to(ctx.dtype), None


# -- a unit -----------------------------------------------------------------------------------------------------------


class TracedUnit:
    """What the modules of one unit share: its parameters, and what is gathered while a forward runs.

    Attributes:
        params: The engine's record of each parameter.
        gathered: Unsharded parameters gathered by the forward under way, outside of graphs; None outside of a forward.
        synced: Whether accumulated gradients are reduced at the end of the next backward.
        together: The units of the model that reduce at the end of one backward, even those that it does not reach.
    """

    def __init__(self, reducers: Sequence[GradientReducer], options: UnitOptions) -> None:
        self.gathered: dict[tuple[int, bool], tuple[torch.Tensor, nn.Parameter]] | None = None
        self.options = options
        self.synced = True
        self.together: Sequence[TracedUnit] = [self]
        self.uses_sinks = options.show_sums
        self.sums = [_AccumulatedGradient(self, reducer) for reducer in reducers]
        self.params = [total.param for total in self.sums]
        self._ends_backward: int | None = None  # the backward at whose end sums will be reduced

    def read(self, index: int, parameter: nn.Parameter) -> torch.Tensor:
        """What a module sees of a registered parameter: during a forward, the one that its first use has gathered.

        A part of a forward that an activation checkpoint computes again in backward gathers once per use.
        """
        if torch.compiler.is_compiling():
            # Once per use: where some of a graph is checkpointed, the graph cannot change what is outside of it.
            return self.gather(index, parameter)
        if self.gathered is None:
            return self.gather(index, parameter) if computes_again() else parameter
        key = (index, torch.is_grad_enabled())  # one gathered under no_grad has no gradient to give
        if key not in self.gathered:
            self.gathered[key] = (self.gather(index, parameter), parameter)
        return self.gathered[key][0]

    def gather(self, index: int, parameter: nn.Parameter) -> torch.Tensor:
        """A registered parameter, unsharded, with a gradient."""
        total = self.sums[index]
        recipe = total.full
        rows: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined]
        if torch.compiler.is_compiling() and self.options.reshard_after_forward and recipe.shard is not None:
            # Marks the gather for AOTAutograd to repeat it in backward.
            unsharded = checkpoint(_all_gather, rows.detach(), recipe, use_reentrant=False)
        else:
            unsharded = _all_gather(rows.detach(), recipe)
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return unsharded
        if self.uses_sinks:
            if total.sink.dtype not in (rows.dtype, total.dtype):  # only in a graph: its gradients would be rounded
                asked, blame = "hsdp cannot trace this cell", "a parameter was replaced by one of another dtype"
                hint = "set_requires_grad_sync(True), which looks for such, before the forward"
                raise InvalidState(asked, blame, f"seen: {rows.dtype}, was {total.sink.dtype}", hint)
            return _Unsharded.apply(unsharded, total.sink, total.recipe)
        return _Unsharded.apply(unsharded, rows, recipe)

    def saving(self) -> AbstractContextManager[Any]:
        """How tensors are saved for backward during a forward: at level3 unsharded parameters are not."""
        if not self.options.reshard_after_forward or not torch.is_grad_enabled():
            return nullcontext()
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return nullcontext()  # activation checkpointing: it saves nothing and will gather again by itself
        return saved_tensors_hooks(self._pack, lambda packed: packed() if isinstance(packed, partial) else packed)

    def _pack(self, saved: torch.Tensor) -> torch.Tensor | partial[torch.Tensor]:
        if not self.gathered or type(saved) is not torch.Tensor or saved.is_neg():
            return saved
        storage = saved.untyped_storage()._cdata
        for (index, _), (unsharded, parameter) in self.gathered.items():
            recipe = self.sums[index].full
            if recipe.shard is None or saved.dtype != unsharded.dtype:
                continue
            if unsharded.untyped_storage()._cdata == storage:  # this one, or a view of it
                rows: torch.Tensor = parameter._local_tensor.detach()  # type: ignore[attr-defined]
                geometry = (saved.shape, saved.stride(), int(saved.storage_offset()))
                return partial(_gathered_again, rows, recipe, geometry, saved.is_conj())
        return saved

    # -- accumulation of gradients ------------------------------------------------------------------------------------

    def set_requires_grad_sync(self, flag: bool, together: Sequence[TracedUnit]) -> None:
        """Whether the next backward ends with the reduction of what all of these units, this one too, have added up."""
        for unit in together:
            unit.synced, unit.together = flag, together
            unit.follow()
        self.choose()

    def follow(self) -> None:
        """Follow parameters to another dtype or device; not in a graph."""
        for total in self.sums:
            total.follow()

    def reduce_the_rest_later(self) -> None:
        """At the end of this backward, reduce what waits for parameters, and in units, that it does not reach."""
        backward, first = torch._C._current_graph_task_id(), self.together[0]
        if first._ends_backward != backward:
            first._ends_backward = backward
            Variable._execution_engine.queue_callback(self._reduce_the_rest)

    def _reduce_the_rest(self) -> None:
        for unit in self.together:
            for total in unit.sums:
                if unit.synced and total.reducer.is_due(all_reduce=True):
                    total.reduce()
        self.choose()

    def choose(self) -> None:
        """Whether gradients go to sinks: there what has been accumulated can be added before a reduction."""
        waits = any(total.reducer.is_due(all_reduce=True) for unit in self.together for total in unit.sums)
        for unit in self.together:
            unit.uses_sinks = unit.options.show_sums or not unit.synced or waits

    def zero_grads(self, *, set_to_none: bool) -> None:
        """Clear gradients, also those that wait."""
        for total in self.sums:
            total.sink.grad = None
            total.reducer.clear()
            total.param.clear_gradient(set_to_none=set_to_none)
        if self.uses_sinks:
            self.choose()


@torch.no_grad()
def _gathered_again(rows: torch.Tensor, recipe: _TracedCollectives, geometry: Any, is_conj: bool) -> torch.Tensor:
    view = _all_gather(rows, recipe).as_strided(*geometry)
    return view.conj() if is_conj else view


class _AccumulatedGradient:
    """One parameter's gradient over micro-steps: where autograd adds it up, and the reducer that takes it from there.

    The sink is a leaf without memory of its own (all elements are one zero). Autograd adds to its `.grad` and then
    calls the hook, after the graph's backward: so the communication of a synced step is in no graph. Where sums are
    shown at level2 and 3, the graph has reduce_scattered what arrives here; otherwise it is unsharded, each rank's own.
    """

    def __init__(self, unit: TracedUnit, reducer: GradientReducer) -> None:
        self.unit, self.reducer = unit, reducer
        (self.param,) = reducer.params
        full = self.full = _TracedCollectives.of(reducer, unit.options)
        self.is_scattered = full.scatter and unit.options.show_sums
        dtype = full.dtype if self.is_scattered else None
        self.recipe = replace(full, scatter=self.is_scattered, groups=(), scale=None, dtype=dtype)
        self._make_sink()

    def _make_sink(self) -> None:
        param, bucket = self.param, self.reducer.bucket
        self.dtype = self.reducer.keeping_dtype(self.unit.options.mp_policy.reduce_dtype)
        shape, dtype = (param.local_shape, self.dtype) if self.is_scattered else (param.shape, bucket.compute_dtype)
        self.sink = torch.zeros((), dtype=dtype, device=bucket.compute_device).expand(shape)
        if dtype.is_floating_point or dtype.is_complex:
            self.sink.requires_grad_()
            me = weakref.ref(self)  # what such a hook refers to is never collected if it refers to the sink
            self.sink.register_post_accumulate_grad_hook(lambda sink: (it := me()) and it.collect(sink))

    def follow(self) -> None:
        """Take over what is registered now: users may put another one there, or convert it."""
        slot, bucket = self.param.slots[0], self.reducer.bucket
        registered: Any = slot.module._parameters.get(slot.name)
        # `functional_call` puts plain tensors there.
        if isinstance(registered, DTensor) and not registered.is_meta and bucket.was_replaced():
            bucket.take_over()
            self._make_sink()

    @torch.no_grad()
    def collect(self, sink: torch.Tensor) -> None:
        """Take the gradient that has arrived at the sink."""
        gradient, sink.grad = sink.grad, None
        self.follow()
        unsharded = self.param.unsharded.requires_grad_()  # it may have been frozen when it was made
        if not self.is_scattered:
            assert gradient is not None
            unsharded.grad, gradient = gradient.to(unsharded.dtype), None
            self.reducer.collect(self.dtype, keep=True, mean=True)
            if self.unit.options.show_sums:
                self.reducer.show_pending()
        if self.is_scattered or self.unit.synced:
            self.reduce(gradient)
        if self.unit.synced:
            self.unit.reduce_the_rest_later()

    @torch.no_grad()
    def reduce(self, scattered: torch.Tensor | None = None) -> None:
        """Give the parameter what has added up, and `scattered`; or, before the synced step, let that wait."""
        reducer, options = self.reducer, self.unit.options
        wide = MixedPrecisionPolicy(reduce_dtype=self.dtype) if self.dtype.is_floating_point else options.mp_policy
        how = replace(options, requires_all_reduce=self.unit.synced, mp_policy=wide)
        with record_function("FSDP::post_backward_reduce"):
            reduction = reducer.go_on(scattered, how) if self.is_scattered else reducer.reduce(how, FusedAllReduces(0))
            if reduction is not None:
                reduction.finish()


# -- modules ----------------------------------------------------------------------------------------------------------


def install(
    cell: nn.Module,
    placed: Sequence[tuple[FoundParameter, ParameterPlacement]],
    storage: Storage,
    options: UnitOptions,
    grouping: Grouping,
) -> TracedUnit:
    """Shard plain parameters; let their modules see unsharded ones while they run, in a way that can be traced.

    Each module of the unit that has something to do with them gets a class of its own, derived from the one that it
    has, with the same name. Its state is unchanged: `named_parameters()`, `state_dict()` and, outside of a forward,
    `module.weight` give the registered parameters.

    Args:
        cell: The module of the unit. Modules of units inside, installed before, are left to those.
        placed: Its parameters, plain ones, and where they go: along dim 0, in equal shards.
        storage: Where shards are kept.
        options: With `reshard_after_forward` it is level3.
        grouping: With `unsharded_gradients` it is level1; each parameter is in a group of its own.

    Communication of a forward and backward, per parameter: see the top of this module.
    """
    reducers = [make_buckets([item], storage, options.mp_policy, grouping)[1][0] for item in placed]
    unit = TracedUnit(reducers, options)
    names: dict[nn.Module, dict[str, int]] = {}
    for index, param in enumerate(unit.params):
        for slot in param.slots:
            names.setdefault(slot.module, {})[slot.name] = index
    for _, module in own_modules([cell]):
        if module is cell or any(inner in names for inner in module.modules()):
            own = names.get(module, {})
            module.__dict__.update(_hsdp_unit=unit, _hsdp_slots=own)
            original: Any = type(module)
            module.__class__ = _traced_class(original, tuple(own))
    cell.__dict__["_hyper_parallel_traced_unit"] = unit
    return unit


@cache  # one class for all equal layers, so that they can share a graph
def _traced_class(base: Any, names: tuple[str, ...]) -> Any:
    """A subclass of `base` whose forward opens the unit and whose parameters `names` then read unsharded."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit = self._hsdp_unit
        if torch.compiler.is_compiling() or unit.gathered is not None:
            return super(traced, self).forward(*args, **kwargs)
        if unit.uses_sinks:
            unit.follow()
        unit.gathered = {}
        try:
            with unit.saving():
                output = super(traced, self).forward(*args, **kwargs)
        finally:
            unit.gathered = None
        if names:  # other modules read their parameters in forwards of their own
            refuse_lazy(self, output)
        return output

    members: dict[str, Any] = {name: _reader(name) for name in names}
    members |= {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
    if issubclass(base, nn.RNNBase):
        members["_flat_weights"] = property(_flat_weights, lambda self, value: None)
        members["flatten_parameters"] = lambda self: None  # what is gathered stays where it is
    traced: Any = type(base.__name__, (base,), members)
    traced.__qualname__ = base.__qualname__
    return traced


def _reader(name: str) -> property:
    def read(self: Any) -> Any:
        if name not in self._parameters:
            raise AttributeError(name)  # nn.Module's own __getattr__ looks further, and says it better
        parameter, unit = self._parameters[name], self._hsdp_unit
        if not isinstance(parameter, DTensor):  # functional_call puts plain tensors here
            return parameter
        return unit.read(self._hsdp_slots[name], parameter)

    return property(read)


def _flat_weights(self: Any) -> list[Any]:
    """Recurrent modules read their weights from a list, which must not be one of shards."""
    return [getattr(self, name, None) for name in self._flat_weights_names]
