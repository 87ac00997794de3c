"""What a notebook shows: short reprs and HTML tables of results, and lines of cells as IPython names them."""

from __future__ import annotations

import linecache
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from mesh_fakes import fake_estimate

import sim
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim.explain.lines import place
from sim.mesh.estimate import estimate
from sim.mesh.recipe import Recipe
from sim.mesh.report import estimate_line
from sim.mesh.searching.search import search
from sim.prove.report import MutantRow, Report, ReportRow, Sensitivity

pytestmark = pytest.mark.sim


class Cells(HTMLParser):
    """The text of each cell of each table."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.depth, self.inside = 0, False
        self.feed(html)
        assert self.depth == 0, "every tag is closed"

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.depth += 1
        if tag in ("td", "th"):
            self.found.append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.depth -= 1
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found[-1] += data


def is_short(text: str) -> bool:
    return len(text.splitlines()) <= 2 and len(text) <= 240


# Results ----------------------------------------------------------------------------------------------------------


def sums(count: int) -> None:
    for _ in range(count):
        dist.all_reduce(torch.ones(2))


def test_worlds_and_traces() -> None:
    world = sim.world(2, seed=3, schedule=[0, 1] * 500)
    assert repr(world).startswith("World(2 ranks, new, seed=3, schedule=[0, 1, 0, 1, 0, 1, ...]")
    with world:
        world.run(sums, args=(3,))
        assert world.run(lambda: repr(world))[0].startswith("World(2 ranks, running, ")
        assert is_short(repr(world))
        assert repr(world.trace) == "Trace(6 events of 2 ranks)"
        cells = Cells(world.trace._repr_html_()).found
        assert cells[5:] == ["world", "all_reduce", "3", "48", "24"]
        assert Cells(world._repr_html_()).found == cells
    assert repr(world).startswith("World(2 ranks, ended, ")


def test_a_trace_of_many_events_is_described_without_reading_them() -> None:
    trace = sim.Trace(2, keep_events=1)
    for seq in range(5):
        trace.add(sim.Event(0, "all_reduce", "dp", (0, 1), seq, 8, 8, "float32", "train.py:3 in step"))
    trace._by_rank = [None, None]  # type: ignore[list-item]
    trace.count = lambda rank: [5, 0][rank]  # type: ignore[method-assign]
    assert repr(trace) == "Trace(5 events of 2 ranks)"


def a_report(verdict: str, count: int = 1) -> Report:
    rows = tuple(
        ReportRow(f"layers.{at}", "output", "forward", verdict=verdict, sentence="<odd>") for at in range(count)
    )
    return Report(rows, "dp=2")


def test_reports() -> None:
    good = a_report("exact", 100)
    assert repr(good) == ("Report(the model on dp=2 computes what it computes on one device: 100 exact of 100 tensors)")
    cells = Cells(good._repr_html_()).found
    assert "layers.0.output" in cells
    assert "..." in cells
    assert "layers.99.output" in cells
    assert len(cells) < 8 * 22
    bad = a_report("bug", 30)
    assert repr(bad).startswith("Report(the model on dp=2 does not compute what")
    assert "&lt;odd&gt;" in bad._repr_html_()
    assert "... and 10 more" in bad._repr_html_()
    assert "color: " in bad._repr_html_()
    assert "color: " not in good._repr_html_()


def test_the_sensitivity_of_a_proof() -> None:
    rows = (MutantRow("twice", "all_reduce over tp", "found", "wrong sum"), MutantRow("one rank", "w", "missed"))
    assert repr(Sensitivity(rows, 7)) == "Sensitivity(2 of 7 faults put in, 1 missed)"
    assert Cells(Sensitivity(rows, 7)._repr_html_()).found[4:] == [
        *("twice", "all_reduce over tp", "found", "wrong sum"),
        *("one rank", "w", "missed", ""),
    ]


@pytest.mark.tier("full")
def test_estimates() -> None:
    found = estimate("llama-tiny", ParallelDims(dp_shard=4, world_size=4), 2, 64, "h100-sxm")
    assert re.fullmatch(
        r"Estimate\(llama-tiny on 4 x h100-sxm, dp_shard=4: [\d.]+ ms a step \([\d.]+ to [\d.]+ ms\), "
        r"[\d.]+ MiB reserved, fits\)",
        repr(found),
    )
    assert repr(found.memory) == f"MemoryEstimate({repr(found).partition('ms), ')[2]}"
    cells = Cells(found._repr_html_()).found
    assert {"rank", "reserved", "time", "80 % interval", "compute", "step"} <= {*cells}
    assert "Time of a step" in str(found)
    assert is_short(repr(found))


def test_an_estimate_that_does_not_fit_says_so() -> None:
    huge = fake_estimate("llama3-8b", ParallelDims(world_size=1), 1, 8192, "h100-sxm", Recipe(), 9.0)
    assert estimate_line(huge).endswith("reserved, DOES NOT FIT")


def test_searches() -> None:
    result = search("llama-tiny", "h100-sxm", 2, 2, seq_len=64, limit=3, estimator=fake_estimate)
    assert repr(result).startswith(f"SearchResult({result.title}: {len(result.found)} fit, best: ")
    assert is_short(repr(result))
    assert "tokens/s/device" in Cells(result._repr_html_()).found


# Lines of cells ---------------------------------------------------------------------------------------------------

CELL = """\
def step():
    loss = torch.ones(1)
    if dist.get_rank() == 1:
        dist.barrier()
    else:
        dist.all_reduce(loss)
