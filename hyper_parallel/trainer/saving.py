"""Checkpoints of a run: weights, optimizer, random generators, position in the data; and folders of transformers."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.checkpoint.api import load_checkpoint, read_metadata
from hyper_parallel.core.checkpoint.checkpointer import Checkpointer, Saved, warn_of_damage
from hyper_parallel.core.checkpoint.errors import CheckpointError, Peers
from hyper_parallel.core.checkpoint.folders import is_complete
from hyper_parallel.core.checkpoint.optimizer import model_tensors, optimizer_targets, optimizer_tensors
from hyper_parallel.core.checkpoint.record import CheckpointMetadata
from hyper_parallel.core.common.checks import check_paths
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.common.torch_compat import own_statistics, plain_name
from hyper_parallel.models.hf_folder import load_by_transformers
from hyper_parallel.models.hf_weights import export_huggingface, import_huggingface, load_huggingface, other_model
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.lora import (
    ALL,
    Adapter,
    LoraConfig,
    check_targets,
    export_adapter,
    is_of_adapter,
    merge_adapters,
    with_lora,
)
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.trainer.config import DTYPES, MODELS, OTHER, Config, PrecisionConfig, TrainConfig
from hyper_parallel.trainer.data import Corpus, load_corpus, load_tokenizer
from hyper_parallel.trainer.guards import NonFiniteError
from hyper_parallel.trainer.optimizer import is_hidden
from hyper_parallel.trainer.parallelize import Parallelized, in_dtype

_HEAD, _TABLE = "head.weight", "embed.weight"


@dataclass(frozen=True)
class Progress:
    """How far a saved run had come: steps, sequences of all ranks, and steps in a row that were skipped just before."""

    steps: int
    samples: int
    skipped: int


class Saver(AbstractContextManager["Saver"]):
    """Saves a run to its folder, and finds what to go on from; without a folder it does nothing.

    Any run can go on from it, whatever its degrees. With the same ones it goes on bit for bit as if it had not stopped:
    the order of additions is the same.

    Args:
        config: has the folder, and how many to keep.
        model, optimizer, device: this rank's part, and where it is.
        rank, world_size: the caller, and how many ranks there are.
        shape: of a model that is not the config's, see `given_shape`.
        corpus: what it trains on; None: something else than a text.

    Attributes:
        has_folder: whether it saves.
        failures: what went wrong so far; the run goes on.
        safe_step: of the last checkpoint that is known to be complete.
        last_failed: whether the last save is among the failures.
        states: of the loader and the scheduler, in the checkpoint that was loaded; None for what has none.
    """

    def __init__(
        self,
        config: Config,
        model: Parallelized,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        rank: int,
        world_size: int,
        shape: dict[str, Any] | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        keep, self.has_folder = config.checkpoint, config.checkpoint.folder is not None
        is_first = rank == 0 and self.has_folder  # who writes the checksum of the text
        self.text = {**_text(config), **(corpus.content() if is_first and corpus is not None else {})}
        self.config, self.model, self.optimizer, self.device = config, model, optimizer, device
        self.shape = _shape(config) if shape is None else shape
        self.rank, self.world_size = rank, world_size
        self.failures: tuple[str, ...] = ()
        self.safe_step: int | None = None
        self.last_failed = False
        self.states: Mapping[str, str | None] = {}
        self._files: Checkpointer | None = None
        if keep.folder is not None:
            self._files = Checkpointer(keep.folder, keep_last=keep.keep, async_save=keep.background)

    def resume(self) -> Progress | None:
        """Take the folder, and load the newest checkpoint that is sound, if there is one; return how far it had come.

        Raises:
            ValueError: it is of another model; or the run is to start anew in a folder that holds another one's.
            CheckpointError: all are damaged, or the one that is asked for; or another run is using the folder.
        """
        if self._files is None:
            return None
        try:
            self._files.acquire()
            return self._load(self._files)
        except BaseException:
            self._files.release()
            raise

    def _load(self, files: Checkpointer) -> Progress | None:
        failure, found = None, (list[Path](), False)
        try:
            found = _to_go_on_from(self.config, files) if self.rank == 0 else found
        except (CheckpointError, ValueError) as error:
            failure = error
        paths, goes_back = Peers.of(None).agree(failure, found)[0]
        for path in paths:
            try:
                return self._load_from(files, path, goes_back or path != paths[0])
            except CheckpointError as error:
                if path == paths[-1]:
                    raise
                warn_of_damage(path, error, self.rank)
        return None

    def _load_from(self, files: Checkpointer, path: Path, goes_back: bool) -> Progress:
        """Load a checkpoint; if it goes back, newer ones are set aside later. Raise the same on all ranks."""
        failure: Exception | None = None
        try:
            metadata = _checked(self.config, path, self.shape)
        except (CheckpointError, ValueError) as error:
            failure = error
        Peers.of(None).agree(failure)
        which: dict[str, Any] = {"step": metadata.step} if goes_back else {"path": path}
        state = optimizer_targets(self.model.parts, self.optimizer, self._with_both_names(metadata))
        own = _statistics(self.model.parts, metadata.tensors)
        tensors, twins = self._by_one_name(own, state)
        generators = self._generators() if metadata.world_size == self.world_size else {}
        extra = files.load(tensors, **which, per_rank={**own, **generators})
        with torch.no_grad():
            for table, head in twins:
                head.copy_(table)
        for name, numbers in generators.items():
            (torch if name == "generator.cpu" else torch.get_device_module(self.device.type)).set_rng_state(numbers)
        self.safe_step = extra["progress"]["steps"]
        self.states = {name: extra.get(name) for name in ("loader", "scheduler")}
        return Progress(**extra["progress"])

    def save(self, progress: Progress, states: Mapping[str, str | None]) -> None:
        """Save; in the background if so configured. What goes wrong is noted in `failures`.

        `states` are those of the run's loader and scheduler, as text; None for what has none.
        """
        assert self._files is not None, "the run has a folder"
        state, _ = optimizer_tensors(self.model.parts, self.optimizer)
        own = _statistics(self.model.parts) if self.world_size > 1 else {}
        tensors, _ = self._by_one_name(own, state)
        extra: dict[str, Any] = {
            "progress": dataclasses.asdict(progress),
            "model": self.shape,
            "text": self.text,
            "start_from": self.config.train.start_from,
            **states,
        }
        if self.config.checkpoint.resume_step is not None:
            extra["went_back_to"] = self.config.checkpoint.resume_step
        self._note(self._files.save(progress.steps, tensors, extra, per_rank={**own, **self._generators()}))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error, ranks that wait for each other here could wait for ever, unless all ranks raise it.
        if self._files is None:
            return
        if kind is None or issubclass(kind, NonFiniteError):
            self._note(self._files.close())
        else:
            self._files.release()

    def _note(self, saved: Saved | None) -> None:
        if saved is None:
            return
        self.last_failed = saved.error is not None
        if saved.error is None:
            self.safe_step = saved.step
        else:
            self.failures = (*self.failures, f"step {saved.step}: {saved.error}")

    def _by_one_name(
        self, own: Collection[str], state: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the optimizer's `state` and trainable tensors, but for `own`; a tied head by the name of the table.

        Frozen tensors are in the base checkpoint. Also return the pairs of which a rank has both, in two stages.
        """
        params = (each for part in self.model.parts for each in part.named_parameters(remove_duplicate=False))
        out = {*own, *(f"model.{plain_name(name)}" for name, param in params if not param.requires_grad)}
        every = {**model_tensors(self.model.parts), **state}
        tensors = {name: tensor for name, tensor in every.items() if name not in out}
        if not self.config.model.tie_embeddings:
            return tensors, []
        named: dict[str, torch.Tensor] = {}
        twins = []
        for name, tensor in sorted(tensors.items(), key=lambda item: _HEAD in item[0]):
            table = name.replace(_HEAD, _TABLE)
            if table in named:
                twins.append((named[table], tensor))
            named.setdefault(table, tensor)
        return named, [(table, head) for table, head in twins if table is not head]

    def _with_both_names(self, metadata: CheckpointMetadata) -> CheckpointMetadata:
        """Let a tied head find the state of the table."""
        if not self.config.model.tie_embeddings:
            return metadata
        heads = {name.replace(_TABLE, _HEAD): entry for name, entry in metadata.tensors.items() if _TABLE in name}
        return dataclasses.replace(metadata, tensors={**metadata.tensors, **heads})

    def _generators(self) -> dict[str, torch.Tensor]:
        states = {"generator.cpu": torch.get_rng_state()}
        if self.device.type != "cpu":
            states["generator.device"] = torch.get_device_module(self.device.type).get_rng_state()
        return states


