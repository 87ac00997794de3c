"""The benchmarks of the mesh simulator: their tables, their fresh processes, and what they count."""

import dataclasses
import json
import sys

import pytest

from benchmarks import fit_mesh, mesh, mesh_here, mesh_probe
from benchmarks.mesh_here import Case, Measured
from benchmarks.mesh_probe import Cost, Task
from hyper_parallel.core.machine.description import find_machine
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.trainer.config import ParallelConfig
from sim.mesh.program import HostWait, Op

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_seq_len=32,
)


def test_the_largest_is_what_the_spec_asks_for():
    assert (mesh.LARGEST.ranks, mesh.LARGEST.batch * mesh.LARGEST.degrees["dp_shard"]) == (16384, 2048)
    ranks = [task.ranks for task in mesh.tasks()]
    assert ranks == [1024, 4096, 16384, 102400, 64, 1024, 16384]


@pytest.mark.tier("test")
@pytest.mark.parametrize("how", ["ours", "every layer", "torch"])
def test_a_task_is_timed_by_phases(how, monkeypatch, capsys):
    task = Task("llama-tiny", {"dp_shard": 4}, 1, 32, how)
    monkeypatch.setattr(sys, "argv", ["mesh_probe", json.dumps(dataclasses.asdict(task))])
    mesh_probe.main()
    cost = Cost(wall=1.0, **json.loads(capsys.readouterr().out))
    assert list(cost.phases)[:2] == ["import torch", "import"]
    assert list(cost.phases)[2:] == (["build", "step"] if how == "torch" else ["trace", "price"])
    assert cost.work == pytest.approx(sum(list(cost.phases.values())[2:]))
    assert 2**26 < cost.peak_rss < 2**34
    assert bool(cost.found) == (how != "torch")


def test_torch_shards_alone():
    with pytest.raises(ValueError, match="dp_shard alone"):
        mesh_probe.with_torch(Task("llama-tiny", {"tp": 2}, 1, 32, "torch"), mesh_probe.Phases())


@pytest.mark.tier("full")
def test_a_task_runs_in_a_fresh_process():
    cost = mesh_probe.run_alone(Task("llama-tiny", {"tp": 2, "pp": 2, "dp_shard": 2}, 2, 32), limit_s=300)
    assert cost.wall > sum(cost.phases.values()) > cost.work > 0


def test_tables_of_costs():
    done: list[Task] = []

    def run(task: Task) -> Cost:
        done.append(task)
        second, third, slow = ("build", "step", 10.0) if task.how == "torch" else ("trace", "price", 1.0)
        return Cost({"import torch": 4.0, "import": 5.0, second: slow, third: 2 * slow}, 12.5, 11.0, 2**30)

    text = mesh.cost_table(rounds=2, run=run)
    assert len(done) == 2 * len(mesh.tasks())
    row = (
        "| llama3-405b | 16,384 | tp=8, pp=16, dp_shard=128 | 4.00 | 5.00 | 1.00 | 2.00 | 12.5 | 60 | 11.0 | 1.00 | 4 |"
    )
    assert row in text.splitlines()
    done.clear()
    text = mesh.torch_table(ranks=(64,), rounds=3, run=run)
    assert sorted(task.how for task in done) == sorted(3 * ["every layer", "ours", "torch"])
    row = "| 64 | 3.00 | 3.00 | 30.00 | 10.00 | 0.1 (0.1-0.1) | 0.1 (0.1-0.1) | 1.00 | 1.00 |"
    assert text.splitlines()[-1] == row


def test_two_fitted_figures_of_a_section_are_in_one_table(tmp_path):
    fitted = {"value": 0.94, "why": "tiles", "median": 0.05, "before": 0.1, "rows": 19}
    fit_mesh._write(tmp_path / "fit.toml", {"matmul.ascend.rate": fitted, "matmul.ascend.cap": fitted})
    assert (tmp_path / "fit.toml").read_text().count("[matmul.ascend]") == 1


def test_cases_are_what_the_trainer_runs():
    names = [(case.processes, str(case)) for case in mesh_here.CASES]
    assert names == [
        (1, "one process"),
        (2, "dp_shard=2"),
        (2, "dp_replicate=2"),
        (2, "tp=2"),
        (2, "pp=2, 4 micro-batches"),
    ]
    for case in mesh_here.CASES:
        assert case.dims.world_size == case.processes


@pytest.mark.tier("test")
def test_a_row_of_this_machine():
    case = Case(ParallelConfig(dp_shard=1, tp=2), TINY, 2, 32)
    made = mesh_here.predict(case, find_machine("laptop-cpu"))
    measured = Measured((0.1, 0.3, 0.2), made.memory.peak, 2 * made.memory.peak)
    cells = [cell.strip() for cell in mesh_here._row(case, measured, [made, made]).strip("|").split("|")]
    assert (cells[0], cells[6], cells[8]) == ("2, tp=2", "1.000", "0.500")
    assert cells[1].startswith("200 (")


@pytest.mark.tier("test")
def test_what_is_predicted_is_the_trainers_step():
    """It waits for the device, and its blocks are not compiled as wholes."""
    case = Case(ParallelConfig(dp_shard=1, compile=True), TINY, 2, 32)
    (program,) = mesh_here.predict(case, find_machine("laptop-cpu")).programs
    events = [event for segment, _ in program.segments_in_order() for event in segment.events]
    assert any(isinstance(event, HostWait) for event in events)
    places = [program.places[event.place] for event in events if isinstance(event, Op)]
    forward = {place.module for place in places if place.compiled and place.phase == "forward"}
    assert forward == {"attention", "mlp"}


@pytest.mark.tier("deep")
def test_a_case_is_trained_and_its_memory_is_near():
    case = Case(ParallelConfig(dp_shard=2), TINY, 2, 32)
    measured = mesh_here.run_case(case, steps=2, warmup=1)
    assert len(measured.steps) == 2
    assert measured.step > 0
    predicted = mesh_here.predict(case, find_machine("laptop-cpu")).memory.peak
    assert predicted == pytest.approx(measured.allocated, rel=0.25)
