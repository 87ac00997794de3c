"""Patches of torch and ``os.environ`` while a world is alive; the rest: ``sim/seams/process.py``.

Each seam is a small function that makes one change and returns how to undo it. All were tried on torch 2.11,
2.13 and 2.15; ``tests/unit/test_seams.py`` has a test per seam that fails when torch moves it. Outside of a
rank's thread every seam answers what torch itself would have answered.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger
from torch.distributed import device_mesh as torch_device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from sim.comm.dispatcher import DISPATCHER_SEAMS
from sim.explain.errors import SimError
from sim.kernel.clock import CLOCK_SEAMS
from sim.kernel.context import current_context, this_thread
from sim.patches import devices
from sim.patches.event_loops import EVENT_LOOP_SEAMS
from sim.patches.helper_threads import HELPER_SEAMS
from sim.patches.locks import LOCK_SEAMS
from sim.patches.messages import MESSAGE_SEAMS
from sim.patches.process import PROCESS_SEAMS
from sim.patches.sharding_propagation import SHARDING_SEAMS
from sim.patches.torch_imports import IMPORT_SEAMS

if TYPE_CHECKING:
    from sim.world import RankContext, World

__all__ = [
    "SEAMS",
    "catch_up",
    "clear_thread_caches",
    "enter_rank",
    "install",
    "is_alive",
    "join_default_group",
    "leave_rank",
    "new_c10d_state",
    "thread_has_caches",
    "thread_is_altered",
    "uninstall",
    "use_op_handlers",
]

Undo = Callable[[], None]


class _RankC10dState(c10d._World):
    """One rank's state of ``torch.distributed``: torch's own class, over dictionaries of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[str, dict[Any, Any]] = {
            name: {}
            for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
        }
        self._count = 0

    pg_map = property(lambda self: self._maps["pg_map"])  # type: ignore[assignment]
    pg_names = property(lambda self: self._maps["pg_names"])  # type: ignore[assignment]
    pg_group_ranks = property(lambda self: self._maps["pg_group_ranks"])  # type: ignore[assignment]
    pg_backend_config = property(lambda self: self._maps["pg_backend_config"])  # type: ignore[assignment]
    tags_to_pg = property(lambda self: self._maps["tags_to_pg"])  # type: ignore[assignment]
    pg_to_tag = property(lambda self: self._maps["pg_to_tag"])  # type: ignore[assignment]

    @property
    def group_count(self) -> int:
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._count = value


def new_c10d_state() -> Any:
    """A fresh, uninitialised ``torch.distributed`` state for one rank."""
    return _RankC10dState()


def _replace_function(name: str, replacement: Callable[..., Any]) -> Undo:
    """Let ``torch.distributed``'s function ``name`` be ``replacement``, also for those who imported it before.

    torch wraps these functions in one that logs errors. The wrapper stays; what it calls is exchanged.
    """
    wrapper = getattr(c10d, name)
    for variable, cell in zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True):
        if variable == "func":
            original = cell.cell_contents
            break
    else:
        raise SimError(f"torch {torch.__version__} no longer wraps torch.distributed.{name}\n  try: another torch")
    replacement.__name__ = original.__name__
    cell.cell_contents = replacement

    def undo() -> None:
        cell.cell_contents = original

    return undo


def _replaced(name: str) -> Callable[..., Any]:
    """What torch's own function ``name`` does, for a replacement to fall back on."""
    wrapper = getattr(c10d, name)
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    if "func" not in cells:
        return wrapper
    return cells["func"].cell_contents


# -- the seams, one function each ------------------------------------------------------------------------------


def _c10d_state(world: World) -> Undo:
    """``torch.distributed``'s state: the calling rank's, not the process's."""
    real = c10d._world

    class PerRank:
        @property
        def default_pg(self) -> Any:  # asked at every operation, hence not left to __getattr__
            context = this_thread.context
            return (real if context is None else context.c10d).default_pg

        def __getattr__(self, name: str) -> Any:
            context = current_context()
            return getattr(real if context is None else context.c10d, name)

        def __setattr__(self, name: str, value: Any) -> None:
            context = current_context()
            setattr(real if context is None else context.c10d, name, value)

    c10d._world = PerRank()  # type: ignore[assignment]

    def undo() -> None:
        c10d._world = real

    return undo


