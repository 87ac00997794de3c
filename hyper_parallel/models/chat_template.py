"""Chat templates of tokenizers, each rendered in a child process with little memory and time.

A template is a program in the language of jinja2, whose sandbox keeps it from files and from Python's internals, but
lets it take all memory and time: `{{ 'x' * 10**10 }}`. No check of its text tells. So a child renders it, which the
kernel stops. The child costs 0.7 CPU seconds once, and a rendering some 50 us more than without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from typing import Any, NamedTuple

MOST_MEMORY, MOST_SECONDS = 2**30, 5
"""Bytes and CPU seconds that a rendering may take."""

_CHILD = """
import sys
if sys.path[0] == "":  # this may be the folder of the template, whose modules are not to be imported
    del sys.path[0]
import json, os, resource, signal
os.environ["USE_TORCH"] = "0"
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
given, answers = json.loads(sys.stdin.readline()), os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
if os.path.exists("/proc/self/statm"):
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + given["memory"],) * 2)
for line in sys.stdin:
    messages, flags = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, given["seconds"])
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=given["template"], tokenize=False, **{**given["tokens"], **flags}
        )
        answer = json.dumps({"text": text})
    except MemoryError:
        answer = json.dumps({"error": f"it takes more than {given['memory'] >> 20} MiB"})
    except Exception as error:
        answer = json.dumps({"error": f"{error}"[:1000] or type(error).__name__})
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(answer, file=answers, flush=True)
"""


class _Child(NamedTuple):
    """A process that renders, and the process that has started it."""

    process: subprocess.Popen[str]
    owner: int

    def tell(self, given: Any) -> None:
        """Send a line to the child."""
        assert self.process.stdin is not None, "it is a pipe"
        print(json.dumps(given), file=self.process.stdin, flush=True)

    def ask(self, question: Any) -> str:
        """Send a line, and return the child's; "" once it has ended."""
        assert self.process.stdout is not None, "it is a pipe"
        self.tell(question)
        return self.process.stdout.readline()

    def end(self) -> None:
        """End the child, unless this process is a fork of its owner."""
        if self.owner == os.getpid():
            self.process.kill()
            self.process.communicate()


class ChatTemplate:
    """A tokenizer's template, rendered in a child process that starts with the first conversation.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._lock = tokenizer, threading.Lock()
        self._child: _Child | None = None

    def render(self, messages: Any, **flags: Any) -> str:
        """Return the text of a conversation.

        Args:
            messages: of the conversation.
            flags: of transformers' `apply_chat_template`.

        Raises:
            ValueError: the template has failed, or taken more memory or time than it may.
        """
        with self._lock:
            child = self._running()
            try:
                answer = child.ask([messages, flags])
            except OSError:
                answer = ""
            if not answer:
                child.end()
                self._child = None
        if not answer:
            raise ValueError(f"it ended, most likely as it takes more than {MOST_SECONDS} s of CPU")
        found = json.loads(answer)
        if "error" in found:
            raise ValueError(found["error"])
        return str(found["text"])

    def _running(self) -> _Child:
        """Return the child, started anew where there is none, or where this process is a fork of its owner."""
        if self._child is None or self._child.owner != os.getpid():
            given = {"template": self.tokenizer.get_chat_template(), "tokens": self.tokenizer.special_tokens_map}
            command, pipe = [sys.executable, "-c", _CHILD], subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            self._child = _Child(process, os.getpid())
            weakref.finalize(self, self._child.end)
            self._child.tell({**given, "memory": MOST_MEMORY, "seconds": MOST_SECONDS})
        return self._child
