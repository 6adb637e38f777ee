"""Settings that are gone or new: an old run with their defaults continues, any other use is refused by
name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bapo_megatron.checkpoint.run_directory import (
    check_same_run,
    plain_values,
    read_config,
    store_config,
    with_present_fields,
)
from bapo_megatron.cli import run
from bapo_megatron.config import RunConfig
from bapo_megatron.config.recipe import load_recipe
from bapo_megatron.config.removed import REMOVED
from bapo_megatron.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "recipes/demo_cpu.py"
OTHER = {"algorithm.bounds.negative_weight": "first_pass", "algorithm.bounds.low_within_batch": "held"}


@pytest.fixture
def old_run(tmp_path: Path) -> RunConfig:
    """A run that has made a step, begun when the settings existed."""
    config = dataclasses.replace(load_recipe(RECIPE, RunConfig), run_dir=tmp_path)
    store_config(config)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    change(config, {name: default for name, (default, _) in REMOVED.items()})
    return config


def change(config: RunConfig, values: dict[str, object]) -> None:
    path = config.directory / "config.json"
    stored = json.loads(path.read_text())
    stored["config"] |= values
    path.write_text(json.dumps(stored))


def test_an_old_run_with_the_defaults_goes_on(old_run: RunConfig) -> None:
    check_same_run(old_run)
    assert read_config(old_run.directory) == with_present_fields(plain_values(old_run))


@pytest.mark.parametrize("name", REMOVED)
def test_any_other_use_is_refused(name: str, old_run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """In an old run, as a flag, and in a recipe."""
    change(old_run, {name: OTHER[name]})
    with pytest.raises(ConfigError, match=f"{name} is gone: no study showed a gain: leave it out"):
        check_same_run(old_run)
    assert run(["train", str(RECIPE), f"--{name.replace('_', '-')}={OTHER[name]}"]) == 2
    assert f"{name} is gone: no study showed a gain" in capsys.readouterr().err
    recipe = old_run.directory / "recipe.py"
    field = name.rpartition(".")[2]
    recipe.write_text(
        "from bapo_megatron.algo.bapo import BoundsConfig\n"
        f"def recipe():\n    return BoundsConfig({field}={OTHER[name]!r})\n"
    )
    with pytest.raises(ConfigError, match=rf"line 3.*{name} is gone: .*algorithm\.bounds\.low_start=0\.8"):
        load_recipe(recipe, RunConfig)
