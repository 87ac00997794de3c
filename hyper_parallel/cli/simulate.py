"""The command `simulate`: a torchrun script on simulated ranks."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from hyper_parallel.cli.kit import mistakes_as_messages, option

_MappedDevice = Enum("_MappedDevice", {"cuda": "cuda", "npu": "npu"}, type=str)
_Switch = Enum("_Switch", {"on": "on", "off": "off"}, type=str)
_TORCHRUNS = (  # options that mean nothing in one process: accepted, and their values are not looked at
    *("--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--node-rank"),
    *("--max-restarts", "--monitor-interval", "--start-method", "--role", "--local-addr"),
    *("--master_addr", "--master_port", "--rdzv_backend", "--rdzv_endpoint", "--rdzv_id", "--rdzv_conf", "--node_rank"),
    *("--max_restarts", "--monitor_interval", "--start_method", "--local_addr"),
)


def simulate(
    script: Annotated[str, typer.Argument(help="A Python file that torchrun could start; with -m, a module.")],
    nproc: Annotated[int, option("Ranks.", "--nproc", "--nproc-per-node", "--nproc_per_node")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own.")] = None,
    module: Annotated[bool, option("The script is a module, as for python -m.", "--module", "-m")] = False,
    seed: Annotated[int, option("Fixes the interleaving of the ranks.")] = 0,
    map_device: Annotated[_MappedDevice | None, option("Put on the CPU what the script puts on this device.")] = None,
    device: Annotated[
        _MappedDevice | None, option("The device that all ranks share; npu may be a simulated one.")
    ] = None,
    hardware: Annotated[
        str | None, option("What the ranks stand for, such as h100-sxm: plans and virtual time are its.")
    ] = None,
    env: Annotated[list[str] | None, option("A variable for every rank.", metavar="K=V")] = None,
    own: Annotated[str, option("Packages of which each rank gets a copy: a,b", metavar="NAMES")] = "",
    show: Annotated[str, option("Whose standard output: 0, or 0,3, or all.", metavar="RANKS")] = "0",
    check_races: Annotated[bool, option("Look for buffers touched before the wait.", "--check-races")] = False,
    check_replicas: Annotated[bool, option("Compare copies before steps of optimizers.", "--check-replicas")] = False,
    check_identity: Annotated[_Switch, option("Compare what collectives are for.")] = _Switch.on,
    nnodes: Annotated[str, option("1: there is one machine.", hidden=True)] = "1",
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    ignored: Annotated[list[str] | None, typer.Option(*_TORCHRUNS, hidden=True)] = None,
) -> None:
    """Run an unmodified torchrun script on simulated ranks, in this process and on the CPU.

    hyper-parallel simulate --nproc 8 train.py --steps 10

    torchrun's other options (--standalone, --nnodes 1, --rdzv-backend ...) are accepted, and mean nothing here.
    """
    del standalone, ignored
    with mistakes_as_messages():
        from sim.script.launch import run_script
        from sim.script.options import launch_of

        launch = launch_of(
            "hyper-parallel simulate",
            script,
            arguments or (),
            nproc=nproc,
            seed=seed,
            map_device=None if map_device is None else map_device.value,
            device=None if device is None else device.value,
            hardware=hardware,
            env=env or (),
            own=own,
            show=show,
            module=module,
            check_races=check_races,
            check_replicas=check_replicas,
            check_identity=check_identity.value,
            nnodes=nnodes,
        )
    raise typer.Exit(run_script(launch))
