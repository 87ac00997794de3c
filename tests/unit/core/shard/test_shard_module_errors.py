"""Errors of plans: four parts, on every rank, before anything is communicated."""

import math

import pytest
import torch
from errors_kit import assert_says, error_on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import sim
from hyper_parallel import distribute_tensor, from_local, fully_shard
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.api import ShardingPlan, shard_module

MESH = Layout((2, 2), ("dp", "tp"))
CANNOT = "cannot shard the model"
ONE = '("dp", "None"), one entry per dim; or one placement per axis'


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x, mask=None, *, scale=1.0):
        return self.w2(self.w1(x)) * scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([MLP(), MLP()])
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def function(x, /, y, *, k=None):
    return x


PARAMETERS = "parameters: " + ", ".join(name for name, _ in Model().named_parameters())
MODULES = "modules: " + ", ".join(name for name, _ in Model().named_modules() if name)


def plan(**fields):
    return ShardingPlan(**fields)


def weight(layout):
    return plan(plan={"head.weight": layout})


def entry(layout):
    return plan(input_plan={"layers.0.input": layout})


PLANNED, INPUTS = f"{CANNOT}: plan['head.weight']", f"{CANNOT}: input_plan['layers.0.input']"
OF_LAYER, OF_F = "cannot lay out the inputs of module 'layers.0'", "cannot lay out the inputs of function 'function'"

