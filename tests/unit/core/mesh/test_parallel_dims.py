"""ParallelDims: which degrees are accepted, what every refusal says, and which meshes come out."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import os
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyper_parallel.core.mesh.parallel_dims import ParallelDims

# torch announces that looking up flattened names in a mesh may go one day; get_mesh is there for then.
pytestmark = pytest.mark.filterwarnings("ignore:Slicing a flattened dim from root mesh")

StartWorld = Callable[..., None]


@pytest.fixture
def start_world() -> Iterator[StartWorld]:
    """Start a world of any size in which this process is one rank and nothing is sent."""

    def start(world_size: int, rank: int = 0) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def model_with(**config: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(config=types.SimpleNamespace(**config))


def groups_made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Collect the ranks of every process group that torch's mesh code makes from now on."""
    made: list[list[int]] = []
    real = dist.device_mesh.new_group

    def counting(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        made.append(list(ranks))
        return real(ranks, *args, **kwargs)

    monkeypatch.setattr(dist.device_mesh, "new_group", counting)
    return made


# Degrees


def test_defaults_are_one_rank() -> None:
    dims = ParallelDims()
    assert (dims.dp_size, dims.non_dp_size, dims.world_size) == (1, 1, 1)
    assert [dims.tp_enabled, dims.cp_enabled, dims.ep_enabled, dims.pp_enabled, dims.fsdp_enabled] == [False] * 5


def test_properties_follow_the_degrees() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=3, cp=5, tp=7, pp=11, ep=13, world_size=30030)
    assert dims.dp_size == 6
    assert dims.non_dp_size == 5 * 7 * 11 * 13
    assert dims.tp_enabled
    assert dims.cp_enabled
    assert dims.ep_enabled
    assert dims.pp_enabled
    assert dims.fsdp_enabled
    assert ParallelDims(dp_replicate=2, world_size=2).fsdp_enabled


def test_what_is_inferred_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hyper_parallel"):
        ParallelDims.from_config(parallel_cfg={"tp": 2, "dp_shard": 4}, world_size=8)
        assert not caplog.messages
        dims = ParallelDims.from_config(parallel_cfg={"tp": 2}, world_size=8)
    assert caplog.messages == [f"ParallelDims inferred dp_shard=4: {dims.summary()}"]


def test_summary_is_one_line_with_everything() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=2, etp=2, world_size=16)
    assert dims.summary() == ("dp_replicate=2 dp_shard=2 cp=2 tp=2 pp=1 ep=1 etp=2 ulysses_degree=2 | dp=4 world=16")


@pytest.mark.parametrize(
    ("given", "world_size", "inferred"),
    [({}, 8, 8), ({"tp": 4}, 8, 2), ({"dp_replicate": 2, "cp": 2, "ep": 2}, 24, 3), ({"pp": 4}, 4, 1), ({}, 1, 1)],
)
def test_dp_shard_is_inferred(given: dict[str, int], world_size: int, inferred: int) -> None:
    assert ParallelDims(**given, dp_shard=-1, world_size=world_size).dp_shard == inferred


def test_constructor_infers_only_for_minus_one() -> None:
    with pytest.raises(ValueError, match="is 4, not world_size=8"):
        ParallelDims(tp=4, world_size=8)


