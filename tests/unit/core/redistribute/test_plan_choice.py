"""The choice of a plan, and its cost: on machines simple enough that every number can be worked out by hand."""

import os
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from machine_kit import Made, machine
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import find_machine
from hyper_parallel.core.redistribute import plan
from hyper_parallel.core.redistribute.chunks import Chunks
from hyper_parallel.core.redistribute.cost import Load, latency, seconds
from hyper_parallel.core.redistribute.steps import Fill

FLOAT = torch.float32
MESH = Layout((2, 4), ("node", "gpu"))

# Nodes of four ranks; links between them ten times slower, twenty times, or a quarter as fast, and slower to start.
NEAR, FAR = Made(2e-6, 1e-7, 1e9), Made(5e-6, 3e-7, 1e8)
TWO_NODES = machine("ten times slower", NEAR, FAR, 4)
SLOWER = machine("twenty times slower", NEAR, FAR._replace(bandwidth=5e7), 4)
QUARTER = machine("together as fast", NEAR, FAR._replace(bandwidth=2.5e8), 4)


def steps_of(found):
    return [(step.kind, "+".join(step.axes)) for step in found.steps]


def intra_node(ranks, count):
    """Seconds of a collective within a node, by hand."""
    return 2e-6 + 1e-7 * (ranks - 1) + count / 1e9


def inter_node(ranks, count):
    """Seconds of an exchange between nodes, or of a ring with one rank on each, by hand."""
    return 5e-6 + 3e-7 * (ranks - 1) + count / 1e8


def around_both(count, rate):
    """Seconds of a ring over both nodes, by hand: a hop between nodes, and on each node, and back, 3 within."""
    return 5e-6 + 3e-7 + 2 * 3 * 1e-7 + count / rate


