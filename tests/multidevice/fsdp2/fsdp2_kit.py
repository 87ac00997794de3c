"""Helpers of the tests of fully_shard and hsdp against torch's FSDP2: models, data, and the comparison of runs.

A *behaviour* is one function of a `Run`. It runs three times with the same seeds and data: with our fully_shard,
with torch's, and on one device with the batches of all ranks together. Ours has to equal torch's to the last bit on
simulated ranks (where both add in rank order), elsewhere within rounding; and one device's within rounding of float64,
or of float32 where the backend reduces no float64.
Where FSDP2 refuses, or is wrong, it is left out, and `without_fsdp2` says what it does.

The other contestants are `hsdp` and `hsdp(use_eager_hook=False)`, traced hsdp for short, each at several levels: they
have to equal fully_shard. Where they refuse, or differ, `without_hsdp` and `without_traced` match the error.

`BEHAVIOURS`, at the end, lists them all; test_fsdp2_coverage.py sees to it that each has a test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from rounding_kit import Alone, bound_of, results
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from units_kit import full

import sim
from hyper_parallel.core.fully_shard import api, utils
from hyper_parallel.core.fully_shard.unit import unit_of
from hyper_parallel.core.hsdp.api import hsdp

# -- the engines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """One way to run a behaviour.

    Attributes:
        api: Where `fully_shard` and the like are found, by torch's names; None: on one device.
        cell: Wraps by `hsdp` with these options; None: by `fully_shard`.
    """

    name: str
    api: Any = None
    policies: Any = None
    forward_method: str = ""
    cell: Mapping[str, Any] | None = None

    def __hash__(self) -> int:
        return hash(self.name)


OURS = Engine("ours", api, utils, "register_forward_method")
FSDP2 = Engine("FSDP2", torch_fsdp, torch_fsdp, "register_fsdp_forward_method")
ONE = Engine("one device")


def cell(name: str, **options: Any) -> Engine:
    """An engine of `hsdp`; without a level, level3, or level2 where parameters are kept after forward."""
    return Engine(name, api, utils, "register_forward_method", options)


CELLS = {
    "hsdp": [
        cell("hsdp", comm_fusion=True),
        cell("hsdp, sums shown", enable_grad_accumulation=True),
        cell("hsdp at level1", optimizer_level="level1"),
    ],
    "traced": [
        cell("traced hsdp", use_eager_hook=False),
        cell("traced hsdp, sums shown", use_eager_hook=False, enable_grad_accumulation=True),
        cell("traced hsdp at level1", use_eager_hook=False, optimizer_level="level1"),
    ],
}
"""The contestants beside fully_shard: each behaviour is run by all engines of one, and compared with fully_shard's."""

SAME_ORDER = r"the ranks of group '\w+' do not (agree|mean the same)"
"""How a world ends in which ranks read other parameters of a traced cell, which `hsdp` says is not possible."""

CELL_METHODS = {
    "set_requires_gradient_sync": "set_requires_grad_sync",
    "set_modules_to_forward_prefetch": "set_forward_prefetch_cells",
    "set_modules_to_backward_prefetch": "set_backward_prefetch_cells",
}


def cell_options(
    mesh: DeviceMesh | None = None, reshard_after_forward: Any = None, mp_policy: Any = None, **options: Any
) -> dict[str, Any]:
    """Say fully_shard's options in hsdp's words; what has none goes on under its own name, for hsdp to refuse."""
    options = {"threshold": 0, "optimizer_level": "level2" if reshard_after_forward is False else "level3"} | options
    if mesh is not None and (mesh.size() < dist.get_world_size() or mesh.ndim > 2):
        options["mesh"] = mesh
    elif mesh is not None:
        options["shard_size"] = mesh.size(mesh.ndim - 1)
    if not isinstance(reshard_after_forward, bool | None):
        options["reshard_after_forward"] = reshard_after_forward
    if mp_policy is not None and mp_policy == utils.MixedPrecisionPolicy(reduce_dtype=mp_policy.reduce_dtype):
        options["reduce_dtype"] = mp_policy.reduce_dtype
    elif mp_policy is not None:
        options["mp_policy"] = mp_policy
    return options


