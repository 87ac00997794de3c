"""A Llama under its ready plan trains as on a single device: losses, gradients of every step, and parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rounding_kit import measured

import sim
from hyper_parallel import DTensor, Layout, distribute_tensor, full_tensor, fully_shard, hsdp, init_device_mesh
from hyper_parallel.core.shard.api import shard_module
from hyper_parallel.models import Llama, LlamaConfig, llama_loss, llama_plan

pytestmark = pytest.mark.tier("test")

CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=42,  # neither this nor the vocabulary is a multiple of 4
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_seq_len=16,
)
TIED = replace(CONFIG, tie_embeddings=True)
TEXT = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(1))
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        mesh: the axes.
        further: None: the plan is for the whole mesh, otherwise what splits parameters over dp after it; or "compiled":
            the layers are, one by one.
        seq: tokens per row that the model is given.
        config: of the model.
        options: of `llama_plan`.
        dtype: of the parameters.
    """

    mesh: dict[str, int]
    further: str | None = None
    seq: int = 8
    config: LlamaConfig = CONFIG
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        said = [f"{name}{size}" for name, size in self.mesh.items()] + [self.further] * (self.further is not None)
        said += [f"seq{self.seq}"] * (self.seq != 8) + ["tied"] * self.config.tie_embeddings
        return "-".join([*said, *(f"{name}={value}" for name, value in self.options.items())])


