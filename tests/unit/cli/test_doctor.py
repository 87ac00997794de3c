"""`hyper-parallel doctor`: what it finds, what it says is missing, and when training cannot start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from hyper_parallel import cli, platform
from hyper_parallel.cli import doctor, runs
from hyper_parallel.core.common.errors import explain
from hyper_parallel.platform.cpu import CpuPlatform

ROOT = Path(__file__).parents[3]


def diagnose() -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["doctor"])
    return result.exit_code, result.output


def row(text: str, name: str) -> str:
    """Return what stands behind a name, in words with one blank between them."""
    for line in text.splitlines():
        words = line.split()
        if name in words[:2]:
            return " ".join(words[words.index(name) + 1 :])
    raise AssertionError(f"no row for {name} in:\n{text}")


class FakeCuda(CpuPlatform):
    """Eight GPUs of this name."""

    device_type, backend, title = "cuda", "nccl", "NVIDIA H100 80GB HBM3"

    def name(self) -> str:
        return self.title

    def device_count(self) -> int:
        return 8

    def total_memory(self) -> int:
        return 80 * 2**30


@pytest.fixture
def with_gpus() -> Iterator[Callable[[type[FakeCuda]], None]]:
    """Answer for "cuda", and where no device is named, with GPUs."""
    registered: list[Any] = []

    def add(kind: type[FakeCuda]) -> None:
        registered.append(lambda device_type: kind() if device_type in (None, "cuda") else None)
        platform.register_provider(registered[0])

    yield add
    for provider in registered:
        platform.unregister_provider(provider)


def versions(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    """Let packages have other versions; None: not installed."""
    real = metadata.version

    def version(name: str) -> str:
        found = changed.get(name.replace("-", "_"), "")
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found or real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_here_training_can_start() -> None:
    code, text = diagnose()
    assert code == 0, text
    assert row(text, "torch") == metadata.version("torch")
    assert row(text, "gloo") == "yes ranks on cpu"
    assert row(text, "sim").startswith("yes ")
    assert row(text, "cores")[0].isdigit()
    assert "GiB" in row(text, "memory")
    assert text.splitlines()[-1] == "training can start, on cpu with gloo"
    assert max(map(len, text.splitlines())) <= 110
    assert "…" not in text


def test_every_requirement_and_extra_of_the_distribution_is_looked_at() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*project["optional-dependencies"]} - {"docs", "dev"} == {*doctor._EXTRAS}
    wanted = (project["dependencies"], *project["optional-dependencies"].values())
    bounds = " ".join(text.partition(";")[0] for texts in wanted for text in texts)
    assert {*re.findall("[<>=!~]+", bounds)} == {"<", ">="}, "no others are read"
    _, text = diagnose()
    for name in ("torch", "numpy", "rich", "typer", "safetensors", "torch-npu", "matplotlib", "tensorboard", "pytest"):
        assert row(text, name)
    assert "mkdocs" not in text, "the extras for work on the library are no business of users"


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"safetensors": None}, "pip install 'safetensors>=0.5'"),
        ({"torch": "2.10.1"}, "pip install 'torch<2.16,>=2.11'"),
        ({"torch": "2.16.0+cu130"}, "pip install 'torch<2.16,>=2.11'"),
    ],
)
def test_a_requirement_that_is_not_met_stops_training(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], remedy: str
) -> None:
    versions(monkeypatch, **changed)
    code, text = diagnose()
    assert code == 1
    assert text.splitlines()[-2:] == [f"training cannot start: {next(iter(changed))}; try:", f"  {remedy}"]


def test_an_extra_that_is_missing_or_old_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, matplotlib=None, transformers="4.57.1", jinja2="3.1.0")
    code, text = diagnose()
    assert code == 0
    assert row(text, "matplotlib").startswith("- pictures")
    assert row(text, "transformers").startswith("4.57.1 (supported: <6,>=5)")
    remedies = text.partition("if you need it:")[2].splitlines()
    assert {"  pip install 'hyper_parallel[plot]'", "  pip install 'hyper_parallel[text]'"} <= {*remedies}
    assert len(remedies) == len({*remedies}) + remedies.count("") - 1, "each command once"


def test_a_checkout_that_is_not_installed_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    versions(monkeypatch, rich=None)
    code, text = diagnose()
    assert code == 1
    assert "training cannot start: rich; try:" in text


def test_devices_and_the_hardware_that_estimates_take(
    monkeypatch: pytest.MonkeyPatch, with_gpus: Callable[[type[FakeCuda]], None]
) -> None:
    with_gpus(FakeCuda)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    code, text = diagnose()
    assert code == 0
    assert row(text, "cuda") == "8 x NVIDIA H100 80GB HBM3, 80.0 GiB"
    assert row(text, "hardware").startswith("h100-sxm ")
    assert text.splitlines()[-1] == "training can start, on cuda with nccl"


def test_a_device_without_its_backend_stops_training(
    monkeypatch: pytest.MonkeyPatch, with_gpus: Callable[[type[FakeCuda]], None]
) -> None:
    with_gpus(FakeCuda)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    code, text = diagnose()
    assert code == 1
    assert "training cannot start: nccl; try:" in text


def test_a_device_without_a_description_says_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch, with_gpus: Callable[[type[FakeCuda]], None]
) -> None:
    class Unknown(FakeCuda):
        title = "Graphics 9"

    with_gpus(Unknown)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    code, text = diagnose()
    assert code == 0
    assert row(text, "hardware") == "- no description has its name"
    assert "\n  hyper-parallel train --hardware FILE\n" in text


def test_what_estimates_take_is_what_predictions_of_runs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ValueError(explain("cannot tell how fast it is", "it is a secret", "seen: nothing", "ask somebody"))

    monkeypatch.setattr(runs, "hardware_here", refuse)
    _, text = diagnose()
    assert row(text, "hardware") == "- it is a secret"
    assert "\n  ask somebody\n" in text


@pytest.mark.tier("test")
def test_a_torch_that_cannot_be_imported_stops_training(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 1, done.stderr
    assert "its import failed (OSError:" in done.stdout
    assert "training cannot start: torch; try:\n  pip install --force-reinstall torch" in done.stdout
    assert done.stderr == ""
