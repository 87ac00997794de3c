"""The two runs of a proof: the model on one device, and the parallel model on simulated ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.core.activations.offload import OffloadedBlock
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import Machine
from hyper_parallel.core.redistribute.api import from_local
from hyper_parallel.core.shard.spelling import LayoutTree, leaves
from hyper_parallel.platform import get_platform
from sim.explain.errors import RankFailed, SimError
from sim.late.switch import why_not
from sim.observers.races import look
from sim.patches.devices import has_named
from sim.prove.bound import FEW, SAFETY, DoubleGroupedProducts, largest_move
from sim.prove.evidence import largest, unit_roundoff
from sim.prove.infer import order_said
from sim.prove.modes.choices import Choice, ChoiceKey, Choices
from sim.prove.modes.draws import SharedDraws
from sim.prove.modes.precision import WidePrecision, narrow_words
from sim.prove.randomness import Draw, DrawPlace, DrawUse, NoRandomness, bare_words, redrawn
from sim.prove.record import (
    AxesOf,
    ModuleRecorder,
    copy_of,
    declared_of,
    mapped,
    named_buffers,
    named_parameters,
    settle,
    spread_layout,
    tensors_in,
)
from sim.prove.report import Report
from sim.prove.steps.mutants import Mutant, put_into_model
from sim.prove.steps.updates import ROUNDINGS, UpdateStarts, is_elementwise
from sim.world import World

ASKED = "cannot verify a plan"

_MOST_HELD = 8  # parameters that a message lists


@dataclass(frozen=True)
class Task:
    """What is computed, in both runs.

    Attributes:
        inputs: full values, by name or position.
        positional: the inputs are positional.
        apply: makes a model parallel, on the calling rank.
        cuts: which part of each input a rank is given.
        wrapped: inputs that are given as DTensors.
        optimizer_fn: None for no optimizer.
        second: full values for the steps after the first; None: the same.
        shared: random numbers for one device and for each rank, in place of their means; None: for none.
        device: of the ranks.
    """

    model_fn: Callable[[], nn.Module]
    inputs: Mapping[str, Any]
    positional: bool
    mesh: Layout
    apply: Callable[[nn.Module, DeviceMesh], Any]
    cuts: Mapping[str, LayoutTree]
    wrapped: frozenset[str]
    loss_fn: Callable[..., torch.Tensor] | None
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | None
    dtype: torch.dtype
    seed: int
    steps: int
    train: bool
    second: Mapping[str, Any] | None = None
    shared: SharedDraws | None = None
    device: str = "cpu"
    machine: str | Machine | None = None

    @property
    def values(self) -> list[Mapping[str, Any]]:
        """Full values for each step; the last ones are for those that follow, too."""
        return [self.inputs] if self.second is None else [self.inputs, self.second]

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which plain inputs are split: ranks along them see different data."""
        return self._axes_of([key for key in self.cuts if key not in self.wrapped])

    @property
    def input_axes(self) -> tuple[str, ...]:
        """The axes over which any inputs are split, DTensors too: a rank's loss may be that of its part."""
        return self._axes_of(list(self.cuts))

    def _axes_of(self, keys: Sequence[str]) -> tuple[str, ...]:
        split = {
            name
            for key in keys
            for layout in leaves(self.cuts[key])
            for entry in layout.alias_placements or ()
            for name in ((entry,) if isinstance(entry, str) else entry)
        }
        return tuple(name for name in self.mesh.alias_name if name in split)


