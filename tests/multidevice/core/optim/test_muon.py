"""Training by Muon on sharded parameters, against `torch.optim.Muon` and AdamW on one device."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sim
from hyper_parallel.core.checkpoint.api import load_checkpoint, read_metadata, save_checkpoint
from hyper_parallel.core.checkpoint.optimizer import model_tensors, optimizer_targets, optimizer_tensors
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy
from hyper_parallel.core.optim.muon import Muon
from hyper_parallel.core.redistribute.api import full_tensor

pytestmark = pytest.mark.tier("test")

LR = 0.02


class Experts(nn.Module):
    """An embedding, a stack of three matrices, a tall matrix and a bias."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.experts = nn.Parameter(torch.randn(3, 8, 8) / 3)
        self.up = nn.Linear(8, 20)
        self.down = nn.Linear(20, 8, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = torch.einsum("bth,ehi->bti", x, self.experts)
        return x + self.down(torch.relu(self.up(x)))


def model(device):
    torch.manual_seed(3)
    return Experts().to(device)


def optimizer_of(module):
    hidden = [p for name, p in module.named_parameters() if p.ndim >= 2 and "embed" not in name]
    rest = [p for p in module.parameters() if all(p is not other for other in hidden)]
    return Muon([{"params": hidden}, {"params": rest, "use_muon": False, "betas": (0.9, 0.95)}], lr=LR)


def train(module, ids, steps, optimizer):
    for step in range(steps):
        module(ids[step]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def batches(device):
    return torch.randint(0, 11, (3, 4, 5), generator=torch.Generator().manual_seed(1)).to(device)


def sharded(mesh, device, **options):
    module = model(device)
    if "tp" in mesh.mesh_dim_names:
        parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(module.up, mesh=mesh["dp"], **options)
    fully_shard(module, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else None, **options)
    module.set_reduce_op_type("avg")
    return module


def moved(module, start, reference):
    """How far the parameters are from those of one device, in parts of the way that these went."""
    apart = {}
    for name, param in module.named_parameters():
        was, wanted = start[name], reference[name]
        apart[name] = (full_tensor(param.detach()) if hasattr(param, "placements") else param.detach()) - wanted
        apart[name] = (apart[name].norm() / (wanted - was).norm()).item()
    return apart


def on_one_device(device):
    """Weights before and after three steps of torch's own two optimizers; each expert is a matrix of its own."""
    module = model(device)
    start = {name: param.detach().clone() for name, param in module.named_parameters()}
    matrices = [module.up.weight, module.down.weight]
    experts = [nn.Parameter(expert.detach().clone()) for expert in module.experts]
    muon = torch.optim.Muon([*matrices, *experts], lr=LR)
    rest = torch.optim.AdamW([module.embed.weight, module.up.bias], lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    for ids in batches(device):
        module(ids).square().mean().backward()
        for expert, grad in zip(experts, module.experts.grad, strict=True):
            expert.grad = grad.clone()
        muon.step()
        rest.step()
        with torch.no_grad():
            module.experts.copy_(torch.stack([expert.detach() for expert in experts]))
        module.zero_grad()
    return start, {name: param.detach().clone() for name, param in module.named_parameters()}


@sim.ranks(4)
@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_a_training_step(ctx, axes):
    start, reference = on_one_device(ctx.device)
    mesh = init_device_mesh(ctx.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    module = sharded(mesh, ctx.device)
    train(module, batches(ctx.device), 3, optimizer_of(module))
    assert max(moved(module, start, reference).values()) < 0.03  # bfloat16's rounding, which the iterations amplify


@sim.ranks(2)
def test_main_gradients_are_what_it_takes(ctx):
    mesh = init_device_mesh(ctx.device_type, (2,), mesh_dim_names=("dp",))
    found = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=True)):
        module = sharded(mesh, ctx.device, mp_policy=policy)
        optimizer = optimizer_of(module)
        train(module, batches(ctx.device), 3, optimizer)
        assert all(getattr(param, "main_grad", None) is None for param in module.parameters()), "cleared"
        module(batches(ctx.device)[0]).square().mean().backward()
        optimizer.zero_grad(set_to_none=False)
        kept = [param.grad if param.grad is not None else param.main_grad for param in module.parameters()]
        assert not any(full_tensor(grad).any() for grad in kept)
        found.append([full_tensor(param.detach()) for param in module.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@sim.ranks(4)
def test_shards_that_are_orthogonalised_apart_are_something_else(ctx):
    start, reference = on_one_device(ctx.device)
    module = sharded(init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("dp",)), ctx.device)
    optimizer, ids = optimizer_of(module), batches(ctx.device)
    for step in range(3):
        module(ids[step]).square().mean().backward()
        local = nn.Parameter(module.up.weight.to_local())
        local.grad = module.up.weight.grad.to_local()
        torch.optim.Muon([local], lr=LR).step()
        module.up.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    assert moved(module, start, reference)["up.weight"] > 0.3


@pytest.mark.tier("full")
@sim.ranks(4)
def test_a_checkpoint_goes_on_with_other_shards(ctx, tmp_path):
    mesh = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("dp",))
    module, ids = sharded(mesh, ctx.device), batches(ctx.device)
    optimizer = optimizer_of(module)
    train(module, ids, 2, optimizer)
    state, groups = optimizer_tensors(module, optimizer)
    assert {key.split(".")[-1] for key in state} == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    folder = tmp_path
    save_checkpoint(folder / "step2", {**model_tensors(module), **state}, {"optimizer": groups})
    other = sharded(init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp")), ctx.device)
    its = optimizer_of(other)
    targets = optimizer_targets(other, its, read_metadata(folder / "step2"))
    load_checkpoint(folder / "step2", {**model_tensors(other), **targets})
    start, reference = on_one_device(ctx.device)
    train(other, ids[2:], 1, its)
    found = moved(other, start, reference)
    assert max(found.values()) < 0.03, found
