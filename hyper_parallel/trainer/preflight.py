"""What can be known to be wrong before any rank starts: degrees, batch, text, log file, memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.data import check_length, load_corpus
from hyper_parallel.trainer.parallel_dims import ParallelDims

GB = 2**30


def plan_run(config: Config, world_size: int) -> ParallelDims:
    """Check what a run asks for against the number of ranks, and return its degrees.

    >>> plan_run(Config(), world_size=8).dp_shard
    8

    Args:
        config: the run.
        world_size: number of ranks.

    Raises:
        ValueError: degrees that do not fit the ranks, an axis that this trainer cannot use, a batch that does not
            split, a vocabulary that is too small for bytes.
    """
    dims = ParallelDims.from_config(config.parallel, world_size)
    others = {name: getattr(dims, name) for name in ("cp", "tp", "pp", "ep") if getattr(dims, name) > 1}
    if others:
        asked = ", ".join(f"{name}={degree}" for name, degree in others.items())
        raise ValueError(
            f"cannot train with {asked}: this trainer splits the data-parallel axes only\n"
            f"  {dims.summary()}\n  try: {' and '.join(f'{name}=1' for name in others)}, with a larger dp_shard"
        )
    config.check_batch(dims.dp_size)
    if config.model.vocab_size < 256:
        raise ValueError(f"model.vocab_size={config.model.vocab_size} cannot hold the 256 byte values of the text")
    return dims


def check_machine(config: Config, dims: ParallelDims, local_ranks: int, on_host: bool) -> None:
    """Check that the text, the log file and the memory are there, on the machine where the ranks will run.

    Args:
        config: the run.
        dims: its degrees.
        local_ranks: ranks that share this machine.
        on_host: whether the ranks compute in the host's memory; a device's memory is not looked at.

    Raises:
        ValueError: text is missing or too short, the log cannot be written, or the run needs more memory than there is.
    """
    corpus = load_corpus(config.data.path, config.data.pattern, config.data.max_bytes)
    check_length(corpus.train, config.train.seq_len, "training")
    check_length(corpus.valid, config.train.seq_len, "validation")
    if config.train.log is not None:
        _check_log(Path(config.train.log))
    if on_host:
        check_memory(config, dims, local_ranks)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one rank needs, by what they are for.

    Args:
        building: whole fp32 weights, while every rank builds the model before it keeps its shard.
        state: shards of weights, gradients and two AdamW moments, 16 bytes per parameter.
        activations: what a backward pass keeps of its forward.
    """

    building: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        """The sum; the parts do overlap in time, because gathered weights take the place of the whole ones."""
        return self.building + self.state + self.activations


def estimate_memory(config: Config, dims: ParallelDims) -> MemoryEstimate:
    """Estimate what one rank needs, to about a factor of two.

    Per token and block a backward pass keeps about 14 vectors of hidden_size and 5 of intermediate_size, plus three
    rows of logits; counted from the operations in `models/llama.py`, at 4 bytes each.

    Args:
        config: the run.
        dims: its degrees.
    """
    model, train = config.llama(), config.train
    parameters = model.num_parameters()
    tokens = train.batch_size * train.seq_len // (dims.dp_size * train.accumulate)
    per_token = model.num_hidden_layers * (14 * model.hidden_size + 5 * model.intermediate_size) + 3 * model.vocab_size
    return MemoryEstimate(
        building=4 * parameters, state=-(-16 * parameters // dims.dp_shard), activations=4 * tokens * per_token
    )


def check_memory(config: Config, dims: ParallelDims, local_ranks: int) -> None:
    """Raise ValueError when the ranks of this machine need more memory than the limit, or than is free."""
    limit, what = available_memory(), "free on this machine"
    if config.train.memory_limit_gb is not None:
        limit, what = int(config.train.memory_limit_gb * GB), "allowed by memory_limit_gb"
    one = estimate_memory(config, dims)
    if limit is not None and one.total * local_ranks > limit:
        parameters = config.llama().num_parameters()
        raise ValueError(
            f"this run needs about {_size(one.total * local_ranks)}, but {_size(limit)} are {what}\n"
            f"  {parameters:,} parameters on {local_ranks} rank(s) in this machine, each with {_size(one.building)} "
            f"whole weights, {_size(one.state)} shards with gradients and AdamW state, "
            f"{_size(one.activations)} activations\n"
            "  try: fewer ranks, a smaller [model] hidden_size or num_hidden_layers, a smaller batch_size or seq_len"
        )


def available_memory() -> int | None:
    """Return the bytes this process may still take, or None where the system does not say."""
    found = [amount for amount in (_free_by_meminfo(), _free_by_cgroup()) if amount is not None]
    if found:
        return min(found)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not a POSIX system, or one that does not tell
        return None


def _free_by_meminfo() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_by_cgroup() -> int | None:
    """What a container's limit leaves (cgroup v2)."""
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _size(amount: int) -> str:
    return f"{amount / GB:,.1f} GiB" if amount >= GB else f"{amount / 2**20:,.1f} MiB"


def _check_log(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"cannot write the log '{path}': it is a folder\n  try: --log-file {path / 'train.jsonl'}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"cannot write the log '{path}': no permission to write in '{folder}'")
