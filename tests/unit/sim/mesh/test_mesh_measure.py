"""Measuring this machine: the fit finds figures it was made with, and a real measurement gives a usable description."""

import math
import random
import re
from collections import Counter

import pytest

import sim
from hyper_parallel.core.machine.description import find_machine
from hyper_parallel.core.machine.links import Links, NodeSpread, collective_seconds
from sim.mesh.cost import Pricing
from sim.mesh.estimate import estimate_run
from sim.mesh.pricing import measure_steps
from sim.mesh.pricing.compute_cost import attention_seconds, matmul_seconds, stream_seconds
from sim.mesh.pricing.measure import _MATMULS, _Clock, _matmuls, measure, merged_samples
from sim.mesh.pricing.measure_fit import OPS, Measurement, descend, fit_hardware, quantile, summary
from sim.mesh.pricing.measure_steps import paired_samples, step_samples, timed_steps
from sim.mesh.program import COMPUTE, Comm, CommGroup, Op, Program, Segment, Touch
from sim.mesh.replay.timeline import replay_time

pytestmark = pytest.mark.tier("test")

MACHINE = {"device": "cpu", "title": "a CPU", "memory": 2**33, "cores": 2}
PEAK, BANDWIDTH, RANKS = 1e11, 2e10, 2
MATMUL = {"floor_us": 1.0, "rate": 0.9, "prologue": 40, "edge": 8, "quantised": 0, "cap": 1.0, "stream": 0.9}
MEMORY = {"floor_us": 1.0, "stream": 1.0, "cache_mib": 20, "cache_speedup": 4}
ATTENTION = {"floor_us": 1.0, "forward": {"64": 0.5, "128": 0.5}, "backward": {"64": 0.4, "128": 0.4}, "causal": 0.8}
ATTENTION |= {"half_forward": 50, "half_backward": 80, "causal_length_forward": 0.5, "causal_length_backward": 0.5}
CURVE = {"efficiency": 0.7, "base_us": 200, "ramp_us": 100, "power": 0.8}


def samples(noise=0.0):
    """What a machine with the figures above would be measured as."""
    draw = random.Random(3)

    def sample(what, seconds, **rest):
        return {"what": what, "seconds": seconds * math.exp(draw.gauss(0, noise)), **rest}

    made = []
    for m, n, k in (*_MATMULS, (1024, 1024, 1024)):
        seconds = matmul_seconds(MATMUL, (1, m, n, k), PEAK, 2, 4, BANDWIDTH)[0]
        made.append(sample("matmul", seconds, dtype="torch.float32", shape=[1, m, n, k]))
    for moved in (2**14, 2**18, 2**20, 2**23, 2**25, 2**30):
        made.append(sample("stream", stream_seconds(MEMORY, moved, BANDWIDTH)[0], bytes=moved))
    made.append(sample("random", 2**23 / BANDWIDTH * 4, bytes=2**23))
    made.append(sample("optimizer", 2**28 / BANDWIDTH * 1.25, bytes=2**28))
    for length, size, causal in ((128, 64, 1), (512, 64, 1), (512, 64, 0), (1024, 64, 1), (512, 128, 1)):
        shape = (1, 8, 8, length, length, size, causal)
        for what in ("attention", "attention_backward"):
            seconds = attention_seconds(ATTENTION, shape, PEAK, backward=what != "attention")[0]
            made.append(sample(what, seconds, dtype="torch.float32", shape=list(shape)))
    made.append(sample("operation", 8e-6))
    links = Links(3e9, False, RANKS, None, 2, 1.0, 0.0, dict.fromkeys((*OPS, "all_gather"), CURVE), {})
    for op in OPS:
        for size in (2**10, 2**14, 2**17, 2**20, 2**22, 2**24, 2**26):
            name = "broadcast" if op == "send" else op
            seconds = collective_seconds(links, name, size, NodeSpread(RANKS, 1, RANKS))[0]
            made.append(sample("collective", seconds, op=op, size=size, ranks=RANKS, busy=0.5))
    return [*made, sample("issue", 3e-5)]


