"""Parallel training in PyTorch: write the plan of a model once; run it on a laptop, on NPUs or on GPUs.

    cli -> trainer -> models -> core.pipeline, core.context_parallel, core.expert_parallel, core.checkpoint, core.hsdp
    core.checkpoint -> core.hsdp -> core.fully_shard -> core.redistribute
    core.optim -> core.redistribute
    core.activations -> core.common, platform
    core.pipeline, core.context_parallel, core.expert_parallel -> core.shard -> core.init, core.redistribute
    core.redistribute -> core.dtensor -> core.mesh, core.common, platform

This file is the table of contents of the public API: the verbs of a training script. `DTensor`, `DeviceMesh` and the
placements are torch's own, so optimizers, checkpoints and other libraries keep working with them.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.distributed_c10d import get_process_group_ranks, init_process_group, split_group
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    from hyper_parallel.core.activations import checkpoint_blocks
    from hyper_parallel.core.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
    from hyper_parallel.core.common.errors import HyperParallelError, InvalidState, InvalidType, InvalidValue
    from hyper_parallel.core.context_parallel import context_parallel
    from hyper_parallel.core.distributed_checkpoint import get_optim_state_dict, set_optim_state_dict
    from hyper_parallel.core.dtensor import DTensor, Layout, Partial, Replicate, Shard, flatten_axes
    from hyper_parallel.core.dtensor.dtensor import SkipDTensorDispatch, distribute_module
    from hyper_parallel.core.expert_parallel import expert_parallel, update_expert_bias
    from hyper_parallel.core.fully_shard import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        FSDPModule,
        HSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        Owner,
        UnshardHandle,
        clip_grad_norm_,
        fully_shard,
        get_model_state_dict,
        register_forward_method,
        register_fsdp_forward_method,
        share_comm_ctx,
        whole_parameters,
    )
    from hyper_parallel.core.hsdp import HSDPCell, hsdp, hsdp_sync_stream
    from hyper_parallel.core.mesh.parallel_dims import ParallelDims
    from hyper_parallel.core.optim import Muon
    from hyper_parallel.core.pipeline import Pipeline, TiedWeights, stage_slices
    from hyper_parallel.core.redistribute import distribute_tensor, from_local, full_tensor, redistribute, to_local
    from hyper_parallel.core.shard.api import (
        ShardingPlan,
        custom_shard,
        init_parameters,
        parallelize_value_and_grad,
        shard_module,
    )
    from hyper_parallel.core.shard.loss import vocab_parallel_cross_entropy
    from hyper_parallel.core.shard.show import show
    from hyper_parallel.platform import get_platform

__version__ = "0.1.0"

__all__ = [
    # The mesh
    "DeviceMesh",
    "ParallelDims",
    "flatten_axes",
    "init_device_mesh",
    # Who holds which part of a tensor
    "DTensor",
    "Layout",
    "Partial",
    "Replicate",
    "Shard",
    "show",
    # From one layout to another, and between local and full tensors
    "distribute_tensor",
    "from_local",
    "full_tensor",
    "redistribute",
    "to_local",
    # The layouts of a model
    "ShardingPlan",
    "custom_shard",
    "init_parameters",
    "parallelize_value_and_grad",
    "shard_module",
    "vocab_parallel_cross_entropy",
    # Sharded parameters
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "HSDPCell",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Owner",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "get_model_state_dict",
    "hsdp",
    "hsdp_sync_stream",
    "register_forward_method",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "whole_parameters",
    # An optimizer of whole matrices
    "Muon",
    # What blocks keep for backward
    "checkpoint_blocks",
    # Layers, sequences and experts over ranks
    "Pipeline",
    "TiedWeights",
    "context_parallel",
    "expert_parallel",
    "stage_slices",
    "update_expert_bias",
    # Checkpoints
    "Checkpointer",
    "load_checkpoint",
    "save_checkpoint",
    # Devices
    "get_platform",
    # Errors: one base, and classes that are also ValueError, TypeError and RuntimeError
    "HyperParallelError",
    "InvalidState",
    "InvalidType",
    "InvalidValue",
    # torch's own, and what has no effect: names that users of the existing library import from here
    "ColwiseParallel",
    "PipelineStage",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "SequenceParallel",
    "SkipDTensorDispatch",
    "distribute_module",
    "get_optim_state_dict",
    "get_process_group_ranks",
    "init_process_group",
    "parallelize_module",
    "set_optim_state_dict",
    "split_group",
]

# Where each name comes from. It is imported when it is first used: torch takes seconds to import, and a command's
# --help, or a pytest that only finds this package installed, needs nothing of it.
_NAMES_OF = MappingProxyType(
    {
        "torch.distributed.device_mesh": "DeviceMesh init_device_mesh",
        "torch.distributed.distributed_c10d": "get_process_group_ranks init_process_group split_group",
        "torch.distributed.pipelining": "PipelineStage Schedule1F1B ScheduleGPipe ScheduleInterleaved1F1B",
        "torch.distributed.tensor.parallel": (
            "ColwiseParallel PrepareModuleInput PrepareModuleInputOutput PrepareModuleOutput RowwiseParallel "
            "SequenceParallel parallelize_module"
        ),
        "hyper_parallel.core.distributed_checkpoint": "get_optim_state_dict set_optim_state_dict",
        "hyper_parallel.core.dtensor.dtensor": "SkipDTensorDispatch distribute_module",
        "hyper_parallel.core.activations": "checkpoint_blocks",
        "hyper_parallel.core.checkpoint": "Checkpointer load_checkpoint save_checkpoint",
        "hyper_parallel.core.common.errors": "HyperParallelError InvalidState InvalidType InvalidValue",
        "hyper_parallel.core.context_parallel": "context_parallel",
        "hyper_parallel.core.expert_parallel": "expert_parallel update_expert_bias",
        "hyper_parallel.core.optim": "Muon",
        "hyper_parallel.core.pipeline": "Pipeline TiedWeights stage_slices",
        "hyper_parallel.core.dtensor": "DTensor Layout Partial Replicate Shard flatten_axes",
        "hyper_parallel.core.fully_shard": (
            "CPUOffloadPolicy DataParallelMeshDims FSDPModule HSDPModule MixedPrecisionPolicy OffloadPolicy Owner "
            "UnshardHandle clip_grad_norm_ fully_shard get_model_state_dict register_forward_method "
            "register_fsdp_forward_method share_comm_ctx whole_parameters"
        ),
        "hyper_parallel.core.hsdp": "HSDPCell hsdp hsdp_sync_stream",
        "hyper_parallel.core.redistribute": "distribute_tensor from_local full_tensor redistribute to_local",
        "hyper_parallel.core.shard.api": (
            "ShardingPlan custom_shard init_parameters parallelize_value_and_grad shard_module"
        ),
        "hyper_parallel.core.shard.loss": "vocab_parallel_cross_entropy",
        "hyper_parallel.core.shard.show": "show",
        "hyper_parallel.platform": "get_platform",
        "hyper_parallel.core.mesh.parallel_dims": "ParallelDims",
    }
)
_MODULE_OF = MappingProxyType({name: module for module, names in _NAMES_OF.items() for name in names.split()})


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hyper_parallel' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
