"""Front door of plans; torch's tensor-parallel styles are re-exported, as a model can have both."""

from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hyper_parallel.core.init.api import init_parameters
from hyper_parallel.core.shard.apply import shard_module
from hyper_parallel.core.shard.local import custom_shard
from hyper_parallel.core.shard.plan import ShardingPlan
from hyper_parallel.core.shard.value_and_grad import parallelize_value_and_grad

__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardingPlan",
    "custom_shard",
    "init_parameters",
    "parallelize_module",
    "parallelize_value_and_grad",
    "shard_module",
]
