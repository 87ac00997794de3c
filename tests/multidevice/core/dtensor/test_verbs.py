"""The verbs on DTensors: every way to name a layout, results that are torch's own, values, and agreement with torch."""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

import sim
from hyper_parallel import distribute_tensor, from_local, full_tensor, redistribute, to_local
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute import PendingRedistribute, plan

pytestmark = pytest.mark.tier("test")

NO_GLOO = ("sim", "gpu", "npu")  # the same communication as in others here, which processes run
KINDS = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "prod": torch.prod}


def mesh_of(ctx, sizes=(2, 2), names=("dp", "tp")):
    return init_device_mesh(ctx.device_type, sizes, mesh_dim_names=names)


def numbers(ctx, *shape):
    """Small whole numbers from 1 up, the same on every rank, that float32 adds and multiplies exactly."""
    return (torch.arange(float(torch.Size(shape).numel()), device=ctx.device) % 7 + 1).reshape(shape)


def check(x, layout, full):
    """The calling rank holds what the layout gives it, says so, and the ranks together hold the whole."""
    assert type(x) is DTensor, layout
    assert x.shape == full.shape, layout
    assert Layout.of(x).slices(full.shape).tolist() == on_ranks(layout, Layout.of(x)).slices(full.shape).tolist()
    assert torch.equal(x.to_local(), full[layout.local_slice(full.shape)]), layout
    assert torch.equal(full_tensor(x), full), layout


def on_ranks(layout, other):
    """The layout with its ranks in the order of another one, for layouts whose splits are in order there."""
    ndim = len(other.tensor_map)
    sizes, names, ranks = other.mesh_shape, other.alias_name, other.rank_list
    return Layout(sizes, names, ranks)(*layout.placement_to_tensor_map(ndim).alias_placements)


# -- every way to name a layout ----------------------------------------------------------------------------------------


@sim.ranks(4)
def test_every_verb_takes_every_form(ctx):
    mesh = mesh_of(ctx)
    full = numbers(ctx, 8, 6)
    wanted = Layout.from_device_mesh(mesh)(("dp", "tp"), "None")
    part = full[wanted.local_slice(full.shape)].clone()
    x = distribute_tensor(full, Layout.from_device_mesh(mesh)("tp", "dp"))
    alone, anywhere = Layout.from_device_mesh(mesh), Layout((2, 2), ("dp", "tp"))(("dp", "tp"))
    with_mesh = {
        "layout": (wanted,),
        "layout, placement form": (alone(Shard(0), Shard(0)),),
        "layout, given the mesh": (anywhere.with_mesh(mesh),),
        "layout without assignment, and entries": (alone, (("dp", "tp"), None)),
        "mesh and placements": (mesh, [Shard(0), Shard(0)]),
        "mesh and negative placements": (mesh, (Shard(-2), Shard(-2))),
        "mesh and alias entries": (mesh, (("dp", "tp"), "None")),
    }
    on_known_mesh = {
        "layout without a mesh": (anywhere,),
        "alias tuple": ((("dp", "tp"), "None"),),
        "alias list": ([("dp", "tp")],),
        "placements": ([Shard(0), Shard(0)],),
        "placements by name": (None, [Shard(0), Shard(0)]),
    }
    for form, arguments in with_mesh.items():
        check(distribute_tensor(full, *arguments), wanted, full)
        check(from_local(part, *arguments, shape=(8, 6)), wanted, full)
        assert torch.equal(from_local(part, *arguments).to_local(), part), form
    for form, arguments in {**with_mesh, **on_known_mesh}.items():
        y = redistribute(x, *arguments)
        check(y, wanted, full)
        assert (y.device_mesh, y.placements) == (mesh, (Shard(0), Shard(0))), form
        pending = redistribute(x, *arguments, async_op=True)
        assert isinstance(pending, PendingRedistribute)
        assert torch.equal(pending.wait().to_local(), part)
        assert pending.wait() is pending.wait()
    entries = (("dp", "tp"), "None")
    for grad_layout in (wanted, anywhere, entries, [Shard(0), Shard(0)]):
        leaf = distribute_tensor(full.clone().requires_grad_(), wanted)
        to_local(leaf, grad_layout=grad_layout).square().sum().backward()
        check(leaf.grad, wanted, 2 * full)
        local = part.clone().requires_grad_()
        from_local(local, wanted, shape=(8, 6), grad_layout=grad_layout).backward(leaf.grad)
        assert torch.equal(local.grad, 2 * part)
    for form in ((alone(),), (mesh, ()), (mesh, [Replicate()] * 2), (mesh, ("None", None))):
        x = distribute_tensor(full, *form)
        assert x.placements == (Replicate(), Replicate())
        assert torch.equal(from_local(full, *form).full_tensor(), full)
    assert redistribute(x, ()) is x


