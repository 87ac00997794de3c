"""Sharded parameters without module hooks: the gather is part of the forward, for `torch.compile` to trace.

What optimizers and state dicts see stays registered: the shard, a DTensor. While one of a unit's modules runs its
forward, `module.weight` is unsharded instead: a property of the module's class gathers it, once per forward, by
functional collectives that have a gradient. Nothing is swapped, so there is nothing for Dynamo to break on. In short:

    forward   all_gather over the shard axis
    backward  level1: all_reduce over all data-parallel ranks, then the own rows
              level2, level3: reduce_scatter over the shard axis, then all_reduce over the replicate axis
    level3    the unsharded parameter is not kept for backward: it is gathered again

All of that is in the graph that Dynamo sees. Only accumulation of gradients is not: there the unsharded gradient
goes to a leaf of its own (a *sink*), and what is left to do is done by a hook of that leaf, after the graph's backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils.checkpoint import checkpoint

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.fully_shard.build import Found
from hyper_parallel.core.fully_shard.param import ManagedParam
from hyper_parallel.core.fully_shard.placement import ParameterPlacement
from hyper_parallel.core.fully_shard.policy import OptimizerLevel

__all__ = [
    "GroupName",
    "TracedParam",
    "TracedUnit",
    "install",
    "refuse_dtensors",
    "take_over",
]


@dataclass(frozen=True)
class GroupName:
    """A group of ranks in words that fit into a graph.

    Attributes:
        group: The group's name, by which functional collectives find it.
        size: How many ranks it has.
        rank: The calling rank's place among them.
    """

    group: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> GroupName:
        """Describe `group` as the calling rank sees it."""
        return cls(group.group_name, group.size(), group.rank())


@dataclass(frozen=True)
class TracedParam:
    """One parameter of a unit, registered where `slots` say.

    Attributes:
        name: Full name in the module that was wrapped.
        slots: Modules and the names under which they hold it; tied weights have several.
        parameter: What is registered there: a DTensor with this rank's rows, or replicated.
        shard: The ranks that hold the shards of one copy, in equal rows of dim 0; None: replicated.
        replicas: Groups over which a shard's gradient is reduced after the shard axis, one after the other.
        domain: Groups over which an unsharded gradient is reduced, one after the other.
        scale: Factor on the reduced gradient: the user's, over the number of ranks in `domain`.
    """

    name: str
    slots: Sequence[tuple[nn.Module, str]]
    parameter: nn.Parameter
    shard: GroupName | None
    replicas: tuple[GroupName, ...]
    domain: tuple[GroupName, ...]
    scale: float

    @classmethod
    def of(cls, managed: ManagedParam, scale: float) -> TracedParam:
        """Describe a parameter of the engine that was a plain one, and whose shard has been made."""
        placement, data = managed.placement, managed.placement.data
        assert data is not None
        return cls(
            name=managed.name,
            slots=[(slot.module, slot.name) for slot in managed.slots],
            parameter=managed.sharded,
            shard=None if placement.shard_dim is None else GroupName.of(data.shard_group),
            replicas=() if data.replicate_group is None else (GroupName.of(data.replicate_group),),
            domain=tuple(GroupName.of(group) for group in placement.reduce_groups or data.domain_groups),
            scale=scale,
        )


def refuse_dtensors(found: Iterable[Found]) -> None:
    """Check that parameters are plain ones, before anything is done to any of them.

    Raises:
        ValueError: One is a DTensor: its module is to see one.
    """
    for item in found:
        if isinstance(item.parameter, DTensor):
            raise ValueError(
                explain(
                    f"hsdp cannot gather {item.name!r} in a way that torch.compile traces",
                    "it is a DTensor, and use_eager_hook=False takes plain parameters only",
                    f"seen: placements {item.parameter.placements}",
                    "use_eager_hook=True for this cell",
                )
            )


def take_over(
    placed: Sequence[tuple[Found, ParameterPlacement]], device: torch.device, scale: float
) -> list[TracedParam]:
    """Split parameters and register their shards; all of it or, if one cannot be, nothing.

    Args:
        placed: Parameters and where they go: along dim 0, in equal shards.
        device: Where shards are made; those of parameters on the meta device stay there.
        scale: As in `TracedParam`.

    Raises:
        ValueError: One is a DTensor.
    """
    refuse_dtensors(found for found, _ in placed)
    made = []
    for found, placement in placed:
        managed = ManagedParam(found.name, list(found.slots), found.parameter, placement)
        unsharded = found.parameter.detach()
        shard = managed.shard_of(unsharded)
        shard = shard.clone() if unsharded.is_meta else shard.to(device, copy=True)
        managed.make_sharded(shard, found.parameter)
        made.append((managed, TracedParam.of(managed, scale)))
    for managed, _ in made:
        managed.show(managed.sharded)
    return [param for _, param in made]


@dataclass(frozen=True)
class Recipe:
    """How to reduce one parameter's gradient: what the gather hands to its backward.

    Attributes:
        shard: The ranks that hold the shards; None: there are none to gather from.
        scatter: Reduce_scatter over `shard` first.
        groups: All_reduce over these, one after the other.
        scale: Factor on the result; None: leave it, and leave out `groups`, for the unit does both later.
        dtype: Of the reduction; None: the gradient's own.
    """

    shard: GroupName | None
    scatter: bool
    groups: tuple[GroupName, ...]
    scale: float | None
    dtype: torch.dtype | None


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's rows of a registered parameter, without gradient."""
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor.detach()