def _group_names(world: World) -> Undo:
    """The C++ table from group names to groups: one per thread."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    return lambda: torch._C._distributed_c10d._set_thread_isolation_mode(False)


def _global_rank(world: World) -> Undo:
    """The rank that the C++ side puts before its log lines: the process has only one, so it is left alone."""
    bindings = torch._C._distributed_c10d
    original = bindings._set_global_rank

    def set_global_rank(rank: int) -> None:
        if current_context() is None:
            original(rank)

    bindings._set_global_rank = set_global_rank

    def undo() -> None:
        bindings._set_global_rank = original

    return undo


def _backend(world: World) -> Undo:
    """The backend ``sim``; torch has no way to take a backend back, so it stays registered."""
    if "SIM" not in c10d.Backend._plugins:
        c10d.Backend.register_backend("sim", _create_group, extended_api=True, devices=["cpu", "cuda", "npu", "meta"])
    return lambda: None


def _create_group(options: Any, backend_options: Any) -> dist.ProcessGroup:
    del backend_options
    context = current_context()
    if context is None:
        raise SimError("the backend 'sim' works on simulated ranks only\n  try: sim.run(fn, world_size=8)")
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    if context.members is not None:
        ranks = tuple([context.members[rank] for rank in ranks])
    group = context.world.process_group(context, str(options.group_id), ranks)
    group._group.timeout = options.timeout.total_seconds()
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(custom)
    # Some of torch's code asks a group for its backend and devices; this one has answers and moves nothing. (On
    # torch 2.15 the group's own rank is the one it says.)
    placeholder = torch._C._distributed_c10d.FakeProcessGroup._create_internal(options.group_rank, options.group_size)
    group._register_backend(torch.device("cpu"), custom, placeholder)
    return group


def _group_creation(world: World) -> Undo:
    """Whatever backend a rank asks for (nccl, hccl, gloo, none), it gets ``sim`` under the asked name."""
    original = c10d._new_process_group_helper

    def new_process_group(
        group_size: int,
        group_rank: int,
        ranks: list[int],
        backend: Any,
        store: Any,
        group_name: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        context = current_context()
        if context is None:
            return original(group_size, group_rank, ranks, backend, store, group_name, *rest, **options)
        _check_backend(str(backend))
        options.update(backend_options=None, device_id=None)
        pg, used_store = original(
            group_size, group_rank, ranks, c10d.Backend("sim"), store, group_name, *rest, **options
        )
        if pg in context.c10d.pg_map:
            own, state = context.world.backend, context.c10d
            name = c10d.Backend(own) if str(backend) == "undefined" else backend
            state.pg_map[pg] = (name, state.pg_map[pg][1])
            if name == own:
                state.pg_backend_config[pg] = state.pg_backend_config[pg].replace(":sim", f":{own}")
        return pg, used_store

    default_timeout = c10d._get_default_timeout

    def get_default_timeout(backend: Any) -> Any:
        if current_context() is None:
            return default_timeout(backend)
        return c10d.default_pg_timeout  # without a warning that there is no NCCL

    c10d._new_process_group_helper = new_process_group
    c10d._get_default_timeout = get_default_timeout

    def undo() -> None:
        c10d._new_process_group_helper = original
        c10d._get_default_timeout = default_timeout

    return undo


def _rendezvous(world: World) -> Undo:
    """Ranks meet in the world's store instead of over TCP."""
    original = c10d.rendezvous

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[tuple[Any, int, int]]:
        context = current_context()
        if context is None:
            yield from original(url, rank, world_size, **options)
            return
        _check_identity(context, rank, world_size)
        yield context.store, *context.place

    c10d.rendezvous = rendezvous

    def undo() -> None:
        c10d.rendezvous = original

    return undo


