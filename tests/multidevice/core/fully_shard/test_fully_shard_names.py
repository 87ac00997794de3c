"""A project written for FSDP2, with fully_shard imported from here: its names, and what asks for FSDPModule.

Compared with one device, and with FSDP2 where that can run.
"""

from __future__ import annotations

import copy
import inspect
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp, pipelining
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel import (
    DataParallelMeshDims,
    HSDPCell,
    HSDPModule,
    fully_shard,
    hsdp,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from hyper_parallel.core.fully_shard import module as methods
from hyper_parallel.core.fully_shard.module import ManagedModule
from hyper_parallel.core.fully_shard.unit import unit_of

# -- what a wrapped module is --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [HSDPModule, HSDPCell])
def test_every_method_of_torchs_class_is_ours(ours):
    names = {name for name, value in vars(FSDPModule).items() if inspect.isroutine(value)}
    assert len(names) > 20
    for name in sorted(names):
        assert inspect.getattr_static(ours, name) is not vars(FSDPModule)[name], f"nobody has decided about {name}"


def test_the_table_in_the_docs_has_every_method():
    text = (Path(__file__).parents[4] / "docs" / "fully_shard.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", text.split("| method | here |")[1].split("\n\n")[0], re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert {name for name, value in vars(FSDPModule).items() if inspect.isroutine(value)} <= listed


def test_every_keyword_of_torchs_methods_is_ours():
    for name, theirs in vars(FSDPModule).items():
        if name.startswith("_") or not callable(theirs):
            continue
        ours = inspect.signature(getattr(ManagedModule, name)).parameters
        for keyword, parameter in inspect.signature(theirs).parameters.items():
            assert keyword in ours, (name, keyword)
            assert ours[keyword].kind in (parameter.kind, inspect.Parameter.POSITIONAL_OR_KEYWORD), (name, keyword)
            assert parameter.default is parameter.empty or ours[keyword].default == parameter.default, (name, keyword)


def test_every_argument_of_torchs_fully_shard_is_ours():
    ours = inspect.signature(fully_shard).parameters
    for keyword, parameter in inspect.signature(fsdp.fully_shard).parameters.items():
        assert keyword in ours, keyword
        assert ours[keyword].kind is parameter.kind, keyword


@sim.ranks(2, backends=("sim",))
def test_what_asks_for_the_class_finds_it(ctx):
    for model in (
        fully_shard(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))),
        hsdp(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)), threshold=0),
    ):
        assert isinstance(model, FSDPModule)
        assert fsdp.fully_shard.state(model) is fully_shard.state(model) is model._get_fsdp_state() is not None
        part = model[:2]
        assert type(part) is nn.Sequential  # no class of a unit without one
        assert [type(child) for child in part] == [nn.Linear, nn.Tanh]
        assert fully_shard.state(part) is None
    assert fully_shard.state(nn.Linear(1, 1)) is None


@sim.ranks(2, backends=("sim",))
def test_torchs_policies(ctx):
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64, cast_forward_inputs=False)
    model = fully_shard(nn.Linear(2, 2), mp_policy=policy, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
    output = model(torch.ones(1, 2, dtype=torch.bfloat16))
    assert output.dtype == torch.float64
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(1, 2))  # inputs are not cast
    output.sum().backward()
    assert model.weight.grad.device.type == "cpu"
    for offload in (fsdp.OffloadPolicy(), None):
        fully_shard(nn.Linear(1, 1), mp_policy=fsdp.MixedPrecisionPolicy(), offload_policy=offload)


# -- torch's own tools ---------------------------------------------------------------------------------------------


def parts(count):
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())) for _ in range(count)
    )


SCHEDULES = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def stages_of(kind, name, ranks, rank):
    if issubclass(kind, PipelineScheduleSingle):
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if name in ("ZBVZeroBubble", "DualPipeV") else [rank, rank + ranks]


