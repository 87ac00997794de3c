"""Values and gradients of functions of sharded tensors, each against a single device."""

import collections

import pytest
import torch
import torch.distributed as dist
from layouts_kit import layout_of, layouts, numbers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import sim
from hyper_parallel import distribute_tensor, from_local, full_tensor, redistribute, to_local
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.value_and_grad import parallelize_value_and_grad

NO_PROCESSES = ("sim", "gpu", "npu")
Outputs = collections.namedtuple("Outputs", "loss other")


def reference(fn, *weights):
    """Return value and gradients of a function of plain tensors."""
    leaves = [weight.detach().clone().requires_grad_() for weight in weights]
    value = fn(*leaves)
    return value.detach(), torch.autograd.grad(value, leaves, torch.ones_like(value))


@pytest.mark.tier("full")
@sim.ranks(4)
def test_gradients_do_not_depend_on_the_layout_of_the_output(ctx):
    own = layout_of(ctx)
    for shape in ((4, 4), (7, 3)):
        x, w = numbers(ctx, *shape), numbers(ctx, *shape) + 1
        value, (expected,) = reference(lambda w, x=x: (w * w * x).sin(), w)
        for placed in layouts(own)[:6]:
            weight = distribute_tensor(w, placed).requires_grad_()
            given = distribute_tensor(x, placed)
            for layout in layouts(own):
                step = parallelize_value_and_grad(lambda: redistribute((weight * weight * given).sin(), layout), weight)  # noqa: B023
                got, grad = step()
                assert Layout.of(got) == Layout.of(redistribute(weight.detach(), layout)), layout
                torch.testing.assert_close(full_tensor(got), value)
                assert torch.equal(full_tensor(grad), expected), (placed, layout)
                assert grad.placements == weight.placements
                assert not grad.requires_grad


@pytest.mark.tier("test")
@sim.ranks(4)
def test_losses_as_torch_leaves_them_pending(ctx):
    """Sums and averages over what is split are pending; a rank's share counts once, and no more."""
    mesh = layout_of(ctx).mesh
    x, w = numbers(ctx, 8, 4), numbers(ctx, 4, 4)
    losses = {
        "sum": lambda w, x: (x @ w).square().sum(),
        "mean": lambda w, x: (x @ w).square().mean(),
        "rows": lambda w, x: (x @ w).square().sum(1),
    }
    for name, loss in losses.items():
        value, (expected,) = reference(lambda w, loss=loss: loss(w, x), w)
        for x_as, w_as in (
            ((Shard(0), Replicate()), (Replicate(), Shard(1))),
            ((Shard(0), Shard(1)), (Replicate(), Shard(0))),
            ((Replicate(), Shard(0)), (Replicate(), Replicate())),
            ((Shard(0), Shard(0)), (Shard(0), Replicate())),
        ):
            weight = distribute_tensor(w, mesh, w_as).requires_grad_()
            got, grad = parallelize_value_and_grad(loss, weight)(weight, distribute_tensor(x, mesh, x_as))
            torch.testing.assert_close(full_tensor(got), value)
            torch.testing.assert_close(full_tensor(grad), expected, msg=lambda text, name=name: f"{name}: {text}")
            assert grad.placements == w_as, name


@sim.ranks(2)
def test_a_loss_of_parts_counts_once(ctx):
    own = layout_of(ctx, (2,), ("dp",))
    x, w = numbers(ctx, 6, 3), numbers(ctx, 3)
    weight = distribute_tensor(w, own()).requires_grad_()
    mine = sim.scatter_full(x, own("dp"), ctx.rank)

    def loss(kind):
        local = to_local(weight, grad_layout=own(partial={"dp": "sum"}))
        return from_local((mine * local).sum(), own(partial={"dp": kind}), shape=())

    total, grad = parallelize_value_and_grad(loss, weight)("sum")
    assert total.placements == (Partial(),)
    assert full_tensor(total) == (x * w).sum()
    assert torch.equal(full_tensor(grad), x.sum(0))
    assert grad.placements == (Replicate(),)
    mean, grad = parallelize_value_and_grad(loss, weight)("avg")
    assert full_tensor(mean) == (x * w).sum() / 2
    assert torch.equal(full_tensor(grad), x.sum(0) / 2)
    plain, grad = parallelize_value_and_grad(lambda: full_tensor(loss("sum"), grad_layout=own()), weight)()
    assert not isinstance(plain, DTensor)
    assert plain == (x * w).sum()
    assert torch.equal(full_tensor(grad), x.sum(0))


