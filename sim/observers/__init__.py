"""Observers of a program while its ranks run: races, replicas that differ, determinism, and faults, which interfere.

replicas -> copies, spread
partials -> linear, spread
races, captured, determinism
faults
"""
