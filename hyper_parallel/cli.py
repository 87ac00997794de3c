"""`hyper-parallel`: train a model under torchrun, alone, or on ranks simulated in this process; plan a redistribution.

The command line is this file, `cli_mesh.py` and `cli_hardware.py` with the commands of the mesh simulator,
`cli_runs.py` with what training commands do, and `cli_kit.py`, which all use. It is the one place that may import
`sim`, and only where something is simulated. A command imports what it needs: torch takes seconds, and `--help` and
wrong options come before it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from enum import Enum
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from hyper_parallel import __version__, cli_mesh
from hyper_parallel.cli_kit import (
    FAILURE,
    INTERRUPTED,
    NOT_SAVED,
    USER_ERROR,
    check_can_write,
    is_first_rank,
    mistakes_as_messages,
    say_error,
    stdout_console,
)

__all__ = ["FAILURE", "INTERRUPTED", "NOT_SAVED", "USER_ERROR", "app", "main"]

_WEIGHTS = ("bfloat16", "float16", "float32", "float64")
_DEGREES, _SAVING = "Parallel degrees", "Checkpoints"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train with PyTorch in parallel: on a cluster, on one device, or on ranks simulated in one process.",
)


def _print_version(asked: bool) -> None:
    if asked:
        stdout_console().print(f"hyper_parallel {__version__}, torch {metadata.version('torch')}")
        raise typer.Exit()


@app.callback(no_args_is_help=True)
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run the command line.

    Exit code 0, 1 (a failure), 2 (a mistake in what was asked), 70 (a rank is stuck), 74 (all steps are done, and the
    last save failed) or 130 (Ctrl-C).
    """
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
    resume_step: Annotated[
        int | None,
        typer.Option(
            help="Go back to this step; newer checkpoints become undone-... when the next is complete.",
            rich_help_panel=_SAVING,
        ),
    ] = None,
    on_nonfinite: Annotated[
        str | None, typer.Option(help="What inf or NaN does: stop, skip, or dump and stop.")
    ] = None,
    stuck_after: Annotated[
        float | None, typer.Option(help="Seconds without progress until the run ends and says who is stuck; 0: never.")
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
    dump_config: Annotated[
        bool, typer.Option("--dump-config", help="Print this run as a TOML file, with all defaults, and exit.")
    ] = False,
) -> None:
    """Train a small Llama, or a mixture of experts, on text, with any combination of parallel degrees.

    Without --sim the ranks come from torchrun:
    torchrun --nproc-per-node 2 -m hyper_parallel.cli train --device cpu
    """
    from hyper_parallel.cli_runs import check_run, describe_run, run_here, run_simulated, summarise, while_ranks_run
    from hyper_parallel.trainer.config import Config, config_text, load_config
    from hyper_parallel.trainer.guards import stop_on_signals
    from hyper_parallel.trainer.saving import with_shape_of

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
        saving: dict[str, Any] = {"folder": checkpoint_dir, "every": save_every, "keep": keep}
        saving |= {"background": background, "resume": resume, "resume_step": resume_step}
        run = run.with_changes("checkpoint", saving)
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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for loss.png and the logs.")] = Path("out/demo"),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 60,
    seed: Annotated[int, typer.Option(help="Of weights, data order and simulated interleaving.")] = 0,
) -> None:
    """Train a small Llama on 8 simulated ranks (2 replicas x 4 shards), then on one device, and compare."""
    from hyper_parallel.cli_runs import (
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
        from hyper_parallel.core.dtensor.text import parse_dtype
        from hyper_parallel.trainer.saving import export_checkpoint

        to = None if dtype is None else parse_dtype(dtype)
        if to is not None and str(to).removeprefix("torch.") not in _WEIGHTS:
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
        from hyper_parallel.trainer.report import plot_log

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
        from hyper_parallel.core.dtensor.text import parse_dtype, parse_layout, parse_mesh, parse_shape
        from hyper_parallel.core.redistribute import plan as plan_redistribution
        from hyper_parallel.core.redistribute import topology
        from hyper_parallel.core.redistribute.show import show

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
    from hyper_parallel.cli_runs import verify_subject
    from hyper_parallel.core.shard.plan_file import plan_text
    from hyper_parallel.trainer.verify import LlamaSizes, Subject, llama_subject, own_subject

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
        correct = verify_subject(stdout_console(), subject, everything)
    raise typer.Exit(0 if correct else FAILURE)


class _MappedDevice(str, Enum):
    cuda = "cuda"
    npu = "npu"


_TORCHRUNS = (  # options that mean nothing in one process: accepted, and their values are not looked at
    *("--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--node-rank"),
    *("--max-restarts", "--monitor-interval", "--start-method", "--role", "--local-addr"),
    *("--master_addr", "--master_port", "--rdzv_backend", "--rdzv_endpoint", "--rdzv_id", "--rdzv_conf", "--node_rank"),
    *("--max_restarts", "--monitor_interval", "--start_method", "--local_addr"),
)


@app.command(context_settings={"allow_interspersed_args": False})  # what follows the script is its own
def simulate(
    script: Annotated[str, typer.Argument(help="A Python file that torchrun could start; with -m, a module.")],
    nproc: Annotated[int, typer.Option("--nproc", "--nproc-per-node", "--nproc_per_node", help="Ranks.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own.")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="The script is a module, as for python -m.")] = False,
    seed: Annotated[int, typer.Option(help="Fixes the interleaving of the ranks.")] = 0,
    map_device: Annotated[
        _MappedDevice | None, typer.Option(help="Put on the CPU what the script puts on this device.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="K=V", help="A variable for every rank.")] = None,
    own: Annotated[str, typer.Option(metavar="NAMES", help="Packages of which each rank gets a copy: a,b")] = "",
    show: Annotated[str, typer.Option(metavar="RANKS", help="Whose standard output: 0, or 0,3, or all.")] = "0",
    check_races: Annotated[
        bool, typer.Option("--check-races", help="Look for buffers touched before the wait.")
    ] = False,
    check_replicas: Annotated[
        bool, typer.Option("--check-replicas", help="Compare copies before steps of optimizers.")
    ] = False,
    nnodes: Annotated[str, typer.Option(help="1: there is one machine.", hidden=True)] = "1",
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    ignored: Annotated[list[str] | None, typer.Option(*_TORCHRUNS, hidden=True)] = None,
) -> None:
    """Run an unmodified torchrun script on simulated ranks, in this process and on the CPU.

    hyper-parallel simulate --nproc 8 train.py --steps 10

    torchrun's other options (--standalone, --nnodes 1, --rdzv-backend ...) are accepted, and mean nothing here.
    """
    del standalone, ignored
    with mistakes_as_messages():
        from sim.script.launch import run_script
        from sim.script.options import launch_of

        launch = launch_of(
            "hyper-parallel simulate",
            script,
            arguments or (),
            nproc=nproc,
            seed=seed,
            map_device=None if map_device is None else map_device.value,
            env=env or (),
            own=own,
            show=show,
            module=module,
            check_races=check_races,
            check_replicas=check_replicas,
            nnodes=nnodes,
        )
    raise typer.Exit(run_script(launch))


cli_mesh.add_commands(app)


if __name__ == "__main__":
    main()
