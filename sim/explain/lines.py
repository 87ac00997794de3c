"""Lines of the user's code: in a stack, and in the traceback of an exception."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from sim.explain.issuers import Ask, Methods, issuers_in


def _library_folders() -> tuple[str, ...]:
    here = Path(__file__).resolve().parents[1]
    return tuple(str(folder) + os.sep for folder in (here, here.parent / "hyper_parallel", Path(torch.__file__).parent))


_LIBRARIES = _library_folders()
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
# What IPython calls the code of a cell. In a notebook it is a hash of the text; only IPython knows the number of that.
_TERMINAL_CELL = re.compile(r"<ipython-input-(\d+)-.*>")
_NOTEBOOK_CELL = re.compile(r".*[/\\]ipykernel_\d+[/\\][^/\\]+\.py")
# By file name: None for the user's code; else what issues collectives there. A cache of a pure function.
_libraries: dict[str, Methods | None] = {}


def belongs_to_a_library(file: str) -> bool:
    """Tell whether a source file is torch's, the standard library's or ours, and not the user's."""
    if file.startswith((*_LIBRARIES, "<frozen")) or os.path.basename(file) == "typing_extensions.py":
        return True  # the latter is around whatever torch has deprecated
    return file.startswith(_STDLIB) and "site-packages" not in file


def place(file: str, line: int) -> str:
    """Name a line as people know it: by the base name of its file, or by its cell, as IPython does.

    >>> place("/home/me/train.py", 3), place("<ipython-input-7-0123456789ab>", 2)
    ('train.py:3', 'Cell In[7], line 2')

    Args:
        file: of the code, as `co_filename` has it.
        line: its number, from 1.
    """
    if named := _named_by_ipython(file):
        return f"{' '.join(named)}, line {line}"
    if "ipython-input-" in file and (terminal := _TERMINAL_CELL.fullmatch(file)):
        return f"Cell In[{terminal[1]}], line {line}"
    if "ipykernel_" in file and _NOTEBOOK_CELL.fullmatch(file):
        return f"a notebook's cell, line {line}"
    return f"{os.path.basename(file)}:{line}"


def _named_by_ipython(file: str) -> tuple[str, str] | None:
    """Return what IPython, where it runs, calls the cell that it has compiled under this name: "Cell", "In[3]"."""
    python = sys.modules.get("IPython")
    if python is None:
        return None
    compiler = getattr(python.get_ipython(), "compile", None)
    known: Callable[[str], tuple[str, str] | None] | None = getattr(compiler, "format_code_name", None)
    return None if known is None else known(file)  # a cell that was run twice has the number of the last time


def user_line(frame: FrameType | None = None) -> str:
    """The innermost line of a stack (the caller's own) that is neither torch's, the standard library's nor ours."""
    return user_line_and_issuer(frame or sys._getframe(1))[0]


def user_line_and_issuer(frame: FrameType | None = None) -> tuple[str, tuple[Ask, FrameType] | None]:
    """As `user_line`, with the innermost frame before that line in which a collective is issued, and how to ask it."""
    frame = frame or sys._getframe(1)
    issuer: tuple[Ask, FrameType] | None = None
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        try:
            issuers = _libraries[name]
        except KeyError:
            issuers = _libraries[name] = issuers_in(name) if belongs_to_a_library(name) else None
        if issuers is None:
            return f"{place(name, frame.f_lineno)} in {code.co_name}", issuer
        if issuers and issuer is None and code.co_name in issuers:
            issuer = issuers[code.co_name], frame
        frame = frame.f_back
    return "(no line of user code)", issuer


def purpose_of_caller() -> str:
    """Say what the innermost issuer of the caller's stack is at, e.g. which turn of a pipeline; "": there is none."""
    asked = user_line_and_issuer(sys._getframe(1))[1]
    return "" if asked is None else asked[0](asked[1]).purpose


def raised_at(error: BaseException) -> str:
    """The innermost line of user code that an exception has come through; empty where it has come through none."""
    line, part = "", error.__traceback__
    while part is not None:
        code = part.tb_frame.f_code
        if not belongs_to_a_library(code.co_filename):
            line = f"{place(code.co_filename, part.tb_lineno)} in {code.co_name}"
        part = part.tb_next
    return line
