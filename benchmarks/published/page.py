"""Validation page, and its statistics: errors by source, order of configurations, coverage."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published.compare import CACHE, Compared, Outcome, known, publication, run, wanted, write_outcomes
from benchmarks.published.conventions import FOLDER
from benchmarks.published.predict import Simulator
from benchmarks.published.rows import read_rows
from hyper_parallel.core.machine.calibration import DATA, load_calibration
from hyper_parallel.core.machine.toml_file import read_toml
from sim.mesh.estimate import LEVELS, Z80

__all__ = ["Summary", "fitted", "ordered_pairs", "page", "summary", "validate"]

FITS = (DATA / "fit.toml", FOLDER / "fit.toml")
"""What was fitted of devices, and of frameworks."""
APART = 0.05
"""Configurations whose truths are nearer than this are not asked to be in order."""


@dataclass(frozen=True)
class Summary:
    """The errors of some rows, as parts of the truth.

    Attributes:
        count: rows.
        median: of the errors' sizes.
        p90: what nine of ten are below.
        worst: the largest.
        bias: median of the signed errors: above 0, predictions are too high.
        inside: share of truths inside of the 80 % interval.
    """

    count: int
    median: float
    p90: float
    worst: float
    bias: float
    inside: float


def summary(compared: Sequence[Compared]) -> Summary | None:
    """Return the summary of some comparisons; None: there are none."""
    if not compared:
        return None
    sizes = sorted(abs(one.error) for one in compared)
    return Summary(
        len(sizes),
        statistics.median(sizes),
        sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        sizes[-1],
        statistics.median(one.error for one in compared),
        sum(one.is_inside for one in compared) / len(sizes),
    )


def ordered_pairs(outcomes: Iterable[Outcome]) -> tuple[int, int]:
    """Return how many pairs of one source, device and model are in the right order by speed, and of how many.

    Pairs whose speeds differ by 5 % or less are left out; those that are predicted alike are in no order.
    """
    found = [(one.truth - other.truth) * (one.predicted - other.predicted) for one, other in _pairs(outcomes)]
    return sum(signs > 0 for signs in found), len(found)


def _pairs(outcomes: Iterable[Outcome]) -> Iterator[tuple[Compared, Compared]]:
    """Yield the pairs that are asked to be in order."""
    by_group: dict[str, list[Compared]] = {}
    for outcome in outcomes:
        if outcome.speed is not None:
            by_group.setdefault(outcome.group, []).append(outcome.speed)
    for group in by_group.values():
        for one, other in itertools.combinations(group, 2):
            if abs(one.truth - other.truth) > APART * min(one.truth, other.truth):
                yield one, other


Pick = Callable[[Outcome], "Compared | None"]
KINDS: tuple[tuple[str, str, Pick], ...] = (
    ("Throughput", "tokens/s of a device", lambda outcome: outcome.speed),
    ("Memory", "GiB", lambda outcome: outcome.memory),
)


def fitted(paths: Sequence[Path] = FITS) -> str:
    """Return what was fitted to published runs, with its evidence, as markdown."""
    lines = ["| figure | value | evidence |", "|---|--:|---|"]

    def walk(section: dict[str, Any], names: tuple[str, ...]) -> None:
        for name, value in section.items():
            if isinstance(value, dict):
                walk(value, (*names, name))
            elif not name.endswith("_source") and name not in ("grade", "source"):
                lines.append(f"| `{'.'.join((*names, name))}` | {value:g} | {section.get(name + '_source', '')} |")

    for path in paths:
        walk(read_toml(path), ())
    return "\n".join(lines)


def page(outcomes: Sequence[Outcome], command: str, fit: str = "") -> str:
    """Return the text of docs/generated/validation.md.

    Args:
        outcomes: of all rows.
        command: that makes the page.
        fit: what was fitted, as markdown.
    """
    parts = [_HEAD.format(command=command), "## In short\n", _coverage(outcomes), _short(outcomes)]
    parts += ["\n## Intervals by kind of evidence\n", _by_evidence(outcomes)]
    parts += ["\n## By source\n", *(_by_source(outcomes, *kind) for kind in KINDS)]
    parts += ["\n## The worst rows\n", *(_worst(outcomes, *kind) for kind in KINDS)]
    parts += ["\n## What is known of rows that are far off\n", _KNOWN]
    parts += ["\n## Out of memory\n", _out_of_memory(outcomes)]
    if fit:
        parts += ["\n## What was fitted\n", fit]
    parts += ["\n## Rows without a prediction\n", _skipped(outcomes)]
    parts += ["\n## Every row\n", *(_rows(outcomes, *kind) for kind in KINDS)]
    return "\n".join(parts).rstrip() + "\n"


_HEAD = """# Predicted against published

