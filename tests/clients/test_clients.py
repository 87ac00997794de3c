"""Each client of `table.py` on simulated ranks, and what its ranks compute there against processes with gloo.

`make clients` runs it, and so does `make deep`; no other tier collects this folder.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from results import note
from run import Difference, Missing, compare, run_client
from table import CLIENTS, Client

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client(client: Client, tmp_path: Path) -> None:
    try:
        outcome = run_client(client, tmp_path)
    except Missing as missing:
        pytest.skip(str(missing))
    note(client, outcome)


def test_names_are_used_once() -> None:
    names = [client.name for client in CLIENTS]
    assert len(set(names)) == len(names)


# -- what the comparison notices -------------------------------------------------------------------------------------

FIGURES = {"params": [[2.0, 0.5], [1.0, -0.25]], "grads": [[0.5, 0.1], [0.25, 0.05]], "bits": 7}
TWO_RANKS = Client("two", "torch", ((2, "script.py"),))


def written(folder: Path, *ranks: list[dict[str, object]], printed: str = "loss 1.25\n") -> Path:
    (folder / "record0").mkdir(parents=True)
    for rank, steps in enumerate(ranks):
        (folder / "record0" / f"{rank}.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "output0.txt").write_text(printed)
    return folder


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    one, other = (written(tmp_path / name, [FIGURES, FIGURES], [FIGURES, FIGURES]) for name in "ab")
    assert compare(TWO_RANKS, one, other) == (2, 2, 0.0, True)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([FIGURES], "makes 2 steps here, 1 there"),
        ([FIGURES, FIGURES | {"params": [[2.0, 0.5], [1.0, 0.25]]}], "step 1: params differ by 5.0e-01"),
        ([FIGURES, FIGURES | {"grads": [[0.5, 0.1]]}], "step 1: grads differ by inf"),
        ([FIGURES | {"grads": [[0.5, 0.1], [0.26, 0.05]]}, FIGURES], "step 0: grads differ by 3.8e-02"),
    ],
)
def test_a_rank_that_computes_something_else_is_noticed(
    steps: list[dict[str, object]], says: str, tmp_path: Path
) -> None:
    one = written(tmp_path / "one", [FIGURES, FIGURES], [FIGURES, FIGURES])
    other = written(tmp_path / "other", [FIGURES, FIGURES], steps)
    with pytest.raises(Difference, match=f"rank 1.*{says}" if "steps" in says else f"rank 1, {says}"):
        compare(TWO_RANKS, one, other)


@pytest.mark.parametrize("printed", ["", "loss 1.2512\n", "loss 1.25\nloss 1.25\n"])
def test_other_losses_are_noticed(printed: str, tmp_path: Path) -> None:
    one = written(tmp_path / "one", [FIGURES], [FIGURES])
    other = written(tmp_path / "other", [FIGURES], [FIGURES], printed=printed)
    with pytest.raises(Difference, match="losses"):
        compare(TWO_RANKS, one, other)


def test_nothing_saved_is_noticed(tmp_path: Path) -> None:
    one, other = (written(tmp_path / name, [FIGURES], [FIGURES]) for name in "ab")
    with pytest.raises(Difference, match="saved"):
        compare(dataclasses.replace(TWO_RANKS, saved=("saved/*",)), one, other)