def test_dims_are_a_value() -> None:
    dims = ParallelDims(tp=2, dp_shard=-1, world_size=4)
    assert dims == ParallelDims(tp=2, dp_shard=2, world_size=4)
    assert hash(dims) == hash(ParallelDims(tp=2, dp_shard=2, world_size=4))
    assert dims != ParallelDims(tp=4, world_size=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        dims.tp = 4  # type: ignore[misc]
    assert dataclasses.replace(dims, world_size=8, dp_shard=-1).dp_shard == 4


# Refusals. Every message prints every degree.

ALL_DEGREES = ["dp_replicate=", "dp_shard=", "cp=", "tp=", "pp=", "ep=", "etp=", "ulysses_degree=", "world_size="]


def refusal(call: Callable[[], Any], match: str, hint: str) -> None:
    with pytest.raises(ValueError, match=match) as error:
        call()
    what, degrees, tried = str(error.value).rsplit("\n", 2)
    assert degrees.startswith("  degrees: ")
    assert [part for part in ALL_DEGREES if part not in degrees] == []
    assert tried.startswith("  try: ")
    assert hint in tried
    assert what


@pytest.mark.parametrize("name", ["dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size"])
@pytest.mark.parametrize("value", [0, -2, -7])
def test_degrees_below_one_are_refused(name: str, value: int) -> None:
    refusal(lambda: ParallelDims(**{name: value}), rf"cannot use {name}={value}: it must be at least 1", f"{name}=1")


@pytest.mark.parametrize("name", ["dp_replicate", "cp", "tp", "pp", "ep", "etp", "world_size"])
def test_only_dp_shard_may_be_minus_one(name: str) -> None:
    refusal(lambda: ParallelDims(**{name: -1}), rf"cannot use {name}=-1: it must be at least 1\n", f"{name}=1")


def test_dp_shard_below_one_mentions_inference() -> None:
    refusal(lambda: ParallelDims(dp_shard=0), "at least 1, or dp_shard=-1 to infer it", "dp_shard=1")


@pytest.mark.parametrize(("value", "kind"), [("4", "str"), (2.0, "float"), (True, "bool"), (None, "NoneType")])
def test_degrees_that_are_no_whole_numbers_are_refused(value: Any, kind: str) -> None:
    refusal(lambda: ParallelDims(tp=value), f"cannot use tp={value!r}: a degree is a whole number, not {kind}", "tp=1")


def test_product_must_be_the_world_size() -> None:
    refusal(
        lambda: ParallelDims(dp_shard=2, tp=8, world_size=8),
        r"cannot place 8 ranks .*: dp_replicate \* dp_shard \* cp \* tp \* pp \* ep is 16, not world_size=8",
        "dp_shard=-1, which takes what the others leave, or start 16 ranks",
    )


def test_etp_is_no_axis() -> None:
    assert ParallelDims(tp=2, ep=2, etp=2, world_size=4).mesh_axes == {"ep": 2, "tp": 2}


def test_inference_must_divide() -> None:
    refusal(
        lambda: ParallelDims(dp_shard=-1, tp=3, pp=2, world_size=8),
        r"cannot infer dp_shard: world_size=8 is not divisible by dp_replicate \* cp \* tp \* pp \* ep = 6",
        "degrees whose product divides 8, or start a multiple of 6 ranks",
    )


def test_inference_needs_enough_ranks() -> None:
    refusal(lambda: ParallelDims(dp_shard=-1, tp=8, world_size=4), "cannot infer dp_shard: world_size=4", "divides 4")


def test_etp_with_experts_is_tp_or_one() -> None:
    refusal(
        lambda: ParallelDims(ep=2, tp=4, etp=2, world_size=8),
        "cannot use etp=2 with ep=2 and tp=4: inside an expert, tensors are split over all ranks of axis 'tp' or not",
        "etp=4 or etp=1",
    )
    refusal(lambda: ParallelDims(ep=2, etp=2, world_size=2), "cannot use etp=2 with ep=2 and tp=1", "etp=1")
    assert ParallelDims(ep=2, tp=4, etp=4, world_size=8).etp == 4
    assert ParallelDims(ep=2, tp=4, etp=1, world_size=8).etp == 1
    assert ParallelDims(tp=4, etp=2, world_size=4).etp == 2  # without experts it means nothing


@pytest.mark.parametrize("degree", [0, -1, 3, 8, 2.0, "2"])
def test_ulysses_degree_must_divide_cp(degree: Any) -> None:
    refusal(
        lambda: ParallelDims(cp=4, ulysses_degree=degree, world_size=4),
        f"cannot use ulysses_degree={degree!r} with cp=4: it must be a whole number >= 1 that divides cp",
        "ulysses_degree one of 1, 2, 4, or None for 4",
    )


def test_ulysses_degree_is_all_of_cp_by_default_and_ignored_without_cp() -> None:
    assert ParallelDims(cp=4, world_size=4).ulysses_degree == 4
    assert ParallelDims(cp=4, ulysses_degree=2, world_size=4).ulysses_degree == 2
    assert ParallelDims(ulysses_degree=3).ulysses_degree == 3
    assert ParallelDims(tp=2, ulysses_degree=0, world_size=2).tp == 2


# Configurations


def test_config_reads_any_object() -> None:
    wanted = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2, ep=2, etp=1, ulysses_degree=1, world_size=64)
    degrees = {f.name: getattr(wanted, f.name) for f in dataclasses.fields(wanted) if f.name != "world_size"}
    assert ParallelDims.from_config(degrees, 64) == wanted
    assert ParallelDims.from_config(types.SimpleNamespace(**degrees, unrelated="x"), 64) == wanted
    assert ParallelDims.from_config(wanted, 64) == wanted


