"""Unmodified scripts for torchrun on simulated ranks: `python -m sim run`.

launch -> options -> modules -> packages
launch -> output
launch -> failure
"""
