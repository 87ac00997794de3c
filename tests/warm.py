"""Processes that begin with torch loaded, for tests of whole commands.

Half of what a short command costs is the import of torch: two seconds of CPU time. `WarmPopen` is a `subprocess.Popen`
of Python whose process is forked from one that has imported what commands import. All else is as for any other process:
its arguments, environment, folder, files, signals, and how it ends.

A test of what is imported, or of how torch reads the environment when it is loaded, starts a process of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import random
import resource
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import util
from typing import Any

import numpy
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

PRELOAD = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
    "hyper_parallel.cli",
    "hyper_parallel.trainer.trainer",
    "sim.world",
)
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_START = "import sys; sys.path.insert(0, sys.argv[1]); import warm; warm.serve(int(sys.argv[2]))"


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A `subprocess.Popen` of `[sys.executable, ...]` that is forked from a process which has loaded torch.

    Takes what the tests need: `-m module`, `-c code` or a script, `cwd`, `env`, pipes or files, `text`,
    `start_new_session`; and `file_size_limit`, in bytes. The ranks of torchrun are forked as well.

    On systems other than Linux, where an orphan cannot be adopted, it starts a process as any other.
    """

    def __init__(self, args: Sequence[str], file_size_limit: int | None = None, **options: Any) -> None:
        assert args[0] == sys.executable, args
        self._file_size_limit = file_size_limit
        self._session = options.get("start_new_session", False)
        super().__init__(args, **options)

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any
    ) -> None:
        """As `subprocess.Popen` has it on POSIX; `more` begins with three that are not for it, and six descriptors."""
        if not sys.platform.startswith("linux"):
            preexec_fn = functools.partial(_limit, self._file_size_limit)
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)  # type: ignore[misc]
            return
        assert preexec_fn is None, "a function cannot be sent to another process"
        pipes = more[3:9]
        request = {
            "args": [os.fspath(each) for each in args[1:]],
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "session": self._session,
            "interruptible": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
            "file_size_limit": self._file_size_limit,
            "numbers": [0, 1, 2, *pass_fds],
        }
        theirs = (pipes[0], pipes[3], pipes[5])
        self.pid = _ask(request, [own if own != -1 else standard for standard, own in enumerate(theirs)] + [*pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _limit(file_size: int | None) -> None:
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))


def run(args: Sequence[str], timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run(args, capture_output=True, text=True, check=False)`, warm."""
    with WarmPopen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def _ask(request: dict[str, Any], files: list[int]) -> int:
    """Have a process started; return its pid, which is a child of this process."""
    if not _servers:
        _servers.append(_start_server())
        atexit.register(_servers[0].close)
    (server,) = _servers
    data = json.dumps(request).encode()
    socket.send_fds(server, [len(data).to_bytes(4, "little")], files)
    server.sendall(data)
    pid = server.recv(16)
    assert pid, "the process that others are forked from has ended"
    return int(pid)


_servers: list[socket.socket] = []
"""To what processes are forked from, which ends when this is closed; empty until it is needed."""


def _start_server() -> socket.socket:
    """Start what processes are forked from, one for each process of the suite."""
    _adopt_orphans()
    ours, theirs = socket.socketpair()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    with theirs:
        subprocess.Popen(
            [sys.executable, "-c", _START, os.path.dirname(__file__), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at a terminal is for the suite
        )
    return ours


def _adopt_orphans() -> None:
    """Let what a descendant leaves behind be a child of this process, so that it can be waited for as any other."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_ADOPT, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())


# -- in the process that others are forked from ------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Import, and fork a process for each request; return in such a process alone, after its command has ended."""
    path = sys.path[2:]  # without this folder and the one that it was started in
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported lives until the end: a collection that walks over it copies all of its memory
    _answer(socket.socket(fileno=descriptor), path)


def _answer(server: socket.socket, path: list[str]) -> None:
    while True:
        head, files, _, _ = socket.recv_fds(server, 4, 16)
        if not head:
            os._exit(0)
        size, data = int.from_bytes(head, "little"), b""
        while len(data) < size:
            data += server.recv(size - len(data))
        told, tell = os.pipe()
        middle = os.fork()
        if not middle:
            child = os.fork()
            if not child:
                for each in (told, tell):
                    os.close(each)
                server.close()
                return _run(json.loads(data), files, path)
            os.write(tell, str(child).encode())
            os._exit(0)
        os.waitpid(middle, 0)  # its child now is one of the process that asked
        for each in (*files, tell):
            os.close(each)
        server.sendall(os.read(told, 16))
        os.close(told)


def _run(request: dict[str, Any], files: list[int], path: list[str]) -> None:
    """Run a command, in a process of its own."""
    arguments = request["args"]
    unbuffered = arguments[0] == "-u"
    kind, what, *rest = [*arguments[unbuffered:], ""]
    _begin(request, files, unbuffered)
    asked = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [*asked, *(each for each in path if each not in asked)]
    if kind in ("-m", "-c"):
        sys.argv = [kind, *rest[:-1]]
        sys.path.insert(0, os.getcwd() if kind == "-m" else "")
    else:
        sys.argv = [kind, *arguments[unbuffered + 1 :]]
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
    if kind == "-m":
        if what in ("torch.distributed.run", "pytest") and _is_child_of_this(path):
            return
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(kind, run_name="__main__")


def _is_child_of_this(path: list[str]) -> bool:
    """Let torchrun fork its ranks from what this process is now, and pytest the server of its gloo bodies.

    Returns:
        True in such a child, once its command has ended; false in this process.
    """
    _adopt_orphans()
    ours, theirs = socket.socketpair()
    if not os.fork():
        os.setsid()  # signals to the group of this process are not for it
        ours.close()
        _answer(theirs, path)
        return True
    theirs.close()
    _servers.append(ours)
    subprocess_handler.Popen = WarmPopen
    util.spawnv_passfds = _spawn
    return False


def _spawn(executable: Any, args: list[str], descriptors: list[int]) -> int:
    """As `multiprocessing.util.spawnv_passfds`, warm; options of the interpreter are left out."""
    return _Spawned([sys.executable, *args[args.index("-c") :]], pass_fds=descriptors).pid


class _Spawned(WarmPopen):
    def __del__(self) -> None:
        """Say nothing: multiprocessing waits for it."""


def _begin(request: dict[str, Any], files: list[int], unbuffered: bool) -> None:
    """Make this process what a new one is when it begins."""
    numbers = request["numbers"]
    above = [fcntl.fcntl(each, fcntl.F_DUPFD, max(numbers) + 1) for each in files]  # where they are in nobody's way
    for each in files:
        os.close(each)
    for each, number in zip(above, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _limit(request["file_size_limit"])
    signal.signal(signal.SIGINT, signal.default_int_handler if request["interruptible"] else signal.SIG_IGN)
    unbuffered = unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(io.FileIO(number, "wb", closefd=False))
        stream = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=name == "stderr",
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    random.seed()
    numpy.random.seed()
