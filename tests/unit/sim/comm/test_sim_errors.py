"""The full text of what the simulator finds, and what becomes of an exception on a rank."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import re
import signal
import threading
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sim
from sim.kernel import watchdog
from sim.kernel.waiting import RankThread

pytestmark = pytest.mark.sim


def text_of(body, world_size: int, error: type[BaseException]) -> str:
    """The error's text, with line numbers of this file left out."""
    with pytest.raises(error) as caught:
        sim.run(body, world_size)
    return re.sub(r"test_sim_errors\.py:\d+", "test_sim_errors.py:*", str(caught.value))


HINT = "  try: let every rank of the group call the same operation, with the same arguments, in the same order\n"
GROUPS = "  try: let every rank make the same groups and meshes, of the same ranks, in the same order\n"


def opposite_order(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in reversed(groups) if rank else groups:
        dist.barrier(group=group)


# What each rank does, of how many; the error, and its text but for the replay. "@" stands for a line of this file.
FOUND = {
    "different operations": (
        lambda rank: dist.broadcast(torch.ones(4), 1) if rank == 2 else dist.all_reduce(torch.ones(4)),
        4,
        sim.CollectiveMismatch,
        "the ranks of group 'world' do not agree on its operation #0\n"
        "  rank 0  all_reduce  SUM          float32 [4]  @\n"
        "  rank 1  all_reduce  SUM          float32 [4]  @\n"
        "* rank 2  broadcast        root=1  float32 [4]  @\n"
        "  rank 3  all_reduce  SUM          float32 [4]  @\n"
        f"  differs: operation (all_reduce on ranks 0-1, 3, broadcast on rank 2)\n{HINT}",
    ),
    "the rank whose splits differ": (
        lambda rank: dist.all_to_all_single(
            torch.empty(3, 2), torch.ones(3, 2), [1, 1, 1], [1, 2, 0] if rank == 1 else [1, 1, 1]
        ),
        3,
        sim.CollectiveMismatch,
        "the ranks of group 'world' do not agree on its operation #0\n"
        "  rank 0  all_to_all      float32 send=[1, 1, 1] recv=[1, 1, 1]  @\n"
        "* rank 1  all_to_all      float32 send=[1, 2, 0] recv=[1, 1, 1]  @\n"
        "  rank 2  all_to_all      float32 send=[1, 1, 1] recv=[1, 1, 1]  @\n"
        "  differs: rank 1 sends 4 elements to rank 1, which expects 2 from it; "
        "rank 1 sends 0 elements to rank 2, which expects 2 from it\n"
        "  try: let the output split of each rank be what the others' input splits send to it\n",
    ),
    "different devices": (
        lambda rank: dist.all_reduce(torch.ones(2, device="meta" if rank == 1 else "cpu")),
        3,
        sim.CollectiveMismatch,
        "the ranks of group 'world' do not agree on its operation #0\n"
        "  rank 0  all_reduce  SUM    float32 [2] on cpu   @\n"
        "* rank 1  all_reduce  SUM    float32 [2] on meta  @\n"
        "  rank 2  all_reduce  SUM    float32 [2] on cpu   @\n"
        "  differs: device (meta on rank 1, cpu on ranks 0, 2)\n"
        "  try: let all ranks have tensors on meta, or all of them tensors with data\n",
    ),
    "groups of different ranks": (
        lambda rank: dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1] if rank == 0 else [0, 1, 2])),
        3,
        sim.CollectiveMismatch,
        "the ranks do not agree on the members of the group that they made as number 1\n"
        "* rank 0  of ranks 0-1    @\n"
        "  rank 1  of ranks 0-2    @\n"
        "  rank 2  of ranks 0-2    @\n"
        f"  differs: group (ranks 0-1 on rank 0, ranks 0-2 on ranks 1-2)\n{GROUPS}",
    ),
    "a group that a rank has not made": (
        lambda rank: None if rank == 1 else dist.new_group([0, 2]),
        3,
        sim.CollectiveMismatch,
        "the ranks do not agree on the members of the group that they made as number 1\n"
        "  rank 0  of ranks 0, 2      @\n"
        "* rank 1  has not made it\n"
        "  rank 2  of ranks 0, 2      @\n"
        f"  differs: group (ranks 0, 2 on ranks 0, 2, none on rank 1)\n{GROUPS}",
    ),
    "a send that does not fit": (
        lambda rank: dist.send(torch.ones(3), 0) if rank else dist.recv(torch.ones(3, dtype=torch.int64), 1),
        2,
        sim.CollectiveMismatch,
        "a send from rank 1 does not fit the recv on rank 0 (group 'world')\n"
        "  rank 0  recv #0  int64 [3]    @\n"
        "  rank 1  send #0  float32 [3]  @\n"
        "  try: receive into a tensor of the dtype and size that is sent\n",
    ),
    "a skipped collective": (
        lambda rank: (dist.all_reduce(torch.ones(1)), None if rank == 1 else dist.barrier()),
        3,
        sim.Deadlock,
        "no rank can run: 2 of 3 ranks wait, and none of them can go on\n"
        "  rank 0  waits in barrier #1 of group 'world'  for rank 1  @\n"
        "  rank 1  has finished\n"
        "  rank 2  waits in barrier #1 of group 'world'  for rank 1  @\n"
        "  because: rank 0 -> rank 1, which has finished\n"
        "  try: let rank 1 call barrier #1 of group 'world', too, or let no rank of the group call it\n",
    ),
    "two groups in opposite order": (
        opposite_order,
        2,
        sim.Deadlock,
        "no rank can run: 2 of 2 ranks wait, and none of them can go on\n"
        "  rank 0  waits in barrier #0 of group '1: ranks 0-1'  for rank 1  @\n"
        "  rank 1  waits in barrier #0 of group '2: ranks 0-1'  for rank 0  @\n"
        "  because: rank 0 -> rank 1 -> rank 0 (each waits for the next)\n"
        "  try: let all ranks use the groups '1: ranks 0-1' and '2: ranks 0-1' in the same order\n",
    ),
    "both receive first": (
        lambda rank: (dist.recv(torch.ones(1), 1 - rank, tag=5), dist.send(torch.ones(1), 1 - rank, tag=5)),
        2,
        sim.Deadlock,
        "no rank can run: 2 of 2 ranks wait, and none of them can go on\n"
        "  rank 0  waits in recv #0 from rank 1 with tag 5 in group 'world'  for rank 1  @\n"
        "  rank 1  waits in recv #0 from rank 0 with tag 5 in group 'world'  for rank 0  @\n"
        "  because: rank 0 -> rank 1 -> rank 0 (each waits for the next)\n"
        "  try: let one of them send before it receives, or use dist.isend or dist.batch_isend_irecv\n",
    ),
    "an async operation that not all join": (
        lambda rank: None if rank else dist.all_reduce(torch.ones(2), async_op=True),
        2,
        sim.Deadlock,
        "all ranks have finished, but all_reduce #0 of group 'world' was never called by rank 1\n"
        "  rank 0  all_reduce         SUM    float32 [2]  @\n"
        "  rank 1  has not called it\n"
        "  try: call it on every rank of the group, and wait for the work that an async operation returns\n",
    ),
    "a send that nobody receives": (
        lambda rank: None if rank else dist.isend(torch.ones(2), 1, tag=3),
        2,
        sim.Deadlock,
        "all ranks have finished, but not every send has met its recv\n"
        "  rank 0  send #0 to rank 1 with tag 3 in group 'world'  float32 [2]  @\n"
        "  try: pair each send with a recv of the same group and tag, and wait for the work isend and irecv return\n",
    ),
    "many ranks that say the same are one line": (
        lambda rank: dist.barrier() if rank == 7 else dist.all_reduce(torch.ones(2 if rank % 2 else 3)),
        40,
        sim.CollectiveMismatch,
        "the ranks of group 'world' do not agree on its operation #0\n"
        "  ranks 0, 2, ..., 38  all_reduce  SUM    float32 [3]  @\n"
        "* ranks 1, 3, ..., 39  all_reduce  SUM    float32 [2]  @\n"
        "* rank 7               barrier                         @\n"
        "  differs: operation (all_reduce on ranks 0-6, 8-39, barrier on rank 7); size ([3] on ranks 0, 2, ..., 38, "
        f"[2] on ranks 1, 3, ..., 39)\n{HINT}",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_and_said(name):
    act, world_size, error, text = FOUND[name]
    here = f"test_sim_errors.py:* in {act.__name__}"
    replay = f"  replay: sim.run(..., world_size={world_size}, seed=0)"
    assert text_of(lambda: act(dist.get_rank()), world_size, error) == text.replace("@", here) + replay


# -- collectives that do not match -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "differs"),
    [
        (
            lambda rank: dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM),
            "reduce op (MAX on rank 0, SUM on ranks 1-2)",
        ),
        (lambda rank: dist.broadcast(torch.ones(4), rank // 2), "root (0 on ranks 0-1, 1 on rank 2)"),
        (
            lambda rank: dist.all_reduce(torch.ones(5, dtype=torch.bfloat16) if rank == 2 else torch.ones(4)),
            "dtype (float32 on ranks 0-1, bfloat16 on rank 2); size ([4] on ranks 0-1, [5] on rank 2)",
        ),
    ],
)
def test_what_differs_of_one_operation(call, differs):
    def body() -> None:
        dist.barrier()
        call(dist.get_rank())

    text = text_of(body, 3, sim.CollectiveMismatch)
    assert text.startswith("the ranks of group 'world' do not agree on its operation #1\n")
    assert f"\n  differs: {differs}\n{HINT}" in text


@pytest.mark.parametrize(
    ("sent", "expected", "marked"),
    [
        ([[1, 1, 1], [1, 1, 1], [1, 1, 1]], [[1, 1, 1], [2, 1, 1], [1, 1, 1]], [1]),  # one pair: whose sizes are odd
        ([[1, 2, 3], [3, 1, 2], [2, 3, 1]], [[1, 3, 2], [2, 1, 4], [3, 2, 1]], []),  # one pair, and all sizes differ
        ([[1, 1], [2, 1]], [[1, 1], [1, 1]], []),
        ([[1, 2, 1]] * 3, [[1, 1, 1]] * 3, []),  # all have made one mistake
        ([[9, 9, 9], [1, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 1, 1], [1, 1, 1]], [0]),
    ],
)
def test_who_is_to_blame_for_splits(sent, expected, marked):
    def body() -> None:
        send, recv = sent[dist.get_rank()], expected[dist.get_rank()]
        dist.all_to_all_single(torch.empty(sum(recv)), torch.ones(sum(send)), recv, send)

    lines = text_of(body, len(sent), sim.CollectiveMismatch).splitlines()
    assert [rank for rank in range(len(sent)) if lines[1 + rank].startswith("*")] == marked


def test_many_pairs_of_splits_are_counted():
    def body() -> None:
        dist.all_to_all_single(torch.empty(8), torch.ones(16 if dist.get_rank() == 3 else 8))

    text = text_of(body, 8, sim.CollectiveMismatch)
    assert "rank 3 sends 2 elements to rank 3, which expects 1 from it; and 4 more such pairs\n" in text
    assert [line[:8] for line in text.splitlines() if line.startswith("*")] == ["* rank 3"]


def test_different_sizes_of_lists():
    def body() -> None:
        size = 3 if dist.get_rank() == 2 else 2
        dist.all_to_all([torch.empty(2) for _ in range(3)], [torch.ones(size) for _ in range(3)])

    text = text_of(body, 3, sim.CollectiveMismatch)
    assert "  rank 0  all_to_all      float32 send=[2, 2, 2] recv=[2, 2, 2]  test_sim_errors.py:* in body\n" in text
    assert "* rank 2  all_to_all      float32 send=[3, 3, 3] recv=[2, 2, 2]  test_sim_errors.py:* in body\n" in text
    assert "  try: let the outputs of each rank be of the sizes that the others' inputs for it have\n" in text


def test_meshes_of_different_shapes():
    def body(async_op: bool) -> None:
        shape = (4, 1) if dist.get_rank() == 3 else (2, 2)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"), async_op=async_op)

    expected = (
        "the ranks do not agree on the members of the group that they made as number 1\n"
        "  rank 0  of ranks 0, 2  axis 'dp'  test_sim_errors.py:* in body\n"
        "  rank 1  of ranks 0, 2  axis 'dp'\n"
        "  rank 2  of ranks 0, 2  axis 'dp'  test_sim_errors.py:* in body\n"
        "* rank 3  of rank 0      axis 'tp'  test_sim_errors.py:* in body\n"
        "  differs: group (ranks 0, 2 on ranks 0-2, rank 0 on rank 3)\n"
    )
    assert text_of(lambda: body(False), 4, sim.CollectiveMismatch).startswith(expected)
    assert text_of(lambda: body(True), 4, sim.CollectiveMismatch).startswith(expected), "also when nobody waits"


def ask_for_one_of_two() -> None:
    dist.new_group([0, 1] if dist.get_rank() < 2 else [0, 2])


def ask_for_halves() -> None:
    dist.new_group([0, 1] if dist.get_rank() < 2 else [2, 3])


def ask_for_all_or_some() -> None:
    dist.new_group([0, 1] if dist.get_rank() == 0 else None)


def ask_for_meshes() -> None:
    dist.init_device_mesh("cpu", (2, 2) if dist.get_rank() else (4, 1))


@pytest.mark.parametrize("make", [ask_for_one_of_two, ask_for_halves, ask_for_all_or_some, ask_for_meshes])
@pytest.mark.parametrize("then", [lambda: None, dist.barrier, lambda: dist.all_reduce(torch.ones(1), async_op=True)])
def test_groups_of_different_ranks_that_nobody_uses(make, then):
    """They are named where all ranks meet next, or at the end; with gloo, making them does not end."""

    def body() -> None:
        make()
        then()
        assert then.__name__ == "<lambda>", "the barrier has let it pass"

    text = text_of(body, 4, sim.CollectiveMismatch)
    assert text.startswith("the ranks do not agree on the members of the group that they made as number 1\n")
    assert "differs: group (" in text


@sim.ranks(3, backends=("sim",))
def test_a_group_that_a_rank_makes_late_is_right(ctx):
    if dist.get_rank() == 0:
        dist.barrier()
    dist.new_group([2, 0])
    if dist.get_rank() != 0:
        dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group()
    dist.new_group([0, 1])


def test_groups_that_are_made_differently_and_may_be():
    """Each rank makes the groups that it is in, alone; then a deadlock is just that."""

    def body() -> None:
        first = dist.get_rank() // 2 * 2
        group = dist.new_group([first, first + 1], use_local_synchronization=True)
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
        if dist.get_rank() != 1:
            dist.barrier(group=group)

    text = text_of(body, 4, sim.Deadlock)
    assert "  because: rank 0 -> rank 1, which has finished\n" in text


def test_one_tensor_on_several_ranks():
    shared = torch.ones(2)

    def body() -> None:
        dist.all_reduce(shared)

    assert text_of(body, 2, sim.CollectiveMismatch) == (
        "the ranks of group 'world' do not agree on its operation #0\n"
        "  rank 0  all_reduce  SUM    float32 [2]  test_sim_errors.py:* in body\n"
        "  rank 1  all_reduce  SUM    float32 [2]  test_sim_errors.py:* in body\n"
        "  differs: ranks 0 and 1 write into the same tensor\n"
        "  try: make the tensor on each rank, inside of the function: args and globals are shared by all ranks\n"
        "  replay: sim.run(..., world_size=2, seed=0)"
    )
    assert shared.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("numel", [10, 10_000])  # small parts are reduced together
def test_the_own_part_of_the_input_may_take_the_result(numel):
    def body() -> list[torch.Tensor]:
        rank = dist.get_rank()
        inputs = [torch.arange(2.0 * numel) + rank for _ in range(3)]
        outputs = [x.chunk(2)[rank] for x in inputs]
        dist.reduce_scatter_tensor(outputs[0], inputs[0])
        dist.group.WORLD.reduce_scatter_tensor_coalesced(outputs[1:], inputs[1:]).wait()
        return outputs

    for parts in zip(*sim.run(body, 2), strict=True):
        assert torch.equal(torch.cat(parts), torch.arange(2.0 * numel) * 2 + 1)


def test_a_reduction_that_torch_cannot_compute_is_raised_on_each_rank_and_the_world_goes_on():
    calls = {
        "SUM of float8_e4m3fn": lambda: dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn)),
        "BAND of float32": lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.BAND, async_op=True),
        "MIN of uint16": lambda: dist.reduce(torch.ones(4, dtype=torch.uint16), 0, dist.ReduceOp.MIN),
        "AVG of bool": lambda: dist.reduce_scatter(
            torch.ones(2, dtype=torch.bool), [torch.ones(2, dtype=torch.bool)] * 2, dist.ReduceOp.AVG
        ),
    }

    def body() -> list[str]:
        said = []
        for call in calls.values():
            with pytest.raises(RuntimeError) as raised:
                call()
            said.append(str(raised.value))
        x = torch.ones(1)
        dist.all_reduce(x)
        return [*said, str(x.item())]

    first, second = sim.run(body, 2)
    assert first == second
    assert first[-1] == "2.0"
    for name, text in zip(calls, first, strict=False):
        assert f"torch has no ReduceOp.{name} on the CPU\n  group: " in text
        assert text.endswith("\n  try: a dtype and a reduce op that torch can compute on the CPU")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: dist.all_gather([torch.ones(2)] * 3, torch.ones(2)),
            "all_gather: the output list has 3 tensors, expected one for each of 4 ranks",
        ),
        (
            lambda: dist.all_gather([torch.ones(n) for n in (2, 2, 2, 3)], torch.ones(2)),
            "all_gather: rank 3 gives 2 elements, but its output list has 3 at that place",
        ),
        (lambda: dist.all_to_all([torch.ones(2)], [torch.ones(2)]), "the output list has 1 tensors"),
        (
            lambda: dist.reduce_scatter(torch.ones(3), [torch.ones(2)] * 4),
            "receives 3 elements, but its input list has 2 at that place",
        ),
        (lambda: dist.send(torch.ones(1), group_dst=9), "send: there is no member 9 in the group, which has 4"),
        (lambda: dist.recv(torch.ones(1), group_src=9), "recv: there is no member 9 in the group, which has 4"),
        (lambda: dist.broadcast(torch.ones(1), group_src=7), "broadcast: there is no member 7 in the group"),
        (lambda: dist.reduce(torch.ones(1), group_dst=7), "reduce: there is no member 7 in the group"),
        (
            lambda: dist.all_to_all_single(torch.ones(3), torch.ones(4)),
            "dim 0 of the output has 3 rows, not divisible by 4 ranks",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1, 1, 1], [1, 1, 1]),
            "input_split_sizes [1, 1, 1] must be 4 numbers that add up to the 4 rows of the input",
        ),
        (
            lambda: dist.group.WORLD._allgather_base(torch.ones(4, 2).t(), torch.ones(2)),
            "all_gather: the output of shape [2, 4] is not contiguous (strides [1, 2])",
        ),
        (
            lambda: dist.group.WORLD._allgather_base(torch.ones(7), torch.ones(2)),
            "all_gather: the output has 7 elements, expected 2 * 4 ranks = 8",
        ),
        (
            lambda: dist.group.WORLD._reduce_scatter_base(torch.ones(2), torch.ones(7)),
            "reduce_scatter: the input has 7 elements, expected 2 * 4 ranks",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(()), torch.ones(())),
            "all_to_all_single: the input has no dim 0 to split over 4 ranks: it is a scalar\n  group: world",
        ),
        (
            lambda: dist.all_reduce(torch.ones(4, 4)[:, 1:3]),
            "all_reduce: a tensor of shape [4, 2] does not fill its memory without gaps or overlaps (strides [4, 1])",
        ),
        (
            lambda: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX),
            "all_reduce: sparse tensors can be added up only, but the reduce op is MAX\n  group: world",
        ),
        (
            lambda: dist.group.WORLD.allgather_coalesced([[torch.ones(2)]] * 3, [torch.ones(2)]),
            "all_gather_coalesced: the output lists have [1, 1, 1] tensors, expected 1, one for each input, "
            "from each of 4 ranks\n  group: world",
        ),
        (lambda: dist.split_group(None, [[0, 0]]), "cannot split a group: split_ranks are lists of different ranks"),
    ],
)
def test_a_call_that_cannot_be_right_is_refused_at_once(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        sim.run(call, 4)
    assert "try:" in str(caught.value)


def test_dtypes_of_one_call():
    def body() -> None:
        dist.group.WORLD._allgather_base(torch.ones(4, dtype=torch.float64), torch.ones(2))

    with pytest.raises(TypeError, match=r"all_gather: the output is float64, but the other side .* is float32"):
        sim.run(body, 2)


# -- deadlocks -------------------------------------------------------------------------------------------------


def test_an_axis_of_a_mesh_is_named_with_its_ranks():
    def body() -> None:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if dist.get_rank() != 3:
            dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))

    text = text_of(body, 4, sim.Deadlock)
    assert "  rank 2  waits in all_reduce #0 of group 'tp: ranks 2-3'  for rank 3  test_sim_errors" in text
    assert (
        "  try: let rank 3 call all_reduce #0 of group 'tp: ranks 2-3', too, or let no rank of the group call it"
        in text
    )

    def sizes() -> None:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(dist.get_rank() + 1), group=mesh.get_group("dp"))

    text = text_of(sizes, 4, sim.CollectiveMismatch)
    assert re.match(r"the ranks of group 'dp: ranks (0, 2|1, 3)' do not agree on its operation #0\n", text)


