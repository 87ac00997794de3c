"""Descriptions of machines, and the prices of collectives on them, for planner, simulator and estimates.

    description -> file, calibration, links
    file, calibration -> toml_file

description   a machine: devices, nodes, links, peaks, memory; found by name, by file or by device name
file          reader and writer of descriptions as TOML, each figure with unit, source and grade
calibration   measured and fitted curves of kernels and links
links         seconds of a collective or a message
toml_file     reader and writer of TOML, also of run files and plans
"""

from hyper_parallel.core.machine.description import Machine, find_machine, machine_names, machine_of_device
from hyper_parallel.core.machine.links import Load, load_seconds

__all__ = ["Load", "Machine", "find_machine", "load_seconds", "machine_names", "machine_of_device"]
