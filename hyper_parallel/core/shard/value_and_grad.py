"""Values and gradients of a function of sharded tensors, equal to a single device's: `parallelize_value_and_grad`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidType
from hyper_parallel.core.dtensor.convert import contiguous_stride
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.redistribute.api import redistribute
from hyper_parallel.core.redistribute.gradients import PendingRedistribute
from hyper_parallel.core.shard.boundaries import remade

_ASKED = "cannot differentiate"


def parallelize_value_and_grad(
    fn: Callable[..., Any], weights: torch.Tensor | Sequence[torch.Tensor], sens: Sequence[float] | None = None
) -> Callable[..., tuple[Any, Any]]:
    """Make a function with the arguments of `fn` that returns its value and its gradients for the weights.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> step = parallelize_value_and_grad(lambda x: (w * x).sum(), w)
    >>> step(torch.tensor([3.0, 4.0]))
    (tensor(11.), tensor([3., 4.]))
    >>> both = parallelize_value_and_grad(lambda x: [(w * x).sum(), w.prod()], [w], sens=[0.5, 10.0])
    >>> both(torch.tensor([3.0, 4.0]))
    ([tensor(11.), tensor(2.)], [tensor([21.5000, 12.0000])])

    Gradients equal those of a single device in any layout of the outputs. A replicated or pending DTensor counts once.
    A plain tensor counts as one value, computed by every rank.

    `fn` runs once per call, with gradients enabled; `.grad` of the weights is neither read nor changed. The value is
    detached, because the tensors saved for backward are freed before the call returns.

    Communication: the backward pass. Then all gradients that are pending, or in another layout than their
    weights, are redistributed at the same time.

    Args:
        fn: returns a tensor, or a list or tuple of tensors.
        weights: one tensor, or a list or tuple of tensors, that require gradients.
        sens: one float per output of `fn`, which scales its share of the gradients. None: only the first output is
            differentiated.

    Returns:
        A function that returns `(value, grads)`. The value has the type that `fn` returns. The gradients are a tensor,
        a list or a tuple, as the weights are. Each has the layout of its weight and separate memory. None for a weight
        that the outputs do not depend on.

    Raises:
        TypeError: fn is not callable; weights that are no tensors, require no gradient, or are empty; sens that is no
            list or tuple of floats. When called: outputs that are no tensors, that are nested, or that have no gradient
            because they are ints or complex; sens for one output, or for another number of outputs.
    """
    chosen = _check_weights(fn, weights)
    scales = _check_sens(sens)
    one = isinstance(weights, torch.Tensor)

    @functools.wraps(fn, updated=())  # do not copy a module's attributes
    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with torch.inference_mode(False), torch.enable_grad():
            value = fn(*args, **kwargs)
            outputs = _differentiated(value, scales)
            grads = _gradients(outputs, chosen)
            return _map(torch.Tensor.detach, value), grads[0] if one else remade(weights, grads)

    return value_and_grad


# -- gradients -------------------------------------------------------------------------------------------------------


def _gradients(
    outputs: Sequence[tuple[torch.Tensor, float]], weights: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    wanted = [(output, scale) for output, scale in outputs if output.requires_grad]
    if not wanted:
        return [None] * len(weights)
    roots, seeds = [output for output, _ in wanted], [_seed(output, scale) for output, scale in wanted]
    found = torch.autograd.grad(roots, tuple(weights), seeds, allow_unused=True)
    with torch.no_grad():
        under_way = [_start(grad, weight) for grad, weight in zip(found, weights, strict=True)]
        grads = [each.wait() if isinstance(each, PendingRedistribute) else each for each in under_way]
        return _apart(grads)


def _seed(output: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the gradient of scale * sum(output) for an output.

    A DTensor's gradient is the gradient of the full tensor. For a pending output it is the full gradient on every
    rank, so that the reduction itself is not necessary.
    """
    if not isinstance(output, DTensor):
        return torch.full_like(output, scale)
    ones = torch.full(output._local_tensor.shape, scale, dtype=output.dtype, device=output._local_tensor.device)
    placements = [Replicate() if placement.is_partial() else placement for placement in output.placements]
    strides = contiguous_stride(output.shape)
    return DTensor.from_local(ones, output.device_mesh, placements, run_check=False, shape=output.shape, stride=strides)