def test_messages_are_numbered():
    def body() -> None:
        other = 1 - dist.get_rank()
        for step in range(3):
            for op in (dist.send, dist.recv) if dist.get_rank() == 0 else (dist.recv, dist.send):
                op(torch.ones(1 if step < 2 or dist.get_rank() == 0 else 2), other)

    text = text_of(body, 2, sim.CollectiveMismatch)
    assert "  rank 0  send #4  float32 [1]  test_sim_errors.py:* in body\n" in text
    assert "  rank 1  recv #4  float32 [2]  test_sim_errors.py:* in body\n" in text


def by_rank(*calls) -> Any:
    """A body in which each rank makes its own call."""

    def body() -> None:
        calls[dist.get_rank()]()

    return body


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def opposite_groups() -> None:
    group = dist.new_group([0, 1])
    (dist.send if dist.get_rank() == 0 else dist.recv)(
        torch.ones(1), 1 - dist.get_rank(), group=(None, group)[dist.get_rank()]
    )


def own_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def joins_a_thread() -> None:
    thread = threading.Thread(target=lambda: queue.Queue().get(), daemon=True)
    thread.start()
    thread.join()


def asks(question) -> None:
    while not question():
        pass


@pytest.mark.parametrize(
    ("body", "because", "hint"),
    [
        (
            lambda: dist.send(torch.ones(1), 1 - dist.get_rank()),
            "rank 0 -> rank 1 -> rank 0 (each waits for the next)",
            "let one of them receive before it sends, or use dist.isend or dist.batch_isend_irecv",
        ),
        (
            by_rank(lambda: dist.send(torch.ones(1), 1, tag=3), lambda: dist.recv(torch.ones(1), 0, tag=4)),
            "rank 0 -> rank 1 -> rank 0 (each waits for the next)",
            "give both sides one tag: rank 0 sends with tag 3, rank 1 receives with tag 4",
        ),
        (
            by_rank(lambda: dist.isend(torch.ones(1), 1, tag=3), lambda: dist.recv(torch.ones(1), tag=4)),
            "rank 1 -> rank 0, which has finished",
            "give both sides one tag: rank 0 sends with tag 3, rank 1 receives with tag 4",
        ),
        (
            opposite_groups,
            "rank 0 -> rank 1 -> rank 0 (each waits for the next)",
            "use one group on both sides: rank 0 sends in 'world', rank 1 receives in '1: ranks 0-1'",
        ),
        (
            by_rank(lambda: dist.recv(torch.ones(1), 0), lambda: None),
            "rank 0 waits for itself",
            "let rank 0 recv to or from another rank: what it has itself needs no message",
        ),
        (
            by_rank(lambda: dist.recv(torch.ones(1), 1), lambda: None),
            "rank 0 -> rank 1, which has finished",
            "let rank 1 send what rank 0 waits for before it ends",
        ),
        (
            by_rank(lambda: None, lambda: dist.send(torch.ones(1), 0)),
            "rank 1 -> rank 0, which has finished",
            "let rank 0 receive what rank 1 waits for before it ends",
        ),
        (
            by_rank(dist.barrier, lambda: dist.send(torch.ones(1), 0)),
            "rank 0 -> rank 1 -> rank 0 (each waits for the next)",
            "let all ranks of a group call the same operations in the same order",
        ),
        (
            by_rank(lambda: store().set("weight", "1"), lambda: store().get("weights")),
            "rank 1 waits for something that no rank is about to do",
            "let a rank set 'default_pg/0//weights' in the store; the store has 'default_pg/0//weight'",
        ),
        (
            lambda: store().wait(["a"]),
            "ranks 0-1 wait for something that no rank is about to do",
            "let a rank set 'default_pg/0//a' in the store",
        ),
        (
            own_lock,
            "ranks 0-1 wait for something that no rank is about to do",
            "release the lock that Lock.acquire waits for, on another thread of the same rank, or give it a timeout",
        ),
        (
            by_rank(lambda: queue.Queue().get(), dist.barrier),
            "rank 0 waits for something that no rank is about to do",
            "put something into the queue that Queue.get waits for, on another thread of the same rank, "
            "or give it a timeout",
        ),
        (
            joins_a_thread,
            "ranks 0-1 wait for something that no rank is about to do",
            "let the thread end that Thread.join waits for, on another thread of the same rank, or give it a timeout",
        ),
        (
            by_rank(lambda: asks(lambda: store().check(["k"])), dist.barrier),
            "rank 1 -> rank 0, which asks again and again for what never comes",
            "let another rank do what the loop asks for, or end the loop",
        ),
        (
            lambda: asks(dist.irecv(torch.ones(1), 1 - dist.get_rank()).is_completed),
            "what a rank asks for in a loop never comes",
            "let another rank do what the loop asks for, or end the loop",
        ),
    ],
)
def test_why_and_what_to_try(body, because, hint):
    text = text_of(body, 2, sim.Deadlock)
    assert f"\n  because: {because}\n  try: {hint}\n" in text


