"""Strategies of the property tests of training: problems with a reference on one device, and arrangements.

The reference of a problem runs on one device, plainly and three times perturbed (`sim.prove.bound.Perturbed`): how far
its losses, its weights and its optimizer's state then move bounds how far any other order of the same sums moves them.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from hypothesis import strategies as st

import sim
from hyper_parallel.core.checkpoint import load_checkpoint, read_metadata
from hyper_parallel.core.pipeline import SCHEDULES
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ExpertsConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from hyper_parallel.trainer.loop import Trainer, train
from hyper_parallel.trainer.preflight import plan_run
from hyper_parallel.trainer.report import StepRecord, TrainResult
from sim.prove.bound import SAFETY, Perturbed

STEPS, LAYERS, BATCH, SEQ = 3, 2, 8, 8
# Draws whose bounds are narrow: in bf16, one moment's differs threefold between draws, and the narrower finds more.
PERTURBATIONS = range(200, 203)
SAFETY_OF_NORMS = 8.0
"""As `SAFETY`, for the norm of a full tensor's difference: of many roundings, some up and some down."""
STEP_ROUNDINGS = 16.0  # that an update is granted, in units of a tensor's largest element; Adam's chain has 12
UNITS = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-24}  # of what is kept: weights, moments, and sums of losses

_DENSE = Config(
    model=LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2
    ),
    data=DataConfig(max_bytes=100_000),
    optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2),
    train=TrainConfig(steps=STEPS, batch_size=BATCH, seq_len=SEQ, eval_sequences=3, device="cpu", memory_limit_gb=8.0),
)
_EXPERTS = ExpertsConfig(num_experts=4, expert_intermediate_size=8)
_DEEP = replace(_DENSE, train=replace(_DENSE.train, model="moe"), experts=_EXPERTS)
_TIED = replace(_DENSE.model, tie_embeddings=True)
_HOLES = replace(_DENSE.data, ignored=0.3)

MODELS: Mapping[str, Config] = {
    "dense": _DENSE,
    "dense, tied, tokens ignored": replace(_DENSE, model=_TIED, data=_HOLES),
    "every expert": replace(_DEEP, experts=replace(_EXPERTS, num_experts=2, aux_loss_weight=0.1), data=_HOLES),
    "experts": replace(_DEEP, data=_HOLES),
    "experts in all layers, tied": replace(
        _DEEP, model=_TIED, experts=replace(_EXPERTS, num_dense_layers=0, num_shared_experts=0, score="softmax")
    ),
}
"""Tiny models with their data, by what is special about them."""

CHOOSES = ("experts", "experts in all layers, tied")
"""Those in which a rounding could send a token to another expert, which is no small change: float64 only.

There it would take two scores that agree to some 12 digits (`test_no_token_is_between_two_experts`). With fewer digits,
"every expert" stands for them: each token goes to all experts, so that nothing jumps.
"""


class Problem(NamedTuple):
    """What is trained, whatever the ranks."""

    model: str
    precision: str

    def config(self) -> Config:
        return replace(MODELS[self.model], precision=PrecisionConfig(self.precision))


PROBLEMS = tuple(
    Problem(model, precision)
    for precision, model in itertools.product(("fp64", "fp32", "bf16"), MODELS)
    if precision == "fp64" or model not in CHOOSES
)


class Arrangement(NamedTuple):
    """The ranks, and what each of them does."""

    world_size: int
    accumulate: int
    parallel: ParallelConfig

    def of(self, problem: Problem) -> Config:
        """Return the run of a problem by these ranks."""
        config = problem.config()
        return replace(config, train=replace(config.train, accumulate=self.accumulate), parallel=self.parallel)


def fits(problem: Problem, arrangement: Arrangement) -> bool:
    """Ask the library whether it takes this run."""
    try:
        plan_run(arrangement.of(problem), arrangement.world_size)
    except ValueError:
        return False
    return True


@cache
def degrees_of(problem: Problem, world_size: int) -> tuple[ParallelConfig, ...]:
    """Return all degrees by which the model can be split over so many ranks; the first are the simplest."""
    found = []
    divisors = [each for each in range(1, world_size + 1) if world_size % each == 0]
    # A pipeline whose schedule takes any model; which others can be is asked when one is drawn.
    bare = {"schedule": "gpipe"}
    for sizes in itertools.product(divisors, repeat=5):
        if world_size % math.prod(sizes):
            continue
        named = dict(zip(("dp_replicate", "cp", "tp", "pp", "ep"), sizes, strict=True))
        sizes_of_stages = _sizes(named["pp"])
        inside = [(None, False)] + [(1, False)] * (named["tp"] > 1 and named["ep"] > 1)
        inside += [(None, True)] * (named["cp"] > 1) + [(1, True)] * (named["tp"] > 1)
        for etp, fold in inside:
            for ulysses in (each for each in divisors if named["cp"] % each == 0):
                parallel = ParallelConfig(
                    **named,
                    **bare,
                    etp=etp,
                    fold_experts=fold,
                    ulysses_degree=ulysses,
                    layers_per_stage=sizes_of_stages,
                )
                if fits(problem, Arrangement(world_size, 1, parallel)):
                    found.append(parallel)
    return tuple(sorted(found, key=_complexity))


