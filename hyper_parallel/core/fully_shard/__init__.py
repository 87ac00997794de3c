"""The sharded-parameter engine and its API `fully_shard`.

api -> build (find, check, copy) -> module (methods of wrapped modules), state_dict -> unit (where the parameters are)
unit -> hooks (when), schedule (in which order) -> reduce (gradients) -> bucket (gathers) -> comm, param
param, build -> placement (which mesh, which dim) -> utils (policies); clip stands beside the engine.
"""

from hyper_parallel.core.fully_shard.api import (
    DataParallelMeshDims,
    FSDPModule,
    Owner,
    UnshardHandle,
    fully_shard,
    register_forward_method,
    register_fsdp_forward_method,
    share_comm_ctx,
    whole_parameters,
)
from hyper_parallel.core.fully_shard.clip import clip_grad_norm_
from hyper_parallel.core.fully_shard.module import HSDPModule
from hyper_parallel.core.fully_shard.state_dict import get_model_state_dict
from hyper_parallel.core.fully_shard.utils import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "UnshardHandle",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Owner",
    "clip_grad_norm_",
    "fully_shard",
    "get_model_state_dict",
    "register_forward_method",
    "whole_parameters",
]
