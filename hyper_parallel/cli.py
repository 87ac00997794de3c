"""`hyper-parallel`: train a model under torchrun, alone, or on ranks simulated in this process; plan a redistribution.

The command line is this file, `cli_mesh.py` and `cli_hardware.py` with the commands of the mesh simulator, and
`cli_kit.py`, which all use. It is the one place that may import `sim`, and only where something is simulated.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.markup import escape

from hyper_parallel import __version__, cli_mesh
from hyper_parallel.cli_kit import (
    FAILURE,
    INTERRUPTED,
    USER_ERROR,
    check_can_write,
    is_first_rank,
    mistakes_as_messages,
    say_error,
    stderr_console,
    stdout_console,
)
from hyper_parallel.core.checkpoint.errors import CheckpointError
from hyper_parallel.core.dtensor.text import parse_dtype, parse_layout, parse_mesh, parse_shape
from hyper_parallel.core.redistribute import plan as plan_redistribution
from hyper_parallel.core.redistribute import topology
from hyper_parallel.core.redistribute.show import show
from hyper_parallel.core.shard.plan_file import plan_text
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.config import Config, ParallelConfig, TrainConfig
from hyper_parallel.trainer.config_file import load_config
from hyper_parallel.trainer.convert import export_checkpoint, with_shape_of
from hyper_parallel.trainer.data import load_corpus
from hyper_parallel.trainer.display import TrainingDisplay
from hyper_parallel.trainer.nonfinite import NonFiniteError
from hyper_parallel.trainer.place import RankPlace
from hyper_parallel.trainer.preflight import check_machine, check_precision, plan_run
from hyper_parallel.trainer.record import TrainResult
from hyper_parallel.trainer.report import (
    Traffic,
    bits_per_byte,
    largest_difference,
    loss_table,
    plot_log,
    plot_losses,
    traffic_table,
)
from hyper_parallel.trainer.saving import run_to_go_on_from
from hyper_parallel.trainer.steps import describe_axes
from hyper_parallel.trainer.stop import StopRequest, stop_on_signals
from hyper_parallel.trainer.trainer import train as train_rank
from hyper_parallel.trainer.verify import LlamaSizes, Subject, llama_subject, own_subject, painted

__all__ = ["FAILURE", "INTERRUPTED", "USER_ERROR", "app", "main"]

_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_DEGREES, _SAVING = "Parallel degrees", "Checkpoints"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train with PyTorch in parallel: on a cluster, on one device, or on ranks simulated in one process.",
)


def _print_version(asked: bool) -> None:
    if asked:
        stdout_console().print(f"hyper_parallel {__version__}, torch {torch.__version__}")
        raise typer.Exit()


@app.callback(no_args_is_help=True)
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run the command line; exit code 0, 1 (a failure), 2 (a mistake in what was asked) or 130 (Ctrl-C)."""
    sys.meta_path.insert(0, cast(Any, _OwnSimulator))
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


