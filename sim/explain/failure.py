"""The report of a script's failure on a rank: its traceback through the script, and how to replay."""

from __future__ import annotations

import os
import re
import sys
import traceback

from sim.explain.errors import RankFailed, SimError, exit_status
from sim.explain.lines import raised_at

FAILURE, INTERRUPTED = 1, 130
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ASKED_FOR_CUDA = re.compile(
    r"not compiled with CUDA|Cannot access accelerator device|"
    r"Found no NVIDIA driver|No CUDA GPUs|CUDA device but torch.cuda.is_available|"
    r"_CudaDeviceProperties|torch\._C\._cuda|attribute '_cuda_|dummy base class|without ATen_cuda"
)
_ASKED_FOR_NPU = re.compile(
    r"device string: npu|module 'torch' has no attribute 'npu'|No module named 'torch_npu'|needs an npu, which"
)


def report_failure(error: BaseException, nproc: int, map_device: str | None, replay: str, where: str = "") -> int:
    """Say on the error output what ended the ranks; return the exit code.

    Args:
        error: what has come out of the world.
        nproc: ranks of it.
        map_device: what is mapped to the CPU.
        replay: the command that does the same again.
        where: more lines on where the script has failed, and what to try.
    """
    if isinstance(error, KeyboardInterrupt):
        print(f"interrupted; the {nproc} ranks have ended", file=sys.stderr)
        return INTERRUPTED
    if not isinstance(error, SimError):
        raise error  # not a rank's: ours
    cause = error.__cause__ if isinstance(error, RankFailed) and error.__cause__ is not None else error
    if isinstance(cause, SystemExit):
        return _report_exit(cause, error)
    text = traceback_of(cause)
    if cause is not error:
        text += f"\n{error}\n"
    elif "\n  replay: " not in str(error):
        text += f"  replay: {replay}\n"
    print(text + (device_hint(cause, map_device, "--map-device {}", "a script") or where), end="", file=sys.stderr)
    return FAILURE


def _report_exit(end: SystemExit, error: SimError) -> int:
    """A rank has called `sys.exit(code)`: the code is the program's; a text is printed and means 1, as ever."""
    if not isinstance(end.code, int):
        print(end.code, file=sys.stderr)
    print(error, file=sys.stderr)
    return exit_status(end)


def traceback_of(error: BaseException) -> str:
    """The traceback without the simulator's own lines; without any line if no other is left."""
    whole = traceback.TracebackException.from_exception(error)
    _leave_out_our_lines(whole)
    if not whole.stack and isinstance(error, SimError) and whole.__cause__ is None:
        return f"{type(error).__name__}: {error}\n"
    return "".join(whole.format())


def _leave_out_our_lines(part: traceback.TracebackException | None) -> None:
    while part is not None:
        part.stack[:] = [frame for frame in part.stack if not frame.filename.startswith((_OURS, "<frozen importlib"))]
        for member in getattr(part, "exceptions", None) or ():
            _leave_out_our_lines(member)
        _leave_out_our_lines(part.__cause__)
        part = part.__context__


def exit_hint(end: SystemExit) -> str:
    """What to say of a rank that has called `sys.exit` with a status, or a text."""
    line = raised_at(end)
    return (
        f"  seen: a status other than 0{f', at {line}' if line else ''}; a rank that exits with one has failed\n"
        "  try: sys.exit() where the rank is done, and to raise an error where it is not\n"
    )


def device_hint(error: object, map_device: str | None, option: str, who: str) -> str:
    """What to say when `error` (or its text) is torch's way to say that there is no such device; else nothing.

    >>> print(device_hint("Torch not compiled with CUDA enabled", None, "map_device='{}'", "a rank"), end="")
      seen: a device of type cuda was asked for, and simulated ranks have none of their own
      try: map_device='cuda', which puts on the CPU what a rank puts on cuda

    Args:
        error: It, or its text.
        map_device: What is mapped already.
        option: How to ask for that, with a place for the kind of device.
        who: Puts things on devices.
    """
    try:
        text = str(error)
    except Exception:  # a class of the user's
        return ""
    for kind, pattern in (("cuda", _ASKED_FOR_CUDA), ("npu", _ASKED_FOR_NPU)):
        if pattern.search(text):
            if map_device == kind:
                return f"  {option.format(kind)}: this is not among what it maps; docs/sim.md has the list\n"
            return (
                f"  seen: a device of type {kind} was asked for, and simulated ranks have none of their own\n"
                f"  try: {option.format(kind)}, which puts on the CPU what {who} puts on {kind}\n"
            )
    return ""
