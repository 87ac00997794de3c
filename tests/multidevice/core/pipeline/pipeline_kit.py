"""A Llama that is trained by a pipeline, in any arrangement of four ranks or fewer, and the same on one device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rounding_kit import measured, results, tolerances
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from hyper_parallel import DTensor, Layout, full_tensor, fully_shard, init_device_mesh, shard_module
from hyper_parallel.core.fully_shard.api import Owner
from hyper_parallel.core.fully_shard.utils import CPUOffloadPolicy
from hyper_parallel.core.mesh.device_mesh import OwnerMesh
from hyper_parallel.core.pipeline import Pipeline, TiedWeights, clip_grad_norm, stage_slices
from hyper_parallel.core.shard.loss import vocab_parallel_cross_entropy
from hyper_parallel.models import Llama, LlamaConfig, llama_plan

CONFIG = LlamaConfig(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_seq_len=8,
)
TEXT = torch.randint(0, 20, (8, 9), generator=torch.Generator().manual_seed(1))
TEXT[3, 4:] = -100  # targets of which some do not count; as inputs they are taken for 0
STEPS, MAX_NORM = 2, 0.5


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        schedule: of the pipeline.
        pp: its ranks.
        dp: ranks with different rows.
        tp: ranks that share layers.
        each: stages per rank.
        micro_batches: of a rank's rows.
        shard: what splits parameters over dp: None, "fully_shard", or "layers": embedding and head, too, are units;
            "offloaded": their shards are on the host; "owned": the last rank has all of each.
        sizes: layers per stage.
        layers: of the model.
        tied: whether the head is the embedding.
        recompute: whether blocks are checkpointed.
        keep: gathered parameters, during a step.
    """

    schedule: str = "1f1b"
    pp: int = 2
    dp: int = 1
    tp: int = 1
    each: int | None = None
    micro_batches: int = 4
    shard: str | None = None
    sizes: tuple[int, ...] | None = None
    layers: int = 4
    tied: bool = False
    recompute: bool = False
    keep: bool = True

    @property
    def config(self) -> LlamaConfig:
        return replace(CONFIG, num_hidden_layers=self.layers, tie_embeddings=self.tied)

    def __str__(self) -> str:
        said = [self.schedule] + [
            f"{name}{getattr(self, name)}" for name in ("pp", "dp", "tp") if getattr(self, name) > 1
        ]
        said += [self.shard] * (self.shard is not None) + [
            name for name in ("tied", "recompute") if getattr(self, name)
        ]
        said += [f"each{self.each}"] * (self.each is not None) + [f"mb{self.micro_batches}"] * (self.micro_batches != 4)
        said += ["-".join(map(str, self.sizes or ()))] * (self.sizes is not None)
        return "-".join(said + ["regather"] * (not self.keep))


@dataclass
class Outcome:
    """What training gives: per step the loss of an evaluation and of the step, norm and gradients; then parameters."""

    evaluated: list[float]
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]


