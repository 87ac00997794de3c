"""Parameters that gather other tensors than their values: FSDP2's tensor extension."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.fully_shard.bucket import Bucket, Storage, computed_in
from hyper_parallel.core.fully_shard.comm import Pending, all_gather
from hyper_parallel.core.fully_shard.param import ManagedParam
from hyper_parallel.core.fully_shard.policy import MixedPrecisionPolicy

__all__ = ["ExtensionBucket"]


class ExtensionBucket(Bucket):
    """The parameters of a unit that have ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

    The former gives the tensors to gather, of any dtypes; the latter makes the unsharded parameter of them. All of them
    travel as the bytes of one message. As in torch, the unsharded parameter is made once, by the first gather, and
    filled again by the later ones (``out``), because autograd may have kept it.

    Args:
        params: The parameters, split on dim 0 or whole on every rank.
        wholes: Their values, each whole.
        group: The ranks that hold the shards; None where every rank has the whole.
        storage: Where the shards are kept.
        mp_policy: What the extension is told of dtypes.
    """

    def __init__(
        self,
        params: list[ManagedParam],
        wholes: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
        storage: Storage,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        self.mp_policy = mp_policy
        self._mesh = _shard_mesh(params[0])
        super().__init__(params, wholes, group, storage, mp_policy.param_dtype)

    def _keep(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        kept = []
        for part, param in zip(parts, self.params, strict=True):
            if part.is_meta:
                kept.append(part)
                continue
            if part.numel() < param.numel:  # the rest of the whole's memory is to be freed
                part = part.new_zeros(param.local_shape).copy_(part)
            if part.device != self.storage.device:
                part = part.to(self.storage.device)
            kept.append(part.pin_memory() if self.storage.pinned else part)
        return kept

    # -- the unsharded parameters ------------------------------------------------------------------------------------

    def _make_wholes(self) -> None:
        """Let parameters on meta stand in for the unsharded ones, which the first gather makes."""
        first = self.params[0].local
        self.device = first.device
        self.dtypes = [param.local.dtype for param in self.params]
        self.compute_device = first.device if first.is_meta else self.storage.compute
        self.compute_dtype = computed_in(first.dtype, self.param_dtype)
        self.aliased = self.gathered = False
        self._kinds: list[list[tuple[torch.Size, torch.dtype]]] = []  # of what each parameter gathers
        self._metadata: list[Any] = []
        self._outputs: list[torch.Tensor] = []  # bytes, rank after rank; of all parameters
        self._memory_of: dict[int, tuple[Any, int]] = {}  # storages that are freed, and how large they are
        self._sent: torch.Tensor | None = None  # read until the gather is through
        self._made_wholes = False
        for param in self.params:
            dtype = computed_in(param.local.dtype, self.param_dtype)
            param.make_unsharded(torch.empty(param.shape, dtype=dtype, device="meta"))
        self._remember()

    def owns_memory_of(self, pointer: int) -> bool:
        """Whether memory that starts at ``pointer`` will be freed."""
        return any(storage.data_ptr() == pointer for storage, _ in self._memory_of.values())

    def allocate(self) -> None:
        """Give what was gathered, and what the extension has made of it, their memory back."""
        for storage, size in self._memory_of.values():
            if storage.nbytes() != size:
                storage.resize_(size)

    def free(self) -> None:
        """Free the memory of both; the tensors stay, for autograd."""
        self.gathered = False
        for storage, _ in self._memory_of.values():
            storage.resize_(0)

    def _free_later(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not tensor.is_meta:
                self._memory_of[storage._cdata] = (storage, storage.nbytes())

    # -- the gather --------------------------------------------------------------------------------------------------

    def start_gather(self) -> Pending:
        """Start to gather what the extensions give, as one message of bytes."""
        # What is made here outlives an evaluation in inference mode, and must not be of it.
        with torch.inference_mode(False), torch.no_grad():
            sources = [_bytes(tensor) for tensor in self._inputs()]
            widths = [source.numel() for source in sources]
            if not self._outputs:
                self._outputs = [s.new_empty(self.ranks * width) for s, width in zip(sources, widths, strict=True)]
                self._free_later(self._outputs)
            self._check_widths(widths)
            if self.group is None or self.ranks == 1:
                self.allocate()
                torch._foreach_copy_(self._outputs, sources)
                return Pending(None, self._outputs[0])
            if self.all_gather_with is None and len(sources) == 1:
                self.allocate()
                self._sent = sources[0]
                return all_gather(self._outputs[0], sources[0], self.group)
            sent = sources[0] if len(sources) == 1 else torch.cat(sources)
            if self.all_gather_with is None:
                self._sent = sent
                return all_gather(sent.new_empty(self.ranks * sent.numel()), sent, self.group)
            comm: Any = self.all_gather_with
            target = comm.allocate((self.ranks * sent.numel(),), dtype=sent.dtype, device=sent.device)
            work = comm(output_tensor=target, input_tensor=sent, group=self.group, async_op=True)
            return Pending(work, target, keep=(sent,))

    def _inputs(self) -> list[torch.Tensor]:
        """What the extensions give to gather, each padded to the size that it has on the first rank."""
        inputs: list[torch.Tensor] = []
        self._kinds, self._metadata = [], []
        for param in self.params:
            local: Any = param.local
            if local.device != self.compute_device:
                local = local.to(self.compute_device, non_blocking=True)
            arguments: tuple[Any, ...] = (self._mesh,)
            if len(inspect.signature(local.fsdp_pre_all_gather).parameters) > 1:
                stride = tuple(prod(param.shape[i + 1 :]) for i in range(len(param.shape)))
                arguments = (self._mesh, param.shape, stride, param.slots[0].module, self.mp_policy)
            tensors, metadata = local.fsdp_pre_all_gather(*arguments)
            padded = [_padded(param, tensor) for tensor in tensors]
            self._kinds.append([(tensor.shape, tensor.dtype) for tensor in padded])
            self._metadata.append(metadata)
            inputs += padded
        return inputs

    def _check_widths(self, widths: list[int]) -> None:
        before = [output.numel() // self.ranks for output in self._outputs]
        if widths != before:
            raise RuntimeError(
                explain(
                    f"cannot gather {', '.join(param.name for param in self.params)}",
                    "fsdp_pre_all_gather gives other tensors than the first time, and autograd may keep those",
                    f"seen: {widths} bytes, before: {before}",
                    "tensors of one shape and dtype each time; wrap again to change them",
                )
            )

    def finish_gather(self, received: torch.Tensor, *, keep_piece: bool = False) -> None:
        """Have the extensions make, or fill, the unsharded parameters."""
        del keep_piece  # of a smaller world: there is no shard of it that an extension could give
        self._sent = None
        with torch.inference_mode(False), torch.no_grad():
            self.allocate()
            if received is not self._outputs[0]:
                widths = [output.numel() // self.ranks for output in self._outputs]
                rows = [output.view(self.ranks, width) for output, width in zip(self._outputs, widths, strict=True)]
                torch.split_with_sizes_copy(received.view(self.ranks, sum(widths)), widths, dim=1, out=rows)
            place = 0
            for param, kinds, metadata in zip(self.params, self._kinds, self._metadata, strict=True):
                flat = self._outputs[place : place + len(kinds)]
                place += len(kinds)
                # .data: filling the memory must not look to autograd like a change of what it has kept
                outputs = [
                    output.data.view(dtype).view([self.ranks * n for n in shape[:1]] + list(shape[1:]))
                    for output, (shape, dtype) in zip(flat, kinds, strict=True)
                ]
                if param.is_uneven:
                    outputs = [output[: param.size] for output in outputs]
                self._make_or_fill(param, tuple(outputs), metadata)
            self._made_wholes = True
            self.compute_dtype = self.params[0].unsharded.dtype  # in which its gradient comes
        self._metadata = []
        self.gathered = True

    def _make_or_fill(self, param: ManagedParam, outputs: tuple[torch.Tensor, ...], metadata: Any) -> None:
        """Let the extension of one parameter make the unsharded one or, later on, fill it."""
        local: Any = param.local
        dtype = computed_in(local.dtype, self.param_dtype)
        if self._made_wholes:
            with torch.autograd._unsafe_preserve_version_counter(param.unsharded):
                local.fsdp_post_all_gather(outputs, metadata, dtype, out=param.unsharded)
            return
        whole, inner = local.fsdp_post_all_gather(outputs, metadata, dtype)
        self._free_later(inner)
        if whole.shape != param.shape:
            raise RuntimeError(
                explain(
                    f"cannot use what fsdp_post_all_gather returns for {param.name!r}",
                    "it is not of the shape of the parameter",
                    f"seen: {tuple(whole.shape)}, expected: {tuple(param.shape)}",
                    "all_gather_outputs, one below the other along dim 0",
                )
            )
        param.make_unsharded(whole)


def _padded(param: ManagedParam, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor to gather as large as on the first rank, which has no padding.

    Raises:
        RuntimeError: The shards are uneven, and this is not one value per element: nobody can know its size elsewhere.
            All ranks raise.
    """
    if not param.is_uneven:
        return tensor
    shape = torch.Size((param.rows, *param.shape[1:]))
    if tensor.shape == shape:
        return tensor
    if tensor.shape != param.local_shape:
        raise RuntimeError(
            explain(
                f"cannot gather parameter {param.name!r}",
                "its shards differ in size, and fsdp_pre_all_gather gives a tensor of another shape than its shard's",
                f"shape: {tuple(param.shape)} over {param.ranks} ranks   given: {tuple(tensor.shape)}   shard: "
                f"{tuple(param.local_shape)}",
                f"a size of dim 0 that {param.ranks} divides; or what is no value of one element in the metadata",
            )
        )
    padded = tensor.new_zeros(shape)
    padded[: param.length].copy_(tensor)
    return padded


def _shard_mesh(param: ManagedParam) -> DeviceMesh:
    """The 1-D mesh of the ranks that hold the shards; of a parameter that keeps its layout, the one it is on."""
    data = param.home.data
    if data is None:
        return param.home.mesh
    if data.mesh.ndim == 1:
        return data.mesh
    if data.mesh.mesh_dim_names is not None:
        return data.mesh[data.mesh.mesh_dim_names[-1]]
    return DeviceMesh.from_group(data.shard_group, data.mesh.device_type)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
