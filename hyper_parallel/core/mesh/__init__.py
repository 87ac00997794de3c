"""Meshes: axes as values, torch's DeviceMesh read as one, and degrees of parallelism.

parallel_dims -> device_mesh; spmd_mesh, the union of two slices of one mesh, stands alone
"""
