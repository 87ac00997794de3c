"""Models of transformers train sharded as on a single device: losses, gradients of every step, and parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

import sim
from hyper_parallel import DTensor, Layout, full_tensor, fully_shard, hsdp, init_device_mesh
from hyper_parallel.core.shard.api import shard_module
from hyper_parallel.core.shard.loss import vocab_parallel_cross_entropy
from hyper_parallel.models import huggingface_plan, parallelize_huggingface

pytestmark = pytest.mark.tier("test")

transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 or later is not installed")
transformers.logging.set_verbosity_error()

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "use_cache": False,
}
OWN = {  # by the name of the class
    "Qwen3": {"head_dim": 16, "num_attention_heads": 8},
    "Mistral": {"sliding_window": 4},
    "Mixtral": {"num_local_experts": 4, "experts_implementation": "eager"},
}
ROWS = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(4, 7, dtype=torch.long)
MASK[0, :2] = MASK[3, :1] = 0
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        kind: of model.
        mesh: the axes.
        further: None: the mesh is sharded over as a whole, otherwise what splits parameters over dp after it.
        mask: whether some positions are masked.
        config: beside the tiny sizes.
        options: of `parallelize_huggingface`.
    """

    kind: str
    mesh: dict[str, int]
    further: str | None = None
    mask: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [
            self.kind,
            *(f"{name}{size}" for name, size in self.mesh.items()),
            *([self.further] * bool(self.further)),
        ]
        said += ["mask"] * self.mask + [f"{name}={value}" for name, value in {**self.config, **self.options}.items()]
        return "-".join(said)


class InDouble(TorchFunctionMode):
    """Norms, router and loss of transformers compute in float32; here in float64, so that any fault shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(_doubled, args), **{name: _doubled(value) for name, value in (kwargs or {}).items()})


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def build(case: Case, dtype: torch.dtype = torch.float64) -> nn.Module:
    config = getattr(transformers, f"{case.kind}Config")(**{**SIZES, **OWN.get(case.kind, {}), **case.config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{case.kind}ForCausalLM")(config).to(dtype)
        for param in model.parameters():
            param.data += torch.randn_like(param) / 20  # norms are ones otherwise, and biases zeros
    return model


Run = tuple[list[float], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""The loss and the gradients of each step, and the parameters at the end."""


def train(model: nn.Module, rows: torch.Tensor, mask: torch.Tensor | None, parts: int, show: Callable[..., Any]) -> Run:
    """Train on some rows; every rank's loss counts 1/parts."""
    losses, gradients = [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = model(input_ids=rows, labels=rows, attention_mask=mask).loss / parts
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: show(param.grad).clone() for name, param in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: show(param).detach() for name, param in model.named_parameters()}


def alone(case: Case) -> Run:
    model = build(case)  # not in double: tables of rotary positions are drawn up in it
    with InDouble():
        return train(model, ROWS, MASK if case.mask else None, 1, lambda x: x)


def together(case: Case, model: nn.Module) -> Run:
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    axes = tuple(name for name in case.mesh if name != "tp")
    inner = mesh["tp"] if case.further == "fully_shard" else mesh
    model = copy.deepcopy(model)
    parallelize_huggingface(model, inner, **case.options)
    for module in (*model.model.layers, model):
        if case.further == "fully_shard":
            fully_shard(module, mesh=mesh[axes])
        elif case.further == "hsdp":
            hsdp(module, threshold=0, optimizer_level="level3")
    layout = Layout(tuple(case.mesh.values()), tuple(case.mesh))(axes or "None")
    rows, mask = sim.scatter_full(ROWS, layout), sim.scatter_full(MASK, layout)
    parts = len(ROWS) // len(rows)
    with InDouble():
        losses, gradients, parameters = train(model, rows, mask if case.mask else None, parts, full_tensor)
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total * parts / dist.get_world_size()).tolist(), gradients, parameters


