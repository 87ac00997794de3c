"""Models of transformers on a mesh with a tensor-parallel axis, without a change to their code.

Transformers is not imported: what a model is, its config and the names of its parameters say. Modules compute on local
tensors, and between them the residual stream is a DTensor, as in `llama_plan`.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check, check_choice
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.api import from_local, redistribute, to_local
from hyper_parallel.core.shard.api import shard_module
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.models.plans import LOGITS, MeshLike, Streams, add_entries, check_heads

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
"""The values of `config.model_type` that there are plans for."""

_EACH_LAYER = re.compile(r"model\.layers\.[0-9]+\.")


def huggingface_plan(
    model: nn.Module,
    mesh: MeshLike,
    *,
    tp: str | None = "tp",
    dp: str | list[str] | tuple[str, ...] | None = None,
    sequence_parallel: bool = True,
    vocab_parallel: bool = True,
    logits: str = "local",
) -> ShardingPlan:
    """Return the plan of a causal language model of transformers for `shard_module`.

        model = shard_module(model, mesh, huggingface_plan(model, mesh))
        loss = model(input_ids=rows, labels=rows).loss / mesh["dp"].size()  # the mean over this rank's rows

    Tokens and labels are plain tensors with this rank's rows; attention is eager or sdpa. Where dp splits the batch and
    there are masks, as eager attention makes itself, or positions per row, call `parallelize_huggingface`.

    Args:
        model: a LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM.
        mesh: names and sizes of the axes that the plan is for.
        tp: the axis that splits heads, inner width and vocabulary; None: no axis does.
        dp: the axis, or axes, that split the batch. Default: all others.
        sequence_parallel: split the residual stream over the sequence, along tp; its length need not divide evenly.
        vocab_parallel: split embedding and head.
        logits: "local": gathered over tp, a plain tensor of this rank's rows, which `labels=` needs. "whole": a DTensor
            of all rows. "split": as the head computes them, for `vocab_parallel_cross_entropy`.

    Raises:
        TypeError: no module with a config, no mesh.
        ValueError: no model that there is a plan for, or one for which a plan is not enough (see
            `parallelize_huggingface`); axes that do not exist, heads that the ranks along tp cannot share evenly.
    """
    asked = "cannot plan the model"
    streams, plan = _plan(asked, model, mesh, tp, dp, sequence_parallel, vocab_parallel, logits)
    if streams.degree > 1 and (more := next(_beyond_a_plan(model), None)) is not None:
        blame = f"module {more!r} needs its code adapted as well, and a plan is layouts only"
        seen = f"model: {type(model).__name__}"
        raise InvalidValue(asked, blame, seen, "parallelize_huggingface(model, mesh)")
    return plan


def parallelize_huggingface(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    tp: str | None = "tp",
    dp: str | list[str] | tuple[str, ...] | None = None,
    sequence_parallel: bool = True,
    vocab_parallel: bool = True,
    logits: str = "local",
) -> nn.Module:
    """Shard a causal language model of transformers over a mesh, in place; `fully_shard` over other axes may follow.

        model = MixtralForCausalLM.from_pretrained(...)
        parallelize_huggingface(model, mesh["tp"])
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        loss = model(input_ids=rows, labels=rows).loss / mesh["dp"].size()

    Beside what `huggingface_plan` says: each rank along tp has some of the experts of a mixture, unsplit, and computes
    them for the tokens that the router, equal on all of them, sends there; biases of what returns partial sums are
    added once; masks, positions and embeddings are this rank's rows. A router's auxiliary loss is that of these rows.

    Args:
        model: as for `huggingface_plan`, or a MixtralForCausalLM.
        mesh: the mesh; with an axis that splits the batch, or without.
        tp: see `huggingface_plan`, also for what follows.
        dp: as there.
        sequence_parallel: as there.
        vocab_parallel: as there.
        logits: as there.

    Raises:
        TypeError: no module with a config, no mesh.
        ValueError: as for `huggingface_plan`; experts that the ranks along tp cannot share evenly.
    """
    asked = "cannot shard the model"
    streams, plan = _plan(asked, model, mesh, tp, dp, sequence_parallel, vocab_parallel, logits)
    shard_module(model, mesh, plan)
    if mesh.size() == 1:
        return model
    base = Layout.from_device_mesh(mesh)
    for name, module in model.named_modules():
        if name == "model":
            rows = _Rows(base(streams.rows), base(*streams.residual))
            module.register_forward_pre_hook(rows.gather, with_kwargs=True, prepend=True)
        elif _EACH_LAYER.fullmatch(f"{name}."):
            module.register_forward_pre_hook(rows.take, with_kwargs=True, prepend=True)
        elif name.endswith("mlp.experts"):
            experts = _OwnExperts(module)
            module.register_forward_pre_hook(experts.before)
            module.register_forward_hook(experts.after)
        elif name.endswith("mlp.gate") and streams.degree > 1:
            module.register_forward_hook(CountedOnce(streams.degree).logits, prepend=True)
        elif name.endswith(("o_proj", "down_proj")) and getattr(module, "bias", None) is not None:
            module.register_forward_hook(CountedOnce(streams.degree).bias)
    return model


# -- the plan --------------------------------------------------------------------------------------------------------


def _plan(
    asked: str,
    model: nn.Module,
    mesh: MeshLike,
    tp: str | None,
    dp: str | list[str] | tuple[str, ...] | None,
    sequence_parallel: bool,
    vocab_parallel: bool,
    logits: str,
) -> tuple[Streams, ShardingPlan]:
    config = _config_of(asked, model)
    check(asked, "bool", sequence_parallel=sequence_parallel, vocab_parallel=vocab_parallel)
    check_choice(asked, "logits", logits, LOGITS)
    streams = Streams.on(asked, mesh, tp=tp, dp=dp, sequence_parallel=sequence_parallel)
    names = ["num_attention_heads", "num_key_value_heads"]
    names += ["num_local_experts"] if config.model_type == "mixtral" else []
    check_heads(asked, {name: getattr(config, name) for name in names}, streams)
    _check_random(asked, config, streams)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    layouts: dict[str, Any] = {}
    for name, param in parameters.items():
        if not name.startswith(("model.embed_tokens.", "lm_head.")):
            layouts[_EACH_LAYER.sub("model.layers.*.", name)] = _layout_of(asked, name, param, streams.tp or "None")
    plan = ShardingPlan(plan=layouts)
    norms = ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm")
    streams.add_along(plan, ("model.layers.*", *norms))
    streams.add_shares(plan, "model.layers.*.self_attn", {"hidden_states": streams.whole}, several=True)
    streams.add_shares(plan, "model.layers.*.mlp", streams.whole)
    streams.add_embedding(plan, "model.embed_tokens", split=vocab_parallel)
    axis = streams.tp or "None"
    add_entries(plan, plan={"lm_head.weight": (axis if vocab_parallel else "None", "None")})
    streams.add_head(plan, "lm_head", split=vocab_parallel, logits=logits)
    return streams, plan


def _config_of(asked: str, model: object) -> Any:
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if not isinstance(model, nn.Module) or kind is None:
        blame = f"model is a {type(model).__name__}, not a model of transformers, which has a config with a model_type"
        hint = "LlamaForCausalLM(config); llama_plan(model, mesh) for hyper_parallel.models.Llama"
        raise InvalidType(asked, blame, f"model: {type(model)!r}", hint)
    is_causal = "lm_head.weight" in dict(model.named_parameters(remove_duplicate=False))
    if kind not in MODEL_TYPES or not (is_causal and hasattr(model, "model")):
        blame = f"there is no plan for {kind!r}" if kind not in MODEL_TYPES else "it has no head for language modelling"
        seen = f"model: {type(model).__name__}   model types with a plan: {', '.join(MODEL_TYPES)}"
        hint = "one of these, as a ...ForCausalLM; or a ShardingPlan of your own for shard_module"
        raise InvalidValue(asked, blame, seen, hint)
    return config


def _check_random(asked: str, config: Any, streams: Streams) -> None:
    """Refuse what draws random numbers where ranks must draw others, or the same ones."""
    for name in ("attention_dropout", "router_jitter_noise"):
        value = getattr(config, name, 0.0) or 0.0
        if value > 0 and streams.degree > 1:
            blame = f"{name} draws random numbers, and ranks along {streams.tp!r} must not each draw their own way"
            raise InvalidValue(asked, blame, f"config.{name}: {value}", f"{name}=0.0 in the config")


def _layout_of(asked: str, name: str, param: nn.Parameter, axis: str) -> tuple[str, ...]:
    """Return the layout of a parameter of a layer, or of the last norm."""
    owner, _, last = name.rpartition(".")
    if re.search(r"\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)$", owner):
        return (axis, "None") if last == "weight" else (axis,)
    if re.search(r"\.(self_attn\.o_proj|mlp\.down_proj)$", owner):
        return ("None", axis) if last == "weight" else ("None",)
    if owner.endswith(".mlp.experts"):
        return (axis, "None", "None")
    if owner.endswith(".mlp.gate") or owner.split(".")[-1].endswith("norm"):
        return ("None",) * param.dim()
    blame = f"parameter {name!r} is not one that the plan knows, and its gradient would be a share of a sum"
    hint = "the model as transformers builds it; adapters come after shard_module, or with a plan of their own"
    raise InvalidValue(asked, blame, f"shape: {tuple(param.shape)}", hint)


def _beyond_a_plan(model: nn.Module) -> Any:
    """Yield the names of modules for which layouts are not enough."""
    for name, module in model.named_modules():
        has_bias = getattr(module, "bias", None) is not None
        if name.endswith("mlp.experts") or (name.endswith(("o_proj", "down_proj")) and has_bias):
            yield name


# -- what layouts do not say -----------------------------------------------------------------------------------------


class _Rows:
    """Masks and positions: the model sees those of all rows, as it does DTensors, and each layer those of its rows.

    Args:
        rows: the layout of a batch's rows.
        residual: the layout of the residual stream.
    """

    def __init__(self, rows: Layout, residual: Layout) -> None:
        self.rows, self.residual = rows, residual
        self.split = any(rows.splits(1))

    def gather(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the model: put together what is plain, and this rank's rows."""
        changed = dict(kwargs)
        embeds = kwargs.get("inputs_embeds")
        if isinstance(embeds, torch.Tensor) and not isinstance(embeds, DTensor):
            changed["inputs_embeds"] = redistribute(from_local(embeds, self.rows), self.residual)
        for name in ("attention_mask", "position_ids"):
            value = kwargs.get(name)
            if self.split and isinstance(value, torch.Tensor) and (name == "attention_mask" or value.shape[0] > 1):
                changed[name] = to_local(redistribute(from_local(value, self.rows), self.rows()))
        return args, changed

    def take(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before a layer: its rows of what has as many as the batch."""
        x = args[0] if args else kwargs["hidden_states"]
        if not self.split or not isinstance(x, DTensor):
            return args, kwargs
        own = self.rows.local_slice((x.shape[0],))

        def part(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(part, value))
            has_rows = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim() > 1
            return value[own] if has_rows and value.shape[0] == x.shape[0] else value

        names = ("attention_mask", "position_ids", "position_embeddings")
        return args, {name: part(value) if name in names else value for name, value in kwargs.items()}


class _OwnExperts:
    """Numbers the experts of a mixture as this rank has them; those of other ranks get the number that means none."""

    def __init__(self, module: nn.Module) -> None:
        weight = module.gate_up_proj
        assert isinstance(weight, DTensor), "shard_module has made it one"
        own = Layout.of(weight).local_slice(tuple(weight.shape))[0]
        self.first, self.count = own.start, own.stop - own.start
        state: Any = module
        state.num_experts, state._is_expert_parallel = self.count, True  # its code knows that some tokens go elsewhere

    def before(self, module: nn.Module, args: Any) -> Any:
        """Renumber the experts that the router has chosen."""
        hidden_states, index, weights = args
        index = index - self.first
        elsewhere = (index < 0) | (index >= self.count)
        return hidden_states, index.masked_fill(elsewhere, self.count), weights.masked_fill(elsewhere, 0.0)

    def after(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Let a rank that has got no tokens take part in backward, where the others wait for it: with zeros."""
        used = (*args, module.gate_up_proj, module.down_proj)
        if output.requires_grad or not torch.is_grad_enabled():
            return output
        return output + sum(each[:0].sum() for each in used if each.requires_grad)


class CountedOnce:
    """Makes what every rank along an axis computes count once, where the ranks' results are partial sums.

    Args:
        degree: number of ranks along the axis.
    """

    def __init__(self, degree: int) -> None:
        self.degree = degree

    def bias(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Leave 1/degree of a bias in what a layer returns, and of its gradient."""
        bias: Any = module.bias
        return output - bias * (1 - 1 / self.degree)

    def logits(self, module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Take 1/degree of the gradient of a router's logits, which each rank's auxiliary loss is computed from."""
        logits, *rest = output
        if logits.requires_grad:
            logits = logits.view_as(logits)  # the router's own scores go another way
            logits.register_hook(lambda grad: grad / self.degree)
        return logits, *rest
