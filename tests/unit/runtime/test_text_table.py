"""Text tables: aligned columns, and cells that are shown as they are."""

from __future__ import annotations

from typing import Any

import pytest

from bapo_megatron.runtime.text_table import text_table

TEXT = "[bold]" + "word " * 200 + ":smile:"


@pytest.mark.parametrize(
    ("rows", "given", "expected"),
    [
        ([], {}, []),
        ([("a", "1"), ("bc", "")], {"indent": 2}, ["  a   1", "  bc"]),
        (
            [("a", "1.5", "x"), ("long name", "22.25", "")],
            {"right": {1}},
            ["a            1.5  x", "long name  22.25"],
        ),
        (
            [("log-probs", "ok")],
            {"heads": ("quantity", "?")},
            ["quantity   ?", "---------- --", "log-probs  ok"],
        ),
        ([("a", TEXT)], {}, [f"a  {TEXT}"]),  # neither markup nor cut nor wrapped
        ([("\u6a21\u578b", "1"), ("abcd", "2")], {}, ["\u6a21\u578b  1", "abcd  2"]),  # two cells each
        ([("a", "1\n22"), ("b", "3")], {"right": {1}}, ["a   1", "   22", "b   3"]),
    ],
)
def test_columns_are_aligned(rows: list[tuple[str, ...]], given: dict[str, Any], expected: list[str]) -> None:
    assert text_table(rows, **given) == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb" * 5 + "END", "a       ba      ba      ba      ba      bEND"),
        ("a\u2028b\u0085c\x1b[2Jd\re", "a\\u2028b\\x85c\\x1b[2Jd\\re"),
        ("a\ud800b", "a\\ud800b"),
        ("x" * 20_000 + "END", "x" * 20_000 + "END"),
    ],
)
def test_no_character_of_a_cell_is_lost(text: str, shown: str) -> None:
    assert text_table([(text, "1")]) == [f"{shown}  1"]
