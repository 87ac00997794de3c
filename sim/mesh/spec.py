"""The interface of a model to an estimate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.models.plans import MeshLike

if TYPE_CHECKING:
    from sim.mesh.recipe import Recipe

__all__ = ["ModelSpec"]


class ModelSpec(ABC):
    """A model by its sizes, and how to make it and split it."""

    name: str
    config: Any

    @property
    @abstractmethod
    def family(self) -> str:
        """`llama`, `moe`, `gpt` or `custom`."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """All of them, tied ones once."""

    @property
    @abstractmethod
    def num_active_parameters(self) -> int:
        """Those that a token uses."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Blocks of the whole model."""

    @property
    @abstractmethod
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each block: those of a kind do the same."""

    @property
    def vocab_size(self) -> int | None:
        """Different tokens; None: it has none."""
        return None

    @property
    def hidden_size(self) -> int | None:
        """Width of what goes from block to block; None: it is not known before a run."""
        return None

    @property
    def has_stages(self) -> bool:
        """Whether it can be built with some of its layers only, as stages of a pipeline are."""
        return True

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward per token, no recompute, attention in full."""

    @abstractmethod
    def build(
        self,
        seq_len: int,
        layers: Collection[int] | None = None,
        *,
        embed: bool = True,
        head: bool = True,
        recipe: Recipe | None = None,
    ) -> nn.Module:
        """Make the model, or a stage of it, with whatever device and modes the caller has set: call it under meta.

        Args:
            seq_len: tokens of a sequence, all ranks' together.
            layers: those to keep, under their numbers in the whole model; None: all.
            embed: keep what comes before the layers.
            head: keep what comes after them.
            recipe: says which kernels compute attention and norms.
        """

    @abstractmethod
    def plan(self, module: nn.Module, mesh: MeshLike, recipe: Recipe | None = None) -> ShardingPlan | None:
        """Return the layouts of a model that `build` has made, on a mesh with an axis tp; None: there are none."""

    def blocks(self, module: nn.Module) -> list[tuple[int, nn.Module]]:
        """Return the blocks of a model that `build` has made, with their numbers in the whole model."""
        return [(int(name), block) for name, block in module.get_submodule("layers").named_children()]

    def naming(self) -> AbstractContextManager[None]:
        """Say, within the block, which module asks for values that tensors without them cannot tell."""
        return nullcontext()

    def inputs(self, batch: int, seq_len: int) -> tuple[Any, ...]:
        """Make what the model is called with, on the device that the caller has set.

        Args:
            batch: sequences.
            seq_len: tokens of each that this rank has.
        """
        return (torch.zeros(batch, seq_len, dtype=torch.long),)

    @abstractmethod
    def loss(self, output: Any, inputs: tuple[Any, ...]) -> Tensor:
        """Return the loss of what the model has returned for these inputs."""
