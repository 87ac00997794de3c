"""Copies that differ, and parts of a sum that are used as if they were the sum: found, named, and nothing else is."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import sim
from hyper_parallel import Muon, Owner, fully_shard
from sim.kernel import threads
from sim.observers import partials

pytestmark = pytest.mark.sim

TP, DP_TP = ("tp",), ("dp", "tp")


def mesh_of(names: tuple[str, ...] = DP_TP) -> Any:
    return init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)


def text_of(body: Callable[[], Any], world_size: int = 4, **options: Any) -> str:
    """The message of the mismatch, without the line numbers of this file."""
    with pytest.raises(sim.ReplicaMismatch) as caught:
        sim.run(body, world_size, **options)
    assert threads.busy_threads() == 0
    words = []
    for line in str(caught.value).splitlines():
        head, found, tail = line.partition("test_sim_replicas.py:")
        words.append(head + found + tail.lstrip("0123456789") if found else line)
    return "\n".join(words)


def expect(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


# -- chosen points -------------------------------------------------------------------------------------------------


def test_a_copy_that_differs_is_named_with_its_axis_and_its_first_element():
    def body() -> None:
        rank = dist.get_rank()
        local = torch.arange(6.0).view(2, 3)
        if rank == 3:
            local[0, 2], local[1, 1] = 7.5, 0.0
        sim.check_replicas({"wq.weight": DTensor.from_local(local, mesh_of(), [Shard(0), Replicate()])})

    assert text_of(body) == expect(
        """
        the copies of 'wq.weight' along axis 'tp' differ
          rank 2  2.0                          test_sim_replicas.py: in body
        * rank 3  7.5  2 of 6 elements differ  test_sim_replicas.py: in body
          seen: the values at [0, 2] of the local tensors, float32 [2, 3]
          layout: dp=2: Shard(dim=0), tp=2: Replicate()
          try: give ranks 2-3 the same data (one seed, or a broadcast), or say Partial() for the parts of a sum and redistribute
          replay: sim.run(..., world_size=4, seed=0)
        """  # noqa: E501
    )


def test_the_minority_is_marked_and_the_axis_is_the_one_along_which_copies_differ():
    def body(odd: tuple[int, ...]) -> None:
        x = torch.full((2,), float(dist.get_rank() in odd))
        sim.check_replicas({"x": DTensor.from_local(x, mesh_of(), [Replicate(), Replicate()])})

    one = text_of(lambda: body((1,)))
    assert "along axes 'dp' and 'tp' differ" in one
    assert [line[:8] for line in one.splitlines()[1:5]] == ["  rank 0", "* rank 1", "  rank 2", "  rank 3"]
    assert "along axis 'dp' differ" in text_of(lambda: body((2, 3)))
    assert "along axis 'tp' differ" in text_of(lambda: body((1, 3)))
    assert sim.run(body, 4, ((0, 1, 2, 3),)) == [None] * 4


def test_modules_with_gradients_and_further_tensors():
    def body() -> None:
        mesh, rank = mesh_of(TP), dist.get_rank()
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        for layer in model:
            for name, like in list(layer.named_parameters()):
                made = torch.nn.Parameter(DTensor.from_local(torch.ones_like(like), mesh, [Replicate()]))
                made.grad = DTensor.from_local(torch.full_like(like, float(rank)), mesh, [Replicate()])
                setattr(layer, name, made)
        sim.check_replicas(model)

    text = text_of(body, 2)
    assert text.startswith("the copies of '0.weight.grad' along axis 'tp' differ")
    assert "  also: 3 more tensors: '0.bias.grad', '1.weight.grad', '1.bias.grad'\n" in text
    assert (
        "  try: reduce the gradient over 'tp' before it is used: all_reduce it, or say grad_placements=[Partial()] "
        "where to_local() took the local tensor\n"
    ) in text


def test_plain_tensors_are_compared_over_a_group_or_a_mesh():
    def body(of_mesh: bool, value: Callable[[int], float]) -> None:
        mesh = mesh_of()
        layer = torch.nn.BatchNorm1d(3)
        layer.running_mean.fill_(value(dist.get_rank()))
        sim.check_replicas([layer], group=mesh["dp"] if of_mesh else mesh.get_group("dp"))

    for of_mesh in (True, False):
        text = text_of(lambda of_mesh=of_mesh: body(of_mesh, lambda rank: rank // 2))
        assert text.startswith("the copies of 'argument 0[0].running_mean' along axis 'dp' differ")
        assert "layout: dp=2: equal copies" in text
        sim.run(body, 4, (of_mesh, lambda rank: rank % 2))


def test_nothing_is_compared_along_other_axes():
    def body() -> None:
        mesh, x = mesh_of(), torch.full((2,), float(dist.get_rank()))
        for placements in ([Shard(0), Partial()], [Partial(), Shard(0)], [Shard(0), Shard(0)]):
            sim.check_replicas({"x": DTensor.from_local(x, mesh, placements), "nothing": None})
        sim.check_replicas(DTensor.from_local(torch.empty(2, device="meta"), mesh, [Replicate()] * 2))
        with FakeTensorMode():
            fake = torch.ones(2) * dist.get_rank()
        sim.check_replicas(fake, group=mesh)

    with sim.world(4) as world:
        world.run(body)
        assert world.trace.events == [], "it leaves no trace"


@pytest.mark.parametrize(
    ("made", "seen"),
    [
        (lambda layer: layer, "Linear with 2 plain tensors, 'head.weight' first"),
        (lambda layer: torch.optim.SGD(layer.parameters()), "SGD with 2 plain tensors, 'param_groups[0][0]' first"),
    ],
    ids=["module", "optimizer"],
)
def test_what_says_nothing_of_its_copies_is_refused(made, seen):
    def body() -> None:
        sim.check_replicas({"head": made(torch.nn.Linear(2, 2))})

    with pytest.raises(TypeError) as caught:
        sim.run(body, 2)
    assert str(caught.value.__cause__).splitlines() == [
        "cannot compare the copies of 'head': nothing in it says who holds copies: without group=, DTensors and "
        "DistributedDataParallel do",
        f"  seen: {seen}",
        "  try: check_replicas(x, group=dist.group.WORLD), or group=mesh['dp']",
    ]


def test_plain_tensors_next_to_dtensors_are_passed_over():
    def body(spoil: str) -> None:
        layer = torch.nn.Linear(2, 2)  # of its own random values on each rank
        local = torch.ones(2) * (1 + (spoil == "bias") * dist.get_rank())
        layer.bias = torch.nn.Parameter(DTensor.from_local(local, mesh_of(TP), [Replicate()]))
        sim.check_replicas(layer, torch.nn.ReLU(), torch.optim.SGD(layer.parameters()))

    sim.run(body, 2, ("nothing",))
    assert text_of(lambda: body("bias"), 2).startswith("the copies of 'bias' along axis 'tp' differ")


def test_a_data_parallel_module_is_compared_over_its_own_group():
    class Model(torch.nn.Module):
        def __init__(self, spoil: str) -> None:
            super().__init__()
            group = mesh_of().get_group("dp")
            inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["2.bias"])
            self.body = DistributedDataParallel(inner, process_group=group)
            odd = float(dist.get_rank() == 3)
            with torch.no_grad():
                inner[0].weight[0, 1] += odd * (spoil == "weight")
                inner[1].running_mean += odd  # made equal at the next forward pass
                inner[2].bias += odd
            for parameter in inner.parameters():
                parameter.grad = torch.ones_like(parameter) * (1 + odd * (spoil == "gradient"))

    def body(spoil: str) -> None:
        torch.manual_seed(dist.get_rank())
        model = Model(spoil)
        sim.check_replicas(model)
        sim.check_replicas(model.body)

    sim.run(body, 4, ("nothing",))
    assert text_of(lambda: body("weight")).startswith("the copies of 'body.module.0.weight' along axis 'dp' differ")
    assert text_of(lambda: body("gradient")).startswith("the copies of 'body.module.0.weight.grad' along axis 'dp'")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_bits_are_compared_and_nan_equals_nan(dtype):
    def body(mine: float, others: float, **tolerance: float) -> None:
        x = torch.tensor([1.0, mine if dist.get_rank() else others], dtype=dtype)
        sim.check_replicas(DTensor.from_local(x, mesh_of(TP), [Replicate()]), **tolerance)

    sim.run(body, 2, (float("nan"), -float("nan")))
    assert "at [1] of" in text_of(lambda: body(0.0, -0.0), 2)
    assert "at [1] of" in text_of(lambda: body(1.0, 1.0078125), 2)
    sim.run(lambda: body(1.0, 1.0078125, rtol=0.01), 2)
    assert "at [1] of" in text_of(lambda: body(1.0, 1.0078125, atol=0.001), 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_other_dtypes_and_scalars(dtype):
    def body(different: bool) -> None:
        x = torch.tensor(float(different and dist.get_rank() > 0)).to(dtype)
        sim.check_replicas(DTensor.from_local(x, mesh_of(TP), [Replicate()]))

    sim.run(body, 2, (False,))
    assert "1 of 1 elements differ" in text_of(lambda: body(True), 2)


def test_local_tensors_of_different_shapes():
    def body() -> None:
        rank = dist.get_rank()
        x = DTensor.from_local(torch.ones(2 + rank), mesh_of(TP), [Replicate()], shape=(2,), stride=(1,))
        sim.check_replicas({"x": x})

    def turned() -> None:
        sizes = (2, 3) if dist.get_rank() else (3, 2)
        x = DTensor.from_local(torch.ones(sizes), mesh_of(TP), [Replicate()], shape=(3, 2), stride=(2, 1))
        sim.check_replicas({"x": x})

    assert "* rank 1  [2, 3]" in text_of(turned, 2)
    text = text_of(body, 2)
    assert "  rank 0  [2]    test" in text
    assert "* rank 1  [3]    test" in text
    assert "seen: the shapes of the local tensors, float32\n" in text


def test_ranks_that_do_not_agree_on_what_they_hold():
    def body() -> None:
        placement = Shard(0) if dist.get_rank() == 1 else Replicate()
        x = DTensor.from_local(torch.ones(2), mesh_of(), [Replicate(), placement], shape=(2,), stride=(1,))
        sim.check_replicas({"x": x} if dist.get_rank() != 2 else {"x": x, "y": x})

    assert text_of(body) == expect(
        """
        the ranks do not agree on what 'x' is
          rank 0  float32 [2]  dp=2: Replicate(), tp=2: Replicate()   test_sim_replicas.py: in body
        * rank 1  float32 [2]  dp=2: Replicate(), tp=2: Shard(dim=0)  test_sim_replicas.py: in body
          rank 2  float32 [2]  dp=2: Replicate(), tp=2: Replicate()   test_sim_replicas.py: in body
          rank 3  float32 [2]  dp=2: Replicate(), tp=2: Replicate()   test_sim_replicas.py: in body
          try: compare the same tensors, in the same layout, on every rank of the mesh
          replay: sim.run(..., world_size=4, seed=0)
        """
    )


def test_a_rank_that_does_not_come_is_a_deadlock():
    def body() -> None:
        x = distribute_tensor(torch.ones(2), mesh_of(TP), [Replicate()])
        if dist.get_rank() == 0:
            sim.check_replicas(x)

    with pytest.raises(sim.Deadlock, match=r"rank 0 +waits in comparison #0 of replicas +for rank 1 +test_sim_rep"):
        sim.run(body, 2)
    with sim.world(2) as world:  # and the next run of the same world starts afresh
        with pytest.raises(sim.Deadlock):
            world.run(body)
        world.run(lambda: sim.check_replicas(distribute_tensor(torch.ones(2), mesh_of(TP), [Replicate()])))


def test_several_meshes_meet_in_whatever_order():
    def body() -> None:
        mesh = mesh_of()
        over = {name: distribute_tensor(torch.ones(2), mesh[name], [Replicate()]) for name in DP_TP}
        names = DP_TP if dist.get_rank() % 2 else DP_TP[::-1]
        sim.check_replicas({name: over[name] for name in names})

    for seed in range(5):
        sim.run(body, 4, seed=seed)


def test_it_takes_no_virtual_time():
    def body() -> None:
        sim.advance(float(dist.get_rank()))
        sim.check_replicas(torch.ones(2), group=dist.group.WORLD)

    with sim.world(3, machine="a100-80gb") as world:
        world.run(body)
        assert [world.clock(rank) for rank in range(3)] == [0.0, 1.0, 2.0]


def test_it_ends_every_rank_with_the_same_error():
    def body() -> None:
        try:
            sim.check_replicas(torch.tensor(float(dist.get_rank())), group=dist.group.WORLD)
        except sim.ReplicaMismatch as error:
            seen.append(str(error))
            raise

    seen: list[str] = []
    with pytest.raises(sim.ReplicaMismatch):
        sim.run(body, 3)
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_outside_of_a_world_it_does_nothing():
    assert sim.check_replicas(torch.ones(2)) is None


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        (({"x": torch.ones(2)},), {}, TypeError, "cannot compare the copies of 'x': a plain tensor does not say"),
        ((3,), {}, TypeError, "cannot compare the copies of 'argument 0': it holds no tensors\n  seen: int"),
        ((), {"rtol": -1.0}, ValueError, "cannot compare the copies: rtol must be a finite number of at least 0"),
        (
            (),
            {"group": "tp"},
            TypeError,
            "cannot compare the copies: group is a str, not a process group or a DeviceMesh",
        ),
    ],
)
def test_mistakes_in_the_call(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        sim.run(sim.check_replicas, 2, arguments, options)


def test_a_group_that_the_rank_is_not_in():
    def body() -> None:
        group = dist.new_group([0])
        sim.check_replicas(torch.ones(1), group=group if dist.get_rank() == 0 else mesh_without_me())

    def mesh_without_me() -> Any:
        return torch.distributed.device_mesh.DeviceMesh("cpu", [0])

    with pytest.raises(ValueError, match="cannot compare the copies: rank 1 is not in the group"):
        sim.run(body, 2)


# -- points that the world chooses ---------------------------------------------------------------------------------


def unreduced_gradient(named: bool) -> None:
    mesh = mesh_of(TP)
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    grad = torch.full((3,), float(dist.get_rank()))
    weight.grad = DTensor(grad, weight._spec, requires_grad=False)
    torch.optim.SGD([("norm.weight", weight)] if named else [weight], lr=0.1).step()


def test_gradients_are_compared_before_an_optimizer_steps():
    text = text_of(lambda: unreduced_gradient(True), 2, check_replicas=True)
    assert text.startswith("the copies of 'norm.weight.grad' along axis 'tp' differ\n  rank 0  0.0")
    assert "'param_groups[0][0].grad'" in text_of(lambda: unreduced_gradient(False), 2, check_replicas=True)
    sim.run(unreduced_gradient, 2, (True,))  # nobody has asked


def test_a_gradient_that_to_local_does_not_reduce():
    def body(right: bool) -> None:
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(3), mesh_of(TP), [Replicate()]))
        x = torch.full((3,), float(dist.get_rank()))
        (weight.to_local(grad_placements=[Partial()] if right else None) * x).sum().backward()
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.grad = weight.grad.redistribute(placements=[Replicate()])
        optimizer.step()

    text = text_of(lambda: body(False), 2, check_replicas=True)
    assert "gradient" in text.splitlines()[0] or ".grad" in text.splitlines()[0]
    assert "try: reduce the gradient over 'tp' before it is used" in text
    sim.run(body, 2, (True,), check_replicas=True)


def test_copies_are_compared_when_a_dtensor_is_made_of_them():
    def body() -> None:
        DTensor.from_local(torch.tensor(float(dist.get_rank())), mesh_of(TP), [Replicate()])

    text = text_of(body, 2, check_replicas=True)
    assert text.startswith("the copies of 'the tensor given to from_local' along axis 'tp' differ")
    sim.run(body, 2)


# -- parts of a sum ------------------------------------------------------------------------------------------------


def part(reduction: str = "sum", shape: tuple[int, ...] = (4, 4)) -> torch.Tensor:
    """This rank's part of something, of both signs and different on each rank."""
    data = torch.rand(shape, generator=torch.Generator().manual_seed(dist.get_rank())) * 4 - 1.5
    return DTensor.from_local(data, mesh_of(TP), [Partial(reduction)]).to_local()


