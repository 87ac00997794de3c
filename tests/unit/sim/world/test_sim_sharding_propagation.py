"""DTensor's sharding propagation, shared by the ranks of a world: what torch would have found on each rank."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, ones
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental import register_sharding

import sim
from hyper_parallel.core.dtensor.spelling import STRIDED
from sim.kernel.context import current_rank
from sim.patches import install

pytestmark = pytest.mark.sim
aten = torch.ops.aten


def without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(each for each in install.PATCHES if each.__name__ != "_sharding_propagation")
    assert len(others) == len(install.PATCHES) - 1
    monkeypatch.setattr(install, "PATCHES", others)


def words(value: Any) -> Any:
    """All of a result that torch's dispatch reads, in values that can be compared between worlds."""
    if isinstance(value, DTensorSpec):
        mesh = value.mesh
        place = tuple(mesh.shape), mesh.mesh_dim_names, mesh.get_coordinate(), mesh._thread_id[1]
        return "spec", str(value.placements), value.shard_order, value.tensor_meta, place
    if isinstance(value, OutputSharding):
        flags = value.needs_redistribute, value.use_val_from_redistribute_schema
        return words(value.output_spec), words(value.redistribute_schema), flags
    if isinstance(value, OpSchema):
        return str(value.op), words(value.args_schema), words(value.kwargs_schema), value.schema_info
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(words(each) for each in value)]
    if isinstance(value, dict):
        return {name: words(each) for name, each in value.items()}
    return value


class Found:
    """What each rank's propagation returned, and how often torch has worked it out, by operator."""

    def __init__(self) -> None:
        self.returned: dict[int, list[Any]] = {}
        self.computed: Counter[str] = Counter()
        self.values: list[Any] = []


def run(body: Callable[[], Any], ranks: int, seed: int = 0) -> Found:
    """Run `body` and note what propagation returns and computes; what decompositions ask for is not counted."""
    found = Found()
    own = ShardingPropagator.propagate_op_sharding_non_cached

    def computed(self: Any, schema: Any) -> Any:
        found.computed[str(schema.op)] += 1
        return own(self, schema)

    ShardingPropagator.propagate_op_sharding_non_cached = computed
    try:
        with sim.world(ranks, seed=seed) as world:
            in_world = ShardingPropagator.propagate_op_sharding_non_cached

            def returned(self: Any, schema: Any) -> Any:
                result = in_world(self, schema)
                found.returned.setdefault(current_rank(), []).append((str(schema.op), words(result)))
                return result

            ShardingPropagator.propagate_op_sharding_non_cached = returned
            try:
                found.values = world.run(body)
            finally:
                ShardingPropagator.propagate_op_sharding_non_cached = in_world
    finally:
        ShardingPropagator.propagate_op_sharding_non_cached = own
    return found


def same_as_torch(body: Callable[[], Any], ranks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Found, Found]:
    """Assert that sharing changes no result; returns what was found with and without it."""
    shared = run(body, ranks)
    with monkeypatch.context() as patch:
        without_sharing(patch)
        alone = run(body, ranks)
    assert shared.returned == alone.returned
    assert shared.values == alone.values
    return shared, alone


def local(tensors: list[torch.Tensor]) -> list[Any]:
    return [
        (str(x.placements), tuple(x.shape), x.to_local().tolist()) if isinstance(x, DTensor) else x.tolist()
        for x in tensors
    ]


# -- operators of a model --------------------------------------------------------------------------------------


def shards(mesh: DeviceMesh, dim: int) -> list[Any]:
    """The last axis splits `dim`, the others split the batch."""
    return [Shard(0)] * (mesh.ndim - 1) + [Shard(dim)]


