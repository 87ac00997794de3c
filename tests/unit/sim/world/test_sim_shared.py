"""`device="cuda"`: ranks that share a device, here one that is late, so that what nothing orders goes wrong.

What runs on a GPU runs here through the same calls of `torch.npu` (`one_device.py`). The calls that are different by
vendor, and torch's allocator, are played by a module that notes what is called.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from one_device import nested, shared
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

import sim
from hyper_parallel import fully_shard
from hyper_parallel.platform import get_platform
from sim.kernel.context import current_context
from sim.late.shared import SharedDevice
from sim.late.switch import why_not
from sim.script.launch import run_script
from sim.script.options import parse

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")]
needs_late = pytest.mark.skipif(bool(why_not()), reason=why_not())
SEEDS = range(6)


def all_that_ranks_communicate(device: str) -> list:
    rank = dist.get_rank()
    x = torch.arange(4.0).to(device) + rank
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    parts = [torch.empty(4, device=device) for _ in range(2)]
    dist.all_gather(parts, x * 2)
    half = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(half, x + rank)
    dist.all_reduce(half, op=dist._make_nccl_premul_sum(torch.tensor(0.5, device=device)))
    swapped = torch.empty_like(x)
    dist.all_to_all_single(swapped, x + rank)
    dist.broadcast(swapped, src=1)
    other = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x + rank, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    objects: list = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    group = dist.new_group([0, 1])
    for work in [dist.all_reduce(each, group=group, async_op=True) for each in (x, half)]:
        work.wait()
    dist.barrier()
    return [each.tolist() for each in (x, *parts, half, swapped, other)] + objects


@pytest.mark.tier("test")
@needs_late
def test_all_that_ranks_communicate():
    wanted = sim.run(all_that_ranks_communicate, 2, ("cpu",))
    assert shared(all_that_ranks_communicate, args=("npu",), looks=True) == wanted
    assert shared(all_that_ranks_communicate, args=("npu",), check_races=True) == wanted
    for seed in SEEDS:
        assert shared(all_that_ranks_communicate, args=("npu",), seed=seed) == wanted


@needs_late
def test_all_that_ranks_communicate_over_late_devices_of_their_own():
    wanted = sim.run(all_that_ranks_communicate, 2, ("cpu",))
    for options in ({"check_races": True}, {"seed": 3}):
        assert sim.run(all_that_ranks_communicate, 2, ("npu",), device="npu", **options) == wanted


def _without_beginnings(self, lane, what):
    _, ends = BEGIN(self, lane, what)
    return self.module.Event(), ends


def _without_those_of_others(self, sides, run):
    lane = sides[0].lane
    lane.wait_event(sides[0].begins)
    with self.module.stream(lane):
        run()
    for side in sides:
        side.ends.event.record(lane)
        side.ends.issued = True


BEGIN = SharedDevice.begin
ORIGINALS = {name: getattr(SharedDevice, name) for name in ("wait", "begin", "move")}
MUTANTS = {"wait": lambda self, end: None, "begin": _without_beginnings, "move": _without_those_of_others}


@needs_late
@pytest.mark.parametrize("name", MUTANTS)
def test_without_one_of_its_waits_the_order_is_lost(name, monkeypatch):
    monkeypatch.setattr(SharedDevice, name, MUTANTS[name])

    def body() -> float:
        x = torch.full((4,), dist.get_rank() + 1.0, device="npu")
        work = [dist.all_reduce(x, async_op=True) for _ in range(2)]
        for each in work:
            each.wait()
        return x.sum().item()

    with monkeypatch.context() as patch:
        patch.setattr(SharedDevice, name, ORIGINALS[name])
        assert shared(body, looks=True) == [24.0, 24.0]
    with pytest.raises(sim.InFlightBufferRace, match="nothing orders them"):
        shared(body, looks=True)


def gathered(waits: bool):
    def body() -> list[float]:
        x, out = torch.full((2,), dist.get_rank() + 1.0, device="npu"), torch.empty(4, device="npu")
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        del x  # it lives until the rank has waited
        torch.zeros(2, device="npu")
        if waits:
            work.wait()
        result = (out * 1).tolist()
        work.wait()
        return result

    return body


@pytest.mark.tier("test")
@needs_late
def test_a_rank_that_forgets_to_wait_reads_old_data_and_is_named():
    right = [[1.0, 1.0, 2.0, 2.0]] * 2
    assert [shared(gathered(waits=True), seed=seed) for seed in SEEDS] == [right] * len(SEEDS)
    assert any(shared(gathered(waits=False), seed=seed) != right for seed in range(20))
    with pytest.raises(sim.InFlightBufferRace, match=r"that the stream of group 'world' writes, and nothing"):
        shared(gathered(waits=False), check_races=True)
    assert shared(gathered(waits=True), check_races=True) == right


# -- streams, as check_races follows them ------------------------------------------------------------------------------


def beside(waits: bool) -> float:
    """A stream computes what another one has made."""
    x, side = torch.full((64,), 2.0, device="npu"), torch.npu.Stream()
    if waits:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x * 2
    torch.npu.current_stream().wait_stream(side)
    return y.sum().item()


def behind_an_event(waits: bool) -> float:
    x, side, event = torch.zeros(64, device="npu"), torch.npu.Stream(), torch.npu.Event()
    x.add_(1)
    event.record()
    x[:32] *= 3  # the other half of what the event marks
    with side:
        if waits:
            event.wait()
        y = x[32:] + 1
        event = side.record_event()
    torch.npu.current_stream().wait_event(event)
    return y.sum().item()


def copied(waits: bool) -> list[float]:
    """The host reads what a copy is still writing."""
    x, host = torch.arange(4.0, device="npu"), torch.empty(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if waits:
        torch.npu.current_stream().synchronize()
    return host.tolist()


def given_back(waits: bool) -> float:
    """Memory is used again while another stream reads it."""
    x, side = torch.full((64,), 2.0, device="npu"), torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x * 2
    if waits:
        x.record_stream(side)
    del x
    torch.zeros(64, device="npu")
    side.synchronize()
    return y.sum().item()


def resized(waits: bool) -> float:
    """A storage that has given its memory back gets other one, on another stream."""
    x, side = torch.full((64,), 2.0, device="npu"), torch.npu.Stream()
    storage = x.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    x.fill_(3)
    with torch.npu.stream(side):
        if waits:
            side.wait_stream(torch.npu.default_stream())
        y = x * 2
    torch.npu.synchronize()
    return y.sum().item()


def optimized(waits: bool) -> float:
    """Hooks of backward compute on a stream of their own."""
    x, side = torch.ones(8, device="npu", requires_grad=True), torch.npu.Stream()

    def halved(grad: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            half = grad / 2
        if waits:
            torch.npu.current_stream().wait_stream(side)
        return half

    y = x * 3
    y.register_hook(halved)
    y.sum().backward()
    torch.npu.synchronize()
    return x.grad.sum().item()


def polled(waits: bool) -> float:
    """The host asks an event until what it marks has run."""
    x, side = torch.ones(8, device="npu"), torch.npu.Stream()
    event = torch.npu.current_stream().record_event()
    while waits and not event.query():
        pass
    with torch.npu.stream(side):
        y = x + 1
    side.synchronize()
    return y.sum().item()


@needs_late
@pytest.mark.parametrize("body", [beside, behind_an_event, copied, given_back, resized, optimized, polled])
def test_the_streams_of_a_rank_are_followed(body):
    wanted = shared(body, 1, args=(True,), looks=True)
    assert shared(body, 1, args=(True,), check_races=True) == wanted
    with pytest.raises(
        sim.InFlightBufferRace, match=r"\n  (first|issued): *\w+\.py:\d+ .*\n  (then|touched): *\w+\.py"
    ):
        shared(body, 1, args=(False,), check_races=True)


class Elsewhere(torch.autograd.Function):
    """Its backward runs on another stream than its forward, as C++ chooses, and not Python."""

    @staticmethod
    def forward(ctx, x, lane):
        ctx.lane = lane
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        device = current_context().late
        before, device.current = device.current, ctx.lane
        device.wait_for(ctx.lane, before.tail)
        found = grad * 2
        device.wait_for(before, ctx.lane.tail)
        device.current = before
        return found, None


@needs_late
def test_backward_runs_on_the_streams_of_forward_without_python(monkeypatch):
    def body() -> float:
        device = current_context().late
        x = torch.ones(4, device="npu", requires_grad=True)
        Elsewhere.apply(x * 1, device.stream(device.new_stream())).sum().backward()
        return x.grad.sum().item()

    assert shared(body, 1, check_races=True) == [8.0]
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: -1)
    with pytest.raises(sim.InFlightBufferRace, match="nothing orders them"):
        shared(body, 1, check_races=True)


@needs_late
@pytest.mark.parametrize("run", [shared, lambda body: sim.run(body, 2, device="npu")])
def test_who_waits_for_the_device_waits_for_ranks_that_have_not_joined(run):
    def body() -> list[float]:
        out = torch.empty(2, device="npu")
        dist.all_gather_into_tensor(out, torch.ones(1, device="npu") * dist.get_rank(), async_op=True)
        torch.npu.synchronize()
        return out.tolist()

    assert run(body) == [[0.0, 1.0]] * 2

    def alone() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1, device="npu"), async_op=True)
            torch.npu.synchronize()

    with pytest.raises(sim.Deadlock, match="rank 0  waits in all_reduce #0"):
        run(alone)


def test_groups_have_the_devices_of_their_backend():
    def body() -> list[list[str]]:
        groups = [dist.new_group([0], backend=name) for name in ("gloo", "nccl", "cpu:gloo,cuda:nccl", None)]
        return [[device.type for device in group._device_types] for group in groups]

    with sim.world(1) as world:
        assert world.run(body) == [[["cpu"]] * 4]
        world.network.devices = SimpleNamespace(kind="cuda")
        assert world.run(body) == [[["cpu"], ["cuda"], ["cpu", "cuda"], ["cpu", "cuda"]]]
        with pytest.raises(RuntimeError, match="no backend type is associated with device type cpu"):
            world.run(lambda: dist.all_reduce(torch.ones(1), group=dist.new_group([0], backend="nccl")))


@needs_late
def test_each_rank_has_streams_and_memory_of_its_own():
    def body() -> tuple:
        rank, npu = dist.get_rank(), torch.npu
        kept = torch.ones((rank + 1) * 1024, device="npu")
        dist.barrier()
        dropped = torch.ones((2 - rank) * 4096, device="npu")
        dist.barrier()
        del dropped
        dist.barrier()
        first = npu.memory_allocated(), npu.max_memory_allocated(), npu.memory_stats()["allocated_bytes.all.peak"]
        platform = get_platform()
        platform.reset_peak_memory()
        stats = platform.memory_stats()
        assert npu.default_stream() == npu.current_stream()
        assert (platform.device_type, platform.device_count(), platform.device().index) == ("npu", 1, 0)
        with pytest.raises(RuntimeError, match="share npu:0"):
            npu.set_device(1)
        npu.set_device("npu:0")
        del kept
        return first, stats.allocated, stats.peak_allocated, npu.current_stream().stream_id

    found = shared(body)
    assert [each[0] for each in found] == [(4096, 36864, 36864), (8192, 24576, 24576)]
    assert [each[1:3] for each in found] == [(4096, 4096), (8192, 8192)]
    assert len({each[3] for each in found}) == 2


def trained(engine: str, device: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    wrap = fully_shard if engine == "ours" else fsdp2
    for layer in (model[0], model[2], model):
        wrap(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(16.0).view(2, 8).to(device) / 16 + dist.get_rank()
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.tier("test")
@needs_late
@pytest.mark.parametrize("engine", ["ours", "fsdp2"])
def test_training_gives_what_it_gives_on_the_cpu(engine):
    wanted = sim.run(trained, 2, (engine, "cpu"))
    for options in ({"looks": True}, {"check_races": True}, {"seed": 3}):
        torch.testing.assert_close(shared(trained, args=(engine, "npu"), **options), wanted)


class Played:
    """A device module whose allocator and generator are numbers."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.random = torch.zeros(1)
        self.seeded: list[int] = []

    def allocate(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def memory_stats(self) -> dict[str, int]:
        return {f"{what}_bytes.all.{of}": value for what in ("allocated", "reserved") for of, value in
                (("current", self.now), ("peak", self.peak))}  # fmt: skip

    def memory_stats_as_nested_dict(self) -> dict:
        return nested(self.memory_stats())

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.now

    def synchronize(self) -> None:
        """Nothing is late."""

    def manual_seed(self, seed: int) -> None:
        self.seeded.append(seed)
        self.random = torch.tensor([float(seed)])

    def get_rng_state(self) -> torch.Tensor:
        return self.random

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.random = state

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    Stream = current_stream

    def stream(self, stream: object) -> torch.autograd.profiler.record_function:
        return torch.autograd.profiler.record_function("stream")


def test_what_happens_in_a_rank_s_turns_is_its_own():
    module = Played()
    ranks = [SharedDevice(rank, "cuda", seed=rank + 5) for rank in range(2)]
    for each in ranks:
        each.attach(module)
    module.allocate(1000)  # somebody else's
    with ranks[0].on_thread():
        module.allocate(10)
        module.allocate(30)
        module.allocate(-20)
        module.random = module.random + 1
        ranks[0].leave()
        with ranks[1].on_thread():
            module.allocate(500)
            assert (ranks[1].memory("allocated"), module.random.item()) == (500, 6.0)
        ranks[0].enter()
        assert module.random.item() == 6.0  # 5, and 1 that it has drawn
        module.allocate(1)
        assert (ranks[0].memory("allocated"), ranks[0].memory("reserved", peak=True)) == (21, 40)
        ranks[0].reset_peaks()
        assert ranks[0].memory_stats()["allocated_bytes.all.peak"] == 21
    assert module.seeded == [5, 6]


def test_a_world_on_a_device_that_is_not_here():
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"torch .*\n.*device: 'cuda'\n.*try: map_device='cuda'"):
            sim.world(2, device="cuda")
    with pytest.raises(ValueError, match="devices of its own"):
        sim.world(2, device="cuda", map_device="cuda")