def test_what_is_said_about_a_part_that_is_used_as_the_whole():
    def body() -> None:
        y = part() * 2
        y.t().relu()

    assert text_of(body, 2, check_replicas=True, schedule=()) == expect(
        """
        rank 0 used a part of a sum as if it were the sum: relu is not linear
          partial: sum over axis 'tp' (2 ranks), taken at test_sim_replicas.py: in part
          used:    test_sim_replicas.py: in body, by aten.relu on float32 [4, 4]
          try: x.redistribute(placements=[Replicate()]) before x.to_local(), or all_reduce the part first
          replay: sim.run(..., world_size=2, seed=0, schedule=[])
        """
    )
    sim.run(body, 2)  # nobody has asked


W = torch.rand(4, 4, generator=torch.Generator().manual_seed(9)) + 0.5
ROW = W[0]
OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "x * 2": lambda x: x * 2,
    "2 * x": lambda x: 2 * x,
    "x / 2": lambda x: x / 2,
    "-x": lambda x: -x,
    "x + x": lambda x: x + x,
    "x - x": lambda x: x - 3 * x,
    "x + 0": lambda x: x + 0,
    "x * W": lambda x: x * W,
    "x / W": lambda x: x / W,
    "x @ W": lambda x: x @ W,
    "W @ x": lambda x: W @ x,
    "x @ ROW": lambda x: x @ ROW,
    "linear": lambda x: F.linear(x, W),
    "weight": lambda x: F.linear(W, x),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, W),
    "bmm": lambda x: x[None] @ W[None],
    "sum": lambda x: x.sum(),
    "sum(0)": lambda x: x.sum(0),
    "mean": lambda x: x.mean(1),
    "cumsum": lambda x: x.cumsum(0),
    "t": lambda x: x.t().contiguous(),
    "view": lambda x: x.view(2, 8),
    "tril": lambda x: x.tril(),
    "flip": lambda x: x.flip(0),
    "index": lambda x: x[[0, 2]],
    "row": lambda x: x[1:, 0],
    "cat": lambda x: torch.cat([x, x]),
    "cat zeros": lambda x: torch.cat([x, torch.zeros(1, 4)]),
    "chunk": lambda x: x.chunk(2)[1] * 3,
    "to": lambda x: x.to(torch.float64),
    "pad": lambda x: F.pad(x, (1, 1)),
    "clone": lambda x: x.clone(),
    "roll": lambda x: x.roll(1, 0),
    "trace": lambda x: x.trace(),
    "zeros += x": lambda x: torch.zeros(4, 4).add_(x),
    "copy": lambda x: torch.ones(4, 4).copy_(x),
    "mul_": lambda x: x.clone().mul_(3),
    "addmm zeros": lambda x: torch.addmm(torch.zeros(4), x, W),
    "addmm parts": lambda x: torch.addmm(x, x, W),
    "alpha": lambda x: torch.add(x, x, alpha=2),
    "gather": lambda x: x.gather(0, torch.zeros(1, 4, dtype=torch.int64)),
    "embedding": lambda x: F.embedding(torch.tensor([0, 1]), x),
    "_foreach_mul": lambda x: torch._foreach_mul([x], 2.0)[0],
    "_foreach_add": lambda x: torch._foreach_add([x], [x])[0],
    "masked": lambda x: x * (W > 1),
    "addcmul": lambda x: torch.addcmul(x, x, W),
    "masked_fill 0": lambda x: x.masked_fill(W > 1, 0.0),
    "where mask": lambda x: torch.where(W > 1, x, 0.0),
    "where 1": lambda x: torch.where(W > 1, x, 1.0),
    "floor_divide": lambda x: x // 0.3,
    "long": lambda x: x.long(),
    "copy to long": lambda x: torch.zeros(4, 4, dtype=torch.int64).copy_(x),
    "scatter_add": lambda x: torch.zeros(4, 4).scatter_add(0, torch.zeros(4, 4, dtype=torch.int64), x),
    "index_add": lambda x: torch.zeros(1, 4).index_add(0, torch.zeros(4, dtype=torch.int64), x),
    "in place": lambda x: x.clone().neg_().zero_(),
    "relu": lambda x: (x - 2 * x).relu(),
    "exp": lambda x: x.exp(),
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(0),
    "abs": lambda x: (-x).abs(),
    "x + 1": lambda x: x + 1,
    "1 - x": lambda x: 1 - x,
    "x + W": lambda x: x + W,
    "W - x": lambda x: W - x,
    "x += 1": lambda x: x.clone().add_(1),
    "W += x": lambda x: W.clone().add_(x),
    "x * x": lambda x: x * x,
    "x @ x": lambda x: x @ x,
    "x ** 2": lambda x: x**2,
    "1 / x": lambda x: 1 / x,
    "W / x": lambda x: W / x,
    "sqrt": lambda x: x.sqrt(),
    "max": lambda x: x.max(),
    "amax": lambda x: x.amax(0),
    "prod": lambda x: x.prod(),
    "norm": lambda x: x.norm(),
    "var": lambda x: x.var(),
    "x > 1": lambda x: (x > 1).float(),
    "clamp": lambda x: x.clamp(max=1.0),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "bias": lambda x: F.linear(x, W, ROW),
    "addmm W": lambda x: torch.addmm(W, x, W),
    "W + part": lambda x: torch.addmm(x, W, W),
    "pad 1": lambda x: F.pad(x, (1, 1), value=1.0),
    "cat W": lambda x: torch.cat([x, W]),
    "stack W": lambda x: torch.stack([x, W]),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "log_softmax": lambda x: x.log_softmax(0),
    "int": lambda x: (x * 3).round(),
    "maximum": lambda x: torch.maximum(x, W),
    "sort": lambda x: x.sort(0)[0],
    "sigmoid": torch.sigmoid,
    "_foreach_add 1": lambda x: torch._foreach_add([x], 1.0)[0],
    "_foreach_mul x": lambda x: torch._foreach_mul([x], [x])[0],
    "_foreach_norm": lambda x: torch._foreach_norm([x])[0],
    "lerp": lambda x: torch.lerp(x, W, 0.5),
    "mse": lambda x: F.mse_loss(x, W),
    "masked_fill": lambda x: x.masked_fill(W > 1, 1.0),
    "cdist": lambda x: torch.cdist(x, W),
    "erf": torch.erf,
    "addcmul W": lambda x: torch.addcmul(W, x, W),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_not_linear_is_refused_and_nothing_else(name):
    """The oracle: whether the sum of the results is the result of the sum."""
    operation = OPERATIONS[name]

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        x = part()
        full = x.clone()
        dist.all_reduce(full)
        return operation(x), operation(full)

    parts = sim.run(body, 2)
    linear = torch.allclose(sum(each.double() for each, _ in parts), parts[0][1].double(), rtol=1e-4, atol=1e-5)
    try:
        sim.run(lambda: operation(part()), 2, check_replicas=True)
        accepted = True
    except sim.ReplicaMismatch:
        accepted = False
    assert accepted == linear


