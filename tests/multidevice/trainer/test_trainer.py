"""One `train(config)`: alone, on simulated ranks, under torchrun. Losses agree, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.expert_parallel import GroupedExperts
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.machine import find_machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.redistribute.plan import plan_here
from hyper_parallel.models import LlamaConfig
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer import loop
from hyper_parallel.trainer.config import Config, DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
from hyper_parallel.trainer.loop import RankPlace, Trainer, train
from hyper_parallel.trainer.optimizer import build_optimizer, clip_gradients
from hyper_parallel.trainer.parallelize import Parallelized
from hyper_parallel.trainer.preflight import plan_run
from hyper_parallel.trainer.report import StepRecord, TrainResult, read_log

pytestmark = pytest.mark.tier("test")

TINY = Config(
    model=LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
    data=DataConfig(max_bytes=200_000),
    train=TrainConfig(steps=4, batch_size=16, seq_len=16, eval_sequences=12, device="cpu"),
)
TINY_TOML = """
[model]
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
[data]
max_bytes = 200_000
[train]
batch_size = 16
seq_len = 16
eval_sequences = 12
device = "cpu"
"""
H200, H100, H20 = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H20"


def same(one: TrainResult, other: TrainResult, rel: float = 1e-5) -> None:
    assert one.losses == pytest.approx(other.losses, rel=rel)
    norms = [[record.grad_norm for record in run.steps] for run in (one, other)]
    assert norms[0] == pytest.approx(norms[1], rel=10 * rel)
    assert one.valid_loss == pytest.approx(other.valid_loss, rel=rel)


@pytest.fixture(scope="module")
def alone() -> TrainResult:
    return train(TINY)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (8, ParallelConfig(dp_replicate=2, dp_shard=4)),
        (4, ParallelConfig(dp_shard=4)),
        (4, ParallelConfig(dp_replicate=4)),
        (2, ParallelConfig(reshard_after_forward=False)),
        (1, ParallelConfig()),
    ],
    ids=["2 x 4", "shard", "replicate", "no reshard", "one"],
)
def test_simulated_ranks_train_like_one_device(alone: TrainResult, world_size: int, parallel: ParallelConfig) -> None:
    results = sim.run(train, world_size, args=(replace(TINY, parallel=parallel),))
    same(results[0], alone)
    for result in results[1:]:
        assert result.losses == results[0].losses, "every rank must see the same mean"
        assert result.valid_loss == results[0].valid_loss


@pytest.mark.sim
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_clipping_is_torchs(max_norm: float) -> None:
    """Against `clip_grad_norm_`, on uneven shards with replicas."""

    def body() -> None:
        dims = ParallelDims(dp_replicate=2, dp_shard=3, world_size=6)
        mesh = dims.build_mesh("cpu")
        pair = []
        for _ in range(2):
            model = fully_shard(torch.nn.Linear(5, 7), mesh=mesh)
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(distribute_tensor(torch.ones(param.shape), mesh, param.placements))
            model(torch.arange(10.0).view(2, 5)).square().sum().backward()
            pair.append(model)
        ours, torchs = pair
        norm = clip_gradients(Parallelized([ours]), max_norm)
        expected = torch.nn.utils.clip_grad_norm_(torchs.parameters(), max_norm or math.inf).full_tensor()
        assert norm == pytest.approx(expected.item(), rel=1e-6)
        for ours_param, torchs_param in zip(ours.parameters(), torchs.parameters(), strict=True):
            torch.testing.assert_close(ours_param.grad.full_tensor(), torchs_param.grad.full_tensor())

    sim.run(body, 6)


@sim.ranks(4, backends=("sim", "gloo"))
def test_the_update_of_shards_is_that_of_whole_tensors(ctx) -> None:
    """Against torch's AdamW on one device: uneven shards, copies, a plain tensor, and a sum that is pending."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    whole = {"w": torch.randn(5, 6), "norm": torch.randn(6), "late": torch.randn(4, 3), "plain": torch.randn(2, 2)}
    grads = [{name: torch.randn(value.shape) for name, value in whole.items()} for _ in range(3)]
    where = {"w": [Shard(0), Shard(1)], "norm": [Replicate(), Replicate()], "late": [Replicate(), Shard(0)]}
    ours = {
        name: torch.nn.Parameter(distribute_tensor(value, mesh, where[name]) if name in where else value.clone())
        for name, value in whole.items()
    }
    one = {name: torch.nn.Parameter(value.clone()) for name, value in whole.items()}
    config = OptimizerConfig(lr=0.1, weight_decay=0.2)
    optimizer = build_optimizer(ours.items(), config)
    groups = [
        {"params": [one[name] for name in ("w", "late", "plain")]},
        {"params": [one["norm"]], "weight_decay": 0.0},
    ]
    expected = torch.optim.AdamW(groups, lr=0.1, betas=(config.beta1, config.beta2), weight_decay=0.2, fused=True)
    for step in grads:
        for name, grad in step.items():
            one[name].grad = grad
            ours[name].grad = distribute_tensor(grad, mesh, where[name]) if name in where else grad.clone()
        half = distribute_tensor(step["late"] / 2, mesh, [Replicate(), Shard(0)])
        ours["late"].grad = DTensor.from_local(half.to_local(), mesh, [Partial(), Shard(0)])
        optimizer.step()
        expected.step()
    for name, param in ours.items():
        state = optimizer.state[param]
        for mine, theirs in ((param, one[name]), *((state[key], expected.state[one[name]][key]) for key in state)):
            if name in where and mine.ndim:
                assert mine.placements == tuple(where[name])
                mine = mine.full_tensor()
            torch.testing.assert_close(mine, theirs)  # the last bits depend on where a shard ends


