"""Command lines: Hydra's form, values after switches, and what is none of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from bapo_megatron.commands.plan import PlanCommand
from bapo_megatron.config import RunConfig
from bapo_megatron.config.flags import in_tyros_form, parse_options
from bapo_megatron.config.recipe import load_recipe

DEMO = Path("recipes/demo_cpu.py")


@dataclass(frozen=True)
class Inner:
    """A section."""

    keep_last: int = 1
    is_on: bool = True


@dataclass(frozen=True)
class Flat:
    """Fields without a prefix."""

    stage: int | None = None


@dataclass(frozen=True)
class Options:
    """All kinds of fields."""

    sources: tyro.conf.Positional[tuple[str, ...]]
    steps: int = 3
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    inner: Inner = field(default_factory=Inner)
    flat: Annotated[Flat, tyro.conf.arg(name="")] = field(default_factory=Flat)


def parsed(*arguments: str) -> Options:
    return parse_options(Options, "bapo test", ["a.jsonl", *arguments])


@pytest.mark.parametrize(
    "words", ["--inner.keep-last 7", "--inner.keep_last=7", "inner.keep_last=7", "inner.keep-last=7"]
)
def test_hydras_form(words: str) -> None:
    found = parsed(*words.split(), "steps=5", "stage=2")
    assert (found.inner.keep_last, found.steps, found.flat.stage) == (7, 5, 2)


@pytest.mark.parametrize("yes", ["true", "True", "1", "yes"])
@pytest.mark.parametrize("form", ["--{0}={1}", "--{0} {1}", "{0}={1}"])
@pytest.mark.parametrize("name", ["overwrite", "json"])
def test_a_value_after_a_switch(name: str, form: str, yes: str) -> None:
    found = parsed(*form.format(name, yes).split())
    assert {"overwrite": found.overwrite, "json": found.as_json}[name]
    off = parsed(*form.format(name, "false").split())
    assert not off.overwrite
    assert not off.as_json


@pytest.mark.parametrize("off", [["--inner.is-on=false"], ["inner.is_on=False"], ["--inner.no-is-on"]])
def test_a_switch_of_a_section(off: list[str]) -> None:
    assert not parsed(*off).inner.is_on
    assert parsed("--inner.is_on").inner.is_on


@pytest.mark.parametrize(
    "words",
    [
        ["--overwrite", "b.jsonl"],
        ["--sources", "inner.keep_last=5", "--steps", "2"],
        ["lr=3.jsonl", "/data/a=b", "inner.d/x=1"],
    ],
)
def test_words_that_are_no_flags(words: list[str]) -> None:
    """Another argument behind a switch, a flag's value, names of files."""
    assert in_tyros_form(Options, words) == words


def test_a_recipe() -> None:
    default = load_recipe(DEMO, RunConfig)
    words = ["algorithm.reuse_epochs=3", "logging.tensorboard=false", "--optimizer.lr", "1e-3"]
    found = parse_options(RunConfig, "bapo train", words, default)
    assert (found.algorithm.reuse_epochs, found.logging.tensorboard, found.optimizer.lr) == (3, False, 1e-3)
    words = ["batch.pack_tokens=512", "--json", "true", "gpu=h200-141gb"]
    plan = parse_options(PlanCommand, "bapo plan", words, PlanCommand(default))
    assert plan.run.batch.pack_tokens == 512
    assert plan.options.as_json
    assert plan.options.gpu == "h200-141gb"


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--data.sources", "a.jsonl", 'a.jsonl is not a JSON list of sources: write [{"path":'),
        ("--data.sources", '[{"weight": 2}]', '[{"weight": 2}] is not a JSON list of sources'),
        ("--algorithm.loss-settings", '{"b": }', '{"b": } is not a JSON object: write {"name": value}'),
    ],
)
def test_a_value_of_another_form_is_named_with_the_right_one(
    flag: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="^2$"):
        parse_options(RunConfig, "bapo plan", [flag, value], load_recipe(DEMO, RunConfig))
    assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())