def check_alike(found: Run, wanted: Run, bound: float = 1e-10) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=bound)
    for step, (ours, theirs) in enumerate([*zip(found[1], wanted[1], strict=True), (found[2], wanted[2])]):
        assert ours.keys() == theirs.keys()
        for name, full in theirs.items():
            error = (ours[name] - full).abs().max() / full.abs().max()
            assert error < bound, f"step {step}: {name} differs by {error:.1e}"


EAGER = {"attn_implementation": "eager"}
CASES = [
    Case("Llama", {"tp": 4}, options={"sequence_parallel": False}),
    Case("Llama", {"dp": 2, "tp": 2}, mask=True, config={"tie_word_embeddings": True, **EAGER}),
    Case("Llama", {"dp": 2, "tp": 2}, "fully_shard", mask=True, config={"attention_bias": True, "mlp_bias": True}),
    Case("Llama", {"dp": 2, "tp": 2}, "hsdp"),
    Case("Qwen2", {"dp": 2, "tp": 2}, options={"vocab_parallel": False}),
    Case("Qwen3", {"dp": 2, "tp": 4}),
    Case("Qwen3", {"dp": 2, "tp": 4}, "fully_shard", mask=True, config={"tie_word_embeddings": True}),
    Case("Mistral", {"dp": 2, "tp": 2}),
    Case("Mixtral", {"dp": 2, "tp": 2}, mask=True),
    Case("Mixtral", {"tp": 2}, config={"output_router_logits": True, "router_aux_loss_coef": 0.5, **EAGER}),
    Case("Mixtral", {"dp": 2, "tp": 4}, "fully_shard"),  # some ranks get no tokens for their only expert
    Case("Mixtral", {"tp": 2}, config={"experts_implementation": "batched_mm"}, options={"sequence_parallel": False}),
]


