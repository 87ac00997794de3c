"""What the library does with devices, on late ones: right as it is, and a race without any one of its waits."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from activations_kit import Blocks, wrapped
from late_kit import IN_RECORD, PROGRAMS, RUN, pipelined, run, with_fsdp2, without
from one_device import shared
from torch.distributed import fsdp as torch_fsdp

import sim
from hyper_parallel import checkpoint_blocks
from hyper_parallel.core.fully_shard import reduce
from hyper_parallel.core.fully_shard.comm import reduce_scatter_each
from hyper_parallel.platform import Platform
from hyper_parallel.trainer.config import Config, ParallelConfig
from sim.late.switch import why_not
from sim.prove.training import verify_run

pytestmark = [
    pytest.mark.sim,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.tier("full"),
]

GATHER, REDUCE = "unit._receive < comm.wait", "reduce.advance < comm.wait"
# By program, the functions of the library that wait for a device; docs/faults.md has this table.
WAITS = {
    "fully_shard": (GATHER, REDUCE),
    "clip_grad_norm_": (GATHER, REDUCE, "clip._reduce"),
    "reshard_after_forward=False": (GATHER, REDUCE),
    "replicas": (GATHER, "reduce.receive < comm.wait", "reduce.finish < comm.wait"),
    "parameters with owners": (GATHER, REDUCE),
    "mixed precision": (GATHER, REDUCE),
    "CPU offload": ("bucket._wait", GATHER, REDUCE, "bucket.to_host", "bucket.finish"),
    "CPU offload on one rank": ("bucket._wait", GATHER, "bucket.to_host", "bucket.finish"),
    "optimizer on its own stream": (GATHER, REDUCE, "unit._enter_forward"),
    "hsdp(comm_async=True)": (GATHER, REDUCE),
    "activations on the host": (GATHER, "offload._copying", "offload._leave", "offload._unpack", REDUCE),
    "inputs of blocks on the host": ("offload._copying", "offload._leave", "offload._unpack"),
    "redistribute": ("api.distribute_tensor", "gradients.wait", "execute.drive"),
    "chunks": ("chunks.land", "groups.all_gather_single"),
    "ring attention": ("attention.wait", "attention._exchanged"),
    "pipelines": (
        "tied._gather",
        "tied.copy_values",
        "boundary.find_boundaries",
        *(["api._run"] if torch.__version__ >= "2.13" else []),  # torch 2.11 does not ask who computes gradients
        "api._run < schedules._wait_batch_p2p",
        "tied.add_gradients",
        "clip._reduce",
    ),
    "sharded stages": (
        GATHER,
        "boundary.find_boundaries",
        *(["api._run"] if torch.__version__ >= "2.13" else []),  # torch 2.11 does not ask who computes gradients
        "api._run < schedules._wait_batch_p2p",
        REDUCE,
        "clip._reduce",
    ),
    "experts": ("experts.exchange_counts", "experts.wait"),
    "experts on nodes": ("experts.exchange_counts", "experts.wait"),
}
# Each line that waits is left out in one program below the tier `deep`.
FIRST = {site: name for name, sites in reversed(WAITS.items()) for site in sites}
MUTANTS = [
    pytest.param(name, site, marks=[pytest.mark.slow] if name != FIRST[site] else [])
    for name, sites in WAITS.items()
    for site in sites
]


def world_of(name: str) -> dict[str, str]:
    """With hccl alone the objects that ranks exchange go over the device, too; what is on the host needs gloo."""
    return {"device": "npu"} if name == "CPU offload" else {"device": "npu", "backend": "hccl"}


@cache
def right_of(name: str) -> str:
    program, ranks = PROGRAMS[name]
    return str(sim.run(program, ranks, ("npu",), **world_of(name)))


@cache
def on_the_cpu(name: str) -> list[Any]:
    program, ranks = PROGRAMS[name]
    return sim.run(program, ranks, ("cpu",))


@pytest.mark.tier("full", each=5)
@pytest.mark.parametrize("name", WAITS)
def test_it_gives_what_it_gives_on_the_cpu(name):
    program, ranks = PROGRAMS[name]
    npu = world_of(name)
    with without() as taken:
        found = sim.run(program, ranks, ("npu",), **npu, check_races=True)
    assert tuple(taken.seen) == WAITS[name]
    torch.testing.assert_close(found, on_the_cpu(name), rtol=1e-5, atol=1e-5)


@pytest.mark.tier("full")
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


@pytest.mark.tier("full", each=9)
@pytest.mark.parametrize("name", WAITS)
def test_on_a_device_that_ranks_share_each_of_its_waits_is_followed(name):
    """There, `check_races` records what the streams do, and a wait that is missing there is found, too."""
    program, ranks = PROGRAMS[name]
    options = {"check_races": True, "backend": world_of(name).get("backend")}
    with without(waits=IN_RECORD) as taken:
        found = shared(program, ranks, args=("npu",), **options)
    assert tuple(taken.seen) == WAITS[name]
    torch.testing.assert_close(found, on_the_cpu(name), rtol=1e-5, atol=1e-5)
    for site in WAITS[name]:
        with without(site, IN_RECORD), pytest.raises(sim.InFlightBufferRace):
            shared(program, ranks, args=("npu",), **options)


def test_gradients_are_bit_for_bit_the_same_whether_they_are_packed_or_sent_from_where_they_are(monkeypatch):
    """Of two stages on a rank; the second one's are sent while the first one's backward goes on."""
    sent: list[int] = []

    def counted(targets, sources, *args):
        sent.append(len(sources))
        return reduce_scatter_each(targets, sources, *args)

    monkeypatch.setattr(reduce, "reduce_scatter_each", counted)
    program = partial(pipelined, schedule="interleaved", layers=4, tied=False, dp=2, shard="layers")
    npu = {"device": "npu", "backend": "hccl", "check_races": True}
    in_place = sim.run(partial(program, micro_batches=4), 4, ("npu",), **npu)
    assert sent
    sent.clear()
    monkeypatch.setattr(reduce.GradientReducer, "can_send_in_place", lambda self, options: False)
    assert sim.run(partial(program, micro_batches=4), 4, ("npu",), **npu) == in_place
    assert not sent


# -- whole runs, and torch's own engine --------------------------------------------------------------------------------


FSDP2 = {
    "shards": ((2,), {}, 1e-5),
    "reshard_after_forward=False": ((2,), {"reshard_after_forward": False}, 1e-5),
    "replicas": ((2, 2), {}, 1e-5),
    "mixed precision": ((2,), {"mp_policy": torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, 1e-2),
    "CPU offload": ((2,), {"offload_policy": torch_fsdp.CPUOffloadPolicy()}, 1e-5),
}


@pytest.mark.tier("full", each=3)
@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_gives_what_one_device_gives(name):
    shape, options, rounding = FSDP2[name]
    found = sim.run(with_fsdp2, math.prod(shape), (shape,), options, **world_of(name), check_races=True)
    for each in found:
        torch.testing.assert_close(each, with_fsdp2(()), rtol=rounding, atol=rounding)


RUNS = {
    "one": (1, {}),
    "shards": (2, {}),
    "replicas": (2, {"dp_replicate": 2}),
    "tp": (2, {"tp": 2}),
    "tp in chunks": (2, {"tp": 2, "tp_chunks": 2, "checkpointing": "selective"}),
    "whole": (2, {"whole_parameters": True}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2}),
    "ep": (2, {"ep": 2}),
    "hsdp": (2, {"engine": "hsdp"}),
    "recomputed": (2, {"checkpointing": "full"}),
    "tp, offloaded": (2, {"tp": 2, "checkpointing": "offload"}),
    "cp, offloaded": (2, {"cp": 2, "checkpointing": "full offload"}),
    "pp, offloaded": (2, {"pp": 2, "checkpointing": "offload"}),
    "ep, offloaded": (2, {"ep": 2, "checkpointing": "full offload"}),
}


on_one_device = cache(run)


@pytest.mark.tier("full", each=13)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_what_one_device_gives(name):
    ranks, parallel = RUNS[name]
    alone = RUN.with_changes("train", {"model": "moe" if "ep" in parallel else "llama"})
    alone = alone.with_changes("optimizer", {"muon": "whole_parameters" in parallel})
    config = alone.with_changes("parallel", parallel).with_changes("train", {"device": "npu"})
    found = sim.run(run, ranks, (config,), device="npu", backend="hccl", check_races=True)
    torch.testing.assert_close(found, [on_one_device(alone)] * ranks, rtol=1e-4, atol=1e-5)


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    saving = {"folder": str(tmp_path), "every": 1, "background": True}
    config = RUN.with_changes("train", {"device": "npu"}).with_changes("checkpoint", saving)
    npu = {"device": "npu", "backend": "hccl", "check_races": True}
    first = sim.run(run, 2, (config.with_changes("train", {"steps": 1}),), **npu)[0]
    losses, norms, valid = first[:1], first[1:2], sim.run(run, 2, (config,), **npu)[0]
    torch.testing.assert_close([losses[0], valid[0], norms[0], *valid[1:]], on_one_device(RUN), rtol=1e-4, atol=1e-5)


# -- proofs of models whose activations are offloaded ------------------------------------------------------------------


class Dropping(Blocks):
    """Blocks with dropout, which is one operation on a device and two on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nn.functional.dropout(x, 0.25))


