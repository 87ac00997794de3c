"""The argument of a test body on ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyper_parallel.platform import Reductions, get_platform


@dataclass(frozen=True)
class RankTest:
    """What a test body learns about the rank it runs on; `torch.distributed` is initialised.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        backend: `sim`, `gloo`, `gpu` or `npu`.
        device: Where the body should put its tensors.
        seed: The seed of the interleaving (`--sim-seed`), for bodies that draw something.
    """

    rank: int
    world_size: int
    backend: str
    device: torch.device
    seed: int = 0

    @property
    def device_type(self) -> str:
        """`cpu`, `cuda` or `npu`, as `init_device_mesh` wants it."""
        return self.device.type

    @property
    def reductions(self) -> Reductions:
        """The dtypes and reduce ops that the rank's backend reduces."""
        return get_platform(self.device_type).reductions

    @property
    def float_dtype(self) -> torch.dtype:
        """The widest float dtype that the rank's backend reduces: float64, or float32 on hccl."""
        return self.reductions.widest_float
