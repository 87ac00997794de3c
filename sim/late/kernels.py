"""Kernels of the late device: every operation of torch, issued to the current stream and computed on the host, late.

torch calls `fallback` for each operation on a tensor of the device that it has no composite kernel for. The shapes of
what comes out are those that the operation has on the device meta, so they are known at once; the values are computed
when the task runs. What has to know values at once (`item`, `nonzero`, a copy to the host) waits for the stream first,
as on a real device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from sim.kernel.context import current_context
from sim.late import fused
from sim.late.device import LateDevice, apart, late_device
from sim.late.queue import LateTask
from sim.observers.races import accesses
from sim.ops import tensors_of

_ATEN = torch.ops.aten
# Indices may be on the host: a real device copies them over, too.
_TAKE_HOST_TENSORS = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


class Traits(NamedTuple):
    """What the schema of an operation says.

    Attributes:
        is_view: Its results share their memory with its first argument.
        results: For each result, the name of the argument that it is; "": a new tensor.
        is_late: It returns tensors only.
        draws: It draws random numbers.
        names: Of its arguments.
        wants_tensors: Places of arguments in which it takes no number for a tensor.
        takes_host_tensors: Tensors of the host may come with those of the device.
        steps_by_address: It is an optimizer's fused kernel, which reads numbers of steps where the parameters are.
    """

    is_view: bool
    results: tuple[str, ...]
    is_late: bool
    draws: bool
    names: tuple[str, ...]
    wants_tensors: tuple[int, ...]
    takes_host_tensors: bool
    steps_by_address: bool


@cache
def _traits(op: Any) -> Traits:
    schema = op._schema
    written = {
        name: argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for name in argument.alias_info.before_set
    }
    infos = [result.alias_info for result in schema.returns]
    return Traits(
        is_view=any(info is not None and not info.is_write for info in infos),
        results=tuple(
            next((written[name] for name in info.before_set if name in written), "") if info is not None else ""
            for info in infos
        ),
        is_late=all("Tensor" in str(result.type) for result in schema.returns),
        draws=torch.Tag.nondeterministic_seeded in op.tags,
        names=tuple(argument.name for argument in schema.arguments),
        wants_tensors=()
        if torch._C._should_allow_numbers_as_tensors(schema.name.split("::")[-1])
        else tuple(place for place, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"),
        takes_host_tensors=op._opname in _TAKE_HOST_TENSORS,
        steps_by_address=op._opname.startswith("_fused_") and "state_steps" in {each.name for each in schema.arguments},
    )


def _name(op: Any) -> str:
    return f"{op.namespace}.{op._opname}"


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Issue an operation, or do it at once if it has to know values."""
    device = late_device(_name(op))
    try:
        with apart():
            special = _SPECIAL.get(op)
            if special is not None:
                return special(device, *args, **kwargs)
            traits = _traits(op)
            if traits.is_view:
                return _view_of(device, op, args, kwargs)
            if traits.steps_by_address:
                _check_fused(op, args)
            return _issue(device, op, traits, _with_numbers(traits, args), kwargs)
    except Exception as error:
        device.raised = error  # in backward it would be lost on its way through C++
        raise


