"""Random numbers of one device, put in on the ranks: masks are compared, and right programs stay right."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from zoo_kit import average, ddp, made_of, proved_plan, proved_step, right

import sim
from hyper_parallel import fully_shard
from sim.prove.randomness import is_random, mean_of

pytestmark = pytest.mark.tier("test")

ROWS, WIDTH = 4, 8
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """A branch that is dropped and added; `how` says what the ranks do otherwise."""

    def __init__(self, how=None, p=0.5, preserve=None):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.p, self.preserve, self.how = p, preserve, how or Residual.right

    def forward(self, x):
        if self.preserve is None:
            return self.how(self, x)
        return checkpoint(lambda x: self.how(self, x), x, use_reentrant=False, preserve_rng_state=self.preserve)

    def branch(self, x):
        return self.layer(self.norm(x))

    def right(self, x):
        return x + F.dropout(self.branch(x), self.p)


def stack(how=None, **options):
    return lambda: nn.Sequential(Residual(how, **options), nn.Linear(WIDTH, 4))


def data_parallel(how=Residual.right, wrap=DistributedDataParallel, **changes):
    def parallelize(model, mesh):
        for name, value in {"how": how, **changes}.items():
            setattr(model[0], name, value)
        return wrap(model)

    return parallelize


by_hand = partial(data_parallel, wrap=lambda model: model)


def plan(parallelize=None, model=None, mesh="dp=2", x=X, **options):
    return proved_plan(parallelize, model or stack(), (x,), mesh, **{"optimizer_fn": None, **options})


def step(parallelize=None, model=None, mesh="dp=2", x=X, **options):
    return proved_step(parallelize, model or stack(), x, mesh, **{"optimizer_fn": None, **options})


def averaged(model, batch, parts=1):
    total = 0.0
    for part in batch.chunk(parts):
        loss = model(part).square().mean() / parts
        loss.backward()
        total += loss.detach()
    average(model)
    return total


def is_right(report):
    assert report.ok, report
    assert not [note for note in report.notes if "random numbers" in note], report.notes


def is_wrong(report, module="0", words=""):
    assert not report.ok, report
    assert (report.first.module, report.first.tensor[-20:]) == (module, " with random numbers"), report
    assert report.first.sentence.startswith("it is right with means in the place of random numbers, and wrong with")
    assert words in report.first.sentence


@pytest.mark.parametrize("preserve", [None, True])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_masks_of_shards_of_a_batch_are_right(wrap, preserve):
    is_right(plan(data_parallel(wrap=wrap), stack(preserve=preserve)))


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard, pytest.param(torchs_fully_shard, id="FSDP2")])
def test_masks_of_wrapped_models_are_right_in_steps(wrap):
    report = step(data_parallel(wrap=wrap))
    is_right(report)
    assert report.notes[0] == "a second step (rows in another order) is compared"


@pytest.mark.parametrize("preserve", [None, True])
def test_masks_of_micro_batches_are_right(preserve):
    is_right(step(by_hand(), stack(preserve=preserve), rank_step=partial(averaged, parts=2)))


def on_the_input(self, x):
    return F.dropout(x, self.p) + self.branch(x)


def on_the_sum(self, x):
    return F.dropout(x + self.branch(x), self.p)


WRONG = {
    "on the input": ({"how": on_the_input}, "those of 0 (bernoulli) are put on the model's input"),
    "on the sum": ({"how": on_the_sum}, "those of 0 (bernoulli) are put on 0.output"),
    "scaled otherwise": ({"p": 0.3}, "wrong with those of one device"),
}


@pytest.mark.parametrize("preserve", [None, True])
@pytest.mark.parametrize("name", WRONG)
def test_a_mask_on_another_tensor_or_scaled_otherwise_is_found(name, preserve):
    changes, words = WRONG[name]
    report = plan(data_parallel(**changes), stack(preserve=preserve))
    is_wrong(report, words=words)
    assert report.first.place == "0.output with random numbers" or name == "scaled otherwise"


def test_a_mask_on_another_tensor_is_found_where_ranks_take_no_second_step():
    """Nothing explains what the model returns, so that the ranks have no backward."""
    changes, words = WRONG["on the input"]
    is_wrong(plan(data_parallel(**changes), optimizer_fn=True), words=words)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("parts", [1, 2])
def test_wrong_masks_are_found_in_steps(name, parts):
    changes, words = WRONG[name]
    is_wrong(step(by_hand(**changes), rank_step=partial(averaged, parts=parts), steps=1), words=words)


class Drawn(torch.autograd.Function):
    """Dropout that draws its mask again in backward, from a state of the generator."""

    @staticmethod
    def forward(ctx, x, shift):
        ctx.state, ctx.shift = torch.get_rng_state(), shift
        return x * torch.empty_like(x).bernoulli_(0.5) * 2

    @staticmethod
    def backward(ctx, grad):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            torch.rand(ctx.shift)
            return grad * torch.empty_like(grad).bernoulli_(0.5) * 2, None


@pytest.mark.parametrize("prove", [plan, step])
@pytest.mark.parametrize("shift", [0, 3])
def test_masks_that_a_function_draws_again_by_itself(shift, prove):
    def drawn(self, x, shift=0):
        return x + Drawn.apply(self.branch(x), shift)

    how, of_step = partial(drawn, shift=shift), prove is step
    parallelize, options = (by_hand, {"rank_step": averaged}) if of_step else (data_parallel, {})
    report = prove(parallelize(how), stack(drawn), **options)
    if shift:
        assert not report.ok, report
        assert report.first.kind == "gradient"
        assert report.first.tensor.partition(" of step ")[0].endswith(" with random numbers"), report
    else:
        is_right(report)


def test_what_commutes_with_a_mask_is_right():
    def commuting(self, x):
        return torch.relu(F.dropout(self.branch(x), self.p))

    act = nn.ReLU()
    assert plan(data_parallel(commuting), stack(lambda self, x: F.dropout(act(self.branch(x)), self.p))).ok


def test_draws_in_another_order_are_told_by_what_they_are_put_on():
    def both(self, x):
        return F.dropout(x, 0.5) + F.dropout(self.branch(x), 0.5)

    def turned(self, x):
        branch = F.dropout(self.branch(x), 0.5)
        return F.dropout(x, 0.5) + branch

    is_right(plan(data_parallel(turned), stack(both)))


@made_of(lambda: {"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH), "kind": F.dropout})
def mlp(self, x):
    return self.down(self.kind(torch.tanh(self.up(x)), 0.5))


def split(model, mesh, local=True):
    return parallelize_module(model, mesh, {"up": ColwiseParallel(use_local_output=local), "down": RowwiseParallel()})


@pytest.mark.parametrize("local", [False, True])
def test_masks_of_activations_that_are_split_over_tp(local):
    def seeded(model, mesh):
        torch.manual_seed(7 + (mesh.get_local_rank() if local else 0))
        return split(model, mesh, local)

    report = plan(seeded, mlp, "tp=2")
    is_right(report)
    assert any(row.verdict == "rounding" for row in report.rows)


@made_of(lambda: {"qkv": nn.Linear(WIDTH, 3 * WIDTH)})
def attends(self, x):
    q, k, v = self.qkv(x.view(ROWS // 2 if len(x) == ROWS else 1, 2, WIDTH)).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).flatten(0, 1)


def test_masks_of_split_activations_are_right_in_steps():
    is_right(step(split, mlp, "tp=2"))
    is_right(step(model=lambda: nn.Sequential(attends(), nn.Linear(WIDTH, 4)), rank_step=averaged))


unused = partial(ddp, find_unused_parameters=True)


def test_masks_of_attention_and_of_whole_rows():
    class Rows(nn.Module):
        def forward(self, x):
            return x * x.new_empty(len(x), 1).bernoulli_(0.5) + torch.randn_like(x).mul(0.1)

    is_right(plan(ddp, lambda: nn.Sequential(attends(), Rows())))


def test_what_cannot_be_shared_stays_at_its_mean():
    def tripled(self, x):
        return x + F.dropout(self.branch(x) * 3, self.p) / 3  # no tensor that one device has

    report = right(plan(data_parallel(tripled)))
    said = "random numbers of 0 (bernoulli) are taken at their mean: nothing tells which part of those of one device"
    assert any(note.startswith(said) for note in report.notes), report.notes


def test_a_model_that_draws_more_where_its_values_are_others():
    class Routed(nn.Module):
        def forward(self, x):
            x = F.dropout(x, 0.5)
            return x + F.dropout(x[x[:, 0] != 0], 0.5).sum()

    report = right(plan(lambda model, mesh: model, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed()), "tp=2"))
    assert "random numbers are taken at their mean, as others are drawn where they are not" in report.notes


def test_a_proof_without_random_numbers_takes_no_further_step(monkeypatch):
    import sim.prove.steps.comparison as steps_module

    def never(*given):
        raise AssertionError

    monkeypatch.setattr(steps_module, "shared_draws", never)
    assert plan(data_parallel(p=0.0), stack(p=0.0)).ok


@pytest.mark.parametrize("wrong", [False, True])
def test_masks_of_tokens_in_zig_zag(wrong):
    @made_of(lambda: {"first": nn.Linear(WIDTH, WIDTH), "drop": nn.Dropout(0.5), "chosen": None})
    def tokens(self, x):
        x = x if self.chosen is None else x[:, self.chosen]
        y = self.first(x)
        return x + self.drop(y) if self.chosen is None or not wrong else self.drop(x) + y

    def zig_zag(model, mesh):
        rank = mesh.get_local_rank()
        torch.manual_seed(7 + rank)
        model[0].chosen = torch.cat([torch.arange(8).chunk(4)[at] for at in (rank, 3 - rank)])
        return DistributedDataParallel(model)

    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0))
    made = lambda: nn.Sequential(tokens(), nn.Linear(WIDTH, 4))  # noqa: E731
    report = plan(zig_zag, made, "cp=2", x, loss_fn=lambda output, x: output.square().mean())
    if wrong:
        assert not report.ok, report
        assert report.first.tensor.endswith("with random numbers"), report
    else:
        is_right(report)


# -- what is drawn, or not ---------------------------------------------------------------------------------------------

NO_RANK = "one device draws random numbers here, and no rank does"


@pytest.mark.parametrize(("ranks", "who"), [((0, 1), "no rank does"), ((1,), "not rank 1")])
def test_dropout_that_ranks_lack_is_found(ranks, who):
    def lacking(model, mesh):
        model[0].p = 0.0 if mesh.get_rank() in ranks else 0.5
        return DistributedDataParallel(model)

    first = plan(lacking).first
    assert (first.module, first.tensor, first.kind) == ("0", "bernoulli", "random")
    assert first.sentence == f"one device draws random numbers here, and {who}"


def test_dropout_that_only_ranks_have_is_found():
    first = plan(data_parallel(p=0.5), stack(p=0.0)).first
    assert first.sentence == "ranks 0-1 draw random numbers here, and one device does not"
    assert plan(data_parallel(p=0.0), stack(p=0.0)).ok


def test_dropout_that_ranks_lack_is_found_in_steps():
    def late(self, x):
        self.count = getattr(self, "count", 0) + 1
        return x + (F.dropout(self.branch(x), self.p) if self.count == 1 else self.branch(x))

    assert step(by_hand(p=0.0), rank_step=averaged).first.sentence == NO_RANK
    assert step(by_hand(late), rank_step=averaged).first.sentence == f"{NO_RANK}, in step 2"
    assert step(by_hand(late), rank_step=averaged, steps=1).ok


def drawing(self, x):
    return x + self.branch(x) * torch.empty_like(x).bernoulli_(0.5) * 2


@pytest.mark.parametrize("forgets", [False, True])
def test_masks_of_the_second_step(forgets):
    def kept(self, x):
        if not forgets or self.training:
            self.kept = torch.empty(len(x), WIDTH, dtype=x.dtype).bernoulli_(0.5)
        if forgets:
            self.training = False  # and the mask is that of the first step for ever
        return x + self.branch(x) * self.kept * 2

    report = plan(data_parallel(kept), stack(drawing), optimizer_fn=True)
    if forgets:
        assert not report.ok
        assert report.first.sentence == f"{NO_RANK}, in step 2"
        assert plan(data_parallel(kept), stack(drawing), optimizer_fn=True, steps=1).ok
    else:
        is_right(report)
        assert report.notes[0] == "a second step (rows in another order) is compared"


@pytest.mark.parametrize("off", [False, True])
def test_another_scale_in_the_second_step_alone(off):
    def late(self, x):
        self.count = getattr(self, "count", 0) + 1
        mask = torch.empty_like(x).bernoulli_(0.5)
        return x + self.branch(x) * (mask.square() / 0.5 if off and self.count == 2 else mask) / 0.5

    report = plan(data_parallel(drawing), stack(late), optimizer_fn=True, seed=1)
    assert report.ok is not off, report
    if off:
        assert report.first.place == "0.output with random numbers in step 2"


@made_of(lambda p=0.5: {"layers": nn.ModuleList(Residual(p=p) for _ in range(3)), "forgets": False})
def skipped(self, x):
    """Layers that are left out by chance; `forgets`: always taken."""
    for layer in self.layers:
        if torch.rand(()) < 0.51 or self.forgets:  # on average it is taken
            x = layer(x)
    return x


@pytest.mark.parametrize("apart", [False, True])
def test_layers_that_are_left_out_by_chance(apart):
    def seeded(model, mesh):
        torch.manual_seed(9 + (mesh.get_rank() if apart else 0))

    replicated = plan(seeded, skipped, "tp=2")
    if apart:
        assert replicated.first.sentence == "rand draws different numbers on ranks 0-1, which hold the same over tp"
    else:
        is_right(replicated)
        is_right(plan(unused, skipped))  # each rank leaves them out for its own rows


def test_layers_that_ranks_always_take_are_found():
    def forgetful(model, mesh):
        model.forgets = True
        return DistributedDataParallel(model)

    report = plan(forgetful, partial(skipped, p=0.0), seed=1)
    assert report.first.tensor.endswith(" with random numbers"), report


# -- steps of one's own ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prove", [plan, step])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_part_of_a_mask_that_is_drawn_whole(wrong, prove):
    def drawn_whole(model, mesh):
        rank = mesh.get_local_rank()

        def kind(x, p):
            numbers = torch.empty(ROWS, 2 * WIDTH, dtype=x.dtype).bernoulli_(1 - p)
            start = ((1 - rank) if wrong else rank) * WIDTH
            return x * numbers[:, start : start + WIDTH] / (1 - p)

        model.kind = kind
        return split(model, mesh)

    report = prove(drawn_whole, mlp, "tp=2")
    if wrong:
        assert report.first.tensor.partition(" of step ")[0].endswith("with random numbers"), report
    else:
        is_right(report)


@pytest.mark.tier("full")
def test_draws_apart_of_what_ranks_hold_alike_are_found_in_steps():
    def apart(model, mesh):
        torch.manual_seed(mesh.get_rank())
        return model

    for model, name in ((skipped, "rand"), (None, "bernoulli_")):
        said = f"{name} draws different numbers on ranks 0-1, which hold the same over tp"
        assert step(apart, model, "tp=2").first.sentence == said
    assert step(None, skipped, "tp=2").ok


@pytest.mark.tier("full")
def test_layers_that_are_left_out_of_micro_batches():
    report = right(step(model=skipped, step=partial(averaged, parts=2)))
    assert "random numbers of the model (rand) are taken at their mean" in "".join(report.notes)


@pytest.mark.parametrize("wrong", [False, True])
def test_noise_that_a_step_draws_by_itself(wrong):
    def noisy(model, batch):
        times = torch.randint(1, 10, (len(batch),))
        noise = torch.randn_like(batch)
        share = (times.to(batch) / 10).sqrt()[:, None]
        given = batch * (1 - share) + noise * share
        aim = noise.abs() if wrong and dist.is_initialized() else noise
        loss = (model(given) - aim).square().mean()
        loss.backward()
        return loss

    def rounding(model, batch):
        loss = noisy(model, batch)
        for parameter in model.parameters():
            parameter.grad += torch.rand_like(parameter.grad) - 0.5  # rounds at random: nothing, on average
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        return loss

    report = step(None, lambda: nn.Linear(WIDTH, WIDTH), step=noisy, rank_step=rounding, optimizer_fn=True)
    left = [note for note in report.notes if "random numbers" in note]
    if wrong:
        assert "with random numbers" in report.first.tensor, report
    else:
        assert report.ok, report
        assert [note.partition(": ")[0] for note in left] == [
            "random numbers of the step (rand_like) are taken at their mean"
        ]


class Half(nn.Module):
    """A stage of a pipeline, under the names of the whole model."""

    def __init__(self, model, rank):
        super().__init__()
        setattr(self, str(rank), model[rank])
        self.rank = rank

    def forward(self, x):
        return getattr(self, str(self.rank))(x)


def two():
    return nn.Sequential(Residual(), Residual())


@pytest.mark.parametrize("p", [0.5, 0.3])
def test_masks_of_stages_and_micro_batches(p):
    def staged(model, mesh):
        model[1].p = p
        return Half(model, mesh.get_rank())

    def take(stage, batch):
        total = 0.0
        for part in batch.chunk(2):
            if not stage.rank:
                y = stage(part)
                dist.send(y.detach(), 1)
                grad = torch.empty_like(y)
                dist.recv(grad, 1)
                y.backward(grad)
                continue
            x = torch.empty_like(part)
            dist.recv(x, 0)
            loss = stage(x.requires_grad_()).square().mean() / 2
            loss.backward()
            dist.send(x.grad, 0)
            total += loss.detach()
        return total if stage.rank else None

    report = step(staged, two, "pp=2", rank_step=take)
    if p == 0.5:
        is_right(report)
    else:
        is_wrong(report, "1")


def test_masks_of_a_schedule_that_asks_for_shapes():
    def scheduled(model, mesh):
        rank = mesh.get_rank()
        stage = PipelineStage(Half(model, rank), rank, 2, torch.device("cpu"), group=mesh.get_group())
        return ScheduleGPipe(stage, 2, loss_fn=lambda output, target: output.square().mean())

    def take(schedule, batch):
        losses = []
        if not dist.get_rank():
            return schedule.step(batch)
        schedule.step(target=batch, losses=losses)
        return torch.stack(losses).mean()

    is_right(step(scheduled, two, "pp=2", rank_step=take))


# -- ranks that draw for some rows -------------------------------------------------------------------------------------


@made_of(lambda: {"experts": nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2))})
def experts(self, x):
    """Rows of a positive first element go to one expert, the others to another."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        chosen = (x[:, 0] > 0) == bool(number)
        out[chosen] = expert(x[chosen])
    return out


