"""The runs behind `train` and `demo`, once their options are read.

torch is imported here, and not where options are: `--help` and a wrong option come before that.
"""

from __future__ import annotations

import logging
import math
import os
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from hyper_parallel.cli import kit
from hyper_parallel.cli.run import devices_of
from hyper_parallel.core.checkpoint.errors import CheckpointError, LeaseLostError
from hyper_parallel.core.common.errors import InvalidValue, readable_bytes
from hyper_parallel.models.found import Pair, can_share, find_pairs, search_pairs, small_settings, split_pairs
from hyper_parallel.models.hf_folder import load_by_transformers
from hyper_parallel.models.hf_weights import other_model
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.lora import Adapter, with_lora
from hyper_parallel.models.moe import MoEConfig
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer import report
from hyper_parallel.trainer.config import OTHER, Config
from hyper_parallel.trainer.data import load_corpus
from hyper_parallel.trainer.guards import NonFiniteError
from hyper_parallel.trainer.loop import RankPlace
from hyper_parallel.trainer.loop import train as train_rank
from hyper_parallel.trainer.parallelize import Split, describe_axes
from hyper_parallel.trainer.preflight import check_machine, check_platform, plan_run
from hyper_parallel.trainer.saving import run_to_go_on_from
from hyper_parallel.trainer.watchdog import RankLostError

MEASURED = Path("out/hardware.toml")
"""Where `hyper-parallel hardware measure` writes, unless another path is passed."""


def run_ranks(
    console: Console, title: str, run: Config, simulated: int | None = None, **given: Any
) -> tuple[report.TrainResult, list[Any]]:
    """Train as all ranks of a simulated world, or as the rank that torchrun made of this process, or alone.

    Also return what simulated ranks communicated. `given` are arguments of `train`.
    """
    with report.TrainingDisplay(console, title, run.train.steps) as display:
        if simulated is None:
            return train_rank(run, display.on_step, **given), []
        import sim

        with sim.world(simulated, seed=run.seed_of()) as world:
            results = world.run(train_rank, args=(run, display.on_step), kwargs=given)
            return results[0], list(world.trace.by_axis())


def find_split(console: Console, run: Config) -> Split | None:
    """Find what splits a model of transformers over tp, and prove it on simulated ranks; None where it is not split.

    Raises:
        ValueError: nothing was found that computes what one device computes.
    """
    degree, start = run.parallel.tp, time.perf_counter()
    if not run.is_other or degree == 1:
        return None
    folder = str(run.train.start_from)
    settings = load_by_transformers(f"cannot split {folder}", "AutoConfig", folder, "a folder with a config.json")
    with torch.device("meta"):
        whole = _fresh_model(settings)
    found = find_pairs(whole)
    small = small_settings(settings, degree)
    with one_thread():
        fitting = [pair for pair in found if small is not None and can_share(whole, pair, degree)]
        pairs = search_pairs(fitting, partial(_is_proved, small, run, degree))
    if not pairs:
        asked, places = f"cannot split the model over tp={degree}", ", ".join(pair.place for pair in found)
        blame = "no way to split its linear layers computes what one device computes"
        hint = "--tp 1: --dp-shard splits the weights of any model"
        raise InvalidValue(asked, blame, f"tried: {places or 'no layers found'}", hint)
    seconds = report.readable_seconds(time.perf_counter() - start)
    console.print(
        f"tp={degree} splits {', '.join(pair.place for pair in pairs)}; proved on simulated ranks in {seconds}"
    )
    if others := [pair.place for pair in found if pair.place not in {each.place for each in pairs}]:
        console.print(f"  on every rank along tp as a whole: {', '.join(others)}")
    return partial(split_pairs, pairs=pairs)