@sim.ranks(2, backends=NO_PROCESSES)
def test_several_outputs_are_scaled(ctx):
    own = layout_of(ctx, (2,), ("dp",))
    a, b = (distribute_tensor(numbers(ctx, 4, 2) + k, own("dp")).requires_grad_() for k in (0, 1))
    unused = torch.ones(2, device=ctx.device, requires_grad=True)

    def fn(times, *, kind=tuple):
        made = ((a * b * times).sum(), a * a)
        return Outputs(*made) if kind is Outputs else kind(made)

    whole_a, whole_b = full_tensor(a.detach()), full_tensor(b.detach())
    for kind in (tuple, list, Outputs):
        value, grads = parallelize_value_and_grad(fn, [a, b, unused])(3, kind=kind)
        assert type(value) is kind
        assert type(grads) is list
        assert grads[2] is None
        assert not value[0].requires_grad
        assert value[1].grad_fn is None
        assert full_tensor(value[0]) == 3 * (whole_a * whole_b).sum()
        assert torch.equal(full_tensor(grads[0]), 3 * whole_b)
        assert torch.equal(full_tensor(grads[1]), 3 * whole_a)
        value, grads = parallelize_value_and_grad(fn, (a, b), sens=[2.0, 0.5])(1, kind=kind)
        assert type(grads) is tuple
        assert torch.equal(full_tensor(grads[0]), 2 * whole_b + whole_a)
        assert torch.equal(full_tensor(grads[1]), 2 * whole_a)
    value, grad = parallelize_value_and_grad(fn, b, sens=(0.0, 1.0))(1)
    assert isinstance(grad, DTensor)
    assert not full_tensor(grad).any()


@sim.ranks(2, backends=NO_PROCESSES)
def test_one_call_and_nothing_left_behind(ctx):
    own = layout_of(ctx, (2,), ("dp",))
    w = distribute_tensor(numbers(ctx, 4), own("dp")).requires_grad_()
    calls = []

    def loss(x):
        """Return a loss."""
        calls.append(torch.is_grad_enabled())
        return (w * x).sum()

    step = parallelize_value_and_grad(loss, w)
    assert step.__name__ == "loss"
    assert step.__doc__ == "Return a loss."
    x = distribute_tensor(numbers(ctx, 4), own("dp")).requires_grad_()
    for guard in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with guard():
            value, grad = step(x)
        assert torch.equal(full_tensor(grad), full_tensor(x.detach()))
        assert value.grad_fn is None
    assert calls == [True] * 3
    assert w.grad is None
    assert x.grad is None
    constant = parallelize_value_and_grad(lambda: x.detach().sum(), [w])
    assert constant()[1] == [None]


@sim.ranks(2, backends=NO_PROCESSES)
def test_gradients_have_memory_of_their_own(ctx):
    own = layout_of(ctx, (2,), ("dp",))
    for made in (lambda: numbers(ctx, 4), lambda: distribute_tensor(numbers(ctx, 4), own("dp"))):
        a, b = made().requires_grad_(), made().requires_grad_()
        for fn in (lambda a=a, b=b: (a + b).sum(), lambda a=a, b=b: a + b.view(4)):
            _, grads = parallelize_value_and_grad(fn, [a, b])()
            for grad in grads:
                grad.mul_(2)
            for grad in grads:
                assert (full_tensor(grad) if isinstance(grad, DTensor) else grad).eq(2).all()


def test_a_pending_loss_is_not_reduced_to_be_differentiated():
    def step():
        own = Layout.from_device_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        w = distribute_tensor(torch.ones(8), own("dp"), src_data_rank=None).requires_grad_()
        b = distribute_tensor(torch.ones(()), own(), src_data_rank=None).requires_grad_()
        dist.barrier()
        value, grads = parallelize_value_and_grad(lambda scale: (w * b * scale).sum(), [w, b])(1)
        assert value.placements == (Partial(),)
        assert to_local(grads[1]) == 8

    with sim.world(4) as world:
        world.run(step)
        ops = [event.op for event in world.trace.of_rank(0)]
    assert ops[ops.index("barrier") + 1 :] == ["all_reduce"]
