"""Lines of the user's code: in a stack, and in the traceback of an exception."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

__all__ = ["belongs_to_a_library", "raised_at", "user_line"]


def _library_folders() -> tuple[str, ...]:
    here = Path(__file__).resolve().parents[1]
    return tuple(str(folder) + os.sep for folder in (here, here.parent / "hyper_parallel", Path(torch.__file__).parent))


_LIBRARIES = _library_folders()
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_is_library: dict[str, bool] = {}  # a cache of a pure function of the file name


def belongs_to_a_library(file: str) -> bool:
    """Tell whether a source file is torch's, the standard library's or ours, and not the user's."""
    if file.startswith((*_LIBRARIES, "<frozen")) or os.path.basename(file) == "typing_extensions.py":
        return True  # the latter is around whatever torch has deprecated
    return file.startswith(_STDLIB) and "site-packages" not in file


def user_line(frame: FrameType | None = None) -> str:
    """The innermost line of a stack (the caller's own) that is neither torch's, the standard library's nor ours."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        internal = _is_library.get(name)
        if internal is None:
            internal = _is_library[name] = belongs_to_a_library(name)
        if not internal:
            return f"{os.path.basename(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "(no line of user code)"


def raised_at(error: BaseException) -> str:
    """The innermost line of user code that an exception has come through; empty where it has come through none."""
    line, part = "", error.__traceback__
    while part is not None:
        code = part.tb_frame.f_code
        if not belongs_to_a_library(code.co_filename):
            line = f"{os.path.basename(code.co_filename)}:{part.tb_lineno} in {code.co_name}"
        part = part.tb_next
    return line