def _error_log(world: World) -> Undo:
    """Where an operation on a group called nccl raises, torch asks for NCCL's version; a CPU build has none."""
    original = c10d_logger._get_msg_dict

    def get_msg_dict(func_name: str, *args: Any, **options: Any) -> dict[str, Any]:
        return original(func_name, *args, **options) if current_context() is None else {"func_name": func_name}

    c10d_logger._get_msg_dict = get_msg_dict

    def undo() -> None:
        c10d_logger._get_msg_dict = original

    return undo


_ELSEWHERE = ("hccl", "xccl", "mccl", "cncl", "sccl")  # backends that come with a device's own package


def _check_backend(asked: str) -> None:
    """Refuse a name that no real launch would accept either."""
    known = [name for name in dict.fromkeys((*c10d.Backend.backend_list, *_ELSEWHERE)) if name != "mpi"]
    for part in asked.lower().split(","):
        if part.rpartition(":")[2] not in known:
            raise ValueError(
                f"init_process_group was asked for the backend {asked!r}, which {_why_not(asked)}\n"
                f"  known: {', '.join(name for name in known if name != 'undefined')}\n"
                "  try: backend='nccl', 'hccl' or 'gloo', or none: the simulator stands in for each"
            )


def _why_not(asked: str) -> str:
    if "mpi" in asked.lower():
        return "takes its ranks from mpirun, and not from torchrun or sim"
    return "nobody provides"


def _check_identity(context: RankContext, rank: int, world_size: int) -> None:
    own, size = context.place
    if rank not in (-1, own) or world_size not in (-1, size):
        raise ValueError(
            f"init_process_group was asked for rank {_or_any(rank)} of {_or_any(world_size)}, but this is rank "
            f"{own} of {size}\n"
            "  try: leave out rank and world_size, or read RANK and WORLD_SIZE from the environment"
        )


def _or_any(number: int) -> str:
    return "(any)" if number == -1 else str(number)


def _init_process_group(world: World) -> Undo:
    """A function run by ``sim.run`` finds the default group made; its own first call is then accepted."""
    original = _replaced("init_process_group")
    signature = inspect.signature(original)

    def init_process_group(*args: Any, **options: Any) -> None:
        context = current_context()
        if context is None:
            original(*args, **options)
            return
        asked = signature.bind(*args, **options).arguments
        rank, world_size = asked.get("rank", -1), asked.get("world_size", -1)
        anew = context.inits > 0 and not (context.joined_by_world and dist.is_initialized())
        if context.faults is not None and anew:
            context.faults.reform.join(context, rank, world_size)
        elif asked.get("_ranks") is None:
            _check_identity(context, rank, world_size)
        if context.joined_by_world and dist.is_initialized():
            context.joined_by_world = False
            if asked.get("backend") is not None:
                _check_backend(str(asked["backend"]))
                default = context.c10d.default_pg
                context.c10d.pg_map[default] = (c10d.Backend(asked["backend"]), context.c10d.pg_map[default][1])
            if asked.get("timeout") is not None:
                context.c10d.default_pg._group.timeout = asked["timeout"].total_seconds()
            return
        context.joined_by_world = False
        if asked.get("store") is not None:  # a store of real ranks would wait without giving up the turn
            asked["store"] = context.store
        asked.pop("device_id", None)
        hook = sys.excepthook  # torch nests a hook of its own in it at each call
        try:
            original(**asked)
            context.inits += 1
        finally:
            sys.excepthook = hook

    return _replace_function("init_process_group", init_process_group)


def _split_group(world: World) -> Undo:
    """``split_group`` makes groups; torch's asks for an accelerator, or (2.15) returns a group that does nothing."""
    original = _replaced("split_group")
    may_be_none = "None" in str(inspect.signature(original).return_annotation)

    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if current_context() is None:
            return original(parent_pg, split_ranks, timeout, pg_options, *rest, **more)
        parent = parent_pg or dist.group.WORLD
        if not split_ranks or any(len(part) == 0 or len(part) != len(set(part)) for part in split_ranks):
            raise ValueError(
                f"split_group: cannot split a group into {split_ranks!r}\n"
                "  split_ranks: lists of different ranks, none of them empty\n  try: [[0, 1], [2, 3]]"
            )
        mine = next((part for part in split_ranks if parent.rank() in part), None)
        if mine is None:
            return None if may_be_none else c10d.GroupMember.NON_GROUP_MEMBER
        members = dist.get_process_group_ranks(parent)
        description = rest[0] if rest else more.get("group_desc")
        return dist.new_group(
            sorted(members[rank] for rank in mine),
            timeout=timeout,
            backend=dist.get_backend(parent),
            use_local_synchronization=True,
            group_desc=description,
        )

    return _replace_function("split_group", split_group)


