"""Errors of `redistribute` and its relatives: four parts, the same on every rank, before any communication."""

import re

import pytest
import torch
import torch.distributed as dist
from errors_kit import assert_says, error_on_ranks, errors_on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import sim
from hyper_parallel import DTensor, distribute_tensor, from_local, full_tensor, redistribute, to_local
from hyper_parallel.core.dtensor.layout import Layout

WHOLE = torch.arange(24.0).reshape(6, 4)
FREE = Layout((2, 2), ("dp", "tp"))


class Given:
    """What a rank has in hand: a mesh, its layout without an assignment, and a DTensor on it."""

    def __init__(self):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.own = Layout.from_device_mesh(self.mesh)
        self.x = distribute_tensor(WHOLE, self.mesh, ("dp", "tp"), src_data_rank=None).requires_grad_()


REDISTRIBUTE, DISTRIBUTE = "cannot redistribute", "cannot distribute a tensor"
FROM, TO = "cannot make a DTensor from local parts", "cannot take the local part"
DTENSOR_HINT = "distribute_tensor(x, layout) for a full tensor, from_local(x, layout) for this rank's shard"
SAME = "the same splits, and partial={...} where gradients add"
MESH = "DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))"
THERE = "mesh of the tensor: dp=2, tp=2"

# What was done, and what is said of it.
MISTAKES = {
    "a plain tensor to redistribute": (
        lambda g: redistribute(WHOLE, g.own("dp")),
        f"InvalidType: {REDISTRIBUTE}: x is a Tensor, not a DTensor\n  x: Tensor of shape (6, 4)\n"
        f"  try: {DTENSOR_HINT}",
    ),
    "a DTensor to distribute_tensor": (
        lambda g: distribute_tensor(g.x, g.own("dp")),
        f"InvalidType: {DISTRIBUTE}: tensor is a DTensor, not a plain tensor\n  tensor: DTensor of shape (6, 4)\n"
        "  try: redistribute(x, layout) for a DTensor, torch.as_tensor(...) for numbers",
    ),
    "a DTensor to from_local": (
        lambda g: from_local(g.x, g.own("dp")),
        f"InvalidType: {FROM}: local is a DTensor, not a plain tensor\n  local: DTensor of shape (6, 4)\n"
        "  try: redistribute(x, layout) for a DTensor, torch.as_tensor(...) for numbers",
    ),
    "a mesh alone": (
        lambda g: redistribute(g.x, g.mesh),
        f"{REDISTRIBUTE}: a mesh alone does not say where the tensor goes\n"
        f'  layout: {MESH}   placements: None   {THERE}\n  try: placements=("dp", "None"), or torch\'s, one per axis',
    ),
    "nothing": (
        lambda g: redistribute(g.x),
        f"InvalidType: {REDISTRIBUTE}: no layout was given\n  layout: None   placements: None   {THERE}\n"
        '  try: Layout.from_device_mesh(mesh)("dp", "None")',
    ),
    "a layout without assignment": (
        lambda g: redistribute(g.x, g.own),
        f"{REDISTRIBUTE}: the layout is a mesh without an assignment\n  layout: (no assignment) on dp=2, tp=2\n"
        '  try: layout("dp", "None"), or layout() for everything replicated',
    ),
    "a layout without mesh to from_local": (
        lambda g: from_local(WHOLE, FREE("dp")),
        f"{FROM}: the layout was made without a DeviceMesh\n  layout: (dp) on dp=2, tp=2\n"
        "  try: Layout.from_device_mesh(mesh)(...), or layout.with_mesh(mesh)",
    ),
    "a layout of other axes without mesh": (
        lambda g: redistribute(g.x, Layout((4,), ("dp",))("dp")),
        f"{REDISTRIBUTE}: the layout was made without a DeviceMesh, and the mesh of the tensor is not the one it is "
        f"for\n  layout: (dp) on dp=4   {THERE}\n  try: Layout.from_device_mesh(mesh)(...), or layout.with_mesh(mesh)",
    ),
    "a layout on more ranks than there are": (
        lambda g: redistribute(g.x, Layout((2, 4), ("dp", "tp"))("dp")),
        f"{REDISTRIBUTE}: the layout is for ranks up to 7, and there are 4 ranks\n"
        f"  layout: (dp) on dp=2, tp=4   {THERE}\n  try: a mesh of at most 4 ranks",
    ),
    "entries without a mesh": (
        lambda g: from_local(WHOLE, ("dp", None)),
        f"{FROM}: entries do not say which mesh they are for\n  layout: ('dp', None)   placements: None\n"
        '  try: a mesh before them, or Layout.from_device_mesh(mesh)("dp", "None")',
    ),
    "entries twice": (
        lambda g: redistribute(g.x, ("dp",), ("tp",)),
        f"{REDISTRIBUTE}: entries were given twice, as layout and as placements\n"
        f"  layout: ('dp',)   placements: ('tp',)   {THERE}\n  try: one of the two",
    ),
    "placements beside a layout": (
        lambda g: redistribute(g.x, g.own("dp"), ("dp",)),
        f"{REDISTRIBUTE}: both a layout with an assignment and placements were given\n"
        "  layout: (dp) on dp=2, tp=2   placements: ('dp',)\n  try: one of the two",
    ),
    "a str for placements": (
        lambda g: distribute_tensor(WHOLE, g.mesh, "dp"),
        f"InvalidType: {DISTRIBUTE}: placements is a str, not a layout or a sequence of entries\n"
        f"  layout: {MESH}   placements: 'dp'\n  try: ('dp',), one entry per dim",
    ),
    "one placement without brackets": (
        lambda g: redistribute(g.x, g.mesh, Shard(0)),
        f"InvalidType: {REDISTRIBUTE}: placements is a Shard, not a layout or a sequence of entries\n"
        f"  layout: {MESH}   placements: Shard(dim=0)   {THERE}\n  try: [Shard(dim=0), ...], one placement per axis",
    ),
    "too few placements": (
        lambda g: redistribute(g.x, [Replicate()]),
        "cannot read a layout from placements: there are 1 placements for 2 axes\n"
        "  placements: (Replicate(),)   mesh: dp=2, tp=2\n  try: one for each of dp, tp",
    ),
    "an unknown axis": (
        lambda g: redistribute(g.x, ("pd",)),
        "cannot split dim 0 over 'pd': no axis is called 'pd'\n  layout: ('pd',)   mesh: dp=2, tp=2\n  try: 'dp'",
    ),
    "too many entries": (
        lambda g: redistribute(g.x, ("dp", None, "tp")),
        "cannot place a tensor: entry 2, 'tp', is for a dim that a tensor of ndim 2 does not have\n"
        "  layout: (dp, -, tp)   mesh: dp=2, tp=2\n  try: one entry per dim at most",
    ),
    "a dim that is not there": (
        lambda g: distribute_tensor(WHOLE, g.mesh, [Shard(2), Replicate()]),
        "cannot split dim 2 over 'dp': the tensor has ndim 2\n"
        "  placements: (Shard(2), Replicate())   mesh: dp=2, tp=2\n  try: a dim from -2 to 1",
    ),
    "mixed kinds of partial": (
        lambda g: redistribute(g.x, [Partial("sum"), Partial("max")]),
        "cannot make a DTensor: sum over 'dp', max over 'tp' are pending, and torch keeps no order between kinds of "
        "reduction\n  layout: (Replicate(), Replicate()) pending sum over dp, max over tp on dp=2, tp=2\n"
        "  try: one kind, such as partial={'dp': 'sum', 'tp': 'sum'}, or reduce over one axis first",
    ),
    "gradients of other parts": (
        lambda g: to_local(g.x, grad_layout=("dp",)),
        f"{TO}: grad_layout gives rank 0 [0:3, 0:4], and its part is [0:3, 0:2]\n"
        f"  layout: (dp, tp) on dp=2, tp=2   grad_layout: (dp) on dp=2, tp=2\n  try: {SAME}",
    ),
    "gradients of another part than the whole": (
        lambda g: full_tensor(g.x, grad_layout=("dp",)),
        "cannot gather the full tensor: grad_layout gives rank 0 [0:3, 0:4], and its part is [0:6, 0:4]\n"
        f"  layout: () on dp=2, tp=2   grad_layout: (dp) on dp=2, tp=2\n  try: {SAME}",
    ),
    "gradients of other parts to from_local": (
        lambda g: from_local(torch.ones(3, 4), g.own("dp"), shape=(6, 4), grad_layout=("tp",)),
        f"{FROM}: grad_layout gives rank 1 [3:6, 0:4], and its part is [0:3, 0:4]\n"
        f"  layout: (dp) on dp=2, tp=2   grad_layout: (tp) on dp=2, tp=2\n  try: {SAME}",
    ),
    "a source that an axis does not have": (
        lambda g: distribute_tensor(WHOLE, g.own("dp"), src_data_rank=2),
        f"{DISTRIBUTE}: src_data_rank 2 is an index along every axis, and axis 'dp' has 2 ranks\n"
        "  src_data_rank: 2   layout: (dp) on dp=2, tp=2\n  try: 0 to 1, or None for every rank's own",
    ),
    "a tensor that was computed, of which a leaf would be made": (
        lambda g: distribute_tensor(2 * WHOLE.clone().requires_grad_(), g.own("dp")),
        f"{DISTRIBUTE}: tensor was computed from one that wants a gradient, and the result, a leaf, would not pass one "
        "on\n  grad_fn: MulBackward0\n"
        "  try: tensor.detach(), or from_local(tensor, layout()) and redistribute, which pass gradients on",
    ),
    "gradients on a mesh without ranks": (
        lambda g: to_local(g.x, grad_layout=Layout((2,), ("dp",))("dp")),
        f"{TO} with this grad_layout: the layout was made without a DeviceMesh, and the mesh of the tensor is not the "
        "one it is for\n  …\n  try: …",
    ),
    "gradients on other ranks": (
        lambda g: to_local(
            g.x, grad_layout=Layout.from_device_mesh(DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)))()
        ),
        f"{TO}: grad_layout lies on other ranks than the parts\n"
        f"  layout: (dp, tp) on dp=2, tp=2   grad_layout: () on dp=2\n  try: {SAME}",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_said_in_four_parts_on_every_rank_before_anything_is_sent(name):
    mistake, expected = MISTAKES[name]
    assert_says(error_on_ranks(lambda: mistake(Given()), 4), expected)


