"""Repeated runs of a function from one seed, and the first place where they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.common.torch_compat import flat_bytes
from sim.comm.collectives import Call
from sim.comm.group import Endpoint, Message, Slot
from sim.comm.observer import Observer, observe
from sim.comm.trace import Event
from sim.explain.errors import NonDeterminism, RankFailed, SimError, said, table
from sim.world import world

# What an event is compared by, with the word for it. The data comes last: it is the hardest to act upon.
_COMPARED = {
    "rank": "rank",
    "op": "operation",
    "axis": "axis",
    "group": "group",
    "seq": "number",
    "reduce_op": "reduce op",
    "root": "root",
    "peer": "peer",
    "dtype": "dtype",
    "input_shapes": "shape",
    "output_shapes": "shape of the result",
    "line": "line",
    "issued": "virtual time",
    "digest": "data",
}


class _RecordedRun(NamedTuple):
    seed: int
    events: list[Event]
    results: list[Any]
    failure: Exception | None


def check_determinism(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seeds: Iterable[int] = (0,),
    runs: int = 2,
    init: bool = True,
) -> list[Any]:
    """Run `fn` several times from each seed, and return the results of the first run.

    Runs from one seed must communicate the same data in the same order and return the same. Runs from different seeds
    interleave the ranks differently; they must return the same.

    >>> import torch.distributed as dist
    >>> def total() -> float:
    ...     x = torch.tensor([float(dist.get_rank())])
    ...     dist.all_reduce(x)
    ...     return x.item()
    >>> check_determinism(total, 4, seeds=range(3))
    [6.0, 6.0, 6.0, 6.0]

    Args:
        fn: What each rank runs. Random numbers follow the seed: draw none, or seed them, to compare several seeds.
        world_size: Number of ranks.
        args: Of `fn`; it must not change them.
        kwargs: Of `fn`.
        seeds: Seeds to try.
        runs: Runs from each seed.
        init: As in `sim.world`.

    Results are compared bit by bit where they are tensors, by entry where they are lists, dicts, dataclasses or
    modules, and else by `==`; objects that only equal themselves are passed over.

    Raises:
        NonDeterminism: Two runs differ: the first event that does, or the first result.
        Exception: What `fn` raises, if it does so on each run.
        ValueError: No seed, or fewer than 1 run.
    """
    chosen = list(seeds)
    if not chosen or runs < 1 or (len(chosen) == 1 and runs < 2):
        seen = f"seeds: {len(chosen)}, runs: {runs}"
        raise InvalidValue("cannot check determinism", "two runs at least are compared", seen, "runs=2")
    first: _RecordedRun | None = None
    for seed in chosen:
        once = _run(fn, world_size, args, kwargs, seed, init)
        for number in range(1, runs):
            again = _run(fn, world_size, args, kwargs, seed, init)
            replay = f"sim.check_determinism(..., world_size={world_size}, seeds={[seed]}, runs={runs})"
            _compare(once, again, number + 1, replay)
        if first is not None:
            replay = f"sim.check_determinism(..., world_size={world_size}, seeds={[first.seed, seed]}, runs=1)"
            _compare_outcomes(first, once, f"seed {first.seed}", f"seed {seed}", replay)
        first = first or once
    assert first is not None
    if first.failure is not None:
        raise first.failure
    return first.results


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    seed: int,
    init: bool,
) -> _RecordedRun:
    results, failure = list[Any](), None
    with world(world_size, seed=seed, init=init, keep_events=None) as w:
        observe(w.network, Digests(), first=True)  # before what they give enters the trace
        try:
            results = w.run(fn, args, kwargs)
        except Exception as error:
            failure = error
        return _RecordedRun(seed, w.trace.in_order(), results, failure)


class Digests(Observer):
    """Fingerprints of what ranks give, for the events of the trace."""

    def issued(self, endpoint: Endpoint, what: Slot | Message, call: Call | None) -> None:
        """Note the fingerprint; a broadcast's root has no inputs of its own."""
        if call is not None:
            contract, root = call.contract, call.contract.root
            broadcasts = contract.op == "broadcast" and root == what.group.ranks.index(endpoint.rank)
            call.digest = _digest(call.outputs if broadcasts else call.inputs)
        elif isinstance(what, Message) and what.who_waits == "send":
            what.digest = _digest([what.tensor])


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    """A fingerprint of the tensors' bytes."""
    found = hashlib.blake2b(digest_size=8)
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        for tensor in tensors:
            if not tensor.is_meta and tensor.numel():
                dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
                data = flat_bytes(dense.contiguous())
                found.update(data.numpy().tobytes())
    return found.hexdigest() if tensors else ""


