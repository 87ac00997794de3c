"""The conformance tests leave out nothing that torch.distributed offers, or say why.

Their bodies run here on simulated ranks while it is recorded what they call, and what comes of it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dnn

import sim
from sim.comm.process_group import SimProcessGroup
from sim.testing.ranks import RankTest

pytestmark = [pytest.mark.tier("test"), pytest.mark.sim, pytest.mark.filterwarnings("ignore")]

FOLDER = Path(__file__).parents[2] / "multidevice/conformance"

# Methods of torch's ProcessGroup that simulated groups refuse with a SimError, and why.
REFUSED = {
    "merge_remote_group": "joins processes that were started apart, over their stores; a world has one set of ranks",
    "split_group": "torch.distributed.split_group makes groups; the method is what torch's implementation calls",
    "use_pg_for_symm_mem_rendezvous": "symmetric memory is memory of devices",
    "new_window": "one-sided access is to memory of devices",
    "reconfigure": "ranks do not come and go in a world",
    "get_reconfigure_handle": "ranks do not come and go in a world",
    "register_abort_hook": "hooks into a backend's threads, of which there are none",
    "unregister_abort_hook": "hooks into a backend's threads, of which there are none",
    "register_pre_hook": "hooks into a backend's threads; the trace has every operation",
    "unregister_pre_hook": "hooks into a backend's threads; the trace has every operation",
    "register_post_hook": "hooks into a backend's threads; the trace has every operation",
    "unregister_post_hook": "hooks into a backend's threads; the trace has every operation",
}

# Functions of torch.distributed that no body calls, and why.
NOT_CALLED = {
    "breakpoint": "stops for a person at a terminal",
    "get_debug_level": "a setting of the process",
    "set_debug_level": "a setting of the process",
    "set_debug_level_from_env": "a setting of the process",
    "get_node_local_rank": "reads LOCAL_RANK, which tests/unit/sim/script/test_sim_run.py looks at",
    "is_available": "about the build of torch",
    "is_backend_available": "about the build of torch",
    "is_gloo_available": "about the build of torch",
    "is_mpi_available": "about the build of torch",
    "is_nccl_available": "about the build of torch",
    "is_ucc_available": "about the build of torch",
    "is_xccl_available": "about the build of torch",
    "is_torchelastic_launched": "about the launcher",
    "record_comm": "marks a region for a recorder of compiled graphs",
    "register_rendezvous_handler": "how ranks find each other: replaced, see tests/unit/sim/patches/test_patches.py",
    "rendezvous": "how ranks find each other: replaced, see tests/unit/sim/patches/test_patches.py",
}


class Record:
    """What the bodies of some modules have called so far."""

    def __init__(self) -> None:
        self.worked: set[str] = set()  # methods of the process group that have returned
        self.refused: set[str] = set()  # and those that have raised SimError
        self.called: dict[str, set[str]] = {}  # functions that a body called itself, by module

    def method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **options: Any) -> Any:
            try:
                result = original(*args, **options)
            except sim.SimError:
                self.refused.add(name)
                raise
            self.worked.add(name)
            return result

        return recorded

    def getter(self, name: str, original: Any) -> property:
        return property(self.method(name, original.__get__), original.__set__)

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call of a function of torch, if a body or the kit made it."""
        if event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if module == "sim.patches.process_groups":  # stands in for a function of torch.distributed
            module = "torch.distributed.distributed_c10d"
        if module.startswith("torch.distributed") and _asked_by_a_body(frame):
            self.called.setdefault(module, set()).add(frame.f_code.co_name)


def _asked_by_a_body(frame: FrameType) -> bool:
    """Whether the caller is a conformance test, but for the wrappers that torch puts around its functions."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_name in ("wrapper", "wrapped"):
        caller = caller.f_back
    return caller is not None and caller.f_globals.get("__name__", "").startswith(("test_conformance", "conformance"))


def methods() -> list[str]:
    """The public methods and attributes of torch's ProcessGroup, without the members of an enumeration in it."""
    kinds = dist.ProcessGroup.BackendType
    names = [name for name in dir(dist.ProcessGroup) if not name.startswith("_") and name != "BackendType"]
    return [name for name in names if not isinstance(getattr(dist.ProcessGroup, name), kinds)]


