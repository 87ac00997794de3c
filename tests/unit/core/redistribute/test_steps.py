"""The parts of a step: shares of the loss, sums over ranks, blocks that are computed again or compiled."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import sim
from hyper_parallel.core.activations import checkpoint_blocks
from hyper_parallel.core.common.torch_compat import plain_name
from hyper_parallel.core.fully_shard.unit import unit_of
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models import Llama, LlamaConfig
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.data import IGNORED
from hyper_parallel.trainer.loop import RankPlace, RunGroups
from hyper_parallel.trainer.parallelize import Parallelized, ShareOfLoss, compile_blocks, describe_axes, shard_blocks

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_seq_len": 8,
}
IDS = torch.arange(16).reshape(2, 8) % 11


def build(kind: str = "llama") -> Llama:
    torch.manual_seed(0)
    if kind == "moe":
        return MoELlama.build(MoEConfig(**SMALL, num_experts=4, expert_intermediate_size=8, num_dense_layers=1))
    return Llama.build(LlamaConfig(**SMALL))


def backward(model: Llama) -> dict[str, torch.Tensor]:
    model(IDS).square().sum().backward()
    return {plain_name(name): param.grad for name, param in model.named_parameters()}


# The loss


def test_shares_add_up_to_the_mean_over_what_counts() -> None:
    logits = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([[0, 1, 2, 3], [IGNORED, 4, IGNORED, IGNORED], [IGNORED] * 4])
    share = ShareOfLoss()
    share.counted = 5
    shares = [share(logits[row : row + 1], targets[row : row + 1]) for row in range(3)]
    assert shares[2] == 0, "a part in which nothing counts adds nothing, and no NaN"
    torch.testing.assert_close(sum(shares), F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_a_batch_in_which_nothing_counts_has_no_mean() -> None:
    share = ShareOfLoss()
    share.counted = 0
    assert share(torch.ones(1, 2, 4), torch.full((1, 2), IGNORED)).isnan(), "as F.cross_entropy, and not a loss of 0"


# What ranks tell each other


@pytest.mark.tier("test")
def test_ranks_add_up_over_the_axes_that_differ() -> None:
    """dp_replicate, dp_shard, ep and cp have other tokens; tp has the same, and of pp only the last stage a loss."""
    degrees = {"dp_replicate": 2, "ep": 2, "cp": 2, "tp": 2, "pp": 2}

    def body() -> tuple[int, int, float, float]:
        dims = ParallelDims(**degrees, world_size=32)
        mesh = dims.build_mesh("cpu")
        at = dict(zip(dims.mesh_axes, mesh.get_coordinate() or (), strict=True))
        ranks = RunGroups(dims, True, torch.device("cpu"), torch.float64)
        assert ranks.batch_rank == 2 * at["dp_replicate"] + at["ep"]
        token_rank = 2 * ranks.batch_rank + at["cp"]
        value = torch.tensor(10.0**token_rank, dtype=torch.float64)
        share = value if at["pp"] == 1 else torch.zeros((), dtype=torch.float64)
        total = ranks.over_shares(share)
        assert share == (value if at["pp"] == 1 else 0), "a share is left as it is"
        return ranks.batch_rank, ranks.batch_ranks, ranks.over_tokens(value).item(), total

    results = sim.run(body, 32)
    assert [result[1:] for result in results] == [(4, 11111111.0, 11111111.0)] * 32
    assert sorted({result[0] for result in results}) == [0, 1, 2, 3]


def test_without_ranks_nothing_is_communicated() -> None:
    ranks = RunGroups(ParallelDims(), False, torch.device("cpu"), torch.float32)
    share = torch.tensor(2.5, requires_grad=True)
    assert (ranks.over_shares(share), ranks.batch_rank, ranks.batch_ranks) == (2.5, 0, 1)
    assert [ranks.any(flag) for flag in (True, False)] == [True, False]
    assert not dist.is_initialized()


def test_one_rank_that_says_yes_is_enough() -> None:
    def body(sayers: list[int]) -> bool:
        dims = ParallelDims(tp=3, world_size=3)
        dims.build_mesh("cpu")
        return RunGroups(dims, True, torch.device("cpu"), torch.float32).any(dist.get_rank() in sayers)

    assert sim.run(body, 3, args=([1],)) == [True] * 3
    assert sim.run(body, 3, args=([],)) == [False] * 3


def test_a_process_group_that_is_there_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where whoever made it has set nothing, or too little for torchrun's rendezvous."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert RankPlace.current() == RankPlace(0, 0, 1, 1)
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        assert RankPlace.current() == RankPlace(5, 5, 8, 8)
        for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
            monkeypatch.setenv(name, value)
        assert RankPlace.current() == RankPlace(5, 1, 8, 8)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert RankPlace.current() == RankPlace(5, 1, 8, 4)
    finally:
        dist.destroy_process_group()


# Blocks


@pytest.mark.parametrize("kind", ["llama", "moe"])
@pytest.mark.parametrize("policy", ["full", "selective", "alternate"])
def test_checkpointed_blocks_have_the_same_names_and_gradients(policy: str, kind: str) -> None:
    plain = build(kind)
    wrapped = copy.deepcopy(plain)
    checkpoint_blocks(wrapped, policy)
    expected, found = backward(plain), backward(wrapped)
    assert list(found) == list(expected)
    assert [name for name, _ in Parallelized([wrapped]).named_parameters()] == list(expected)
    assert [name for name, _ in Parallelized([wrapped]).named_tensors()] == list(plain.state_dict())
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name


def kept_by_forward(model: Llama) -> int:
    """Count the bytes that a forward keeps for its backward, parameters left out."""
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(IDS)
    del out
    return sum(kept.values())


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products, and all else."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.others = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_product = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        self.products += is_product
        self.others += not is_product
        return func(*args, **(kwargs or {}))


@pytest.mark.tier("test")
def test_full_keeps_least_and_selective_makes_no_product_twice_and_alternate_every_other_one() -> None:
    plain, full, selective, alternate = build(), build(), build(), build()
    checkpoint_blocks(full, "full")
    checkpoint_blocks(selective, "selective")
    checkpoint_blocks(alternate, "alternate")
    assert kept_by_forward(full) < 0.5 * kept_by_forward(plain)
    counts = []
    for model in (plain, selective, full, alternate):
        with Counted() as counted:
            backward(model)
        counts.append(counted)
    of_plain, of_selective, of_full, of_alternate = counts
    again = of_full.products - of_plain.products
    assert of_alternate.products - of_plain.products == again // 2  # of a block's first 6 products the 2nd, 4th, 6th
    assert of_plain.products == of_selective.products < of_full.products
    assert of_plain.others < of_selective.others


@pytest.mark.parametrize(("degrees", "again"), [({"dp_shard": 4}, True), ({"dp_shard": 2, "pp": 2}, False)])
@sim.ranks(4, backends=("sim",))
def test_stages_of_a_pipeline_keep_their_weights_between_micro_batches(
    ctx, degrees: dict[str, int], again: bool
) -> None:
    dims = ParallelDims(**degrees, world_size=4)
    dims.build_mesh("cpu")
    blocks = nn.Sequential(nn.Linear(4, 4))
    shard_blocks(blocks, list(blocks), dims, Config())
    assert unit_of(blocks[0]).options.reshard_after_forward == again


def test_no_checkpointing_leaves_the_blocks_alone() -> None:
    model = build()
    blocks = list(model.layers)
    checkpoint_blocks(model, "none")
    assert all(block is before for block, before in zip(model.layers, blocks, strict=True))


@pytest.mark.tier("test")
@pytest.mark.parametrize("kind", ["llama", "moe"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_compiled_blocks_compute_the_same(kind: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that only traces: what inductor makes of a graph is its own affair."""
    graphs = []

    def trace(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn: real(fn, backend=trace))
    plain = build(kind)
    compiled = copy.deepcopy(plain)
    checkpoint_blocks(compiled, policy)
    compile_blocks(compiled, enabled=True)
    expected, found = backward(plain), backward(compiled)
    assert list(found) == list(expected), "names stay"
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, msg=name)
    assert len(graphs) >= 2, "attention and feed-forward have been compiled"


def test_nothing_is_compiled_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn: pytest.fail("compiled"))
    compile_blocks(build(), enabled=False)


def test_axes_are_described_outermost_first() -> None:
    assert describe_axes(ParallelDims(pp=2, tp=2, ep=2, world_size=8)) == "8 ranks: ep=2 x tp=2 x pp=2"
