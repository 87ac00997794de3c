"""Outcomes of a validation: rows of measurements put through the estimator, compared, and kept in a file.

A row becomes a job (`rows`), the job is traced and priced (`predict`), and the outcome is compared with what was
measured: tokens/s of a device, and peak memory of the kind that the row states. Traces know nothing of devices but
whose attention computes the blocks of a ring; they are kept in a folder, so that a second run with another calibration
only prices.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.published.rows import Case, Row, Skipped, case_of, is_held_out
from sim.mesh.estimate import LEVELS, level_of

GIB = 2**30
CACHE = Path("~/.cache/hyper-parallel/mesh").expanduser()
"""Where traces are kept unless another folder is named."""


@dataclass(frozen=True)
class Prediction:
    """What was predicted of a run: (value, low, high) of an 80 % interval each.

    Attributes:
        tokens_per_second: of a device.
        memory: bytes by kind: `allocated`, `reserved`, `device`, `first step`, `first iteration`.
        fits: whether every device has enough.
        evidence: see `Outcome`.
        prices: likewise.
        left_out: likewise.
    """

    tokens_per_second: tuple[float, float, float]
    memory: Mapping[str, tuple[float, float, float]]
    fits: bool
    evidence: tuple[str, ...] = ()
    prices: float = 0.0
    left_out: float | None = None


@dataclass(frozen=True)
class Compared:
    """A truth and its prediction, in tokens/s or GiB."""

    truth: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Signed, as a part of the truth."""
        return self.predicted / self.truth - 1

    @property
    def is_inside(self) -> bool:
        """Whether the truth lies in the interval."""
        return self.low <= self.truth <= self.high


@dataclass(frozen=True)
class Outcome:
    """What became of a row.

    Attributes:
        id: of the row.
        source: where it was published.
        group: what it may be ordered within: source, device and model.
        text: the configuration in one line.
        is_held_out: whether no fit has seen it.
        speed: tokens/s of a device; None: not measured, or not predicted.
        memory: GiB; None likewise.
        memory_kind: what the row states of it.
        notes: where the job is not quite the run.
        reason: why there is no prediction; empty: there is one.
        is_oom: the run was out of memory; with `fits`.
        fits: whether the prediction says that it has enough.
        evidence: framework, family of devices and kinds of kernels: who else has the same tells how sure a speed is.
        prices: standard deviation of the logarithm of the speed that is due to prices alone.
        left_out: tokens/s of a device as predicted without what was fitted to its publication; None: it is held out,
            or was not predicted since.
    """

    id: str
    source: str
    group: str
    text: str
    is_held_out: bool
    speed: Compared | None = None
    memory: Compared | None = None
    memory_kind: str = ""
    notes: tuple[str, ...] = ()
    reason: str = ""
    is_oom: bool = False
    fits: bool | None = None
    evidence: tuple[str, ...] = ()
    prices: float = 0.0
    left_out: float | None = None

    def line(self) -> str:
        """The row and its errors, or why there are none."""
        errors = [f"{one.error:+.1%}" for one in (self.speed, self.memory) if one is not None]
        return f"{self.id} {self.text}: {self.reason or ' '.join(errors)}"


Predict = Callable[[Case], Prediction]


def outcome_of(row: Row, predict: Predict) -> Outcome:
    """Predict a row and compare; what goes wrong becomes the outcome's reason."""
    case = case_of(row)
    blank = Outcome(
        str(row["id"]),
        str(row.get("source", "")),
        f"{row.get('source', '')} | {row.get('hw_device', '')} | {row.get('model', '')}",
        _text_of(row),
        is_held_out(row),
    )
    if isinstance(case, Skipped):
        return dataclasses.replace(blank, reason=f"cannot be said: {case.reason}")
    truth = case.measured
    try:
        predicted = predict(case)
    except Exception as error:  # one row's failure is a line of the report and not the end of it
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return dataclasses.replace(
            blank, reason=f"{type(error).__name__}: {str(error).splitlines()[0][:160]} ({where})"
        )
    speed = None
    if truth.tokens_per_second is not None:
        speed = Compared(truth.tokens_per_second, *predicted.tokens_per_second)
    memory = None
    if truth.memory is not None:
        value, low, high = (bytes_ / GIB for bytes_ in predicted.memory[truth.memory_kind])
        memory = Compared(truth.memory / GIB, value, low, high)
    kind = truth.memory_kind if memory is not None else ""
    said = {name: getattr(predicted, name) for name in ("fits", "evidence", "prices", "left_out")}
    return dataclasses.replace(
        blank, speed=speed, memory=memory, memory_kind=kind, notes=case.notes, is_oom=truth.is_oom, **said
    )


