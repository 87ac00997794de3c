"""Muon, with AdamW for what is no hidden matrix, on sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from hyper_parallel.core.common.checks import check, check_choice, check_least, read_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.optim.matrices import Exchange, Sharing, share
from hyper_parallel.core.redistribute.api import redistribute
from hyper_parallel.platform import get_platform

_ASKED = "cannot use Muon"


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) for hidden matrices and AdamW for the rest, whatever the layouts of the parameters.

        hidden = [{"params": list(model.layers.parameters())}]
        rest = [{"params": [*model.embed.parameters(), *model.head.parameters()], "use_muon": False}]
        optimizer = Muon(hidden + rest, lr=3e-4, adjust_lr_fn="match_rms_adamw")

    Matrices get what `torch.optim.Muon` computes on one device: the momentum is orthogonalised as a whole by
    Newton-Schulz iterations in bfloat16. Each matrix is computed by one of the ranks that hold shards of it, those of
    one shape together, and the work is balanced over these ranks. A parameter of three dims, as the weights of experts,
    is a stack of matrices. Ranks that hold copies each compute them.

    Communication in `step`, for each group of ranks that share matrices: two all_to_alls, of momentum there and of the
    update back, in bfloat16. Each way a rank receives (and sends, where the work is even) 2 bytes for each element of
    its shards, less what it holds of the matrices it computes. Matrices that lie on one rank, and AdamW: none. All
    ranks of a group must call `step`; a gradient that is None counts as zeros, and its parameter is left alone.

    Memory beside the state (one momentum for a matrix, two moments for other parameters): in `step`, 2 bytes for each
    element of the shards and of the matrices that the rank computes, and some three times the latter while computing.

    Args:
        params: parameters, or groups of them with options of their own, as for any optimizer of torch; DTensors and
            plain tensors. A group with `use_muon=False` is AdamW's.
        lr: learning rate.
        weight_decay: decoupled, of all parameters.
        momentum: share of the old momentum in the new one.
        nesterov: orthogonalise the gradient and the momentum together.
        ns_coefficients: of the iteration's polynomial.
        eps: least norm that a matrix is divided by.
        ns_steps: iterations.
        adjust_lr_fn: "original" (None) multiplies lr by sqrt(max(1, rows / columns)); "match_rms_adamw" by
            0.2 sqrt(max(rows, columns)) (Liu et al. 2025), so that a rate and decay found for AdamW can be kept.
        use_muon: False for AdamW, usually in a group's options.
        betas: of AdamW's moments.
        adamw_eps: added to the root of AdamW's second moment.

    Raises:
        TypeError: an option of another type; params that are no parameters or groups of them.
        ValueError: an option out of its range; a parameter that is neither a matrix nor a stack of matrices, or
            complex, in a group of Muon's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        self._sharings: list[Sharing] | None = None
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        _check_options(options)
        super().__init__(_read_params(params), options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a copy, a pickle or a state dict brings; who computes what is asked anew."""
        super().__setstate__(state)
        self._sharings = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer` does; errors are those of the class."""
        super().add_param_group(_read_params([param_group])[0])
        added = self.param_groups[-1]
        _check_options(added)
        if added["use_muon"]:
            for number, param in enumerate(added["params"]):
                _check_matrix(number, param)
        self._sharings = None

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters; see the class for what is communicated.

        Args:
            closure: computes the loss anew, and is called once.

        Returns:
            The closure's loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["use_muon"]:
                self._step_adamw(group)
        members = [
            _Member(param, group) for group in self.param_groups if group["use_muon"] for param in group["params"]
        ]
        if self._sharings is None:
            self._sharings = share([member.param for member in members])
        updates = [self._momentum(member) for member in members]
        for sharing in self._sharings:
            _step_shared(sharing, members, updates)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as `torch.optim.Optimizer` does, and those that are kept as `main_grad`.

        Args:
            set_to_none: drop them; False: fill them with zeros.
        """
        check("cannot clear gradients", "bool", "True or False", set_to_none=set_to_none)
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                kept = getattr(param, "main_grad", None)
                if kept is not None and set_to_none:
                    param.main_grad = None
                elif kept is not None:
                    _local(kept).zero_()

    def _momentum(self, member: _Member) -> torch.Tensor:
        """Bring the momentum of a parameter up to date and return the rank's shard of what is orthogonalised."""
        param, group = member
        grad = _gradient(param)
        if grad is None:
            return torch.zeros_like(_local(param), dtype=torch.bfloat16)
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer = _local(state["momentum_buffer"])
        grad = grad.to(buffer.dtype)
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return update.bfloat16()  # as Newton-Schulz starts with; half the bytes of float32 on their way

    def _step_adamw(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group by torch's AdamW, shard by shard."""
        by_kind: dict[Any, list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]] = {}
        for param in group["params"]:
            grad = _gradient(param)
            if grad is None:
                continue
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=_local(param).device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            local = _local(param)
            # The fused kernel reads it where the parameter is; torch loads it to wherever it was saved.
            state["step"] = state["step"].to(local.device)
            by_kind.setdefault((local.device, local.dtype), []).append((local, grad.to(local.dtype), state))
        for entries in by_kind.values():
            beta1, beta2 = group["betas"]
            adamw(
                [local for local, _, _ in entries],
                [grad for _, grad, _ in entries],
                [_local(state["exp_avg"]) for _, _, state in entries],
                [_local(state["exp_avg_sq"]) for _, _, state in entries],
                [],
                [state["step"] for _, _, state in entries],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["adamw_eps"],
                maximize=False,
            )


class _Member(NamedTuple):
    param: torch.Tensor
    group: dict[str, Any]


def _step_shared(sharing: Sharing, members: Sequence[_Member], updates: Sequence[torch.Tensor]) -> None:
    """Update the matrices that a group of ranks shares."""
    device = _device(members[sharing.matrices[0].param].param)
    shards = [_stack(updates[matrix.param])[matrix.level].to(device) for matrix in sharing.matrices]
    exchange = Exchange(sharing, shards)
    wholes = exchange.gather()
    computed = list(wholes)
    for places, (coefficients, steps, eps) in _alike(sharing, exchange.owned(), members):
        batch = orthogonalize([wholes[place] for place in places], coefficients, steps, eps)
        for place, whole in zip(places, batch, strict=True):
            computed[place] = whole
    for matrix, shard in zip(sharing.matrices, exchange.scatter(computed), strict=True):
        param, group = members[matrix.param]
        if _kept_gradient(param) is None:
            continue
        own = _stack(_local(param))[matrix.level]
        own.mul_(1 - group["lr"] * group["weight_decay"])
        own.add_(shard.to(own.device), alpha=-_adjusted(group["lr"], group["adjust_lr_fn"], matrix.shape))


def _alike(
    sharing: Sharing, owned: Sequence[int], members: Sequence[_Member]
) -> Iterable[tuple[list[int], tuple[tuple[float, float, float], int, float]]]:
    """Yield the matrices that can be computed together, as indices into `owned`, with the options of the iteration."""
    batches: dict[Any, list[int]] = {}
    for index, place in enumerate(owned):
        matrix = sharing.matrices[place]
        group = members[matrix.param].group
        options = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]
        batches.setdefault((tuple(sorted(matrix.shape)), options), []).append(index)
    for (_, options), places in batches.items():
        yield places, options


def orthogonalize(
    matrices: Sequence[torch.Tensor],
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    eps: float = 1e-7,
) -> list[torch.Tensor]:
    """Return nearly orthogonal matrices: of U S V' about U V', by Newton-Schulz iterations in batched products.

    >>> (result,) = orthogonalize([torch.diag(torch.tensor([3.0, 1.0])).bfloat16()])
    >>> bool(((result.diag() > 0.6) & (result.diag() < 1.3)).all()), result[0, 1].item()
    (True, 0.0)

    The singular values of the result are between about 0.5 and 1.5. Source of the formula and of the default
    coefficients: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).

    Args:
        matrices: of one shape, or of its transpose; in bfloat16.
        coefficients: a, b, c of X <- a X + (b A + c A A) X, where A = X X'.
        steps: iterations.
        eps: least norm that a matrix is divided by.
    """
    a, b, c = coefficients
    x = torch.stack([matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix for matrix in matrices])
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)  # spectral norm at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    rows = [matrix.shape[0] > matrix.shape[1] for matrix in matrices]
    return [whole.mT if turned else whole for whole, turned in zip(x, rows, strict=True)]


def _adjusted(lr: float, how: str | None, shape: tuple[int, int]) -> float:
    rows, columns = shape
    if how == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1.0, rows / max(columns, 1)))


# -- shards of parameters and gradients --------------------------------------------------------------------------------


def _local(x: torch.Tensor) -> torch.Tensor:
    local = x.to_local() if isinstance(x, DTensor) else x.detach()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _kept_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return `grad`, or `main_grad`, where `MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=True)` keeps it."""
    return getattr(param, "main_grad", None) if param.grad is None else param.grad


def _gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return the rank's shard of a parameter's gradient, in the layout of the parameter."""
    grad = _kept_gradient(param)
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = redistribute(grad, param.device_mesh, param.placements)
    if grad is not None and grad.layout != torch.strided:
        blame = "a gradient is sparse"
        raise InvalidValue("cannot update by Muon", blame, f"gradient: {grad.layout}", "sparse=False")
    return None if grad is None else _local(grad)


def _stack(local: torch.Tensor) -> torch.Tensor:
    """Return the rank's shards of a parameter's matrices in dim 0."""
    return local if local.dim() == 3 else local.unsqueeze(0)


def _device(param: torch.Tensor) -> torch.device:
    """Return where matrices are exchanged and computed: offloaded shards are elsewhere."""
    local = _local(param)
    if isinstance(param, DTensor) and local.device.type not in (param.device_mesh.device_type, "meta"):
        return get_platform(param.device_mesh.device_type).device()
    return local.device


# -- what was given --------------------------------------------------------------------------------------------------


_PARAMS = "params=model.parameters(), or a list of groups"


def _read_params(params: object) -> list[Any]:
    """Return parameters, pairs of a name and a parameter, or groups of them, as a list."""
    check(_ASKED, "iterable", _PARAMS, params=params)
    found = list(params)  # type: ignore[call-overload]
    if not found:
        raise InvalidValue(_ASKED, "there is no parameter to update", f"params: {params!r}"[:200], _PARAMS)
    for number, entry in enumerate(found):
        if not isinstance(entry, dict):
            continue
        if "params" not in entry:
            seen = f"params[{number}]: options {', '.join(map(repr, entry)) or 'none'}"
            raise InvalidValue(_ASKED, "a group has no parameters", seen, '{"params": [...], "use_muon": False}')
        given = [entry["params"]] if isinstance(entry["params"], torch.Tensor) else entry["params"]
        entry["params"] = list(given)
    return found


def _check_options(options: dict[str, Any]) -> None:
    given = {name: options[name] for name in ("lr", "weight_decay", "momentum", "eps", "adamw_eps")}
    check(_ASKED, "float", **given)
    check_least(_ASKED, 0, **given)
    check(_ASKED, "bool", nesterov=options["nesterov"], use_muon=options["use_muon"])
    read_int(_ASKED, "ns_steps", options["ns_steps"], 1, "ns_steps=5")
    if options["adjust_lr_fn"] is not None:
        check_choice(_ASKED, "adjust_lr_fn", options["adjust_lr_fn"], ("original", "match_rms_adamw"))
    for name, count, hint in (("ns_coefficients", 3, "(3.4445, -4.7750, 2.0315)"), ("betas", 2, "(0.9, 0.999)")):
        numbers = options[name]
        if len(numbers) != count:
            blame = f"{name} has {len(numbers)} numbers, and {count} are needed"
            raise InvalidValue(_ASKED, blame, f"{name}: {numbers!r}", f"{name}={hint}")
        check(_ASKED, "float", f"{name}={hint}", **{f"{name}[{place}]": number for place, number in enumerate(numbers)})
    check_least(_ASKED, 0, 1, **{f"betas[{place}]": beta for place, beta in enumerate(options["betas"])})


def _check_matrix(number: int, param: torch.Tensor) -> None:
    shape, seen = tuple(param.shape), f"parameter number {number} of the group: {tuple(param.shape)} {param.dtype}"
    if len(shape) not in (2, 3):
        blame = f"a parameter of {len(shape)} dims is neither a matrix nor a stack of matrices"
        hint = 'a group of its own: {"params": [...], "use_muon": False}, which AdamW updates'
        raise InvalidValue(_ASKED, blame, seen, hint)
    if not param.is_floating_point():
        raise InvalidValue(_ASKED, "Muon is for real parameters", seen, "use_muon=False in their group")
