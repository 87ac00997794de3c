"""Proofs of step functions: the user's own forward, backward and communication, on ranks and on one device."""

from __future__ import annotations

import inspect
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.core.common.checks import read_int
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import Machine
from sim.observers.races import look
from sim.prove.bound import DoubleGroupedProducts, Perturbed
from sim.prove.evidence import read_mesh, unit_roundoff
from sim.prove.modes.choices import Choices
from sim.prove.modes.precision import WidePrecision
from sim.prove.modes.values import proved_once, proved_twice, proved_varied, second_of
from sim.prove.randomness import DrawPlace
from sim.prove.record import mapped, settle, tensors_in
from sim.prove.report import Report
from sim.prove.runs import adamw, converted, look_at_gradients, offloaded_of
from sim.prove.steps.drawn import DrawnWeights, best_way, give_shards
from sim.prove.steps.finder import Permutation
from sim.prove.steps.mutants import Mutant, put_in, put_into_model
from sim.prove.steps.names import read_names
from sim.prove.steps.proof import Loop, RanksRecord, References, Taken
from sim.prove.steps.updates import is_elementwise
from sim.prove.steps.watch import LoopRecord, LoopWatch
from sim.world import World, world

__all__ = ["verify_step"]

_ASKED = "cannot verify a step"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_DEPTH = 3  # attributes of attributes in which modules are looked for, such as those of a pipeline's schedule


