"""init_parameters on one process, and on simulated ranks: draws by tile, what fills what, what is refused."""

import contextlib
import math
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel import DTensor, Layout, Partial, Replicate, Shard, distribute_tensor, fully_shard
from hyper_parallel.core.dtensor import to_torch
from hyper_parallel.core.init.api import init_parameters
from hyper_parallel.core.init.tiles import FillTarget, Numbers, digest, flush, normal, tiles, truncated, uniform
from hyper_parallel.models import Llama, LlamaConfig

SMALL = LlamaConfig(vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, max_seq_len=8)


def on_meta(make, *args, **kwargs):
    with torch.device("meta"):
        return make(*args, **kwargs)


def split(model, *entries, sizes=(2,), names=("dp",)):
    """Make the parameters of a model on meta DTensors; dims without an entry are not split."""
    mesh = Layout.from_device_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            layout = mesh(*entries[: parameter.ndim])
            where, placements = to_torch(layout, parameter.shape)
            local = torch.empty(layout.local_shape(parameter.shape), dtype=parameter.dtype, device="meta")
            given = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
            made = DTensor.from_local(local, where, placements, **given)
            module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    return model


def check_parts(model, full):
    for name, tensor in model.state_dict().items():
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        expected = sim.scatter_full(full[name], Layout.of(tensor)) if isinstance(tensor, DTensor) else full[name]
        assert torch.equal(part, expected), name


class Own(nn.Module):
    """One parameter, filled by a function."""

    def __init__(self, fill, shape=(6, 10), dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=dtype.is_floating_point)
        self.fill = fill

    def reset_parameters(self):
        self.fill(self.w)


# -- numbers ---------------------------------------------------------------------------------------------------------


def drawn(fill, count=100_000, key=0):
    tile = torch.empty(count, dtype=torch.float64)
    fill(tile, Numbers().begin(key))
    return tile


@pytest.mark.parametrize("shape", [(), (5,), (40, 3000), (17, 1024), (3, 2, 2000), (9, 7, 3, 3), (0, 4), (300_000,)])
def test_tiles_cover_each_element_once(shape):
    full = tuple(slice(0, size) for size in shape)
    counts = torch.zeros(shape)
    for tile in tiles(shape, full):
        counts[tile] += 1
        assert counts[tile].numel() <= 2**14
    assert bool((counts == 1).all())


def test_tiles_of_a_region_are_those_that_overlap():
    shape, region = (40, 3000), (slice(15, 17), slice(1030, 1031))
    mine = torch.zeros(shape)
    mine[region] = 1
    expected = [tile for tile in tiles(shape, (slice(0, 40), slice(0, 3000))) if mine[tile].any()]
    assert list(tiles(shape, region)) == expected
    assert len(expected) == 2
    assert list(tiles(shape, (slice(15, 15), slice(0, 3000)))) == []


def test_seeds_names_draws_and_tiles_are_independent():
    keys = [digest(0, "a", 0, [0]), digest(0, "a", 1, [0]), digest(0, "b", 0, [0]), digest(1, "a", 0, [0])]
    keys.append(digest(0, "a", 0, [1024]))
    columns = np.stack([drawn(normal, 20_000, key).numpy() for key in keys])
    between = np.corrcoef(columns) - np.eye(len(keys))
    assert np.abs(between).max() < 4 / math.sqrt(20_000)
    shifted = np.corrcoef(columns[0][:-1], columns[0][1:])[0, 1]
    assert abs(shifted) < 4 / math.sqrt(20_000)


def gauss(x):
    return 0.5 * math.erfc(-x / math.sqrt(2))


