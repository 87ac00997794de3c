"""Checkpoints on one rank: what is refused and how it is said, which folders there are when, the optimizer's state."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import sim
from hyper_parallel.core.checkpoint import (
    Checkpointer,
    CheckpointError,
    LeaseLostError,
    folders,
    load_checkpoint,
    load_optimizer_scalars,
    model_tensors,
    optimizer_targets,
    optimizer_tensors,
    read_metadata,
    save_checkpoint,
)
from hyper_parallel.core.checkpoint import checkpointer as checkpointer_module
from hyper_parallel.core.checkpoint import reader as reader_module
from hyper_parallel.core.checkpoint import writer as writer_module
from hyper_parallel.core.checkpoint.files import checksums, open_plain
from hyper_parallel.core.checkpoint.folders import clean
from hyper_parallel.core.checkpoint.reader import check_files

W = torch.arange(6.0).reshape(2, 3)


def names(folder):
    """What there is besides the lease of who is saving."""
    return sorted(path.name for path in folder.iterdir() if path.name != folders.LEASE)


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "options", "error", "text"),
    [
        ({"a|b": W}, {}, ValueError, "'a|b' is no name for a tensor in it"),
        ({3: W}, {}, ValueError, "3 is no name for a tensor in it"),
        ({"__metadata__": W}, {}, ValueError, "'__metadata__' is no name for a tensor in it"),
        ({"\ud800": W}, {}, ValueError, r"'\ud800' is no name for a tensor in it"),
        ({"w": 1.5}, {}, TypeError, "'w' is a float, not a tensor"),
        ({"w": W.to("meta")}, {}, ValueError, "'w' is on the meta device and has no values"),
        ({"w": W.to_sparse()}, {}, ValueError, "'w' is torch.sparse_coo or quantized"),
        ({"w": W.to(torch.complex128)}, {}, ValueError, "'w' is of dtype torch.complex128, which safetensors files"),
        ({"w": TwoTensor(W, W)}, {}, ValueError, "'w' is a tensor subclass that holds its values in other tensors"),
        ({"w": W}, {"extra": {"a": [1, {2: 3}]}}, ValueError, "the key 2 of extra['a'][1] is a int"),
        ({"w": W}, {"extra": {"a": [1, W]}}, ValueError, "extra['a'][1] is a Tensor, which JSON does not have"),
        ({"w": W}, {"extra": object()}, ValueError, "extra is a object"),
        ({"w": W}, {"per_rank": {"r": None}}, TypeError, "'r' is None, not a tensor"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(tmp_path, tensors, options, error, text):
    with pytest.raises(error) as caught:
        save_checkpoint(tmp_path / "c", tensors, **options)
    assert text in str(caught.value)
    assert "\n  try: " in str(caught.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"w": torch.zeros(3, 2), "n": torch.zeros(2)}, "'w' has another shape\n  saved: (2, 3) torch.float32"),
        ({"w": torch.zeros(2, 3).half(), "n": torch.zeros(2)}, "'w' has another dtype"),
        ({"w": torch.zeros(2, 3), "m": torch.zeros(2)}, "it has no 'm'\n  missing: 'm'"),
        ({"w": torch.zeros(2, 3)}, "no rank asks for 'n'\n  only in the checkpoint: 'n'"),
        ({"w": torch.zeros(2, 3), "n": torch.zeros(1).expand(2)}, "several elements of 'n' are one in memory"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path, tensors, text):
    save_checkpoint(tmp_path / "c", {"w": W, "n": torch.ones(2)})
    with pytest.raises(ValueError) as caught:
        load_checkpoint(tmp_path / "c", tensors)
    assert text in str(caught.value)
    assert "\n  try: " in str(caught.value)
    assert all(not tensor.any() for tensor in tensors.values())


def test_not_strict_leaves_the_rest_alone(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": W, "n": torch.ones(2)})
    tensors = {"w": torch.zeros(2, 3), "other": torch.full((2,), 7.0)}
    load_checkpoint(tmp_path / "c", tensors, strict=False)
    assert torch.equal(tensors["w"], W)
    assert torch.equal(tensors["other"], torch.full((2,), 7.0))
    with pytest.raises(ValueError, match="'w' has another shape"):
        load_checkpoint(tmp_path / "c", {"w": torch.zeros(3)}, strict=False)


def test_dtensors_that_have_no_values_or_no_place():
    def body(folder):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        pending = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with pytest.raises(ValueError, match="'w' still has a reduction to be taken"):
            save_checkpoint(folder, {"w": pending})
        wrong = DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False, shape=(6,), stride=(1,))
        with pytest.raises(ValueError, match="this rank's shard of 'w' is not the one that its layout says"):
            save_checkpoint(folder, {"w": wrong})
        with pytest.raises(ValueError, match=r"per_rank\['w'\] is a DTensor"):
            save_checkpoint(folder, {}, per_rank={"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])})

    sim.run(body, 2, args=("never",))
    assert not os.path.exists("never")


def test_parts_that_do_not_make_a_whole(tmp_path):
    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        w = distribute_tensor(W, mesh, [Shard(0)], src_data_rank=None)
        rank = torch.distributed.get_rank()
        with pytest.raises(ValueError, match="do not make up full tensors") as caught:
            save_checkpoint(tmp_path / "c", {"w": w} if rank == 0 else {})
        return str(caught.value)

    first, second = sim.run(body, 2)
    assert first == second
    assert names(tmp_path) == []


def test_ranks_at_different_steps_are_named(tmp_path):
    def body():
        rank = torch.distributed.get_rank()
        message = r"the ranks are at different steps\n  rank 0: step 5\n  rank 1: step 6\n  try: "
        with pytest.raises(ValueError, match=message):
            save_checkpoint(tmp_path / "c", {"w": W}, step=5 + rank)
        with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=message):
            checkpointer.save(5 + rank, {"w": W})

    sim.run(body, 2)
    assert names(tmp_path) == []


@sim.ranks(2, backends=("sim",))
def test_a_checkpointer_that_is_closed_says_so(ctx, tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"w": W})
    checkpointer.close()
    checkpointer.close()
    for call in (checkpointer.acquire, lambda: checkpointer.save(2, {"w": W}), lambda: checkpointer.load({"w": W})):
        with pytest.raises(ValueError, match=r"it has been closed.*\n  root: .*\n  try: another one"):
            call()
    assert checkpointer.latest() == tmp_path / "step-00000001"


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": W})
    with pytest.raises(ValueError, match="it is there already"):
        save_checkpoint(tmp_path / "c", {"w": W + 1})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("mine", "file"):
        with pytest.raises(ValueError, match="something else has that name"):
            save_checkpoint(tmp_path / name, {"w": W}, replace=True)
    assert (tmp_path / "mine" / "notes").read_text() == (tmp_path / "file").read_text() == "precious"
    save_checkpoint(tmp_path / "c", {"w": W + 1}, replace=True)
    load_checkpoint(tmp_path / "c", {"w": (w := torch.zeros(2, 3))})
    assert torch.equal(w, W + 1)
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", {"w": W})
    assert names(tmp_path) == ["c", "empty", "file", "mine"]


def test_what_a_checkpoint_says_of_itself(tmp_path):
    extra = {"lr": 0.1, "best": float("-inf"), "betas": (0.9, 0.999), "note": "über", "$float": None}
    save_checkpoint(tmp_path / "c", {"w": W}, extra, per_rank={"rng": torch.zeros(4, dtype=torch.uint8)}, step=12)
    metadata = read_metadata(tmp_path / "c")
    assert (metadata.step, metadata.world_size, metadata.extra) == (12, 1, extra)
    assert (metadata.tensors["w"].shape, metadata.tensors["w"].dtype) == ((2, 3), torch.float32)
    assert list(metadata.tensors) == ["w"]
    assert metadata.per_rank["rng"][0].shape == (4,)
    assert metadata.num_bytes == sum(path.stat().st_size for path in (tmp_path / "c").glob("*.safetensors"))
    assert json.loads((tmp_path / "c" / "checkpoint.json").read_text())["format"] == "hyper_parallel checkpoint"
    with pytest.raises(CheckpointError, match="no such folder"):
        read_metadata(tmp_path / "d")


def test_every_bit_of_the_record_counts(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": W}, {"lr": 0.1})
    path = tmp_path / "c" / "checkpoint.json"
    right = path.read_bytes()
    for at, bit in itertools.product(range(len(right)), (2, 32)):
        path.write_bytes(right[:at] + bytes([right[at] ^ bit]) + right[at + 1 :])
        with pytest.raises(CheckpointError, match=r"checkpoint\.json is (damaged|of format)"):
            read_metadata(tmp_path / "c")
    for length in (0, 1, len(right) // 2, len(right) - 1):
        path.write_bytes(right[:length])
        with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
            read_metadata(tmp_path / "c")


@pytest.mark.tier("test")
def test_every_bit_of_the_data_counts_whoever_looks_at_it(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "BLOCK", 64)
    save_checkpoint(tmp_path / "c", {"w": W, "long": torch.arange(48.0)}, per_rank={"rng": torch.arange(8)})
    tensors, own = {"w": torch.zeros(2, 3), "long": torch.zeros(48)}, {"rng": torch.zeros(8, dtype=torch.int64)}
    metadata = read_metadata(tmp_path / "c")
    path = tmp_path / "c" / metadata.files[0].name
    right = path.read_bytes()
    header = 8 + int.from_bytes(right[:8], "little")
    for ranks in (1, 3, 50):
        found = [check_files(tmp_path / "c", metadata, metadata.by_key, rank, ranks) for rank in range(ranks)]
        assert found == [None] * ranks
    for at in range(len(right)):
        path.write_bytes(right[:at] + bytes([right[at] ^ 64]) + right[at + 1 :])
        found = [check_files(tmp_path / "c", metadata, metadata.by_key, rank, 3) for rank in range(3)]
        reported = sum(error is not None for error in found)  # of the header, also by the rank that compares it
        assert reported == 1 or (reported == 2 and at < header), f"byte {at}: {found}"
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path / "c", tensors, per_rank=own)
    path.write_bytes(right)
    load_checkpoint(tmp_path / "c", tensors, per_rank=own)
    assert torch.equal(tensors["w"], W)
    path.write_bytes(right[:-1] + b"?")  # in "w", which comes last; "long" can be loaded alone
    load_checkpoint(tmp_path / "c", {"long": (long := torch.zeros(48))}, strict=False)
    assert torch.equal(long, torch.arange(48.0))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(tmp_path / "c", {"w": torch.zeros(2, 3)}, strict=False)


def test_a_block_is_counted_in_several_reads(tmp_path):
    data = bytes(range(256)) * 4096 + b"and the rest"
    (tmp_path / "file").write_bytes(data)
    size, file = 2**19 + 7, open_plain(tmp_path / "file")
    blocks = [*checksums(file, 0, 2, size), *checksums(file, 0, 1, len(data))]
    os.close(file)
    parts = [data[:size], data[size : 2 * size], data]
    assert blocks == [(number, len(part), zlib.crc32(part)) for number, part in zip((0, 1, 0), parts, strict=True)]


def test_a_record_leads_nowhere_else(tmp_path):
    """Whoever writes a record with a right checksum can at most make a load fail."""
    for number, (old, new) in enumerate(
        [("data-00000", "../secret0"), ('"float32"', '"ops"'), ('"float32"', '"load"')]
    ):
        folder = tmp_path / str(number)
        save_checkpoint(folder, {"w": W})
        path = folder / "checkpoint.json"
        begin, _, rest = path.read_text().partition("\n")
        content = rest.removesuffix("\n}\n").replace(old, new)
        begin = re.sub(r'"crc32": "\w+"', f'"crc32": "{zlib.crc32(content.encode()):08x}"', begin)
        path.write_text(f"{begin}\n{content}\n}}\n")
        with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged\n.*lacks something: (Value|Key)Error"):
            read_metadata(folder)


def rewrite(folder, change):
    """Change the content of a record, and let its checksum be right."""
    path = folder / "checkpoint.json"
    begin, _, rest = path.read_text().partition("\n")
    content = json.loads(rest.removesuffix("\n}\n"))
    change(content)
    text = json.dumps(content)
    begin = re.sub(r'"crc32": "\w+"', f'"crc32": "{zlib.crc32(text.encode()):08x}"', begin)
    path.write_text(f"{begin}\n{text}\n}}\n")


def first_box(content, name="w"):
    return content["tensors"][name]["boxes"][0]


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda c: c["tensors"]["w"].update(boxes=[first_box(c)] * 2, shape=[4, 3]), "each element once"),
        (lambda c: first_box(c).__setitem__(1, 0), "does not have 'w' where checkpoint.json says"),  # in the header
        (lambda c: first_box(c).__setitem__(1, first_box(c, "n")[1]), "have the same bytes of file 0"),
        (lambda c: c["tensors"].update(w=c["tensors"]["m"], m=c["tensors"]["w"]), "does not have 'm' where"),
        (lambda c: c["tensors"].update(e={"dtype": "float32", "shape": [0, "a"], "boxes": []}), "'e' is (0, 'a')"),
        (lambda c: c["tensors"].update(e={"dtype": "float32", "shape": [0, 2**64], "boxes": []}), "'e' is (0, 1844"),
        (lambda c: c["files"].append(c["files"][0]), "two files of the same name"),
        (lambda c: c.update(step={}), "at step {}"),
        (lambda c: c.update(attempt="other"), "belongs to another checkpoint"),
        (lambda c: c["tensors"]["w"].update(boxes=[]), "'w' are not all of (2, 3), each element once"),
        (lambda c: first_box(c).__setitem__(3, [1, 3]), "'w' are not all of (2, 3), each element once"),
        (lambda c: first_box(c).__setitem__(2, [1, 0]), "'w' is (2, 3), with a box Box("),  # that ends beyond it
        (lambda c: first_box(c).__setitem__(3, [6]), "checkpoint.json is damaged"),
        (lambda c: first_box(c).__setitem__(1, 10**9), "'w' ends at byte 1000000024 of file 0"),
        (lambda c: first_box(c).__setitem__(1, -8), "'w' has a box Box(file=0, at=-8"),
        (lambda c: first_box(c).__setitem__(0, -1), "'w' has a box Box(file=-1"),
        (lambda c: first_box(c).__setitem__(0, 9), "of file 9"),
        (lambda c: c["files"][0].update(name=".."), "a file called '..'"),
        (lambda c: c["files"][0].update(crc32=[]), "0 checksums for the"),
        (lambda c: c.update(block=0), "block is 0"),
        (lambda c: c.update(world_size="two"), "world_size is 'two'"),
    ],
)
def test_a_record_is_not_believed(tmp_path, change, reported):
    save_checkpoint(tmp_path / "c", {"w": W, "m": W + 1, "n": torch.ones(8)})
    rewrite(tmp_path / "c", lambda content: None)
    load_checkpoint(tmp_path / "c", {"w": (w := torch.zeros(2, 3))}, strict=False)
    assert torch.equal(w, W), "a record that was only written again is as good"
    rewrite(tmp_path / "c", change)
    tensors = {"w": torch.zeros(2, 3), "m": torch.zeros(2, 3), "n": torch.zeros(8)}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "c", tensors)
    assert reported in str(caught.value)
    assert "\n  try: an older checkpoint" in str(caught.value)
    assert not any(tensor.any() for tensor in tensors.values())


def test_a_record_does_not_say_how_much_memory_is_taken(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    make_steps(model, optimizer, [0])
    save_checkpoint(tmp_path / "c", optimizer_tensors(model, optimizer)[0])
    size = 2**50

    def change(content):
        content["tensors"]["optimizer.0.weight.exp_avg"] = {
            "dtype": "float32",
            "shape": [size],
            "boxes": [[1, 0, [0], [size]]],
        }
        content["files"].append({"name": "huge", "bytes": 4 * size, "crc32": [0]})
        content["block"] = 4 * size
        content["files"][0]["crc32"] = [0]

    rewrite(tmp_path / "c", change)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'exp_avg' of '0\.weight' is larger than the parameter\n.*\n  try: "):
        optimizer_targets(model, fresh, read_metadata(tmp_path / "c"))


@pytest.mark.parametrize("kind", ["replaced", "deleted", "saving", "step"])
def test_links_are_not_followed(tmp_path, kind):
    save_checkpoint(tmp_path / "other" / "c", {"w": W}, "precious")
    root = tmp_path / "run"
    root.mkdir()
    link = root / ("step-00000001" if kind == "step" else f".step-00000001.{kind}-x")
    link.symlink_to(tmp_path / "other" / "c")
    with Checkpointer(root, keep_last=1, on_error="raise") as checkpoints:
        if kind == "step":  # whose name it is, may be read
            assert checkpoints.load({"w": torch.zeros(2, 3)}) == "precious"
        for step in (1, 2):
            checkpoints.save(step, {"w": W})
    assert [path.name for path in root.iterdir()] == ["step-00000002"]
    assert read_metadata(tmp_path / "other" / "c").extra == "precious"
    assert names(tmp_path / "other" / "c") == ["checkpoint.json", "data-00000.safetensors"]


@pytest.mark.parametrize("new_is_there", [False, True])
def test_an_interrupted_replacement_is_undone_unless_it_is_through(tmp_path, new_is_there):
    save_checkpoint(tmp_path / "c", {"w": W}, "old")
    (tmp_path / "c").rename(tmp_path / ".c.replaced-1f")
    if new_is_there:
        save_checkpoint(tmp_path / "new", {"w": W + 1}, "new")
        (tmp_path / "new").rename(tmp_path / "c")
    clean(tmp_path / "c")
    assert names(tmp_path) == ["c"]
    assert read_metadata(tmp_path / "c").extra == ("new" if new_is_there else "old")


@pytest.mark.parametrize("name", ["checkpoint.json", "data-00000.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_file_that_is_none_is_not_read(tmp_path, name, kind):
    save_checkpoint(tmp_path / "c", {"w": W})
    path = tmp_path / "c" / name
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match=re.escape(name)) as caught:
        load_checkpoint(tmp_path / "c", {"w": torch.zeros(2, 3)})
    assert "\n  try: " in str(caught.value)
    assert ("It is a symbolic link, and none is followed" in str(caught.value)) == (kind == "link")


def test_a_file_that_breaks_while_it_is_loaded(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "c", {"w": W})
    real = reader_module.check_files

    def then_truncate(folder, *rest):
        found = real(folder, *rest)
        os.truncate(folder / "data-00000.safetensors", 100)
        return found

    monkeypatch.setattr(reader_module, "check_files", then_truncate)
    with pytest.raises(CheckpointError, match=r"'data-00000\.safetensors' was sound a moment ago") as caught:
        load_checkpoint(tmp_path / "c", {"w": torch.zeros(2, 3)})
    assert "it has become shorter" in str(caught.value)


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_views_that_say_how_to_read_their_memory_are_filled(tmp_path, view):
    wanted = torch.complex(torch.arange(3.0), torch.ones(3))
    save_checkpoint(tmp_path / "c", {"w": view(wanted).clone()})
    filled = view(torch.zeros(3, dtype=torch.complex64))
    load_checkpoint(tmp_path / "c", {"w": filled})
    assert torch.equal(filled.resolve_conj().resolve_neg(), view(wanted).resolve_conj().resolve_neg())


def test_few_elements_with_any_stride(tmp_path):
    """Torch calls what has one element, or none, contiguous, and does not view it as bytes."""
    tensors = {"column": torch.arange(6.0).view(2, 3)[:1, 1], "expanded": torch.tensor(3).expand(1)}
    tensors["nothing"] = torch.zeros(0, 3)[:, 1]
    save_checkpoint(tmp_path / "c", tensors)
    filled = {name: torch.zeros_like(x).repeat(4)[::2][: len(x)] for name, x in tensors.items()}
    load_checkpoint(tmp_path / "c", filled)
    assert {name: x.tolist() for name, x in filled.items()} == {"column": [1.0], "expanded": [3], "nothing": []}


def test_nothing_but_numbers(tmp_path):
    save_checkpoint(tmp_path / "c", {}, {"step": 3})
    assert load_checkpoint(tmp_path / "c", {}) == {"step": 3}
    assert names(tmp_path / "c") == ["checkpoint.json"]


@pytest.mark.parametrize("background", [False, True])
def test_the_last_ones_are_kept(tmp_path, background):
    (tmp_path / "notes").write_text("precious")
    (tmp_path / "step-00000001").mkdir()  # no checkpoint: whoever made it may keep it
    with Checkpointer(tmp_path, keep_last=2, async_save=background) as checkpoints:
        assert checkpoints.latest() is None
        for step in (100, 200, 300):
            checkpoints.save(step, {"w": W + step}, {"step": step})
        assert checkpoints.latest() == tmp_path / "step-00000300"
        assert names(tmp_path) == ["notes", "step-00000001", "step-00000200", "step-00000300"]
        checkpoints.save(50, {"w": W})  # gone back to before: it is not the highest, and still not deleted
        assert checkpoints.wait() is None or background
        assert names(tmp_path) == ["notes", "step-00000001", "step-00000050", "step-00000300"]
        checkpoints.save(300, {"w": W})
        assert checkpoints.load({"w": (w := torch.zeros(2, 3))}) is None
        assert torch.equal(w, W)
    with pytest.raises(ValueError, match="keep_last=0, and there must be one to go back to"):
        Checkpointer(tmp_path, keep_last=0)
    with Checkpointer(tmp_path / "new") as checkpoints, pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoints.load({"w": W})


@pytest.mark.parametrize("background", [False, True])
def test_what_a_checkpointer_cannot_use_is_refused(tmp_path, background):
    with pytest.raises(ValueError, match=r"no kind of on_error 'rasie'\n.*\n  try: on_error='raise'"):
        Checkpointer(tmp_path, on_error="rasie")
    with Checkpointer(tmp_path, async_save=background) as checkpoints:
        for step, error in ((-1, ValueError), ("1", TypeError), (1.0, TypeError), (None, TypeError)):
            with pytest.raises(error, match=r"cannot save a checkpoint: step .*\n  step: "):
                (checkpoints.save(step, {"w": torch.ones(2)}), checkpoints.wait())
        checkpoints.save(0, {"w": torch.ones(2)})
        assert checkpoints.latest() == tmp_path / "step-00000000"
        assert names(tmp_path) == ["step-00000000"]


def test_a_rename_that_fails_leaves_the_one_that_was_there(tmp_path, monkeypatch):
    save_checkpoint(folder := tmp_path / "c", {"w": W})
    (attempt := folders.place(folder, "1f")).mkdir()
    real = os.rename

    def rename(old, new):
        if old == attempt:
            raise OSError(errno.EIO, "the disk has failed")
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="the disk has failed"):
        folders.put_in_place(attempt, folder)
    assert folders.is_complete(folder)
    assert folders.found(folder) == folder


def test_the_only_one_stays_until_the_next_is_complete(tmp_path):
    seen = {}
    stages = Checkpointer(tmp_path, keep_last=1, on_stage=lambda stage: seen.update({stage: names(tmp_path)}))
    stages.save(1, {"w": W})
    stages.save(2, {"w": W})
    for stage in ("begin", "data", "sync", "record", "commit"):
        assert [name for name in seen[stage] if name.startswith("step")] == ["step-00000001"], stage
    assert seen["committed"] == seen["prune"] == ["step-00000001", "step-00000002"]
    assert seen["done"] == ["step-00000002"]


# -- one run at a time -----------------------------------------------------------------------------------------------


def write_lease(root, age=0.0, **changes):
    """Leave the lease of another process, as it was when renewed for the last time `age` seconds ago."""
    root.mkdir(exist_ok=True)
    other = {**dataclasses.asdict(folders.Holder.here(None)), "attempt": "other", "run": "other", **changes}
    path = root / folders.LEASE
    path.write_text(json.dumps(other))
    os.utime(path, (path.stat().st_mtime - age,) * 2)


def dead_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_second_run_is_refused_and_told_who_has_the_folder(tmp_path):
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    first.save(1, {"w": W})
    for use in (second.acquire, lambda: second.save(1, {"w": W + 1})):
        with pytest.raises(CheckpointError) as caught:
            use()
        assert re.fullmatch(
            f"cannot save to {tmp_path}: another run is using it\n"
            rf"  run [0-9a-f]{{12}} on host '\S+', process {os.getpid()}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC, "
            r"renewed \d+ s ago\n  try: close\(\) of the Checkpointer that has it",
            str(caught.value),
        )
    second.load({"w": (w := torch.zeros(2, 3))})
    assert torch.equal(w, W)
    second.close()
    first.save(2, {"w": W})
    first.close()
    assert not (tmp_path / folders.LEASE).exists()
    second.save(3, {"w": W})
    second.close()
    Checkpointer(tmp_path).save(4, {"w": W})  # never closed, and nobody refers to it any more
    with Checkpointer(tmp_path) as third:
        third.acquire()


@pytest.mark.parametrize(
    ("lease", "mine", "is_taken"),
    [
        ({}, {}, False),  # this process's own number, and alive
        ({"pid": "dead"}, {}, True),
        ({"started": "1"}, {}, True),  # another process has the number by now
        ({"machine": "other", "pid": "dead", "age": 50}, {}, False),
        ({"machine": "other", "age": 61}, {}, True),
        ({"machine": "other", "age": -3600}, {}, False),  # renewed in the future
        ({"machine": "other", "job": "token", "restart": 0}, {"token": "token", "restart": 1}, True),
        (
            {"machine": "other", "job": "token", "restart": 1},
            {"token": "token", "restart": 1},
            False,
        ),  # of this attempt
        ({"machine": "other", "job": "token", "restart": 0}, {"token": "other", "restart": 1}, False),
        ({"machine": "other", "job": "", "restart": 0}, {"token": "", "restart": 1}, False),
        ({"job": "token", "restart": 0}, {"token": "token", "restart": 1}, False),  # a live holder always wins
        ({"job": "token", "restart": 0, "pid": "dead"}, {"token": "other", "restart": 1}, True),
        ({"pid": "no number", "age": 61}, {}, True),
        ({"pid": "no number"}, {}, False),
    ],
)
def test_who_takes_over_a_lease(tmp_path, monkeypatch, lease, mine, is_taken):
    pid = {"pid": dead_pid()} if lease.get("pid") == "dead" else {}
    write_lease(tmp_path, **{**lease, **pid})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "the same --rdzv-id")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(mine.get("restart", 0)))
    monkeypatch.setattr(checkpointer_module, "token_of_torchrun", lambda *name: "" if name else mine.get("token", ""))

    def renewed(_):
        os.utime(tmp_path / folders.LEASE)

    monkeypatch.setattr(folders, "_pause", renewed)  # its holder is alive
    checkpoints = Checkpointer(tmp_path)
    if is_taken:
        assert checkpoints.save(1, {"w": W}).error is None
        checkpoints.close()
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        return
    with pytest.raises(CheckpointError, match="another run is using it"):
        checkpoints.save(1, {"w": W})
    assert [path.name for path in tmp_path.iterdir()] == [folders.LEASE]


def test_a_lease_of_another_host_is_waited_for(tmp_path, monkeypatch):
    write_lease(tmp_path, machine="other", age=30)
    waited = []

    def pause(seconds):
        waited.append(seconds)
        path = tmp_path / folders.LEASE
        monkeypatch.setattr(folders, "_STALE_S", 60 - sum(waited))  # as if the time had passed
        assert path.exists()

    monkeypatch.setattr(folders, "_pause", pause)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.acquire()
    assert 29 <= sum(waited) <= 31


@pytest.mark.parametrize("guarded", [False, True])
def test_a_lease_from_the_future_is_watched_and_the_wait_told(tmp_path, monkeypatch, caplog, guarded):
    """Another host's clock was ahead, or this one's has been set back: the age says nothing."""
    write_lease(tmp_path, machine="other", age=61 if guarded else -3600)
    stale = 6 if guarded else 60
    monkeypatch.setattr(folders, "_STALE_S", stale)
    if guarded:  # a process that was taking the lease over was killed
        (tmp_path / ".lease.json.taking").touch()
        os.utime(tmp_path / ".lease.json.taking", (time.time() + 3600,) * 2)
    waited = []
    monkeypatch.setattr(folders, "_pause", waited.append)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.acquire()
    assert stale - 1 <= sum(waited) <= stale + 1
    (told,) = caplog.messages
    if guarded:
        assert told == f"waiting up to 6 s for another process to take over {tmp_path / '.lease.json'}: " + str(
            tmp_path / ".lease.json.taking"
        )
    else:
        assert told.startswith(
            f"waiting up to 60 s to save to {tmp_path}, which another run may use: run other on host "
        )
    assert names(tmp_path) == []


def test_of_many_that_take_over_one_succeeds(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.gc, "collect", lambda: None)  # before each refusal, over all that other tests have left
    pid = dead_pid()
    for number in range(20):
        root, taken, refused = tmp_path / str(number), [], []
        write_lease(root, pid=pid)
        begin = threading.Barrier(6)

        def take(root=root, begin=begin, taken=taken, refused=refused):
            begin.wait()
            try:
                taken.append(folders.Lease(root))
            except CheckpointError as error:
                refused.append(error)

        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(taken), len(refused)) == (1, 5)
        taken[0].check()
        assert [path.name for path in root.iterdir()] == [folders.LEASE]


def test_a_lease_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_RENEW_S", 0.001)
    lease = folders.Lease(tmp_path)
    path = tmp_path / folders.LEASE
    os.utime(path, (1, 1))
    while path.stat().st_mtime == 1:  # a hang would end it
        pass
    lease.release()
    assert not path.exists()
    with pytest.raises(CheckpointError, match="this run has released it"):
        lease.check()


def test_the_lease_of_another_run_is_neither_renewed_nor_removed(tmp_path):
    lease, path = folders.Lease(tmp_path), tmp_path / folders.LEASE
    write_lease(tmp_path, age=30)
    before, is_over = path.stat().st_mtime, iter([False, True])
    folders._renew(path, lease.attempt, SimpleNamespace(acquire=lambda *_: next(is_over)))
    assert path.stat().st_mtime == before
    lease._take_away((None, 0.0), 0.0)  # it looked at a lease that somebody else has replaced since
    assert path.stat().st_mtime == before


def lose(root, how):
    """Take a folder, or the lease of the run that saves there, away from it."""
    if how == "taken over":
        write_lease(root)
    elif how == "lease deleted":
        (root / folders.LEASE).unlink()
    elif how == "link retargeted":
        (other := root.with_name("other")).mkdir()
        root.unlink()
        root.symlink_to(other)
    elif how == "copied":  # with the lease in it, as when a disk is exchanged
        shutil.copytree(root, root.with_name("copy"))
        root.rename(root.with_name("old"))
        root.with_name("copy").rename(root)
    else:
        root.rename(root.with_name("moved"))
        if how == "another in its place":  # as where it is unmounted
            root.mkdir()


LOST = {
    "taken over": "another run has taken it over, which this one was too slow to prevent",
    "lease deleted": "its lease has been deleted",
    "link retargeted": "this path leads to another folder than at the start",
    "copied": "this path leads to another folder than at the start",
    "moved": "this path leads to another folder than at the start",
    "another in its place": "this path leads to another folder than at the start",
}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("when", ["before", "commit"])
@pytest.mark.parametrize("how", LOST)
def test_who_has_lost_folder_or_lease_ends_and_changes_nothing(tmp_path, background, when, how):
    def on_stage(stage):
        if stage == when and armed:
            lose(root, how)
            there.extend(sorted(tmp_path.rglob("*")))

    armed, there, root = False, [], tmp_path / "run"
    if how == "link retargeted":
        (tmp_path / "disk").mkdir()
        root.symlink_to(tmp_path / "disk")
    checkpoints = Checkpointer(root, keep_last=1, async_save=background, on_stage=on_stage)
    checkpoints.save(1, {"w": W})
    checkpoints.wait()
    armed = True
    on_stage("before")

    def save(step):
        checkpoints.save(step, {"w": W + 1})
        checkpoints.wait()

    for step in (1, 2):
        with pytest.raises(LeaseLostError) as caught:  # not only told by a warning, as where a disk is full
            save(step)
        text = str(caught.value)
        assert text.startswith(f"cannot save to {root}: {LOST[how]}\n  "), text
        assert "\n  try: " in text
        armed = False
    left = {path for path in tmp_path.rglob("*") if ".saving-" not in str(path)}
    assert left == {path for path in there if ".saving-" not in str(path)}, "nothing is made anew, nothing deleted"
    (kept,) = tmp_path.rglob("step-00000001") if how != "copied" else [tmp_path / "old" / "step-00000001"]
    load_checkpoint(kept, {"w": (w := torch.zeros(2, 3))})
    assert torch.equal(w, W)
    checkpoints.close()
    if how == "taken over":
        assert json.loads((root / folders.LEASE).read_text())["run"] == "other"


@pytest.mark.parametrize("parents", [False, True])
def test_a_link_that_leads_nowhere_is_named(tmp_path, parents):
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    root = tmp_path / "link" / "run" if parents else tmp_path / "link"
    for save in (lambda: save_checkpoint(root / "c", {"w": W}), Checkpointer(root, on_error="raise").acquire):
        with pytest.raises(
            CheckpointError, match=f"{tmp_path}/link is a link to {tmp_path}/unmounted, where nothing is"
        ):
            save()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file is no folder"):
        Checkpointer(tmp_path / "file").acquire()


def test_what_another_run_has_left_is_neither_replaced_nor_deleted(tmp_path):
    with Checkpointer(tmp_path, keep_last=None) as first:
        for step in (1, 2, 3):
            first.save(step, {"w": W}, "first")
    with Checkpointer(tmp_path, keep_last=1, on_error="raise") as second:
        second.save(4, {"w": W})
        second.save(5, {"w": W})
        assert names(tmp_path) == [f"step-0000000{step}" for step in (1, 2, 3, 5)]
        with pytest.raises(CheckpointError, match="another run has saved it, and this one has not gone on from there"):
            second.save(3, {"w": W})
    assert read_metadata(tmp_path / "step-00000003").extra == "first"
    with Checkpointer(tmp_path, keep_last=1, on_error="raise") as third:
        third.load({"w": W.clone()}, path=tmp_path / "step-00000003")  # goes on with the first
        third.save(3, {"w": W}, "third")
        assert names(tmp_path) == ["step-00000003", "step-00000005"]
    assert read_metadata(tmp_path / "step-00000003").extra == "third"


def test_a_run_that_goes_back_sets_the_newer_ones_aside_when_the_next_is_there(tmp_path):
    with Checkpointer(tmp_path, keep_last=None, on_error="raise") as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, {"w": W * step})
        assert checkpoints.at(2) == tmp_path / "step-00000002"
        with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 7\n  complete: step 1, "):
            checkpoints.load({"w": W.clone()}, step=7)
        with pytest.raises(ValueError, match="both are given"):
            checkpoints.load({"w": W.clone()}, step=2, path=tmp_path)
        checkpoints.load({"w": (w := torch.zeros(2, 3))}, step=2)
        assert torch.equal(w, W * 2)
        assert checkpoints.latest() == tmp_path / "step-00000004", "as long as there is nothing new"
        with pytest.raises(TypeError):
            checkpoints.save(3, {"w": 3})
        assert names(tmp_path) == [f"step-0000000{step}" for step in (1, 2, 3, 4)]
        checkpoints.save(3, {"w": W})
        kept = [f"step-0000000{step}" for step in (1, 2, 3)]
        assert names(tmp_path) == [*kept, "undone-step-00000003", "undone-step-00000004"]
        checkpoints.save(4, {"w": W})
        checkpoints.load({"w": w}, path=tmp_path / "undone-step-00000004")
        assert torch.equal(w, W * 4)
        assert checkpoints.latest() == tmp_path / "step-00000004"


def test_a_damaged_newest_is_told_and_set_aside_for_the_one_before(tmp_path):
    with Checkpointer(tmp_path, keep_last=None, on_error="raise") as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, {"w": W * step})
        (data,) = (tmp_path / "step-00000004").glob("*.safetensors")
        os.truncate(data, data.stat().st_size - 1)
        (tmp_path / "step-00000003" / "checkpoint.json").write_text("{}")
        with pytest.warns(UserWarning, match="cannot be loaded, and the one before is tried") as told:
            checkpoints.load({"w": (w := torch.zeros(2, 3))})
        assert [str(one.message).partition(" cannot")[0] for one in told] == ["step-00000004", "step-00000003"]
        assert torch.equal(w, W * 2)
        for chosen in ({"step": 4}, {"path": tmp_path / "step-00000004"}):  # what is asked for by name is not replaced
            with pytest.raises(CheckpointError, match="is not as long as when it was written"):
                checkpoints.load({"w": w.clone()}, **chosen)
        with pytest.warns(UserWarning, match="the one before is tried"):
            checkpoints.load({"w": w})
        checkpoints.save(3, {"w": W * 7})
        kept = [f"step-0000000{step}" for step in (1, 2, 3)]
        assert names(tmp_path) == [*kept, "undone-step-00000003", "undone-step-00000004"]
        checkpoints.load({"w": w})
        assert torch.equal(w, W * 7)


def test_a_forked_process_does_not_release_the_lease(tmp_path):
    lease = folders.Lease(tmp_path)
    child = os.fork()
    if not child:
        lease.release()
        os._exit(0)
    os.waitpid(child, 0)
    lease.check()
    assert (tmp_path / folders.LEASE).exists()
    lease.release()


# -- in the background -----------------------------------------------------------------------------------------------


def test_training_goes_on_while_the_copies_are_written(tmp_path):
    go, begin = threading.Event(), time.perf_counter()
    checkpoints = Checkpointer(tmp_path, async_save=True, on_stage=lambda stage: stage != "data" or go.wait(60))
    w = W.clone()
    assert checkpoints.save(1, {"w": w}) is None
    assert names(tmp_path) in ([], [name for name in names(tmp_path) if ".saving-" in name])
    w.fill_(-1)  # training goes on, and nothing has been written yet
    go.set()
    saved = checkpoints.wait()
    assert saved.path == tmp_path / "step-00000001"
    assert 0 <= saved.seconds < time.perf_counter() - begin
    assert checkpoints.wait() is None
    checkpoints.load({"w": w})
    assert torch.equal(w, W)
    memory = {name: copy.data_ptr() for name, copy in checkpoints._staging._memory.items()}
    checkpoints.save(2, {"w": w})
    assert {name: copy.data_ptr() for name, copy in checkpoints._staging._memory.items()} == memory
    assert checkpoints.save(3, {"w": w}).step == 2
    assert checkpoints.close().step == 3


def test_copies_in_the_background_have_the_dtype_of_now(tmp_path):
    with Checkpointer(tmp_path, async_save=True) as checkpointer:
        for step, dtype in enumerate((torch.float64, torch.float32), start=1):
            checkpointer.save(step, {"w": W.to(dtype)})
        checkpointer.load({"w": (w := torch.zeros(2, 3))})
    assert torch.equal(w, W)


def test_a_long_wait_for_the_background_is_told(tmp_path, monkeypatch, caplog):
    go = threading.Event()

    class Answer(logging.Handler):
        def emit(self, record):
            go.set()

    monkeypatch.setattr(checkpointer_module, "_SAY_S", 0.0)
    checkpoints = Checkpointer(tmp_path, async_save=True, on_stage=lambda stage: stage != "data" or go.wait(60))
    logger = logging.getLogger(checkpointer_module.__name__)
    logger.addHandler(answer := Answer())
    try:
        checkpoints.save(1, {"w": W})
        assert checkpoints.wait().error is None
    finally:
        logger.removeHandler(answer)
    assert caplog.messages == [f"waiting for the checkpoint of step 1 in {tmp_path}"]
    checkpoints.close()


def test_what_went_wrong_in_the_background_is_told_by_the_next_call(tmp_path):
    checkpoints = Checkpointer(tmp_path, async_save=True)
    assert checkpoints.save(1, {"w": 3}) is None
    with pytest.raises(TypeError, match="'w' is an int, not a tensor"):
        checkpoints.save(2, {"w": W})
    assert checkpoints.wait() is None, "the second was not begun"
    (tmp_path / "step-00000003").write_text("in the way")
    checkpoints.save(3, {"w": W})
    with pytest.warns(UserWarning, match="step 3 has not been saved: .* something else has that name"):
        ended = checkpoints.close()
    assert ended is not None
    assert ended.error is not None
    assert ended.error.endswith("\n  try: a name that is free")


@pytest.mark.parametrize("background", [False, True])
def test_an_error_that_nobody_thought_of_is_told(tmp_path, background):
    def surprise(stage):
        if stage == "done":
            raise KeyError("surprise")

    checkpoints = Checkpointer(tmp_path, async_save=background, on_stage=surprise)
    if background:
        checkpoints.save(1, {"w": W})
    with pytest.raises(KeyError, match="surprise"):
        checkpoints.wait() if background else checkpoints.save(1, {"w": W})


# -- full disks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5])
def test_a_disk_that_is_full_at_any_write(tmp_path, monkeypatch, at):
    monkeypatch.setattr(writer_module, "BLOCK", 512)
    tensors = {"w": torch.randn(300)}
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, tensors)
    left = at
    real = os.write

    def write(file, data):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        return real(file, data)

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(os, "write", write)
        saved = checkpoints.save(2, tensors)
    if at == 5:
        assert saved.error is None, "more writes than this test knows of"
        return
    assert saved.path is None
    assert "could not be written: No space left on device" in saved.error
    assert f"try: free space under {tmp_path}" in saved.error
    assert [str(one.message) for one in caught] == [f"step 2 has not been saved: {saved.error}"]
    assert names(tmp_path) == ["step-00000001"]
    checkpoints.load({"w": torch.zeros(300)})
    assert checkpoints.save(2, tensors).error is None


LIMITED = """
import resource, sys, torch, warnings
from hyper_parallel.core.checkpoint import Checkpointer
w = torch.randn(100_000)
checkpoints = Checkpointer(sys.argv[1])
assert checkpoints.save(1, {"w": w[:10]}).error is None
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
warnings.simplefilter("ignore")
print(checkpoints.save(2, {"w": w}).error)
print(checkpoints.latest().name)
"""


@pytest.mark.tier("test")
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="the system has no limit on the size of files")
def test_a_limit_of_the_system_is_met(tmp_path):
    done = warm.run([sys.executable, "-c", LIMITED, str(tmp_path)])
    assert "could not be written: File too large\n  after " in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "step-00000001"


# -- power cuts ------------------------------------------------------------------------------------------------------


class Disk:
    """A folder of which it is recorded what a power cut may leave, after each change.

    Bytes of a file are there after its fsync; of the names in a folder, those from before its last fsync, and any
    number of the changes since, in their order. Folders do not wait for each other.

    Args:
        top: the folder; empty.
        forgets: of a path, whether its fsync does nothing.
    """

    def __init__(self, top, monkeypatch, forgets=lambda path: False):
        self.top, self.forgets, self.opened = top, forgets, {}
        self.nodes = {top: {"kept": {}, "since": []}}  # by path: a folder like this, or a file {"bytes", "kept"}
        self.committed, self.states = 0, {}
        for name in ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, partial(getattr(self, name), getattr(os, name)))

    def path(self, name, dir_fd=None):
        path = Path(os.path.abspath(os.path.join(self.opened.get(dir_fd, ""), name)))
        return path if self.top in (path, *path.parents) and not path.name.startswith(folders.LEASE) else None

    def change(self, path, **names):
        """Note what names in the folder of a path lead to now, None: to nothing."""
        self.nodes[path.parent]["since"].append(names)
        self.note()

    def note(self):
        for state in self.after_cuts(self.nodes[self.top]):
            self.states.setdefault(repr((self.committed, state)), (self.committed, state))

    def after_cuts(self, node):
        if "bytes" in node:
            return [node["kept"]]
        found = []
        for number in range(len(node["since"]) + 1):
            names = dict(node["kept"])
            for change in node["since"][:number]:
                names.update(change)
            names = {name: one for name, one in names.items() if one is not None}
            for states in itertools.product(*map(self.after_cuts, names.values())):
                found.append(dict(zip(names, states, strict=True)))
        return found

    # what the system is asked for

    def open(self, real, name, flags, mode=0o777, *, dir_fd=None):
        path = self.path(name, dir_fd)
        file = real(name, flags, mode, dir_fd=dir_fd)
        if path is not None:
            self.opened[file] = path
            if path not in self.nodes:
                self.nodes[path] = {"bytes": b"", "kept": b""}
                self.change(path, **{path.name: self.nodes[path]})
        return file

    def write(self, real, file, data):
        count = real(file, data)
        if file in self.opened:
            self.nodes[self.opened[file]]["bytes"] += bytes(data[:count])
        return count

    def fsync(self, real, file):
        path = self.opened.get(file)
        if path is not None and not self.forgets(path.relative_to(self.top).as_posix()):
            node = self.nodes[path]
            if "bytes" in node:
                node["kept"] = node["bytes"]
            else:
                for change in node["since"]:
                    node["kept"].update(change)
                node["since"].clear()
            self.note()

    def close(self, real, file):
        self.opened.pop(file, None)
        real(file)

    def mkdir(self, real, name, mode=0o777, *, dir_fd=None):
        real(name, mode, dir_fd=dir_fd)
        if (path := self.path(name, dir_fd)) is not None:
            self.nodes[path] = {"kept": {}, "since": []}
            self.change(path, **{path.name: self.nodes[path]})

    def rename(self, real, old, new):
        real(old, new)
        old, new = self.path(old), self.path(new)
        assert old.parent == new.parent
        self.nodes.update({new / path.relative_to(old): self.nodes.pop(path) for path in self.below(old)})
        self.change(new, **{old.name: None, new.name: self.nodes[new]})

    def unlink(self, real, name, *, dir_fd=None):
        real(name, dir_fd=dir_fd)
        if (path := self.path(name, dir_fd)) is not None:
            del self.nodes[path]
            self.change(path, **{path.name: None})

    def rmdir(self, real, name, *, dir_fd=None):
        path = self.path(name, dir_fd)
        real(name, dir_fd=dir_fd)
        self.nodes = {each: node for each, node in self.nodes.items() if each not in self.below(path)}
        self.change(path, **{path.name: None})

    def below(self, path):
        return [each for each in self.nodes if path in (each, *each.parents)]


def put_down(state, folder):
    for name, one in state.items():
        if isinstance(one, bytes):
            (folder / name).write_bytes(one)
        else:
            (folder / name).mkdir()
            put_down(one, folder / name)


def save_five_times(disk):
    """Save steps 1, 2, 2, 3, 4, of which the newest two are kept; the value of a tensor says which save it was."""
    root, w = disk.top / "runs" / "llama", torch.zeros(2, 3)

    def on_stage(stage):
        if stage == "committed":
            disk.committed = int(w[0, 0])
            disk.note()

    with Checkpointer(root, keep_last=2, on_error="raise", on_stage=on_stage) as checkpoints:
        for step in (1, 2, 2, 3, 4):
            checkpoints.save(step, {"w": w.add_(1)})


def losses_of(disk, tmp_path):
    """Yield what is not as it should be after a power cut: all that is there loads, and the newest is the last."""
    for number, (committed, state) in enumerate(disk.states.values()):
        (folder := tmp_path / str(number)).mkdir()
        put_down(state, folder)
        root, newest = folder / "runs" / "llama", 0
        for name in folders.saved_names(root):
            path = folders.found(root / name)
            try:
                if path is not None:
                    load_checkpoint(path, {"w": (w := torch.zeros(2, 3))})
                    newest = max(newest, int(w[0, 0]))
            except CheckpointError as error:
                yield str(error)
        if newest < committed:
            yield f"save {committed} was complete, and {newest} is the newest there: {state}"


def replaced_too_early(attempt, folder):
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(attempt, folder)
    folders.sync_folder(folder.parent)


def deleted_in_place(folder, ignore_errors=False):
    for path in sorted(folder.iterdir(), reverse=True):  # the record last
        path.unlink()
    folder.rmdir()


def test_a_power_cut_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path, monkeypatch):
    (top := tmp_path / "disk").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", deleted_in_place)  # in the worst order
        save_five_times(disk := Disk(top, patch))
    assert len(disk.states) > 40
    assert list(losses_of(disk, tmp_path)) == []


@pytest.mark.parametrize(
    "forgotten", [r".*\.safetensors", r".*\.json", r".*/\.step-\d+\.saving-\w+", "runs/llama", r"\."]
)
def test_an_fsync_that_is_left_out_is_noticed(tmp_path, monkeypatch, forgotten):
    """That is, of the data, of the record, of the names of both, of the checkpoint's name, of the folder's name."""
    (top := tmp_path / "disk").mkdir()
    with monkeypatch.context() as patch:
        save_five_times(disk := Disk(top, patch, re.compile(forgotten).fullmatch))
    assert next(losses_of(disk, tmp_path), None)


@pytest.mark.parametrize("which", ["replaced", "old"])
def test_what_is_deleted_before_the_new_name_is_on_the_disk_is_noticed(tmp_path, monkeypatch, which):
    (top := tmp_path / "disk").mkdir()
    with monkeypatch.context() as patch:
        if which == "replaced":
            patch.setattr(writer_module, "put_in_place", replaced_too_early)
        else:
            patch.setattr(folders, "remove", deleted_in_place)
        save_five_times(disk := Disk(top, patch))
    assert next(losses_of(disk, tmp_path), None)


# -- optimizers ------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), foreach=False),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True, momentum=0.5),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "groups": lambda params: torch.optim.AdamW([{"params": params[:1], "lr": 0.3}, {"params": params[1:]}], lr=0.1),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def make_steps(model, optimizer, numbers):
    for number in numbers:
        optimizer.zero_grad()
        model(torch.randn(2, 3, generator=torch.Generator().manual_seed(number))).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps_made", [0, 1])
def test_an_optimizer_goes_on_where_it_was(tmp_path, kind, steps_made):
    model = net()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    make_steps(model, optimizer, range(3))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5  # as a schedule does
    tensors, groups = optimizer_tensors(model, optimizer)
    save_checkpoint(tmp_path / "c", {**model_tensors(model), **tensors}, {"optimizer": groups})
    make_steps(model, optimizer, range(3, 6))

    again = net()
    resumed = OPTIMIZERS[kind](list(again.parameters()))
    make_steps(again, resumed, range(steps_made))
    targets = {**model_tensors(again), **optimizer_targets(again, resumed, read_metadata(tmp_path / "c"))}
    load_optimizer_scalars(resumed, load_checkpoint(tmp_path / "c", targets)["optimizer"])
    assert {name: tuple(value.shape) for name, value in targets.items() if name.startswith("optimizer.")} == {
        name: tuple(value.shape) for name, value in tensors.items()
    }
    make_steps(again, resumed, range(3, 6))
    for name, param in model.named_parameters():
        assert torch.equal(param, again.get_parameter(name)), name


@pytest.mark.parametrize(("counts_there", "device"), [(False, "cpu"), (True, "meta")])
def test_steps_are_counted_where_the_optimizer_counts_them(tmp_path, counts_there, device):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c", optimizer_tensors(model, optimizer)[0])
    other = nn.Linear(2, 2, device="meta")
    fresh = torch.optim.AdamW(other.parameters(), capturable=counts_there)
    made = optimizer_targets(other, fresh, read_metadata(tmp_path / "c"))
    assert {value.device.type for name, value in made.items() if name.endswith(".step")} == {device}


def test_optimizers_that_cannot_be_saved_by_name():
    model = net()
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="parameter 0 of its group 0 is in none of the modules"):
        optimizer_tensors(model, other)
    odd = torch.optim.SGD(model.parameters(), lr=0.1)
    odd.state[model[0].weight]["seen"] = [1]
    with pytest.raises(ValueError, match=r"'seen' of '0\.weight' is a list, not a tensor"):
        optimizer_tensors(model, odd)
    with pytest.raises(ValueError, match="it has 1 groups of parameters, and 2 were saved"):
        load_optimizer_scalars(other, [{}, {}])


def test_names_are_those_of_the_model_before_it_was_wrapped():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = net(), net()
    wrapped[0] = checkpoint_wrapper(wrapped[0])
    wrapped[2] = torch.compile(wrapped[2], backend="eager")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    make_steps(wrapped, optimizer, [0])
    assert list(model_tensors(wrapped)) == list(model_tensors(plain))
    assert list(optimizer_tensors(wrapped, optimizer)[0]) == [
        f"optimizer.{name}.momentum_buffer" for name, _ in plain.named_parameters()
    ]


def test_a_row_that_is_longer_than_the_buffer_is_read_in_parts(tmp_path):
    saved, part = torch.arange(4.0 * 5 * 6).view(4, 5, 6), torch.empty(2, 3, 2)
    (tmp_path / "box").write_bytes(b"head" + saved.numpy().tobytes())
    with (tmp_path / "box").open("rb") as file:
        few = torch.empty(2 * 6 * 4, dtype=torch.uint8)  # two of the five rows of a matrix
        reader_module._copy_range(file.fileno(), 4, saved.shape, (1, 1, 3), part.shape, part, few)
    assert part.equal(saved[1:3, 1:4, 3:5])
