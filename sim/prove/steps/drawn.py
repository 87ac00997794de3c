"""Weights that ranks draw by themselves, in place of which they get their shards of one device's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import Splits, all_slices, mesh_lines
from sim.explain.errors import ReplicaMismatch, SimError
from sim.prove.evidence import Evidence
from sim.prove.infer import splits_by_shape, submesh, to_layout
from sim.prove.judge import short
from sim.prove.report import Report, ReportRow
from sim.prove.steps.names import find_names, has_one_value, is_piece, module_of

_FUSED = (1, 2, 3)  # into how many equal tensors, each of which is split, a weight of one device may be cut: w1 and w3
_SAME = 0.5  # of the elements: so many that a reference has too are no new draw
_PARALLEL = 0.99  # the cosine of an angle: beyond, values are those of the reference, scaled
_FEW = 8  # elements that tell nothing by their angle
_MOST_FUSED = 4
_MOST_WAYS = 12  # that are tried
_UNLIKE = re.compile("should hold the same and do not|hold what they should|holds what it should")
_ONE_SEED = "one seed for what they hold alike, or a broadcast"


@dataclass
class DrawnWeights:
    """What ranks have drawn.

    Attributes:
        said: each parameter that was replaced, and how it is split.
        ways: for modules, in how many ways their parameters may be split by their shapes.
        rows: parameters of which ranks that should hold the same have drawn different ones.
    """

    said: list[str] = field(default_factory=list)
    ways: dict[str, int] = field(default_factory=dict)
    rows: list[ReportRow] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Where the values come from, in words; what is split comes first."""
        said = sorted(self.said, key=lambda text: re.search(r"\(.*\w.*\)", text) is None)
        more = f" and {len(said) - _FEW} more" if len(said) > _FEW else ""
        words = f"the ranks draw these by themselves, and got one device's values: {', '.join(said[:_FEW])}{more}"
        return [words] if said else []


def give_shards(
    asked: str,
    one: Mapping[str, torch.Tensor],
    ranks: Sequence[Mapping[str, nn.Parameter]],
    mesh: Layout,
    given: Mapping[str, Any],
    names: Mapping[str, Any],
    ways: Mapping[str, int],
) -> DrawnWeights:
    """Replace parameters that ranks have drawn by themselves by their shards of those on one device.

    A parameter is drawn if it has values that one device has nowhere. If ranks hold parts of it, or if they have drawn
    all that they have, it is replaced; else it is left, and is wrong.

    Args:
        asked: the beginning of a message.
        one: values on one device.
        ranks: parameters of each rank.
        mesh: the axes.
        given: the user's map of names, which may say placements.
        names: the same, read.
        ways: of those that the shapes allow, which to take, by module; the first where it is not said.
    """
    result = DrawnWeights()
    plain = [{at: x for at, x in held.items() if not isinstance(x, DTensor) and not x.is_meta} for held in ranks]
    drawn = _drawn(one, plain)
    if not drawn:
        return result
    values = [{name: each.detach() for name, each in held.items()} for held in plain]
    known = find_names(one, values, mesh, names)
    found = {name: _Source(*of) for name, of in known.parts.items()}
    left = [name for name in one if name not in {each for of in found.values() for each in of.names}]
    found |= _in_order(known.missing, left, values, one)
    weights: dict[str, _Weight] = {}
    for name, source in found.items():
        parts = {rank: held[name] for rank, held in enumerate(values) if name in held}
        is_constant = all(map(has_one_value, parts.values()))
        if parts and (name in drawn or is_constant):
            weight = _Weight(name, parts, [one[each] for each in source.names], source, submesh(mesh, list(parts)))
            said = _placed(asked, given, name, mesh)
            weight.ways = [_Way(_translated(said, weight))] if said is not None else list(weight.possible())
            if weight.ways and (is_constant or not weight.is_scaled()):
                weights[name] = weight
    drawn &= set(weights)
    every = all(name in weights or all(map(has_one_value, held)) for name in found if (held := _held(values, name)))
    modules = {module_of(name) for name in drawn if any(weights[name].ways[0].splits)}
    for name, weight in weights.items() if drawn else ():
        if not every and module_of(name) not in modules:
            continue
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", module_of(name))
        result.ways[pattern] = max(result.ways.get(pattern, 1), len(weight.ways))
        way = weight.ways[min(ways.get(pattern, 0), len(weight.ways) - 1)]
        odd = weight.unequal(way)
        if odd:
            module, _, leaf = weight.source.names[0].rpartition(".")
            sentence = f"ranks along {' and '.join(odd)} draw it differently, and should hold the same"
            row = ReportRow(module, leaf, "parameter", verdict="bug", sentence=sentence, suggestion=_ONE_SEED)
            result.rows.append(row)
        for rank, shard in weight.shards(way).items():
            plain[rank][name].data = shard
        result.said.append(weight.words(way))
    return result


