"""The key-value store of a world: what TCPStore is to real ranks, with waits that yield the turn."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hyper_parallel.core.common.errors import InvalidType, explain
from sim.kernel.scheduler import Scheduler
from sim.kernel.waiting import Waitable


class WaitedKey(Waitable):
    """A key that somebody waits for."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def describe(self) -> str:
        return f"key {self.name!r} of the store"


class _WaitedServer(Waitable):
    """A TCPStore that some rank is to make as its master."""

    __slots__ = ("master", "port")

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port
        self.master = -1

    def describe(self) -> str:
        return f"TCPStore of port {self.port} for its master"


class SharedStore:
    """The data of the store, one for all ranks of a world."""

    def __init__(self, scheduler: Scheduler, port: int = 0) -> None:
        self.scheduler = scheduler
        self.data: dict[str, bytes] = {}
        self.awaited: dict[str, WaitedKey] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.server = _WaitedServer(port)
        self.workers = 0

    def put(self, key: str, value: bytes) -> None:
        """Set a key and let those that wait for it run on."""
        self.scheduler.check_alive()
        self.data[key] = value
        self._is_there(key)

    def push(self, key: str, value: bytes) -> None:
        """Append to a queue and let those that wait for it run on."""
        self.scheduler.check_alive()
        self.queues.setdefault(key, deque()).append(value)
        self._is_there(key)

    def _is_there(self, key: str) -> None:
        waitable = self.awaited.pop(key, None)
        if waitable is not None:
            self.scheduler.complete(waitable)

    def until_set(self, key: str, seconds: float | None = None) -> None:
        """Let other ranks run until the key exists, no longer than so many virtual seconds."""
        self._until(lambda: key in self.data, key, seconds)

    def until_pushed(self, key: str, seconds: float | None = None) -> None:
        """Let other ranks run until something is in the queue, likewise."""
        self._until(lambda: bool(self.queues.get(key)), key, seconds)

    def _until(self, is_there: Callable[[], bool], key: str, seconds: float | None) -> None:
        until = None if seconds is None else self.scheduler.now + seconds
        while not is_there():
            waitable = self.awaited.get(key)
            if waitable is None:
                waitable = self.awaited[key] = WaitedKey(key)
            if until is None:
                self.scheduler.block(waitable)
            elif not self.scheduler.wait(waitable, until) and self.scheduler.now >= until:
                raise dist.DistStoreError(f"wait timeout after {1000 * (seconds or 0):.0f}ms, keys: /{key}")


def _encoded(value: object) -> bytes:
    if not isinstance(value, (str, bytes, bytearray)):  # bytes(3) would be three zeros
        blame = f"it is {value!r}, of type {type(value).__name__}"
        raise InvalidType("cannot put a value into the store", blame, "seen: neither str nor bytes", "str(value)")
    return value.encode() if isinstance(value, str) else bytes(value)