class Run:
    """One run of a behaviour, by one engine, on one rank; what it notes is compared with the other engines' notes.

    Attributes:
        losses: Of each backward, this rank's; one device's is their mean.
        tensors: Full gradients and parameters, by name.
        facts: Anything else; not compared with one device's.
        layouts: Which part of what a rank has; compared between fully_shard's and FSDP2's only.
        costs: Numbers of which ours may be at most FSDP2's.
    """

    def __init__(self, ctx: Any, engine: Engine, meshes: dict[Any, DeviceMesh] | None = None) -> None:
        self.ctx = ctx
        self.engine = engine
        self.alone = engine is ONE
        self.ours = engine is OURS or engine.cell is not None
        self.losses: list[torch.Tensor] = []
        self.tensors: dict[str, torch.Tensor | None] = {}
        self.facts: dict[str, Any] = {}
        self.layouts: dict[str, Any] = {}
        self.costs: dict[str, int] = {}
        self.meshes = {} if meshes is None else meshes

    # -- wrapping ------------------------------------------------------------------------------------------------

    def mesh(self, *shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
        """A mesh of all ranks; the last names are used."""
        shape = shape or (self.ctx.world_size,)
        key = shape, names
        if key not in self.meshes:
            self.meshes[key] = init_device_mesh(self.ctx.device_type, shape, mesh_dim_names=names[-len(shape) :])
        return self.meshes[key]

    def wrap(self, module: Any, **options: Any) -> Any:
        """fully_shard, over all ranks unless a mesh is given, or hsdp of the same options; nothing on one device."""
        if self.alone:
            return module
        options = {"mesh": self.mesh()} | options
        if self.engine.cell is not None:
            return hsdp(module, **cell_options(**options) | self.engine.cell)
        return self.engine.api.fully_shard(module, **options)

    def wrap_blocks(self, model: Any, **options: Any) -> Any:
        """Each block a unit, and the rest."""
        for block in model.blocks:
            self.wrap(block, **options)
        return self.wrap(model, **options)

    def policy(self, *args: Any, **options: Any) -> Any:
        """A MixedPrecisionPolicy of the engine."""
        return None if self.alone else self.engine.policies.MixedPrecisionPolicy(*args, **options)

    def tell(self, module: Any, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of a wrapped module; nothing on one device."""
        if self.engine.cell is not None:
            method = CELL_METHODS.get(method, method)
        return None if self.alone else getattr(module, method)(*args, **options)

    def forward_method(self, module: nn.Module, name: str) -> None:
        """Declare a method that gathers parameters as forward does."""
        if not self.alone:
            getattr(self.engine.api, self.engine.forward_method)(module, name)

    # -- models and data -----------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """What a behaviour computes in if it does not say otherwise: float64 if the backend reduces that."""
        return self.ctx.float_dtype

    def build(self, make: Callable[[], nn.Module], dtype: torch.dtype | None = None) -> Any:
        """The same model on every rank and for every engine."""
        torch.manual_seed(0)
        return make().to(self.ctx.device, dtype or self.dtype)

    def build_as_made(self, make: Callable[[], nn.Module]) -> Any:
        """As `build`, with parameters in the dtypes that `make` gives them."""
        torch.manual_seed(0)
        return make().to(self.ctx.device)

    def net(self, dtype: torch.dtype | None = None) -> Net:
        """A `Net`."""
        return self.build(Net, dtype)

    def batch(
        self, step: int = 0, *, rows: int = 4, width: int = 5, part: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """This rank's inputs [rows, width]; on one device those of all ranks. `part`: which share of how many."""
        index, count = part or (self.ctx.rank, self.ctx.world_size)
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(count * rows, width, generator=generator, dtype=torch.float64)
        return (x if self.alone else x[index * rows : (index + 1) * rows]).to(self.ctx.device, self.dtype)

    def parts(self) -> list[int]:
        """The ranks whose share of the data this run has: its own, or, on one device, all of them."""
        return list(range(self.ctx.world_size)) if self.alone else [self.ctx.rank]

    # -- training ------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Note a loss and differentiate it."""
        self.losses.append(loss.detach().to(self.dtype))
        loss.backward(**options)

    def train(
        self,
        model: nn.Module,
        loss: Callable[[int], torch.Tensor] | None = None,
        *,
        steps: int = 2,
        optimizer: Any = None,
        clip: float | None = None,
        when: str = "",
    ) -> None:
        """A few steps of SGD with momentum; then note the last gradients and the parameters."""
        optimizer = optimizer or sgd(model)
        for step in range(steps):
            optimizer.zero_grad()
            self.backward(loss(step) if loss else loss_of(model, self.batch(step)))
            if clip is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
                self.note(f"norm {step}", norm)
            optimizer.step()
        self.note_model(model, when)

    def note(self, name: str, tensor: torch.Tensor | None) -> None:
        """Note a full tensor."""
        assert name not in self.tensors, name
        # what is offloaded comes to where the groups can gather it
        self.tensors[name] = None if tensor is None else full(tensor.detach().to(self.ctx.device)).clone()

    def note_model(self, model: nn.Module, when: str = "") -> None:
        """Note all gradients and parameters; ours holds nothing of what it was to free in backward."""
        if self.ours:
            assert_resharded(model)
        for name, parameter in model.named_parameters():
            self.note(f"grad {name} {when}".rstrip(), parameter.grad)
            self.note(f"param {name} {when}".rstrip(), parameter)


def assert_resharded(model: nn.Module) -> None:
    """Units that reshard after backward have: their modules show shards, unsharded parameters have no memory."""
    for module in model.modules():
        unit = unit_of(module)
        for bucket in unit.buckets if unit and unit.options.reshard_after_backward else ():
            assert not unit.shows_unsharded, type(module)
            assert bucket.unsharded_buffer.untyped_storage().nbytes() == 0, type(module)


class LocalSGD:
    """SGD with momentum on each rank's parts: without what DTensors cost, most of the time of a test of this size."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1, momentum: float = 0.9) -> None:
        self.parameters = list(parameters)
        self.lr = lr
        self.momentum = momentum
        self.moments: dict[nn.Parameter, torch.Tensor] = {}

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                moment = self.moments.get(parameter)
                moment = gradient.clone() if moment is None else moment.mul_(self.momentum).add_(gradient)
                self.moments[parameter] = moment
                local(parameter).sub_(moment * self.lr)  # with alpha, bits depend on the place in a vector


def sgd(model: nn.Module) -> LocalSGD:
    return LocalSGD(model.parameters())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data


def loss_of(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    return model(*args, **kwargs).square().mean()


# -- models --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 8)
        self.down = nn.Linear(8, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Rows that 2 and 4 ranks share and rows that they do not; `scale` has fewer than there are ranks."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.embed = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Even(nn.Module):
    """As `Net`, but every dim of every parameter can be halved and quartered."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


# -- comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Behaviour:
    """One behaviour and how it is compared.

    Attributes:
        ranks: How many ranks it needs.
        exact: Ours and FSDP2's are equal to the last bit on simulated ranks.
        one: Compare with one device, too.
        dtype: The coarsest one computed in, which gives the rounding bound; None: float64, or what is in its place.
        without_fsdp2: What FSDP2 does instead, which is then not run.
        reduces: The dtype of gradients that FSDP2 reduces and scatters, where not every backend takes it.
        without: By contestant, a regular expression of the error that it raises instead.
    """

    name: str
    body: Callable[[Run], None]
    ranks: int
    exact: bool
    one: bool
    dtype: torch.dtype | None
    without_fsdp2: str
    reduces: torch.dtype | None
    without: Mapping[str, str]

    def runs_on(self, ctx: Any) -> bool:
        """Whether the rank's backend reduces what is reduced."""
        return self.reduces is None or ctx.reductions.takes(self.reduces, collective="reduce_scatter")


@dataclass
class Theme:
    """The behaviours of one file."""

    checks: dict[str, Behaviour] = field(default_factory=dict)

    def behaviour(
        self,
        ranks: int = 2,
        *,
        exact: bool = True,
        one: bool = True,
        dtype: torch.dtype | None = None,
        without_fsdp2: str = "",
        reduces: torch.dtype | None = None,
        without_hsdp: str = "",
        without_traced: str = "",
    ) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
        """Declare a behaviour, named as the function that it decorates."""
        without = {"fully_shard": "", "hsdp": without_hsdp, "traced": without_traced or without_hsdp}

        def add(body: Callable[[Run], None]) -> Callable[[Run], None]:
            name = body.__name__
            assert name in BEHAVIOURS, f"{name} is not in BEHAVIOURS of fsdp2_kit.py"
            assert name not in self.checks, name
            assert one or not without_fsdp2, f"{name} would be compared with nothing"
            self.checks[name] = Behaviour(name, body, ranks, exact, one, dtype, without_fsdp2, reduces, without)
            return body

        return add

    def names(self, ranks: int, contestant: str = "fully_shard") -> list[str]:
        """The behaviours that need so many ranks, but for those that test_fsdp2_coverage.py runs."""
        apart = {name for name, check in self.checks.items() if check.without[contestant] == SAME_ORDER}
        return [name for name, check in self.checks.items() if check.ranks == ranks and name not in apart]

    def contestants(self, ranks: int, tier: str = "test") -> Any:
        """Parametrize a test: each behaviour that needs so many ranks, by fully_shard in this tier, then by cells.

        Every second behaviour runs by cells below `deep`: by hsdp, and some of the others in a graph.
        """
        tiers = {"fully_shard": [tier], "hsdp": ["full" if tier == "full" else "test", "deep"]}
        tiers["traced"] = ["deep", "full", "deep", "deep"]
        cases = [
            pytest.param(name, contestant, marks=pytest.mark.tier(tier), id=f"{name}-{contestant}")
            for contestant, in_turn in tiers.items()
            for name, tier in zip(self.names(ranks, contestant), itertools.cycle(in_turn), strict=False)
        ]
        return pytest.mark.parametrize(("name", "contestant"), cases)

    def check_cells(self, ctx: Any, name: str, contestant: str, meshes: dict[Any, DeviceMesh]) -> None:
        """Run one behaviour by each engine of a contestant, and compare with fully_shard's."""
        behaviour = self.checks[name]
        refusal = behaviour.without[contestant]
        wanted = None
        # Replicated parameters are summed over all ranks at once, and each use in a traced cell by itself: other bits.
        coarsest, measure = behaviour.dtype or ctx.float_dtype, None if behaviour.dtype else alone
        dtype = None if behaviour.exact and behaviour.dtype and ctx.backend == "sim" else coarsest
        for engine in CELLS[contestant]:
            run = Run(ctx, engine, meshes)
            refused = pytest.raises((Exception, pytest.fail.Exception), match=refusal or None)
            with refused if refusal not in ("", SAME_ORDER) else nullcontext():
                behaviour.body(run)
                if wanted is None:
                    wanted = Run(ctx, OURS, meshes)
                    behaviour.body(wanted)
                compare(named(run.losses), named(wanted.losses), dtype, engine, measure)
                compare(run.tensors, wanted.tensors, dtype, engine, measure)
                assert run.facts == wanted.facts, f"{engine.name} gives other facts"
                compare_costs(run.costs, wanted.costs, engine)
            if run.costs or ctx.backend != "sim":
                break  # they cost more with sums shown, and at level1; elsewhere, time is dear

    def check(
        self, ctx: Any, name: str, contestant: str = "fully_shard", meshes: dict[Any, DeviceMesh] | None = None
    ) -> None:
        """Run one behaviour three times, and compare; by another contestant, compare its runs with fully_shard's."""
        behaviour = self.checks[name]
        meshes = {} if meshes is None else meshes
        if contestant != "fully_shard":
            self.check_cells(ctx, name, contestant, meshes)
            return
        runs = {}
        for engine in (OURS, FSDP2, ONE):
            if (engine is ONE and not behaviour.one) or (engine is FSDP2 and behaviour.without_fsdp2):
                continue
            runs[engine] = Run(ctx, engine, meshes)
            behaviour.body(runs[engine])
        coarsest, measure = behaviour.dtype or ctx.float_dtype, None if behaviour.dtype else alone
        ours = runs[OURS]
        assert any((ours.losses, ours.tensors, ours.facts, ours.layouts, ours.costs)), "nothing was noted"
        if FSDP2 in runs:
            theirs = runs[FSDP2]
            assert ours.facts == theirs.facts, "FSDP2 gives other facts"
            assert ours.layouts == theirs.layouts, "FSDP2 gives other layouts"
            compare_costs(ours.costs, theirs.costs, OURS)
            dtype = None if behaviour.exact and ctx.backend == "sim" else coarsest
            compare(named(ours.losses), named(theirs.losses), dtype, FSDP2, measure)
            compare(ours.tensors, theirs.tensors, dtype, FSDP2, measure)
        if ONE in runs:
            compare(named(mean_over_ranks(ours.losses)), named(runs[ONE].losses), coarsest, ONE, measure)
            compare(ours.tensors, runs[ONE].tensors, coarsest, ONE, measure)

    def check_all(self, ctx: Any, ranks: int, contestant: str = "fully_shard") -> None:
        """Run all behaviours that need so many ranks, one after the other, and name the first one that fails."""
        meshes: dict[Any, DeviceMesh] = {}
        for name in self.names(ranks, contestant):
            if not self.checks[name].runs_on(ctx):
                continue
            try:
                self.check(ctx, name, contestant, meshes)
            except BaseException as error:
                raise AssertionError(f"behaviour {name!r} failed: {type(error).__name__}: {error}") from error


def on_processes(tier: str = "deep") -> Any:
    """Parametrize a test of all behaviours in one world: by fully_shard in this tier, by cells in the last."""
    tiers = dict.fromkeys(("fully_shard", *CELLS), "deep") | {"fully_shard": tier}
    cases = [pytest.param(contestant, marks=pytest.mark.tier(tier)) for contestant, tier in tiers.items()]
    return pytest.mark.parametrize("contestant", cases)


def alone() -> dict[str, torch.Tensor]:
    """The net on one device, in float32."""
    run = Run(sim.RankTest(0, 2, "sim", torch.device("cpu")), ONE)
    model = run.net(torch.float32)
    run.train(model, lambda step: loss_of(model, run.batch(step).float()))
    return results(run.losses, run.tensors, {})


def named(losses: list[torch.Tensor]) -> dict[str, torch.Tensor | None]:
    return {f"loss {index}": loss for index, loss in enumerate(losses)}


def mean_over_ranks(losses: list[torch.Tensor]) -> list[torch.Tensor]:
    if not losses:
        return []
    together = torch.stack(losses)
    dist.all_reduce(together)
    return list(together / dist.get_world_size())


def compare_costs(ours: dict[str, int], theirs: dict[str, int], engine: Engine) -> None:
    """At most as high as the other's."""
    assert list(ours) == list(theirs), (ours, theirs)
    dear = {key: (cost, theirs[key]) for key, cost in ours.items() if cost > theirs[key]}
    assert not dear, f"{engine.name} costs more: {dear}"


def compare(
    ours: dict[str, torch.Tensor | None],
    theirs: dict[str, torch.Tensor | None],
    dtype: torch.dtype | None,
    engine: Engine,
    measure: Alone | None = None,
) -> None:
    """Equal to the last bit, or, if a dtype is given, within its eps times the number of summands.

    Batch, widths and layers of these models multiply to less than 4096; in the short dtypes errors are random enough
    for a bound of 32. Where there is no float64, `measure` is what to measure the bound on.
    """
    assert list(ours) == list(theirs), f"{engine.name} has noted other names: {list(ours)} and {list(theirs)}"
    ours, theirs = on_host(ours), on_host(theirs)
    for name, wanted in theirs.items():
        got = ours[name]
        assert (got is None) == (wanted is None), f"{name}: ours {got}, {engine.name} {wanted}"
        if got is None or wanted is None:
            continue
        assert got.shape == wanted.shape, f"{name}: ours {got.shape}, {engine.name} {wanted.shape}"
        if engine is not ONE:
            assert got.dtype == wanted.dtype, f"{name}: ours {got.dtype}, {engine.name} {wanted.dtype}"
        if dtype is None:
            assert torch.equal(got, wanted), f"{name} differs from {engine.name}:\n{got}\n{wanted}\n{got - wanted}"
        elif got.numel():
            got, wanted = wanted_precision(got), wanted_precision(wanted)
            summands = 4096 if torch.finfo(dtype).eps < 1e-4 else 32
            bound = bound_of(wanted, theirs, measure, eps=torch.finfo(dtype).eps, summands=summands)
            distance = (got - wanted).abs().max().item()
            assert distance <= bound, f"{name} is {distance} > {bound} from {engine.name}:\n{got}\n{wanted}"


def wanted_precision(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def on_host(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """One copy each, where on a late device each of many comparisons would wait for its stream."""
    return {name: None if tensor is None else tensor.cpu() for name, tensor in tensors.items()}


# -- the table -----------------------------------------------------------------------------------------------------

BEHAVIOURS = {
    # units
    "inner_layers_are_units_too": "units inside of units inside of the root",
    "a_unit_without_parameters": "all of its parameters belong to units in it",
    "a_list_keeps_the_root_most": "modules that others of the list contain are dropped",
    "a_list_of_modules_called_in_another_order": "one unit, whose modules run far apart",
    "a_list_of_which_some_modules_run": "others in each step",
    "a_list_whose_last_module_is_called_apart": "a loss in chunks, after the root's forward",
    "a_sequential_is_one_unit": "a container with a forward",
    "the_root_alone_is_not_wrapped": "each unit is its own root",
    "parameters_in_lists_and_dicts": "ParameterList and ParameterDict",
    "tied_in_one_unit": "embedding and head are one parameter",
    "tied_over_the_modules_of_a_list": "modules of one list share a parameter",
    "one_module_in_two_places": "a unit that is registered twice",
    "buffers_are_kept_and_updated": "running statistics",
    "some_parameters_of_a_unit_are_frozen": "no gradients, no reduction of them",
    "whole_units_are_frozen": "before all that train, and between them",
    "frozen_after_the_first_step": "requires_grad changes between steps, there and back",
    "parameters_that_no_rank_uses": "their gradient is None, also that of a unit that never runs",
    "parameters_that_some_ranks_use": "the mean counts the others as zero",
    "an_inner_output_that_some_ranks_return": "a unit leaves its own parameters out",
    "an_input_that_some_ranks_return": "with recomputation",
    "an_inner_output_that_some_ranks_of_the_root_return": "and so does the root",
    "an_output_that_the_loss_does_not_use": "half of a unit has no gradient",
    "gradients_of_the_inputs": "of the first unit's inputs",
    "inputs_that_are_detached_between_units": "backward never reaches a unit's inputs",
    "two_forwards_one_backward": "the sum of two losses",
    "two_forwards_two_backwards": "forward, forward, backward, backward",
    "one_forward_two_backwards": "retain_graph=True",
    "the_output_goes_in_again": "the root runs twice in one graph",
    "a_forward_without_backward_in_between": "a graph that is dropped",
    "a_unit_runs_twice_in_a_forward": "one block, twice",
    "another_order_of_units_in_each_step": "the recorded order is wrong from step to step",
    "a_unit_is_left_out_in_some_steps": "a unit without a forward",
    "an_inner_unit_runs_before_the_root": "in the same graph",
    "a_unit_is_called_after_the_root": "an inner unit, called by the loss",
    "checkpointing_each_block": "torch.utils.checkpoint around units",
    "checkpointing_each_block_reentrant": "the older kind, whose backward runs a backward",
    "checkpointing_inside_of_a_unit": "recomputation in the middle of a unit's backward",
    "checkpointing_inside_of_a_unit_reentrant": "the same with the older kind",
    "checkpointing_several_units_together": "recomputation runs two units' forwards",
    "checkpointing_the_root": "both kinds, around all units",
    "evaluation_before_training": "no_grad comes first",
    "evaluation_in_inference_mode_between_steps": "no inference tensor gets into training",
    "evaluation_between_forward_and_backward": "the graph's weights are there again for backward",
    "keyword_arguments_and_containers": "nested lists, tuples and dicts, in and out",
    "outputs_in_a_dataclass": "backward starts at a field of it",
    "outputs_in_a_namedtuple": "its type is kept, in and out",
    "an_output_view_modified_in_place": "autograd gives it a new history",
    "an_output_modified_in_place": "of the root",
    "an_output_that_is_an_input": "a unit passes a tensor through",
    "methods_other_than_forward": "declared ones gather as forward does",
    "hooks_of_the_user_on_modules": "forward and backward hooks, made before and after wrapping",
    "hooks_of_the_user_on_parameters": "register_post_accumulate_grad_hook: an optimizer in backward",
    "weights_of_an_lstm": "a module with a list of its own weights",
    "attention_with_one_tensor_for_all": "query, key and value are one object",
    # dtypes
    "in_fp32": "parameters in fp32, no policy",
    "in_bf16": "parameters in bf16, no policy",
    "in_fp16": "parameters in fp16, no policy",
    "several_dtypes_in_a_unit": "bf16, fp32 and fp64 side by side",
    "a_unit_for_each_dtype": "each with its own policy",
    "complex_parameters": "complex64",
    "frozen_parameters_of_another_dtype": "a frozen bf16 base under fp32 adapters",
    "the_dtype_changes_after_wrapping": "model.float() of a wrapped fp64 model",
    "main_gradients_in_fp32": "apply_grad_on_fp32_main_grad: main_grad instead of grad",
    "compute_in_bf16_reduce_in_fp32": "param_dtype and reduce_dtype",
    "compute_in_fp16_reduce_in_fp32": "the same with fp16",
    "compute_and_reduce_in_bf16": "param_dtype alone",
    "reduce_in_bf16": "reduce_dtype alone, coarser than the parameters",
    "reduce_in_fp16": "the same with fp16",
    "reduce_in_fp64": "reduce_dtype alone, finer than the parameters",
    "parameters_in_bf16_reduce_in_fp32": "bf16 parameters, fp32 sums",
    "reduce_in_bf16_over_both_axes": "on a mesh of two axes",
    "outputs_in_another_dtype": "output_dtype",
    "inputs_are_not_cast": "cast_forward_inputs=False",
    "blocks_under_another_policy_than_the_root": "bf16 blocks in an fp32 root",
    "norms_in_fp32_inside_of_bf16_blocks": "inner policies win, both ways of casting",
    "only_inner_layers_under_a_policy": "units without a policy around one with it",
    "casts_reach_into_containers_and_leave_integers": "named tuples and nested dicts; buffers stay",
    "casts_reach_into_dataclasses": "frozen, in lists, as keywords, in and out",
    "casts_of_inputs_that_need_gradients": "the gradient has the input's dtype",
    "low_precision_over_several_micro_batches": "waiting gradients are kept in reduce_dtype",
    "autocast_around_a_sharded_model": "torch.autocast",
    "loss_scaling_in_fp16": "scaled losses, divided after the reduction",
    "unsharded_weights_have_the_compute_dtype": "what unshard() shows",
    # accumulation
    "every_micro_batch_is_reduced": "gradients add up in the shards",
    "only_the_last_micro_batch_communicates": "set_requires_gradient_sync",
    "the_first_micro_batch_communicates_too": "yes, no, yes",
    "weights_are_kept_while_accumulating": "set_reshard_after_backward",
    "weights_are_never_freed_while_accumulating": "and reshard_after_forward=False",
    "the_flag_of_an_inner_unit_alone": "set on the blocks, not on the root",
    "not_the_last_backward": "set_is_last_backward",
    "not_the_last_backward_and_no_communication": "all three flags, as pipeline schedules set them",
    "hsdp_every_micro_batch": "over two axes",
    "hsdp_only_the_last_micro_batch": "neither axis is reduced before",
    "hsdp_the_all_reduce_waits": "set_requires_all_reduce",
    "hsdp_the_all_reduce_of_some_units_waits": "recurse=False",
    "hsdp_reduction_and_all_reduce_wait": "nothing, one axis, both axes",
    "frozen_between_micro_batches": "each of which reduces",
    "frozen_while_gradients_wait": "and trained again when they are reduced",
    "frozen_when_gradients_are_reduced": "what was added up before is reduced",
    "hsdp_frozen_while_the_all_reduce_waits": "on two axes",
    "other_units_in_each_micro_batch": "units without gradients in some",
    "other_units_in_each_micro_batch_reduced_at_the_end": "what waits in a unit that the last backward skips",
    "other_parts_of_a_unit_on_each_rank": "and in each micro-batch",
    "zero_grad_clears_what_waits": "unreduced gradients are gone",
    "hsdp_zero_grad_clears_what_waits": "half-reduced gradients are gone",
    "zero_grad_to_zeros": "set_to_none=False",
    "gradients_are_added_to_what_is_there": "a gradient that the user has changed",
    "gradients_of_some_parameters_are_dropped": "some are None, others add up",
    "sums_instead_of_means": "no division by the number of ranks",
    "sums_divided_by_a_number": "a divisor of one's own",
    "hsdp_sums_divided_by_a_number": "the same over two axes",
    "means_times_a_factor": "set_gradient_scaling_factor, also where one unit adds up",
    "losses_divided_by_the_number_of_micro_batches": "the user's own division",
    # resharding
    "freed_after_forward": "reshard_after_forward=True, the root too",
    "kept_after_forward": "reshard_after_forward=False",
    "some_units_kept_after_forward": "each unit its own",
    "split_over_fewer_ranks_after_forward": "reshard_after_forward=2 of 4",
    "split_over_fewer_ranks_and_two_forwards": "two passes share the smaller parts",
    "split_over_fewer_ranks_and_evaluation": "an evaluation leaves them; the next step has new weights",
    "split_over_fewer_ranks_while_accumulating": "with set_requires_gradient_sync",
    "split_over_all_ranks_or_one_after_forward": "the ints that mean True and False",
    "split_over_fewer_ranks_of_a_two_axis_mesh": "over the shard axis",
    "changed_for_an_evaluation_and_back": "set_reshard_after_forward",
    "changed_for_the_root_alone": "recurse=False",
    "changed_for_one_block": "the others stay",
    "kept_after_backward_without_a_step": "the weights do not change in between",
    "kept_after_backward_with_a_step": "changed weights are gathered anew",
    "kept_after_backward_with_a_step_of_any_optimizer": "one by one, foreach, fused; by a closure",
    "kept_after_backward_then_freed_by_hand": "reshard() before the optimizer's step",
    "gathered_and_freed_by_hand": "unshard and reshard, which is idempotent",
    "gathered_by_a_handle": "async_op=True, waited for twice",
    "gathered_ahead_and_nobody_waits": "forward does",
    "freed_between_forward_and_backward": "backward gathers again",
    "gathered_between_forward_and_backward": "backward has them already",
    "a_unit_of_several_modules_gathered_through_any": "they share one state",
    "changed_in_place_while_sharded": "the next forward has the new values",
    "prefetched_in_forward": "set_modules_to_forward_prefetch, two ahead",
    "prefetched_in_backward": "set_modules_to_backward_prefetch, two ahead",
    "prefetched_although_not_used_next": "a prefetch in vain is freed",
    "prefetched_under_checkpointing": "recomputation in between",
    # layouts
    "one_axis_of_four_ranks": "placements and parts of each rank",
    "two_by_two": "replicate axis and shard axis",
    "axes_of_one_rank": "(1, 2) and (2, 1)",
    "the_default_mesh": "mesh=None",
    "a_slice_of_a_larger_mesh": "one axis of two",
    "two_axes_of_a_mesh_of_three": "a slice with both axes",
    "units_over_different_meshes": "all ranks, two by two, one by four",
    "a_mesh_without_names": "order decides",
    "three_ranks": "no size is a multiple",
    "fewer_rows_than_ranks": "some ranks hold nothing",
    "parameters_without_elements": "shapes (0, 3) and (4, 0)",
    "a_parameter_without_dims": "a scalar, and units of nothing else",
    "parameters_whose_memory_is_not_in_order": "a transposed parameter",
    "convolutions_of_four_dims": "weights of four dims",
    "split_along_the_last_dim": "shard_placement_fn",
    "split_along_the_last_dim_over_two_axes": "on a mesh of two axes",
    "split_along_different_dims": "some along 1, some along 0",
    "split_along_the_last_dim_and_over_fewer_ranks": "with reshard_after_forward=2",
    "split_along_the_last_dim_in_bf16": "with a policy",
    "split_unevenly_along_the_last_dim": "sizes that two does not divide",
    "tensor_parallel_inside": "columns and rows over tp, then over dp",
    "tensor_parallel_with_uneven_parts": "six rows over tp, three of them over dp",
    "tensor_parallel_kept_after_forward": "with reshard_after_forward=False",
    "tensor_parallel_in_bf16": "with a policy",
    "tensor_parallel_inside_of_two_axes": "replicate, shard and tp",
    "tensor_parallel_while_accumulating": "with set_requires_gradient_sync",
    "tensor_parallel_clipped": "by the norm over both meshes",
    "tensor_parallel_sums_by_default": "the loss is divided by the user",
    "sequence_parallel_inside": "replicated weights, whose gradients are parts of a sum",
    "ignored_parameters": "plain tensors, reduced by hand",
    "all_parameters_of_a_unit_are_ignored": "a unit with nothing to do",
    "replicated_parameters": "unsharded, and reduced over all ranks",
    "replicated_parameters_over_two_axes": "reduced over both axes",
    "replicated_parameters_while_accumulating": "they wait as the others do",
    "shards_on_the_host": "CPUOffloadPolicy",
    "shards_on_the_host_while_accumulating": "with set_requires_gradient_sync",
    "shards_on_the_host_in_bf16": "with a policy",
    "made_on_the_meta_device": "to_empty, then values",
    "one_collective_per_unit": "comm_fusion",
    "one_collective_per_unit_with_copies": "without views of one buffer",
    "one_collective_per_unit_over_two_axes": "comm_fusion over both axes",
    # state
    "keys_layouts_and_values": "state_dict() of the model, of a block, with a prefix",
    "keys_layouts_and_values_over_two_axes": "on a mesh of two axes",
    "the_state_has_the_parameters_dtype": "not the compute dtype",
    "buffers_and_tied_weights": "saved and loaded, and still tied",
    "saved_between_steps": "the values are those after the step",
    "saved_after_an_evaluation": "shards, whatever is gathered",
    "saved_while_gradients_wait": "and they are not lost",
    "saved_whole": "full_state_dict",
    "saved_whole_to_the_host": "rank 0 alone has it",
    "loads_what_it_has_saved": "sharded values",
    "loads_whole_values": "full_state_dict",
    "loads_whole_values_that_rank_0_has": "broadcast_from_rank0",
    "loads_a_part_of_the_keys": "strict=False",
    "refuses_missing_and_unexpected_keys": "strict=True names both",
    "loads_plain_values": "tensors of the global shape",
    "one_loads_what_the_other_has_saved": "ours and FSDP2's state dicts are the same",
    "state_of_the_optimizer": "keys, layouts and values",
    "whole_state_of_the_optimizer": "full_state_dict",
    "the_optimizers_state_is_loaded": "into another model's optimizer",
    "the_optimizers_own_state_dict": "optimizer.load_state_dict",
    "a_checkpoint_goes_round": "torch.distributed.checkpoint, model and optimizer",
    "a_checkpoint_of_another_layout": "saved by the other engine over another mesh",
    # memory
    "collectives_of_a_step": "count and bytes, in the first step and the next",
    "collectives_over_two_axes": "reduce_scatter and all_reduce",
    "collectives_of_weights_kept_after_forward": "one gather per unit",
    "collectives_of_weights_split_over_fewer_ranks": "the second gather is smaller",
    "collectives_in_bf16": "half the bytes are gathered",
    "collectives_of_reductions_in_bf16": "half the bytes are reduced",
    "collectives_along_the_last_dim": "no padding, no more bytes",
    "collectives_of_weights_kept_after_backward": "none to gather until a step",
    "collectives_of_frozen_units": "nothing to reduce",
    "collectives_of_micro_batches": "one reduction for three",
    "collectives_of_micro_batches_that_keep_the_weights": "one gather for three",
    "collectives_of_micro_batches_over_two_axes": "one all_reduce for three",
    "collectives_of_an_evaluation": "one gather per unit",
    "collectives_of_an_evaluation_that_keeps_the_weights": "one gather per unit for three batches",
    "collectives_under_checkpointing": "recomputation gathers no more",
    "collectives_of_two_forwards_before_a_backward": "counted as FSDP2 does",
    "gathers_are_ahead_of_their_units": "explicit prefetch, two ahead, forward and backward",
    "memory_of_a_step": "peak, and what is left after backward",
    "memory_over_two_axes": "the same with an all_reduce",
    "memory_in_bf16": "unsharded parameters of half the size",
    "memory_of_weights_kept_after_forward": "all unsharded at once",
    "memory_under_checkpointing": "with recomputation",
    "memory_of_micro_batches": "with full gradients that wait",
    "memory_of_an_evaluation": "no more than two units at a time",
    "memory_between_forward_and_backward": "nothing unsharded when all is freed",
    # errors
    "no_module": "the argument is no module",
    "a_list_with_something_else": "one item is no module",
    "an_empty_list": "nothing to wrap",
    "a_container_without_a_forward": "a ModuleList",
    "the_same_module_twice": "wrapped already",
    "the_data_of_a_parameter_is_assigned": "FSDP2 goes on with the old values, ours refuses the next forward",
    "a_parameter_in_two_units": "tied across units",
    "a_mesh_of_three_axes": "one or two are taken",
    "no_mesh": "the mesh is a number",
    "resharding_to_no_divisor": "three of two ranks",
    "resharding_to_a_word": "neither bool nor int",
    "a_placement_that_is_no_shard": "Replicate()",
    "a_shard_of_a_dim_that_is_not_there": "Shard(3) of a matrix",
    "a_policy_that_is_none": "a dtype as mp_policy",
    "a_flag_that_is_no_bool": "set_reshard_after_forward(2)",
    "prefetch_of_a_module_that_is_no_unit": "in forward",
    "backward_prefetch_of_a_module_that_is_no_unit": "in backward",
    "a_forward_method_that_is_not_there": "no such method",
    "parameters_still_on_meta": "no data in the first forward",
    "a_forward_that_fails": "the error comes through, and training goes on",
    # optimizers
    "sgd_with_momentum": "nesterov and weight decay",
    "adamw_one_by_one": "foreach=False",
    "adamw_foreach": "foreach=True",
    "adamw_fused": "fused=True",
    "adam_with_amsgrad": "another state tensor",
    "adagrad": "a state made with the optimizer",
    "rmsprop": "with momentum",
    "adamw_foreach_over_two_axes": "on a mesh of two axes",
    "parameter_groups": "decay and rates by name",
    "a_learning_rate_schedule": "torch.optim.lr_scheduler",
    "made_after_a_training_step": "the modules show shards",
    "made_after_an_evaluation": "the modules show shards then, too",
    "made_between_forward_and_backward": "and then",
    "one_optimizer_for_each_unit": "over parts of the model",
    "clipped_by_the_norm": "clip_grad_norm_, over all ranks",
    "clipped_by_the_norm_over_two_axes": "each shard counts once",
    "clipped_by_other_norms": "1, 3 and the maximum",
    "clipped_one_by_one": "foreach=False, error_if_nonfinite",
    "clipped_by_value": "clip_grad_value_",
    "norms_of_parts_of_the_model": "get_total_norm",
    "a_gradient_that_is_not_finite": "on one rank, and all see it",
    "an_average_of_the_weights": "lerp_ on shards",
    "weights_set_by_torchs_init": "nn.init on shards",
    "a_penalty_on_the_weights": "the forward uses unsharded parameters",
}
