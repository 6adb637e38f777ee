"""docs/losses.md names every registered loss, its settings and their defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.algo.losses import LOSSES, load_loss
from bapo_megatron.algo.settings import settings_of

PAGE = Path(__file__).parents[3] / "docs/losses.md"
SECTIONS = ("What each does to which token", "Formulas, settings, sources")


def rows(section: str) -> dict[str, str]:
    """The table's row of each loss that a first cell names."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return {name: line for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])}


def shown(default: Any) -> str:
    return "none" if default is None else f"{default:g}"


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_has_its_rows(name: str) -> None:
    for section in SECTIONS:
        assert name in rows(section), f"{section}: a row of {name} is missing"
    described = rows(SECTIONS[1])[name]
    for setting in settings_of(load_loss(name)):
        assert re.search(rf"`{setting.name}` {re.escape(shown(setting.default))}[,\s]", described), setting


def test_both_tables_are_of_the_same_losses() -> None:
    first, second = (rows(section) for section in SECTIONS)
    assert first.keys() == second.keys()
