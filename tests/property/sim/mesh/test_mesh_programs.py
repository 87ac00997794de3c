"""Programs of the simulator against the trainer's own steps in the real world: operations, communication, memory.

The trainer builds its model, its pipeline and its optimizer by its own functions; the simulator records one rank of
each kind, without values.
"""

from __future__ import annotations

import itertools
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from mesh_kit import Seen, in_real_numbers
from mesh_programs import (
    Kernel,
    Sent,
    bytes_before_update,
    flops_of,
    kernels_of,
    sent_by_program,
    sent_in_reality,
    standing_bytes,
    step_of,
    turns_followed,
    turns_of,
)
from mesh_training import GivenRouting, steps_of
from training_kit import MODELS, SEQ, Arrangement, Problem, arrangements, fits

from hyper_parallel.core.pipeline import SCHEDULES, find_schedule
from hyper_parallel.trainer.config import Config
from sim.mesh.job import Job
from sim.mesh.program import Alloc, Op, Program
from sim.mesh.recipe import Routing
from sim.mesh.tracing.trace import trace

pytestmark = [pytest.mark.sim, pytest.mark.tier("test", each=3)]

some = settings(max_examples=max(settings.default.max_examples // 20, 1))


CLIPPED, NOT_CLIPPED = 1e-6, 0.0
"""Limits of the gradients' norm: one that every step is above, as recorded steps are, and none."""

LIMITS = st.sampled_from([CLIPPED, NOT_CLIPPED])


def config_of(model: str, parallel: dict[str, Any], accumulate: int = 1) -> Config:
    config = MODELS[model].with_changes("train", {"accumulate": accumulate})
    for key, value in parallel.items():
        config = config.with_changes("parallel" if hasattr(config.parallel, key) else "precision", {key: value})
    return config


def check(config: Config, world_size: int, routing: Routing | None = None, *, limit: float = CLIPPED) -> None:
    """Compare every rank of the world with the program that stands for it."""
    config = replace(config, model=replace(config.model, max_seq_len=SEQ))  # tables just as long as the sequences
    config = replace(config, optimizer=replace(config.optimizer, max_grad_norm=limit))
    job = Job.of_run(config, world_size, routing=routing)
    # The CPU has no kernel of RMSNorm.
    job = replace(job, recipe=replace(job.recipe, norm="eager"), ring_kernel="cpu")
    programs = trace(job)
    with turns_followed():
        seen = in_real_numbers(steps_of(config, world_size, routing=routing, reads=True), world_size, stands_for="cuda")
    for place, program in enumerate(programs):
        compare(job, program, seen[job.rank_of_stage_rank(place)])
        # The others of its class do the same among other ranks; with experts, some have got more rows, and with Muon
        # each computes other matrices.
        first, size = job.rank_of_stage_rank(place), world_size // job.dims.pp
        for rank in range(first, first + size) if routing is None and not config.optimizer.muon else ():
            assert_alike(sent_in_reality(step_of(seen[rank], 1)), sent_by_program(program), devices=False)
            assert seen[rank].result.memory == seen[first].result.memory


def compare(job: Any, program: Program, seen: Seen) -> None:
    assert_alike(sent_in_reality(step_of(seen, 1)), sent_by_program(program))
    assert flops_of(program) == seen.result.flops
    memory, standing = seen.result.memory, standing_bytes(program)
    compare_operations(job, program, seen)
    compare_turns(job, program, seen)
    assert standing["parameters"] == memory["parameters"]
    assert standing["optimizer"] == memory["optimizer"]
    assert bytes_before_update(program, "gradients") == memory["gradients"]


def compare_operations(job: Job, program: Program, seen: Seen) -> None:
    """Compare operations: how often each runs, in which dtype, its shape, and the bytes that it writes.

    What differs:

    - The recorded step makes its own batch of zeros, where the trainer is given one.
    - At most three micro-batches are recorded. The others repeat the second one, except where the trainer looks at
      all of them together: it counts the tokens.
    - Experts are told how many rows go to them, and count none: that depends on values.
    - The last stage of a pipeline adds up the losses of its micro-batches, and the recorded one says zero.
    - The recorded stages of a rank are updated one after the other, and the trainer's all at once.
    """
    (real, real_update), (told, told_update) = seen.result.kernels, kernels_of(program)
    for mine, wanted in ((real, told), (told, real)):
        odd = [kernel for kernel in mine - wanted if not differs_by_design(kernel, job)]
        assert not odd, f"{'the trainer' if mine is real else 'the program'} alone: {odd}"
    assert real
    if len(program.stages) > 1:
        for name in ("aten._fused_adamw_", "aten._foreach_mul_"):
            assert written_by(told_update, name) == written_by(real_update, name), name
    else:
        assert told_update == real_update
    assert bool(written_by(real_update, "aten._foreach_mul_")) == (job.recipe.optimizer.max_grad_norm > 0)


def compare_turns(job: Job, program: Program, seen: Seen) -> None:
    """Compare what each stage of a pipeline does with each micro-batch, in the order of the schedule.

    Memory is compared until a stage reduces its gradients: an accelerator lets go of buffers that a CPU waits for.

    A program has each forward as that of the micro-batch whose backward comes as early. So if backwards run in falling
    order, weights are copied out of their gather in another forward than the first.
    """
    if not job.dims.pp_enabled:
        return
    batch = 2 * job.batch * job.local_seq_len * 8  # which the recorded step makes itself
    # Gradients between two stages of one rank are one block in reality, and two in a program.
    near = any(before + 1 == after for before, after in itertools.pairwise(program.stages))
    message = (
        job.micro_batch
        * job.local_seq_len
        * job.model.hidden_size
        * job.recipe.precision.dtype("param").itemsize
        // job.dims.tp
    )
    most = {0, *(sign * times * message for times in (1, 2) for sign in (1, -1))} if near else {0}
    told, done = turns_of(program), Counter[int]()
    falls = next(turn.batch for turn in told if turn.kind.startswith("backward")) > 0
    assert [turn[:3] for turn in told] == [turn[:3] for turn in seen.result.turns]
    for turn, real in zip(told, seen.result.turns, strict=True):
        where = turn[:3]
        odd = (turn.kernels - real.kernels) + (real.kernels - turn.kernels)
        is_copied_late = falls and turn.kind == "forward"
        odd = [kernel for kernel in odd if not (is_copied_late and kernel.name == "aten.split_with_sizes_copy")]
        assert not [kernel for kernel in odd if not differs_by_design(kernel, job)], where
        done[turn.stage] += turn.kind in ("backward", "backward_weight")
        if job.microbatches not in done.values() and not is_copied_late:
            more = [turn.live - batch - real.live]
            if job.model.family == "llama":  # experts count rows in reality
                more.append(turn.peak - batch - real.peak)
            assert most.issuperset(more), (where, more)


def differs_by_design(kernel: Kernel, job: Job) -> bool:
    if kernel.dtype != "int64":
        adds_losses = kernel.name in ("aten.sum", "aten.stack", "aten.zeros") and kernel.written <= 8 * job.microbatches
        return job.dims.pp_enabled and adds_losses
    counts_tokens = kernel.name == "aten.ne" and job.microbatches > 3
    counts_rows = kernel.name in ("aten.sum", "aten.cat") and job.dims.ep_enabled
    return kernel.name == "aten.zeros" or counts_tokens or counts_rows


def written_by(kernels: Counter[Kernel], name: str) -> int:
    return sum(count * kernel.written for kernel, count in kernels.items() if kernel.name == name)


def assert_alike(real: list[Sent], said: list[Sent], *, devices: bool = True) -> None:
    """Assert that events are the same in the same order: all collectives, and the messages to and from each neighbour.

    A rank posts the sends and receives of one turn of its schedule together, in whatever order.
    """
    found, wanted = in_order(said, devices), in_order(real, devices)
    assert list(found) == list(wanted)
    for key, events in wanted.items():
        for number, (one, other) in enumerate(zip(events, found[key], strict=False)):
            assert other == one, f"{key} {number} of a step"
        assert len(found[key]) == len(events)


def in_order(events: list[Sent], devices: bool) -> dict[Any, list[Any]]:
    lines: dict[Any, list[Any]] = {"collective": []}
    for each in events:
        key = "collective" if each.peer is None else (each.op, each.peer if devices else each.axis)
        lines.setdefault(key, []).append(each if devices else among_any(each))
    return dict(sorted(lines.items(), key=str))


def among_any(sent: Sent) -> Sent:
    """What is the same on all ranks of a class; of a sum, how much a rank sends depends on its place in the group."""
    moved = 0 if sent.op == "all_reduce" else sent.moved
    return sent._replace(devices=(len(sent.devices),), peer=None, moved=moved)


EACH: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "one rank": ("dense", 1, {"param_dtype": "bf16"}, 1),
    "two ranks": ("dense", 2, {}, 1),
    "half replicated": ("dense", 4, {"dp_replicate": 2}, 1),
    "tensor parallel": ("dense", 2, {"tp": 2}, 1),
    "ring": ("dense", 2, {"cp": 2, "ulysses_degree": 1}, 1),
    "ulysses": ("dense", 2, {"cp": 2, "ulysses_degree": 2}, 1),
    "bf16, computed again": ("dense", 4, {"tp": 2, "param_dtype": "bf16", "checkpointing": "full"}, 1),
    "several micro-batches": ("dense", 2, {"param_dtype": "bf16"}, 4),
    "kept gathered": (
        "dense",
        2,
        {"param_dtype": "bf16", "checkpointing": "selective", "reshard_after_forward": False},
        2,
    ),
    "tied": ("dense, tied, tokens ignored", 4, {"tp": 2}, 2),
    "experts": ("experts", 4, {"ep": 2}, 1),
    "experts in bf16": ("experts", 4, {"ep": 2, "param_dtype": "bf16"}, 1),
    "experts in bf16, not split": ("experts", 2, {"param_dtype": "bf16"}, 1),
    "experts, not split": ("experts", 2, {}, 1),
    "experts and tp": ("experts", 4, {"ep": 2, "tp": 2}, 1),
    "whole experts and tp": ("experts", 4, {"ep": 2, "tp": 2, "etp": 1}, 1),
    "experts and cp": ("experts", 4, {"ep": 2, "cp": 2}, 1),
    "experts over tp": ("experts", 2, {"tp": 2, "etp": 1, "fold_experts": True}, 1),
    "experts on nodes": ("experts", 4, {"ep": 4, "ranks_per_node": 2}, 1),
    "pipeline": ("dense", 2, {"pp": 2}, 4),
    "pipeline, gpipe": ("dense", 2, {"pp": 2, "schedule": "gpipe"}, 4),
    "pipeline and tp": ("dense", 4, {"pp": 2, "tp": 2}, 4),
    "pipeline and dp": ("dense", 4, {"pp": 2, "param_dtype": "bf16"}, 4),
    "hsdp": ("dense", 4, {"engine": "hsdp", "dp_replicate": 2, "checkpointing": "selective"}, 2),
    "in chunks": ("dense", 4, {"tp": 2, "tp_chunks": 2, "param_dtype": "bf16"}, 2),
    "in double": ("dense", 2, {"param_dtype": "fp64"}, 1),
    "pipeline, zero bubble": ("dense", 2, {"pp": 2, "schedule": "zero-bubble", "layers_per_stage": "0,1,1,0"}, 4),
    "pipeline, zero bubble, tp, computed again": (
        "dense, tied, tokens ignored",
        4,
        {
            "pp": 2,
            "tp": 2,
            "schedule": "zbv",
            "layers_per_stage": "0,1,1,0",
            "checkpointing": "full",
            "param_dtype": "bf16",
            "reshard_inputs": True,
        },
        2,
    ),
    "pipeline, weights split differently": (
        "dense",
        4,
        {"pp": 2, "tp": 2, "schedule": "looped-bfs", "layers_per_stage": "0,0,2,0", "param_dtype": "bf16"},
        2,
    ),
    "pipeline, tied": ("dense, tied, tokens ignored", 4, {"pp": 2}, 4),
    "not clipped": ("dense", 2, {"tp": 2}, 2),
    "pipeline, not clipped": ("dense", 4, {"pp": 2}, 4),
    "pipeline, interleaved": ("dense", 4, {"pp": 2, "schedule": "interleaved", "layers_per_stage": "0,1,1,0"}, 4),
    "pipeline, looped, tied": (
        "dense, tied, tokens ignored",
        2,
        {"pp": 2, "schedule": "looped-bfs", "param_dtype": "bf16", "layers_per_stage": "0,1,1,0"},
        4,
    ),
    "pipeline, tied on one rank": (
        "dense, tied, tokens ignored",
        2,
        {"pp": 2, "schedule": "zbv", "layers_per_stage": "0,1,1,0"},
        4,
    ),
    "reduced in each": ("dense", 2, {"reduce_each": True, "param_dtype": "bf16"}, 4),
    "pipeline, experts on some stages": (
        "experts",
        4,
        {"pp": 2, "cp": 2, "fold_experts": True, "schedule": "looped-bfs", "layers_per_stage": "0,1,1,0"},
        2,
    ),
}


@pytest.mark.parametrize(
    "name", [name for name, (_, _, given, _) in EACH.items() if SCHEDULES[given.get("schedule", "1f1b")].is_available]
)
def test_each_dimension(name):
    if name == "in double" and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 says that attention in double returns log-sums in float32")
    model, size, parallel, accumulate = EACH[name]
    limit = NOT_CLIPPED if "not clipped" in name else CLIPPED
    check(
        config_of(model, parallel, accumulate), size, GivenRouting.zipf(1.0) if "expert" in model else None, limit=limit
    )


PURE = {"param_dtype": "bf16", "master_dtype": "bf16"}
STORED: dict[str, tuple[str, int, dict[str, Any], int, int]] = {
    "bf16": ("dense", 4, PURE, 2, 0),
    "bf16, reduced in bf16": ("dense", 2, {**PURE, "reduce_dtype": "bf16"}, 1, 0),
    "moments wider": ("dense", 4, {**PURE, "moments_dtype": "fp32", "tp": 2}, 2, 0),
    "moments narrower": ("dense", 2, {"param_dtype": "bf16", "moments_dtype": "bf16"}, 1, 0),
    "moments narrower than what is computed": ("dense", 1, {"moments_dtype": "bf16"}, 1, 0),
    "experts in bf16": ("experts", 4, {**PURE, "ep": 2}, 1, 0),
    "pipeline in bf16": ("dense", 4, {**PURE, "pp": 2}, 4, 0),
    "adapters": ("dense", 4, {"param_dtype": "bf16"}, 2, 4),
    "adapters in bf16": ("dense", 2, PURE, 1, 2),
    "adapters, frozen in fp32": ("dense", 2, {"param_dtype": "bf16", "frozen_dtype": "fp32"}, 1, 2),
    "adapters, computed in fp32": ("dense", 2, {"frozen_dtype": "bf16", "moments_dtype": "bf16"}, 1, 2),
}
"""Model, ranks, degrees and dtypes, micro-batches, and the rank of adapters."""


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored(name):
    model, size, given, accumulate, rank = STORED[name]
    config = config_of(model, given, accumulate).with_changes("lora", {"rank": rank})
    check(config, size, GivenRouting.zipf(1.0) if "expert" in model else None)


MUON: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "one rank": ("dense", 1, {}, 1),
    "shards": ("dense", 4, {"param_dtype": "bf16"}, 2),
    "copies and tp": ("dense", 4, {"dp_replicate": 2, "tp": 2}, 1),
    "experts": ("experts", 4, {"ep": 2}, 1),
    "pipeline": ("dense", 4, {"pp": 2}, 4),
    "whole": ("dense", 4, {"param_dtype": "bf16", "whole_parameters": True}, 2),
    "whole, copies and tp": ("dense", 8, {"dp_replicate": 2, "tp": 2, "whole_parameters": True}, 1),
    "whole, experts": ("experts", 4, {"ep": 2, "whole_parameters": True}, 1),
    "whole, pipeline": ("dense", 4, {"pp": 2, "whole_parameters": True}, 4),
}


