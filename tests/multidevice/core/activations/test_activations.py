"""Activation memory of blocks: one device's numbers with every policy, and the bytes that an estimate says."""

from __future__ import annotations

import copy

import pytest
import torch
from activations_kit import Blocks, trained
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.nn.attention import SDPBackend, sdpa_kernel

import sim
from hyper_parallel import checkpoint_blocks
from hyper_parallel.core.activations import ActivationPolicy, blocks_of
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer.config import Config, DataConfig, ParallelConfig, TrainConfig
from hyper_parallel.trainer.loop import train as train_a_run
from sim import mesh
from sim.late.switch import why_not

late = pytest.mark.skipif(bool(why_not()), reason=why_not())
DEPTH, WIDTH, ROWS = 8, 64, 512
WITHOUT_CUBLAS = mesh.find_machine("h100-sxm").with_figures(device__workspace=0)  # as the late device is
POLICIES = ("none", "full", "offload", "full offload", "offload every 2", "full offload first 3")


@pytest.mark.tier("test")
@sim.ranks(2)
@pytest.mark.parametrize("policy", ["full every 2", "selective", "offload"])
def test_ranks_compute_what_one_device_does(ctx, policy):
    losses, parameters, _ = trained(ctx.device_type, policy, "ours")
    single = torch.tensor([0.0, *losses], dtype=ctx.float_dtype, device=ctx.device)  # each rank has some of the rows
    torch.distributed.all_reduce(single)
    torch.testing.assert_close((single[1:] / 2).tolist(), ALONE[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parameters, ALONE[1], rtol=1e-4, atol=1e-5)


ALONE = trained("cpu", "none", "none")


RECIPE = mesh.Recipe().having(param_dtype="fp32", max_grad_norm=0.0)
BLOCKS = mesh.Custom(
    lambda: Blocks(DEPTH, WIDTH),
    lambda batch, _: torch.zeros(batch, WIDTH),
    lambda out, _: out.square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-3, foreach=True),
)


def planned(policy: str, ranks: int = 1, engine: str = "fully_shard") -> mesh.Estimate:
    """What an estimate says of the training of the kit, on one device or split over ranks."""
    recipe = RECIPE.having(checkpointing=policy, engine=engine)
    dims = ParallelDims(dp_shard=ranks, world_size=ranks)
    return mesh.estimate(BLOCKS, dims, batch=ROWS // ranks, seq_len=1, hardware=WITHOUT_CUBLAS, recipe=recipe)


@pytest.mark.tier("full")
@late
@pytest.mark.sim
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")
def test_the_peak_is_what_an_estimate_says_and_what_the_docs_say():
    peaks = {}
    for policy in POLICIES:
        ((_, _, peaks[policy]),) = sim.run(trained, 1, ("npu", policy, "none", DEPTH, WIDTH, ROWS), device="npu")
        memory = planned(policy).memory.fullest
        assert memory.peak_allocated == pytest.approx(peaks[policy], rel=0.02), policy
        assert not memory.unmatched
    assert all(peaks[policy] != pytest.approx(peaks["none"], rel=0.02) for policy in POLICIES[1:])
    one = planned("none").memory.fullest.by_category["activations"] / DEPTH
    least = planned("offload").memory.fullest
    assert least.host_bytes == pytest.approx((DEPTH - 1) * one, rel=0.02), "all but the last block's"
    assert least.by_category["workspace"] + least.by_category["activations"] < 2.7 * one, "of two blocks, and gradients"


@pytest.mark.tier("full", each=6)
@late
@pytest.mark.sim
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")
@pytest.mark.parametrize(("engine", "named"), [("ours", "fully_shard"), ("hsdp", "hsdp")])
@pytest.mark.parametrize("policy", ["none", "offload", "full offload"])
def test_the_peak_of_ranks_that_share_weights_is_the_estimates(policy, engine, named):
    found = sim.run(trained, 2, ("npu", policy, engine, DEPTH, WIDTH, ROWS), device="npu")
    memory = planned(policy, 2, named).memory.fullest
    assert [memory.peak_allocated] * 2 == pytest.approx([peak for _, _, peak in found], rel=0.02)
    assert memory.peak_allocated < 0.7 * planned(policy).memory.peak


def run_of(policy: str, engine: str) -> Config:
    """A run of a Llama, on two ranks."""
    return Config(
        model=LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
        ),
        data=DataConfig(max_bytes=200_000),
        parallel=ParallelConfig(checkpointing=policy, **ENGINES[engine]),
        train=TrainConfig(steps=2, batch_size=4, seq_len=256, eval_sequences=1, device="npu", predict=False),
    )


