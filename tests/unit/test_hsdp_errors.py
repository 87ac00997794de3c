"""Mistakes in calling hsdp: a ValueError of four parts, on every rank, before anything is sent or changed."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import sim
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.policy import OptimizerLevel
from hyper_parallel.core.hsdp.api import HSDPCell, hsdp

pytestmark = pytest.mark.sim


def fails_on_every_rank(call, match, *, world_size=2):
    """`call` raises a ValueError on each rank, with the same text of four parts, and nothing has been sent."""

    def rank():
        with pytest.raises(ValueError, match=match) as caught:
            call()
        return str(caught.value)

    with sim.world(world_size) as world:
        texts = world.run(rank)
        assert world.trace.events == []
    assert len(set(texts)) == 1
    first, *middle, last = texts[0].splitlines()
    assert first.strip() == first
    assert first
    assert middle
    assert all(line.startswith("  ") for line in middle)
    assert last.startswith("  try: ")
    return texts[0]


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def one(**options):
    return hsdp(nn.Linear(4, 4), **options)


def wrapped(**options):
    return hsdp(nn.Linear(4, 4), **options)


# -- arguments -----------------------------------------------------------------------------------------------------

BOOL = r"it takes True or False\n  seen: a {}\n  try: {}=True$"
SIZE = r"it takes an int of at least 1, or -1\n  seen: a {}\n  try: shard_size=-1, which means all ranks$"

ARGUMENTS = {
    "no module": (lambda: hsdp(3), r"cannot use 3 as cell: it takes a module\n  seen: a int\n  try: hsdp\(model\)$"),
    "None": (lambda: hsdp(None), r"cannot use None as cell"),
    "list": (lambda: hsdp([nn.Linear(1, 1)]), r"as cell: it takes a module\n  seen: a list\n"),
    "tuple": (lambda: hsdp((nn.Linear(1, 1),)), r"as cell: it takes a module\n  seen: a tuple\n"),
    "class": (
        lambda: hsdp(nn.Linear),
        r"cannot use <class 'torch.*Linear'> as cell: it takes a module\n  seen: a type",
    ),
    "parameter": (lambda: hsdp(nn.Parameter(torch.ones(2))), r"as cell: it takes a module\n"),
    "container": (
        lambda: hsdp(nn.ModuleList([nn.Linear(1, 1)])),
        r"^ModuleList has no forward of its own.*\n.*\n.*hsdp",
    ),
    "dict": (lambda: hsdp(nn.ModuleDict()), r"^ModuleDict has no forward of its own"),
    "size 0": (lambda: one(shard_size=0), "cannot use 0 as shard_size: " + SIZE.format("int")),
    "size -2": (lambda: one(shard_size=-2), "cannot use -2 as shard_size: " + SIZE.format("int")),
    "size bool": (lambda: one(shard_size=True), "cannot use True as shard_size: " + SIZE.format("bool")),
    "size float": (lambda: one(shard_size=2.0), r"cannot use 2.0 as shard_size: " + SIZE.format("float")),
    "size text": (lambda: one(shard_size="2"), r"cannot use '2' as shard_size: " + SIZE.format("str")),
    "size None": (lambda: one(shard_size=None), r"cannot use None as shard_size: " + SIZE.format("NoneType")),
    "size numpy": (lambda: one(shard_size=np.int64(2)), r"cannot use .*2.* as shard_size: " + SIZE.format("int64")),
    "threshold -1": (
        lambda: one(threshold=-1),
        r"cannot use -1 as threshold: it takes an int of at least 0\n  seen: a int\n  try: threshold=64, in KB$",
    ),
    "threshold bool": (lambda: one(threshold=False), r"cannot use False as threshold: .*\n  seen: a bool"),
    "threshold float": (lambda: one(threshold=0.5), r"cannot use 0.5 as threshold: .*\n  seen: a float"),
    "threshold None": (lambda: one(threshold=None), r"cannot use None as threshold: .*\n  seen: a NoneType"),
    "bucket -2": (
        lambda: one(bucket_size=-2, comm_fusion=True),
        r"use -2 as bucket_size: it takes an int of at least -1\n  seen: a int\n  try: bucket_size=-1, or a s",
    ),
    "bucket unused": (lambda: one(bucket_size=-2), r"cannot use -2 as bucket_size"),
    "bucket bool": (lambda: one(bucket_size=True), r"cannot use True as bucket_size: .*\n  seen: a bool"),
    "bucket float": (lambda: one(bucket_size=1.5), r"cannot use 1.5 as bucket_size"),
    "level": (
        lambda: one(optimizer_level="level4"),
        r"cannot use 'level4' as optimizer_level: it takes one of 'level1', 'level2', 'level3'\n  seen: a str\n  try: ",
    ),
    "level case": (lambda: one(optimizer_level="Level1"), r"cannot use 'Level1' as optimizer_level"),
    "level int": (lambda: one(optimizer_level=1), r"cannot use 1 as optimizer_level: .*\n  seen: a int"),
    "level None": (lambda: one(optimizer_level=None), r"cannot use None as optimizer_level"),
    "level list": (lambda: one(optimizer_level=["level1"]), r"cannot use \['level1'\] as optimizer_level"),
    "level array": (
        lambda: one(optimizer_level=np.array(["level1", "x"])),
        r"as optimizer_level: .*\n  seen: a ndarray",
    ),
    "level name": (lambda: one(optimizer_level="SHARD_OPT"), r"cannot use 'SHARD_OPT' as optimizer_level"),
    "scale int": (
        lambda: one(grad_scale=1),
        r"cannot use 1 as grad_scale: it takes a float\n  seen: a int\n  try: grad_scale=1.0$",
    ),
    "scale bool": (lambda: one(grad_scale=True), r"cannot use True as grad_scale"),
    "scale text": (lambda: one(grad_scale="1.0"), r"cannot use '1.0' as grad_scale"),
    "scale None": (lambda: one(grad_scale=None), r"cannot use None as grad_scale"),
    "scale tensor": (lambda: one(grad_scale=torch.tensor(1.0)), r"cannot use tensor\(1.\) as grad_scale"),
    "dtype text": (
        lambda: one(reduce_dtype="bf16"),
        r"cannot use 'bf16' as reduce_dtype: it takes a floating-point torch.dtype or None\n  seen: a str\n  try: red",
    ),
    "dtype python": (lambda: one(reduce_dtype=float), r"cannot use <class 'float'> as reduce_dtype"),
    "dtype int": (lambda: one(reduce_dtype=torch.int32), r"cannot use torch.int32 as reduce_dtype"),
    "dtype complex": (lambda: one(reduce_dtype=torch.complex64), r"cannot use torch.complex64 as reduce_dtype"),
    "dtype bool": (lambda: one(reduce_dtype=False), r"cannot use False as reduce_dtype"),
    "accumulation": (
        lambda: one(enable_grad_accumulation=1),
        r"cannot use 1 as enable_grad_accumulation: " + BOOL.format("int", "enable_grad_accumulation"),
    ),
    "eager hook": (
        lambda: one(use_eager_hook=None),
        r"cannot use None as use_eager_hook: " + BOOL.format(".*", "use_.*"),
    ),
    "async": (lambda: one(comm_async=0), r"cannot use 0 as comm_async: " + BOOL.format("int", "comm_async")),
    "fusion": (
        lambda: one(comm_fusion="yes"),
        r"cannot use 'yes' as comm_fusion: " + BOOL.format("str", "comm_fusion"),
    ),
    "fusion numpy": (lambda: one(comm_fusion=np.bool_(True)), r"cannot use .*True.* as comm_fusion"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case):
    fails_on_every_rank(*ARGUMENTS[case])


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
def test_the_ends_of_what_is_allowed(options):
    def rank():
        model = hsdp(nn.Linear(4, 4), **options)
        model(torch.ones(1, 4)).sum().backward()
        return isinstance(model, HSDPCell) and model.weight.grad is not None

    assert sim.run(rank, 2) == [True, True]


def test_arguments_are_positional_in_the_order_of_the_signature():
    def rank():
        model = hsdp(nn.Linear(4, 4), 2, 0, "level2", True, True, 2.0, torch.float64, True, True, -1)
        model(torch.ones(1, 4)).sum().backward()
        model.zero_grads()
        return model.weight.hsdp_effective_shard_size, model.bias.grad

    assert sim.run(rank, 4) == [(2, None)] * 4


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
    "twice": (lambda: hsdp(wrapped()), r"^HSDPLinear is wrapped already\n  seen: a second hsdp of the same module\n"),
    "fully_shard first": (lambda: both(hsdp, fully_shard), r"^HSDPLinear is wrapped already\n  seen: a second hsdp of"),
    "hsdp first": (lambda: both(fully_shard, hsdp), r"^HSDPLinear is wrapped already\n  seen: a second fully_shard of"),
    "tied across cells": (
        tied_across,
        r"(?s)'weight' is the same as 'weight', which another unit already manages(?!.*hsdp\(\[)",
    ),
    "half on meta": (half_on_meta, r"on meta: 1.weight, 1.bias"),
    "gradient": (after_a_backward, r"parameter 'weight' has a gradient, which would be lost\n  seen: .* before hsdp\n"),
    "hook": (with_a_hook, r"parameter 'weight' has hooks, which would be lost"),
    "lazy": (lambda: hsdp(nn.LazyLinear(3)), r"parameter 'weight' has no shape yet.*\n.*\n.* before hsdp$"),
    "partial": (partial, r"^hsdp cannot manage parameter 'weight', a DTensor with placement P"),
    "devices": (
        several_devices,
        r"hsdp cannot choose a device: the cell's .* on several\n  seen: cpu, vulkan\n  try: ",
    ),
    "attribute 0": (
        lambda: with_attribute(0),
        r"cannot use 0 as hsdp_shard_size of parameter '0.weight': it takes an int of at least 1, or -1\n"
        r"  seen: a int\n  try: 0.weight.hsdp_shard_size = 2$",
    ),
    "attribute -2": (lambda: with_attribute(-2), r"cannot use -2 as hsdp_shard_size of parameter '0.weight'"),
    "attribute bool": (
        lambda: with_attribute(True, "bias"),
        r"cannot use True as hsdp_shard_size of parameter '0.bias'",
    ),
    "attribute text": (lambda: with_attribute("all"), r"cannot use 'all' as hsdp_shard_size of parameter '0.weight'"),
    "attribute float": (lambda: with_attribute(2.0), r"cannot use 2.0 as hsdp_shard_size of parameter '0.weight'"),
}


@pytest.mark.parametrize("case", CELLS)
def test_cells(case):
    fails_on_every_rank(*CELLS[case])


def test_a_failed_call_changes_nothing():
    def rank():
        model = net()
        model[1].bias.hsdp_shard_size = "x"
        with pytest.raises(ValueError, match=r"hsdp_shard_size of parameter '1.bias'"):
            hsdp(model, threshold=0)
        left = [type(p) for p in model.parameters()], type(model), len(model._forward_hooks), model.training
        marked = [hasattr(p, "hsdp_effective_shard_size") for p in model.parameters()]
        model[1].bias.hsdp_shard_size = 1
        hsdp(model, threshold=0)
        return left, any(marked), [p.hsdp_effective_shard_size for p in model.parameters()]

    assert sim.run(rank, 2) == [(([nn.Parameter] * 4, nn.Sequential, 0, True), False, [2, 2, 2, 1])] * 2


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
    "sync int": (
        lambda m: m.set_requires_grad_sync(1),
        r"set_requires_grad_sync cannot use 1: the flag is True or False\n  seen: a int\n  try: set_requires",
    ),
    "sync None": (lambda m: m.set_requires_grad_sync(None), r"set_requires_grad_sync cannot use None: "),
    "sync text": (lambda m: m.set_requires_grad_sync("no"), r"set_requires_grad_sync cannot use 'no': "),
    "forward cell": (
        lambda m: m.set_forward_prefetch_cells(m),
        r"set_forward_prefetch_cells cannot use HSDPLinear.*: it takes a list or tuple of cells\n  seen: a HSDPL",
    ),
    "forward None": (lambda m: m.set_forward_prefetch_cells(None), r"set_forward_prefetch_cells cannot use None"),
    "backward set": (
        lambda m: m.set_backward_prefetch_cells({m}),
        r"set_backward_prefetch_cells cannot use {.*seen: a s",
    ),
    "backward range": (lambda m: m.set_backward_prefetch_cells(range(1)), r"cannot use range\(0, 1\): .*seen: a range"),
    "forward item": (
        lambda m: m.set_forward_prefetch_cells([m, nn.Linear(1, 1)]),
        r"set_forward_prefetch_cells cannot use item 1, a Linear: it was not wrapped by hsdp\n  seen: 2 items\n",
    ),
    "backward item": (
        lambda m: m.set_backward_prefetch_cells((3,)),
        r"prefetch_cells cannot use item 0, a int: it was",
    ),
    "other face": (
        lambda m: m.set_backward_prefetch_cells([m, m, fully_shard(nn.Linear(1, 1))]),
        r"set_backward_prefetch_cells cannot use item 2, a HSDPLinear: it was not wrapped by hsdp\n  seen: 3 items",
    ),
    "item without a unit": (
        lambda m: m.set_forward_prefetch_cells([unwrapped()]),
        r"set_forward_prefetch_cells cannot use item 0, a Unwrapped: it was not wrapped by hsdp\n",
    ),
}


@pytest.mark.parametrize("case", METHODS)
def test_methods(case):
    call, match = METHODS[case]
    fails_on_every_rank(lambda: call(wrapped()), "(?s)" + match)


def test_a_refused_list_leaves_the_prefetching_as_it_was():
    def rank():
        model = hsdp(nn.Sequential(hsdp(nn.Linear(4, 4)), hsdp(nn.Linear(4, 4))))
        model.set_forward_prefetch_cells([model[1]])
        before = model._hyper_parallel_unit.forward_prefetch
        with pytest.raises(ValueError, match="item 1"):
            model.set_forward_prefetch_cells([model[0], nn.Linear(1, 1)])
        return model._hyper_parallel_unit.forward_prefetch is before and len(before) == 1

    assert sim.run(rank, 2) == [True, True]


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
            "container of cells": lambda: nn.Sequential(wrapped()),
            "no module": lambda: 3,
        }[kind]()
        getattr(HSDPCell, method)(module, *argument)

    name = {"plain": "Linear", "class without a unit": "Unwrapped", "container of cells": "Sequential"}.get(kind, "int")
    fails_on_every_rank(
        call, rf"^{method} cannot do anything for a {name}: it was never wrapped\n  seen: .*\n  try: hsdp"
    )
