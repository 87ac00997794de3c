"""Agreement of ranks on failures: each passes on its own, and all raise the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hyper_parallel.core.common.errors import HyperParallelError, InvalidType, InvalidValue


class CheckpointError(HyperParallelError, RuntimeError):
    """A checkpoint could not be written, is not there, or is not what was once written."""


class LeaseLostError(CheckpointError):
    """The folder of a run, or the lease that lets the run write there, is not the run's own any more."""


@dataclass(frozen=True)
class Peers:
    """The ranks that save or load together.

    >>> Peers.of(None)  # outside of torch.distributed
    Peers(group=None, rank=0, size=1, global_rank=0)

    Attributes:
        group: a process group; None: the default one, or no other ranks.
        rank: this rank's number in the group.
        size: ranks in the group.
        global_rank: this rank's number in the world.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    global_rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Peers:
        """Return the ranks of a group, of the world, or this one alone where there is no world."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1, 0)
        return cls(group, dist.get_rank(group), dist.get_world_size(group), dist.get_rank())

    @property
    def distributed(self) -> bool:
        """Whether there is a process group to talk through."""
        return dist.is_available() and dist.is_initialized()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; a small object each, pickled between living ranks."""
        if not self.distributed:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, failure: BaseException | None, value: Any = None) -> list[Any]:
        """Return the values of all ranks; if a rank has failed, all raise the same error.

        >>> Peers.of(None).agree(None, "ready")
        ['ready']

        Communication: one all_gather of small objects.

        Args:
            failure: what this rank has run into.
            value: what the others get, if nobody has failed.
        """
        gathered = self.gather((_as_text(failure), value))
        failed = {rank: text for rank, (text, _) in enumerate(gathered) if text is not None}
        if failed:
            raise _raised(failed) from failure
        return [value for _, value in gathered]


def failure_of(failures: Mapping[int, Sequence[Any]]) -> Exception:
    """Return one error for what torch's driver has collected: rank -> (exception, where it was)."""
    return _raised({rank: _as_text(failures[rank][0]) for rank in sorted(failures)})


def _as_text(failure: BaseException | None) -> Any:
    """What is sent of an exception: whether it is the user's mistake, and the text."""
    if failure is None:
        return None
    if isinstance(failure, (ValueError, TypeError, CheckpointError)):
        return type(failure).__name__, str(failure)
    return CheckpointError.__name__, f"{type(failure).__name__}: {failure}"


def _raised(failed: Mapping[int, Any]) -> Exception:
    """Return the error of the lowest rank; it says on which ranks there were others."""
    first = min(failed)
    kind, text = failed[first]
    others = [rank for rank in sorted(failed) if failed[rank] != failed[first]]
    if others:
        text = f"{text}\n  this is of rank {first}; failed, too: " + ", ".join(f"rank {rank}" for rank in others)
    kinds: tuple[type[Exception], ...] = (InvalidValue, InvalidType, ValueError, TypeError, LeaseLostError)
    return {one.__name__: one for one in kinds}.get(kind, CheckpointError)(text)
