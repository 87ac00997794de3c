"""Right calls of every public name, from which wrong ones are made; and which names are left out, with the reason."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hyper_parallel as hp
from hyper_parallel.core.checkpoint import Checkpointer, read_metadata, save_checkpoint
from hyper_parallel.core.context_parallel import ContextParallel, SequenceSplit
from hyper_parallel.core.fully_shard import DataParallelMeshDims
from hyper_parallel.core.pipeline import Pipeline
from hyper_parallel.core.redistribute import plan
from hyper_parallel.models import Llama, LlamaConfig, MoEConfig, MoELlama, export_huggingface
from hyper_parallel.trainer.config import Config, PrecisionConfig, TrainConfig, config_text
from hyper_parallel.trainer.data import RecordLoader

ROOT = Path(__file__).parents[3]
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
DENSE = LlamaConfig(**SMALL, vocab_size=8, max_seq_len=8)  # type: ignore[arg-type]
SPARSE = MoEConfig(**SMALL, vocab_size=8, max_seq_len=8, num_experts=2, expert_intermediate_size=4)  # type: ignore[arg-type]
BYTES = LlamaConfig(**SMALL, max_seq_len=8)  # type: ignore[arg-type]
TOKENS = torch.zeros(2, 4, dtype=torch.long)

RETURNED = "calls return it; nobody makes one by hand"
PLUGGED = "an interface that platforms implement; callers get one from get_platform"
EXCEPTION = "an exception, which takes any text"
FORWARD = "models call it in every step, and torch says what it cannot compute with"
NO_EFFECT = "without effect"
ASKED = "what plans, steps and prices ask of a run that is checked"
LEFT_OUT = {
    **dict.fromkeys(("HyperParallelError", "InvalidState", "InvalidType", "InvalidValue"), EXCEPTION),
    "CheckpointError": EXCEPTION,
    "LeaseLostError": EXCEPTION,
    **dict.fromkeys(("device_types", "machine_names"), "takes no arguments"),
    **dict.fromkeys(
        ("Machine", "Load", "load_seconds", "machine_of_device", "changed_text", "checked_value"),
        "data that is read, without communication",
    ),
    "PlatformUnavailableError": EXCEPTION,
    "SkipDTensorDispatch": "without effect, and its argument is what `with ... as` returns",
    **dict.fromkeys(
        ("CheckpointMetadata", "Saved", "PendingRedistribute", "Plan", "Step", "AttentionTraffic"), RETURNED
    ),
    **dict.fromkeys(("Routing", "StageSlice", "ScheduleKind", "MemoryStats", "Reductions"), RETURNED),
    **dict.fromkeys(
        (
            *("draw_mesh", "draw_parts", "draw_plan", "draw_receipt", "draw_svg", "draw_transfers"),
            *("plan_view", "shape_words"),
        ),
        "draw what a plan holds, and are given nothing else",
    ),
    **dict.fromkeys(("Event", "Stream", "Platform", "AttentionKernel"), PLUGGED),
    **dict.fromkeys(("Llama.forward", "MoELlama.forward", "Router.forward", "GroupedExperts.forward"), FORWARD),
    "GroupedExperts.send": FORWARD,
    **dict.fromkeys(("Layout.from_entries", "Layout.of_spec"), "for verbs, which have checked what they pass on"),
    **dict.fromkeys(("Llama.build_block", "MoELlama.build_block"), "for models to override; constructors call it"),
    "Trainer": "a rank's side of `train`, which checks the config",
    **dict.fromkeys(("ParallelConfig.check_nodes", "ParallelConfig.placed", "ParallelConfig.split_options"), ASKED),
    **dict.fromkeys(("ParallelConfig.unplaced", "TrainConfig.patience", "Config.cut_into", "Config.seed_of"), ASKED),
    **dict.fromkeys(("HSDPCell", "HSDPModule"), "classes that are mixed in; their methods are called"),
}
"""Names that are not called with wrong arguments; with a class its methods, but for those of what is mixed in."""

TAKEN_ANYWAY = {
    **{("ShardingPlan", each): "shard_module checks a plan, whose entries change until then" for each in (
        "plan", "input_plan", "output_plan", "return_local_tensor", "wrap_inputs", "local_plan",
        "reshard_inputs", "chunks")},
    **{(f"{kind}.{method}", each): NO_EFFECT for kind in ("HSDPCell", "HSDPModule") for method, each in (
        ("set_allocate_memory_from_process_group_for_comm", "enable"),
        ("set_force_sum_reduction_for_comms", "enable"),
        ("set_reduce_scatter_max_input_buffers", "max_input_buffers"),
        ("set_reduce_scatter_max_input_buffers", "recurse"),
        ("set_reduce_scatter_unused_params", "reduce_scatter_unused_params"),
        ("set_reduce_scatter_unused_params", "recurse"),
        ("set_separate_reduce_scatter_group", "enable"),
        ("set_separate_reduce_scatter_group", "recurse"),
        ("set_symm_mem_for_comm", "backend"),
    )},
    ("Layout", "names"): "anything that yields names",
    ("MoEConfig.is_dense", "layer"): "any number, which is compared with a count",
    ("export_huggingface", "max_shard_bytes"): "any number, which is compared with a count",
    **{(name, "stages"): "a module stands for a list of one" for name in ("Pipeline", "clip_grad_norm")},
    **{(f"{kind}.zero_grad", "set_to_none"): "torch's, which goes by its truth" for kind in ("HSDPCell", "HSDPModule")},
}  # fmt: skip
"""Parameters of which values of another kind than their annotation's are taken, and why."""


