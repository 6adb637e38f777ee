"""Answer extraction for reasoning-gym: the last ``<answer>``, else the last box, else a number or text.

``reward.py`` gives it to the verifier of the task.
"""

from __future__ import annotations

import re

from bapo_megatron.reward.answer_text import after_thinking, last_boxed

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
"""The form that reasoning-gym's own prompts ask for."""

_NUMBER = re.compile(
    r"(?:(?<![\w)\].])[-+])?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?|(?<!\d)\.\d+"
)
"""A number: sign (not after a digit or bracket: ``5-3`` is a difference), thousands, decimals, exponent,
denominator."""


def answer_of(response: str, expected: object) -> str | None:
    r"""Answer after the thinking part: the last ``<answer>``, else the last ``\boxed{}``; None if empty.

    Without both: the last number if a number is ``expected`` (``7 + 8 = 15`` of a small model means 15), else
    all of the text.
    """
    text = after_thinking(response)
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
