"""`Pipeline`: a rank's stages of a model, and the steps that it takes with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidState, InvalidValue
from hyper_parallel.core.common.torch_compat import autocast_dtype
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.fully_shard.module import hold_parameters, release_parameters
from hyper_parallel.core.pipeline.arguments import (
    LossFn,
    as_tensors,
    check_indices,
    check_mesh,
    check_split_backward,
    check_units,
    checked_stages,
)
from hyper_parallel.core.pipeline.boundary import Boundary, Meta, find_boundaries
from hyper_parallel.core.pipeline.schedules import find_schedule
from hyper_parallel.core.pipeline.split import rank_of_stage, stages_of_rank
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.pipeline.stage import Stage

__all__ = ["Pipeline"]

Tensors = torch.Tensor | tuple[torch.Tensor, ...]

_MOST_SHAPES = 64  # of batches that are remembered


@dataclass
class _Runner:
    """Torch's schedule for batches of some shapes.

    Attributes:
        key: the dtype of autocast, and the shapes and dtypes of a micro-batch.
        stages: of this rank.
        schedule: torch's.
    """

    key: tuple[Any, ...]
    stages: list[Stage]
    schedule: Any


class Pipeline:
    """The stages of one rank, run by one of torch's schedules.

        for part in stage_slices(config.num_hidden_layers, "1f1b", mesh["pp"].get_local_rank(), mesh["pp"].size()):
            stages.append(Llama(config).keep(part.layers, embed=part.is_first, head=part.is_last))
        ...  # tensor parallelism, fully_shard, init_parameters
        pipeline = Pipeline(stages, mesh["pp"], schedule="1f1b", micro_batches=8, loss_fn=loss_share)
        loss = pipeline.step(tokens, targets)  # and the gradients are there

    Gradients of micro-batches add up; nothing is divided. So `loss_fn` returns a micro-batch's *share* of the loss,
    such as the sum over its tokens divided by the number of tokens of all micro-batches and ranks. With `fully_shard`
    inside, let units add up, too: `set_reduce_op_type("sum")`.

    Units of `fully_shard` and `hsdp` are gathered once per step, and their gradients reduced once: those of the first
    stage in its last backward, beside it, those of other stages behind theirs. Their unsharded parameters stay in
    memory meanwhile, whatever `reshard_after_forward` says, as gathering for each micro-batch would take most of what a
    pipeline saves; `keep_gathered=False` does that.

    Communication: per micro-batch and boundary between ranks, what goes over it forward, and its gradient backward;
    that of the stages' modules; once for each new shape of a batch, `find_boundaries`.

    Args:
        stages: of this rank, in model order: modules, on their device. The first stage is called with the inputs, each
            other one with what the stage before returned: a tensor or a tuple of tensors, whose shapes depend on the
            inputs' shapes alone. What the last stage returns goes to `loss_fn`, and is not kept.
        mesh: one axis, of the ranks that hold the stages.
        schedule: "gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble" or "zbv".
        micro_batches: the parts of a batch, of equal size.
        loss_fn: from what the last stage returned and the targets of the micro-batch, to a tensor of one element.
        stage_indices: the numbers of the stages, if known, to be checked against the schedule's.
        num_stages: of all ranks, likewise.
        boundary: the layout of DTensors between stages, on a mesh of this rank; a sequence, one for each tensor, where
            a stage returns several. None: plain tensors.
        keep_gathered: False: gather the parameters anew for each micro-batch, as the units say.

    Raises:
        TypeError: no stages, a loss_fn that cannot be called.
        ValueError: a mesh of several axes, a schedule that does not exist or cannot have so many stages per rank or
            micro-batches; layers that are compiled or recomputed in a way that the schedule cannot run.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: DeviceMesh,
        schedule: str = "1f1b",
        micro_batches: int = 1,
        loss_fn: LossFn | None = None,
        *,
        stage_indices: Sequence[int] | None = None,
        num_stages: int | None = None,
        boundary: Layout | Sequence[Layout | None] | None = None,
        keep_gathered: bool = True,
    ) -> None:
        self.stages = checked_stages(stages)
        self.kind = find_schedule(schedule)
        self._torch_class = self.kind.torch_class
        hint = "loss_fn=lambda output, target: the micro-batch's share of the loss"
        check("cannot make a pipeline", "callable", hint, loss_fn=loss_fn)
        assert loss_fn is not None
        self.loss_fn = loss_fn
        check_mesh(mesh)
        self.group: dist.ProcessGroup = mesh.get_group()
        rank, ranks = self.group.rank(), self.group.size()
        each = self.kind.checked_stages_per_rank(len(self.stages))
        self.num_stages = ranks * each
        self.stage_indices = stages_of_rank(schedule, rank, ranks, each)
        check_indices(self.stage_indices, stage_indices, self.num_stages, num_stages, f"{schedule!r}")
        self.kind.check_micro_batches(micro_batches, ranks, self.num_stages)
        self.micro_batches = micro_batches
        check("cannot make a pipeline", "bool", keep_gathered=keep_gathered)
        self.boundary = Boundary(boundary)
        self.device = get_platform(mesh.device_type).device()
        self.keep_gathered = keep_gathered
        if self.kind.splits_backward:
            check_split_backward(self.kind.name, self.stages, keep_gathered=keep_gathered)
        check_units(self.stages, self.group)
        self._owners = [rank_of_stage(schedule, stage, ranks, each) for stage in range(self.num_stages)]
        self._known: dict[Any, list[tuple[Meta, ...]]] = {}  # what goes between stages, by the key of a runner
        self._runners: dict[bool, _Runner] = {}

    @property
    def has_first(self) -> bool:
        """Whether this rank has the first stage, which uses the inputs."""
        return 0 in self.stage_indices

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which uses the targets and returns the loss."""
        return self.num_stages - 1 in self.stage_indices

    def step(self, inputs: Tensors, targets: Any) -> torch.Tensor:
        """Run forward and backward of a batch; gradients are added to those in `param.grad`.

        Args:
            inputs: of the first stage: tensors whose dim 0 is the batch, equal on all ranks along the pipeline.
            targets: what `loss_fn` takes, a tensor or a tuple of them, likewise.

        Returns:
            The sum of what `loss_fn` returned for the micro-batches, detached; zero on ranks without the last stage.
            float64 where the values between stages are, else float32: the same on all ranks.

        Raises:
            TypeError: no tensors.
            ValueError: a batch that does not divide into micro-batches; what a stage returned cannot be sent.
        """
        if not torch.is_grad_enabled():
            blame = "gradients are switched off here"
            raise InvalidState("cannot run a step", blame, "seen: torch.no_grad()", "pipeline.eval(...)")
        return self._run(inputs, targets, training=True)

    def eval(self, inputs: Tensors, targets: Any) -> torch.Tensor:
        """Run the forward of a batch alone, without gradients; arguments and result are those of `step`.

        Modules stay in the mode they are in: call `stage.eval()` on each before.
        """
        with torch.no_grad():
            return self._run(inputs, targets, training=False)

    def _run(self, inputs: Tensors, targets: Any, *, training: bool) -> torch.Tensor:
        given = as_tensors(inputs, "inputs")
        parts = self._micro_batches(given, "inputs")
        wanted = self._micro_batches(as_tensors(targets, "targets"), "targets")
        labels = [part[0] for part in wanted] if isinstance(targets, torch.Tensor) else list(wanted)
        with self._whole_parameters(parts[0], training=training) as runner:
            for stage in runner.stages:
                stage.begin(labels, training=training)
            losses: list[torch.Tensor] = []
            run = runner.schedule.step if training else runner.schedule.eval
            # The stage has the targets itself: torch is to pass something on, one row for each micro-batch.
            rows = torch.empty(self.micro_batches, 0)
            run(*(given if self.has_first else ()), target=rows, losses=losses, return_outputs=False)
            for stage in runner.stages:
                stage.finish_reductions()
        dtype = self._loss_dtype(runner)
        if not self.has_last:
            return torch.zeros((), device=self.device, dtype=dtype)
        return torch.stack([loss.detach().to(dtype) for loss in losses]).sum()

    def _loss_dtype(self, runner: _Runner) -> torch.dtype:
        """The same on all ranks, who may add their losses up: double where what goes into the last stage is."""
        before = self._known[runner.key][-1] if self.num_stages > 1 else ()
        params = [] if self.num_stages > 1 else [param.dtype for param in self.stages[-1].parameters()]
        known = [meta.dtype for meta in before] + params
        return torch.float64 if {torch.float64, torch.complex128} & {*known} else torch.float32

    @contextmanager
    def _whole_parameters(self, inputs: tuple[torch.Tensor, ...], *, training: bool) -> Iterator[_Runner]:
        """Have the parameters gathered during a step, and everything as it was after it, also if it fails."""
        runner: _Runner | None = None
        key = (autocast_dtype(self.device.type), *((tuple(each.shape), each.dtype) for each in inputs))
        try:
            if key not in self._known:
                self._hold(keep=True)
                mine = dict(zip(self.stage_indices, self.stages, strict=True))
                found = find_boundaries(mine, self._owners, self.boundary, inputs, self.group, self.device)
                if len(self._known) == _MOST_SHAPES:
                    self._known.pop(next(iter(self._known)))  # the oldest
                self._known[key] = found
                if not self.keep_gathered:
                    self._let_go(None, failed=False)
                    self._hold(keep=False)
            else:
                self._hold(keep=self.keep_gathered)
            runner = self._runner(inputs, key, training=training)
            yield runner
        except BaseException:
            self._let_go(runner, failed=True)
            raise
        else:
            self._let_go(runner, failed=False)

    def _hold(self, *, keep: bool) -> None:
        for stage in self.stages:
            hold_parameters(stage, keep=keep)

    def _let_go(self, runner: _Runner | None, *, failed: bool) -> None:
        for stage in self.stages:
            release_parameters(stage, failed=failed)
        for running in runner.stages if runner else ():
            running.end()
        if failed:
            self._runners.clear()  # what was under way cannot be taken up again

    def _runner(self, inputs: tuple[torch.Tensor, ...], key: tuple[Any, ...], *, training: bool) -> _Runner:
        """Torch's schedule for micro-batches of these shapes."""
        from hyper_parallel.core.pipeline.stage import (
            Stage,
            StagePosition,
        )  # half a second, which only a first step pays

        known = self._runners.get(training)
        if known is not None and known.key == key:
            return known
        first = tuple(Meta(tuple(each.shape), each.dtype) for each in inputs)
        between = [first, *self._known[key], ()]
        begun = self.kind.begins_all_stages(self.micro_batches, self.group.size())
        stages = [
            Stage(
                module,
                StagePosition(index, self.num_stages, self.device, self.group, self.kind.splits_backward, begun),
                self.boundary,
                between[index],
                between[index + 1],
                self.loss_fn,
            )
            for index, module in zip(self.stage_indices, self.stages, strict=True)
        ]
        given: Any = stages if self.kind.is_multi else stages[0]
        schedule = self._torch_class(given, self.micro_batches, loss_fn=_first, scale_grads=False)
        self._runners[training] = _Runner(key, stages, schedule)
        return self._runners[training]

    def _micro_batches(self, tensors: tuple[torch.Tensor, ...], what: str) -> list[tuple[torch.Tensor, ...]]:
        """The parts of a batch."""
        sizes = [each.shape[0] if each.dim() else 0 for each in tensors]
        if len(set(sizes)) > 1 or not sizes or sizes[0] == 0 or sizes[0] % self.micro_batches:
            blame = f"the batch of {what} does not divide into {self.micro_batches} micro-batches of equal size"
            seen = f"{what}: {', '.join(str(tuple(each.shape)) for each in tensors)}"
            best = max((sizes[0] if sizes else 0) // self.micro_batches, 1) * self.micro_batches
            hint = f"{best} rows, or drop the last batch of the data"
            raise InvalidValue("cannot run the pipeline", blame, seen, hint)
        chunks = [each.chunk(self.micro_batches) for each in tensors]
        return list(zip(*chunks, strict=True))


def _first(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The loss, which the last stage has counted already."""
    del rows
    return output
