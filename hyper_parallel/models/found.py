"""Tensor parallelism for models that there is no plan for: pairs of linear layers, found by their names and places.

In each pair, the first layers are split by the rows of their weights and the last one by its columns, so that what is
between them is computed on this rank's part, and all else on every rank. Whether a model's code can do that, only a
proof tells: `search_pairs` asks for one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.api import shard_module
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.models.huggingface import CountedOnce
from hyper_parallel.models.lora import Adapter, add_adapters

_LAST = re.compile(r"(o_proj|out_proj|dense|c_proj|dense_4h_to_h|down_proj|fc2|fc_out|wo|w2)")
_COUNTS = ("", r"(num|n)_(\w+_)?heads", r"(num|n)_(\w+_)?heads|embed_dim|hidden_size|split_size|inner_dim")
"""Attributes of attention that count what each rank has a part of: none, heads, and widths as well."""


@dataclass(frozen=True)
class Pair:
    """Linear layers of one module, alike in all blocks.

    Attributes:
        place: path of the module that has them, with * for the number of the block.
        first: names of those that are split by the rows of their weights.
        last: name of the one that is split by columns.
        counts: attributes of the module to divide by the number of ranks; "": none.
        dims: of what goes into the layers: (batch, seq, width), or (tokens, width).
    """

    place: str
    first: tuple[str, ...]
    last: str
    counts: str = ""
    dims: int = 3

    @property
    def is_attention(self) -> bool:
        """Whether heads are split, and not a width."""
        return "att" in self.place.rpartition(".")[2]


def find_pairs(model: nn.Module) -> list[Pair]:
    """Return the pairs of a model's blocks, in the order in which it has them.

    Args:
        model: of transformers, or like one.
    """
    found: dict[Pair, None] = {}
    for path, module in model.named_modules():
        names = [name for name, child in module.named_children() if _is_linear(child)]
        last = [name for name in names if _LAST.fullmatch(name)]
        if re.search(r"\.[0-9]+(\.|$)", path) and len(last) == 1 and len(names) > 1:
            first = tuple(name for name in names if name not in last)
            found[Pair(re.sub(r"\.[0-9]+(?=\.|$)", ".*", path), first, last[0])] = None
    return list(found)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def can_share(model: nn.Module, pair: Pair, ranks: int) -> bool:
    """Tell whether so many ranks can share the heads, or the width, of a pair evenly.

    Args:
        model: that has the pair; it may be on meta.
        pair: of `find_pairs`.
        ranks: number of them.
    """
    settings: Any = getattr(model, "config", None)
    heads = [getattr(settings, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    counts = [count for count in heads if isinstance(count, int)] if pair.is_attention else []
    for _, module in _places(model, pair):
        for name in (*pair.first, pair.last):
            rows, columns = _rows_and_columns(module.get_submodule(name))
            counts.append(columns if name == pair.last else rows)
    return all(count % ranks == 0 for count in counts)


def _rows_and_columns(layer: Any) -> tuple[int, int]:
    first, second = layer.weight.shape
    return (first, second) if isinstance(layer, nn.Linear) else (second, first)


def small_settings(settings: Any, ranks: int) -> Any:
    """Return the settings of a small model of the same kind, with as many heads, for a proof; None: it has no heads.

    Args:
        settings: the config of a model of transformers.
        ranks: that share its heads and widths.
    """
    small, heads = copy.deepcopy(settings), getattr(settings, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    width = 8 * heads
    sizes = {"num_hidden_layers": 2, "hidden_size": width, "word_embed_proj_dim": width, "head_dim": 8, "rotary_dim": 4}
    sizes |= dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 12 * ranks)
    for name, size in sizes.items():
        if isinstance(getattr(small, name, None), int):
            with suppress(AttributeError):  # of what follows from the others
                setattr(small, name, size)
    for name, value in list(vars(small).items()):
        if isinstance(value, list) and len(value) == settings.num_hidden_layers:  # one entry for each layer
            setattr(small, name, value[:2])
        elif name.endswith("_token_id"):
            setattr(small, name, None)
    small.vocab_size = 64
    return small


def search_pairs(pairs: Sequence[Pair], prove: Callable[[Sequence[Pair]], bool]) -> list[Pair]:
    """Return the pairs that can be split, each with its counts, and proved together.

    Args:
        pairs: of `find_pairs`.
        prove: tells whether a model that is split by these computes what it computes on one device.
    """
    chosen: list[Pair] = []
    for pair in pairs:
        ways = [replace(pair, counts=counts) for counts in _COUNTS]
        if not pair.is_attention:
            ways = [pair, replace(pair, dims=2)]
        chosen += [way for way in [next((way for way in ways if prove([way])), None)] if way is not None]
    return chosen if len(chosen) < 2 or prove(chosen) else chosen[:1]


def split_pairs(model: nn.Module, mesh: DeviceMesh, pairs: Sequence[Pair]) -> nn.Module:
    """Split the pairs of a model over a mesh, in place; `fully_shard` over other axes may follow.

    Communication: an all_reduce for each pair forward, and one for each of its first layers backward.

    Args:
        model: plain, alike on all ranks.
        mesh: of one axis.
        pairs: of `search_pairs`.
    """
    (axis,), degree = mesh.mesh_dim_names or ("tp",), mesh.size()
    plan = ShardingPlan(plan={}, input_plan={}, output_plan={}, local_plan={}, return_local_tensor=[], wrap_inputs=True)
    for pair in pairs:
        whole: Any = ("None",) * pair.dims
        part, pending = (*whole[1:], axis), Layout.from_device_mesh(mesh)(*whole, partial={axis: "sum"})
        for path, module in _places(model, pair):
            for name in (*pair.first, pair.last):
                layer: Any = module.get_submodule(name)
                is_last, where = name == pair.last, f"{path}.{name}"
                _add_layer(plan, where, layer, axis, is_last=is_last)
                _entries(plan.input_plan)[f"{where}.input"] = part if is_last else whole
                _entries(plan.local_plan)[where] = pending if is_last else part
                if is_last:
                    _entries(plan.output_plan)[f"{where}.output"] = whole
                    if layer.bias is not None:
                        layer.register_forward_hook(CountedOnce(degree).bias)  # before the sum over ranks
                elif hasattr(layer, "nf"):
                    layer.nf //= degree  # by which a Conv1D shapes its results
                plan.return_local_tensor = [*(plan.return_local_tensor or []), where]
            for name, value in list(vars(module).items()):
                if pair.counts and type(value) is int and re.fullmatch(pair.counts, name):
                    setattr(module, name, value // degree if value > 1 else value)
    add_adapters(plan, model)
    _add_rest(plan, model)
    return shard_module(model, mesh, plan)


def _add_rest(plan: ShardingPlan, model: nn.Module) -> None:
    """Let every rank compute what is not split, with weights that are known to be alike, as `fully_shard` asks."""
    for path, module in model.named_modules():
        own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if isinstance(module, Adapter):  # it computes inside of the layer that it stands beside
            plan.plan = {**dict.fromkeys(own, (Replicate(),)), **_entries(plan.plan)}
        elif own and path not in _entries(plan.local_plan):
            _entries(plan.plan).update(dict.fromkeys(own, (Replicate(),)))
            _entries(plan.local_plan)[path] = (Replicate(),)
            plan.return_local_tensor = [*(plan.return_local_tensor or []), path]


def _entries(section: dict[str, Any] | None) -> dict[str, Any]:
    assert section is not None, "it was made"
    return section


def _places(model: nn.Module, pair: Pair) -> Iterator[tuple[str, nn.Module]]:
    pattern = re.compile(re.escape(pair.place).replace(r"\*", "[0-9]+"))
    for path, module in model.named_modules():
        if pattern.fullmatch(path):
            yield path, module


def _add_layer(plan: ShardingPlan, where: str, layer: Any, axis: str, *, is_last: bool) -> None:
    """Add the layouts of a layer's parameters; the weight of a Conv1D has its columns first."""
    layout = ("None", axis) if is_last else (axis, "None")
    _entries(plan.plan)[f"{where}.weight"] = layout if isinstance(layer, nn.Linear) else layout[::-1]
    if layer.bias is not None:
        _entries(plan.plan)[f"{where}.bias"] = ("None",) if is_last else (axis,)
