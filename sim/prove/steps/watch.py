"""Recorder of a training loop: calls of modules, losses, gradients and updates, step by step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from hyper_parallel.core.common.torch_compat import own_statistics
from hyper_parallel.core.dtensor.layout import Layout
from sim.kernel.context import current_rank
from sim.observers.races import is_awaited
from sim.ops import Level, OnFunctions, Proceed
from sim.prove.bound import Perturbed, largest_move
from sim.prove.infer import order_said
from sim.prove.modes.choices import Choice, ChoiceKey
from sim.prove.randomness import THE_STEP, Draw, DrawPlace, DrawUse, NoRandomness, redrawn
from sim.prove.record import (
    AxesOf,
    argument_names,
    copy_of,
    declared_of,
    local_of,
    named_buffers,
    named_modules,
    named_parameters,
    own_views,
    settle,
    tensors_in,
)
from sim.prove.steps.updates import UpdateStarts

_NEAR = 13  # frames of torch's own between a stage and the hook of its module

CallKey = tuple[str, str, str]
"""A tensor at a module's boundary: the module's path, "input" or "output", and the way to the tensor."""

LOSS: CallKey = ("", "loss", "")
"""The scalars that are differentiated, among the places in autograd's graph."""


class Declared(NamedTuple):
    """The layout that a DTensor declares.

    Attributes:
        layout: on the mesh of all ranks; None for a plain tensor, and for placements that no layout can say.
        known: the axes that it speaks of.
        shape: of the tensor, of a DTensor all of it.
    """

    layout: Layout | None = None
    known: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, axes: AxesOf | None) -> Declared:
        """Read a tensor's layout on the axes of all ranks; None: on one device."""
        return cls(*declared_of(axes, tensor), tuple(tensor.shape))


@dataclass
class RecordedStep:
    """What one step of a loop did.

    Attributes:
        calls: what stood at each boundary, one tensor per call of the module, in the order of first calls.
        losses: the scalars that were differentiated, or what the step returned.
        gradients: of each parameter when its optimizer took it.
        partial: the names of those that are DTensors, and say themselves that they are parts of a sum.
        stepped: each parameter that an optimizer has, right after its step.
        updates: each parameter at the end of the step, whoever has changed it: optimizers may step over copies.
        buffers: at the end of the step.
        starts: what its optimizers began with.
        grads: of what stood at each boundary in each call, in the order in which backward computed them.
        nodes: where that stands in autograd's graph; kept for one device alone.
        numbers: what the step reports besides its loss, by kind of row and title, e.g. the norm of all gradients; the
            same on all ranks.
        clipped: the factor by which clipping has scaled the gradients.
        early: number of calls before the first update, by boundary; None: no update.
        turns: number of recorded tensors when its optimizer took the gradient, by parameter.
        raw: of each parameter when the last `Tensor.backward` before its optimizer's step ended.
        declared: of what stood at each boundary of a plan's model.
        grads_declared: of the gradients with respect to it.
        gradients_declared: of the parameters' gradients.
        called: modules of a plan's model, in the order of their calls.
        after_forward: buffers of a plan's model then.
        redraw: random numbers of its forward that a recomputation in backward has drawn otherwise.
    """

    calls: dict[CallKey, list[torch.Tensor]] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    updates: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    starts: UpdateStarts = field(default_factory=lambda: UpdateStarts({}, {}))
    grads: dict[tuple[CallKey, int], torch.Tensor] = field(default_factory=dict)
    nodes: dict[tuple[CallKey, int], Any] = field(default_factory=dict)
    stepped: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    clipped: float = 1.0
    early: Mapping[CallKey, int] | None = None
    turns: dict[str, int] = field(default_factory=dict)
    raw: dict[str, torch.Tensor] = field(default_factory=dict)
    declared: dict[tuple[CallKey, int], Declared] = field(default_factory=dict)
    grads_declared: dict[tuple[CallKey, int], Declared] = field(default_factory=dict)
    gradients_declared: dict[str, Declared] = field(default_factory=dict)
    called: list[str] = field(default_factory=list)
    after_forward: dict[str, torch.Tensor] = field(default_factory=dict)
    redraw: Draw | None = None


