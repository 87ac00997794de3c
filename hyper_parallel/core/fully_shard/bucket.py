"""Parameters that communicate together: their shards, a buffer of unsharded parameters, one gather between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.errors import InvalidState
from hyper_parallel.core.common.torch_compat import flat_bytes, plain_name
from hyper_parallel.core.fully_shard.comm import GroupLog, Pending, all_gather, all_gather_each, broadcast_each
from hyper_parallel.core.fully_shard.param import ManagedParam
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy
from hyper_parallel.platform import Platform, Stream


class NoDataError(RuntimeError):
    """Shards are on the meta device; the unit says which."""


class CopyStreams:
    """The streams on which shards come from the host and gradients go there: beside what computes, as in FSDP2.

    One for each direction: a gradient waits for its reduction, and the shards of the next unit must not wait for it.

    Args:
        platform: The device that computes.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self._in, self._out = platform.new_stream(), platform.new_stream()
        self._computing: Stream | None = None  # while a gather is issued

    def gather(self, start: Callable[[], Pending]) -> Pending:
        """Start a gather that copies shards first."""
        self._computing = self.platform.current_stream()
        try:
            self._wait()
            with self.platform.use_stream(self._in):
                pending = start()
        finally:
            self._computing = None
        return pending.behind(self._in.record_event())

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Let a gather allocate as everybody does: on the stream that computes, which may have used that memory."""
        if self._computing is None:
            yield
            return
        with self.platform.use_stream(self._computing):
            yield
        self._wait()

    def _wait(self) -> None:
        """Let copies come after what computes so far; what computes next is beside them."""
        if self._computing is not None:
            self._in.wait_stream(self._computing)

    def to_host(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient in page-locked memory of the host, where it is once `finish` has been called."""
        self._out.wait_stream(self.platform.current_stream())
        with self.platform.use_stream(self._out):
            copy = self.platform.copy_to_host(gradient, pinned=True, wait=False)
        self.platform.record_stream(gradient, self._out)
        return copy

    def finish(self) -> None:
        """Let the host wait for all copies: it reads gradients next and changes shards, and no stream makes it wait."""
        self._out.synchronize()
        self._in.synchronize()  # of a gather that nobody has used


class Storage:
    """Where the shards of a unit's parameters are kept.

    Args:
        platform: The device that computes.
        on_host: Keep them on the host (CPU offload).
        pinned: There, in page-locked memory.
        flat: All shards of a bucket are views of one buffer, which the gather reads directly.

    Attributes:
        apart: Whether they are in other memory than what is computed with, and have to be copied.
        copies: The streams on which they are, which the units of a root share; None: on that which computes.
    """

    def __init__(self, platform: Platform, *, on_host: bool = False, pinned: bool = False, flat: bool = False) -> None:
        self.platform = platform
        self.compute = platform.device()
        self.device = torch.device("cpu") if on_host else self.compute
        self.on_host = on_host
        self.pinned = pinned and on_host and platform.supports_pinned_memory
        self.apart = on_host and platform.has_own_memory
        self.flat = flat
        self.copies: CopyStreams | None = None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor without values, where the shards are kept."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def to_device(self, target: torch.Tensor, shard: torch.Tensor) -> None:
        """Copy a shard that is kept apart."""
        self.platform.copy_to_device(target, shard, pinned=self.pinned)

    def to_host(self, gradient: torch.Tensor, *, wait: bool) -> torch.Tensor:
        """Return a gradient where the shards are kept apart; unless it is waited for, the end of backward does so."""
        if self.copies is not None and self.pinned and not wait:
            return self.copies.to_host(gradient)
        return self.platform.copy_to_host(gradient, pinned=self.pinned, wait=wait)

    def gather(self, start: Callable[[], Pending]) -> Pending:
        """Start a gather, on the stream of its copies if there are any."""
        return start() if self.copies is None else self.copies.gather(start)

    def allocating(self) -> AbstractContextManager[Any]:
        """Return the context in which memory for what is gathered is taken."""
        return nullcontext() if self.copies is None else self.copies.allocating()

    @property
    def needs_data(self) -> bool:
        """Whether the ranks' devices have data; on simulated ranks they may have none."""
        return self.compute.type != "meta"


