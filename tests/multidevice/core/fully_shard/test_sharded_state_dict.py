"""State dicts of sharded models: against the model before it was wrapped, and against torch's FSDP2."""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from units_kit import full, mesh_of

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.state_dict import get_model_state_dict, load_state_dict
from hyper_parallel.core.fully_shard.utils import CPUOffloadPolicy, OffloadPolicy

pytestmark = pytest.mark.tier("test")

SIM_ONLY = ("sim",)
NO_GLOO = ("sim", "gpu", "npu")


class Block(nn.Module):
    """Odd sizes, a frozen parameter, one left out of sharding, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.down = nn.Linear(5, 7, bias=False)
        self.down.weight.requires_grad_(False)
        self.plain = nn.Parameter(torch.randn(3))
        self.register_buffer("steps", torch.tensor(4))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x))) * self.plain.sum()


class Net(nn.Module):
    """`scale` has one row; the weight of `head` is that of `embed`; the settings are no tensors."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1, 3), 1.5))
        self.embed = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(7, 7)
        self.head.weight = self.embed.weight
        self.low = nn.Parameter(torch.randn(6, 2).bfloat16())
        self.settings = {"seen": 3}

    def forward(self, x):
        x = self.embed(x) * self.scale.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def get_extra_state(self):
        return {"settings": dict(self.settings), "names": ["a", {"b"}]}

    def set_extra_state(self, state):
        self.settings = dict(state["settings"])


def net(ctx):
    torch.manual_seed(0)
    return Net().to(ctx.device)


def wrap(model, mesh, how=fully_shard, *, root=True):
    for block in model.blocks:
        how(block, mesh=mesh, ignored_params={block.plain})
    return how(model, mesh=mesh, ignored_params={block.plain for block in model.blocks}) if root else model


def tensors(state):
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def assert_holds(model, wanted):
    """The values of the model, gathered by torch, are these; dtype and layout are the model's own."""
    found = tensors(model.state_dict())
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.equal(full(value), wanted[name].to(value.device, value.dtype)), name


def changed(ctx):
    """Values that the model of these tests does not have yet: the tied ones the same, the others all different."""
    state = tensors(net(ctx).state_dict())
    for number, value in enumerate(state.values()):
        value.add_(number + 1)
    state["head.weight"] = state["embed.weight"]
    return state


# -- out -------------------------------------------------------------------------------------------------------------

