"""Layers of each stage, stages of each rank, and what each schedule runs: without a process group."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hyper_parallel.core.pipeline import (
    SCHEDULES,
    find_schedule,
    rank_of_stage,
    split_layers,
    stage_slices,
    stages_of_rank,
)


def sizes(*args, **kwargs):
    return [len(layers) for layers in split_layers(*args, **kwargs)]


def lightest(num_layers, stages, first_extra, last_extra):
    """The weight of the heaviest stage, at best: by trying all splits."""

    def heaviest(cuts):
        ends = (0, *cuts, num_layers)
        weights = [last - first for first, last in itertools.pairwise(ends)]
        weights[0] += first_extra
        weights[-1] += last_extra
        return max(weights)

    return min(heaviest(cuts) for cuts in itertools.combinations(range(1, num_layers), stages - 1))


@pytest.mark.parametrize("extras", [(1, 1), (0, 0), (0, 3), (2.5, 0.5), (9, 0)])
def test_the_heaviest_stage_is_as_light_as_can_be(extras):
    for num_layers in range(1, 12):
        for stages in range(1, num_layers + 1):
            found = sizes(num_layers, stages, first_extra=extras[0], last_extra=extras[1])
            assert sum(found) == num_layers
            assert min(found) >= 1
            weights = [float(size) for size in found]
            weights[0] += extras[0]
            weights[-1] += extras[1]
            assert max(weights) == lightest(num_layers, stages, *extras)


def test_layers_are_split_evenly_where_that_is_as_good():
    assert sizes(32, 4) == [8, 8, 8, 8]
    assert sizes(8, 4) == [2, 2, 2, 2]
    assert sizes(7, 2, first_extra=0, last_extra=0) == [3, 4]  # the later stage holds fewer activations
    assert sizes(10, 4) == [2, 3, 3, 2]


def test_layers_follow_each_other():
    assert split_layers(6, 3, sizes=[1, 3, 2]) == [range(1), range(1, 4), range(4, 6)]
    assert split_layers(3, 3, sizes=[3, 0, 0]) == [range(3), range(3, 3), range(3, 3)]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            lambda: split_layers(3, 4),
            "there are fewer layers than stages\n  num_layers: 3   stages: 4\n  try: at most 3 s",
        ),
        (lambda: split_layers(3, 0), "there must be a stage at least"),
        (lambda: split_layers(6, 3, sizes=[2, 2]), "there are 2 sizes for 3 stages"),
        (lambda: split_layers(6, 3, sizes=[2, 2, 3]), "sizes add up to 7 layers, not 6"),
        (lambda: split_layers(6, 3, sizes=[2, 2, -2]), r"sizes must be numbers of layers, from 0 up"),
        (lambda: split_layers(6, 3, last_extra=-1), "last_extra must be a number of layers, from 0 up"),
        (lambda: find_schedule("1F1B "), "there is no schedule '1F1B '"),
        (lambda: stages_of_rank("zbv", 0, 2, 3), "'zbv' has exactly 2 per rank"),
        (lambda: stages_of_rank("1f1b", 0, 2, 2), "'1f1b' has exactly 1 per rank\n.*\n.*or schedule='interleaved'"),
        (lambda: stages_of_rank("interleaved", 0, 2, 0), "a rank must have one stage at least"),
        (lambda: stages_of_rank("1f1b", 2, 2), "there is no rank 2 along an axis of 2"),
        (lambda: rank_of_stage("zbv", 8, 4), "there are 8 stages, numbered from 0"),
        (lambda: find_schedule("gpipe").check_micro_batches(0, 2, 2), "micro_batches must be an int from 1 up"),
        (lambda: find_schedule("interleaved").check_micro_batches(9, 4, 8), "runs them in 2 rounds of equal size"),
    ],
)
def test_what_cannot_be_is_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        asked()


def test_a_schedule_that_this_torch_lacks_is_refused():
    kind = SCHEDULES["interleaved"]
    renamed = type(kind)("interleaved", "ScheduleOfTheFuture", 2, True, "loop", False, "any")
    with pytest.raises(ValueError, match="this torch has no ScheduleOfTheFuture"):
        _ = renamed.torch_class


def test_a_schedule_whose_gradients_this_torch_gets_wrong_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    assert [name for name, kind in SCHEDULES.items() if not kind.is_available] == ["zero-bubble", "zbv"]
    with pytest.raises(ValueError, match=r"the gradients of 'zbv' are wrong before torch 2\.13\n  torch: 2\.12\.1"):
        _ = SCHEDULES["zbv"].torch_class


def combinations():
    for name, kind in SCHEDULES.items():
        if not kind.is_available:
            continue
        for ranks in range(1, 5):
            for each in [1] if not kind.is_multi else [2] if kind.style == "v" else [1, 2, 3]:
                for micro_batches in range(1, 10):
                    yield name, ranks, each, micro_batches


def made_by_torch(name, ranks, each, micro_batches):
    """The schedule of rank 0, or None where torch refuses."""
    total = ranks * each
    stages = [
        SimpleNamespace(
            num_stages=total,
            stage_index=stage,
            group_size=ranks,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == total - 1,
            submod=nn.Identity(),
            has_backward=True,
        )
        for stage in stages_of_rank(name, 0, ranks, each)
    ]
    kind = SCHEDULES[name]
    try:
        return kind.torch_class(stages if kind.is_multi else stages[0], micro_batches, loss_fn=lambda x, y: x)
    except (ValueError, AssertionError, RuntimeError):
        return None


@pytest.mark.tier("test")
def test_rules_and_places_are_those_of_torch():
    refused = 0
    logging.disable(logging.CRITICAL)
    try:
        for name, ranks, each, micro_batches in combinations():
            made = made_by_torch(name, ranks, each, micro_batches)
            try:
                SCHEDULES[name].check_micro_batches(micro_batches, ranks, ranks * each)
            except ValueError:
                refused += 1
                assert made is None, (name, ranks, each, micro_batches)
                continue
            assert made is not None, (name, ranks, each, micro_batches)
            if SCHEDULES[name].is_multi:
                placed = [rank_of_stage(name, stage, ranks, each) for stage in range(ranks * each)]
                assert placed == [made.stage_index_to_group_rank[stage] for stage in range(ranks * each)]
    finally:
        logging.disable(logging.NOTSET)
    assert refused > 20


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_layers_are_on_some_rank_once(name):
    for ranks in (1, 2, 4):
        parts = [part for rank in range(ranks) for part in stage_slices(11, name, rank, ranks)]
        assert sorted(layer for part in parts for layer in part.layers) == list(range(11))
        assert [part.index for part in parts if part.is_first] == [0]
        assert [part.index for part in parts if part.is_last] == [len(parts) - 1]
