"""Searches beside the layouts that other people found, plain ones, and drawn ones.

A question is a published training run without its layout: model, devices, batch, and the kernels and precision of its
framework. A search answers it, and is held against everything else that the same estimator can say of it: the published
layouts, data parallelism alone, and candidates drawn from the space, of which half are promising ones that the search
did not estimate. A framework that lacks what the best needs could not have chosen it: so the question is also asked
with no more than the framework's published runs use.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeGuard

from benchmarks.published.predict import figures_of, hardware_of, job_of, load_figures
from benchmarks.published.rows import Case, case_of, read_rows
from hyper_parallel.core.machine.description import Machine, find_machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim.mesh.estimate import estimate
from sim.mesh.models import find_model
from sim.mesh.recipe import Recipe
from sim.mesh.recordings.library import recordings
from sim.mesh.searching.bounds import guess_memory, guess_seconds, least_memory, rates_of
from sim.mesh.searching.candidates import enumerate_candidates
from sim.mesh.searching.explore import NothingFits
from sim.mesh.searching.ranking import Found, SearchResult
from sim.mesh.searching.search import search
from sim.mesh.searching.space import Candidate, Space, default_recipes, shape_of
from sim.mesh.spec import ModelSpec

__all__ = ["ROWS", "Answer", "Question", "answer", "of_case", "questions", "table", "wrong_guesses"]

ROWS = (
    "m0140",  # torchtitan, llama3-8b on 4 B200
    "m0100",  # torchtitan, llama3-8b on 8 H100
    "m0087",  # torchtitan, llama3-8b on 8 A100
    "m0104",  # torchtitan, qwen3-32b on 8 H100
    "m0111",  # torchtitan, qwen3-32b on 32 H100
    "m0120",  # torchtitan, DeepSeek-V3 of 16B on 8 H100
    "m0033",  # torchtitan, llama2-13b on 64 A100
    "m0044",  # torchtitan, llama3.1-405b on 128 H100
    "m0189",  # llm-foundry, mpt-3b on 8 H100
    "m0170",  # llm-foundry, mpt-30b on 8 H100
    "m1054",  # InternEvo, internlm-7b on 8 A100
    "m1061",  # InternEvo, internlm-7b on 1,024 A100
    "m1149",  # MindSpeed, qwen1.5-4b on 8 Ascend 910B
    "m1138",  # MindSpeed, llama3-8b on 8 Ascend 910B
    "m1190",  # MindFormers, codellama-34b on 16 Ascend 910B
    "m0722",  # dgxc, llama3-8b in fp8 on 16 H100
    "m0825",  # dgxc, nemotron4-15b in fp8 on 16 H100
    "m0547",  # vTrain, gpt-3.6b on 64 A100
    "m0589",  # vTrain, gpt-39.1b on 512 A100
    "m0501",  # BLOOM, 176b on 384 A100
)
"""Published runs whose layout is the fastest that its source has for the model, the devices and the batch."""
LEVELS = ("none", "selective", "alternate", "full")
ESTIMATES = 12
"""Half of those that the command makes, so that the best has to come early."""
DRAWN = 4
_PROMISING = 0.05
"""Part of the space, by the guess of time, that half of the drawn candidates come from."""
_NEAR = 1.6
"""Times a question's shortest step: the order of what is slower decides nothing."""
_Known = Callable[[Candidate], Found | None]


@dataclass(frozen=True)
class Question:
    """What is searched for, and the layouts of others.

    Attributes:
        name: in a few words.
        model: its shape.
        hardware: with the network of the run.
        devices: ranks.
        global_batch: sequences of a step.
        seq_len: tokens of a sequence.
        recipes: that are tried.
        named: layouts of others, the fastest as measured first.
        own: those of the recipes that the framework's published runs use; (): the question is not asked with them.
        fixed: degrees that none of these runs has, for the same.
    """

    name: str
    model: ModelSpec
    hardware: Machine
    devices: int
    global_batch: int
    seq_len: int
    recipes: tuple[Recipe, ...]
    named: tuple[Candidate, ...]
    own: tuple[Recipe, ...] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)

    def searched(self, recipes: Sequence[Recipe], fixed: Mapping[str, int], limit: int | None) -> SearchResult:
        """Search for the answer among some recipes and degrees."""
        where = self.model, self.hardware, self.devices, self.global_batch
        return search(*where, seq_len=self.seq_len, recipes=recipes, fixed=fixed, limit=limit)

    @property
    def space(self) -> Space:
        """What is searched."""
        shape = shape_of(self.model, self.seq_len)
        return Space(shape, self.devices, self.hardware.devices_per_node, self.global_batch, self.seq_len, self.recipes)

    def estimated(self, candidate: Candidate) -> Found | None:
        """Return the estimate of a candidate; None: it cannot be run."""
        where = candidate.dims, candidate.batch, self.seq_len, self.hardware, candidate.recipe
        try:
            return Found(candidate, estimate(self.model, *where, layers_per_stage=candidate.layers_per_stage))
        except ValueError:
            return None


