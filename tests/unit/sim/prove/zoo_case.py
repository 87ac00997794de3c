"""A case of the zoo of broken parallel models: one fault, where it must be found, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from zoo_kit import Net, rows, tokens

import sim


@dataclass(frozen=True)
class Case:
    """A model that is made parallel in a way that has one fault; `broken=False` takes out that one.

    Args:
        name: the fault.
        apply: called with the model, the mesh and `broken`, makes the model parallel.
        kind, module, tensor: of the first row that is wrong.
        words: what must stand in its sentence.
        hint: what must stand in its suggestion.
        model: makes the whole model.
        inputs: whole inputs.
        mesh: the axes.
        options: of `verify_plan`.
        varied: called with `broken`, returns more of them.
        on: what alone makes the model parallel where it is not broken; other cases may have the same.
    """

    name: str
    apply: Callable[..., Any]
    kind: str
    module: str
    tensor: str
    words: tuple[str, ...]
    hint: str = ""
    model: Callable[[], nn.Module] = Net
    inputs: tuple[Any, ...] = field(default_factory=lambda: (tokens(),))
    mesh: str = "tp=2"
    options: dict[str, Any] = field(default_factory=dict)
    varied: Callable[[bool], dict[str, Any]] = lambda broken: {}
    on: Any = None

    @property
    def program(self) -> Any:
        """What tells programs apart that are not broken."""
        options = {**self.options, **self.varied(False)}
        return (
            (self.on, self.model, self.mesh, *((key, id(value)) for key, value in options.items()))
            if self.on
            else self.name
        )

    def verify(self, broken: bool) -> sim.Report:
        """Prove the model, with its fault or without."""
        options = {"optimizer_fn": None, **self.options, **self.varied(broken)}

        def parallelize(model, mesh):
            return self.apply(model, mesh, broken)

        return sim.verify_plan(self.model, self.inputs, self.mesh, parallelize=parallelize, **options)


def found(kind: str, module: str, tensor: str, *words: str, hint: str = "") -> Callable[..., Any]:
    """Return a decorator that notes which row is the first that is wrong, and what it says, if `says` does not."""

    def note(apply: Callable[..., Any]) -> Callable[..., Any]:
        says(*words, hint=hint)(apply) if words else None
        apply.row |= {"kind": kind, "module": module, "tensor": tensor}
        return apply

    return note


def says(*words: str, hint: str = "") -> Callable[..., Any]:
    """Return a decorator that notes what the first row that is wrong says."""

    def note(apply: Callable[..., Any]) -> Callable[..., Any]:
        apply.row = {"words": words, "hint": hint}
        return apply

    return note


def register(cases: list[Case]) -> Callable[..., Any]:
    """Return a decorator that makes a case of a function that `found` has decorated, and adds it to a list.

    `on`: makes the model parallel, and rightly; the function is then the fault alone.
    """

    def case(name: str, on: Any = None, **options: Any) -> Callable[..., Any]:
        def add(apply: Callable[..., Any]) -> Callable[..., Any]:
            def on_top(model: nn.Module, mesh: Any, broken: bool) -> None:
                on(model, mesh)
                if broken:
                    apply(model, mesh)

            cases.append(Case(name, on_top if on else apply, on=on, **{**apply.row, **options}))
            return apply

        return add

    return case


@dataclass(frozen=True)
class Program:
    """A training step that is right on ranks, and its faults.

    Args:
        step: called with the model, the batch and a fault, "" for none; one device takes it, too.
        model: makes the model of one device.
        batch: of one device; ranks along dp are given their rows.
        faults: for each, kind and place of the first row that is wrong, and what must stand in its sentence.
        parallelize: called with the model, the mesh and the fault.
    """

    step: Callable[..., Any]
    model: Callable[[], nn.Module]
    batch: Any
    faults: dict[str, tuple[str, str, str]]
    parallelize: Callable[..., Any] = lambda model, mesh, fault: None
    steps: int = 2
    mesh: str = "dp=2"

    def verify(self, fault: str = "") -> sim.Report:
        """Prove some steps, with a fault or without."""
        return sim.verify_step(
            partial(self.step, fault=""),
            self.model,
            self.batch,
            self.mesh,
            rank_step=partial(self.step, fault=fault),
            parallelize=lambda model, mesh: self.parallelize(model, mesh, fault),
            shard_batch=rows if "dp" in self.mesh else None,
            optimizer_fn=None,
            steps=self.steps,
        )


def add_program(programs: dict[str, Program], name: str, model: Any, batch: Any, **options: Any) -> Callable[..., Any]:
    """Return a decorator that adds a step and its faults to programs; options that a program lacks are the step's."""

    def add(step: Callable[..., Any]) -> Callable[..., Any]:
        own = {key: options.pop(key) for key in list(options) if key not in Program.__dataclass_fields__}
        faults = {name: row for name, row, of in getattr(step, "faults", ()) if of is None or of in own.values()}
        programs[name] = Program(partial(step, **own), model, batch, **{"faults": faults, **options})
        return step

    return add


def fault(name: str, kind: str, place: str, words: str = "", of: Any = None) -> Callable[..., Any]:
    """Return a decorator that notes a fault of a step; `of`: only where the step has that option."""

    def note(step: Callable[..., Any]) -> Callable[..., Any]:
        step.faults = [(name, (kind, place, words), of), *getattr(step, "faults", ())]
        return step

    return note
