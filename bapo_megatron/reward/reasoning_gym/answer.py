"""The answer in a response to a problem of reasoning-gym."""

from __future__ import annotations

import re

from bapo_megatron.reward.answer_text import behind_thinking, last_boxed

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
"""The form that reasoning-gym's own prompts ask for."""

_NUMBER = re.compile(
    r"(?:(?<![\w)\].])[-+])?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?|(?<!\d)\.\d+"
)
"""A number: its sign (none behind a digit or a bracket: ``5-3`` is a difference), thousands, decimals, an
exponent, a denominator."""


def answer_of(response: str, expected: object) -> str | None:
    r"""The answer behind the thinking part: what the last ``<answer>`` holds, else the last ``\boxed{}``;
    without both the last number where a number is ``expected``, else all of the text. None if it is empty.

    A small model writes ``7 + 8 = 15``: that says 15.
    """
    text = behind_thinking(response)
    if tagged := _TAGGED.findall(text):
        return str(tagged[-1]).strip() or None
    if (boxed := last_boxed(text)) is not None:
        return boxed or None
    if is_number(expected):
        numbers = _NUMBER.findall(text.replace("\u2212", "-"))
        return numbers[-1] if numbers else None
    return text.strip() or None


def is_number(text: object) -> bool:
    """Whether the text is one number."""
    return isinstance(text, str) and _NUMBER.fullmatch(text.strip()) is not None
