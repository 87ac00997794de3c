"""`python -m benchmarks.fit_mesh`: fit what physics leaves open of the mesh simulator on published training runs.

Only rows that are not held out are used (`benchmarks/published/data/held_out.toml`). What is fitted is little: for each
family of devices, the share of the best matmul's rate that hours of training attain; nothing belongs to a row or a
model. The result is `sim/mesh/data/fit.toml`, with its evidence; what is of a framework goes into
`benchmarks/published/data/fit.toml`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sim.mesh
from benchmarks.published.compare import CACHE, wanted
from benchmarks.published.conventions import FOLDER
from benchmarks.published.rows import Case, Row, case_of, is_held_out, read_rows

FIT = Path(sim.mesh.__file__).parent / "data" / "fit.toml"
OF_FRAMEWORKS = FOLDER / "fit.toml"
KEPT = (
    "id", "kind", "source", "source_ref", "date", "framework", "hw_device", "hw_mem_gib", "hw_peak_bf16_tflops",
    "hw_power_w", "hw_dev_per_node", "inter_bw_gbytes_s_per_dev", "interconnect", "n_devices", "model", "arch",
    "n_params", "n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn", "gated_mlp", "vocab", "tied_emb",
    "n_experts", "top_k", "capacity_factor", "moe_ffn", "n_shared_experts", "n_dense_layers", "seq_len",
    "micro_batch", "local_batch", "global_batch", "grad_accum", "n_microbatches", "dp", "dp_replicate", "dp_shard",
    "reshard_after_forward", "zero_stage", "tp", "sp", "async_tp", "cp", "ep", "pp", "vpp", "schedule", "precision",
    "param_dtype", "grad_reduce_dtype", "fp8", "ac_policy", "compile", "attn_type", "loss_impl", "optimizer",
    "train_mode", "tok_s_dev", "step_time_s", "mem_gib", "mem_kind", "oom", "notes", "predict_time", "predict_mem",
)  # fmt: skip
CLIP = 0.4
"""Errors (of the logarithm) above it count as much as it: a row that is far off for a reason of its own."""


@dataclass(frozen=True)
class Figure:
    """A figure to fit.

    Attributes:
        path: in the calibration.
        low: least value tried.
        high: largest.
        uses: whether a row bears on it.
        why: what it stands for.
    """

    path: str
    low: float
    high: float
    uses: Callable[[Row], bool]
    why: str


def _rows(source: str, device: str, since: str = "", before: str = "9", fp8: bool = False) -> Callable[[Row], bool]:
    def uses(row: Row) -> bool:
        there = source in row["source"] and device in row["hw_device"] and bool(row.get("fp8")) == fp8
        return there and since <= str(row.get("date", "")) < before

    return uses


BEST = "of the rate of the best matmul, in hours of training"
LESS = "of these rates"
FIGURES = (
    Figure("matmul.ampere.sustained", 0.85, 1.05, _rows("llm-foundry", "A100"), BEST),
    Figure("matmul.hopper.sustained", 0.7, 1.0, _rows("dgxc", "H100"), BEST),
    Figure("matmul.hopper.fp8.rate", 0.4, 1.0, _rows("dgxc", "H100", fp8=True), "of the peak, within a large tile"),
    Figure("matmul.ascend.sustained", 0.6, 1.0, _rows("MindFormers", "910B"), BEST),
    Figure(
        "device.h100-96gb-500w.matmul.sustained",
        0.6,
        1.0,
        _rows("torchtitan", "96GB", "2025-07"),
        "at a limit of 500 W",
    ),
    Figure("framework.torchtitan-2024.hopper", 0.6, 1.0, _rows("torchtitan", "96GB", before="2025-07"), LESS),
    Figure("framework.torchtitan-2024.ampere", 0.6, 1.0, _rows("torchtitan", "A100", before="2025-07"), LESS),
    Figure("framework.llm-foundry.hopper", 0.6, 1.0, _rows("llm-foundry", "H100"), "of these rates: libraries of 2023"),
    Figure("framework.megatron-deepspeed-2022.ampere", 0.6, 1.05, _rows("BLOOM", "A100"), LESS),
    Figure("framework.megatron-lm.ampere", 0.6, 1.05, _rows("Korthikanti", "A100"), LESS),
    Figure("framework.internevo.ampere", 0.6, 1.0, _rows("InternEvo", "A100"), LESS),
)


def fit(
    rows: Sequence[Row], folder: Path, most: int = 16, figures: Sequence[Figure] = FIGURES
) -> dict[str, dict[str, Any]]:
    """Fit each figure to the rows that bear on it, one after the other; return values and evidence by path."""
    found: dict[str, dict[str, Any]] = {}
    values: dict[str, float] = {}
    for figure in figures:
        cases = [one for row in rows if figure.uses(row) and isinstance(one := case_of(row), Case)]
        cases = [one for one in cases if one.measured.tokens_per_second]
        step = -(-len(cases) // most) or 1
        cases = [one for one in cases[::step] if _can_be_traced(one, folder)]
        if not cases:
            continue
        errors = _Errors(cases, folder, values)
        value = _least(errors, figure)
        values[figure.path] = value
        left = errors.of({figure.path: value})
        found[figure.path] = {
            "value": value,
            "rows": len(cases),
            "median": statistics.median(map(abs, left)),
            "bias": statistics.median(left),
            "before": statistics.median(map(abs, errors.of({}))),
            "why": figure.why,
        }
        print(figure.path, found[figure.path], flush=True)
    return found


class _Errors:
    """Errors of the step times of some cases, under changes of the calibration."""

    def __init__(self, cases: Sequence[Case], folder: Path, values: Mapping[str, float]) -> None:
        self.cases, self.folder, self.values = cases, folder, dict(values)
        self._known: dict[tuple[tuple[str, float], ...], list[float]] = {}

    def of(self, changes: Mapping[str, float]) -> list[float]:
        """Return log(predicted / measured seconds) of each case."""
        key = tuple(sorted(changes.items()))
        if key not in self._known:
            self._known[key] = [self._one(case, {**self.values, **changes}) for case in self.cases]
        return self._known[key]

    def _one(self, case: Case, changes: Mapping[str, float]) -> float:
        from benchmarks.published.predict import load_figures, programs_of, seconds_of

        assert case.measured.tokens_per_second is not None, "such cases are left out"
        seconds = seconds_of(case, programs_of(case, self.folder), load_figures().replace(changes))
        tokens = case.batch * case.dims.batch_ranks * case.seq_len / case.dims.world_size
        return math.log(seconds * case.measured.tokens_per_second / tokens)


def _can_be_traced(case: Case, folder: Path) -> bool:
    from benchmarks.published.predict import programs_of

    try:
        programs_of(case, folder)
    except Exception as error:  # one row's failure is not the end of the fit; the validation page lists it
        print(f"{case.id} is left out: {str(error).splitlines()[0]}", flush=True)
        return False
    return True


def _loss(errors: Sequence[float]) -> float:
    return sum(min(abs(error), CLIP) for error in errors) / len(errors)


def _least(errors: _Errors, figure: Figure, steps: int = 7) -> float:
    """Return the value whose loss is least: of a coarse grid, then of a finer one around its best point."""

    def loss(value: float) -> float:
        return _loss(errors.of({figure.path: value}))

    width = (figure.high - figure.low) / (steps - 1)
    best = min((figure.low + width * index for index in range(steps)), key=loss)
    fine = [best + width * share for share in (-0.66, -0.33, 0.0, 0.33, 0.66)]
    found: float = min((value for value in fine if figure.low <= value <= figure.high), key=loss)
    return round(found, 3)


def write(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Write both files of fitted figures."""
    of_frameworks = {path for path in found if path.startswith("framework.")}
    _write(FIT, {path: said for path, said in found.items() if path not in of_frameworks})
    _write(OF_FRAMEWORKS, {path: said for path, said in found.items() if path in of_frameworks})