def _start(grad: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | PendingRedistribute | None:
    """Start to redistribute a gradient to its weight's layout."""
    if not isinstance(grad, DTensor) or not isinstance(weight, DTensor):
        return grad
    placements = [Replicate() if placement.is_partial() else placement for placement in weight.placements]
    if grad.device_mesh == weight.device_mesh and list(grad.placements) == placements:
        return grad
    return redistribute(grad, weight.device_mesh, placements, async_op=True)


def _apart(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return gradients that can be changed in place. autograd gives one tensor to two weights that are added, and an
    expanded number to a weight that is summed."""
    seen: set[int] = set()
    result: list[torch.Tensor | None] = []
    for grad in grads:
        if grad is not None:
            local = grad._local_tensor if isinstance(grad, DTensor) else grad
            repeated = any(step == 0 and size > 1 for size, step in zip(local.shape, local.stride(), strict=True))
            memory = local.untyped_storage()._cdata
            if repeated or memory in seen:
                grad = grad.clone(memory_format=torch.contiguous_format)
            seen.add(memory)
        result.append(grad)
    return result


# -- containers ------------------------------------------------------------------------------------------------------


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply a function to a tensor, or to each tensor of a list or tuple."""
    return function(value) if isinstance(value, torch.Tensor) else remade(value, [function(each) for each in value])


# -- errors ----------------------------------------------------------------------------------------------------------


def _check_weights(fn: object, weights: Any) -> list[torch.Tensor]:
    check(_ASKED, "callable", "a function that returns the loss", fn=fn)
    check(_ASKED, "tensor | list", "list(model.parameters())", weights=weights)  # refuses iterators and sets
    chosen = [weights] if isinstance(weights, torch.Tensor) else list(weights)
    if not chosen:
        blame = "weights is empty, so there is nothing to differentiate for"
        raise InvalidType(_ASKED, blame, f"weights: {weights!r}", "list(model.parameters())")
    for place, weight in enumerate(chosen):
        name = "weights" if isinstance(weights, torch.Tensor) else f"weights[{place}]"
        if not weight.requires_grad:
            blame, seen = f"{name} wants no gradient", f"{name}: shape {tuple(weight.shape)}, {weight.dtype}"
            hint = "weight.requires_grad_(), or [w for w in model.parameters() if w.requires_grad]"
            raise InvalidType(_ASKED, blame, seen, hint)
    return chosen


def _check_sens(sens: Any) -> tuple[float, ...] | None:
    if sens is None:
        return None
    for place, scale in enumerate(sens):
        check(_ASKED, float, **{f"sens[{place}]": scale})
    return tuple(sens)


def _differentiated(value: object, scales: tuple[float, ...] | None) -> list[tuple[torch.Tensor, float]]:
    """Return the outputs to differentiate, each with its scale."""
    several = not isinstance(value, torch.Tensor)
    outputs = _read_outputs(value)
    if scales is not None and not several:
        blame, hint = "fn returned one tensor, and sens is for several", "sens=None, and scale the output in fn"
        raise InvalidType(_ASKED, blame, f"sens: {list(scales)!r}   returned: {_shown(value)}", hint)
    if scales is not None and len(scales) != len(outputs):
        blame = f"fn returned {len(outputs)} tensors, and sens has {len(scales)} numbers"
        hint = "one number per output, 0.0 for one that does not count"
        raise InvalidType(_ASKED, blame, f"sens: {list(scales)!r}", hint)
    chosen = [(outputs[0], 1.0)] if scales is None else list(zip(outputs, scales, strict=True))
    for place, (output, _) in enumerate(chosen):
        if not output.is_floating_point():
            name = f"output {place}" if several else "the output"
            blame = f"{name} is of dtype {output.dtype}, which has no gradient of its own"
            hint = "output.real or output.abs()" if output.is_complex() else "output.float(), or float outputs first"
            raise InvalidType(_ASKED, blame, f"returned: {_shown(output)}", hint)
    return chosen


def _read_outputs(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (list, tuple)):
        blame = f"fn returned a {type(value).__name__}, not a tensor or a list or tuple of them"
        hint = "return the loss, or (loss, other, ...); 'return' may be missing" if value is None else "return loss"
        raise InvalidType(_ASKED, blame, f"returned: {_shown(value)}", hint)
    if not value:
        blame = f"fn returned an empty {type(value).__name__}"
        raise InvalidType(_ASKED, blame, f"returned: {value!r}", "a tensor to differentiate")
    for place, entry in enumerate(value):
        if not isinstance(entry, torch.Tensor):
            what = "nested outputs are" if isinstance(entry, (list, tuple, dict)) else f"a {type(entry).__name__} is"
            blame = f"output {place} is a {type(entry).__name__}, and {what} not differentiated"
            raise InvalidType(_ASKED, blame, f"returned: {_shown(value)}", "a flat list or tuple of tensors")
    return cast("list[torch.Tensor]", list(value))


def _shown(value: object) -> str:
    """Describe the type and shape of a value, without its numbers.

    >>> _shown((torch.zeros(2), [None, {"a": 1}]))
    '(Tensor(2), [NoneType, dict])'
    """
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__}({', '.join(map(str, value.shape))})"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_shown, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return type(value).__name__
