"""Parameters that one rank of the shard axis holds whole: trained, clipped, saved and loaded as on one device."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding_kit import tolerances
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sim
from hyper_parallel.core.checkpoint.api import load_checkpoint, read_metadata, save_checkpoint
from hyper_parallel.core.checkpoint.optimizer import model_tensors, optimizer_targets, optimizer_tensors
from hyper_parallel.core.fully_shard.api import Owner, fully_shard, get_model_state_dict, whole_parameters
from hyper_parallel.core.fully_shard.clip import clip_grad_norm_
from hyper_parallel.core.fully_shard.utils import CPUOffloadPolicy, MixedPrecisionPolicy
from hyper_parallel.core.optim.muon import Muon
from hyper_parallel.core.redistribute.api import full_tensor

pytestmark = pytest.mark.tier("test")

STEPS, LIMIT = 3, 0.05
NO_GLOO = ("sim", "gpu", "npu")  # the same communication as in others here, which processes run
MESHES = ({"dp": 4}, {"replicate": 2, "dp": 2}, {"dp": 2, "tp": 2})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(11, 6), nn.ModuleList([Block(), Block()])

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def model(device, dtype=torch.float64):
    torch.manual_seed(3)
    return Model().to(device, dtype)


def batches(device):
    return torch.randint(0, 11, (STEPS, 4, 5), generator=torch.Generator().manual_seed(1)).to(device)


def sharded(ctx, axes, *, owners=True, module=None, **options):
    """The model with layers that have owners (an int: but for blocks of it), or are split, and a split embedding."""
    mesh = init_device_mesh(ctx.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    module = model(ctx.device, ctx.float_dtype) if module is None else module
    data = mesh[tuple(name for name in axes if name != "tp")]
    for layer in module.layers if "tp" in axes else ():
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    block = None if owners is True else owners
    placement = whole_parameters(module.layers, axes["dp"], block=block) if owners else None
    for layer in module.layers:
        fully_shard(layer, mesh=data, shard_placement_fn=placement, **options)
    fully_shard(module, mesh=data, **options)
    module.set_reduce_op_type("avg")
    return module


def adamw(module, **options):
    return torch.optim.AdamW(module.parameters(), lr=0.02, **options)


def train(module, optimizer, ids):
    norms = []
    for batch in ids:
        module(batch).square().mean().backward()
        norms.append(clip_grad_norm_(module, LIMIT))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms)


def on_one_device(device, dtype):
    module = model(device, dtype)
    norms = train(module, adamw(module), batches(device))
    return norms, {name: param.detach() for name, param in module.named_parameters()}


def values(module):
    return {
        name: full_tensor(param.detach()) if hasattr(param, "placements") else param.detach()
        for name, param in module.named_parameters()
    }


def in_float32():
    norms, params = on_one_device("cpu", torch.float32)
    return {"norms": norms, **params}


def check_norms(got, wanted):
    torch.testing.assert_close(got, wanted, **tolerances([wanted], in_float32, "norms", rtol=1e-7, atol=1e-7))


def check_equal(got, wanted):
    assert list(got) == list(wanted)
    rounding = tolerances(wanted.values(), in_float32, rtol=1e-9, atol=1e-9)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], **rounding)


@pytest.mark.tier("full")
@sim.ranks(4)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_training_and_clipping(ctx, axes):
    norms, wanted = on_one_device(ctx.device, ctx.float_dtype)
    assert (norms > LIMIT).all()  # or the clipping would have changed nothing
    for options in ({}, {"foreach": True}, {"fused": True}):
        module = sharded(ctx, axes)
        check_norms(train(module, adamw(module, **options), batches(ctx.device)), norms)
        check_equal(values(module), wanted)


def trained_in_one_launch(dtype, make):
    torch.manual_seed(5)
    module = nn.Sequential(*[make() for _ in range(2)]).to(dtype)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        fully_shard(module, mesh=mesh, shard_placement_fn=whole_parameters(module, 2))
    for number in range(STEPS):
        x = torch.arange(12.0).view(2, 6).add(number).sin().to(dtype)
        module(x).abs().square().mean().backward()
        with torch.no_grad():
            for param in module.parameters():
                if param.grad is not None:  # of an empty one there is none
                    local, grad = (getattr(t, "_local_tensor", t) for t in (param, param.grad))
                    local.sub_(grad, alpha=0.1)
        module.zero_grad()
    return list(values(module).values())


@pytest.mark.sim
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("even", [True, False])
def test_one_launch_for_all_owners_gives_the_same(even, dtype):
    make = partial(nn.Linear, 6, 6, bias=not even)  # without biases each rank owns as much as the other
    wanted = trained_in_one_launch(dtype, make)
    with sim.world(2, map_device="cuda") as world:
        for found in world.run(trained_in_one_launch, (dtype, make)):
            torch.testing.assert_close(found, wanted)
    assert {event.op for event in world.trace.of_rank(0)} >= {"all_gather", "reduce_scatter"}


OPTIONS = ({"reshard_after_forward": False}, {"reshard_after_forward": 2}, {"offload_policy": CPUOffloadPolicy()})


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_GLOO)
def test_options_do_what_they_do_for_shards(ctx):
    mixed = {"mp_policy": MixedPrecisionPolicy(torch.float32, ctx.float_dtype)}
    for options in (*OPTIONS, mixed):
        if "offload_policy" in options and ctx.device_type != "cpu":
            continue  # ids would be there, and the optimizer's own state is on the host
        found = []
        for owners in (True, False):
            module = sharded(ctx, {"dp": 4}, owners=owners, **options)
            found.append((train(module, adamw(module), batches(ctx.device)), values(module)))
        (norms, got), (wanted_norms, wanted) = found
        if options is mixed and ctx.float_dtype is torch.float64:
            torch.testing.assert_close((norms, got), (wanted_norms, wanted), rtol=1e-5, atol=1e-6)
        else:
            check_norms(norms, wanted_norms)
            check_equal(got, wanted)


@sim.ranks(4, backends=NO_GLOO)
def test_made_on_meta_and_gathered_ahead(ctx):
    norms, wanted = on_one_device(ctx.device, ctx.float_dtype)
    with torch.device("meta"):
        module = Model().to(ctx.float_dtype)
    module = sharded(ctx, {"dp": 4}, module=module)
    module.to_empty(device=ctx.device)
    module.load_state_dict(model(ctx.device, ctx.float_dtype).state_dict())
    module.set_modules_to_forward_prefetch(list(module.layers))
    module.layers[1].set_modules_to_backward_prefetch([module.layers[0]])
    check_norms(train(module, adamw(module), batches(ctx.device)), norms)
    check_equal(values(module), wanted)


@sim.ranks(4, backends=NO_GLOO)
def test_who_chooses_the_owners_keeps_no_parameter(ctx):
    module = model(ctx.device).layers[0]
    placement, unsharded = whole_parameters(module, 4), [weakref.ref(param) for param in module.parameters()]
    fully_shard(module, mesh=init_device_mesh(ctx.device_type, (4,)), shard_placement_fn=placement)
    gc.collect()
    assert [reference() for reference in unsharded] == [None] * 5, placement


@sim.ranks(4, backends=NO_GLOO)
def test_a_rank_has_what_it_owns(ctx):
    module = sharded(ctx, {"dp": 4})
    module(batches(ctx.device)[0]).square().mean().backward()
    held = 0
    for layer in module.layers:
        for name, param in layer.named_parameters():
            is_here = param.device_mesh.get_coordinate() is not None
            assert (param.grad is not None) == is_here, name
            assert param.to_local().shape == (param.shape if is_here else (0,)), name
            held += param.to_local().numel()
    total = sum(param.numel() for param in module.layers.parameters())
    largest = max(param.numel() for param in module.layers.parameters())
    assert held <= total / 4 + largest, "Graham's bound"


@pytest.mark.tier("full", each=2)
@sim.ranks(4)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_checkpoint_goes_on_in_another_layout(ctx, axes, tmp_path):
    ids, (_, wanted) = batches(ctx.device), on_one_device(ctx.device, ctx.float_dtype)
    for before, after in ((True, False), (False, True), (True, True), (3, 2)):
        folder = tmp_path / f"{before} {after}"
        module = sharded(ctx, {"dp": 4}, owners=before)
        optimizer = adamw(module)
        train(module, optimizer, ids[:2])
        state, groups = optimizer_tensors(module, optimizer)
        save_checkpoint(folder, {**model_tensors(module), **state}, {"optimizer": groups})
        other = sharded(ctx, axes, owners=after)
        its = adamw(other)
        targets = optimizer_targets(other, its, read_metadata(folder))
        load_checkpoint(folder, {**model_tensors(other), **targets})
        train(other, its, ids[2:])
        check_equal(values(other), wanted)


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_GLOO)
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_torchs_own_goes_on_in_another_layout(ctx, tmp_path):
    ids, (_, wanted) = batches(ctx.device), on_one_device(ctx.device, ctx.float_dtype)
    module = sharded(ctx, {"dp": 4})
    optimizer = adamw(module)
    train(module, optimizer, ids[:2])
    names = "model", "optimizer"
    dcp.save(dict(zip(names, get_state_dict(module, optimizer), strict=True)), checkpoint_id=tmp_path)
    for axes, owners in (({"dp": 2, "tp": 2}, True), ({"dp": 4}, False)):
        other = sharded(ctx, axes, owners=owners)
        its = adamw(other)
        state = dict(zip(names, get_state_dict(other, its), strict=True))
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train(other, its, ids[2:])
        check_equal(values(other), wanted)


@sim.ranks(4, backends=NO_GLOO)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by_torch", [False, True])
def test_a_run_goes_on_from_a_run_that_went_on(ctx, by_torch, tmp_path):
    """What is loaded is on all ranks, but owners alone count steps: the next checkpoint has their numbers."""
    ids, (_, wanted) = batches(ctx.device), on_one_device(ctx.device, ctx.float_dtype)
    names = "model", "optimizer"
    for step in range(STEPS):
        module = sharded(ctx, {"dp": 4})
        optimizer, before, after = adamw(module), tmp_path / str(step), tmp_path / str(step + 1)
        if step > 0 and by_torch:
            state = dict(zip(names, get_state_dict(module, optimizer), strict=True))
            dcp.load(state, checkpoint_id=before)
            set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        elif step > 0:
            targets = optimizer_targets(module, optimizer, read_metadata(before))
            load_checkpoint(before, {**model_tensors(module), **targets})
        train(module, optimizer, ids[step : step + 1])
        if by_torch:
            dcp.save(dict(zip(names, get_state_dict(module, optimizer), strict=True)), checkpoint_id=after)
        else:
            save_checkpoint(after, {**model_tensors(module), **optimizer_tensors(module, optimizer)[0]})
    check_equal(values(module), wanted)


@sim.ranks(4, backends=NO_GLOO)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_state_dicts(ctx, axes):
    wanted = {name: value + 1 for name, value in model(ctx.device, ctx.float_dtype).state_dict().items()}
    module = sharded(ctx, axes)
    split = sharded(ctx, {"dp": 4}, owners=False)
    full = StateDictOptions(full_state_dict=True)
    module.load_state_dict(wanted)  # full tensors, which every rank has
    check_equal(get_model_state_dict(module, options=full), wanted)
    split.load_state_dict(module.state_dict())  # from owners to shards
    check_equal(get_model_state_dict(split, options=full), wanted)
    module = sharded(ctx, axes)
    module.load_state_dict(split.state_dict())  # and back
    check_equal(get_model_state_dict(module, options=full), wanted)


@sim.ranks(4, backends=NO_GLOO)
def test_parameters_that_are_kept_after_backward(ctx):
    """They are gathered anew after a step, on all ranks, although most of them have seen no parameter change."""
    norms, wanted = on_one_device(ctx.device, ctx.float_dtype)
    module = sharded(ctx, {"dp": 4})
    module.set_reshard_after_backward(False)
    got = train(module, adamw(module), batches(ctx.device))
    check_norms(got, norms)
    check_equal(values(module), wanted)


@sim.ranks(4, backends=NO_GLOO)
@pytest.mark.parametrize("how", ["in hooks", "by hand", "of those with gradients"])
def test_parameters_that_are_kept_are_gathered_anew_where_the_owner_alone_steps(ctx, how):
    """Most ranks see no step at all, as they have no gradient; all gather all the same, or all would wait."""

    def stepped(module):
        params, ids = list(module.parameters()), batches(ctx.device)
        if how == "in hooks":
            for param in params:
                param.register_post_accumulate_grad_hook(descend)
        optimizer = None
        for batch in ids:
            module(batch).square().mean().backward()
            if how == "by hand":
                for param in params:
                    if param.grad is not None:
                        descend(param)
            elif how == "of those with gradients":
                found = [param for param in params if param.grad is not None]
                if found:  # other ranks have no optimizer at all
                    optimizer = optimizer or torch.optim.SGD(found, lr=0.05)
                    optimizer.step()
                    optimizer.zero_grad()
        return values(module)

    @torch.no_grad()
    def descend(param):
        param.sub_(param.grad, alpha=0.05)
        param.grad = None

    module, mesh = model(ctx.device, ctx.float_dtype), init_device_mesh(ctx.device_type, (4,))
    wanted = stepped(model(ctx.device, ctx.float_dtype))
    for layer in (*module.layers, module):
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda param: Owner(1))
    module.set_reshard_after_backward(False)
    got = stepped(module)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-5, atol=1e-6)


@sim.ranks(4, backends=NO_GLOO)
def test_one_rank_may_own_everything(ctx):
    _, wanted = on_one_device(ctx.device, ctx.float_dtype)
    mesh = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("dp",))
    module = model(ctx.device, ctx.float_dtype)
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda param: Owner(2))
    train(module, adamw(module), batches(ctx.device))
    check_equal(values(module), wanted)
    assert [param.to_local().numel() > 0 for param in module.parameters()] == [ctx.rank == 2] * 11


@pytest.mark.tier("full", each=2)
@sim.ranks(4)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_muon(ctx, axes):
    start, module = values(model(ctx.device, ctx.float_dtype)), model(ctx.device, ctx.float_dtype)
    # Products of one matrix and of several have kernels of their own on CUDA. Five iterations make of their rounding
    # as much as a wrong momentum does (0.06), one makes a third of that (0.004, not 0.013).
    steps, bound = (1, 0.01) if ctx.device_type == "cuda" else (5, 0.03)
    train_by_muon(module, batches(ctx.device), partial(torch.optim.Muon, ns_steps=steps), torch.optim.AdamW)
    wanted, module = values(module), sharded(ctx, axes)
    train_by_muon(module, batches(ctx.device), partial(Muon, ns_steps=steps), torch.optim.AdamW)
    for name, got in values(module).items():
        went = (wanted[name] - start[name]).norm()
        assert (got - wanted[name]).norm() <= bound * went, name  # bfloat16's rounding, which the iterations amplify


def train_by_muon(module, ids, for_matrices, for_the_rest):
    matrices = [param for name, param in module.named_parameters() if param.ndim == 2 and "embed" not in name]
    rest = [param for param in module.parameters() if all(param is not other for other in matrices)]
    optimizers = [for_matrices(matrices, lr=0.02), for_the_rest(rest, lr=0.02)]
    for batch in ids:
        module(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# -- what is sent ------------------------------------------------------------------------------------------------------


def a_step_by_muon(owners):
    module = model("cpu").layers[0]
    placement = whole_parameters(module, 4) if owners else None
    fully_shard(module, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), shard_placement_fn=placement)
    params = list(module.parameters())
    matrices = [param for param in params if param.ndim == 2]
    rest = [param for param in params if param.ndim == 1]
    optimizer = Muon([{"params": matrices}, {"params": rest, "use_muon": False}])
    module(torch.ones(2, 6, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    owned = [param.to_local().numel() for param in params]
    return sum(owned), sum(param.numel() for param in params), sum(numel > 0 for numel in owned)


@pytest.mark.sim
@pytest.mark.parametrize("device", [None, "cuda"])
def test_owners_send_and_receive_what_they_own_and_muon_sends_nothing(device):
    with sim.world(4, map_device=device) as world:
        found = world.run(a_step_by_muon, (True,))
    for rank, (own, total, flags) in enumerate(found):
        gather, reduce = ("broadcast", "reduce") if device is None else ("all_gather", "reduce_scatter")
        received, events = {gather: 0, reduce: 0}, world.trace.of_rank(rank)
        for event in events:
            received[event.op] += event.recv_bytes
        assert received == {gather: 8 * (total - own), reduce: 3 * 8 * (own + flags)}
        # The unit is gathered and reduced: once with nccl, which sends a list in one launch; else for each owner.
        assert len(events) == (8 if device is None else 2)
    assert len({own for own, _, _ in found}) > 1, "the ranks own as much as each other, which padding would not show"


@pytest.mark.sim
def test_muon_sends_something_where_matrices_are_split():
    with sim.world(4) as world:
        world.run(a_step_by_muon, (False,))
    assert len([event for event in world.trace.of_rank(0) if event.completed]) == 4  # two of them are Muon's


def generated(forwards, trained):
    module = model("cpu").layers[0]
    fully_shard(module, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=whole_parameters(module, 4))
    x = torch.ones(2, 6, dtype=torch.float64)
    if trained:
        optimizer = adamw(module)
        module(x).square().mean().backward()
        optimizer.step()
        module.zero_grad()
    module.unshard()
    with torch.no_grad():
        return [module(x) for _ in range(forwards)]


@pytest.mark.sim
@pytest.mark.parametrize("trained", [False, True])
def test_what_was_asked_for_stays_for_forwards_without_gradients(trained):
    sent = []
    for forwards in (1, 3):
        with sim.world(4) as world:
            world.run(generated, (forwards, trained))
        sent.append(len(world.trace.of_rank(0)))
    assert sent[0] == sent[1] > 0


# -- blocks that are kept together -------------------------------------------------------------------------------------


class InBlocks(torch.optim.Optimizer):
    """SGD whose momentum is kept in int8, with a scale for each block of rows and columns that a rank holds."""

    def __init__(self, params, block):
        super().__init__(params, {"block": block})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None and getattr(param, "_local_tensor", param).numel() > 0:
                local, grad = (getattr(tensor, "_local_tensor", tensor) for tensor in (param, param.grad))
                momentum = 0.9 * self.state[param].get("momentum", 0.0) + grad
                for rows in momentum.split(self.defaults["block"]):
                    for part in rows.split(self.defaults["block"], -1):
                        scale = part.abs().amax() / 127 + 1e-12
                        part.copy_((part / scale).round() * scale)
                self.state[param]["momentum"] = momentum
                local.sub_(momentum, alpha=0.1)


class Sines(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.values = nn.ParameterList([torch.randn(*shape, dtype=torch.float64) for shape in shapes])

    def forward(self):
        return sum(value.sin().sum() for value in self.values)


def trained_in_blocks(shapes, block, ranks):
    """Parameters after training, and how many elements of each are here."""
    torch.manual_seed(5)
    module = Sines(shapes)
    if ranks > 1:
        placement = whole_parameters(module, ranks, block=block)
        fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)), shard_placement_fn=placement)
    optimizer = InBlocks(module.parameters(), block)
    for _ in range(STEPS):
        module().backward()
        optimizer.step()
        module.zero_grad()
    return list(values(module).values()), [getattr(p, "_local_tensor", p).numel() for p in module.parameters()]


@pytest.mark.tier("full")
@pytest.mark.sim
@settings(max_examples=25)
@given(
    st.sampled_from([2, 4]),
    st.sampled_from([2, 3]),
    st.lists(st.lists(st.integers(1, 13), min_size=1, max_size=2), min_size=1, max_size=4),
)
def test_a_state_in_blocks_is_that_of_one_device(ranks, block, shapes):
    wanted, _ = trained_in_blocks(shapes, block, 1)
    for got, held in sim.run(trained_in_blocks, ranks, (shapes, block, ranks)):
        assert all(map(torch.equal, got, wanted))
        # Split where that keeps blocks together, else whole on one rank.
        for shape, numel in zip(shapes, held, strict=True):
            assert numel < torch.Size(shape).numel() or not any(-(-size // ranks) % block == 0 for size in shape)


def gathered_in_blocks():
    module = model("cpu").layers[0]
    placement = whole_parameters(module, 4, block=3)
    fully_shard(module, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=placement)
    with torch.no_grad():
        module(torch.ones(2, 6, dtype=torch.float64))
    return sum(param.to_local().numel() for param in module.norm.parameters())


@pytest.mark.sim
def test_blocks_are_gathered_as_shards_and_the_rest_from_owners():
    with sim.world(4) as world:
        found = world.run(gathered_in_blocks)
    for rank, own in enumerate(found):
        received = {"all_gather": 0, "broadcast": 0}
        for event in world.trace.of_rank(rank):
            received[event.op] += event.recv_bytes
        # Matrices of 10 rows and of 10 columns, and 10 biases, in shards of 3; two norms of 6 have owners.
        assert received == {"all_gather": 8 * 3 * (3 * 6 + 6 * 3 + 3), "broadcast": 8 * (12 - own)}
