"""Hand-written parallel code on local tensors, and the crossings below it, each against a single device."""

import collections
import itertools

import pytest
import torch
import torch.distributed as dist
from layouts_kit import layout_of, layouts, leaf, numbers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

import sim
from hyper_parallel import distribute_tensor, full_tensor, redistribute, to_local
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.entry_exit import enter, leave
from hyper_parallel.core.shard.local import custom_shard

pytestmark = pytest.mark.tier("test")

NO_PROCESSES = ("sim", "gpu", "npu")
Pair = collections.namedtuple("Pair", "first second")


def loose(layout, ndim):
    """Return the axes that do not split."""
    split = {layout.alias_name[axis] for chain in layout.splits(ndim) for axis in chain}
    return [name for name in layout.alias_name if name not in split]


# -- crossings ---------------------------------------------------------------------------------------------------------


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_PROCESSES)
def test_enter_is_a_redistribution_and_the_local_part(ctx):
    own = layout_of(ctx)
    for shape in ((4, 4), (7, 3)):
        full, weight = numbers(ctx, *shape), numbers(ctx, *shape) + 1
        for source, target in itertools.product(layouts(own), repeat=2):
            bare = target.reset_partial()
            free = loose(target, 2)
            for adding in (free, free[:1], []):
                given = bare(*bare.alias_placements, partial=dict.fromkeys(adding, "sum"))
                x = leaf(full, source)
                part = enter(x, target, given)
                assert torch.equal(part, to_local(redistribute(x.detach(), target))), (source, target)
                grad = sim.scatter_full(weight, bare, ctx.rank)
                times = 1
                for name in adding:
                    times *= own.mesh_shape[own.alias_name.index(name)]
                part.backward(grad)
                assert torch.equal(full_tensor(x.grad), times * weight), (source, target, given)
                if torch.__version__ >= "2.12" or shape == (4, 4):
                    assert Layout.of(x.grad) == Layout.of(x).reset_partial()


@pytest.mark.tier("full")
@sim.ranks(4)
def test_leave_is_a_dtensor_of_parts_and_a_redistribution(ctx):
    own = layout_of(ctx)
    for shape in ((4, 4), (7, 3)):
        full, weight = numbers(ctx, *shape), numbers(ctx, *shape) + 1
        for produced, target in itertools.product(layouts(own), repeat=2):
            part = sim.scatter_full(full, produced, ctx.rank).requires_grad_()
            y = leave(part, produced, shape, target)
            assert y.shape == shape
            assert torch.equal(full_tensor(y.detach()), full), (produced, target)
            y.backward(distribute_tensor(weight, target.reset_partial()))
            ways = 4 if "avg" in produced.partial.values() else 1
            expected = sim.scatter_full(weight, produced.reset_partial(), ctx.rank) / ways
            assert torch.equal(part.grad, expected), (produced, target)
            assert not leave(part.detach(), produced, shape, target).requires_grad


@sim.ranks(4, backends=NO_PROCESSES)
def test_what_torch_may_ask_of_a_dtensor_is_as_it_builds_it(ctx):
    own = layout_of(ctx)
    part = torch.randn(2, 6, 3, device=ctx.device).requires_grad_()
    views = {"whole": part, "turned": part.transpose(0, 1), "cut": part[:, ::2]}
    for name, view in views.items():
        sizes = list(view.shape)
        for entries, scale in ((("dp",), (2, 1, 1)), (("dp", "tp"), (2, 2, 1)), ((("tp", "dp"),), (4, 1, 1))):
            layout = own(*entries)
            shape = [size * by for size, by in zip(sizes, scale, strict=True)]
            y = leave(view, layout, shape)
            built = from_local_of(view, layout, shape)
            assert y._spec == built._spec, (name, entries)
            assert y.stride() == built.stride()
            assert y.is_contiguous() == built.is_contiguous()
            assert y.requires_grad
            twice = (y * 2).sum()
            full_tensor(twice, grad_layout=()).backward()
            assert torch.equal(part.grad[view.storage_offset()], torch.full_like(part.grad[0], 2)) or name == "cut"
            part.grad = None


