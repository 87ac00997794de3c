"""The configuration of a training run: plain dataclasses, one for each section of its TOML file.

    schema = 1

    [model]
    hidden_size = 256

    [train]
    steps = 200

    [parallel]
    dp_replicate = 2        # dp_shard is inferred from the number of ranks

`load_config` reads the file, with messages that point at the mistake. `hyper-parallel train` changes single keys by
flags.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.core.activations import ActivationPolicy
from hyper_parallel.core.common.checks import (
    check_choice,
    check_elements,
    check_fields,
    check_least,
    check_listed,
    check_paths,
)
from hyper_parallel.core.common.errors import HyperParallelError, InvalidValue, nearest
from hyper_parallel.core.expert_parallel.api import split_over_nodes
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy
from hyper_parallel.core.machine.toml_file import Schema, TomlFile, move, toml_text
from hyper_parallel.core.mesh.parallel_dims import DEGREES, ParallelDims
from hyper_parallel.core.pipeline.schedules import ScheduleKind, find_schedule
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.lora import LoraConfig
from hyper_parallel.models.moe import ExpertsConfig, MoEConfig
from hyper_parallel.platform import device_types

if TYPE_CHECKING:
    from typing_extensions import Self

MODELS = ("llama", "moe")
OTHER = "transformers"
"""The `model` of a run of any causal language model that transformers loads from the folder to start from."""

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64})
STUCK_AFTER_S = 900.0
"""After which a run of several ranks that makes no progress ends, unless it says otherwise."""


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from.

    Args:
        path: a folder or a file; None means the source files of the installed Python standard library. The records of
            .jsonl and .parquet files have `text`, `prompt` and `completion`, or `messages`.
        pattern: which files of the folder.
        max_bytes: stop reading after this many bytes, of one file or of all together.
        tokenizer: folder of a tokenizer of transformers; None: tokens are bytes. `with_shape_of`, and so
            `--start-from`, takes that of its folder.
        mask_prompts: of prompts and conversations, only what completes them and what the assistant says counts.
        ignored: share of the targets that do not count, drawn per token: what padding or prompts are in other data.
    """

    path: str | None = None
    pattern: str = "*.py"
    max_bytes: int = 4_000_000
    tokenizer: str | None = None
    mask_prompts: bool = True
    ignored: float = 0.0

    def __post_init__(self) -> None:
        check_fields("cannot use [data]", self)
        check_paths("cannot use [data]", **_some(self, "path", "pattern", "tokenizer"))
        if Path(self.pattern).is_absolute():
            blame = "pattern is a path of its own, and chooses files within the folder"
            hint = "path: the folder (--data), and pattern: '*.txt' (--data-pattern)"
            raise InvalidValue("cannot use [data]", blame, f"pattern: {self.pattern!r}", hint)
        check_least("cannot use [data]", 1, max_bytes=self.max_bytes)
        check_least("cannot use [data]", 0, 1, ignored=self.ignored)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate over time.

    Args:
        muon: update matrices by Muon, with the rate and decay that AdamW would have; AdamW has embeddings, the head and
            norms. False: AdamW has everything.
        lr: highest learning rate, reached after the warmup.
        warmup_steps: steps over which the rate grows linearly.
        schedule: "cosine" or "linear" decay to `min_lr_ratio * lr` at the last step; "wsd": constant, and linear decay
            over the last fifth; "constant".
        min_lr_ratio: last rate divided by `lr`.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        weight_decay: of the matrices; norms have none.
        max_grad_norm: gradients are scaled down to this norm over all parameters; 0 turns it off.
    """

    muon: bool = False
    lr: float = 3e-3
    warmup_steps: int = 10
    schedule: str = "cosine"
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        asked = "cannot use [optimizer]"
        check_fields(asked, self)
        check_least(asked, 0, **_some(self, "lr", "warmup_steps", "min_lr_ratio", "weight_decay", "max_grad_norm"))
        check_least(asked, 0, 1, beta1=self.beta1, beta2=self.beta2)
        check_choice(asked, "schedule", self.schedule, ("cosine", "linear", "wsd", "constant"))


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at once, and where to.

    Args:
        model: "llama", or "moe": the same with experts; or "transformers": whichever causal language model is in
            `start_from`. See `ExpertsConfig`.
        steps: optimizer steps.
        batch_size: sequences per step, over all ranks together.
        seq_len: tokens per sequence.
        accumulate: backward passes per step, into which each rank cuts its sequences; with a pipeline its
            micro-batches.
        seed: of weights, of the order of the text, and of simulated interleaving.
        device: "cpu", "cuda" or "npu"; None: what the machine has.
        eval_every: steps between validations; 0: only after the last step.
        eval_sequences: sequences per validation over all ranks together.
        log: JSONL file with a line per step, written anew unless the run goes on; the command's default:
            "out/train.jsonl". None writes none.
        memory_limit_gb: refuse to start when the ranks of a machine need more than this at least (GiB); None: what the
            machine has free.
        start_from: folder of transformers with the weights to start with, of the model that [model] describes; None:
            fresh ones.
        predict: predict step time and memory before the first step, and write them beside what is measured.
        hardware: what is predicted and planned for: a name that `hyper-parallel hardware` lists, or the path of a TOML
            file. None: by the device's name, on a CPU predicted by out/hardware.toml, which `hyper-parallel hardware
            measure` writes; plans of ranks whose devices differ are for the usual machine of their kind.
        tensorboard: folder for TensorBoard's event files. None writes none.
        profile_steps: steps to record with torch.profiler on the first rank, after two others; 0: none. The trace goes
            to profile.json beside the log. See `hyper-parallel estimate --compare`.
        memory_snapshot: record every allocation of a GPU or NPU, and write memory/rank-*.pickle beside the log at the
            end, or when memory runs out, for https://docs.pytorch.org/memory_viz.
        on_nonfinite: what inf or NaN in loss or gradient does: stop, skip, or dump and stop. "stop": raise, the weights
            are those of the step before. "skip": leave the step out; "dump": write down where it came from, then stop.
        max_skips: with "skip", stop after this many such steps in a row.
        stuck_after_s: seconds without progress until the run ends and says who is stuck; 0: never. Longer than any
            step, load or save. None: 900 where there are several ranks. Simulated ranks need none: the simulator knows
            when nobody can go on.
    """

    model: str = "llama"
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
    start_from: str | None = None
    predict: bool = True
    hardware: str | None = None
    tensorboard: str | None = None
    profile_steps: int = 0
    memory_snapshot: bool = False
    on_nonfinite: str = "stop"
    max_skips: int = 10
    stuck_after_s: float | None = None

    def __post_init__(self) -> None:
        asked = "cannot use [train]"
        check_fields(asked, self)
        check_choice(asked, "model", self.model, (*MODELS, OTHER))
        if self.device is not None:
            check_choice(asked, "device", self.device, device_types())
        check_paths(asked, **_some(self, "log", "start_from", "hardware", "tensorboard"))
        if self.model == OTHER and self.start_from is None:
            blame, hint = "it is the model of a folder, and none is given", "--start-from FOLDER"
            raise InvalidValue(asked, blame, f"model: '{self.model}'   start_from: None", hint)
        check_choice(asked, "on_nonfinite", self.on_nonfinite, ("skip", "stop", "dump"))
        positive = ("steps", "batch_size", "seq_len", "accumulate", "eval_sequences", "max_skips")
        check_least(asked, 1, **_some(self, *positive))
        check_listed(asked, accumulate=self.accumulate)
        check_least(asked, 0, **_some(self, "seed", "eval_every", "profile_steps", "memory_limit_gb", "stuck_after_s"))

    def out(self) -> Path:
        """Return the folder of the log, where reports on what went wrong go, too."""
        return Path(self.log or "out/train.jsonl").parent

    def patience(self, world_size: int) -> float:
        """Return `stuck_after_s` in numbers; a rank without others may take its time, as in a debugger."""
        usual = STUCK_AFTER_S if world_size > 1 else 0
        return (usual if self.stuck_after_s is None else self.stuck_after_s) or math.inf


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks are arranged; see `ParallelDims` for the degrees.

    Args:
        dp_replicate: ranks that hold copies of the same shards.
        dp_shard: ranks that each weight is split over; None: the ranks divided by all other degrees.
        cp: ranks that split each sequence, by context parallelism.
        ulysses_degree: the part of cp that splits heads, the rest is a ring; None: all of it.
        tp: ranks that split each layer, by tensor parallelism.
        pp: ranks of the pipeline.
        ep: ranks that split the experts.
        etp: ranks that split each expert, tp or 1; None: tp.
        fold_experts: split experts over the ranks of cp, and with etp=1 over those of tp, as well as over ep.
        ranks_per_node: ranks of a node, where experts are split over several: with it, a token goes once to each node
            that has some of its experts, and is copied there; None: it goes to each of its experts.
        schedule: of the pipeline: "gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble" or "zbv". See
            `hyper_parallel.core.pipeline.SCHEDULES`.
        stages_per_rank: pipeline stages of each rank; None: as many as the schedule needs.
        layers_per_stage: layers of each pipeline stage, such as "1,2,1"; None: balanced. Embedding and head count as
            layers.
        engine: what splits weights: "fully_shard", or "hsdp" where only data and context are parallel.
        reshard_after_forward: free gathered weights after forward and gather them again for backward.
        reduce_each: reduce gradients after every micro-batch, so that between them each rank keeps those of its shards
            only; else they add up unsharded on every rank, and are reduced once. A pipeline reduces once.
        reshard_inputs: with tp, keep this rank's part of the sequence of what each split module gathers, and gather it
            again in backward: one all_gather more for each, for the memory of the rest.
        tp_chunks: with tp, chunks that attention (of sequences) and feed-forwards compute one after another, so that
            one is gathered or reduced while another is computed.
        whole_parameters: with `muon`, leave each parameter of the blocks whole with one rank, so that Muon moves
            nothing; experts stay split.
        checkpointing: what backward computes again: "none", "selective", "alternate" or "full". "full" blocks;
            "selective": all but matrix products and attention; "alternate": every other matrix product as well. With
            "offload", alone or behind "full", what blocks keep waits on the host. Behind these, "every 2" is for every
            other block, and "first 8" for eight of each stage.
        compile: let torch.compile make one kernel of what lies between matrix products.
    """

    dp_replicate: int = 1
    dp_shard: int | None = None
    cp: int = 1
    ulysses_degree: int | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    fold_experts: bool = False
    ranks_per_node: int | None = None
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    layers_per_stage: str | None = None
    engine: str = "fully_shard"
    reshard_after_forward: bool = True
    reduce_each: bool = False
    reshard_inputs: bool = False
    tp_chunks: int = 1
    whole_parameters: bool = False
    checkpointing: str = "none"
    compile: bool = False

    def __post_init__(self) -> None:
        asked = "cannot use [parallel]"
        check_fields(asked, self)
        ActivationPolicy.of(self.checkpointing, asked=asked)
        check_choice(asked, "engine", self.engine, ("fully_shard", "hsdp"))
        find_schedule(self.schedule)
        degrees = ("dp_replicate", "cp", "ulysses_degree", "tp", "pp", "ep", "etp")
        check_least(asked, 1, **_some(self, *degrees, "ranks_per_node", "stages_per_rank", "tp_chunks"))
        if self.dp_shard != -1:  # which is inferred
            check_least(asked, 1, dp_shard=self.dp_shard)
        self.stage_sizes()

    @property
    def pipeline(self) -> ScheduleKind:
        """The schedule of the pipeline, with its rules."""
        return find_schedule(self.schedule)

    @property
    def stages_each(self) -> int:
        """Stages of each rank of the pipeline; ValueError: a number that its schedule cannot have."""
        return self.pipeline.checked_stages_per_rank(self.stages_per_rank)

    @property
    def activations(self) -> ActivationPolicy:
        """The policy of a stage's blocks, numbered from 0 on."""
        return ActivationPolicy.of(self.checkpointing)

    @property
    def goes_back_once(self) -> bool:
        """Whether a block can go backward only once, because it is compiled or keeps some results."""
        return self.compile or self.activations.kind in ("selective", "alternate")

    def check_blocks(self) -> None:
        """Raise ValueError for blocks that cannot go backward twice, where the schedule of the pipeline does."""
        if not self.pipeline.splits_backward or not self.goes_back_once:
            return
        other, hint = f"checkpointing='{self.checkpointing}'", "schedule='interleaved', or checkpointing='full'"
        other, hint = ("compile", "schedule='interleaved', or compile=False") if self.compile else (other, hint)
        asked = f"cannot train with schedule='{self.schedule}' and {other}"
        seen = "first for inputs, then for weights; what is compiled, or selectively kept, goes backward once"
        raise InvalidValue(asked, "it goes backward twice through a block", seen, hint)

    def check_nodes(self, asked: str, dims: ParallelDims) -> None:
        """Raise ValueError for nodes that the groups of ranks with all experts do not divide into."""
        if self.ranks_per_node is not None and dims.ep_enabled:
            split_over_nodes(asked, dims.expert_groups(), self.ranks_per_node)

    def split_options(self, *, experts: bool = False) -> dict[str, Any]:
        """Return how the layers of a model, and its experts, are split over tp, as functions that plan it take it."""
        nodes = {"ranks_per_node": self.ranks_per_node} if experts else {}
        return {"reshard_inputs": self.reshard_inputs, "chunks": self.tp_chunks, **nodes}

    @property
    def fuses(self) -> bool:
        """Whether one kernel computes what lies between matrix products."""
        return self.compile

    def describe_pipeline(self) -> str:
        """Return the schedule in words, such as "interleaved x 4"."""
        return self.schedule + ("" if self.stages_per_rank is None else f" x {self.stages_per_rank}")

    def placed(self, dims: ParallelDims, sizes: Sequence[int] | None) -> ParallelConfig:
        """Return a copy with these degrees and these layers of stages, as many as the schedule has without pipeline."""
        text = None if sizes is None else ",".join(map(str, sizes))
        each = self.stages_per_rank if dims.pp_enabled else None
        return dataclasses.replace(self, **dims.to_config(), layers_per_stage=text, stages_per_rank=each)

    def unplaced(self, *, scheduled: bool = True) -> ParallelConfig:
        """Return a copy for one device, which has all: without degrees, layers of stages, and maybe the schedule."""
        usual: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(self) if each.name in DEGREES}
        usual |= {} if scheduled else {"schedule": "1f1b", "stages_per_rank": None}
        return dataclasses.replace(self, **usual, layers_per_stage=None)

    def stage_sizes(self) -> list[int] | None:
        """Return the layers of each pipeline stage, None where they are to be balanced.

        >>> ParallelConfig(layers_per_stage="1,2,1").stage_sizes()
        [1, 2, 1]
        """
        if self.layers_per_stage is None:
            return None
        sizes = [word.strip() for word in self.layers_per_stage.split(",")]
        if not all(word.isdecimal() for word in sizes):
            blame, seen = "layers_per_stage must be numbers with commas", f"layers_per_stage: '{self.layers_per_stage}'"
            raise InvalidValue("cannot use [parallel]", blame, seen, "'1,2,1'")
        return [int(word) for word in sizes]


