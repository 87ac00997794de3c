"""Engine of `zero <= 1`: whole weights on every rank, flat gradient buffers, optimizer state split or whole.

This is ZeRO's first stage (Rajbhandari et al. 2020, section 5.1), as distributed optimizers train with it: gradients
of all micro-batches add up in buffers that live for the whole run, in `reduce_dtype`; after the last micro-batch they
are reduced, bucket by bucket; each rank updates its part of the weights in float32, and the parts are gathered. It is
real code on real collectives, which the recorder follows like any other. Here a buffer, and so a bucket, ends where a
layer does, so that layers are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.core.fully_shard.comm import Pending, all_gather, all_reduce, reduce_scatter
from hyper_parallel.core.mesh.parallel_dims import ParallelDims

__all__ = ["BUCKET", "Replicated"]

# Elements that a gradient bucket has at least, as is usual: the default of Megatron-LM's `ddp_bucket_size`.
BUCKET = 40_000_000


class Replicated:
    """Whole weights, a flat gradient buffer, and the optimizer.

    Args:
        module: whose parameters move into flat buffers, in place.
        dims: the degrees; the mesh is built. Gradients are reduced over all ranks with other tokens; the state of the
            optimizer is split over dp_shard x ep x cp, that of experts over `expert_shards` ranks.
        recipe: a `PublishedRecipe`: dtypes, `zero` 0 or 1, what overlaps.
        layers: the layer of parameters, by their identity; those of none are not there.
        before: called with the layer whose buffers are worked on next.

    Attributes:
        last: whether the micro-batch under way is the step's last one.
        flats: the buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        dims: ParallelDims,
        recipe: Any,
        layers: Mapping[int, int],
        before: Callable[[int | None], object],
    ) -> None:
        self.recipe = recipe
        self.last = True
        self.before = before
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        experts = [param for name, param in named if ".experts." in name and dims.ep_enabled]
        chosen = {id(param) for param in experts}
        copies, shards = _group(dims, "dp_replicate"), _group(dims, "dp_shard", "ep", "cp")
        of_experts = _group(dims, "dp_shard", *(("cp",) if "cp" not in dims.expert_axes else ()))
        together: dict[tuple[int | None, bool], list[nn.Parameter]] = {}
        for _, param in named:
            together.setdefault((layers.get(id(param)), id(param) in chosen), []).append(param)
        self.flats = [
            _Flat(self, params, of_experts if is_expert else shards, copies, layer)
            for (layer, is_expert), params in together.items()
        ]

    def finish(self) -> None:
        """Reduce what has not been reduced during backward, and wait for all of it."""
        self._each(_Flat.finish)
        self._each(_Flat.wait)

    def step(self) -> None:
        """Update the weights, and gather them."""
        self._each(_Flat.step)
        self._each(_Flat.wait)

    def _each(self, work: Callable[[_Flat], object]) -> None:
        for flat in self.flats:
            self.before(flat.layer)
            work(flat)
        self.before(None)


def _group(dims: ParallelDims, *axes: str) -> dist.ProcessGroup | None:
    mesh = dims.mesh_over(*axes)
    return None if mesh is None else mesh.get_group()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Bucket:
    """Some parameters whose gradients are reduced together: the elements from `start` to `end` of the buffers."""

    def __init__(self, params: Sequence[nn.Parameter], start: int, end: int) -> None:
        self.params, self.start, self.end = params, start, end
        self.pending = len(params)