def halves(ranks, count, rate):
    """Seconds of an all_reduce over two nodes, of so many ranks on each: nodes exchange halves, which takes no hop."""
    return 5e-6 + 1e-7 * (ranks - 1) + count / (ranks * rate)


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
    "an all_reduce in one, as its ranks send a buffer between two nodes by four links": (
        MESH(partial=SUMS),
        MESH(),
        [("all_reduce", "node+gpu")],
        [halves(4, WHOLE, 1e8)],  # in three levels: 327.7 us between nodes as well, and 2 * 98.3 us within
    ),
    "an all_reduce of what a node's ranks hold alike": (
        MESH(partial={"node": "sum"}),
        MESH(),
        [("slice", ""), ("all_reduce", "node"), ("all_gather", "gpu")],
        [0.0, halves(1, WHOLE // 4, 1e8), intra_node(4, 3 * WHOLE // 4)],
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


def test_an_all_reduce_over_many_slow_nodes_takes_three_levels():
    """Of W bytes over 4 nodes of 4 ranks, each pair of links S and F bytes per second fast.

    One: 2 * 15/16 W by the links of four ranks, 0.469 W/S. Three: 3/4 W within a node, 2 * 3/4 of W/4 between nodes,
    3/4 W within: 0.375 W/S + 1.5 W/F. Three take less where F > 16 S: with F = 20 S, 1.875 W/F less than 9.375 W/F.
    """
    mesh = Layout((4, 4), ("node", "gpu"))
    found = plan(mesh(partial=SUMS), mesh(), (32_768,), FLOAT, SLOWER)
    assert steps_of(found) == [("reduce_scatter", "gpu"), ("all_reduce", "node"), ("all_gather", "gpu")]
    within, between = intra_node(4, 3 * WHOLE // 4), 5e-6 + 3e-7 + 2 * 3 / 4 * WHOLE / 4 / 5e7  # a tree of 2 doublings
    assert [step.seconds for step in found.steps] == pytest.approx([within, between, within])
    nearer = machine("15 times slower", NEAR, FAR._replace(bandwidth=1e9 / 15), 4)
    whole = plan(mesh(partial=SUMS), mesh(), (32_768,), FLOAT, nearer)
    assert steps_of(whole) == [("all_reduce", "node+gpu")]
    assert whole.seconds == pytest.approx(5e-6 + 3e-7 + 3 * 1e-7 + 2 * 15 / 16 * WHOLE / 4 * 15 / 1e9)


def test_links_that_are_together_as_fast_as_a_node_make_one_collective_enough():
    """Four links of a quarter of the pace: a ring over both nodes goes at the pace of one within a node."""
    gather = plan(MESH(BOTH), MESH(), (32_768,), FLOAT, QUARTER)
    assert steps_of(gather) == [("all_gather", "node+gpu")]
    assert gather.seconds == pytest.approx(around_both(7 * PART, 1e9))
    reduce = plan(MESH(partial=SUMS), MESH(), (32_768,), FLOAT, QUARTER)
    assert steps_of(reduce) == [("all_reduce", "node+gpu")]
    assert reduce.seconds == pytest.approx(halves(4, 2 * 7 * PART, 1e9 / 4))  # halves would go faster between nodes


def test_uneven_parts_ride_no_ring():
    """Collectives take parts of one size; uneven ones are exchanged from rank to rank, so each crosses for each."""
    found = plan(MESH(BOTH), MESH(), (32_767,), FLOAT, QUARTER)
    assert steps_of(found) == [("all_gather", "node"), ("all_gather", "gpu")]
    # The rank with one element less lacks one more; the last node's parts are one element less together.
    slow, fast = inter_node(2, 0) + PART / 2.5e8, intra_node(4, 3 * 2 * PART)
    assert [step.seconds for step in found.steps] == pytest.approx([slow, fast])


# -- few steps or few bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "expected"), [(4996, 1), (5004, 2)])
def test_where_fewer_bytes_begin_to_pay_on_one_node(count, expected):
    """Copies over dp of halves over tp, wanted whole, W bytes, by 4 ranks at a + 3p and 2 at a + p.

    In one step each rank gets all copies of everything: 2W - W/2 bytes, a + 3p. In two, an all_reduce and an
    all_gather of halves: W bytes, 2 (a + p). They take the same time where W/2 bytes take a - p: with a = 11 us,
    p = 1 us and 1 GB/s at W = 20,000 bytes, 5,000 floats.
    """
    mesh = Layout((2, 2), ("dp", "tp"))
    on = machine("one node", Made(11e-6, 1e-6, 1e9))
    found = plan(mesh("tp", partial={"dp": "sum"}), mesh(), (count,), FLOAT, on)
    full = 4 * count
    one, two = 14e-6 + 1.5 * full / 1e9, 24e-6 + full / 1e9
    assert found.num_collectives == expected
    assert found.seconds == pytest.approx(min(one, two))
    assert (one < two) == (expected == 1)
    assert found.recv_bytes.tolist() == [full * 3 // 2 if expected == 1 else full] * 4


@pytest.mark.parametrize(("part", "expected"), [(249, ["node+gpu"]), (251, ["node", "gpu"])])
def test_where_two_levels_begin_to_pay_on_two_nodes(part, expected):
    """A gather of parts of b bytes on 8 ranks, at the pace of the slow links of a node together, or in two levels.

    One step: A + 7 b/(4 slow). Two: A + b/slow, then a + 6 b/fast. They take the same time where
    b (0.75/slow - 6/fast) = a: with a = 1.5 us, 0.1 and 1 GB/s at b = 1,000 bytes, 250 floats.
    """
    on = machine("two nodes", Made(1.5e-6, 0.0, 1e9), Made(70e-6, 0.0, 1e8), 4)
    found = plan(MESH(BOTH), MESH(), (8 * part,), FLOAT, on)
    size = 4 * part
    one, two = 70e-6 + 7 * size / 4e8, 70e-6 + size / 1e8 + 1.5e-6 + 6 * size / 1e9
    assert ["+".join(step.axes) for step in found.steps] == expected
    assert {step.kind for step in found.steps} == {"all_gather"}
    assert found.seconds == pytest.approx(min(one, two))
    assert (one < two) == (len(expected) == 1)


def test_without_a_machine_the_fewest_bytes_win():
    mesh = Layout((2, 2), ("dp", "tp"))
    for count in (4, 5004):
        found = plan(mesh("tp", partial={"dp": "sum"}), mesh(), (count,), FLOAT)
        assert found.recv_bytes.tolist() == [4 * count] * 4
        assert found.machine is None


def test_sums_are_scattered_over_the_dim_that_divides_evenly():
    for shape in ((5, 8), (8, 5)):
        scatter, gather = plan(MESH(partial={"gpu": "sum"}), MESH(), shape, FLOAT).steps
        assert scatter.recv_bytes.tolist() == [40 * 4 // 8 * 3] * 8  # of an eighth, from three other ranks
        assert gather.recv_bytes.tolist() == [40 * 4 // 8 * 7] * 8


def test_an_average_on_another_mesh_is_made_of_as_many_times_what_one_rank_has():
    alone, others = Layout((2,), ("dp",)), Layout((4,), ("ep",), range(4, 8))
    fills = {
        kind: plan(alone("dp"), others(partial={"ep": kind}), (4,), FLOAT).steps[-1].fill for kind in ("sum", "avg")
    }
    assert fills == {"sum": Fill("sum", 1, 1), "avg": Fill("avg", 4, 1)}


def test_rows_are_cut_into_chunks_of_one_size():
    mesh = Layout((2,), ("tp",))
    chunks = Chunks(4, 0, mesh("tp"), mesh(), mesh(), mesh(partial={"tp": "sum"}))
    counts = {rows: chunks.fitting((rows, 8)) for rows in (16, 12, 14, 4, 9)}
    assert counts == {16: (0, 4), 12: (0, 3), 14: (0, 1), 4: (0, 2), 9: (0, 1)}, "of 7 rows, no 4, 3 or 2 equal ones"


# -- the price of one step -------------------------------------------------------------------------------------------

PLAIN = machine("plain", NEAR, FAR, 4, memory=1e10)
QUICK = machine("quick between nodes", NEAR, FAR._replace(bandwidth=5e8), 4, memory=1e10)

# 8 ranks, 4 to a node, of which the busiest moves 7,000 bytes, 4,000 of them between nodes, and copies 500.
APART = Load(ranks=8, per_node=4, moved=7_000, inter_node=4_000, copied=500)
FOUR_NODES = APART._replace(per_node=2)
START, AROUND, TREE = 5e-6 + 7 * 3e-7, 5e-6 + 3e-7 + 2 * 3 * 1e-7, 5e-6 + 3 * 1e-7
COPY = 2 * 500 / 1e10
RINGS = ("all_gather", "reduce_scatter")
PRICES = [
    # Within a node: the latency, and all bytes at the fast pace.
    *(
        (kind, Load(4, 4, 3_000, 0, 500), PLAIN, 2e-6 + 3 * 1e-7 + 3_000 / 1e9 + COPY)
        for kind in (*RINGS, "all_reduce", "all_to_all")
    ),
    # A message has no hops, within a node as between nodes.
    ("permute", Load(2, 2, 3_000, 0, 500), PLAIN, 2e-6 + 3_000 / 1e9 + COPY),
    ("permute", Load(2, 1, 3_000, 3_000, 500), PLAIN, 5e-6 + 3_000 / 1e8 + COPY),
    # Over nodes, from rank to rank: 3,000 bytes at the fast pace beside 4,000 at the slow one.
    ("all_to_all", APART, PLAIN, START + 4_000 / 1e8 + COPY),
    # Nearly all stays within the node: 70 of 7,000 bytes at the slow pace take less than 6,930 at the fast one.
    ("all_to_all", APART._replace(inter_node=70), PLAIN, START + 6_930 / 1e9 + COPY),
    # A ring goes between nodes by the links of all four ranks of a node, of two where a node has two.
    *((kind, APART, PLAIN, AROUND + 7_000 / 4e8 + COPY) for kind in RINGS),
    *((kind, FOUR_NODES, PLAIN, 5e-6 + 3 * 3e-7 + 4 * 1e-7 + 7_000 / 2e8 + COPY) for kind in RINGS),
    # At the pace of one rank's link within the node where those four are together faster.
    *((kind, APART, QUICK, AROUND + 7_000 / 1e9 + COPY) for kind in RINGS),
    # Two nodes exchange halves: 4,000 bytes are what is reduced. More have a tree: at each doubling a hop.
    ("all_reduce", APART, PLAIN, TREE + 4_000 / 4e8 + COPY),
    ("all_reduce", FOUR_NODES, PLAIN, 5e-6 + 1e-7 + 3e-7 + 7_000 / 2e8 + COPY),
    ("all_reduce", APART, QUICK, TREE + 7_000 / 1e9 + COPY),
    # Alone nothing is started, and only memory counts.
    *((kind, Load(1, 1, 0, 0, 500), PLAIN, COPY) for kind in ("slice", "copy")),
    # Without a machine, bytes count alone, and none of those that are copied.
    *((kind, APART, None, 7_000 / 1e9) for kind in (*RINGS, "all_reduce", "all_to_all", "permute")),
    ("slice", Load(1, 1, 0, 0, 500), None, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "load", "on", "expected"), PRICES)
def test_seconds_by_hand(kind, load, on, expected):
    assert seconds(kind, load, on) == pytest.approx(expected)


def test_latency_by_hand():
    assert latency("all_to_all", APART, PLAIN) == pytest.approx(START)
    assert latency("all_gather", APART, PLAIN) == pytest.approx(AROUND)
    assert latency("all_reduce", APART, PLAIN) == pytest.approx(TREE)
    assert latency("all_to_all", APART._replace(per_node=8), PLAIN) == pytest.approx(2e-6 + 7 * 1e-7)
    assert latency("all_to_all", Load(1, 1, 0, 0, 0), PLAIN) == 0.0
    assert latency("all_to_all", APART, None) == 0.0


def test_every_round_takes_its_latency():
    """4 ranks turn 32 KiB: 3/4 of a part of 8 KiB each, so 6 KiB in three pieces, then in rounds of the same bytes."""
    mesh = Layout((4,), ("gpu",))
    on = machine("one node", NEAR)
    turn = (mesh("gpu", "None"), mesh("None", "gpu"), (128, 64), FLOAT, on)
    once = plan(*turn)
    assert once.seconds == pytest.approx(intra_node(4, 6144))
    cut = plan(*turn, max_extra_bytes=once.peak_extra_bytes // 4)
    assert cut.num_collectives == cut.steps[0].rounds > 1
    assert cut.recv_bytes.tolist() == once.recv_bytes.tolist() == [6144] * 4
    assert cut.seconds == pytest.approx(intra_node(4, 6144) + (cut.num_collectives - 1) * (2e-6 + 3e-7))


def test_a_gather_in_rounds_is_priced_as_the_exchange_it_is():
    """A ring crosses by four links; in rounds each rank sends to each of the other node, by its own."""
    mesh = MESH("None", BOTH)
    full = plan(mesh, MESH("None", "None"), (8, 64), FLOAT, TWO_NODES)
    assert steps_of(full) == [("all_gather", "node+gpu")]
    part, start = 4 * 8 * 64 // 8, 5e-6 + 7 * 3e-7
    assert full.seconds == pytest.approx(around_both(7 * part, 4e8))
    [step] = plan(mesh, MESH("None", "None"), (8, 64), FLOAT, TWO_NODES, max_extra_bytes=512).steps
    assert step.rounds == 8
    assert step.seconds == pytest.approx(start + 4 * part / 1e8 + (step.rounds - 1) * start)


# -- a plan is a value -----------------------------------------------------------------------------------------------


def test_plans_are_printed():
    """Each rank adds up 8 pieces of 0.5 MiB: its own, 3 of its node, and 4 of the other node at the slow pace."""
    mesh = Layout((2, 4), ("dp", "tp"))
    src, dst = mesh("None", "tp", partial={"dp": "avg"}), mesh("tp")
    reduce = plan(src, dst, (4096, 1024), torch.bfloat16, TWO_NODES)
    assert reduce.seconds == pytest.approx(inter_node(8, 4 * 2**19))
    assert str(reduce) == (
        "(-, tp) pending avg over dp on dp=2, tp=4 -> (tp, -) on dp=2, tp=4, (4096, 1024) bfloat16\n"
        "step            over   ranks  receives    sends    extra       us\n"
        "reduce_scatter  dp+tp      8   3.5 MiB  3.5 MiB  7.5 MiB  20978.6"
    )  # fmt: skip


def test_nothing_to_do_is_printed():
    mesh = Layout((2, 1), ("dp", "tp"))
    idle = plan(mesh("dp"), mesh(("dp", "tp")), (8,), FLOAT)
    assert str(idle) == "(dp) on dp=2, tp=1 -> (dp>tp) on dp=2, tp=1, (8,) float32\nnothing to do"
    assert (idle.steps, idle.seconds, idle.num_collectives, idle.peak_extra_bytes) == ((), 0, 0, 0)
    assert idle.recv_bytes.tolist() == idle.send_bytes.tolist() == [0, 0]


def test_one_plan_is_made_once():
    first = plan(MESH("gpu"), MESH(), (8,), FLOAT, TWO_NODES)
    again = machine("ten times slower", Made(2e-6, 1e-7, 1e9), Made(5e-6, 3e-7, 1e8), 4)
    assert plan(Layout((2, 4), ("node", "gpu"))("gpu"), MESH("None"), torch.Size([8]), FLOAT, again) is first
    assert plan(MESH("gpu"), MESH(), [8], FLOAT, TWO_NODES) is first
    assert plan(MESH("gpu"), MESH(), (8,), FLOAT, QUARTER) is not first
    assert plan(MESH("gpu"), MESH(), (8,), torch.int32, TWO_NODES) is not first
    assert plan(MESH("gpu"), MESH(), (8,), FLOAT, TWO_NODES, max_extra_bytes=2**20) is not first


def test_a_plan_holds_no_mesh_and_travels():
    def on_rank():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("node", "gpu"))
        own = Layout.from_device_mesh(mesh)
        found = plan(own("node", "gpu"), own(("gpu", "node")), (16, 8), FLOAT, QUARTER)
        assert found.src.mesh is None
        assert found.dst.mesh is None
        return dist.get_rank(), pickle.dumps(found)

    ranks, texts = zip(*sim.run(on_rank, world_size=8), strict=True)
    assert ranks == tuple(range(8))
    assert len({str(pickle.loads(text)) for text in texts}) == 1
    direct = plan(MESH("node", "gpu"), MESH(("gpu", "node")), (16, 8), FLOAT, QUARTER)
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


def test_a_machine_from_another_process_is_the_same():
    """Hashes of text differ between processes, so none travels."""
    away = machine("ten times slower", NEAR, FAR, 4)
    vars(away)["_hash"] = hash(TWO_NODES) + 1  # as the other process has it
    found = plan(MESH("gpu"), MESH(), (8,), FLOAT, TWO_NODES)
    assert plan(MESH("gpu"), MESH(), (8,), FLOAT, pickle.loads(pickle.dumps(away))) is found


def test_a_machine_is_read_anew_when_its_file_has_changed(tmp_path):
    file = find_machine("h100-sxm").with_figures(node__devices=4).write(tmp_path / "mine.toml")
    turn = (MESH(BOTH), MESH(), (2**20,), FLOAT)
    assert plan(*turn, str(file)).seconds == plan(*turn, find_machine(file)).seconds
    slow = find_machine("h100-sxm").with_figures(node__devices=4, inter__bandwidth=1e6).write(file)
    os.utime(slow, ns=(1, 1))
    assert plan(*turn, str(file)).machine.value("inter.bandwidth") == 1e6


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
