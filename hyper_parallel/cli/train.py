"""The commands `train` and `demo`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hyper_parallel.cli.kit import (
    NOT_SAVED,
    check_can_write,
    is_first_rank,
    mistakes_as_messages,
    say_error,
    stdout_console,
)
from hyper_parallel.cli.options import Given, options, with_options

__all__ = ["demo", "train"]

_CONFIG = "hyper_parallel.trainer.config"
_DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "ulysses_degree", "pp", "ep", "etp")
_SAVING = ("folder=checkpoint_dir", "every=save_every", "keep", "background", "resume", "resume_step")
_REST = ("on_nonfinite", "stuck_after_s=stuck_after", "tensorboard", "device", "eval_every", "seed", "log=log_file")


def _of(section: str, *fields: str, panel: str | None = None) -> Any:
    """Return options for keys of the config; without a default, since the file has them."""
    name = f"{section.capitalize()}Config"
    return options(section, _CONFIG, name, *fields, panel=panel, optional=True)


@with_options(
    *_of("train", "steps", "batch_size", "seq_len", "accumulate"),
    *_of("optimizer", "lr"),
    *_of("train", "model"),
    *_of("parallel", *_DEGREES, "schedule", "layers_per_stage", "engine", panel="Parallel degrees"),
    *_of("parallel", "param_dtype=precision", "checkpointing", "compile"),
    *_of("checkpoint", *_SAVING, panel="Checkpoints"),
    *_of("train", *_REST, "memory_limit_gb"),
)
def train(
    given: Given,
    config: Annotated[Path | None, typer.Argument(help="TOML file; what it leaves out keeps its default.")] = None,
    start_from: Annotated[
        str | None, typer.Option(help="Folder of transformers: its model, and weights to start with.")
    ] = None,
    sim: Annotated[int | None, typer.Option(metavar="N", help="Simulate N ranks in this process, on the CPU.")] = None,
    dump_config: Annotated[
        bool, typer.Option("--dump-config", help="Print this run as a TOML file, with all defaults, and exit.")
    ] = False,
) -> None:
    """Train a small Llama, or a mixture of experts, on text, with any combination of parallel degrees.

    Without --sim the ranks come from torchrun:
    torchrun --nproc-per-node 2 -m hyper_parallel.cli train --device cpu
    """
    from hyper_parallel.cli.runs import check_run, describe_run, run_here, run_simulated, summarise, while_ranks_run
    from hyper_parallel.trainer.config import Config, config_text, load_config
    from hyper_parallel.trainer.guards import stop_on_signals
    from hyper_parallel.trainer.saving import with_shape_of

    with mistakes_as_messages():
        run = load_config(config) if config is not None else Config()
        for section, changes in given.items():
            run = run.with_changes(section, changes)
        model = given["train"].get("model")
        if start_from is not None or run.train.start_from is not None:
            run = with_shape_of(run, start_from or str(run.train.start_from))
            if model not in (None, run.train.model):
                raise ValueError(
                    f"cannot start '{model}' from {run.train.start_from}: it holds a '{run.train.model}'\n"
                    f"  --model {model}\n  try: leave out --model"
                )
        if run.train.log is None:
            run = run.with_changes("train", {"log": "out/train.jsonl"})
        if dump_config:
            stdout_console().file.write(config_text(run))
            raise typer.Exit()
        run = check_run(run, sim)
        if is_first_rank():
            check_can_write(Path(str(run.train.log)))
    with while_ranks_run(f"the log so far is in {run.train.log}"), stop_on_signals() as stop:
        console = stdout_console()
        describe_run(console, run, sim)
        if sim is None:
            result = run_here(console, f"rank 0 of {os.environ.get('WORLD_SIZE', '1')}", run, stop)
        else:
            result, _ = run_simulated(console, f"{sim} simulated ranks", run, sim, stop)
        summarise(console, result)
        if run.checkpoint.folder is not None and result.steps:
            console.print(f"checkpoints: {run.checkpoint.folder}")
        elif result.stopped is not None:
            console.print("nothing is saved: there was no --checkpoint-dir")
        console.print(f"log: {run.train.log}")
    if result.last_save_failed:
        there = "nothing is saved" if result.safe_step is None else f"step {result.safe_step} is safe, and the last"
        say_error(f"the last save failed; {there} in {run.checkpoint.folder}")
        raise typer.Exit(NOT_SAVED)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for loss.png and the logs.")] = Path("out/demo"),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 60,
    seed: Annotated[int, typer.Option(help="Of weights, data order and simulated interleaving.")] = 0,
) -> None:
    """Train a small Llama on 8 simulated ranks (2 replicas x 4 shards), then on one device, and compare."""
    from hyper_parallel.cli.runs import (
        check_run,
        compare_runs,
        describe_run,
        one_thread,
        run_here,
        run_simulated,
        while_ranks_run,
    )
    from hyper_parallel.trainer.config import Config, ParallelConfig, TrainConfig

    with mistakes_as_messages():
        both = TrainConfig(steps=steps, seed=seed, device="cpu", eval_every=10)
        ranks = Config(
            train=replace(both, log=str(out / "8_ranks.jsonl")), parallel=ParallelConfig(dp_replicate=2, dp_shard=4)
        )
        single = Config(train=replace(both, log=str(out / "one_device.jsonl")))
        ranks = check_run(ranks, sim=8)
        for name in ("loss.png", "8_ranks.jsonl", "one_device.jsonl"):
            check_can_write(out / name)
    with while_ranks_run(f"the logs so far are in {out}"):
        console = stdout_console()
        describe_run(console, ranks, sim=8)
        simulated, traffic = run_simulated(console, "8 simulated ranks", ranks, 8)
        with one_thread():
            alone = run_here(console, "one device", single)
        compare_runs(console, {"8 ranks": simulated, "one device": alone}, traffic, out)
