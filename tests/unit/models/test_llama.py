"""The reference Llama against naive twins of its parts, and its weights against where they are drawn."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import sim
from hyper_parallel.models import Llama, LlamaConfig
from hyper_parallel.models.llama import Attention, _rope_tables, _rotate

SMALL = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_seq_len=16,
)


def tokens(batch: int = 2, seq: int = 12) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameter_count_is_that_of_the_model(tied: bool) -> None:
    config = LlamaConfig(**{**vars(SMALL), "tie_embeddings": tied})
    model = Llama.build(config)
    assert sum(param.numel() for param in model.parameters()) == config.num_parameters()
    assert (model.head.weight is model.embed.weight) == tied


def test_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = Llama.build(SMALL, seed=3).state_dict()
    assert torch.equal(before, torch.get_rng_state()), "torch's default generator must not move"
    torch.manual_seed(6)
    again, other = Llama.build(SMALL, seed=3).state_dict(), Llama.build(SMALL, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)


def test_every_simulated_rank_draws_the_same_weights() -> None:
    states = sim.run(lambda: Llama.build(SMALL, seed=3).state_dict(), world_size=3)
    here = Llama.build(SMALL, seed=3).state_dict()
    assert all(torch.equal(state[name], here[name]) for state in states for name in here)


def test_a_meta_model_becomes_the_same_model() -> None:
    with torch.device("meta"):
        model = Llama(SMALL)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    model.init_weights(seed=3)
    torch.testing.assert_close(model(tokens()), Llama.build(SMALL, seed=3)(tokens()), rtol=0, atol=0)


def test_the_residual_stream_keeps_its_scale() -> None:
    model = Llama.build(LlamaConfig(num_hidden_layers=8), seed=0)
    assert model.layers[0].mlp.w2.weight.std().item() == pytest.approx(0.05 / 4, rel=0.02)
    assert model.layers[0].mlp.w1.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert torch.equal(model.norm.weight, torch.ones(128))


@sim.ranks(2, backends=("sim",))
def test_weights_that_are_split_already_are_refused(ctx) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    model = Llama.build(SMALL)
    mesh = init_device_mesh("cpu", (2,))
    model.norm.weight = torch.nn.Parameter(distribute_tensor(model.norm.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"these are sharded already\n.*\n  try: model.init_weights\(seed\) first"):
        model.init_weights(0)


def test_no_position_sees_the_future() -> None:
    model, ids = Llama.build(SMALL), tokens()
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocab_size
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-4, (
        "every later position must see the change"
    )


def test_attention_is_the_formula() -> None:
    """Against loops over batch, head and position, with each key and value head shared by two query heads."""
    layer = Attention(SMALL)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    cos, sin = (table[:5] for table in _rope_tables(SMALL))
    size, q, k, v = SMALL.head_dim, layer.wq(x), layer.wk(x), layer.wv(x)

    def turned(vector: torch.Tensor, position: int) -> torch.Tensor:
        half, out = size // 2, torch.empty(size)
        for i in range(half):
            angle = position * SMALL.rope_theta ** (-2 * i / size)
            a, b = vector[i], vector[i + half]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    expected = torch.zeros(2, 5, 32)
    for batch in range(2):
        for head in range(4):
            here, shared = slice(head * size, (head + 1) * size), slice(head // 2 * size, (head // 2 + 1) * size)
            for row in range(5):
                query = turned(q[batch, row, here], row)
                scores = [query @ turned(k[batch, past, shared], past) / math.sqrt(size) for past in range(row + 1)]
                weights = torch.stack(scores).softmax(0)
                expected[batch, row, here] = weights @ v[batch, : row + 1, shared]
    torch.testing.assert_close(layer(x, cos, sin), expected @ layer.wo.weight.T, rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_on_the_distance_only() -> None:
    cos, sin = _rope_tables(SMALL)
    query, key = torch.randn(2, SMALL.head_dim, generator=torch.Generator().manual_seed(0))

    def score(at: int, past: int) -> torch.Tensor:
        return _rotate(query, cos[at], sin[at]) @ _rotate(key, cos[past], sin[past])

    torch.testing.assert_close(score(5, 2), score(13, 10))
    assert not torch.isclose(score(5, 2), score(5, 3), rtol=1e-3)


def test_frequencies_are_lowered_as_by_metas_three_cases() -> None:
    """Each pair by the wavelengths and cases of `apply_scaling` of meta-llama/llama-models, one after the other."""
    seen = set()
    for low, high, original in [(1.0, 4.0, 8192), (1.0, 4.0, 100), (0.5, 16.0, 300)]:
        scaling = {"rope_factor": 6.0, "rope_low_freq_factor": low, "rope_high_freq_factor": high}
        config = LlamaConfig(**{**vars(SMALL), **scaling, "rope_original_seq_len": original, "hidden_size": 128})
        cos, _ = _rope_tables(config)
        for i in range(16):
            frequency = config.rope_theta ** (-i / 16)
            wavelength = 2 * math.pi / frequency
            if wavelength < original / high:
                lowered, case = frequency, "fast"
            elif wavelength > original / low:
                lowered, case = frequency / 6.0, "slow"
            else:
                smooth = (original / wavelength - low) / (high - low)
                lowered, case = (1 - smooth) * frequency / 6.0 + smooth * frequency, "between"
            seen.add(case)
            assert cos[:, i].tolist() == pytest.approx([math.cos(p * lowered) for p in range(16)], abs=2e-6), (i, case)
    assert seen == {"fast", "slow", "between"}


def test_every_parameter_gets_a_gradient() -> None:
    model, ids = Llama.build(SMALL), tokens()
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    silent = [name for name, param in model.named_parameters() if param.grad is None or not param.grad.abs().sum()]
    assert silent == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be .* at least 1\n  num_hidden_layers: 0"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size: 32   num_attention_heads: 3.*try: hidden"),
        ({"num_key_value_heads": 3}, r"=3 cannot be shared among num_attention_heads=4.*one of \[1, 2, 4\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        LlamaConfig(**{**vars(SMALL), **changes})


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a sequence of 17 tokens: .* shorter ones\n  max_seq_len: 16\n  try: max_seq_len=17"
    ):
        Llama.build(SMALL)(torch.zeros(1, 17, dtype=torch.long))
