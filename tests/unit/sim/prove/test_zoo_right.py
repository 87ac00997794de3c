"""A zoo of right parallel models: `sim.prove` finds nothing wrong with any, and no error near its bound."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from zoo_kit import (
    VOCAB,
    WIDTH,
    Block,
    Enter,
    Leave,
    Mlp,
    Net,
    Tied,
    axis,
    draw,
    made_of,
    megatron,
    right,
    rounding,
    same,
    split_mlp,
    take,
    tokens,
)

import sim
from hyper_parallel import ShardingPlan, custom_shard, fully_shard, hsdp, shard_module
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy as Policy
from hyper_parallel.core.shard.loss import vocab_parallel_cross_entropy
from hyper_parallel.models import huggingface_plan, llama_loss, llama_plan, parallelize_huggingface
from hyper_parallel.models.llama import Llama, LlamaConfig

pytestmark = pytest.mark.tier("test", each=3)

PENDING = ("pending",)  # sums that hand-written code takes after a module, or a mean of losses that nobody takes
PENDING_OR_PRIVATE = ("pending", "private")

X = draw(4, 6, WIDTH)
IDS, LABELS = tokens(seed=0), tokens(seed=1)


def is_right(model, inputs, mesh, *, also=(), near=0.5, **options):
    """Verify a model, and that the report leaves nothing out."""
    if "dp" in mesh and "plan" not in options and isinstance(inputs, tuple):
        options = {"input_layouts": [("dp",)] * len(inputs), **options}
    report = right(sim.verify_plan(model, inputs, mesh, **options))
    odd = [row for row in report.rows if row.verdict not in ("exact", "rounding", *also)]
    assert not odd, "\n".join(f"{row.verdict}: {row}" for row in odd)
    close = [row for row in report.rows if row.verdict in ("exact", "rounding") and row.ratio >= near]
    assert not close, "\n".join(map(str, close))
    assert not any("backward was not compared" in note for note in report.notes), report.notes
    kinds = {row.kind for row in report.rows}
    assert kinds >= {"parameter", "forward", "gradient"}
    return report


# -- plans, with DTensor operations and with local ones ---------------------------------------------------------------


def feed_forward(axis="tp", *, local=False, rows="None", sequence=False, bias=True):
    """The plan of an Mlp on (rows, length, width)."""
    residual = (rows, axis, "None") if sequence else (rows, "None", "None")
    whole, inner = (rows, "None", "None"), (rows, "None", axis)
    plan = ShardingPlan(
        plan={"up.weight": (axis, "None"), "down.weight": ("None", axis)},
        input_plan={"input": residual, "up.input": whole, "down.input": inner},
        output_plan={"output": residual},
    )
    if bias:
        plan.plan |= {"up.bias": (axis,), "down.bias": ("None",)}
    if local:
        names = {name for each in (rows, axis) for name in ((each,) if isinstance(each, str) else each)} - {"None"}
        assert names
        plan.local_plan = {"up": inner, "drop": inner}
        plan.input_plan["drop.input"] = inner
    return plan


PLANS = {
    "split in and out": ("tp=2", {}),
    "sequence parallel": ("tp=2", {"sequence": True}),
    "without biases": ("tp=4", {"bias": False}),
    "data and tensor": ("dp=2,tp=2", {"rows": "dp"}),
    "data over two axes": ("a=2,b=2", {"rows": ("a", "b"), "axis": "None"}),
    "width over two axes": ("a=2,b=2", {"axis": ("a", "b")}),
    "width over two axes, the other way round": ("a=2,b=2", {"axis": ("b", "a")}),
    "sequence over two axes": ("a=2,b=2", {"axis": ("a", "b"), "sequence": True}),
    "one rank": ("tp=1", {}),
    "an axis of one rank": ("dp=1,tp=2", {"rows": "dp"}),
}


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_plans(name, local):
    mesh, options = PLANS[name]
    plan = feed_forward(**options, local=local)
    is_right(partial(Mlp, bias=options.get("bias", True)), (X,), mesh, plan=plan)


def test_a_plan_on_eight_ranks():
    is_right(Mlp, (X,), "dp=2,tp=4", plan=feed_forward(rows="dp", sequence=True, local=True))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("mesh", ["tp=4", "tp=3"])
def test_uneven_parts(mesh, local):
    """Inner width 10, 5 tokens; on 4 ranks some parts are smaller, or empty."""
    is_right(partial(Mlp, inner=10), (draw(2, 5, WIDTH),), mesh, plan=feed_forward(local=local, sequence=True))


class Table(nn.Module):
    """An embedding and a head, which may be one parameter, and a norm between."""

    def __init__(self, tied=False, vocab=VOCAB):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


@pytest.mark.parametrize("vocab", [VOCAB, 25])
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_heads_split_by_the_vocabulary(tied, vocab):
    plan = ShardingPlan(
        plan={"embed.weight": ("tp", "None"), "head.weight": ("tp", "None"), "norm.*": ("None",)},
        input_plan={"input": ("None", "None")},
        output_plan={"embed.output": ("None", "None", "None")},
    )

    def loss(logits, ids):
        return vocab_parallel_cross_entropy(logits, LABELS)

    is_right(partial(Table, tied, vocab), (IDS,), "tp=2", plan=plan, loss_fn=loss)


def cross_entropy(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())


def test_a_plan_that_returns_local_tensors():
    plan = ShardingPlan(
        plan={"embed.weight": ("None", "tp"), "head.weight": ("tp", "None"), "norm.*": ("None",)},
        input_plan={"input": ("None", "None"), "norm.input": ("None", "None", "None")},
        output_plan={"output": ("None", "None", "None")},
        return_local_tensor=[""],
    )
    is_right(Table, (IDS,), "tp=2", plan=plan, loss_fn=cross_entropy)


def test_code_of_ones_own_in_a_sharded_model():
    def parallel(model, mesh):
        shard_module(model, mesh, feed_forward())
        local = custom_shard(
            lambda x, weight: F.gelu(x) @ weight.t(),
            mesh,
            [(Replicate(),), (Shard(0),)],
            (Shard(2),),
            out_shapes=lambda x, weight: (*x.shape[:-1], weight.shape[0]),
        )
        model.up.forward = lambda x: local(x, model.up.weight) + model.up.bias

    class Odd(Mlp):
        def __init__(self):
            super().__init__()
            self.up.forward = lambda x: F.gelu(x) @ self.up.weight.t() + self.up.bias

    is_right(Odd, (X,), "tp=2", parallelize=parallel)


# -- the library's plans of whole models -------------------------------------------------------------------------------

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_seq_len": 8,
}


LLAMAS = [
    ("tp=2", {}, {}),
    ("tp=2", {"sequence_parallel": False}, {}),
    ("tp=2", {"vocab_parallel": False}, {}),
    ("tp=2", {"sequence_parallel": False, "vocab_parallel": False, "logits": "whole"}, {}),
    ("tp=2", {}, {"tie_embeddings": True}),
    ("dp=2,tp=2", {}, {}),
    ("dp=2,tp=2", {"logits": "local", "sequence_parallel": False}, {"tie_embeddings": True}),
    ("dp=2", {"tp": None}, {}),
    ("tp=4", {}, {"num_key_value_heads": 4}),
]


@pytest.mark.parametrize(("mesh", "options", "config"), LLAMAS)
def test_llamas(mesh, options, config):
    config = LlamaConfig(**{**LLAMA, **config})

    def loss(out, ids):
        """Local logits know of this rank's rows only."""
        if isinstance(out, DTensor) or not dist.is_initialized():
            return llama_loss(out, ids)
        return llama_loss(out, ids.to_local() if isinstance(ids, DTensor) else ids) / (2 if "dp" in mesh else 1)

    is_right(
        lambda: Llama.build(config),
        (IDS[:, :5],),  # 5 tokens: uneven over tp
        mesh,
        plan=llama_plan(config, mesh, **options),
        input_layouts=[("dp",)] if "dp" in mesh else None,
        loss_fn=loss,
        also=PENDING_OR_PRIVATE,
    )


