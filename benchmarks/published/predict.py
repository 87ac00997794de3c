"""Predictions of published runs by the simulator; traces are kept, and prices are worked out anew."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.published.compare import Prediction, publication, wanted
from benchmarks.published.conventions import FOLDER
from benchmarks.published.gpt import GPTConfig, GPTSpec
from benchmarks.published.rows import Case, case_of, is_held_out, read_rows
from benchmarks.published.zoo import MLAConfig, MLASpec
from hyper_parallel.core.machine.calibration import Calibration, load_calibration
from hyper_parallel.core.machine.description import Machine, find_machine
from hyper_parallel.core.machine.toml_file import read_toml
from hyper_parallel.models.llama import LlamaConfig
from sim.mesh import program
from sim.mesh.cost import Pricing, ring_kernel_of
from sim.mesh.estimate import Z80, Estimate, kernels_of, price, step_spread
from sim.mesh.job import Job
from sim.mesh.memory import ClassMemory
from sim.mesh.models import find_model, short_count
from sim.mesh.program import Program, Segment
from sim.mesh.recipe import Recipe
from sim.mesh.replay.timeline import replay_time
from sim.mesh.spec import ModelSpec
from sim.mesh.tracing.trace import trace

_FUSED_BY_HAND = {"scalar": 1e9, "general": 1e9} | dict.fromkeys(("several", "norm", "norm_backward"), 0.86)
_FUSED_BY_HAND |= {"optimizer": 0.8}
"""Figures of memory of frameworks that have kernels of their own where torchtitan has torch's, one for each operation:
their rows are fitted with these, and nobody has published what theirs attain."""
_TRACED = ("data/operations.toml", "job.py", "models.py", "program.py", "recipe.py", "spec.py", "tracing")
"""What of `sim.mesh` a trace depends on, beside the hooks of this folder: files and whole folders."""
_HOOKS = (
    "float8.py",
    "gpt.py",
    "lifetimes.py",
    "losses.py",
    "megatron.py",
    "replicated.py",
    "step.py",
    "zero.py",
    "zoo.py",
)

FITTED_ON: Mapping[str, Mapping[str, float]] = {
    "torchtitan commit/PR messages": {"framework.torchtitan-2024.hopper": 1.0, "framework.torchtitan-2024.ampere": 1.0}
    | {"device.h100-96gb-500w.matmul.sustained": 1.0},
    "MosaicML llm-foundry benchmarking README": dict.fromkeys(
        ("framework.llm-foundry.hopper", "framework.llm-foundry.ampere"), 1.0
    ),
    "BigScience BLOOM prequel (JeanZay A100)": {"framework.megatron-deepspeed-2022.ampere": 1.0},
    "InternEvo doc/en/train_performance.md": {"framework.internevo.ampere": 1.0},
    "vTrain": {"framework.megatron-deepspeed.op_us": 6.0},
    "NVIDIA dgxc-benchmarking 1b9bb6b (25.03)": {"overlap.default.hidden": 0.0},
    "Ascend MindFormers model cards": {"matmul.ascend.sustained": 1.0},
    "SimuMax docs/b200 (8 B200)": {"matmul.blackwell.sustained": 1.0},
}
"""What would be known without a publication: the figures that are fitted to it alone, as they were before."""


def job_of(case: Case) -> Job:
    """Return what is traced of a case."""
    model = case.model
    return Job(
        spec_of(model),
        case.dims,
        case.batch,
        case.seq_len,
        case.recipe,
        ring_kernel=_ring_kernel(case),
    )


def spec_of(model: LlamaConfig | GPTConfig) -> ModelSpec:
    """Return the model of a shape."""
    if isinstance(model, MLAConfig):
        return MLASpec(f"moe-{short_count(model.num_parameters())}", model)
    return GPTSpec.of(model) if isinstance(model, GPTConfig) else find_model(model)


def _ring_kernel(case: Case) -> str:
    return ring_kernel_of(hardware_of(case, load_figures()), load_figures())


def hardware_of(case: Case, calibration: Calibration) -> Machine:
    """Return the description of a case's device, with the network of its cluster and the kernels of its time."""
    hardware = replace(find_machine(case.hardware), allocator=case.allocator)
    kernel = case.attention_kernel or ("flash2" if hardware.family == "hopper" else None)  # torch's before 2.11
    hardware = hardware if kernel is None else hardware.with_attention(kernel)
    if hardware.family == "hopper" and not case.framework.startswith("torchtitan"):
        hardware = replace(hardware, curves={**hardware.curves, "memory": _FUSED_BY_HAND})
    share = float(calibration.section("framework", case.framework).get(hardware.family, 1.0))
    if share != 1.0:
        rate = float(calibration.of(hardware, "matmul", hardware.family).get("sustained", 1.0))
        own = {**hardware.curves.get("matmul", {}), "sustained": share * rate}
        hardware = replace(hardware, curves={**hardware.curves, "matmul": own})
    return hardware if case.network is None else hardware.with_network(case.network, case.fabric)


