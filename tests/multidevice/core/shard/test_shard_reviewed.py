"""Sharded models beside training: copies, second derivatives, and code that cannot be right."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from rounding_kit import tolerances
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel import ShardingPlan, distribute_tensor, full_tensor, fully_shard, shard_module
from hyper_parallel.models import Llama, LlamaConfig, llama_loss, llama_plan

SHARE = (Shard(0), Partial())
ROWS = ("dp", "None")
WEIGHTS = {"**.up.weight": ("tp", "None"), "**.down.weight": ("None", "tp"), "**.scale": ("None",)}


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.scale = nn.Parameter(torch.rand(1) + 0.5)

    def forward(self, x):
        return self.down(F.silu(self.up(x)) * self.scale)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = FeedForward(), FeedForward()

    def forward(self, x):
        x = x + self.first(x)
        return x + self.second(x)


class Inside(Model):
    """Two modules in a row, the second one recomputed in backward."""

    reentrant = False

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


def make(kind=Model, dtype=torch.float64):
    torch.manual_seed(0)
    return kind().to(dtype)


def batch(dtype=torch.float64):
    return torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


def plan(*, local: bool) -> ShardingPlan:
    parts = ("first", "second")
    return ShardingPlan(
        plan=WEIGHTS,
        input_plan=dict.fromkeys((f"{part}.input" for part in parts), ROWS),
        output_plan=dict.fromkeys((f"{part}.output" for part in parts), ROWS),
        local_plan=dict.fromkeys(parts, SHARE) if local else None,
    )


def mesh_of(device="cpu"):
    return init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))


def penalty(model, x):
    """The square of the gradient, which is differentiated again."""
    found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
    total = found[0].square().sum()
    for each in found[1:]:
        total = total + each.square().sum()
    return total


def penalty_in_float32():
    model = make(dtype=torch.float32)
    penalty(model, batch(torch.float32)).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def assert_gradients(model, reference):
    wanted = [full.grad for full in reference.parameters()]
    close = tolerances(wanted, penalty_in_float32, rtol=1e-11, atol=1e-12)
    for (name, param), full in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(full_tensor(param.grad).cpu(), full, **close, msg=name)


@sim.ranks(4)
def test_gradients_of_gradients(ctx):
    reference = make(dtype=ctx.float_dtype)
    penalty(reference, batch(ctx.float_dtype)).backward()
    mesh = mesh_of(ctx.device_type)
    for local in (False, True):
        model = shard_module(make(dtype=ctx.float_dtype).to(ctx.device), mesh, plan(local=local))
        penalty(model, distribute_tensor(batch(ctx.float_dtype).to(ctx.device), mesh, ROWS)).backward()
        assert_gradients(model, reference)


def test_copies_of_a_model_that_has_gradients():
    reference = make()
    reference(batch()).square().mean().backward()

    def body():
        mesh = mesh_of()
        model = shard_module(make(), mesh, plan(local=True))
        x = distribute_tensor(batch(), mesh, ROWS)
        for _ in range(3):
            model(x).square().mean().backward()
            model = copy.deepcopy(model)  # of memory that is known by weak references, which must not be freed twice
            model.zero_grad()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        torch.testing.assert_close(full_tensor(averaged(x)), reference(batch()))
        assert pickle.dumps(model)
        model(x).square().mean().backward()
        assert_gradients(model, reference)

    sim.run(body, world_size=4)


def _cast(model):
    return model.float().bfloat16().float().double()


def _loaded(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def _unfrozen(model):
    return model.requires_grad_(False).requires_grad_(True)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(
    "change", [copy.deepcopy, _cast, _loaded, _unfrozen], ids=["copied", "cast", "loaded", "unfrozen"]
)
def test_gradients_of_parameters_that_are_new_ones_lie_as_they_do(change, local):
    def body():
        mesh = mesh_of()
        model = change(shard_module(make(), mesh, plan(local=local)))
        x = distribute_tensor(batch(), mesh, ROWS)
        reference = make()
        reference.load_state_dict({name: full_tensor(value) for name, value in model.state_dict().items()})
        reference(batch()).square().mean().backward()
        seen = []
        model.first.scale.register_hook(lambda grad: seen.append(grad.placements))
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
        assert_gradients(model, reference)
        assert all(param.grad.placements == param.placements for param in model.parameters())
        assert len(seen) == 2  # a hook of the user's own is called once per backward pass
        assert len(model.first.up.weight._backward_hooks) == 1

    sim.run(body, world_size=4)


def test_units_of_fully_shard_see_to_gradients_themselves():
    def body():
        mesh = mesh_of()
        model = shard_module(make(), mesh["tp"], ShardingPlan(plan=WEIGHTS))
        fully_shard(model, mesh=mesh["dp"])
        x = distribute_tensor(batch().chunk(2)[mesh["dp"].get_local_rank()], mesh["tp"], ("None",))
        model(x).square().mean().backward()
        return [param._backward_hooks for param in model.parameters()]

    assert not any(hooks for rank in sim.run(body, world_size=4) for hooks in rank)


@pytest.mark.parametrize("further", [False, True])
def test_a_trained_parameter_without_a_layout_where_ranks_do_shares(further):
    def body():
        mesh = mesh_of()
        planned = mesh["tp"] if further else mesh
        share = (Partial(),) if further else SHARE
        weights = {path: layout for path, layout in WEIGHTS.items() if not path.endswith("scale")}
        plan = ShardingPlan(plan=weights, output_plan={"output": ("None",)}, local_plan={"": share})
        model = shard_module(make(FeedForward), planned, plan)
        if further:
            fully_shard(model, mesh=mesh["dp"])
        x = distribute_tensor(batch(), planned, ("None",))
        with pytest.raises(
            ValueError, match=r"(?s)'scale' has no layout, and over .*'tp' its gradients.*try: a layout"
        ):
            model(x)
        assert type(model.up.weight) is not torch.Tensor  # no part stands in front of a parameter
        with torch.no_grad():
            model(x)
        model.scale.requires_grad_(False)
        model(x)

    sim.run(body, world_size=4)


def test_a_trained_parameter_without_a_layout_where_ranks_repeat_the_work():
    reference = make(FeedForward)
    reference(batch()).square().mean().backward()

    def body():
        mesh = mesh_of()["tp"]
        model = shard_module(make(FeedForward), mesh, ShardingPlan(local_plan={"": ("None",)}))
        model(distribute_tensor(batch(), mesh, ("None",))).square().mean().backward()
        for param, full in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad, full.grad)

    sim.run(body, world_size=4)


@dataclass
class Result:
    value: torch.Tensor


class InADataclass(FeedForward):
    def forward(self, x):
        return Result(super().forward(x))


def test_a_result_that_is_no_tensor_is_not_handed_on_as_a_part():
    def body():
        mesh = mesh_of()
        model = shard_module(make(InADataclass), mesh, ShardingPlan(plan=WEIGHTS, local_plan={"": SHARE}))
        with pytest.raises(ValueError, match=r"it is a Result, not a tensor\n.*\n  try: a tensor, or a list"):
            model(distribute_tensor(batch(), mesh, ROWS))

    sim.run(body, world_size=4)


class LastOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, last=False, kind=None):
        y = self.linear(x)
        return y[:, -1:] if last or kind == "last" else y


def test_results_whose_shape_depends_on_a_flag():
    def body():
        mesh = mesh_of()
        plan = ShardingPlan(plan={"linear.*": ("None",)}, local_plan={"": ROWS})
        model = shard_module(make(LastOnly), mesh, plan)
        x = distribute_tensor(batch(), mesh, ROWS)
        calls = [{}, {"last": True}, {"kind": "last"}, {"kind": "all"}, {"last": False}]
        return [tuple(model(x, **call).shape) for call in calls]

    assert sim.run(body, world_size=4)[0] == [(6, 8), (6, 1), (6, 1), (6, 8), (6, 8)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_between_modules_inside_of_another(reentrant):
    """A reentrant one computes again with tensors that carry no marks: shares of a sum must not pass as the whole."""
    reference = make(Inside)
    reference(batch()).square().mean().backward()

    def body():
        mesh = mesh_of()
        plan = ShardingPlan(
            plan=WEIGHTS,
            input_plan={"input": ROWS, "first.input": ROWS, "second.input": ROWS},
            output_plan={"second.output": ROWS},
            local_plan={"": ROWS, "first": SHARE, "second": SHARE},
            wrap_inputs=True,
        )
        model = shard_module(make(Inside), mesh, plan)
        model.reentrant = reentrant
        loss = model(distribute_tensor(batch(), mesh, ROWS)).square().mean()
        if not reentrant:
            loss.backward()
            assert_gradients(model, reference)
            return
        with pytest.raises(
            ValueError, match=r"inputs of module 'second': nothing says .*\n.*\n  try: .*use_reentrant="
        ):
            loss.backward()

    sim.run(body, world_size=4)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
@pytest.mark.parametrize(("weight", "produced"), [("width", ("dp", "tp")), ("whole", ROWS), ("vocabulary", SHARE)])
def test_embeddings_that_need_all_tokens_or_rows(option, weight, produced):
    layouts = {"width": ("None", "tp"), "whole": ("None",), "vocabulary": ("tp", "None")}

    def body():
        mesh = mesh_of()
        model = nn.Sequential(nn.Embedding(10, 8, **option))
        shard_module(model, mesh, ShardingPlan(plan={"0.weight": layouts[weight]}, local_plan={"0": produced}))
        tokens = distribute_tensor(torch.tensor([1, 2, 2, 9]), mesh, ("dp",))
        with pytest.raises(ValueError, match=f"(?s)cannot look up tokens.*{next(iter(option))}.*try: "):
            model(tokens)
        assert isinstance(model[0].weight, DTensor)

    sim.run(body, world_size=4)


LLAMA = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=42,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_seq_len=16,
)


def trained(model, text, loss):
    for _ in range(2):
        model.zero_grad()
        loss(model(text[:, :-1]), text[:, 1:]).backward()
    return model


def text_of(rows):
    return torch.randint(0, 50, (rows, 9), generator=torch.Generator().manual_seed(1))


def alone(rows):
    return trained(Llama.build(LLAMA).double(), text_of(rows), llama_loss)


def test_layers_that_are_compiled_one_by_one():
    reference = alone(4)

    def body():
        mesh = mesh_of()
        model = shard_module(Llama.build(LLAMA).double(), mesh, llama_plan(LLAMA, mesh))
        for layer in model.layers:
            layer.compile(backend="eager")
        rows = text_of(4).chunk(2)[mesh["dp"].get_local_rank()]
        assert_gradients(trained(model, rows, llama_loss), reference)

    sim.run(body, world_size=4)


def test_a_rank_without_rows():
    reference = alone(3)

    def body():
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model = shard_module(Llama.build(LLAMA).double(), mesh, llama_plan(LLAMA, mesh))
        assert_gradients(trained(model, distribute_tensor(text_of(3), mesh, ("dp",)), llama_loss), reference)

    sim.run(body, world_size=8)


def test_a_parameter_that_is_a_single_number():
    def body():
        mesh = mesh_of()
        model = nn.Module()
        model.scale = nn.Parameter(torch.tensor(2.0))
        told = r"the 0 of parameter 'scale'\n.*\n  try: \(Replicate\(\), Replicate\(\)\), one per axis"
        with pytest.raises(ValueError, match=told):
            shard_module(model, mesh, ShardingPlan(plan={"scale": ("None",)}))
        shard_module(model, mesh, ShardingPlan(plan={"scale": (Replicate(), Replicate())}))
        assert isinstance(model.scale, DTensor)

    sim.run(body, world_size=4)