@pytest.mark.sim
def test_accumulated_gradients_are_those_of_the_whole_batch(alone: TrainResult) -> None:
    config = TINY.with_changes("train", {"accumulate": 2}).with_changes("parallel", {"dp_replicate": 2})
    same(sim.run(train, 4, args=(config,))[0], alone)
    same(train(TINY.with_changes("train", {"accumulate": 4})), alone)


@pytest.mark.sim
def test_accumulation_communicates_once_per_step_or_in_each_micro_batch() -> None:
    counts = []
    for accumulate, each in ((1, False), (2, False), (2, True)):
        config = TINY.with_changes("train", {"accumulate": accumulate}).with_changes("parallel", {"reduce_each": each})
        with sim.world(2) as world:
            world.run(train, args=(config,))
            counts.append(sum(row.count for row in world.trace.by_axis() if row.op == "reduce_scatter"))
    assert counts[0] == counts[1] > 0
    assert counts[2] == 2 * counts[1]


@pytest.mark.tier("full", each=2)
@pytest.mark.sim
@pytest.mark.parametrize("accumulate", [2, 1])
def test_gradients_of_norms_are_added_up_together_over_tp(accumulate: int) -> None:
    """Once a step, however many micro-batches it has."""
    model = replace(TINY.model, qk_norm=True, num_hidden_layers=3)
    config = replace(TINY, model=model).with_changes("parallel", {"dp_shard": 2, "tp": 2})
    config = config.with_changes("train", {"accumulate": accumulate})

    def over_tp(steps: int) -> Counter[tuple[str, str, tuple[int, ...]]]:
        with sim.world(4) as world:
            world.run(train, args=(config.with_changes("train", {"steps": steps}),))
        events = [event for event in world.trace.events if (event.rank, event.axis) == (0, "tp")]
        return Counter((event.op, event.dtype, event.input_shapes[0]) for event in events)

    norms = 2 * model.hidden_size + 2 * model.hidden_size // model.num_attention_heads
    step = over_tp(2) - over_tp(1)
    sums = {shape: count for (op, _, shape), count in step.items() if op == "all_reduce" and len(shape) == 1}
    assert sums == {(norms,): 3, (model.hidden_size,): 1, (1,): 1}  # blocks, the last norm, and what clipping needs
    assert {dtype for _, dtype, _ in step} == {"float32"}, "ranks tell each other shapes once, not in each step"


