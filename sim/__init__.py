"""sim: N ranks in one process, with real numerics.

>>> import torch, torch.distributed as dist
>>> def total() -> float:
...     x = torch.tensor([float(dist.get_rank())])
...     dist.all_reduce(x)
...     return x.item()
>>> run(total, world_size=4)
[6.0, 6.0, 6.0, 6.0]
"""

from sim.clock import advance
from sim.determinism import check_determinism
from sim.errors import CollectiveMismatch, Deadlock, InFlightBufferRace, NonDeterminism, RankFailed, SimError
from sim.oracle import gather_full, scatter_full
from sim.pytest_plugin import RankTest, ranks
from sim.trace import Event, Row, Span, Trace
from sim.world import World, current_rank, run, world

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
    "check_determinism",
    # What they communicated
    "Trace",
    "Event",
    "Span",
    "Row",
    # What can go wrong
    "SimError",
    "RankFailed",
    "CollectiveMismatch",
    "Deadlock",
    "InFlightBufferRace",
    "NonDeterminism",
]
