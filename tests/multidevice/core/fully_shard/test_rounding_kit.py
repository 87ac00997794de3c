"""The rounding bounds of the kits: another order of the sums is within them, and little more than that."""

import pytest
import torch
from rounding_kit import bound_of, measured, shorter, tolerances

pytestmark = pytest.mark.sim


def trained(dtype: torch.dtype, columns: torch.Tensor | None = None, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradients of two layers; with another order of the columns, the same sums in another order."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    x, up, down = draw(8, 64), draw(64, 16), draw(16, 4)
    if columns is not None:
        x, up = x[:, columns], up[columns]
    up, down = up.requires_grad_(), down.requires_grad_()
    (torch.tanh(x @ up / 8) @ down).square().mean().mul(scale).backward()
    back = slice(None) if columns is None else columns.argsort()
    return {"up": up.grad[back], "down": down.grad}


def alone() -> dict[str, torch.Tensor]:
    return trained(torch.float32)


def distances(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[tuple[float, float]]:
    """By gradient: how far it is, and how far it may be."""
    return [((found[n] - wanted[n]).abs().max().item(), bound_of(wanted[n], wanted, alone)) for n in wanted]


def test_another_order_is_within_the_bound_and_a_fault_of_a_thousandth_is_not():
    wanted = trained(torch.float32)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    moved = distances(trained(torch.float32, order), wanted)
    assert all(0 < distance <= bound for distance, bound in moved), moved
    faulty = distances(trained(torch.float32, scale=1.001), wanted)
    assert all(distance > bound for distance, bound in faulty), faulty


def test_in_float64_the_bound_is_that_of_the_summands():
    wanted = trained(torch.float64)
    for gradient in wanted.values():
        eps, size = torch.finfo(torch.float64).eps, max(1.0, gradient.abs().max().item())
        assert bound_of(gradient, wanted, alone, summands=1024) == eps * 1024 * size
        coarse = bound_of(gradient.float(), wanted, None, eps=torch.finfo(torch.float32).eps, summands=16)
        assert coarse == torch.finfo(torch.float32).eps * 16 * size
    assert tolerances(wanted.values(), alone, rtol=1e-9, atol=1e-12) == {"rtol": 1e-9, "atol": 1e-12}


def test_tolerances_of_float32_are_those_that_were_measured():
    wanted = trained(torch.float32)
    sizes = {name: gradient.abs().max().item() for name, gradient in wanted.items()}
    assert tolerances(wanted.values(), alone, rtol=1e-9, atol=1e-12) == {
        "rtol": 0.0,
        "atol": measured(alone) * max(sizes.values()),
    }
    assert 0 < measured(alone, "up") <= measured(alone) < 1e-3
    assert measured(alone, "u") == measured(alone, "up"), "by how the names begin"


def test_the_next_shorter_dtype():
    assert [shorter(dtype) for dtype in (torch.float64, torch.float32)] == [torch.float32, torch.float16]
