"""Mistakes in calling fully_shard: the text names the blame and a way out, on every rank, before any byte."""

import inspect
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from errors_kit import assert_parts, fails_on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import sim
from hyper_parallel.core.fully_shard.api import HSDPModule, Owner, fully_shard
from hyper_parallel.core.fully_shard.clip import clip_grad_norm_
from hyper_parallel.core.fully_shard.utils import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.hsdp.api import hsdp
from hyper_parallel.core.mesh.spmd_mesh import spmd_mesh_of
from hyper_parallel.core.shard.api import ShardingPlan, shard_module
from sim.late.switch import why_not

pytestmark = pytest.mark.sim


def mesh(*shape, names=None):
    return init_device_mesh("cpu", shape or (2,), mesh_dim_names=names)


def wrapped(*sizes):
    return fully_shard(nn.Linear(*(sizes or (4, 4))), mesh=mesh())


def tied_across():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    fully_shard(a, mesh=mesh())
    fully_shard(b, mesh=mesh())


def shared_module():
    shared = nn.Linear(4, 4)
    first, second = nn.Sequential(shared), nn.Sequential(shared)
    fully_shard(first, mesh=mesh())
    fully_shard(second, mesh=mesh())


def half_on_meta():
    fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), mesh=mesh())


def one(**options):
    return fully_shard(nn.Linear(4, 4), mesh=mesh(), **options)


def with_weight(make, *, wrap_mesh=None, **options):
    """A Linear whose weight is made by `make`."""
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(make())
    return fully_shard(model, mesh=wrap_mesh, **options)


class OnlyPre(TwoTensor):
    def fsdp_pre_all_gather(self, mesh):
        raise AssertionError("nothing is gathered")


class Both(OnlyPre):
    fsdp_post_all_gather = OnlyPre.fsdp_pre_all_gather


class OtherForm(Both):
    def fsdp_pre_all_gather(self, mesh, more):
        raise AssertionError("nothing is gathered")


class Losing(Both):
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        return out.a if func is torch.ops.aten.new_zeros.default else out


def extended(kind):
    return kind(torch.ones(4, 4), torch.ones(4, 4))


def cell_with(make):
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(make())
    return hsdp(model)


def laid_out(place, *placements):
    """A weight of 4 x 4 on a mesh."""
    return distribute_tensor(torch.ones(4, 4), place, placements, src_data_rank=None)


def partial(place):
    return DTensor.from_local(torch.ones(4, 4), place, [Partial()], run_check=False)


def strided(place):
    """The placement that torch's FSDP2 gives to a weight that tensor parallelism has split along the same dim."""
    from torch.distributed.fsdp import fully_shard as fsdp2

    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(laid_out(place["tp"], Shard(0)))
    return fsdp2(model, mesh=place["dp"]).weight.detach()


def dp_tp():
    return mesh(1, 2, names=("dp", "tp"))


def after_a_backward():
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    fully_shard(model, mesh=mesh())


def with_hooks(register):
    model = nn.Linear(4, 4)
    getattr(model.weight, register)(lambda *args: None)
    fully_shard(model, mesh=mesh())


def nested_replicas():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner = [model[0].weight]
    fully_shard(model[0], mesh=mesh())
    fully_shard(model, mesh=mesh(), replicate_params=inner)


def nested_sharded_replicas():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh())
    fully_shard(model, mesh=mesh(), replicate_params=[model[0].weight])


def unknown_device():
    place = mesh()
    place._device_type = "xpu" if hasattr(place, "_device_type") else None
    fully_shard(nn.Linear(2, 2), mesh=place)


