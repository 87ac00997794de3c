"""What a unit of sharded parameters may be told about dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["MixedPrecisionPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit's computation; the sharded parameters themselves keep the dtype they were made in.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).param_dtype
    torch.bfloat16

    Args:
        param_dtype: Parameters are gathered, and forward and backward computed, in this dtype. None: their own.
        reduce_dtype: Gradients are reduced, and gradients that wait for a reduction kept, in this dtype. None:
            reduced in the dtype of the computation, kept in at least fp32.
        output_dtype: Floating-point outputs of the unit's forward are cast to this dtype. None: left alone.
        cast_forward_inputs: Cast floating-point inputs of the unit's forward to ``param_dtype``.

    Raises:
        TypeError: A dtype that is no floating-point ``torch.dtype``, or a flag that is no bool.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise TypeError(
                    f"MixedPrecisionPolicy cannot use {value!r} as {name}\n"
                    "  expected: a floating-point torch.dtype, or None\n"
                    f"  try: {name}=torch.bfloat16"
                )
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                f"MixedPrecisionPolicy cannot use {self.cast_forward_inputs!r} as cast_forward_inputs\n"
                "  expected: a bool\n"
                "  try: cast_forward_inputs=True"
            )