class _OwnSimulator:
    """Finds the simulator beside this package, and not a `sim.py` of the project that a command runs in."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the simulator's spec, the first time that it is imported; None for anything else."""
        if fullname != "sim" or any(name.startswith("sim.") for name in sys.modules):
            return None  # what is asked for later is a script's own
        return PathFinder.find_spec("sim", [str(Path(__file__).resolve().parents[1])])


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="TOML file; what it leaves out keeps its default.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step, over all ranks together.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Backward passes per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    model: Annotated[str | None, typer.Option(help="llama, or moe: the same with experts.")] = None,
    dp_replicate: Annotated[
        int | None, typer.Option(help="Ranks that hold copies of the same shards.", rich_help_panel=_DEGREES)
    ] = None,
    dp_shard: Annotated[
        int | None,
        typer.Option(help="Ranks that each weight is split over; default: all left.", rich_help_panel=_DEGREES),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that split each layer.", rich_help_panel=_DEGREES)] = None,
    cp: Annotated[int | None, typer.Option(help="Ranks that split each sequence.", rich_help_panel=_DEGREES)] = None,
    ulysses_degree: Annotated[
        int | None,
        typer.Option(help="The part of cp that splits heads, the rest is a ring.", rich_help_panel=_DEGREES),
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Ranks of the pipeline.", rich_help_panel=_DEGREES)] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that split the experts.", rich_help_panel=_DEGREES)] = None,
    etp: Annotated[
        int | None, typer.Option(help="Ranks that split each expert: tp or 1.", rich_help_panel=_DEGREES)
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Of the pipeline, of --accumulate micro-batches: gpipe, 1f1b, interleaved, looped-bfs, zero-bubble, "
            "zbv.",
            rich_help_panel=_DEGREES,
        ),
    ] = None,
    layers_per_stage: Annotated[
        str | None, typer.Option(help="Such as 1,2,1; default: balanced.", rich_help_panel=_DEGREES)
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="fully_shard or hsdp, to split weights.", rich_help_panel=_DEGREES)
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 over fp32 weights, or fp64.")] = None,
    checkpointing: Annotated[
        str | None, typer.Option(help="What backward computes again: none, selective, alternate or full.")
    ] = None,
    compile: Annotated[bool | None, typer.Option(help="torch.compile what lies between communications.")] = None,
    start_from: Annotated[
        str | None, typer.Option(help="Folder of transformers: its model, and weights to start with.")
    ] = None,
    checkpoint_dir: Annotated[
        str | None, typer.Option(help="Folder of checkpoints; goes on from the newest.", rich_help_panel=_SAVING)
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; 0: only at the end.", rich_help_panel=_SAVING)
    ] = None,
    keep: Annotated[int | None, typer.Option(help="How many checkpoints to keep.", rich_help_panel=_SAVING)] = None,
    background: Annotated[
        bool | None, typer.Option(help="Write checkpoints while training goes on.", rich_help_panel=_SAVING)
    ] = None,
    resume: Annotated[
        bool | None, typer.Option(help="Go on from the newest checkpoint, or start anew.", rich_help_panel=_SAVING)
    ] = None,
    on_nonfinite: Annotated[
        str | None, typer.Option(help="What inf or NaN does: stop, skip, or dump and stop.")
    ] = None,
    stuck_after: Annotated[
        float | None, typer.Option(help="Seconds without a step until the run ends and says who is stuck.")
    ] = None,
    tensorboard: Annotated[str | None, typer.Option(help="Folder for TensorBoard.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or npu; default: what the machine has.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between validations; 0: only at the end.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, data order and simulated interleaving.")] = None,
    log_file: Annotated[
        str | None, typer.Option(help="JSONL file, written anew unless the run goes on; default: out/train.jsonl.")
    ] = None,
    memory_limit_gb: Annotated[
        float | None, typer.Option(help="Refuse to start above this estimate; default: what is free.")
    ] = None,
    sim: Annotated[int | None, typer.Option(metavar="N", help="Simulate N ranks in this process, on the CPU.")] = None,
) -> None:
    """Train a small Llama, or a mixture of experts, on text, with any combination of parallel degrees.

    Without --sim the ranks come from torchrun:
    torchrun --nproc-per-node 2 -m hyper_parallel.cli train --device cpu
    """
    with mistakes_as_messages():
        run = load_config(config) if config is not None else Config()
        size: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "seq_len": seq_len, "accumulate": accumulate}
        rest = {"seed": seed, "device": device, "eval_every": eval_every, "memory_limit_gb": memory_limit_gb}
        guards = {"on_nonfinite": on_nonfinite, "stuck_after_s": stuck_after, "tensorboard": tensorboard}
        run = run.with_changes("train", size | rest | guards | {"log": log_file, "model": model})
        run = run.with_changes("optimizer", {"lr": lr})
        degrees = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp, "cp": cp, "pp": pp, "ep": ep}
        degrees |= {"etp": etp, "ulysses_degree": ulysses_degree}
        how: dict[str, Any] = {"schedule": schedule, "layers_per_stage": layers_per_stage, "engine": engine}
        how |= {"param_dtype": precision, "checkpointing": checkpointing, "compile": compile}
        run = run.with_changes("parallel", degrees | how)
        saving = {"folder": checkpoint_dir, "every": save_every, "keep": keep}
        run = run.with_changes("checkpoint", saving | {"background": background, "resume": resume})
        if start_from is not None or run.train.start_from is not None:
            run = with_shape_of(run, start_from or str(run.train.start_from))
            if model not in (None, run.train.model):
                raise ValueError(
                    f"cannot start '{model}' from {run.train.start_from}: it holds a '{run.train.model}'\n"
                    f"  --model {model}\n  try: leave out --model"
                )
        if run.train.log is None:
            run = run.with_changes("train", {"log": "out/train.jsonl"})
        run = _check(run, sim)
        if is_first_rank():
            check_can_write(Path(str(run.train.log)))
    with _while_ranks_run(f"the log so far is in {run.train.log}"), stop_on_signals() as stop:
        console = stdout_console()
        _describe(console, run, sim)
        if sim is None:
            result = _run_here(console, f"rank 0 of {os.environ.get('WORLD_SIZE', '1')}", run, stop)
        else:
            result, _ = _run_simulated(console, f"{sim} simulated ranks", run, sim, stop)
        _summarise(console, result)
        if run.checkpoint.folder is not None and result.steps:
            console.print(f"checkpoints: {run.checkpoint.folder}")
        elif result.stopped is not None:
            console.print("nothing is saved: there was no --checkpoint-dir")
        console.print(f"log: {run.train.log}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for loss.png and the logs.")] = Path("out/demo"),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 60,
    seed: Annotated[int, typer.Option(help="Of weights, data order and simulated interleaving.")] = 0,
) -> None:
    """Train a small Llama on 8 simulated ranks (2 replicas x 4 shards), then on one device, and compare."""
    with mistakes_as_messages():
        both = TrainConfig(steps=steps, seed=seed, device="cpu", eval_every=10)
        ranks = Config(
            train=replace(both, log=str(out / "8_ranks.jsonl")), parallel=ParallelConfig(dp_replicate=2, dp_shard=4)
        )
        single = Config(train=replace(both, log=str(out / "one_device.jsonl")))
        ranks = _check(ranks, sim=8)
        for name in ("loss.png", "8_ranks.jsonl", "one_device.jsonl"):
            check_can_write(out / name)
    with _while_ranks_run(f"the logs so far are in {out}"):
        console = stdout_console()
        _describe(console, ranks, sim=8)
        simulated, traffic = _run_simulated(console, "8 simulated ranks", ranks, 8)
        with _one_thread():
            alone = _run_here(console, "one device", single)
        _compare(console, {"8 ranks": simulated, "one device": alone}, traffic, out)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of train, or its --checkpoint-dir: the newest.")],
    folder: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")],
    dtype: Annotated[str | None, typer.Option(help="Of the weights, such as bfloat16; default: as they are.")] = None,
) -> None:
    """Write a checkpoint as a folder that transformers loads with AutoModelForCausalLM.from_pretrained.

    hyper-parallel export out/run out/hf --dtype bfloat16
    """
    with mistakes_as_messages():
        to = None if dtype is None else parse_dtype(dtype)
        if to is not None and to not in _WEIGHTS:
            raise ValueError(
                f"cannot export weights in {dtype}: they are floating-point numbers that transformers loads\n"
                f"  --dtype {dtype}\n  try: --dtype bfloat16, float16, float32 or float64"
            )
        config = export_checkpoint(checkpoint, folder, to)
        stdout_console().print(f"wrote {config.num_parameters():,} parameters to {folder}")


