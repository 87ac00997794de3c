"""The operators of `c10d`: their kernels on ranks, and the way through torch's dispatcher, where modes see them.

torch's own process groups hand every operation to the dispatcher, and the kernel there calls the group's backend. A
simulated group has no backend that moves data: its methods do the work themselves. But C++ code may call the operators
(out variants of functional collectives do), and dispatch modes (`CommDebugMode`) listen at the dispatcher. So the
kernels of `c10d` call the group's methods while a world is alive, and these go through the dispatcher where a mode
listens.

Tried on torch 2.13.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._meta_registrations as torch_meta
from torch._C._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from sim.explain.errors import SimError

_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def uncompiled(*functions: Any) -> None:
    """Keep torch.compile away from Python functions that torch's C++ code calls, and from all that these call.

    For a group of torch's own there is no Python code to be found there.
    """
    for function in functions:
        if code := getattr(function, "__code__", None):
            eval_frame.set_code_exec_strategy(code, _SKIPPED)


class _Crossing:
    """An operation on its way through the dispatcher: what its kernel needs and cannot see, and what it has made."""

    def __init__(self, reduce_op: Any) -> None:
        self.reduce_op = reduce_op  # the operator's arguments lack the factor of PREMUL_SUM
        self.work: dist.Work | None = None
        self.held: dist.Work | None = None  # the same work, as torch got it


class Dispatched(dist.ProcessGroup):
    """A group whose methods stand in for the kernels of `c10d`."""

    crossing: _Crossing | None = None


# -- the kernels -----------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """What the methods of a group ask of torch's options."""

    reduceOp: Any = dist.ReduceOp.SUM  # noqa: N815 - torch's spelling
    rootRank: int = 0  # noqa: N815


_META_FUNCTIONS: dict[str, Callable[..., Any]] = getattr(torch_meta, "_META_FUNCTIONS", {})
_CAN_REPLACE = hasattr(torch.library, "get_kernel")  # without torch's own kernels, other groups would have none
# By operator: the call of the group's method, given the operator's arguments.
_METHODS: dict[str, Callable[..., Any]] = {
    "allreduce_": lambda tensors, group, op, *_: group.allreduce(tensors, _Options(op)),
    "allreduce_coalesced_": lambda tensors, group, op, *_: group.allreduce_coalesced(tensors, _Options(op)),
    "reduce_": lambda tensors, group, op, root, *_: group.reduce(tensors, _Options(op, root)),
    "broadcast_": lambda tensors, group, root, *_: group.broadcast(tensors, _Options(rootRank=root)),
    "allgather_": lambda outputs, inputs, group, *_: group.allgather(outputs, inputs),
    "_allgather_base_": lambda output, input, group, *_: group.all_gather_single(output, input),
    "allgather_coalesced_": lambda outputs, inputs, group, *_: group.allgather_coalesced(outputs, inputs),
    "allgather_into_tensor_coalesced_": lambda outputs, inputs, group, *_: group.all_gather_single_coalesced(
        outputs, inputs
    ),
    "gather_": lambda outputs, inputs, group, root, *_: group.gather(outputs, inputs, _Options(rootRank=root)),
    "scatter_": lambda outputs, inputs, group, root, *_: group.scatter(outputs, inputs, _Options(rootRank=root)),
    "reduce_scatter_": lambda outputs, inputs, group, op, *_: group.reduce_scatter(outputs, inputs, _Options(op)),
    "_reduce_scatter_base_": lambda output, input, group, op, *_: group.reduce_scatter_single(
        output, input, _Options(op)
    ),
    "reduce_scatter_tensor_coalesced_": lambda outputs, inputs, group, op, *_: group.reduce_scatter_single_coalesced(
        outputs, inputs, _Options(op)
    ),
    "alltoall_": lambda outputs, inputs, group, *_: group.alltoall(outputs, inputs),
    "alltoall_base_": lambda output, input, group, receive, send, *_: group.all_to_all_single(
        output, input, receive, send
    ),
    "barrier": lambda _tensor, group, *_: group.barrier(),
    "monitored_barrier_": lambda _tensor, group, *_: group.monitored_barrier(),
    "send": lambda tensors, group, dst, tag: group.send(tensors, dst, tag),
    "recv_": lambda tensors, group, src, tag: group.recv(tensors, src, tag),
    "recv_any_source_": lambda tensors, group, tag: group.recv_anysource(tensors, tag),
}