@dataclass
class Run:
    """What one device, or one rank, has computed in one step.

    Attributes:
        recorder: what went in and out of modules.
        initial: parameters before it, by name; those of the first step as they were made parallel.
        layouts: what parameters that are DTensors declare, and for which axes.
        same: for each name of a parameter, the first name of the same tensor.
        leaves: the parameters themselves.
        draws: random numbers in the first step's forward.
        uses: what became of those of this step.
        repeats: backward has computed some of them again, in this step or before.
        is_misfit: they have other shapes than those that were shared.
        redraw: one of them that a recomputation in backward has drawn otherwise.
        outputs: the tensors that the model returned, with the way to each.
        loss: what was differentiated, if it is one number.
        gradients: after backward.
        starts: what the optimizer began with.
        update: parameters after the optimizer's step; none without an optimizer.
        buffers: before forward.
        changed_buffers: after forward.
        stepped_buffers: after the optimizer's step.
        places: where the rank's elements are, of parameters that are DTensors on axes which the mesh does not have.
        choices: what `topk` and its like took, the first step's for all steps.
        low: modules that cast by hand, and to what.
        averages: some wrapper takes the mean of gradients over ranks.
        step: how many came before.
    """

    recorder: ModuleRecorder
    initial: dict[str, torch.Tensor]
    layouts: dict[str, tuple[Layout | None, tuple[str, ...]]]
    same: dict[str, str]
    leaves: dict[str, nn.Parameter]
    draws: list[Draw] = field(default_factory=list)
    uses: Mapping[DrawPlace, DrawUse] = field(default_factory=dict)
    repeats: bool = False
    is_misfit: bool = False
    redraw: Draw | None = None
    outputs: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    grad_layouts: dict[str, tuple[Layout | None, tuple[str, ...]]] = field(default_factory=dict)
    starts: UpdateStarts = field(default_factory=lambda: UpdateStarts({}, {}))
    update: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    changed_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    stepped_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    places: dict[str, torch.Tensor] = field(default_factory=dict)
    choices: Mapping[ChoiceKey, Choice] = field(default_factory=dict)
    low: Mapping[str, torch.dtype] = field(default_factory=dict)
    averages: bool = False
    step: int = 0

    def held(self, path: str) -> list[str]:
        """Say which parts of a module's parameters the rank has."""

        def split(name: str) -> str:
            (layout, known), full = self.layouts[name], tuple(self.leaves[name].shape)
            said = "" if layout is None else spread_layout(layout.placement_to_tensor_map(len(full)), known)
            return said and f" of {full}, declared {said}"

        return place_words(path, self.initial, split)


def place_words(
    path: str | None, initial: Mapping[str, torch.Tensor], split: Callable[[str], str] = lambda name: ""
) -> list[str]:
    """Say which parameters of a module a rank has, in as many lines as one reads.

    Args:
        path: of the module; None: none.
        initial: the parameters of all modules, by name.
        split: returns how one of them is split, in words.
    """
    prefix, rows = f"{path}." if path else "", []
    for name, part in initial.items():
        if path is not None and name.startswith(prefix):
            rows.append(f"{name.removeprefix(prefix)}: {tuple(part.shape)}{split(name)}")
    return rows if len(rows) <= _MOST_HELD else [*rows[:_MOST_HELD], f"... and {len(rows) - _MOST_HELD} more"]


