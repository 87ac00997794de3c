"""Policies of activation memory: which blocks backward computes again, and whose activations wait on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hyper_parallel.core.common.checks import check_least
from hyper_parallel.core.common.errors import explain, nearest
from hyper_parallel.platform import attention_operators

__all__ = ["KINDS", "ActivationPolicy"]

KINDS = ("none", "selective", "alternate", "full")
"""What backward computes again of a block, by name; see `ActivationPolicy`."""
_ASKED = "cannot use an activation policy"
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
            raise ValueError(explain(_ASKED, blame, f"recompute: {kind!r}", hint))
        if isinstance(kind, tuple) and not (kind and all(isinstance(op, torch._ops.OpOverload) for op in kind)):
            seen, hint = f"recompute: {kind!r}", "(torch.ops.aten.mm.default,)"
            raise TypeError(explain(_ASKED, "what is kept must be operators, each with its overload", seen, hint))
        if not (isinstance(kind, (str, tuple)) or callable(kind)):
            seen, hint = f"recompute: {kind!r}", "'full', a tuple of operators, or a policy function"
            raise TypeError(explain(_ASKED, f"recompute is a {type(kind).__name__}", seen, hint))
        check_least(_ASKED, 1, every=self.every, first=self.first)
        if self.offload and kind not in ("none", "full"):
            blame = "what selective checkpointing keeps is no saved tensor, so that it cannot be on the host"
            seen = f"recompute: {kind!r}, offload: True"
            raise ValueError(explain(_ASKED, blame, seen, "'offload', or 'full offload'"))

    @classmethod
    def of(cls, policy: Any, *, asked: str = _ASKED) -> ActivationPolicy:
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
    return ValueError(explain(asked, blame, f"checkpointing: {text!r}", hint))


def _number(asked: str, text: str, word: str) -> int:
    if not word.isdigit():
        raise ValueError(
            explain(asked, f"a number is expected where {word!r} is", f"checkpointing: {text!r}", "'full first 8'")
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
