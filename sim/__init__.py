"""sim: N ranks in one process, with real numerics.

>>> import torch, torch.distributed as dist
>>> def total() -> float:
...     x = torch.tensor([float(dist.get_rank())])
...     dist.all_reduce(x)
...     return x.item()
>>> run(total, world_size=4)
[6.0, 6.0, 6.0, 6.0]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sim import faults
from sim.explain.errors import (
    CollectiveMismatch,
    Deadlock,
    InFlightBufferRace,
    NonDeterminism,
    RankFailed,
    RankLost,
    ReplicaMismatch,
    SimError,
)
from sim.kernel.clock import advance
from sim.kernel.context import current_rank
from sim.observers.determinism import check_determinism
from sim.observers.faults.plan import at_time
from sim.observers.faults.swarm import SwarmFailed, swarm
from sim.observers.faults.triggers import region
from sim.observers.replicas import check_replicas
from sim.prove.infer import infer_layout
from sim.prove.steps.api import verify_step
from sim.prove.verify import verify_plan
from sim.testing.oracle import gather_full, scatter_full
from sim.trace import Event, Row, Span, Trace
from sim.world import World, run, world

if TYPE_CHECKING:
    from sim.script.verify import verify
    from sim.testing.ranks import RankTest, ranks

__all__ = [
    # Run ranks
    "run",
    "world",
    "World",
    "current_rank",
    "advance",
    # Test bodies
    "ranks",
    "RankTest",
    # What they should hold
    "scatter_full",
    "gather_full",
    "infer_layout",
    "verify",
    "verify_plan",
    "verify_step",
    "check_determinism",
    "check_replicas",
    # What goes wrong around them
    "faults",
    "region",
    "at_time",
    "swarm",
    # What they communicated
    "Trace",
    "Event",
    "Span",
    "Row",
    # What can go wrong
    "SimError",
    "RankFailed",
    "RankLost",
    "SwarmFailed",
    "CollectiveMismatch",
    "Deadlock",
    "InFlightBufferRace",
    "NonDeterminism",
    "ReplicaMismatch",
]


def __getattr__(name: str) -> Any:
    # hypothesis and pytest are extras: what needs them is imported when it is used.
    if name in ("strategies", "threads"):
        return import_module(f"sim.{name}")
    if name in ("RankTest", "ranks"):
        return getattr(import_module("sim.testing.ranks"), name)
    if name == "verify":
        return import_module("sim.script.verify").verify
    raise AttributeError(f"module 'sim' has no attribute {name!r}")
