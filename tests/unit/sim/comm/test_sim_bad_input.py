"""Errors of the simulator's arguments: each mistake is named at once, with what to do instead."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import inspect
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import hyper_parallel
import sim
from sim.patches import devices
from sim.script.launch import main
from sim.world import Checks, Options, WorldOptions

pytestmark = pytest.mark.sim

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test has to miss")


# -- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "asked", "hint"),
    [
        (lambda: sim.run(print, 2, chek_races=True), "make a world", "check_races or check_replicas"),
        (lambda: sim.world(2, machne="h100-sxm"), "make a world", "machine"),
        (lambda: sim.run(print, 2, xyz=1), "make a world", "one of these"),
        (lambda: sim.ranks(2, backend=("sim",)), "run a test on several ranks", "backends"),
        (lambda: sim.swarm(print, 2, map_devices="cuda"), "make a world", "map_device or device"),
    ],
)
def test_an_option_that_there_is_not(call, asked, hint):
    with pytest.raises(TypeError) as found:
        call()
    first, seen, last = str(found.value).splitlines()
    assert re.fullmatch(f"cannot {asked}: there is no option '[a-z_]+'", first)
    assert seen.startswith("  options: ")
    assert "check_races, check_replicas" in seen
    assert last == f"  try: {hint}"


def test_the_options_are_typed_and_shown_as_they_are_accepted():
    options = {each.name: (each.type, each.default) for each in dataclasses.fields(WorldOptions)}
    assert {name: kind.__forward_arg__ for name, kind in Options.__annotations__.items()} == {
        name: kind for name, (kind, _) in options.items()
    }
    for fn, kind in ((sim.run, Options), (sim.world, Options), (sim.ranks, Checks)):
        shown = {
            name: (each.annotation, each.default)
            for name, each in inspect.signature(fn).parameters.items()
            if each.kind is each.KEYWORD_ONLY and name != "backends"
        }
        assert shown == {name: options[name] for name in options if name in kind.__annotations__}
    sim.world(2, **{name: default for name, (_, default) in options.items()})


# -- devices -----------------------------------------------------------------------------------------------------


@without_cuda
@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(1).cuda(),
        lambda: torch.ones(1, device="cuda:0"),
        lambda: torch.nn.Linear(2, 2).to("cuda"),
        lambda: torch.cuda.set_device(0),
        lambda: dist.init_device_mesh("cuda", (2,)),
    ],
    ids=["cuda()", "device=", "module.to", "set_device", "mesh"],
)
def test_a_cuda_device(use):
    with pytest.raises(sim.RankFailed) as found:
        sim.run(use, 2)
    assert str(found.value).splitlines()[1:] == [
        "  seen: a device of type cuda was asked for, and simulated ranks have none of their own",
        "  try: sim.run(..., map_device='cuda'), which puts on the CPU what a rank puts on cuda",
        "  replay: sim.run(..., world_size=2, seed=0)",
    ]
    sim.run(use, 2, map_device="cuda")


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA asks its driver first")
@without_cuda
def test_what_is_not_mapped():
    with pytest.raises(sim.RankFailed, match=r"map_device='cuda'\): this is not among what it maps"):
        sim.run(lambda: torch.Generator("cuda"), 2, map_device="cuda")


@pytest.mark.parametrize("module", [torch.cuda, torch.accelerator])
def test_what_torch_documents_of_devices_is_mapped_or_named(module):
    """Each function in torch's own list answers on a rank, or says by its name that it is not mapped."""
    given = {
        **dict.fromkeys(("set_device", "set_device_index", "set_device_idx", "device", "device_index"), (1,)),
        **dict.fromkeys(("set_stream", "stream", "manual_seed", "manual_seed_all", "device_of"), (0,)),
        "set_per_process_memory_fraction": (0.5,),
        "can_device_access_peer": (0, 1),
        "set_rng_state": (torch.get_rng_state(),),
        "set_rng_state_all": ([torch.get_rng_state()],),
    }
    answers = devices.ANSWERS if module is torch.cuda else devices.ACCELERATOR_ANSWERS
    names = devices.documented(module)
    assert len(names) >= (70 if module is torch.cuda else 15)

    def body() -> list[str]:
        unnamed = []
        for name in names:
            try:
                getattr(module, name)(*given.get(name, ()))
            except sim.SimError as error:
                if name in answers or f"called {module.__name__}.{name}, which is not among" not in str(error):
                    unnamed.append(name)
            else:
                if name not in answers:
                    unnamed.append(name)
        return unnamed

    assert sim.run(body, 2, map_device="cuda") == [[], []]