# What was given, and what is said.
MISTAKES = {
    "a parameter misspelt": (
        plan(plan={"layers.0.w1.wieght": ("tp",)}),
        f"{CANNOT}: plan: 'layers.0.w1.wieght' is no parameter of the model\n  {PARAMETERS}\n"
        "  try: 'layers.0.w1.weight'",
    ),
    "a module among parameters": (
        plan(plan={"layers.0.w1": ("tp",)}),
        f"{CANNOT}: plan: 'layers.0.w1' is no parameter of the model\n  {PARAMETERS}\n"
        "  try: one of 'layers.0.w1.weight', 'layers.0.w1.bias'",
    ),
    "a glob that matches nothing": (
        plan(plan={"layers.*.w3.weight": ("tp",)}),
        f"{CANNOT}: plan: 'layers.*.w3.weight' means no parameter of the model\n  {PARAMETERS}\n"
        "  try: 'layers.0.w1.weight'",
    ),
    "a star for several parts": (
        plan(input_plan={"*.w1.input": ("dp",)}),
        f"{CANNOT}: input_plan: '*.w1.input' means no module of the model\n  {MODULES}\n"
        "  try: '**.*.w1.input', as '*' stands for one part of a path only",
    ),
    "a module misspelt": (
        plan(input_plan={"layer.0.input": ("dp",)}),
        f"{CANNOT}: input_plan: 'layer.0' is no module of the model\n  {MODULES}\n  try: 'layers.0.input'",
    ),
    "two globs that disagree": (
        plan(plan={"layers.*.w2.weight": ("tp",), "layers.0.*.weight": ("dp",)}),
        f"{CANNOT}: plan: parameter 'layers.0.w2.weight' is meant by 'layers.*.w2.weight' and by "
        "'layers.0.*.weight'…\n  layers.*.w2.weight: (tp) on dp=2, tp=2   layers.0.*.weight: (dp) on dp=2, tp=2\n"
        "  try: an entry for 'layers.0.w2.weight' as well, which counts before both",
    ),
    "a key without .input": (
        plan(input_plan={"layers.0": ("dp",)}),
        f"{CANNOT}: input_plan: the last part of a key is 'input', and 'layers.0' ends in '0'\n  keys: ['layers.0']\n"
        "  try: 'layers.0.input'",
    ),
    "inputs": (
        plan(input_plan={"layers.*.inputs": ("dp",)}),
        f"{CANNOT}: input_plan: …and 'layers.*.inputs' ends in 'inputs'\n  keys: ['layers.*.inputs']\n"
        "  try: 'layers.*.input'",
    ),
    "an input among outputs": (
        plan(output_plan={"head.input": ("dp",)}),
        f"{CANNOT}: output_plan: …and 'head.input' ends in 'input'\n  keys: ['head.input']\n  try: 'head.output'",
    ),
    "()": (weight(()), f"{PLANNED}: () is no layout: it has no entries\n  given: ()…\n  try: {ONE}"),
    "mixed": (
        weight((Shard(0), "tp")),
        f"{PLANNED}: placements and axis names are mixed ('tp' is no placement)\n"
        f"  given: (Shard(dim=0), 'tp')   mesh: dp=2, tp=2\n  try: {ONE}",
    ),
    "placements and None": (weight((Shard(0), None)), f"{PLANNED}: …(None is no placement)\n  given…\n  try: {ONE}"),
    "a str": (weight("tp"), f"{PLANNED}: …a layout is a tuple of them: ('tp',)\n  given: 'tp'…\n  try: {ONE}"),
    "a placement": (weight(Shard(0)), f"{PLANNED}: …a tuple of them: (Shard(dim=0),)\n  given: Shard…\n  try: {ONE}"),
    "an int": (weight(3), f"{PLANNED}: a int is no layout\n  given: 3…\n  try: {ONE}"),
    "True": (weight(True), f"{PLANNED}: a bool is no layout\n  given: True…\n  try: {ONE}"),
    "a set": (weight({"tp"}), f"{PLANNED}: a set is no layout\n  given: {{'tp'}}…\n  try: {ONE}"),
    "ints": (weight((1, 2)), f"{PLANNED}: …an axis name, a tuple of names, or None…\n  given: (1, 2)…\n  try: {ONE}"),
    "a list of names": (
        weight(["tp", "None"]),
        f"{PLANNED}: a parameter has one layout\n  given: ['tp', 'None']\n  try: ('tp', 'None'), a tuple",
    ),
    "a dict for a parameter": (
        weight({"x": ("tp",)}),
        f"{PLANNED}: a parameter has one layout\n  given: {{'x': ('tp',)}}\n  try: (\"tp\", \"None\")",
    ),
    "two layouts for a parameter": (
        weight(((Shard(0), Replicate()), (Replicate(), Shard(1)))),
        f"{PLANNED}: it holds several layouts, and there is one tensor\n  given: ((Shard…\n  try: {ONE}",
    ),
    "an axis misspelt": (
        weight(("tpp", "None")),
        f"{PLANNED}: cannot split dim 0 over 'tpp': no axis is called 'tpp'\n  …mesh: dp=2, tp=2\n  try: 'tp'",
    ),
    "more entries than dims": (
        weight(("tp", "None", "None")),
        f"{PLANNED}: the layout is for more dims than the 2 of parameter 'head.weight'\n"
        "  layout: ('tp', 'None', 'None')\n  try: one entry per dim",
    ),
    "a pending parameter": (
        weight((Partial(), Replicate())),
        f"{PLANNED}: parameter 'head.weight' would have a reduction pending…\n  …pending sum over dp…\n"
        "  try: a layout without pending reductions: split, or replicated",
    ),
    "a layout of another mesh": (
        weight(Layout((4,), ("tp",))("tp")),
        f"{PLANNED}: the layout is for another mesh\n  layout: (tp) on tp=4   mesh: dp=2, tp=2\n"
        "  try: a layout on the mesh given, or names, which are read on it",
    ),
    "a mesh for a layout": (
        weight(MESH),
        f"{PLANNED}: the layout is a mesh without an assignment\n  layout: (no assignment) on dp=2, tp=2…\n"
        f"  try: {ONE}",
    ),
    "a tuple of tuples of names for several layouts": (
        entry((("dp", "None"), ("None", "tp"))),
        f"{INPUTS}: cannot split dim 0 over 'None': \"None\" is no axis…\n  layout: (('dp', 'None'), ('None', 'tp'))\n"
        "  try: one entry per dim, without the inner brackets: ('dp', 'None'); [('dp', 'None'), ('None', 'tp')], a "
        "list, for several layouts",
    ),
    "a list for one layout": (
        entry(["dp", "None"]),
        f"{INPUTS}: a list holds one layout per tensor, and 'dp' is one entry of a layout\n  given: ['dp', 'None']\n"
        "  try: ('dp', 'None') for one layout, [('dp', 'None')] for one in a list",
    ),
    "an empty list": (entry([]), f"{INPUTS}: it is empty\n  given: []\n  try: {ONE}"),
    "an empty dict": (
        entry({}),
        f'{INPUTS}: it is empty\n  given: {{}}\n  try: {{"x": ("dp", "None")}}, a layout for each name',
    ),
    "a number for a name": (
        entry({0: ("dp",)}),
        f"{INPUTS}: a name is a str, and 0 is a int\n  given: {{0: ('dp',)}}\n"
        '  try: {"x": ("dp", "None")}, a layout for each name',
    ),
    "an axis misspelt under a name": (
        entry({"x": ("dq",)}),
        f"{INPUTS} ('x'): cannot split dim 0 over 'dq': no axis is called 'dq'\n  …mesh: dp=2, tp=2\n  try: 'dp'",
    ),
    "an argument misspelt": (
        entry({"msak": ("dp",)}),
        f"{OF_LAYER}: the signature has no argument 'msak'\n  signature: (x, mask=None, *, scale=1.0)\n  try: 'mask'",
    ),
    "more layouts than arguments": (
        entry([("dp",), None, ("tp",)]),
        f"{OF_LAYER}: there are more layouts (3) than arguments by position (2)\n"
        "  layouts: [(dp), None, (tp)]   signature: (x, mask=None, *, scale=1.0)\n"
        "  try: at most one layout per argument, or a dict by name",
    ),
    "results that are whole and not": (
        plan(local_plan={"layers.0": [("dp",), ("dp", "tp")]}),
        "cannot run module 'layers.0' on local tensors: over axis 'tp' one result is replicated, and another one is "
        "not…\n  results: [(dp), (dp, tp)]\n  try: the same along that axis, or one module for each result",
    ),
}