def _sizes(stages: int) -> str | None:
    """Say how many layers each stage has; None without a pipeline, where there is nothing to say."""
    return ",".join(map(str, _filled(stages))) if stages > 1 else None


def _filled(stages: int) -> list[int]:
    """Numbers of layers for any number of stages; the first has the embedding, and goes without first."""
    if stages > LAYERS:
        return [int(1 <= stage <= LAYERS) for stage in range(stages)]
    return [LAYERS // stages + (stage < LAYERS % stages) for stage in range(stages)]


def _complexity(parallel: ParallelConfig) -> tuple[int, ...]:
    sizes = (parallel.dp_replicate, parallel.cp, parallel.tp, parallel.pp, parallel.ep)
    return (sum(size > 1 for size in sizes), *sizes)


@cache
def pipelines_of(
    problem: Problem, world_size: int, parallel: ParallelConfig
) -> tuple[tuple[str, int | None, int, int], ...]:
    """Return schedules, stages per rank, stages and numbers of micro-batches that go with these degrees."""
    found: list[tuple[str, int | None, int, int]] = []
    for name, kind in SCHEDULES.items() if parallel.pp > 1 else [("1f1b", SCHEDULES["1f1b"])]:
        if not kind.is_available:
            continue
        for each in (None, 1, 3) if kind.is_multi and kind.style == "loop" and parallel.pp == 2 else (None,):
            stages = parallel.pp * kind.checked_stages_per_rank(each) if parallel.pp > 1 else 1
            sizes = _sizes(stages)
            for accumulate in (1, 2, 4, 8):
                asked = replace(parallel, schedule=name, stages_per_rank=each, layers_per_stage=sizes)
                if fits(problem, Arrangement(world_size, accumulate, asked)):
                    found.append((name, each, stages, accumulate))
    return tuple(found)


WORLDS = (2, 4, 2, 3, 2, 4, 2, 8, 2, 4, 2, 6, 2, 4, 2, 4, 2, 3, 2, 8, 2, 4, 12, 2, 4, 16)
"""Numbers of ranks, few more often: a run costs what its ranks cost, and takes seconds on 16."""


@st.composite
def arrangements(draw: st.DrawFn, problem: Problem) -> Arrangement:
    """Draw ranks that can train a problem; shrinks towards two ranks, each with its data and half of each weight."""
    world_size = draw(st.sampled_from(WORLDS).filter(lambda size: bool(degrees_of(problem, size))))
    parallel = draw(st.sampled_from(degrees_of(problem, world_size)))
    name, each, stages, accumulate = draw(st.sampled_from(pipelines_of(problem, world_size, parallel)))
    sizes = None
    if parallel.pp > 1 and (stages > LAYERS or draw(st.booleans())):
        cuts = sorted(draw(st.lists(st.integers(0, LAYERS), min_size=stages - 1, max_size=stages - 1)))
        sizes = ",".join(str(last - first) for first, last in itertools.pairwise([0, *cuts, LAYERS]))
    parallel = replace(parallel, schedule=name, stages_per_rank=each, layers_per_stage=sizes)
    if not fits(problem, Arrangement(world_size, accumulate, parallel)):  # a rank would have nothing
        parallel = replace(parallel, layers_per_stage=_sizes(stages))
    found = Arrangement(world_size, accumulate, replace(parallel, reshard_after_forward=draw(st.booleans())))
    changes = {
        "checkpointing": ("full", "selective"),
        "engine": ("hsdp",),
        "reshard_inputs": (True,),
        "tp_chunks": (2,),
    }
    for key, others in changes.items():
        made = [found._replace(parallel=replace(found.parallel, **{key: other})) for other in others]
        found = draw(st.sampled_from([found, *(each for each in made if fits(problem, each))]))
    assert fits(problem, found), "what is drawn is what the library takes"
    return found


Outcome = dict[str, torch.Tensor]
"""Losses and norms of the steps of a run, and every tensor that it has saved at its end."""


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="training-") as path:
        yield Path(path)