"""
NOTEBOOK, TERMINAL = "/tmp/ipykernel_123/4035623.py", "<ipython-input-3-0123456789ab>"


def run_cell(monkeypatch: pytest.MonkeyPatch, name: str, source: str = CELL) -> dict[str, object]:
    """Compile and run a cell under the name that IPython gives it, with the entry that it makes in linecache."""
    lines = source.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, name, (len(source), None, lines, name))
    namespace: dict[str, object] = {"torch": torch, "dist": dist}
    exec(compile(source, name, "exec"), namespace)
    return namespace


def start_ipython(monkeypatch: pytest.MonkeyPatch, cells: dict[str, int], kernel: bool = True) -> None:
    """Put a module in the place of IPython that knows the numbers of these cells."""

    def format_code_name(name: str) -> tuple[str, str] | None:
        return ("Cell", f"In[{cells[name]}]") if name in cells else None

    shell = SimpleNamespace(
        compile=SimpleNamespace(format_code_name=format_code_name), **({"kernel": 0} if kernel else {})
    )
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.mark.parametrize(("name", "number"), [(NOTEBOOK, 5), (TERMINAL, 3)])
def test_errors_name_the_cell(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    start_ipython(monkeypatch, {name: number})
    step = run_cell(monkeypatch, name)["step"]
    with pytest.raises(sim.CollectiveMismatch) as caught:
        sim.run(step, 2)  # type: ignore[arg-type]
    assert f"Cell In[{number}], line 4 in step" in str(caught.value)
    assert f"Cell In[{number}], line 6 in step" in str(caught.value)
    assert ".py" not in str(caught.value)


def test_traces_and_failures_name_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    start_ipython(monkeypatch, {NOTEBOOK: 12})
    source = "def step():\n    dist.barrier()\n    if dist.get_rank():\n        raise KeyError('x')\n"
    step = run_cell(monkeypatch, NOTEBOOK, source)["step"]
    with sim.world(2) as world, pytest.raises(sim.RankFailed):
        world.run(step)  # type: ignore[arg-type]
    assert {event.line for event in world.trace.events} == {"Cell In[12], line 2 in step"}


def test_a_captured_object_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    start_ipython(monkeypatch, {NOTEBOOK: 2})
    source = "x = torch.nn.Linear(2, 2)\ndef step():\n    x(torch.ones(2)).sum().backward()\n"
    step = run_cell(monkeypatch, NOTEBOOK, source)["step"]
    with pytest.raises(sim.SimError, match=r"made: Cell In\[2\], line 1 \(Linear\)"):
        sim.run(step, 2)  # type: ignore[arg-type]


def test_cells_without_ipython_and_files_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert place(TERMINAL, 2) == "Cell In[3], line 2"
    assert place(NOTEBOOK, 2) == "a notebook's cell, line 2"
    assert place(r"C:\Temp\ipykernel_9\1.py", 2) == "a notebook's cell, line 2"
    assert place("/home/me/ipykernel_tools/train.py", 2) == "train.py:2"
    assert place("/tmp/ipykernel_1.py", 2) == "ipykernel_1.py:2"
    start_ipython(monkeypatch, {NOTEBOOK: 4})
    assert place("/home/me/train.py", 2) == "train.py:2"
    assert place("/tmp/ipykernel_123/99.py", 1) == "a notebook's cell, line 1"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert place("/home/me/train.py", 2) == "train.py:2"
