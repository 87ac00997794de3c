"""The layouts of a model as data: of its parameters, and of the inputs and outputs of its modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check, check_least
from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.spelling import LayoutTree, layout_on, read_layout, read_layouts


@dataclass
class ShardingPlan:
    """The layouts of a model's parameters, inputs and outputs; `shard_module` applies them.

        plan = ShardingPlan(
            plan={"mlp.w1.weight": ("tp", "None"), "mlp.w2.weight": ("None", "tp")},
            input_plan={"input": ("dp", "None"), "mlp.input": ("dp", "None", "None")},
            output_plan={"mlp.output": ("dp", "None", "None"), "output": ("dp", "None")},
            return_local_tensor=["head"],
        )

    One layout is a non-empty tuple of axis names, "None", None and tuples of names, one per dim; or of torch's
    placements, one per axis; or a `Layout`. Several layouts are a list by position, where None skips a tensor, or a
    dict by name. A tuple of tuples of placements, or of Layouts, is read as a list. In contrast,
    `(("dp", "None"), ("None", "tp"))` is one layout, whose dims are split over two axes each.

    In paths `*` stands for one part, or a piece of one, and `**` for any number of parts, e.g.
    `layers.*.mlp.w1.weight`. Exact paths win over paths with `*`, and these over `**`. None values are skipped.

    Attributes:
        plan: parameter path -> layout. Other parameters stay unchanged.
        input_plan: "<module path>.input", or "input" for the model -> layouts of the arguments.
        output_plan: "<module path>.output", or "output" for the model -> layouts of the return values.
        return_local_tensor: paths of modules whose DTensors are returned as this rank's shards; "" is the model itself.
        wrap_inputs: take a plain tensor at a declared input as that layout's local shard.
        local_plan: module path -> layouts of the return values of a module that computes on local tensors. DTensor
            arguments, in the layouts of `input_plan`, and all parameters are this rank's shards there. Its return
            values are taken as shards of the layouts given here, then redistributed to `output_plan`. This avoids
            torch's dispatch of DTensors, some 20 us per operation.
        reshard_inputs: paths of modules in `local_plan` that keep only shards of their gathered inputs for backward,
            and gather them again there: one more gather in exchange for the memory.
        chunks: path of a module in `local_plan` -> number of chunks of its rows, so that one chunk is communicated
            while another is computed. The module takes one tensor, gathered over a dim, and returns a sum that is
            scattered over the same dim. Each row of the sum depends on the same row of the tensor only. A pair of a
            count and a dim cuts along this dim only, e.g. `(2, 0)` cuts attention by sequences; each chunk
            gets all other arguments whole.
    """

    plan: dict[str, Any] | None = None
    input_plan: dict[str, Any] | None = None
    output_plan: dict[str, Any] | None = None
    return_local_tensor: list[str] | None = None
    wrap_inputs: bool = False
    local_plan: dict[str, Any] | None = None
    reshard_inputs: list[str] | None = None
    chunks: dict[str, int | tuple[int, int]] | None = None


@dataclass(frozen=True)
class Reading:
    """A plan, read for a model and a mesh; keys are names without globs, the model itself is ""."""

    parameters: Mapping[str, Layout]
    inputs: Mapping[str, LayoutTree]
    outputs: Mapping[str, LayoutTree]
    returned: Sequence[str]
    local: Mapping[str, LayoutTree]
    wrap_inputs: bool
    resharded: frozenset[str]
    chunks: Mapping[str, int | tuple[int, int]]


def read_plan(
    asked: str, plan: object, mesh: DeviceMesh | Layout, modules: Sequence[str], parameters: Mapping[str, int]
) -> Reading:
    """Read a plan for a model.

    Args:
        asked: the start of an error message, "cannot ...".
        plan: a `ShardingPlan`.
        mesh: the mesh, or a layout of it without an assignment.
        modules: names of the modules, the model itself as "".
        parameters: names of the parameters, with their numbers of dims.

    Raises:
        TypeError: a field of another type.
        ValueError: an unknown path, a value that is no layout, or more entries than the parameter has dims.
    """
    checked = _check_fields(asked, plan)
    base = mesh if isinstance(mesh, Layout) else layout_on(mesh)
    weights = _section(asked, "plan", checked.plan, base, one=True)
    chosen = resolve(f"{asked}: plan", weights, list(parameters), "parameter")
    for name, match in chosen.items():
        _check_entries(asked, name, match.key, match.value, parameters[name])
    inputs, outputs = (_boundary(asked, checked, word, base, modules) for word in ("input", "output"))
    results = _section(asked, "local_plan", checked.local_plan, base)
    local = resolve(f"{asked}: local_plan", results, modules, "module")
    resharded = resolve(
        f"{asked}: reshard_inputs", {path: (path, True) for path in checked.reshard_inputs or []}, modules, "module"
    )
    _check_local(f"{asked}: reshard_inputs", list(resharded), local, "whose gathered inputs alone can be freed")
    chunks = resolve(
        f"{asked}: chunks", {path: (path, count) for path, count in (checked.chunks or {}).items()}, modules, "module"
    )
    _check_local(f"{asked}: chunks", list(chunks), local, "whose input alone can be cut")
    returned = {path: (path, True) for path in checked.return_local_tensor or []}
    return Reading(
        parameters={name: match.value for name, match in chosen.items()},
        inputs=inputs,
        outputs=outputs,
        returned=list(resolve(f"{asked}: return_local_tensor", returned, modules, "module")),
        local={name: match.value for name, match in local.items()},
        wrap_inputs=checked.wrap_inputs,
        resharded=frozenset(resharded),
        chunks={name: match.value for name, match in chunks.items()},
    )


def names_of(model: nn.Module) -> tuple[list[str], dict[str, int]]:
    """Return the names of a model's modules, and the dims of its parameters by name; shared ones under all names."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return modules, {name: param.dim() for name, param in model.named_parameters(remove_duplicate=False)}


