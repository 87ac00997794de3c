"""Prices of kernels and communication: figures of devices and links, fitted, published or assumed.

measure -> measure_steps -> profiled
measure -> measure_fit -> comm_cost, compute_cost
calibration, measure_fit -> hardware_file
"""