def figures_of(case: Case, calibration: Calibration) -> Calibration:
    """Return the figures that hold for a case: what is known of its framework stands over what is of the device."""
    own = calibration.section("framework", case.framework)
    hardware = find_machine(case.hardware)
    changes: dict[str, Any] = {
        f"estimate.{hardware.family}.framework": dict(runs_seen().get((case.framework, hardware.family), {}))
    }
    if hardware.family in (memory := own.get("memory_spread", {})):
        changes[f"estimate.{hardware.family}.memory_spread"] = memory[hardware.family]
    else:
        changes[f"estimate.{hardware.family}.unseen_memory_spread"] = own["unseen_memory_spread"]
    if "op_us" in own:
        changes["host.op_us"] = own["op_us"]
    return calibration.replace(changes)


def programs_of(case: Case, folder: str | Path | None) -> list[Program]:
    """Return the programs of a case, from the folder if they are there."""
    if folder is None:
        return trace(job_of(case))
    said = (case.model, case.dims, case.batch, case.seq_len, case.recipe, _ring_kernel(case), _tracer())
    path = Path(folder) / f"{hashlib.sha256(repr(said).encode()).hexdigest()[:24]}.json"
    with suppress(OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        programs = [_read(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        if programs and all(isinstance(one, Program) for one in programs):
            return programs
    programs = trace(job_of(case))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    lines = [json.dumps(_as_data(one), separators=(",", ":")) for one in programs]
    partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    partial.replace(path)
    return programs


_OURS = tuple(kind for kind in vars(program).values() if getattr(kind, "__module__", "") == program.__name__)
_KINDS = MappingProxyType({kind.__name__: kind for kind in (*_OURS, list, tuple, frozenset, dict)})


def _as_data(value: Any) -> Any:
    """Return a value for JSON: a collection or an event as the name of its kind, then its parts."""
    kind = type(value)
    if kind in (Program, Segment):
        return [kind.__name__, *map(_as_data, vars(value).values())]
    if kind is range:  # there may be a hundred thousand
        return ["range", value.start, value.stop, value.step]
    if kind.__name__ in _KINDS:
        return [kind.__name__, *map(_as_data, value.items() if kind is dict else value)]
    return value


def _read(data: Any) -> Any:
    if not isinstance(data, list):
        return data
    kind, parts = data[0], [_read(each) if isinstance(each, list) else each for each in data[1:]]
    if kind == "range":
        return range(*parts)
    made: Any = _KINDS[kind]
    return made(*parts) if made in _OURS else made(parts)


@cache
def _tracer() -> str:
    """Return a fingerprint of the code that traces: what it made before is not what it makes now."""
    here = Path(program.__file__).parent
    files = [file for name in _TRACED for file in sorted((here / name).rglob("*.py")) or [here / name]]
    files += [Path(__file__).parent / name for name in _HOOKS]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@cache
def runs_seen() -> Mapping[tuple[str, str], Mapping[str, int]]:
    """Count the runs that are not held out: by framework and family of devices, and of these by kind of kernels."""
    seen: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in wanted(read_rows()):
        case = case_of(row)
        if isinstance(case, Case) and case.measured.tokens_per_second and not is_held_out(row):
            seen[case.framework, find_machine(case.hardware).family].update(kernels_of(job_of(case)))
    return seen


@cache
def load_figures() -> Calibration:
    """Return the simulator's figures, and beside them what frameworks attain of these."""
    of_frameworks = read_toml(FOLDER / "fit.toml")
    return Calibration({**load_calibration().sections, **of_frameworks})


class Simulator:
    """Predicts cases.

    Args:
        folder: to keep traces in; None: they are not kept.
        changes: of the calibration, by dotted name; see `Calibration.replace`.
    """

    def __init__(self, folder: str | Path | None = None, changes: Mapping[str, Any] | None = None) -> None:
        self.folder, self.changes = folder, dict(changes or {})

    @cached_property
    def calibration(self) -> Calibration:
        """The figures of kernels and links that are used."""
        return load_figures().replace(self.changes)

    def __call__(self, case: Case) -> Prediction:
        """Return what is predicted of a case."""
        programs = programs_of(case, self.folder)
        own = self.calibration.section("framework", case.framework)
        figures = figures_of(case, self.calibration)
        estimate = price(programs, job_of(case), hardware_of(case, figures), figures)
        beside = 2**30 * float(own.get("context_gib", 0.0))
        if case.recipe.precision.dtype("reduce").itemsize > case.recipe.precision.dtype("param").itemsize:
            weights = max(one.by_category.get("parameters", 0) for one in estimate.memory.classes)
            beside += weights * float(own.get("gradients_too", 0.0))
        found = prediction_of(beside, estimate)
        family, kernels = estimate.hardware.family, kernels_of(estimate.job)
        general = figures.of(estimate.hardware, "estimate", family)
        all_in_all = math.log(estimate.time.step.high / estimate.time.step.value) / Z80
        prices = math.sqrt(max(0.0, all_in_all**2 - step_spread(general, kernels) ** 2))
        left_out = None
        if not case.is_held_out:
            before = self.calibration.replace(FITTED_ON.get(publication(case.source), {}))
            left_out = estimate.job.tokens_per_step / estimate.job.dims.world_size / seconds_of(case, programs, before)
        return replace(found, evidence=(case.framework, family, *kernels), prices=prices, left_out=left_out)


def seconds_of(case: Case, programs: Sequence[Program], calibration: Calibration) -> float:
    """Return the seconds of a step, and nothing of its memory."""
    calibration = figures_of(case, calibration)
    hardware = hardware_of(case, calibration)
    pricing = Pricing(hardware, calibration, **case.recipe.pricing)
    nodes = max(1, -(-case.dims.world_size // hardware.devices_per_node))
    straggler = float(calibration.of(hardware, "estimate", hardware.family).get("straggler", 0.0))
    return replay_time(programs, pricing).step * (1 + straggler * math.log2(nodes))


def prediction_of(beside: float, estimate: Estimate) -> Prediction:
    """Return of an estimate what is compared.

    Args:
        beside: bytes that the framework takes outside of torch's allocator, or keeps in it for its own ends.
        estimate: of the run.
    """
    memory, rate = estimate.memory, estimate.time.tokens_per_second_per_device
    bytes_ = {
        "allocated": memory.peak,
        "reserved": memory.reserved,
        "device": max(one.peak_reserved + one.context_bytes for one in memory.classes) + beside,
        "first step": max(one.peak_reserved - one.by_category.get("optimizer", 0) for one in memory.classes),
        "first iteration": max(
            map(_peak_without_moments, memory.classes, estimate.programs, repeat(estimate.job.recipe))
        ),
    }
    factors = (1.0, memory.interval.low / memory.interval.value, memory.interval.high / memory.interval.value)
    kinds = {kind: (value * factors[0], value * factors[1], value * factors[2]) for kind, value in bytes_.items()}
    return Prediction((rate.value, rate.low, rate.high), kinds, memory.fits())


def _peak_without_moments(memory: ClassMemory, program: Program, recipe: Recipe) -> int:
    """Return the bytes allocated at most in a step whose update makes the optimizer's two moments."""
    moment, master = recipe.precision.dtype("moments").itemsize, recipe.precision.dtype("master").itemsize
    master = 4 * (recipe.zero <= 1 and master == 4)
    moments = memory.by_category.get("optimizer", 0) * 2 * moment // (2 * moment + master)
    peak = memory.persistent  # with the moments, once they are made
    for point in memory.curve:
        begins = point.position < 0 or program.order[point.position][0][0] != "optimizer"
        peak = max(peak, sum(point.totals) - moments * begins)
    return peak
