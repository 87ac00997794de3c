"""This rank's shards of a module's parameters, shown in their place while the module's own code computes on them."""

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
    """Tell whether `fully_shard` or `hsdp` has been called on a module; they leave a mark in it."""
    return "_hyper_parallel_unit" in module.__dict__ or "_hyper_parallel_traced_unit" in module.__dict__


class Region:
    """What the modules of one model share that compute on local tensors.

    Attributes:
        taken: whose memory the gradients of parameters are in.
        paths: by module, the path of each of them.
        running: what shapes follow from in the calls now running, the outermost first.
        calls: how many began inside of the outermost one.
    """

    def __init__(self) -> None:
        self.taken = Taken()
        self.paths: dict[nn.Module, str] = {}
        self.running: list[Any] = []
        self.calls = 0

    def has_outer(self, path: str) -> bool:
        """Tell whether another one of them holds the module at a path."""
        return any(path != other and (other == "" or path.startswith(f"{other}.")) for other in self.paths.values())

    def owners(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield a module and those in it, but for what another one of them computes on."""
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
    """Whose memory the gradients of parameters are in.

    Two parameters may get one and the same tensor as the gradient of their shards, as the terms of a sum do. Each would
    wrap it in a DTensor of its own, so that autograd would not see that they share memory, and clipping, which is in
    place, would scale it twice. The second one to come gets a copy.
    """

    def __init__(self) -> None:
        self._held: dict[int, StorageWeakRef] = {}
        self._tidy_at = _FEWEST_TO_TIDY

    def __reduce__(self) -> Any:
        # The copy of a model has gradients of its own; and a reference that is copied is freed twice.
        return Taken, ()

    def own(self, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient in memory that no other one of a parameter lives in."""
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
    """A call's number among those of a module, and where shards stand in front of parameters in it."""

    call: int
    places: list[Place]


class _Known(NamedTuple):
    """What has been worked out about one parameter, for as long as it has this spec."""

    spec: DTensorSpec
    layout: Layout
    grad_layout: Layout | None
    is_plain: bool
    adds_up: bool


class LocalParameters:
    """The parameters of one module that computes on local tensors, with those of the modules in it that are none.

    Args:
        grad_layout: returns the layout of the gradients of a parameter's shards.
        region: the others of the model.
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
        self._owners: list[nn.Module] | None = None  # known when first needed: `fully_shard` may be called until then

    def show(self, module: nn.Module) -> Shown:
        """Put shards in front of the parameters, and return where; attributes of an instance come before parameters."""
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
        """Take the shards of a call away, until backward comes to its results; None: it has raised."""
        if shown.places and results is not None and torch.is_grad_enabled():
            self._again.watch(shown.call, shown.places, results)
        hide(shown.places)
        self._again.end_forward()

    def _unknown(self, module: nn.Module, param: nn.Parameter) -> ValueError:
        """Say that a parameter would get the gradient of this rank's share, so that copies of it drift apart."""
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
    """Take away the shards that stand in front of parameters."""
    for owner, name in places:
        owner.__dict__.pop(name, None)


class ShownAgain:
    """Shards that stand in front of a module's parameters in backward, as they did in forward.

    An activation checkpoint around a section of the module's code computes it again in backward. There they stand
    from the first gradient of a call's results on, until all gradients of its shards have come.
    """

    def __init__(self) -> None:
        self._backwards: dict[int, _CallInBackward] = {}  # of the calls that one is in, by number, the last one last
        self._count, self._running = 0, 0

    def __reduce__(self) -> Any:
        return ShownAgain, ()  # the copy of a module is in no backward

    def begin_forward(self) -> int:
        """Hide them while a forward runs, which has its own; return the number of this call."""
        self._hide()
        if torch._C._current_graph_task_id() == -1:
            self._backwards = {}  # one that has failed leaves its shards
        self._running += 1
        self._count += 1
        return self._count

    def end_forward(self) -> None:
        """Show them again."""
        self._running -= 1
        self._show()

    def watch(self, call: int, places: Sequence[Place], results: Any) -> None:
        """Note what stands in front of the parameters in a call that now ends, for its backward."""
        begin = partial(self._begin, call, [(owner, name, owner.__dict__[name]) for owner, name in places])
        for result in tree_leaves(results):
            # A leaf is the caller's own, on which hooks would stay.
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
        """Hide the shards of a call, whose gradients have come: hooks of users may read parameters from now on."""
        backward = self._backwards.get(call)
        # A reentrant checkpoint has a backward of its own, after which others may come.
        if backward is not None and backward.task == torch._C._current_graph_task_id():
            self._hide()
            del self._backwards[call]
            self._show()

    def _end_all(self, task: int) -> None:
        """Hide those of a backward that is through: of calls to whose parameters it has not come."""
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
    """The backward that a call is in, by the number of its graph, and what stands where meanwhile."""

    task: int
    shown: list[tuple[nn.Module, str, torch.Tensor]]


class _Shards(torch.autograd.Function):
    """DTensors in, this rank's shards of them out; the gradients go back as the parameters lie."""

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
    if torch.is_grad_enabled():  # someone differentiates what happens here
        full = FromLocal.apply(grad.clone(), given, shape, given.reset_partial())
        return redistribute(full, layout)
    if known.adds_up and given != layout and given.reset_partial() == layout:
        return wrapped(taken.own(grad), given, shape)  # with others, in one all_reduce
    moved = taken.own(local_redistributed(grad, given, layout, shape))
    meta = known.spec.tensor_meta
    if moved.is_contiguous() and meta is not None and moved.dtype == meta.dtype and known.is_plain:
        return DTensor(moved, known.spec, requires_grad=False)  # what torch keeps about the parameter fits
    return wrapped(moved, layout, shape)