@app.command()
def plot(
    logs: Annotated[list[Path], typer.Argument(help="JSONL logs of runs.")],
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("out/train.png"),
) -> None:
    """Draw loss, gradient norm and speed of one or more runs.

    hyper-parallel plot out/train.jsonl
    """
    with mistakes_as_messages():
        check_can_write(out)
        if not plot_log(logs, out):
            raise ValueError("cannot plot: matplotlib is not installed\n  try: pip install 'hyper_parallel[plot]'")
        stdout_console().print(f"wrote {out}")


@app.command()
def plan(
    mesh: Annotated[str, typer.Option(help="Axes and their sizes, the last one fastest: dp=2,tp=4")],
    shape: Annotated[str, typer.Option(help="Sizes of the whole tensor: 4096,4096")],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="Layout it has, one entry per dim: dp,None; several axes on one dim, outer first: dp+tp,None; "
            'reductions still to be taken: "None,None; tp=sum"',
        ),
    ],
    target: Annotated[str, typer.Option("--to", help="Layout it should have, written alike.")],
    dtype: Annotated[str, typer.Option(help="Of the tensor.")] = "float32",
    hardware: Annotated[
        str | None,
        typer.Option(help="h100, a100, ascend-910b or laptop, to take the least time; default: the fewest bytes."),
    ] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="If not the usual number for the hardware.")] = None,
    max_extra_bytes: Annotated[
        int | None, typer.Option(help="Most memory per rank besides its part of the source and of the result.")
    ] = None,
    steps_only: Annotated[bool, typer.Option("--steps-only", help="Print nothing but our steps.")] = False,
) -> None:
    """Show how a tensor gets from one layout to another: our steps, torch's, and the least there is to move.

    hyper-parallel plan --mesh dp=2,tp=4 --shape 4096,4096 --from dp,None --to None,tp
    """
    with mistakes_as_messages():
        if hardware is None and ranks_per_node is not None:
            raise ValueError(
                f"cannot place ranks on nodes: --ranks-per-node {ranks_per_node} is given without --hardware\n"
                f"  try: --hardware h100 --ranks-per-node {ranks_per_node}"
            )
        axes, on = parse_mesh(mesh), None if hardware is None else topology(hardware, ranks_per_node)
        src, dst = parse_layout(axes, source), parse_layout(axes, target)
        steps = plan_redistribution(
            src, dst, parse_shape(shape), parse_dtype(dtype), on, max_extra_bytes=max_extra_bytes
        )
        drawn = show(steps, device_type="cpu" if hardware == "laptop" else "cuda", steps_only=steps_only)
    stdout_console().print(drawn)


