"""Mistakes in calling hsdp: a ValueError of four parts, on every rank, before anything is sent or changed."""

import numpy as np
import pytest
import torch
from errors_kit import fails_on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import sim
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.utils import OptimizerLevel
from hyper_parallel.core.hsdp.api import HSDPCell, hsdp

pytestmark = pytest.mark.sim


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def one(**options):
    return hsdp(nn.Linear(4, 4), **options)


# -- arguments -----------------------------------------------------------------------------------------------------


ARGUMENTS = {
    "list": (lambda: hsdp([nn.Linear(1, 1)]), r"cell is a list, not a module\n  cell: \[Linear\(in_features=1, out_fe"),
    "container": (lambda: hsdp(nn.ModuleList([nn.Linear(1, 1)])), r"it has no forward of its own, before which its pa"),
    "dict": (lambda: hsdp(nn.ModuleDict()), r"it has no forward of its own, before which its parameters could be gath"),
    "size 0": (lambda: one(shard_size=0), r"shard_size must be at least 1\n  shard_size: 0\n  try: shard_size=-1, whi"),
    "size -2": (lambda: one(shard_size=-2), r"shard_size must be at least 1\n  shard_size: -2\n  try: shard_size=-1, "),
    "threshold -1": (lambda: one(threshold=-1), r"threshold must be at least 0\n  threshold: -1\n  try: threshold=64,"),
    "bucket -2": (lambda: one(bucket_size=-2, comm_fusion=True), r"bucket_size must be at least -1\n  bucket_size: -2"),
    "bucket unused": (lambda: one(bucket_size=-2), r"hsdp cannot wrap a cell: bucket_size must be at least -1"),
    "level": (lambda: one(optimizer_level="level4"), r"there is no kind of optimizer_level 'level4'\n  optimizer_leve"),
    "level case": (lambda: one(optimizer_level="Level1"), r"there is no kind of optimizer_level 'Level1'"),
    "level int": (lambda: one(optimizer_level=1), r"there is no kind of optimizer_level 1\n  optimizer_level: 1"),
    "level None": (lambda: one(optimizer_level=None), r"there is no kind of optimizer_level None"),
    "level list": (lambda: one(optimizer_level=["level1"]), r"there is no kind of optimizer_level \['level1'\]"),
    "level array": (lambda: one(optimizer_level=np.array(["level1", "x"])), r"there is no kind of optimizer_level arr"),
    "level name": (lambda: one(optimizer_level="SHARD_OPT"), r"there is no kind of optimizer_level 'SHARD_OPT'"),
    "dtype int": (lambda: one(reduce_dtype=torch.int32), r"reduce_dtype is a dtype, not a floating-point torch\.dtype"),
    "dtype complex": (lambda: one(reduce_dtype=torch.complex64), r"reduce_dtype is a dtype, not a floating-point torc"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case):
    call, match = ARGUMENTS[case]
    fails_on_ranks(call, (ValueError, TypeError), match)


@pytest.mark.parametrize(
    "options",
    [
        {"shard_size": -1},
        {"shard_size": 1},
        {"shard_size": 7},
        {"threshold": 0},
        {"bucket_size": -1},
        {"bucket_size": 0},
        {"bucket_size": 5},
        {"grad_scale": 0.0},
        {"grad_scale": -2.5},
        {"reduce_dtype": torch.float64},
        *({"optimizer_level": level} for level in ("level1", "level2", "level3", *OptimizerLevel)),
    ],
    ids=str,
)
@sim.ranks(2, backends=("sim",))
def test_the_ends_of_what_is_allowed(ctx, options):
    model = hsdp(nn.Linear(4, 4), **options)
    model(torch.ones(1, 4)).sum().backward()
    assert isinstance(model, HSDPCell)
    assert model.weight.grad is not None


@sim.ranks(4, backends=("sim",))
def test_arguments_are_positional_in_the_order_of_the_signature(ctx):
    model = hsdp(nn.Linear(4, 4), 2, 0, "level2", True, True, 2.0, torch.float64, True, True, -1)
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grads()
    assert (model.weight.hsdp_effective_shard_size, model.bias.grad) == (2, None)


# -- parameters, and what has been wrapped -------------------------------------------------------------------------


def with_attribute(value, name="weight"):
    model = net()
    getattr(model[0], name).hsdp_shard_size = value
    hsdp(model)


def tied_across():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    hsdp(first)
    hsdp(second)


def both(outer, inner):
    outer(inner(nn.Linear(4, 4)))


def half_on_meta():
    hsdp(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def after_a_backward():
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    hsdp(model)


def with_a_hook():
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: None)
    hsdp(model)


def partial():
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False))
    hsdp(model)


class Elsewhere(torch.Tensor):
    """A tensor that says it lives on a device this machine does not have."""

    @property
    def device(self):
        return torch.device("vulkan")


def several_devices():
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(Elsewhere(torch.ones(2)))
    hsdp(model)