@pytest.mark.parametrize(
    ("config", "world_size", "expected"),
    [
        ({"tp": 4}, 8, {"dp_shard": 2, "tp": 4, "etp": 4}),
        ({"tp": 4, "etp": 1}, 8, {"etp": 1}),
        ({"tp": 4, "etp": None, "dp_shard": None, "dp": None}, 8, {"dp_shard": 2, "etp": 4}),
        ({"dp": 8}, 8, {"dp_shard": 8}),
        ({"dp": 4, "dp_shard": 8}, 8, {"dp_shard": 8}),
        ({"dp": -1, "tp": 2}, 8, {"dp_shard": 4}),
        ({"dp_shard": -1, "dp": 3}, 8, {"dp_shard": 8}),
        ({"dp_replicate": 2}, 8, {"dp_shard": 4}),
        ({}, 1, {"dp_shard": 1, "etp": 1}),
        (None, 1, {"dp_shard": 1}),
        (None, 4, {"dp_shard": 4}),
    ],
)
def test_config_defaults(config: Any, world_size: int, expected: dict[str, int]) -> None:
    for source in (config, types.SimpleNamespace(**(config or {}))):
        dims = ParallelDims.from_config(source, world_size)
        assert {name: getattr(dims, name) for name in expected} == expected


def test_config_does_not_fix_what_is_wrong() -> None:
    refusal(lambda: ParallelDims.from_config({"dp_shard": 1, "tp": 4}, 8), "is 4, not world_size=8", "start 4 ranks")
    refusal(lambda: ParallelDims.from_config({"dp": 3}, 8), "is 3, not world_size=8", "dp_shard=-1")
    refusal(lambda: ParallelDims.from_config({"tp": "4"}, 4), "cannot use tp='4'", "tp=1")


@pytest.mark.parametrize(
    ("config", "blame", "hint"),
    [
        ("tp=4", "it is a str", '{"tp": 4}'),
        (4, "it is a int", '{"tp": 4}'),
        ({"tpp": 4}, "it has 'tpp', which is none of their names", "'tp'"),
        ({"tp": 4, "dp_shrad": 2}, "it has 'dp_shrad', which is none of their names", "'dp_shard'"),
        (types.SimpleNamespace(dp_replicat=2), "it has 'dp_replicat'", "'dp_replicate'"),
        ({"parallel": {"tp": 4}}, "it has none of their names", '{"tp": 4}'),
    ],
)
def test_what_is_no_configuration_of_degrees_is_refused(config: Any, blame: str, hint: str) -> None:
    with pytest.raises(ValueError, match="cannot read the degrees of a run") as error:
        ParallelDims.from_config(config, 8)
    assert blame in str(error.value)
    assert f"\n  try: {hint}" in str(error.value)


