"""The degree of each kind of parallelism, and the mesh that all of them share.

`ParallelDims` is a value: degrees that multiply to the world size. Its constructor checks them, long before any
communication, and every message prints every degree.
"""

from __future__ import annotations

import copy
import difflib
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_parallel.core.common.checks import MOST_LISTED, check
from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.common.groups import group_of, init_process_group
from hyper_parallel.platform import get_platform

AXIS_ORDER = ("dp_replicate", "dp_shard", "ep", "cp", "tp", "pp")  # of the mesh's axes
# Order of the ranks, outermost first. Launchers number ranks node by node. So ranks of tp, which communicate most, are
# neighbours on one node, and stages, which communicate least, span nodes.
RANK_ORDER = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "ulysses_degree", "fold_experts")
RESERVED_NAMES = ("efsdp", "etp", "batch")
_STANDS_FOR = (
    ("fsdp", ("dp_shard",)),
    ("dp", ("dp_replicate", "dp_shard")),
    ("loss", ("dp_replicate", "dp_shard", "cp")),
)
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class _Built(NamedTuple):
    root: DeviceMesh
    by_name: Mapping[str, DeviceMesh]
    by_axes: dict[tuple[str, ...], DeviceMesh]  # joined meshes so far, by their axes


@dataclass(frozen=True)
class ParallelDims:
    """The degree of every kind of parallelism, checked against the number of ranks.

    >>> dims = ParallelDims(dp_shard=-1, tp=4, world_size=8)
    >>> dims.dp_shard, dims.mesh_axes
    (2, {'dp_shard': 2, 'tp': 4})
    >>> ParallelDims.from_config({"tp": 4, "cp": 2}, world_size=8).flattened_axes
    {'loss': ('cp',)}

    Args:
        dp_replicate: copies of the (sharded) parameters.
        dp_shard: ranks that share one copy of the parameters; -1 takes the rest of `world_size`.
        cp: ranks that split the sequence (context parallelism).
        tp: ranks that split tensors inside a layer (tensor parallelism).
        pp: pipeline stages.
        ep: ranks that split the experts, on a separate axis.
        etp: ranks that split tensors inside an expert; with `ep > 1` it is `tp` or 1. It is no axis of the mesh.
        ulysses_degree: the part of `cp` that splits attention heads; it divides `cp`, None means all of `cp`. Ignored
            with `cp=1`.
        world_size: the number of ranks; the product of all axes must equal it.
        fold_experts: experts are also split over the ranks of `cp` and, with `etp=1`, of `tp`. More ranks then share
            the experts without a larger `ep` ("MoE parallel folding", arXiv:2504.14960).

    Raises:
        ValueError: a degree is not a whole number of at least 1, or the degrees do not fit `world_size` or each other.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    ulysses_degree: int | None = None
    world_size: int = 1
    fold_experts: bool = False

    @classmethod
    def from_config(cls, parallel_cfg: Any, world_size: int) -> ParallelDims:
        """Read the degrees from any object or mapping that has some of their names, e.g. `{"tp": 4}`.

        Missing and None degrees take their defaults, except: `etp` defaults to `tp`, the older name `dp` stands for
        `dp_shard` unless that is given too, and without both `dp_shard` is inferred.

        >>> ParallelDims.from_config({"tp": 4}, world_size=8).dp_shard
        2
        >>> ParallelDims.from_config(None, world_size=1).summary()
        'dp_replicate=1 dp_shard=1 cp=1 tp=1 pp=1 ep=1 etp=1 ulysses_degree=None | dp=1 world=1'

        Raises:
            ValueError: as for the constructor; text or a number as a configuration; misspelled degrees; a mapping with
                other names only.
        """
        _check_names(parallel_cfg, (*DEGREES, "dp", "world_size"))
        given = {name: value for name in DEGREES if (value := _read(parallel_cfg, name)) is not None}
        if "dp_shard" not in given:
            older = _read(parallel_cfg, "dp")
            given["dp_shard"] = -1 if older is None else older
        given.setdefault("etp", given.get("tp", 1))
        return cls(**given, world_size=world_size)

    def to_config(self) -> dict[str, Any]:
        """Return a dict of degrees for `from_config`; None for a degree without effect here.

        >>> {name: value for name, value in ParallelDims(tp=2, dp_shard=2, world_size=4).to_config().items() if value}
        {'dp_replicate': 1, 'dp_shard': 2, 'cp': 1, 'tp': 2, 'pp': 1, 'ep': 1}
        """
        used = {"etp": self.ep > 1 or self.fold_experts, "ulysses_degree": self.cp > 1}
        return {name: getattr(self, name) if used.get(name, True) else None for name in DEGREES}

    def __post_init__(self) -> None:
        self._check_whole_numbers()
        if self.dp_shard == -1:
            self._set("dp_shard", self._inferred_dp_shard())
            logging.getLogger(__name__).info("ParallelDims inferred dp_shard=%d: %s", self.dp_shard, self.summary())
        product = self.dp_size * self.non_dp_size
        if product != self.world_size:
            raise self._error(
                f"cannot place {self.world_size} ranks on these degrees: dp_replicate * dp_shard * cp * tp * pp * ep "
                f"is {product}, not world_size={self.world_size}",
                f"dp_shard=-1, which takes what the others leave, or start {product} ranks",
            )
        if (self.ep > 1 or self.fold_experts) and self.etp not in (self.tp, 1):
            raise self._error(
                f"cannot use etp={self.etp} with ep={self.ep} and tp={self.tp}: inside an expert, tensors are split "
                "over all ranks of axis 'tp' or not at all",
                f"etp={self.tp} or etp=1" if self.tp > 1 else "etp=1",
            )
        if self.cp > 1:
            self._set("ulysses_degree", self._checked_ulysses_degree())

    # Derived sizes

    @property
    def dp_size(self) -> int:
        """The size of data parallelism: dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def non_dp_size(self) -> int:
        """The number of ranks per data-parallel rank: tp * cp * pp * ep."""
        return self.tp * self.cp * self.pp * self.ep

    @property
    def batch_ranks(self) -> int:
        """The number of ranks that compute with different sequences: dp_replicate * dp_shard * ep."""
        return self.dp_size * self.ep

    @property
    def token_ranks(self) -> int:
        """The number of ranks that compute with different tokens: batch_ranks * cp."""
        return self.batch_ranks * self.cp

    @property
    def tp_enabled(self) -> bool:
        """True if tensors are split inside layers."""
        return self.tp > 1

    @property
    def cp_enabled(self) -> bool:
        """True if the sequence is split."""
        return self.cp > 1

    @property
    def ep_enabled(self) -> bool:
        """True if the experts are split."""
        return self.expert_ranks > 1

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that split the experts.

        >>> ParallelDims(ep=2, tp=4, etp=1, world_size=8).expert_axes
        ('ep',)
        >>> ParallelDims(ep=2, tp=4, etp=1, world_size=8, fold_experts=True).expert_axes
        ('ep', 'tp')
        """
        folded = (("cp",) if self.etp != 1 else ("cp", "tp")) if self.fold_experts else ()
        return tuple(axis for axis in ("ep", *folded) if int(getattr(self, axis)) > 1)

    @property
    def expert_ranks(self) -> int:
        """The number of ranks that split the experts."""
        return math.prod(int(getattr(self, axis)) for axis in self.expert_axes)

    def expert_groups(self) -> list[list[int]]:
        """Return the ranks of each group that splits the experts.

        >>> ParallelDims(ep=2, tp=2, dp_shard=2, etp=1, world_size=8).expert_groups()
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        """
        ranks = np.arange(self.world_size).reshape([getattr(self, axis) for axis in RANK_ORDER])
        over = [RANK_ORDER.index(axis) for axis in self.expert_axes]
        ranks = np.moveaxis(ranks, over, range(-len(over), 0))
        groups: list[list[int]] = ranks.reshape(-1, self.expert_ranks).tolist()
        return groups

    @property
    def expert_shards(self) -> int:
        """The number of ranks that `fully_shard` splits each rank's experts over: dp_shard, and cp unless folded."""
        return self.dp_shard * (1 if "cp" in self.expert_axes else self.cp)

    @property
    def pp_enabled(self) -> bool:
        """True if there is more than one pipeline stage."""
        return self.pp > 1

    @property
    def fsdp_enabled(self) -> bool:
        """True if parameters are sharded or replicated over data-parallel ranks."""
        return self.dp_shard > 1 or self.dp_replicate > 1

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The mesh's axes and their sizes, in mesh order: every degree above 1, or only `dp_shard` when all are 1.

        >>> ParallelDims(tp=2, pp=2, world_size=4).mesh_axes
        {'tp': 2, 'pp': 2}
        """
        axes = {axis: size for axis in AXIS_ORDER if (size := int(getattr(self, axis))) > 1}
        return axes or {"dp_shard": 1}

    @property
    def flattened_axes(self) -> dict[str, tuple[str, ...]]:
        """Further names of the mesh, each with the axes that it flattens into one; absent names are omitted.

        >>> ParallelDims(dp_replicate=2, dp_shard=2, cp=2, world_size=8).flattened_axes
        {'fsdp': ('dp_shard',), 'dp': ('dp_replicate', 'dp_shard'), 'loss': ('dp_replicate', 'dp_shard', 'cp')}
        """
        present = self.mesh_axes
        flattened = {name: tuple(axis for axis in axes if axis in present) for name, axes in _STANDS_FOR}
        return {name: axes for name, axes in flattened.items() if axes}

    def summary(self) -> str:
        """Return one line with every degree, the data-parallel size, the world size, and the ranks of a stage.

        >>> ParallelDims(dp_shard=2, world_size=2).summary()
        'dp_replicate=1 dp_shard=2 cp=1 tp=1 pp=1 ep=1 etp=1 ulysses_degree=None | dp=2 world=2'
        >>> ParallelDims(tp=4, pp=2, world_size=8).summary().split(" | ")[1]
        'dp=1 world=8, stages of 4 consecutive ranks'
        """
        degrees = " ".join(f"{name}={value}" for name, value in self._said() if name != "world_size")
        stage = f", stages of {self.world_size // self.pp} consecutive ranks" if 1 < self.pp < self.world_size else ""
        return f"{degrees} | dp={self.dp_size} world={self.world_size}{stage}"

    # The mesh

    def build_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Return the mesh of these degrees; a second call returns the same object.

        The axes are `mesh_axes`. Ranks are numbered with pp outermost and tp innermost, so stages and tp groups have
        consecutive ranks. The names of `flattened_axes` work like axes, e.g. `mesh["fsdp"]`. torch (2.11 to 2.15) warns
        that such look-ups may be removed. Up to 2.12 it cannot do them if `ep` lies between the flattened axes.
        `get_mesh` has neither limit, and explains why a name is absent.

        Communication: a process group per axis and per flattened name of several axes. A name for a single axis shares
        that axis's group.

        Args:
            device_type: "cpu", "cuda" or "npu"; None: the calling rank's default.

        Raises:
            TypeError: device_type is no str.
            ValueError: no process group and no torchrun environment to make one from; a process group of another size
                than `world_size`; a mesh that was built for another device type before.
        """
        check("cannot build a mesh", "str | None", device_type=device_type)
        self._require_process_group()
        world: Any = dist.group.WORLD
        built = self._meshes.get(world)
        if built is None:
            built = self._build(device_type or get_platform().device_type)
            self._meshes[world] = built
        elif device_type not in (None, built.root.device_type):
            raise self._error(
                f"cannot build the mesh for device type {device_type!r}: it is built for {built.root.device_type!r}",
                f"build_mesh({built.root.device_type!r}), or a second ParallelDims for a second mesh",
            )
        return built.root

    def get_mesh(self, name: str) -> DeviceMesh:
        """Return the calling rank's one-dimensional mesh `name`, an axis or one of `flattened_axes`.

        Raises:
            ValueError: the mesh has no such name, with the reason; or it is not built yet.
        """
        if name not in self.mesh_axes and name not in self.flattened_axes:
            axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh_axes.items())
            names = ", ".join(repr(known) for known in (*self.mesh_axes, *self.flattened_axes))
            raise self._error(
                f"the mesh has no {name!r}: {self._why_absent(name)}\n  mesh: {axes}   names: {names}",
                "one of these names, or ask first: name in dims.mesh_axes, name in dims.flattened_axes",
            )
        return self._built(f"mesh {name!r}").by_name[name]

    def mesh_over(self, *axes: str) -> DeviceMesh | None:
        """Return the one-dimensional mesh of the calling rank along several axes; None if all have size 1.

            tokens = dims.mesh_over("dp_replicate", "dp_shard", "ep", "cp")  # ranks with different tokens

        Axes of degree 1 are omitted. Every rank must ask for the same meshes, in the same order.

        Communication: the first call for several axes makes process groups.

        Args:
            axes: names of axes.

        Raises:
            ValueError: no such axis, or the mesh is not built yet.
        """
        for axis in axes:
            if axis not in AXIS_ORDER:
                raise self._error(f"cannot look up a mesh over {axis!r}: it is no axis", nearest(axis, AXIS_ORDER))
        present = tuple(axis for axis in AXIS_ORDER if axis in axes and self.mesh_axes.get(axis, 1) > 1)
        if not present:
            return None
        built = self._built(f"the mesh over {' x '.join(present)}")
        if present not in built.by_axes:
            built.by_axes[present] = built.root[present]._flatten("_".join(present))
        return built.by_axes[present]

    def data_mesh(self, *, experts: bool = False) -> DeviceMesh:
        """Return the mesh for `fully_shard`: (shard,), or (replicate, shard) with `dp_replicate > 1`.

        Parameters are split over all ranks that compute with different tokens, dp_shard x ep x cp, because each of them
        needs all parameters and adds to their gradients. Experts are already split over `expert_axes`. They are split
        further over dp_shard x cp, or over dp_shard only if cp is an expert axis. Without any rank to split over, the
        shard axis has size 1.

        Communication: the first call makes process groups; every rank must make the same calls in the same order.

        Args:
            experts: True for parameters that are split over `expert_axes`.

        Raises:
            TypeError: experts is no bool.
            ValueError: the mesh is not built yet.
        """
        check("cannot make the data mesh", "bool", experts=experts)
        axes: tuple[str, ...] = ("dp_shard", "ep", "cp")
        if experts:
            axes = ("dp_shard",) if "cp" in self.expert_axes else ("dp_shard", "cp")
        copies, shard = self.mesh_over("dp_replicate"), self.mesh_over(*axes)
        if copies is None and shard is not None:
            return shard
        built, key = self._built("the data mesh"), ("shards of", *axes)
        if key not in built.by_axes:
            # torch's meshes with several axes have no axes of one rank, so this mesh is assembled here.
            shard_group = group_of((dist.get_rank(),), ("alone",)) if shard is None else shard.get_group()
            if copies is None:
                made = DeviceMesh.from_group(shard_group, built.root.device_type, mesh_dim_names=("shard",))
            else:
                ranks = self._ranks_along(built.root, ("dp_replicate", *axes)).reshape(self.dp_replicate, -1)
                groups = [copies.get_group(), shard_group]
                names = ("replicate", "shard")
                made = DeviceMesh.from_group(groups, built.root.device_type, mesh=ranks, mesh_dim_names=names)
            built.by_axes[key] = made
        return built.by_axes[key]

    def _ranks_along(self, root: DeviceMesh, axes: tuple[str, ...]) -> torch.Tensor:
        """Return the ranks that differ from the calling rank only along these axes."""
        here = root.get_coordinate()
        assert here is not None, "the mesh has every rank"
        place = [slice(None) if axis in axes else at for axis, at in zip(self.mesh_axes, here, strict=True)]
        return root.mesh[tuple(place)].contiguous()

    def _built(self, what: str) -> _Built:
        built = self._meshes.get(dist.group.WORLD) if dist.is_initialized() else None
        if built is None:
            raise self._error(
                f"cannot look up {what}: the calling rank has not built the mesh in this world",
                "build_mesh(device_type) first, on every rank",
            )
        return built

    @property
    def _meshes(self) -> WeakKeyDictionary[Any, _Built]:
        # Ranks may be threads of one process that share a ParallelDims. The key is the default group, which differs by
        # rank, so that no rank gets another's mesh, and a restarted world gets a new one. No lock is held during a
        # build, because it communicates; no two ranks write the same key. This is no dataclass field, because equality,
        # copies and pickles are about the degrees only.
        meshes: WeakKeyDictionary[Any, _Built] = self.__dict__.setdefault("_meshes_of_worlds", WeakKeyDictionary())
        return meshes

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _require_process_group(self) -> None:
        if not dist.is_initialized():
            missing = [name for name in _RENDEZVOUS if name not in os.environ]
            if missing:
                raise self._error(
                    f"cannot build a mesh of {self.world_size} ranks: there is no process group, and the environment "
                    f"that torchrun makes lacks {', '.join(missing)}",
                    f"torchrun --nproc-per-node {self.world_size}, or torch.distributed.init_process_group first",
                )
            init_process_group()
        if dist.get_world_size() != self.world_size:
            raise self._error(
                f"cannot build a mesh of world_size={self.world_size} ranks: the process group has "
                f"{dist.get_world_size()}",
                f"ParallelDims(..., world_size={dist.get_world_size()}), or start {self.world_size} ranks",
            )

    def _build(self, device_type: str) -> _Built:
        axes = self.mesh_axes
        order = [axis for axis in RANK_ORDER if axis in axes]
        if order == list(axes):
            root = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        else:
            ranks = torch.arange(self.world_size).view([axes[axis] for axis in order])
            ranks = ranks.permute([order.index(axis) for axis in axes])
            root = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(axes))
        by_name = {axis: root[axis] for axis in axes}
        by_axes: dict[tuple[str, ...], DeviceMesh] = {(axis,): by_name[axis] for axis in axes}
        for name, flattened in self.flattened_axes.items():
            joined = by_axes.get(flattened)
            if joined is None:
                joined = by_axes[flattened] = root[flattened]._flatten(name)
            by_name[name] = _name(root, joined, name)
        return _Built(root, by_name, by_axes)

    def _why_absent(self, name: str) -> str:
        if name in AXIS_ORDER:
            return "its degree is 1, and only degrees above 1 are axes"
        for flattened, axes in _STANDS_FOR:
            if name == flattened:
                return f"it stands for {' x '.join(axes)}, and {'each' if len(axes) > 1 else 'that'} has degree 1"
        if name in RESERVED_NAMES:
            return "that name is reserved, and no mesh has it yet"
        close = difflib.get_close_matches(name, (*AXIS_ORDER, *dict(_STANDS_FOR)), n=1)
        return "it is no axis of ParallelDims" + (f"; did you mean {close[0]!r}?" if close else "")

    # Checks of a model

    def validate_against_model(self, model: Any, seq_len: int | None = None) -> None:
        """Check that the numbers in `model.config`, if it has one, can be split by these degrees.

        Args:
            model: its config's `num_attention_heads` must be divisible by tp * ulysses_degree, `num_key_value_heads` by
                tp, `num_experts` and `num_local_experts` by `expert_ranks`. Absent numbers are not checked.
            seq_len: the global sequence length, which must be divisible by cp * tp; None: no check.

        Raises:
            TypeError: seq_len is no int.
            ValueError: one line for every number that does not divide, with the degrees that would work.
        """
        check("cannot split the model by these degrees", "int | None", seq_len=seq_len)
        config = getattr(model, "config", None)
        if config is None:
            return
        ulysses = self.ulysses_degree if self.cp > 1 and self.ulysses_degree else 1
        heads = ("tp", self.tp) if ulysses == 1 else ("tp * ulysses_degree", self.tp * ulysses)
        experts = " * ".join(self.expert_axes) or "ep", self.expert_ranks
        checks = [
            ("num_attention_heads", _read(config, "num_attention_heads"), *heads),
            ("num_key_value_heads", _read(config, "num_key_value_heads"), "tp", self.tp),
            ("num_experts", _read(config, "num_experts"), *experts),
            ("num_local_experts", _read(config, "num_local_experts"), *experts),
            ("seq_len", seq_len, "cp * tp", self.cp * self.tp),
        ]
        wrong = [(what, size, by, degree) for what, size, by, degree in checks if size is not None and size % degree]
        if wrong:
            raise self._error(
                "cannot split the model by these degrees:"
                + "".join(f"\n  {what}={size} is not divisible by {by}={degree}" for what, size, by, degree in wrong),
                "; ".join(
                    f"for {what}, {by} one of {', '.join(map(str, _divisors(size, self.world_size)))}"
                    for what, size, by, _ in wrong
                ),
            )

    # Checks of the constructor

    def _check_whole_numbers(self) -> None:
        fold: Any = self.fold_experts
        if not isinstance(fold, bool):
            what = f"cannot use fold_experts={fold!r}: it is a bool, not {type(fold).__name__}"
            raise self._error(what, "fold_experts=True")
        for name in (f.name for f in fields(self) if f.name != "fold_experts"):
            value = getattr(self, name)
            if name == "ulysses_degree" and (value is None or _is_whole(value) or self.cp != 1):
                continue  # checked only with cp > 1, where it has an effect
            if not _is_whole(value):
                raise self._error(
                    f"cannot use {name}={value!r}: a degree is a whole number, not {type(value).__name__}",
                    f"{name}=1 or a larger int",
                )
            if value < 1 and not (name == "dp_shard" and value == -1):
                inferred = ", or dp_shard=-1 to infer it" if name == "dp_shard" else ""
                raise self._error(f"cannot use {name}={value}: it must be at least 1{inferred}", f"{name}=1")

        if self.world_size > MOST_LISTED:
            raise self._error(
                f"cannot list world_size={self.world_size} ranks: each takes objects of its own",
                f"world_size={MOST_LISTED} at most",
            )

    def _inferred_dp_shard(self) -> int:
        others = self.dp_replicate * self.non_dp_size
        if self.world_size % others:
            raise self._error(
                f"cannot infer dp_shard: world_size={self.world_size} is not divisible by "
                f"dp_replicate * cp * tp * pp * ep = {others}",
                f"degrees whose product divides {self.world_size}, or start a multiple of {others} ranks",
            )
        return self.world_size // others

    def _checked_ulysses_degree(self) -> int:
        degree = self.cp if self.ulysses_degree is None else self.ulysses_degree
        if not _is_whole(degree) or degree < 1 or self.cp % degree:
            raise self._error(
                f"cannot use ulysses_degree={degree!r} with cp={self.cp}: it must be a whole number >= 1 that divides "
                "cp",
                f"ulysses_degree one of {', '.join(map(str, _divisors(self.cp, self.cp)))}, or None for {self.cp}",
            )
        return degree

    def _said(self) -> list[tuple[str, Any]]:
        """Return the fields that messages print; `fold_experts` only if it is set."""
        named = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [(name, value) for name, value in named if name != "fold_experts" or value is not False]

    def _set(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)  # frozen dataclass; only __post_init__ sets values

    def _error(self, what: str, hint: str) -> InvalidValue:
        degrees = ", ".join(f"{name}={value}" for name, value in self._said())
        return InvalidValue(f"{what}\n  degrees: {degrees}\n  try: {hint}")