@pytest.mark.parametrize(
    "name", ["x * 2", "t", "copy", "mul_", "x @ W", "cat", "zeros += x", "_foreach_mul", "chunk", "sum(0)"]
)
def test_what_is_made_of_a_part_is_a_part(name):
    def body() -> None:
        OPERATIONS[name](part()).exp()

    assert "exp is not linear" in text_of(body, 2, check_replicas=True)


def test_the_operations_in_the_tables_exist():
    tables = [
        value for name, value in vars(partials).items() if name.isupper() and isinstance(value, (frozenset, dict))
    ]
    names = {name for table in tables for name in table}
    assert len(names) > 80
    assert not [name for name in sorted(names) if not any(hasattr(torch.ops.aten, name + tail) for tail in ("", "_"))]


def test_what_is_said_about_sums_and_products():
    def said(body: Callable[[], Any]) -> str:
        return text_of(body, 2, check_replicas=True).splitlines()[0].partition(": ")[2]

    assert said(lambda: part() + 1) == "add puts it together with a full value, which is then counted 2 times"
    assert said(lambda: part() * part()) == "mul multiplies two parts"
    assert said(lambda: 1 / part()) == "reciprocal is not linear"
    assert said(lambda: W / part()) == "div divides by it"
    assert said(lambda: F.linear(part(), W, ROW)) == "addmm adds a bias in full, which is then counted 2 times"
    assert said(lambda: torch.addmm(part(), W, W)) == (
        "addmm adds to it a product of full values, which is then counted once per rank"
    )
    assert said(lambda: part() + part("avg")) == (
        "add puts it together with a part of another reduction: avg over axis 'tp' (2 ranks)"
    )
    assert said(lambda: part("max") * 2) == "mul of parts is not part of a max"
    assert said(lambda: F.pad(part(), (1, 1), value=2.0)) == (
        "constant_pad_nd puts 2.0 next to it on every rank, which is counted once per rank"
    )
    assert said(lambda: part().long()) == "_to_copy rounds it to whole numbers"
    assert said(lambda: part() // 1) == "floor_divide is not linear"
    assert said(lambda: torch.index_select(part(), 0, part().view(torch.int32)[0])) == (
        "index_select takes a part where it needs a value"
    )


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x, group: dist.all_reduce(x, group=group),
        lambda x, group: x.copy_(W),
        lambda x, group: x.fill_(1.0),
        lambda x, group: dist.broadcast(x, 0, group=group),
    ],
)
def test_communication_and_new_values_end_it(reduce):
    def body() -> None:
        x = part()
        y = x.clone()
        reduce(y, dist.group.WORLD)
        y.view(16).relu()
        x.clone().relu()

    assert "in body" in text_of(body, 2, check_replicas=True), "x itself is still a part"

    def without_the_last_line() -> None:
        y = part().clone()
        reduce(y, dist.group.WORLD)
        y.view(16).relu()

    sim.run(without_the_last_line, 2, check_replicas=True)


