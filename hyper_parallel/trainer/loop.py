"""The loop of a training run, called by every rank, real or simulated, or by one process alone."""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.common.groups import init_process_group
from hyper_parallel.core.common.torch_compat import flat_bytes
from hyper_parallel.core.fully_shard.api import HSDPModule
from hyper_parallel.core.hsdp.api import HSDPCell
from hyper_parallel.core.machine.description import find_machine, machine_of_device
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.redistribute.plan import plan_for
from hyper_parallel.models.hf_weights import load_huggingface
from hyper_parallel.models.lora import is_of_adapter
from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.trainer import report
from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.data import IGNORED, LoaderBatches, rank_part, samples, valid_samples, windows_that_count
from hyper_parallel.trainer.guards import StopRequest, action_after, dump_nonfinite, nonfinite_error
from hyper_parallel.trainer.metrics import flops_per_token, model_flops_utilisation
from hyper_parallel.trainer.optimizer import MakeScheduler, Rates, build_optimizer, clip_gradients, update
from hyper_parallel.trainer.parallelize import Parallelized, ShareOfLoss, Split, describe_axes, shard_given
from hyper_parallel.trainer.parallelize_llama import parallelize_llama
from hyper_parallel.trainer.preflight import check_given, check_lora, check_platform, plan_run, read_text
from hyper_parallel.trainer.report import Prediction, StepRecord, TrainResult
from hyper_parallel.trainer.saving import Progress, Saver, check_start, given_shape, model_of_folder
from hyper_parallel.trainer.watchdog import RunWatchdog, default_store

OnStep = Callable[[StepRecord], None]
MakeLoader = Callable[[], Iterable[Any]]
MakeModel = Callable[[], nn.Module]


