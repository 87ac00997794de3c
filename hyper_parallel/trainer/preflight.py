"""Checks before any rank starts: degrees, batch, precision, text, log file, memory."""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch

from hyper_parallel.core.activations import ActivationPolicy
from hyper_parallel.core.common.errors import InvalidValue, readable_bytes
from hyper_parallel.core.context_parallel.api import split_over
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.split import split_layers, stages_of_rank
from hyper_parallel.models.llama import Llama
from hyper_parallel.models.lora import ALL, check_targets
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.platform import Platform
from hyper_parallel.platform.cpu import available_memory
from hyper_parallel.trainer.config import CheckpointConfig, Config
from hyper_parallel.trainer.data import Corpus, check_length, load_corpus, windows_that_count
from hyper_parallel.trainer.metrics import least_kept
from hyper_parallel.trainer.report import check_tensorboard
from hyper_parallel.trainer.saving import run_to_go_on_from


def plan_run(config: Config, world_size: int) -> ParallelDims:
    """Check what a run asks for against the number of ranks, and return its degrees.

    >>> plan_run(Config(), world_size=8).dp_shard
    8

    Raises:
        ValueError: degrees that do not fit the ranks, each other or the model; a batch, a sequence or layers that do
            not split; a vocabulary that is too small for bytes.
    """
    dims = ParallelDims.from_config(config.parallel, world_size)
    if not config.is_other:
        dims.validate_against_model(SimpleNamespace(config=config.shape()), config.batch_shape[1])
    config.check_batch(dims.batch_ranks)
    if config.data.tokenizer is None and config.shape().vocab_size < 256:
        asked, seen = "cannot read the text", f"model.vocab_size: {config.shape().vocab_size}"
        raise InvalidValue(asked, "its 256 byte values need a vocab_size of 256", seen, "vocab_size=256")
    _check_experts(config, dims)
    check_sequence(config.train.seq_len, dims)
    _check_pipeline(config, dims)
    check_engine(config, dims)
    _check_saving(config.checkpoint)
    return dims


def _check_experts(config: Config, dims: ParallelDims) -> None:
    if dims.etp not in (1, dims.tp):
        blame, hint = "inside of an expert all ranks of tp split, or none", f"etp={dims.tp} or " * dims.tp_enabled
        raise InvalidValue(f"cannot use etp={dims.etp} with tp={dims.tp}", blame, dims.summary(), f"{hint}etp=1")
    if (dims.ep_enabled or dims.fold_experts) and config.train.model != "moe":
        asked, less = f"cannot split experts over ep={dims.ep}", f"ep=1 with dp_shard={dims.dp_shard * dims.ep}"
        if dims.ep == 1:
            asked, less = "cannot fold experts", "fold_experts=False"
        blame = f"model '{config.train.model}' has none"
        raise InvalidValue(asked, blame, dims.summary(), f"{less}, or model 'moe'")
    config.parallel.check_nodes("cannot send tokens to each node once", dims)
    width = config.experts.expert_intermediate_size
    if config.train.model == "moe" and dims.etp > 1 and width % dims.etp:
        asked = f"cannot split experts of expert_intermediate_size={width} over etp={dims.etp}"
        hint = f"expert_intermediate_size={-(-width // dims.etp) * dims.etp}, or etp=1"
        raise InvalidValue(asked, "it does not divide", dims.summary(), hint)


