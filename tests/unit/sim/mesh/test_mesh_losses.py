"""Losses: the same number and gradients however they are computed, and the bytes per logit that each way takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import sim
from benchmarks.published.losses import KINDS, Loss, fuse_head
from sim.mesh.program import Alloc, Comm, Free, Op
from sim.mesh.tracing.fusion import fuse_events
from sim.mesh.tracing.kernels import AcceleratorKernels, _rms_norm
from sim.mesh.tracing.lone import LoneWorld
from sim.mesh.tracing.record import Recorder

_ROWS, _CLASSES = 512, 4096


def _logits(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 16, generator=generator).to(dtype).requires_grad_()
    return logits, torch.randint(16, (2, 6), generator=generator)


def _bytes_per_logit(recorder: Recorder, logits: int) -> float:
    live, most = dict[int, int](), 0
    for event in fuse_events(recorder.cut(), recorder.places, recorder.sizes):
        if isinstance(event, Alloc):
            live[event.block] = event.bytes
        elif isinstance(event, Free):
            live.pop(event.block, None)
        most = max(most, sum(live.values()))
    return most / logits


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_cross_entropy(kind: str) -> None:
    logits, targets = _logits()
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    found = Loss(kind)(logits, targets)
    torch.testing.assert_close(found, wanted)
    gradient = torch.autograd.grad(found, logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, logits))


@pytest.mark.sim
@pytest.mark.parametrize("kind", KINDS)
def test_split_classes_give_the_same_loss(kind: str) -> None:
    def body() -> tuple[torch.Tensor, torch.Tensor]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        logits, targets = _logits()
        part = logits.detach().chunk(4, -1)[mesh.get_local_rank()].clone().requires_grad_()
        loss: Any = Loss(kind)(DTensor.from_local(part, mesh, [Shard(2)]), targets)
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        loss.backward()
        assert part.grad is not None
        return loss.detach(), part.grad

    logits, targets = _logits()
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    wanted.backward()
    results = sim.run(body, world_size=4)
    for loss, _ in results:
        torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in results], -1), logits.grad)


@pytest.mark.parametrize(
    ("kind", "least"), [("library", 8), ("eager", 12), ("in-place", 10), ("chunked", 6.5), ("compiled", 4)], ids=str
)
def test_bytes_per_logit(kind: str, least: float) -> None:
    recorder = Recorder()
    with recorder.recording():
        hidden = torch.zeros(1, _ROWS, _CLASSES, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(1, _ROWS, dtype=torch.int64)
        for _ in range(2):
            hidden.grad = None
            recorder.cut()
            logits = hidden * 2
            loss = Loss(kind)(logits, targets)
            del logits
            loss.backward()
            del loss
    assert least <= _bytes_per_logit(recorder, _ROWS * _CLASSES) <= least + 0.1


@pytest.mark.parametrize(("kind", "least", "most"), [("eager", 16, 16.1), ("in-place", 10, 10.1), ("compiled", 4, 6.1)])
def test_bytes_per_logit_of_split_classes(kind: str, least: float, most: float) -> None:
    recorder = Recorder()

    def body() -> list[Any]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        with recorder.recording():
            part = torch.zeros(1, _ROWS, _CLASSES // 4, dtype=torch.bfloat16, requires_grad=True)
            targets = torch.zeros(1, _ROWS, dtype=torch.int64)
            recorder.cut()
            loss: Any = Loss(kind)(DTensor.from_local(part * 2, mesh, [Shard(2)]), targets)
            (loss.to_local() if isinstance(loss, DTensor) else loss).backward()
        return [event for event in recorder.events if isinstance(event, Comm)]

    with LoneWorld(4, 0, recorder) as world:
        calls = world.run_alone(body)
    assert {call.op for call in calls} == {"all_reduce"}
    assert sum(call.size for call in calls) == 3 * _ROWS * 4  # a maximum and two sums for each row
    assert least <= _bytes_per_logit(recorder, _ROWS * _CLASSES // 4) <= most


def test_the_compiled_loss_is_a_few_kernels() -> None:
    recorder = Recorder()
    with recorder.recording():
        logits = torch.zeros(1, _ROWS, _CLASSES, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(1, _ROWS, dtype=torch.int64)
        Loss("compiled")(logits, targets).backward()
    events = fuse_events(recorder.cut(), recorder.places, recorder.sizes)
    large = [event for event in events if isinstance(event, Op) and event.bytes >= logits.numel() and event.reads]
    assert [event.kind for event in large] == ["fused"] * len(large)
    assert sum(event.bytes for event in large) <= 1.1 * 8 * logits.numel()  # read three times at most, and written once


def test_a_recipe_has_its_loss() -> None:
    assert Loss.of(SimpleNamespace(loss="eager", zero=3)).kind == "eager"  # type: ignore[arg-type]
    assert Loss.of(SimpleNamespace(loss="eager-kept", zero=3)).kind == "eager"  # type: ignore[arg-type]
    assert Loss.of(SimpleNamespace(loss="compiled", zero=1)).kind == "compiled"  # type: ignore[arg-type]
    assert Loss.of(SimpleNamespace(loss="eager", zero=1)).kind == "in-place"  # type: ignore[arg-type]


# -- head and loss in one --------------------------------------------------------------------------------------------


class _Model(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits


@pytest.mark.parametrize("bias", [False, True])
def test_head_and_loss_in_one_give_the_same_gradients(bias: bool) -> None:
    torch.manual_seed(0)
    model, hidden = _Model(bias), torch.randn(2, 6, 8, requires_grad=True)
    given = [hidden, *model.parameters()]
    wanted = Loss()(model(hidden), torch.zeros(2, 6, dtype=torch.int64))
    gradients = torch.autograd.grad(wanted, given)
    fuse_head(model, chunk=5)
    losses = model(hidden)
    assert losses.shape == (2, 6)
    found = Loss()(losses, torch.zeros(2, 6, dtype=torch.int64))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, given), gradients)


@pytest.mark.tier("test")
def test_head_and_loss_in_one_never_have_all_logits() -> None:
    recorder = Recorder()
    with recorder.recording():
        model = nn.Module()
        model.head = nn.Linear(64, _CLASSES, bias=False, dtype=torch.bfloat16)
        fuse_head(model)
        hidden = torch.zeros(1, _ROWS, 64, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(1, _ROWS, dtype=torch.int64)
        recorder.cut()
        loss = Loss()(model.head(hidden), targets)
        loss.backward()
    kinds = [event.flops for event in recorder.events if isinstance(event, Op) and event.kind == "matmul"]
    assert sum(kinds) == 3 * 2 * _ROWS * _CLASSES * 64
    assert _bytes_per_logit(recorder, _ROWS * _CLASSES) < 1


def test_a_stage_without_a_head_is_left_as_it_is() -> None:
    model = _Model()
    model.head = None  # type: ignore[assignment]
    fuse_head(model)
    assert model.head is None


def test_a_model_without_a_linear_head_is_refused() -> None:
    with pytest.raises(ValueError, match="no linear layer named head") as caught:
        fuse_head(nn.Linear(2, 2))
    assert "try: PublishedRecipe(fused_loss=False)" in str(caught.value)


@pytest.mark.sim
def test_a_head_that_is_split_over_ranks_is_refused() -> None:
    def body() -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = _Model()
        model.head.weight = nn.Parameter(DTensor.from_local(torch.zeros(8, 8), mesh, [Shard(0)]))
        with pytest.raises(ValueError, match="tensor parallelism splits") as caught:
            fuse_head(model)
        return str(caught.value)

    assert all("tp: 2 ranks" in text for text in sim.run(body, world_size=2))


# -- what accelerators have kernels for ------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_norm_and_dropout_are_one_kernel_each() -> None:
    recorder = Recorder()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with recorder.recording(), AcceleratorKernels():
        norm = nn.RMSNorm(64, dtype=torch.bfloat16)
        x = torch.zeros(2, 8, 64, dtype=torch.bfloat16, requires_grad=True)
        recorder.cut()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = F.dropout(norm(x), 0.1)
            q = y.view(2, 8, 4, 16).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        y.sum().backward()
        assert norm.weight.grad is not None
        assert norm.weight.grad.shape == (64,)
    names = [event.name for event in recorder.cut() if isinstance(event, Op)]
    assert names[:2] == ["sim._fused_rms_norm", "aten.native_dropout"]
    assert names[-1] == "sim._fused_rms_norm_backward"
    assert [(tuple(t.shape), t.dtype) for t in kept[:4]] == [
        ((2, 8, 64), torch.bfloat16),
        ((64,), torch.bfloat16),
        ((2, 8, 1), torch.float32),
        ((2, 8, 64), torch.bool),
    ]


def test_the_norms_kernel_computes_the_norm() -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(3, 4, 8, requires_grad=True), nn.RMSNorm(8, eps=1e-5)
    wanted, found = norm(x), _rms_norm(x, (8,), norm.weight, 1e-5)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn(3, 4, 8)
    torch.testing.assert_close(
        torch.autograd.grad(found, [x, norm.weight], gradient), torch.autograd.grad(wanted, [x, norm.weight], gradient)
    )


def test_real_tensors_and_other_weights_are_computed_as_ever() -> None:
    with AcceleratorKernels():
        assert torch.equal(F.rms_norm(torch.ones(2, 4), (4,)), torch.rms_norm(torch.ones(2, 4), (4,)))
        with FakeTensorMode():
            with pytest.warns(UserWarning, match="Mismatch dtype"):
                assert F.rms_norm(torch.ones(2, 4, dtype=torch.bfloat16), (4,), torch.ones(4)).shape == (2, 4)
            assert F.dropout(torch.ones(2), 0.5, training=False).shape == (2,)
