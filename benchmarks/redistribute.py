"""Redistribution beside torch's: bytes by counting, wall time side by side in one run, the cost of planning.

Bytes: every pair of layouts of a kind, or a seeded sample of them, planned by us and by torch's planner; a ratio is the
geometric mean over the pairs that must move anything. Wall time: both redistribute the same DTensor in turn, the order
drawn anew each time, timed from barrier to barrier, the slowest rank counts; a pair's figure is the ratio of the
medians, and the table has the geometric mean over the pairs. One intra-op thread.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import hyper_parallel as hp
import sim
from benchmarks.engine import timed
from hyper_parallel.core.machine import find_machine
from hyper_parallel.core.redistribute import lower_bound, plan
from hyper_parallel.core.redistribute.bounds import torch_plan

MESHES = ((2, 4), (2, 2, 2), (4, 2, 2))
SHAPES = {(2, "even"): (32, 48), (2, "uneven"): (33, 19), (3, "even"): (16, 32, 16), (3, "uneven"): (17, 9, 13)}
SAMPLE = 400
PAIRS, REPEATS = 50, 7
Pair = tuple[hp.Layout, hp.Layout]


# -- bytes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bytes:
    """Bytes received over the lower bound, for the pairs of one kind."""

    mesh: tuple[int, ...]
    kind: str
    pairs: int
    ours: list[float]
    torch: list[float]
    refused: int
    needless: int


def states(mesh: hp.Layout, ndim: int, *, ordered: bool, partial: bool) -> list[hp.Layout]:
    """All layouts of an ndim-D tensor on a mesh; with `ordered`, in every order of the axes of a dim."""
    found = []
    for roles in itertools.product(range(-1, ndim + partial), repeat=len(mesh.alias_name)):
        by_dim = [[n for n, role in zip(mesh.alias_name, roles, strict=True) if role == dim] for dim in range(ndim)]
        pending = {n: "sum" for n, role in zip(mesh.alias_name, roles, strict=True) if role == ndim}
        orders = [itertools.permutations(axes) if ordered else [tuple(axes)] for axes in by_dim]
        found += [mesh(*(axes or None for axes in chains), partial=pending) for chains in itertools.product(*orders)]
    return found


def count(sizes: tuple[int, ...], ndim: int, evenness: str, kind: str) -> Bytes:
    """Compare bytes for the pairs of one kind: "R/S", "ordered" or "partial"."""
    mesh, shape = hp.Layout(sizes, ("a", "b", "c")[: len(sizes)]), SHAPES[ndim, evenness]
    sources = states(mesh, ndim, ordered=kind == "ordered", partial=kind == "partial")
    targets = states(mesh, ndim, ordered=kind == "ordered", partial=False)
    pairs = [(s, t) for s in sources for t in targets if kind != "partial" or s.is_partial()]
    if kind == "ordered":
        pairs = [(s, t) for s, t in pairs if _is_reordered(s, ndim) or _is_reordered(t, ndim)]
    chosen = set(random.Random(0).sample(range(len(pairs)), min(SAMPLE, len(pairs))))
    ours, theirs, refused, needless = [], [], 0, 0
    for index, (src, dst) in enumerate(pairs):
        least = float(lower_bound(src, dst, shape, torch.float32).sum())
        moved = float(plan(src, dst, shape, torch.float32).recv_bytes.sum())
        assert least > 0 or moved == 0
        if least > 0:
            ours.append(moved / least)
        if index in chosen:
            other = torch_plan(src, dst, shape, torch.float32, device_type="cuda")
            if other.refused is not None:
                refused += 1
            elif least > 0:
                theirs.append(float(other.recv_bytes.sum()) / least)
            else:
                needless += bool(other.recv_bytes.sum())
    return Bytes(sizes, f"{ndim}-D {evenness}, {kind}", len(pairs), ours, theirs, refused, needless)


def _is_reordered(layout: hp.Layout, ndim: int) -> bool:
    return any(chain != tuple(sorted(chain)) for chain in layout.splits(ndim))


def byte_rows() -> list[Bytes]:
    kinds = [("even", "R/S"), ("uneven", "R/S"), ("even", "ordered"), ("uneven", "ordered")]
    kinds += [("even", "partial"), ("uneven", "partial")]
    return [count(sizes, ndim, even, kind) for sizes in MESHES for ndim in (2, 3) for even, kind in kinds]


def byte_table(rows: Sequence[Bytes]) -> str:
    lines = [
        "| mesh | layouts | pairs | ours / least: mean | worst | torch: mean | worst | refused, needless |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        theirs = f"{_mean(row.torch):.3f} | {max(row.torch):.2f}" if row.torch else "- | -"
        lines.append(
            f"| {row.mesh} | {row.kind} | {row.pairs} | {_mean(row.ours):.3f} | {max(row.ours):.3f} | {theirs} | "
            f"{row.refused}, {row.needless} of {min(SAMPLE, row.pairs)} |"
        )
    return "\n".join(lines)


def _mean(ratios: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else math.nan


# -- wall time -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One random pair: a mesh, a shape, entries and pending axes of the source, entries of the destination."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    src: tuple[tuple[str, ...] | None, ...]
    pending: tuple[str, ...]
    dst: tuple[tuple[str, ...] | None, ...]

    @property
    def megabytes(self) -> float:
        return math.prod(self.shape) * 4 / 1e6


def cases(ranks: int, number: int = PAIRS) -> list[Case]:
    """Random pairs that torch supports: 1 MB to 64 MB, 2-D and 3-D, every axis split, replicated or pending."""
    draw, found = random.Random(ranks), list[Case]()
    meshes = {4: [(4,), (2, 2)], 8: [(8,), (2, 4), (2, 2, 2)]}[ranks]
    while len(found) < number:
        sizes, ndim = draw.choice(meshes), draw.choice((2, 3))
        elements = math.exp(draw.uniform(math.log(1e6 / 4), math.log(64e6 / 4)))
        inner = [draw.choice((64, 96, 128, 192)) for _ in range(ndim - 1)]
        shape = (max(8, int(elements / math.prod(inner)) // 8 * 8), *inner)
        names = ("a", "b", "c")[: len(sizes)]
        roles = [draw.randrange(-1, ndim + 1) for _ in names]
        goals = [draw.randrange(-1, ndim) for _ in names]
        if roles == goals:
            continue
        src, dst = ([tuple(n for n, r in zip(names, rs, strict=True) if r == d) or None for d in range(ndim)]
                    for rs in (roles, goals))  # fmt: skip
        pending = tuple(n for n, role in zip(names, roles, strict=True) if role == ndim)
        found.append(Case(sizes, shape, tuple(src), pending, tuple(dst)))
    return found


def contest(todo: Sequence[Case], device: str = "cpu", repeats: int = REPEATS) -> list[tuple[float, float]]:
    """Run both on the calling rank; median seconds of ours and of torch's per case, of the slowest rank."""
    torch.set_num_threads(1)
    results = []
    for number, case in enumerate(todo):
        names = ("a", "b", "c")[: len(case.sizes)]
        mesh = hp.init_device_mesh(device, case.sizes, mesh_dim_names=names)
        layout = hp.Layout.from_device_mesh(mesh)
        src = layout(*case.src, partial=dict.fromkeys(case.pending, "sum"))
        dst = layout(*case.dst)
        x = hp.from_local(torch.ones(src.local_shape(case.shape), device=device), src, shape=case.shape)
        goal = dst.placements
        ways: dict[str, Callable[[], Any]] = {
            "ours": functools.partial(hp.redistribute, x, dst),
            "torch": functools.partial(x.redistribute, mesh, goal),
        }
        assert torch.equal(ways["ours"]().to_local(), _settled(ways["torch"]())), case
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        draw = random.Random(number)
        for repeat in range(repeats + 1):
            for name in draw.sample(sorted(ways), len(ways)):
                took = timed(lambda way=ways[name]: _settled(way()), 1, device)  # type: ignore[misc]
                if repeat:
                    seconds[name].append(took)
        results.append((float(np.median(seconds["ours"])), float(np.median(seconds["torch"]))))
    return results


