"""Fixtures: a tiny model's folder and samples, which most tests of a policy begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo_megatron.data.samples import Sample
from tests.support.models import random_samples, save_tiny_model


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return random_samples(12, seed=3)