@pytest.mark.tier("deep")
def test_a_llama_of_twelve_layers():
    config = LlamaConfig(**{**LLAMA, "num_hidden_layers": 12})
    is_right(
        lambda: Llama.build(config), (IDS[:1, :4],), "tp=2", plan=llama_plan(config, "tp=2"), also=PENDING_OR_PRIVATE
    )


# -- torch's styles ----------------------------------------------------------------------------------------------------


def styles(model, mesh, sequence=False):
    """Split a Net by torch's styles; with its residual stream split over the sequence or not."""
    between = Shard(1) if sequence else Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "norm": SequenceParallel() if sequence else PrepareModuleInput(),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(len(model.blocks)):
        at = f"blocks.{index}"
        for part in ("attn.q", "attn.k", "attn.v", "mlp.up"):
            plan[f"{at}.{part}"] = ColwiseParallel()
        for part in ("attn.o", "mlp.down"):
            plan[f"{at}.{part}"] = RowwiseParallel(output_layouts=between)
        if sequence:
            for norm, part in (("norm1", "attn"), ("norm2", "mlp")):
                plan[f"{at}.{norm}"] = SequenceParallel()
                plan[f"{at}.{part}"] = PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
                )
    if not sequence:
        del plan["norm"]
    return parallelize_module(model, mesh, plan)


