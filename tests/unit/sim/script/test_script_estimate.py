"""Estimates of torchrun scripts: what is recorded of a script is what it does on simulated ranks, and on a real CPU."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.utils.data import DataLoader

from benchmarks import scripts
from benchmarks.scripts import (
    EXAMPLES,
    NANO_GPT,
    Peak,
    ScriptCase,
    peak_of,
    predicted_bytes,
    record,
    simulated,
    told,
    watching_steps,
)
from sim.mesh.memory import replay_memory
from sim.mesh.program import HOST_COPIES, Comm, Op
from sim.mesh.replay.allocator import AllocatorRules
from sim.script.changes import OwnChunk
from sim.script.estimate import RecordedScript, main
from sim.script.launch import execute_script, prepare_views, read_script, script_folder_first
from sim.script.options import Launch
from sim.world import world

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.tier("test")]


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("name", ["fsdp2", "tensor_parallel", "ddp", "checkpoint"])
def test_collectives_of_the_steps_are_those_on_simulated_ranks(name: str) -> None:
    script = EXAMPLES / f"{name}.py"
    recorded = record(script)
    assert told(recorded.events[0]) == simulated(script, 4, 0)
    assert recorded.events[0]


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_that_send_messages_to_each_other_are_run_together(rank: int) -> None:
    script = EXAMPLES / "pipeline.py"
    recorded = record(script, 3, rank=rank)
    assert list(recorded.recorders) == [0, 1, 2]
    for each in range(3):
        assert told(recorded.events[each]) == simulated(script, 3, each)


@pytest.mark.tier("full")
@pytest.mark.parametrize("others", [False, True])
def test_what_is_left_out_of_collections_is_as_before_the_estimate(others: bool) -> None:
    """Estimates leave out of them what was there before; what somebody else has left out stays so."""
    gc.unfreeze()
    if others:
        gc.freeze()
    record(EXAMPLES / "fsdp2.py")
    left_out = gc.get_freeze_count()
    gc.freeze()  # as it is while this suite runs
    assert bool(left_out) == others


@pytest.mark.tier("full")
def test_tokens_are_routed_evenly_where_their_experts_depend_on_data() -> None:
    script = EXAMPLES / "moe.py"
    events = told(record(script).events[0])
    real = simulated(script, 4, 0)
    assert [(event[0], event[1], event[4:]) for event in events] == [(each[0], each[1], each[4:]) for each in real]
    routed = {(sent, got) for op, _, sent, got, dtype, *_ in events if op == "all_to_all" and dtype == "float32"}
    assert routed == {(9 * 8 * 4, 9 * 8 * 4)}  # 3 of 12 tokens to each of 4 experts, whose own stay


SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from {package} import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
copies = min(2, dist.get_world_size())
mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("dp_replicate", "dp_shard"))
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
options = {{{options}}}
for layer in model:
    fully_shard(layer, mesh=mesh, **options)
fully_shard(model, mesh=mesh, **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(4):
    for _ in range({batches}):
        model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PACKAGES = ["hyper_parallel.core.fully_shard", "torch.distributed.fsdp"]


def sharded(path: Path, package: str, *options: str, batches: int = 1) -> Path:
    path.write_text(SHARDED.format(package=package, options=", ".join(options), batches=batches))
    return path


@pytest.mark.tier("full")
def test_collectives_of_our_own_fully_shard_are_those_on_simulated_ranks(tmp_path: Path) -> None:
    path = sharded(tmp_path / "train.py", PACKAGES[0])
    found = told(record(path).events[0])
    assert found == simulated(path, 4, 0)
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= {event[0] for event in found}


@pytest.mark.tier("full", each=6)
@pytest.mark.parametrize("rank", [0, 1])
def test_parameters_with_owners_are_recorded_as_each_rank_has_them(rank: int, tmp_path: Path) -> None:
    path = sharded(tmp_path / "train.py", PACKAGES[0], "'shard_placement_fn': whole_parameters(model, 2)")
    path.write_text("from hyper_parallel import whole_parameters\n" + path.read_text())
    recorded = record(path, rank=rank)
    found = told(recorded.events[rank])
    assert found == simulated(path, 4, rank, map_device="cuda")  # an estimate is of a device, whose library sends lists
    assert {event[0] for event in found} == {"all_gather", "reduce_scatter", "all_reduce"}
    memory = replay_memory(recorded.programs[0], AllocatorRules(caching=False, round_to=1))
    assert memory.by_category["parameters"] == 2 * 512  # a matrix and a bias, and nothing of those of the other rank
    assert memory.by_category["optimizer"] == 2 * 3 * 512  # two moments and a counter for each
    assert not memory.unmatched


PINNED, PAGEABLE = "'offload_policy': CPUOffloadPolicy()", "'offload_policy': CPUOffloadPolicy(pin_memory=False)"
BF16 = "'mp_policy': MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
SHARDS = (8 * 16 + 16 + 16 * 8 + 8) * 4 // 2  # bytes of all parameters on one of two ranks


def moved(recorded: RecordedScript) -> dict[str, int]:
    """Bytes that the first rank copies in a recorded step between its host and its device."""
    (program, *_) = recorded.programs
    found: dict[str, int] = {}
    for segment, _ in program.segments_in_order():
        for event in segment.events:
            if isinstance(event, Comm) and event.op in HOST_COPIES:
                assert program.groups[event.group].axis == HOST_COPIES[event.op]
                found[event.op] = found.get(event.op, 0) + event.size
    return {op: size // 2 for op, size in found.items()}


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("options", "batches", "copied"),
    [
        ([PINNED], 1, {"copy_to_device": 2 * SHARDS, "copy_to_host": SHARDS}),
        ([PINNED, BF16], 1, {"copy_to_device": 2 * SHARDS, "copy_to_host": SHARDS}),
        ([PINNED, "'reshard_after_forward': False"], 1, {"copy_to_device": SHARDS, "copy_to_host": SHARDS}),
        ([PAGEABLE], 2, {"copy_to_device_pageable": 4 * SHARDS, "copy_to_host_pageable": 2 * SHARDS}),
        ([BF16], 1, {}),
    ],
    ids=["pinned", "bf16", "kept", "pageable", "none"],
)
def test_offload_is_copied_and_kept_on_the_host(
    package: str, options: list[str], batches: int, copied: dict[str, int], tmp_path: Path
) -> None:
    path = sharded(tmp_path / "train.py", package, *options, batches=batches)
    recorded = record(path, hardware="h100-sxm")
    # With real tensors there is nothing that could lock their pages.
    sharded(path, package, *[PAGEABLE if option == PINNED else option for option in options], batches=batches)
    assert told(recorded.events[0]) == simulated(path, 4, 0)
    assert moved(recorded) == copied
    memory = replay_memory(recorded.programs[0], AllocatorRules(caching=False, round_to=1))
    assert not memory.unmatched
    assert not recorded.recorders[0].changes
    on_host = {"parameters", "gradients", "optimizer"}.intersection(memory.on_host)
    on_device = {"parameters", "gradients", "optimizer"}.intersection(memory.by_category)
    if not copied:
        assert not memory.on_host
        assert on_device == {"parameters", "gradients", "optimizer"}
        return
    assert not on_device
    kept = sum(memory.on_host[name] for name in on_host)
    assert kept == pytest.approx(4 * SHARDS, abs=4 * 4 * 512)  # each block rounded up to 512 bytes, and counters
    done_by_host = {e.name for s in recorded.programs[0].segments.values() for e in s.events if is_on_host(e)}
    assert "aten.addcdiv_" in done_by_host
    assert not any("mm" in name for name in done_by_host)


def is_on_host(event: Any) -> bool:
    return isinstance(event, Op) and event.kind == "on_host"


@pytest.mark.tier("full")
@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_offloaded_takes_on_the_device_what_it_takes_of_torch(package: str, tmp_path: Path) -> None:
    """On a CPU the host's memory is the device's: torch copies nothing there, and no more is allocated."""
    path = sharded(tmp_path / "train.py", package, PAGEABLE)
    recorded = record(path, 1)
    assert moved(recorded) == {}
    assert predicted_bytes(recorded) == pytest.approx(allocated_by_torch(path), rel=0.02)


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("package", PACKAGES)
def test_steps_of_what_is_offloaded_take_longer(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(sharded(tmp_path / "train.py", package))
    plain = estimated(capsys, "--nproc", "4", path)
    path = str(sharded(tmp_path / "train.py", package, PINNED))
    found = estimated(capsys, "--nproc", "4", path)
    (memory,) = found["memory"]["classes"]
    assert set(memory["on_host"]) >= {"parameters", "gradients", "optimizer"}
    assert memory["peak_allocated"] < plain["memory"]["classes"][0]["peak_allocated"]
    assert found["time"]["step"]["value"] > plain["time"]["step"]["value"]
    assert main(["--hardware", "h100-sxm", "--nproc", "4", path]) == 0
    said = capsys.readouterr().out
    assert "on the host: " in said
    assert "exposed communication, host to device" in said
    assert "otherwise than the script says" not in said


@pytest.mark.tier("full")
def test_a_model_made_on_meta_is_recorded_where_to_empty_puts_it(tmp_path: Path) -> None:
    script = sharded(tmp_path / "given.py", PACKAGES[0]).read_text()
    made = "model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))"
    on_meta = script.replace(made, f'with torch.device("meta"):\n    {made}')
    on_meta = on_meta.replace("optimizer = ", 'model.to_empty(device="cpu")\noptimizer = ')
    events = []
    for number, text in enumerate((script, on_meta)):
        (tmp_path / f"{number}.py").write_text(text)
        events.append(told(record(tmp_path / f"{number}.py").events[0]))
    assert events[0] == events[1]
    assert on_meta.count("meta") == on_meta.count("to_empty") == 1


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("warmup", [1, 2])
def test_buckets_of_ddp_are_torchs_before_and_after_they_are_made_anew(warmup: int) -> None:
    events = told(record(NANO_GPT, 2, warmup=warmup, steps=1).events[0])
    assert sum(event[0] == "all_reduce" for event in events) > 2
    assert events == simulated(NANO_GPT, 2, 0, warmup=warmup, steps=1)


def allocated_by_torch(script: Path) -> int:
    """What torch's CPU allocator has given at most in the recorded steps of a real run on one rank."""
    launch = Launch(str(script), nproc=1, show=())
    source = read_script(launch)
    assert source is not None
    ranks = world(1, init=False)
    seen: list[Any] = []

    def on_rank(code: Any) -> None:
        with watching_steps() as memory:
            execute_script(code, "")
        seen.append(memory)

    with script_folder_first(source.folder):
        prepare_views(ranks, launch, source)
        with ranks:
            ranks.run(on_rank, (source.code,))
    peak = peak_of(seen[0])
    assert peak.script == peak.in_all  # no gloo here
    return peak.script