# -- events ----------------------------------------------------------------------------------------------------


def _compare(one: _RecordedRun, other: _RecordedRun, number: int, replay: str) -> None:
    """Two runs from one seed: what they did, one event after the other, then what came out."""
    names = ("run 1", f"run {number}")
    for place in range(max(len(one.events), len(other.events))):
        pair = [run.events[place] if place < len(run.events) else None for run in (one, other)]
        differs = _difference(*pair)
        if differs is not None:
            rows = [(name, *_describe(event)) for name, event in zip(names, pair, strict=True)]
            raise NonDeterminism(
                f"two runs from seed {one.seed} differ in event {place} ({differs})\n{table(rows)}\n"
                f"{_failures(one, other, names)}"
                f"  {_whose(pair)}\n"
                "  try: look above that line for an order of a set, a hash, the time, os.urandom, or a generator "
                "without a seed\n"
                f"  replay: {replay}"
            ) from (other.failure or one.failure)
    _compare_outcomes(one, other, *names, replay)


def _difference(one: Event | None, other: Event | None) -> str | None:
    """What two events differ in, in a word; None if they are the same."""
    if one is None or other is None:
        return "one run is over"
    return next((word for name, word in _COMPARED.items() if getattr(one, name) != getattr(other, name)), None)


def _describe(event: Event | None) -> tuple[str, str, str, str, str]:
    if event is None:
        return ("has ended", "", "", "", "")
    given = f", data {event.digest}" if event.digest else ""
    what = f"{event.name}{f', {event.reduce_op}' if event.reduce_op else ''}"
    return (
        f"rank {event.rank}",
        what,
        f"{event.dtype} {list(event.shape)}{given}",
        f"at {event.issued:g} s",
        event.line,
    )


def _whose(pair: Sequence[Event | None]) -> str:
    ranks = sorted({event.rank for event in pair if event is not None})
    if len(ranks) == 2:
        return f"because: it was rank {ranks[0]}'s turn in one run and rank {ranks[1]}'s in the other"
    return f"because: rank {ranks[0]} did something else"


# -- results ---------------------------------------------------------------------------------------------------


def _failures(one: _RecordedRun, other: _RecordedRun, names: Sequence[str]) -> str:
    """One line for each run that has failed."""
    runs = zip(names, (one, other), strict=True)
    return "".join(f"  {name} failed: {_brief(run.failure)}\n" for name, run in runs if run.failure is not None)


def _brief(failure: Exception) -> str:
    """A failure in a line; that of a rank says itself what class it has."""
    text = said(failure)
    return text.removeprefix(f"{type(failure).__name__}: ") if isinstance(failure, RankFailed) else text


