"""Models of estimates: their sizes are the published ones, and they compute, split and run without values."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sim
from benchmarks.published.gpt import GPT, GPTConfig, GPTSpec, gpt3_175b, gpt_plan, gpt_tiny
from benchmarks.published.predict import spec_of
from benchmarks.published.step import PublishedRecipe
from benchmarks.published.zoo import (
    EagerRMSNorm,
    FusedAttention,
    LatentAttention,
    MathAttention,
    MLAConfig,
    MLALlama,
    deepseek_v3,
    mla_plan,
    use_kernels,
)
from hyper_parallel.core.machine.toml_file import read_toml
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.shard.api import shard_module
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.models import llama
from hyper_parallel.models.hf_names import config_to_json
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.models.plans import llama_plan
from hyper_parallel.trainer.metrics import flops_per_token
from sim.mesh import models
from sim.mesh.estimate import estimate
from sim.mesh.job import Job
from sim.mesh.models import find_model, model_names
from sim.mesh.program import Comm
from sim.mesh.recipe import Routing
from sim.mesh.spec import Custom, naming_modules
from sim.mesh.tracing.kernels import AcceleratorKernels
from sim.mesh.tracing.trace import trace

IDS = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))

# -- sizes -----------------------------------------------------------------------------------------------------------


def counted(spec):
    with torch.device("meta"):
        return sum(param.numel() for param in spec.build(16).parameters())


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", model_names())
def test_presets_have_the_published_sizes(name):
    spec = find_model(name)
    stated = read_toml(models._FILE)[spec.name]
    assert stated["source"]
    # What has the shape of the published model has its very parameters; what is like it has as many.
    rough = 2e-3 if "like" in stated else 0
    if "parameters" in stated:
        assert spec.num_parameters == pytest.approx(stated["parameters"], rel=rough, abs=0)
    if "active" in stated:
        assert spec.num_active_parameters == pytest.approx(stated["active"], rel=0.12)
    assert len(spec.layer_kinds) == spec.num_layers
    assert spec.flops_per_token(2048) > 6 * (spec.num_active_parameters - 2 * spec.vocab_size * spec.hidden_size)


SHAPES = ["llama-tiny", "moe-tiny", gpt_tiny(), "llama3-8b", "qwen3-30b-a3b", gpt3_175b()]


@pytest.mark.parametrize("model", SHAPES, ids=lambda model: getattr(model, "name", model))
def test_the_models_have_as_many_parameters_as_their_shapes_say(model):
    assert counted(find_model(model)) == find_model(model).num_parameters


def test_gpt3_has_its_published_size():
    assert gpt3_175b().num_parameters == pytest.approx(175e9, rel=3e-3)


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(head_size=48, qk_norm=True),
        MoEConfig(head_size=48, qk_norm=True, num_dense_layers=2),
        GPTConfig(activation="swiglu", bias=False, positions="rotary", tie_embeddings=False),
        GPTConfig(activation="swiglu", num_key_value_heads=2, head_size=24, embedding_norm=True, positions="alibi"),
        GPTConfig(activation="squared-relu", bias=False, intermediate_size=100, positions="rotary"),
        GPTConfig(bias=False),
    ],
    ids=str,
)
def test_parameters_and_flops_of_shapes(config):
    spec = spec_of(config)
    assert counted(spec) == spec.num_parameters
    if isinstance(config, GPTConfig):
        custom = Custom(lambda: GPT(config), lambda b, s: torch.zeros(b, s, dtype=torch.long))
        assert find_model(custom).flops_per_token(64) == pytest.approx(spec.flops_per_token(64), rel=1e-9)
    else:
        matrices = spec.num_active_parameters - sum(
            param.numel() for param in meta(config).parameters() if param.ndim == 1
        )
        matrices -= config.vocab_size * config.hidden_size
        attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * 64
        assert flops_per_token(config, 64) == 6 * matrices + attention


def meta(config):
    with torch.device("meta"):
        return MoELlama(config) if isinstance(config, MoEConfig) else Llama(config)


def test_names():
    assert find_model(" Llama3_8B").name == "llama3-8b"
    assert find_model("llama3.1-405b") == find_model("llama3-405b")
    assert find_model(find_model("moe-tiny")).name == "moe-tiny"
    assert find_model(MoEConfig(num_experts=16)).name == "moe-2.78m"
    assert find_model(GPTSpec.of(GPTConfig())).family == "gpt"
    assert find_model("deepseek-v3-like").layer_kinds[:4] == ("dense", "dense", "dense", "experts")
    with pytest.raises(ValueError, match="there is no model 'lama3-8b'") as error:
        find_model("lama3-8b")
    assert "try: 'llama3-8b', a LlamaConfig" in str(error.value)
    with pytest.raises(TypeError, match="model is a MLAConfig"):
        find_model(LATENT)  # not the experts that it inherits from
    with pytest.raises(TypeError, match="model is a Sequential") as error:
        find_model(nn.Sequential())
    assert "sim.mesh.Custom(...)" in str(error.value)


def test_tables_are_as_long_as_the_sequences():
    with torch.device("meta"):
        model = find_model("llama3-8b").build(4096, range(1), head=False)
    assert model.cos.shape == (4096, 128)
    assert [name for name, _ in model.named_children()] == ["embed", "layers"]
    assert [number for number, _ in find_model("llama3-8b").blocks(model)] == [0]


# -- heads that are not a part of the width --------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_head_size_and_norms_of_heads():
    usual, wide = LlamaConfig(), LlamaConfig(head_size=64, qk_norm=True)
    assert (usual.head_dim, wide.head_dim) == (32, 64)
    assert LlamaConfig(head_size=32).num_parameters() == usual.num_parameters()
    layer = Llama.build(wide).layers[0].attention
    assert layer.wq.weight.shape == (256, 128)
    assert layer.wk.weight.shape == (128, 128)
    assert layer.wo.weight.shape == (128, 256)
    assert Llama.build(usual).layers[0].attention.q_norm is None
    more = set(Llama.build(wide).state_dict()) - set(Llama.build(usual).state_dict())
    assert more == {f"layers.{n}.attention.{norm}.weight" for n in range(4) for norm in ("q_norm", "k_norm")}
    q = torch.randn(1, 4, 5, 64)
    torch.testing.assert_close(layer.q_norm(7 * q), layer.q_norm(q), atol=1e-4, rtol=1e-4)
    assert LlamaConfig(hidden_size=100, num_attention_heads=3, num_key_value_heads=3, head_size=8).head_dim == 8
    with pytest.raises(ValueError, match="so head_size is even\n  head_size: 7\n  try: head_size=8"):
        LlamaConfig(head_size=7)
    for config, architecture in ((wide, "Qwen3ForCausalLM"), (LlamaConfig(head_size=64), "LlamaForCausalLM")):
        written = config_to_json(config, torch.float32)
        assert (written["head_dim"], written["architectures"]) == (64, [architecture])


QWEN = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_size=12,
    qk_norm=True,
    max_seq_len=16,
)
RECIPES = [
    PublishedRecipe(),
    PublishedRecipe().having(attention="math", norm="eager"),
    PublishedRecipe().having(attention="math-recomputed", sequence_parallel=False),
]


@pytest.mark.tier("test")
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_llama_with_wide_heads_is_split_right(recipe):
    plan = llama_plan(QWEN, "tp=2", sequence_parallel=recipe.sequence_parallel)
    report = sim.verify_plan(lambda: use_kernels(Llama.build(QWEN), recipe), (IDS,), "tp=2", plan, optimizer_fn=None)
    assert report.ok, report.table()


# -- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_by_products_is_attention(recomputed, biased):
    def compute(attend):
        generator = torch.Generator().manual_seed(0)
        shapes = ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
        q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
        bias = torch.randn(4, 1, 6, generator=generator, dtype=torch.float64) if biased else None
        out = attend(q, k, v, bias)
        out.square().sum().backward()
        return out, q.grad, k.grad, v.grad

    for found, expected in zip(compute(MathAttention(recomputed=recomputed)), compute(FusedAttention()), strict=True):
        torch.testing.assert_close(found, expected)


def saved_bytes(attend):
    q, k, v = (torch.randn(1, 4, 32, 8, requires_grad=True) for _ in range(3))
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x
    ):
        out = attend(q, k, v)
    del out
    scores = 4 * 32 * 32
    return sum(x.untyped_storage().nbytes() for x in kept.values() if x.numel() == scores) / scores


def test_what_attention_keeps_of_each_score():
    assert saved_bytes(MathAttention()) == 4  # the softmax, in float32
    assert saved_bytes(MathAttention(dropout=0.1)) == 4 + 1 + 4  # its mask, and what it leaves
    assert saved_bytes(FusedAttention()) == 0


def test_kernels_of_a_recipe():
    model = use_kernels(Llama(QWEN), PublishedRecipe().having(attention="math", norm="eager"))
    attends = {id(layer.attention.attend) for layer in model.layers}
    assert len(attends) == 1
    assert not any(isinstance(module, nn.RMSNorm) for module in model.modules())
    assert isinstance(model.layers[0].attention.q_norm, EagerRMSNorm)
    reference = Llama(QWEN)
    reference.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(IDS), reference(IDS), atol=1e-5, rtol=1e-4)
    flash = use_kernels(GPT(GPTConfig(attention_dropout=0.1)), PublishedRecipe())
    assert flash.layers[0].attention.attend == FusedAttention(0.1)
    kept = use_kernels(GPT(GPTConfig(attention_dropout=0.1)), PublishedRecipe().having(attention="math"))
    assert kept.layers[0].attention.attend == MathAttention(0.1)


# -- GPT -------------------------------------------------------------------------------------------------------------

SMALL = GPTConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_seq_len=16)


def small_gpt(**changes):
    torch.manual_seed(0)
    return GPT(dataclasses.replace(SMALL, **changes))


def test_gpt_attends_to_nothing_later():
    for changes in ({}, {"positions": "alibi"}, {"positions": "rotary", "num_key_value_heads": 2}):
        model = small_gpt(**changes).eval()
        later = IDS.clone()
        later[:, 5:] = 0
        here, there = model(IDS), model(later)
        torch.testing.assert_close(here[:, :5], there[:, :5])
        assert not torch.allclose(here[:, 5:], there[:, 5:])


def test_gpt_is_what_its_words_say():
    model = small_gpt(num_key_value_heads=2)
    layer, x = model.layers[0], torch.randn(2, 6, 32)
    rows = layer.attention.wqkv.weight.view(2, 4, 8, 32)  # for each key head: its two query heads, the key, the value
    bias = layer.attention.wqkv.bias.view(2, 4, 8)
    parts = torch.einsum("bsd,gpcd->bgpsc", x, rows) + bias[None, :, :, None]
    q, k, v = parts[:, :, :2].flatten(1, 2), parts[:, :, 2], parts[:, :, 3]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = out.transpose(1, 2).flatten(2) @ layer.attention.wo.weight.T
    torch.testing.assert_close(layer.attention(x), expected, atol=1e-5, rtol=1e-4)
    mlp = small_gpt(activation="squared-relu").layers[0].mlp
    torch.testing.assert_close(mlp(x), mlp.w2(F.relu(mlp.w1(x)) ** 2))
    gated = small_gpt(activation="swiglu").layers[0].mlp
    torch.testing.assert_close(gated(x), gated.w2(F.silu(gated.w1(x)) * gated.w3(x)))
    near = small_gpt(positions="alibi")
    near.heads = slice(2, 4)
    (bias,) = near.where(3, torch.device("cpu"))
    torch.testing.assert_close(bias[:, 0], torch.tensor([[0, 2**-6, 2**-5], [0, 2**-8, 2**-7]], dtype=torch.float32))


def test_gpt_drops_in_training_only():
    for recipe in (PublishedRecipe().having(attention="math"), PublishedRecipe().having(attention="flash")):
        for changes in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
            model = use_kernels(small_gpt(**changes), recipe)
            assert not torch.equal(model(IDS), model(IDS))
            with torch.no_grad():
                assert torch.equal(model.eval()(IDS), model(IDS))


def test_stages_of_a_gpt_are_the_whole():
    whole = small_gpt(tie_embeddings=False, positions="alibi", embedding_norm=True)
    first, last = (small_gpt(tie_embeddings=False, positions="alibi", embedding_norm=True) for _ in range(2))
    first.keep(range(1), embed=True, head=False)
    last.keep(range(1, 2), embed=False, head=True)
    torch.testing.assert_close(last(first(IDS)), whole(IDS))
    names = {name for stage in (first, last) for name, _ in stage.named_parameters()}
    assert names == {name for name, _ in whole.named_parameters()}


ROTARY = {"positions": "rotary", "activation": "squared-relu", "bias": False, "head_size": 10}


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("changes", "along"),
    [
        ({"activation": "swiglu"}, True),
        ({"dropout": 0.1}, False),
        ({"positions": "alibi", "embedding_norm": True, "tie_embeddings": False}, True),
        ({"positions": "alibi", "embedding_norm": True}, False),
        ({**ROTARY, "num_key_value_heads": 2}, True),
    ],
    ids=str,
)
def test_a_gpt_is_split_right(changes, along):
    changes = {"num_hidden_layers": 1, **changes}

    def split(model, mesh):
        return shard_module(model, mesh, gpt_plan(model, mesh, sequence_parallel=along))

    train = "dropout" not in changes  # without the sequence split, ranks along tp would need one seed
    report = sim.verify_plan(
        lambda: small_gpt(**changes), (IDS,), "tp=2", parallelize=split, optimizer_fn=None, train=train
    )
    assert report.ok, report.table()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("attention", "scores"), [("math", 5), ("math-recomputed", 0)])
def test_what_a_block_keeps_is_as_published(batch, attention, scores):
    """Korthikanti et al. 2022, equation 1: s b h (34 + 5 a s / h) bytes, and 34 s b h without the attention's core."""
    config = GPTConfig(hidden_size=768, num_hidden_layers=1, num_attention_heads=12, dropout=0.1, attention_dropout=0.1)
    seq, kept = 512, {}
    with FakeTensorMode():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            block = use_kernels(GPT(config), PublishedRecipe().having(attention=attention)).layers[0]
        finally:
            torch.set_default_dtype(before)
        own = {param.untyped_storage()._cdata for param in block.parameters()}
        x = torch.empty(batch, seq, 768, dtype=torch.bfloat16, requires_grad=True)

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = block(x)
        assert out.shape == x.shape
    published = seq * batch * 768 * (34 + scores * 12 * seq / 768)
    assert sum(kept.values()) == pytest.approx(published, rel=1e-3)


