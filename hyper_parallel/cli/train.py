"""The commands `train` and `demo`, and `export` and `plot` for what they have written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli import kit
from hyper_parallel.cli.kit import mistakes_as_messages, option, stdout_console
from hyper_parallel.cli.options import Given, with_options
from hyper_parallel.cli.run import RUN_OPTIONS, RunWords, StartFrom, file_of, read_run
from hyper_parallel.core.common.errors import InvalidValue

_WEIGHTS = ("bfloat16", "float16", "float32", "float64")


@with_options(*RUN_OPTIONS)
def train(
    given: Given,
    words: RunWords = None,
    start_from: StartFrom = None,
    sim: Annotated[int | None, option("Simulate N ranks in this process, on the CPU.", metavar="N")] = None,
    reduced: Annotated[bool, option("Train the small run of the same kind that verify makes.", "--reduced")] = False,
    dump_config: Annotated[
        bool, option("Print this run as a TOML file, with all defaults, and exit.", "--dump-config")
    ] = False,
) -> None:
    """Train a small Llama, or a mixture of experts, on text, with any combination of parallel degrees.

    Without --sim the ranks come from torchrun:
    torchrun --nproc-per-node 2 -m hyper_parallel.cli train --device cpu
    """
    from hyper_parallel.cli import runs
    from hyper_parallel.trainer.config import config_text
    from hyper_parallel.trainer.guards import stop_on_signals

    with mistakes_as_messages():
        run = read_run(file_of(words, given), given, start_from, others=True)
        if reduced:
            run, sim, changes = runs.reduced(run, sim)
        if run.train.log is None:
            run = run.with_changes("train", {"log": "out/train.jsonl"})
        if dump_config:
            stdout_console().file.write(config_text(run))
            raise typer.Exit()
        if reduced:
            stdout_console().print(f"reduced: {', '.join(changes) or 'nothing'}")
        run = runs.check_run(run, sim)
        if kit.is_first_rank():
            kit.check_can_write(Path(str(run.train.log)))
        split = runs.find_split(stdout_console(), run)
    with runs.while_ranks_run(f"the log so far is in {run.train.log}"), stop_on_signals() as stop:
        console = stdout_console()
        runs.describe_run(console, run, sim)
        title, predicted = f"{sim} simulated rank{'s' * (sim != 1)}", None
        if sim is None:
            title, predicted = f"rank 0 of {os.environ.get('WORLD_SIZE', '1')}", runs.predict_run(console, run)
        result, _ = runs.run_ranks(console, title, run, sim, stop=stop, predicted=predicted, split=split)
        runs.summarise(console, result, run)
        if run.checkpoint.folder is not None and result.steps:
            console.print(f"checkpoints: {run.checkpoint.folder}")
        elif result.stopped is not None:
            console.print("nothing is saved: there was no --checkpoint-dir")
        console.print(f"log: {run.train.log}")
    if result.last_save_failed:
        there = "nothing is saved" if result.safe_step is None else f"step {result.safe_step} is safe, and the last"
        kit.say_error(f"the last save failed; {there} in {run.checkpoint.folder}")
        raise typer.Exit(kit.NOT_SAVED)


def demo(
    out: Annotated[Path, option("Folder for loss.png and the logs.")] = Path("out/demo"),
    steps: Annotated[int, option("Optimizer steps.")] = 60,
    seed: Annotated[int, option("Of weights, data order and simulated interleaving.")] = 0,
) -> None:
    """Train a small Llama on 8 simulated ranks (2 replicas x 4 shards), then on one device, and compare."""
    from hyper_parallel.cli import runs
    from hyper_parallel.trainer.config import Config, ParallelConfig, TrainConfig

    with mistakes_as_messages():
        both = TrainConfig(steps=steps, seed=seed, device="cpu", eval_every=10)
        degrees = ParallelConfig(dp_replicate=2, dp_shard=4)
        ranks = Config(train=replace(both, log=str(out / "8_ranks.jsonl")), parallel=degrees)
        single = Config(train=replace(both, log=str(out / "one_device.jsonl")))
        ranks = runs.check_run(ranks, sim=8)
        for name in ("loss.png", "8_ranks.jsonl", "one_device.jsonl"):
            kit.check_can_write(out / name)
    with runs.while_ranks_run(f"the logs so far are in {out}"):
        console = stdout_console()
        runs.describe_run(console, ranks, sim=8)
        simulated, traffic = runs.run_ranks(console, "8 simulated ranks", ranks, 8)
        with runs.one_thread():
            alone, _ = runs.run_ranks(console, "one device", single)
        runs.compare_runs(console, {"8 ranks": simulated, "one device": alone}, traffic, out)


def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint of train, or its --checkpoint-dir: the newest.")],
    folder: Annotated[str, typer.Argument(help="Where to; made if it is not there.")],
    dtype: Annotated[str | None, option("Of the weights, such as bfloat16; default: as they are.")] = None,
    tokenizer: Annotated[str | None, option("Folder of the tokenizer to add; default: that of the run.")] = None,
    merge: Annotated[bool, option("Of LoRA: add the adapters to the model, and write that.", "--merge")] = False,
    base: Annotated[
        str | None, option("Of LoRA: where the model is that it started from; default: where it was.")
    ] = None,
) -> None:
    """Write a checkpoint as a folder that transformers loads with AutoModelForCausalLM.from_pretrained.

    hyper-parallel export out/run out/hf --dtype bfloat16

    Of a run with LoRA, the adapters go to a folder for PeftModel.from_pretrained(model, folder), or with --merge the
    whole model.
    """
    with mistakes_as_messages():
        from hyper_parallel.core.dtensor.text import parse_dtype
        from hyper_parallel.trainer.saving import export_checkpoint

        to = None if dtype is None else parse_dtype(dtype)
        if to is not None and str(to).removeprefix("torch.") not in _WEIGHTS:
            blame, hint = "transformers loads floating-point numbers", "--dtype bfloat16, float16, float32 or float64"
            raise InvalidValue(f"cannot export weights in {dtype}", blame, f"--dtype {dtype}", hint)
        count = export_checkpoint(checkpoint, folder, to, tokenizer=tokenizer, merge=merge, base=base)
        stdout_console().print(f"wrote {count:,} parameters to {folder}")


def plot(
    logs: Annotated[list[Path], typer.Argument(help="JSONL logs of runs.")],
    out: Annotated[Path, option("PNG file to write.")] = Path("out/train.png"),
) -> None:
    """Draw loss, gradient norm and speed of one or more runs.

    hyper-parallel plot out/train.jsonl
    """
    with mistakes_as_messages():
        from hyper_parallel.trainer.report import plot_log

        kit.check_can_draw(out)
        plot_log(logs, out)
        stdout_console().print(f"wrote {out}")