@pytest.mark.parametrize(("noise", "off"), [(0.0, 0.08), (0.05, 0.15)])
def test_the_fit_predicts_the_machine_that_it_was_made_from(noise, off):
    pricing = Pricing(fit_hardware(samples(noise), MACHINE, RANKS))
    errors = []
    for sample in samples():
        if sample["what"] == "matmul":
            op = Op("aten.mm", "matmul", 1, (), (), "float32", tuple(sample["shape"]), 0, 0)
        elif sample["what"].startswith("attention"):
            op = Op("aten.sdpa", sample["what"], 1, (), (), "float32", tuple(sample["shape"]), 0, 0)
        elif sample["what"] == "stream":
            op = Op("aten.add", "memory", 0, (Touch(1, sample["bytes"]),), (), "float32", (), 0, 0)
        else:
            continue
        errors.append(abs(pricing.op(op).seconds / (sample["seconds"] + 7e-6) - 1))  # in a model an op costs 8 us
    assert quantile(errors, 0.5) < off / 2
    assert quantile(errors, 0.9) < 2 * off
    errors = []
    for sample in samples():
        if sample["what"] == "collective":
            comm = Comm(sample["op"], 0, sample["size"], sample["size"], "float32", 0, 1, 0, 1)
            errors.append(
                abs(pricing.comm(comm, CommGroup("dp", range(RANKS)), rank=0).seconds / sample["seconds"] - 1)
            )
    assert quantile(errors, 0.9) < 2 * off


def test_what_is_fitted_says_so():
    hardware = fit_hardware(samples(), MACHINE, RANKS)
    assert hardware.memory_bytes == 2**33
    assert hardware.devices_per_node == RANKS
    assert hardware.allocator == "none"
    assert hardware.grade("device.bandwidth") == hardware.grade("peak.fp32") == "measured"
    assert hardware.grade("inter.bandwidth") == "assumed"
    assert "2 processes of 2 cores" in hardware.figures["peak.fp32"].source
    assert hardware.curves["matmul"]["grade"] == "measured"
    assert hardware.curves["matmul"]["error"][0] < 0.05
    assert hardware.curves["memory"]["optimizer"] == pytest.approx(0.8, rel=0.05)
    assert hardware.value("host.op") == 0


def test_a_machine_of_one_process_has_no_links():
    alone = [sample for sample in samples() if sample["what"] not in ("collective", "issue")]
    hardware = fit_hardware(alone, MACHINE, 1)
    assert hardware.grade("intra.bandwidth") == "assumed"
    assert "links" not in hardware.curves
    assert Pricing(hardware).comm(Comm("all_gather", 0, 8, 8, "", 0, 1, 0), CommGroup("dp", range(1))).seconds > 0


@pytest.mark.parametrize(
    ("device", "title", "words"),
    [
        ("npu", "Ascend910B4", ("ascend", "hccs", "mesh", "roce", "hccl")),
        ("cuda", "NVIDIA A100-SXM4-80GB", ("ampere", "nvlink3", "switch", "infiniband", "nccl")),
        ("cuda", "a GPU", ("hopper", "nvlink4", "switch", "infiniband", "nccl")),
    ],
)
def test_a_device_is_described_in_its_own_words(tmp_path, device, title, words):
    hardware = fit_hardware(samples(), {**MACHINE, "device": device, "title": title}, RANKS)
    text = hardware.write(tmp_path / "here.toml").read_text()
    assert (hardware.family, hardware.links, hardware.topology, hardware.fabric, hardware.backend) == words
    assert all(f'"{word}"' in text for word in words)
    assert device != "npu" or not re.search("gpu|nvlink|nccl", text, re.IGNORECASE)
    assert Pricing(hardware).hardware.title == f"{title}, 2 processes, as measured"


