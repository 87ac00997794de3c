"""This rank's shards of a module's parameters, which replace the parameters while the module's code runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from hyper_parallel.core.common.errors import InvalidValue, class_name
from hyper_parallel.core.common.torch_compat import ADDS_UP, runs_eagerly
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.spelling import is_strided
from hyper_parallel.core.redistribute.api import redistribute
from hyper_parallel.core.redistribute.gradients import FromLocal
from hyper_parallel.core.shard.entry_exit import local_redistributed, waited_for, wrapped

OWN_PARTS = "_hyper_parallel_own_parts"
"""What an attribute of a module is called that says: its parameters are DTensors on a mesh that the plan need not know,
and its code takes its shards of them itself, and says what their gradients are. `fully_shard` may be called on it."""

_FEWEST_TO_TIDY = 256


def is_unit(module: nn.Module) -> bool:
    """Return True if `fully_shard` or `hsdp` was called on a module, which leaves a mark in it."""
    return "_hyper_parallel_unit" in module.__dict__ or "_hyper_parallel_traced_unit" in module.__dict__


class Region:
    """State shared by the modules of one model that compute on local tensors.

    Attributes:
        taken: the memory of parameters' gradients.
        paths: the path of each of these modules.
        running: shape keys of the calls now running, the outermost first.
        calls: number of calls inside of the outermost one so far.
    """

    def __init__(self) -> None:
        self.taken = Taken()
        self.paths: dict[nn.Module, str] = {}
        self.running: list[Any] = []
        self.calls = 0

    def has_outer(self, path: str) -> bool:
        """Return True if another of these modules contains the module at a path."""
        return any(path != other and (other == "" or path.startswith(f"{other}.")) for other in self.paths.values())

    def owners(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield a module and its descendants, without descendants that take their own shards."""
        yield module
        for name, child in module._modules.items():
            if child is None or child in self.paths or OWN_PARTS in child.__dict__:
                continue
            if is_unit(child):
                blame = f"fully_shard has {name!r} in it, whose parameters are gathered only when that is called"
                seen = f"modules: {class_name(module)} holds {name!r}, a {class_name(child)}"
                hint = "fully_shard on the module that has the local_plan, or on one that holds it"
                raise InvalidValue("cannot run a module on local tensors", blame, seen, hint)
            yield from self.owners(child)


