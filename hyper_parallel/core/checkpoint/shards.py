"""The local shards of a checkpoint's tensors: their box in the global tensor, and their memory."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hyper_parallel.core.checkpoint.files import DTYPES, HEADER
from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.dtensor.convert import layout_of

BETWEEN = "|"  # between a tensor's name and what tells its boxes, or the ranks that have one each, apart


@dataclass(frozen=True)
class LocalShard:
    """This rank's box of a tensor.

    Attributes:
        shape: of the full tensor.
        dtype: of the tensor.
        offsets: where the box begins, per dim.
        local: what is in it; shares memory with the tensor.
        writes: whether this rank is to write it, if others have the same box.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    local: torch.Tensor
    writes: bool = True

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of the box, per dim."""
        return tuple(self.local.shape)

    @property
    def is_there(self) -> bool:
        """Whether the box has elements, or else the full tensor has none and this stands for it."""
        return self.local.numel() > 0 or tuple(self.local.shape) == self.shape


def key_of(name: str, rank: int) -> str:
    """Return the name under which a checkpoint keeps a tensor that every rank has for itself."""
    return f"{name}{BETWEEN}rank {rank}"


def key_in_file(key: str, whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Return the name in a data file: that of the tensor, and where the box begins if it is not all of it.

    >>> key_in_file("w", (4, 3), (2, 0), (2, 3))
    'w|2,0'
    """
    return key if tuple(sizes) == tuple(whole) else f"{key}{BETWEEN}{','.join(map(str, offsets))}"


def shards_of(
    asked: str, tensors: Mapping[str, Any], per_rank: Mapping[str, Any] | None, rank: int, global_rank: int
) -> dict[str, LocalShard]:
    """Return the shards that this rank has, by name; nothing is communicated or copied.

    Args:
        asked: the start of an error message, "cannot ...".
        tensors: plain tensors, equal on all ranks that name them, and DTensors.
        per_rank: plain tensors that each rank has for itself.
        rank: this rank's number, under which those are kept.
        global_rank: its number in the world, by which meshes know it.

    Raises:
        ValueError: a tensor that cannot be in a checkpoint; the message names it.
        TypeError: a value that is no tensor.
    """
    check(asked, "mapping", tensors=tensors)
    check(asked, "mapping | None", per_rank=per_rank)
    found = {}
    for name, tensor in tensors.items():
        _check(asked, name, tensor)
        shard = _shard(asked, name, tensor, global_rank)
        if shard is not None:
            found[name] = shard
    for name, tensor in (per_rank or {}).items():
        _check(asked, name, tensor)
        if isinstance(tensor, DTensor):
            blame = f"per_rank[{name!r}] is a DTensor, which ranks hold together"
            raise InvalidValue(asked, blame, f"it is {tuple(tensor.shape)}", "it among the tensors")
        found[key_of(name, rank)] = _whole(tensor)
    return found


def _check(asked: str, name: Any, tensor: Any) -> None:
    if not isinstance(name, str) or BETWEEN in name or name == HEADER or not _is_text(name):
        blame = f"{name!r} is no name for a tensor in it"
        hint = f"a string in UTF-8 without {BETWEEN!r}, and not {HEADER!r}, which files have for themselves"
        raise InvalidValue(asked, blame, f"it names a {type(tensor).__name__}", hint)
    hint = "numbers and strings in extra; optimizer_tensors(...) for the state of an optimizer"
    check(asked, "tensor", hint, **{repr(name): tensor})
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        kind = "is on the meta device and has no values" if tensor.is_meta else f"is {tensor.layout} or quantized"
        hint = "init_parameters(model, seed), or to_empty(...), first" if tensor.is_meta else "a dense tensor"
        raise InvalidValue(asked, f"{name!r} {kind}", f"shape: {tuple(tensor.shape)}", hint)
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not isinstance(local, AsyncCollectiveTensor) and is_traceable_wrapper_subclass(local):
        blame = f"{name!r} is a tensor subclass that holds its values in other tensors, and files have plain ones"
        inner = ", ".join(local.__tensor_flatten__()[0])
        hint = f"these, under names of their own: {inner}"
        raise InvalidValue(asked, blame, f"seen: a {type(local).__name__}", hint)
    if tensor.dtype not in DTYPES:
        blame = f"{name!r} is of dtype {tensor.dtype}, which safetensors files do not have"
        close = nearest(tensor.dtype, [str(dtype) for dtype in DTYPES])
        raise InvalidValue(asked, blame, f"shape: {tuple(tensor.shape)}", close)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which other readers of the files refuse
        return False
    return True


def _shard(asked: str, name: str, tensor: torch.Tensor, rank: int) -> LocalShard | None:
    if not isinstance(tensor, DTensor):
        return _whole(tensor)
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:
        return None  # others have it
    try:
        layout = layout_of(tensor)
    except ValueError as error:
        raise InvalidValue(f"{asked}, because of {name!r}: {error}") from None
    shape = tuple(tensor.shape)
    if layout.is_partial():
        hint = f"redistribute(x, {layout.reset_partial()})"
        blame = f"{name!r} still has a reduction to be taken, and no rank has its values"
        raise InvalidValue(asked, blame, f"layout: {layout}", hint)
    with torch.no_grad():
        local = tensor.to_local().detach()
    box = layout.local_slice(shape, rank)
    if tuple(local.shape) != tuple(side.stop - side.start for side in box):
        blame = f"this rank's shard of {name!r} is not the one that its layout says"
        seen = f"layout: {layout}\n  shard: {tuple(local.shape)}, of {shape}: should be {box}"
        raise InvalidValue(asked, blame, seen, "a DTensor that from_local(..., shape=...) has checked")
    if not tensor.numel():
        return LocalShard(shape, tensor.dtype, (0,) * len(shape), local.new_empty(shape))
    split = {axis for axes in layout.splits(len(shape)) for axis in axes}
    pick = zlib.crc32(name.encode())  # so that replicas write about as much each
    writes = all(
        axis in split or at == pick % size
        for axis, (at, size) in enumerate(zip(coordinates, layout.mesh_shape, strict=True))
    )
    return LocalShard(shape, tensor.dtype, tuple(side.start for side in box), local, writes)


def _whole(tensor: torch.Tensor) -> LocalShard:
    return LocalShard(tuple(tensor.shape), tensor.dtype, (0,) * tensor.dim(), tensor.detach())
