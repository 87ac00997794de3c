"""Weights from a folder of Hugging Face: each rank reads the slices that it holds. Nothing is unpickled."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyper_parallel.core.common.checks import check, check_tensors
from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.models.hf_export import INDEX, SINGLE
from hyper_parallel.models.hf_names import Place, config_from_json, is_passed_over, model_tensors, place_of
from hyper_parallel.models.hf_state import check_known, plain_names, some_of
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.moe import MoEConfig

__all__ = ["import_huggingface", "load_huggingface"]

_DTYPES = ("F64", "F32", "F16", "BF16")
_MOST_JSON = 2**28  # bytes; the index of a million tensors has less


def import_huggingface(folder: str | Path) -> tuple[LlamaConfig, Callable[[Mapping[str, Tensor]], None]]:
    """Read the config of a folder; return it, and what fills a model's tensors from there.

        config, load = import_huggingface("tinyllama-1.1b")
        model = init_parameters(shard_module(...))
        load(get_model_state_dict(model))

    Args:
        folder: with a config.json whose model is a LlamaForCausalLM without biases and with plain rotary positions, or
            a Glm4MoeForCausalLM with rotary positions in whole heads and one group of experts.

    Returns:
        The config of a `Llama` or `MoELlama` that computes the same, and `load_huggingface` of this folder.

    Raises:
        TypeError: folder is no path.
        ValueError: no such folder or model; see also `load_huggingface`.
    """
    check("cannot import from Hugging Face", "path", folder=folder)
    asked, folder = f"cannot import {folder}", Path(folder)
    config = config_from_json(_read_json(asked, folder / "config.json"), asked)
    _check_count(asked, _locate(asked, folder), config)
    return config, partial(load_huggingface, folder=folder)


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
        TypeError: an argument of another kind.
        ValueError: weights in no safetensors file, a damaged one, tensors that the model, or the folder, does not have
            or has in another shape, a DTensor with a reduction pending.
    """
    from safetensors import SafetensorError

    check("cannot load from Hugging Face", "path", folder=folder)
    check_tensors("cannot load from Hugging Face", state=state)
    asked, folder = f"cannot load {folder}", Path(folder)
    config = config_from_json(_read_json(asked, folder / "config.json"), asked)
    files = _locate(asked, folder)
    _check_count(asked, files, config)
    expected = model_tensors(config)
    tensors = plain_names(state)
    check_known(asked, tensors, expected, config)
    _check_complete(asked, files, expected, config)
    with ExitStack() as stack, torch.no_grad():
        slices = _Slices(asked, files, stack)
        try:
            jobs = [job for name, tensor in tensors.items() for job in slices.jobs(name, tensor)]
            for memory, source, part in jobs:
                memory.copy_(source[part])
        except (SafetensorError, OSError) as error:
            raise ValueError(explain(asked, "a file is damaged", f"seen: {error}", "another copy of it")) from None


def _source(name: str, tensor: Tensor, files: Mapping[str, Path]) -> Place:
    place = place_of(name, tuple(tensor.shape))
    is_tied = name == "head.weight" and place.names[0] not in files
    return place_of("embed.weight", tuple(tensor.shape)) if is_tied else place