def test_the_probes_communicate_what_hccl_takes():
    found = sim.run(lambda: _matmuls(_Clock("cpu", 1e-6)), 2, backend="hccl")
    assert [sample["shape"] for sample in found[0]] == [sample["shape"] for sample in found[1]]


@pytest.mark.tier("deep")
def test_this_machine(tmp_path):
    hardware = measure(2 if find_machine("laptop-cpu").devices_per_node == 2 else 1, "cpu", seconds=1e-4, steps=False)
    assert hardware.peak("float32") > 1e8
    assert hardware.memory_bandwidth > 1e7
    again = find_machine(hardware.write(tmp_path / "here.toml"))
    assert again.figures == hardware.figures
    pricing = Pricing(again)
    for op in OPS:
        assert pricing.comm(Comm(op, 0, 2**20, 2**20, "", 0, 1, 0, 1), CommGroup("dp", range(2)), rank=0).seconds > 1e-6
    assert pricing.op(Op("aten.mm", "matmul", 1, (), (), "float32", (1, 64, 64, 64), 0, 0)).grade == "measured"


def test_what_steps_take_beside_kernels_is_the_hosts():
    host = [{"what": "host", "ops": 100, "comms": 0, "seconds": 100 * 2e-5}]
    host += [{"what": "host", "ops": 80, "comms": 10, "seconds": 80 * 2e-5 + 10 * 3e-4}]
    hardware = fit_hardware([*samples(), *host], MACHINE, RANKS)
    assert hardware.value("host.op") == pytest.approx(2e-5)
    assert hardware.value("host.collective") == pytest.approx(3e-4)
    assert hardware.curves["matmul"]["floor_us"] == 1.0
    pricing = Pricing(hardware)
    assert pricing.overlap_slowdown == 1.5
    assert pricing.is_synchronous
    assert not Pricing(find_machine("h100-sxm")).is_synchronous


def test_communication_takes_of_a_cpu_what_gloo_was_busy_in_all_processes():
    fast = [{**sample, "busy": 0.75, "seconds": 0.9 * sample["seconds"]} for sample in samples() if "busy" in sample]
    slow = [sample for sample in samples() if "busy" in sample]  # 0.5
    merged = merged_samples([fast, slow])
    assert [sample["seconds"] for sample in merged] == [sample["seconds"] for sample in fast]
    assert {sample["busy"] for sample in merged} == {0.625}
    rest = [sample for sample in samples() if "busy" not in sample]
    fitted = Pricing(fit_hardware([*rest, *merged], MACHINE, RANKS))
    near, far = CommGroup("dp", range(RANKS)), CommGroup("dp", (0, RANKS))
    gather = Comm("all_gather", 0, 2**22, 2**22, "float32", 0, 1, 0, 1)
    assert fitted.work_seconds(gather, near) == pytest.approx(0.625 * fitted.comm(gather, near).seconds)
    message = gather._replace(op="send")
    assert fitted.work_seconds(message, near) == pytest.approx(0.625 * fitted.comm(message, near, rank=0).seconds)
    for comm in (gather, message):  # a network is waited for
        assert fitted.work_seconds(comm, far) == fitted.work_seconds(comm, near)
        assert fitted.comm(comm, far).seconds > 5 * fitted.comm(comm, near, rank=0).seconds
    assert fitted.work_seconds(gather._replace(op="copy_to_host"), near) == 0
    assert Pricing(find_machine("laptop-cpu")).work_seconds(gather, near) == 0  # nobody has measured it
    assert Pricing(find_machine("h100-sxm")).work_seconds(gather, near) == 0


