"""The full text of what the simulator finds, and what becomes of an exception on a rank."""

from __future__ import annotations

import os
import pickle
import re
import traceback

import pytest
import torch
import torch.distributed as dist

import sim

pytestmark = pytest.mark.sim


def text_of(body, world_size: int, error: type[BaseException]) -> str:
    """The error's text, with line numbers of this file left out."""
    with pytest.raises(error) as caught:
        sim.run(body, world_size)
    return re.sub(r"test_sim_errors\.py:\d+", "test_sim_errors.py:*", str(caught.value))


HINT = "  try: let every rank of the group call the same operation, with the same arguments, in the same order\n"


# -- collectives that do not match -----------------------------------------------------------------------------


def test_different_operations():
    def body() -> None:
        if dist.get_rank() == 2:
            dist.broadcast(torch.ones(4), 1)
        else:
            dist.all_reduce(torch.ones(4))

    assert text_of(body, 4, sim.CollectiveMismatch) == (
        "the ranks of group 'world' do not agree on its operation #0\n"
        "  rank 0  all_reduce  SUM          float32 [4]  test_sim_errors.py:* in body\n"
        "  rank 1  all_reduce  SUM          float32 [4]  test_sim_errors.py:* in body\n"
        "* rank 2  broadcast        root=1  float32 [4]  test_sim_errors.py:* in body\n"
        "  rank 3  all_reduce  SUM          float32 [4]  test_sim_errors.py:* in body\n"
        "  differs: operation (all_reduce on ranks 0-1, 3, broadcast on rank 2)\n"
        f"{HINT}"
        "  replay: sim.run(..., world_size=4, seed=0)"
    )


def test_different_reduce_ops():
    def body() -> None:
        dist.barrier()
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if dist.get_rank() == 0 else dist.ReduceOp.SUM)

    assert text_of(body, 3, sim.CollectiveMismatch) == (
        "the ranks of group 'world' do not agree on its operation #1\n"
        "* rank 0  all_reduce  MAX    float32 [4]  test_sim_errors.py:* in body\n"
        "  rank 1  all_reduce  SUM    float32 [4]  test_sim_errors.py:* in body\n"
        "  rank 2  all_reduce  SUM    float32 [4]  test_sim_errors.py:* in body\n"
        "  differs: reduce op (MAX on rank 0, SUM on ranks 1-2)\n"
        f"{HINT}"
        "  replay: sim.run(..., world_size=3, seed=0)"
    )


