"""The toy transformer and the training step that the engine benchmarks share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

DIM, LAYERS, HEADS, VOCAB = 256, 4, 4, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, DIM))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Toy(nn.Module):
    """d=256, 4 layers, 36 parameters, 3.3 million elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(engine: str, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, wrapped by ``ours``, ``fsdp2`` or not at all (``plain``), and its optimizer."""
    torch.manual_seed(0)
    model = Toy()
    if engine != "plain":
        if engine == "ours":
            from hyper_parallel.core.fully_shard import fully_shard as wrap
        else:
            from torch.distributed.fsdp import fully_shard as wrap  # type: ignore[assignment]
        for block in model.blocks:
            wrap(block, mesh=mesh)
        wrap(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batch(rank: int, sequences: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCAB, (sequences, length + 1), generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
