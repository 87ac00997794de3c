"""The class and the text of an error, and that all ranks have it before anything is sent."""

import re

import hyper_parallel
import sim
from hyper_parallel import HyperParallelError


def assert_says(error, expected):
    """Compare an error with the class and text expected of it.

    Args:
        error: The error, or what `error_on_ranks` has returned.
        expected: Such as "InvalidType: cannot ...". Without a class it is "InvalidValue"; "…" is any text of a line.
    """
    found = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    if not re.match(r"Invalid\w+: ", expected):
        expected = f"InvalidValue: {expected}"
    assert re.fullmatch(re.escape(expected).replace("…", ".*"), found), found


def errors_on_ranks(call, world_size, *, sends=False):
    """Return class and text of the error that each rank gets from a call; None where it gets none.

    Args:
        call: What each rank does.
        world_size: Number of ranks.
        sends: Whether something may have been sent before.
    """

    def body():
        try:
            call()
        except HyperParallelError as error:
            return f"{type(error).__name__}: {error}"
        return None

    with sim.world(world_size) as world:
        texts = world.run(body)
        assert sends or world.trace.events == []
    return texts


def error_on_ranks(call, world_size, *, sends=False):
    """Return class and text of the error that all ranks get alike from a call."""
    texts = errors_on_ranks(call, world_size, sends=sends)
    assert len(set(texts)) == 1, texts
    assert texts[0], "no rank has refused it"
    return texts[0]


def fails_on_ranks(call, kind, match, *, world_size=2, sends=False):
    """Return the text of the error that all ranks get alike from a call.

    Args:
        call: What each rank does.
        kind: The builtin that the error also is.
        match: A regular expression that its text has.
        world_size: Number of ranks.
        sends: Whether something may have been sent before.
    """
    name, _, text = error_on_ranks(call, world_size, sends=sends).partition(": ")
    assert issubclass(getattr(hyper_parallel, name), kind)
    assert re.search(match, text), text
    assert_parts(text)
    return text


def assert_parts(text):
    """Require a first line with what was asked and is to blame, others with what was seen, and a last with a hint."""
    first, *middle, last = text.splitlines()
    assert first.strip() == first
    assert last.startswith("  try: ")
    assert all(line.startswith("  ") for line in middle)
    assert middle or ": " in first or " is " in first, "short ones say what was seen in the first line"
