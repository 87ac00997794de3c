"""Proves on simulated ranks that a parallel model computes what the model on one device computes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from hyper_parallel.core.common.checks import read_int
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import Machine
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from sim.explain.errors import CollectiveMismatch, RankFailed, SimError
from sim.prove.bound import Perturbed
from sim.prove.compare import Comparison
from sim.prove.evidence import machine_words, read_mesh, unit_roundoff
from sim.prove.judge import Judge, first_bug, short, title_of
from sim.prove.modes.choices import ChoiceKey, agreed_words, free_choices
from sim.prove.modes.draws import SharedDraws, shared_draws
from sim.prove.modes.values import check_varied, proved_once, proved_twice, proved_varied, second_of, unreached
from sim.prove.randomness import DrawPlace, DrawUse
from sim.prove.record import Declarations, named_inputs, named_parameters, read_cuts, read_declared
from sim.prove.report import Report, ReportRow
from sim.prove.runs import ASKED, Bounds, Ranks, Run, Task, adamw, cotangents, run_reference
from sim.prove.steps.mutants import Mutant, put_in
from sim.prove.steps.proof import Compared, Proof, Taken
from sim.world import world

_RUNS = 3
_MOST_SHAPES = 6  # tensors that a message lists
_MOST_ROUNDS = 16  # of choices that follow from others


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
    values = named_inputs(ASKED, model, inputs)
    reading, said = read_declared(ASKED, model, mesh, plan, declared)
    cuts, wrapped = read_cuts(ASKED, mesh, values, input_layouts, plan, reading)
    chosen = adamw if optimizer_fn is True else optimizer_fn or None
    task = Task(
        model_fn, values, positional, mesh, _application(plan, parallelize), cuts, frozenset(wrapped),
        loss_fn, chosen, dtype, seed, steps or 1, train, machine=machine,
    )  # fmt: skip

    def prove(task: Task) -> Report:
        def made_by(made: Callable[[], nn.Module], is_varied: bool) -> Report:
            return _proved(_PlanProof(replace(task, model_fn=made), said), is_varied)

        return proved_varied(model_fn, seed, made_by)

    if steps is not None or chosen is None or dtype.itemsize < 4:
        return proved_once(values, prove(task))
    second = second_of(values, seed)
    twice = replace(task, steps=2, second=second[0])
    return proved_twice(lambda: model, len(mesh.rank_list), values, second, lambda both: prove(twice if both else task))


def _proved(program: _PlanProof, is_varied: bool) -> Report:
    try:
        return program.proved(program.references(), is_varied=is_varied)
    except CollectiveMismatch as error:
        if not error.meant:
            raise
        hint = "the same units and models on all ranks, in the same order"
        row = ReportRow("", "parameters", "forward", verdict="bug", sentence=error.meant, suggestion=hint)
        notes = ("nothing was compared: ranks got each other's parameters",)
        return Report((row,), str(program.task.mesh.axes), notes)


@dataclass(frozen=True)
class _PlanProof(Proof):
    """A model that is made parallel.

    Attributes:
        task: what is computed.
        said: what was declared of plain tensors.
    """

    task: Task
    said: Declarations

    @property
    def shared(self) -> SharedDraws | None:  # type: ignore[override]
        """Random numbers, in place of their means."""
        return self.task.shared

    def references(self, taken: Taken | None = None) -> _Steps:
        """Compute on one device."""
        return _references(self.task, _make(self.task.model_fn, self.task.seed), taken)

    def compared(self, references: _Steps, mutant: Mutant | None = None, *, is_varied: bool = False) -> Compared:
        """Compute on the ranks, and compare."""
        task, steps, said, mesh = self.task, references, self.said, self.task.mesh
        judge = Judge(mesh)
        watched = mutant is None and task.shared is None  # once for each proof
        made = world(math.prod(mesh.mesh_shape), seed=task.seed, machine=task.machine, check_races=watched)
        with made as w, put_in(w, mutant):
            ranks = Ranks(task, w, mutant)
            try:
                ranks.forward()
            except (RankFailed, SimError) as error:
                if isinstance(error, CollectiveMismatch) and error.meant:
                    raise  # the cause of whatever was wrong before it stopped
                if is_varied:
                    check_varied([run.initial for run in ranks.runs], steps[0][0].initial)
                report = _until(error, Comparison(task, *steps[0], ranks.runs, said, judge))
                if report is None:
                    raise
                return Compared(report)
            if is_varied:
                check_varied([run.initial for run in ranks.runs], steps[0][0].initial)
            taken: dict[ChoiceKey, torch.Tensor] = {}
            steps = _agreed(task, steps, ranks.runs, taken)
            compared = Comparison(task, *steps[0], ranks.runs, said, judge)
            grads = _grads(task, steps[0][0], compared)
            has_gone = grads is not None and _backward(ranks, grads, compared)
            if has_gone and task.steps > 1:
                first, steps = steps, _agreed(task, steps, ranks.runs, taken)  # what the steps since then have chosen
                if steps is not first:
                    compared = Comparison(task, *steps[0], ranks.runs, said, judge)
            reference = steps[0][0]
            compared.notes[:0] = [*_not_proved(reference), *agreed_words(taken), *_unreached([run for run, _ in steps])]
            later = [
                Comparison(task, *each, ranks.step(number), said, judge, before=compared)
                for number, each in enumerate(steps[1:], 1)
                if has_gone
            ]
            report = compared.report(later)
            mine, runs = [run for run, _ in steps[: len(later) + 1]], [ranks.step(at) for at in range(len(later) + 1)]
            if task.shared is not None:
                uses = [_uses([step[rank] for step in runs]) for rank in range(len(mesh.rank_list))]
                is_misfit = any(run.is_misfit for step in (mine, *runs) for run in step)
                task.shared.check_used(_uses(mine), uses, misfit=is_misfit)
            events = list(w.trace.kept())
            unused = _unused_axes(mesh, report, {event.group for event in events})
            notes = (*report.notes, *ranks.notes, *unused, *machine_words(task.machine, len(mesh.rank_list)))
            offloads = has_gone and bool(ranks.offloaded)
        return Compared(
            replace(report, notes=notes),
            events,
            list(reference.leaves),
            partial(_on_device, task, steps, said, grads or ()) if offloads else None,
            draws=partial(_shared, mine, runs, [compared, *later])
            if any(run.uses for step in (mine, *runs) for run in step)
            else None,
        )

    def make(self) -> None:
        """Make the models of the ranks once more, in a world that compares what engines split."""
        task = self.task
        with world(math.prod(task.mesh.mesh_shape), seed=task.seed, machine=task.machine, check_replicas=True) as w:
            Ranks(task, w).make()

    def with_draws(self, shared: SharedDraws) -> Proof:
        """Return the program with random numbers in place of their means."""
        return replace(self, task=replace(self.task, shared=shared))

    def shortened(self) -> Proof:
        """Return the program with the first inputs alone."""
        return self if self.task.second is None else replace(self, task=replace(self.task, second=None, steps=1))


_Steps = list[tuple[Run, Bounds]]
"""What one device does in each step, and how far rounding can go."""


def _on_device(
    task: Task, steps: _Steps, said: Declarations, grads: Sequence[Mapping[str, torch.Tensor]], device: str
) -> Report:
    """Take the steps on devices, with races looked for, and compare once all of them are over."""
    task = replace(task, device=device)
    with world(
        math.prod(task.mesh.mesh_shape), seed=task.seed, machine=task.machine, device=device, check_races=True
    ) as w:
        ranks = Ranks(task, w)
        ranks.forward()
        ranks.backward(grads)
        ranks.settle()
        judge = Judge(task.mesh)
        compared = Comparison(task, *steps[0], ranks.runs, said, judge)
        later = [
            Comparison(task, *each, ranks.step(number), said, judge, before=compared)
            for number, each in enumerate(steps[1:], 1)
        ]
        report = compared.report(later)
        return report if any(block.has_moved for block in ranks.offloaded) else replace(report, rows=())


def _uses(runs: Sequence[Run]) -> dict[DrawPlace, DrawUse]:
    """Return what became of random numbers in all steps of one device, or of a rank."""
    return {place: use for run in runs for place, use in run.uses.items()}


def _shared(mine: Sequence[Run], runs: Sequence[Sequence[Run]], compared: Sequence[Comparison]) -> SharedDraws:
    """Find each rank's part of one device's random numbers, in every step."""
    first = compared[0]
    ranks = list(zip(*runs, strict=True))
    return shared_draws(
        _uses(mine),
        [_uses(steps) for steps in ranks],
        first.task.mesh,
        lambda place, given: compared[place[3]].bounds.of(("draw", place), given),
        lambda step: compared[step].boundaries(),
        list(dict.fromkeys(order for each in compared for order in each.row_orders)),
        [steps[-1].repeats for steps in (mine, *ranks)],
        lambda rank, path, step: _calls(runs[step][rank], path),
    )


def _calls(run: Run, path: str) -> bool:
    """Whether a module has been called, with anything: experts may get no rows."""
    return any(key.path == path and entry.value.numel() > 0 for key, entry in run.recorder.entries.items())


def _unreached(runs: Sequence[Run]) -> list[str]:
    """Say what no input of any step reaches."""
    trained = [name for name, leaf in runs[0].leaves.items() if leaf.requires_grad]
    modules = runs[0].recorder.modules.items()
    tables = [f"{path}.weight".removeprefix(".") for path, module in modules if isinstance(module, nn.Embedding)]
    return unreached([run.gradients for run in runs], trained, tables)


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


def _until(error: Exception, compared: Comparison) -> Report | None:
    """Return the report of a forward that has stopped, if something was wrong before it did."""
    if not compared.runs:
        return None
    compared.stopped = True
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith("rank ") and " was " in line]
    compared.notes.append("; ".join([f"forward has stopped: {lines[0]}", *where[-1:]]))
    report = compared.report()
    if first_bug(report.rows) is not None:
        return report
    if isinstance(error, RankFailed):
        error.args = ("\n".join([str(error.args[0]), *_split_shapes(compared, error.rank)]), *error.args[1:])
    return None


def _split_shapes(compared: Comparison, rank: int) -> list[str]:
    """Say what went in and out of the module that a rank was in, where it has another shape than on one device."""
    run = compared.runs[rank]
    path = run.recorder.inside[-1] if run.recorder.inside else ""
    rows = []
    for key, full in compared.reference.recorder.entries.items():
        held = run.recorder.entries.get(key)
        within = key.path == path or key.path.startswith(f"{path}." if path else "")
        if held is not None and within and held.value.shape != full.value.shape:
            found = compared.value(key)
            layout = f", found {short(found.found)}" if found is not None and found.found is not None else ""
            shapes = f"{tuple(held.value.shape)} of {tuple(full.value.shape)}{layout}"
            rows.append(f"    {key.path or 'the model'}.{title_of(full)}: {shapes}".replace("put ", "put."))
    return rows[-_MOST_SHAPES:]


def _not_proved(reference: Run) -> list[str]:
    """Say if backward is nothing on one device, though there are parameters to train."""
    trained = any(leaf.requires_grad for leaf in reference.leaves.values())
    if not trained or any(grad is not None for grad in reference.gradients.values()):
        return []
    what = "the loss" if reference.loss is not None else "nothing that the model returns"
    how = "cannot" if reference.loss is not None else "can"
    return [f"no gradients were compared, as {what} {how} be differentiated"]


def _backward(ranks: Ranks, grads: list[dict[str, torch.Tensor]], compared: Comparison) -> bool:
    """Go backward, and say whether all ranks did; what a wrong forward leads to does not hide the report of that."""
    try:
        ranks.backward(grads)
    except (RankFailed, SimError) as error:
        if first_bug(compared.forward_rows) is None or (isinstance(error, CollectiveMismatch) and error.meant):
            raise
        for run in compared.runs:
            run.gradients.clear()
        compared.notes.append(f"backward was not compared: {str(error).splitlines()[0]}")
        return False
    return True


def _agreed(task: Task, steps: _Steps, runs: Sequence[Run], taken: dict[ChoiceKey, torch.Tensor]) -> _Steps:
    """Let one device choose as the ranks do, where candidates lie within the bound; note it in `taken`.

    All choices are seen that the ranks have made so far, those of later steps too.
    """
    for _ in range(_MOST_ROUNDS):  # what was chosen first decides between what is chosen later
        reference, bounds = steps[0]
        limit = partial(_limit, bounds)
        free = free_choices(reference.choices, [run.choices for run in runs], task.mesh, limit)
        if not free:
            break
        taken |= free
        steps = _references(task, _make(task.model_fn, task.seed), taken)
    return steps


def _limit(bounds: Bounds, key: ChoiceKey, given: torch.Tensor) -> float:
    return bounds.of(("choice", key), given)


def _references(task: Task, made: nn.Module, taken: Mapping[ChoiceKey, torch.Tensor] | None = None) -> _Steps:
    """Run one device plainly and perturbed, the latter with the choices of the first."""
    plain = run_reference(task, taken=taken)
    same = {key: choice.indices for key, choice in plain[0].choices.items()}
    known = {id(parameter) for parameter in made.parameters()}
    if any(id(parameter) in known for parameter in plain[0].leaves.values()):
        blame = "model_fn returned the same model twice, and each rank needs one of its own"
        raise InvalidValue(ASKED, blame, f"model: a {type(made).__name__}", "lambda: Model(config)")
    for run in plain:
        _check_finite(run)
    floor = None if task.dtype == torch.float64 else unit_roundoff(task.dtype)
    others = [run_reference(task, Perturbed(floor, seed=index), same) for index in range(_RUNS)]
    for other in others:
        _check_same(plain[0], other[0])
    pairs = zip(plain, zip(*others, strict=True), strict=True)
    return [(run, Bounds(run, perturbed, task.dtype)) for run, perturbed in pairs]


def _check_finite(reference: Run) -> None:
    """Refuse a model that computes nan on one device: nan is equal to any other, and nothing would be proved."""
    results = [("output", tensor) for _, tensor in reference.outputs]
    results += [("loss", reference.loss)] if reference.loss is not None else []
    results += [(f"gradient of {name}", grad) for name, grad in reference.gradients.items() if grad is not None]
    bad = next((title for title, value in results if value.isnan().any()), None)
    if bad is None:
        return
    entries = reference.recorder.entries.items()
    first = next((f"{key.path or 'the model'}.{key.side}" for key, entry in entries if entry.value.isnan().any()), bad)
    blame = f"one device computes nan, first seen in {first}, and nan cannot be compared"
    raise InvalidValue(ASKED, blame, f"nan in the {bad}", "inputs and initial values that give finite numbers")


def _grads(task: Task, reference: Run, compared: Comparison) -> list[dict[str, torch.Tensor]] | None:
    """Return each rank's part of the gradients of its outputs; None where it cannot be known what its outputs are."""
    number = math.prod(task.mesh.mesh_shape)
    if reference.loss is not None:
        if any(run.loss is None for run in compared.runs):
            compared.notes.append("backward was not compared: some ranks have no loss")
            return None
        return [{} for _ in range(number)]
    scale = compared.scale()
    grads: list[dict[str, torch.Tensor]] = [{} for _ in range(number)]
    for way, full in cotangents(reference, task.seed).items():
        layout = compared.output_layout(way)
        if layout is None:
            compared.notes.append("backward was not compared: no layout explains the output, or is declared for it")
            return None
        sizes = dict(zip(task.mesh.alias_name, task.mesh.mesh_shape, strict=True))
        shares = math.prod(sizes[name] for name, kind in layout.partial.items() if kind == "avg")
        for rank in range(number):
            part = full[layout.reset_partial().local_slice(full.shape, rank)]
            grads[rank][way] = (part * (scale / shares)).to(task.dtype).clone()
    return grads


