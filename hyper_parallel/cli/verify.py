"""The command `verify`: a training run, or a plan, compared with one device on simulated ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hyper_parallel.cli.kit import FAILURE, mistakes_as_messages, option, stdout_console
from hyper_parallel.cli.options import Given, with_options
from hyper_parallel.cli.run import BUT_MODEL, RunWords, StartFrom, devices_of, file_of, read_run
from hyper_parallel.core.common.errors import InvalidValue

_PLAN = "A plan"


@with_options(*BUT_MODEL)
def verify(
    words: RunWords = None,
    devices: Annotated[int | None, option("Ranks of the run; default: as many as its degrees need.")] = None,
    model: Annotated[
        str | None, option("Of a run: llama, moe, or a name such as llama3-8b. Of a plan: llama, or module:function.")
    ] = None,
    start_from: StartFrom = None,
    mesh: Annotated[str | None, option("Axes and their sizes, the last one fastest.", panel=_PLAN)] = None,
    plan_file: Annotated[
        Path | None, option("TOML file, see --show-plan; default: the plan that ships with llama.", "--plan")
    ] = None,
    parallelize: Annotated[
        str | None, option("module:function, called with model and mesh, in place of a plan.")
    ] = None,
    show_plan: Annotated[bool, option("Print the plan as TOML, and compare nothing.", "--show-plan")] = False,
    *,
    given: Given,
    tp_axis: Annotated[str, option("Axis that splits heads, width and vocabulary; None: none does.")] = "tp",
    sequence_parallel: Annotated[bool, option("Split the residual stream over the sequence.")] = True,
    vocab_parallel: Annotated[bool, option("Split embedding and head.")] = True,
    inputs: Annotated[
        list[str] | None, option("Argument of a model of your own: 4,16 floats, 4,16:100 numbers below 100.", "--input")
    ] = None,
    input_layout: Annotated[
        list[str] | None, option("Which part of an argument a rank has: dp,None; default: as the plan says.")
    ] = None,
    loss: Annotated[
        str | None, option("module:function of output and inputs; default: a random sum of the output.")
    ] = None,
    optimizer: Annotated[
        str | None, option("module:function, called with parameters, as torch.optim:SGD; default: AdamW.")
    ] = None,
    dtype: Annotated[str, option("What ranks compute in: float64, or float32.")] = "float64",
    everything: Annotated[bool, option("Print all tensors, not only the wrong ones.", "--all")] = False,
) -> None:
    """Prove on simulated ranks that a training run, or a plan, computes what one device computes; else name what errs.

    The run that train takes, by the same file and options; a large one is reduced, and the report says how:
    hyper-parallel verify run.toml --devices 64 --tp 8

    A plan, of the llama or of a model of your own:
    hyper-parallel verify --show-plan > plan.toml; hyper-parallel verify --mesh dp=2,tp=4 --plan plan.toml

    Exit code 0: right; 1: something is wrong, or ranks failed; 2: a mistake in what was asked.
    """
    of_plan = {"--mesh": mesh, "--plan": plan_file, "--parallelize": parallelize, "--show-plan": show_plan or None}
    of_plan |= {"--loss": loss, "--optimizer": optimizer}
    of_plan["--model"] = model if model is not None and ":" in model else None
    named = ", ".join(name for name, value in of_plan.items() if value is not None)
    with mistakes_as_messages():
        config = file_of(words, given)
        run_options = {name: value for section in given for name, value in given[section].items()}
        only_of_run = [name for name in run_options if name not in ("seq_len", "seed", "steps", "hardware")]
        if config is not None or devices is not None or start_from is not None or only_of_run:
            if named:
                blame = "it is about a plan, and a run has its own"
                seen = f"of a run: {', '.join(only_of_run) or config or devices}   of a plan: {named}"
                raise InvalidValue("cannot verify a run with " + named, blame, seen, "one of the two")
            if model is not None:
                given["train"]["model"] = model
            from hyper_parallel.cli.subject import show_proof
            from hyper_parallel.trainer.parallelize import describe_axes
            from hyper_parallel.trainer.preflight import plan_run
            from sim.prove.training import verify_run

            run = read_run(config, given, start_from)
            ranks = devices_of(run, devices)
            axes = describe_axes(plan_run(run, ranks))
            head = f"a run on {axes}: two steps on simulated ranks beside one device, in float64 ..."
            correct = show_proof(stdout_console(), head, lambda: verify_run(run, ranks), everything)
            raise typer.Exit(0 if correct else FAILURE)
        from hyper_parallel.cli.subject import llama_subject, named_object, own_subject, verify_subject
        from hyper_parallel.core.shard.plan_file import plan_text

        mesh, model = "dp=2,tp=4" if mesh is None else mesh, "llama" if model is None else model
        common: dict[str, Any] = {"plan_path": plan_file, "input_layouts": input_layout or (), "dtype": dtype}
        common["seed"] = int(run_options.get("seed", 0))
        if model != "llama":
            subject = own_subject(model, mesh, inputs or (), parallelize=parallelize, **common)
        elif inputs or parallelize is not None:
            blame = f"{'--input' if inputs else '--parallelize'} is for a model of your own"
            hint = "--model module:function, or --seq-len, or --plan"
            raise InvalidValue("cannot verify the llama", blame, f"--model {model}", hint)
        else:
            splits = {"sequence_parallel": sequence_parallel, "vocab_parallel": vocab_parallel}
            subject = llama_subject(mesh, seq_len=run_options.get("seq_len"), tp=tp_axis, options=splits, **common)
        if show_plan:
            if subject.plan is None:
                blame = "--parallelize makes the model parallel, and no plan does"
                raise InvalidValue("cannot --show-plan", blame, subject.title, "--plan plan.toml, or --model llama")
            stdout_console().file.write(plan_text(subject.plan, subject.mesh_shape))
            raise typer.Exit()
        options: dict[str, Any] = {"steps": int(run_options.get("steps", 1)), "machine": run_options.get("hardware")}
        options["loss_fn"] = None if loss is None else named_object("--loss", loss)
        options["optimizer_fn"] = True if optimizer is None else named_object("--optimizer", optimizer)
        correct = verify_subject(stdout_console(), subject, everything, **options)
    raise typer.Exit(0 if correct else FAILURE)
