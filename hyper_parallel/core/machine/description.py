"""Descriptions of devices, nodes and networks as data, each figure with its source.

>>> h100 = find_machine("h100-sxm")
>>> h100.devices_per_node, h100.peak("bfloat16") / 1e12, h100.figures["device.bandwidth"].grade
(8, 989.4, 'datasheet')

The descriptions are the TOML files of `core/machine/data/hardware`. Users put theirs into the folder of the environment
variable `HYPER_PARALLEL_HARDWARE`, or anywhere and name the path.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hyper_parallel.core.common.errors import InvalidType, InvalidValue, nearest
from hyper_parallel.core.machine.calibration import Calibration, load_calibration
from hyper_parallel.core.machine.file import FIGURES, Figure, read_machine_file, write_machine_file
from hyper_parallel.core.machine.links import COLLECTIVES, Links

FOLDER_VARIABLE = "HYPER_PARALLEL_HARDWARE"
_OWN = Path(__file__).parent / "data" / "hardware"
_DTYPES = MappingProxyType({
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "tf32": "tf32", "float64": "fp64",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float8_e4m3fnuz": "fp8", "float8_e5m2fnuz": "fp8",
})  # fmt: skip
# The peaks to use for a dtype without a figure on a device, best first.
_INSTEAD = MappingProxyType(
    {"fp16": ("bf16",), "bf16": ("fp16", "fp32"), "fp8": ("bf16",), "tf32": ("fp32",), "fp64": ("fp32",)}
)
_FABRICS = MappingProxyType(
    {
        "infiniband": ("infiniband", "ndr", "hdr", " ib", "ib "),
        "efa-v1": ("efa-v1", "p4d", "efa 400", "efa, 400", "400gb/s efa"),
        "efa": ("efa",),
        "roce": ("roce", "rdma"),
        "omni-path": ("omni-path", "omnipath", "opa"),
        "ub": ("unified bus", "ub"),
        "gloo": ("gloo",),
        "ethernet": ("ethernet", "tcp"),
    }
)
# torch's device names; the first match counts. Variants on other boards (PCIe, NVL) have other links and clocks: they
# have no description, only their advertised dense bf16 FLOP/s. Sources: NVIDIA's data sheets, half of the figures
# "with sparsity"; A800 and H800 compute like A100 and H100. AMD's data sheets of MI250X (torch sees each half as a
# device), MI300X and MI325X. Huawei's Atlas 800T A2: 8 x 280 TFLOP/s in fp16, the same in bf16.
_DEVICES: tuple[tuple[str, str | float], ...] = (
    (r"\bA100-SXM\d-40GB", "a100-40gb"),
    (r"\bA100-SXM\d-80GB", "a100-80gb"),
    (r"\bH100 80GB HBM3$", "h100-sxm"),
    (r"\bH200$", "h200"),
    (r"\bB200$", "b200"),
    (r"^Ascend910B2$", "ascend-910b-376"),
    (r"^Ascend910B3$", "ascend-910b"),
    (r"A[18]00\b", 312e12),
    (r"H[18]00\b.*PCIe", 756e12),
    (r"H100\b.*NVL", 835e12),
    (r"H([18]00|200)\b", 989.4e12),
    (r"H20\b", 148e12),
    (r"B200\b", 2250e12),
    (r"L40S\b", 362e12),
    (r"MI250X?\b", 191.5e12),
    (r"MI3(00|25)X\b", 1307e12),
    (r"Ascend910B2", 376e12),
    (r"Ascend910B3", 313e12),
    (r"Ascend910B4", 280e12),
)


@dataclass(frozen=True)
class Machine:
    """A device, the node that contains it, and the network between nodes.

    Attributes:
        name: e.g. `h100-sxm`.
        title: in words.
        family: the family whose curves (of matmuls, attention, kernels) it uses: `hopper`, `ampere`, `ascend` ...
        figures: its figures by name, in bytes, bytes per second, FLOP/s and seconds; see `FIGURES`.
        links: kind of the links within a node: `nvlink3`, `nvlink4`, `hccs` ...
        topology: of the links within a node: `switch`, where every device has its whole bandwidth to any other, or
            `mesh`, where each pair has a separate link.
        fabric: kind of the network between nodes: `infiniband`, `efa`, `roce`, `omni-path` ...
        allocator: torch's allocator: `caching`, `expandable` (with `expandable_segments:True`) or `none`.
        backend: backend of `torch.distributed`.
        curves: figures that override `calibration.toml` on this device, by section and name.
    """

    name: str
    title: str
    family: str
    figures: Mapping[str, Figure]
    links: str = "nvlink4"
    topology: str = "switch"
    fabric: str = "infiniband"
    allocator: str = "caching"
    backend: str = "nccl"
    curves: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.links, self.fabric, tuple(self.figures.items())))

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without cached values, because hashes of text differ between processes."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __str__(self) -> str:
        return self.name

    def value(self, figure: str, default: float | None = None) -> float:
        """Return a figure by name, in basic units."""
        if figure in self.figures:
            return self.figures[figure].value
        if default is None:
            names = nearest(figure, self.figures)
            raise InvalidValue(f"cannot read {figure!r} of {self.name}", "it has no such figure", "", names)
        return default

    def grade(self, figure: str) -> str:
        """Return the evidence grade of a figure; `assumed` for a missing one."""
        return self.figures[figure].grade if figure in self.figures else "assumed"

    @property
    def total_bytes(self) -> int:
        """Memory of a device, as advertised."""
        return int(self.value("device.memory"))

    @property
    def memory_bytes(self) -> int:
        """Memory of a device that programs can use, as the total of `torch.cuda.mem_get_info`."""
        return int(self.value("device.usable_memory"))

    def memory_within(self, asked: str, limit: float | None) -> float:
        """Return the bytes of a device that a program may use.

        Args:
            asked: the start of an error message, "cannot ...".
            limit: the caller's `memory_limit`, in bytes; None: all usable memory.

        Raises:
            ValueError: a limit that is not above 0.
        """
        if limit is None:
            return float(self.memory_bytes)
        if not limit > 0:
            blame = "a memory limit must be above 0"
            raise InvalidValue(asked, blame, f"memory_limit: {limit!r}", f"memory_limit={self.memory_bytes}")
        return float(limit)

    @property
    def allocatable_bytes(self) -> int:
        """Bytes that the allocator can reserve: the memory minus the driver's context."""
        return self.memory_bytes - self.context_bytes

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second that the memory of a device reads or writes."""
        return self.value("device.bandwidth")

    @property
    def cores(self) -> int:
        """Cores that each compute a tile of a matmul, e.g. streaming multiprocessors, AI cores or CPU cores."""
        return int(self.value("device.cores"))

    @property
    def devices_per_node(self) -> int:
        """Devices in a node; rank r sits in node `r // devices_per_node`."""
        return int(self.value("node.devices"))

    @property
    def context_bytes(self) -> int:
        """Memory that the driver takes before the first tensor; torch's statistics do not count it."""
        return int(self.value("context.bytes", 0))

    @property
    def bytes_per_group(self) -> int:
        """Memory of a communicator on each of its ranks; torch's statistics do not count it."""
        return int(self.value("context.per_group", 0))

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s of dense matmuls in a dtype, named as in torch or as in `peak.bf16`.

        >>> find_machine("a100-80gb").peak("float8_e4m3fn") / 1e12  # computed as bf16
        312.0
        """
        return self.value("peak." + self.computed_as(dtype))

    def computed_as(self, dtype: str) -> str:
        """Return the dtype whose peak this device uses for another one, e.g. `bf16` for fp8 on A100."""
        short = _DTYPES.get(dtype.removeprefix("torch."), dtype)
        for name in (short, *_INSTEAD.get(short, ())):
            if f"peak.{name}" in self.figures:
                return name
        if short == "fp8":
            return self.computed_as("bf16")
        known = [name[5:] for name in self.figures if name.startswith("peak.")]
        seen = f"known: {', '.join(known)}"
        raise InvalidValue(f"cannot tell how fast {self.name} computes in {dtype}", "no figure", seen, known[0])

    def with_figures(self, grade: str = "assumed", source: str = "given by the caller", **values: float) -> Machine:
        """Return a copy with other figures, in basic units; dots in names are written as two underscores.

        >>> find_machine("h100-sxm").with_figures(node__devices=4).devices_per_node
        4
        """
        names = {name.replace("__", "."): float(value) for name, value in values.items()}
        for name, value in names.items():
            asked = f"cannot change {name!r} of {self.name}"
            if name not in FIGURES:
                raise InvalidValue(asked, "no such figure", f"given: {value!r}", nearest(name, FIGURES))
            if not value > 0 and not FIGURES[name].zero:
                raise InvalidValue(asked, "a figure is above 0", f"given: {value!r}", "leave it out")
        made = {name: Figure(value, FIGURES[name].unit, grade, source) for name, value in names.items()}
        return replace(self, figures={**self.figures, **made})

    def with_network(
        self,
        inter_bw_gbytes_s_per_dev: float | None = None,
        fabric: str | None = None,
        grade: str = "datasheet",
        source: str = "given by the caller",
    ) -> Machine:
        """Return a copy with another network between nodes.

        Args:
            inter_bw_gbytes_s_per_dev: GB/s per device, one direction; devices that share an adapter share its rate.
            fabric: any text that names the kind, e.g. `"4x100Gb/s Omni-Path"`; None: unchanged.
            grade: evidence grade of the bandwidth.
            source: source of the bandwidth.
        """
        hardware = self
        if inter_bw_gbytes_s_per_dev is not None:
            rate = inter_bw_gbytes_s_per_dev * 1e9
            hardware = hardware.with_figures(grade, source, inter__bandwidth=rate)
        return hardware if fabric is None else replace(hardware, fabric=fabric_kind(fabric, self.fabric))

    def with_attention(self, kernels: str) -> Machine:
        """Return a copy with other attention kernels, e.g. `flash3`; `curves.toml` has the names of a family."""
        return replace(
            self, curves={**self.curves, "attention": {**self.curves.get("attention", {}), "default": kernels}}
        )

    def links_with(self, calibration: Calibration) -> Links:
        """Return the links of its device groups, with the curves of a calibration."""
        in_switch = self.figures.get("intra.in_switch")
        return Links(
            intra=self.value("intra.bandwidth"),
            mesh=self.topology == "mesh",
            devices=self.devices_per_node,
            in_switch=None if in_switch is None else in_switch.value,
            in_switch_from=self.value("intra.in_switch_from", 2),
            inter=self.value("inter.bandwidth"),
            taper=self.value("inter.taper", 0.0),
            curves=calibration.of(self, "links", self.links),
            fabric=calibration.of(self, "fabric", self.fabric),
            trees=self.backend == "nccl",
        )

    @cached_property
    def prices(self) -> Links:
        """Its links with the default calibration, for all callers without another calibration."""
        return self.links_with(load_calibration())

    def write(self, path: str | Path) -> Path:
        """Write it to a TOML file that `find_machine` can read, and return the path."""
        names = ("title", "family", "links", "topology", "fabric", "allocator", "backend")
        texts = {name: str(getattr(self, name)) for name in names}
        write_machine_file(Path(path), texts, self.figures, self.curves)
        return Path(path)


def fabric_kind(words: str, otherwise: str = "ethernet") -> str:
    """Return the kind of network that a text names.

    >>> fabric_kind("NVLink3 + 4x100Gb/s Omni-Path per node"), fabric_kind("8x400Gb/s NDR IB per node")
    ('omni-path', 'infiniband')

    Args:
        words: the text.
        otherwise: the kind if the text names none.
    """
    text = words.lower()
    for kind, hints in _FABRICS.items():
        if text == kind or any(hint in text for hint in hints if hint != "ub"):
            return kind
    return otherwise


def machine_names() -> list[str]:
    """Return the sorted names that `find_machine` knows, including a user's.

    >>> [name for name in machine_names() if name.startswith("a100")]
    ['a100-40gb', 'a100-80gb']
    """
    return sorted(_files())


def find_machine(hardware: str | Path | Machine) -> Machine:
    """Return the machine with a name or in a TOML file; a `Machine` is returned unchanged.

    Args:
        hardware: a name of `machine_names`, the path of a TOML file, or a `Machine`.

    Raises:
        ValueError: an unknown name, with the nearest one; a missing or invalid file, with the line.
        TypeError: neither a name, a path nor a Machine.
    """
    if isinstance(hardware, Machine):
        return hardware
    given: object = hardware
    if not isinstance(given, (str, Path)):
        blame = f"hardware is a {type(hardware).__name__}, not a name, a path or a Machine"
        raise InvalidType("cannot find the hardware", blame, f"hardware: {hardware!r}", "'h100-sxm'")
    files = _files()
    if str(hardware) in files:
        path = files[str(hardware)]
    elif isinstance(hardware, Path) or hardware.endswith(".toml") or os.sep in hardware:
        path = Path(hardware)
    else:
        known = machine_names()
        seen = f"known: {', '.join(known)}"
        begin = [name for name in known if name.startswith(hardware)]
        hint = f"{nearest(hardware, begin or known)}, or the path of a TOML file"
        raise InvalidValue(f"cannot find the hardware {hardware!r}", "nothing has that name", seen, hint)
    return _read(path, path.stat().st_mtime_ns if path.exists() else 0)


@functools.cache
def _read(path: Path, changed: int) -> Machine:
    read = read_machine_file(path)
    return Machine(name=read.pop("name", path.stem), **read)


@functools.cache
def one_node() -> Machine:
    """Return the default machine of ranks without a named one: one node of any size.

    All operations have the same links, so that plans favour no particular device: 350 us per further rank and 0.9 GB/s.
    gloo took that for an exchange over loopback, between 2 and 4 processes on 2 cores.
    """
    figures: dict[str, Any] = {
        "intra__bandwidth": 0.9e9,
        "inter__bandwidth": 0.9e9,
        "device__bandwidth": 8e9,
        "node__devices": 2**31,
    }
    link = {"efficiency": 1.0, "base_us": 0.0, "hop_us": 350.0, "pair_loss": 0.0, "ramp_us": 0.0}
    return replace(
        find_machine("laptop-cpu").with_figures(**figures),
        name="unnamed",
        title="One node of unnamed devices",
        curves={"links": dict.fromkeys(set(COLLECTIVES) | {"send"}, link)},
    )


def machine_of_device(device_name: str) -> Machine | None:
    """Return the description of a device by torch's name for it; None if unknown.

    >>> print(machine_of_device("NVIDIA H100 80GB HBM3"), machine_of_device("NVIDIA H100 PCIe"))
    h100-sxm None

    Args:
        device_name: the result of `torch.cuda.get_device_name` or `torch.npu.get_device_name`.
    """
    found = _known_of(device_name)
    return find_machine(found) if isinstance(found, str) else None


def peak_flops(device_name: str) -> float | None:
    """Return the advertised dense bf16 FLOP/s of a device; None if unknown.

    >>> peak_flops("NVIDIA H200"), peak_flops("NVIDIA H100 PCIe"), peak_flops("CPU (x86_64, 8 cores)")
    (989400000000000.0, 756000000000000.0, None)

    Args:
        device_name: the result of `Platform.name()`.
    """
    found = _known_of(device_name)
    return find_machine(found).peak("bf16") if isinstance(found, str) else found


def _known_of(device_name: str) -> str | float | None:
    return next((known for pattern, known in _DEVICES if re.search(pattern, device_name)), None)


def _files() -> dict[str, Path]:
    folders = [_OWN]
    if os.environ.get(FOLDER_VARIABLE):
        folders.append(Path(os.environ[FOLDER_VARIABLE]))
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}
