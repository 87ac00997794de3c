"""A zoo of broken parallel models: each is caught, at the right place, in words; and right once its one fault is out."""

from __future__ import annotations

import pytest
import zoo_by_hand
import zoo_by_plan
import zoo_by_wrapper
from zoo_kit import Net, tokens

import sim
from hyper_parallel import ShardingPlan
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.plans import llama_plan

ZOO = [pytest.param(case, id=case.name) for case in (*zoo_by_hand.CASES, *zoo_by_plan.CASES, *zoo_by_wrapper.CASES)]


@pytest.mark.parametrize("case", ZOO)
def test_the_fault_is_found(case):
    report = case.verify(broken=True)
    assert not report.ok, f"nothing was found\n{report.table(verbose=True)}"
    first = report.first
    assert (first.kind, first.module, first.tensor) == (case.kind, case.module, case.tensor), str(report)
    assert all(words in first.sentence for words in case.words), str(report)
    assert case.hint in first.suggestion, str(report)


@pytest.mark.parametrize("case", ZOO)
def test_all_is_well_without_the_fault(case):
    report = case.verify(broken=False)
    assert report.ok, str(report)


# -- what cannot even be built -----------------------------------------------------------------------------------------

TIED = {"embed.weight": ("tp", "None"), "head.weight": ("None", "tp")}


def few_keys(heads):
    """A Llama with fewer keys than ranks."""
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=heads)
    return lambda: Llama(config), lambda: llama_plan(config, "tp=4")


@pytest.mark.parametrize(
    ("model", "plan", "mesh", "words"),
    [
        pytest.param(
            *few_keys(2), "tp=4", ("num_key_value_heads", "4 ranks"), id="keys and values that do not divide by tp"
        ),
        pytest.param(
            lambda: Net(tied=True),
            lambda: ShardingPlan(plan=TIED),
            "tp=2",
            ("are one parameter, and the plan has two layouts for it", "the same layout for both"),
            id="tied weights with two layouts",
        ),
        pytest.param(
            Net,
            lambda: ShardingPlan(plan={"blocks.*.mpl.up.weight": ("tp", "None")}),
            "tp=2",
            ("blocks.*.mpl.up.weight", "matches no parameter"),
            id="a path that does not exist",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(model, plan, mesh, words, monkeypatch):
    sent = []
    monkeypatch.setattr("sim.process_group.SimProcessGroup.allreduce", lambda *_: sent.append(1), raising=False)
    with pytest.raises((ValueError, sim.RankFailed)) as caught:
        sim.verify_plan(model, (tokens(),), mesh, plan())
    assert all(each in str(caught.value) for each in words), str(caught.value)
    assert not sent
