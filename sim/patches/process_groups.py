"""Patches of torch.distributed: its state, its groups and how they are made, on ranks.

All were tried on torch 2.11, 2.13 and 2.15. Outside of a rank's thread each answers what torch would have answered.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger
from torch.distributed import device_mesh as torch_device_mesh
from torch.distributed import distributed_c10d as c10d

from hyper_parallel.core.common.errors import InvalidValue
from sim.comm.dispatcher import replace_kernels
from sim.comm.group import Endpoint
from sim.comm.process_group import SimProcessGroup
from sim.comm.store import MAKERS
from sim.explain.errors import SimError
from sim.explain.issuers import of_reducer
from sim.explain.lines import purpose_of_caller, user_line
from sim.kernel.context import current_context, this_thread
from sim.patches.devices import mapped
from sim.patches.locks import exchange
from sim.patches.rank import Host, Undo

__all__ = ["PROCESS_GROUP_PATCHES", "new_c10d_state"]


class _RankC10dState(c10d._World):
    """One rank's state of `torch.distributed`: torch's own class, over dictionaries of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[str, dict[Any, Any]] = {
            name: {}
            for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
        }
        self._count = 0
        self.alone = 0  # of the groups counted, those that only their members have made

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
        if value == 0:  # torch has ended all groups
            self.alone = 0


def new_c10d_state() -> Any:
    """A fresh, uninitialised `torch.distributed` state for one rank."""
    return _RankC10dState()


def _replace_function(name: str, replacement: Callable[..., Any]) -> Undo:
    """Let `torch.distributed`'s function `name` be `replacement`, also for those who imported it before.

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
    """What torch's own function `name` does, for a replacement to fall back on."""
    wrapper = getattr(c10d, name)
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    if "func" not in cells:
        return wrapper
    return cells["func"].cell_contents


def _c10d_state(host: Host) -> Undo:
    """`torch.distributed`'s state: the calling rank's; the process's where no rank can be meant."""
    real = c10d._world

    def of_process() -> Any:
        if host.network.scheduler.is_stranger():
            raise SimError(
                "torch.distributed was asked on a thread of which it is not known whose it is\n"
                f"  seen: thread {threading.current_thread().name!r}, which no simulated rank has started, while "
                f"{host.network.world_size} ranks run\n"
                "  try: start the thread, or make its pool or event loop, in the function that the ranks run"
            )
        return real

    class PerRank:
        @property
        def default_pg(self) -> Any:  # asked at every operation, hence not left to __getattr__
            context = this_thread.context
            return (of_process() if context is None else context.c10d).default_pg

        def __getattr__(self, name: str) -> Any:
            context = current_context()
            return getattr(of_process() if context is None else context.c10d, name)

        def __setattr__(self, name: str, value: Any) -> None:
            context = current_context()
            setattr(of_process() if context is None else context.c10d, name, value)

    return exchange([(c10d, "_world", PerRank())])


def _group_names(host: Host) -> Undo:
    """The C++ table from group names to groups: one per thread."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    return lambda: torch._C._distributed_c10d._set_thread_isolation_mode(False)


def _global_rank(host: Host) -> Undo:
    """The rank that the C++ side puts before its log lines: the process has only one, so it is left alone."""
    bindings = torch._C._distributed_c10d
    original = bindings._set_global_rank

    def set_global_rank(rank: int) -> None:
        if current_context() is None:
            original(rank)

    return exchange([(bindings, "_set_global_rank", set_global_rank)])


def _backend(host: Host) -> Undo:
    """The backend `sim`; torch has no way to take a backend back, so it stays registered."""
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
    network, member = context.network, ranks.index(context.rank)
    shared = network.group(str(options.group_id), ranks, context.generation)
    shared.timeout = options.timeout.total_seconds()
    group = SimProcessGroup(context, shared, member)
    group.line = user_line()
    network.join(shared, member, group)
    _add_placeholder(group)
    return group


def _add_placeholder(group: SimProcessGroup) -> None:
    """Some of torch's code asks a group for its backend and devices; this one has answers and moves nothing."""
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(custom)
    # On torch 2.15 the group's own rank is the one that this says.
    placeholder = torch._C._distributed_c10d.FakeProcessGroup._create_internal(group.rank(), group.size())
    group._register_backend(torch.device("cpu"), custom, placeholder)


def _group_creation(host: Host) -> Undo:
    """Whatever backend a rank asks for (nccl, hccl, gloo, none), it gets `sim` under the asked name."""
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
            own, state = context.network.backend, context.c10d
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

    return exchange(
        [(c10d, "_new_process_group_helper", new_process_group), (c10d, "_get_default_timeout", get_default_timeout)]
    )


