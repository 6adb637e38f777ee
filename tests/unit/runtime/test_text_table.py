"""Text tables: aligned columns, and cells that are shown as they are."""

from __future__ import annotations

from bapo_megatron.runtime.text_table import text_table


def test_columns_are_aligned() -> None:
    rows = [("a", "1.5", "x"), ("long name", "22.25", "")]
    assert text_table(rows, right={1}) == ["a            1.5  x", "long name  22.25"]


def test_heads_stand_above_a_rule() -> None:
    assert text_table([("log-probs", "ok")], heads=("quantity", "?")) == [
        "quantity   ?",
        "---------- --",
        "log-probs  ok",
    ]


def test_cells_are_neither_markup_nor_cut_nor_wrapped() -> None:
    text = "[bold]" + "word " * 200 + ":smile:"
    assert text_table([("a", text)]) == [f"a  {text}"]


def test_wide_characters_take_two_cells() -> None:
    assert text_table([("\u6a21\u578b", "1"), ("abcd", "2")]) == ["\u6a21\u578b  1", "abcd  2"]
