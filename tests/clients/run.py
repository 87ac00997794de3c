"""One client on simulated ranks and on processes with gloo, and the difference of what their ranks computed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import CLIENTS, SOURCES, Client

__all__ = ["Difference", "Missing", "Outcome", "compare", "python", "run_client", "tree_of"]

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out" / "clients"
RECORDER = Path(__file__).with_name("record")
LOSS = re.compile(r"\bloss'?[:= ]+'?([0-9]+\.[0-9e+-]+)", re.IGNORECASE)
LIMIT_S = 1800.0  # of one command


class Missing(Exception):
    """What a client needs and this machine does not have."""


class Difference(Exception):
    """What two runs of a client do not agree about."""


@dataclass(frozen=True)
class Outcome:
    """How far two runs of a client agree.

    Attributes:
        steps: steps of optimizers that were compared, of each rank.
        ranks: how many ranks that were, of all runs.
        difference: the largest relative difference.
        bits: whether all of it is equal bit for bit.
        seconds: of simulated ranks, and of processes.
        also: what else was found to be so, in words.
    """

    steps: int
    ranks: int
    difference: float
    bits: bool
    seconds: tuple[float, float]
    also: tuple[str, ...] = ()


def python() -> str:
    """Return the Python of the suite's environment: `CLIENTS_PYTHON`, or that of `make clients`."""
    found = Path(os.environ.get("CLIENTS_PYTHON", ROOT / "out" / "clients-venv" / "bin" / "python"))
    if not found.exists():
        raise Missing(f"no environment for clients: there is no {found} (make clients makes it)")
    return str(found)


def tree_of(name: str) -> Path:
    """Return a folder with the files of a source at its commit.

    They come from a repository `name` in the folder that `CLIENTS_SOURCES` names (out/clients/sources), which is cloned
    if it is not there.
    """
    source = SOURCES[name]
    tree = OUT / "trees" / f"{name}-{source.commit[:12]}"
    if tree.exists():
        return tree
    repository = Path(os.environ.get("CLIENTS_SOURCES", OUT / "sources"), name)
    if not repository.exists():
        repository.parent.mkdir(parents=True, exist_ok=True)
        _git(name, "clone", "--quiet", source.address, str(repository))
    partial = tree.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _git(name, "-C", str(repository), "archive", f"--output={partial}.tar", source.commit, *source.folders)
    shutil.unpack_archive(f"{partial}.tar", partial)
    Path(f"{partial}.tar").unlink()
    partial.rename(tree)
    return tree


def _git(name: str, *arguments: str) -> None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        source = SOURCES[name]
        hint = f"put a clone of {source.address} into {OUT / 'sources' / name}, or name its parent in CLIENTS_SOURCES"
        raise Missing(f"no source of {name} at {source.commit[:12]}: {done.stderr.strip()} ({hint})")


def run_client(client: Client, folder: Path) -> Outcome:
    """Run a client both ways in folders below `folder`, and compare them.

    Raises:
        Missing: it cannot be run here.
        Difference: they do not agree, or one of them has failed.
    """
    seconds = []
    for way in ("simulated", "real"):
        start = time.monotonic()
        _start(client, way, folder / way)
        seconds.append(time.monotonic() - start)
    outcome = compare(client, folder / "simulated", folder / "real")
    also = ["what it saves is the same"] if client.saved else []
    if client.alone:
        _start(client, "alone", folder / "alone")
        _compare_losses(client, folder / "simulated", folder / "alone")
        also.append("one process prints the same losses")
    if client.like:
        other = next(each for each in CLIENTS if each.name == client.like)
        _start(other, "simulated", folder / "like")
        _compare_losses(client, folder / "simulated", folder / "like")
        also.append("torch's engine prints the same losses")
    if client.estimate:
        _start(client, "estimated", folder / "estimated")
        also.append("its steps on 8 H100 are estimated")
    return Outcome(*outcome, (seconds[0], seconds[1]), tuple(also))