@pytest.mark.tier("test", each=3)
@pytest.mark.sim
@pytest.mark.parametrize(
    "parallel",
    [
        {"dp_shard": 2},
        {"dp_shard": 2, "reshard_after_forward": False},
        {"dp_replicate": 2, "tp": 2},
        {"dp_shard": 2, "engine": "hsdp"},
    ],
    ids=["ZeRO-3", "ZeRO-2", "tp", "hsdp"],
)
@pytest.mark.parametrize("each", [False, True], ids=["at once", "reduce each"])
def test_between_steps_there_are_only_weights_and_their_state(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], each: bool
) -> None:
    config = TINY.with_changes("train", {"accumulate": 2}).with_changes("parallel", {**parallel, "reduce_each": each})
    gc.collect()
    before = {id(tensor) for tensor in every_tensor()}
    trainers: list[Trainer] = []

    def two_steps(trainer: Trainer, on_step: Any) -> None:
        for _ in range(2):
            trainer.step()
        trainers.append(trainer)

    monkeypatch.setattr(Trainer, "run", two_steps)
    ranks = math.prod(parallel.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp"))
    sim.run(train, ranks, args=(config,))
    gc.collect()
    known = set[int]()
    for trainer in trainers:
        state = [value for each in trainer.optimizer.state.values() for value in each.values()]
        buffers = [buffer for part in trainer.model.parts for buffer in part.buffers()]
        tensors = [tensor for _, tensor in trainer.model.named_tensors()]
        known |= {storage(tensor).data_ptr() for tensor in (*tensors, *buffers, *state) if torch.is_tensor(tensor)}
    new = [tensor for tensor in every_tensor() if id(tensor) not in before]
    assert all(tensor.grad is None for tensor in new if tensor.is_leaf)  # nor of what stands for weights in forward
    kept = [tensor for tensor in new if storage(tensor).data_ptr() not in known]
    assert [tuple(tensor.shape) for tensor in kept if storage(tensor).nbytes() > 1024] == []


def every_tensor() -> list[torch.Tensor]:
    return [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]


def storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


@pytest.mark.sim
def test_bf16_trains_alike_on_one_rank_and_on_many(alone: TrainResult) -> None:
    config = TINY.with_changes("precision", {"param_dtype": "bf16"})
    many, one = sim.run(train, 4, args=(config,))[0], train(config)
    same(many, one, rel=2e-3)
    assert many.losses == pytest.approx(alone.losses, rel=2e-2)
    assert many.losses != pytest.approx(alone.losses, rel=1e-6), "bf16 must have been used"
    assert not torch.distributed.is_initialized(), "the group that train made must be gone"


@pytest.mark.sim
@pytest.mark.tier("test")
def test_weights_of_the_router_stay_float32_where_experts_are_a_unit_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    forward = GroupedExperts._run

    def watched(self: GroupedExperts, x: torch.Tensor, chosen: torch.Tensor, *weights: Any) -> torch.Tensor:
        seen.append((x.dtype, weights[0].dtype))
        return forward(self, x, chosen, *weights)

    monkeypatch.setattr(GroupedExperts, "_run", watched)
    config = TINY.with_changes("precision", {"param_dtype": "bf16"}).with_changes("parallel", {"ep": 2})
    sim.run(train, 2, args=(config.with_changes("train", {"model": "moe", "steps": 1}),))
    assert set(seen) == {(torch.bfloat16, torch.float32)}


@pytest.mark.tier("full")
@pytest.mark.sim
def test_the_same_seed_gives_the_same_bits_and_another_one_other_text() -> None:
    first, again = (sim.run(train, 4, args=(TINY,), seed=seed)[0] for seed in (1, 2))
    assert first.losses == again.losses, "the interleaving of ranks must not matter"
    other = sim.run(train, 4, args=(TINY.with_changes("train", {"seed": 1}),))[0]
    assert other.losses != first.losses


@pytest.mark.sim
def test_only_the_first_rank_reports_and_logs(tmp_path: Path) -> None:
    seen: list[StepRecord] = []
    log = tmp_path / "new" / "log.jsonl"
    result = sim.run(train, 4, args=(TINY.with_changes("train", {"log": str(log), "eval_every": 2}), seen.append))[0]
    assert seen == read_log(log) == list(result.steps)
    assert [record.valid_loss is not None for record in seen] == [False, True, False, True]


@pytest.mark.sim
def test_the_log_is_on_disk_after_every_step(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lengths: list[int] = []
    train(TINY.with_changes("train", {"log": str(log)}), lambda _: lengths.append(len(read_log(log))))
    assert lengths == [1, 2, 3, 4]


@pytest.mark.sim
@pytest.mark.parametrize("damage", [b"\0" * 9 + b"\n", b'{"step": 2, "lo\n', b"[1]\n", b"\n", b"\xff\n"])
def test_a_run_goes_on_behind_a_damaged_line_of_its_log(tmp_path: Path, damage: bytes) -> None:
    """As a machine that goes down leaves one; what other versions have written of a step stays, too."""
    log = tmp_path / "log.jsonl"
    config = TINY.with_changes("train", {"log": str(log)})
    config = config.with_changes("checkpoint", {"folder": str(tmp_path / "run"), "every": 2})
    whole = train(config)
    lines = log.read_bytes().splitlines(keepends=True)
    kept = [lines[0].replace(b"{", b'{"more": 1, ', 1), damage]
    log.write_bytes(b"".join([*kept, *lines[2:], b'{"step": 5, "loss": 1']))
    shutil.rmtree(tmp_path / "run" / "step-00000004")
    result = train(config)
    assert result.losses == whole.losses[2:]
    found = log.read_bytes().splitlines(keepends=True)
    assert found[:2] == kept, "what is there is not written anew"
    assert [json.loads(line)["step"] for line in found[2:]] == [3, 4]


@pytest.mark.sim
def test_a_damaged_line_is_no_step_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    train(TINY.with_changes("train", {"log": str(log)}))
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], b"\0\xff\n", *lines[2:], lines[1][:20]]))
    assert [record.step for record in read_log(log)] == [1, 3, 4]
    log.write_bytes(b"no log\n")
    with pytest.raises(ValueError, match="Expecting value"):
        read_log(log)


