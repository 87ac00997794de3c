"""One price of a collective: of plans, of simulated ranks and of estimates."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machine_kit import Made, machine

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import Load, find_machine, load_seconds, machine_names
from hyper_parallel.core.machine.links import COLLECTIVES, NodeSpread, collective_seconds
from hyper_parallel.core.redistribute import cost
from hyper_parallel.core.redistribute.candidates import candidates
from hyper_parallel.core.redistribute.transition import read
from sim.comm.pricing import CommPricing
from sim.mesh.cost import Pricing
from sim.mesh.program import Comm, CommGroup

# A redistribution that one collective does: from, to, and into how many parts a full buffer cuts the tensor of n ranks.
STEPS = {
    "all_gather": (("x", None), (None, None), False, lambda n: 1),
    "reduce_scatter": ((None, None), ("x", None), True, lambda n: 1),
    "all_reduce": ((None, None), (None, None), True, lambda n: 1),
    "all_to_all": (("x", None), (None, "x"), False, lambda n: n),
}


@st.composite
def made_machines(draw):
    """Links whose prices can be worked out by hand, those between nodes no faster and no sooner."""
    rate, latency, hop = draw(st.floats(1e6, 1e12)), draw(st.floats(0, 1e-3)), draw(st.floats(0, 1e-5))
    slower, later, further = (draw(st.floats(1, 100)) for _ in range(3))
    return machine("made", Made(latency, hop, rate), Made(latency * later, hop * further, rate / slower))


SHIPPED = st.sampled_from(machine_names()).map(find_machine)
MACHINES = SHIPPED | made_machines()
many = settings(max_examples=200)


@many
@given(
    on=MACHINES, kind=st.sampled_from(sorted(STEPS)), each=st.integers(1, 8), nodes=st.integers(1, 8),
    stride=st.integers(1, 4), columns=st.sampled_from([1, 30, 4096, 2**20]), shift=st.integers(0, 7),
)  # fmt: skip
def test_plans_simulated_ranks_and_estimates_have_one_price(on, kind, each, nodes, stride, columns, shift):
    """`each` ranks of every node; shifted, the first node has fewer."""
    n = each * nodes
    assume(n > 1)
    on = on.with_figures(node__devices=each * stride)
    src, dst, pending, share = STEPS[kind]
    ranks, shape = range(shift % each * stride, (shift % each + n) * stride, stride), (n, n * columns)
    mesh = Layout((n,), ("x",), ranks)
    before = mesh(*src, partial={"x": "sum"} if pending else {})
    _, ways = candidates(read("cannot plan", before, mesh(*dst), shape, torch.float32), on)
    step = next(way[0] for way in ways if [step.kind for step in way] == [kind])
    planned = cost.seconds(kind, step.load._replace(copied=0), on)
    assert step.seconds == pytest.approx(planned + 2 * step.load.copied / on.memory_bandwidth)

    moved, size = int(step.recv_bytes.max()), 4 * n * n * columns // share(n)
    call = SimpleNamespace(contract=SimpleNamespace(op=kind), send_bytes=moved, recv_bytes=moved)
    assert CommPricing(on).of_collective([call], tuple(ranks)) == pytest.approx(planned)

    recorded = Comm(kind, 0, size, moved, "float32", 0, 0, 0)
    assert Pricing(on).comm(recorded, CommGroup("x", ranks)).seconds == pytest.approx(planned)


@many
@given(
    on=MACHINES, op=st.sampled_from(sorted(COLLECTIVES)), each=st.integers(1, 8), nodes=st.integers(1, 8),
    stride=st.integers(1, 4), size=st.integers(0, 2**30),
)  # fmt: skip
def test_simulated_ranks_and_estimates_have_one_price_of_every_operation(on, op, each, nodes, stride, size):
    n = each * nodes
    assume(n > 1)
    on, size = on.with_figures(node__devices=each * stride), size * n * (n - 1)
    moved = size // n * (n - 1) * (2 if COLLECTIVES[op] == "reduce" else 1)
    moved = {"one": size, "sync": 0}.get(COLLECTIVES[op], moved)
    estimated, _ = collective_seconds(on.prices, op, size, NodeSpread(n, nodes, each))
    call = SimpleNamespace(contract=SimpleNamespace(op=op), send_bytes=moved, recv_bytes=moved)
    assert CommPricing(on).of_collective([call], tuple(range(0, n * stride, stride))) == pytest.approx(estimated)


@many
@given(on=MACHINES, apart=st.booleans(), size=st.integers(0, 2**30))
def test_a_message_has_one_price(on, apart, size):
    on, peer = on.with_figures(node__devices=8), 8 if apart else 7
    planned = cost.seconds("permute", Load(2, 1 if apart else 2, size, size if apart else 0, 0), on)
    recorded = Comm("send", 0, size, size, "float32", 0, 0, 0, peer)
    assert Pricing(on).comm(recorded, CommGroup("pp", (0, peer)), rank=0).seconds == pytest.approx(planned)
    assert CommPricing(on).of_message(0, peer, size) == pytest.approx(planned)


@many
@given(
    on=MACHINES, op=st.sampled_from([*sorted(COLLECTIVES), "send"]), each=st.integers(1, 16), nodes=st.integers(1, 64),
    moved=st.integers(0, 2**34), more=st.integers(0, 2**34), share=st.floats(0, 1),
)  # fmt: skip
def test_more_bytes_take_no_less(on, op, each, nodes, moved, more, share):
    on, n = on.with_figures(node__devices=each), each * nodes
    assume(n > 1)
    loads = [Load(n, each, count, round(share * count) if nodes > 1 else 0, 0) for count in (moved, moved + more)]
    less, most = (load_seconds(on.prices, op, load) for load in loads)
    assert 0 <= less <= most * (1 + 1e-9)


@many
@given(
    on=MACHINES, op=st.sampled_from(sorted(COLLECTIVES)), each=st.integers(1, 16), nodes=st.integers(1, 64),
    more=st.integers(1, 64), size=st.integers(0, 2**34),
)  # fmt: skip
def test_more_nodes_take_no_less(on, op, each, nodes, more, size):
    """Of as many ranks each. Links within a node may start later than those between, so one node counts only of made
    machines, where they do not."""
    on = on.with_figures(node__devices=each)
    nodes += on.name != "made"
    if each * nodes == 1:
        return
    few, several = (
        collective_seconds(on.prices, op, size, NodeSpread(each * count, count, each))[0]
        for count in (nodes, nodes + more)
    )
    assert few <= several * (1 + 1e-9)


def test_by_hand():
    """8 ranks gather 8 MB, 4 to a node: at 100 MB/s a rank between nodes, four at once."""
    on = machine("mine", Made(2e-6, 1e-7, 1e9), Made(5e-6, 3e-7, 1e8), 4)
    call = SimpleNamespace(contract=SimpleNamespace(op="all_gather"), send_bytes=7_000_000, recv_bytes=7_000_000)
    expected = 5e-6 + 3e-7 + 6 * 1e-7 + 7e6 / 4e8
    assert CommPricing(on).of_collective([call], tuple(range(8))) == pytest.approx(expected)
    # One on each node: 7 hops between nodes, at the pace of one.
    assert CommPricing(on).of_collective([call], tuple(range(0, 32, 4))) == pytest.approx(5e-6 + 7 * 3e-7 + 7e6 / 1e8)
    call.contract.op = "all_to_all"  # the rank that is alone on its node gets all of it from the other one
    assert CommPricing(on).of_collective([call], (0, 1, 2, 4)) == pytest.approx(5e-6 + 3 * 3e-7 + 7e6 / 1e8)