ENGINES = {
    "fully_shard": {"dp_shard": 2},
    "hsdp": {"dp_shard": 2, "engine": "hsdp"},
    "tp": {"tp": 2},
    "ring": {"cp": 2, "ulysses_degree": 1},
}


def peak_of_run(config: Config) -> int:
    """The most bytes that a step after the first has allocated."""
    return train_a_run(config).steps[-1].memory_bytes


@pytest.mark.tier("full", each=2)
@late
@pytest.mark.sim
@pytest.mark.parametrize(
    ("policy", "engine"),
    [("none", "fully_shard"), ("full", "fully_shard"), ("selective", "tp"), ("offload", "hsdp"), ("none", "ring")],
)
def test_the_peak_of_a_model_with_attention_is_the_estimates(policy, engine):
    """Attention keeps its output and log-sums, and a norm its input and a number for each row."""
    config = run_of(policy, engine)
    found = sim.run(peak_of_run, 2, (config,), device="npu")
    planned_bytes = mesh.estimate_run(config, 2, "ascend-910b").memory.fullest.peak_allocated
    assert found == pytest.approx([planned_bytes] * 2, rel=0.01)
    if (policy, engine) == ("none", "fully_shard"):  # what keeps all scores is another figure
        with sdpa_kernel(SDPBackend.MATH):  # of all ranks
            products = sim.run(peak_of_run, 2, (config,), device="npu")
        assert min(products) > 1.2 * planned_bytes


@pytest.mark.tier("full")
@late
@pytest.mark.sim
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")
def test_a_policy_for_a_budget_needs_no_more_than_it():
    all_bytes, context = planned("none").memory.reserved, planned("none").memory.fullest.context_bytes
    budget = 0.6 * all_bytes + context
    found = mesh.fit_activations(BLOCKS, ParallelDims(), ROWS, 1, WITHOUT_CUBLAS, budget, RECIPE)
    policy = found.recipe.activations
    ((_, _, peak),) = sim.run(trained, 1, ("npu", policy, "none", DEPTH, WIDTH, ROWS), device="npu")
    assert peak == pytest.approx(found.memory.peak, rel=0.02)
    assert peak <= 0.6 * all_bytes < planned("none").memory.peak
    assert policy.first is not None, "of some blocks"


@pytest.mark.tier("full")
def test_copies_are_on_a_stream_of_their_own_and_come_ahead():
    """Where the link is as fast as in an h100, a wide enough block hides what goes to the host and back."""
    shape = {"batch": 4096, "seq_len": 1, "hardware": "h100-sxm"}
    seconds = {}
    for kind in ("full", "full offload"):
        spec = mesh.Custom(
            lambda: Blocks(6, 2048), lambda batch, _: torch.zeros(batch, 2048), lambda out, _: out.square().mean()
        )
        estimate = mesh.estimate(spec, ParallelDims(), recipe=mesh.Recipe().having(checkpointing=kind), **shape)
        seconds[kind] = estimate.time.step.value
        exposed = sum(each.value for axis, each in estimate.time.exposed.items() if "host" in axis)
    assert seconds["full offload"] == pytest.approx(seconds["full"], rel=0.02)
    assert exposed < 0.02 * seconds["full"]


def changed_in_place() -> None:
    """A block's input is changed after it was saved."""
    model = checkpoint_blocks(Blocks(2, 16).to("npu"), "offload")
    x = torch.ones(16, 16).to("npu").requires_grad_() * 1.0
    hidden = model.layers[0](x)
    out = model.layers[1](hidden)
    hidden.add_(1.0)
    out.sum().backward()