def of_parts(logits, ids):
    """The mean loss, of logits that are split over the vocabulary too."""
    return vocab_parallel_cross_entropy(logits, LABELS)


@pytest.mark.parametrize(("sequence", "loss_fn"), [(True, of_parts), (True, None), (False, None)])
def test_torchs_styles(sequence, loss_fn):
    is_right(
        partial(Net, 1), (IDS,), "tp=2", parallelize=partial(styles, sequence=sequence), loss_fn=loss_fn, also=PENDING
    )


def test_torchs_styles_without_a_rest():
    """Whole outputs as DTensors at every boundary, by PrepareModuleOutput."""

    def parallel(model, mesh):
        plan = {
            "up": ColwiseParallel(use_local_output=False),
            "drop": PrepareModuleOutput(
                output_layouts=Shard(-1), desired_output_layouts=Shard(-1), use_local_output=False
            ),
            "down": RowwiseParallel(use_local_output=False),
        }
        return parallelize_module(model, mesh, plan)

    is_right(Mlp, (X,), "tp=2", parallelize=parallel)


# -- code of one's own on plain tensors --------------------------------------------------------------------------------

MEGATRON = {
    "blocks.*.attn.q.weight": ("tp", "None"),
    "blocks.*.attn.o.weight": ("None", "tp"),
    "blocks.*.attn.q.output": ("None", "None", "tp"),
    "blocks.*.mlp.up.output": ("None", "None", "tp"),
    "blocks.*.mlp.down.input": ("None", "None", "tp"),
    "blocks.*.output": ("None", "None", "None"),
    "output": ("None",),
}


@pytest.mark.parametrize("declared", [None, MEGATRON])
@pytest.mark.parametrize("bias", [False, True])
def test_plain_tensors(declared, bias):
    is_right(partial(Net, bias=bias), (IDS,), "tp=2", parallelize=megatron, declared=declared, also=PENDING)


def test_plain_tensors_split_over_both_axes():
    def parallel(model, mesh):
        megatron(model, mesh)
        group = mesh["dp"].get_group()
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: _mean(grad, group))

    is_right(partial(Net, 1), (IDS,), "dp=2,tp=2", parallelize=parallel, also=PENDING, loss_fn=of_own)


def _mean(grad, group):
    grad = grad / group.size()
    dist.all_reduce(grad, group=group)
    return grad


def of_own(logits, ids):
    """The mean loss of a rank's own rows, whose labels are their ids."""
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


# -- data parallel wrappers --------------------------------------------------------------------------------------------


def ddp(model, mesh, **options):
    """DDP, with buckets small enough that there are several."""
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002, **options)


