"""A stage as torch's schedules run it: it counts the loss itself, and says when its gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from hyper_parallel.core.common.errors import InvalidState, InvalidValue
from hyper_parallel.core.fully_shard.module import StepReductions, units_with_wider_sums
from hyper_parallel.core.fully_shard.unit import Unit, nested_units
from hyper_parallel.core.pipeline.boundary import Boundary, Meta, plain_loss

__all__ = ["StagePosition", "Stage"]

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class StagePosition:
    """Where a stage stands.

    Attributes:
        index: its number.
        count: how many stages there are.
        device: where it computes.
        group: the ranks along the pipeline axis.
        splits_backward: whether gradients of inputs and of weights are computed apart.
        all_begun: whether all stages of the rank have gradients before the last backward of any of them.
    """

    index: int
    count: int
    device: torch.device
    group: dist.ProcessGroup
    splits_backward: bool
    all_begun: bool


class _HiddenUnits(nn.Module):
    """A stage with units in it, of which torch is not to know: when to gather and to reduce is said here."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module  # no submodule: torch looks for units among those

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The module's parameters, which are unsharded during a step."""
        return self.module.parameters(recurse)


class Stage(PipelineStage):
    """A stage of a `Pipeline`.

    What the last stage returns to torch is the loss of a micro-batch, and not its output: nobody keeps that for longer
    than the micro-batch needs it, and it may be of any kind. Everything that torch asks about shapes is known
    before, so that it has nothing to find out by a trial run.

    What comes from another stage lies in a buffer from when its receive is issued until its backward is done. Torch
    keeps a buffer for each message of a step, for good.

    Args:
        module: the layers of this stage.
        place: where it stands.
        boundary: how values pass.
        received: what comes from the stage before; of the first stage, what the caller gives it.
        sent: what goes to the next stage; empty for the last one.
        loss_fn: from an output and its target to the loss.
        before_unit: called with each unit before its gradients are added up, or reduced.
    """

    def __init__(
        self,
        module: nn.Module,
        place: StagePosition,
        boundary: Boundary,
        received: Sequence[Meta],
        sent: Sequence[Meta],
        loss_fn: LossFn,
        before_unit: Callable[[Unit], object] | None = None,
    ) -> None:
        self.boundary, self.received, self.sent, self.loss_fn = boundary, tuple(received), tuple(sent), loss_fn
        self.targets: Sequence[Any] = ()  # one per micro-batch, of a step under way
        self.reductions: StepReductions | None = None  # of gradients, in a step under way
        self.error: Exception | None = None  # what this stage's own code raised, which torch hides in another one
        self.before_unit = before_unit
        self._micro_batch = -1
        self._wider: list[Unit] = []
        self._splits_backward = place.splits_backward
        self._all_begun = place.all_begun
        inputs = tuple(meta.on_meta() for meta in received)
        outputs = tuple(meta.on_meta() for meta in sent) or (Meta((), torch.float32).on_meta(),)
        self.wrapped = module
        super().__init__(
            _HiddenUnits(module) if nested_units(module) else module,
            place.index,
            place.count,
            place.device,
            input_args=inputs,
            output_args=outputs,
            group=place.group,
        )

    def begin(self, targets: Sequence[Any], *, training: bool) -> None:
        """A step starts."""
        self.targets, self.error = targets, None
        self._wider = units_with_wider_sums(self.wrapped) if training else []
        self.reductions = None
        if training:  # in place: gradients that stay until the step ends were there at once anyway
            self.reductions = StepReductions(self.wrapped, before=self.before_unit, in_place=self._all_begun)

    def end(self) -> None:
        """A step is through, or has failed: release its tensors."""
        self.targets, self._wider, self.reductions = (), [], None
        self.clear_runtime_states()

    # -- what torch calls ----------------------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a micro-batch."""
        self._micro_batch = fwd_chunk_id
        try:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except Exception:
            if self.error is not None:  # torch puts the stage's arguments in its place
                raise self.error from self.error.__cause__
            raise
        _drop_buffers(self.args_recv_info[fwd_chunk_id])  # what was received lives on with its graph
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send what has no graph: torch 2.11 keeps what it has sent until the next micro-batch's is sent."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        for op in ops:
            if op.tensor.requires_grad:
                op.tensor = op.tensor.detach()
        return ops

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of a micro-batch, or the loss."""
        try:
            given = args if self.is_first else self.boundary.incoming(args, self.received)
            output = self.submod(*given, **kwargs)
            if self.is_last:
                return self._detachable(plain_loss(self.loss_fn(output, self.targets[self._micro_batch])))
            shards = self.boundary.outgoing(self.stage_index, output)
            self._check_sent(self.boundary.metas(output, shards))
        except Exception as error:
            self.error = error
            raise
        return tuple(map(self._detachable, shards))

    def _detachable(self, output: torch.Tensor) -> torch.Tensor:
        """Losses, and outputs where backwards are split, are detached in place later, which views cannot be."""
        return output.clone() if (self._splits_backward or self.is_last) and output._is_view() else output

    def _check_sent(self, metas: tuple[Meta, ...]) -> None:
        if metas != self.sent:
            asked = f"cannot send what stage {self.stage_index} returned for micro-batch {self._micro_batch}"
            now, before = (", ".join(map(str, which)) for which in (metas, self.sent))
            blame = "it differs from what the stage returned before for inputs of these shapes"
            hint = "shapes and dtypes that depend on the inputs' shapes alone"
            raise InvalidValue(asked, blame, f"now: {now}   before: {before}", hint)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Compute the gradients of a micro-batch: all of them, or those of inputs or of weights alone.

        In the last one they are reduced unit by unit beside what is still computed, unless another stage waits for
        that: packed and sent meanwhile, they would hold up its gradients. It reduces while that stage computes.
        """
        holds_up_nobody = self.is_first if backward_type == "full" else backward_type == "weight"
        reduces = last_backward and holds_up_nobody and self.reductions is not None
        try:
            with self._reducing(backward_type, bwd_kwargs) if reduces else nullcontext():
                result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        except RuntimeError as error:
            if backward_type != "weight" or "graph a second time" not in str(error):
                raise
            asked = f"cannot compute the gradients of the weights of stage {self.stage_index} apart"
            blame = "some weight is used several times, each time beside another one, which torch cannot take apart"
            seen = f"seen: {str(error).partition('.')[0]}"
            raise InvalidState(asked, blame, seen, "schedule='interleaved', or a copy of the weight") from error
        if backward_type == "full" and self.is_last:
            # Torch keeps all losses until the step ends, and with each of them its graph, and what that still holds.
            given = bwd_kwargs["stage_output"]
            for loss in given if isinstance(given, (tuple, list)) else (given,):
                loss.detach_()
        if backward_type != "input" and not reduces:
            for unit in self._wider:
                if self.before_unit is not None:
                    self.before_unit(unit)
                unit.keep_gradients()
        return result

    @contextmanager
    def _reducing(self, backward_type: str, bwd_kwargs: dict[str, Any]) -> Iterator[None]:
        """Reduce gradients as they come: by autograd, or by groups of weights, which are in the order of forward."""
        assert self.reductions is not None
        by_groups = backward_type == "weight"
        if by_groups:
            bwd_kwargs["param_groups"] = self._told_of_each(bwd_kwargs["param_groups"])
        with self.reductions.in_backward(forward_order=by_groups):
            yield

    def _told_of_each(self, groups: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Hand torch one group of weights after the other; when it asks for the next, gradients of one are there."""
        for group in groups:
            weights = [node.variable for node in group["params"]]  # accumulators of gradients
            yield group
            if self.reductions is not None:
                for weight in weights:
                    self.reductions.arrived(weight)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the backward of a micro-batch, or its part for the inputs."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            _drop_buffers(self.grad_recv_info[bwd_chunk_id])

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive what the stage before sends for a micro-batch."""
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of what was sent for a micro-batch."""
        if self.has_backward:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make_buffers(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if getattr(info, "buffer", None) is not None:  # the first stage's inputs have none
                info.buffer = _like(info.buffer, self.device)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Let what torch makes in the block, which are buffers for all messages of a step, take no memory."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """All gradients of the stage are there: reduce what is left, while other stages of this rank go on."""
        del grad_scale_factor  # what is summed are shares of the loss
        if self.reductions is not None:
            self.reductions.start()

    def finish_reductions(self) -> None:
        """All stages of this rank are through: have the gradients."""
        if self.reductions is not None:
            self.reductions.start()  # where the schedule has not asked for it
            self.reductions.finish()

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Hand gradients to the stage before, on this rank; torch asks in an evaluation too, where there are none."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take gradients from the next stage, on the same rank; in an evaluation there are none."""
        if self.has_backward:
            if any(gradient is None for gradient in next_stage_bwd_outputs):  # torch fills the buffer with zeros
                self._make_buffers(self.grad_recv_info[mb_index])
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Torch 2.11 checks shapes here, of the last stage too; `_check_sent` has."""


def _drop_buffers(infos: Sequence[Any]) -> None:
    """Let go of what was received; what torch asks of a buffer that is not in use, one without memory answers."""
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            info.buffer = _like(info.buffer, torch.device("meta"))


def _like(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Another buffer; torch 2.11 says once, when it makes them, that what is received requires gradients."""
    new = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return new.requires_grad_(buffer.requires_grad)
