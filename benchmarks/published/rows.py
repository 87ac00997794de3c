"""Published training runs as jobs of the simulator: from a row of the table of measurements to arguments of `estimate`.

A row is a JSON object (`benchmarks/published/data/training.jsonl.gz`; others of the same keys can be read from a file).
What it leaves unsaid comes from `frameworks.toml` beside it, by framework. What cannot be said is `Skipped`, with the
reason; what is said only nearly is noted in the case.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.published.conventions import (
    FOLDER,
    CannotSay,
    Row,
    batch_of,
    dims_of,
    family_of,
    hardware_of,
    hardware_text,
    kernel_of,
    model_of,
    recipe_of,
)
from benchmarks.published.gpt import GPTConfig
from benchmarks.published.step import PublishedRecipe
from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.machine.toml_file import read_toml
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models.llama import LlamaConfig

__all__ = ["Case", "Measured", "Row", "Skipped", "case_of", "is_held_out", "measured", "read_rows"]

GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """What was measured of a run.

    Attributes:
        tokens_per_second: of a device; None: not stated, or the row lacks an input of first order.
        memory: peak bytes of a device; None likewise.
        memory_kind: `reserved` or `allocated` (torch's statistics), `device` (nvidia-smi), `first step`
            (reserved, before the optimizer has its state), `first iteration` (allocated, to the end of an iteration
            whose update makes the optimizer's moments).
        is_oom: whether it ran out of memory.
    """

    tokens_per_second: float | None
    memory: float | None
    memory_kind: str
    is_oom: bool


@dataclass(frozen=True)
class Case:
    """A published run as arguments of `estimate`, and what it measured.

    Attributes:
        id: of the row.
        model: its shape.
        dims: the degrees.
        batch: sequences of a step on each data-parallel rank.
        seq_len: tokens of a sequence.
        recipe: how it trains.
        hardware: name of the device's description.
        network: GB/s of a device between nodes, one direction; None: as the description says.
        fabric: what the network is, in the row's words.
        attention_kernel: see frameworks.toml; None: the device's usual one.
        framework: its name in frameworks.toml.
        measured: the truth.
        allocator: how torch's is set: see `Machine.allocator`.
        notes: where the case is not quite the run.
        source: where it was published.
        is_held_out: whether no fit has seen it.
    """

    id: str
    model: LlamaConfig | GPTConfig
    dims: ParallelDims
    batch: int
    seq_len: int
    recipe: PublishedRecipe
    hardware: str
    network: float | None
    fabric: str
    attention_kernel: str | None
    framework: str
    measured: Measured
    allocator: str = "caching"
    notes: tuple[str, ...] = ()
    source: str = ""
    is_held_out: bool = False


@dataclass(frozen=True)
class Skipped:
    """A published run that cannot be said, and why."""

    id: str
    reason: str


def read_rows(path: str | Path | None = None) -> list[dict[str, Any]]:
    """Read published rows, in the order of the file.

    Args:
        path: a JSON list, or JSON lines, either of them perhaps gzipped. None: the rows that come with this folder.

    Raises:
        ValueError: the file cannot be read as that, or a row has no id.
    """
    file = FOLDER / "training.jsonl.gz" if path is None else Path(path)
    asked = f"cannot read published rows from {file}"
    hint = "a JSON list of objects as in benchmarks/published/data/training.jsonl.gz, or one object on each line"
    try:
        raw = file.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
    except (OSError, ValueError) as error:
        raise ValueError(explain(asked, "it is no such file", f"seen: {error}", hint)) from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or "id" not in row:
            raise ValueError(explain(asked, "a row is an object with an 'id'", f"row {number}: {str(row)[:80]}", hint))
    return rows


def is_held_out(row: Row) -> bool:
    """Tell whether no fit may use the row: by source and group, see held_out.toml."""
    return any(all(_has(row, key, want) for key, want in group.items() if key != "why") for group in _held_out())


def measured(row: Row) -> Measured:
    """Return what a row says was measured; None for what its inputs do not suffice to predict."""
    rate = row.get("tok_s_dev")
    if rate is None and row.get("step_time_s"):
        rate = row["global_batch"] * row["seq_len"] / row["n_devices"] / row["step_time_s"]
    kind = str(row.get("mem_kind", ""))
    names = (
        ("STEP 1", "first step"),
        ("first iteration", "first iteration"),
        ("reserved", "reserved"),
        ("nvidia-smi", "device"),
    )
    memory = row.get("mem_gib") if row.get("predict_mem", True) and row.get("kind") != "analytic" else None
    return Measured(
        float(rate) if rate and row.get("predict_time", True) else None,
        None if memory is None else memory * GIB,
        next((name for text, name in names if text in kind), "allocated"),
        bool(row.get("oom")),
    )


def case_of(row: Row) -> Case | Skipped:
    """Return the row as arguments of `estimate`, or why that cannot be.

    >>> case = case_of(read_rows()[0])
    >>> case.dims.dp_shard, case.batch, case.recipe.checkpointing
    (64, 2, 'none')
    """
    notes: list[str] = []
    try:
        family = family_of(row)
        if family["name"] == "unknown":
            notes.append("nothing is known of its framework; taken as a plain one")
        model = model_of(row, family, notes)
        dims = dims_of(row, family, notes)
        recipe = recipe_of(row, family, notes)
        parts, batch = recipe.micro_batches, batch_of(row, dims)
        if batch % parts:
            raise CannotSay("cannot cut the batch into micro-batches: it does not divide")
        if dims.pp > 1 and parts < dims.pp:
            notes.append(f"{parts} micro-batches for {dims.pp} stages")
    except (CannotSay, ValueError, KeyError) as error:
        reason = f"the row lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        return Skipped(str(row["id"]), reason)
    network = row.get("inter_bw_gbytes_s_per_dev") if row["n_devices"] > row.get("hw_dev_per_node", 8) else None
    kernel = kernel_of(row, family)
    if "B200" in hardware_text(row):
        kernel = "cudnn"  # of TransformerEngine, and of torchtitan since 2025-05-14 (PR 1196)
    elif kernel == "flash3" and not any(text in hardware_text(row) for text in ("H100", "H200")):
        kernel = "flash2"  # what is known of FlashAttention 3 is known of Hopper
    return Case(
        str(row["id"]),
        model,
        dims,
        batch_of(row, dims),
        row["seq_len"],
        recipe,
        hardware_of(row),
        network,
        str(row.get("interconnect", "")),
        kernel,
        family["name"],
        measured(row),
        family.get("allocator", "caching"),
        tuple(notes),
        str(row.get("source", "")),
        is_held_out(row),
    )


@cache
def _held_out() -> list[dict[str, Any]]:
    return list(read_toml(FOLDER / "held_out.toml")["group"])


def _has(row: Row, key: str, want: str | list[str]) -> bool:
    return any(text in str(row.get(key, "")) for text in ([want] if isinstance(want, str) else want))
