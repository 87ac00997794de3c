"""`python -m sim run`, `verify` and `estimate`: unmodified torchrun scripts on simulated ranks."""

from __future__ import annotations

import sys

from hyper_parallel.cli.kit import output_written
from sim.script.launch import main

USAGE = """usage: python -m sim run --nproc N [options] script.py [arguments]
       python -m sim run --nproc N [options] -m package.module [arguments]
       python -m sim verify --nproc N [--reference FILE] [options] script.py [arguments]
       python -m sim estimate --nproc N --hardware NAME [options] script.py [arguments]

Runs an unmodified torchrun script on N simulated ranks, compares what it computes there with its one-device form, or
estimates the memory and time of its steps on N devices. Each of the three lists its options with --help.
"""


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        return main(arguments[1:])
    if arguments[:1] == ["verify"]:
        from sim.script.verify import main as verify  # neither are the proofs

        return verify(arguments[1:])
    if arguments[:1] == ["estimate"]:
        from sim.script.estimate import main as estimate  # the estimates are large, and not needed to run a script

        return estimate(arguments[1:])
    wants_help = arguments[:1] in (["-h"], ["--help"])
    print(USAGE, end="", file=sys.stdout if wants_help else sys.stderr)
    return 0 if wants_help else 2


if __name__ == "__main__":
    with output_written():
        sys.exit(_main(sys.argv[1:]))
