"""The command `simulate`: a torchrun script on simulated ranks."""

from __future__ import annotations

import runpy
from pathlib import Path

import typer

from hyper_parallel.cli.kit import mistakes_as_messages

_COMMAND = "hyper-parallel simulate"
# Run as a file, because to import it as a part of `sim` takes torch.
_ARGUMENTS = Path(__file__).resolve().parents[2] / "sim" / "script" / "arguments.py"


def simulate(context: typer.Context) -> None:
    """Run an unmodified torchrun script on simulated ranks, in this process and on the CPU.

    hyper-parallel simulate --nproc 8 train.py --steps 10
    """
    asked = runpy.run_path(str(_ARGUMENTS))["read_arguments"](context.args, _COMMAND)
    with mistakes_as_messages():
        from sim.script.launch import run_script
        from sim.script.options import launch_of

        launch = launch_of(_COMMAND, **asked)
    raise typer.Exit(run_script(launch))
