"""The layouts of a Llama on a mesh with a tensor-parallel axis, after Megatron-LM (Shoeybi et al. 2019, section 3).

Attention is split by heads, the feed-forward by its inner width: what goes into them is replicated, and each rank's
result is a partial sum. With sequence parallelism (Korthikanti et al. 2022, section 4.2) everything between is split
over the sequence, and the all_reduce of that sum becomes a reduce_scatter, with an all_gather before the next split
module.

    residual stream -> norm -> (gather) attention or feed-forward (reduce) -> residual stream
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from hyper_parallel.core.common.checks import check, check_choice, read_int
from hyper_parallel.core.common.errors import InvalidType, InvalidValue, nearest
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.text import parse_mesh
from hyper_parallel.core.mesh.device_mesh import axes_of
from hyper_parallel.core.redistribute.api import from_local
from hyper_parallel.core.shard.loss import vocab_parallel_cross_entropy
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.lora import add_adapters

MeshLike = DeviceMesh | Layout | Mapping[str, int] | str
"""What has axes with names and sizes: a mesh, a layout of one, {"dp": 2, "tp": 4}, "dp=2,tp=4"."""

LOGITS = ("split", "whole", "local")
EMBEDDINGS = ("vocabulary", "width")


def llama_plan(
    model: Llama | LlamaConfig,
    mesh: MeshLike,
    *,
    tp: str | None = "tp",
    dp: str | Sequence[str] | None = None,
    sequence_parallel: bool = True,
    vocab_parallel: bool = True,
    embedding: str = "vocabulary",
    logits: str = "split",
    reshard_inputs: bool = False,
    chunks: int = 1,
) -> ShardingPlan:
    """Return the plan of a Llama for `shard_module`.

    >>> plan = llama_plan(LlamaConfig(), {"dp": 2, "tp": 2})
    >>> plan.plan["layers.*.attention.wq.weight"], plan.input_plan["layers.*.attention.input"]
    (('tp', 'None'), ('dp', 'None', 'None'))
    >>> plan.output_plan["layers.*.attention.output"]
    ('dp', 'tp', 'None')

    Training with it, where `rows` are the sequences of this rank's place along dp:

        mesh = init_device_mesh("npu", (2, 4), mesh_dim_names=("dp", "tp"))
        model = shard_module(Llama.build(config, seed=0), mesh, llama_plan(config, mesh))
        loss = llama_loss(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()

    Or with `mesh["tp"]` in both places, and `fully_shard(model, mesh=mesh["dp"])` after it. Then every rank's loss is
    the mean of its own rows, which is divided by the size of dp before `backward`.

    Communication per block with sequence parallelism: two all_gathers and two reduce_scatters forward, the same
    backward; without it two all_reduces each way. Beside that, of plain tokens the ranks tell each other the shape in
    each step, which tokens in a DTensor spare them.

    Args:
        model: the model, or its config. For a stage of a pipeline, the stage (see `Llama.keep`): the plan then leaves
            out what it lacks, takes activations as the residual stream, and returns such.
        mesh: names and sizes of the axes that the plan is for.
        tp: the axis that splits heads, inner width and vocabulary; None: no axis does.
        dp: the axis, or axes, that split the batch. Default: all others.
        sequence_parallel: split the residual stream over the sequence, along tp; its length need not divide evenly.
        vocab_parallel: split embedding and head over the vocabulary.
        embedding: "vocabulary": split it with the head; every rank looks up the tokens it has rows of. "width": split
            it by its width, which moves fewer bytes (an all_to_all in place of a reduce_scatter, or an all_gather in
            place of an all_reduce); not where head and embedding are one parameter.
        logits: "split": as the head computes them, for `llama_loss`. "whole": gathered over tp. "local": gathered, and
            a plain tensor of this rank's rows.
        reshard_inputs: with sequence_parallel, keep for backward this rank's shard of what attention, feed-forward and
            head gather, and gather it again in backward, while the gradients of what comes after it are computed
            (Korthikanti et al. 2022, section 4.2.2). One all_gather more for each of them, and of each gathered input
            only its share of the memory. Nothing changes inside of activation checkpointing, which gathers again
            anyway.
        chunks: with sequence_parallel, how many chunks the feed-forward computes one after another, so that one is
            gathered or reduced while another is computed; 1: all at once. What the feed-forward has gathered is kept
            for backward, with reshard_inputs, too. Without that, attention computes as many chunks of sequences, at
            most one for each.

    Raises:
        TypeError: no Llama or config, no mesh.
        ValueError: axes that do not exist, heads that the ranks along tp cannot share evenly, no such kind of logits,
            reshard_inputs or chunks without sequence_parallel.
    """
    asked = "cannot plan the Llama"
    config: object = model.config if isinstance(model, Llama) else model
    if not isinstance(config, LlamaConfig):
        blame = f"model is a {type(model).__name__}, not a Llama or a LlamaConfig"
        hint = "llama_plan(model, mesh); huggingface_plan(model, mesh) for a model of transformers"
        raise InvalidType(asked, blame, f"model: {type(model)!r}", hint)
    check(asked, "bool", sequence_parallel=sequence_parallel, vocab_parallel=vocab_parallel)
    check(asked, "bool", reshard_inputs=reshard_inputs)
    read_int(asked, "chunks", chunks, 1)
    check_choice(asked, "logits", logits, LOGITS)
    check_choice(asked, "embedding", embedding, EMBEDDINGS)
    if embedding == "width" and config.tie_embeddings:
        blame = "the embedding is the head's weight too, which is split over the vocabulary"
        seen = "tie_embeddings: True   embedding: 'width'"
        raise InvalidValue(asked, blame, seen, 'embedding="vocabulary"')
    streams = Streams.on(asked, mesh, tp=tp, dp=dp, sequence_parallel=sequence_parallel)
    heads = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads")}
    check_heads(asked, heads, streams)
    axis, whole = streams.tp or "None", ("None", "None")
    begins, ends = (model.embed is not None, model.head is not None) if isinstance(model, Llama) else (True, True)
    plan = ShardingPlan(
        input_plan={"input": (streams.rows, "None") if begins else streams.residual}, wrap_inputs=not begins
    )
    if not isinstance(model, Llama) or len(model.layers):  # a stage may have none
        _add_layers(plan, streams)
        if config.qk_norm:
            paths = ("layers.*.attention.q_norm.weight", "layers.*.attention.k_norm.weight")
            add_entries(plan, plan=dict.fromkeys(paths, ("None",)))
    if begins:
        streams.add_embedding(plan, "embed", split=vocab_parallel, by_width=embedding == "width")
    if ends:
        add_entries(plan, plan={"norm.weight": ("None",), "head.weight": (axis, "None") if vocab_parallel else whole})
        streams.add_along(plan, ("norm",))
        streams.add_head(plan, "head", split=vocab_parallel, logits=logits)
    if reshard_inputs:
        reshard_gathered(asked, plan, streams)
    if chunks > 1:
        cut(asked, plan, streams, chunks, ["layers.*.mlp"])
    if isinstance(model, Llama):
        add_adapters(plan, model)
    return plan


def _add_layers(plan: ShardingPlan, streams: Streams) -> None:
    axis = streams.tp or "None"
    add_entries(
        plan,
        plan={
            **{f"layers.*.attention.{name}.weight": (axis, "None") for name in ("wq", "wk", "wv")},
            **{f"layers.*.mlp.{name}.weight": (axis, "None") for name in ("w1", "w3")},
            **{f"layers.*.{name}.weight": ("None", axis) for name in ("attention.wo", "mlp.w2")},
            **dict.fromkeys(("layers.*.attention_norm.weight", "layers.*.mlp_norm.weight"), ("None",)),
        },
    )
    streams.add_along(plan, ("layers.*", "layers.*.attention_norm", "layers.*.mlp_norm"))
    streams.add_shares(plan, "layers.*.attention", streams.whole)
    streams.add_shares(plan, "layers.*.mlp", streams.whole)


def llama_loss(logits: torch.Tensor, targets: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
    """Return the mean cross-entropy of the logits of a Llama, sharded in any of the ways of `llama_plan` or not at all.

    >>> round(llama_loss(torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.long)).item(), 4)
    2.0794

    DTensor logits know of all rows, and the mean is over all of them. Of local logits it is over this rank's rows: with
    several ranks along dp, divide it by their number before `backward`, if each has as many rows.

    Args:
        logits: (batch, seq, vocab).
        targets: ids (batch, seq): the rows that the model was given, all rows, or a DTensor.
        ignore_index: the target of positions that do not count.

    Communication: see `vocab_parallel_cross_entropy`.

    Raises:
        ValueError: shapes that do not go together.
    """
    if not isinstance(logits, DTensor):
        if logits.dim() < 2 or (not isinstance(targets, DTensor) and targets.shape != logits.shape[:-1]):
            seen = f"logits: {tuple(logits.shape)}   targets: {tuple(targets.shape)}"
            blame = "targets need the shape of the logits without the vocabulary"
            raise InvalidValue("cannot take the loss", blame, seen, "(batch, seq, vocab) and (batch, seq)")
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index)
    if not isinstance(targets, DTensor) and targets.shape != logits.shape[:-1]:
        layout = Layout.of(logits)
        entries = layout.alias_placements or ()
        rows = layout.reset_partial()(entries[0], "None")
        targets = from_local(targets, rows, shape=logits.shape[:-1])
    return vocab_parallel_cross_entropy(logits, targets, ignore_index=ignore_index)


# -- the parts that plans of transformers share ----------------------------------------------------------------------


@dataclass(frozen=True)
class Streams:
    """How activations (batch, seq, width) lie on a mesh.

    Attributes:
        names: the axes of the mesh.
        sizes: their sizes.
        tp: the axis that splits modules, or None.
        dp: the axes that split the batch, in mesh order.
        sequence_parallel: whether tp splits the sequence between such modules.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    tp: str | None
    dp: tuple[str, ...]
    sequence_parallel: bool

    @classmethod
    def on(
        cls, asked: str, mesh: MeshLike, *, tp: str | None, dp: str | Sequence[str] | None, sequence_parallel: bool
    ) -> Streams:
        """Read a mesh and the roles of its axes.

        Raises:
            TypeError: no mesh.
            ValueError: an axis that the mesh does not have, or that has two roles.
        """
        names, sizes = _read_mesh(asked, mesh)
        others = tuple(name for name in names if name != tp)
        chosen = others if dp is None else (dp,) if isinstance(dp, str) else tuple(dp)
        seen = f"mesh: {', '.join(f'{name}={size}' for name, size in zip(names, sizes, strict=True))}"
        for word, name in [("tp", tp), *(("dp", name) for name in chosen)]:
            if name is not None and name not in names:
                hint = nearest(name, names) + (" (tp=None: no axis splits modules)" if word == "tp" else "")
                raise InvalidValue(asked, f"{word}={name!r} is no axis of the mesh", seen, f"{word}={hint}")
        if tp in chosen:
            raise InvalidValue(asked, f"axis {tp!r} is in both tp and dp", seen, f"dp={others!r}")
        return cls(names, sizes, tp, tuple(name for name in names if name in chosen), sequence_parallel)

    @property
    def degree(self) -> int:
        """Number of ranks along tp."""
        return 1 if self.tp is None else self.sizes[self.names.index(self.tp)]

    @property
    def rows(self) -> str | tuple[str, ...]:
        """What splits the batch: the entry of dim 0 in a layout."""
        return "None" if not self.dp else self.dp[0] if len(self.dp) == 1 else self.dp

    @property
    def whole(self) -> tuple[Any, ...]:
        """Whole along tp."""
        return (self.rows, "None", "None")

    @property
    def residual(self) -> tuple[Any, ...]:
        """As the residual stream."""
        return (self.rows, self.tp or "None", "None") if self.sequence_parallel else self.whole

    @property
    def columns(self) -> tuple[Any, ...]:
        """Split over the width."""
        return (self.rows, "None", self.tp or "None")

    @property
    def pending(self) -> tuple[Any, ...]:
        """Shares of a sum along tp."""
        return tuple(
            Partial() if name == self.tp else Shard(0) if name in self.dp else Replicate() for name in self.names
        )

    def add_along(self, plan: ShardingPlan, paths: Sequence[str]) -> None:
        """Let norms, and whole layers, compute on what a rank has of the residual stream."""
        add_entries(plan, local_plan=dict.fromkeys(paths, self.residual))

    def add_shares(self, plan: ShardingPlan, path: str, inputs: Any, *, several: bool = False) -> None:
        """Let a module take replicated inputs and return partial sums, the first of its results if it has several."""
        produced: Any = [self.pending, None] if several else self.pending
        _add_module(plan, path, inputs, produced, [self.residual, None] if several else self.residual)

    def add_embedding(self, plan: ShardingPlan, path: str, *, split: bool, by_width: bool = False) -> None:
        """Look tokens up in a table that is split over the vocabulary, or by its width."""
        tokens, axis = (self.rows, "None"), self.tp or "None"
        if split and not by_width:
            add_entries(plan, plan={f"{path}.weight": (axis, "None")})
            _add_module(plan, path, tokens, self.pending, self.residual)
        else:
            add_entries(plan, plan={f"{path}.weight": ("None", axis if split else "None")})
            _add_module(plan, path, tokens, self.columns if split else self.whole, self.residual)

    def add_head(self, plan: ShardingPlan, path: str, *, split: bool, logits: str) -> None:
        """Compute the logits of a rank's part of the vocabulary, or of its part of the residual stream."""
        gathered = None if logits == "split" else self.whole
        if split:
            _add_module(plan, path, self.whole, self.columns, gathered)
        else:
            _add_module(plan, path, self.residual, self.residual, gathered)
        if logits == "local":
            plan.return_local_tensor = [*(plan.return_local_tensor or []), path]


