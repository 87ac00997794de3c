"""Apply the parallelisms to a model, in the order in which they nest."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy
from hyper_parallel.models.llama import Llama
from hyper_parallel.trainer.config import ParallelConfig
from hyper_parallel.trainer.parallel_dims import ParallelDims


def needs_mesh(parallel: ParallelConfig, dims: ParallelDims) -> bool:
    """Tell whether the run wraps its model: more than one rank, or a precision policy to apply."""
    return dims.fsdp_enabled or parallel.param_dtype != "fp32"


def describe_axes(dims: ParallelDims) -> str:
    """Say for people how the ranks are arranged.

    >>> describe_axes(ParallelDims(dp_replicate=2, dp_shard=4, world_size=8))
    '8 ranks: dp_replicate=2 x dp_shard=4'

    Args:
        dims: the degrees.
    """
    if dims.world_size == 1:
        return "1 rank"
    axes = " x ".join(f"{axis}={size}" for axis, size in dims.mesh_axes.items())
    return f"{dims.world_size} ranks: {axes}"


def parallelize(model: Llama, parallel: ParallelConfig, dims: ParallelDims, mesh: DeviceMesh) -> Llama:
    """Shard the model's blocks, then what is left of it, over the data-parallel axes.

    Each block becomes one unit: its weights are gathered while it computes, its gradients reduced when its backward is
    done. Gradients are those of the mean loss over the global batch.

    Args:
        model: whole, with the same weights on every rank; changed in place.
        parallel: precision and resharding.
        dims: the degrees.
        mesh: what `dims.build_mesh` returned.

    Returns:
        The model.
    """
    shard_mesh = _shard_mesh(dims, mesh)
    dtype = torch.bfloat16 if parallel.param_dtype == "bf16" else None
    mp_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    reshard = parallel.reshard_after_forward
    for block in model.layers:
        fully_shard(block, mesh=shard_mesh, reshard_after_forward=reshard, mp_policy=mp_policy)
    fully_shard(model, mesh=shard_mesh, reshard_after_forward=reshard, mp_policy=mp_policy)
    return model


def _shard_mesh(dims: ParallelDims, mesh: DeviceMesh) -> DeviceMesh:
    """Pick the axes for `fully_shard`: (shard,) or (replicate, shard)."""
    if dims.dp_replicate == 1:
        return mesh["dp_shard"]
    if dims.dp_shard > 1:
        return mesh["dp_replicate", "dp_shard"]
    # Replicas only: a shard axis of size 1 says that nothing is split.
    return init_device_mesh(mesh.device_type, (dims.dp_replicate, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
