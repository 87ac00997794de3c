"""Estimates of torchrun scripts: what is recorded of a script is what it does on simulated ranks, and on a real CPU."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from sim.kernel.context import current_rank
from sim.mesh.hardware import find_hardware
from sim.mesh.memory import replay_memory
from sim.mesh.replay.allocator import AllocatorRules
from sim.script.estimate import RecordedScript, main, record_script
from sim.script.launch import execute_script, prepare_views, read_script, script_folder_first
from sim.script.options import Launch
from sim.world import world

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "torch_scripts"


def record(script: Path, nproc: int = 4, *, rank: int = 0, warmup: int = 1, steps: int = 2) -> RecordedScript:
    launch = Launch(str(script), nproc=nproc, show=())
    source = read_script(launch)
    assert source is not None
    recorded = record_script(launch, source, find_hardware("laptop-cpu"), (rank,), warmup, steps)
    assert isinstance(recorded, RecordedScript)
    return recorded


def told(events: Any) -> list[tuple[Any, ...]]:
    return [(e.op, e.group, e.send_bytes, e.recv_bytes, e.dtype, e.reduce_op, e.peer) for e in events]


def simulated(script: Path, nproc: int, rank: int, warmup: int = 1, steps: int = 2) -> list[tuple[Any, ...]]:
    """What a rank communicates in the same steps of the script, on simulated ranks with real tensors."""
    launch = Launch(str(script), nproc=nproc, show=())
    source = read_script(launch)
    assert source is not None
    ranks = world(nproc, init=False, keep_events=None)
    marks: list[int] = []

    def on_rank(code: Any) -> None:
        def after(*args: Any) -> None:
            if current_rank() == rank:
                marks.append(ranks.trace.count(rank))

        register_optimizer_step_post_hook(after)
        execute_script(code, "")

    with script_folder_first(source.folder):
        views = prepare_views(ranks, launch, source)
        with ranks:
            ranks.run(on_rank, (source.code,))
        del views
        return told(ranks.trace.of_rank(rank)[marks[warmup - 1] : marks[warmup + steps - 1]])


@pytest.mark.parametrize("name", ["fsdp2", "tensor_parallel", "ddp", "checkpoint"])
def test_collectives_of_the_steps_are_those_on_simulated_ranks(name: str) -> None:
    script = EXAMPLES / f"{name}.py"
    recorded = record(script)
    assert told(recorded.events[0]) == simulated(script, 4, 0)
    assert recorded.events[0]


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_that_send_messages_to_each_other_are_run_together(rank: int) -> None:
    script = EXAMPLES / "pipeline.py"
    recorded = record(script, 3, rank=rank)
    assert list(recorded.recorders) == [0, 1, 2]
    for each in range(3):
        assert told(recorded.events[each]) == simulated(script, 3, each)


def test_tokens_are_routed_evenly_where_their_experts_depend_on_data() -> None:
    script = EXAMPLES / "moe.py"
    events = told(record(script).events[0])
    real = simulated(script, 4, 0)
    assert [(event[0], event[1], event[4:]) for event in events] == [(each[0], each[1], each[4:]) for each in real]
    routed = {(sent, got) for op, _, sent, got, dtype, *_ in events if op == "all_to_all" and dtype == "float32"}
    assert routed == {(9 * 8 * 4, 9 * 8 * 4)}  # 3 of 12 tokens to each of 4 experts, whose own stay


NANO_GPT = Path(__file__).with_name("scripts_nano_gpt.py")


@pytest.mark.parametrize("warmup", [1, 2])
def test_buckets_of_ddp_are_torchs_before_and_after_they_are_made_anew(warmup: int) -> None:
    events = told(record(NANO_GPT, 2, warmup=warmup, steps=1).events[0])
    assert sum(event[0] == "all_reduce" for event in events) > 2
    assert events == simulated(NANO_GPT, 2, 0, warmup=warmup, steps=1)


def allocated_by_torch(script: Path, warmup: int, steps: int) -> int:
    """What torch's CPU allocator has given at most in those steps of a real run on one rank."""
    launch = Launch(str(script), nproc=1, show=())
    source = read_script(launch)
    assert source is not None
    ranks = world(1, init=False)
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def after(*args: Any) -> None:
        gc.collect()
        with record_function("a step is over"):
            pass

    def on_rank(code: Any) -> None:
        register_optimizer_step_post_hook(after)
        with profiler:
            execute_script(code, "")

    with script_folder_first(source.folder):
        prepare_views(ranks, launch, source)
        with ranks:
            ranks.run(on_rank, (source.code,))
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    done = in_use = peak = 0
    for event in events:
        if event.name() == "a step is over":
            done += 1
        elif event.name() == "[memory]":
            in_use += event.nbytes()
            if warmup <= done < warmup + steps:
                peak = max(peak, in_use)
    assert done >= warmup + steps
    return peak


@pytest.mark.parametrize("script", [EXAMPLES / "fsdp2.py", NANO_GPT], ids=lambda path: path.stem)
def test_memory_is_what_torchs_allocator_gives(script: Path) -> None:
    recorded = record(script, 1)
    memory = replay_memory(recorded.programs[0], AllocatorRules(caching=False, round_to=1))
    assert memory.peak_allocated == pytest.approx(allocated_by_torch(script, 1, 2), rel=0.02)
    assert not memory.unmatched


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
        (
            "assert (model.weight > 0).unique(return_inverse=True)[1].numel() == 4096",
            "the sizes of aten._unique2",
        ),
    ],
)
def test_a_value_that_depends_on_data_is_named_with_its_line(
    inside: str, asked: str, script: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = estimated(capsys, "--nproc", "2", script(LOOP.format(steps=4, inside=inside)))
    assert [(each["asked"], each["line"]) for each in found["stand_ins"]] == [(asked, "train.py:9 in <module>")]


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
        (4, ["--nproc", "0"], 2, "expected 1 to"),
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
