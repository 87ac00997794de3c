"""Hugging Face's names for our models: keys of config.json and tensors; names and numbers only."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.moe import MoEConfig, MoELlama

_HEAD, _EMBEDDING = "head.weight", "embed.weight"

_MODEL = (
    ("embed.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("head.weight", "lm_head.weight"),
)
_LAYER = (
    ("attention_norm.weight", "input_layernorm.weight"),
    ("mlp_norm.weight", "post_attention_layernorm.weight"),
    ("attention.wq.weight", "self_attn.q_proj.weight"),
    ("attention.wk.weight", "self_attn.k_proj.weight"),
    ("attention.wv.weight", "self_attn.v_proj.weight"),
    ("attention.wo.weight", "self_attn.o_proj.weight"),
    ("attention.q_norm.weight", "self_attn.q_norm.weight"),
    ("attention.k_norm.weight", "self_attn.k_norm.weight"),
    ("mlp.w1.weight", "mlp.gate_proj.weight"),
    ("mlp.w2.weight", "mlp.down_proj.weight"),
    ("mlp.w3.weight", "mlp.up_proj.weight"),
    ("mlp.router.weight", "mlp.gate.weight"),
    ("mlp.router.bias", "mlp.gate.e_score_correction_bias"),
    ("mlp.shared.w1.weight", "mlp.shared_experts.gate_proj.weight"),
    ("mlp.shared.w2.weight", "mlp.shared_experts.down_proj.weight"),
    ("mlp.shared.w3.weight", "mlp.shared_experts.up_proj.weight"),
    ("mlp.experts.w1", "mlp.experts.{}.gate_proj.weight"),
    ("mlp.experts.w2", "mlp.experts.{}.down_proj.weight"),
    ("mlp.experts.w3", "mlp.experts.{}.up_proj.weight"),
)


class CheckpointPlace(NamedTuple):
    """Where a tensor of ours is in a Hugging Face folder.

    Args:
        names: of the tensor there; of several, that are stacked along a new first dim.
        is_stacked: whether they are.
    """

    names: tuple[str, ...]
    is_stacked: bool


def place_of(name: str, shape: tuple[int, ...]) -> CheckpointPlace:
    """Return where one of our tensors is.

    >>> place_of("layers.3.attention.wq.weight", (8, 8))
    CheckpointPlace(names=('model.layers.3.self_attn.q_proj.weight',), is_stacked=False)
    >>> place_of("layers.3.mlp.experts.w2", (2, 8, 4)).names
    ('model.layers.3.mlp.experts.0.down_proj.weight', 'model.layers.3.mlp.experts.1.down_proj.weight')

    Args:
        name: in our model.
        shape: of the full tensor.
    """
    found = re.fullmatch(r"layers\.([0-9]+)\.(.+)", name)
    if found is None:
        return CheckpointPlace((dict(_MODEL)[name],), False)
    theirs = f"model.layers.{found[1]}.{dict(_LAYER)[found[2]]}"
    if "{}" not in theirs:
        return CheckpointPlace((theirs,), False)
    return CheckpointPlace(tuple(theirs.format(expert) for expert in range(shape[0])), True)


def model_tensors(config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Return what a model saves, as tensors on meta in the model's order, by our names; tied weights once.

    >>> list(model_tensors(LlamaConfig(num_hidden_layers=1, tie_embeddings=True)))[-1]
    'norm.weight'

    Args:
        config: the model's shape.
    """
    with torch.device("meta"):
        model = MoELlama(config) if isinstance(config, MoEConfig) else Llama(config)
    tensors = dict(model.state_dict())
    if config.tie_embeddings:
        del tensors[_HEAD]
    return tensors