@pytest.mark.tier("full", each=3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_as_one_device_does(case: Case) -> None:
    found = sim.run(together, world_size=math.prod(case.mesh.values()), args=(case, build(case)))
    wanted = alone(case)
    for run in (found[0], found[-1]):
        check_alike(run, wanted)


def test_float32_with_grouped_experts_and_checkpoints() -> None:
    """The fastest experts' code takes no float64; one step, so that rounding is all that differs."""
    case = Case("Mixtral", {"tp": 2}, config={"experts_implementation": "grouped_mm"})
    alone = build(case, torch.float32)
    wanted = alone(input_ids=ROWS, labels=ROWS)
    wanted.loss.backward()

    def body() -> list[tuple[torch.Tensor, ...]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = []
        for saved in (True, False):
            model = parallelize_huggingface(build(case, torch.float32), mesh)
            if not saved:
                getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
            model.train()
            result = model(input_ids=ROWS, labels=ROWS)
            assert type(result) is type(wanted)
            assert torch.equal(result.logits.argmax(-1), wanted.logits.argmax(-1))
            result.loss.backward()
            found.append((result.loss.detach(), *(full_tensor(param.grad) for param in model.parameters())))
        return found

    grads = [param.grad for param in alone.parameters()]
    for ours in sim.run(body, world_size=2)[1]:
        for mine, theirs in zip(ours, [wanted.loss.detach(), *grads], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5 * theirs.abs().max().item())


def test_a_plan_is_enough_for_dense_models() -> None:
    case = Case("Llama", {"dp": 2, "tp": 2})
    alone = build(case)
    with InDouble():
        wanted = alone(input_ids=ROWS, labels=ROWS)

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rows = ROWS.chunk(2)[mesh["dp"].get_local_rank()]
        for logits in ("whole", "split"):
            model = build(case)
            shard_module(model, mesh, huggingface_plan(model, mesh, logits=logits))
            with InDouble():
                result = model(input_ids=rows)
            assert isinstance(result.logits, DTensor)
            assert result.logits.placements[1].is_shard() == (logits == "split")
            torch.testing.assert_close(full_tensor(result.logits), wanted.logits, rtol=1e-10, atol=1e-12)
            loss = vocab_parallel_cross_entropy(result.logits[:, :-1], ROWS[:, 1:])
            torch.testing.assert_close(full_tensor(loss), wanted.loss, rtol=1e-10, atol=0)

    sim.run(body, world_size=4)


def test_embeddings_and_positions_that_are_given() -> None:
    case = Case("Llama", {"dp": 2, "tp": 2}, config=EAGER)
    embeds = torch.randn(4, 7, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    places = torch.arange(7) + torch.arange(4)[:, None]

    def gradient(model: nn.Module, embeds: torch.Tensor, places: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        embeds = embeds.clone().requires_grad_()
        with InDouble():
            model(inputs_embeds=embeds, position_ids=places, labels=labels).loss.backward()
        return embeds.grad

    wanted = gradient(build(case), embeds, places, ROWS)

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rank = mesh["dp"].get_local_rank()
        model = parallelize_huggingface(build(case), mesh)
        found = gradient(model, *(full.chunk(2)[rank] for full in (embeds, places, ROWS)))
        torch.testing.assert_close(found / 2, wanted.chunk(2)[rank], rtol=1e-9, atol=1e-14)

    sim.run(body, world_size=4)


@sim.ranks(2, backends=("sim",))
def test_generates_what_one_device_does(ctx) -> None:
    case = Case("Qwen3", {"tp": 2}, config={"use_cache": True})
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = build(case).generate(ROWS, attention_mask=torch.ones_like(ROWS), **options)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_huggingface(build(case), mesh)
    found = model.generate(ROWS, attention_mask=torch.ones_like(ROWS), **options)
    assert torch.equal(found, wanted)


# -- what is refused -------------------------------------------------------------------------------------------------


def refusal(model: nn.Module, mesh: Any, call: Callable[..., Any] = huggingface_plan) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(model, mesh)
    return str(caught.value)


def test_models_without_a_plan_are_refused() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8)
    assert refusal(transformers.GPT2LMHeadModel(config), {"tp": 2}) == (
        "cannot plan the model: there is no plan for 'gpt2'\n"
        "  model: GPT2LMHeadModel   model types with a plan: llama, mistral, mixtral, qwen2, qwen3\n"
        "  try: one of these, as a ...ForCausalLM; or a ShardingPlan of your own for shard_module"
    )
    assert "it has no head for language modelling" in refusal(build(Case("Llama", {})).model, {"tp": 2})
    assert "not a model of transformers" in refusal(nn.Linear(2, 2), {"tp": 2})


def test_a_mixture_needs_more_than_a_plan() -> None:
    assert refusal(build(Case("Mixtral", {})), {"tp": 2}) == (
        "cannot plan the model: module 'model.layers.0.mlp.experts' needs its code adapted as well, and a plan is "
        "layouts only\n"
        "  model: MixtralForCausalLM\n"
        "  try: parallelize_huggingface(model, mesh)"
    )


def test_degrees_that_do_not_fit_are_refused() -> None:
    case = Case("Mixtral", {}, config={"num_local_experts": 6})
    assert refusal(build(case), {"tp": 4}) == (
        "cannot plan the model: the 4 ranks along 'tp' cannot share num_local_experts=6 evenly\n"
        "  num_attention_heads=4, num_key_value_heads=4, num_local_experts=6   mesh: tp=4\n"
        "  try: a mesh with tp=1 or tp=2"
    )


def test_random_numbers_inside_are_refused() -> None:
    assert "try: attention_dropout=0.0 in the config" in refusal(
        build(Case("Llama", {}, config={"attention_dropout": 0.1})), {"tp": 2}
    )


def test_a_parameter_that_the_plan_does_not_know_is_refused() -> None:
    model = build(Case("Llama", {}))
    model.model.layers[0].mlp.extra = nn.Linear(2, 2)
    assert "parameter 'model.layers.0.mlp.extra.weight' is not one that the plan knows" in refusal(model, {"tp": 2})
