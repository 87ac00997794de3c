"""The input of an estimate: a model, the arrangement of ranks, the batch, and the run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hyper_parallel.core.common.checks import check_choice, read_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.split import StageSlice, rank_of_stage, split_layers
from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.preflight import check_engine, check_sequence, plan_run
from sim.mesh.models import LlamaSpec, Model, are_alike, find_model
from sim.mesh.recipe import Recipe, Routing
from sim.mesh.spec import ModelSpec

_RING_KERNELS = ("flash", "cudnn", "npu", "cpu")


@dataclass(frozen=True)
class StagePart(StageSlice):
    """One stage of a pipeline, or the whole model.

    Attributes:
        rank: position along the pipeline axis of the rank that holds it.
    """

    rank: int


@dataclass(frozen=True)
class Job:
    """A training step to estimate.

    Args:
        model: the model.
        dims: the degrees of parallelism.
        batch: sequences per step on each data-parallel rank: the global batch over dp_replicate * dp_shard * ep.
        seq_len: tokens per sequence.
        recipe: the run; the job overwrites its model, degrees, batch and `layers_per_stage`.
        layers_per_stage: layers of each pipeline stage; None: balanced, with embedding and head counted as layers.
        ring_kernel: fused attention that computes the blocks of a ring: "flash" or "cudnn" of GPUs, "npu" or "cpu".
            `estimate` sets the device's.
        machine: target of the redistribution plans; None: an unnamed machine with one node. It is ignored when jobs
            are compared. `estimate` sets its hardware.
        seat: offset of the recorded rank in each stage, from the rank whose experts get the most tokens.

    Raises:
        ValueError: numbers that do not fit each other.
    """

    model: ModelSpec
    dims: ParallelDims
    batch: int
    seq_len: int
    recipe: Recipe = field(default_factory=Recipe)
    layers_per_stage: tuple[int, ...] | None = None
    ring_kernel: str = "flash"
    seat: int = 0
    machine: Machine | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        asked = f"cannot estimate {self.model.name}"
        check_choice(asked, "ring_kernel", self.ring_kernel, _RING_KERNELS)
        for name in ("batch", "seq_len"):
            read_int(asked, name, getattr(self, name), 1)
        if self.dims.pp_enabled and not self.model.has_stages:
            blame = "this model cannot be cut into stages: it has no `keep(layers, embed=, head=)`"
            raise InvalidValue(asked, blame, f"pp: {self.dims.pp}", "pp=1, or a model that has it")
        if self.seq_len % self.dims.cp:
            blame = f"seq_len does not divide over cp={self.dims.cp} ranks"
            hint = f"seq_len={-(-self.seq_len // self.dims.cp) * self.dims.cp}"
            raise InvalidValue(asked, blame, f"seq_len: {self.seq_len}", hint)
        object.__setattr__(
            self, "layers_per_stage", None if self.layers_per_stage is None else (*self.layers_per_stage,)
        )
        object.__setattr__(self, "recipe", self._arranged())
        self._check_degrees(asked)
        if self.batch % self.microbatches:
            fits = ", ".join(str(n) for n in range(1, self.batch + 1) if self.batch % n == 0)
            blame = f"{self.batch} sequences cannot be cut into {self.microbatches} micro-batches"
            raise InvalidValue(asked, blame, f"batch: {self.batch}", f"accumulate = one of {fits}")
        self.stages()
        if self.dims.pp_enabled:
            parallel = self.recipe.parallel
            parallel.pipeline.check_micro_batches(self.microbatches, self.dims.pp, len(self.stages()))
            parallel.check_blocks()
        check_engine(self.recipe, self.dims)

    def _arranged(self) -> Recipe:
        """Return the recipe with the job's model, degrees and batch: the run that `train` would take."""
        parallel = self.recipe.parallel.placed(self.dims, self.layers_per_stage)
        sequences = self.batch * self.dims.batch_ranks
        train = replace(self.recipe.train, batch_size=sequences, seq_len=self.seq_len)
        recipe = replace(self.recipe, parallel=parallel, train=train)
        if self.is_trained and not are_alike(recipe.shape(), self.model.config):
            assert isinstance(self.model, LlamaSpec)
            return recipe.with_shape(self.model.at(self.seq_len))
        return recipe

    @classmethod
    def of_run(cls, run: Config, world_size: int, *, model: Model | None = None, routing: Routing | None = None) -> Job:
        """Return the step of a training run, as `hyper_parallel.trainer.train` takes it on `world_size` ranks.

        >>> from hyper_parallel.trainer.config import ParallelConfig
        >>> job = Job.of_run(Config(parallel=ParallelConfig(tp=2)), world_size=8)
        >>> job.dims.dp_shard, job.batch, job.recipe.zero, job.recipe.precision.param_dtype
        (4, 4, 3, 'fp32')

        Args:
            run: the training run.
            world_size: number of ranks.
            model: replaces the run's model, e.g. by a model that the trainer does not know; None: the run's.
            routing: distribution of tokens over experts; None: even.

        Raises:
            ValueError: as in `plan_run`, which `train` calls, too.
        """
        parallel = run.parallel
        if model is None:
            dims = plan_run(run, world_size)
        else:
            dims = ParallelDims.from_config(parallel, world_size)
            run.check_batch(dims.batch_ranks)
        sizes, (sequences, length) = parallel.stage_sizes(), run.batch_shape
        return cls(
            find_model(run.shape() if model is None else model),
            dims,
            sequences // dims.batch_ranks,
            length,
            Recipe.of(run, routing),
            layers_per_stage=None if sizes is None else tuple(sizes),
        )

    @property
    def is_trained(self) -> bool:
        """Return True if the trainer's own functions build the model and run the step."""
        return type(self.model) is LlamaSpec and self.recipe.steps is None

    def _check_degrees(self, asked: str) -> None:
        """Raise ValueError if heads, experts or sequences do not split over the degrees, as the trainer does."""
        dims = self.dims
        if (dims.ep_enabled or dims.fold_experts) and self.model.family != "moe":
            less = f"ep=1 with dp_shard={dims.dp_shard * dims.ep}" if dims.ep > 1 else "fold_experts=False"
            hint = f"{less}, or a model with experts"
            raise InvalidValue(asked, "ep splits experts, and it has none", f"ep: {dims.ep}", hint)
        self.recipe.parallel.check_nodes(asked, dims)
        if self.model.family in ("llama", "moe"):
            dims.validate_against_model(self.model, self.seq_len if self.recipe.sequence_parallel else None)
            check_sequence(self.seq_len, dims)

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of a step."""
        return self.recipe.micro_batches

    @property
    def micro_batch(self) -> int:
        """Number of sequences in a micro-batch."""
        return self.batch // self.microbatches

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of a step, over all ranks."""
        return self.batch * self.dims.batch_ranks * self.seq_len

    @property
    def local_seq_len(self) -> int:
        """Number of tokens per sequence on one rank along cp."""
        return self.seq_len // self.dims.cp

    def stages(self) -> list[StagePart]:
        """Return the stages of all ranks, in model order; without a pipeline, one stage with the whole model."""
        count = self.model.num_layers
        if not self.dims.pp_enabled:
            return [StagePart(0, range(count), is_first=True, is_last=True, rank=0)]
        name, ranks, each = self.recipe.parallel.pipeline.name, self.dims.pp, self.recipe.parallel.stages_each
        last = ranks * each - 1
        sizes = None if self.layers_per_stage is None else list(self.layers_per_stage)
        return [
            StagePart(index, layers, index == 0, index == last, rank_of_stage(name, index, ranks, each))
            for index, layers in enumerate(split_layers(count, last + 1, sizes=sizes))
        ]

    @property
    def tied_ranks(self) -> tuple[int, int] | None:
        """Pipeline ranks of the embedding and the head if both share one weight; else None."""
        config = getattr(self.model, "config", None)
        if not self.dims.pp_enabled or not getattr(config, "tie_embeddings", False):
            return None
        parts = self.stages()
        return parts[0].rank, parts[-1].rank

    def rank_of_stage_rank(self, pp_rank: int) -> int:
        """Return the global rank that represents a pipeline rank: the first along most axes."""
        return pp_rank * (self.dims.world_size // self.dims.pp) + self._fullest_rank() + self.seat

    @property
    def is_skewed(self) -> bool:
        """Return True if the token counts of experts differ between ranks; then the fullest rank is recorded."""
        return self.dims.ep_enabled and self.recipe.routing is not None and self.recipe.routing != Routing()

    def _fullest_rank(self) -> int:
        """Return the first rank of a stage whose experts get the most tokens, relative to the stage."""
        config, routing = self.model.config, self.recipe.routing
        if not self.is_skewed or routing is None:
            return 0
        tokens = self.micro_batch * self.local_seq_len
        sizes = {"experts": config.num_experts, "per_token": config.experts_per_token}
        dims, rank = self.dims, 0
        index = routing.heaviest(tokens=tokens, ranks=dims.expert_ranks, **sizes)
        strides = {"ep": dims.cp * dims.tp, "cp": dims.tp, "tp": 1}
        for axis in reversed(dims.expert_axes):
            index, place = divmod(index, int(getattr(dims, axis)))
            rank += place * strides[axis]
        return rank