CALLS = {
    "empty": (lambda: fully_shard([]), r"fully_shard cannot wrap its argument: the list is empty"),
    "twice": (lambda: fully_shard(wrapped(), mesh=mesh()), r"it is wrapped already"),
    "twice in a list": (lambda: fully_shard((wrapped(),), mesh=mesh()), r"wrapped already"),
    "container": (lambda: fully_shard(nn.ModuleList([nn.Linear(1, 1)])), r"it has no forward of its own, before which"),
    "parameter list": (lambda: fully_shard(nn.ParameterList([torch.ones(2)])), r"it has no forward of its own, before"),
    "empty tuple": (lambda: fully_shard(()), r"fully_shard cannot wrap its argument: the list is empty"),
    "container in a list": (
        lambda: fully_shard([nn.Linear(1, 1), nn.ModuleDict()]),
        r"it has no forward of its own, before which its parameters could be gathered",
    ),
    "inside twice": (lambda: fully_shard([nn.Linear(4, 4), wrapped()], mesh=mesh()), r"it is wrapped already"),
    "reshard 0": (lambda: one(reshard_after_forward=0), r"reshard_after_forward must be at least 1\n  reshard_after_f"),
    "reshard -1": (lambda: one(reshard_after_forward=-1), r"reshard_after_forward must be at least 1"),
    "reshard 3": (
        lambda: one(reshard_after_forward=3),
        r"reshard_after_forward=3: it does not divide the shard axis\n  seen: .* of 2 ranks\n  try: one of 1, 2$",
    ),
    "reshard 4": (lambda: one(reshard_after_forward=4), r"reshard_after_forward=4: it does not divide"),
    "reshard HSDP": (
        lambda: fully_shard(nn.Linear(4, 4), mesh=mesh(2, 1), reshard_after_forward=2),
        r"reshard_after_forward=2: it does not divide the shard axis\n  seen: .* of 1 rank.*\n  try: .*1$",
    ),
    "placement int": (lambda: one(shard_placement_fn=lambda p: 1), r"shard_placement_fn returned 1\n  expected: Shard"),
    "placement class": (lambda: one(shard_placement_fn=lambda p: Shard), r"shard_placement_fn returned <class 'torch"),
    "placement Replicate": (
        lambda: one(shard_placement_fn=lambda p: Replicate()),
        r"fully_shard cannot split parameter 'weight': shard_placement_fn returned Replicate\(\)",
    ),
    "placement Partial": (lambda: one(shard_placement_fn=lambda p: Partial()), r"shard_placement_fn returned Partial"),
    "placement of one": (lambda: one(shard_placement_fn=lambda p: Shard(1)), r"shard_placement_fn returned Shard\(dim"),
    "placement dim": (lambda: one(shard_placement_fn=lambda p: Shard(2)), r"shard_placement_fn returned Shard\(dim=2"),
    "placement below": (lambda: one(shard_placement_fn=lambda p: Shard(-3)), r"shard_placement_fn returned Shard\(dim"),
    "placement owner": (
        lambda: one(shard_placement_fn=lambda p: Owner(2)),
        r"shard_placement_fn returned Owner\(rank=2\), and the shard axis has no such rank\n  seen: .* of 2 ranks\n",
    ),
    "owner and extension": (
        lambda: with_weight(lambda: extended(Both), wrap_mesh=mesh(), shard_placement_fn=lambda p: Owner(0)),
        r"shard_placement_fn returned Owner\(rank=0\)\n  seen: fsdp_pre_all_gather, of which every rank gives a sh",
    ),
    "owner and fusion": (
        lambda: one(shard_placement_fn=lambda p: Owner(1), comm_fusion=True),
        r"comm_fusion cannot take parameter 'weight': one rank holds all of it, and what is fused has shards of one s",
    ),
    "owner and all_gather": (
        lambda: one(shard_placement_fn=lambda p: Owner(1)).set_custom_all_gather(DefaultAllGather()),
        r"cannot gather parameters: one rank holds all of parameter 'weight', .*\n  seen: a DefaultAllGather\n",
    ),
    "owner and reduce_scatter": (
        lambda: one(shard_placement_fn=lambda p: Owner(1)).set_custom_reduce_scatter(DefaultReduceScatter()),
        r"cannot reduce gradients: one rank holds all of parameter 'weight', .*\n  seen: a DefaultReduceScatter\n",
    ),
    "zero copy only": (lambda: one(comm_fusion_zero_copy=True), r"comm_fusion_zero_copy=True is about fused communica"),
    "fused DTensor": (
        lambda: with_weight(lambda: laid_out(mesh(), Shard(0)), comm_fusion=True),
        r"comm_fusion cannot take parameter 'weight': it is a DTensor that keeps its layout, \(Shard\(dim=0\),\)\n",
    ),
    "fused subclass": (
        lambda: with_weight(lambda: TwoTensor(torch.ones(4, 4), torch.ones(4, 4)), wrap_mesh=mesh(), comm_fusion=True),
        r"'weight'.*: it is a tensor subclass that holds its values in other tensors\n",
    ),
    "subclass": (
        lambda: with_weight(lambda: TwoTensor(torch.ones(4, 4), torch.ones(4, 4)), wrap_mesh=mesh()),
        r"it is a tensor subclass that holds its values in other tensors\n  seen: TwoTensor, torch\.strided\n  try: a ",
    ),
    "half an extension": (
        lambda: with_weight(lambda: extended(OnlyPre), wrap_mesh=mesh()),
        r"it has fsdp_pre_all_gather alone, which needs the other one of the two\n  seen: a OnlyPre\n  try: both fsd",
    ),
    "extension of another form": (
        lambda: with_weight(lambda: extended(OtherForm), wrap_mesh=mesh()),
        r"its fsdp_pre_all_gather does not take what it is called with\n  seen: OtherForm\.fsdp_pre_all_gather\(me.*\n",
    ),
    "extension that parts lose": (
        lambda: with_weight(lambda: extended(Losing), wrap_mesh=mesh()),
        r"shards of it have lost fsdp_pre_all_gather\n  seen: a Losing, whose detach\(\), narrow\(\) or new_zeros\(\) ",
    ),
    "extension and fusion": (
        lambda: with_weight(lambda: extended(Both), wrap_mesh=mesh(), comm_fusion=True),
        r"parameter 'weight': it is gathered in its own way, .*\n  seen: .*\n  try: comm_fusion=F",
    ),
    "extension on another dim": (
        lambda: with_weight(lambda: extended(Both), wrap_mesh=mesh(), shard_placement_fn=lambda p: Shard(p.dim() - 1)),
        r"shard_placement_fn returned Shard\(dim=1\)\n  seen: fsdp_pre_all_gather, whose results fsdp_post_all_g.*\n  ",
    ),
    "extension and hsdp": (lambda: cell_with(lambda: extended(Both)), r"it is gathered in its own way, by fsdp_pre_al"),
    "sparse": (
        lambda: with_weight(lambda: torch.eye(4).to_sparse(), wrap_mesh=mesh()),
        r"fully_shard cannot manage parameter 'weight': it is sparse\n  seen: Parameter, torch\.sparse_coo",
    ),
    "replicate nested": (
        nested_replicas,
        r"cannot replicate 'weight': a unit has split it already\n  seen: shape \(4, 4",
    ),
    "replicate sharded": (nested_sharded_replicas, r"cannot replicate 'weight': a unit has split it already\n"),
    "gradient": (after_a_backward, r"it has a gradient, which would be lost\n  seen: a backward bef"),
    "hook": (lambda: with_hooks("register_hook"), r"the parameter is replaced by a sharded one"),
    "post hook": (lambda: with_hooks("register_post_accumulate_grad_hook"), r"the parameter is replaced by a sharded "),
    "partial": (
        lambda: with_weight(lambda: partial(mesh())),
        r"cannot manage parameter 'weight', a DTensor with placement P.*\n  layout: .*mesh|axis 0=2\n  try: .*redistri",
    ),
    "partial further": (
        lambda: with_weight(lambda: partial(dp_tp()["tp"]), wrap_mesh=dp_tp()["dp"]),
        r"fully_shard cannot manage parameter 'weight': it is a DTensor with placement P\(sum\)",
    ),
    "strided": (lambda: with_weight(lambda: strided(dp_tp())), r"it is a DTensor with placement _S\(0, 2\)"),
    "split already": (
        lambda: with_weight(lambda: laid_out(mesh(), Shard(0)), wrap_mesh=mesh()),
        r"cannot split parameter 'weight' .*: it is split over these ranks already\n  layout: \(Shard\(dim=0\),\)",
    ),
    "rank order": (
        lambda: fully_shard(nn.Linear(4, 4), mesh=DeviceMesh("cpu", [1, 0])),
        r"fully_shard cannot use its mesh: ranks along the shard axis have to ascend\n  mesh: axis 0=2   ranks",
    ),
    "3-D": (lambda: fully_shard(nn.Linear(1, 1), mesh=mesh(1, 2, 1)), r"1 axis .* or 2 axes .*, got 3\n.*axis 1=2"),
    "order": (
        lambda: fully_shard(nn.Linear(1, 1), mesh=mesh(2, 1, names=("dp_shard", "dp_replicate"))),
        r"the first axis is to replicate and the second to shard, but they are named \('dp_shar.*\n  mesh: dp_shard=2,",
    ),
    "device": (unknown_device, r"fully_shard cannot use its mesh: there is no platform for the device type 'xpu'"),
    "tied": (tied_across, r"it is the same as 'weight', which another unit already manages"),
    "shared": (shared_module, r"it is the same as '0\.weight', which another unit already manages"),
    "lazy": (lambda: fully_shard(nn.LazyLinear(3), mesh=mesh()), r"it has no shape yet"),
    "half on meta": (half_on_meta, r"on the meta device, others have data\n  on meta: 1.weight, 1.bias"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_of_fully_shard(case):
    call, match = CALLS[case]
    fails_on_ranks(call, ValueError, match)


METHODS = {
    "prefetch": (
        lambda m: m.set_modules_to_forward_prefetch({m}),
        r"modules is a set, not a list or None\n  modules: ",
    ),
    "op": (lambda m: m.set_reduce_op_type("mean"), r"there is no kind of reduce_op_type 'mean'\n  reduce_op_type: 'me"),
    "op type": (lambda m: m.set_reduce_op_type(1), r"there is no kind of reduce_op_type 1"),
    "prefetch item": (
        lambda m: m.set_modules_to_backward_prefetch([m, nn.Linear(1, 1)]),
        r"item 1, a Linear, was not wrapped by fully_shard",
    ),
}


@pytest.mark.parametrize("case", METHODS)
def test_methods(case):
    call, match = METHODS[case]
    fails_on_ranks(lambda: call(wrapped()), ValueError, match)


def unwrapped():
    """Has the methods, but no unit."""
    module = nn.Linear(1, 1)
    object.__setattr__(module, "__class__", type("Unwrapped", (HSDPModule, nn.Linear), {}))
    return module


def test_methods_of_a_module_that_was_never_wrapped():
    module = unwrapped()
    calls = [
        lambda: module.set_requires_gradient_sync(True),
        lambda: module.set_requires_all_reduce(True),
        lambda: module.set_is_last_backward(True),
        lambda: module.set_gradient_scaling_factor(1.0),
        lambda: module.set_reduce_op_type("avg"),
        lambda: module.set_reshard_after_forward(True),
        lambda: module.set_reshard_after_backward(True),
        lambda: module.set_modules_to_forward_prefetch([]),
        lambda: module.set_modules_to_backward_prefetch([]),
        module.unshard,
        module.reshard,
        module.zero_grad,
        lambda: module.load_state_dict({}),
    ]
    for call in calls:
        with pytest.raises(
            ValueError,
            match=r"cannot change how a Unwrapped communicates: it was never wrapped\n  seen: a module without a unit ",
        ):
            call()


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_policy_dtypes(name):
    for wrong in (torch.int32, "bf16", torch.complex64):
        with pytest.raises(
            TypeError, match=rf": {name} is a .*, not a floating-point torch.dtype or None\n.*\n  try: "
        ):
            MixedPrecisionPolicy(**{name: wrong})


def test_a_default_mesh_needs_a_process_group_and_one_device_type():
    with pytest.raises(ValueError, match=r"cannot make a mesh: torch.distributed is not initialised"):
        fully_shard(nn.Linear(1, 1))

    class Elsewhere(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.odd = nn.Parameter(FakeDevice(torch.ones(2)))

    fails_on_ranks(lambda: fully_shard(Elsewhere()), ValueError, r"several device types: cpu, vulkan")


class FakeDevice(torch.Tensor):
    """A tensor that says it lives on a device this machine does not have."""

    @property
    def device(self):
        return torch.device("vulkan")


def test_a_rank_outside_of_the_mesh():
    def rank():
        half = DeviceMesh("cpu", [0, 1])
        if torch.distributed.get_rank() < 2:
            fully_shard(nn.Linear(2, 2), mesh=half)
            return ""
        with pytest.raises(
            ValueError, match=r"calling rank is not on the mesh\n  mesh: axis 0=2   ranks: \[0, 1\]   calling rank: 2"
        ) as e:
            fully_shard(nn.Linear(2, 2), mesh=half)
        return str(e.value)

    assert "\n  try: " in sim.run(rank, 3)[2]


def test_meshes_of_different_roots():
    def other_ranks():
        own = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
        across = [DeviceMesh("cpu", ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
        with_weight(lambda: laid_out(own, Shard(0)), wrap_mesh=across)

    def another_device():
        other = mesh(4)
        weight = nn.Parameter(laid_out(mesh(2, 2, names=("dp", "tp"))["tp"], Shard(0)))
        other._device_type = "meta"
        spmd_mesh_of(weight.device_mesh, other)

    text = r"cannot put a parameter's mesh and the data mesh together: "
    fails_on_ranks(
        other_ranks, ValueError, text + r"they are no slices of one mesh.*\n  parameter's mesh: axis 0=2 ", world_size=4
    )
    fails_on_ranks(another_device, ValueError, text + r"one is of 'cpu', the other of 'meta'", world_size=4)


def test_a_root_whose_first_forward_is_in_the_backward_of_a_unit_of_its_own():
    def call():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=mesh(2, 1))
        fully_shard(model, mesh=mesh(2, 1))
        x = torch.ones(1, 4, requires_grad=True) * 1
        x.register_hook(lambda gradient: model(torch.ones(1, 4)) and None)
        model[0](x).sum().backward()

    fails_on_ranks(
        call, RuntimeError, r"the forward of Sequential ran inside of a backward of modules in it\n  seen: .*Linear\n"
    )


def assign_vector(module):
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector + 1, module.parameters())


ASSIGN = {
    "a DTensor": lambda module: setattr(module.weight, "data", module.weight.detach() + 1),
    "a shard": lambda module: setattr(module.weight, "data", torch.ones(2, 4)),
    "the whole": lambda module: setattr(module.weight, "data", torch.ones(4, 4)),
    "a vector": assign_vector,
    "a swap": lambda module: torch.utils.swap_tensors(module.weight, nn.Parameter(torch.ones(4, 4))),
    "a parameter": lambda module: setattr(module, "weight", nn.Parameter(torch.ones(4, 4))),
}


def two_layers(device="cpu"):
    with torch.device(device):
        return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh())


REPLACED = {
    "by a plain one": (
        wrapped,
        lambda m: setattr(m, "weight", nn.Parameter(torch.ones(4, 4))),
        r"parameters came into Linear after it was wrapped: weight\n",
    ),
    "by none": (wrapped, lambda m: delattr(m, "weight"), r"'weight' was removed\n"),
    "by one of another dtype": (
        two_layers,
        lambda m: m[1].double(),
        r"now have several\n.*0.bias is torch.float32, .*1.bias is .*64",
    ),
    "by half of what was on meta": (
        lambda: two_layers("meta"),
        lambda m: m[0].to_empty(device="cpu"),
        r"(?s)\A(?!.*0\.weight).*still on the meta device [^\n]*: 1.weight, 1.bias",
    ),
}


@pytest.mark.parametrize("case", REPLACED)
def test_replaced_parameters(case):
    make, change, match = REPLACED[case]

    def call():
        module = make()
        change(module)
        module(torch.ones(1, 4))

    fails_on_ranks(call, RuntimeError, match)


ASSIGNED = r"the data of 'weight' was assigned, and a managed parameter keeps its own\n  seen: parameter\.data = value"


@pytest.mark.parametrize("notices", [lambda m: m(torch.ones(1, 4)), lambda m: m.state_dict(), lambda m: m.unshard()])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("assign", ["a DTensor", "a shard", "the whole", "a vector"])
def test_the_data_of_a_sharded_parameter_is_assigned(assign, trained, notices):
    def call():
        module = wrapped()
        if trained:
            module(torch.ones(1, 4)).sum().backward()
        with torch.no_grad():
            ASSIGN[assign](module)
        notices(module)

    fails_on_ranks(call, RuntimeError, ASSIGNED, sends=trained or assign == "a vector")


@pytest.mark.parametrize("notices", [lambda m: m(torch.ones(1, 4)), lambda m: m.state_dict(), lambda m: m.reshard()])
@pytest.mark.parametrize("assign", ["the whole", "a vector", "a swap", "a parameter"])
def test_the_data_of_an_unsharded_parameter_is_assigned(assign, notices):
    def call():
        module = wrapped()
        module.unshard()
        with torch.no_grad():
            ASSIGN[assign](module)
        notices(module)

    match = r"was replaced by a Parameter\n|after it was wrapped: weight\n" if assign == "a parameter" else ASSIGNED
    fails_on_ranks(call, RuntimeError, match, sends=True)


class PacksWeight(nn.Linear):
    """Replaces the data of its weight in its first forward of an evaluation."""

    packed = False

    def forward(self, x):
        if not self.training and not self.packed:
            self.packed = True
            self.weight.data = self.weight.data + 1
        return super().forward(x)


def test_forward_assigns_the_data_of_a_parameter():
    """Once it is resharded, the shards would not have the new data, and the next forward would take no new shards."""

    x = torch.ones(1, 4)

    def call(*, ignored):
        model = nn.Sequential(PacksWeight(4, 4, bias=False), nn.Linear(4, 4))
        before = model[0].weight.detach().clone()
        fully_shard(model, mesh=mesh(), ignored_params={model[0].weight} if ignored else None)
        model.train()(x).sum().backward()
        model.eval()(x)
        return torch.equal(model[0].weight, before + 1)

    match = r"the data of '0\.weight' was assigned.*\n  seen: .*\n  try: .*ignored_params if forward assigns it"
    fails_on_ranks(lambda: call(ignored=False), RuntimeError, match, sends=True)
    assert sim.run(lambda: call(ignored=True), 2) == [True, True]


@pytest.mark.parametrize(
    "change",
    [
        lambda m, value: m.weight.data.copy_(value),
        lambda m, value: m.weight.copy_(value),
        lambda m, value: m.weight.to_local().fill_(2),
        lambda m, value: setattr(m, "weight", nn.Parameter(value)),
        lambda m, value: torch.utils.swap_tensors(m.weight, nn.Parameter(value)),
        lambda m, value: m.load_state_dict({"weight": value}, strict=False),
        lambda m, value: m.load_state_dict({"weight": torch.full((4, 4), 2.0)}, strict=False),
        lambda m, value: m.float().to("cpu"),
    ],
)
def test_what_changes_a_sharded_parameter(change):
    """None of it is taken for an assignment of data; also not when the forward after it runs again."""

    def rank():
        module = wrapped()
        module(torch.ones(1, 4)).sum().backward()
        module.zero_grad()
        with torch.no_grad():
            change(module, module.weight.detach() * 0 + 2)
            twice = [module(torch.ones(1, 4)) - module.bias.full_tensor() for _ in range(2)]
        assert torch.equal(*twice)
        module.state_dict()
        return twice[0].tolist(), (module.weight.full_tensor().sum(1)).tolist()

    for given, weights in sim.run(rank, 2):
        torch.testing.assert_close(given[0], weights)
        if "float" not in change.__code__.co_names:
            assert weights == [8.0] * 4


def test_shards_whose_memory_was_freed():
    def call():
        module = wrapped()
        module.weight.to_local().untyped_storage().resize_(0)
        module(torch.ones(1, 4))

    fails_on_ranks(call, RuntimeError, r"the memory of shards was freed: weight\n  seen: .*\n  try: ")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("trained", [False, True])
def test_weights_that_were_moved_to_the_host(trained):
    """By a program that offloads them between two phases, and has forgotten to bring them back."""

    def rank():
        module = fully_shard(nn.Linear(4, 4).to("npu"), mesh=init_device_mesh("npu", (2,)))
        x = torch.ones(1, 4, device="npu")
        if trained:
            module(x).sum().backward()
        module.to("cpu")
        with pytest.raises(RuntimeError, match=r"moved away .*: weight \(cpu\), bias \(cpu\)\n  seen: .*npu") as caught:
            module(x)
        assert_parts(str(caught.value))
        module.to("npu")
        module.zero_grad()
        module(x).sum().backward()
        return module.bias.grad.full_tensor().tolist()

    assert sim.run(rank, 2, device="npu") == [[1.0] * 4] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"shard_placement_fn": lambda parameter: Shard(0) if parameter.shape == (2, 2) else Shard(9)},
        {"reshard_after_forward": 3},
        {"ignored_params": [1]},
        {"offload_policy": 1},
        {"comm_fusion_zero_copy": True},
    ],
)
@sim.ranks(2, backends=("sim",))
def test_a_failed_call_changes_nothing(ctx, wrong):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = list(model.parameters())
    with pytest.raises((ValueError, TypeError), match="\n  try: "):
        fully_shard(model, mesh=mesh(), **wrong)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert not any(p._backward_hooks or p.__dict__ for p in before)
    kinds = {type(p) for p in model.parameters()}, type(model), len(model._forward_hooks)
    fully_shard(model, mesh=mesh())
    model(torch.ones(1, 2)).sum().backward()
    assert kinds == ({nn.Parameter}, nn.Sequential, 0)


