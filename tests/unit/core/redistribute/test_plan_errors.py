"""Errors of planning: four parts, before anything is planned or communicated."""

import re

import pytest
import torch
import torch.distributed as dist
from errors_kit import assert_says, errors_on_ranks

from hyper_parallel import HyperParallelError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import machine_names
from hyper_parallel.core.redistribute import execute, lower_bound, plan

MESH = Layout((2, 4), ("dp", "tp"))
FLOAT = torch.float32
ON = "on dp=2, tp=4"

PLAN, BOUND, PLACE = "cannot plan a redistribution", "cannot bound a redistribution", "cannot place a tensor"
LAYOUT_HINT = 'Layout((2, 4), ("dp", "tp"))("dp", "None")'
SHAPE_HINT = "tensor.shape, such as (8, 4)"
DTYPE_HINT = "a tensor of another dtype, such as x.to(torch.float32)"
BOTH = f"from: () {ON}   to: () {ON}"
ANY_FILE = "or the path of a TOML file"
KNOWN = f"known: {', '.join(machine_names())}"
MIXED = "sum over 'dp', max over 'tp' pending, and the order in which to take them is nowhere said"
SUMS = "one kind, such as partial={'dp': 'sum', 'tp': 'sum'}"
TWO_KINDS = MESH(partial={"dp": "sum", "tp": "max"})


def between(src, dst, dtype=FLOAT, verb=plan):
    return lambda: verb(src, dst, (8,), dtype)


def pends(layout, kinds):
    return f"{layout} pending {kinds} {ON}"


