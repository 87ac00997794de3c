"""Errors with four parts: text, attributes, bases, copies, pickles, and the same on every rank."""

import copy
import pickle
import re
import traceback

import pytest

import hyper_parallel as hp
import sim
from hyper_parallel.core.checkpoint import CheckpointError
from hyper_parallel.core.checkpoint.errors import Peers
from hyper_parallel.core.redistribute.plan import TooTight
from sim.mesh.cost import UnknownOperation

PARTS = ("cannot split dim 0 over 'td'", "no axis has that name", "mesh: dp=2, tp=4", "'tp'")
TEXT = "cannot split dim 0 over 'td': no axis has that name\n  mesh: dp=2, tp=4\n  try: 'tp'"


def parts_of(error: hp.HyperParallelError) -> tuple[str, ...]:
    return error.asked, error.blame, error.seen, error.hint


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (hp.InvalidValue, ValueError),
        (hp.InvalidType, TypeError),
        (hp.InvalidState, RuntimeError),
        (CheckpointError, RuntimeError),
        (UnknownOperation, ValueError),
        (sim.SimError, RuntimeError),
        (TooTight, ValueError),
    ],
)
def test_has_the_text_of_four_parts_and_survives_copies(kind, builtin):
    with pytest.raises(builtin, match=re.escape(PARTS[1])) as caught:
        raise kind(*PARTS)
    for error in (caught.value, copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert type(error) is kind
        assert isinstance(error, hp.HyperParallelError)
        assert (str(error), error.args, parts_of(error)) == (TEXT, (TEXT,), PARTS)
    again = kind(*caught.value.args)  # as torch's loader of data makes the errors of its workers once more
    assert (str(again), parts_of(again)) == (TEXT, ("", "", "", ""))


@pytest.mark.parametrize("kind", [hp.InvalidValue, hp.InvalidType, hp.InvalidState, CheckpointError, TooTight])
@pytest.mark.parametrize("parts", [(), PARTS[:2], PARTS[:3], (*PARTS, "more")], ids=len)
def test_takes_one_text_or_four_parts(kind, parts):
    with pytest.raises(TypeError, match=f"^{kind.__name__} takes .*: not {len(parts)}$") as caught:
        kind(*parts)
    assert type(caught.value) is TypeError


def test_parts_may_be_empty():
    assert str(hp.InvalidValue("cannot", "", "", "")) == "cannot: \n  \n  try: "


def test_pickles_keep_the_other_attributes():
    assert pickle.loads(pickle.dumps(TooTight(*PARTS, least=3))).least == 3


def test_tracebacks_show_the_name_that_users_import():
    assert traceback.format_exception_only(hp.InvalidValue(*PARTS))[0].startswith(
        "hyper_parallel.InvalidValue: cannot "
    )


@sim.ranks(2)
def test_a_rank_raises_what_another_has_met(ctx):
    failure = hp.InvalidType(*PARTS) if ctx.rank == 1 else None
    with pytest.raises(hp.InvalidType, match=re.escape(PARTS[1])):
        Peers.of(None).agree(failure)


def test_the_failure_of_a_rank_has_the_parts_of_its_cause():
    def body():
        raise hp.InvalidValue(*PARTS)

    with pytest.raises(ValueError, match="rank 0 raised InvalidValue: cannot split") as caught:
        sim.run(body, world_size=1)
    assert isinstance(caught.value, hp.InvalidValue)
    assert parts_of(caught.value) == PARTS
