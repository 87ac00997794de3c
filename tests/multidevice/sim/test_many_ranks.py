"""1,024 ranks in one process: communication, a training step, and the memory they take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import sim
from hyper_parallel import fully_shard
from sim.comm import collectives

pytestmark = pytest.mark.sim

RANKS = 1024
GIB = 24  # what the whole process may take


def total() -> float:
    dist.all_reduce(x := torch.tensor([float(dist.get_rank())]))
    return x.item()


def uneven() -> tuple[float, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [1 + (rank + other) % 3 for other in range(size)]  # sent to each, and received from each
    received = torch.empty(sum(rows), 2)
    dist.all_to_all_single(received, torch.full((sum(rows), 2), float(rank)), rows, rows)
    expected = torch.repeat_interleave(torch.arange(float(size)), torch.tensor(rows))
    assert torch.equal(received, torch.stack([expected, expected], dim=1))
    return received.sum().item(), sum(rows)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 1024), nn.MaxPool1d(64), nn.Linear(16, 1024))


def step(shard) -> float:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    sharded = model()
    for layer in (sharded[0], sharded[2]):
        shard(layer, mesh=mesh)
    shard(sharded, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1, fused=True)
    x = torch.ones(2, 16)
    sharded(x).square().mean().backward()
    optimizer.step()
    return sharded(x).square().mean().item()


def alone() -> float:
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    x = torch.ones(2, 16)
    plain(x).square().mean().backward()
    optimizer.step()
    return plain(x).square().mean().item()


def step_of_ours() -> float:
    return step(fully_shard)


def step_of_torchs() -> float:
    return step(torch_fully_shard)


def peak_gib(of: str) -> float:
    """The most memory that a process takes in which `of` runs on all ranks, after it has found nothing wrong."""
    code = (
        "import resource, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import test_many_ranks\ntest_many_ranks.{of}()\n"
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


def check_communication() -> None:
    assert sim.run(total, RANKS) == [RANKS * (RANKS - 1) / 2] * RANKS
    assert len(sim.run(uneven, RANKS)) == RANKS


def check_ours() -> None:
    assert sim.run(step_of_ours, RANKS) == pytest.approx([alone()] * RANKS, rel=1e-4)


def check_torchs() -> None:
    assert sim.run(step_of_torchs, RANKS) == pytest.approx([alone()] * RANKS, rel=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
@pytest.mark.parametrize("check", ["check_communication", "check_ours", "check_torchs"])
def test_1024_ranks(check):
    assert peak_gib(check) < GIB


# -- what makes that possible: among many ranks, no n * n views ---------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 33, 65])
def test_an_uneven_all_to_all_of_any_number_of_ranks(ranks):
    assert [rows for _, rows in sim.run(uneven, ranks)] == [
        sum(1 + (rank + other) % 3 for other in range(ranks)) for rank in range(ranks)
    ]


def some_send_nothing(dtype: torch.dtype) -> list[int]:
    """What a rank receives as bytes, so that all dtypes can be compared."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [(rank * other) % 3 for other in range(size)]
    rows = sum(sent)
    give = (torch.arange(rows * 2).view(rows, 2) + rank).to(dtype)
    take = torch.zeros(rows, 2).to(dtype)
    dist.all_to_all_single(take, give, sent, sent)
    return take.view(torch.uint8).flatten().tolist()


DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_moved_as_copies_would_be(dtype, monkeypatch):
    monkeypatch.setattr(collectives, "_MANY", 1)
    at_once = sim.run(some_send_nothing, 5, args=(dtype,))
    monkeypatch.setattr(collectives, "_MANY", 99)
    assert at_once == sim.run(some_send_nothing, 5, args=(dtype,))


@pytest.mark.parametrize("many", [1, 99])
def test_splits_that_do_not_fit(many, monkeypatch):
    monkeypatch.setattr(collectives, "_MANY", many)

    def body() -> None:
        rank = dist.get_rank()
        sent = [2, 1, 0] if rank == 1 else [1, 1, 1]
        dist.all_to_all_single(torch.empty(3, 4), torch.ones(3, 4), [1, 1, 1], sent)

    with pytest.raises(sim.CollectiveMismatch, match="rank 1 sends 8 elements to rank 0, which expects 4"):
        sim.run(body, 3)


@pytest.mark.parametrize("reduce_op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_a_reduce_scatter_of_small_parts_adds_in_the_same_order(reduce_op, dtype, monkeypatch):
    def body() -> list[float]:
        rank, size = dist.get_rank(), dist.get_world_size()
        given = (torch.rand(size * 7, generator=torch.Generator().manual_seed(rank)) * 100).to(dtype)
        out = given[7 * rank : 7 * rank + 7] if rank == 1 else torch.empty(7, dtype=dtype)
        dist.reduce_scatter_tensor(out, given, op=reduce_op)
        return out.tolist()

    at_once = sim.run(body, 5)
    monkeypatch.setattr(collectives, "_has_small_parts", lambda calls: False)
    assert at_once == sim.run(body, 5)