# -- collectives, in the form that is the same in a graph and out of it -----------------------------------------------


def _all_gather(rows: torch.Tensor, ranks: GroupName | None) -> torch.Tensor:
    if ranks is None or ranks.size == 1:
        return rows.view_as(rows)
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_gather_into_tensor(rows.contiguous(), ranks.size, ranks.group))


def _reduce_scatter(unsharded: torch.Tensor, ranks: GroupName | None) -> torch.Tensor:
    if ranks is None or ranks.size == 1:
        return unsharded
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(
        collectives.reduce_scatter_tensor(unsharded.contiguous(), "sum", ranks.size, ranks.group)
    )


def _all_reduce(tensor: torch.Tensor, groups: Iterable[GroupName]) -> torch.Tensor:
    collectives = torch.ops._c10d_functional
    for ranks in groups:
        if ranks.size > 1:
            tensor = collectives.wait_tensor(collectives.all_reduce(tensor.contiguous(), "sum", ranks.group))
    return tensor


def _own_rows(unsharded: torch.Tensor, ranks: GroupName | None) -> torch.Tensor:
    if ranks is None or ranks.size == 1:
        return unsharded
    rows = unsharded.shape[0] // ranks.size
    return unsharded.narrow(0, ranks.rank * rows, rows)


def _reduced(gradient: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    if recipe.dtype is not None and gradient.is_floating_point():
        gradient = gradient.to(recipe.dtype)
    # fp16 could overflow in the sum, so it is scaled before; everything else after, on the smaller tensor.
    scale = recipe.scale
    early = gradient.dtype == torch.float16
    if scale is not None and early:
        gradient = gradient * scale
    if recipe.scatter:
        gradient = _reduce_scatter(gradient, recipe.shard)
    if scale is None:
        return gradient
    gradient = _all_reduce(gradient, recipe.groups)
    if not recipe.scatter:
        gradient = _own_rows(gradient, recipe.shard)
    if not early and scale != 1.0:
        return gradient * scale
    return gradient if recipe.scatter else gradient.clone()  # own rows alone, not a view that keeps all of it


class _Unsharded(torch.autograd.Function):
    """`unsharded`; its gradient is reduced and goes to `source`: the rows that it was gathered from, or a sink."""

    @staticmethod
    def forward(ctx: Any, unsharded: torch.Tensor, source: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        ctx.recipe = recipe
        ctx.dtype = source.dtype
        return unsharded.view_as(unsharded)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                explain(
                    "hsdp cannot differentiate the gradients of its parameters",
                    "their reduction over ranks has no derivative",
                    "seen: create_graph=True, for parameters of a cell",
                    "create_graph=False, or autograd.grad(loss, [x], create_graph=True) for inputs only",
                )
            )
        return None, _reduced(gradients[0], ctx.recipe).to(ctx.dtype), None


# -- a unit -----------------------------------------------------------------------------------------------------------


class TracedUnit:
    """What the modules of one unit share: its parameters, and what is gathered while a forward runs.

    Attributes:
        params: The parameters, in the order in which modules refer to them.
        gathered: Unsharded parameters gathered by the forward under way, outside of graphs; None outside of a forward.
        synced: Whether accumulated gradients are reduced at the end of the next backward.
    """

    def __init__(
        self,
        params: Sequence[TracedParam],
        level: OptimizerLevel,
        reduce_dtype: torch.dtype | None,
        accumulate: bool,
    ) -> None:
        self.params = list(params)
        self.gathered: dict[tuple[int, bool], tuple[torch.Tensor, nn.Parameter]] | None = None
        self.synced = True
        self.shows_sums = accumulate
        self.uses_sinks = accumulate
        self._ends_backward: int | None = None  # the backward at whose end sums will be reduced
        self.gathers_again = level is OptimizerLevel.SHARD_OPT_GRAD_PARAM
        self.recipes = []
        self.sums = []
        for param in self.params:
            scatter = level is not OptimizerLevel.SHARD_OPT and param.shard is not None
            groups = param.replicas if scatter else param.domain
            self.recipes.append(Recipe(param.shard, scatter, groups, param.scale, reduce_dtype))
            self.sums.append(_Sum(self, param, self.recipes[-1]))

    def unsharded(self, index: int, parameter: nn.Parameter) -> torch.Tensor:
        """A registered parameter, unsharded: gathered at its first use in a forward."""
        gathered = self.gathered
        assert gathered is not None
        key = (index, torch.is_grad_enabled())  # one gathered under no_grad has no gradient to give
        if key not in gathered:
            gathered[key] = (self.gather(index, parameter), parameter)
        return gathered[key][0]

    def gather(self, index: int, parameter: nn.Parameter) -> torch.Tensor:
        """A registered parameter, unsharded, with a gradient."""
        recipe = self.recipes[index]
        rows: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined]
        if torch.compiler.is_compiling() and self.gathers_again and recipe.shard is not None:
            # Marks the gather for AOTAutograd to repeat it in backward.
            unsharded = checkpoint(_all_gather, rows.detach(), recipe.shard, use_reentrant=False)
        else:
            unsharded = _all_gather(rows.detach(), recipe.shard)
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return unsharded
        if self.uses_sinks:
            total = self.sums[index]
            if total.is_stale(rows):
                total.refresh()
            return _Unsharded.apply(unsharded, total.sink, total.recipe)
        return _Unsharded.apply(unsharded, rows, recipe)

    def saving(self) -> AbstractContextManager[Any]:
        """How tensors are saved for backward during a forward: at level3 unsharded parameters are not."""
        if not self.gathers_again or not torch.is_grad_enabled():
            return nullcontext()
        if _someone_else_saves():  # activation checkpointing: it saves nothing and will gather again by itself
            return nullcontext()
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, saved: torch.Tensor) -> torch.Tensor | _GatherAgain:
        if not self.gathered or type(saved) is not torch.Tensor:
            return saved
        storage = saved.untyped_storage()._cdata
        for (index, _), (unsharded, parameter) in self.gathered.items():
            shard = self.recipes[index].shard
            if shard is None or shard.size == 1 or saved.dtype != unsharded.dtype:
                continue
            if unsharded.untyped_storage()._cdata == storage:
                geometry = (saved.shape, saved.stride(), int(saved.storage_offset()))
                return _GatherAgain(_local(parameter), shard, geometry)
        return saved

    # -- accumulation of gradients ------------------------------------------------------------------------------------

    def set_requires_grad_sync(self, flag: bool) -> None:
        """Whether the next backward ends with the reduction of what has been accumulated."""
        self.synced = flag
        for total in self.sums:  # not in a graph
            total.refresh()
        self.choose()

    def reduce_the_rest_later(self) -> None:
        """At the end of this backward, reduce what waits for parameters that it does not reach."""
        backward = torch._C._current_graph_task_id()
        if self._ends_backward != backward:
            self._ends_backward = backward
            Variable._execution_engine.queue_callback(self._reduce_the_rest)

    def _reduce_the_rest(self) -> None:
        self._ends_backward = None
        for total in self.sums:
            total.reduce()

    def choose(self) -> None:
        """Whether gradients go to sinks: there what has been accumulated can be added before a reduction."""
        self.uses_sinks = self.shows_sums or not self.synced or any(total.pending is not None for total in self.sums)

    def zero_grads(self) -> None:
        """Drop gradients, also those that wait."""
        for total in self.sums:
            total.parameter.grad = None
            total.clear()
        self.choose()


