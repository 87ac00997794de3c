"""Drawer of all pictures with axes: matplotlib, the extra `plot`, which is imported when something is drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from hyper_parallel.core.common.errors import InvalidValue

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any  # matplotlib is not imported before something is drawn

__all__ = ["Axes", "Figure", "blank_figure", "draw_shapes", "quiet", "sample", "whole_steps"]

Shape: TypeAlias = Sequence[tuple[float, float]]


def blank_figure(path: str | os.PathLike[str], width: float, height: float, dpi: int = 100) -> Figure | None:
    """Return an empty figure for a file, None when matplotlib is not installed.

    Args:
        path: of the picture; its ending is its format, such as .png.
        width: inches.
        height: inches.
        dpi: pixels per inch.

    Raises:
        ValueError: an ending that is no format of a picture.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    name, ending = os.path.splitext(os.fspath(path))
    formats = list(FigureCanvasAgg.get_supported_filetypes())
    if ending and ending[1:].lower() not in formats:
        asked, blame = f"cannot write the picture {os.fspath(path)!r}", f"{ending[1:]!r} is no format of a picture"
        seen = f"path: ends in one of {', '.join('.' + known for known in formats)}"
        raise InvalidValue(asked, blame, seen, repr(name + ".png"))
    # Figure and canvas directly: pyplot keeps global state and looks for a display.
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
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


def quiet(axes: Axes) -> None:
    """Draw a faint grid, and no frame above and on the right."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def whole_steps(axes: Axes) -> None:
    """Label whole numbers alone below."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
