"""One seed, one result, however often and whatever else runs in between; and what each rank has for itself."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.optim import optimizer as torch_optimizer
from torch.utils import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import sim
from hyper_parallel import full_tensor, hsdp
from sim.observers.determinism import first_difference

pytestmark = pytest.mark.sim

WORLD_SIZE = 4


def everything_random() -> dict[str, Any]:
    """Draw from every default generator, in turns with the other ranks, and train with dropout for a few steps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    drawn: dict[str, Any] = {"random": random.random(), "numpy": np.random.rand(3).tolist()}
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    for parameter in model.parameters():  # as DistributedDataParallel does
        dist.broadcast(parameter.data, 0)
    drawn["init"] = [parameter.detach().clone() for parameter in model.parameters()]
    data = TensorDataset(torch.arange(64.0).view(16, 4))
    drawn["order"] = [batch.tolist() for (batch,) in DataLoader(data, batch_size=4, shuffle=True)]
    drawn["sampled"] = list(RandomSampler(data, replacement=True, num_samples=5))
    drawn["shard"] = list(DistributedSampler(data, size, rank, seed=random.randrange(100)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for (batch,) in DataLoader(data, sampler=DistributedSampler(data, size, rank), batch_size=2):
        x = batch + torch.randn_like(batch)
        loss = model(x[torch.randperm(len(x))]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        losses.append(loss.item())
    drawn["losses"] = losses
    drawn["trained"] = {name: value.clone() for name, value in model.state_dict().items()}
    drawn["later"] = [
        random.sample(range(100), 5),
        np.random.permutation(5).tolist(),
        torch.rand(3),
        torch.randint(9, (3,)),
    ]
    first_come = dist.distributed_c10d._get_default_store().add("come", 1)
    drawn["interleaving"] = first_come
    return drawn


def something_else(number: int) -> None:
    """Another world, of another size and seed, and draws of the process itself."""

    def body() -> float:
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        x = torch.rand(2 + number % 3)
        dist.all_reduce(x)
        return x.sum().item() + random.random()

    sim.run(body, 2 + number % 3, seed=number)
    torch.rand(number + 1)
    random.random()
    np.random.rand(number + 1)


@pytest.mark.tier("full")
def test_thirty_runs_from_one_seed_are_one():
    first = sim.run(everything_random, WORLD_SIZE, seed=5)
    for number in range(29):
        something_else(number)
        again = sim.run(everything_random, WORLD_SIZE, seed=5)
        assert first_difference(first, again) is None, f"run {number + 2}"
    other = sim.run(everything_random, WORLD_SIZE, seed=6)
    assert first_difference(first, other) is not None, "another seed is another run"


def test_ranks_draw_different_numbers():
    results = sim.run(everything_random, WORLD_SIZE)
    for name in ("random", "numpy", "order", "later", "losses"):
        texts = [str(result[name]) for result in results]
        assert len(set(texts)) == WORLD_SIZE, name
    assert sorted(result["interleaving"] for result in results) == list(range(1, WORLD_SIZE + 1))
    assert first_difference(results[0]["trained"], results[1]["trained"]) is None, "what is reduced is the same"
    parts = [index for result in results for index in result["shard"]]
    assert len(parts) == 16


def test_the_process_draws_on_as_if_nothing_had_run():
    def state() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

    before = state()
    sim.run(everything_random, 2)
    assert state() == before


def test_what_follows_a_world_s_own_history_does_not_follow_the_process_s():
    """Two runs of one world go on from each other, the same in each world."""

    def of_world() -> list[Any]:
        with sim.world(2, seed=3) as world:
            return [world.run(lambda: [torch.rand(1).item(), random.random()]) for _ in range(3)]

    one = of_world()
    something_else(1)
    assert of_world() == one
    assert one[0] != one[1] != one[2]


def in_turns(change: Any, look: Any) -> list[Any]:
    """What each rank sees after all have changed something, one after the other, in several interleavings."""

    def body() -> Any:
        change(dist.get_rank())
        dist.barrier()
        return look()

    seen = [sim.run(body, 3, seed=seed) for seed in range(4)]
    assert all(each == seen[0] for each in seen)
    return seen[0]


@pytest.mark.parametrize(
    ("change", "look", "expected"),
    [
        (lambda rank: torch.set_grad_enabled(rank == 1), torch.is_grad_enabled, [False, True, False]),
        (torch.manual_seed, torch.initial_seed, [0, 1, 2]),
        (lambda rank: os.environ.update(MINE=str(rank)), lambda: os.environ["MINE"], ["0", "1", "2"]),
        (
            lambda rank: torch.set_autocast_enabled("cpu", rank == 2),
            lambda: torch.is_autocast_enabled("cpu"),
            [False] * 2 + [True],
        ),
        (
            lambda rank: torch.set_default_device("meta" if rank else "cpu"),
            lambda: torch.ones(1).device.type,
            ["cpu", "meta", "meta"],
        ),
        (lambda rank: dist.new_group([0, 1, 2], group_desc=f"of {rank}"), dist.get_rank, [0, 1, 2]),
    ],
    ids=["grad mode", "seed", "environment", "autocast", "default device", "groups"],
)
def test_each_rank_has_its_own(change, look, expected):
    assert in_turns(change, look) == expected
    assert torch.is_grad_enabled()
    assert "MINE" not in os.environ
    assert torch.ones(1).device.type == "cpu"
    assert sim.run(torch.is_grad_enabled, 3) == [True] * 3, "and nothing of it is left for the next world"
    assert sim.run(lambda: torch.is_autocast_enabled("cpu"), 3) == [False] * 3


@pytest.mark.tier("test")
def test_a_rank_that_leaves_autocast_first_does_not_change_the_order_of_others():
    """torch keeps casts of weights for the process, and drops those of all ranks with the first that leaves."""

    def body() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Tanh()) for _ in range(3)])
        for part in (*model, model):
            hsdp(part)  # replicated: no gather lets ranks wait for each other
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                for micro in range(2):
                    model(torch.full((2, 7), float(dist.get_rank() + micro))).float().square().mean().backward()
        return [full_tensor(param.grad).norm().item() for param in model.parameters()]

    for seed in range(3):
        found = sim.run(body, 3, seed=seed)
        assert found[0] == found[1] == found[2]
    assert torch.is_autocast_cache_enabled()