def _new_group(world: World) -> Undo:
    """A rank is told of every group of a mesh, and is in one of them per axis: of the others it only counts.

    What torch would check has been checked by the first rank that has made the group.
    """
    original = _replaced("new_group")
    signature = inspect.signature(original)

    def new_group(ranks: Any = None, *rest: Any, **options: Any) -> Any:
        context = this_thread.context
        if context is None:
            return original(ranks, *rest, **options)
        state = context.c10d
        default, number = state.default_pg, state.group_count
        key = (context.generation, context.inits, number)
        if type(ranks) is not list or rest or options.get("use_local_synchronization"):
            group = original(ranks, *rest, **options)
            if state.group_count > number:  # it has one, unlike those that are made by some ranks alone
                asked = signature.bind(ranks, *rest, **options).arguments
                members = range(default.size()) if ranks is None else ranks
                world.groups_made.note(key, context.rank, members, asked.get("group_desc") or "")
            return group
        known = world.groups_made.known
        before = known.get(key)
        is_known = before is not None and default is not None and before == (default.size(), ranks, options)
        if is_known and default.rank() not in ranks:
            state.group_count = number + 1
            return dist.GroupMember.NON_GROUP_MEMBER
        group = original(ranks, **options)
        world.groups_made.note(key, context.rank, ranks, options.get("group_desc") or "")
        if before is None and default is not None:
            known[key] = (default.size(), ranks.copy(), options)
        return group

    get_rank = torch_device_mesh.get_rank

    def own_rank(group: Any = None) -> int:
        context = this_thread.context
        default = None if context is None or group is not None else context.c10d.default_pg
        return get_rank(group) if default is None else default.rank()

    put_back = _replace_function("new_group", new_group)
    meshs_own = torch_device_mesh.new_group, get_rank
    torch_device_mesh.new_group, torch_device_mesh.get_rank = new_group, own_rank  # without a logger around each call

    def undo() -> None:
        torch_device_mesh.new_group, torch_device_mesh.get_rank = meshs_own
        put_back()

    return undo


def _device_mesh(world: World) -> Undo:
    """A mesh is the rank's own (torch keeps process-wide caches by mesh); groups learn the names of their axes."""
    mesh_class = torch_device_mesh.DeviceMesh
    original = mesh_class.__init__

    def init(self: Any, device_type: str, *args: Any, **options: Any) -> None:
        context = current_context()
        if context is not None and context.world.map_device is not None:  # torch may keep this function, not the world
            device_type = devices.mapped(device_type, context.world.map_device)
        original(self, device_type, *args, **options)
        if context is None:
            return
        self._thread_id = (context.world.number, context.rank)
        names = self.mesh_dim_names
        if names:
            context.world.trace.know(names)
        default = context.c10d.default_pg
        groups = getattr(self, "_dim_group_names", None)  # a slice of a mesh has none of its own yet
        if names and groups and default is not None:
            for name, group in zip(names, groups, strict=False):
                if group == default.group_name:  # an axis over all ranks takes the default group
                    context.axis_names[group] = name
                    default.rename()

    mesh_class.__init__ = init  # type: ignore[method-assign]

    def undo() -> None:
        mesh_class.__init__ = original  # type: ignore[method-assign]

    return undo


def _caches(world: World) -> Undo:
    """torch's process-wide caches by mesh are cleared when the world, and with it the meshes, has ended."""

    def undo() -> None:
        from torch.distributed.tensor import _collective_utils, _redistribute

        for cached in (
            getattr(_redistribute, "_gen_transform_infos", None),
            getattr(_collective_utils.MeshTopoInfo, "build_from_mesh", None),
        ):
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
        clear = getattr(_redistribute, "clear_redistribute_planner_cache", None)
        if clear is not None:
            clear()

    return undo


