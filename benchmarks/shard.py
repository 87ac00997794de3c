"""A training step of the Llama under tensor parallelism: ours, torch's styles, and local code written by hand.

Protocol as for the engine: all contestants in the same processes, blocks of steps that alternate, in an order drawn
anew for each, from barrier to barrier; the figure is the ratio of the medians with its interval. The same plan for
all: heads and feed-forward split over tp, embedding split over the vocabulary, logits gathered; with sequence
parallelism, what lies between is split over the sequence. `hand` is Megatron-LM's form: local weights, and one
communication where the plan has one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.engine import Protocol, Result, _in_turns, _time, _with_interval, on_gloo
from hyper_parallel.core.shard.api import shard_module
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.plans import llama_plan

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_seq_len=512,
)
CONTESTANTS = ("hand", "ours", "torch")


class Plain(nn.Module):
    """What a step calls: logits of a batch, as a plain tensor that is whole on every rank."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def contest(sequences: int, length: int, protocol: Protocol, sequence_parallel: bool = False) -> dict[str, list[float]]:
    """Run the protocol on the calling rank; all ranks have the same batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    built = {name: build(name, mesh, sequence_parallel) for name in CONTESTANTS}
    check(built, sequences, length)
    return _in_turns(built, sequences, length, protocol)


def contest_with_sequence(sequences: int, length: int, protocol: Protocol) -> dict[str, list[float]]:
    """The protocol with sequence parallelism."""
    return contest(sequences, length, protocol, sequence_parallel=True)


def build(name: str, mesh: DeviceMesh, sequence_parallel: bool) -> tuple[nn.Module, Any]:
    """Return a contestant's model and its optimizer."""
    model: nn.Module = Llama.build(CONFIG, seed=0)
    if name == "torch":
        _with_styles(model, mesh, sequence_parallel)
    elif name == "hand":
        model = _ByHand(model, mesh, sequence_parallel)
    else:
        plan = llama_plan(CONFIG, mesh, sequence_parallel=sequence_parallel, logits="local")
        model = shard_module(model, mesh, plan)
    params = list(model.parameters())
    groups = [[p for p in params if isinstance(p, DTensor) == kind] for kind in (True, False)]  # not mixed: it is fused
    return model, torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-3, fused=True)


def check(built: dict[str, tuple[nn.Module, Any]], sequences: int, length: int) -> None:
    """Refuse to time contestants that compute something else."""
    tokens = torch.randint(0, 256, (sequences, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = {name: model(tokens) for name, (model, _) in built.items()}
    for name, found in logits.items():
        torch.testing.assert_close(found, logits["hand"], rtol=1e-4, atol=1e-5, msg=f"{name} computes something else")


# -- torch's styles --------------------------------------------------------------------------------------------------


def _with_styles(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool, head: Any = None) -> None:
    between: Any = Shard(1) if sequence_parallel else Replicate()
    outer: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": head or ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    inner: dict[str, Any] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=between),
        "mlp.w1": ColwiseParallel(),
        "mlp.w3": ColwiseParallel(),
        "mlp.w2": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        outer["norm"] = SequenceParallel()
        gathered = (Replicate(), None, None)
        inner |= {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=gathered),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    parallelize_module(model, mesh, outer)
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, inner)


# -- by hand ---------------------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Forward nothing, backward all_reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    """Forward all_reduce, backward nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Gather(torch.autograd.Function):
    """Forward all_gather along a dim, backward reduce_scatter; or the part of it, where the gradient is not shared."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, shared: bool) -> torch.Tensor:
        ctx.dim, ctx.shared = dim, shared
        return _gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not ctx.shared:
            return grad.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()].contiguous(), None, None
        return _scattered(grad, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    """Forward reduce_scatter along a dim, backward all_gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return _scattered(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(grad, ctx.dim), None


def _gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
    whole = x.new_empty((dist.get_world_size(), *x.shape))
    dist.all_gather_into_tensor(whole.view(-1, *x.shape[1:]), x.contiguous())
    return torch.cat(whole.unbind(0), dim)


def _scattered(x: torch.Tensor, dim: int) -> torch.Tensor:
    """As an exchange of parts that each rank adds up, which is the faster way on gloo."""
    world = dist.get_world_size()
    parts = torch.stack(x.chunk(world, dim))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received.sum(0)


class _ByHand(nn.Module):
    """The Llama on local weights."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        assert isinstance(model, Llama)
        rank, world = mesh.get_local_rank(), mesh.size()
        self.sequence_parallel = sequence_parallel
        self.start = CONFIG.vocab_size // world * rank
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                dim = 1 if name.endswith((".wo", ".w2")) else 0
                part = module.weight.detach().chunk(world, dim)[rank].clone()
                module.weight = nn.Parameter(part)
            elif isinstance(module, nn.RMSNorm) and sequence_parallel:
                module.weight.register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad))
        self.inner: Any = model

    def into(self, x: torch.Tensor) -> torch.Tensor:
        return _Gather.apply(x, 1, True) if self.sequence_parallel else _Copy.apply(x)

    def out(self, x: torch.Tensor) -> torch.Tensor:
        return _Scatter.apply(x, 1) if self.sequence_parallel else _Reduce.apply(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        model = self.inner
        local = tokens - self.start
        outside = (local < 0) | (local >= model.embed.weight.shape[0])
        x = F.embedding(local.masked_fill(outside, 0), model.embed.weight).masked_fill(outside[..., None], 0)
        x = self.out(x)
        cos, sin = model.cos[: tokens.shape[1]], model.sin[: tokens.shape[1]]
        for layer in model.layers:
            x = x + self.out(layer.attention(self.into(layer.attention_norm(x)), cos, sin))
            x = x + self.out(layer.mlp(self.into(layer.mlp_norm(x))))
        return _Gather.apply(model.head(self.into(model.norm(x))), 2, False)


# -- tables ----------------------------------------------------------------------------------------------------------


def table() -> str:
    """Times and ratios as a Markdown table."""
    lines = [
        "| ranks | batch | by hand, ms | ours, ms | torch's styles, ms | ours / torch | ours / by hand |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for ranks, sequences, length in ((2, 2, 128), (4, 2, 128), (4, 4, 256)):
        for held, how in ((contest, ""), (contest_with_sequence, ", sequence split")):
            lines.append(_row(on_gloo(ranks, sequences, length, held), how))
            print(lines[-1], flush=True)
    return "\n".join(lines)


def _row(result: Result, how: str) -> str:
    times = [_time(result, name) for name in CONTESTANTS]
    ratios = [_with_interval(*result.ratio("ours", other)) for other in ("torch", "hand")]
    return f"| {result.where}{how} | {' | '.join(times + ratios)} |"
