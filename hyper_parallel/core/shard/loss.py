"""Cross entropy of logits split over the vocabulary, without gathering them.

For the logits z of a row and its target t, over the ranks that hold parts of z:

    m = max z        s = sum exp(z - m)        loss = log s - (z_t - m)        gradient = exp(z - m) / s - onehot(t)

as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3), which communicates only a few numbers per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hyper_parallel.core.common.checks import check, check_choice, read_int
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.common.torch_compat import runs_eagerly
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.entry_exit import enter, leave, local_redistributed

_ASKED = "cannot take the cross entropy"
_REDUCTIONS = ("mean", "sum", "none")


@runs_eagerly
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross entropy of logits in any layout.

        loss = vocab_parallel_cross_entropy(logits, targets)  # logits: ("dp", "None", "tp")

    >>> logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    >>> vocab_parallel_cross_entropy(logits, torch.tensor([0, 2]), reduction="none")
    tensor([0.4076, 1.0986])

    The values equal `torch.nn.functional.cross_entropy` on a single device, with the classes in the last dim. They are
    computed and returned in float32, or in float64 for float64 logits. A target that is no class makes its loss NaN,
    because no other rank would know that it is invalid.

    Memory for backward: the logits themselves and two numbers per row. Forward: over the axes that split the vocabulary
    one max and one sum of two numbers per row (three with label smoothing); for a mean, also one sum of two numbers
    over the axes that split the rows. Pending logits are reduce-scattered over the vocabulary. Backward: no
    communication, except for logits that were pending.

    Args:
        logits: a DTensor of shape (..., vocab) in any layout, also uneven; or a plain tensor.
        targets: class indices of shape (...): a DTensor in any layout; or a plain tensor of all rows, equal on every
            rank, or of this rank's rows.
        reduction: "mean" over the rows that are not ignored, "sum" or "none".
        ignore_index: the target of rows without a loss.
        label_smoothing: share of the target's weight that is spread evenly over all classes, from 0 to 1.

    Returns:
        For "mean", a replicated DTensor without dims. For "sum", a DTensor without dims that is pending over the axes
        that split the rows. For "none", a DTensor of shape (...), split as the rows. For plain logits, a plain
        tensor.

    Raises:
        TypeError: logits or targets of another dtype.
        ValueError: shapes that do not match; an unknown reduction or a smoothing outside of 0 to 1.
    """
    index = _check_options(reduction, ignore_index, label_smoothing)
    _check_tensors(logits, targets)
    terms = _Terms(index, float(label_smoothing), logits.shape[-1])
    if not isinstance(logits, DTensor):
        own = _checked_shape(targets, logits.shape[:-1], logits).to(torch.int64)
        rows = _RowLosses.apply(logits, own, terms, None)
        if reduction == "mean":
            return cast(torch.Tensor, _Mean.apply(rows.sum(), (targets != index).sum(), None))
        return cast(torch.Tensor, rows.sum() if reduction == "sum" else rows)
    where = Logits.of(logits)
    own = _rows_of(targets, where, logits)
    rows = _RowLosses.apply(enter(logits, where.logits, where.logits), own, terms, where)
    if reduction == "none":
        return leave(rows, where.rows(), where.shape[:-1])
    over = dict.fromkeys(where.split_rows, "sum")
    if reduction == "sum":
        return leave(rows.sum(), where.base(partial=over), ())
    return leave(_Mean.apply(rows.sum(), (own != index).sum(), where), where.base(), ())


@dataclass(frozen=True)
class _Terms:
    """Parameters of a loss, apart from tensors.

    Attributes:
        ignore_index: the target of rows without a loss.
        smoothing: share of the weight that is spread evenly over all classes.
        classes: the size of the vocabulary.
    """

    ignore_index: int
    smoothing: float
    classes: int