class Taken:
    """The memory of parameters' gradients.

    Two parameters may get the same tensor as gradient of their shards, e.g. as terms of a sum. Each would wrap it in
    a separate DTensor, so autograd would not see the shared memory, and in-place clipping would scale it twice.
    Therefore the second parameter gets a copy.
    """

    def __init__(self) -> None:
        self._held: dict[int, StorageWeakRef] = {}
        self._tidy_at = _FEWEST_TO_TIDY

    def __reduce__(self) -> Any:
        # A copied model has other gradients, and a copied StorageWeakRef would be freed twice.
        return Taken, ()

    def own(self, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient, copied if its memory already holds another parameter's gradient."""
        storage = grad.untyped_storage()
        known = self._held.get(storage._cdata)
        if known is not None and not known.expired():
            return grad.clone(memory_format=torch.contiguous_format)
        self._held[storage._cdata] = StorageWeakRef(storage)
        if len(self._held) > self._tidy_at:
            self._held = {key: ref for key, ref in self._held.items() if not ref.expired()}
            self._tidy_at = max(_FEWEST_TO_TIDY, 2 * len(self._held))
        return grad


Place = tuple[nn.Module, str]


class Shown(NamedTuple):
    """The number of a module's call, and the places where shards replace parameters."""

    call: int
    places: list[Place]


class _Known(NamedTuple):
    """Cached facts about one parameter, valid while it has this spec."""

    spec: DTensorSpec
    layout: Layout
    grad_layout: Layout | None
    is_plain: bool
    adds_up: bool


class LocalParameters:
    """The parameters of one module that computes on local tensors, including its descendants that do not.

    Args:
        grad_layout: function from a parameter's layout to the layout of its shards' gradients.
        region: state shared by all such modules of the model.
        where: the module, for messages.
        shared: the axes over which its ranks share the work.
    """

    def __init__(
        self, grad_layout: Callable[[Layout], Layout | None], region: Region, where: str, shared: Sequence[str]
    ) -> None:
        self._grad_layout, self._region = grad_layout, region
        self._where, self._shared = where, shared
        self._known: dict[tuple[int, str], _Known] = {}
        self._again = ShownAgain()
        self._owners: list[nn.Module] | None = None  # set at the first call: until then `fully_shard` may be called

    def show(self, module: nn.Module) -> Shown:
        """Replace parameters by shards and return the places; instance attributes hide entries of `_parameters`."""
        shown = Shown(self._again.begin_forward(), [])
        try:
            self._put_in_front(module, shown)
        except BaseException:
            self.hide(shown, None)
            raise
        return shown

    def _put_in_front(self, module: nn.Module, shown: Shown) -> None:
        places = shown.places
        wanting: list[DTensor] = []
        known: list[_Known] = []
        if self._owners is None:
            self._owners = [owner for owner in self._region.owners(module) if owner._parameters]
        for owner in self._owners:
            for name, param in _parameters(owner):
                if not isinstance(param, DTensor) or name in owner.__dict__:
                    if self._shared and type(param) is nn.Parameter and param.requires_grad and torch.is_grad_enabled():
                        raise self._unknown(module, param)
                    continue
                if param.requires_grad and torch.is_grad_enabled():
                    known.append(self._look_up(owner, name, param))
                    wanting.append(param)
                    places.append((owner, name))
                else:
                    owner.__dict__[name] = waited_for(param._local_tensor).detach()
                    places.insert(0, (owner, name))
        if wanting:
            shards = _Shards.apply(known, self._region.taken, partial(self._again.end, shown.call), *wanting)
            for (owner, name), shard in zip(places[-len(shards) :], shards, strict=True):
                owner.__dict__[name] = shard

    def hide(self, shown: Shown, results: Any) -> None:
        """Remove the shards of a call until its backward; results None: the call has raised."""
        if shown.places and results is not None and torch.is_grad_enabled():
            self._again.watch(shown.call, shown.places, results)
        hide(shown.places)
        self._again.end_forward()

    def _unknown(self, module: nn.Module, param: nn.Parameter) -> ValueError:
        """Return the error for a parameter whose gradient is only this rank's share, as its copies would diverge."""
        name = next(name for name, each in module.named_parameters() if each is param)
        asked = f"cannot run {self._where} on local tensors"
        axes = ", ".join(map(repr, self._shared))
        blame = f"parameter {name!r} has no layout, and over {axes} its gradients are shares to be added"
        hint = 'a layout for it in the plan, ("None",) if all ranks have the same; or requires_grad_(False)'
        return InvalidValue(asked, blame, f"{name}: a plain tensor of shape {tuple(param.shape)}", hint)

    def _look_up(self, owner: nn.Module, name: str, param: DTensor) -> _Known:
        found = self._known.get((id(owner), name))
        if found is None or found.spec is not param._spec:
            layout = Layout.of_spec(param._spec)
            is_plain = param.is_contiguous() and not any(map(is_strided, param.placements))
            given, adds_up = self._grad_layout(layout), ADDS_UP in param.__dict__
            found = self._known[id(owner), name] = _Known(param._spec, layout, given, is_plain, adds_up)
        return found


def _parameters(owner: nn.Module) -> list[tuple[str, Any]]:
    return list(owner._parameters.items())


def hide(places: Sequence[Place]) -> None:
    """Remove the shards that replace parameters."""
    for owner, name in places:
        owner.__dict__.pop(name, None)


class ShownAgain:
    """Shards that replace a module's parameters again in backward.

    An activation checkpoint inside of the module recomputes its code in backward. The shards stay from the first
    gradient of a call's results until all gradients of the shards have arrived.
    """

    def __init__(self) -> None:
        self._backwards: dict[int, _CallInBackward] = {}  # by number, the calls in backward, oldest first
        self._count, self._running = 0, 0

    def __reduce__(self) -> Any:
        return ShownAgain, ()  # a copied module is in no backward

    def begin_forward(self) -> int:
        """Remove them during a forward, which has other shards; return the number of this call."""
        self._hide()
        if torch._C._current_graph_task_id() == -1:
            self._backwards = {}  # a failed backward leaves its shards
        self._running += 1
        self._count += 1
        return self._count

    def end_forward(self) -> None:
        """Put them in place again."""
        self._running -= 1
        self._show()

    def watch(self, call: int, places: Sequence[Place], results: Any) -> None:
        """Keep the shards of a call that now ends, for its backward."""
        begin = partial(self._begin, call, [(owner, name, owner.__dict__[name]) for owner, name in places])
        for result in tree_leaves(results):
            # Not on leaves, because they belong to the caller, and the hooks would stay.
            if isinstance(result, torch.Tensor) and result.grad_fn is not None:
                result.register_hook(begin)

    @runs_eagerly
    def _begin(self, call: int, shown: list[tuple[nn.Module, str, torch.Tensor]], grad: torch.Tensor) -> None:
        del grad
        if call in self._backwards:
            return
        task = torch._C._current_graph_task_id()
        if all(task != other.task for other in self._backwards.values()):
            Variable._execution_engine.queue_callback(partial(self._end_all, task))
        self._backwards[call] = _CallInBackward(task, shown)
        self._show()

    def end(self, call: int) -> None:
        """Remove the shards of a call after their gradients, because hooks of users may read parameters from now on."""
        backward = self._backwards.get(call)
        # A reentrant checkpoint runs a separate backward, and further gradients may follow it.
        if backward is not None and backward.task == torch._C._current_graph_task_id():
            self._hide()
            del self._backwards[call]
            self._show()

    def _end_all(self, task: int) -> None:
        """Remove the shards of a finished backward, including calls whose parameters it did not reach."""
        self._hide()
        self._backwards = {call: each for call, each in self._backwards.items() if each.task != task}
        self._show()

    def _show(self) -> None:
        if self._running:
            return
        for backward in self._backwards.values():
            for owner, name, shard in backward.shown:
                owner.__dict__[name] = shard

    def _hide(self) -> None:
        if self._running:
            return
        for backward in self._backwards.values():
            hide([(owner, name) for owner, name, _ in backward.shown])


class _CallInBackward(NamedTuple):
    """The number of the graph task of a call's backward, and the shards to put in place meanwhile."""

    task: int
    shown: list[tuple[nn.Module, str, torch.Tensor]]


class _Shards(torch.autograd.Function):
    """Takes this rank's shards of DTensors; its backward returns gradients in the parameters' layouts."""

    @staticmethod
    def forward(
        ctx: Any, known: Sequence[_Known], taken: Taken, end: Callable[[], None], *params: DTensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.known, ctx.taken, ctx.end = known, taken, end
        held = [waited_for(param._local_tensor) for param in params]
        return tuple(shard.view_as(shard) for shard in held)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.end()
        back = [
            None if grad is None else _back(waited_for(grad), known, ctx.taken)
            for known, grad in zip(ctx.known, grads, strict=True)
        ]
        return (None, None, None, *back)


def _back(grad: torch.Tensor, known: _Known, taken: Taken) -> DTensor:
    shape, layout = known.spec.shape, known.layout
    given = known.grad_layout or layout
    if torch.is_grad_enabled():  # second derivatives are recorded
        full = FromLocal.apply(grad.clone(), given, shape, given.reset_partial())
        return redistribute(full, layout)
    if known.adds_up and given != layout and given.reset_partial() == layout:
        return wrapped(taken.own(grad), given, shape)  # the engine reduces it together with others, in one all_reduce
    moved = taken.own(local_redistributed(grad, given, layout, shape))
    meta = known.spec.tensor_meta
    if moved.is_contiguous() and meta is not None and moved.dtype == meta.dtype and known.is_plain:
        return DTensor(moved, known.spec, requires_grad=False)  # the parameter's spec fits
    return wrapped(moved, layout, shape)
