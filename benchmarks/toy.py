"""The toy transformer and the training step that the engine benchmarks share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 256


class Shape(NamedTuple):
    """The width, the number of layers, and their heads."""

    dim: int = 256
    layers: int = 4
    heads: int = 4


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim = shape.dim
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Toy(nn.Module):
    """As it is, d=256, 4 layers, 36 parameters, 3.3 million elements."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        shape = shape or Shape()
        self.embed = nn.Embedding(VOCAB, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class OptimizerOfPart:
    """AdamW of the first 1/n of each parameter of an unwrapped model: as much as a rank of a sharded one updates."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self._wholes = list(model.parameters())
        self._parts = [nn.Parameter(whole.detach().view(-1)[: -(-whole.numel() // ranks)]) for whole in self._wholes]
        self._optimizer = torch.optim.AdamW(self._parts, lr=1e-3, fused=True)

    def step(self) -> None:
        for whole, part in zip(self._wholes, self._parts, strict=True):
            assert whole.grad is not None
            part.grad = whole.grad.view(-1)[: part.numel()]
        self._optimizer.step()

    def zero_grad(self) -> None:
        for tensor in (*self._wholes, *self._parts):
            tensor.grad = None


def has_comm_fusion() -> bool:
    """Whether `fully_shard` takes `comm_fusion`."""
    from hyper_parallel.core.fully_shard import fully_shard

    return "comm_fusion" in inspect.signature(fully_shard).parameters


def wrapper(engine: str) -> Callable[..., Any]:
    """The `fully_shard` of `ours`, `fused` (ours with `comm_fusion=True`) or `fsdp2`.

    Besides the arguments that both have, it takes `param_dtype` and `reduce_dtype`.
    """
    if engine == "fsdp2":
        import torch.distributed.fsdp as library
    else:
        import hyper_parallel.core.fully_shard as library  # type: ignore[no-redef]
    wrap: Callable[..., Any] = library.fully_shard
    if engine == "fused":
        wrap = partial(wrap, comm_fusion=True)

    def wrap_with_dtypes(
        module: nn.Module,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Any:
        policy = library.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        return wrap(module, mp_policy=policy, **options)

    return wrap_with_dtypes


def build(
    engine: str,
    mesh: Any,
    *,
    prepare: Callable[[Toy], object] | None = None,
    units: Callable[[Toy], list[nn.Module]] = lambda model: list(model.blocks),
    shape: Shape | None = None,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """The model and its optimizer, wrapped by `engine` (see `wrapper`) or not at all.

    Args:
        engine: `ours`, `fused`, `fsdp2`; `plain`: not wrapped; `part`: nor is all of it updated.
        mesh: Where it is sharded.
        prepare: Called with the model before it is wrapped.
        units: The modules that are units of their own; the rest is one more.
        shape: Of the model; None: the small one.
        options: Of `fully_shard`.
    """
    torch.manual_seed(0)
    with torch.device("cpu" if mesh is None else mesh.device_type):  # the host takes a second for 50 million weights
        model = Toy(shape)
    if prepare is not None:
        prepare(model)
    if engine == "part":
        return model, OptimizerOfPart(model, mesh.size())
    if engine != "plain":
        wrap = wrapper(engine)
        for unit in units(model):
            wrap(unit, mesh=mesh, **options)
        wrap(model, mesh=mesh, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batch(rank: int, sequences: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCAB, (sequences, length + 1), generator=generator)


def step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