def model_step(mesh: DeviceMesh, batch: int, seq: int, hidden: int, heads: int) -> list[Any]:
    """Forward, backward and a step of what a transformer is made of."""
    torch.manual_seed(0)
    full = [Replicate()] * mesh.ndim
    first = [*[Shard(0)] * (mesh.ndim - 1), Replicate()]
    size = hidden // heads

    def param(*shape: int, dim: int | None = None) -> torch.nn.Parameter:
        placements = full if dim is None else [*full[:-1], Shard(dim)]
        return torch.nn.Parameter(distribute_tensor(torch.randn(shape), mesh, placements))

    table, gain, up = param(13, hidden), param(hidden), param(3 * hidden, hidden, dim=0)
    down, head = param(hidden, 3 * hidden, dim=1), param(13, hidden)
    tokens = distribute_tensor(torch.randint(0, 13, (batch, seq)), mesh, first)
    x = F.embedding(tokens, table)
    y = F.layer_norm(x, (hidden,), gain, gain)
    y = F.linear(F.gelu(F.linear(y, up)), down).redistribute(mesh, first)
    q = y.view(batch, seq, heads, size).transpose(1, 2)
    y = (q @ q.transpose(-1, -2)).softmax(-1) @ q
    y = x + y.transpose(1, 2).reshape(batch, seq, hidden)
    loss = F.cross_entropy(F.linear(y, head).flatten(0, 1), tokens.flatten())
    loss.backward()
    params = [table, gain, up, down, head]
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    torch.optim.AdamW(params, lr=0.1, foreach=True).step()
    return local([y, loss, norm, *params])


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((4,), (4, 8, 8, 2)), ((3,), (2, 5, 7, 1)), ((2, 2), (4, 3, 8, 2)), ((2, 2), (4, 3, 7, 1))],
    ids=["even", "uneven", "two axes", "two axes, uneven"],
)
def test_a_model_gets_what_torch_finds_on_each_rank(shape, sizes, monkeypatch):
    def body() -> list[Any]:
        return model_step(init_device_mesh("cpu", shape), *sizes)

    ranks = torch.Size(shape).numel()
    shared, alone = same_as_torch(body, ranks, monkeypatch)
    assert alone.computed["aten.mm.default"] % ranks == 0
    assert shared.computed["aten.mm.default"] == alone.computed["aten.mm.default"] // ranks


def many_operators(mesh: DeviceMesh, rows: int, columns: int, placements: list[Any]) -> list[Any]:
    torch.manual_seed(1)
    x = distribute_tensor(torch.randn(rows, columns), mesh, placements)
    row = distribute_tensor(torch.randn(columns), mesh, [Replicate()] * mesh.ndim)
    operators: list[Callable[[], DTensor]] = [
        lambda: x + row,
        lambda: x * 2 + 1,
        lambda: x.relu().sum(),
        lambda: x.sum(0),
        lambda: x.mean(1, keepdim=True),
        lambda: x.t() @ x,
        lambda: x @ x.t(),
        lambda: torch.cat([x, x], 1),
        lambda: torch.stack([x, x]),
        lambda: x.unsqueeze(0).squeeze(),
        lambda: x.reshape(1, rows, columns).expand(2, rows, columns),
        x.flatten,
        lambda: x.unflatten(1, (1, columns)),
        lambda: x[:1],
        lambda: x[:, 0],
        lambda: x.new_zeros(rows, columns),
        lambda: torch.zeros_like(x),
        lambda: x.cumsum(0),
        lambda: x.split(1, 1)[0],
        x.norm,
        lambda: torch.where(x > 0, x, row),
        lambda: x.to(torch.float64),
        lambda: F.log_softmax(x, -1),
        x.tril,
        lambda: torch.special.xlog1py(x.abs(), x.abs()),
        lambda: F.group_norm(x.unsqueeze(0), rows),
    ]
    return [outcome(operator, mesh) for operator in operators]