def each(wrap, *, rest=True, **options):
    """Wrap every block, then the model."""

    def parallel(model, mesh):
        for block in model.blocks:
            wrap(block, **options, **({"mesh": mesh} if wrap is not hsdp else {}))
        wrap(model, **options, **({"mesh": mesh} if wrap is not hsdp else {}))
        return model

    return parallel


WRAPPERS = {
    "DDP": ("dp=2", ddp),
    "DDP, as views": ("dp=3", partial(ddp, gradient_as_bucket_view=True, static_graph=True)),
    "FSDP2": ("dp=2", each(fsdp2)),
    "FSDP2 kept": ("dp=2", each(fsdp2, reshard_after_forward=False)),
    "FSDP2 over replicas": ("r=2,s=2", each(fsdp2)),
    "fully_shard": ("dp=2", each(fully_shard)),
    "fully_shard fused": ("dp=4", each(fully_shard, comm_fusion=True)),
    "fully_shard over replicas": ("r=2,s=2", each(fully_shard, reshard_after_forward=False)),
    "hsdp level1": ("dp=2", each(hsdp, threshold=0)),
    "hsdp level2": ("dp=4", each(hsdp, threshold=0, shard_size=2, optimizer_level="level2")),
    "hsdp level3": ("dp=2", each(hsdp, threshold=0, optimizer_level="level3")),
    "hsdp with small ones whole": ("dp=2", each(hsdp, threshold=4, optimizer_level="level3")),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_data_parallel_wrappers(name):
    mesh, wrap = WRAPPERS[name]
    rows = tokens(12 if "3" in mesh else 4)
    split = ("r", "s") if "r=" in mesh else "dp"
    steps = {"optimizer_fn": partial(torch.optim.AdamW, lr=1e-2), "steps": 2}
    is_right(partial(Net, 1), (rows,), mesh, parallelize=wrap, input_layouts=[(split,)], loss_fn=of_own, **steps)


# -- mixed precision ---------------------------------------------------------------------------------------------------

BF16, FP16 = torch.bfloat16, torch.float16
POLICIES = {
    "parameters": {"param_dtype": BF16},
    "gradients added up in float32": {"param_dtype": BF16, "reduce_dtype": torch.float32},
    "gradients added up in bfloat16": {"reduce_dtype": BF16},
    "float16, and float32 outputs": {"param_dtype": FP16, "reduce_dtype": FP16, "output_dtype": torch.float32},
}


def widest(report):
    """The largest bound of what comes before an update."""
    return max(row.bound for row in report.rows if row.kind != "update" and not row.tensor.endswith("step 2"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("wrap", [fsdp2, fully_shard])
@pytest.mark.parametrize("name", POLICIES)
def test_mixed_precision_of_sharded_parameters(name, wrap, dtype):
    policy = (MixedPrecisionPolicy if wrap is fsdp2 else Policy)(**POLICIES[name])
    how = {"parallelize": each(wrap, mp_policy=policy), "loss_fn": of_own, "dtype": dtype}
    report = is_right(partial(Net, 1), (tokens(4),), "dp=2", **how)
    low = str(POLICIES[name]["reduce_dtype" if "param_dtype" not in POLICIES[name] else "param_dtype"])[6:]
    wide = str(dtype)[6:]
    assert f"computed in {wide} where the program says {low}, whose rounding is not compared" in report.notes
    if dtype == torch.float64:  # as sharp as without mixed precision
        assert widest(report) < 1e-11


class Cast(Net):
    """A model that computes under autocast, with norms and a softmax of its own in float32."""

    def forward(self, ids):
        with torch.autocast("cpu", BF16):
            return super().forward(ids).float().log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_autocast(dtype):
    is_right(partial(Cast, 1), (IDS,), "tp=2", parallelize=megatron, dtype=dtype, also=PENDING)
    how = {"parallelize": each(fsdp2), "loss_fn": of_own, "dtype": dtype}
    is_right(partial(Cast, 1), (IDS,), "dp=2", **how)


def test_a_model_that_is_built_in_bfloat16_and_scores_experts_in_float32():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.mlp = nn.Linear(WIDTH, 4, bias=False), Mlp()
            self.scale = torch.ones(WIDTH, dtype=BF16)  # no buffer, so nothing converts it

        def forward(self, x):
            weight = F.softmax(self.gate(x), -1, dtype=torch.float32).to(x.dtype).amax(-1, keepdim=True)
            return self.mlp(x * self.scale) * weight

    styles = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    how = {"parallelize": lambda m, mesh: parallelize_module(m, mesh, styles)}
    report = is_right(lambda: Routed().to(BF16), (X,), "tp=2", **how, also=PENDING)
    assert widest(report) < 1e-11


# -- choices near a tie ------------------------------------------------------------------------------------------------

TAKE = {
    "topk": lambda scores: scores.topk(2, -1).indices,
    "topk, in no order": lambda scores: scores.topk(2, -1, sorted=False).indices,
    "sort": lambda scores: scores.sort(-1, descending=True).indices[..., :2],
    "argsort": lambda scores: scores.argsort(stable=True, dim=-1)[..., :2],
    "argmax": lambda scores: scores.argmax(-1, keepdim=True),
    "argmin": lambda scores: scores.argmin(-1).unsqueeze(-1),
    "max": lambda scores: scores.max(-1).indices.unsqueeze(-1),
}


@pytest.mark.parametrize("name", TAKE)
def test_what_is_chosen_near_a_tie_is_free(name):
    report = is_right(partial(Tied, TAKE[name]), (X,), "tp=2", parallelize=rounding, also=PENDING)
    assert widest(report) < 1e-11  # no choice flips in perturbed runs
    assert any("one device took those that the ranks chose" in note for note in report.notes), report.notes


def test_rows_may_be_split_where_something_is_chosen():
    def rows(model, mesh):
        own, turn = model.take, torch.tensor([0, 1, 2, 0], dtype=torch.float64)
        model.take = lambda scores: own(scores * (1 + 1e-15 * turn))
        return ddp(model, mesh)

    loss = {"loss_fn": lambda y, x: y.square().mean()}
    report = is_right(Tied, (X,), "dp=2", parallelize=rows, **loss)
    assert any("topk of the model" in note for note in report.notes), report.notes


# -- several axes ------------------------------------------------------------------------------------------------------


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("wrap", "mesh", "data"),
    [(fsdp2, "dp=2,tp=2", "dp"), (fully_shard, "dp=2,tp=2", "dp"), (fsdp2, "r=2,s=2,tp=2", ("r", "s"))],
)
def test_tensor_parallel_within_data_parallel(wrap, mesh, data):
    """Each rank's loss is divided by the ranks along dp, where the engine adds gradients of DTensors up."""

    def parallel(model, mesh):
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        wrap(model, mesh=mesh[data])

    def loss(y, x):
        own = y.square().mean()
        return own / 2 if dist.is_initialized() and wrap is fully_shard else own

    is_right(Mlp, (X,), mesh, parallelize=parallel, input_layouts=[(data,)], loss_fn=loss, also=PENDING)


@pytest.mark.parametrize("wrap", [ddp, each(fsdp2), each(fully_shard)])
def test_plain_tensors_within_data_parallel(wrap):
    """The wrappers know of this rank's parts only, and take them for whole parameters."""

    def parallel(model, mesh):
        megatron(model, mesh)
        if wrap is ddp:
            return ddp(model, mesh, process_group=mesh["dp"].get_group())
        return wrap(model, mesh["dp"])

    how = {"parallelize": parallel, "loss_fn": of_own}
    is_right(partial(Net, 1), (IDS,), "dp=2,tp=2", **how, also=PENDING)


# -- what a model may do -----------------------------------------------------------------------------------------------


class Checkpointed(Net):
    """Computes its blocks again in backward."""

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def test_activations_that_are_computed_again():
    def wrapped(model, mesh):
        megatron(model, mesh)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)

    is_right(Checkpointed, (IDS,), "tp=2", parallelize=megatron, also=PENDING)
    is_right(Net, (IDS,), "tp=2", parallelize=wrapped, also=PENDING)


def test_gradients_that_add_up_over_micro_batches():
    def loss(logits, ids):
        parts = zip(logits.chunk(2), ids.chunk(2), strict=True)
        return sum(of_own(*part) for part in parts) / 2

    is_right(partial(Net, 1), (tokens(8),), "dp=2", parallelize=ddp, loss_fn=loss)


@made_of(lambda: {"weight": nn.Parameter(torch.ones(WIDTH))})
def rms(self, x):
    """A norm that computes in float32, whatever it is given."""
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return self.weight * y.to(x.dtype)


def normed():
    model = Net()
    for block in model.blocks:
        block.norm1, block.norm2 = rms(), rms()
    return model


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
def test_a_part_in_float32(mesh):
    if mesh == "tp=2":
        is_right(normed, (IDS,), mesh, parallelize=megatron, also=PENDING)
    else:
        is_right(normed, (IDS,), mesh, parallelize=each(fully_shard), loss_fn=of_own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parallelize", [megatron, partial(styles, sequence=True)])
def test_all_of_it_in_less(dtype, parallelize):
    is_right(partial(Net, 1), (IDS,), "tp=2", parallelize=parallelize, dtype=dtype, also=PENDING_OR_PRIVATE)


@made_of(
    lambda: {
        "router": nn.Linear(WIDTH, 4, bias=False),
        "up": nn.Parameter(torch.randn(4, WIDTH, 8) / 4),
        "down": nn.Parameter(torch.randn(4, 8, WIDTH) / 4),
        "first": 0,
        "enter": same,
        "leave": same,
    }
)
def experts(self, x):
    """Each token goes to the 2 best of 4 experts; a rank has some of the experts, and adds up what they return."""
    weights, chosen = self.router(x).softmax(-1).topk(2)
    share = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype).scatter(-1, chosen, weights)
    share, x, out = self.enter(share), self.enter(x), torch.zeros_like(x)
    for index, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
        mine = share[..., self.first + index]
        row = mine.nonzero(as_tuple=True)
        out = out.index_put(row, mine[row].unsqueeze(-1) * (F.silu(x[row] @ up) @ down), accumulate=True)
    return self.leave(out)


def test_experts_of_the_best():
    def parallel(model, mesh):
        rank, size, group = axis(mesh)
        take(model, "up", 0, rank, size)
        take(model, "down", 0, rank, size)
        model.first = rank * 4 // size
        model.enter = lambda x: Enter.apply(x, group)
        model.leave = lambda y: Leave.apply(y, group)

    is_right(experts, (X,), "ep=2", parallelize=parallel)
    is_right(experts, (X,), "ep=4", parallelize=parallel)


class Several(nn.Module):
    """Takes tensors by name, whole numbers among them; returns containers; some parameters are frozen or not used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.embed.weight.requires_grad_(False)
        self.mlp = Mlp()
        self.spare = nn.Linear(WIDTH, 3)
        self.gate = nn.Parameter(torch.zeros(()))
        self.zero = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x, *, kind, options=None):
        self.seen += 1
        y = self.mlp(x - self.mean) + self.embed(kind).unsqueeze(1)
        y = y + self.gate * x + 0 * self.zero(x)
        return {"y": y, "rest": (y.mean(), [kind + 1, None]), "scale": options["scale"] * y.detach()}


def two_ways(model, mesh):
    return split_mlp(model.mlp, *axis(mesh))


SEVERAL = {"x": X.clone().requires_grad_(), "kind": torch.arange(4), "options": {"scale": draw(WIDTH, seed=3)}}


def test_containers_names_whole_numbers_frozen_and_unused_parameters():
    report = is_right(Several, SEVERAL, "tp=2", parallelize=two_ways, also=PENDING)
    assert any(row.tensor == "output rest.0" for row in report.rows)


def test_containers_with_data_split():
    def loss(out, x, kind, options):
        return out["y"].square().mean() + out["rest"][0]

    how = {"parallelize": partial(ddp, find_unused_parameters=True), "loss_fn": loss}
    is_right(Several, {**SEVERAL, "x": X}, "dp=2", **how, input_layouts={"x": ("dp",), "kind": ("dp",)}, also=PENDING)


class WithLoss(Net):
    """Returns its loss, as models of transformers do."""

    def forward(self, ids, labels=None):
        return F.cross_entropy(super().forward(ids).flatten(0, 1), labels.flatten(), ignore_index=0)


@pytest.mark.parametrize("wrap", [ddp, each(fully_shard)])
def test_a_loss_that_the_model_returns(wrap):
    labels = LABELS.clamp(min=1)
    rows = [("dp",), ("dp",)]
    is_right(WithLoss, {"ids": IDS, "labels": labels}, "dp=2", parallelize=wrap, input_layouts=rows, also=PENDING)


def test_a_batch_of_one():
    is_right(Net, (IDS[:1, :1],), "tp=2", parallelize=megatron, also=PENDING)


@made_of(lambda: {"norm": nn.BatchNorm1d(WIDTH), "linear": nn.Linear(WIDTH, 4)})
def normalised(self, x):
    """Batch normalisation by statistics that were kept."""
    return self.linear(self.norm(x)).square().mean()


def test_buffers_in_evaluation():
    how = {"parallelize": ddp, "train": False}
    is_right(normalised, (draw(8, WIDTH),), "dp=2", **how, also=PENDING)


@made_of(lambda: {"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH, bias=False)})
def cancelling(self, x):
    """What remains of large sums."""
    large = 1e6 * self.up(x)
    y = self.down(large)
    return (y + 1e9) - 1e9 - y.mean(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sums_that_cancel(dtype):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    is_right(
        cancelling,
        (X,),
        "tp=4",
        parallelize=lambda m, mesh: parallelize_module(m, mesh, plan),
        dtype=dtype,
        also=PENDING,
    )


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW one by one": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "Adam with amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    """The key's bias has no gradient but rounding, and Adam divides it by its own size."""
    is_right(Block, (X,), "dp=2", parallelize=ddp, optimizer_fn=OPTIMIZERS[name], steps=3)


def test_optimizers_of_groups_and_clipped_gradients():
    def optimizer(params):
        groups = [
            {"params": [p for p in params if p.dim() > 1]},
            {"params": [p for p in params if p.dim() < 2], "lr": 1e-3},
        ]
        made = torch.optim.SGD(groups, lr=0.1)
        made.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(params, 0.01) and None)
        return made

    is_right(Block, (X,), "dp=2", parallelize=lambda m, mesh: fsdp2(m, mesh=mesh), optimizer_fn=optimizer)


