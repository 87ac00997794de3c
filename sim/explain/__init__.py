"""The texts of what the simulator finds, and of what it refuses.

failure -> errors, lines
deadlock -> mismatch -> errors, lines -> issuers
"""
