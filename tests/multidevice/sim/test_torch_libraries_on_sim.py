"""The wider reach of torch's own parallelism on simulated ranks, also with late devices: every pipeline schedule, DDP's
and FSDP2's options, sequence and loss parallelism, checkpoints between worlds; each gives what one device gives.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import sim

pytestmark = pytest.mark.tier("test")

WIDTH, BATCH = 8, 16
BACKENDS = ("sim", "npu")


def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(7)).to(device)
    return x, y


def layers(count: int, device: torch.device | str = "cpu") -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))).to(device)


def alone(model: nn.Module, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients on one device."""
    x, y = batch(device)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_gradients(found: nn.Module, wanted: list[torch.Tensor], **tolerance: float) -> None:
    gradients = [full(p.grad) for p in found.parameters() if p.grad is not None]
    assert len(gradients) == len(wanted) > 0
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


# -- pipelining ------------------------------------------------------------------------------------------------

SCHEDULES = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@pytest.mark.parametrize("name", SCHEDULES)
@sim.ranks(2, backends=BACKENDS)
def test_pipeline_schedules(ctx, name):
    kind = pipelining.schedules.get_schedule_class(name)
    ranks, rank = ctx.world_size, ctx.rank
    if issubclass(kind, PipelineScheduleSingle):
        held = [rank]
    elif name in ("ZBVZeroBubble", "DualPipeV"):  # down the ranks and up again
        held = [rank, 2 * ranks - 1 - rank]
    else:
        held = [rank, rank + ranks]
    model = layers(ranks * len(held), ctx.device)
    loss, _ = alone(whole := copy.deepcopy(model), ctx.device)
    stages = [pipelining.PipelineStage(model[s], s, len(model), ctx.device) for s in held]
    single = not issubclass(kind, PipelineScheduleMulti)
    schedule = kind(stages[0] if single else stages, n_microbatches=8, loss_fn=F.mse_loss)
    x, y = batch(ctx.device)
    losses: list[torch.Tensor] = []
    inputs = (x,) if 0 in held else ()
    targets = {"target": y, "losses": losses} if len(model) - 1 in held else {}
    schedule.step(*inputs, **targets)
    if targets:
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
    for s in held:
        same_gradients(model[s], [p.grad for p in whole[s].parameters()])


# -- DistributedDataParallel -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["none", "allreduce", "fp16"])
@sim.ranks(4, backends=BACKENDS)
def test_ddp_in_buckets_with_hooks(ctx, hook):
    model = layers(3, ctx.device)
    _, wanted = alone(copy.deepcopy(model), ctx.device)
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0001, gradient_as_bucket_view=True)
    if hook == "allreduce":
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    elif hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    x, y = (mine(t) for t in batch(ctx.device))
    F.mse_loss(wrapped(x), y).backward()
    same_gradients(model, wanted, **({"rtol": 0.01, "atol": 1e-4} if hook == "fp16" else {"rtol": 1e-5, "atol": 1e-7}))


@sim.ranks(2, backends=BACKENDS)
def test_ddp_without_communication_for_a_while(ctx):
    model = layers(2, ctx.device)
    _, wanted = alone(copy.deepcopy(model), ctx.device)
    wrapped = nn.parallel.DistributedDataParallel(model)
    halves = [t.chunk(2) for t in (mine(batch(ctx.device)[0]), mine(batch(ctx.device)[1]))]
    for step, (x, y) in enumerate(zip(*halves, strict=True)):
        with wrapped.no_sync() if step == 0 else contextlib.nullcontext():
            (F.mse_loss(wrapped(x), y) / 2).backward()
    same_gradients(model, wanted)