@sim.ranks(4, backends=("sim",))
def test_what_the_hints_say_works(ctx):
    g = Given()
    for hint in (("dp",), [Shard(0), Replicate()], g.own(), g.own("dp", "None"), FREE("dp").with_mesh(g.mesh)):
        assert type(redistribute(g.x, hint)) is DTensor
    assert type(redistribute(g.x, g.mesh, placements=("dp", "None"))) is DTensor
    linked = WHOLE.clone().requires_grad_()
    redistribute(from_local(2 * linked, g.own()), ("dp",)).backward(distribute_tensor(WHOLE, g.mesh, ("dp",)))
    assert torch.equal(linked.grad, 2 * WHOLE)


def test_a_part_of_another_shape_is_said_on_the_rank_that_has_it():
    texts = errors_on_ranks(lambda: from_local(WHOLE, Given().own("dp"), shape=(6, 4)), 4)
    for rank, text in enumerate(texts):
        assert_says(
            text,
            f"{FROM}: rank {rank}'s part has shape (6, 4), and the layout gives it (3, 4)\n"
            "  shape: (6, 4)   layout: (dp) on dp=2, tp=2\n"
            "  try: the global shape, and parts as layout.local_slice(shape) cuts them",
        )


@pytest.mark.parametrize("ranks", [[[1, 0], [3, 2]], [[2, 3], [0, 1]]])
def test_a_mesh_whose_ranks_do_not_ascend(ranks):
    """torch scatters to the first rank of a group, and a rank's place on the mesh says which part is its own."""

    def gathered():
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        part = torch.full((1,), float(dist.get_rank()))
        return full_tensor(from_local(part, mesh, (("dp", "tp"),), shape=(4,))).tolist()

    flat = [rank for row in ranks for rank in row]
    entries, mesh = (("dp", "tp"),), lambda: DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
    assert_says(
        error_on_ranks(lambda: distribute_tensor(WHOLE, mesh(), entries), 4),
        f"{DISTRIBUTE}: ranks along axis {'tp' if flat[0] == 1 else 'dp'!r} have to ascend, as a process group has no "
        f"other order\n  mesh: dp=2, tp=2   ranks: {', '.join(map(str, flat))}\n"
        "  try: a mesh whose rows and columns ascend, as init_device_mesh makes them",
    )
    assert sim.run(gathered, world_size=4) == [flat] * 4, "what is not torch's own goes by the places on the mesh"