MISTAKES_WITH_FUNCTIONS = {
    "parameters": (
        plan(plan={"w": ("tp",)}),
        f"{CANNOT}: 'function' is a function, which has no parameters or modules, and plan is given\n"
        "  plan: {'w': ('tp',)}\n  try: input_plan={\"input\": ...} and output_plan={\"output\": ...}",
    ),
    "return_local_tensor": (
        plan(return_local_tensor=[""]),
        f"{CANNOT}: …and return_local_tensor is given\n  return_local_tensor: ['']\n"
        '  try: input_plan={"input": ...} and output_plan={"output": ...}',
    ),
    "local_plan": (
        plan(local_plan={"": ("tp",)}),
        f"{CANNOT}: …and local_plan is given\n  local_plan: {{'': ('tp',)}}\n"
        '  try: input_plan={"input": ...} and output_plan={"output": ...}',
    ),
    "a path": (
        plan(input_plan={"x.input": ("tp",)}),
        f"{CANNOT}: input_plan: 'x.input' is for a module inside, and there is none\n  modules: none\n"
        "  try: 'input', for the model itself",
    ),
    "an argument by its name": (
        plan(input_plan={"input": {"x": ("tp",)}}),
        f"{OF_F}: argument 'x' is given by position only\n  signature: (x, /, y, *, k=None)\n"
        "  try: a list of layouts by position, that of 'x' at index 0",
    ),
    "an argument misspelt": (
        plan(input_plan={"input": {"z": ("tp",)}}),
        f"{OF_F}: the signature has no argument 'z'\n  signature: (x, /, y, *, k=None)\n  try: one of 'y', 'k'",
    ),
}


CASES = {name: (Model, *row) for name, row in MISTAKES.items()} | {
    f"function: {name}": (lambda: function, *row) for name, row in MISTAKES_WITH_FUNCTIONS.items()
}
ON_ONE_RANK = [
    "a parameter misspelt", "a glob that matches nothing", "inputs", "()", "mixed",
    "an axis misspelt", "more entries than dims", "an argument misspelt", "more layouts than arguments",
    "function: parameters", "function: an argument misspelt",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape"), [*((name, (2, 2)) for name in CASES), *((name, (1, 1)) for name in ON_ONE_RANK)]
)
def test_a_mistake_is_explained_before_anything_is_sent(name, shape):
    """The checks come first on one rank, too, and the model stays as it was."""
    make, given, expected = CASES[name]

    def call():
        model = make()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        before = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
        try:
            shard_module(model, mesh, given)
        finally:
            if isinstance(model, nn.Module):
                assert all(param is before[name] for name, param in model.named_parameters())
                assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    text = error_on_ranks(call, math.prod(shape))
    if shape == (1, 1):
        text, expected = text.split("\n")[0], expected.split("\n")[0]
    assert_says(text, expected)


@sim.ranks(1, backends=("sim",))
def test_on_one_rank_the_model_is_returned_as_it_is(ctx):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = Model()
    before = dict(model.named_parameters())
    everything = plan(
        plan={"**.weight": ("tp",)},
        input_plan={"input": ("dp",)},
        output_plan={"output": ("dp",)},
        return_local_tensor=["head"],
        local_plan={"layers.*": ("dp",)},
    )
    assert shard_module(model, mesh, everything) is model
    assert all(param is before[name] for name, param in model.named_parameters())
    assert type(model(torch.ones(2, 8))) is torch.Tensor
    assert shard_module(function, mesh, plan(input_plan={"input": ("dp",)})) is function


