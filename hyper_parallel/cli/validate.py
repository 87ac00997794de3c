"""The command `validate`: predictions compared with published measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli.kit import check_can_write, mistakes_as_messages, stderr_console, stdout_console
from hyper_parallel.core.common.errors import explain

__all__ = ["validate"]


def validate(
    file: Annotated[
        Path | None, typer.Argument(help="Rows: a JSON list, or JSON lines; default: those of the package.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="PAGE", help="Write the page here, and the outcomes beside it.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where traces are kept; default: in ~/.cache/hyper-parallel.")
    ] = None,
    processes: Annotated[int, typer.Option(help="That work at the same time.", min=1)] = 2,
) -> None:
    """Compare predictions with published measurements, row by row.

    hyper-parallel validate --write docs/validation.md
    """
    with mistakes_as_messages():
        from sim.mesh.evidence.validate import CACHE, Outcome
        from sim.mesh.evidence.validate import validate as validate_rows

        def say(done: int, count: int, outcome: Outcome) -> None:
            stderr_console().print(f"{done}/{count} {outcome.line()}", markup=False)

        check_can_write(write)
        if file is not None and not file.is_file():
            raise ValueError(explain("cannot validate", f"there is no file {str(file)!r}", f"file: {file}", "its path"))
        text = validate_rows(file, write=write, cache=cache or CACHE, processes=processes, progress=say)
        stdout_console().file.write(text.split("\n## The worst rows")[0] + "\n")
