"""The one place for devices: streams, events, memory statistics and backend names of cpu, cuda and npu.

registry -> accelerator, cpu -> platform -> attention
"""

from hyper_parallel.platform.attention import AttentionKernel, attention_operators
from hyper_parallel.platform.platform import (
    Event,
    MemoryStats,
    Platform,
    PlatformUnavailableError,
    Reductions,
    Stream,
    reductions_of,
)
from hyper_parallel.platform.registry import (
    device_types,
    get_platform,
    register_platform,
    register_provider,
    unregister_provider,
)

__all__ = [
    # Ask
    "get_platform",
    "attention_operators",
    "device_types",
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