def from_local_of(local, layout, shape):
    from hyper_parallel import from_local

    return from_local(local.detach(), layout, shape=shape)


@sim.ranks(2)
def test_gradients_have_memory_of_their_own(ctx):
    """Two leaves that get the same gradient get it twice, so that clipping, in place, scales each once."""
    own = layout_of(ctx, (2,), ("tp",))
    same = Layout.from_device_mesh(DeviceMesh(ctx.device_type, torch.arange(2), mesh_dim_names=("tp",)))
    full = numbers(ctx, 4, 2)
    for base in (own, same):
        split = base("tp")
        made = [leaf(full, own("tp")) for _ in range(2)]
        plain = [sim.scatter_full(full, own("tp"), ctx.rank).requires_grad_() for _ in range(2)]
        parts = [enter(x, split, split) for x in (*made, *(leave(p, own("tp"), (4, 2)) for p in plain))]
        (sum(parts) * torch.ones_like(plain[0])).sum().backward()  # a gradient that lies in memory
        grads = [*(to_local(x.grad) for x in made), *(p.grad for p in plain)]
        for grad in grads:
            grad.mul_(2)
        assert all(grad.eq(2).all() for grad in grads)


@sim.ranks(4, backends=NO_PROCESSES)
def test_masked_parts_of_a_row_split_embedding(ctx):
    own = layout_of(ctx)
    ids = torch.tensor([[3, 1, 4], [1, 5, 2]], device=ctx.device)
    full = numbers(ctx, 6, 4)
    for target in (own("dp"), own(), own("None", "None", "tp")):
        table = leaf(full, own("tp"))
        x = torch.nn.functional.embedding(distribute_tensor(ids, own("dp")), table)
        assert any(type(placement) is not Partial and placement.is_partial() for placement in x.placements)
        part = enter(x, target, target)
        assert torch.equal(part, sim.scatter_full(full[ids], target, ctx.rank)), target
        weight = numbers(ctx, 2, 3, 4)
        part.backward(sim.scatter_full(weight, target, ctx.rank))
        expected = torch.zeros_like(full).index_add_(0, ids.flatten(), weight.flatten(0, 1))
        assert torch.equal(full_tensor(redistribute(table.grad, own("tp"))), expected), target


def mlp(x, w1, w2, own):
    """An MLP on parts: the weights' rows, then columns, are split over tp; the input and the result over both."""
    layouts = own("tp"), own("None", "tp")
    shares = own("tp", partial={"dp": "sum"}), own("None", "tp", partial={"dp": "sum"})
    parts = [enter(w, layout, share) for w, layout, share in zip((w1, w2), layouts, shares, strict=True)]
    h = enter(x, own("dp"), own("dp", partial={"tp": "sum"})) @ parts[0].t()
    return leave(h.relu() @ parts[1].t(), own("dp", partial={"tp": "sum"}), (8, 4), own("dp", "tp"))


@sim.ranks(4)
def test_a_split_mlp(ctx):
    own = layout_of(ctx)
    wholes = [numbers(ctx, *shape).requires_grad_() for shape in ((8, 4), (6, 4), (4, 6))]
    sources = own("dp", "tp"), own("tp"), own("None", "tp")
    given = [leaf(full.detach(), layout) for full, layout in zip(wholes, sources, strict=True)]
    y = mlp(*given, own)
    expected = (wholes[0] @ wholes[1].t()).relu() @ wholes[2].t()
    assert torch.equal(full_tensor(y.detach()), expected)
    weight = numbers(ctx, 8, 4)
    y.backward(distribute_tensor(weight, own("dp", "tp")))
    expected.backward(weight)
    for full, x in zip(wholes, given, strict=True):
        assert torch.equal(full_tensor(x.grad), full.grad)
        assert x.grad.placements == x.placements


