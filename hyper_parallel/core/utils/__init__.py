"""Paths that users of the existing library know, and nothing else."""
