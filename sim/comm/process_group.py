"""The simulated process group: what `torch.distributed` calls on one rank, matched with the other ranks' calls.

Each rank has its own `SimProcessGroup` object for a group; the ranks of a group share one
`sim.group.Group`, in which the k-th call of every member must be the same collective. A call never blocks: it
leaves its tensors in a slot and returns a work object; the last rank to arrive carries the collective
out for all. Ranks block only in `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from hyper_parallel.core.common.errors import InvalidState, InvalidType, InvalidValue
from hyper_parallel.platform import reductions_of
from sim.comm.collectives import Call, Contract, computes, reduce_op_name
from sim.comm.dispatcher import Dispatched, seen_by_modes, uncompiled
from sim.comm.group import Endpoint, Group, Message, deliver, without_modes
from sim.explain.errors import SimError
from sim.explain.lines import user_line_and_issuer
from sim.kernel.waiting import Waitable

__all__ = ["SimProcessGroup", "SimWork", "moved_by_all_reduce"]

Tensors = Sequence[torch.Tensor]


class SimWork(dist.Work):
    """The handle of a call: `wait` lets other ranks run until all of them have arrived."""

    def __init__(self, endpoint: Endpoint, waitables: Sequence[Waitable], outputs: Tensors) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._scheduler = endpoint.scheduler
        self._waitables = waitables
        self._outputs = outputs
        self._asked_at = -1.0

    def wait(self, timeout: Any = None) -> bool:
        del timeout  # time is virtual: a wait that cannot end is a Deadlock at once
        block = self._scheduler.block
        try:
            for waitable in self._waitables:
                block(waitable)
        finally:
            self._note_waited()
        return True

    def _note_waited(self) -> None:
        for waited in self._endpoint.network.waited:
            for waitable in self._waitables:
                waited(self._endpoint, waitable)

    def describe(self) -> str:
        """Name the operations whose end it tells."""
        return ", ".join(waitable.describe() for waitable in self._waitables) or "no operation"

    def is_completed(self) -> bool:
        if self._is_lost():
            return True  # as a real one is that has failed; `wait` raises
        if not self._is_ready():
            self._scheduler.poll()  # a loop that asks until it is done lets the others do their part
        if not (self._is_ready() and self._is_over()):
            return False
        self._note_waited()
        return True

    def _is_over(self) -> bool:
        """Whether it ends before the rank's virtual now; a rank that only asks and asks waits for it that way."""
        scheduler, ends = self._scheduler, max((waitable.at for waitable in self._waitables), default=0.0)
        now = scheduler.now
        if ends > now and self._asked_at != now:
            self._asked_at = now
            return False
        scheduler.reach(ends)
        return True

    def is_success(self) -> bool:
        return self._is_ready()

    def _is_lost(self) -> bool:
        return any(waitable.lost is not None and not waitable.ready for waitable in self._waitables)

    def _is_ready(self) -> bool:
        return all(waitable.ready for waitable in self._waitables)

    def _source_rank(self) -> int:
        message = self._waitables[0] if self._waitables else None
        if not isinstance(message, Message) or message.who_waits == "send":
            raise SimError("only a receive has a source rank\n  try: it on what dist.irecv returned")
        assert message.sender is not None
        return message.sender

    def exception(self) -> BaseException | None:
        lost = [waitable for waitable in self._waitables if waitable.lost is not None and not waitable.ready]
        return lost[0].lost(lost[0], self._endpoint.rank) if lost and lost[0].lost is not None else None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._outputs)

    def get_future(self) -> Future[Any]:
        # A C++ Future.wait would hold the turn for ever, so the future is complete when it is handed out.
        self.wait()
        future: Future[Any] = Future()
        future.set_result(list(self._outputs))
        return future

    getFuture = get_future  # noqa: N815 - torch's spelling


def _numels(tensors: Tensors) -> str:
    return " ".join([str(t.numel()) for t in tensors])


