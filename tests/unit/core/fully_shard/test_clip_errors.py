"""Clipping on one rank: what is refused, in which words and before any byte is sent, and what torch would do."""

import itertools
import math

import numpy as np
import pytest
import torch
from errors_kit import fails_on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import sim
from hyper_parallel.core.fully_shard.clip import clip_grad_norm_, get_total_norm

pytestmark = pytest.mark.sim


def mesh(*shape):
    return init_device_mesh("cpu", shape or (2,), mesh_dim_names=("dp", "tp")[: len(shape) or 1])


def plain(*values, dtype=torch.float32):
    param = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    param.grad = torch.tensor(values, dtype=dtype)
    return param


def split(*, on=None, grad=None):
    """A parameter of four elements, two to a rank."""
    param = nn.Parameter(distribute_tensor(torch.zeros(4), on or mesh(), [Shard(0)], src_data_rank=None))
    if grad is not None:
        param.main_grad = grad
    return param


def sparse():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    return table


def half_on_meta():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def other_mesh():
    return split(grad=distribute_tensor(torch.zeros(4), mesh(2, 1), [Shard(0), Replicate()], src_data_rank=None))


def pending_product():
    return split(grad=DTensor.from_local(torch.ones(4), mesh(), [Partial("product")]))


def whole_main_grad():
    return split(grad=torch.zeros(4))


def stray_dtensor():
    param = plain(1.0)
    param.grad = None
    param.main_grad = distribute_tensor(torch.zeros(1), mesh(), [Replicate()], src_data_rank=None)
    return param