def add_entries(plan: ShardingPlan, /, **sections: Mapping[str, Any]) -> None:
    """Add entries to the sections of a plan."""
    for field, entries in sections.items():
        setattr(plan, field, {**(getattr(plan, field) or {}), **entries})


def _add_module(plan: ShardingPlan, path: str, inputs: Any, produced: Any, outputs: Any) -> None:
    """Let a module compute on local tensors: what it takes, what its code returns, what becomes of that."""
    add_entries(plan, input_plan={f"{path}.input": inputs}, local_plan={path: produced})
    if outputs is not None:
        add_entries(plan, output_plan={f"{path}.output": outputs})


def reshard_gathered(asked: str, plan: ShardingPlan, streams: Streams) -> None:
    """Let the modules of a plan that gather their input over tp gather it again in backward, in place of keeping it.

    Args:
        asked: the start of an error message, "cannot ...".
        plan: complete but for this.
        streams: the mesh.

    Raises:
        ValueError: no input is gathered.
    """
    if not streams.sequence_parallel:
        raise _not_gathered(asked, "reshard_inputs=True", "reshard_inputs=False", "gather again")
    inputs = plan.input_plan or {}
    gathered = [path for path in plan.local_plan or {} if inputs.get(f"{path}.input") == streams.whole]
    plan.reshard_inputs = gathered if streams.degree > 1 else None