def test_a_crossing_communicates_once_each_way():
    def step():
        ctx = sim.RankTest(dist.get_rank(), 4, "sim", torch.device("cpu"))
        own = layout_of(ctx)
        given = [leaf(numbers(ctx, *s), lay) for s, lay in (((8, 4), own("dp", "tp")), ((6, 4), own("tp")))]
        w2 = leaf(numbers(ctx, 4, 6), own("None", "tp"))
        dist.barrier()
        mlp(*given, w2, own).backward(leaf(numbers(ctx, 8, 4), own("dp", "tp")).detach())

    with sim.world(4) as world:
        world.run(step)
        ops = [event.op for event in world.trace.of_rank(0)]
    forward_and_backward = ops[len(ops) - ops[::-1].index("barrier") :]
    moved = [op for op in forward_and_backward if op not in ("scatter", "broadcast")]
    weights = ["all_reduce", "all_reduce"]
    assert moved[:3] == ["all_gather", "reduce_scatter", "all_gather"]  # of x, of the result, of its gradient
    assert sorted(moved[3:]) == [*weights, "reduce_scatter"]  # of the weights' gradients, and of x's


# -- custom_shard ------------------------------------------------------------------------------------------------------


def compare(ctx, fn, sharded, wholes, sources):
    """Compare values and gradients of a sharded function with those of `fn` on full tensors."""
    leaves = [full.clone().requires_grad_() for full in wholes]
    expected = fn(*leaves)
    given = [leaf(full, source) for full, source in zip(wholes, sources, strict=True)]
    got = sharded(*given)
    pairs = list(zip(got, expected, strict=True)) if isinstance(expected, (tuple, list)) else [(got, expected)]
    assert type(got) is type(expected) or isinstance(got, DTensor)
    total, whole_total = 0, 0
    for y, z in pairs:
        assert y.shape == z.shape
        assert torch.equal(full_tensor(y.detach()), z)
        weight = numbers(ctx, *z.shape) + 1
        layout = Layout.of(y)
        total = total + full_tensor(y * distribute_tensor(weight, layout.reset_partial()), grad_layout=()).sum()
        whole_total = whole_total + (z * weight).sum()
    total.backward()
    whole_total.backward()
    for x, full in zip(given, leaves, strict=True):
        assert torch.equal(full_tensor(x.grad), full.grad), (x.placements, full_tensor(x.grad), full.grad)
        assert x.grad.placements == x.placements or Layout.of(x).is_partial()
    return got


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_PROCESSES)
def test_a_matmul_over_every_axis(ctx):
    """Which product needs which sum follows from what the layouts say; inputs come from anywhere."""
    own = layout_of(ctx)
    ways = [
        (("dp", "None"), ("None", "tp"), own("dp", "tp")),
        (("dp", "tp"), ("tp", "None"), own("dp", "None", partial={"tp": "sum"})),
        (("None", ("dp", "tp")), (("dp", "tp"), "None"), own(partial={"dp": "sum", "tp": "sum"})),
        (("None", "None"), ("None", "None"), own()),
        (("None", "None"), ("None", "dp"), own("None", "dp")),
        (("tp", "dp"), ("dp", "None"), own("tp", partial={"dp": "sum"})),
    ]
    for rows, inner, columns in ((4, 8, 4), (5, 6, 3)):
        wholes = numbers(ctx, rows, inner), numbers(ctx, inner, columns) % 3
        for (left, right, out), source in itertools.product(ways, layouts(own)):
            matmul = custom_shard(
                torch.matmul, own.mesh, [left, right], out, out_shapes=lambda x, w: (x.shape[0], w.shape[1])
            )
            got = compare(ctx, torch.matmul, matmul, wholes, (source, own("None", "dp")))
            assert Layout.of(got) == out


