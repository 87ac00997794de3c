"""fully_shard against FSDP2: what a rank communicates and what memory it holds; ours is at most what FSDP2's is.

Simulated ranks only: their trace has every collective, and a rank's operations all run in its own thread.
"""

import contextlib

import pytest
import torch
from fsdp2_kit import FSDP2, Theme, loss_of
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import sim
from sim.kernel.context import current_context

pytestmark = pytest.mark.tier("test")

THEME = Theme()
EACH = r"costs more|assert \d+ == "  # a traced cell gathers and reduces each parameter by itself, in each use
WIDTH, BLOCKS = 64, 4
BLOCK_BYTES = 4 * (WIDTH * 4 * WIDTH * 2 + 5 * WIDTH)  # two weights and two biases in fp32


class Stack(nn.Module):
    """Blocks that outweigh everything else, activations too."""

    recompute = False

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Meter(TorchDispatchMode):
    """The bytes of memory that this rank holds, looked at after each operation."""

    def __init__(self, model):
        super().__init__()
        self.held = {}
        self.peak = 0
        self.watch([p.to_local() if isinstance(p, DTensor) else p.data for p in model.parameters()])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.watch((args, kwargs, result))
        self.peak = max(self.peak, self.now())
        return result

    def watch(self, tree):
        for tensor in tree_leaves(tree):
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self.held.setdefault(storage._cdata, StorageWeakRef(storage))

    def now(self):
        total = 0
        for key, held in list(self.held.items()):
            if held.expired():
                del self.held[key]
            else:
                total += torch.UntypedStorage._new_with_weak_ptr(held.cdata).nbytes()
        return total


def sent(run):
    """What this rank has communicated so far."""
    return current_context().network.trace.of_rank(run.ctx.rank)


def allowed(run, model):
    """What ours may have more per step: a flag for each parameter and rank, and a start at 512 bytes for each unit."""
    return 8 * len(list(model.parameters())) * run.ctx.world_size + 512 * (BLOCKS + 1) if run.engine is FSDP2 else 0


@contextlib.contextmanager
def counted(run, model, when="", backwards=1):
    """Note collectives and bytes."""
    before = len(sent(run))
    yield
    events = sent(run)[before:]
    gathers = [event for event in events if event.op == "all_gather"]
    reductions = [event for event in events if event.op != "all_gather"]
    run.costs[f"gathers {when}"] = len(gathers)
    run.costs[f"reductions {when}"] = len(reductions)
    run.costs[f"bytes gathered {when}"] = sum(event.recv_bytes for event in gathers)
    run.costs[f"bytes reduced {when}"] = sum(event.recv_bytes for event in reductions) + allowed(run, model) * backwards


def stack(run, *, fuse=False, **options):
    model = run.build(Stack, torch.float32)
    if fuse and run.ours:
        options["comm_fusion"] = True
    return run.wrap_blocks(model, **options)


def one_step(run, model, step=0):
    loss_of(model, run.batch(step).float()).backward()


def costs_of_steps(run, model, body=one_step, **options):
    """The first step does not know the order of units yet; count that one, and the next."""
    for step in range(2):
        with counted(run, model, f"of step {step}", **options):
            body(run, model, step)
        model.zero_grad()


def memory_of_steps(run, model, body=one_step):
    body(run, model, 0)
    model.zero_grad()
    with Meter(model) as meter:
        body(run, model, 1)
    run.costs["peak"] = meter.peak + allowed(run, model)
    run.costs["after backward"] = meter.now() + allowed(run, model)


# -- communication -------------------------------------------------------------------------------------------------


@THEME.behaviour(4, one=False, without_traced=EACH)
def collectives_of_a_step(run):
    model = stack(run)
    costs_of_steps(run, model)
    assert run.costs["gathers of step 1"] == 2 * BLOCKS + 1
    assert run.costs["reductions of step 1"] == BLOCKS + 1


@THEME.behaviour(4, one=False, without_traced=EACH)
def collectives_over_two_axes(run):
    costs_of_steps(run, stack(run, mesh=run.mesh(2, 2)))


@THEME.behaviour(4, one=False, without_traced=EACH)
def collectives_of_weights_kept_after_forward(run):
    model = stack(run, reshard_after_forward=False)
    costs_of_steps(run, model)
    assert run.costs["gathers of step 1"] == BLOCKS + 1


