"""docs/config.md says what the dataclasses of the configuration say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bapo_megatron.config import RunConfig, SftConfig, load_recipe
from bapo_megatron.config.validation import flat
from tests.support.config_page import COMMAND, PAGE, config_page, field_texts

ROOT = Path(__file__).parents[3]


def test_the_page_is_what_its_generator_writes() -> None:
    """Without pytest's own comparison: a difference of two pages is long."""
    is_current = PAGE.read_text() == config_page()
    assert is_current, f"docs/config.md is not current: `{COMMAND}` writes it anew"


def test_it_has_every_field_of_a_run() -> None:
    run = load_recipe(ROOT / "recipes/demo_cpu.py", RunConfig)
    page = PAGE.read_text()
    assert not [name for name in flat(run) if f"| `{name}` |" not in page]


def test_every_field_says_what_it_is() -> None:
    def check(kind: type) -> None:
        texts = field_texts(kind)
        for field in dataclasses.fields(kind):
            default = field.default_factory
            if dataclasses.is_dataclass(default):
                check(default)
            else:
                known = field.name in texts or field.name in ("model", "data")  # sections without a default
                assert known, f"{kind.__name__}.{field.name} has no docstring"

    check(RunConfig)
    check(SftConfig)
