"""The layouts of a Llama with experts, on a mesh with a tensor-parallel axis; see `llama_plan` for the rest of it.

Inside of an expert, tp splits either its inner width, and then the layer is like a dense feed-forward: what goes in is
replicated, and what comes out are partial sums. Or nothing (etp=1): each rank along tp has its own part of the
sequences there, as the residual stream is split, and sends its tokens to unsplit experts. Shared experts are split in
both cases.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check, check_least, read_int
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.expert_parallel.api import exchange_of, expert_parallel, nodes_of, read_axes
from hyper_parallel.core.expert_parallel.experts import GroupedExperts
from hyper_parallel.core.shard.api import shard_module
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.models.lora import add_adapters
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.models.plans import MeshLike, Streams, add_entries, cut, llama_plan, reshard_gathered

_EVERY = "layers.*.mlp."


def moe_plan(
    model: MoELlama | MoEConfig,
    mesh: MeshLike,
    *,
    tp: str | None = "tp",
    dp: str | Sequence[str] | None = None,
    etp: int | None = None,
    sequence_parallel: bool = True,
    vocab_parallel: bool = True,
    logits: str = "split",
    reshard_inputs: bool = False,
    chunks: int = 1,
) -> ShardingPlan:
    """Return the plan of a Llama with experts for `shard_module`, after `expert_parallel` has split the experts.

    >>> plan = moe_plan(MoEConfig(num_hidden_layers=2, num_dense_layers=1), {"tp": 2})
    >>> [path for path in plan.local_plan if "mlp" in path]
    ['layers.*.mlp_norm', 'layers.0.mlp', 'layers.1.mlp']
    >>> whole = moe_plan(MoEConfig(num_hidden_layers=2), {"tp": 2}, etp=1)
    >>> [path for path in whole.local_plan if "mlp" in path]
    ['layers.*.mlp_norm', 'layers.0.mlp.shared', 'layers.1.mlp.shared']

    Args:
        model: the model, a stage of it, or its config.
        mesh: see `llama_plan`.
        tp: as there.
        dp: as there.
        etp: as for `expert_parallel`: the degree of tp, or 1. Default: the degree of tp.
        sequence_parallel: see `llama_plan`; needed with etp=1 and a larger tp.
        vocab_parallel: as there.
        logits: as there.
        reshard_inputs: as there.
        chunks: as there, for attention and feed-forwards without experts.

    Raises:
        TypeError: no such model or config, no mesh.
        ValueError: as for `llama_plan`; an etp that is neither, or that needs sequence_parallel.
    """
    asked = "cannot plan the mixture of experts"
    config: object = model.config if isinstance(model, MoELlama) else model
    if not isinstance(config, MoEConfig):
        blame = f"model is a {type(model).__name__}, not a MoELlama or a MoEConfig"
        raise InvalidType(asked, blame, f"model: {type(model)!r}", "llama_plan(model, mesh) for one without")
    check(asked, "bool", reshard_inputs=reshard_inputs)
    read_int(asked, "chunks", chunks, 1)
    streams = Streams.on(asked, mesh, tp=tp, dp=dp, sequence_parallel=sequence_parallel)
    degree = streams.degree if etp is None else etp
    _check_etp(asked, streams, degree)
    plan = llama_plan(
        model, mesh, tp=tp, dp=dp, sequence_parallel=sequence_parallel, vocab_parallel=vocab_parallel, logits=logits
    )
    for field in ("plan", "input_plan", "output_plan", "local_plan"):
        entries = getattr(plan, field) or {}
        setattr(plan, field, {key: value for key, value in entries.items() if not f"{key}.".startswith(_EVERY)})
    axis = streams.tp or "None"
    for index in _layers(model, config):
        path = f"layers.{index}.mlp"
        dense, local = path, path
        if not config.is_dense(index):
            add_entries(plan, plan={f"{path}.router.weight": ("None", "None")})
            dense = f"{path}.shared"
            local = path if degree == streams.degree else dense
        if config.is_dense(index) or config.num_shared_experts:
            add_entries(plan, plan={f"{dense}.{name}.weight": (axis, "None") for name in ("w1", "w3")})
            add_entries(plan, plan={f"{dense}.w2.weight": ("None", axis)})
        if local == path or config.num_shared_experts:
            streams.add_shares(plan, local, streams.whole)
    if isinstance(model, MoELlama):
        add_adapters(plan, model)
    if reshard_inputs:
        reshard_gathered(asked, plan, streams)
    if chunks > 1:
        paths = [f"layers.{index}.mlp" for index in _layers(model, config) if config.is_dense(index)]
        cut(asked, plan, streams, chunks, paths)
    return plan


def parallelize_moe(
    model: MoELlama,
    mesh: DeviceMesh,
    *,
    ep: str | Sequence[str] = "ep",
    tp: str = "tp",
    cp: str = "cp",
    etp: int | None = None,
    ranks_per_node: int | None = None,
    vocab_parallel: bool = True,
    logits: str = "split",
    reshard_inputs: bool = False,
    chunks: int = 1,
) -> MoELlama:
    """Split a Llama with experts over the axes ep and tp of a mesh, in place; `fully_shard` over others may follow.

        mesh = init_device_mesh("npu", (2, 4, 2), mesh_dim_names=("dp_shard", "ep", "tp"))
        parallelize_moe(model, mesh)

    `expert_parallel`, then `shard_module` with `moe_plan`, on the slice of tp.

    Args:
        model: unsharded, on the meta device or equal on all ranks; or a stage of a pipeline.
        mesh: the mesh, with all its axes.
        ep: the axis that splits the experts, and along which ranks have different rows; or several, such as
            `("ep", "cp", "tp")`, see `expert_parallel`.
        tp: the axis that splits heads, inner width and vocabulary, and between modules the sequence.
        cp: the axis that splits sequences.
        etp: as for `expert_parallel`.
        ranks_per_node: as there.
        vocab_parallel: see `llama_plan`.
        logits: as there.
        reshard_inputs: as there.
        chunks: see `moe_plan`.

    Raises:
        TypeError: no such model, no mesh.
        ValueError: as for `expert_parallel` and `moe_plan`.
    """
    asked = "cannot split the mixture of experts"
    check(asked, "int | None", ranks_per_node=ranks_per_node)
    check_least(asked, 1, ranks_per_node=ranks_per_node)
    etp = 1 if etp is None and tp in read_axes(asked, mesh, ep) else etp
    has_tp = isinstance(mesh, DeviceMesh) and tp in (mesh.mesh_dim_names or ())
    plan = None
    if has_tp:
        plan = moe_plan(
            model,
            mesh[tp],
            tp=tp,
            etp=etp,
            vocab_parallel=vocab_parallel,
            logits=logits,
            reshard_inputs=reshard_inputs,
            chunks=chunks,
        )
    if any(isinstance(module, GroupedExperts) for module in model.modules()):
        expert_parallel(model, mesh, ep=ep, tp=tp, cp=cp, etp=etp, ranks_per_node=ranks_per_node)
    else:  # a stage with dense layers only, or with none, makes the groups of the others' experts
        exchange_of(mesh, over := read_axes(asked, mesh, ep))
        nodes_of(mesh, over, ranks_per_node)
    if plan is not None:
        shard_module(model, mesh[tp], plan)
    return model


def _check_etp(asked: str, streams: Streams, etp: int) -> None:
    seen = f"etp={etp}, {streams.tp or 'tp'}={streams.degree}, sequence_parallel={streams.sequence_parallel}"
    if etp not in (1, streams.degree):
        blame = "inside of an expert tp splits either the inner width, on all its ranks, or nothing"
        raise InvalidValue(asked, blame, seen, f"etp={streams.degree}, or etp=1")
    if etp != streams.degree and not streams.sequence_parallel:
        blame = "ranks along tp would send the same tokens to the experts, as nothing splits the sequence"
        raise InvalidValue(asked, blame, seen, f"sequence_parallel=True, or etp={streams.degree}")


def _layers(model: MoELlama | MoEConfig, config: MoEConfig) -> list[int]:
    """Return the numbers of the layers: of a stage, of its own."""
    if isinstance(model, MoELlama):
        return [int(name) for name, _ in model.layers.named_children()]
    return list(range(config.num_hidden_layers))
