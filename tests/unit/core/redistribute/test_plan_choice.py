"""The choice of a plan, and its cost: on topologies small enough that every number can be worked out by hand."""

import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute import BYTES_ONLY, Link, Topology, plan, topology
from hyper_parallel.core.redistribute.cost import Load, latency, seconds

FLOAT = torch.float32
MESH = Layout((2, 4), ("node", "gpu"))

# Two nodes of four ranks; links between them ten times slower, and slower to start.
NEAR, FAR = Link(2e-6, 1e-7, 1e9), Link(5e-6, 3e-7, 1e8)
TWO_NODES = Topology("two nodes", NEAR, FAR, 4)
RAILS = Topology("two nodes, a link for every rank", NEAR, FAR, 4, multi_rail=True)


def steps_of(found):
    return [(step.kind, "+".join(step.axes)) for step in found.steps]


def intra_node(ranks, count):
    """Seconds of a collective within a node, by hand."""
    return 2e-6 + 1e-7 * (ranks - 1) + count / 1e9


def inter_node(ranks, count):
    """Seconds of a collective over both nodes, by hand."""
    return 5e-6 + 3e-7 * (ranks - 1) + count / 1e8


# -- over slow links as little as can be -----------------------------------------------------------------------------

# 32,768 floats: 128 KiB, of which each of 8 ranks has 16 KiB.
WHOLE = 131_072
PART = WHOLE // 8
BOTH = ("node", "gpu")
SUMS = {"node": "sum", "gpu": "sum"}

