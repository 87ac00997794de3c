"""Each change that the simulator makes to torch: that torch still has the place, and that it is taken back."""

from __future__ import annotations

import asyncio
import atexit
import builtins
import concurrent.futures
import contextlib
import fcntl
import functools
import gc
import importlib
import inspect
import logging
import multiprocessing
import multiprocessing.pool
import os
import pickle
import pkgutil
import random
import signal
import subprocess
import sys
import threading
import time
import types
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.distributed import c10d_logger, pipelining, split_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _utils as tensor_utils
from torch.distributed.tensor._random import OffsetBasedRNGTracker
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel import fully_shard, platform
from sim.comm.process_group import SimProcessGroup
from sim.comm.store import RankStore
from sim.kernel.context import this_thread
from sim.late.module import MODULE
from sim.late.shared import SHARED, SharedDevice
from sim.late.switch import why_not
from sim.patches import devices, install, process_groups
from sim.script.launch import as_main_thread
from sim.script.output import SLOTS, ProcessView, RankStream

pytestmark = pytest.mark.sim
_LOCAL_SHAPE = "_compute_local_shape_and_global_offset"


# What each world replaces, and what it replaces if asked: the module, and the path of the attribute in it.
REPLACED = """
torch.distributed: Reducer
torch.distributed.distributed_c10d: _world rendezvous _new_process_group_helper
torch.distributed.device_mesh: DeviceMesh.__init__
torch._C._distributed_c10d: _set_global_rank
torch.distributed.tensor._sharding_prop: ShardingPropagator.propagate_op_sharding_non_cached
torch.distributed.tensor._utils: _compute_local_shape_and_global_offset
torch.nn: Module.to_empty
torch._C: _set_default_dtype
os: environ._data environb._data
multiprocessing: set_start_method
threading: Lock RLock _allocate_lock Thread.__init__ Thread.start Thread.join Thread.is_alive
_thread: start_new_thread
queue: SimpleQueue
multiprocessing.pool: ThreadPool.__init__ ThreadPool._check_running
concurrent.futures: ThreadPoolExecutor.__init__ ThreadPoolExecutor.submit ThreadPoolExecutor.shutdown
concurrent.futures: Future.__init__ Future.__hash__ Future.done
asyncio.selector_events: BaseSelectorEventLoop.__init__ BaseSelectorEventLoop._write_to_self
asyncio: BaseEventLoop.time
"""
BOUNDARY = """
torch.distributed.tensor: DTensor.from_local DTensor.to_local Shard._shard_tensor
torch.distributed.fsdp._fully_shard._fsdp_param: FSDPParam._init_sharded_param
hyper_parallel.core.fully_shard.param: ManagedParam.__init__
"""
ON_DEMAND = """
torch.distributed.distributed_c10d: init_process_group split_group P2POp.__init__
torch.distributed.c10d_logger: _get_msg_dict
torch.nn.parallel: DistributedDataParallel._inside_ddp_forward DistributedDataParallel._get_active_ddp_module
torch.autograd: _engine_run_backward
torch.autograd.profiler: _prepare_profiler _enable_profiler _disable_profiler
torch.multiprocessing: set_start_method start_processes
torch._dynamo.convert_frame: compile_lock
torch: set_anomaly_enabled
torch._C: _ensureCUDADeviceGuardSet
multiprocessing: get_context.__self__._actual_context
_posixsubprocess: fork_exec
subprocess: _fork_exec
warnings: formatwarning
logging: Handler.format
os: _exit fork kill chdir
signal: raise_signal
threading: main_thread enumerate active_count _time
queue: time
concurrent.futures._base: time
fcntl: flock lockf
time: sleep
"""


def at(table: str) -> dict[str, object]:
    """What is there now, by place; None where it lacks an attribute."""
    found = {}
    for line in table.split("\n"):
        module, _, paths = line.partition(": ")
        for path in paths.split():
            owner = importlib.import_module(module)
            found[f"{module}.{path}"] = functools.reduce(
                lambda owner, name: getattr(owner, name, None), path.split("."), owner
            )
    return found


def places() -> dict[str, object]:
    """What the patches change, as it is now."""
    wrapped = {}
    for name in ("init_process_group", "split_group"):
        function = getattr(c10d, name)
        wrapped[f"inside of {name}"] = dict(
            zip(function.__code__.co_freevars, [cell.cell_contents for cell in function.__closure__], strict=True)
        )["func"]
    return {**wrapped, **at(REPLACED), **at(BOUNDARY), **at(ON_DEMAND), "cpu": type(platform.get_platform("cpu"))}


@pytest.fixture(autouse=True)
def _all_is_taken_back():
    before = places()
    yield
    assert places() == before


def patch_named(name: str):
    found = {each.__name__: each for each in install.PATCHES}
    return found[name]


def test_every_seam_has_a_test():
    tested = {name.removeprefix("test_seam") for name in globals() if name.startswith("test_seam_")}
    assert tested == {each.__name__ for each in install.PATCHES}


def test_everything_is_replaced_and_taken_back():
    before = places()
    with sim.world(2) as world:
        now = places()
        assert {name for name in now if now[name] is before[name]} - {*at(BOUNDARY), *at(ON_DEMAND), "cpu"} == set()
        world.run(dist.barrier)
    assert places() == before


def test_everything_is_taken_back_after_a_failure():
    with pytest.raises(ValueError, match="bad"):
        sim.run(lambda: int("bad"), 2)


@pytest.mark.parametrize("broken", range(len(install.PATCHES)))
def test_what_is_in_place_is_taken_back_when_a_seam_cannot_be_made(broken, monkeypatch):
    def fails(world):
        raise AttributeError("torch has moved it")

    patches = list(install.PATCHES)
    patches[broken] = fails
    with monkeypatch.context() as patch:
        patch.setattr(install, "PATCHES", tuple(patches))
        with pytest.raises(AttributeError, match="torch has moved it"):
            sim.run(dist.barrier, 2)
    assert sim.run(dist.get_rank, 2) == [0, 1]


def test_the_others_are_taken_back_when_one_cannot(monkeypatch):
    def stubborn(world):
        def undo():
            raise RuntimeError("cannot be undone")

        return undo

    middle = len(install.PATCHES) // 2
    with monkeypatch.context() as patch:
        patch.setattr(install, "PATCHES", (*install.PATCHES[:middle], stubborn, *install.PATCHES[middle:]))
        with pytest.raises(RuntimeError, match="cannot be undone"):
            sim.run(dist.barrier, 2)
    assert sim.run(dist.get_rank, 2) == [0, 1]


# -- one test per patch ----------------------------------------------------------------------------------------


def test_seam_error_log():
    """torch looks the function up where it logs an error, and calls a group by the name that it was asked for."""

    def body() -> None:
        dist.init_process_group("nccl")
        with pytest.raises(ValueError, match="there is no member 5"):
            dist.broadcast(torch.ones(1), src=5)
        assert c10d_logger._get_msg_dict("broadcast") == {"func_name": "broadcast"}

    sim.run(body, 2)
    assert c10d_logger._exception_logger(len).__globals__["_get_msg_dict"] is c10d_logger._get_msg_dict


def test_seam_c10d_state():
    """Every attribute that torch's own state has, a rank's has too, and none of its dictionaries is shared."""
    real, mine = c10d._world, process_groups.new_c10d_state()
    names = [n for n in dir(type(real)) + list(vars(real)) if not n.startswith("__") and n != "pg_config_info"]
    for name in names:
        assert hasattr(mine, name), name
    for name in names:
        value = getattr(real, name)
        if isinstance(value, (dict, list, set)):
            assert getattr(mine, name) is not value, name

    def body() -> tuple:
        return dist.get_rank(), id(c10d._world.pg_map), c10d._world.default_pg is dist.group.WORLD

    results = sim.run(body, 3)
    assert [r[0] for r in results] == [0, 1, 2]
    assert len({r[1] for r in results}) == 3
    assert all(r[2] for r in results)


