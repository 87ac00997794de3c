"""fully_shard against FSDP2: what a unit may be, and how its modules may be called."""

from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fsdp2_kit import FSDP2, OURS, SAME_ORDER, Block, Net, Theme, loss_of, on_processes, sgd
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
import sim

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

THEME = Theme()


# -- what a unit may be --------------------------------------------------------------------------------------------


@THEME.behaviour()
def inner_layers_are_units_too(run):
    model = run.net()
    for block in model.blocks:
        run.wrap(block.up)
        run.wrap(block)
    run.train(run.wrap(model))


@THEME.behaviour()
def a_unit_without_parameters(run):
    model = run.net()
    for part in (model.blocks[0].norm, model.blocks[0].up, model.blocks[0].down, model.blocks[0]):
        run.wrap(part)
    run.train(run.wrap(model))


@THEME.behaviour(without_hsdp="is a list")
def a_list_keeps_the_root_most(run):
    model = run.net()
    run.wrap([model.blocks[0].up, model.blocks[0], model.blocks[1], model.blocks[1].norm])
    run.train(run.wrap(model))


@THEME.behaviour(without_hsdp="is a list")
def a_list_of_modules_called_in_another_order(run):
    model = run.net()
    run.wrap([model.head, model.blocks[2], model.embed])
    run.train(run.wrap(model))


class Routed(Net):
    """Runs the chosen blocks only."""

    chosen = (0, 1, 2)

    def forward(self, x):
        x = self.embed(x) * self.scale
        for index in self.chosen:
            x = self.blocks[index](x)
        return self.head(x)


@THEME.behaviour(without_hsdp="is a list")
def a_list_of_which_some_modules_run(run):
    model = run.build(Routed)
    run.wrap([*model.blocks])
    run.wrap(model)
    optimizer = sgd(model)
    for chosen in ((0,), (2, 0), (0, 1, 2), (1, 0, 1)):
        model.chosen = chosen
        with torch.no_grad():
            model(run.batch())
        run.train(model, optimizer=optimizer, when=f"{chosen}")


@THEME.behaviour(without_hsdp="is a list")
def a_list_whose_last_module_is_called_apart(run):
    """The loss in chunks: the root's forward ends before the head of its last unit is called."""

    class Trunk(Net):
        def forward(self, x):
            x = self.embed(x) * self.scale
            for block in self.blocks[:2]:
                x = block(x)
            return self.blocks[2](x)

    model = run.build(Trunk)
    run.wrap([model.blocks[2], model.head])
    run.wrap(model)

    def loss(step):
        chunks = model(run.batch(step)).chunk(2, dim=1)
        padded = [F.pad(chunk, (0, 7 - chunk.shape[1])) for chunk in chunks]
        return sum(model.head(chunk).square().mean() for chunk in padded)

    run.train(model, loss)


@THEME.behaviour()
def a_sequential_is_one_unit(run):
    model = run.build(
        lambda: nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), nn.ReLU()), nn.Linear(7, 3))
    )
    run.wrap(model[1])
    run.train(run.wrap(model))


@THEME.behaviour()
def the_root_alone_is_not_wrapped(run):
    model = run.net()
    for part in (model.embed, *model.blocks, model.head):
        run.wrap(part)
    model.scale.requires_grad_(False)  # nobody would reduce its gradient
    run.train(model)


@THEME.behaviour()
def parameters_in_lists_and_dicts(run):
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.list = nn.ParameterList([torch.randn(5, 7), torch.randn(7, 3)])
            self.dict = nn.ParameterDict({"b": torch.randn(3), "a": torch.randn(1, 3)})

        def forward(self, x):
            for weight in self.list:
                x = x @ weight
            return x + self.dict["a"] * self.dict["b"]

    model = run.build(Lists)
    run.train(run.wrap(model))


@THEME.behaviour()
def tied_in_one_unit(run):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 6)
            self.block = nn.Linear(6, 6)
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(torch.tanh(self.block(self.embed(x))))

    model = run.build(Tied)
    run.wrap(model.block)
    run.wrap(model)
    if not run.alone:
        assert model.head.weight is model.embed.weight
    run.train(model, lambda step: loss_of(model, (run.batch(step)[:, 0].abs() * 4).long() % 9))
    if not run.alone:
        assert model.head.weight is model.embed.weight


@THEME.behaviour(without_hsdp="is a list")
def tied_over_the_modules_of_a_list(run):
    model = run.net()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    run.wrap([model.blocks[0], model.blocks[2]])
    run.train(run.wrap(model))


