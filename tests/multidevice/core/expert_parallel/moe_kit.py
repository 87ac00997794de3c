"""A Llama with experts on some mesh, next to the same on one device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import DTensor, clip_grad_norm_, full_tensor, fully_shard, init_device_mesh, init_parameters
from hyper_parallel.core.expert_parallel import GroupedExperts, set_aux_scale, update_expert_bias
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.models.moe_plan import parallelize_moe

CONFIG = MoEConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=42,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_seq_len=16,
    num_experts=8,
    experts_per_token=3,
    num_shared_experts=2,
    expert_intermediate_size=12,
    num_dense_layers=1,
    routed_scale=1.7,
    bias_update_rate=0.05,
    aux_loss_weight=0.3,
)
TEXT = torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(1))
LEARNING_RATE = 10.0  # of gradients that are clipped to 1e-2


@dataclass(frozen=True)
class Case:
    """One way to split a model.

    Attributes:
        mesh: the axes, in their order.
        etp: see `expert_parallel`.
        shard: `fully_shard` over the axes that split rows.
        config: of the model.
        options: of `parallelize_moe`.
    """

    mesh: dict[str, int]
    etp: int | None = None
    shard: bool = True
    config: MoEConfig = CONFIG
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [f"{name}{size}" for name, size in self.mesh.items()]
        said += [f"etp{self.etp}"] * (self.etp is not None) + ["plain"] * (not self.shard)
        said += ["over " + "-".join(axes) for axes in [self.options.get("ep")] if axes]
        said += [f"{size} on a node" for size in [self.options.get("ranks_per_node")] if size]
        said += [f"{name}={getattr(self.config, name)}" for name in ("score",) if self.config.score != "sigmoid"]
        return "-".join(said)

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes that split rows."""
        return tuple(name for name in self.mesh if name in ("dp_replicate", "dp_shard", "ep"))


@dataclass
class Trained:
    """The model after some steps, the losses, and the gradients of each step by parameter."""

    model: MoELlama
    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    norms: list[float]


def share_of_loss(logits: torch.Tensor, targets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return these rows' part of the mean over so many tokens."""
    full = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return full / tokens


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of all of a tensor."""
    return (full_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach().clone().cpu()


def alone(config: MoEConfig, device_type: str = "cpu", dtype: torch.dtype = torch.float64) -> MoELlama:
    with torch.device("meta"):
        model = MoELlama(config).to(dtype)
    return init_parameters(model, seed=3, device=device_type)


def in_float32() -> dict[str, torch.Tensor]:
    """Training on one device, of which the rounding is measured where there is no float64."""
    found = train(alone(CONFIG, dtype=torch.float32), TEXT, 2, after=update_expert_bias)
    gradients = [(f"{step} {name}", grad) for step, named in enumerate(found.gradients) for name, grad in named.items()]
    return {"losses": torch.tensor(found.losses), "norms": torch.tensor(found.norms), **dict(gradients)}


def split(case: Case, mesh: Any, dtype: torch.dtype = torch.float64) -> MoELlama:
    """Build the model as a case says."""
    with torch.device("meta"):
        model = MoELlama(case.config).to(dtype)
    parallelize_moe(model, mesh, etp=case.etp, logits="local", **case.options)
    if case.shard:
        shard_rows(model, case, mesh)
    return init_parameters(model, seed=3, device=mesh.device_type)


def shard_rows(model: MoELlama, case: Case, mesh: Any) -> None:
    """Split parameters over all ranks with other rows; experts, which are split over ep, over the rest of them."""
    shards = tuple(name for name in case.rows if name != "dp_replicate")
    copies = ("dp_replicate",) * ("dp_replicate" in case.mesh)
    dense = mesh[(*copies, *shards)] if len(shards) == 1 else mesh[shards]._flatten("rows")
    units: list[Any] = []
    for block in model.layers:
        if hasattr(block.mlp, "experts"):
            others = (*copies, *(name for name in shards if name != "ep"))
            # With no other rows for the same experts, there is nothing to split or to add up: the DTensors stay.
            units.append(fully_shard(block.mlp.experts, mesh=mesh[others] if others else None))
        units.append(fully_shard(block, mesh=dense))
    units.append(fully_shard(model, mesh=dense))
    for unit in units:
        unit.set_reduce_op_type("sum")


def add_up(model: nn.Module, case: Case, mesh: Any) -> None:
    """What `fully_shard` does, by hand: add gradients up over the ranks with other rows."""
    for module in model.modules():
        over = [axis for axis in case.rows if not (isinstance(module, GroupedExperts) and axis == "ep")]
        for param in module.parameters(recurse=False):
            grad: Any = param.grad
            for axis in over:
                part = grad.to_local() if isinstance(grad, DTensor) else grad
                torch.distributed.all_reduce(part, group=mesh.get_group(axis))


def train(model: MoELlama, text: torch.Tensor, steps: int, *, reduce: Any = None, after: Any = None) -> Trained:
    """Take steps on some rows of a batch, in two micro-batches each.

    Args:
        model: the model.
        text: the rows.
        steps: how many.
        reduce: called with the model when all gradients of a step are there.
        after: called with the model after the optimizer.
    """
    set_aux_scale(model, 1 / len(TEXT))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    found = Trained(model, [], [], [])
    reduce, after = reduce or _nothing, after or _nothing
    for _ in range(steps):
        for part in text.chunk(2):  # micro-batches
            if len(part):
                loss = share_of_loss(model(part[:, :-1]), part[:, 1:], TEXT[:, 1:].numel())
                loss.backward()
                found.losses.append(loss.item())
        reduce(model)
        found.norms.append(float(clip_grad_norm_(model, 1e-2)))
        found.gradients.append({name: full(param.grad) for name, param in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        after(model)
    return found


def _nothing(model: nn.Module) -> None: ...


def mesh_of(device_type: str, case: Case) -> Any:
    return init_device_mesh(device_type, tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))


def own_rows(case: Case, mesh: Any) -> torch.Tensor:
    """Return this rank's rows of the batch."""
    text = TEXT
    for axis in case.rows:
        text = text.chunk(case.mesh[axis])[mesh.get_local_rank(axis)]
    return text.to(mesh.device_type)


def variant(**changes: Any) -> MoEConfig:
    return replace(CONFIG, **changes)
