"""Platforms of devices: their answers, the choice of one, and the errors.

torch_npu cannot be installed here, so a stand-in takes its place. It has the names that the real wheels (2.11.0 and
2.14.0) define in `torch_npu.npu`, and no others, so that a call of a name they lack fails here too.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import platform as public
from hyper_parallel.platform import (
    MemoryStats,
    Platform,
    PlatformUnavailableError,
    get_platform,
    reductions_of,
    register_provider,
    unregister_provider,
)
from hyper_parallel.platform import cpu as cpu_module
from hyper_parallel.platform import registry as registry_module
from hyper_parallel.platform.cpu import CpuPlatform, HostEvent, HostStream
from hyper_parallel.platform.registry import PlatformRegistry


class FakeNpu:
    """The part of `torch_npu.npu` that a platform uses; it writes down what was asked of it."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.current = 0
        self.asked: list[tuple[Any, ...]] = []

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: int) -> None:
        self.current = device

    def get_device_name(self, device_name: object = None) -> str:
        return "Ascend910B3"

    def synchronize(self, device: object = None) -> None:
        self.asked.append(("synchronize",))

    def Stream(self, device: object = None, priority: int = 0) -> tuple[str, int]:  # noqa: N802
        return ("stream", priority)

    def Event(  # noqa: N802
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> tuple[str]:
        return ("event",)

    def current_stream(self, device: object = None) -> tuple[str]:
        return ("current stream",)

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.asked.append(("enter", stream))
        yield
        self.asked.append(("exit", stream))

    def memory_allocated(self, device: object = None) -> int:
        return 1

    def memory_reserved(self, device: object = None) -> int:
        return 2

    def max_memory_allocated(self, device: object = None) -> int:
        return 3

    def max_memory_reserved(self, device: object = None) -> int:
        return 4

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self.asked.append(("reset peak",))

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return (10, 64)

    def empty_cache(self) -> None:
        self.asked.append(("empty cache",))

    @property
    def memory(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            _record_memory_history=lambda **options: self.asked.append(("record", options)),
            _dump_snapshot=lambda path: Path(path).write_text("snapshot"),
        )


@pytest.fixture
def fake_npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    """A usable torch_npu. Renaming torch's spare device cannot be undone, so only the lookup is replaced here."""
    npu = FakeNpu()
    package = types.ModuleType("torch_npu")
    package.npu = npu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: {"npu": npu}[device])
    return npu