def pipeline_step(ctx, name, wrap, steps=2, **options):
    """Gradients of the own stages, after each of a few steps of one of torch's schedules."""
    kind = pipelining.schedules.get_schedule_class(name)
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("pp", "dp"))
    ranks, rank, data_rank = 2, mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    held = stages_of(kind, name, ranks, rank)
    model = parts(ranks * len(held))
    whole = copy.deepcopy(model)
    for index in held:
        wrap(model[index][1], mesh=mesh["dp"], **options)
        wrap(model[index], mesh=mesh["dp"], **options)
    stages = [pipelining.PipelineStage(model[i], i, len(model), ctx.device, group=mesh.get_group("pp")) for i in held]
    single = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, n_microbatches=4, loss_fn=F.mse_loss)
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        x, y = torch.randn(16, 6, generator=generator), torch.randn(16, 6, generator=generator)
        for part in model:
            part.zero_grad()
        mine = slice(8 * data_rank, 8 * data_rank + 8)
        inputs = (x[mine],) if 0 in held else ()
        schedule.step(*inputs, **({"target": y[mine]} if len(model) - 1 in held else {}))
        whole.zero_grad()
        F.mse_loss(nn.Sequential(*whole)(x), y).backward()
        for index in held:
            for param, alone in zip(model[index].parameters(), whole[index].parameters(), strict=True):
                assert param.grad is not None, "a gradient is missing"
                torch.testing.assert_close(param.grad.full_tensor(), alone.grad)
                found.append(param.grad.full_tensor())
    return found


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
@sim.ranks(4, backends=("sim",))
def test_torchs_pipelines(ctx, name, keep):
    options = {"reshard_after_forward": False} if keep else {}
    ours = pipeline_step(ctx, name, fully_shard, steps=1 + keep, **options)
    if keep:  # else FSDP2 finds no weights where backwards are split
        for own, theirs in zip(ours, pipeline_step(ctx, name, fsdp.fully_shard, **options), strict=True):
            if name not in ("InterleavedZeroBubble", "ZBVZeroBubble"):  # these add micro-batches up in another order
                assert torch.equal(own, theirs)
            torch.testing.assert_close(own, theirs)


@sim.ranks(1, backends=("sim",))
def test_torchs_memory_tracker(ctx):
    def peak(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64))
        wrap(model[1])
        wrap(model)
        optimizer = torch.optim.Adam(model.parameters())
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
        model(torch.ones(8, 64)).sum().backward()  # the engine's own hooks are back
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    ours, theirs = peak(fully_shard), peak(fsdp.fully_shard)
    share = 0.01 if torch.__version__ >= "2.13" else 0.2  # torch 2.11 counts what it sees otherwise
    assert abs(ours - theirs) < share * theirs


# -- FSDP2's methods -----------------------------------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3))


def wrap_net(wrap, **options):
    model = net()
    wrap(model[1], **options)
    return wrap(model, **options)


def rows(rank, seed=0):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * seed + rank))


def step(model, rank, seed=0):
    model(rows(rank, seed)).square().mean().backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)


@pytest.mark.tier("test")
@sim.ranks(2, backends=("sim",))
def test_the_same_hook_and_the_same_collectives(ctx):
    """A hook and collectives of one's own, as for FSDP2: seen as often, on as much, with the same gradients."""

    def run(wrap, kind):
        seen = []

        class Gather(AllGather):
            def allocate(self, size, *, dtype, device):
                return torch.empty(*size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, async_op=False):
                seen.append(("gather", output_tensor.numel(), input_tensor.numel()))
                return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

        class Scatter(ReduceScatter):
            allocate = Gather.allocate

            def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
                seen.append(("scatter", output_tensor.dtype))
                return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)

        def double(reduced):
            seen.append(("hook", reduced.numel()))
            reduced.mul_(2)

        model = wrap_net(wrap)
        for unit in (model, model[1]):
            if kind == "hook":
                unit.set_all_reduce_hook(double)
            else:
                unit.set_custom_all_gather(Gather())
                unit.set_custom_reduce_scatter(Scatter())
        return step(model, ctx.rank), seen

    plain = step(wrap_net(fully_shard), ctx.rank)
    for kind, factor in (("hook", 2), ("collectives", 1)):
        (ours, seen), (theirs, expected) = run(fully_shard, kind), run(fsdp.fully_shard, kind)
        assert_equal(ours, theirs)
        assert_equal(ours, [grad * factor for grad in plain])
        assert sorted(map(str, seen)) == sorted(map(str, expected)), kind