@pytest.mark.tier("test")
def test_what_a_loop_asks_for():
    def body() -> None:
        if dist.get_rank() == 0:
            asks(dist.irecv(torch.ones(1), 1).is_completed)
        elif dist.get_rank() == 1:
            while not store().check(["a", "b"]):
                pass
        elif dist.get_rank() == 2:
            store().get("c")
        else:
            dist.barrier()

    lines = text_of(body, 4, sim.Deadlock).splitlines()
    here = "test_sim_errors.py:* in"
    assert [re.sub("  +", "  ", line) for line in lines[1:5]] == [
        "  rank 0  asks again and again, in vain: Work.is_completed of recv #0 from rank 1 in group 'world'"
        f"  {here} asks",
        f"  rank 1  asks again and again, in vain: Store.check of 'default_pg/0//a', 'default_pg/0//b'  {here} body",
        f"  rank 2  waits in key 'default_pg/0//c' of the store  {here} body",
        f"  rank 3  waits in barrier #0 of group 'world'  for ranks 0-2  {here} body",
    ]


def test_different_operations_of_which_one_never_comes():
    def body() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        elif dist.get_rank() == 1:
            dist.barrier()

    text = text_of(body, 3, sim.CollectiveMismatch)
    assert "  rank 2  has not called it\n" in text
    assert "differs: operation (all_reduce on rank 0, barrier on rank 1)\n" in text