@pytest.fixture
def no_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def broken_torch_npu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A torch_npu that is installed on a machine without drivers; every try to import it leaves a line in a file."""
    tries = tmp_path / "tries"
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"with open({str(tries)!r}, 'a') as file: file.write('.')\n"
        "raise ImportError('libhccl.so: cannot open shared object file')\n"
    )
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tries


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> Platform:
    """The GPU of this rank; without one the test skips, or fails under --require-devices."""
    try:
        platform = get_platform("cuda")
    except PlatformUnavailableError as error:
        reason = f"needs 1 cuda device: {error}"
        if request.config.getoption("--require-devices", default=False):
            pytest.fail(f"{reason} (--require-devices)", pytrace=False)
        pytest.skip(reason)
    platform.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return platform


class StandInPlatform(CpuPlatform):
    """What a simulated device hands out."""

    def name(self) -> str:
        return "stand-in"


# What backends reduce


def test_hccl_reduces_no_float64_and_not_everything_by_every_op() -> None:
    hccl = reductions_of("hccl")
    assert hccl.widest_float is torch.float32
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64):
        assert all(hccl.takes(dtype, op) for op in ("SUM", "MIN", "MAX")), dtype
        assert hccl.takes(dtype, "PRODUCT") == (dtype not in (torch.bfloat16, torch.int16))
        assert hccl.takes(dtype, "AVG") == dtype.is_floating_point
        assert not hccl.takes(dtype, "BAND")
    assert not hccl.takes(torch.float64)
    for dtype in (torch.uint8, torch.bool):  # torch_npu casts them, but not for reduce_scatter
        taken = [hccl.takes(dtype, "SUM", collective) for collective in ("all_reduce", "reduce", "reduce_scatter")]
        assert taken == [True, True, False]


def test_complex_numbers_are_added_up_where_they_are_sent_as_pairs() -> None:
    taken = {
        name: [reductions_of(name).takes(torch.complex64, "SUM", c) for c in ("all_reduce", "reduce", "reduce_scatter")]
        for name in ("hccl", "nccl", "gloo", "sim")
    }
    assert taken == {
        "hccl": [True, False, False],
        "nccl": [True, True, False],
        "gloo": [True, True, True],
        "sim": [True, True, True],
    }
    assert not reductions_of("hccl").takes(torch.complex128)
    assert not any(reductions_of(name).takes(torch.complex64, "MAX") for name in taken)


def test_backends_that_nothing_is_known_of_are_not_in_the_way() -> None:
    assert reductions_of("mine") is reductions_of("sim")
    assert reductions_of("mine").widest_float is torch.float64
    assert all(reductions_of(name).widest_float is torch.float64 for name in ("gloo", "nccl"))


# The CPU


def test_cpu_answers_without_any_device() -> None:
    cpu = get_platform("cpu")
    assert (cpu.device_type, cpu.backend) == ("cpu", "gloo")
    assert cpu.reductions is reductions_of("gloo")
    assert cpu.is_available()
    assert cpu.device_count() == 1
    assert cpu.device() == cpu.device(3) == torch.device("cpu")
    assert cpu.name().startswith("CPU (")
    assert not cpu.has_streams
    assert not cpu.supports_pinned_memory
    assert not cpu.has_own_memory
    assert repr(cpu) == "CpuPlatform(device_type='cpu', backend='gloo')"


class Copies(TorchDispatchMode):
    """Notes of each copy whether the host goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.non_blocking.append(bool((args[2:] or [(kwargs or {}).get("non_blocking")])[0]))
        return func(*args, **(kwargs or {}))


def test_copies_between_host_and_device_are_copies() -> None:
    cpu, source = get_platform("cpu"), torch.arange(6.0).view(2, 3)
    copy = cpu.copy_to_host(source, pinned=False, wait=True)
    assert torch.equal(copy, source)
    assert copy.data_ptr() != source.data_ptr()
    for wait in (True, False):
        with Copies() as copies:
            cpu.copy_to_host(source, pinned=False, wait=wait)
        assert copies.non_blocking == [not wait]
    target = torch.zeros(2, 3, dtype=torch.bfloat16)
    cpu.copy_to_device(target, source, pinned=False)
    assert torch.equal(target.float(), source)


def test_cpu_streams_and_events_do_nothing_and_are_always_done() -> None:
    cpu = get_platform("cpu")
    stream, event = cpu.new_stream(priority=-1), cpu.new_event()
    with cpu.use_stream(stream):
        event.record(stream)
        tensor = torch.ones(4)
    cpu.current_stream().wait_stream(stream)
    cpu.current_stream().wait_event(event)
    event.wait(cpu.current_stream())
    event.synchronize()
    stream.synchronize()
    cpu.record_stream(tensor, stream)
    cpu.synchronize()
    cpu.set_device(7)
    cpu.empty_cache()
    assert event.query()
    assert stream.query()
    assert stream.record_event(event) is event
    assert isinstance(stream.record_event(), HostEvent)
    assert isinstance(cpu.current_stream(), HostStream)


def test_cpu_use_stream_lets_errors_through() -> None:
    cpu = get_platform("cpu")
    with pytest.raises(KeyError), cpu.use_stream(cpu.new_stream()):
        raise KeyError("body")


def fresh_memory(mebibytes: int) -> mmap.mmap:
    """Memory that the process did not have before: an allocator may hand out what it has kept."""
    memory = mmap.mmap(-1, mebibytes * 2**20)
    memory.write(b"x" * len(memory))
    return memory


@pytest.mark.tier("test")
def test_cpu_memory_counts_the_resident_set() -> None:
    cpu = get_platform("cpu")
    before = cpu.memory_stats()
    held = fresh_memory(64)
    after = cpu.memory_stats()
    assert after.allocated - before.allocated > 32 * 2**20
    assert after.allocated == after.reserved
    assert after.peak_allocated == after.peak_reserved >= after.allocated
    assert len(held) < cpu.total_memory()


