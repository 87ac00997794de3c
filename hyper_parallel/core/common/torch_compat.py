"""Compatibility with torch's wrappers, norms and optimizers: eager code, ranges in profiles, marks on parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import profiler
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyper_parallel.core.common.errors import InvalidValue

ADDS_UP = "_hyper_parallel_adds_up"
"""What an attribute of a parameter is called that says: whoever takes its gradients adds up sums that are pending."""

P = ParamSpec("P")
R = TypeVar("R")


def runs_eagerly(verb: Callable[P, R]) -> Callable[P, R]:
    """Return the verb as it is for those who call it, and as a break between two graphs for those who compile."""
    return _called_between_graphs(verb, recursive=True)


def calls_compiled(function: Callable[P, R], reason: str | None = None) -> Callable[P, R]:
    """Return the function as `runs_eagerly` does, but that what it calls is compiled.

    Args:
        function: what is not compiled itself.
        reason: why, in the error of who asks for a single graph.
    """
    called = _called_between_graphs(function, recursive=False)
    if reason is not None:  # as `torch.compiler.disable` leaves it; to import that takes half a second
        vars(called).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return called


def _called_between_graphs(verb: Callable[P, R], *, recursive: bool) -> Callable[P, R]:
    between = cast(Callable[P, R], torch._disable_dynamo(verb, recursive))

    @wraps(verb)
    def called(*args: P.args, **options: P.kwargs) -> R:
        return between(*args, **options) if torch.compiler.is_compiling() else verb(*args, **options)

    # Of its own: torch's compiler limits how often it compiles one code, for all verbs and their arguments together.
    own = cast(FunctionType, called)
    own.__code__ = own.__code__.replace(co_name=verb.__name__)
    return called


def record_function(name: str, fqn: str = "") -> AbstractContextManager[object]:
    """Return a context that profiles show under `name (fqn)`, as `torch.profiler.record_function` does.

    Torch's own costs as much as a small kernel even while nothing is recorded, so it is used only while torch's
    profiler records. Otherwise the range is of the lighter kind that compiled kernels have, because torch_npu's
    profiler reads the same callbacks but does not set torch's flag (torch_npu 2.14.0). Compiled code has no ranges.

    Args:
        name: What happens, e.g. "FSDP::pre_forward".
        fqn: The path of the module that it happens to; "" for the root.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    name = f"{name} ({fqn})" if fqn else name
    return profiler.record_function(name) if profiler._is_profiler_enabled else _RecordFunctionFast(name)


def has_saved_tensors_hooks() -> bool:
    """Return whether someone decides what autograd keeps: a checkpoint around what runs, or offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast on a kind of device; None: it is off, or there is none."""
    is_on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def computes_again() -> bool:
    """Return whether an activation checkpoint computes a part of a forward again, in backward.

    It does so with gradients enabled, without which hooks run; those of a backward with `create_graph` are not told
    apart.
    """
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def clear_sharding_caches() -> None:
    """Empty what torch has cached on this thread of how operators shard their results; torch 2.11 has no fast path."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", bool)()


def is_set_to(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory, as `one.is_set_to(other)`.

    Of tensors without values, torch's FakeTensors, torch always says no.
    """
    if not isinstance(one, FakeTensor):
        return one.is_set_to(other)
    where, there = ((x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()) for x in (one, other))
    return where == there


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes, one after the other.

    Torch calls a tensor of one element, or of none, contiguous whatever its stride is, and then does not view it so.

    >>> flat_bytes(torch.tensor([1, 2, 3], dtype=torch.int16)[::2][1:]).tolist()
    [3, 0]

    Args:
        tensor: contiguous, and no conjugated or negated view.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def own_statistics(module: nn.Module) -> tuple[str, ...]:
    """Return the names of buffers that torch computes from the rows of each rank alone, such as a batch norm's means.

    >>> own_statistics(nn.BatchNorm1d(4)), own_statistics(nn.SyncBatchNorm(4)), own_statistics(nn.Linear(4, 4))
    (('running_mean', 'running_var', 'num_batches_tracked'), (), ())
    """
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    is_own = isinstance(module, kinds) and not isinstance(module, nn.SyncBatchNorm)
    is_torchs = is_own and type(module).forward.__module__.startswith("torch.nn.modules.")  # others may synchronise
    return ("running_mean", "running_var", "num_batches_tracked") if is_torchs else ()


