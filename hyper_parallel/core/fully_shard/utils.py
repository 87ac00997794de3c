"""Policies of a unit: dtypes, offload, the options of its communication, and the names of its modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from hyper_parallel.core.common.checks import check, check_fields

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # torch 2.11

    @dataclass
    class DataParallelMeshDims:  # type: ignore[no-redef]
        """The data-parallel axes of an SPMD mesh, by name."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        @property
        def shard_names(self) -> tuple[str, ...]:
            """The axes to split over."""
            return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

        @property
        def replicate_names(self) -> tuple[str, ...]:
            """The axes of replicas."""
            return (self.replicate,) if isinstance(self.replicate, str) else tuple(self.replicate or ())


__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FullyShardParamMode",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimizerLevel",
    "UnitOptions",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit's computation; the sharded parameters themselves keep the dtype they were made in.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).param_dtype
    torch.bfloat16

    Args:
        param_dtype: Parameters are gathered, and forward and backward computed, in this dtype. None: their own.
        reduce_dtype: Gradients are reduced, and gradients that wait for a reduction kept, in this dtype; over the
            axes of a DTensor's own mesh too. None: reduced in the dtype of the computation, kept in at least fp32.
        output_dtype: Floating-point outputs of the unit's forward are cast to this dtype. None: left alone.
        cast_forward_inputs: Cast floating-point inputs of the unit's forward to `param_dtype`.
        apply_grad_on_fp32_main_grad: Keep reduced gradients in fp32 as `param.main_grad`; `param.grad` stays
            None. For optimizers that read `main_grad`.

    Raises:
        TypeError: A dtype that is no floating-point `torch.dtype`, or a flag that is no bool.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    apply_grad_on_fp32_main_grad: bool = False

    def __post_init__(self) -> None:
        asked = "cannot make a MixedPrecisionPolicy"
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            check(asked, "floating dtype | None", **{name: getattr(self, name)})
        check_fields(asked, self)


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards, gradients and optimizer state stay on the mesh's device: no offload."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and with them the optimizer's state live on the host.

    A gather first copies the shards to the device; reduced gradients are copied back, and backward returns when they
    have arrived.

    >>> CPUOffloadPolicy().pin_memory
    True

    Args:
        pin_memory: Keep them in page-locked memory, from which copies overlap with computation; without effect where
            the device has none. False: when the host's memory is short.

    Raises:
        TypeError: `pin_memory` is no bool.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_fields("cannot make a CPUOffloadPolicy", self)


class OptimizerLevel(Enum):
    """What is split besides the work: the optimizer's state, the gradients, the gathered weights between uses.

    >>> OptimizerLevel("level3").name
    'SHARD_OPT_GRAD_PARAM'
    """

    SHARD_OPT = "level1"
    SHARD_OPT_GRAD = "level2"
    SHARD_OPT_GRAD_PARAM = "level3"


class FullyShardParamMode(Enum):
    """How the engine manages a parameter.

    LOCAL_PARAM: it was a plain tensor. DTENSOR_COMPAT: a DTensor that keeps its layout. DTENSOR_UNIFIED: a DTensor that
    is split further, over the union of its mesh and the data mesh.
    """

    LOCAL_PARAM = "local_param"
    DTENSOR_COMPAT = "dtensor_compat"
    DTENSOR_UNIFIED = "dtensor_unified"


@dataclass
class UnitOptions:
    """What the calls that make a unit decide, and its methods may change.

    Attributes:
        mp_policy: Dtypes.
        reshard_after_forward: Free the unsharded parameters after forward.
        average: Divide reduced gradients by the number of ranks.
        gradient_scale: Factor on the reduced gradients.
        fuse_all_reduces: Let the all_reduces of adjacent units be one.
        show_sums: Show accumulated gradients as `param.acc_grad`.
        leave_pending: Reductions go on after the end of backward, until somebody asks for them.
        reshard_after_backward: Free the unsharded parameters after backward.
        requires_gradient_sync: Reduce gradients; False: keep them.
        requires_all_reduce: Reduce over the replicate axis too; False: keep what the shard axis has reduced.
        chose_reduction: Whether the user has said `average`.
        divide_by: Divide the sum over the ranks by it, whatever `average` says.
        unshard_in_backward: Gather the unsharded parameters for backward.
        reduced_hook: Called with reduced gradients before they are applied.
        reduce_scatter_with: What allocates and communicates instead of the engine.
        zeros: Give parameters that no rank has used zeros as their gradients.
    """

    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool = True
    average: bool = True
    gradient_scale: float = 1.0
    fuse_all_reduces: bool = False
    show_sums: bool = False
    leave_pending: bool = False
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    chose_reduction: bool = False
    divide_by: float | None = None
    unshard_in_backward: bool = True
    reduced_hook: Callable[[torch.Tensor], None] | None = None
    reduce_scatter_with: Any = None
    zeros: bool = False
