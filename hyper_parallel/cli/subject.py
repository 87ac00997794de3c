"""The comparison behind `verify`: a small Llama with the shipped plan, or a model of the user's own."""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from torch import nn

from hyper_parallel.cli.kit import stderr_console
from hyper_parallel.cli.runs import in_words, one_thread
from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.text import NOT_SPLIT, parse_dtype, parse_layout, parse_mesh, parse_shape, write_layout
from hyper_parallel.core.shard.plan_file import load_plan
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.plans import llama_plan

_NOT_IN_A_PLAN = ("pp", "cp", "ep")
"""Degrees of a run that the trainer applies, and no plan does."""


@dataclass(frozen=True)
class Subject:
    """A parallel model, and what it takes to compare it with the same model on one device.

    The fields after `title`, which is a line for people, are arguments of `sim.verify_plan`. Inputs are unsharded, and
    drawn with `seed` like the weights.
    """

    title: str
    model_fn: Callable[[], nn.Module]
    inputs: tuple[Any, ...]
    mesh_shape: Layout
    input_layouts: list[Layout | None] | None
    plan: ShardingPlan | None
    parallelize: Callable[..., Any] | None
    dtype: torch.dtype
    seed: int

    def text(self) -> str:
        """Say what is compared."""
        shown = [
            f"{' x '.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')}"
            + (f" as {write_layout(layout)}" if layout is not None else "")
            for value, layout in zip(self.inputs, self.input_layouts or [None] * len(self.inputs), strict=True)
        ]
        ranks, dtype = math.prod(self.mesh_shape.mesh_shape), str(self.dtype).removeprefix("torch.")
        compared = f"{ranks} simulated ranks on {self.mesh_shape.axes} beside one device, in {dtype} ..."
        return f"{self.title}\ninputs: {'; '.join(shown)}\n{compared}"


def llama_subject(
    mesh: str,
    *,
    seq_len: int | None = None,
    plan_path: Path | None = None,
    tp: str = "tp",
    options: Mapping[str, Any] | None = None,
    input_layouts: Sequence[str] = (),
    dtype: str = "float64",
    seed: int = 0,
) -> Subject:
    """Return a Llama as small as the mesh allows, with its shipped plan, or with one from a file.

    >>> llama_subject("dp=2,tp=4").title.partition(":")[2]
    ' 2 layers, hidden 64, 8 heads (4 key/value), the shipped plan'

    The axis `tp` splits modules, none if that is "None" or "-"; the others split the batch, unless `input_layouts` say
    how. `options` are those of `llama_plan`. A sequence has two tokens for each rank along tp, and at least 8.

    Raises:
        ValueError: what does not exist, does not parse, or does not fit.
    """
    base = parse_mesh(mesh)
    axis = None if tp in NOT_SPLIT else tp
    sizes_of = dict(zip(base.alias_name, base.mesh_shape, strict=True))
    rows = tuple(name for name in base.alias_name if name != axis)
    others = [name for name in rows if name in _NOT_IN_A_PLAN and sizes_of[name] > 1]
    if plan_path is None and others:
        named = ", ".join(others)
        blame = f"no plan of the llama uses {named}: it would split the batch over {named}"
        degrees = " ".join(f"--{name} {sizes_of[name]}" for name in base.alias_name if name in {*_NOT_IN_A_PLAN, "tp"})
        command = f"hyper-parallel verify --devices {math.prod(base.mesh_shape)} {degrees}"
        hint = f"{command}, which proves the run of these degrees"
        raise InvalidValue("cannot verify the llama", blame, f"--mesh {mesh}", hint)
    if seq_len is not None and seq_len < 1:
        raise InvalidValue("cannot build the Llama", "--seq-len is below 1", f"--seq-len {seq_len}", "--seq-len 4")
    degree = sizes_of.get(axis or "", 1)
    heads = 2 * max(2, degree)
    config = LlamaConfig(
        vocab_size=16 * max(8, degree),
        hidden_size=8 * heads,
        intermediate_size=-(-24 * heads // degree) * degree,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_seq_len=seq_len or max(8, 2 * degree),
    )
    shipped = llama_plan(config, base, tp=axis, **(options or {}))
    plan = shipped if plan_path is None else load_plan(plan_path, base)
    batch = 2 * max(2, math.prod(sizes_of[name] for name in rows))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, config.max_seq_len), generator=generator)
    layouts = _layouts(base, input_layouts, (tokens,))
    if layouts is None and "input" not in (plan.input_plan or {}):
        layouts = [base(rows or None, "None")]
    said = f"the plan of {plan_path}" if plan_path is not None else "the shipped plan"
    title = f"Llama, {in_words(config)}, {said}"
    return Subject(title, lambda: Llama.build(config, seed), (tokens,), base, layouts, plan, None, _dtype(dtype), seed)


def own_subject(
    model: str,
    mesh: str,
    inputs: Sequence[str],
    *,
    plan_path: Path | None = None,
    parallelize: str | None = None,
    input_layouts: Sequence[str] = (),
    dtype: str = "float64",
    seed: int = 0,
) -> Subject:
    """Return a model of the user's own, see the options of `verify`: with a plan, or `parallelize` in place of one.

    Raises:
        ValueError: what does not exist, does not parse, or does not fit.
    """
    asked, base = f"cannot verify {model!r}", parse_mesh(mesh)
    build = named_object("--model", model)
    if (plan_path is None) == (parallelize is None):
        blame = f"{'neither' if plan_path is None else 'both'} of --plan and --parallelize given"
        hint = "--plan plan.toml, or --parallelize my_module:function, called with model and mesh"
        raise InvalidValue(asked, blame, f"--model {model}", hint)
    if not inputs:
        hint = "--input 4,16 for floats, --input 4,16:100 for whole numbers below 100; once per argument"
        raise InvalidValue(asked, "no --input says what the model takes", f"--model {model}", hint)
    generator = torch.Generator().manual_seed(seed)
    values = tuple(_input(text, generator) for text in inputs)
    plan = None if plan_path is None else load_plan(plan_path, base)
    chosen = None if parallelize is None else named_object("--parallelize", parallelize)
    title = f"{model}, {f'the plan of {plan_path}' if plan_path is not None else parallelize}"
    layouts = _layouts(base, input_layouts, values)
    return Subject(title, build, values, base, layouts, plan, chosen, _dtype(dtype), seed)