def check_sequence(seq_len: int, dims: ParallelDims) -> None:
    """Raise ValueError for sequences that do not split over the ranks along cp and tp."""
    multiple = split_over(dims.cp, dims.ulysses_degree, balance=True).multiple * dims.tp if dims.cp_enabled else 1
    if seq_len % multiple:
        around = sorted({max(seq_len // multiple, 1) * multiple, -(-seq_len // multiple) * multiple})
        asked = f"cannot split sequences of seq_len={seq_len} over cp={dims.cp} and tp={dims.tp}"
        blame = f"every rank of a ring has an early and a late part, so that it must be a multiple of {multiple}"
        raise InvalidValue(asked, blame, dims.summary(), f"seq_len = {' or '.join(map(str, around))}")


def _check_pipeline(config: Config, dims: ParallelDims) -> None:
    parallel, kind = config.parallel, config.parallel.pipeline
    stages = dims.pp * parallel.stages_each
    if not dims.pp_enabled:
        if parallel.layers_per_stage is not None:
            asked, blame = f"cannot use layers_per_stage='{parallel.layers_per_stage}'", "there is no pipeline"
            raise InvalidValue(asked, blame, dims.summary(), f"pp={len(parallel.layers_per_stage.split(','))}")
        return
    if parallel.reduce_each:
        asked, blame = "cannot reduce gradients in each micro-batch", "a pipeline reduces those of all of them at once"
        raise InvalidValue(asked, blame, dims.summary(), "reduce_each=False")
    parallel.check_blocks()
    assert kind.torch_class, "raises where this torch lacks it"
    try:
        kind.check_micro_batches(config.micro_batches, dims.pp, stages)
    except ValueError as error:  # it speaks of its own argument
        raise InvalidValue(str(error).replace("micro_batches", "accumulate")) from None
    try:
        parts = split_layers(config.model.num_hidden_layers, stages, sizes=parallel.stage_sizes())
    except ValueError as error:  # likewise
        text = re.sub(r"sizes=\[([\d, .]+)\]", lambda its: f"layers_per_stage='{its[1].replace(' ', '')}'", str(error))
        raise InvalidValue(text) from None
    for rank in range(dims.pp):
        mine = stages_of_rank(kind.name, rank, dims.pp, parallel.stages_each)
        if not any(parts[stage] or stage in (0, stages - 1) for stage in mine):
            asked, blame = "cannot split the layers over stages", f"rank {rank} of the pipeline would have nothing"
            seen = f"layers_per_stage='{parallel.layers_per_stage}'   its stages, from 0: {', '.join(map(str, mine))}"
            raise InvalidValue(asked, blame, seen, "a layer for one of these stages, or a smaller pp")


def check_engine(config: Config, dims: ParallelDims) -> None:
    """Raise ValueError for what the engine of a run of these degrees, or the optimizer behind it, cannot do."""
    parallel = config.parallel
    lacks = [] if config.optimizer.muon else ["--muon"]
    lacks += [] if parallel.engine == "fully_shard" else ["--engine fully_shard"]
    if parallel.whole_parameters and lacks:
        blame = "it is for fully_shard and Muon: all else works on shards, which use all links and balance memory"
        seen = f"engine: '{parallel.engine}'   muon: {config.optimizer.muon}"
        raise InvalidValue("cannot leave parameters whole with one rank", blame, seen, " ".join(lacks))
    precision = config.precision
    if config.optimizer.muon and precision.dtype("moments") != precision.dtype("master"):
        blame = "Muon keeps its momentum in the dtype of the weights"
        seen = f"moments_dtype: '{precision.moments_dtype}'   muon: True"
        raise InvalidValue("cannot store the optimizer's state", blame, seen, "leave out moments_dtype, or muon")
    if parallel.engine != "hsdp":
        return
    others = [f"{name}={degree}" for name in ("tp", "pp", "ep") if (degree := getattr(dims, name)) > 1]
    if precision.policy() is not None:
        others.append(f"param_dtype='{precision.param_dtype}'")
    if dims.fold_experts and dims.expert_ranks > 1:
        others.append("fold_experts=True")
    if others:
        blame = "it splits parameters over all ranks, in the dtype they have"
        asked = f"cannot train with engine 'hsdp' and {', '.join(others)}"
        raise InvalidValue(asked, blame, dims.summary(), "engine 'fully_shard'")


def _check_saving(keep: CheckpointConfig) -> None:
    if keep.folder is None and (keep.every or keep.background):
        asked = f"cannot save every {keep.every} steps" if keep.every else "cannot save in the background"
        seen = f"checkpoint.folder: None   every: {keep.every}   background: {keep.background}"
        raise InvalidValue(asked, "no folder is given", seen, "--checkpoint-dir out/run")
    if keep.resume_step is not None and (keep.folder is None or not keep.resume):
        blame = "no folder is given" if keep.folder is None else "it is to start anew"
        seen = f"checkpoint.folder={keep.folder!r}   resume={keep.resume}   resume_step={keep.resume_step}"
        lacks = ["--checkpoint-dir with the folder that has the step"] if keep.folder is None else []
        hint = ", and ".join(lacks if keep.resume else [*lacks, "--resume"])
        raise InvalidValue(f"cannot go back to step {keep.resume_step}", blame, seen, hint)


def check_lora(config: Config) -> None:
    """Raise ValueError for adapters without weights to start from, or with targets that the model does not have."""
    if not config.lora.is_on and config.lora.targets == ALL:
        return
    if config.is_other:
        return  # once it is there
    if config.lora.is_on and config.weights is None:
        blame, hint = "the weights that they stand beside would be random", "--start-from FOLDER"
        seen = f"lora.rank: {config.lora.rank}   train.start_from: None"
        raise InvalidValue("cannot train adapters alone", blame, seen, hint)
    shape = config.shape()
    with torch.device("meta"):
        check_targets(MoELlama(shape) if isinstance(shape, MoEConfig) else Llama(shape), config.lora)


def check_given(config: Config, dims: ParallelDims, *, is_split: bool = False) -> None:
    """Check that a run of a model that the caller makes asks for nothing that only the trainer's own models can do.

    Args:
        config, dims: the run, and its degrees.
        is_split: whether something splits the model over tp.

    Raises:
        ValueError: degrees beside those of data parallelism, or what changes a model's code, or weights to start from.
    """
    asked = "cannot train a model of your own"
    degrees = ("cp", "pp", "ep") if is_split else ("tp", "cp", "pp", "ep")
    others = [f"{name}={degree}" for name in degrees if (degree := getattr(dims, name)) > 1]
    if others:
        blame = f"it is split by data {'and tensor ' * is_split}parallelism only"
        hint = "dp_shard and dp_replicate, or [model] without model="
        raise InvalidValue(asked, blame, f"degrees: {', '.join(others)}", hint)
    changes = {
        "engine": config.parallel.engine != "fully_shard",
        "checkpointing": not config.parallel.activations.is_none,
        "compile": config.parallel.fuses,
        "start_from": config.weights is not None,
        "lora": config.lora.is_on and not config.is_other,
    }
    if wrong := [name for name, is_asked in changes.items() if is_asked]:
        hint = "leave it out: what model() returns has its weights, and may checkpoint its blocks and be compiled"
        raise InvalidValue(asked, f"{wrong[0]} is for [model]", f"set: {', '.join(wrong)}", hint)


def check_platform(config: Config, platform: Platform) -> None:
    """Check that the device can do what the run asks for: add up gradients in the weights' dtype, and record memory.

    Raises:
        ValueError: `param_dtype` is "fp64", and the backend reduces no float64, as hccl of NPUs; `memory_snapshot`
            where no allocator counts tensors, as on the CPU.
    """
    if config.train.memory_snapshot and not platform.has_streams:
        asked, blame = "cannot write memory snapshots", f"on {platform.device_type} no allocator counts tensors"
        seen = f"memory_snapshot: True   device: {platform.device_type}"
        hint = "leave it out, or train on an accelerator; hyper-parallel estimate says what takes memory on any device"
        raise InvalidValue(asked, blame, seen, hint)
    if config.precision.param_dtype == "fp64" and not platform.reductions.takes(torch.float64):
        asked, blame = "cannot train with param_dtype='fp64'", f"{platform.backend} does not reduce float64"
        seen = f"device: {platform.device_type}   backend: {platform.backend}"
        raise InvalidValue(asked, blame, seen, "param_dtype='fp32' (--precision fp32), or --device cpu")


def read_text(config: Config) -> Corpus:
    """Load the text of a run, see `load_corpus`, if its model can be trained on it.

    Raise ValueError for too little text, none that counts, or tokens that the model does not know.
    """
    corpus, (_, seq_len) = load_corpus(config.data), config.batch_shape
    check_length(corpus.train, seq_len, "training")
    check_length(corpus.valid, seq_len, "validation")
    for part, whose, to in ((corpus.train, "its", "train"), (corpus.valid, "its held-back", "validate")):
        if not len(windows_that_count(part, seq_len)):
            blame, seen = f"none of {whose} tokens counts as a target", f"mask_prompts: {config.data.mask_prompts}"
            hint = "records with a completion, or something that the assistant says"
            hint += "; or mask_prompts = false" * config.data.mask_prompts
            raise InvalidValue(f"cannot {to} on the text", blame, seen, hint)
    if (largest := corpus.largest()) >= (known := config.shape().vocab_size):
        blame = f"the text has token {largest}, and model.vocab_size is {known}"
        seen, hint = f"tokenizer: {config.data.tokenizer}", f"vocab_size={largest + 1}, or more"
        raise InvalidValue("cannot read the text", blame, seen, hint)
    return corpus


def check_machine(config: Config, dims: ParallelDims, local_ranks: int, on_host: bool) -> None:
    """Check that the text, the log file and the memory are there, on the machine where the ranks will run.

    Args:
        config, dims: the run, and its degrees.
        local_ranks: ranks that share this machine.
        on_host: whether the ranks compute in the host's memory; a device's memory is not looked at.

    Raises:
        ValueError: text is missing or too short; log or checkpoints cannot be written; TensorBoard is not installed;
            the checkpoint to go on from is another model's; the run needs more memory than there is.
        CheckpointError: the checkpoint to go on from is damaged.
    """
    read_text(config)
    check_lora(config)
    if config.train.log is not None:
        _check_log(Path(config.train.log))
    if config.train.tensorboard is not None:
        check_tensorboard()
    for folder, what in ((config.train.tensorboard, "TensorBoard's log"), (config.checkpoint.folder, "checkpoints")):
        if folder is not None:
            path, hint = Path(folder).absolute(), "a folder that can be written to"
            _check_writable(path, f"cannot write {what} to '{folder}'", f"folder: {folder}", hint)
    if config.checkpoint.folder is not None:
        run_to_go_on_from(config)
    if config.is_other:
        check_given(config, dims, is_split=True)  # or it is refused when nothing is found
    elif on_host:
        check_memory(config, dims, local_ranks)


def least_memory(config: Config, dims: ParallelDims, policy: ActivationPolicy | None = None) -> int:
    """Return bytes that a rank needs at least, the mean over the stages of a pipeline; no run needs less.

    >>> least_memory(Config(), ParallelDims(world_size=1)) > 16 * Config().shape().num_parameters()
    True

    Counted are weights, gradients and two moments of AdamW, and of one micro-batch what backward cannot do without.
    What a step needs beyond that depends on kernels and allocators: `hyper-parallel estimate` replays it.
    """
    state, gradients, activations = _least_parts(config, dims, policy or config.parallel.activations)
    # The gradients of the only micro-batch come as its activations go.
    together = max(gradients, activations) if config.micro_batches == 1 else gradients + activations
    return state + max(together, _validation(config, dims))


def _validation(config: Config, dims: ParallelDims) -> int:
    """Bytes of the inputs and targets of a validation, which a rank cuts out of the text at once."""
    return 2 * 8 * config.batch_shape[1] * -(-config.train.eval_sequences // dims.batch_ranks)


def _least_parts(config: Config, dims: ParallelDims, policy: ActivationPolicy) -> tuple[int, int, int]:
    """Bytes of weights and moments, of gradients, and of activations."""
    shape, parallel, parts = config.shape(), config.parallel, config.micro_batches
    precision = config.precision
    computed, kept, moments = (precision.dtype(of).itemsize for of in ("param", "master", "moments"))
    here = shape.num_parameters() / (dims.tp * dims.pp)
    trained = 0.0 if config.lora.is_on else here  # of adapters at least nothing
    shards = dims.token_ranks // dims.dp_replicate
    weights = here * (precision.dtype("frozen").itemsize if config.lora.is_on else kept)
    state = (weights + 2 * trained * moments) / shards
    if shards > 1 and not parallel.reshard_after_forward:
        state += here * computed  # gathered in forward, and there until backward
    tokens = math.prod(config.batch_shape) / (dims.token_ranks * parts)
    attention = 2 * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
    # What is frozen needs no inputs in backward.
    kinds = ("full", "full") if config.lora.is_on else ("none", policy.kind)
    inner: float = shape.intermediate_size
    if isinstance(shape, MoEConfig):  # in the layers where it is least
        inner = min(inner if shape.num_dense_layers else math.inf, shape.active_intermediate_size)
    whole, part = (least_kept(kind, shape.hidden_size, attention, inner) for kind in kinds)
    taken = sum(map(policy.takes, range(shape.num_hidden_layers)))
    of_block = whole + (taken / shape.num_hidden_layers) * ((0 if policy.offload else part) - whole)
    # 1F1B, of which no schedule needs less: a stage has as many micro-batches under way as stages are left with it.
    under_way = sum(min(left, parts) for left in range(1, dims.pp + 1)) / dims.pp
    of_token = shape.num_hidden_layers * of_block * under_way + shape.vocab_size  # the row of logits
    return int(state), int(trained * kept / shards), int(tokens * of_token * computed / (dims.tp * dims.pp))


def check_memory(config: Config, dims: ParallelDims, local_ranks: int) -> None:
    """Raise ValueError when the ranks of this machine cannot do with the limit, or with what is free."""
    limit: float | None = available_memory()
    what = "free on this machine"
    if config.train.memory_limit_gb is not None:
        limit, what = config.train.memory_limit_gb * 2**30, "allowed by memory_limit_gb"
    least = least_memory(config, dims)
    if limit is not None and least * local_ranks > limit:
        state, gradients, activations = map(readable_bytes, _least_parts(config, dims, config.parallel.activations))
        asked = f"cannot run in {readable_bytes(limit)}, which are {what}"
        seen = (
            f"{config.shape().num_parameters():,} parameters   ranks on this machine: {local_ranks}, of which each has "
            f"{state} of weights and AdamW moments, {gradients} of gradients, {activations} of activations"
        )
        hint = "fewer ranks, " * (local_ranks > 1) + "a smaller hidden_size, num_hidden_layers, batch_size or seq_len"
        hint += ", or checkpointing='full'" * (least_memory(config, dims, ActivationPolicy("full")) < least)
        if _validation(config, dims) * local_ranks > limit:
            seen, hint = f"{seen}   eval_sequences: {config.train.eval_sequences}", "a smaller eval_sequences"
        raise InvalidValue(asked, f"it needs at least {readable_bytes(least * local_ranks)}", seen, hint)


def _check_log(path: Path) -> None:
    asked, seen, hint = f"cannot write the log '{path}'", f"log: {path}", "--log-file elsewhere"
    if path.is_dir():
        raise InvalidValue(asked, "it is a folder", seen, f"--log-file {path / 'train.jsonl'}")
    if not path.exists():
        _check_writable(path.absolute().parent, asked, seen, hint)
    elif not os.access(path, os.W_OK):
        raise InvalidValue(asked, f"no permission to write in '{path.absolute().parent}'", seen, hint)
    if path.is_file() and path.stat().st_size and not _is_log(path):
        blame, hint = "there is a file that is no log, and would be lost", f"--log-file {path.with_suffix('.jsonl')}"
        raise InvalidValue(asked, blame, seen, hint)


def _is_log(path: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        first = json.loads(file.readline(100_000))
        return isinstance(first, dict) and "step" in first
    return False


def _check_writable(path: Path, asked: str, seen: str, hint: str) -> None:
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        blame = f"no permission to write in '{there}'" if there.is_dir() else f"'{there}' is no folder"
        raise InvalidValue(asked, blame, seen, hint)