NEITHER = (
    "cannot redistribute on rank {}: the rank is neither on the mesh that the tensor is on nor on the one it goes to"
)
OFF_THE_MESH = {
    "redistribute": (
        lambda mesh: redistribute(distribute_tensor(WHOLE, mesh, ("dp",), src_data_rank=None), ("None", "dp")),
        f"{NEITHER}\n  from: (dp, -) on dp=2   to: (-, dp) on dp=2\n  try: call it on ranks 0, 1 only",
    ),
    "full_tensor": (
        lambda mesh: full_tensor(distribute_tensor(WHOLE, mesh, ("dp",), src_data_rank=None)),
        f"{NEITHER}\n  from: (dp, -) on dp=2   to: (-, -) on dp=2\n  try: call it on ranks 0, 1 only",
    ),
    "from_local, which has nothing to say about shapes there": (
        lambda mesh: from_local(WHOLE, mesh, ("dp",)),
        f"{FROM}: this rank is not on the mesh, so its part says nothing\n  layout: (dp) on dp=2\n  try: shape=(...)",
    ),
}


@pytest.mark.parametrize("name", OFF_THE_MESH)
def test_a_rank_on_neither_mesh(name):
    step, expected = OFF_THE_MESH[name]

    def call():
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
        if dist.get_rank() >= 2:
            step(mesh)

    assert errors_on_ranks(call, 4) == [None, None, *(f"InvalidValue: {expected.format(rank)}" for rank in (2, 3))]