# -- what the caller gave ----------------------------------------------------------------------------------------------


def _read_mesh(mesh_shape: Any) -> Layout:
    mesh = read_mesh(ASKED, mesh_shape)
    if mesh.rank_list != tuple(range(len(mesh.rank_list))):
        blame, hint = "the mesh is of other ranks than 0, 1, 2, ...", "a Layout without a rank_list"
        raise InvalidValue(ASKED, blame, f"mesh_shape: {mesh_shape!r}", hint)
    return Layout(mesh.mesh_shape, mesh.alias_name)


def _check_callables(
    model_fn: Any, plan: Any, parallelize: Any, loss_fn: Any, optimizer_fn: Any, dtype: Any, seed: Any, steps: Any
) -> None:
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        blame = f"model_fn is a {type(model_fn).__name__}, and has to make a new model at each call"
        raise InvalidType(ASKED, blame, "model_fn: a function without arguments", "lambda: Model(config)")
    if (plan is None) == (parallelize is None):
        blame = (
            f"{'neither' if plan is None else 'both'} of plan and parallelize {'is' if plan is None else 'are'} given"
        )
        hint = "plan=ShardingPlan(...), or parallelize=a function of the model and the mesh"
        raise InvalidValue(ASKED, blame, "one of them makes the model parallel", hint)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidType(ASKED, "dtype is no floating-point dtype", f"dtype: {dtype!r}", "torch.float64")
    read_int(ASKED, "seed", seed, hint="seed=0")
    if steps is not None:
        read_int(ASKED, "steps", steps, 1)