@sim.ranks(4, backends=("sim",))
def test_seam_group_names(ctx):
    """The same name means the calling rank's own group."""
    name = dist.group.WORLD.group_name
    dist.barrier()
    assert torch._C._distributed_c10d._resolve_process_group(name) is dist.group.WORLD


def test_seam_global_rank():
    """The prefix of the C++ log lines stays that of the process."""
    seen: list[int] = []
    bindings = torch._C._distributed_c10d
    real = bindings._set_global_rank
    bindings._set_global_rank = seen.append
    try:
        sim.run(dist.barrier, 3, init=True)
    finally:
        bindings._set_global_rank = real
    assert seen == []


def test_seam_backend():
    """A group is ours, and still answers what torch asks a group for."""

    def body() -> tuple:
        group = dist.group.WORLD
        backend = group._get_backend(torch.device("cpu"))
        ranks = dist.get_rank(), group.rank(), dist.ProcessGroup.rank(group), group.size()
        return type(group) is SimProcessGroup, backend is not None, [d.type for d in group._device_types], ranks

    assert sim.run(body, 2) == [(True, True, ["cpu"], (rank, rank, rank, 2)) for rank in range(2)]
    with sim.world(2), pytest.raises(sim.SimError, match="works on simulated ranks only"):
        dist.init_process_group("sim", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_seam_group_creation():
    def body() -> tuple:
        group = dist.new_group([0, 1], backend="gloo")
        return type(group) is SimProcessGroup, dist.get_backend(group)

    assert sim.run(body, 2) == [(True, "gloo")] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch asks a build without NCCL for its timeout, and warns
        sim.run(lambda: dist.new_group([0, 1], backend="nccl"), 2)


def test_seam_stores():
    with sim.world(2) as world:
        kinds = world.run(lambda: type(dist.HashStore()))
        store = dist.HashStore()
    assert type(store) is type(dist.HashStore()) is dist.HashStore
    assert kinds == [RankStore] * 2


def test_seam_rendezvous():
    def body() -> tuple:
        dist.init_process_group(
            "gloo", init_method="tcp://nowhere.invalid:1", rank=int(os.environ["RANK"]), world_size=2
        )
        return dist.get_rank(), dist.get_world_size()

    assert sim.run(body, 2, init=False) == [(0, 2), (1, 2)]


@sim.ranks(2, backends=("sim",))
def test_seam_init_process_group(ctx):
    torch.distributed.init_process_group(backend="gloo")
    assert dist.get_backend() == "gloo"


def test_seam_split_group():
    def body() -> tuple:
        rank = dist.get_rank()
        half = split_group(dist.group.WORLD, [[0, 1], [3, 2]], group_desc="half")
        dist.all_reduce(x := torch.tensor([float(rank)]), group=half)
        inner = dist.split_group(half, [[1]])
        alone = inner not in (None, dist.GroupMember.NON_GROUP_MEMBER)
        return x.item(), dist.get_process_group_ranks(half), alone and dist.get_process_group_ranks(inner)

    with sim.world(4) as world:
        assert world.run(body) == [(1.0, [0, 1], False), (1.0, [0, 1], [1]), (5.0, [2, 3], False), (5.0, [2, 3], [3])]
        assert {e.axis for e in world.trace.events if e.op == "all_reduce"} == {"half"}


def test_seam_new_group():
    """A rank that is in none of many groups only counts them: names, numbers and errors are torch's all the same."""

    def names():
        pairs = [[rank, (rank + 1) % 4] for rank in range(4)]
        groups = [dist.new_group(pair, group_desc="pair") for pair in pairs]
        found = [None if group == dist.GroupMember.NON_GROUP_MEMBER else group.group_name for group in groups]
        totals = []
        for group in groups:
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                total = torch.tensor([float(dist.get_rank())])
                dist.all_reduce(total, group=group)
                totals.append(total.item())
        return found, dist.distributed_c10d._world.group_count, totals

    made = sim.run(names, 4)
    assert [found for found, _, _ in made] == [
        [name if rank in (index, (index + 1) % 4) else None for index, name in enumerate("1234")] for rank in range(4)
    ]
    assert {count for _, count, _ in made} == {5}
    assert [totals for *_, totals in made] == [[1.0, 3.0], [1.0, 3.0], [3.0, 5.0], [5.0, 3.0]]

    def wrong(ranks):
        for _ in range(2):  # the second time is no different
            with pytest.raises(ValueError, match="rank"):
                dist.new_group(ranks)

    sim.run(wrong, 2, ([1, 7],))


def test_seam_device_mesh():
    """torch caches by mesh for the process; uneven shards go wrong when ranks share what is cached."""

    def body() -> list[float]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
        assert mesh != sim.run  # the mesh knows whose it is, and can be compared
        return x.redistribute(mesh, [Replicate()]).to_local().tolist()

    for seed in range(3):
        assert sim.run(body, 4, seed=seed) == [list(range(10))] * 4
    with sim.world(2) as first:
        meshes = first.run(lambda: init_device_mesh("cpu", (2,)))
    assert len({mesh._thread_id for mesh in meshes}) == 2
    with sim.world(2) as second:
        assert not {m._thread_id for m in second.run(lambda: init_device_mesh("cpu", (2,)))} & {
            mesh._thread_id for mesh in meshes
        }


def test_seam_caches():
    from torch.distributed.tensor import _redistribute

    cached = _redistribute._gen_transform_infos

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
        x.redistribute(mesh, [Replicate(), Shard(0)])

    sim.run(body, 4)
    assert cached.cache_info().currsize == 0


def test_seam_sharding_propagation(monkeypatch):
    """Once for all ranks and worlds, where torch looks it up; `test_sim_sharding_propagation.py` has the results."""
    own, computed = ShardingPropagator.propagate_op_sharding_non_cached, []

    def noted(self, schema):
        computed.append(str(schema.op))
        return own(self, schema)

    def body() -> None:
        x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (4,)), [Shard(0)])
        x @ x

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", noted)
    for _ in range(2):
        sim.run(body, 4)
    assert computed == ["aten.mm.default"]
    for owner, name in [(ShardingPropagator, "propagate_op_sharding_non_cached"), (tensor_utils, _LOCAL_SHAPE)]:
        with monkeypatch.context() as patch:
            patch.delattr(owner, name)
            torch_has_moved_it = patch_named("_sharding_propagation")(None)
            torch_has_moved_it()
            assert not hasattr(owner, name)


def test_seam_environment():
    sim.run(lambda: os.environ.update(SIM_TEST_SEAM=os.environ["RANK"]), 2)
    assert "SIM_TEST_SEAM" not in os.environ
    with sim.world(2):
        os.environ["SIM_TEST_SEAM"] = "of the process"  # outside of the ranks, the process's own
    assert os.environ.pop("SIM_TEST_SEAM") == "of the process"


def test_seam_dtensor_boundary():
    """With `check_replicas` only, and torch still has the methods where users, and its engine, call them."""

    before = at(BOUNDARY)
    with sim.world(2):
        assert at(BOUNDARY) == before
    with sim.world(2, check_replicas=True) as world:
        assert DTensor.from_local is not before["torch.distributed.tensor.DTensor.from_local"]
        assert DTensor.to_local is not before["torch.distributed.tensor.DTensor.to_local"]

        def body() -> list[float]:
            mesh = init_device_mesh("cpu", (2,))
            torch.manual_seed(0)
            torch_fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
            distribute_tensor(torch.ones(2), mesh, [Shard(0)], src_data_rank=None)
            made = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
            return made.to_local(grad_placements=[Partial()]).tolist()

        assert world.run(body) == [[1.0, 1.0]] * 2


