"""Process groups over any set of ranks, kept for as long as the default group lives, and numbers gathered over them."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from hyper_parallel.core.common.errors import InvalidState
from hyper_parallel.core.common.torch_compat import clear_sharding_caches

# torch 2.13 renamed these two; the old names warn there, the new ones do not exist before.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SAY_S = 5.0  # longer waits are told

# Guards the table below, and is held for no longer than a look into it; it is no state of a rank, but a lock.
_LOCK = threading.Lock()

# Groups by ranks, of each default process group: every rank has a default group of its own, so this holds
# no state of a rank that another one could see. A process group takes no attributes, hence a table beside it; all
# access is under the lock.
_GROUPS = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]()


class _LastSeen(threading.local):
    """The default group that this thread saw last: torch's caches below are by thread, too, so no rank's state."""

    world: ref[dist.ProcessGroup] | None = None


_LAST_SEEN = _LastSeen()

# What every backend gathers and scatters as it is, and what others of one size travel as.
_SENT = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_SAME_SIZE = MappingProxyType({1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64})


def on_wire(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory in a dtype that every backend gathers; torch sends complex numbers as pairs."""
    return x if x.dtype in _SENT or x.is_complex() else x.view(_SAME_SIZE[x.element_size()])


def all_gather_single(gathered: torch.Tensor, own: torch.Tensor, **options: Any) -> Any:
    """Gather tensors of one size into one, as torch's function of this name, of any dtype.

    Args:
        gathered: what all have, one after another.
        own: what this rank has.
        options: torch's.
    """
    return _all_gather_single(on_wire(gathered), on_wire(own), **options)


def group_of(ranks: tuple[int, ...], axes: Sequence[str], mesh: DeviceMesh | None = None) -> dist.ProcessGroup:
    """Return the process group of some ranks, which must all ask for it the first time, in the same order.

    The group of a mesh's axis is used where there is one, and the default group for all ranks; otherwise a new one is
    made, without the ranks outside.

    Args:
        ranks: global ranks, sorted, the calling one among them.
        axes: the axes they lie along, for a new group's name.
        mesh: a mesh that may have the group.
    """
    world = dist.group.WORLD
    assert world is not None, "the callers check that torch.distributed is initialized"
    with _LOCK:
        known = _GROUPS.setdefault(world, {})
        found = known.get(ranks)
    if found is None:
        found = _existing(ranks, axes, mesh) or _new(ranks, axes)
        assert isinstance(found, dist.ProcessGroup), "the calling rank is one of the group's"
        if found is not world:  # a table that holds its own key is never freed
            with _LOCK:
                known[ranks] = found
    return found