_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod)\.")


def plain_name(name: str) -> str:
    """Take what activation checkpointing and torch.compile have added out of a name.

    >>> plain_name("layers.0._checkpoint_wrapped_module.mlp.w1.weight")
    'layers.0.mlp.w1.weight'

    Args:
        name: of a parameter, a buffer or a module.
    """
    return _WRAPPERS.sub("", name)


# -- memory without values ---------------------------------------------------------------------------------------------


_EMPTY = "_hyper_parallel_empty"  # an attribute of the tensor


def _writes_to(tensor: torch.Tensor) -> tuple[int, ...]:
    """Whose tensor it is, for copies take attributes along, and how often it was written to."""
    return id(tensor), tensor._version, getattr(tensor, "_local_tensor", tensor)._version


def note_empty(tensor: torch.Tensor) -> None:
    """Note that a tensor of the meta device got memory, as from `to_empty`, and no values yet."""
    tensor.__dict__[_EMPTY] = _writes_to(tensor)


def is_empty(tensor: torch.Tensor, *, may_be_written: bool = False) -> bool:
    """Return True if a tensor is one of `note_empty`, and nobody has written to it since, or may have done so."""
    noted, now = tensor.__dict__.get(_EMPTY, ()), _writes_to(tensor)
    return bool(noted[:1] == now[:1] if may_be_written else noted == now)


def forget_empty(tensor: torch.Tensor) -> None:
    """Drop what `note_empty` has noted: the tensor is about to get values."""
    tensor.__dict__.pop(_EMPTY, None)


# -- parameters that are no longer their model's -----------------------------------------------------------------------
# An optimizer that was made before, and still has them, steps without changing the model.


_MARK = "_hyper_parallel_replaced"  # an attribute of the tensor: it goes when the tensor goes


def refuse_lost(asked: str, parameter: torch.Tensor, by: str) -> None:
    """Refuse to replace a parameter that has what its successor would not have: a gradient, or hooks of others.

    Args:
        asked: the start of an error message, "cannot ...".
        parameter: what is to be replaced.
        by: the function that does it.

    Raises:
        ValueError: it has.
    """
    if parameter.grad is not None:
        blame, seen = "it has a gradient, which would be lost", f"seen: a backward before {by}"
        raise InvalidValue(asked, blame, seen, "model.zero_grad() first")
    hooks = (parameter._backward_hooks or {}).values()
    lost = [hook for hook in hooks if not getattr(hook, "is_made_anew", False)]  # whoever replaces it makes that anew
    if lost or getattr(parameter, "_post_accumulate_grad_hooks", None):
        blame = "it has hooks, which would be lost: the parameter is replaced by a sharded one"
        seen = f"seen: register_hook or register_post_accumulate_grad_hook before {by}"
        raise InvalidValue(asked, blame, seen, f"register them on the parameter that the module has after {by}")


def note_replaced(parameter: torch.Tensor, name: str, by: str) -> None:
    """Note that a model has another tensor in the place of `parameter` from now on.

    Args:
        parameter: what the model had.
        name: its name there.
        by: the function that has replaced it.
    """
    parameter.__dict__[_MARK] = (name, by)


def replaced_by(parameter: torch.Tensor) -> str | None:
    """Return what has put another tensor in the place of a parameter, or will; None: it is the model's own."""
    found = parameter.__dict__.get(_MARK)
    return None if found is None else str(found[1])


def _check_before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ValueError where an optimizer was made before its parameters were replaced."""
    given = [param for group in optimizer.param_groups for param in group["params"]]
    lost = [param.__dict__[_MARK] for param in given if param.grad is None and _MARK in param.__dict__]
    if not lost:
        return
    by = lost[0][1]
    names = ", ".join(repr(name) for name, _ in lost[:3]) + (", ..." if len(lost) > 3 else "")
    count = f"{len(lost)} of its {len(given)} parameters"
    blame = f"{by} has replaced {count} since it was made, so that the model would not change"
    hint = f"make the optimizer of model.parameters() after {by}"
    raise InvalidValue(f"cannot step with {type(optimizer).__name__}", blame, f"replaced: {names}", hint)


register_optimizer_step_pre_hook(_check_before_step)