def test_different_roots():
    def body() -> None:
        dist.broadcast(torch.ones(4), dist.get_rank() // 2)

    assert text_of(body, 3, sim.CollectiveMismatch) == (
        "the ranks of group 'world' do not agree on its operation #0\n"
        "  rank 0  broadcast    root=0  float32 [4]  test_sim_errors.py:* in body\n"
        "  rank 1  broadcast    root=0  float32 [4]  test_sim_errors.py:* in body\n"
        "* rank 2  broadcast    root=1  float32 [4]  test_sim_errors.py:* in body\n"
        "  differs: root (0 on ranks 0-1, 1 on rank 2)\n"
        f"{HINT}"
        "  replay: sim.run(..., world_size=3, seed=0)"
    )


def test_different_dtypes_and_sizes():
    def body() -> None:
        last = dist.get_rank() == 2
        dist.all_reduce(torch.ones(5 if last else 4, dtype=torch.bfloat16 if last else torch.float32))

    assert text_of(body, 3, sim.CollectiveMismatch) == (
        "the ranks of group 'world' do not agree on its operation #0\n"
        "  rank 0  all_reduce  SUM    float32 [4]   test_sim_errors.py:* in body\n"
        "  rank 1  all_reduce  SUM    float32 [4]   test_sim_errors.py:* in body\n"
        "* rank 2  all_reduce  SUM    bfloat16 [5]  test_sim_errors.py:* in body\n"
        "  differs: dtype (float32 on ranks 0-1, bfloat16 on rank 2); size ([4] on ranks 0-1, [5] on rank 2)\n"
        f"{HINT}"
        "  replay: sim.run(..., world_size=3, seed=0)"
    )


def test_different_split_sizes():
    def body() -> None:
        dist.all_to_all_single(torch.ones(2), torch.ones(3), [1, 1], [1, 2])

    assert text_of(body, 2, sim.CollectiveMismatch) == (
        "the ranks of group 'world' do not agree on its operation #0\n"
        "  rank 0  all_to_all      float32 send=[1, 2] recv=[1, 1]  test_sim_errors.py:* in body\n"
        "  rank 1  all_to_all      float32 send=[1, 2] recv=[1, 1]  test_sim_errors.py:* in body\n"
        "  differs: member 0 of the group sends 2 elements to member 1, which expects 1 from it\n"
        "  try: let the output split of each rank be what the others' input splits send to it\n"
        "  replay: sim.run(..., world_size=2, seed=0)"
    )


def test_a_send_that_does_not_fit():
    def body() -> None:
        if dist.get_rank() == 1:
            dist.send(torch.ones(3), 0)
        else:
            dist.recv(torch.ones(3, dtype=torch.int64), 1)

    assert text_of(body, 2, sim.CollectiveMismatch) == (
        "a send from rank 1 does not fit the recv on rank 0 (group 'world')\n"
        "  rank 0  recv  int64 [3]    test_sim_errors.py:* in body\n"
        "  rank 1  send  float32 [3]  test_sim_errors.py:* in body\n"
        "  try: receive into a tensor of the dtype and size that is sent\n"
        "  replay: sim.run(..., world_size=2, seed=0)"
    )


def test_one_tensor_on_several_ranks():
    shared = torch.ones(2)

    def body() -> None:
        dist.all_reduce(shared)

    assert text_of(body, 2, sim.CollectiveMismatch) == (
        "the ranks of group 'world' do not agree on its operation #0\n"
        "  rank 0  all_reduce  SUM    float32 [2]  test_sim_errors.py:* in body\n"
        "  rank 1  all_reduce  SUM    float32 [2]  test_sim_errors.py:* in body\n"
        "  differs: members 0 and 1 of the group write into the same tensor\n"
        "  try: make the tensor on each rank, inside of the function: args and globals are shared by all ranks\n"
        "  replay: sim.run(..., world_size=2, seed=0)"
    )
    assert shared.tolist() == [1, 1]


def test_a_sum_that_torch_cannot_compute():
    def body() -> None:
        dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn))

    text = text_of(body, 2, sim.SimError)
    assert text.startswith(
        "all_reduce #0 of group 'world' cannot be computed\n"
        "  rank 0  all_reduce  SUM    float8_e4m3fn [4]  test_sim_errors.py:* in body\n"
    )
    assert "\n  try: a dtype and a reduce op that torch can compute on the CPU\n" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: dist.all_gather([torch.ones(2)] * 3, torch.ones(2)),
            "all_gather: the output list has 3 tensors, expected one for each of 4 ranks",
        ),
        (
            lambda: dist.all_gather([torch.ones(n) for n in (2, 2, 2, 3)], torch.ones(2)),
            "all_gather: rank 3 of the group gives 2 elements, but its output list has 3 at that place",
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
            "all_to_all_single: the input has no dim 0 to split over 4 ranks: it is a scalar; group: world",
        ),
        (
            lambda: dist.all_reduce(torch.ones(4, 4)[:, 1:3]),
            "all_reduce: a tensor of shape [4, 2] does not fill its memory without gaps or overlaps (strides [4, 1])",
        ),
        (
            lambda: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX),
            "all_reduce: sparse tensors can be added up only, but the reduce op is MAX; group: world",
        ),
        (
            lambda: dist.group.WORLD.allgather_coalesced([[torch.ones(2)]] * 3, [torch.ones(2)]),
            "all_gather_coalesced: the output lists have [1, 1, 1] tensors, expected 1, one for each input, "
            "from each of 4 ranks; group: world",
        ),
        (lambda: dist.split_group(None, [[0, 0]]), "split_group: cannot split a group into [[0, 0]]"),
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

SAME_ORDER = "  try: let all ranks of a group call the same operations in the same order\n"


