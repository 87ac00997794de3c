"""The searches that are held against published layouts: which are asked, and small ones that are answered."""

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_fakes import fake_estimate

from benchmarks import searches
from benchmarks.published.rows import Case, case_of, read_rows
from benchmarks.published.step import PublishedRecipe
from benchmarks.searches import Answer, Question, answer, questions, table
from hyper_parallel.core.machine.description import find_machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim.mesh.models import find_model
from sim.mesh.recipe import Recipe
from sim.mesh.recordings.library import recordings
from sim.mesh.searching.bounds import guess_memory, guess_seconds, rates_of
from sim.mesh.searching.candidates import enumerate_candidates
from sim.mesh.searching.explore import NothingFits
from sim.mesh.searching.ranking import Found, SearchResult
from sim.mesh.searching.space import Candidate

pytestmark = pytest.mark.tier("test")

PLAIN = (Recipe(),)
TWO = Recipe().having(reduce_each=True), Recipe().having(checkpointing="full")


def small(model: str, devices: int, batch: int, room: int | None = None, recipes=PLAIN) -> Question:
    hardware = find_machine("a100-80gb")
    if room is not None:  # beside what is taken before the first tensor
        taken = hardware.context_bytes + hardware.bytes_per_group
        hardware = hardware.with_figures(device__usable_memory=taken + room)
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
        for named in question.named:
            usual = {"accumulate": 1, "schedule": "1f1b", "stages_per_rank": None}
            assert named.recipe.having(**usual) in question.recipes, question.name


def test_a_framework_is_asked_for_no_more_than_its_published_runs_use():
    for question in questions():
        assert set(question.own) <= set(question.recipes)
        for named in question.named if question.own else ():
            usual = {"accumulate": 1, "schedule": "1f1b", "stages_per_rank": None}
            assert named.recipe.having(**usual) in question.own, question.name
            given = {
                axis: size for axis, size in question.fixed.items() if axis not in ("dp_replicate", "ulysses_degree")
            }
            assert {axis: getattr(named.dims, axis) for axis in given} == given, question.name
    one = next(one for one in questions() if "gpt-3.6b" in one.name)
    assert {recipe.zero for recipe in one.own} == {0}
    assert {recipe.zero for recipe in one.recipes} == {0, 2, 3}


@pytest.mark.tier("full")
def test_the_best_of_what_a_framework_has_is_estimated_apart():
    none, full = PublishedRecipe().having(level=0), PublishedRecipe().having(level=0, checkpointing="full")
    question = small("llama-tiny", 1, 1, recipes=(none, full))
    assert answer(question, drawn=0).own is None
    found = answer(dataclasses.replace(question, own=(full,), fixed={"pp": 1}), drawn=0)
    assert found.own.candidate.recipe.checkpointing == "full"
    assert found.own.tokens_per_second < found.result.best.tokens_per_second
    named = dataclasses.replace(found.question, named=(found.own.candidate,))
    assert f"| {found.own.candidate}: " in searches.row_of(
        dataclasses.replace(found, question=named, named=(found.own,))
    )


@functools.cache
def asked(model: str, devices: int) -> Question:
    """A question about all weights of a model, or about adapters of one with "-lora" behind its name."""
    recipes = [one.having(rank=4 * model.endswith("-lora")) for one in TWO]
    return dataclasses.replace(small(model.removesuffix("-lora"), devices, 4, recipes=tuple(recipes)), seq_len=2048)


@pytest.fixture(scope="module")
def room():
    """Keep what is recorded for each way in which drawn machines plan: there are few, and each takes a minute."""
    before, recordings.most_events = recordings.most_events, 4_000_000
    yield
    recordings.most_events = before


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("model", ["llama-tiny", "llama-tiny-lora", "moe-tiny"])
@pytest.mark.usefixtures("room")
@settings(max_examples=100)
@given(data=st.data())
def test_no_candidate_of_a_space_beats_its_search(model, devices, data):
    hold_search_against_all(model, devices, data)


def hold_search_against_all(model: str, devices: int, data: st.DataObject) -> None:
    """On a drawn device: what is left out by a bound, or as another one must be faster, is estimated, too."""
    hardware = find_machine(data.draw(st.sampled_from(("a100-80gb", "h100-sxm", "ascend-910b"))))
    # A model this small is short of no memory and leaves all devices idle: they are slowed down, and get less of it.
    slower = st.floats(0, 4).map(lambda power: 10**-power)
    figures = ("peak.bf16", "device.bandwidth", "intra.bandwidth", "inter.bandwidth", "host.op")
    changed = {name.replace(".", "__"): hardware.value(name) * data.draw(slower, name) for name in figures}
    changed["node__devices"] = data.draw(st.sampled_from((1, 2, 4)), "devices of a node")
    limit = data.draw(st.sampled_from(needed(model, devices)), "bytes of a device")
    hardware = hardware.with_figures(**changed, device__usable_memory=limit)
    question = dataclasses.replace(asked(model, devices), hardware=hardware)
    fitting = [one for one in every_estimate(question) if one.estimate.memory.fits()]
    if not fitting:
        with pytest.raises(NothingFits):
            question.searched(question.recipes, {}, None)
        return
    found, best = question.searched(question.recipes, {}, None).best, min(fitting, key=lambda one: one.seconds)
    assert found.seconds <= 1.02 * best.seconds, f"{best.candidate} is faster than {found.candidate}"


@functools.cache
def needed(model: str, devices: int) -> list[int]:
    found = every_estimate(asked(model, devices))
    return sorted(
        {max(one.peak_reserved + one.context_bytes for one in each.estimate.memory.classes) for each in found}
    )


def every_estimate(question: Question) -> list[Found]:
    candidates = [one for one in enumerate_candidates(question.space) if isinstance(one, Candidate)]
    return [found for one in candidates if (found := question.estimated(one)) is not None]


@pytest.mark.tier("full")
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
    fast, slow = (faked(question, Recipe().having(checkpointing=level)) for level in ("none", "full"))
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


def test_guesses_are_held_against_estimates():
    question = small("llama3-8b", 8, 8)
    fast, slow = (faked(question, Recipe().having(checkpointing=level)) for level in ("none", "full"))
    shape, machine = question.space.shape, rates_of(question.hardware)
    off = [abs(guess_memory(shape, one.candidate, 128) / one.estimate.memory.peak - 1) for one in (fast, slow)]
    guesses = [guess_seconds(shape, one.candidate, 128, machine) for one in (fast, slow)]
    assert guesses[0] < guesses[1]
    found = Answer(question, SearchResult((fast, slow), (), (), (), 1.0, True, ""), 1.0, (), (fast,), ())
    text = searches.wrong_guesses([found])
    assert "beside 2 estimates" in text
    assert f"{sum(off) / 2:.0%} off at the mean; of 1 pairs of a question 0 (0%) are in the wrong order" in text
    swapped = dataclasses.replace(fast, estimate=slow.estimate), dataclasses.replace(slow, estimate=fast.estimate)
    found = dataclasses.replace(found, result=dataclasses.replace(found.result, found=swapped), plain=())
    assert "of 1 pairs of a question 1 (100%) are in the wrong order" in searches.wrong_guesses([found])
