"""The engine of sharded parameters on a rank that lives alone: any tree, wrapped anyhow, communicates as with values.

Each example is on all ranks of up to 4.
"""

from __future__ import annotations

import copy

import pytest
import test_fully_shard_properties as sharded
import test_hsdp_properties as cells
import torch
from hypothesis import assume, given, settings
from mesh_kit import Mode, compare, describe
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hyper_parallel.core.hsdp.api import hsdp_sync_stream

pytestmark = pytest.mark.sim

many = settings(max_examples=max(settings.default.max_examples // 4, 1))


def renew(model):
    """Let the parameters be new ones, full of ones, of the mode that is on; weights that are one stay one."""
    found = {}

    def fresh(tensor):
        if id(tensor) not in found:
            empty = torch.ones(tensor.shape, dtype=tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                empty.__dict__.update(tensor.__dict__)
            found[id(tensor)] = empty
        return found[id(tensor)]

    for module in model.modules():
        for name, tensor in module._parameters.items():
            module._parameters[name] = None if tensor is None else fresh(tensor)
        for name, tensor in module._buffers.items():
            module._buffers[name] = None if tensor is None else fresh(tensor)


def what_is_left(model):
    return [(name, describe(param), describe(param.grad)) for name, param in model.named_parameters()]


def train_units(case, start):
    """A body that wraps the model of a case and trains it; it reads no value."""

    def body(mode: Mode):
        names = ("replicate", "shard")[-len(case.shape) :]
        mesh = init_device_mesh("cpu", case.shape, mesh_dim_names=names)
        model = copy.deepcopy(start)
        with mode():
            renew(model)
            sharded.wrap(model, case, mesh)
            trainable = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trainable, lr=0.01) if case.adam else torch.optim.SGD(trainable, lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                for micro in range(case.accumulate):
                    last = micro == case.accumulate - 1
                    model.set_requires_gradient_sync(last or case.defer != "sync")
                    model.set_requires_all_reduce(last or case.defer != "all_reduce")
                    tokens = torch.arange(sharded.PER_RANK) % sharded.VOCAB
                    loss = nn.functional.cross_entropy(model(tokens), tokens) / case.accumulate
                    loss.backward()
                optimizer.step()
                if case.evaluate:
                    with torch.inference_mode():
                        model(tokens)
            return what_is_left(model)

    return body


@pytest.mark.tier("full")
@many
@given(sharded.cases())
def test_any_tree_wrapped_anyhow_communicates_as_with_values(case):
    torch.manual_seed(case.seed)
    model = case.model.double()
    compare(train_units(case, model), torch.Size(case.shape).numel(), stands_for=case.stands_for)


def train_cells(case, start):
    """A body that wraps the model of a case by `hsdp` and trains it; it reads no value."""

    def body(mode: Mode):
        model = copy.deepcopy(start)
        with mode():
            renew(model)
            cells.wrap(model, case)
            trainable = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.5)
            x = torch.ones(cells.PER_RANK, cells.WIDTH, dtype=torch.float64)
            for _ in range(2):
                optimizer.zero_grad()
                if case.false_start:
                    model.set_requires_grad_sync(False)
                    model(x).square().mean().backward()
                    model.zero_grads()
                for micro in range(case.micros):
                    model.set_requires_grad_sync(micro == case.micros - 1)
                    (model(x).square().mean() / case.micros).backward()
                hsdp_sync_stream()
                optimizer.step()
                if case.evaluate:
                    with torch.no_grad():
                        model(x)
            return what_is_left(model)

    return body


@pytest.mark.tier("full")
@many
@given(cells.cases())
def test_any_cells_communicate_as_with_values(case):
    """But for gradients that wait for a later micro-batch and are shown meanwhile: that asks which parameters any rank
    has used, which are values."""
    waits = case.micros > 1 or case.false_start
    assume(not (waits and any(way["enable_grad_accumulation"] for _, way in case.cells)))
    torch.manual_seed(case.seed)
    compare(train_cells(case, case.model.double()), case.ranks)
