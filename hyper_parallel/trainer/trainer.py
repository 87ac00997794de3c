"""Train a model: one function, called by every rank, real or simulated, or by one process alone."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import torch
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.fully_shard.api import HSDPModule
from hyper_parallel.core.hsdp.api import HSDPCell
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models.hf_weights import load_huggingface
from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.trainer.config import STUCK_AFTER_S, Config
from hyper_parallel.trainer.convert import check_start
from hyper_parallel.trainer.data import IGNORED, load_corpus, rank_part, samples, valid_samples
from hyper_parallel.trainer.loss import ShareOfLoss
from hyper_parallel.trainer.metrics import flops_per_token, memory_bytes, model_flops_utilisation
from hyper_parallel.trainer.nonfinite import NonFinitePolicy, dump_nonfinite, nonfinite_error
from hyper_parallel.trainer.optimizer import build_optimizer, clip_gradients, learning_rate
from hyper_parallel.trainer.parallelize_llama import parallelize_llama
from hyper_parallel.trainer.parallelize_moe import parallelize_moe
from hyper_parallel.trainer.place import RankPlace, process_group
from hyper_parallel.trainer.preflight import check_precision, plan_run
from hyper_parallel.trainer.ranks import Ranks
from hyper_parallel.trainer.record import KEPT, JsonlLog, StepRecord, TrainResult
from hyper_parallel.trainer.saving import Progress, Saver
from hyper_parallel.trainer.steps import WEIGHTS, describe_axes
from hyper_parallel.trainer.stop import StopRequest
from hyper_parallel.trainer.tensorboard import TensorBoardLog
from hyper_parallel.trainer.watchdog import Watchdog, default_store

OnStep = Callable[[StepRecord], None]

PARALLELIZE = MappingProxyType({"llama": parallelize_llama, "moe": parallelize_moe})


def train(config: Config, on_step: OnStep | None = None, stop: StopRequest | None = None) -> TrainResult:
    """Train as one rank of a world and return the same result on every rank.

    >>> from hyper_parallel.trainer.config import TrainConfig
    >>> result = train(Config(train=TrainConfig(steps=2, batch_size=2, seq_len=16, device="cpu")))
    >>> len(result.losses)
    2

    The world is that of the process group, if there is one, which is used and left alone; else torchrun's environment,
    from which one is made for the run; none means one rank. Runs with the same config see the same global batches and
    start from the same weights, however many ranks share the work, and whatever the degrees.

    Args:
        config: the run.
        on_step: called by the first rank after every step.
        stop: asks the run to save and end after the step it is in; who started the process sets it, see
            `stop_on_signals`.

    Raises:
        TypeError: an argument of another kind.
        ValueError: the config does not fit the number of ranks, the device, or the checkpoint it should go on from.
        PlatformUnavailableError: the device cannot be used here.
        NonFiniteError: the loss or the gradient is inf or NaN, and the config says to stop.
        RankLostError: other ranks have failed or do not answer.
    """
    check("cannot train", Config, config=config)
    check("cannot train", "callable | None", on_step=on_step)
    if stop is not None:
        check("cannot train", StopRequest, stop=stop)
    place = RankPlace.current()
    dims = plan_run(config, place.world_size)
    platform = get_platform(config.train.device)
    check_precision(config, platform)
    platform.set_device(place.local_rank)
    with _watchdog(config, place, stop) as watchdog:
        if dims.world_size == 1 and config.parallel.param_dtype != "bf16":
            return Trainer(config, dims, platform, place, None, stop, watchdog).run(on_step)
        watchdog.beat(0, "meeting the other ranks")
        with process_group(platform, place), watchdog.telling():
            watchdog.connect(default_store())
            watchdog.beat(0, "building the model")
            mesh = dims.build_mesh(platform.device_type)
            return Trainer(config, dims, platform, place, mesh, stop, watchdog).run(on_step)


def _watchdog(config: Config, place: RankPlace, stop: StopRequest | None) -> Watchdog:
    """Return what ends this rank when it cannot go on; one without others may take its time, as in a debugger."""
    seconds = config.train.stuck_after_s
    if seconds is None:
        seconds = STUCK_AFTER_S if place.world_size > 1 else 0
    folder = _out(config) / "stuck"
    return Watchdog(seconds or math.inf, folder, rank=place.rank, world_size=place.world_size, stop=stop)


def _out(config: Config) -> Path:
    """Return where reports on what went wrong go."""
    return Path(config.train.log or "out/train.jsonl").parent


class Trainer:
    """One rank's side of a run: its part of the model, of the optimizer state and of the data.

    Args:
        config: the run.
        dims: its degrees.
        platform: the calling rank's kind of device.
        place: which rank this is.
        mesh: the ranks by axis; None trains the bare model on one device, without torch.distributed.
        stop: asks the run to end.
        watchdog: hears of progress.

    Attributes:
        model: this rank's part of the model.
        steps_done: optimizer steps so far, those before a resumption included.
        samples_used: sequences of the text so far, over all ranks.
    """

    def __init__(
        self,
        config: Config,
        dims: ParallelDims,
        platform: Platform,
        place: RankPlace,
        mesh: DeviceMesh | None,
        stop: StopRequest | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.config, self.dims, self.platform, self.place, self.stop = config, dims, platform, place, stop
        self.watchdog = watchdog
        self.device = platform.device(place.local_rank)
        self.corpus = load_corpus(config.data.path, config.data.pattern, config.data.max_bytes)
        self.ranks = Ranks(dims, mesh is not None, self.device, WEIGHTS[config.parallel.param_dtype])
        self.share = ShareOfLoss()
        self.model = PARALLELIZE[config.train.model](config, dims, self.device, self.share)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optimizer)
        self.policy = NonFinitePolicy(config.train.on_nonfinite, config.train.max_skips)
        self.steps_done = self.samples_used = self.skipped = 0
        self.saver = Saver(config, self.model, self.optimizer, place, self.device)
        self._resume()

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self, on_step: OnStep | None = None) -> TrainResult:
        """Take all steps that are left, log them, validate at the end, and save when it is time."""
        train, first_rank = self.config.train, self.place.rank == 0
        records, first_step = deque[StepRecord](maxlen=KEPT), self.steps_done + 1
        stopped: str | None = None
        with ExitStack() as stack:
            log = stack.enter_context(JsonlLog(train.log if first_rank else None, keep_steps=self.steps_done))
            board = stack.enter_context(TensorBoardLog(train.tensorboard if first_rank else None))
            stack.enter_context(self.saver)
            while self.steps_done < train.steps and stopped is None:
                self._tell(self.steps_done + 1, "training")
                record = self.step()
                records.append(record)
                log.write(record)  # before the save: what goes on from there keeps the lines up to its step
                stopped = self._asked_to_stop()
                self._tell(self.steps_done, "saving")
                self._save_if_due(ends=stopped is not None)
                if first_rank:
                    board.write(record)
                    if on_step is not None:
                        on_step(record)
        return TrainResult(
            steps=tuple(records),
            valid_loss=records[-1].valid_loss if records else None,
            parameters=self.config.shape().num_parameters(),
            layout=describe_axes(self.dims),
            device=self.platform.name(),
            stopped=stopped,
            first_step=first_step,
            save_failures=self.saver.failures,
            safe_step=self.saver.safe_step,
            last_save_failed=self.saver.last_failed,
        )

    def _tell(self, step: int, doing: str) -> None:
        """Tell the watchdog that this rank has come here; steps are numbered from 1, as in the log."""
        if self.watchdog is not None:
            self.watchdog.beat(step, doing)

    def _asked_to_stop(self) -> str | None:
        if self.stop is None or not self.ranks.any(self.stop.requested()):
            return None
        return self.stop.reason or "another rank"

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> StepRecord:
        """Take the next optimizer step: forward and backward over this rank's samples, reduce, update."""
        train, start = self.config.train, time.perf_counter()
        self.platform.reset_peak_memory()
        lr = learning_rate(self.steps_done, train.steps, self.config.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        part = rank_part(self.samples_used, train.batch_size, self.ranks.batch_rank, self.ranks.batch_ranks)
        inputs, targets = samples(self.corpus.train, part, train.seq_len, train.seed, self.config.data.ignored)
        loss = self.ranks.over_shares(self._backward(*self._place(inputs, targets)))
        grad_norm = clip_gradients(self.model, self.config.optimizer.max_grad_norm)
        counted, taken = self.share.counted, self._update(loss, grad_norm, part)
        self.steps_done += 1
        self.samples_used += train.batch_size
        self.platform.synchronize()
        seconds = time.perf_counter() - start
        speed = train.batch_size * train.seq_len / seconds
        per_token = flops_per_token(self.config.shape(), train.seq_len)
        due = self.steps_done == train.steps or (train.eval_every and self.steps_done % train.eval_every == 0)
        return StepRecord(
            step=self.steps_done,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            seconds=seconds,
            tokens_per_s=speed,
            valid_loss=self.evaluate() if due else None,
            mfu=model_flops_utilisation(speed, per_token, self.platform.name(), self.place.world_size),
            memory_bytes=memory_bytes(self.platform),
            tokens=int(counted),
            skipped=not taken,
        )

    def _place(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Move this rank's sequences to its device, keep its part of each, and count the tokens of all ranks."""
        context = self.model.context
        if context is not None:
            inputs, targets = context.split(inputs), context.split(targets)
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        self.share.counted = self.ranks.over_tokens((targets != IGNORED).sum()).item()
        return inputs, targets

    def _backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Add up gradients over the micro-batches, and return this rank's share of the loss."""
        if self.model.pipeline is not None:
            loss = self.model.pipeline.step(inputs, targets)
            if self.model.tied is not None:
                self.model.tied.add_gradients()
            return loss
        (model,) = self.model.parts
        total = torch.zeros((), device=self.device, dtype=self.ranks.dtype)
        pieces = self.config.train.accumulate
        for index, (some, expected) in enumerate(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)):
            _communicate_gradients(model, index == pieces - 1)
            loss = self.share(model(some), expected)
            loss.backward()
            total += loss.detach()
        return total

    def _update(self, loss: float, grad_norm: float, part: range) -> bool:
        """Take the optimizer's step, unless loss or gradient are not finite; tell whether it was taken."""
        step = self.steps_done + 1
        action = self.policy.check(loss, grad_norm, self.skipped)
        if action in ("stop", "dump"):
            folder = None
            if action == "dump":
                folder = _out(self.config) / "nonfinite"
                named, rank = self.model.named_parameters(), self.place.rank
                dump_nonfinite(folder, named, rank=rank, step=step, loss=loss, grad_norm=grad_norm, samples=part)
                self.ranks.any(False)  # a rank that raises ends the others: let all have written
            raise nonfinite_error(step, loss, grad_norm, skipped_in_a_row=self.skipped, dumped_to=folder)
        taken = action == "go"
        self.skipped = 0 if taken else self.skipped + 1
        if taken:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.after_step(taken)
        return taken

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the held-back text; every rank takes its part, and gets the same number."""
        train, ranks = self.config.train, self.ranks
        self._tell(self.steps_done, "validating")
        size = train.batch_size // ranks.batch_ranks
        size = size if self.model.pipeline is not None else max(size // train.accumulate, 1)
        whole = valid_samples(
            self.corpus.valid, train.eval_sequences, train.seq_len, ranks.batch_rank, ranks.batch_ranks, size
        )
        inputs, targets = self._place(*whole)
        total = torch.zeros((), device=self.device, dtype=self.ranks.dtype)
        with self.model.evaluating():
            for some, expected in zip(inputs.split(size), targets.split(size), strict=True):
                if self.model.pipeline is not None:
                    total += self.model.pipeline.eval(some, expected)
                else:
                    total += self.share(self.model.parts[0](some), expected)
        return ranks.over_shares(total)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        self._tell(0, "loading")
        found = self.saver.resume()
        if found is None and self.config.train.start_from is not None:
            check_start(self.config)
            load_huggingface(dict(self.model.named_tensors()), self.config.train.start_from)
        if found is not None:
            self.steps_done, self.samples_used, self.skipped = found.steps, found.samples, found.skipped

    def _save_if_due(self, ends: bool) -> None:
        keep, train = self.config.checkpoint, self.config.train
        ends = ends or self.steps_done == train.steps
        if keep.folder is not None and (ends or (keep.every and self.steps_done % keep.every == 0)):
            self.saver.save(Progress(self.steps_done, self.samples_used, self.skipped))


def _communicate_gradients(model: torch.nn.Module, flag: bool) -> None:
    """Let the next backward reduce gradients over ranks, or let it only add them up."""
    if isinstance(model, HSDPModule):
        model.set_requires_gradient_sync(flag)
    elif isinstance(model, HSDPCell):
        model.set_requires_grad_sync(flag)