class _Handing(dist.ProcessGroup):
    """Hands a work over to torch, which keeps its Python half for as long as its own only if a group returns it."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch's stub lacks this form
        self.work = work

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.work


def _group_of(boxed: Any) -> Dispatched | None:
    """The simulated group that an operator is given; None if it is another one, or what stands for one."""
    try:
        group = dist.ProcessGroup.unbox(boxed)
    except RuntimeError:
        return None
    return group if isinstance(group, Dispatched) else None


def _kernel(name: str, schema: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """What the operator `name` does: a method of a simulated group; for other groups what it does without a world."""
    places = [place for place, argument in enumerate(schema.arguments) if argument.name == "process_group"]
    ops = [place for place, argument in enumerate(schema.arguments) if argument.name == "reduce_op"]

    def kernel(keys: Any, *args: Any) -> Any:
        group = _group_of(args[places[0]])
        if group is None:
            return original(keys, *args)
        method = _METHODS.get(name)
        if method is None:
            raise SimError(
                f"simulated groups have no operator c10d.{name}\n  torch: {torch.__version__}\n"
                "  try: the collectives of torch.distributed"
            )
        given, crossing = [*args], group.crossing
        given[places[0]] = group
        for place in ops:
            given[place] = crossing.reduce_op if crossing and crossing.reduce_op else args[place].op()
        work = method(*given)
        if work is None:
            return None
        held = dist.ProcessGroup.barrier(_Handing(work))
        if crossing is not None:
            crossing.work, crossing.held = work, held
        return held.boxed() if len(schema.returns) == 1 else (args[0], held.boxed())

    uncompiled(kernel)
    return kernel


@functools.cache
def _kernels() -> dict[tuple[str, str], Callable[..., Any]]:
    """What takes the place of torch's kernels, by operator and dispatch key: of all operators that take a group."""
    found: dict[tuple[str, str], Callable[..., Any]] = {}
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace != "c10d":
            continue
        schema = torch._C._get_schema(full, "")
        if all(argument.name != "process_group" for argument in schema.arguments):
            continue
        for key in ("CPU", "SparseCPU", "CUDA", "PrivateUse1"):  # the last is that of late devices
            if torch._C._dispatch_has_kernel_for_dispatch_key(full, key):
                found[name, key] = _kernel(name, schema, torch.library.get_kernel(full, key).call_boxed)
        found[name, "Meta"] = _meta_kernel(name, schema)
    return found


def _meta_kernel(name: str, schema: Any) -> Callable[..., Any]:
    """As `_kernel`, without the dispatch keys.

    torch has written its own in Python, and keeps one Python function per operator and key: after the world's end it
    goes on to call this one in its place, as it calls its own.
    """
    own = _META_FUNCTIONS.get(name) or torch.library.get_kernel(f"c10d::{name}", "Meta").call_boxed
    given = (lambda keys, *args: own(*args)) if name in _META_FUNCTIONS else own
    kernel, keys = _kernel(name, schema, given), torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
    return lambda *args: kernel(keys, *args)


def replace_kernels() -> Callable[[], None]:
    """Let the kernels of `c10d` call simulated groups; returns how to undo that."""
    if not _CAN_REPLACE:
        return lambda: None
    kernels = _kernels()
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these operators had kernels
        for (name, key), kernel in kernels.items():
            library.impl(name, kernel, key, with_keyset=key != "Meta", allow_override=True)
    return library._destroy


# -- the way there ---------------------------------------------------------------------------------------------


class _Catching(TorchDispatchMode):
    """Notes with which arguments torch calls an operator of `c10d`, and ends the call.

    No subscriber of `sim.ops`: it is alone for one call of torch's own, while the modes of the thread are switched off.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":  # of a barrier: the tensor that it is given
            return func(*args, **(kwargs or {}))
        self.func, self.args = func, args
        raise _Caught


class _Caught(Exception):
    """Ends a call of torch's."""


class _Plain(dist.ProcessGroup):
    """A group with torch's own methods."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]


Method = Callable[..., Any]
_modes = torch._C._len_torch_dispatch_stack


def seen_by_modes(name: str, older: str = "") -> Callable[[Method], Method]:
    """Let a method of a group go through the dispatcher, as torch's own does, where a dispatch mode listens.

    Args:
        name: torch's name of the method.
        older: its former name.
    """
    known = name if hasattr(dist.ProcessGroup, name) else older

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def operation(self: Dispatched, *args: Any, **options: Any) -> Any:
            if _modes():
                modes = _listening()
                if modes:
                    return _cross(self, known, modes, args, options)
            return method(self, *args, **options)

        return operation

    return decorate


def _listening() -> list[TorchDispatchMode]:
    """The modes of the calling thread that are the user's or torch's: ours know of communication from the group."""
    if not _CAN_REPLACE or torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
        return []
    return [mode for mode in dispatch._get_current_dispatch_mode_stack() if not _is_deaf(type(mode))]


def _is_deaf(kind: type) -> bool:
    # Fake tensors meet those of other ranks like any others; torch's groups do not communicate for them at all.
    return issubclass(kind, FakeTensorMode) or kind.__module__.partition(".")[0] in ("sim", "hyper_parallel")


def _cross(group: Dispatched, name: str, modes: list[TorchDispatchMode], args: Any, options: Any) -> Any:
    """Call the operator that torch's method `name` calls."""
    catching = _Catching()
    with dispatch._disable_current_modes():
        try:
            with catching:
                getattr(_Plain(group.rank(), group.size()), name)(*args, **options)
        except _Caught:
            pass
        place = [argument.name for argument in catching.func._schema.arguments].index("process_group")
        given = [*catching.args]
        given[place] = group.boxed()
        before, crossing = group.crossing, _Crossing(_reduce_op((*args, *options.values())))
        group.crossing = crossing
        for mode in modes:
            dispatch._push_mode(mode)
        try:
            result = catching.func(*given)
        finally:
            for _ in modes:
                dispatch._pop_mode()
            group.crossing = before
    return _work_of(result, crossing)


def _reduce_op(args: Sequence[Any]) -> Any:
    return next((arg.reduceOp for arg in args if hasattr(arg, "reduceOp")), None)


def _work_of(result: Any, crossing: _Crossing) -> Any:
    """The work that an operator has returned: the kernel's own, unless a mode has put another one in its place."""
    boxed = result[-1] if isinstance(result, (tuple, list)) else result
    if boxed is None:
        return None
    work = dist.Work.unbox(boxed)
    return crossing.work if work is crossing.held else work
