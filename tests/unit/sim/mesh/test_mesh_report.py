"""Reports of estimates: tables, words, and what to change."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from mesh_fakes import fake_estimate, quantity
from rich.console import Console

from hyper_parallel.core.common.tables import as_text
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models.llama import LlamaConfig
from sim.mesh.explain import advise, explain
from sim.mesh.program import MEMORY_KINDS
from sim.mesh.recipe import Recipe
from sim.mesh.report import estimate_dict, estimate_view, kinds
from sim.mesh.searching.ranking import SearchBar, search_dict, search_view
from sim.mesh.searching.search import search

EIGHT = ParallelDims(dp_shard=8, world_size=8)


def estimated(dims: ParallelDims = EIGHT, batch: int = 1, scale: float = 1.5, **recipe: Any) -> Any:
    return fake_estimate("llama3-8b", dims, batch, 8192, "h100-sxm", Recipe().having(**recipe), scale)


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_tables_of_an_estimate() -> None:
    text = as_text(estimate_view(estimated(ParallelDims(dp_shard=4, tp=2, world_size=8), batch=4, accumulate=2)))
    found = lines(text)
    assert found[0].endswith("NVIDIA H100 SXM5, 80 GB HBM3, 700 W, in nodes of 8 (DGX H100): dp_shard=4 tp=2")
    assert found[1] == ("16 sequences of 8,192 tokens in a step, 4 on each data-parallel rank, in 2 micro-batches of 2")
    assert found[2].startswith("bf16 over fp32 weights, gradients reduced in fp32; ZeRO-3; adamw")
    assert "rank ranks alike reserved allocated params grads optimizer activations logits other" in found
    assert "time share 80 % interval evidence" in found
    assert any(line.startswith("exposed communication, tp ") and line.endswith(" calibrated") for line in found)
    assert "compute: matrix products 70 %, memory-bound operations 20 %, attention, forward 10 %" in found
    assert "the optimizer's part of the step, with its communication: 2.0 %" in found
    assert any(" tokens/s on each device (" in line and "; MFU " in line for line in found)
    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in text, "nothing may be cut off"


def test_what_does_not_fit_is_said_loudly() -> None:
    assert "\nfits: " in as_text(estimate_view(estimated(checkpointing="full")))
    assert "\nDOES NOT FIT: " in as_text(estimate_view(estimated(scale=9.0)))


def test_many_rank_classes_are_told_by_their_fullest() -> None:
    text = as_text(estimate_view(estimated(ParallelDims(pp=16, world_size=16), batch=16)))
    table = text.split("where it is fullest\n")[1].split("\nfits")[0]
    assert [line.split()[0] for line in table.splitlines()[1:9]] == ["0", "1", "2", "3", "4", "5", "15", "9"]
    assert "9 more rank classes are not shown" in table


@pytest.mark.tier("test")
def test_a_model_without_a_name_is_told_by_its_config() -> None:
    found = fake_estimate(LlamaConfig(), ParallelDims(), 1, 128, "h100-sxm", Recipe())
    assert as_text(estimate_view(found)).startswith("llama-0.9m on 1 x NVIDIA")


def test_an_estimate_as_data() -> None:
    found = estimated(ParallelDims(dp_shard=4, tp=2, world_size=8))
    data = json.loads(json.dumps(estimate_dict(found), allow_nan=False))
    assert data["model"] == "llama3-8b"
    assert data["degrees"]["tp"] == 2
    assert data["memory"]["reserved"] == found.memory.reserved
    assert data["memory"]["classes"][0]["by_category"]["activations"] > 0
    assert data["time"]["step"]["low"] < data["time"]["step"]["value"] < data["time"]["step"]["high"]
    assert set(data["time"]["terms"]) == {"compute", "exposed communication, dp_shard", "exposed communication, tp"}


@pytest.mark.tier("full")
def test_the_tables_of_a_search() -> None:
    result = search("llama3-8b", "h100-sxm", 64, 128, seq_len=8192, limit=30, estimator=fake_estimate)
    text = as_text(search_view(result, 3), width=170)
    assert text.startswith("llama3-8b on 64 x h100-sxm, 128 x 8,192 tokens; 79.1 GiB on a device\n")
    ranking = text.split("Fastest first\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in ranking[1:4]] == ["1", "2", "3"]
    assert ranking[4] == f"... and {len(result.found) - 3} more that fit"
    for reason, count in result.reasons.items():
        assert any(line.startswith(f"{count:,} {reason}") for line in lines(text)), reason
    assert f"{len(result.left_out):,} less promising" in "\n".join(lines(text))
    assert "…" not in text
    data = json.loads(json.dumps(search_dict(result), allow_nan=False))
    assert len(data["found"]) == len(result.found)
    assert data["found"][0]["chance_faster"] == result.found[0].chance
    assert len(data["left_out"]) == len(result.left_out)


def test_progress_in_a_log_is_a_line_for_each_tenth() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with SearchBar(console) as bar:
        for done in range(41):
            bar.on_estimate(done, 40, "dp_shard=8")
    printed = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert printed[0] == "estimates: 0 of 40"
    assert len(printed) == 11


def test_progress_in_a_terminal_is_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with SearchBar(console) as bar:
        bar.on_estimate(3, 4, "dp_shard=8")
    assert "3/4" in console.file.getvalue()  # type: ignore[attr-defined]


# In words


def test_an_estimate_in_words() -> None:
    text = explain(estimated(ParallelDims(dp_shard=4, tp=2, world_size=8)))
    joined = " ".join(text.split())
    assert "A step takes " in joined
    assert "The fullest rank reserves " in joined
    assert "which fits." in joined
    assert "Where the time goes: - 80 % compute: " in joined
    assert "(fitted to published measurements)" in joined
    assert (
        "Where the memory goes, on rank 0, as 7 more ranks, at its peak in backward of layers.0: - 40 % activat"
        in joined
    )
    assert "Compute bounds the step: it is 80 % of it." in joined
    assert "What to change: - " in joined
    assert "not estimated." in joined
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("term", "sentence"),
    [
        ("exposed", "Communication bounds the step, most of all along axis dp_shard: devices wait for it 90 % of"),
        ("bubble", "The pipeline bounds the step: devices have nothing to do 90 % of the time."),
        ("host", "The host bounds the step: devices wait 90 % of the time for it to issue operations."),
    ],
)
def test_what_bounds_the_step(term: str, sentence: str) -> None:
    found = estimated()
    seconds = found.time.step.value
    found.time.compute, found.time.exposed = quantity(0.1 * seconds), {}
    large = quantity(0.9 * seconds)
    setattr(found.time, term, {"dp_shard": large} if term == "exposed" else large)
    assert sentence in " ".join(explain(found).split())


def test_changes_are_estimated_where_asked() -> None:
    calls: list[Recipe] = []

    def counting(**given: Any) -> Any:
        calls.append(given["recipe"])
        return fake_estimate(**given)

    found = estimated(checkpointing="full")
    text = " ".join(explain(found, check=1, estimator=counting).split())
    assert [recipe.checkpointing for recipe in calls] == ["selective"]
    assert 'checkpointing="selective": backward computes again, and ' in text
    assert "Estimated, better: the step " in text
    assert text.count("not estimated.") == len(advise(found)) - 1


def test_a_change_that_cannot_be_made_says_why() -> None:
    def refuses(**given: Any) -> Any:
        raise ValueError("cannot do that\n  seen: this\n  try: that")

    text = " ".join(explain(estimated(checkpointing="full"), check=1, estimator=refuses).split())
    assert "It cannot be done here: cannot do that" in text


def changes(found: Any) -> dict[str, Any]:
    return {advice.change: advice for advice in advise(found)}


def test_what_does_not_fit_gets_advice_for_memory() -> None:
    found = estimated(batch=2, scale=9.0, reshard_after_forward=False)
    advice = changes(found)
    assert [change for change, one in advice.items() if one.saves == "memory"] == [
        'checkpointing="selective"',
        "accumulate=2",
        "reshard_after_forward=True",
    ]
    assert advice["reshard_after_forward=True"].recipe == Recipe().having(reshard_after_forward=True)


def test_copies_that_do_not_fit_become_shards() -> None:
    found = estimated(ParallelDims(dp_replicate=4, dp_shard=2, world_size=8), scale=9.0)
    assert changes(found)["dp_replicate=1 dp_shard=8"].dims == EIGHT


def test_a_bubble_gets_advice_for_the_pipeline() -> None:
    found = estimated(ParallelDims(pp=4, world_size=4), batch=8, accumulate=4)
    advice = changes(found)
    assert advice["accumulate=8"].recipe.train.accumulate == 8
    assert advice['schedule="interleaved"'].recipe.parallel.schedule == "interleaved"
    splits = estimated(ParallelDims(pp=4, world_size=4), batch=8, schedule="zbv")
    assert "compile=True" not in changes(splits), "it goes backward twice"


def test_waits_for_tensor_parallelism_suggest_less_of_it() -> None:
    found = estimated(ParallelDims(dp_shard=2, tp=4, world_size=8), batch=4)
    after = changes(found)["tp=2 dp_shard=4"]
    assert (after.dims.tp, after.dims.dp_shard, after.batch) == (2, 4, 2)
    assert after.batch * after.dims.batch_ranks == 4 * found.dims.batch_ranks, "the same global batch"


def test_every_advice_is_one_that_can_be_asked_for() -> None:
    for dims in (EIGHT, ParallelDims(tp=8, world_size=8), ParallelDims(pp=4, tp=2, world_size=8)):
        for checkpointing in ("none", "selective", "full"):
            for scale in (0.5, 9.0):
                for advice in advise(estimated(dims, batch=8, scale=scale, checkpointing=checkpointing)):
                    assert advice.dims.world_size == 8
                    assert advice.batch % advice.recipe.train.accumulate == 0
                    assert (advice.dims, advice.recipe) != (dims, Recipe().having(checkpointing=checkpointing))


def test_every_kind_of_kernel_is_called_by_what_it_does():
    seconds = dict.fromkeys(MEMORY_KINDS, 1.0)
    found = kinds(SimpleNamespace(timeline=SimpleNamespace(slowest=SimpleNamespace(kinds=seconds))))
    assert len(found) == len(MEMORY_KINDS)
    assert all(" " in title for title, _ in found), "a phrase, and no name of the code"
