"""A pipeline trains as one device does: losses, gradients by name, norms and parameters after two steps."""

from __future__ import annotations

import pytest
import torch
from pipeline_kit import Case, check

import sim
from hyper_parallel.core.pipeline import SCHEDULES

pytestmark = pytest.mark.tier("test")

NAMES = [name for name, kind in SCHEDULES.items() if kind.is_available]
WHOLE = [name for name, kind in SCHEDULES.items() if not kind.splits_backward]


def available(cases):
    return [case for case in cases if SCHEDULES[case.schedule].is_available]


TWO = [
    *(Case(schedule) for schedule in NAMES),
    *(Case(schedule, tied=True) for schedule in ("1f1b", "interleaved", "zbv")),
    *(Case(schedule, recompute=True) for schedule in NAMES),
    Case("1f1b", sizes=(1, 3)),
    Case("1f1b", sizes=(4, 0)),
    Case("zbv", sizes=(1, 0, 2, 1)),
    Case("gpipe", layers=2, micro_batches=1),
    Case("zero-bubble", each=1, micro_batches=8),
    Case("interleaved", each=3, layers=7),
    Case("looped-bfs", each=3, layers=6, micro_batches=2),
    Case("zbv", micro_batches=1),
    Case("interleaved", each=4, sizes=(1, 1, 1, 1, 0, 2, 1, 0), layers=7),
]

FOUR = [
    *(Case(schedule, dp=2, shard="fully_shard") for schedule in NAMES),
    *(Case(schedule, dp=2, shard="fully_shard", keep=False) for schedule in WHOLE),
    *(Case(schedule, dp=2, shard="layers") for schedule in ("1f1b", "interleaved", "zbv")),
    *(Case(schedule, tp=2) for schedule in NAMES),
    *(Case(schedule, tp=2, tied=True) for schedule in ("gpipe", "zbv")),
    *(Case(schedule, dp=2, shard="fully_shard", recompute=True) for schedule in ("1f1b", "zero-bubble")),
    Case("1f1b", dp=2, shard="fully_shard", keep=False, recompute=True),
    Case("1f1b", dp=2, shard="fully_shard", tied=True),
    Case("zbv", dp=2, shard="fully_shard", tied=True, micro_batches=2),
    Case("1f1b", tp=2, recompute=True),
    Case("1f1b", pp=4, layers=6),
    Case("1f1b", pp=4, tied=True, micro_batches=8),
    Case("interleaved", pp=4, layers=8, micro_batches=8),
    Case("zbv", pp=4, layers=8, micro_batches=8),
    Case("zero-bubble", pp=4, layers=9, micro_batches=8),
]

EIGHT = [
    Case("1f1b", dp=2, tp=2, shard="fully_shard", tied=True),
    Case("interleaved", dp=2, tp=2, shard="fully_shard", keep=False),
    Case("zero-bubble", dp=2, tp=2, shard="fully_shard"),
    Case("zbv", dp=2, tp=2, shard="fully_shard", tied=True),
]


@sim.ranks(1, backends=("sim",))
def test_one_rank_is_a_pipeline_too(ctx):
    check(Case("gpipe", pp=1), ctx)
    check(Case("interleaved", pp=1), ctx)
    check(Case("looped-bfs", pp=1, tied=True), ctx)


@pytest.mark.tier("test", each=4)
@pytest.mark.parametrize("case", available(TWO), ids=str)
@sim.ranks(2, backends=("sim",))
def test_two_ranks(ctx, case):
    check(case, ctx)


@pytest.mark.tier("full", each=10)
@pytest.mark.parametrize("case", available(FOUR), ids=str)
@sim.ranks(4, backends=("sim",))
def test_four_ranks(ctx, case):
    check(case, ctx)


@pytest.mark.tier("full", each=4)
@pytest.mark.parametrize("case", available(EIGHT), ids=str)
@sim.ranks(8, backends=("sim",))
def test_eight_ranks(ctx, case):
    check(case, ctx)


BY_DP = [Case(name, dp=2, shard="fully_shard") for name in ("interleaved", "zero-bubble")]
SOME = [Case("1f1b", pp=4, tied=True), *BY_DP, Case("zbv", tp=2, tied=True), Case("1f1b", tp=2, recompute=True)]


# Torch 2.11 itself receives from both neighbours into one buffer when it warms up.
@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("case", available(SOME), ids=str)
@sim.ranks(4, check_races=torch.__version__ >= "2.13", check_replicas=True)
def test_a_few_of_them_on_all_arms(ctx, case):
    check(case, ctx)


@pytest.mark.tier("full")
@sim.ranks(4, backends=("sim", "gpu", "npu"))
def test_tied_weights_that_are_on_the_host_or_of_one_rank(ctx):
    for shard in ("offloaded", "owned"):
        check(Case("1f1b", dp=2, shard=shard, tied=True, layers=2, micro_batches=2), ctx)
