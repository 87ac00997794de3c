"""Meshes: axes as values, torch's DeviceMesh read as one, and the degrees of parallelism that a mesh is cut into.

parallel_dims -> device_mesh; spmd_mesh, the union of two slices of one mesh, stands alone
"""