def test_every_rank_sees_the_error_once_and_may_not_go_on():
    seen: list[str] = []

    def body() -> None:
        if dist.get_rank() == 0:
            return
        try:
            dist.barrier()
        except RuntimeError as error:
            seen.append(type(error).__name__)
        dist.barrier()
        seen.append("went on")

    with pytest.raises(sim.Deadlock):
        sim.run(body, 4)
    assert seen == ["Deadlock"] * 3


# -- an exception that a rank handles while it communicates ----------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_bug_before_a_collective_in_finally(seed):
    def body() -> None:
        group = dist.new_group([0, 1])
        try:
            if dist.get_rank() == 1:
                raise ValueError("the real bug")
            dist.all_reduce(torch.ones(1), group=group)
        finally:
            dist.barrier()

    with pytest.raises(sim.Deadlock) as caught:
        sim.run(body, 2, seed=seed)
    line = body.__code__.co_firstlineno
    assert str(caught.value) == (
        "no rank can run: 2 of 2 ranks wait, and none of them can go on\n"
        f"  rank 0  waits in all_reduce #0 of group '1: ranks 0-1'  for rank 1  test_sim_errors.py:{line + 5} in body\n"
        f"  rank 1  waits in barrier #0 of group 'world'            for rank 0  test_sim_errors.py:{line + 7} in body\n"
        f"  rank 1 is handling ValueError: the real bug  test_sim_errors.py:{line + 4} in body\n"
        "  because: rank 0 -> rank 1 -> rank 0 (each waits for the next)\n"
        "  try: look at the ValueError of rank 1 first; what is called in 'finally' or 'except' has to be called by "
        "all ranks\n"
        f"  replay: sim.run(..., world_size=2, seed={seed})"
    )
    assert repr(caught.value.__cause__) == "ValueError('the real bug')"


