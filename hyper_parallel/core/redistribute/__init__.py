"""Redistribution of a tensor from one layout to another: read, plan, price, execute.

    api -> gradients -> execute -> plan -> candidates -> builder -> steps -> holdings
    chunks -> execute
    plan, bounds, candidates -> transition -> cost -> holdings
    show -> bounds, plan

Each module calls modules to its right or below, never back up.

api           public functions and their arguments
gradients     redistributed DTensors, their gradients, and local parts
transition    both layouts, read once into tuples of ints; the modules below use no `Layout`
holdings      the elements that each rank holds between two steps
steps         a step as data: transfers, copies in memory, and buffers
builder       the step between two holdings
candidates    candidate plans, as lists of steps
cost          seconds of a step on a machine
plan          the cheapest candidate within a memory limit
execute       execution of a plan on one rank
chunks        a computation between two redistributions, cut so that communication overlaps with it
bounds        lower bounds of communicated bytes, and torch's plan
show          plans as text, beside torch's
"""

from hyper_parallel.core.redistribute.api import distribute_tensor, from_local, full_tensor, redistribute, to_local
from hyper_parallel.core.redistribute.bounds import lower_bound
from hyper_parallel.core.redistribute.execute import execute
from hyper_parallel.core.redistribute.gradients import PendingRedistribute
from hyper_parallel.core.redistribute.plan import Plan, plan
from hyper_parallel.core.redistribute.steps import Step

__all__ = [
    "PendingRedistribute",
    "Plan",
    "Step",
    "distribute_tensor",
    "execute",
    "from_local",
    "full_tensor",
    "lower_bound",
    "plan",
    "redistribute",
    "to_local",
]
