"""Inputs that backward gathers again, and inputs in chunks: gradients are those of one device, at the price said."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel import Layout, ShardingPlan, distribute_tensor, full_tensor, init_device_mesh, shard_module


class Block(nn.Module):
    """Two matrix products that share their input, and a third; remembers the memory of the input."""

    def __init__(self, hidden: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=bias)
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.seen.append(StorageWeakRef(x.untyped_storage()))
        return self.down(F.silu(self.gate(x)) * self.up(x))


@dataclass(frozen=True)
class Case:
    """One model on a mesh."""

    dp: int
    tp: int
    batch: int
    seq: int
    hidden: int
    inner: int
    bias: bool
    checkpointed: bool
    twice: bool

    def made(self) -> tuple[Block, torch.Tensor]:
        torch.manual_seed(0)
        return Block(self.hidden, self.inner, self.bias).double(), torch.randn(
            self.batch, self.seq, self.hidden, dtype=torch.float64
        )

    def gradients(self, model: Block, x: torch.Tensor) -> list[torch.Tensor]:
        run = (lambda x: checkpoint(model, x, use_reentrant=False)) if self.checkpointed else model
        loss = run(x).pow(2).sum()
        wanted = [x, *model.parameters()]
        if not self.twice:
            return list(torch.autograd.grad(loss, wanted))
        torch.autograd.grad(loss, wanted, retain_graph=True)
        return list(torch.autograd.grad(loss, wanted))


@st.composite
def cases(draw: Any) -> Case:
    dp, tp = draw(st.sampled_from([(1, 2), (2, 2), (1, 3)]))
    sizes = [draw(st.integers(0, 5)), draw(st.integers(0, 5)), *(draw(st.integers(1, 5)) for _ in range(2))]
    return Case(dp, tp, *sizes, *(draw(st.booleans()) for _ in range(3)))


Cut = int | tuple[int, int] | None


def sharded(case: Case, reshards: bool = False, chunks: Cut = None) -> tuple[Block, torch.Tensor]:
    mesh = init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    layout = Layout.from_device_mesh(mesh)
    model, x = case.made()
    split = {f"{name}.weight": ("tp", "None") for name in ("gate", "up")} | {"down.weight": ("None", "tp")}
    split |= {f"{name}.bias": ("tp",) for name in ("gate", "up") if case.bias}
    plan = ShardingPlan(
        plan=split,
        input_plan={"input": ("dp", "None", "None")},
        local_plan={"": layout("dp", "None", "None", partial={"tp": "sum"})},
        output_plan={"output": ("dp", "tp", "None")},
        reshard_inputs=[""] if reshards else None,
        chunks=None if chunks is None else {"": chunks},
    )
    return shard_module(model, mesh, plan), distribute_tensor(x, layout("dp", "tp", "None")).requires_grad_()


@settings(max_examples=20)
@given(cases(), st.none() | st.integers(1, 4) | st.tuples(st.integers(1, 4), st.integers(0, 1)))
def test_gradients_are_those_of_one_device(case: Case, chunks: Cut) -> None:
    model, x = case.made()
    wanted = case.gradients(model, x.requires_grad_())

    def body() -> list[torch.Tensor]:
        model, x = sharded(case, chunks is None, chunks)
        return [full_tensor(grad).detach() for grad in case.gradients(model, x)]

    for found in sim.run(body, world_size=case.dp * case.tp):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


PLAIN = Case(1, 2, 2, 4, 3, 5, True, False, False)


@pytest.mark.parametrize("reshards", [False, True])
@sim.ranks(2, backends=("sim",))
def test_the_gathered_input_is_free_after_forward(ctx, reshards: bool) -> None:
    model, x = sharded(PLAIN, reshards)
    kept = model(x)
    assert [seen.expired() for seen in model.seen] + [kept.requires_grad] == [reshards, True]


def test_backward_gathers_once_for_all_uses() -> None:
    def count(reshards: bool) -> int:
        def body() -> None:
            model, x = sharded(PLAIN, reshards)
            model(x).to_local().sum().backward()

        with sim.world(2) as world:
            world.run(body)
        return sum(event.op == "all_gather" and event.rank == 0 for event in world.trace.events)

    assert count(reshards=True) == count(reshards=False) + 1


def test_second_derivatives_are_those_of_one_device() -> None:
    def second(model: Block, x: torch.Tensor) -> list[torch.Tensor]:
        weights = [model.gate.weight, model.down.weight]
        (first,) = torch.autograd.grad(model(x).pow(2).sum(), [model.up.weight], create_graph=True)
        return list(torch.autograd.grad(first.pow(2).sum(), [x, *weights]))

    model, x = PLAIN.made()
    wanted = second(model, x.requires_grad_())

    def body() -> list[torch.Tensor]:
        return [full_tensor(grad).detach() for grad in second(*sharded(PLAIN, reshards=True))]

    for found in sim.run(body, world_size=2):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@sim.ranks(2, backends=("sim",))
def test_a_shard_that_was_changed_in_place_is_refused(ctx) -> None:
    model, x = sharded(PLAIN, reshards=True)
    middle = x * 1.0
    loss = model(middle).to_local().sum()
    middle._local_tensor.add_(1)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    text = str(caught.value)
    assert text.startswith("cannot gather an input of the model again: its shard was changed in place")
    assert "try: no in-place change" in text


@sim.ranks(2, backends=("sim",))
def test_modules_on_dtensors_are_refused(ctx) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ValueError) as caught:
        shard_module(PLAIN.made()[0], mesh, ShardingPlan(reshard_inputs=["up"]))
    text = str(caught.value)
    assert "module 'up' does not compute on local tensors" in text


# -- in chunks ---------------------------------------------------------------------------------------------------------


KINDS = ("all_gather", "reduce_scatter")


def events_of(case: Case, chunks: int) -> list[tuple[str, int]]:
    """Return what rank 0 sends in forward and backward, with the bytes."""

    def body() -> None:
        model, x = sharded(case, chunks=chunks)
        model(x).to_local().sum().backward()

    with sim.world(case.tp) as world:
        world.run(body)
    return [(event.op, event.send_bytes) for event in world.trace.events if event.rank == 0 and event.op in KINDS]


@pytest.mark.parametrize(("batch", "seq", "chunks"), [(4, 6, 2), (3, 8, 2), (1, 8, 4), (1, 24, 4)])
def test_the_same_bytes_travel_a_chunk_at_a_time(batch: int, seq: int, chunks: int) -> None:
    case = Case(1, 2, batch, seq, 3, 5, False, False, False)
    told, whole, cut = Counter(), Counter(events_of(case, 1)), Counter(events_of(case, chunks))
    for op, size in whole:
        if op == "all_gather" and cut[op, size]:  # of the shape of the result
            told[op, size] = 1
    moved = whole - told
    assert sum(moved.values()) == 4  # one of each in forward, and in backward
    assert cut - told == Counter({(op, size // chunks): count * chunks for (op, size), count in moved.items()})


def test_chunks_are_gathered_ahead() -> None:
    """All gathers are under way before the first chunk is computed; a reduction starts as soon as there is a sum."""
    seen: list[Counter[str]] = []

    def body() -> None:
        model, x = sharded(Case(1, 2, 1, 8, 3, 5, False, False, False), chunks=4)
        if dist.get_rank() == 0:
            model.down.register_full_backward_hook(lambda *_: seen.append(under_way()))
            model.down.register_forward_hook(lambda *_: seen.append(under_way()))
        model(x).to_local().sum().backward()

    def under_way() -> Counter[str]:
        return Counter(event.op for event in world.trace.events if event.rank == 0 and event.op in KINDS)

    with sim.world(2) as world:
        world.run(body)
    forward, backward = seen[:4], seen[4:]
    for half in (forward, backward):
        assert [each["all_gather"] - half[0]["all_gather"] for each in half] == [0] * 4
        assert [each["reduce_scatter"] - half[0]["reduce_scatter"] for each in half] == [0, 1, 2, 3]


@sim.ranks(2, backends=("sim",))
def test_a_copied_model_runs_its_own_code(ctx) -> None:
    model, x = sharded(PLAIN, chunks=2)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not (bool(full_tensor(other(x)).any()))
    assert full_tensor(model(x)).any()


def test_what_computes_a_chunk_is_compiled() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph

    def body() -> list[list[torch.Tensor]]:
        found = []
        for compiles in (False, True):
            model, x = sharded(Case(1, 2, 1, 8, 3, 6, False, False, False), chunks=2)
            if compiles:
                model.compile(backend=backend)
            loss = model(x).pow(2).sum()
            found.append([full_tensor(grad).detach() for grad in torch.autograd.grad(loss, [x, *model.parameters()])])
        return found

    eager, compiled = sim.run(body, world_size=2)[0]
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert any(graph.count("linear") >= 3 and "silu" in graph for graph in graphs)


class Two(Block):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x) if y is None else (super().forward(x), y)


CUT = {
    "input_plan": {"input": ("dp", "None", "None")},
    "local_plan": {"": (Replicate(), Partial())},
    "output_plan": {"output": ("dp", "tp", "None")},
    "chunks": {"": 2},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": {"": 0}}, "chunks[''] must be a finite number of at least 1"),
        ({"chunks": {"": 2.5}}, "chunks['']"),
        ({"chunks": {"": (2, 0, 1)}}, "chunks['']"),
        ({"chunks": {"": (0, 1)}}, "chunks[''] must be a finite number of at least 1"),
        ({"chunks": {"": (2, -1)}}, "the dim of chunks[''] must be a finite number of at least 0"),
        ({"chunks": {"": (2, 2)}}, "dim 2, along which it is to be cut, is behind"),
        ({"chunks": {"upp": 2}}, "'up'"),
        ({"chunks": {"up": 2}}, "module 'up' does not compute on local tensors, whose input alone can be cut"),
        ({"output_plan": None}, "input_plan, local_plan and output_plan need one layout each"),
        ({"local_plan": {"": ("dp", "None", "None")}}, "its result is to be a pending sum"),
        ({"input_plan": {"input": ("dp", "None", "tp")}}, "over axis 'tp' its input is not gathered"),
        ({"input_plan": {"input": ("None", "None", "None")}}, "over axis 'dp' its input is not gathered"),
        ({"output_plan": {"output": (Shard(0), Shard(-2))}}, "counted from the last"),
        ({"reshard_inputs": [""]}, "its input would be gathered again whole"),
    ],
)
@sim.ranks(4, backends=("sim",))
def test_what_cannot_be_cut_is_refused(ctx, changes: dict[str, Any], message: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    local = {"": (Shard(0), Partial())}
    with pytest.raises((ValueError, TypeError)) as caught:
        shard_module(PLAIN.made()[0], mesh, ShardingPlan(**{**CUT, "local_plan": local, **changes}))
    text = str(caught.value)
    assert message in text
    assert "try: " in text


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda model, x: model(x, x), "its rows are those of one tensor"),
        (lambda model, x: model(x.flatten(0, 1)), "dim 1, which is the last one"),
    ],
)
@sim.ranks(2, backends=("sim",))
def test_what_is_called_otherwise_is_refused(ctx, give: Any, message: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    layout = Layout.from_device_mesh(mesh)
    plan = ShardingPlan(
        plan=dict.fromkeys(("*.weight", "*.bias"), layout()),
        input_plan={"input": ("dp",)},
        local_plan={"": layout("dp", partial={"tp": "sum"})},
        output_plan={"output": ("dp", "tp")},
        chunks={"": 2},
    )
    model = shard_module(Two(3, 5, True).double(), mesh, plan)
    with pytest.raises((ValueError, TypeError)) as caught:
        give(model, distribute_tensor(PLAIN.made()[1], layout()))
    text = str(caught.value)
    assert message in text
    assert "try: no entry in chunks for it" in text


class Attention(nn.Module):
    """Causal attention with a bias for positions, which all sequences share; a rank along tp has one of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.out = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * scale + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def attended(batch: int, seq: int, dp: int, chunks: Cut, by_name: bool, masks: int = 1) -> list[torch.Tensor]:
    """Return the result and all gradients; without ranks, of one device."""
    torch.manual_seed(0)
    model, x = Attention().double(), torch.randn(batch, seq, 4, dtype=torch.float64)
    bias = torch.randn(masks, 1, seq, seq, dtype=torch.float64)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
        layout = Layout.from_device_mesh(mesh)
        plan = ShardingPlan(
            plan={f"{name}.weight": ("tp", "None") for name in "qkv"} | {"out.weight": ("None", "tp")},
            input_plan={"input": {"x": ("dp", "None", "None")}},
            local_plan={"": layout("dp", "None", "None", partial={"tp": "sum"})},
            output_plan={"output": ("dp", "tp", "None")},
            chunks={"": chunks},
        )
        model, x = shard_module(model, mesh, plan), distribute_tensor(x, layout("dp", "tp", "None"))
        bias = distribute_tensor(bias, layout())
    x.requires_grad_(), bias.requires_grad_()
    result = model(bias=bias, x=x, scale=0.5) if by_name else model(x, bias, scale=0.5)
    grads = torch.autograd.grad(result.pow(2).sum(), [x, bias, *model.parameters()])
    return [full_tensor(each).detach() if dist.is_initialized() else each.detach() for each in (result, *grads)]


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 2]), st.integers(1, 4), st.booleans())
def test_attention_in_chunks_of_sequences_is_that_of_one_device(
    batch: int, seq: int, dp: int, count: int, by_name: bool
) -> None:
    wanted = attended(batch, seq, dp, None, by_name)
    with sim.world(2 * dp) as world:
        found = world.run(attended, (batch, seq, dp, (count, 0), by_name))
    for each in found:
        for ours, theirs in zip(each, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    if batch % dp == 0 and seq % 2 == 0:  # as many chunks as cut a rank's sequences evenly, there and back
        chunks = max(number for number in range(1, count + 1) if batch // dp % number == 0)
        assert sum(event.op == "reduce_scatter" for event in world.trace.of_rank(0)) == 2 * chunks


@pytest.mark.parametrize(("count", "message"), [(2, "must match the size"), (4, "returns no tensor with the rows")])
def test_arguments_with_something_for_each_sequence_are_an_error(count: int, message: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        sim.run(attended, 2, (4, 2, 1, (count, 0), False, 4))


@sim.ranks(2, backends=("sim",))
def test_second_derivatives_of_chunks_are_refused_by_torch(ctx) -> None:
    model, x = sharded(PLAIN, chunks=2)
    (first,) = torch.autograd.grad(model(x).pow(2).sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.pow(2).sum().backward()
