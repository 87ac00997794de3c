"""The cross entropy of logits that are split over the vocabulary, against torch's on whole logits."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel import distribute_tensor, full_tensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.loss import vocab_parallel_cross_entropy

NO_PROCESSES = ("sim", "gpu", "npu")


def layout_of(ctx, sizes=(2, 2), names=("dp", "tp")):
    return Layout.from_device_mesh(init_device_mesh(ctx.device_type, sizes, mesh_dim_names=names))


def batch(ctx, *rows, classes, dtype=torch.float32, ignored=0.3):
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(*rows, classes, generator=generator, dtype=torch.float64) * 3
    targets = torch.randint(classes, rows, generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = -100
    return logits.to(ctx.device, dtype), targets.to(ctx.device)


def reference(logits, targets, **options):
    """Return torch's loss in double precision, and a function of the loss's gradient that returns the logits'.

    On the CPU: not every device computes in double precision.
    """
    targets, leaf = targets.cpu(), logits.detach().cpu().double().requires_grad_()
    flat = F.cross_entropy(leaf.reshape(-1, leaf.shape[-1]), targets.reshape(-1), **options)
    loss = flat.reshape(targets.shape) if options.get("reduction") == "none" else flat
    return loss.detach(), lambda grad: torch.autograd.grad(loss, leaf, grad.cpu().double())[0]


def check(ctx, logits, targets, layout, given=None, tolerance=None, **options):
    """Compare loss and gradient with torch's; return the loss."""
    x = distribute_tensor(logits, layout).requires_grad_()
    loss = vocab_parallel_cross_entropy(x, targets if given is None else given, **options)
    expected, backward = reference(logits, targets, **options)
    close = tolerance or (
        {"rtol": 1e-12, "atol": 1e-12} if logits.dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-6}
    )
    torch.testing.assert_close(full_tensor(loss.detach()).cpu(), expected.to(loss.dtype), equal_nan=True, **close)
    grad = torch.linspace(1, 2, expected.numel(), device=ctx.device, dtype=loss.dtype).reshape(expected.shape)
    loss.backward(distribute_tensor(grad, Layout.of(loss).reset_partial()))
    assert x.grad.dtype == logits.dtype
    assert x.grad.placements == x.placements or Layout.of(x).is_partial()
    torch.testing.assert_close(full_tensor(x.grad).cpu(), backward(grad).to(logits.dtype), equal_nan=True, **close)
    return loss


def layouts(own):
    return [
        own("None", "tp"),
        own("dp", "tp"),
        own("None", ("dp", "tp")),
        own("None", ("tp", "dp")),
        own(("dp", "tp")),
        own("dp"),
        own(),
        own("dp", partial={"tp": "sum"}),
        own("None", "dp", partial={"tp": "sum"}),
    ]


@pytest.mark.tier("full")
@sim.ranks(4)
def test_every_layout(ctx):
    own = layout_of(ctx)
    for rows, classes in ((8, 16), (5, 7), (3, 2)):
        logits, targets = batch(ctx, rows, classes=classes)
        for layout, reduction in itertools.product(layouts(own), ("mean", "sum", "none")):
            smoothing = 0.1 if rows == 5 else 0.0
            loss = check(ctx, logits, targets, layout, reduction=reduction, label_smoothing=smoothing)
            if reduction == "mean":
                assert Layout.of(loss).repeat_num() == 4
            over_rows = [own.alias_name[axis] for axis in layout.splits(2)[0]]
            if reduction == "sum":
                assert Layout.of(loss).partial == dict.fromkeys(over_rows, "sum")
            if reduction == "none":
                assert torch.Size(Layout.of(loss).local_shape((rows,))) == loss.to_local().shape
                assert not Layout.of(loss).is_partial()


@sim.ranks(2, backends=NO_PROCESSES)
def test_labels_are_smoothed_over_all_classes(ctx):
    logits, targets = batch(ctx, 4, classes=7)
    check(ctx, logits, targets, layout_of(ctx, (2,), ("tp",))("None", "tp"), label_smoothing=0.2)


@pytest.mark.tier("test")
@sim.ranks(4, backends=NO_PROCESSES)
def test_dtypes_and_dims(ctx):
    own = layout_of(ctx)
    for dtype in filter(ctx.reductions.takes, (torch.float64, torch.float32, torch.bfloat16, torch.float16)):
        tolerance = {"rtol": 1e-2, "atol": 1e-3} if dtype in (torch.bfloat16, torch.float16) else None
        for rows, layout in (
            ((), own("tp")),
            ((), own(("dp", "tp"))),
            ((6,), own("dp", "tp")),
            ((3, 4), own("None", "dp", "tp")),
            ((3, 4), own("dp", "tp")),
            ((2, 3, 2), own("tp", "None", "None", "dp")),
        ):
            logits, targets = batch(ctx, *rows, classes=11, dtype=dtype, ignored=0.2 if rows else 0)
            for reduction in ("mean", "none"):
                loss = check(ctx, logits, targets, layout, tolerance=tolerance, reduction=reduction)
                assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.tier("test")
