"""Worlds that stand for a backend: what it does not reduce or move is refused, at the call and on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh

import hyper_parallel as hp
import sim
from hyper_parallel.platform import get_platform

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")]


def coalesced(x, op):
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    dist.group.WORLD.reduce_scatter_tensor_coalesced([x[:2].clone()], [x], options).wait()


CALLS = {
    "all_reduce": dist.all_reduce,
    "all_reduce, functional": lambda x, op: funcol.all_reduce(x, op.name.lower(), dist.group.WORLD).wait(),
    "all_reduce, coalesced": lambda x, op: dist.all_reduce_coalesced([torch.ones(2, dtype=x.dtype), x], op),
    "reduce": lambda x, op: dist.reduce(x, 1, op),
    "reduce_scatter": lambda x, op: dist.reduce_scatter(x[:2].clone(), list(x.chunk(2)), op),
    "reduce_scatter, tensors": lambda x, op: dist.reduce_scatter_tensor(x[:2].clone(), x, op),
    "reduce_scatter, coalesced": coalesced,
}


def refusals(call, dtype, op, **options) -> list[str]:
    """The error of each of two ranks; "" where the call is taken."""

    def body() -> str:
        try:
            CALLS[call](torch.ones(4, dtype=dtype), op)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return sim.run(body, 2, **options)


@pytest.mark.parametrize("call", CALLS)
def test_every_reduction_is_looked_at_on_every_rank(call):
    answers = refusals(call, torch.float64, ReduceOp.SUM, backend="hccl")
    assert answers[0] == answers[1]
    assert answers[0].startswith(f"InvalidType: cannot {call.split(',')[0]} float64 by ReduceOp.SUM")
    assert refusals(call, torch.float32, ReduceOp.MAX, backend="hccl") == ["", ""]
    assert refusals(call, torch.float64, ReduceOp.SUM) == ["", ""], "by default nothing is refused"


def test_a_dtype_that_is_refused():
    with pytest.raises(TypeError) as caught:
        sim.run(lambda: dist.all_reduce(torch.ones(4, 3, dtype=torch.float64)), 2, backend="hccl")
    assert str(caught.value).endswith(
        "InvalidType: cannot all_reduce float64 by ReduceOp.SUM: hccl does not reduce this dtype\n"
        "  tensor: float64 [4, 3]   group: world   hccl takes: float32, float16, bfloat16, int64, int32, int16, int8, "
        "uint8, bool\n"
        "  try: tensor.to(torch.float32)\n"
        "  replay: sim.run(..., world_size=2, seed=0, backend='hccl')"
    )


def test_a_reduce_op_that_is_refused():
    with pytest.raises(ValueError, match="rank 0 raised") as caught:
        sim.run(lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32), ReduceOp.BXOR), 2, backend="hccl")
    assert (
        "cannot all_reduce int32 by ReduceOp.BXOR: hccl has no such reduce op\n"
        "  tensor: int32 [4]   group: world   hccl takes: SUM, MIN, MAX, PRODUCT\n"
        "  try: ReduceOp.SUM, or gather the tensors and reduce them on each rank\n"
    ) in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "call", "dtype", "op", "hint"),
    [
        ("hccl", "all_reduce", torch.bfloat16, ReduceOp.PRODUCT, "tensor.to(torch.float32)"),
        ("hccl", "all_reduce", torch.int16, ReduceOp.PRODUCT, "tensor.to(torch.int32)"),
        ("hccl", "all_reduce", torch.int64, ReduceOp.AVG, "tensor.to(torch.float32)"),
        ("hccl", "all_reduce", torch.complex128, ReduceOp.SUM, "tensor.to(torch.float32)"),
        ("hccl", "reduce_scatter", torch.uint8, ReduceOp.SUM, "tensor.to(torch.int32)"),
        ("hccl", "reduce_scatter", torch.bool, ReduceOp.MAX, "tensor.to(torch.int32)"),
        ("hccl", "reduce_scatter", torch.complex64, ReduceOp.SUM, "torch.view_as_real(tensor)"),
        ("hccl", "all_reduce", torch.uint8, ReduceOp.SUM, None),
        ("hccl", "all_reduce", torch.int16, ReduceOp.MIN, None),
        ("hccl", "all_reduce", torch.complex64, ReduceOp.SUM, None),
        ("hccl", "reduce_scatter", torch.bfloat16, ReduceOp.AVG, None),
        ("nccl", "all_reduce", torch.int16, ReduceOp.SUM, "tensor.to(torch.int32)"),
        ("nccl", "all_reduce", torch.float64, ReduceOp.AVG, None),
        ("gloo", "all_reduce", torch.int16, ReduceOp.SUM, "tensor.to(torch.int32)"),
        ("gloo", "all_reduce", torch.int64, ReduceOp.BOR, None),
    ],
    ids=str,
)
def test_what_is_taken_and_what_is_not(backend, call, dtype, op, hint):
    answers = refusals(call, dtype, op, backend=backend)
    assert answers == ["", ""] if hint is None else answers[0].endswith(f"\n  try: {hint}"), answers


def test_complex_numbers_are_reduced_as_pairs_where_the_backend_has_it_so():
    for backend, call in (("gloo", "reduce"), ("gloo", "reduce_scatter, tensors"), ("nccl", "reduce")):
        assert refusals(call, torch.complex64, ReduceOp.SUM, backend=backend) == ["", ""]
    assert refusals("reduce", torch.complex64, ReduceOp.AVG, backend="gloo") == ["", ""]
    assert "does not reduce" in refusals("reduce", torch.complex64, ReduceOp.PRODUCT, backend="gloo")[0]


MOVES = {
    "broadcast": lambda x: dist.broadcast(x, 1),
    "scatter": lambda x: dist.scatter(x, [x, x] if dist.get_rank() == 1 else None, 1),
    "gather": lambda x: dist.gather(x, [x.clone(), x.clone()] if dist.get_rank() == 1 else None, 1),
    "all_gather": lambda x: dist.all_gather([x.clone(), x.clone()], x),
    "all_gather, tensors": lambda x: dist.all_gather_into_tensor(torch.cat([x, x]), x),
    "all_to_all": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
    "all_to_all, lists": lambda x: dist.all_to_all(list(x.clone().chunk(2)), list(x.chunk(2))),
}


@pytest.mark.parametrize("call", MOVES)
@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.uint32, torch.float8_e4m3fn, torch.complex64, torch.bool], ids=str
)
def test_dtypes_that_gloo_does_not_move(call, dtype):
    def body() -> str:
        try:
            MOVES[call](torch.ones(4).to(dtype))
        except TypeError as error:
            return str(error)
        return ""

    # torch.distributed sends complex numbers as pairs, but not in a gather
    taken = call != "gather" if dtype.is_complex else dtype is torch.bool
    answers = sim.run(body, 2, backend="gloo")
    assert answers[0] == answers[1]
    assert taken == (answers[0] == "")
    if (call, dtype) == ("broadcast", torch.int16):
        assert answers[0] == (
            "cannot broadcast int16: gloo does not move this dtype\n  tensor: int16 [4]   group: world   "
            "gloo takes: float64, float32, float16, bfloat16, int64, int32, int8, uint8, bool\n"
            "  try: tensor.view(torch.float16)"
        )
    assert sim.run(body, 2) == sim.run(body, 2, backend="nccl") == ["", ""]


def test_messages_and_the_verbs_of_the_library_move_what_gloo_does_not():
    def body() -> list:
        x = torch.arange(4, dtype=torch.int16)
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return hp.full_tensor(hp.redistribute(hp.distribute_tensor(x, mesh, ("tp",)), ())).tolist()

    assert sim.run(body, 2, backend="gloo") == [[0, 1, 2, 3]] * 2


def test_groups_have_its_name_and_its_rules_and_groups_of_another_name_have_not():
    def body() -> list:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        other, x = dist.new_group([0, 1], backend="gloo"), torch.ones(1, dtype=torch.float64)
        dist.all_reduce(x, group=other)
        with pytest.raises(TypeError, match="group: dp"):
            dist.all_reduce(x, group=mesh["dp"].get_group())
        several = dist.new_group([0, 1], backend="cpu:gloo,npu:hccl")
        with pytest.raises(TypeError, match="hccl does not reduce"):
            dist.all_reduce(x, group=several)
        names = [dist.get_backend(), dist.get_backend(mesh["dp"].get_group()), dist.get_backend(other)]
        gathered = [None, None]
        dist.all_gather_object(gathered, dist.get_rank())  # the backend takes part in nothing but reductions
        return [x.item(), *names, get_platform().backend, get_platform().reductions.widest_float, gathered]

    answers = [2.0, "hccl", "hccl", "gloo", "hccl", torch.float32, [0, 1]]
    assert sim.run(body, 2, backend="hccl") == [answers, answers]


def test_a_script_that_makes_the_group_itself():
    def body(asked) -> str:
        dist.init_process_group(asked)
        dist.all_reduce(torch.ones(1, dtype=torch.float64))
        return dist.get_backend()

    assert sim.run(body, 2, args=("gloo",), init=False, backend="hccl") == ["gloo", "gloo"]
    for asked in ("hccl", None):
        with pytest.raises(TypeError, match="hccl does not reduce"):
            sim.run(body, 2, args=(asked,), init=False, backend="hccl")


@sim.ranks(2, backends=("sim",))
def test_the_default_reports_what_it_did_and_takes_all_that_torch_computes(ctx):
    assert (dist.get_backend(), get_platform().backend, get_platform().reductions.widest_float) == (
        "sim",
        "sim",
        torch.float64,
    )


def test_a_backend_without_rules():
    with pytest.raises(ValueError, match=r"backend 'xccl'\n  backend: 'xccl'   known: .*\n  try: backend='hccl'"):
        sim.world(2, backend="xccl")