def _someone_else_saves() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@dataclass(frozen=True)
class _GatherAgain:
    """In place of a saved unsharded parameter (or a view of it): where it comes from."""

    rows: torch.Tensor
    shard: GroupName
    geometry: tuple[torch.Size, tuple[int, ...], int]


@torch.no_grad()
def _unpack(packed: torch.Tensor | _GatherAgain) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    return _all_gather(packed.rows, packed.shard).as_strided(*packed.geometry)


class _Sum:
    """One parameter's gradient over micro-steps, as `parameter.acc_grad` shows it if asked to.

    The sink is a leaf without memory of its own (all elements are one zero). Autograd adds to its `.grad` and then
    calls the hook, after the graph's backward: so the communication of a synced step is in no graph. Where sums are
    shown at level2 and 3, the graph has reduce_scattered what arrives here; otherwise it is unsharded, each rank's own.
    """

    def __init__(self, unit: TracedUnit, param: TracedParam, full: Recipe) -> None:
        self.unit = unit
        self.param = param
        self.full = full
        self.is_unsharded = not (full.scatter and unit.shows_sums)
        self.recipe = Recipe(full.shard, not self.is_unsharded, (), None, None if self.is_unsharded else full.dtype)
        self.pending: torch.Tensor | None = None
        self._make_sink()

    @property
    def parameter(self) -> Any:
        """What is registered now: users may put another one there."""
        module, name = self.param.slots[0]
        return module._parameters[name]

    def is_stale(self, rows: torch.Tensor) -> bool:
        """Whether the parameter has changed its dtype or device since the sink was made."""
        return rows.dtype != self.dtype or rows.device != self.sink.device

    def refresh(self) -> None:
        """Follow the parameter to another dtype or device."""
        parameter = self.parameter
        if isinstance(parameter, DTensor) and self.is_stale(parameter._local_tensor):
            self._make_sink()

    def _make_sink(self) -> None:
        local = _local(self.parameter)
        self.dtype = self.sum_dtype = local.dtype
        if local.is_floating_point():
            self.sum_dtype = self.full.dtype or torch.promote_types(local.dtype, torch.float32)
        shape = list(local.shape)
        if self.is_unsharded and self.param.shard is not None:
            shape[0] *= self.param.shard.size
        zero = torch.zeros((), dtype=local.dtype if self.is_unsharded else self.sum_dtype, device=local.device)
        self.sink = zero.expand(shape).requires_grad_()
        me = weakref.ref(self)  # what such a hook refers to is never collected if it refers to the sink

        def collect(sink: torch.Tensor) -> None:
            found = me()
            if found is not None:
                found._collect(sink)

        self.sink.register_post_accumulate_grad_hook(collect)

    @torch.no_grad()
    def _collect(self, sink: torch.Tensor) -> None:
        gradient = sink.grad
        assert gradient is not None
        sink.grad = None
        gradient = gradient.to(self.sum_dtype)
        self.pending = gradient if self.pending is None else self.pending.add_(gradient)
        if self.unit.synced:
            self.reduce()
            self.unit.reduce_the_rest_later()
        else:
            self._show(self.pending, Partial())

    @torch.no_grad()
    def reduce(self) -> None:
        """Give the parameter what has added up."""
        total, self.pending = self.pending, None
        if total is None:
            return
        if self.unit.shows_sums:
            total = _all_reduce(total, self.full.groups) * self.param.scale
            self._show(total, Replicate())
            rows = (_own_rows(total, self.param.shard) if self.is_unsharded else total).clone()
        else:
            rows = _reduced(total, self.full)
        self._add(rows)
        self.unit.choose()

    def _add(self, rows: torch.Tensor) -> None:
        """Give the parameter its gradient, and its hooks what autograd would have given them."""
        parameter = self.parameter
        gradient = self._laid_out(rows.to(parameter.dtype), parameter.placements)
        for hook in tuple((parameter._backward_hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad._local_tensor.add_(gradient._local_tensor)
        for hook in tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(parameter)

    def _show(self, total: torch.Tensor, instead: Placement) -> None:
        """Show what has added up; `instead` says of the axes over which it is not split what it is there."""
        if self.unit.shows_sums:
            parameter = self.parameter
            placements = [p if p.is_shard() and not self.is_unsharded else instead for p in parameter.placements]
            parameter.acc_grad = self._laid_out(total, placements)

    def _laid_out(self, local: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
        parameter = self.parameter
        mesh, shape = parameter.device_mesh, parameter.shape
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())

    def clear(self) -> None:
        self.pending = self.sink.grad = None
        parameter = self.parameter
        if getattr(parameter, "acc_grad", None) is not None:
            parameter.acc_grad = None


# -- modules ----------------------------------------------------------------------------------------------------------


def install(
    roots: Sequence[nn.Module],
    params: Sequence[TracedParam],
    *,
    level: OptimizerLevel,
    reduce_dtype: torch.dtype | None = None,
    accumulate: bool = False,
) -> TracedUnit:
    """Let the modules of a unit see unsharded parameters while they run, in a way that `torch.compile` can trace.

    Each module below `roots` that has something to do with `params` gets a class of its own, derived from the one
    that it has, with the same name. Its state is unchanged: `named_parameters()`, `state_dict()` and, outside of a
    forward, `module.weight` give the registered parameters.

    Args:
        roots: The modules of the unit. Modules of units inside, installed before, are left to those.
        params: Its parameters.
        level: What is split besides the optimizer's state.
        reduce_dtype: Gradients are reduced, and accumulated, in this dtype. None: their own.
        accumulate: Show gradients that add up as `parameter.acc_grad`; `parameter.grad` gets them when synced.

    Communication of a forward and backward, per parameter: see the top of this module.
    """
    unit = TracedUnit(params, level, reduce_dtype, accumulate)
    slots: dict[int, dict[str, int]] = {}
    for index, param in enumerate(unit.params):
        for module, name in param.slots:
            slots.setdefault(id(module), {})[name] = index
    owners = {id(module): module for param in unit.params for module, _ in param.slots}
    for module in _above(roots, owners):
        own = slots.get(id(module), {})
        module._hsdp_unit = unit  # type: ignore[assignment]
        module._hsdp_slots = own  # type: ignore[assignment]
        original: Any = type(module)
        module.__class__ = _traced_class(original, tuple(own))
    return unit


def _above(roots: Sequence[nn.Module], owners: dict[int, nn.Module]) -> list[nn.Module]:
    """The roots, the owners and what lies between them; outer ones first, each once."""
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module, is_root: bool) -> bool:
        if id(module) in found:
            return True
        if not is_root and id(module) not in owners and "_hsdp_unit" in module.__dict__:
            return False  # of a unit inside
        found[id(module)] = module
        below = [visit(child, False) for child in module.children()]
        if is_root or id(module) in owners or any(below):
            return True
        del found[id(module)]
        return False

    for root in roots:
        visit(root, True)
    for key, owner in owners.items():
        found.setdefault(key, owner)
    return list(found.values())


@cache  # one class for all layers that are alike, so that they can share a graph
def _traced_class(base: Any, names: tuple[str, ...]) -> Any:
    """A subclass of `base` whose forward opens the unit and whose parameters `names` then read unsharded."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit = self._hsdp_unit
        if torch.compiler.is_compiling() or unit.gathered is not None:
            return super(traced, self).forward(*args, **kwargs)
        unit.gathered = {}
        try:
            with unit.saving():
                return super(traced, self).forward(*args, **kwargs)
        finally:
            unit.gathered = None

    members: dict[str, Any] = {name: _reader(name) for name in names}
    members |= {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
    if issubclass(base, nn.RNNBase):
        members["_flat_weights"] = property(_flat_weights, lambda self, value: None)
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
        index = self._hsdp_slots[name]
        if torch.compiler.is_compiling():
            # Once per use, for a graph cannot change what is outside of it where a part of it is checkpointed.
            return unit.gather(index, parameter)
        return parameter if unit.gathered is None else unit.unsharded(index, parameter)

    return property(read)


def _flat_weights(self: Any) -> list[Any]:
    """Recurrent modules read their weights from a list, which must not be one of shards."""
    return [getattr(self, name, None) for name in self._flat_weights_names]
