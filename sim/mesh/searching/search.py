"""The search for the fastest way to train among those that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.core.common.checks import check_listed, read_int
from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.machine.description import Machine, find_machine
from hyper_parallel.core.mesh.parallel_dims import DEGREES
from sim.mesh.models import Model, find_model
from sim.mesh.recipe import Recipe
from sim.mesh.searching.bounds import rates_of
from sim.mesh.searching.explore import Exploration, Progress
from sim.mesh.searching.floors import Floors
from sim.mesh.searching.ranking import SearchResult
from sim.mesh.searching.space import Candidate, Space, default_recipes, shape_of


def search(
    model: Model,
    hardware: str | Path | Machine,
    num_devices: int,
    global_batch: int,
    memory_limit: float | None = None,
    *,
    seq_len: int,
    recipes: Sequence[Recipe] | None = None,
    fixed: Mapping[str, int] | None = None,
    layers_per_stage: Sequence[int] | None = None,
    accumulate: int | None = None,
    limit: int | None = None,
    tp_chunks: Sequence[int] = (2, 4),
    progress: Progress | None = None,
    estimator: Callable[..., Any] | None = None,
    accepts: Callable[[Candidate], object] | None = None,
) -> SearchResult:
    """Rank ways to train a model on a number of devices.

        result = search("llama3-8b", "h100-sxm", 64, global_batch=128, seq_len=8192)
        result.best.candidate.dims, result.best.tokens_per_second
        print(result)

    Tensor parallelism is tried within a node, context parallelism where sequences are long, the pipeline with one, two,
    four and eight stages on each rank, sharding over all data-parallel ranks and over fewer nodes, micro-batches of 1,
    2, 4 and 8 sequences, each with every recipe. Every candidate is looked at: one whose floor of time or memory says
    that it cannot be faster than the best, or cannot fit, is not estimated. At last the feed-forwards of the fastest
    are tried in chunks. Ctrl-C ends a search; what it has found so far is returned.

    Args:
        model: name, config or `Custom`.
        hardware: name, file or `Machine`.
        num_devices: ranks.
        global_batch: sequences of a step, over all ranks.
        memory_limit: bytes on a device; None: what the hardware has.
        seq_len: tokens of a sequence.
        recipes: to try; None: every checkpointing with ZeRO-3 and ZeRO-2. Those that offload activations are tried if
            no other one fits.
        fixed: degrees that are given, such as `{"tp": 8}`; also `etp`, `ulysses_degree` and `fold_experts`.
        layers_per_stage: of every pipeline that is tried; None: even in layers, time or memory.
        accumulate: micro-batches of a step on each rank; None: several are tried.
        limit: most estimates; None: as many as it takes to look at every candidate. Chunks of the fastest come on top.
        tp_chunks: chunks that the two fastest with tp are tried in, ascending; (): none. A recipe
            that has chunks keeps them.
        progress: called with how far the search is.
        estimator: what estimates one candidate, called as `estimate` is; None: that.
        accepts: called with a candidate before it is estimated; a ValueError rejects it. None: all are accepted.

    Raises:
        ValueError: arguments that do not fit; nothing can be placed, or nothing fits into memory: the message says what
            comes closest.
    """
    device, spec = find_machine(hardware), find_model(model)
    _check(num_devices=num_devices, global_batch=global_batch, seq_len=seq_len, limit=1 if limit is None else limit)
    for number in tp_chunks:
        _check(tp_chunks=number)
    check_listed("cannot search", num_devices=num_devices)
    fixed = _checked_fixed(fixed or {}, num_devices)
    limit_bytes = device.memory_within("cannot search", memory_limit)
    shape = shape_of(spec, seq_len)
    space = Space(
        shape,
        num_devices,
        device.devices_per_node,
        global_batch,
        seq_len,
        tuple(recipes) if recipes is not None else default_recipes(),
        fixed,
        None if layers_per_stage is None else tuple(layers_per_stage),
        accumulate,
    )
    title = f"{spec.name} on {num_devices:,} x {device.name}, {global_batch:,} x {seq_len:,} tokens"
    floors = None
    if estimator is None:
        from sim.mesh.estimate import estimate

        estimator = estimate
        floors = Floors(spec, shape, device, seq_len)
    asked = estimator

    def one(candidate: Candidate) -> Any:
        if accepts is not None:
            accepts(candidate)
        sizes = candidate.layers_per_stage
        rest: dict[str, Any] = {} if sizes is None else {"layers_per_stage": sizes}
        return asked(
            model=model,
            dims=candidate.dims,
            batch=candidate.batch,
            seq_len=seq_len,
            hardware=device,
            recipe=candidate.recipe,
            **rest,
        )

    chunks = tuple(tp_chunks)
    exploration = Exploration(space, rates_of(device), limit_bytes, limit, title, floors, chunks)
    return exploration.run(one, progress or (lambda done, total, now: None))


def _check(**counts: int) -> None:
    for name, value in counts.items():
        read_int("cannot search", name, value, 1, f"{name}=64")


def _checked_fixed(fixed: Mapping[str, int], num_devices: int) -> dict[str, int]:
    for name, value in fixed.items():
        if name not in DEGREES:
            blame = f"there is no degree {name!r}"
            raise InvalidValue("cannot search", blame, f"fixed: {dict(fixed)}", nearest(name, DEGREES))
        if name == "fold_experts" and isinstance(value, bool):
            continue
        _check(**{name: value})
        if num_devices % value:
            blame = f"{name}={value} does not divide the devices"
            fits = [d for d in range(1, num_devices + 1) if num_devices % d == 0][:12]
            hint = f"{name} one of {', '.join(map(str, fits))}"
            raise InvalidValue("cannot search", blame, f"num_devices: {num_devices}", hint)
    return dict(fixed)
