"""Faults in virtual time: kill, freeze, slow, corrupt, drop. What can go wrong is a value, made here.

>>> Kill(2, at=3)
sim.faults.Kill(2, at=3)

    hooks -> losses -> triggers -> plan
    swarm -> plan
"""

from sim.observers.faults.plan import At, AtTime, Corrupt, Drop, Fault, Freeze, Kill, Slow, SlowLink, at_time

__all__ = ["At", "AtTime", "Corrupt", "Drop", "Fault", "Freeze", "Kill", "Slow", "SlowLink", "at_time"]