class _PerRankEnvironment(MutableMapping[bytes, bytes]):
    """The data behind ``os.environ``: the calling rank's copy, or the process's."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.touched: set[bytes] = set()

    def _data(self) -> Any:
        context = current_context()
        return self.real if context is None else context.environment

    def __getitem__(self, key: bytes) -> bytes:
        return self._data()[key]

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self.touched.add(key)
        self._data()[key] = value

    def __delitem__(self, key: bytes) -> None:
        self.touched.add(key)
        del self._data()[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._data()))

    def __len__(self) -> int:
        return len(self._data())


def _environment(world: World) -> Undo:
    """``os.environ`` is the rank's own; what ranks have set does not outlive the world."""
    real = os.environ._data  # type: ignore[attr-defined]
    data = _PerRankEnvironment(real)
    os.environ._data = data  # type: ignore[attr-defined]
    os.environb._data = data  # type: ignore[attr-defined]

    def undo() -> None:
        os.environ._data = real  # type: ignore[attr-defined]
        os.environb._data = real  # type: ignore[attr-defined]
        for key in sorted(data.touched):  # a rank's os.environ also reached the C library's environment
            if key in real:
                os.putenv(key, real[key])
            else:
                os.unsetenv(key)

    return undo


def _dtensor_boundary(world: World) -> Undo:
    """With ``check_replicas``, what enters and leaves DTensors is compared and followed."""
    if not world.check_replicas:
        return lambda: None
    from torch.distributed.tensor import DTensor

    from sim.observers import partials, replicas

    from_local, to_local = DTensor.from_local, DTensor.to_local
    DTensor.from_local = staticmethod(replicas.check_when_made(from_local))
    DTensor.to_local = partials.follow_when_taken(to_local)

    def undo() -> None:
        DTensor.from_local, DTensor.to_local = staticmethod(from_local), to_local

    return undo


def _loss_parallel(world: World) -> Undo:
    """``loss_parallel`` is the calling rank's own; torch enters its operators into the one table of the process."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss

    dispatcher = DTensor._op_dispatcher
    plain = dispatcher._custom_op_handlers
    enable, disable = loss._enable_custom_loss_ops, loss._disable_custom_loss_ops

    def enable_on_rank() -> None:
        context = current_context()
        if context is None:
            enable()
            return
        context.op_handlers = {**dispatcher._custom_op_handlers, **loss.customized_loss_ops}
        use_op_handlers(context)

    def disable_on_rank() -> None:
        context = current_context()
        if context is None:
            disable()
            return
        context.op_handlers = None
        dispatcher._custom_op_handlers = plain

    world.op_handlers = plain
    loss._enable_custom_loss_ops, loss._disable_custom_loss_ops = enable_on_rank, disable_on_rank

    def undo() -> None:
        loss._enable_custom_loss_ops, loss._disable_custom_loss_ops = enable, disable
        dispatcher._custom_op_handlers = plain

    return undo


def use_op_handlers(context: RankContext, *, leaving: bool = False) -> None:
    """Let DTensors be dispatched as this rank has asked for, or as the process does."""
    from torch.distributed.tensor import DTensor

    dispatcher = DTensor._op_dispatcher
    dispatcher._custom_op_handlers = context.world.op_handlers if leaving else context.op_handlers


def _optimizer_steps(world: World) -> Undo:
    """With ``check_replicas``, every optimizer compares its parameters and gradients before a step."""
    if not world.check_replicas:
        return lambda: None
    from sim.observers import replicas

    return replicas.check_at_steps()


def _device_guard(world: World) -> Undo:
    """A CUDA build without a GPU (torch 2.11) crashes when DTensor sets up its device guard off the main thread."""
    name = "_ensureCUDADeviceGuardSet"
    original = getattr(torch._C, name, None)
    if original is None or torch.cuda.is_available():
        return lambda: None
    setattr(torch._C, name, lambda: None)
    return lambda: setattr(torch._C, name, original)


def _allocator(world: World) -> Undo:
    """glibc keeps freed memory for the next rank instead of giving it back to the system page by page.

    One arena is enough, since one rank runs at a time. glibc cannot tell its former settings, so they stay.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            m_trim_threshold, m_top_pad, m_mmap_threshold, m_arena_max = -1, -2, -3, -8
            mallopt(m_arena_max, 1)
            mallopt(m_mmap_threshold, 32 << 20)
            mallopt(m_trim_threshold, 256 << 20)
            mallopt(m_top_pad, 64 << 20)
    return lambda: None


