"""The one place for devices: streams, events, memory statistics and backend names of cpu, cuda and npu.

registry -> accelerator, cpu -> base -> attention, reductions
"""

from hyper_parallel.platform.attention import AttentionKernel, attention_operators
from hyper_parallel.platform.base import Event, MemoryStats, Platform, PlatformUnavailableError, Stream
from hyper_parallel.platform.reductions import Reductions, reductions_of
from hyper_parallel.platform.registry import get_platform, register_platform, register_provider, unregister_provider

__all__ = [
    # Ask
    "get_platform",
    "attention_operators",
    "reductions_of",
    # What comes back
    "AttentionKernel",
    "Event",
    "MemoryStats",
    "Platform",
    "PlatformUnavailableError",
    "Reductions",
    "Stream",
    # Plug in
    "register_platform",
    "register_provider",
    "unregister_provider",
]