def test_inference_mode_and_no_grad_around_a_collective():
    def body() -> list[bool]:
        inside = []
        with torch.inference_mode(dist.get_rank() == 0), torch.set_grad_enabled(dist.get_rank() == 1):
            dist.barrier()
            inside = [torch.is_inference_mode_enabled(), torch.is_grad_enabled()]
        dist.barrier()
        return [*inside, torch.is_inference_mode_enabled(), torch.is_grad_enabled()]

    expected = [[True, False, False, True], [False, True, False, True], [False, False, False, True]]
    for seed in range(4):
        assert sim.run(body, 3, seed=seed) == expected


@contextlib.contextmanager
def changed(write: Callable[[Any], None], read: Callable[[], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


SETTINGS = {  # a block that changes a setting, and what reads it
    "default dtype": (
        lambda: changed(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
        lambda: torch.ones(1).dtype,
    ),
    "attention": (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
    "order": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        torch._C._get_sdp_priority_order,
    ),
    "anomalies": (torch.autograd.detect_anomaly, torch.is_anomaly_enabled),
    "deterministic": (
        lambda: changed(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode, 1),
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    "checkpoint": (
        lambda: checkpoint.set_checkpoint_early_stop(False),
        lambda: checkpoint._enable_checkpoint_early_stop,
    ),
    "debugging": (lambda: checkpoint.set_checkpoint_debug_enabled(True), lambda: checkpoint._checkpoint_debug_enabled),
    "parametrizations": (lambda: parametrize.cached(), lambda: parametrize._cache_enabled),  # noqa: PLW0108 - as it is then
    "working folder": (lambda: contextlib.chdir("/"), os.getcwd),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.skipif(not hasattr(contextlib, "chdir"), reason="contextlib has no chdir before Python 3.11")
@pytest.mark.parametrize(("block", "read"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_that_ranks_change_while_others_wait(block, read):
    def body() -> tuple:
        seen = []
        with contextlib.ExitStack() as stack:
            for turn in range(4):  # ranks enter and leave in one order, not the other way round
                if turn == dist.get_rank():
                    stack.enter_context(block())
                seen.append(read())
                dist.barrier()
            for turn in range(4):
                if turn == dist.get_rank():
                    stack.close()
                seen.append(read())
                dist.barrier()
        return tuple(seen)

    before = read()
    with block():
        inside = read()
    for seed in range(2):
        with sim.world(3, seed=seed) as world:
            for _ in range(2):
                results = world.run(body)
                expected = [[before] * rank + [inside] * 4 + [before] * (4 - rank) for rank in range(3)]
                assert results == list(map(tuple, expected))
                assert read() == before


def test_a_setting_that_a_rank_leaves_changed_ends_with_the_run(tmp_path):
    def body() -> tuple:
        rank = dist.get_rank()
        folder = tmp_path / f"{rank}"
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        torch.set_float32_matmul_precision("high" if rank else "highest")
        dist.barrier()
        seen = os.getcwd() == str(folder), torch.get_float32_matmul_precision()
        if rank:
            folder.rmdir()  # nobody can return to it
        dist.barrier()
        return seen

    before = os.getcwd(), torch.get_float32_matmul_precision()
    with sim.world(2) as world:
        assert world.run(body) == [(True, "highest"), (True, "high")]
        assert (os.getcwd(), torch.get_float32_matmul_precision()) == before
        assert world.run(os.getcwd) == [before[0]] * 2


def test_a_rank_that_draws_more_does_not_move_the_others():
    def body(more: int) -> list[float]:
        if dist.get_rank() == 1:
            torch.rand(more)
            for _ in range(more):
                random.random()
        dist.barrier()
        return [torch.rand(1).item(), random.random(), float(np.random.rand())]

    one, other = sim.run(body, 3, (1,)), sim.run(body, 3, (50,))
    assert (one[0], one[2]) == (other[0], other[2])
    assert one[1][:2] != other[1][:2]


def test_messages_say_whose_they_are(caplog):
    def body() -> None:
        logging.getLogger("train").warning("step %d", dist.get_rank())
        dist.barrier()
        warnings.warn("slow", stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sim.run(body, 2)
    assert sorted(line.partition("WARNING")[0].strip() for line in caplog.text.splitlines()) == ["[rank 0]", "[rank 1]"]
    assert sorted(caplog.messages) == ["step 0", "step 1"]
    assert [str(each.message) for each in caught] == ["slow", "slow"]


@pytest.mark.parametrize("seed", range(6))
def test_warning_filters_are_each_rank_s_own(seed):
    """Ranks are inside of `catch_warnings` at the same time, and leave it in any order."""

    def body() -> list[bool]:
        shown = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore" if dist.get_rank() else "always")
            dist.barrier()
            warnings.warn(f"of rank {dist.get_rank()}", stacklevel=1)
            shown += [str(each.message) for each in caught]
            dist.barrier()
        dist.barrier()
        return shown

    before = warnings.filters, list(warnings.filters), warnings.showwarning
    with sim.world(3, seed=seed) as world:
        assert world.run(body) == [["of rank 0"], [], []]
        assert (warnings.filters, list(warnings.filters), warnings.showwarning) == before
        assert world.run(body) == [["of rank 0"], [], []]
    assert warnings.filters is before[0]


def test_a_filter_that_a_rank_leaves_behind_goes_with_its_run():
    before = list(warnings.filters)
    sim.run(lambda: warnings.simplefilter("ignore"), 2)
    assert list(warnings.filters) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="an error here"):
            sim.run(lambda: warnings.warn("an error here", stacklevel=1), 2)


# -- hooks on all modules of a process ---------------------------------------------------------------------------------


class TakesTurns(torch.nn.Module):
    """Another rank has its turn in the middle of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x):
        dist.barrier()
        y = self.inner(x)
        dist.all_reduce(y.detach())
        return y


def hook_tables() -> dict[str, Any]:
    found = {**vars(torch_module), **vars(torch_optimizer)}
    return {name: dict(v) if isinstance(v, dict) else v for name, v in found.items() if name.startswith("_global_")}


def train_once(model: torch.nn.Module) -> None:
    torch.nn.Module().register_buffer("x", torch.zeros(1))
    torch.nn.Module().register_module("x", torch.nn.Identity())
    torch.nn.Module().register_parameter("x", torch.nn.Parameter(torch.zeros(1)))
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


REGISTER = {name: getattr(torch_module, name) for name in torch_module.__all__ if name.startswith("register_module")}
REGISTER |= {name: getattr(torch_optimizer, name) for name in torch_optimizer.__all__ if name.startswith("register")}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("name", sorted(REGISTER))
def test_a_hook_on_all_modules_or_optimizers_is_the_rank_s_own(name):
    before = hook_tables()

    def body() -> tuple[int, int, int]:
        calls: list[int] = []

        def hook(*_: Any) -> None:
            calls.append(dist.get_rank())

        model = TakesTurns()
        dist.barrier()
        handle = REGISTER[name](hook) if dist.get_rank() != 1 else None
        train_once(model)
        counted = len(calls)
        dist.barrier()
        if handle is not None and dist.get_rank() == 2:
            handle.remove()
        train_once(model)
        assert set(calls) <= {dist.get_rank()}
        return counted, len(calls)

    (first, twice), nothing, removed = sim.run(body, 3)
    assert first > 0
    assert twice == 2 * first
    assert nothing == (0, 0)
    assert removed == (first, first)
    assert hook_tables() == before


def test_a_hook_of_the_process_is_every_rank_s():
    seen: list[int] = []
    handle = torch_module.register_module_forward_hook(lambda *_: seen.append(dist.get_rank()))
    try:
        sim.run(lambda: TakesTurns()(torch.ones(1, 2)).sum().item(), 3)
        assert sorted(seen) == [0, 0, 1, 1, 2, 2]
        assert list(hook_tables()["_global_forward_hooks"]) == [handle.id]
    finally:
        handle.remove()
    TakesTurns().inner(torch.ones(1, 2))
    assert len(seen) == 6


def test_a_hook_of_the_library_serves_all_ranks_whichever_registers_it(monkeypatch):
    """The library registers hooks when it is imported, which the first rank that needs it does for all."""
    steps = []

    def note(optimizer, args, kwargs):
        steps.append(dist.get_rank())

    monkeypatch.setattr(note, "__module__", "hyper_parallel.core.fully_shard.param")
    handles = []

    def body():
        if dist.get_rank() == 0:
            handles.append(REGISTER["register_optimizer_step_post_hook"](note))
        dist.barrier()
        train_once(torch.nn.Linear(2, 2))

    before = hook_tables()
    sim.run(body, 3)
    assert sorted(steps) == [0, 1, 2]
    sim.run(body, 2)
    assert sorted(steps) == [0, 0, 0, 1, 1, 1, 2], "of both runs, once and twice"
    for handle in handles:
        handle.remove()
    assert hook_tables() == before


def test_trackers_of_modules_follow_their_own_rank():
    def body() -> tuple[list[set[str]], dict[str, int]]:
        model, parents = TakesTurns(), []
        with ModTracker() as tracker:
            tracker.register_user_hooks(pre_fw_hook=lambda *_: parents.append(set(tracker.parents)))
            train_once(model)
        with CommDebugMode() as counted:
            train_once(model)
        return parents, {str(op): count for op, count in counted.get_comm_counts().items()}

    alone = sim.run(body, 1)
    assert alone[0][1] == {"c10d.allreduce_": 1}
    assert sim.run(body, 3) == alone * 3