@pytest.mark.parametrize("name", MUON)
def test_muon(name):
    model, size, parallel, accumulate = MUON[name]
    config = config_of(model, parallel, accumulate).with_changes("optimizer", {"muon": True})
    check(config, size, GivenRouting.zipf(1.0) if "expert" in model else None)


@st.composite
def programmed(draw: st.DrawFn, problem: Problem) -> Arrangement:
    """Draw ranks whose programs are compared here."""
    found = draw(arrangements(problem).filter(is_programmed))
    parallel, changes = found.parallel, {"reduce_each": draw(st.booleans())}
    if fits(problem, found._replace(parallel=replace(parallel, **changes))):
        parallel = replace(parallel, **changes)
    event(f"pp {parallel.pp} tp {parallel.tp} cp {parallel.cp} ep {parallel.ep}, {parallel.schedule}")
    return found._replace(parallel=parallel)


def is_programmed(found: Arrangement) -> bool:
    """Whether it is compared here."""
    return found.world_size <= 8


def lets_go(found: Arrangement) -> bool:
    """Whether all that a micro-batch takes is freed with it: some of it waits for Python's collector.

    Of experts, where backwards are split and inputs are gathered, or blocks computed, again.
    """
    parallel = found.parallel
    splits = parallel.pp > 1 and find_schedule(parallel.schedule).splits_backward
    return not (splits and (parallel.reshard_inputs or parallel.checkpointing != "none"))


