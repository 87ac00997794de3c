"""Gathered inputs that backward gathers again: gradients as on one device, and the memory is free after forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
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
    sizes = [draw(st.integers(1, 5)) for _ in range(4)]
    return Case(dp, tp, *sizes, *(draw(st.booleans()) for _ in range(3)))


def sharded(case: Case, reshards: bool) -> tuple[Block, torch.Tensor]:
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
    )
    return shard_module(model, mesh, plan), distribute_tensor(x, layout("dp", "tp", "None")).requires_grad_()


@settings(max_examples=12, deadline=None)
@given(cases())
def test_gradients_are_those_of_one_device(case: Case) -> None:
    model, x = case.made()
    wanted = case.gradients(model, x.requires_grad_())

    def body() -> list[torch.Tensor]:
        model, x = sharded(case, reshards=True)
        return [full_tensor(grad).detach() for grad in case.gradients(model, x)]

    for found in sim.run(body, world_size=case.dp * case.tp):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


PLAIN = Case(1, 2, 2, 4, 3, 5, True, False, False)


@pytest.mark.parametrize("reshards", [False, True])
def test_the_gathered_input_is_free_after_forward(reshards: bool) -> None:
    def body() -> list[bool]:
        model, x = sharded(PLAIN, reshards)
        kept = model(x)
        return [seen.expired() for seen in model.seen] + [kept.requires_grad]

    assert sim.run(body, world_size=2) == [[reshards, True]] * 2


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


def test_a_shard_that_was_changed_in_place_is_refused() -> None:
    def body() -> str:
        model, x = sharded(PLAIN, reshards=True)
        middle = x * 1.0
        loss = model(middle).to_local().sum()
        middle._local_tensor.add_(1)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        return str(caught.value)

    for text in sim.run(body, world_size=2):
        assert text.startswith("cannot gather an input of the model again: its shard was changed in place")
        assert "try: no in-place change" in text


def test_modules_on_dtensors_are_refused() -> None:
    def body() -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(ValueError) as caught:
            shard_module(PLAIN.made()[0], mesh, ShardingPlan(reshard_inputs=["up"]))
        return str(caught.value)

    for text in sim.run(body, world_size=2):
        assert "module 'up' does not compute on local tensors" in text