@pytest.mark.parametrize("seed", range(6))
def test_a_bug_before_another_collective_of_the_same_group(seed):
    def body() -> None:
        try:
            if dist.get_rank() == 1:
                raise ValueError("the real bug")
            dist.all_reduce(torch.ones(1))
        finally:
            dist.barrier()

    with pytest.raises(sim.CollectiveMismatch) as caught:
        sim.run(body, 3, seed=seed)
    assert "\n  rank 1 is handling ValueError: the real bug  test_sim_errors.py:" in str(caught.value)
    assert repr(caught.value.__cause__) == "ValueError('the real bug')"


def test_a_bug_before_a_send():
    def body() -> None:
        if dist.get_rank() == 1:
            dist.recv(torch.ones(3), 0)
        try:
            raise KeyError("the real bug")
        except KeyError:
            dist.send(torch.ones(2), 1)

    with pytest.raises(sim.CollectiveMismatch, match="rank 0 is handling KeyError: 'the real bug'") as caught:
        sim.run(body, 2)
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_few_ranks_handle_is_the_cause():
    def body() -> None:
        try:
            raise ValueError("the real bug") if dist.get_rank() == 2 else ImportError("not on this machine")
        except (ValueError, ImportError) as error:
            if isinstance(error, ImportError):
                dist.barrier()

    def finished() -> None:
        try:
            raise ValueError("over")
        except ValueError:
            if dist.get_rank() == 2:
                return
        dist.barrier()

    with pytest.raises(sim.Deadlock, match="ranks 0-1, 3 are handling ImportError: not on this") as caught:
        sim.run(body, 4)
    assert isinstance(caught.value.__cause__, ImportError)
    assert "the real bug" not in str(caught.value), "that rank was done with it"
    with pytest.raises(sim.Deadlock) as caught:
        sim.run(finished, 4)
    assert "handling" not in str(caught.value)
    assert caught.value.__cause__ is None

    def uneven() -> None:
        try:
            raise ValueError("the real bug") if dist.get_rank() == 2 else ImportError("not on this machine")
        except (ValueError, ImportError):
            dist.all_reduce(torch.ones(dist.get_rank()))

    with pytest.raises(sim.CollectiveMismatch) as caught:
        sim.run(uneven, 4)
    assert isinstance(caught.value.__cause__, ValueError)