@dataclass
class Outcome:
    """What training gives: per step the loss and the gradients, and the parameters at the end."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]


def alone(case: Case) -> Outcome:
    model = Llama.build(case.config).to(case.dtype)
    found = Outcome([], [], {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        logits = model(TEXT[:, : case.seq])
        loss = F.cross_entropy(logits.flatten(0, 1), TEXT[:, 1 : case.seq + 1].flatten())
        loss.backward()
        found.losses.append(loss.item())
        found.gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    found.parameters = {name: param.detach() for name, param in model.named_parameters()}
    return found


def sharded(case: Case, mesh: Any) -> Llama:
    """Build the model as a case says; the axes of the batch are all but tp."""
    model = Llama.build(case.config, device=mesh.device_type).to(case.dtype)
    names = tuple(name for name in case.mesh if name != "tp")
    inner = mesh["tp"] if case.further == "fully_shard" else mesh
    shard_module(model, inner, llama_plan(model, inner, **case.options))
    for module in (*model.layers, model):
        if case.further == "fully_shard":
            fully_shard(module, mesh=mesh[names])
        elif case.further == "hsdp":
            hsdp(module, threshold=0, optimizer_level="level3")
        elif case.further == "compiled" and module is not model:
            module.compile(backend="eager")
    return model


def together(device_type: str, case: Case) -> Outcome:
    mesh = init_device_mesh(device_type, tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    model = sharded(case, mesh)
    rows = tuple(name for name in case.mesh if name != "tp") or "None"
    layout = Layout(tuple(case.mesh.values()), tuple(case.mesh))(rows)
    text = sim.scatter_full(TEXT, layout).to(device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = Outcome([], [], {})
    for _ in range(STEPS):
        logits = model(text[:, : case.seq])
        loss = llama_loss(logits, text[:, 1 : case.seq + 1])
        if case.further == "fully_shard" or not isinstance(logits, DTensor):  # the mean of this rank's rows
            parts = len(TEXT) / len(text)
            loss = loss / parts
            total = full_tensor(loss).detach().clone() if isinstance(loss, DTensor) else loss.detach().clone()
            dist.all_reduce(total)
            total *= parts / dist.get_world_size()
        else:
            total = full_tensor(loss).detach()
        loss.backward()
        found.losses.append(total.item())
        for name, param in model.named_parameters():
            assert param.grad.placements == param.placements, name
        found.gradients.append({name: full_tensor(param.grad).cpu() for name, param in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    found.parameters = {name: full_tensor(param).detach().cpu() for name, param in model.named_parameters()}
    return found


def check_alike(found: Outcome, wanted: Outcome, bound: float = 1e-10) -> None:
    """Compare two trainings, relative to the largest element of each tensor."""
    assert found.losses == pytest.approx(wanted.losses, rel=bound)
    pairs = [*zip(found.gradients, wanted.gradients, strict=True), (found.parameters, wanted.parameters)]
    for step, (ours, theirs) in enumerate(pairs):
        assert ours.keys() == theirs.keys()
        for name, full in theirs.items():
            error = (ours[name] - full).abs().max() / full.abs().max()
            assert error < bound, f"step {step}: {name} differs by {error:.1e}"


CASES = [
    Case({"tp": 2}),
    Case({"tp": 4}, seq=2),  # some ranks have nothing of the sequence
    Case({"tp": 4}, seq=7, config=TIED),
    Case({"tp": 4}, options={"sequence_parallel": False, "logits": "whole"}),
    Case({"dp": 2, "tp": 2}, "compiled"),
    Case({"dp": 2, "tp": 2}, options={"vocab_parallel": False}),
    Case({"tp": 2, "dp": 2}, config=TIED, options={"vocab_parallel": False, "sequence_parallel": False}),
    Case({"dp": 2, "tp": 4}, seq=7),
    Case({"dp": 2, "tp": 2}, "hsdp"),
    Case({"replicas": 2, "shards": 2, "tp": 2}, config=TIED),
    Case({"dp": 2, "tp": 2}, options={"logits": "local"}),
    Case({"dp": 2, "tp": 2}, "fully_shard", options={"sequence_parallel": False}),
    Case({"dp": 2, "tp": 4}, "fully_shard", seq=7, config=TIED),
    Case({"dp": 2, "tp": 2}, "fully_shard", options={"vocab_parallel": False, "logits": "local"}),
    Case({"replicas": 2, "shards": 2, "tp": 2}, "fully_shard"),
    Case({"dp": 2}, options={"tp": None}),
    Case({"dp": 2, "tp": 2}, seq=7, options={"reshard_inputs": True, "logits": "local"}),
    Case({"tp": 4}, seq=2, options={"reshard_inputs": True}),
    Case({"dp": 2, "tp": 2}, "fully_shard", config=TIED, options={"reshard_inputs": True}),
    Case({"dp": 2, "tp": 2}, "hsdp", options={"reshard_inputs": True}),
    Case({"tp": 4}, seq=7, options={"chunks": 3}),
    Case({"dp": 2, "tp": 2}, options={"chunks": 4, "logits": "local"}),
    Case({"dp": 2, "tp": 2}, "fully_shard", config=TIED, options={"chunks": 2, "reshard_inputs": True}),
    Case({"dp": 2, "tp": 2}, "hsdp", options={"chunks": 2}),
]


@pytest.mark.tier("full", each=4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_as_one_device_does(case: Case) -> None:
    found = sim.run(together, world_size=math.prod(case.mesh.values()), args=("cpu", case))
    wanted = alone(case)
    for outcome in (found[0], found[-1]):
        check_alike(outcome, wanted)


def in_float32() -> dict[str, torch.Tensor]:
    found = alone(Case({}, dtype=torch.float32))
    gradients = {f"{step} {n}": grad for step, named in enumerate(found.gradients) for n, grad in named.items()}
    return {"losses": torch.tensor(found.losses), **gradients, **found.parameters}


@pytest.mark.tier("full", each=2)
@sim.ranks(4)
def test_real_ranks_train_as_one_device_does(ctx):
    dtype = ctx.float_dtype
    bound = {} if dtype is torch.float64 else {"bound": measured(in_float32)}
    cases = (
        Case({"dp": 2, "tp": 2}, seq=7),
        Case({"dp": 2, "tp": 2}, "fully_shard", config=TIED),
        Case({"dp": 2, "tp": 2}, seq=7, options={"reshard_inputs": True}),
        Case({"dp": 2, "tp": 2}, options={"chunks": 4}),
    )
    for case in cases:
        case = replace(case, dtype=dtype)
        check_alike(together(ctx.device_type, case), alone(case), **bound)


@pytest.mark.tier("full")
def test_float32_differs_by_rounding() -> None:
    case = Case({"dp": 2, "tp": 2}, "fully_shard", dtype=torch.float32)
    check_alike(sim.run(together, world_size=4, args=("cpu", case))[0], alone(case), bound=1e-5)


@pytest.mark.tier("test")
@pytest.mark.parametrize("targets", ["a DTensor", "own rows"])
@pytest.mark.parametrize(("dp", "rows"), [(2, 4), (4, 3)])  # of three rows the last of four ranks has none
def test_tokens_may_be_a_dtensor(dp: int, rows: int, targets: str) -> None:
    reference, whole = Llama.build(CONFIG).double(), TEXT[:rows]
    wanted = F.cross_entropy(reference(whole[:, :8]).flatten(0, 1), whole[:, 1:].flatten())
    wanted.backward()

    def body() -> float:
        mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
        model = sharded(Case({"dp": dp, "tp": 2}), mesh)
        text = distribute_tensor(whole, Layout.from_device_mesh(mesh)("dp", "None"))
        for _ in range(2):
            model.zero_grad()
            labels = text[:, 1:]
            loss = llama_loss(model(text[:, :8]), labels if targets == "a DTensor" else labels.to_local())
            assert isinstance(loss, DTensor)
            loss.backward()
        for (name, param), full in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full_tensor(param.grad), full.grad, rtol=1e-11, atol=1e-12, msg=name)
        return full_tensor(loss).item()

    assert sim.run(body, world_size=2 * dp) == pytest.approx([wanted.item()] * 2 * dp, rel=1e-12)


@pytest.mark.parametrize(("sequence_parallel", "reshard_inputs"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("embedding", ["vocabulary", "width"])
def test_what_a_step_communicates(sequence_parallel: bool, reshard_inputs: bool, embedding: str) -> None:
    options = {"sequence_parallel": sequence_parallel, "reshard_inputs": reshard_inputs, "embedding": embedding}
    case = Case({"tp": 2}, options=options)

    def body(steps: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = sharded(case, mesh)
        tokens = distribute_tensor(TEXT[:, :8], Layout.from_device_mesh(mesh)("None"))  # its shape is known to all
        for _ in range(steps):
            llama_loss(model(tokens), TEXT[:, 1:]).backward()

    def count(steps: int) -> Counter[str]:
        with sim.world(2) as world:
            world.run(body, args=(steps,))
        return Counter(event.op for event in world.trace.events if event.rank == 0)

    layers, loss = CONFIG.num_hidden_layers, 2
    if sequence_parallel:  # attention and feed-forward both ways, the head; norms' gradients; the embedding both ways
        ends = 4 * layers + 1
        wanted = {"all_gather": ends + 1, "reduce_scatter": ends + 1, "all_reduce": 2 * layers + 1 + loss}
        if embedding == "width":
            wanted |= {"all_gather": ends, "reduce_scatter": ends, "all_to_all": 2}
        wanted["all_gather"] += reshard_inputs * (2 * layers + 1)  # each of those that gather, once more
    else:
        wanted = {"all_reduce": 4 * layers + 2 + loss}
        if embedding == "width":
            wanted = {"all_reduce": 4 * layers + 1 + loss, "all_gather": 1}
    assert count(2) - count(1) == wanted  # without what is told once


# -- what is refused -------------------------------------------------------------------------------------------------


REFUSED = [
    (
        lambda: llama_plan(CONFIG, {"dp": 2, "tp": 8}),
        "the 8 ranks along 'tp' cannot share num_key_value_heads=4 evenly\n"
        "  num_attention_heads=8, num_key_value_heads=4   mesh: dp=2, tp=8\n  try: a mesh with tp=1 or tp=2 or tp=4",
    ),
    (
        lambda: llama_plan(CONFIG, "dp=2,t=2"),
        "tp='tp' is no axis of the mesh\n  mesh: dp=2, t=2\n  try: tp='t' (tp=None: no axis splits modules)",
    ),
    (
        lambda: llama_plan(CONFIG, {"dp": 2, "tp": 2}, dp="pd"),
        "dp='pd' is no axis of the mesh\n  mesh: dp=2, tp=2\n  try: dp='dp'",
    ),
    (
        lambda: llama_plan(CONFIG, {"dp": 2, "tp": 2}, dp=("dp", "tp")),
        "axis 'tp' is in both tp and dp\n  mesh: dp=2, tp=2\n  try: dp=('dp',)",
    ),
    (
        lambda: llama_plan(CONFIG, {"tp": 2}, embedding="rows"),
        "there is no kind of embedding 'rows'\n  embedding: 'rows'\n  try: embedding=one of 'vocabulary', 'width'",
    ),
    (
        lambda: llama_plan(CONFIG, {"tp": 2}, logits="gathered"),
        "there is no kind of logits 'gathered'\n  logits: 'gathered'\n  try: logits=one of 'split', 'whole', 'local'",
    ),
    (
        lambda: llama_plan(CONFIG, {"tp": 2}, chunks=2, sequence_parallel=False),
        "without sequence parallelism no input is gathered, so that there is nothing to overlap\n"
        "  chunks=2, sequence_parallel=False\n  try: sequence_parallel=True, or chunks=1",
    ),
    (lambda: llama_plan(CONFIG, {"tp": 2}, chunks=0), "chunks must be at least 1\n  chunks: 0\n  try: chunks=1"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == f"cannot plan the Llama: {message}"


def test_another_model_is_refused() -> None:
    with pytest.raises(TypeError, match="not a Llama or a LlamaConfig") as caught:
        llama_plan(torch.nn.Linear(2, 2), {"tp": 2})
    assert "try: llama_plan(model, mesh); huggingface_plan" in str(caught.value)


def test_meshes_of_every_kind_give_one_plan() -> None:
    wanted = llama_plan(CONFIG, {"dp": 2, "tp": 4})
    assert wanted == llama_plan(CONFIG, "dp=2,tp=4") == llama_plan(CONFIG, Layout((2, 4), ("dp", "tp")))