class TwoWays(nn.Module):
    """A model of which each rank uses another part."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(layers(3))

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.ways[2](self.ways[way](x))


@sim.ranks(2, backends=BACKENDS)
def test_ddp_with_parameters_that_a_rank_does_not_use(ctx):
    model = TwoWays().to(ctx.device)
    whole = copy.deepcopy(model)
    x, y = (t.chunk(2) for t in batch(ctx.device))
    (sum(F.mse_loss(whole(x[way], way), y[way]) for way in (0, 1)) / 2).backward()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    F.mse_loss(wrapped(x[ctx.rank], ctx.rank), y[ctx.rank]).backward()
    same_gradients(model, [p.grad for p in whole.parameters()])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@sim.ranks(2, backends=("sim",))  # a late device has no sparse tensors
def test_ddp_with_sparse_gradients(ctx):
    torch.manual_seed(0)
    model = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
    words = torch.tensor([[1, 2, 3], [3, 3, 9], [0, 1, 1], [7, 8, 2]])
    whole = copy.deepcopy(model)
    whole(words).square().sum().backward()
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(mine(words)).square().sum().backward()
    assert model.weight.grad.is_sparse
    torch.testing.assert_close(model.weight.grad.to_dense() * 2, whole.weight.grad.to_dense())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@sim.ranks(3, backends=BACKENDS)
def test_an_optimizer_whose_state_is_spread_over_the_ranks(ctx):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = layers(3, ctx.device)
    whole = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    spread = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.1)
    plain = torch.optim.Adam(whole.parameters(), lr=0.1)
    x, y = batch(ctx.device)
    for _ in range(3):
        for trained, optimizer in ((wrapped, spread), (whole, plain)):
            optimizer.zero_grad()
            F.mse_loss(trained(x), y).backward()
            optimizer.step()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other)


# -- FSDP2 -----------------------------------------------------------------------------------------------------


RESHARDING = {
    "fsdp": ((4,), True),
    "fsdp that stays whole": ((4,), False),
    "fsdp to pairs of ranks": ((4,), 2),
    "hsdp": ((2, 2), True),
    "hsdp that stays whole": ((2, 2), False),
}


@pytest.mark.parametrize(("shape", "reshard"), RESHARDING.values(), ids=RESHARDING)
@sim.ranks(4, backends=BACKENDS)
def test_fsdp2_resharding(ctx, shape, reshard):
    mesh = init_device_mesh(
        ctx.device_type, shape, mesh_dim_names=("dp",) if len(shape) == 1 else ("replicate", "shard")
    )
    model = layers(3, ctx.device)
    _, wanted = alone(copy.deepcopy(model), ctx.device)
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    x, y = (mine(t) for t in batch(ctx.device))
    F.mse_loss(model(x), y).backward()
    same_gradients(model, wanted)


@sim.ranks(4, backends=BACKENDS)
def test_fsdp2_with_mixed_precision_and_accumulation(ctx):
    model = layers(2, ctx.device)
    _, wanted = alone(copy.deepcopy(model), ctx.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh(ctx.device_type, (4,)), mp_policy=policy)
    halves = [t.chunk(2) for t in (mine(batch(ctx.device)[0]), mine(batch(ctx.device)[1]))]
    for step, (x, y) in enumerate(zip(*halves, strict=True)):
        model.set_requires_gradient_sync(step == 1)
        out = model(x)
        assert out.dtype == torch.bfloat16
        (F.mse_loss(out.float(), y) / 2).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    same_gradients(model, wanted, rtol=0.05, atol=5e-3)


# -- DTensor ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.norm(x)).relu()))


@sim.ranks(4, backends=BACKENDS)
def test_sequence_and_loss_parallel(ctx):
    mesh = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("tp",))
    model = Block().to(ctx.device)
    whole = copy.deepcopy(model)
    x = batch(ctx.device)[0].reshape(2, 8, WIDTH)
    labels = torch.arange(16, device=ctx.device) % 12
    loss = F.cross_entropy(whole(x).flatten(0, 1), labels)
    loss.backward()
    sequence = Shard(1)
    plan = {
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=Replicate()),
        "down": RowwiseParallel(output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, {"up": ColwiseParallel()})
    with loss_parallel():
        found = F.cross_entropy(model(x.chunk(4, dim=1)[ctx.rank]).flatten(0, 1), labels)
        found.backward()
    torch.testing.assert_close(full(found), loss)
    same_gradients(model, [p.grad for p in whole.parameters()], rtol=1e-4, atol=1e-6)


# -- checkpoints -----------------------------------------------------------------------------------------------


def save_on_these_ranks(folder: str) -> None:
    model = layers(3)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)


def load_on_these_ranks(folder: str) -> bool:
    torch.manual_seed(99)
    wanted, model = layers(3), layers(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {f"{i}.0": ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i in range(3)}
    parallelize_module(model, mesh, plan)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    return all(torch.equal(full(one), other) for one, other in pairs)


@pytest.mark.sim
@pytest.mark.parametrize(("writers", "readers"), [(4, 2), (2, 4), (3, 8)])
def test_a_checkpoint_goes_to_a_world_of_another_size_and_plan(tmp_path, writers, readers):
    """From FSDP to tensor parallelism."""
    sim.run(save_on_these_ranks, writers, args=(str(tmp_path),))
    assert sim.run(load_on_these_ranks, readers, args=(str(tmp_path),)) == [True] * readers
