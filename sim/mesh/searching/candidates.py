"""Candidates of a search: every way to place a model on a number of devices, and why the others are none.

Only numbers here: nothing is estimated. The library's own rules say what can be placed (`ParallelDims`, the schedules
of the pipeline), so a candidate that comes out of this file is one that the trainer accepts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hyper_parallel.core.context_parallel.api import split_over
from hyper_parallel.core.expert_parallel.api import split_over_nodes
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.split import split_layers
from sim.mesh.recipe import Recipe
from sim.mesh.searching.bounds import even_memory, even_time
from sim.mesh.searching.space import Candidate, Rejected, Shape, Space, layers_of_stages, owners_of

_SHORTEST_PART = 4096  # tokens: below it, a part of a sequence is too short for the attention of cp to pay
_MORE_STAGES = (4, 8)  # on each rank of a pipeline, beside one and two
_SMALL_BUBBLE = 0.02  # of a step: less is not worth the messages of more stages
_SAVED_ROWS = 0.75  # of those for each expert: with more of them left, what nodes then send inside may take as long
_SHARD_GROUPS = (1, 4, 16)  # nodes that one copy of the weights may be sharded over, where there are more


def divisors(number: int) -> list[int]:
    """Return what divides a number, smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def enumerate_candidates(space: Space) -> Iterator[Candidate | Rejected]:
    """Yield every candidate, and what is rejected before anything is estimated."""
    for degrees in _model_degrees(space):
        if isinstance(degrees, Rejected):
            yield degrees
            continue
        found = _batch_per_rank(space, degrees)
        if isinstance(found, Rejected):
            yield found
            continue
        for dims in _with_data_parallel(space, degrees):
            yield from _with_recipes(space, dims, found)


def _choices(space: Space, name: str, most: int) -> list[int]:
    if name in space.fixed:
        return [space.fixed[name]]
    return [d for d in divisors(space.num_devices) if d <= most]


