"""Errors of `custom_shard` and `parallelize_value_and_grad`: four parts, before anything runs."""

import re

import pytest
import torch
from errors_kit import assert_says, errors_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import sim
from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.entry_exit import enter, leave
from hyper_parallel.core.shard.local import _by_rule, custom_shard
from hyper_parallel.core.shard.value_and_grad import parallelize_value_and_grad

WHOLE = torch.arange(24.0).reshape(6, 4)
FREE = Layout((2, 2), ("dp", "tp"))


class Given:
    """What a rank has in hand: a mesh, its layout without an assignment, and a DTensor on it that wants a gradient."""

    def __init__(self):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.own = Layout.from_device_mesh(self.mesh)
        self.x = distribute_tensor(WHOLE, self.own("dp"), src_data_rank=None).requires_grad_()

    def made(self, fn, ins, outs, **options):
        return custom_shard(fn, self.mesh, ins, outs, **options)


def double(x, scale=2):
    return x * scale


def pair(x):
    return x, x.sum()


def fail(*args):
    raise AssertionError("fn ran")


DP, TP, PENDING = ("dp", "None"), ("None", "tp"), {"tp": "sum"}

# What was done, and what is said of it.
MISTAKES = {
    "an axis that does not exist": (
        lambda g: g.made(double, ("pp",), DP),
        "cannot run double on local shards (in_layouts)…'pp'…\n  …\n  try: 'dp'",
    ),
    "an empty layout": (
        lambda g: g.made(double, DP, ()),
        "cannot run double on local shards (out_layouts): () is no layout…\n  …\n  try: …one entry per dim…",
    ),
    "more layouts than arguments": (
        lambda g: g.made(double, [DP, None, DP], DP),
        "cannot run double on local shards (in_layouts)…more layouts (3) than arguments…\n  …\n  try: …a dict by name",
    ),
    "an argument that does not exist": (
        lambda g: g.made(double, {"y": DP}, DP),
        "cannot run double on local shards (in_layouts)…has no argument 'y'\n  …\n  try: …",
    ),
    "fewer arguments than layouts": (
        lambda g: g.made(lambda *xs: xs, [DP, DP], [DP])(g.x),
        "cannot run <lambda> on local shards…a layout for argument 1, and 1 were given\n  …\n  try: as many layouts…",
    ),
    "gradients for no input": (
        lambda g: g.made(double, DP, DP, in_grad_layouts=[None, DP]),
        "cannot …(in_grad_layouts): there is none in in_layouts for argument 'scale'\n  …\n"
        "  try: …inputs that have layouts",
    ),
    "gradients split otherwise": (
        lambda g: g.made(double, DP, DP, in_grad_layouts=TP),
        "cannot …(in_grad_layouts): it is split otherwise than the input\n  …\n  try: the same splits, and partial=…",
    ),
    "gradients built otherwise": (
        lambda g: g.made(double, DP, DP, in_grad_layouts=[[DP]]),
        "cannot …(in_grad_layouts): it is built otherwise than in_layouts\n  …\n  try: one gradient per input…",
    ),
    "a layout with too many entries": (
        lambda g: g.made(fail, ("dp", "None", "tp"), DP)(g.x),
        "cannot lay out the argument 0 of fail…a tensor of ndim 2 does not have\n  …\n  try: one entry per dim…",
    ),
    "a list where there is one layout": (
        lambda g: g.made(double, DP, DP)([g.x]),
        "cannot lay out the argument 'x' of double: it is a list of 1…\n  …\n  try: a list of 1 layouts",
    ),
    "gradients that could mean two things": (
        lambda g: g.made(fail, DP, [DP, g.own("dp", partial=PENDING)])(g.x),
        "…cannot differentiate: over 'tp' its gradients could be one gradient…\n  …\n  try: in_grad_layouts=...…",
    ),
    "copies of which one counts": (
        lambda g: g.made(fail, g.own("dp", partial={"tp": "max"}), DP)(g.x),
        "…cannot differentiate: over 'tp' copies are to be compared or multiplied…\n  …\n  try: in_grad_layouts=...…",
    ),
    "an output too many": (
        lambda g: g.made(pair, DP, DP)(g.x),
        "cannot lay out the output of pair: it is a tuple of 2…\n  …\n  try: a list of 2 layouts",
    ),
    "an output that is no tensor": (
        lambda g: g.made(lambda x: 3, DP, DP)(g.x),
        "InvalidType: cannot run <lambda> on local shards: an output that has a layout is a int…\n  …\n"
        "  try: …None in out_layouts…",
    ),
    "an output that is a DTensor": (
        lambda g: g.made(lambda x: g.x, DP, DP)(g.x),
        "InvalidType: cannot run <lambda> on local shards…is a DTensor, not a plain tensor\n  …\n  try: local tensors…",
    ),
    "another shape than declared": (
        lambda g: g.made(double, DP, DP, out_shapes=(4, 4))(g.x),
        "cannot lay out the output of double…the layout gives it (2, 4)\n  …\n  try: …the layout it really has",
    ),
    "shapes built otherwise": (
        lambda g: g.made(pair, DP, [DP, None], out_shapes=(6, 4, 2))(g.x.detach()),
        "cannot run pair on local shards: out_shapes is built otherwise than out_layouts\n  …\n"
        "  try: one shape per layout…",
    ),
    "a part of no shape that the layout has": (
        lambda g: g.made(lambda x: x[: 2 * torch.distributed.get_rank() + 1], DP, ("dp",))(g.x.detach()),
        "…cannot run <lambda> on local shards: the shards add up to…\n  …\n  …\n  …\n  …\n  …\n  try: …torch.chunk…",
    ),
    "parts of other numbers of dims": (
        lambda g: g.made(lambda x: x.reshape([2] * (1 + torch.distributed.get_rank() % 2) + [-1]), DP, ("dp",))(
            g.x.detach()
        ),
        "…cannot run <lambda> on local shards: the shards have different numbers of dims\n  …\n  …(2, 6)\n"
        "  rank…\n  …\n  …\n  try: …",
    ),
    "a gradient that nobody has said": (
        lambda g: enter(g.x, g.own("dp")).sum().backward(),
        "cannot pass a gradient back…over 'tp' ranks hold the same…\n  …\n  try: …grad_layout=…",
    ),
    "a part of another shape": (
        lambda g: leave(WHOLE, g.own("dp"), (6, 4)),
        "cannot make a DTensor from local shards…shard has shape (6, 4), and the layout gives it (3, 4)\n  …\n"
        "  try: …the full tensor…",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    make, expected = MISTAKES[name]
    texts = {re.sub(r"rank \d", "rank", text) for text in errors_on_ranks(lambda: make(Given()), 4, sends=True)}
    assert len(texts) == 1, "ranks say different things"
    assert_says(texts.pop(), expected)


def test_placements_and_layouts_spell_the_same():
    def body():
        given = Given()
        for ins in (DP, [Shard(0), Replicate()], given.own("dp"), Layout((2, 2), ("dp", "tp"))("dp")):
            ins = [tuple(ins)] if isinstance(ins, list) else ins
            y = given.made(double, ins, (Shard(-2), Replicate()), out_shapes=(6, 4))(given.x)
            assert torch.equal(y.full_tensor(), 2 * WHOLE)
        return True

    assert all(sim.run(body, world_size=4))


def test_gradients_of_a_pending_average_are_added_whatever_the_outputs_are():
    average, rows = FREE("dp", partial={"tp": "avg"}), FREE("dp")
    for out in (rows, FREE("dp", "tp"), average):
        assert _by_rule(average, [out]).grad_layout == FREE("dp", partial={"tp": "sum"})
    assert _by_rule(rows, [rows]).grad_layout == rows, "the ranks repeat the same work"


# -- parallelize_value_and_grad ----------------------------------------------------------------------------------------

W = torch.ones(2, requires_grad=True)

# fn, weights and sens; what is to blame.
WRONG = {
    "a generator of weights": ((fail, iter([W])), "not a tensor or a list"),
    "no weights": ((fail, []), "weights is empty"),
    "a weight without gradient": ((fail, (W, W.detach())), "weights[1] wants no gradient"),
    "sens as a tensor": ((fail, W, torch.ones(2)), "sens[0] is a Tensor"),
    "sens of strings": ((fail, W, ["1"]), "sens[0] is a str, not a float"),
    "sens for one output": ((W.sum, W, [1.0]), "fn returned one tensor, and sens is for several"),
    "too few sens": ((lambda: (W, W), W, [1.0]), "fn returned 2 tensors, and sens has 1 numbers"),
    "nothing returned": ((lambda: None, W), "fn returned a NoneType"),
    "a number returned": ((lambda: 1.0, W), "fn returned a float"),
    "a dict returned": ((lambda: {"loss": W}, W), "fn returned a dict"),
    "an empty tuple": ((tuple, W), "fn returned an empty tuple"),
    "nested outputs": ((lambda: (W, [W]), W), "output 1 is a list, and nested outputs are not differentiated"),
    "a number among outputs": ((lambda: [W, 2.0], W), "output 1 is a float, and a float is not differentiated"),
    "ints": ((W.long, W), "the output is of dtype torch.int64"),
    "ints that count": ((lambda: (W, W.long()), W, [1.0, 1.0]), "output 1 is of dtype torch.int64"),
    "complex numbers": ((lambda: W * 1j, W), "the output is of dtype torch.complex64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_type_errors(name):
    args, blame = WRONG[name]
    with pytest.raises(TypeError) as caught:
        parallelize_value_and_grad(*args)()
    text = str(caught.value)
    assert text.startswith("cannot differentiate: ")
    assert blame in text
    assert "\n  try: " in text
    assert len(text.splitlines()) == 3


def test_outputs_that_do_not_count_may_be_ints():
    value, grad = parallelize_value_and_grad(lambda: (2 * W.sum(), W.long()), W)()
    assert value[1].dtype == torch.int64
    assert grad.tolist() == [2, 2]
