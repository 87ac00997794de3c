"""What the clients' last runs have shown, in docs/generated/clients.jsonl, and the page that is written from it.

`python tests/clients/results.py` writes docs/clients.md; `make clients` does so after a run.
"""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

from run import Outcome, python
from table import CLIENTS, SOURCES, Client

__all__ = ["note", "page"]

DOCS = Path(__file__).parents[2] / "docs"
RESULTS, PAGE = DOCS / "generated" / "clients.jsonl", DOCS / "clients.md"

INTRODUCTION = """# Clients

Programs and libraries that were not written here, run on [simulated ranks](sim.md) and as processes under torchrun with
gloo. After each step of the optimizer, the parameters and gradients of every rank are compared, and so are the losses
that are printed and the files that are saved. *bit for bit* means that every bit of them was equal; a number is the
largest relative difference, which comes from the order in which more than two ranks add up. Where the last column says
so, one process without an engine for parallelism prints the same losses.

`make clients` runs them in an environment of its own (tests/clients/requirements.txt) and writes this page; `make deep`
does so, too. It takes the repositories from `out/clients/sources` or the folder that `CLIENTS_SOURCES` names, or else
clones them. What is missing is skipped with the reason. `.venv/bin/python -m pytest tests/clients -k nanoGPT` runs one.

*records* counts what was compared of each rank, usually one for each step. *seconds each* may be those of a machine
that was busy with other work.

What asks for a GPU runs on the CPU in its place (`--map-device cuda`). Ranks of torchrun begin with the random state of
simulated ones: torch begins with the same on each rank, `sim` with another, so that a forgotten seed shows.

| client | version | what changes | ranks | records | simulated and gloo | seconds each | checked | also |
|---|---|---|---|---|---|---|---|---|
"""


def note(client: Client, outcome: Outcome) -> None:
    """Write down what a client has shown, in the place of what it showed before."""
    rows = _rows()
    rows[client.name] = {
        "client": client.name,
        "version": _version(client),
        "ranks": max(nproc for nproc, _ in client.runs),
        "steps": outcome.steps,
        "difference": outcome.difference,
        "bits": outcome.bits,
        "also": list(outcome.also),
        "seconds": [round(each, 1) for each in outcome.seconds],
        "checked": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
    }
    known = [rows[each.name] for each in CLIENTS if each.name in rows]
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in known))


def _rows() -> dict[str, dict[str, Any]]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["client"]: row for row in map(json.loads, lines)}


def _version(client: Client) -> str:
    if client.of in SOURCES:
        source = SOURCES[client.of]
        return f"{client.of} {source.version} ({source.commit[:8]})"
    asked = f"from importlib.metadata import version; print(version({client.of!r}))"
    done = subprocess.run([python(), "-c", asked], capture_output=True, text=True, check=True)
    return f"{client.of} {done.stdout.strip().partition('+')[0]}"


def page() -> str:
    """Return the page about the clients of the table: those that have run."""
    rows, lines = _rows(), []
    for client in CLIENTS:
        if client.name in rows:
            row = rows[client.name]
            agrees = "bit for bit" if row["bits"] else f"{row['difference']:.0e}"
            cells = (
                *(client.name, row["version"], client.changes, row["ranks"], row["steps"], agrees),
                *(
                    " ".join(f"{each:.0f}" for each in row["seconds"]),
                    row["checked"],
                    "; ".join([*row["also"], *filter(None, [client.note])]),
                ),
            )
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |\n")
    missing = [client.name for client in CLIENTS if client.name not in rows]
    without = f"\nWithout a result (not run yet, or they did not agree): {', '.join(missing)}.\n" if missing else ""
    return INTRODUCTION + "".join(lines) + without


if __name__ == "__main__":
    PAGE.write_text(page())