def _compare_outcomes(one: _RecordedRun, other: _RecordedRun, name: str, other_name: str, replay: str) -> None:
    if (one.failure is None) != (other.failure is None) or _text(one.failure) != _text(other.failure):
        failures = [(one, name), (other, other_name)]
        lines = [_brief(run.failure) if run.failure else "returned" for run, _ in failures]
        if lines[0] == lines[1]:  # it is further down that they differ
            texts = (_text(run.failure).splitlines() for run, _ in failures)
            lines = list(next(pair for pair in zip_longest(*texts, fillvalue="") if pair[0] != pair[1]))
        rows = [(who, line.strip()) for (_, who), line in zip(failures, lines, strict=True)]
        raise NonDeterminism(
            f"{name} and {other_name} end differently\n{table(rows)}\n"
            "  try: look at the failure first\n"
            f"  replay: {replay}"
        ) from (other.failure or one.failure)
    for rank, (mine, theirs) in enumerate(zip(one.results, other.results, strict=True)):
        place = first_difference(mine, theirs)
        if place is not None:
            where, left, right = place
            same_seed = one.seed == other.seed
            raise NonDeterminism(
                f"{name} and {other_name} give different results on rank {rank}, at result{where}\n"
                f"{table([(name, left), (other_name, right)])}\n"
                + (
                    "  try: look for a hash, the time, os.urandom, or a generator without a seed"
                    if same_seed
                    else "  try: seed the random numbers, and look for what depends on which rank comes first"
                )
                + f"\n  replay: {replay}"
            )


def _text(failure: Exception | None) -> str:
    """The failure without the line that replays it, which names the seed."""
    if failure is None:
        return ""
    lines = [line for line in str(failure).splitlines() if not line.startswith("  replay:")]
    kind = SimError if isinstance(failure, SimError) else type(failure)
    return "\n".join([kind.__name__, *lines])


def first_difference(one: Any, other: Any, where: str = "") -> tuple[str, str, str] | None:
    """Where two results first differ, and what they are there; None if they do not.

    >>> first_difference({"loss": [1.0, 2.0]}, {"loss": [1.0, 2.5]})
    ("['loss'][1]", '2.0', '2.5')
    """
    if type(one) is not type(other):
        return where, f"{type(one).__name__} {_short(one)}", f"{type(other).__name__} {_short(other)}"
    if isinstance(one, torch.Tensor):
        return _tensor_difference(one, other, where)
    parts, others = _parts(one), _parts(other)
    if parts is None or others is None:
        nan = one != one and other != other
        same = nan or "__eq__" not in _own_methods(type(one)) or one == other
        return None if same else (where, _short(one), _short(other))
    if [name for name, _ in parts] != [name for name, _ in others]:
        return where, f"{len(parts)} entries: {_short(one)}", f"{len(others)} entries: {_short(other)}"
    for (name, mine), (_, theirs) in zip(parts, others, strict=True):
        found = first_difference(mine, theirs, where + name)
        if found is not None:
            return found
    return None


def _own_methods(kind: type) -> set[str]:
    """The names that a class or one of its bases defines, apart from `object`'s."""
    return {name for base in kind.__mro__ if base is not object for name in vars(base)}


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """The entries of a container, each with how to write it; None for what is no container."""
    if isinstance(value, torch.nn.Module):
        return [(f".state_dict()[{name!r}]", entry) for name, entry in value.state_dict().items()]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", entry) for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{place}]", entry) for place, entry in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in fields(value)]
    return None


def _tensor_difference(one: torch.Tensor, other: torch.Tensor, where: str) -> tuple[str, str, str] | None:
    one, other = (t.to_local() if hasattr(t, "to_local") else t for t in (one.detach(), other.detach()))
    kinds = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (one, other)]
    if kinds[0] != kinds[1]:
        return where, kinds[0], kinds[1]
    if one.is_meta or _digest([one]) == _digest([other]):
        return None
    flat, flat_other = (t.contiguous().reshape(-1) for t in (one, other))
    size = one.element_size()
    bits, bits_other = (flat_bytes(t).view(-1, size) for t in (flat, flat_other))
    place = int((bits != bits_other).any(dim=1).nonzero()[0])
    index = list(torch.unravel_index(torch.tensor(place), one.shape)) if one.dim() else []
    left, right = (repr(t[place].item()) for t in (flat, flat_other))
    return f"{where}[{', '.join(str(int(i)) for i in index)}]", left, right


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
