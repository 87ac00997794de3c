"""Identities of collectives: ranks that gather or reduce other parameters of equal size, by engine and by cause."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed import fsdp, pipelining
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel import clip_grad_norm_, fully_shard, hsdp
from hyper_parallel.core.checkpoint import load_checkpoint, save_checkpoint
from hyper_parallel.core.expert_parallel import GroupedExperts, expert_parallel
from hyper_parallel.core.expert_parallel.experts import exchange_rows
from hyper_parallel.core.pipeline import Pipeline, TiedWeights

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


def _dropped_layer(wrap: Wrap, odd: int) -> None:
    Layers(wrap)(X, (0, 1 + odd, 3)).sum().backward()


def _other_size(wrap: Wrap, odd: int) -> None:
    wrap(nn.Linear(6, 7 + odd))(torch.ones(2, 6))  # padded shards of equal size on two ranks


def _other_order_of_layers(wrap: Wrap, odd: int) -> None:
    Layers(wrap)(X, (1, 0) if odd else (0, 1))


def _layers_moved_after_wrapping(wrap: Wrap, odd: int) -> None:
    model = Layers(wrap)
    if odd:
        model.layers = nn.ModuleList(list(model.layers)[::-1])
    model(X)


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
    "experts": (lambda wrap, odd: Layers(wrap)(X, (0, 1 + odd)), "layers.1: weight", "layers.2: weight"),
    "layer drop": (_dropped_layer, "layers.1: weight", "layers.2: weight"),
    "sizes": (_other_size, "[7, 6]", "[8, 6]"),
    "layers": (_other_order_of_layers, "gather of layers.0", "gather of layers.1"),
    "moved": (_layers_moved_after_wrapping, "gather of layers.0: ", "gather of layers.0 (wrapped as layers.3): "),
    "by hand": (lambda wrap, odd: Layers(wrap).layers[odd].unshard(), "gather of layers.0: ", "gather of layers.1: "),
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


@sim.ranks(4, backends=("sim",))
def test_models_of_other_groups_are_not_compared(ctx) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + stage)))
    fully_shard(model[stage], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])(X).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0, stage_group=mesh.get_group("pp"))


@pytest.mark.parametrize("engine", ENGINES)
def test_names_that_differ_on_purpose_are_left_alone_if_asked(engine: str) -> None:
    make_wrap, size = ENGINES[engine]

    def body() -> None:
        layers = {f"stage_{dist.get_rank() % 2}": nn.Linear(4, 4)}
        make_wrap()(nn.Sequential(OrderedDict(layers)))(X).sum().backward()

    with pytest.raises(sim.CollectiveMismatch, match=r"check_identity=False \(--check-identity off\) if they mean"):
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


SCRIPT = "a call of the script's own"
OTHER_PURPOSES = {
    "gather": (_gather_by_engine, _gather_by_hand, "gather of weight float32 [4, 5]", SCRIPT),
    "norm": (partial(_norm, 4), lambda: dist.all_reduce(torch.zeros(1)), "gradient norm of 1 parameters, 16", SCRIPT),
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


@sim.ranks(2, backends=("sim",))
def test_ranks_of_ddp_that_have_no_batches_left_join_the_others(ctx) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with model.join():
        for _ in range(1 + dist.get_rank()):
            model(X).sum().backward()


# -- experts -----------------------------------------------------------------------------------------------------------


def _layers_of_experts(ranks_per_node: int | None = None) -> nn.ModuleList:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    layers = nn.ModuleList(GroupedExperts(4, 8, 8) for _ in range(2))
    expert_parallel(layers, mesh, ranks_per_node=ranks_per_node)
    return layers


def _use(experts: nn.Module) -> torch.Tensor:
    chosen = torch.arange(4).view(4, 1)
    return experts(torch.ones(4, 8, requires_grad=True), chosen, torch.ones(4, 1)).sum()


def _other_layer(odd: int) -> None:
    _use(_layers_of_experts()[odd])


def _other_layer_on_nodes(odd: int) -> None:
    _use(_layers_of_experts(ranks_per_node=1)[odd])


def _other_layer_backward(odd: int) -> None:
    losses = [_use(layer) for layer in _layers_of_experts()]
    losses[odd].backward()


def _gradients_for_rows(odd: int) -> None:
    layer = _layers_of_experts()[0]
    loss = _use(layer)
    group = layer.exchange.group
    loss.backward() if odd else exchange_rows(torch.ones(4, 8), (2, 2), (2, 2), group, layer)


EXPERTS = {
    "numbers": (_other_layer, "exchange of experts: numbers of rows of 0", "exchange of experts: numbers of rows of 1"),
    "nodes": (_other_layer_on_nodes, "numbers of rows of 0", "numbers of rows of 1"),
    "backward": (_other_layer_backward, "gradients of rows of 0", "gradients of rows of 1"),
    "directions": (_gradients_for_rows, "exchange of experts: rows of 0", "gradients of rows of 0"),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_ranks_that_are_in_other_layers_of_experts_are_told(case: str) -> None:
    body, one, other = EXPERTS[case]
    with pytest.raises(sim.CollectiveMismatch, match="do not mean the same by all_to_all") as caught:
        sim.run(lambda: body(dist.get_rank()), 2)
    rows = [line for line in str(caught.value).splitlines() if re.match(r"  rank \d", line)]
    assert [f"{text}  " in row for text, row in zip((one, other), rows, strict=True)] == [True, True]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _save_and_load(folder: Path, odd: int) -> None:
    save_checkpoint(folder / "there", {"w": torch.ones(2)})
    if odd:
        load_checkpoint(folder / "there", {"w": torch.zeros(2)})
    else:
        save_checkpoint(folder / "new", {"w": torch.ones(2)})


def _save_and_load_by_torch(folder: Path, odd: int) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder / "there")
    if odd:
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=folder / "there")
    else:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=folder / "new")


def _save_elsewhere(folder: Path, odd: int) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder / str(odd))


CHECKPOINTS = {
    "ours": (_save_and_load, "checkpoint: agreement in write()", "checkpoint: agreement in load()"),
    "torch's": (
        *(_save_and_load_by_torch, "checkpoint: plan of a save to {}/new"),
        "checkpoint: plan of a load from {}/there",
    ),
    "folders": (_save_elsewhere, "checkpoint: plan of a save to {}/0", "checkpoint: plan of a save to {}/1"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_ranks_that_save_and_load_other_checkpoints_are_told(case: str, tmp_path: Path) -> None:
    body, *meant = CHECKPOINTS[case]
    folder = tmp_path / ("a folder of a long name " * 4)
    with pytest.raises(sim.CollectiveMismatch, match="do not mean the same by") as caught:
        sim.run(lambda: body(folder, dist.get_rank()), 2)
    one, other = (text.format(folder) for text in meant)
    assert str(caught.value.meant).endswith(f": {one} on rank 0; {other} on rank 1")


# -- stages of a pipeline ----------------------------------------------------------------------------------------------


def _torch_schedule(names: Sequence[str], each: int) -> None:
    """A step of four micro-batches over stages of equal width, in a schedule of each rank's own."""
    rank = dist.get_rank()
    held = [rank + 2 * place for place in range(each)]
    stages = [pipelining.PipelineStage(nn.Linear(4, 4), stage, 2 * each, torch.device("cpu")) for stage in held]
    make = pipelining.schedules.get_schedule_class(names[rank])
    schedule = make(stages[0] if names[rank] == "GPipe" else stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    schedule.step(*([torch.ones(8, 4)] if rank == 0 else []), **({"target": torch.ones(8, 4)} if rank else {}))


def _our_schedule(names: Sequence[str], each: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    stages = [nn.Linear(4, 4) for _ in range(each)]
    pipeline = Pipeline(stages, mesh, names[dist.get_rank()], 4, lambda output, target: output.sum())
    pipeline.step(torch.ones(8, 4), torch.ones(8, 4))


# By name: the body, the schedule of each rank, how many stages it has, and the turn that each is at.
TURNS = {
    "micro-batch": (
        *(_torch_schedule, ("GPipe", "LoopedBFS"), 1),
        ("micro-batch 0 backward, stage 1 -> 0", "micro-batch 3 backward, stage 1 -> 0"),
    ),
    "stage": (
        *(_torch_schedule, ("LoopedBFS", "Interleaved1F1B"), 2),
        ("micro-batch 2 forward, stage 0 -> 1", "micro-batch 0 forward, stage 2 -> 3"),
    ),
    "direction": (
        *(_torch_schedule, ("Interleaved1F1B", "InterleavedZeroBubble"), 2),
        ("micro-batch 2 forward, stage 0 -> 1", "micro-batch 0 backward, stage 2 -> 1"),
    ),
    "a pipeline of ours": (
        *(_our_schedule, ("looped-bfs", "interleaved"), 2),
        ("micro-batch 2 forward, stage 0 -> 1", "micro-batch 0 forward, stage 2 -> 3"),
    ),
}


@pytest.mark.parametrize("case", TURNS)
def test_stages_that_are_at_other_turns_are_told(case: str) -> None:
    body, names, each, turns = TURNS[case]
    with pytest.raises(sim.CollectiveMismatch, match="what it is for; the receiver would take one for") as caught:
        sim.run(body, 2, (names, each))
    rows = [line for line in str(caught.value).splitlines() if re.match(r"  rank \d", line)]
    assert [f" for {turn}  " in row for turn, row in zip(turns, rows, strict=True)] == [True, True]
    sim.run(body, 2, (names, each), check_identity=False)  # the numbers are wrong, and nobody is told


def _tied() -> TiedWeights:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipeline = Pipeline([nn.Linear(4, 4)], mesh, "gpipe", 1, lambda output, target: output.sum())
    return TiedWeights(pipeline, "weight", "weight")


def test_values_of_tied_weights_are_not_taken_for_gradients() -> None:
    def body() -> None:
        tied = _tied()
        tied.copy_values() if dist.get_rank() == 0 else tied.add_gradients()

    with pytest.raises(sim.CollectiveMismatch, match=r"for values of tied weights  .*\n.* for gradients of tied"):
        sim.run(body, 2)


@sim.ranks(2, backends=("sim",))
def test_messages_of_a_script_are_not_compared(ctx) -> None:
    tied = _tied()
    tied.copy_values() if dist.get_rank() == 0 else dist.recv(torch.empty(4, 4), 0)


# -- proofs ------------------------------------------------------------------------------------------------------------


class Chosen(Layers):
    """Layers of which a rank takes those that it is told."""

    def __init__(self) -> None:
        super().__init__(lambda module: module)
        self.chosen: tuple[int, ...] = (0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, self.chosen)


@pytest.mark.tier("test")
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
