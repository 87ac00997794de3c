"""Tokens to experts: counts that add up, and the same shapes and bytes as a run with real values."""

import contextlib
import copy
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sim
from hyper_parallel.core.expert_parallel.experts import GroupedExperts
from hyper_parallel.core.expert_parallel.router import Router
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.models.moe_plan import parallelize_moe
from sim.mesh.recipe import Routing
from sim.mesh.tracing.lone import LoneWorld

CONFIG = MoEConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_seq_len=16,
    num_experts=8,
    experts_per_token=3,
    expert_intermediate_size=24,
    num_dense_layers=1,
)
ROUTINGS = [
    Routing(),
    Routing(shares=[5, 0, 1, 1, 3, 1, 1, 1]),
    Routing.zipf(0.7),
    Routing.zipf(9.0),
    Routing().drawn(3),
    Routing.zipf(1.2).drawn(4),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=Routing.describe)
@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
@pytest.mark.parametrize(("experts", "per_token", "ranks"), [(8, 3, 4), (8, 1, 2), (8, 7, 8), (8, 4, 1)])
def test_every_token_goes_to_as_many_different_experts(routing, tokens, experts, per_token, ranks):
    counts = routing.counts(tokens=tokens, experts=experts, per_token=per_token, ranks=ranks)
    assert counts.shape == (ranks, experts)
    assert counts.dtype == np.int64
    assert (counts.sum(1) == tokens * per_token).all()
    assert counts.min(initial=0) >= 0
    assert counts.max(initial=0) <= tokens
    sizes = {"tokens": tokens, "experts": experts, "per_token": per_token, "ranks": ranks}
    for rank in range(ranks):
        chosen = routing.choose(**sizes, rank=rank)
        assert chosen.shape == (tokens, per_token)
        assert all(len(set(row)) == per_token for row in chosen.tolist())
        assert torch.bincount(chosen.flatten(), minlength=experts).tolist() == counts[rank].tolist()
    assert routing.received(**sizes).sum() == tokens * per_token * ranks
    assert (counts == routing.counts(**sizes)).all()  # the same again


@pytest.mark.parametrize(("tokens", "per_token", "ranks"), [(5, 1, 8), (13, 3, 4), (4096, 2, 8)])
def test_balanced_loads_differ_by_one_row(tokens, per_token, ranks):
    counts = Routing().counts(tokens=tokens, experts=8, per_token=per_token, ranks=ranks)
    for loads in (*counts, counts.sum(0)):
        assert loads.max() - loads.min() <= 1


def test_shares_are_kept_where_no_expert_is_full():
    shares = [4, 3, 2, 1, 1, 1]
    counts = Routing(shares=shares).counts(tokens=1200, experts=6, per_token=2, ranks=1)[0]
    assert counts.tolist() == [800, 600, 400, 200, 200, 200]
    # A full expert has all tokens; what it has too many goes to the others, as they share them already.
    full = Routing(shares=[6, 3, 2, 1]).counts(tokens=600, experts=4, per_token=2, ranks=1)[0]
    assert full.tolist() == [600, 300, 200, 100]


def test_the_heaviest_rank_has_the_experts_with_most():
    sizes = {"tokens": 1024, "experts": 8, "per_token": 2, "ranks": 4}
    assert Routing.zipf(1.0).heaviest(**sizes) == 0
    assert Routing(shares=[1, 1, 1, 1, 1, 9, 1, 1]).heaviest(**sizes) == 2
    even, drawn, skewed = (each.received(**sizes) for each in (Routing(), Routing().drawn(0), Routing.zipf(1.0)))
    assert even.max() == even.mean()
    assert 1 < drawn.max() / drawn.mean() < 1.2
    assert skewed.max() / skewed.mean() == pytest.approx(2.21, abs=0.005)
    assert not Routing.zipf(1.0).received(**{**sizes, "tokens": 0}).any()


@pytest.mark.parametrize(
    ("make", "kind", "stated"),
    [
        (lambda: Routing(shares=[1, -1]), ValueError, ("shares are numbers of at least 0", "try: shares=[2, 1, 1]")),
        (lambda: Routing(shares=[]), ValueError, ("some of them above",)),
        (lambda: Routing(shares=[0.0, 0.0]), ValueError, ("some of them above",)),
        (lambda: Routing(shares=[float("nan")]), ValueError, ("shares are numbers",)),
        (lambda: Routing(shares=[1, 2], exponent=1.0), ValueError, ("both shares and an exponent",)),
        (lambda: Routing.zipf(-1), ValueError, ("exponent: -1", "Routing.zipf(1.0)")),
        (lambda: Routing().drawn(-1), ValueError, ("seed: -1", "seed=0")),
        (
            lambda: Routing(shares=[1, 2]).counts(tokens=4, experts=8, per_token=1),
            ValueError,
            ("one share for each expert", "experts: 8", "try: 8 shares"),
        ),
        (
            lambda: Routing(shares=[1, 0, 0]).counts(tokens=4, experts=3, per_token=2),
            ValueError,
            ("2 different experts, and only 1 have a share", "try: 2 shares above 0"),
        ),
    ],
)
def test_what_is_no_routing_is_refused(make, kind, stated):
    with pytest.raises(kind, match="cannot route tokens to experts") as error:
        make()
    for words in stated:
        assert words in str(error.value)