@pytest.mark.tier("test")
def test_cpu_peak_starts_afresh() -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs /proc/self/clear_refs, which this system lacks")
    cpu = get_platform("cpu")
    held = fresh_memory(256)
    high = cpu.memory_stats().peak_allocated
    del held
    cpu.reset_peak_memory()
    assert cpu.memory_stats().peak_allocated < high - 128 * 2**20


def test_cpu_memory_without_proc_falls_back_to_getrusage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "Path", lambda path: Path("/nonexistent") / path.lstrip("/"))
    cpu = get_platform("cpu")
    cpu.reset_peak_memory()
    stats = cpu.memory_stats()
    assert 2**20 < stats.allocated == stats.peak_allocated < 2**50


def test_manual_seed_repeats_numbers() -> None:
    cpu = get_platform("cpu")
    with torch.random.fork_rng():
        cpu.manual_seed(5)
        first = torch.rand(3)
        cpu.manual_seed(5)
        assert torch.equal(first, torch.rand(3))
        cpu.manual_seed(6)
        assert not torch.equal(first, torch.rand(3))


# NPU, through the stand-in


def test_npu_uses_only_names_that_torch_npu_has(fake_npu: FakeNpu) -> None:
    npu = get_platform("npu")
    assert (npu.device_type, npu.backend, npu.name()) == ("npu", "hccl", "Ascend910B3")
    assert npu.reductions is reductions_of("hccl")
    assert npu.is_available()
    assert npu.device_count() == 2
    assert npu.has_streams
    assert npu.supports_pinned_memory
    assert npu.has_own_memory
    assert npu.new_stream(priority=-1) == ("stream", -1)
    assert npu.current_stream() == ("current stream",)
    assert npu.new_event() == ("event",)
    assert npu.memory_stats() == MemoryStats(allocated=1, reserved=2, peak_allocated=3, peak_reserved=4)
    assert npu.total_memory() == 64
    with npu.use_stream(npu.current_stream()):
        npu.synchronize()
    npu.reset_peak_memory()
    npu.empty_cache()
    current = ("current stream",)
    assert fake_npu.asked == [
        ("enter", current),
        ("synchronize",),
        ("exit", current),
        ("reset peak",),
        ("empty cache",),
    ]


def test_memory_is_recorded_until_it_runs_out(fake_npu: FakeNpu, tmp_path: Path) -> None:
    path = tmp_path / "memory" / "rank-0.pickle"

    def run_out() -> None:
        with get_platform("npu").recorded_memory(path):
            assert not path.exists()
            raise MemoryError

    with pytest.raises(MemoryError):
        run_out()
    assert path.read_text() == "snapshot"
    assert fake_npu.asked == [("record", {"max_entries": 100_000}), ("record", {"enabled": None})]


def test_npu_record_stream_goes_to_the_tensor(fake_npu: FakeNpu) -> None:
    seen = []
    tensor = types.SimpleNamespace(record_stream=seen.append)
    get_platform("npu").record_stream(tensor, "a stream")  # type: ignore[arg-type]
    assert seen == ["a stream"]


def test_npu_set_device_checks_the_number(fake_npu: FakeNpu) -> None:
    npu = get_platform("npu")
    npu.set_device(1)
    assert fake_npu.current == 1
    for wrong in (2, -1):
        with pytest.raises(
            ValueError, match=rf"cannot select npu device {wrong}: this process sees 2 of them"
        ) as error:
            npu.set_device(wrong)
        assert "numbers that exist: 0 to 1" in str(error.value)
        assert "torchrun --nproc-per-node 2" in str(error.value)
    assert fake_npu.current == 1


def test_npu_not_installed_says_what_to_install(no_npu: None) -> None:
    with pytest.raises(PlatformUnavailableError, match="torch_npu is not installed") as error:
        get_platform("npu")
    assert "pip install 'hyper_parallel[npu]'" in str(error.value)
    assert "CANN" in str(error.value)
    assert isinstance(error.value, RuntimeError)