def _name(root: DeviceMesh, source: DeviceMesh, name: str) -> DeviceMesh:
    """Register the one-dimensional mesh `source` at `root` as `name` too, without new process groups.

    torch's `_flatten` would work for a single axis, too. But it makes new groups for ranks that already have one, on
    accelerators with new communicator buffers. The mesh is kept in the same place, so `root[name]` and
    `root.get_group(name)` find both.
    """
    mesh = copy.copy(source)
    mesh._mesh_dim_names = (name,)
    mesh._root_mesh = root
    mesh._flatten_mapping = {}
    mesh._hash = None  # computed from the names on first use
    kept = mesh
    layout: Any = source._layout
    if hasattr(layout, "coalesce"):
        # Up to torch 2.12, root[name] wraps the kept layout, so the kept one must be unwrapped. The returned mesh is
        # wrapped like a slice: both must be equal, or operations on DTensors of both would fail.
        kept = copy.copy(mesh)
        kept._layout = layout[0] if len(layout[0]) == 1 else layout
        mesh._layout = layout.nest() if isinstance(layout.sizes, int) else layout
    root._flatten_mapping[name] = kept
    return mesh


def _read(source: Any, name: str) -> Any:
    """Return the entry or attribute `name`, or None."""
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _check_names(source: Any, names: tuple[str, ...]) -> None:
    """Refuse objects that cannot be a configuration of degrees, and misspelled degrees."""
    asked, known = "cannot read the degrees of a run", ", ".join(names)
    is_mapping = isinstance(source, Mapping)
    given = list(source) if is_mapping else list(getattr(source, "__dict__", ()))
    nearly = [name for name in given if name not in names and _is_nearly_one(str(name), names)]
    if nearly:
        blame, hint = f"it has {nearly[0]!r}, which is none of their names", nearest(nearly[0], names)
        raise InvalidValue(asked, blame, f"names: {known}", hint)
    has_any = any(name in given or (not is_mapping and hasattr(source, name)) for name in names)
    could_be = is_mapping or source is None or hasattr(source, "__dict__")
    if not has_any and ((is_mapping and given) or not could_be):
        blame = "it has none of their names" if is_mapping else f"it is a {type(source).__name__}"
        raise InvalidValue(asked, blame, f"got: {source!r}"[:200], f'{{"tp": 4}}; names: {known}')


@lru_cache(maxsize=256)  # a search repeats the same few names
def _is_nearly_one(name: str, names: tuple[str, ...]) -> bool:
    return bool(difflib.get_close_matches(name, names, 1, 0.75))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _divisors(number: int, most: int) -> list[int]:
    """Return the divisors of `number` up to `most`, at least [1]."""
    return [d for d in range(1, max(1, min(number, most)) + 1) if math.gcd(d, number) == d]