`sim.mesh` predicts step time and peak memory of training runs that others have published. This page is written by

    {command}

from the rows in `benchmarks/published/data/` (collected from public documents, each with its source). Nothing in them
was measured by this project. Held-out rows were chosen by whole sources and groups before anything was fitted; some
groups changed sides after a few predictions had been seen, and two held-out rows bear on one fitted figure:
`held_out.toml` and `fit.toml` say which. What a framework does otherwise (`frameworks.toml`, with its evidence) was
often looked up in its code after predictions of held-out rows had shown that something was missing: that pipelines of
Megatron-LM send parts and wait for messages, what Megatron-Bridge keeps in float8 and when it reads its memory, how
torchtitan's graphs and its Qwen3 communicate, which blocks fms-fsdp checkpoints, how InternEvo reduces gradients and
broadcasts weights, how DeepSpeed's ZeRO-3 fetched them in 2021; of torchtitan's memory, that its scripts let the
allocator's segments grow, on which streams and for how long FSDP2 has its buffers, what its graphs let go of, and that
one commit's runs (m0084 to m0086) cannot be checkpointed as their rows said; and what its selective checkpointing kept
with float8, seen in a calibration row. That Megatron-core casts weights to float8 once a step and has experts in
float8, and that it and torchtitan gather in float8 along tp, was looked up after both calibration rows (NeMo's) and
held-out ones (m0043, m0044) with float8 had been too slow. Nothing of this last was fitted, and it holds for
calibration rows alike. That intervals of memory tell pairs of framework and device that were fitted from others was
decided after too few held-out truths had been inside; their widths come from calibration rows. Four rows of
MindSpeed-LLM (m1122, m1161, m1166, m1175) were read once more, whose scripts say more of attention and experts than
had been transcribed. Speeds are compared as tokens/s of a device, never as MFU, whose definitions differ. Memory is
compared with what the row states: reserved or allocated bytes of torch's allocator, or nvidia-smi's. "Inside" is the
share of truths in the predicted 80 % interval. "Order" is the share of pairs of configurations (one source, device
and model; speeds more than 5 % apart) whose order by speed is predicted right.
More than half of the held-out pairs that are not have one of six runs of vTrain's gpt-39.1b (m0590, m0591,
m0593, m0594, m0595, m0597), which took 1.1 to 1.6 times what is predicted; they are transcribed as they were published
(data/ground_truth_multi.csv, rows 45 to 52, and the files of config/validation/multi that go with them). The 102 rows
that state memory were predicted last. The others are older: what they say of fitting lacks cuBLAS's workspaces.
"""

_KNOWN = """Their sources were read once more. Where they name no cause, none is put into an estimate.

