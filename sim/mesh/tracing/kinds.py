"""Kinds of operations, and the fused regions that running operations belong to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from hyper_parallel.core.machine.toml_file import read_toml
from sim.ops import named_arguments

# Fused regions: the kernel that a running operation belongs to, where several are one ---------------------------------


class _Running(threading.local):
    """The kernel that the calling thread's operations are in, where a compiler makes one of several.

    Attributes:
        region: its number; 0: what is running is not compiled. Each run of a graph has other numbers than those before.
        taken: how many numbers kernels have had.
        recomputes: whether a graph, of a backward, is at an operation that its forward has done before.
        traces: whether a graph is being traced: then modules are called, and nothing is computed.
    """

    region = 0
    taken = 0
    recomputes = False
    traces = False

    def take(self, count: int) -> int:
        """Return the first of some numbers that no kernel has had."""
        self.taken += count
        return self.taken - count + 1


running = _Running()


@contextmanager
def having(holder: Any, **values: Any) -> Iterator[None]:
    """Let attributes of an object or a class have other values, until the end of the block."""
    before = {name: getattr(holder, name) for name in values}
    for name, value in values.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


# The op kind of each of torch's operations, looked up once per operation and overload ---------------------------------

_TABLES = MappingProxyType(
    {
        table: MappingProxyType({name: frozenset(words.split()) for name, words in named.items()})
        for table, named in read_toml(Path(__file__).parents[1] / "data" / "operations.toml").items()
    }
)
FUSION, _KINDS, _GROUPS = _TABLES["fusion"], _TABLES["kinds"], _TABLES["groups"]
"""Names of operations by how a compiler fuses them, by the kind of their kernel, and by other traits."""
_ATTENTIONS, _ATTENTION_BACKWARDS = _KINDS["attention"], _KINDS["attention_backward"]
_MEMORY = frozenset[str]().union(*_TABLES["memory"].values())


def kind_of(func: Any) -> str:
    """Return the kind of an operation's kernel, see `sim.mesh.program.Op`; `unknown` where there is none.

    >>> kind_of(torch.ops.aten.mm.default), kind_of(torch.ops.aten.view.default), kind_of(torch.ops.aten.add.Tensor)
    ('matmul', 'host', 'memory')

    Args:
        func: an overload, as `__torch_dispatch__` gets it.
    """
    name = func._schema.name.rpartition("::")[2]
    kind = next((kind for kind, names in _KINDS.items() if name in names), None)
    if kind is not None:
        return kind
    if getattr(func, "is_view", False):
        return "host"
    if name in _MEMORY or name.removesuffix("_") in _MEMORY or name.startswith("_foreach_"):
        return "memory"
    tags = getattr(func, "tags", ())
    if torch.Tag.pointwise in tags or getattr(torch.Tag, "reduction", None) in tags:
        return "memory"
    return "unknown"


def memory_kind(func: Any, args: Sequence[Any], given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> str:
    """Return the kind of a kernel that is bounded by what it moves, by how its operands lie in memory.

    torch's elementwise kernels take several elements at a time where all operands lie alike and without gaps
    (`memory`). Else, and where they make elements larger, they take one by one (`scalar`). Those that are broadcast, or
    have gaps, and are converted on the way, and `cat` of inner dims, are of a general form that is slower (`general`).

    >>> x, row, rows = torch.ones(4, 6), torch.ones(6), torch.ones(4, 9)[:, :6]
    >>> others = {"alike": x, "half": x.bfloat16(), "row": row, "half a row": row.bfloat16(), "gaps": rows}
    >>> add = torch.ops.aten.add.Tensor
    >>> {name: memory_kind(add, (x, other), [x, other], [x]) for name, other in others.items()}
    {'alike': 'memory', 'half': 'scalar', 'row': 'scalar', 'half a row': 'general', 'gaps': 'scalar'}
    """
    name = func._schema.name.rpartition("::")[2]
    if name == "cat":
        dim = args[1] if len(args) > 1 else 0
        return "memory" if all(size == 1 for size in results[0].shape[: dim % results[0].dim()]) else "general"
    if not results or not (torch.Tag.pointwise in getattr(func, "tags", ()) or name in _CONVERTS):
        return "memory"
    out, wanted = results[0], _steps(results[0])
    operands = [each for each in (*given, *results) if each.dim() and each.numel() > 1]
    lie_alike = _is_dense(out) and all(_steps(each) == wanted for each in operands)
    if lie_alike:
        return "scalar" if any(each.dtype.itemsize < out.dtype.itemsize for each in operands) else "memory"
    return "scalar" if all(each.dtype == out.dtype for each in operands) else "general"


_CONVERTS = frozenset({"copy_", "_to_copy"})


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The size and stride of each dim that is one."""
    return [pair for pair in zip(tensor.shape, tensor.stride(), strict=True) if pair[0] != 1]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie without gaps, in whatever order."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel()