@pytest.mark.tier("full")
@pytest.mark.parametrize("script", [EXAMPLES / "fsdp2.py", EXAMPLES / "ddp.py", NANO_GPT], ids=lambda path: path.stem)
def test_memory_is_what_torchs_allocator_gives(script: Path) -> None:
    assert predicted_bytes(record(script, 1)) == pytest.approx(allocated_by_torch(script), rel=0.02)


def test_memory_of_a_loss_on_the_cpu_is_that_of_its_elements(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "weight = torch.nn.Parameter(torch.ones(4))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for _ in range(4):\n"
        "    loss = torch.nn.functional.mse_loss(weight.expand(1000, 4), torch.ones(1000, 4))\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    assert predicted_bytes(record(path, 1)) == pytest.approx(allocated_by_torch(path), rel=0.02)


@pytest.mark.tier("full")
def test_a_row_of_the_table_of_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "_allocated_once", lambda case: Peak(2048 * case.ranks, 9216 + next(later)))
    later = iter((1024, 0, 2048))
    monkeypatch.setattr(scripts, "seconds_of_estimate", lambda case: 1.25)
    monkeypatch.setattr(scripts, "predicted_bytes", lambda recorded: 4096)
    row = scripts.table([ScriptCase(EXAMPLES / "tensor_parallel.py", 4)]).splitlines()[-1]
    assert row == "| `examples/torch_scripts/tensor_parallel.py` | 4 | 1.2 | 4.0 | 8.0 | 0.500 | 1.0 | equal (42) |"
    case = ScriptCase(EXAMPLES / "moe.py", 4, bytes_are_known=False)
    recorded = record(case.path)
    assert scripts.compared(case, recorded) == "equal but for the rows of each expert (14)"
    assert scripts.compared(case._replace(bytes_are_known=True), recorded) == "not equal (14 and 14)"


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(text)
        return str(path)

    return write


