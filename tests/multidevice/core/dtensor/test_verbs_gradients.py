"""Gradients through the verbs, each against the gradient of the same computation on a single device."""

import itertools

import pytest
import torch
from layouts_kit import layouts, leaf
from layouts_kit import numbers as numbers_from
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import sim
from hyper_parallel import distribute_tensor, from_local, full_tensor, redistribute, to_local
from hyper_parallel.core.dtensor.layout import Layout

pytestmark = pytest.mark.tier("test")

NO_GLOO = ("sim", "gpu", "npu")  # the same communication as in others here, which processes run


def numbers(ctx, *shape):
    return numbers_from(ctx, *shape, least=1)


def mesh_of(ctx, sizes=(2, 2), names=("dp", "tp")):
    return init_device_mesh(ctx.device_type, sizes, mesh_dim_names=names)


# -- redistribute ------------------------------------------------------------------------------------------------------


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_GLOO)
def test_redistribute_between_all_layouts(ctx):
    own = Layout.from_device_mesh(mesh_of(ctx))
    for shape in ((4, 4), (7, 3)):
        full, weight = numbers(ctx, *shape), numbers(ctx, *shape) - 3
        for source, target in itertools.product(layouts(own), repeat=2):
            x = leaf(full, source)
            y = redistribute(x, target)
            y.backward(distribute_tensor(weight, target.reset_partial()))
            if torch.__version__ >= "2.12" or shape == (4, 4) or source != target:  # torch 2.11's copy of an uneven
                assert Layout.of(x.grad) == Layout.of(x).reset_partial(), (source, target)  # gradient is a whole one
            assert torch.equal(full_tensor(x.grad), weight), (source, target)
            assert torch.equal(full_tensor(redistribute(y.detach(), source)), full), (source, target)


@sim.ranks(4)
def test_the_gradient_s_own_layout_does_not_matter(ctx):
    own = Layout.from_device_mesh(mesh_of(ctx))
    weight = numbers(ctx, 4, 4)
    x = leaf(weight, own(("dp", "tp")))
    pending = leaf(weight, own(partial={"tp": "sum"}))
    for grad_layout in layouts(own):
        for start in (x, pending):
            start.grad = None
            redistribute(start, own("None", "tp")).backward(distribute_tensor(weight, grad_layout))
            assert torch.equal(full_tensor(start.grad), weight), grad_layout
            assert Layout.of(start.grad).partial.keys() <= Layout.of(start).partial.keys()


@sim.ranks(8)
def test_redistribute_across_meshes(ctx):
    left, right = (
        DeviceMesh(ctx.device_type, list(ranks), mesh_dim_names=("dp",)) for ranks in (range(4), range(4, 8))
    )
    both = Layout.from_device_mesh(mesh_of(ctx, (2, 4)))
    turned = Layout.from_device_mesh(
        DeviceMesh(ctx.device_type, torch.arange(8).view(2, 4).t(), mesh_dim_names=("a", "b"))
    )
    ways = [
        (Layout.from_device_mesh(left)("dp"), Layout.from_device_mesh(right)("dp")),
        (Layout.from_device_mesh(left)("dp"), Layout.from_device_mesh(right)("None", "dp")),
        (both("dp", "tp"), turned("a", "b")),
        (both(("dp", "tp")), Layout.from_device_mesh(right)()),
        (Layout.from_device_mesh(left)(partial={"dp": "sum"}), both("tp", "dp")),
    ]
    for shape, (source, target) in itertools.product(((8, 4), (7, 5)), ways):
        full, weight = numbers(ctx, *shape), numbers(ctx, *shape) - 3
        x = leaf(full, source)
        y = redistribute(x, target)
        if ctx.rank in target.rank_list:
            assert torch.equal(to_local(y.detach()), full[target.local_slice(shape)])
        y.backward(distribute_tensor(weight, target))
        if ctx.rank in source.rank_list:
            assert torch.equal(to_local(x.grad), weight[source.local_slice(shape)])
            assert x.grad.device_mesh == x.device_mesh