ON_TWO_NODES = {
    "a gather takes the slow axis first": (
        MESH(BOTH),
        MESH(),
        [("all_gather", "node"), ("all_gather", "gpu")],
        [inter_node(2, PART), intra_node(4, 3 * 2 * PART)],
    ),
    "likewise when the slow axis is the inner one": (
        MESH(("gpu", "node")),
        MESH(),
        [("all_gather", "node"), ("all_gather", "gpu")],
        [inter_node(2, PART), intra_node(4, 3 * 2 * PART)],
    ),
    "a reduce_scatter takes the fast axis first": (
        MESH(partial=SUMS),
        MESH(BOTH),
        [("reduce_scatter", "gpu"), ("reduce_scatter", "node")],
        [intra_node(4, 3 * WHOLE // 4), inter_node(2, PART)],
    ),
    "likewise when the slow axis is the outer one": (
        MESH(partial=SUMS),
        MESH(("gpu", "node")),
        [("reduce_scatter", "gpu"), ("reduce_scatter", "node")],
        [intra_node(4, 3 * WHOLE // 4), inter_node(2, PART)],
    ),
    "an all_reduce in three levels": (
        MESH(partial=SUMS),
        MESH(),
        [("reduce_scatter", "gpu"), ("all_reduce", "node"), ("all_gather", "gpu")],
        [intra_node(4, 3 * WHOLE // 4), inter_node(2, WHOLE // 4), intra_node(4, 3 * WHOLE // 4)],
    ),
    "an all_reduce of what a node's ranks hold alike": (
        MESH(partial={"node": "sum"}),
        MESH(),
        [("slice", ""), ("all_reduce", "node"), ("all_gather", "gpu")],
        [0.0, inter_node(2, WHOLE // 4), intra_node(4, 3 * WHOLE // 4)],
    ),
    "an exchange that crosses nodes once and then gathers": (
        MESH("node", "None"),
        MESH("None", "node"),
        [("all_to_all", "node"), ("all_gather", "gpu")],
        [
            inter_node(2, WHOLE // 4 // 4),
            intra_node(4, 3 * WHOLE // 2 // 4),
        ],  # a quarter is missing; each rank gets a quarter of it
    ),
    "a gather over nodes, shared by the ranks of each": (
        MESH("node"),
        MESH(),
        [("all_to_all", "node"), ("all_gather", "gpu")],
        [
            inter_node(2, WHOLE // 2 // 4),
            intra_node(4, 3 * WHOLE // 4),
        ],  # half is missing; each rank gets a quarter of that
    ),
    "an exchange that leaves nothing to gather": (
        MESH(BOTH, "None"),
        MESH("None", BOTH),
        [("all_to_all", "node+gpu")],
        [inter_node(8, 4 * PART // 8)],  # of 7/8 of its part, 4/8 come from the other node
    ),
    "what a node has already": (
        MESH("gpu", "None"),
        MESH("None", "node"),
        [("slice", ""), ("all_gather", "gpu")],
        [0.0, intra_node(4, 3 * WHOLE // 2 // 4)],
    ),
}


@pytest.mark.parametrize("case", ON_TWO_NODES)
def test_slow_links_are_crossed_once(case):
    src, dst, steps, times = ON_TWO_NODES[case]
    shape = (256, 128) if len(src.alias_placements) == 2 else (32_768,)
    found = plan(src, dst, shape, FLOAT, TWO_NODES)
    assert steps_of(found) == steps
    assert [step.seconds for step in found.steps] == pytest.approx(times)
    assert found.seconds == pytest.approx(sum(times))


def test_rails_make_one_collective_enough():
    """A ring over both nodes crosses with 1/4 of 4/7 of the bytes on each of four links."""
    crossing = 7 * PART * 4 / 7 / 4
    gather = plan(MESH(BOTH), MESH(), (32_768,), FLOAT, RAILS)
    assert steps_of(gather) == [("all_gather", "node+gpu")]
    assert gather.seconds == pytest.approx(inter_node(8, crossing))
    reduce = plan(MESH(partial=SUMS), MESH(), (32_768,), FLOAT, RAILS)
    assert steps_of(reduce) == [("all_reduce", "node+gpu")]
    assert reduce.seconds == pytest.approx(inter_node(8, 2 * crossing))


def test_uneven_parts_ride_no_ring():
    """Collectives take parts of one size; uneven ones are exchanged from rank to rank, so each crosses for each."""
    found = plan(MESH(BOTH), MESH(), (32_767,), FLOAT, RAILS)
    assert steps_of(found) == [("all_gather", "node"), ("all_gather", "gpu")]
    # The rank with one element less lacks one more; the last node's parts are one element less together.
    assert [step.seconds for step in found.steps] == pytest.approx([inter_node(2, PART), intra_node(4, 3 * 2 * PART)])


# -- few steps or few bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "expected"), [(4996, 1), (5004, 2)])
def test_where_fewer_bytes_begin_to_pay_on_one_node(count, expected):
    """Copies over dp of halves over tp, wanted whole, W bytes, by 4 ranks at a + 3p and 2 at a + p.

    In one step each rank gets all copies of everything: 2W - W/2 bytes, a + 3p. In two, an all_reduce and an
    all_gather of halves: W bytes, 2 (a + p). They take the same time where W/2 bytes take a - p: with a = 11 us,
    p = 1 us and 1 GB/s at W = 20,000 bytes, 5,000 floats.
    """
    mesh = Layout((2, 2), ("dp", "tp"))
    on = Topology("one node", Link(11e-6, 1e-6, 1e9))
    found = plan(mesh("tp", partial={"dp": "sum"}), mesh(), (count,), FLOAT, on)
    full = 4 * count
    one, two = 14e-6 + 1.5 * full / 1e9, 24e-6 + full / 1e9
    assert found.num_collectives == expected
    assert found.seconds == pytest.approx(min(one, two))
    assert (one < two) == (expected == 1)
    assert found.recv_bytes.tolist() == [full * 3 // 2 if expected == 1 else full] * 4


@pytest.mark.parametrize(("part", "expected"), [(249, ["node+gpu"]), (251, ["node", "gpu"])])
def test_where_two_levels_begin_to_pay_on_two_nodes(part, expected):
    """A gather of parts of b bytes on 8 ranks, all at the pace of one slow link, or in two levels.

    One step: A + 7 b/slow. Two: A + b/slow, then a + 6 b/fast. They take the same time where 6 b (1/slow - 1/fast) = a:
    with a = 54 us, 0.1 and 1 GB/s at b = 1,000 bytes, 250 floats.
    """
    on = Topology("two nodes", Link(54e-6, 0.0, 1e9), Link(70e-6, 0.0, 1e8), 4)
    found = plan(MESH(BOTH), MESH(), (8 * part,), FLOAT, on)
    size = 4 * part
    one, two = 70e-6 + 7 * size / 1e8, 70e-6 + size / 1e8 + 54e-6 + 6 * size / 1e9
    assert ["+".join(step.axes) for step in found.steps] == expected
    assert {step.kind for step in found.steps} == {"all_gather"}
    assert found.seconds == pytest.approx(min(one, two))
    assert (one < two) == (len(expected) == 1)


def test_without_latency_the_fewest_bytes_win():
    mesh = Layout((2, 2), ("dp", "tp"))
    for count in (4, 5004):
        found = plan(mesh("tp", partial={"dp": "sum"}), mesh(), (count,), FLOAT)
        assert found.recv_bytes.tolist() == [4 * count] * 4
        assert found.topology == BYTES_ONLY


# -- the price of one step -------------------------------------------------------------------------------------------

PLAIN = Topology("plain", NEAR, FAR, 4, memory_bandwidth=1e10)
PLAIN_RAILS = Topology("rails", NEAR, FAR, 4, memory_bandwidth=1e10, multi_rail=True)

# 8 ranks, 4 to a node, of which the busiest moves 7,000 bytes, 4,000 of them between nodes, and copies 500.
APART = Load(ranks=8, per_node=4, moved=7_000, inter_node=4_000, copied=500)
START = 5e-6 + 7 * 3e-7
COPY = 2 * 500 / 1e10
RINGS, DIRECT = ("all_gather", "reduce_scatter", "all_reduce"), ("all_to_all", "permute")
PRICES = [
    # Within a node: the latency, and all bytes at the fast pace.
    *(
        (kind, Load(4, 4, 3_000, 0, 500), PLAIN, 2e-6 + 3 * 1e-7 + 3_000 / 1e9 + COPY)
        for kind in (*RINGS, *DIRECT)
    ),
    # Over nodes, from rank to rank: 3,000 bytes at the fast pace beside 4,000 at the slow one.
    *((kind, APART, PLAIN, START + 4_000 / 1e8 + COPY) for kind in DIRECT),
    *((kind, APART, PLAIN_RAILS, START + 4_000 / 1e8 + COPY) for kind in DIRECT),
    # Nearly all stays within the node: 70 of 7,000 bytes at the slow pace take less than 6,930 at the fast one.
    ("all_to_all", APART._replace(inter_node=70), PLAIN, START + 6_930 / 1e9 + COPY),
    # In a ring all bytes go at the slow pace; on rails, 1/4 of 4/7 of them do.
    *((kind, APART, PLAIN, START + 7_000 / 1e8 + COPY) for kind in RINGS),
    *((kind, APART, PLAIN_RAILS, START + 1_000 / 1e8 + COPY) for kind in RINGS),
    # Alone nothing is started, and only memory counts.
    *((kind, Load(1, 1, 0, 0, 500), PLAIN, COPY) for kind in ("slice", "copy")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "load", "on", "expected"), PRICES)
def test_seconds_by_hand(kind, load, on, expected):
    assert seconds(kind, load, on) == pytest.approx(expected)


def test_latency_by_hand():
    assert latency(APART, PLAIN) == pytest.approx(START)
    assert latency(APART._replace(per_node=8), PLAIN) == pytest.approx(2e-6 + 7 * 1e-7)
    assert latency(Load(1, 1, 0, 0, 0), PLAIN) == 0.0
    assert latency(APART, BYTES_ONLY) == 0.0


def test_every_round_takes_its_latency():
    """4 ranks turn 32 KiB: 3/4 of a part of 8 KiB each, so 6 KiB in three pieces, then in rounds of the same bytes."""
    mesh = Layout((4,), ("gpu",))
    on = Topology("one node", NEAR)
    turn = (mesh("gpu", "None"), mesh("None", "gpu"), (128, 64), FLOAT, on)
    once = plan(*turn)
    assert once.seconds == pytest.approx(intra_node(4, 6144))
    cut = plan(*turn, max_extra_bytes=once.peak_extra_bytes // 4)
    assert cut.num_collectives == cut.steps[0].rounds > 1
    assert cut.recv_bytes.tolist() == once.recv_bytes.tolist() == [6144] * 4
    assert cut.seconds == pytest.approx(intra_node(4, 6144) + (cut.num_collectives - 1) * (2e-6 + 3e-7))


def test_a_gather_in_rounds_is_priced_as_the_exchange_it_is():
    """On rails a ring crosses with 1/4 of the bytes; in rounds each rank sends to each, and all of it crosses."""
    mesh = MESH("None", BOTH)
    full = plan(mesh, MESH("None", "None"), (8, 64), FLOAT, RAILS)
    assert steps_of(full) == [("all_gather", "node+gpu")]
    part, start = 4 * 8 * 64 // 8, 5e-6 + 7 * 3e-7
    assert full.seconds == pytest.approx(start + part / 1e8)
    [step] = plan(mesh, MESH("None", "None"), (8, 64), FLOAT, RAILS, max_extra_bytes=512).steps
    assert step.rounds == 8
    assert step.seconds == pytest.approx(start + 4 * part / 1e8 + (step.rounds - 1) * start)


# -- a plan is a value -----------------------------------------------------------------------------------------------


def test_plans_are_printed():
    mesh = Layout((2, 4), ("dp", "tp"))
    reduce = plan(
        mesh("None", "tp", partial={"dp": "avg"}), mesh("tp"), (4096, 1024), torch.bfloat16, topology("h100", 4)
    )
    assert str(reduce) == (
        "(-, tp) pending avg over dp on dp=2, tp=4 -> (tp, -) on dp=2, tp=4, (4096, 1024) bfloat16\n"
        "step            over   ranks  receives    sends    extra     us\n"
        "reduce_scatter  dp+tp      8   3.5 MiB  3.5 MiB  7.5 MiB  127.2"
    )  # fmt: skip


def test_nothing_to_do_is_printed():
    mesh = Layout((2, 1), ("dp", "tp"))
    idle = plan(mesh("dp"), mesh(("dp", "tp")), (8,), FLOAT)
    assert str(idle) == "(dp) on dp=2, tp=1 -> (dp>tp) on dp=2, tp=1, (8,) float32\nnothing to do"
    assert (idle.steps, idle.seconds, idle.num_collectives, idle.peak_extra_bytes) == ((), 0, 0, 0)
    assert idle.recv_bytes.tolist() == idle.send_bytes.tolist() == [0, 0]


def test_one_plan_is_made_once():
    first = plan(MESH("gpu"), MESH(), (8,), FLOAT, TWO_NODES)
    again = Topology("two nodes", Link(2e-6, 1e-7, 1e9), Link(5e-6, 3e-7, 1e8), 4)
    assert plan(Layout((2, 4), ("node", "gpu"))("gpu"), MESH("None"), torch.Size([8]), FLOAT, again) is first
    assert plan(MESH("gpu"), MESH(), [8], FLOAT, TWO_NODES) is first
    assert plan(MESH("gpu"), MESH(), (8,), FLOAT, RAILS) is not first
    assert plan(MESH("gpu"), MESH(), (8,), torch.int32, TWO_NODES) is not first
    assert plan(MESH("gpu"), MESH(), (8,), FLOAT, TWO_NODES, max_extra_bytes=2**20) is not first


def test_a_plan_holds_no_mesh_and_travels():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("node", "gpu"))
        own = Layout.from_device_mesh(mesh)
        found = plan(own("node", "gpu"), own(("gpu", "node")), (16, 8), FLOAT, RAILS)
        assert found.src.mesh is None
        assert found.dst.mesh is None
        return dist.get_rank(), pickle.dumps(found)

    ranks, texts = zip(*sim.run(on_rank, world_size=8), strict=True)
    assert ranks == tuple(range(8))
    assert len({str(pickle.loads(text)) for text in texts}) == 1
    direct = plan(MESH("node", "gpu"), MESH(("gpu", "node")), (16, 8), FLOAT, RAILS)
    for text in texts:
        assert b"DeviceMesh" not in text
        read = pickle.loads(text)
        assert (read.src, read.dst, str(read), steps_of(read)) == (
            direct.src,
            direct.dst,
            str(direct),
            steps_of(direct),
        )
        assert read.recv_bytes.tolist() == direct.recv_bytes.tolist()
        assert read.send_bytes.tolist() == direct.send_bytes.tolist()


def test_ranks_that_start_with_other_plans_get_the_same():
    def on_rank():
        if dist.get_rank():  # the others have planned before
            plan(MESH("gpu"), MESH("node"), (8 + dist.get_rank(),), FLOAT, TWO_NODES)
        return [
            str(plan(MESH("gpu", "node"), MESH("None", order), (24, 8), FLOAT, TWO_NODES)) for order in ("gpu", BOTH)
        ]

    first, *others = sim.run(on_rank, world_size=8)
    assert others == [first] * 7
    assert all(re.match(r"\(gpu, node\) on node=2, gpu=4 -> ", text) for text in first)