@pytest.mark.parametrize(
    ("fill", "distribution"),
    [
        (normal, gauss),
        (lambda tile, numbers: normal(tile, numbers, 3, 0.5), lambda x: gauss((x - 3) / 0.5)),
        (uniform, lambda x: x),
        (lambda tile, numbers: uniform(tile, numbers, -2, 2), lambda x: (x + 2) / 4),
        (
            lambda tile, numbers: truncated(tile, numbers, 1, 2, 0, 2),
            lambda x: (gauss((x - 1) / 2) - gauss(-0.5)) / (gauss(0.5) - gauss(-0.5)),
        ),
        (  # a tail that 1 - 2^-53 lies before
            lambda tile, numbers: truncated(tile, numbers, 0, 1, 9, 12),
            lambda x: (gauss(-9) - gauss(-x)) / (gauss(-9) - gauss(-12)),
        ),
    ],
)
def test_numbers_have_their_distribution(fill, distribution):
    """Kolmogorov and Smirnov: the distance to the distribution is below 1.63 / sqrt(n) in 99 of 100 cases."""
    count = 100_000
    x = np.sort(drawn(fill, count).numpy())
    expected = np.array([distribution(value) for value in x.tolist()])
    steps = np.arange(count + 1) / count
    distance = max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())
    assert 0.1 < distance * math.sqrt(count) < 1.63


@pytest.mark.parametrize(
    "fill", [nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_], ids=lambda fill: fill.__name__
)
def test_a_parameter_has_the_same_numbers_in_every_dtype(fill):
    """A float64 reference starts from the weights that are trained in float32."""
    single, double = (
        init_parameters(on_meta(Own, fill, (300, 200), dtype), 3).w.detach() for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [{"std": 0.02}, {"a": -0.7, "b": 0.7}, {"mean": 3.0, "a": 4.0, "b": 6.0}])
def test_a_truncated_draw_keeps_its_bounds_and_torchs_distribution(dtype, given):
    x = init_parameters(on_meta(Own, lambda w: nn.init.trunc_normal_(w, **given), (400, 500), dtype), 3).w.detach()
    own = nn.init.trunc_normal_(torch.empty(400, 500), **given, generator=torch.Generator().manual_seed(0))
    low, high = (torch.tensor(given.get(end, bound), dtype=dtype) for end, bound in (("a", -2.0), ("b", 2.0)))
    assert low <= x.min()
    assert x.max() <= high
    assert x.float().mean().item() == pytest.approx(own.mean().item(), abs=0.01 * own.std().item())
    assert x.float().std().item() == pytest.approx(own.std().item(), rel=0.01)


def test_torchs_own_draw_is_restored_when_the_last_rank_has_filled_its_model():
    """Also where ranks fill in turns, and the first to begin is the first to end."""
    before = nn.init._no_grad_trunc_normal_

    def fill(module):
        dist.barrier()  # both have begun
        nn.init.trunc_normal_(module.weight)
        if dist.get_rank() == 1:
            dist.recv(torch.empty(1), 0)  # once the other has ended

    def filled():
        with torch.device("meta"):
            model = nn.Linear(4, 3, bias=False)
        init_parameters(model, seed=1, init_fn=fill)
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
        return model.weight.detach()

    one, other = sim.run(filled, world_size=2)
    assert torch.equal(one, other)
    assert nn.init._no_grad_trunc_normal_ is before


