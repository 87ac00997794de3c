"""Models that can be estimated: the interface `ModelSpec`, and `Custom`, which wraps any `nn.Module`."""

from __future__ import annotations

import logging
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import resolve_name
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from hyper_parallel.core.common.errors import InvalidType, InvalidValue, class_name
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.shard.api import shard_module
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.models.plans import MeshLike, llama_loss
from sim.ops import tensors_of

if TYPE_CHECKING:
    from sim.mesh.recipe import Recipe


# The interface of a model to an estimate ------------------------------------------------------------------------------


class ModelSpec(ABC):
    """A model by its sizes, with methods to build and shard it; `config` names its sizes as Llama's config does."""

    name: str
    config: Any

    @property
    @abstractmethod
    def family(self) -> str:
        """`llama`, `moe`, `gpt` or `custom`."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return int(self.config.num_parameters())

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token uses; all, unless a subclass knows better."""
        return self.num_parameters

    @property
    def num_layers(self) -> int:
        """Number of blocks of the whole model; 0: the model is one unit."""
        return int(self.config.num_hidden_layers)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of each block, e.g. `("dense", "experts")`; blocks of one kind run the same operations."""
        return ("dense",) * self.num_layers

    @property
    def vocab_size(self) -> int | None:
        """Number of different tokens; None: the model has no vocabulary."""
        return getattr(self.config, "vocab_size", None)

    @property
    def hidden_size(self) -> int | None:
        """Width of the hidden states between blocks; None: unknown before a run."""
        return getattr(self.config, "hidden_size", None)

    @property
    def has_stages(self) -> bool:
        """Return True if a subset of the layers can be built, as pipeline stages need."""
        return True

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward per token, no recompute, attention in full."""

    @abstractmethod
    def build(
        self, seq_len: int, layers: Collection[int] | None = None, *, embed: bool = True, head: bool = True
    ) -> nn.Module:
        """Build the model, or a stage of it, under the device and modes that the caller has set, e.g. meta.

        Args:
            seq_len: tokens of a sequence, summed over all ranks.
            layers: indices of the layers to keep, as in the whole model; None: all.
            embed: keep the modules before the layers.
            head: keep the modules after the layers.
        """

    def plan(self, module: nn.Module, mesh: MeshLike, recipe: Recipe | None = None) -> ShardingPlan | None:
        """Return the layouts of a module made by `build`, on a mesh with an axis tp; None: it has none."""
        return None

    def split(self, module: nn.Module, dims: ParallelDims, recipe: Recipe) -> None:
        """Shard a module made by `build` over the ranks of its built mesh, in place."""
        if dims.tp_enabled and (plan := self.plan(module, mesh := dims.get_mesh("tp"), recipe)) is not None:
            shard_module(module, mesh, plan)

    def blocks(self, module: nn.Module) -> list[tuple[int, nn.Module]]:
        """Return the blocks of a module made by `build`, with their indices in the whole model."""
        return [(int(name), block) for name, block in module.get_submodule("layers").named_children()]

    def naming(self) -> AbstractContextManager[None]:
        """Name the failing module in errors from reads of values, which fake tensors do not have."""
        return nullcontext()

    def has_tokens(self, seq_len: int) -> bool:
        """Return True if a sample is a sequence of tokens, i.e. if its size depends on `seq_len`."""
        return True

    def inputs(self, batch: int, seq_len: int) -> tuple[Any, ...]:
        """Make the model's arguments on the device that the caller has set.

        Args:
            batch: number of sequences.
            seq_len: tokens per sequence on this rank.
        """
        return (torch.zeros(batch, seq_len, dtype=torch.long),)

    def call(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Call a module made by `build` on its inputs: positional arguments, or one dict of keywords."""
        return module(**inputs[0]) if isinstance(inputs[0], Mapping) and len(inputs) == 1 else module(*inputs)

    def loss(self, output: Any, inputs: tuple[Any, ...]) -> Tensor:
        """Return the loss of the model's output for these inputs."""
        return llama_loss(output, inputs[0])


# Any `nn.Module` in an estimate ---------------------------------------------------------------------------------------

_ASKED = "cannot estimate the model"
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@dataclass(frozen=True)
class Custom:
    """A user's own module: functions that build it, make its inputs and compute its loss.

    >>> mlp = Custom(lambda: nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), lambda b, s: torch.zeros(b, s, 8))

        config = transformers.LlamaConfig(num_hidden_layers=2)
        ids = functools.partial(torch.zeros, dtype=torch.long)
        Custom(lambda: LlamaForCausalLM(config), lambda b, s: {"input_ids": ids(b, s), "labels": ids(b, s)})

    The module takes no memory, because it is built and run on torch's fake tensors. Sizes must not depend on values.

    Args:
        module: builds the model.
        inputs: function of (batch, seq_len) that returns the model's arguments: a tensor, a tuple, or a dict of
            keywords. The two sizes define a sequence; ignore seq_len if the model has no sequences.
        loss: function of the output and the inputs that returns the loss. None: `loss` of the output; else the
            cross-entropy of its `logits` with as many classes; else the mean square.
        plan: layouts for tensor parallelism, or a function of the module and the mesh that returns them; None: no
            layouts, so tp must be 1.
        blocks: path of the `nn.ModuleList` or `nn.Sequential` whose items are sharded and checkpointed one by one.
            None: the longest `nn.ModuleList`, or the whole model as one unit if it has no list.
        name: shown in tables.
        optimizer: builds the optimizer of the trainable weights; None: the trainer's.
    """

    module: Callable[[], nn.Module]
    inputs: Callable[[int, int], Any]
    loss: Callable[[Any, Any], Tensor] | None = None
    plan: ShardingPlan | Callable[[nn.Module, MeshLike], ShardingPlan] | None = None
    blocks: str | None = None
    name: str = "custom"
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.module, nn.Module):
            blame = "module is a model that is made already, and takes memory"
            raise InvalidType(_ASKED, blame, f"module: {type(self.module)!r}", "module=lambda: MyModel(config)")


