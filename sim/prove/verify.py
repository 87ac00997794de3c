"""Proves on simulated ranks that a parallel model computes what the model on one device computes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.core.common.checks import read_int
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import Machine
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from sim.explain.errors import CollectiveMismatch, RankFailed
from sim.observers.races import look
from sim.prove.bound import Perturbed
from sim.prove.compare import PlanComparison
from sim.prove.evidence import read_mesh, unit_roundoff
from sim.prove.modes.precision import WidePrecision
from sim.prove.modes.values import proved_once, proved_twice, proved_varied, second_of
from sim.prove.randomness import DrawPlace
from sim.prove.record import AxesOf, named_inputs, named_parameters, read_cuts, read_declared, tensors_in
from sim.prove.report import Report, ReportRow
from sim.prove.runs import Given, adamw, averages, converted, cotangents, like
from sim.prove.steps.api import Made, StepLoop, Steps
from sim.prove.steps.compare import agreed_choices
from sim.prove.steps.comparison import Comparison
from sim.prove.steps.drawn import DrawnWeights
from sim.prove.steps.proof import Loop, RanksRecord, References, Taken
from sim.prove.steps.watch import LoopRecord, LoopWatch
from sim.world import World

_ASKED = "cannot verify a plan"


def verify_plan(
    model_fn: Callable[[], nn.Module],
    inputs: Sequence[Any] | Mapping[str, Any],
    mesh_shape: Mapping[str, int] | str | Layout,
    plan: ShardingPlan | None = None,
    *,
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None] | None = None,
    declared: Mapping[str, Any] | None = None,
    input_layouts: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | bool | None = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    steps: int | None = None,
    train: bool = True,
    machine: str | Machine | None = None,
) -> Report:
    """Compare a parallel model, rank by rank, with the same model on one device; name the first place where they part.

    >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    >>> def model():
    ...     return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    >>> def tensor_parallel(model, mesh):
    ...     return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    >>> report = verify_plan(model, (torch.randn(3, 4),), "tp=2", parallelize=tensor_parallel)
    >>> report.ok
    True
    >>> def forgetful(model, mesh):  # the second weight is split, and nothing adds up what the ranks compute
    ...     rank = mesh.get_local_rank()
    ...     for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1)):
    ...         layer, kind = model[int(name[0])], name[2:]
    ...         setattr(layer, kind, nn.Parameter(getattr(layer, kind).detach().chunk(2, dim)[rank].clone()))
    ...     model[2].bias.data.div_(2)
    >>> wrong = verify_plan(model, (torch.randn(3, 4),), "tp=2", parallelize=forgetful)
    >>> wrong.first.module, wrong.first.tensor, wrong.first.sentence
    ('2', 'output', "the ranks hold parts of a sum over tp, and nothing reduced it before the model's output")

    Compared are the parameters and buffers as they are made, what goes into and comes out of every module, buffers
    that forward or a step has changed, the gradients of activations and parameters, and the parameters after each
    optimizer step. What a DTensor declares must be true.
    Plain tensors declare nothing, so that any layout that explains them will do; parts of a sum may be passed on from
    module to module, as long as they are added up before something else is computed from them. Parameters of which all
    elements are equal (zeros, ones) are moved a little on both sides, each element by itself, as a fault can hide
    behind them; unless the ranks give them values of their own. Dropout does nothing
    here; instead, the ranks' generators are compared where they are used. If all is right, the steps are taken again
    with the same random numbers on both sides, each rank its part where that is known, so that masks are compared.
    Where blocks are offloaded (`checkpoint_blocks`), they are taken on devices, too, with races looked for.

    The bound for an error is measured, not guessed: one device repeats everything with all operations off by their
    rounding (`sim.prove.bound`). In float64 that leaves about 1e-14, and no fault hides below it. The gradients are
    those of a random linear function of the outputs, the same in both runs, unless there is a `loss_fn`.

    Args:
        model_fn: makes the whole model for one device; called several times, from the same seed, and once per rank.
        inputs: full arguments of the model: a tuple, or a dict by name.
        mesh_shape: {"dp": 2, "tp": 4}, "dp=2,tp=4", or a `Layout` without an assignment.
        plan: what `shard_module` makes parallel.
        parallelize: makes it parallel in place of a plan: called with the model and the mesh on each rank, it returns
            the parallel model, or None for the same. torch's styles, FSDP2, `fully_shard`, DDP, and code of one's own
            on plain local tensors alike.
        declared: layouts of plain tensors, in a plan's spelling: "<module path>.input", "<module path>.output" or a
            parameter's path -> layouts. They must be true.
        input_layouts: which part of each input a rank is given: by position or name, in a plan's spelling. Default:
            what the plan says of its "input", as DTensors; else all of it.
        loss_fn: called with the output and the inputs, returns a scalar: on one device for the whole batch, on a rank
            for its part. Ranks with different data then have the loss of their part, and the mean or the sum of these
            must be that of the whole batch. A model that returns a scalar needs none.
        optimizer_fn: called with a list of parameters. True: AdamW with lr=1e-3; None or False: no steps.
        dtype: what floating-point parameters, buffers and inputs are converted to, and computed in where the program
            asks for fewer bits. In float32 the ranks are held
            against one device in float64, with the bounds of float32.
        seed: of the model, and of what follows.
        steps: how many optimizer steps, each with a forward of its own and the same inputs; all of it is compared in
            each. None: one; and with an optimizer, where that is cheap, a second one with other inputs, as in
            `verify_step`. In 16 bits there is none, as its bounds would be too wide.
        train: whether models are in training mode.
        machine: of the ranks, as in `sim.world`: its plans of redistributions are the ones that are proved.

    Returns:
        The rows that were compared and the first that is wrong; print it, or call `raise_if_bug()`.

    Raises:
        TypeError: an argument of the wrong kind, or a model that returns no tensors.
        ValueError: both or neither of plan and parallelize; layouts that do not fit the mesh, the inputs or the model;
            a model_fn that does not make the same model twice; a model that computes nan.
        RankFailed: a rank raised; the message ends with the module that it was in. So do those of deadlocks and
            collectives that do not match.
        InFlightBufferRace: a rank touches a buffer of an operation that it has not waited for.
    """
    mesh = _read_mesh(mesh_shape)
    _check_callables(model_fn, plan, parallelize, loss_fn, optimizer_fn, dtype, seed, steps)
    positional = not isinstance(inputs, Mapping)
    model = _make(model_fn, seed)
    values = named_inputs(_ASKED, model, inputs)
    reading, said = read_declared(_ASKED, model, mesh, plan, declared)
    cuts, wrapped = read_cuts(_ASKED, mesh, values, input_layouts, plan, reading)
    loop = _PlanLoop(
        asked=_ASKED,
        world_size=math.prod(mesh.mesh_shape),
        dtype=dtype,
        names={},
        machine=machine,
        step=model.forward,
        model_fn=model_fn,
        batch=values,
        mesh=mesh,
        parallelize=_application(plan, parallelize),
        rank_step=model.forward,
        shard_batch=None,
        optimizer_fn=adamw if optimizer_fn is True else optimizer_fn or None,
        seed=seed,
        steps=steps or 1,
        given=Given(tuple(values), positional, mesh, cuts, frozenset(wrapped), said),
        loss_fn=loss_fn,
        train=train,
    )

    def prove(loop: _PlanLoop) -> Report:
        def made_by(made: Callable[[], nn.Module], is_varied: bool) -> Report:
            return _proved(replace(loop, model_fn=made), is_varied)

        return proved_varied(model_fn, seed, made_by)

    if steps is not None or loop.optimizer_fn is None or dtype.itemsize < 4:
        return proved_once(values, prove(loop))
    second = second_of(values, seed)
    twice = replace(loop, steps=2, second=second[0])
    return proved_twice(lambda: model, len(mesh.rank_list), values, second, lambda both: prove(twice if both else loop))


def _proved(loop: _PlanLoop, is_varied: bool) -> Report:
    try:
        return loop.proved(loop.references(), is_varied=is_varied)
    except CollectiveMismatch as error:
        if not error.meant:
            raise
        hint = "the same units and models on all ranks, in the same order"
        row = ReportRow("", "parameters", "forward", verdict="bug", sentence=error.meant, suggestion=hint)
        notes = ("nothing was compared: ranks got each other's parameters",)
        return Report((row,), str(loop.mesh.axes), notes)


@dataclass(frozen=True, kw_only=True)
class _PlanLoop(StepLoop):
    """A model that is made parallel, and called in every step; what it returns is differentiated.

    Attributes:
        given: what the ranks are given, and what is declared.
        loss_fn: called with the output and the inputs, returns the loss; None: there is none.
        train: whether models are in training mode.
        grads: each rank's part of the gradients of its outputs, where these are known.
    """

    given: Given
    loss_fn: Callable[..., torch.Tensor] | None
    train: bool
    grads: Sequence[Mapping[str, torch.Tensor]] | None = None

    # -- one device --------------------------------------------------------------------------------------------------

    def references(self, taken: Taken | None = None) -> References:
        """Take the steps on one device, see `Loop`; refuse a model that computes nan, or is not the same each time."""
        other_model = _make(self.model_fn, self.seed)  # kept, so that no parameter gets the id of one of its
        expected, moved = Loop.references(self, taken)
        if {*map(id, other_model.parameters())} & {*expected.leaves.values()}:
            blame = "model_fn returned the same model twice, and each rank needs one of its own"
            raise InvalidValue(_ASKED, blame, f"model: a {type(other_model).__name__}", "lambda: Model(config)")
        _check_finite(expected)
        for other in moved:
            _check_same(expected, other)
        return expected, expected.measure_moves(moved)

    def on_one(self, taken: Taken | None, seed: int | None) -> LoopRecord:
        """Take the steps on one device."""
        dtype = torch.float64 if self.dtype.itemsize < 8 else self.dtype
        floor = None if self.dtype == torch.float64 else unit_roundoff(self.dtype)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which seeds the user's accelerators, or keeps a stack for each kind that may come.
            torch.default_generator.manual_seed(self.seed)
            model = converted(converted(self.model_fn(), self.dtype), dtype).train(self.train)
            torch.default_generator.manual_seed(self.seed + 1)
            batches = [self.given.whole(batch, self.dtype, dtype) for batch in self._batches]
            made = self._made_of(model, batches, dtype, None if self.shared is None else self.shared.one, seed is None)
            made.watch.note_initial()
            steps = Steps(self, made, taken)
            with nullcontext() if seed is None else Perturbed(floor, seed=seed):
                steps.go_on()
            return made.watch.record

    def _made_of(
        self,
        model: nn.Module,
        batches: list[Any],
        dtype: torch.dtype,
        shared: Mapping[DrawPlace, torch.Tensor] | None,
        keeps_graph: bool = False,
        axes: AxesOf | None = None,
    ) -> Made:
        options: dict[str, Any] = {"calms_all": True, "explicit_steps": True, "of_plan": True, "axes": axes}
        watch = LoopWatch([model], self.steps, keeps_graph=keeps_graph, shared=shared, **options)
        wide = WidePrecision(dtype, lambda: watch.where if watch.is_inside else None)
        watch.record.low, watch.record.averages = wide.by_hand, averages(model)
        return Made(model, [model], batches, [], wide, self.step, watch)

    def optimizer(self, made: Made) -> torch.optim.Optimizer | None:
        """Make what updates the parameters; before forward, which may leave others in their place for a while."""
        chosen = [parameter for parameter in made.model.parameters() if parameter.requires_grad]
        if self.optimizer_fn is None or not chosen:
            return None
        hint = "lambda params: torch.optim.SGD(params, lr=0.1)"
        optimizer = self._asked_for(made, "optimizer_fn", hint, self.optimizer_fn, chosen)
        if not hasattr(optimizer, "zero_grad"):
            raise InvalidType(_ASKED, "optimizer_fn returned no optimizer", f"optimizer: {optimizer!r:.80}", hint)
        return optimizer

    def called(self, made: Made, batch: Any) -> Generator[Any, None, Any]:
        """Call the model and the loss, let others look at that, and differentiate what they return."""
        (args, kwargs), watch = batch, made.watch
        output = self._output(made, args, kwargs)
        outputs, loss = self._finished(made, output, args, kwargs)
        look("the end of forward", [*([] if loss is None else [loss]), *(tensor for _, tensor in outputs)], ())
        if loss is not None:
            watch.on_backward(loss)
        elif watch.axes is None:
            with _disable_current_modes():
                watch.record.cotangents = cotangents(outputs, self.seed)
        yield
        grads, watch.is_backward = watch.record.cotangents, True
        chosen = [(tensor, grads[way]) for way, tensor in outputs if way in grads and tensor.requires_grad]
        if loss is not None and loss.requires_grad:
            loss.backward()
        elif loss is None and chosen:
            torch.autograd.backward([tensor for tensor, _ in chosen], [like(tensor, grad) for tensor, grad in chosen])
        watch.is_backward = False
        watch.note_gradients()
        return loss

    def _asked_for(self, made: Made, name: str, hint: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the caller's; what it raises on one device is a mistake in what was asked."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if made.watch.axes is not None:
                raise
            blame = f"{name} raises {type(error).__name__} on one device: {error}"
            seen = f"{name}: {getattr(call, '__qualname__', call)!s:.80}"
            raise InvalidValue(_ASKED, blame, seen, hint) from error

    def _output(self, made: Made, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return made.model(*args, **kwargs)
        except Exception as error:
            if made.watch.axes is not None:
                raise
            blame = f"the model raises {type(error).__name__} on one device: {error}"
            seen = f"in module {made.watch.failed_in or '(the model)'!r}"
            raise InvalidValue(_ASKED, blame, seen, "inputs that the model takes") from error

    def _finished(
        self, made: Made, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[tuple[str, torch.Tensor]], torch.Tensor | None]:
        """Return the tensors in what the model returned, and the loss if there is one."""
        outputs = list(tensors_in(output))
        if self.loss_fn is not None:
            hint = "a function of the model's output and of what the model took"
            loss = self._asked_for(made, "loss_fn", hint, self.loss_fn, output, *args, **kwargs)
            if not isinstance(loss, torch.Tensor) or loss.dim():
                seen = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
                hint = "a loss of one number, such as output.square().mean()"
                raise InvalidType(_ASKED, "loss_fn returned no scalar tensor", f"loss: {seen}", hint)
            return outputs, loss.full_tensor() if isinstance(loss, DTensor) else loss
        if not outputs:
            blame = f"no tensors are seen in what the model returned, a {type(output).__name__}"
            hint = "a model that returns tensors, or containers or dataclasses of them; or a loss_fn"
            raise InvalidType(_ASKED, blame, f"output: {output!r:.80}", hint)
        first = outputs[0][1]
        scalar = len(outputs) == 1 and first.dim() == 0 and first.is_floating_point() and first.requires_grad
        found = first if scalar else None
        return outputs, found.full_tensor() if isinstance(found, DTensor) else found

    # -- ranks -------------------------------------------------------------------------------------------------------

    def _made(self, ranks: World) -> list[Made]:
        try:
            return super()._made(ranks)
        except RankFailed as error:
            line = f"  rank {error.rank} was making the model parallel"
            error.args = ("\n".join([str(error.args[0]) if error.args else "", line]), *error.args[1:])
            raise

    def _make(self) -> Made:
        rank = dist.get_rank()
        mesh = init_device_mesh(self.device, self.mesh.mesh_shape, mesh_dim_names=self.mesh.alias_name)
        torch.default_generator.manual_seed(self.seed)
        model = converted(self.model_fn(), self.dtype).to(self.device)
        torch.default_generator.manual_seed(self.seed + 1 + self.given.part_of(mesh))
        assert self.parallelize is not None
        with WidePrecision(self.dtype):
            made = self.parallelize(model, mesh)
        if made is not None and not isinstance(made, nn.Module):
            blame = f"parallelize returned a {type(made).__name__}, not a module"
            hint = (
                "return the parallel model, or None; sim.verify_step(step, model_fn, batch, ...) proves schedules, too"
            )
            raise InvalidType(_ASKED, blame, f"returned: {made!r:.80}", hint)
        model = (model if made is None else made).train(self.train)
        batches = [self.given.part(batch, self.dtype, mesh, self.device) for batch in self._batches]
        return self._made_of(model, batches, self.dtype, self._shared_of(rank), axes=AxesOf(self.mesh, rank))

    def _give_shards(self, one: Mapping[str, torch.Tensor], roots: Sequence[Sequence[nn.Module]]) -> DrawnWeights:
        del one, roots
        return DrawnWeights()  # what ranks draw by themselves is compared

    def _take(
        self,
        ranks: World,
        made: Sequence[Made],
        begin: Callable[[], Steps],
        references: References,
        found: RanksRecord,
    ) -> None:
        """Go forward on the ranks; then backward, from gradients that fit the layouts of what they return."""
        steps: dict[int, Steps] = {}

        def forward() -> None:
            rank = dist.get_rank()
            steps[rank] = begin()
            steps[rank].go_on(to_break=True)

        def backward() -> None:
            rank = dist.get_rank()
            made[rank].watch.record.cotangents = dict(found.grads[rank])
            steps[rank].go_on()
            self._settle(made[rank])

        ranks.run(forward)
        loops = [each.watch.record for each in made]
        grads = self.grads if self.grads is not None else self._grads_of(references, loops, found.notes)
        if grads is not None:
            found.grads = grads
            ranks.run(backward)

    def _grads_of(
        self, references: References, loops: list[LoopRecord], notes: list[str]
    ) -> Sequence[Mapping[str, torch.Tensor]] | None:
        """Return each rank's part of the gradients of its outputs; None where it cannot be known what its outputs are.

        Args:
            references: of one device.
            loops: the ranks' forward.
            notes: says what is not known.
        """
        if references[0].steps[0].losses:
            if all(loop.steps[0].losses for loop in loops):
                return [{} for _ in loops]
            notes.append("backward was not compared: some ranks have no loss")
            return None
        found = RanksRecord(loops=loops)
        step = self.comparison(self.agreed(references, found)[0], found).step
        sizes, scale = dict(zip(self.mesh.alias_name, self.mesh.mesh_shape, strict=True)), step.scale()
        grads: list[dict[str, torch.Tensor]] = [{} for _ in loops]
        for way, full in references[0].cotangents.items():
            layout = step.output_layout(way)
            if layout is None:
                notes.append("backward was not compared: no layout explains the output, or is declared for it")
                return None
            shares = math.prod(sizes[name] for name, kind in layout.partial.items() if kind == "avg")
            for rank, own in enumerate(grads):
                part = full[layout.reset_partial().local_slice(full.shape, rank)]
                own[way] = (part * (scale / shares)).to(self.dtype).clone()
        return grads

    def on_device(self, kind: str, found: RanksRecord) -> Loop:
        """Return the loop on a kind of device, whose host is not to wait for what the ranks return."""
        return replace(self, device=kind, grads=found.grads)

    # -- comparison --------------------------------------------------------------------------------------------------

    def agreed(self, references: References, found: RanksRecord) -> tuple[References, list[str]]:
        """Let one device choose as the ranks do; bounds are those of the ranks' dtype."""
        return agreed_choices(references, found.loops, self.mesh, self.dtype, self.references)

    def comparison(self, references: References, found: RanksRecord) -> PlanComparison:
        """Make the comparison of the ranks with one device."""
        return PlanComparison(
            self.given,
            *references,
            found.loops,
            self.dtype,
            has_loss_fn=self.loss_fn is not None,
            has_optimizer=self.optimizer_fn is not None and bool(references[0].trained),
            has_second=self.second is not None,
            stopped=found.stopped is not None,
        )

    def explained(self, report: Report, comparison: Comparison, found: RanksRecord) -> Report:
        """Say what is not proved, and which axes do no work."""
        unused = _unused_axes(self.mesh, report, {event.group for event in found.events})
        return replace(report, notes=(*_not_proved(comparison.expected), *report.notes, *unused))