def empty_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors that transformers expects and that have no elements, by its names.

    Its Glm4MoeForCausalLM has shared experts of width 0 where there are none.

    Args:
        config: the model's shape.
    """
    if not isinstance(config, MoEConfig) or config.num_shared_experts or _kind_of(config) != "glm4_moe":
        return {}
    wide, flat = (0, config.hidden_size), (config.hidden_size, 0)
    return {
        f"model.layers.{layer}.mlp.shared_experts.{name}.weight": shape
        for layer in range(config.num_dense_layers, config.num_hidden_layers)
        for name, shape in (("gate_proj", wide), ("up_proj", wide), ("down_proj", flat))
    }


def is_left_out(name: str, config: LlamaConfig) -> bool:
    """Tell whether transformers has no place for a tensor of ours: the router's bias of a Qwen3MoeForCausalLM.

    >>> is_left_out("layers.0.mlp.router.bias", MoEConfig(score="softmax"))
    True

    Args:
        name: in our model.
        config: the model's shape.
    """
    return name.endswith("router.bias") and _kind_of(config) == "qwen3_moe"


def is_passed_over(name: str, config: LlamaConfig) -> bool:
    """Tell whether a tensor in a folder is one that a model does without.

    >>> is_passed_over("model.layers.0.self_attn.rotary_emb.inv_freq", LlamaConfig())
    True

    Such are tables that follow from the config, the head where it is the embedding, what has no elements, and layers
    after the last one, which some models have to predict the token after the next.

    Args:
        name: in the folder.
        config: of the folder.
    """
    layer = re.match(r"model\.layers\.([0-9]{1,9})\.", name)
    is_beyond = layer is not None and isinstance(config, MoEConfig) and int(layer[1]) >= config.num_hidden_layers
    is_twin = config.tie_embeddings and name == "lm_head.weight"
    return is_beyond or is_twin or name.endswith("rotary_emb.inv_freq") or name in empty_tensors(config)


# -- config.json -----------------------------------------------------------------------------------------------------

# ours, theirs, and what is meant where it is left out
_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("vocab_size", "vocab_size", None),
    ("hidden_size", "hidden_size", None),
    ("intermediate_size", "intermediate_size", None),
    ("num_hidden_layers", "num_hidden_layers", None),
    ("num_attention_heads", "num_attention_heads", None),
    ("max_seq_len", "max_position_embeddings", 2048),
    ("norm_eps", "rms_norm_eps", 1e-6),
    ("init_std", "initializer_range", 0.02),
    ("tie_embeddings", "tie_word_embeddings", False),
)
_EXPERT_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("experts_per_token", "num_experts_per_tok", None),
    ("expert_intermediate_size", "moe_intermediate_size", None),
)
_GLM_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("num_experts", "n_routed_experts", None),
    ("num_shared_experts", "n_shared_experts", 1),
    ("num_dense_layers", "first_k_dense_replace", 1),
    ("norm_weights", "norm_topk_prob", True),
    ("routed_scale", "routed_scaling_factor", 1.0),
)
_QWEN_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("num_experts", "num_experts", None),
    ("norm_weights", "norm_topk_prob", False),
)
# the keys of rope_parameters, or rope_scaling, with rope_type "llama3"
_ROPE: tuple[tuple[str, str], ...] = (
    ("rope_factor", "factor"),
    ("rope_low_freq_factor", "low_freq_factor"),
    ("rope_high_freq_factor", "high_freq_factor"),
    ("rope_original_seq_len", "original_max_position_embeddings"),
)
_MOST = 2**24  # no size of a model is larger, and products of such sizes are still numbers of elements
# what our models compute, where theirs could also compute something else
_FIXED: tuple[tuple[str, Any], ...] = (("hidden_act", "silu"), ("attention_bias", False))


class _ModelType(NamedTuple):
    """A model of transformers that one of ours computes the same as.

    Args:
        architecture: its class there.
        keys: of config.json: ours, theirs, and what is meant where it is left out.
        fixed: keys of config.json and the only value that they can have.
        ours: keys of our config and the only value that they can have.
        head_dim: what is meant where config.json leaves it out; None: hidden_size / num_attention_heads.
    """

    architecture: str
    keys: tuple[tuple[str, str, Any], ...]
    fixed: dict[str, Any]
    ours: dict[str, Any]
    head_dim: int | None = None


_KINDS = MappingProxyType(
    {
        "llama": _ModelType("LlamaForCausalLM", _KEYS, {**dict(_FIXED), "mlp_bias": False}, {"qk_norm": False}),
        "qwen3": _ModelType(
            "Qwen3ForCausalLM", _KEYS, {**dict(_FIXED), "use_sliding_window": False}, {"qk_norm": True}, head_dim=128
        ),
        "glm4_moe": _ModelType(
            "Glm4MoeForCausalLM",
            _KEYS + _EXPERT_KEYS + _GLM_KEYS,
            {**dict(_FIXED), "use_qk_norm": False, "n_group": 1, "topk_group": 1},
            {"qk_norm": False, "score": "sigmoid"},
        ),
        "qwen3_moe": _ModelType(
            "Qwen3MoeForCausalLM",
            _KEYS + _EXPERT_KEYS + _QWEN_KEYS,
            {**dict(_FIXED), "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
            {"qk_norm": True, "score": "softmax", "num_shared_experts": 0, "num_dense_layers": 0, "routed_scale": 1.0},
        ),
    }
)
"""By model_type."""


def _kind_of(config: LlamaConfig) -> str:
    if isinstance(config, MoEConfig):
        return "glm4_moe" if config.score == "sigmoid" else "qwen3_moe"
    return "qwen3" if config.qk_norm else "llama"


def config_to_json(config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a model of transformers that computes the same.

    It is a LlamaForCausalLM, with `qk_norm` a Qwen3ForCausalLM; with experts a Glm4MoeForCausalLM, or, where the
    router's scores are softmax's, a Qwen3MoeForCausalLM.

    >>> config_to_json(LlamaConfig(), torch.bfloat16)["architectures"]
    ['LlamaForCausalLM']

    Args:
        config: the model's shape.
        dtype: of the weights.

    Raises:
        ValueError: no model there computes the same.
    """
    kind = _KINDS[_kind_of(config)]
    asked = "cannot export to Hugging Face"
    unlike = [name for name, value in kind.ours.items() if getattr(config, name) != value]
    if unlike:
        seen = "   ".join(f"{name}: {getattr(config, name)!r}" for name in unlike)
        hint = ", ".join(f"{name}={kind.ours[name]!r}" for name in unlike)
        raise InvalidValue(asked, f"its {kind.architecture} has {hint} only", seen, hint)
    if isinstance(config, MoEConfig) and config.num_experts < 2:
        seen = f"num_experts: {config.num_experts}"
        raise InvalidValue(asked, "its router needs two experts", seen, "num_experts=2, or LlamaConfig")
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0}
    if config.rope_factor != 1:
        rope |= {"rope_type": "llama3", **{theirs: getattr(config, ours) for ours, theirs in _ROPE}}
    name = str(dtype).removeprefix("torch.")
    is_glm = _kind_of(config) == "glm4_moe"
    return {
        "architectures": [kind.architecture],
        "model_type": _kind_of(config),
        **{theirs: getattr(config, ours) for ours, theirs, _ in kind.keys},
        **kind.fixed,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope_parameters": rope,
        # what releases before 5 read instead
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_factor != 1 else None,
        "torch_dtype": name,
        "dtype": name,
        "bos_token_id": None,
        "eos_token_id": None,
        **({"partial_rotary_factor": 1.0, "num_nextn_predict_layers": 0} if is_glm else {}),
    }


