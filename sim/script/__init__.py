"""Unmodified scripts for torchrun: on simulated ranks (`python -m sim run`), or estimated (`python -m sim estimate`).

launch -> options -> modules -> packages
launch -> output
launch -> failure
estimate -> launch
estimate -> recording -> values
            recording -> reducer
            recording -> changes
"""