def test_functional_collectives_end_it():
    from torch.distributed import _functional_collectives as funcol

    def body() -> list[float]:
        x = part()
        summed = funcol.all_reduce(x, "sum", dist.group.WORLD)
        received = torch.empty(2, 4)
        dist.reduce_scatter_single(received, x) if hasattr(dist, "reduce_scatter_single") else (
            dist.reduce_scatter_tensor(received, x)
        )
        return [summed.relu().sum().item(), received.exp().sum().item()]

    assert len(sim.run(body, 2, check_replicas=True)[0]) == 2


@sim.ranks(2, backends=("sim",), check_replicas=True)
def test_dtensors_take_care_of_themselves(ctx):
    """torch redistributes what is partial where an operation is not linear."""
    mesh = mesh_of(TP)
    x = DTensor.from_local(W * (1 + dist.get_rank()), mesh, [Partial()])
    held = x.to_local()
    y = ((x + 1).relu() * x).softmax(0) + torch.nn.functional.gelu(x)
    z = x.redistribute(placements=[Replicate()]).to_local().exp()
    assert bool(torch.isfinite(y.full_tensor()).all())
    assert bool(z.isfinite().all())
    assert held.shape == (4, 4)


def test_a_number_read_from_a_partial_dtensor():
    """The one place where torch's DTensor takes a part for the sum."""

    def body() -> float:
        return DTensor.from_local(torch.ones(2), mesh_of(TP), [Partial()]).sum().item()

    assert sim.run(body, 2) == [2.0, 2.0], "torch is still wrong: the sum is 4"
    text = text_of(body, 2, check_replicas=True)
    assert "as if it were the sum: item() reads this rank's part" in text
    assert "by item() on float32 []" in text