@sim.ranks(4, backends=NO_PROCESSES)
def test_a_linear_function_of_pending_copies(ctx):
    own = layout_of(ctx)
    full = numbers(ctx, 4, 4) * 4
    for kind in ("sum", "avg"):
        pending = own("dp", partial={"tp": kind})
        for entry in (pending, Layout.of(leaf(full, pending))):
            double = custom_shard(lambda x: 2 * x, own.mesh, [entry], pending, out_shapes=[4, 4])
            for source in layouts(own):
                got = compare(ctx, lambda x: 2 * x, double, (full,), (source,))
                assert Layout.of(got) == pending


@sim.ranks(4, backends=NO_PROCESSES)
def test_copies_of_the_same(ctx):
    """Every rank of tp makes the same copy, and they are added or averaged: each rank's gradient is a share."""
    own = layout_of(ctx)
    full = numbers(ctx, 4, 4)
    for kind, times in (("sum", 6), ("avg", 3)):
        made = custom_shard(lambda x: 3 * x, own.mesh, ("dp",), own("dp", partial={"tp": kind}), out_shapes=(4, 4))
        for source in layouts(own):
            compare(ctx, lambda x, times=times: times * x, made, (full,), (source,))


@sim.ranks(4, backends=NO_PROCESSES)
def test_containers_and_what_is_left_alone(ctx):
    own = layout_of(ctx)
    x, y = numbers(ctx, 4, 4), numbers(ctx, 4, 4) + 1

    def fn(pair, named, scale, *rest, flag=None):
        assert type(pair) is Pair
        assert isinstance(named, dict)
        if isinstance(scale, DTensor):  # left alone
            scale = full_tensor(scale)
        return Pair(pair.first * scale, named["y"] + pair.second), {"count": 3, "rest": rest, "flag": flag}

    sharded = custom_shard(
        fn,
        own.mesh,
        [[("dp",), (None, "dp")], {"y": (None, "dp")}],
        [[("dp",), (None, "dp")], None],
        out_shapes=[[(4, 4), None], None],
    )
    scale = leaf(torch.tensor(3.0, device=ctx.device), own()).detach()
    given = Pair(leaf(x, own("None", "tp")), leaf(y, own()))
    for third in (3.0, scale):
        out, info = sharded(given, {"y": leaf(y, own("dp")), "z": "z"}, third, x, flag="flag")
        assert type(out) is Pair
        assert info["count"] == 3
        assert info["rest"][0] is x
        assert info["flag"] == "flag"
        assert torch.equal(full_tensor(out.first.detach()), 3 * x)
        assert Layout.of(out.first) == own("dp")
        assert torch.equal(full_tensor(out.second.detach()), 2 * y)
        assert out.first.requires_grad
        assert out.second.requires_grad
        assert Layout.of(out.second) == own("None", "dp")
    plain, _ = sharded(Pair(x, y), {"y": y}, 3.0)
    assert torch.equal(plain.first, 3 * x)
    assert not isinstance(plain.first, DTensor)

    by_name = custom_shard(
        lambda x, *, y: {"sum": x + y, "other": None},
        own.mesh,
        {"y": ("dp",), "x": ("dp",)},
        {"sum": ("dp",), "other": ("dp",)},
        out_shapes={"sum": (4, 4)},
    )
    found = by_name(x=leaf(x, own("tp")), y=leaf(y, own("None", "tp")))
    assert torch.equal(full_tensor(found["sum"].detach()), x + y)
    assert found["other"] is None