def _rendezvous(host: Host) -> Undo:
    """Ranks meet in the world's store instead of over TCP; torch has read the URL and the environment before."""
    original = c10d.rendezvous

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[tuple[Any, int, int]]:
        context = current_context()
        if context is None:
            yield from original(url, rank, world_size, **options)
            return
        _check_identity(context, rank, world_size)
        for _, own_rank, size in original(url, rank, world_size, **options):
            if context.members is None:  # if not, the environment is that of the ranks before some were lost
                _check_identity(context, own_rank, size)
            yield context.store, *context.place

    handlers = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function of that name
    make_tcp, make_file = handlers._create_c10d_store, handlers.FileStore

    def create_c10d_store(*args: Any, **options: Any) -> Any:
        context = current_context()
        return make_tcp(*args, **options) if context is None else context.store

    def file_store(*args: Any, **options: Any) -> Any:
        context = current_context()
        return make_file(*args, **options) if context is None else context.store

    return exchange(
        [
            (c10d, "rendezvous", rendezvous),
            (dist, "rendezvous", rendezvous),
            (handlers, "_create_c10d_store", create_c10d_store),
            (handlers, "FileStore", file_store),
        ]
    )


def _stores(host: Host) -> Undo:
    """A store that a rank makes is one of the world's. Classes derived from torch's, and other threads, get torch's."""

    def maker(kind: type, make: Callable[..., Any]) -> Any:
        def new(cls: type, *args: Any, **options: Any) -> Any:
            context = current_context()
            if context is None or cls is not kind:
                return dist.Store.__new__(cls)
            store = make(context.network.stores, context.rank, *args, **options)
            context.own_stores.append(store)  # torch's own references keep only its C++ half alive
            return store

        return staticmethod(new)

    return exchange([(kind, "__new__", maker(kind, make)) for kind, make in MAKERS.items()])


def _error_log(host: Host) -> Undo:
    """Where an operation on a group called nccl raises, torch asks for NCCL's version; a CPU build has none."""
    original = c10d_logger._get_msg_dict

    def get_msg_dict(func_name: str, *args: Any, **options: Any) -> dict[str, Any]:
        return original(func_name, *args, **options) if current_context() is None else {"func_name": func_name}

    return exchange([(c10d_logger, "_get_msg_dict", get_msg_dict)])


_ELSEWHERE = ("hccl", "xccl", "mccl", "cncl", "sccl")  # backends that come with a device's own package


def _check_backend(asked: str) -> None:
    """Refuse a name that no real launch would accept either."""
    known = [name for name in dict.fromkeys((*c10d.Backend.backend_list, *_ELSEWHERE)) if name != "mpi"]
    for part in asked.lower().split(","):
        if part.rpartition(":")[2] not in known:
            seen = f"known: {', '.join(name for name in known if name != 'undefined')}"
            hint = "backend='nccl', 'hccl' or 'gloo', or none: the simulator stands in for each"
            blame = f"backend {asked!r} {_why_not(asked)}"
            raise InvalidValue("cannot make a process group", blame, seen, hint)


def _why_not(asked: str) -> str:
    if "mpi" in asked.lower():
        return "takes its ranks from mpirun, and not from torchrun or sim"
    return "is one that nobody provides"


def _check_identity(context: Endpoint, rank: int, world_size: int) -> None:
    own, size = context.place
    if rank not in (-1, own) or world_size not in (-1, size):
        seen = f"seen: rank {_or_any(rank)} of {_or_any(world_size)}"
        hint = "leave out rank and world_size, or read RANK and WORLD_SIZE from the environment"
        raise InvalidValue("cannot init_process_group", f"this is rank {own} of {size}", seen, hint)


def _or_any(number: int) -> str:
    return "(any)" if number == -1 else str(number)


def _init_process_group(host: Host) -> Undo:
    """A function run by `sim.run` finds the default group made; its own first call is then accepted."""
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
        if context.network.rejoin is not None and anew:
            context.network.rejoin(context, rank, world_size)
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
            context.store.patience = None  # its timeout is the group's: what never comes is a Deadlock
            context.inits += 1
        finally:
            sys.excepthook = hook

    return _replace_function("init_process_group", init_process_group)


def _split_group(host: Host) -> Undo:
    """`split_group` makes groups; torch's asks for an accelerator, or (2.15) returns a group that does nothing."""
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
            blame = "split_ranks are lists of different ranks, none of them empty"
            raise InvalidValue("cannot split a group", blame, f"split_ranks: {split_ranks!r}", "[[0, 1], [2, 3]]")
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


