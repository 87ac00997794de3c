"""What the library does with devices, on late ones: right as it is, and a race without any one of its waits."""

from __future__ import annotations

from functools import cache

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
    "CPU offload": (GATHER, REDUCE, "schedule.finish_reductions"),
    "optimizer on its own stream": (GATHER, REDUCE, "unit._enter_forward"),
    "hsdp(comm_async=True)": (GATHER, REDUCE),
    "redistribute": ("api.distribute_tensor", "gradients.wait"),
    "ring attention": ("attention.wait", "attention._exchanged"),
    "pipelines": (
        "tied._gather",
        "tied.copy_values",
        "boundary.find_boundaries",
        "api._run",
        "api._run < schedules._wait_batch_p2p",
        "tied.add_gradients",
        "clip._reduce",
    ),
}
MUTANTS = [(name, site) for name, sites in WAITS.items() for site in sites]


def world_of(name: str) -> dict[str, str]:
    """With hccl alone the objects that ranks exchange go over the device, too; what is on the host needs gloo."""
    return {"device": "npu"} if name == "CPU offload" else {"device": "npu", "backend": "hccl"}


@cache
def right_of(name: str) -> str:
    program, ranks = PROGRAMS[name]
    return str(sim.run(program, ranks, ("npu",), **world_of(name)))


@pytest.mark.parametrize("name", WAITS)
def test_it_gives_what_it_gives_on_the_cpu(name):
    program, ranks = PROGRAMS[name]
    npu = world_of(name)
    with without() as taken:
        found = sim.run(program, ranks, ("npu",), **npu, check_races=True)
    assert tuple(taken.seen) == WAITS[name]
    torch.testing.assert_close(found, sim.run(program, ranks, ("cpu",)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "site"), MUTANTS)
def test_without_one_of_its_waits_it_is_wrong_and_both_lines_are_named(name, site):
    program, ranks = PROGRAMS[name]
    npu, right = world_of(name), right_of(name)
    with without(site):
        with pytest.raises(
            sim.InFlightBufferRace, match=r"\n  (first|issued): *\w+\.py:\d+ .*\n  (then|touched): *\w+\.py"
        ):
            sim.run(program, ranks, ("npu",), **npu, check_races=True)
        for seed in range(8):
            try:
                found = str(sim.run(program, ranks, ("npu",), **npu, seed=seed))
            except sim.SimError:  # a wrong index, say
                break
            if found != right:
                break
        else:
            raise AssertionError("no seed gives a wrong number")
