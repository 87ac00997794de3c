"""A zoo of broken parallel models: each is caught, at the right place, in words; and right without its one fault."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import zoo_by_hand
import zoo_by_plan
import zoo_by_wrapper
from torch.distributed.device_mesh import init_device_mesh
from zoo_kit import Net

import sim
from hyper_parallel import ShardingPlan, shard_module
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.plans import llama_plan

pytestmark = pytest.mark.tier("test")

ZOO = [pytest.param(case, id=case.name) for case in (*zoo_by_hand.CASES, *zoo_by_plan.CASES, *zoo_by_wrapper.CASES)]


@pytest.mark.parametrize("case", ZOO)
def test_the_fault_is_found(case):
    report = case.verify(broken=True)
    assert not report.ok, f"nothing was found\n{report.table(verbose=True)}"
    first = report.first
    assert (first.kind, first.module, first.tensor) == (case.kind, case.module, case.tensor), str(report)
    assert all(words in first.sentence for words in case.words), str(report)
    assert case.hint in first.suggestion, str(report)
    assert first.suggestion, str(report)
    assert all(len(line) <= 120 for line in str(report).splitlines())


@pytest.mark.tier("test", each=4)
@pytest.mark.parametrize("case", ZOO)
def test_all_is_well_without_the_fault(case):
    report = case.verify(broken=False)
    assert report.ok, str(report)


# -- what cannot even be built -----------------------------------------------------------------------------------------


def few_keys():
    """A Llama with fewer heads of keys and values than ranks."""
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2)
    return Llama(config), llama_plan(config, "tp=4")


def typo():
    return Net(), ShardingPlan(plan={"blocks.*.mpl.up.weight": ("tp", "None")})


def tied():
    return Net(tied=True), ShardingPlan(plan={"embed.weight": ("tp", "None"), "head.weight": ("None", "tp")})


@pytest.mark.parametrize(
    ("made", "words"),
    [
        pytest.param(
            few_keys,
            ["the 4 ranks along 'tp' cannot share num_key_value_heads=2 evenly", "try: a mesh with tp=1 or tp=2"],
            id="keys and values that do not divide by tp",
        ),
        pytest.param(
            tied,
            ["are one parameter, and the plan has two layouts for it", "try: the same layout for both"],
            id="tied weights with two layouts",
        ),
        pytest.param(
            typo, ["means no parameter of the model", "try: 'blocks.0.mlp.up.weight'"], id="a path that does not exist"
        ),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_sent(made, words):
    def body():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        sent[dist.get_rank()] = len(world.trace.events)
        shard_module(made()[0], mesh, made()[1])

    sent = {}
    with sim.world(4) as world:
        with pytest.raises(sim.RankFailed) as caught:
            world.run(body)
        assert isinstance(caught.value, ValueError)
        assert len(world.trace.events) == min(sent.values())
    assert all(each in str(caught.value) for each in words), str(caught.value)