@dataclass(frozen=True)
class Logits:
    """The layout of logits.

    Attributes:
        base: the mesh.
        logits: their layout, without pending reductions.
        shape: their full sizes.
        split_classes: the axes that split the vocabulary.
        split_rows: the axes that split rows.
        first: the first class on this rank.
    """

    base: Layout
    logits: Layout
    shape: torch.Size
    split_classes: tuple[str, ...]
    split_rows: tuple[str, ...]
    first: int

    @classmethod
    def of(cls, logits: DTensor) -> Logits:
        """Return the target layout of logits: their own, with pending axes splitting the vocabulary."""
        layout, shape = Layout.of(logits), logits.shape
        base = Layout.from_device_mesh(logits.device_mesh)
        chains = [tuple(layout.alias_name[axis] for axis in chain) for chain in layout.splits(len(shape))]
        chains[-1] += tuple(layout.partial)
        there = base(*(chain or None for chain in chains))
        rank = dist.get_rank()
        first = there.local_slice(shape, rank)[-1].start if rank in there.rank_list else 0
        return cls(base, there, shape, chains[-1], tuple(name for chain in chains[:-1] for name in chain), first)

    def rows(self, lead: int = 0, partial: dict[str, str] | None = None) -> Layout:
        """Return the layout of numbers per row, behind `lead` dims that are not split."""
        entries = self.logits.alias_placements or ()
        return self.base(*[None] * lead, *entries[:-1], partial=partial)

    def over_classes(self, rows: torch.Tensor, kind: str) -> torch.Tensor:
        """Reduce numbers per row over the parts of the vocabulary; a leading dim may stack several kinds of numbers."""
        if not self.split_classes:
            return rows
        lead = rows.dim() - len(self.shape) + 1
        shape = torch.Size([*rows.shape[:lead], *self.shape[:-1]])
        return local_redistributed(
            rows, self.rows(lead, dict.fromkeys(self.split_classes, kind)), self.rows(lead), shape
        )

    def over_rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum numbers, which are this rank's sums over its rows, over all rows."""
        if not self.split_rows:
            return numbers
        pending = self.base(partial=dict.fromkeys(self.split_rows, "sum"))
        return local_redistributed(numbers, pending, self.base(), numbers.shape)


class _RowLosses(torch.autograd.Function):
    """One loss per row, computed from this rank's part of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, terms: _Terms, where: Logits | None
    ) -> torch.Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        top = _greatest(logits).to(wide)
        top = top if where is None else where.over_classes(top, "max")
        shifted = logits - top.unsqueeze(-1)
        ctx.first = 0 if where is None else where.first
        place, mine = target_places(targets, ctx.first, logits.shape[-1])
        sums = [torch.zeros_like(top), _at(shifted, place, mine)]
        if terms.smoothing:
            sums.append(shifted.sum(-1))
        sums[0] = shifted.exp_().sum(-1)
        both = torch.stack(sums)
        both = both if where is None else where.over_classes(both, "sum")
        spread = both[0].log()
        losses = spread - both[1]
        if terms.smoothing:
            losses = losses * (1 - terms.smoothing) + (spread - both[2] / terms.classes) * terms.smoothing
        is_class = (targets >= 0) & (targets < terms.classes)
        losses = torch.where(is_class, losses, torch.nan)
        ctx.terms = terms
        ctx.save_for_backward(logits, targets, top, spread)
        return torch.where(targets == terms.ignore_index, torch.zeros_like(losses), losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, targets, top, spread = ctx.saved_tensors
        terms: _Terms = ctx.terms
        result = (logits - top.unsqueeze(-1)).sub_(spread.unsqueeze(-1)).exp_()  # one by one, or digits are lost
        if terms.smoothing:
            result.sub_(terms.smoothing / terms.classes)
        if logits.shape[-1]:
            place, mine = target_places(targets, ctx.first, logits.shape[-1])
            at_target = result.gather(-1, place) - mine.unsqueeze(-1).to(result.dtype) * (1 - terms.smoothing)
            result.scatter_(-1, place, at_target)
        result.mul_(torch.where(targets == terms.ignore_index, torch.zeros_like(grad), grad).unsqueeze(-1))
        return result.to(logits.dtype), None, None, None


class _Mean(torch.autograd.Function):
    """The mean over the rows of all ranks, computed from each rank's sum and number of rows."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor, where: Logits | None) -> torch.Tensor:
        both = torch.stack([total, count.to(total.dtype)])
        both = both if where is None else where.over_rows(both)
        ctx.save_for_backward(both[1])
        return both[0] / both[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad / ctx.saved_tensors[0], None, None


def _greatest(logits: torch.Tensor) -> torch.Tensor:
    """Return the maximum of each row; -inf on a rank without classes."""
    return logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)