def test_seam_loss_parallel():
    """A rank inside does not change how another one's DTensors are dispatched, nor does one that leaves first."""
    table = DTensor._op_dispatcher._custom_op_handlers
    before = dict(table)
    operator = torch.ops.aten._log_softmax.default

    def body() -> list[bool]:
        found = []
        for _ in range(3):
            with loss_parallel() if dist.get_rank() != 1 else contextlib.nullcontext():
                dist.barrier()
                found.append(operator in DTensor._op_dispatcher._custom_op_handlers)
            found.append(operator in DTensor._op_dispatcher._custom_op_handlers)
        return found

    assert sim.run(body, 3) == [[True, False] * 3, [False] * 6, [True, False] * 3]
    assert DTensor._op_dispatcher._custom_op_handlers is table
    assert table == before
    with loss_parallel():  # this thread is no rank
        assert operator in table
    assert table == before


@sim.ranks(2, backends=("sim",))
def test_seam_fsdp2_paths(ctx):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    units = [torch_fully_shard(module) for module in (model[0], model[1][0], model)]
    assert [unit._get_fsdp_state().path_when_wrapped for unit in units[:2]] == ["0", "1.0"]


def test_seam_optimizer_steps():
    from torch.optim import optimizer

    hooks = optimizer._global_optimizer_pre_hooks
    before = list(hooks)
    for checks in (False, True):
        with sim.world(2, check_replicas=checks):
            assert len(hooks) == len(before) + 1
            weight = torch.ones(2, requires_grad=True)
            weight.grad = torch.ones(2)
            torch.optim.SGD([weight], lr=1.0).step()  # this thread is no rank
            assert weight.tolist() == [0.0, 0.0]
        assert list(hooks) == before