def train(
    config: Config,
    on_step: OnStep | None = None,
    stop: StopRequest | None = None,
    predicted: Prediction | None = None,
    *,
    data: MakeLoader | None = None,
    lr_scheduler: MakeScheduler | None = None,
    model: MakeModel | None = None,
    split: Split | None = None,
) -> TrainResult:
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
        predicted: what a step should take; the first rank's records carry it.
        data: makes a loader of batches, in place of the text of `config.data`; called once by every rank, see
            `LoaderBatches`. Nothing is held back then, and validated on. `RecordLoader` makes one of records.
        lr_scheduler: makes a scheduler of torch.optim.lr_scheduler for an optimizer, in place of the named schedule and
            its warmup; called once by every rank. Its rate, from `config.optimizer.lr`, is that of all parameters, and
            it steps after each step.
        model: makes a causal language model with its weights, in place of that of `config.model`, such as one of
            transformers or peft; called once by every rank, after torch's generator got the seed. It is split by data
            parallelism, and what it has frozen is not trained, nor saved. See `shard_given`.
        split: splits such a model over tp in place, called with it and the mesh, as `parallelize_huggingface` is.

    Raises:
        TypeError: an argument of another kind.
        ValueError: a batch of another form, or one that differs among ranks; the config does not fit the number of
            ranks, the device, or the checkpoint it should go on from.
        PlatformUnavailableError: the device cannot be used here.
        NonFiniteError: the loss or the gradient is inf or NaN, and the config says to stop.
        RankLostError: other ranks have failed or do not answer.
    """
    made: dict[str, Any] = {"data": data, "lr_scheduler": lr_scheduler, "model": model, "split": split}
    check("cannot train", "callable | None", on_step=on_step, **made)
    if stop is not None:
        check("cannot train", StopRequest, stop=stop)
    place = RankPlace.current()
    dims = plan_run(config, place.world_size)
    check_lora(config)
    if model is None and config.is_other:
        model = partial(model_of_folder, config)
    if model is not None:
        check_given(config, dims, is_split=split is not None)
    platform = get_platform(config.train.device)
    check_platform(config, platform)
    platform.set_device(place.local_rank)
    out, made["model"] = config.train.out(), model
    snapshot = out / "memory" / f"rank-{place.rank}.pickle" if config.train.memory_snapshot else None
    recorded: AbstractContextManager[Any] = nullcontext() if snapshot is None else platform.recorded_memory(snapshot)
    ranks: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size, "stop": stop}
    patience, recording = config.train.patience(place.world_size), platform.flight_recording
    with RunWatchdog(patience, out / "stuck", **ranks, recording=recording) as watchdog, recorded:
        if dims.world_size == 1 and config.precision.policy() is None:
            return Trainer(config, dims, platform, place, None, stop, watchdog, predicted, **made).run(on_step)
        watchdog.beat(0, "meeting the other ranks")
        with process_group(platform, place), watchdog.telling():
            watchdog.connect(default_store())
            watchdog.beat(0, "building the model")
            mesh = dims.build_mesh(platform.device_type)
            return Trainer(config, dims, platform, place, mesh, stop, watchdog, predicted, **made).run(on_step)


class Trainer:
    """One rank's side of a run: its part of the model, of the optimizer state and of the data.

    Args:
        config, dims: the run, and its degrees.
        platform, place: the calling rank's kind of device, and which rank it is.
        mesh: the ranks by axis; None trains the bare model on one device, without torch.distributed.
        watchdog: hears of progress.
        stop, predicted, data, lr_scheduler, model, split: see `train`.

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
        watchdog: RunWatchdog | None = None,
        predicted: Prediction | None = None,
        data: MakeLoader | None = None,
        lr_scheduler: MakeScheduler | None = None,
        model: MakeModel | None = None,
        split: Split | None = None,
    ) -> None:
        self.config, self.dims, self.platform, self.place, self.stop = config, dims, platform, place, stop
        # Hears that this rank has come to a step, numbered from 1 as in the log, and what it is about.
        self._tell: Callable[[int, str], None] = (lambda step, doing: None) if watchdog is None else watchdog.beat
        self.device = platform.device(place.local_rank)
        train = config.train
        self.ranks = RunGroups(dims, mesh is not None, self.device, config.precision.dtype("buffers"))
        finds = platform.device_type != "cpu" and not platform.compares_collectives  # simulated: their world knows
        if mesh is not None and (train.hardware is not None or (finds and mesh.size() > 1)):
            self._plan_for(train.hardware, mesh)
        given = None if model is None else self._made(model)
        if given is not None:
            known = (each.num_embeddings for each in given.modules() if isinstance(each, nn.Embedding))
            config = config.with_changes("model", {"vocab_size": next(known, None)})
        vocab_size = config.shape().vocab_size
        batch_size, seq_len = config.batch_shape
        self.loader = None if data is None else LoaderBatches(data, batch_size, seq_len, vocab_size)
        self.corpus = read_text(config) if data is None else None
        self.windows = None if self.corpus is None else windows_that_count(self.corpus.train, seq_len)
        if predicted is not None:
            predicted = replace(predicted, memory_before=platform.memory_stats().allocated)
        self.predicted = predicted
        self.share = ShareOfLoss()
        if given is None:
            shape, self.parameters = None, config.shape().num_parameters()
            has_all = not config.lora.is_on  # the formula has the gradients of all weights
            self.flops_per_token = flops_per_token(config.shape(), seq_len) if has_all else None
            self.model = parallelize_llama(config, dims, self.device, self.share)
            if config.lora.dropout:
                platform.manual_seed(config.seed_of(self.ranks.batch_rank))  # ranks along tp drop the same
        else:
            shape, self.flops_per_token = given_shape(given, config), None
            self.parameters = shape["parameters"]
            self.model = shard_given(given, dims, config, self.device, split)
        self.optimizer = build_optimizer(
            self.model.named_parameters(), config.optimizer, config.precision.dtype("moments")
        )
        self.rates = Rates(config.optimizer, train.steps, lr_scheduler)
        self.steps_done = self.samples_used = self.skipped = 0
        self._are_same = False  # the batches of the ranks' loaders: looked at once
        kept: dict[str, Any] = {"rank": place.rank, "world_size": place.world_size, "shape": shape}
        self.saver = Saver(config, self.model, self.optimizer, self.device, **kept, corpus=self.corpus)
        self._resume()

    def _made(self, make: MakeModel) -> nn.Module:
        """Let the caller make the model, which must be the same on every rank."""
        self.platform.manual_seed(self.config.seed_of())
        model, asked = make(), "cannot train this model"
        params = list(model.parameters())
        if not any(param.requires_grad for param in params):
            blame, hint = "none of its parameters is to be trained", "requires_grad_(True) for some"
            raise InvalidValue(asked, blame, f"parameters: {len(params)}", hint)
        flat = [flat_bytes(param.detach().contiguous()) for param in params]
        bits = [int(some.sum()) * (n + 1) for n, some in enumerate(flat)]
        if not self.ranks.agree(sum(bits) % 2**62):
            hint, seen = "the same folder, or torch's generator for random ones", f"model(): {type(model).__name__}"
            raise InvalidValue(asked, "the ranks' models have other weights", seen, hint)
        return model

    def _plan_for(self, named: str | None, mesh: DeviceMesh) -> None:
        """Plan for the machine that is named, or found by the devices' name, if ranks agree: plans must be the same."""
        found, name = None, self.platform.name()
        with suppress(ValueError):  # the others must hear of it before this rank ends
            found = machine_of_device(name) if named is None else find_machine(named)
        same = self.ranks.agree(zlib.crc32(repr(found).encode()))
        if named is not None and not same:
            asked, blame = "cannot plan redistributions", "the ranks read other figures of the hardware, or none"
            raise InvalidValue(asked, blame, f"train.hardware: {named!r}", "the same file on each node")
        if same and (found is not None or named is not None):
            plan_for(mesh, found or find_machine(named or name))
        elif self.place.rank == 0:
            why = f"nothing describes {name}" if same else "ranks describe their devices differently"
            text = "redistributions are planned for %s, because %s; train.hardware names another machine"
            logging.getLogger(__name__).warning(text, self.platform.machine(), why)

    def run(self, on_step: OnStep | None = None) -> TrainResult:
        """Take all remaining steps, log them, validate at the end, and save when it is time."""
        train, first_rank = self.config.train, self.place.rank == 0
        records, first_step = deque[StepRecord](maxlen=report.KEPT), self.steps_done + 1
        stopped: str | None = None
        with ExitStack() as stack:
            log = stack.enter_context(report.JsonlLog(train.log if first_rank else None, keep_steps=self.steps_done))
            board = stack.enter_context(
                report.TensorBoardLog(train.tensorboard if first_rank else None, self.steps_done)
            )
            stack.enter_context(self.saver)
            recorded = train.profile_steps if first_rank else 0
            after_step = stack.enter_context(report.profiled_steps(train.out() / "profile.json", recorded))
            while self.steps_done < train.steps and stopped is None:
                self._tell(self.steps_done + 1, "training")
                record = self.step()
                after_step()
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
            parameters=self.parameters,
            layout=describe_axes(self.dims),
            device=self.platform.name(),
            stopped=stopped,
            first_step=first_step,
            save_failures=self.saver.failures,
            safe_step=self.saver.safe_step,
            last_save_failed=self.saver.last_failed,
        )

    def _asked_to_stop(self) -> str | None:
        if self.stop is None or not self.ranks.any(self.stop.requested()):
            return None
        return self.stop.reason or "another rank"

    def step(self) -> StepRecord:
        """Take the next optimizer step: forward and backward over this rank's samples, reduce, update."""
        train, start = self.config.train, time.perf_counter()
        batch_size, seq_len = self.config.batch_shape
        self.platform.reset_peak_memory()
        lr = self.rates.of(self.steps_done)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        part = rank_part(self.samples_used, batch_size, self.ranks.batch_rank, self.ranks.batch_ranks)
        own, options = self._place(*self._sequences(part)), self.config.step_options()
        options |= {"share": self.share, "groups": self.ranks, "accepts": partial(self._accepts, part=part)}
        loss, grad_norm, taken = training_step(self.model, self.optimizer, *own, **options)
        self.rates.after_step(loss)
        counted = self.share.counted  # before a validation sets its own
        self.steps_done += 1
        self.samples_used += batch_size
        self.platform.synchronize()
        seconds = time.perf_counter() - start
        speed = batch_size * seq_len / seconds
        due = self.steps_done == train.steps or (train.eval_every and self.steps_done % train.eval_every == 0)
        due = due and self.corpus is not None
        return StepRecord(
            step=self.steps_done,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            seconds=seconds,
            tokens_per_s=speed,
            valid_loss=self.evaluate() if due else None,
            mfu=model_flops_utilisation(speed, self.flops_per_token, self.platform.name(), self.place.world_size),
            memory_bytes=self.platform.memory_stats().peak_allocated,
            tokens=int(counted),
            skipped=not taken,
            predicted=self.predicted,
        )

    def _sequences(self, part: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of this rank's samples in the step."""
        if self.corpus is not None:
            order = (self.config.batch_shape[1], self.config.seed_of(), self.config.data.ignored)
            return samples(self.corpus.train, part, *order, self.windows)
        assert self.loader is not None, "there is a text or a loader"
        inputs, targets = self.loader.next()
        if not (self._are_same or self.ranks.agree(zlib.crc32(torch.cat([inputs, targets]).cpu().numpy().data))):
            blame, hint = "the ranks' loaders return other batches", "the same seed, and no DistributedSampler"
            raise InvalidValue("cannot train on this data", blame, f"step: {self.steps_done + 1}", hint)
        self._are_same = True
        own = slice(part.start - self.samples_used, part.stop - self.samples_used)
        return inputs[own], targets[own]

    def _place(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Move this rank's sequences to its device, keep its part of each, and count the tokens of all ranks."""
        context = self.model.context
        if context is not None:
            inputs, targets = context.split(inputs), context.split(targets)
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        self.share.counted = self.ranks.count(targets)
        return inputs, targets

    def _accepts(self, loss: float, grad_norm: float, part: range) -> bool:
        """Tell whether the optimizer's step is to be taken; raise where what is not finite ends the run."""
        step = self.steps_done + 1
        action = action_after(loss, grad_norm, self.config.train, self.skipped)
        if action in ("stop", "dump"):
            folder = None
            if action == "dump":
                folder = self.config.train.out() / "nonfinite"
                named, rank = self.model.named_parameters(), self.place.rank
                dump_nonfinite(folder, named, rank=rank, step=step, loss=loss, grad_norm=grad_norm, samples=part)
                self.ranks.any(False)  # a rank that raises ends the others: let all have written
            raise nonfinite_error(
                step, loss, grad_norm, skipped_in_a_row=self.skipped, dumped_to=folder, counted=self.share.counted
            )
        self.skipped = 0 if action == "go" else self.skipped + 1
        return action == "go"

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the held-back text; every rank takes its part, and gets the same number."""
        ranks, (batch_size, seq_len) = self.ranks, self.config.batch_shape
        assert self.corpus is not None, "a loader holds nothing back"
        self._tell(self.steps_done, "validating")
        size = batch_size // ranks.batch_ranks
        size = size if self.model.pipeline is not None else max(size // self.config.micro_batches, 1)
        count = self.config.train.eval_sequences
        sequences = valid_samples(self.corpus.valid, count, seq_len, ranks.batch_rank, ranks.batch_ranks, size)
        inputs, targets = self._place(*sequences)
        total = torch.zeros((), device=self.device, dtype=self.ranks.dtype)
        with self.model.evaluating():
            for some, expected in zip(inputs.split(size), targets.split(size), strict=True):
                if self.model.pipeline is not None:
                    total += self.model.pipeline.eval(some, expected)
                else:
                    total += self.share(self.model.parts[0](some), expected)
        return ranks.over_shares(total)

    def _resume(self) -> None:
        self._tell(0, "loading")
        folder, is_adapted = self.config.weights, self.config.lora.is_on  # then checkpoints have the adapters alone
        found = None if is_adapted else self.saver.resume()
        if found is None and folder is not None:
            check_start(self.config)
            tensors = {name: tensor for name, tensor in self.model.named_tensors() if not is_of_adapter(name)}
            load_huggingface(tensors, folder)
        found = self.saver.resume() if is_adapted else found
        if found is not None:
            self.steps_done, self.samples_used, self.skipped = found.steps, found.samples, found.skipped
            self.rates.go_on(self.saver.states["scheduler"], self.steps_done)
            if self.loader is not None:
                self.loader.go_on(self.saver.states["loader"], self.samples_used // self.config.batch_shape[0])

    def _save_if_due(self, ends: bool) -> None:
        every, ends = self.config.checkpoint.every, ends or self.steps_done == self.config.train.steps
        if self.saver.has_folder and (ends or (every and self.steps_done % every == 0)):
            states = {"loader": None if self.loader is None else self.loader.state(), "scheduler": self.rates.state()}
            self.saver.save(Progress(self.steps_done, self.samples_used, self.skipped), states)


def training_step(
    model: Parallelized,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    share: ShareOfLoss,
    groups: RunGroups,
    accumulate: int = 1,
    reduce_each: bool = False,
    max_grad_norm: float = 0.0,
    accepts: Callable[[float, float], bool] = lambda loss, grad_norm: True,
) -> tuple[float, float, bool]:
    """Take one step: forward and backward over this rank's sequences, clip, update, and clear the gradients.

    Communication: that of the model, of the loss over `groups`, and of `clip_gradients`.

    Args:
        model, optimizer: this rank's part, and the optimizer of its parameters, with the rates of this step.
        inputs, targets: ids (batch, seq) of this rank, on its device; targets that do not count are `IGNORED`.
        share: the loss; knows the number of tokens of the global batch.
        groups: what the loss is added up over.
        accumulate: backward passes; with a pipeline its micro-batches, which it knows itself.
        reduce_each: every backward pass reduces gradients over ranks, not the last one alone.
        max_grad_norm: gradients are scaled down to it; 0: they are not scaled.
        accepts: called with loss and norm, which are equal on every rank; False skips the optimizer's step.

    Returns:
        On every rank the mean loss over the tokens of the global batch, before the step; the norm over all parameters,
        before clipping; and True if the optimizer's step was taken.
    """
    loss = forward_backward(model, inputs, targets, share, groups.dtype, accumulate, reduce_each)
    return finish_step(model, optimizer, loss, groups=groups, max_grad_norm=max_grad_norm, accepts=accepts)


def finish_step(
    model: Parallelized,
    optimizer: torch.optim.Optimizer,
    share_of_loss: torch.Tensor,
    *,
    groups: RunGroups,
    max_grad_norm: float = 0.0,
    accepts: Callable[[float, float], bool] = lambda loss, grad_norm: True,
) -> tuple[float, float, bool]:
    """Finish a step, see `training_step`: add up the loss, of which this rank has a share, clip, update, and clear."""
    loss = groups.over_shares(share_of_loss)
    grad_norm = clip_gradients(model, max_grad_norm)
    taken = accepts(loss, grad_norm)
    update(optimizer, taken)
    model.after_step(taken)
    return loss, grad_norm, taken


def forward_backward(
    model: Parallelized,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    share: ShareOfLoss,
    dtype: torch.dtype,
    accumulate: int = 1,
    reduce_each: bool = False,
) -> torch.Tensor:
    """Add up gradients over the micro-batches, see `training_step`; return this rank's share of the loss in `dtype`."""
    if model.pipeline is not None:
        loss = model.pipeline.step(inputs, targets)
        if model.tied is not None:
            model.tied.add_gradients()
        return loss
    (module,) = model.parts
    total = torch.zeros((), device=inputs.device, dtype=dtype)
    for index, (some, expected) in enumerate(zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True)):
        communicate_gradients(module, reduce_each or index == accumulate - 1)
        loss = share(module(some), expected)
        loss.backward()
        total += loss.detach()
    return total


def communicate_gradients(model: torch.nn.Module, flag: bool) -> None:
    """Let the next backward of a model, of either engine or none, reduce gradients over ranks, or only add them up."""
    if isinstance(model, HSDPModule):
        model.set_requires_gradient_sync(flag)
    elif isinstance(model, HSDPCell):
        model.set_requires_grad_sync(flag)


@dataclass(frozen=True)
class RankPlace:
    """Which rank this is, and of how many.

    Args:
        rank, local_rank: number in the world, and on its machine, which is also its device.
        world_size, local_world_size: ranks in the world, and on this machine.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def current(cls) -> RankPlace:
        """Ask the process group of torch.distributed, where there is one; else read torchrun's environment.

        Raises:
            ValueError: as `from_environment`.
        """
        if not dist.is_initialized():
            return cls.from_environment()
        usual = {"LOCAL_RANK": dist.get_rank(), "LOCAL_WORLD_SIZE": dist.get_world_size()}
        found = {name: os.environ.get(name, "") for name in usual}  # who made the group may have set them or not
        local, size = (int(found[name]) if found[name].isdecimal() else number for name, number in usual.items())
        return cls(dist.get_rank(), local, dist.get_world_size(), size)

    @classmethod
    def from_environment(cls) -> RankPlace:
        """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, as torchrun sets them; none set means one rank.

        Raises:
            ValueError: one of them is no number, or they do not fit each other, or only some of them are set; with more
                than one rank, MASTER_ADDR and MASTER_PORT belong to them.
        """
        asked, names = "cannot read torchrun's environment", ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        found = {name: os.environ[name] for name in (*names, "LOCAL_WORLD_SIZE") if name in os.environ}
        seen = ", ".join(f"{name}={value}" for name, value in found.items())
        if not all(value.isdecimal() for value in found.values()):
            raise InvalidValue(asked, "not all of it are numbers", seen, "torchrun, or none of these variables")
        if not found.keys() & set(names):
            return cls()
        missing = [name for name in names if name not in found]
        if found.get("WORLD_SIZE", "1") != "1":
            missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            hint = "start the ranks with torchrun, or unset all of them for one rank"
            raise InvalidValue(asked, f"{' and '.join(missing)} not set", seen, hint)
        rank, local_rank, world_size = (int(found[name]) for name in names)
        local_size, wrong = int(found.get("LOCAL_WORLD_SIZE", world_size)), ""
        # What a launcher of one's own gets wrong: ranks would wait for those that never come.
        if rank >= world_size:
            wrong = f"RANK counts from 0, up to {world_size - 1} of WORLD_SIZE={world_size}"
        elif local_rank >= local_size:
            wrong = f"LOCAL_RANK counts from 0, up to {local_size - 1} of the ranks on a machine"
        elif local_size > world_size:
            wrong = f"LOCAL_WORLD_SIZE={local_size} is more than all ranks"
        elif world_size > 1 and not os.environ["MASTER_PORT"].isdecimal():
            wrong, seen = "MASTER_PORT is no number", f"{seen}, MASTER_PORT={os.environ['MASTER_PORT']}"
        if wrong:
            raise InvalidValue(asked, wrong, seen, "torchrun, or variables as it sets them")
        return cls(rank, local_rank, world_size, local_size)


@contextmanager
def process_group(platform: Platform, place: RankPlace) -> Iterator[None]:
    """Hold torch.distributed's process group for the block; one that is there already is used and left alone.

    It has the backend of `platform`: gloo, nccl or hccl. A rank alone in its world needs no rendezvous.
    """
    if dist.is_initialized():
        yield
        return
    if place.world_size == 1:
        dist.init_process_group(platform.backend, store=HashStore(), rank=0, world_size=1)
    else:
        init_process_group(platform.backend)
    try:
        yield
        # Nobody leaves while others still communicate: rank 0 holds the store, and a gloo thread that releases
        # its last tensor while the interpreter shuts down aborts the process.
        dist.barrier()
    finally:
        dist.destroy_process_group()


class RunGroups:
    """The groups of a run that numbers are added up over, of the calling rank.

    Args:
        dims, meshed: the degrees, whose mesh is built; False for one process without torch.distributed.
        device: where the numbers are.
        dtype: that losses are added up in, of weights; not every device has float64.
    """

    def __init__(self, dims: ParallelDims, meshed: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.batch_rank, self.batch_ranks = 0, dims.batch_ranks
        self.world: dist.ProcessGroup | None = None
        self.tokens: dist.ProcessGroup | None = None
        self.stages: dist.ProcessGroup | None = None
        if not meshed:
            return
        self.world = dist.group.WORLD
        # Ranks with other tokens: those of the mesh's "loss", and those along ep.
        tokens = dims.mesh_over("dp_replicate", "dp_shard", "ep", "cp")
        self.tokens = None if tokens is None else tokens.get_group()
        self.stages = dims.get_mesh("pp").get_group() if dims.pp_enabled else None
        for axis in ("dp_replicate", "dp_shard", "ep"):
            if axis in dims.mesh_axes:
                mesh = dims.get_mesh(axis)
                self.batch_rank = self.batch_rank * mesh.size() + mesh.get_local_rank()

    def over_tokens(self, value: torch.Tensor) -> torch.Tensor:
        """Add up a number over the ranks with other tokens; ranks along tp and pp have the same."""
        if self.tokens is not None:
            dist.all_reduce(value, group=self.tokens)
        return value

    def count(self, targets: torch.Tensor) -> float:
        """Return how many tokens of the global batch count; this rank's targets (batch, seq) may be `IGNORED`."""
        return self.over_tokens((targets != IGNORED).sum()).item()

    def over_shares(self, share: torch.Tensor) -> float:
        """Add up shares of the loss, which only the last stage of a pipeline has, the others zeros."""
        total = share.detach().to(self.dtype, copy=True)
        if self.stages is not None:
            dist.all_reduce(total, group=self.stages)
        return self.over_tokens(total).item()

    def agree(self, number: int) -> bool:
        """Return, on every rank, whether all ranks have the same number."""
        if self.world is None or dist.get_world_size() == 1:
            return True
        value = torch.tensor([number, -number], device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value[0] == -value[1])

    def any(self, flag: bool) -> bool:
        """Return, on every rank, whether any rank says yes."""
        return not self.agree(flag) or flag