def share(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of some tokens, divided by the number of all that count."""
    counted = int((TEXT[:, 1:] != -100).sum())
    if isinstance(logits, DTensor):
        return vocab_parallel_cross_entropy(logits, targets, reduction="sum") / counted
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100) / counted


def rows_and_targets(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return TEXT[:, :-1].clamp(min=0).to(device), TEXT[:, 1:].to(device)


def build(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Llama:
    return Llama.build(config, seed=3).to(device, dtype)


def alone(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Outcome:
    """Train on one device."""
    model = build(config, device, dtype)
    rows, targets = rows_and_targets(device)
    found = Outcome([], [], [], [], {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = share(model(rows), targets)
        loss.backward()
        found.evaluated.append(loss.item())
        found.losses.append(loss.item())
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        found.gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    found.parameters = {name: param.detach() for name, param in model.named_parameters()}
    return found


def wrap(stage: Llama, case: Case, mesh: Any) -> None:
    """Split the parameters of a stage over dp."""
    if case.shard is None:
        return
    options: dict[str, Any] = {
        "offloaded": {"offload_policy": CPUOffloadPolicy()},
        "owned": {"shard_placement_fn": lambda param: Owner(case.dp - 1)},
    }.get(case.shard, {})
    ends = [stage.embed, stage.norm, stage.head] if case.shard == "layers" else [stage]
    for unit in (*stage.layers, *ends):
        if unit is not None:
            fully_shard(unit, mesh=mesh["dp"], **options).set_reduce_op_type("sum")


def make(case: Case, device: torch.device, dtype: torch.dtype, mesh: Any) -> Pipeline:
    """The pipeline of this rank."""
    place = mesh["pp"].get_local_rank()
    stages = []
    for part in stage_slices(case.layers, case.schedule, place, case.pp, stages_per_rank=case.each, sizes=case.sizes):
        stage = build(case.config, device, dtype).keep(part.layers, embed=part.is_first, head=part.is_last)
        if case.tp > 1:
            shard_module(stage, mesh["tp"], llama_plan(stage, mesh["tp"]))
        if case.recompute:
            for name, block in list(stage.layers.named_children()):
                stage.layers._modules[name] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT)
        wrap(stage, case, mesh)
        stages.append(stage)
    stream = Layout.from_device_mesh(mesh["tp"])("None", "tp", "None") if case.tp > 1 else None
    return Pipeline(
        stages, mesh["pp"], case.schedule, case.micro_batches, share, boundary=stream, keep_gathered=case.keep
    )


def full(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone().cpu()
    if isinstance(tensor.device_mesh, OwnerMesh):  # of which torch knows nothing
        return full_tensor(tensor.detach()).cpu()
    return tensor.detach().to(tensor.device_mesh.device_type).full_tensor().cpu()  # torch gathers shards where they lie


def named(pipeline: Pipeline) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of this rank's stages, by their names in the whole model."""
    found = [pair for stage in pipeline.stages for pair in stage.named_parameters()]
    return [(name.replace("_checkpoint_wrapped_module.", ""), param) for name, param in found]


def train(case: Case, device: torch.device, dtype: torch.dtype) -> Outcome:
    """Train by a pipeline."""
    sizes = (case.pp, case.dp, case.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
    if mesh.get_coordinate() is None:
        raise AssertionError("a case needs all ranks")
    pipeline = make(case, device, dtype, mesh)
    tied = TiedWeights(pipeline) if case.tied else ()
    if isinstance(tied, TiedWeights):
        with torch.no_grad():
            for copy in tied.copies:
                copy.zero_()
        tied.copy_values()
    place = mesh["dp"].get_local_rank()
    rows, targets = (whole_batch.chunk(case.dp)[place] for whole_batch in rows_and_targets(device))
    optimizer = torch.optim.AdamW([param for _, param in named(pipeline)], lr=1e-2)
    found = Outcome([], [], [], [], {})
    for _ in range(STEPS):
        found.evaluated.append(summed(pipeline.eval(rows, targets), case))
        found.losses.append(summed(pipeline.step(rows, targets), case))
        if isinstance(tied, TiedWeights):
            tied.add_gradients()
        found.norms.append(float(clip_grad_norm(pipeline.stages, MAX_NORM, pipeline.group, tied=tied)))
        grads = {name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in named(pipeline)}
        found.gradients.append({name: full(grad) for name, grad in grads.items()})
        optimizer.step()
        optimizer.zero_grad()
    found.parameters = {name: full(param) for name, param in named(pipeline)}
    return found


def summed(loss: torch.Tensor, case: Case) -> float:
    """The loss of all rows: shares add up over stages and dp; ranks along tp have the same."""
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / case.tp


def in_float32() -> dict[str, torch.Tensor]:
    """Training on one device, of which the rounding is measured where there is no float64."""
    found = alone(CONFIG, torch.device("cpu"), torch.float32)
    gradients = {f"{step} {name}": grad for step in range(STEPS) for name, grad in found.gradients[step].items()}
    norms = {f"norm {step}": torch.tensor(norm) for step, norm in enumerate(found.norms)}
    return results(list(map(torch.tensor, found.losses)), gradients, found.parameters) | norms


expected_of = cache(alone)  # by all ranks and cases with the same model, which only read it


def check(case: Case, ctx: Any) -> None:
    """A pipeline trains as one device does."""
    dtype, device = ctx.float_dtype, ctx.device
    expected, got = expected_of(case.config, torch.device("cpu"), dtype), train(case, device, dtype)
    rounding = {kind: 1e-9 if dtype is torch.float64 else measured(in_float32, kind) for kind in ("loss", "norm")}
    torch.testing.assert_close(got.evaluated, expected.evaluated, rtol=rounding["loss"], atol=1e-12)
    torch.testing.assert_close(got.losses, expected.losses, rtol=rounding["loss"], atol=1e-12)
    torch.testing.assert_close(got.norms, expected.norms, rtol=rounding["norm"], atol=1e-12)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(got.parameters))
    tied = {"head.weight": "embed.weight"} if case.tied else {}
    assert {tied.get(name, name) for some in names for name in some} == set(expected.parameters)
    for step, gradients in enumerate(got.gradients):
        near = tolerances(expected.gradients[step].values(), in_float32, "gradient", rtol=1e-9, atol=1e-12)
        for name, gradient in gradients.items():
            wanted = expected.gradients[step][tied.get(name, name)]
            torch.testing.assert_close(gradient, wanted, **near, msg=lambda text, name=name: f"{name}: {text}")
    near = tolerances(expected.parameters.values(), in_float32, "value", rtol=1e-9, atol=1e-12)
    for name, value in got.parameters.items():
        torch.testing.assert_close(value, expected.parameters[tied.get(name, name)], **near)