def test_npu_without_a_device_says_where_to_look(fake_npu: FakeNpu) -> None:
    fake_npu.count = 0
    with pytest.raises(PlatformUnavailableError, match=r"sees no usable NPU; check that npu-smi info .*CANN"):
        get_platform("npu")


def test_npu_whose_import_fails_names_the_reason(broken_torch_npu: Path) -> None:
    with pytest.raises(
        PlatformUnavailableError, match=r"import failed \(ImportError: libhccl.so: cannot open"
    ) as error:
        get_platform("npu")
    assert "pip install 'hyper_parallel[npu]'" in str(error.value)
    assert isinstance(error.value.__cause__, ImportError)


def test_npu_is_the_default_where_it_is_usable(fake_npu: FakeNpu) -> None:
    assert PlatformRegistry().get().device_type == "npu"


def test_default_warns_once_of_a_broken_torch_npu_and_does_not_import_it_again(
    broken_torch_npu: Path, no_gpu: None
) -> None:
    registry = PlatformRegistry()
    with pytest.warns(RuntimeWarning, match="import failed.*libhccl.so.*going on without NPUs") as caught:
        assert [registry.get().device_type for _ in range(3)] == ["cpu"] * 3
    assert len([entry for entry in caught if "going on without NPUs" in str(entry.message)]) == 1
    assert broken_torch_npu.read_text() == "."