@pytest.mark.tier("test")
def test_training_with_parts_inside_is_left_alone():
    """A row-parallel layer written by hand, forward and backward, with accumulated gradients."""

    def body() -> torch.Tensor:
        mesh = mesh_of(TP)
        torch.manual_seed(0)
        weight = torch.nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(1)]))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        for _ in range(2):
            for _ in range(2):
                x = distribute_tensor(torch.randn(3, 4), mesh, [Shard(1)])
                y = DTensor.from_local(x.to_local() @ weight.to_local().t(), mesh, [Partial()])
                shown = y.to_local() * 0.5 + y.to_local() * 0.5
                full = DTensor.from_local(shown, mesh, [Partial()]).redistribute(placements=[Replicate()])
                full.to_local().relu().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.full_tensor().detach()

    checked, unchecked = sim.run(body, 2, check_replicas=True), sim.run(body, 2)
    assert torch.equal(checked[0], checked[1])
    assert torch.equal(checked[0], unchecked[0])


@sim.ranks(2, backends=("sim",), check_replicas=True)
def test_printing_and_asserting_on_a_part_is_no_use_of_it(ctx):
    x = part()
    assert "tensor" in repr(x)
    assert torch.equal(x, x.clone())
    assert isinstance(x[0, 0].item(), float)


