"""What a training run is made of: five plain dataclasses.

`config_file.load_config` reads them from a TOML file; `hyper-parallel train` changes single keys by flags.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.models.llama import LlamaConfig


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from.

    Args:
        path: a folder or a file; None means the source files of the installed Python standard library.
        pattern: which files of the folder.
        max_bytes: stop reading after this many bytes.
    """

    path: str | None = None
    pattern: str = "*.py"
    max_bytes: int = 4_000_000

    def __post_init__(self) -> None:
        _at_least("data", self, 1, "max_bytes")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate over time.

    Args:
        lr: highest learning rate, reached after the warmup.
        warmup_steps: steps over which the rate grows linearly.
        schedule: "cosine" or "linear" decay to `min_lr_ratio * lr` at the last step, or "constant".
        min_lr_ratio: last rate as a part of `lr`.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        weight_decay: of the matrices; norms have none.
        max_grad_norm: gradients are scaled down to this norm over all parameters; 0 turns it off.
    """

    lr: float = 3e-3
    warmup_steps: int = 10
    schedule: str = "cosine"
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        _at_least("optimizer", self, 0, "lr", "warmup_steps", "min_lr_ratio", "weight_decay", "max_grad_norm")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise ValueError(
                f"optimizer.schedule='{self.schedule}' is not known\n  try: 'cosine', 'linear' or 'constant'"
            )


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at once, and where to.

    Args:
        steps: optimizer steps.
        batch_size: sequences per step over all ranks together.
        seq_len: tokens per sequence.
        accumulate: each rank cuts its sequences into this many backward passes per step.
        seed: of the weights and of the order of the text.
        device: "cpu", "cuda", "npu"; None takes the platform's default.
        eval_every: steps between validations; 0 means only after the last step.
        eval_sequences: sequences per validation over all ranks together.
        log: JSONL file that the first rank writes as it goes; None writes none.
        memory_limit_gb: refuse to start when the estimate is above this (GiB); None takes what the machine has free.
    """

    steps: int = 100
    batch_size: int = 16
    seq_len: int = 128
    accumulate: int = 1
    seed: int = 0
    device: str | None = None
    eval_every: int = 0
    eval_sequences: int = 32
    log: str | None = None
    memory_limit_gb: float | None = None

    def __post_init__(self) -> None:
        _at_least("train", self, 1, "steps", "batch_size", "seq_len", "accumulate", "eval_sequences")
        _at_least("train", self, 0, "seed", "eval_every")
        if self.memory_limit_gb is not None:
            _at_least("train", self, 0, "memory_limit_gb")


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks are arranged; see `ParallelDims` for the degrees.

    Args:
        dp_replicate: ranks that hold copies of the same shards.
        dp_shard: ranks that each weight is split over; None is inferred from the number of ranks.
        cp: context-parallel degree.
        tp: tensor-parallel degree.
        pp: pipeline degree.
        ep: expert-parallel degree.
        reshard_after_forward: free gathered weights after forward and gather them again for backward.
        param_dtype: "fp32", or "bf16" to compute in bf16 with fp32 weights behind it.
    """

    dp_replicate: int = 1
    dp_shard: int | None = None
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    reshard_after_forward: bool = True
    param_dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.param_dtype not in ("fp32", "bf16"):
            raise ValueError(f"parallel.param_dtype='{self.param_dtype}' is not known\n  try: 'fp32' or 'bf16'")


@dataclass(frozen=True)
class Config:
    """A whole run. `Config()` trains a small model on the Python standard library, for as many ranks as there are.

    >>> Config(train=TrainConfig(steps=20)).train.batch_size
    16
    """

    model: LlamaConfig = field(default_factory=LlamaConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def with_changes(self, section: str, changes: Mapping[str, Any]) -> Config:
        """Return a copy in which keys of one section have new values.

        >>> Config().with_changes("train", {"steps": 20}).train.steps
        20

        Args:
            section: name of the section.
            changes: new values by key; None leaves the key as it is.

        Raises:
            ValueError: a value that the section refuses.
        """
        given = {key: value for key, value in changes.items() if value is not None}
        return dataclasses.replace(self, **{section: dataclasses.replace(getattr(self, section), **given)})

    def llama(self) -> LlamaConfig:
        """Return the model's shape, with rotary tables long enough for `train.seq_len`."""
        return dataclasses.replace(self.model, max_seq_len=max(self.model.max_seq_len, self.train.seq_len))

    def check_batch(self, dp_size: int) -> None:
        """Check that the global batch splits over the data-parallel ranks and the backward passes.

        Args:
            dp_size: dp_replicate * dp_shard.

        Raises:
            ValueError: it does not; the message lists sizes that do.
        """
        size, accumulate = self.train.batch_size, self.train.accumulate
        unit = dp_size * accumulate
        if size % unit:
            around = sorted({max(size // unit, 1) * unit, (size // unit + 1) * unit})
            raise ValueError(
                f"cannot split batch_size={size} sequences over {dp_size} data-parallel ranks "
                f"x accumulate={accumulate} evenly\n  try: batch_size = {' or '.join(map(str, around))}"
            )


def _at_least(section: str, values: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(values, name)
        if not (value >= least and math.isfinite(value)):
            raise ValueError(f"{section}.{name} must be a number >= {least}, got {value}")
