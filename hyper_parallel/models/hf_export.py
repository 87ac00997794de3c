"""Weights to a folder that transformers loads: one tensor after the other is gathered, and rank 0 writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.core.common.checks import check, check_tensors
from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.redistribute import full_tensor
from hyper_parallel.models.hf_names import Place, config_to_json, empty_tensors, model_tensors, place_of
from hyper_parallel.models.hf_state import check_known, plain_names, some_of
from hyper_parallel.models.llama import LlamaConfig

__all__ = ["INDEX", "SINGLE", "export_huggingface"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""The files of a folder: which file has which tensor; or the only one."""


def export_huggingface(
    state: Mapping[str, Tensor],
    config: LlamaConfig,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write weights as a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

        export_huggingface(get_model_state_dict(model), config, "out/hf")

    A `LlamaConfig` becomes a LlamaForCausalLM, a `MoEConfig` a Glm4MoeForCausalLM. Without a process group the caller
    writes; with one, all its ranks call this, and rank 0 writes. The last file to appear is config.json: what is cut
    short cannot be loaded by mistake.

    Communication: one tensor after the other is gathered (`full_tensor`). Beside its parts, a rank holds one whole
    tensor at a time, such as the first matrix of all experts of a layer, and rank 0 the tensors of one file. Stages of
    a pipeline hold some layers each: save a checkpoint, and export what one process loads from it.

    Args:
        state: all tensors of the model by name, plain or DTensors on meshes with rank 0; the same names on all ranks.
        config: the model's shape.
        folder: made if it is not there; refused if it has weights.
        dtype: to write weights in. Default: as they are.
        max_shard_bytes: the most that one file holds, unless a single tensor is larger.

    Raises:
        TypeError: an argument of another kind.
        ValueError: names or shapes that are not those of the config, a folder with weights, scores of a router that
            transformers has no model for, max_shard_bytes below one.
        OSError: rank 0 could not write; on every rank alike.
    """
    asked = "cannot export to Hugging Face"
    check_tensors(asked, state=state)
    check(asked, LlamaConfig, config=config)
    check(asked, "path", folder=folder)
    check(asked, "dtype | None", dtype=dtype)
    check(asked, "int", max_shard_bytes=max_shard_bytes)
    asked, folder = f"cannot export to {folder}", Path(folder)
    if max_shard_bytes < 1:
        blame, seen = "no tensor fits into such a file", f"max_shard_bytes: {max_shard_bytes}"
        raise ValueError(explain(asked, blame, seen, f"max_shard_bytes={5 * 2**30}"))
    expected = model_tensors(config)
    tensors = _as_expected(asked, plain_names(state), expected, config)
    kept = {name: dtype if dtype is not None and not _is_buffer(name) else x.dtype for name, x in tensors.items()}
    told = config_to_json(config, kept["layers.0.attention.wq.weight"])
    empty = empty_tensors(config)
    files = _files(expected, kept, max_shard_bytes)
    files[-1] += [_Piece(name, 0) for name in empty]
    writer = _Writer(folder, files) if _rank() == 0 else None
    _agree(asked, None if writer is None else writer.try_to(partial(_make_folder, asked, folder)))
    with torch.no_grad():
        for name, tensor in tensors.items():
            whole = full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            if writer is not None:
                writer.try_to(partial(writer.add, place_of(name, tuple(whole.shape)), whole, kept[name]))
            del whole
    if writer is not None:
        for name, shape in empty.items():
            writer.try_to(partial(writer.add, Place((name,), False), torch.empty(shape), kept["norm.weight"]))
    _agree(asked, None if writer is None else writer.try_to(partial(writer.finish, told)))


def _is_buffer(name: str) -> bool:
    return name.endswith("router.bias")  # counts in single precision there, too


def _as_expected(
    asked: str, tensors: dict[str, Tensor], expected: Mapping[str, Tensor], config: LlamaConfig
) -> dict[str, Tensor]:
    """Return the tensors in the model's order; refuse missing ones, others, and other shapes."""
    check_known(asked, tensors, expected, config)
    missing = [name for name in expected if name not in tensors]
    if missing:
        hint = "all tensors of the model; for stages of a pipeline, save a checkpoint, and export that"
        raise ValueError(explain(asked, "tensors of the model are missing", f"missing: {some_of(missing)}", hint))
    return {name: tensors[name] for name in expected}


class _Piece(NamedTuple):
    """A tensor of a file: its name there, and its size in bytes."""

    name: str
    size: int


def _files(tensors: Mapping[str, Tensor], kept: Mapping[str, torch.dtype], most: int) -> list[list[_Piece]]:
    """Return what goes into each file, in the order in which tensors are gathered."""
    files: list[list[_Piece]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        names = place_of(name, tuple(tensor.shape)).names
        size = tensor.numel() * kept[name].itemsize // len(names)
        for each in names:
            if files[-1] and filled + size > most:
                files.append([])
                filled = 0
            files[-1].append(_Piece(each, size))
            filled += size
    return files


class _Writer:
    """Rank 0's side: collects the tensors of a file, and writes it when it has all of them.

    After a failure it goes on taking part in what the ranks do together, and writes nothing more.

    Args:
        folder: to write to.
        files: the tensors of each file.
    """

    def __init__(self, folder: Path, files: list[list[_Piece]]) -> None:
        self.folder, self.files = folder, files
        self.waiting: dict[str, Tensor] = {}
        self.done = 0
        self.error: Exception | None = None

    def try_to(self, action: Callable[[], None]) -> Exception | None:
        """Do it, unless something has failed before; return what has."""
        try:
            if self.error is None:
                action()
        except Exception as error:
            self.error = error
            self.waiting.clear()
        return self.error

    def add(self, place: Place, whole: Tensor, dtype: torch.dtype) -> None:
        """Take a whole tensor, and write the files that are complete with it."""
        for index, name in enumerate(place.names):
            part = whole[index] if place.is_stacked else whole
            # A copy, also of what needs no conversion: a view would keep all experts.
            self.waiting[name] = part.detach().to("cpu", dtype, copy=True).contiguous()
            if len(self.waiting) == len(self.files[self.done]):
                self._write()

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self.waiting, self.folder / self._name(self.done), metadata={"format": "pt"})
        self.waiting.clear()
        self.done += 1

    def _name(self, index: int) -> str:
        count = len(self.files)
        return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"

    def finish(self, told: dict[str, Any]) -> None:
        """Write the index and the config."""
        assert self.done == len(self.files), "every tensor has been added"
        if len(self.files) > 1:
            where = {piece.name: self._name(index) for index, file in enumerate(self.files) for piece in file}
            total = sum(piece.size for file in self.files for piece in file)
            _write_json(self.folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        _write_json(self.folder / "config.json", told)


def _make_folder(asked: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    there = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    if there:
        blame = "it has weights already, and transformers could take those"
        raise ValueError(explain(asked, blame, f"seen: {some_of(there)}", "a new folder, or remove that one"))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _agree(asked: str, error: Exception | None) -> None:
    """Raise on every rank what rank 0 has failed with."""
    told: list[Any] = [None]
    if isinstance(error, ValueError):
        told = [(False, str(error))]
    elif error is not None:
        hint = "another folder, or room on that disk; what is there already cannot be loaded, and may be removed"
        told = [(True, explain(asked, "rank 0 could not write", f"seen: {error}", hint))]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        is_os, text = told[0]
        raise (OSError if is_os else ValueError)(text) from error
