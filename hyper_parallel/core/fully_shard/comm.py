"""The collectives of the engine, each with the lowering that is fastest on its backend, and a log for each group."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor

from hyper_parallel.core.common.errors import InvalidState, InvalidValue
from hyper_parallel.core.common.groups import all_gather_single, on_wire, reduce_scatter_single
from hyper_parallel.platform import Event, Platform


class Pending:
    """A collective under way: `wait` makes its result usable on the current stream and returns it."""

    def __init__(
        self,
        work: dist.Work | list[dist.Work] | None,
        result: torch.Tensor,
        finish: Callable[[], None] | None = None,
        keep: Sequence[torch.Tensor] = (),
    ) -> None:
        self._works = work if isinstance(work, list) else [] if work is None else [work]
        self._keep = keep  # read until it is through: the allocator must not hand their memory to others
        self._result = result
        self._finish = finish
        self._event: Event | None = None

    def behind(self, event: Event) -> Pending:
        """Let `wait` also wait for an event of the stream that this was issued on; returns itself."""
        self._event = None if self._works else event  # a collective has begun behind that stream
        return self

    def wait(self) -> torch.Tensor:
        """Wait, once; further calls return at once."""
        for work in self._works:
            work.wait()  # on a device: the current stream waits, the host goes on
        # A work keeps its tensors alive, and what has to be added up is added up once.
        self._works = []
        self._keep = ()
        if self._event is not None:
            self._event.wait()
            self._event = None
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._result


def all_gather(target: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Gather `source` of every rank into `target`, rank after rank.

    Args:
        target: 1-D, `group.size() * source.numel()` elements.
        source: 1-D.
        group: The ranks.
    """
    if group.size() == 1:
        target.copy_(source)
        return Pending(None, target)
    return Pending(all_gather_single(target, source, group=group, async_op=True), target)


def reduce_scatter(
    source: torch.Tensor, group: dist.ProcessGroup, *, by_all_to_all: bool, out: torch.Tensor | None = None
) -> Pending:
    """Sum `source` over the ranks and keep the own shard; the sum runs in rank order where the backend's does.

    Args:
        source: 1-D, `group.size()` equal shards.
        group: The ranks.
        by_all_to_all: Exchange the shards and add locally. The same bytes; on gloo about half the time (4 MB on 2
            processes: 3.4 instead of 7.0 ms), and always in rank order, hence the same bits in each run.
        out: 1-D, where the own shard goes; None: a new tensor.
    """
    size = group.size()
    if size == 1:
        return Pending(None, source if out is None else out.copy_(source))
    result = source.new_empty(source.numel() // size) if out is None else out
    if by_all_to_all:
        received = torch.empty_like(source)
        work = dist.all_to_all_single(received, source, group=group, async_op=True)
        rows = received.view(size, -1)

        def add() -> None:
            if size == 2:
                torch.add(rows[0], rows[1], out=result)
            else:
                torch.sum(rows, dim=0, out=result)

        return Pending(work, result, add)
    own, sent = _real([result, source])
    return Pending(reduce_scatter_single(own, sent, group=group, async_op=True), result)


def all_gather_each(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], group: dist.ProcessGroup, result: torch.Tensor
) -> Pending:
    """Gather each of `sources` into its own target, in one operation: nothing has to be packed or copied out.

    Args:
        targets: 1-D, each `group.size()` times as long as its source; rank after rank.
        sources: 1-D, contiguous; lengths and order are the same on all ranks, and the dtype is one.
        group: The ranks. nccl, hccl and simulated ranks do this without a copy; gloo packs by itself, off this thread.
        result: What `wait` returns: the buffer of which the targets are views.
    """
    targets, sources = (list(map(on_wire, _real(tensors))) for tensors in (targets, sources))
    return _each(group.allgather_into_tensor_coalesced, c10d.AllgatherOptions(), targets, sources, group, result)


def reduce_scatter_each(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], group: dist.ProcessGroup, result: torch.Tensor
) -> Pending:
    """Sum each of `sources` over the ranks, in one operation, and keep the own shard of each.

    Args:
        targets: 1-D, where the own shards go.
        sources: 1-D, contiguous, `group.size()` times as long as their targets; the dtype is one.
        group: The ranks; see `all_gather_each`.
        result: What `wait` returns: the buffer of which the targets are views.
    """
    operation, options = group.reduce_scatter_tensor_coalesced, c10d.ReduceScatterOptions()
    return _each(operation, options, _real(targets), _real(sources), group, result)


def _each(operation: Any, options: Any, targets: Any, sources: Any, group: Any, result: torch.Tensor) -> Pending:
    if group.size() == 1:
        torch._foreach_copy_(targets, sources)
        return Pending(None, result)
    # On the group, as `dist` has no public function for several tensors. asyncOp: without it nccl communicates on the
    # current stream, and nothing overlaps.
    options.asyncOp = True
    return Pending(operation(targets, sources, options), result, keep=sources)


