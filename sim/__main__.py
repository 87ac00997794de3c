"""`python -m sim run --nproc 8 script.py`."""

from __future__ import annotations

import sys

from sim.script.launch import main

USAGE = """usage: python -m sim run --nproc N [options] script.py [arguments]
       python -m sim run --nproc N [options] -m package.module [arguments]

Runs an unmodified torchrun script on N simulated ranks. python -m sim run --help lists the options.
"""


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        return main(arguments[1:])
    wants_help = arguments[:1] in (["-h"], ["--help"])
    print(USAGE, end="", file=sys.stdout if wants_help else sys.stderr)
    return 0 if wants_help else 2


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