@sim.ranks(4)
def test_several_in_flight_give_what_one_after_the_other_does(ctx):
    own = Layout.from_device_mesh(mesh_of(ctx))
    for shape in ((4, 4), (7, 3)):
        full = numbers(ctx, *shape)
        x, z = leaf(full, own("dp")), leaf(2 * full, own(partial={"dp": "sum"}))
        first = redistribute(x, own("None", "tp"), async_op=True)
        second = redistribute(z, own("tp", "dp"), async_op=True)
        ys = first.wait(), second.wait()
        assert torch.equal(full_tensor(ys[0].detach()), full)
        assert torch.equal(full_tensor(ys[1].detach()), 2 * full)
        for y in ys:
            y.backward(distribute_tensor(full, Layout.of(y)))
        assert torch.equal(full_tensor(x.grad), full)
        assert torch.equal(full_tensor(z.grad), full)


@sim.ranks(4)
def test_gradients_accumulate_and_round_trips_change_nothing(ctx):
    own = Layout.from_device_mesh(mesh_of(ctx))
    full = numbers(ctx, 7, 3)
    x = leaf(full, own("dp"))
    for times in (1, 2):
        back = redistribute(redistribute(x, own(("tp", "dp"))), own("dp"))
        assert torch.equal(to_local(back.detach()), to_local(x.detach()))
        to_local(back, grad_layout=("dp",)).square().sum().backward()
        assert torch.equal(full_tensor(x.grad), 2 * times * full)
        full_tensor(x, grad_layout=()).sum().backward()
        assert torch.equal(full_tensor(x.grad), 2 * times * full + 1)
        x.grad.sub_(distribute_tensor(torch.ones_like(full), own("dp")))
    optimizer = torch.optim.SGD([x], lr=0.5)
    optimizer.step()
    assert torch.equal(full_tensor(x.detach()), full - 0.5 * 4 * full)


@sim.ranks(4, backends=NO_GLOO)
def test_gradients_have_memory_of_their_own(ctx):
    """Two leaves that get the same gradient get it twice, so that clipping, in place, scales each once."""
    mesh = mesh_of(ctx)
    own, turned = Layout.from_device_mesh(mesh), Layout.from_device_mesh(mesh_of(ctx, (1, 2, 2), ("pp", "dp", "tp")))
    full = numbers(ctx, 7, 3)
    for layout in (own("dp", "tp"), own(("tp", "dp")), own()):
        pairs = [[leaf(full, layout) for _ in range(2)] for _ in range(2)]
        parts = [full[layout.local_slice(full.shape)].clone().requires_grad_() for _ in range(2)]
        to_local_of = [to_local(x, grad_layout=Layout.of(x)) for x in pairs[0]]
        sum(to_local_of).square().sum().backward()
        elsewhere = [redistribute(x, turned(*layout.alias_placements)) for x in pairs[1]]
        there = elsewhere[0].detach()
        sum(elsewhere).backward(4 * there)
        made = [from_local(part, layout, shape=full.shape) for part in parts]
        sum(made).backward(4 * made[0].detach())
        for x, z in (*pairs, parts):
            assert torch.equal(z.grad, 4 * z.detach()), layout
            x.grad.mul_(0)
            assert torch.equal(z.grad, 4 * z.detach()), layout
        assert torch.equal(there.to_local(), parts[0].detach())
        for x in pairs[0]:  # the gradient of a sum has one element in memory
            x.grad = None
            for _ in range(2):
                to_local(x, grad_layout=Layout.of(x)).sum().backward()
            assert torch.equal(full_tensor(x.grad), torch.full_like(full, 2))


