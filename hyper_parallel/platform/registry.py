"""The registry of platforms, and the choice of one for the calling rank."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.platform.accelerator import CudaPlatform, NpuPlatform, torch_npu_is_installed
from hyper_parallel.platform.cpu import CpuPlatform
from hyper_parallel.platform.platform import Platform, PlatformUnavailableError

PlatformFactory = Callable[[], Platform]
PlatformProvider = Callable[[str | None], Platform | None]


class PlatformRegistry:
    """The known device types, and the providers that are asked before them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._factories: dict[str, PlatformFactory] = {"cpu": CpuPlatform, "cuda": CudaPlatform, "npu": NpuPlatform}
        self._providers: tuple[PlatformProvider, ...] = ()  # most recently registered first
        self._npu_failed = False

    def get(self, device_type: str | None = None) -> Platform:
        """Do what `get_platform` says."""
        # Providers are called without the lock: they may ask for another platform themselves.
        for provider in self._providers:
            answer = provider(device_type)
            if answer is not None:
                return answer
        if device_type is None:
            return self._default()
        with self._lock:
            factory = self._factories.get(device_type)
        if factory is None:
            known = ", ".join(map(repr, self.device_types()))
            asked, hint = f"cannot get a platform for {device_type!r}", "register_platform for a new device type"
            if ":" in device_type:
                hint = f"{device_type.partition(':')[0]!r}, without an index"
            raise InvalidValue(asked, "no such device type is registered", f"known: {known}", hint)
        return factory()

    def device_types(self) -> list[str]:
        """Do what the function `device_types` says."""
        with self._lock:
            return sorted(self._factories)

    def register(self, device_type: str, factory: PlatformFactory) -> None:
        """Do what `register_platform` says."""
        check("cannot register a platform", "str", device_type=device_type)
        check("cannot register a platform", "callable", factory=factory)
        with self._lock:
            if device_type in self._factories:
                asked, seen = f"cannot register platform {device_type!r}", f"registered: {', '.join(self._factories)}"
                hint = "another name, or register_provider to answer for some ranks only"
                raise InvalidValue(asked, "that device type is registered already", seen, hint)
            self._factories[device_type] = factory

    def register_provider(self, provider: PlatformProvider) -> None:
        """Do what the function `register_provider` says."""
        check("cannot register a provider of platforms", "callable", provider=provider)
        with self._lock:
            self._providers = (provider, *self._providers)

    def unregister_provider(self, provider: PlatformProvider) -> None:
        """Do what the function `unregister_provider` says."""
        with self._lock:
            if not any(provider == known for known in self._providers):
                asked, seen = f"cannot unregister {provider!r}", f"registered now: {len(self._providers)}"
                hint = "the very object that was passed to register_provider, once"
                raise InvalidValue(asked, "it is not a registered platform provider", seen, hint)
            found = self._providers.index(provider)
            self._providers = self._providers[:found] + self._providers[found + 1 :]

    def _default(self) -> Platform:
        npu = self._npu_or_none()
        if npu is not None:
            return npu
        try:
            return CudaPlatform()
        except PlatformUnavailableError:
            return CpuPlatform()

    def _npu_or_none(self) -> Platform | None:
        if self._npu_failed or not torch_npu_is_installed():
            return None
        try:
            return NpuPlatform()
        except PlatformUnavailableError as error:
            with self._lock:
                first, self._npu_failed = not self._npu_failed, True
            if first:  # once per process, and a failed import, which takes seconds, is not tried again
                warnings.warn(f"{error}; going on without NPUs", RuntimeWarning, stacklevel=4)
            return None


# The one registry of the process. It is configuration of the process, like torch's own table of device modules, and no
# state of a rank: what differs between ranks is decided by providers at each call. The lock inside guards every change.
_REGISTRY = PlatformRegistry()


def get_platform(device_type: str | None = None) -> Platform:
    """Return the platform for `device_type`, by default the calling rank's.

    >>> get_platform("cpu").backend
    'gloo'

    Args:
        device_type: "cpu", "cuda", "npu" or a registered name. None: what a provider answers for the calling rank, else
            "npu" if one is usable, else "cuda" if one is, else "cpu".

    Raises:
        ValueError: no such device type is known.
        PlatformUnavailableError: the device type is known, but cannot be used here; the message says what is missing.
    """
    return _REGISTRY.get(device_type)


def device_types() -> list[str]:
    """Return the device types that `get_platform` knows, whether they can be used here or not.

    >>> device_types()[:2]
    ['cpu', 'cuda']
    """
    return _REGISTRY.device_types()


def register_platform(device_type: str, factory: PlatformFactory) -> None:
    """Make `get_platform(device_type)` return what `factory()` returns, for the whole process.

    Args:
        device_type: torch's name for the device, without an index.
        factory: called at every `get_platform(device_type)`; it may raise `PlatformUnavailableError`.

    Raises:
        ValueError: that device type is registered already.
    """
    _REGISTRY.register(device_type, factory)


def register_provider(provider: PlatformProvider) -> None:
    """Ask `provider` first in every `get_platform` of the process, before providers that were registered earlier.

    A simulated device plugs in this way. `provider(device_type)` runs on the calling rank's thread and returns that
    rank's platform, or None if the thread is not one of its ranks.
    """
    _REGISTRY.register_provider(provider)


def unregister_provider(provider: PlatformProvider) -> None:
    """Stop asking `provider`.

    Raises:
        ValueError: `provider` is not registered.
    """
    _REGISTRY.unregister_provider(provider)
