"""Mistakes in calling fully_shard: the text names the blame and a way out, on every rank, before any byte."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import sim
from hyper_parallel.core.fully_shard.api import HSDPModule, fully_shard
from hyper_parallel.core.fully_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.hsdp.api import hsdp
from hyper_parallel.core.mesh.spmd_mesh import spmd_mesh_of
from hyper_parallel.core.shard.api import ShardingPlan, shard_module

pytestmark = pytest.mark.sim


def fails_on_every_rank(call, kind, match, *, world_size=2, communicates=False):
    """`call` raises on each rank, with the same text of four parts, and nothing has been communicated."""

    def rank():
        with pytest.raises(kind, match=match) as caught:
            call()
        return str(caught.value)

    with sim.world(world_size) as world:
        texts = world.run(rank)
        assert communicates or world.trace.events == []
    assert len(set(texts)) == 1
    check_parts(texts[0])
    return texts[0]


def check_parts(text):
    """What was asked and what is to blame; then what was seen; last, what to try."""
    first, *middle, last = text.splitlines()
    assert first.strip() == first
    assert last.startswith("  try: ")
    assert all(line.startswith("  ") for line in middle)
    assert middle or ": " in first or " is " in first  # short ones say what was seen in the first line


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
    "no module": (lambda: fully_shard(3), r"takes modules, but its argument is a int: 3"),
    "empty": (lambda: fully_shard([]), r"got an empty list"),
    "list item": (lambda: fully_shard([nn.Linear(1, 1), "x"]), r"item 1 of the list is a str: 'x'"),
    "twice": (lambda: fully_shard(wrapped(), mesh=mesh()), r"^HSDPLinear is wrapped already"),
    "twice in a list": (lambda: fully_shard((wrapped(),), mesh=mesh()), r"wrapped already"),
    "container": (lambda: fully_shard(nn.ModuleList([nn.Linear(1, 1)])), r"ModuleList has no forward of its own"),
    "parameter list": (lambda: fully_shard(nn.ParameterList([torch.ones(2)])), r"ParameterList has no forward"),
    "empty tuple": (lambda: fully_shard(()), r"got an empty list"),
    "nested list": (lambda: fully_shard([nn.Linear(1, 1), [nn.Linear(1, 1)]]), r"item 1 of the list is a list"),
    "class": (lambda: fully_shard(nn.Linear), r"takes modules, but its argument is a type: <class"),
    "container in a list": (lambda: fully_shard([nn.Linear(1, 1), nn.ModuleDict()]), r"ModuleDict has no forward"),
    "inside twice": (lambda: fully_shard([nn.Linear(4, 4), wrapped()], mesh=mesh()), r"^HSDPLinear is wrapped already"),
    "reshard 0": (lambda: one(reshard_after_forward=0), r"use 0 as reshard_after_forward\n  expected: True, False, or"),
    "reshard -1": (lambda: one(reshard_after_forward=-1), r"cannot use -1 as reshard_after_forward"),
    "reshard 3": (
        lambda: one(reshard_after_forward=3),
        r"reshard_after_forward=3: it does not divide the shard axis\n  seen: .* of 2 ranks\n  try: one of 1, 2$",
    ),
    "reshard 4": (lambda: one(reshard_after_forward=4), r"reshard_after_forward=4: it does not divide"),
    "reshard HSDP": (
        lambda: fully_shard(nn.Linear(4, 4), mesh=mesh(2, 1), reshard_after_forward=2),
        r"reshard_after_forward=2: it does not divide the shard axis\n  seen: .* of 1 rank.*\n  try: .*1$",
    ),
    "reshard float": (lambda: one(reshard_after_forward=2.0), r"cannot use 2.0 as reshard_after_forward"),
    "reshard text": (lambda: one(reshard_after_forward="2"), r"cannot use '2' as reshard_after_forward"),
    "placement": (lambda: one(shard_placement_fn=Shard(0)), r"cannot use Shard\(dim=0\) as shard_placement_fn"),
    "placement int": (
        lambda: one(shard_placement_fn=lambda p: 1),
        r"shard_placement_fn returned 1 for parameter 'weight'\n  expected: Shard\(dim\) of torch",
    ),
    "placement class": (lambda: one(shard_placement_fn=lambda p: Shard), r"returned <class .* for parameter 'weight'"),
    "placement Replicate": (lambda: one(shard_placement_fn=lambda p: Replicate()), r"returned Replicate\(\) for param"),
    "placement Partial": (lambda: one(shard_placement_fn=lambda p: Partial()), r"returned Partial\(sum\) for param"),
    "placement of one": (
        lambda: one(shard_placement_fn=lambda p: Shard(1)),
        r"Shard\(dim=1\) for parameter 'bias', which has no such dim\n  seen: shape \(4,\)\n  try: a dim from 0 to 0",
    ),
    "placement dim": (lambda: one(shard_placement_fn=lambda p: Shard(2)), r"Shard\(dim=2\) for parameter 'weight', wh"),
    "placement below": (lambda: one(shard_placement_fn=lambda p: Shard(-3)), r"Shard\(dim=-3\) for parameter 'weight'"),
    "offload": (
        lambda: one(offload_policy="cpu"),
        r"cannot use 'cpu' as offload_policy\n  expected: hyper_parallel's OffloadPolicy; seen: .*\n  try",
    ),
    "offload flag": (lambda: one(offload_policy=True), r"cannot use True as offload_policy"),
    "offload class": (lambda: one(offload_policy=CPUOffloadPolicy), r"cannot use <class .* as offload_policy"),
    "fusion": (lambda: one(comm_fusion=1), r"cannot use 1 as comm_fusion\n  expected: True, False\n  try: "),
    "fusion None": (lambda: one(comm_fusion=None), r"cannot use None as comm_fusion\n"),
    "zero copy": (
        lambda: one(comm_fusion=True, comm_fusion_zero_copy=0),
        r"use 0 as comm_fusion_zero_copy\n.*True, Fal",
    ),
    "zero copy only": (
        lambda: one(comm_fusion_zero_copy=True),
        r"comm_fusion_zero_copy=True is about fused communication\n  seen: comm_fusion=False\n  try: comm_fusion=True$",
    ),
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
        r"'weight' cannot be split: it is a tensor subclass that holds .*\n  seen: .*\n  try: .*ignored_params",
    ),
    "half an extension": (
        lambda: with_weight(lambda: extended(OnlyPre), wrap_mesh=mesh()),
        r"'weight' cannot be split: it has fsdp_pre_all_gather alone, .*\n  seen: a OnlyPre\n  try: .*ignored_params",
    ),
    "extension of another form": (
        lambda: with_weight(lambda: extended(OtherForm), wrap_mesh=mesh()),
        r"'weight' cannot be split: its fsdp_pre_all_gather .*\n  seen: .*r\(mesh, more\)\n  try: \(self, mesh\)",
    ),
    "extension that parts lose": (
        lambda: with_weight(lambda: extended(Losing), wrap_mesh=mesh()),
        r"'weight' cannot be split: shards of it have lost .*\n  seen: a Losing, .*\n  try: .*class for detach",
    ),
    "extension and fusion": (
        lambda: with_weight(lambda: extended(Both), wrap_mesh=mesh(), comm_fusion=True),
        r"parameter 'weight': it is gathered in its own way, .*\n  seen: .*\n  try: comm_fusion=F",
    ),
    "extension on another dim": (
        lambda: with_weight(lambda: extended(Both), wrap_mesh=mesh(), shard_placement_fn=lambda p: Shard(p.dim() - 1)),
        r"returned Shard\(dim=1\) for parameter 'weight', which has fsdp_pre.*\n  exp.*Shard\(0\).*\n  try: Shard",
    ),
    "extension and hsdp": (
        lambda: cell_with(lambda: extended(Both)),
        r"parameter 'weight' cannot be split: it is gathered in its own way, .*\n  seen: .*Both.*\n  try: a plain",
    ),
    "sparse": (
        lambda: with_weight(lambda: torch.eye(4).to_sparse(), wrap_mesh=mesh()),
        r"parameter 'weight' cannot be split: it is sparse\n  seen: .*torch.sparse_coo\n",
    ),
    "replicate missing": (
        lambda: one(replicate_params=[nn.Parameter(torch.ones(3))]),
        r"shape \(3,\): it is not in the module\n  seen: 2 parameters in Linear\n  try: replicate_params",
    ),
    "replicate nested": (nested_replicas, r"shape \(4, 4\): it is not in the module"),
    "replicate sharded": (nested_sharded_replicas, r"'0.weight': a unit inside the module manages it already\n"),
    "ignored int": (lambda: one(ignored_params=3), r"cannot use a int as ignored_params.*\n.*expected: a set or list"),
    "ignored one": (lambda: one(ignored_params=torch.ones(2)), r"cannot use a Tensor as ignored_params"),
    "gradient": (
        after_a_backward,
        r"parameter 'weight' has a gradient, which would be lost\n  seen: a backward before",
    ),
    "hook": (lambda: with_hooks("register_hook"), r"parameter 'weight' has hooks, which would be lost"),
    "post hook": (lambda: with_hooks("register_post_accumulate_grad_hook"), r"parameter 'weight' has hooks, which"),
    "partial": (
        lambda: with_weight(lambda: partial(mesh())),
        r"cannot manage parameter 'weight', a DTensor with placement P.*\n  layout: .*mesh|axis 0=2\n  try: .*redistri",
    ),
    "partial further": (
        lambda: with_weight(lambda: partial(dp_tp()["tp"]), wrap_mesh=dp_tp()["dp"]),
        r"cannot manage parameter 'weight', a DTensor with placement P",
    ),
    "strided": (
        lambda: with_weight(lambda: strided(dp_tp())),
        r"cannot manage parameter 'weight', a DTensor with placement _S",
    ),
    "split already": (
        lambda: with_weight(lambda: laid_out(mesh(), Shard(0)), wrap_mesh=mesh()),
        r"cannot split parameter 'weight' .*: it is split over these ranks already\n  layout: \(Shard\(dim=0\),\)",
    ),
    "rank order": (
        lambda: fully_shard(nn.Linear(4, 4), mesh=DeviceMesh("cpu", [1, 0])),
        r"ranks along the shard axis in ascending order.*\n  mesh: axis 0=2   ranks: \[1, 0\]\n",
    ),
    "policy": (lambda: fully_shard(nn.Linear(1, 1), mp_policy=torch.bfloat16), r"bfloat16 as mp_policy"),
    "ignored": (lambda: fully_shard(nn.Linear(1, 1), ignored_params=["w"]), r"cannot ignore a str"),
    "mesh": (lambda: fully_shard(nn.Linear(1, 1), mesh=2), r"cannot use 2 as its mesh"),
    "3-D": (lambda: fully_shard(nn.Linear(1, 1), mesh=mesh(1, 2, 1)), r"1 axis .* or 2 axes .*, got 3\n.*axis 1=2"),
    "order": (
        lambda: fully_shard(nn.Linear(1, 1), mesh=mesh(2, 1, names=("dp_shard", "dp_replicate"))),
        r"first axis to replicate and the second to shard.*\n.*dp_shard=2, dp_replicate=1\n.*'dp_replicate', 'dp_sh",
    ),
    "device": (unknown_device, r"does not know the device type 'xpu'"),
    "tied": (tied_across, r"parameter 'weight' is the same as 'weight', which another unit already manages"),
    "shared": (shared_module, r"parameter '0.weight' is the same as '0.weight', which another unit"),
    "lazy": (lambda: fully_shard(nn.LazyLinear(3), mesh=mesh()), r"parameter 'weight' has no shape yet"),
    "half on meta": (half_on_meta, r"on the meta device, others have data\n  on meta: 1.weight, 1.bias"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_of_fully_shard(case):
    call, match = CALLS[case]
    fails_on_every_rank(call, ValueError, match)


METHODS = {
    "sync": (
        lambda m: m.set_requires_gradient_sync(1),
        r"set_requires_gradient_sync cannot use 1 as its req",
    ),
    "all_reduce": (lambda m: m.set_requires_all_reduce(None), r"set_requires_all_reduce cannot use None as its req"),
    "recurse": (lambda m: m.set_requires_all_reduce(True, recurse=2), r"set_requires_all_reduce .* 2 as its recurse"),
    "last": (lambda m: m.set_is_last_backward("no"), r"set_is_last_backward cannot use 'no' as its is_last"),
    "forward": (
        lambda m: m.set_reshard_after_forward(8),
        r"set_reshard_after_forward cannot use 8 as its resh",
    ),
    "backward": (lambda m: m.set_reshard_after_backward(0, recurse=False), r"set_reshard_after_backward cannot use 0"),
    "factor": (lambda m: m.set_gradient_scaling_factor("2"), r"set_gradient_scaling_factor cannot use '2'"),
    "factor bool": (lambda m: m.set_gradient_scaling_factor(True), r"set_gradient_scaling_factor cannot use True"),
    "op": (lambda m: m.set_reduce_op_type("mean"), r"set_reduce_op_type cannot use 'mean'\n  expected: 'avg' or 'sum'"),
    "op type": (lambda m: m.set_reduce_op_type(1), r"set_reduce_op_type cannot use 1"),
    "async": (lambda m: m.unshard(async_op=1), r"unshard cannot use 1 as its async_op"),
    "prefetch": (lambda m: m.set_modules_to_forward_prefetch(m), r"set_modules_to_forward_prefetch cannot use HSDPLin"),
    "prefetch item": (
        lambda m: m.set_modules_to_backward_prefetch([m, nn.Linear(1, 1)]),
        r"set_modules_to_backward_prefetch: item 1 is a Linear, which was never wrapped",
    ),
}


@pytest.mark.parametrize("case", METHODS)
def test_methods(case):
    call, match = METHODS[case]
    fails_on_every_rank(lambda: call(wrapped()), ValueError, match)


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
        with pytest.raises(ValueError, match=r"Unwrapped .* was never wrapped\n  try: fully_shard"):
            call()


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_policy_dtypes(name):
    for wrong in (torch.int32, "bf16", torch.complex64):
        with pytest.raises(TypeError, match=rf"as {name}\n  expected: a floating-point torch.dtype, or None\n  try: "):
            MixedPrecisionPolicy(**{name: wrong})


def test_policy_flag():
    with pytest.raises(TypeError, match=r"cannot use 1 as cast_forward_inputs\n  expected: a bool\n  try: "):
        MixedPrecisionPolicy(cast_forward_inputs=1)


def test_a_default_mesh_needs_a_process_group_and_one_device_type():
    with pytest.raises(ValueError, match=r"cannot make a mesh: torch.distributed is not initialised"):
        fully_shard(nn.Linear(1, 1))

    class Elsewhere(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.odd = nn.Parameter(FakeDevice(torch.ones(2)))

    fails_on_every_rank(lambda: fully_shard(Elsewhere()), ValueError, r"several device types: cpu, vulkan")


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
            ValueError, match=r"on rank 2, which is not in its mesh\n  mesh: axis 0=2   ranks: \[0, 1\]"
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
    fails_on_every_rank(
        other_ranks, ValueError, text + r"they are no slices of one mesh.*\n  parameter's mesh: axis 0=2 ", world_size=4
    )
    fails_on_every_rank(another_device, ValueError, text + r"one is of 'cpu', the other of 'meta'", world_size=4)


def test_a_root_whose_first_forward_is_in_the_backward_of_a_unit_of_its_own():
    def call():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=mesh(2, 1))
        fully_shard(model, mesh=mesh(2, 1))
        x = torch.ones(1, 4, requires_grad=True) * 1
        x.register_hook(lambda gradient: model(torch.ones(1, 4)) and None)
        model[0](x).sum().backward()

    fails_on_every_rank(
        call,
        RuntimeError,
        r"the forward of HSDPSequential ran inside of a backward of modules in it\n  seen: .*Linear\n",
    )


def test_replaced_parameters():
    def replaced_by_a_plain_one():
        module = wrapped()
        module.weight = nn.Parameter(torch.ones(4, 4))
        module(torch.ones(1, 4))

    def replaced_by_none():
        module = wrapped()
        del module.weight
        module(torch.ones(1, 4))

    def of_several_dtypes():
        module = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh())
        module[1].double()
        module(torch.ones(1, 4))

    def half_materialised():
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(module, mesh=mesh())
        module[0].to_empty(device="cpu")
        module(torch.ones(1, 4))

    fails_on_every_rank(
        replaced_by_a_plain_one, RuntimeError, r"parameters came into HSDPLinear after it was wrapped: weight\n"
    )
    fails_on_every_rank(replaced_by_none, RuntimeError, r"'weight' was removed\n")
    fails_on_every_rank(
        of_several_dtypes, RuntimeError, r"now have several: .*0.bias is torch.float32, .*1.bias is .*64"
    )
    text = fails_on_every_rank(half_materialised, RuntimeError, r"still on the meta device .*: 1.weight, 1.bias")
    assert "0.weight" not in text


def last_is_wrong(parameter):
    return Shard(0) if parameter.shape == (2, 2) else Shard(9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shard_placement_fn": last_is_wrong},
        {"reshard_after_forward": 3},
        {"replicate_params": [nn.Parameter(torch.ones(1))]},
        {"offload_policy": 1},
        {"comm_fusion_zero_copy": True},
    ],
)
def test_a_failed_call_changes_nothing(wrong):
    def rank():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        before = list(model.parameters())
        with pytest.raises(ValueError, match="\n  try: "):
            fully_shard(model, mesh=mesh(), **wrong)
        assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
        assert not any(p._backward_hooks or p.__dict__ for p in before)
        kinds = {type(p) for p in model.parameters()}, type(model), len(model._forward_hooks)
        fully_shard(model, mesh=mesh())
        model(torch.ones(1, 2)).sum().backward()
        return kinds

    assert sim.run(rank, 2) == [({nn.Parameter}, nn.Sequential, 0)] * 2


# -- what is a TypeError ---------------------------------------------------------------------------------------------

TYPE_ERRORS = {
    "replicate text": (lambda: one(replicate_params=["weight"]), r"replicate a str\n  expected: .*nn.Parameter\n"),
    "replicate tensor": (lambda: one(replicate_params=[torch.ones(2)]), r"cannot replicate a Tensor"),
    "replicate module": (lambda: one(replicate_params=nn.Linear(2, 2)), r"cannot use a Linear as replicate_params"),
    "replicate one": (lambda: one(replicate_params=nn.Parameter(torch.ones(2))), r"a Parameter as replicate_params"),
    "pin_memory": (
        lambda: CPUOffloadPolicy(pin_memory=1),
        r"CPUOffloadPolicy cannot use 1: pin_memory is True or False",
    ),
    "main grad": (
        lambda: MixedPrecisionPolicy(apply_grad_on_fp32_main_grad="yes"),
        r"cannot use 'yes' as apply_grad_on_fp32_main_grad\n  expected: a bool\n",
    ),
}


@pytest.mark.parametrize("case", TYPE_ERRORS)
def test_wrong_types(case):
    call, match = TYPE_ERRORS[case]
    fails_on_every_rank(call, TypeError, match)


def test_what_is_no_mistake():
    """Ints, policies and placements at the edge of what is refused."""

    def rank():
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
        return type(model.bias)

    assert sim.run(rank, 2) == [nn.Parameter] * 2


# -- the other API -----------------------------------------------------------------------------------------------------


FACES = {
    "hsdp after fully_shard": (lambda: hsdp(wrapped()), r"^HSDPLinear is wrapped already\n  seen: a second hsdp of"),
    "fully_shard after hsdp": (
        lambda: fully_shard(hsdp(nn.Linear(4, 4)), mesh=mesh()),
        r"is wrapped already\n.*second ful",
    ),
    "hsdp twice": (lambda: hsdp(hsdp(nn.Linear(4, 4))), r"is wrapped already\n  seen: a second hsdp"),
    "container": (
        lambda: hsdp(nn.ModuleList([nn.Linear(1, 1)])),
        r"ModuleList has no forward .*\n.*\n  try: hsdp each",
    ),
    "lazy": (lambda: hsdp(nn.LazyLinear(3)), r"parameter 'weight' has no shape yet\n.*\n  try: .* before hsdp"),
}


@pytest.mark.parametrize("case", FACES)
def test_both_faces(case):
    call, match = FACES[case]
    fails_on_every_rank(call, ValueError, match)


def test_hsdp_says_its_own_name():
    def with_gradient():
        model = nn.Linear(4, 4)
        model(torch.ones(1, 4)).sum().backward()
        hsdp(model)

    def tied():
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        b.weight = a.weight
        hsdp(a)
        hsdp(b)

    def half():
        hsdp(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))

    for call, match in (
        (with_gradient, r"has a gradient, which would be lost\n  seen: a backward before hsdp"),
        (
            tied,
            r"parameter 'weight' is the same as 'weight', which another unit .*\n.*\n  try: .*wrap only",
        ),
        (half, r"on the meta device, others have data\n  on meta: 1.weight, 1.bias"),
    ):
        text = fails_on_every_rank(call, ValueError, match)
        assert "fully_shard" not in text


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
        text = fails_on_every_rank(
            call, RuntimeError, r"a gradient arrived for 'weight' as it was before .* replaced it", communicates=True
        )
        api, other = ("hsdp", "fully_shard") if wrap is hsdp else ("fully_shard", "hsdp")
        assert api in text
        assert other not in text


def test_a_frozen_parameter_may_be_used_as_it_was():
    def rank():
        module = nn.Linear(4, 4)
        old = module.weight.requires_grad_(False)
        fully_shard(module, mesh=mesh())
        (module(torch.ones(1, 4)) + old.sum()).sum().backward()
        return module.bias.grad.full_tensor().tolist()

    assert sim.run(rank, 2) == [[1.0] * 4] * 2


def test_offloaded_parameters_that_are_not_on_the_host():
    def call():
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model, mesh=mesh(), offload_policy=CPUOffloadPolicy())
        model(torch.ones(1, 4))

    fails_on_every_rank(call, RuntimeError, r"still on the meta device .*: 0.weight, 0.bias, 1.weight, 1.bias\n")


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

    unmanaged = r"came into HSDPSequential after .*: 1.weight, 1.bias\n  seen: .*\n  try: "
    fails_on_every_rank(another_block, RuntimeError, unmanaged, communicates=True)
    fails_on_every_rank(an_adapter, RuntimeError, r"came into HSDPSequential after .*: 0.lora\n")

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

    changed = r"changed between a forward and its backward\n  unit: HSDP.*\n  try: all"
    fails_on_every_rank(call, RuntimeError, changed, communicates=True)


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
    fails_on_every_rank(call, ValueError, expected, communicates=True)