@dataclass(frozen=True)
class Answer:
    """What a search found, and what else there is.

    Attributes:
        question: that was asked.
        result: of the search.
        seconds: of the processor that it took.
        named: estimates of the layouts of others, in their order; None: it cannot be run.
        plain: estimates of data parallelism alone.
        drawn: estimates of drawn candidates.
        own: the best of what the framework's published runs use; None: it was not asked for, or nothing fits.
    """

    question: Question
    result: SearchResult
    seconds: float
    named: tuple[Found | None, ...]
    plain: tuple[Found, ...]
    drawn: tuple[Found, ...]
    own: Found | None = None

    @property
    def behind(self) -> float:
        """How much slower the best that was found is than the fastest of everything that fits; 0: it is the fastest."""
        others = [one.tokens_per_second for one in (*self.named, *self.plain, *self.drawn, self.own) if _fits(one)]
        return max(0.0, 1 - self.result.best.tokens_per_second / max(others, default=1.0))


def questions() -> Iterator[Question]:
    """Yield the two of the docs, 8 billion parameters on 8 and on 64 devices, and one for each of `ROWS`."""
    for devices, batch, recipe in (
        (8, 64, Recipe().cut_into(8).with_savings(None, None, True)),
        (64, 128, Recipe().with_savings("selective")),
    ):
        named = Candidate(ParallelDims(dp_shard=devices, world_size=devices), recipe, batch // devices)
        model, hardware = find_model("llama3-8b"), find_machine("h100-sxm")
        name = f"llama3-8b on {devices} x h100-sxm, {batch} x 8,192"
        yield Question(name, model, hardware, devices, batch, 8192, default_recipes(), (named,))
    cases = {one.id: (row, one) for row in read_rows() if isinstance(one := case_of(row), Case)}
    for chosen in ROWS:
        row, case = cases[chosen]
        yield of_case(str(row["model"]), case, [one for _, one in cases.values()])


def of_case(name: str, case: Case, cases: Iterable[Case]) -> Question:
    """Return the question that a published run is an answer to.

    Args:
        name: of its model.
        case: the run.
        cases: all runs: others that answer the same question have layouts, too, and those of its framework tell what
            that has.
    """
    cases = list(cases)
    kernels, asked = _kernels(case.recipe), _asked(case)
    alike = [one for one in cases if _asked(one) == asked and _kernels(one.recipe) == kernels]
    alike.sort(key=lambda one: -float(one.measured.tokens_per_second or 0.0))
    job, devices, batch = job_of(case), case.dims.world_size, case.batch * case.dims.batch_ranks
    return Question(
        f"{name} on {devices:,} x {case.hardware}, {batch:,} x {case.seq_len:,} ({case.framework})",
        job.model,
        hardware_of(case, figures_of(case, load_figures())),
        devices,
        batch,
        case.seq_len,
        _recipes(case.recipe),
        tuple(dict.fromkeys(Candidate(one.dims, one.recipe, one.batch) for one in alike)),
        *_own(case, [one for one in cases if one.framework == case.framework]),
    )


def _asked(case: Case) -> Any:
    """What a question fixes beside the recipe."""
    return case.model, case.hardware, case.dims.world_size, case.batch * case.dims.batch_ranks, case.seq_len


def _kernels(recipe: Recipe) -> Recipe:
    """Return what a question fixes of a recipe: all that a search does not choose."""
    return recipe.bare(scheduled=False).with_savings("none", 3, False)


def _recipes(recipe: Recipe) -> tuple[Recipe, ...]:
    """Return a framework's recipe with each checkpointing, and each way to shard that it or this library has."""
    found = [
        _kernels(recipe).with_savings(level, zero, each)
        for level in (str(recipe.activations), *LEVELS)
        for zero in dict.fromkeys((recipe.zero, 3, 2))
        for each in ((False, True) if zero >= 2 else (False,))
    ]
    return tuple(dict.fromkeys(found))


def _own(case: Case, runs: Sequence[Case]) -> tuple[tuple[Recipe, ...], dict[str, int]]:
    """Return what all runs of a case's framework use: recipes, and degrees that none of them has."""
    reads = [attrgetter(name) for name in ("checkpointing", "zero", "parallel.reduce_each")]
    used = [(read, {read(one.recipe) for one in runs}) for read in reads]
    recipes = tuple(one for one in _recipes(case.recipe) if all(read(one) in kinds for read, kinds in used))
    fixed = {axis: 1 for axis in ("cp", "tp", "pp", "ep") if all(getattr(one.dims, axis) == 1 for one in runs)}
    if all(one.dims.dp_replicate == 1 for one in runs if one.recipe.zero):  # whole replicas are shards of nothing
        fixed["dp_replicate"] = 1
    if all(one.dims.ulysses_degree == 1 for one in runs if one.dims.cp > 1):
        fixed["ulysses_degree"] = 1
    return recipes, fixed


def answer(question: Question, limit: int | None = ESTIMATES, drawn: int = DRAWN) -> Answer:
    """Search, and estimate what else there is.

    Args:
        question: to be answered.
        limit: estimates of the search; None: as many as it takes.
        drawn: candidates that are drawn from the space.
    """
    recordings.clear()
    start = time.process_time()
    result = question.searched(question.recipes, {}, limit)
    seconds = time.process_time() - start
    found = {one.candidate: one for one in (*result.found, *result.too_large)}

    def known(candidate: Candidate) -> Found | None:
        return found[candidate] if candidate in found else question.estimated(candidate)

    space, hardware = question.space, question.hardware
    pool = [one for one in enumerate_candidates(space) if isinstance(one, Candidate)]
    pool = [one for one in pool if least_memory(space.shape, one, space.seq_len) <= hardware.memory_bytes]
    return Answer(
        question,
        result,
        seconds,
        tuple(map(known, question.named)),
        tuple(_plain(question, pool, known)),
        tuple(_draw(question, pool, known, drawn)),
        _best_of_own(question, limit),
    )


def _best_of_own(question: Question, limit: int | None) -> Found | None:
    try:
        return question.searched(question.own, question.fixed, limit).best if question.own else None
    except NothingFits:
        return None


def _plain(question: Question, pool: Sequence[Candidate], known: _Known) -> Iterator[Found]:
    """Yield data parallelism alone, experts within a node: at each checkpointing the largest micro-batch that fits."""
    kinds: dict[Any, list[Candidate]] = {}
    for one in pool:
        dims, recipe = one.dims, one.recipe
        if dims.tp * dims.pp * dims.cp * dims.dp_replicate > 1 or dims.ep > question.hardware.devices_per_node:
            continue
        if recipe.zero == 3 and recipe.reductions == one.parts:
            kinds.setdefault((dims.ep, recipe.activations), []).append(one)
    for candidates in kinds.values():
        for candidate in sorted(candidates, key=lambda one: one.parts):
            found = known(candidate)
            if found is not None:
                yield found
                if _fits(found):
                    break


def _draw(question: Question, pool: Sequence[Candidate], known: _Known, count: int) -> Iterator[Found]:
    """Yield drawn candidates: one from all, one from those that promise most, in turn."""
    space, machine, limit = question.space, rates_of(question.hardware), question.hardware.memory_bytes
    small = [one for one in pool if guess_memory(space.shape, one, space.seq_len) <= limit] or list(pool)
    small.sort(key=lambda one: guess_seconds(space.shape, one, space.seq_len, machine))
    promising = small[: max(count, round(_PROMISING * len(small)))]
    rng, seen, yielded = random.Random(question.name), set[Candidate](), 0
    while yielded < count and len(seen) < len(pool):
        candidate = rng.choice(promising if yielded % 2 else pool)
        found = None if candidate in seen else known(candidate)
        seen.add(candidate)
        if found is not None:
            yielded += 1
            yield found
        elif seen.issuperset(promising) and yielded % 2:
            return


def wrong_guesses(answers: Iterable[Answer]) -> str:
    """Return in words how far off the guesses are that decide what a search estimates first.

    Memory is compared as it is allocated; of time, which of two is faster, where a question's steps are more than 2 %
    apart and at most 1.6 times as long as its shortest.

    Args:
        answers: whose estimates are compared; those of offload are not.
    """
    errors, pairs, wrong = [], 0, 0
    for said in answers:
        question, shape, machine = said.question, said.question.space.shape, rates_of(said.question.hardware)
        groups = (said.result.found, said.result.too_large, said.named, said.plain, said.drawn)
        known = {one.candidate: one for group in groups for one in group if one is not None}
        kept = [one for one in known.values() if not one.candidate.recipe.activations.offload]
        for one in kept:
            guess = guess_memory(shape, one.candidate, question.seq_len)
            errors.append(abs(guess / one.estimate.memory.peak - 1))
        shortest = min((one.seconds for one in kept), default=0.0)
        near = [
            (one.seconds, guess_seconds(shape, one.candidate, question.seq_len, machine))
            for one in kept
            if one.seconds <= _NEAR * shortest
        ]
        for (first, guess), (second, other) in itertools.combinations(near, 2):
            if max(first, second) > 1.02 * min(first, second):
                pairs += 1
                wrong += (guess < other) != (first < second)
    off, part = sum(errors) / max(len(errors), 1), wrong / max(pairs, 1)
    return (
        f"What is guessed before anything is estimated, beside {len(errors)} estimates: the memory that is allocated "
        f"is {off:.0%} off at the mean; of {pairs:,} pairs of a question {wrong:,} ({part:.0%}) are in the wrong order."
    )


def _fits(one: Found | None) -> TypeGuard[Found]:
    return one is not None and one.estimate.memory.fits()


def row_of(said: Answer) -> str:
    """Return an answer as a row of the table.

    Args:
        said: the answer.
    """
    result, best = said.result, said.result.best
    published, *others = said.named
    cells = [said.question.name, f"{best.candidate}", f"{best.tokens_per_second:,.0f}", f"{said.seconds:.0f}"]
    cells += [f"{len(result.found) + len(result.too_large)} of {_looked_at(result):,}", f"{said.question.named[0]}"]
    cells += [_beside(published, best), *_of_own(said)]
    cells += [_best_of(others, best), _best_of(said.plain, best), _best_of(said.drawn, best)]
    return f"| {' | '.join(cells)} |"


def _looked_at(result: SearchResult) -> int:
    candidates = sum(entry.candidate is not None for entry in result.rejected)
    return len(result.found) + len(result.too_large) + len(result.slower) + len(result.left_out) + candidates


def _of_own(said: Answer) -> tuple[str, str]:
    """What the published layout's framework could have had, and the published layout's part of it."""
    if said.own is None:
        return ("none fits", "-") if said.question.own else ("-", "-")
    return f"{said.own.candidate}: {_beside(said.own, said.result.best)}", f"{_share(said.named[0], said.own):.2f}"


def _beside(one: Found | None, best: Found) -> str:
    if one is None:
        return "cannot be run"
    text = f"{one.tokens_per_second:,.0f} ({one.tokens_per_second / best.tokens_per_second:.2f})"
    return text if _fits(one) else f"{text}, does not fit"


def _best_of(several: Sequence[Found | None], best: Found) -> str:
    fitting = [one for one in several if one is not None and _fits(one)]
    if not fitting:
        return "none fits" if several else "-"
    return _beside(max(fitting, key=lambda one: one.tokens_per_second), best)


def table(asked: Iterable[Question] | None = None, limit: int | None = ESTIMATES, drawn: int = DRAWN) -> str:
    """Return the answers as a Markdown table, and print each of them as it comes.

    Args:
        asked: questions; None: all.
        limit: estimates of each search.
        drawn: candidates that are drawn for each.
    """
    lines = [
        "| question | best found | tokens/s | CPU, s | estimated | published layout | its tokens/s "
        "| best of what its framework's runs use | published of that | others' best | plain | best drawn |",
        "|---|---|--:|--:|--:|---|--:|---|--:|--:|--:|--:|",
    ]
    answers = []
    for question in questions() if asked is None else asked:
        answers.append(answer(question, limit, drawn))
        lines.append(row_of(answers[-1]))
        print(lines[-1], flush=True)
    behind = sum(one.behind > 0.02 for one in answers)
    fitting = [one for one in answers if _fits(one.named[0])]
    near = sum(_share(one.named[0], one.result.best) >= 0.95 for one in fitting)
    near_own = sum(_share(one.named[0], one.own or one.result.best) >= 0.95 for one in fitting)
    lines += [
        "",
        f"Of {len(answers)} searches, {behind} are more than 2 % behind the best of everything that was "
        f"estimated. Of {len(fitting)} published layouts that fit as estimated, {near} are within 5 % of the best "
        f"found, and {near_own} of the best of what their frameworks' published runs use.",
        "",
        wrong_guesses(answers),
    ]
    return "\n".join(lines)


def _share(one: Found | None, best: Found) -> float:
    return 0.0 if one is None else one.tokens_per_second / best.tokens_per_second