- *Moonlight of Megatron-Bridge* (m0897, m0899, m0900). A step has four sequences for eight devices, and the table
  (skills/nemo-mbridge-perf-activation-recompute, 2026-08-12) tells of a host that the devices wait for: to compute
  layer norms again beside `moe_act` takes 40 ms more, which are some microseconds of kernels in each of 27 layers. The
  recipe (recipes/moonlight/h100/moonlight_16b.py) does not balance experts by force, as estimates do, checks gradients
  for NaN, and routes by unfused operations. How long the host takes for an operation it does not say. Estimates have
  4,983 operations of 40 us and 604 collectives of 30 a step, and the host waits in each layer for the number of tokens
  of each expert: 0.23 s, where 0.47 were measured. Other documents say that eager runs of such models wait for the host
  (skills/nemo-mbridge-perf-cuda-graphs/card.yaml: Qwen3-30B-A3B takes 623 ms, with graphs of attention and router 484),
  without the batch that would make it evidence for an operation's time.
- *fms-fsdp on H100* (m1082, m1084, m1088). The README of 2024-05-09 has the same scripts and batches on 128 A100 with
  400 Gb/s a node and on 96 H100 with 800, which is how the rows are estimated. That a smaller share of the peak is
  attained on H100 (0.46 of it against 0.68 with 7B) it notes, without a reason. What torchtitan attained with torch of
  that year, on both devices less than is taken here, would bring these rows nearer, and those on A100 farther away.
- *llm-foundry on A100 with 40 GB* (m0284 to m0296). Rows with up to 7B are within 12 %; those with 13B and more are 9
  to 53 % too fast, on one node as well as on sixteen. They are not predicted to be out of memory. The README states
  neither memory nor what the network attained.
- *Qwen3-32B of torchtitan over nodes* (m0105 to m0107, m0110, m0111). 8 to 10 % too fast with tp of 1, 4 and 8 alike,
  while one node is 0 to 8 % too slow. At 400 Gb/s a device, gathers and reductions of FSDP over 16 take 0.6 of 11
  seconds, and overlap, so that bandwidth is not it. The commit's message names no other limit.
- *InternEvo over 512 and 1,024 devices* (m1062 to m1064). 0.5 to 0.7 s of a step are missing where it has one or two
  micro-batches, and 0.3 s with four (m1061): it is no cost that each step has alike.
- *Scales for rows in torchtitan* (m0070, m0074, m0075). 12 to 14 % too fast; compiled ones with one scale are 4 % off
  at the median. What casts along columns was said to attain 0.6 to 0.7 TB/s of an H100, where other kernels attain 2
  (pytorch/pytorch, issue 149982, of blocks of columns). It is not in estimates: no figure is of these kernels.
- *torchtitan's memory* (m0053, m0054, m0074). With float8 its selective checkpointing kept |W| of unsharded weights
  until 2025-02-04 (commit 88247277c): in m0074, which is compiled, the 10.8 GiB that are missing; estimates have it
  where nothing is compiled (m0077: 32 GiB). Of the runs of 2024-03 (commit 83c879f18), those with tp of 2 have 24 GiB
  more than those with one axis and as many tokens, with full and with selective checkpointing alike. The message does
  not say why.
