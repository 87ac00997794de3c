"""Moving a tensor from one layout to another: planned, priced, then executed."""

from hyper_parallel.core.redistribute.bounds import lower_bound
from hyper_parallel.core.redistribute.cost import BYTES_ONLY, Link, Topology, topology
from hyper_parallel.core.redistribute.execute import execute
from hyper_parallel.core.redistribute.plan import Plan, plan
from hyper_parallel.core.redistribute.steps import Step

__all__ = ["BYTES_ONLY", "Link", "Plan", "Step", "Topology", "execute", "lower_bound", "plan", "topology"]