def _own(asked: str, name: str, tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return the memory to fill, and which part of the whole tensor belongs there."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    layout, local = Layout.of(tensor), tensor.to_local()
    own = layout.local_slice(tuple(tensor.shape))
    if layout.is_partial() or tuple(part.stop - part.start for part in own) != tuple(local.shape):
        blame = f"{name!r} is not laid out as parts of the whole"
        raise ValueError(explain(asked, blame, f"layout: {layout}   part: {tuple(local.shape)}", "load, then shard"))
    return local, own


class _Job(NamedTuple):
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

    def jobs(self, name: str, tensor: Tensor) -> list[_Job]:
        """Return what is to be read for one of our tensors; refuse another shape."""
        local, own = _own(self.asked, name, tensor)
        shape = tuple(tensor.shape)
        place = _source(name, tensor, self.files)
        if not place.is_stacked:
            whole = self._slice_of(place.names[0], shape)
            return [_Job(local, whole, own)] if local.numel() else []
        each = [self._slice_of(theirs, shape[1:]) for theirs in place.names]
        mine = range(own[0].start, own[0].stop) if local.numel() else ()
        return [_Job(local[index - own[0].start], each[index], own[1:]) for index in mine]

    def _slice_of(self, name: str, shape: tuple[int, ...]) -> Any:
        from safetensors import safe_open

        path = self.files[name]
        if path not in self.open:
            self.open[path] = self.stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        found = self.open[path].get_slice(name)
        if tuple(found.get_shape()) != shape:
            blame = f"{name!r} has another shape than config.json says"
            seen = f"{path.name}: {tuple(found.get_shape())}   config.json: {shape}"
            raise ValueError(explain(self.asked, blame, seen, "a folder whose files belong together"))
        if found.get_dtype() not in _DTYPES:
            blame = f"{name!r} holds {found.get_dtype()}, and weights here are plain floating-point numbers"
            seen, hint = (
                f"{path.name}: {found.get_dtype()}",
                f"one of {', '.join(_DTYPES)}: a model that is not quantized",
            )
            raise ValueError(explain(self.asked, blame, seen, hint))
        return found


# -- what is in a folder ---------------------------------------------------------------------------------------------


def _read_json(asked: str, path: Path) -> Any:
    hint = "the folder that save_pretrained, or export_huggingface, has written"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_JSON:
            seen = f"seen: {path}, of {status.st_size} bytes"
            raise ValueError(explain(asked, f"{path.name} is no file, or too large for what it is", seen, hint))
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(explain(asked, f"{path.name} cannot be read", f"seen: {error}", hint)) from None
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(explain(asked, f"{path.name} is no JSON", f"seen: {error}", "another copy of it")) from None


def _locate(asked: str, folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a folder."""
    from safetensors import SafetensorError, safe_open

    if (folder / INDEX).exists():
        index = _read_json(asked, folder / INDEX)
        where = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            blame, hint = f"{INDEX} does not say which file has which tensor", '{"weight_map": {tensor: file, ...}}'
            raise ValueError(explain(asked, blame, f"weight_map: {where!r}"[:200], hint))
        files = {name: folder / Path(file).name for name, file in where.items()}
    elif (folder / SINGLE).is_file():
        try:
            with safe_open(folder / SINGLE, framework="pt") as file:
                files = dict.fromkeys(file.keys(), folder / SINGLE)
        except (SafetensorError, OSError) as error:
            blame, hint = f"{SINGLE} is damaged, or no safetensors file", "another copy of it"
            raise ValueError(explain(asked, blame, f"seen: {error}", hint)) from None
    else:
        files = {}
    missing = list(dict.fromkeys(str(path) for path in files.values() if not path.is_file()))
    if missing:
        raise ValueError(explain(asked, "files that the index names are missing", some_of(missing), "a whole copy"))
    if not files:
        there = sorted(path.name for path in folder.iterdir())
        pickled = [name for name in there if name.endswith((".bin", ".pt", ".pth"))]
        blame = "its weights are pickled, and reading those may run any code" if pickled else "it has no weights"
        hint = f"a folder with {SINGLE}: model.save_pretrained(folder) of transformers writes that"
        raise ValueError(explain(asked, blame, f"files: {some_of(pickled or there)}", hint))
    return files


def _check_count(asked: str, files: Mapping[str, Path], config: LlamaConfig) -> None:
    """Refuse numbers of layers and experts that the files cannot have, before a model of that size is described."""
    sparse = config.num_hidden_layers - config.num_dense_layers if isinstance(config, MoEConfig) else 0
    experts = config.num_experts if isinstance(config, MoEConfig) else 0
    least = config.num_hidden_layers + sparse * experts
    if least > len(files):
        blame = "tensors are missing: its layers and experts have more than there are"
        seen = f"tensors: {len(files)}   layers: {config.num_hidden_layers}   experts in a layer: {experts}"
        raise ValueError(explain(asked, blame, seen, "a folder whose files belong together"))


def _check_complete(asked: str, files: Mapping[str, Path], expected: Mapping[str, Tensor], config: LlamaConfig) -> None:
    """Refuse a folder that lacks tensors of its model, or has some that the model here would leave out."""
    wanted = {each: None for name, x in expected.items() for each in place_of(name, tuple(x.shape)).names}
    missing = [name for name in wanted if name not in files]
    if missing:
        hint = "a whole folder, with experts one by one as transformers saves them"
        raise ValueError(explain(asked, "tensors are missing", f"missing: {some_of(missing)}", hint))
    others = [name for name in sorted(files) if name not in wanted and not is_passed_over(name, config)]
    if others:
        blame = "it has tensors that the model here does not, and without which it computes something else"
        raise ValueError(explain(asked, blame, f"tensors: {some_of(others)}", "a model without them"))