def verify_step(
    step: Callable[[Any, Any], Any],
    model_fn: Callable[[], nn.Module],
    batch: Any,
    mesh_shape: Mapping[str, int] | str | Layout,
    *,
    parallelize: Callable[[nn.Module, DeviceMesh], Any] | None = None,
    rank_step: Callable[..., Any] | None = None,
    shard_batch: Callable[[Any, DeviceMesh], Any] | None = None,
    names: Mapping[str, Any] | None = None,
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | bool | None = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    steps: int | None = None,
    machine: str | Machine | None = None,
) -> Report:
    """Compare a training step of one's own, on simulated ranks, with the same step on one device.

    >>> import torch.nn.functional as F
    >>> def model():
    ...     return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    >>> def step(model, batch):
    ...     loss = F.mse_loss(model(batch), torch.zeros_like(batch))
    ...     loss.backward()
    ...     return loss
    >>> def averaged(model, batch):
    ...     loss = step(model, batch)
    ...     for param in model.parameters():
    ...         dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
    ...     return loss
    >>> x = torch.randn(4, 4)
    >>> def rows(batch, mesh):
    ...     return batch.chunk(mesh.size())[mesh.get_rank()]
    >>> verify_step(step, model, x, "dp=2", rank_step=averaged, shard_batch=rows).ok
    True
    >>> wrong = verify_step(step, model, x, "dp=2", shard_batch=rows)  # nothing averages the gradients
    >>> print(wrong.first.place, "|", wrong.first.sentence)
    the gradient of 2.bias | the ranks hold parts of an average over dp, and nothing reduced it

    The step does what it does in training: micro-batches, collectives of its own, a pipeline's sends and receives. It
    has to leave gradients in the parameters; if it has not called backward, its loss is differentiated here. Then the
    optimizer steps, unless the step has done so itself. Compared are the parameters, what goes into and comes out of
    modules, the loss, the gradients that the optimizer takes, and each parameter and buffer after the step, whoever has
    changed it. Where gradients and updates are right, tensors between modules may be what they like. A step of which
    neither a gradient nor an update can be compared is not proved.

    Random numbers of the step and its modules are at their mean; then, if all is right, those of one device on both
    sides, as in `verify_plan`.

    The ranks' parameters may have other names, or be several of one device's behind each other (q, k and v in one) or
    in turns: values tell which, or `names`. The loss of a rank may be a part of the sum or the mean. Parameters of
    which all elements are equal are moved on both sides, as by `verify_plan`.

    Args:
        step: called with the model and the batch, returns the loss; or a dict with a "loss", or a tuple with the loss
            first, whose other floating-point numbers are compared where all ranks return the same.
        model_fn: makes the model for one device.
        batch: what one device is given: a tensor, or containers of them.
        mesh_shape: as for `verify_plan`.
        parallelize: called with the model and the mesh on each rank, returns what the step is called with: the
            parallel model, one of its own making, a stage, or an object that holds modules, such as a schedule of
            torch's pipelining. None: the same model, or what it returns where that is None.
        rank_step: what ranks call in place of `step`; one that needs a third argument gets the mesh, too.
        shard_batch: called with the batch and the mesh on each rank, returns the rank's batch. From what it does with
            numbered elements, the prover knows in which order the ranks hold the batch, zig-zag or interleaved too.
            None: all of it.
        names: names of parameters on the ranks -> names on one device, several for a fused one; `*` stands for one
            part of a path, the same on both sides. `("up.weight", Shard(0))`, with a placement for each axis of the
            mesh, says how one is split that the ranks draw by themselves.
        optimizer_fn: called with a list of parameters. True: AdamW with lr=1e-3; None or False: none.
        dtype: what floating-point parameters, buffers and batches are converted to, and computed in where the program
            asks for fewer bits.
        seed: of the model, and of what follows.
        steps: how many, all with the given batch. None: one; and where that is cheap, as all ranks together have up to
            a million parameters, a second one with the batch's rows in another order. In it, floating values that are
            all equal are moved, and masks, lengths and labels let rows, and ranks, count differently. A note says what
            is new, and whether the program takes it.
        machine: as in `verify_plan`.

    Returns:
        The report, as of `verify_plan`.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or names that there are not.
        RankFailed: a rank raised, and everything before was right; the message names the module, and shapes that
            differ from one device's. Deadlocks and collectives that do not match raise errors with the same lines.
        InFlightBufferRace: a rank touches a buffer of an operation that it has not waited for.
    """
    mesh = read_mesh(_ASKED, mesh_shape)
    mesh = Layout(mesh.mesh_shape, mesh.alias_name)
    for name, value in (("step", step), ("model_fn", model_fn)):
        if isinstance(value, nn.Module) or not callable(value):
            blame = f"{name} is a {type(value).__name__}, not a function"
            raise InvalidType(_ASKED, blame, f"{name}: {value!r:.80}", "verify_step(step, lambda: Model(), x, ...")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidType(_ASKED, "dtype is no floating-point dtype", f"dtype: {dtype!r}", "torch.float64")
    read_int(_ASKED, "seed", seed, hint="seed=0")
    if steps is not None:
        read_int(_ASKED, "steps", steps, 1)
    optimizer = adamw if optimizer_fn is True else optimizer_fn or None
    task = StepLoop(
        asked=_ASKED,
        world_size=math.prod(mesh.mesh_shape),
        dtype=dtype,
        names=names or {},
        machine=machine,
        step=step,
        model_fn=model_fn,
        batch=batch,
        mesh=mesh,
        parallelize=parallelize,
        rank_step=rank_step or step,
        shard_batch=shard_batch,
        optimizer_fn=optimizer,
        seed=seed,
        steps=steps or 1,
    )
    if steps is not None or dtype.itemsize < 4:
        return proved_once(batch, _proved(task))
    second = second_of(batch, seed)
    twice = replace(task, steps=2, second=second[0])
    return proved_twice(model_fn, task.world_size, batch, second, lambda both: _proved(twice if both else task))


def _proved(task: StepLoop) -> Report:
    """Take the steps on one device and on the ranks, and compare."""

    def prove(made: Callable[[], nn.Module], is_varied: bool) -> Report:
        varied = replace(task, model_fn=made)
        references = varied.references()

        def split(ways: Mapping[str, int]) -> tuple[Report, Mapping[str, int]]:
            each = replace(varied, ways=ways, open={})
            return each.proved(references, is_varied=is_varied), each.open

        return best_way(split)

    return proved_varied(task.model_fn, task.seed, prove)