def _settled(x: torch.Tensor) -> torch.Tensor:
    """The local part, once it has arrived: torch's may still be under way."""
    local = x.to_local()  # type: ignore[attr-defined]
    return local.wait() if hasattr(local, "wait") else local


def on_sim(ranks: int = 8) -> tuple[list[Case], list[tuple[float, float]]]:
    todo = cases(ranks)
    return todo, sim.run(contest, ranks, (todo,), pin=min(os.sched_getaffinity(0)))[0]


def on_gloo(ranks: int = 4) -> tuple[list[Case], list[tuple[float, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_gloo_rank, (ranks, folder), nprocs=ranks)
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    return cases(ranks), [(ours, theirs) for ours, theirs in seconds]


def _gloo_rank(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    seconds = contest(cases(ranks))
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def wall_table(results: dict[str, list[tuple[float, float]]]) -> str:
    lines = [
        "| ranks | pairs | ours / torch: mean | median | best | worst | pairs above 1.0 |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for backend, seconds in results.items():
        ratios = sorted(ours / theirs for ours, theirs in seconds)
        lines.append(
            f"| {backend} | {len(ratios)} | {_mean(ratios):.2f} | {np.median(ratios):.2f} | {ratios[0]:.2f} | "
            f"{ratios[-1]:.2f} | {sum(ratio > 1 for ratio in ratios)} |"
        )
    return "\n".join(lines)


# -- planning --------------------------------------------------------------------------------------------------------


def planning_table() -> str:
    """The cost of a plan, new and known, and of a redistribution that has nothing to do."""
    mesh = hp.Layout((8, 8, 8, 8), ("pp", "dp", "cp", "tp"))
    pairs = {
        "S0[pp,dp,cp,tp] -> S1[tp,cp,dp,pp]": (mesh(("pp", "dp", "cp", "tp")), mesh(None, ("tp", "cp", "dp", "pp"))),
        "S0[dp] S1[tp] -> S0[tp] S1[dp]": (mesh("dp", "tp"), mesh("tp", "dp")),
        "S0[dp,tp] -> R": (mesh(("dp", "tp")), mesh()),
        "P[dp,cp] S1[tp] -> S0[cp,dp]": (mesh(None, "tp", partial={"dp": "sum", "cp": "sum"}), mesh(("cp", "dp"))),
    }
    lines = ["| 4,096 ranks, (8, 8, 8, 8) | new pair, ms | known pair, us |", "|---|--:|--:|"]
    for name, (src, dst) in pairs.items():
        for on in (None, find_machine("h100-sxm")):
            new = min(_once(src, dst, (8192 + 64 * turn, 8192), on) for turn in range(7))
            known = _per_call(lambda src=src, dst=dst, on=on: plan(src, dst, (8192, 8192), torch.float32, on))  # type: ignore[misc]
            priced = "bytes" if on is None else on.name
            lines.append(f"| {name}, {priced} | {new * 1e3:.1f} | {known * 1e6:.1f} |")
    lines += ["", "| nothing to do, us | ours | torch |", "|---|--:|--:|"]
    for what, ours, theirs in sim.run(_no_op, 8)[0]:
        lines.append(f"| {what} | {ours * 1e6:.1f} | {theirs * 1e6:.1f} |")
    return "\n".join(lines)


def _once(src: hp.Layout, dst: hp.Layout, shape: tuple[int, ...], on: Any) -> float:
    start = time.process_time()
    plan(src, dst, shape, torch.float32, on)
    return time.process_time() - start


def _per_call(call: Callable[[], Any], calls: int = 2000) -> float:
    best = math.inf
    for _ in range(5):
        start = time.process_time()
        for _ in range(calls):
            call()
        best = min(best, (time.process_time() - start) / calls)
    return best


def _no_op() -> list[tuple[str, float, float]]:
    mesh = hp.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    layout = hp.Layout.from_device_mesh(mesh)("dp", "tp")
    if dist.get_rank():
        return []
    found = []
    for wants in (False, True):
        part = torch.ones(layout.local_shape((64, 64)), requires_grad=wants)
        x = hp.from_local(part, layout, shape=(64, 64))
        placements = x.placements
        theirs = _per_call(functools.partial(x.redistribute, mesh, placements))
        for how, arguments in (
            ("a layout", (layout,)),
            ("entries", (("dp", "tp"),)),
            ("placements", (mesh, placements)),
        ):
            ours = _per_call(functools.partial(hp.redistribute, x, *arguments))
            found.append((f"given {how}{', with a gradient to come' if wants else ''}", ours, theirs))
    return found
