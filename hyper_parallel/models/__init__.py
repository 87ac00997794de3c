"""Small, readable reference models."""

from hyper_parallel.models.llama import Llama, LlamaConfig

__all__ = ["Llama", "LlamaConfig"]