CALLS = {
    "max_norm negative": (lambda x: clip_grad_norm_(x, -1), ValueError, r"max_norm must be 0 or more, not -1.0"),
    "max_norm nan": (lambda x: clip_grad_norm_(x, math.nan), ValueError, r"max_norm must be 0 or more, not nan"),
    "p 0": (lambda x: clip_grad_norm_(x, 1.0, 0), ValueError, r"norm_type must be above 0, not 0.0\n  norm_type: 0\n"),
    "p negative": (lambda x: get_total_norm(x, -2), ValueError, r"norm_type must be above 0, not -2.0"),
    "p -inf": (lambda x: get_total_norm(x, -math.inf), ValueError, r"norm_type must be above 0, not -inf"),
    "p nan": (lambda x: get_total_norm(x, math.nan), ValueError, r"norm_type must be above 0, not nan"),
    "stage mesh": (lambda x: get_total_norm(x, stage_group=mesh()), TypeError, r"stage_group is a DeviceMesh, not a p"),
    "dict": (lambda x: get_total_norm({"w": x}), TypeError, r"parameters\[0\] is a str, not a tensor"),
    "item": (lambda x: get_total_norm([x, ("w", x)]), TypeError, r"parameters\[1\] is a tuple, not a tensor"),
    "sparse": (lambda x: get_total_norm(sparse()), ValueError, r"gradient of parameter 'weight' is sparse\n.*\(4, 2\)"),
    "meta": (
        lambda x: get_total_norm(half_on_meta()),
        ValueError,
        r"parameter '1.weight' is on meta, .*'0.weight' is not",
    ),
    "mesh": (lambda x: get_total_norm([x, other_mesh()]), ValueError, r"of parameter number 1 lies on another mesh"),
    "product": (lambda x: get_total_norm(pending_product()), ValueError, r"of the parameter is a pending product, of"),
    "whole": (
        lambda x: get_total_norm(whole_main_grad()),
        ValueError,
        r"neither a DTensor nor of the shape of .* own shard",
    ),
    "stray": (lambda x: get_total_norm(stray_dtensor()), ValueError, r"is a DTensor and the parameter is none"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_mistake_is_named_before_any_byte(case):
    call, kind, match = CALLS[case]
    text = fails_on_ranks(lambda: call(split()), kind, match)
    assert text.startswith(("cannot clip gradients: ", "cannot take the norm of gradients: "))
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite(bad):
    param = plain(1.0, bad)
    with pytest.raises(
        RuntimeError, match=rf"the norm of order 2.0 is {bad}, and error_if_nonfinite is set\n"
    ) as caught:
        clip_grad_norm_(param, 1.0, error_if_nonfinite=True)
    assert "\n  try: a smaller learning rate" in str(caught.value)
    assert param.grad[0] == 1.0, "left as it was"
    with pytest.raises(RuntimeError, match="cannot take the norm of gradients"):
        get_total_norm(param, error_if_nonfinite=True)
    assert not get_total_norm(param).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_without_a_mesh_it_is_torchs_own(dtype):
    for p, foreach in itertools.product(
        (0.5, 1, 2.0, 3, math.inf, "inf", np.float32(2), torch.tensor(2)), (None, True, False)
    ):
        generator = torch.Generator().manual_seed(0)
        pair = []
        wholes = [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((3, 4), (), (5,))]
        for _ in range(2):
            params = [nn.Parameter(torch.zeros_like(full)) for full in wholes]
            for param, full in zip(params, wholes, strict=True):
                param.grad = full.clone()
            pair.append([*params, nn.Parameter(torch.zeros(2))])
        norm = clip_grad_norm_(iter(pair[0]), torch.tensor(0.5), p, foreach=foreach)
        expected = nn.utils.clip_grad_norm_(pair[1], 0.5, float(p), foreach=foreach)
        torch.testing.assert_close(norm, expected)
        for our, their in zip(pair[0][:3], pair[1], strict=False):
            torch.testing.assert_close(our.grad, their.grad)
        assert pair[0][3].grad is None


def test_a_norm_beyond_the_gradients_dtype():
    """Of float16 torch's is inf, as it adds up in the gradients' own dtype."""
    for dtype, value in ((torch.float16, 6e4), (torch.bfloat16, 1e17)):
        param = plain(*[value] * 400, dtype=dtype)
        expected = 20 * param.grad[0].item()
        norm = clip_grad_norm_(param, 1.0)
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(param.grad, torch.full((400,), 0.05, dtype=dtype))
    assert nn.utils.get_total_norm([plain(*[6e4] * 400, dtype=torch.float16).grad]) == math.inf


def test_the_result_is_float64_if_any_parameter_is():
    tiny = 1.0 + 2.0**-40
    norm = get_total_norm(
        [plain(0.0), nn.Parameter(torch.zeros(2, dtype=torch.float64)), plain(tiny, dtype=torch.float64)]
    )
    assert norm.dtype == torch.float64
    assert norm.item() == tiny
    assert get_total_norm([plain(1.0), plain(1.0, dtype=torch.bfloat16)]).dtype == torch.float32


def test_no_gradients_and_no_elements():
    empty = nn.Parameter(torch.zeros(0, 3))
    empty.grad = torch.zeros(0, 3)
    for p in (1, 2, math.inf):
        for params in ([], [nn.Parameter(torch.ones(2))], [empty], nn.Linear(2, 2), nn.Module(), iter(())):
            norm = clip_grad_norm_(params, 1.0, p)
            assert torch.equal(norm, torch.tensor(0.0))
        assert get_total_norm([empty, plain(-2.0)], p) == 2.0


def test_main_grad_stands_in_for_a_missing_grad():
    both, main, none = plain(3.0), plain(0.0, dtype=torch.bfloat16), plain(0.0)
    both.main_grad = torch.tensor([100.0])
    main.grad, main.main_grad = None, torch.tensor([4.0])
    none.grad, none.main_grad = None, None
    assert clip_grad_norm_([both, main, none], 1.0) == 5.0
    torch.testing.assert_close((both.grad, main.main_grad), (torch.tensor([0.6]), torch.tensor([0.8])))
    assert both.main_grad == 100.0


def test_main_grad_of_a_split_parameter_is_the_ranks_part_or_a_dtensor():
    def body(rank):
        own = split(grad=torch.full((2,), float(rank + 1)))
        pending = split(grad=DTensor.from_local(torch.ones(4), mesh(), [Partial()]))
        norms = get_total_norm(own), get_total_norm(pending), clip_grad_norm_([own, pending], 1.0)
        return [norm.item() for norm in norms], own.main_grad[0].item(), pending.main_grad.to_local().tolist()

    for rank, (norms, own, pending) in enumerate(sim.run(lambda: body(torch.distributed.get_rank()), 2)):
        assert norms == pytest.approx([math.sqrt(10), 4.0, math.sqrt(26)])
        assert own == pytest.approx((rank + 1) / math.sqrt(26))
        assert pending == pytest.approx([1 / math.sqrt(26)] * 4)


def test_a_parameter_that_comes_twice_counts_once():
    param = plain(3.0, 4.0)
    assert clip_grad_norm_([param, param], 1.0) == 5.0
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))


def test_the_factor_is_torchs():
    for max_norm in (0.0, 1e-7, 4.9, 5.0, 5.1, 1e30):
        ours, theirs = plain(3.0, 4.0), plain(3.0, 4.0)
        clip_grad_norm_(ours, max_norm)
        nn.utils.clip_grad_norm_(theirs, max_norm)
        assert torch.equal(ours.grad, theirs.grad), max_norm


def test_without_a_limit_gradients_are_left_alone():
    for value in (1.0, math.inf, math.nan):
        param = plain(value, 2.0)
        before = param.grad._version
        clip_grad_norm_(param, math.inf)
        assert param.grad._version == before


def test_meta_has_no_values():
    layer = nn.Linear(2, 2, device="meta")
    layer.weight.grad = torch.ones_like(layer.weight)
    for p in (2.0, math.inf):
        norm = clip_grad_norm_(layer, 1.0, p, error_if_nonfinite=True)
        assert (norm.device.type, norm.shape) == ("meta", ())


def test_gradients_are_not_recorded():
    weight = nn.Parameter(torch.ones(2))
    (grad,) = torch.autograd.grad(weight.square().sum(), weight, create_graph=True)
    weight.grad = grad.clone()
    assert not get_total_norm(weight).requires_grad
    assert not clip_grad_norm_(weight, 1.0).requires_grad