@pytest.mark.sim
def test_a_timeout_longer_than_clocks_count_is_none() -> None:
    train(TINY.with_changes("train", {"stuck_after_s": 1e10}))


@pytest.mark.sim
def test_loss_falls_on_real_text() -> None:
    config = TINY.with_changes("train", {"steps": 40})
    result = train(config)
    assert result.losses[0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.5)
    # Each Python brings another text; all of them are far from 256 equally likely bytes after a few steps.
    assert sum(result.losses[-5:]) / 5 < 0.75 * result.losses[0]
    assert result.valid_loss < 3.8


@pytest.mark.sim
def test_a_config_that_does_not_fit_fails_on_every_rank_alike() -> None:
    with pytest.raises(ValueError, match="is 3, not world_size=2"):
        sim.run(train, 2, args=(replace(TINY, parallel=ParallelConfig(dp_shard=3)),))


@pytest.mark.sim
def test_redistributions_of_a_run_are_planned_for_its_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over tp of a few numbers are gathered and added up where a reduction has a long latency."""
    config, kinds, losses = replace(TINY, parallel=ParallelConfig(tp=2)), {}, {}
    for hardware in (None, "h100-sxm"):
        with sim.world(2) as world:
            losses[hardware] = world.run(train, args=(config.with_changes("train", {"hardware": hardware}),))[0].losses
        kinds[hardware] = Counter(event.op for event in world.trace.of_rank(0) if event.axis == "tp")
    assert kinds["h100-sxm"]["all_reduce"] < kinds[None]["all_reduce"]
    assert losses["h100-sxm"] == pytest.approx(losses[None], rel=1e-5)
    found, unknown = find_machine("h100-sxm"), "no-such-machine"

    def refused(*files: Any) -> str:
        monkeypatch.setattr(loop, "find_machine", lambda _: find_machine(files[torch.distributed.get_rank()]))
        with pytest.raises(ValueError, match="hardware") as error:
            train(config.with_changes("train", {"hardware": "mine.toml"}))
        return str(error.value)

    for other, words in ((found.with_figures(intra__bandwidth=1e9), "other figures"), (unknown, "or none")):
        texts = sim.run(refused, 2, args=(found, other))
        assert texts[0] == texts[1], "all ranks alike"
        assert words in texts[0]
    assert all("there" in text or "has that name" in text for text in sim.run(refused, 2, args=(unknown, unknown)))


def planned_for(device: str, *names: str, hardware: str | None = None) -> str:
    """Tell the machine that the plans of a run are for, by the names of the ranks' devices."""
    config, place = TINY.with_changes("train", {"hardware": hardware, "device": device}), RankPlace.current()
    dims = plan_run(config.with_changes("parallel", {"tp": 2}), 2)
    mesh, platform = dims.build_mesh(device), get_platform(device)
    if names:
        platform.device_type, platform.name, platform.compares_collectives = "cuda", lambda: names[place.rank], False
        platform.machine = lambda: find_machine("h100-sxm")
    Trainer(config, dims, platform, place, mesh)
    layout = Layout.from_device_mesh(dims.get_mesh("tp"))
    return str(plan_here(layout("tp"), layout(), (8,), torch.float32, dims.get_mesh("tp")).machine)


