"""Errors of context parallelism: four parts, before anything is communicated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import sim
from hyper_parallel.core.context_parallel import ContextParallel, context_parallel
from hyper_parallel.models import Llama, LlamaConfig

pytestmark = pytest.mark.sim


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp")[-len(sizes) :])


def said(world_size: int, call) -> str:
    """Return what a call on every rank raises, which must be the same on all and come before any communication."""

    def body() -> str:
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        return f"{type(caught.value).__name__}: {caught.value}"

    with sim.world(world_size) as world:
        found = world.run(body)
        assert set(found) == {found[0]}
        assert not [event for event in world.trace.events if event.op != "barrier"], world.trace.summary()
    return found[0]


def test_a_mesh_of_several_axes() -> None:
    assert said(4, lambda: ContextParallel(mesh_of(2, 2))) == (
        "InvalidValue: cannot set up context parallelism: the mesh has 2 axes, and a sequence is split over one\n"
        "  mesh: dp=2, cp=2   ranks: [0, 1, 2, 3]\n"
        "  try: mesh['cp']"
    )


def test_ranks_out_of_order() -> None:
    def call() -> None:
        ContextParallel(DeviceMesh("cpu", [1, 0], mesh_dim_names=("cp",)))

    assert said(2, call) == (
        "InvalidValue: cannot set up context parallelism: the ranks of the mesh are not in increasing order, and "
        "process groups have no other\n"
        "  mesh: cp=2   ranks: [1, 0]\n"
        "  try: the axis of a mesh from init_device_mesh"
    )


@sim.ranks(3, backends=("sim",))
def test_a_mesh_without_the_calling_rank(ctx) -> None:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match="the calling rank is not on the mesh"):
            ContextParallel(mesh)


@pytest.mark.parametrize("degree", [3, 0, -1, 8])
def test_a_degree_that_does_not_divide(degree: int) -> None:
    assert said(4, lambda: ContextParallel(mesh_of(4), degree)) == (
        "InvalidValue: cannot split sequences over 4 ranks: ulysses_degree does not divide the number of ranks\n"
        f"  ulysses_degree: {degree}   ranks: 4\n"
        "  try: ulysses_degree = one of [1, 2, 4]"
    )


@pytest.mark.parametrize(
    ("shape", "dim", "message"),
    [
        (
            (2, 12),
            1,
            "InvalidValue: cannot split dim 1 over the sequence: its size 12 is not a multiple of 8\n"
            "  shape: (2, 12)   ranks: 4 of the ring x 1 of Ulysses\n"
            "  try: a length of 8 or 16, padded with targets of -100",
        ),
        (
            (2, 3),
            -1,
            "InvalidValue: cannot split dim -1 over the sequence: its size 3 is not a multiple of 8\n"
            "  shape: (2, 3)   ranks: 4 of the ring x 1 of Ulysses\n"
            "  try: a length of 8, padded with targets of -100",
        ),
        (
            (8,),
            1,
            "InvalidValue: cannot split dim 1 over the sequence: a tensor of 1 dims has no such dim\n"
            "  shape: (8,)   ranks: 4 of the ring x 1 of Ulysses\n"
            "  try: dim=1 of (batch, seq)",
        ),
    ],
)
def test_tensors_that_cannot_be_split(shape: tuple[int, ...], dim: int, message: str) -> None:
    assert said(4, lambda: ContextParallel(mesh_of(4), 1).split(torch.zeros(shape), dim)) == message


def test_only_plain_tensors_are_split() -> None:
    def call() -> None:
        mesh = mesh_of(2)
        ContextParallel(mesh).split(distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()], src_data_rank=None))

    assert said(2, call).startswith("InvalidType: cannot split dim 1 over the sequence: x is a DTensor, not a plain")


@pytest.mark.parametrize("tokens", [3, 0])
def test_a_number_of_tokens_that_no_rank_can_have(tokens: int) -> None:
    blame = "a rank holds two intervals of one length, so an even number" if tokens else "there are none"
    assert said(2, lambda: ContextParallel(mesh_of(2), 1).positions(tokens)) == (
        f"InvalidValue: cannot tell the positions of a rank's tokens: {blame}\n"
        f"  tokens on this rank: {tokens}   ranks: 2 of the ring x 1 of Ulysses\n"
        "  try: sequences whose length is a multiple of 4, cut by ContextParallel.split"
    )


SHAPES = "q (batch, heads, seq, head_dim); k and v too, with heads that divide those of q"


def attend(q: object, k: object = None, v: object = None, degree: int = 1, **options: object) -> str:
    k = q if k is None else k
    return said(4, lambda: ContextParallel(mesh_of(4), degree).attend(q, k, k if v is None else v, **options))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_heads_that_the_ranks_cannot_share() -> None:
    assert attend(zeros(1, 6, 4, 8), zeros(1, 3, 4, 8), degree=4) == (
        "InvalidValue: cannot share 6 query heads among 4 ranks: ulysses_degree must divide them\n"
        "  heads of this rank: 6 of queries, 3 of keys   ranks: 1 of the ring x 4 of Ulysses\n"
        "  try: ulysses_degree = one of [1, 2]"
    )


def test_shapes_that_do_not_go_together() -> None:
    for k, v, blame in [
        (zeros(1, 4, 4, 8), zeros(1, 4, 4, 6), "q needs four dims, and k and v the same four"),
        (zeros(4, 4, 8), None, "q needs four dims, and k and v the same four"),
        (zeros(1, 4, 2, 8), None, "q and k differ in batch, tokens or head_dim, and every rank needs queries and keys"),
        (zeros(1, 3, 4, 8), None, "4 query heads cannot share 3 key and value heads evenly"),
    ]:
        found = attend(zeros(1, 4, 4, 8), k, v)
        assert found.startswith(f"InvalidValue: cannot attend: {blame}")
        assert found.endswith(f"  try: {SHAPES}")


def test_dtypes_that_do_not_go_together() -> None:
    assert attend(zeros(1, 4, 4, 8), zeros(1, 4, 4, 8, dtype=torch.bfloat16)) == (
        "InvalidType: cannot attend: q, k and v must be of one floating dtype\n"
        "  dtypes: q torch.float32, k torch.bfloat16, v torch.bfloat16\n"
        "  try: k.to(q.dtype)"
    )
    assert "must be of one floating dtype" in attend(zeros(1, 4, 4, 8, dtype=torch.int64))


def test_an_odd_number_of_tokens() -> None:
    assert "a rank holds two intervals of one length, so an even number\n" in attend(zeros(1, 4, 3, 8))


def test_documents_that_do_not_fit() -> None:
    q = zeros(1, 4, 4, 8)
    assert attend(q, documents=zeros(1, 16, dtype=torch.int64)) == (
        "InvalidValue: cannot attend: documents must have an id for each token of this rank\n"
        "  documents: (1, 16) of torch.int64   tokens of this rank: (1, 4)\n"
        "  try: cp.split(ids), where ids (batch, seq) numbers the document of every token"
    )
    assert "documents must be whole numbers" in attend(q, documents=zeros(1, 4))
    assert "documents is a list, not a plain tensor" in attend(q, documents=[0])


def test_models_without_the_seams() -> None:
    class Positioned(nn.Linear):
        positions = None

    hint = "a Llama of hyper_parallel.models, or call ContextParallel.attend and .positions in your model"
    for model, blame in [
        (nn.Linear(2, 2), "no attribute 'positions' of the model, no attribute 'attend' of its attention modules"),
        (Positioned(2, 2), "no attribute 'attend' of its attention modules"),
        (Llama(LlamaConfig(num_hidden_layers=1)).layers, "no attribute 'positions' of the model"),
    ]:
        assert said(2, lambda model=model: context_parallel(model, mesh_of(2))) == (
            f"InvalidType: cannot make the model attend over several ranks: {blame}\n"
            f"  model: {type(model).__name__}\n  try: {hint}"
        )


def test_ranks_with_different_lengths_are_told_apart_by_the_simulator() -> None:
    def body(degree: int) -> None:
        tokens = 2 + 2 * (dist.get_rank() == 1)
        q = torch.zeros(1, 2, tokens, 4)
        ContextParallel(mesh_of(2), degree).attend(q, q, q)

    for degree in (1, 2):
        with pytest.raises(sim.SimError):
            sim.run(body, world_size=2, args=(degree,))
