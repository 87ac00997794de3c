"""The parallelisms of a model, each a function, in the order in which `parallelize_llama.py` applies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hyper_parallel.core.activations import blocks_of
from hyper_parallel.core.common.torch_compat import plain_name
from hyper_parallel.core.context_parallel.api import ContextParallel, context_parallel
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.fully_shard.api import fully_shard, whole_parameters
from hyper_parallel.core.fully_shard.placement import PlacementFn
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy
from hyper_parallel.core.hsdp.api import hsdp
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.api import Pipeline
from hyper_parallel.core.pipeline.split import StageSlice, stage_slices
from hyper_parallel.core.pipeline.tied import TiedWeights
from hyper_parallel.core.redistribute.api import from_local
from hyper_parallel.core.shard.loss import vocab_parallel_cross_entropy
from hyper_parallel.models.llama import Llama
from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.data import IGNORED


@dataclass
class Parallelized:
    """A model on one rank, ready for an optimizer.

    Attributes:
        parts: what this rank has of the model: all of it, or stages of a pipeline, in their order.
        pipeline: runs the stages; None without one, then there is one part, and it is called.
        context: knows which tokens of a sequence are this rank's; None: all of them.
        tied: the embedding that is the head, too, on two stages; None: there is no such, or no pipeline.
        after_step: called after every optimizer step, with False if it was skipped.
    """

    parts: list[nn.Module]
    pipeline: Pipeline | None = None
    context: ContextParallel | None = None
    tied: TiedWeights | None = None
    after_step: Callable[[bool], None] = lambda taken: None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all parts by their names in the whole model."""
        for part in self.parts:
            for name, param in part.named_parameters():
                yield plain_name(name), param

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters and persistent buffers of all parts by their names in the whole model."""
        for part in self.parts:
            for name, tensor in part.state_dict().items():
                yield plain_name(name), tensor

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the parts into evaluation mode for the block."""
        for part in self.parts:
            part.eval()
        try:
            yield
        finally:
            for part in self.parts:
                part.train()


def _compile(module: nn.Module) -> None:
    module.forward = torch.compile(module.forward)


@dataclass(frozen=True)
class BuildHooks:
    """What a recording of a step changes while a model is built; a run changes nothing.

    Attributes:
        stages: what to build in place of this rank's own stages, without a pipeline that runs them.
        before_checkpointing: called with each part once it is split inside, before its blocks are wrapped.
        compile: lets a module compute as if it was compiled.
    """

    stages: Sequence[StageSlice] | None = None
    before_checkpointing: Callable[[nn.Module], None] = lambda part: None
    compile: Callable[[nn.Module], None] = _compile


AS_TRAINED = BuildHooks()


def without_memory() -> AbstractContextManager[Any]:
    """Return the context in which a model is built that takes no memory yet.

    Where tensors have no values anyway, under torch's FakeTensorMode, they take none on their own device either.
    """
    return nullcontext() if detect_fake_mode() is not None else torch.device("meta")


