"""Perturbed runs cover real roundings, without being silly, and leave alone what does not round."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sim.prove.bound import SAFETY, AtenCall, DoubleGroupedProducts, Perturbed, Rounding, deviation, rounding_of

pytestmark = pytest.mark.sim

FLOAT32 = 2.0**-24


def gradients(module, output):
    output.backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.fused = fused

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if self.fused:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(later, float("-inf"))
            seen = scores.softmax(-1) @ v
        return x + self.out(seen.transpose(1, 2).flatten(2))


def module_run(make, shape):
    def at(dtype):
        torch.manual_seed(0)
        module = make().double().to(dtype)
        x = torch.randn(shape, dtype=torch.float64).to(dtype)

        def run():
            module.zero_grad()
            y = module(x)
            return {"y": y, **gradients(module, y.square().mean())}

        return run

    return at


def cross_entropy(dtype):
    torch.manual_seed(1)
    logits = torch.randn(64, 40, dtype=torch.float64).mul(3).to(dtype).requires_grad_()
    targets = torch.randint(40, (64,))

    def run():
        logits.grad = None
        loss = F.cross_entropy(logits, targets)
        loss.backward()
        return {"loss": loss, "grad": logits.grad, "softmax": logits.softmax(-1)}

    return run


def long_sums(dtype):
    torch.manual_seed(2)
    x = torch.rand(2_000, dtype=torch.float64).to(dtype)
    signed = x - 0.5
    return lambda: {
        "sum": x.sum(),
        "mean": x.mean(),
        "running": signed.cumsum(0),
        "norm": signed.norm(),
        "var": x.var(),
    }


def scattered(dtype):
    torch.manual_seed(3)
    table = nn.Embedding(7, 16).double().to(dtype)
    where = torch.randint(7, (300,))

    def run():
        table.zero_grad()
        rows = table(where)
        added = torch.zeros(7, 16, dtype=dtype).index_add_(0, where, rows.detach().sin())
        return {"added": added, **gradients(table, rows.sin().sum())}

    return run


def adamw(**options):
    def at(dtype):
        def run():
            torch.manual_seed(4)
            layer = nn.Linear(16, 16).double().to(dtype)
            x = torch.randn(8, 16, dtype=torch.float64).to(dtype)
            optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, **options)
            for _ in range(3):
                optimizer.zero_grad()
                layer(x).square().sum().backward()
                optimizer.step()
            return dict(layer.named_parameters())

        return run

    return at


RUNS = {
    "mlp": module_run(lambda: nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 8)), (16, 48)),
    "layernorm": module_run(lambda: nn.LayerNorm(256), (8, 256)),
    "attention": module_run(lambda: Attention(False), (2, 16, 32)),
    "fused attention": module_run(lambda: Attention(True), (2, 16, 32)),
    "convolution": module_run(lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
    "cross entropy": cross_entropy,
    "long sums": long_sums,
    "scattered": scattered,
    "adamw": adamw(foreach=False),
    "foreach adamw": adamw(foreach=True),
    "fused adamw": adamw(fused=True),
}


@pytest.mark.parametrize("name", RUNS)
def test_real_roundings_are_covered_and_not_by_far_too_much(name):
    base, moved = deviation(RUNS[name](torch.float64), u_floor=FLOAT32)
    rounded = {key: value.detach().clone() for key, value in RUNS[name](torch.float32)().items()}
    assert rounded.keys() == base.keys()
    for key, value in rounded.items():
        error = (value.double() - base[key]).abs().max().item()
        assert error <= SAFETY * moved[key], key
        size = base[key].abs().max().item()
        assert SAFETY * moved[key] <= 1e4 * max(error, 16 * FLOAT32 * size), key


@pytest.mark.parametrize("name", ["mlp", "attention", "cross entropy", "foreach adamw"])
def test_another_order_of_summation_in_the_same_dtype_is_covered(name):
    base, moved = deviation(RUNS[name](torch.float32))
    exact = RUNS[name](torch.float64)()
    for key, value in exact.items():
        assert (value.detach() - base[key].double()).abs().max() <= SAFETY * moved[key], key


def test_sums_of_20_000_terms_one_after_the_other_are_covered_closely():
    torch.manual_seed(0)
    x = torch.rand(20_000)
    _, moved = deviation(lambda: {"sum": x.sum()})
    in_turn = np.cumsum(x.numpy(), dtype=np.float32)[-1].item()  # numpy adds one by one here
    error = abs(in_turn - x.double().sum().item())
    assert error <= SAFETY * moved["sum"] <= 1e3 * error


def test_a_product_split_over_the_summed_dim_is_covered_and_a_lost_part_is_not():
    torch.manual_seed(0)
    a, b = torch.randn(32, 512, dtype=torch.float64), torch.randn(512, 32, dtype=torch.float64)
    base, moved = deviation(lambda: {"ab": a @ b})
    parts = [left @ right for left, right in zip(a.chunk(8, 1), b.chunk(8), strict=True)]
    off = (sum(parts) - base["ab"]).abs().max().item()
    assert 0 < off <= SAFETY * moved["ab"]
    assert (sum(parts[1:]) - base["ab"]).abs().max() > 1e9 * SAFETY * moved["ab"]


def test_16_bit_results_are_covered():
    torch.manual_seed(0)
    a, b = torch.randn(16, 256).bfloat16(), torch.randn(256, 16).bfloat16()
    base, moved = deviation(lambda: {"ab": a @ b})
    halves = a[:, :128] @ b[:128] + a[:, 128:] @ b[128:]
    off = (halves.double() - base["ab"].double()).abs().max().item()
    assert 0 < off <= SAFETY * moved["ab"] < 0.5 * base["ab"].abs().max()


def test_an_inner_float32_op_keeps_its_own_roundoff():
    x = torch.linspace(1, 2, 64, dtype=torch.float64)
    _, moved = deviation(lambda: {"low": (x.float() * 3).double(), "high": x * 3})
    assert 2**-26 < moved["low"] / 6 < 2**-21
    assert 2**-55 < moved["high"] / 6 < 2**-50


def test_results_move_by_the_unit_that_is_asked_for():
    x = torch.linspace(1, 2, 64, dtype=torch.float64)
    _, moved = deviation(lambda: {"x": x * 3}, u_floor=FLOAT32)
    assert 2**-26 < moved["x"] / 6 < 2**-21


def test_a_softmax_is_as_right_as_the_sum_that_divides_it():
    x, softmax = torch.ones(3, 50), torch.ops.aten._softmax.default
    found = [rounding_of(softmax, AtenCall("_softmax", {"self": x, "dim": dim})) for dim in (0, 1)]
    assert found == [Rounding(2, 3), Rounding(2, 50)]


def test_exact_ops_are_left_alone():
    x = torch.randn(6, 8)
    mask = torch.rand(6, 8) > 0.5

    def run():
        parts = torch.cat([x[:3], x[3:].flip(0)]).t().reshape(6, 8)
        chosen = torch.where(mask, parts, -parts).relu().masked_fill(mask, float("-inf"))
        best, where = x.topk(2, -1)
        return {
            "chosen": chosen,
            "best": best,
            "where": where,
            "row": x.amax(0),
            "taken": x[torch.tensor([1, 1])].clone().double(),
            "written": torch.zeros(6, 8).copy_(x).index_put((torch.tensor([0]),), x[1]),
            "whole": torch.arange(9).cumsum(0),
        }

    assert set(deviation(run)[1].values()) == {0.0}


def test_whole_numbers_in_floats_stay_whole():
    ids, shared = torch.tensor([2.0, 0.0, 1.0, 1.0, 2.0, 2.0]), torch.randn(6)
    one_hot = F.one_hot(ids.long(), 3).float()

    def run():
        counts = torch.histc(ids, bins=3, min=0, max=2)
        places = one_hot.cumsum(0) * one_hot - 1
        return {
            "counts": counts,
            "places": places,
            "product": one_hot.t() @ one_hot,
            "fitting": (places < 2).float().sum(0),
            "share": counts / counts.sum(),
            "load": one_hot.t() @ shared,
        }

    moved = deviation(run)[1]
    assert {name for name, move in moved.items() if move} == {"share", "load"}


def test_whole_numbers_too_large_for_their_dtype_are_perturbed():
    ones = torch.ones(300, dtype=torch.bfloat16)
    assert deviation(lambda: {"sum": (ones.cumsum(0))})[1]["sum"] > 0


@pytest.mark.parametrize("shapes", [((5, 8), (2, 8, 8)), ((2, 8, 8), (8, 5)), ((8, 5), (5, 8)), ((2, 3, 8), (2, 8, 8))])
def test_grouped_products_in_float64_are_those_of_float32(shapes):
    left, right = (torch.randn(shape) for shape in shapes)
    groups = len(shapes[0]) == len(shapes[1]) == 3
    ends = None if groups else torch.tensor([2, 5], dtype=torch.int32)
    with DoubleGroupedProducts():
        found = torch._grouped_mm(left.double(), right.double(), offs=ends)
    parts = [slice(0, 2), slice(2, 5)]
    if groups:
        want = left @ right
    elif left.ndim == right.ndim:
        want = torch.stack([left[:, part] @ right[part] for part in parts])
    elif left.ndim == 2:
        want = torch.cat([left[part] @ right[at] for at, part in enumerate(parts)])
    else:
        want = torch.cat([left[at] @ right[:, part] for at, part in enumerate(parts)], 1)
    torch.testing.assert_close(found.float(), want)


def test_random_numbers_are_the_same_in_every_run_and_the_generator_goes_on_as_after_one():
    def run():
        return {"noise": torch.rand(5), "normal": torch.empty(5).normal_(), "dropped": F.dropout(torch.ones(50)) != 0}

    torch.manual_seed(7)
    run()
    after = torch.rand(3)
    torch.manual_seed(7)
    _, moved = deviation(run)
    assert set(moved.values()) == {0.0}
    assert torch.equal(torch.rand(3), after)


def test_infinities_and_the_largest_numbers_of_a_mask_survive():
    lowest = torch.finfo(torch.float32).min
    scores = torch.tensor([[0.5, lowest, -float("inf"), 1.0]] * 64)
    with Perturbed(seed=0):
        shifted = scores + 1
        weights = shifted.softmax(-1)
    assert bool((shifted[:, 1] == lowest).logical_or(shifted[:, 1].isfinite()).all())
    assert bool(weights.isfinite().all())
    assert bool((weights[:, 1:3] == 0).all())


def test_arguments_are_not_changed_but_what_an_op_writes_is():
    torch.manual_seed(0)
    a, b, out = torch.randn(8, 8), torch.randn(8, 8), torch.empty(8, 8)
    before = a.clone(), b.clone()
    with Perturbed(seed=0):
        torch.mm(a, b, out=out)
        total = a.clone()
        total.add_(b)
        listed = [a.clone()]
        torch._foreach_add_(listed, [b])
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
    for changed, right in ((out, a @ b), (total, a + b), (listed[0], a + b)):
        assert 0 < (changed - right).abs().max() < 1e-4


def test_quotients_of_whole_numbers_in_lists_are_perturbed():
    counts = [torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)]
    with Perturbed(FLOAT32):
        (thirds,), (double,) = torch._foreach_div(counts, 3.0), torch._foreach_mul(counts, 2.0)
    assert not torch.equal(thirds, counts[0] / 3)
    assert torch.equal(double, counts[0] * 2)


def test_step_counters_stay_whole():
    steps = [torch.tensor(0.0), torch.tensor(4.0)]
    with Perturbed(u_floor=1e-3, seed=0):
        torch._foreach_add_(steps, 1)
        lone = torch.tensor(2.0) * 3
    assert [step.item() for step in steps] == [1.0, 5.0]
    assert lone.item() == 6.0


def test_the_seed_fixes_the_changes():
    x = torch.randn(100)

    def moved(seed):
        with Perturbed(seed=seed):
            return (x.exp() * x).sum().item(), x.softmax(0)[:5].tolist()

    assert moved(1) == moved(1) != moved(2)


def test_a_result_moves_by_its_own_size():
    results = {"small": 1.5, "large": 1000.25, "zero": 0.0}
    base, moved = deviation(lambda: {name: torch.tensor([x]) * 3 for name, x in results.items()})
    assert [each.item() for each in base.values()] == [4.5, 3000.75, 0.0]
    assert 0 < moved["small"] < 1e-5
    assert moved["small"] < moved["large"]
    assert moved["zero"] == 0


def test_complex_numbers_move_too():
    z = torch.view_as_complex(torch.randn(10, 2))
    moved = deviation(lambda: {"z": z * z, "sum": z.sum()})[1]
    assert all(0 < move < 1e-4 for move in moved.values())


def test_other_tensor_types_pass_untouched():
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    import sim

    def body():
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Replicate()])
        with Perturbed(seed=0):
            return (x * 3).to_local().tolist()

    assert sim.run(body, world_size=2) == [[3.0] * 4] * 2


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"(?s)cannot perturb a run: u_floor is not in \[0, 1\).*u_floor: 2.*try: u_f"):
        Perturbed(u_floor=2)
    with pytest.raises(ValueError, match=r"(?s)cannot measure a deviation: runs is below 1.*runs: 0.*try: runs=3"):
        deviation(dict, runs=0)
    calls = []

    def run():
        calls.append(1)
        return {f"y{len(calls)}": torch.ones(2)}

    with pytest.raises(
        ValueError, match=r"(?s)the runs return different 'y1'.*first run: \(2,\)   perturbed run: noth"
    ):
        deviation(run)
