"""A `ShardingPlan` as a TOML file, which can be shown, edited and read back.

    schema = 1
    return_local_tensor = ["head"]

    [plan]
    "layers.*.mlp.w1.weight" = "tp,None"
    "layers.*.mlp.w2.weight" = "None,tp"

    [input_plan]
    "layers.*.mlp.input" = "dp,None,None"       # one layout
    "attention.input" = ["dp,None,None", "-"]   # several by position, "-" for no layout
    "loss.input" = {logits = "dp,None,tp"}      # several by name

    [local_plan]
    "layers.*.mlp" = "dp,None,None; tp=sum"     # parts of a sum over tp

A layout has one entry per dim, as on the command line of `hyper-parallel plan`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.text import parse_layout, parse_mesh, write_layout
from hyper_parallel.core.machine.toml_file import Schema, TomlFile, inline, toml_text
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.core.shard.spelling import LayoutTree, layout_on, read_layouts

__all__ = ["load_plan", "plan_text", "write_plan"]

PLAN = Schema("plan")
"""The format of plan files."""

MeshLike = DeviceMesh | Layout | str

TABLES = ("plan", "input_plan", "output_plan", "local_plan")
SETTINGS = ("return_local_tensor", "wrap_inputs", "reshard_inputs", "chunks")
ALONE = "-"

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def load_plan(path: str | Path, mesh: MeshLike) -> ShardingPlan:
    """Read a plan from a TOML file.

        plan = load_plan("plan.toml", mesh)
        model = shard_module(model, mesh, plan)

    Args:
        path: the file.
        mesh: the mesh of the layouts: a DeviceMesh, a `Layout` without an assignment, or e.g. "dp=2,tp=4".

    Returns:
        The plan, with `Layout`s on the mesh. `shard_module` checks whether a model has its paths.

    Raises:
        ValueError: the file is missing or no TOML; an unknown table or setting (with the closest name); a value of the
            wrong type; a layout that does not parse, or not on this mesh. The message names the line.
    """
    file, base = PLAN.read(path, "hyper-parallel verify --show-plan > plan.toml"), _base(mesh)
    fields: dict[str, Any] = {}
    for name, value in file.table().items():
        if name not in (*TABLES, *SETTINGS):
            raise _unknown(file, name, value)
        fields[name] = _entries(file, name, value, base) if name in TABLES else _setting(file, name, value)
    return ShardingPlan(**fields)


def write_plan(plan: ShardingPlan, mesh: MeshLike, path: str | Path) -> None:
    """Write a plan to a TOML file that `load_plan` can read.

    Args:
        plan: the layouts of a model.
        mesh: the mesh of the plan's axis names: a DeviceMesh, a `Layout` without an assignment, or e.g. "dp=2,tp=4".
        path: the file; an existing file is replaced.

    Raises:
        ValueError: as for `plan_text`.
        OSError: the file cannot be written.
    """
    Path(path).write_text(plan_text(plan, mesh), encoding="utf-8")


def plan_text(plan: ShardingPlan, mesh: MeshLike) -> str:
    r"""Write a plan as TOML.

    >>> print(plan_text(ShardingPlan({"w.weight": (("dp", "tp"), None)}, {"input": [("dp",), None]}), "dp=2,tp=4"))
    # on a mesh dp=2, tp=4
    schema = 1
    <BLANKLINE>
    [plan]
    "w.weight" = "dp+tp,None"
    <BLANKLINE>
    [input_plan]
    input = ["dp", "-"]
    <BLANKLINE>

    Args:
        plan: the layouts of a model.
        mesh: the mesh of the plan's axis names: a DeviceMesh, a `Layout` without an assignment, or e.g. "dp=2,tp=4".

    Raises:
        ValueError: an entry that is no layout on the mesh, or that only torch's placements can express, e.g. a `Shard`
            counted from the last dim.
    """
    base = _base(mesh)
    content: dict[str, Any] = {}
    for name in SETTINGS:
        if value := getattr(plan, name):
            content[name] = value if isinstance(value, bool) else inline(value) if name == "chunks" else list(value)
    for name in TABLES:
        entries = {key: value for key, value in (getattr(plan, name) or {}).items() if value is not None}
        asked = f"cannot write the plan: {name}"
        if entries:
            content[name] = {
                key: _written(f"{asked}[{key!r}]", read_layouts(f"{asked}[{key!r}]", value, base))
                for key, value in entries.items()
            }
    return toml_text(content, PLAN, f"on a mesh {base.axes}")


# -- reading -----------------------------------------------------------------------------------------------------------


def _unknown(file: TomlFile, name: str, value: object) -> ValueError:
    """Return the error for a table or a setting that does not exist."""
    near = nearest(name, TABLES if isinstance(value, dict) else SETTINGS)
    if isinstance(value, dict):
        hint = near if near.startswith("one of ") else f"[{near[1:-1]}]"
        return file.error(f"there is no table [{name}]", hint, name)
    if "." in name or near.startswith("one of "):
        hint = "below [plan], [input_plan], [output_plan] or [local_plan]"
        return file.error(f"{name!r} stands above all tables", hint, name)
    return file.error(f"there is no setting {name!r}", near, name)


def _setting(file: TomlFile, name: str, value: Any) -> Any:
    if name == "wrap_inputs" and not isinstance(value, bool):
        raise file.error(f"wrap_inputs is true or false, and not {value!r}", "wrap_inputs = true", name)
    is_list = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if name in ("return_local_tensor", "reshard_inputs") and not is_list:
        blame = f"{name} is a list of module paths, and not {value!r}"
        raise file.error(blame, f'{name} = ["head"]', name)
    if name == "chunks" and isinstance(value, dict):
        value = {path: tuple(given) if isinstance(given, list) else given for path, given in value.items()}
        numbers = [n for given in value.values() for n in (given if isinstance(given, tuple) else (given,))]
    if name == "chunks" and not (isinstance(value, dict) and all(type(n) is int for n in numbers)):
        blame = f"chunks is how many for each module path, and not {value!r}"
        raise file.error(blame, 'chunks = {"layers.*.mlp" = 4}', name)
    return value


def _entries(file: TomlFile, table: str, value: Any, base: Layout) -> dict[str, Any]:
    if not isinstance(value, dict):
        blame = f"{table} is a table, and not {value!r}"
        raise file.error(blame, f"a line [{table}], and the entries below it", table)
    read = {}
    for key, entry in value.items():
        _check_key(file, table, key, entry)
        if table == "plan" and not isinstance(entry, str):
            blame = f"parameter {key!r} has one layout, in quotes, and not {entry!r}"
            raise file.error(blame, f'{_key(key)} = "{base.alias_name[-1]},None"', table, key)
        read[key] = _layouts(f"{file.place(file.line(table, key))}, [{table}] {key!r}", entry, base)
    return read


def _check_key(file: TomlFile, table: str, key: str, entry: Any) -> None:
    """Refuse a path without quotes, which TOML splits at its dots, and keys that belong above or in another table."""
    lines, number = file.text.splitlines(), file.line(table, key)
    if isinstance(entry, dict) and number and re.match(rf"\s*{re.escape(key)}\s*\.", lines[number - 1]):
        path = re.sub(r"\s", "", lines[number - 1].partition("=")[0])
        raise file.error("a path with dots is in quotes", f'"{path}" = ...', table, key)
    if key in SETTINGS:
        raise file.error(f"{key!r} is no path in [{table}]", f"{key} above the first table", table, key)
    word = table.partition("_")[0]
    if word in ("input", "output") and key.rpartition(".")[2] != word:
        other = {"input": "output", "output": "input"}[word]
        hint = f"[{other}_plan]" if key.rpartition(".")[2] == other else _key(f"{key}.{word}" if key else word)
        raise file.error(f"the last part of a path in [{table}] is {word!r}", hint, table, key)


def _layouts(place: str, value: Any, base: Layout) -> Any:
    """Read a layout, a list by position, or a dict by name."""
    if isinstance(value, str):
        return _layout(place, value, base)
    if isinstance(value, (list, dict)) and value:
        if isinstance(value, list):
            return [None if each == ALONE else _layouts(place, each, base) for each in value]
        return {name: None if each == ALONE else _layouts(place, each, base) for name, each in value.items()}
    blame = "it is empty" if isinstance(value, (list, dict)) else f"{json.dumps(value, default=str)} is no layout"
    hint = f'"{base.alias_name[0]},None"; ["{base.alias_name[0]},None", "-"] for several, "-" leaves one alone'
    raise InvalidValue(f"cannot read {place}", blame, f"given: {value!r}", hint)


def _layout(place: str, text: str, base: Layout) -> Layout:
    try:
        return parse_layout(base, text)
    except ValueError as error:
        said = str(error).removeprefix("cannot read a layout: ")
        raise InvalidValue(f"cannot read {place}: {said}") from None


def _base(mesh: MeshLike) -> Layout:
    if isinstance(mesh, DeviceMesh):
        return layout_on(mesh)
    return mesh if isinstance(mesh, Layout) else parse_mesh(mesh)


# -- writing -----------------------------------------------------------------------------------------------------------


def _key(path: str) -> str:
    return path if _BARE.fullmatch(path) else json.dumps(path, ensure_ascii=False)


def _written(asked: str, tree: LayoutTree) -> Any:
    if tree is None:
        return ALONE
    if isinstance(tree, Layout):
        return write_layout(_alias_form(asked, tree))
    if isinstance(tree, Mapping):
        return inline({name: _written(asked, entry) for name, entry in tree.items()})
    return [_written(asked, entry) for entry in tree]


def _alias_form(asked: str, layout: Layout) -> Layout:
    """Return a layout with one entry per dim, up to the last that is split."""
    if layout.alias_placements is not None:
        return layout
    dims = [placement.dim for placement in layout.placements or () if hasattr(placement, "dim")]
    if any(dim < 0 for dim in dims):
        blame = "it counts a dim from the last one, and the number of dims is not known here"
        raise InvalidValue(asked, blame, f"layout: {layout}", "Shard(1) for the second of two dims")
    return layout.placement_to_tensor_map(max(dims, default=-1) + 1)
