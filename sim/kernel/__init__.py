"""Ranks as threads of which one runs at a time, with virtual clocks; nothing here knows torch.distributed.

clock -> context -> scheduler -> threads, watchdog -> waiting
"""