def test_a_skipped_collective():
    def body() -> None:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() != 1:
            dist.barrier()

    assert text_of(body, 3, sim.Deadlock) == (
        "no rank can run: 2 of 3 ranks wait, and none of them can go on\n"
        "  rank 0  waits in barrier #1 of group 'world'  for rank 1  test_sim_errors.py:* in body\n"
        "  rank 1  has finished\n"
        "  rank 2  waits in barrier #1 of group 'world'  for rank 1  test_sim_errors.py:* in body\n"
        "  because: rank 0 -> rank 1, which has finished\n"
        f"{SAME_ORDER}"
        "  replay: sim.run(..., world_size=3, seed=0)"
    )


def test_two_groups_in_opposite_order():
    def body() -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        if dist.get_rank() == 1:
            groups.reverse()
        for group in groups:
            dist.barrier(group=group)

    assert text_of(body, 2, sim.Deadlock) == (
        "no rank can run: 2 of 2 ranks wait, and none of them can go on\n"
        "  rank 0  waits in barrier #0 of group '1: ranks 0-1'  for rank 1  test_sim_errors.py:* in body\n"
        "  rank 1  waits in barrier #0 of group '2: ranks 0-1'  for rank 0  test_sim_errors.py:* in body\n"
        "  because: rank 0 -> rank 1 -> rank 0 (each waits for the next)\n"
        f"{SAME_ORDER}"
        "  replay: sim.run(..., world_size=2, seed=0)"
    )


def test_both_receive_first():
    def body() -> None:
        other = 1 - dist.get_rank()
        dist.recv(torch.ones(1), other, tag=5)
        dist.send(torch.ones(1), other, tag=5)

    assert text_of(body, 2, sim.Deadlock) == (
        "no rank can run: 2 of 2 ranks wait, and none of them can go on\n"
        "  rank 0  waits in recv from rank 1 with tag 5 in group 'world'  for rank 1  test_sim_errors.py:* in body\n"
        "  rank 1  waits in recv from rank 0 with tag 5 in group 'world'  for rank 0  test_sim_errors.py:* in body\n"
        "  because: rank 0 -> rank 1 -> rank 0 (each waits for the next)\n"
        f"{SAME_ORDER}"
        "  replay: sim.run(..., world_size=2, seed=0)"
    )


def test_an_async_operation_that_not_all_join():
    def body() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2), async_op=True)

    assert text_of(body, 2, sim.Deadlock) == (
        "all ranks have finished, but all_reduce #0 of group 'world' was never called by rank 1\n"
        "  rank 0  all_reduce         SUM    float32 [2]  test_sim_errors.py:* in body\n"
        "  rank 1  has not called it\n"
        "  try: call it on every rank of the group, and wait for the work that an async operation returns\n"
        "  replay: sim.run(..., world_size=2, seed=0)"
    )


def test_a_send_that_nobody_receives():
    def body() -> None:
        if dist.get_rank() == 0:
            dist.isend(torch.ones(2), 1, tag=3)

    assert text_of(body, 2, sim.Deadlock) == (
        "all ranks have finished, but not every send has met its recv\n"
        "  rank 0  send to rank 1 with tag 3 in group 'world'  float32 [2]  test_sim_errors.py:* in body\n"
        "  try: pair each send with a recv of the same group and tag, and wait for the work isend and irecv return\n"
        "  replay: sim.run(..., world_size=2, seed=0)"
    )


def test_a_key_that_nobody_sets():
    def body() -> None:
        if dist.get_rank() == 0:
            dist.distributed_c10d._get_default_store().get("weights")

    text = text_of(body, 2, sim.Deadlock)
    assert "  rank 0  waits in key" in text
    assert "weights' of the store" in text
    assert "  because: rank 0 waits for something that no rank is about to do\n" in text


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
        (
            MuteError,
            MuteError,
            "rank 1 raised MuteError: (its text cannot be shown: AttributeError in __str__)",
        ),
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


def test_an_exception_on_all_ranks_alike():
    def body() -> None:
        raise ValueError("dp=3 does not divide 8 ranks")

    with pytest.raises(ValueError, match="dp=3 does not divide 8 ranks") as caught:
        sim.run(body, 8)
    assert isinstance(caught.value, sim.RankFailed)


def test_a_normal_exit_is_a_normal_end():
    def body() -> str:
        if dist.get_rank() == 1:
            raise SystemExit
        if dist.get_rank() == 2:
            raise SystemExit(0)
        return "done"

    assert sim.run(body, 3) == ["done", None, None]


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