def outcome(operator: Callable[[], DTensor], mesh: DeviceMesh) -> Any:
    """The values, or the error: torch refuses to flatten what is split unevenly, for one."""
    try:
        result = operator()
    except Exception as error:
        return type(error).__name__, str(error)
    assert result.device_mesh is mesh
    return local([result])


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(8, 4), (7, 5), (2, 3)])
def test_operators_get_what_torch_finds_on_each_rank(placement, rows, columns, monkeypatch):
    def body() -> list[Any]:
        return many_operators(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), rows, columns, [placement])

    shared, alone = same_as_torch(body, 4, monkeypatch)
    assert shared.computed["aten.relu.default"] == 1 < alone.computed["aten.relu.default"] == 4


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("rows", [8, 5])
def test_on_two_axes(rows, monkeypatch):
    def body() -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 3))
        return [
            *many_operators(mesh, rows, 6, [Shard(0), Shard(1)]),
            *many_operators(mesh, rows, 6, [Shard(0), Shard(0)]),
            *many_operators(mesh, rows, 6, [Replicate(), Shard(1)]),
        ]

    same_as_torch(body, 6, monkeypatch)


# -- meshes ----------------------------------------------------------------------------------------------------


@pytest.mark.tier("full")
def test_slices_and_other_meshes_of_one_world(monkeypatch):
    """Meshes of different sizes, slices whose ranks have other coordinates, and a mesh without half of the ranks."""

    def body() -> list[Any]:
        root = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        half = DeviceMesh("cpu", list(range(4)))
        pairs = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        found = []
        for mesh in (root["tp"], root["dp"], init_device_mesh("cpu", (8,)), pairs["tp"], half):
            for rows in (8, 7):
                x = distribute_tensor(torch.arange(rows * 4.0).view(rows, 4), mesh, [Shard(0)])
                for y in (x.view(rows, 2, 2), x.t() @ x, x + 1, x.sum(0), x.new_ones(rows, 3)):
                    assert y.device_mesh is mesh
                    found += local([y])
        return found

    shared, _ = same_as_torch(body, 8, monkeypatch)
    assert shared.values[0] != shared.values[7]
    assert run(body, 8, seed=3).returned == shared.returned  # another rank is the first


@pytest.mark.tier("test")
def test_calls_on_two_meshes_of_one_shape(monkeypatch):
    """A list may hold tensors of both; most calls must refuse them, also where a call on one mesh came before."""

    def body() -> list[Any]:
        up, down = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [3, 2, 1, 0])
        x, y = (distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)]) for mesh in (up, down))
        for pair in ([x, x], [x, y], [y, x]):
            assert [each.device_mesh for each in torch._foreach_mul(pair, 2.0)] == [each.device_mesh for each in pair]
        return [outcome(lambda: x @ x, up), outcome(lambda: x @ y, up), outcome(lambda: torch.cat([x, y]), up)]

    shared, _ = same_as_torch(body, 4, monkeypatch)
    assert shared.values[1][1][0] == ("RuntimeError" if torch.__version__ >= "2.13" else "NotImplementedError")


def test_strided_shards(monkeypatch):
    """Four rows in two parts, each over four ranks: two ranks have rows and two have none."""

    def body() -> list[Any]:
        mesh = init_device_mesh("cpu", (4,))
        rows = torch.full((2 if dist.get_rank() < 2 else 0, 4), float(dist.get_rank()))
        placements = [STRIDED(0, split_factor=2)]
        x = DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size((4, 4)), stride=(4, 1))
        return local([x.view(4, 2, 2), x + 1, x.unsqueeze(0)])

    same_as_torch(body, 4, monkeypatch)


def test_a_world_after_another_one():
    """Ranks of a second world get their own meshes, and nothing of the first one's sizes."""

    def body(size: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (size,))
        x = distribute_tensor(torch.arange(24.0).view(12, 2), mesh, [Shard(0)])
        y = (x @ x.t()).view(144)
        assert y._spec.mesh is mesh
        return y.full_tensor().tolist()

    expected = (torch.arange(24.0).view(12, 2) @ torch.arange(24.0).view(12, 2).t()).flatten().tolist()
    for size in (4, 2, 3, 4):
        found = run(lambda size=size: body(size), size)
        assert found.values == [expected] * size
        assert found.computed["aten.mm.default"] == 1


