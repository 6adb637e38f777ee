"""The filter by difficulty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config import DataConfig
from bapo_megatron.data.rows import within_difficulty
from bapo_megatron.errors import ConfigError
from bapo_megatron.types import Prompt

PATH = "model_difficulty.DeepSeek-R1-Distill-Qwen-1.5B"


def prompt(number: int, value: Any) -> Prompt:
    info = {"index": number, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-1.5B": value, "other": 1}}
    return Prompt(number, np.array([1]), "", "", info)


VALUES = [0, 1, 8, 15, 16, None, True, "n/a", "7/2", "9e99999999", "1e-9", "nan"]
PROMPTS = [prompt(n, value) for n, value in enumerate(VALUES)]
PROMPTS.append(Prompt(12, np.array([1]), "", "", {}))


def kept(**settings: Any) -> list[int]:
    return [p.prompt_id for p in within_difficulty(PROMPTS, DataConfig(Path("d"), **settings))]


def test_both_bounds_are_included_and_prompts_without_a_number_are_left_out() -> None:
    assert kept(difficulty=PATH, min_difficulty=1, max_difficulty=15) == [1, 2, 3, 8]
    assert kept(difficulty=PATH) == [0, 1, 2, 3, 4, 8, 10]


def test_without_a_difficulty_all_stay() -> None:
    assert kept() == list(range(13))
    assert kept(min_difficulty=3) == list(range(13))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"difficulty": PATH, "min_difficulty": 17}, "they span 0.0 to 16.0"),
        ({"difficulty": "model_difficulty.nobody"}, "no row has that number"),
        ({"difficulty": "index.deeper"}, "no row has that number"),
    ],
)
def test_no_prompt_left_by_the_difficulty_is_an_error(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kept(**settings)
