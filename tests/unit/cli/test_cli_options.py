"""Options of commands against the dataclasses that they are made of."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from hyper_parallel.cli.options import Given, declared, options, with_options
from hyper_parallel.cli.run import RUN_OPTIONS
from hyper_parallel.trainer.config import Config

CONFIG = "hyper_parallel.trainer.config"


@pytest.mark.parametrize("section", ["Train", "Optimizer", "Parallel", "Precision", "Checkpoint", "Data"])
def test_what_the_source_declares_is_what_the_class_has(section: str) -> None:
    name = f"{section}Config"
    found, real = declared(CONFIG, name), getattr(importlib.import_module(CONFIG), name)
    assert list(found) == [field.name for field in dataclasses.fields(real)]
    hints = typing.get_type_hints(real)
    for field in dataclasses.fields(real):
        members = typing.get_args(hints[field.name]) or (hints[field.name],)
        assert found[field.name].kind in (*members, str), field.name
        assert found[field.name].help.endswith("."), field.name


def run(*chosen: str, **called: str) -> tuple[typer.Typer, list[tuple[Given, bool]]]:
    app, seen = typer.Typer(), []
    known = {option.field: option for option in options("train", CONFIG, "TrainConfig", **called)}

    @app.command()
    @with_options(*(known[field] for field in (*chosen, *called)))
    def command(given: Given, plain: Annotated[bool, typer.Option("--plain")] = False) -> None:
        seen.append((given, plain))

    return app, seen


def test_a_command_gets_its_options_by_field() -> None:
    app, seen = run("steps", "stuck_after_s", log="log_file")
    assert CliRunner().invoke(app, ["--log-file", "a", "--plain"]).exit_code == 0
    assert seen == [({"train": {"log": "a"}}, True)]


def test_what_is_optional_is_left_out() -> None:
    app, seen = run("steps", "seed")
    assert CliRunner().invoke(app, ["--seed", "3"]).exit_code == 0
    assert seen == [({"train": {"seed": 3}}, False)]


def test_a_value_of_another_kind_and_an_unknown_option_are_refused() -> None:
    app, _ = run("steps")
    assert CliRunner().invoke(app, ["--steps", "many"]).exit_code == 2
    assert CliRunner().invoke(app, ["--stepz", "1"]).exit_code == 2


def test_a_field_that_is_not_there_is_no_option() -> None:
    with pytest.raises(KeyError, match="stepz"):
        options("train", CONFIG, "TrainConfig", stepz="steps")


def test_every_key_of_a_run_has_an_option_of_its_own() -> None:
    keys = {
        (section.name, key.name)
        for section in dataclasses.fields(Config)
        for key in dataclasses.fields(type(getattr(Config(), section.name)))
    }
    assert keys - {(option.section, option.field) for option in RUN_OPTIONS} == {("train", "start_from")}
    names = [option.parameter.name for option in RUN_OPTIONS]
    assert len(set(names)) == len(names)
