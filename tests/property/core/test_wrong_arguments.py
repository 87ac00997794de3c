"""Wrong arguments to every public name: an error before any communication, the same on all ranks; a right call works.

A wrong value of the right kind is refused in four parts. A wrong kind may end in an error of Python or torch that shows
the argument, and is never taken.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from arguments_kit import LEFT_OUT, RIGHT, TAKEN_ANYWAY, Here, arguments, public
from torch import nn

import hyper_parallel
import sim
from hyper_parallel.platform import registry

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore")]
PUBLIC = dict(public())
OURS = str(Path(hyper_parallel.__file__).parent)


class Odd:
    """Nothing that anybody asks for."""

    def __repr__(self) -> str:
        return "Odd()"


class Takes(nn.Module):
    """A module that takes anything and does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args: Any) -> None: ...


def function(*args: Any) -> None:
    """Take anything, do nothing."""


GIVEN: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "7": lambda: 7,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "'wrong'": lambda: "wrong",
    "[]": list,
    "[None]": lambda: [None],
    "('wrong',)": lambda: ("wrong",),
    "{}": dict,
    "{'wrong': 1}": lambda: {"wrong": 1},
    "{1: None}": lambda: {1: None},
    "Odd()": Odd,
    "a tensor": lambda: torch.ones(3),
    "a module": Takes,
    "a function": lambda: function,
}
"""What each parameter is given, in turn."""

_SEQUENCES = ("Sequence", "Iterable", "Container", "LayoutLike")
_CALLED = ("Callable", "PlacementFn", "LossFn", "OnStep", "PlatformFactory", "PlatformProvider", "Split")
FITS: dict[type, tuple[str, ...]] = {
    type(None): ("None",),
    bool: ("bool", "int", "float"),  # to Python a bool is an int
    int: ("int", "float"),
    float: ("float",),
    str: ("str", "Folder", "Path", "MeshLike", "Literal"),
    list: ("list", *_SEQUENCES),
    tuple: ("tuple", *_SEQUENCES),
    dict: ("dict", "Mapping", "Tensors", "MeshLike", "list", *_SEQUENCES),  # to Python its names are a sequence
    torch.Tensor: ("Tensor", "Container"),
    Takes: ("Module", "M", "T", *_CALLED),
    type(function): _CALLED,
}
"""The words of annotations that a value of a type may go with; whether it does is for the function to say."""


def may_be_right(value: Any, annotation: Any) -> bool:
    """Tell whether an annotation allows a value, by the outermost of its words."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    depth, outer = 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        outer += letter if depth == 0 and letter != "]" else ""
    words = {word.strip().split(".")[-1] for word in outer.split("|")}
    return bool(words & {"Any", *FITS.get(type(value), ())})


class Outcome(NamedTuple):
    """How a call ended: "taken", "refused", or what is wrong with its error; and that error."""

    end: str
    kind: str = ""
    text: str = ""


def ours(error: Exception) -> bool:
    """Tell whether a `raise` of the library, and nothing that it calls, has raised an error."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    last = next(each for each in dis.get_instructions(code) if each.offset == trace.tb_lasti)
    return code.co_filename.startswith(OURS) and last.opname in ("RAISE_VARARGS", "RERAISE")


def clear(error: Exception, parameter: str, value: Any) -> bool:
    """Tell whether an error shows an argument: the text its name, value or type, or the last of our lines its name."""
    within = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    shown = {parameter, *(type(each).__name__ for each in (value, *within)), *map(repr, (value, *within))}
    lines = [each.line or "" for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(OURS)]
    named = any(re.search(rf"\b{parameter}\b", line) for line in lines[-1:])
    return named or any(word.lower() in str(error).lower() for word in shown)


def alike(outcome: Outcome) -> Outcome:
    """Leave out of a message what may differ between ranks: their numbers, and random ones."""
    return outcome._replace(text=re.sub(r"[-\d.e\s]+", "#", outcome.text))


def attempt(
    call: Callable[[], Any], right_kind: bool, parameter: str = "", value: Any = None, sent: Callable[[], int] = int
) -> Outcome:
    """Call, and judge the error: a wrong value must have our own, a wrong kind any that shows the argument."""
    before, is_container = sent(), isinstance(value, (list, tuple, dict)) and len(value) > 0  # with wrong kinds in it
    is_value = right_kind and value is not True and not is_container
    try:
        call()
    except Exception as error:
        if type(error).__module__.startswith("sim"):
            raise
        if ours(error):  # where ranks tell each other their errors, after communication
            end = "refused"
        elif sent() != before:
            end = "after communication"
        else:
            end = "raw" if is_value else "refused" if clear(error, parameter, value) else "unclear"
        return Outcome(end, type(error).__name__, str(error))
    return Outcome("taken")