def test_a_device_by_the_name_of_accelerator():
    """As pytorch/examples ask for it."""

    def body() -> tuple[object, ...]:
        accelerator, rank = torch.accelerator, dist.get_rank()
        assert accelerator.is_available()
        device = accelerator.current_accelerator()
        accelerator.set_device_index(rank)
        with torch.device(device):
            made = torch.ones(1).to(f"{device}:{rank}")
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total == torch.cuda.get_device_properties(rank).total_memory
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        backend = dist.get_default_backend_for_device(device)
        return str(device), accelerator.device_count(), accelerator.current_device_index(), str(made.device), backend

    assert sim.run(body, 2, map_device="cuda") == [("cuda", 2, rank, "cpu", "nccl") for rank in range(2)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 refuses views that merge a split dim that is not the first"
)
def test_attention_of_dtensors_on_a_mapped_device(causal):
    """The CPU has an operator of its own for it, which DTensors do not know."""
    full = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attention = torch.nn.functional.scaled_dot_product_attention

    def body() -> bool:
        mesh = dist.init_device_mesh("cuda", (2,))
        heads = [distribute_tensor(each, mesh, [Shard(1)]) for each in full]
        found = attention(*heads, is_causal=causal).full_tensor()
        torch.testing.assert_close(found, attention(*full, is_causal=causal))
        return True

    assert sim.run(body, 2, map_device="cuda") == [True, True]


def test_a_device_to_map_that_nobody_knows():
    with pytest.raises(ValueError, match="there is no kind of map_device 'gpu'") as found:
        sim.run(dist.barrier, 2, map_device="gpu")
    assert "try: map_device=" in str(found.value)


@without_cuda
def test_a_script_that_asks_for_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.ones(1).cuda()\n")
    assert main(["--nproc", "2", str(script)]) == 1
    said = capsys.readouterr().err
    assert "seen: a device of type cuda was asked for, and simulated ranks have none of their own" in said
    assert said.count("try: ") == 1
    assert "try: --map-device cuda, which puts on the CPU what a script puts on cuda" in said
    assert main(["--nproc", "2", "--map-device", "cuda", str(script)]) == 0


# -- functions ---------------------------------------------------------------------------------------------------


def takes_one(x: int) -> int:
    return x


@pytest.mark.parametrize(
    ("args", "kwargs", "what"),
    [
        ((), None, "missing a required argument: 'x'"),
        ((1, 2), None, "too many positional arguments"),
        ((1,), {"y": 2}, "got an unexpected keyword argument 'y'"),
    ],
)
def test_arguments_that_the_function_does_not_take(args, kwargs, what):
    with pytest.raises(TypeError) as found:
        sim.run(takes_one, 2, args, kwargs)
    assert str(found.value).splitlines()[0] == f"cannot call takes_one on ranks: {what}"
    assert "takes_one takes (x: 'int') -> 'int'" in str(found.value)
    assert "try: sim.run(takes_one, world_size=2, args=(...), kwargs={...})" in str(found.value)


def test_a_wrapped_function_takes_what_its_wrapper_takes():
    @functools.wraps(takes_one)
    def wrapper() -> int:
        return takes_one(3)

    assert sim.run(wrapper, 2) == [3, 3]
    assert sim.run(functools.partial(takes_one, 4), 2) == [4, 4]
    assert sim.run(dict, 2, kwargs={"a": 1}) == [{"a": 1}] * 2


def test_a_function_whose_call_runs_nothing():
    async def train() -> int:
        return dist.get_rank()

    def batches():
        yield dist.get_rank()

    with pytest.raises(TypeError, match="cannot run train on ranks: a call of it runs nothing yet") as found:
        sim.run(train, 2)
    assert "fn: a coroutine function" in str(found.value)
    assert "try: a function that runs it, as in lambda: asyncio.run(train())" in str(found.value)
    with pytest.raises(TypeError, match=r"fn: a generator function\n  try: .* lambda: list\(batches\(\)\)"):
        sim.run(batches, 2)
    assert sim.run(lambda: asyncio.run(train()), 2) == [0, 1]
    assert sim.run(lambda: list(batches()), 2) == [[0], [1]]