@pytest.mark.parametrize(
    ("verb", "seen", "names", "hint", "add"),
    [
        (to_local, "x: (dp, -)", "'tp'", "('dp', 'None')", "'dp', 'None', partial={'tp': 'sum'}"),
        (
            full_tensor,
            "result: (-, -)",
            "'dp', 'tp'",
            "('None', 'None')",
            "'None', 'None', partial={'dp': 'sum', 'tp': 'sum'}",
        ),
    ],
)
def test_gradients_that_could_mean_two_things(verb, seen, names, hint, add):
    assert_says(
        error_on_ranks(lambda: verb(redistribute(Given().x, ("dp",))).sum().backward(), 4, sends=True),
        f"cannot pass a gradient back through {verb.__name__}: over {names} ranks hold the same or copies to "
        "reduce; their gradients could be one gradient, computed by each rank, or partial sums to be added\n"
        f"  {seen} on dp=2, tp=2\n"
        f"  try: {verb.__name__}(x, grad_layout={hint}) if equal; Layout.of(x)({add}) if partial; "
        "x.detach() if neither",
    )


@pytest.mark.parametrize(
    ("shape", "alike"), [((), ()), ((4,), ("None",)), ((2, 2), ("None", "None"))], ids=["0-d", "1-d", "2-d"]
)
@sim.ranks(4, backends=("sim",))
def test_both_ways_out_of_it_work(ctx, shape, alike):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    x = distribute_tensor(torch.ones(shape, requires_grad=True), mesh, ())
    with pytest.raises(ValueError) as caught:
        to_local(x).sum().backward()
    assert f"grad_layout={alike!r}) if equal; Layout.of(x)(" in str(caught.value)
    call = re.search(r"Layout\.of\(x\)\(.*?\}\)", str(caught.value))[0]
    for grad_layout in (alike, eval(call, {"Layout": Layout, "x": x})):
        to_local(x, grad_layout=grad_layout).sum().backward()
    assert full_tensor(x.grad).flatten()[0].item() == 1.0 + 4.0