@dataclass(frozen=True)
class CustomSpec(ModelSpec):
    """The `ModelSpec` of a `Custom`."""

    config: Custom

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name in tables."""
        return self.config.name

    @property
    def family(self) -> str:
        """Always `custom`."""
        return "custom"

    @cached_property
    def _shape(self) -> tuple[int, tuple[str, ...], bool]:
        """Number of parameters, kinds of blocks, and True if the module has a method `keep`."""
        with FakeTensorMode():
            module = self._made()
            kinds: dict[Any, str] = {}
            names = []
            for _, block in self.blocks(module):
                sizes = tuple((name, tuple(param.shape)) for name, param in block.named_parameters())
                key = (type(block), sizes, str(block))
                names.append(kinds.setdefault(key, f"{type(block).__name__}{len(kinds) or ''}"))
            total = sum(param.numel() for param in module.parameters())
            return total, tuple(names), callable(getattr(module, "keep", None))

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return self._shape[0]

    @property
    def num_layers(self) -> int:
        """Number of blocks of the whole model; 0: the model is one unit."""
        return len(self._shape[1])

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of each block, e.g. `("Block", "MoEBlock1")`: blocks of a kind have equal reprs and parameters."""
        return self._shape[1]

    @property
    def has_stages(self) -> bool:
        """Return True if the module has a method `keep`, as `hyper_parallel.models.Llama` has."""
        return self._shape[2]

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward of a sequence over its tokens, by torch's FlopCounterMode."""
        try:
            with _quiet():
                return self._count_flops(seq_len)
        except ValueError:  # retry in bf16, since torch's grouped products need it; FFTs refuse it, so fp32 is first
            with suppress(ValueError):
                return self._count_flops(seq_len, torch.bfloat16)
            raise

    def _count_flops(self, seq_len: int, dtype: torch.dtype | None = None) -> float:
        counter = FlopCounterMode(display=False, custom_mapping=dict(_FLOPS))
        with FakeTensorMode():
            module, inputs = self._made(dtype), self.inputs(1, seq_len)
            if dtype is not None:
                inputs = tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, inputs)
            with self.naming(), counter:
                self.loss(self.call(module, inputs), inputs).backward()
        return counter.get_total_flops() / seq_len

    def build(
        self, seq_len: int, layers: Collection[int] | None = None, *, embed: bool = True, head: bool = True
    ) -> nn.Module:
        """Build the model, or a stage of it if the module has a method `keep`.

        Raises:
            ValueError: a stage of a module without `keep`.
        """
        module = self._made()
        if layers is None or (embed and head and set(layers) == set(range(self.num_layers))):
            return module
        keep = getattr(module, "keep", None)
        if not callable(keep):
            seen = f"{class_name(module)} with {self.num_layers} blocks, of which {len(layers)} are asked for"
            blame = f"a pipeline cuts it into stages, and {class_name(module)} has no method keep"
            hint = "pp=1, or a method keep(layers, *, embed: bool, head: bool) that drops the others in place"
            raise InvalidValue(_ASKED, blame, seen, hint)
        kept: nn.Module = keep(layers, embed=embed, head=head)
        return kept

    def naming(self) -> AbstractContextManager[None]:
        """Name the failing module in errors from reads of values."""
        return naming_modules()

    def _made(self, dtype: torch.dtype | None = None) -> nn.Module:
        # Build on meta and make tensors fake afterwards: nn.TransformerEncoder deep-copies its layers, and a deep copy
        # of a fake tensor would belong to a copy of the mode.
        with unset_fake_temporarily() as mode:
            try:
                with torch.device("meta"):
                    module: object = self.config.module()
            except RuntimeError as error:
                blame = "module() does not run on the meta device, on which tensors have no values"
                hint = "numbers from Python or numpy in place of values of tensors, as in [0.1 * i for i in range(n)]"
                raise InvalidValue(_ASKED, blame, f"{type(error).__name__}: {error}", hint) from error
            except Exception as error:
                raise _raised("module()", error) from error
            if not isinstance(module, nn.Module):
                blame = f"module() has returned a {type(module).__name__}, not an nn.Module"
                raise InvalidType(_ASKED, blame, f"module(): {type(module)!r}", "module=lambda: MyModel(config)")
            module = module if dtype is None else module.to(dtype)
            if isinstance(mode, FakeTensorMode):
                _make_fake(module, mode)
        return module.train()

    def plan(self, module: nn.Module, mesh: MeshLike, recipe: Recipe | None = None) -> ShardingPlan:
        """Return the layouts of the module.

        Raises:
            ValueError: the `Custom` has no plan.
        """
        plan = self.config.plan
        if plan is None:
            blame = "tensor parallelism splits its modules, and it has no plan that says how"
            seen = f"model: {self.name}   plan: None"
            hint = "Custom(..., plan=ShardingPlan(...)), see docs/shard_module.md; or tp=1"
            raise InvalidValue(_ASKED, blame, seen, hint)
        return plan if isinstance(plan, ShardingPlan) else plan(module, mesh)

    def blocks_path(self, module: nn.Module) -> str | None:
        """Return the path of the list of blocks, e.g. `model.layers`; None: the module has no list.

        Raises:
            ValueError: the path that was given names no module, or no list.
        """
        asked = self.config.blocks
        if asked is not None:
            found = dict(module.named_modules()).get(asked)
            if not isinstance(found, nn.ModuleList | nn.Sequential):
                lists = [path for path, item in module.named_modules() if isinstance(item, nn.ModuleList)]
                what = "nothing is there" if found is None else f"there is a {type(found).__name__}"
                blame = f"blocks={asked!r} is no nn.ModuleList or nn.Sequential: {what}"
                hint = f"blocks={lists[0]!r}" if lists else "blocks=None"
                raise InvalidValue(_ASKED, blame, f"lists of modules: {', '.join(lists) or 'none'}", hint)
            return asked
        sizes = {path: len(item) for path, item in module.named_modules() if isinstance(item, nn.ModuleList)}
        return max(sizes, key=lambda path: sizes[path], default=None)

    def blocks(self, module: nn.Module) -> list[tuple[int, nn.Module]]:
        """Return the blocks with their indices; an empty list: the model is one unit."""
        path = self.blocks_path(module)
        if path is None:
            return []
        children = module.get_submodule(path).named_children()
        return [(int(name) if name.isdecimal() else index, block) for index, (name, block) in enumerate(children)]

    def has_tokens(self, seq_len: int) -> bool:
        """Return True if the shapes of the inputs depend on `seq_len`."""
        with FakeTensorMode():
            shapes = [[tuple(one.shape) for one in tensors_of(self.inputs(1, n))] for n in (seq_len, 2 * seq_len)]
        return shapes[0] != shapes[1]

    def inputs(self, batch: int, seq_len: int) -> tuple[Any, ...]:
        """Make the model's arguments: a tuple, or one dict of keywords in a tuple."""
        try:
            made = self.config.inputs(batch, seq_len)
        except _DATA_DEPENDENT:
            raise
        except Exception as error:
            raise _raised(f"inputs({batch}, {seq_len})", error) from error
        return made if isinstance(made, tuple) else (made,)

    def loss(self, output: Any, inputs: tuple[Any, ...]) -> Tensor:
        """Return the loss of the model's output for these inputs.

        Raises:
            ValueError: the output has no tensor.
        """
        if self.config.loss is not None:
            only = inputs[0] if len(inputs) == 1 else inputs
            try:
                return self.config.loss(output, only)
            except _DATA_DEPENDENT:
                raise
            except Exception as error:
                raise _raised("loss(output, inputs)", error) from error
        loss, logits = _part(output, "loss"), _part(output, "logits")
        if isinstance(loss, Tensor):
            return loss
        if isinstance(logits, Tensor):
            flat = logits.flatten(0, -2)
            return F.cross_entropy(flat.float(), torch.zeros(len(flat), dtype=torch.long, device=flat.device))
        tensor = next(iter(tensors_of((output,))), None)
        if tensor is None:
            blame = f"it has returned a {type(output).__name__} without a tensor, and loss is None"
            hint = "Custom(..., loss=lambda output, inputs: ...)"
            raise InvalidValue(_ASKED, blame, f"output: {type(output)!r}", hint)
        return tensor.float().square().mean()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of operations that fake tensors refuse, because the error is caught or reported anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _raised(call: str, error: Exception) -> ValueError:
    """Return an error that names the failing function of a `Custom`, and the line that raised."""
    what = call.partition("(")[0]
    last = traceback.extract_tb(error.__traceback__)[-1]
    seen = f"{type(error).__name__}: {error}   in {last.name}, {last.filename}:{last.lineno}"
    return InvalidValue(_ASKED, f"{call} has raised an error", seen, f"the function given as {what}=, by itself")