def _start(client: Client, way: str, folder: Path) -> None:
    """Run all commands of a client one way."""
    if client.of in SOURCES:
        shutil.copytree(tree_of(client.of), folder / "work", symlinks=True)
    work = folder / "work" / client.folder
    work.mkdir(parents=True, exist_ok=True)
    client.data(work)
    for file, old, new in client.edits:
        source = (folder / "work" / file).read_text()
        if old not in source:
            raise Missing(f"{client.name}: {file} does not have {old!r} any more")
        (folder / "work" / file).write_text(source.replace(old, new))
    for number, (nproc, command) in enumerate(client.runs if way != "alone" else ((1, client.alone),)):
        record = folder / f"record{number}"
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        device = ["--map-device", "cuda"] if client.map_device else []
        if way == "estimated":
            start = ["-m", "sim", "estimate", "--nproc", "8", "--hardware", "h100-sxm", *client.options]
        elif way == "simulated":
            start = ["-m", "sim", "run", "--show", "all", "--nproc", str(nproc), *device, *client.options]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(RECORDER), str(ROOT), str(folder / "work"))),
            **({} if way == "estimated" else {"CLIENTS_RECORD": str(record)}),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "home"),
            "HF_TOKEN": "none",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_CACHE_DIR": str(OUT / "inductor"),  # of all runs: a compiler takes a minute to warm up
            **({} if way in ("real", "alone") else {"CLIENTS_SIMULATED": "1"}),
            **({"CLIENTS_MAP_DEVICE": "cuda"} if client.map_device else {}),
        }
        done = subprocess.run(
            [python(), *start, *shlex.split(command)],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        (folder / f"output{number}.txt").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise Difference(
                f"{client.name}, {way}: ended with {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}"
            )


# -- comparing -------------------------------------------------------------------------------------------------------


def compare(client: Client, one: Path, other: Path) -> tuple[int, int, float, bool]:
    """Compare the records, losses and saved files of two runs.

    Returns:
        Steps, ranks, the largest relative difference, and whether all bits are equal.
    """
    steps, ranks, worst, same_bits = 0, 0, 0.0, True
    for number, (nproc, _) in enumerate(client.runs):
        for rank in range(nproc):
            mine, theirs = (_records(run / f"record{number}" / f"{rank}.jsonl") for run in (one, other))
            if not mine or len(mine) != len(theirs):
                raise Difference(f"{client.name}: rank {rank} makes {len(mine)} steps here, {len(theirs)} there")
            for step, (here, there) in enumerate(zip(mine, theirs, strict=True)):
                same_bits &= here["bits"] == there["bits"]
                for kind in ("params", "grads"):
                    found = _difference(here[kind], there[kind])
                    if found > client.tolerance:
                        what = f"{client.name}: run {number}, rank {rank}, step {step}: {kind} differ by {found:.1e}"
                        raise Difference(what)
                    worst = max(worst, found)
            steps += len(mine)
            ranks += 1
    _compare_losses(client, one, other)
    _compare_saved(client, one, other)
    return steps // ranks, ranks, worst, same_bits


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _difference(one: list[list[float]], other: list[list[float]]) -> float:
    """Return the largest difference of two ranks' figures, relative to the norms of the tensors that they are of."""
    if len(one) != len(other):
        return float("inf")
    largest = max((norm for norm, _ in one), default=0.0)
    return max(
        (
            max(abs(a[0] - b[0]), abs(a[1] - b[1])) / max(a[0], b[0], 1e-3 * largest, 1e-12)
            for a, b in zip(one, other, strict=True)
        ),
        default=0.0,
    )


def losses(folder: Path) -> list[float]:
    """Return the losses that a run has printed."""
    text = "".join(file.read_text() for file in sorted(folder.glob("output*.txt")))
    return [float(found) for found in LOSS.findall(text)]


def _compare_losses(client: Client, one: Path, other: Path) -> None:
    """Compare what is printed: in whatever order the ranks' lines came, and with as many digits as were printed."""
    mine, theirs = sorted(losses(one)), sorted(losses(other))
    close = all(
        abs(a - b) <= max(1e-4, client.tolerance) * max(1.0, abs(a)) for a, b in zip(mine, theirs, strict=False)
    )
    if len(mine) != len(theirs) or not close:
        raise Difference(f"{client.name}: losses {losses(one)} in {one.name}, {losses(other)} in {other.name}")


def _compare_saved(client: Client, one: Path, other: Path) -> None:
    """Compare the tensors of the safetensors files that both runs have saved."""
    from safetensors.torch import load_file

    for pattern in client.saved:
        mine, theirs = (
            {str(file.relative_to(run)): load_file(file) for file in run.glob(f"work/{pattern}.safetensors")}
            for run in (one, other)
        )
        if not mine or {name: set(file) for name, file in mine.items()} != {n: set(f) for n, f in theirs.items()}:
            raise Difference(f"{client.name}: saved {sorted(mine)} here, {sorted(theirs)} there")
        for name, file in mine.items():
            for key, tensor in file.items():
                gap = (tensor.double() - theirs[name][key].double()).norm() / tensor.double().norm().clamp(min=1e-12)
                if gap > client.tolerance:
                    raise Difference(f"{client.name}: {key} in {name} differs by {gap:.1e}")
