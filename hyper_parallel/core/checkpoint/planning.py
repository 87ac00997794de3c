"""Read and write plans for torch.distributed.checkpoint, made from the boxes of our own layouts.

torch computes the box of a DTensor for even splits in mesh order; for others it contradicts itself. All else is
torch's: that replicas are written once, completeness, and which saved box overlaps which wanted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hyper_parallel.core.checkpoint.record import TensorEntry
from hyper_parallel.core.checkpoint.shards import LocalShard
from hyper_parallel.core.common.errors import explain

__all__ = ["LoadPlanner", "SavePlanner", "metadata_of"]


class SavePlanner(DefaultSavePlanner):
    """Plans a save of `LocalShard`s."""

    def __init__(self, asked: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._asked = asked

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Take the shards, by name."""
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Offer to write what this rank has, unless it knows that another does."""
        shards: Mapping[str, LocalShard] = self.state_dict
        self.plan = SavePlan(
            [_write_item(name, shard) for name, shard in shards.items() if shard.writes and shard.is_there]
        )
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Let each box be written once, and check that they make up the tensors."""
        self._check_alike(all_plans)
        try:
            plans, metadata = super().create_global_plan(all_plans)
        except ValueError as error:
            blame = "the shards that the ranks have do not make up full tensors"
            hint = "save from all ranks of every mesh that the tensors lie on"
            raise ValueError(explain(self._asked, blame, str(error), hint)) from None
        return plans, metadata

    def _check_alike(self, all_plans: list[SavePlan]) -> None:
        first: dict[str, tuple[int, Any]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                data = item.tensor_data
                assert data is not None, "all items are tensors"
                kind = (tuple(data.size), data.properties.dtype)
                other, known = first.setdefault(item.index.fqn, (rank, kind))
                if known != kind:
                    blame = f"{item.index.fqn!r} is not the same tensor on all ranks"
                    seen = f"rank {other}: {known[0]} {known[1]}\n  rank {rank}: {kind[0]} {kind[1]}"
                    hint = "a DTensor, a name of its own for each, or per_rank"
                    raise ValueError(explain(self._asked, blame, seen, hint))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return what is to be written."""
        return self.state_dict[write_item.index.fqn].local


class LoadPlanner(DefaultLoadPlanner):
    """Plans a load into `LocalShard`s."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the shards to fill, by name, and what the checkpoint has."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Ask for the overlap of each shard with each saved box."""
        assert self.metadata is not None, "the driver reads it first"
        items: list[ReadItem] = []
        for name, shard in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), "all entries are tensors"
            if shard.local.numel() == 0:
                continue
            if shard.shape:
                wanted = [ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))]
                items += create_read_items_for_chunk_list(name, saved, wanted)
            else:
                none = torch.Size()
                index = MetadataIndex(name, none, 0)
                items.append(ReadItem(LoadItemType.TENSOR, index, none, index, none, none))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the shard that is to be filled."""
        return self.state_dict[index.fqn].local


def metadata_of(entries: Mapping[str, TensorEntry]) -> Metadata:
    """Return what torch's planners know of a checkpoint."""
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(dtype=entry.dtype),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in entry.boxes],
            )
            for key, entry in entries.items()
        }
    )


def _write_item(name: str, shard: LocalShard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=shard.dtype), torch.Size(shard.shape))
    return WriteItem(MetadataIndex(name, shard.offsets), WriteItemType.SHARD, tensor_data=data)