def _check_fields(asked: str, plan: Any) -> ShardingPlan:
    check(asked, "list | None", return_local_tensor=plan.return_local_tensor, reshard_inputs=plan.reshard_inputs)
    check(asked, "bool", wrap_inputs=plan.wrap_inputs)
    for path, given in (plan.chunks or {}).items():
        counted, along = f"chunks[{path!r}]", f"the dim of chunks[{path!r}]"
        count, dim = given if isinstance(given, tuple) and len(given) == 2 else (given, 0)
        check(asked, "int", f'chunks={{"{path}": 4}}', **{counted: count, along: dim})
        check_least(asked, 1, **{counted: count})
        check_least(asked, 0, **{along: dim})
    return plan


def _check_local(asked: str, paths: Sequence[str], local: Mapping[str, Match], why: str) -> None:
    """Refuse modules that compute on DTensors, because torch's operations decide how those are communicated."""
    for path in paths:
        if path not in local:
            blame = f"module {path!r} does not compute on local tensors, {why}"
            seen = f"local_plan: {_short(list(local))}"
            raise InvalidValue(asked, blame, seen, f"an entry for {path!r} in local_plan")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _section(
    asked: str, field: str, entries: Mapping[str, Any] | None, base: Layout, *, one: bool = False
) -> dict[str, tuple[str, Any]]:
    """Read the layouts of a field's entries."""
    found: dict[str, tuple[str, Any]] = {}
    for path, value in (entries or {}).items():
        if value is None:
            continue
        here = f"{asked}: {field}[{path!r}]"
        if one and isinstance(value, (list, Mapping)):
            blame = "a parameter has one layout"
            hint = f"{tuple(value)!r}, a tuple" if isinstance(value, list) and value else '("tp", "None")'
            raise InvalidValue(here, blame, f"given: {value!r}", hint)
        found[path] = path, read_layout(here, value, base) if one else read_layouts(here, value, base)
    return found


def _boundary(asked: str, plan: ShardingPlan, word: str, base: Layout, modules: Sequence[str]) -> dict[str, LayoutTree]:
    """Return the layouts of the inputs, or of the outputs, by module."""
    field = f"{word}_plan"
    entries: dict[str, tuple[str, Any]] = {}
    given = getattr(plan, field)
    for key in given or {}:
        path, _, last = key.rpartition(".")
        if last != word:
            blame = f"the last part of a key is {word!r}, and {key!r} ends in {last!r}"
            near = key if matches_any(key, modules) else path
            hint = f"{near + '.' if near else ''}{word}"
            raise InvalidValue(f"{asked}: {field}", blame, f"keys: {_short(list(given))}", repr(hint))
    for key, (_, tree) in _section(asked, field, given, base).items():
        entries[key.rpartition(".")[0]] = key, tree
    found = resolve(f"{asked}: {field}", entries, modules, "module")
    return {name: match.value for name, match in found.items()}


def matches_any(path: str, names: Sequence[str]) -> bool:
    """Return True if a path matches any of the names."""
    return any(matches(path, name) for name in names) if is_glob(path) else path in names


def _check_entries(asked: str, name: str, key: str, layout: Layout, ndim: int) -> None:
    if layout.is_partial():
        blame = f"parameter {name!r} would have a reduction pending, and optimizers change it as values"
        hint = "a layout without pending reductions: split, or replicated"
        raise InvalidValue(f"{asked}: plan[{key!r}]", blame, f"layout: {layout}", hint)
    try:
        layout.splits(ndim)
    except ValueError:
        written = layout.alias_placements or layout.placements or ()
        blame = f"the layout is for more dims than the {ndim} of parameter {name!r}"
        hint = "one entry per dim" if layout.alias_placements is not None else f"Shard dims below {ndim}"
        if ndim == 0:
            whole = "Replicate(), " * len(layout.mesh_shape)
            hint = f"({whole.rstrip(', ') if len(layout.mesh_shape) > 1 else whole.rstrip()}), one per axis"
        raise InvalidValue(f"{asked}: plan[{key!r}]", blame, f"layout: {written!r}", hint) from None