def _is_here(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _replaced(value: Any, tensor: Callable[[torch.Tensor], Any], place: str) -> Any:
    """An argument of an operation with other tensors in it, and another device."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, (list, tuple)):
        return [_replaced(each, tensor, place) for each in value]
    if isinstance(value, torch.device):
        return torch.device(place)
    return value


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch._conj(meta) if tensor.is_conj() else meta


def _view_of(device: LateDevice, op: Any, args: Any, kwargs: Any) -> Any:
    base = args[0]
    found = op(*(_replaced(each, _on_meta, "meta") for each in args), **kwargs)

    def view(meta: torch.Tensor) -> torch.Tensor:
        start = base.storage_offset() * base.element_size() // meta.element_size()
        return device.view(base, meta.shape, meta.stride(), start + int(meta.storage_offset()), meta.dtype)

    return [view(each) for each in found] if isinstance(found, (list, tuple)) else view(found)


class HostCall(NamedTuple):
    """An operation with its tensors on the host."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    twins: dict[int, torch.Tensor]  # by id of the device's tensor


def _with_numbers(traits: Traits, args: Any) -> Any:
    """Arguments in which Python's numbers stand for tensors, as tensors, for the operations that insist on these."""
    wants = [place for place in traits.wants_tensors if place < len(args)]
    numbers = [place for place in wants if isinstance(args[place], (bool, int, float))]
    if not numbers:
        return args
    found = list(args)
    for place in numbers:
        found[place] = torch.tensor(args[place], dtype=torch.float64 if type(args[place]) is float else None)
    return found


def _on_host(device: LateDevice, op: Any, args: Any, kwargs: Any, *, takes_host_tensors: bool) -> HostCall:
    twins: dict[int, torch.Tensor] = {}

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_here(tensor):
            if tensor.dim() and not takes_host_tensors:
                raise _on_two_devices(op, tensor)
            return tensor.clone()  # a number is handed over with the call, a host's index is copied first
        found = twins.get(id(tensor))
        if found is None:
            found = twins[id(tensor)] = device.twin(tensor)
        return found

    return HostCall(
        op,
        [_replaced(each, twin, "cpu") for each in args],
        {name: _replaced(each, twin, "cpu") for name, each in kwargs.items()},
        twins,
    )


def _issue(device: LateDevice, op: Any, traits: Traits, args: Any, kwargs: Any) -> Any:
    if not traits.is_late:
        return _at_once(device, op, args, kwargs)
    given = {**kwargs, **dict(zip(traits.names, args, strict=False))} if any(traits.results) else {}
    fresh: list[Any] = []
    if "" in traits.results:
        try:
            found = op(
                *(_replaced(each, _on_meta, "meta") for each in args),
                **{name: _replaced(each, _on_meta, "meta") for name, each in kwargs.items()},
            )
        except NotImplementedError:  # its shapes depend on values, or nobody has written what they are
            return _at_once(device, op, args, kwargs)
        fresh = list(found) if len(traits.results) > 1 else [found]
    else:
        _grow_outputs(device, op, args, kwargs)
    call = _on_host(device, op, args, kwargs, takes_host_tensors=traits.takes_host_tensors)
    outputs = [given.get(name) if name else _like(device, fresh[place]) for place, name in enumerate(traits.results)]
    made = [out for out, name in zip(outputs, traits.results, strict=True) if not name]
    targets = [[device.twin(tensor) for tensor in tensors_of((out,))] for out in made]
    compute = _with_random_state(call) if traits.draws else lambda: call.op(*call.args, **call.kwargs)

    def run() -> None:
        results = compute()
        if not targets:
            return
        several = list(results) if len(traits.results) > 1 else [results]
        new = [each for each, name in zip(several, traits.results, strict=True) if not name]
        for target, result in zip(targets, new, strict=True):
            for out, value in zip(target, tensors_of((result,)), strict=True):
                if value.numel() == out.numel():  # the CPU keeps no statistics of batches that nobody asks for
                    out.copy_(value)

    task = device.put(device.current, _name(op), run)
    _touch(device, task, op, args, kwargs, call.twins)
    for out, twins in zip(made, targets, strict=True):
        for tensor, twin in zip(tensors_of((out,)), twins, strict=True):
            device.touch(task, tensor, twin, writes=True)
    if len(outputs) == 1:
        return outputs[0]
    return tuple(outputs) if outputs else None


def _like(device: LateDevice, meta: Any) -> Any:
    """What comes out, on the device, given what comes out on meta; all of it will be written."""
    if isinstance(meta, torch.Tensor):
        return device.new_tensor(meta.shape, meta.stride(), meta.dtype, poison=False)
    return None if meta is None else [_like(device, each) for each in meta]


def _check_fused(op: Any, lists: Any) -> None:
    """Refuse what a GPU would read from an address of the host: a number in a list, such as one of steps."""
    on_host = [each for given in lists for each in tensors_of((given,)) if given is not each and not _is_here(each)]
    if on_host:
        raise _on_two_devices(op, on_host[0])


def _on_two_devices(op: Any, tensor: torch.Tensor) -> RuntimeError:
    place = f"npu:0 and {tensor.device}"
    return RuntimeError(f"{_name(op)}: expected all tensors to be on the same device, but found {place}")


def _touch(device: LateDevice, task: LateTask, op: Any, args: Any, kwargs: Any, twins: dict[int, torch.Tensor]) -> None:
    if not device.memory.watched:
        return
    reads, writes = accesses(op, args, kwargs)
    for tensors, writing in ((reads, False), (writes, True)):
        for tensor in tensors:
            if id(tensor) in twins:
                device.touch(task, tensor, twins[id(tensor)], writes=writing)


def _with_random_state(call: HostCall) -> Callable[[], Any]:
    """Compute with the random numbers that come next when it is issued, and draw these now, so that others follow.

    So a program draws what it would draw on the CPU, whenever its kernels run.
    """
    generator = call.kwargs.get("generator") or torch.default_generator
    before = generator.get_state()
    call.op(
        *(_replaced(each, torch.zeros_like, "cpu") for each in call.args),
        **{name: _replaced(each, torch.zeros_like, "cpu") for name, each in call.kwargs.items()},
    )

    def compute() -> Any:
        now = generator.get_state()
        generator.set_state(before)
        try:
            return call.op(*call.args, **call.kwargs)
        finally:
            generator.set_state(now)

    return compute


def _at_once(device: LateDevice, op: Any, args: Any, kwargs: Any) -> Any:
    """Wait for the stream, then compute."""
    call = _on_host(device, op, args, kwargs, takes_host_tensors=_traits(op).takes_host_tensors)
    task = device.put(device.current, _name(op))
    _touch(device, task, op, args, kwargs, call.twins)
    device.finish(task)
    found = op(*call.args, **call.kwargs)
    back = {id(twin): key for key, twin in call.twins.items()}
    originals = {id(tensor): tensor for tensor in tensors_of((args, kwargs))}

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in back:
            return originals[back[id(tensor)]]
        out = device.new_tensor(tensor.shape, tensor.stride(), tensor.dtype, poison=False)
        twin = device.twin(out)
        device.touch(device.put(device.current, _name(op), lambda: twin.copy_(tensor)), out, twin, writes=True)
        return out

    if isinstance(found, tuple):
        return tuple(_replaced(each, on_device, "npu") for each in found)
    return _replaced(found, on_device, "npu")


def _grow_outputs(device: LateDevice, op: Any, args: Any, kwargs: Any) -> None:
    """Make room in outputs that are empty, as for `out=torch.empty(0)`."""
    out = kwargs.get("out")
    if not isinstance(out, torch.Tensor) or out.numel():
        return
    meta = {name: _replaced(each, _on_meta, "meta") for name, each in kwargs.items()}
    shape = op(*(_replaced(each, _on_meta, "meta") for each in args), **meta).shape
    if shape != out.shape:
        _resize_(device, out, shape)


# -- operations with kernels of their own ------------------------------------------------------------------------------


def _check_device(asked: Any) -> None:
    if asked is not None and asked.index not in (None, 0):
        raise RuntimeError(f"invalid device ordinal: {asked}; each rank of this world has one device, npu:0")


def _empty(npu: LateDevice, size: Any, *, dtype: Any = None, **options: Any) -> torch.Tensor:
    _check_device(options.get("device"))
    dtype = dtype or torch.get_default_dtype()
    layout = options.get("memory_format")
    stride = None
    if layout not in (None, torch.contiguous_format, torch.preserve_format):
        stride = torch.empty(size, memory_format=layout, device="meta").stride()
    return npu.new_tensor(size, stride, dtype)


def _empty_strided(npu: LateDevice, size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> torch.Tensor:
    _check_device(options.get("device"))
    return npu.new_tensor(size, stride, dtype or torch.get_default_dtype())


def _as_strided(npu: LateDevice, x: torch.Tensor, size: Any, stride: Any, offset: Any = None) -> torch.Tensor:
    return npu.view(x, size, stride, int(x.storage_offset()) if offset is None else offset)


def _set_storage(npu: LateDevice, x: torch.Tensor, storage: Any, offset: Any, size: Any, stride: Any = ()) -> Any:
    kernel = _ATEN.set_.source_Storage_storage_offset
    return kernel._op_dk(torch._C.DispatchKey.CPU, x, storage, offset, size, stride)


def _set_whole_storage(npu: LateDevice, x: torch.Tensor, storage: Any) -> Any:
    return _set_storage(npu, x, storage, 0, (storage.nbytes() // x.element_size(),), (1,))


def _resize_(npu: LateDevice, x: torch.Tensor, size: Any, **options: Any) -> torch.Tensor:
    """Another shape; where that needs more memory, what was there is copied to a storage that nobody else has."""
    storage, first, numel = x.untyped_storage(), int(x.storage_offset()), math.prod(size)
    stride = torch.empty(tuple(size), device="meta").stride()
    room = npu.memory.size_of(storage) // x.element_size() if npu.memory.has(storage) else 0
    if x.numel() and first + numel <= room:
        return _set_storage(npu, x, storage, first, tuple(size), stride)
    new = npu.new_tensor(tuple(size), None, x.dtype)
    if x.numel():
        there = room - first
        _copy_from(npu, npu.view(x, (there,), (1,), first), npu.view(new, (there,), (1,), 0))
    return _set_storage(npu, x, new.untyped_storage(), 0, new.shape, new.stride())


def _copy_from(npu: LateDevice, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    """A copy on the device, from the host, or to it.

    Of pinned memory, and into it, the copy may be late: the host reads it, or changes it, at its own risk.
    """
    give = npu.twin(source) if _is_here(source) else source.detach()
    take = npu.twin(target) if _is_here(target) else target.detach()
    on_host = [each for each in (source, target) if not _is_here(each)]
    is_late = non_blocking and all(map(npu.is_pinned, on_host))
    if on_host and not is_late and npu.flights:
        npu.flights.look("aten.copy_", [source], [target])
    if not _is_here(source) and not is_late:
        give = give.clone()
    task = npu.put(npu.current, "aten.copy_", lambda: take.copy_(give))
    if _is_here(source):
        npu.touch(task, source, give, writes=False)
    if _is_here(target):
        npu.touch(task, target, take, writes=True)
    if on_host and is_late:
        if not _is_here(target):
            _poison(take)
        npu.share_with_host(task, [give] if _is_here(target) else [], [] if _is_here(target) else [take])
    elif not _is_here(target):
        npu.finish(task)
    return target


def _to_copy(
    npu: LateDevice, x: torch.Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any
) -> torch.Tensor:
    """A copy with another dtype or on another device; one to the host that nobody waits for is to pinned memory."""
    options.update(layout=None, pin_memory=None)
    like = _ATEN._to_copy.default(_on_meta(x), device=torch.device("meta"), **options)
    if device is not None and device.type == "meta":
        return like
    if device is None or device.type == "npu":
        _check_device(device)
        out = npu.new_tensor(like.shape, like.stride(), like.dtype, poison=False)
    else:
        out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        out = npu.pin(out) if non_blocking else out
    _copy_from(npu, x, out, non_blocking)
    return out


def _poison(tensor: torch.Tensor) -> None:
    """Fill with what nobody can take for a result."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _item(npu: LateDevice, x: torch.Tensor) -> Any:
    twin = npu.twin(x)
    task = npu.put(npu.current, "aten.item")
    npu.touch(task, x, twin, writes=False)
    npu.finish(task)
    return twin.item()


def _may_take_memory_of(npu: LateDevice, x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `x.data = other` works: as in torch_npu between host and device, so that ties survive `to`."""
    return all(each.layout is torch.strided and each.device.type in ("cpu", "npu") for each in (x, other))


def _is_pinned(x: torch.Tensor, device: Any = None) -> Any:
    """Whether memory of the host is pinned, where C++ asks; of Python's calls `LateMode` knows.

    DDP insists on it for memory that it has had pinned itself, of which the device is not told. So it is said of any on
    ranks with late devices, and a copy from such memory is not late.
    """
    context = current_context()
    if context is not None and context.late is not None:
        return True
    return _ATEN.is_pinned.default._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, x, device)


def _equal(npu: LateDevice, x: torch.Tensor, other: torch.Tensor) -> Any:
    """Whether all elements are the same; no device compares with what is on the host, be it one number."""
    op = _ATEN.equal.default
    for tensor in (x, other):
        if not _is_here(tensor):
            raise _on_two_devices(op, tensor)
    return _at_once(npu, op, (x, other), {})


def _record_stream(npu: LateDevice, x: torch.Tensor, stream: Any) -> None:
    npu.use_on(x, npu.stream(stream.stream_id))


def _convolution(npu: LateDevice, *args: Any) -> Any:
    op = _ATEN.convolution.default
    return _issue(npu, op, _traits(op), args, {})


def _convolution_backward(npu: LateDevice, grad: Any, x: Any, weight: Any, *args: Any) -> Any:
    op = _ATEN.convolution_backward.default
    return _issue(npu, op, _traits(op), (grad, x, weight, [weight.shape[0]], *args), {})


def _layer_norm_backward(npu: LateDevice, *args: Any) -> Any:
    """With the means and deviations in the dtype of the weights, in which the CPU keeps them, and no device does."""
    grad, x, shape, mean, rstd, weight, *rest = args
    if weight is not None and weight.dtype is x.dtype is not mean.dtype:
        mean, rstd = (torch.ops.aten._to_copy.default(each, dtype=x.dtype) for each in (mean, rstd))
    op = _ATEN.native_layer_norm_backward.default
    return _issue(npu, op, _traits(op), (grad, x, shape, mean, rstd, weight, *rest), {})


def _attention(
    npu: LateDevice, q: Any, k: Any, v: Any, bias: Any = None, dropout_p: float = 0.0, causal: bool = False, *_: Any,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """The output and the log-sums, which is all that backward needs of it."""
    mask = {"attn_mask": bias, "scale": scale}
    out, log_sum = _issue(npu, fused.ATTENTION, _traits(fused.ATTENTION), (q, k, v, dropout_p, causal), mask)
    return out, log_sum, None, None, q.shape[2], k.shape[2], None, None, None


def _attention_backward(
    npu: LateDevice, grad: Any, q: Any, k: Any, v: Any, bias: Any, wanted: Any, out: Any, log_sum: Any, cum_q: Any,
    cum_k: Any, max_q: int, max_k: int, dropout_p: float, causal: bool, *random: Any, scale: float | None = None,
) -> Any:  # fmt: skip
    given, mask = (grad, q, k, v, out, log_sum, dropout_p, causal), {"attn_mask": bias, "scale": scale}
    return *_issue(npu, fused.ATTENTION_GRAD, _traits(fused.ATTENTION_GRAD), given, mask), None


def _rms_norm(npu: LateDevice, *args: Any) -> Any:
    """The output, and one number for each row, which with the input is all that backward needs."""
    op = _ATEN._fused_rms_norm.default
    return _issue(npu, op, _traits(op), args, {})


def _rms_norm_backward(npu: LateDevice, grad: Any, x: Any, shape: Any, rstd: Any, weight: Any, wanted: Any) -> Any:
    op = torch.ops.npu._rms_norm_grad.default
    of_x, of_weight = _issue(npu, op, _traits(op), (grad, x, shape, rstd, weight), {})
    return of_x if wanted[0] else None, of_weight if wanted[1] else None


def _gru_cell(npu: LateDevice, x: torch.Tensor, h: torch.Tensor, before: torch.Tensor, *biases: Any) -> Any:
    """The state after a step, and what backward needs: of other devices than the CPU, torch asks for it at once."""
    x, h = (gates if bias is None else gates + bias for gates, bias in zip((x, h), biases or (None, None), strict=True))
    (x_reset, x_keep, x_new), (h_reset, h_keep, h_new) = x.chunk(3, 1), h.chunk(3, 1)
    reset, keep = torch.sigmoid(x_reset + h_reset), torch.sigmoid(x_keep + h_keep)
    new = torch.tanh(x_new + reset * h_new)
    return new + keep * (before - new), torch.cat([reset, keep, new, before, h_new], 1)


def _gru_cell_backward(npu: LateDevice, grad: torch.Tensor, kept: torch.Tensor, has_bias: bool) -> Any:
    reset, keep, new, before, h_new = kept.chunk(5, 1)
    of_keep = grad * (before - new) * keep * (1 - keep)
    of_new = grad * (1 - keep) * (1 - new * new)
    of_reset = of_new * h_new * reset * (1 - reset)
    of_x, of_h = torch.cat([of_reset, of_keep, of_new], 1), torch.cat([of_reset, of_keep, of_new * reset], 1)
    return of_x, of_h, grad * keep, *((of_x.sum(0), of_h.sum(0)) if has_bias else (None, None))


def _lstm_cell(npu: LateDevice, x: torch.Tensor, h: torch.Tensor, before: torch.Tensor, *biases: Any) -> Any:
    """The output and the state after a step, and what backward needs, likewise."""
    gates = x + h
    for bias in biases:
        gates = gates if bias is None else gates + bias
    take, keep, new, show = gates.chunk(4, 1)
    take, keep, new, show = torch.sigmoid(take), torch.sigmoid(keep), torch.tanh(new), torch.sigmoid(show)
    state = keep * before + take * new
    return show * torch.tanh(state), state, torch.cat([take, keep, new, show], 1)


def _lstm_cell_backward(
    npu: LateDevice, grad: Any, grad_state: Any, before: torch.Tensor, state: torch.Tensor, kept: Any, has_bias: bool
) -> Any:
    (take, keep, new, show), shown = kept.chunk(4, 1), torch.tanh(state)
    grad = torch.zeros_like(state) if grad is None else grad
    of_state = grad * show * (1 - shown * shown) + (0 if grad_state is None else grad_state)
    of_take, of_keep = of_state * new * take * (1 - take), of_state * before * keep * (1 - keep)
    of_new, of_show = of_state * take * (1 - new * new), grad * shown * show * (1 - show)
    of_gates = torch.cat([of_take, of_keep, of_new, of_show], 1)
    return of_gates, of_state * keep, of_gates.sum(0) if has_bias else None


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _ATEN.empty.memory_format: _empty,
    _ATEN.empty_strided.default: _empty_strided,
    _ATEN.as_strided.default: _as_strided,
    _ATEN.set_.source_Storage_storage_offset: _set_storage,
    _ATEN.set_.source_Storage: _set_whole_storage,
    _ATEN.resize_.default: _resize_,
    _ATEN._copy_from.default: _copy_from,
    _ATEN._to_copy.default: _to_copy,
    _ATEN._local_scalar_dense.default: _item,
    _ATEN._has_compatible_shallow_copy_type.default: _may_take_memory_of,
    _ATEN.equal.default: _equal,
    _ATEN.record_stream.default: _record_stream,
    _ATEN.native_layer_norm_backward.default: _layer_norm_backward,
    _ATEN._scaled_dot_product_fused_attention_overrideable.default: _attention,
    _ATEN._scaled_dot_product_fused_attention_overrideable_backward.default: _attention_backward,
    _ATEN._fused_rms_norm.default: _rms_norm,
    _ATEN._fused_rms_norm_backward.default: _rms_norm_backward,
    _ATEN._thnn_fused_gru_cell.default: _gru_cell,
    _ATEN._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    _ATEN._thnn_fused_lstm_cell.default: _lstm_cell,
    _ATEN._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    _ATEN.convolution_overrideable.default: _convolution,
    _ATEN.convolution_backward_overrideable.default: _convolution_backward,
}


def register() -> list[torch.library.Library]:
    """Make these the kernels of the device npu, for good: torch has no way back.

    torch does not find a fallback while a dispatch mode is on, so the operations of aten get kernels of their own.

    Returns:
        What they live as long as.
    """
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    own = {op.name() for op in _SPECIAL} | {"aten::mse_loss", "aten::smooth_l1_loss"}  # whose out= variants warn
    for name in torch._C._dispatch_get_all_op_names():
        # A structured one comes back as its out= variant, unless it has a composite kernel, which would come first.
        is_structured = has_kernel(name, "CompositeExplicitAutogradNonFunctional")
        comes_back = is_structured and not has_kernel(name, "CompositeImplicitAutograd")
        if name in own or (name.startswith("aten::") and has_kernel(name, "CPU") and not comes_back):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(_ATEN, packet), overload or "default")
            aten.impl(name.removeprefix("aten::"), partial(_fallback, op), "PrivateUse1")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):  # the latter in inference mode
        aten.impl("scaled_dot_product_attention", fused.attention, key)
    aten.impl("is_pinned", _is_pinned, "CPU")
    fused.split_attention()
    npu = fused.define()
    for name in fused.COMPUTED:
        npu.impl(name, partial(_fallback, getattr(torch.ops.npu, name).default), "PrivateUse1")
    return [everything, aten, npu]