# -- ranks that do not end -------------------------------------------------------------------------------------


def spy(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple]:
    """What `sim.watchdog` says by its function `name`, which says it all the same."""
    said: list[tuple] = []
    original = getattr(watchdog, name)

    def note(*parts) -> None:
        original(*parts)
        said.append(parts)

    monkeypatch.setattr(watchdog, name, note)
    return said


@pytest.mark.tier("test")
def test_a_rank_that_catches_its_end_is_named_with_what_ended_it(monkeypatch, capfd):
    said = spy(monkeypatch, "report_refusal")

    def body() -> None:
        if dist.get_rank() == 1:
            raise ValueError("the real bug")
        while not said:
            with contextlib.suppress(BaseException):
                dist.barrier()

    with pytest.raises(ValueError, match="rank 1 raised ValueError: the real bug"):
        sim.run(body, 2)
    assert len(said) == 1
    err = capfd.readouterr().err
    line = f"test_sim_errors.py:{body.__code__.co_firstlineno + 2} in body"
    assert err.startswith(
        f"rank 0 goes on in a world that has ended: rank 1 raised ValueError: the real bug  {line}\n"
        "  seen: it has caught the exception that ends it "
    )
    assert "in body" in said[0][3]


@pytest.mark.tier("test")
def test_a_dead_rank_that_catches_its_end_is_named(monkeypatch, capfd):
    said = spy(monkeypatch, "report_refusal")

    def body() -> int:
        while dist.get_rank() == 1 and not said:
            with contextlib.suppress(BaseException):
                dist.barrier()
        return dist.get_rank()

    assert sim.run(body, 2, faults=[sim.faults.Kill(1)]) == [0, None]
    assert len(said) == 1
    assert capfd.readouterr().err.startswith("rank 1 goes on after a fault has killed it\n")