# What was done, and what is said of it.
MISTAKES = {
    "src without assignment": (
        between(MESH, MESH()),
        f"{PLACE}: the layout is a mesh without an assignment\n  layout: (no assignment)   mesh: dp=2, tp=4\n"
        '  try: layout("dp", "None"), or layout() for everything replicated',
    ),
    "too many dims": (
        between(MESH(), MESH("dp", "tp")),
        f"{PLACE}: entry 1, 'tp', is for a dim that a tensor of ndim 1 does not have\n"
        "  layout: (dp, tp)   mesh: dp=2, tp=4\n  try: one entry per dim at most",
    ),
    "a size below 0": (
        lambda: plan(MESH(), MESH(), [8, -1], FLOAT),
        f"{PLACE}: global_shape[1] must be at least 0\n  global_shape[1]: -1\n  try: tensor.shape, such as (8, 4)",
    ),
    "a limit below 0": (
        lambda: plan(MESH(), MESH(), (8,), FLOAT, max_extra_bytes=-1),
        f"{PLAN}: max_extra_bytes must be at least 0\n  max_extra_bytes: -1\n  try: max_extra_bytes=2**28, or None",
    ),
    "two kinds pending at the source": (
        between(TWO_KINDS, MESH()),
        f"{PLAN}: src has {MIXED}\n"
        f"  from: {pends('()', 'sum over dp, max over tp')}   to: () {ON}   global_shape: (8,)\n  try: {SUMS}",
    ),
    "two kinds pending at the destination": (
        between(MESH(), TWO_KINDS, verb=lower_bound),
        f"{BOUND}: dst has {MIXED}\n"
        f"  from: () {ON}   to: {pends('()', 'sum over dp, max over tp')}   global_shape: (8,)\n  try: {SUMS}",
    ),
    "an average of bools": (
        between(MESH(partial={"dp": "avg"}), MESH(), torch.bool),
        f"InvalidType: {PLAN}: avg is pending over 'dp', and there is no average of torch.bool\n"
        f"  from: {pends('()', 'avg over dp')}   to: () {ON}   global_shape: (8,)\n  try: {DTYPE_HINT}",
    ),
    "an average of bytes": (
        between(MESH(), MESH(partial={"dp": "avg"}), torch.uint8),
        f"InvalidType: {PLAN}: avg is pending over 'dp', and sums of torch.uint8 soon exceed its range\n"
        f"  from: () {ON}   to: {pends('()', 'avg over dp')}   global_shape: (8,)\n  try: {DTYPE_HINT}",
    ),
    "the largest of complex numbers": (
        between(MESH(), MESH(partial={"dp": "max"}), torch.complex64),
        f"InvalidType: {PLAN}: max is pending over 'dp', and torch.distributed has no max of torch.complex64\n"
        f"  from: () {ON}   to: {pends('()', 'max over dp')}   global_shape: (8,)\n  try: {DTYPE_HINT}",
    ),
    "a sum of floats of one byte": (
        between(MESH("dp", partial={"tp": "sum"}), MESH("dp"), torch.float8_e4m3fn, lower_bound),
        f"InvalidType: {BOUND}: sum is pending over 'tp', and torch does not compute with torch.float8_e4m3fn\n"
        f"  from: {pends('(dp)', 'sum over tp')}   to: (dp) {ON}   global_shape: (8,)\n  try: {DTYPE_HINT}",
    ),
    "a machine misspelt": (
        lambda: plan(MESH(), MESH(), (8,), FLOAT, "ascend-910"),
        f"cannot find the hardware 'ascend-910': nothing has that name\n  {KNOWN}\n  try: 'ascend-910b', {ANY_FILE}",
    ),
    "to execute without ranks": (
        lambda: execute(plan(MESH("dp"), MESH(), (8,), FLOAT), torch.ones(4)),
        f"cannot execute a plan: torch.distributed is not initialized\n  from: (dp) {ON}   to: (-) {ON}\n"
        "  try: torchrun, or sim.run(function, world_size=8)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained(mistake):
    call, expected = MISTAKES[mistake]
    with pytest.raises(HyperParallelError) as caught:
        call()
    assert_says(caught.value, expected)


# What a rank may do wrong when a plan is carried out, of 8 elements from halves to the whole on ranks 0 and 1 of three.
ON_RANKS = {
    "nothing on a rank of the source": (
        lambda: None,
        "InvalidType: cannot redistribute rank 0's part: local is None, not a tensor\n"
        "  local: None\n  try: the rank's shard of the source",
    ),
    "another dtype": (
        lambda: torch.ones(4, dtype=torch.float64),
        "InvalidType: cannot redistribute rank 0's part: local has dtype torch.float64, and the plan is for "
        "torch.float32\n  global_shape: (8,)   layout: (dp) on dp=2\n  try: plan(..., dtype=torch.float64)",
    ),
    "another shape": (
        lambda: torch.ones(8),
        "cannot redistribute rank 0's part: local has shape (8,), and the layout gives this rank (4,)\n"
        "  global_shape: (8,)   layout: (dp) on dp=2\n"
        "  try: the global shape and the layout that the tensor really has",
    ),
}


@pytest.mark.parametrize("mistake", ON_RANKS)
def test_a_part_that_does_not_fit_is_refused_before_anything_is_sent(mistake):
    make, expected = ON_RANKS[mistake]
    pair = Layout((2,), ("dp",))
    texts = errors_on_ranks(lambda: execute(plan(pair("dp"), pair(), (8,), FLOAT), make()), 2)
    for rank, text in enumerate(texts):
        assert_says(text, expected.replace("rank 0's", f"rank {rank}'s"))


def test_a_rank_on_neither_mesh():
    pair, found = Layout((2,), ("dp",)), []

    def call():
        part = torch.ones(4) if dist.get_rank() < 2 else None
        found.append(execute(plan(pair("dp"), pair(), (8,), FLOAT), part).tolist())

    *others, text = errors_on_ranks(call, 3, sends=True)
    assert (others, found) == ([None] * 2, [[1.0] * 8] * 2)
    assert_says(
        text,
        "cannot redistribute on rank 2: the rank is neither on the mesh that the tensor is on nor on the one it goes to"
        "\n  from: (dp) on dp=2   to: (-) on dp=2\n  try: call it on ranks 0, 1 only",
    )


# -- the limit of memory ---------------------------------------------------------------------------------------------

TURNS = {
    "from dim to dim": (MESH("tp", "None"), MESH("None", "tp"), (8, 8), 3, 48),
    "uneven": (MESH(("tp", "dp"), "None"), MESH("None", "dp"), (7, 5), 8, 52),
    "to another mesh": (MESH("dp", "tp"), Layout((3,), ("x",))("None", "x"), (6, 8), 0, 24),
}


@pytest.mark.parametrize("turn", TURNS)
def test_the_least_limit_is_named_and_works(turn):
    src, dst, shape, limit, least = TURNS[turn]
    with pytest.raises(ValueError) as caught:
        plan(src, dst, shape, FLOAT, max_extra_bytes=limit)
    assert str(caught.value) == (
        f"cannot redistribute within max_extra_bytes={limit}: even in the smallest rounds, every plan takes more\n"
        f"  from: {src}   to: {dst}   global_shape: {shape}\n"
        f"  try: max_extra_bytes={least}"
    )
    named = int(re.search(r"max_extra_bytes=(\d+)$", str(caught.value))[1])
    assert plan(src, dst, shape, FLOAT, max_extra_bytes=named).peak_extra_bytes <= named
    with pytest.raises(ValueError, match=f"try: max_extra_bytes={named}$"):
        plan(src, dst, shape, FLOAT, max_extra_bytes=named - 1)


def test_what_torch_does_not_reduce_moves_all_the_same():
    kept = plan(MESH("dp", partial={"tp": "max"}), MESH(None, "dp", partial={"tp": "max"}), (4, 4), torch.complex64)
    assert [step.kind for step in kept.steps] == ["all_to_all"]
    alone = Layout((1, 2), ("dp", "tp"))
    assert plan(alone(partial={"dp": "avg"}), alone(), (4,), torch.bool).steps == ()
    assert plan(MESH("dp"), MESH(), (4,), torch.float8_e4m3fn).num_collectives == 1


def test_a_tensor_too_large_to_count():
    """Bytes are 64-bit integers: more of them than that would be counted as none."""
    mesh = Layout((4,), ("dp",))
    for verb in (plan, lower_bound):
        with pytest.raises(ValueError, match=r"elements are more than 4 ranks' bytes can be counted for\n.*\n  try: "):
            verb(mesh("dp", "None"), mesh("None", "dp"), (2**33, 2**33), torch.float32)


def test_a_plan_that_is_known_cannot_be_changed():
    mesh = Layout((4,), ("dp",))
    found = plan(mesh("dp"), mesh(), (8,), torch.float32)
    for counts in (found.recv_bytes, found.send_bytes, found.steps[0].recv_bytes, found.steps[0].send_bytes):
        with pytest.raises(ValueError, match="read-only"):
            counts[0] = 99
