"""Each rank's part of a model that is filled shard by shard is its slice of the model that is filled whole."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel import DTensor, Layout
from hyper_parallel.core.dtensor import to_torch
from hyper_parallel.core.init.api import init_parameters
from hyper_parallel.models import Llama, LlamaConfig

LLAMA = LlamaConfig(vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, max_seq_len=8)


class Net(nn.Module):
    """Modules of torch with all kinds of `reset_parameters`, and one of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=3)
        self.up = nn.Linear(6, 10)
        self.conv = nn.Conv2d(3, 5, 3)
        self.norms = nn.ModuleList([nn.LayerNorm(6), nn.BatchNorm1d(6)])
        self.attention = nn.MultiheadAttention(6, 2)
        self.truncated = nn.Parameter(torch.empty(7, 9, dtype=torch.bfloat16))
        self.tail = nn.Parameter(torch.empty(7, 300))
        self.places = nn.Parameter(torch.empty(5, 7))
        self.register_buffer("table", torch.empty(40))
        self.tied = nn.Linear(6, 11, bias=False)
        self.tied.weight = self.embed.weight

    def reset_parameters(self):
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.7, b=0.7)
        nn.init.trunc_normal_(self.tail, mean=3, std=1, a=4, b=6)
        nn.init.eye_(self.places)
        with torch.no_grad():
            self.places[1:4, ::2] += torch.randn_like(self.places[1:4, ::2]).exp_()
            self.places.t()[-1].uniform_(2, 3)
            self.table.copy_(torch.randperm(40))


def build(make):
    with torch.device("meta"):
        return make()


def split(model, mesh, *entries):
    """Make the parameters of a model on meta DTensors; dims without an entry are not split."""
    done = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in done:
                layout = Layout.from_device_mesh(mesh)(*entries[: parameter.ndim])
                where, placements = to_torch(layout, parameter.shape)
                local = torch.empty(layout.local_shape(parameter.shape), dtype=parameter.dtype, device="meta")
                given = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
                done[parameter] = nn.Parameter(DTensor.from_local(local, where, placements, **given))
            module._parameters[name] = done[parameter]
    return model


def check(ctx, make, mesh, *entries):
    full = init_parameters(build(make), 3, device=ctx.device)
    model = split(build(make), mesh, *entries)
    before = torch.get_rng_state()
    assert init_parameters(model, 3) is model
    assert torch.equal(torch.get_rng_state(), before)
    expected = full.state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == ctx.device_type, name
        if isinstance(tensor, DTensor):
            part = sim.scatter_full(expected[name].cpu(), Layout.of(tensor))
            assert torch.equal(tensor.to_local().cpu(), part), f"{name} {entries}"
        else:
            assert torch.equal(tensor, expected[name]), name
    return model


@pytest.mark.tier("full")
@sim.ranks(4)
def test_every_layout_holds_parts_of_the_same_whole(ctx):
    square = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("dp",))
    for mesh, entries in [
        (flat, ()),
        (flat, ("dp",)),
        (flat, (None, "dp")),
        (square, ("tp", "dp")),
        (square, (("dp", "tp"),)),
        (square, (("tp", "dp"), None)),
        (square, ("dp",)),  # copies along tp
        (square["tp"], (None, "tp")),  # two meshes of two ranks
    ]:
        model = check(ctx, Net, mesh, *entries)
        assert model.tied.weight is model.embed.weight
        sim.check_replicas(model)
    assert (model.embed.weight.to_local()[3] == 0).all()


@pytest.mark.tier("test")
@sim.ranks(4)
def test_a_llama_trains_on_what_was_filled(ctx):
    from hyper_parallel import fully_shard

    mesh = init_device_mesh(ctx.device_type, (4,))
    model = build(lambda: Llama(LLAMA))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    init_parameters(model, 3)
    ids = torch.arange(8, device=ctx.device)[None]
    full = init_parameters(build(lambda: Llama(LLAMA)), 3, device=ctx.device)
    out = model(ids)
    torch.testing.assert_close(out, full(ids), rtol=0, atol=0)
    out.square().mean().backward()
    assert all(parameter.grad.to_local().isfinite().all() for parameter in model.parameters())
