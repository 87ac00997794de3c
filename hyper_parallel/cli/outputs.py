"""The commands `export` and `plot`, for what a run has written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli.kit import check_can_write, mistakes_as_messages, stdout_console

__all__ = ["export", "plot"]

_WEIGHTS = ("bfloat16", "float16", "float32", "float64")


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of train, or its --checkpoint-dir: the newest.")],
    folder: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")],
    dtype: Annotated[str | None, typer.Option(help="Of the weights, such as bfloat16; default: as they are.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder of the tokenizer to add; default: that of the run.")
    ] = None,
) -> None:
    """Write a checkpoint as a folder that transformers loads with AutoModelForCausalLM.from_pretrained.

    hyper-parallel export out/run out/hf --dtype bfloat16
    """
    with mistakes_as_messages():
        from hyper_parallel.core.dtensor.text import parse_dtype
        from hyper_parallel.trainer.saving import export_checkpoint

        to = None if dtype is None else parse_dtype(dtype)
        if to is not None and str(to).removeprefix("torch.") not in _WEIGHTS:
            raise ValueError(
                f"cannot export weights in {dtype}: they are floating-point numbers that transformers loads\n"
                f"  --dtype {dtype}\n  try: --dtype bfloat16, float16, float32 or float64"
            )
        config = export_checkpoint(checkpoint, folder, to, tokenizer=tokenizer)
        stdout_console().print(f"wrote {config.num_parameters():,} parameters to {folder}")


def plot(
    logs: Annotated[list[Path], typer.Argument(help="JSONL logs of runs.")],
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("out/train.png"),
) -> None:
    """Draw loss, gradient norm and speed of one or more runs.

    hyper-parallel plot out/train.jsonl
    """
    with mistakes_as_messages():
        from hyper_parallel.trainer.report import plot_log

        check_can_write(out)
        if not plot_log(logs, out):
            raise ValueError("cannot plot: matplotlib is not installed\n  try: pip install 'hyper_parallel[plot]'")
        stdout_console().print(f"wrote {out}")
