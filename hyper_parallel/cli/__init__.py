"""`hyper-parallel`: train a model under torchrun, alone, or on ranks simulated in this process; estimate; prove a plan.

    train -> runs -> kit
    verify -> subject -> runs
    doctor -> runs
    doctor, estimate, hardware, plan, simulate -> kit
    train, estimate -> run -> options
    verify -> options

One file for each command, or for two similar ones. It is the one place that may import `sim`, and only where
something is simulated. A command imports what it needs: torch takes seconds, and `--help` and wrong options come before
it.
"""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from hyper_parallel import __version__
from hyper_parallel.cli import doctor, estimate, hardware, plan, simulate, train, verify
from hyper_parallel.cli.kit import (
    DOES_NOT_FIT,
    FAILURE,
    INTERRUPTED,
    NOT_SAVED,
    USER_ERROR,
    output_written,
    stdout_console,
)

__all__ = ["DOES_NOT_FIT", "FAILURE", "INTERRUPTED", "NOT_SAVED", "USER_ERROR", "app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train with PyTorch in parallel: on a cluster, on one device, or on ranks simulated in one process.",
)
for _command in (train.train, train.demo, train.export, train.plot, plan.plan, verify.verify):
    app.command()(_command)
# It reads its own command line, and what follows the script is the script's.
app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)(simulate.simulate)
for _command in (estimate.estimate, estimate.search, doctor.doctor):
    app.command()(_command)
app.add_typer(hardware.hardware, name="hardware")


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

    Exit code 0, 1 (a failure), 2 (a mistake in what was asked), 3 (what is estimated does not fit into memory), 70 (a
    rank is stuck), 74 (all steps are done, and the last save failed) or 130 (Ctrl-C).
    """
    sys.meta_path.insert(0, cast(Any, _OwnSimulator))
    try:
        with output_written():
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
        return PathFinder.find_spec("sim", [str(Path(__file__).resolve().parents[2])])