def config_from_json(settings: Mapping[str, Any], asked: str) -> LlamaConfig:
    """Return the config of our model that computes the same; what training alone needs keeps its default.

    >>> config_from_json(config_to_json(LlamaConfig(), torch.float32), "") == LlamaConfig()
    True

    Args:
        settings: the content of a config.json.
        asked: the start of an error message, "cannot ...".

    Raises:
        ValueError: none of our models computes what it says, or something is missing.
    """
    kind = _KINDS.get(str(settings.get("model_type")))
    if kind is None:
        blame = f"there is no model here for model_type {settings.get('model_type')!r}"
        seen = f"architectures: {settings.get('architectures')}"
        hint = f"a folder with model_type {' or '.join(map(repr, _KINDS))}; to train it, train(config, model=...)"
        raise InvalidValue(asked, blame, seen, hint)
    if "num_local_experts" in settings:  # what transformers 5 calls num_experts
        settings = {"num_experts": settings["num_local_experts"], **settings}
    values = {ours: _value(asked, settings, ours, theirs, default) for ours, theirs, default in kind.keys}
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    values["num_key_value_heads"] = _value(asked, settings, "num_key_value_heads", "num_key_value_heads", heads)
    head_dim = _value(asked, settings, "hidden_size", "head_dim", kind.head_dim or hidden // heads)
    values["head_size"] = None if head_dim * heads == hidden else head_dim
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        blame, hint = "its rotary positions are no object with keys", '{"rope_type": "default", "rope_theta": 10000.0}'
        raise InvalidValue(asked, blame, f"config.json: {rope!r}"[:200], hint)
    theta = settings.get("rope_theta", 10_000.0)
    values["rope_theta"] = float(_value(asked, {"rope_theta": theta, **rope}, "rope_theta", "rope_theta", None))
    wanted = {**kind.fixed, "partial_rotary_factor": 1.0}
    found = {name: settings.get(name, value) for name, value in wanted.items()}
    fraction = settings.get("partial_rotary_factor", 0.5 if settings["model_type"] == "glm4_moe" else 1.0)
    found["partial_rotary_factor"] = rope.get("partial_rotary_factor", fraction)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "llama3":
        values |= {ours: _value(asked, rope, ours, theirs, None) for ours, theirs in _ROPE}
    else:
        wanted["rope_type"], found["rope_type"] = "default", rope_type
    for name, value in wanted.items():
        if found[name] != value:
            seen = f"config.json: {name} = {found[name]!r}"
            hint = f"a model with {name} = {value!r}; parallelize_huggingface for models of transformers themselves"
            raise InvalidValue(asked, f"the model here has {name} = {value!r} only", seen, hint)
    values |= kind.ours
    if values.get("score") == "softmax":
        values["bias_update_rate"] = 0.0  # there is no bias there
    try:
        return MoEConfig(**values) if "score" in values else LlamaConfig(**values)
    except (TypeError, ValueError) as error:
        hint = "the config.json that belongs to the weights"
        raise InvalidValue(asked, "config.json describes no model that can be", f"seen: {error}", hint) from None


def _value(asked: str, settings: Mapping[str, Any], ours: str, theirs: str, default: Any) -> Any:
    """Return a value of config.json that is of the kind of our field, and within bounds.

    Args:
        asked: the start of an error message.
        settings: what has the value.
        ours: the field of our config.
        theirs: the key in config.json.
        default: what is meant where it is left out or null; None: it must be there.
    """
    value = default if settings.get(theirs) is None else settings[theirs]
    if value is None:
        raise InvalidValue(asked, f"config.json has no {theirs}", f"keys: {sorted(settings)}", "a complete one")
    (kind,) = (str(field.type) for field in dataclasses.fields(MoEConfig) if field.name == ours)
    try:
        check(asked, kind, **{theirs: value})
    except TypeError as error:
        raise ValueError(str(error)) from None
    least = 0 if theirs in ("n_shared_experts", "first_k_dense_replace") or kind == "float" else 1
    if kind != "bool" and not least <= value <= (_MOST if kind == "int" else sys.float_info.max):
        blame = f"{theirs} must be from {least} to {_MOST}" if kind == "int" else f"{theirs} must be finite, from 0 up"
        raise InvalidValue(asked, blame, f"config.json: {theirs} = {value!r}"[:200], "a complete one")
    return value
