"""How long a proof takes: the Llama of 10 million parameters on 8 simulated ranks, where the time goes, and on 64.

The stages are timed from inside, by functions of `sim.prove` that are wrapped for the time of one proof.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import sim
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.plans import llama_plan
from sim.prove import verify as prove
from sim.prove.report import Report

CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_seq_len=64,
)
MESH = "dp=2,tp=4"
AIM = 30.0
ROUNDS = 3

_STAGES = ("one device", "perturbed", "ranks", "comparison")


def proof(config: LlamaConfig = CONFIG, mesh: str = MESH, dtype: torch.dtype = torch.float64) -> Report:
    """Verify the shipped plan with 4 sequences of 32 tokens."""
    tokens = torch.randint(config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    plan = llama_plan(config, mesh)
    layouts = None if "input" in (plan.input_plan or {}) else [("dp", "None")]
    return prove.verify_plan(
        lambda: Llama.build(config, seed=0), (tokens,), mesh, plan, input_layouts=layouts, dtype=dtype
    )


def table() -> str:
    """Time proofs, and write the medians as a table."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [_row("float64", torch.float64), _row("float32", torch.float32)]
    finally:
        torch.set_num_threads(threads)
    title = f"{CONFIG.num_parameters() / 1e6:.1f} million parameters, {CONFIG.num_hidden_layers} layers, {MESH}"
    head = [
        f"| {title} | tensors | seconds | aim | {' | '.join(f'{stage}, s' for stage in _STAGES)} |",
        "|---|--:|--:|--:|" + "--:|" * len(_STAGES),
    ]
    return "\n".join([*head, *rows])


def of_ranks(ranks: int, *, is_right: bool, by_steps: bool) -> Report:
    """Verify data parallelism of four MLPs, which forgets to average the gradients unless it is right."""

    def model() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)])

    def parallelize(model: nn.Module, mesh: Any) -> None:
        def averaged(grad: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(grad, op=dist.ReduceOp.AVG, group=mesh.get_group())
            return grad

        for parameter in model.parameters() if is_right else ():
            parameter.register_hook(averaged)

    def loss_of(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (y - x).square().mean()

    x, mesh = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), f"dp={ranks}"
    if not by_steps:
        layouts = [("dp", "None")]
        return sim.verify_plan(model, (x,), mesh, parallelize=parallelize, input_layouts=layouts, loss_fn=loss_of)
    return sim.verify_step(
        lambda model, x: loss_of(model(x), x), model, x, mesh, parallelize=parallelize,
        shard_batch=lambda x, mesh: x.chunk(mesh.size())[mesh.get_rank()],
    )  # fmt: skip


def ranks_table() -> str:
    """Write what proofs on 8 and on 64 ranks cost, in turns."""
    rows = ["| program | proof | 8 ranks, CPU-s | 64 ranks, CPU-s | ratio | aim |", "|---|---|--:|--:|--:|--:|"]
    for is_right, by_steps in itertools.product((True, False), (False, True)):
        spent = defaultdict[int, list[float]](list)
        for _, ranks in itertools.product(range(ROUNDS), (8, 64)):
            start = time.process_time()
            assert of_ranks(ranks, is_right=is_right, by_steps=by_steps).ok is is_right
            spent[ranks].append(time.process_time() - start)
        few, many = (sorted(spent[ranks])[ROUNDS // 2] for ranks in (8, 64))
        names = "right" if is_right else "no gradient is averaged", "verify_step" if by_steps else "verify_plan"
        rows.append(f"| {' | '.join(names)} | {few:.1f} | {many:.1f} | {many / few:.1f} | 8 |")
    return "\n".join(rows)


def _row(name: str, dtype: torch.dtype) -> str:
    runs = []
    for _ in range(ROUNDS):
        with _stages() as spent:
            start = time.perf_counter()
            report = proof(dtype=dtype).raise_if_bug()
            total = time.perf_counter() - start
        runs.append((total, dict(spent), len(report.rows)))
    total, spent_in, number = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
    spent_in["comparison"] = total - sum(spent_in.values())  # and what else there is, such as making models to look at
    stages = " | ".join(f"{spent_in.get(stage, 0.0):.1f}" for stage in _STAGES)
    return f"| {name} | {number} | {total:.1f} | {AIM:.0f} | {stages} |"


@contextmanager
def _stages() -> Iterator[defaultdict[str, float]]:
    """Add up the seconds of the stages of a proof."""
    spent = defaultdict[str, float](float)

    def timed(function: Callable[..., Any], stage: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[stage(*args)] += time.perf_counter() - start

        return call

    def of_one(loop: Any, taken: Any, seed: int | None) -> str:
        del loop, taken
        return "one device" if seed is None else "perturbed"

    with ExitStack() as stack:
        loop: Any = prove._PlanLoop
        patched: list[tuple[Any, str, Callable[..., str]]] = [(loop, "on_one", of_one)]
        patched.append((loop, "on_ranks", lambda *_: "ranks"))
        for owner, name, stage in patched:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), stage)))
        yield spent