# -- what is a TypeError ---------------------------------------------------------------------------------------------

TYPE_ERRORS = {
    "replicate tensor": (lambda: one(replicate_params=[torch.ones(2)]), r"item 0 of replicate_params is a Tensor, not"),
    "ignored": (lambda: fully_shard(nn.Linear(1, 1), ignored_params=["w"]), r"item 0 of ignored_params is a str, not "),
}


@pytest.mark.parametrize("case", TYPE_ERRORS)
def test_wrong_types(case):
    call, match = TYPE_ERRORS[case]
    fails_on_ranks(call, TypeError, match)


@pytest.mark.parametrize("argument", ["ignored_params", "replicate_params"])
@sim.ranks(2, backends=("sim",))
def test_one_set_of_parameters_goes_to_the_calls_of_all_units(ctx, argument):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kept = {layer.bias for layer in model} | {nn.Parameter(torch.ones(1))}
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh(), **{argument: kept})
    model(torch.ones(1, 4)).sum().backward()
    assert [tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape) for p in model.parameters()] == [
        (2, 4),
        (4,),
    ] * 2


@sim.ranks(2, backends=("sim",))
def test_what_is_no_mistake(ctx):
    """Ints, policies and placements at the edge of what is refused."""
    for options in (
        {"reshard_after_forward": 1},
        {"reshard_after_forward": 2},
        {"shard_placement_fn": lambda p: Shard(-1)},
        {"shard_placement_fn": lambda p: None},
        {"offload_policy": OffloadPolicy()},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"comm_fusion": True, "comm_fusion_zero_copy": False},
        {"comm_fusion_zero_copy": False},
        {"ignored_params": set(), "replicate_params": iter(())},
    ):
        one(**options)(torch.ones(1, 4)).sum().backward()
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh(), ignored_params=[model.bias], replicate_params=[model.bias])
    assert type(model.bias) is nn.Parameter


