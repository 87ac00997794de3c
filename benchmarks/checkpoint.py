"""What checkpoints cost: the time a save in the background takes from a step, and bytes per second beside the disk's.

Stall: two gloo processes train a Llama of 98 million parameters under `fully_shard`; the time that `Checkpointer.save`
takes on the main thread, beside the median of the steps in which nothing is saved or written.

Speed: 1 GiB in 64 matrices on four gloo processes. Saved split by rows; loaded split by columns, and as saved, each
time from the disk (the files are dropped from the page cache before). Raw: one process, or the four together, reads
the same files with O_DIRECT, 4 MiB at a time, whichever is faster; raw writing is 4 MiB at a time and one fsync per
file. Ours, torch's and raw take turns.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hyper_parallel as hp
from hyper_parallel.core.checkpoint import (
    Checkpointer,
    load_checkpoint,
    model_tensors,
    optimizer_tensors,
    save_checkpoint,
)
from hyper_parallel.models.llama import Llama, LlamaConfig

ROUNDS = 5
MATRICES, ROWS, COLUMNS = 64, 2048, 2048  # fp32: 16 MiB each
LLAMA_100M = LlamaConfig(
    vocab_size=8192,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=12,
    max_seq_len=512,
)
_READ = 4 * 2**20


# -- stall -----------------------------------------------------------------------------------------------------------


def stall(ranks: int = 2, sequences: int = 2, length: int = 512, saves: int = 4) -> dict[str, list[float]]:
    """Seconds, the slowest rank's: of steps with nothing going on, of steps with writing behind them, of saves."""
    return _on_gloo(_stall_rank, ranks, sequences, length, saves)


def _stall_rank(folder: Path, sequences: int, length: int, saves: int) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = Llama.build(LLAMA_100M)
    for layer in model.layers:
        hp.fully_shard(layer, mesh=mesh)
    hp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(LLAMA_100M.vocab_size, (sequences, length + 1))

    def step() -> float:
        begin = time.perf_counter()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return _slowest(time.perf_counter() - begin)

    step()
    found: dict[str, list[float]] = {"quiet": [], "writing": [], "save": [], "background": []}
    with Checkpointer(folder / "run", keep_last=1, async_save=True) as checkpointer:
        for number in range(saves):
            found["quiet"].append(step())
            dist.barrier()
            begin = time.perf_counter()
            tensors, groups = optimizer_tensors(model, optimizer)
            checkpointer.save(number, {**model_tensors(model), **tensors}, {"optimizer": groups})
            found["save"].append(_slowest(time.perf_counter() - begin))
            found["writing"].append(step())
            saved = checkpointer.wait()
            assert saved is not None
            assert saved.error is None, saved.error
            found["background"].append(_slowest(saved.seconds))
    return found


def stall_table() -> str:
    found = stall()
    quiet = float(np.median(found["quiet"]))
    first, later = found["save"][0], float(np.median(found["save"][1:]))
    millions = LLAMA_100M.num_parameters() / 1e6
    lines = [
        f"| Llama, {millions:.0f} million parameters; {12 * millions:,.0f} MB a save | seconds | share of a step |",
        "|---|--:|--:|",
        f"| step, nothing being saved | {quiet:.2f} | |",
        f"| `save` in the background: later ones | {later:.3f} | {later / quiet:.1%} |",
        f"| the first, which allocates the copies | {first:.3f} | {first / quiet:.1%} |",
        f"| step while the copies are written | {np.median(found['writing']):.2f} | "
        f"{np.median(found['writing']) / quiet:.0%} |",
        f"| writing them, in the background | {np.median(found['background']):.2f} | |",
    ]
    return "\n".join(lines)


# -- speed -----------------------------------------------------------------------------------------------------------


