"""Parameters that communicate together: one buffer of shards, one of whole parameters, one gather between them."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.core.fully_shard.comm import Pending, all_gather
from hyper_parallel.core.fully_shard.mesh import DataParallelMesh
from hyper_parallel.core.fully_shard.param import ShardedParam

__all__ = ["Bucket"]


class Bucket:
    """The parameters of one unit and dtype.

    The local parts of all sharded parameters are views of one flat buffer, which the all_gather reads directly.
    The gathered buffer holds rank after rank; the whole parameters lie one after the other in a buffer of their
    own, whose storage is freed when resharded. Autograd keeps the whole parameters as they are; they get their
    data back in the same place for backward.

    Args:
        params: The parameters, in registration order.
        wholes: Their values, each whole.
        mesh: Where they go.
        param_dtype: Dtype of the whole parameters, if these are floating-point; None: their own.
    """

    def __init__(
        self,
        params: list[ShardedParam],
        wholes: list[nn.Parameter],
        mesh: DataParallelMesh,
        param_dtype: torch.dtype | None,
    ) -> None:
        self.params = params
        self.mesh = mesh
        self.param_dtype = param_dtype
        self.gathered = False
        self.chunks = [param.chunk for param in params]
        self.starts = [0, *accumulate(self.chunks)]
        self._pack([whole.detach()[param.rows] for param, whole in zip(params, wholes, strict=True)])
        for param, whole, view in zip(params, wholes, self._views(), strict=True):
            param.make_sharded(view, mesh, whole)
        self._make_wholes()

    # -- the shards --------------------------------------------------------------------------------------------

    def _pack(self, locals_: list[torch.Tensor]) -> None:
        """Copy the parts into a new flat buffer on the mesh's device (meta stays meta)."""
        device = locals_[0].device if locals_[0].is_meta else self.mesh.platform.device()
        self.shards = torch.empty(self.starts[-1], dtype=locals_[0].dtype, device=device)
        if device.type == "meta":
            return
        self.shards.zero_()  # padding is sent and received as well
        for view, part in zip(self._views(), locals_, strict=True):
            view.copy_(part)

    def _views(self) -> list[torch.Tensor]:
        return [
            self.shards[start : start + param.local_numel].view(param.local_shape)
            for start, param in zip(self.starts, self.params, strict=False)
        ]

    @property
    def version(self) -> int:
        """Grows when a part changes; what is done through ``.data`` leaves no trace."""
        return sum(param.sharded._version + param.local._version for param in self.params)

    def was_replaced(self) -> bool:
        """Whether parts were replaced from outside, as ``module.to`` and ``to_empty`` do."""
        base, size = self.shards.data_ptr(), self.shards.element_size()
        dtype, device = self.shards.dtype, self.shards.device
        replaced = False
        for param, start in zip(self.params, self.starts, strict=False):
            slot = param.slots[0]
            registered: Any = slot.module._parameters.get(slot.name)
            if registered is not param.sharded and registered is not param.unsharded:
                if not isinstance(registered, DTensor):
                    raise RuntimeError(
                        f"the sharded parameter {param.name!r} was replaced by a {type(registered).__name__}\n"
                        "  expected: a DTensor with the layout it had\n"
                        "  try: change sharded parameters in place, or with load_state_dict"
                    )
                param.sharded, replaced = cast(nn.Parameter, registered), True
            local = param.local
            # An empty part tells nothing by its address, but must follow the others: all ranks decide alike.
            moved = local.numel() > 0 and not local.is_meta and local.data_ptr() != base + start * size
            replaced = replaced or moved or local.dtype != dtype or local.device != device
        if not replaced and device.type == "meta" and self._needs_data:
            raise self._no_data_error()
        return replaced

    def repack(self) -> None:
        """Take over the parts that were replaced."""
        locals_ = [param.local.detach() for param in self.params]
        if self._needs_data and any(part.is_meta for part in locals_):
            raise self._no_data_error()
        if len({part.dtype for part in locals_}) > 1:
            raise RuntimeError(
                "parameters that were wrapped in one dtype now have several: "
                + ", ".join(sorted(f"{p.name} is {p.local.dtype}" for p in self.params))
                + "\n  try: convert the whole module to one dtype before wrapping"
            )
        with torch.inference_mode(False):  # an evaluation may be the first to notice; training follows
            self._pack(locals_)
            for param, view in zip(self.params, self._views(), strict=True):
                param.sharded._local_tensor = view  # type: ignore[attr-defined]
                param.show(param.sharded)
            self._make_wholes()

    @property
    def _needs_data(self) -> bool:
        """Whether the ranks' devices have data; on simulated ranks they may have none."""
        return self.mesh.platform.device().type != "meta"

    def _no_data_error(self) -> RuntimeError:
        names = ", ".join(param.name for param in self.params if param.local.is_meta)
        return RuntimeError(
            f"parameters are still on the meta device when they are first gathered: {names}\n"
            "  seen: no data to gather\n"
            "  try: model.to_empty(device=...) and then initialise them, or load a checkpoint, before training"
        )

    # -- the wholes --------------------------------------------------------------------------------------------

    def _make_wholes(self) -> None:
        """Make the whole parameters over a buffer that has a place for each and, so far, no memory."""
        ranks = self.mesh.shard_size
        dtype = self.shards.dtype
        if self.param_dtype is not None and dtype.is_floating_point:
            dtype = self.param_dtype
        self.wholes = torch.empty(ranks * self.starts[-1], dtype=dtype, device=self.shards.device)
        self.bytes_whole = self.wholes.untyped_storage().nbytes()
        for param, start in zip(self.params, self.starts, strict=False):
            view = self.wholes[ranks * start : ranks * start + param.numel].view(param.shape)
            # .data: filling the buffer must not look to autograd like a change of the parameter
            param.unsharded = nn.Parameter(view.data, requires_grad=param.sharded.requires_grad)
            param.unsharded.__dict__.update(param.attributes)
        self.free()

    @property
    def wholes_pointer(self) -> int:
        """Where the whole parameters' memory starts; 0 while freed."""
        return self.wholes.untyped_storage().data_ptr()

    def allocate(self) -> None:
        """Give the whole parameters their memory back."""
        self.wholes.untyped_storage().resize_(self.bytes_whole)

    def free(self) -> None:
        """Free the memory of the whole parameters; the tensors stay, for autograd."""
        self.gathered = False
        if self.shards.device.type != "meta":
            self.wholes.untyped_storage().resize_(0)

    def start_gather(self) -> Pending:
        """Start to gather the shards into a buffer that holds rank after rank."""
        source = self.shards.to(self.wholes.dtype)
        ranks = self.mesh.shard_size
        if len(self.params) == 1 or ranks == 1:  # rank after rank is then also the order in the whole parameters
            self.allocate()
            target = self.wholes
        else:
            target = torch.empty(ranks * source.numel(), dtype=source.dtype, device=source.device)
        return all_gather(target, source, self.mesh.shard_group)

    def finish_gather(self, received: torch.Tensor) -> None:
        """Put what was gathered in its place."""
        if received is not self.wholes:
            self.allocate()
            ranks = self.mesh.shard_size
            places = [
                self.wholes[ranks * start : ranks * end].view(ranks, end - start)
                for start, end in zip(self.starts, self.starts[1:], strict=False)
            ]
            torch.split_with_sizes_copy(received.view(ranks, -1), self.chunks, dim=1, out=places)
        self.gathered = True

    def show_wholes(self) -> None:
        """Let the modules see the whole parameters."""
        for param in self.params:
            if param.unsharded.requires_grad != param.sharded.requires_grad:
                param.unsharded.requires_grad_(param.sharded.requires_grad)
            param.show(param.unsharded)

    def show_shards(self) -> None:
        """Let the modules, and thereby optimizers and state dicts, see the sharded parameters."""
        for param in self.params:
            param.show(param.sharded)
