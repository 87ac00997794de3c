"""Weights to and from folders that transformers loads: config.json and safetensors files. Nothing is unpickled.

Transformers is not imported, and no rank need hold the whole model: one tensor after the other is gathered and rank 0
writes; each rank reads the slices that it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.core.common.errors import InvalidType, InvalidValue, explain, nearest
from hyper_parallel.core.common.torch_compat import plain_name
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute import full_tensor
from hyper_parallel.models.hf_folder import INDEX, SINGLE, locate, read_settings, some_of
from hyper_parallel.models.hf_names import (
    CheckpointPlace,
    config_from_json,
    config_to_json,
    empty_tensors,
    is_left_out,
    is_passed_over,
    model_tensors,
    place_of,
)
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.moe import MoEConfig


def export_huggingface(
    state: Mapping[str, Tensor],
    config: LlamaConfig,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    tokenizer: Any = None,
) -> None:
    """Write weights as a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

        export_huggingface(get_model_state_dict(model), config, "out/hf")

    A `LlamaConfig` becomes a LlamaForCausalLM, with `qk_norm` a Qwen3ForCausalLM; a `MoEConfig` a Glm4MoeForCausalLM,
    with softmax scores a Qwen3MoeForCausalLM. Without a process group the caller writes; with one, all its ranks call
    this, and rank 0 writes. The last file to appear is config.json: what is cut
    short cannot be loaded by mistake.

    Communication: one tensor after the other is gathered (`full_tensor`). Beside its shards, a rank holds one full
    tensor at a time, such as the first matrix of all experts of a layer, and rank 0 the tensors of one file. Stages of
    a pipeline hold some layers each: save a checkpoint, and export what one process loads from it.

    Args:
        state: all tensors of the model by name, plain or DTensors on meshes with rank 0; the same names on all ranks.
        config: the model's shape.
        folder: made if it is not there; refused if it has weights.
        dtype: to write weights in. Default: as they are.
        max_shard_bytes: the most that one file holds, unless a single tensor is larger.
        tokenizer: of transformers; saved there, and its tokens for beginning, end and padding become the model's.

    Raises:
        TypeError: a tokenizer that is none.
        ValueError: names or shapes that are not those of the config, a folder with weights, a config that transformers
            has no model for, or a bias of its router, max_shard_bytes below one.
        OSError: rank 0 could not write; on every rank.
    """
    asked = "cannot export to Hugging Face"
    if tokenizer is not None and not (hasattr(tokenizer, "save_pretrained") and hasattr(tokenizer, "eos_token_id")):
        hint = "AutoTokenizer.from_pretrained(folder)"
        raise InvalidType(asked, "tokenizer is none of transformers", f"tokenizer: {tokenizer!r}"[:200], hint)
    asked, folder = f"cannot export to {folder}", Path(folder)
    if max_shard_bytes < 1:
        blame, seen = "no tensor fits into such a file", f"max_shard_bytes: {max_shard_bytes}"
        raise InvalidValue(asked, blame, seen, f"max_shard_bytes={5 * 2**30}")
    expected = {name: x for name, x in model_tensors(config).items() if not is_left_out(name, config)}
    tensors = _as_expected(asked, _plain_names(state), expected, config)
    kept = {name: dtype if dtype is not None and not _is_buffer(name) else x.dtype for name, x in tensors.items()}
    settings = config_to_json(config, kept["layers.0.attention.wq.weight"])
    if tokenizer is not None:
        settings |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    empty = empty_tensors(config)
    files = _files(expected, kept, max_shard_bytes)
    files[-1] += [_FileTensor(name, 0) for name in empty]
    writer = _Writer(folder, files) if _rank() == 0 else None
    _agree(asked, None if writer is None else writer.try_to(partial(_make_folder, asked, folder)))
    with torch.no_grad():
        for name, tensor in tensors.items():
            full = full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            if writer is not None:
                writer.try_to(partial(writer.add, place_of(name, tuple(full.shape)), full, kept[name]))
            del full
    if writer is not None and tokenizer is not None:
        writer.try_to(partial(tokenizer.save_pretrained, folder))
    if writer is not None:
        for name, shape in empty.items():
            writer.try_to(partial(writer.add, CheckpointPlace((name,), False), torch.empty(shape), kept["norm.weight"]))
    _agree(asked, None if writer is None else writer.try_to(partial(writer.finish, settings)))


def _is_buffer(name: str) -> bool:
    return name.endswith("router.bias")  # counts in single precision there, too


def _as_expected(
    asked: str, tensors: dict[str, Tensor], expected: Mapping[str, Tensor], config: LlamaConfig
) -> dict[str, Tensor]:
    """Return the tensors in the model's order; refuse missing ones, others, and other shapes."""
    for name in [name for name in tensors if is_left_out(name, config)]:
        if tensors.pop(name).any():
            blame = f"{name!r} changes what the router chooses, and transformers' model has no such bias"
            raise InvalidValue(asked, blame, "score: 'softmax'", "train with bias_update_rate=0")
    _check_known(asked, tensors, expected, config)
    missing = [name for name in expected if name not in tensors]
    if missing:
        hint = "all tensors of the model; for stages of a pipeline, save a checkpoint, and export that"
        raise InvalidValue(asked, "tensors of the model are missing", f"missing: {some_of(missing)}", hint)
    return {name: tensors[name] for name in expected}