# -- parameters as they were -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda m: fully_shard(m, mesh=mesh()), hsdp])
def test_a_gradient_for_a_parameter_as_it_was_before_wrapping(wrap):
    def tied_outside():
        inside, outside = nn.Linear(4, 4), nn.Linear(4, 4)
        outside.weight = inside.weight
        wrap(inside)
        outside(inside(torch.ones(1, 4))).sum().backward()

    def kept_in_a_variable():
        module = nn.Linear(4, 4)
        old = module.weight
        wrap(module)
        (module(torch.ones(1, 4)).sum() + old.sum()).backward()

    for call in (tied_outside, kept_in_a_variable):
        text = fails_on_ranks(
            call, RuntimeError, r"a gradient arrived for 'weight' as it was before .* replaced it", sends=True
        )
        api, other = ("hsdp", "fully_shard") if wrap is hsdp else ("fully_shard", "hsdp")
        assert api in text
        assert other not in text


@sim.ranks(2, backends=("sim",))
def test_a_frozen_parameter_may_be_used_as_it_was(ctx):
    module = nn.Linear(4, 4)
    old = module.weight.requires_grad_(False)
    fully_shard(module, mesh=mesh())
    (module(torch.ones(1, 4)) + old.sum()).sum().backward()
    assert module.bias.grad.full_tensor().tolist() == [1.0] * 4