@pytest.mark.parametrize("device_type", [5, 0, [], {}])
def test_what_names_no_device_is_refused_before_a_group_is_asked_for(device_type: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot build a mesh: device_type is an? .*, not a str or None"):
        ParallelDims().build_mesh(device_type)


# Models


def test_model_that_fits_and_model_without_config_pass() -> None:
    dims = ParallelDims(tp=2, cp=4, ulysses_degree=2, ep=2, etp=2, world_size=16)
    dims.validate_against_model(model_with(num_attention_heads=8, num_key_value_heads=2, num_experts=4), seq_len=64)
    dims.validate_against_model(model_with(), seq_len=8)
    dims.validate_against_model(model_with(num_attention_heads=8, num_key_value_heads=None))
    dims.validate_against_model(torch.nn.Linear(3, 5), seq_len=7)


@pytest.mark.parametrize(
    ("degrees", "config", "seq_len", "match", "hint"),
    [
        (
            {"tp": 8},
            {"num_attention_heads": 12},
            None,
            "num_attention_heads=12 is not divisible by tp=8",
            "for num_attention_heads, tp one of 1, 2, 3, 4, 6",
        ),
        (
            {"tp": 2, "cp": 4, "ulysses_degree": 2},
            {"num_attention_heads": 6},
            None,
            r"num_attention_heads=6 is not divisible by tp \* ulysses_degree=4",
            "tp * ulysses_degree one of 1, 2, 3, 6",
        ),
        (
            {"tp": 4},
            {"num_attention_heads": 8, "num_key_value_heads": 2},
            None,
            "num_key_value_heads=2 is not divisible by tp=4",
            "for num_key_value_heads, tp one of 1, 2",
        ),
        ({"ep": 4}, {"num_experts": 6}, None, "num_experts=6 is not divisible by ep=4", "ep one of 1, 2, 3"),
        ({"ep": 4}, {"num_local_experts": 2}, None, "num_local_experts=2 is not divisible by ep=4", "ep one of 1, 2"),
        ({"cp": 2, "tp": 2}, {}, 10, r"seq_len=10 is not divisible by cp \* tp=4", "for seq_len, cp * tp one of 1, 2"),
    ],
)
def test_model_that_does_not_fit(
    degrees: dict[str, int], config: dict[str, int], seq_len: int | None, match: str, hint: str
) -> None:
    world_size = degrees.get("tp", 1) * degrees.get("cp", 1) * degrees.get("ep", 1)
    dims = ParallelDims(**degrees, world_size=world_size)
    refusal(lambda: dims.validate_against_model(model_with(**config), seq_len), match, hint)


def test_key_value_heads_are_not_split_by_ulysses() -> None:
    dims = ParallelDims(cp=4, tp=2, world_size=8)
    dims.validate_against_model(model_with(num_attention_heads=8, num_key_value_heads=2))


def test_all_that_does_not_fit_is_said_at_once() -> None:
    dims = ParallelDims(tp=4, ep=2, etp=4, world_size=8)
    with pytest.raises(ValueError, match="cannot split the model") as error:
        dims.validate_against_model(model_with(num_attention_heads=6, num_experts=3), seq_len=5)
    assert str(error.value).count("is not divisible by") == 3
    # A model's config may be a mapping too.
    with pytest.raises(ValueError, match="num_attention_heads=6 is not divisible by tp=4"):
        dims.validate_against_model(types.SimpleNamespace(config={"num_attention_heads": 6}))


# Meshes

TABLE = [
    # degrees, axes, fsdp, dp, loss
    ({}, {"dp_shard": 1}, ["dp_shard"], ["dp_shard"], ["dp_shard"]),
    ({"dp_shard": 4}, {"dp_shard": 4}, ["dp_shard"], ["dp_shard"], ["dp_shard"]),
    ({"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "cp": 2}, ["dp_shard"], ["dp_shard"], ["dp_shard", "cp"]),
    (
        {"dp_replicate": 2, "dp_shard": 3},
        {"dp_replicate": 2, "dp_shard": 3},
        ["dp_shard"],
        ["dp_replicate", "dp_shard"],
        ["dp_replicate", "dp_shard"],
    ),
    (
        {"dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2},
        ["dp_shard"],
        ["dp_replicate", "dp_shard"],
        ["dp_replicate", "dp_shard", "cp"],
    ),
    ({"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, None, ["dp_replicate"], ["dp_replicate"]),
    ({"dp_replicate": 2, "cp": 3}, {"dp_replicate": 2, "cp": 3}, None, ["dp_replicate"], ["dp_replicate", "cp"]),
    ({"cp": 2}, {"cp": 2}, None, None, ["cp"]),
    ({"cp": 2, "tp": 2, "pp": 2}, {"cp": 2, "tp": 2, "pp": 2}, None, None, ["cp"]),
    ({"tp": 2, "pp": 2, "ep": 2}, {"ep": 2, "tp": 2, "pp": 2}, None, None, None),
]


@pytest.mark.parametrize(("degrees", "axes", "fsdp", "dp", "loss"), TABLE)
def test_mesh_has_the_axes_and_names_of_the_table(
    start_world: StartWorld, degrees: dict[str, int], axes: dict[str, int], fsdp: Any, dp: Any, loss: Any
) -> None:
    world_size = math.prod(degrees.values())
    start_world(world_size, rank=world_size - 1)
    dims = ParallelDims(**degrees, world_size=world_size)
    mesh = dims.build_mesh("cpu")
    assert type(mesh) is DeviceMesh
    assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (tuple(axes), tuple(axes.values()))
    assert mesh.device_type == "cpu"
    if "pp" in axes:  # the last axis of the mesh, and the outermost of the ranks
        *others_of_stage, stages = axes.values()
        everything = torch.arange(world_size).reshape(stages, *others_of_stage).movedim(0, -1)
    else:
        everything = torch.arange(world_size).reshape(tuple(axes.values()))
    for name, parts in (("fsdp", fsdp), ("dp", dp), ("loss", loss)):
        if parts is None:
            assert name not in dims.flattened_axes
            refusal(lambda name=name: dims.get_mesh(name), f"the mesh has no '{name}': it stands for", "one of these")
            with pytest.raises(KeyError, match=name):
                mesh[name]
            continue
        # This process is the last rank; its part of a flattened mesh is the last slice of the other axes.
        others = [slice(None) if axis in parts else -1 for axis in axes]
        expected = everything[tuple(others)].flatten().tolist()
        for found in (mesh[name], dims.get_mesh(name)):
            assert found.mesh_dim_names == (name,)
            assert found.mesh.tolist() == expected
            assert dist.get_process_group_ranks(found.get_group()) == expected
            assert found.get_local_rank() == len(expected) - 1
        assert mesh[name] == dims.get_mesh(name)
        assert len({mesh[name], dims.get_mesh(name), *map(dims.get_mesh, axes)}) == 1 + len(axes)
        assert dims.get_mesh(name)._get_root_mesh() is mesh
        assert mesh.get_group(name) is dims.get_mesh(name).get_group()
    for axis, size in axes.items():
        assert mesh[axis].size() == dims.get_mesh(axis).size() == size


def test_flattened_axes_may_lie_around_another_axis(start_world: StartWorld) -> None:
    start_world(8, rank=3)
    dims = ParallelDims(dp_shard=2, ep=2, cp=2, world_size=8)
    dims.build_mesh("cpu")
    assert dims.get_mesh("loss").mesh.tolist() == [2, 3, 6, 7]


def test_second_name_of_one_axis_makes_no_process_group(
    start_world: StartWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_world(8)
    made = groups_made(monkeypatch)
    mesh = ParallelDims(dp_shard=4, tp=2, world_size=8).build_mesh("cpu")
    assert sorted(made) == [[0, 1], [0, 2, 4, 6], [1, 3, 5, 7], [2, 3], [4, 5], [6, 7]]
    assert (
        mesh["fsdp"].get_group() is mesh["loss"].get_group() is mesh["dp"].get_group() is mesh["dp_shard"].get_group()
    )


def test_second_name_of_joined_axes_makes_no_process_group(
    start_world: StartWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_world(8)
    made = groups_made(monkeypatch)
    mesh = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, world_size=8).build_mesh("cpu")
    assert made.count([0, 2, 4, 6]) == 1  # "dp" made it, "loss" shares it
    assert mesh["loss"].get_group() is mesh["dp"].get_group()


def test_one_axis_needs_no_process_group_at_all(start_world: StartWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    start_world(4)
    made = groups_made(monkeypatch)
    mesh = ParallelDims(dp_shard=4, world_size=4).build_mesh("cpu")
    assert made == []
    assert mesh["fsdp"].get_group() is dist.group.WORLD


def test_submeshes_of_two_axes_still_work(start_world: StartWorld) -> None:
    start_world(8)
    mesh = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, world_size=8).build_mesh("cpu")
    assert mesh["dp_replicate", "dp_shard"].mesh.tolist() == [[0, 2], [4, 6]]
    assert mesh["fsdp", "tp"].mesh.tolist() == [[0, 1], [2, 3]]


def test_torchs_own_parallelisms_take_the_named_meshes(start_world: StartWorld) -> None:
    start_world(8)
    dims = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, world_size=8)
    mesh = dims.build_mesh("cpu")
    for fsdp in (mesh["fsdp"], dims.get_mesh("fsdp")):
        layer = parallelize_module(torch.nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
        fully_shard(layer, mesh=fsdp)
        weight = layer.weight
        assert isinstance(weight, DTensor)
        assert weight.device_mesh.mesh_dim_names == ("fsdp", "tp")
        assert weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert weight.to_local().shape == (1, 4)


def test_second_call_returns_the_same_mesh(start_world: StartWorld) -> None:
    start_world(4)
    dims = ParallelDims(dp_shard=2, tp=2, world_size=4)
    mesh = dims.build_mesh("cpu")
    assert dims.build_mesh("cpu") is mesh
    assert dims.build_mesh() is mesh
    refusal(
        lambda: dims.build_mesh("cuda"),
        "cannot build the mesh for device type 'cuda': it is built for 'cpu'",
        "build_mesh('cpu')",
    )


def test_device_type_defaults_to_the_platforms(start_world: StartWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    start_world(2)
    monkeypatch.setattr(
        "hyper_parallel.core.mesh.parallel_dims.get_platform", lambda: types.SimpleNamespace(device_type="cuda")
    )
    assert ParallelDims(tp=2, world_size=2).build_mesh().device_type == "cuda"


def test_a_new_world_gets_a_new_mesh(start_world: StartWorld) -> None:
    dims = ParallelDims(dp_shard=2, world_size=2)
    start_world(2, rank=0)
    first = dims.build_mesh("cpu")
    dist.destroy_process_group()
    refusal(lambda: dims.get_mesh("fsdp"), "has not built the mesh in this world", "build_mesh")
    start_world(2, rank=1)
    refusal(lambda: dims.get_mesh("fsdp"), "has not built the mesh in this world", "build_mesh")
    second = dims.build_mesh("cpu")
    assert second is not first
    assert [list(mesh.get_coordinate() or ()) for mesh in (first, second)] == [[0], [1]]


def test_rank_threads_that_share_dims_do_not_share_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread stands for a rank: it sees its own default group, as ranks in one process do."""
    dims = ParallelDims(dp_shard=4, world_size=4)
    rank_of = threading.local()
    groups = [_Group() for _ in range(4)]
    monkeypatch.setattr(type(dist.group), "WORLD", property(lambda _: groups[rank_of.rank]))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    everyone = threading.Barrier(4)

    def build(self: ParallelDims, device_type: str) -> Any:
        everyone.wait(timeout=60)  # like a collective: no rank gets past before all are here
        mesh = types.SimpleNamespace(rank=rank_of.rank, device_type=device_type)
        return types.SimpleNamespace(root=mesh, by_name={"fsdp": mesh})

    monkeypatch.setattr(ParallelDims, "_build", build)
    seen: dict[int, list[int]] = {}

    def rank(number: int) -> None:
        rank_of.rank = number
        meshes: list[Any] = [dims.build_mesh("cpu"), dims.build_mesh("cpu"), dims.get_mesh("fsdp")]
        seen[number] = [mesh.rank for mesh in meshes]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {number: [number] * 3 for number in range(4)}


def test_copies_and_pickles_are_about_the_degrees(start_world: StartWorld) -> None:
    start_world(2)
    dims = ParallelDims(dp_shard=2, world_size=2)
    dims.build_mesh("cpu")
    for twin in (copy.copy(dims), copy.deepcopy(dims), pickle.loads(pickle.dumps(dims))):
        assert twin == dims
        refusal(lambda twin=twin: twin.get_mesh("fsdp"), "has not built the mesh", "build_mesh")
    assert set(dataclasses.asdict(dims)) == {*(part.rstrip("=") for part in ALL_DEGREES), "fold_experts"}


def test_absent_names_say_why() -> None:
    dims = ParallelDims(dp_replicate=2, tp=2, world_size=4)
    names = "mesh: dp_replicate=2, tp=2   names: 'dp_replicate', 'tp', 'dp', 'loss'"
    for name, why in {
        "cp": "its degree is 1, and only degrees above 1 are axes",
        "dp_shard": "its degree is 1, and only degrees above 1 are axes",
        "fsdp": "it stands for dp_shard, and that has degree 1",
        "efsdp": "that name is reserved, and no mesh has it yet",
        "etp": "that name is reserved",
        "batch": "that name is reserved",
        "dp_shared": "it is no axis of ParallelDims; did you mean 'dp_shard'[?]",
        "zzz": "it is no axis of ParallelDims\n",
    }.items():
        refusal(lambda name=name: dims.get_mesh(name), f"the mesh has no '{name}': {why}", "one of these names")
        refusal(lambda name=name: dims.get_mesh(name), names, "ask first")
    tensor_only = ParallelDims(tp=2, world_size=2)
    refusal(lambda: tensor_only.get_mesh("dp"), "it stands for dp_replicate x dp_shard, and each has degree 1", "one")
    refusal(lambda: tensor_only.get_mesh("loss"), "dp_replicate x dp_shard x cp, and each has degree 1", "one")


def test_looking_up_before_building_says_so() -> None:
    refusal(
        lambda: ParallelDims(tp=2, world_size=2).get_mesh("tp"),
        "cannot look up mesh 'tp': the calling rank has not built the mesh in this world",
        "build_mesh(device_type) first, on every rank",
    )


def test_build_needs_as_many_ranks_as_the_degrees(start_world: StartWorld) -> None:
    start_world(4)
    refusal(
        lambda: ParallelDims(tp=2, world_size=2).build_mesh("cpu"),
        "cannot build a mesh of world_size=2 ranks: the process group has 4",
        "world_size=4), or start 2 ranks",
    )


def test_build_without_a_process_group_says_what_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    refusal(
        lambda: ParallelDims(tp=2, world_size=2).build_mesh("cpu"),
        "there is no process group, and the environment that torchrun makes lacks RANK, WORLD_SIZE, MASTER_ADDR",
        "torchrun --nproc-per-node 2, or torch.distributed.init_process_group first",
    )


def test_build_starts_the_process_group_from_torchruns_environment(
    start_world: StartWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    real = dist.init_process_group

    def init(backend: str | None) -> None:
        monkeypatch.setattr(dist, "init_process_group", real)
        started.append(int(os.environ["WORLD_SIZE"]))
        start_world(int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"]))

    monkeypatch.setattr(dist, "init_process_group", init)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    mesh = ParallelDims(tp=2, world_size=2).build_mesh("cpu")
    assert started == [2]
    assert mesh.get_local_rank() == 1


# Joined axes, for what is split over several of them


def test_ranks_with_other_rows_and_with_other_tokens() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=3, ep=2, cp=2, tp=2, pp=2, etp=1, world_size=96)
    assert (dims.batch_ranks, dims.token_ranks) == (12, 24)
    assert (ParallelDims(tp=4, world_size=4).batch_ranks, ParallelDims(tp=4, world_size=4).token_ranks) == (1, 1)


@pytest.mark.parametrize(
    ("axes", "rank", "ranks"),
    [
        (("dp_shard", "cp"), 0, [0, 1, 4, 5]),  # ep lies between them
        (("dp_shard", "cp"), 11, [10, 11, 14, 15]),
        (("cp", "dp_shard"), 11, [10, 11, 14, 15]),  # named in another order
        (("dp_shard", "ep", "cp"), 9, [8, 9, 10, 11, 12, 13, 14, 15]),
        (("dp_replicate", "dp_shard", "ep", "cp"), 5, list(range(16))),
        (("dp_replicate", "ep"), 5, [5, 7, 13, 15]),
        (("ep",), 5, [5, 7]),
        (("tp", "ep", "pp"), 5, [5, 7]),  # axes of one rank count for nothing
    ],
)
def test_a_mesh_over_several_axes(start_world: StartWorld, axes: tuple[str, ...], rank: int, ranks: list[int]) -> None:
    start_world(16, rank=rank)
    dims = ParallelDims(dp_replicate=2, dp_shard=2, ep=2, cp=2, world_size=16)
    dims.build_mesh("cpu")
    mesh = dims.mesh_over(*axes)
    assert mesh is not None
    assert mesh.mesh.tolist() == ranks
    assert dist.get_process_group_ranks(mesh.get_group()) == ranks
    assert mesh.get_local_rank() == ranks.index(rank)


def test_the_same_axes_are_joined_once(start_world: StartWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    start_world(8)
    dims = ParallelDims(dp_shard=2, ep=2, cp=2, world_size=8)
    dims.build_mesh("cpu")
    made = groups_made(monkeypatch)
    assert dims.mesh_over("dp_shard", "cp") is not None
    assert made == [], "it is the mesh of 'loss'"
    first = dims.mesh_over("dp_shard", "ep")
    assert [0, 2, 4, 6] in made
    count = len(made)
    assert dims.mesh_over("ep", "dp_shard", "tp") is first
    assert dims.mesh_over("cp") is dims.get_mesh("cp")
    assert len(made) == count


def test_a_mesh_over_nothing_is_none(start_world: StartWorld) -> None:
    start_world(2)
    dims = ParallelDims(tp=2, world_size=2)
    dims.build_mesh("cpu")
    assert dims.mesh_over("dp_replicate", "dp_shard", "ep", "cp") is None
    assert dims.mesh_over() is None


def test_joining_axes_before_building_says_so() -> None:
    refusal(
        lambda: ParallelDims(dp_shard=2, cp=2, world_size=4).mesh_over("dp_shard", "cp"),
        "cannot look up the mesh over dp_shard x cp: the calling rank has not built the mesh in this world",
        "build_mesh",
    )


DATA_MESHES = [
    # degrees, of the calling rank 5: for parameters, for experts
    ({"dp_shard": 8}, list(range(8)), list(range(8))),
    ({"dp_shard": 2, "ep": 2, "cp": 2}, list(range(8)), [0, 1, 4, 5]),
    ({"dp_shard": 4, "tp": 2}, [1, 3, 5, 7], [1, 3, 5, 7]),
    ({"ep": 4, "tp": 2}, [1, 3, 5, 7], [5]),
    ({"tp": 8}, [5], [5]),
    ({"dp_replicate": 2, "dp_shard": 4}, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, [[1, 3], [5, 7]], [[1, 3], [5, 7]]),
    ({"dp_replicate": 2, "ep": 4}, [[0, 1, 2, 3], [4, 5, 6, 7]], [[1], [5]]),
    ({"dp_replicate": 2, "cp": 2, "ep": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [4, 5]]),
    ({"dp_replicate": 4, "tp": 2}, [[1], [3], [5], [7]], [[1], [3], [5], [7]]),
]


@pytest.mark.parametrize(("degrees", "dense", "experts"), DATA_MESHES)
def test_the_data_mesh_has_the_ranks_with_other_tokens(
    start_world: StartWorld, degrees: dict[str, int], dense: Any, experts: Any
) -> None:
    start_world(8, rank=5)
    dims = ParallelDims(**degrees, world_size=8)
    dims.build_mesh("cpu")
    for mesh, expected in ((dims.data_mesh(), dense), (dims.data_mesh(experts=True), experts)):
        assert mesh.mesh.tolist() == expected
        assert 5 in mesh.mesh.flatten().tolist()
        here = mesh.get_coordinate()
        assert here is not None
        assert mesh.mesh[tuple(here)].item() == 5
        assert (
            dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
            == mesh.mesh.view(-1, mesh.shape[-1])[here[0] if mesh.ndim == 2 else 0].tolist()
        )
        if mesh.ndim == 2:
            assert mesh.mesh_dim_names == ("replicate", "shard")
            assert dist.get_process_group_ranks(mesh.get_group(0)) == mesh.mesh[:, here[1]].tolist()
    assert dims.data_mesh() is dims.data_mesh(), "made once"


class _Group:
    """Stands for a process group: an object that only has an identity."""


def test_folding_is_a_bool_and_told_where_there_is_some() -> None:
    with pytest.raises(
        ValueError, match=r"cannot use fold_experts=2: it is a bool, not int(?s:.*)try: fold_experts=True"
    ):
        ParallelDims(fold_experts=2)  # type: ignore[arg-type]
    folded = ParallelDims(cp=2, tp=4, etp=1, world_size=8, fold_experts=True)
    assert "fold_experts=True" in folded.summary()
    assert "fold_experts" not in ParallelDims().summary()
    assert (folded.expert_axes, folded.expert_ranks, folded.expert_shards) == (("cp", "tp"), 8, 1)
    with pytest.raises(ValueError, match=r"num_experts=12 is not divisible by cp \* tp=8"):
        folded.validate_against_model(model_with(num_experts=12))