OPTIONS = [
    StateDictOptions(**dict(zip(("full_state_dict", "cpu_offload", "ignore_frozen_params"), flags, strict=True)))
    for flags in itertools.product((False, True), repeat=3)
]


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_GLOO)
def test_the_getter_agrees_with_the_unwrapped_model(ctx):
    for shape in ((ctx.world_size,), (2, ctx.world_size // 2)):
        ours, values = wrap(net(ctx), mesh_of(ctx, *shape)), net(ctx).state_dict()
        for options in [None, *OPTIONS]:
            ours.unshard()
            ours.blocks[1].unshard()
            found = get_model_state_dict(ours, options=options)
            assert all(isinstance(p, DTensor) or n.endswith("plain") for n, p in ours.named_parameters())
            asked = options or StateDictOptions()
            if asked.full_state_dict and asked.cpu_offload and ctx.rank:
                assert found == {}
                continue
            frozen = ["blocks.0.down.weight", "blocks.1.down.weight"] if asked.ignore_frozen_params else []
            assert list(found) == [name for name in values if name not in frozen]
            assert found["_extra_state"] == {"settings": {"seen": 3}, "names": ["a", {"b"}]}
            for name, value in tensors(found).items():
                sharded = isinstance(value, DTensor)
                assert sharded == (
                    name in dict(ours.named_parameters(remove_duplicate=False))
                    and not (asked.full_state_dict or name.endswith("plain"))
                ), name
                assert not value.requires_grad
                assert torch.equal(full(value.to(ctx.device)), values[name]), name  # the CPU's are in no group of nccl
                assert value.device.type == ("cpu" if asked.cpu_offload else ctx.device_type)


@sim.ranks(4, backends=SIM_ONLY)
def test_the_getter_returns_what_torchs_does(ctx):
    class Simple(Net):
        get_extra_state = set_extra_state = nn.Module.get_extra_state  # torch gathers no settings with a set in them

    def simple():
        torch.manual_seed(0)
        return Simple()

    mesh = mesh_of(ctx, 2, 2)
    ours, theirs = wrap(simple(), mesh), wrap(simple(), mesh, fsdp2)
    for options in OPTIONS:
        found = get_model_state_dict(ours, options=options)
        wanted = torchs.get_model_state_dict(theirs, options=options)
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert type(found[name]) is type(value), name
            if isinstance(value, DTensor):
                assert (found[name].placements, found[name].shape) == (value.placements, value.shape), name
                assert torch.equal(found[name].to_local(), value.to_local()), name
            else:
                assert torch.equal(found[name], value), name
    parts = get_model_state_dict(ours)
    parts["embed.weight"].to_local().fill_(9.0)  # the model's own memory, as in state_dict()
    assert (full(ours.embed.weight) == 9.0).all()


@sim.ranks(4, backends=SIM_ONLY)
def test_the_getter_knows_wrappers_frozen_ties_other_meshes_and_meta(ctx):
    full = StateDictOptions(full_state_dict=True)
    grid = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("data", "tp"))
    model, plain = net(ctx), net(ctx)
    split = nn.Parameter(distribute_tensor(model.head.bias.detach(), grid["tp"], [Shard(0)]))
    model.head.bias = split
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.embed.weight.requires_grad_(False)
    fully_shard(model.blocks[1], mesh=grid["data"], ignored_params=[model.blocks[1].plain])
    fully_shard(model, mesh=grid["data"], ignored_params=[split])
    names = list(plain.state_dict())
    assert list(get_model_state_dict(model)) == names
    found = get_model_state_dict(model, options=full)
    assert all(torch.equal(found[name], value) for name, value in tensors(plain.state_dict()).items())
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert not {"embed.weight", "head.weight", "blocks.0.down.weight"} & set(trained)
    wanted = changed(ctx)
    wanted["_extra_state"] = {"settings": {"seen": 8}}
    if ctx.rank == 2:  # alone: the names of the checkpointed block are known before anything is sent
        moving = as_dtensors(tensors(wanted), grid, [Shard(1), Shard(0)])
        with pytest.raises(ValueError, match=r"cannot load 'blocks.0.*up.bias': got a Tensor of shape \(4,\)"):
            model.load_state_dict(moving | {"blocks.0.up.bias": torch.zeros(4)})
    model.load_state_dict(wanted)
    assert model.settings == {"seen": 8}
    found = get_model_state_dict(model, options=full)
    assert all(torch.equal(found[name], value) for name, value in tensors(wanted).items())

    partly, unwrapped = wrap(net(ctx), grid["data"], root=False), net(ctx)
    for candidate in (partly, unwrapped, torch.compile(partly)):
        found = get_model_state_dict(candidate, options=full)
        assert list(found) == names
        assert all(torch.equal(found[name], value) for name, value in tensors(plain.state_dict()).items())

    with torch.device("meta"):
        model = fully_shard(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), mesh=grid["data"])
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert {name: value.shape for name, value in found.items() if ctx.rank == 0} == {
        name: value.shape for name, value in model.state_dict().items() if ctx.rank == 0
    }
    assert all(value.is_meta and not isinstance(value, DTensor) for value in found.values())


@sim.ranks(2, backends=SIM_ONLY)
def test_what_the_getter_refuses(ctx):
    model = fully_shard(nn.Linear(3, 3), mesh=mesh_of(ctx))
    with pytest.raises(
        ValueError, match=r"broadcast_from_rank0=True is .*\n  options: .*\n  try: full_state_dict=True"
    ):
        get_model_state_dict(model, options=StateDictOptions(broadcast_from_rank0=True))
    with pytest.raises(RuntimeError, match="empty"):
        get_model_state_dict(nn.ReLU())
    assert get_model_state_dict(nn.ReLU(), options=StateDictOptions(strict=False)) == {}


class LiveBytes(TorchDispatchMode):
    """Adds up the memory that operators inside of it have made, and that is still held."""

    def __init__(self, known):
        super().__init__()
        self.known = {StorageWeakRef(value.untyped_storage()).cdata for value in known}
        self.made, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on parts come here one by one
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                ref = StorageWeakRef(value.untyped_storage())
                if ref.cdata not in self.known:
                    self.made[ref.cdata] = (ref, value.untyped_storage().nbytes())
        self.peak = max(self.peak, self.held())
        return result

    def held(self):
        return sum(size for ref, size in self.made.values() if not ref.expired())


