"""The key-value store of a world: what TCPStore is to real ranks, with waits that yield the turn."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from sim.kernel.scheduler import Scheduler
from sim.kernel.waiting import Waitable

__all__ = ["RankStore", "SharedStore", "WaitedKey"]


class WaitedKey(Waitable):
    """A key that somebody waits for."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def describe(self) -> str:
        return f"key {self.name!r} of the store"


class SharedStore:
    """The data of the store, one for all ranks of a world."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.data: dict[str, bytes] = {}
        self.awaited: dict[str, WaitedKey] = {}

    def put(self, key: str, value: bytes) -> None:
        """Set a key and let those that wait for it run on."""
        self.scheduler.check_alive()
        self.data[key] = value
        waitable = self.awaited.pop(key, None)
        if waitable is not None:
            self.scheduler.complete(waitable)

    def until_set(self, key: str) -> None:
        """Let other ranks run until the key exists."""
        while key not in self.data:
            waitable = self.awaited.get(key)
            if waitable is None:
                waitable = self.awaited[key] = WaitedKey(key)
            self.scheduler.block(waitable)


class RankStore(dist.Store):
    """One rank's handle of the shared store, in the shape that `torch.distributed` expects."""

    def __init__(self, shared: SharedStore) -> None:
        super().__init__()
        self._shared = shared
        self._last_seen: tuple[str, int] | None = None

    def set(self, key: str, value: str | bytes) -> None:
        self._shared.put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self._shared.until_set(key)
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
        addition = value.encode() if isinstance(value, str) else bytes(value)
        self._shared.put(key, self._shared.data.get(key, b"") + addition)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        new = desired.encode() if isinstance(desired, str) else bytes(desired)
        present = self._shared.data.get(key)
        if present is None and wanted:
            return wanted
        if present is None or present == wanted:
            self._shared.put(key, new)
        return self._shared.data[key]

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        del timeout  # time is virtual
        for key in keys:
            self._shared.until_set(key)

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

    def set_timeout(self, timeout: Any) -> None:
        """Accepted and without effect: time is virtual."""
