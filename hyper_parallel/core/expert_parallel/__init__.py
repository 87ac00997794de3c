"""Experts split over ranks: tokens go to the ranks that have their experts, and come back.

api -> balance -> router -> experts -> exchange, order
"""

from hyper_parallel.core.expert_parallel.api import expert_parallel
from hyper_parallel.core.expert_parallel.balance import set_aux_scale, take_aux, update_expert_bias
from hyper_parallel.core.expert_parallel.experts import GroupedExperts
from hyper_parallel.core.expert_parallel.router import Router, Routing

__all__ = [
    "GroupedExperts",
    "Router",
    "Routing",
    "expert_parallel",
    "set_aux_scale",
    "take_aux",
    "update_expert_bias",
]