def offloading(policy: str, model: Blocks, mesh: Any) -> torch.nn.Module:
    return wrapped(checkpoint_blocks(model, policy), "ours", mesh.device_type)


def mean_step(model: torch.nn.Module, batch: torch.Tensor, device: str | None = None) -> torch.Tensor:
    total = torch.zeros((), dtype=batch.dtype, device=device or batch.device)
    total += model(batch).square().mean()
    total.backward()
    return total.detach()


def rows(batch: torch.Tensor, mesh: Any) -> torch.Tensor:
    return batch.chunk(mesh.size())[mesh.get_rank()]


BATCH = torch.linspace(-1, 1, 128).view(8, 16)


def of_plan(depth: int = 3, policy: str = "offload") -> sim.Report:
    parallelize = partial(offloading, policy)
    return sim.verify_plan(partial(Dropping, depth, 16), (BATCH,), "dp=2", parallelize=parallelize, steps=1)


def of_step(step: Any = mean_step) -> sim.Report:
    options = {"parallelize": partial(offloading, "full offload"), "shard_batch": rows, "steps": 1}
    return sim.verify_step(step, partial(Dropping, 3, 16), BATCH, "dp=2", **options)


def of_run() -> sim.Report:
    return verify_run(Config(parallel=ParallelConfig(checkpointing="offload")), 2)