class _Source(NamedTuple):
    """The parameters of one device that a parameter of the ranks stands for, and the dim along which it has several."""

    names: tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class _Way:
    """How a parameter may be split: by which axes per dim, and into how many equal tensors before."""

    splits: Splits
    fused: int = 1


@dataclass
class _Weight:
    """A parameter that the ranks have drawn."""

    name: str
    parts: Mapping[int, torch.Tensor]
    fulls: Sequence[torch.Tensor]
    source: _Source
    mesh: Layout
    ways: list[_Way] = field(default_factory=list)

    def possible(self) -> Iterator[_Way]:
        """Yield how it may be split by the shapes; first where ranks that hold the same have drawn the same."""
        dim, total = self.source.dim, sum(full.shape[self.source.dim] for full in self.fulls if full.dim())
        first, held = self.fulls[0], []
        for part in self.parts.values():
            shape = list(part.shape)
            if shape:
                shape[dim] = shape[dim] * first.shape[dim] // max(total, 1)
            held.append(torch.empty(shape, device="meta"))
        splits = splits_by_shape(Evidence(self.mesh, held, first, None))
        for each in sorted(splits, key=lambda each: len(self.unequal(_Way(each)))):
            yield _Way(each)
            for count in _FUSED[1:] if any(each) and len(self.fulls) == 1 else ():
                cut = next(at for at, axes in enumerate(each) if axes)
                if first.shape[cut] % (count * math.prod(self.mesh.mesh_shape[axis] for axis in each[cut])) == 0:
                    yield _Way(each, count)

    def shards(self, way: _Way) -> dict[int, torch.Tensor]:
        """Return the shard of each rank."""
        result = {}
        for at, rank in enumerate(self.mesh.rank_list):
            shards = []
            for full in self.fulls:
                cut = next((dim for dim, axes in enumerate(way.splits) if axes), 0)
                pieces = full.chunk(way.fused, cut) if way.fused > 1 else [full]
                for piece in pieces:
                    box = all_slices(piece.shape, self.mesh.mesh_shape, way.splits)[at].tolist()
                    shards.append(piece[tuple(slice(start, stop) for start, stop in box)])
                if way.fused > 1:
                    shards = [torch.cat(shards, cut)]
            result[rank] = (torch.cat(shards, self.source.dim) if len(shards) > 1 else shards[0]).clone()
        return result

    def unequal(self, way: _Way) -> list[str]:
        """Return the axes along which ranks have drawn different values for the same part."""
        split = {axis for axes in way.splits for axis in axes}
        held = [self.parts[rank] for rank in self.mesh.rank_list]
        return [
            name
            for axis, name in enumerate(self.mesh.alias_name)
            if axis not in split
            and not all(
                torch.equal(held[at], held[first])
                for first, *rest in mesh_lines(self.mesh.mesh_shape, [axis]).tolist()
                for at in rest
            )
        ]

    def is_scaled(self) -> bool:
        """Whether the ranks hold values of one device in other units: that is no draw."""
        for way in self.ways:
            for rank, shard in self.shards(way).items():
                part = self.parts[rank].to(shard.dtype).flatten()
                size = float(part.norm() * shard.norm())
                if shard.numel() >= _FEW and abs(float(part @ shard.flatten())) > _PARALLEL * size:
                    return True
        return False

    def words(self, way: _Way) -> str:
        """Say how it is split."""
        what = f"{self.name} {short(to_layout(self.mesh, way.splits, ()))}"
        return f"{what}, each of {way.fused} fused ones" if way.fused > 1 else what


def with_cause(report: Report, make: Callable[[], object]) -> Report:
    """Name the cause of a wrong parameter if ranks have drawn different weights before an engine split them.

    E.g. after `torch.manual_seed(rank)` and `fully_shard` each rank holds a part of other weights: the shards do not
    show that, so the models are made once more, and what is split is compared before.

    Args:
        report: of a proof.
        make: makes the ranks' models in a world that compares copies.
    """
    bug = report.bug
    if bug is None or bug.kind != "parameter":
        return report
    sentence, suggestion = bug.sentence, _ONE_SEED if _UNLIKE.search(bug.sentence) else bug.suggestion
    try:
        make()
    except ReplicaMismatch as error:
        sentence, suggestion = f"weights differ by rank before they are split: {str(error).splitlines()[0]}", _ONE_SEED
    except SimError:
        pass  # of that the report itself says more
    row = replace(bug, sentence=sentence, suggestion=suggestion)
    return replace(report, rows=tuple(row if each is bug else each for each in report.rows))


def _drawn(one: Mapping[str, torch.Tensor], ranks: Sequence[Mapping[str, torch.Tensor]]) -> set[str]:
    """Return the names of parameters on the ranks whose values one device has nowhere."""
    found = set[str]()
    every: torch.Tensor | None = None
    for held in ranks:
        for name, parameter in held.items():
            part = parameter.detach()
            if has_one_value(part) or name in found or (name in one and is_piece(part, one[name])):
                continue
            if every is None:
                every = torch.cat([full.flatten().double() for full in one.values()])
            if float(torch.isin(part.flatten().double(), every).double().mean()) < _SAME:
                found.add(name)
    return found