@sim.ranks(2, backends=("sim", "gloo"))
def test_a_run_is_planned_for_the_machine_that_the_devices_of_all_ranks_are_of(ctx: sim.RankTest) -> None:
    assert planned_for("cpu", H200, H200) == "h200"
    for names in ((H200, H100), (H20, H20), (H200, H20), ()):
        assert planned_for("cpu", *names) == "unnamed", names
    assert planned_for("cpu", H200, H20, hardware="ascend-910b") == "ascend-910b"


@pytest.mark.sim
def test_the_first_rank_says_why_plans_are_for_the_usual_machine(caplog: pytest.LogCaptureFixture) -> None:
    exchanges = []
    for device, *names in (("cpu", H200, H200), ("cpu", H20, H20), ("cpu", H200, H20), ("cpu",), ("npu",)):
        with sim.world(2, device=None if device == "cpu" else device) as world:
            world.run(planned_for, args=(device, *names))
        exchanges.append(len(world.trace.of_rank(0)))
    whys = [text.split(" planned for h100-sxm, because ")[1].split("; ")[0] for text in caplog.messages]
    assert whys == [f"nothing describes {H20}", "ranks describe their devices differently"]
    assert [each - exchanges[3] for each in exchanges] == [1, 1, 1, 0, 0], "they ask once, and simulated ranks do not"


def start(*arguments: str, folder: Path, **options: object) -> subprocess.Popen[str]:
    (folder / "tiny.toml").write_text(TINY_TOML)
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return warm.WarmPopen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**env, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.tier("full")
@pytest.mark.gloo
def test_torchrun_gives_the_losses_of_simulated_ranks(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = ("-m", "hyper_parallel.cli", "train", "tiny.toml", "--steps", "4", "--log-file", "gloo.jsonl")
    process = start(*torchrun, *command, folder=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("log: gloo.jsonl") == 1, "only the first rank prints"
    assert "16 x 16 bytes, 4 steps; 2 ranks: dp_shard=2" in out
    gloo = read_log(tmp_path / "gloo.jsonl")
    simulated = sim.run(train, 2, args=(TINY,))[0]
    assert [record.loss for record in gloo] == pytest.approx(simulated.losses, rel=1e-5)
    assert gloo[-1].valid_loss == pytest.approx(simulated.valid_loss, rel=1e-5)


def wait_for_step(process: subprocess.Popen[str]) -> str:
    """Read output up to the first step; no clock is involved."""
    assert process.stdout is not None
    head = ""
    for line in process.stdout:
        head += line
        if "step 1/" in line:
            return head
    raise AssertionError(f"the run ended before its first step:\n{head}\n{process.communicate()[1]}")


@pytest.mark.tier("full")
@pytest.mark.gloo
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_all_processes_and_keeps_the_log(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hyper_parallel.cli")
    process = start(*torchrun, "train", "tiny.toml", "--steps", "1000000", "--log-file", "log.jsonl", folder=tmp_path)
    wait_for_step(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert err.count("interrupted; the log so far is in log.jsonl") == 1, err
    assert next(record.step for record in read_log(tmp_path / "log.jsonl")) == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.tier("full")
@pytest.mark.sim
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_all_simulated_ranks_and_keeps_the_log(tmp_path: Path) -> None:
    command = (
        "-m",
        "hyper_parallel.cli",
        "train",
        "tiny.toml",
        "--sim",
        "4",
        "--steps",
        "1000000",
        "--log-file",
        "log.jsonl",
    )
    process = start(*command, folder=tmp_path)
    wait_for_step(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err == "interrupted; the log so far is in log.jsonl\n"
    assert next(record.step for record in read_log(tmp_path / "log.jsonl")) == 1
    with pytest.raises(ProcessLookupError):  # its session was its own: no process may be left in it
        os.killpg(process.pid, 0)


@pytest.mark.sim
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_in_this_process_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def interrupt(record: StepRecord) -> None:
        if record.step == 2:
            os.kill(os.getpid(), signal.SIGINT)  # as a terminal does: to the process, not to this thread

    config = TINY.with_changes("train", {"steps": 1_000_000, "log": str(tmp_path / "log.jsonl")})
    with pytest.raises(KeyboardInterrupt):
        sim.run(train, 4, args=(config, interrupt))
    assert len(read_log(tmp_path / "log.jsonl")) >= 2
    left = [t for t in threading.enumerate() if t not in before and t.is_alive() and not t.daemon]
    assert left == []
    assert sim.run(lambda: 1, 4) == [1] * 4, "a new world must start"