@sim.ranks(4, backends=SIM_ONLY)
def test_whole_tensors_come_one_by_one(ctx):
    layers, size = 6, 64 * 64 * 4
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers))).to(ctx.device)
    for layer in model:
        fully_shard(layer, mesh=mesh_of(ctx))
    fully_shard(model, mesh=mesh_of(ctx))
    parts = [p.to_local() for p in model.parameters()]

    def count(**options):
        with LiveBytes(parts) as live:
            found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, **options))
            kept = live.held()
        del found
        return live.peak, kept

    peak, kept = count()
    assert kept == layers * size  # the counter sees what is gathered
    assert peak - kept <= 2 * size
    peak, kept = count(cpu_offload=True)
    assert kept == (layers * size if ctx.rank == 0 else 0)  # the host's memory is the mesh's device here
    assert peak - kept <= 2 * size  # the one at hand; a backend may still hold the last one
    for part in parts:
        assert part.abs().sum() > 0


# -- in --------------------------------------------------------------------------------------------------------------


def as_dtensors(values, mesh, placements):
    """Every value as a DTensor; a dim that a value does not have is its last one."""

    def placement(value, wanted):
        return Shard(min(wanted.dim, value.dim() - 1)) if isinstance(wanted, Shard) else wanted

    return {
        name: distribute_tensor(value, mesh, [placement(value, p) for p in placements], src_data_rank=None)
        if value.dim()
        else value
        for name, value in values.items()
    }


def pending(values, mesh):
    """DTensors of which every rank holds a summand."""
    made = {}
    for name, value in values.items():
        summand = value if mesh.get_local_rank() == 0 else torch.zeros_like(value)
        made[name] = DTensor.from_local(summand, mesh, [Partial()]) if value.is_floating_point() else value
    return made


def local_parts(model, values):
    """What each rank holds of the values, cut as the model's parameters are."""
    held = tensors(model.state_dict())
    return {
        name: distribute_tensor(value, held[name].device_mesh, held[name].placements, src_data_rank=None).to_local()
        if isinstance(held[name], DTensor)
        else value
        for name, value in values.items()
    }