def test_offloaded_parameters_that_are_not_on_the_host():
    def call():
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model, mesh=mesh(), offload_policy=CPUOffloadPolicy())
        model(torch.ones(1, 4))

    fails_on_ranks(call, RuntimeError, r"still on the meta device .*: 0.weight, 0.bias, 1.weight, 1.bias\n")


class Using(nn.Module):
    """Uses the weight of a unit in it as `use` says."""

    def __init__(self, use):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.use = use

    def forward(self, x):
        return self.use(self, self.layers[0](x * self.scale))


def by_function(self, h):
    return F.linear(h, self.layers[1].weight) + self.scale


def by_variable(self, h):
    weight = self.layers[1].weight
    return h @ weight.t()


def over_lines(self, h):
    return torch.addmm(self.scale, h, self.layers[1].weight)


def by_attention(self, h):
    return self.attention(h[None], h[None], h[None])[0]


@pytest.mark.parametrize("use", [by_function, by_variable, over_lines, by_attention])
def test_parameters_that_are_used_outside_of_their_unit(use):
    def call():
        model = Using(use)
        for module in (*model.layers, model.attention.out_proj, model):
            fully_shard(module, mesh=mesh())
        nn.Sequential(model)(torch.ones(2, 4))

    owner = "attention.out_proj" if use is by_attention else "layers.1"
    where = "multi_head_attention_forward" if use is by_attention else use.__name__
    match = rf"parameter '{owner}.weight' is used outside of .*\n  unit: \w*Linear; seen: .*py:\d+, in {where}\n  try: "
    fails_on_ranks(call, RuntimeError, match, sends=True)