_REPORTED = {
    "matmul": "matrix products",
    "attention": "attention",
    "attention_backward": "attention",
    "random": "random numbers",
    "optimizer": "optimizer",
    "fused": "fused operations",
}


def reported_kind(kind: str, name: str) -> str:
    """Return the kind by which a step's seconds are reported: finer than that of the kernel, which prices go by.

    >>> reported_kind("memory", "aten.native_layer_norm"), reported_kind("memory", "aten::_log_softmax")
    ('norms', 'softmax and loss')
    >>> reported_kind("attention_backward", "aten._flash_attention_backward"), reported_kind("memory", "aten.mul")
    ('attention', 'pointwise and reductions')
    """
    if kind in _REPORTED:
        return _REPORTED[kind]
    short = name.replace("::", ".").rpartition(".")[2]
    if any(word in short for word in ("layer_norm", "rms_norm", "batch_norm", "group_norm")):
        return "norms"
    if any(word in short for word in ("softmax", "nll_loss", "cross_entropy")):
        return "softmax and loss"
    if short in _GROUPS["copies"]:
        return "copies"
    return "embedding" if "embedding" in short else "pointwise and reductions"


def reads_only_its_output(func: Any) -> bool:
    """Tell whether an operation reads as much as it returns of its first argument, such as rows of a table."""
    return func._schema.name.rpartition("::")[2] in _GROUPS["reads_only_its_output"]


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Count floating-point operations as `torch.utils.flop_counter` does: of an attention the whole square.

    Attention is counted here: torch 2.11 has no count where several heads share their keys, and none has all kernels.
    """
    name = func._schema.name.rpartition("::")[2]
    if name in _ATTENTIONS or name in _ATTENTION_BACKWARDS:
        batch, heads, _, queries, keys, size, *_ = attention_shape(func, args, kwargs)
        backward = name in _ATTENTION_BACKWARDS
        value = args[3 if backward and not name.startswith("npu") else 2]
        products = 3 * size + 2 * value.shape[-1] if backward else size + value.shape[-1]
        return int(2 * batch * heads * queries * keys * products)
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return int(count(*args, **kwargs, out_val=out))
    if name == "_grouped_mm":  # each row, column or element of the inner dim belongs to one group
        a, b = args[:2]
        return int(2 * (a[0] if a.dim() == 3 and b.dim() == 2 else a).numel() * b.shape[-1])
    return 0


def matmul_shape(func: Any, args: Any, out: Any) -> tuple[int, ...]:
    """Return (batch, m, n, k) of a product; of a convolution, those of the product it amounts to; else ()."""
    name = func._schema.name.rpartition("::")[2]
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    first = out[0] if isinstance(out, (tuple, list)) else out
    if name in ("mm", "_scaled_mm", "_int_mm"):
        return (1, tensors[0].shape[0], tensors[1].shape[1], tensors[0].shape[1])
    if name == "addmm":
        return (1, tensors[1].shape[0], tensors[2].shape[1], tensors[1].shape[1])
    if name in ("bmm", "baddbmm"):
        a, b = tensors[-2:]
        return (a.shape[0], a.shape[1], b.shape[2], a.shape[2])
    if name == "_grouped_mm":
        a, b = tensors[:2]
        groups = b.shape[0] if b.dim() == 3 else max(1, a.shape[0] if a.dim() == 3 else 1)
        return (groups, a.shape[-2] // (groups if a.dim() == 2 else 1), b.shape[-1], a.shape[-1])
    if name in ("convolution", "_convolution", "cudnn_convolution", "convolution_overrideable", "mkldnn_convolution"):
        weight = tensors[1]
        places = first.numel() // max(first.shape[1], 1)
        return (1, places, weight.shape[0], weight.numel() // max(weight.shape[0], 1))
    if name == "convolution_backward":
        grad, _, weight = tensors[:3]
        places = grad.numel() // max(grad.shape[1], 1)
        return (2, places, weight.shape[0], weight.numel() // max(weight.shape[0], 1))
    return ()


def attention_shape(func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Return (batch, heads, kv_heads, queries, keys, head_dim, is_causal) of an attention or its backward."""
    name = func._schema.name.rpartition("::")[2]
    grad_first = name in _ATTENTION_BACKWARDS and not name.startswith("npu")
    q, k = (args[1], args[2]) if grad_first else (args[0], args[1])
    # Of an NPU's every mode but the first has a causal mask, as here nobody gives another one.
    given = named_arguments(func, args, kwargs)
    is_causal = kwargs.get("sparse_mode", 0) != 0 if name.startswith("npu") else given.get("is_causal")
    if "flash_attention_forward" in name or ("flash_attention_backward" in name and "product" not in name):
        batch, queries, heads, size = q.shape if q.dim() == 4 else (1, *q.shape)
        keys, kv_heads = (k.shape[1], k.shape[2]) if k.dim() == 4 else k.shape[:2]
    else:
        batch, heads, queries, size = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
    return (batch, heads, kv_heads, queries, keys, size, int(bool(is_causal)))