class Lazy:
    async def __call__(self) -> int:
        return dist.get_rank()


async def lazy(x: int = 0) -> int:
    return x


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (Lazy(), "Lazy(...)"),
        (functools.partial(Lazy()), "functools.partial(Lazy(...))"),
        (functools.partial(lazy), "functools.partial(lazy)"),
        (functools.partial(lazy, 1), "functools.partial(lazy, ...)"),
    ],
)
def test_what_was_given_is_named(fn, name):
    with pytest.raises(TypeError) as found:
        sim.run(fn, 2)
    assert str(found.value) == (
        f"cannot run {name} on ranks: a call of it runs nothing yet\n"
        "  fn: a coroutine function\n"
        f"  try: a function that runs it, as in lambda: asyncio.run({name}())"
    )
    with pytest.raises(TypeError, match=re.escape(f"cannot pass arguments to {name}: args is an int, not a list\n")):
        sim.run(fn, 2, 5)


def calls(fn):
    def call() -> object:
        return fn()

    return call


@pytest.mark.filterwarnings("error")
def test_a_result_that_has_yet_to_be_run():
    def batches():
        yield dist.get_rank()

    async def stream():
        yield dist.get_rank()

    with pytest.raises(TypeError) as found:
        sim.run(calls(lazy), 2)
    assert isinstance(found.value, sim.RankFailed)
    assert str(found.value) == (
        f"rank {found.value.rank} raised InvalidType: cannot take what call returned: it is a coroutine, "
        "and nothing of it has run\n"
        "  result: lazy(), which nobody has begun to run\n"
        "  try: to run it on the rank, as in asyncio.run(lazy())\n"
        "  replay: sim.run(..., world_size=2, seed=0)"
    )
    with pytest.raises(TypeError, match=r"it is a generator, .*\n.*\n  try: .* list\(batches\(\)\)"):
        sim.run(calls(batches), 2)
    with pytest.raises(TypeError, match=r"it is an asynchronous generator, .*\n.*\n  try: .*collect\(stream"):
        sim.run(calls(stream), 2)
    with pytest.raises(TypeError, match="fn: an asynchronous generator function"):
        sim.run(stream, 2)
    assert [list(result) for result in sim.run(lambda: (x for x in [1]), 2)] == [[1], [1]]


# -- worlds in worlds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begin",
    [lambda: sim.run(dist.barrier, 2), lambda: sim.world(2).__enter__(), lambda: sim.world(2).run(dist.barrier)],
    ids=["run", "world", "world.run"],
)
def test_a_rank_that_starts_ranks(begin):
    with pytest.raises(sim.SimError, match=r"a rank cannot start ranks of its own\n  try: call sim\.run outside"):
        sim.run(begin, 2)
    assert sim.run(dist.get_rank, 2) == [0, 1]


# -- processes ---------------------------------------------------------------------------------------------------


def exits() -> None:
    sys.exit(3)


def test_a_rank_that_exits():
    with pytest.raises(sim.RankFailed) as found:
        sim.run(exits, 1)
    assert str(found.value) == (
        "rank 0 called sys.exit(3)\n"
        f"  seen: a status other than 0, at test_sim_bad_input.py:{exits.__code__.co_firstlineno + 1} in exits; "
        "a rank that exits with one has failed\n"
        "  try: sys.exit() where the rank is done, and to raise an error where it is not\n"
        "  replay: sim.run(..., world_size=1, seed=0)"
    )
    assert sim.run(sys.exit, 2) == [None, None]
    with pytest.raises(sim.SimError, match=r"try: sys\.exit\(status\), which ends the calling rank alone"):
        sim.run(lambda: os._exit(0), 2)


def test_the_start_method_of_processes():
    default = multiprocessing.get_start_method()

    def body() -> str:
        multiprocessing.set_start_method("spawn")
        return multiprocessing.get_start_method()

    assert sim.run(body, 3) == ["spawn"] * 3
    assert multiprocessing.get_start_method() == default

    def different() -> None:
        multiprocessing.set_start_method("spawn" if dist.get_rank() else "forkserver", force=True)

    with pytest.raises(RuntimeError, match=r"cannot set the start method '\w+': another rank has set '\w+'") as found:
        sim.run(different, 2)
    assert "multiprocessing.get_context('" in str(found.value)
    assert multiprocessing.get_start_method() == default