@pytest.mark.tier("full")
def test_a_torch_npu_like_the_real_one_gives_npu_devices_and_hccl(tmp_path: Path) -> None:
    """In its own interpreter: renaming torch's spare device to "npu" lasts as long as the process."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(
        textwrap.dedent("""
        import types, torch
        npu = types.ModuleType("torch_npu.npu")
        npu.is_available = lambda: True
        npu.device_count = lambda: 4
        npu.current_device = lambda: 3
        npu._is_in_bad_fork = lambda: False
        npu.seeds = []
        npu.manual_seed_all = npu.seeds.append
        torch.utils.rename_privateuse1_backend("npu")
        torch._register_device_module("npu", npu)
        torch.distributed.Backend.register_backend("hccl", lambda options, _: None, extended_api=True, devices=["npu"])
        """)
    )
    script = textwrap.dedent("""
        import sys, torch
        from hyper_parallel.platform import get_platform
        assert "torch_npu" not in sys.modules, "importing the library must not import torch_npu"
        assert get_platform("cpu").backend == "gloo" and "torch_npu" not in sys.modules
        npu = get_platform()
        assert npu.device_type == "npu", npu
        assert npu.device() == torch.device("npu", 3) and npu.device(1) == torch.device("npu", 1)
        assert torch.distributed.get_default_backend_for_device("npu") == npu.backend == "hccl"
        npu.manual_seed(7)
        assert torch.npu.seeds == [7]
        print("good")
        """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "good", done.stderr


# CUDA


def test_cuda_on_a_build_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(PlatformUnavailableError, match="is a build without CUDA; install a CUDA build of torch"):
        get_platform("cuda")


def test_cuda_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(PlatformUnavailableError, match=r"sees no usable GPU; check that nvidia-smi .*CUDA_VISIBLE"):
        get_platform("cuda")


@pytest.mark.gpu
def test_cuda_streams_order_work(cuda: Platform) -> None:
    assert (cuda.backend, cuda.has_streams) == ("nccl", True)
    assert cuda.device() == torch.device("cuda", torch.cuda.current_device())
    side, event = cuda.new_stream(priority=-1), cuda.new_event()
    with cuda.use_stream(side):
        assert cuda.current_stream() == side
        value = torch.full((1 << 20,), 2.0, device=cuda.device()).square_()
        event.record(side)
    cuda.current_stream().wait_event(event)
    cuda.record_stream(value, cuda.current_stream())
    assert float(value.sum()) == 4.0 * (1 << 20)
    event.synchronize()
    assert event.query()
    cuda.synchronize()
    assert side.query()


@pytest.mark.gpu
def test_cuda_memory_is_the_allocators(cuda: Platform) -> None:
    cuda.empty_cache()
    cuda.reset_peak_memory()
    before = cuda.memory_stats()
    held = torch.empty(32 * 2**20, dtype=torch.uint8, device=cuda.device())
    after = cuda.memory_stats()
    assert after.allocated - before.allocated == held.numel()
    assert after.reserved >= after.allocated
    del held
    assert cuda.memory_stats().peak_allocated == after.allocated
    cuda.reset_peak_memory()
    assert cuda.memory_stats().peak_allocated == before.allocated
    assert cuda.total_memory() > 2**30


@pytest.mark.gpu
def test_cuda_is_the_default_where_it_is_usable(cuda: Platform, no_npu: None) -> None:
    assert get_platform().device_type == "cuda"


# Choosing


def test_default_is_the_cpu_when_nothing_else_is_usable(no_npu: None, no_gpu: None) -> None:
    assert get_platform().device_type == "cpu"


def test_unknown_device_type_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"'cuda:0': .*\n  known: 'cpu', 'cuda', 'npu'\n  try: 'cuda', without an index"
    ):
        get_platform("cuda:0")


def test_register_platform_adds_a_device_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_REGISTRY", PlatformRegistry())
    public.register_platform("mine", StandInPlatform)
    assert get_platform("mine").name() == "stand-in"
    with pytest.raises(ValueError, match="known: 'cpu', 'cuda', 'mine', 'npu'"):
        get_platform("other")
    with pytest.raises(ValueError, match="cannot register platform 'mine': that device type is registered already"):
        public.register_platform("mine", StandInPlatform)


def test_provider_answers_only_for_its_own_threads() -> None:
    ranks = threading.local()

    def provider(device_type: str | None) -> Platform | None:
        return StandInPlatform() if getattr(ranks, "mine", False) else None

    names = {}

    def rank() -> None:
        ranks.mine = True
        names["rank, default"] = get_platform().name()
        names["rank, cpu"] = get_platform("cpu").name()

    register_provider(provider)
    try:
        thread = threading.Thread(target=rank)
        thread.start()
        thread.join()
        names["outside"] = get_platform("cpu").name()
    finally:
        unregister_provider(provider)
    assert names["rank, default"] == names["rank, cpu"] == "stand-in"
    assert names["outside"].startswith("CPU (")


def test_provider_registered_last_is_asked_first_and_sees_the_device_type() -> None:
    asked: list[tuple[str, str | None]] = []
    registry = PlatformRegistry()
    answer = StandInPlatform()

    def older(device_type: str | None) -> Platform | None:
        asked.append(("older", device_type))
        return answer

    def newer(device_type: str | None) -> Platform | None:
        asked.append(("newer", device_type))
        return None

    registry.register_provider(older)
    registry.register_provider(newer)
    assert registry.get("cuda") is answer
    assert asked == [("newer", "cuda"), ("older", "cuda")]
    registry.unregister_provider(older)
    assert registry.get("cpu").name() != "stand-in"
    registry.unregister_provider(newer)
    with pytest.raises(ValueError, match=r"cannot unregister .*newer.*: it is not a registered platform provider"):
        registry.unregister_provider(newer)


def test_provider_may_ask_for_a_platform_itself() -> None:
    registry = PlatformRegistry()

    def provider(device_type: str | None) -> Platform | None:
        return registry.get("cpu") if device_type is None else None

    registry.register_provider(provider)
    assert registry.get().device_type == "cpu"


def test_registering_from_many_threads_loses_none() -> None:
    registry = PlatformRegistry()
    start = threading.Barrier(8)

    def register(number: int) -> None:
        start.wait()
        for step in range(50):
            registry.register(f"device-{number}-{step}", StandInPlatform)

    threads = [threading.Thread(target=register, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(registry.get(f"device-{n}-{s}").name() == "stand-in" for n in range(8) for s in range(50))


def test_public_names() -> None:
    assert sorted(public.__all__) == [
        "AttentionKernel",
        "Event",
        "MemoryStats",
        "Platform",
        "PlatformUnavailableError",
        "Reductions",
        "Stream",
        "attention_operators",
        "device_types",
        "get_platform",
        "reductions_of",
        "register_platform",
        "register_provider",
        "unregister_provider",
    ]