# -- models of transformers --------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
    "use_cache": False,
    "attn_implementation": "eager",
}
TRANSFORMERS = [
    ("Llama", "tp=2", {}, {}),
    ("Llama", "dp=2,tp=2", {"sequence_parallel": False}, {"tie_word_embeddings": True}),
    ("Qwen2", "tp=2", {"vocab_parallel": False}, {}),
    ("Mixtral", "tp=2", {}, {"num_local_experts": 4, "experts_implementation": "eager"}),
    ("Qwen3", "tp=2", {}, {"head_dim": 8}),
]


@pytest.mark.parametrize(("kind", "mesh", "options", "config"), TRANSFORMERS)
def test_models_of_transformers(kind, mesh, options, config):
    transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 or later is not installed")
    transformers.logging.set_verbosity_error()
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **config})
    inputs = {"input_ids": IDS, "labels": IDS}
    rows = dict.fromkeys(inputs, ("dp",)) if "dp" in mesh else None

    def loss(out, input_ids, labels):
        return out.loss / (2 if rows and dist.is_initialized() else 1)

    def model():
        return getattr(transformers, f"{kind}ForCausalLM")(copy.deepcopy(config))

    how = {"parallelize": partial(parallelize_huggingface, **options)}
    if kind == "Llama" and not rows:
        how = {"plan": huggingface_plan(model(), mesh, **options)}
    is_right(model, inputs, mesh, **how, input_layouts=rows, loss_fn=loss, also=(*PENDING_OR_PRIVATE, "skipped"))