def _statistics(parts: Sequence[nn.Module], shared: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return the running statistics that each rank has of its own rows, e.g. of a batch norm, as `model_tensors` names.

    Those with `shared` names are left out, because a checkpoint has one for all ranks.
    """
    named = (
        (f"model.{plain_name(f'{path}.{name}'.removeprefix('.'))}", getattr(module, name))
        for part in parts
        for path, module in part.named_modules()
        for name in own_statistics(module)
    )
    return {name: value for name, value in named if type(value) is torch.Tensor and name not in shared}


def run_to_go_on_from(config: Config) -> tuple[int, list[str]] | None:
    """Find, before any rank starts, the checkpoint that a run goes on from: its step, and what is not as it was then.

    Weights and optimizer do not depend on what is returned, but the text does: another seed draws it anew.

    Returns:
        Step and changes, such as "seed: 0 then, 7 now"; None if there is nothing to go on from.

    Raises:
        ValueError: it is of another model, or of none; the run is to start anew in a folder that holds another one's.
        CheckpointError: it is damaged.
    """
    if config.checkpoint.folder is None:
        return None
    with Checkpointer(config.checkpoint.folder) as files:
        paths, _ = _to_go_on_from(config, files)
    if not paths:
        return None
    for path in paths:
        try:
            extra = _checked(config, path, {} if config.is_other else _shape(config)).extra
            break
        except CheckpointError:  # the ranks will say so
            if path == paths[-1]:
                raise
    then, now = extra.get("text"), {**_text(config), **load_corpus(config.data).content()}
    then = {"order": "drawn", **(then if isinstance(then, dict) else {})}  # once samples were drawn independently
    if config.lora.is_on:  # what is not in the checkpoint
        then["start_from"], now["start_from"] = extra.get("start_from"), config.train.start_from
    changes = [f"{key}: {then[key]!r} then, {now[key]!r} now" for key in now if key in then and then[key] != now[key]]
    return extra["progress"]["steps"], changes


def _to_go_on_from(config: Config, files: Checkpointer) -> tuple[list[Path], bool]:
    """Return the checkpoint to go on from, then those to try if it is damaged, and whether that is to go back.

    torchrun starts a run anew with the same arguments: one that has gone back goes on from what it has saved since.
    """
    paths, step = files.complete(), config.checkpoint.resume_step
    if not paths and is_complete(files.root):
        blame, seen = "it is a checkpoint, and not the folder of a run's", f"folder: {files.root}"
        place = files.root.absolute()
        number = place.name.removeprefix("step-").lstrip("0")
        hint = f"--checkpoint-dir {shlex.quote(str(place.parent))}" + f" --resume-step {number}" * number.isdecimal()
        raise InvalidValue("cannot go on from this folder", blame, seen, hint)
    if step is None or (paths and _has_gone_back(paths[0], step)):
        return paths, False
    return [files.at(step)], True


def _has_gone_back(newest: Path, step: int) -> bool:
    extra: Any = None
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        with suppress(CheckpointError):
            extra = read_metadata(newest).extra
    return isinstance(extra, dict) and extra.get("went_back_to") == step


def _checked(config: Config, path: Path, mine: dict[str, Any]) -> CheckpointMetadata:
    """Return the metadata of a checkpoint, if the run can go on from it."""
    if not config.checkpoint.resume:
        blame, hint = "it holds the checkpoints of another run", "another folder, or go on with --resume"
        raise InvalidValue("cannot start anew in this folder", blame, f"there is: {path}", hint)
    metadata, asked = read_metadata(path), f"cannot go on from {path}"
    extra = metadata.extra
    if not isinstance(extra, dict) or not isinstance(extra.get("model"), dict) or not _is_progress(extra):
        seen = f"extra: {extra!r}"[:200]
        raise InvalidValue(asked, "it was not saved by hyper-parallel train", seen, "another folder")
    # Checkpoints from before there were such things do not say.
    defaults = dataclasses.asdict(LlamaConfig())
    added = {key: value for key, value in defaults.items() if key == "qk_norm" or key.startswith("rope_")}
    saved = {**added, "moments": extra["model"].get("precision"), **extra["model"]}
    compared = ("kind",) if mine and saved.get("kind") != mine["kind"] else tuple(mine)
    different = [key for key in compared if saved.get(key) != mine[key]]
    if different:
        seen = "\n  ".join(f"{key}: {saved.get(key)!r} there, {mine[key]!r} here" for key in different)
        keys = {"kind": "model", "precision": "[precision]", "moments": "[precision]", "lora": "[lora]"}
        places = dict.fromkeys(keys.get(key, "[model] and [experts]") for key in different)
        hint = f"the {', '.join(places)} it was saved with, or another folder"
        raise InvalidValue(asked, "it is of another model", seen, hint)
    _check_optimizer(config, metadata, asked)
    return metadata


def _check_optimizer(config: Config, metadata: CheckpointMetadata, asked: str) -> None:
    """Refuse the state of another optimizer: a step would look for moments that are not there."""
    states = {name: name.removeprefix("optimizer.").rpartition(".") for name in metadata.tensors}
    by_muon = any(state == "momentum_buffer" for _, _, state in states.values())
    by_adamw = any(
        state == "exp_avg" and is_hidden(param, len(metadata.tensors[name].shape))
        for name, (param, _, state) in states.items()
    )
    here = config.optimizer.muon
    if by_adamw if here else by_muon:
        seen = f"muon: {str(not here).lower()} there, {str(here).lower()} here"
        hint = "the optimizer it was saved with; or a new folder, and --start-from what hyper-parallel export writes"
        raise InvalidValue(asked, "its optimizer is another one", seen, hint)


def _is_progress(extra: dict[str, Any]) -> bool:
    """Tell whether a checkpoint has the numbers of how far the run had come."""
    progress: Any = extra.get("progress")
    has_all = isinstance(progress, dict) and set(progress) == {field.name for field in dataclasses.fields(Progress)}
    return has_all and all(type(n) is int and n >= 0 for n in progress.values())


def _shape(config: Config) -> dict[str, Any]:
    shape = dataclasses.asdict(config.shape())
    del shape["max_seq_len"]  # tables that are no weights
    lora = dataclasses.asdict(config.lora) if config.lora.is_on else None
    return {"kind": config.train.model, **_stored(config), "lora": lora, **shape}


def _stored(config: Config) -> dict[str, str]:
    """Return what the trained weights and the optimizer's state are stored in."""
    words = {dtype: word for word, dtype in DTYPES.items()}
    return {"precision": words[config.precision.dtype("master")], "moments": words[config.precision.dtype("moments")]}


def _text(config: Config) -> dict[str, Any]:
    """Return what the place of a sample in the text depends on."""
    place = {"seq_len": config.batch_shape[1], "seed": config.seed_of(), "order": "shuffled"}
    return {**dataclasses.asdict(config.data), **place}


_FREE = frozenset({"max_seq_len", "init_std", "bias_update_rate", "aux_loss_weight"})
"""What two models may differ in and compute the same with the same weights."""


def export_checkpoint(
    checkpoint: str | Path,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    tokenizer: str | None = None,
    merge: bool = False,
    base: str | None = None,
) -> int:
    """Write the weights of a checkpoint as a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

        export_checkpoint("out/run", "out/hf", torch.bfloat16)

    By one process, whatever ranks have saved it, with the whole model in its memory. The tokenizer that the run was
    trained with goes there, too. Of a run with LoRA the adapters are written, for `peft.PeftModel.from_pretrained`.

    Args:
        checkpoint: one of a run of this trainer, or the folder of a run, whose newest complete one is taken.
        folder: made if it is not there; refused if it has weights.
        dtype: to write weights in. Default: as they are.
        tokenizer: folder of another tokenizer, such as where the run's is now.
        merge: of a run with LoRA, write a whole model: that which it started from, with the adapters added to it.
        base: where the folder that the run started from is now, if it had LoRA, or a model that transformers alone
            knows. Default: where it was.

    Returns:
        How many parameters were written.

    Raises:
        ValueError: no checkpoint of this trainer, or its tokenizer cannot be loaded; `merge` or `base` of a run that
            has all weights; see also `export_huggingface`.
        CheckpointError: it is damaged.
    """
    paths = {"checkpoint": os.fspath(checkpoint), "folder": os.fspath(folder), "tokenizer": tokenizer, "base": base}
    check_paths("cannot export", **paths)
    path = _newest(Path(checkpoint))
    metadata = read_metadata(path)
    extra = metadata.extra
    shape = extra.get("model") if isinstance(extra, dict) else None
    if not isinstance(shape, dict):
        blame = "it does not say which model it is of"
        hint = "a checkpoint of hyper-parallel train, or load_checkpoint and export_huggingface"
        raise InvalidValue(f"cannot export {path}", blame, f"extra: {extra!r}"[:200], hint)
    trained_with = extra["text"].get("tokenizer") if isinstance(extra.get("text"), dict) else None
    words = load_tokenizer(tokenizer or trained_with) if tokenizer or trained_with else None
    sizes = {**shape, "moments": None}
    kind, precision, lora, _ = (sizes.pop(key, None) for key in ("kind", "precision", "lora", "moments"))
    lora = LoraConfig(**(lora or {}))
    if not lora.is_on and (merge or (base is not None and kind in MODELS)):
        seen, hint = ("merge: True", "leave out merge") if merge else (f"base: {base!r}", "leave out base")
        raise InvalidValue(f"cannot export {path}", "it has all weights, and no adapters", seen, hint)
    base, config = base or extra.get("start_from"), None
    if kind in MODELS:
        config = MoEConfig(**sizes) if kind == "moe" else LlamaConfig(**sizes)
        model: Any = _filled(path, metadata, config, lora, precision)
    elif base is not None:
        model = _filled_other(path, metadata, shape, lora, base)
    else:
        blame, seen = f"it is of a {kind}, which train(config, model=...) was given", f"kind: {kind}"
        raise InvalidValue(f"cannot export {path}", blame, seen, "export_given(checkpoint, model, folder)")
    if config is not None and (merge or not lora.is_on):
        if lora.is_on:
            load_huggingface({name: x for name, x in model.state_dict().items() if not is_of_adapter(name)}, str(base))
        export_huggingface(merge_adapters(model), config, folder, dtype=dtype, tokenizer=words)
        return config.num_parameters()
    if lora.is_on and not merge:
        count = export_adapter(model, lora, folder, base=str(base), dtype=dtype)
    else:
        state = merge_adapters(model)
        says = dtype or (torch.float32 if model.dtype == torch.float64 else model.dtype)
        model.to(says).save_pretrained(folder, state_dict={n: x.to(dtype or x.dtype) for n, x in state.items()})
        count = sum(x.numel() for x in {x.data_ptr(): x for x in state.values()}.values())
    if words is not None:
        words.save_pretrained(folder)
    return count


def _filled_other(
    path: Path, metadata: CheckpointMetadata, shape: Mapping[str, Any], lora: LoraConfig, base: str
) -> nn.Module:
    """Load a model that transformers alone knows, with what a checkpoint has of it."""
    run = Config(train=TrainConfig(model=OTHER, start_from=base), lora=lora, precision=_precision_of(shape))
    model = model_of_folder(run)
    here = given_shape(model, run)
    if here != {"moments": shape["precision"], **shape}:
        seen, hint = f"there: {dict(shape)}   in {base}: {here}", "--base with the folder that the run started from"
        raise InvalidValue(f"cannot export {path}", "it is of another model", seen, hint)
    _fill(path, metadata, model)
    return model


def _fill(path: Path, metadata: CheckpointMetadata, model: nn.Module, **options: Any) -> None:
    """Load what a checkpoint has of a model; the optimizer's state stays there."""
    tensors = {name: value for name, value in model_tensors(model).items() if name in metadata.tensors}
    load_checkpoint(path, tensors, strict=False, **options)


def _filled(
    path: Path, metadata: CheckpointMetadata, config: LlamaConfig, lora: LoraConfig, precision: str
) -> nn.Module:
    """Build a model with what a checkpoint has of it: all, or its adapters; the rest has no values then."""
    with torch.device("meta"):
        model: Llama = MoELlama(config) if isinstance(config, MoEConfig) else Llama(config)
        with_lora(model, lora)
    stored = DTYPES[precision]
    wide = torch.promote_types(stored, torch.float32)  # of a frozen base, which is as its folder has it, or wider
    in_dtype(model, lambda param: stored if param.requires_grad else wide, wide)
    model = model.to_empty(device="cpu")
    tensors = model_tensors(model)
    if config.tie_embeddings:
        tensors.pop("model.head.weight", None)
    if lora.is_on:
        tensors = {name: tensor for name, tensor in tensors.items() if is_of_adapter(name)}
    if lacking := [name for name in tensors if name not in metadata.tensors]:
        blame, seen = f"it has no {lacking[0]!r}, nor {len(lacking) - 1} others of its model", len(metadata.tensors)
        raise InvalidValue(f"cannot export {path}", blame, f"tensors: {seen}", "the checkpoint of a whole model")
    load_checkpoint(path, tensors, strict=False)  # the optimizer's state stays there
    if config.tie_embeddings and model.head is not None and model.embed is not None:
        model.head.weight = model.embed.weight
    return model


def _precision_of(shape: Mapping[str, Any]) -> PrecisionConfig:
    """Return a precision that stores what a checkpoint has of a model; frozen weights in at least fp32."""
    stored, moments = shape["precision"], shape.get("moments")
    if stored == "fp64":
        return PrecisionConfig("fp64")
    return PrecisionConfig("bf16", master_dtype=stored, moments_dtype=moments, frozen_dtype="fp32")


def given_shape(model: nn.Module, run: Config) -> dict[str, Any]:
    """Return kind, precision and numbers of a model before it is sharded, by which its checkpoints are known."""
    params = list(model.parameters())
    trained = sum(param.numel() for param in params if param.requires_grad)
    numbers: dict[str, Any] = {"parameters": sum(param.numel() for param in params), "trained": trained}
    if run.lora.is_on:
        numbers["lora"] = dataclasses.asdict(run.lora)
    return {"kind": type(model).__name__, **_stored(run), **numbers}


def model_of_folder(run: Config) -> nn.Module:
    """Load the causal language model of `train.start_from` by transformers, with adapters drawn by torch's generator.

    Raises:
        ValueError: transformers is not installed, or cannot load it; adapters that do not fit.
    """
    folder, precision = str(run.train.start_from), run.precision
    asked, hint = f"cannot load the model of {folder}", "a folder with a causal language model"
    stored = precision.dtype("frozen") if run.lora.is_on else precision.dtype("master")
    model: nn.Module = load_by_transformers(asked, "AutoModelForCausalLM", folder, hint, dtype=stored)
    if run.lora.is_on or run.lora.targets != ALL:
        check_targets(model, run.lora)
    for module in with_lora(model, run.lora).modules():
        if isinstance(module, Adapter):
            module.to(precision.dtype("master")).reset_parameters()
    return model


def export_given(checkpoint: str | Path, model: nn.Module, folder: str | Path, *, tokenizer: str | None = None) -> None:
    """Fill a model with what a run of `train(config, model=...)` has trained, and let it write itself to a folder.

        export_given("out/run", make_model(), "out/adapter")

    A model of transformers writes all its weights, and one of peft its adapter.

    Args:
        checkpoint: one of the run, or the run's folder, whose newest complete one is taken.
        model: as the run's `model` makes it; has a `save_pretrained`.
        folder: for `save_pretrained`.
        tokenizer: folder of another tokenizer than the run's, to be written, too.

    Raises:
        TypeError: a model without a `save_pretrained`.
        ValueError: a checkpoint of another model.
        CheckpointError: it is damaged.
    """
    path, asked, kind = _newest(Path(checkpoint)), f"cannot export {checkpoint}", type(model).__name__
    if not hasattr(model, "save_pretrained"):
        hint = "a model of transformers or peft; or load_checkpoint"
        raise InvalidType(asked, f"a {kind} cannot write itself", f"model: {kind}", hint)
    metadata = read_metadata(path)
    extra = metadata.extra if isinstance(metadata.extra, dict) else {}
    there = extra.get("model") or {}
    there = {"moments": there.get("precision", "fp32"), **there}
    here = given_shape(model, Config(precision=_precision_of({"precision": "fp32", **there})))
    if there != here:
        hint = "what the run's model= makes, with the same parameters frozen"
        raise InvalidValue(asked, "it is of another model", f"there: {there}   here: {here}", hint)
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    model.to(DTYPES[here["precision"]])
    _fill(path, metadata, model, per_rank=_statistics([model], metadata.tensors))  # those of rank 0
    for name, param in model.named_parameters():
        param.data = param.data.to(dtypes[name])
    save: Any = model
    save.save_pretrained(folder)
    if words := tokenizer or (extra.get("text") or {}).get("tokenizer"):
        load_tokenizer(words).save_pretrained(folder)


def _newest(path: Path) -> Path:
    """Return the newest checkpoint of a run's folder, or the folder itself if it is one."""
    if not path.is_dir():
        hint = "the --checkpoint-dir of a run, or one of the checkpoints in it"
        raise InvalidValue(f"cannot export {path}", "there is no such folder", f"checkpoint: {path}", hint)
    with Checkpointer(path) as run:
        return run.latest() or path


def with_shape_of(run: Config, folder: str | Path, *, others: bool = False) -> Config:
    """Return a run of the model whose weights are in a folder of transformers, with its tokenizer if it has one.

    Args:
        run: how to train it.
        folder: see `import_huggingface`.
        others: also take models that transformers alone knows, as they are.

    Raises:
        ValueError: as `import_huggingface`.
    """
    kind = other_model(folder) if others else None
    size = None if kind is None else _vocabulary(folder)
    if size is not None:
        run = run.with_changes("train", {"model": OTHER, "start_from": str(folder)})
        run = run.with_changes("model", {"vocab_size": size})
    else:
        config, _ = import_huggingface(folder)
        run = run.with_shape(config).with_changes("train", {"start_from": str(folder)})
    has_tokenizer = (Path(folder) / "tokenizer.json").is_file()
    return run.with_changes("data", {"tokenizer": str(folder)}) if has_tokenizer and not run.data.tokenizer else run


def _vocabulary(folder: str | Path) -> int | None:
    """Return how many tokens the causal language model of a folder knows; None: transformers loads no such model."""
    try:
        settings = load_by_transformers(f"cannot import {folder}", "AutoConfig", folder, "one that transformers knows")
        from transformers import AutoModelForCausalLM
    except (ImportError, ValueError):
        return None
    known = type(settings) in AutoModelForCausalLM._model_mapping
    return settings.get_text_config().vocab_size if known else None


def check_start(run: Config) -> None:
    """Refuse to start from weights of a model that computes something else with them, though their shapes may fit.

    Raises:
        ValueError: as `import_huggingface`; the model of the folder is not the run's.
    """
    assert run.train.start_from is not None, "the caller looks"
    if run.is_other:
        return
    theirs, _ = import_huggingface(run.train.start_from)
    there, here = dataclasses.asdict(theirs), dataclasses.asdict(run.shape())
    unlike = [name for name in {**here, **there} if name not in _FREE and there.get(name) != here.get(name)]
    if unlike:
        blame = f"its model has another {unlike[0]} than the run's"
        seen = "\n  ".join(f"{name}: {there.get(name)!r} there, {here.get(name)!r} here" for name in unlike)
        hint = "with_shape_of(config, folder), as --start-from takes it; or the [model] and [experts] of the folder"
        raise InvalidValue(f"cannot start from {run.train.start_from}", blame, seen, hint)