@dataclass(frozen=True)
class PrecisionConfig:
    """What a run computes in, and what it stores.

    >>> PrecisionConfig("bf16", master_dtype="bf16").dtype("moments")
    torch.bfloat16

    Args:
        param_dtype: what weights are gathered and computed in: "fp32", "bf16", or "fp64" to compare runs sharply.
        master_dtype: what trained weights are stored in, and with them their gradients: "fp32" or "bf16"; None: fp32,
            and fp64 where that is computed in. In bf16, updates below 1/256 of a weight are lost.
        moments_dtype: of the optimizer's state: "fp32" or "bf16"; None: master_dtype.
        frozen_dtype: what frozen weights are stored in, such as those beside LoRA; None: param_dtype.
        reduce_dtype: what gradients are reduced in; None: fp32, and fp64 where that is computed in.
    """

    param_dtype: str = "fp32"
    master_dtype: str | None = None
    moments_dtype: str | None = None
    frozen_dtype: str | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        asked, given = "cannot use [precision]", {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        check_fields(asked, self)
        for key, value in given.items():
            check_choice(asked, key, value, tuple(DTYPES))
        seen = "   ".join(f"{key}: {value!r}" for key, value in given.items())
        if "fp64" in given.values() and len({*given.values()}) > 1:
            blame = f"fp64 is for comparing runs, in which nothing is rounded to less: param_dtype={self.param_dtype!r}"
            raise InvalidValue(asked, blame, seen, "param_dtype='fp64' alone, or fp32 and bf16")
        for key in ("master_dtype", "reduce_dtype"):
            if self.param_dtype == "fp32" and given.get(key) == "bf16":
                blame, hint = f"{key} rounds away what param_dtype computes", f"{key}='fp32', or param_dtype='bf16'"
                raise InvalidValue(asked, blame, seen, hint)

    def dtype(self, of: str) -> torch.dtype:
        """Return the dtype of a key without its end ("master"); of "buffers", which no engine casts, at least fp32."""
        check_choice("cannot read [precision]", "of", of, ("param", "master", "moments", "frozen", "reduce", "buffers"))
        if given := getattr(self, f"{of}_dtype", None):
            return DTYPES[given]
        follows = {"moments": "master", "frozen": "param"}.get(of)
        return self.dtype(follows) if follows else torch.promote_types(DTYPES[self.param_dtype], torch.float32)

    def stored(self, param: torch.Tensor) -> torch.dtype:
        """Return the dtype that a weight is stored in, trained or frozen."""
        return self.dtype("master" if param.requires_grad else "frozen")

    def policy(self) -> MixedPrecisionPolicy | None:
        """Return what the units of a model cast and reduce by; None: all is computed in as it is stored."""
        if {self.dtype(of) for of in ("param", "master", "frozen", "buffers")} == {self.dtype("param")}:
            return None
        return MixedPrecisionPolicy(self.dtype("param"), self.dtype("reduce"))


@dataclass(frozen=True)
class CheckpointConfig:
    """Where a run keeps what it needs to go on.

    Args:
        folder: folder of checkpoints, from the newest of which a run goes on. None saves nothing.
        every: steps between checkpoints; 0: only at the end, and when the run is asked to stop.
        keep: how many of the last checkpoints to keep.
        background: write checkpoints while training goes on.
        resume: go on from the newest complete checkpoint, if there is any, or start anew.
        resume_step: go back to this step in place of the newest. The newer ones are renamed to undone-step-... when the
            next one is complete. A restart by torchrun goes on from the newest that has been saved since.
    """

    folder: str | None = None
    every: int = 0
    keep: int = 3
    background: bool = False
    resume: bool = True
    resume_step: int | None = None

    def __post_init__(self) -> None:
        asked = "cannot use [checkpoint]"
        check_fields(asked, self)
        check_paths(asked, folder=self.folder)
        check_least(asked, 1, resume_step=self.resume_step, keep=self.keep)
        check_least(asked, 0, every=self.every)


@dataclass(frozen=True)
class Config:
    """A run. `Config()` trains a small model on the Python standard library, for as many ranks as there are.

    >>> Config(train=TrainConfig(steps=20)).train.batch_size
    16
    """

    model: LlamaConfig = field(default_factory=LlamaConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        asked, (batch_size, seq_len) = "cannot configure a run", (self.train.batch_size, self.train.seq_len)
        check_fields(asked, self)
        pair, width = {"seq_len": seq_len}, max(self.model.hidden_size, self.model.vocab_size)
        check_elements(asked, "attention, a number for each two tokens of a sequence,", seq_len**2, **pair)
        tokens = {"batch_size": batch_size, **pair}
        check_elements(asked, "what a step computes", batch_size * seq_len * width, **tokens)

    def with_changes(self, section: str, changes: Mapping[str, Any]) -> Config:
        """Return a copy in which keys of one section have new values.

        >>> Config().with_changes("train", {"steps": 20}).train.steps
        20

        Args:
            section: name of the section.
            changes: new values by key; None leaves the key as it is.

        Raises:
            TypeError: a value of another kind.
            ValueError: no such section or key, or a value that the section refuses.
        """
        given = {key: checked_value(section, key, value) for key, value in changes.items() if value is not None}
        return dataclasses.replace(self, **{section: dataclasses.replace(getattr(self, section), **given)})

    @property
    def weights(self) -> str | None:
        """Folder of the weights that a model of this library starts with; None: fresh ones."""
        return None if self.is_other else self.train.start_from

    @property
    def micro_batches(self) -> int:
        """Parts that each rank cuts its sequences of a step into."""
        return self.train.accumulate

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Sequences of a step over all ranks, and tokens of each."""
        return self.train.batch_size, self.train.seq_len

    @property
    def is_other(self) -> bool:
        """Whether the model is one that transformers loads."""
        return self.train.model == OTHER

    def seed_of(self, batch_rank: int = 0) -> int:
        """Return the seed of what a rank draws: ranks with the same sequences draw the same."""
        return self.train.seed + batch_rank

    def step_options(self) -> dict[str, Any]:
        """Return what `training_step` takes of a run."""
        limit = self.optimizer.max_grad_norm
        return {"accumulate": self.micro_batches, "reduce_each": self.parallel.reduce_each, "max_grad_norm": limit}

    def cut_into(self, micro_batches: int) -> Self:
        """Return a copy in which each rank cuts its sequences of a step into so many parts."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, accumulate=micro_batches))

    def shape(self) -> LlamaConfig:
        """Return the shape of the model, a `MoEConfig` with experts, with tables long enough for `train.seq_len`.

        Raises:
            ValueError: numbers that the model refuses.
        """
        dense = dataclasses.replace(self.model, max_seq_len=max(self.model.max_seq_len, self.train.seq_len))
        if self.train.model != "moe":
            return dense
        return MoEConfig(**dataclasses.asdict(dense), **dataclasses.asdict(self.experts))

    def with_shape(self, shape: LlamaConfig) -> Self:
        """Return a copy that trains a model of this shape: what `shape` of it returns, tables aside.

        >>> Config().with_shape(MoEConfig(num_experts=4)).train.model
        'moe'

        Args:
            shape: a `MoEConfig` for a model with experts.
        """
        sections = {"model": LlamaConfig, **({"experts": ExpertsConfig} if isinstance(shape, MoEConfig) else {})}
        changed = {
            section: kind(**{each.name: getattr(shape, each.name) for each in dataclasses.fields(kind)})
            for section, kind in sections.items()
        }
        changed["train"] = dataclasses.replace(self.train, model="moe" if "experts" in changed else "llama")
        return dataclasses.replace(self, **changed)

    def check_batch(self, dp_size: int) -> None:
        """Raise ValueError if the global batch does not split over `dp_size` ranks that read different sequences.

        Each backward pass takes as many of them; the message lists sizes that do.
        """
        check_least("cannot split the batch", 1, dp_size=dp_size)
        (size, _), accumulate = self.batch_shape, self.micro_batches
        unit = dp_size * accumulate
        if size % unit:
            around = sorted({max(size // unit, 1) * unit, (size // unit + 1) * unit})
            over = f"{dp_size} data-parallel ranks x accumulate={accumulate} evenly"
            hint = f"batch_size = {' or '.join(map(str, around))}"
            asked, blame = f"cannot split batch_size={size} sequences over {over}", f"it is no multiple of {unit}"
            raise InvalidValue(asked, blame, f"{dp_size} x {accumulate} = {unit}", hint)


def _some(values: object, *names: str) -> dict[str, Any]:
    return {name: getattr(values, name) for name in names}


# -- TOML files --------------------------------------------------------------------------------------------------------

RUN = Schema("config", ((move("parallel.param_dtype", "precision.param_dtype"),),))
"""The format of run files; `upgrades` has what changed since 0.1."""


def load_config(path: str | Path) -> Config:
    """Read a TOML file into a `Config`; what the file leaves out keeps its default.

    Raises:
        ValueError: the file is missing or is not TOML, of a newer schema, an unknown section or key (with the closest
            name), a value of the wrong type or out of range. The message points at the line.
    """
    return _build_config(RUN.read(path))


def _build_config(file: TomlFile) -> Config:
    """Return the run of a file that is read already; see `load_config`."""
    sections, built = _sections(), {}
    for name, values in file.table().items():
        if not isinstance(values, dict):
            hint = _home(name) or f"one of the sections {', '.join(sections)}"
            raise file.error(f"'{name}' stands outside of a section", hint, name)
        if name not in sections:
            raise file.error(f"unknown section [{name}]", nearest(name, sections), name)
        key, checked = "", {}
        try:
            for key, value in values.items():
                checked[key] = checked_value(name, key, value)
            key = ""
            built[name] = sections[name](**checked)
        except HyperParallelError as error:
            # The dataclass names the key in its message; find it to show the line.
            key = key or next((key for key in values if re.search(rf"\b{key}\b", str(error))), "")
            blame = re.sub(r"^cannot (use \[\w+\]|set \S+): ", "", f"{error.asked}: {error.blame}")
            raise file.error(blame, error.hint, *((name, key) if key else (name,))) from None
    return Config(**built)


def checked_value(section: str, key: str, value: Any) -> Any:
    """Return a value as the section takes it, which checks its type: an int as a float where it may be a fraction.

    >>> checked_value("optimizer", "lr", 1)
    1.0

    Raises:
        ValueError: no such section or key, with the closest name.
    """
    place, sections = f"{section}.{key}".lstrip("."), _sections()
    asked, seen = f"cannot set {place}", f"{place} = {value!r}"
    if section not in sections:
        blame = f"unknown section [{section}]" if section else "it names no section"
        raise InvalidValue(asked, blame, seen, _home(key) or nearest(section or key, sections))
    known = {each.name: str(each.type) for each in dataclasses.fields(sections[section])}
    if key not in known:
        raise InvalidValue(asked, f"unknown key '{key}' in [{section}]", seen, _home(key) or nearest(key, known))
    try:
        return float(value) if type(value) is int and "float" in known[key] else value
    except OverflowError:  # of an int with hundreds of digits
        return math.inf


def config_text(config: Config) -> str:
    """Return the TOML file of a `Config`, with all keys that have a value; `load_config` reads it.

    >>> print(config_text(Config()).splitlines()[0])
    schema = 1
    """
    values = {name: dataclasses.asdict(getattr(config, name)) for name in _sections()}
    said = {name: {k: v for k, v in section.items() if v is not None} for name, section in values.items()}
    return toml_text(said, RUN)


def changed_text(file: TomlFile | None, config: Config) -> str:
    """Return a file with a run that was made from another: comments and order stay, and all that is as before.

    >>> print(changed_text(None, Config(train=TrainConfig(steps=20))))
    schema = 1
    <BLANKLINE>
    [train]
    steps = 20
    <BLANKLINE>

    Args:
        file: of the other run; None: the defaults.
        config: the new run.
    """
    file = TomlFile(RUN, Path(), "") if file is None else file
    before, changes = _build_config(file), {}
    for name in _sections():
        old, new = (dataclasses.asdict(getattr(run, name)) for run in (before, config))
        changes[name] = {key: value for key, value in new.items() if value != old[key]}
    return file.rewritten(changes)


def _sections() -> dict[str, type]:
    return {each.name: each.default_factory for each in dataclasses.fields(Config)}  # type: ignore[misc]


def _home(key: str) -> str:
    """Return the key with the section that has it, "" if none has."""
    if key == "schema":
        return "schema = 1 above all sections"
    names = {name: [each.name for each in dataclasses.fields(kind)] for name, kind in _sections().items()}
    return next((f"{name}.{key}" for name, known in names.items() if key in known), "")
