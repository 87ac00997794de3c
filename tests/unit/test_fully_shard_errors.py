"""Mistakes in calling fully_shard: the text names the blame and a way out, on every rank alike, before any byte."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sim
from hyper_parallel.core.fully_shard.api import HSDPModule, fully_shard
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy

pytestmark = pytest.mark.sim


def fails_on_every_rank(call, kind, match, *, world_size=2):
    """``call`` raises on each rank, with the same text, and nothing has been communicated."""

    def rank():
        with pytest.raises(kind, match=match) as caught:
            call()
        return str(caught.value)

    with sim.world(world_size) as world:
        texts = world.run(rank)
        assert world.trace.events == []
    assert len(set(texts)) == 1
    assert "\n  try: " in texts[0]
    return texts[0]


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


def scalar():
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    fully_shard(model, mesh=mesh())


def a_dtensor():
    model = nn.Linear(2, 2)
    place = mesh()
    local = distribute_tensor(torch.ones(2, 2), place, [Shard(0)], src_data_rank=None)
    model.weight = nn.Parameter(local)
    fully_shard(model, mesh=place)


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
    "reshard int": (lambda: fully_shard(nn.Linear(1, 1), reshard_after_forward=2), r"use 2 as reshard_after_forward"),
    "reshard None": (lambda: fully_shard(nn.Linear(1, 1), reshard_after_forward=None), r"cannot use None as reshard"),
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
    "DTensor": (a_dtensor, r"parameter 'weight' is a DTensor already\n  seen: placements \(Shard\(dim=0\),\)"),
    "scalar": (scalar, r"parameter 'scale' is a scalar"),
    "lazy": (lambda: fully_shard(nn.LazyLinear(3), mesh=mesh()), r"parameter 'weight' has no shape yet"),
    "half on meta": (half_on_meta, r"on the meta device, others have data\n  on meta: 1.weight, 1.bias"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_of_fully_shard(case):
    call, match = CALLS[case]
    fails_on_every_rank(call, ValueError, match)


METHODS = {
    "sync": (lambda m: m.set_requires_gradient_sync(1), r"set_requires_gradient_sync cannot use 1 as its flag"),
    "all_reduce": (lambda m: m.set_requires_all_reduce(None), r"set_requires_all_reduce cannot use None as its flag"),
    "recurse": (lambda m: m.set_requires_all_reduce(True, recurse=2), r"set_requires_all_reduce .* 2 as its recurse"),
    "last": (lambda m: m.set_is_last_backward("no"), r"set_is_last_backward cannot use 'no' as its flag"),
    "forward": (lambda m: m.set_reshard_after_forward(8), r"set_reshard_after_forward cannot use 8 as its flag"),
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


class Unwrapped(HSDPModule, nn.Linear):
    """Has the methods, but no unit."""


def test_methods_of_a_module_that_was_never_wrapped():
    module = Unwrapped(1, 1)
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


def test_a_unit_that_ran_before_its_root():
    def call():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=mesh(2, 1))
        fully_shard(model, mesh=mesh(2, 1))
        model[0](torch.ones(1, 4))
        model(torch.ones(1, 4))

    fails_on_every_rank(
        call, RuntimeError, r"a unit's forward ran on its own .*\n  unit: HSDPLinear   .*HSDPSequential"
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

    fails_on_every_rank(replaced_by_a_plain_one, RuntimeError, r"'weight' was replaced by a Parameter")
    fails_on_every_rank(replaced_by_none, RuntimeError, r"'weight' was replaced by a NoneType")
    fails_on_every_rank(
        of_several_dtypes, RuntimeError, r"now have several: .*0.bias is torch.float32, .*1.bias is .*64"
    )
    text = fails_on_every_rank(half_materialised, RuntimeError, r"still on the meta device .*: 1.weight, 1.bias")
    assert "0.weight" not in text


def test_a_failed_call_changes_nothing():
    def rank():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model.scale = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(ValueError, match="scalar"):
            fully_shard(model, mesh=mesh())
        kinds = {type(p) for p in model.parameters()}, type(model), len(model._forward_hooks)
        model.scale = nn.Parameter(torch.ones(1))
        fully_shard(model, mesh=mesh())
        return kinds

    assert sim.run(rank, 2) == [({nn.Parameter}, nn.Sequential, 0)] * 2