# -- paths of parameters or modules, e.g. `layers.*.mlp.w1.weight` -----------------------------------------------------


_MOST_SHOWN = 12


class Match(NamedTuple):
    """The entry of a plan for one name.

    Attributes:
        key: key of the entry in the plan.
        value: the entry.
    """

    key: str
    value: Any


@lru_cache(maxsize=4096)
def _pattern(path: str) -> re.Pattern[str]:
    """Compile a path whose parts may contain globs."""
    parts = []
    for part in path.split("."):
        if part == "**":
            parts.append(r"(?:[^.]+\.)*")
        else:
            glob = translate(part).replace(r"(?s:", "(?:", 1)
            glob = glob.removesuffix(r"\Z").removesuffix(r"\z").replace(".*", "[^.]*")
            parts.append(glob + r"\.")
    return re.compile("".join(parts) + r"\Z")


def matches(path: str, name: str) -> bool:
    """Return True if a path matches a name: `*` stands for one part or a piece of it, `**` for any number of parts.

    The model itself, "", matches "" only.

    >>> matches("layers.*.w1.weight", "layers.0.w1.weight"), matches("layers.*.weight", "layers.0.w1.weight")
    (True, False)
    >>> matches("**.weight", "layers.0.w1.weight"), matches("**.weight", "weight"), matches("**", "a.b")
    (True, True, True)

    Args:
        path: a path of a plan.
        name: the name of a parameter or module, without globs.
    """
    return path == name or (name != "" and is_glob(path) and bool(_pattern(path).match(f"{name}.")))


def is_glob(path: str) -> bool:
    """Return True if a path contains a `*`.

    >>> is_glob("layers.*.w1"), is_glob("layers.0.w1")
    (True, False)
    """
    return "*" in path


def resolve(asked: str, entries: Mapping[str, tuple[str, Any]], names: Sequence[str], kind: str) -> dict[str, Match]:
    """Return the entry of a plan for each matching name, in the order of the names.

    >>> entries = {"**": ("**", "a"), "l.*.w": ("l.*.w", "b"), "l.0.w": ("l.0.w", "c")}
    >>> {name: match.value for name, match in resolve("", entries, ["l.0.w", "l.1.w", "n"], "parameter").items()}
    {'l.0.w': 'c', 'l.1.w': 'b', 'n': 'a'}

    Exact paths win over paths with `*`, and these over paths with `**`.

    Args:
        asked: the start of an error message, "cannot ...".
        entries: path -> (key as the user wrote it, value).
        names: names of the parameters or modules.
        kind: "parameter" or "module".

    Raises:
        ValueError: a path without a match; two paths of equal rank that match one name with different values.
    """
    found: dict[str, tuple[int, Match]] = {}
    for path, (key, value) in entries.items():
        hit = [name for name in names if matches(path, name)]
        if not hit:
            raise _nothing(asked, path, key, names, kind)
        for name in hit:
            rank = 0 if path == name else 2 if "**" in path.split(".") else 1
            known = found.get(name)
            if known is not None and known[0] == rank and known[1].value != value:
                blame = f"{kind} {name!r} is meant by {known[1].key!r} and by {key!r}, which say different things"
                seen = f"{known[1].key}: {known[1].value}   {key}: {value}"
                hint = f"an entry for {name + key[len(path) :]!r} as well, which counts before both"
                raise InvalidValue(asked, blame, seen, hint)
            if known is None or rank < known[0]:
                found[name] = rank, Match(key, value)
    return {name: found[name][1] for name in names if name in found}


def _nothing(asked: str, path: str, key: str, names: Iterable[str], kind: str) -> InvalidValue:
    known, tail = [name for name in names if name], key[len(path) :]
    if not known:
        hint = f"{tail[1:]!r}, for the model itself" if kind == "module" else "a model with parameters"
        return InvalidValue(asked, f"{key!r} is for a {kind} inside, and there is none", f"{kind}s: none", hint)
    blame = f"{key!r} means no {kind} of the model" if is_glob(path) else f"{path!r} is no {kind} of the model"
    shown = known if len(known) <= _MOST_SHOWN else [*known[:_MOST_SHOWN], f"... ({len(known)} in all)"]
    return InvalidValue(asked, blame, f"{kind}s: {', '.join(shown)}", _instead(path, tail, known, kind))


def _instead(path: str, tail: str, known: Sequence[str], kind: str) -> str:
    """Suggest the path that was probably meant."""
    if any(matches(f"**.{path}", name) for name in known):
        return f"{'**.' + path + tail!r}, as '*' stands for one part of a path only"
    inside = [name for name in known if name.startswith(f"{path}.")]
    if inside and len(inside) <= _MOST_SHOWN:
        return "one of " + ", ".join(map(repr, inside))
    near = nearest(path.replace("*", "0") + tail, [name + tail for name in known])
    if near.startswith("one of ") and len(known) > _MOST_SHOWN:
        return f"a name that model.named_{kind}s() has"
    return near
