"""``python -m benchmarks [--write]``: measure, print the tables and, with ``--write``, put them into the docs."""

from __future__ import annotations

import argparse
import os
import platform
import re
from pathlib import Path

import torch

from benchmarks.engine import on_gloo, on_sim, table

DOCS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/benchmarks.md")
    options = parser.parse_args()
    results = []
    for ranks, sequences, length in ((8, 1, 32), (8, 2, 64), (8, 4, 128)):
        results.append(on_sim(ranks, sequences, length))
        print(table(results[-1:]), flush=True)
    for ranks, sequences, length in ((2, 2, 64), (2, 4, 128)):
        results.append(on_gloo(ranks, sequences, length))
        print(table(results[-1:]), flush=True)
    text = f"{_conditions()}\n\n{table(results)}"
    print("\n" + text)
    if options.write:
        page = DOCS.read_text()
        marked = r"(<!-- engine: begin -->\n).*?(\n<!-- engine: end -->)"
        DOCS.write_text(re.sub(marked, lambda m: m[1] + text + m[2], page, flags=re.DOTALL))
        print(f"wrote {DOCS}")


def _conditions() -> str:
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores "
        f"({platform.machine()}), one intra-op thread, fp32, fused AdamW."
    )


if __name__ == "__main__":
    main()