def test_seam_warning_prefix(capsys):
    def body() -> None:
        warnings.warn(f"of {dist.get_rank()}", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = warnings._showwarning_orig  # pytest records them
        warnings._showwarnmsg_impl = lambda shown: sys.stderr.write(warnings._formatwarnmsg(shown))
        sim.run(body, 2, schedule=())
        warnings.warn("of nobody", stacklevel=1)
    shown = capsys.readouterr().err
    assert "test_patches.py" in shown
    assert all(f"[rank {rank}]" in shown and f"UserWarning: of {rank}\n" in shown for rank in range(2))
    assert all(line.startswith("[rank") for line in shown[: shown.index("of 1")].splitlines())
    assert "[rank" not in shown[shown.index("of nobody") :]
    with pytest.warns(UserWarning, match=r"^of \d$"):
        sim.run(body, 2)


def test_seam_logging_prefix(caplog):
    with caplog.at_level(logging.INFO):
        sim.run(lambda: logging.getLogger("mine").info("a\nb"), 2, schedule=())
        logging.getLogger("mine").info("of nobody")
    lines = caplog.text.splitlines()
    assert [line[:8] for line in lines[:4]] == ["[rank 0]", "[rank 0]", "[rank 1]", "[rank 1]"]
    assert "[rank" not in lines[4]
    assert caplog.messages == ["a\nb", "a\nb", "of nobody"], "the records stay as they are"


def test_seam_device_guard():
    name = "_ensureCUDADeviceGuardSet"
    before = getattr(torch._C, name, None)
    with sim.world(1):
        inside = getattr(torch._C, name, None)
        if before is not None and not torch.cuda.is_available():
            assert inside is not before
            assert inside() is None
        else:
            assert inside is before
    assert getattr(torch._C, name, None) is before


def test_seam_allocator():
    assert patch_named("_allocator")(None)() is None
    assert torch.ones(1 << 20).sum().item() == 1 << 20


def test_seam_platform():
    assert sim.run(lambda: platform.get_platform().backend, 2) == ["sim", "sim"]
    with sim.world(2):
        assert platform.get_platform("cpu").backend == "gloo", "this thread is no rank"


def test_seam_active_ddp():
    parallel = torch.nn.parallel.DistributedDataParallel

    class Asks(torch.nn.Module):
        """Another rank has its turn in the middle of forward."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            dist.barrier()
            return x * self.weight, parallel._get_active_ddp_module()

    def body() -> list[bool]:
        model = parallel(Asks())
        _, inside = model(torch.ones(1))
        return [inside is model, parallel._get_active_ddp_module() is None]

    assert sim.run(body, 3) == [[True, True]] * 3
    assert parallel._active_ddp_module is None, "torch.compile would take the next model for a part of that one"
    with sim.world(2):
        assert parallel._get_active_ddp_module() is None, "this thread is no rank"


@pytest.mark.tier("test")
def test_seam_empty_memory():
    """Outside of ranks memory is what it is."""

    class Mixed(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("steps", torch.zeros(3, dtype=torch.int64), persistent=False)
            self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
            self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))

    def body(kind: str) -> None:
        with torch.device("meta"):
            model = Mixed()
        fully_shard(model, mesh=init_device_mesh(kind, (2,)))
        model.to_empty(device=kind)
        assert model.weight.to_local().isnan().all()
        assert model.phase.isnan().all()
        assert (model.steps == torch.iinfo(torch.int64).max).all()
        assert model.mask.all()

    sim.run(body, 2, args=("cpu",))
    if not why_not():
        sim.run(body, 2, args=("npu",), device="npu")
    with sim.world(2):
        torch.nn.Linear(2, 2, device="meta").to_empty(device="cpu")


def test_seam_operators():
    def body() -> list[float]:
        x = torch.full((1,), dist.get_rank() + 1.0)
        group = dist.group.WORLD
        out = torch.ops._c10d_functional.all_gather_into_tensor_out(x, 2, group.group_name, out=torch.zeros(2))
        return torch.ops._c10d_functional.wait_tensor(out).tolist()

    def kernels() -> list[str]:
        names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::"))
        return [torch._C._dispatch_dump(name) for name in names]

    before = kernels()
    with sim.world(2) as world:
        assert world.run(body) == [[1.0, 2.0]] * 2
        assert kernels() != before
        fake = torch._C._distributed_c10d.FakeProcessGroup._create_internal(0, 2)
        group = dist.ProcessGroup(0, 2)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, fake)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        both = torch.zeros(2)
        group._allgather_base(both, torch.ones(1)).wait()
        assert both.tolist() == [1.0, 1.0], "another group's kernel is torch's own"
    assert kernels() == before


def test_seam_reducer():
    called_through = []

    def body() -> list[float]:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        return model.module.weight.grad.flatten().tolist()

    with sim.world(2) as world:
        world.network.issuing = (lambda endpoint, group, call: called_through.append(call.identity),)
        assert world.run(body) == [[1.5, 1.5]] * 2
    assert {each.text for each in called_through if each} == {"reduction of weight float32 [1, 2]"}


def test_seam_messages():
    def body() -> tuple[list[str], str]:
        stage = pipelining.PipelineStage(torch.nn.Linear(2, 2), dist.get_rank(), 2, torch.device("cpu"))
        stage.args_recv_info[5] = (types.SimpleNamespace(is_root_arg=False, source=0, buffer=torch.empty(2)),)
        made = stage.get_fwd_recv_ops(5) if dist.get_rank() else []
        return [op.purpose for op in made], dist.P2POp(dist.isend, torch.ones(2), 1 - dist.get_rank()).purpose

    before = dist.P2POp.__init__
    with sim.world(2) as world:
        assert world.run(body) == [([], ""), (["micro-batch 5 forward, stage 0 -> 1"], "")]
    with sim.world(2, check_identity=False):
        assert dist.P2POp.__init__ is before


def test_an_operator_that_simulated_groups_lack_is_refused(monkeypatch):
    from sim.comm import dispatcher

    assert {key for _, key in dispatcher._kernels()} >= {"CPU", "CUDA", "PrivateUse1", "Meta"}
    monkeypatch.delitem(dispatcher._METHODS, "_allgather_base_")

    def body() -> None:
        # Itself: from torch 2.14 on functional collectives call methods of the group that are overridden in Python.
        torch.ops.c10d._allgather_base_(torch.zeros(2), torch.ones(1), dist.group.WORLD.boxed())

    with pytest.raises(sim.SimError, match=r"no operator c10d\._allgather_base_"):
        sim.run(body, 2)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_seam_late_device():
    sim.run(dist.barrier, 1, device="npu")  # the name, once for the process
    storage, names = torch.UntypedStorage, ("resize_", "nbytes", "size", "data_ptr")
    draws = ("__init__", "_distribute_region")

    def changed() -> list[object]:
        return [
            *(getattr(storage, name) for name in names),
            *(getattr(OffsetBasedRNGTracker, name) for name in draws),
            *(getattr(torch.npu, name, None) for name in (*MODULE, "Stream", "Event")),
            *(getattr(torch.accelerator, name, None) for name in MODULE),
            sys.modules.get("torch_npu"),
        ]

    def body() -> tuple:
        x = torch.ones(4, device="npu")
        x.untyped_storage().resize_(0)
        assert isinstance(torch.npu.current_stream(), torch.npu.Stream)
        return torch.npu.is_available(), x.untyped_storage().nbytes(), importlib.import_module("torch_npu").__name__

    before = changed()
    with sim.world(2, device="npu") as world:
        now = changed()
        assert all(now[i] is not before[i] for i in range(len(names) + len(draws)))
        assert world.run(body) == [(True, 0, "torch_npu")] * 2
        assert not torch.npu.is_available()  # outside of the ranks
    assert changed() == before


@pytest.mark.parametrize(("kind", "installed"), [("cuda", None), ("npu", types.ModuleType("torch_npu"))])
def test_torch_npu_is_made_for_npus_alone_and_where_it_is_not_there(monkeypatch, kind, installed):
    monkeypatch.setitem(sys.modules, "torch_npu", installed)
    if installed is None:
        del sys.modules["torch_npu"]
    undo = devices.importable(kind)
    assert sys.modules.get("torch_npu") is installed
    undo()
    assert sys.modules.get("torch_npu") is installed


def test_seam_backward_modes():
    made, threaded = [], []

    def layer(x: torch.Tensor) -> torch.Tensor:
        made.append(torch.zeros(1, device="cuda").device.type)
        return x**2

    def body() -> float:
        x = torch.ones(2, requires_grad=True)
        with torch.inference_mode(False):  # lets backward have threads of a device
            y = x * 1
            y.register_hook(lambda grad: threaded.append(torch._C._is_multithreading_enabled()))
            torch.autograd.grad(y.sum(), x)
            assert torch._C._is_multithreading_enabled()
        loss = checkpoint(layer, x, use_reentrant=False).sum()
        loss.backward()
        torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)
        torch.autograd.backward(checkpoint(layer, x, use_reentrant=False).sum())
        return x.grad.sum().item()

    before = torch.autograd._engine_run_backward
    with sim.world(1, map_device="cuda") as world:
        assert torch.autograd._engine_run_backward is not before
        assert world.run(body) == [8.0]
    assert made == ["cpu"] * 6
    assert threaded == [False], "the backward of a device runs on the rank's thread, too"
    assert torch.autograd._engine_run_backward is before


def test_seam_shared_device(monkeypatch):
    called = ("memory_stats", "memory_stats_as_nested_dict", "reset_peak_memory_stats", "manual_seed", "get_rng_state")
    for name in (
        *called,
        "set_rng_state",
        "stream",
        "current_stream",
        *(each for each in SHARED if "index" not in each),
    ):
        assert callable(getattr(torch.cuda, name)), name
    assert all(hasattr(torch.cuda.Stream, name) for name in ("wait_event", "wait_stream"))
    assert all(hasattr(torch.cuda.Event, name) for name in ("record", "wait", "synchronize"))

    def found() -> list[object]:
        return [getattr(owner, name, None) for owner in (torch.cuda, torch.accelerator) for name in SHARED]

    before, rank = found(), types.SimpleNamespace(shared=SharedDevice(0, "cuda", seed=0))
    patch = next(each for each in install.PATCHES if each.__name__ == "_shared_device")
    undo = patch(types.SimpleNamespace(contexts=[rank]))
    try:
        assert all(now is not then for now, then in zip(found(), before, strict=True) if then is not None)
        assert torch.cuda.device_count() == before[list(SHARED).index("device_count")]()  # no rank asks
        monkeypatch.setattr(this_thread, "context", rank)
        assert torch.cuda.device_count() == torch.accelerator.device_count() == 1
        with pytest.raises(RuntimeError, match="share cuda:0"):
            torch.cuda.set_device(1)
    finally:
        undo()
    assert found() == before


def test_seam_mapped_device(tmp_path):
    torch.save(torch.ones(2), tmp_path / "x.pt")

    def body() -> tuple:
        cuda = torch.cuda
        cuda.set_device(dist.get_rank())
        scaler = torch.amp.GradScaler(init_scale=2.0)
        assert scaler.is_enabled()
        layer = torch.nn.Linear(2, 2).to(cuda.current_device())
        model = torch.nn.parallel.DistributedDataParallel(layer, device_ids=[cuda.current_device()])
        mesh = init_device_mesh("cuda", (2,))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            half = model(torch.ones(1, 2)).dtype
        loaded = torch.load(tmp_path / "x.pt", map_location={"cpu": "cuda:1"}).device.type
        assert torch.ones(1, device=torch.device(1)).device == torch.device("cpu")
        known = cuda.is_available(), cuda.device_count(), cuda.current_device()
        return *known, mesh.device_type, half, loaded, isinstance(cuda.current_stream(), cuda.Stream)

    names = [*devices.ANSWERS, *devices.CLASSES]
    classes = torch.nn.parallel.DistributedDataParallel, torch.autocast, torch.amp.GradScaler

    def changed() -> list[object]:
        return [
            torch.load,
            torch.Event,
            torch.Stream,
            torch.nn.Module.to,
            torch.nn.SyncBatchNorm.forward,
            *(each.__init__ for each in classes),
            *(getattr(torch.cuda, name, None) for name in names),
        ]

    before = changed()
    with sim.world(2):
        assert changed() == before, "only where it was asked for"
    with sim.world(2, map_device="cuda") as world:
        assert not any(now is then for now, then in zip(changed(), before, strict=True))
        assert world.run(body) == [(True, 2, rank, "cpu", torch.bfloat16, "cpu", True) for rank in range(2)]
        assert torch.cuda.device_count() == 0 or torch.cuda.is_available(), "this thread is no rank"
    assert changed() == before


@pytest.mark.tier("full")
@given(st.data())
def test_batch_norm_is_synchronized_on_mapped_devices(data):
    """`torch.nn.SyncBatchNorm` in DDP against `BatchNorm` on all ranks' samples; a rank may have none."""
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(lambda sizes: sum(sizes) > 1))
    dims, dtype = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([torch.float32, torch.float64]))
    options = {
        "momentum": data.draw(st.sampled_from([0.1, None])),
        "affine": data.draw(st.booleans()),
        "track_running_stats": data.draw(st.booleans()),
    }
    nn, cuda = torch.nn, torch.cuda
    conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(conv(3, 4, 1), norm(4, **options), conv(4, 2, 1)).to(dtype)

    def train(net: torch.nn.Module, x: torch.Tensor) -> None:
        for _ in range(2):
            net.zero_grad()
            (net(x) ** 2).sum().backward()

    def body() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        net, rank = nn.SyncBatchNorm.convert_sync_batchnorm(model()), dist.get_rank()
        cuda.set_device(rank)
        train(nn.parallel.DistributedDataParallel(net.cuda(), device_ids=[rank]), x.split(sizes)[rank].cuda())
        return [parameter.grad * len(sizes) for parameter in net.parameters()], list(net.buffers())

    torch.manual_seed(1)
    x = torch.randn(sum(sizes), 3, *[4] * dims, dtype=dtype)
    train(alone := model(), x)
    for gradients, buffers in sim.run(body, len(sizes), map_device="cuda"):
        expected = [*(parameter.grad for parameter in alone.parameters()), *alone.buffers()]
        torch.testing.assert_close([*gradients, *buffers], expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="batch_norm_stats"):
        torch.batch_norm_stats(x, 1e-5)


