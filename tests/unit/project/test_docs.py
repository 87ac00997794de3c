"""The snippets in README and docs run, print what they say, and name things that exist."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import itertools
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hyper_parallel import cli

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BESIDE = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_id(page):
    return page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix()


def blocks(text):
    return _BLOCK.findall(text)


class Loggers:
    """What wandb and mlflow have of what pages call, for where they are not installed; refuses a step twice."""

    def __init__(self):
        self.run, self.steps = None, []

    def init(self, *, project):
        self.run = self
        return self

    def log(self, data, step):
        assert data["loss"] > 0
        assert step == len(self.steps) + 1
        self.steps.append(step)

    def log_metrics(self, metrics, step):
        assert all(isinstance(float(value), float) for value in metrics.values())
        self.log(metrics, step)


@pytest.fixture
def loggers(monkeypatch):
    fakes = {name: Loggers() for name in ("wandb", "mlflow")}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return fakes


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


@pytest.mark.tier("full")
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_run_and_print_what_the_page_says(page, loggers):
    for printed, promised in run_page(page.read_text()):
        if promised is not None:
            assert printed == promised
    logged = {name: fake.steps for name, fake in loggers.items()}
    assert page.name != "training.md" or logged == {"wandb": [1, 2, 3], "mlflow": [1, 2, 3]}


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


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_plans_print_what_the_page_says(page):
    for printed, promised in planned(page.read_text()):
        assert printed == promised


def test_a_wrong_plan_is_noticed():
    page = (ROOT / "docs" / "redistribute.md").read_text()
    (printed, promised), *_ = planned(page)
    (_, wrong), *_ = planned(page.replace("all_gather    tp        4", "all_gather    tp        8"))
    assert printed == promised != wrong


README = (ROOT / "README.md").read_text()


def test_the_readme_begins_with_an_installation_a_command_and_a_picture():
    first = README.splitlines()[:12]
    assert len(README.splitlines()) < 150
    assert any(line.startswith("pip install ") for line in first)
    assert any(line.startswith("hyper-parallel ") for line in first)
    assert any(line.startswith("![") for line in first)


def estimated(text):
    """Return the exit codes of the commands of a page that estimate a model by its name; 3 is what does not fit."""
    commands = re.findall(r"^hyper-parallel (estimate --model .*)$", text, re.MULTILINE)
    return [CliRunner().invoke(cli.app, shlex.split(command)).exit_code for command in commands]


@pytest.mark.tier("full")
def test_what_the_readme_estimates_fits():
    assert estimated(README) == [0]
    assert estimated("hyper-parallel estimate --model llama3-8b --hardware h100-sxm --devices 1 --seq-len 128") == [3]


def error_texts(text):
    """Return the texts of errors that a page has as headings, each as the pieces that do not differ."""
    quoted = re.findall(r"^### `(.*)`$", text, re.MULTILINE)
    return {each: [piece.strip() for piece in re.split(r"\.\.\.|: ", each) if piece.strip()] for each in quoted}


@functools.cache
def texts_of_sources():
    """Return the strings of each source file, of which a message is made; what they put in is left out."""
    return [
        strings_of(file.read_text()) for folder in ("hyper_parallel", "sim") for file in (ROOT / folder).rglob("*.py")
    ]


def strings_of(source):
    """Return the strings in a source: formatted ones as a whole, with a mark for what differs."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(found)


def unknown_errors(text):
    """Return the errors of a page that no source file says any more."""
    sources = texts_of_sources()
    return [each for each, pieces in error_texts(text).items() if not any(all(p in s for p in pieces) for s in sources)]


@pytest.mark.tier("full")
def test_troubleshooting_quotes_what_errors_say():
    page = (DOCS / "troubleshooting.md").read_text()
    assert len(error_texts(page)) >= 25
    assert unknown_errors(page) == []
    assert min(max(map(len, pieces)) for pieces in error_texts(page).values()) >= 9, "too short to be found"


@pytest.mark.tier("full")
def test_an_error_that_nobody_raises_is_noticed():
    assert unknown_errors("### `cannot infer dp_shard: world_size=... is not dividable by`\n") != []


def test_every_error_has_a_cause_and_a_remedy():
    for entry in (DOCS / "troubleshooting.md").read_text().split("\n### ")[1:]:
        body = entry.partition("\n")[2].partition("\n## ")[0]
        assert len(body.split()) >= 12, entry