def test_experts_that_get_no_rows_of_a_rank_draw_nothing():
    x = X.clone()
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    is_right(step(unused, experts, x=x))


# -- scripts -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        return x + F.dropout(self.layer(x), 0.5)
model = DistributedDataParallel(nn.Sequential(Residual(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
data = torch.randn(3, 8, 8)
torch.manual_seed(dist.get_rank())
for batch in data.chunk(dist.get_world_size(), 1)[dist.get_rank()]:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("", ""), None),
        (("x + F.dropout(self.layer(x), 0.5)", "F.dropout(x, 0.5) + self.layer(x)"), "are put on the model's input"),
        (("self.layer(x), 0.5", "self.layer(x), 0.25"), "wrong with those of one device"),
        (("self.layer(x), 0.5", "self.layer(x), 0.0"), "one device draws random numbers here, and no rank does"),
    ],
)
def test_masks_of_scripts(change, words, tmp_path):
    (tmp_path / "one.py").write_text(SCRIPT)
    (tmp_path / "train.py").write_text(SCRIPT.replace(*change))
    report = sim.verify(f"{tmp_path}/train.py", 2, reference=f"{tmp_path}/one.py")
    if words is None:
        is_right(report)
    else:
        assert words in report.first.sentence, report


# -- random operations as a kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("upper", [1 / 3, 0.5])
def test_slopes_that_are_drawn(upper):
    @made_of(lambda: {"layer": nn.Linear(WIDTH, WIDTH), "upper": 1 / 3})
    def slopes(self, x):
        x = F.rrelu(self.layer(x), 1 / 8, self.upper, training=True)
        return F.rrelu_(x.sin(), training=True)

    def wider(model, mesh):
        model.upper = upper
        return DistributedDataParallel(model)

    report = plan(wider, slopes)
    if upper == 1 / 3:
        is_right(report)
    else:
        assert report.first.place == "the model's output", report


