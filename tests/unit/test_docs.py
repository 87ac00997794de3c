"""The snippets in README and docs run, print what they say, and name things that exist."""

import contextlib
import io
import itertools
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hyper_parallel import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text):
    return _BLOCK.findall(text)


def run_page(text):
    """Execute the python blocks of a page in one namespace; yield what each printed and what the page says."""
    namespace = {"__name__": "train"}
    found = blocks(text)
    for (language, source), following in zip(found, [*found[1:], ("", "")], strict=False):
        if language != "python":
            continue
        if "torch.distributed.flight_recorder" in source and torch.__version__ < "2.12":
            continue  # the analyser of torch 2.11 knows nccl and xccl only, not gloo
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "train.py", "exec"), namespace)
        yield printed.getvalue(), following[1] if following[0] == "text" else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_the_page_says(page):
    for printed, promised in run_page(page.read_text()):
        if promised is not None:
            assert printed == promised


def test_a_wrong_promise_is_noticed():
    page = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    assert [printed == promised for printed, promised in run_page(page)] == [False]


def planned(text):
    """Yield what each `hyper-parallel plan` command of a page prints and what the page says, apart from versions."""
    found = blocks(text)
    for (language, source), (following, promised) in itertools.pairwise(found):
        if (language, following) == ("console", "text") and source.startswith("hyper-parallel plan "):
            result = CliRunner().invoke(cli.app, shlex.split(source)[1:])
            yield (*(re.sub(r"^torch \d.*$", "torch", said, flags=re.MULTILINE) for said in (result.output, promised)),)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_plans_print_what_the_page_says(page):
    for printed, promised in planned(page.read_text()):
        assert printed == promised


def test_a_wrong_plan_is_noticed():
    page = (ROOT / "docs" / "redistribute.md").read_text()
    (printed, promised), *_ = planned(page)
    (_, wrong), *_ = planned(page.replace("all_gather    tp        4", "all_gather    tp        8"))
    assert printed == promised != wrong


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_make_targets_in_the_docs_exist():
    known = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        assert set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE)) <= known