@THEME.behaviour()
def one_module_in_two_places(run):
    model = run.net()
    model.blocks[2] = model.blocks[0]
    for block in (model.blocks[0], model.blocks[1]):
        run.wrap(block)
    run.train(run.wrap(model))


@THEME.behaviour()
def buffers_are_kept_and_updated(run):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)

        def forward(self, x):
            return self.norm(self.up(x))

    model = run.build(Normed)
    run.wrap(model.norm)
    run.wrap(model)
    x = torch.ones(4, 5, dtype=run.dtype, device=run.ctx.device) * torch.arange(4, device=run.ctx.device)[:, None]
    run.train(model, lambda step: loss_of(model, x * (step + 1)))  # the same batch on all ranks, and on one
    for name, buffer in model.named_buffers():
        run.note(name, buffer)


# -- which parameters get gradients --------------------------------------------------------------------------------


@THEME.behaviour()
def some_parameters_of_a_unit_are_frozen(run):
    model = run.net()
    for parameter in (model.scale, model.blocks[0].up.weight, model.blocks[1].norm.bias, model.head.bias):
        parameter.requires_grad_(False)
    run.train(run.wrap_blocks(model))


@THEME.behaviour()
def whole_units_are_frozen(run):
    model = run.net()
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)  # before it, nothing needs a gradient
    model.scale.requires_grad_(False)
    model.blocks[2].requires_grad_(False)  # between units that train
    run.wrap(model.embed)
    run.train(run.wrap_blocks(model))


@THEME.behaviour()
def frozen_after_the_first_step(run):
    model = run.net()
    model.embed.requires_grad_(False)  # when wrapped, and trained after the first step
    run.train(run.wrap_blocks(model), steps=1)
    for step, flag in ((1, False), (2, True)):
        model.embed.requires_grad_(not flag)
        for name, parameter in model.named_parameters():
            if name.startswith("blocks.1") or name == "head.bias":
                parameter.requires_grad_(flag)
        model.zero_grad()
        run.backward(loss_of(model, run.batch(step)))
        run.note_model(model, f"after step {step}")


@THEME.behaviour()
def parameters_that_no_rank_uses(run):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.never = nn.Linear(5, 3), nn.Linear(5, 3)
            self.units = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

        def forward(self, x):
            return self.units[0](self.used(x))

    model = run.build(Branches)
    for unit in model.units:
        run.wrap(unit)
    run.train(run.wrap(model))


@THEME.behaviour(
    without_fsdp2="packs what has a gradient, so ranks send unequal sizes (optionally zeros since 2.13)",
    without_traced=SAME_ORDER,
)
def parameters_that_some_ranks_use(run):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.sometimes, self.never = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)
            self.frozen = nn.Linear(5, 3).requires_grad_(False)

        def forward(self, x, *, both):
            return self.used(x) + self.frozen(x) + (self.sometimes(x) if both else 0)

    for shape in ((2,), (2, 1)):
        model = run.build(Branches)
        run.wrap(model, mesh=run.mesh(*shape))

        def loss(step, model=model):
            x = run.batch(step)
            each = [loss_of(model, part, both=rank == 1) for rank, part in zip(run.parts(), x.split(4), strict=True)]
            return sum(each) / len(each)

        run.train(model, loss, when=f"on {shape}")


class Optional(nn.Module):
    """An adapter that a rank may leave out."""

    def __init__(self):
        super().__init__()
        self.inner, self.adapter = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x, *, use):
        y = self.inner(x)
        return self.adapter(y) if use else y


def train_by_turns(run, model):
    """In each step another rank uses the adapter."""

    def loss(step):
        parts = zip(run.parts(), run.batch(step).split(4), strict=True)
        each = [loss_of(model, part, use=(rank + step) % run.ctx.world_size == 0) for rank, part in parts]
        return sum(each) / len(each)

    run.train(model, loss, steps=3)


ZEROS = "set_reduce_scatter_unused_params"
NO_ZEROS = "" if hasattr(FSDPModule, ZEROS) else "packs what has a gradient: ranks send unequal sizes (before 2.13)"