CELLS = {
    "twice": (lambda: hsdp(one()), r"it is wrapped already\n  seen: a second hsdp of the same module"),
    "fully_shard first": (lambda: both(hsdp, fully_shard), r"it is wrapped already\n  seen: a second hsdp of the same"),
    "hsdp first": (lambda: both(fully_shard, hsdp), r"it is wrapped already\n  seen: a second fully_shard of the same"),
    "tied across cells": (
        tied_across,
        r"it is the same as 'weight', which another unit already manages\n  seen: one tensor in two units, whose",
    ),
    "half on meta": (half_on_meta, r"on the meta device, others have data\n  on meta: 1.weight, 1.bias"),
    "gradient": (after_a_backward, r"it has a gradient, which would be lost\n  seen: a backward before hsdp"),
    "hook": (with_a_hook, r"it has hooks, which would be lost: the parameter is replaced by a sharded one"),
    "lazy": (lambda: hsdp(nn.LazyLinear(3)), r"it has no shape yet\n  seen: a lazy module that has not run\n  try: r"),
    "partial": (partial, r"hsdp cannot manage parameter 'weight': it is a DTensor with placement P\(sum\)"),
    "devices": (several_devices, r"its parameters are on several devices\n  seen: cpu, vulkan\n  try: cell\.to\(devic"),
    "attribute 0": (lambda: with_attribute(0), r"hsdp_shard_size of parameter '0\.weight' must be at least 1\n  hsdp_"),
    "attribute -2": (lambda: with_attribute(-2), r"hsdp_shard_size of parameter '0\.weight' must be at least 1"),
    "attribute text": (lambda: with_attribute("all"), r"hsdp_shard_size of parameter '0\.weight' is a str, not an int"),
}


@pytest.mark.parametrize("case", CELLS)
def test_cells(case):
    call, match = CELLS[case]
    text = fails_on_ranks(call, (ValueError, TypeError), match)
    if case in ("gradient", "tied across cells", "half on meta"):
        assert "fully_shard" not in text, "it says its own name"


@sim.ranks(2, backends=("sim",))
def test_a_failed_call_changes_nothing(ctx):
    model = net()
    model[1].bias.hsdp_shard_size = 0
    with pytest.raises(ValueError, match=r"hsdp_shard_size of parameter '1.bias'"):
        hsdp(model, threshold=0)
    left = [type(p) for p in model.parameters()], type(model), len(model._forward_hooks), model.training
    marked = [hasattr(p, "hsdp_effective_shard_size") for p in model.parameters()]
    model[1].bias.hsdp_shard_size = 1
    hsdp(model, threshold=0)
    assert (left, any(marked), [p.hsdp_effective_shard_size for p in model.parameters()]) == (
        ([nn.Parameter] * 4, nn.Sequential, 0, True),
        False,
        [2, 2, 2, 1],
    )


def test_no_process_group():
    with pytest.raises(
        ValueError, match=r"torch.distributed is not initialised\n  seen: no default .*\n  try: torch.d"
    ):
        hsdp(nn.Linear(1, 1))


# -- methods -------------------------------------------------------------------------------------------------------


def unwrapped():
    """Has the methods, but no unit."""
    module = nn.Linear(1, 1)
    object.__setattr__(module, "__class__", type("Unwrapped", (HSDPCell, nn.Linear), {}))
    return module


METHODS = {
    "forward item": (
        lambda m: m.set_forward_prefetch_cells([m, nn.Linear(1, 1)]),
        r"item 1, a Linear, was not wrapped by hsdp\n  seen: 2 items",
    ),
    "backward item": (lambda m: m.set_backward_prefetch_cells((3,)), r"item 0, a int, was not wrapped by hsdp"),
    "other face": (
        lambda m: m.set_backward_prefetch_cells([m, m, fully_shard(nn.Linear(1, 1))]),
        r"item 2, a Linear, was not wrapped by hsdp\n  seen: 3 items",
    ),
    "item without a unit": (
        lambda m: m.set_forward_prefetch_cells([unwrapped()]),
        r"item 0, a Unwrapped, was not wrapped by hsdp\n  seen: 1 items",
    ),
}


@pytest.mark.parametrize("case", METHODS)
def test_methods(case):
    call, match = METHODS[case]
    fails_on_ranks(lambda: call(one()), ValueError, match)


@sim.ranks(2, backends=("sim",))
def test_a_refused_list_leaves_the_prefetching_as_it_was(ctx):
    model = hsdp(nn.Sequential(hsdp(nn.Linear(4, 4)), hsdp(nn.Linear(4, 4))))
    model.set_forward_prefetch_cells([model[1]])
    before = model._hyper_parallel_unit.forward_prefetch
    with pytest.raises(ValueError, match="item 1"):
        model.set_forward_prefetch_cells([model[0], nn.Linear(1, 1)])
    assert model._hyper_parallel_unit.forward_prefetch is before
    assert len(before) == 1


@pytest.mark.parametrize("kind", ["plain", "class without a unit", "container of cells", "no module"])
@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("set_requires_grad_sync", (True,)),
        ("zero_grads", ()),
        ("set_forward_prefetch_cells", ([],)),
        ("set_backward_prefetch_cells", ([],)),
    ],
)
def test_methods_of_what_was_never_wrapped(kind, method, argument):
    def call():
        module = {
            "plain": lambda: nn.Linear(1, 1),
            "class without a unit": unwrapped,
            "container of cells": lambda: nn.Sequential(one()),
            "no module": lambda: 3,
        }[kind]()
        getattr(HSDPCell, method)(module, *argument)

    name = {"plain": "Linear", "class without a unit": "Unwrapped", "container of cells": "Sequential"}.get(kind, "int")
    fails_on_ranks(
        call, ValueError, rf"^cannot change how a {name} communicates: it was never wrapped\n  seen: .*\n  try: .*hsdp"
    )