@dataclass(frozen=True)
class StepLoop(Loop):
    """A step function, called several times with a model and a batch."""

    step: Callable[[Any, Any], Any]
    model_fn: Callable[[], nn.Module]
    batch: Any
    mesh: Layout
    parallelize: Callable[[nn.Module, DeviceMesh], Any] | None
    rank_step: Callable[..., Any]
    shard_batch: Callable[[Any, DeviceMesh], Any] | None
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | None
    seed: int
    steps: int
    ways: Mapping[str, int] = field(default_factory=dict)  # to split parameters that ranks draw, by module
    open: dict[str, int] = field(default_factory=dict)  # how many there are
    second: Any = None  # what the second step is given, in place of the batch

    def mesh_of(self, found: RanksRecord) -> Layout:
        """Return the axes that were given."""
        del found
        return self.mesh

    def shortened(self) -> Loop:
        """Return the loop with the first batch alone."""
        return self if self.second is None else replace(self, second=None, steps=1)

    def references(self, taken: Taken | None = None) -> References:
        """Take the steps on one device, see `Loop`; refuse a program that computes nan there."""
        expected, moved = super().references(taken)
        grads = ((name, grad) for step in expected.steps for name, grad in step.gradients.items() if grad is not None)
        bad = next((name for name, grad in grads if grad.isnan().any()), None)
        if bad is not None:
            blame = "one device computes nan, and nan cannot be compared"
            raise InvalidValue(_ASKED, blame, f"nan in the gradient of {bad}", "a batch with finite results")
        return expected, moved

    @property
    def _batches(self) -> list[Any]:
        """What each step is given; the last one is for those that follow, too."""
        return [self.batch] if self.second is None else [self.batch, self.second]

    def on_one(self, taken: Taken | None, seed: int | None) -> LoopRecord:
        """Take the steps on one device."""
        floor = None if self.dtype == torch.float64 else unit_roundoff(self.dtype)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            model = converted(self.model_fn(), self.dtype)
            torch.default_generator.manual_seed(self.seed + 1)
            with nullcontext() if seed is None else Perturbed(floor, seed=seed):
                batches = [_copied(batch, self.dtype) for batch in self._batches]
                watch = self._watch([model], None if self.shared is None else self.shared.one, keeps_graph=seed is None)
                watch.note_initial()
                made = Made(model, [model], batches, [], WidePrecision(self.dtype), self.step, watch)
                Steps(self, made, taken).go_on()
                return watch.record

    def _watch(
        self, roots: Sequence[nn.Module], shared: Mapping[DrawPlace, torch.Tensor] | None, *, keeps_graph: bool = False
    ) -> LoopWatch:
        """Make the recorder of one device or a rank."""
        options: dict[str, Any] = {"calms_all": True, "explicit_steps": True}
        return LoopWatch(roots, self.steps, keeps_graph=keeps_graph, shared=shared, **options)

    def optimizer(self, made: Made) -> torch.optim.Optimizer | None:
        """Make what updates the parameters, if anything does."""
        chosen = [parameter for parameter in made.watch.parameters().values() if parameter.requires_grad]
        return self.optimizer_fn(chosen) if self.optimizer_fn is not None and chosen else None

    def called(self, made: Made, batch: Any) -> Generator[Any, None, Any]:
        """Call the step."""
        yield from ()
        return made.step(made.model, batch)

    def taken(self, made: Made, optimizer: torch.optim.Optimizer | None) -> Iterator[Any]:
        """Take the steps, on one device or a rank, with breaks where calls have some."""
        watch, batches = made.watch, made.batches
        for number in range(self.steps):
            loss, numbers = _parted((yield from self.called(made, batches[min(number, len(batches) - 1)])))
            there = [parameter.grad is not None for parameter in watch.parameters().values()]
            is_called = any(there) or watch.has_differentiated or watch.has_updated
            if isinstance(loss, torch.Tensor) and loss.requires_grad and not is_called:
                loss.backward()
            is_own = watch.has_updated
            look("the end of the step", [loss] if isinstance(loss, torch.Tensor) else [], ())
            watch.note_result(loss)
            watch.note_numbers(numbers)
            if not is_own:
                look_at_gradients(watch.parameters().values())
            if not is_own and optimizer is not None:
                # Imported here: whoever imports `sim` needs no trainer.
                from hyper_parallel.trainer.optimizer import update

                with _disable_current_modes() if is_elementwise(optimizer) else nullcontext():
                    update(optimizer)
            elif not is_own:
                watch.note_gradients()
            for parameter in () if is_own else watch.parameters().values():  # else the step clears them
                parameter.grad = None
            watch.end_step()

    def make(self) -> None:
        """Make the ranks' models once more, in a world that compares what engines split."""
        with world(self.world_size, seed=self.seed, machine=self.machine, check_replicas=True) as ranks:
            ranks.run(self._make)

    def _make(self) -> Made:
        """Make what the calling rank takes steps with."""
        mesh = init_device_mesh(self.device, self.mesh.mesh_shape, mesh_dim_names=self.mesh.alias_name)
        torch.default_generator.manual_seed(self.seed)
        model = converted(self.model_fn(), self.dtype).to(self.device)
        torch.default_generator.manual_seed(self.seed + 1)
        with WidePrecision(self.dtype) as wide:
            made = self.parallelize(model, mesh) if self.parallelize is not None else model
        made = model if made is None else made
        batches, order = [_copied(batch, self.dtype) for batch in self._batches], []
        if self.shard_batch is not None:
            batches = [_copied(self.shard_batch(batch, mesh), self.dtype) for batch in batches]
            order = [tensor for _, tensor in tensors_in(self.shard_batch(_numbered(self.batch), mesh))]
        batches = [mapped(batch, lambda tensor, _: tensor.to(self.device)) for batch in batches]
        roots, shared = list(_modules_in(made)), self._shared_of(dist.get_rank())
        return Made(made, roots, batches, order, wide, self._step_on(mesh), self._watch(roots, shared))

    def _shared_of(self, rank: int) -> Mapping[DrawPlace, torch.Tensor] | None:
        return None if self.shared is None else self.shared.ranks[rank]

    def _step_on(self, mesh: DeviceMesh) -> Callable[[Any, Any], Any]:
        """Return the ranks' step, with the mesh if it needs a third argument."""
        try:
            given = list(inspect.signature(self.rank_step).parameters.values())
        except ValueError:  # of a callable in C, which has none
            given = []
        needed = [each for each in given if each.default is each.empty and each.kind in _POSITIONAL]
        return (lambda model, batch: self.rank_step(model, batch, mesh)) if len(needed) == 3 else self.rank_step

    def on_ranks(self, references: References, mutant: Mutant | None) -> RanksRecord:
        """Take the steps on the ranks."""
        moves = self.device != "cpu"
        options: dict[str, Any] = {"device": self.device if moves else None, "machine": self.machine}
        watched = mutant is None and self.shared is None
        with world(self.world_size, seed=self.seed, check_races=watched, **options) as ranks:
            with put_in(ranks, mutant):
                made = self._made(ranks)
                roots = [each.roots for each in made]
                drawn = DrawnWeights() if moves else self._give_shards(references[0].initial, roots)
                found, loops = RanksRecord(rows=drawn.rows, notes=drawn.notes), dict[int, LoopRecord]()

                def begin() -> Steps:
                    rank = dist.get_rank()
                    put_into_model(mutant, made[rank].roots, rank)
                    made[rank].watch.note_initial()
                    loops[rank] = made[rank].watch.record
                    return Steps(self, made[rank])

                with found.until_stopped(loops, self.world_size):
                    self._take(ranks, made, begin, references, found)
            offloaded = [block for each in roots for root in each for block in offloaded_of(root)]
            return replace(
                found,
                events=list(ranks.trace.kept()),
                wide=[each.wide for each in made],
                orders=list(_permutations(self.batch, [each.order for each in made])),
                offloads=bool(offloaded),
                why_not="ranks draw weights by themselves" if drawn.said else "",
                has_moved=any(block.has_moved for block in offloaded),
            )

    def _made(self, ranks: World) -> list[Made]:
        """Let each rank make what it takes steps with."""
        return ranks.run(self._make)

    def _take(
        self,
        ranks: World,
        made: Sequence[Made],
        begin: Callable[[], Steps],
        references: References,
        found: RanksRecord,
    ) -> None:
        """Take the steps on the ranks, each of which begins its own."""
        del references, found

        def take() -> None:
            begin().go_on()
            self._settle(made[dist.get_rank()])

        ranks.run(take)

    def _settle(self, made: Made) -> None:
        """Have on the host what the calling rank has noted on a device, but for what is proved without."""
        settle(self.device)
        if self.device != "cpu":
            made.watch.record.uses, made.watch.record.choices = {}, {}

    def _give_shards(self, one: Mapping[str, torch.Tensor], roots: Sequence[Sequence[nn.Module]]) -> DrawnWeights:
        """Let parameters that ranks have drawn by themselves be those of one device."""
        held = [LoopWatch(each, 0).parameters() for each in roots]
        known = list(dict.fromkeys(name for each in held for name in each))
        names = read_names(_ASKED, self.names, known, list(one))
        drawn = give_shards(_ASKED, one, held, self.mesh, self.names, names, self.ways)
        self.open.update(drawn.ways)
        for module in (module for each in roots for module in each) if drawn.said else ():
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_floating_point():
                    tensor.data = tensor.data.to(self.dtype)
        return drawn


