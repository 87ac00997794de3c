"""The mesh simulator: what an estimate costs, however many devices there are, and beside torch's own way.

Every estimate is made by a fresh process (`mesh_probe.py`), and contestants alternate, in an order drawn anew for each
round; figures are medians over the rounds. How near its predictions come on this machine is told by `mesh_here.py`; how
near on others' machines, by docs/generated/validation.md.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks.mesh_probe import Cost, Task, run_alone

LARGEST = Task("llama3-405b", {"tp": 8, "pp": 16, "dp_shard": 128}, 16, 8192, checkpointing="full")
"""The spec's: 16,384 devices, 2,048 sequences of 8,192 tokens in a step."""
AIM_SECONDS, AIM_BYTES = 60.0, 4 * 2**30
ROUNDS = 3
PHASES = ("import torch", "import", "trace", "price")
CONTESTANTS = ("ours", "every layer", "torch")

Run = Callable[[Task], Cost]


def tasks() -> list[Task]:
    """What is estimated: one model on ever more devices, each with as many sequences as before."""
    pipelined = [replace(LARGEST, degrees={**LARGEST.degrees, "dp_shard": n}) for n in (8, 32, 128, 800)]
    sharded = [Task("llama3-8b", {"dp_shard": n}, 1, 8192) for n in (64, 1024, 16384)]
    return [*pipelined, *sharded]


def cost_table(chosen: Sequence[Task] | None = None, rounds: int = ROUNDS, run: Run = run_alone) -> str:
    """What estimates cost, as a Markdown table.

    Args:
        chosen: what is estimated; None: all.
        rounds: times that each is, in turn.
        run: does a task.
    """
    chosen = tasks() if chosen is None else list(chosen)
    costs = _in_turns({str(n): task for n, task in enumerate(chosen)}, rounds, run)
    lines = [
        "| model | devices | degrees | import torch, s | import the rest, s | trace, s | price, s | whole process, s "
        "| aim, s | CPU, s | peak RSS, GiB | aim, GiB |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for n, task in enumerate(chosen):
        found = costs[str(n)]
        phases = [statistics.median(cost.phases[name] for cost in found) for name in PHASES]
        wall = statistics.median(cost.wall for cost in found)
        rss = max(cost.peak_rss for cost in found) / 2**30
        large = task == LARGEST
        cells = [task.model, f"{task.ranks:,}", _degrees(task), *(f"{seconds:.2f}" for seconds in phases)]
        cells += [f"{wall:.1f}", f"{AIM_SECONDS:.0f}" if large else "-"]
        cells += [f"{statistics.median(cost.cpu for cost in found):.1f}"]
        cells += [f"{rss:.2f}", f"{AIM_BYTES / 2**30:.0f}" if large else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def torch_table(
    ranks: Sequence[int] = (64, 256),
    rounds: int = ROUNDS,
    model: str = "llama3-8b",
    seq_len: int = 8192,
    run: Run = run_alone,
) -> str:
    """Ours beside torch's FSDP2 on tensors without values, as a Markdown table.

    Args:
        ranks: numbers of ranks to shard over.
        rounds: times that each contestant runs.
        model: which.
        seq_len: tokens of the one sequence of each rank.
        run: does a task.
    """
    lines = [
        "| ranks | ours: trace + price, s | ours, every layer recorded, s | torch: build + step, s | of that build, s "
        "| ours / torch | every layer / torch | ours, peak RSS, GiB | torch, peak RSS, GiB |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for count in ranks:
        contestants = {
            how: Task(model, {"dp_shard": count}, 1, seq_len, how) for how in ("ours", "every layer", "torch")
        }
        costs = _in_turns(contestants, rounds, run)
        work = {how: _work(found) for how, found in costs.items()}
        build = statistics.median(cost.phases["build"] for cost in costs["torch"])
        cells = [f"{count:,}", *(f"{work[how]:.2f}" for how in contestants), f"{build:.2f}"]
        cells += [_ratio(costs[how], costs["torch"]) for how in ("ours", "every layer")]
        cells += [f"{max(cost.peak_rss for cost in costs[how]) / 2**30:.2f}" for how in ("ours", "torch")]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def _in_turns(contestants: Mapping[str, Task], rounds: int, run: Run) -> dict[str, list[Cost]]:
    costs: dict[str, list[Cost]] = {name: [] for name in contestants}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(contestants), len(contestants)):
            costs[name].append(run(contestants[name]))
    return costs


def _work(costs: Sequence[Cost]) -> float:
    return statistics.median(cost.work for cost in costs)


def _ratio(ours: Sequence[Cost], theirs: Sequence[Cost]) -> str:
    """The ratio of medians, and between which values those of the rounds lie."""
    pairs = [one.work / other.work for one, other in zip(ours, theirs, strict=True)]
    value = _work(ours) / _work(theirs)
    return f"{value:.2g} ({min(pairs):.2g}-{max(pairs):.2g})"


def _degrees(task: Task) -> str:
    return ", ".join(f"{name}={degree}" for name, degree in task.degrees.items())
