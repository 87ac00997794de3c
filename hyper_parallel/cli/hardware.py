"""The command `hardware`: the devices that estimates know, and measuring this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from hyper_parallel.cli.kit import busy, check_can_write, mistakes_as_messages, option, print_wide, stdout_console
from hyper_parallel.core.common.tables import plain_table

GIB = 2**30
_WIDEST = 240  # columns of the list, with titles in one line each

hardware = typer.Typer(invoke_without_command=True)


@hardware.callback()
def list_hardware(context: typer.Context) -> None:
    """List the hardware that estimates know, show what is known of it, or measure this machine."""
    if context.invoked_subcommand is not None:
        return
    with mistakes_as_messages():
        from hyper_parallel.core.machine.description import FOLDER_VARIABLE, find_machine, machine_names

        columns = ("devices per node", "memory", "its bandwidth", "bf16", "in a node", "between nodes")
        table = plain_table("name", *columns)
        table.add_column("")
        for name in machine_names():
            found = find_machine(name)
            table.add_row(
                name,
                str(found.devices_per_node),
                f"{found.total_bytes / GIB:,.0f} GiB",
                f"{found.memory_bandwidth / 1e9:,.0f} GB/s",
                f"{_three_digits(found.peak('bf16') / 1e12)} TFLOP/s",
                f"{_three_digits(found.value('intra.bandwidth') / 1e9)} GB/s",
                f"{_three_digits(found.value('inter.bandwidth') / 1e9)} GB/s",
                found.title,
            )
        print_wide(table, _WIDEST)
        print_wide(
            f"bandwidths between devices are those of one device in one direction; your own: a TOML file in the folder "
            f"that {FOLDER_VARIABLE} names, or its path in place of a name"
        )


@hardware.command()
def show(name: Annotated[str, typer.Argument(help="A name from the list, or the path of a TOML file.")]) -> None:
    """Show every figure of a description, with its source and how good the evidence is."""
    with mistakes_as_messages():
        from hyper_parallel.core.machine.description import find_machine

        found = find_machine(name)
        print_wide(f"{found.name}: {found.title}")
        print_wide(
            f"family {found.family}; {found.links} in a node ({found.topology}), {found.fabric} between nodes; "
            f"backend {found.backend}, allocator {found.allocator}"
        )
        table = plain_table("figure", "value")
        table.add_column("evidence", no_wrap=True)
        table.add_column("source")
        for figure, known in sorted(found.figures.items()):
            table.add_row(figure, _figure(known.value, known.unit), known.grade, known.source)
        print_wide(table)


@hardware.command()
def measure(
    write: Annotated[Path, option("TOML file to write; then: --hardware FILE.")] = Path("out/hardware.toml"),
    device: Annotated[str | None, option("cpu, cuda or npu; default: GPUs if there are as many.")] = None,
    processes: Annotated[int, option("Processes that communicate.", min=1)] = 2,
    threads: Annotated[
        int | None, option("Threads of each process on a CPU; default: its share of the cores.", min=1)
    ] = None,
    steps: Annotated[bool, option("Also measure training steps of tiny models, on a CPU.")] = True,
) -> None:
    """Measure this machine: kernels, memory, communication between processes, and training steps of tiny models.

    What the steps take beside their kernels is what the host adds to each operation and communication.

    hyper-parallel hardware measure --write out/laptop.toml
    """
    with mistakes_as_messages():
        from sim.mesh.pricing.measure import measure as measure_machine

        check_can_write(write)
        with busy("measuring"):
            found = measure_machine(processes, device, threads=threads, steps=steps)
        found.write(write)
        stdout_console().print(f"wrote {write}; try: hyper-parallel hardware show {write}")


def _figure(value: float, unit: str) -> str:
    """Write a figure of the hardware with a unit that suits its size."""
    if unit == "B":
        return f"{value / GIB:,.2f} GiB" if value >= GIB else f"{value / 2**20:,.1f} MiB"
    if unit == "s":
        return f"{value * 1e6:,.2f} us"
    if unit in ("B/s", "FLOP/s") and value > 0:
        power = min(int(math.log10(value) // 3), 4)
        return f"{_three_digits(value / 1000**power)} {('', 'K', 'M', 'G', 'T')[power]}{unit}"
    return f"{value:,.4g} {unit}".removesuffix(" 1")


def _three_digits(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 99.95 else f"{amount:.3g}"