@pytest.mark.tier("test")
def test_a_rank_that_computes_for_ever_is_named_and_not_accused(monkeypatch, capfd):
    monkeypatch.setattr(watchdog, "COMPUTES_S", 0.0)
    said = spy(monkeypatch, "report_long_turn")

    def spin() -> None:
        while dist.get_rank() == 1 and not said:
            pass

    sim.run(spin, 2)
    assert [parts[0] for parts in said] == ["rank 1"]
    assert "in spin" in said[0][3]
    err = capfd.readouterr().err
    assert re.match(r"rank 1 has computed for \d+ s and not given up its turn; other ranks run when it", err)
    assert "try: nothing, if it computes what it should" in err


def test_who_is_named_is_named_once(monkeypatch):
    monkeypatch.setattr(watchdog, "COMPUTES_S", -1.0)
    said = spy(monkeypatch, "report_long_turn")
    dog, thread = watchdog.Watchdog(), RankThread(3, None)
    dog.look(thread, 1, "", alone=True)
    assert not said, "nobody else wants the turn"
    for turn in (1, 1, 2):
        dog.look(thread, turn, "rank 1 raised ValueError: bad")
    assert len(said) == 1
    assert said[0][2] == "rank 1 raised ValueError: bad"


def test_a_rank_that_computes_is_not_stuck(monkeypatch):
    monkeypatch.setattr(watchdog, "LIMIT_S", -1.0)
    said = spy(monkeypatch, "report")
    dog, thread = watchdog.Watchdog(), RankThread(3, None)
    thread.ident = threading.get_ident()
    dog.look(thread, 1, "")
    assert not said, "it has used the processor since the watchdog saw it last"
    dog.look(thread, 1, "")
    assert [parts[0] for parts in said] == ["rank 3"]


@pytest.mark.tier("test")
@pytest.mark.usefixtures("interruptible")
def test_after_an_interrupt_the_second_one_is_explained(monkeypatch, capfd):
    monkeypatch.setattr(watchdog, "INTERRUPT_S", 0.0)
    said = spy(monkeypatch, "report_interrupt")

    def body() -> None:
        if dist.get_rank() == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            while not said:
                pass
        dist.barrier()

    with pytest.raises(KeyboardInterrupt):
        sim.run(body, 2)
    assert len(said) == 1
    assert re.fullmatch(
        r"interrupted: ranks? .* will end at the next operation; Ctrl-C once more ends the program without waiting\n",
        capfd.readouterr().err,
    )


# -- an exception on a rank ------------------------------------------------------------------------------------


class OddError(Exception):
    """Wants two arguments by keyword, keeps something, and shows itself in its own way."""

    def __init__(self, *, code: int, place: str) -> None:
        super().__init__(code)
        self.code = code
        self.place = place

    def __str__(self) -> str:
        return f"code {self.code} at {self.place}"


class NewError(ValueError):
    def __new__(cls, a: int, b: int) -> NewError:
        return super().__new__(cls, a, b)

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a + b)


class FinalError(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses")


class MuteError(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


def raised(make) -> sim.RankFailed:
    def body() -> None:
        if dist.get_rank() == 1:
            raise make()
        dist.barrier()

    with pytest.raises(sim.RankFailed) as caught:
        sim.run(body, 3)
    assert caught.value.rank == 1
    return caught.value


def open_nothing() -> OSError:
    try:
        os.stat("/does/not/exist")
    except OSError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: ValueError("bad"), ValueError, "rank 1 raised ValueError: bad"),
        (lambda: KeyError("wq"), KeyError, "rank 1 raised KeyError: 'wq'"),
        (AssertionError, AssertionError, "rank 1 raised AssertionError"),
        (open_nothing, FileNotFoundError, "rank 1 raised FileNotFoundError: [Errno 2] No such file"),
        (lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "no"), UnicodeDecodeError, "rank 1 raised UnicodeDecodeError"),
        (lambda: StopIteration(3), StopIteration, "rank 1 raised StopIteration: 3"),
        (lambda: torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "rank 1 raised OutOfMemoryError: full"),
        (lambda: OddError(code=7, place="layer 3"), OddError, "rank 1 raised OddError: code 7 at layer 3"),
        (lambda: NewError(1, 2), NewError, "rank 1 raised NewError: 3"),
        (lambda: FinalError("x"), sim.RankFailed, "rank 1 raised FinalError: x"),
        (MuteError, MuteError, "rank 1 raised MuteError: (its text cannot be shown: AttributeError in __str__)"),
        (GeneratorExit, sim.RankFailed, "rank 1 raised GeneratorExit"),
        (lambda: SystemExit(3), sim.RankFailed, "rank 1 called sys.exit(3)"),
        (lambda: SystemExit("no data"), sim.RankFailed, "rank 1 called sys.exit('no data')"),
    ],
)
def test_a_rank_that_raises(make, kind, text):
    failure = raised(make)
    assert isinstance(failure, kind)
    assert str(failure).startswith(text)
    assert str(failure).endswith("\n  replay: sim.run(..., world_size=3, seed=0)")
    assert type(failure.__cause__) is type(make())
    frames = [(frame.name, frame.line) for frame in traceback.extract_tb(failure.__cause__.__traceback__)]
    assert ("body", "raise make()") in frames, "the traceback of the cause is the rank's"
    assert text in repr(failure)


