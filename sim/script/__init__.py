"""Unmodified scripts for torchrun on simulated ranks: ``python -m sim run``."""
