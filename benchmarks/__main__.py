"""`python -m benchmarks [part ...] [--write]`: measure, print the tables, and put them into the docs."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import re
from pathlib import Path

import torch

from benchmarks import (
    attention,
    checkpoint,
    dims,
    engine,
    engine_counts,
    experts,
    mesh,
    mesh_here,
    muon,
    proofs,
    redistribute,
    scripts,
    searches,
    shard,
    simulator,
    verify,
    wrapping,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = (DOCS / "benchmarks.md", DOCS / "verify.md")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"which: {', '.join(PARTS)}; default: all")
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/")
    parser.add_argument("--long", action="store_true", help="with the rows of torch's that take minutes")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}; there are: {', '.join(PARTS)}")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for part in options.parts or PARTS:
        tables = _mesh(long=True) if options.long and part == "mesh" else PARTS[part]()
        for marker, text in tables.items():
            print(f"\n{text}", flush=True)
            if options.write:
                write_table(marker, text)


def _engine() -> dict[str, str]:
    results, units = [], []
    for ranks, sequences, length in ((8, 1, 32), (8, 2, 64), (8, 4, 128), (64, 1, 16)):
        results.append(engine.on_sim(ranks, sequences, length))
        print(engine.table(results[-1:]), flush=True)
    for ranks, sequences, length in ((2, 2, 64), (2, 4, 128), (4, 2, 64), (4, 4, 128)):
        results.append(engine.on_gloo(ranks, sequences, length))
        print(engine.table(results[-1:]), flush=True)
    units.append(engine.on_sim(8, 1, 32, engine.contest_of_units))
    units.append(engine.on_gloo(2, 2, 64, engine.contest_of_units))
    checks = [engine.on_gloo(2, 2, length, engine.contest_of_checks) for length in (64, 128)]
    conditions = f"{_conditions()}, fp32, fused AdamW"
    return {
        "engine": f"{conditions}.\n\n{engine.table(results)}",
        "overhead": f"{conditions}.\n\n{engine.overhead_table(results)}",
        "units": f"{conditions}.\n\n{engine.units_table(units)}",
        "checks": f"{conditions}.\n\n{engine.checks_table(checks)}",
    }


def _counts() -> dict[str, str]:
    return {
        "counts": f"torch {torch.__version__}.\n\n{engine_counts.traffic_table()}",
        "memory": f"torch {torch.__version__}; MB of 10^6 bytes.\n\n{engine_counts.memory_table()}",
    }


def _wrapping() -> dict[str, str]:
    return {
        "wrapping": f"{_conditions()}.\n\n{wrapping.table()}",
        "filling": f"{_conditions()}.\n\n{wrapping.filling_table()}",
    }


def _shard() -> dict[str, str]:
    return {"shard": f"{_conditions()}, fp32, fused AdamW.\n\n{shard.table()}"}


def _dims() -> dict[str, str]:
    return {
        "dims": f"{_conditions()}, fp32, fused AdamW.\n\n{dims.table()}",
        "attention": f"{_conditions()}, fp32.\n\n{attention.table()}",
    }


def _changes() -> dict[str, str]:
    conditions = f"torch {torch.__version__}, fp32; memory and communication in bytes"
    return {"changes": f"{conditions}.\n\n{dims.changes_table()}"}


def _masks() -> dict[str, str]:
    return {"masks": f"{_conditions()}, fp32.\n\n{attention.masks_table()}"}


def _float8() -> dict[str, str]:
    return {"float8": f"{_conditions()}, fused AdamW.\n\n{engine_counts.float8_table()}"}


def _experts() -> dict[str, str]:
    return {
        "experts": f"{_conditions()}.\n\n{experts.table()}",
        "experts folded": f"torch {torch.__version__}.\n\n{experts.folded_table()}",
        "experts shared": f"torch {torch.__version__}.\n\n{experts.overlap_table()}",
    }


def _muon() -> dict[str, str]:
    return {"muon": f"torch {torch.__version__}.\n\n{muon.table()}"}


def _redistribute() -> dict[str, str]:
    planning = redistribute.planning_table()
    _, gloo = redistribute.on_gloo(4)
    _, simulated = redistribute.on_sim(8)
    wall = redistribute.wall_table({"4 gloo processes": gloo, "8 simulated ranks": simulated})
    counted = redistribute.byte_table(redistribute.byte_rows())
    return {
        "redistribute bytes": f"torch {torch.__version__}.\n\n{counted}",
        "redistribute time": f"{_conditions()}.\n\n{wall}",
        "redistribute planning": f"{_conditions()}; the best of several calls, CPU time.\n\n{planning}",
    }


def _reduce() -> dict[str, str]:
    return {"reduce": f"{_conditions()} unless a row says otherwise.\n\n{simulator.reduce_table()}"}


def _start() -> dict[str, str]:
    return {"start": f"{_conditions()}.\n\n{simulator.start_table()}"}


def _step() -> dict[str, str]:
    return {"step": f"{_conditions()}, fp32, fused AdamW.\n\n{simulator.step_table()}"}


def _verify() -> dict[str, str]:
    head = f"{_conditions()}; the median of {verify.ROUNDS} proofs.\n\n"
    return {"verify": head + verify.table(), "verify ranks": head + verify.ranks_table()}


def _proofs() -> dict[str, str]:
    faults, programs = proofs.tables()
    return {"proofs faults": faults, "proofs programs": f"{_conditions()}.\n\n{programs}"}


def _checkpoint() -> dict[str, str]:
    return {
        "checkpoint stall": f"{_conditions()}, fp32, 2 gloo processes.\n\n{checkpoint.stall_table()}",
        "checkpoint speed": f"{_conditions()}.\n\n{checkpoint.speed_table()}",
    }


def _mesh(*, long: bool = False) -> dict[str, str]:
    rounds = f"the median of {mesh.ROUNDS} processes each"
    return {
        "mesh cost": f"{_conditions()}; {rounds}.\n\n{mesh.cost_table()}",
        "mesh torch": f"{_conditions()}; {rounds}.\n\n{mesh.torch_table((64, 256, 1024) if long else (64, 256))}",
    }


def _mesh_here() -> dict[str, str]:
    shared = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    return {"mesh here": f"{shared} ({platform.machine()}) that the processes share.\n\n{mesh_here.here_table()}"}


def _mesh_drawn() -> dict[str, str]:
    return {"mesh drawn": f"{_conditions()}.\n\n{mesh_here.drawn_table()}"}


def _scripts() -> dict[str, str]:
    return {"scripts": f"{_conditions()}.\n\n{scripts.table()}"}


def _searches() -> dict[str, str]:
    return {"searches": f"{_conditions()}.\n\n{searches.table()}"}


PARTS = {
    "engine": _engine,
    "counts": _counts,
    "wrapping": _wrapping,
    "shard": _shard,
    "dims": _dims,
    "changes": _changes,
    "masks": _masks,
    "float8": _float8,
    "experts": _experts,
    "muon": _muon,
    "redistribute": _redistribute,
    "checkpoint": _checkpoint,
    "verify": _verify,
    "proofs": _proofs,
    "reduce": _reduce,
    "start": _start,
    "step": _step,
    "mesh": _mesh,
    "mesh-here": _mesh_here,
    "mesh-drawn": _mesh_drawn,
    "scripts": _scripts,
    "searches": _searches,
}


def write_table(marker: str, text: str) -> None:
    """Put a table where the docs have its place."""
    marked = rf"(<!-- {marker}: begin -->\n).*?(\n?<!-- {marker}: end -->)"
    page = next((page for page in PAGES if re.search(marked, page.read_text(), flags=re.DOTALL)), None)
    if page is None:
        raise SystemExit(f"no page has a place for {marker!r}: <!-- {marker}: begin --> and <!-- {marker}: end -->")
    page.write_text(re.sub(marked, lambda m: f"{m[1]}{text}\n{m[2].lstrip()}", page.read_text(), flags=re.DOTALL))
    print(f"wrote {marker} to {page}")


def _conditions() -> str:
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores "
        f"({platform.machine()}), one intra-op thread"
    )


if __name__ == "__main__":
    main()
