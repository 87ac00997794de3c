"""Steps of the trainer's models, in the real world and on a rank that lives alone: one function for both.

It does what the trainer does in a step, through the trainer's own functions, but for reading numbers: those that a rank
alone does not have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from mesh_kit import Mode, Seen, describe
from mesh_programs import Kernel, Operations, Turn, bytes_of
from numpy.typing import NDArray
from torch import nn
from torch._guards import detect_fake_mode

from hyper_parallel.core.expert_parallel.experts import GroupedExperts, count_rows
from hyper_parallel.core.fully_shard.clip import clip_grads_with_norm_
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.tied import clip_grad_norm
from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.data import IGNORED
from hyper_parallel.trainer.loop import RunGroups, forward_backward, training_step
from hyper_parallel.trainer.optimizer import build_optimizer
from hyper_parallel.trainer.parallelize import Parallelized, ShareOfLoss
from hyper_parallel.trainer.parallelize_llama import parallelize_llama
from hyper_parallel.trainer.preflight import plan_run
from sim.kernel.context import current_context
from sim.mesh.recipe import Routing
from sim.trace import Event


def steps_of(
    config: Config,
    world_size: int,
    steps: int = 2,
    routing: Routing | None = None,
    *,
    numbers: bool = True,
    reads: bool = False,
    counts_flops: bool = True,
) -> Any:
    """A body that builds the model and trains some steps, and tells the shapes and layouts of what comes of it.

    Args:
        config: the run.
        world_size: ranks.
        steps: of the optimizer.
        routing: how tokens go to experts.
        numbers: add up tokens and losses over ranks, as the trainer does to log them.
        reads: take steps by the trainer's own function, which reads numbers; for ranks that have them.
        counts_flops: count the FLOPs of the last step; that goes through Python for each operation.
    """
    dims = plan_run(config, world_size)

    def body(mode: Mode) -> Any:
        if world_size > 1 or config.precision.policy() is not None:
            dims.build_mesh("cpu")
            cut_meshes(dims)
        ranks = RunGroups(dims, world_size > 1, torch.device("cpu"), config.precision.dtype("buffers"))
        with mode():
            share = ShareOfLoss()
            model = parallelize_llama(config, dims, torch.device("cpu"), share)
            for part in model.parts:
                give_memory(part)
                if routing is not None:
                    route(part, routing)
            optimizer = build_optimizer(model.named_parameters(), config.optimizer, config.precision.dtype("moments"))
            seen = [(name, describe(param)) for name, param in model.named_parameters()]
            begins, flops, gradients, turns = [], 0, 0, []
            kernels: tuple[Counter[Kernel], Counter[Kernel]] = Counter(), Counter()
            batch = batch_of(model, ranks, config)
            for step in range(steps):
                begins.append(len(own_events()))
                counts = counts_flops and step == steps - 1
                with Operations(standing_of(model, optimizer, batch)) if counts else nullcontext() as counted:
                    if counted:
                        ranks.over_shares = begins_update(ranks, counted)  # type: ignore[method-assign]
                    gradients = one_step(model, optimizer, share, ranks, config, batch, numbers=numbers, reads=reads)
                if counted:
                    kernels = counted.before_update, counted.kernels - counted.before_update
                    flops, turns = counted.total, counted.turns
            begins.append(len(own_events()))
            firsts = [entry.get("exp_avg", entry.get("momentum_buffer")) for entry in optimizer.state.values()]
            state = [
                (len(entry), describe(first)) for entry, first in zip(optimizer.state.values(), firsts, strict=True)
            ]
            memory = {
                "parameters": bytes_of(
                    tensor for part in model.parts for tensor in (*part.parameters(), *part.buffers())
                ),
                "optimizer": bytes_of(tensor for entry in optimizer.state.values() for tensor in entry.values()),
                "gradients": gradients,
            }
            return Built([*seen, *state], begins, flops, memory, kernels, turns)

    return body


class Built(NamedTuple):
    """What a rank has built, and what its steps took.

    Attributes:
        made: shapes and layouts of parameters and of the optimizer's state.
        begins: numbers of the first events of its steps, and of what comes after them.
        flops: of the last step; 0 where they are not counted.
        memory: bytes of parameters and buffers, of the optimizer's state, and of gradients when a step is reduced.
        kernels: operations of the last step before its update, and in it, where FLOPs are counted.
        turns: of the stages of a pipeline in the last step, where they are followed.
    """

    made: list[Any]
    begins: list[int]
    flops: int
    memory: dict[str, int]
    kernels: tuple[Counter[Kernel], Counter[Kernel]]
    turns: list[Turn]


def standing_of(model: Parallelized, optimizer: Any, batch: Any) -> list[torch.Tensor]:
    """Tensors that are there before a step."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    weights = [tensor for part in model.parts for tensor in (*part.parameters(), *part.buffers())]
    return [*weights, *state, *batch]


def own_events() -> list[Event]:
    """What the calling rank has communicated so far."""
    context = current_context()
    assert context is not None
    return context.network.trace.of_rank(context.rank)


def begins_update(ranks: RunGroups, counted: Operations) -> Callable[[torch.Tensor], float]:
    """The sum over shares, with which the trainer ends what comes before the update."""

    def over_shares(share: torch.Tensor) -> float:
        total = RunGroups.over_shares(ranks, share)
        counted.begin_update()
        return total

    return over_shares


