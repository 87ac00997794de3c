"""Drawn arrangements of ranks compared with one device: losses, norms of gradients, weights, optimizer state.

And a run that is saved goes on under any other arrangement; under the same one bit for bit.
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from training_kit import (
    CHOOSES,
    LAYERS,
    PROBLEMS,
    STEPS,
    Arrangement,
    Outcome,
    Problem,
    arrangements,
    folder,
    numbers,
    reference,
    run,
    saved,
    step_folder,
)

import sim
from hyper_parallel.core.expert_parallel.router import Router
from hyper_parallel.core.fully_shard.api import HSDPModule
from hyper_parallel.core.pipeline import SCHEDULES
from hyper_parallel.trainer.config import CheckpointConfig, Config, ParallelConfig
from hyper_parallel.trainer.data import rank_part, shuffled
from hyper_parallel.trainer.loop import RunGroups, train
from hyper_parallel.trainer.parallelize import Parallelized
from hyper_parallel.trainer.preflight import plan_run
from hyper_parallel.trainer.saving import Progress, Saver

pytestmark = pytest.mark.sim


def examples(share: float) -> settings:
    return settings(
        max_examples=max(1, round(share * settings.default.max_examples)),
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


problems = st.sampled_from(PROBLEMS)


def seen(problem: Problem, arrangement: Arrangement) -> None:
    """Let `--hypothesis-show-statistics` tell what was drawn."""
    parallel = arrangement.parallel
    for axis in ("dp_replicate", "cp", "tp", "pp", "ep"):
        if getattr(parallel, axis) > 1:
            event(axis)
    event(f"{problem.model}, {problem.precision}")
    event(f"{arrangement.world_size} ranks")
    if parallel.pp > 1:
        event(parallel.schedule)


@pytest.mark.tier("full")
@examples(0.5)
@given(st.data(), problems)
def test_any_ranks_train_as_one_device(data, problem):
    arrangement = data.draw(arrangements(problem))
    seen(problem, arrangement)
    with folder() as keep:
        found = run(arrangement.of(problem), arrangement.world_size, keep)
    reference(problem).check(found)


@pytest.mark.tier("full")
@examples(0.2)
@given(st.data(), problems, st.integers(1, STEPS - 1), st.booleans())
def test_a_saved_run_goes_on_under_any_ranks(data, problem, step, changed):
    before = data.draw(arrangements(problem), label="saved by")
    after = data.draw(arrangements(problem), label="goes on by") if changed else before
    with folder() as keep:
        full = run(before.of(problem), before.world_size, keep, every=1)
        middle = saved(step_folder(keep, step))
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(step_folder(keep, later))
        rest = run(after.of(problem), after.world_size, keep)
        unchanged = saved(step_folder(keep, step))
    reference(problem).check(full)
    reference(problem).check(rest, first_step=step + 1)
    assert all(torch.equal(middle[name], tensor) for name, tensor in unchanged.items())
    if after == before:
        different = [name for name, value in rest.items() if not torch.equal(value, full[name])]
        assert not different, "the same ranks must go on bit for bit"


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_bounds_are_far_below_what_is_trained(problem):
    values, bounds = reference(problem)
    most = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 1e-2}[problem.precision]
    assert all(bounds[f"loss of step {step}"][0] < most * values[f"loss of step {step}"] for step in (1, 2, 3))
    moments = [name for name, value in values.items() if name.endswith("exp_avg") and value.numel() >= 64]
    assert len(moments) > 10
    most = {"fp64": 1e-8, "fp32": 0.02, "bf16": 0.8}[problem.precision]
    assert all(bounds[name][1] < most * values[name].norm() for name in moments)
    assert values["loss of step 3"] < values["loss of step 1"]


@pytest.mark.parametrize("model", CHOOSES)
def test_no_token_is_between_two_experts(model, monkeypatch):
    margins = []

    def watched(self, x):
        scores = torch.nn.functional.linear(x, self.weight)
        scores = (scores.sigmoid() if self.score == "sigmoid" else scores.softmax(-1)) + self.bias
        best = scores.detach().topk(self.experts_per_token + 1).values
        margins.append((best[..., -2] - best[..., -1]).min().item())
        return routed(self, x)

    routed = Router.forward
    monkeypatch.setattr(Router, "forward", watched)
    with folder() as keep:
        run(Problem(model, "fp64").config(), 1, keep)
    assert min(margins) > 1e-9
    # And a router is only moved by what moves weights, far less than that.
    values, bounds = reference(Problem(model, "fp64"))
    assert max(bounds[name][0] for name in values if name.startswith("model.")) < 1e-3 * min(margins)


DATA = Arrangement(2, 1, ParallelConfig())


def averaged(monkeypatch):
    change = HSDPModule.set_reduce_op_type
    monkeypatch.setattr(HSDPModule, "set_reduce_op_type", lambda self, kind: change(self, "avg"))


def counted_by_each(monkeypatch):
    monkeypatch.setattr(RunGroups, "over_tokens", lambda self, value: value)


def same_rows(monkeypatch):
    made = RunGroups.__init__

    def with_rank_zero(self, *args):
        made(self, *args)
        self.batch_rank = 0

    monkeypatch.setattr(RunGroups, "__init__", with_rank_zero)


def untied(monkeypatch):
    """The two stages with the one embedding do not add up their gradients."""
    made = Parallelized.__init__

    def without(self, parts, pipeline=None, context=None, tied=None, *rest):
        made(self, parts, pipeline, context, None, *rest)

    monkeypatch.setattr(Parallelized, "__init__", without)


@cache
def without_a_fault(problem: Problem, arrangement: Arrangement) -> Outcome:
    with folder() as keep:
        return run(arrangement.of(problem), arrangement.world_size, keep)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(
    ("fault", "arrangement"),
    [(averaged, DATA), (counted_by_each, DATA), (same_rows, DATA), (untied, Arrangement(2, 2, ParallelConfig(pp=2)))],
)
def test_a_fault_in_training_is_found(fault, arrangement, precision, monkeypatch):
    problem = Problem("dense, tied, tokens ignored", precision)
    expected = reference(problem)
    expected.check(without_a_fault(problem, arrangement))
    fault(monkeypatch)
    found = r"bounds|different numbers|'model.embed.weight' is not the same on all ranks that have it"
    with folder() as keep, pytest.raises((AssertionError, sim.RankFailed), match=found):
        expected.check(run(arrangement.of(problem), arrangement.world_size, keep))


def no_moments(monkeypatch):
    resumed = Saver.resume

    def forgetful(self):
        found = resumed(self)
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()
        return found

    monkeypatch.setattr(Saver, "resume", forgetful)


def first_text(monkeypatch):
    resumed = Saver.resume

    def rewound(self):
        found = resumed(self)
        return Progress(found.steps, 0, found.skipped)

    monkeypatch.setattr(Saver, "resume", rewound)


@pytest.mark.parametrize("fault", [no_moments, first_text])
def test_a_fault_in_resuming_is_found(fault, monkeypatch):
    problem = Problem("dense, tied, tokens ignored", "fp64")
    with folder() as keep:
        run(DATA.of(problem), 2, keep, every=1)
        shutil.rmtree(step_folder(keep, STEPS))
        fault(monkeypatch)
        rest = run(DATA.of(problem), 2, keep)
    with pytest.raises(AssertionError, match="bounds"):
        reference(problem).check(rest, first_step=STEPS)


@st.composite
def any_arrangements(draw: st.DrawFn) -> Arrangement:
    """Draw ranks that may fit or not: shrinks towards one rank and everything at 1."""
    world_size = draw(st.sampled_from((1, 2, 4, 3, 6, 8)))
    dims = draw(sim.strategies.parallel_dims(ranks=world_size))
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    degrees = {axis: getattr(dims, axis) for axis in axes}
    if draw(st.integers(0, 7)) == 7:
        degrees[draw(st.sampled_from(axes))] = draw(st.integers(1, 4))
    sizes = draw(st.none() | st.lists(st.integers(0, LAYERS), min_size=1, max_size=8))
    accumulate = draw(st.sampled_from((1, 2, 4, 3)))
    parallel = ParallelConfig(
        **degrees,
        ulysses_degree=draw(st.sampled_from((None, 1, 2, 3))),
        etp=draw(st.sampled_from((None, 1, 2))),
        fold_experts=draw(st.booleans()),
        schedule=draw(st.sampled_from(list(SCHEDULES))),
        stages_per_rank=draw(st.sampled_from((None, 1, 2))),
        layers_per_stage=None if sizes is None else ",".join(map(str, sizes)),
        engine=draw(st.sampled_from(("fully_shard", "hsdp"))),
        reshard_after_forward=draw(st.booleans()),
        reshard_inputs=draw(st.booleans()),
        tp_chunks=draw(st.sampled_from((1, 2))),
        reduce_each=degrees["pp"] == 1 and draw(st.booleans()),
        checkpointing=draw(st.sampled_from(("none", "full", "selective", "alternate"))),
    )
    return Arrangement(world_size, accumulate, parallel)


def refusal(config: Config, world_size: int) -> str | None:
    try:
        plan_run(config, world_size)
    except ValueError as error:
        return str(error)
    return None


@examples(1)
@given(any_arrangements(), problems)
def test_what_does_not_fit_is_refused_by_every_rank_before_it_starts(arrangement, problem):
    config = arrangement.of(problem)
    config = replace(config, train=replace(config.train, steps=1), checkpoint=CheckpointConfig())

    def body():
        try:
            return numbers(train(config))
        except ValueError as error:
            return str(error)

    refused = refusal(config, arrangement.world_size)
    if refused:
        event("refused")
        with sim.world(arrangement.world_size) as world:
            assert world.run(body) == [refused] * arrangement.world_size
            assert not world.trace.events, "nothing has communicated"
        return
    event("trains")
    outcomes = sim.run(body, arrangement.world_size)
    assert all(outcome == outcomes[0] and len(outcome) == 1 for outcome in outcomes), outcomes
    reference_loss = reference(problem).values["loss of step 1"].item()
    assert outcomes[0][0][1] == pytest.approx(reference_loss, abs=reference(problem).bounds["loss of step 1"][0])


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(-(2**70), 2**70), st.data())
def test_an_epoch_has_every_window_once_however_it_is_read(count, epoch, seed, data):
    first = epoch * count
    order = shuffled(np.arange(first, first + count, dtype=np.uint64), count, seed)
    assert sorted(order.tolist()) == list(range(count))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=6)))
    pieces = [range(first + a, first + b) for a, b in itertools.pairwise([0, *cuts, count])]
    read = [shuffled(np.array(piece, dtype=np.uint64), count, seed) for piece in pieces]
    assert np.concatenate(read).tolist() == order.tolist(), "a sample depends on its number and the seed only"


@given(st.data())
def test_steps_of_any_batches_on_any_ranks_read_one_stream(data):
    used = numbered = 0
    for _ in range(data.draw(st.integers(1, 5))):
        ranks = data.draw(st.integers(1, 8))
        batch = ranks * data.draw(st.integers(1, 4))
        parts = [rank_part(used, batch, rank, ranks) for rank in range(ranks)]
        assert [sample for part in parts for sample in part] == list(range(numbered, numbered + batch))
        used, numbered = used + batch, numbered + batch
