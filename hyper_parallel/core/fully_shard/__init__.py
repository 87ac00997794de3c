"""The sharded-parameter engine and its face ``fully_shard``.

``api`` (the call) -> ``arguments``, ``homes`` (where each parameter goes) and ``build`` -> ``unit`` (when) and
``schedule`` (in which order) -> ``bucket`` (gather) and ``reduce``, ``reduction``, ``shares`` (gradients) -> ``param``
(one parameter). ``mesh``, ``carrier``, ``comm``, ``passes`` and ``policy`` serve them; ``state_dict``, ``values`` and
``clip`` stand beside the engine; ``fsdp2`` (the methods that torch's class has) and ``copying`` stand above it.
"""

from hyper_parallel.core.fully_shard.api import (
    DataParallelMeshDims,
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_forward_method,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from hyper_parallel.core.fully_shard.clip import clip_grad_norm_
from hyper_parallel.core.fully_shard.module import HSDPModule
from hyper_parallel.core.fully_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.fully_shard.state_dict import get_model_state_dict

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
    "clip_grad_norm_",
    "fully_shard",
    "get_model_state_dict",
    "register_forward_method",
]
