"""Hardware descriptions: what ships is complete and sourced; errors in a user's file point at the mistake."""

import pickle
import re

import pytest

from hyper_parallel.core.machine.description import FOLDER_VARIABLE, Machine, fabric_kind, find_machine, machine_names
from hyper_parallel.core.machine.file import FIGURES, GRADES

NAMES = ["a100-40gb", "a100-80gb", "ascend-910b", "ascend-910b-376", "ascend-910c-superpod", "b200"]
NAMES += ["h100-96gb-500w", "h100-sxm", "h200", "laptop-cpu"]

GOOD = """
title = "Mine"
family = "hopper"
links = "nvlink4"
fabric = "infiniband"
[sources]
sheet = "the vendor's sheet"
[device]
memory = { value = 80, unit = "GB", grade = "datasheet", source = "sheet" }
usable_memory = { value = 74, unit = "GiB", grade = "measured", source = "torch" }
bandwidth = { value = 3, unit = "TB/s", grade = "datasheet", source = "sheet" }
cores = { value = 100, unit = "1", grade = "datasheet", source = "sheet" }
[peak]
bf16 = { value = 1, unit = "PFLOP/s", grade = "datasheet", source = "sheet" }
fp32 = { value = 60, unit = "TFLOP/s", grade = "datasheet", source = "sheet" }
[node]
devices = { value = 4, unit = "1", grade = "datasheet", source = "sheet" }
[intra]
bandwidth = { value = 400, unit = "GB/s", grade = "datasheet", source = "sheet" }
[inter]
bandwidth = { value = 400, unit = "Gbit/s", grade = "datasheet", source = "sheet" }
[host]
op = { value = 5, unit = "us", grade = "assumed", source = "assumed" }
collective = { value = 30, unit = "us", grade = "assumed", source = "assumed" }
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


def test_what_ships_has_these_names():
    assert machine_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source_a_grade_and_a_sensible_size(name):
    hardware = find_machine(name)
    assert hardware.name == name
    assert hardware.title
    assert all(figure.source.strip() for figure in hardware.figures.values())
    assert {figure.grade for figure in hardware.figures.values()} <= set(GRADES)
    assert all(figure.unit == FIGURES[key].unit for key, figure in hardware.figures.items())
    assert all(kind.required <= (key in hardware.figures) for key, kind in FIGURES.items())
    assert hardware.memory_bytes <= hardware.total_bytes
    assert 0 < hardware.allocatable_bytes <= hardware.memory_bytes
    assert hardware.peak("bfloat16") >= 1e9
    assert hardware.value("intra.bandwidth") > hardware.value("inter.bandwidth")


def test_known_figures():
    h100, a100 = find_machine("h100-sxm"), find_machine("a100-80gb")
    assert (h100.peak("bfloat16"), h100.peak("float8_e4m3fn"), h100.memory_bandwidth) == (989.4e12, 1978.9e12, 3.35e12)
    assert (a100.peak("float16"), a100.peak("float8_e4m3fn"), a100.memory_bandwidth) == (312e12, 312e12, 2.039e12)
    assert a100.computed_as("float8_e5m2") == "bf16"
    assert find_machine("h100-96gb-500w").memory_bytes == int(95.04 * 2**30)
    assert find_machine("ascend-910b").topology == "mesh"


def test_a_description_is_found_once_and_travels():
    h100 = find_machine("h100-sxm")
    assert find_machine(h100) is h100
    again = pickle.loads(pickle.dumps(h100))
    assert again == h100
    assert hash(again) == hash(h100)
    assert str(h100) == "h100-sxm"


def test_a_network_of_another_kind():
    h100 = find_machine("h100-sxm").with_network(12.5, "4x100Gb/s Omni-Path per node")
    assert (h100.value("inter.bandwidth"), h100.fabric, h100.grade("inter.bandwidth")) == (
        12.5e9,
        "omni-path",
        "datasheet",
    )
    assert find_machine("h100-sxm").value("inter.bandwidth") == 50e9


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("NVLink4 + 8x400Gb/s NDR IB per node", "infiniband"),
        ("NVLink3/NVSwitch + 8x200Gb/s HDR IB per node (Selene)", "infiniband"),
        ("NVLink4 + EFA 3200Gb/s per node", "efa"),
        ("2 x p4de.24xlarge, EFA", "efa-v1"),
        ("NVLink3 + 1600Gb/s RoCE per node", "roce"),
        ("NVLink4 + RDMA 400Gb/s per GPU", "roce"),
        ("4x100Gb/s Omni-Path", "omni-path"),
        ("infiniband", "infiniband"),
        ("NVLink3 + 400Gb/s per node", "ethernet"),
    ],
)
def test_the_kind_of_a_network_is_read_from_its_description(words, kind):
    assert fabric_kind(words) == kind


def test_other_memory_and_node():
    h100 = find_machine("h100-sxm").with_figures(device__usable_memory=64 * 2**30, device__bandwidth=2e12)
    assert (h100.memory_bytes, h100.memory_bandwidth) == (64 * 2**30, 2e12)
    assert h100.with_figures(node__devices=4).devices_per_node == 4
    with pytest.raises(ValueError, match=r"no such figure\n.*\n  try: 'node.devices'"):
        h100.with_figures(node__device=4)
    with pytest.raises(ValueError, match="a figure is above 0"):
        h100.with_figures(node__devices=0)


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"(?s)cannot find the hardware 'h10-sxm'.*known: a100-40gb.*try: 'h100-sxm'"):
        find_machine("h10-sxm")
    with pytest.raises(TypeError, match="hardware is a int"):
        find_machine(100)


def test_an_unknown_figure():
    with pytest.raises(ValueError, match="it has no such figure"):
        find_machine("h100-sxm").value("peak.fp4")
    with pytest.raises(ValueError, match="cannot tell how fast h100-sxm computes in int4"):
        find_machine("h100-sxm").peak("int4")


def test_a_users_file(write, monkeypatch):
    path = write(GOOD)
    mine = find_machine(path)
    assert (mine.name, mine.title, mine.devices_per_node) == ("mine", "Mine", 4)
    assert mine.value("inter.bandwidth") == 50e9
    assert mine.figures["device.memory"].source == "the vendor's sheet"
    assert mine.figures["device.usable_memory"].source == "torch"
    assert find_machine(str(path)) == mine
    monkeypatch.setenv(FOLDER_VARIABLE, str(path.parent))
    assert "mine" in machine_names()
    assert find_machine("mine") == mine


def test_what_is_written_is_read_again(tmp_path):
    for name in NAMES:
        hardware = find_machine(name)
        again = find_machine(hardware.write(tmp_path / f"{name}.toml"))
        assert isinstance(again, Machine)
        assert again == hardware


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "Mine"', "", r"it does not say its title\n  keys: .*family"),
        ('family = "hopper"', "family = 3", r"mine.toml:3: family is not text"),
        ('links = "nvlink4"', 'topology = "torus"', r"topology is not one of its choices\n.*\n  try: 'switch' or"),
        ('links = "nvlink4"', 'link = "nvlink4"', r"there is no 'link'\n.*\n  try: 'links'"),
        ("memory = {", "memry = {", r"there is no figure 'device.memry'\n.*\n  try: 'device.memory'"),
        ('unit = "GB"', 'unit = "GB/s"', r"(?s)mine.toml:9: device.memory .* is not given in 'GB/s'"),
        ("value = 80", "value = -80", r"the value of device.memory is not a number above 0"),
        ("value = 80", 'value = "80"', r"the value of device.memory is not a number above 0"),
        ("value = 80, ", "", r"the value of device.memory is not a number above 0"),
        ('unit = "GB", grade = "datasheet"', 'unit = "GB", grade = "sure"', r"the grade of device.memory is not"),
        (', source = "sheet" }\nusable', " }\nusable", r"device.memory has no source"),
        ("value = 80", "worth = 80", r"device.memory has an unknown key 'worth'\n.*\n  try:"),
        ('{ value = 80, unit = "GB", grade = "datasheet", source = "sheet" }', "80", r"device.memory is not a table"),
        ("[peak]", "[peaks]", r"there is no 'peaks'"),
        ("title =", "title", r"mine.toml:2: not valid TOML"),
        ("devices = { value = 4", "devices = { value = 0.5", r"(?s)mine.toml:\d+: node.devices is not a whole number"),
        ("value = 80, ", "value = 60, ", r"mine.toml:10: a program can have no more memory .*\n  .* of 60,000"),
        (re.search(r"devices = .*\n", GOOD)[0], "", r"node.devices is missing \(devices of a node\)"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file(write, old, new, message):
    assert old in GOOD
    with pytest.raises(ValueError, match=message) as caught:
        find_machine(write(GOOD.replace(old, new, 1)))
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("cannot read the hardware")
    assert rest[-1].startswith("  try: ")


def test_a_byte_order_mark_is_no_part_of_a_description(write, tmp_path):
    marked = tmp_path / "marked"
    marked.mkdir()
    (marked / "mine.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert find_machine(marked / "mine.toml") == find_machine(write(GOOD))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        find_machine(tmp_path / "none.toml")
