"""What goes from stage to stage when ranks along tp send a part each, and gather it on the other side."""

import pytest

from hyper_parallel import ParallelDims
from sim.mesh.job import Job
from sim.mesh.models import find_model
from sim.mesh.program import Comm
from sim.mesh.recipe import Recipe
from sim.mesh.tracing.trace import trace

SIZE = 2 * 64 * 64 * 4  # a micro-batch of 2 sequences of 64 tokens, 64 wide, in float32


def comms(model, tp, **options):
    """Communication of the first and the last stage, by op and axis."""
    recipe = Recipe(param_dtype="fp32", microbatches=2, zero=1, **options)
    job = Job(find_model(model), ParallelDims(tp=tp, pp=2, world_size=2 * tp), 4, 64, recipe)
    found = []
    for program in trace(job):
        events = [event for segment, _ in program.segments_in_order() for event in segment.events]
        said = [e for e in events if isinstance(e, Comm) and program.places[e.place].phase != "optimizer"]
        found.append([(e.op, program.groups[e.group].axis, e.size) for e in said])
    return found


def messages(stage):
    return [size for op, axis, size in stage if axis == "pp" and op in ("send", "recv")]


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
def test_each_rank_sends_a_part_and_gathers_what_it_gets(model):
    plain = comms(model, 2, sequence_parallel=False)
    parts = comms(model, 2, sequence_parallel=False, scatter_gather=True)
    for before, after in zip(plain, parts, strict=True):
        assert messages(before) == [SIZE] * 4, "two micro-batches, there and back"
        assert messages(after) == [SIZE // 2] * 4
        more = [one for one in after if one == ("all_gather", "tp", SIZE)]
        fewer = [one for one in before if one == ("all_gather", "tp", SIZE)]
        assert len(more) == len(fewer) + 2, "one for each message that comes in"


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)])
def test_where_ranks_do_not_have_the_same_nothing_changes(tp, sequence_parallel):
    plain = comms("llama-tiny", tp, sequence_parallel=sequence_parallel)
    assert comms("llama-tiny", tp, sequence_parallel=sequence_parallel, scatter_gather=True) == plain
