"""Moving a tensor from one layout to another: planned, priced, then executed.

    boundary -> api -> execute -> plan -> candidates -> builder -> steps, transition -> holdings
    api -> arguments
    steps -> cost
    show -> bounds, plan

A plan is data until `execute`: ``transition`` reads both layouts once, ``holdings`` says who holds what, ``candidates``
are the ways there are, made of ``steps`` by the ``builder``, and ``plan`` takes the cheapest. ``bounds`` is the least
that any plan must move, and the twin that counts it by brute force.
"""

from hyper_parallel.core.redistribute.api import PendingRedistribute, distribute_tensor, redistribute
from hyper_parallel.core.redistribute.boundary import from_local, full_tensor, to_local
from hyper_parallel.core.redistribute.bounds import lower_bound
from hyper_parallel.core.redistribute.cost import BYTES_ONLY, Link, Topology, topology
from hyper_parallel.core.redistribute.execute import execute
from hyper_parallel.core.redistribute.plan import Plan, plan
from hyper_parallel.core.redistribute.steps import Step

__all__ = [
    "BYTES_ONLY",
    "Link",
    "PendingRedistribute",
    "Plan",
    "Step",
    "Topology",
    "distribute_tensor",
    "execute",
    "from_local",
    "full_tensor",
    "lower_bound",
    "plan",
    "redistribute",
    "to_local",
    "topology",
]
