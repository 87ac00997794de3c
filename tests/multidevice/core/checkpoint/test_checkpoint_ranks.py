"""Checkpoints on real ranks: training that goes on as if nothing had happened, meshes that change, files that break."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import sim
from hyper_parallel.core.checkpoint import (
    Checkpointer,
    CheckpointError,
    load_checkpoint,
    load_optimizer_scalars,
    model_tensors,
    optimizer_targets,
    optimizer_tensors,
    read_metadata,
    save_checkpoint,
)
from hyper_parallel.core.checkpoint.files import BLOCK
from hyper_parallel.core.checkpoint.folders import LEASE
from hyper_parallel.core.fully_shard import fully_shard, get_model_state_dict
from hyper_parallel.core.redistribute import full_tensor

pytestmark = pytest.mark.tier("test")


class Net(nn.Module):
    """Odd sizes, a buffer, a frozen weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.blocks[0].bias.requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        x = self.down(torch.tanh(self.up(x)))
        for block in self.blocks:
            x = x + block(x)
        return x


def build(ctx, sizes, make=lambda params: torch.optim.AdamW(params, lr=0.1, fused=True)):
    names = ("dp_replicate", "dp_shard")[-len(sizes) :]
    mesh = init_device_mesh(ctx.device_type, sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    model = Net().to(ctx.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, make([param for param in model.parameters() if param.requires_grad])


def train(ctx, model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + ctx.rank)).to(ctx.device)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen += 1
        losses.append(loss.item())
    return losses


def state_of(model, optimizer):
    tensors, groups = optimizer_tensors(model, optimizer)
    return {**model_tensors(model), **tensors}, {"optimizer": groups}


def load_into(checkpointer, model, optimizer, **options):
    metadata = read_metadata(checkpointer.latest())
    tensors = {**model_tensors(model), **optimizer_targets(model, optimizer, metadata)}
    extra = checkpointer.load(tensors, **options)
    load_optimizer_scalars(optimizer, extra["optimizer"])
    return extra


@sim.ranks(4)
def test_training_goes_on_as_if_it_had_never_stopped(ctx, tmp_path):
    model, optimizer = build(ctx, (4,))
    train(ctx, model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.05
    rng = torch.get_rng_state()
    with Checkpointer(tmp_path / "run", async_save=True) as checkpointer:
        tensors, extra = state_of(model, optimizer)
        assert checkpointer.save(2, tensors, {**extra, "step": 2}, per_rank={"rng": rng}) is None
        uninterrupted = train(ctx, model, optimizer, range(2, 5))  # changes what is being written
        saved = checkpointer.wait()
        assert saved.path == checkpointer.latest() == tmp_path / "run" / "step-00000002"
        whole = {name: full_tensor(value) for name, value in get_model_state_dict(model).items() if value.dim()}

        again, optimizer = build(ctx, (4,))  # no step made: it has no state yet
        assert not optimizer.state
        rng_again = torch.zeros_like(rng)
        extra = load_into(checkpointer, again, optimizer, per_rank={"rng": rng_again})
        assert (extra["step"], optimizer.param_groups[0]["lr"], again.seen.item()) == (2, 0.05, 2)
        assert torch.equal(rng, rng_again)
        assert train(ctx, again, optimizer, range(2, 5)) == uninterrupted
        for name, value in get_model_state_dict(again).items():
            assert not value.dim() or torch.equal(full_tensor(value), whole[name]), name


@sim.ranks(4)
def test_another_mesh_and_steps_already_made(ctx, tmp_path):
    def sgd(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    model, optimizer = build(ctx, (4,), sgd)
    train(ctx, model, optimizer, range(2))
    checkpointer = Checkpointer(tmp_path / "run")
    tensors, extra = state_of(model, optimizer)
    assert checkpointer.save(7, tensors, extra).error is None
    expected = {name: full_tensor(value) if value.dim() else value.clone() for name, value in tensors.items()}
    other, optimizer = build(ctx, (2, 2), sgd)
    train(ctx, other, optimizer, range(3))  # the state is there, and must be overwritten
    load_into(checkpointer, other, optimizer)
    tensors, _ = state_of(other, optimizer)
    assert list(tensors) == list(expected)
    for name, value in tensors.items():
        assert torch.equal(full_tensor(value) if value.dim() else value, expected[name]), name
    checkpointer.close()


@sim.ranks(4)
def test_stages_and_meshes_of_their_own(ctx, tmp_path):
    """Pairs of ranks hold other names; one tensor lies on one rank's mesh, and all save and load together."""
    world = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("pp", "tp"))
    stage, mesh = ctx.rank // 2, world["tp"]

    def tensors(of, mesh, fill):
        return {
            f"layers.{of}.weight": distribute_tensor(
                torch.full((5, 3), float(fill), device=ctx.device), mesh, [Shard(0)], src_data_rank=None
            ),
            f"layers.{of}.scale": distribute_tensor(
                torch.full((2,), float(fill), device=ctx.device), mesh, [Replicate()], src_data_rank=None
            ),
            "shared": torch.tensor([3.0, 1.0], device=ctx.device) * bool(fill),
        }

    save_checkpoint(tmp_path / "c", tensors(stage, mesh, stage + 1), step=3)
    metadata = read_metadata(tmp_path / "c")
    names = [f"layers.{of}.{kind}" for of in range(2) for kind in ("scale", "weight")]
    assert sorted(metadata.tensors) == [*names, "shared"]
    assert (metadata.step, metadata.world_size, metadata.tensors["layers.1.weight"].shape) == (3, 4, (5, 3))
    swapped = tensors(1 - stage, mesh, 0)
    load_checkpoint(tmp_path / "c", swapped)
    for name, value in swapped.items():
        want = torch.tensor([3.0, 1.0]) if name == "shared" else torch.full(value.shape, 2.0 - stage)
        assert torch.equal((value if name == "shared" else full_tensor(value)).cpu(), want), name
    with pytest.raises(ValueError, match=r"no rank asks for 'layers\.1\.scale', nor for 1 others") as caught:
        load_checkpoint(tmp_path / "c", tensors(0, mesh, 0))
    texts = [None] * 4
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    load_checkpoint(tmp_path / "c", tensors(0, mesh, 0), strict=False)


def damage(kind, folder, other):
    """Break a checkpoint; return the name of the file that an error must name."""
    file = folder / "data-00001.safetensors"
    size = file.stat().st_size
    if kind == "truncated":
        with file.open("r+b") as opened:
            opened.truncate(size - 1)
    elif kind == "longer":
        with file.open("ab") as opened:
            opened.write(b"x")
    elif kind in ("last bit", "header bit", "length bit", "record bit", "record truncated"):
        file = folder / "checkpoint.json" if kind.startswith("record") else file
        data = bytearray(file.read_bytes())
        at = {"last bit": -1, "header bit": 40, "length bit": 0, "record bit": len(data) // 2}.get(kind, 0)
        data[at] ^= 1
        file.write_bytes(data[: len(data) // 3] if kind == "record truncated" else data)
    elif kind == "missing":
        file.unlink()
    elif kind == "pickle":
        raw = pickle.dumps({"weight": Trap()})
        file.write_bytes(raw + b"\0" * (size - len(raw)))
    elif kind == "foreign":
        shutil.copy(other / file.name, file)
    elif kind == "no record":
        file = folder / "checkpoint.json"
        file.unlink()
    return file.name


class Trap:
    """Does harm when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a file of a checkpoint has been unpickled",))


SEEN = {
    "truncated": "is not as long as when it was written",
    "longer": "is not as long as when it was written",
    "last bit": "is damaged",
    "header bit": "is damaged",
    "length bit": "is damaged, or not a safetensors file",
    "record bit": "is damaged",
    "record truncated": "is damaged",
    "missing": "is missing or cannot be read",
    "pickle": "is damaged, or not a safetensors file",
    "foreign": "belongs to another checkpoint",
    "no record": "which is written when all else is complete",
}


@sim.ranks(3)
def test_what_is_broken_is_found_before_anything_changes(ctx, tmp_path):
    mesh = init_device_mesh(ctx.device_type, (3,), mesh_dim_names=("dp",))

    def tensors(fill):
        full = torch.full((7, 300), float(fill), device=ctx.device)
        return {"w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)}

    for name in ("right", "other"):  # of the same sizes, under the same names
        save_checkpoint(tmp_path / name, tensors(1))
    for kind, seen in SEEN.items():
        folder = tmp_path / kind
        if ctx.rank == 0:
            shutil.copytree(tmp_path / "right", folder)
            name = damage(kind, folder, tmp_path / "other")
        dist.barrier()
        target = tensors(5)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(folder, target)
        texts = [None] * 3
        dist.all_gather_object(texts, str(caught.value))
        assert len(set(texts)) == 1, f"{kind}: not the same on all ranks: {texts}"
        if ctx.rank == 0:
            assert seen in texts[0], texts[0]
            assert name in texts[0], texts[0]
            assert str(folder) in texts[0]
            assert "\n  try: " in texts[0]
        assert torch.equal(target["w"].to_local(), tensors(5)["w"].to_local()), f"{kind}: half loaded"
    load_checkpoint(tmp_path / "right", tensors(5))


@sim.ranks(3)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_run_goes_on(ctx, tmp_path):
    mesh = init_device_mesh(ctx.device_type, (3,), mesh_dim_names=("dp",))
    full = torch.arange(21.0, device=ctx.device).reshape(7, 3)
    tensors = {"w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)}

    def full_disk(stage):
        if stage == "sync" and ctx.rank == 1 and failing:
            raise OSError(28, "No space left on device")

    for async_save in (False, True):
        failing = False
        with Checkpointer(tmp_path / str(async_save), async_save=async_save, on_stage=full_disk) as checkpointer:
            checkpointer.save(1, tensors)
            checkpointer.wait()
            failing = True
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                saved = checkpointer.save(2, tensors)
                saved = checkpointer.wait() if async_save else saved
            assert (saved.step, saved.path) == (2, None)
            assert "'data-00001.safetensors' could not be written: No space left on device" in saved.error
            assert "try: free space under" in saved.error
            assert any("step 2 has not been saved" in str(one.message) for one in caught) == (ctx.rank == 0)
            assert checkpointer.latest().name == "step-00000001"
            dist.barrier()
            there = sorted(path.name for path in (tmp_path / str(async_save)).iterdir())
            assert there == [LEASE, "step-00000001"]
            dist.barrier()
            failing = False
            checkpointer.save(3, tensors)
            assert checkpointer.wait() is None or async_save
            assert checkpointer.latest().name == "step-00000003"

    failing = True
    checkpointer = Checkpointer(tmp_path / "raises", on_error="raise", on_stage=full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpointer.save(1, tensors)
    checkpointer.close()

    mistaken = {"w": tensors["w"], "mine": "text"} if ctx.rank == 2 else tensors
    with pytest.raises(TypeError, match="'mine' is a str, not a tensor"):
        save_checkpoint(tmp_path / "mistaken", mistaken)
    with pytest.raises(ValueError, match="'x' is not the same tensor on all ranks"):
        save_checkpoint(tmp_path / "mistaken", {"x": torch.zeros(ctx.rank + 1)})
    assert not (tmp_path / "mistaken").exists()


@pytest.mark.sim
@pytest.mark.parametrize("async_save", [False, True])
def test_no_rank_is_left_waiting_if_the_first_cannot_look_into_the_folder(tmp_path, async_save):
    def body():
        checkpointer = Checkpointer(tmp_path / "run", async_save=async_save)
        if dist.get_rank() == 0:
            checkpointer._clean = lambda: os.listdir(tmp_path / "gone")
        ended = [checkpointer.save(1, {"w": torch.ones(3)}), checkpointer.wait()]
        checkpointer.__dict__.pop("_clean", None)
        ended += [checkpointer.save(2, {"w": torch.ones(3)}), checkpointer.wait()]
        checkpointer.close()
        return [(saved.step, saved.error) for saved in ended if saved is not None]

    with pytest.warns(UserWarning, match="step 1 has not been saved"):
        found = sim.run(body, 2)
    assert found[0] == found[1]
    (first, error), second = found[0]
    assert first == 1
    assert "No such file or directory" in error
    assert second == (2, None)


@sim.ranks(3)
def test_copies_that_differ_by_rank_are_named(ctx, tmp_path):
    """What is plain and has one name is written once, by any of its ranks: all must have the same."""
    right = {"w": torch.ones(5), "empty": torch.empty(0), "nan": torch.tensor(torch.nan)}
    mesh = init_device_mesh(ctx.device_type, (3,), mesh_dim_names=("dp",))
    full = torch.arange(21.0, device=ctx.device).reshape(7, 3)
    right["sharded"] = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    counters = {f"counter{number}": torch.full((3,), ctx.rank == 2) for number in range(4)}
    stage = {f"only on rank {ctx.rank}": torch.full((2,), float(ctx.rank))}
    last = torch.zeros(BLOCK // 8 + 100, dtype=torch.int64)  # of two blocks, of which the second begins in it
    last[-1] = int(ctx.rank == 1)

    def save(tensors):
        checkpointer.save(2, tensors)
        checkpointer.wait()

    for async_save in (False, True):
        with Checkpointer(tmp_path / str(async_save), async_save=async_save) as checkpointer:
            checkpointer.save(1, {**right, **stage})
            assert checkpointer.wait() is None or async_save
            for wrong, text in (
                (counters, r"'counter0' .*\n.*rank 0: (\w+), rank 1: \1, rank 2: .*\n  also: 3 more: 'counter1', "),
                (
                    {"last": last},
                    r"'last' is not the same on all ranks that have it\n  checksums: rank 0: (\w+), rank 1: ",
                ),
            ):
                with pytest.raises(ValueError, match=text) as caught:
                    save({**right, **wrong})
                texts = [None] * 3
                dist.all_gather_object(texts, str(caught.value))
                assert len(set(texts)) == 1
                assert "\n  try: per_rank={" in texts[0]
            assert checkpointer.latest().name == "step-00000001"
            checkpointer.save(2, right, per_rank={**counters, "last": last})
            checkpointer.wait()
            again = torch.zeros(3, dtype=torch.bool)
            checkpointer.load(right, per_rank={"counter1": again})
            assert again.tolist() == [ctx.rank == 2] * 3, "each rank's own"


@sim.ranks(3)
def test_a_second_run_in_a_folder_is_refused_on_all_ranks_alike(ctx, tmp_path):
    tensors = {"w": torch.full((3,), float(ctx.rank), device=ctx.device)}
    with Checkpointer(tmp_path / "run") as first, Checkpointer(tmp_path / "run") as second:
        first.acquire()
        assert first.save(1, {}, per_rank=tensors).error is None
        for use in (second.acquire, lambda: second.save(2, {}, per_rank=tensors)):
            with pytest.raises(CheckpointError, match="another run is using it") as caught:
                use()
            texts = [None] * 3
            dist.all_gather_object(texts, str(caught.value))
            assert len(set(texts)) == 1
        assert second.latest() == tmp_path / "run" / "step-00000001", "who only reads needs no lease"
        dist.barrier()
        first.close()
        assert second.save(2, {}, per_rank=tensors).error is None
    dist.barrier()
    assert not (tmp_path / "run" / LEASE).exists()


@sim.ranks(3)
def test_disks_that_hosts_do_not_share_are_noticed(ctx, tmp_path):
    """A rank on another disk has another folder of the same name; here the name is another."""
    own = tmp_path / ("here" if ctx.rank < 2 else "there")
    with Checkpointer(own) as checkpointer:
        for use in (checkpointer.acquire, lambda: checkpointer.save(1, {})):
            with pytest.raises(CheckpointError) as caught:
                use()
            texts = [None] * 3
            dist.all_gather_object(texts, str(caught.value).replace(str(own), "ROOT"))
            assert len(set(texts)) == 1
            assert texts[0].startswith(
                "cannot save to ROOT: 1 of 3 ranks do not see the file .lease.json that rank 0 has written\n"
                "  rank 2 on host '"
            )
            assert texts[0].endswith("\n  try: a folder on a file system that all ranks share")
            dist.barrier()
            assert not list(own.glob("*")), "nothing is left"
            dist.barrier()  # before rank 0 writes the next one