def _held(ranks: Sequence[Mapping[str, torch.Tensor]], name: str) -> list[torch.Tensor]:
    return [held[name] for held in ranks if name in held]


def _in_order(
    missing: Sequence[str],
    left: Sequence[str],
    ranks: Sequence[Mapping[str, torch.Tensor]],
    one: Mapping[str, torch.Tensor],
) -> dict[str, _Source]:
    """Match parameters whose names and values tell nothing, in their order, where all shapes fit.

    >>> one = {name: torch.zeros(8, 4) for name in ("q.weight", "k.weight", "o.weight")}
    >>> held = {"qk.weight": torch.ones(8, 4), "out.weight": torch.ones(4, 4)}
    >>> _in_order(["qk.weight", "out.weight"], list(one), [held, held], one)
    {'qk.weight': _Source(names=('q.weight', 'k.weight'), dim=0), 'out.weight': _Source(names=('o.weight',), dim=0)}
    """
    result: dict[str, _Source] = {}
    for kind in dict.fromkeys(_leaf(name) for name in missing):
        mine, theirs = [name for name in missing if _leaf(name) == kind], [name for name in left if _leaf(name) == kind]

        def match(
            at: int, place: int, mine: Sequence[str] = mine, theirs: Sequence[str] = theirs
        ) -> list[_Source] | None:
            if at == len(mine):
                return [] if place == len(theirs) else None
            for count in range(1, min(_MOST_FUSED, len(theirs) - place) + 1):
                names = tuple(theirs[place : place + count])
                if _fits(_held(ranks, mine[at])[0], [one[name] for name in names], len(ranks)):
                    rest = match(at + 1, place + count)
                    if rest is not None:
                        return [_Source(names, 0), *rest]
            return None

        result |= dict(zip(mine, match(0, 0) or (), strict=False))
    return result


def _fits(part: torch.Tensor, fulls: Sequence[torch.Tensor], most: int) -> bool:
    """Whether a part can be a shard of a tensor, or of several that are fused, by its shape."""
    if any(full.shape[1:] != fulls[0].shape[1:] or full.dim() != part.dim() for full in fulls):
        return False
    sizes = [sum(full.shape[0] for full in fulls), *fulls[0].shape[1:]] if part.dim() else []
    counts = [-(-size // max(held, 1)) for size, held in zip(sizes, part.shape, strict=True)]
    whole = all(size % max(held, 1) == 0 for size, held in zip(sizes, part.shape, strict=True))
    return math.prod(counts) <= most and (whole or len(fulls) == 1)


def _placed(asked: str, given: Mapping[str, Any], name: str, mesh: Layout) -> dict[int, tuple[str, ...]] | None:
    """Return the axes that split each dim, where the user's map has placements for a name."""
    for pattern, value in given.items():
        placements = [] if isinstance(value, str) else [each for each in value if not isinstance(each, str)]
        if not placements or not re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name):
            continue
        fits = all(isinstance(each, (Shard, Replicate)) for each in placements)
        if not fits or len(placements) != len(mesh.alias_name):
            axes = ", ".join(mesh.alias_name)
            blame = f"names[{pattern!r}] has {len(placements)} placements for the axes {axes}"
            seen = f"placements: {placements}"
            raise InvalidValue(asked, blame, seen, '("up.weight", Shard(0)), one Shard or Replicate per axis')
        result: dict[int, tuple[str, ...]] = {}
        for axis, each in zip(mesh.alias_name, placements, strict=True):
            if isinstance(each, Shard):
                result[each.dim] = (*result.get(each.dim, ()), axis)
        return result
    return None


def _translated(said: Mapping[int, tuple[str, ...]], weight: _Weight) -> Splits:
    """Return what was said as axes of the mesh that has the parameter."""
    names, dims = weight.mesh.alias_name, weight.fulls[0].dim()
    return tuple(
        tuple(
            names.index(axis) for at, axes in said.items() if at % max(dims, 1) == dim for axis in axes if axis in names
        )
        for dim in range(dims)
    )


def best_way(prove: Callable[[Mapping[str, int]], tuple[Report, Mapping[str, int]]]) -> Report:
    """Return the report of the way to split drawn parameters that explains the most."""
    chosen: dict[str, int] = {}
    report, ways = prove(chosen)
    tries = 0
    for pattern, count in ways.items():
        for number in range(1, count):
            if report.bug is None or tries >= _MOST_WAYS:
                return report
            tries += 1
            other, _ = prove({**chosen, pattern: number})
            if _reach(other) > _reach(report):
                report, chosen = other, {**chosen, pattern: number}
    return report


def _reach(report: Report) -> tuple[int, int]:
    """How far one comes without a bug, and how few there are."""
    bugs = [at for at, row in enumerate(report.rows) if row.verdict == "bug"]
    return (bugs[0] if bugs else len(report.rows), -len(bugs))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
