"""The searches that are held against published layouts: which are asked, and small ones that are answered."""

import dataclasses

import pytest
from mesh_fakes import fake_estimate

from benchmarks import searches
from benchmarks.published.rows import Case, case_of, read_rows
from benchmarks.searches import Answer, Question, answer, questions, table
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim.mesh.hardware import find_hardware
from sim.mesh.models import find_model
from sim.mesh.recipe import Recipe
from sim.mesh.searching.ranking import Found, SearchResult
from sim.mesh.searching.space import Candidate

PLAIN = (Recipe(),)
TWO = Recipe(microbatches=2, reduce_each=True), Recipe(checkpointing="full")


def small(model: str, devices: int, batch: int, room: int | None = None, recipes=PLAIN) -> Question:
    hardware = find_hardware("a100-80gb")
    if room is not None:  # beside what is taken before the first tensor
        taken = hardware.context_bytes + hardware.bytes_per_group
        hardware = hardware.with_memory(usable_gib=(taken + room) / 2**30)
    name = f"{model} on {devices}"
    return Question(name, find_model(model), hardware, devices, batch, 128, recipes, named=())


def faked(question: Question, recipe: Recipe, scale: float = 0.01) -> Found:
    candidate = Candidate(ParallelDims(dp_shard=8, world_size=8), recipe, 1024)
    given = (question.model, candidate.dims, candidate.batch, question.seq_len, question.hardware, recipe)
    return Found(candidate, fake_estimate(*given, scale=scale))


def test_the_questions_are_of_many_kinds_and_their_layouts_the_fastest_published():
    asked = list(questions())
    assert len(asked) == 22
    assert {one.hardware.name for one in asked} >= {"h100-sxm", "a100-80gb", "ascend-910b", "b200"}
    assert {one.model.family for one in asked} >= {"llama", "moe"}
    assert min(one.devices for one in asked) <= 8
    assert max(one.devices for one in asked) == 1024
    cases = {one.id: one for one in map(case_of, read_rows()) if isinstance(one, Case)}
    for chosen, question in zip(searches.ROWS, asked[2:], strict=True):
        case, best = cases[chosen], question.named[0]
        assert best == Candidate(case.dims, case.recipe, case.batch), f"{chosen} is not the fastest of {question.name}"


def test_how_a_published_run_checkpoints_and_shards_is_tried():
    for question in questions():
        tried = [dataclasses.replace(one, microbatches=None) for one in question.recipes]
        for named in question.named:
            usual = {"microbatches": None, "schedule": "1f1b", "stages_per_rank": None}
            assert dataclasses.replace(named.recipe, **usual) in tried, question.name


def test_a_framework_is_asked_for_no_more_than_its_published_runs_use():
    for question in questions():
        assert set(question.own) <= set(question.recipes)
        for named in question.named if question.own else ():
            usual = {"microbatches": None, "schedule": "1f1b", "stages_per_rank": None}
            assert dataclasses.replace(named.recipe, **usual) in question.own, question.name
            given = {
                axis: size for axis, size in question.fixed.items() if axis not in ("dp_replicate", "ulysses_degree")
            }
            assert {axis: getattr(named.dims, axis) for axis in given} == given, question.name
    one = next(one for one in questions() if "gpt-3.6b" in one.name)
    assert {recipe.zero for recipe in one.own} == {0}
    assert {recipe.zero for recipe in one.recipes} == {0, 2, 3}


def test_the_best_of_what_a_framework_has_is_estimated_apart():
    none, full = Recipe(zero=0), Recipe(zero=0, checkpointing="full")
    question = small("llama-tiny", 1, 1, recipes=(none, full))
    assert answer(question, drawn=0).own is None
    found = answer(dataclasses.replace(question, own=(full,), fixed={"pp": 1}), drawn=0)
    assert found.own.candidate.recipe.checkpointing == "full"
    assert found.own.tokens_per_second < found.result.best.tokens_per_second
    named = dataclasses.replace(found.question, named=(found.own.candidate,))
    assert f"| {found.own.candidate}: " in searches.row_of(
        dataclasses.replace(found, question=named, named=(found.own,))
    )


@pytest.mark.parametrize(
    ("question", "drawn"),
    [
        (small("llama-tiny", 2, 2), 1),
        pytest.param(small("llama-tiny", 4, 16, room=24 * 2**20, recipes=TWO), 8, marks=pytest.mark.slow),
        pytest.param(small("moe-tiny", 4, 8, recipes=TWO), 8, marks=pytest.mark.slow),
    ],
    ids=["dense", "little memory", "experts"],
)
def test_a_small_search_finds_the_best(question, drawn):
    found = answer(question, drawn=drawn)
    assert found.behind <= 0.02
    assert len(found.drawn) == drawn
    assert found.plain
    assert found.result.best.estimate.memory.fits()


def test_what_beats_a_search_is_seen(monkeypatch):
    question = small("llama3-8b", 8, 8)
    fast, slow = (faked(question, Recipe(checkpointing=level)) for level in ("none", "full"))
    result = SearchResult((slow,), (), (), (), 1.0, True, "")
    question = dataclasses.replace(question, named=(fast.candidate,))
    beaten = Answer(question, result, 1.0, (fast,), (slow,), ())
    assert beaten.behind == pytest.approx(1 - fast.seconds / slow.seconds)
    assert dataclasses.replace(beaten, named=(None,)).behind == 0
    unfit = dataclasses.replace(fast, estimate=faked(question, fast.candidate.recipe, scale=1e6).estimate)
    assert dataclasses.replace(beaten, named=(unfit,)).behind == 0
    monkeypatch.setattr(searches, "answer", lambda *given: beaten)
    text = table([question])
    assert "Of 1 searches, 1 are more than 2 % behind" in text
    assert "Of 1 published layouts that fit as estimated, 1 are within 5 % of the best found, and 1 of " in text
    slowest = dataclasses.replace(beaten, named=(slow,), result=dataclasses.replace(result, found=(fast,)), own=slow)
    monkeypatch.setattr(searches, "answer", lambda *given: slowest)
    assert "0 are within 5 % of the best found, and 1 of " in table([question])
    assert "| none fits |" not in text