def calls(name: str, folder: Path, count: Callable[[int], int]) -> dict[tuple[str, str], Outcome]:
    """Call a name with each wrong value of each parameter, on a rank; a right call must work after those."""
    here, found = Here(dist.get_rank(), folder), {}
    target, sent = PUBLIC[name], functools.partial(count, here.rank)

    def ready() -> tuple[Callable[..., Any], dict[str, Any]]:
        made = RIGHT[name](here)
        on, keywords = made if isinstance(made, tuple) else (None, made)
        return (target if on is None else getattr(on, name.split(".")[1])), keywords

    def call(function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
        several = [each for each, p in arguments(target).items() if p.kind is p.VAR_POSITIONAL]
        return function(*(keywords[each] for each in several)) if several else function(**keywords)

    call(*ready())
    for parameter, at in arguments(target).items():
        use, keywords = ready()
        for label, make in GIVEN.items():
            wrong = {**keywords, parameter: make()}
            right_kind = may_be_right(wrong[parameter], at.annotation)
            attempted = functools.partial(call, use, wrong)
            found[parameter, label] = outcome = attempt(attempted, right_kind, parameter, wrong[parameter], sent)
            if outcome.end == "taken" and not right_kind and (name, parameter) not in TAKEN_ANYWAY:
                found[parameter, label] = Outcome("taken, although of another kind")
            if outcome.end == "taken":
                use, keywords = ready()  # such a call may have changed something
        call(use, keywords)
    return found


def test_every_public_name_is_called_or_left_out_with_a_reason() -> None:
    assert [name for name in PUBLIC if (name in RIGHT) == (name in LEFT_OUT)] == []
    assert [name for name in {**RIGHT, **LEFT_OUT} if name not in PUBLIC] == []
    assert [key for key in TAKEN_ANYWAY if key[1] not in inspect.signature(PUBLIC[key[0]]).parameters] == []


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_wrong_is_refused_on_all_ranks_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "huggingface_plan" in name or "parallelize_huggingface" in name:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for table in ("_providers", "_factories"):  # of the process: what is registered here is forgotten
        known = getattr(registry._REGISTRY, table)
        monkeypatch.setattr(registry._REGISTRY, table, known.copy() if isinstance(known, dict) else known)
    with sim.world(2) as world:
        one, other = world.run(calls, args=(name, tmp_path, world.trace.count))
    if name != "register_platform":  # what one rank has registered, no other one of the process can
        assert {key: alike(outcome) for key, outcome in one.items()} == {key: alike(other[key]) for key in other}
    assert {key: outcome for key, outcome in one.items() if outcome.end not in ("taken", "refused")} == {}


# -- the checker fails where it must -----------------------------------------------------------------------------------


def test_what_is_raised_in_depth_is_not_taken_for_ours() -> None:
    from hyper_parallel import Layout

    assert attempt(lambda: Layout("x", 5), right_kind=False).end == "refused"
    assert attempt(lambda: Layout.to_dict(5), right_kind=True, value=5).end == "raw"
    assert attempt(lambda: int("x"), right_kind=True, value="x").end == "raw"


def test_errors_of_wrong_kinds_show_the_argument_before_any_communication() -> None:
    sent: list[int] = []

    def after() -> None:
        sent.append(1)
        int([])  # type: ignore[call-overload]

    assert attempt(lambda: int([]), right_kind=False, value=[]).end == "refused"  # type: ignore[call-overload]
    assert attempt(lambda: {}["key"], right_kind=False, parameter="size", value=5).end == "unclear"
    assert attempt(after, right_kind=False, value=[], sent=lambda: len(sent)).end == "after communication"


@pytest.mark.parametrize(
    ("value", "annotation", "right"),
    [
        (None, "int | None", True),
        (None, "int", False),
        ("x", "Sequence[str] | None", False),
        (["x"], "collections.abc.Sequence[str]", True),
        (1, int, True),
        (1.5, int, False),
        (1, "dict[str, int]", False),
        (torch.ones(1), "Mapping[str, torch.Tensor]", False),
        (torch.ones(1), "nn.Module | torch.Tensor", True),
        (Odd(), "Any", True),
        ({}, "Sequence[str]", True),
    ],
)
def test_annotations_are_read_by_their_outermost_words(value: Any, annotation: Any, right: bool) -> None:
    assert may_be_right(value, annotation) == right