# -- models that do not fit ------------------------------------------------------------------------------------------


def mesh_of():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tied():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    shard_module(model, mesh_of(), plan(plan={"0.weight": ("tp", "None"), "1.weight": ("None", "tp")}))


def one_module_twice():
    layer = nn.Linear(4, 4)
    given = plan(input_plan={"0.input": ("tp", "None"), "1.input": ("None", "tp")})
    shard_module(nn.Sequential(layer, layer), mesh_of(), given)


def wrapped_before():
    model = Model()
    fully_shard(model.layers[0])
    shard_module(model, mesh_of(), plan(plan={"layers.0.w1.weight": ("tp",)}))


def on_another_mesh():
    model, mesh = Model(), mesh_of()
    shard_module(model, mesh["tp"], plan(plan={"head.weight": ("tp",)}))
    shard_module(model, mesh, plan(plan={"head.weight": ("dp",)}))


def with_a_gradient():
    model = Model()
    model(torch.ones(2, 8)).sum().backward()
    shard_module(model, mesh_of(), plan(plan={"head.weight": ("tp",)}))


def with_hooks(register):
    model, given = Model(), plan(plan={"head.weight": ("tp",)})
    shard_module(model, mesh_of(), given)
    shard_module(model, mesh_of(), given)  # its own hook on the gradient is made anew
    getattr(model.head.weight, register)(lambda x: None)
    shard_module(model, mesh_of(), given)


def on_ranks_out_of_order():
    mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp"))
    shard_module(Model(), mesh, plan(plan={"head.weight": ("tp",)}))


AFTERWARDS = "register them on the parameter that the module has after shard_module"

