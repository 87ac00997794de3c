"""Errors of context parallelism: four parts, before anything is communicated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from errors_kit import assert_says, error_on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import sim
from hyper_parallel.core.context_parallel import ContextParallel, context_parallel
from hyper_parallel.models import Llama, LlamaConfig

pytestmark = pytest.mark.sim


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp")[-len(sizes) :])


def split(shape: tuple[int, ...], dim: int) -> Callable[[], object]:
    return lambda: ContextParallel(mesh_of(4), 1).split(torch.zeros(shape), dim)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def attend(q: object, k: object = None, v: object = None, degree: int = 1, **options: object) -> Callable[[], object]:
    k = q if k is None else k
    return lambda: ContextParallel(mesh_of(4), degree).attend(q, k, k if v is None else v, **options)


SPLIT, PLACES = "cannot split dim 1 over the sequence", "cannot tell the positions of a rank's tokens"
RING, UNEVEN = "ranks: 4 of the ring x 1 of Ulysses", "a rank holds two intervals of one length, so an even number"
SHAPES = "\n  …\n  try: q (batch, heads, seq, head_dim); k and v too, with heads that divide those of q"
Q = zeros(1, 4, 4, 8)

# How many ranks there are, what each does, and what is said.
MISTAKES: dict[str, tuple[int, Callable[[], object], str]] = {
    "a mesh of several axes": (
        4,
        lambda: ContextParallel(mesh_of(2, 2)),
        "cannot set up context parallelism: the mesh has 2 axes, and a sequence is split over one\n"
        "  mesh: dp=2, cp=2   ranks: [0, 1, 2, 3]\n  try: mesh['cp']",
    ),
    "ranks out of order": (
        2,
        lambda: ContextParallel(DeviceMesh("cpu", [1, 0], mesh_dim_names=("cp",))),
        "cannot set up context parallelism: the ranks of the mesh are not in increasing order, and process groups have "
        "no other\n  mesh: cp=2   ranks: [1, 0]\n  try: the axis of a mesh from init_device_mesh",
    ),
    **{
        f"degree {degree}": (
            4,
            lambda degree=degree: ContextParallel(mesh_of(4), degree),
            "cannot split sequences over 4 ranks: ulysses_degree does not divide the number of ranks\n"
            f"  ulysses_degree: {degree}   ranks: 4\n  try: ulysses_degree = one of [1, 2, 4]",
        )
        for degree in (3, 0, -1, 8)
    },
    "a length that is no multiple": (
        4,
        split((2, 12), 1),
        f"{SPLIT}: its size 12 is not a multiple of 8\n  shape: (2, 12)   {RING}\n"
        "  try: a length of 8 or 16, padded with targets of -100",
    ),
    "a length that is too short": (
        4,
        split((2, 3), -1),
        "cannot split dim -1 over the sequence: its size 3 is not a multiple of 8\n"
        f"  shape: (2, 3)   {RING}\n  try: a length of 8, padded with targets of -100",
    ),
    "a dim that is not there": (
        4,
        split((8,), 1),
        f"{SPLIT}: a tensor of 1 dims has no such dim\n  shape: (8,)   {RING}\n  try: dim=1 of (batch, seq)",
    ),
    "a DTensor": (
        2,
        lambda: ContextParallel(mesh := mesh_of(2)).split(
            distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()], src_data_rank=None)
        ),
        f"InvalidType: {SPLIT}: x is a DTensor, not a plain…\n  …\n  try: …",
    ),
    **{
        f"{tokens} tokens": (
            2,
            lambda tokens=tokens: ContextParallel(mesh_of(2), 1).positions(tokens),
            f"{PLACES}: {blame}\n  tokens on this rank: {tokens}   ranks: 2 of the ring x 1 of Ulysses\n"
            "  try: sequences whose length is a multiple of 4, cut by ContextParallel.split",
        )
        for tokens, blame in ((3, UNEVEN), (0, "there are none"))
    },
    "heads that the ranks cannot share": (
        4,
        attend(zeros(1, 6, 4, 8), zeros(1, 3, 4, 8), degree=4),
        "cannot share 6 query heads among 4 ranks: ulysses_degree must divide them\n"
        "  heads of this rank: 6 of queries, 3 of keys   ranks: 1 of the ring x 4 of Ulysses\n"
        "  try: ulysses_degree = one of [1, 2]",
    ),
    "another head_dim of v": (
        4,
        attend(Q, Q, zeros(1, 4, 4, 6)),
        f"cannot attend: q needs four dims, and k and v the same four…{SHAPES}",
    ),
    "three dims": (
        4,
        attend(Q, zeros(4, 4, 8)),
        f"cannot attend: q needs four dims, and k and v the same four…{SHAPES}",
    ),
    "fewer keys": (
        4,
        attend(Q, zeros(1, 4, 2, 8)),
        "cannot attend: q and k differ in batch, tokens or head_dim, and every rank needs queries and keys…" + SHAPES,
    ),
    "heads that do not divide": (
        4,
        attend(Q, zeros(1, 3, 4, 8)),
        f"cannot attend: 4 query heads cannot share 3 key and value heads evenly…{SHAPES}",
    ),
    "two dtypes": (
        4,
        attend(Q, Q.bfloat16()),
        "InvalidType: cannot attend: q, k and v must be of one floating dtype\n"
        "  dtypes: q torch.float32, k torch.bfloat16, v torch.bfloat16\n  try: k.to(q.dtype)",
    ),
    "integers": (4, attend(Q.long()), "InvalidType: …must be of one floating dtype…\n  …\n  try: …"),
    "an odd number of tokens": (4, attend(zeros(1, 4, 3, 8)), f"…{UNEVEN}\n  …\n  try: …"),
    "documents of another shape": (
        4,
        attend(Q, documents=zeros(1, 16, dtype=torch.int64)),
        "cannot attend: documents must have an id for each token of this rank\n"
        "  documents: (1, 16) of torch.int64   tokens of this rank: (1, 4)\n"
        "  try: cp.split(ids), where ids (batch, seq) numbers the document of every token",
    ),
    "documents that are no whole numbers": (
        4,
        attend(Q, documents=zeros(1, 4)),
        "InvalidType: …documents must be whole numbers…\n  …\n  try: …",
    ),
    "a list of documents": (
        4,
        attend(Q, documents=[0]),
        "InvalidType: …documents is a list, not a plain tensor…\n  …\n  try: …",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained_on_every_rank_before_anything_is_sent(name: str) -> None:
    world_size, call, expected = MISTAKES[name]
    assert_says(error_on_ranks(call, world_size), expected)


@sim.ranks(3, backends=("sim",))
def test_a_mesh_without_the_calling_rank(ctx) -> None:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match="the calling rank is not on the mesh"):
            ContextParallel(mesh)


def test_models_without_the_seams() -> None:
    class Positioned(nn.Linear):
        positions = None

    hint = "a Llama of hyper_parallel.models, or call ContextParallel.attend and .positions in your model"
    for model, blame in [
        (nn.Linear(2, 2), "no attribute 'positions' of the model, no attribute 'attend' of its attention modules"),
        (Positioned(2, 2), "no attribute 'attend' of its attention modules"),
        (Llama(LlamaConfig(num_hidden_layers=1)).layers, "no attribute 'positions' of the model"),
    ]:
        assert_says(
            error_on_ranks(lambda model=model: context_parallel(model, mesh_of(2)), 2),
            f"InvalidType: cannot make the model attend over several ranks: {blame}\n"
            f"  model: {type(model).__name__}\n  try: {hint}",
        )


def test_ranks_with_different_lengths_are_told_apart_by_the_simulator() -> None:
    def body(degree: int) -> None:
        tokens = 2 + 2 * (dist.get_rank() == 1)
        q = torch.zeros(1, 2, tokens, 4)
        ContextParallel(mesh_of(2), degree).attend(q, q, q)

    for degree in (1, 2):
        with pytest.raises(sim.SimError):
            sim.run(body, world_size=2, args=(degree,))