def in_dtype(module: nn.Module, stored: Callable[[nn.Parameter], torch.dtype], buffers: torch.dtype | None) -> None:
    """Give the weights of a module that has no values yet other dtypes: new ones, where they lie.

    Tensors without values cannot be changed in place, as `module.to` does; a weight of two modules stays one. `stored`
    returns the dtype of a weight; `buffers`, which no engine casts, become of one dtype, or None: they stay.
    """
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffers is not None and buffer is not None and buffer.dtype.is_floating_point:
                child._buffers[name] = torch.empty_like(buffer, dtype=buffers)
        for name, param in child._parameters.items():
            if param is None or param.dtype == stored(param) or not param.dtype.is_floating_point:
                continue
            if id(param) not in made:
                empty = torch.empty_like(param, dtype=stored(param))
                made[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
            child._parameters[name] = made[id(param)]


def describe_axes(dims: ParallelDims) -> str:
    """Say for people how the ranks are arranged.

    >>> describe_axes(ParallelDims(dp_replicate=2, dp_shard=4, world_size=8))
    '8 ranks: dp_replicate=2 x dp_shard=4'
    """
    if dims.world_size == 1:
        return "1 rank"
    axes = " x ".join(f"{axis}={size}" for axis, size in dims.mesh_axes.items())
    return f"{dims.world_size} ranks: {axes}"


def own_stages(run: Config, dims: ParallelDims) -> list[StageSlice]:
    """Return what this rank has of the model: without a pipeline, which needs the mesh, one slice with all of it.

    Raises:
        ValueError: layers that do not go on so many stages.
    """
    layers = run.model.num_hidden_layers
    if not dims.pp_enabled:
        return [StageSlice(0, range(layers), is_first=True, is_last=True)]
    parallel, rank = run.parallel, dims.get_mesh("pp").get_local_rank()
    sizes, each = parallel.stage_sizes(), parallel.stages_each
    return stage_slices(layers, parallel.pipeline.name, rank, dims.pp, stages_per_rank=each, sizes=sizes)


def split_context(models: list[Any], dims: ParallelDims) -> ContextParallel | None:
    """Let attention reach over all ranks along cp, of which each has a part of every sequence."""
    if not dims.cp_enabled:
        return None
    over = dims.get_mesh("cp"), dims.ulysses_degree
    # A stage without a layer has no attention.
    contexts = [context_parallel(each, *over) if len(each.layers) else ContextParallel(*over) for each in models]
    return contexts[0]  # all are equal


def compile_blocks(model: Llama, enabled: bool, hooks: BuildHooks = AS_TRAINED) -> None:
    """Compile the attention and the plain feed-forward of each block: what computes between two communications.

    Not whole blocks: their hooks communicate, at which a graph would break anyway. `hooks` say how it is compiled.
    """
    if not enabled:
        return
    for block in model.layers:
        for child in (block.get_submodule("attention"), block.get_submodule("mlp")):
            if not hasattr(child, "experts"):  # their inputs have another length in every step
                hooks.compile(child)


def shard_blocks(model: Any, blocks: Sequence[nn.Module], dims: ParallelDims, run: Config) -> None:
    """Split the parameters of each block over the ranks with other tokens, then those of the rest of the model.

    Each block becomes one unit, and its experts another: weights are gathered while it computes, gradients reduced when
    its backward is done. They are added up over ranks: each rank's loss is its share of the mean over the global batch.

    `run` has the engine, precision and resharding; the mesh of `dims` is built.
    """
    policy = run.precision.policy()
    if dims.token_ranks == 1 and policy is None:
        return
    if run.parallel.engine == "hsdp":
        hybrid: dict[str, Any] = {"shard_size": dims.token_ranks // dims.dp_replicate, "threshold": 0}
        level = "level3" if run.parallel.reshard_after_forward else "level2"
        for cell in (*model.layers, model):
            hsdp(cell, **hybrid, optimizer_level=level, comm_fusion=True, grad_scale=float(dims.token_ranks))
        return
    policy = policy or MixedPrecisionPolicy()
    owner_of = whole_parameters(blocks, dims.data_mesh().shape[-1]) if run.parallel.whole_parameters else None
    options: dict[str, Any] = {
        "mp_policy": policy,
        # A pipeline runs each stage many times per step: gathering the weights for each micro-batch would cost more
        # than it saves.
        "reshard_after_forward": run.parallel.reshard_after_forward and not dims.pp_enabled,
    }
    units: list[Any] = []
    for block in blocks:
        experts = getattr(getattr(block, "mlp", None), "experts", None)
        placement = owner_of if experts is None else partial(_placement_of_experts, dims.expert_shards, owner_of)
        if experts is not None and dims.ep_enabled:  # they are on a mesh of their own
            # Tokens come in the dtype of the block already; the weights of the router stay float32.
            own = {**options, "mp_policy": replace(policy, cast_forward_inputs=False)}
            mesh = dims.data_mesh(experts=True)
            units.append(fully_shard(experts, mesh=mesh, shard_placement_fn=placement, **own))
        units.append(fully_shard(block, mesh=dims.data_mesh(), shard_placement_fn=placement, **options))
    units.append(fully_shard(model, mesh=dims.data_mesh(), **options))
    for unit in units:
        unit.set_reduce_op_type("sum")


def _placement_of_experts(ranks: int, others: PlacementFn | None, param: nn.Parameter) -> Any:
    """Split experts inside of each where they do not divide over the ranks.

    On dim 0 some ranks would hold more experts than others, or all of them, and each gather would be padded to as many
    rows as if all ranks held as many. The weights of all experts are one parameter, (experts, rows, columns); `others`
    places what is no expert, None on dim 0.
    """
    if param.ndim != 3:
        return None if others is None else others(param)
    local = param.to_local() if isinstance(param, DTensor) else param
    if len(local) % ranks == 0:
        return None
    over_tp = [place.dim for place in param.placements if type(place) is Shard] if isinstance(param, DTensor) else []
    return Shard(2 if 1 in over_tp else 1)


def build_pipeline(
    models: list[Any], stages: list[StageSlice], run: Config, dims: ParallelDims, loss: ShareOfLoss
) -> Pipeline | None:
    """Make the pipeline of this rank's stages, which are sharded and on their device; None without one.

    `stages` are what each of `models` has of the model; `loss` ends the last one.
    """
    if not dims.pp_enabled:
        return None
    stream = None  # between stages go a rank's own shards of what is split over the sequence
    if dims.tp_enabled:
        stream = Layout.from_device_mesh(dims.get_mesh("tp"))("None", "tp", "None")
    mesh, name, indices = dims.get_mesh("pp"), run.parallel.pipeline.name, [part.index for part in stages]
    return Pipeline(models, mesh, name, run.micro_batches, loss, stage_indices=indices, boundary=stream)


def tie_stages(pipeline: Pipeline | None, run: Config) -> TiedWeights | None:
    """Give the last stage's head the values of the first stage's embedding, if they are one weight in this run.

    Without a pipeline there is one part, in which they are one.
    """
    if pipeline is None or not run.model.tie_embeddings:
        return None
    tied = TiedWeights(pipeline)
    tied.copy_values()
    return tied


Split = Callable[[nn.Module, DeviceMesh], Any]
"""Splits a model over a mesh of the axis tp, in place."""


def shard_given(
    model: nn.Module, dims: ParallelDims, run: Config, device: torch.device, split: Split | None = None
) -> Parallelized:
    """Train a causal language model as it is, with its parameters split over the ranks with other tokens.

    The units are the modules of its outermost lists, which are its blocks, and the rest. What is frozen is gathered as
    well, and has no gradients.

    Args:
        model: with its weights, alike on every rank; changed in place. It takes ids (batch, seq) and returns logits, or
            an output of transformers that has them.
        dims: the degrees, of which those of data parallelism, and with `split` that of tp, are above 1; the mesh is
            built.
        run: precision and resharding.
        device: where it goes.
        split: splits it over tp, before its shards are split further.
    """
    precision = run.precision
    for param in model.parameters():
        param.data = param.data.to(device, precision.stored(param))
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device, precision.dtype("buffers") if buffer.is_floating_point() else buffer.dtype)
    model.train()
    if hasattr(getattr(model, "config", None), "use_cache"):  # of keys and values, for text that is generated
        model.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "use_cache": False}), with_kwargs=True
        )
    model.register_forward_hook(lambda _, args, output: getattr(output, "logits", output))
    if split is not None and dims.tp_enabled:
        split(model, dims.get_mesh("tp"))
    shard_blocks(model, list(blocks_of(model)), dims, run)
    return Parallelized([model])


