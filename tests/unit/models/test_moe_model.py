"""The Llama with experts on one device: against a mixture written as two loops, and against transformers' GLM-4.5."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import init_parameters
from hyper_parallel.core.expert_parallel import GroupedExperts, Router, set_aux_scale, take_aux, update_expert_bias
from hyper_parallel.core.expert_parallel.experts import grouped, one_by_one
from hyper_parallel.models.moe import MixtureOfExperts, MoEConfig, MoELlama

CONFIG = MoEConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_seq_len=12,
    num_experts=6,
    experts_per_token=2,
    expert_intermediate_size=10,
    num_dense_layers=1,
)
TEXT = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(0))


def mixture(seed: int = 0, **changes: Any) -> MixtureOfExperts:
    """Make one layer with a bias that matters."""
    torch.manual_seed(seed)
    layer = MixtureOfExperts(replace(CONFIG, **changes)).double()
    layer.router.bias.uniform_(-0.2, 0.2)
    return layer


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_()


def routed_by_hand(layer: MixtureOfExperts, token: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
    """Return the experts of one token and their weights, from the formulas."""
    router = layer.router
    logits = [token @ row for row in router.weight]
    if router.score == "sigmoid":
        scores = [1 / (1 + torch.exp(-logit)) for logit in logits]
    else:
        total = sum(torch.exp(logit) for logit in logits)
        scores = [torch.exp(logit) / total for logit in logits]
    ranked = sorted(range(len(scores)), key=lambda expert: -float(scores[expert].detach() + router.bias[expert]))
    chosen = ranked[: router.experts_per_token]
    norm = sum(scores[expert] for expert in chosen) if router.norm_weights else 1.0
    return chosen, [scores[expert] / norm * router.routed_scale for expert in chosen]


def mixture_by_hand(layer: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Go through tokens and experts one by one."""
    rows = []
    for token in x.flatten(0, 1):
        out = torch.zeros_like(token)
        for expert, weight in zip(*routed_by_hand(layer, token), strict=True):
            w1, w2, w3 = (w[expert] for w in (layer.experts.w1, layer.experts.w2, layer.experts.w3))
            out = out + weight * (w2 @ (F.silu(w1 @ token) * (w3 @ token)))
        if layer.shared is not None:
            w1, w2, w3 = layer.shared.w1.weight, layer.shared.w2.weight, layer.shared.w3.weight
            out = out + w2 @ (F.silu(w1 @ token) * (w3 @ token))
        rows.append(out)
    return torch.stack(rows).view(x.shape)


