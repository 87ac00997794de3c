"""Runs one function in a world of real numbers and, rank by rank, in worlds where one rank lives, and compares the two.

A function gets the mode that it makes its tensors in: nothing in the real world, fake tensors in the lone ones. Meshes
are made outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch._subclasses.fake_tensor import FakeTensorMode

import sim
from hyper_parallel.core.dtensor.layout import Layout
from sim.mesh.tracing.lone import Listener, LoneWorld
from sim.trace import Event

Mode = Callable[[], AbstractContextManager[Any]]
Body = Callable[[Mode], Any]

COMPARED = (
    *("rank", "op", "axis", "group", "members", "seq", "dtype", "reduce_op", "root", "peer"),
    *("input_shapes", "output_shapes", "send_bytes", "recv_bytes"),
)
"""What of an event must be the same: all but lines, times, and numbers counted over all ranks."""


class Seen(NamedTuple):
    """What a rank has returned, and what it has communicated, in its order."""

    result: Any
    events: list[Event]


def in_real_numbers(body: Body, world_size: int, *, stands_for: str | None = None) -> list[Seen]:
    """Run a function on every rank of a world, with values."""
    with sim.world(world_size, map_device=stands_for) as world:
        results = world.run(body, (nullcontext,))
        return [Seen(result, world.trace.of_rank(rank)) for rank, result in enumerate(results)]


def alone(
    body: Body, world_size: int, rank: int, listener: Listener | None = None, *, stands_for: str | None = None
) -> Seen:
    """Run it on one rank that lives alone, on tensors without values."""
    fake = FakeTensorMode(allow_non_fake_inputs=False)

    @contextmanager
    def mode() -> Iterator[None]:
        with fake:
            yield

    world = LoneWorld(world_size, rank, listener)
    world.host.map_device = stands_for
    with world:
        result = world.run_alone(body, mode)
        return Seen(result, world.trace.of_rank(rank))


def facts(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in COMPARED}


def assert_same(real: Seen, fake: Seen) -> None:
    """Assert that results are equal, and that the k-th event of one is the k-th of the other."""
    for number, (one, other) in enumerate(zip(real.events, fake.events, strict=False)):
        wanted, got = facts(one), facts(other)
        wrong = [f"{name}: {got[name]} and not {wanted[name]}" for name in COMPARED if got[name] != wanted[name]]
        assert not wrong, f"event {number}, {one.name} at {one.line}, alone: " + "; ".join(wrong)
    longer, what = (real, "left out") if len(real.events) > len(fake.events) else (fake, "too much")
    first = min(len(real.events), len(fake.events))
    odd = [f"{event.name} at {event.line}" for event in longer.events[first:]]
    assert not odd, f"{len(odd)} events {what} alone: {odd[0]}, ..."
    assert fake.result == real.result


def compare(
    body: Body,
    world_size: int,
    ranks: Sequence[int] | None = None,
    *,
    stands_for: str | None = None,
    part: Callable[[Seen], Seen] = lambda seen: seen,
) -> list[Seen]:
    """Assert that each rank (or these) does alone what it does among the others. Alone comes first and last.

    What is cached in the meantime must be of use to both: a plan that kept a tensor without values would break the
    ranks that have them. So the first rank is alone before, the others are afterwards.

    Args:
        body: what each rank does.
        world_size: ranks.
        ranks: which of them are compared; None: all.
        stands_for: the device whose way of sending is taken.
        part: of what was seen that is compared.

    Returns:
        What the ranks have done in the real world.
    """
    some = range(world_size) if ranks is None else ranks
    first = alone(body, world_size, some[0], stands_for=stands_for)
    real = in_real_numbers(body, world_size, stands_for=stands_for)
    for rank in some[1:] or some:
        assert_same(part(real[rank]), part(alone(body, world_size, rank, stands_for=stands_for)))
    assert_same(part(real[some[0]]), part(first))
    return real


def describe(tensor: Any) -> tuple[Any, ...]:
    """Say what can be said of a tensor without its values, and with a DTensor's layout; None of None."""
    if tensor is None:
        return ()
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    layout = str(Layout.of(tensor)) if hasattr(tensor, "to_local") else ""
    strides = tuple(local.stride()) if local.numel() else ()  # of nothing, they mean nothing
    return tuple(tensor.shape), tuple(local.shape), strides, str(tensor.dtype), layout
