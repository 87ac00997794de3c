"""Low-rank adapters of linear layers, LoRA (Hu et al. 2021, arXiv:2106.09685), and the folders that peft has them in.

A layer computes W x + scale * up (down x), with W frozen. Under tensor parallelism `down` is split as the columns of W,
and `up` as its rows, so that what the layer returns is split, or pending, as it was.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.core.common.checks import check_fields, check_least
from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.models.hf_names import place_of
from hyper_parallel.models.llama import Llama

ALL = "all-linear"
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
"""The files of a folder of peft."""

_INSIDE = ".lora."

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: the model is frozen, and two small matrices beside each linear layer are trained.

    Args:
        rank: of the matrices; 0: no adapters, the whole model is trained.
        alpha: their product is multiplied by alpha / rank; None: twice the rank.
        dropout: share of an adapter's inputs that are dropped; each rank draws its own.
        targets: which linear layers, such as "q_proj,v_proj", by the names of transformers; "all-linear": those of all
            blocks.
    """

    rank: int = 0
    alpha: float | None = None
    dropout: float = 0.0
    targets: str = ALL

    def __post_init__(self) -> None:
        asked = "cannot use [lora]"
        check_fields(asked, self)
        check_least(asked, 0, rank=self.rank, alpha=self.alpha)
        check_least(asked, 0, 1, dropout=self.dropout)

    @property
    def is_on(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0

    def names(self) -> list[str]:
        """Return the names of the targets.

        >>> LoraConfig(targets="q_proj, v_proj").names()
        ['q_proj', 'v_proj']
        """
        return [name.strip() for name in self.targets.split(",") if name.strip()]

    @property
    def scale(self) -> float:
        """What the product of the matrices is multiplied by."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


class Adapter(nn.Module):
    """What LoRA adds to the result of a linear layer.

    Attributes:
        down: (rank, width of the inputs).
        up: (width of the results, rank); zeros at first, so that training starts from the model as it is.

    Args:
        inputs: width of the layer's inputs.
        results: width of its results.
        config: rank, scale and dropout.
        like: a tensor with the dtype and device.
    """

    def __init__(self, inputs: int, results: int, config: LoraConfig, like: torch.Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(like.new_empty(config.rank, inputs))
        self.up = nn.Parameter(like.new_empty(results, config.rank))
        self.scale, self.dropout, self.bound = config.scale, config.dropout, 1 / math.sqrt(inputs)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill `down` as nn.Linear does its weight, and as peft does, and `up` with zeros."""
        self.down.uniform_(-self.bound, self.bound)
        self.up.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., inputs) to (..., results)."""
        return F.linear(F.linear(F.dropout(x, self.dropout, self.training), self.down), self.up) * self.scale


def _adapted(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + module.lora(args[0])


def with_lora(model: M, config: LoraConfig) -> M:
    """Freeze a model, and give its linear layers adapters without values, in place; of rank 0 it stays as it is.

    Args:
        model: a Llama, or a stage of one; or any model with nn.Linear, or Conv1D of transformers, in its blocks.
        config: the adapters.
    """
    if not config.rank:
        return model
    model.requires_grad_(False)
    for _, module in _targeted(model, config):
        weight = module.weight
        inputs, results = reversed(weight.shape) if isinstance(module, nn.Linear) else weight.shape
        module.lora = Adapter(inputs, results, config, weight)
        module.register_forward_hook(_adapted)
    return model


def check_targets(model: nn.Module, config: LoraConfig) -> None:
    """Refuse targets that a whole model does not have.

    Args:
        model: before it has adapters.
        config: the adapters.

    Raises:
        ValueError: the first of them.
    """
    known = list(dict.fromkeys(_theirs(model, path).rpartition(".")[2] for path, _ in _linear(model)))
    wrong = next((name for name in config.names() if name not in (*known, ALL)), None)
    if wrong is not None or not known or not config.names():
        asked, seen = f"cannot adapt [lora] targets '{config.targets}'", f"linear layers: {', '.join(known) or 'none'}"
        blame = f"the model has no linear layer {wrong!r}" if wrong else "no linear layer is left"
        raise InvalidValue(asked, blame, seen, nearest(wrong or ALL, [*known, ALL]))


def _targeted(model: nn.Module, config: LoraConfig) -> Iterator[tuple[str, Any]]:
    names = config.names()
    for path, module in _linear(model):
        if ALL in names or _theirs(model, path).rpartition(".")[2] in names:
            yield path, module


def _linear(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers of the blocks: those with a number in their path."""
    for path, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if is_linear and re.search(r"\.[0-9]+\.", path):
            yield path, module