@pytest.mark.parametrize("shares", [None, [5, 1, 1, 2, 3, 1], [3, 1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize(("per_token", "nodes"), [(1, 3), (2, 2), (3, 2), (3, 3), (3, 6), (6, 2)])
def test_visits_are_those_of_every_set_of_experts_by_its_chance(shares, per_token, nodes):
    routing, tokens = Routing(shares=shares), 100_000
    sizes = {"tokens": tokens, "experts": 6, "per_token": per_token, "ranks": 2}
    visits = routing.visits(**sizes, nodes=nodes)
    for rank, counts in enumerate(routing.counts(**sizes)):
        chances = {
            some: math.prod(count if e in some else tokens - count for e, count in enumerate(counts.tolist()))
            for some in itertools.combinations(range(6), per_token)
        }
        for node in range(nodes):
            here = sum(chance for some, chance in chances.items() if any(e * nodes // 6 == node for e in some))
            assert abs(visits[rank, node] - tokens * here / sum(chances.values())) <= 0.501


def test_visits_of_no_tokens():
    assert not Routing().visits(tokens=0, experts=4, per_token=2, ranks=2, nodes=2).any()


def test_descriptions():
    assert [routing.describe() for routing in ROUTINGS] == [
        "balanced",
        "by 8 shares",
        "zipf(0.7)",
        "zipf(9)",
        "balanced, drawn from seed 3",
        "zipf(1.2), drawn from seed 4",
    ]


# -- the same as with values -----------------------------------------------------------------------------------------


class GivenRouter(Router):
    """Routes as it computes, but to experts that come to the counts of a routing."""

    def forward(self, x):
        _, weights = super().forward(x)
        ranks, here = self.place
        sizes = {"tokens": x.shape[0] * x.shape[1], "experts": self.num_experts, "per_token": self.experts_per_token}
        chosen = self.routing.choose(**sizes, ranks=ranks, rank=here)
        return chosen.view(*x.shape[:2], -1), weights


def step(dims, routing, *, real):
    """Return what one forward and backward of this rank counts and computes."""
    dims = copy.copy(dims)
    mesh = dims.build_mesh("cpu")  # outside of the mode: its tensors are numbers of ranks
    with contextlib.nullcontext() if real else FakeTensorMode():
        return step_on(mesh, dims, routing, real=real)


def step_on(mesh, dims, routing, *, real):
    model = MoELlama.build(CONFIG) if real else MoELlama(CONFIG)
    parallelize_moe(model, mesh, ep=dims.expert_axes, etp=dims.etp if dims.tp_enabled else None)
    seen = []
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            if not real:
                routing.give_to(model, waits=lambda: seen.append("wait"))
            watch(module, seen, waits=real)
        if real and isinstance(module, Router):
            module.__class__ = GivenRouter
            module.routing = routing
            module.place = (1, 0)
            if dims.ep_enabled:
                group = dims.mesh_over(*dims.expert_axes).get_group()
                module.place = group.size(), group.rank()
    out = model(torch.zeros(2, 16, dtype=torch.long))
    out = out.to_local() if hasattr(out, "to_local") else out
    out.square().mean().backward()
    grads = [(name, tuple(param.grad.shape)) for name, param in model.named_parameters() if param.grad is not None]
    return seen, tuple(out.shape), grads


def watch(experts, seen, *, waits):
    computed, counted = experts._here, experts.count_rows

    def here(rows, counts, read):
        each = read()
        seen.append((tuple(rows.shape), tuple(each)))
        return computed(rows, counts, lambda: each)

    def count(*args):
        if waits:
            seen.append("wait")
        loads = counted(*args)
        seen.append(tuple(map(tuple, loads)))
        return loads

    experts._here, experts.count_rows = here, count


def sent(world, rank):
    return [(event.op, event.axis, event.send_bytes, event.recv_bytes) for event in world.trace.of_rank(rank)]


@pytest.mark.tier("full", each=12)
@pytest.mark.parametrize("routing", [Routing(), Routing.zipf(0.8), Routing.zipf(0.5).drawn(1)], ids=Routing.describe)
@pytest.mark.parametrize(
    "degrees",
    [
        {},
        {"ep": 2},
        {"ep": 4},
        {"ep": 2, "tp": 2, "etp": 2},
        {"ep": 2, "tp": 2, "etp": 1},
        {"tp": 2, "etp": 2},
        {"ep": 2, "tp": 2, "fold_experts": True},
    ],
    ids=str,
)
def test_shapes_and_bytes_are_those_of_a_run_with_values(routing, degrees):
    size = degrees.get("ep", 1) * degrees.get("tp", 1)
    dims = ParallelDims(**degrees, world_size=size)

    with sim.world(size) as world:
        expected = world.run(partial(step, dims, routing, real=True))
    assert all(seen for seen, _, _ in expected)
    for rank in range(size):
        with LoneWorld(size, rank) as alone:
            found = alone.run_alone(partial(step, dims, routing, real=False))
        assert found == expected[rank]
        assert sent(alone, rank) == sent(world, rank)