def _existing(ranks: tuple[int, ...], axes: Sequence[str], mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if mesh is not None and len(axes) == 1 and mesh.mesh_dim_names and axes[0] in mesh.mesh_dim_names:
        group = mesh.get_group(axes[0])
        if tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    world = dist.group.WORLD
    return world if world is not None and len(ranks) == dist.get_world_size() else None


def _new(ranks: tuple[int, ...], axes: Sequence[str]) -> dist.ProcessGroup | None:
    """Make a group without the ranks outside of it."""
    if dist.get_backend() != "fake":  # there nobody else exists to agree with
        _agree_on_count(ranks)
    return dist.new_group(list(ranks), use_local_synchronization=True, group_desc="mesh_" + "+".join(axes))


def _agree_on_count(ranks: tuple[int, ...]) -> None:
    """Bring all members to the same number of groups.

    torch names a group that only its members make after its ranks and the number of groups that the process has. Ranks
    that have made different numbers before, as those of two meshes have, would wait for each other under different
    names, for ever. So the members compare, through the store, and those that have fewer make up for it with groups of
    their own.
    """
    store, mine = c10d._get_default_store(), len(c10d._world.pg_names)
    key = "hyper_parallel/" + "_".join(map(str, ranks))
    turn = (store.add(f"{key}/arrived", 1) - 1) // len(ranks)  # a store may outlive the groups made with it
    rank = dist.get_rank()
    store.set(f"{key}/{turn}/{rank}", str(mine))
    if rank == ranks[0]:
        counts = [int(store.get(f"{key}/{turn}/{member}")) for member in ranks]
        store.set(f"{key}/{turn}/most", str(max(counts)))
    for _ in range(int(store.get(f"{key}/{turn}/most")) - mine):
        dist.new_group([rank], use_local_synchronization=True, group_desc="hyper_parallel filler")


def forget_past_groups() -> None:
    """Empty torch's caches of DTensors if the default group is not the one that this thread saw last.

    They hold how an operator's results are sharded, by meshes that are equal. A mesh of a new default group equals one
    of a past group. Its results would get the past mesh, whose process groups are destroyed.
    """
    world = dist.group.WORLD
    if world is not None and (_LAST_SEEN.world is None or _LAST_SEEN.world() is not world):
        _LAST_SEEN.world = ref(world)
        clear_sharding_caches()


def gather_numbers(mine: Sequence[int], group: dist.ProcessGroup, device: torch.device | str) -> list[list[int]]:
    """Return the numbers of every rank of a group, in group order.

    Where tensors have no values, as in the mesh simulator, every rank is taken to have what this one has.

    Args:
        mine: this rank's; as many as all others have.
        group: the ranks.
        device: what the group communicates with.

    Communication: one all_gather of these numbers; backward none.
    """
    own = torch.tensor(list(mine), dtype=torch.int64).to(device)
    gathered = torch.empty(group.size() * len(mine), dtype=torch.int64, device=device)
    all_gather_single(gathered, own, group=group)
    if isinstance(gathered, FakeTensor):
        return [list(mine)] * group.size()
    rows: list[list[int]] = gathered.view(group.size(), -1).tolist()
    return rows


# -- the default group, also in a later attempt of the same torchrun ---------------------------------------------------


def init_process_group(backend: str | None = None) -> None:
    """Make torch.distributed's process group from torchrun's environment, also in a later attempt of the same torchrun.

    `torchrun --max-restarts` keeps its store when it starts the ranks anew, and torch would find the addresses of ranks
    that are dead there.

    Args:
        backend: gloo, nccl or hccl; None is torch's default.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)  # rank 0 makes the store
    else:
        store, rank, world_size = next(rendezvous("env://"))
        own = attempt_store(dist.PrefixStore("hyper_parallel", store), rank, world_size)
        dist.init_process_group(backend, store=own, rank=rank, world_size=world_size)
    forget_past_groups()


def attempt_store(store: Any, rank: int, world_size: int) -> dist.Store:
    """Return the part of a store that only those ranks know which call this now; all of them must.

    Rank 0 draws its name. It tells whoever has said hello until all have answered: some greetings may be those of dead
    ranks. TORCHELASTIC_RESTART_COUNT is no such name: on a host that starts its ranks anew since another host has come
    or gone, torchrun does not count it.

    Args:
        store: a `torch.distributed.Store` that outlives the ranks.
        rank: of the caller.
        world_size: number of ranks.

    Raises:
        RuntimeError: not all ranks have come in the time that the store allows.
    """
    if rank != 0:
        hello = uuid.uuid4().hex
        store.set(f"hello/{rank}", hello)
        name = store.get(f"welcome/{hello}").decode()
        store.set(f"{name}/here/{rank}", "")
        return dist.PrefixStore(name, store)
    name, missing = uuid.uuid4().hex, list(range(1, world_size))
    begin, told = time.monotonic(), False
    end = begin + store.timeout.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"hello/{other}"]):
                store.set(f"welcome/{store.get(f'hello/{other}').decode()}", name)
        missing = [other for other in missing if not store.check([f"{name}/here/{other}"])]
        if missing and not told and time.monotonic() > begin + _SAY_S:
            told = True
            logging.getLogger(__name__).warning("waiting for ranks %s of %d", missing[:16], world_size)
        if missing and time.monotonic() > end:
            blame = f"not all have come in {store.timeout.total_seconds():.0f} s"
            seen = f"missing: {', '.join(map(str, missing[:16]))}"
            raise InvalidState(f"cannot start {world_size} ranks", blame, seen, "a look at what they have printed")
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def token_of_torchrun(name: str = "token", token: str = "") -> str:
    """Return a text that the store of this torchrun hands to this attempt and to later ones, and to no other torchrun.

    The name that `torchrun --rdzv-id` gives is no such text, because other torchruns may have the same.

    Args:
        name: of the text.
        token: the text, if no attempt has given one before; "" for a random one.

    Returns:
        The text of the first attempt, or "" where no store outlives the ranks.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not dist.is_initialized():
        return ""
    store = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return ""
    return store.compare_set(f"hyper_parallel/{name}", "", token or uuid.uuid4().hex).decode()
