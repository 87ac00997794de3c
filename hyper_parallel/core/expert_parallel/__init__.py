"""Experts split over ranks: tokens go to the ranks that have their experts, and come back.

api -> router -> experts
"""

from hyper_parallel.core.expert_parallel.api import expert_parallel
from hyper_parallel.core.expert_parallel.experts import GroupedExperts
from hyper_parallel.core.expert_parallel.router import Router, Routing, set_aux_scale, take_aux, update_expert_bias

__all__ = ["GroupedExperts", "Router", "Routing", "expert_parallel", "set_aux_scale", "take_aux", "update_expert_bias"]
