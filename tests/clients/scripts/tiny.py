"""A tiny Llama of transformers and the text it is trained on, the same on every rank and in every run."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, ROWS, LENGTH, STEPS = 64, 8, 16, 4


def llama() -> LlamaForCausalLM:
    """Return the model, with weights from one seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def rows() -> torch.Tensor:
    """Return the token ids of all steps, a row a sample."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (STEPS * ROWS, LENGTH), generator=generator)


def mine(step: int, rank: int, world: int) -> torch.Tensor:
    """Return a rank's rows of a step."""
    return rows()[step * ROWS : (step + 1) * ROWS][rank::world]
