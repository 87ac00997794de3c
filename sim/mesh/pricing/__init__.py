"""Prices of kernels, and measurements of a device: `core/machine` has the figures, and the prices of collectives.

measure -> measure_steps -> profiled
measure -> measure_fit -> compute_cost
"""
