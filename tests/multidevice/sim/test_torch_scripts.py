"""`examples/torch_scripts`, written for torchrun: unchanged on simulated ranks, and with the same losses."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import warm

from sim.script.launch import main

FOLDER = Path(__file__).parents[3] / "examples" / "torch_scripts"
SCRIPTS = ("checkpoint", "ddp", "fsdp2", "tensor_parallel", "moe", "pipeline")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")  # --standalone picks a free port


def simulated(script: str, nproc: int, seed: int, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """The losses that the script prints; it compares them with one device's itself."""
    code = main(["--nproc", str(nproc), "--seed", str(seed), str(FOLDER / f"{script}.py")])
    out, err = capsys.readouterr()
    assert code == 0, err
    return losses_in(out)


def losses_in(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"^\w+ \d+  loss (\S+)$", text, re.MULTILINE)]


def test_all_scripts_are_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SCRIPTS)


@pytest.mark.tier("full", each=2)
@pytest.mark.sim
@pytest.mark.parametrize("script", SCRIPTS)
def test_on_simulated_ranks(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    losses = simulated(script, 4, 0, capsys)
    assert len(losses) >= 4
    assert simulated(script, 4, 1, capsys) == losses, "another interleaving gives the same, bit for bit"


@pytest.mark.tier("full", each=2)
@pytest.mark.gloo
@pytest.mark.parametrize("script", ["fsdp2", "moe"])
def test_torchrun_prints_the_same_losses(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*TORCHRUN, "--nproc-per-node", "2", str(FOLDER / f"{script}.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run(command, env=env)
    assert done.returncode == 0, done.stderr
    losses = losses_in(done.stdout)
    assert len(losses) >= 4
    assert simulated(script, 2, 0, capsys) == pytest.approx(losses, rel=1e-4)


@pytest.mark.tier("test")
@pytest.mark.sim
def test_a_wrong_script_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison in the scripts notices what the parallel run would get wrong."""
    source = (FOLDER / "moe.py").read_text()
    forgotten = source.replace("            dist.all_reduce(parameter.grad)\n", "            pass\n")
    assert forgotten != source
    (tmp_path / "moe.py").write_text(forgotten)
    assert main(["--nproc", "4", str(tmp_path / "moe.py")]) == 1
    assert "not close" in capsys.readouterr().err
