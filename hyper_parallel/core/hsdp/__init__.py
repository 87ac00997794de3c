"""`hsdp`: the second API of the sharded-parameter engine."""

from hyper_parallel.core.hsdp.api import HSDPCell, hsdp, hsdp_sync_stream

__all__ = ["HSDPCell", "hsdp", "hsdp_sync_stream"]