def aux_by_hand(layer: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Return the sum over sequences of the auxiliary loss, formulas 17 to 20 of the DeepSeek-V3 report."""
    router, total = layer.router, torch.zeros((), dtype=x.dtype)
    for sequence in x:
        logits = sequence @ router.weight.T
        scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(-1)
        shares = scores / scores.sum(-1, keepdim=True)
        picks = [expert for token in sequence for expert in routed_by_hand(layer, token)[0]]
        for expert in range(router.num_experts):
            f = router.num_experts / (router.experts_per_token * len(sequence)) * picks.count(expert)
            total = total + f * shares[:, expert].mean()
    return total


def gradients(layer: torch.nn.Module, x: torch.Tensor, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {"x": x, **dict(layer.named_parameters())}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"score": "softmax"},
        {"norm_weights": False, "routed_scale": 2.5},
        {"num_shared_experts": 0, "experts_per_token": 1},
        {"num_shared_experts": 3, "experts_per_token": 6},
        {"score": "softmax", "norm_weights": False, "num_experts": 1, "experts_per_token": 1},
    ],
    ids=str,
)
def test_layer_and_its_gradients_are_those_of_two_loops(changes):
    layer, x = mixture(**changes, aux_loss_weight=0.7), tokens(3, 5, 16)
    y, expected = layer(x), mixture_by_hand(layer, x)
    torch.testing.assert_close(y, expected)
    cotangent = torch.randn_like(y)
    aux = aux_by_hand(layer, x)
    torch.testing.assert_close(layer.router.last_aux, aux.detach())
    found = gradients(layer, x, (y * cotangent).sum())
    wanted = gradients(layer, x, (expected * cotangent).sum() + 0.7 * aux / 3)  # the mean over 3 sequences
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_bias_chooses_and_does_not_weigh():
    layer, x = mixture(experts_per_token=1), tokens(1, 7, 16)
    layer.router.bias.zero_()[4] = 10.0
    chosen, weights = layer.router(x)
    assert chosen.flatten().tolist() == [4] * 7
    plain = mixture(experts_per_token=1, norm_weights=False)
    plain.router.bias.copy_(layer.router.bias)
    scores = torch.sigmoid(x @ plain.router.weight.T)
    torch.testing.assert_close(plain.router(x).weights, scores[..., 4:5])
    assert weights.flatten().tolist() == [1.0] * 7


@pytest.mark.parametrize("shape", [(0, 5, 16), (2, 0, 16), (1, 1, 16)], ids=str)
def test_few_tokens(shape):
    layer, x = mixture(aux_loss_weight=0.5), tokens(*shape)
    y = layer(x)
    assert y.shape == shape
    y.sum().backward()
    assert all(param.grad is not None for param in layer.parameters())
    assert layer.experts.w1.grad.isfinite().all()


def test_scores_are_computed_in_float32():
    layer = mixture().bfloat16()
    layer.router.bias = layer.router.bias.float()
    x = tokens(2, 6, 16).detach().bfloat16()
    chosen, weights = layer.router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = layer.router(x)
    scores = torch.sigmoid(x.float() @ layer.router.weight.float().T)
    assert torch.equal(chosen, (scores + layer.router.bias).topk(2).indices)
    assert weights.dtype == torch.float32
    assert torch.equal(again.chosen, chosen)
    assert torch.equal(again.weights, weights)
    assert layer(x).dtype == torch.bfloat16


@pytest.mark.tier("test")
def test_second_derivatives():
    layer = mixture(aux_loss_weight=0.0)
    x = tokens(2, 2, 16)
    assert torch.autograd.gradgradcheck(lambda x: layer(x).flatten()[:3], (x,), atol=1e-4)


def test_copies_compute_the_same():
    layer, x = mixture(), tokens(2, 5, 16)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.tier("full")
def test_compiled_layer():
    layer, x = mixture(aux_loss_weight=0.5), tokens(2, 5, 16)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    for module in (compiled, layer):
        module(x).sum().backward()
    for twin, param in zip(compiled.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(twin.grad, param.grad)
    assert torch.equal(compiled.router.counts, layer.router.counts)


def count(layer: MixtureOfExperts, x: torch.Tensor) -> list[int]:
    chosen = [expert for token in x.flatten(0, 1) for expert in routed_by_hand(layer, token)[0]]
    return [chosen.count(expert) for expert in range(layer.router.num_experts)]


def test_each_backward_counts_its_tokens_once():
    layer, first, second = mixture(), tokens(2, 5, 16), tokens(1, 4, 16, seed=2)
    layer(first).sum().backward()
    layer(second).sum().backward()
    with torch.no_grad():
        layer(first)
    layer(first)  # nobody asks for gradients
    layer.eval()
    layer(first).sum().backward()
    expected = [a + b for a, b in zip(count(layer, first), count(layer, second), strict=True)]
    assert layer.router.counts.tolist() == expected
    torch.testing.assert_close(
        layer.router.aux_sum, aux_by_hand(layer, first).detach() + aux_by_hand(layer, second).detach()
    )


@pytest.mark.parametrize("kind", list(CheckpointImpl), ids=str)
def test_what_is_computed_again_counts_once(kind):
    layer, x = mixture(aux_loss_weight=0.5), tokens(2, 5, 16)
    plain = copy.deepcopy(layer)
    wrapped = checkpoint_wrapper(layer, checkpoint_impl=kind, preserve_rng_state=False)
    for module in (wrapped, plain):
        module(x).square().sum().backward()
    assert layer.router.counts.tolist() == plain.router.counts.tolist() == count(plain, x)
    assert torch.equal(layer.router.aux_sum, plain.router.aux_sum)
    assert torch.equal(layer.router.weight.grad, plain.router.weight.grad)


def test_a_backward_in_two_parts_counts_once():
    """Zero-bubble schedules of pipelines compute gradients of activations first, and those of weights later."""
    halves = pytest.importorskip("torch.distributed.pipelining._backward")
    layer, x = mixture(aux_loss_weight=0.5), tokens(2, 5, 16)
    found = halves.stage_backward_input([layer(x)], [torch.ones_like(x)], [x], iter(layer.parameters()))
    halves.stage_backward_weight(iter(layer.parameters()), found[1])
    assert layer.router.counts.tolist() == count(layer, x)
    later = {name: param.grad for name, param in layer.named_parameters()}
    wanted = gradients(layer, x, layer(x).sum())
    torch.testing.assert_close({"x": found[0][0], **later}, wanted)


def test_bias_goes_towards_the_mean_load():
    layer, x = mixture(bias_update_rate=0.125), tokens(2, 6, 16)
    layer.router.bias.zero_()
    layer(x).sum().backward()
    load = count(layer, x)
    update_expert_bias(layer)
    assert layer.router.bias.tolist() == [0.125 * ((n < 4) - (n > 4)) for n in load]  # 24 choices of 6 experts
    assert len(set(layer.router.bias.tolist())) > 1
    assert layer.router.counts.tolist() == [0] * 6
    update_expert_bias(layer)  # nothing was counted, so nothing is off the mean
    layer(x).sum().backward()
    update_expert_bias(layer, forget=True)
    assert layer.router.counts.tolist() == [0] * 6
    assert layer.router.bias.tolist() == [0.125 * ((n < 4) - (n > 4)) for n in load]


@pytest.mark.tier("test")
def test_bias_evens_out_a_lopsided_load():
    layer, x = mixture(bias_update_rate=0.01, aux_loss_weight=0.0), tokens(4, 30, 16)
    with torch.no_grad():
        layer.router.weight[0] += 3 * x.detach().mean((0, 1))  # everyone's favourite
        layer.router.bias.zero_()
    before = max(count(layer, x))
    for _ in range(100):
        layer(x).sum().backward()
        update_expert_bias(layer)
    assert max(count(layer, x)) < 50 < before  # the mean is 40


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_scale_of_the_auxiliary_loss(weight):
    layer, x = mixture(aux_loss_weight=weight), tokens(2, 5, 16)
    set_aux_scale(layer, 0.25)
    found = gradients(layer, x, (layer(x) * 0).sum())
    wanted = torch.autograd.grad(weight * 0.25 * aux_by_hand(layer, x), layer.router.weight)[0]
    torch.testing.assert_close(found["router.weight"], wanted)
    assert (layer.router.last_aux is None) == (weight == 0)
    taken = take_aux(layer)["router"]
    torch.testing.assert_close(taken, aux_by_hand(layer, x).detach() if weight else torch.zeros_like(taken))
    assert take_aux(layer)["router"] == 0


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"num_dense_layers": 3}, {"num_shared_experts": 0}])
def test_counts_of_parameters(changes):
    config = replace(CONFIG, **changes)
    model = MoELlama(config)
    assert config.num_parameters() == sum(param.numel() for param in model.parameters())
    idle = config.num_experts - config.experts_per_token
    unused = sum(
        param.numel() * idle // config.num_experts for name, param in model.named_parameters() if ".experts." in name
    )
    assert config.num_active_parameters() == config.num_parameters() - unused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be .* at least 1\n  num_experts: 0"),
        ({"expert_intermediate_size": 0}, "expert_intermediate_size must be .* at least 1"),
        ({"num_shared_experts": -1}, "num_shared_experts must be .* at least 0\n  num_shared_experts: -1"),
        ({"experts_per_token": 7}, "num_experts=6: experts_per_token must be from 1 to 6.*try: experts_per_token=6"),
        ({"num_dense_layers": 4}, "num_hidden_layers=3 dense: num_dense_layers must be from 0 to 3"),
        ({"score": "relu"}, "there is no kind of score 'relu'.*try: score=one of 'sigmoid', 'softmax'"),
        ({"hidden_size": 12}, "hidden_size: 12   num_attention_heads: 4"),
    ],
    ids=str,
)
def test_shapes_that_are_refused(changes, message):
    with pytest.raises(ValueError, match="(?s)" + message.replace("(", "\\(")):
        replace(CONFIG, **changes)


def test_weights_depend_on_the_seed_only():
    built = [MoELlama.build(CONFIG, seed=seed).state_dict() for seed in (5, 5, 6)]
    assert all(torch.equal(built[0][name], built[1][name]) for name in built[0])
    assert not torch.equal(built[0]["layers.1.mlp.experts.w1"], built[2]["layers.1.mlp.experts.w1"])
    assert built[0]["layers.1.mlp.router.bias"].tolist() == [0.0] * 6


def test_what_writes_to_the_residual_stream_starts_smaller():
    state = MoELlama.build(replace(CONFIG, hidden_size=64, num_attention_heads=4)).state_dict()
    small = {name for name, value in state.items() if value.ndim > 1 and value.std() < 0.03}
    expected = {f"layers.{i}.attention.wo.weight" for i in range(3)} | {"layers.0.mlp.w2.weight"}
    expected |= {f"layers.{i}.mlp.{name}" for i in (1, 2) for name in ("experts.w2", "shared.w2.weight")}
    assert small == expected


def test_from_the_meta_device():
    with torch.device("meta"):
        model = MoELlama(CONFIG)
    init_parameters(model, seed=1)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    model(TEXT).sum().backward()
    assert model.layers[1].mlp.router.counts.sum() == TEXT.numel() * 2


def test_stages_of_a_pipeline_make_the_model():
    model = MoELlama.build(CONFIG)
    first = copy.deepcopy(model).keep(range(2), embed=True, head=False)
    last = copy.deepcopy(model).keep(range(2, 3), embed=False, head=True)
    assert torch.equal(last(first(TEXT)), model(TEXT))
    assert {*first.state_dict(), *last.state_dict()} == set(model.state_dict())


def test_state_dict_has_the_bias_and_no_counts():
    model = MoELlama.build(CONFIG)
    names = {name.rpartition(".")[2] for name in model.state_dict() if ".router." in name}
    assert names == {"weight", "bias"}


def glm(config: MoEConfig) -> Any:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Glm4MoeForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no GLM-4.5")
    return transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0},
            attention_bias=False,
            use_qk_norm=False,
            moe_intermediate_size=config.expert_intermediate_size,
            n_routed_experts=config.num_experts,
            num_local_experts=config.num_experts,
            num_experts_per_tok=config.experts_per_token,
            n_shared_experts=config.num_shared_experts,
            first_k_dense_replace=config.num_dense_layers,
            norm_topk_prob=config.norm_weights,
            routed_scaling_factor=config.routed_scale,
            n_group=1,
            topk_group=1,
            tie_word_embeddings=config.tie_embeddings,
            use_cache=False,
            experts_implementation="eager",
        )
    )


THEIRS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{f"attention.w{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{
        f"mlp.{inside}{ours}.weight": f"mlp.{theirs}{kind}_proj.weight"
        for inside, theirs in (("", ""), ("shared.", "shared_experts."))
        for ours, kind in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
    "mlp.experts.w2": "mlp.experts.down_proj",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
}


def as_theirs(ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of our model by the names, and in the shapes, of GLM-4.5."""
    found = {}
    for name, value in ours.items():
        layer, dot, _rest = name.partition(".mlp.experts.w1")
        if dot:
            both = torch.cat((value, ours[f"{layer}.mlp.experts.w3"]), dim=1)
            found[f"model.{layer}.mlp.experts.gate_up_proj"] = both
        elif not name.endswith("experts.w3"):
            prefix, inside = ("", name) if not name.startswith("layers.") else name.split(".", 2)[1:]
            found[f"model.layers.{prefix}.{THEIRS[inside]}" if prefix else THEIRS[inside]] = value
    return found


@pytest.mark.parametrize("changes", [{}, {"routed_scale": 2.5, "norm_weights": False, "num_shared_experts": 2}])
def test_logits_and_gradients_are_those_of_transformers(changes):
    config = replace(CONFIG, aux_loss_weight=0.0, init_std=0.3, **changes)
    theirs, ours = glm(config), MoELlama.build(config).double()
    for module in ours.modules():
        if isinstance(module, Router):
            module.bias.uniform_(-0.2, 0.2, generator=torch.Generator().manual_seed(4))
    theirs = theirs.double()
    theirs.load_state_dict(as_theirs(ours.state_dict()))
    logits, expected = ours(TEXT), theirs(TEXT).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)  # theirs rounds scores and norms to float32
    for out in (logits, expected):
        F.cross_entropy(out[:, :-1].flatten(0, 1), TEXT[:, 1:].flatten()).backward()
    wanted = {name: param.grad for name, param in theirs.named_parameters()}
    found = as_theirs({name: param.grad for name, param in ours.named_parameters()})
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=2e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.tier("test")
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from([8, 16]), st.sampled_from([8, 24]))
def test_grouped_products_are_those_of_one_expert_after_the_other(counts: list[int], hidden: int, inner: int) -> None:
    draw = torch.Generator().manual_seed(sum(counts) + hidden)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).bfloat16().requires_grad_()

    experts, total = len(counts), sum(counts)
    sizes = [(total, hidden), (experts, inner, hidden), (experts, hidden, inner), (experts, inner, hidden)]
    given_ = [made(*size) for size in sizes]
    grad = torch.randn(total, hidden, generator=draw).bfloat16()
    found = []
    for out in (grouped(given_[0], torch.tensor(counts), *given_[1:]), one_by_one(given_[0], counts, *given_[1:])):
        found.append([out, *torch.autograd.grad(out, given_, grad)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("dtype", "inner", "products"),
    [(torch.bfloat16, 16, 3), (torch.bfloat16, 12, 0), (torch.float32, 16, 0), (torch.float64, 16, 0)],
)
def test_which_experts_take_grouped_products(dtype: torch.dtype, inner: int, products: int) -> None:
    experts = GroupedExperts(num_experts=3, hidden_size=8, inner_size=inner).to(dtype)
    chosen = torch.tensor([[0, 2], [2, 1]])
    with _Names() as names:
        experts(torch.ones(2, 8, dtype=dtype), chosen, torch.ones(2, 2, dtype=dtype))
    assert names.seen.count("aten._grouped_mm.default") == products


class _Names(TorchDispatchMode):
    """Names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