def _unused_axes(mesh: Layout, report: Report, groups: Iterable[Sequence[int]]) -> list[str]:
    """Name the axes over which nothing is split and nothing communicates: a degree that does no work."""
    layouts = [text.partition(", nothing said of")[0] for row in report.rows for text in (row.declared, row.found)]
    words = {word for text in layouts for word in re.findall(r"\w+", text)}
    ranks = np.arange(math.prod(mesh.mesh_shape)).reshape(mesh.mesh_shape)
    places = dict(zip(ranks.flat, np.ndindex(*mesh.mesh_shape), strict=True))
    reached = {
        name
        for group in groups
        for dim, name in enumerate(mesh.alias_name)
        if len({places[rank][dim] for rank in group}) > 1
    }
    sizes = zip(mesh.alias_name, mesh.mesh_shape, strict=True)
    unused = [name for name, size in sizes if size > 1 and name not in words | reached]
    return [f"nothing uses the axis {name}: the ranks along it all compute the same" for name in unused]


def _not_proved(expected: LoopRecord) -> list[str]:
    """Say if backward is nothing on one device, though there are parameters to train."""
    step = expected.steps[0]
    if not expected.trained or any(grad is not None for grad in step.gradients.values()):
        return []
    what = "the loss" if step.losses else "nothing that the model returns"
    how = "cannot" if step.losses else "can"
    return [f"no gradients were compared, as {what} {how} be differentiated"]