PROOFS = {"plan": of_plan, "step": of_step, "run": of_run}


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("name", PROOFS)
def test_offloaded_activations_are_proved(name):
    report = PROOFS[name]()
    assert report.ok, report
    assert "activations go to the host and back on npu devices without a race, and all is the same" in report.notes


@pytest.mark.tier("full", each=4)
@pytest.mark.parametrize("name", PROOFS)
@pytest.mark.parametrize("site", WAITS["inputs of blocks on the host"])
def test_a_proof_names_the_race_that_a_missing_wait_leaves(name, site):
    with without(site), pytest.raises(sim.InFlightBufferRace, match=r"stream 1 .*\n  first: .*\n  then:  .*by "):
        PROOFS[name]()


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("name", PROOFS)
def test_a_proof_finds_what_comes_back_otherwise(name, monkeypatch):
    copy = Platform.copy_to_device

    def wrong(self, tensor, source, **options):
        copy(self, tensor, source, **options)
        tensor.mul_(1.001)

    monkeypatch.setattr(Platform, "copy_to_device", wrong)
    report = PROOFS[name]()
    assert "gradient" in report.first.kind, report
    assert name == "run" or report.first.sentence.startswith("it is right where nothing is moved"), report


def test_a_proof_says_where_it_could_not_move_activations():
    said = "that activations go to the host and back is not proved: "
    assert f"{said}all that blocks keep is too small, or the last block's" in of_plan(depth=1).notes
    report = of_step(partial(mean_step, device="cpu"))
    assert report.ok
    assert any(note.startswith(f"{said}rank ") and "on the same device" in note for note in report.notes)
