"""What is loaded is what was saved, bit for bit: any shapes, dtypes, layouts and meshes, on either side."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel.core.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from hyper_parallel.core.checkpoint import reader as reader_module
from hyper_parallel.core.checkpoint import writer as writer_module
from hyper_parallel.core.checkpoint.exact import from_json, to_json
from hyper_parallel.core.checkpoint.files import DTYPES
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute import distribute_tensor
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.sim


def examples(share: float) -> settings:
    return settings(
        max_examples=max(1, round(share * settings.default.max_examples)),
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


class Entry(NamedTuple):
    """A tensor, and how it lies when it is saved and when it is loaded; None: plain."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    src: Layout | None
    dst: Layout | None
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, Layout, list[Entry]]:
    src, dst = draw(meshes(8, 3)), draw(meshes(8, 3))
    entries = []
    for seed in range(draw(st.integers(1, 4))):
        shape = draw(shapes(max_dims=3, max_size=9))
        on = [draw(st.none() | layouts(mesh, shape)) for mesh in (src, dst)]
        entries.append(Entry(shape, draw(st.sampled_from(list(DTYPES))), on[0], on[1], seed))
    return src, dst, entries


def bits_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all, NaNs of all kinds among them; bools are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)


def on_ranks(mesh: Layout, entries: list[tuple[torch.Tensor, Layout | None]]) -> dict[str, torch.Tensor]:
    device_mesh = init_device_mesh("cpu", mesh.mesh_shape, mesh_dim_names=mesh.alias_name)
    return {
        f"t{number}": full.clone()
        if layout is None
        else distribute_tensor(full, layout.with_mesh(device_mesh), src_data_rank=None)
        for number, (full, layout) in enumerate(entries)
    }


def save(mesh: Layout, entries: list[Entry], folder: Path) -> None:
    fulls = [(bits_of(entry.shape, entry.dtype, entry.seed), entry.src) for entry in entries]
    save_checkpoint(folder, on_ranks(mesh, fulls), per_rank={"rank": torch.tensor(dist.get_rank())})


def load(mesh: Layout, entries: list[Entry], folder: Path) -> None:
    zeros = [(torch.zeros(entry.shape, dtype=entry.dtype), entry.dst) for entry in entries]
    tensors = on_ranks(mesh, zeros)
    own = torch.tensor(-1)
    load_checkpoint(folder, tensors, per_rank={"rank": own})
    assert own.item() == (dist.get_rank() if dist.get_rank() < read_metadata(folder).world_size else -1)
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        full = bits_of(entry.shape, entry.dtype, entry.seed)
        if entry.dst is None:
            assert same_bits(tensor, full), entry
        else:
            assert same_bits(tensor.to_local(), full[entry.dst.local_slice(entry.shape, dist.get_rank())]), entry


@examples(1.5)
@given(cases(), st.sampled_from([8, 64, 2**22]), st.sampled_from([16, 40, 2**19]))
def test_loaded_is_saved(case: tuple[Layout, Layout, list[Entry]], block: int, piece: int) -> None:
    src, dst, entries = case
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as root:
        patch.setattr(reader_module, "_PIECE", piece)  # rows that do not fit into one piece are read one by one
        patch.setattr(writer_module, "BLOCK", block)
        folder = Path(root, "saved")
        sim.run(save, math.prod(src.mesh_shape), args=(src, entries, folder))
        sim.run(load, math.prod(dst.mesh_shape), args=(dst, entries, folder))
        assert read_metadata(folder).block == block
        _check_by_library(folder, entries)


def _check_by_library(folder: Path, entries: list[Entry]) -> None:
    """Put the tensors together from what the safetensors library reads, each element once."""
    metadata = read_metadata(folder)
    wholes = {name: torch.zeros(entry.shape, dtype=entry.dtype) for name, entry in metadata.tensors.items()}
    counts = {name: torch.zeros(entry.shape, dtype=torch.int64) for name, entry in metadata.tensors.items()}
    boxes = {
        (box.file, box.at): 0 for entry in metadata.tensors.values() for box in entry.boxes if math.prod(box.sizes)
    }
    for number, file in enumerate(metadata.files):
        with safe_open(folder / file.name, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                name, _, place = key.partition("|")
                if place.startswith("rank"):
                    continue
                part = opened.get_tensor(key)
                offsets = [int(at) for at in place.split(",")] if place else [0] * part.dim()
                at = tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape, strict=True))
                wholes[name][at] = part
                counts[name][at] += 1
        assert any(box[0] == number for box in boxes) or metadata.per_rank
    for number, entry in enumerate(entries):
        assert same_bits(wholes[f"t{number}"], bits_of(entry.shape, entry.dtype, entry.seed)), entry
        assert bool((counts[f"t{number}"] == 1).all()), entry


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.just("$float"), inner),
    max_leaves=20,
)


def equal(a: object, b: object) -> bool:
    """Equal with the same types, -0.0 unlike 0.0, and NaN like NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return a == b


@examples(2)
@given(JSON)
def test_values_come_back_exactly(value: object) -> None:
    text = to_json(value)
    assert equal(from_json(text), value)
    json.loads(text, parse_constant=pytest.fail)  # no NaN or Infinity, which are no JSON