@sim.ranks(4)
def test_shapes_that_are_not_declared_are_exchanged(ctx):
    own = layout_of(ctx)
    for size in (8, 7, 2):
        x = leaf(numbers(ctx, size, 4), own("dp"))
        halves = custom_shard(
            lambda x: (x[:, :2], x.sum(1), x.sum()),
            own.mesh,
            [(("dp", "tp"), None)],
            [(("dp", "tp"), None), (("dp", "tp"),), own(partial={"dp": "sum", "tp": "sum"})],
        )
        got = compare(ctx, lambda x: (x[:, :2], x.sum(1), x.sum()), halves, (numbers(ctx, size, 4),), (own("dp"),))
        assert got[0].shape == (size, 2)
        assert x.grad is None


@sim.ranks(4, backends=NO_PROCESSES)
def test_gradients_that_the_rule_does_not_know(ctx):
    """One output is held by all ranks of tp, and the other is a share: what x's gradient is, is said."""
    own = layout_of(ctx)
    x = numbers(ctx, 4, 4)
    outs = [("dp",), own("dp", partial={"tp": "sum"})]

    def fn(x):
        return x * 2, x * (1.0 if ctx_tp(own, ctx.rank) == 0 else 0.0)

    mixed = custom_shard(fn, own.mesh, ("dp",), outs, out_shapes=[(4, 4), (4, 4)])
    with pytest.raises(ValueError, match="over 'tp' its gradients could be one gradient"):
        mixed(leaf(x, own()))
    with torch.no_grad():
        assert torch.equal(full_tensor(mixed(leaf(x, own()))[1]), x)
    assert torch.equal(full_tensor(mixed(leaf(x, own()).detach())[0]), 2 * x)
    said = custom_shard(
        lambda x: fn(x)[1],
        own.mesh,
        ("dp",),
        ("dp",),
        out_shapes=(4, 4),
        in_grad_layouts=own("dp", partial={"tp": "sum"}),
    )
    z = leaf(x, own("tp"))
    y = said(z)
    y.backward(distribute_tensor(x, own("dp")))
    assert torch.equal(full_tensor(z.grad), x)
    assert z.grad.placements == z.placements
    left = custom_shard(lambda x: (x.sum(), x * 2), own.mesh, ("dp",), [None, ("dp",)], out_shapes=[None, (4, 4)])
    with pytest.raises(ValueError, match="an output without a layout wants a gradient"):
        left(leaf(x, own()))
    assert torch.equal(left(leaf(x, own()).detach())[0], sim.scatter_full(x, own("dp"), ctx.rank).sum())


def ctx_tp(own, rank):
    return own.rank_list.index(rank) % 2


@sim.ranks(1, backends=NO_PROCESSES)
def test_one_rank(ctx):
    own = layout_of(ctx, (1, 1))
    matmul = custom_shard(torch.matmul, own.mesh, [("dp", "tp"), ("tp", None)], own("dp", partial={"tp": "sum"}))
    compare(ctx, torch.matmul, matmul, (numbers(ctx, 3, 4), numbers(ctx, 4, 5)), (own("dp", "tp"), own()))


@sim.ranks(2)
def test_second_derivatives(ctx):
    own = layout_of(ctx, (2,), ("tp",))
    wholes = numbers(ctx, 4, 4), numbers(ctx, 4, 4) % 3
    product = custom_shard(
        lambda x, w: (x @ w).square(), own.mesh, [(None, None), (None, "tp")], (None, "tp"), out_shapes=(4, 4)
    )
    given = [leaf(full, own("tp")) for full in wholes]
    plain = [full.clone().requires_grad_() for full in wholes]
    first = torch.autograd.grad(full_tensor(product(*given), grad_layout=()).sum(), given, create_graph=True)
    expected = torch.autograd.grad((plain[0] @ plain[1]).square().sum(), plain, create_graph=True)
    total = sum(full_tensor(grad, grad_layout=()).square().sum() for grad in first)
    total.backward()
    sum(grad.square().sum() for grad in expected).backward()
    for x, full, a, b in zip(given, plain, first, expected, strict=True):
        assert torch.equal(full_tensor(a.detach()), b)
        assert torch.equal(full_tensor(x.grad), full.grad)