def named_object(option: str, name: str) -> Callable[..., Any]:
    """Import "module:function" or load "file.py:function"; modules in the working folder count, too.

    >>> named_object("--model", "torch.nn:GELU")()  # the option is for messages
    GELU(approximate='none')

    Raises:
        ValueError: no such module or file, nothing of that name in it, something that cannot be called.
    """
    asked, (path, colon, inside) = f"cannot use {option} {name}", name.partition(":")
    if not colon or not path or not inside:
        blame = "it is not of the form module:function" + ("" if option != "--model" else ", and not 'llama'")
        raise InvalidValue(asked, blame, f"{option} {name}", f"{option} my_module:function")
    files = ", ".join(sorted(file.name for file in Path.cwd().glob("*.py"))[:8]) or "none"
    spec = importlib.util.spec_from_file_location(Path(path).stem, path) if path.endswith(".py") else None
    if spec is not None and not Path(path).is_file():
        raise InvalidValue(asked, f"there is no file {path!r}", f"here: {files}", "its path")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        if spec is None or spec.loader is None:
            module = importlib.import_module(path)
        else:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise
        blame = f"there is no module {error.name!r}"
        raise InvalidValue(asked, blame, f"here: {files}", "a module that is there") from None
    finally:
        if added:
            sys.path.remove(here)
    found = getattr(module, inside, None)
    if not callable(found):
        blame = f"{inside!r} cannot be called" if found is not None else f"{path} has no {inside!r}"
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = [key for key in own if callable(getattr(module, key)) and not key.startswith("_")]
        near = nearest(inside, names) if names else "a function that is there"
        hint = near if near.startswith("one of ") or not names else f"{option} {path}:{near[1:-1]}"
        raise InvalidValue(asked, blame, f"functions: {', '.join(names[:8]) or 'none'}", hint)
    return found


def verify_subject(console: Console, subject: Subject, everything: bool, **options: Any) -> bool:
    """Compare the ranks with one device, print the report, see `show_proof`, and return whether all is well.

    `options` are further arguments of `sim.verify_plan`.
    """
    from sim import verify_plan

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs what ranks raise, too
    asked = {field.name: getattr(subject, field.name) for field in fields(subject) if field.name != "title"}
    prove = partial(verify_plan, **asked, **options)
    try:
        return show_proof(console, subject.text(), prove, everything)
    except (ValueError, TypeError):
        raise
    except Exception:  # the model fails on one device, too
        traceback.print_exc()
        return False


def show_proof(console: Console, head: str, prove: Callable[[], Any], everything: bool) -> bool:
    """Print what is proved and the report, with a line for every tensor if asked; return whether all is well."""
    from sim import SimError

    console.print(head)
    console.file.flush()
    start = time.perf_counter()
    try:
        with one_thread():
            report = prove()
    except SimError as error:  # also one that is a ValueError on a rank: the plan is wrong, not what was asked
        # How to replay the ranks in Python is left out.
        said = "\n".join(line for line in str(error).splitlines() if line and not line.startswith("  replay: "))
        stderr_console().print(f"[red]the ranks failed:[/red] {escape(said)}")
        return False
    console.print()
    text = Text()
    for line in report.table(verbose=everything).splitlines(keepends=True):
        wrong = line.rstrip().endswith("  bug") or "does not compute" in line
        text.append(line, style="red" if wrong else "yellow" if line.startswith("note: ") else "")
    console.print(text)
    console.print(f"took {time.perf_counter() - start:.1f} s")
    return report.ok


def _input(text: str, generator: torch.Generator) -> torch.Tensor:
    """Make a random input: numbers, or whole numbers below what stands after a colon."""
    shape, colon, most = text.partition(":")
    if not colon:
        return torch.randn(parse_shape(shape), generator=generator, dtype=torch.float64)
    if not most.strip().isdecimal() or int(most) < 1:
        blame = f"{most.strip()!r} is no whole number from 1 up"
        raise InvalidValue(f"cannot make --input {text}", blame, "form: SHAPE, or SHAPE:N", f"--input {shape}:100")
    return torch.randint(int(most), parse_shape(shape), generator=generator)


def _layouts(base: Layout, texts: Sequence[str], inputs: Sequence[torch.Tensor]) -> list[Layout | None] | None:
    if not texts:
        return None
    if len(texts) > len(inputs):
        blame = f"there are {len(texts)} of them for {len(inputs)} {'input' if len(inputs) == 1 else 'inputs'}"
        hint = 'one for each, in order; "-" for unsharded'
        raise InvalidValue("cannot use --input-layout", blame, f"given: {'; '.join(texts)}", hint)
    read = [None if text.strip() == "-" else parse_layout(base, text) for text in texts]
    return read + [None] * (len(inputs) - len(read))


def _dtype(name: str) -> torch.dtype:
    found = parse_dtype(name)
    if found not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        hint = "float64, in which no fault hides, or float32; bfloat16 and float16, which hide small ones"
        raise InvalidValue("cannot verify", f"models do not compute in {name}", f"--dtype {name}", hint)
    return found