class Bucket:
    """The parameters of one unit, dtype of computation and group of ranks.

    What is gathered holds rank after rank; the unsharded parameters lie one after the other in a buffer of their own,
    whose storage is freed when resharded. Autograd keeps the unsharded parameters as they are; they get their data back
    in the same place for backward. Parameters that are replicated are a bucket too: of one shard.

    Args:
        params: The parameters, in registration order.
        values: Their values, unsharded.
        group: The ranks that hold the shards; None where the parameters are replicated.
        storage: Where the shards are kept.
        param_dtype: Dtype of the unsharded parameters, if these are floating-point; None: their own.
    """

    def __init__(
        self,
        params: list[ManagedParam],
        values: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
        storage: Storage,
        param_dtype: torch.dtype | None,
    ) -> None:
        self.params = params
        self.path_when_wrapped = ""  # of its unit, in the outermost module that was wrapped
        self.unit_name = ""  # path from the root, once a forward has made that known
        self.has_own_names = False  # which differ by rank, and are no part of its identity
        self.keys: dict[GroupLog, tuple[bytes, str]] = {}  # of identity and model, to compare and for people
        self.log: GroupLog | None = None  # of its group, unless that is one rank
        self.group = group
        self.ranks = params[0].ranks
        self.storage = storage
        self.param_dtype = param_dtype
        self.gathered = False
        self.all_gather_with: Any = None  # an `AllGather` of torch, which allocates and communicates
        self.chunks = [param.chunk for param in params]
        self.starts = [0, *accumulate(self.chunks)]
        self.shards: torch.Tensor | None = None  # the one buffer of all shards, where they are kept so
        # Between forward and backward: this rank's shard over the post-forward mesh; its group and the place in it.
        self.post_forward_shard: torch.Tensor | None = None
        self.post_forward_mesh: tuple[dist.ProcessGroup, int] | None = None
        shards = self._keep(
            [param.shard_of(_local(unsharded)).detach() for param, unsharded in zip(params, values, strict=True)]
        )
        for param, unsharded, shard in zip(params, values, shards, strict=True):
            param.make_sharded(shard, cast(nn.Parameter, unsharded))
            param.pinned = storage.pinned
            param.to_host = storage.to_host if storage.apart else None
        self._make_unsharded()

    # -- what it is, for ranks to compare -----------------------------------------------------------------------------

    @cached_property
    def identity(self) -> str:
        """The unit and its parameters with global shapes, e.g. `layers.0: weight float32 [6, 6], bias float32 [6]`.

        All ranks of the group have the same one: what they gather together has equal sizes also where they do not. A
        layer that was moved after wrapping has both names, since ranks may have moved other ones to one place.
        """
        unit = name_of_unit(self.unit_name, self.path_when_wrapped * (not self.has_own_names))
        return (f"{unit}: " if unit else "") + ", ".join(
            f"{'' if self.has_own_names else plain_name(p.name) + ' '}"
            f"{str(p.sharded.dtype).removeprefix('torch.')} {list(p.sharded.shape)}"
            for p in self.params
        )

    def name_unit(self, name: str, *, has_own_names: bool = False) -> None:
        """Note the path of its unit from the root, or another name that is the same on all ranks."""
        self.unit_name, self.has_own_names = name, has_own_names
        self.__dict__.pop("identity", None)

    # -- the shards ---------------------------------------------------------------------------------------------------

    def _keep(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the shards to where they are kept; meta stays meta."""
        on_meta = shards[0].is_meta
        device = shards[0].device if on_meta else self.storage.device
        if not self.storage.flat:
            self.shards = None
            kept = []
            for shard, param in zip(shards, self.params, strict=True):
                # All others are copied: a view of the unsharded value would keep all of its memory, on every rank.
                if shard.numel() == param.numel and shard.device == device and shard.is_contiguous():
                    kept.append(shard)
                elif on_meta:
                    kept.append(torch.empty(param.local_shape, dtype=shard.dtype, device=device))
                else:
                    kept.append(self.storage.empty(param.local_numel, shard.dtype).view(param.local_shape).copy_(shard))
            return kept
        dtype, numel = shards[0].dtype, self.starts[-1]
        self.shards = (
            torch.empty(numel, dtype=dtype, device=device)
            if on_meta
            else self.storage.empty(numel, dtype).zero_()  # padding is sent and received as well
        )
        views = [
            self.shards[start : start + param.local_numel].view(param.local_shape)
            for start, param in zip(self.starts, self.params, strict=False)
        ]
        if not on_meta:
            for view, shard in zip(views, shards, strict=True):
                view.copy_(shard)
        return views

    @property
    def version(self) -> tuple[int, ...]:
        """Differs when a shard has changed; what is done through `.data` in place leaves no trace."""
        numbers: list[int] = []
        for param in self.params:
            sharded: Any = param.sharded
            # Each of the two counts what is done through itself alone: `p.add_()`, and `p.to_local().add_()`.
            # `module.to` begins both anew, hence the address.
            numbers += (sharded._version, sharded._local_tensor._version, param.address)
        return tuple(numbers)

    def was_replaced(self) -> bool:
        """Whether shards were replaced from outside, as `module.to` and `to_empty` do, and have to be taken over."""
        if self._is_as_made():
            return False
        replaced = False
        for param in self.params:
            slot = param.slots[0]
            registered: Any = slot.module._parameters.get(slot.name)
            if registered is not param.sharded and registered is not param.unsharded:
                if not isinstance(registered, DTensor) or not isinstance(registered, nn.Parameter):
                    raise _replaced_error(param.name, registered)
                param.sharded, replaced = registered, True
        if not replaced:
            replaced = self._moved()
        if not replaced and self.storage.needs_data:
            if any(param.local.is_meta for param in self.params):
                raise NoDataError
            self._check_place()
        return replaced

    def _is_as_made(self) -> bool:
        """Whether all shards are what they were when the unsharded parameters were made; False: one has to look."""
        self.unmoved = False
        if self._made is None:
            return False
        for param, module, name, local, address in self._made:
            sharded: Any = param.sharded
            registered = module._parameters.get(name)
            if registered is not sharded and registered is not param.unsharded:
                return False
            if sharded._local_tensor is not local or local.data_ptr() != address:
                return False
        self.unmoved = True
        return True

    def _remember(self) -> None:
        """Note what the shards are, and where modules show them: a step looks at each several times."""
        locals_ = [param.local for param in self.params]
        for param in self.params:
            param.note_storages()
        # Every step comes here more than once for every parameter; all that does not change between two steps is
        # looked up once, in lists of plain objects.
        self.unmoved = False
        self._made = None
        self._flat_shards = None
        # The address of an empty shard, or of one without data, says nothing.
        in_place = all(
            param.address and t.device == self.storage.device for param, t in zip(self.params, locals_, strict=True)
        )
        if not self.aliased and in_place:
            self._made = [
                (param, param.slots[0].module, param.slots[0].name, local, local.data_ptr())
                for param, local in zip(self.params, locals_, strict=True)
            ]
            no_padding = all(param.local_numel == param.chunk for param in self.params)
            if no_padding and all(t.is_contiguous() for t in locals_):
                self._flat_shards = [t.detach().view(-1) for t in locals_]
        # Most modules are plain ones, whose dictionary of parameters can be written directly. Others, such as recurrent
        # ones, keep a second list of their weights, and must be asked by `setattr`.
        self._plain: list[tuple[Any, str, ManagedParam]] = []
        self._others: list[ManagedParam] = []
        for param in self.params:
            if all(type(slot.module).__setattr__ is nn.Module.__setattr__ for slot in param.slots):
                self._plain += [(slot.module, slot.name, param) for slot in param.slots]
            else:
                self._others.append(param)

    def _moved(self) -> bool:
        """Whether a shard is not what it was made as: of another dtype, on another device, or elsewhere in memory."""
        base = self.shards
        for param, start, dtype in zip(self.params, self.starts, self.dtypes, strict=False):
            local = param.local
            if local.dtype != dtype or local.device.type != self.device.type:
                return True
            if base is None:
                if self.aliased and param.address and param.address != _local(param.unsharded).data_ptr():
                    return True
                continue
            # The address of an empty shard says nothing, but all ranks must decide the same: it follows the others.
            if local.numel() > 0 and param.address and param.address != base.data_ptr() + start * base.element_size():
                return True
        return False

    def _check_place(self) -> None:
        on_host = self.storage.on_host
        kind = "cpu" if on_host else self.storage.compute.type
        held = (param for param in self.params if on_host or param.placement.is_held)  # others' have no elements here
        elsewhere = [f"{param.name} ({param.local.device})" for param in held if param.local.device.type != kind]
        if elsewhere and on_host:
            asked, seen = "cannot gather parameters", "seen: offload_policy=CPUOffloadPolicy()"
            blame = f"those that were wrapped for CPU offload are not on the host: {', '.join(elsewhere)}"
            hint = "model.to('cpu'), or model.to_empty(device='cpu') for a model made on meta"
            raise InvalidState(asked, blame, seen, hint)
        if elsewhere:
            asked, seen = "cannot gather parameters", f"seen: a mesh of {kind}, where gradients would come"
            blame = f"they were moved away from the device that computes: {', '.join(elsewhere)}"
            hint = f"model.to('{kind}') before the next step; or offload_policy=CPUOffloadPolicy() when wrapping"
            raise InvalidState(asked, blame, seen, hint)
        freed = [p.name for p in self.params if p.local_numel and not p.local.untyped_storage().nbytes()]
        if freed:
            blame, seen = f"the memory of shards was freed: {', '.join(freed)}", "seen: untyped_storage().resize_(0)"
            raise InvalidState("cannot gather parameters", blame, seen, "give it back, with values, before")

    def check_assigned(self) -> None:
        """Make sure that nobody has assigned `parameter.data`, or replaced an unsharded parameter: that has no effect.

        Torch then exchanges what a DTensor has below Python, its storage without memory. The shard stays what it was.
        """
        for param in self.params:
            if self.gathered:
                slot = param.slots[0]
                registered: Any = slot.module._parameters.get(slot.name)
                if registered is not param.sharded and registered is not param.unsharded:
                    raise _replaced_error(param.name, registered)
            if not param.was_assigned(gathered=self.gathered):
                continue
            param.note_storages()
            blame = f"the data of {param.name!r} was assigned, and a managed parameter keeps its own"
            seen = "seen: parameter.data = value, as vector_to_parameters does, or swap_tensors while unsharded"
            hint = "parameter.data.copy_(value) while sharded, load_state_dict, or ignored_params if forward assigns it"
            raise InvalidState("cannot go on with parameters", blame, seen, hint)

    def take_over(self) -> None:
        """Take over the shards that were replaced."""
        locals_ = [param.local.detach() for param in self.params]
        if self.storage.needs_data and any(shard.is_meta for shard in locals_):
            raise NoDataError
        dtypes = {shard.dtype for shard in locals_}
        if len({computed_in(dtype, self.param_dtype) for dtype in dtypes}) > 1 or (
            self.storage.flat and len(dtypes) > 1
        ):
            asked, blame = "cannot gather parameters", "those that were wrapped in one dtype now have several"
            seen = ", ".join(sorted(f"{p.name} is {p.local.dtype}" for p in self.params))
            raise InvalidState(asked, blame, seen, "convert the whole module to one dtype before wrapping")
        if self.storage.needs_data:
            self._check_place()
        with torch.inference_mode(False):  # an evaluation may be the first to notice; training follows
            if self.shards is not None or any(shard.device != self.storage.device for shard in locals_):
                shards = self._keep(locals_)
                for param, shard in zip(self.params, shards, strict=True):
                    param.sharded._local_tensor = shard  # type: ignore[attr-defined]
            for param in self.params:
                for name, value in param.attributes.items():  # what torch swaps in place loses them
                    param.sharded.__dict__.setdefault(name, value)
                param.show(param.sharded)
            self._make_unsharded()

    # -- the unsharded parameters ------------------------------------------------------------------------------------

    def _make_unsharded(self) -> None:
        """Make the unsharded parameters over a buffer that has a place for each and, so far, no memory."""
        self.__dict__.pop("identity", None)  # of parameters that were replaced the dtype may be another one
        first = self.params[0].local
        self.device = first.device
        self.dtypes = [param.local.dtype for param in self.params]
        dtype = computed_in(first.dtype, self.param_dtype)
        device = first.device if first.is_meta else self.storage.compute
        self.compute_dtype, self.compute_device = dtype, device
        elsewhere = self.storage.apart or device != first.device
        self._converts = elsewhere or any(param.local.dtype != dtype for param in self.params)
        # Replicated parameters are used where they are, if they are fit for it: nothing is copied, and nothing freed.
        self.aliased = self.group is None and not self._converts and self.shards is None
        self.post_forward_shard = None
        if self.aliased:
            self.unsharded_buffer = torch.empty(0, dtype=dtype, device=device)
            self.unsharded_bytes = 0
            self._can_gather_each = False
            for param in self.params:
                param.make_unsharded(param.local.detach())
            self.gathered = False
            self._remember()
            return
        sizes = self._unsharded_sizes()
        self.places = [0, *accumulate(sizes)]
        # Without a copy: each parameter's padded shards, one after the other, are the unsharded one.
        self._can_gather_each = (
            self.group is not None
            and self.ranks > 1
            and not self.storage.platform.prefers_large_messages
            and all(param.contiguous_on_dim_0 for param in self.params)
        )
        self.unsharded_buffer = torch.empty(self.places[-1], dtype=dtype, device=device)
        self._memory = self.unsharded_buffer.untyped_storage()
        self.unsharded_bytes = self.unsharded_buffer.untyped_storage().nbytes()
        self.targets = self.unsharded_buffer.split(sizes)
        for param, place in zip(self.params, self.places, strict=False):
            # .data: filling the buffer must not look to autograd like a change of the parameter. FSDP2 preserves the
            # version counter around each copy to the same end.
            param.make_unsharded(self.unsharded_buffer[place : place + param.numel].view(param.shape).data)
        self._remember()
        self.free()

    def _unsharded_sizes(self) -> list[int]:
        """Elements that each parameter takes in the buffer: with its padding, where that is gathered in place."""
        return [self.ranks * p.chunk if p.contiguous_on_dim_0 else p.numel for p in self.params]

    def owns_memory_of(self, pointer: int) -> bool:
        """Whether memory that starts at `pointer` is the buffer's, which will be freed."""
        return pointer == self.unsharded_buffer.untyped_storage().data_ptr()

    def allocate(self) -> None:
        """Give the unsharded parameters their memory back."""
        with self.storage.allocating():
            self._memory.resize_(self.unsharded_bytes)

    def free(self) -> None:
        """Free the memory of the unsharded parameters; the tensors stay, for autograd."""
        # The storage is emptied, not dropped: what autograd has saved are these very tensors, and the second gather
        # fills them again. A tensor that is used too early has no memory, and torch says so.
        self.gathered = False
        if not self.unsharded_buffer.is_meta:
            self.unsharded_buffer.untyped_storage().resize_(0)

    def check_untouched(self) -> None:
        """Make sure that forward has not changed unsharded parameters in place: that is lost with their memory."""
        self.check_assigned()
        for param in self.params:
            if param.unsharded._version != param.made_version and not self.aliased:
                param.made_version = param.unsharded._version
                blame = f"forward changed the parameter {param.name!r} in place, which is lost when it is resharded"
                seen = "seen: an in-place operation on the gathered parameter, as nn.Embedding(max_norm=...) does"
                hint = "change the sharded parameter between steps, or pass it in ignored_params"
                raise InvalidState("cannot reshard", blame, seen, hint)

    def start_gather(self) -> Pending:
        """Start to gather the shards into a buffer that holds rank after rank."""
        if self.aliased:
            return Pending(None, self.unsharded_buffer)
        if self.all_gather_with is not None and self.group is not None and self.ranks > 1:
            return self._gather_with(self.all_gather_with)
        if self.post_forward_shard is not None and self.post_forward_mesh is not None:
            # Used once: the forward that follows gathers shards that a step may have changed.
            post_forward_shard, self.post_forward_shard = self.post_forward_shard, None
            target = torch.empty(
                self.ranks * self.starts[-1], dtype=post_forward_shard.dtype, device=post_forward_shard.device
            )
            return all_gather(target, post_forward_shard, self.post_forward_mesh[0])
        if self._can_gather_each and self.post_forward_mesh is None:
            # Where a backend takes many small messages at once, nothing is packed before and nothing copied out after.
            # FSDP2 always packs, and copies out: its peak has the parameters of the unit twice.
            self.allocate()
            return all_gather_each(
                self.targets, self._sources(), cast(dist.ProcessGroup, self.group), self.unsharded_buffer
            )
        # Where there is one shard, rank after rank is also the order in the unsharded parameters.
        direct = self.ranks == 1 or (len(self.params) == 1 and self.params[0].contiguous_on_dim_0)
        if direct:
            self.allocate()  # now: the collective writes to it. Otherwise only when it is filled, in `finish_gather`
        numel = self.ranks * self.starts[-1]
        with self.storage.allocating():
            target = self.unsharded_buffer if direct else self.unsharded_buffer.new_empty(numel)
        if self.group is None:
            self._pack(target)
            return Pending(None, target)
        return all_gather(target, self._source(target), self.group)

    def _gather_with(self, comm: Any) -> Pending:
        """The same by an `AllGather` of torch."""
        group, post_forward_shard, self.post_forward_shard = self.group, self.post_forward_shard, None
        target = comm.allocate((self.ranks * self.starts[-1],), dtype=self.compute_dtype, device=self.compute_device)
        source = post_forward_shard
        if post_forward_shard is not None and self.post_forward_mesh is not None:
            group = self.post_forward_mesh[0]
        else:
            source = self._source(target)
        work = comm(output_tensor=target, input_tensor=source, group=group, async_op=True)
        return Pending(work, target, keep=() if source is None else (source,))

    def _sources(self) -> Sequence[torch.Tensor]:
        """The own shards as they are sent, each for itself and padded: where they are, or in the unsharded buffer."""
        if not self._converts:
            if self.shards is not None:
                return self.shards.split(self.chunks)
            if self.unmoved and self._flat_shards is not None:
                return self._flat_shards
            if all(param.local_numel == param.chunk for param in self.params):  # no padding to send
                return [param.local.detach().reshape(-1) for param in self.params]
        # In the own place of what is gathered: no other buffer, and the collective has nothing to copy on this rank.
        rank = self.params[0].placement.shard_rank
        slots = [
            target[rank * chunk : (rank + 1) * chunk] for target, chunk in zip(self.targets, self.chunks, strict=True)
        ]
        self._copy_to(slots)
        return slots

    def _source(self, target: torch.Tensor) -> torch.Tensor:
        """The own shard as it is sent: the flat buffer itself, or packed into the own place of `target`."""
        if self.shards is not None and not self._converts:
            return self.shards
        only = self.params[0]
        local = only.local
        alone = len(self.params) == 1 and only.local_numel == only.chunk and local.is_contiguous()
        if alone and not self._converts:
            return local.detach().view(-1)
        width = self.starts[-1]
        rank = only.placement.shard_rank
        source = target[rank * width : (rank + 1) * width]
        self._pack(source)
        return source

    def _pack(self, place: torch.Tensor) -> None:
        """Copy the shards, one after the other and padded, into `place`."""
        self._copy_to(place.split(self.chunks))

    def _copy_to(self, slots: Sequence[torch.Tensor]) -> None:
        """Copy each shard into its slot, converted to the dtype of computation; zeros behind it."""
        places, shards = [], []
        for param, slot in zip(self.params, slots, strict=True):
            places.append(slot[: param.local_numel].view(param.local_shape))
            shards.append(param.local.detach())
            if param.local_numel < param.chunk:
                slot[param.local_numel :].zero_()
        if self.storage.apart:
            # Of pinned memory the device reads while the host goes on; the gather starts behind it on the same stream.
            for where, shard in zip(places, shards, strict=True):
                self.storage.to_device(where, shard)
        else:
            torch._foreach_copy_(places, shards)

    def finish_gather(self, received: torch.Tensor, *, keep_post_forward_shard: bool = False) -> None:
        """Put what was gathered in its place; if asked to, keep this rank's shard over the post-forward mesh."""
        if self.aliased:
            self.gathered = True
            return
        if keep_post_forward_shard and self.post_forward_mesh is not None:
            group, place = self.post_forward_mesh
            numel = received.numel() // group.size()
            # A slice in rank order: those of the group, one after the other, are again what the first gather gave. A
            # copy, or it would keep all that was received.
            self.post_forward_shard = received[place * numel : (place + 1) * numel].clone()
        if received is not self.unsharded_buffer:
            self.allocate()
            self._unpack(received.view(self.ranks, -1))
        self.gathered = True

    def _unpack(self, rows: torch.Tensor) -> None:
        if all(param.contiguous_on_dim_0 for param in self.params):
            places = [
                self.unsharded_buffer[start:end].view(self.ranks, -1)
                if end > start
                else self.unsharded_buffer[start:end].view(self.ranks, 0)  # of no elements -1 says nothing
                for start, end in zip(self.places, self.places[1:], strict=False)
            ]
            torch.split_with_sizes_copy(rows, self.chunks, dim=1, out=places)
            return
        for param, start, place, end in zip(self.params, self.starts, self.places, self.places[1:], strict=False):
            for unsharded, shard in param.rows_of(
                self.unsharded_buffer[place:end], rows[:, start : start + param.chunk]
            ):
                unsharded.copy_(shard)

    def show_unsharded(self) -> None:
        """Let the modules see the unsharded parameters."""
        for param in self.params:
            # Users freeze the sharded one, the only one that they see; autograd looks at the unsharded one, in forward.
            if param.unsharded.requires_grad != param.sharded.requires_grad:
                param.unsharded.requires_grad_(param.sharded.requires_grad)
                if not param.unsharded._backward_hooks:
                    param.watch()
            param.shown_trainable = param.unsharded.requires_grad
        for module, name, param in self._plain:
            module._parameters[name] = param.unsharded
        for param in self._others:
            param.show(param.unsharded)

    def show_shards(self) -> None:
        """Let the modules, and thereby optimizers and state dicts, see the sharded parameters."""
        for param in self.params:
            trainable = param.unsharded.requires_grad
            if trainable != param.shown_trainable:  # frozen after `unshard()`, or by forward: the module's own word
                param.shown_trainable = trainable
                param.sharded.requires_grad_(trainable)
        for module, name, param in self._plain:
            module._parameters[name] = param.sharded
        for param in self._others:
            param.show(param.sharded)


def _replaced_error(name: str, registered: Any) -> InvalidState:
    what = "removed" if registered is None else f"replaced by a {type(registered).__name__}"
    return InvalidState(
        f"the sharded parameter {name!r} was {what}\n"
        "  expected: an nn.Parameter, a DTensor with the layout it had\n"
        "  try: change sharded parameters in place or with load_state_dict; parametrize (weight_norm ...) before "
        "wrapping; torch.func.functional_call cannot run wrapped modules"
    )


def name_of_unit(now: str, when_wrapped: str) -> str:
    """Name a unit by its path from the root, and by the one that it had when the root was wrapped if it has moved.

    >>> name_of_unit("layers.0", "layers.1")
    'layers.0 (wrapped as layers.1)'
    """
    now, before = plain_name(now), plain_name(when_wrapped)
    has_moved = now and before and not f".{before}".endswith(f".{now}")
    return f"{now} (wrapped as {before})" if has_moved else now or before


def computed_in(dtype: torch.dtype, param_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter of `dtype` is gathered and used; a policy speaks of floating-point ones only."""
    return param_dtype if param_dtype is not None and dtype.is_floating_point else dtype


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own tensor of a DTensor, a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# -- parameters that one rank holds whole -----------------------------------------------------------------------------


class OwnedBucket(Bucket):
    """The parameters of a unit that have owners, in the order of these.

    What is gathered, owner after owner, is the unsharded parameters one after the other: nothing is padded, packed for
    others or copied out. A rank's shards are the parameters that it owns, which may be none.
    """

    @property
    def version(self) -> tuple[int, ...]:
        """Differs when a parameter has changed: on all ranks alike, as all of them gather or none.

        So what the owner alone can see does not count: what is done to its local tensor, and where that is in memory.
        """
        return tuple(param.sharded._version for param in self.params)

    def _unsharded_sizes(self) -> list[int]:
        return [param.numel for param in self.params]

    def start_gather(self) -> Pending:
        """Start to give each owner's parameters to all ranks, in the buffer of unsharded ones."""
        assert self.group is not None, "parameters with owners have a shard axis"
        sizes = [0] * self.ranks
        for param in self.params:
            assert param.placement.owner is not None, "grouped by whether they have one"
            sizes[param.placement.owner] += param.numel
        self.allocate()
        parts = self.unsharded_buffer.split(sizes)
        self._copy_to(parts[self.params[0].placement.shard_rank].split(self.chunks))
        at_once = self.storage.platform.gathers_uneven
        return broadcast_each(parts, self.group, self.unsharded_buffer, at_once=at_once)

    def finish_gather(self, received: torch.Tensor, *, keep_post_forward_shard: bool = False) -> None:
        """All is in its place; what is kept between forward and backward on fewer ranks is gathered from all again."""
        del received, keep_post_forward_shard
        self.gathered = True


# -- parameters that gather other tensors than their values: FSDP2's tensor extension ----------------------------------


class ExtensionBucket(Bucket):
    """The parameters of a unit that have `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

    The former gives the tensors to gather, of any dtypes; the latter makes the unsharded parameter of them. All of them
    travel as the bytes of one message. As in torch, the unsharded parameter is made once, by the first gather, and
    filled again by the later ones (`out`), because autograd may have kept it.

    FSDP2 leaves the padding of uneven shards to the extension and fails on the padded ranks alone, which hangs the
    others. Here the engine pads, and what it cannot pad is an error on every rank.

    Args:
        params: The parameters, split on dim 0 or replicated.
        values: Their values, unsharded.
        group: The ranks that hold the shards; None where the parameters are replicated.
        storage: Where the shards are kept.
        mp_policy: Dtypes, which are passed to the extension.
    """

    def __init__(
        self,
        params: list[ManagedParam],
        values: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
        storage: Storage,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        self.mp_policy = mp_policy
        self._mesh = _shard_mesh(params[0])
        super().__init__(params, values, group, storage, mp_policy.param_dtype)

    def _keep(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        kept = []
        for shard, param in zip(shards, self.params, strict=True):
            if shard.is_meta:
                kept.append(shard)
                continue
            if shard.numel() < param.numel:  # the rest of the unsharded value's memory is to be freed
                shard = shard.new_zeros(param.local_shape).copy_(shard)
            if shard.device != self.storage.device:
                shard = shard.to(self.storage.device)
            kept.append(shard.pin_memory() if self.storage.pinned else shard)
        return kept

    # -- the unsharded parameters ------------------------------------------------------------------------------------

    def _make_unsharded(self) -> None:
        """Let parameters on meta stand in for the unsharded ones, which the first gather makes."""
        first = self.params[0].local
        self.device = first.device
        self.dtypes = [param.local.dtype for param in self.params]
        self.compute_device = first.device if first.is_meta else self.storage.compute
        self.compute_dtype = computed_in(first.dtype, self.param_dtype)
        self.aliased = self.gathered = False
        self._output_specs: list[list[tuple[torch.Size, torch.dtype]]] = []  # of what each parameter gathers
        self._metadata: list[Any] = []
        self._outputs: list[torch.Tensor] = []  # bytes, rank after rank; of all parameters
        self._memory_of: dict[int, tuple[Any, int]] = {}  # storages that are freed, and how large they are
        self._sent: torch.Tensor | None = None  # read until the gather is through
        self._made_unsharded = False
        for param in self.params:
            dtype = computed_in(param.local.dtype, self.param_dtype)
            param.make_unsharded(torch.empty(param.shape, dtype=dtype, device="meta"))
        self._remember()

    def owns_memory_of(self, pointer: int) -> bool:
        """Whether memory that starts at `pointer` will be freed."""
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
        self._output_specs, self._metadata = [], []
        for param in self.params:
            local: Any = param.local
            if self.storage.apart or local.device != self.compute_device:
                local = local.to(self.compute_device, non_blocking=True)
            arguments: tuple[Any, ...] = (self._mesh,)
            if len(inspect.signature(local.fsdp_pre_all_gather).parameters) > 1:
                stride = tuple(prod(param.shape[i + 1 :]) for i in range(len(param.shape)))
                arguments = (self._mesh, param.shape, stride, param.slots[0].module, self.mp_policy)
            tensors, metadata = local.fsdp_pre_all_gather(*arguments)
            padded = [_padded(param, tensor) for tensor in tensors]
            self._output_specs.append([(tensor.shape, tensor.dtype) for tensor in padded])
            self._metadata.append(metadata)
            inputs += padded
        return inputs

    def _check_widths(self, widths: list[int]) -> None:
        before = [output.numel() // self.ranks for output in self._outputs]
        if widths != before:
            asked = f"cannot gather {', '.join(param.name for param in self.params)}"
            blame = "fsdp_pre_all_gather gives other tensors than the first time, and autograd may keep those"
            hint = "tensors of one shape and dtype each time; wrap again to change them"
            raise InvalidState(asked, blame, f"seen: {widths} bytes, before: {before}", hint)

    def finish_gather(self, received: torch.Tensor, *, keep_post_forward_shard: bool = False) -> None:
        """Have the extensions make, or fill, the unsharded parameters."""
        del keep_post_forward_shard  # there is no shard over another mesh that an extension could give
        self._sent = None
        with torch.inference_mode(False), torch.no_grad():
            self.allocate()
            if received is not self._outputs[0]:
                widths = [output.numel() // self.ranks for output in self._outputs]
                rows = [output.view(self.ranks, width) for output, width in zip(self._outputs, widths, strict=True)]
                torch.split_with_sizes_copy(received.view(self.ranks, sum(widths)), widths, dim=1, out=rows)
            place = 0
            for param, specs, metadata in zip(self.params, self._output_specs, self._metadata, strict=True):
                flat = self._outputs[place : place + len(specs)]
                place += len(specs)
                # .data: filling the memory must not look to autograd like a change of what it has kept
                outputs = [
                    output.data.view(dtype).view([self.ranks * n for n in shape[:1]] + list(shape[1:]))
                    for output, (shape, dtype) in zip(flat, specs, strict=True)
                ]
                if param.is_uneven:
                    outputs = [output[: param.size] for output in outputs]
                self._make_or_fill(param, tuple(outputs), metadata)
            self._made_unsharded = True
            self.compute_dtype = self.params[0].unsharded.dtype  # in which its gradient comes
        self._metadata = []
        self.gathered = True

    def _make_or_fill(self, param: ManagedParam, outputs: tuple[torch.Tensor, ...], metadata: Any) -> None:
        """Let the extension of one parameter make the unsharded one or, later on, fill it."""
        local: Any = param.local
        dtype = computed_in(local.dtype, self.param_dtype)
        if self._made_unsharded:
            with torch.autograd._unsafe_preserve_version_counter(param.unsharded):
                local.fsdp_post_all_gather(outputs, metadata, dtype, out=param.unsharded)
            return
        unsharded, inner = local.fsdp_post_all_gather(outputs, metadata, dtype)
        self._free_later(inner)
        if unsharded.shape != param.shape:
            asked = f"cannot use what fsdp_post_all_gather returns for {param.name!r}"
            blame = "it is not of the shape of the parameter"
            hint = "all_gather_outputs, one below the other along dim 0"
            seen = f"seen: {tuple(unsharded.shape)}, expected: {tuple(param.shape)}"
            raise InvalidState(asked, blame, seen, hint)
        param.make_unsharded(unsharded)


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
        blame = "its shards differ in size, and fsdp_pre_all_gather gives a tensor of another shape than its shard's"
        seen = f"shape: {tuple(param.shape)} over {param.ranks} ranks   given: {tuple(tensor.shape)}"
        seen += f"   shard: {tuple(param.local_shape)}"
        hint = f"a size of dim 0 that {param.ranks} divides; or what is no value of one element in the metadata"
        raise InvalidState(f"cannot gather parameter {param.name!r}", blame, seen, hint)
    padded = tensor.new_zeros(shape)
    padded[: param.length].copy_(tensor)
    return padded


def _shard_mesh(param: ManagedParam) -> DeviceMesh:
    """The 1-D mesh of the ranks that hold the shards; of a parameter that keeps its layout, the one it is on."""
    data = param.placement.data
    if data is None:
        return param.placement.mesh
    if data.mesh.ndim == 1:
        return data.mesh
    if data.mesh.mesh_dim_names is not None:
        return data.mesh[data.mesh.mesh_dim_names[-1]]
    return DeviceMesh.from_group(data.shard_group, data.mesh.device_type)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return flat_bytes(tensor.detach().contiguous())