def test_a_failure_keeps_the_attributes_of_the_original():
    odd = raised(lambda: OddError(code=7, place="layer 3"))
    assert (odd.code, odd.place) == (7, "layer 3")
    missing = raised(open_nothing)
    assert (missing.errno, missing.filename) == (2, "/does/not/exist")


def test_a_failure_can_be_pickled():
    again = pickle.loads(pickle.dumps(raised(lambda: OddError(code=7, place="x"))))
    assert type(again) is sim.RankFailed
    assert again.rank == 1
    assert str(again).startswith("rank 1 raised OddError: code 7 at x")


@sim.ranks(3, backends=("sim",))
def test_a_normal_exit_is_a_normal_end(ctx):
    if dist.get_rank() == 1:
        raise SystemExit
    if dist.get_rank() == 2:
        raise SystemExit(0)
    assert ["done", None, None][ctx.rank] == "done"


def test_an_exception_in_a_hook_of_backward():
    def body() -> None:
        x = torch.ones(2, requires_grad=True)

        def hook(grad: torch.Tensor) -> None:
            dist.all_reduce(grad.clone())
            if dist.get_rank() == 1:
                raise LookupError("in the hook")
            dist.barrier()

        x.register_hook(hook)
        (x * 2).sum().backward()

    with pytest.raises(LookupError, match="rank 1 raised LookupError: in the hook"):
        sim.run(body, 3)


def test_an_exception_in_a_callback_of_a_future():
    def body() -> None:
        work = dist.all_reduce(torch.ones(1), async_op=True)

        def callback(_):
            raise LookupError("in the callback")

        work.get_future().then(callback).wait()

    with pytest.raises(RuntimeError, match="in the callback"):
        sim.run(body, 2)


# -- memory that is gone ---------------------------------------------------------------------------------------


def reduces(x: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
    return x, dist.all_reduce(x, async_op=True)


def gathers(x: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
    full = torch.zeros(8)
    part = full.chunk(2)[dist.get_rank()]
    return full, dist.all_gather_into_tensor(full, part.copy_(x), async_op=True)


def sends(x: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
    return x, (dist.isend(x, 0) if dist.get_rank() else dist.irecv(x, 1))


def receives(x: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
    return x, (dist.irecv(x, 0) if dist.get_rank() else dist.isend(x, 1))


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.*deprecated:FutureWarning")
@pytest.mark.parametrize("left", [0, 4])
@pytest.mark.parametrize("begin", [reduces, gathers, sends, receives])
def test_a_tensor_that_loses_its_memory_in_flight(begin, left):
    """To touch it would end the process."""

    def body() -> None:
        group = dist.new_group()
        if dist.get_rank() == 0:
            dist.barrier(group)
        tensor, work = begin(torch.ones(4))
        if dist.get_rank() == 1:
            tensor.untyped_storage().resize_(left)
            dist.barrier(group)
        work.wait()

    text = text_of(body, 2, sim.SimError)
    first, *_, because, hint, _ = text.splitlines()
    assert first.endswith(" group 'world' cannot be carried out: a tensor of rank 1 has lost its memory")
    assert "\n* rank 1  " in text
    assert "\n* rank 0  " not in text
    assert because in (
        f"  because: float32 [4] takes 16 bytes, and its storage has {left}",
        f"  because: float32 [8] takes 32 bytes, and its storage has {left}",
    )
    assert hint.startswith("  try: to wait for the work that the operation returned before its storage is resized")


@sim.ranks(2, backends=("sim",))
def test_what_has_lost_its_memory_and_got_it_back(ctx):
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    dist.all_reduce(x.fill_(1.0))
    dist.broadcast(empty := torch.empty(0), 0)
    assert [*x.tolist(), *empty.tolist()] == [2.0] * 4


# -- many ranks ------------------------------------------------------------------------------------------------


def skip() -> None:
    if dist.get_rank() != 3:
        dist.barrier()


def reduce_in_two_ways() -> None:
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if dist.get_rank() == 3 else dist.ReduceOp.SUM)


def send_in_vain() -> None:
    if dist.get_rank():
        dist.isend(torch.ones(1), 0)


@pytest.mark.parametrize("body", [skip, reduce_in_two_ways, ask_for_one_of_two, send_in_vain])
def test_what_is_said_of_many_ranks_is_short(body):
    text = text_of(body, 64, sim.SimError)
    assert len(text.splitlines()) <= 8
    assert len(text) < 1200