@sim.ranks(4)
def test_targets_however_they_are_given(ctx):
    own = layout_of(ctx)
    logits, targets = batch(ctx, 7, 3, classes=10)
    layout = own("dp", "None", "tp")
    mine = sim.scatter_full(targets, own("dp"), ctx.rank)
    for given in (mine, targets.to(torch.int32), distribute_tensor(targets, own("dp"))):
        check(ctx, logits, targets, layout, given)
    for entries in (("tp",), ("None", "dp"), (("dp", "tp"),), ()):
        check(ctx, logits, targets, layout, distribute_tensor(targets, own(*entries)), reduction="sum")


@pytest.mark.tier("test")
@sim.ranks(4, backends=NO_PROCESSES)
def test_numbers_at_the_edge(ctx):
    own = layout_of(ctx)
    for layout in (own("dp", "tp"), own("None", ("dp", "tp")), own()):
        logits, targets = batch(ctx, 6, classes=8)
        check(ctx, logits * 1e4, targets, layout, reduction="none", tolerance={"rtol": 1e-4, "atol": 1e-2})
        check(ctx, logits - 3e38, targets, layout)
        check(ctx, logits, torch.full_like(targets, -100), layout)  # nothing counts: NaN, as torch has it
        check(ctx, logits, torch.full_like(targets, -100), layout, reduction="sum")
        check(ctx, logits, targets.clamp(0), layout, ignore_index=0)
        half = targets.clone()
        half[:3] = -100  # dp's first rank has no row that counts
        check(ctx, logits, half, layout)
        masked = logits.clone()
        masked[:, :4] = -torch.inf  # a whole part of the vocabulary
        check(ctx, masked, targets.clamp(4), layout)
        check(ctx, logits[:0], targets[:0], layout, reduction="sum")
        wrong = targets.clone()
        wrong[1], wrong[4] = 8, -1
        x = distribute_tensor(logits, layout)
        losses = full_tensor(vocab_parallel_cross_entropy(x, wrong, reduction="none"))
        assert losses.isnan().nonzero().flatten().tolist() == [1, 4]


@sim.ranks(1)
def test_plain_logits(ctx):
    logits, targets = batch(ctx, 5, classes=9)
    own = layout_of(ctx, (1,), ("tp",))
    for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.2)):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        check(ctx, logits, targets, own("None", "tp"), **options)
        leaf = logits.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, targets.int(), **options)
        expected, backward = reference(logits, targets, **options)
        torch.testing.assert_close(loss.detach().cpu(), expected.float())
        loss.backward(torch.ones_like(loss))
        torch.testing.assert_close(leaf.grad.cpu(), backward(torch.ones_like(expected)).float())


def test_numbers_per_row_are_all_that_is_communicated():
    rows, classes = 64, 32

    def step():
        own = Layout.from_device_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        logits = torch.randn(rows, classes, generator=torch.Generator().manual_seed(0))
        x = distribute_tensor(logits, own("dp", "tp"), src_data_rank=None).requires_grad_()
        targets = torch.zeros(rows, dtype=torch.int64)
        dist.barrier()
        vocab_parallel_cross_entropy(x, targets).backward()

    with sim.world(4) as world:
        world.run(step)
        events = world.trace.of_rank(0)
    events = events[[event.op for event in events].index("barrier") + 1 :]
    assert [event.op for event in events] == ["all_reduce"] * 3
    assert sum(event.recv_bytes for event in events) <= 2 * 4 * (3 * rows // 2 + 2)


LOGITS, TARGETS = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)

MISTAKES = {
    "a reduction that does not exist": (
        (LOGITS, TARGETS),
        {"reduction": "average"},
        ValueError,
        "no kind of reduction 'average'",
    ),
    "int logits": ((LOGITS.long(), TARGETS), {}, TypeError, "logits are no floats"),
    "a scalar": ((torch.tensor(1.0), TARGETS), {}, TypeError, "logits have no dim of classes"),
    "probabilities": ((LOGITS, LOGITS), {}, TypeError, "targets are no class indices"),
    "another number of rows": ((LOGITS, TARGETS[:3]), {}, ValueError, r"targets has shape \(3,\), and the logits have"),
    "too much smoothing": (
        (LOGITS, TARGETS),
        {"label_smoothing": 1.5},
        ValueError,
        "label_smoothing is not from 0 to 1",
    ),
    "smoothing switched on": ((LOGITS, TARGETS), {"label_smoothing": True}, TypeError, "label_smoothing is a bool"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    args, options, kind, text = MISTAKES[name]
    with pytest.raises(kind, match=text) as caught:
        vocab_parallel_cross_entropy(*args, **options)
    assert "\n  try: " in str(caught.value)


@sim.ranks(2, backends=("sim",))
def test_mistakes_with_parts(ctx):
    own = layout_of(ctx, (2,), ("dp",))
    x = distribute_tensor(LOGITS, own("dp"))
    with pytest.raises(ValueError, match=r"\(2,\) of them on this rank"):
        vocab_parallel_cross_entropy(x, TARGETS[:3])
    with pytest.raises(ValueError, match=r"targets has shape \(3,\)"):
        vocab_parallel_cross_entropy(x, distribute_tensor(TARGETS[:3], own()))
    with pytest.raises(TypeError, match="targets is a DTensor, and logits are a plain tensor"):
        vocab_parallel_cross_entropy(LOGITS, distribute_tensor(TARGETS, own()))