def test_parameters_that_are_used_by_their_unit():
    def rank(use):
        model = Using(use)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh())
        model(torch.ones(2, 4)).sum().backward()

    sim.run(rank, 2, args=(lambda self, h: self.layers[1](h),))
    sim.run(rank, 2, args=(by_attention,))
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):  # of something else: torch's words
        sim.run(rank, 2, args=(lambda self, h: h + distribute_tensor(torch.ones(4), mesh(), [Replicate()]),))


LACKING = {
    "SGD(fused=True)": "fused=False",
    "Adagrad(fused=True)": "fused=False",
    "Adafactor": "torch.optim.AdamW",
    "Rprop": "torch.optim.RMSprop",
    "LBFGS, uneven": "sizes of dim 0",
}
OPTIMIZERS = [
    pytest.param(kind, options, even, id=f"{kind.__name__}-{'-'.join(options)}-{'even' if even else 'uneven'}")
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind) and kind not in (torch.optim.Optimizer, torch.optim.SparseAdam)
    for options in ({}, {"foreach": True}, {"fused": True})
    if options.keys() <= inspect.signature(kind).parameters.keys()
    for even in (True, False)
]


@pytest.mark.tier("test")
@pytest.mark.parametrize(("kind", "options", "even"), OPTIMIZERS)
def test_optimizers_of_torch(kind, options, even):
    """They do what they do on one device, or torch cannot: then the error is ours. docs/fully_shard.md has the list."""
    size = 4 if even else 5
    name = kind.__name__ + ("(fused=True)" if "fused" in options else "")
    hint = LACKING.get(name) or LACKING.get(name + ("" if even else ", uneven"))

    def steps(model, parameters):
        matrices = [parameter for parameter in parameters if parameter.ndim == 2 or kind is not torch.optim.Muon]
        optimizer = kind(matrices, lr=0.01, **options)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(16, size, generator=torch.Generator().manual_seed(0))).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 2 * size))

    def rank():
        model = net()
        for part in (model[2], model):
            fully_shard(part, mesh=mesh())
        if hint:
            with pytest.raises(ValueError, match=rf"^cannot step with {re.escape(name)}: .* '0.weight'") as caught:
                steps(model, list(model.parameters()))
            assert_parts(str(caught.value))
            assert f"  try: {hint}" in str(caught.value)
            return []
        steps(model, list(model.parameters()))
        return [parameter.full_tensor().detach() for parameter in model.parameters()]

    def bare():
        """A model that torch alone has split."""
        model = nn.Linear(size, size)
        for key, value in list(model.named_parameters()):
            model._parameters[key] = nn.Parameter(distribute_tensor(value.detach(), mesh(), [Shard(0)]))
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = parameter.detach().clone()
            kind(list(model.parameters()), **options).step(lambda: 1.0)

    if hint:
        sim.run(rank, 2)
        with pytest.raises((RuntimeError, NotImplementedError)):  # else it can do without our error, by now
            sim.run(bare, 2)
        return
    whole = net()
    steps(whole, list(whole.parameters()))
    bounds = {"rtol": 0, "atol": 1e-3} if kind is torch.optim.Muon else {}  # it computes in bf16
    for found in sim.run(rank, 2):
        torch.testing.assert_close(found, [parameter.detach() for parameter in whole.parameters()], **bounds)