MODELS = {
    "ranks out of order": (
        on_ranks_out_of_order,
        f"{CANNOT}: ranks along axis 'tp' have to ascend, as a process group has no other order\n  …\n"
        "  try: a mesh whose rows and columns ascend, as init_device_mesh makes them",
    ),
    "a gradient before": (
        with_a_gradient,
        f"{CANNOT}: parameter 'head.weight': it has a gradient, which would be lost\n  …\n"
        "  try: model.zero_grad() first",
    ),
    "a hook before": (
        lambda: with_hooks("register_hook"),
        f"{CANNOT}: parameter 'head.weight': it has hooks, which would be lost…\n  …\n  try: {AFTERWARDS}",
    ),
    "a hook behind the gradient before": (
        lambda: with_hooks("register_post_accumulate_grad_hook"),
        f"{CANNOT}: parameter 'head.weight': it has hooks, which would be lost…\n  …\n  try: {AFTERWARDS}",
    ),
    "two layouts for one parameter": (
        tied,
        f"{CANNOT}: '1.weight' and '0.weight' are one parameter, and the plan has two layouts for it\n  …\n"
        "  try: the same layout for both, or one of them only",
    ),
    "two plans for one module": (
        one_module_twice,
        f"{CANNOT}: '1' and '0' are one module, and the plan says different things of it\n  …\n  try: one of the two",
    ),
    "fully_shard first": (
        wrapped_before,
        f"{CANNOT}: fully_shard or hsdp has parameter 'layers.0.w1.weight' already, with module 'layers.0'\n  …\n"
        "  try: shard_module first, fully_shard after it",
    ),
    "another mesh first": (
        on_another_mesh,
        f"{CANNOT}: parameter 'head.weight' is a DTensor on another mesh\n  …\n"
        "  try: its mesh, or a model whose parameters are unsharded",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_cannot_be_sharded(name):
    call, expected = MODELS[name]
    assert_says(error_on_ranks(call, 4, sends=True), expected)


# -- calls that do not fit -------------------------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x, *rest):
        return self.make(x)


WHOLE = torch.arange(32.0).reshape(4, 8)
ROWS = ("dp", "None")

# Fields of the plan; what the model makes of its input; what is said.
CALLS = {
    "one layout for two results": (
        {"output_plan": {"output": ROWS}},
        lambda x: (x, x),
        "cannot lay out the output of the model: it is a tuple of 2, and the layouts are for something else\n"
        "  layouts: (dp, -)\n  try: a list of 2 layouts",
    ),
    "one layout too few": (
        {"output_plan": {"output": [ROWS]}},
        lambda x: [x, x],
        "cannot lay out the output of the model: it is a list of 2, and the layouts are for something else\n"
        "  layouts: [(dp, -)]\n  try: a list of 2 layouts",
    ),
    "a list for one result": (
        {"output_plan": {"output": [ROWS]}},
        lambda x: x,
        "cannot lay out the output of the model: it is a DTensor, and the layouts are for something else\n"
        "  layouts: [(dp, -)]\n  try: one layout",
    ),
    "a name that is not returned": (
        {"output_plan": {"output": {"hiden": ROWS}}},
        lambda x: {"hidden": x},
        "cannot lay out the output of the model: it is a dict of 'hidden', and the layouts are for something else\n"
        "  layouts: {hiden: (dp, -)}\n  try: a dict of layouts by its names",
    ),
    "more entries than dims of a result": (
        {"output_plan": {"output": [None, ("dp", "None", "tp")]}},
        lambda x: (x, x),
        "cannot lay out the entry 1 of output of the model: …entry 2, 'tp', is for a dim that a tensor of ndim 2 does "
        "not have\n  …\n  try: one entry per dim at most",
    ),
    "a list where one tensor was declared": (
        {"input_plan": {"input": ROWS}},
        lambda x: x,
        "cannot lay out the input 'x' of the model: it is a list of 1, and the layouts are for something else\n"
        "  layouts: (dp, -)\n  try: a list of 1 layouts",
    ),
    "fewer arguments than layouts": (
        {"input_plan": {"input": [ROWS, ROWS, ROWS]}},
        lambda x: x,
        "cannot lay out the inputs of the model: there are more layouts than arguments: 1 were given\n"
        "  layouts: [(dp, -), (dp, -), (dp, -)]\n  try: 1 layouts, or 2 arguments",
    ),
    "more entries than dims of an argument": (
        {"input_plan": {"input": ("None", "None", "tp")}},
        lambda x: x,
        "cannot lay out the input 'x' of the model: …entry 2, 'tp', is for a dim that a tensor of ndim 2 does not "
        "have\n  …\n  try: one entry per dim at most",
    ),
    "a local module that returns DTensors": (
        {"local_plan": {"": ROWS}},
        lambda x: distribute_tensor(WHOLE, mesh_of(), ROWS, src_data_rank=None),
        "…cannot take the output of the model as a local shard: it is a DTensor already\n  layout: (dp, -)…\n"
        "  try: no local_plan for a module that returns DTensors",
    ),
    "a local module whose parts are none": (
        {"local_plan": {"": ("tp", "None")}},
        lambda x: x[: 1 + 2 * (torch.distributed.get_rank() % 2)],
        "cannot take the output of the model as a local shard: the shards add up to (4, 8), of which rank 0 would "
        "have…\n  …\n  …\n  rank 1: (3, 8)\n  …\n  …\n"
        "  try: a layout that the shards have, with dims split as torch.chunk does it",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_does_not_fit_a_call(name):
    fields, make, expected = CALLS[name]

    def call():
        mesh = mesh_of()
        model = shard_module(Returns(make), mesh, plan(**fields))
        x = distribute_tensor(WHOLE, mesh, (None,), src_data_rank=None)
        model([x] if name == "a list where one tensor was declared" else x)

    assert_says(error_on_ranks(call, 4, sends=True), expected)


@sim.ranks(4, backends=("sim",))
def test_parts_that_differ_are_not_wrapped(ctx):
    model = shard_module(Returns(lambda x: x), mesh_of(), plan(input_plan={"input": ROWS}, wrap_inputs=True))
    with pytest.raises(ValueError, match=r"cannot lay out the input 'x' of the model: .* the parts have different"):
        model(WHOLE[: torch.distributed.get_rank() + 1])
    with pytest.raises(ValueError, match="cannot lay out the input 'x' of the model"):
        model(WHOLE[0])


@sim.ranks(4, backends=("sim",))
def test_the_hints_work_when_they_are_followed(ctx):
    mesh = mesh_of()
    for given in (
        plan(plan={"layers.0.w1.weight": ("tp", "None"), "layers.0.*.weight": ("dp",), "**.w2.weight": ("tp",)}),
        plan(input_plan={"**.*.w1.input": ("dp", "None"), "layers.0.input": [("dp", "None")]}),
        plan(input_plan={"layers.0.input": {"mask": ("dp", "None")}}, return_local_tensor=["head"]),
        plan(plan={"head.weight": MESH("tp", "None")}, output_plan={"head.output": ("dp", "None")}),
    ):
        shard_module(Model(), mesh, given)
    shard_module(function, mesh, plan(input_plan={"input": [("dp",), None]}))
    wrapped = from_local(torch.ones(2, 8), mesh, ROWS)
    assert tuple(wrapped.shape) == (4, 8)