def _platform(world: World) -> Undo:
    """``hyper_parallel.get_platform`` answers with the simulator's device on a rank's thread."""
    from hyper_parallel import platform
    from sim.patches.platform import provide

    platform.register_provider(provide)
    return lambda: platform.unregister_provider(provide)


def _mapped_device(world: World) -> Undo:
    """With ``--map-device``, torch answers as if each rank had a device; what names it gets the CPU."""
    kind = world.map_device
    if kind is None:
        return lambda: None
    module = devices.device_module(kind)
    missing = object()
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, vars(owner).get(name, missing)))
        setattr(owner, name, value)

    for name, standing_in in devices.CLASSES.items():
        replace(module, name, standing_in)
    for owner, answers in ((module, devices.ANSWERS), (torch.accelerator, devices.ACCELERATOR_ANSWERS)):
        for name in dict.fromkeys((*answers, *devices.documented(owner))):
            if owner is module or hasattr(owner, name):
                title = f"{owner.__name__}.{name}"
                original = getattr(owner, name, None)
                replace(owner, name, devices.answer(name, original, current_context, answers, title))
    replace(DistributedDataParallel, "__init__", _without_device_ids(DistributedDataParallel.__init__))
    replace(torch.autocast, "__init__", _on_cpu(torch.autocast.__init__, kind, "device_type"))
    replace(torch.amp.GradScaler, "__init__", _on_cpu(torch.amp.GradScaler.__init__, kind, "device", default="cpu"))
    replace(torch.nn.Module, "to", _on_cpu(torch.nn.Module.to, kind, "device"))
    replace(torch, "load", _loads_on_cpu(torch.load, kind))

    def undo() -> None:
        for owner, name, value in reversed(replaced):
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    return undo


def _without_device_ids(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *rest: Any, **more: Any
    ) -> None:
        if current_context() is not None:
            device_ids = output_device = None
        original(self, module, device_ids, output_device, *rest, **more)

    return init


