"""Faults in virtual time, by the path under which programs name them."""

from sim.observers.faults import At, AtTime, Corrupt, Drop, Fault, Freeze, Kill, Slow, SlowLink, at_time

__all__ = ["At", "AtTime", "Corrupt", "Drop", "Fault", "Freeze", "Kill", "Slow", "SlowLink", "at_time"]
