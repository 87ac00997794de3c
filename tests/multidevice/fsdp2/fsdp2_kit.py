"""Helpers of the tests of fully_shard and hsdp against torch's FSDP2: models, data, and the comparison of runs.

A *behaviour* is one function of a `Run`. It runs three times with the same seeds and data: with our fully_shard,
with torch's, and on one device with the batches of all ranks together. Ours has to equal torch's to the last bit on
simulated ranks (where both add in rank order), elsewhere within rounding; and one device's within rounding of float64,
or of float32 where the backend reduces no float64.
Where FSDP2 refuses, or is wrong, it is left out, and `without_fsdp2` says what it does.

The other contestants are `hsdp` and `hsdp(use_eager_hook=False)`, traced hsdp for short, each at several levels: they
have to equal fully_shard. Where they refuse, or differ, `without_hsdp` and `without_traced` match the error.

`test_fsdp2_coverage.py` sees to it that each is run by a test.
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
from units_kit import Block, full

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

    def nested(self, **options: Any) -> Any:
        """A `Net` of which each block is a unit, and the rest."""
        return self.wrap_blocks(self.net(), **options)

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
        micros: int = 1,
        before_step: Callable[[], None] = lambda: None,
        when: str = "",
    ) -> None:
        """A few steps of SGD with momentum; then note the last gradients and the parameters.

        Of several micro-batches, only the last one communicates.
        """
        optimizer = optimizer or sgd(model)
        for step in range(steps):
            optimizer.zero_grad()
            for micro in range(micros):
                if micros > 1:
                    self.tell(model, "set_requires_gradient_sync", micro == micros - 1)
                number = step if micros == 1 else 10 * step + micro
                self.backward(loss(number) if loss else loss_of(model, self.batch(number)))
            if clip is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
                self.note(f"norm {step}", norm)
            before_step()
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


class Net(nn.Module):
    """Rows that 2 and 4 ranks share and rows that they do not; `scale` has fewer than there are ranks."""

    def __init__(self, blocks: int = 3, hidden: int = 8, out: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.embed = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(7, hidden) for _ in range(blocks))
        self.head = nn.Linear(7, out)

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