def test_buffers_that_are_still_on_meta():
    def call(*, fill):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False, device="meta"))
        fully_shard(model, mesh=mesh())
        if fill:
            model[1].to_empty(device="cpu").reset_parameters()
        model(torch.ones(2, 4))

    names = "1.running_mean, 1.running_var, 1.num_batches_tracked"
    fails_on_ranks(lambda: call(fill=False), RuntimeError, rf"buffers of Sequential .* meta device: {names}\n")
    sim.run(lambda: call(fill=True), 2)


def test_parameters_that_come_after_wrapping():
    def wrapped():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for part in (*model, model):
            fully_shard(part, mesh=mesh())
        return model

    def another_block():
        model = wrapped()
        model(torch.ones(1, 2)).sum().backward()
        model[1] = nn.Linear(2, 2)
        model(torch.ones(1, 2))

    def an_adapter():
        model = wrapped()
        model[0].lora = nn.Parameter(torch.ones(2))
        model(torch.ones(1, 2))

    unmanaged = r"came into Sequential after .*: 1.weight, 1.bias\n  seen: .*\n  try: "
    fails_on_ranks(another_block, RuntimeError, unmanaged, sends=True)
    fails_on_ranks(an_adapter, RuntimeError, r"came into Sequential after .*: 0.lora\n")

    def fine():
        model = wrapped()
        model[0].frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        extra = nn.Sequential(model, nn.Linear(2, 2))  # outside of what was wrapped
        extra(torch.ones(1, 2)).sum().backward()
        model[1] = fully_shard(nn.Linear(2, 2), mesh=mesh())
        model(torch.ones(1, 2))

    sim.run(fine, 2)