def test_a_gpt_whose_heads_ranks_cannot_share():
    with pytest.raises(ValueError, match="cannot plan the GPT: the 8 ranks along 'tp' cannot share"):
        gpt_plan(SMALL, {"tp": 8})


# -- latent attention ------------------------------------------------------------------------------------------------

LATENT = MLAConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_seq_len=16,
    num_dense_layers=1,
    query_rank=20,
    latent_rank=12,
    plain_size=6,
    turned_size=4,
    value_size=8,
)


def test_latent_attention_is_what_its_words_say():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer, x = LatentAttention(LATENT), torch.randn(2, 5, 32)
    cos, sin = torch.ones(5, 4), torch.zeros(5, 4)  # no turning
    q = layer.wq(layer.q_norm(layer.wq_down(x))).view(2, 5, 4, 10)
    latent = layer.wkv_down(x)
    kv = layer.wkv(layer.kv_norm(latent[..., :12])).view(2, 5, 4, 14)
    k = torch.cat((kv[..., :6], latent[:, :, None, 12:].expand(2, 5, 4, 4)), -1)
    q, k, v = (part.transpose(1, 2) for part in (q, k, kv[..., 6:]))
    scores = (q @ k.mT / math.sqrt(10)).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ layer.wo.weight.T
    torch.testing.assert_close(layer(x, cos, sin), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.tier("test")
@pytest.mark.parametrize("along", [True, False], ids=["sequence", "whole"])
def test_latent_attention_is_split_right(along):
    plan = mla_plan(LATENT, "tp=2", sequence_parallel=along)
    report = sim.verify_plan(lambda: MLALlama.build(LATENT), (IDS,), "tp=2", plan, optimizer_fn=None)
    assert report.ok, report.table()


@pytest.mark.tier("full")
@pytest.mark.parametrize("degrees", [{"ep": 2, "tp": 2}, {"tp": 2, "fold_experts": True}], ids=["beside", "folded"])
def test_ranks_along_tp_send_their_own_part_of_the_sequence_to_whole_experts(degrees):
    """With etp=1 the experts get each token once, with whatever attention is before them."""
    experts = {"num_experts": 4, "experts_per_token": 2, "num_dense_layers": 0}
    latent = dataclasses.replace(LATENT, **experts)
    names = [field.name for field in dataclasses.fields(MoEConfig) if field.name != "head_size"]
    plain = MoEConfig(**{name: getattr(latent, name) for name in names})
    dims = ParallelDims(**degrees, world_size=2 * degrees.get("ep", 1))
    rows = [
        [
            event.size
            for segment in trace(Job(spec_of(config), dims, 1, 16, PublishedRecipe().having(level=1)))[
                0
            ].segments.values()
            for event in segment.events
            if isinstance(event, Comm) and event.op == "all_to_all" and not event.dtype.startswith("int")
        ]
        for config in (latent, plain)
    ]
    assert rows[0] == rows[1] != []


@pytest.mark.tier("full")
def test_parameters_and_flops_with_latent_attention():
    config = dataclasses.replace(LATENT, num_hidden_layers=3, plain_size=4, num_experts=4)  # values as wide as keys
    for given in (config, dataclasses.replace(config, query_rank=0, tie_embeddings=True)):
        spec = spec_of(given)
        assert counted(spec) == spec.num_parameters

        def module(given=given):
            model = MLALlama(given)
            Routing().give_to(model)
            return model

        counter = find_model(Custom(module, ids))
        assert counter.flops_per_token(16) == pytest.approx(spec.flops_per_token(16), rel=1e-9)
    assert deepseek_v3().num_parameters == 671_026_404_352


# -- any module ------------------------------------------------------------------------------------------------------


def ids(batch, seq_len):
    return torch.zeros(batch, seq_len, dtype=torch.long)


class Conv(nn.Module):
    """Down, up, and a shortcut between."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.inner = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in "ab"
        )
        self.up = nn.ConvTranspose2d(8, 3, 2, stride=2)

    def forward(self, x):
        x = self.down(x)
        for block in self.inner:
            x = x + block(x)
        return self.up(x)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        return self.head(self.encoder(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


def hf_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    config._attn_implementation = "sdpa"
    return Custom(
        lambda: transformers.LlamaForCausalLM(config),
        lambda b, s: {"input_ids": ids(b, s), "labels": ids(b, s)},
        name="hf-llama",
    )


CUSTOM = {
    "mlp": (lambda: Custom(lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)),
                           lambda b, s: torch.zeros(b, s, 8)), 0, None),
    "mlp by blocks": (lambda: Custom(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in "abc")),
                                     lambda b, s: torch.zeros(b, s, 8), blocks=""), 3, ""),
    "conv": (lambda: Custom(Conv, lambda b, s: torch.zeros(b, 3, 32, 32)), 2, "inner"),
    "vit": (lambda: Custom(ViT, lambda b, s: (torch.zeros(b, 3, 16, 16),)), 3, "encoder.layers"),
    "transformers": (hf_llama, 3, "model.layers"),
}  # fmt: skip


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", CUSTOM)
def test_any_module_runs_without_values(name):
    make, blocks, path = CUSTOM[name]
    spec = find_model(make())
    with FakeTensorMode():
        model = spec.build(16)
        inputs = spec.inputs(2, 16)
        with naming_modules():
            loss = spec.loss(spec.call(model, inputs), inputs)
            loss.backward()
        assert loss.shape == ()
        assert all(param.grad is not None for param in model.parameters())
        assert spec.blocks_path(model) == path
        assert [number for number, _ in spec.blocks(model)] == list(range(blocks))
    assert spec.num_layers == blocks
    assert len(set(spec.layer_kinds)) <= 1
    assert spec.num_parameters > 0
    assert spec.flops_per_token(16) > 0
    assert not spec.has_stages
    with pytest.raises(ValueError, match="has no method keep"):
        spec.build(16, range(1), head=False)


def test_flops_of_a_module():
    spec = find_model(CUSTOM["mlp"][0]())
    # twice for each weight forward, once more for the gradient of the weight, and of the input but the first one's
    assert spec.flops_per_token(4) == 2 * 2 * 8 * 32 + 2 * 2 * 8 * 32 + 2 * 8 * 32


class Picky(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), Inner(act)

    def forward(self, x):
        return self.inner(self.first(x))


class Inner(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x)


@pytest.mark.parametrize(
    ("act", "operation"),
    [
        (lambda x: x * x.sum().item(), "aten._local_scalar_dense.default"),
        (lambda x: x[x > 0], "aten.nonzero.default"),
        (lambda x: x if x.sum() > 0 else -x, "aten._local_scalar_dense.default"),
        (lambda x: x.tolist() and x, "aten._local_scalar_dense.default"),
    ],
    ids=["item", "mask", "if", "tolist"],
)
def test_sizes_that_depend_on_values_are_named(act, operation):
    spec = find_model(Custom(lambda: Picky(act), lambda b, s: torch.zeros(b, s, 8)))
    with pytest.raises(ValueError, match="cannot estimate the model: module 'inner'") as error:
        spec.flops_per_token(4)
    assert "(Inner) reads values, or makes a tensor whose size depends on values" in str(error.value)
    assert f"operation: {operation}" in str(error.value)
    assert "try: sizes from shapes; torch.where(mask, a, b)" in str(error.value)


@pytest.mark.parametrize(
    ("act", "message", "operation"),
    [
        (lambda x: torch.fft.fft(x.bfloat16()).real, "RuntimeError: Unsupported dtype BFloat16", "torch.fft.fft"),
        (lambda x: x @ x.new_zeros(3, 3), "RuntimeError: a and b must have same reduction dim", "aten.mm.default"),
        (lambda x: x.no_such_thing, "AttributeError: 'FakeTensor' object has no attribute", "none of torch's"),
    ],
    ids=["dtype", "shape", "own"],
)
def test_a_module_that_fails_is_named(act, message, operation):
    spec = find_model(Custom(lambda: Picky(act), lambda b, s: torch.zeros(b, s, 8)))

    def call():
        with FakeTensorMode():
            module = spec.build(4)
            with naming_modules(), AcceleratorKernels():
                spec.call(module, (torch.zeros(2, 8),))

    with pytest.raises(ValueError, match="cannot estimate the model: module 'inner'") as error:
        call()
    assert f"(Inner) has raised {message}" in str(error.value)
    assert f"\n  operation: {operation}\n" in str(error.value)


@pytest.mark.tier("test")
def test_an_error_in_a_stage_comes_out_as_it_is(monkeypatch):
    """Torch's schedules put one in its place that holds the stage's arguments, and nothing of the error's text."""

    def forward(self, x):
        raise ArithmeticError("mine") from KeyError("why")

    monkeypatch.setattr(llama.FeedForward, "forward", forward)
    job = Job(
        find_model("llama-tiny"),
        ParallelDims(pp=2, world_size=2),
        2,
        16,
        PublishedRecipe().having(level=0, accumulate=2),
    )
    with pytest.raises(ArithmeticError, match="mine") as error:
        trace(job)
    assert isinstance(error.value.__cause__, KeyError)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 16, 32))

    def forward(self, x):
        return torch._grouped_mm(x.flatten(0, 1), self.weight, torch.tensor([4, 8, 12, 16], dtype=torch.int32))