class Made(NamedTuple):
    """Model, batches and step of one device or a rank.

    Attributes:
        model: what the step is called with.
        roots: the modules in it.
        batches: its own, for each step; the last one is for those that follow, too.
        order: the numbers of the batch's elements that it has.
        wide: the mode in which it computes.
        step: is called with model and batch.
        watch: records the steps.
    """

    model: Any
    roots: list[nn.Module]
    batches: list[Any]
    order: list[torch.Tensor]
    wide: WidePrecision
    step: Callable[[Any, Any], Any]
    watch: LoopWatch


class Steps:
    """The steps of one device or a rank, which may be taken in several parts.

    Args:
        loop: whose.
        made: what they are taken with.
        taken: what `topk` and its like shall take.
    """

    def __init__(self, loop: StepLoop, made: Made, taken: Taken | None = None) -> None:
        watch = made.watch
        self._made = made
        self._choices = Choices(lambda: watch.where if watch.is_inside else None, taken)
        watch.record.choices = self._choices.made
        self._parts = loop.taken(made, loop.optimizer(made))

    def go_on(self, *, to_break: bool = False) -> None:
        """Take steps to their end, or up to the next break."""
        with DoubleGroupedProducts(), self._made.watch, self._made.wide, self._choices:
            if to_break:
                next(self._parts)
            else:
                deque(self._parts, maxlen=0)


