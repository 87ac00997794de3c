"""The dtypes and reduce ops of each backend's all_reduce, reduce and reduce_scatter.

gloo and nccl: torch 2.11 to 2.15. hccl: torch_npu 2.11 to 2.14 and CANN 8 and 9 on Atlas A2 and A3. (Ascend 950 also
reduces float64, inside of one node; that is left out here.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from hyper_parallel.core.common.checks import check

__all__ = ["Reductions", "reductions_of"]


@dataclass(frozen=True)
class Reductions:
    """What a backend reduces.

    >>> hccl = reductions_of("hccl")
    >>> hccl.takes(torch.float32), hccl.takes(torch.float64), hccl.takes(torch.bfloat16, "PRODUCT")
    (True, False, False)

    Attributes:
        dtypes: by the name of the `ReduceOp`, such as "SUM"; an op that is missing is refused.
        lacking: by collective, dtypes that it refuses although others take them.
    """

    dtypes: Mapping[str, frozenset[torch.dtype]]
    lacking: Mapping[str, frozenset[torch.dtype]] = field(default_factory=dict)

    def takes(self, dtype: torch.dtype, reduce_op: str = "SUM", collective: str = "all_reduce") -> bool:
        """Tell whether a collective ("all_reduce", "reduce" or "reduce_scatter") reduces a dtype by a reduce op."""
        return dtype in self.dtypes.get(reduce_op, ()) and dtype not in self.lacking.get(collective, ())

    @property
    def widest_float(self) -> torch.dtype:
        """float64 where it can be added up, else float32."""
        return torch.float64 if self.takes(torch.float64) else torch.float32


def _table(names: str, dtypes: frozenset[torch.dtype]) -> dict[str, frozenset[torch.dtype]]:
    return dict.fromkeys(names.split(), dtypes)


_SHORT = frozenset((torch.float16, torch.bfloat16, torch.float32))
_FLOATS = _SHORT | {torch.float64}
_COMPLEX = frozenset((torch.complex64, torch.complex128))  # sent as pairs of real numbers
_BYTES = frozenset((torch.uint8, torch.bool))
_INTS = frozenset((torch.int8, torch.int32, torch.int64))

_ANY = Reductions(
    _table("SUM", _FLOATS | _COMPLEX | _INTS | {torch.int16} | _BYTES)
    | _table("PRODUCT MIN MAX", _FLOATS | _INTS | {torch.int16} | _BYTES)
    | _table("AVG", _FLOATS | _COMPLEX | _INTS | {torch.int16, torch.uint8})
    | _table("BAND BOR BXOR", _INTS | {torch.int16} | _BYTES)
    | _table("PREMUL_SUM", _FLOATS)
)

_BY_BACKEND: Mapping[str, Reductions] = MappingProxyType(
    {
        "gloo": Reductions(
            _table("SUM", _FLOATS | _COMPLEX | _INTS | _BYTES)
            | _table("PRODUCT MIN MAX", _FLOATS | _INTS | _BYTES)
            | _table("AVG", _FLOATS)
            | _table("BAND BOR BXOR", _INTS | _BYTES)
        ),
        "nccl": Reductions(
            _table("SUM", _FLOATS | _COMPLEX | _INTS | _BYTES)
            | _table("PRODUCT MIN MAX", _FLOATS | _INTS | _BYTES)
            | _table("AVG", _FLOATS | _COMPLEX | _INTS | {torch.uint8})
            | _table("PREMUL_SUM", _FLOATS),
            {"reduce_scatter": _COMPLEX},
        ),
        # HCCL itself has SUM, PRODUCT, MIN and MAX. torch_npu adds up and divides for AVG, multiplies first for
        # PREMUL_SUM, and casts bytes to int32 and back, but not for reduce_scatter.
        "hccl": Reductions(
            _table("SUM", _SHORT | {torch.complex64} | _INTS | {torch.int16} | _BYTES)
            | _table("MIN MAX", _SHORT | _INTS | {torch.int16} | _BYTES)
            | _table("PRODUCT", _SHORT - {torch.bfloat16} | _INTS | _BYTES)
            | _table("AVG", _SHORT | {torch.complex64})
            | _table("PREMUL_SUM", _SHORT),
            {"reduce": _COMPLEX, "reduce_scatter": _COMPLEX | _BYTES},
        ),
    }
)


def reductions_of(backend: str) -> Reductions:
    """Return what a backend reduces; of one that is not known here, nothing is ruled out.

    >>> reductions_of("gloo").takes(torch.int16), reductions_of("mine").takes(torch.int16)
    (False, True)

    Args:
        backend: its name in `torch.distributed`, such as "hccl".

    Raises:
        TypeError: no str.
    """
    check("cannot tell what a backend reduces", "str", backend=backend)
    return _BY_BACKEND.get(backend, _ANY)