class RankStore(dist.Store):
    """One rank's handle of the shared store, in the shape that `torch.distributed` expects."""

    def __init__(self, shared: SharedStore, **properties: Any) -> None:
        super().__init__()
        self._shared = shared
        self.patience: float | None = None  # seconds until a wait gives up; None: what never comes is a Deadlock
        vars(self).update(properties)
        self._last_seen: tuple[str, int] | None = None

    def set(self, key: str, value: str | bytes) -> None:
        self._shared.put(key, _encoded(value))

    def get(self, key: str) -> bytes:
        self._shared.until_set(key, self.patience)
        return self._shared.data[key]

    def add(self, key: str, amount: int) -> int:
        value = int(self._shared.data.get(key, b"0")) + amount
        if amount == 0 and self._last_seen == (key, value):  # looks at a counter again and again: let others count
            self._shared.scheduler.poll()
            value = int(self._shared.data.get(key, b"0"))
        self._last_seen = (key, value) if amount == 0 else None
        self._shared.put(key, str(value).encode())
        return value

    def append(self, key: str, value: str | bytes) -> None:
        self._shared.put(key, self._shared.data.get(key, b"") + _encoded(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted, new = _encoded(expected), _encoded(desired)
        present = self._shared.data.get(key)
        if present is None and wanted:
            return wanted
        if present is None or present == wanted:
            self._shared.put(key, new)
        return self._shared.data[key]

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        seconds = self.patience if timeout is None else timeout.total_seconds()
        for key in keys:
            self._shared.until_set(key, seconds)

    def check(self, keys: list[str]) -> bool:
        if not all(key in self._shared.data for key in keys):
            self._shared.scheduler.poll()  # a loop that asks until a key is there lets others set it
        return all(key in self._shared.data for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._shared.data.pop(key, None) is not None

    deleteKey = delete_key  # noqa: N815 - the name the C++ side looks for

    def num_keys(self) -> int:
        return len(self._shared.data)

    getNumKeys = num_keys  # noqa: N815
    compareSet = compare_set  # noqa: N815

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def list_keys(self) -> list[str]:
        return list(self._shared.data)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._shared.push(key, _encoded(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        queues = self._shared.queues
        if block:
            self._shared.until_pushed(key, self.patience)
        elif not queues.get(key):
            self._shared.scheduler.poll()  # a loop that asks until something is there lets others push it
        if not queues.get(key):
            raise dist.QueueEmptyError(f"queue is empty: {key}")
        return queues[key].popleft()

    def queue_len(self, key: str) -> int:
        return len(self._shared.queues.get(key, ()))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> RankStore:
        return RankStore(self._shared)

    def set_timeout(self, timeout: timedelta) -> None:
        self.patience = timeout.total_seconds()
        super().set_timeout(timeout)


class Stores:
    """The data of the stores that ranks make themselves."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._known: dict[int | str, SharedStore] = {}

    def at(self, address: int | str, *, anew: bool = False) -> SharedStore:
        """Return the one of a port or a path, which its first rank makes."""
        if anew or address not in self._known:
            self._known[address] = SharedStore(self.scheduler, address if isinstance(address, int) else 0)
        return self._known[address]

    def free_port(self) -> int:
        """Return a port that no rank has named."""
        return next(port for port in itertools.count(20_000) if port not in self._known)

    def clear(self) -> None:
        """Forget those of a run that is over."""
        self._known.clear()


# What stands for the stores that a rank makes itself: those of torch would wait without giving up the turn ------------


def _tcp_store(
    stores: Stores,
    rank: int,
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta | None = None,
    wait_for_workers: bool = True,
    multi_tenant: bool = False,
    master_listen_fd: int | None = None,
    use_libuv: bool = True,
) -> RankStore:
    del master_listen_fd
    if port == 0 and is_master:
        port = stores.free_port()
    scheduler, shared = stores.scheduler, stores.at(port)
    seconds = None if timeout is None else timeout.total_seconds()
    if is_master and shared.server.ready and not multi_tenant:
        if shared.server.master != rank:
            blame = f"rank {shared.server.master} is the master of port {port} already (EADDRINUSE)"
            seen = f"asked: TCPStore({host_name!r}, {port}, is_master=True) on rank {rank}"
            raise dist.DistNetworkError(explain("cannot listen", blame, seen, "is_master=(rank == 0), or another port"))
        shared = stores.at(port, anew=True)  # it has let go of the first one
    if is_master:
        shared.server.master = rank
        scheduler.complete(shared.server)
    elif not scheduler.wait(shared.server, None if seconds is None else scheduler.now + seconds):
        took = f"{1000 * (seconds or 0):.0f}ms"
        raise dist.DistNetworkError(
            f"The client socket has timed out after {took} while trying to connect to port {port}"
        )
    if world_size is not None and world_size > 0 and wait_for_workers:
        shared.workers += 1
        if shared.workers >= world_size:
            shared.put("init/", str(shared.workers).encode())
        elif is_master:
            shared.until_set("init/", seconds)
    store = RankStore(shared, host=host_name, port=port, libuvBackend=use_libuv)
    if timeout is not None:
        store.set_timeout(timeout)
    return store


def _file_store(stores: Stores, rank: int, file_name: str, world_size: int = -1) -> RankStore:
    del rank, world_size
    return RankStore(stores.at(os.path.abspath(file_name)), path=file_name)


def _hash_store(stores: Stores, rank: int) -> RankStore:
    del rank
    return RankStore(SharedStore(stores.scheduler))


MAKERS: dict[type, Callable[..., RankStore]] = {
    dist.TCPStore: _tcp_store,
    dist.FileStore: _file_store,
    dist.HashStore: _hash_store,
}
"""What makes a store for a rank, called with the world's `Stores` and the rank first."""
