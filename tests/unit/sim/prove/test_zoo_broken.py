"""A zoo of broken parallel models: `sim.prove` finds each, at the right place, in words, and nothing without faults."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import zoo_by_hand
import zoo_by_plan
import zoo_by_step
import zoo_by_wrapper
from torch.distributed.device_mesh import init_device_mesh
from zoo_kit import Net

import sim
from hyper_parallel import ShardingPlan, shard_module
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.plans import llama_plan

pytestmark = pytest.mark.tier("test")

CASES = (*zoo_by_hand.CASES, *zoo_by_plan.CASES, *zoo_by_wrapper.CASES)
ZOO = [pytest.param(case, id=case.name) for case in CASES]
RIGHT = [pytest.param(case, id=case.name) for case in {case.program: case for case in CASES}.values()]


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


@pytest.mark.parametrize("case", RIGHT)
def test_all_is_well_without_the_fault(case):
    report = case.verify(broken=False)
    assert report.ok, str(report)
    close = [row for row in report.rows if row.verdict in ("exact", "rounding") and row.ratio >= 0.5]
    assert not close, "\n".join(map(str, close))


# -- steps of one's own ------------------------------------------------------------------------------------------------


def steps(of_faults):
    """Return programs, or each of their faults; the first and every fifth program is of the tier `test`."""
    for number, (name, program) in enumerate(zoo_by_step.PROGRAMS.items()):
        for fault in program.faults if of_faults else ("",):
            marks = [pytest.mark.tier("full" if number % 5 else "test")]
            missing = zoo_by_step.NOT_PROVED.get(name)
            marks += [pytest.mark.xfail(strict=True, reason=missing)] if missing else []
            yield pytest.param(program, fault, marks=marks, id=f"{name}: {fault}" if fault else name)


@pytest.mark.parametrize(("program", "fault"), list(steps(of_faults=True)))
def test_the_fault_of_a_step_is_found(program, fault):
    kind, place, words = program.faults[fault]
    report = program.verify(fault)
    assert not report.ok, f"nothing was found\n{report.table(verbose=True)}"
    assert (report.first.kind, report.first.verdict) == (kind, "bug"), str(report)
    assert report.first.place.startswith(place), str(report)
    assert words in report.first.sentence, str(report)


@pytest.mark.tier("test")
def test_numbers_of_a_step_that_are_not_compared_are_named():
    report = zoo_by_step.PROGRAMS["a dict with a metric of unequal rows"].verify()
    notes = [note.partition(" is not compared")[0] for note in report.notes if "as ranks return their own" in note]
    assert notes == ["result 'rate'", "result 'own'"], report


@pytest.mark.parametrize(("program", "fault"), list(steps(of_faults=False)))
def test_a_step_is_right_without_faults(program, fault):
    report = program.verify(fault)
    assert report.ok, str(report)
    pending = {"pending"} if "tp" in program.mesh else set()  # parts of sums between modules, as there should be
    assert {row.verdict for row in report.rows} <= {"exact", "rounding", *pending}, str(report)
    for number in (1, program.steps):
        kinds = {row.kind for row in report.rows if row.tensor.endswith(f"of step {number}")}
        assert {"forward", "update"} <= kinds, str(report)


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