@THEME.behaviour(without_fsdp2=NO_ZEROS, without_traced=SAME_ORDER)
def an_inner_output_that_some_ranks_return(run):
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.middle, self.head = nn.Linear(5, 5), Optional(), nn.Linear(5, 3)

        def forward(self, x, *, use):
            return self.head(self.middle(self.embed(x), use=use))

    model = run.build(Between)
    for unit in (model.embed, model.middle.inner, model.middle, model.head, model):
        run.wrap(unit)
    if run.engine is FSDP2:
        run.tell(model, ZEROS, True)
    train_by_turns(run, model)


@THEME.behaviour(without_fsdp2=NO_ZEROS, without_traced=SAME_ORDER)
def an_input_that_some_ranks_return(run):
    """Recomputation makes a second view of the input, whose base belongs to the graph of the first forward."""

    class Skipped(nn.Linear):
        def forward(self, x, *, use):
            return super().forward(x) if use else x

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.middle, self.head = nn.Linear(5, 5), Skipped(5, 5), nn.Linear(5, 3)

        def forward(self, x, *, use):
            rest = lambda x: self.head(torch.tanh(self.middle(x, use=use)))  # noqa: E731
            return checkpoint(rest, self.embed(x), use_reentrant=False)

    model = run.build(Around)
    for unit in (model.middle, model):
        run.wrap(unit)
    if run.engine is FSDP2:
        run.tell(model, ZEROS, True)
    train_by_turns(run, model)


@THEME.behaviour(
    without_fsdp2="leaves ranks out of the reduction that use none of the root's parameters", without_traced=SAME_ORDER
)
def an_inner_output_that_some_ranks_of_the_root_return(run):
    model = run.build(Optional)
    run.wrap(model.inner)
    run.wrap(model)
    train_by_turns(run, model)


@THEME.behaviour()
def an_output_that_the_loss_does_not_use(run):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            return self.a(x), self.b(x)

    model = run.build(lambda: nn.Sequential(Two()))
    run.wrap(model[0])
    run.train(run.wrap(model), lambda step: model(run.batch(step))[0].square().mean())


@THEME.behaviour()
def gradients_of_the_inputs(run):
    model = run.nested()
    x = run.batch().requires_grad_()

    def loss(step):
        torch.autograd.grad(loss_of(model, x), [x])  # and of nothing else
        return loss_of(model, x)

    run.train(model, loss)
    if not run.alone:
        run.facts["input gradient"] = x.grad.tolist() if run.ctx.backend == "sim" else x.grad.shape
    assert x.grad.abs().sum() > 0


@THEME.behaviour()
def inputs_that_are_detached_between_units(run):
    class Detached(Net):
        def forward(self, x):
            x = self.blocks[0](self.embed(x) * self.scale)
            return self.head(self.blocks[2](self.blocks[1](x.detach())) + x)

    model = run.build(Detached)
    run.train(run.wrap_blocks(model))


# -- how a unit may be called --------------------------------------------------------------------------------------


def train_freed_and_kept(run, loss, make=Net):
    """Train a model whose units free their parameters after forward, and one whose units keep them."""
    for keep in (False, True):
        model = run.build(make)
        run.wrap_blocks(model, **({"reshard_after_forward": False} if keep else {}))
        run.train(model, partial(loss, model), when="kept" if keep else "freed")


@THEME.behaviour()
def two_forwards_one_backward(run):
    def loss(model, step):
        return loss_of(model, run.batch(step)) + 2 * loss_of(model, run.batch(step + 9))

    train_freed_and_kept(run, loss)


@THEME.behaviour()
def two_forwards_two_backwards(run):
    def loss(model, step):
        first, second = loss_of(model, run.batch(step)), loss_of(model, run.batch(step + 9))
        run.backward(first)
        return second

    train_freed_and_kept(run, loss)


@THEME.behaviour()
def one_forward_two_backwards(run):
    def loss(model, step):
        now = loss_of(model, run.batch(step))
        run.backward(now, retain_graph=True)
        return now

    train_freed_and_kept(run, loss)


@THEME.behaviour()
def the_output_goes_in_again(run):
    def loss(model, step):
        y = model(run.batch(step))
        return loss_of(model, torch.cat([y, y], dim=1)[:, :5])

    train_freed_and_kept(run, loss)


@THEME.behaviour()
def a_forward_without_backward_in_between(run):
    def loss(model, step):
        model(run.batch(step + 5))
        return loss_of(model, run.batch(step))

    train_freed_and_kept(run, loss)