@sim.ranks(2, backends=("sim",), check_replicas=True)
def test_a_piece_of_a_buffer_does_not_mark_the_rest(ctx):
    buffer = torch.ones(2, 4, 4)
    buffer[0].copy_(part())
    buffer[1].relu()


def test_marks_go_with_their_tensors():
    class Watched:
        scheduler = None
        replay = ""

    found = partials.RankPartials(Watched(), 0)
    mark = partials.Mark("sum", ("tp",), 2, "here")
    kept = torch.ones(3)
    found.put([kept], mark)
    for _ in range(2_000):
        found.put([torch.ones(3)], mark)
    gc.collect()
    assert found.of(kept[1:]) == mark
    assert found.of(torch.ones(3)) is None
    assert len(found._marks) < 1_000


def test_both_checks_at_once():
    def body(racy: bool, misused: bool) -> None:
        x = part()
        full = x.clone()
        work = dist.all_reduce(full, async_op=True)
        if racy:
            full.relu()
        work.wait()
        (x if misused else full).relu()

    sim.run(body, 2, (False, False), check_races=True, check_replicas=True)
    assert "relu is not linear" in text_of(lambda: body(False, True), 2, check_races=True, check_replicas=True)
    with pytest.raises(sim.InFlightBufferRace):
        sim.run(body, 2, (True, False), check_races=True, check_replicas=True)