def cut(asked: str, plan: ShardingPlan, streams: Streams, count: int, paths: Sequence[str]) -> None:
    """Let modules of a plan that gather their input over tp compute one chunk after another.

    Feed-forwards in chunks of their rows, and attention of sequences, unless it is to gather its input again.

    Args:
        asked: the start of an error message, "cannot ...".
        plan: complete but for this.
        streams: the mesh.
        count: of the chunks.
        paths: of the feed-forwards.

    Raises:
        ValueError: no input is gathered.
    """
    if not streams.sequence_parallel:
        raise _not_gathered(asked, f"chunks={count}", "chunks=1", "overlap")
    if streams.degree > 1 and plan.local_plan:
        chunks: dict[str, int | tuple[int, int]] = dict.fromkeys(paths, count)
        if "layers.*.attention" not in (plan.reshard_inputs or ()):
            chunks["layers.*.attention"] = (count, 0)
        plan.chunks = {path: chunk for path, chunk in chunks.items() if path in plan.local_plan} or None
        plan.reshard_inputs = [path for path in plan.reshard_inputs or [] if path not in chunks] or None


def _not_gathered(asked: str, given: str, off: str, nothing_to: str) -> ValueError:
    """Return the error of an option about inputs that are gathered over tp, where none is."""
    blame = f"without sequence parallelism no input is gathered, so that there is nothing to {nothing_to}"
    return InvalidValue(asked, blame, f"{given}, sequence_parallel=False", f"sequence_parallel=True, or {off}")