def run(config: Config, world_size: int, keep: Path, every: int = 0) -> Outcome:
    """Train, with a checkpoint at the end, or of each step; every rank must return the same records."""
    config = replace(config, checkpoint=CheckpointConfig(str(keep), every=every, keep=STEPS))
    results = sim.run(train, world_size, args=(config,))
    for result in results:
        assert not result.save_failures, result.save_failures
        assert numbers(result) == numbers(results[0]), "ranks return different numbers"
    return outcome(results[0], keep)


def numbers(result: TrainResult) -> list[tuple[object, ...]]:
    return [(each.step, each.loss, each.grad_norm, each.valid_loss, each.tokens, each.lr) for each in result.steps]


def outcome(result: TrainResult, keep: Path) -> Outcome:
    found = {f"loss of step {each.step}": torch.tensor(each.loss, dtype=torch.float64) for each in result.steps}
    for each in result.steps:
        found[f"norm of step {each.step}"] = torch.tensor(each.grad_norm, dtype=torch.float64)
        found[f"tokens of step {each.step}"] = torch.tensor(each.tokens)
    found["validation"] = torch.tensor(result.valid_loss, dtype=torch.float64)
    return {**found, **saved(step_folder(keep, STEPS))}


def step_folder(keep: Path, step: int) -> Path:
    return keep / f"step-{step:08d}"


def saved(path: Path) -> Outcome:
    """Read all tensors of a checkpoint, whole; what ranks have for themselves is left out."""
    entries = read_metadata(path).tensors
    tensors = {name: torch.zeros(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
    load_checkpoint(path, tensors)
    return tensors


class Reference(NamedTuple):
    """What one device computes, and how far rounding can move each of it."""

    values: Outcome
    bounds: dict[str, tuple[float, ...]]

    def check(self, found: Outcome, first_step: int = 1) -> None:
        """Assert that a run which began with this step came out the same, within the bounds."""
        early = [f"{what} of step {step}" for what in ("loss", "norm", "tokens") for step in range(1, first_step)]
        assert sorted(found) == sorted(set(self.values) - set(early))
        wrong = []
        for name, value in found.items():
            expected, bound = self.values[name], self.bounds[name]
            assert (value.shape, value.dtype) == (expected.shape, expected.dtype), name
            errors = gaps(value, expected)
            if not all(error <= most for error, most in zip(errors, bound, strict=True)):
                wrong.append(f"{name}: off by {errors[0]:.3g} (norm {errors[1]:.3g}), bounds {bound}")
        assert not wrong, "\n".join(wrong)


def gaps(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors, and the root of the sum of their squares."""
    if not one.numel():
        return 0.0, 0.0
    difference = one.double() - other.double()
    return float(difference.abs().max()), float(difference.norm())


@cache
def reference(problem: Problem) -> Reference:
    """Train on one device, once plainly and a few times perturbed."""
    config = problem.config()
    config = replace(config, train=replace(config.train, accumulate=2))
    with folder() as keep:
        values = run(config, 1, keep)
    moved = dict.fromkeys(values, (0.0, 0.0))
    for seed in PERTURBATIONS:
        with folder() as keep, mock.patch("hyper_parallel.trainer.loop.Trainer", perturbed(seed)):
            again = run(config, 1, keep)
        for name, value in values.items():
            moved[name] = tuple(map(max, moved[name], gaps(again[name], value)))
    unit = STEP_ROUNDINGS * STEPS * UNITS[problem.precision]
    bounds = {}
    for name, value in values.items():
        sizes = gaps(value, torch.zeros_like(value))
        # A single number is left to the first: of so few moves, the largest may be small by luck.
        safe = SAFETY, SAFETY_OF_NORMS if value.numel() >= 64 else 1e9
        of_this = [max(times * move, unit * size) for times, move, size in zip(safe, moved[name], sizes, strict=True)]
        bounds[name] = tuple(of_this) if is_rounded(name, value) else (0.0, 0.0)
    return Reference(values, bounds)


def is_rounded(name: str, value: torch.Tensor) -> bool:
    """Tell whether roundings can move it: no counts."""
    return value.is_floating_point() and not name.endswith(".step")


def perturbed(seed: int) -> type[Trainer]:
    """Return a trainer whose steps are perturbed; the weights that it begins with are those of any other."""

    class PerturbedTrainer(Trainer):
        mode: Perturbed | None = None

        def step(self) -> StepRecord:
            self.mode = self.mode or Perturbed(seed=seed)
            with self.mode:
                return super().step()

    return PerturbedTrainer