@THEME.behaviour()
def a_unit_runs_twice_in_a_forward(run):
    class Twice(Net):
        def forward(self, x):
            with torch.no_grad():
                before = self.embed(x)
            x = self.embed(x) * self.scale + before
            return self.head(self.blocks[2](self.blocks[0](self.blocks[1](self.blocks[0](x)))))

    model = run.build(Twice)
    run.train(run.wrap_blocks(model))


@THEME.behaviour()
def another_order_of_units_in_each_step(run):
    model = run.nested()
    blocks = list(model.blocks)

    def loss(step):
        model.blocks = nn.ModuleList(blocks[::-1] if step % 2 else blocks)
        return loss_of(model, run.batch(step))

    optimizer = sgd(model)
    run.train(model, loss, steps=4, optimizer=optimizer)


@THEME.behaviour()
def a_unit_is_left_out_in_some_steps(run):
    class Skips(Net):
        skip = False

        def forward(self, x):
            x = self.embed(x) * self.scale
            for index, block in enumerate(self.blocks):
                if not (self.skip and index == 1):
                    x = block(x)
            return self.head(x)

    model = run.build(Skips)
    run.wrap_blocks(model)

    def loss(step):
        model.skip = step % 2 == 0
        return loss_of(model, run.batch(step))

    run.train(model, loss, steps=3)


@THEME.behaviour()
def a_unit_is_called_after_the_root(run):
    model = run.nested()

    def loss(step):
        y = model(run.batch(step))
        return y.square().mean() + loss_of(model.blocks[1], F.pad(y, (0, 3)))

    run.train(model, loss)


@THEME.behaviour(without_fsdp2="wants the root's forward first: RuntimeError")
def an_inner_unit_runs_before_the_root(run):
    model = run.nested()

    def loss(step):
        x = F.pad(run.batch(step + 5), (0, 2))
        return loss_of(model.blocks[0], x) + loss_of(model, run.batch(step))

    run.train(model, loss)


class Recomputed(Net):
    reentrant = False

    def forward(self, x):
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class RecomputedReentrant(Recomputed):
    reentrant = True


@THEME.behaviour()
def checkpointing_each_block(run):
    train_freed_and_kept(run, lambda model, step: loss_of(model, run.batch(step)), Recomputed)


@THEME.behaviour()
def checkpointing_each_block_reentrant(run):
    train_freed_and_kept(run, lambda model, step: loss_of(model, run.batch(step)), RecomputedReentrant)


class Inside(Block):
    """Recomputes a part of itself."""

    reentrant = False

    def forward(self, x):
        inner = checkpoint(lambda y: torch.tanh(self.up(self.norm(y))), x, use_reentrant=self.reentrant)
        return x + self.down(inner)


class InsideReentrant(Inside):
    reentrant = True


def with_blocks(run, kind):
    model = run.net()
    for block in model.blocks:
        block.__class__ = kind
    return run.wrap_blocks(model)


@THEME.behaviour()
def checkpointing_inside_of_a_unit(run):
    run.train(with_blocks(run, Inside))


@THEME.behaviour()
def checkpointing_inside_of_a_unit_reentrant(run):
    run.train(with_blocks(run, InsideReentrant))


@THEME.behaviour()
def checkpointing_several_units_together(run):
    class Together(Net):
        def forward(self, x, *, reentrant):
            x = self.embed(x) * self.scale
            x = checkpoint(lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=reentrant)
            return self.head(self.blocks[2](x))

    for reentrant in (False, True):
        model = run.build(Together)
        run.wrap_blocks(model)

        def loss(step, model=model, reentrant=reentrant):
            return loss_of(model, run.batch(step), reentrant=reentrant)

        run.train(model, loss, when=f"{reentrant}")


@THEME.behaviour()
def checkpointing_the_root(run):
    for reentrant in (False, True):
        model = run.nested()

        def loss(step, model=model, reentrant=reentrant):
            x = run.batch(step).requires_grad_()
            return checkpoint(model, x, use_reentrant=reentrant).square().mean()

        run.train(model, loss, when=f"{reentrant}")


@THEME.behaviour()
def evaluation_before_training(run):
    model = run.nested()
    optimizer = sgd(model)
    model.eval()
    with torch.no_grad():
        run.losses.append(loss_of(model, run.batch(7)))
    model.train()
    run.train(model, optimizer=optimizer)
    with torch.no_grad():
        run.losses.append(loss_of(model, run.batch(8)))