@pytest.mark.tier("test")
@sim.ranks(4, backends=("sim",))
def test_a_collective_of_ones_own_in_a_smaller_world_and_a_hook_after_the_all_reduce(ctx):
    class Gather(AllGather):
        sizes = ()

        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            self.sizes = (*self.sizes, group.size())
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    gather, sums = Gather(), []
    model = wrap_net(fully_shard, reshard_after_forward=2)
    model[1].set_custom_all_gather(gather)
    assert_equal(step(model, ctx.rank), step(wrap_net(fully_shard), ctx.rank))
    assert gather.sizes == (4, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = wrap_net(fully_shard, mesh=mesh)
    model.set_all_reduce_hook(lambda reduced: sums.append(reduced.clone()))
    step(model, ctx.rank)
    dist.all_reduce(others := sums[0].clone(), group=mesh.get_group("replicate"))
    torch.testing.assert_close(others, 2 * sums[0])  # replicas see the same


SETTERS = {
    "set_gradient_scaling_factor": (torch.tensor(0.25), None),
    "set_reduce_op_type": ("sum", None),
    "set_gradient_divide_factor": (1.0, None),
    "set_reduce_scatter_divide_factor": (1.0, None),
    "set_all_reduce_hook": (torch.Tensor.zero_, None),
    "set_custom_all_gather": (collectives.DefaultAllGather(), None),
    "set_custom_reduce_scatter": (collectives.DefaultReduceScatter(), None),
    "set_modules_to_forward_prefetch": ([], None),
    "set_modules_to_backward_prefetch": ([], None),
    "set_post_optim_event": (object(), None),
    "set_reshard_after_forward": (False, None),
    "set_reshard_after_backward": (False, True),
    "set_unshard_in_backward": (False, True),
    "set_reduce_scatter_unused_params": (True, False),
    "set_requires_gradient_sync": (False, True),
    "set_requires_all_reduce": (False, True),
    "set_is_last_backward": (False, True),
    "set_check_identity": (False, True),
}
WITHOUT_EFFECT_ON_HOSTS = {
    "set_allocate_memory_from_process_group_for_comm": (True, False),
    "set_symm_mem_for_comm": ("NCCL", None),
}
WITHOUT_EFFECT = {
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
}


def test_each_setter_that_has_an_effect_is_known():
    found = {name for name in dir(HSDPModule) if name.startswith("set_")}
    assert found == SETTERS.keys() | WITHOUT_EFFECT_ON_HOSTS.keys() | WITHOUT_EFFECT


def what_setters_set(unit):
    options = copy.copy(unit.options)
    own = unit.forward_prefetch, unit.backward_prefetch, unit.wait_for, unit.post_forward_mesh, unit.is_last_backward
    return options, own, unit.identity, [bucket.all_gather_with for bucket in unit.buckets]


@pytest.mark.parametrize("name", SETTERS | WITHOUT_EFFECT_ON_HOSTS)
@sim.ranks(4, backends=("sim",))
def test_setters_can_be_unset(ctx, name):
    model = fully_shard(nn.Linear(4, 4), reshard_after_forward=2)
    unit = unit_of(model)
    before = what_setters_set(unit)
    value, default = (SETTERS | WITHOUT_EFFECT_ON_HOSTS)[name]
    getattr(model, name)(value)
    assert (what_setters_set(unit) != before) == (name in SETTERS)
    twin = copy.deepcopy(model)
    for module in (model, twin) if name != "set_post_optim_event" else (model,):
        getattr(module, name)(default)
        assert what_setters_set(unit_of(module)) == before


@sim.ranks(2, backends=("sim",))
def test_setters_of_cells_can_be_unset(ctx):
    cell = hsdp(nn.Linear(4, 4), grad_scale=0.5)
    unit = unit_of(cell)
    cell.set_gradient_scaling_factor(2.0)
    cell.set_gradient_scaling_factor(None)
    assert unit.options.gradient_scale == 0.5
    for way in ("forward", "backward"):
        getattr(cell, f"set_{way}_prefetch_cells")([])
        getattr(cell, f"set_{way}_prefetch_cells")(None)
        assert getattr(unit, f"{way}_prefetch") is None


@sim.ranks(2, backends=("sim",))
def test_no_gather_in_backward(ctx):
    """Of a unit whose backward needs no parameters; with activation checkpointing it is gathered all the same."""

    class Embeds(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.embed, self.head, self.again = nn.Embedding(7, 6), nn.Linear(6, 2), again

        def forward(self, x):
            y = checkpoint(self.embed, x, use_reentrant=False) if self.again else self.embed(x)
            return self.head(y * y)

    def run(needed, again):
        torch.manual_seed(0)
        model = Embeds(again)
        fully_shard(model.embed)
        fully_shard(model)
        gathers = []
        model.embed.set_custom_all_gather(Counting(gathers))
        model.embed.set_unshard_in_backward(needed)
        for _ in range(2):
            model.zero_grad()
            model(torch.tensor([ctx.rank, 3])).sum().backward()
        return [param.grad.full_tensor() for param in model.parameters()], len(gathers)

    (plain, twice), (ours, once), (again, recomputed) = run(True, False), run(False, False), run(False, True)
    assert_equal(ours, plain)
    assert_equal(again, plain)
    assert (twice, once, recomputed) == (4, 2, 4)


class Counting(AllGather):
    def __init__(self, calls):
        self.calls = calls

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls.append(group.size())
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@pytest.mark.parametrize("whole", [False, True])
@sim.ranks(2, backends=("sim",))
def test_zeros_for_parameters_that_no_rank_uses(ctx, whole):
    known = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # not in torch 2.11
    for wrap in (fully_shard, fsdp.fully_shard)[: 1 + (known and not whole)]:
        model = net()
        model[2].unused = nn.Parameter(torch.ones(4, 3))
        options = {"replicate_params": [model[2].unused]} if whole else {}
        wrap(model[2], **options)
        wrap(model)
        model(rows(ctx.rank)).sum().backward()
        assert model[2].unused.grad is None
        model.set_reduce_scatter_unused_params(True, recurse=False)
        model(rows(ctx.rank)).sum().backward()
        assert model[2].unused.grad is None
        model.set_reduce_scatter_unused_params(True)
        model(rows(ctx.rank)).sum().backward()
        assert torch.equal(model[2].unused.grad.full_tensor(), torch.zeros(4, 3))
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"reduce_scatter_unused_params is an int, not a bool\n.*: 1\n  try: .*True"):
        model.set_reduce_scatter_unused_params(1)


def gradients_with(wrap, method, *arguments):
    """Those of a step whose units communicate as a method says."""
    model = wrap_net(wrap)
    for unit in (model, model[1]) if method else ():
        for argument in arguments:
            getattr(unit, method)(argument)
    return step(model, dist.get_rank())


@pytest.mark.tier("test")
@pytest.mark.sim
def test_memory_of_the_group_is_used_as_fsdp2_does(monkeypatch):
    """By torch's own classes, where the backend allocates tensors, which those of the CPU do not."""
    used, method = [], "set_allocate_memory_from_process_group_for_comm"

    def allocate(self, size, *, dtype, device):
        name = type(self).__name__
        numel = size[0] if "Gather" in name else None  # ours reduces flags as well
        used.append((dist.get_rank(), name, self._group.size(), numel, dtype))
        return torch.empty(*size, dtype=dtype, device=device)

    def run(wrap, *enable):
        used.clear()
        found = sim.run(gradients_with, 4, (wrap, method, *enable))
        return found, sorted(map(str, [each for each in used if each[3]])), {each for each in used if not each[3]}

    monkeypatch.setattr(collectives.ProcessGroupAllocMixin, "allocate", allocate)
    plain, *unused = run(fully_shard, True)
    assert unused == [[], set()]
    monkeypatch.setattr(torch._C._distributed_c10d.Backend, "supports_tensor_alloc", lambda backend, device: True)
    (ours, *seen), (theirs, *expected) = run(fully_shard, False, True), run(fsdp.fully_shard, False, True)
    for each, their, one in zip(ours, theirs, plain, strict=True):
        assert_equal(each, one)
        assert_equal(each, their)
    assert seen == expected
    assert all(seen)
    assert run(fully_shard, True, False)[1:] == ([], set())


@pytest.mark.sim
def test_symmetric_memory_is_used_as_fsdp2_does(monkeypatch):
    """Where it is to be had: what torch does with it is left out here."""
    used = []

    def rendezvous(tensor, group):
        used.append((dist.get_rank(), tensor.numel(), tensor.dtype, tensor.storage_offset()))

    monkeypatch.setattr(methods, "SYMMETRIC", ("cpu",))
    for name in ("set_backend", "get_mem_pool"):
        monkeypatch.setattr(collectives.symm_mem, name, lambda given: given)
    monkeypatch.setattr(collectives.symm_mem, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext())
    found = []
    for wrap in (fully_shard, fsdp.fully_shard):
        used.clear()
        found.append((sim.run(gradients_with, 4, (wrap, "set_symm_mem_for_comm", "NCCL")), sorted(map(str, used))))
    (ours, seen), (theirs, expected) = found
    for each, their in zip(ours, theirs, strict=True):
        assert_equal(each, their)
    assert seen == expected != []


@sim.ranks(2, backends=("sim",))
def test_what_has_no_effect_is_accepted(ctx):
    model = wrap_net(fully_shard)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_symm_mem_for_comm("NCCL")
    model._set_unshard_async_op(True)
    model.set_reduce_scatter_divide_factor(2.0)
    share_comm_ctx([model, model[1]])
    with pytest.raises(ValueError, match="was never wrapped"):
        share_comm_ctx([nn.Linear(1, 1)])
    model[1].set_gradient_divide_factor(2.0)
    assert_equal(step(model, ctx.rank), step(wrap_net(fully_shard), ctx.rank))


@sim.ranks(2, backends=("sim",))
def test_an_event_after_the_optimizer(ctx):
    waits = []

    class Stream:
        def wait_event(self, event):
            waits.append(event)

    model = wrap_net(fully_shard)
    step(model, ctx.rank)
    unit_of(model).platform = type("Platform", (), {"current_stream": staticmethod(Stream)})
    model.set_post_optim_event("event")
    with torch.no_grad():
        model(rows(0))
        model(rows(0))
    assert waits == ["event"]  # once


@sim.ranks(2, backends=("sim",))
def test_a_failed_step_is_forgotten(ctx):
    model = wrap_net(fully_shard)
    model.set_requires_gradient_sync(False)
    model(rows(ctx.rank, 1)).sum().backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match="is a Sequential"):
        model[1].reset_iter_state()
    model.reset_iter_state()
    assert_equal(step(model, ctx.rank), step(wrap_net(fully_shard), ctx.rank))