def public() -> Iterator[tuple[str, Any]]:
    """Yield what users import and can call, by name, and the methods of classes as "Class.method"."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [page.read_text() for page in pages if page.parent.name != "design"]  # those show what lies inside
    modules = {found for text in texts for found in re.findall(r"(?:from|import) (hyper_parallel(?:\.\w+)*)", text)}
    found: dict[str, Any] = {}
    for module in map(importlib.import_module, sorted(modules)):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", [each for each in own if not each.startswith("_")]):
            value = getattr(module, name)
            is_ours = str(getattr(value, "__module__", "")).split(".")[0] == "hyper_parallel"
            if callable(value) and is_ours and value is not DataParallelMeshDims:  # ours on torch 2.11, torch's later
                assert found.setdefault(name, value) is value, f"two things are called {name}"
    for name, value in found.items():
        yield name, value
        for method in (
            dir(value) if inspect.isclass(value) and (name not in LEFT_OUT or name.startswith("HSDP")) else ()
        ):
            function = getattr(value, method)
            is_ours = str(getattr(function, "__module__", "")).startswith("hyper_parallel.")
            if not method.startswith("_") and callable(function) and is_ours and arguments(function):
                yield f"{name}.{method}", function


def arguments(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters that a caller gives."""
    found = dict(inspect.signature(function).parameters)
    found.pop("self", None)
    return found