def _on_cpu(original: Callable[..., Any], kind: str, name: str, default: str | None = None) -> Callable[..., Any]:
    """``original`` with its first argument, a device called ``name``, exchanged, or ``default`` if not given."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        if current_context() is not None:
            if args:
                args = (devices.mapped(args[0], kind), *args[1:])
            elif name in options or default is not None:
                options[name] = devices.mapped(options.get(name, default), kind)
        return original(self, *args, **options)

    return method


def _loads_on_cpu(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *rest: Any, **more: Any) -> Any:
        if current_context() is not None and isinstance(map_location, dict):
            map_location = {devices.mapped(k, kind): devices.mapped(v, kind) for k, v in map_location.items()}
        elif current_context() is not None:
            map_location = devices.mapped(map_location, kind)
        return original(f, map_location, *rest, **more)

    return load


def _active_ddp(world: World) -> Undo:
    """Which DDP module's forward runs is known per rank: torch has one place for all, and ranks take turns in forward.

    `torch.compile` asks for it. Since torch 2.13 a forward puts back what it found there, which was another rank's.
    """
    owner = DistributedDataParallel
    inside, ask = vars(owner)["_inside_ddp_forward"], vars(owner)["_get_active_ddp_module"]
    active = threading.local()

    @contextmanager
    @torch._disable_dynamo(recursive=False)
    def inside_forward(self: Any) -> Iterator[None]:
        if current_context() is None:
            with inside(self):
                yield
            return
        before, active.module = getattr(active, "module", None), self
        try:
            yield
        finally:
            active.module = before

    def active_module(cls: type) -> Any:
        return ask.__get__(None, cls)() if current_context() is None else getattr(active, "module", None)

    owner._inside_ddp_forward = inside_forward
    owner._get_active_ddp_module = classmethod(active_module)

    def undo() -> None:
        owner._inside_ddp_forward = inside
        owner._get_active_ddp_module = ask

    return undo


SEAMS: tuple[Callable[[World], Undo], ...] = (
    _c10d_state,
    _group_names,
    _global_rank,
    _backend,
    _group_creation,
    _rendezvous,
    _error_log,
    _init_process_group,
    _split_group,
    _new_group,
    _device_mesh,
    _caches,
    _environment,
    _dtensor_boundary,
    _active_ddp,
    _loss_parallel,
    _optimizer_steps,
    _device_guard,
    _allocator,
    _platform,
    _mapped_device,
    *DISPATCHER_SEAMS,
    *SHARDING_SEAMS,
    *PROCESS_SEAMS,
    *IMPORT_SEAMS,
    *CLOCK_SEAMS,
    *MESSAGE_SEAMS,
    *LOCK_SEAMS,
    *HELPER_SEAMS,
    *EVENT_LOOP_SEAMS,
)

# One world at a time: the seams are changes to the process.
_alive: list[tuple[World, list[Undo]]] = []


def is_alive(world: World) -> bool:
    """Whether ``world`` is the one whose seams are in place."""
    return bool(_alive) and _alive[0][0] is world


def install(world: World) -> None:
    """Put all seams in place for ``world``."""
    if current_context() is not None:
        raise SimError("a rank cannot start ranks of its own\n  try: call sim.run outside of a rank's function")
    if _alive:
        raise SimError(
            "a world cannot begin while another one is alive\n"
            f"  alive: a world of {_alive[0][0].world_size} ranks\n"
            "  try: leave its 'with' block first"
        )
    undos: list[Undo] = []
    _alive.append((world, undos))
    try:
        for seam in SEAMS:
            undos.append(seam(world))
    except BaseException:
        uninstall(world)
        raise


def uninstall(world: World) -> None:
    """Take all seams back, the last one first."""
    if not is_alive(world):
        return
    _, undos = _alive[0]
    try:
        while undos:
            undos.pop()()
    finally:
        if undos:  # one of them raised: take the others back all the same
            uninstall(world)
        else:
            _alive.clear()


# -- a rank's thread -------------------------------------------------------------------------------------------


def enter_rank(context: RankContext) -> None:
    """Make the rank's groups known by name on the thread that is about to run it."""
    for pg, name in context.c10d.pg_names.items():
        torch._C._distributed_c10d._register_process_group(name, pg)


def catch_up(context: RankContext) -> None:
    """Make known on this thread what groups other threads of its rank have made."""
    bindings = torch._C._distributed_c10d
    for pg, name in context.c10d.pg_names.items():
        try:
            bindings._resolve_process_group(name)
        except RuntimeError:
            bindings._register_process_group(name, pg)


def leave_rank(context: RankContext) -> None:
    """Forget the rank's group names on this thread, which goes back to the pool."""
    torch._C._distributed_c10d._unregister_all_process_groups()


def thread_has_caches() -> bool:
    """Whether torch has cached on this thread how DTensors of this world's meshes are dispatched."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return False
    propagator = tensor.DTensor._op_dispatcher.sharding_propagator
    native = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", lambda: (0, 0))()
    return bool(propagator.propagate_op_sharding.cache_info().currsize or any(native))


def clear_thread_caches() -> None:
    """Empty these caches, which would otherwise keep the meshes of worlds that have ended."""
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def thread_is_altered() -> bool:
    """Whether a rank has left a mode switched on that belongs to its thread and would reach the next rank on it."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or not torch._C._autograd._saved_tensors_hooks_is_enabled()
    )


def join_default_group(context: RankContext) -> None:
    """Make the rank's default group, as a launcher's script would have done."""
    dist.init_process_group(context.world.backend)
    context.joined_by_world = context.has_joined = True