def _make_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace each tensor of a module by a fake one on the CPU; tied tensors stay tied."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for part in module.modules():
        tensors: list[dict[str, Any]] = [part._parameters, part._buffers]
        for named in tensors:
            named.update({name: fake(tensor) for name, tensor in named.items() if tensor is not None})


def _attention_flops(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    batch, heads, queries, size = q
    return int(2 * batch * heads * queries * k[2] * (size + v[3]))


def _attention_backward_flops(
    grad: Any, q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return 2 * _attention_flops(q, k, v)


def _grouped_flops(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    # The groups split the rows of `a`, the columns of `b`, or the inner dimension, so no FLOP counts twice.
    rows = a[-2:] if len(b) == 2 else a
    return int(2 * math.prod(rows) * b[-1])


_FLOPS = MappingProxyType(  # torch's counter lacks attention on CPUs and grouped products
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
        torch.ops.aten._grouped_mm: _grouped_flops,
    }
)


def _part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


@contextmanager
def naming_modules() -> Iterator[None]:
    """Convert errors in the block to errors that name the failing module and operation.

    Raises:
        ValueError: a module needs a value or a data-dependent size, which a fake tensor lacks, or raises its own
            error, e.g. because torch lacks an operation in a dtype.
    """
    stack: list[nn.Module] = []

    def enter(module: nn.Module, args: Any) -> None:
        stack.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        while stack and stack.pop() is not module:  # drop modules whose error was caught further out
            pass

    handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave))
    try:
        yield
    except _DATA_DEPENDENT as error:
        who = "the code around the model"
        if stack:
            who = module_title(stack[-1], stack[0])
        blame = f"{who} reads values, or makes a tensor whose size depends on values, which only a real run has"
        hint = "sizes from shapes; torch.where(mask, a, b) for a[mask]; no .item(), .tolist(), nonzero"
        raise InvalidValue(_ASKED, blame, f"operation: {getattr(error, 'func', error)}", hint) from error
    except Exception as error:
        modules, operation = failed_in(error)
        if not modules or "\n  try: " in str(error):  # not from a module, or already one of our errors
            raise
        first = str(error).strip().partition("\n")[0]
        blame = f"{module_title(modules[-1], modules[0])} has raised {type(error).__name__}: {first}"
        hint = "the module by itself on the meta device, in the same dtype; param_dtype=fp32 where a dtype is refused"
        raise InvalidValue(_ASKED, blame, f"operation: {operation or _NONE}", hint) from error
    finally:
        for handle in handles:
            handle.remove()


def module_title(module: nn.Module, root: nn.Module) -> str:
    """Return a module's path and class for a message, e.g. `module 'layers.0' (Block)`."""
    path = next((name for name, one in root.named_modules() if one is module), "")
    return f"module {path!r} ({class_name(module)})" if path else class_name(module)


_NONE = "none of torch's"


def failed_in(error: BaseException) -> tuple[list[nn.Module], str]:
    """Return the modules that an error passed through, outermost first, and the torch operation that raised it.

    Modules are read from the traceback's frames. A module whose forward ended early is missing, e.g. a checkpointed
    module that is recomputed.
    """
    modules: list[nn.Module] = []
    operation = ""
    trace = error.__traceback__
    while trace is not None:
        seen = trace.tb_frame.f_locals
        owner, called = seen.get("self"), seen.get("func")
        if isinstance(owner, nn.Module) and trace.tb_frame.f_code.co_name == "_call_impl":
            modules.append(owner)
            operation = ""
        elif isinstance(called, torch._ops.OpOverload):
            operation = str(called)
        elif callable(called) and trace.tb_frame.f_code.co_name == "__torch_function__":
            operation = resolve_name(called) or getattr(called, "__name__", str(called))
        trace = trace.tb_next
    return modules, operation
