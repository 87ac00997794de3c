"""The Llama on many ranks, dense or with experts: each parallelism, in the order in which they are applied."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core.activations import checkpoint_blocks
from hyper_parallel.core.expert_parallel.router import set_aux_scale, update_expert_bias
from hyper_parallel.core.init.api import init_parameters
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.shard.api import shard_module
from hyper_parallel.models.llama import Llama
from hyper_parallel.models.lora import Adapter, with_lora
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.models.moe_plan import parallelize_moe as split_layers_and_experts
from hyper_parallel.models.plans import llama_plan
from hyper_parallel.trainer import parallelize
from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.parallelize import AS_TRAINED, BuildHooks, Parallelized, ShareOfLoss


def parallelize_llama(
    run: Config, dims: ParallelDims, device: torch.device, loss: ShareOfLoss, hooks: BuildHooks = AS_TRAINED
) -> Parallelized:
    """Build this rank's part of a Llama, dense or with experts, with the same weights in it whatever the degrees.

    Args:
        run, dims: the run, and its degrees; the mesh is built, unless all of them are 1.
        device, loss: where the weights go, and what ends the last stage of a pipeline.
        hooks: what a recording of it changes.

    Raises:
        ValueError: heads, experts, layers or a width that the degrees do not divide.
    """
    config, parallel = run.shape(), run.parallel
    has_experts = isinstance(config, MoEConfig)
    make: Any = MoELlama if has_experts else Llama

    # 1. Pipeline: each stage keeps some of the layers. Nothing takes memory yet: the weights come last, when each rank
    #    knows which are its own.
    stages = parallelize.own_stages(run, dims) if hooks.stages is None else list(hooks.stages)
    with parallelize.without_memory():
        models = [make(config).keep(part.layers, embed=part.is_first, head=part.is_last) for part in stages]
    models = [with_lora(model, run.lora) for model in models]
    for model in models:
        parallelize.in_dtype(model, run.precision.stored, run.precision.dtype("buffers"))

    # 2. Expert, tensor and sequence parallelism: give each rank some of the experts, split what is inside of the other
    #    layers, and the stream between layers.
    for model in models:
        if has_experts and (dims.ep_enabled or dims.tp_enabled or dims.cp_enabled):
            options = {"ep": dims.expert_axes, **parallel.split_options(experts=True)}
            split_layers_and_experts(model, dims.build_mesh(), etp=dims.etp if dims.tp_enabled else None, **options)
        elif dims.tp_enabled:
            mesh = dims.get_mesh("tp")
            shard_module(model, mesh, llama_plan(model, mesh, **parallel.split_options()))

    # 3. Context parallelism: each rank has a part of every sequence.
    context = parallelize.split_context(models, dims)

    for model in models:
        hooks.before_checkpointing(model)

        # 4. Activation checkpointing: around whole blocks, so that what communicates in them does it again. Only
        #    adapters draw random numbers in them.
        draws = any(isinstance(each, Adapter) and each.dropout for each in model.modules())
        checkpoint_blocks(model, parallel.activations, blocks=list(model.layers), preserve_rng_state=draws)

        # 5. Compile: what lies between two communications.
        parallelize.compile_blocks(model, parallel.fuses, hooks)

        # 6. Data parallelism: split parameters over all ranks with other tokens; gather them block by block.
        parallelize.shard_blocks(model, list(model.layers), dims, run)

        # Now the weights: each rank fills its own shards of the same values, whatever the degrees.
        init_parameters(model, run.seed_of(), device=device)

        if has_experts:  # the auxiliary loss is a mean over the batch's sequences, as the loss is over its tokens
            set_aux_scale(model, 1 / run.batch_shape[0])

    pipeline = parallelize.build_pipeline(models, stages, run, dims, loss) if hooks.stages is None else None
    built = Parallelized(list(models), pipeline, context, parallelize.tie_stages(pipeline, run))
    if has_experts and not run.lora.is_on:  # whose model is frozen
        tokens = dims.mesh_over("dp_replicate", "dp_shard", "ep", "cp")

        def balance(taken: bool) -> None:
            for model in models:
                update_expert_bias(model, [] if tokens is None else [tokens], forget=not taken)

        built.after_step = balance
    return built