def _fresh_model(settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(settings, trust_remote_code=False)


def _is_proved(settings: Any, run: Config, degree: int, pairs: Sequence[Pair]) -> bool:
    """Tell whether a small model that is split computes what it computes on one device, one optimizer step included."""
    from sim import verify_plan

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = with_lora(_fresh_model(settings), run.lora)
            for module in self.model.modules():
                if isinstance(module, Adapter):
                    module.reset_parameters()

        def forward(self, ids: torch.Tensor) -> Any:
            return self.model(ids, use_cache=False).logits

    def parallelize(model: Any, mesh: Any) -> None:
        split_pairs(model.model, mesh, pairs)

    ids = torch.randint(settings.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs what ranks raise, too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return verify_plan(Logits, (ids,), {"tp": degree}, parallelize=parallelize, steps=1).ok
    except Exception:  # a model's own code, which a split may break in any way
        return False


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core, as each simulated rank does: the comparison is then the same on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def predict_run(console: Console, run: Config) -> report.Prediction | None:
    """Predict a step of the run on the first rank, and print it, or why there is none: that never ends a run."""
    if not run.train.predict or not kit.is_first_rank():
        return None
    try:
        found = _predict(run, RankPlace.from_environment())
    except Exception as error:  # also a mistake of the simulator's
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        hint = next((line for line in lines[1:] if line.startswith("try: ")), "try: --no-predict")
        console.print(f"nothing is predicted: {lines[0]}; {hint}")
        return None
    console.print(
        f"predicted: {report.readable_seconds(found.seconds)} a step, {found.tokens_per_s:,.0f} tokens/s, "
        f"{readable_bytes(found.memory_bytes)} in tensors; priced for {found.hardware}"
    )
    return found


def _predict(run: Config, place: RankPlace) -> report.Prediction:
    if run.is_other:
        blame, seen = "it is no model of this library", f"model: {OTHER}"
        raise InvalidValue(f"cannot estimate {run.train.start_from}", blame, seen, "--no-predict")
    hardware = hardware_here(run.train.device, run.train.hardware)
    from sim.mesh.estimate import estimate_run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors without values
        found = estimate_run(run, place.world_size, hardware)
    step = found.time.step.value
    classes = found.memory.classes
    own = next((one for one in classes if one.rank == place.rank), found.memory.fullest)
    title = found.hardware.title
    here = (place.local_world_size, torch.get_num_threads())
    if found.hardware.family == "cpu" and here != (found.hardware.devices_per_node, found.hardware.cores):
        title += f" (this run: {here[0]} of {here[1]})"
    return report.Prediction(step, math.prod(run.batch_shape) / step, own.peak_allocated, title)


def hardware_here(device_type: str | None = None, named: str | None = None) -> Any:
    """Return the description that predictions take for a device ("cpu", "cuda" or "npu"; None: as `get_platform`).

    That is the one that is named, by a name or file, or else by the device's name, or what was measured here.

    Raises:
        ValueError: there is none, or it is one of other devices.
    """
    platform, measure = get_platform(device_type), "hyper-parallel hardware measure"
    asked = f"cannot tell how fast {platform.name()} is"
    if named is None and platform.device_type == "cpu" and not MEASURED.exists():  # without importing the simulator
        raise InvalidValue(asked, "it was not measured", f"no {MEASURED}", measure)
    from hyper_parallel.core.machine.description import find_machine, machine_of_device
    from sim.mesh.pricing.measure import cpu_name

    if named is not None:
        found = find_machine(named)
        if found.backend != platform.backend:
            blame = f"{found.name} communicates by {found.backend}, and the ranks of this run by {platform.backend}"
            raise InvalidValue("this run is on other hardware", blame, f"hardware: {named}", measure)
        return found
    if platform.device_type == "cpu":
        found = find_machine(MEASURED)
        if not found.title.startswith(cpu_name()):
            raise InvalidValue(asked, f"{MEASURED} describes another machine", found.title, measure)
        return found
    known = machine_of_device(platform.name())
    if known is None:
        raise InvalidValue(asked, "no description has its name", "hyper-parallel hardware", "--hardware FILE")
    return known


@contextmanager
def while_ranks_run(left: str) -> Iterator[None]:
    """Turn Ctrl-C into exit code 130, a lost folder into 73, and a failure into 1, with its traceback if unforeseen."""
    try:
        yield
    except KeyboardInterrupt:
        if kit.is_first_rank():
            kit.stderr_console().print(f"interrupted; {escape(left)}")
        raise typer.Exit(kit.INTERRUPTED) from None
    except Exception as error:
        own: BaseException = error
        if hasattr(error, "rank") and error.__cause__ is not None:
            own = error.__cause__  # what the rank raised: the simulator wraps it
        if isinstance(own, SystemExit) and own.__context__ is not None:
            own = own.__context__  # rich exits where the reader has gone
        if kit.is_of_output(own):
            raise own from None
        if isinstance(error, NonFiniteError):
            kit.say_error(f"{own}\n  {left}")
        elif isinstance(error, CheckpointError):
            kit.say_error(str(own))
        elif isinstance(error, RankLostError):
            kit.stderr_console().print(f"[red]error:[/red] rank {os.environ.get('RANK', '0')} {escape(str(error))}")
        elif not kit.say_if_memory_lacks(own):
            traceback.print_exc()
        raise typer.Exit(kit.LOST_FOLDER if isinstance(error, LeaseLostError) else kit.FAILURE) from None


def check_run(run: Config, sim: int | None) -> Config:
    """Check the run against the ranks and the machine; raise ValueError or PlatformUnavailableError."""
    if sim is not None:
        asked = f"cannot simulate {sim} ranks"
        if sim < 1:
            raise InvalidValue(asked, "there is at least one", f"--sim {sim}", "--sim 8")
        if started := [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in os.environ]:
            hint = "leave out --sim under torchrun, or torchrun"
            raise InvalidValue(asked, "this process is a rank already", ", ".join(started), hint)
        if run.train.device not in (None, "cpu"):
            asked, seen = f"{asked} on {run.train.device}", f"device: {run.train.device!r}"
            hint = "leave out --device, or leave out --sim and start the ranks with torchrun"
            raise InvalidValue(asked, "simulated ranks compute on the CPU", seen, hint)
        run = run.with_changes("train", {"device": "cpu"})
        world_size = local_ranks = sim
    else:
        place = RankPlace.from_environment()
        world_size, local_ranks = place.world_size, place.local_world_size
    platform = get_platform(run.train.device)
    if run.train.hardware is not None:  # also where nothing is predicted
        from hyper_parallel.core.machine.description import find_machine

        find_machine(run.train.hardware)
    dims = plan_run(run, world_size)
    check_platform(run, platform)
    check_machine(run, dims, local_ranks, on_host=platform.device_type == "cpu")
    return run


def reduced(run: Config, ranks: int | None) -> tuple[Config, int | None, tuple[str, ...]]:
    """Return a small run of the same kind, how many ranks to simulate, none under torchrun, and what was reduced."""
    from sim.prove.training import reduced_run

    if run.lora.is_on:
        asked, blame = "cannot train the reduced run of adapters", "a small model has no weights to stand beside"
        raise InvalidValue(asked, blame, f"lora.rank: {run.lora.rank}", "hyper-parallel verify, or lora.rank=0")
    small, few, changes = reduced_run(run, devices_of(run, ranks), run.precision)
    is_rank = "RANK" in os.environ
    device = run.train.device if is_rank else "cpu"
    # The weights of `start_from` have other shapes.
    kept = replace(small.train, steps=run.train.steps, start_from=None, device=device)
    without = ("without checkpoints",) if run.checkpoint.folder else ()
    return replace(small, train=kept), None if is_rank else few, (*changes, *without)


def in_words(shape: LlamaConfig) -> str:
    """Say how many parameters a model has, and its layers, width and heads."""
    return (
        f"{shape.num_parameters():,} parameters: {shape.num_hidden_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_attention_heads} heads ({shape.num_key_value_heads} key/value)"
    )


def describe_run(console: Console, run: Config, sim: int | None) -> None:
    """Print the model, the text, the batch and the ranks of a run, and where it starts."""
    model, train, (sequences, length) = run.shape(), run.train, run.batch_shape
    corpus = load_corpus(run.data)
    dims = plan_run(run, sim or RankPlace.from_environment().world_size)
    kind = f"Llama with {model.num_experts} experts per layer" if isinstance(model, MoEConfig) else "Llama"
    if run.is_other:
        console.print(f"the {other_model(str(train.start_from))} of {train.start_from}, as transformers has it")
    else:
        console.print(f"{kind}, {in_words(model)}")
    if run.lora.is_on:
        console.print(f"LoRA of rank {run.lora.rank} in {run.lora.targets}; the model is frozen")
    unit, documents = ("bytes", "files") if corpus.has_bytes else ("tokens", "documents")
    targets = corpus.targets()
    if train.start_from is not None and run.data.tokenizer is None:
        console.print(f"tokens are bytes: {train.start_from} has no tokenizer.json, and there is no --tokenizer")
    console.print(
        f"text: {corpus.source}, {corpus.documents:,} {documents}, {corpus.train.size:,} {unit} + "
        f"{corpus.valid.size:,} held back" + (f"; {targets:,} count as targets" * (targets < corpus.train.size))
    )
    if corpus.is_cut and run.data.path is not None:
        console.print(f"  not all of it: reading stopped at {run.data.max_bytes:,} bytes (--data-bytes)")
    console.print(f"batch: {sequences} x {length} {unit}, {train.steps} steps; {describe_axes(dims)}")
    found = None
    with suppress(CheckpointError):  # also while another run saves there; all ranks find it, and say the same
        found = None if console.quiet else run_to_go_on_from(run)
    if found is not None:
        console.print(f"goes on from step {found[0]} in {run.checkpoint.folder}")
        for change in found[1]:
            console.print(f"  not as before: {change}")
    elif train.start_from is not None:
        console.print(f"starts with the weights of {train.start_from}")


def summarise(console: Console, result: report.TrainResult, run: Config) -> None:
    """Print what a run has come to: steps, losses, speed, and what could not be saved."""
    for failure in result.save_failures:
        console.print(f"a checkpoint could not be written: {failure}")
    if not result.steps:
        console.print(f"nothing to do: the checkpoint is of the last step, {result.first_step - 1}")
        return
    if result.first_step > 1:
        console.print(f"went on from step {result.first_step - 1}")
    if result.stopped is not None:
        console.print(f"stopped by {result.stopped} after step {result.steps[-1].step}")
    taken = [record for record in result.steps if not record.skipped] or result.steps  # of the others loss may be NaN
    last, first = [record.loss for record in taken[-10:]], taken[0]
    at = "" if first.step == result.first_step else f" at step {first.step:,}"
    console.print(
        f"loss {first.loss:.3f}{at} -> {sum(last) / len(last):.3f} (mean of the last {len(last)} steps), "
        f"{result.tokens_per_s:,.0f} tokens/s"
    )
    if skipped := sum(record.skipped for record in result.steps):
        console.print(f"skipped: {skipped:,} of {len(result.steps):,} steps, whose loss or gradient was not finite")
    if result.valid_loss is not None:
        bits = f", {result.valid_loss / math.log(2):.2f} bits per byte (8 is guessing)"
        console.print(f"held-back text: loss {result.valid_loss:.3f}" + bits * (run.data.tokenizer is None))
    table, predicted = report.prediction_table(result.steps), result.steps[-1].predicted
    if table is not None and predicted is not None:
        console.print(table)
        if predicted.memory_before:
            console.print(
                f"memory measured: the process, less the {readable_bytes(predicted.memory_before)} it had before the "
                "model was built; buffers of libraries and freed pages count, too"
            )


def compare_runs(console: Console, runs: dict[str, report.TrainResult], traffic: list[Any], out: Path) -> None:
    """Print the runs side by side, and draw their losses in the folder `out`."""
    simulated, single = runs.values()
    difference, step = report.largest_difference(simulated, single)
    console.print("\nThe same steps on 8 simulated ranks and on one device", style="bold")
    console.print(report.loss_table(runs))
    console.print(f"largest difference in {len(simulated.steps)} steps: {difference:.1e} (step {step})")
    console.print("\nWhat the 8 ranks communicated (bytes received, validation included)", style="bold")
    console.print(report.traffic_table(traffic))
    console.print()
    summarise(console, simulated, Config())
    console.print(f"one device alone: {single.tokens_per_s:,.0f} tokens/s on one core, as the simulated ranks together")
    picture, logs = out / "loss.png", (out / "8_ranks.jsonl", out / "one_device.jsonl")
    is_drawn = report.plot_log(logs, picture)
    if not is_drawn:
        console.print(f"no {picture}: matplotlib is not installed; try: pip install 'hyper_parallel[plot]'")
    console.print(f"wrote {f'{picture}, ' * is_drawn}{logs[0]} and {logs[1]}")