class Here:
    """What a rank has in hand; each thing is made when it is asked for, and anew where calls change it."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        self.layout = hp.Layout.from_device_mesh(self.mesh)
        self.split = self.layout("tp", "None")
        self.whole = torch.arange(16.0).view(4, 4)
        self.free = hp.Layout((2,), ("tp",))
        self.made = 0

    def on(self, name: str) -> Any:
        """A mesh of both ranks with one axis."""
        return init_device_mesh("cpu", (2,), mesh_dim_names=(name,))

    def x(self, layout: Any = None) -> Any:
        return hp.distribute_tensor(self.whole, layout or self.split, src_data_rank=None)

    def unit(self) -> Any:
        return hp.fully_shard(nn.Linear(4, 4), mesh=self.mesh)

    def cell(self) -> Any:
        return hp.hsdp(nn.Linear(4, 4))

    def free_folder(self) -> Path:
        self.made += 1
        return self.folder / f"folder-{self.made}"

    def saved(self) -> Path:
        path = self.folder / "saved"
        save_checkpoint(path, {"w": self.whole}, replace=True)
        return path

    def hugging(self) -> Path:
        path = self.free_folder()
        export_huggingface(Llama.build(DENSE).state_dict(), DENSE, path)
        return path

    def checkpointer(self) -> Checkpointer:
        return Checkpointer(self.free_folder())

    def saved_once(self) -> Checkpointer:
        checkpointer = self.checkpointer()
        checkpointer.save(1, {"w": self.whole})
        return checkpointer

    def optimizer(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 4)
        return model, torch.optim.AdamW(model.parameters())

    def pipeline(self) -> Pipeline:
        stage = Llama.build(DENSE).keep([self.rank], embed=self.rank == 0, head=self.rank == 1)
        return Pipeline([stage], self.mesh, micro_batches=2, loss_fn=lambda output, target: output.mean())

    def tied(self) -> Any:
        config = LlamaConfig(**SMALL, vocab_size=8, max_seq_len=8, tie_embeddings=True)  # type: ignore[arg-type]
        stage = Llama.build(config).keep([self.rank], embed=self.rank == 0, head=self.rank == 1)
        return Pipeline([stage], self.mesh, micro_batches=2, loss_fn=lambda output, target: output.mean())

    def provider(self) -> Any:
        def provider(device_type: str | None) -> None:
            return None

        hp.platform.register_provider(provider)
        return provider

    def config_file(self) -> Path:
        path = self.free_folder().with_suffix(".toml")
        path.write_text(config_text(self.run()))
        return path

    def run(self) -> Config:
        return Config(train=TrainConfig(steps=1, batch_size=2, seq_len=8, eval_sequences=2, device="cpu"), model=BYTES)

    def huggingface_model(self) -> Any:
        import transformers

        sizes = {**SMALL, "num_key_value_heads": 2, "vocab_size": 8}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def qkv() -> dict[str, torch.Tensor]:
    return {name: torch.ones(1, 2, 2, 4) for name in "qkv"}


def of_optimizer(g: Here) -> dict[str, Any]:
    model, optimizer = g.optimizer()
    return {"model_parts": model, "optimizer": optimizer}


def _scalars(g: Here) -> dict[str, Any]:
    optimizer = g.optimizer()[1]
    return {"optimizer": optimizer, "groups": [{"lr": 0.1}]}


def dims() -> Any:
    return hp.ParallelDims(tp=2, world_size=2)


def built() -> Any:
    found = dims()
    found.build_mesh("cpu")
    return found


class Comm:
    """What can stand in for a collective of units."""

    def allocate(self, *args: Any) -> None: ...

    def __call__(self, *args: Any) -> None: ...


def of_units() -> dict[str, Callable[[Here], Any]]:
    """The methods of wrapped modules; flags are True unless they are named here."""
    given = {
        "load_state_dict": lambda g, unit: {"state_dict": unit.state_dict()},
        "set_all_reduce_hook": lambda g, unit: {"hook": lambda x: None},
        "set_custom_all_gather": lambda g, unit: {"comm": Comm()},
        "set_custom_reduce_scatter": lambda g, unit: {"comm": Comm()},
        "set_backward_prefetch_cells": lambda g, unit: {"hsdp_cell_list": [unit]},
        "set_forward_prefetch_cells": lambda g, unit: {"hsdp_cell_list": [unit]},
        "set_modules_to_backward_prefetch": lambda g, unit: {"modules": [unit]},
        "set_modules_to_forward_prefetch": lambda g, unit: {"modules": [unit]},
        "set_gradient_divide_factor": lambda g, unit: {"factor": 2.0},
        "set_gradient_scaling_factor": lambda g, unit: {"factor": 2.0},
        "set_reduce_scatter_divide_factor": lambda g, unit: {"factor": 2.0},
        "set_reduce_op_type": lambda g, unit: {"reduce_op_type": "avg"},
        "set_reduce_scatter_max_input_buffers": lambda g, unit: {"max_input_buffers": 1},
        "set_post_optim_event": lambda g, unit: {"event": None},
        "set_requires_gradient_sync": lambda g, unit: {"requires_gradient_sync": True},
        "unshard": lambda g, unit: {},
        "zero_grad": lambda g, unit: {},
    }

    def right(kind: str, method: str, function: Any) -> Callable[[Here], Any]:
        flags = [name for name, p in arguments(function).items() if p.default is p.empty]

        def make(g: Here) -> Any:
            unit = g.cell() if kind == "HSDPCell" else g.unit()
            return unit, given.get(method, lambda *_: dict.fromkeys(flags, True))(g, unit)

        return make

    return {
        name: right(*name.split("."), function)
        for name, function in public()
        if name.startswith(("HSDPCell.", "HSDPModule.")) and name not in LEFT_OUT
    }


# name -> keywords of a right call; "Class.method" -> the object and the keywords of a right call
RIGHT: dict[str, Callable[[Here], Any]] = {
    # the root
    "ParallelDims": lambda g: {"world_size": 1},
    "ParallelDims.build_mesh": lambda g: (dims(), {"device_type": "cpu"}),
    "ParallelDims.data_mesh": lambda g: (built(), {}),
    "ParallelDims.from_config": lambda g: (hp.ParallelDims, {"parallel_cfg": {"tp": 2}, "world_size": 2}),
    "ParallelDims.get_mesh": lambda g: (built(), {"name": "tp"}),
    "ParallelDims.mesh_over": lambda g: (built(), {"axes": "tp"}),
    "ParallelDims.validate_against_model": lambda g: (dims(), {"model": Llama(DENSE), "seq_len": 8}),
    "flatten_axes": lambda g: {"mesh": g.mesh, "names": ("tp",), "name": "all"},
    "Layout": lambda g: {"shape": (2,), "names": ("tp",), "rank_list": (0, 1)},
    "Layout.from_device_mesh": lambda g: (hp.Layout, {"mesh": g.mesh}),
    "Layout.from_dict": lambda g: (hp.Layout, {"data": g.free("tp").to_dict()}),
    "Layout.local_shape": lambda g: (g.split, {"global_shape": (4, 4), "rank": 0}),
    "Layout.local_slice": lambda g: (g.split, {"global_shape": (4, 4), "rank": 0}),
    "Layout.of": lambda g: (hp.Layout, {"x": g.x()}),
    "Layout.placement_to_tensor_map": lambda g: (g.split, {"ndim": 2}),
    "Layout.slices": lambda g: (g.split, {"global_shape": (4, 4)}),
    "Layout.splits": lambda g: (g.split, {"ndim": 2}),
    "Layout.with_mesh": lambda g: (g.free("tp"), {"mesh": g.mesh}),
    "show": lambda g: {"x": g.split, "shape": (4, 4)},
    "distribute_tensor": lambda g: {"tensor": g.whole, "layout": g.split},
    "from_local": lambda g: {"local": g.whole, "layout": g.split},
    "full_tensor": lambda g: {"x": g.x()},
    "redistribute": lambda g: {"x": g.x(), "layout": g.layout()},
    "to_local": lambda g: {"x": g.x()},
    "ShardingPlan": lambda g: {"plan": {"weight": ("tp", "None")}},
    "custom_shard": lambda g: {
        "fn": lambda x: x,
        "device_mesh": g.mesh,
        "in_layouts": ("tp", "None"),
        "out_layouts": ("tp", "None"),
    },
    "init_parameters": lambda g: {"model": nn.Linear(4, 4), "seed": 1},
    "parallelize_value_and_grad": lambda g: {"fn": lambda x: x.sum(), "weights": torch.ones(2, requires_grad=True)},
    "shard_module": lambda g: {
        "model": nn.Linear(4, 4),
        "device_mesh": g.mesh,
        "sharding_plan": hp.ShardingPlan(plan={"weight": ("tp", "None"), "bias": ("tp",)}),
    },
    "vocab_parallel_cross_entropy": lambda g: {
        "logits": g.x(g.layout("None", "tp")),
        "targets": torch.zeros(4, dtype=torch.long),
    },
    "CPUOffloadPolicy": lambda g: {},
    "OffloadPolicy": lambda g: {},
    "MixedPrecisionPolicy": lambda g: {"param_dtype": torch.bfloat16},
    "Muon": lambda g: {"params": nn.Linear(4, 4, bias=False).parameters()},
    "Muon.add_param_group": lambda g: (
        hp.Muon([nn.Parameter(torch.ones(2, 2))]),
        {"param_group": {"params": [nn.Parameter(torch.ones(2, 2))]}},
    ),
    "Muon.zero_grad": lambda g: (hp.Muon([nn.Parameter(torch.ones(2, 2))]), {}),
    "Muon.step": lambda g: (hp.Muon([nn.Parameter(torch.ones(2, 2))]), {}),
    "clip_grad_norm_": lambda g: {"parameters": nn.Linear(4, 4), "max_norm": 1.0},
    "fully_shard": lambda g: {"module": nn.Linear(4, 4), "mesh": g.mesh},
    "get_model_state_dict": lambda g: {"model": g.unit()},
    "hsdp_sync_stream": lambda g: {},
    "hsdp": lambda g: {"cell": nn.Linear(4, 4)},
    "register_forward_method": lambda g: {"module": g.unit(), "name": "extra_repr"},
    "register_fsdp_forward_method": lambda g: {"module": g.unit(), "method_name": "extra_repr"},
    "Owner": lambda g: {"rank": 1},
    "share_comm_ctx": lambda g: {"modules": [g.unit(), g.unit()]},
    "whole_parameters": lambda g: {"module": nn.Linear(4, 4), "ranks": 2},
    "get_platform": lambda g: {"device_type": "cpu"},
    # checkpoints
    "Checkpointer": lambda g: {"root": g.free_folder()},
    "Checkpointer.at": lambda g: (g.saved_once(), {"step": 1}),
    "Checkpointer.load": lambda g: (g.checkpointer(), {"tensors": {"w": g.whole}, "path": g.saved()}),
    "Checkpointer.save": lambda g: (g.checkpointer(), {"step": 1, "tensors": {"w": g.whole}}),
    "load_checkpoint": lambda g: {"folder": g.saved(), "tensors": {"w": g.whole}},
    "save_checkpoint": lambda g: {"folder": g.free_folder(), "tensors": {"w": g.whole}},
    "read_metadata": lambda g: {"folder": g.saved()},
    "load_optimizer_scalars": _scalars,
    "model_tensors": lambda g: {"model_parts": nn.Linear(4, 4)},
    "optimizer_targets": lambda g: {**of_optimizer(g), "metadata": read_metadata(g.saved())},
    "optimizer_tensors": of_optimizer,
    # contexts
    "ContextParallel": lambda g: {"mesh": g.mesh},
    "ContextParallel.attend": lambda g: (ContextParallel(g.mesh), qkv()),
    "ContextParallel.flex_attention": lambda g: (ContextParallel(g.mesh), qkv()),
    "ContextParallel.positions": lambda g: (ContextParallel(g.mesh), {"seq_local": 4}),
    "ContextParallel.split": lambda g: (ContextParallel(g.mesh), {"x": torch.ones(1, 8)}),
    "SequenceSplit": lambda g: {"ring": 2},
    "SequenceSplit.intervals": lambda g: (SequenceSplit(2), {"rank": 0, "seq": 8}),
    "SequenceSplit.part": lambda g: (SequenceSplit(2), {"ring_rank": 0, "seq": 8}),
    "SequenceSplit.place": lambda g: (SequenceSplit(2), {"rank": 0}),
    "SequenceSplit.visible": lambda g: (
        SequenceSplit(2),
        {"query_rank": 0, "key_rank": 1, "length": 4, "causal": True},
    ),
    "attention_traffic": lambda g: {"split": SequenceSplit(2), "seq": 8, "heads": 2, "kv_heads": 2, "head_dim": 4},
    "context_parallel": lambda g: {"model": Llama.build(DENSE), "mesh": g.on("cp")},
    # activations
    "attention_operators": lambda g: {},
    "checkpoint_blocks": lambda g: {"model": nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))},
    # experts
    "GroupedExperts": lambda g: {"num_experts": 2, "hidden_size": 4, "inner_size": 4},
    "Router": lambda g: {"num_experts": 2, "hidden_size": 4, "experts_per_token": 1},
    "expert_parallel": lambda g: {"model": MoELlama.build(SPARSE), "mesh": g.on("ep")},
    "set_aux_scale": lambda g: {"model": MoELlama.build(SPARSE), "scale": 1.0},
    "take_aux": lambda g: {"model": MoELlama.build(SPARSE)},
    "update_expert_bias": lambda g: {"model": MoELlama.build(SPARSE)},
    # pipelines
    "Pipeline": lambda g: {
        "stages": [nn.Linear(4, 4)],
        "mesh": g.mesh,
        "micro_batches": 2,
        "loss_fn": lambda output, target: output.sum(),
    },
    "Pipeline.eval": lambda g: (g.pipeline(), {"inputs": TOKENS, "targets": TOKENS}),
    "Pipeline.step": lambda g: (g.pipeline(), {"inputs": TOKENS, "targets": TOKENS}),
    "TiedWeights": lambda g: {"pipeline": g.tied()},
    "clip_grad_norm": lambda g: {"stages": [nn.Linear(4, 4)], "max_norm": 1.0, "stage_group": None},
    "find_schedule": lambda g: {"name": "1f1b"},
    "rank_of_stage": lambda g: {"schedule": "1f1b", "stage": 0, "ranks": 2},
    "split_layers": lambda g: {"num_layers": 4, "stages": 2},
    "stage_slices": lambda g: {"num_layers": 4, "schedule": "1f1b", "rank": 0, "ranks": 2},
    "stages_of_rank": lambda g: {"schedule": "1f1b", "rank": 0, "ranks": 2},
    # redistribution
    "execute": lambda g: {"plan": plan(g.split, g.layout(), (4, 4), torch.float32), "local": torch.ones(2, 4)},
    "lower_bound": lambda g: {"src": g.split, "dst": g.layout(), "global_shape": (4, 4), "dtype": torch.float32},
    "plan": lambda g: {"src": g.split, "dst": g.layout(), "global_shape": (4, 4), "dtype": torch.float32},
    "torch_plan": lambda g: {"src": g.split, "dst": g.layout(), "global_shape": (4, 4), "dtype": torch.float32},
    # models
    "Llama": lambda g: {"config": DENSE},
    "Llama.build": lambda g: (Llama, {"config": DENSE}),
    "Llama.init_weights": lambda g: (Llama(DENSE), {"seed": 0}),
    "Llama.keep": lambda g: (Llama(DENSE), {"layers": range(1), "embed": True, "head": False}),
    "LlamaConfig": lambda g: {},
    "MoEConfig": lambda g: {},
    "MoEConfig.is_dense": lambda g: (SPARSE, {"layer": 0}),
    "MoELlama": lambda g: {"config": SPARSE},
    "MoELlama.build": lambda g: (MoELlama, {"config": SPARSE}),
    "MoELlama.init_weights": lambda g: (MoELlama(SPARSE), {"seed": 0}),
    "MoELlama.keep": lambda g: (MoELlama(SPARSE), {"layers": range(1), "embed": True, "head": False}),
    "export_huggingface": lambda g: {
        "state": Llama.build(DENSE).state_dict(),
        "config": DENSE,
        "folder": g.free_folder(),
    },
    "huggingface_plan": lambda g: {"model": g.huggingface_model(), "mesh": g.mesh},
    "parallelize_huggingface": lambda g: {"model": g.huggingface_model(), "mesh": g.mesh},
    "import_huggingface": lambda g: {"folder": g.hugging()},
    "load_huggingface": lambda g: {"state": Llama.build(DENSE).state_dict(), "folder": g.hugging()},
    "llama_loss": lambda g: {"logits": torch.ones(2, 4, 8), "targets": TOKENS},
    "llama_plan": lambda g: {"model": DENSE, "mesh": g.mesh},
    "moe_plan": lambda g: {"model": SPARSE, "mesh": g.mesh},
    "find_machine": lambda g: {"hardware": "h100-sxm"},
    "parallelize_moe": lambda g: {"model": MoELlama.build(SPARSE), "mesh": g.mesh},
    # devices
    "reductions_of": lambda g: {"backend": "gloo"},
    "register_platform": lambda g: {
        "device_type": f"device-{g.rank}-{g.free_folder().name}",
        "factory": hp.get_platform,
    },
    "register_provider": lambda g: {"provider": lambda device_type: None},
    "unregister_provider": lambda g: {"provider": g.provider()},
    # training
    "train": lambda g: {"config": g.run()},
    "RecordLoader": lambda g: {"records": [], "config": g.run()},
    "RecordLoader.load_state_dict": lambda g: (
        RecordLoader([], g.run()),
        {"state": RecordLoader([], g.run()).state_dict()},
    ),
    "Config": lambda g: {},
    "load_config": lambda g: {"path": g.config_file()},
    "config_text": lambda g: {"config": g.run()},
    "Config.check_batch": lambda g: (g.run(), {"dp_size": 2}),
    "Config.with_shape": lambda g: (g.run(), {"shape": LlamaConfig()}),
    "Config.with_changes": lambda g: (g.run(), {"section": "train", "changes": {"steps": 2}}),
    **dict.fromkeys(
        ("DataConfig", "OptimizerConfig", "TrainConfig", "ParallelConfig", "PrecisionConfig", "CheckpointConfig"),
        lambda g: {},
    ),
    "PrecisionConfig.dtype": lambda g: (PrecisionConfig(), {"of": "moments"}),
    "PrecisionConfig.stored": lambda g: (PrecisionConfig(), {"param": nn.Parameter(torch.ones(2))}),
    # the methods of what fully_shard and hsdp return
    **of_units(),
}
