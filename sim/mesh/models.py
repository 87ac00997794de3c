"""The models of estimates: shapes by name, the project's own configs, and any `nn.Module`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from hyper_parallel.core.common.errors import InvalidType, InvalidValue, nearest
from hyper_parallel.core.machine.toml_file import read_toml
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.trainer.metrics import flops_per_token
from sim.mesh.spec import Custom, CustomSpec, ModelSpec

_FILE = Path(__file__).parent / "data" / "models.toml"
_ABOUT = ("kind", "source", "like", "parameters", "active", "also")

Model: TypeAlias = "str | LlamaConfig | Custom | ModelSpec"
"""A name of `model_names()`, a config (`MoEConfig` is a `LlamaConfig`), any module as a `Custom`, or a
`ModelSpec`: what was found, or one of your own."""


def model_names() -> tuple[str, ...]:
    """Return the names of all known models.

    >>> "llama3-8b" in model_names()
    True
    """
    return (*_tables(), *(name for table in _tables().values() for name in table.get("also", ())))


def find_model(model: Model) -> ModelSpec:
    """Return the `ModelSpec` of a model.

    >>> spec = find_model("llama3-8b")
    >>> spec.num_parameters, spec.num_layers, round(spec.flops_per_token(8192) / 1e9, 1)
    (8030261248, 32, 57.9)
    >>> find_model(LlamaConfig()).name
    'llama-0.9m'

    Args:
        model: see `Model`.

    Raises:
        TypeError: not a model in this sense.
        ValueError: an unknown name.
    """
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, str):
        key = model.strip().lower().replace("_", "-")
        key = next((name for name, table in _tables().items() if key in table.get("also", ())), key)
        if key not in _tables():
            blame, seen = f"there is no model {model!r}", f"models: {', '.join(model_names())}"
            hint = (
                f"{nearest(key, model_names())}, a LlamaConfig or MoEConfig, or sim.mesh.Custom(...) for any nn.Module"
            )
            raise InvalidValue("cannot find the model", blame, seen, hint)
        return LlamaSpec(key, _configs()[key])
    given: object = model
    if isinstance(model, LlamaConfig) and type(model) in (LlamaConfig, MoEConfig):  # a subclass is another model
        kind = "moe" if isinstance(model, MoEConfig) else "llama"
        known = (name for name, config in _configs().items() if are_alike(config, model))
        return LlamaSpec(next(known, f"{kind}-{short_count(model.num_parameters())}"), model)
    if isinstance(given, Custom):
        return CustomSpec(given)
    blame = f"model is a {type(given).__name__}"
    hint = 'a name such as "llama3-8b", a LlamaConfig or MoEConfig, or sim.mesh.Custom(...) for any nn.Module'
    raise InvalidType("cannot find the model", blame, f"model: {given!r}", hint)


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, Any]]:
    return read_toml(_FILE)


@lru_cache(maxsize=1)
def _configs() -> dict[str, LlamaConfig]:
    kinds: dict[str, Any] = {"llama": LlamaConfig, "moe": MoEConfig}
    return {
        key: kinds[table["kind"]](**{name: value for name, value in table.items() if name not in _ABOUT})
        for key, table in _tables().items()
    }


def are_alike(one: LlamaConfig, other: LlamaConfig) -> bool:
    """Return True if two configs have the same shape, except for the sequence length."""
    return type(one) is type(other) and dataclasses.replace(one, max_seq_len=other.max_seq_len) == other


def short_count(number: int) -> str:
    """Return a count of parameters as in model names, e.g. `0.9m`, `8.03b`."""
    for unit, letter in ((1e12, "t"), (1e9, "b"), (1e6, "m")):
        if number >= 0.1 * unit:
            return f"{number / unit:.3g}{letter}" if number >= unit else f"{number / unit:.1g}{letter}"
    return str(number)


@dataclass(frozen=True)
class LlamaSpec(ModelSpec):
    """A `Llama`, or a `MoELlama` if the config has experts."""

    name: str
    config: LlamaConfig

    @property
    def family(self) -> str:
        """`moe` with experts, else `llama`."""
        return "moe" if isinstance(self.config, MoEConfig) else "llama"

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token uses."""
        return self.config.num_active_parameters() if isinstance(self.config, MoEConfig) else self.num_parameters

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of each layer; dense layers precede the layers with experts."""
        config, layers = self.config, range(self.num_layers)
        has_experts = [isinstance(config, MoEConfig) and not config.is_dense(layer) for layer in layers]
        return tuple("experts" if each else "dense" for each in has_experts)

    def at(self, seq_len: int) -> LlamaConfig:
        """Return the config with position tables as long as the sequences."""
        return dataclasses.replace(self.config, max_seq_len=seq_len)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward per token, without recomputation, with attention in full."""
        return flops_per_token(self.at(seq_len), seq_len)

    def build(
        self, seq_len: int, layers: Collection[int] | None = None, *, embed: bool = True, head: bool = True
    ) -> nn.Module:
        """Build the model, or a stage of it; see `ModelSpec.build`."""
        whole: Llama = (MoELlama if self.family == "moe" else Llama)(self.at(seq_len))
        return whole.keep(range(self.num_layers) if layers is None else layers, embed=embed, head=head)
