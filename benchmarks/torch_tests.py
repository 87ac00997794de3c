"""Bodies of torch's own tests of FSDP2 and DTensor, on simulated ranks: `python -m benchmarks.torch_tests FILE ...`.

A file is one of `test/distributed/_composable/fsdp` or `test/distributed/tensor` of a torch checkout that is
near to the installed torch; it needs the package `expecttest`. `--engine ours` puts the names of `hyper_parallel`
in the place of those that the file has from `torch.distributed.fsdp`.

Each body runs in a process of its own, which is ended after `--timeout` seconds: some leave patches behind. A body
that fails counts as *private* if it, or a method that it calls, names what only torch's engine or only CUDA has.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import re
import select
import signal
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

import hyper_parallel
import sim

common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test  # before the files, and torch's own, import it
torch.cpu.device_count = lambda: 4

from torch.testing._internal import common_fsdp  # noqa: E402
from torch.testing._internal.distributed._tensor import common_dtensor  # noqa: E402

PROCESSES, THREADS = common_distributed.MultiProcessTestCase, common_distributed.MultiThreadedTestCase
CONTINUOUS = common_distributed.MultiProcContinuousTest
VERDICTS = ("passed", "skipped", "private", "timeout", "failed")
PRIVATE = re.compile(
    r"FSDPParam|_fsdp_param_group|_get_fsdp_state|_lazy_init|patch_(foreach|unshard|reshard|post_back|register)|"
    r"foreach_(all_gather|reduce)|_allgather_base_|\.Stream|\.Event|stream\(|memory_(stats|allocated)|cuda\.|torch\.compile"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torch_tests", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--engine", choices=("torch", "ours"), default="torch")
    parser.add_argument("-k", metavar="REGEX", default="", help="only tests whose Class.method contains it")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of one body")
    options = parser.parse_args()
    torch.set_num_threads(1)
    common_fsdp.DEVICE_COUNT = 4
    rows = []
    for path in options.files:
        module, counts = load(path), Counter[str]()
        if options.engine == "ours":
            for each in (module, common_fsdp, common_dtensor):
                use_ours(each)
        for cls, name in bodies(module):
            if re.search(options.k, f"{cls.__name__}.{name}"):
                verdict, reason = in_child(cls, name, options.timeout)
                if verdict == "failed" and PRIVATE.search(source(cls, name)):
                    verdict = "private"
                counts[verdict] += 1
                print(f"{cls.__name__}.{name}: {verdict} {reason}", flush=True)
        rows.append(f"| {path.name} | {sum(counts.values())} | {' | '.join(str(counts[each]) for each in VERDICTS)} |")
    print(f"\n| file | bodies | {' | '.join(VERDICTS)} |\n|---|---|---|---|---|---|---|", *rows, sep="\n")


def load(path: Path) -> ModuleType:
    """Import a test file, whatever its name."""
    sys.path.insert(0, str(path.parent))
    spec: Any = importlib.util.spec_from_file_location(path.stem.replace(".", "_"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def use_ours(module: ModuleType) -> None:
    """Put the names of `hyper_parallel` in the place of those that the module has from `torch.distributed.fsdp`."""
    for name, value in list(vars(module).items()):
        if not name.startswith("_") and getattr(dist.fsdp, name, None) is value and hasattr(hyper_parallel, name):
            setattr(module, name, getattr(hyper_parallel, name))


def bodies(module: ModuleType) -> Iterator[tuple[type[Any], str]]:
    """The tests of the module that run on ranks."""
    for cls in vars(module).values():
        if not isinstance(cls, type) or cls.__module__ != module.__name__ or "LocalTensor" in cls.__name__:
            continue
        if issubclass(cls, (PROCESSES, THREADS, CONTINUOUS)) and not issubclass(
            cls, common_dtensor.LocalDTensorTestBase
        ):
            yield from ((cls, name) for name in unittest.TestLoader().getTestCaseNames(cls))


def source(cls: type[Any], name: str) -> str:
    """The text of a test, and of the methods of its class that it names."""
    texts: dict[str, str] = {}
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if each not in texts and inspect.isroutine(getattr(cls, each, None)):
            texts[each] = inspect.getsource(inspect.unwrap(getattr(cls, each)))
            waiting += re.findall(r"self\.(_\w+)", texts[each])
    return "\n".join(texts.values())


def on_a_rank(cls: type[Any], name: str, file: str) -> tuple[str, str]:
    """Run a test as the process or the thread of one rank would."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if issubclass(cls, CONTINUOUS):
        cls = type(cls.__name__, (cls,), {"rank": rank, "world_size": size})
    test = cls(name)
    test.rank, test.file_name = rank, file
    if issubclass(cls, (common_fsdp.FSDPTestMixin, THREADS, CONTINUOUS)):  # the others make theirs by themselves
        dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{file}")
    common_utils.set_rng_seed()
    try:
        if issubclass(cls, THREADS):
            test.perThreadSetUp()
        getattr(test, name)()
    except (unittest.SkipTest, SystemExit) as skip:
        return "skipped", str(skip)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return "passed", ""


def on_sim(cls: type[Any], name: str) -> tuple[str, str]:
    """Run a test on as many ranks as it asks for."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return max(sim.run(on_a_rank, cls(name).world_size, (cls, name, f"{folder}/init"), init=False))
        except BaseException as error:
            return "failed", " ".join(str(error).split("To execute this test")[0].split())


def in_child(cls: type[Any], name: str, seconds: float) -> tuple[str, str]:
    """Run a test in a process that is ended after so many seconds, with its own children."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        os.write(writing, "\n".join(on_sim(cls, name)).encode()[:2000])
        os._exit(0)
    os.close(writing)
    text = os.read(reading, 2000).decode() if select.select([reading], [], [], seconds)[0] else "timeout\n"
    os.close(reading)
    for pid in (-child, child):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.waitpid(child, 0)
    verdict, _, reason = (text or "failed\nits process died").partition("\n")
    return verdict, reason


if __name__ == "__main__":
    main()
