"""The memory that a step takes besides what the ranks hold before and after it: its communication buffers.

Up to some number of ranks it is read off what each of them is going to do; beyond, it is bounded from above by what the
busiest one moves. Both are global facts, so all ranks find the same. Contiguous tensors are assumed: others are copied.
"""

from __future__ import annotations

import math

from hyper_parallel.core.redistribute.counting import Counts
from hyper_parallel.core.redistribute.moves import Moves, moves
from hyper_parallel.core.redistribute.steps import Step

_MANY_PAIRS = 2**12  # of a rank with a member of its group: beyond, going through them takes too long
_MANY_RANKS = 256  # likewise


def buffers(step: Step) -> int:
    """Return the most bytes that a rank needs in a step, or in any of its rounds, for buffers."""
    if step.kind == "slice" or step.kind == "all_reduce":
        return 0
    if step.kind == "copy":
        return _scaled(step)
    if len(step.ranks) > _MANY_RANKS or len(step.ranks) * step.group_size > _MANY_PAIRS:
        return step.itemsize * _at_most(step)
    ranks = step.ranks if step.group_axes is None else step.before.ranks
    # In the first round all pieces are as large as in any.
    return step.itemsize * max(_of_one(step, moves(step, rank)) for rank in ranks)


def _scaled(step: Step) -> int:
    """Return the bytes of the copies that are multiplied and divided before the result is made of them."""
    fill = step.fill
    assert fill is not None, "a copy says how it fills"
    return ((fill.times != 1) + (fill.over != 1)) * _most(step.before.holding.counts()) * step.itemsize


def _of_one(step: Step, work: Moves) -> int:
    """Return the elements in the buffers of one rank, by the order in which they come and go; see `execute`."""
    packed = 0 if work.pack is None else sum(work.sends)
    arrived, result = sum(work.receives), math.prod(work.need)
    if step.kind == "all_gather" and work.even:
        return 0 if work.unpack is None else arrived
    if work.copies > 1 and work.copies == len(work.group) and step.rounds == 1:
        return packed + arrived
    if step.rounds > 1:
        return max(packed + arrived, arrived + (work.copies + 1) * result if work.copies > 1 else 0)
    if work.copies > 1:
        return max(packed + arrived - result, arrived + work.copies * result)
    return packed if work.unpack is None else max(packed + arrived - result, arrived)


# -- from above ------------------------------------------------------------------------------------------------------


def _at_most(step: Step) -> int:
    """Return a number of elements that no rank's buffers exceed."""
    need, have = _most(step.after.holding.counts()), _most(step.before.holding.counts())
    received = _most(step.recv_bytes) // step.itemsize
    sent = min(_most(step.estimated_send_bytes) // step.itemsize + _uncut(step, have), have * step.group_size)
    copies = math.prod(step.before.holding.sizes[axis] for axis in step.reduces)
    if copies > 1:
        return _reducing(step, copies, have, need, sent, received)
    if step.rounds > 1:
        return min(sent, sent // step.rounds + _uncut(step, sent)) + min(
            received, received // step.rounds + _uncut(step, received)
        )
    return max(need, sent + max(received, min(need, have)))


def _reducing(step: Step, copies: int, have: int, need: int, sent: int, received: int) -> int:
    """Return the like for a step that reduces: in rounds, what is needed is cut, and all copies of it come together."""
    if step.rounds > 1:
        need = min(need, need // step.rounds + _uncut(step, need, 1))
        sent, received = min(sent, step.group_size * need), min(received, copies * need)
        return max(received + sent + need, received + (copies + 1) * need)
    return copies * need + max(have, sent, received)


def _uncut(step: Step, total: int, pieces: int = 0) -> int:
    """Return how many elements more than its share a round may have, or an owner give, of some number of elements.

    A piece is cut along one dim, with up to one row more than the share. Of d dims the longest is cut, so that a row of
    a piece of v elements has v ** (1 - 1 / d) of them, which sum up to most where all pieces are alike.
    """
    number, dims = pieces or step.group_size, len(step.after.holding.shape)
    return math.ceil(number * (total / number) ** (1 - 1 / dims))


def _most(counts: Counts | None) -> int:
    return 0 if counts is None else int(counts.max(initial=0))