def test_a_gpu_is_not_shared_once_torch_has_the_name_of_a_simulated_npu(monkeypatch):
    sim.run(dist.get_rank, 1, map_device="npu")
    monkeypatch.setattr(sys.modules["sim.world"], "get_platform", lambda kind: None)  # as where there is a GPU
    with pytest.raises(ValueError, match=r"(?s)simulated npu.*device: 'cuda'.*map_device='npu'.*try: a process of its"):
        sim.world(2, device="cuda")


SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("hccl")
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
x = torch.ones(2, device="npu") * dist.get_rank()
dist.all_reduce(x)
print(x)
"""


@needs_late
def test_a_script_on_a_device(tmp_path, capfd):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    launch = parse(["--nproc", "3", "--device", "npu", str(path)])
    assert "--device npu" in launch.replay()
    assert run_script(launch) == 0
    assert "tensor([3., 3.], device='npu:0')" in capfd.readouterr().out
    if not torch.cuda.is_available():
        assert run_script(parse(["--nproc", "3", "--device", "cuda", str(path)])) == 2
        assert "try: map_device='cuda' (--map-device)" in capfd.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu():
    """In a process of its own: in this one, torch may have been told of an npu."""
    body = f"import sys; sys.path[:] = {sys.path!r}; import {__name__}; {__name__}.on_a_gpu()"
    subprocess.run([sys.executable, "-c", body], check=True, timeout=300)


def on_a_gpu() -> None:
    wanted = sim.run(all_that_ranks_communicate, 2, ("cpu",))
    assert sim.run(all_that_ranks_communicate, 2, ("cuda",), device="cuda") == wanted
    for engine in ("ours", "fsdp2"):
        losses = sim.run(trained, 2, (engine, "cuda"), device="cuda", check_races=True)
        torch.testing.assert_close(losses, sim.run(trained, 2, (engine, "cpu")), rtol=1e-3, atol=1e-4)
