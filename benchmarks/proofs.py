"""How sure proofs are: faults put into right programs, false alarms, and CPU time, over the zoo of tests and models.

The zoo, and the hand-written GPT, are those of `tests/unit/sim/prove`.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel import fully_shard
from hyper_parallel.models import huggingface_plan, llama_plan, parallelize_huggingface
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.models.moe_plan import parallelize_moe
from sim.prove.report import Report
from sim.prove.verify import verify_plan

MOST_OF_A_CASE, MOST_OF_A_MODEL = 6, 24
_TESTS = Path(__file__).resolve().parent.parent / "tests/unit/sim/prove"
_SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Proof = Callable[[], Report]


@dataclass
class Outcome:
    """What became of some programs.

    Attributes:
        programs: how many.
        alarms: how many of them were said to be wrong, or not proved.
        seconds: of CPU time, of each proof.
        faults: by their kind and by "found", "missed" or "none".
        missed: which were not found: their kind, place and program.
    """

    programs: int = 0
    alarms: int = 0
    seconds: list[float] = field(default_factory=list)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: list[tuple[str, str, str]] = field(default_factory=list)


def tables() -> tuple[str, str]:
    """Prove everything, and write two tables: faults by kind, and programs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path.insert(0, str(_TESTS))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            broken, right = _broken(), _zoo()
            models = {name: _proved([proof], MOST_OF_A_MODEL, name) for name, proof in _models().items()}
            suite = _suite()
    finally:
        sys.path.remove(str(_TESTS))
        torch.set_num_threads(threads)
    return _faults_table(right, models), _programs_table(broken, right, models, suite)


