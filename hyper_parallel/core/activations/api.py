"""Activation memory of a model's blocks: the public function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointImpl,
    checkpoint_wrapper,
)

from hyper_parallel.core.activations.offload import ActivationOffload, OffloadedBlock
from hyper_parallel.core.activations.policy import ActivationPolicy
from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import explain

__all__ = ["blocks_of", "checkpoint_blocks", "checkpointed"]

M = TypeVar("M", bound=nn.Module)
_ASKED = "cannot checkpoint blocks"


def checkpoint_blocks(
    model: M, policy: Any = "full", *, blocks: Sequence[nn.Module] | None = None, preserve_rng_state: bool = True
) -> M:
    """Let the blocks of a model keep less for backward on the device: it is computed again, or waits on the host.

    >>> import torch
    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(4)]))
    >>> _ = checkpoint_blocks(model, "full every 2")
    >>> [type(block).__name__ for block in model[1]]
    ['CheckpointWrapper', 'Linear', 'CheckpointWrapper', 'Linear']
    >>> sorted(model.state_dict())[:2]
    ['0.weight', '1.0.bias']

    Each block that the policy takes is wrapped, in its place; names in state dicts stay. Call it once tensors are split
    inside of blocks, and before `fully_shard` or `hsdp` wraps them.

    Offload copies what a block has saved to page-locked memory of the host, on a stream of its own, while the next
    block computes; backward gets it back one block ahead. At most two blocks' activations are on the device. What the
    last block has saved stays there, for backward begins with it. Parameters and buffers stay as well. Where the
    device's memory is the host's, as on a CPU, nothing is moved.

    Args:
        model: changed in place.
        policy: see `ActivationPolicy`, whose `of` reads it: text such as "full", "selective", "alternate", "offload",
            "full offload", "full every 2" or "offload first 8"; operators whose results are kept; or a policy function.
        blocks: modules of the model; None: those of `blocks_of`.
        preserve_rng_state: draw the same numbers in the second computation, as `torch.utils.checkpoint` says. False
            saves time where a block draws none.

    Returns:
        The model.

    Communication: what communicates in a block that is computed again does so again in backward.

    Raises:
        TypeError: an argument of another type.
        ValueError: a policy that says nothing known; no blocks; blocks that are no
            modules of the model, or wrapped already.
    """
    check(_ASKED, nn.Module, "checkpoint_blocks(model, 'full')", model=model)
    check(_ASKED, bool, "preserve_rng_state=True", preserve_rng_state=preserve_rng_state)
    if blocks is not None:
        check(_ASKED, "list", "blocks=list(model.layers)", blocks=blocks)
        for block in blocks:
            check(_ASKED, nn.Module, "blocks=list(model.layers)", blocks=block)
    policy = ActivationPolicy.of(policy)
    if policy.is_none:
        return model
    if blocks is None and not (blocks := list(blocks_of(model))):
        seen, hint = f"model: {type(model).__name__}", "blocks=list(model.children())"
        raise ValueError(explain(_ASKED, "there are none: the model has no nn.ModuleList with modules", seen, hint))
    places = _places(model, blocks)
    offload = ActivationOffload() if policy.offload else None
    for number, (parent, name, block) in enumerate(places):
        if policy.takes(number):
            wrapped = checkpointed(block, policy, offload, preserve_rng_state=preserve_rng_state)
            parent._modules[name] = wrapped
    return model


def checkpointed(
    block: nn.Module,
    policy: ActivationPolicy,
    offload: ActivationOffload | None = None,
    *,
    preserve_rng_state: bool = False,
) -> nn.Module:
    """Return a block wrapped as a policy says.

    Args:
        block: which.
        policy: of those blocks that it takes.
        offload: what moves activations, one for all blocks of a model; None: nothing does.
        preserve_rng_state: see `checkpoint_blocks`.
    """
    if policy.recompute != "none":
        contexts = policy.contexts()
        options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
        options.update(checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=preserve_rng_state)
        block = checkpoint_wrapper(block, **options)
    return block if offload is None else OffloadedBlock(block, offload)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model: the modules in its outermost `nn.ModuleList`s and `nn.ModuleDict`s.

    >>> len(list(blocks_of(nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])))))
    2

    Args:
        model: that has them.
    """
    for child in model.children():
        yield from child.children() if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else blocks_of(child)


def _places(model: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return where in the model each block is: its parent, and its name there."""
    found = {id(child): (parent, name, child) for parent in model.modules() for name, child in parent.named_children()}
    wrapped = [type(block).__name__ for block in blocks if isinstance(block, ActivationWrapper)]
    missing = [type(block).__name__ for block in blocks if id(block) not in found]
    if missing or wrapped:
        blame = "these are no modules in the model"
        if wrapped:
            blame = "they are checkpointed already"
        seen = f"model: {type(model).__name__}   blocks: {', '.join(missing or wrapped)}"
        raise ValueError(explain(_ASKED, blame, seen, "blocks=list(model.layers), once"))
    return [found[id(block)] for block in blocks]