LOOP = """
import torch
import torch.distributed as dist

dist.init_process_group()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    {inside}
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
    optimizer.step()
    optimizer.zero_grad()
"""


def estimated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["--hardware", "h100-sxm", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_plain_loop_on_very_many_ranks(script: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(capsys, "--nproc", "100000", script(LOOP.format(steps=4, inside="pass")))
    (memory,) = found["memory"]["classes"]
    assert memory["by_category"]["parameters"] == 64 * 64 * 4 + 512
    assert found["time"]["step"]["low"] < found["time"]["step"]["value"] < found["time"]["step"]["high"]
    assert "exposed communication, world" in found["time"]["terms"]
    assert found["stand_ins"] == []


SHARDED_BY_TORCH = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
model = torch.nn.Linear(64, 200_000, bias=False)
fully_shard(model, mesh=init_device_mesh("cuda", {sizes}, mesh_dim_names=("a", "b")[: len({sizes})]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize(("sizes", "rows"), [((100_000,), 2), ((12_500, 8), 25_000)])
def test_fsdp2_on_very_many_ranks(
    sizes: tuple[int, ...], rows: int, script: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = estimated(capsys, "--nproc", "100000", script(SHARDED_BY_TORCH.format(sizes=sizes)))
    (memory,) = found["memory"]["classes"]
    assert memory["by_category"]["parameters"] == rows * 64 * 4
    assert found["stand_ins"] == []


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 1))
def test_chunks_of_a_rank_are_those_of_torch(size: int, number: int, dim: int) -> None:
    whole = torch.arange(size * 3).view((size, 3) if dim == 0 else (3, size))
    ours, theirs = OwnChunk(whole, number, dim), _chunk_with_empty(whole, number, dim)
    assert [ours[index].tolist() for index in range(number)] == [each.tolist() for each in theirs]
    assert [ours[index].shape for index in range(number)] == [each.shape for each in theirs]


@pytest.mark.parametrize(("rows", "code"), [(1 << 20, 0), (1 << 29, 3)])
def test_what_does_not_fit_ends_with_another_exit_code(rows: int, code: int, script: Callable[[str], str]) -> None:
    held = f"held = torch.empty({rows}, 64)"  # 256 MiB; 128 GiB
    path = script(LOOP.format(steps=3, inside=held))
    assert main(["--hardware", "h100-sxm", "--nproc", "2", path]) == code


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize(
    ("inside", "asked"),
    [
        ("model.weight.sum().item()", "a value of float32"),
        ("assert not model.weight.isnan().any()", "a value of bool"),
        ("assert model.weight.isfinite().all()", "a value of bool"),
        ("model.weight.argmax(0).tolist()", "a list of int64 [64]"),
        ("model.weight[model.weight > 0]", "the sizes of aten.index"),
        ("(model.weight > 0).nonzero()", "the sizes of aten.nonzero"),
        ("model.weight.masked_select(model.weight > 0)", "the sizes of aten.masked_select"),
        ("model.weight.detach().numpy()", "an array of float32 [64, 64]"),
        ("assert (model.weight > 0).unique(return_inverse=True)[1].numel() == 4096", "the sizes of aten._unique2"),
    ],
)
def test_a_value_that_depends_on_data_is_named_with_its_line(
    inside: str, asked: str, script: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = estimated(capsys, "--nproc", "2", script(LOOP.format(steps=4, inside=inside)))
    assert [(each["asked"], each["line"]) for each in found["stand_ins"]] == [(asked, "train.py:9 in <module>")]


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize(
    "inside",
    [
        "assert torch.arange(5).sum().item() == 10",
        "assert torch.tensor([step, 2]).tolist() == [step, 2]",
        "assert sorted(torch.randperm(9).tolist()) == list(range(9))",
        "counter = torch.zeros(()); counter += 2; assert counter.item() == 2",
        "count = torch.tensor(3); dist.all_reduce(count); assert count.item() == 3 * dist.get_world_size()",
        "names = [None, None]; dist.all_gather_object(names, 'a'); assert names == ['a', 'a']",
        "assert (torch.arange(4) > 1).nonzero().flatten().tolist() == [2, 3]",
    ],
)
def test_a_value_that_the_script_gives_is_right_and_no_stand_in(
    inside: str, script: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert estimated(capsys, "--nproc", "2", script(LOOP.format(steps=3, inside=inside)))["stand_ins"] == []


LOADED = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        return gelu(self.linear(x)).square().mean()

{gelu}
dist.init_process_group()
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=16{workers})
for epoch in range(2):
    for (x,) in loader:
        loss = model(x)
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
"""
EAGER = "torch.compile: taken as eager, nothing is fused"


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({"model": "torch.compile(Model(), mode='max-autotune')"}, {"train.py:16 in <module>": EAGER}),
        ({"model": "Model(); model.compile()"}, {"train.py:16 in <module>": EAGER}),
        (
            {"gelu": "@torch.compile\ndef gelu(x): return torch.nn.functional.gelu(x)\n"},
            {"train.py:14 in <module>": EAGER},
        ),
        (
            {"workers": ", num_workers=3, persistent_workers=True, prefetch_factor=4, timeout=9"},
            {"train.py:20 in <module>": "DataLoader: its 3 workers are not started, the rank loads the data"},
        ),
    ],
)
def test_what_is_compiled_is_eager_and_workers_are_not_started(
    changed: dict[str, str], lines: dict[str, str], script: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (torch.compile, DataLoader._get_iterator)
    plain = {"gelu": "gelu = torch.nn.functional.gelu", "model": "Model()", "workers": ""}
    wanted = estimated(capsys, "--nproc", "8", script(LOADED.format(**plain)))
    found = estimated(capsys, "--nproc", "8", script(LOADED.format(**{**plain, **changed})))
    assert dict(found.pop("changes")) == lines
    assert wanted.pop("changes") == []
    for each in (found, wanted):
        del each["memory"]["classes"][0]["at"]  # a compiled module is one more around it
    assert found == wanted
    assert before == (torch.compile, DataLoader._get_iterator)
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
    assert main(["--hardware", "h100-sxm", "--nproc", "8", script(LOADED.format(**{**plain, **changed}))]) == 0
    said = capsys.readouterr().out
    assert "Run otherwise than the script says" in said
    assert all(f"  {line}: {what}" in said for line, what in lines.items())


@pytest.mark.parametrize(
    ("steps", "options", "code", "said"),
    [
        (0, [], 1, "rank 0 has made no step of an optimizer"),
        (2, [], 1, "try: --warmup 1 --steps 1"),
        (4, ["--steps", "0"], 2, "--warmup 1 --steps 2"),
        (4, ["--ranks", "7"], 2, "ranks go from 0 to 1"),
        (4, ["--hardware", "h101"], 2, "h100"),
        (4, ["--nproc", "0"], 2, "--nproc must be from 1 to"),
        (4, ["--trace", "/proc/trace.json"], 2, "cannot write '/proc/trace.json'"),
        (4, ["--plot", "/tmp"], 2, "cannot write '/tmp': it is a folder"),
    ],
)
def test_what_cannot_be_estimated_says_why(
    steps: int,
    options: list[str],
    code: int,
    said: str,
    script: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = script(LOOP.format(steps=steps, inside="pass"))
    assert main(["--hardware", "h100-sxm", "--nproc", "2", *options, path]) == code
    assert said in capsys.readouterr().err


def test_an_error_of_the_script_is_shown_from_its_own_lines(
    script: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(LOOP.format(steps=4, inside="model(torch.randn(3, 63))"))
    assert main(["--hardware", "h100-sxm", "--nproc", "2", path]) == 1
    said = capsys.readouterr().err
    assert "train.py" in said
    assert "line 9" in said
    assert "recording.py" not in said
    assert "replay: python -m sim estimate --hardware h100-sxm --nproc 2 " in said


@pytest.mark.parametrize(
    ("inside", "operation"),
    [
        (
            "torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(8, 8))(x)",
            "aten.mm.default, in module '1' (Linear)",
        ),
        ("torch.fft.fft(x.bfloat16())", "torch.fft.fft"),
        ("x.no_such_thing", None),
    ],
)
def test_an_operation_that_fails_is_named_with_its_module(
    inside: str, operation: str | None, script: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(LOOP.format(steps=4, inside=f"x = torch.ones(4, 4); {inside}"))
    assert main(["--hardware", "h100-sxm", "--nproc", "2", path, "--lr", "1"]) == 1
    said = capsys.readouterr().err.splitlines()
    found = [line.removeprefix("  operation: ") for line in said if line.startswith("  operation: ")]
    assert found == ([] if operation is None else [operation])
    if operation is not None:
        assert said[-1].startswith(f"  try: python -m sim run {path} --lr 1, with real values; if it fails as well, ")