@sim.ranks(2, backends=("sim",))
def test_a_forward_method_by_torchs_name(ctx):
    plain = nn.Linear(1, 1)
    register_fsdp_forward_method(plain, "extra_repr")
    assert "extra_repr" not in vars(plain)
    model = fully_shard(nn.Linear(2, 2))
    model.twice = lambda x: nn.functional.linear(x, model.weight) * 2
    register_fsdp_forward_method(model, "twice")
    model.twice(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((2, 2), 2.0))


# -- the axes of an SPMD mesh --------------------------------------------------------------------------------------


def spmd(mesh):
    """All parameters are DTensors on the whole mesh, the weights split over its last axis."""
    model = net()
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            split = Shard(0) if param.dim() == 2 and param.shape[0] % 2 == 0 else Replicate()
            placements = [Replicate()] * (mesh.ndim - 1) + [split]
            module.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    return model


@pytest.mark.tier("test", each=2)
@pytest.mark.parametrize(
    ("shape", "names", "dims"),
    [
        ((2, 2), ("dp", "tp"), {"shard": "dp"}),
        ((2, 2, 1), ("r", "s", "tp"), {"shard": "s", "replicate": "r"}),
        ((2, 2, 1), ("r", "s", "tp"), {"shard": "r", "replicate": "s"}),
        ((2, 2, 1), ("a", "b", "tp"), {"shard": ("a", "b")}),
        ((2, 2), ("dp", "tp"), {"replicate": "dp"}),
    ],
)
@sim.ranks(4, backends=("sim",))
def test_the_axes_of_an_spmd_mesh(ctx, shape, names, dims):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    x = torch.cat([rows(rank) for rank in range(4)])
    alone = net()
    alone(x).square().mean().backward()
    known = "dp_mesh_dims" in inspect.signature(fsdp.fully_shard).parameters  # not by torch 2.11
    for wrap in (fully_shard, fsdp.fully_shard)[: 1 + known]:
        model = spmd(mesh)
        options = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(**dims)}
        wrap(model[1], **options)
        wrap(model, **options)
        assert any(p.is_shard() for p in model[2].bias.placements) is ("shard" in dims)
        given = distribute_tensor(x, mesh, [Shard(0)] * (mesh.ndim - 1) + [Replicate()])
        model(given).square().mean().backward()
        for param, other in zip(model.parameters(), alone.parameters(), strict=True):
            # the loss is that of all rows already: its gradients add up, and FSDP2 takes their mean
            torch.testing.assert_close(ctx.world_size // shape[-1] * param.grad.full_tensor(), other.grad)


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("dims", "factor"),
    [
        ({"shard": "b", "replicate": "a"}, None),
        ({"shard": ("a", "b")}, None),
        ({"replicate": ("a", "b")}, None),
        ({"shard": ("a", "b")}, 8.0),
    ],
)
@sim.ranks(4, backends=("sim",))
def test_gradients_that_count_as_copies_are_averaged(ctx, dims, factor):
    """Each rank computes on its own rows, which it calls the same on all, as FSDP2's own tests do."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    alone = net()
    losses = [alone(rows(rank)).square().mean() for rank in range(4)]
    (torch.stack(losses).mean() * (4 / (factor or 4))).backward()
    known = "dp_mesh_dims" in inspect.signature(fsdp.fully_shard).parameters  # not by torch 2.11
    for wrap in (fully_shard, fsdp.fully_shard)[: 1 + known]:
        model = distribute_module(net(), mesh)
        wrap(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        own = DTensor.from_local(rows(ctx.rank), mesh, [Replicate()] * 2, run_check=False)
        model(own).square().mean().backward()
        for param, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad)


@sim.ranks(2, backends=("sim",))
def test_a_mean_of_gradients_that_are_the_same_on_all_ranks(ctx):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    alone = net()
    alone(rows(0)).square().mean().backward()
    model = fully_shard(distribute_module(net(), mesh))
    model.set_reduce_op_type("avg")
    model(distribute_tensor(rows(0), mesh, [Replicate()])).square().mean().backward()
    assert_equal([p.grad.full_tensor() for p in model.parameters()], [p.grad for p in alone.parameters()])


@sim.ranks(2, backends=("sim",))
def test_axes_that_are_not_there(ctx):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for wrong, options in {
        "dp_mesh_dims names axes of mesh": {"mesh": None, "dp_mesh_dims": DataParallelMeshDims(shard="dp")},
        "no axis 'fsdp'": {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="fsdp")},
        "each axis once": {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp", replicate="dp")},
    }.items():
        with pytest.raises(ValueError, match=f"{wrong}(.|\n)*  try: "):
            fully_shard(net(), **options)


# -- copies --------------------------------------------------------------------------------------------------------

COPIED = {
    "fully_shard": lambda: wrap_net(fully_shard),
    "fused": lambda: wrap_net(fully_shard, comm_fusion=True, reshard_after_forward=1),
    "offloaded": lambda: wrap_net(fully_shard, offload_policy=fsdp.CPUOffloadPolicy()),
    "level2": lambda: wrap_net(lambda m: hsdp(m, threshold=0, optimizer_level="level2", comm_fusion=True)),
    "a list": lambda: two_in_one(fully_shard),
}


def two_in_one(wrap):
    model = net()
    wrap([model[0], model[1]])
    return wrap(model)


@pytest.mark.parametrize("how", COPIED)
@sim.ranks(2, backends=("sim",))
def test_a_copy_has_values_and_units_of_its_own(ctx, how):
    model = COPIED[how]()
    model[1][0].weight.no_decay = True
    step(model, ctx.rank)
    twin = copy.deepcopy(nn.ModuleDict({"inside": model}))["inside"]
    assert type(twin) is type(model)
    assert twin is not model
    assert twin[1][0].weight.no_decay
    assert all(param.grad is None for param in twin.parameters())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    wanted = step(COPIED[how](), ctx.rank, 1)
    assert_equal(step(twin, ctx.rank, 1), wanted)
    assert_equal([model(rows(0)).detach()], [torch.zeros(4, 3)])
    assert len(twin._forward_pre_hooks) == len(model._forward_pre_hooks) == 1
    assert fully_shard.state(twin) is not fully_shard.state(model)
    twin.load_state_dict(COPIED[how]().state_dict())
    assert_equal([p.full_tensor() for p in twin.parameters()], list(net().parameters()))


@pytest.mark.tier("test")
@sim.ranks(4, backends=("sim",))
def test_a_copy_of_what_is_on_two_meshes(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make():
        model = net()
        plan = {"0": ColwiseParallel(), "1.0": RowwiseParallel()}
        return fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])

    model = make()
    twin = copy.deepcopy(model)
    assert [p.placements for p in twin.parameters()] == [p.placements for p in model.parameters()]
    assert_equal(step(twin, mesh.get_local_rank("dp")), step(model, mesh.get_local_rank("dp")))


@sim.ranks(2, backends=("sim",))
def test_a_copy_of_a_forward_method_and_of_prefetching(ctx):
    class Two(nn.Linear):
        def twice(self, x):
            return self(x) * 2

    model = nn.Sequential(fully_shard(Two(2, 2)), fully_shard(Two(2, 2)))
    fully_shard(model)
    register_fsdp_forward_method(model[0], "twice")
    model[0].set_modules_to_forward_prefetch([model[1]])
    twin = copy.deepcopy(model)
    twin[0].twice(torch.ones(1, 2)).sum().backward()
    assert twin[0].weight.grad is not None
    assert model[0].weight.grad is None
    assert unit_of(twin[0]).forward_prefetch == [unit_of(twin[1])]


@sim.ranks(2, backends=("sim",))
def test_what_cannot_be_copied_says_so(ctx):
    with pytest.raises(ValueError, match="its unit has modules outside of it"):
        copy.deepcopy(two_in_one(fully_shard)[1])
    traced = hsdp(nn.Linear(2, 2), threshold=0, use_eager_hook=False)
    with pytest.raises(TypeError, match="cannot copy"):
        copy.deepcopy(traced)
    with pytest.raises(TypeError, match="cannot copy"):
        copy.deepcopy(fully_shard(nn.Sequential(traced, nn.Linear(2, 2))))
    with pytest.raises(TypeError, match="cannot copy or pickle"):
        copy.copy(wrap_net(fully_shard))


# -- keywords that are typed ---------------------------------------------------------------------------------------


@sim.ranks(2, backends=("sim",))
def test_keywords_of_fsdp2_and_of_the_existing_library(ctx):
    model = wrap_net(fully_shard)
    for flag in (False, True):
        model.set_requires_gradient_sync(requires_gradient_sync=flag, recurse=False)
        assert [unit_of(m).options.requires_gradient_sync for m in (model, model[1])] == [flag, not flag]
        model.set_requires_gradient_sync(requires_grad_sync=flag)
        model.set_requires_all_reduce(requires_all_reduce=flag, recurse=False)
        assert [unit_of(m).options.requires_all_reduce for m in (model, model[1])] == [flag, flag]
        model.set_reshard_after_forward(reshard_after_forward=flag, recurse=True)
        model.set_reshard_after_backward(reshard_after_backward=flag, recurse=True)
        model.set_is_last_backward(is_last_backward=flag)
    model.set_reduce_op_type(reduce_op_type="sum", recurse=True)
    assert not unit_of(model[1]).options.average
    with pytest.raises(ValueError, match="requires_gradient_sync is None, not a bool"):
        model.set_requires_gradient_sync()
    cells = hsdp(nn.Sequential(hsdp(nn.Linear(2, 2)), hsdp(nn.Linear(2, 2))))
    cells[0].set_forward_prefetch_cells(hsdp_cell_list=[cells[1]])
    cells[1].set_backward_prefetch_cells(hsdp_cell_list=[cells[0]])
    assert unit_of(cells[0]).forward_prefetch == [unit_of(cells[1])]
    assert unit_of(cells[1]).backward_prefetch == [unit_of(cells[0])]


# -- as torchtitan trains ------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for i in range(2)})
        self.norm, self.lm_head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x):
        for layer in self.layers.values():
            x = x + layer(x)
        return self.norm(x)


def chunked_loss(model, x, chunks, shares):
    """The head apart, in chunks whose gradients are reduced together; then the rest of the model."""
    hidden, head = model(x), model.lm_head
    wrapped = isinstance(head, FSDPModule)
    if wrapped:
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        head.set_requires_gradient_sync(False, recurse=False)
        head.unshard()
    parts = [part.detach().requires_grad_() for part in hidden.chunk(chunks)]
    for index, part in enumerate(parts):
        if wrapped and index == chunks - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        (head(part).square().sum() / shares).backward()
    if wrapped:
        head.set_reshard_after_forward(True)
        head.set_reshard_after_backward(True)
        head.set_requires_gradient_sync(True, recurse=False)
        head.reshard()
    hidden.backward(torch.cat([part.grad for part in parts]))


@pytest.mark.tier("test")
@pytest.mark.parametrize("together", [False, True])
@sim.ranks(2, backends=("sim", "gloo"))
def test_a_head_in_chunks_and_gradients_that_are_not_divided(ctx, together):
    model, alone = Decoder(), Decoder()
    for layer in model.layers.values():
        fully_shard(layer)
    for group in [[model.norm, model.lm_head]] if together else [model.norm, model.lm_head]:
        fully_shard(group)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    for seed in range(2):
        model.zero_grad()
        alone.zero_grad()
        chunked_loss(model, rows(ctx.rank, seed), 2, 8)
        for rank in range(2):
            chunked_loss(alone, rows(rank, seed), 2, 8)
        for (name, param), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                param.grad.full_tensor(), other.grad, msg=lambda text, name=name: f"{name}: {text}"
            )