@pytest.mark.tier("test")
def test_a_model_that_is_sharded_replicated_and_trained_passes():
    """Nothing is found where nothing is wrong: our engine on replicas of shards, and torch's on the same."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    import hyper_parallel as hp

    def body(shard: Callable[..., Any]) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(torch.randn(4, 4)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        sim.check_replicas(model)
        return losses

    for shard in (hp.fully_shard, torch_fully_shard):
        assert sim.run(body, 4, (shard,), check_replicas=True) == sim.run(body, 4, (shard,))


def test_an_update_that_one_replica_misses_is_found_at_the_next_step():
    import hyper_parallel as hp

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        hp.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            if step == 1 and dist.get_rank() == 2:
                optimizer.param_groups[0]["lr"] = 0.2
            optimizer.step()
            optimizer.zero_grad()

    text = text_of(body, check_replicas=True)
    assert text.startswith("the copies of 'weight' along axis 'dp_replicate' differ\n")
    assert "* rank 2 " in text
    assert "  also: 1 more tensor: 'bias'\n" in text


# -- steps that not all ranks take -----------------------------------------------------------------------------------


def trained_where(steps: Callable[[Any], bool], *, keeps: bool = False, muon: bool = False) -> None:
    """Train matrices that rank 0 owns and one that is split, with a step where `steps` says so of the former."""
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(2)])
    fully_shard(net[0], shard_placement_fn=lambda p: Owner(0))
    fully_shard(net)
    if keeps:
        net.set_reshard_after_backward(False)
    optimizer = Muon(net.parameters()) if muon else torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.ones(1, 4)).sum().backward()
        if steps(net[0].weight):
            optimizer.step()
        optimizer.zero_grad()


def owns(param: torch.Tensor) -> bool:
    return param.grad is not None


def test_a_step_that_only_the_owner_of_a_parameter_takes():
    assert text_of(lambda: trained_where(owns), 2) == expect(
        """
        an optimizer steps on rank 0 alone, and others have shards of its parameters
          rank 0  steps        test_sim_replicas.py: in trained_where
        * rank 1  never steps
          try: optimizer.step() on every rank, also where p.grad is None, as it is where a parameter has an owner
          replay: sim.run(..., world_size=2, seed=0)
        """
    )
    for options in ({"muon": True}, {"keeps": True}):  # in the step, and after it
        with pytest.raises(
            sim.CollectiveMismatch, match=r"rank 0 began optimizer\.step\(\) at test_sim_replicas"
        ) as caught:
            sim.run(lambda options=options: trained_where(owns, **options), 2)
        assert "in trained_where, rank 1 did not so far" in str(caught.value)


def test_steps_that_ranks_may_leave_out():
    def of_each_parameter() -> None:
        net = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(2)])
        owners = iter((0, 0))
        fully_shard(net, shard_placement_fn=lambda p: Owner(next(owners)))
        net(torch.ones(1, 4)).sum().backward()
        for param in net.parameters():
            if param.grad is not None:
                torch.optim.SGD([param], lr=0.1).step()

    sim.run(of_each_parameter, 2)
    sim.run(lambda: trained_where(lambda param: False), 2)
    sim.run(lambda: trained_where(lambda param: True), 2)


# -- weights that are split ------------------------------------------------------------------------------------------


def split_by(kind: str, model: torch.nn.Module, sizes: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    (fsdp2 if kind == "fsdp2" else fully_shard)(model, mesh=mesh)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
@pytest.mark.parametrize("kind", ["fully_shard", "fsdp2"])
def test_weights_that_ranks_have_drawn_by_other_seeds_are_found_when_split(kind: str, sizes: tuple[int, ...]):
    def body(seed: int) -> None:
        torch.manual_seed(seed if dist.get_rank() == 3 else 0)
        split_by(kind, torch.nn.Linear(4, 3), sizes)

    sim.run(lambda: body(0), 4, check_replicas=True)
    text = text_of(lambda: body(1), check_replicas=True)
    assert text.startswith("the copies of 'weight' along ax")
    assert "12 of 12 elements differ" in text
    assert "one seed, or a broadcast" in text


def test_tensors_that_ranks_distribute_by_themselves_are_compared():
    def body(other: float) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine = torch.full((4,), other if dist.get_rank() == 3 else 1.0)
        distribute_tensor(mine, mesh, [Replicate(), Shard(0)], src_data_rank=None)

    sim.run(lambda: body(1.0), 4, check_replicas=True)
    text = text_of(lambda: body(2.0), check_replicas=True)
    assert text.startswith("the copies of 'the tensor given to distribute_tensor' along axis 'tp' differ")


@pytest.mark.parametrize("kind", ["fully_shard", "fsdp2"])
@sim.ranks(2, backends=("sim",), check_replicas=True)
def test_weights_without_values_may_be_split(ctx, kind: str):
    with torch.device("meta"):
        split_by(kind, torch.nn.Linear(4, 3), (2,))