def test_the_host_of_a_cpu_adds_to_what_it_computes():
    host = [{"what": "host", "ops": 100, "comms": 0, "seconds": 100 * 1e-3}]
    fitted = fit_hardware([*samples(), *host], MACHINE, RANKS)
    op = Op("aten.mm", "matmul", 1, (), (), "float32", (1, 1024, 1024, 1024), COMPUTE, 0)
    key = ("forward", 0, "only")
    program = Program(0, 1, 1, segments={key: Segment(*key, events=[op] * 5)}, order=[(key, -1)])
    kernel = Pricing(fitted).op(op).seconds
    assert kernel > 1e-3  # so that a host ahead of its device would be hidden
    found = replay_time([program], Pricing(fitted))
    assert found.step == pytest.approx(5 * (kernel + 1e-3))
    assert found.slowest.host == pytest.approx(5e-3)


def test_measured_operations_are_paired_with_recorded_ones_of_as_many_calls():
    mm = Op("aten.mm", "matmul", 1, (), (), "float32", (1, 4, 4, 4), COMPUTE, 0)
    add = Op("aten.add", "memory", 0, (Touch(1, 64),), (), "float32", (), COMPUTE, 0)
    measured = {"aten.mm": [1e-6, 3e-6, 2e-6], "aten.add": [5e-6], "aten.sub": [1.0]}
    found = paired_samples([mm, add, mm, mm, add], measured)
    assert found == [{"what": "matmul", "dtype": "torch.float32", "shape": [1, 4, 4, 4], "seconds": 2e-6}]
    found = paired_samples([add], measured)
    assert found == [{"what": "step stream", "bytes": 64, "seconds": 5e-6}]


def test_steps_of_tiny_models_are_timed_and_paired_with_their_recordings(monkeypatch, tmp_path):
    monkeypatch.setattr(measure_steps, "_SHAPES", ((16, 1, 256, 8),))
    monkeypatch.setattr(measure_steps, "_TIMED", 2)
    monkeypatch.setattr(measure_steps, "_PROFILED", 2)
    results = sim.run(lambda: timed_steps(0, 1, str(tmp_path)), world_size=1)
    calls = {name: len(times) for name, times in results[0][0]["operations"].items()}
    assert calls["aten.rsqrt"] == 3  # the norms of a block and the last one, as a CPU computes them
    found = step_samples(results, 1)
    made = {sample["what"] for sample in found}
    assert made == {"matmul", "attention", "attention_backward", "step stream", "host"}
    (config, ranks) = measure_steps._runs(1)[0]
    (program,) = estimate_run(config, ranks, "laptop-cpu").programs
    events = [event for segment, _ in program.segments_in_order() for event in segment.events]
    recorded = Counter(event.name for event in events if isinstance(event, Op) and event.kind != "host")
    assert found[-1]["ops"] == recorded.total() > 100
    odd = {name for name in recorded if recorded[name] != calls.get(name)}
    assert odd <= {"aten.add", "aten.add_", "aten.zeros", "aten.where"}  # sums of gradients, and the trainer's counts


def test_more_processes_than_cores():
    with pytest.raises(ValueError, match=r"cannot measure this machine with 0 processes(?s:.*)cores: "):
        measure(0, "cpu")
    with pytest.raises(ValueError, match="processes is not from 1 to the number of cores"):
        measure(10**6, "cpu")
    with pytest.raises(ValueError, match="processes is not from 1"):
        measure(1.5, "cpu")  # type: ignore[arg-type]


def test_outliers_do_not_rule_a_fit():
    rows = [Measurement("", 2e-6 * size, lambda at, size=size: at["each"] * size) for size in range(1, 12)]
    rows[3] = rows[3]._replace(seconds=1.0)
    fitted = descend(rows, {"each": 1e-6}, {"each": (1e-9, 1.0)})
    assert fitted["each"] == pytest.approx(2e-6, rel=0.02)
    assert summary(rows, fitted)[0] < 0.02
    assert math.isnan(quantile([], 0.5))
    assert [quantile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 0.75, 1.0)] == [1.0, 3.0, 4.0, 4.0]
