"""Train the reference model: one function, called by every rank, real or simulated, or by one process alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.fully_shard.api import HSDPModule
from hyper_parallel.models.llama import Llama
from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.trainer.config import Config
from hyper_parallel.trainer.data import load_corpus, rank_part, samples, valid_samples
from hyper_parallel.trainer.optimizer import build_optimizer, clip_gradients, learning_rate
from hyper_parallel.trainer.parallel_dims import ParallelDims
from hyper_parallel.trainer.parallelize import describe_axes, needs_mesh, parallelize
from hyper_parallel.trainer.place import RankPlace, process_group
from hyper_parallel.trainer.preflight import plan_run
from hyper_parallel.trainer.record import JsonlLog, StepRecord, TrainResult

OnStep = Callable[[StepRecord], None]


def train(config: Config, on_step: OnStep | None = None) -> TrainResult:
    """Train as one rank of a world and return the same result on every rank.

    >>> from hyper_parallel.trainer.config import TrainConfig
    >>> result = train(Config(train=TrainConfig(steps=2, batch_size=2, seq_len=16, device="cpu")))
    >>> len(result.losses)
    2

    The world is read from torchrun's environment; none means one rank. Runs with the same config see the same global
    batches and start from the same weights, however many ranks share the work. A process group that is there already
    is used; otherwise one is made for the run.

    Args:
        config: the run.
        on_step: called by the first rank after every step.

    Raises:
        ValueError: the config does not fit the number of ranks.
        PlatformUnavailableError: the device cannot be used here.
    """
    place = RankPlace.from_environment()
    dims = plan_run(config, place.world_size)
    platform = get_platform(config.train.device)
    platform.set_device(place.local_rank)
    if not needs_mesh(config.parallel, dims):
        return Trainer(config, dims, platform, place, mesh=None).run(on_step)
    with process_group(platform, place):
        mesh = dims.build_mesh(platform.device_type)
        return Trainer(config, dims, platform, place, mesh).run(on_step)


class Trainer:
    """One rank's side of a run: its part of the model, of the optimizer state and of the data.

    Args:
        config: the run.
        dims: its degrees.
        platform: the calling rank's kind of device.
        place: which rank this is.
        mesh: the ranks by axis; None trains the bare model on one device, without torch.distributed.
    """

    def __init__(
        self, config: Config, dims: ParallelDims, platform: Platform, place: RankPlace, mesh: DeviceMesh | None
    ) -> None:
        self.config, self.dims, self.platform, self.place = config, dims, platform, place
        self.device = platform.device(place.local_rank)
        self.corpus = load_corpus(config.data.path, config.data.pattern, config.data.max_bytes)
        model = Llama.build(config.llama(), config.train.seed)
        if mesh is None:
            self.dp_group, self.dp_rank = None, 0
            self.model = model.to(self.device)
        else:
            dp = dims.get_mesh("dp")
            self.dp_group, self.dp_rank = dp.get_group(), dp.get_local_rank()
            self.model = parallelize(model, config.parallel, dims, mesh)
        self.optimizer = build_optimizer(self.model, config.optimizer)

    def run(self, on_step: OnStep | None = None) -> TrainResult:
        """Take all steps, log them, and validate at the end."""
        train, first_rank = self.config.train, self.place.rank == 0
        records: list[StepRecord] = []
        with JsonlLog(train.log if first_rank else None) as log:
            for step in range(train.steps):
                record = self.step(step)
                records.append(record)
                if first_rank:
                    log.write(record)
                    if on_step is not None:
                        on_step(record)
        valid_loss = records[-1].valid_loss
        assert valid_loss is not None, "the last step validates"
        return TrainResult(
            steps=tuple(records),
            valid_loss=valid_loss,
            parameters=self.config.llama().num_parameters(),
            layout=describe_axes(self.dims),
            device=self.platform.name(),
        )

    def step(self, step: int) -> StepRecord:
        """Take optimizer step number `step` (from 0): forward and backward over this rank's samples, reduce, update."""
        train, start = self.config.train, time.perf_counter()
        lr = learning_rate(step, train.steps, self.config.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._mean_over_ranks(self._backward(step))
        grad_norm = clip_gradients(self.model, self.config.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.platform.synchronize()
        seconds = time.perf_counter() - start
        tokens_per_s = train.batch_size * train.seq_len / seconds
        due = step + 1 == train.steps or (train.eval_every and (step + 1) % train.eval_every == 0)
        return StepRecord(step + 1, loss, lr, grad_norm, seconds, tokens_per_s, self.evaluate() if due else None)

    def _backward(self, step: int) -> torch.Tensor:
        """Add up gradients over the micro-batches; only the last one communicates them."""
        train = self.config.train
        part = rank_part(step, train.batch_size, self.dp_rank, self.dims.dp_size)
        size = len(part) // train.accumulate
        total = torch.zeros((), device=self.device)
        for micro in range(train.accumulate):
            if isinstance(self.model, HSDPModule):
                self.model.set_requires_gradient_sync(micro == train.accumulate - 1)
            chosen = part[micro * size : (micro + 1) * size]
            inputs, targets = samples(self.corpus.train, chosen, train.seq_len, train.seed)
            loss = self._loss(inputs, targets).mean() / train.accumulate
            loss.backward()
            total += loss.detach()
        return total

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each sequence (batch,), in nats per token."""
        logits = self.model(inputs.to(self.device)).float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the held-back text; every rank takes its part, and gets the same number."""
        train = self.config.train
        inputs, targets, weights = valid_samples(
            self.corpus.valid, train.eval_sequences, train.seq_len, self.dp_rank, self.dims.dp_size
        )
        size = max(train.batch_size // self.dims.dp_size // train.accumulate, 1)
        total = torch.zeros((), device=self.device)
        for begin in range(0, len(weights), size):
            end = begin + size
            total += (self._loss(inputs[begin:end], targets[begin:end]) * weights[begin:end].to(self.device)).sum()
        return self._mean_over_ranks(total) * self.dims.dp_size / train.eval_sequences

    def _mean_over_ranks(self, value: torch.Tensor) -> float:
        if self.dp_group is not None:
            dist.all_reduce(value, group=self.dp_group)
        return value.item() / self.dims.dp_size