class _Flat:
    """The buffers of parameters whose gradients go over the same ranks."""

    def __init__(
        self,
        owner: Replicated,
        params: list[nn.Parameter],
        group: Any,
        copies: dist.ProcessGroup | None,
        layer: int | None,
    ) -> None:
        recipe = owner.recipe
        self.owner, self.group, self.copies, self.layer = owner, group, copies, layer
        self.parts = 1 if group is None else group.size()
        self.splits = recipe.zero == 1 and self.parts > 1
        self.places: dict[int, int] = {}
        self.bucket_of: dict[int, _Bucket] = {}
        self.buckets = self._make_buckets(params)
        count = self.buckets[-1].end
        self.weights = torch.empty(count, dtype=params[0].dtype)
        self.grads = torch.zeros(count, dtype=recipe.precision.dtype("reduce"))
        own = count // self.parts if self.splits else count
        param, master, kept = (recipe.precision.dtype(of) for of in ("param", "master", "moments"))
        self.master = torch.zeros(own) if master == torch.float32 != param else None
        self.moments = [torch.zeros(own, dtype=kept) for _ in range(2)]
        self.tick = torch.zeros(())
        self.works: list[Pending] = []
        for param in params:
            local, start = _local(param), self.places[id(param)]
            local.data = self.weights[start : start + local.numel()].view(local.shape)
            param.register_post_accumulate_grad_hook(self._arrived)

    def _make_buckets(self, params: list[nn.Parameter]) -> list[_Bucket]:
        """Buckets in the order in which backward comes to them, each padded to equal parts."""
        buckets: list[_Bucket] = []
        some: list[nn.Parameter] = []
        start = size = 0
        for param in reversed(params):
            self.places[id(param)] = start + size
            size += _local(param).numel()
            some.append(param)
            if size >= BUCKET or param is params[0]:
                end = start + -(-size // self.parts) * self.parts
                bucket = _Bucket(some, start, end)
                self.bucket_of.update({id(each): bucket for each in some})
                buckets.append(bucket)
                start, size, some = end, 0, []
        return buckets

    def _arrived(self, param: torch.Tensor) -> None:
        """Add a gradient to the buffer; the last one of a bucket lets it be reduced."""
        start, grad = self.places[id(param)], param.grad
        assert grad is not None, "a hook after a gradient has been accumulated"
        local = _local(grad)
        self.grads[start : start + local.numel()].view(local.shape).add_(local)
        param.grad = None
        bucket = self.bucket_of[id(param)]
        bucket.pending -= self.owner.last
        if bucket.pending == 0 and self.owner.recipe.overlap_grad_reduce:
            self._reduce(bucket)

    def _reduce(self, bucket: _Bucket) -> None:
        part = self.grads[bucket.start : bucket.end]
        if self.splits:
            own = part[: part.numel() // self.parts]
            self.works.append(reduce_scatter(part, self.group, by_all_to_all=False, out=own))
            part = own
        elif self.group is not None:
            self.works.append(all_reduce(part, self.group))
        if self.copies is not None:
            self.works.append(all_reduce(part, self.copies))

    def finish(self) -> None:
        """Reduce what is left."""
        if not self.owner.recipe.overlap_grad_reduce:
            for bucket in self.buckets:
                self._reduce(bucket)
        for bucket in self.buckets:
            bucket.pending = len(bucket.params)

    def step(self) -> None:
        """Update this rank's part of the weights, and get the other parts."""
        own = len(self.moments[0])
        grads = self.grads[:own]
        weights = self.weights[:own] if self.master is None else self.master
        if grads.dtype == weights.dtype:
            self._adamw(weights, grads)
        else:
            self._adamw(weights, grads.to(weights.dtype))
        if self.master is not None:
            self.weights[:own].copy_(self.master)
        if self.splits:
            for bucket in self.buckets:
                whole = self.weights[bucket.start : bucket.end]
                part = whole[: whole.numel() // self.parts]
                self.works.append(all_gather(whole, part, self.group))
                if not self.owner.recipe.overlap_param_gather:
                    self.wait()
        self.grads.zero_()

    def _adamw(self, weights: torch.Tensor, grads: torch.Tensor) -> None:
        torch._fused_adamw_(
            [weights],
            [grads],
            self.moments[:1],
            self.moments[1:],
            [],
            [self.tick],
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def wait(self) -> None:
        """Wait for what is under way."""
        for work in self.works:
            work.wait()
        self.works = []