def broadcast_each(
    parts: Sequence[torch.Tensor], group: dist.ProcessGroup, result: torch.Tensor, *, at_once: bool
) -> Pending:
    """Give each rank's part to all ranks, in place: parts have any sizes, and nothing is padded, packed or copied out.

    Args:
        parts: 1-D, contiguous, one for each rank in turn, of the same sizes on all ranks. An empty one is not sent.
        group: The ranks.
        result: What `wait` returns: the buffer of which the parts are views, one after the other.
        at_once: In one launch, see `Platform.gathers_uneven`; else in one for each rank.
    """
    if at_once and group.size() > 1:
        parts = _real(parts)
        own = parts[dist.get_rank(group)]
        if _even(parts):  # of a list, nccl would gather these elsewhere, and copy them
            return Pending(all_gather_single(*_real([result, own]), group=group, async_op=True), result)
        return Pending(dist.all_gather(list(parts), own, group=group, async_op=True), result, keep=parts)
    return _from_or_to_each(partial(dist.broadcast, group=group, async_op=True), "group_src", parts, group, result)


def reduce_each(
    parts: Sequence[torch.Tensor], group: dist.ProcessGroup, result: torch.Tensor, *, at_once: bool
) -> Pending:
    """Sum each rank's part to that rank, in place; what the other ranks have of it is lost.

    Args:
        parts: As in `broadcast_each`.
        group: The ranks.
        result: What `wait` returns: the own part.
        at_once: As in `broadcast_each`.
    """
    if at_once and group.size() > 1:
        own, *sent = _real([result, *parts])
        return Pending(dist.reduce_scatter(own, sent, group=group, async_op=True), result, keep=sent)
    return _from_or_to_each(partial(dist.reduce, group=group, async_op=True), "group_dst", parts, group, result)


def _from_or_to_each(
    send: Callable[..., Any], root: str, parts: Sequence[torch.Tensor], group: dist.ProcessGroup, result: torch.Tensor
) -> Pending:
    if group.size() == 1:
        return Pending(None, result)
    works = [send(part, **{root: rank}) for rank, part in enumerate(_real(parts)) if part.numel()]
    return Pending(works, result, keep=parts)


def _even(parts: Sequence[torch.Tensor]) -> bool:
    return all(part.numel() == parts[0].numel() for part in parts)


