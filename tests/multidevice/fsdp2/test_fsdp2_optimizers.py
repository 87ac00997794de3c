"""fully_shard against FSDP2: torch's optimizers, clipping, scaling and averaging on sharded parameters."""

import torch
from fsdp2_kit import Theme, loss_of, on_processes
from torch import nn

import sim
from hyper_parallel.core.fully_shard.clip import get_total_norm

THEME = Theme()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained_by(run, kind, steps=2, **options):
    model = run.nested()
    optimizer = kind(model.parameters(), **options)
    run.train(model, steps=steps, optimizer=optimizer)
    for index, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                run.note(f"state {index} {name}", value)


# -- optimizers ----------------------------------------------------------------------------------------------------


@THEME.behaviour()
def sgd_with_momentum(run):
    trained_by(run, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


@THEME.behaviour()
def adamw_one_by_one(run):
    trained_by(run, torch.optim.AdamW, lr=0.01, foreach=False)


@THEME.behaviour()
def adamw_foreach(run):
    trained_by(run, torch.optim.AdamW, lr=0.01, foreach=True)


@THEME.behaviour()
def adamw_fused(run):
    trained_by(run, torch.optim.AdamW, lr=0.01, fused=True)


@THEME.behaviour()
def adam_with_amsgrad(run):
    trained_by(run, torch.optim.Adam, lr=0.01, amsgrad=True, foreach=True)


@THEME.behaviour()
def adagrad(run):
    trained_by(run, torch.optim.Adagrad, lr=0.01)


@THEME.behaviour()
def rmsprop(run):
    trained_by(run, torch.optim.RMSprop, lr=0.01, momentum=0.5)


@THEME.behaviour(4)
def adamw_foreach_over_two_axes(run):
    model = run.nested(mesh=run.mesh(2, 2))
    run.train(model, steps=3, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True))


@THEME.behaviour()
def parameter_groups(run):
    model = run.nested()
    decay = [p for name, p in model.named_parameters() if name.endswith("weight") and "norm" not in name]
    rest = [p for name, p in model.named_parameters() if not name.endswith("weight") or "norm" in name]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.02, "weight_decay": 0.0}]
    run.train(model, steps=3, optimizer=torch.optim.AdamW(groups, lr=0.01))


@THEME.behaviour()
def a_learning_rate_schedule(run):
    model = run.nested()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for step in range(4):
        optimizer.zero_grad()
        run.backward(loss_of(model, run.batch(step)))
        optimizer.step()
        schedule.step()
    run.note_model(model)


@THEME.behaviour()
def made_after_a_training_step(run):
    model = run.nested()
    run.backward(loss_of(model, run.batch(9)))
    run.train(model, optimizer=sgd(model))


@THEME.behaviour(without_fsdp2="the root shows unsharded parameters after an evaluation: a new optimizer trains copies")
def made_after_an_evaluation(run):
    for keep in (False, True):
        model = run.nested(**({"reshard_after_forward": False} if keep else {}))
        with torch.no_grad():
            model(run.batch(9))
        run.train(model, optimizer=sgd(model), when="kept" if keep else "freed")


@THEME.behaviour(without_fsdp2="the root shows unsharded parameters between forward and backward")
def made_between_forward_and_backward(run):
    model = run.nested(reshard_after_forward=False)
    loss = loss_of(model, run.batch())
    optimizer = sgd(model)
    run.backward(loss)
    optimizer.step()
    run.train(model, optimizer=optimizer)


@THEME.behaviour()
def one_optimizer_for_each_unit(run):
    model = run.nested()
    parts = [model.blocks, model.embed, model.head]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in parts]
    for step in range(2):
        model.zero_grad()
        run.backward(loss_of(model, run.batch(step)))
        for optimizer in optimizers:
            optimizer.step()
    run.note_model(model)


# -- norms ---------------------------------------------------------------------------------------------------------


@THEME.behaviour()
def clipped_by_the_norm(run):
    model = run.nested()
    run.train(model, optimizer=sgd(model), clip=0.05)


@THEME.behaviour(4)
def clipped_by_the_norm_over_two_axes(run):
    model = run.nested(mesh=run.mesh(2, 2))
    run.train(model, optimizer=sgd(model), clip=0.05)


@THEME.behaviour()
def clipped_by_other_norms(run):
    model = run.net()
    model.scale.requires_grad_(False)  # torch has no maximum of a part without elements
    run.wrap_blocks(model)
    norms = iter((1.0, 3.0, float("inf")))

    def clip():
        norm = next(norms)
        run.note(f"norm {norm}", nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm))

    run.train(model, steps=3, before_step=clip)


@THEME.behaviour()
def clipped_one_by_one(run):
    model = run.nested()
    run.backward(loss_of(model, run.batch()))
    run.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False, error_if_nonfinite=True))
    run.note_model(model)


@THEME.behaviour()
def clipped_by_value(run):
    model = run.nested()
    run.backward(loss_of(model, run.batch()))
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    run.note_model(model)


@THEME.behaviour(exact=False)
def norms_of_parts_of_the_model(run):
    model = run.nested()
    run.backward(loss_of(model, run.batch()))
    for name, part in (("blocks", model.blocks), ("head", model.head)):
        norm = nn.utils.get_total_norm([p.grad for p in part.parameters()])
        run.note(name, norm)
        run.note(f"{name}, by our function", get_total_norm(part) if run.ours else norm)


@THEME.behaviour()
def a_gradient_that_is_not_finite(run):
    """On one rank alone; after the reduction all ranks see it."""
    model = run.nested()
    x = run.batch()
    if 1 in run.parts():
        x[-1, -1] = float("inf")
    run.backward(loss_of(model, x))
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert not torch.isfinite(norm.full_tensor() if not run.alone else norm)
    run.losses.clear()
    run.facts["finite"] = [
        bool(torch.isfinite(p.grad.to_local() if not run.alone else p.grad).all())
        for p in (model.head.weight, model.embed.weight)
    ]


# -- around optimizers ---------------------------------------------------------------------------------------------


@THEME.behaviour()
def an_average_of_the_weights(run):
    model = run.nested()
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        run.backward(loss_of(model, run.batch(step)))
        optimizer.step()
        with torch.no_grad():
            for value, parameter in zip(average, model.parameters(), strict=True):
                value.lerp_(parameter, 0.1)
    for index, value in enumerate(average):
        run.note(f"average {index}", value)


@THEME.behaviour()
def weights_set_by_torchs_init(run):
    model = run.nested()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" in name:
            nn.init.constant_(parameter, 0.5)
    run.train(model)


@THEME.behaviour(without_traced="mixed torch.Tensor and DTensor")
def a_penalty_on_the_weights(run):
    """The loss uses the parameters themselves, inside of the forward, where they are unsharded."""
    model = run.net()
    forward = model.blocks[0].forward
    model.blocks[0].forward = lambda x: forward(x) * (1 + model.blocks[0].up.weight.square().mean())
    run.train(run.wrap_blocks(model))


# -- the tests -----------------------------------------------------------------------------------------------------


@THEME.contestants(2)
@sim.ranks(2, backends=("sim",))
def test_optimizers(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@THEME.contestants(4, tier="full")
@sim.ranks(4, backends=("sim",))
def test_optimizers_on_four_ranks(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@on_processes()
@sim.ranks(2, backends=("gloo", "gpu", "npu"))
def test_optimizers_on_processes(ctx, contestant):
    THEME.check_all(ctx, 2, contestant)