def _nbytes(tensors: Tensors) -> int:
    return sum([t.numel() * t.element_size() for t in tensors])


def moved_by_all_reduce(size: int, ranks: int, member: int) -> int:
    """Return the bytes that a rank sends in an all_reduce, and receives.

    It is a reduce_scatter into parts as equal as can be, and an all_gather of them: 2 (n - 1) times the data in all.

    >>> [moved_by_all_reduce(10, 4, member) for member in range(4)]
    [14, 16, 14, 16]

    Args:
        size: bytes of what is reduced.
        ranks: of the group.
        member: place of the rank in the group.
    """
    own = size * (member + 1) // ranks - size * member // ranks
    return size + (ranks - 2) * own


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != reach:
            return False
        reach *= size
    return True


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def _shapes(tensors: Tensors) -> str:
    return _shape(tensors[0]) if len(tensors) == 1 else " ".join(map(_shape, tensors))


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(tensor: torch.Tensor) -> str:
    return _name_of(tensor.dtype)


def _dtypes(tensors: Tensors) -> str:
    first = tensors[0].dtype
    if len(tensors) == 1 or all(t.dtype is first for t in tensors):
        return _name_of(first)
    return " ".join(dict.fromkeys(map(_dtype, tensors)))


_DEVICES = {"gloo": "cpu", "hccl": "npu", "nccl": "cuda"}  # by the name of a backend


def _unsupported(name: str) -> Callable[..., Any]:
    def method(self: SimProcessGroup, *args: Any, **options: Any) -> Any:
        raise SimError(
            f"simulated groups have no {name}\n  group: {self._title()!r}\n"
            "  try: the collectives of torch.distributed; dist.split_group and dist.new_group make groups"
        )

    return method