def _new_group(host: Host) -> Undo:
    """A rank learns of every group of a mesh, and is in one of them per axis: of the others it only counts.

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
        key = (context.generation, context.inits, number - state.alone)
        if type(ranks) is not list or rest or options.get("use_local_synchronization"):
            group = original(ranks, *rest, **options)
            asked = signature.bind(ranks, *rest, **options).arguments
            if asked.get("use_local_synchronization"):  # made by some ranks alone: from torch 2.14 on these count it
                state.alone += state.group_count - number
            elif state.group_count > number:
                members = range(default.size()) if ranks is None else ranks
                host.network.groups_made.note(key, context.rank, members, asked.get("group_desc") or "")
            return group
        known = host.network.groups_made.known
        before = known.get(key)
        is_known = before is not None and default is not None and before == (default.size(), ranks, options)
        if is_known and default.rank() not in ranks:
            state.group_count = number + 1
            # As in torch: what an outsider can ask for is the last group's.
            state.pg_group_ranks[dist.GroupMember.NON_GROUP_MEMBER] = host.network.groups_made.places[key]
            return dist.GroupMember.NON_GROUP_MEMBER
        group = original(ranks, **options)
        host.network.groups_made.note(key, context.rank, ranks, options.get("group_desc") or "")
        if before is None and default is not None:
            known[key] = (default.size(), ranks.copy(), options)
            host.network.groups_made.places[key] = state.pg_group_ranks.get(group, {})
        return group

    get_rank = torch_device_mesh.get_rank

    def own_rank(group: Any = None) -> int:
        context = this_thread.context
        default = None if context is None or group is not None else context.c10d.default_pg
        return get_rank(group) if default is None else default.rank()

    restore = _replace_function("new_group", new_group)
    # The mesh's own, without a logger around each call.
    put_back = exchange([(torch_device_mesh, "new_group", new_group), (torch_device_mesh, "get_rank", own_rank)])

    def undo() -> None:
        put_back()
        restore()

    return undo


def _device_mesh(host: Host) -> Undo:
    """A mesh is the rank's own (torch keeps process-wide caches by mesh); groups learn the names of their axes."""
    mesh_class = torch_device_mesh.DeviceMesh
    original = mesh_class.__init__

    def init(self: Any, device_type: str, *args: Any, **options: Any) -> None:
        context = current_context()
        if context is not None and context.host.map_device is not None:  # torch may keep this function, not the host
            device_type = mapped(device_type, context.host.map_device)
        original(self, device_type, *args, **options)
        if context is None:
            return
        self._thread_id = (context.host.number, context.rank)
        names = self.mesh_dim_names
        if names:
            context.network.trace.know(names)
        default = context.c10d.default_pg
        groups = getattr(self, "_dim_group_names", None)  # a slice of a mesh has none of its own yet
        if names and groups and default is not None:
            for name, group in zip(names, groups, strict=False):
                if group == default.group_name:  # an axis over all ranks takes the default group
                    context.axis_names[group] = name
                    default.rename()

    return exchange([(mesh_class, "__init__", init)])


def _operators(host: Host) -> Undo:
    """Whatever calls an operator of `c10d` on a simulated group reaches the other ranks."""
    return replace_kernels()


def _reducer(host: Host) -> Undo:
    """The reducer of `DistributedDataParallel` calls an object of its own, as no frame tells whose C++ code does."""
    original, numbers = dist.Reducer, itertools.count(1)

    def reducer(params: Any, indices: Any, limits: Any, group: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(group, SimProcessGroup) and host.network.check_identity:
            names = options.get("param_to_name_mapping") or next((each for each in rest if isinstance(each, dict)), {})
            group = group.for_issuer(of_reducer(params, names, next(numbers)))
            _add_placeholder(group)
        return original(params, indices, limits, group, *rest, **options)

    return exchange([(dist, "Reducer", reducer)])


def _messages(host: Host) -> Undo:
    """A message of a batch notes what it is for where it is made, as in the stage of a pipeline: its sender is not."""
    if not host.network.check_identity:
        return exchange([])
    original = dist.P2POp.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if current_context() is not None:
            self.purpose = purpose_of_caller()

    return exchange([(dist.P2POp, "__init__", init)])


PROCESS_GROUP_PATCHES = (
    _c10d_state,
    _group_names,
    _global_rank,
    _backend,
    _group_creation,
    _rendezvous,
    _stores,
    _error_log,
    _init_process_group,
    _split_group,
    _new_group,
    _device_mesh,
    _operators,
    _reducer,
    _messages,
)
"""What of torch.distributed is changed."""
