"""Identities of collectives: ranks that gather or reduce other parameters of equal size, by engine and by cause."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel import clip_grad_norm_, fully_shard, hsdp

pytestmark = pytest.mark.sim

Wrap = Callable[..., Any]


def _over_two_axes(wrap: Wrap) -> Wrap:
    return partial(wrap, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


# By name: how a rank makes the function that wraps a module, and how many ranks there are.
ENGINES: dict[str, tuple[Callable[[], Wrap], int]] = {
    "fully_shard": (lambda: fully_shard, 2),
    "fully_shard, replicated": (lambda: _over_two_axes(fully_shard), 4),
    "hsdp": (lambda: partial(hsdp, threshold=0, optimizer_level="level3"), 2),
    "fsdp2": (lambda: fsdp.fully_shard, 2),
    "fsdp2, replicated": (lambda: _over_two_axes(fsdp.fully_shard), 4),
}


class Layers(nn.Module):
    """Layers of equal size, each a unit, of which a forward takes some."""

    def __init__(self, wrap: Wrap, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        for layer in self.layers:
            wrap(layer)
        wrap(self)

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        for place in chosen:
            x = self.layers[place](x).tanh()
        return x


X = torch.ones(2, 4)


def _other_experts(wrap: Wrap, odd: int) -> None:
    Layers(wrap)(X, (0, 1 + odd))


def _dropped_layer(wrap: Wrap, odd: int) -> None:
    Layers(wrap)(X, (0, 1 + odd, 3)).sum().backward()


def _other_size(wrap: Wrap, odd: int) -> None:
    wrap(nn.Linear(6, 7 + odd))(torch.ones(2, 6))  # padded shards of equal size on two ranks


def _other_order_of_layers(wrap: Wrap, odd: int) -> None:
    Layers(wrap)(X, (1, 0) if odd else (0, 1))


def _other_order_of_models(wrap: Wrap, odd: int) -> None:
    models = [wrap(nn.Linear(4, 4)) for _ in range(2)]
    for model in reversed(models) if odd else models:
        model(X)


def _other_model_later(wrap: Wrap, odd: int) -> None:
    models = [wrap(nn.Linear(4, 4)) for _ in range(2)]
    models[0](X).sum().backward()
    models[odd](X)


def _other_order_of_gradients(wrap: Wrap, odd: int) -> None:
    models = [wrap(nn.Linear(4, 4)) for _ in range(2)]
    losses = [model(X).sum() for model in models]
    for loss in reversed(losses) if odd else losses:
        loss.backward()


WRONG = {
    "experts": (_other_experts, "layers.1: weight", "layers.2: weight"),
    "layer drop": (_dropped_layer, "layers.1: weight", "layers.2: weight"),
    "sizes": (_other_size, "[7, 6]", "[8, 6]"),
    "layers": (_other_order_of_layers, "gather of layers.0", "gather of layers.1"),
    "models": (_other_order_of_models, "number 1 of this name", "number 2 of this name"),
    "model later": (_other_model_later, "number 1 of this name", "number 2 of this name"),
    "gradients": (_other_order_of_gradients, "number 1 of this name", "number 2 of this name"),
}


# hsdp pads no shards: sizes that differ and shards that do not are none of its cases.
@pytest.mark.parametrize(("case", "engine"), [(c, e) for c in WRONG for e in ENGINES if (c, e) != ("sizes", "hsdp")])
def test_ranks_that_mean_other_parameters_are_told(case: str, engine: str) -> None:
    (make_wrap, size), (body, one, other) = ENGINES[engine], WRONG[case]
    with pytest.raises(sim.CollectiveMismatch, match="do not mean the same by") as caught:
        sim.run(lambda: body(make_wrap(), dist.get_rank() % 2), size)
    rows = [line for line in str(caught.value).splitlines() if re.match(r"[ *] rank \d", line)]
    assert len(rows) == 2
    assert {one in row and other not in row for row in rows} == {True, False}
    assert {other in row and one not in row for row in rows} == {True, False}


# -- ranks that mean the same ------------------------------------------------------------------------------------------


def _same_experts(wrap: Wrap, odd: int) -> None:
    Layers(wrap)(X, (0, 2)).sum().backward()


def _other_wrappers(wrap: Wrap, odd: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    if odd:
        model[1] = checkpoint_wrapper(model[1])
    for layer in model:
        wrap(layer)
    wrap(model)
    model(X).sum().backward()


def _other_order_of_wrapping(wrap: Wrap, odd: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in reversed(model) if odd else model:
        wrap(layer)
    wrap(model)
    model(X).sum().backward()


def _model_of_one_rank(wrap: Wrap, odd: int) -> None:
    for _ in range(1 + odd):  # one that is not used
        model = wrap(nn.Linear(4, 4))
    model(X).sum().backward()


def _many_models(wrap: Wrap, odd: int) -> None:
    first, second = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 4))
    for model in (second, first, second, wrap(nn.Linear(4, 4))):
        loss = model(X).sum()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


RIGHT = (_same_experts, _other_wrappers, _other_order_of_wrapping, _model_of_one_rank, _many_models)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("body", RIGHT)
def test_ranks_that_mean_the_same_are_left_alone(body: Callable[..., None], engine: str) -> None:
    make_wrap, size = ENGINES[engine]
    sim.run(lambda: body(make_wrap(), dist.get_rank() % 2), size)


def test_models_of_other_groups_are_not_compared() -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = mesh.get_local_rank("pp")
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + stage)))
        fully_shard(model[stage], mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])(X).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0, stage_group=mesh.get_group("pp"))

    sim.run(body, 4)


@pytest.mark.parametrize("engine", ENGINES)
def test_names_that_differ_on_purpose_are_left_alone_if_asked(engine: str) -> None:
    make_wrap, size = ENGINES[engine]

    def body() -> None:
        layers = {f"stage_{dist.get_rank() % 2}": nn.Linear(4, 4)}
        make_wrap()(nn.Sequential(OrderedDict(layers)))(X).sum().backward()

    with pytest.raises(sim.CollectiveMismatch, match=r"check_identity=False if they mean the same by other names"):
        sim.run(body, size)
    sim.run(body, size, check_identity=False)


# -- collectives of other purposes -------------------------------------------------------------------------------------


def _gather_by_hand() -> None:
    dist.all_gather_into_tensor(torch.empty(20), torch.empty(10))


def _gather_by_engine() -> None:
    fully_shard(nn.Linear(5, 4, bias=False))(torch.ones(2, 5))


def _norm(*sizes: int) -> None:
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for size in sizes))
    clip_grad_norm_(fully_shard(model).parameters(), 1.0)


def _total() -> None:
    dist.all_reduce(torch.zeros(1))


SCRIPT = "a call of the script's own"
OTHER_PURPOSES = {
    "gather": (_gather_by_engine, _gather_by_hand, "gather of weight float32 [4, 5]", SCRIPT),
    "norm": (partial(_norm, 4), _total, "gradient norm of 1 parameters, 16", SCRIPT),
    "norms": (partial(_norm, 4), partial(_norm, 4, 6), "gradient norm of 1 parameters, 16", "gradient norm of 2"),
}


@pytest.mark.parametrize("case", OTHER_PURPOSES)
def test_what_a_collective_is_for_is_compared(case: str) -> None:
    one, other, said_by_one, said_by_other = OTHER_PURPOSES[case]
    with pytest.raises(sim.CollectiveMismatch, match="do not mean the same by") as caught:
        sim.run(lambda: one() if dist.get_rank() == 0 else other(), 2)
    assert f"  rank 0  {said_by_one}" in str(caught.value)
    assert f"  rank 1  {said_by_other}" in str(caught.value)


# -- DistributedDataParallel -------------------------------------------------------------------------------------------


def _steps_of_two(orders: tuple[tuple[int, ...], ...], *, wrapped: bool = False) -> None:
    models: list[Any] = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if wrapped and dist.get_rank():
            model[0] = checkpoint_wrapper(model[0])
        models.append(nn.parallel.DistributedDataParallel(model, find_unused_parameters=True))
    for place in orders[dist.get_rank()]:
        models[place](X).sum().backward()


def test_gradients_of_other_models_are_told_in_ddp() -> None:
    with pytest.raises(sim.CollectiveMismatch, match="do not mean the same by all_reduce") as caught:
        sim.run(lambda: _steps_of_two(((0, 1), (1, 0))), 2)
    assert re.search(r"rank 0  reduction of 0\.weight float32 .* \(number 2 of this name\)", str(caught.value))
    assert re.search(r"rank 1  reduction of 0\.weight float32 .* \(number 1 of this name\)", str(caught.value))


def test_models_of_ddp_that_ranks_use_alike_are_left_alone() -> None:
    sim.run(lambda: _steps_of_two(((1, 0, 0, 1), (1, 0, 0, 1)), wrapped=True), 2)


def test_ranks_of_ddp_that_have_no_batches_left_join_the_others() -> None:
    def body() -> None:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        with model.join():
            for _ in range(1 + dist.get_rank()):
                model(X).sum().backward()

    sim.run(body, 2)


# -- proofs ------------------------------------------------------------------------------------------------------------


class Chosen(Layers):
    """Layers of which a rank takes those that it is told."""

    def __init__(self) -> None:
        super().__init__(lambda module: module)
        self.chosen: tuple[int, ...] = (0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, self.chosen)


@pytest.mark.parametrize("wrap", [fully_shard, fsdp.fully_shard])
def test_a_proof_names_what_ranks_do_not_agree_on(wrap: Wrap) -> None:
    def parallelize(model: nn.Module, mesh: Any) -> None:
        for layer in model.layers:
            wrap(layer, mesh=mesh)
        wrap(model, mesh=mesh)
        model.chosen = (0, 1 + mesh.get_local_rank())

    report = sim.verify_plan(Chosen, (torch.randn(4, 4),), "dp=2", parallelize=parallelize)
    assert not report.ok
    assert report.first.place == "the model's parameters"
    assert "gather of layers.1: weight float64 [4, 4]" in report.first.sentence
    assert "gather of layers.2: weight float64 [4, 4], bias float64 [4] on rank 1" in report.first.sentence