# -- each rank's share of the loss -------------------------------------------------------------------------------------

# With n tokens in the global batch that count (whose target is not `IGNORED`), on all ranks and in all micro-batches,
#
#     loss = sum over ranks, micro-batches and tokens of cross_entropy / n
#
# So shares are added up, and so are gradients: no rank and no micro-batch weighs more because few of its tokens count.


class ShareOfLoss:
    """Turns logits and targets of some of the tokens into their share of the mean over all of them.

    >>> share = ShareOfLoss()
    >>> share.counted = 6
    >>> round(share(torch.zeros(1, 3, 8), torch.tensor([[0, 1, IGNORED]])).item(), 4)  # 2 / 6 * log(8)
    0.6931

    Attributes:
        counted: tokens of the global batch that count; set before every step.
    """

    def __init__(self) -> None:
        self.counted: float = 1.0

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the share of these tokens, a plain tensor without dims.

        Args:
            logits: (batch, seq, vocab); a DTensor where tensor parallelism splits the vocabulary.
            targets: ids (batch, seq), `IGNORED` for tokens that do not count.

        Communication: see `vocab_parallel_cross_entropy`, along tp only.
        """
        if isinstance(logits, DTensor):
            rows = Layout.of(logits).reset_partial()("None", "None")
            targets = from_local(targets, rows, shape=targets.shape)  # nothing to agree on: it is not split
        total = vocab_parallel_cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        if isinstance(total, DTensor):
            total = total.to_local()
        return total / self.counted  # NaN where nothing counts: a loss of 0 would look like a model that knows it all
