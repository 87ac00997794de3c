"""Simulated process groups over the kernel: matching of calls, data movement, prices, and the trace.

process_group -> dispatcher
process_group, observer -> group -> store, pricing, trace -> collectives -> identity
"""
