"""`python -m benchmarks.fit_mesh`: fit what physics leaves open of the mesh simulator on published training runs.

Only rows that are not held out are used (`benchmarks/published/data/held_out.toml`). What is fitted is little: for each
family of devices, the share of the best matmul's rate that hours of training attain; nothing belongs to a row or a
model. The result is `hyper_parallel/core/machine/data/fit.toml`, with its evidence; what is of a framework goes into
`benchmarks/published/data/fit.toml`.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published.compare import (
    CACHE,
    Outcome,
    known,
    publication,
    read_outcomes,
    seen_in,
    wanted,
)
from benchmarks.published.conventions import FOLDER
from benchmarks.published.rows import Case, Row, case_of, is_held_out, read_rows
from hyper_parallel.core.machine.calibration import DATA
from hyper_parallel.core.machine.toml_file import toml_text, written
from sim.mesh.estimate import LEVELS, Z80

OUTCOMES = Path(__file__).parent.parent / "docs" / "generated" / "validation.jsonl"
SPREADS = DATA / "spreads.toml"
FIT = DATA / "fit.toml"
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
    comment = (
        "Written by `python -m benchmarks.fit_mesh --write`: what published runs tell of figures that tables of\n"
        "kernels and links leave open. Each is fitted to the rows that bear on it, none of them held out (see\n"
        "benchmarks/published/data/held_out.toml), by the mean of |log(predicted / published seconds)|, which counts\n"
        "as 0.4 at most."
    )
    content: dict[str, Any] = {}
    for path, said in found.items():
        *tables, name = path.split(".")
        section = functools.reduce(lambda table, key: table.setdefault(key, {}), tables, content)
        error = f"median error {said['median']:.3f}, before {said['before']:.3f}"
        section[name] = written(f"{said['value']}  # {said['why']}")
        section[f"{name}_source"] = f"{said['rows']} published runs: {error}"
    file.write_text(toml_text(content, comment=comment), encoding="utf-8")


# -- how far estimates are off --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """How far steps with a kind of kernels are off, beside what their prices say.

    Attributes:
        width: standard deviation of the logarithm.
        runs: that it is fitted to.
        publications: of these, which count alike.
    """

    width: float
    runs: int
    publications: int


def fit_spreads(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Spread]]:
    """Return by kind of kernels and by how much is known the spread whose 80 % intervals hold 80 % of the runs.

    Where runs of the framework are known, these are the runs; else those whose publications are left out. Each
    publication counts alike. Less evidence is never narrower: neither fewer runs, nor other kernels than dense ones.
    """
    cells: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for one in known(outcomes):
        if not one.outcome.is_held_out:
            errors = cells[one.kernels, one.level][publication(one.outcome.source)]
            errors.append((one.error, one.outcome.prices))
    found: dict[str, dict[str, Spread]] = {}
    for kind in ("dense", "float8", "experts"):
        found[kind] = {}
        widths = {level: _width(list(cells[kind, level].values()), level in LEVELS[:2]) for level in LEVELS}
        for level in reversed(LEVELS):  # what no run tells of is taken to be as if less was known
            below = LEVELS[LEVELS.index(level) + 1 :][:1]
            widths[level] = widths[level] or (widths[below[0]] if below else 0.0)
        least = 0.0
        for level in LEVELS:
            least = max(least, widths[level], found["dense"][level].width if kind != "dense" else 0.0)
            runs = list(cells[kind, level].values())
            found[kind][level] = Spread(least, sum(map(len, runs)), len(runs))
    return found


_STUDENT = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)
"""What 80 % lie within of Student's distribution, by degrees of freedom: a few publications tell little."""


def _width(several: Sequence[Sequence[tuple[float, float]]], is_fitted: bool) -> float:
    """Return the width with which 80 % of the errors are inside, at the mean over publications; 0: there are none.

    Args:
        several: errors of each publication, with the spread of the prices.
        is_fitted: whether a figure was fitted to them: of few runs, it takes some of the error away.
    """
    tried = 0.0
    if not several:
        return tried
    while tried < 1.0:
        inside = []
        for errors in several:
            more = math.sqrt(len(errors) / max(len(errors) - 1, 1)) if is_fitted else 1.0
            right = [more * abs(error) <= Z80 * math.hypot(prices, tried) for error, prices in errors]
            inside.append(sum(right) / len(right))
        if statistics.fmean(inside) >= 0.8:
            break
        tried += 0.005
    return round(max(tried, 0.005) * _STUDENT[min(len(several), len(_STUDENT)) - 1] / Z80, 3)


def spreads_text(outcomes: Sequence[Outcome]) -> str:
    """Return the file of spreads."""
    comment = (
        "Written by `python -m benchmarks.fit_mesh --spreads --write` from docs/generated/validation.jsonl; change\n"
        "that, not this. Standard deviations of the logarithm of a step, beside its prices' own: by kernels, and by\n"
        "how many published runs of the framework on the family of devices are known: ten (often), fewer (seldom),\n"
        "only those of other frameworks (never), none (nothing). Fitted to runs that are not held out, so that four\n"
        "of five are inside of the 80 % interval: those of the framework itself, and, for the last two, runs whose\n"
        "publication was left out. Publications count alike, and few make it wider (Student's distribution). Less\n"
        "evidence, and kernels that are not dense, are never narrower. seen: runs of the family, by kernels."
    )
    spreads: dict[str, dict[str, Any]] = defaultdict(dict)
    for kind, by_level in fit_spreads(outcomes).items():
        for level, one in by_level.items():
            spreads[kind][level] = written(f"{one.width:g}  # {one.runs} runs of {one.publications} publications")
    source = "published training runs that are not held out"
    content: dict[str, Any] = {"default": {"grade": "calibrated", "source": source, "spread": spreads}}
    families: dict[str, Counter[str]] = defaultdict(Counter)
    for (_, family), counts in sorted(seen_in(outcomes).items()):
        families[family].update(counts)
    families["cpu"]["dense"] = 3  # the models that `hyper-parallel hardware measure` trains
    for family, counts in sorted(families.items()):
        seen = ", ".join(f"{name} = {count}" for name, count in sorted(counts.items()) if count)
        content[family] = {"seen": written(f"{{ {seen} }}")}
    return toml_text({"estimate": content}, comment=comment)


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
    parser.add_argument("--spreads", action="store_true", help="fit how far estimates are off, and nothing else")
    parser.add_argument("--write", action="store_true", help="write the files")
    options = parser.parse_args()
    if options.rows is not None:
        print(f"{import_rows(options.rows)} rows")
        return
    if options.spreads:
        text = spreads_text(read_outcomes(OUTCOMES))
        print(text)
        if options.write:
            SPREADS.write_text(text, encoding="utf-8")
        return
    found = fit([row for row in wanted(read_rows()) if not is_held_out(row)], options.cache, options.most)
    if options.write:
        write(found)


if __name__ == "__main__":
    main()