def communicate_in_child(results) -> None:
    try:
        dist.barrier()
    except sim.SimError as error:
        results.put(str(error))


@pytest.mark.tier("test")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_communicates():
    def body() -> str:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        process = context.Process(target=communicate_in_child, args=(results,))
        process.start()
        said = results.get(timeout=60)
        process.join()
        return said

    for rank, said in enumerate(sim.run(body, 2)):
        assert said.startswith(f"a process that rank {rank} started used one of the rank's process groups\n")
        assert "try: communicate from the rank itself" in said


# -- what was made outside of the ranks --------------------------------------------------------------------------


def linear_outside() -> Callable[[Callable[[torch.nn.Module], object]], object]:
    model = torch.nn.Linear(2, 2)  # the line that is named
    return lambda use: sim.run(lambda: use(model), 2)


def train_alone(model: torch.nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def step(model: torch.nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    "use",
    [
        train_alone,
        hyper_parallel.fully_shard,
        torch.nn.parallel.DistributedDataParallel,
        lambda model: [step(model), train_alone(model), dist.barrier(), step(model)],
        lambda model: (model(torch.ones(1, 2)).sum(), dist.barrier())[0].backward(),  # both have used it by then
        lambda model: torch.nn.init.zeros_(dict(model.named_parameters())["weight"]),
    ],
)
def test_a_module_that_was_made_outside(use):
    with pytest.raises(
        sim.SimError,
        match=r"rank 1 used 'model', which belongs to rank 0: it was made outside of the ranks and is one object for "
        r"all of them, and it has been changed\n  made: test_sim_bad_input.py:(\d+) \(\w*Linear\)\n"
        r"  rank 0 used it at .*\n  rank 1 used it at .*\n  try: make it inside .*copy.deepcopy\(model\) there",
    ) as found:
        linear_outside()(use)
    line = int(re.search(r"made: test_sim_bad_input.py:(\d+)", str(found.value))[1])
    assert Path(__file__).read_text().splitlines()[line - 1].endswith("# the line that is named")


@pytest.mark.tier("test")
def test_other_things_that_were_made_outside():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tensor = torch.ones(2)
    weight = torch.ones(2, requires_grad=True)

    def in_groups_of_their_own() -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        dist.all_reduce(tensor, group=groups[dist.get_rank() // 2])

    def called_by_name() -> None:
        in_groups_of_their_own()

    for name, call in [
        ("optimizer", lambda: optimizer.step() or True),
        ("self", optimizer.step),
        ("weight", lambda: weight.sum().backward()),
        ("tensor", in_groups_of_their_own),
        ("tensor", called_by_name),
        (r"args\[0\]", train_alone),
        (r"args\[0\]\[1\]", lambda given: train_alone(given[1])),
    ]:
        args = {r"args\[0\]": (model,), r"args\[0\]\[1\]": ([0, model],)}.get(name, ())
        with pytest.raises(sim.SimError, match=rf"^rank \d used '{name}', which belongs to rank \d: "):
            sim.run(call, 4, args=args)
    assert not optimizer._optimizer_step_pre_hooks
    assert not weight._post_accumulate_grad_hooks
    assert not model._forward_pre_hooks


def test_what_was_made_outside_and_that_others_failed_on():
    model = torch.nn.Linear(2, 2)
    expected = r"rank 1 raised KeyError.*\n  seen: 'model' is one object for all ranks, and another rank has changed it"
    with pytest.raises(sim.RankFailed, match=expected):
        sim.run(lambda: model._parameters.pop("bias"), 2)


def test_what_was_made_outside_and_may_be_shared():
    model, optimizers = torch.nn.Linear(2, 2), [None, None]

    def body() -> bool:
        rank = dist.get_rank()
        own = copy.deepcopy(model)
        optimizers[rank] = torch.optim.SGD(own.parameters(), lr=0.1)
        same = torch.equal(model(torch.ones(1, 2)), own(torch.ones(1, 2)))
        dist.barrier()
        train_alone(own)
        optimizers[rank].step()
        return same

    assert sim.run(body, 2) == [True, True]
    sim.run(lambda: train_alone(model) if dist.get_rank() == 1 else None, 2)
    assert sim.run(train_alone, 1, args=(model,)) == [None]
