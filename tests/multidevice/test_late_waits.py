"""What the library does with devices, on late ones: right as it is, and a race without any one of its waits."""

from __future__ import annotations

import pytest
import torch
from late_kit import PROGRAMS, without

import sim
from sim.late.switch import why_not

pytestmark = [
    pytest.mark.sim,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]

GATHER, REDUCE = "unit._receive < comm.wait", "reduce.advance < comm.wait"
# By program, the functions of the library that wait for a device; docs/faults.md has this table.
WAITS = {
    "fully_shard": (GATHER, REDUCE),
    "clip_grad_norm_": (GATHER, REDUCE, "clip._reduce"),
    "reshard_after_forward=False": (GATHER, REDUCE),
    "replicas": (GATHER, "reduce.receive < comm.wait", "reduce.finish < comm.wait"),
    "mixed precision": (GATHER, REDUCE),
    "CPU offload": ("bucket._wait", GATHER, REDUCE, "bucket.to_host", "bucket.finish"),
    "CPU offload on one rank": ("bucket._wait", GATHER, "bucket.to_host", "bucket.finish"),
    "optimizer on its own stream": (GATHER, REDUCE, "unit._enter_forward"),
    "hsdp(comm_async=True)": (GATHER, REDUCE),
    "activations on the host": (GATHER, "offload._copying", "offload._leave", "offload._unpack", REDUCE),
    "inputs of blocks on the host": ("offload._copying", "offload._leave", "offload._unpack"),
    "redistribute": ("api.distribute_tensor", "gradients.wait"),
    "ring attention": ("attention.wait", "attention._exchanged"),
}
MUTANTS = [(name, site) for name, sites in WAITS.items() for site in sites]


@pytest.mark.parametrize("name", WAITS)
def test_it_gives_what_it_gives_on_the_cpu(name):
    program, ranks = PROGRAMS[name]
    with without() as taken:
        found = sim.run(program, ranks, ("npu",), device="npu", check_races=True)
    assert tuple(taken.seen) == WAITS[name]
    torch.testing.assert_close(found, sim.run(program, ranks, ("cpu",)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "site"), MUTANTS)
def test_without_one_of_its_waits_it_is_wrong_and_both_lines_are_named(name, site):
    program, ranks = PROGRAMS[name]
    right = str(sim.run(program, ranks, ("npu",), device="npu"))
    with without(site):
        with pytest.raises(
            sim.InFlightBufferRace, match=r"\n  (first|issued): *\w+\.py:\d+ .*\n  (then|touched): *\w+\.py"
        ):
            sim.run(program, ranks, ("npu",), device="npu", check_races=True)
        for seed in range(8):
            try:
                found = str(sim.run(program, ranks, ("npu",), device="npu", seed=seed))
            except sim.SimError:  # a wrong index, say
                break
            if found != right:
                break
        else:
            raise AssertionError("no seed gives a wrong number")


@pytest.mark.slow
def test_pipelines_give_what_they_give_on_the_cpu():
    program, ranks = PROGRAMS["pipelines"]
    found = sim.run(program, ranks, ("npu",), device="npu", check_races=True)
    torch.testing.assert_close(found, sim.run(program, ranks, ("cpu",)), rtol=1e-5, atol=1e-5)