@THEME.behaviour(without_fsdp2="the root's parameters, kept after the evaluation, are inference tensors: RuntimeError")
def evaluation_in_inference_mode_between_steps(run):
    model = run.nested()
    optimizer = sgd(model)
    for step in range(2):
        with torch.inference_mode():
            run.losses.append(loss_of(model, run.batch(step + 7)).clone())
        optimizer.zero_grad()
        run.backward(loss_of(model, run.batch(step)))
        optimizer.step()
    run.note_model(model)


@THEME.behaviour()
def evaluation_between_forward_and_backward(run):
    def loss(model, step):
        now = loss_of(model, run.batch(step))
        with torch.no_grad():
            model(run.batch(step + 7))
        return now

    train_freed_and_kept(run, loss)


@THEME.behaviour()
def keyword_arguments_and_containers(run):
    class Fancy(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(5, 4)

        def forward(self, x, *, options, unused=None):
            y = self.lin(x) * options["factor"] + options["more"][0]
            return {"y": y, "parts": [y[:, 0], (y * 2, None, "text")]}

    model = run.build(lambda: nn.Sequential(Fancy()))
    fancy = model[0]
    run.wrap(fancy)
    more = torch.ones(4, dtype=run.dtype, device=run.ctx.device, requires_grad=True)

    def loss(step):
        out = fancy(run.batch(step), unused=[], options={"factor": 2.0, "more": [more]})
        return out["parts"][1][0].square().mean() + out["parts"][0].mean()

    run.train(model, loss)
    assert more.grad is not None


@dataclass
class Output:
    logits: torch.Tensor
    extra: dict


@THEME.behaviour(without_fsdp2="" if torch.__version__ >= (2, 13) else "does not look into dataclasses: RuntimeError")
def outputs_in_a_dataclass(run):
    class Wrapped(Block):
        def forward(self, x):
            y = super().forward(x)
            return Output(y, {"half": y * 0.5})

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Wrapped(5), Wrapped(5)

        def forward(self, x):
            return self.second(self.first(x).extra["half"])

    model = run.build(Outer)
    run.wrap(model.first)
    run.wrap(model.second)
    run.train(run.wrap(model), lambda step: model(run.batch(step)).logits.square().mean())


Named = namedtuple("Named", ["y", "aux"])


@THEME.behaviour()
def outputs_in_a_namedtuple(run):
    class Wrapped(Block):
        def forward(self, x, before=None):
            y = super().forward(x if before is None else before.y + before.aux)
            return Named(y, y * 0.5)

    model = run.build(lambda: nn.ModuleList([Wrapped(5), Wrapped(5)]))
    run.wrap(model[0])
    run.wrap(model[1])

    def loss(step):
        out = model[1](None, before=model[0](run.batch(step)))
        assert type(out) is Named
        return out.y.square().mean() + out.aux.mean()

    run.train(model, loss)


class Halves(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, :2]


@THEME.behaviour(without_fsdp2="the hook on the view is lost, and backward runs without gathered parameters")
def an_output_view_modified_in_place(run):
    model = run.build(lambda: nn.Sequential(Halves(5, 4), nn.Linear(2, 3)))
    for layer in model:
        run.wrap(layer)
    run.train(model, lambda step: loss_of(model[1], changed(model[0](run.batch(step)))))


def changed(y):
    y.mul_(2.0).add_(1.0)
    y[:, 0].mul_(2.0)
    return y


@THEME.behaviour()
def an_output_modified_in_place(run):
    """Of a unit, as a whole and in part, and of the root."""
    model = run.build(lambda: nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 3)))
    for layer in model:
        run.wrap(layer)
    run.train(model, lambda step: loss_of(model[1], changed(model[0](run.batch(step)))), when="of a unit")
    model = run.nested()
    run.train(model, lambda step: changed(model(run.batch(step))).square().mean())


@THEME.behaviour()
def an_output_that_is_an_input(run):
    class Passes(nn.Linear):
        def forward(self, x):
            return x, super().forward(x)

    model = run.build(lambda: nn.Sequential(nn.Linear(5, 5), Passes(5, 3)))
    for layer in model:
        run.wrap(layer)
    run.train(run.wrap(model), lambda step: sum(t.square().mean() for t in model(run.batch(step))))


