"""What the package exports, and that its docstrings' examples hold."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel
import sim

API = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "DTensor",
    "DataParallelMeshDims",
    "DeviceMesh",
    "FSDPModule",
    "HSDPCell",
    "HSDPModule",
    "Layout",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelDims",
    "Partial",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "ShardingPlan",
    "UnshardHandle",
    "clip_grad_norm_",
    "custom_shard",
    "distribute_tensor",
    "flatten_axes",
    "from_local",
    "full_tensor",
    "fully_shard",
    "get_model_state_dict",
    "get_platform",
    "hsdp",
    "hsdp_sync_stream",
    "init_device_mesh",
    "init_parameters",
    "parallelize_module",
    "parallelize_value_and_grad",
    "redistribute",
    "register_forward_method",
    "register_fsdp_forward_method",
    "shard_module",
    "share_comm_ctx",
    "to_local",
    "vocab_parallel_cross_entropy",
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
    "verify_plan",
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
        "core.fully_shard.api",
        "core.fully_shard.utils",
        "core.hsdp.api",
        "core.shard.api",
        "core.shard.sharding_plan",
        "core.dtensor.layout",
        "core.dtensor.dtensor",
        "core.dtensor.placement_types",
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


@pytest.mark.parametrize("name", list(modules()))
def test_examples_in_docstrings(name):
    outcome = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0


def test_type_checkers_see_what_is_imported_late():
    tree = ast.parse(Path(hyper_parallel.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == hyper_parallel._HOME
    assert set(hyper_parallel.__all__) == set(seen)
    assert set(seen) <= set(dir(hyper_parallel))


@pytest.mark.parametrize("name", ["hyper_parallel", "hyper_parallel.pytest_plugin"])
def test_the_package_alone_imports_no_torch(name):
    command = f"import sys, {name}; sys.exit('torch' in sys.modules or 'sim' in sys.modules)"
    subprocess.run([sys.executable, "-c", command], check=True)