class _FileTensor(NamedTuple):
    """A tensor of a file: its name there, and its size in bytes."""

    name: str
    size: int


def _files(tensors: Mapping[str, Tensor], kept: Mapping[str, torch.dtype], most: int) -> list[list[_FileTensor]]:
    """Return what goes into each file, in the order in which tensors are gathered."""
    files: list[list[_FileTensor]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        names = place_of(name, tuple(tensor.shape)).names
        size = tensor.numel() * kept[name].itemsize // len(names)
        for each in names:
            if files[-1] and filled + size > most:
                files.append([])
                filled = 0
            files[-1].append(_FileTensor(each, size))
            filled += size
    return files


class _Writer:
    """Rank 0's side: collects the tensors of a file, and writes it when it has all of them.

    After a failure it goes on taking part in what the ranks do together, and writes nothing more.

    Args:
        folder: to write to.
        files: the tensors of each file.
    """

    def __init__(self, folder: Path, files: list[list[_FileTensor]]) -> None:
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

    def add(self, place: CheckpointPlace, full: Tensor, dtype: torch.dtype) -> None:
        """Take a full tensor, and write the files that are complete with it."""
        for index, name in enumerate(place.names):
            part = full[index] if place.is_stacked else full
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

    def finish(self, settings: dict[str, Any]) -> None:
        """Write the index and the config."""
        assert self.done == len(self.files), "every tensor has been added"
        if len(self.files) > 1:
            where = {entry.name: self._name(index) for index, file in enumerate(self.files) for entry in file}
            total = sum(entry.size for file in self.files for entry in file)
            _write_json(self.folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        _write_json(self.folder / "config.json", settings)


def _make_folder(asked: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    there = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    if there:
        blame = "it has weights already, and transformers could take those"
        raise InvalidValue(asked, blame, f"seen: {some_of(there)}", "a new folder, or remove that one")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _agree(asked: str, error: Exception | None) -> None:
    """Raise on every rank what rank 0 has failed with."""
    message: list[Any] = [None]
    if isinstance(error, ValueError):
        message = [(False, str(error))]
    elif error is not None:
        hint = "another folder, or room on that disk; what is there already cannot be loaded, and may be removed"
        message = [(True, explain(asked, "rank 0 could not write", f"seen: {error}", hint))]
    if dist.is_initialized():
        dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        is_os, text = message[0]
        raise (OSError if is_os else ValueError)(text) from error


# -- from a folder -----------------------------------------------------------------------------------------------------

_DTYPES = ("F64", "F32", "F16", "BF16")


def import_huggingface(folder: str | Path) -> tuple[LlamaConfig, Callable[[Mapping[str, Tensor]], None]]:
    """Read the config of a folder; return it, and what fills a model's tensors from there.

        config, load = import_huggingface("tinyllama-1.1b")
        model = init_parameters(shard_module(...))
        load(get_model_state_dict(model))

    Args:
        folder: with a config.json whose model is a LlamaForCausalLM or Qwen3ForCausalLM without biases and with plain
            rotary positions, a Qwen3MoeForCausalLM whose layers all have experts, or a Glm4MoeForCausalLM with rotary
            positions in whole heads and one group of experts.

    Returns:
        The config of a `Llama` or `MoELlama` that computes the same, and `load_huggingface` of this folder.

    Raises:
        ValueError: no such folder or model; see also `load_huggingface`.
    """
    asked, folder = f"cannot import {folder}", Path(folder)
    config = config_from_json(read_settings(asked, folder), asked)
    _check_count(asked, locate(asked, folder), config)
    return config, partial(load_huggingface, folder=folder)


def other_model(folder: str | Path) -> str | None:
    """Return the model_type of a folder that none of our models computes the same as; None: one does.

    Args:
        folder: with a config.json.

    Raises:
        ValueError: there is no config.json that can be read.
    """
    asked, folder = f"cannot import {folder}", Path(folder)
    settings = read_settings(asked, folder)
    try:
        config_from_json(settings, asked)
    except ValueError:
        return settings.get("model_type")
    return None


def load_huggingface(state: Mapping[str, Tensor], folder: str | Path) -> None:
    """Fill tensors of a model in place from a Hugging Face folder; each rank reads the slices that it holds.

        load_huggingface(get_model_state_dict(model), "tinyllama-1.1b")

    Everything is checked before the first value changes. Nothing is communicated: all ranks read the folder, and one
    that cannot raises alone. Values are converted to the tensors' dtypes. A head is filled from the embedding where the
    folder has one tensor for both.

    Args:
        state: tensors by name, plain or DTensors on any mesh: all of a model, or those of a stage.
        folder: see `import_huggingface`.

    Raises:
        ValueError: weights in no safetensors file, a damaged one, tensors that the model, or the folder, does not have
            or has in another shape, a DTensor with a reduction pending.
    """
    from safetensors import SafetensorError

    asked, folder = f"cannot load {folder}", Path(folder)
    config = config_from_json(read_settings(asked, folder), asked)
    files = locate(asked, folder)
    _check_count(asked, files, config)
    expected = model_tensors(config)
    tensors = _plain_names(state)
    _check_known(asked, tensors, expected, config)
    _check_complete(asked, files, expected, config)
    with ExitStack() as stack, torch.no_grad():
        slices = _Slices(asked, files, stack)
        try:
            stored = {name: tensor for name, tensor in tensors.items() if not is_left_out(name, config)}
            jobs = [job for name, tensor in stored.items() for job in slices.jobs(name, tensor)]
            for memory, source, part in jobs:
                memory.copy_(source[part])
            for name in tensors.keys() - stored.keys():
                tensors[name].zero_()
        except (SafetensorError, OSError) as error:
            raise InvalidValue(asked, "a file is damaged", f"seen: {error}", "another copy of it") from None


def _source(name: str, tensor: Tensor, files: Mapping[str, Path]) -> CheckpointPlace:
    place = place_of(name, tuple(tensor.shape))
    is_tied = name == "head.weight" and place.names[0] not in files
    return place_of("embed.weight", tuple(tensor.shape)) if is_tied else place


def _own(asked: str, name: str, tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return the memory to fill, and which part of the full tensor belongs there."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    layout, local = Layout.of(tensor), tensor.to_local()
    own = layout.local_slice(tuple(tensor.shape))
    if layout.is_partial() or tuple(part.stop - part.start for part in own) != tuple(local.shape):
        blame = f"{name!r} is not laid out as parts of the full tensor"
        raise InvalidValue(asked, blame, f"layout: {layout}   part: {tuple(local.shape)}", "load, then shard")
    return local, own


class _Fill(NamedTuple):
    """Memory to fill, a tensor of a file, and the slice of it that belongs there."""

    memory: Tensor
    source: Any
    part: tuple[slice, ...]


class _Slices:
    """Opens files when they are needed, once, and hands out their tensors without reading them.

    Args:
        asked: the start of an error message.
        files: the file of each tensor.
        stack: closes them.
    """

    def __init__(self, asked: str, files: Mapping[str, Path], stack: ExitStack) -> None:
        self.asked, self.files, self.stack = asked, files, stack
        self.open: dict[Path, Any] = {}

    def jobs(self, name: str, tensor: Tensor) -> list[_Fill]:
        """Return what is to be read for one of our tensors; refuse another shape."""
        local, own = _own(self.asked, name, tensor)
        shape = tuple(tensor.shape)
        place = _source(name, tensor, self.files)
        if not place.is_stacked:
            stored = self._slice_of(place.names[0], shape)
            return [_Fill(local, stored, own)] if local.numel() else []
        each = [self._slice_of(theirs, shape[1:]) for theirs in place.names]
        mine = range(own[0].start, own[0].stop) if local.numel() else ()
        return [_Fill(local[index - own[0].start], each[index], own[1:]) for index in mine]

    def _slice_of(self, name: str, shape: tuple[int, ...]) -> Any:
        from safetensors import safe_open

        path = self.files[name]
        if path not in self.open:
            self.open[path] = self.stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        found = self.open[path].get_slice(name)
        if tuple(found.get_shape()) != shape:
            blame = f"{name!r} has another shape than config.json says"
            seen = f"{path.name}: {tuple(found.get_shape())}   config.json: {shape}"
            raise InvalidValue(self.asked, blame, seen, "a folder whose files belong together")
        if found.get_dtype() not in _DTYPES:
            blame = f"{name!r} holds {found.get_dtype()}, and weights here are plain floating-point numbers"
            seen = f"{path.name}: {found.get_dtype()}"
            hint = f"one of {', '.join(_DTYPES)}: a model that is not quantized"
            raise InvalidValue(self.asked, blame, seen, hint)
        return found


# -- what is in a folder ---------------------------------------------------------------------------------------------


def _check_count(asked: str, files: Mapping[str, Path], config: LlamaConfig) -> None:
    """Refuse numbers of layers and experts that the files cannot have, before a model of that size is described."""
    sparse = config.num_hidden_layers - config.num_dense_layers if isinstance(config, MoEConfig) else 0
    experts = config.num_experts if isinstance(config, MoEConfig) else 0
    least = config.num_hidden_layers + sparse * experts
    if least > len(files):
        blame = "tensors are missing: its layers and experts have more than there are"
        seen = f"tensors: {len(files)}   layers: {config.num_hidden_layers}   experts in a layer: {experts}"
        raise InvalidValue(asked, blame, seen, "a folder whose files belong together")


def _check_complete(asked: str, files: Mapping[str, Path], expected: Mapping[str, Tensor], config: LlamaConfig) -> None:
    """Refuse a folder that lacks tensors of its model, or has some that the model here would leave out."""
    stored = {name: tuple(x.shape) for name, x in expected.items() if not is_left_out(name, config)}
    wanted = {each: None for name, shape in stored.items() for each in place_of(name, shape).names}
    missing = [name for name in wanted if name not in files]
    if missing:
        hint = "a complete folder, with experts one by one as transformers saves them"
        raise InvalidValue(asked, "tensors are missing", f"missing: {some_of(missing)}", hint)
    others = [name for name in sorted(files) if name not in wanted and not is_passed_over(name, config)]
    if others:
        blame = "it has tensors that the model here does not, and without which it computes something else"
        raise InvalidValue(asked, blame, f"tensors: {some_of(others)}", "a model without them")


# -- the tensors that a caller gives, against those that a config's model has ------------------------------------------


def _plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the names that they have in a model without wrappers.

    Args:
        state: tensors by name.
    """
    return {plain_name(name): tensor for name, tensor in state.items()}


def _check_known(
    asked: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], config: LlamaConfig
) -> None:
    """Refuse tensors that the model does not have, or has in another shape, and those without memory.

    Args:
        asked: the start of an error message, "cannot ...".
        tensors: by plain names; some of the model's are enough.
        expected: those of the config's model, on meta.
        config: the model's shape.

    Raises:
        ValueError: the first that does not fit.
    """
    for name, tensor in tensors.items():
        twin = "embed.weight" if name == "head.weight" and config.tie_embeddings else name
        if twin not in expected:
            blame, hint = f"the config's model has no {name!r}", nearest(name, expected)
            raise InvalidValue(asked, blame, f"config: {config}", hint)
        if tensor.shape != expected[twin].shape:
            blame = f"{name!r} has another shape than in the config's model"
            seen = f"seen: {tuple(tensor.shape)}   config's: {tuple(expected[twin].shape)}   config: {config}"
            raise InvalidValue(asked, blame, seen, "the config that the model was built from")
        if tensor.is_meta:
            blame, hint = f"{name!r} is on meta, and has no memory", "init_parameters(model) before"
            raise InvalidValue(asked, blame, f"device: {tensor.device}", hint)