class SimProcessGroup(Dispatched):
    """One rank's end of a group. torch calls its methods, by old and new names."""

    def __init__(self, endpoint: Endpoint, group: Group, member: int) -> None:
        super().__init__(member, len(group.ranks))
        self._alive: Endpoint | None = endpoint
        self._group = group
        self._member = member
        self._size = len(group.ranks)
        self._coalescing: list[Waitable] | None = None
        self._label: str | None = None
        self._backend = endpoint.network.backend
        self._known_as: SimProcessGroup = self  # to torch
        self._issuer: Any = None  # of all that is called through this object
        self.line = ""  # the user's line that has made it

    # -- plumbing ----------------------------------------------------------------------------------------------

    @property
    def _endpoint(self) -> Endpoint:
        if self._alive is None:
            raise SimError(f"the world of {self!r} has ended\n  try: use the group inside of the rank's function")
        return self._alive

    def end(self) -> None:
        """Release the world: torch's caches may hold this group longer than the world lives."""
        self._alive = None
        self._group = Group(None, self._group.name, self._group.ranks)

    def for_issuer(self, issuer: Any) -> SimProcessGroup:
        """Return another object for this end of the group, through which one object alone calls, from C++ say.

        Args:
            issuer: What its calls on floating-point tensors are for: an `Issuer`, given that object as its owner.
        """
        made = SimProcessGroup(self._endpoint, self._group, self._member)
        made._known_as, made._label, made._issuer = self, self._axis(), issuer._replace(owner=made)
        self._endpoint.network.join(self._group, self._member, made)
        return made

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - torch's spelling
        # Not gloo's: DDP's log would go on to ask a gloo backend in C++ for its threads, and there is none.
        return "sim" if self._backend == "gloo" else self._backend

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices that a group of its name has backends for; object collectives go over the CPU if it has one.

        Only ranks with a device of their own are asked for more than the CPU.
        """
        endpoint = self._alive
        if endpoint is None or endpoint.network.devices is None:
            return [torch.device("cpu")]
        name = str(endpoint.c10d.pg_map.get(self._known_as, ("sim",))[0])
        if ":" in name:
            kinds = [part.partition(":")[0] for part in name.split(",")]
        else:  # torch makes a backend for each device, if none is named
            kinds = [_DEVICES[name]] if name in _DEVICES else ["cpu", endpoint.network.devices.kind]
        return [torch.device(kind) for kind in kinds]

    def _get_sequence_number_for_group(self) -> int:
        return self._group.next_seq[self._member]

    # What the base class would hand to the placeholder that stands in for a backend, and which does nothing.
    merge_remote_group = _unsupported("merge_remote_group")
    split_group = _unsupported("split_group of their own")
    new_window = _unsupported("new_window")
    reconfigure = _unsupported("reconfigure")
    use_pg_for_symm_mem_rendezvous = _unsupported("symmetric memory")
    _register_on_completion_hook = _unsupported("completion hooks")
    _wait_for_pending_works = _unsupported("completion hooks to wait for")
    register_abort_hook = _unsupported("abort hooks")
    register_pre_hook = _unsupported("hooks before an operation")
    register_post_hook = _unsupported("hooks after an operation")
    get_reconfigure_handle = _unsupported("reconfigure")
    unregister_abort_hook = _unsupported("abort hooks")
    unregister_pre_hook = _unsupported("hooks before an operation")
    unregister_post_hook = _unsupported("hooks after an operation")
    supports_abort_hooks = supports_completion_hooks = False
    supports_reconfigure = supports_window = False

    def __repr__(self) -> str:
        return f"SimProcessGroup({self._group.label!r}, rank {self._member} of {self._size})"

    def _axis(self) -> str:
        """The mesh axis (or other name) under which this group is reported; known once torch has named it."""
        if self._label is None:
            self._label = self._endpoint.axis_of(self._group.name, self.group_desc, self._group.ranks)
            self._group.label = self._label
        return self._label

    def _title(self) -> str:
        """What messages call this group."""
        self._axis()
        return self._group.title

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks, in group order."""
        return self._group.ranks

    def rename(self) -> None:
        """Ask again under which name the group is reported."""
        self._label = None

    def _refusal(self, op: str, blame: str, hint: str) -> tuple[str, str, str, str]:
        return (f"cannot {op}", blame, f"group: {self._title()}", hint)

    def _root(self, op: str, root: int) -> int:
        if not 0 <= root < self._size:
            blame = f"there is no member {root} in the group, which has {self._size}"
            raise InvalidValue(*self._refusal(op, blame, "the rank of a member"))
        return root

    def _check_list(self, op: str, which: str, tensors: Tensors, like: torch.Tensor, *, uneven: bool = True) -> None:
        """One tensor per member, all of the dtype of `like`, and of its size if they have to be even."""
        if len(tensors) != self._size:
            blame = f"the {which} list has {len(tensors)} tensors, expected one for each of {self._size} ranks"
            raise InvalidValue(*self._refusal(op, blame, f"a list of {self._size} tensors"))
        for place, tensor in enumerate(tensors):
            self._check_dtype(op, f"{which} {place}", tensor, like)
            if not uneven and tensor.numel() != like.numel():
                blame = f"{which} {place} has {tensor.numel()} elements, expected {like.numel()}"
                raise InvalidValue(*self._refusal(op, blame, "tensors of one size"))

    def _check_dtype(self, op: str, which: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
        if tensor.dtype != like.dtype:
            blame = f"the {which} is {_dtype(tensor)}, but the other side of the transfer is {_dtype(like)}"
            raise InvalidType(*self._refusal(op, blame, "one dtype for both"))

    def _stands_in(self) -> bool:
        """Whether the group has the name of the backend that the world stands for, and so its rules."""
        endpoint = self._endpoint
        backend = endpoint.network.backend
        return backend != "sim" and backend in str(endpoint.c10d.pg_map[self._known_as][0])

    def _check_moves(self, op: str, tensors: Tensors) -> None:
        """Refuse what the backend that the world stands for does not move, each rank by itself."""
        network = self._endpoint.network
        takes = reductions_of(network.backend)
        refused = next((t for t in tensors if not takes.moves(t.dtype, op)), None)
        if refused is not None:
            raise network.explain.not_moved(network.backend, op, refused, self._title())

    def _check_reduces(self, op: str, reduce_op: str, tensors: Tensors) -> None:
        """Refuse what the backend that the world stands for does not reduce, and elsewhere what torch does not.

        Each rank raises by itself, before the others have called, as with a real backend: the world goes on.
        """
        network, backend = self._endpoint.network, self._endpoint.network.backend
        if not self._stands_in():
            for tensor in tensors:
                if tensor.device.type == "cpu" and not without_modes(partial(computes, tensor.dtype, reduce_op)):
                    blame = f"torch has no ReduceOp.{reduce_op} of {_dtype(tensor)} on the CPU"
                    hint = "a dtype and a reduce op that torch can compute on the CPU"
                    raise InvalidState(*self._refusal(op, blame, hint))
            return
        reductions = reductions_of(backend)
        refused = next((t for t in tensors if not reductions.takes(t.dtype, reduce_op, op)), None)
        if refused is not None:
            raise network.explain.not_reduced(backend, op, reduce_op, refused, self._title())

    def _check_device(self, op: str, tensors: Tensors) -> None:
        """Refuse the tensors that torch finds no backend for, such as those of the CPU in a group of hccl alone."""
        kinds = [device.type for device in self._device_types]
        for tensor in tensors:
            if tensor.device.type not in kinds:
                blame = f"no backend type is associated with device type {tensor.device.type} in this group"
                raise InvalidState(
                    *self._refusal(op, blame, f"a tensor on {kinds[0]}, or a group of 'cpu:gloo,npu:hccl' (cuda:nccl)")
                )

    def _check_no_gaps(self, op: str, tensors: Tensors) -> None:
        """Refuse what nccl refuses, and where gloo writes into the elements between: it moves plain memory."""
        for tensor in tensors:
            if tensor.layout is torch.strided and not tensor.is_contiguous() and not _fills_its_memory(tensor):
                blame = (
                    f"a tensor of shape {list(tensor.shape)} does not fill its memory without gaps or overlaps "
                    f"(strides {list(tensor.stride())})"
                )
                raise InvalidValue(*self._refusal(op, blame, "a .contiguous() copy of it"))

    def _check_dense(self, op: str, which: str, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            blame = f"the {which} of shape {list(tensor.shape)} is not contiguous (strides {list(tensor.stride())})"
            raise InvalidValue(*self._refusal(op, blame, ".contiguous()"))

    def _check_unsharded(self, op: str, which: str, unsharded: torch.Tensor, shard: torch.Tensor) -> None:
        """One contiguous tensor that has room for the shards of all ranks."""
        self._check_dtype(op, which, unsharded, shard)
        self._check_dense(op, which, unsharded)
        expected = shard.numel() * self._size
        if unsharded.numel() != expected:
            blame = (
                f"the {which} has {unsharded.numel()} elements, expected {shard.numel()} * {self._size} ranks = "
                f"{expected}"
            )
            raise InvalidValue(*self._refusal(op, blame, f"an {which} of that size"))

    def _check_coalesced(self, op: str, unsharded: Tensors, which: str, shards: Tensors, other: str) -> None:
        if len(unsharded) != len(shards) or not unsharded:
            blame = f"{len(unsharded)} {which}s and {len(shards)} {other}s"
            raise InvalidValue(*self._refusal(op, blame, f"one {which} for each {other}"))
        for one, shard in zip(unsharded, shards, strict=True):
            self._check_unsharded(op, which, one, shard)
            self._check_dense(op, other, shard)

    def _issue(self, call: Call, outputs: Tensors = ()) -> SimWork:
        endpoint = self._endpoint
        network = endpoint.network
        endpoint.check_caller()
        if network.scheduler.fatal is not None:
            raise network.scheduler.end_of_rank()
        if network.devices is not None:
            self._check_device(call.contract.op, (*call.inputs, *call.outputs))
        if call.contract.reduce_op == "-" and self._stands_in():
            self._check_moves(call.contract.op, (*call.inputs, *call.outputs))
        call.line, asked = user_line_and_issuer()
        if self._size > 1 and network.check_identity:
            if asked is not None:
                ask, frame = asked
                call.identity = self._group.identities.of(self._member, ask(frame))
                del frame  # which has what its function has
            elif self._issuer is not None and outputs and outputs[0].is_floating_point():
                call.identity = self._group.identities.of(self._member, self._issuer)
        del asked
        call.axis = self._axis()
        for issuing in network.issuing:
            issuing(endpoint, self._group, call)
        slot = self._group.enter(self._member, call)
        for issued in network.issued:
            issued(endpoint, slot, call)
        if slot.arrived == self._size and slot.lost is None:
            self._group.carry_out(slot)
        if self._coalescing is not None:
            self._coalescing.append(slot)
        return SimWork(endpoint, (slot,), outputs)

    def _start_coalescing(self, device: Any = None) -> None:
        del device
        self._coalescing = []

    def _end_coalescing(self, device: Any = None) -> SimWork:
        del device
        waitables, self._coalescing = self._coalescing or [], None
        return SimWork(self._endpoint, waitables, ())

    def _together(self, works: list[SimWork], outputs: Tensors) -> SimWork:
        return SimWork(self._endpoint, [w for work in works for w in work._waitables], outputs)

    def shutdown(self) -> None:
        """Leave the group, as `destroy_process_group` does; the network forgets it when all members have."""
        if self._alive is not None:
            self._alive.network.leave(self._group, self._member)

    def abort(self) -> None:
        """Nothing is in flight when a rank runs."""

    def set_timeout(self, timeout: Any) -> None:
        """Accepted and without effect: time is virtual."""

    def _set_sequence_number_for_group(self) -> None:
        """Operations are numbered from the start."""

    def _enable_collectives_timing(self) -> None:
        """Accepted and without effect: the trace has the times of all operations."""

    def get_group_store(self) -> dist.Store:
        endpoint = self._endpoint
        return endpoint.c10d.pg_map[self][1] if self in endpoint.c10d.pg_map else endpoint.store

    # -- reductions --------------------------------------------------------------------------------------------

    def _all_reduce(self, tensors: Tensors, opts: Any = None) -> SimWork:
        self._check_no_gaps("all_reduce", tensors)
        name, factor = reduce_op_name(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        self._check_reduces("all_reduce", name, tensors)
        if name != "SUM" and any(tensor.is_sparse for tensor in tensors):
            blame = f"sparse tensors can be added up only, but the reduce op is {name}"
            raise InvalidValue(*self._refusal("all_reduce", blame, "ReduceOp.SUM, or .to_dense()"))
        moved = moved_by_all_reduce(_nbytes(tensors), self._size, self._member)
        call = Call(
            Contract("all_reduce", name, None, _dtypes(tensors), _shapes(tensors)),
            tensors,
            tensors,
            factor=factor,
            send_bytes=moved,
            recv_bytes=moved,
        )
        return self._issue(call, tensors)

    allreduce = seen_by_modes("allreduce")(_all_reduce)
    allreduce_coalesced = seen_by_modes("allreduce_coalesced")(_all_reduce)

    @seen_by_modes("reduce")
    def reduce(self, tensors: Tensors, opts: Any) -> SimWork:
        self._check_no_gaps("reduce", tensors)
        name, factor = reduce_op_name(opts.reduceOp)
        self._check_reduces("reduce", name, tensors)
        at_root = self._root("reduce", opts.rootRank) == self._member
        total = _nbytes(tensors)
        call = Call(
            Contract("reduce", name, opts.rootRank, _dtype(tensors[0]), _shape(tensors[0])),
            tensors,
            tensors,
            factor=factor,
            send_bytes=0 if at_root else total,
            recv_bytes=(self._size - 1) * total if at_root else 0,
        )
        return self._issue(call, tensors)

    def _reduce_scatter(self, output: torch.Tensor, inputs: Tensors, opts: Any, *, single: bool) -> SimWork:
        name, factor = reduce_op_name(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        self._check_reduces("reduce_scatter", name, inputs)
        if single:
            self._check_unsharded("reduce_scatter", "input", inputs[0], output)
            sizes = str(inputs[0].numel())
        else:
            self._check_list("reduce_scatter", "input", inputs, output)
            if inputs[self._member].numel() != output.numel():
                blame = (
                    f"rank {self._group.ranks[self._member]} receives {output.numel()} elements, but its input list "
                    f"has {inputs[self._member].numel()} at that place"
                )
                hint = "one input per rank, of the size of that rank's output"
                raise InvalidValue(*self._refusal("reduce_scatter", blame, hint))
            sizes = str([t.numel() for t in inputs])
        own = _nbytes([output])
        call = Call(
            Contract("reduce_scatter", name, None, _dtype(output), sizes),
            inputs,
            [output],
            factor=factor,
            send_bytes=_nbytes(inputs) - own,
            recv_bytes=(self._size - 1) * own,
        )
        return self._issue(call, [output])

    @seen_by_modes("reduce_scatter")
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> SimWork:
        return self._reduce_scatter(outputs[0], inputs[0], opts, single=False)

    @seen_by_modes("reduce_scatter_single", "_reduce_scatter_base")
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SimWork:
        return self._reduce_scatter(output, [input], opts, single=True)

    _reduce_scatter_base = reduce_scatter_single

    @seen_by_modes("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimWork:
        name, factor = reduce_op_name(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        self._check_reduces("reduce_scatter", name, inputs)
        self._check_coalesced("reduce_scatter", inputs, "input", outputs, "output")
        own = _nbytes(outputs)
        call = Call(
            Contract("reduce_scatter", name, None, _dtypes(outputs), _numels(inputs)),
            inputs,
            outputs,
            factor=factor,
            send_bytes=own * (self._size - 1),
            recv_bytes=own * (self._size - 1),
        )
        return self._issue(call, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- movement ----------------------------------------------------------------------------------------------

    @seen_by_modes("broadcast")
    def broadcast(self, tensors: Tensors, opts: Any) -> SimWork:
        self._check_no_gaps("broadcast", tensors)
        total, at_root = _nbytes(tensors), self._root("broadcast", opts.rootRank) == self._member
        call = Call(
            Contract("broadcast", "-", opts.rootRank, _dtypes(tensors), _shapes(tensors)),
            (),
            tensors,
            send_bytes=(self._size - 1) * total if at_root else 0,
            recv_bytes=0 if at_root else total,
        )
        return self._issue(call, tensors)

    def _all_gather(self, outputs: Tensors, input: torch.Tensor, *, single: bool) -> SimWork:
        if single:
            self._check_unsharded("all_gather", "output", outputs[0], input)
            sizes = str(input.numel())
        else:
            self._check_list("all_gather", "output", outputs, input)
            sizes = str([t.numel() for t in outputs])
            if outputs[self._member].numel() != input.numel():
                blame = (
                    f"rank {self._group.ranks[self._member]} gives {input.numel()} elements, but its output list "
                    f"has {outputs[self._member].numel()} at that place"
                )
                raise InvalidValue(*self._refusal("all_gather", blame, "one output per rank, of that rank's size"))
        own = _nbytes([input])
        call = Call(
            Contract("all_gather", "-", None, _dtype(input), sizes),
            [input],
            outputs,
            send_bytes=(self._size - 1) * own,
            recv_bytes=_nbytes(outputs) - own,
        )
        return self._issue(call, outputs)

    @seen_by_modes("allgather")
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> SimWork:
        del opts
        return self._all_gather(outputs[0], inputs[0], single=False)

    @seen_by_modes("all_gather_single", "_allgather_base")
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SimWork:
        del opts
        return self._all_gather([output], input, single=True)

    _allgather_base = all_gather_single

    @seen_by_modes("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimWork:
        del opts
        self._check_coalesced("all_gather", outputs, "output", inputs, "input")
        own = _nbytes(inputs)
        call = Call(
            Contract("all_gather", "-", None, _dtypes(inputs), _numels(inputs)),
            inputs,
            outputs,
            send_bytes=own * (self._size - 1),
            recv_bytes=own * (self._size - 1),
        )
        return self._issue(call, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @seen_by_modes("allgather_coalesced")
    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> SimWork:
        del opts
        if len(output_lists) != self._size or any(len(outputs) != len(inputs) for outputs in output_lists):
            blame = (
                f"the output lists have {[len(outputs) for outputs in output_lists]} tensors, expected {len(inputs)}, "
                f"one for each input, from each of {self._size} ranks"
            )
            hint = f"{self._size} lists of {len(inputs)} tensors"
            raise InvalidValue(*self._refusal("all_gather_coalesced", blame, hint))
        by_input = zip(*output_lists, strict=True)
        works = [self._all_gather(outputs, i, single=False) for outputs, i in zip(by_input, inputs, strict=True)]
        return self._together(works, [t for outputs in output_lists for t in outputs])

    @seen_by_modes("gather")
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> SimWork:
        at_root = self._root("gather", opts.rootRank) == self._member
        if at_root:
            self._check_list("gather", "output", outputs[0], inputs[0], uneven=False)
        own = _nbytes(inputs)
        call = Call(
            Contract("gather", "-", opts.rootRank, _dtype(inputs[0]), _shape(inputs[0])),
            inputs,
            outputs[0] if at_root else (),
            send_bytes=0 if at_root else own,
            recv_bytes=(self._size - 1) * own if at_root else 0,
        )
        return self._issue(call, call.outputs)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> SimWork:
        shards: Tensors = ()
        if self._root("gather", opts.rootRank) == self._member:
            self._check_unsharded("gather", "output", output, input)
            shards = output.view(self._size, *input.shape).unbind(0)
        return self.gather([shards], [input], opts)

    gather_into_tensor = gather_single

    @seen_by_modes("scatter")
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> SimWork:
        at_root = self._root("scatter", opts.rootRank) == self._member
        if at_root:
            self._check_list("scatter", "input", inputs[0], outputs[0], uneven=False)
        own = _nbytes(outputs)
        call = Call(
            Contract("scatter", "-", opts.rootRank, _dtype(outputs[0]), _shape(outputs[0])),
            inputs[0] if at_root else (),
            outputs,
            send_bytes=(self._size - 1) * own if at_root else 0,
            recv_bytes=0 if at_root else own,
        )
        return self._issue(call, outputs)

    def _all_to_all(
        self, outputs: Tensors, inputs: Tensors, splits: tuple[list[int], list[int]] | None = None
    ) -> SimWork:
        if splits is None and len(inputs) > 1:
            kept = _nbytes([inputs[self._member]])
        elif splits is None:
            kept = _nbytes(inputs) // self._size
        else:
            row = inputs[0].stride(0) if inputs[0].dim() and inputs[0].numel() else 0
            kept = splits[0][self._member] * row * inputs[0].element_size()
        call = Call(
            Contract("all_to_all", "-", None, _dtype(inputs[0])),
            inputs,
            outputs,
            splits=splits,
            send_bytes=_nbytes(inputs) - kept,
            recv_bytes=_nbytes(outputs) - kept,
        )
        return self._issue(call, outputs)

    @seen_by_modes("alltoall")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimWork:
        del opts
        self._check_list("all_to_all", "output", outputs, inputs[0])
        self._check_list("all_to_all", "input", inputs, outputs[0])
        return self._all_to_all(outputs, inputs)

    @seen_by_modes("all_to_all_single", "alltoall_base")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> SimWork:
        del opts
        self._check_dtype("all_to_all_single", "output", output, input)
        self._check_dense("all_to_all_single", "input", input)
        self._check_dense("all_to_all_single", "output", output)
        size = self._size
        splits = (self._split_of(input, input_splits, "input"), self._split_of(output, output_splits, "output"))
        assert len(splits[0]) == len(splits[1]) == size
        return self._all_to_all([output], [input], splits)

    alltoall_base = all_to_all_single

    def _split_of(self, tensor: torch.Tensor, splits: Sequence[int] | None, which: str) -> list[int]:
        op, blame = "all_to_all_single", ""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not tensor.dim():
            blame = f"the {which} has no dim 0 to split over {self._size} ranks: it is a scalar"
            hint = "a tensor with one row or more for each rank"
        elif splits is None or not len(splits):
            if rows % self._size == 0:
                return [rows // self._size] * self._size
            blame = f"dim 0 of the {which} has {rows} rows, not divisible by {self._size} ranks"
            hint = f"pass {which}_split_sizes"
        elif len(splits) != self._size or sum(splits) != rows:
            blame = (
                f"{which}_split_sizes {list(splits)} must be {self._size} numbers that add up to the {rows} rows of "
                f"the {which}"
            )
            hint = "one size per rank"
        if blame:
            raise InvalidValue(*self._refusal(op, blame, hint))
        assert splits is not None
        return list(splits)

    @seen_by_modes("barrier")
    def barrier(self, opts: Any = None) -> SimWork:
        del opts
        return self._issue(Call(Contract("barrier")))

    @seen_by_modes("monitored_barrier")
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        del timeout, wait_all_ranks
        self.barrier().wait()

    # -- point to point ----------------------------------------------------------------------------------------

    @seen_by_modes("send")
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> SimWork:
        self._check_no_gaps("send", tensors)
        return self._meet(tensors[0], self._member, self._root("send", dst), tag, sending=True)

    @seen_by_modes("recv")
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> SimWork:
        self._check_no_gaps("recv", tensors)
        return self._meet(tensors[0], self._root("recv", src), self._member, tag, sending=False)

    @seen_by_modes("recv_anysource")
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> SimWork:
        self._check_no_gaps("recv", tensors)
        return self._meet(tensors[0], None, self._member, tag, sending=False)

    def _meet(self, tensor: torch.Tensor, sender: int | None, receiver: int, tag: int, *, sending: bool) -> SimWork:
        """Pair a send with its receive, first come first served; the data moves when both are there."""
        endpoint, group = self._endpoint, self._group
        endpoint.check_caller()
        network, scheduler = endpoint.network, endpoint.scheduler
        if scheduler.fatal is not None:
            raise scheduler.end_of_rank()
        if network.devices is not None:
            self._check_device("send" if sending else "recv", [tensor])
        message = Message(group, sender, receiver, tag, tensor, sending)
        message.line, asked = user_line_and_issuer()
        if asked is not None and network.check_identity:
            ask, frame = asked
            message.purpose = ask(frame).purpose
            del frame  # which has what its function has
        del asked
        message.axis = self._axis()
        for issuing in network.issuing:
            issuing(endpoint, group, message)
        other = group.meet(message)
        for issued in network.issued:
            issued(endpoint, message, None)
        if message.dropped:
            scheduler.complete(message)
        if other is not None and (message.dropped or other.dropped):
            message.dropped = other.dropped = True
        elif other is not None:
            source, target = (message, other) if sending else (other, message)
            ends = without_modes(partial(deliver, network, source, target))
            scheduler.complete(other, ends)
            scheduler.complete(message, ends)
        if self._coalescing is not None:
            self._coalescing.append(message)
        return SimWork(endpoint, (message,), [tensor])


uncompiled(*vars(SimProcessGroup).values(), *vars(SimWork).values())