def test_later_worlds_use_what_is_known_until_a_rule_changes(monkeypatch):
    computed: Counter[str] = Counter()
    own = ShardingPropagator.propagate_op_sharding_non_cached

    def counted(self: Any, schema: Any) -> Any:
        computed[str(schema.op)] += 1
        return own(self, schema)

    def body() -> list[Any]:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(24.0).view(12, 2), mesh, [Shard(0)])
        y = x @ x.t()
        assert y._spec.mesh is mesh
        return local([y])

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", counted)
    first = sim.run(body, 2)
    assert sim.run(body, 2) == first
    assert computed["aten.mm.default"] == 1
    assert sim.run(body, 2, map_device="cuda") == first  # a host has two devices there, and not one
    assert computed["aten.mm.default"] == 2
    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    monkeypatch.setitem(rules, aten.huber_loss_backward.default, lambda schema: None)
    assert sim.run(body, 2) == first
    assert computed["aten.mm.default"] == 3

    def with_a_rule_of_its_own() -> list[Any]:
        rules[aten.huber_loss.default] = lambda schema: None
        return body()

    assert sim.run(with_a_rule_of_its_own, 2) == first
    del rules[aten.huber_loss.default]
    assert sim.run(body, 2) == first
    assert computed["aten.mm.default"] == 4


# -- what has a state, is random, or fails ---------------------------------------------------------------------


def test_masks_of_embeddings_are_each_ranks_own(monkeypatch):
    """The placement of the output carries the mask of the rank's rows, and ranks are in the middle of it together."""

    def body() -> list[Any]:
        mesh = init_device_mesh("cpu", (4,))
        table = distribute_tensor(torch.arange(22.0).view(11, 2), mesh, [Shard(0)])
        tokens = distribute_tensor(torch.tensor([[0, 3, 10], [5, 6, 9]]), mesh, [Replicate()])
        twice = []
        for _ in range(2):
            rows = F.embedding(tokens, table)
            picked = table.gather(0, distribute_tensor(torch.tensor([[7, 1]]), mesh, [Replicate()]))
            twice.append(rows.full_tensor().tolist() + picked.full_tensor().tolist())
        return twice

    shared, _ = same_as_torch(body, 4, monkeypatch)
    table = torch.arange(22.0).view(11, 2)
    rows = F.embedding(torch.tensor([[0, 3, 10], [5, 6, 9]]), table)
    assert shared.values == [[[*rows.tolist(), [14.0, 3.0]]] * 2] * 4


def test_random_numbers_are_those_of_torch(monkeypatch):
    def body() -> list[Any]:
        torch.manual_seed(dist.get_rank())
        mesh = init_device_mesh("cpu", (4,))
        x = ones((8, 4), device_mesh=mesh, placements=[Shard(0)])
        return local([F.dropout(x, 0.5), x.normal_(), torch.rand_like(x)]) + torch.rand(2).tolist()

    same_as_torch(body, 4, monkeypatch)


def test_every_rank_raises_its_own_error_and_goes_on(monkeypatch):
    def body() -> list[Any]:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        operators = [lambda: x.view(5, 5), lambda: x @ x, lambda: x.view(2, 2, 6), lambda: x.view(5, 5)]
        return [outcome(operator, mesh) for operator in operators]

    shared, alone = same_as_torch(body, 2, monkeypatch)
    assert "shape '[5, 5]' is invalid" in shared.values[1][0][1]
    assert "Sharding propagation failed for aten.mm" in shared.values[1][1][1]
    assert shared.computed == {**alone.computed, "aten.view.default": 5}