@sim.ranks(4, backends=NO_GLOO)
def test_gradients_of_gradients(ctx):
    own = Layout.from_device_mesh(mesh_of(ctx))
    for shape in ((4, 4), (7, 3)):
        full, weight = numbers(ctx, *shape), numbers(ctx, *shape) - 3
        for source, target in ((own("dp"), own("None", "tp")), (own(("dp", "tp")), own()), (own(), own("tp", "dp"))):
            x = leaf(full, source)
            y = redistribute(x, target)
            (slope,) = torch.autograd.grad(y * y * y, x, distribute_tensor(weight, target), create_graph=True)
            assert torch.equal(full_tensor(slope.detach()), 3 * full**2 * weight)
            (bend,) = torch.autograd.grad(slope, x, distribute_tensor(weight, source))
            assert torch.equal(full_tensor(bend), 6 * full * weight**2)
        split = own("dp", "tp")
        local = full[split.local_slice(shape)].clone().requires_grad_()
        there = to_local(redistribute(from_local(local, split, shape=shape), own(("tp", "dp"))))
        (slope,) = torch.autograd.grad(there.pow(3).sum(), local, create_graph=True)
        assert torch.equal(slope, 3 * local**2)
        (bend,) = torch.autograd.grad(slope.sum(), local)
        assert torch.equal(bend, 6 * local)


@sim.ranks(4)
def test_gradients_of_gradients_where_parts_are_alike_copies_or_shares(ctx):
    own = Layout.from_device_mesh(mesh_of(ctx))
    full, weight = numbers(ctx, 4, 2), numbers(ctx, 4, 2) - 3
    copies = torch.stack([full + rank for rank in range(4)]).requires_grad_()
    push = torch.stack([weight - rank for rank in range(4)])
    for kind, y in {"sum": copies.sum(0), "avg": copies.mean(0)}.items():
        (slopes,) = torch.autograd.grad(y**3, copies, weight, create_graph=True)
        (bends,) = torch.autograd.grad(slopes, copies, push)
        local = copies[ctx.rank].detach().clone().requires_grad_()
        y = redistribute(from_local(local, own(partial={"dp": kind, "tp": kind})), own("dp", "tp"))
        (slope,) = torch.autograd.grad(y * y * y, local, distribute_tensor(weight, own("dp", "tp")), create_graph=True)
        (bend,) = torch.autograd.grad(slope, local, push[ctx.rank])
        torch.testing.assert_close((slope.detach(), bend), (slopes[ctx.rank].detach(), bends[ctx.rank]))
    alike, batch = full[:, 0].clone().requires_grad_(), numbers(ctx, 8, 4) - 3
    (slope,) = torch.autograd.grad((batch @ alike).pow(3).sum(), alike, create_graph=True)
    (bend,) = torch.autograd.grad(slope, alike, alike, create_graph=True)
    (twist,) = torch.autograd.grad(bend, alike, full[:, 0])
    local = full[:, 0].clone().requires_grad_()
    there = to_local(from_local(local, own()), grad_layout=())
    (again,) = torch.autograd.grad((batch @ there).pow(3).sum(), local, create_graph=True)
    assert torch.equal(again.detach(), slope.detach())
    assert torch.equal(torch.autograd.grad(again, local, local)[0], bend.detach())
    for kind, ways in (("sum", 1), ("avg", 4)):
        x = leaf(full[:, 0], own("dp"))
        there = full_tensor(x, grad_layout=own(partial={"dp": kind, "tp": kind}))
        (share,) = torch.autograd.grad((batch.chunk(4)[ctx.rank] @ there).pow(3).sum(), x, create_graph=True)
        torch.testing.assert_close(full_tensor(share.detach()), slope.detach() / ways)
        (bent,) = torch.autograd.grad(share, x, x, create_graph=True)
        torch.testing.assert_close(full_tensor(bent.detach()), bend.detach() / ways)
        (twisted,) = torch.autograd.grad(bent, x, distribute_tensor(full[:, 0], own("dp")))
        torch.testing.assert_close(full_tensor(twisted), twist / ways)


# -- from_local --------------------------------------------------------------------------------------------------------


@sim.ranks(4)
def test_from_local_gives_each_part_its_gradient(ctx):
    own = Layout.from_device_mesh(mesh_of(ctx))
    for shape in ((4, 4), (7, 3)):
        weight = numbers(ctx, *shape)
        for layout in layouts(own):
            part = weight[layout.local_slice(shape)].clone().requires_grad_()
            x = from_local(part, layout, shape=shape)
            redistribute(x, own("tp")).backward(distribute_tensor(weight, own("tp")))
            ways = {"sum": 1, "avg": 4}.get(next(iter(layout.partial.values()), "sum"))
            assert torch.equal(part.grad, weight[layout.local_slice(shape)] / ways), layout