def _real(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Complex tensors as pairs of real numbers, which is all that nccl and hccl know.

    Most of torch's own functions send them so; its reduce_scatter does not, and fails on devices, not on gloo.
    """
    return [torch.view_as_real(t).view(-1) if t.is_complex() else t for t in tensors]


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum `tensor` over the ranks, in place."""
    if group.size() == 1 or not tensor.numel():
        return Pending(None, tensor)
    return Pending(dist.all_reduce(tensor, group=group, async_op=True), tensor)


# -- identity: what ranks gather or reduce together belongs to one unit ------------------------------------------------
# A collective moves bytes: if two ranks gather different units of one size, each gets a mixture of both.

RECENT = 10_000
BITS = 32  # of the hash
UNNAMED = (b"", "a unit that no forward has reached yet")


class GroupLog:
    """What this rank has gathered and reduced over one group: a running hash, which its ranks compare.

    Args:
        group: The ranks.

    Attributes:
        units: How many units with parameters over this group were made.
        gathers: Whether anything was ever gathered.
        gathered: Whether anything was since the root's forward began.
        step_ended: Whether gradients were reduced since a forward has compared.
        due: Whether they were since the ranks last compared, there or elsewhere.
        last: The last gather or reduction, e.g. `gather of layers.0: weight float32 [6, 6]`; "": none yet.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # a table beside the default group has this log, and must not keep that alive
        self.gathers = self.gathered = self.step_ended = self.due = False
        self.units = self._hash = self._comparisons = 0
        self.last = ""
        # The hash after each operation since the last comparison, and which; of very many, the last ones.
        self._recent = deque[tuple[int, str]](maxlen=RECENT)
        self._found: Callable[[], bool] | None = None  # waits for the last comparison, and says whether all is equal
        self._compared: Sequence[tuple[int, str]] = ()

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the group."""
        return dist.get_process_group_ranks(self._group())

    def note(self, operation: str, key: bytes, label: str) -> None:
        """Note a "gather" or a "reduction" of a bucket, which has a key and a label for people."""
        self._hash = crc32(key + operation.encode(), self._hash)
        self.last = f"{operation} of {label}"
        self._recent.append((self._hash, self.last))
        if operation == "gather":
            self.gathers = self.gathered = True
        else:
            self.step_ended = self.due = True

    def compare(self, platform: Platform, every: int) -> None:
        """Compare the hash over the group, each `every`-th time, or never (0); on a device, `check` reads the result.

        Communication: one all_reduce of two numbers.

        Raises:
            RuntimeError: The ranks' operations differ, on all of them.
        """
        self.check()
        self.due = False
        self._comparisons += 1
        if every and self._comparisons % every:
            return
        self._take_recent()
        extremes = self._extremes(self._hash, platform) if every and self._compared else None
        if extremes is not None:
            self._read_later(platform, extremes, lambda values: values[0] == -values[1])
            if not platform.has_streams:
                self.check()

    def carried(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers for an all_reduce, by sum or maximum, with the bits of the hash behind them if it is due."""
        if not self.due or numbers.is_meta or isinstance(numbers, FakeTensor):
            return numbers
        places = torch.arange(BITS, device=numbers.device)
        ones = (torch.full_like(places, self._hash) >> places & 1).to(numbers.dtype)
        return torch.cat([numbers, ones, 1 - ones])

    def read_carried(self, platform: Platform, numbers: int, reduced: torch.Tensor) -> torch.Tensor:
        """Take what `carried` has put behind so many numbers off again, for `check`."""
        self.due = False
        self._take_recent()
        # Either of the two is 0 if the bit is the same on all ranks, whatever the dtype has rounded.
        ones, zeros = reduced[numbers:].view(2, BITS).unbind()
        self._read_later(platform, ones * zeros, lambda values: not any(values))
        return reduced[:numbers]

    def _take_recent(self) -> None:
        self._compared = list(self._recent)
        self._recent.clear()

    def _read_later(self, platform: Platform, found: torch.Tensor, is_equal: Callable[[list[float]], bool]) -> None:
        if not platform.has_streams:
            self._found = lambda: is_equal(found.tolist())
            return
        # A host that waited here would be late with what comes next.
        copy = platform.copy_to_host(found, pinned=platform.supports_pinned_memory, wait=False)
        event = platform.current_stream().record_event()

        def read() -> bool:
            event.synchronize()
            return is_equal(copy.tolist())

        self._found = read

    def check(self) -> None:
        """Read the result of the last comparison, if nobody has.

        Raises:
            RuntimeError: The ranks' operations differ, on all of them.
        """
        found, self._found = self._found, None
        if found is not None and not found():
            self._hash = 0  # a next step is not blamed for this one
            blame = "ranks have gathered or reduced different units together, and got a mixture of their values"
            hint = "the same units in the same order on all ranks (a unit that a rank does not need runs on no rows)"
            seen = self._first_difference(self._compared)
            raise InvalidState("cannot go on with the step", blame, seen, hint)

    def compare_units(self, asked: str, keys: Sequence[tuple[bytes, str]], platform: Platform) -> None:
        """Compare the units over this group, given by label, before they are first gathered.

        Communication: one all_reduce of two numbers, which the host waits for.

        Raises:
            ValueError: They differ, on all ranks.
        """
        value, entries = 0, []
        for key, label in keys:
            value = crc32(key, value)
            entries.append((value, label))
        extremes = self._extremes(value, platform)
        if extremes is None:
            return
        most, least = extremes.tolist()
        if most != -least:
            blame = "its units are not the same on all ranks, which gather and reduce them together"
            hint = (
                "one model on all ranks of a mesh; or, if only the names of modules or parameters differ, "
                "model.set_check_identity(True, names=False) before the first forward"
            )
            raise InvalidValue(asked, blame, self._first_difference(entries), hint)

    def _extremes(self, value: int, platform: Platform) -> torch.Tensor | None:
        """Return the largest of the ranks' values and of their negatives; None where tensors have no values."""
        own = torch.full((2,), value, dtype=torch.int64, device=platform.device())
        if own.is_meta or isinstance(own, FakeTensor):
            return None
        own[1:].neg_()
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self._group())
        return own

    def _first_difference(self, entries: Sequence[tuple[int, str]]) -> str:
        """Return one line for each text that ranks have at the first place where their hashes differ.

        Communication: two gathers of objects.
        """
        hashes = self._gathered([value for value, _ in entries])
        shortest = min(map(len, hashes))
        place = next((i for i in range(shortest) if len({row[i] for row in hashes}) > 1), shortest)
        texts = self._gathered(entries[place][1] if place < len(entries) else "nothing more")
        ranks: dict[str, list[int]] = {}
        for rank, text in zip(self.ranks, texts, strict=True):
            ranks.setdefault(text, []).append(rank)
        return "\n  ".join(f"rank {_shortened(members)}: {text}" for text, members in ranks.items())

    def _gathered(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, own, group=self._group())
        return found


def _shortened(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
