"""The built wheel in an environment without extras: imports, commands, and what is said of an extra that is missing."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("full")

pytest.importorskip("hatchling", reason="needs hatchling, of the extra 'dev'")

ROOT = Path(__file__).parents[3]
COMMANDS = ["train", "demo", "doctor", "export", "plot", "plan", "verify", "simulate", "estimate", "search", "hardware"]


def required(name: str, seen: set[str]) -> set[str]:
    """Return the distributions that one needs without extras, as far as they are installed here."""
    try:
        needs = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return seen  # of another platform
    seen.add(name)
    for need in needs:
        wanted = re.match(r"[\w.-]+", need)
        if wanted and "extra ==" not in need and wanted.group() not in seen:
            required(wanted.group(), seen)
    return seen


def link(name: str, site: Path) -> None:
    """Put what a distribution has installed here into another environment."""
    found = importlib.metadata.distribution(name)
    for top in {Path(file).parts[0] for file in found.files or []} - {"..", "__pycache__"}:
        here = Path(str(found.locate_file(top)))
        if here.exists() and not (site / top).exists():
            (site / top).symlink_to(here)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A virtual environment with the wheel and what it requires; returns what runs a program of it."""
    folder = tmp_path_factory.mktemp("bare")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    assert len(list((folder / "dist").glob("*.tar.gz"))) == 1
    venv.create(folder / "env", with_pip=False)
    programs = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    site = next((folder / "env").glob("**/site-packages"))
    for name in sorted(required("hyper_parallel", set()) - {"hyper_parallel"}):
        link(name, site)

    def run(program: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        result = subprocess.run(
            [programs / program, *arguments],
            cwd=folder,
            env=environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert result.returncode == code, result.stdout + result.stderr
        return result

    return run


def test_the_environment_is_bare(bare):
    for extra in ("pytest", "hypothesis", "matplotlib", "transformers", "tensorboard"):
        assert f"No module named '{extra}'" in bare("python", "-c", f"import {extra}", code=1).stderr
    assert str(ROOT) not in bare("python", "-c", "import sim; print(sim.__file__)").stdout


def test_the_first_snippet_of_the_readme(bare):
    source = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = bare("python", "-c", source.group(1)).stdout.splitlines()
    assert lines[0].startswith("8 ranks")
    assert lines[0].split()[2:] == lines[1].split()[2:]


@pytest.mark.tier("deep")
def test_the_demo(bare):
    said = bare("hyper-parallel", "demo", "--steps", "2").stdout
    assert "no out/demo/loss.png: matplotlib is not installed; try: pip install 'hyper_parallel[plot]'" in said


@pytest.mark.tier("test")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(bare, command):
    assert "usage: " in bare("hyper-parallel", command, "--help").stdout.lower()


@pytest.mark.tier("test")
def test_no_command_is_left_out(bare):
    listed = re.findall(r"^│ ([a-z]+) ", bare("hyper-parallel", "--help").stdout, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def test_a_script_on_simulated_ranks(bare, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group()\nprint('rank', dist.get_rank())\n")
    assert bare("python", "-m", "sim", "run", "--nproc", "2", str(script)).stdout == "rank 0\n"


def test_a_missing_extra_is_one_sentence(bare):
    uses = {
        "sim.ranks": "test",
        "sim.strategies": "test",
        "w = sim.world(1); w.__enter__(); w.run(print); w.trace.plot('x.png')": "plot",
    }
    tries = "try:\n        exec(use)\n    except Exception as error:\n        print('tried', error)"
    said = bare("python", "-c", f"import sim\nfor use in {list(uses)}:\n    {tries}").stdout.split("tried ")[1:]
    for text, extra in zip(said, uses.values(), strict=True):
        assert "is not installed" in text
        assert f"pip install 'hyper_parallel[{extra}]'" in text.strip().splitlines()[-1]