def _write(file: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    lines = [
        "# Written by `python -m benchmarks.fit_mesh --write`: what published runs tell of figures that tables of",
        "# kernels and links leave open. Each is fitted to the rows that bear on it, none of them held out (see",
        "# benchmarks/published/data/held_out.toml), by the mean of |log(predicted / published seconds)|, which counts",
        "# as 0.4 at most.",
    ]
    for path, said in found.items():
        section, _, name = path.rpartition(".")
        lines += ["", f"[{section}]", f"{name} = {said['value']}  # {said['why']}"]
        error = f"median error {said['median']:.3f}, before {said['before']:.3f}"
        lines.append(f'{name}_source = "{said["rows"]} published runs: {error}"')
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def import_rows(source: str | Path) -> int:
    """Copy what is used of a file of published rows to where they are read from; return how many."""
    rows = [{key: row[key] for key in KEPT if key in row} for row in json.loads(Path(source).read_text())]
    text = "".join(
        json.dumps(row, separators=(",", ":")) + "\n" for row in sorted(rows, key=lambda row: str(row["id"]))
    )
    with open(FOLDER / "training.jsonl.gz", "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(text.encode())
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_mesh", description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder to keep traces in")
    parser.add_argument("--rows", type=Path, help="copy the rows of this file, and fit nothing")
    parser.add_argument("--most", type=int, default=16, help="rows that a figure is fitted to")
    parser.add_argument("--write", action="store_true", help="write both files")
    options = parser.parse_args()
    if options.rows is not None:
        print(f"{import_rows(options.rows)} rows")
        return
    found = fit([row for row in wanted(read_rows()) if not is_held_out(row)], options.cache, options.most)
    if options.write:
        write(found)


if __name__ == "__main__":
    main()
