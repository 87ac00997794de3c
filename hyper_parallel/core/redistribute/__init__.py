"""Moving a tensor from one layout to another: read, planned, priced, then executed.

    api -> gradients -> execute -> plan -> candidates -> builder -> steps -> holdings
    chunks -> execute
    plan, bounds, candidates -> transition -> cost -> holdings
    show -> bounds, plan

Calls go from top to bottom, and never back up.

api           the functions, and their arguments
gradients     a DTensor in another layout, its gradient, and local parts
transition    both layouts, read once into tuples of ints: the files below use no `Layout`
holdings      who holds what between two steps
steps         a step as data: who sends what, and the copies and buffers that this takes
builder       the step between two holdings
candidates    the ways there are, made of steps
cost          the seconds of a step on a machine
plan          the cheapest of the ways, in bounded memory
execute       a plan carried out on one rank
chunks        a computation between two redistributions, cut so that one chunk travels while another is computed
bounds        the least that any plan must move, and the twin that counts it by brute force
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