@pytest.mark.parametrize("page", [*PAGES, *BESIDE], ids=page_id)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_make_targets_in_the_docs_exist():
    known = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, *BESIDE]:
        assert set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE)) <= known


def test_towncrier_takes_every_file_of_changes():
    """It leaves out what it does not know without a word."""
    kinds = re.findall(r'directory = "(\w+)", name', (ROOT / "pyproject.toml").read_text())
    others = {path.name for path in (ROOT / "changelog.d").iterdir()} - {"README.md"}
    assert [name for name in others if not re.fullmatch(rf"\+[\w-]+\.({'|'.join(kinds)})\.md", name)] == []


def test_the_index_links_every_page():
    linked = set(re.findall(r"\]\(([^)#:]+)\)", (DOCS / "index.md").read_text()))
    assert linked == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"index.md"}


def split_name(dotted):
    return dotted.rpartition(".")


def listed():
    """Return the names of the reference: those with an entry made from their docstring, and those named in a text."""
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)), set(re.findall(r"`(\w+)`", text))


@pytest.mark.parametrize(
    "package",
    ["hyper_parallel", "hyper_parallel.core.checkpoint", "hyper_parallel.core.redistribute", "sim", "sim.mesh"],
)
def test_the_reference_lists_every_public_name(package):
    entries, mentioned = listed()
    module = importlib.import_module(package)
    documented = {id(getattr(importlib.import_module(home), name)) for home, _, name in map(split_name, entries)}
    missing = [name for name in set(module.__all__) - mentioned if id(getattr(module, name)) not in documented]
    assert sorted(missing) == []


def test_the_reference_lists_only_what_exists():
    entries, _ = listed()
    for entry in sorted(entries):
        module, _, name = split_name(entry)
        found = importlib.import_module(module)
        assert hasattr(found, name), entry


def test_doctests_are_fenced_for_the_reference():
    pytest.importorskip("griffe", reason="needs the extra docs")
    spec = importlib.util.spec_from_file_location("doctest_fences", DOCS / "doctest_fences.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    text = "Return a sum.\n\n    >>> total(1)\n    1\n\nMore.\n\n>>> total(2)\n2"
    fence = "Return a sum.\n\n    ```pycon\n    >>> total(1)\n    1\n    ```\n\nMore.\n\n```pycon\n>>> total(2)\n2\n```"
    assert found.fenced(text) == fence


def pictures():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("name", sorted(path.stem for path in (DOCS / "pictures").glob("*.svg")))
def test_pictures_are_what_the_code_draws(name):
    assert pictures().PICTURES[name]() == (DOCS / "pictures" / f"{name}.svg").read_text(), (
        "try: python docs/pictures.py"
    )


def test_a_picture_of_another_layout_is_noticed(monkeypatch):
    module = pictures()
    monkeypatch.setattr(module, "MESH", module.hp.Layout((4, 2), ("dp", "tp")))
    assert module.draw_layout() != (DOCS / "pictures" / "layout.svg").read_text()


def test_every_picture_is_shown():
    shown = set(re.findall(r"!\[[^]]+\]\(\.\./pictures/(\w+)\.svg\)", (DOCS / "design" / "pictures.md").read_text()))
    assert shown == set(pictures().PICTURES) == {path.stem for path in (DOCS / "pictures").glob("*.svg")}


def prose(page):
    return _BLOCK.sub("", page.read_text())


def stands_for_something(dotted):
    """Return whether a dotted name can be imported, or is an attribute of what can."""
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:size]))
        except ImportError:
            continue
        for name in parts[size:]:
            found = getattr(found, name, None)
        return found is not None
    return False


WRITTEN = [page for page in [*PAGES, *BESIDE] if page.name != "validation.md"]


@pytest.mark.parametrize("page", WRITTEN, ids=page_id)
def test_names_and_files_in_the_prose_exist(page):
    for dotted in re.findall(r"`((?:hyper_parallel|sim)(?:\.(?!py\b)\w+)+)", prose(page)):
        assert stands_for_something(dotted), dotted
    for path in re.findall(r"`((?:hyper_parallel|sim|tests|benchmarks|examples|docs)/[\w/.]+\w)(?=[` ])", prose(page)):
        assert (ROOT / path).exists(), path


def test_a_name_that_has_moved_is_noticed():
    assert stands_for_something("hyper_parallel.core.redistribute.plan")
    assert not stands_for_something("hyper_parallel.core.redistribute.schemes")
