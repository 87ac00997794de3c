"""Round trips of checkpoints, bit for bit: any shapes, dtypes, layouts and meshes, on either side."""

from __future__ import annotations

import copy
import json
import math
import re
import tempfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel.core.checkpoint import CheckpointError, load_checkpoint, read_metadata, save_checkpoint
from hyper_parallel.core.checkpoint import reader as reader_module
from hyper_parallel.core.checkpoint import writer as writer_module
from hyper_parallel.core.checkpoint.files import DTYPES, from_json, to_json
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute import distribute_tensor
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.sim


def examples(share: float) -> settings:
    return settings(max_examples=max(1, round(share * settings.default.max_examples)))


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
    saved_by, here = read_metadata(folder).world_size, dist.get_world_size()
    if saved_by != here:
        with pytest.raises(ValueError, match=f"each of {saved_by} ranks has saved its own 'rank', and {here} load it"):
            load_checkpoint(folder, tensors, per_rank={"rank": own})
        load_checkpoint(folder, {}, per_rank={"rank": own}, strict=False)
    load_checkpoint(folder, tensors, per_rank={"rank": own} if saved_by == here else None)
    assert own.item() == (dist.get_rank() if dist.get_rank() < saved_by else -1)
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        full = bits_of(entry.shape, entry.dtype, entry.seed)
        if entry.dst is None:
            assert same_bits(tensor, full), entry
        else:
            assert same_bits(tensor.to_local(), full[entry.dst.local_slice(entry.shape, dist.get_rank())]), entry


@pytest.mark.tier("full")
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


# -- records that somebody has changed -----------------------------------------------------------------------------

SAVED = {
    "w": ((6, 4), ("x", "y")),
    "v": ((8,), (("x", "y"),)),
    "n": ((2, 3), (None, None)),
    "e": ((0, 3), (None, None)),
}
NODES = st.one_of(
    st.integers(-2, 40), st.integers(-(2**70), 2**70), st.none(), st.booleans(), st.floats(), st.text(max_size=3),
    st.lists(st.integers(0, 8), max_size=3),
    st.sampled_from(["float32", "int32", "float64", "data-00001.safetensors", "../x", {}, []]),
)  # fmt: skip


def whole_tensors() -> dict[str, torch.Tensor]:
    return {name: bits_of(shape, torch.float32, seed) for seed, (name, (shape, _)) in enumerate(SAVED.items())}


def save_four(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    layout = Layout((2, 2), ("x", "y"))
    tensors = {
        name: distribute_tensor(whole, layout(*SAVED[name][1]).with_mesh(mesh), src_data_rank=None)
        for name, whole in whole_tensors().items()
    }
    save_checkpoint(folder, tensors, per_rank={"rank": torch.tensor(dist.get_rank())})


@cache
def saved_by_four() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    root = tempfile.TemporaryDirectory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "BLOCK", 64)
        sim.run(save_four, 4, args=(Path(root.name, "c"),))
    return root, Path(root.name, "c")


def places_in(node: Any) -> list[tuple[Any, Any]]:
    """All containers with a key or an index in them."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    found = [(node, key) for key, _ in items]
    return found + [place for _, inner in items for place in places_in(inner)]


def corrupt(draw: st.DrawFn, content: dict[str, Any]) -> None:
    """Change one thing: replace it, move a number, delete, duplicate, or swap it with another."""
    places = [place for place in places_in(content) if place[1] not in ("extra", "step", "run")]
    holder, key = draw(st.sampled_from(places))
    kind = draw(st.sampled_from(["replace", "add", "delete", "duplicate", "swap"]))
    if kind == "add" and type(holder[key]) is int:
        holder[key] += draw(st.sampled_from([-64, -24, -4, -1, 1, 2, 4, 24, 64]))
    elif kind == "delete":
        del holder[key]
    elif kind == "duplicate" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == "swap":
        alike = [place for place in places if type(place[0][place[1]]) is type(holder[key])]
        other, at = draw(st.sampled_from(alike))
        holder[key], other[at] = copy.deepcopy(other[at]), copy.deepcopy(holder[key])
    else:
        holder[key] = draw(NODES)


@examples(4)
@given(st.data())
def test_a_changed_record_is_refused_or_loads_what_was_saved(data: st.DataObject) -> None:
    folder = saved_by_four()[1]
    path = folder / "checkpoint.json"
    right = path.read_text()
    begin, _, rest = right.partition("\n")
    content = json.loads(rest.removesuffix("\n}\n"))
    for _ in range(data.draw(st.integers(1, 3))):
        data.draw(st.composite(corrupt)(content))
    text = json.dumps(content)
    begin = re.sub(r'"crc32": "\w+"', f'"crc32": "{zlib.crc32(text.encode()):08x}"', begin)
    wholes = whole_tensors()
    targets = {name: torch.full_like(whole, -7.0) for name, whole in wholes.items()}
    rank = torch.tensor(-7)
    refusal = None
    try:
        path.write_text(f"{begin}\n{text}\n}}\n")
        load_checkpoint(folder, targets)
        load_checkpoint(folder, {}, per_rank={"rank": rank}, strict=False)  # one of four ranks
    except (CheckpointError, ValueError) as error:
        refusal = str(error)
    finally:
        path.write_text(right)
    if refusal is None:
        assert all(same_bits(targets[name], whole) for name, whole in wholes.items())
        assert rank.item() in (0, -7), "what the record does not name is left alone"
    else:
        assert refusal.startswith("cannot load the checkpoint")
        assert "\n  try: " in refusal
        assert all(bool((target == -7).all()) for target in (*targets.values(), rank)), "half loaded"
