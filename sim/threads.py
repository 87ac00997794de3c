"""The number of busy threads, by the path that docs/sim.md names."""

from sim.kernel.threads import busy_threads

__all__ = ["busy_threads"]
