"""Programs that wait for devices, and the same with one of their waits taken out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from activations_kit import trained as train_blocks
from pipeline_kit import Case, full, train
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

import hyper_parallel as hp
from hyper_parallel import fully_shard
from hyper_parallel.core.context_parallel import ContextParallel
from hyper_parallel.core.fully_shard import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_
from hyper_parallel.core.fully_shard.schedule import hsdp_sync_stream
from hyper_parallel.models import LlamaConfig, MoEConfig, MoELlama
from hyper_parallel.models.moe import ExpertsConfig
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.config import Config, DataConfig, OptimizerConfig, TrainConfig
from hyper_parallel.trainer.loop import train as run_training
from sim.late.communication import LateCommunication
from sim.late.device import LateDevice
from sim.late.module import LateEvent, LateStream
from sim.late.shadow import Shadow

LIBRARY = str(Path(hp.__file__).parent)


class Taken:
    """Where the library waits, and which of these waits is not there.

    Attributes:
        missing: The site of the wait that does nothing; None: all are there.
        seen: The sites that were come by.
    """

    def __init__(self, missing: str | None = None) -> None:
        self.missing = missing
        self.seen: dict[str, None] = {}

    def is_missing(self) -> bool:
        """Whether the wait that is about to happen is taken out."""
        site = site_of(sys._getframe(2))
        if site is not None:
            self.seen[site] = None
        return site is not None and site == self.missing


def site_of(frame: Any) -> str | None:
    """The function of the library that waits, and who called it where it only passes that on; None: somebody else."""
    names: list[str] = []
    while frame is not None and len(names) < 2:
        path = frame.f_code.co_filename
        name = f"{Path(path).stem}.{frame.f_code.co_name}"
        if name in PASS_ON or (path.startswith(LIBRARY) and not path.endswith("platform/accelerator.py")):
            names.append(name)
            if name not in PASS_ON:
                return " < ".join(names[::-1])
        frame = frame.f_back
    return " < ".join(names[::-1]) if names else None


# The last one is torch's: where a schedule waits for the messages of a step.
PASS_ON = ("comm.wait", "reduce.wait", "schedules._wait_batch_p2p")


# What waits: on a late device; and in the record of one that ranks share, which does wait, and does not say so.
LATE = (
    (LateCommunication, "waited"),
    (LateEvent, "wait"),
    (LateEvent, "synchronize"),
    (LateStream, "synchronize"),
    (LateStream, "wait_stream"),
)
IN_RECORD = (
    (LateDevice, "wait"),
    (Shadow, "wait_for_event"),
    (Shadow, "wait_for_stream"),
    (Shadow, "finish_event"),
    (Shadow, "finish_stream"),
)


@contextmanager
def without(missing: str | None = None, waits: Sequence[tuple[type, str]] = LATE) -> Iterator[Taken]:
    """While it lasts, one of the waits of the library does nothing on the device; the host waits as ever."""
    taken = Taken(missing)
    originals = [(owner, name, vars(owner)[name]) for owner, name in waits]

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: None if taken.is_missing() else original(*args, **options)

    try:
        for owner, name, original in originals:
            setattr(owner, name, replaced(original))
        yield taken
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


# -- what is trained ---------------------------------------------------------------------------------------------------


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)]
    return torch.nn.Sequential(*blocks, torch.nn.Linear(8, 4))


def step(net: torch.nn.Module, optimizer: Any, device: str, number: int, mark: bool = False) -> torch.Tensor:
    x = torch.linspace(-1, 1, 40).view(5, 8).add(dist.get_rank() + number).to(device)
    loss = net(x).square().mean()
    loss.backward()
    return loss.detach()


def trained(device: str, mesh: Any, steps: int = 2, clips: bool = False, **options: Any) -> list[float]:
    """Losses of a few steps, and what has become of the parameters."""
    net = model().to("cpu" if "offload_policy" in options else device)
    for layer in net:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    losses = []
    for number in range(steps):
        losses.append(step(net, optimizer, device, number))
        if clips:
            losses.append(clip_grad_norm_(net.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses] + [float(p.full_tensor().double().sum()) for p in net.parameters()]


def plain(device: str) -> list[float]:
    return trained(device, init_device_mesh(device, (2,)))


def clipped(device: str) -> list[float]:
    return trained(device, init_device_mesh(device, (2,)), clips=True)


def kept(device: str) -> list[float]:
    return trained(device, init_device_mesh(device, (2,)), reshard_after_forward=False)


def replicated(device: str) -> list[float]:
    return trained(device, init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard")))


def owned(device: str) -> list[float]:
    return trained(device, init_device_mesh(device, (2,)), shard_placement_fn=lambda param: hp.Owner(param.dim() - 1))


def mixed(device: str) -> list[float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trained(device, init_device_mesh(device, (2,)), mp_policy=policy)


def offloaded(device: str) -> list[float]:
    policy = CPUOffloadPolicy(pin_memory=device != "cpu")
    return trained(device, init_device_mesh(device, (2,)), offload_policy=policy)


def offloaded_alone(device: str) -> list[float]:
    """On one rank nothing is gathered: what computes waits for the copies themselves."""
    policy = CPUOffloadPolicy(pin_memory=device != "cpu")
    return trained(device, init_device_mesh(device, (1,)), offload_policy=policy)


def on_a_stream(device: str) -> list[float]:
    """The optimizer runs on a stream of its own, and the next forward waits for its event."""
    platform = get_platform(device)
    mesh = init_device_mesh(device, (2,))
    net = model().to(device)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer, own, losses = torch.optim.SGD(net.parameters(), lr=0.5), platform.new_stream(), []
    for number in range(2):
        losses.append(step(net, optimizer, device, number))
        own.wait_stream(platform.current_stream())
        with platform.use_stream(own):
            optimizer.step()
            event = platform.new_event()
            event.record()
        net.set_post_optim_event(event)
    platform.synchronize()
    return [float(loss) for loss in losses]


def asynchronous(device: str) -> list[float]:
    """Reductions go on behind backward, until somebody asks for the gradients."""
    net = hp.hsdp(model().to(device), shard_size=2, threshold=0, optimizer_level="level2", comm_async=True)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.5), []
    for number in range(2):
        losses.append(step(net, optimizer, device, number))
        hsdp_sync_stream()
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses]


def activations_on_the_host(device: str) -> list[float]:
    """What blocks save goes to the host and back, beside what the engine gathers."""
    losses, parameters, _ = train_blocks(device, "offload", "ours")
    return losses + [float(each.double().sum()) for each in parameters]


def block_inputs_on_the_host(device: str) -> list[float]:
    losses, parameters, _ = train_blocks(device, "full offload", "none", depth=6)
    return losses + [float(each.double().sum()) for each in parameters]


def redistributed(device: str) -> list[float]:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    layout = hp.Layout.from_device_mesh(mesh)
    x = hp.distribute_tensor(torch.arange(48.0).view(8, 6).to(device), layout("dp", "tp")).requires_grad_()
    found = []
    for target in (("tp", "None"), ("None", "None"), (("dp", "tp"), "None"), ("None", ("tp", "dp"))):
        y = hp.redistribute(x * 2, target)
        local = hp.to_local(y, grad_layout=hp.Layout.of(y))
        found.append(local.detach().square().sum())
        local.square().sum().backward()
    pending = hp.redistribute(x.detach() * 3, ("None", "dp"), async_op=True)
    found += [hp.to_local(pending.wait()).sum(), hp.to_local(x.grad).sum()]
    return [float(each) for each in found]


def in_chunks(device: str) -> list[float]:
    layout = hp.Layout.from_device_mesh(init_device_mesh(device, (2,), mesh_dim_names=("tp",)))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False), torch.nn.GELU(), torch.nn.Linear(6, 8, bias=False))
    plan = hp.ShardingPlan(
        plan={"0.weight": ("tp",), "2.weight": ("None", "tp")},
        input_plan={"input": ("None",)},
        local_plan={"": layout(partial={"tp": "sum"})},
        output_plan={"output": ("None", "tp")},
        chunks={"": 2},
    )
    model, found = hp.shard_module(net.to(device), layout.mesh, plan, src_data_rank=None), []
    for number in range(2):
        x = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(number)).to(device)
        x = hp.distribute_tensor(x, layout("None", "tp"), src_data_rank=None).requires_grad_()
        local = hp.to_local(model(x).square())
        local.sum().backward()
        found += [local.detach().sum(), hp.to_local(x.grad).square().sum()]
    found += [hp.to_local(each.grad).square().sum() for each in model.parameters()]
    return [float(each) for each in found]


def attended(device: str) -> list[float]:
    mesh = init_device_mesh(device, (4,), mesh_dim_names=("cp",))
    generator, found = torch.Generator().manual_seed(0), []
    for degree in (1, 2):
        cp = ContextParallel(mesh, degree, True)
        drawn = [torch.randn(2, heads, 16, 8, generator=generator) for heads in (4, 2, 2, 4)]
        q, k, v, grad = (cp.split(x.to(device), dim=2).requires_grad_() for x in drawn)
        out = cp.attend(q, k, v, is_causal=True)
        out.backward(grad)
        found += [each.double().sum() for each in (out.detach(), q.grad, k.grad, v.grad)]
    return [float(each) for each in found]


def pipelined(device: str, **options: Any) -> list[float]:
    case = Case(**{"tied": True, "layers": 2, "micro_batches": 2, **options})
    outcome = train(case, torch.device(device), torch.float32)
    # Not the parameters: where a gradient is next to nothing, AdamW makes much of its rounding.
    gradients = [grad for step in outcome.gradients for grad in step.values()]
    return [*outcome.losses, *outcome.norms, *(float(grad.double().sum()) for grad in gradients)]


def with_experts(device: str, ranks_per_node: int | None = None) -> list[float]:
    """Tokens go to experts of other ranks, and shared experts compute meanwhile."""
    config = MoEConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_seq_len=8,
        num_experts=4,
        experts_per_token=2,
        expert_intermediate_size=8,
        num_dense_layers=0,
    )
    net = MoELlama.build(config, seed=0).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ep",))
    hp.expert_parallel(net, mesh, ranks_per_node=ranks_per_node)
    tokens = torch.arange(16).view(2, 8).add(5 * dist.get_rank()).remainder(32).to(device)
    loss = net(tokens).square().mean()
    loss.backward()
    grads = [p.grad.to_local() if isinstance(p.grad, hp.DTensor) else p.grad for p in net.parameters()]
    return [float(loss), *(float(grad.double().sum()) for grad in grads)]


def with_fsdp2(shape: tuple[int, ...], **options: Any) -> list[float]:
    """What torch's own engine gives; without a shape, what one device gives. The optimizer is on the host if offloaded.

    Args:
        shape: of the mesh; the last axis shards, the one before it replicates.
        options: of `fully_shard`; also `steps`.
    """
    device, ranks = ("npu", dist.get_world_size()) if shape else ("cpu", 1)
    net = model().to("cpu" if "offload_policy" in options else device)
    if shape:
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in (*net, net):
            torch_fsdp.fully_shard(layer, mesh=mesh, **options)
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5), []
    for number in range(3):
        rows = torch.linspace(-1, 1, 8 * 8).view(8, 8).add(number)
        loss = net(rows.chunk(ranks)[dist.get_rank() if shape else 0].to(device)).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        mean = loss.detach() / ranks
        if shape:
            dist.all_reduce(mean)
        found += [mean, full(norm)]
        optimizer.step()
        optimizer.zero_grad()
    return [float(each) for each in found] + [float(full(p).double().sum()) for p in net.parameters()]


RUN = Config(
    model=LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    ),
    experts=ExpertsConfig(num_experts=4),
    data=DataConfig(max_bytes=200_000),
    optimizer=OptimizerConfig(schedule="constant", warmup_steps=0, max_grad_norm=0.5),
    train=TrainConfig(steps=2, batch_size=4, seq_len=16, eval_sequences=4, accumulate=2, device="cpu", predict=False),
)


def run(config: Config) -> list[float]:
    """Losses, norms and the loss of the validation of a run."""
    result = run_training(config)
    return [*result.losses, *(step.grad_norm for step in result.steps), result.valid_loss]


PROGRAMS: dict[str, tuple[Callable[[str], list[float]], int]] = {
    "fully_shard": (plain, 2),
    "clip_grad_norm_": (clipped, 2),
    "reshard_after_forward=False": (kept, 2),
    "replicas": (replicated, 4),
    "parameters with owners": (owned, 2),
    "mixed precision": (mixed, 2),
    "CPU offload": (offloaded, 2),
    "CPU offload on one rank": (offloaded_alone, 1),
    "optimizer on its own stream": (on_a_stream, 2),
    "hsdp(comm_async=True)": (asynchronous, 2),
    "activations on the host": (activations_on_the_host, 2),
    "inputs of blocks on the host": (block_inputs_on_the_host, 1),
    "redistribute": (redistributed, 4),
    "chunks": (in_chunks, 2),
    "ring attention": (attended, 4),
    "pipelines": (pipelined, 2),
    "sharded stages": (partial(pipelined, tied=False, dp=2, shard="layers"), 4),
    "experts": (with_experts, 2),
    "experts on nodes": (partial(with_experts, ranks_per_node=2), 4),
}
