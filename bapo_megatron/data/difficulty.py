"""Difficulty filter of a training set: drops problems that are too easy or too hard when it is loaded.

The difficulty is a number that the dataset has in each row's ``extra_info``. Used by
``data/prepare/filters.py`` and ``sources.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bapo_megatron.config import DataConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.types import Prompt


def within_difficulty(prompts: Sequence[Prompt], data: DataConfig) -> tuple[Prompt, ...]:
    """Prompts whose ``data.difficulty`` is between its bounds, both included; all if it is not set.

    Skywork-OR1-RL-Data has ``model_difficulty.DeepSeek-R1-Distill-Qwen-7B`` and the like in ``extra_info``.
    Prompts without the number are left out. Raises ConfigError if none is left.
    """
    if data.difficulty is None:
        return tuple(prompts)
    found = [(prompt, difficulty_of(prompt.extra_info, data.difficulty)) for prompt in prompts]
    kept = [
        prompt
        for prompt, value in found
        if value is not None and data.min_difficulty <= value <= data.max_difficulty
    ]
    if not kept:
        values = [value for _, value in found if value is not None]
        there = f"they span {min(values)} to {max(values)}" if values else "no row has that number"
        raise ConfigError(
            f"data.difficulty={data.difficulty}: no prompt lies between data.min_difficulty="
            f"{data.min_difficulty} and data.max_difficulty={data.max_difficulty}; {there}"
        )
    return tuple(kept)


def difficulty_of(info: Any, path: str) -> float | None:
    """Difficulty at the dotted ``path``; keys may have dots themselves, as names of models do."""
    if isinstance(info, dict):
        for key, value in info.items():
            if key == path:
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                return float(value) if is_number else None
            if path.startswith(f"{key}."):
                return difficulty_of(value, path[len(key) + 1 :])
    return None