def test_streams_that_ddp_makes_for_itself():
    """DDP in mixed precision, and with optimizers that step in backward, asks torch.Stream and torch.accelerator."""
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torch.nn.parallel.distributed import _MixedPrecision

    low = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.float32)

    def trained(in_backward: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 2).cuda()
        if in_backward:
            _apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
        net = torch.nn.parallel.DistributedDataParallel(layer, mixed_precision=None if in_backward else low)
        for _ in range(1 if in_backward else 2):  # in the first step torch reads what it has not written, with gloo too
            net.zero_grad()
            net(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()
        return (layer.weight.detach(), *([] if in_backward else [layer.weight.grad]))

    torch.manual_seed(0)
    before = torch.nn.Linear(4, 2).weight
    weight, gradient = sim.run(trained, 2, (False,), map_device="cuda")[0]
    assert torch.equal(weight, before)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full((2, 4), 3.0))
    torch.testing.assert_close(sim.run(trained, 2, (True,), map_device="cuda"), [(before - 0.3,)] * 2)


# -- Python's own ----------------------------------------------------------------------------------------------


def drawn(seed: int, python, numpy) -> list[float]:
    python.seed(seed)
    numpy.seed(seed)
    first = [python.random(), numpy.randn(), numpy.random_sample()]
    if dist.is_initialized():
        dist.barrier()  # others draw in between
    return [*first, python.random(), numpy.randn()]


def test_seam_python_random():
    state = random.getstate()
    expected = [drawn(rank, random.Random(), np.random.RandomState()) for rank in range(4)]
    assert sim.run(lambda: drawn(dist.get_rank(), random, np.random), 4) == expected
    own = sim.run(lambda: [random.random(), random.choice(range(10**9))], 3, seed=1)
    assert len({draw for draws in own for draw in draws}) == 6, "unseeded, every rank draws something else"
    assert own == sim.run(lambda: [random.random(), random.choice(range(10**9))], 3, seed=1), "and the same each time"
    assert random.getstate() == state
    assert random.random.__self__ is random._inst


def test_seam_numpy_random():
    before = np.random.get_state()[1].tolist()
    assert len(set(sim.run(lambda: np.random.rand(), 3))) == 3  # noqa: PLW0108 - looked up on the rank
    assert np.random.get_state()[1].tolist() == before
    assert np.random.rand.__self__ is np.random.mtrand._rand


def test_seam_process_exit():
    with pytest.raises(sim.SimError, match=r"rank \d called os\._exit\(3\), which would end all 2 simulated ranks"):
        sim.run(lambda: os._exit(3), 2)


@pytest.mark.tier("test")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (lambda: None, 0),
        (lambda: sys.exit(3), 3),
        (lambda: 1 / 0, 1),
        (dist.barrier, 1),  # it is no rank
        (lambda: time.sleep(0), 0),
        (lambda: threading.Event().wait(), None),  # ended with its world
    ],
)
def test_seam_fork(ends, code):
    def body():
        child = os.fork()
        if child == 0:
            return ends()
        return child if code is None else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    found = sim.run(body, 2)
    if code is None:
        for pid in found:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    else:
        assert found == [code, code]


def test_seam_spawn():
    import torch.multiprocessing as mp

    with pytest.raises(sim.SimError, match=r"called torch\.multiprocessing\.spawn\(barrier, \.\.\.\)"):
        sim.run(lambda: mp.spawn(dist.barrier, nprocs=2), 2)
    with pytest.raises(sim.SimError, match="it starts processes as ranks"):
        sim.run(lambda: mp.start_processes(dist.barrier, nprocs=2), 2)


def test_seam_start_method():
    with sim.world(2) as world:
        world.run(lambda: multiprocessing.set_start_method("spawn", force=True))
        assert world.run(multiprocessing.get_start_method) == ["spawn"] * 2


@pytest.mark.tier("test")
def test_seam_child_environment():
    def body() -> tuple:
        code = "import os; print(os.environ.get('RANK'), os.environ.get('MINE'))"
        os.environ["MINE"] = f"mine {dist.get_rank()}"
        dist.barrier()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, close_fds=True)
        process = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(0,))
        process.start()
        process.join()
        return done.stdout.strip(), process.exitcode

    assert sim.run(body, 2) == [("0 mine 0", 0), ("1 mine 1", 0)]


def script_world(world_size: int, folder: str = "") -> sim.World:
    """A world as it is made for a script."""
    made = sim.world(world_size)
    made.host.folder = folder
    for context in made.contexts:
        streams = RankStream(None, "", like=sys.stdout), RankStream(None, "", like=sys.stderr)
        context.view = ProcessView(["x.py"], sys.path, *streams)
        context.modules.main = types.ModuleType("__main__")
    return made


def test_seam_process_view():
    def body() -> tuple:
        rank = dist.get_rank()
        sys.modules["__main__"].rank = rank
        sys.argv.append(str(rank))
        logging.basicConfig(level=logging.INFO + rank)
        if rank:
            builtins.print = None
        multiprocessing.set_start_method("spawn" if rank else "forkserver")
        dist.barrier()
        own = sys.modules["__main__"].rank, sys.argv, logging.getLogger("a.b").getEffectiveLevel() - logging.INFO
        return *own, builtins.print is None, multiprocessing.get_start_method()

    before = [getattr(owner, name) for owner, name in SLOTS], sys.modules["__main__"], list(logging.root.handlers)
    with script_world(3) as world:
        methods = ["forkserver", "spawn", "spawn"]
        assert world.run(body) == [(r, ["x.py", str(r)], r, r > 0, methods[r]) for r in range(3)]
    after = [getattr(owner, name) for owner, name in SLOTS], sys.modules["__main__"], list(logging.root.handlers)
    assert after == before


