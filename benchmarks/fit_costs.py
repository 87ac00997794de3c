"""Fits the curves of matmuls and collectives to published tables: writes core/machine/data/calibration.toml.

    python -m benchmarks.fit_costs            # prints the errors, fitted and held out
    python -m benchmarks.fit_costs --write    # and writes the file

A third of the rows, drawn by their number, is held out: no fit sees it. Few parameters, each with a meaning (see
`compute_cost.py` in `sim/mesh/pricing` and `links.py` in `core/machine`), by coordinate descent on the mean and 90th
percentile of the absolute logarithm of predicted over published.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel.core.machine.calibration import DATA, Calibration, load_calibration
from hyper_parallel.core.machine.description import Machine, find_machine
from hyper_parallel.core.machine.links import Links, NodeSpread, collective_seconds
from hyper_parallel.core.machine.toml_file import toml_text, written
from sim.mesh.pricing.compute_cost import matmul_seconds
from sim.mesh.pricing.measure_fit import Measurement, descend, loss_of, spread_in, summary

PUBLISHED = Path(__file__).resolve().parent / "published" / "data"
SMALLEST = 16 * 1024  # bytes: below, tables disagree by how they were timed (13, 35 and 39 us for the same collective)
Params = Mapping[str, float]


class Fit(NamedTuple):
    """What came of a fit."""

    path: str
    params: Params
    fitted: tuple[float, float, float]
    held: tuple[float, float, float]
    counts: tuple[int, int]
    large: tuple[float, float, float]
    spread: float
    source: str


def read_rows(name: str) -> list[dict[str, Any]]:
    """Read a table: rows with the keys of their block."""
    rows = []
    for block in json.loads((PUBLISHED / name).read_text()):
        head = {key: value for key, value in block.items() if key not in ("rows", "columns")}
        rows += [{**head, **dict(zip(block["columns"], row, strict=True))} for row in block["rows"]]
    return rows


def is_held_out(row: Measurement) -> bool:
    return int(row.id[1:]) % 3 == 0


def fit(
    path: str, rows: Sequence[Measurement], start: Params, free: dict[str, tuple[float, float]], source: str
) -> Fit:
    """Fit to two thirds of the rows, and look at the rest."""
    seen, held = [row for row in rows if not is_held_out(row)], [row for row in rows if is_held_out(row)]
    starts = [start] + [{**start, "ramp_us": ramp, "power": power} for ramp in (10, 60, 200) for power in (0.65, 0.9)]
    tried = [descend(seen, one, free) for one in (starts if "ramp_us" in free else starts[:1])]
    params = min(tried, key=lambda one: loss_of(seen, one))
    counts = (len(seen), len(held))
    large = summary([row for row in rows if row.size >= 2**20], params)
    return Fit(
        path, params, summary(seen, params), summary(held, params), counts, large, spread_in(rows, params), source
    )


# -- matmuls ---------------------------------------------------------------------------------------------------------


def matmul_rows(published: str, hardware: Machine) -> list[Measurement]:
    def predict(row: dict[str, Any]) -> Callable[[Params], float]:
        shape = (row["batch"], row["m"], row["n"], row["k"])
        peak, cores, bandwidth = hardware.peak("bf16"), hardware.cores, hardware.memory_bandwidth
        return lambda params: matmul_seconds(params, shape, peak, cores, 2, bandwidth)[0]

    rows = [row for row in read_rows("gemm.json") if row["hardware"] == published and row.get("m")]
    return [Measurement(row["id"], row["time_us"] * 1e-6, predict(row)) for row in rows]


def fit_matmuls() -> list[Fit]:
    fits = []
    best = "best matmul of any shape: stas00/ml-engineering, MAMF"
    for family, published, name, cap, source in (
        ("ampere", "A100 SXM", "a100-80gb", 271.2 / 312, f"cuBLAS figure of stas00/ml-engineering; {best}"),
        ("hopper", "H100 SXM", "h100-sxm", 794.0 / 989.4, f"openxla/xla default_matmul_perf_table; {best}"),
        ("blackwell", "B200", "b200", 1745.0 / 2250, f"openxla/xla default_matmul_perf_table; {best}"),
    ):
        rows = matmul_rows(published, find_machine(name))
        tried = []
        for quantised in (0.0, 0.5, 1.0):
            start = {"floor_us": 5.0, "rate": 0.95, "prologue": 250, "edge": 16, "stream": 0.85}
            start |= {"quantised": quantised, "cap": round(cap, 3)}
            free = {"floor_us": (2, 10), "rate": (0.5, 1.0), "prologue": (30, 600), "edge": (4, 64)}
            tried.append(fit(f"matmul.{family}", rows, start, free, source))
        fits.append(min(tried, key=lambda one: one.fitted[0] + 0.5 * one.fitted[1]))
    return fits


# -- collectives -----------------------------------------------------------------------------------------------------


def links_of(hardware: Machine, op: str, params: Params, known: Calibration) -> Links:
    """Return the links of a node whose curve of one operation is on trial."""
    curves = {**known.section("links", hardware.links), op: params}
    return Links(
        intra=hardware.value("intra.bandwidth"), mesh=hardware.topology == "mesh", devices=hardware.devices_per_node,
        in_switch=hardware.value("intra.in_switch") if op == "all_reduce_in_switch" else None, in_switch_from=2,
        inter=hardware.value("inter.bandwidth"), taper=0.0, curves=curves, fabric={},
    )  # fmt: skip


def seconds_of(row: dict[str, Any]) -> float | None:
    """Return the published time of a collective: as given, or from its bandwidth."""
    if row.get("time_us"):
        return row["time_us"] * 1e-6
    if row.get("busbw_gbytes_s") and row.get("size_bytes") and row.get("n_devices"):
        n, times = row["n_devices"], 2 if row["op"] == "all_reduce" else 1
        return times * row["size_bytes"] * (n - 1) / n / (row["busbw_gbytes_s"] * 1e9)
    return None


def node_rows(
    published: Sequence[str], op: str, hardware: Machine, known: Calibration, switched: bool | None
) -> list[Measurement]:
    """Return the rows of collectives within a node; switched: those in which the switch computes, or the others."""
    made = []
    for row in read_rows("collectives.json"):
        seconds, n = seconds_of(row), row.get("n_devices")
        if row["hardware"] not in published or row["op"] != op or row.get("n_nodes") != 1 or seconds is None:
            continue
        by_switch = (
            (n or 0) > 4
            and hardware.value("intra.in_switch", 0) > 0
            and "Ring" not in (row.get("algorithm") or "").split(" ")[0]
        )
        if row["size_bytes"] < SMALLEST or (switched is not None and by_switch != switched):
            continue

        def predict(params: Params, row: dict[str, Any] = row, by_switch: bool = by_switch) -> float:
            curve = "all_reduce_in_switch" if by_switch and op == "all_reduce" else op
            links = links_of(hardware, curve, params, known)
            return collective_seconds(links, op, row["size_bytes"], NodeSpread(row["n_devices"], 1, row["n_devices"]))[
                0
            ]

        made.append(Measurement(row["id"], seconds, predict, row["size_bytes"]))
    return made


BOUNDS = {
    "efficiency": (0.3, 1.1), "pair_loss": (0.01, 1.2), "base_us": (3, 120), "hop_us": (0.1, 8),
    "ramp_us": (1, 400), "power": (0.5, 0.95),
}  # fmt: skip


def fit_links(known: Calibration) -> list[Fit]:
    h100, a100 = find_machine("h100-sxm"), find_machine("a100-80gb")
    start = {"efficiency": 0.8, "pair_loss": 0.2, "base_us": 15, "hop_us": 1.0, "ramp_us": 20, "power": 0.8}
    xla = "openxla/xla default_collective_perf_table (sm_90)"
    torch = "stas00/ml-engineering, network: 8 x H200"
    hopper, fits = ("H100 SXM", "H100 80GB (p5)", "H200"), []
    for op in ("all_gather", "reduce_scatter", "all_to_all"):
        rows = node_rows(hopper, op, h100, known, None)
        fits.append(fit(f"links.nvlink4.{op}", rows, start, BOUNDS, f"{xla}; {torch}"))
    rows = node_rows(hopper, "all_reduce", h100, known, switched=False)
    fits.append(fit("links.nvlink4.all_reduce", rows, start, BOUNDS, f"{xla}; {torch} without NVLS"))
    rows = node_rows(hopper, "all_reduce", h100, known, switched=True)
    free = {name: BOUNDS[name] for name in ("efficiency", "base_us", "ramp_us", "power")}
    at = {**start, "efficiency": 1.0, "hop_us": 0.0, "pair_loss": 0.0, "base_us": 25, "ramp_us": 60}
    fits.append(
        fit(
            "links.nvlink4.all_reduce_in_switch",
            rows,
            at,
            free,
            f"nccl-tests on p5.48xlarge (awsome-distributed-training); {torch}; {xla}",
        )
    )
    rows = node_rows(("A100 80GB",), "all_reduce", a100, known, None)
    source = "VIA-Research/vTrain, trace/a100, 2 to 8 devices; nccl-tests of stas00/ml-engineering"
    fits.append(fit("links.nvlink3.all_reduce", rows, start, BOUNDS, source))
    return fits


def fabric_rows(chosen: Callable[[dict[str, Any]], bool], hardware: Machine, known: Calibration) -> list[Measurement]:
    made = []
    for row in read_rows("collectives.json"):
        seconds = seconds_of(row)
        if seconds is None or (row.get("n_nodes") or 1) < 2 or row["size_bytes"] < SMALLEST or not chosen(row):
            continue

        def predict(params: Params, row: dict[str, Any] = row) -> float:
            links = Links(
                intra=hardware.value("intra.bandwidth"), mesh=False, devices=8,
                in_switch=hardware.value("intra.in_switch", 0) or None, in_switch_from=5,
                inter=row["inter_bw_gbits_s_per_node"] / 8 / 8 * 1e9, taper=0.0,
                curves=known.section("links", hardware.links), fabric=params,
            )  # fmt: skip
            return collective_seconds(
                links, row["op"], row["size_bytes"], NodeSpread(row["n_devices"], row["n_nodes"], 8)
            )[0]

        made.append(Measurement(row["id"], seconds, predict, row["size_bytes"]))
    return made


def fit_fabrics(known: Calibration) -> list[Fit]:
    start = {**known.section("fabric", "default"), "ramp_us": 150, "base_us": 60}
    start = {name: value for name, value in start.items() if isinstance(value, (int, float)) and name != "spread"}
    # Two nodes exchange halves, so only the run of four nodes says how much of the adapters' rate a ring attains.
    ring = {**start, "efficiency": 0.912}
    free = {"base_us": (10, 300), "ramp_us": (1, 900), "power": (0.5, 0.95), "small_share": (0.03, 1)}
    p5 = fabric_rows(lambda row: row.get("inter_bw_gbits_s_per_node") == 3200, find_machine("h100-sxm"), known)
    p4 = fabric_rows(lambda row: row.get("inter_bw_gbits_s_per_node") == 400, find_machine("a100-80gb"), known)
    aws = "nccl-tests, awsome-distributed-training"
    return [
        fit(
            "fabric.efa",
            p5,
            ring,
            free,
            f"{aws}: 2 x p5.48xlarge, two versions of the plugin; stas00/ml-engineering: 4 x p5en",
        ),
        fit("fabric.efa-v1", p4, start, {"efficiency": (0.5, 1.0), **free}, f"{aws}: 2 x p4de.24xlarge"),
    ]


# -- the file --------------------------------------------------------------------------------------------------------

HEAD = """\
Written by `python -m benchmarks.fit_costs --write`; change that, not this.
Each section: fitted figures (what they mean: compute_cost.py and links.py), the rows that they were
fitted to and those held out, and of both the median, 90th percentile and worst |predicted / published - 1|.
"""


COPIES = {
    # No table says how these gather: NCCL's rings attain the same bus bandwidth for all of them.
    "links.nvlink3.all_reduce": {"links.nvlink3.all_gather": 0.5, "links.nvlink3.reduce_scatter": 0.5},
    "links.nvlink4.all_gather": {"links.default.all_gather": 1.0},
    "links.nvlink4.reduce_scatter": {"links.default.reduce_scatter": 1.0},
    "links.nvlink4.all_to_all": {"links.default.all_to_all": 1.0, "links.nvlink3.all_to_all": 1.0},
    "links.nvlink4.all_reduce": {"links.default.all_reduce": 1.0},
    "links.nvlink4.all_reduce_in_switch": {"links.default.all_reduce_in_switch": 1.0},
}
"""Curves without tables, and those they are taken from, with the share of its latencies."""


def copies_of(one: Fit) -> dict[str, dict[str, Any]]:
    made = {}
    for path, share in COPIES.get(one.path, {}).items():
        figures = {name: value * (share if name in ("base_us", "hop_us") else 1) for name, value in one.params.items()}
        made[path] = {name: written(f"{value:.3g}") for name, value in figures.items()}
        made[path] |= {"grade": "assumed", "source": f"assumed: as {one.path}", "spread": 0.25}
    return made


def text_of(fits: Sequence[Fit]) -> str:
    content: dict[str, Any] = {}
    for one in fits:
        errors = {"error": one.fitted, "error_held_out": one.held}
        errors |= {} if math.isnan(one.large[0]) else {"error_from_1_mib": one.large}
        section: dict[str, Any] = {name: written(f"{value:g}") for name, value in one.params.items()}
        section |= {"grade": "calibrated", "source": one.source, "spread": one.spread}
        section |= {"rows": one.counts[0], "rows_held_out": one.counts[1]}
        section |= {name: written(f"[{', '.join(f'{x:.3f}' for x in each)}]") for name, each in errors.items()}
        for path, values in {one.path: section, **copies_of(one)}.items():
            *tables, last = path.split(".")
            functools.reduce(lambda table, key: table.setdefault(key, {}), tables, content)[last] = values
    return toml_text(content, comment=HEAD)


def run() -> list[Fit]:
    """Fit everything; the fabrics on top of the links."""
    known = load_calibration()
    links = fit_links(known)
    changes = {f"{one.path}.{name}": value for one in links for name, value in one.params.items()}
    return [*fit_matmuls(), *links, *fit_fabrics(known.replace(changes))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write hyper_parallel/core/machine/data/calibration.toml")
    options = parser.parse_args()
    fits = run()
    print(f"{'curve':38s} {'rows':>9s}   fitted: median, p90, worst; held out; all from 1 MiB; figures")
    for one in fits:
        rows = f"{one.counts[0]}+{one.counts[1]}"
        numbers = "  ".join(" ".join(f"{100 * x:6.1f}%" for x in part) for part in (one.fitted, one.held, one.large))
        print(f"{one.path:38s} {rows:>9s}   {numbers}   {one.params}")
    if options.write:
        Path(DATA / "calibration.toml").write_text(text_of(fits))


if __name__ == "__main__":
    main()