@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
def test_a_step_between_forward_and_backward(kind):
    def call():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for part in (*model, model):
            fully_shard(part, mesh=mesh())
        optimizer = torch.optim.AdamW(model.parameters(), foreach=kind == "foreach", fused=kind == "fused")
        model(torch.ones(1, 2)).sum().backward()
        loss = model(torch.ones(1, 2)).sum()
        optimizer.step()
        loss.backward()

    changed = r"changed between a forward and its backward\n  unit: Linear.*\n  try: all"
    fails_on_ranks(call, RuntimeError, changed, sends=True)


@pytest.mark.parametrize(
    ("wrap", "by"),
    [
        (lambda m: fully_shard(m, mesh=mesh()), "fully_shard or hsdp"),
        (hsdp, "fully_shard or hsdp"),
        (lambda m: hsdp(m, use_eager_hook=False), "fully_shard or hsdp"),
        (lambda m: shard_module(m, mesh(names=("tp",)), ShardingPlan({"weight": ("tp", "None")})), "shard_module"),
    ],
)
@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_that_was_made_before_wrapping(wrap, by, foreach):
    def call():
        model = nn.Linear(4, 4)
        early = torch.optim.AdamW(model.parameters(), foreach=foreach)
        wrap(model)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
            torch.optim.AdamW([param], foreach=foreach).step()
        early.step()

    expected = rf"cannot step with AdamW: {by} has replaced \d of its 2 parameters .*\n  replaced: .*'weight'"
    fails_on_ranks(call, ValueError, expected, sends=True)


def test_unsharded_parameters_are_neither_stepped_nor_clipped():
    """An optimizer that is made after `unshard()` trained nothing; the norm of what has no gradients was 0."""

    def model():
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for part in (made[0], made):
            fully_shard(part, mesh=mesh())
        return made

    def step():
        made = model()
        made[0].unshard()
        optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
        made[0].reshard()
        made(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    text = r"cannot step with SGD: reshard\(\) has replaced 2 of its 4 .*\n  replaced: .*'weight'.*\n  try: .*after"
    fails_on_ranks(step, ValueError, text, sends=True)
    for of in (lambda made: made, lambda made: made.parameters(), lambda made: list(made.parameters())[:1]):

        def clip(of=of):
            made = model()
            made(torch.ones(2, 4)).sum().backward()
            made[0].unshard()
            clip_grad_norm_(of(made), 1.0)

        text = r"cannot clip gradients: parameter .* is not the one that has the gradient: reshard\(\) puts a sharded"
        fails_on_ranks(clip, ValueError, text, sends=True)


@pytest.mark.parametrize(
    "wrap", [lambda m: fully_shard(m, mesh=mesh()), hsdp, lambda m: hsdp(m, threshold=0, use_eager_hook=False)]
)
def test_a_forward_that_runs_later_and_a_sparse_gradient(wrap):
    class Yields(nn.Linear):
        def forward(self, x):
            yield super().forward(x)

    expected = (
        r"cannot run forward: it returns code that runs later, .*\n  unit: .*Yields; seen: a generator\n  try: return"
    )
    fails_on_ranks(lambda: wrap(Yields(4, 4))(torch.ones(1, 4)), TypeError, expected, sends=True)

    def sparse():
        model = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))
        wrap(model)(torch.arange(4)).sum().backward()

    expected = r"cannot reduce gradients: the gradient of .* is sparse\n  seen: torch.sparse_coo"
    fails_on_ranks(sparse, RuntimeError, expected, sends=True)