@pytest.mark.tier("full")
@some
@given(st.sampled_from(["dense", "dense, tied, tokens ignored"]), st.sampled_from(["fp32", "bf16"]), st.data())
def test_drawn_ranks_of_a_llama(model, precision, data):
    problem = Problem(model, precision)
    found = data.draw(programmed(problem))
    check(found.of(problem), found.world_size, limit=data.draw(LIMITS))


@pytest.mark.tier("full")
@some
@given(
    st.sampled_from(["experts", "experts in all layers, tied"]),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from([Routing(), Routing.zipf(1.0)]),
    st.data(),
)
def test_drawn_ranks_with_experts(model, precision, routing, data):
    problem = Problem(model, precision)
    found = data.draw(programmed(problem).filter(lets_go))
    check(found.of(problem), found.world_size, routing, limit=data.draw(LIMITS))


# -- the comparison notices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("train", {"seq_len": 16}),
        ("parallel", {"checkpointing": "full"}),
        ("precision", {"param_dtype": "bf16"}),
        ("optimizer", {"max_grad_norm": NOT_CLIPPED}),
    ],
)
def test_operations_of_another_run_are_noticed(section, change):
    config = replace(MODELS["dense"], model=replace(MODELS["dense"].model, max_seq_len=16))
    config = config.with_changes("optimizer", {"max_grad_norm": CLIPPED})
    (seen, _) = in_real_numbers(steps_of(config, 2, reads=True), 2, stands_for="cuda")

    def compare_with(run: Config) -> None:
        job = Job.of_run(run, 2)
        job = replace(job, recipe=replace(job.recipe, norm="eager"))
        compare_operations(job, trace(job)[0], seen)

    compare_with(config)
    with pytest.raises(AssertionError):
        compare_with(config.with_changes(section, change))


@pytest.mark.skipif(not SCHEDULES["zero-bubble"].is_available, reason="this torch has no right one")
def test_what_is_in_the_wrong_half_of_a_backward_is_noticed():
    config = config_of("dense", {"pp": 2, "schedule": "zero-bubble", "layers_per_stage": "0,1,1,0"}, 2)
    config = replace(config, model=replace(config.model, max_seq_len=SEQ))
    with turns_followed():
        (seen, _) = in_real_numbers(steps_of(config, 2, reads=True), 2, stands_for="cuda")
    job = Job.of_run(config, 2)
    job = replace(job, recipe=replace(job.recipe, norm="eager"))
    program = trace(job)[0]
    compare_turns(job, program, seen)
    for kind in (Op, Alloc):
        moved = deepcopy(program)
        first, second = (moved.segments[name, 2, "first"] for name in ("backward_input", "backward_weight"))
        events = [event for event in second.events if isinstance(event, kind)]
        second.events.remove(events[-1])
        first.events.append(events[-1])
        with pytest.raises(AssertionError):
            compare_turns(job, moved, seen)
