"""Modes under which the models of a proof compute, the same on one device and on the ranks."""
