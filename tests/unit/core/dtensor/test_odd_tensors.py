"""Redistributing tensors that are unlike others: views, flags, dtypes that do not compute, slices of meshes, ints."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sim
from hyper_parallel import distribute_tensor, from_local, full_tensor, redistribute
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute import execute, plan

MESH = Layout((2, 2), ("dp", "tp"))


def on_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def own_part(full, layout):
    return sim.scatter_full(full, layout)


PAIRS = [
    (MESH("dp", "tp"), MESH("tp", "dp")),
    (MESH(("dp", "tp")), MESH()),
    (MESH("None", "dp"), MESH("None", ("tp", "dp"))),
    (MESH(), MESH("dp")),
    (MESH("dp", partial={"tp": "sum"}), MESH("dp")),
    (MESH(partial={"tp": "sum", "dp": "sum"}), MESH("tp", "dp")),
]


# -- views and flags -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["conjugate", "negative"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].placements} to {pair[1].placements}")
def test_what_a_view_does_to_its_memory_is_done_before_it_is_sent(pair, flag):
    src, dst = pair
    numbers = torch.complex(torch.arange(64.0), 1 - torch.arange(64.0)).reshape(8, 8)
    view = (lambda part: part.conj()) if flag == "conjugate" else (lambda part: part.conj().imag)
    wanted = view(numbers).resolve_conj().resolve_neg().clone()

    def on_rank():
        part = view(own_part(numbers, src))
        assert part.is_conj() or part.is_neg()
        found = execute(plan(src, dst, (8, 8), part.dtype), part)
        return found.resolve_conj().resolve_neg().clone()

    assert torch.equal(sim.gather_full(sim.run(on_rank, world_size=4), dst, (8, 8)), wanted)


@pytest.mark.parametrize("flag", ["conjugate", "negative"])
@pytest.mark.parametrize("entries", [("dp", "tp"), (("tp", "dp"),), ("None", "tp"), ("None",)])
def test_a_full_tensor_that_is_a_view_is_distributed(entries, flag):
    """torch refuses to scatter a conjugated view on the rank that has it, when the others wait for theirs."""
    numbers = torch.complex(torch.arange(35.0), 1 - torch.arange(35.0)).reshape(7, 5)
    full = numbers.conj() if flag == "conjugate" else torch._neg_view(numbers.real.contiguous())
    wanted = full.resolve_conj().resolve_neg()

    def on_rank(source):
        x = distribute_tensor(full, on_mesh(), entries, src_data_rank=source)
        return torch.equal(full_tensor(x).resolve_conj().resolve_neg(), wanted)

    for source in (0, None):
        assert sim.run(on_rank, args=(source,), world_size=4) == [True] * 4


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].placements} to {pair[1].placements}")
def test_one_element_expanded(pair):
    src, dst = pair

    def on_rank():
        part = torch.full((1, 1), 3.0).expand(src.local_shape((8, 8), dist.get_rank()))
        found = execute(plan(src, dst, (8, 8), torch.float32), part)
        return found.shape == dst.local_shape((8, 8), dist.get_rank()), found.unique().tolist()

    copies = 2 ** len(src.partial)
    assert sim.run(on_rank, world_size=4) == [(True, [3.0 * copies])] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int16])
def test_parts_of_one_element_with_any_stride(dtype):
    """Torch calls them contiguous; as bytes, as which some dtypes travel, it does not view them."""
    makes = [lambda x: x, lambda x: x.repeat(4)[::3][:1], lambda x: x[0].expand(1), lambda x: x.repeat(3)[1:2]]
    src, dst = MESH(("dp", "tp")), MESH(("tp", "dp"))

    def on_rank():
        part = makes[dist.get_rank()](torch.full((1,), dist.get_rank()).to(dtype))
        x = from_local(part, on_mesh(), (("dp", "tp"),), shape=(4,))
        return execute(plan(src, dst, (4,), dtype), part).real.tolist(), full_tensor(x).real.tolist()

    found = sim.run(on_rank, world_size=4)
    assert found == [([number], [0, 1, 2, 3]) for number in (0, 2, 1, 3)]


@pytest.mark.parametrize("make", ["redistribute", "from_local"])
@sim.ranks(4, backends=("sim",))
def test_a_transposed_part_can_be_reshaped(ctx, make):
    """The DTensor says of its memory what the parts say of theirs, or torch would take a view where it has to copy."""
    mesh = on_mesh()
    x = distribute_tensor(torch.arange(24.0).reshape(2, 3, 4), mesh, ("dp",), src_data_rank=None).requires_grad_()
    turned = x.transpose(1, 2)
    if make == "redistribute":
        y = redistribute(turned, mesh, ("dp",))
    else:
        part = torch.arange(24.0).reshape(2, 3, 4)[mesh.get_local_rank("dp")][None]
        y = from_local(part.transpose(1, 2).requires_grad_(), mesh, ("dp",), shape=(2, 4, 3))
    assert y.stride() == turned.stride() == (12, 1, 4)
    flat = y.reshape(2, 12)
    assert torch.equal(full_tensor(flat.detach()), torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2).reshape(2, 12))
    flat.sum().backward()
    assert make == "from_local" or full_tensor(x.grad).tolist() == torch.ones(2, 3, 4).tolist()


@pytest.mark.parametrize(
    ("part", "shape", "strides"),
    [
        (torch.ones(4, 6), (8, 6), (6, 1)),
        (torch.ones(6, 4).t(), (8, 6), (1, 8)),
        (torch.ones(4, 6)[:, :2], (4, 4), (12, 1)),
        (torch.ones(4, 1).expand(4, 4), (8, 4), (1, 0)),
        (torch.ones(12).as_strided((1, 3, 4), (1, 1, 3)), (2, 3, 4), (12, 1, 3)),
        (torch.ones(0, 4), (0, 8), (8, 1)),
    ],
    ids=["dense", "transposed", "with gaps", "expanded", "one row alone", "empty"],
)
def test_strides_of_the_whole_are_as_those_of_a_part(part, shape, strides):
    from hyper_parallel.core.dtensor.convert import stride_like

    assert stride_like(part, shape) == strides


@sim.ranks(4, backends=("sim",))
def test_executing_records_no_gradient(ctx):
    gather, keep = plan(MESH("dp"), MESH(), (4,), torch.float32), plan(MESH(), MESH("dp"), (4,), torch.float32)
    halves, full = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(4))
    idle = execute(plan(MESH("dp"), MESH("dp"), (4,), torch.float32), halves)
    assert (execute(gather, halves).requires_grad, execute(keep, full).requires_grad, idle is halves) == (
        False,
        False,
        True,
    )


# -- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64, torch.bool])
def test_what_torch_does_not_compute_with_is_moved(dtype):
    numbers = (torch.arange(35) % 7).reshape(7, 5).float().to(dtype)

    def on_rank(src, dst):
        return execute(plan(src, dst, (7, 5), dtype), own_part(numbers, src)).float()

    for src, dst in PAIRS[:4]:
        found = sim.run(on_rank, args=(src, dst), world_size=4)
        assert torch.equal(sim.gather_full(found, dst, (7, 5)), numbers.float())


def test_a_pending_average_of_ints_becomes_a_sum_without_loss():
    """Copies 1 and 4 average 2 (rounded down), once: halved on each rank they would be 0 and 2, and 0 + 2 is no 2.5."""
    pair = Layout((2,), ("dp",))
    steps = plan(pair(partial={"dp": "avg"}), pair(partial={"dp": "sum"}), (3,), torch.int64)

    def on_rank():
        return execute(steps, torch.tensor([[1, 5, -1], [4, 9, -4]][dist.get_rank()]))

    first, second = sim.run(on_rank, world_size=2)
    assert (first + second).tolist() == [2, 7, -3]
    float_steps = plan(pair(partial={"dp": "avg"}), pair(partial={"dp": "sum"}), (3,), torch.float32)
    assert [step.kind for step in float_steps.steps] == ["copy"]


def test_an_average_of_ints_over_two_axes_is_rounded_once():
    """The average of 0, 1, 1, 2 is 1; of two and two, rounded down, it would be 0 and 1, and then 0."""
    wanted = [1, 2, 0]

    def on_rank(dst):
        number = torch.tensor([[0, 1, -1], [1, 2, 0], [1, 2, 0], [2, 3, 1]][dist.get_rank()])
        return execute(plan(MESH(partial={"dp": "avg", "tp": "avg"}), dst, (3,), torch.int64), number)

    for dst in (MESH(), MESH("dp"), MESH(("tp", "dp"))):
        assert sim.gather_full(sim.run(on_rank, args=(dst,), world_size=4), dst, (3,)).tolist() == wanted


# -- slices of a mesh ------------------------------------------------------------------------------------------------


def test_within_a_slice_of_a_mesh():
    def on_rank():
        part = on_mesh()["tp"]
        x = distribute_tensor(torch.arange(16.0).reshape(4, 4), part, ("tp",), src_data_rank=None)
        y = redistribute(x, ("None", "tp"))
        first = DeviceMesh("cpu", [dist.get_rank() // 2 * 2], mesh_dim_names=("one",))
        return full_tensor(y).tolist(), redistribute(x, first, ()).to_local().numel()

    full = torch.arange(16.0).reshape(4, 4).tolist()
    assert sim.run(on_rank, world_size=4) == [(full, 16), (full, 0)] * 2


@pytest.mark.parametrize("way", ["out of", "into"])
def test_out_of_and_into_a_slice_of_a_mesh_is_refused(way):
    """Ranks 0 and 1 have one slice in hand, ranks 2 and 3 another: they would wait for each other."""

    def on_rank():
        mesh = on_mesh()
        meshes = (mesh["tp"], mesh) if way == "out of" else (mesh, mesh["tp"])
        x = distribute_tensor(torch.ones(4, 4), meshes[0], ("tp",), src_data_rank=None)
        with pytest.raises(ValueError) as caught:
            redistribute(x, meshes[1], ("tp",))
        return str(caught.value)

    of, to = ("x", "(tp) on dp=2, tp=2") if way == "out of" else ("layout", "(tp) on tp=2")
    first, second, third, _ = sim.run(on_rank, world_size=4)
    assert first == second
    assert first == (
        f"cannot redistribute: the mesh of {of} is a slice, of which ranks elsewhere have another, and the other mesh "
        "reaches beyond it\n"
        f"  mesh of x: {'tp=2' if way == 'out of' else 'dp=2, tp=2'}   layout: {to}   sliced from: dp=2, tp=2\n"
        "  try: both layouts on the mesh that was sliced, 'None' or pending over its other axes"
    )
    assert third.splitlines()[::2] == first.splitlines()[::2]
