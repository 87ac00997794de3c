"""Activation memory of a model's blocks: the policy, which blocks compute again or wait on the host, and the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hyper_parallel.core.activations.offload import ActivationOffload, OffloadedBlock
from hyper_parallel.core.common.checks import check, check_fields, check_least
from hyper_parallel.core.common.errors import InvalidType, InvalidValue, class_name, nearest
from hyper_parallel.platform import attention_operators

__all__ = ["KINDS", "ActivationPolicy", "blocks_of", "checkpoint_blocks", "checkpointed"]

KINDS = ("none", "selective", "alternate", "full")
"""What backward computes again of a block, by name; see `ActivationPolicy`."""
_ASKED, _POLICY = "cannot checkpoint blocks", "cannot use an activation policy"
_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_mm.default,
    }
)
"""What selective checkpointing keeps, with fused attention: the expensive part; the rest is made again."""


@dataclass(frozen=True)
class ActivationPolicy:
    """What blocks keep for backward, and where.

    >>> ActivationPolicy.of("full every 2 first 8")
    ActivationPolicy(recompute='full', offload=False, every=2, first=8)
    >>> [ActivationPolicy.of("offload every 3").takes(block) for block in range(4)]
    [True, False, False, True]

    Args:
        recompute: what backward computes again. "full": all, and only a block's inputs are kept; "selective": all but
            matrix products and attention, whose results are kept; "alternate": every other matrix product as well;
            "none": nothing. Or what is kept: operators such as `torch.ops.aten.mm.default`; or a policy function of
            `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
        offload: what is kept waits on the host; with "none", all that autograd saves, with "full" a block's inputs.
        every: of every so many blocks the first one is taken.
        first: only blocks with lower numbers are; None: all.

    Raises:
        TypeError: of another type.
        ValueError: no such kind; numbers below 1; results that operators keep, on the host.
    """

    recompute: str | tuple[Any, ...] | Callable[..., CheckpointPolicy] = "none"
    offload: bool = False
    every: int = 1
    first: int | None = None

    def __post_init__(self) -> None:
        kind: Any = self.recompute
        if isinstance(kind, str) and kind not in KINDS:
            blame, hint = f"there is no kind {kind!r}", nearest(kind, KINDS)
            raise InvalidValue(_POLICY, blame, f"recompute: {kind!r}", hint)
        if isinstance(kind, tuple) and not (kind and all(isinstance(op, torch._ops.OpOverload) for op in kind)):
            seen, hint = f"recompute: {kind!r}", "(torch.ops.aten.mm.default,)"
            raise InvalidType(_POLICY, "what is kept must be operators, each with its overload", seen, hint)
        if not (isinstance(kind, (str, tuple)) or callable(kind)):
            seen, hint = f"recompute: {kind!r}", "'full', a tuple of operators, or a policy function"
            raise InvalidType(_POLICY, f"recompute is a {type(kind).__name__}", seen, hint)
        check_fields(_POLICY, self)
        check_least(_POLICY, 1, every=self.every, first=self.first)
        if self.offload and kind not in ("none", "full"):
            blame = "what selective checkpointing keeps is no saved tensor, so that it cannot be on the host"
            seen = f"recompute: {kind!r}, offload: True"
            raise InvalidValue(_POLICY, blame, seen, "'offload', or 'full offload'")

    @classmethod
    def of(cls, policy: Any, *, asked: str = _POLICY) -> ActivationPolicy:
        """Read a policy: itself, text, operators that are kept, or torch's policy function.

        >>> print(ActivationPolicy.of("full offload every 2"))
        full offload every 2

        Args:
            policy: text is a kind, "offload" or both; then, each at most once, "every N" and "first N". "none" stands
                alone.
            asked: the start of an error message about text, "cannot ...".

        Raises:
            TypeError: of another type.
            ValueError: text that says something else.
        """
        if isinstance(policy, cls):
            return policy
        if isinstance(policy, str):
            return cls._of_text(policy, asked)
        if isinstance(policy, (list, tuple, set, frozenset)):
            return cls(tuple(policy))
        return cls(policy)

    @classmethod
    def _of_text(cls, text: str, asked: str) -> ActivationPolicy:
        words, given = text.split(), dict[str, Any]()
        while words:
            word = words.pop(0)
            key = {"offload": "offload", "every": "every", "first": "first"}.get(word, "recompute")
            if key in given or (key == "recompute" and word not in KINDS):
                raise _unread(asked, text, word)
            given[key] = word if key == "recompute" else True
            if key in ("every", "first"):
                given[key] = _number(asked, text, words.pop(0) if words else "")
        if not given or ({"recompute": "none"}.items() <= given.items() and len(given) > 1):
            raise _unread(asked, text, text)
        if not {"recompute", "offload"} & set(given):
            raise _unread(asked, text, text.split()[0])
        return cls(**given)

    @property
    def is_none(self) -> bool:
        """Whether blocks keep what they always keep, on their device."""
        return self.recompute == "none" and not self.offload

    @property
    def kind(self) -> str:
        """The name of what backward computes again: one of `KINDS`, or "selective" for operators and functions."""
        return self.recompute if isinstance(self.recompute, str) else "selective"

    def takes(self, block: int) -> bool:
        """Whether a block is one of those that the policy is for.

        Args:
            block: its number, from 0 on, among those of a model or of a stage of a pipeline.
        """
        return not self.is_none and block % self.every == 0 and (self.first is None or block < self.first)

    def contexts(self) -> Callable[[], Any] | None:
        """Return what `torch.utils.checkpoint.checkpoint` takes as `context_fn`; None: there is none to give."""
        if self.recompute in ("none", "full"):
            return None
        if self.recompute == "alternate":
            return _keep_alternate_products
        chosen: Any = self.recompute
        if chosen == "selective":
            chosen = _keeping(_PRODUCTS | attention_operators())
        elif isinstance(chosen, tuple):
            chosen = _keeping(frozenset(chosen))
        return partial(create_selective_checkpoint_contexts, chosen)

    def __str__(self) -> str:
        """Return the text that `of` reads; of operators and functions, what they are."""
        if self.is_none:
            return "none"
        words = [] if self.recompute == "none" else [self.kind]
        words += ["offload"] * self.offload
        words += [f"every {self.every}"] * (self.every > 1)
        words += [] if self.first is None else [f"first {self.first}"]
        return " ".join(words)


def _unread(asked: str, text: str, word: str) -> ValueError:
    known = (*KINDS, "offload", "every", "first")
    blame = f"there is no kind of checkpointing {text!r}" if word == text else f"{word!r} is not expected there"
    hint = nearest(word, known) if word not in known else "'full', 'offload', 'full offload every 2 first 8'"
    return InvalidValue(asked, blame, f"checkpointing: {text!r}", hint)


def _number(asked: str, text: str, word: str) -> int:
    if not word.isdecimal():
        raise InvalidValue(
            asked, f"a number is expected where {word!r} is", f"checkpointing: {text!r}", "'full first 8'"
        )
    return int(word)


def _keeping(kept: frozenset[Any]) -> Callable[..., CheckpointPolicy]:
    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def _keep_alternate_products() -> Any:
    counts = {False: 0, True: 0}  # of forward, and of the second computation
    keeps = _keeping(_PRODUCTS | attention_operators())

    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default):
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return keeps(context, op)

    return create_selective_checkpoint_contexts(choose)


M = TypeVar("M", bound=nn.Module)


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

    Each block that the policy takes is wrapped, in its place, or in all of its places; names in state dicts stay. Call
    it once tensors are split inside of blocks, and before `fully_shard` or `hsdp` wraps them.

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
        TypeError: preserve_rng_state is no bool.
        ValueError: a policy that says nothing known; no blocks; blocks that are no
            modules of the model, or wrapped already.
    """
    check(_ASKED, bool, "preserve_rng_state=True", preserve_rng_state=preserve_rng_state)
    policy = ActivationPolicy.of(policy)
    if policy.is_none:
        return model
    if blocks is None and not (blocks := list(blocks_of(model))):
        seen, hint = f"model: {class_name(model)}", "blocks=list(model.children())"
        raise InvalidValue(_ASKED, "there are none: the model has no nn.ModuleList with modules", seen, hint)
    places = _places(model, blocks)
    offload = ActivationOffload() if policy.offload else None
    for number, (block, slots) in enumerate(places.items()):
        if policy.takes(number):
            wrapped = checkpointed(block, policy, offload, preserve_rng_state=preserve_rng_state)
            for parent, name in slots:
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

    Of a list or dict of such lists and dicts, the blocks are the modules in these.

    >>> len(list(blocks_of(nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])))))
    2

    Args:
        model: that has them.
    """
    containers = (nn.ModuleList, nn.ModuleDict)
    for child in model.children():
        if isinstance(model, containers) and not isinstance(child, containers):
            yield child
        else:
            yield from blocks_of(child)


def _places(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return where in the model each block is: its parents, and its names there; one that is used again has several."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():  # `named_children()` has a child under its first name only
            if child is not None:
                found.setdefault(id(child), []).append((parent, name))
    wrapped = [class_name(block) for block in blocks if isinstance(block, ActivationWrapper)]
    missing = [class_name(block) for block in blocks if id(block) not in found]
    if missing or wrapped:
        blame = "these are no modules in the model"
        if wrapped:
            blame = "they are checkpointed already"
        seen = f"model: {class_name(model)}   blocks: {', '.join(missing or wrapped)}"
        raise InvalidValue(_ASKED, blame, seen, "blocks=list(model.layers), once")
    return {block: found[id(block)] for block in blocks}