def _check_finite(expected: LoopRecord) -> None:
    """Refuse a model that computes nan on one device: nan is equal to any other, and nothing would be proved."""
    for step in expected.steps:
        values = [(path, side, tensor) for (path, side, _), each in step.calls.items() for tensor in each]
        results = [("output", tensor) for path, side, tensor in values if (path, side) == ("", "output")]
        results += [("loss", loss) for loss in step.losses]
        results += [(f"gradient of {name}", grad) for name, grad in step.gradients.items() if grad is not None]
        bad = next((title for title, value in results if value.isnan().any()), None)
        if bad is None:
            continue
        first = next((f"{path or 'the model'}.{side}" for path, side, tensor in values if tensor.isnan().any()), bad)
        blame = f"one device computes nan, first seen in {first}, and nan cannot be compared"
        raise InvalidValue(_ASKED, blame, f"nan in the {bad}", "inputs and initial values that give finite numbers")


# -- what the caller gave ----------------------------------------------------------------------------------------------


def _read_mesh(mesh_shape: Any) -> Layout:
    mesh = read_mesh(_ASKED, mesh_shape)
    if mesh.rank_list != tuple(range(len(mesh.rank_list))):
        blame, hint = "the mesh is of other ranks than 0, 1, 2, ...", "a Layout without a rank_list"
        raise InvalidValue(_ASKED, blame, f"mesh_shape: {mesh_shape!r}", hint)
    return Layout(mesh.mesh_shape, mesh.alias_name)


