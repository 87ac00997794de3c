"""Each behaviour is run by a test, and none has gone; and a comparison that can fail does."""

import importlib
from pathlib import Path

import pytest
import torch
from fsdp2_kit import CELLS, FSDP2, ONE, OURS, SAME_ORDER, Run, Theme, compare, loss_of

import sim

pytestmark = pytest.mark.sim

FILES = sorted(Path(__file__).parent.glob("test_fsdp2_*.py"))


def themes():
    modules = [importlib.import_module(path.stem) for path in FILES if path.stem != Path(__file__).stem]
    return {module: module.THEME for module in modules}


def test_names_of_behaviours_are_unique_and_none_has_gone():
    tested = [name for theme in themes().values() for name in theme.checks]
    assert len(tested) == len(set(tested)) >= 272


def test_most_behaviours_are_compared_with_fsdp2():
    checks = [check for theme in themes().values() for check in theme.checks.values()]
    assert sum(not check.without_fsdp2 for check in checks) >= 0.85 * len(checks)


def test_each_number_of_ranks_has_a_test():
    """Behaviours that no `@sim.ranks` of their file runs would be left out in silence."""
    for module, theme in themes().items():
        chosen = set()
        for name, test in vars(module).items():
            for mark in getattr(test, "pytestmark", []) if name.startswith("test_") else []:
                if mark.name == "parametrize" and mark.args[0] == ("name", "contestant"):
                    chosen |= {case.values for case in mark.args[1]}
        wanted = {(name, contestant) for name in theme.checks for contestant in ("fully_shard", *CELLS)}
        assert chosen == wanted - {(name, "traced") for name in apart(theme)}, module.__name__


def apart(theme):
    """Behaviours whose ranks do not do the same; in a traced cell, which gathers what a rank reads, they may not."""
    return [name for name, check in theme.checks.items() if check.without["traced"] == SAME_ORDER]


def run_on_two_ranks(theme, name, contestant="fully_shard"):
    def on_rank():
        theme.check(sim.RankTest(torch.distributed.get_rank(), 2, "sim", torch.device("cpu")), name, contestant)

    sim.run(on_rank, world_size=2)


@pytest.mark.tier("test")
def test_ranks_that_read_other_parameters_of_a_traced_cell_are_found():
    cases = [(theme, name) for theme in themes().values() for name in apart(theme)]
    assert len(cases) == 5
    for theme, name in cases:
        with pytest.raises(sim.CollectiveMismatch, match=SAME_ORDER):
            run_on_two_ranks(theme, name, "traced")


def test_memory_that_was_never_written_does_not_show():
    checks = {name: theme for theme in themes().values() for name in theme.checks}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty is then full of NaN
    try:
        for name in ("parameters_that_some_ranks_use", "only_the_last_micro_batch_communicates"):
            run_on_two_ranks(checks[name], name)
    finally:
        torch.use_deterministic_algorithms(before)


# -- the comparison itself -----------------------------------------------------------------------------------------


def test_a_difference_in_the_last_bit_is_found():
    one = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    other = {"a": torch.nextafter(one["a"], torch.tensor(3.0, dtype=torch.float64))}
    with pytest.raises(AssertionError, match="a differs from FSDP2"):
        compare(one, other, None, FSDP2)
    compare(one, other, torch.float64, ONE)
    for wrong in ({"a": one["a"] + 1e-9}, {"a": None}, {"b": one["a"]}, {"a": one["a"][:1]}):
        with pytest.raises(AssertionError):
            compare(one, wrong, torch.float64, ONE)
    with pytest.raises(AssertionError, match=r"a: ours torch\.float64"):
        compare(one, {"a": one["a"].float()}, torch.float64, FSDP2)


def check_on_two_ranks(body, contestant="fully_shard", **options):
    theme = Theme()
    theme.behaviour(**options)(body)
    run_on_two_ranks(theme, body.__name__, contestant)


@pytest.mark.tier("test")
def test_a_face_that_does_otherwise_is_found():
    def less_data(run):
        model = run.net()
        run.wrap(model)
        run.train(model, lambda step: loss_of(model, run.batch(step)) * (0.5 if run.engine is OURS else 1))

    with pytest.raises(sim.RankFailed, match="differs from FSDP2"):
        check_on_two_ranks(less_data)
    with pytest.raises(sim.RankFailed, match="from one device"):
        check_on_two_ranks(less_data, without_fsdp2="left out")


def test_higher_costs_and_other_facts_are_found():
    def dear(run):
        run.costs["bytes"] = 2 if run.engine is OURS else 1

    def other(run):
        run.facts["layout"] = run.engine.name

    def nothing(run):
        pass

    for body, message in ((dear, "costs more"), (other, "other facts"), (nothing, "nothing was noted")):
        with pytest.raises(sim.RankFailed, match=message):
            check_on_two_ranks(body, one=False)
    with pytest.raises(sim.RankFailed, match="hsdp gives other facts"):
        check_on_two_ranks(other, "hsdp")


def test_a_cell_that_does_otherwise_or_does_not_refuse_is_found():
    def scaled(run):
        run.note("loss", torch.full((1,), 1.0 if run.engine is OURS else 1.1))

    def dear(run):
        run.costs["bytes"] = 1 if run.engine is OURS else 2

    for contestant in CELLS:
        for body, message in ((scaled, f"loss is .* from {CELLS[contestant][0].name}"), (dear, "costs more")):
            with pytest.raises(sim.RankFailed, match=message):
                check_on_two_ranks(body, contestant)
            check_on_two_ranks(body, contestant, without_hsdp=message)
        with pytest.raises(sim.RankFailed, match="DID NOT RAISE"):
            check_on_two_ranks(lambda run: run.note("one", torch.ones(1)), contestant, without_hsdp="mesh")


def test_one_device_has_the_data_of_all_ranks():
    ctx = [sim.RankTest(rank, 3, "sim", torch.device("cpu")) for rank in range(3)]
    full = Run(ctx[0], ONE).batch(4)
    assert torch.equal(torch.cat([Run(one, OURS).batch(4) for one in ctx]), full)
    assert Run(ctx[1], ONE).parts() == [0, 1, 2]
    assert Run(ctx[1], FSDP2).parts() == [1]