def test_grouped_products_which_have_no_float32_are_counted():
    spec = find_model(Custom(Grouped, lambda b, s: torch.zeros(b, s, 16)))
    each = 2 * 16 * 32
    assert spec.flops_per_token(16) == 2 * each  # forward, and the gradient of the weight: none of the input is asked


def test_whether_a_sample_is_a_sequence():
    assert find_model("llama-tiny").has_tokens(16)
    assert find_model(Custom(small_gpt, ids)).has_tokens(16)
    assert not find_model(Custom(lambda: nn.Linear(8, 8), lambda batch, seq_len: torch.zeros(batch, 8))).has_tokens(1)


def test_values_that_the_making_of_a_module_asks_for():
    spec = find_model(Custom(lambda: nn.Dropout(torch.linspace(0, 0.1, 4)[2].item()), ids))
    with pytest.raises(ValueError, match=r"module\(\) does not run on the meta device") as error:
        spec.build(16)
    assert "try: numbers from Python or numpy" in str(error.value)


def test_tied_and_copied_parameters_of_a_module():
    spec = find_model(Custom(small_gpt, ids))
    with FakeTensorMode() as mode:
        model = spec.build(16)
    assert model.head.weight is model.embed.weight
    assert all(tensor.fake_mode is mode for tensor in (*model.parameters(), *model.buffers()))
    with torch.device("meta"):
        assert all(param.is_meta for param in spec.build(16).parameters())


