"""Prices: limits and orders that physics demands, unknown operations, and the errors of the fits as recorded."""

import dataclasses
import itertools
import random

import pytest

from benchmarks import fit_costs
from hyper_parallel.core.machine.calibration import load_calibration
from hyper_parallel.core.machine.description import find_machine, machine_names
from hyper_parallel.core.machine.links import COLLECTIVES, NodeSpread, collective_seconds, spread_of
from sim.mesh.cost import Pricing, UnknownOperation, weakest
from sim.mesh.program import Comm, CommGroup, Free, Op, Place, Touch

HARDWARE = machine_names()
MIB = 2**20


def matmul(m, n, k, batch=1, dtype="bfloat16"):
    return Op("aten.mm", "matmul", 2 * batch * m * n * k, (), (), dtype, (batch, m, n, k), 0, 0)


def attention(
    length, causal=True, size=128, backward=False, name="aten._scaled_dot_product_flash_attention", keys=None
):
    kind = "attention_backward" if backward else "attention"
    return Op(name, kind, 1, (), (), "bfloat16", (1, 8, 8, length, keys or length, size, int(causal)), 0, 0)


def stream(moved, kind="memory"):
    return Op("aten.add", kind, 0, (Touch(1, moved // 2),), (Touch(2, moved - moved // 2),), "bfloat16", (), 0, 0)


def comm(op, size, peer=None, messages=1):
    return Comm(op, 0, size, size, "bfloat16", 0, 1, 0, peer, messages)


def group(n, stride=1):
    return CommGroup("dp", range(0, n * stride, stride))


@pytest.fixture(scope="module")
def pricing():
    return Pricing(find_machine("h100-sxm"))


# -- operations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HARDWARE)
def test_no_matmul_beats_the_peak_or_the_memory(name):
    hardware = find_machine(name)
    pricing, draw = Pricing(hardware), random.Random(1)
    for _ in range(200):
        m, n, k = (2 ** draw.randint(0, 14) + draw.randint(0, 3) for _ in range(3))
        batch = draw.choice((1, 1, 4, 64))
        price = pricing.op(matmul(m, n, k, batch))
        seconds, floor = price.seconds, 1e-7
        assert seconds >= 2 * batch * m * n * k / hardware.peak("bfloat16") + floor
        assert seconds >= 2 * batch * (m * k + k * n + m * n) / hardware.memory_bandwidth + floor
        assert price.bound in ("compute", "memory", "latency")


ALONE = load_calibration().replace({"matmul.blackwell.sustained": 1.0})
"""Products on a device that has nothing else to do: in hours of training a B200 attains less of its peak."""


@pytest.mark.parametrize("name", ["h100-sxm", "a100-80gb", "b200", "ascend-910b"])
def test_a_larger_matmul_takes_longer_and_attains_more(name):
    pricing = Pricing(find_machine(name), ALONE)
    sizes = [2**i for i in range(6, 15)]
    seconds = [pricing.op(matmul(size, size, size)).seconds for size in sizes]
    assert seconds == sorted(seconds)
    rates = [size**3 / took for size, took in zip(sizes, seconds, strict=True)]
    assert all(later >= 0.95 * earlier for earlier, later in itertools.pairwise(rates))
    assert 0.7 < 2 * rates[-1] / find_machine(name).peak("bfloat16") < 0.9


def test_each_dimension_of_a_matmul_counts(pricing):
    base = pricing.op(matmul(4096, 4096, 4096)).seconds
    for shape in ((8192, 4096, 4096), (4096, 8192, 4096), (4096, 4096, 8192)):
        assert 1.8 * base < pricing.op(matmul(*shape)).seconds < 2.2 * base
    assert pricing.op(matmul(1024, 1024, 1024, batch=4)).seconds < 4 * pricing.op(matmul(1024, 1024, 1024)).seconds


def test_a_tensor_parallel_shard_of_a_matmul_takes_more_than_its_share(pricing):
    whole, shard = pricing.op(matmul(4096, 4096, 1024)).seconds, pricing.op(matmul(4096, 512, 1024)).seconds
    assert shard > 1.1 * whole / 8


def test_dtypes(pricing):
    halves = [pricing.op(matmul(8192, 8192, 8192, dtype=dtype)).seconds for dtype in ("bfloat16", "float16")]
    assert halves[0] == halves[1]
    fp8 = pricing.op(matmul(8192, 8192, 8192, dtype="float8_e4m3fn")).seconds
    fp32 = pricing.op(matmul(8192, 8192, 8192, dtype="float32")).seconds
    assert 0.5 * halves[0] < fp8 < 0.6 * halves[0]  # the best fp8 matmul attains 72 %, the best in bf16 80 %
    assert fp32 > 10 * halves[0]
    a100 = Pricing(find_machine("a100-80gb"))
    assert a100.op(matmul(512, 512, 512, dtype="float8_e4m3fn")) == a100.op(matmul(512, 512, 512))


def test_sustained_lowers_matmuls_and_attention(pricing):
    known = load_calibration().replace({"matmul.hopper.sustained": 0.5})
    slower = Pricing(find_machine("h100-sxm"), known)
    for op in (matmul(8192, 8192, 8192), attention(8192)):
        assert slower.op(op).seconds == pytest.approx(2 * pricing.op(op).seconds, rel=0.02)
    of_one = load_calibration().replace({"device.h200.matmul.sustained": 0.5})
    assert Pricing(find_machine("h100-sxm"), of_one).op(matmul(512, 512, 512)) == pricing.op(matmul(512, 512, 512))
    ratio = Pricing(find_machine("h200"), of_one).op(matmul(8192, 8192, 8192)).seconds
    assert ratio == pytest.approx(2 * pricing.op(matmul(8192, 8192, 8192)).seconds, rel=0.02)
    b200 = find_machine("b200")  # whose attention has a figure of its own
    assert Pricing(b200, ALONE).op(attention(8192)) == Pricing(b200).op(attention(8192))
    assert (
        Pricing(b200, ALONE).op(matmul(8192, 8192, 8192)).seconds < Pricing(b200).op(matmul(8192, 8192, 8192)).seconds
    )


@pytest.mark.parametrize(
    ("kernels", "heads", "length", "size", "causal", "backward", "published"),
    [
        # TFLOP/s on B200: SimuMax's table, Dao-AILab/flash-attention#2605 and #1589, meta-pytorch/tritonbench#171
        ("cudnn", 64, 4096, 128, True, False, 961),
        ("cudnn", 128, 4096, 128, True, False, 1097),
        ("cudnn", 16, 32768, 128, True, False, 1316),
        ("cudnn", 64, 4096, 128, True, True, 818),
        ("cudnn", 16, 32768, 128, True, True, 979),
        ("cudnn", 64, 16384, 64, False, False, 1157),
        ("cudnn", 64, 4096, 64, True, False, 977),
        ("flash2", 128, 8192, 128, False, False, 362),
        ("flash2", 64, 16384, 64, False, False, 379),
        ("flash2", 64, 16384, 64, False, True, 334),
    ],
)
def test_attention_on_blackwell(kernels, heads, length, size, causal, backward, published):
    pricing = Pricing(find_machine("b200").with_attention(kernels))
    op = attention(length, causal, size, backward)._replace(shape=(1, heads, heads, length, length, size, int(causal)))
    flops = (10 if backward else 4) * heads * length**2 * size / (2 if causal else 1)
    assert flops / pricing.op(op).seconds / 1e12 == pytest.approx(published, rel=0.15)


def test_heads_that_do_not_start_at_16_bytes(pricing):
    known = load_calibration().replace({"matmul.hopper.unaligned": 0.1})
    slower = Pricing(find_machine("h100-sxm"), known)

    def ratio(batch, n, k, dtype="bfloat16"):
        op = Op("aten.bmm", "matmul", 2 * batch * 2048 * n * k, (), (), dtype, (batch, 2048, n, k), 0, 0)
        return slower.op(op).seconds / pricing.op(op).seconds

    assert 7 < ratio(32, 2048, 108) < 10, "some of it is not computing"
    assert 4 < ratio(32, 108, 2048) < 10
    assert ratio(32, 2048, 104) == ratio(32, 2048, 112) == ratio(32, 104, 2048) == 1
    assert ratio(32, 2048, 108, "float32") == 1, "108 numbers of 4 bytes are 27 times 16 bytes"
    assert ratio(1, 2048, 108) == 1, "one product starts where its tensor starts"


@pytest.mark.parametrize(
    ("kernels", "length", "size", "causal", "backward", "published"),
    [
        # TFLOP/s on H100 SXM5: FlashAttention-3 (arXiv 2407.08608), figures 5 and 6
        ("flash2", 16384, 128, False, False, 370),
        ("flash2", 2048, 128, False, False, 362),
        ("flash2", 16384, 64, False, False, 324),
        ("flash2", 16384, 128, False, True, 322),
        ("flash2", 2048, 128, False, True, 291),
        ("flash2", 16384, 128, True, False, 335),
        ("flash2", 2048, 128, True, False, 298),
        ("flash3", 16384, 128, False, False, 648),
        ("flash3", 2048, 128, False, False, 625),
        ("flash3", 16384, 64, False, False, 497),
        ("flash3", 16384, 128, False, True, 561),
        ("flash3", 2048, 128, False, True, 501),
        ("flash3", 16384, 128, True, False, 616),
        ("flash3", 2048, 128, True, False, 521),
        ("cudnn", 16384, 128, False, False, 595),
        ("cudnn", 16384, 128, False, True, 516),
        ("cudnn", 16384, 128, True, False, 539),
        ("flash2", 16384, 256, True, False, 298),
        ("flash3", 16384, 256, True, False, 642),
        ("cudnn", 16384, 256, True, False, 509),
        ("flash2", 2048, 64, False, True, 264),
        ("flash3", 2048, 64, False, True, 422),
        ("cudnn", 2048, 64, False, True, 395),
    ],
)
def test_attention_comes_as_close_to_the_peak_as_published(kernels, length, size, causal, backward, published):
    pricing = Pricing(find_machine("h100-sxm").with_attention(kernels))
    sequences = 16384 // length  # as the papers do: 16k tokens, 2048 wide
    op = attention(length, causal, size, backward)._replace(
        shape=(sequences, 2048 // size, 2048 // size, length, length, size, int(causal))
    )
    seconds = pricing.op(op).seconds
    flops = (10 if backward else 4) * 16384 * length * 2048 / (2 if causal else 1)
    assert flops / seconds / 1e12 == pytest.approx(published, rel=0.06)


def test_attention_kernels(pricing):
    h100 = find_machine("h100-sxm")
    with_flash2 = Pricing(h100, attention="flash2").op(attention(8192)).seconds
    assert Pricing(h100, attention="flash3").op(attention(8192)).seconds < 0.7 * with_flash2
    assert pricing.op(attention(8192)).seconds < 0.8 * with_flash2  # cuDNN's, which torch takes from 2.11 on
    by_name = pricing.op(attention(8192, name="aten._scaled_dot_product_cudnn_attention"))
    assert by_name == Pricing(h100, attention="cudnn").op(attention(8192))
    with pytest.raises(
        ValueError, match=r"cannot price attention of 'flash9' kernels on h100-sxm(?s:.*)known: .*flash2"
    ):
        Pricing(h100, attention="flash9")


def test_a_causal_attention_takes_half(pricing):
    assert pricing.op(attention(32768)).seconds < 0.6 * pricing.op(attention(32768, causal=False)).seconds
    # The last queries of a longer sequence see nearly all of its keys
    assert (
        pricing.op(attention(1024, keys=32768)).seconds > 0.9 * pricing.op(attention(1024, False, keys=32768)).seconds
    )


@pytest.mark.parametrize("kind", ["memory", "random", "optimizer", "fused"])
def test_kernels_that_move_bytes(pricing, kind):
    h100 = find_machine("h100-sxm")
    small, large = pricing.op(stream(16, kind)), pricing.op(stream(2**31, kind))
    assert small.bound == "latency"
    assert 1e-6 < small.seconds < 5e-6
    assert large.bound == "memory"
    assert 0.6 < 2**31 / large.seconds / h100.memory_bandwidth < 1


# What torch's profiler has said of a step of Llama 3.2 1B on an H200, 2 x 4096 tokens: microseconds of all such kernels
# (docs/benchmarks.md, On an H200), and the bytes and elements of one.
OF_AN_H200 = {
    "logits less their maximum, which are bfloat16, to float32": (4, "aten.sub", "general", 10_220, 3.15e9, 525e6),
    "float32 less a column": (2, "aten.sub_", "scalar", 3318, 4.2e9, 525e6),
    "float32 times a column": (2, "aten.mul_", "scalar", 3313, 4.2e9, 525e6),
    "exponentials": (4, "aten.exp_", "memory", 3980, 4.2e9, 0),
    "gradients to float32": (146, "aten.copy_", "scalar", 4144, 50.8e6, 8.46e6),
    "gates times": (48, "aten.mul", "memory", 4365, 402e6, 0),
    "rotary positions, of the halves of heads": (64, "aten.cat", "general", 3069, 41.9e6, 10.5e6),
    "rotary positions, products": (128, "aten.mul", "scalar", 4533, 42.5e6, 10.6e6),
    "gradients of norms": (33, "sim._fused_rms_norm_backward", "memory", 2387, 100.6e6, 0),
    "clipped": (1, "aten._foreach_mul_", "memory", 2723, 9.89e9, 0),
    "AdamW": (2, "aten._fused_adamw_", "optimizer", 10_016, 17.3e9, 0),
}


@pytest.mark.parametrize("what", OF_AN_H200)
def test_kernels_take_as_long_as_on_an_h200(what):
    number, name, kind, measured, moved, elements = OF_AN_H200[what]
    shape = (int(elements),) if elements else ()
    op = stream(moved, kind)._replace(name=name, shape=shape)
    seconds = number * Pricing(find_machine("h200")).op(op).seconds
    assert seconds * 1e6 == pytest.approx(measured, rel=0.12)


def test_published_kernels_of_ascend():
    """hw-native-sys/pto-isa: matmuls on 24 cores, and torch_npu's attention of one head on a 910B2 of 354 TFLOP/s."""
    pricing = Pricing(find_machine("ascend-910b-376"))
    for size, published in ((1536, 38.8e-6), (3072, 206.7e-6), (6144, 1506e-6), (7680, 3168e-6)):
        assert pricing.op(matmul(size, size, size, dtype="float16")).seconds == pytest.approx(published, rel=0.12)
    pricing = Pricing(find_machine("ascend-910b-376").with_figures(peak__fp16=354e12, peak__bf16=354e12))
    for length, published in ((8192, 353e-6), (16384, 1118e-6), (32768, 3646e-6)):
        one_head = attention(length)._replace(shape=(1, 1, 1, length, length, 128, 0))
        assert pricing.op(one_head).seconds == pytest.approx(published, rel=0.2)


def test_softmaxes_of_long_rows_are_read_twice(pricing):
    softmax = stream(2**31)._replace(name="aten._log_softmax")
    assert pricing.op(softmax).seconds > 1.3 * pricing.op(stream(2**31)).seconds


def test_what_the_host_does_takes_nothing_of_the_device(pricing):
    assert pricing.op(Op("aten.view", "host", 0, (), (), "", (), 0, 0)).seconds == 0


def test_a_product_of_no_known_shape_is_a_plain_roofline(pricing):
    price = pricing.op(Op("aten.mv", "matmul", 10**12, (), (), "bfloat16", (), 0, 0))
    assert price.grade == "assumed"
    assert price.seconds > 10**12 / 989.4e12


@pytest.mark.parametrize("kind", ["unknown", "sparse"])
def test_an_unknown_operation_is_an_error_that_names_it(pricing, kind):
    with pytest.raises(
        UnknownOperation, match=rf"cannot price the operation 'aten.foo': its kind is {kind!r}"
    ) as caught:
        pricing.op(Op("aten.foo", kind, 5, (Touch(1, 8),), (), "float32", (), 0, 0))
    assert "reads and writes: 8 bytes" in str(caught.value)
    assert "sim/mesh/data/operations.toml" in str(caught.value)


# -- communication ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HARDWARE)
@pytest.mark.parametrize("op", sorted(COLLECTIVES))
def test_more_bytes_take_longer_and_no_link_is_beaten(name, op):
    hardware = find_machine(name)
    pricing = Pricing(hardware)
    for n, stride in ((2, 1), (8, 1), (16, 1), (64, 1), (8, 8), (64, 8)):
        seconds = [pricing.comm(comm(op, size), group(n, stride)).seconds for size in (0, 2**10, MIB, 64 * MIB, 2**32)]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
        if op != "barrier":
            wire = 2**32 * (n - 1) / n
            rate = max(hardware.value("intra.bandwidth"), hardware.devices_per_node * hardware.value("inter.bandwidth"))
            assert seconds[-1] > 0.9 * wire / rate


def test_a_group_of_one_copies(pricing):
    alone = pricing.comm(comm("all_gather", 2**30), group(1)).seconds
    assert 2**31 / 3.35e12 < alone < 2 * 2**31 / 3.35e12


def test_the_switch_computes_all_reduces_of_many_ranks_only(pricing):
    def bus(n):
        return 2 * 2**33 * (n - 1) / n / pricing.comm(comm("all_reduce", 2**33), group(n)).seconds / 1e9

    # H200, 8 GiB: 363 and 473 GB/s with 4 and 8 of them (stas00/ml-engineering)
    assert bus(4) == pytest.approx(363, rel=0.05)
    assert bus(8) == pytest.approx(473, rel=0.03)
    gather = 2**34 * 7 / 8 / pricing.comm(comm("all_gather", 2**34), group(8)).seconds / 1e9
    assert gather == pytest.approx(361, rel=0.03)


def test_a_mesh_of_links_gains_with_each_rank():
    pricing = Pricing(find_machine("ascend-910b"))
    rates = [2**34 / pricing.comm(comm("all_gather", 2**34), group(n)).seconds / 1e9 for n in (2, 4, 8)]
    assert rates == pytest.approx([38, 76, 152], rel=0.05)  # published: 38, 64, 149


def test_over_nodes_a_mesh_of_links_has_those_between_the_ranks_of_one_node():
    """Two ranks on each of two nodes: one link carries three quarters of the tensor, of two ranks alone a half."""
    pricing = Pricing(find_machine("ascend-910b"))
    two = pricing.comm(comm("all_gather", 2**34), group(2))
    over_nodes = pricing.comm(comm("all_gather", 2**34), CommGroup("dp", (0, 1, 8, 9)))
    assert over_nodes.bound == "link"
    assert over_nodes.seconds / two.seconds == pytest.approx(1.5, rel=0.02)


def test_groups_of_many_nodes_use_the_adapters_of_their_ranks(pricing):
    """8 groups of one rank per node share the adapters; a group of 8 ranks per node has them all."""
    whole = pricing.comm(comm("all_gather", 2**32), group(64)).seconds
    alone = pricing.comm(comm("all_gather", 2**32), group(8, 8)).seconds
    assert 6 < alone / whole < 8
    assert pricing.crosses_nodes(group(8, 8))
    assert not pricing.crosses_nodes(group(8))
    assert pricing.crosses_nodes(group(9))


def test_dgx_plateaus():
    """NVIDIA: 192 GB/s of bus bandwidth between DGX A100, 370 between DGX H100."""
    for name, published in (("a100-80gb", 192), ("h100-sxm", 370)):
        seconds = Pricing(find_machine(name)).comm(comm("all_reduce", 2**36), group(128)).seconds
        assert 2 * 2**36 * 127 / 128 / seconds / 1e9 == pytest.approx(published, rel=0.06)


def test_all_reduces_of_many_nodes():
    """64 MiB: 217 GB/s on 4 nodes, 112 on 512; 16 GiB: about 350 on all (stas00/ml-engineering)."""
    pricing = Pricing(find_machine("h100-sxm"))

    def bus(size, nodes):
        n = 8 * nodes
        return 2 * size * (n - 1) / n / pricing.comm(comm("all_reduce", size), group(n)).seconds / 1e9

    assert bus(64 * MIB, 4) == pytest.approx(217, rel=0.15)
    assert bus(64 * MIB, 512) == pytest.approx(112, rel=0.15)
    assert bus(2**34, 4) == pytest.approx(350, rel=0.1)
    assert bus(2**34, 512) == pytest.approx(350, rel=0.1)


def test_more_nodes_take_longer(pricing):
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"):
        for stride in (1, 8):
            seconds = [pricing.comm(comm(op, 64 * MIB), group(n, stride)).seconds for n in (16, 64, 256, 1024)]
            assert seconds == sorted(seconds)


def test_a_broadcast_goes_along_a_chain_of_nodes_a_chunk_at_a_time(pricing):
    """NCCL hands 512 KiB of each channel on when they are there; the adapter attains a little less than its 50 GB/s."""

    def node_us(size, stride=1):
        near, far = (pricing.comm(comm("broadcast", size), group(n * 8 // stride, stride)).seconds for n in (16, 116))
        return 1e6 * (far - near) / 100

    chunk = 1e6 * 2**19 / 50e9
    assert chunk < node_us(64 * MIB) - node_us(0) < 1.2 * chunk
    assert node_us(2**32) == pytest.approx(node_us(64 * MIB), rel=1e-3)  # however large it is
    assert node_us(MIB) - node_us(0) == pytest.approx((node_us(64 * MIB) - node_us(0)) / 4)  # 128 KiB a channel
    assert node_us(MIB, stride=8) == pytest.approx(node_us(64 * MIB, stride=8), rel=1e-3)


def test_nccl_gathers_along_trees_where_nodes_have_one_rank_each(pricing):
    def seconds(op, size, n, stride, links=pricing.links):
        spread = NodeSpread(n, n, 1) if stride == 8 else NodeSpread(n, n // 8, 8)
        return collective_seconds(links, op, size, spread)[0]

    rings = dataclasses.replace(pricing.links, trees=False)
    for op in ("all_gather", "reduce_scatter"):
        for n in (64, 4096, 65536):
            assert seconds(op, MIB, n, 1) == seconds(op, MIB, n, 1, rings)  # NCCL has them for one rank on a node alone
            assert seconds(op, MIB, n, 8) <= seconds(op, MIB, n, 8, rings)
        assert seconds(op, MIB, 65536, 8) < 0.75 * seconds(op, MIB, 65536, 8, rings)
        assert seconds(op, 2**33, 16, 8) == seconds(op, 2**33, 16, 8, rings)  # large ones are as fast as rings
    assert seconds("all_reduce", MIB, 65536, 8) == seconds("all_reduce", MIB, 65536, 8, rings)
    assert not Pricing(find_machine("ascend-910b")).links.trees


def test_messages(pricing):
    near, far = (pricing.comm(comm("send", 64 * MIB, peer), CommGroup("pp", ()), rank=0).seconds for peer in (1, 8))
    assert 64 * MIB / 450e9 < near < 64 * MIB / 50e9 < far < 2 * 64 * MIB / 50e9
    assert pricing.comm(comm("recv", 64 * MIB, 8), CommGroup("pp", ())).seconds == far


def test_a_message_over_a_mesh_of_links_takes_one_of_them():
    """As each rank does that gathers with one other."""
    pricing = Pricing(find_machine("ascend-910b"))
    sent = pricing.comm(comm("send", 2**33, 1), CommGroup("pp", ()), rank=0).seconds
    assert sent == pytest.approx(pricing.comm(comm("all_gather", 2**34), group(2)).seconds, rel=0.05)


def test_few_bytes_are_bound_by_latency_and_many_by_what_they_cross(pricing):
    def bound(op, size, ranks=8, peer=None):
        return pricing.comm(comm(op, size, peer), group(ranks), rank=0).bound

    assert [bound("all_gather", size) for size in (2**10, 2**30)] == ["latency", "link"]
    assert [bound("all_reduce", size, ranks=64) for size in (2**10, 2**30)] == ["latency", "network"]
    assert [bound("send", size, peer=1) for size in (2**10, 2**30)] == ["latency", "link"]
    assert bound("send", 2**30, peer=8) == "network"


def test_copies_between_host_and_device_take_their_link(pricing):
    def seconds(op, size, of=pricing):
        return of.comm(comm(op, size), CommGroup("host to device", ()))

    pinned = seconds("copy_to_device", 10**9)
    assert 1 / 64 < pinned.seconds < 1 / 45
    assert pinned.grade == "calibrated"  # a measured share of the datasheet's link
    assert seconds("copy_to_host", 10**9) == pinned
    assert seconds("copy_to_device_pageable", 10**9).seconds > 2 * pinned.seconds
    assert seconds("copy_to_device_pageable", 10**9).grade == "assumed"
    assert seconds("copy_to_device", 4).seconds > 1e-6
    assert seconds("copy_to_device", 10**9, Pricing(find_machine("a100-80gb"))).seconds > 1.9 * pinned.seconds
    hardware = find_machine("h100-sxm")
    unknown = {name: figure for name, figure in hardware.figures.items() if name != "host.link"}
    assumed = seconds("copy_to_device", 10**9, Pricing(dataclasses.replace(hardware, figures=unknown)))
    assert assumed.grade == "assumed"
    assert assumed.seconds > pinned.seconds
    assert pricing.host_seconds(comm("copy_to_device", 1)) == pricing.host_seconds(matmul(1, 1, 1))
    with pytest.raises(UnknownOperation, match="copy_to_disk"):
        seconds("copy_to_disk", 1)


def test_the_host_computes_as_fast_as_its_memory(pricing):
    price = pricing.op(stream(10**9, "on_host"))
    assert 10**9 / 76.8e9 < price.seconds < 3 * 10**9 / 76.8e9
    assert (price.grade, price.bound) == ("assumed", "host")
    faster = Pricing(find_machine("h100-sxm").with_figures(host__bandwidth=153.6e9))
    assert faster.op(stream(10**9, "on_host")).seconds == pytest.approx(price.seconds / 2)


def test_sharing_takes_bandwidth(pricing):
    for op, ranks in (
        ("all_gather", group(8)),
        ("all_reduce", group(64)),
        ("all_to_all", group(16)),
        ("send", group(2)),
    ):
        one, two = (pricing.comm(comm(op, 2**30, peer=1), ranks, share).seconds for share in (1.0, 2.0))
        assert 1.7 * one < two <= 2.05 * one


def test_tensors_that_go_together_are_cheaper_than_one_by_one(pricing):
    together = pricing.comm(comm("all_gather", 8 * MIB, messages=8), group(8)).seconds
    assert pricing.comm(comm("all_gather", 8 * MIB), group(8)).seconds < together
    assert together < 8 * pricing.comm(comm("all_gather", MIB), group(8)).seconds


def test_an_uneven_exchange_is_as_long_as_its_busiest_rank(pricing):
    even = comm("all_to_all", 64 * MIB)
    skewed = even._replace(moved=256 * MIB)
    assert pricing.comm(skewed, group(8)).seconds > 3 * pricing.comm(even, group(8)).seconds


def test_an_unknown_communication_is_an_error(pricing):
    with pytest.raises(UnknownOperation, match="cannot price the communication 'gossip'"):
        pricing.comm(comm("gossip", 1), group(8))


def test_where_ranks_lie():
    assert spread_of(range(16), 8) == NodeSpread(16, 2, 8)
    assert spread_of(range(0, 128, 16), 8) == NodeSpread(8, 8, 1)
    assert spread_of((0, 1, 8), 8) == NodeSpread(3, 2, 2)
    assert spread_of((), 8) == NodeSpread(0, 1, 1)
    near, far = range(8), range(0, 16, 2)  # of tp, as the innermost axis of the mesh, and inside of pp
    assert spread_of(far, 8) == NodeSpread(8, 2, 4)
    pricing = Pricing(find_machine("h100-sxm"))
    times = [pricing.comm(comm("all_reduce", 2**26), CommGroup("tp", ranks)).seconds for ranks in (near, far)]
    assert times[0] < 0.6 * times[1]


# -- host, grades, figures -------------------------------------------------------------------------------------------


def test_the_host_issues_events(pricing):
    assert pricing.host_seconds(matmul(1, 1, 1)) == pytest.approx(find_machine("h100-sxm").value("host.op"))
    assert pricing.host_seconds(comm("all_reduce", 1)) == pytest.approx(
        find_machine("h100-sxm").value("host.collective")
    )
    assert pricing.host_seconds(Free(1)) == 0
    graphs = Pricing(find_machine("h100-sxm"), graphs=True)
    assert graphs.host_seconds(matmul(1, 1, 1)) < 1e-6
    tensors = Pricing(find_machine("h100-sxm"), host="dtensor")
    assert 8 < tensors.host_seconds(matmul(1, 1, 1)) / pricing.host_seconds(matmul(1, 1, 1)) < 13
    assert tensors.host_seconds(comm("all_reduce", 1)) == pricing.host_seconds(comm("all_reduce", 1))
    assert Pricing(find_machine("h100-sxm"), graphs=True, host="dtensor").host_seconds(matmul(1, 1, 1)) < 1e-6
    op, places = matmul(1, 1, 1), [Place("forward", watched=watched) for watched in (False, True)]
    assert pricing.host_seconds(op, places[0]) == pricing.host_seconds(op)
    assert graphs.host_seconds(op, places[1]) == graphs.host_seconds(op), "nothing is dispatched"
    modes = [pricing.host_seconds(op, places[1]._replace(recomputes=again)) for again in (False, True)]
    assert modes == [pytest.approx(times * pricing.host_seconds(op)) for times in (6.3, 10.4)]
    more = tensors.host_seconds(op, places[1]) - tensors.host_seconds(op)
    assert more == pytest.approx(modes[0] - pricing.host_seconds(op)), "a mode hands a DTensor's operation on once"
    known = load_calibration().replace({"host.op_us": 3.0})
    assert Pricing(find_machine("h100-sxm"), known).host_seconds(matmul(1, 1, 1)) == pytest.approx(3e-6)


def test_grades_and_intervals(pricing):
    assert weakest("measured", "calibrated") == "calibrated"
    assert pricing.op(matmul(512, 512, 512)).grade == "calibrated"
    assert pricing.op(stream(64)).grade == "calibrated"  # a measured share of the datasheet's bandwidth
    assert Pricing(find_machine("b200")).op(stream(64)).grade == "assumed"
    assert pricing.comm(comm("all_gather", MIB), group(8)).grade == "calibrated"
    assert Pricing(find_machine("ascend-910c-superpod")).comm(comm("all_gather", MIB), group(8)).grade == "assumed"


def test_figures_of_a_device_stand_over_those_of_its_family():
    h100 = find_machine("h100-sxm")
    own = dataclasses.replace(h100, curves={"matmul": {"cap": 0.4}, "links": {"all_gather": {"efficiency": 0.4}}})
    assert Pricing(own).op(matmul(8192, 8192, 8192)).seconds > 1.9 * Pricing(h100).op(matmul(8192, 8192, 8192)).seconds
    gathered = [Pricing(one).comm(comm("all_gather", 2**30), group(8)).seconds for one in (own, h100)]
    assert gathered[0] > 1.8 * gathered[1]


def test_changed_figures_leave_the_others():
    known = load_calibration()
    changed = known.replace({"matmul.hopper.cap": 0.5, "new.section.name": 1})
    assert changed.section("matmul", "hopper")["cap"] == 0.5
    assert changed.section("new", "section")["name"] == 1
    assert known.section("matmul", "hopper")["cap"] != 0.5
    assert changed.section("matmul", "ampere") == known.section("matmul", "ampere")
    with pytest.raises(ValueError, match="it names no section"):
        known.replace({"matmul": 1})


def test_every_section_says_its_grade_and_source():
    def check(path, section):
        figures = [
            name
            for name, value in section.items()
            if isinstance(value, (int, float)) and f"{name}_source" not in section  # each has its own
        ]
        if figures and path[0] != "fit" and "default" not in section and path != ("attention", "default"):
            assert section.get("grade") in ("measured", "calibrated", "datasheet", "assumed"), path
            assert section.get("source"), path
        for name, value in section.items():
            if isinstance(value, dict) and name not in ("forward", "backward", "spread", "seen"):
                check((*path, name), value)

    for name, section in load_calibration().sections.items():
        if name not in ("device",):
            check((name,), section)


# -- the fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published", "median", "worst_tenth"),
    [("h100-sxm", "H100 SXM", 0.04, 0.12), ("b200", "B200", 0.04, 0.12), ("a100-80gb", "A100 SXM", 0.13, 0.17)],
)
def test_published_matmuls(name, published, median, worst_tenth):
    """Through the price itself, of rows that no fit has seen."""
    pricing = Pricing(find_machine(name), ALONE)
    off = []
    for row in fit_costs.read_rows("gemm.json"):
        if row["hardware"] == published and row.get("m") and int(row["id"][1:]) % 3 == 0:
            seconds = pricing.op(matmul(row["m"], row["n"], row["k"], row["batch"])).seconds
            off.append(abs(seconds / row["time_us"] * 1e6 - 1))
    off.sort()
    assert off[len(off) // 2] <= median
    assert off[int(0.9 * len(off))] <= worst_tenth


@pytest.mark.parametrize(
    ("name", "published", "median"),
    [("h100-sxm", ("H100 SXM", "H100 80GB (p5)", "H200"), 0.08), ("a100-80gb", ("A100 80GB",), 0.05)],
)
def test_published_collectives_of_a_node(name, published, median):
    """From 1 MiB on, through the price itself, of rows that no fit has seen."""
    pricing, off = Pricing(find_machine(name)), []
    for row in fit_costs.read_rows("collectives.json"):
        seconds = fit_costs.seconds_of(row)
        ring = (row.get("algorithm") or "").startswith("Ring")
        held_out = row["hardware"] in published and seconds and int(row["id"][1:]) % 3 == 0
        if not held_out or row["n_nodes"] != 1 or row["size_bytes"] < MIB or (ring and row["n_devices"] > 4):
            continue
        priced = pricing.comm(comm(row["op"], row["size_bytes"]), group(row["n_devices"])).seconds
        off.append(abs(priced / seconds - 1))
    off.sort()
    assert len(off) > 20
    assert off[len(off) // 2] <= median


def test_published_collectives_between_nodes():
    for name, gbits, fabric, median in (("h100-sxm", 3200, "efa", 0.12), ("a100-80gb", 400, "efa-v1", 0.08)):
        pricing = Pricing(find_machine(name).with_network(gbits / 64, fabric))
        off = []
        for row in fit_costs.read_rows("collectives.json"):
            if row.get("inter_bw_gbits_s_per_node") == gbits and row.get("n_nodes") == 2 and row["size_bytes"] >= 16384:
                priced = pricing.comm(comm(row["op"], row["size_bytes"]), group(16)).seconds
                off.append(abs(priced / fit_costs.seconds_of(row) - 1))
        off.sort()
        assert off[len(off) // 2] <= median


@pytest.mark.tier("full")
def test_the_file_of_fits_is_what_the_command_writes():
    """One of its fits, again: the same figures come out."""
    again = next(one for one in fit_costs.fit_links(load_calibration()) if one.path == "links.nvlink3.all_reduce")
    kept = load_calibration().section("links", "nvlink3", "all_reduce")
    assert {name: kept[name] for name in again.params} == again.params
    assert kept["error"] == [round(x, 3) for x in again.fitted]