# -- results are torch's DTensors ---------------------------------------------------------------------------------


@sim.ranks(4)
def test_results_work_where_torch_s_do(ctx):
    mesh = mesh_of(ctx)
    full = numbers(ctx, 8, 6)
    part = full.chunk(2)[ctx.rank // 2].chunk(2, 1)[ctx.rank % 2].clone()
    made = {
        "distributed": distribute_tensor(full, mesh, ("dp", "tp")),
        "from local": from_local(part, mesh, ("dp", "tp")),
        "redistributed": redistribute(distribute_tensor(full, mesh, ("tp", "dp")), ("dp", "tp")),
    }
    other = torch_distribute_tensor(full, mesh, [Replicate(), Shard(0)])
    for how, x in made.items():
        assert torch.equal((x @ other.t()).full_tensor(), full @ full.t()), how
        assert torch.equal((x.relu() + 1).sum(0).full_tensor(), (full + 1).sum(0)), how
        assert torch.equal(x.redistribute(mesh, [Replicate(), Replicate()]).to_local(), full), how
        assert torch.equal(copy.deepcopy(x).full_tensor(), full), how
        file = io.BytesIO()
        torch.save({"x": x}, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)["x"]
        assert read.placements == x.placements, how
        assert torch.equal(read.to_local(), x.to_local()), how
        assert (x.stride(), x.dtype, x.device) == (full.stride(), full.dtype, full.device), how


@sim.ranks(4)
def test_parameters_train_as_on_one_device(ctx):
    torch.manual_seed(0)
    mesh = mesh_of(ctx)
    start, batch = torch.randn(6, 4).to(ctx.device), torch.randn(8, 6).to(ctx.device)
    alone = torch.nn.Parameter(start.clone())
    split = torch.nn.Parameter(distribute_tensor(start, mesh, ("dp", "tp")))
    module = torch.nn.Module()
    module.weight = split
    optimizers = [torch.optim.AdamW([weight], lr=0.1) for weight in (alone, split)]
    losses = []
    for _ in range(3):
        gathered = full_tensor(split, grad_layout=())
        rows = [(batch @ weight).square().mean() for weight in (alone, gathered)]
        for loss, optimizer in zip(rows, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(torch.stack(rows).detach())
    assert losses[0][0] > losses[2][0] + 0.1
    torch.testing.assert_close(torch.stack(losses)[:, 0], torch.stack(losses)[:, 1])
    torch.testing.assert_close(full_tensor(split.detach()), alone.detach())
    state = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        split.zero_()
    module.load_state_dict(state)
    torch.testing.assert_close(full_tensor(split.detach()), alone.detach())
    moments = optimizers[1].state_dict()["state"][0]
    assert moments["exp_avg"].placements == (Shard(0), Shard(1))


# -- values ------------------------------------------------------------------------------------------------------------

LAYOUTS = [(), ("dp",), ("None", "tp"), ("tp", "dp"), (("dp", "tp"),), (("tp", "dp"),), ("None", ("tp", "dp"))]
SHAPES = [(8, 4), (7, 5), (3, 1), (0, 4), (1, 0)]


@pytest.mark.tier("full")
@sim.ranks(4)
def test_values_of_even_uneven_empty_and_ordered_splits(ctx):
    own = Layout.from_device_mesh(mesh_of(ctx))
    for shape, entries in itertools.product(SHAPES, LAYOUTS):
        full = numbers(ctx, *shape)
        layout = own(*entries)
        x = distribute_tensor(full, layout)
        check(x, layout, full)
        check(from_local(full[layout.local_slice(shape)], layout, shape=shape), layout, full)
        for others in LAYOUTS:
            there = redistribute(x, own(*others))
            check(there, own(*others), full)
            back = redistribute(there, layout)
            assert torch.equal(back.to_local(), x.to_local()), (entries, others)
            assert back.placements == x.placements
            assert back.device_mesh == x.device_mesh


# torch has no collectives of some of these, with gloo, or with nccl (int16).
MOVED = [torch.bool, torch.bfloat16, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64]
MOVED += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


@pytest.mark.tier("full")
@sim.ranks(4)
def test_every_dtype_is_moved(ctx):
    for dtype in MOVED:
        for size in (8, 7):
            full = 2 ** (numbers(ctx, size, 4) % 3)
            full = full.to(dtype)
            for entries in ((("dp", "tp"),), ("dp", "tp"), ("None", "tp"), ("None",)):
                x = distribute_tensor(full, mesh_of(ctx), entries)
                assert x.dtype == x.to_local().dtype == dtype
                for found in (full_tensor(x), full_tensor(redistribute(x, ("tp", "dp")))):
                    assert found.dtype == dtype
                    assert torch.equal(found.to(torch.complex64), full.to(torch.complex64)), (dtype, size, entries)


@sim.ranks(4)
def test_scalars_and_uneven_splits_against_the_mesh_s_order(ctx):
    mesh = mesh_of(ctx)
    x = distribute_tensor(torch.tensor(3.0, device=ctx.device), mesh, ())
    assert (x.shape, full_tensor(x).item()) == ((), 3.0)
    pending = from_local(torch.tensor(ctx.rank + 1.0, device=ctx.device), mesh, [Partial(), Partial("sum")])
    assert (pending.shape, full_tensor(pending).item()) == ((), 10.0)
    half = redistribute(pending, [Replicate(), Partial()])
    assert half.to_local().item() == (4.0 if ctx.rank % 2 == 0 else 6.0)
    assert full_tensor(redistribute(x, [Partial(), Replicate()])).item() == 3.0
    layout = Layout.from_device_mesh(mesh)(("tp", "dp"))
    for size, names in ((8, ("dp", "tp")), (7, ("tp", "dp"))):
        full = numbers(ctx, size)
        for x in (
            distribute_tensor(full, layout),
            redistribute(distribute_tensor(full, mesh, ("dp",)), layout),
            from_local(full[layout.local_slice((size,))], layout, shape=(size,)),
        ):
            check(x, layout, full)
            assert x.device_mesh.mesh_dim_names == names
            assert redistribute(x, Layout.of(x)) is x
            assert torch.equal((x + x).full_tensor(), 2 * full)
            assert torch.equal(x.full_tensor(), full)


@pytest.mark.tier("full")
@sim.ranks(4)
def test_pending_reductions(ctx):
    own = Layout.from_device_mesh(mesh_of(ctx))
    for shape, (kind, reduce) in itertools.product(((4, 6), (5, 3), (1, 2), (0, 2)), KINDS.items()):
        copies = torch.stack([numbers(ctx, *shape) + rank % 3 for rank in range(4)])
        over_tp = [reduce(copies[index : index + 2], 0) for index in (0, 2)]
        full = reduce(torch.stack(over_tp), 0)
        x = from_local(copies[ctx.rank], own(partial={"dp": kind, "tp": kind}))
        assert torch.equal(full_tensor(x), full)
        for entries in LAYOUTS:
            check(redistribute(x, own(*entries)), own(*entries), full)
        half = redistribute(x, own("tp", partial={"dp": kind}))
        rows = own("tp").local_slice(shape)
        assert torch.equal(half.to_local(), over_tp[ctx.rank // 2][rows])
        check(redistribute(half, own("None", "dp")), own("None", "dp"), full)
        for layout in (own(partial={"tp": kind}), own("dp", partial={"tp": kind})):
            opened = distribute_tensor(full, layout)
            assert Layout.of(opened) == layout
            assert torch.equal(full_tensor(opened), full)
            assert torch.equal(full_tensor(redistribute(redistribute(opened, ()), layout)), full)


@sim.ranks(4)
def test_whose_tensor_is_distributed(ctx):
    mesh = mesh_of(ctx)
    mine = numbers(ctx, 5, 4) + 100 * ctx.rank
    for entries in LAYOUTS:
        layout = Layout.from_device_mesh(mesh)(*entries)
        check(distribute_tensor(mine, layout), layout, numbers(ctx, 5, 4))
        check(distribute_tensor(mine, layout, src_data_rank=1), layout, numbers(ctx, 5, 4) + 300)
        own = distribute_tensor(mine, layout, src_data_rank=None)
        assert torch.equal(own.to_local(), mine[layout.local_slice((5, 4))]), layout
    flat = mesh_of(ctx, (4,), ("dp",))
    check(
        distribute_tensor(mine, flat, ("dp",), src_data_rank=2), Layout((4,), ("dp",))("dp"), numbers(ctx, 5, 4) + 200
    )
    pending = distribute_tensor(mine, flat, [Partial()], src_data_rank=3)
    assert torch.equal(full_tensor(pending), numbers(ctx, 5, 4) + 300)


@sim.ranks(4)
def test_parts_without_a_shape(ctx):
    mesh = mesh_of(ctx)
    x = from_local(numbers(ctx, 2, 3), mesh, (("dp", "tp"), "None"))
    assert x.shape == (8, 3)
    assert from_local(numbers(ctx, 2, 3), mesh, ("tp", "dp")).shape == (4, 6)
    assert from_local(numbers(ctx, 2, 3), mesh, ()).shape == (2, 3)
    assert from_local(numbers(ctx, 0, 3), mesh, ("dp",)).shape == (0, 3)
    with pytest.raises(ValueError) as refused:
        from_local(numbers(ctx, 2 if ctx.rank < 3 else 1, 3), mesh, (("dp", "tp"), "None"))
    assert str(refused.value) == (
        "cannot make a DTensor from local parts: the parts have different shapes, and the shape of the full tensor "
        "is not guessed\n"
        "  layout: (dp>tp, -) on dp=2, tp=2\n"
        "  rank 0: (2, 3)\n  rank 1: (2, 3)\n  rank 2: (2, 3)\n  rank 3: (1, 3)\n"
        "  try: shape=(...), the full tensor's"
    )
    with pytest.raises(ValueError, match=r"rank 2: \(2, 3\)\n  rank 3: \(2, 3, 1\)\n  try"):
        from_local(numbers(ctx, *((2, 3) if ctx.rank < 3 else (2, 3, 1))), mesh, (("dp", "tp"), "None"))
    for placements in ([Replicate()] * 2, [Partial(), Replicate()]):  # copies of one tensor have its shape
        with pytest.raises(ValueError, match=r"different shapes.*\n.*\n  rank 0: \(2, 3\)\n  rank 1: \(3, 3\)"):
            from_local(numbers(ctx, 2 + ctx.rank % 2, 3), mesh, placements)
    with pytest.raises(ValueError, match=r"different dtypes.*\n.*\n  rank 0: float32\n  rank 1: bfloat16"):
        from_local(numbers(ctx, 2, 3).to(torch.bfloat16 if ctx.rank == 1 else torch.float32), mesh, ("dp",))
    dist.barrier()


@sim.ranks(4)
def test_views_that_merge_split_dims(ctx):
    """torch's view leaves strided parts, which no layout says; what is made of them is right all the same."""
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 refuses views that merge a split dim that is not the first")
    mesh, full = mesh_of(ctx), numbers(ctx, 8, 8)
    x = distribute_tensor(full, mesh, ("dp", "tp")).requires_grad_()
    flat = x.reshape(64)
    own = Layout.from_device_mesh(mesh)
    assert torch.equal(full_tensor(flat.detach()), full.reshape(64))
    there = redistribute(flat, own(("tp", "dp")))
    check(there.detach(), own(("tp", "dp")), full.reshape(64))
    there.sum().redistribute(mesh, [Replicate()] * 2).backward()
    assert torch.equal(full_tensor(x.grad), torch.ones_like(full))


@sim.ranks(4)
def test_what_norms_and_embeddings_leave_pending(ctx):
    """Powers that are to be added up, and rows that one rank has: more than a layout says, and reduced all the same."""
    mesh, full = mesh_of(ctx), numbers(ctx, 5, 3)
    everywhere = [Replicate()] * 2
    x = distribute_tensor(full, mesh, ("dp", "tp")).requires_grad_()
    for p, dim in itertools.product((2.0, 1.0, 3.0, 0.0, float("inf"), -float("inf")), (None, 1)):
        pending, wanted = (torch.linalg.vector_norm(t, p, dim) for t in (x, full))
        torch.testing.assert_close(full_tensor(pending.detach()), wanted)
        for target in (everywhere, [Partial(), Replicate()], [Replicate(), Partial("avg")]):
            moved = redistribute(pending, mesh, target)
            assert moved.placements == tuple(target)
            torch.testing.assert_close(moved.full_tensor(), wanted)
    (3 * redistribute(x.norm(), mesh, everywhere)).backward()
    torch.testing.assert_close(full_tensor(x.grad), 3 * full / full.norm())
    table = distribute_tensor(full, mesh, ("tp", "None"))
    rows = torch.tensor([0, 4, 2], device=ctx.device)
    found = torch.nn.functional.embedding(distribute_tensor(rows, mesh, everywhere), table)
    assert torch.equal(full_tensor(found), full[rows])


# -- agreement with torch ----------------------------------------------------------------------------------------------

STATES = [*itertools.product([Replicate(), Shard(0), Shard(1), Partial()], repeat=2)]


@pytest.mark.tier("full")
@sim.ranks(4)
def test_every_verb_agrees_with_torch_s(ctx):
    mesh = mesh_of(ctx)
    full = numbers(ctx, 8, 4)
    for placements in STATES:
        theirs = torch_distribute_tensor(full, mesh, placements)
        ours = distribute_tensor(full, mesh, placements)
        assert ours._spec == theirs._spec
        assert torch.equal(full_tensor(ours), theirs.full_tensor())
        if Partial() not in placements:  # there our sum may be prepared otherwise
            assert torch.equal(ours.to_local(), theirs.to_local())
        local = theirs.to_local()
        made, as_torch = from_local(local, mesh, placements), DTensor.from_local(local, mesh, placements)
        assert made._spec == as_torch._spec
        assert torch.equal(made.to_local(), as_torch.to_local())
        for target in STATES:
            ours = redistribute(theirs, mesh, target)
            assert torch.equal(full_tensor(ours), full), (placements, target)
            if Partial() in target:  # which torch keeps for itself
                assert ours.placements == target
                continue
            as_torch = theirs.redistribute(mesh, target)
            assert ours._spec == as_torch._spec, (placements, target)
            assert torch.equal(ours.to_local(), as_torch.to_local()), (placements, target)


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_GLOO)
def test_uneven_splits_agree_with_torch_s(ctx):
    mesh = mesh_of(ctx)
    in_order = [state for state in STATES if Partial() not in state]
    for shape in ((7, 5), (3, 2), (1, 4)):
        full = numbers(ctx, *shape)
        for source, target in itertools.product(in_order, repeat=2):
            theirs = torch_distribute_tensor(full, mesh, source)
            assert torch.equal(distribute_tensor(full, mesh, source).to_local(), theirs.to_local())
            ours = redistribute(theirs, mesh, target)
            assert torch.equal(ours.to_local(), torch_distribute_tensor(full, mesh, target).to_local())
            assert torch.equal(theirs.redistribute(mesh, target).to_local(), ours.to_local())


# -- who wants a gradient ------------------------------------------------------------------------------------------


def signs(x):
    return x.requires_grad, x.is_leaf, x.grad_fn is None, type(x)


@sim.ranks(4)
def test_requires_grad_is_as_torch_has_it(ctx):
    mesh, split, whole_there = mesh_of(ctx, (4,), ("dp",)), [Shard(0)], [Replicate()]
    full, part = numbers(ctx, 8, 4), numbers(ctx, 2, 4)
    for wants in (False, True):
        tensor, local = full.clone().requires_grad_(wants), part.clone().requires_grad_(wants)
        theirs = torch_distribute_tensor(tensor, mesh, split)
        ours = distribute_tensor(tensor, mesh, split)
        assert signs(ours) == signs(theirs)
        assert signs(from_local(local, mesh, split)) == signs(DTensor.from_local(local, mesh, split))
        assert signs(redistribute(ours, mesh, whole_there)) == signs(theirs.redistribute(mesh, whole_there))
        assert signs(redistribute(ours, whole_there, async_op=True).wait()) == signs(redistribute(ours, whole_there))
        assert signs(to_local(ours)) == signs(theirs.to_local())
        assert signs(full_tensor(ours)) == signs(theirs.full_tensor())
        with torch.no_grad():
            assert signs(redistribute(ours, whole_there)) == (False, True, True, DTensor)
            assert signs(from_local(local, mesh, split)) == signs(DTensor.from_local(local, mesh, split))
            assert signs(to_local(ours)) == signs(to_local(theirs)) == (False, True, True, torch.Tensor)
    parameter = torch.nn.Parameter(full)
    assert signs(distribute_tensor(parameter, mesh, split)) == signs(torch_distribute_tensor(parameter, mesh, split))
    counts = distribute_tensor(torch.arange(8, device=ctx.device), mesh, split)
    assert redistribute(counts, [Replicate()]).requires_grad is False


# -- what is communicated ----------------------------------------------------------------------------------------------


def events_of(body):
    """The operations that each of 4 ranks communicates after the first `yield` of a body, which all rest of it."""
    starts = {}

    def on_rank(world):
        rank = dist.get_rank()
        running = body()
        next(running)
        starts[rank] = len(world.trace.of_rank(rank))
        assert next(running, None) is None

    with sim.world(4) as world:
        world.run(on_rank, (world,))
        return [[event.op for event in world.trace.of_rank(rank)[starts[rank] :]] for rank in range(4)]


def cpu_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_what_is_in_its_layout_already_is_returned_as_it_is():
    def body():
        mesh = cpu_mesh()
        x = distribute_tensor(torch.ones(7, 4), mesh, ("dp", "tp"))
        uneven = distribute_tensor(torch.ones(7), mesh, (("tp", "dp"),))
        wanted = x.detach().requires_grad_()
        yield
        same = redistribute(wanted, Layout.of(x))  # a link of its own, through which a gradient finds its layout
        assert same is not wanted
        assert same.to_local().data_ptr() == wanted.to_local().data_ptr()
        for form in ((Layout.of(x),), (("dp", "tp"),), ([Shard(0), Shard(1)],), (mesh, [Shard(-2), Shard(-1)])):
            assert redistribute(x, *form) is x
            assert redistribute(x, *form, async_op=True).wait() is x
        assert redistribute(uneven, Layout.of(uneven)) is uneven
        again = redistribute(uneven, Layout.from_device_mesh(mesh)(("tp", "dp")))
        assert (again.device_mesh, again.placements) == (uneven.device_mesh, uneven.placements)
        assert torch.equal(again.to_local(), uneven.to_local())

    assert events_of(body) == [[]] * 4


def test_a_slice_of_what_is_there_is_not_communicated():
    def body():
        mesh = cpu_mesh()
        x = distribute_tensor(torch.ones(7, 4), mesh, ("None", "tp"))
        yield
        assert redistribute(x, ("dp", "tp")).to_local().numel() > 0
        assert to_local(x).shape == (7, 2)
        distribute_tensor(torch.ones(7, 4), mesh, ("dp", "tp"), src_data_rank=None)
        distribute_tensor(torch.ones(7, 4), mesh, [Partial(), Shard(0)], src_data_rank=None)

    assert events_of(body) == [[]] * 4


def test_parts_are_compared_only_where_no_shape_is_given():
    def quiet():
        mesh = cpu_mesh()
        yield
        for entries in LAYOUTS:
            layout = Layout.from_device_mesh(mesh)(*entries)
            from_local(torch.ones(layout.local_shape((7, 5))), layout, shape=(7, 5))
        for placements in ([Replicate()] * 2, [Partial()] * 2, [Partial("max"), Replicate()]):
            from_local(torch.ones(3, 2), mesh, placements, shape=(3, 2))

    def heard():
        mesh = cpu_mesh()
        yield
        from_local(torch.ones(3, 2), mesh, ("dp",))
        from_local(torch.ones(3, 2), mesh, ())
        from_local(torch.ones(3, 2), mesh, [Partial(), Replicate()])

    assert events_of(quiet) == [[]] * 4
    assert events_of(heard) == [["all_gather"] * 3] * 4


@sim.ranks(4, backends=("sim",))
def test_a_whole_tensor_stays_as_it_is(ctx):
    mesh, mine = cpu_mesh(), torch.full((5, 4), float(dist.get_rank()))
    for entries in LAYOUTS:
        distribute_tensor(mine, mesh, entries).to_local().add_(1)
    assert mine.unique().tolist() == [[0.0], [1.0], [2.0], [3.0]][ctx.rank]


def test_memory_is_bounded_on_the_way_back_too():
    shape, splits = (64, 64), ((("dp", "tp"), "None"), ("None", ("dp", "tp")))
    src, dst = (Layout((2, 2), ("dp", "tp"))(*entries) for entries in splits)
    limit = plan(src, dst, shape, torch.float32).peak_extra_bytes // 4
    rounds = [
        plan(*pair, shape, torch.float32, max_extra_bytes=limit).num_collectives for pair in ((src, dst), (dst, src))
    ]
    assert min(rounds) > 1

    def body():
        mesh = cpu_mesh()
        x = from_local(torch.ones(16, 64), mesh, splits[0], shape=shape).requires_grad_()
        grad = from_local(torch.ones(64, 16), mesh, splits[1], shape=shape)
        yield
        redistribute(x, splits[1], max_extra_bytes=limit).backward(grad)

    assert [len(events) for events in events_of(body)] == [sum(rounds)] * 4


def test_a_limit_that_the_way_back_cannot_meet():
    """A slice needs no memory, and the gather of its gradient does: as little as there is."""

    def body():
        mesh = cpu_mesh()
        x = from_local(torch.ones(8, 8), mesh, (), shape=(8, 8)).requires_grad_()
        yield
        part = redistribute(x, ("dp", "tp"), max_extra_bytes=0)
        part.backward(from_local(torch.ones(4, 4), mesh, ("dp", "tp"), shape=(8, 8)))
        assert torch.equal(x.grad.to_local(), torch.ones(8, 8))

    assert all(events_of(body))


def test_a_rank_off_the_mesh_is_told_so_alike():
    """Whether or not there is something to move."""

    def body():
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
        yield
        for entries in (("dp",), ()):
            x = from_local(
                torch.ones(2 if entries and dist.get_rank() < 2 else 4 * (not entries), 2), mesh, entries, shape=(4, 2)
            )
            for verb in (
                full_tensor,
                lambda x: redistribute(x, Layout.of(x)),
                lambda x: redistribute(x, mesh, x.placements),
            ):
                if dist.get_rank() < 2:
                    verb(x)
                else:
                    with pytest.raises(ValueError, match="neither on the mesh"):
                        verb(x)

    events_of(body)


def test_verbs_between_compiled_graphs(tmp_path):
    """torch.compile runs them as they are."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        own = Layout.from_device_mesh(mesh)
        x = from_local(torch.arange(16.0).reshape(4, 4), own("dp", "tp"), shape=(4, 4)).requires_grad_()
        for function in (
            lambda x: to_local(redistribute(x * 2, (None, "tp")), grad_layout=own("None", "tp")) * 3,
            lambda x: full_tensor(x * 2, grad_layout=own()) + 1,
            lambda x: to_local(redistribute(x + 1, own(), async_op=True).wait(), grad_layout=own()) * 2,
        ):
            torch._dynamo.reset()
            found, expected = torch.compile(function, backend="eager")(x), function(x)
            assert torch.equal(found, expected)
            grads = [torch.autograd.grad(result.sum(), x)[0].to_local() for result in (found, expected)]
            assert torch.equal(*grads)
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()
