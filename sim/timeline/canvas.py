"""Canvas of all pictures of timelines: matplotlib, which is the extra plot, asked for when something is drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from hyper_parallel.core.common.errors import explain
from sim.explain.errors import SimError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # matplotlib is not imported before something is drawn

__all__ = ["Axes", "blank", "draw_shapes", "sample", "whole_steps"]

Shape: TypeAlias = Sequence[tuple[float, float]]


def blank(asked: str, path: str | os.PathLike[str], width: float, height: float, instead: str) -> Any:
    """Return an empty figure for a file.

    Args:
        asked: what cannot be done if it cannot: "cannot draw the step".
        path: of the picture; its ending is its format, such as .png.
        width: inches.
        height: inches.
        instead: what can be done without matplotlib.

    Raises:
        SimError: matplotlib is not installed.
        ValueError: an ending that is no format of a picture.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        seen = "missing: the extra 'plot' of hyper_parallel"
        hint = f"pip install 'hyper_parallel[plot]', or {instead} for https://ui.perfetto.dev"
        raise SimError(explain(asked, "matplotlib is not installed", seen, hint)) from missing
    name, ending = os.path.splitext(os.fspath(path))
    formats = list(FigureCanvasAgg.get_supported_filetypes())
    if ending and ending[1:].lower() not in formats:
        raise ValueError(
            explain(
                f"cannot write the picture {os.fspath(path)!r}",
                f"{ending[1:]!r} is no format of a picture",
                f"path: ends in one of {', '.join('.' + known for known in formats)}",
                repr(name + ".png"),
            )
        )
    # Figure and canvas directly: pyplot keeps global state and looks for a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_shapes(axes: Axes, shapes: Sequence[Shape], **style: Any) -> None:
    """Draw polygons as one collection: 64 ranks make tens of thousands of boxes."""
    from matplotlib.collections import PolyCollection

    axes.add_collection(PolyCollection(shapes, **style))


def sample(**style: Any) -> Any:
    """Return a patch for a legend."""
    from matplotlib.patches import Patch

    return Patch(**style)


def whole_steps(axes: Axes) -> None:
    """Label whole numbers alone below."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
