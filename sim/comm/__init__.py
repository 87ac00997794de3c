"""Simulated process groups over the kernel: matching of calls, data movement, prices, and the trace.

process_group -> group -> collectives, trace
"""