def functions(module: ModuleType) -> list[str]:
    found = [name for name, value in vars(module).items() if not name.startswith("_") and inspect.isroutine(value)]
    return sorted(name for name in found if (getattr(module, name).__module__ or "").startswith("torch"))


def taking_a_group(module: ModuleType) -> list[str]:
    own = [name for name in functions(module) if getattr(module, name).__module__ == module.__name__]
    return [name for name in own if {"group", "group_name"} & set(inspect.signature(getattr(module, name)).parameters)]


def run_bodies(pattern: str) -> Record:
    record = Record()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in methods():
            plain = inspect.getattr_static(SimProcessGroup, name)
            if isinstance(plain, bool):
                patch.setattr(SimProcessGroup, name, record.getter(name, property(lambda _, plain=plain: plain)))
            elif isinstance(plain, property):
                patch.setattr(SimProcessGroup, name, record.getter(name, plain))
            elif isinstance(plain, staticmethod):
                patch.setattr(SimProcessGroup, name, staticmethod(record.method(name, getattr(SimProcessGroup, name))))
            else:
                patch.setattr(SimProcessGroup, name, record.method(name, getattr(SimProcessGroup, name)))
        for path in sorted(FOLDER.glob(pattern)):
            for test in list(vars(importlib.import_module(path.stem)).values()):
                if hasattr(test, "body") and "sim" in _arms(test):
                    size = inspect.getclosurevars(test).nonlocals["world_size"]
                    sim.run(_on_a_rank, size, args=(test.body, record, size))
    return record


def _arms(test: Any) -> list[str]:
    return [str(case.id) for mark in test.pytestmark if mark.name == "parametrize" for case in mark.args[1]]


def _on_a_rank(body: Callable[[RankTest], None], record: Record, size: int) -> None:
    before = sys.getprofile()
    sys.setprofile(record.profile)
    try:
        body(RankTest(dist.get_rank(), size, "sim", torch.device("cpu")))
    except pytest.skip.Exception:  # of what this torch does not have
        pass
    finally:
        sys.setprofile(before)


@pytest.fixture(scope="module")
def record() -> Record:
    return run_bodies("test_conformance_*.py")


@pytest.mark.tier("full")
def test_every_method_of_a_process_group_is_exercised_or_refused(record):
    asked = set(methods())
    assert len(asked) > 30
    assert asked - record.worked - set(REFUSED) == set(), "no conformance test calls them"
    refused = set(REFUSED) & asked
    assert refused - record.refused == set(), "said to be refused, but no test shows it"
    assert refused & record.worked == set(), "said to be refused, but they work"


def test_every_function_of_torch_distributed_is_exercised_or_has_a_reason(record):
    called = set().union(*(names for module, names in record.called.items() if module != funcol.__name__))
    offered = set(functions(dist))
    assert len(offered) > 50
    assert offered - called - set(NOT_CALLED) == set(), "no conformance test calls them"
    assert called & set(NOT_CALLED) == set(), "called after all: take them out of the list"


@pytest.mark.parametrize("module", [funcol, dnn], ids=["functional", "differentiable"])
def test_every_function_that_takes_a_group_is_exercised(record, module):
    offered, called = set(taking_a_group(module)), record.called[module.__name__]
    assert len(offered) >= 9
    assert offered - called == set(), "no conformance test calls them"


def test_what_nobody_calls_is_noticed():
    objects = run_bodies("test_conformance_objects.py")
    assert "alltoall" in set(methods()) - objects.worked - set(REFUSED)
    called = objects.called["torch.distributed.distributed_c10d"]
    assert "gather_object" in called
    assert "gather" not in called, "torch called it, not the test"
    assert objects.refused == set()
