"""Checks of a program while its ranks run: races, replicas that differ, determinism.

replicas -> copies, spread
partials -> linear, spread
races, captured, determinism
"""