class _Session:
    """A model that computes forward, backward and optimizer steps; each a call of its own."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        given: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        dtype: torch.dtype,
        mesh: Layout | None = None,
        rank: int = 0,
        taken: Mapping[ChoiceKey, torch.Tensor] | None = None,
    ) -> None:
        self.task, self.model, self.given = task, model, given
        self.args, self.kwargs = given[0]
        model.train(task.train)
        named = named_parameters(model)
        axes = AxesOf(mesh, rank) if mesh is not None else None
        first: dict[int, str] = {}
        same = {name: first.setdefault(id(parameter), name) for name, parameter in named.items()}
        kept = {name: parameter for name, parameter in named.items() if same[name] == name}
        self.axes = axes
        self._mesh, self._rank = mesh, rank
        first_run = Run(
            ModuleRecorder(model, mesh, rank),
            {name: copy_of(parameter) for name, parameter in kept.items()},
            {name: declared_of(axes, parameter) for name, parameter in kept.items()},
            same,
            kept,
            buffers=self._buffers(),
            places=_places(kept, axes),
            averages=_averages(model),
        )
        self.runs = [first_run]
        # Before forward, which may leave other tensors in the place of parameters for a while.
        chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
        make = task.optimizer_fn
        hint = "lambda params: torch.optim.SGD(params, lr=0.1)"
        self.optimizer = self._called("optimizer_fn", hint, make, chosen) if make is not None and chosen else None
        if task.optimizer_fn is not None and chosen and not hasattr(self.optimizer, "zero_grad"):
            made = f"optimizer: {self.optimizer!r:.80}"
            raise InvalidType(ASKED, "optimizer_fn returned no optimizer", made, hint)
        self.wide = WidePrecision(dtype, self._inside)
        self.choices = Choices(self._inside, taken)
        shared = None if task.shared is None else task.shared.one if mesh is None else task.shared.ranks[rank]
        self.quiet = NoRandomness(lambda: self._inside() or "", shared)

    @property
    def run(self) -> Run:
        """What the step that is computed has so far."""
        return self.runs[-1]

    def forward(self) -> None:
        """Compute the outputs, and the loss if there is a function for it."""
        with DoubleGroupedProducts(), self.quiet, self.wide:
            self._forward()
            self.run.draws = [draw for draw in self.quiet.draws if not draw.spread]
            self.run.low, self.run.choices = self.wide.by_hand, self.choices.made

    def _forward(self) -> None:
        with self.choices:
            with self.run.recorder:
                output = self._output()
            self.run.changed_buffers = self._buffers()
            self.run.outputs, self.run.loss = self._finish(output)
            loss = [] if self.run.loss is None else [self.run.loss]
            look("the end of forward", [*loss, *(tensor for _, tensor in self.run.outputs)], ())
        step = self.run.step
        self.run.uses = {place: use for place, use in self.quiet.uses.items() if place[3] == step}
        self.run.is_misfit = self.quiet.is_misfit

    def _inside(self) -> str | None:
        return self.run.recorder.inside[-1] if self.run.recorder.inside else None

    def _called(self, name: str, hint: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the caller's; what it raises on one device is a mistake in what was asked."""
        if self.axes is not None:
            return call(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        except Exception as error:
            blame = f"{name} raises {type(error).__name__} on one device: {error}"
            seen = f"{name}: {getattr(call, '__qualname__', call)!s:.80}"
            raise InvalidValue(ASKED, blame, seen, hint) from error

    def _output(self) -> Any:
        if self.axes is not None:
            return self.model(*self.args, **self.kwargs)
        try:
            return self.model(*self.args, **self.kwargs)
        except Exception as error:
            inside = self.run.recorder.inside
            blame = f"the model raises {type(error).__name__} on one device: {error}"
            seen = f"in module {(inside[-1] if inside else '') or '(the model)'!r}"
            raise InvalidValue(ASKED, blame, seen, "inputs that the model takes") from error

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: copy_of(buffer) for name, buffer in named_buffers(self.model).items()}

    def _finish(self, output: Any) -> tuple[list[tuple[str, torch.Tensor]], torch.Tensor | None]:
        loss_fn = self.task.loss_fn
        outputs = list(tensors_in(output))
        if loss_fn is not None:
            hint = "a function of the model's output and of what the model took"
            loss = self._called("loss_fn", hint, loss_fn, output, *self.args, **self.kwargs)
            if not isinstance(loss, torch.Tensor) or loss.dim():
                seen = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
                hint = "a loss of one number, such as output.square().mean()"
                raise InvalidType(ASKED, "loss_fn returned no scalar tensor", f"loss: {seen}", hint)
            return outputs, loss.full_tensor() if isinstance(loss, DTensor) else loss
        if not outputs:
            blame = f"no tensors are seen in what the model returned, a {type(output).__name__}"
            hint = "a model that returns tensors, or containers or dataclasses of them; or a loss_fn"
            raise InvalidType(ASKED, blame, f"output: {output!r:.80}", hint)
        first = outputs[0][1]
        scalar = len(outputs) == 1 and first.dim() == 0 and first.is_floating_point() and first.requires_grad
        found = first if scalar else None
        return outputs, found.full_tensor() if isinstance(found, DTensor) else found

    def backward(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Differentiate, and take the optimizer's steps, each with a forward of its own."""
        optimizer = self.optimizer
        with DoubleGroupedProducts(), self.quiet, self.wide:
            for step in range(self.task.steps):
                if step:
                    self.args, self.kwargs = self.given[-1]
                    self.runs.append(self._next())
                    self.quiet.next_step()
                    self._forward()
                with _entered(self.run.recorder.modules, self.run.recorder.inside):
                    self._differentiate(self.run.outputs, self.run.loss, grads)
                look_at_gradients(self._leaves().values())
                self._keep_gradients()
                self.run.redraw = redrawn(self.quiet.draws, self.quiet.again)
                self.run.repeats = self.quiet.repeats
                if optimizer is not None:
                    # Imported here: whoever imports `sim`, or proves a plan without an optimizer, needs no trainer.
                    from hyper_parallel.trainer.optimizer import update

                    self.run.starts = UpdateStarts.of(optimizer, self._leaves())
                    with _disable_current_modes() if is_elementwise(optimizer) else nullcontext():
                        update(optimizer)
                    self.run.update = {name: copy_of(leaf) for name, leaf in self._leaves().items()}
                self.run.stepped_buffers = self._buffers()

    def settle(self) -> None:
        """Have on the host what was noted on a device, but for random numbers and choices, which are proved without."""
        settle(self.task.device)
        for run in self.runs:
            run.loss = None if run.loss is None else run.loss.detach().cpu()
            run.uses, run.choices = {}, {}

    def _next(self) -> Run:
        """Return the run of a further step."""
        first = self.runs[0]
        return Run(
            ModuleRecorder(self.model, self._mesh, self._rank),
            {name: copy_of(leaf) for name, leaf in self._leaves().items()},
            first.layouts,
            first.same,
            first.leaves,
            buffers=self._buffers(),
            places=first.places,
            averages=first.averages,
            step=len(self.runs),
        )

    def _differentiate(
        self, outputs: Sequence[tuple[str, torch.Tensor]], loss: torch.Tensor | None, grads: Mapping[str, torch.Tensor]
    ) -> None:
        if loss is not None:
            if loss.requires_grad:
                loss.backward()
            return
        chosen = [(tensor, grads[way]) for way, tensor in outputs if way in grads and tensor.requires_grad]
        if chosen:
            torch.autograd.backward([tensor for tensor, _ in chosen], [_like(tensor, grad) for tensor, grad in chosen])

    def _keep_gradients(self) -> None:
        for name, leaf in self._leaves().items():
            grad = leaf.grad
            self.run.gradients[name] = None if grad is None else copy_of(grad)
            self.run.grad_layouts[name] = (None, ()) if grad is None else declared_of(self.axes, grad)

    def _leaves(self) -> dict[str, nn.Parameter]:
        """Return the parameters as they are now: an engine may replace them."""
        named = named_parameters(self.model)
        return {name: named[name] for name in self.run.leaves if name in named}


@contextmanager
def _entered(modules: Mapping[str, nn.Module], inside: list[str]) -> Iterator[None]:
    """Note the modules that are running, those too that backward computes again; outermost first."""

    def leave(path: str) -> None:
        while inside and inside.pop() != path:
            pass  # a module whose recomputation has ended early

    with ExitStack() as stack:
        for path, module in modules.items():
            enter = module.register_forward_pre_hook(lambda module, args, path=path: inside.append(path))
            left = module.register_forward_hook(lambda module, args, output, path=path: leave(path), always_call=True)
            stack.callback(enter.remove)
            stack.callback(left.remove)
        yield


def run_reference(
    task: Task, around: AbstractContextManager[Any] | None = None, taken: Mapping[ChoiceKey, torch.Tensor] | None = None
) -> list[Run]:
    """Compute everything on one device, step by step.

    Args:
        task: what to compute.
        around: a mode that forward, backward and steps run under.
        taken: what `topk` and its like shall take.
    """
    dtype = torch.float64 if task.dtype.itemsize < 8 else task.dtype
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which seeds the user's accelerators, or keeps a stack for each kind that could come.
        torch.default_generator.manual_seed(task.seed)
        model = converted(build(task), dtype)
        torch.default_generator.manual_seed(task.seed + 1)
        given = [
            _given(task, {name: _whole(value, task.dtype, dtype) for name, value in values.items()})
            for values in task.values
        ]
        session = _Session(task, model, given, dtype, taken=taken)
        with around if around is not None else nullcontext():
            session.forward()
            session.backward(cotangents(session.run, task.seed))
    return session.runs


def build(task: Task) -> nn.Module:
    """Call the user's function for a model, and round its values to the dtype of the ranks."""
    return converted(task.model_fn(), task.dtype)


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert real parameters and buffers to a dtype, and complex ones to that of its pairs.

    >>> tables = nn.Module()
    >>> tables.register_buffer("turns", torch.tensor([1j]))
    >>> converted(tables, torch.float64).turns  # nn.Module.to would drop the imaginary part
    tensor([0.+1.j], dtype=torch.complex128)
    """
    pairs = torch.complex128 if dtype == torch.float64 else torch.complex64

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(pairs) if tensor.is_complex() else tensor.to(dtype) if tensor.is_floating_point() else tensor

    return model._apply(convert)


def cotangents(run: Run, seed: int) -> dict[str, torch.Tensor]:
    """Return a random tensor for each output that can be differentiated: the gradient of what would follow."""
    drawn = {}
    for index, (way, tensor) in enumerate(run.outputs):
        if tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex()):
            generator = torch.Generator().manual_seed(seed + 7 * index)
            parts = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor  # compared as pairs
            drawn[way] = torch.randn(parts.shape, generator=generator, dtype=torch.float64).to(parts.dtype)
    return drawn


class Ranks:
    """The parallel run, rank by rank, within a world.

    Args:
        task: what to compute.
        world: where.
        mutant: a fault that is put into a parameter or its gradient.
    """

    def __init__(self, task: Task, world: World, mutant: Mutant | None = None) -> None:
        self.task, self.world, self.mutant = task, world, mutant
        self._sessions: dict[int, _Session] = {}

    def forward(self) -> list[Run]:
        """Make the model parallel and compute forward on every rank."""
        with self._located("forward"):
            self.make()  # on all ranks before the first one computes: that may stop all
            self.world.run(self._forward)
        return self.runs

    def make(self) -> None:
        """Make the model parallel on every rank."""
        self.world.run(self._make)

    @property
    def runs(self) -> list[Run]:
        """What the ranks have done; of a forward that has stopped, what came before. Empty: not all have begun it."""
        every = range(self.world.world_size)
        return [self._sessions[rank].runs[0] for rank in every] if all(rank in self._sessions for rank in every) else []

    @property
    def offloaded(self) -> list[OffloadedBlock]:
        """The blocks of all ranks whose activations wait on the host."""
        return [block for session in self._sessions.values() for block in offloaded_of(session.model)]

    def settle(self) -> None:
        """Wait for what the ranks have noted on a device of theirs."""

        def settle_own() -> None:
            self._sessions[dist.get_rank()].settle()

        self.world.run(settle_own)

    def step(self, number: int) -> list[Run]:
        """Return what each rank has done in a step, once all of them have taken it."""
        return [self._sessions[rank].runs[number] for rank in range(self.world.world_size)]

    @property
    def notes(self) -> list[str]:
        """What is computed otherwise than the program says."""
        sessions = self._sessions.values()
        bare = bare_words(session.quiet for session in sessions)
        return [*narrow_words((session.wide for session in sessions), self.task.dtype), *bare]

    def backward(self, grads: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Differentiate and take the steps, from each rank's gradients of its outputs."""
        with self._located("backward"):
            self.world.run(lambda: self._sessions[dist.get_rank()].backward(grads[dist.get_rank()]))

    def _forward(self) -> None:
        try:
            self._sessions[dist.get_rank()].forward()
        except Exception:
            time.sleep(1e-6)  # on the virtual clock: the other ranks compute as far as they come, to be compared
            raise

    def _make(self) -> None:
        task, rank = self.task, dist.get_rank()
        mesh = init_device_mesh(task.device, task.mesh.mesh_shape, mesh_dim_names=task.mesh.alias_name)
        torch.default_generator.manual_seed(task.seed)
        model = build(task).to(task.device)
        torch.default_generator.manual_seed(task.seed + 1 + self._part(mesh))
        with WidePrecision(task.dtype):
            made = task.apply(model, mesh)
        if made is not None and not isinstance(made, nn.Module):
            blame = f"parallelize returned a {type(made).__name__}, not a module"
            hint = (
                "return the parallel model, or None; sim.verify_step(step, model_fn, batch, ...) proves schedules, too"
            )
            raise InvalidType(ASKED, blame, f"returned: {made!r:.80}", hint)
        model = model if made is None else made
        put_into_model(self.mutant, [model], rank)
        given = []
        for values in task.values:
            parts = {}
            for name, value in values.items():
                wrapped = name in task.wrapped and mesh.size() > 1  # `shard_module` leaves a model on one rank as it is
                whole = _whole(value, task.dtype, task.dtype, task.device)
                parts[name] = cut(whole, task.cuts.get(name), mesh, wrapped)
            given.append(_given(task, parts))
        self._sessions[rank] = _Session(task, model, given, task.dtype, task.mesh, rank)

    def _part(self, mesh: DeviceMesh) -> int:
        """Return a number that is the same on ranks that see the same data, as a training script would seed them."""
        number = 0
        for name, size in zip(self.task.mesh.alias_name, self.task.mesh.mesh_shape, strict=True):
            if name in self.task.data_axes:
                number = number * size + mesh.get_local_rank(name)
        return number

    @contextmanager
    def _located(self, phase: str) -> Iterator[None]:
        """Add to an error the modules in which the ranks were."""
        try:
            yield
        except (RankFailed, SimError) as error:
            shown = [error.rank] if isinstance(error, RankFailed) else sorted(self._sessions)
            lines = []
            for rank in shown:
                inside = self._sessions[rank].run.recorder.inside if rank in self._sessions else None
                if inside:
                    lines.append(f"  rank {rank} was in module {inside[-1] or '(the model)'!r}, {phase}")
                    lines += [f"    {line}" for line in self._sessions[rank].run.held(inside[-1])]
                elif rank in self._sessions:
                    lines.append(f"  rank {rank} was in no module, {phase}")
                else:
                    lines.append(f"  rank {rank} was making the model parallel")
            error.args = ("\n".join([str(error.args[0]) if error.args else "", *lines]), *error.args[1:])
            raise


# -- values ------------------------------------------------------------------------------------------------------------


def cut(value: Any, tree: LayoutTree, mesh: DeviceMesh, wrapped: bool) -> Any:
    """Return the calling rank's part of a full value, with the same containers.

    Args:
        value: a tensor, a container of them, or anything else, which stays as it is.
        tree: layouts; None: the full tensor.
        mesh: the mesh of all ranks.
        wrapped: return DTensors.
    """
    if isinstance(value, torch.Tensor):
        if not isinstance(tree, Layout):
            return value
        grad = value.requires_grad
        part = value.detach()[tree.local_slice(value.shape)].clone()
        if wrapped:
            part = from_local(part, tree.with_mesh(mesh), shape=value.shape)
        return part.detach().requires_grad_(grad)
    if isinstance(value, Mapping):
        return {key: cut(entry, _at(tree, key), mesh, wrapped) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [cut(entry, _at(tree, index), mesh, wrapped) for index, entry in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _at(tree: LayoutTree, place: Any) -> LayoutTree:
    if isinstance(tree, Mapping):
        return tree.get(place)
    return tree[place] if isinstance(tree, tuple) and place < len(tree) else tree if isinstance(tree, Layout) else None


def _whole(value: Any, rounded: torch.dtype, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Copy a full input to a device, floating values rounded to one dtype and held in another."""

    def copied(tensor: torch.Tensor, way: str) -> torch.Tensor:
        del way
        copy = tensor.detach().clone()
        copy = copy.to(rounded).to(dtype) if copy.is_floating_point() else copy
        return copy.to(device).requires_grad_(tensor.requires_grad)

    return mapped(value, copied)


def _given(task: Task, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (tuple(values.values()), {}) if task.positional else ((), dict(values))


def _like(output: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of a gradient as what autograd wants for this output."""
    grad = grad.to(output.device)
    grad = torch.view_as_complex(grad.contiguous()) if output.is_complex() else grad
    if not isinstance(output, DTensor):
        return grad
    placements = [Replicate() if placement.is_partial() else placement for placement in output.placements]
    return DTensor.from_local(
        grad, output.device_mesh, placements, run_check=False, shape=output.shape, stride=output.stride()
    )


def _places(parameters: Mapping[str, nn.Parameter], axes: AxesOf | None) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in parameters.items():
        if axes is not None and isinstance(parameter, DTensor) and declared_of(axes, parameter)[0] is None:
            said = order_said(parameter, axes.rank)
            if said is not None:
                found[name] = said
    return found


def _averages(model: nn.Module) -> bool:
    """Whether a wrapper takes the mean of gradients, as data parallelism does."""
    names = {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "HSDPModule", "HSDPCell"}
    return any(kind.__name__ in names for module in model.modules() for kind in type(module).__mro__)


_COARSE = 2.0**-7  # a bound that is larger than that, beside the tensor, hides what people call an error
_TINY, _MANY = 1e-5, 1024.0  # beside the largest tensor of its kind; and in units of rounding


# -- rounding bounds of each tensor: what perturbed runs on one device showed, and a floor -----------------------------


class Bounds:
    """How far rounding can move each tensor: what perturbed runs on one device showed, and a floor.

    Args:
        reference: the plain run.
        perturbed: the others.
        dtype: what the ranks compute in.
    """

    def __init__(self, reference: Run, perturbed: Sequence[Run], dtype: torch.dtype) -> None:
        self._unit = unit_roundoff(dtype)
        self._moves: dict[Any, float] = {}
        self._sizes: dict[int, float] = {}
        self._scales: dict[str, float] = {}
        self._coarse: set[int] = set()
        others = [dict(_tensors(run)) for run in perturbed]
        seen: dict[tuple[int, ...], float] = {}  # one tensor may stand at several boundaries
        for name, tensor in _tensors(reference):
            again = [other[name] for other in others if name in other]
            key = (id(tensor), *map(id, again))
            if key not in seen:
                seen[key] = largest_move(tensor, again)
            self._moves[name] = seen[key]
            self._scales[name[0]] = max(self._scales.get(name[0], 0.0), largest(tensor))

    def of(self, name: Any, full: torch.Tensor) -> float:
        """Return the bound for one tensor."""
        size = self._sizes.get(id(full))
        if size is None:
            size = self._sizes[id(full)] = largest(full)
        tiny = torch.finfo(torch.float64).tiny
        few = ROUNDINGS * (name[1] + 1) if name[0] in ("update", "stepped buffer") else FEW
        measured = SAFETY * self._moves.get(name, 0.0)
        # What is zero but for rounding has a bound above its own size, and one that is tiny beside its like.
        least = max(_TINY, _MANY * self._unit) * self._scales.get(name[0], 0.0)
        # Adam steps by the sign of a gradient, also of one that is zero but for rounding: the gradient's bound tells.
        if name[0] not in ("update", "stepped buffer") and measured > max(_COARSE * size, least):
            self._coarse.add(id(full))
        return max(measured, few * self._unit * size, tiny)

    def is_coarse(self, full: torch.Tensor) -> bool:
        """Whether a tensor that was asked for may be wrong by so much within its bound that it is not proved."""
        return id(full) in self._coarse


def _tensors(run: Run) -> Iterator[tuple[Any, torch.Tensor]]:
    for key, entry in run.recorder.entries.items():
        yield ("value", key), entry.value
        if entry.grad is not None:
            yield ("grad", key), entry.grad
    for each, choice in run.choices.items():
        yield ("choice", each), choice.given
    for place, use in run.uses.items():
        if use.given is not None:
            yield ("draw", place), use.given
    if run.loss is not None:
        yield "loss", run.loss.detach()
    for name, grad in run.gradients.items():
        if grad is not None:
            yield ("gradient", name), grad
    for name, tensor in run.changed_buffers.items():
        yield ("changed buffer", name), tensor
    for name, tensor in run.update.items():
        yield ("update", run.step, name), tensor
    for name, tensor in run.stepped_buffers.items():
        yield ("stepped buffer", run.step, name), tensor


def offload_device() -> str | None:
    """Return a device on which ranks move activations to the host: a real one, or a late one; None: there is none."""
    kind = get_platform().device_type
    if kind != "cpu" and not has_named("npu"):
        return kind
    return None if why_not() else "npu"


def offloaded_of(model: nn.Module) -> list[OffloadedBlock]:
    """Return the blocks of a model whose activations wait on the host."""
    return [module for module in model.modules() if isinstance(module, OffloadedBlock)]


def offload_words(device: str | None, why: str = "") -> str:
    """Say that moving activations is proved, on which devices; or why it is not.

    Args:
        device: see `offload_device`.
        why: "": it is, if there is a device.
    """
    if device is None or why:
        return f"that activations go to the host and back is not proved: {why or why_not()}"
    return f"activations go to the host and back on {device} devices without a race, and all is the same"


NOTHING_MOVED = "all that blocks keep is too small, or the last block's"


def proved_on_device(report: Report, prove: Callable[[str], Report], why: str = "") -> Report:
    """Add to a right report of a model with offloaded blocks what ranks say that move their activations.

    Args:
        report: of ranks without memory of their own, which move nothing.
        prove: takes the same steps on a device, and compares; of a report without rows nothing was moved.
        why: this cannot be done; "": it can.
    """
    device, again = offload_device(), None
    if device is not None and not why:
        try:
            again = prove(device)
            why = "" if again.rows else NOTHING_MOVED
        except RankFailed as error:
            if "same device" not in str(error):
                raise
            why = str(error).splitlines()[0]  # the program makes tensors on the CPU and uses them beside its inputs
    if again is None or again.bug is None:
        return replace(report, notes=(*report.notes, offload_words(device, why)))
    sentence = "it is right where nothing is moved, and wrong where activations go to the host and back"
    first, *rows = [row for row in again.rows if row.verdict == "bug"]
    first = replace(first, sentence=sentence, suggestion="")
    return replace(report, rows=(*report.rows, first, *rows), mutants=None)


def look_at_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Raise `InFlightBufferRace` if an operation is in flight on a gradient or its parameter when backward is over.

    The proof and the optimizer use them past the modes that watch the rank.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    look("the update", [each.grad for each in trained if each.grad is not None], trained)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer of proofs that ask for none in particular."""
    return torch.optim.AdamW(parameters, lr=1e-3)