def only_steps(seen: Seen) -> Seen:
    """Leave out what building the model has communicated: without values, there is nothing to communicate."""
    first = seen.result.begins[0]
    counts: Counter[str] = Counter(event.process_group for event in seen.events[:first] if event.seq >= 0)
    events = [e._replace(seq=e.seq - counts[e.process_group] if e.seq >= 0 else e.seq) for e in seen.events[first:]]
    return Seen(seen.result.made, events)


def cut_meshes(dims: ParallelDims) -> None:
    """Make all meshes before there are only fake tensors: a mesh has its ranks in a tensor."""
    for name in dims.mesh_axes:
        dims.get_mesh(name)
    dims.data_mesh()
    if dims.ep_enabled:
        dims.data_mesh(experts=True)


def give_memory(part: nn.Module) -> None:
    """Take what is left on meta to the host: weights without values are not filled, so nobody has done it yet."""
    if any(param.is_meta for param in part.parameters()):
        part.to_empty(device="cpu")


class GivenRouting(Routing):
    """Says which experts are chosen together: as it chooses them."""

    def visits(self, *, ranks: int, nodes: int, **sizes: int) -> NDArray[np.int64]:
        """Count them, of the experts that `choose` returns, without an operation of torch."""
        experts, shape = sizes["experts"], (sizes["per_token"], sizes["tokens"])
        found = []
        for counts in self.counts(**sizes, ranks=ranks):
            node = np.repeat(np.arange(experts), counts).reshape(shape) // (experts // nodes)
            found.append([(node == each).any(0).sum() for each in range(nodes)])
        return np.array(found)


def route(part: nn.Module, routing: Routing) -> None:
    """Let tokens go to experts as the routing says: with values, by choosing; without, by the counts alone."""
    routing.give_to(part)
    for experts in part.modules():
        if isinstance(experts, GroupedExperts) and detect_fake_mode() is None:
            for call in ("_send", "_send_to_nodes", "_run"):
                setattr(experts, call, _chooses(experts, getattr(experts, call), routing))
            experts.count_rows = count_rows


def _chooses(experts: GroupedExperts, call: Any, routing: Routing) -> Any:
    def chosen_call(x: torch.Tensor, chosen: torch.Tensor, *others: Any) -> Any:
        group = None if experts.exchange is None else experts.exchange.group
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        tokens, per_token = chosen.numel() // chosen.shape[-1], chosen.shape[-1]
        by_rule = routing.choose(
            tokens=tokens, experts=experts.num_experts, per_token=per_token, ranks=ranks, rank=rank
        )
        return call(x, by_rule.view_as(chosen), *others)

    return chosen_call


def batch_of(model: Parallelized, ranks: RunGroups, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part of a batch, inputs and targets."""
    train = config.train
    rows = train.batch_size // ranks.batch_ranks
    inputs = torch.arange(rows * train.seq_len).view(rows, train.seq_len) % config.model.vocab_size
    targets = inputs.roll(1)
    return (inputs, targets) if model.context is None else (model.context.split(inputs), model.context.split(targets))


def one_step(
    model: Parallelized,
    optimizer: torch.optim.Optimizer,
    share: ShareOfLoss,
    ranks: RunGroups,
    config: Config,
    batch: tuple[torch.Tensor, torch.Tensor],
    *,
    numbers: bool = True,
    reads: bool = False,
) -> int:
    """What `Trainer.step` does, by default without reading any number; returns the bytes of its gradients."""
    train, (inputs, targets) = config.train, batch
    if reads:
        return read_step(model, optimizer, share, ranks, config, batch)
    if numbers:
        ranks.over_tokens((targets != IGNORED).sum())
    share.counted = float(train.batch_size * train.seq_len)
    each = config.parallel.reduce_each
    loss = forward_backward(model, inputs, targets, share, ranks.dtype, train.accumulate, each)
    if numbers:
        total = loss.detach().to(ranks.dtype, copy=True)
        if ranks.stages is not None:
            dist.all_reduce(total, group=ranks.stages)
        ranks.over_tokens(total)
    group = None if model.pipeline is None else model.pipeline.group
    norm = clip_grad_norm(model.parts, math.inf, group, tied=() if model.tied is None else model.tied)
    if config.optimizer.max_grad_norm:
        clip_grads_with_norm_([param for part in model.parts for param in part.parameters()], 1.0, norm)
    gradients = bytes_of(p.grad for part in model.parts for p in part.parameters() if p.grad is not None)
    optimizer.step()
    optimizer.zero_grad()
    model.after_step(True)
    return gradients


def read_step(
    model: Parallelized,
    optimizer: torch.optim.Optimizer,
    share: ShareOfLoss,
    ranks: RunGroups,
    config: Config,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> int:
    """Take a step as `Trainer.step` does, with its numbers; returns the bytes of its gradients."""
    found = []

    def accepts(loss: float, grad_norm: float) -> bool:
        del loss, grad_norm
        found.append(bytes_of(p.grad for part in model.parts for p in part.parameters() if p.grad is not None))
        return True

    share.counted = ranks.count(batch[1])
    limit, accumulate = config.optimizer.max_grad_norm, config.train.accumulate
    training_step(
        model,
        optimizer,
        *batch,
        share=share,
        groups=ranks,
        accumulate=accumulate,
        reduce_each=config.parallel.reduce_each,
        max_grad_norm=limit,
        accepts=accepts,
    )
    return found[0]
