"""Observers of a program while its ranks run: races, replicas that differ, determinism, and faults, which interfere.

replicas, partials -> spread
races, captured, determinism
faults
"""
