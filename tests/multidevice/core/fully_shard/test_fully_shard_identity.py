"""Ranks that do not run the same units get an error that names the first that differs, where sizes agree, too.

On processes the engine compares, after the first forward of a step and with the norm; simulated groups compare each
collective. Programs that mean what they do are left alone.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel import clip_grad_norm_, fully_shard, hsdp
from hyper_parallel.core.fully_shard import comm
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.cpu import CpuPlatform

PROCESSES = ("gloo", "gpu")  # devices of simulated ranks are npu's, too, and compare each collective


class Experts(nn.Module):
    """Layers of equal size, of which a forward runs some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 6)

    def forward(self, x, chosen):
        return self.head(sum(self.experts[index](x) for index in chosen))


class Branches(nn.Module):
    """Two layers of equal size, whose outputs are apart."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.left(x), self.right(x)


def wrapped(model, *parts, **options):
    for part in parts:
        fully_shard(part, **options)
    return fully_shard(model, **options)


def experts(device):
    model = Experts().to(device)
    return wrapped(model, *model.experts)


def rows(device):
    return torch.ones(2, 6, device=device, requires_grad=True)


# -- ranks that do not agree -------------------------------------------------------------------------------------------


def other_experts(device, rank):
    experts(device)(rows(device), (0, 1 + rank))


def another_layer_dropped(device, rank):
    experts(device)(rows(device), [index for index in range(4) if index != rank])


def two_models_in_another_order(device, rank):
    models = [experts(device), experts(device)]
    for model in models:
        model(rows(device), (0,)).sum().backward()
    for turn in range(2):  # a device has the result at the next forward
        for model in models[:: 1 if turn or rank == 0 else -1]:
            with torch.no_grad():
                model(rows(device), (0,))


def another_branch_is_differentiated(device, rank):
    model = Branches().to(device)
    wrapped(model, model.left, model.right, reshard_after_forward=False)
    for turn in range(2):
        model(rows(device))[turn * rank].sum().backward()
        clip_grad_norm_(model, 1.0, norm_type=(2.0, float("inf"))[turn])


def another_number_of_classes(device, rank):
    model = fully_shard(nn.Linear(6, 3 + rank).to(device))
    model(rows(device)).sum().backward()


def experts_moved_after_wrapping(device, rank):
    model = experts(device)
    if rank:
        model.experts = nn.ModuleList(list(model.experts)[::-1])
    model(rows(device), (0, 1))


def cells_of_other_shapes(device, rank):
    model = hsdp(nn.Linear(6, 4, bias=rank == 0).to(device), threshold=0, optimizer_level="level3")
    model(rows(device)).sum().backward()


PROGRAMS = {
    other_experts: ("experts.1: weight", "experts.2: weight"),
    another_layer_dropped: ("experts.1: weight", "experts.0: weight"),
    two_models_in_another_order: ("head.weight", "number|wrapped as unit 10"),
    another_branch_is_differentiated: ("left: weight", "right: weight"),
    another_number_of_classes: ("[3, 6]", "[4, 6]"),
    experts_moved_after_wrapping: ("experts.0: weight", "experts.0 (wrapped as experts.3): weight"),
    cells_of_other_shapes: ("weight", "bias"),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@sim.ranks(2, backends=PROCESSES)
def test_ranks_that_do_not_agree_are_told_on_each_of_them(ctx, program):
    at_first = program in (another_number_of_classes, experts_moved_after_wrapping, cells_of_other_shapes)
    with pytest.raises(ValueError if at_first else RuntimeError) as caught:
        program(ctx.device, ctx.rank)
    first, *seen, hint = str(caught.value).splitlines()
    assert "its units are not the same" in first if at_first else "a mixture of their values" in first
    assert [line[:9] for line in seen] == ["  rank 0:", "  rank 1:"]
    for text in PROGRAMS[program]:
        assert any(part in line for part in text.split("|") for line in seen), (text, seen)
    assert hint.startswith("  try: ")


@pytest.mark.sim
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_simulated_ranks_that_do_not_agree_are_told(program):
    with pytest.raises(sim.CollectiveMismatch) as caught:
        sim.run(lambda: program(torch.device("cpu"), dist.get_rank()), world_size=2)
    if program is cells_of_other_shapes:  # whose gathers differ in size, too
        return
    for text in PROGRAMS[program]:
        assert any(part in str(caught.value) for part in text.split("|")), text


# -- programs that mean what they do -----------------------------------------------------------------------------------


@pytest.mark.tier("test")
@sim.ranks(2)
def test_wrappers_of_some_ranks_are_no_difference(ctx):
    model = Experts().to(ctx.device)
    if ctx.rank == 0:
        model.experts[0] = checkpoint_wrapper(model.experts[0])
        model.experts[1] = torch.compile(model.experts[1], backend="eager")
    wrapped(model, *model.experts)
    for _ in range(2):
        model(rows(ctx.device), (0, 1)).sum().backward()
        clip_grad_norm_(model, 1.0)


@sim.ranks(2)
def test_names_that_are_meant_to_differ(ctx):
    def adapted():
        model = nn.Sequential(nn.Linear(6, 6)).to(ctx.device)
        model[0].add_module("adapter" if ctx.rank else "lora", nn.Linear(6, 6).to(ctx.device))
        model[0].forward = lambda x: x @ model[0].weight
        return fully_shard(model)

    if not get_platform().compares_collectives:
        with pytest.raises(ValueError, match=r"names=False"):
            adapted()(rows(ctx.device))
    model = adapted()
    model.set_check_identity(True, names=False)
    for _ in range(2):
        model(rows(ctx.device)).sum().backward()
        clip_grad_norm_(model, 1.0)


@pytest.mark.tier("test")
@sim.ranks(4)
def test_stages_replicas_and_a_rank_alone_are_no_difference(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    own = nn.Sequential(*(nn.Linear(6, 6) for _ in range(1 + stage))).to(ctx.device)
    for layer in own:
        fully_shard(layer, mesh=mesh["dp"])
    both = fully_shard(nn.Linear(6, 6).to(ctx.device), mesh=mesh)
    for _ in range(2):
        model = nn.Sequential(own, both)
        model(rows(ctx.device)).sum().backward()
        clip_grad_norm_(model, 1.0)
    both.unshard()
    if ctx.rank == 0:
        with torch.no_grad():
            both(rows(ctx.device))
    both.reshard()
    both(rows(ctx.device)).sum().backward()


@sim.ranks(2)
def test_parameters_that_a_rank_does_not_use_are_no_difference(ctx):
    model = Branches().to(ctx.device)
    wrapped(model)  # one unit
    for turn in range(4):
        model.set_requires_gradient_sync(turn % 2 == 1)
        model(rows(ctx.device))[ctx.rank].sum().backward()
    clip_grad_norm_(model, 1.0)


@sim.ranks(2)
def test_a_forward_that_raises_on_one_rank_does_not_wait_for_the_others(ctx):
    class Failing(nn.Linear):
        def forward(self, x, failing=False):
            if failing:
                raise ZeroDivisionError
            return super().forward(x)

    model = fully_shard(Failing(6, 6).to(ctx.device))
    model(rows(ctx.device)).sum().backward()
    if ctx.rank == 0:
        with pytest.raises(ZeroDivisionError):
            model(rows(ctx.device), failing=True)
    else:  # gathers with it, and has nothing to compare
        model.unshard()
    dist.barrier()


@sim.ranks(2, backends=("gloo",))
def test_the_host_of_a_device_reads_the_result_where_clipping_ends(ctx):
    with mock.patch.object(CpuPlatform, "has_streams", True):
        models = [experts(ctx.device), experts(ctx.device)]
        for model in models:
            model(rows(ctx.device), (0,)).sum().backward()
        with torch.no_grad():
            models[ctx.rank](rows(ctx.device), (0,))
        with pytest.raises(RuntimeError, match=r"a mixture of their values\n  rank 0: gather of head"):
            clip_grad_norm_(models[0], 1.0)


@sim.ranks(2, backends=PROCESSES)
def test_what_comparing_costs(ctx):
    model = experts(ctx.device)
    sent = []

    def counted(tensor, **options):
        sent.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, **options)

    all_reduce = dist.all_reduce
    with mock.patch.object(comm.dist, "all_reduce", counted):
        costs = []
        for turn in range(5):
            model.set_check_identity((True, True, 2, 2, False)[turn])
            for micro_batch in range(2):
                model.set_requires_gradient_sync(micro_batch == 1)
                model(rows(ctx.device), (0, 1)).sum().backward()
            costs.append(sent)
            sent = []
        assert costs == [[16, 16], [16], [], [16], []]
        clip_grad_norm_(model, 1.0)
        assert sent == [4 + 2 * 4 * comm.BITS]


@sim.ranks(2)
def test_comparing_is_refused_in_four_parts(ctx):
    model = experts(ctx.device)
    for wrong in ({"check_identity": 0}, {"check_identity": "names"}, {"names": None}):
        with pytest.raises(ValueError, match=r"(?s)cannot choose when ranks compare.*try: set_check_identity\(10\)"):
            model.set_check_identity(**wrong)