@THEME.behaviour(2, one=False, without_traced=EACH)
def collectives_of_weights_kept_after_backward(run):
    model = stack(run, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    costs_of_steps(run, model)
    assert run.costs["gathers of step 1"] == 0


@THEME.behaviour(4, one=False, without_hsdp="reshard_after_forward")
def collectives_of_weights_split_over_fewer_ranks(run):
    costs_of_steps(run, stack(run, reshard_after_forward=2))


@THEME.behaviour(2, one=False, without_hsdp="mp_policy")
def collectives_in_bf16(run):
    costs_of_steps(run, stack(run, mp_policy=run.policy(torch.bfloat16, torch.float32)))


@THEME.behaviour(2, one=False, without_hsdp="mp_policy")
def collectives_of_reductions_in_bf16(run):
    costs_of_steps(run, stack(run, mp_policy=run.policy(torch.bfloat16)))


@THEME.behaviour(2, one=False, without_hsdp="shard_placement_fn")
def collectives_along_the_last_dim(run):
    costs_of_steps(run, stack(run, shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.shape[-1] % 2 == 0 else None))


@THEME.behaviour(2, one=False, without_traced=EACH)
def collectives_of_frozen_units(run):
    model = run.build(Stack, torch.float32)
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    run.wrap_blocks(model, **({"comm_fusion": True} if run.ours else {}))
    costs_of_steps(run, model)
    assert run.costs["reductions of step 1"] == BLOCKS - 2 + 1


def accumulate(run, model, step, **flags):
    for micro in range(3):
        for method in flags:
            getattr(model, method)(micro == 2)
        one_step(run, model, 10 * step + micro)


@THEME.behaviour(2, one=False, without_traced=EACH)
def collectives_of_micro_batches(run):
    def body(run, model, step):
        accumulate(run, model, step, set_requires_gradient_sync=False)

    costs_of_steps(run, stack(run), body)
    assert run.costs["reductions of step 1"] == BLOCKS + 1


@THEME.behaviour(2, one=False, without_traced=EACH)
def collectives_of_micro_batches_that_keep_the_weights(run):
    def body(run, model, step):
        accumulate(run, model, step, set_requires_gradient_sync=False, set_reshard_after_backward=False)

    costs_of_steps(run, stack(run, reshard_after_forward=False), body)
    assert run.costs["gathers of step 1"] == BLOCKS + 1


@THEME.behaviour(4, one=False, without_traced=EACH)
def collectives_of_micro_batches_over_two_axes(run):
    def body(run, model, step):
        accumulate(run, model, step, set_requires_all_reduce=False)

    costs_of_steps(run, stack(run, mesh=run.mesh(2, 2)), body, backwards=3)


@THEME.behaviour(2, one=False, without_traced=EACH)
def collectives_of_an_evaluation(run):
    def body(run, model, step):
        with torch.no_grad():
            model(run.batch(step).float())
        for part in (*model.blocks, model):
            part.reshard()

    costs_of_steps(run, stack(run), body)


@THEME.behaviour(2, one=False, without_traced="torch.compile to trace")
def collectives_of_an_evaluation_that_keeps_the_weights(run):
    def body(run, model, step):
        model.set_reshard_after_forward(False)
        for part in (*model.blocks, model) if run.ours else ():
            part.unshard()  # ours keeps through forwards without gradients what was gathered by hand
        for _ in range(3):
            with torch.no_grad():
                model(run.batch(step).float())
        model.set_reshard_after_forward(True)
        for part in (*model.blocks, model):
            part.reshard()

    costs_of_steps(run, stack(run), body)
    assert run.costs["gathers of step 1"] == BLOCKS + 1


@THEME.behaviour(2, one=False, without_traced=EACH)
def collectives_under_checkpointing(run):
    model = stack(run)
    model.recompute = True
    costs_of_steps(run, model)
    assert run.costs["gathers of step 1"] == 2 * BLOCKS + 1
    assert run.costs["reductions of step 1"] == BLOCKS + 1


@THEME.behaviour(2, one=False, without_traced=EACH)
def collectives_of_two_forwards_before_a_backward(run):
    def body(run, model, step):
        (loss_of(model, run.batch(step).float()) + loss_of(model, run.batch(step + 5).float())).backward()

    costs_of_steps(run, stack(run), body, backwards=2)


@THEME.behaviour(2, one=False)
def gathers_are_ahead_of_their_units(run):
    """How many gathers each block has seen in the middle of its forward and of its backward: at least FSDP2's."""
    model = stack(run)
    for index, block in enumerate(model.blocks):
        before = [model.blocks[i] for i in (index - 1, index - 2) if i >= 0]
        run.tell(block, "set_modules_to_forward_prefetch", list(model.blocks[index + 1 : index + 3]))
        run.tell(block, "set_modules_to_backward_prefetch", before)
    seen = []

    def look(*_):
        seen.append(sum(event.op == "all_gather" for event in sent(run)))

    def look_in_both_passes(module, args, output):
        look()
        output.register_hook(look)

    for block in model.blocks:
        block[1].register_forward_hook(look_in_both_passes)
    for step in range(2):
        seen.clear()
        before = sum(event.op == "all_gather" for event in sent(run))
        one_step(run, model, step)
        for index, count in enumerate(seen if step else ()):  # in its first backward, ours gathers no unit ahead
            run.costs[f"at {index} of step {step}"] = before - count
    assert len(seen) == 2 * BLOCKS


# -- memory --------------------------------------------------------------------------------------------------------


@THEME.behaviour(2, one=False)
def memory_of_a_step(run):
    model = stack(run)
    memory_of_steps(run, model)
    parts = sum(p.to_local().nbytes for p in model.parameters())
    assert run.costs["after backward"] < 2.1 * parts  # the shards and their gradients: nothing is unsharded


@THEME.behaviour(4, one=False)
def memory_over_two_axes(run):
    memory_of_steps(run, stack(run, mesh=run.mesh(2, 2)))


@THEME.behaviour(2, one=False, without_hsdp="mp_policy")
def memory_in_bf16(run):
    memory_of_steps(run, stack(run, mp_policy=run.policy(torch.bfloat16, torch.float32)))


@THEME.behaviour(2, one=False)
def memory_of_weights_kept_after_forward(run):
    memory_of_steps(run, stack(run, reshard_after_forward=False))


@THEME.behaviour(2, one=False)
def memory_under_checkpointing(run):
    model = stack(run)
    model.recompute = True
    memory_of_steps(run, model)


@THEME.behaviour(2, one=False, without_traced=EACH)
def memory_of_micro_batches(run):
    def body(run, model, step):
        accumulate(run, model, step, set_requires_gradient_sync=False)

    memory_of_steps(run, stack(run), body)


@THEME.behaviour(2, one=False)
def memory_of_an_evaluation(run):
    def body(run, model, step):
        with torch.no_grad():
            model(run.batch(step).float())

    model = stack(run)
    parts = sum(p.to_local().nbytes for p in model.parameters())
    memory_of_steps(run, model, body)
    assert run.costs["peak"] < parts + 3.5 * BLOCK_BYTES  # one block, the next, and a buffer of the gather


@THEME.behaviour(2, one=False, without_traced=EACH)
def memory_between_forward_and_backward(run):
    def body(run, model, step):
        loss = loss_of(model, run.batch(step).float())
        for part in (*model.blocks, model):
            part.reshard()
        return loss

    model = stack(run)
    body(run, model, 0).backward()
    model.zero_grad()
    with Meter(model) as meter:
        loss = body(run, model, 1)
        run.costs["between"] = meter.now() + allowed(run, model)
        loss.backward()
    run.costs["peak"] = meter.peak + allowed(run, model)


# -- the tests -----------------------------------------------------------------------------------------------------


@THEME.contestants(2)
@sim.ranks(2, backends=("sim",))
def test_memory(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@THEME.contestants(4)
@sim.ranks(4, backends=("sim",))
def test_memory_on_four_ranks(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@pytest.mark.sim
def test_the_meter_sees_memory_that_is_freed_and_filled_again():
    model = nn.Module()
    with Meter(model) as meter:
        x = torch.ones(1000)
        y = x * 2
        assert meter.now() == 8000
        x.untyped_storage().resize_(0)
        assert meter.now() == 4000
        x.untyped_storage().resize_(4000)
        del y
        assert meter.now() == 4000
        assert meter.peak == 8000
