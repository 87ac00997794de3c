"""The texts of calls that do not fit together: one line per rank, sorted by rank, the minority marked."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, TypeVar

import torch

from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.platform import reductions_of
from sim.comm.collectives import Call, Contract, MemoryGone, Problem, sizes_of
from sim.comm.group import Key, Message, Network, Slot, strangers
from sim.explain.errors import (
    CollectiveMismatch,
    RankStopped,
    ReplicaMismatch,
    SimError,
    ranks_phrase,
    said,
    short_ranks_phrase,
    table,
)
from sim.explain.lines import raised_at
from sim.kernel.threads import collector_paused

_SHOWN = 5
Error = TypeVar("Error", bound=SimError)


def collective_mismatch(network: Network, slot: Slot, problem: Problem | None) -> CollectiveMismatch:
    """Describe a collective on which the ranks of a group do not agree, or why they met in it at all."""
    if slot.strangers and not slot.mismatch:
        return group_mismatch(network) or _identity_mismatch(network, slot)
    return group_mismatch(network) or _collective_mismatch(network, slot, problem)


def _identity_mismatch(network: Network, slot: Slot) -> CollectiveMismatch:
    """Describe a collective of equal sizes that is not for the same thing on all ranks."""
    present = [(rank, call) for rank, call in zip(slot.group.ranks, slot.calls, strict=True) if call is not None]
    by_text: dict[str, list[int]] = {}
    for (rank, _), text in zip(present, texts := _identity_texts(slot), strict=True):
        by_text.setdefault(text, []).append(rank)
    usual, members = max(by_text.items(), key=lambda item: len(item[1]))
    is_clear = [len(ranks) for ranks in by_text.values()].count(len(members)) == 1
    marked = [place for place, text in enumerate(texts) if is_clear and text != usual]
    rows = [(f"rank {rank}", text, call.line) for (rank, call), text in zip(present, texts, strict=True)]
    handled = being_handled(network)
    assert slot.contract is not None
    error = CollectiveMismatch(
        f"the ranks of group {slot.group.title!r} do not mean the same by {slot.contract.op} #{slot.seq}, whose sizes "
        f"agree\n{table(rows, marked=marked)}\n"
        f"{handled.lines}"
        "  differs: what it is for; each rank would get the others' numbers as its own\n"
        f"  try: {handled.advice or _SAME_UNITS}\n"
        f"  replay: {network.replay}"
    )
    meant = "; ".join(f"{text} on {short_ranks_phrase(who)}" for text, who in by_text.items())
    error.meant = f"the ranks do not mean the same by {slot.contract.op} #{slot.seq} over {slot.group.title!r}: {meant}"
    return handled.chained(error)


_NOT_COMPARED = "check_identity=False (--check-identity off) if they mean the same by other names"
_SAME_UNITS = (
    "let every rank run the same units and models in the same order, also where it has nothing for them to do; "
    f"{_NOT_COMPARED}"
)
_TEXT = 100  # characters of an identity that a table shows


def _identity_texts(slot: Slot) -> list[str]:
    """Name what each member means, shortened to where they differ."""
    identities = [call.identity for call in slot.calls if call is not None]
    whole = ["a call of the script's own" if each is None else each.text for each in identities]
    if len(set(whole)) == 1:  # of one name: say which
        known = slot.group.identities
        numbers = [known.number(each, member) for member, each in enumerate(identities) if each is not None]
        return [f"{text} (number {number} of this name)" for text, number in zip(whole, numbers, strict=True)]
    parts = [text.split(", ") for text in whole]
    if max(map(len, whole)) <= _TEXT or max(map(len, parts)) == 1:  # no list: a folder, say, may differ at its end
        return whole
    same = next(
        (place for place, row in enumerate(zip(*parts, strict=False)) if len(set(row)) > 1), min(map(len, parts))
    )
    first = max(same - 1, 0)
    return [
        f"{words[0][:_TEXT]}{' ... ' if first > 1 else ''}{', '.join(words[max(first, 1) : same + 2])} ..."
        for words in parts
    ]


def _collective_mismatch(network: Network, slot: Slot, problem: Problem | None) -> CollectiveMismatch:
    ranks = slot.group.ranks
    present = [(rank, call) for rank, call in zip(ranks, slot.calls, strict=True) if call is not None]
    hint = "let every rank of the group call the same operation, with the same arguments, in the same order"
    majority = None
    if problem is None:
        majority = Counter(call.contract for _, call in present).most_common(1)[0][0]
        differs = _differences(present)
    else:
        differs, hint = [problem.what(ranks)], problem.hint
    on_meta = {_is_on_meta(call) for _, call in present if _tensors(call)}
    rows, marked = [], []
    for index, (rank, call) in enumerate(zip(ranks, slot.calls, strict=True)):
        rows.append(call_row(rank, call, slot, with_device=len(on_meta) > 1))
        if call is not None and majority is not None and call.contract != majority:
            marked.append(index)
    if problem is not None:
        marked += problem.blamed
    handled = being_handled(network)
    return handled.chained(
        CollectiveMismatch(
            f"the ranks of group {slot.group.title!r} do not agree on its operation #{slot.seq}\n"
            f"{table(rows, marked=marked)}\n"
            f"{handled.lines}"
            f"  differs: {'; '.join(differs)}\n"
            f"  try: {handled.advice or hint}\n"
            f"  replay: {network.replay}"
        )
    )


def cannot_carry_out(network: Network, slot: Slot, cause: Exception) -> SimError:
    """Describe a collective on which all ranks agree, but which torch cannot compute."""
    rows = [call_row(rank, call, slot) for rank, call in zip(slot.group.ranks, slot.calls, strict=True)]
    if isinstance(cause, MemoryGone):
        return _memory_gone(network, slot.describe(), rows, slot.group.ranks[cause.member], cause)
    return SimError(
        f"{slot.describe()} cannot be computed\n"
        f"{table(rows)}\n"
        f"  because: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}\n"
        "  try: a dtype and a reduce op that torch can compute on the CPU\n"
        f"  replay: {network.replay}"
    )


def _memory_gone(network: Network, what: str, rows: list[tuple[str, ...]], rank: int, cause: MemoryGone) -> SimError:
    """Describe an operation on a tensor whose storage has been released."""
    return SimError(
        f"{what} cannot be carried out: a tensor of rank {rank} has lost its memory\n"
        f"{table(rows, marked=[index for index, row in enumerate(rows) if row[0] == f'rank {rank}'])}\n"
        f"  because: {cause.what}\n"
        "  try: to wait for the work that the operation returned before its storage is resized, and to resize it back "
        "before the next one\n"
        f"  replay: {network.replay}"
    )


def message_without_memory(network: Network, source: Message, target: Message, cause: MemoryGone) -> SimError:
    """Describe a send or a receive of a tensor whose storage has been released."""
    own = source if cause.member == source.sender else target
    return _memory_gone(network, own.describe(), _message_rows(source, target), own.group.ranks[own.member], cause)


def not_reduced(backend: str, op: str, reduce_op: str, tensor: torch.Tensor, group: str) -> Exception:
    """Describe a reduction that the backend a world stands for refuses: a dtype, or a reduce op of any dtype."""
    reductions = reductions_of(backend)
    dtypes = [dtype for dtype in _REDUCIBLE if reductions.takes(dtype, reduce_op, op)]
    asked = f"cannot {op} {_name(tensor.dtype)} by ReduceOp.{reduce_op}"
    seen = f"tensor: {_name(tensor.dtype)} {list(tensor.shape)}   group: {group}   {backend} takes: "
    if not dtypes:
        ops = [name for name in reductions.dtypes if reductions.takes(tensor.dtype, name, op)]
        hint = f"ReduceOp.{ops[0]}, or gather the tensors and reduce them on each rank"
        return InvalidValue(asked, f"{backend} has no such reduce op", seen + ", ".join(ops), hint)
    other = torch.float32 if tensor.is_floating_point() or torch.int32 not in dtypes else torch.int32
    hint = "torch.view_as_real(tensor)" if tensor.is_complex() else f"tensor.to(torch.{_name(other)})"
    return InvalidType(asked, f"{backend} does not reduce this dtype", seen + ", ".join(map(_name, dtypes)), hint)


def not_moved(backend: str, op: str, tensor: torch.Tensor, group: str) -> Exception:
    """Describe a dtype that the backend a world stands for does not send as it is."""
    takes = reductions_of(backend)
    dtypes = ", ".join(_name(dtype) for dtype in _REDUCIBLE if takes.moves(dtype, op))
    seen = f"tensor: {_name(tensor.dtype)} {list(tensor.shape)}   group: {group}   {backend} takes: {dtypes}"
    hint = "torch.view_as_real(tensor)" if tensor.is_complex() else f"tensor.view(torch.{_SAME_SIZE[tensor.itemsize]})"
    asked, blame = f"cannot {op} {_name(tensor.dtype)}", f"{backend} does not move this dtype"
    return InvalidType(asked, blame, seen, hint)


_SAME_SIZE = {1: "uint8", 2: "float16", 4: "int32", 8: "int64"}

_REDUCIBLE = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def call_row(rank: int, call: Call | None, slot: Slot, *, with_device: bool = False) -> tuple[str, ...]:
    """What one rank has called, in the columns of a table."""
    if call is None:
        return (f"rank {rank}", "has not called it", "", "", "", "")
    contract = call.contract
    root = "" if contract.root is None else f"root={slot.group.ranks[contract.root]}"
    reduce_op = "" if contract.reduce_op == "-" else contract.reduce_op
    data = " ".join(part for part in (contract.dtype, contract.shape) if part != "-")
    if contract.op == "all_to_all":
        send, recv = sizes_of(call)
        data += f" send={list(send)} recv={list(recv)}"
    if with_device and _tensors(call):
        data += f" on {_tensors(call)[0].device}"
    return (f"rank {rank}", contract.op, reduce_op, root, data, call.line)


def _tensors(call: Call) -> list[torch.Tensor]:
    return [*call.outputs, *call.inputs]


def _is_on_meta(call: Call) -> bool:
    return any(tensor.is_meta for tensor in _tensors(call))


_WORDS = {"op": "operation", "reduce_op": "reduce op", "root": "root", "dtype": "dtype", "shape": "size"}


def _differences(present: list[tuple[int, Call]]) -> list[str]:
    found = []
    usual = Counter(call.contract.op for _, call in present).most_common(1)[0][0]
    for field in Contract._fields:
        by_value: dict[object, list[int]] = {}
        for rank, call in present:
            if field != "op" and call.contract.op != usual:
                continue  # another operation differs in more than its arguments
            by_value.setdefault(getattr(call.contract, field), []).append(rank)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on {short_ranks_phrase(who)}" for value, who in by_value.items())
            found.append(f"{_WORDS[field]} ({values})")
    return found


def message_mismatch(network: Network, source: Message, target: Message) -> CollectiveMismatch:
    """Describe a send and a receive of different dtype or size, or which are not for the same thing."""
    ranks = source.group.ranks
    assert source.sender is not None
    sender, receiver = ranks[source.sender], ranks[target.receiver]
    what = "device" if source.tensor.is_meta != target.tensor.is_meta else "dtype and size"
    rows = _message_rows(source, target)
    told = f"  try: receive into a tensor of the {what} that is sent"
    if strangers(source, target):
        told = (
            "  differs: what it is for; the receiver would take one for the other\n"
            f"  try: one schedule, of as many micro-batches, on all ranks; {_NOT_COMPARED}"
        )
    handled = being_handled(network)
    return handled.chained(
        CollectiveMismatch(
            f"a send from rank {sender} does not fit the recv on rank {receiver} "
            f"(group {source.group.title!r})\n"
            f"{table(rows)}\n"
            f"{handled.lines}"
            f"{told}\n"
            f"  replay: {network.replay}"
        )
    )


def _message_rows(source: Message, target: Message) -> list[tuple[str, ...]]:
    ranks = source.group.ranks
    return [
        (f"rank {ranks[message.member]}", f"{message.who_waits} #{message.seq}", tensor_text(message), message.line)
        for message in sorted([source, target], key=lambda message: ranks[message.member])
    ]


def tensor_text(message: Message) -> str:
    """Dtype and shape of what a message carries, and what it is for."""
    device = " on meta" if message.tensor.is_meta else ""
    purpose = f" for {message.purpose}" if message.purpose else ""
    return f"{str(message.tensor.dtype).removeprefix('torch.')} {list(message.tensor.shape)}{device}{purpose}"


# -- groups of one number that are not of the same ranks everywhere ------------------------------------------------


def group_mismatch(network: Network, *, at_end: bool = False) -> CollectiveMismatch | None:
    """The error for a group on whose members the ranks do not agree, if there is one.

    Args:
        network: Of the ranks.
        at_end: Whether all ranks have come to the end of their function, so that a group may be missing, too.
    """
    made = network.groups_by_rank()
    keys = network.groups_made.differing()
    if at_end and not network.lost:
        keys += [fewest for fewest in made.values() if any(fewest[:2] == m[:2] and fewest < m for m in made.values())]
    if not keys:
        return None
    key = min(keys)
    by_rank = {rank: key < counted for rank, counted in made.items() if counted[:2] == key[:2]}
    return _group_error(network, key, by_rank, at_end)


def _group_error(network: Network, key: Key, made: dict[int, bool], at_end: bool) -> CollectiveMismatch:
    by_members: dict[tuple[int, ...], list[int]] = {}
    asked = {rank: network.groups_made.of(key, rank) for rank, has in made.items() if has}
    for rank, found in asked.items():
        by_members.setdefault(found.members, []).append(rank)
    missing = [rank for rank, has in made.items() if not has] if at_end else []
    parts = [*by_members.values(), *([missing] if missing else [])]
    usual = max(parts, key=len)
    is_clear = [len(ranks) for ranks in parts].count(len(usual)) == 1
    rows: list[tuple[str, ...]] = []
    marked: list[int] = []
    for rank in sorted((*asked, *missing)):
        if is_clear and rank not in usual:
            marked.append(len(rows))
        if rank in missing:
            rows.append((f"rank {rank}", "has not made it", "", ""))
            continue
        found = asked[rank]
        axis = f"axis {found.axis!r}" if found.axis else ""
        rows.append((f"rank {rank}", f"of {short_ranks_phrase(found.members)}", axis, found.line))
    differs = [f"{short_ranks_phrase(m)} on {ranks_phrase(who)}" for m, who in by_members.items()]
    differs += [f"none on {ranks_phrase(missing)}"] if missing else []
    handled = being_handled(network)
    return handled.chained(
        CollectiveMismatch(
            f"the ranks do not agree on the members of the group that they made as number {key[2]}\n"
            f"{table(rows, marked=marked)}\n"
            f"{handled.lines}"
            f"  differs: group ({', '.join(differs)})\n"
            "  try: let every rank make the same groups and meshes, of the same ranks, in the same order\n"
            f"  replay: {network.replay}"
        )
    )


def unequal_steps(network: Network) -> ReplicaMismatch | None:
    """The error for parameters that some of the ranks that share them have stepped, and others never, if there are."""
    found = _stepped_by_some(network)
    if found is None:
        return None
    ranks, stepped = found
    rows = [(f"rank {rank}", "steps" if rank in stepped else "never steps", stepped.get(rank, "")) for rank in ranks]
    return ReplicaMismatch(
        f"an optimizer steps on {ranks_phrase(list(stepped))} alone, and others have shards of its parameters\n"
        f"{table(rows, marked=[place for place, rank in enumerate(ranks) if rank not in stepped])}\n"
        "  try: optimizer.step() on every rank, also where p.grad is None, as it is where a parameter has an owner\n"
        f"  replay: {network.replay}"
    )


def _stepped_by_some(network: Network) -> tuple[tuple[int, ...], dict[int, str]] | None:
    run = {endpoint.rank for endpoint in network.endpoints}  # of a world of stand-ins only some are
    for shared, stepped in network.stepped.items():
        ranks = tuple(rank for rank in shared if rank in run)
        if len(stepped) < len(ranks) and not set(ranks) & set(network.lost):
            return ranks, dict(sorted(stepped.items()))
    return None


class Handled:
    """What the ranks of a world handle now: looked at when an error is built, and never before.

    A rank that raises and communicates on its way out, in a `finally` say, leads to a deadlock or a mismatch, of which
    its own exception is the likely cause.

    Attributes:
        lines: One line for each exception, with who handles it; empty where nobody handles any.
        cause: The one that the fewest ranks handle; None where nobody handles any.
        advice: What to try; empty where nobody handles any, or all ranks handle the same.
    """

    def __init__(self, found: dict[str, tuple[list[int], BaseException]], size: int) -> None:
        none: tuple[list[int], BaseException | None] = ([], None)
        ranks, self.cause = min(found.values(), key=lambda entry: len(entry[0]), default=none)
        self.advice = ""
        if self.cause is not None and not isinstance(self.cause, SimError) and len(set(ranks)) < size:
            self.advice = (
                f"look at the {type(self.cause).__name__} of {ranks_phrase(ranks)} first; what is called in 'finally' "
                "or 'except' has to be called by all ranks"
            )
        shown = [
            f"  {ranks_phrase(ranks)} {'is' if len(set(ranks)) == 1 else 'are'} handling {text}\n"
            for text, (ranks, _) in found.items()
        ]
        more = f"  and {len(shown) - _SHOWN} more exceptions are being handled\n" if len(shown) > _SHOWN else ""
        self.lines = "".join(shown[:_SHOWN]) + more

    def chained(self, error: Error) -> Error:
        """Let `error` have come from the cause."""
        if self.cause is not None:
            error.__cause__ = self.cause
        return error


def being_handled(network: Network) -> Handled:
    """Ask every thread of every rank for the exception in whose `except` or `finally` it is; and who steps.

    Those that never left a library, such as torch's or the simulator's own, are nobody's concern.
    """
    scheduler = network.scheduler
    found: dict[str, tuple[list[int], BaseException]] = {}
    with collector_paused():
        current: dict[int, Any] = sys._current_exceptions()
    for thread in sorted((*scheduler.ranks, *scheduler.helpers), key=lambda thread: thread.rank):
        error = current.get(thread.ident) if not thread.finished else None
        if isinstance(error, tuple):  # Python 3.10 and 3.11: as sys.exc_info() has it
            error = error[1]
        if error is None or isinstance(error, RankStopped):
            continue
        line = raised_at(error)
        if line:
            found.setdefault(f"{said(error)}  {line}", ([], error))[0].append(thread.rank)
    handled = Handled(found, network.world_size)
    if (steps := _stepped_by_some(network)) is not None:
        ranks, stepped = steps
        others = ranks_phrase([rank for rank in ranks if rank not in stepped])
        line = next(iter(stepped.values()))
        handled.lines += f"  {ranks_phrase(list(stepped))} began optimizer.step() at {line}, {others} did not so far\n"
    return handled