def sources(ctx, model, wanted):
    """Dicts that hold the same values in different ways."""
    line, grid = mesh_of(ctx), mesh_of(ctx, 2, ctx.world_size // 2)
    backwards = init_device_mesh(ctx.device_type, (ctx.world_size,))
    backwards = type(backwards)(ctx.device_type, list(reversed(range(ctx.world_size))))
    yield "whole", wanted
    yield "local", local_parts(model, wanted)
    yield "own rows", as_dtensors(wanted, line, [Shard(0)])
    yield "columns", as_dtensors(wanted, line, [Shard(1)])
    yield "replicated", as_dtensors(wanted, line, [Replicate()])
    yield "pending", pending(wanted, line)
    yield "grid", as_dtensors(wanted, grid, [Shard(1), Shard(0)])
    yield "hybrid", as_dtensors(wanted, grid, [Replicate(), Shard(0)])
    yield "slice", as_dtensors(wanted, grid["shard"], [Shard(0)])
    yield "other slice", as_dtensors(wanted, grid["replicate"], [Shard(1)])
    yield "backwards", as_dtensors(wanted, backwards, [Shard(0)])
    double = {name: value.double() if value.is_floating_point() else value for name, value in wanted.items()}
    yield "double", as_dtensors(double, line, [Shard(1)])
    ways = [wanted, as_dtensors(wanted, line, [Shard(1)]), as_dtensors(wanted, grid, [Shard(0), Replicate()])]
    yield "mixed", {name: ways[number % len(ways)][name] for number, name in enumerate(wanted)}


def check_sources(ctx, names=None):
    for shape in ((ctx.world_size,), (2, ctx.world_size // 2)):
        model, wanted = wrap(net(ctx), mesh_of(ctx, *shape)), changed(ctx)
        blank = {name: torch.zeros_like(value) for name, value in wanted.items()}
        tried = []
        for name, source in sources(ctx, model, wanted):
            if names is not None and name not in names:
                continue
            tried.append(name)
            model.load_state_dict(blank, strict=False)
            assert_holds(model, blank)
            model.unshard()
            given, storage = dict(source), [p._local_tensor for p in model.state_dict().values() if is_sharded(p)]
            outcome = model.load_state_dict(source, strict=False)
            assert (outcome.missing_keys, outcome.unexpected_keys) == (["_extra_state"], []), name
            assert_holds(model, wanted)
            assert source.keys() == given.keys(), name
            assert all(source[key] is value for key, value in given.items()), name
            after = [p._local_tensor for p in model.state_dict().values() if is_sharded(p)]
            assert [p.data_ptr() for p in after] == [p.data_ptr() for p in storage], name
        assert len(tried) >= (3 if names else 13)


def is_sharded(value):
    return isinstance(value, DTensor)


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_GLOO)
def test_values_of_any_layout_load(ctx):
    check_sources(ctx)


@pytest.mark.tier("full")
@sim.ranks(4, backends=("gloo",))
def test_values_of_any_layout_load_on_processes(ctx):
    check_sources(ctx, ("local", "columns", "pending", "grid", "other slice", "mixed"))


@sim.ranks(4, backends=SIM_ONLY)
def test_wrapped_parts_load_by_themselves_and_under_an_unwrapped_root(ctx):
    wanted, mesh = changed(ctx), mesh_of(ctx)
    model = wrap(net(ctx), mesh, root=False)
    load_state_dict(model, wanted, strict=False)
    assert_holds(model, wanted)

    wanted = {name: value + 1 for name, value in wanted.items()}
    block = {name.removeprefix("blocks.1."): value for name, value in wanted.items() if name.startswith("blocks.1.")}
    assert model.blocks[1].load_state_dict(block) == ([], [])
    assert all(torch.equal(full(value), block[name]) for name, value in model.blocks[1].state_dict().items())
    block = as_dtensors(block, mesh, [Shard(1)])
    load_state_dict(nn.Sequential(model.blocks[0]), {f"0.{name}": value for name, value in block.items()})
    assert torch.equal(full(model.blocks[0].up.weight), full(block["up.weight"]))

    with pytest.raises(RuntimeError, match=r"(?s)blocks.0.up.weight.*mixed torch.Tensor and DTensor"):
        model.load_state_dict(wanted, strict=False)  # torch's own
    keys = r'(?s)cannot load all of Net: .*\n  Missing key\(s\) in state_dict: "_extra_state"\. \n  try: strict'
    with pytest.raises(RuntimeError, match=keys):
        load_state_dict(model, wanted)

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.compile(model)

    for compiled in (torch.compile(model), Compiled()):
        found = get_model_state_dict(compiled)
        assert not any("_orig_mod" in name for name in found)
        doubled = {n: v * 2 if isinstance(v, torch.Tensor) else v for n, v in found.items()}
        assert load_state_dict(compiled, doubled) == ([], [])
        assert_holds(model, {n.removeprefix("body."): full(v) for n, v in tensors(doubled).items()})


@sim.ranks(4, backends=SIM_ONLY)
def test_a_parameter_that_one_rank_holds_alone_loads_the_same_from_part_and_whole(ctx):
    torch.manual_seed(0)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.row = nn.Parameter(torch.randn(1, 4))  # all of it on rank 0
            self.few = nn.Parameter(torch.randn(3))  # none of it on rank 3
            self.ones = nn.Parameter(torch.randn(4, 1))
            self.none = nn.Parameter(torch.randn(2, 0))

        def forward(self, x):
            return x

    for shape in ((4,), (2, 2), (4, 1)):
        model = fully_shard(Odd(), mesh=mesh_of(ctx, *shape))
        wanted = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
        for source in (wanted, local_parts(model, wanted), as_dtensors(wanted, mesh_of(ctx), [Shard(1)])):
            model.load_state_dict({name: torch.zeros_like(value) for name, value in wanted.items()})
            model.load_state_dict(source)
            assert_holds(model, wanted)


@sim.ranks(4, backends=SIM_ONLY)
def test_what_does_not_fit_is_refused_before_anything_happens(ctx):
    mesh = mesh_of(ctx)
    model, wanted = wrap(net(ctx), mesh), changed(ctx)
    before = {name: full(value).clone() for name, value in tensors(model.state_dict()).items()}
    moving = as_dtensors(wanted, mesh, [Shard(1)])
    shapes = {
        "blocks.1.up.weight": r"\(5, 7\)   this rank's shard: \([120], 7\)",
        "blocks.1.plain": r"\(3,\)   this rank's shard: \(3,\)",
        "blocks.1.norm.running_mean": r"\(5,\)   this rank's shard: \(5,\)",
        "blocks.1.steps": r"\(\)   this rank's shard: \(\)",
    }
    bad = [
        torch.zeros(5, 6),
        torch.zeros(35),
        "text",
        None,
        3.0,
        distribute_tensor(torch.zeros(8, 7), mesh, [Shard(0)]),
    ]
    for name, value in itertools.product(shapes, bad):
        if ctx.rank == 2:  # alone: whoever communicated would wait for ever
            got = (
                rf"a .*Tensor of shape \({value.shape[0]}, ?.*\)" if isinstance(value, torch.Tensor) else f"a {value!r}"
            )
            with pytest.raises(
                ValueError, match=rf"cannot load '{name}': got {got}\n  global shape: {shapes[name]}\n  try: "
            ):
                model.load_state_dict(moving | {name: value})
    with pytest.raises(ValueError, match=r"shard: .*\n  likewise: 'blocks.1.plain', 'blocks.1.steps'\n"):
        model.load_state_dict(moving | {"blocks.1.plain": 1, "blocks.1.steps": 1, "scale": 1})
    assert_holds(model, before)
    extra = {"z": torch.ones(1), "blocks.0.scratch": torch.ones(9), "a.b": torch.ones(1)}
    some = {name: value for name, value in moving.items() if not name.endswith(("bias", "steps"))} | extra
    missing = sorted(["_extra_state", *(name for name in wanted if name.endswith(("bias", "steps")))])
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(some)
    listed = ", ".join(f'"{name}"' for name in missing)
    assert str(raised.value) == (
        "cannot load all of Net: the keys are not those of the module\n"
        f"  Missing key(s) in state_dict: {listed}. \n"
        '  Unexpected key(s) in state_dict: "a.b", "blocks.0.scratch", "z". \n'
        "  try: strict=False to load the keys that fit"
    )
    outcome = model.load_state_dict(some, strict=False)
    assert type(outcome) is type(nn.Linear(1, 1).load_state_dict({}, strict=False))
    assert (sorted(outcome.missing_keys), sorted(outcome.unexpected_keys)) == (missing, sorted(extra))
    assert_holds(model, before | {name: wanted[name] for name in some if name in wanted})
    assert model.load_state_dict(wanted | {"_extra_state": {"settings": {}}, "blocks.0.steps": torch.ones(1)}) == (
        [],
        [],
    )


@sim.ranks(2, backends=SIM_ONLY)
def test_hooks_and_overrides_see_what_the_caller_gave(ctx):
    torch.manual_seed(0)
    seen = []

    class Old(nn.Module):
        """Loads checkpoints in which the weight had another name and was transposed."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3))
            self.child = nn.Linear(3, 5)

        def forward(self, x):
            return x @ self.weight

        def _load_from_state_dict(self, state_dict, prefix, *args):
            if prefix + "old" in state_dict:
                state_dict[prefix + "weight"] = state_dict.pop(prefix + "old").t()
            elif state_dict[prefix + "weight"].shape == (3, 5):
                state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
            super()._load_from_state_dict(state_dict, prefix, *args)

    class Own(nn.Module):
        """Copies for itself."""

        def __init__(self):
            super().__init__()
            self.doubled = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x

        def _load_from_state_dict(self, state_dict, prefix, *args):
            seen.append(type(state_dict[prefix + "doubled"]))

    model = nn.Sequential(Old(), nn.Linear(5, 5), Own(), nn.BatchNorm1d(5)).to(ctx.device)
    fully_shard(model[0], mesh=mesh_of(ctx))
    fully_shard(model, mesh=mesh_of(ctx))
    model[1].register_load_state_dict_pre_hook(lambda module, state, prefix, *_: state.update(
        {prefix + "bias": state[prefix + "bias"][None].sum(0) + 1}))  # fmt: skip
    for name, module in model.named_modules():
        module.register_load_state_dict_post_hook(lambda module, keys, name=name: seen.append((name, list(keys[0]))))
    model[3].register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())
    hooks = [len(module._load_state_dict_pre_hooks) for module in model.modules()]
    state = {
        name: full(value) + 1 for name, value in model.state_dict().items() if name not in ("0.weight", "1.weight")
    }
    state["0.old"] = torch.randn(3, 5, device=ctx.device)
    given = dict(state)
    assert model.load_state_dict(state) == ([], [])  # the last hook forgave what was missing
    late = ["1.weight"]
    assert seen == [("0.child", []), ("0", []), ("1", late), torch.Tensor, ("2", late), ("3", late), ("", [])]
    assert torch.equal(full(model[0].weight), given["0.old"].t())
    assert torch.equal(full(model[1].bias), given["1.bias"] + 1)
    assert state.keys() == given.keys()
    assert all(state[name] is value for name, value in given.items())
    with pytest.raises(ValueError, match=r"cannot load '0.weight': got a Tensor of shape \(5, 4\)"):
        model.load_state_dict(state | {"0.old": torch.zeros(4, 5)})
    assert [len(module._load_state_dict_pre_hooks) for module in model.modules()] == hooks
    state["0.weight"] = state.pop("0.old") + 1  # of another shape until it is converted
    model.load_state_dict(state)
    assert torch.equal(full(model[0].weight), given["0.old"].t() + 1)

    source = nn.Sequential(Old(), nn.Linear(5, 5), Own(), nn.BatchNorm1d(5)).state_dict()
    source._metadata["3"]["version"] = 1  # before batches were counted: torch fills in what the dict lacks
    del source["3.num_batches_tracked"]
    assert model.load_state_dict(source) == ([], [])


class Homes(nn.Module):
    """Parameters that the engine keeps in different ways."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Linear(6, 7)  # split by tp first
        self.columns = nn.Linear(7, 6)  # split by fsdp along dim 1
        self.whole = nn.Parameter(torch.randn(3, 3))  # replicated
        self.number = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.columns(self.rows(x)) + self.whole.sum()


@sim.ranks(4, backends=NO_GLOO)
def test_parameters_on_two_meshes_along_any_dim_replicated_and_on_the_host(ctx):
    grid = init_device_mesh(ctx.device_type, (2, ctx.world_size // 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    plain = Homes()
    wanted = {name: value + 1 for name, value in plain.state_dict().items()}
    for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        model = copy.deepcopy(plain).to(ctx.device)
        for name, value in list(model.rows.named_parameters()):
            split = distribute_tensor(value.detach(), grid["tp"], [Shard(0)])
            setattr(model.rows, name, nn.Parameter(split))
        fully_shard(
            model,
            mesh=grid["fsdp"],
            shard_placement_fn=lambda p: Shard(1) if p.shape == (6, 7) else None,
            replicate_params={model.whole, model.number},
            offload_policy=policy,
        )
        placements = {name: value.placements for name, value in model.state_dict().items()}
        if isinstance(policy, CPUOffloadPolicy):
            assert {value.to_local().device.type for value in model.state_dict().values()} == {"cpu"}
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert all(torch.equal(full[name].cpu(), value) for name, value in plain.state_dict().items())
        on_mesh = {name: value.to(ctx.device) for name, value in wanted.items()}
        ways = {
            "whole": wanted | {"number": wanted["number"].view(1)},  # as torch accepts it
            "parts": {name: value.clone() for name, value in as_parts(model, wanted).items()},
            "tp": as_dtensors(on_mesh, grid["tp"], [Shard(1)]),
            "fsdp": as_dtensors(on_mesh, grid["fsdp"], [Shard(0)]),
            "grid": as_dtensors(on_mesh, grid, [Shard(0), Shard(1)]),
        }
        for way, source in ways.items():
            model.load_state_dict({name: torch.zeros_like(value) for name, value in wanted.items()})
            model.load_state_dict(source)
            assert {name: value.placements for name, value in model.state_dict().items()} == placements, way
            full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            assert all(torch.equal(full[name].cpu(), value) for name, value in wanted.items()), way


def as_parts(model, wanted):
    """Values as DTensors laid out as the model's own, cut by the layout and not by torch."""
    made = {}
    for name, held in model.state_dict().items():
        rows = Layout.of(held).local_slice(held.shape)
        made[name] = wanted[name][rows]
        assert made[name].shape == held.to_local().shape, name
    return made


# -- meta ------------------------------------------------------------------------------------------------------------


@sim.ranks(4, backends=NO_GLOO)
def test_a_meta_model_gets_its_memory_from_assign(ctx):
    mesh, plain, wanted = mesh_of(ctx), net(ctx), changed(ctx)
    wanted["_extra_state"] = {"settings": {}}
    plain.load_state_dict(wanted)
    torch.manual_seed(1)
    x = torch.randn(ctx.world_size, 4, 7, device=ctx.device)
    for load in ("ours", "torch's", "torch's, from rank 0"):
        with torch.device("meta"):
            model = wrap(Net(), mesh)
        for block in model.blocks:
            block.scratch = torch.zeros(2, device=ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.embed.weight.note = "kept"
        if load == "ours":
            with pytest.warns(UserWarning, match="no-op"):
                model.load_state_dict(wanted)
            assert model.embed.weight.is_meta
            with pytest.warns(UserWarning, match="values are copied"):
                assert model.load_state_dict(wanted, assign=True) == ([], [])
        else:
            first = load == "torch's, from rank 0"
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=first)
            source = dict(wanted) if not first or ctx.rank == 0 else {}
            with pytest.warns(UserWarning, match="values are copied"):
                torchs.set_model_state_dict(model, source, options=options)
        assert_holds(model, tensors(wanted))
        assert model.head.weight is model.embed.weight
        assert model.embed.weight.note == "kept"
        assert any(p is model.embed.weight for p in optimizer.param_groups[0]["params"])
        held = [each for each in (*model.parameters(), *model.buffers()) if load == "ours" or each.dim()]
        assert {each.device.type for each in held} == {ctx.device_type}  # torch leaves what has no dims on the host
        assert torch.allclose(model.eval()(x[ctx.rank]), plain.eval()(x[ctx.rank]), atol=1e-4)


# -- with torch's other ways of saving -------------------------------------------------------------------------------


@pytest.mark.tier("full")
@sim.ranks(4)
def test_saved_and_loaded_elsewhere(ctx, tmp_path):
    wanted = changed(ctx)
    model = wrap(net(ctx), mesh_of(ctx))
    model.load_state_dict(wanted, strict=False)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    with torch.device("meta"):
        empty = fully_shard(nn.Linear(5, 3), mesh=mesh_of(ctx))
    found = get_model_state_dict(empty, options=options)
    assert {name: (value.is_meta, value.shape) for name, value in found.items()} == (
        {} if ctx.rank else {"weight": (True, (3, 5)), "bias": (True, (3,))}
    )

    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0])
    other = wrap(net(ctx), mesh_of(ctx, 2, ctx.world_size // 2))
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state["model"])
    assert_holds(other, wanted)

    buffer = io.BytesIO()
    whole_model = get_model_state_dict(model, options=options)
    torch.save(whole_model, buffer)
    parcel = [buffer.getvalue()]
    dist.broadcast_object_list(parcel)
    loaded = torch.load(io.BytesIO(parcel[0]), weights_only=False)
    plain = net(ctx)
    plain.load_state_dict(loaded)
    assert_holds(plain, wanted)
    other = wrap(net(ctx), mesh_of(ctx, 2, ctx.world_size // 2))
    other.load_state_dict(loaded)
    assert_holds(other, wanted)

    theirs = wrap(net(ctx), mesh_of(ctx), fsdp2)  # and torch's model takes ours
    theirs.load_state_dict(get_model_state_dict(model))
    assert_holds(theirs, wanted)
    torchs.set_model_state_dict(theirs, copy.copy(loaded), options=StateDictOptions(full_state_dict=True))
    other = wrap(net(ctx), mesh_of(ctx, 2, ctx.world_size // 2))
    other.load_state_dict(torchs.get_model_state_dict(theirs))
    assert_holds(other, wanted)
    torchs.set_model_state_dict(other, torchs.get_model_state_dict(other))
    assert_holds(other, wanted)


@sim.ranks(2, backends=SIM_ONLY)
def test_safetensors(ctx, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    wanted, model = changed(ctx), wrap(net(ctx), mesh_of(ctx))
    model.load_state_dict(wanted, strict=False)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if ctx.rank == 0:
        safetensors.save_file(tensors(full), tmp_path / "model.safetensors")
    dist.barrier()
    other = wrap(net(ctx), mesh_of(ctx))
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"), strict=False)
    assert_holds(other, wanted)
