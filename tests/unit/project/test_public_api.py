"""Exports of the package, and the examples of its docstrings."""

import ast
import doctest
import importlib
import linecache
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel
import sim

API = [
    "CPUOffloadPolicy",
    "Checkpointer",
    "ColwiseParallel",
    "DTensor",
    "DataParallelMeshDims",
    "DeviceMesh",
    "FSDPModule",
    "HSDPCell",
    "HSDPModule",
    "HyperParallelError",
    "InvalidState",
    "InvalidType",
    "InvalidValue",
    "Layout",
    "MixedPrecisionPolicy",
    "Muon",
    "OffloadPolicy",
    "Owner",
    "ParallelDims",
    "Partial",
    "Pipeline",
    "PipelineStage",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicate",
    "RowwiseParallel",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "SequenceParallel",
    "Shard",
    "ShardingPlan",
    "SkipDTensorDispatch",
    "TiedWeights",
    "UnshardHandle",
    "checkpoint_blocks",
    "clip_grad_norm_",
    "context_parallel",
    "custom_shard",
    "distribute_module",
    "distribute_tensor",
    "expert_parallel",
    "flatten_axes",
    "from_local",
    "full_tensor",
    "fully_shard",
    "get_model_state_dict",
    "get_optim_state_dict",
    "get_platform",
    "get_process_group_ranks",
    "hsdp",
    "hsdp_sync_stream",
    "init_device_mesh",
    "init_parameters",
    "init_process_group",
    "load_checkpoint",
    "parallelize_module",
    "parallelize_value_and_grad",
    "redistribute",
    "register_forward_method",
    "register_fsdp_forward_method",
    "save_checkpoint",
    "set_optim_state_dict",
    "shard_module",
    "share_comm_ctx",
    "show",
    "split_group",
    "stage_slices",
    "to_local",
    "update_expert_bias",
    "vocab_parallel_cross_entropy",
    "whole_parameters",
]
SIM_API = [
    "CollectiveMismatch",
    "Deadlock",
    "Event",
    "InFlightBufferRace",
    "NonDeterminism",
    "RankFailed",
    "RankLost",
    "RankTest",
    "ReplicaMismatch",
    "Row",
    "SimError",
    "Span",
    "SwarmFailed",
    "Trace",
    "World",
    "advance",
    "at_time",
    "check_determinism",
    "check_replicas",
    "current_rank",
    "faults",
    "gather_full",
    "infer_layout",
    "ranks",
    "region",
    "run",
    "scatter_full",
    "swarm",
    "verify",
    "verify_plan",
    "verify_step",
    "world",
]


def test_the_root_exports_exactly_this():
    assert sorted(hyper_parallel.__all__) == API
    assert all(hasattr(hyper_parallel, name) for name in API)


def test_sim_exports_exactly_this():
    assert sorted(sim.__all__) == SIM_API
    assert all(hasattr(sim, name) for name in SIM_API)


@pytest.mark.parametrize(
    "path",
    [
        "core.activation_checkpoint",
        "core.distributed_checkpoint",
        "core.fully_shard.api",
        "core.fully_shard.hsdp_utils",
        "core.fully_shard.utils",
        "core.hsdp.api",
        "core.hsdp.hsdp_utils",
        "core.shard.api",
        "core.shard.sharding_plan",
        "core.dtensor.debug",
        "core.dtensor.device_mesh",
        "core.dtensor.dtensor",
        "core.dtensor.layout",
        "core.dtensor.placement_types",
        "core.utils.clip_grad",
        "trainer.parallel_dims",
        "platform",
    ],
)
def test_module_paths_that_users_know(path):
    importlib.import_module(f"hyper_parallel.{path}")


def modules():
    for package in (hyper_parallel, sim):
        yield package.__name__
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not info.name.endswith("__main__"):
                yield info.name


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", list(modules()))
def test_examples_in_docstrings(name):
    linecache.clearcache()  # for each docstring, doctest looks at all files in it anew
    outcome = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0


def test_type_checkers_see_what_is_imported_late():
    tree = ast.parse(Path(hyper_parallel.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == hyper_parallel._MODULE_OF
    assert set(hyper_parallel.__all__) == set(seen)
    assert set(seen) <= set(dir(hyper_parallel))


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", ["hyper_parallel", "hyper_parallel.pytest_plugin"])
def test_the_package_alone_imports_no_torch(name):
    command = f"import sys, {name}; sys.exit('torch' in sys.modules or 'sim' in sys.modules)"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_names_of_the_existing_library_lead_to_what_does_it_here():
    """Where torch has it, torch's own."""
    import torch.distributed as dist
    from torch.distributed import checkpoint, pipelining, tensor
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.tensor import parallel
    from torch.utils.checkpoint import CheckpointPolicy

    from hyper_parallel.core import activation_checkpoint, distributed_checkpoint
    from hyper_parallel.core.dtensor import debug, device_mesh
    from hyper_parallel.core.dtensor.dtensor import SkipDTensorDispatch, distribute_tensor
    from hyper_parallel.core.dtensor.layout import DeviceMesh
    from hyper_parallel.core.fully_shard import unit
    from hyper_parallel.core.hsdp import hsdp_utils
    from hyper_parallel.core.utils import clip_grad
    from hyper_parallel.platform.platform import PlatformType

    for name in ("PipelineStage", "Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B"):
        assert getattr(hyper_parallel, name) is getattr(pipelining, name)
    for name in parallel.__all__:
        assert name in ("ParallelStyle", "loss_parallel") or getattr(hyper_parallel, name) is getattr(parallel, name)
    assert hyper_parallel.get_optim_state_dict is state_dict.get_optimizer_state_dict
    assert hyper_parallel.set_optim_state_dict is state_dict.set_optimizer_state_dict
    assert distributed_checkpoint.save is checkpoint.save
    assert activation_checkpoint.CheckpointPolicy is CheckpointPolicy
    assert device_mesh.init_device_mesh is hyper_parallel.init_device_mesh
    assert debug.CommDebugMode is tensor.debug.CommDebugMode
    assert clip_grad.clip_grad_norm_ is hyper_parallel.clip_grad_norm_
    assert hsdp_utils.ShardedState is unit.ShardedState
    for name in ("get_process_group_ranks", "init_process_group", "split_group"):
        assert getattr(hyper_parallel, name) is getattr(dist, name)
    assert hyper_parallel.distribute_module is tensor.distribute_module
    assert distribute_tensor is tensor.distribute_tensor
    assert DeviceMesh is hyper_parallel.DeviceMesh
    assert PlatformType.PYTORCH.name == "PYTORCH"
    with hyper_parallel.SkipDTensorDispatch() as nothing:
        assert nothing is None
    assert hyper_parallel.SkipDTensorDispatch is SkipDTensorDispatch