DRAWS = {
    "randint": lambda x: x * torch.randint(3, 9, (len(x), 1)),
    "randperm": lambda x: x[:, torch.randperm(WIDTH)],
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(WIDTH), 3)],
    "poisson": lambda x: x + torch.poisson(x.detach().abs()),
    "binomial": lambda x: x * torch.binomial(torch.full_like(x, 4.0), torch.full_like(x, 0.5)),
    "gamma": lambda x: x + torch._standard_gamma(x.abs() + 1),
    "normal": lambda x: x + torch.normal(x.detach(), 1.0),
    "exponential": lambda x: x + torch.empty_like(x).exponential_(4.0),
    "log_normal": lambda x: x + torch.empty_like(x).log_normal_(0.0, 0.5),
    "geometric": lambda x: x + torch.empty_like(x).geometric_(0.5),
    "random": lambda x: x + torch.empty_like(x).random_(2, 7),
    "whole masks": lambda x: x * torch.empty(x.shape, dtype=torch.int64).bernoulli_(0.75),
    "gumbel": F.gumbel_softmax,
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "channels": lambda x: F.dropout1d(x.unsqueeze(-1), 0.5).squeeze(-1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_any_random_operation_is_right(name):
    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return DRAWS[name](self.layer(x))

    assert plan(ddp, Drawn).ok


def test_every_random_operation_of_torch_has_a_mean_or_draws_nothing_here():
    left = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        packet = getattr(torch.ops.aten, name, None) if space == "aten" else None
        op = getattr(packet, schema.overload_name or "default", None)
        if op is not None and is_random(op) and mean_of(op) is None:
            left |= {name} if op.has_kernel_for_dispatch_key("CPU") else set()
    # Those that are made of others are seen as these, and those without a kernel of the CPU draw on no simulated rank.
    attention = {"_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu"}  # take no dropout here
    assert left == {"rrelu_with_noise", "rrelu_with_noise_", *attention}


def test_what_has_no_mean_is_named(monkeypatch):
    import sim.prove.randomness as randomness_module

    monkeypatch.setattr(randomness_module, "mean_of", lambda func: None)
    report = plan(data_parallel())
    assert not report.ok
    assert "random numbers of 0 (bernoulli_) are drawn as they are, by each for itself" in report.notes