def speed(ranks: int = 4, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each contestant, the slowest rank's, by round."""
    return _on_gloo(_speed_rank, ranks, rounds)


def _speed_rank(folder: Path, rounds: int) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    rows, columns = _matrices(mesh, 0), _matrices(mesh, 1)
    for number, matrix in enumerate(rows.values()):
        matrix.to_local().random_(generator=torch.Generator().manual_seed(64 * dist.get_rank() + number))

    saves: dict[str, Callable[[Path], None]] = {
        "write ours": lambda path: save_checkpoint(path, rows),
        "write torch": lambda path: _torch_save(rows, path),
        "write raw": lambda path: _write_raw(path, rows),
    }
    loads: dict[str, Callable[[], object]] = {
        "raw, together": lambda: _read_raw(folder / "write ours", dist.get_rank(), dist.get_world_size()),
        "raw, alone": lambda: _read_raw(folder / "write ours", 0, 1) if dist.get_rank() == 0 else None,
        "load ours, by columns": lambda: load_checkpoint(folder / "write ours", columns),
        "load torch, by columns": lambda: dcp.load(columns, checkpoint_id=folder / "write torch"),
        "load ours, as saved": lambda: load_checkpoint(folder / "write ours", rows),
        "load torch, as saved": lambda: dcp.load(rows, checkpoint_id=folder / "write torch"),
    }
    found: dict[str, list[float]] = {name: [] for name in (*saves, *loads)}
    for _ in range(rounds):
        for name, save in saves.items():
            if dist.get_rank() == 0:
                shutil.rmtree(folder / name, ignore_errors=True)
                os.sync()
            found[name].append(_timed(lambda save=save, name=name: save(folder / name)))  # type: ignore[misc]
        for name, load in loads.items():
            if dist.get_rank() == 0:
                for written in ("write ours", "write torch"):
                    _drop_from_cache(folder / written)
            found[name].append(_timed(load))
    for number, matrix in enumerate(rows.values()):  # it has been loaded since, and was right each time
        wanted = torch.empty(matrix.to_local().shape)
        wanted.random_(generator=torch.Generator().manual_seed(64 * dist.get_rank() + number))
        assert torch.equal(matrix.to_local(), wanted)
    return found


def _matrices(mesh: hp.DeviceMesh, dim: int) -> dict[str, Any]:
    ranks = mesh.size()
    local = (ROWS // ranks, COLUMNS) if dim == 0 else (ROWS, COLUMNS // ranks)
    return {
        f"layers.{number}.weight": DTensor.from_local(torch.zeros(local), mesh, [Shard(dim)], run_check=False)
        for number in range(MATRICES)
    }


def _torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    dcp.save(tensors, checkpoint_id=path)  # its writer fsyncs, too


def _write_raw(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir(exist_ok=True)
    file = os.open(path / f"{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in tensors.values():
        data = memoryview(tensor.to_local().view(-1).view(torch.uint8).numpy())  # type: ignore[attr-defined]
        for begin in range(0, len(data), _READ):
            assert os.write(file, data[begin : begin + _READ]) == len(data[begin : begin + _READ])
    os.fsync(file)
    os.close(file)


def _read_raw(path: Path, rank: int, ranks: int) -> None:
    """Read every so-manieth file without the page cache."""
    buffer = mmap.mmap(-1, _READ)  # O_DIRECT wants it at the beginning of a page
    for name in sorted(os.listdir(path))[rank::ranks]:
        file = os.open(path / name, os.O_RDONLY | os.O_DIRECT)
        while os.readv(file, [buffer]):
            pass
        os.close(file)


def _drop_from_cache(path: Path) -> None:
    for name in os.listdir(path):
        file = os.open(path / name, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _timed(work: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    work()
    return _slowest(time.perf_counter() - begin)


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def speed_table() -> str:
    found = speed()
    size = MATRICES * ROWS * COLUMNS * 4
    median = {name: float(np.median(seconds)) for name, seconds in found.items()}
    raw_read = min(median["raw, together"], median["raw, alone"])
    lines = ["| 1 GiB, 4 gloo processes | GB/s | share of raw |", "|---|--:|--:|"]
    lines.append(f"| read raw, O_DIRECT | {size / raw_read / 1e9:.2f} | |")
    for name in ("load ours, by columns", "load ours, as saved", "load torch, by columns", "load torch, as saved"):
        lines.append(f"| {name} | {size / median[name] / 1e9:.2f} | {raw_read / median[name]:.0%} |")
    lines.append(f"| write raw, fsync | {size / median['write raw'] / 1e9:.2f} | |")
    for name in ("write ours", "write torch"):
        title = name.replace("write", "save")
        lines.append(f"| {title} | {size / median[name] / 1e9:.2f} | {median['write raw'] / median[name]:.0%} |")
    return "\n".join(lines)


# -- processes -------------------------------------------------------------------------------------------------------


def _on_gloo(body: Callable[..., dict[str, list[float]]], ranks: int, *args: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (ranks, folder, body, args), nprocs=ranks)
        return json.loads(Path(folder, "found.json").read_text())


def _rank_main(rank: int, ranks: int, folder: str, body: Callable[..., object], args: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = body(Path(folder), *args)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"{speed_table()}\n\n{stall_table()}")