@app.command()
def verify(
    model: Annotated[
        str, typer.Option(help="llama, or module:function of your own, where the function returns the model.")
    ] = "llama",
    mesh: Annotated[str, typer.Option(help="Axes and their sizes, the last one fastest.")] = "dp=2,tp=4",
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="TOML file, see --show-plan; default: the plan that ships with llama.")
    ] = None,
    parallelize: Annotated[
        str | None, typer.Option(help="module:function, called with model and mesh, in place of a plan.")
    ] = None,
    show_plan: Annotated[
        bool, typer.Option("--show-plan", help="Print the plan as TOML, and compare nothing.")
    ] = False,
    layers: Annotated[int, typer.Option(help="Blocks of the llama.")] = 2,
    hidden: Annotated[int | None, typer.Option(help="Width of its residual stream.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; default: at least two per rank along tp.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Number of tokens.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences, over all ranks together.")] = None,
    tied: Annotated[bool, typer.Option("--tied", help="The embedding is the head, too.")] = False,
    tp: Annotated[str, typer.Option(help="Axis that splits heads, width and vocabulary; None: none does.")] = "tp",
    sequence_parallel: Annotated[bool, typer.Option(help="Split the residual stream over the sequence.")] = True,
    vocab_parallel: Annotated[bool, typer.Option(help="Split embedding and head.")] = True,
    dtensors: Annotated[bool, typer.Option("--dtensors", help="Compute on DTensors, not on local tensors.")] = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="Argument of a model of your own: 4,16 floats, 4,16:100 numbers below 100."),
    ] = None,
    input_layout: Annotated[
        list[str] | None, typer.Option(help="Which part of an argument a rank has: dp,None; default: as the plan says.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="What ranks compute in: float64, or float32.")] = "float64",
    seed: Annotated[int, typer.Option(help="Of weights, inputs and simulated interleaving.")] = 0,
    everything: Annotated[bool, typer.Option("--all", help="Print all tensors, not only the wrong ones.")] = False,
) -> None:
    """Prove on simulated ranks that a plan computes what one device computes; else name the first module that errs.

    hyper-parallel verify --show-plan > plan.toml; hyper-parallel verify --plan plan.toml

    Exit code 0: right; 1: the plan is wrong, or ranks failed; 2: a mistake in what was asked.
    """
    with mistakes_as_messages():
        subject: Subject
        if model == "llama":
            if inputs or parallelize is not None:
                raise ValueError(
                    f"cannot verify the llama: {'--input' if inputs else '--parallelize'} is for a model of your own\n"
                    f"  --model {model}\n  try: --model module:function, or --batch and --seq-len, or --plan"
                )
            subject = llama_subject(
                mesh,
                LlamaSizes(layers, hidden, heads, kv_heads, vocab, seq_len, batch, tied),
                plan_path=plan_file,
                tp=tp,
                options={
                    "sequence_parallel": sequence_parallel,
                    "vocab_parallel": vocab_parallel,
                    "local": not dtensors,
                },
                input_layouts=input_layout or (),
                dtype=dtype,
                seed=seed,
            )
        else:
            subject = own_subject(
                model,
                mesh,
                inputs or (),
                plan_path=plan_file,
                parallelize=parallelize,
                input_layouts=input_layout or (),
                dtype=dtype,
                seed=seed,
            )
        if show_plan:
            stdout_console().file.write(plan_text(subject.shown_plan(), subject.mesh))
            raise typer.Exit()
        correct = _verify(stdout_console(), subject, everything)
    raise typer.Exit(0 if correct else FAILURE)


@app.command(
    add_help_option=False,  # sim's own parser has the options, and shows them
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def simulate(context: typer.Context) -> None:
    """Run an unmodified torchrun script on simulated ranks.

    hyper-parallel simulate --nproc 8 train.py --steps 10
    """
    from sim.script.launch import main as run_script

    raise typer.Exit(run_script(context.args, command="hyper-parallel simulate"))


cli_mesh.add_commands(app)


# -- running ---------------------------------------------------------------------------------------------------------


def _run_here(console: Console, title: str, run: Config, stop: StopRequest | None = None) -> TrainResult:
    """Train as the rank that torchrun made of this process, or alone."""
    with TrainingDisplay(console, title, run.train.steps) as display:
        return train_rank(run, display.on_step, stop)


def _run_simulated(
    console: Console, title: str, run: Config, world_size: int, stop: StopRequest | None = None
) -> tuple[TrainResult, list[Traffic]]:
    """Train as every rank of a simulated world; also return what the ranks communicated."""
    import sim

    with (
        TrainingDisplay(console, title, run.train.steps) as display,
        sim.world(world_size, seed=run.train.seed) as world,
    ):
        results = world.run(train_rank, args=(run, display.on_step, stop))
        return results[0], list(world.trace.by_axis())


def _verify(console: Console, subject: Subject, everything: bool) -> bool:
    """Compare the ranks with one device, and print the report; return whether all is well."""
    from sim import SimError, verify_plan

    console.print("\n".join(subject.lines()))
    console.file.flush()
    start = time.perf_counter()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs what ranks raise, too
    try:
        with _one_thread():
            report = verify_plan(
                subject.model_fn,
                subject.inputs,
                subject.mesh,
                subject.plan,
                parallelize=subject.parallelize,
                input_layouts=subject.input_layouts,
                dtype=subject.dtype,
                seed=subject.seed,
            )
    except SimError as error:  # also one that is a ValueError on a rank: the plan is wrong, not what was asked
        told = "\n".join(line for line in str(error).splitlines() if line and not line.startswith("  replay: "))
        stderr_console().print(f"[red]the ranks failed:[/red] {escape(told)}")
        return False
    except (ValueError, TypeError):
        raise
    except Exception:  # the model fails on one device, too
        traceback.print_exc()
        return False
    console.print()
    console.print(painted(report.table(verbose=everything)))
    console.print(f"took {time.perf_counter() - start:.1f} s")
    return report.ok


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one core, as each simulated rank does: the comparison is then the same on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- what can go wrong -----------------------------------------------------------------------------------------------


@contextmanager
def _while_ranks_run(left: str) -> Iterator[None]:
    """Turn Ctrl-C into exit code 130, and a failure into exit code 1, with its traceback if it was not foreseen."""
    try:
        yield
    except KeyboardInterrupt:
        if is_first_rank():
            stderr_console().print(f"interrupted; {escape(left)}")
        raise typer.Exit(INTERRUPTED) from None
    except NonFiniteError as error:
        say_error(f"{_own(error)}\n  {left}")
        raise typer.Exit(FAILURE) from None
    except CheckpointError as error:
        say_error(str(_own(error)))
        raise typer.Exit(FAILURE) from None
    except Exception:
        traceback.print_exc()
        raise typer.Exit(FAILURE) from None


def _own(error: Exception) -> BaseException:
    """Return what the rank raised: the simulator wraps it."""
    return error.__cause__ if hasattr(error, "rank") and error.__cause__ is not None else error


def _check(run: Config, sim: int | None) -> Config:
    """Check the run against the ranks and the machine; raise ValueError or PlatformUnavailableError."""
    if sim is not None:
        run = _check_simulated(run, sim)
        world_size = local_ranks = sim
    else:
        place = RankPlace.from_environment()
        world_size, local_ranks = place.world_size, place.local_world_size
    platform = get_platform(run.train.device)
    dims = plan_run(run, world_size)
    check_precision(run, platform)
    check_machine(run, dims, local_ranks, on_host=platform.device_type == "cpu")
    return run


def _check_simulated(run: Config, world_size: int) -> Config:
    if world_size < 1:
        raise ValueError(f"cannot simulate {world_size} ranks: --sim {world_size}\n  try: --sim 8")
    started = [f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if started:
        raise ValueError(
            f"--sim {world_size} starts ranks of its own, but this process is a rank already ({', '.join(started)})\n"
            "  try: leave out --sim under torchrun, or start hyper-parallel without torchrun"
        )
    if run.train.device not in (None, "cpu"):
        raise ValueError(
            f"simulated ranks compute on the CPU, but device is '{run.train.device}' (--sim {world_size})\n"
            "  try: leave out --device, or leave out --sim and start the ranks with torchrun"
        )
    return run.with_changes("train", {"device": "cpu"})


# -- what a person sees ----------------------------------------------------------------------------------------------


def _describe(console: Console, run: Config, sim: int | None) -> None:
    model, train = run.shape(), run.train
    corpus = load_corpus(run.data.path, run.data.pattern, run.data.max_bytes)
    dims = plan_run(run, sim or RankPlace.from_environment().world_size)
    kind = "Llama" if train.model == "llama" else f"Llama with {run.experts.num_experts} experts per layer"
    console.print(
        f"{kind}, {model.num_parameters():,} parameters: {model.num_hidden_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_attention_heads} heads ({model.num_key_value_heads} key/value)"
    )
    console.print(
        f"text: {corpus.source}, {corpus.files} files, {corpus.train.size / 1e6:.1f} MB + "
        f"{corpus.valid.size / 1e6:.1f} MB held back"
    )
    console.print(f"batch: {train.batch_size} x {train.seq_len} bytes, {train.steps} steps; {describe_axes(dims)}")
    found = None if console.quiet else run_to_go_on_from(run)
    if found is not None:
        console.print(f"goes on from step {found[0]} in {run.checkpoint.folder}")
        for change in found[1]:
            console.print(f"  other text than before: {change}")
    elif train.start_from is not None:
        console.print(f"starts with the weights of {train.start_from}")


def _summarise(console: Console, result: TrainResult) -> None:
    for failure in result.save_failures:
        console.print(f"a checkpoint could not be written: {failure}")
    if not result.steps:
        console.print(f"nothing to do: the checkpoint is of the last step, {result.first_step - 1}")
        return
    if result.first_step > 1:
        console.print(f"went on from step {result.first_step - 1}")
    if result.stopped is not None:
        console.print(f"stopped by {result.stopped} after step {result.steps[-1].step}")
    last = result.losses[-10:]
    console.print(
        f"loss {result.losses[0]:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)} steps), "
        f"{result.tokens_per_s:,.0f} tokens/s"
    )
    if result.valid_loss is not None:
        console.print(
            f"held-back text: loss {result.valid_loss:.3f}, {bits_per_byte(result.valid_loss):.2f} bits per byte "
            "(8 is guessing)"
        )


def _compare(console: Console, runs: dict[str, TrainResult], traffic: list[Traffic], out: Path) -> None:
    simulated, single = runs.values()
    difference, step = largest_difference(simulated, single)
    console.print("\nThe same steps on 8 simulated ranks and on one device", style="bold")
    console.print(loss_table(runs))
    console.print(f"largest difference in {len(simulated.steps)} steps: {difference:.1e} (step {step})")
    console.print("\nWhat the 8 ranks communicated (bytes received, validation included)", style="bold")
    console.print(traffic_table(traffic))
    console.print()
    _summarise(console, simulated)
    console.print(f"one device alone: {single.tokens_per_s:,.0f} tokens/s on one core, as the simulated ranks together")
    picture = out / "loss.png"
    title = f"Llama, {simulated.parameters:,} parameters, on Python source text"
    if plot_losses(runs, picture, title):
        console.print(f"wrote {picture}, {out / '8_ranks.jsonl'} and {out / 'one_device.jsonl'}")
    else:
        console.print(f"no {picture}: matplotlib is not installed; try: pip install 'hyper_parallel[plot]'")
        console.print(f"wrote {out / '8_ranks.jsonl'} and {out / 'one_device.jsonl'}")


if __name__ == "__main__":
    main()