def backward_twice() -> list[bool]:
    """The gradients of a second backward, of a deep copy, and after a forward without gradients, are the first's."""
    torch.manual_seed(0)
    model = checkpoint_blocks(Blocks(3, 16).to("npu"), "offload")
    twin = copy.deepcopy(model)
    assert twin.layers[0]._offload is twin.layers[1]._offload is not model.layers[0]._offload
    x = torch.randn(16, 16).to("npu")

    def gradients(net: Blocks, loss: torch.Tensor, retain: bool = False) -> list[torch.Tensor]:
        return [each.cpu() for each in torch.autograd.grad(loss, list(net.parameters()), retain_graph=retain)]

    loss = model(x).square().sum()
    first, second = gradients(model, loss, retain=True), gradients(model, loss)
    with torch.no_grad():
        model(x)
    third = gradients(model, model(x).square().sum())
    other = gradients(twin, twin(x).square().sum())
    return [torch.equal(a, b) for each in (second, third, other) for a, b in zip(first, each, strict=True)]


class Bits(torch.autograd.Function):
    """The identity, which saves its input and the bits of that."""

    @staticmethod
    def forward(ctx, x, found):
        ctx.found = found
        ctx.save_for_backward(x, x.detach().view(torch.int32))
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        x, bits = ctx.saved_tensors
        ctx.found.append((bits.dtype, torch.equal(x.view(torch.int32), bits)))
        return grad, None


@late
@pytest.mark.sim
def test_memory_that_is_saved_in_two_dtypes_comes_back_in_both():
    class Block(nn.Module):
        def forward(self, x):
            return Bits.apply(x, found)

    def body():
        model = nn.Module()
        model.layers = nn.ModuleList([Block(), Block(), Block()])
        checkpoint_blocks(model, "offload")
        x = torch.randn(16, 16).to("npu").requires_grad_() * 1.0
        for block in model.layers:
            x = block(x)
        x.sum().backward()

    found = []
    sim.run(body, 1, device="npu")
    assert found == [(torch.int32, True)] * 3


