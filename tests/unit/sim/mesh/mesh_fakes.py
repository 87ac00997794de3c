"""Estimates without an estimator: closed forms in its place, for what ranks, reports and explains estimates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from hyper_parallel.core.machine.description import find_machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim.mesh.models import find_model
from sim.mesh.recipe import Recipe
from sim.mesh.searching.bounds import guess_seconds, least_memory, rates_of
from sim.mesh.searching.space import Candidate, shape_of


class Quantity(NamedTuple):
    value: float
    low: float
    high: float
    grade: str = "calibrated"


def quantity(value: float, spread: float = 0.1, grade: str = "calibrated") -> Quantity:
    return Quantity(value, value * (1 - spread), value * (1 + spread), grade)


class FakeMemory(SimpleNamespace):
    def fits(self, limit_bytes: float | None = None) -> bool:
        limit = self.hardware.memory_bytes if limit_bytes is None else limit_bytes
        return self.reserved + self.classes[0].context_bytes <= limit


def fake_estimate(
    model: Any,
    dims: ParallelDims,
    batch: int,
    seq_len: int,
    hardware: Any,
    recipe: Recipe,
    scale: float = 1.5,
    layers_per_stage: tuple[int, ...] | None = None,
) -> Any:
    """Answer with the bound of memory, times `scale`, and the guess of time."""
    device, spec = find_machine(hardware), find_model(model)
    shape, candidate = shape_of(spec, seq_len), Candidate(dims, recipe, batch, layers_per_stage)
    least = least_memory(shape, candidate, seq_len)
    seconds = guess_seconds(shape, candidate, seq_len, rates_of(device))
    allocated = int(least * scale)
    shares = {"activations": 0.4, "parameters": 0.2, "optimizer": 0.2, "gradients": 0.1, "logits": 0.08, "inputs": 0.02}
    classes = [
        SimpleNamespace(
            rank=rank,
            like=dims.world_size // dims.pp,
            peak_allocated=allocated - rank,
            peak_reserved=int(1.1 * allocated) - rank,
            at="backward of layers.0",
            by_category={name: int(share * allocated) for name, share in shares.items()},
            context_bytes=2**30,
            on_host={},
            held=(),
            host_bytes=0,
        )
        for rank in range(dims.pp)
    ]
    reserved = classes[0].peak_reserved
    memory = FakeMemory(
        hardware=device,
        classes=classes,
        fullest=classes[0],
        peak=allocated,
        reserved=reserved,
        host_limit=None,
        interval=quantity(float(reserved), 0.05),
    )
    rate = batch * dims.batch_ranks * seq_len / seconds / dims.world_size
    exposed = {axis: quantity(0.1 * seconds, 0.3) for axis in dims.mesh_axes if axis != "pp"}
    bubble = 0.1 * seconds if dims.pp > 1 else 0.0
    rest = seconds * (1 - 0.1 * len(exposed)) - bubble
    time = SimpleNamespace(
        step=quantity(seconds),
        compute=quantity(rest, 0.08),
        exposed=exposed,
        bubble=quantity(bubble),
        optimizer=quantity(0.02 * seconds),
        host=quantity(0.0, grade="assumed"),
        mfu=quantity(rate * spec.flops_per_token(seq_len) / device.peak("bf16"), 0.05),
        tokens_per_second_per_device=quantity(rate),
    )
    slowest = SimpleNamespace(kinds={"matmul": 0.7 * rest, "attention": 0.1 * rest, "memory": 0.2 * rest})
    return SimpleNamespace(
        model=model,
        dims=dims,
        recipe=recipe,
        hardware=device,
        batch=batch,
        seq_len=seq_len,
        memory=memory,
        time=time,
        timeline=SimpleNamespace(slowest=slowest),
    )