def test_seam_imports(tmp_path, monkeypatch):
    (tmp_path / "of_a_rank.py").write_text("import torch.distributed as dist\ndist.barrier()\nrank = dist.get_rank()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path), sys.modules["importlib._bootstrap"]._module_locks

    def body() -> tuple:
        import json

        import of_a_rank  # waits for the others in the middle of it

        dist.barrier()
        return sys.modules["of_a_rank"].rank, id(of_a_rank), id(json)

    with script_world(3, str(tmp_path)) as world:
        ranks, own, shared = zip(*world.run(body), strict=True)
    assert ranks == (0, 1, 2)
    assert len(set(own)) == 3
    assert len(set(shared)) == 1
    assert "of_a_rank" not in sys.modules
    assert (list(sys.meta_path), sys.modules["importlib._bootstrap"]._module_locks) == before


def test_two_ranks_that_import_a_module_which_all_share(tmp_path, monkeypatch):
    """The second one waits for the first, which waits for it in the middle of the import: it gives up its turn."""
    (tmp_path / "of_all.py").write_text("import time\ntime.sleep(1)\nmade = object()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def body() -> int:
        import of_all

        return id(of_all.made)

    assert len(set(sim.run(body, world_size=3))) == 1
    assert sys.modules.pop("of_all")


WITH_DEFAULT_GROUPS = {
    "torch.distributed.nn.functional": "all_reduce",
    "torch.distributed.optim.zero_redundancy_optimizer": "_broadcast_object",
    "torch.distributed.fsdp.sharded_grad_scaler": "ShardedGradScaler",
}


@pytest.mark.parametrize("name", WITH_DEFAULT_GROUPS)
def test_seam_torch_imports(name, monkeypatch):
    """On a rank's first import torch works out its default groups, which must not be that rank's."""
    forget(name, monkeypatch)
    before = list(sys.meta_path)

    def body() -> str:
        found = importlib.import_module(name)
        defaults = inspect.signature(getattr(found, WITH_DEFAULT_GROUPS[name])).parameters
        assert dist.get_rank() == sim.current_rank(), "only while the module is executed the thread is no rank's"
        return str([p.default for p in defaults.values() if p.name in ("group", "process_group")])

    for size in (2, 3):
        assert sim.run(body, size) == ["[None]"] * size
    assert list(sys.meta_path) == before


def forget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a module of torch count as not imported yet, until the test ends."""
    module = importlib.import_module(name)
    parent, _, leaf = name.rpartition(".")
    monkeypatch.setattr(sys.modules[parent], leaf, module)
    monkeypatch.delitem(sys.modules, name)


def test_torch_still_works_out_defaults_at_the_import():
    """Where this fails, torch has moved what the patch is for."""
    source = inspect.getsource(importlib.import_module("torch.distributed.nn.functional"))
    assert "group=group.WORLD" in source


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_a_function_of_torchs_that_a_rank_imports_first(monkeypatch):
    for name in ("torch.distributed.nn.functional", "torch.distributed.nn"):
        forget(name, monkeypatch)

    def body() -> list[float]:
        from torch.distributed.nn.functional import all_reduce

        x = torch.ones(2, requires_grad=True)
        all_reduce(x * 1).sum().backward()
        return x.grad.tolist()

    assert sim.run(body, 2) == [[2.0, 2.0]] * 2
    assert sim.run(body, 3) == [[3.0, 3.0]] * 3, "also in the next world"


def test_seam_exit_calls():
    called: list[int] = []

    def body() -> int:
        atexit.register(called.append, dist.get_rank())
        atexit.register(pytest.fail, "not unregistered")
        atexit.unregister(pytest.fail)
        return len(called)

    with script_world(2) as world:
        contexts = list(world.contexts)
        assert world.run(body) == [0, 0]
    for context in contexts:
        context.view.run_exit_calls()
    assert called == [0, 1]


def test_seam_signals():
    before = signal.getsignal(signal.SIGUSR1)

    def body() -> tuple:
        old = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        dist.barrier()
        return old is before, signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN

    with script_world(2) as world:
        assert world.run(body) == [(True, True)] * 2
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.usefixtures("interruptible")
def test_signals_that_a_rank_sends_itself():
    def body() -> list[int]:
        heard: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGCHLD)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        os.kill(os.getpid(), 0)
        assert (signal.alarm(1), signal.setitimer(signal.ITIMER_REAL, 0.01)) == (0, (0.0, 0.0))
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "it would end the process"
        return heard

    async def an_event_loop_of_a_script() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)

    with script_world(2) as world:
        assert world.run(body) == [[signal.SIGUSR1] * 2] * 2
        world.run(lambda: asyncio.run(an_event_loop_of_a_script()))
    for each in (lambda: os.kill(os.getpid(), signal.SIGUSR1), lambda: signal.raise_signal(signal.SIGUSR1)):
        with pytest.raises(sim.SimError, match=r"rank \d sent itself SIGUSR1, which would end all 2 simulated ranks"):
            sim.run(each, 2)


def test_seam_settings():
    """What it is for is in `test_sim_isolation.py`."""
    with sim.world(2) as world:
        torch.set_default_dtype(torch.float64)
        try:
            assert world.run(torch.get_default_dtype) == [torch.float64] * 2
            assert torch.get_default_dtype() == torch.float64, "outside of ranks it stays set"
        finally:
            torch.set_default_dtype(torch.float32)


def test_seam_main_thread():
    def body() -> tuple:
        go = threading.Event()
        helper = threading.Thread(target=go.wait)
        with as_main_thread(this_thread.context.view):
            helper.start()
            dist.barrier()
            seen = threading.enumerate()
            mine = threading.current_thread()
            answer = threading.main_thread() is mine, mine.name, seen == [mine, helper], threading.active_count()
        go.set()
        helper.join()
        return answer

    queues = []

    def leave_a_thread() -> None:
        queues.append(multiprocessing.Queue())
        queues[-1].put(dist.get_rank())  # from a thread that lives until the queue is closed

    sim.run(leave_a_thread, 3)
    with script_world(3) as world:
        assert world.run(body) == [(True, "MainThread", True, 2)] * 3, "threads of another world are not this one's"
    for queue in queues:
        queue.close()
        queue.join_thread()
    assert len(sim.run(threading.enumerate, 2)[0]) > 2, "where no script runs, ranks are threads like others"


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_seam_profiler(tmp_path):
    done = []

    def body() -> int:
        file = tmp_path / f"{dist.get_rank()}.json"
        with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=2)) as profile:
            for _ in range(4):
                x = torch.ones(4) * 2
                dist.all_reduce(x)
                profile.step()
        profile.export_chrome_trace(str(file))
        assert (len(profile.events()) > 0) == ("aten::mul" in file.read_text())
        profile.key_averages().table()
        done.append(dist.get_rank())
        return len([each for each in profile.events() if each.name == "aten::mul"])

    with pytest.warns(UserWarning, match=r"the profile of rank \d stays empty: torch profiles rank \d already"):
        counts = sim.run(body, 3)
    assert sorted(counts) == [0, 0, 2], "its own operations only"

    def leaves_it_running() -> int:
        if dist.get_rank() == 1:
            torch.profiler.profile().start()
        return len(done)

    sim.run(leaves_it_running, 2)
    assert sim.run(lambda: torch.autograd._profiler_enabled(), 2) == [False, False]  # noqa: PLW0108 - asked on the rank
    with torch.profiler.profile() as outside:
        with pytest.warns(UserWarning, match="torch profiles the process already"):
            assert sim.run(body, 1) == [0]
        _ = torch.ones(4) * 2
    assert [each.name for each in outside.events()].count("aten::mul") == 1


@pytest.mark.tier("test")
def test_seam_custom_operators():
    owner = torch._library.custom_ops.CustomOpDef
    before = dict(vars(owner))

    @torch.library.custom_op("of_the_process::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def body(offset: int) -> tuple:
        rank = dist.get_rank() + offset

        @torch.library.custom_op("of_ranks::times", mutates_args=())
        def times(x: torch.Tensor) -> torch.Tensor:
            return x * rank

        dist.barrier()
        times.register_fake(torch.empty_like)
        times.register_autograd(lambda ctx, grad: grad * rank)
        times.register_vmap(lambda info, dims, x: (x + rank, dims[0]))
        x = torch.ones(2, requires_grad=True)
        y = times(x)
        dist.barrier()
        y.sum().backward()
        compiled = torch.compile(lambda x: times(x) + 1, backend="eager", fullgraph=True)
        found = [y[0].item(), x.grad[0].item(), torch.vmap(times)(torch.ones(1)).item(), compiled(torch.ones(1)).item()]
        dist.barrier()
        times.register_kernel("cpu", lambda x: x * rank * 10)
        dist.barrier()
        found.append(torch.ops.of_ranks.times(torch.ones(1)).item())
        with times.set_kernel_enabled("cpu", enabled=rank != offset):
            dist.barrier()
            found += [times(torch.ones(1)).item(), twice(torch.ones(1)).item()]
        return tuple(found)

    def expected(rank: int, is_first: bool) -> tuple:
        return rank, rank, 1 + rank, rank + 1, 10 * rank, rank if is_first else 10 * rank, 2

    for seed in range(2):
        with sim.world(3, seed=seed) as world:
            for offset in (2, 5):
                assert world.run(body, (offset,)) == [expected(offset + rank, rank == 0) for rank in range(3)]
    assert dict(vars(owner)) == before
    assert twice(torch.ones(1)) == 2

    def another_schema() -> float:
        if dist.get_rank():
            return 0.0
        operator = torch.library.custom_op("of_ranks::times", mutates_args=())
        return operator(lambda_of_two)(torch.ones(1), 3.0).item()

    def lambda_of_two(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by

    assert sim.run(another_schema, 2) == [3.0, 0.0]


def _registers_operators(offset: int) -> tuple:
    """Operators in all ways of the Library API, by functions that know the rank: what they return on it."""
    number = dist.get_rank() + offset
    library = torch.library.Library("of_a_rank", "DEF")
    library.define("plus(Tensor x) -> Tensor")
    dist.barrier()
    library.impl("plus", lambda x: x * 0, "CPU", allow_override=False)
    with pytest.raises(RuntimeError, match="This is not allowed since there's already a kernel"):
        library.impl("plus", lambda x: x * 1, "CPU", allow_override=False)
    library.impl("plus", lambda x: x + number, "CPU", allow_override=True)
    torch.library.define("also_of_a_rank::times", "(Tensor x) -> Tensor")
    torch.library.impl("also_of_a_rank::times", "default", lambda x: x * number)
    dist.barrier()
    torch.library.register_fake("also_of_a_rank::times", torch.empty_like)
    torch.library.register_fake("of_a_rank::plus", lambda x: x.new_empty(number), allow_override=False)
    torch.library.register_autograd("also_of_a_rank::times", lambda ctx, grad: grad * number)
    torch.library.register_vmap("also_of_a_rank::times", lambda info, dims, x: (x + number, dims[0]))
    fragment = torch.library.Library("of_a_rank", "FRAGMENT")
    fragment.define("number(Tensor x) -> Tensor")
    torch.library.impl(fragment, "number")(lambda x: torch.full_like(x, number))
    dist.barrier()
    x, one = torch.ones(1, requires_grad=True), torch.ones(1)
    y = torch.ops.also_of_a_rank.times(x)
    dist.barrier()
    y.sum().backward()

    def compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.also_of_a_rank.times(x) + torch.ops.of_a_rank.number(x)

    z = torch.ones(1, requires_grad=True)
    torch.compile(compiled, backend="aot_eager", fullgraph=True)(z).sum().backward()
    with FakeTensorMode() as mode:
        length = len(torch.ops.of_a_rank.plus(mode.from_tensor(one)))
    found = [torch.ops.of_a_rank.plus(one), y, x.grad, torch.vmap(torch.ops.also_of_a_rank.times)(one)]
    found += [torch.ops.of_a_rank.number(one), z.grad]
    dist.barrier()
    return (*(each.item() for each in found), length)


def test_functions_of_the_process_are_there_beside_those_of_a_rank():
    library = torch.library.Library("of_the_process_too", "DEF")
    library.define("plus(Tensor x) -> Tensor")
    library.impl("plus", lambda x: x + 1, "CPU")

    def body() -> list[bool]:
        own = torch.library.Library("of_the_process_too", "IMPL")
        if dist.get_rank() == 0:
            own.impl("plus", torch.empty_like, "Meta")
        dist.barrier()
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        found = [has("of_the_process_too::plus", key) for key in ("CPU", "Meta", "CUDA")]
        dist.barrier()
        return found

    assert sim.run(body, 2) == [[True, True, False], [True, False, False]]


@pytest.mark.tier("test")
def test_operators_of_libraries():
    make = torch._C._dispatch_library
    for seed, offset in ((0, 2), (1, 5)):
        with sim.world(3, seed=seed) as world:
            numbers = [offset + rank for rank in range(3)]
            assert world.run(_registers_operators, (offset,)) == [
                (1 + number, number, number, 1 + number, number, number, number) for number in numbers
            ]
        torch._dynamo.reset()
    gc.collect()
    assert torch._C._dispatch_library == make
    assert not [name for name in torch.library._defs if "of_a_rank" in name]
    assert not [each for each in torch.library._keep_alive if "of_a_rank" in each.ns]
    assert not hasattr(torch.ops.of_a_rank, "plus")


def test_operators_of_torch_that_a_rank_changes():
    def body() -> tuple[float, float, float]:
        x = torch.full((1,), 2.0)
        before = torch.erfinv(x / 4).item()
        if dist.get_rank() == 0:
            library = torch.library.Library("aten", "IMPL")
            library.impl("erfinv", lambda x: x * 10, "CPU")
        dist.barrier()
        changed = torch.erfinv(x / 4).item()
        dist.barrier()
        if dist.get_rank() == 0:
            library._destroy()
        return before, changed, torch.erfinv(x / 4).item()

    usual = torch.erfinv(torch.full((1,), 0.5)).item()
    assert sim.run(body, 2) == [(usual, 5.0, usual), (usual, usual, usual)]


def test_operators_that_ranks_cannot_have():
    def twice() -> None:
        keep.append(torch.library.Library("of_a_rank", "DEF"))
        torch.library.Library("of_a_rank", "DEF")

    def differing() -> None:
        torch.library.define("of_a_rank::f", f"({'Tensor' if dist.get_rank() else 'int'} x) -> Tensor")
        dist.barrier()

    def of_the_process() -> None:
        torch.library.Library("_", "IMPL").fallback(print, "AutocastCPU")

    keep: list[object] = []
    with pytest.raises(sim.SimError, match="Only a single TORCH_LIBRARY can be used to register the namespace of_a"):
        sim.run(twice, 2)
    with pytest.raises(sim.SimError, match=r"rank . cannot define of_a_rank::f\(.*: rank . has defined it as of_a"):
        sim.run(differing, 2)
    with pytest.raises(sim.SimError, match="called fallback of a library of '_', which is for a whole process"):
        sim.run(of_the_process, 2)


def test_an_operator_whose_world_has_ended():
    def body() -> None:
        operator = torch.library.custom_op("of_a_rank::gone", mutates_args=())(lambda_of_one)
        kept.extend((operator, torch.ops.of_a_rank.gone, torch.ops.of_a_rank.gone.default))

    def lambda_of_one(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    kept: list[object] = []
    sim.run(body, 2)
    for operator in kept:
        with pytest.raises(RuntimeError, match="no rank has the operator of_a_rank::gone any more"):
            operator(torch.ones(1))


@pytest.mark.parametrize("place", ["", "site-packages"])
def test_operators_of_a_module_that_ranks_share(tmp_path, monkeypatch, place):
    """It defines them once, when some rank first imports it, or calls it; they are there for all, and stay."""
    folder, name = tmp_path / place, f"shares_operators_{len(place)}"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(
        "import functools, torch\n"
        f"@torch.library.custom_op('{name}::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
        "@functools.cache\n"
        "def define():\n"
        f"    torch.library.define('{name}::thrice', '(Tensor x) -> Tensor')\n"
        f"    torch.library.impl('{name}::thrice', 'default', lambda x: x * 3)\n"
    )
    monkeypatch.syspath_prepend(str(folder))

    def body() -> tuple[float, float]:
        module = importlib.import_module(name)
        if place or dist.get_rank() == 0:
            module.define()
        dist.barrier()
        return module.twice(torch.ones(1)).item(), getattr(torch.ops, name).thrice(torch.ones(1)).item()

    for _ in range(2 if place else 1):
        assert sim.run(body, 2) == [(2.0, 3.0)] * 2
    assert getattr(torch.ops, name).twice(torch.ones(1)) == 2
    assert hasattr(getattr(torch.ops, name), "thrice") == bool(place)


# -- the group itself ------------------------------------------------------------------------------------------

# What torch's ProcessGroup has and ours leaves to it: names, ranks, stores, settings; nothing that moves data.
LEFT_TO_TORCH = {
    "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "bound_device_id", "boxed", "unbox",
    "get_group_store", "group_desc", "group_name", "name", "rank", "get_backend", "get_reconfigure_handle",
    "supports_abort_hooks", "supports_completion_hooks", "supports_reconfigure", "supports_window",
    "unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook", "_add_ephemeral_timeout", "_backend_id",
    "_device_types", "_enable_collectives_timing", "_get_backend", "_get_backend_name", "_has_hooks", "_id",
    "_pybind11_conduit_v1_", "_register_backend", "_set_default_backend", "_set_group_desc", "_set_group_name",
    "_wait_for_pending_works",
}  # fmt: skip


def test_no_operation_of_torchs_group_is_forgotten():
    """An operation that ours did not have would go to a placeholder, which does nothing and says nothing."""
    names = {name for name in dir(dist.ProcessGroup) if not (name.startswith("__") and name.endswith("__"))}
    assert names - set(vars(SimProcessGroup)) - LEFT_TO_TORCH == set()


def test_what_a_simulated_group_does_not_have_it_says():
    def body() -> None:
        dist.group.WORLD._register_on_completion_hook(print)

    with pytest.raises(sim.SimError, match="simulated groups have no completion hooks"):
        sim.run(body, 2)


def test_a_world_prints_no_warning(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.run(lambda: (dist.init_process_group("gloo"), init_device_mesh("cpu", (2, 2)), dist.barrier()), 4)
    assert capfd.readouterr() == ("", ""), "nor does the C++ side"


def test_seam_locks():
    """What waits is built on locks that the waiting thread makes, and looked up by these names."""
    import queue

    from sim.patches import locks

    lock, simple_queue = threading.Lock, queue.SimpleQueue

    def body() -> tuple:
        condition, rlock = threading.Condition(threading.Lock()), threading.RLock()
        with rlock, rlock, condition:
            condition.wait(1.0)
            made = type(condition._lock), type(rlock._block), type(queue.SimpleQueue())
        return *made, type(vars(threading)["_allocate_lock"]())

    with sim.world(2) as world:
        assert world.run(body) == [(locks.Lock, locks.Lock, vars(queue)["_PySimpleQueue"], locks.Lock)] * 2
        assert type(threading.Lock()) is type(lock()), "this thread is no rank"
        assert type(queue.SimpleQueue()) is simple_queue
        assert world.now == 1.0, "the condition waited for its own lock"


def test_seam_file_locks(tmp_path):
    """What it is for is in `test_sim_clock.py`."""

    def body() -> list[bool]:
        with (tmp_path / "file").open("w") as file:
            free = []
            for lock in (fcntl.flock, fcntl.lockf):
                dist.barrier()
                if dist.get_rank() == 0:
                    lock(file, fcntl.LOCK_EX)
                dist.barrier()
                try:
                    lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    free.append(True)
                except BlockingIOError:
                    free.append(False)
                dist.barrier()
                lock(file, fcntl.LOCK_UN)
            with pytest.raises(ValueError, match="unrecognized lockf argument"):
                fcntl.lockf(file, 0)
            return free

    assert sim.run(body, 2) == [[True, True], [False, False]]


@pytest.mark.tier("test")
def test_seam_compile_lock():
    """A compiler that waits, as for a process, lets others run, who then wait for the lock that it holds."""

    def slow(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        time.sleep(1.0)
        return graph.forward

    def body() -> tuple[float, str]:
        compiled = torch.compile(lambda x: x + 1.0, backend=slow)
        return compiled(torch.ones(2)).sum().item(), type(torch._dynamo.convert_frame.compile_lock._block).__name__

    assert sim.run(body, 3) == [(4.0, "Lock")] * 3


@pytest.mark.tier("test")
def test_a_compiled_ddp():
    """C++ code calls simulated groups while frames are compiled: what these do is not."""

    def body(compiles: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
        net = torch.nn.parallel.DistributedDataParallel(layer)
        net = torch.compile(net, backend="eager") if compiles else net
        for _ in range(3):
            (net(torch.eye(4) * (dist.get_rank() + 1)) ** 3).sum().backward()
        return layer[0].weight.grad

    torch.testing.assert_close(sim.run(body, 2, (True,)), sim.run(body, 2, (False,)), rtol=0, atol=0)


def test_seam_timeouts():
    import queue

    def clocks() -> list:
        return [vars(threading)["_time"], vars(queue)["time"], concurrent.futures._base.time.monotonic]

    with sim.world(1) as world:
        assert world.run(lambda: (time.sleep(5.0), *[now() for now in clocks()])) == [(None, 5.0, 5.0, 5.0)]
        assert clocks()[2]() > 0
        assert concurrent.futures._base.time.perf_counter is time.perf_counter


def test_seam_threads():
    def body() -> tuple:
        ranks: list[int] = []
        thread = threading.Thread(target=lambda: (dist.barrier(), ranks.append(dist.get_rank())))
        thread.start()
        thread.join()
        return ranks, thread.is_alive(), thread.daemon, "run" in vars(thread)

    assert sim.run(body, 2) == [([rank], False, False, False) for rank in range(2)]


def test_what_is_replaced_is_pickled_by_the_name_of_the_original():
    """A process pool gets it so, and datasets names by it what a function computes."""
    names = ["time.sleep", "os.kill", "random.random", "numpy.random.rand", "torch.load", "queue.SimpleQueue"]
    names += ["threading.RLock", "threading.Lock", "threading.main_thread"]

    def body() -> list[bytes]:
        found = [pkgutil.resolve_name(name) for name in names]
        texts = [pickle.dumps(each) for each in found]
        assert [pickle.loads(text) for text in texts] == found
        return texts

    for options in ({}, {"map_device": "cuda"}):
        found = sim.run(body, 2, **options)
        assert found[0] == found[1]
        assert [name for name, text in zip(names, found[0], strict=True) if b"sim." in text] == []
        assert pickle.loads(found[0][0]) is time.sleep


def test_seam_pools():
    with concurrent.futures.ThreadPoolExecutor(1) as executor, sim.world(2) as world:
        assert world.run(lambda: executor.submit(dist.get_rank).result()) == [0, 1]
        assert executor.submit(lambda: 5).result() == 5


def test_seam_futures():
    logger = concurrent.futures._base.LOGGER
    filters = list(logger.filters)

    def body() -> list[str]:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            pool.submit(int).result()
            return [thread.name[-2:] for thread in pool._threads]

    with sim.world(1) as world:
        assert world.run(body) == [["_0"]]
        assert not concurrent.futures.Future().done()
        assert len(logger.filters) == len(filters) + 1
    assert logger.filters == filters


def test_seam_event_loops():
    from sim.patches.locks import RankSelector

    async def body() -> tuple:
        loop = asyncio.get_running_loop()
        others = len(loop._selector.get_map()) - 1  # beside the end of the pipe that wakes the loop
        await asyncio.to_thread(dist.barrier)
        await asyncio.sleep(2.5)
        return type(loop._selector), others, loop.time()

    with sim.world(2) as world:
        assert world.run(lambda: asyncio.run(body())) == [(RankSelector, 0, 2.5)] * 2
        elsewhere = asyncio.new_event_loop()
        assert not isinstance(elsewhere._selector, RankSelector), "this thread is no rank"
        assert elsewhere.time() > 0
        elsewhere.close()


def test_seam_time_sleep():
    with sim.world(2) as world:
        world.run(lambda: (time.sleep(3600), dist.barrier()))
        assert world.now == 3600.0