def _modules_in(value: Any, depth: int = _DEPTH) -> Iterator[nn.Module]:
    """Yield the outermost modules in an object, its containers and attributes."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _modules_in(each, depth)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _modules_in(each, depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor, dist.ProcessGroup)):
        seen = set()
        for each in vars(value).values():
            if not callable(each) or isinstance(each, nn.Module):
                for module in _modules_in(each, depth - 1):
                    if id(module) not in seen:
                        seen.add(id(module))
                        yield module


def _parted(result: Any) -> tuple[Any, dict[tuple[str, str], Any]]:
    """Return the loss of what a step returned, and other numbers, by kind and key: floating tensors, and floats."""
    named = dict(enumerate(result)) if isinstance(result, (tuple, list)) else result
    if not isinstance(named, Mapping):
        return result, {}
    first, kinds = 0 if named is not result else "loss", {float: "float", torch.Tensor: "tensor"}
    others = {name: each for name, each in named.items() if name != first and type(each) in kinds}
    plain = {name: torch.as_tensor(each) for name, each in others.items()}
    numbers = [name for name, each in plain.items() if each.is_floating_point() and each.numel() == 1]
    return named.get(first), {(kinds[type(others[name])], f"result {name!r}"): others[name] for name in numbers}


def _copied(value: Any, dtype: torch.dtype) -> Any:
    """Copy a batch, floating values in a dtype."""
    return mapped(value, lambda tensor, _: tensor.detach().clone().to(dtype if tensor.is_floating_point() else None))


def _numbered(value: Any) -> Any:
    """Return a batch whose elements are their own numbers."""
    return mapped(value, lambda tensor, _: torch.arange(tensor.numel()).reshape(tensor.shape))


def _permutations(batch: Any, orders: Sequence[Sequence[torch.Tensor]]) -> Iterator[Permutation]:
    """Yield in which order the ranks hold a batch, along each of its dims and flattened, where it is not its own."""
    for number, (_, full) in enumerate(tensors_in(batch)):
        held = [parts[number] for parts in orders if number < len(parts)]
        for dim in range(full.dim()):
            stride = math.prod(full.shape[dim + 1 :])
            lists = {tuple(dict.fromkeys((part // stride % full.shape[dim]).flatten().tolist())): None for part in held}
            yield from _joined_order(lists, full.shape[dim])
        yield from _joined_order({tuple(part.flatten().tolist()): None for part in held}, full.numel())


def _joined_order(lists: Mapping[Permutation, Any], size: int) -> Iterator[Permutation]:
    order = tuple(place for places in lists for place in places)
    if order != tuple(range(size)) and sorted(order) == list(range(size)):
        yield order