- *vTrain's gpt-39.1b* (m0590 to m0597): see above; its gpt-175.0b, of the same cluster and files, is within 6 %. With
  tp=4 and pp=8 a step took 16.1, 17.6 and 16.1 s with 2, 3 and 6 sequences in a micro-batch (m0593, m0595, m0609), an
  order that no cost of the program has. vTrain, which was made for these runs and has profiles of their device, is said
  to be 14.7 % off at the mean on several nodes, and 8.4 % on one (KAIST's notice of it, 2025-03-26).
- *What Megatron-LM until 2023 has between matrix products.* Estimates have bias, dropout and residual as three
  kernels, copy what is reduced along tp, and copy queries, keys and values for attention. There it is one kernel (2.5:
  megatron/model/transformer.py, `bias_dropout_add_fused_train`; in BLOOM's runs it is not, as the fuser that they set
  leaves dropout alone from torch 1.11 on, pytorch/pytorch#66273), reductions are in place (megatron/mpu/mappings.py,
  `_reduce`), and activations are (sequence, batch, hidden), which attention reads as they lie. With all three, and
  with 47 us of the host for an operation in place of 40, vTrain's 40 calibration rows on one node go from 9.1 to 7.5 %
  at the median, five of Korthikanti et al. from 7.7 to 5.8, and 27 of vTrain's on several nodes from 4.3 to 6.5: these
  were 3 % too fast as it was. The mean error of the 72, of which none counts above 40 %, goes from 7.7 to 8.0 %: it is
  not in estimates. That the kernel of a causal softmax reads no more than half of the scores would make rows with
  2,048 tokens another 1 to 3 % faster; what it attains is not published.
- *B200's products by shape.* SimuMax's table (configs/system/b200_bf16_ceperm.json, Apache-2.0) has 514 products of
  TransformerEngine in bfloat16, each repeated a hundred times. What four of its runs say, 0.68 of the best rate, gives
  the 232 that take 1 ms and more a median error of 5.7 % (5 % too fast), the 204 of 0.1 to 1 ms 9.5 % (8 % too slow);
  without it they are 35 and 26 % too fast. The 78 below 0.1 ms are 48 % too slow with it and 4 % without: they are
  over before power limits the clock. A limit on the best rate alone (0.49 of the peak, and nothing of smaller
  products) makes the four runs 1.8 % off at the mean in place of 2.9, but those held out of torchtitan a third in
  place of a quarter: it is not in estimates. Its attention is (`core/machine/data/curves.toml`). Products of many small
  experts are slower than estimates have them: half as fast with fewer than 256 rows in each, nearly as fast from 2,000
  on. Its A100 is the PCIe one, which attains a tenth less than estimates have for SXM. AIConfigurator's tables are not
  to be had in Git (LFS) but for 32 products of a B200, which a burst computes 1.6 to 2 times as fast as estimates say.
- *Ascend's attention and exchanges.* 7 runs of MindFormers of 16,384 tokens and more ask for a tenth more than one
  head alone attains (mean error 6 in place of 7 %), two that keep it for less: it is left. No figures of all_to_all on
  a node of 910B were found; those of a SuperPoD are DeepEP-Ascend's. Of nine runs that were predicted not to fit,
  Yi-34B's two fit since MindSpore's pool is known to have no holes (60.1 GiB were reserved for 50.5). DeepSeek-V2
  (m1199) had experts as wide as its dense layers, no split of them over tp and no room for twice the tokens, all in
  its yaml; its weights are bfloat16 alone, of which estimates keep float32, too. LLaMA2-70B (m1187) recomputes parts
  of layers, which is left out. MindSpeed-LLM's five state neither recomputation nor how the allocator is set; three of
  them are less than 2 GiB above the limit.
- *BLOOM's dropout.* Its runs inherit Megatron-LM's, 0.1 (bigscience, train/tr11-176B-ml/README.md); estimates have
  none. Nine calibration rows were tried with it, and with 0.80 of the rates of kernels in place of 0.72: their mean
  error is 3.0 % with both, and 3.1 without. It is in what was fitted, and not in estimates.
"""


def _coverage(outcomes: Sequence[Outcome]) -> str:
    """Say of how many rows there are predictions: the tables are about these."""
    told = [outcome for outcome in outcomes if not outcome.reason]
    missing = len(outcomes) - len(told)
    text = f"Of {len(outcomes)} rows that state enough, {len(told)} have a prediction."
    if missing:
        reasons = Counter(outcome.reason for outcome in outcomes if outcome.reason)
        why, count = reasons.most_common(1)[0]
        text += (
            f"\nThe figures below say nothing of the other {missing} ({count}: {why}): see *Rows without a prediction*."
        )
    text += "\nOutcomes are kept in `validation.jsonl`; they may be of several passes, with other figures in between."
    return text + "\n"


def _short(outcomes: Sequence[Outcome]) -> str:
    lines = ["| | rows | median error | 9 of 10 below | worst | bias | inside | order |", "|---|" + "--:|" * 7]
    for name, _, pick in KINDS:
        for held, told in ((True, "held out"), (False, "calibration")):
            some = [outcome for outcome in outcomes if outcome.is_held_out == held]
            found = summary([one for outcome in some if (one := pick(outcome)) is not None])
            right, count = ordered_pairs(some) if name == "Throughput" else (0, 0)
            order = f"{right} of {count} ({right / count:.0%})" if count else "-"
            lines.append(f"| {name}, {told} | {_figures(found)} | {order} |")
    return "\n".join([*lines, "", _alike(outcomes)])


def _alike(outcomes: Sequence[Outcome]) -> str:
    """Say how many pairs no prediction can put in order."""
    counts = [
        sum(one.predicted == other.predicted for one, other in _pairs(x for x in outcomes if x.is_held_out == held))
        for held in (True, False)
    ]
    return (
        f"Of the pairs, {counts[0]} held-out and {counts[1]} calibration ones are predicted alike, mostly as the rows "
        "repeat one program; they count as not in order."
    )


def _figures(found: Summary | None) -> str:
    if found is None:
        return "0 | - | - | - | - | -"
    errors = f"{found.median:.1%} | {found.p90:.1%} | {found.worst:.1%} | {found.bias:+.1%}"
    return f"{found.count} | {errors} | {found.inside:.0%}"


def _by_source(outcomes: Sequence[Outcome], name: str, unit: str, pick: Pick) -> str:
    lines = [f"\n**{name}**\n", "| source | | rows | median error | 9 of 10 below | worst | bias | inside |"]
    lines.append("|---|---|" + "--:|" * 6)
    for source, held in sorted({(outcome.source, outcome.is_held_out) for outcome in outcomes}):
        some = [outcome for outcome in outcomes if (outcome.source, outcome.is_held_out) == (source, held)]
        found = summary([one for outcome in some if (one := pick(outcome)) is not None])
        if found is not None:
            lines.append(f"| {source} | {'held out' if held else ''} | {_figures(found)} |")
    return "\n".join(lines)


_EVIDENCE = """How wide a step's interval is depends on what is known of such steps (`core/machine/data/spreads.toml`):
by kernels, and by how many runs of the same framework on the same family of devices are not held out: ten and more
(often), fewer (seldom), only those of other frameworks (never), none (nothing). The widths are fitted by

    python -m benchmarks.fit_mesh --spreads --write

to rows that are not held out. "Left out" are these rows as predicted without what is fitted to their own publication,
as of a framework or a device that was never seen. Width is the interval's upper end over the prediction, at the median.
Few publications have a kind of kernels that is not dense, or a device that no other one has: there Student's
distribution makes intervals wide, and more than 80 % of what they are fitted to are inside.
"""


def _by_evidence(outcomes: Sequence[Outcome]) -> str:
    """Return a table of how often the truth was inside, by how much was known."""
    spreads = load_calibration().section("estimate", "default")["spread"]
    cells: dict[tuple[str, int, str], list[tuple[bool, float, str]]] = {}
    for one in known(outcomes):
        width = Z80 * math.hypot(spreads[one.kernels][one.level], one.outcome.prices)
        rows = "held out" if one.outcome.is_held_out else "left out" if one.is_left_out else "calibration"
        found = cells.setdefault((one.kernels, LEVELS.index(one.level), rows), [])
        found.append((abs(one.error) <= width, math.exp(width), publication(one.outcome.source)))
    lines = [_EVIDENCE, "| kernels | known | rows | | publications | inside | width |"]
    lines.append("|---|---|---|--:|--:|--:|--:|")
    for (kind, level, rows), found in sorted(cells.items()):
        inside = sum(one for one, _, _ in found) / len(found)
        sources, width = len({source for _, _, source in found}), statistics.median(x for _, x, _ in found)
        lines.append(f"| {kind} | {LEVELS[level]} | {rows} | {len(found)} | {sources} | {inside:.0%} | {width:.2f} |")
    return "\n".join(lines)


def _worst(outcomes: Sequence[Outcome], name: str, unit: str, pick: Pick, count: int = 10) -> str:
    found = [(one, outcome) for outcome in outcomes if (one := pick(outcome)) is not None]
    found.sort(key=lambda pair: (-abs(pair[0].error), pair[1].id))
    lines = [f"\n**{name}** ({unit})\n", "| row | configuration | published | predicted | error | notes |"]
    lines.append("|---|---|--:|--:|--:|---|")
    for one, outcome in found[:count]:
        lines.append(
            f"| {outcome.id} | {outcome.source}: {outcome.text} | {_digits(one.truth)} | {_digits(one.predicted)} | "
            f"{one.error:+.1%} | {'; '.join(outcome.notes)} |"
        )
    return "\n".join(lines)


def _out_of_memory(outcomes: Sequence[Outcome]) -> str:
    failed = [outcome for outcome in outcomes if outcome.is_oom and outcome.fits is not None]
    ran = [outcome for outcome in outcomes if not outcome.is_oom and outcome.fits is not None]
    said = sum(not outcome.fits for outcome in failed)
    wrong = sum(not outcome.fits for outcome in ran)
    return (
        f"Of {len(failed)} published runs that were out of memory, {said} are predicted not to fit; of {len(ran)} that "
        f"ran, {wrong} are predicted not to fit (by peak reserved memory against the device's)."
    )


def _skipped(outcomes: Sequence[Outcome]) -> str:
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.reason:
            reasons.setdefault(outcome.reason, []).append(outcome.id)
    if not reasons:
        return "None."
    lines = ["| rows | reason | which |", "|--:|---|---|"]
    for reason, ids in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        some = ", ".join(ids[:6]) + (" ..." if len(ids) > 6 else "")
        lines.append(f"| {len(ids)} | {reason.replace('|', '/')} | {some} |")
    return "\n".join(lines)


def _rows(outcomes: Sequence[Outcome], name: str, unit: str, pick: Pick) -> str:
    lines = [f"\n**{name}** ({unit}; * held out)\n", "| row | configuration | published | predicted | 80 % | error |"]
    lines.append("|---|---|--:|--:|---|--:|")
    for outcome in outcomes:
        if (one := pick(outcome)) is not None:
            kind = f", {outcome.memory_kind}" if name == "Memory" else ""
            lines.append(
                f"| {outcome.id}{'*' if outcome.is_held_out else ''} | {outcome.text}{kind} | {_digits(one.truth)} | "
                f"{_digits(one.predicted)} | {_digits(one.low)} to {_digits(one.high)} | {one.error:+.1%} |"
            )
    return "\n".join(lines)


def _digits(value: float) -> str:
    """Return four digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def validate(
    file: str | Path | None = None,
    *,
    write: str | Path | None = None,
    cache: str | Path | None = CACHE,
    processes: int = 2,
    progress: Callable[[int, int, Outcome], None] | None = None,
) -> str:
    """Validate rows, and return the report as markdown.

    Args:
        file: of rows; None: those that come with this folder.
        write: also write the report here, and the outcomes beside it, ending in `.jsonl`.
        cache: folder to keep traces in; None: they are not kept.
        processes: that work at the same time.
        progress: called with how many rows are done, of how many, and the last outcome.

    Raises:
        ValueError: the file holds no rows.
    """
    rows = wanted(read_rows(file))
    outcomes = []
    for outcome in run(rows, Simulator(cache), processes=processes):
        outcomes.append(outcome)
        if progress is not None:
            progress(len(outcomes), len(rows), outcome)
    named = "" if file is None else f" {file}"
    command = f"python -m benchmarks.published{named} --write {write or 'docs/generated/validation.md'}"
    text = page(outcomes, command, fitted())
    if write is not None:
        Path(write).write_text(text, encoding="utf-8")
        write_outcomes(outcomes, Path(write).with_suffix(".jsonl"))
    return text
