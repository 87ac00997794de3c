"""The degrees of parallelism, under the path that training scripts import."""

from hyper_parallel.core.mesh.parallel_dims import ParallelDims

__all__ = ["ParallelDims"]