def test_numbers_in_double_precision_are_rounded_once():
    tiles = [torch.empty(100, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    normal(tiles[0], Numbers().begin(5))
    normal(tiles[1], Numbers().begin(5), 0.1, 0.3)
    assert torch.equal(tiles[1], tiles[0].double() * 0.3 + 0.1)


def test_the_ends_of_a_truncated_draw_stay_within_its_bounds():
    class Ends:
        def random(self, count):
            return np.array([0.0, 1 - 2**-53])

    for mean, low, high in ((0.0, -50.0, 1.0), (0.0, -1.0, 50.0), (0.3, 0.1, 0.7)):  # of 50 the CDF says 0 or 1
        tile = torch.empty(2, dtype=torch.float64)
        truncated(tile, Ends(), mean, 1.0, low, high)
        assert low <= tile.min() < tile.max() <= high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_upper_end_of_a_uniform_draw_is_not_reached(dtype):
    low = on_meta(Own, lambda w: w.uniform_(-1, 1.5), (300, 300), dtype)
    values = init_parameters(low).w.detach()
    assert -1 <= values.min() < -0.97
    assert 1.45 < values.max() < 1.5


@pytest.mark.parametrize(
    ("size", "processes", "count"),
    [(2**21, None, 4), (2**21, "2", 2), (2**21, "8", 1), (2**21, "none", 4), (2**19, None, 1)],
)
def test_threads_are_a_processs_share_of_the_cpus(monkeypatch, size, processes, count):
    """And none beside the calling one where there is little to do."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 2, 3, 5}, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    together = threading.Barrier(count)

    def draw(tile, numbers):
        threads.add(threading.get_ident())
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=20)  # each of them has a block
            together.abort()

    threads, target = set(), FillTarget("w", torch.empty(size), (slice(0, size),), 0)
    target.write(draw, covers=True)
    flush([target])
    assert len(threads) == count


@sim.ranks(1, backends=("sim",))
def test_a_simulated_rank_draws_alone(ctx):
    threads, target = set(), FillTarget("w", torch.empty(2**21), (slice(0, 2**21),), 0)
    target.write(lambda tile, numbers: threads.add(threading.get_ident()), covers=True)
    flush([target])
    assert threads == {threading.get_ident()}


def test_of_tensors_that_share_memory_the_last_wins():
    """As without threads."""
    memory = torch.zeros(2000)
    targets = [FillTarget(name, memory[:size], (slice(0, size),), 0) for name, size in (("a", 2000), ("b", 1000))]
    targets[0].write(lambda tile, numbers: (threading.Event().wait(0.05), tile.fill_(1)), covers=True)
    targets[1].write(lambda tile, numbers: tile.fill_(2), covers=True)
    flush(targets, 2)
    assert memory.tolist() == [2] * 1000 + [1] * 1000


# -- plain models ----------------------------------------------------------------------------------------------------


def test_torch_generators_are_neither_read_nor_moved():
    before = torch.get_rng_state()
    first = init_parameters(on_meta(Llama, SMALL), 3).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    second = init_parameters(on_meta(Llama, SMALL), 3).state_dict()
    other = init_parameters(on_meta(Llama, SMALL), 4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)


def test_a_model_with_values_gets_the_same_ones_in_place():
    model, expected = nn.Linear(5, 3), init_parameters(on_meta(nn.Linear, 5, 3), 2)
    weight, data = model.weight, model.weight.data_ptr()
    assert init_parameters(model, 2) is model
    assert model.weight is weight
    assert weight.data_ptr() == data
    assert torch.equal(weight, expected.weight)
    assert torch.equal(model.bias, expected.bias)


def test_parameters_stay_the_same_objects():
    model = on_meta(nn.Linear, 5, 3)
    model.weight.requires_grad_(False)
    model.bias.note = "mine"
    weight, bias = model.weight, model.bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    init_parameters(model)
    assert model.weight is weight
    assert model.bias is bias is optimizer.param_groups[0]["params"][1]
    assert (weight.requires_grad, bias.requires_grad, bias.note) == (False, True, "mine")
    assert not weight.is_meta
    model(torch.ones(2, 5)).sum().backward()
    assert bias.grad.tolist() == [2.0] * 3


def test_a_weakly_referenced_parameter_is_replaced():
    model = on_meta(nn.Linear, 5, 3)
    old = model.weight
    reference = weakref.ref(old)
    init_parameters(model, 2)
    assert reference() is old
    assert torch.equal(model.weight, init_parameters(on_meta(nn.Linear, 5, 3), 2).weight)


def test_parents_fill_after_their_children():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def reset_parameters(self):
            self.a.weight.data.fill_(2)
            with torch.no_grad():
                self.b.weight.mul_(0).add_(3)

    model = init_parameters(on_meta(Parent))
    assert torch.equal(model.a.weight, torch.full((4, 4), 2.0))
    assert torch.equal(model.b.weight, torch.full((4, 4), 3.0))
    assert 0 < model.a.bias.abs().max() <= 0.5


def test_a_module_may_make_its_buffers_anew():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.empty(4))

        def reset_parameters(self):
            self.table = torch.arange(4).cos()

    with torch.device("meta"):  # a context that is still open does no harm
        model = init_parameters(Rotary(), device="cpu")
        weight = init_parameters(nn.Linear(3, 3), device="cpu").weight
    assert torch.equal(model.table, torch.arange(4).cos())
    assert not weight.is_meta
    text = refused(lambda: init_parameters(on_meta(Replacing)))
    assert "'w' was replaced by another parameter" in text


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(4))

    def reset_parameters(self):
        self.w = nn.Parameter(torch.empty_like(self.w).normal_())


def test_names_do_not_depend_on_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    bare = init_parameters(on_meta(lambda: nn.Sequential(nn.Linear(4, 4))), 1)
    wrapped = init_parameters(on_meta(lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)))), 1)
    assert [torch.equal(*pair) for pair in zip(bare.parameters(), wrapped.parameters(), strict=True)] == [True, True]


@pytest.mark.parametrize("tied_first", [True, False])
def test_a_tied_weight_is_filled_once_by_its_first_module(tied_first):
    def make():
        model = nn.Module()
        first, second = nn.Embedding(6, 4, padding_idx=1), nn.Linear(4, 6, bias=False)
        model.first, model.second = (first, second) if tied_first else (second, first)
        model.second.weight = model.first.weight
        return model

    model = init_parameters(on_meta(make), 5)
    assert model.second.weight is model.first.weight
    kind = on_meta(nn.Embedding, 6, 4, padding_idx=1) if tied_first else on_meta(nn.Linear, 4, 6, bias=False)
    alone = nn.Module()
    alone.first = kind
    assert torch.equal(init_parameters(alone, 5).first.weight, model.first.weight)
    assert bool((model.first.weight[1] == 0).all()) == tied_first


def test_init_fn_is_called_for_every_module():
    seen = []

    def fill(module):
        seen.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    model = init_parameters(on_meta(lambda: nn.Sequential(nn.Linear(50, 40), nn.ReLU())), init_fn=fill)
    assert seen == ["Linear", "ReLU", "Sequential"]
    assert model[0].weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not model[0].bias.any()


def test_modules_of_torch_can_be_filled():
    def make():
        model = nn.Module()
        model.norms = nn.ModuleList([nn.LayerNorm(6), nn.RMSNorm(6), nn.GroupNorm(2, 6), nn.BatchNorm1d(6)])
        model.attention = nn.MultiheadAttention(6, 2, add_bias_kv=True)
        model.others = nn.ModuleList([nn.LSTM(5, 4), nn.Conv2d(3, 4, 3), nn.Bilinear(2, 3, 4), nn.PReLU()])
        model.encoder = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        return model

    model = init_parameters(on_meta(make))
    assert not any(tensor.isnan().any() for tensor in model.state_dict().values())
    assert torch.equal(model.norms[3].running_var, torch.ones(6))
    assert not model.attention.in_proj_bias.any()
    bound = math.sqrt(6 / (8 + 16))  # nn.Transformer draws all matrices again
    assert bound * 0.9 < model.encoder.encoder.layers[0].linear1.weight.abs().max() < bound


def test_a_whole_parameter_can_be_made_orthogonal():
    for shape in [(5, 8), (8, 5), (4, 3, 2)]:
        w = init_parameters(on_meta(Own, nn.init.orthogonal_, shape), 1).w.detach().flatten(1)
        product = w @ w.T if shape[0] <= w.shape[1] else w.T @ w
        assert torch.allclose(product, torch.eye(min(w.shape)), atol=1e-5)


def test_the_llama_is_drawn_as_its_own_method_does():
    config = LlamaConfig(num_hidden_layers=8)
    model = init_parameters(on_meta(Llama, config), 1)
    own = Llama.build(config, seed=1)
    for name, tensor in own.state_dict().items():
        found = model.state_dict()[name]
        error = 6 * tensor.std().item() / math.sqrt(tensor.numel())
        assert found.mean().item() == pytest.approx(tensor.mean().item(), abs=1e-6 + error), name
        assert found.std().item() == pytest.approx(tensor.std().item(), rel=0.05), name
    assert torch.equal(model.cos, own.cos)
    assert torch.equal(model.sin, own.sin)
    assert torch.equal(model.layers[3].mlp_norm.weight, torch.ones(config.hidden_size))


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_model(tied):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": tied}
    config = transformers.LlamaConfig(**sizes, **heads)

    def body():
        model = on_meta(transformers.LlamaForCausalLM, config)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        init_parameters(model, 1, init_fn=model._init_weights)
        return model(torch.arange(8)[None]).logits.detach().clone()

    model = on_meta(transformers.LlamaForCausalLM, config)
    init_parameters(model, 1, init_fn=model._init_weights)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.model.embed_tokens.weight[1:].std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(model.model.rotary_emb.inv_freq, torch.tensor([1.0, 0.01]))
    assert all(torch.equal(logits, model(torch.arange(8)[None]).logits) for logits in sim.run(body, world_size=4))


# -- split models ----------------------------------------------------------------------------------------------------


@pytest.mark.tier("test", each=2)
@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
def test_the_llama_is_the_same_for_any_number_of_ranks(world_size):
    def body():
        sizes = (max(world_size // 8, 1), min(world_size, 8))
        model = split(on_meta(Llama, SMALL), ("tp", "dp"), sizes=sizes, names=("dp", "tp"))
        check_parts(init_parameters(model, 3), full)

    full = init_parameters(on_meta(Llama, SMALL), 3).state_dict()
    sim.run(body, world_size=world_size)


@sim.ranks(4, backends=("sim",))
def test_bounds_follow_the_global_shape(ctx):
    model = init_parameters(split(on_meta(nn.Linear, 400, 30), None, "dp", sizes=(4,)))
    bound = model.weight.to_local().abs().max().item()
    assert 0.99 * 0.05 < bound < 0.05  # 1 / sqrt(400), not 1 / sqrt(100)


def test_a_rank_needs_no_more_memory_than_its_shard():
    """The unsharded parameter is 4 TB, of which rank 1 has nothing."""

    def fill(w):
        nn.init.trunc_normal_(w, std=0.02)
        nn.init.trunc_normal_(w, mean=4, std=1, a=5, b=9)
        nn.init.kaiming_uniform_(w)
        w.data.exp_().clamp_(max=3).mul_(0.5)
        w.data.detach().add_(1)

    def body():
        model = split(on_meta(Own, fill, (1, 2**40)), "dp")
        if torch.distributed.get_rank() == 1:  # and rank 0 need not take part: nothing is communicated
            assert init_parameters(model).w.to_local().shape == (0, 2**40)

    sim.run(body, world_size=2)


def test_memory_is_bounded_by_one_module_at_a_time():
    """What is unsharded for a module goes before the next one fills its tensors."""
    alive = []

    class Watched(Own):
        def reset_parameters(self):
            alive.append(sum(reference() is not None for reference in seen))
            self.w.data.normal_()
            unsharded = self.w.data[0]
            seen.append(weakref.ref(unsharded.untyped_storage()))

    seen = []

    def body():
        init_parameters(split(on_meta(lambda: nn.Sequential(*[Watched(None) for _ in range(4)])), "dp"))

    sim.run(body, world_size=2)
    assert alive == [0] * 8


def test_a_later_draw_does_not_depend_on_what_other_modules_do():
    """A pipeline stage has only some of the modules."""

    class Parent(nn.Module):
        def __init__(self, *names):
            super().__init__()
            for name in names:
                setattr(self, name, Own(nn.init.orthogonal_, (4, 4)))

        def reset_parameters(self):
            for module in self.children():
                nn.init.orthogonal_(module.w)
                module.w.data[1].normal_()

    both = init_parameters(on_meta(Parent, "a", "b")).state_dict()
    assert torch.equal(init_parameters(on_meta(Parent, "b")).b.w, both["b.w"])
    assert not torch.equal(both["a.w"], both["b.w"])


def test_rejected_draws_do_not_move_later_ones():
    """On one rank the loop of trunc_normal_ ends earlier than on another."""

    def fill(w):
        for _ in range(3):
            nn.init.trunc_normal_(w, std=1.0, a=-0.6, b=0.6)
        w.data.add_(torch.randn_like(w))

    def body():
        check_parts(init_parameters(split(on_meta(Own, fill), "dp", sizes=(4,)), 5), full)

    full = init_parameters(on_meta(Own, fill), 5).state_dict()
    sim.run(body, world_size=4)


@pytest.mark.tier("test")
@pytest.mark.parametrize("own", [True, False])
def test_a_model_of_fully_shard(own):
    """Of this library, and of torch."""

    def body():
        from torch.distributed.fsdp import fully_shard as of_torch

        wrap = fully_shard if own else of_torch
        model, mesh = on_meta(Llama, SMALL), init_device_mesh("cpu", (4,))
        for layer in model.layers:
            wrap(layer, mesh=mesh)
        wrap(model, mesh=mesh)
        check_parts(init_parameters(model, 3), full)
        out = model(ids)
        out.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.reshard()
        if own:
            check_parts(init_parameters(model, 4), other)
            assert torch.equal(model(ids), expected)
        return out.detach().clone()

    ids = torch.arange(8)[None]
    plain = init_parameters(on_meta(Llama, SMALL), 3)
    full, first = plain.state_dict(), plain(ids)
    again = init_parameters(on_meta(Llama, SMALL), 4)
    other, expected = again.state_dict(), again(ids)
    assert all(torch.equal(out, first) for out in sim.run(body, world_size=4))


def test_code_that_mixes_parameters_with_plain_tensors():
    def fill(w):
        w.data.copy_(torch.arange(60.0).view(6, 10))
        with torch.no_grad():
            w += torch.arange(10) * torch.rand(10)
            w[torch.arange(6)[2]] = 5
            w[1::2, 3:9:2] = 7
            w[:, 2:].t()[0].mul_(w[:, 2] + 1)
            w.clamp_(max=40).div_(3)

    def body():
        check_parts(init_parameters(split(on_meta(Own, fill), None, "dp", sizes=(3,)), 5), full)

    full = init_parameters(on_meta(Own, fill), 5).state_dict()
    assert full["w"][1, 3].item() == pytest.approx(7 / 3)
    sim.run(body, world_size=3)


def test_setting_the_data_of_a_parameter_writes_to_it():
    """It is no operation, so that what was drawn before came after it, and DTensors kept what they had."""

    def double(w):
        w.data.normal_()
        w.data = w.data * 2
        w.data = w.data  # as `.to(torch.float32)` returns it of what is float32
        w.data.add_(1)

    def body():
        model = Own(double)
        for source in (on_meta(Own, double), model):
            check_parts(init_parameters(split(source, None, "dp", sizes=(2,)), 5), wanted)

    w = Own(lambda w: w.data.normal_().mul_(2).add_(1))
    wanted = init_parameters(w, 5).state_dict()
    plain = Own(double)
    memory = plain.w.data_ptr()
    assert torch.equal(init_parameters(plain, 5).w, w.w)
    assert plain.w.data_ptr() == memory
    sim.run(body, world_size=2)


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.orthogonal_,
        lambda w: w.data.normal_().div_(w.data.norm()),
        lambda w: w.data.normal_().copy_(w.data.flatten().flip(0).view(6, 10)),
        lambda w: w.data.log_normal_(),
        lambda w: w.data.normal_(generator=torch.Generator().manual_seed(3)),
        lambda w: w.data.bernoulli_(torch.rand(6, 10)),
        lambda w: w.data.copy_(w.data.normal_()[:, 4:5]),
        lambda w: nn.init.sparse_(w, 0.5),
        lambda w: w.data.normal_().copy_(w.data[0, 3].clone()),
        lambda w: w.data.copy_(torch.empty(6, 10).copy_(w.data.normal_()).cumsum(0)),
        lambda w: w.data.uniform_().copy_(torch.linalg.qr(w.data.T)[0].T),
        lambda w: setattr(w, "data", torch.randn(6, 10)),
        lambda w: setattr(w, "data", nn.init.trunc_normal_(w.data.double(), std=0.02).float()),  # as Hugging Face's do
    ],
)
def test_what_needs_all_elements_gets_them(fill):
    def body():
        check_parts(init_parameters(split(on_meta(Own, fill), None, "dp", sizes=(4,)), 5), full)

    full = init_parameters(on_meta(Own, fill), 5).state_dict()
    assert not full["w"].isnan().any()
    sim.run(body, world_size=4)


def numbered(w, *placements):
    """Values of all elements; with placements as a DTensor, on ranks that have the parameter as one."""
    full = torch.arange(60.0).view(6, 10)
    if not placements or not isinstance(w, DTensor):
        return full
    return distribute_tensor(full, w.device_mesh, placements)


@pytest.mark.parametrize(
    "fill",
    [
        lambda w: w.data.copy_(numbered(w)),
        lambda w: w.data.copy_(numbered(w, Shard(0))),
        lambda w: w.data.copy_(numbered(w, Replicate())),
        lambda w: w.data.copy_(numbered(w)).view(6, 10)[1].mul_(3),
        lambda w: w.data.copy_(numbered(w, Shard(0))).mul_(3),
        lambda w: w.data.normal_().copy_(numbered(w)).add_(w.data.norm()),
        lambda w: w.data.normal_().div_(w.data.norm()).copy_(numbered(w, Shard(0))),
        lambda w: setattr(w, "data", numbered(w, Shard(0))),
        lambda w: w.data.fill_(torch.tensor(3.0)),
        lambda w: w.data.random_(0, 9),
        lambda w: torch.mul(numbered(w), 2, out=w.data),
        nn.init.orthogonal_,
        nn.init.eye_,
    ],
)
def test_values_that_are_there_do_not_stand_in_the_way_of_new_ones(fill):
    def body():
        sources = (on_meta(Own, fill), split(on_meta(Own, nn.init.normal_), "dp", sizes=(3,)))
        init_parameters(sources[1], 1)
        sources[1].fill = fill
        for source in (split(sources[0], "dp", sizes=(3,)), sources[1]):
            check_parts(init_parameters(source, 5), full)

    full = init_parameters(on_meta(Own, fill), 5).state_dict()
    assert not full["w"].isnan().any()
    sim.run(body, world_size=3)


# -- what is refused -------------------------------------------------------------------------------------------------


def refused(call, *, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    lines = str(caught.value).splitlines()
    assert len(lines) == 3, lines
    assert ": " in lines[0]
    assert lines[2].startswith("  try: ")
    return str(caught.value)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.inner = nn.Linear(4, 4)
        self.register_buffer("table", torch.empty(3))


class Half(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.empty(4, 6, dtype=dtype))

    def reset_parameters(self):
        self.w.data[:2].normal_()


def test_what_nothing_fills_is_named():
    text = refused(lambda: init_parameters(on_meta(Bare)))
    assert "nothing fills what was on meta" in text
    assert "not filled: parameter 'scale' of Bare, buffer 'table' of Bare\n" in text
    text = refused(lambda: init_parameters(on_meta(lambda: nn.Sequential(Half()))))
    assert "parameter '0.w' of Half\n" in text
    text = refused(lambda: init_parameters(on_meta(nn.Linear, 3, 3), init_fn=lambda module: None))
    assert "init_fn leaves out what was on meta" in text
    model = Bare()
    kept = model.scale.detach().clone()
    assert torch.equal(init_parameters(model).scale, kept), "what was not on meta keeps its values"


class Rotary(nn.Module):
    """A parameter that it fills, one and a buffer of state dicts that it does not, and a buffer that no one has."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(3))
        self.register_buffer("frequencies", torch.empty(2), persistent=False)

    def forward(self, x):
        return self.inner(x * self.scale)


def wrapped_rotary(*, empty: bool) -> nn.Module:
    model = fully_shard(on_meta(Rotary))
    return model.to_empty(device="cpu") if empty else model


@pytest.mark.sim
@pytest.mark.parametrize("empty", [False, True])
@sim.ranks(2, backends=("sim",))
def test_what_nothing_fills_is_named_also_after_to_empty(ctx, empty):
    text = refused(lambda: init_parameters(wrapped_rotary(empty=empty)))
    names = "parameter 'scale' of Rotary, buffer 'table' of Rotary, buffer 'frequencies' of Rotary"
    assert f"not filled: {names}\n" in text
    model = wrapped_rotary(empty=empty)
    model.table = torch.ones(3)  # who assigns has filled
    model.frequencies = torch.ones(2)
    assert "not filled: parameter 'scale' of Rotary\n" in refused(lambda: init_parameters(model))


@pytest.mark.sim
def test_what_was_filled_after_to_empty_stays():
    def rank():
        model = wrapped_rotary(empty=True)
        model.load_state_dict({"scale": torch.ones(4), "table": torch.ones(3)}, strict=False)
        model.frequencies.fill_(1e30)  # no checkpoint can have done it
        assert "not filled: buffer 'frequencies' of Rotary\n" in refused(lambda: init_parameters(model))
        model.frequencies = torch.ones(2)
        init_parameters(model)
        assert model.scale.full_tensor().tolist() == [1.0] * 4
        assert model.table.tolist() == [1.0] * 3
        again = init_parameters(wrapped_rotary(empty=True), init_fn=ones)
        return init_parameters(again)(torch.ones(4)).tolist()  # has values by now: nothing to complain of

    def ones(module):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.ones_(tensor)

    assert sim.run(rank, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_every_rank_refuses_what_nothing_fills(dtype):
    def body():
        return refused(lambda: init_parameters(split(on_meta(Half, dtype), "dp", sizes=(4,))))

    assert len(set(sim.run(body, world_size=4))) == 1


class Twice(nn.Module):
    """A parent that reads what a child has filled element by element."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4, padding_idx=1)

    def reset_parameters(self):
        self.embed.weight.data[2].zero_()


@pytest.mark.parametrize(
    ("make", "where", "message"),
    [
        (lambda: Own(lambda w: w.to_local().normal_()), "the model (Own)", "it uses a local shard, taken out of its"),
        (lambda: Own(lambda w: w.data.normal_().t_()), "the model (Own)", "t_ changes the shape of a parameter"),
        (
            lambda: Own(lambda w: setattr(w, "data", torch.ones(10))),
            "the model (Own)",
            "its data is set to values of shape (10,) in torch.float32",
        ),
        (
            lambda: Own(lambda w: w.data.copy_(numbered(w, Shard(0)))),
            "the model (Own)",
            "it copies a DTensor that lies otherwise, elements of which other ranks hold",
        ),
        (Twice, "the model (Twice)", "select needs elements that other ranks hold"),
    ],
)
def test_what_cannot_be_filled_says_so_on_every_rank(make, where, message):
    def body():
        return refused(lambda: init_parameters(split(on_meta(make), None, "dp", sizes=(4,))))

    texts = sim.run(body, world_size=4)
    for text in texts:
        assert text.startswith(f"cannot fill {where} shard by shard: ")
        assert message in text


def test_values_of_a_sharded_model_are_not_gathered():
    def body():
        model = split(on_meta(Own, nn.init.normal_), None, "dp", sizes=(4,))
        init_parameters(model)
        model.fill = lambda w: w.data.mul_(2)  # on the values that it has, for nothing covers them
        before = model.w.to_local().clone()
        init_parameters(model)
        assert torch.equal(model.w.to_local(), before * 2)
        model.fill = lambda w: w.data.div_(w.data.norm())
        return refused(lambda: init_parameters(model))

    assert "needs elements that other ranks hold" in sim.run(body, world_size=4)[3]


def test_wrong_arguments():
    model = nn.Linear(2, 2)
    assert "seed is a float, not an int" in refused(lambda: init_parameters(model, 1.0), error=TypeError)
    assert "seed must be at least 0" in refused(lambda: init_parameters(model, -1))
    assert "nothing on meta has values" in refused(lambda: init_parameters(model, device="meta"))
    assert "device: " in refused(lambda: init_parameters(model, device="nowhere"))
    assert "'weight' has no shape yet" in refused(lambda: init_parameters(nn.LazyLinear(3)))


def test_wrong_models():
    def body():
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
        pending = refused(lambda: init_parameters(model))
        model = on_meta(nn.Linear, 4, 4)
        other = refused(lambda: init_parameters(split(model, "dp"), device="cuda"))
        assert all(parameter.is_meta for parameter in model.parameters()), "nothing has changed"
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        model.unshard()
        full = refused(lambda: init_parameters(model))
        model.reshard()
        init_parameters(model)
        return pending, other, full

    pending, other, full = sim.run(body, world_size=2)[1]
    assert "'weight' has a reduction pending" in pending
    assert "its DTensors are on a mesh of another device type, 'cpu'" in other
    assert "the model shows unsharded parameters" in full