def _make(model_fn: Callable[[], Any], seed: int) -> nn.Module:
    """Make a model to look at, without changing the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = model_fn()
    if not isinstance(model, nn.Module):
        blame = f"model_fn returned a {type(model).__name__}, not a module"
        raise InvalidType(ASKED, blame, f"model: {model!r:.80}", "a function that returns the model")
    lazy = [name for name, parameter in named_parameters(model).items() if is_lazy(parameter)]
    if lazy:
        blame = f"parameters of the model have no shape yet: {', '.join(lazy[:3])}"
        raise InvalidValue(ASKED, blame, "lazy modules get one in their first forward", "nn.Linear(in, out)")
    lacking = [name for name, parameter in named_parameters(model).items() if parameter.is_meta]
    if lacking:
        blame = f"parameters of the model are on meta, and have no values: {', '.join(lacking[:3])}"
        raise InvalidValue(ASKED, blame, f"{len(lacking)} parameters", "make them on the CPU")
    return model


def _check_same(reference: Run, other: Run) -> None:
    odd = [
        name
        for name, value in reference.initial.items()
        if name not in other.initial
        or value.shape != other.initial[name].shape
        or not torch.equal(value, other.initial[name])
    ]
    if odd or len(reference.initial) != len(other.initial):
        blame = f"model_fn made different models from one seed: parameter {odd[0] if odd else '?'!r} differs"
        hint = "let all random numbers in it come from torch's default generator"
        raise InvalidValue(ASKED, blame, f"{len(odd)} of {len(reference.initial)} parameters differ", hint)


def _application(plan: ShardingPlan | None, parallelize: Any) -> Callable[[nn.Module, DeviceMesh], nn.Module | None]:
    if plan is None:
        return parallelize

    def apply(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        from hyper_parallel.core.shard.api import shard_module

        return shard_module(model, mesh, plan)

    return apply
