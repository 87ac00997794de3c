"""Canvas of a picture of a timeline; without matplotlib an error that names the Perfetto file instead."""

from __future__ import annotations

import os

from hyper_parallel.core.common.drawing import Figure, blank_figure
from hyper_parallel.core.common.errors import explain
from sim.explain.errors import SimError

__all__ = ["blank"]


def blank(asked: str, path: str | os.PathLike[str], width: float, height: float, instead: str) -> Figure:
    """Return an empty figure for a file.

    Args:
        asked: the start of an error message, "cannot draw the step".
        path: of the picture; its ending is its format, such as .png.
        width: inches.
        height: inches.
        instead: what can be done without matplotlib.

    Raises:
        SimError: matplotlib is not installed.
        ValueError: an ending that is no format of a picture.
    """
    figure = blank_figure(path, width, height)
    if figure is None:
        seen = "missing: the extra 'plot' of hyper_parallel"
        hint = f"pip install 'hyper_parallel[plot]', or {instead} for https://ui.perfetto.dev"
        raise SimError(explain(asked, "matplotlib is not installed", seen, hint))
    return figure
