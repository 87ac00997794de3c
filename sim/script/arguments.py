"""The command line of `python -m sim run` and `hyper-parallel simulate`: torchrun's options, as far as they apply.

This file is also run by itself, and imports the standard library only: `--help` and wrong options come before torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["HARDWARE_HELP", "new_parser", "read_arguments"]

HARDWARE_HELP = "the ranks' machine, for plans and virtual time: a name, such as h100-sxm, or a TOML file"
_KINDS = ("cuda", "npu")
_IGNORED = (
    *("master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "node-rank"),
    *("max-restarts", "monitor-interval", "start-method", "role", "local-addr"),
)


def read_arguments(arguments: Sequence[str] | None, command: str) -> dict[str, Any]:
    """Return what a command line asks for, as `sim.script.options.launch_of` takes it.

    Args:
        arguments: behind `command`; None: those of this process.
        command: what a person has typed before them.

    Raises:
        SystemExit: they cannot be read, or ask for help.
    """
    about = "Run an unmodified torchrun script on simulated ranks, in this process and on the CPU."
    parser = new_parser(command, about, "--nproc 8 --seed 5 train.py --steps 10")
    parser.add_argument("--hardware", help=HARDWARE_HELP)
    parser.add_argument("--device", choices=_KINDS, help="the device that all ranks share; npu may be a simulated one")
    parser.add_argument("--check-races", action="store_true", help="look for buffers touched before the wait")
    parser.add_argument("--check-replicas", action="store_true", help="compare copies before steps of optimizers")
    parser.add_argument(
        "--check-identity", choices=("on", "off"), default="on", help="compare what collectives are for (on)"
    )
    torchrun = parser.add_argument_group("torchrun's options that mean nothing here")
    torchrun.add_argument("--standalone", action="store_true")
    torchrun.add_argument("--nnodes", default="1", help="1: there is one machine")
    for name in _IGNORED:
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        torchrun.add_argument(*spellings, metavar="X", help="ignored")
    asked = vars(parser.parse_args(arguments))
    for name in ("standalone", *(name.replace("-", "_") for name in _IGNORED)):
        del asked[name]
    return asked


def new_parser(command: str, about: str, example: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every command that runs a script: which one, and on how many ranks."""
    epilog = f"example: {command} {example}"
    parser = argparse.ArgumentParser(prog=command, description=about, epilog=epilog, allow_abbrev=False)
    parser.add_argument("--nproc", "--nproc-per-node", "--nproc_per_node", type=int, required=True, help="ranks")
    parser.add_argument("--seed", type=int, default=0, help="fixes the interleaving of the ranks (0)")
    parser.add_argument("--map-device", choices=_KINDS, help="put on the CPU what the script puts on this device")
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="a variable for every rank")
    parser.add_argument("--own", default="", metavar="NAMES", help="packages of which each rank gets a copy: a,b")
    parser.add_argument("--show", default="0", metavar="RANKS", help="whose standard output: 0 (default), 0,3 or all")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script", help="a Python file that torchrun could start; with -m, a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser
