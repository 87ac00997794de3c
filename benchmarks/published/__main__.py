"""Command that writes the validation page: `python -m benchmarks.published --write docs/generated/validation.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.published import page
from benchmarks.published.compare import CACHE, Outcome
from hyper_parallel.cli.kit import check_can_write, mistakes_as_messages, stderr_console, stdout_console
from hyper_parallel.core.common.errors import explain

app = typer.Typer(add_completion=False)


@app.command()
def validate(
    file: Annotated[
        Path | None, typer.Argument(help="Rows: a JSON list, or JSON lines; default: those that come with this folder.")
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

    python -m benchmarks.published --write docs/generated/validation.md
    """
    with mistakes_as_messages():

        def say(done: int, count: int, outcome: Outcome) -> None:
            stderr_console().print(f"{done}/{count} {outcome.line()}", markup=False)

        check_can_write(write)
        if file is not None and not file.is_file():
            raise ValueError(explain("cannot validate", f"there is no file {str(file)!r}", f"file: {file}", "its path"))
        text = page.validate(file, write=write, cache=cache or CACHE, processes=processes, progress=say)
        stdout_console().file.write(text.split("\n## The worst rows")[0] + "\n")


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.published")