@sim.ranks(4)
def test_from_local_of_copies_of_which_one_counts(ctx):
    own = Layout.from_device_mesh(mesh_of(ctx))
    weight = numbers(ctx, 4, 4)
    for kind in ("max", "min", "prod"):
        layout = own(partial={"dp": kind})
        copy = (weight + ctx.rank // 2).requires_grad_()
        y = redistribute(from_local(copy, layout), ())
        with pytest.raises(ValueError) as refused:
            y.backward(distribute_tensor(weight, own()))
        assert str(refused.value) == (
            f"cannot pass a gradient back through from_local: copies pend {kind}, and whose copy counts is known only "
            "when all are compared\n"
            f"  layout: () pending {kind} over dp on dp=2, tp=2\n"
            "  try: redistribute with torch.no_grad(), a sum instead, or grad_layout=... for what you mean"
        )
        y = redistribute(from_local(copy, layout, grad_layout=()), ())
        y.backward(distribute_tensor(weight, own()))
        assert torch.equal(copy.grad, weight)


@sim.ranks(4, backends=NO_GLOO)
def test_a_pending_gradient_of_copies_of_which_one_counts(ctx):
    """A sum stays pending over an axis where the copies do; others are taken, as no order of the two is known."""
    own = Layout.from_device_mesh(mesh_of(ctx))
    weight = numbers(ctx, 4, 4)
    for kind, pending, axes in itertools.product(("max", "min"), ("sum", "avg", "max"), (("dp", "tp"), ("tp",))):
        x = leaf(numbers(ctx, 4, 4), own(partial=dict.fromkeys(axes, kind)))
        given = own(partial={"dp": pending})
        grad = weight + ctx.rank // 2 * (1 if pending == "max" else 2)
        redistribute(x, ()).backward(from_local(grad, given))
        wanted = {"sum": 2 * weight + 2, "avg": weight + 1, "max": weight + 1}[pending]
        assert torch.equal(full_tensor(x.grad), wanted), (kind, pending)
        stays = pending != "max" and "dp" in axes
        assert Layout.of(x.grad).partial == ({"dp": pending} if stays else {}), (kind, pending, axes)


# -- to_local and full_tensor ------------------------------------------------------------------------------------------


@sim.ranks(4)
def test_to_local_is_refused_only_where_ranks_hold_the_same_or_copies(ctx):
    mesh = mesh_of(ctx, (2, 1, 2), ("dp", "cp", "tp"))
    own = Layout.from_device_mesh(mesh)
    full = numbers(ctx, 5, 3)
    for entries in (("dp", "tp"), (("tp", "dp"),), (("dp", "cp", "tp"),), ("tp", ("dp", "cp"))):
        x = leaf(full, own(*entries))
        to_local(x).square().sum().backward()
        assert torch.equal(full_tensor(x.grad), 2 * full), entries
    loose = {"'tp'": own("dp"), "'dp', 'tp'": own(), "'dp'": own("tp", partial={"dp": "sum"})}
    for names, layout in loose.items():
        x = leaf(full, layout)
        with pytest.raises(ValueError, match=f"through to_local: over {names} ranks hold the same or copies to reduce"):
            to_local(x).sum().backward()
        assert x.grad is None
    x = leaf(full, own("dp", "tp"))
    with pytest.raises(ValueError, match="through full_tensor: over 'dp', 'tp' ranks hold the same"):
        full_tensor(x).sum().backward()
    assert torch.equal(full_tensor(x.detach()), full)
    assert torch.equal(to_local(x.detach()), full[own("dp", "tp").local_slice((5, 3))])


@sim.ranks(4)
def test_every_rank_computes_the_same_loss(ctx):
    """A replicated tensor, one loss, computed by every rank: the gradient is the loss's, not four times it."""
    own = Layout.from_device_mesh(mesh_of(ctx))
    start, batch = numbers(ctx, 4, 3), numbers(ctx, 6, 4)
    alone = start.clone().requires_grad_()
    (batch @ alone).square().sum().backward()
    for layout in (own(), own("dp"), own(("tp", "dp")), own(partial={"tp": "sum"})):
        weight = leaf(start, layout)
        (batch @ full_tensor(weight, grad_layout=())).square().sum().backward()
        assert torch.equal(full_tensor(weight.grad), alone.grad), layout
    weight = leaf(start, own())
    (batch @ to_local(weight, grad_layout=own())).square().sum().backward()
    assert torch.equal(full_tensor(weight.grad), alone.grad)
    local = start.clone().requires_grad_()
    (batch @ to_local(from_local(local, own()), grad_layout=())).square().sum().backward()
    assert torch.equal(local.grad, alone.grad)


@sim.ranks(4)
def test_every_rank_computes_its_share_of_the_loss(ctx):
    """A replicated tensor, another part of the batch on every rank: the gradients of the ranks are to be added."""
    own = Layout.from_device_mesh(mesh_of(ctx))
    start, batch = numbers(ctx, 4, 3), numbers(ctx, 8, 4)
    mine = batch.chunk(4)[ctx.rank]
    alone = start.clone().requires_grad_()
    (batch @ alone).square().sum().backward()
    shares = own(partial={"dp": "sum", "tp": "sum"})
    for layout in (own(), own("dp"), own(("tp", "dp")), own(partial={"tp": "sum"})):
        weight = leaf(start, layout)
        (mine @ full_tensor(weight, grad_layout=shares)).square().sum().backward()
        assert torch.equal(full_tensor(weight.grad), alone.grad), layout
        weight = leaf(start, layout)
        (mine @ full_tensor(weight, grad_layout=[Partial(), Partial()])).square().sum().backward()
        assert torch.equal(full_tensor(weight.grad), alone.grad), layout
    weight = leaf(start, own())
    (mine @ to_local(weight, grad_layout=shares)).square().sum().backward()
    assert torch.equal(full_tensor(weight.grad), alone.grad)
    # The mean of the ranks' losses instead of their sum, as data parallel training has it.
    weight, average = leaf(start, own("dp")), own(partial={"dp": "avg", "tp": "avg"})
    (mine @ full_tensor(weight, grad_layout=average)).square().sum().backward()
    assert torch.equal(full_tensor(weight.grad), alone.grad / 4)
    # dp splits the batch, tp computes the same twice.
    weight, half = leaf(start, own("None", "tp")), batch.chunk(2)[ctx.rank // 2]
    (half @ full_tensor(weight, grad_layout=own(partial={"dp": "sum"}))).square().sum().backward()
    assert torch.equal(full_tensor(weight.grad), alone.grad)


@sim.ranks(4)
def test_what_torch_s_own_to_local_gives_there_instead(ctx):
    """The reason for `grad_layout`: torch takes the gradient of this rank's share for that of the whole loss."""
    mesh = mesh_of(ctx)
    start, batch = numbers(ctx, 4, 3), numbers(ctx, 8, 4)
    mine = batch.chunk(4)[ctx.rank]
    alone, share = (start.clone().requires_grad_() for _ in range(2))
    (batch @ alone).square().sum().backward()
    (mine @ share).square().sum().backward()
    weight = leaf(start, Layout.from_device_mesh(mesh)())
    (mine @ weight.to_local()).square().sum().backward()
    assert weight.grad.placements == (Replicate(), Replicate())  # says that all ranks hold the same
    assert torch.equal(weight.grad.to_local(), share.grad)  # and it is one rank's share
    assert not torch.equal(share.grad, alone.grad)
    split = leaf(start, Layout.from_device_mesh(mesh)("dp"))
    (mine @ split.full_tensor()).square().sum().backward()
    assert split.grad.placements == (Shard(0), Replicate())
    assert torch.equal(split.grad.to_local(), share.grad.chunk(2)[ctx.rank // 2])
