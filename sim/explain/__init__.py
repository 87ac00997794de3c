"""The texts of what the simulator finds, and of what it refuses.

deadlock -> mismatch -> errors, lines -> issuers
"""