def target_places(targets: torch.Tensor, first: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets' indices in a part of the vocabulary, as (..., 1), and a mask of the targets in it."""
    place = targets - first
    mine = (place >= 0) & (place < classes)
    return place.masked_fill(~mine, 0).unsqueeze(-1), mine


def _at(rows: torch.Tensor, place: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Return the numbers at some places of a part of the vocabulary, 0 for targets outside of it."""
    if not rows.shape[-1]:
        return rows.sum(-1)
    found = rows.gather(-1, place).squeeze(-1)
    return torch.where(mine, found, torch.zeros_like(found))


# -- arguments -------------------------------------------------------------------------------------------------------


def _rows_of(targets: torch.Tensor, where: Logits, logits: DTensor) -> torch.Tensor:
    """Return the targets of this rank's rows."""
    rows, layout = where.shape[:-1], where.rows()
    if isinstance(targets, DTensor):
        return enter(cast(DTensor, _checked_shape(targets, rows, logits)), layout).to(torch.int64)
    rank = dist.get_rank()
    if rank in layout.rank_list and targets.shape == rows:
        targets = targets[layout.local_slice(rows, rank)]
    elif rank in layout.rank_list:
        _checked_shape(targets, rows, logits, layout.local_shape(rows, rank))
    return targets.to(torch.int64)


def _checked_shape(
    targets: torch.Tensor, rows: torch.Size, logits: torch.Tensor, part: tuple[int, ...] | None = None
) -> torch.Tensor:
    if targets.shape == (rows if part is None else part):
        return targets
    blame = f"targets has shape {tuple(targets.shape)}, and the logits have {tuple(rows)} rows"
    hint = f"targets of shape {tuple(rows)}"
    if part is not None and part != tuple(rows):
        blame, hint = f"{blame}, {part} of them on this rank", f"{hint}, or {part}, this rank's"
    raise InvalidValue(_ASKED, blame, f"logits: shape {tuple(logits.shape)}, classes in the last dim", hint)


def _check_tensors(logits: torch.Tensor, targets: torch.Tensor) -> None:
    seen = f"logits: {logits.dtype} {tuple(logits.shape)}   targets: {targets.dtype} {tuple(targets.shape)}"
    if not logits.is_floating_point() or not logits.dim():
        blame = "logits are no floats" if logits.dim() else "logits have no dim of classes"
        raise InvalidType(_ASKED, blame, seen, "floats of shape (..., vocab)")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise InvalidType(_ASKED, "targets are no class indices", seen, "targets.long()")
    if isinstance(targets, DTensor) and not isinstance(logits, DTensor):
        blame = "targets is a DTensor, and logits are a plain tensor"
        raise InvalidType(_ASKED, blame, seen, "both as DTensors, or full_tensor(targets)")


def _check_options(reduction: object, ignore_index: Any, label_smoothing: Any) -> int:
    index = read_int(_ASKED, "ignore_index", ignore_index)
    check(_ASKED, "float", label_smoothing=label_smoothing)  # refuses True, which would be 1.0 and learn nothing
    check_choice(_ASKED, "reduction", reduction, _REDUCTIONS)
    seen = f"reduction: {reduction!r}   ignore_index: {ignore_index!r}   label_smoothing: {label_smoothing!r}"
    if not 0 <= label_smoothing <= 1:
        raise InvalidValue(_ASKED, "label_smoothing is not from 0 to 1", seen, "label_smoothing=0.1")
    return index