@THEME.behaviour(without_traced="torch.compile to trace")
def methods_other_than_forward(run):
    class Codec(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(5, 3), nn.Linear(3, 5)

        def encode(self, x):
            return torch.tanh(self.down(x))

        def decode(self, code, *, scale):
            return self.up(code) * scale

        def forward(self, x):
            return self.decode(self.encode(x), scale=2.0)

    model = run.build(lambda: nn.Sequential(Codec()))
    codec = model[0]
    run.wrap(codec)
    for method in ("encode", "decode"):
        run.forward_method(codec, method)

    def loss(step):
        x = run.batch(step)
        if step == 0:
            return codec.decode(codec.encode(x), scale=2.0).square().mean()
        return codec(x).square().mean()

    run.train(model, loss, steps=3)
    with torch.no_grad():
        run.losses.append(codec.encode(run.batch(5)).square().mean())


@THEME.behaviour(without_traced="other facts")
def hooks_of_the_user_on_modules(run):
    model = run.net()
    seen = run.facts.setdefault("seen", [])
    for register in (model.blocks[0].register_forward_pre_hook, model.blocks[0].register_forward_hook):
        register(lambda m, *_: seen.append((type(m.up.weight), m.up.weight.shape)) and None)
    model.blocks[0].register_forward_hook(lambda m, a, y: y * 2)
    model.blocks[1].register_forward_pre_hook(lambda m, a: (a[0] + 1,))
    run.wrap_blocks(model)
    model.blocks[0].register_forward_hook(lambda m, a, y: y + 1)
    model.blocks[1].register_forward_pre_hook(lambda m, a: (a[0] * 3,))
    model.blocks[2].register_full_backward_hook(lambda m, g, o: (g[0] * 0.5,))
    run.train(model)


@THEME.behaviour()
def hooks_of_the_user_on_parameters(run):
    """What runs when a gradient is there, such as an optimizer in backward."""
    model = run.nested()
    called = []
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in model.parameters()}

    def step_now(parameter):
        called.append(parameter.grad is not None)
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    for step in range(3):
        run.backward(loss_of(model, run.batch(step)))
    assert called == [True] * (3 * len(list(model.parameters())))
    run.note_model(model)


# Where torch has cuDNN: on an H200, FSDP2's second loss was that without an update, to all digits.
@THEME.behaviour(
    without_fsdp2="an LSTM moves its weights, and no update arrives" if torch.backends.cudnn.is_available() else ""
)
def weights_of_an_lstm(run):
    model = run.build(lambda: nn.Sequential(nn.LSTM(5, 3, batch_first=True)))
    run.wrap(model[0])
    run.train(run.wrap(model), lambda step: model(run.batch(step)[:, None])[0].square().mean())


@THEME.behaviour()
def attention_with_one_tensor_for_all(run):
    model = run.build(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    run.wrap(model.self_attn)
    run.train(run.wrap(model), lambda step: loss_of(model, run.batch(step, width=8)[:, None]))


# -- the tests -----------------------------------------------------------------------------------------------------


@THEME.contestants(2)
@sim.ranks(2, backends=("sim",))
def test_units(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@on_processes()
@sim.ranks(2, backends=("gloo", "gpu", "npu"))
def test_units_on_processes(ctx, contestant):
    THEME.check_all(ctx, 2, contestant)


@sim.ranks(2, backends=("sim",))
def test_a_profile_shows_fsdp2s_ranges(ctx, tmp_path):
    found = []
    for engine in (OURS, FSDP2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for part in (*model, model):
            engine.api.fully_shard(part)
        with profile() if ctx.rank == 0 else nullcontext() as recorded:
            loss_of(model, torch.ones(2, 4)).backward()
            hp.clip_grad_norm_(model, 1.0)
            if engine is OURS:
                hp.save_checkpoint(tmp_path / "step", {"weight": model[0].weight})
                hp.load_checkpoint(tmp_path / "step", {"weight": model[0].weight})
                hp.redistribute(model[0].weight.detach(), ())
        found.append({event.name for event in recorded.events()} if ctx.rank == 0 else set())
    ours, theirs = found
    if ctx.rank == 0:
        # Of FSDP2's we have two phases less: gradients arrive where they are reduced from, and the next gather waits.
        less = {f"FSDP::post_backward_{name} ({i})" for name in ("accumulate", "rs_wait") for i in (0, 1)}
        assert {name for name in theirs if name.endswith((" (0)", " (1)"))} - ours == less & theirs
        assert {"FSDP::root_post_backward_callback", "FSDP::pre_forward (1)"} <= ours & theirs
        assert {"redistribute", "clip_grad_norm_", "checkpoint::save", "checkpoint::load"} <= ours