def test_stages_of_a_module_that_has_them():
    spec = find_model(Custom(small_gpt, ids))
    assert spec.has_stages
    stage = spec.build(16, range(1), head=False)
    assert stage.head is None
    assert [number for number, _ in spec.blocks(stage)] == [0]
    plan = ShardingPlan(plan={"embed.weight": ("tp", "None")})
    assert find_model(Custom(small_gpt, ids, plan=plan)).plan(stage, "tp=2") is plan
    assert find_model(Custom(small_gpt, ids, plan=gpt_plan)).plan(stage, "tp=2").plan["embed.weight"] == ("tp", "None")


@pytest.mark.parametrize(
    ("act", "kind", "stated"),
    [
        (lambda: Custom(nn.Linear(2, 2), ids), TypeError, ("is made already", "module=lambda: MyModel(config)")),
        (lambda: find_model(Custom(dict, ids)).num_parameters, TypeError, ("has returned a dict, not an nn.Module",)),
        (
            lambda: find_model(Custom(Conv, ids, blocks="iner")).num_layers,
            ValueError,
            ("blocks='iner' is no nn.ModuleList", "nothing is there", "try: blocks='inner'"),
        ),
        (lambda: find_model(Custom(Conv, ids, blocks="up")).num_layers, ValueError, ("there is a ConvTranspose2d",)),
        (lambda: find_model(Custom(Conv, ids)).plan(Conv(), "tp=2"), ValueError, ("it has no plan", "or tp=1")),
        (
            lambda: find_model(Custom(Conv, ids)).loss({"logits": None}, (1,)),
            ValueError,
            ("has returned a dict without a tensor",),
        ),
    ],
)
def test_what_is_no_module_is_refused(act, kind, stated):
    with pytest.raises(kind, match="cannot estimate the model") as error:
        act()
    for words in stated:
        assert words in str(error.value)


def test_losses():
    spec = find_model(Custom(Conv, ids))
    logits = torch.zeros(2, 3, 8)
    assert spec.loss({"logits": logits}, ()).item() == pytest.approx(math.log(8))
    assert spec.loss((torch.full((2, 2), 3.0),), ()).item() == 9
    own = find_model(Custom(Conv, ids, loss=lambda output, inputs: (output - inputs).sum()))
    assert own.loss(torch.ones(3), (torch.zeros(3),)).item() == 3


@pytest.mark.parametrize("which", ["module", "inputs", "loss"])
def test_what_was_given_and_raises_is_named(which):
    def raises(*args):
        raise KeyError("width")

    given = {"module": lambda: nn.Linear(4, 4), "inputs": lambda batch, seq: torch.zeros(batch, seq, 4), which: raises}
    with pytest.raises(ValueError, match=rf"^cannot estimate the model: {which}\(.*\) has raised an error") as error:
        estimate(Custom(**given), ParallelDims(), batch=2, seq_len=8, hardware="a100-80gb")
    assert "KeyError: 'width'   in raises, " in str(error.value)
    assert f"try: the function given as {which}=, by itself" in str(error.value)