def publication(source: str) -> str:
    """Return what a source was published with: it is left out with all of it."""
    return source.partition(" ground truth")[0]


def wanted(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that state enough to be compared: measured runs whose inputs of first order are known."""
    return [
        row for row in rows if row.get("kind") != "analytic" and (row.get("predict_time") or row.get("predict_mem"))
    ]


def run(rows: Sequence[Row], predict: Predict, *, processes: int = 2) -> Iterator[Outcome]:
    """Yield the outcome of each row, in their order.

    Args:
        rows: see `read_rows`.
        predict: what predicts; with more than one process it must be picklable.
        processes: that work at the same time.
    """
    one = partial(outcome_of, predict=predict)
    if processes == 1:
        yield from map(one, rows)
        return
    # Fresh interpreters: a fork would take over this one's threads and torch's state.
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=50) as pool:
        yield from pool.imap(one, rows, chunksize=1)


def _text_of(row: Row) -> str:
    """Return the configuration of a row in a line."""
    degrees = [f"{key}{row[key]}" for key in ("tp", "cp", "pp", "ep") if (row.get(key) or 1) > 1]
    device = str(row.get("hw_device", "")).split(" (")[0]
    parts = [f"{row['n_devices']}x {device}", str(row.get("model", "")), *degrees, f"seq {row['seq_len']}"]
    parts.append(f"batch {row.get('global_batch')} by {row.get('micro_batch')}")
    for key in ("ac_policy", "fp8"):
        if row.get(key):
            parts.append(str(row[key]).split(" (")[0].split(":")[0])
    return ", ".join(parts + (["compiled"] if row.get("compile") else []))


# How much was known of what was predicted


class Known(NamedTuple):
    """A speed, as predicted by those who know so much of steps like it.

    Attributes:
        outcome: of its row.
        kernels: that tell how much is known.
        level: see `sim.mesh.estimate.level_of`.
        error: log(predicted / published).
        is_left_out: whether nothing of the row's own publication was known.
    """

    outcome: Outcome
    kernels: str
    level: str
    error: float
    is_left_out: bool


def seen_in(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], Counter[str]]:
    """Count the speeds that are not held out: by framework and family of devices, and of these by kind of kernels."""
    seen: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for one in outcomes:
        if one.speed is not None and one.evidence and not one.is_held_out:
            seen[one.evidence[0], one.evidence[1]].update(one.evidence[2:])
    return seen


def known(outcomes: Sequence[Outcome]) -> Iterator[Known]:
    """Yield what is known of each speed, and again without its own publication if the framework is new then."""
    everything = seen_in(outcomes)
    without = {
        name: seen_in(one for one in outcomes if publication(one.source) != name)
        for name in {publication(one.source) for one in outcomes}
    }
    for one in outcomes:
        if one.speed is None or not one.evidence:
            continue
        truth = one.speed.truth
        yield Known(one, one.evidence[2], _level(one, everything), math.log(one.speed.predicted / truth), False)
        if one.left_out is not None:
            level = _level(one, without[publication(one.source)])
            if LEVELS.index(level) > 1:
                yield Known(one, one.evidence[2], level, math.log(one.left_out / truth), True)


def _level(outcome: Outcome, seen: Mapping[tuple[str, str], Counter[str]]) -> str:
    framework, family, *kernels = outcome.evidence
    levels = []
    for kind in kernels:
        of_family = sum(counts[kind] for (_, device), counts in seen.items() if device == family)
        levels.append(level_of(seen.get((framework, family), Counter())[kind], of_family))
    return max(levels, key=LEVELS.index)


# Outcomes in a file


def write_outcomes(outcomes: Iterable[Outcome], path: str | Path) -> None:
    """Write outcomes as JSON lines, figures to five digits."""
    lines = [json.dumps(_rounded(dataclasses.asdict(outcome)), separators=(",", ":")) for outcome in outcomes]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_outcomes(path: str | Path) -> list[Outcome]:
    """Read what `write_outcomes` has written."""
    outcomes = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        for key in ("speed", "memory"):
            said[key] = None if said[key] is None else Compared(**said[key])
        outcomes.append(Outcome(**{**said, **{key: tuple(said.get(key, ())) for key in ("notes", "evidence")}}))
    return outcomes


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return value