def _model_degrees(space: Space) -> Iterator[dict[str, int] | Rejected]:
    """Yield degrees of tp, pp, cp and ep, with dp for what they leave."""
    shape, devices = space.shape, space.num_devices
    most_tp = 2 * space.devices_per_node if shape.splits else 1  # the first one too many is reported
    for tp in _choices(space, "tp", most_tp):
        if tp > space.devices_per_node and "tp" not in space.fixed:
            detail = f"tp={tp} ranks would not fit into a node of {space.devices_per_node}"
            yield Rejected(f"tp={tp}", "tp beyond a node", detail)
            continue
        if reason := _indivisible(space, tp):
            yield Rejected(f"tp={tp}", "tp does not divide the model", reason)
            continue
        for pp in _choices(space, "pp", max(shape.layers, 1) if shape.has_stages else 1):
            for cp in _choices(space, "cp", space.seq_len // _SHORTEST_PART or 1):
                for ep in _choices(space, "ep", max(shape.experts, 1)):
                    if devices % (tp * pp * cp * ep):
                        continue  # no candidate at all: degrees have to multiply to the devices
                    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": devices // (tp * pp * cp * ep)}
                    what = _told(degrees)
                    if shape.experts and shape.experts % ep:
                        yield Rejected(what, "ep does not divide the experts", f"{shape.experts} experts, ep={ep}")
                    elif reason := _sequence(space, degrees):
                        yield Rejected(what, "the sequence does not split", reason)
                    else:
                        yield degrees


def _told(degrees: dict[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in degrees.items() if size > 1) or "one device"


def _indivisible(space: Space, tp: int) -> str | None:
    shape = space.shape
    wrong = [
        f"{size} {what}"
        for what, size in (("heads", shape.heads), ("key and value heads", shape.kv_heads))
        if size and size % tp
    ]
    return f"{' and '.join(wrong)} cannot be split over tp={tp}" if wrong else None


def _sequence(space: Space, degrees: dict[str, int]) -> str | None:
    tp, cp = degrees["tp"], degrees["cp"]
    if cp > 1 and not _ulysses(space, degrees):
        asked = space.fixed["ulysses_degree"]
        return f"ulysses_degree={asked} does not divide cp={cp}, or the heads of tp={tp}"
    wanted = [tp * split_over(cp, ulysses, balance=True).multiple for ulysses in _ulysses(space, degrees)] or [tp]
    if space.seq_len % min(wanted):
        return f"{space.seq_len} tokens are no multiple of {min(wanted)}, which cp={cp} and tp={tp} need"
    return None


def _ulysses(space: Space, degrees: dict[str, int]) -> list[int]:
    """What part of cp may split heads: none (a ring) or all of it; what is given, if it can."""
    cp, heads = degrees["cp"], space.shape.heads
    if cp == 1:
        return []
    asked = [space.fixed["ulysses_degree"]] if "ulysses_degree" in space.fixed else [1, cp]
    return [part for part in asked if cp % part == 0 and not (heads and heads % (degrees["tp"] * part))]


def _batch_per_rank(space: Space, degrees: dict[str, int]) -> int | Rejected:
    ranks = degrees["dp"] * degrees["ep"]
    if space.global_batch % ranks:
        few = space.global_batch < ranks
        reason = "more data-parallel ranks than sequences" if few else "the batch does not split"
        detail = f"{space.global_batch} sequences over {ranks} data-parallel ranks"
        return Rejected(_told(degrees), reason, detail)
    return space.global_batch // ranks


def _with_data_parallel(space: Space, degrees: dict[str, int]) -> Iterator[ParallelDims]:
    """Yield what can be made of dp: all shards, or copies of shards over fewer nodes."""
    dp, inside = degrees["dp"], degrees["tp"] * degrees["cp"] * degrees["ep"]  # pipelines reach over nodes
    if "dp_replicate" in space.fixed:
        copies = [space.fixed["dp_replicate"]] if dp % space.fixed["dp_replicate"] == 0 else []
    elif "dp_shard" in space.fixed:
        copies = [dp // space.fixed["dp_shard"]] if dp % space.fixed["dp_shard"] == 0 else []
    else:
        shards = {max(nodes * space.devices_per_node // inside, 1) for nodes in _SHARD_GROUPS}
        copies = sorted({1} | {dp // count for count in shards if count < dp and dp % count == 0})
    splits = sorted({degrees["tp"], 1}) if degrees["ep"] > 1 else [degrees["tp"]]
    if "etp" in space.fixed:
        splits = [space.fixed["etp"]]
    ulysses_degrees: Sequence[int | None] = _ulysses(space, degrees) or (None,)
    inside_experts = [(etp, False) for etp in splits] + _folded(space, degrees)
    if "fold_experts" in space.fixed:
        inside_experts = [(etp, fold) for etp, fold in inside_experts if fold == space.fixed["fold_experts"]]
    for dp_replicate, (etp, fold), ulysses in itertools.product(copies, inside_experts, ulysses_degrees):
        yield ParallelDims(
            dp_replicate=dp_replicate,
            dp_shard=dp // dp_replicate,
            **{name: size for name, size in degrees.items() if name != "dp"},
            etp=etp,
            ulysses_degree=ulysses,
            world_size=space.num_devices,
            fold_experts=fold,
        )


def _folded(space: Space, degrees: dict[str, int]) -> list[tuple[int, bool]]:
    """The values of etp with which experts split over the ranks of cp and tp as well."""
    tp, cp, experts = degrees["tp"], degrees["cp"], space.shape.experts
    asked = [space.fixed["etp"]] if "etp" in space.fixed else sorted({tp, 1})
    ranks = {etp: degrees["ep"] * cp * (tp if etp == 1 else 1) for etp in asked}
    return [(etp, True) for etp in asked if experts and experts % ranks[etp] == 0 and ranks[etp] > degrees["ep"]]


def _with_recipes(space: Space, dims: ParallelDims, batch: int) -> Iterator[Candidate | Rejected]:
    seen = set()
    given = [_over_nodes(recipe, space, dims) for recipe in space.recipes]
    for recipe in [variant for each in given for variant in _resharded(each, space.shape, dims)]:
        if recipe.zero == 2 and (dims.dp_shard * dims.ep * dims.cp == 1 or dims.pp > 1):
            recipe = recipe.with_zero(3)  # nothing is sharded, or a stage keeps what it has gathered
        for scheduled in _schedules(recipe, dims, space.shape.layers):
            for cut in _cuts(space, scheduled, batch):
                if recipe.parallel.stages_per_rank is None and not _is_worth_its_stages(cut, dims):
                    continue
                alone = cut.micro_batches == 1 or dims.token_ranks == dims.dp_replicate
                if dims.pp > 1 or alone:
                    cut = _made(cut, Recipe.with_savings, None, None, False)  # likewise
                if cut in seen:
                    continue
                seen.add(cut)
                candidate = Candidate(dims, cut, batch, space.layers_per_stage if dims.pp > 1 else None)
                reason = _unschedulable(space.shape, candidate)
                if reason is None:
                    yield candidate
                    yield from _uneven(space, candidate)
                else:
                    yield Rejected(str(candidate), "the pipeline cannot run", reason, candidate=candidate)


@functools.lru_cache(maxsize=4096)
def _made(recipe: Recipe, how: Callable[..., Recipe], *args: Any, **keys: Any) -> Recipe:
    """Change a recipe: the same few belong to all degrees, and each one that is made is checked."""
    return how(recipe, *args, **keys)


def _over_nodes(recipe: Recipe, space: Space, dims: ParallelDims) -> Recipe:
    """Send tokens to each node once where experts lie on several, and that saves many of their rows."""
    asked, per_token = recipe.parallel.ranks_per_node, space.shape.experts_per_token
    size = asked or space.devices_per_node
    try:
        nodes = split_over_nodes("", dims.expert_groups(), size)[0] if dims.ep_enabled else 1
    except ValueError:
        nodes = 1
    visited = nodes * (1 - (1 - 1 / nodes) ** per_token)
    pays = nodes > 1 and (asked is not None or visited <= _SAVED_ROWS * per_token)
    return _made(recipe, Recipe.having, ranks_per_node=size if pays else None)


def _resharded(recipe: Recipe, shape: Shape, dims: ParallelDims) -> list[Recipe]:
    """The recipe itself, and where blocks keep what they gather, also with this gathered again in backward."""
    keeps = dims.tp > 1 and recipe.sequence_parallel and recipe.checkpointing == "none" and shape.heads > 0
    if not keeps or recipe.input_gathers > 1:
        return [recipe]
    return [recipe, _made(recipe, Recipe.having, reshard_inputs=True)]


def _uneven(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    """Yield a candidate with its layers on the stages so that time, or memory, is the same on all of them."""
    dims, recipe = candidate.dims, candidate.recipe
    is_given = candidate.layers_per_stage is not None
    if dims.pp == 1 or is_given or recipe.parallel.schedule not in ("1f1b", "gpipe", "interleaved"):
        return
    found = {even_time(space.shape, len(owners_of(candidate)))}
    if recipe.parallel.schedule == "1f1b":
        found.add(even_memory(space.shape, candidate, space.seq_len))
    usual = tuple(len(layers) for layers in layers_of_stages(space.shape.layers, candidate))
    for sizes in sorted(found - {usual}):
        yield dataclasses.replace(candidate, layers_per_stage=sizes)


def _schedules(recipe: Recipe, dims: ParallelDims, layers: int) -> list[Recipe]:
    """The recipe itself, and where it has the usual schedule, also with two stages on each rank and more."""
    if dims.pp == 1 or recipe.parallel.schedule != "1f1b" or recipe.parallel.stages_per_rank is not None:
        return [recipe]
    more = [None, *(count for count in _MORE_STAGES if count * dims.pp <= layers)]
    return [recipe, *(_made(recipe, Recipe.having, schedule="interleaved", stages_per_rank=count) for count in more)]


def _is_worth_its_stages(recipe: Recipe, dims: ParallelDims) -> bool:
    """Whether half as many stages on each rank leave a bubble that matters."""
    if recipe.parallel.stages_per_rank is None:
        return True
    return 2 * (dims.pp - 1) / (recipe.micro_batches * recipe.parallel.stages_per_rank) > _SMALL_BUBBLE


def _cuts(space: Space, recipe: Recipe, batch: int) -> list[Recipe]:
    """The recipe with micro-batches of up to 8 sequences that the batch divides into, and with the whole batch."""
    if space.accumulate is not None:
        return [_made(recipe, Recipe.cut_into, space.accumulate)] if batch % space.accumulate == 0 else []
    sizes = sorted({size for size in (*range(1, 9), batch) if batch % size == 0})
    return [_made(recipe, Recipe.cut_into, batch // size) for size in sizes]


def _unschedulable(shape: Shape, candidate: Candidate) -> str | None:
    dims, recipe = candidate.dims, candidate.recipe
    if dims.pp == 1:
        return None
    kind = recipe.parallel.pipeline
    try:
        stages = dims.pp * recipe.parallel.stages_each
        kind.check_micro_batches(candidate.parts, dims.pp, stages)
        sizes = candidate.layers_per_stage
        split_layers(shape.layers, stages, sizes=None if sizes is None else list(sizes))
    except ValueError as error:
        return str(error).splitlines()[0].partition(": ")[2]
    if kind.splits_backward and recipe.parallel.goes_back_once:
        return f"schedule {kind.name!r} goes backward twice through a block"
    return None