def _faults_table(right: Outcome, models: dict[str, Outcome]) -> str:
    together: Counter[tuple[str, str]] = sum((each.faults for each in models.values()), Counter())
    kinds = list(dict.fromkeys(kind for kind, _ in (*right.faults, *together)))
    lines = [
        "| fault put in | zoo: found | missed | no effect | models: found | missed | no effect |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in kinds:
        cells = [faults[kind, outcome] for faults in (right.faults, together) for outcome in _OUTCOMES]
        lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    missed: dict[str, list[str]] = {}
    for kind, place, program in (each for outcome in (right, *models.values()) for each in outcome.missed):
        missed.setdefault(f"{place} ({program})", []).append(kind)
    listed = [f"- missed: {', '.join(kinds)}: {where}" for where, kinds in missed.items()]
    return "\n".join([*lines, *([""] if listed else []), *listed])


_OUTCOMES = ("found", "missed", "none")


def _programs_table(broken: Outcome, right: Outcome, models: dict[str, Outcome], suite: Outcome) -> str:
    lines = ["| programs | how many | said to be wrong | CPU-seconds a proof, median |", "|---|--:|--:|--:|"]
    named = {"zoo, each with its fault": broken, "zoo, each without it": right, **models}
    for name, each in {**named, "right programs of the tests": suite}.items():
        lines.append(f"| {name} | {each.programs} | {each.alarms} | {statistics.median(each.seconds):.1f} |")
    return "\n".join(lines)


def _proved(proofs: Sequence[Proof], most: int, name: str = "") -> Outcome:
    """Prove programs, and put faults into those that are right."""
    found = Outcome()
    for proof in proofs:
        print(f"proving {name or 'a case of the zoo'}", file=sys.stderr)
        report = _timed(found, proof)
        if most and report.ok and report.mutants is not None:
            for row in report.sensitivity(most).rows:
                found.faults[row.kind, row.outcome] += 1
                found.missed += [(row.kind, row.place, name)] if row.outcome == "missed" else []
    return found


def _timed(found: Outcome, proof: Proof) -> Report:
    start = time.process_time()
    report = proof()
    found.seconds.append(time.process_time() - start)
    found.programs += 1
    found.alarms += not report.ok
    return report


# -- programs ----------------------------------------------------------------------------------------------------------


def _cases() -> list[Any]:
    modules = [importlib.import_module(name) for name in ("zoo_by_hand", "zoo_by_plan", "zoo_by_wrapper")]
    return [case for module in modules for case in module.CASES]


def _broken() -> Outcome:
    return _proved([partial(case.verify, broken=True) for case in _cases()], 0)


def _zoo() -> Outcome:
    found = Outcome()
    for case in _cases():
        each = _proved([partial(case.verify, broken=False)], MOST_OF_A_CASE, case.name)
        found.programs += each.programs
        found.alarms += each.alarms
        found.seconds += each.seconds
        found.faults += each.faults
        found.missed += each.missed
    return found


class _Timer:
    """Counts the items of a run of pytest, those that fail, and the CPU time of each; a plugin."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """Time an item."""
        start = time.process_time()
        yield
        self.outcome.seconds.append(time.process_time() - start)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count it."""
        if report.when == "call" and not report.skipped:
            self.outcome.programs += 1
            self.outcome.alarms += report.failed


def _suite() -> Outcome:
    """Run the tests each of which proves a right program."""
    timer = _Timer()
    pytest.main(["-q", "-p", "no:cacheprovider", str(_TESTS / "test_zoo_right.py")], plugins=[timer])
    return timer.outcome


def _models() -> dict[str, Proof]:
    steps = importlib.import_module("test_verify_step")
    return {
        "Llama, dp=2, tp=2": _llama,
        "MoE, ep=2, tp=2": _moe,
        "Qwen3 of transformers, tp=2": partial(_huggingface, "Qwen3", head_dim=8),
        "Mixtral of transformers, tp=2": partial(
            _huggingface, "Mixtral", num_local_experts=4, experts_implementation="eager"
        ),
        "hand-written GPT, tp=2": lambda: steps.verify("tp=2", parallelize=steps.fused),
        "hand-written GPT, pp=2": lambda: steps.verify("pp=2", parallelize=steps.staged, rank_step=steps.by_hand()),
        "hand-written GPT, cp=2": lambda: steps.verify(
            "cp=2", parallelize=steps.contextual(steps.zigzag), rank_step=steps.averaged, shard_batch=steps.zigzag
        ),
    }


def _tokens() -> torch.Tensor:
    return torch.randint(20, (4, 7), generator=torch.Generator().manual_seed(0))  # tp=2 cannot halve the sequence


def _llama() -> Report:
    config = LlamaConfig(**_SIZES, max_seq_len=8)
    plan = llama_plan(config, "dp=2,tp=2")
    layouts = None if "input" in (plan.input_plan or {}) else [("dp", "None")]
    return verify_plan(lambda: Llama.build(config, seed=0), (_tokens(),), "dp=2,tp=2", plan, input_layouts=layouts)


def _moe() -> Report:
    # The auxiliary loss is one that the loss of the proof does not have.
    config = MoEConfig(**_SIZES, max_seq_len=8, num_experts=4, expert_intermediate_size=6, aux_loss_weight=0.0)

    def parallelize(model: Any, mesh: Any) -> None:
        parallelize_moe(model, mesh, logits="local", etp=1)
        units: list[Any] = [fully_shard(model.layers[0].mlp.experts)]
        units += [fully_shard(part, mesh=mesh["ep"]) for part in (model.layers[0], model)]
        for unit in units:
            unit.set_reduce_op_type("sum")

    return verify_plan(
        lambda: MoELlama.build(config),
        (_tokens(),),
        "ep=2,tp=2",
        parallelize=parallelize,
        input_layouts=[("ep", "None")],
        loss_fn=lambda logits, tokens: logits.square().sum() / 7,
        optimizer_fn=None,
    )


def _huggingface(kind: str, **more: Any) -> Report:
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    sizes = {**_SIZES, "max_position_embeddings": 8, "use_cache": False, "attn_implementation": "eager", **more}

    def model() -> Any:
        return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))

    inputs = {"input_ids": _tokens(), "labels": _tokens()}
    if kind == "Qwen3":
        how: dict[str, Any] = {"plan": huggingface_plan(model(), "tp=2")}
    else:
        how = {"parallelize": parallelize_huggingface}
    return verify_plan(model, inputs, "tp=2", loss_fn=lambda out, **_: out.loss, **how)