def check_heads(asked: str, counts: Mapping[str, int], streams: Streams) -> None:
    """Refuse counts that the ranks along tp cannot share evenly.

    >>> streams = Streams(("tp",), (8,), "tp", (), True)
    >>> check_heads("cannot plan the Llama", {"num_attention_heads": 8, "num_key_value_heads": 2}, streams)
    Traceback (most recent call last):
        ...
    hyper_parallel.InvalidValue: cannot plan the Llama: the 8 ranks along 'tp' cannot share num_key_value_heads=2 evenly
      num_attention_heads=8, num_key_value_heads=2   mesh: tp=8
      try: a mesh with tp=1 or tp=2

    Args:
        asked: the start of an error message, "cannot ...".
        counts: what is split, by name.
        streams: the mesh.

    Raises:
        ValueError: some count is no multiple of the number of ranks.
    """
    wrong = next((name for name, count in counts.items() if count % streams.degree), None)
    if wrong is None:
        return
    fits = [n for n in range(1, min(counts.values()) + 1) if all(count % n == 0 for count in counts.values())]
    blame = f"the {streams.degree} ranks along {streams.tp!r} cannot share {wrong}={counts[wrong]} evenly"
    sizes = ", ".join(f"{name}={size}" for name, size in zip(streams.names, streams.sizes, strict=True))
    seen = f"{', '.join(f'{name}={count}' for name, count in counts.items())}   mesh: {sizes}"
    raise InvalidValue(asked, blame, seen, "a mesh with " + " or ".join(f"{streams.tp}={n}" for n in fits))


def _read_mesh(asked: str, mesh: MeshLike) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if isinstance(mesh, DeviceMesh):
        axes = axes_of(mesh)
        return axes.names, axes.sizes
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh)
    if isinstance(mesh, Layout):
        return mesh.alias_name, mesh.mesh_shape
    if isinstance(mesh, Mapping) and mesh and all(isinstance(size, int) and size >= 1 for size in mesh.values()):
        return tuple(mesh), tuple(mesh.values())
    blame = f"mesh is a {type(mesh).__name__}, not a mesh or the sizes of its axes"
    raise InvalidType(asked, blame, f"mesh: {mesh!r}", 'the DeviceMesh, or {"dp": 2, "tp": 4}')
