"""What estimating a step costs in a process of its own: `python -m benchmarks.mesh_probe '{"how": "ours", ...}'`.

Nothing heavy is imported at the top, so that importing is timed, too. The process prints a line of JSON: seconds of
each phase, and the most memory that it had. `how`: *ours* is `sim.mesh`; *every layer* the same without repeating
what the middle layers do; *torch* is FSDP2 under `FakeTensorMode` on torch's fake process group, which does the same
with torch alone: the model is built and wrapped, and takes a step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Task:
    """What is estimated, and how.

    Attributes:
        model: a name of `sim.mesh.model_names()`.
        degrees: of parallelism; their product is the number of ranks.
        batch: sequences per step on each data-parallel rank.
        seq_len: tokens of a sequence.
        how: `ours`, `every layer` or `torch`.
        checkpointing: what backward computes again.
        hardware: whose figures the prices are made of.
    """

    model: str
    degrees: dict[str, int]
    batch: int
    seq_len: int
    how: str = "ours"
    checkpointing: str = "none"
    hardware: str = "h100-sxm"

    @property
    def ranks(self) -> int:
        count = 1
        for degree in self.degrees.values():
            count *= degree
        return count


@dataclass(frozen=True)
class Cost:
    """What a process took.

    Attributes:
        phases: seconds of each phase, in order.
        wall: seconds of the whole process.
        cpu: seconds that it computed, on all cores together.
        peak_rss: the most bytes that it had in memory.
        found: what was estimated.
    """

    phases: dict[str, float]
    wall: float
    cpu: float
    peak_rss: int
    found: dict[str, float] = field(default_factory=dict)

    @property
    def work(self) -> float:
        """Seconds without importing."""
        return sum(seconds for name, seconds in self.phases.items() if not name.startswith("import"))


def run_alone(task: Task, limit_s: float = 600) -> Cost:
    """Do a task in a fresh process, and return what it cost.

    Args:
        task: what to do.
        limit_s: seconds after which it is given up.

    Raises:
        TimeoutExpired: it took longer.
        CalledProcessError: it failed; its errors have been printed.
    """
    begin = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.mesh_probe", json.dumps(asdict(task))]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=limit_s)
    wall = time.perf_counter() - begin
    return Cost(wall=wall, **json.loads(done.stdout.splitlines()[-1]))


def status_bytes(name: str) -> int:
    """Return a figure of this process that Linux keeps: `VmRSS`, what it has now, `VmHWM`, what it had at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


class Phases:
    """Seconds of one phase after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def ends(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def estimate(task: Task, phases: Phases) -> dict[str, float]:
    """Estimate as a user does, in its two parts."""
    import sim.mesh
    from hyper_parallel.core.mesh.parallel_dims import ParallelDims

    phases.ends("import")
    dims = ParallelDims(**task.degrees, world_size=task.ranks)  # type: ignore[arg-type]
    recipe = sim.mesh.Recipe().with_savings(task.checkpointing).cut_into(task.batch if dims.pp_enabled else 1)
    job = sim.mesh.Job(sim.mesh.find_model(task.model), dims, task.batch, task.seq_len, recipe)
    programs = sim.mesh.trace(job, every_layer=task.how == "every layer")
    phases.ends("trace")
    made = sim.mesh.price(programs, job, sim.mesh.find_machine(task.hardware))
    phases.ends("price")
    return {"step": made.time.step.value, "peak": float(made.memory.peak)}


def with_torch(task: Task, phases: Phases) -> dict[str, float]:
    """Wrap the same model with FSDP2 on tensors without values, and take a step of mixed precision with AdamW."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hyper_parallel.models.llama import Llama
    from sim.mesh.models import find_model

    phases.ends("import")
    if set(task.degrees) - {"dp_shard"}:
        raise ValueError(f"torch is timed with dp_shard alone, not with {task.degrees}")
    dist.init_process_group("fake", rank=0, world_size=task.ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (task.ranks,), mesh_dim_names=("dp_shard",))  # cannot be made under the mode
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode():
        model = Llama(find_model(task.model).config)
        for block in model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        phases.ends("build")
        tokens = torch.zeros(task.batch, task.seq_len, dtype=torch.int64)
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    phases.ends("step")
    dist.destroy_process_group()
    return {}


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    phases = Phases()
    import torch

    torch.set_num_threads(1)
    phases.ends("import torch")
    found = (with_torch if task.how == "torch" else estimate)(task, phases)
    cost = {"phases": phases.seconds, "cpu": time.process_time(), "peak_rss": status_bytes("VmHWM"), "found": found}
    print(json.dumps(cost))


if __name__ == "__main__":
    main()