def test_an_operator_that_has_failed_is_tried_again():
    """A strategy that is registered after the failure counts, for all ranks of the same world."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = propagator.op_strategy_funcs, propagator.op_to_schema_info
    before = [dict(table) for table in tables]

    def body() -> list[str]:
        x = distribute_tensor(torch.rand(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(NotImplementedError, match="sharding strategy"):
            aten.renorm(x, 1.0, 0, 1.0)
        dist.barrier()
        if dist.get_rank() == 0:
            register_sharding(aten.renorm.default)(lambda *_: [([Shard(0)], [Shard(0), None, None, None])])
        dist.barrier()
        return [str(each.placements) for each in (aten.renorm(x, 1.0, 0, 1.0), aten.renorm(x.t(), 1.0, 0, 1.0))]

    try:
        found = run(body, 2)
    finally:
        for table, own in zip(tables, before, strict=True):
            table.clear()
            table.update(own)
    assert found.values == [["(Shard(dim=0),)", "(Shard(dim=0),)"]] * 2
    # torch 2.11 has a cache of its own before it, made around torch's own method, so that nothing is counted there
    counted = 2 if torch.__version__ >= "2.13" else 0
    assert found.computed["aten.renorm.default"] == 2 + counted, "the failure on each rank, each success on one"


# -- once per world --------------------------------------------------------------------------------------------


@pytest.mark.tier("test")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 decomposes none of these operators")
def test_a_decomposition_is_worked_out_once_per_world(monkeypatch):
    """Attention on the CPU has no strategy: torch decomposes it for each combination of shardings, for seconds."""
    decompositions = pytest.importorskip("torch.distributed.tensor._decompositions")
    tried = []
    own = decompositions.DecompShardingStrategy.propagate_strategy

    def noted(self: Any, schema: Any) -> Any:
        if schema.args_spec[0].mesh.size() == 4:  # and not torch's mesh of one rank, on which it tries
            tried.append(str(schema.op))
        return own(self, schema)

    def body() -> list[Any]:
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        return local([aten.huber_loss(x, x * 2, 0), aten.huber_loss(x, x * 2, 1)])  # each rank calls both

    monkeypatch.setattr(decompositions.DecompShardingStrategy, "propagate_strategy", noted)
    shared, alone = same_as_torch(body, 4, monkeypatch)
    assert shared.values[0][0] != shared.values[0][1]
    assert (shared.computed["aten.huber_loss.default"], alone.computed["aten.huber_loss.default"]) == (2, 8)
    assert tried == ["aten.huber_loss.default"] * (2 + 8)


@pytest.mark.tier("full")
def test_rules_ask_for_the_rank_only_where_it_is_noted(monkeypatch):
    """All else that a result depends on is equal on all ranks of a mesh. It fails when torch asks elsewhere."""
    allowed = {
        "compute_local_shape_and_global_offset",  # noted where ranks differ
        "redistribute_cost",  # whether the rank is in the mesh belongs to the key; the cost is one of placements
    }
    asked: Counter[str] = Counter()

    def noting(own: Callable[..., Any]) -> Callable[..., Any]:
        def coordinate(self: DeviceMesh, *args: Any) -> Any:
            frame, callers = sys._getframe(1), []
            while frame is not None and frame.f_code.co_name != "propagate_op_sharding_non_cached":
                callers.append(frame.f_code.co_name)
                frame = frame.f_back
            if frame is not None:  # else propagation itself has not asked
                asked[next((name for name in callers if name in allowed), " of ".join(callers))] += 1
            return own(self, *args)

        return coordinate

    for name in (
        "get_coordinate",
        "get_local_rank",
        "get_rank",
        "_sym_get_coordinate",
        "_is_current_rank_part_of_mesh",
    ):
        if hasattr(DeviceMesh, name):
            monkeypatch.setattr(DeviceMesh, name, noting(getattr(DeviceMesh, name)))

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        model_step(mesh, 4, 3, 7, 1)
        many_operators(mesh, 5, 6, [Shard(0), Shard(1)])

    run(body, 4)
    assert set(asked) == allowed