@pytest.mark.tier("test")
@late
@pytest.mark.sim
def test_what_autograd_refuses_and_repeats_stays_so():
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation\n  seen: torch\.float32"):
        sim.run(changed_in_place, 1, device="npu")
    (found,) = sim.run(backward_twice, 1, device="npu", check_races=True)
    assert found
    assert all(found)


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs():
    """Graphs that are compiled in a test: how many so far."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    torch._dynamo.reset()


@pytest.mark.tier("full", each=3)
@late
@pytest.mark.sim
@pytest.mark.parametrize(
    ("policy", "compiled"),
    [("offload", "insides"), ("offload", "blocks"), ("offload", "model"), ("full offload", "model")],
)
def test_compiled_blocks_are_offloaded(policy, compiled, graphs):
    """They compute what one device does, keep as little, and each is a graph."""
    alone = sim.run(trained, 1, ("npu", policy, "none", 4, 16, 12, 2), device="npu")
    ((losses, parameters, peak),) = sim.run(trained, 1, ("npu", policy, "none", 4, 16, 12, 2, compiled), device="npu")
    assert graphs() == 2, "blocks share one, but for the first, whose input needs no gradient"
    assert losses == pytest.approx(ALONE[0], rel=1e-5)
    torch.testing.assert_close(parameters, ALONE[1], rtol=1e-4, atol=1e-5)
    assert peak == pytest.approx(alone[0][2], rel=0.02)


@pytest.mark.tier("full")
@late
@pytest.mark.sim
@pytest.mark.parametrize(("engine", "compiled"), [("ours", "blocks"), ("fsdp2", "insides"), ("ours", "model")])
@pytest.mark.usefixtures("graphs")
def test_compiled_blocks_of_an_engine_are_offloaded(engine, compiled):
    found = sim.run(trained, 2, ("npu", "offload", engine, 4, 16, 12, 2, compiled), device="npu", check_races=True)
    assert [sum(each) / 2 for each in zip(*(one[0] for one in found), strict=True)] == pytest.approx(ALONE[0], rel=1e-5)
    for _, parameters, _ in found:
        torch.testing.assert_close(parameters, ALONE[1], rtol=1e-4, atol=1e-5)


def test_one_graph_of_all_blocks_is_refused():
    model = torch.compile(checkpoint_blocks(Blocks(2, 4), "offload"), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="go to the host between two blocks: compile without fullg"):
        model(torch.ones(2, 4))


# -- policies and arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["none", "full", "alternate every 3", "full offload first 2", "offload first 4"])
def test_text_of_a_policy_is_read_as_it_is_shown(text):
    assert str(ActivationPolicy.of(text)) == text
    assert ActivationPolicy.of(ActivationPolicy.of(text)) == ActivationPolicy.of(text)


def test_every_second_block_begins_with_the_first():
    policy = ActivationPolicy.of("full every 2 first 5")
    assert [block for block in range(8) if policy.takes(block)] == [0, 2, 4]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("ful", "there is no kind of checkpointing 'ful'\n  checkpointing: 'ful'\n  try: .*full"),
        ("full every", "a number is expected where '' is"),
        ("full every 2.5", "a number is expected where '2.5' is"),
        ("full first 2 first 3", "'first' is not expected there"),
        ("every 2", "'every' is not expected there"),
        ("none first 2", "there is no kind of checkpointing 'none first 2'"),
        ("selective offload", "what selective checkpointing keeps is no saved tensor"),
        ("full every 0", "every must be a finite number of at least 1"),
        (3, "recompute is a int"),
        ((torch.ops.aten.mm,), "what is kept must be operators, each with its overload"),
    ],
)
def test_a_wrong_policy_says_what_to_try(policy, message):
    with pytest.raises((TypeError, ValueError), match=f"cannot .*{message}"):
        checkpoint_blocks(Blocks(2, 4), policy)


def test_blocks_are_those_of_the_model_and_wrapped_once():
    with pytest.raises(ValueError, match=r"there are none: the model has no nn\.ModuleList"):
        checkpoint_blocks(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="these are no modules in the model"):
        checkpoint_blocks(Blocks(2, 4), blocks=[torch.nn.Linear(2, 2)])
    model = Blocks(2, 4)
    names = list(model.state_dict())
    assert list(checkpoint_blocks(model, "full offload").state_dict()) == names
    with pytest.raises(ValueError, match="they are checkpointed already"):
        checkpoint_blocks(model)


def test_a_block_that_is_used_again_is_wrapped_in_all_of_its_places():
    model = Blocks(2, 4)
    model.layers.append(model.layers[0])
    names = list(model.state_dict())
    checkpoint_blocks(model, "full first 1")
    assert [isinstance(block, ActivationWrapper) for block in model.layers] == [True, False, True]
    assert model.layers[0] is model.layers[2]
    assert list(model.state_dict()) == names


def test_blocks_in_lists_of_lists_are_found():
    model = torch.nn.Module()
    model.sides = torch.nn.ModuleDict({"left": Blocks(2, 4).layers, "right": Blocks(1, 4).layers})
    checkpoint_blocks(model, "full")
    assert all(isinstance(block, ActivationWrapper) for side in model.sides.values() for block in side)
    assert len(list(blocks_of(model.sides["left"]))) == 2  # in the list itself, too


@pytest.mark.parametrize(("fields", "message"), [({"every": 2.5}, "every is a float, not an int")])
def test_fields_of_a_policy_are_of_their_types(fields, message):
    with pytest.raises(TypeError, match=f"cannot use an activation policy: {message}"):
        ActivationPolicy("full", **fields)


@pytest.mark.tier("test")
def test_operators_and_functions_say_what_is_kept():
    def products(policy: object) -> int:
        model, count = checkpoint_blocks(Blocks(2, 8), policy), [0]

        class Counted(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                count[0] += func is torch.ops.aten.addmm.default
                return func(*args, **(kwargs or {}))

        with Counted():
            model(torch.ones(2, 8)).sum().backward()
        return count[0]

    def keep(context, op, *args, **kwargs):
        kept = op is torch.ops.aten.addmm.default
        return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE if kept else torch.utils.checkpoint.CheckpointPolicy(2)

    assert products("full") > products([torch.ops.aten.addmm.default]) == products(keep) == products("none")