@dataclass
class _Seen:
    """A tensor that was copied already, and the boundaries at which it stood."""

    tensor: torch.Tensor  # kept, so that no other tensor gets its id
    version: int
    value: torch.Tensor
    declared: Declared
    places: list[tuple[CallKey, int]] = field(default_factory=list)


@dataclass
class LoopRecord:
    """What a loop did.

    Attributes:
        initial: the parameters that it began with.
        buffers: the buffers that it began with.
        trained: the names of those that want gradients.
        steps: what it did in each.
        paths: of the modules.
        roots: the paths of those that were called from outside of any other.
        batch_norms: the paths of those that normalise with the mean of the rows that they are given.
        statistics: the names of buffers that are statistics of each rank's own rows, see `own_statistics`.
        unsaved: the names of buffers that are not saved, such as a router's counts, which it may add up when it uses
            them.
        tables: the names of parameters of which rows are looked up.
        choices: what `topk` and its like took.
        redraw: random numbers of a forward that a recomputation in backward has drawn otherwise.
        leaves: where parameters stand in autograd's graph, by name.
        uses: what became of random numbers in modules.
        repeats: backward has computed some of them again.
        is_misfit: they have other shapes than those that were shared.
        bare: where numbers are drawn that nothing is put in place of.
        stopped_in: path of the module that was running when the loop failed; None: none.
        stopped_while: it went "forward" or "backward".
        arguments: names of the positional arguments of each module of a plan's model, by path.
        declared: of its parameters, by name.
        same: for each name of a parameter, the first name of the same tensor.
        places: where a rank's elements are, of parameters that are DTensors on axes which the mesh does not have.
        draws: random numbers in its first forward.
        low: its modules that cast by hand, and to what.
        averages: some wrapper takes the mean of gradients over ranks.
        cotangents: gradients that what its model returned was given, by the way to each.
        moves: how far perturbed runs of it have moved its tensors at most, by id.
    """

    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: list[RecordedStep] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    batch_norms: set[str] = field(default_factory=set)
    statistics: set[str] = field(default_factory=set)
    unsaved: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)
    choices: Mapping[ChoiceKey, Choice] = field(default_factory=dict)
    redraw: Draw | None = None
    trained: set[str] = field(default_factory=set)
    leaves: dict[str, int] = field(default_factory=dict)
    uses: Mapping[DrawPlace, DrawUse] = field(default_factory=dict)
    repeats: bool = False
    is_misfit: bool = False
    bare: Mapping[str, None] = field(default_factory=dict)
    stopped_in: str | None = None
    stopped_while: str = "forward"
    arguments: dict[str, list[str]] = field(default_factory=dict)
    declared: dict[str, Declared] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    places: dict[str, torch.Tensor] = field(default_factory=dict)
    draws: list[Draw] = field(default_factory=list)
    low: Mapping[str, torch.dtype] = field(default_factory=dict)
    averages: bool = False
    cotangents: dict[str, torch.Tensor] = field(default_factory=dict)
    moves: dict[int, float] = field(default_factory=dict)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        """Return the parameters before a step."""
        return self.steps[number - 1].updates if number else self.initial

    def tensors(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield all tensors of the steps, each with its kind and place."""
        for number, step in enumerate(self.steps):
            for key, values in step.calls.items():
                yield from (((number, key, call), value) for call, value in enumerate(values))
            yield from (((number, "loss", at), loss) for at, loss in enumerate(step.losses))
            held: list[Mapping[Any, torch.Tensor | None]] = [step.grads, step.gradients, step.updates, step.buffers]
            held.append(step.after_forward)
            for kind, named in enumerate(held):
                yield from (((number, kind, name), each) for name, each in named.items() if each is not None)

    def measure_moves(self, perturbed: Sequence[LoopRecord]) -> list[LoopRecord]:
        """Fill in `moves`; return the perturbed runs without tensors, but for choices and random numbers."""
        others = [dict(each.tensors()) for each in perturbed]
        for key, tensor in self.tensors():
            move = largest_move(tensor, [other.get(key) for other in others])
            self.moves[id(tensor)] = max(self.moves.get(id(tensor), 0.0), move)
        return [LoopRecord(choices=each.choices, uses=each.uses, repeats=each.repeats) for each in perturbed]

    def note_layouts(
        self, named: Mapping[str, nn.Parameter], first: Mapping[str, nn.Parameter], axes: AxesOf | None
    ) -> None:
        """Note the layouts that the parameters of a plan's model declare, and which are tied.

        Args:
            named: all of them.
            first: those of other tensors than the ones before.
            axes: reads layouts; None: on one device.
        """
        names = {id(parameter): name for name, parameter in first.items()}
        self.same = {name: names[id(parameter)] for name, parameter in named.items()}
        for name, parameter in first.items():
            self.declared[name] = Declared.of(parameter, axes)
            is_apart = isinstance(parameter, DTensor) and self.declared[name].layout is None
            places = order_said(parameter, axes.rank) if is_apart and axes is not None else None
            self.places |= {} if places is None else {name: places}

    def root_of(self, path: str) -> str:
        """Return the root that a module or a tensor belongs to."""
        return max((root for root in self.roots if root and f"{path}.".startswith(f"{root}.")), key=len, default="")

    def renamed(self, roots: Mapping[str, str]) -> LoopRecord:
        """Return the same with other paths of the roots."""

        def new(path: str) -> str:
            root = self.root_of(path)
            rest = path[len(root) :].lstrip(".")
            return ".".join(part for part in (roots.get(root, root), rest) if part)

        def named(tensors: Mapping[str, Any]) -> dict[str, Any]:
            return {new(name): tensor for name, tensor in tensors.items()}

        steps = [
            replace(
                step,
                calls={(new(path), side, way): values for (path, side, way), values in step.calls.items()},
                gradients=named(step.gradients),
                raw=named(step.raw),
                updates=named(step.updates),
                buffers=named(step.buffers),
                partial={new(name) for name in step.partial},
                starts=UpdateStarts(named(step.starts.rules), named(step.starts.values)),
                grads={((new(path), side, way), call): grad for ((path, side, way), call), grad in step.grads.items()},
                nodes={},
                stepped=named(step.stepped),
            )
            for step in self.steps
        ]
        choices = {(new(path), op, number): choice for (path, op, number), choice in self.choices.items()}
        redraw = self.redraw and self.redraw._replace(path=new(self.redraw.path))
        paths, names = [new(path) for path in self.paths], [new(root) for root in self.roots]
        sets = (self.batch_norms, self.statistics, self.unsaved, self.trained)
        batch_norms, statistics, unsaved, trained = ({new(each) for each in found} for found in sets)
        uses = {(new(path), op, number, step): use for (path, op, number, step), use in self.uses.items()}
        return replace(
            self,
            initial=named(self.initial),
            buffers=named(self.buffers),
            steps=steps,
            paths=paths,
            roots=names,
            batch_norms=batch_norms,
            statistics=statistics,
            unsaved=unsaved,
            choices=choices,
            redraw=redraw,
            trained=trained,
            leaves=named(self.leaves),
            uses=uses,
        )


class LoopWatch:
    """Records the calling thread's training loop while it is the target of a `with` statement.

    Modules are named from the outermost one that is called. Calls without gradients, such as a validation's, and those
    that a checkpoint repeats in backward are left out. Random numbers in modules are taken at their mean, or are those
    that are given, so that one device and many ranks compute the same.

    Args:
        roots: the modules that names start from, where they are known before the first call.
        most: steps to record; what comes after is not.
        on_more: called where another step begins.
        keeps_graph: keep where tensors stand in autograd's graph.
        shared: random numbers in place of their means.
        calms_all: do so with those outside of modules, too: they are a step's own, and no weights or batches.
        one_model: the modules are parts of one model and have its names, e.g. several stages of a pipeline.
        explicit_steps: steps end at `end_step` only; else also where a forward or a loss follows an update.
        of_plan: there is one model, with hooks of its own that see what its plan has converted, without gradients too.
        axes: reads what its DTensors declare; None: on one device.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module] = (),
        most: int | None = None,
        on_more: Callable[[], None] = lambda: None,
        *,
        keeps_graph: bool = False,
        shared: Mapping[DrawPlace, torch.Tensor] | None = None,
        calms_all: bool = False,
        one_model: bool = False,
        explicit_steps: bool = False,
        of_plan: bool = False,
        axes: AxesOf | None = None,
    ) -> None:
        self.record = LoopRecord()
        self._of_plan, self.axes = of_plan, axes
        self._seen: dict[int, _Seen] = {}
        self.calms_all, self._keeps_graph = calms_all, keeps_graph
        self.is_updating = False  # an optimizer is at work
        self._most, self._on_more = most, on_more
        self._roots: list[tuple[str, nn.Module]] = []
        self._paths: dict[int, str] = {}
        self._kept: list[nn.Module] = []  # so that no other module gets the id of one that has a name
        self._inside: list[int] = []
        self._taken: dict[int, Any] = {}  # optimizers that have stepped in the current step
        self._explicit_steps = explicit_steps
        self._is_over = True
        self._is_enough = self._is_for_shapes = self._has_optimizer = False
        self.is_backward = False  # a loss is being differentiated
        self.failed_in: str | None = None  # the innermost module that an exception has left
        self._rank: int | None = None
        self._stack = ExitStack()
        self._calm = _CalmInSteps(self, shared)
        self.record.uses, self.record.bare = self._calm.uses, self._calm.bare
        for root in roots:
            self._name(root, one_model=one_model)

    @property
    def where(self) -> str:
        """The path of the innermost module that is running; "" for none."""
        return self._paths.get(self._inside[-1], "") if self._inside else ""

    @property
    def is_inside(self) -> bool:
        """Whether a module is running."""
        return bool(self._inside)

    @property
    def number_of_step(self) -> int:
        """How many steps came before the one that is taken, or is next."""
        return len(self.record.steps) - (not self._is_over)

    @property
    def is_for_shapes(self) -> bool:
        """Whether a stage of torch's pipelining asks what the module that is running returns."""
        return bool(self._inside) and self._is_for_shapes

    def __enter__(self) -> LoopWatch:
        self._rank = current_rank()
        hooks = [
            *_hooks_on(self._kept if self._of_plan else None, self._enter, self._enter_module, self._leave_module),
            optimizer_hooks.register_optimizer_step_pre_hook(self._before_update),
            optimizer_hooks.register_optimizer_step_post_hook(self._after_update),
        ]
        for hook in hooks:
            self._stack.callback(hook.remove)
        self._stack.enter_context(self._calm)
        if not self._of_plan:  # else it is known where a loss is differentiated
            self._stack.enter_context(_Losses(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        has_failed = kind is not None and not self._is_enough and (self._inside or issubclass(kind, Exception))
        if has_failed:
            self.record.stopped_in = self.where if self._inside else self.failed_in
            self.record.stopped_while = "backward" if self.is_backward else "forward"
        if not (has_failed and self._explicit_steps) and (self._taken or self._have_weights_moved()):
            self._note_end()
        self._note_draws()
        self.record.redraw = redrawn(self._calm.draws, self._calm.again)
        self.record.repeats, self.record.is_misfit = self._calm.repeats, self._calm.is_misfit
        if has_failed:
            time.sleep(1e-6)  # on the virtual clock: the other ranks compute as far as they come, to be compared

    # -- names -------------------------------------------------------------------------------------------------------

    def _name(self, root: nn.Module, *, one_model: bool = False) -> None:
        """Name the modules of an outermost one; the first has no prefix, others that of their class."""
        found = named_modules(root)
        known = [self._paths[id(module)] for module in found.values() if id(module) in self._paths]
        first = one_model or not self._roots or all(next(each.parameters(), None) is None for _, each in self._roots)
        prefix = "" if first or (known and "" in known) else type(root).__name__
        count = sum(other == prefix or other.rpartition("_")[0] == prefix for other, _ in self._roots)
        prefix += f"_{count}" if prefix and count else ""
        self._roots.append((prefix, root))
        self.record.roots.append(prefix)
        for path, module in found.items():
            if id(module) not in self._paths:
                self._kept.append(module)
                self._paths[id(module)] = ".".join(part for part in (prefix, path) if part)
                self.record.paths.append(self._paths[id(module)])
                if self._of_plan:
                    self.record.arguments[path] = argument_names(module)
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                    self.record.batch_norms.add(self._paths[id(module)])
                here = f"{self._paths[id(module)]}."
                self.record.statistics.update(f"{here}{name}".lstrip(".") for name in own_statistics(module))
                self.record.unsaved.update(f"{here}{name}".lstrip(".") for name in module._non_persistent_buffers_set)
                if isinstance(module, nn.Embedding):
                    self.record.tables.add(f"{self._paths[id(module)]}.weight".removeprefix("."))
        if self.record.steps:
            self.note_initial()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters as they are now, by name; shared ones under their first."""
        return dict(_first_names(self._roots, named_parameters))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers as they are now, by name."""
        return dict(_first_names(self._roots, named_buffers))

    # -- forward -----------------------------------------------------------------------------------------------------

    def _step(self) -> RecordedStep | None:
        """Return the record of the current step; None where no more are asked for."""
        if self._is_over:
            self._note_end()
            if not self.record.steps:
                self.note_initial()
            self._is_over, self._taken = False, {}
            self._is_enough = self._most is not None and len(self.record.steps) >= self._most
            if self._is_enough:
                self._on_more()
            else:
                self.record.steps.append(RecordedStep())
        return None if self._is_enough else self.record.steps[-1]

    def note_initial(self) -> None:
        """Copy parameters and buffers that have not been seen before."""
        self.record.buffers |= {
            name: copy_of(buffer) for name, buffer in self.buffers().items() if name not in self.record.buffers
        }
        for name, parameter in self.parameters().items():
            if name not in self.record.initial and not parameter.is_meta:
                self.record.initial[name] = copy_of(parameter)
                self.record.trained.update([name] if parameter.requires_grad else [])
                self.record.leaves[name] = id(parameter)
        if self._of_plan and not self.record.same:  # a forward that has begun may have put others in their place
            self.record.note_layouts(named_parameters(self._roots[0][1]), self.parameters(), self.axes)

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        kwargs = _keywords()
        args, views = self._enter(module, args, kwargs)
        kwargs.update(views)
        return args

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note what a module is given, and return it with tensors of its own."""
        self.failed_in = None
        if not self._inside:
            self._is_for_shapes = _asks_for_shapes()
            if id(module) not in self._paths:
                self._name(module)
            self._is_over = self._is_over or (
                self._counts() and not self._explicit_steps and self._have_weights_moved()
            )
        is_noted = id(module) in self._paths and self._counts()
        step = self._begin() if is_noted else None  # before it gathers its parameters, which are noted as they are
        self._inside.append(id(module))
        if is_noted:
            views: dict[int, torch.Tensor] = {}
            args = own_views(args, views, quick=not self._of_plan)
            kwargs = own_views(kwargs, views, quick=not self._of_plan)
        if step is not None and self._of_plan:
            step.called.append(self.where)
        for index, value in enumerate(args):
            self._note(module, "input", str(index), value)
        names = argument_names(module) if kwargs else []
        for name, value in kwargs.items():
            self._note(module, "input", str(names.index(name)) if name in names else name, value)
        return args, kwargs

    def _leave_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del args
        while self._inside and self._inside.pop() != id(module):
            pass  # a module that an exception has ended, caught on the way
        if sys.exc_info()[0] is not None:
            self.failed_in = self.failed_in or self._paths.get(id(module))
        self._note(module, "output", "", output)
        if not self._inside:
            self._seen.clear()
            step = self._begin() if self._of_plan and self._counts() else None
            if step is not None:
                step.after_forward = {name: copy_of(buffer) for name, buffer in self.buffers().items()}

    def _counts(self) -> bool:
        """Whether a call is one of training, and none of a validation, a repeated forward or a question for shapes."""
        is_training = self._of_plan or torch.is_grad_enabled()
        return not self._is_for_shapes and is_training and torch._C._current_graph_task_id() == -1

    def _begin(self) -> RecordedStep | None:
        if not self._explicit_steps:
            self._is_over = self._is_over or bool(self._taken)  # an optimizer has ended the step before
        return self._step()

    def _note(self, module: nn.Module, side: str, place: str, value: Any) -> None:
        path = self._paths.get(id(module))
        if path is None or not self._counts():
            return
        step = self._begin()
        if step is not None:
            for way, tensor in tensors_in(value):
                if not self._of_plan and (tensor.is_meta or is_awaited(tensor)):
                    continue  # a schedule that asks for shapes; an exchange that the module is to wait for
                calls, seen = step.calls.setdefault((path, side, place + way), []), self._look(step, tensor)
                seen.places.append(((path, side, place + way), len(calls)))
                if self._of_plan:
                    step.declared[seen.places[-1]] = seen.declared
                if self._keeps_graph and tensor.grad_fn is not None:
                    step.nodes[seen.places[-1]] = tensor.grad_fn
                calls.append(seen.value)

    def _look(self, step: RecordedStep, tensor: torch.Tensor) -> _Seen:
        """Return the copy of a tensor, made once for all the boundaries that it passes in a forward."""
        known, version = self._seen.get(id(tensor)), -1 if tensor.is_inference() else tensor._version
        if known is not None and known.version == version >= 0:
            return known
        seen = self._seen[id(tensor)] = _Seen(tensor, version, copy_of(tensor), Declared.of(tensor, self.axes))
        if tensor.requires_grad and (self._of_plan or not tensor.is_leaf):
            tensor.register_hook(_grad_hook(step, seen.places, self.axes))
        return seen

    # -- backward and updates ----------------------------------------------------------------------------------------

    def note_loss(self, value: Any) -> None:
        """Keep a scalar."""
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            return
        step = self._step()
        if step is not None:
            step.losses.append(copy_of(value).reshape(()))

    def on_backward(self, loss: torch.Tensor) -> None:
        """Keep a scalar that is differentiated."""
        step = self._begin()
        if step is not None and self._keeps_graph:
            step.nodes[LOSS, len(step.losses)] = loss.grad_fn
        self.note_loss(loss)

    def after_backward(self) -> None:
        """Copy the gradients before the step goes on to reduce, add to, or scale them; not those on a device."""
        is_plain = not self._of_plan and (self._keeps_graph or self._rank is not None)  # perturbed runs need none
        if is_plain and not self._is_over and not self._is_enough:
            step, grads = self.record.steps[-1], {name: each.grad for name, each in self.parameters().items()}
            there = {name: grad for name, grad in grads.items() if grad is not None and name not in step.gradients}
            here = {name: grad for name, grad in there.items() if grad.device.type == "cpu" and not is_awaited(grad)}
            step.raw.update({name: copy_of(grad) for name, grad in here.items()})

    def note_result(self, value: Any) -> None:
        """Keep what the step returned in place of what it differentiated."""
        step = self._step()
        if step is not None:
            step.losses = []
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                value = torch.tensor(float(value), dtype=torch.float64)
            self.note_loss(value)

    def note_numbers(self, numbers: Mapping[tuple[str, str], float]) -> None:
        """Keep what the step reports, see `RecordedStep.numbers`."""
        step = self._step()
        if step is not None:
            step.numbers = {key: torch.tensor(float(number), dtype=torch.float64) for key, number in numbers.items()}

    def note_clipping(self, norm: float, most: float) -> None:
        """Keep by what gradients of a norm were scaled, so that it is at most so much; 0: they were not."""
        step = self._step()
        if step is not None and most:
            step.clipped = min(1.0, most / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_

    def note_gradients(self, chosen: set[int] | None = None) -> None:
        """Copy the gradients of some parameters, or of all."""
        step = self._step()
        if step is not None:
            turn = sum(map(len, step.calls.values()))
            for name, parameter in self.parameters().items():
                if chosen is None or id(parameter) in chosen:
                    grad, step.turns[name] = parameter.grad, turn
                    step.gradients[name] = None if grad is None else copy_of(grad)
                    if isinstance(grad, DTensor) and any(each.is_partial() for each in grad.placements):
                        step.partial.add(name)
                    if self._of_plan:
                        step.gradients_declared[name] = Declared() if grad is None else Declared.of(grad, self.axes)

    def end_step(self) -> None:
        """Copy the weights and buffers that the step leaves; what comes belongs to the next."""
        step = self._step()
        self._note_draws()
        if step is not None and self._of_plan:
            step.redraw = redrawn(self._calm.draws, self._calm.again)
            self._calm.next_step()
        self._is_over = True
        self._note_end()

    def _note_draws(self) -> None:
        if len(self.record.steps) == 1 and not self.record.draws:
            self.record.draws = [draw for draw in self._calm.draws if not draw.spread]

    def _note_end(self) -> None:
        """Copy all parameters and buffers at the end of the last step, unless that is done."""
        if not self.record.steps or self._is_enough or self.record.steps[-1].updates:
            return
        step = self.record.steps[-1]
        step.buffers = {name: copy_of(buffer) for name, buffer in self.buffers().items()}
        for name, parameter in self.parameters().items():
            if name in self.record.initial:
                after = step.stepped.get(name)
                # From another device each is copied anew: comparing would wait, and hide a race.
                is_same = after is not None and parameter.device.type == "cpu" and _is_equal(parameter, after)
                step.updates[name] = after if after is not None and is_same else copy_of(parameter)

    def _have_weights_moved(self) -> bool:
        """Return True if a loop without optimizers of torch's has changed a weight since backward: its step is over."""
        steps = self.record.steps
        if self._has_optimizer or self._most is None or self._is_over or not steps or not steps[-1].losses:
            return False
        before = steps[-2].updates if len(steps) > 1 else self.record.initial
        named = ((before[name], each) for name, each in self.parameters().items() if name in before)
        # Parts of other shapes are of a parameter that is gathered.
        pairs = [(each, value) for value, each in named if each.requires_grad and local_of(each).shape == value.shape]
        return not all(_is_equal(each, value) for each, value in pairs)

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if current_rank() != self._rank:
            return  # torch has one table of these hooks for all ranks
        again = id(optimizer) in self._taken
        self._is_over = self._is_over or (again and not self._explicit_steps)
        step = self._step()
        if not self._of_plan:
            self.note_gradients(_params_of(optimizer))
        if step is not None:
            starts = step.starts.joined(UpdateStarts.of(optimizer, self.parameters()))
            step.starts = (
                UpdateStarts({}, starts.values) if again and self._explicit_steps else starts
            )  # no replay of two
        self.is_updating = self._has_optimizer = True

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if current_rank() != self._rank:
            return
        self.is_updating = False
        step, own = self._step(), _params_of(optimizer)
        if step is not None:
            if step.early is None:
                step.early = {key: len(values) for key, values in step.calls.items()}
            step.stepped.update({name: copy_of(each) for name, each in self.parameters().items() if id(each) in own})
        self._taken[id(optimizer)] = optimizer  # kept, so that no other one gets its id

    @property
    def has_differentiated(self) -> bool:
        """Whether a loss has been differentiated in the current step."""
        return not self._is_over and bool(self.record.steps[-1].losses)

    @property
    def has_updated(self) -> bool:
        """Whether an optimizer has stepped in the current step."""
        return bool(self._taken)


def _hooks_on(modules: Sequence[nn.Module] | None, enter: Any, enter_any: Any, leave: Any) -> Iterator[Any]:
    """Let modules call functions when they are entered and left; None: all modules there are."""
    if modules is None:
        yield module_hooks.register_module_forward_pre_hook(enter_any)
        yield module_hooks.register_module_forward_hook(leave, always_call=True)
        return

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return enter(module, args, kwargs)  # a function of its own: a copy of the model keeps it as it is

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        leave(module, args, output)

    for module in modules:
        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after, always_call=True)


def _grad_hook(
    step: RecordedStep, places: Sequence[tuple[CallKey, int]], axes: AxesOf | None
) -> Callable[[torch.Tensor | None], None]:
    """Return a hook that keeps a gradient; it holds neither step nor graph, as no collector sees that cycle."""
    grads, declared = step.grads, step.grads_declared

    def hook(grad: torch.Tensor | None) -> None:
        if grad is None:  # of a function that returns none, such as for rows that no rank has sent
            return
        value = copy_of(grad)
        if places[0] in grads:  # of a second backward
            settle(grad.device)
            value = grads[places[0]] + value
        grads.update(dict.fromkeys(places, value))
        if axes is not None:
            declared.update(dict.fromkeys(places, Declared.of(grad, axes)))

    return hook


def _is_equal(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    """Return True if a rank's part of a parameter still is what was copied of it."""
    own = local_of(parameter)
    if own.device != value.device:
        own = copy_of(parameter)
        settle(parameter.device)
    return own.shape == value.shape and torch.equal(own, value)


def _params_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _asks_for_shapes() -> bool:
    """Whether a stage of torch's pipelining calls its module before the first step to learn what it returns."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_NEAR):
        if frame is None:
            return False
        if frame.f_code.co_name in ("_forward_metadata_inference", "_shape_inference"):
            return True
        frame = frame.f_back
    return False


def _keywords() -> dict[str, Any]:
    """Return the keyword arguments of the module that is called, which torch does not give to hooks on all modules."""
    there = sys._getframe(2).f_locals.get("kwargs")  # of nn.Module's own call
    return there if isinstance(there, dict) else {}


def _first_names(roots: Sequence[tuple[str, nn.Module]], find: Any) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for prefix, root in roots:
        found: Mapping[str, torch.Tensor] = find(root)
        for name, tensor in found.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{prefix}.{name}" if prefix else name), tensor


class _CalmInSteps(NoRandomness):
    """Takes random numbers at their mean, of a loop only those in modules: others make weights and batches."""

    def __init__(self, watch: LoopWatch, shared: Mapping[DrawPlace, torch.Tensor] | None) -> None:
        super().__init__(self._path, shared)
        self._watch = watch

    def _path(self) -> str:
        if self._watch.is_inside or not self._watch.calms_all or torch._C._current_graph_task_id() != -1:
            return self._watch.where
        return THE_STEP

    @property
    def number_of_step(self) -> int:
        """How many steps came before."""
        return self._watch.number_of_step

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Carry out an operation."""
        backward = torch._C._current_graph_task_id() != -1
        if self._watch.is_for_shapes:
            return proceed(*args, **kwargs)
        if not self._watch.is_inside and not backward and not self._watch.calms_all:
            return self.noted(func, types, args, kwargs)  # a checkpoint around all of it draws here, too
        return super().handle(func, types, args, kwargs, proceed)


class PerturbedSteps(Perturbed):
    """Perturbs a loop from its first step on; its weights and data, and updates by its optimizers, stay exact.

    Args:
        watch: of the loop.
        seed: see `Perturbed`.
    """

    def __init__(self, watch: LoopWatch, seed: int) -> None:
        super().__init__(seed=seed)
        self._watch = watch

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Run an operation; those of DTensors come once more, as operations on their local tensors."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if not self._watch.record.steps or self._watch.is_updating:
            return proceed(*args, **kwargs)
        return super().handle(func, types, args, kwargs, proceed)


class _Losses(OnFunctions):
    """Sees which scalars are differentiated."""

    order = Level.LOSSES

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Call `func`."""
        self._watch.is_backward = self._watch.is_backward or func is torch.Tensor.backward
        if func is torch.Tensor.backward and args[0].numel() == 1:
            self._watch.on_backward(args[0])
        result = proceed(*args, **kwargs)
        if func is torch.Tensor.backward:
            self._watch.is_backward = False
            self._watch.after_backward()
        return result