def _check_callables(
    model_fn: Any, plan: Any, parallelize: Any, loss_fn: Any, optimizer_fn: Any, dtype: Any, seed: Any, steps: Any
) -> None:
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        blame = f"model_fn is a {type(model_fn).__name__}, and has to make a new model at each call"
        raise InvalidType(_ASKED, blame, "model_fn: a function without arguments", "lambda: Model(config)")
    if (plan is None) == (parallelize is None):
        blame = (
            f"{'neither' if plan is None else 'both'} of plan and parallelize {'is' if plan is None else 'are'} given"
        )
        hint = "plan=ShardingPlan(...), or parallelize=a function of the model and the mesh; or step=, for verify_step"
        raise InvalidValue(_ASKED, blame, "one of them makes the model parallel", hint)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidType(_ASKED, "dtype is no floating-point dtype", f"dtype: {dtype!r}", "torch.float64")
    read_int(_ASKED, "seed", seed, hint="seed=0")
    if steps is not None:
        read_int(_ASKED, "steps", steps, 1)


def _make(model_fn: Callable[[], Any], seed: int) -> nn.Module:
    """Make a model to look at, without changing the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = model_fn()
    if not isinstance(model, nn.Module):
        blame = f"model_fn returned a {type(model).__name__}, not a module"
        raise InvalidType(_ASKED, blame, f"model: {model!r:.80}", "a function that returns the model")
    lazy = [name for name, parameter in named_parameters(model).items() if is_lazy(parameter)]
    if lazy:
        blame = f"parameters of the model have no shape yet: {', '.join(lazy[:3])}"
        raise InvalidValue(_ASKED, blame, "lazy modules get one in their first forward", "nn.Linear(in, out)")
    lacking = [name for name, parameter in named_parameters(model).items() if parameter.is_meta]
    if lacking:
        blame = f"parameters of the model are on meta, and have no values: {', '.join(lacking[:3])}"
        raise InvalidValue(_ASKED, blame, f"{len(lacking)} parameters", "make them on the CPU")
    return model


def _check_same(expected: LoopRecord, other: LoopRecord) -> None:
    odd = [
        name
        for name, value in expected.initial.items()
        if name not in other.initial
        or value.shape != other.initial[name].shape
        or not torch.equal(value, other.initial[name])
    ]
    if odd or len(expected.initial) != len(other.initial):
        blame = f"model_fn made different models from one seed: parameter {odd[0] if odd else '?'!r} differs"
        hint = "let all random numbers in it come from torch's default generator"
        raise InvalidValue(_ASKED, blame, f"{len(odd)} of {len(expected.initial)} parameters differ", hint)


def _application(plan: ShardingPlan | None, parallelize: Any) -> Callable[[nn.Module, DeviceMesh], nn.Module | None]:
    if plan is None:
        return parallelize

    def apply(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        from hyper_parallel.core.shard.api import shard_module

        return shard_module(model, mesh, plan)

    return apply