def _theirs(model: nn.Module, path: str) -> str:
    """Return the path that transformers has for a layer."""
    return place_of(f"{path}.weight", ()).names[0].removesuffix(".weight") if isinstance(model, Llama) else path


def is_of_adapter(name: str) -> bool:
    """Tell whether a parameter is one of an adapter.

    >>> is_of_adapter("layers.0.attention.wq.lora.up")
    True

    Args:
        name: in its model.
    """
    return _INSIDE in name


def add_adapters(plan: ShardingPlan, model: nn.Module) -> None:
    """Add the layouts of a model's adapters to its plan, by those of the weights that they stand beside.

    Args:
        plan: with the layouts of the weights, rows and columns; changed in place.
        model: with adapters, or without.
    """
    paths = [name for name, module in model.named_modules() if isinstance(module, Adapter)]
    for pattern, layout in list((plan.plan or {}).items()):
        owner = pattern.removesuffix(".weight")
        is_there = re.compile(re.escape(owner).replace(r"\*", "[^.]+") + r"\.lora").fullmatch
        if owner != pattern and any(map(is_there, paths)):
            beside = model.get_submodule(next(filter(is_there, paths)).removesuffix(".lora"))
            rows, columns = layout if isinstance(beside, nn.Linear) else layout[::-1]
            added = {f"{owner}.lora.down": ("None", columns), f"{owner}.lora.up": (rows, "None")}
            plan.plan = {**(plan.plan or {}), **added}


# -- folders of peft ---------------------------------------------------------------------------------------------------


def export_adapter(
    model: nn.Module, config: LoraConfig, folder: str | Path, *, base: str, dtype: torch.dtype | None = None
) -> int:
    """Write adapters as a folder that `peft.PeftModel.from_pretrained(base_model, folder)` loads.

    Args:
        model: with adapters that have their values, unsharded.
        config: what they were made by.
        folder: made if it is not there; refused if it has weights.
        base: the folder of the model that they were trained on.
        dtype: to write them in. Default: as they are.

    Returns:
        Their number of parameters.

    Raises:
        ValueError: a folder with weights.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if there := sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")):
        blame, seen = "it has weights already", f"seen: {', '.join(there[:6])}"
        raise InvalidValue(f"cannot export to {folder}", blame, seen, "a new folder, or remove that one")
    tensors: dict[str, torch.Tensor] = {}
    targets = dict[str, None]()
    for path, module in model.named_modules():
        if isinstance(module, Adapter):
            theirs = _theirs(model, path.removesuffix(".lora"))
            targets[theirs.rpartition(".")[2]] = None
            for name, param in (("lora_A", module.down), ("lora_B", module.up)):
                tensors[f"base_model.model.{theirs}.{name}.weight"] = param.detach().to(dtype or param.dtype)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.scale * config.rank,
        "lora_dropout": config.dropout,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": any(type(module).__name__ == "Conv1D" for module in model.modules()),
        "inference_mode": True,
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")  # last: it makes it one
    return sum(tensor.numel() for tensor in tensors.values())


@torch.no_grad()
def merge_adapters(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Add what adapters compute to the weights beside them, and return the state of the model without adapters.

    Args:
        model: unsharded, with values; its weights are changed in place, each rounded once to its dtype.
    """
    for module in model.modules():
        adapter = getattr(module, "lora", None)
        if isinstance(adapter, Adapter):
            weight: Any = module.weight
            wide = torch.promote_types(weight.dtype, torch.float32)
            product = (adapter.up.to(wide) @ adapter.down.to(wide)) * adapter.scale
            weight.copy_(weight + (product if isinstance(module, nn.Linear) else product.T))
    return {name: value for name, value in model.state_dict().items() if not is_of_adapter(name)}
