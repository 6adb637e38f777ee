"""What a reward worker imports: each of a run's starts within a second, so none imports torch."""

from __future__ import annotations

import subprocess
import sys
from typing import get_type_hints

import pytest

from bapo_megatron import tensor_types, types
from tests.unit.reward.test_reward_pool import pooling, prompt

TAKE_SECONDS = {"torch", "transformers", "megatron", "datasets", "safetensors", "pandas"}
PROGRAM = """
import sys
import bapo_megatron.reward.worker
from bapo_megatron.types import Generation, Group, Prompt, Rollout
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_neither_the_worker_nor_the_types_of_its_prompts_import_torch() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = set(run.stdout.split())
    assert "bapo_megatron" in found
    assert not found & TAKE_SECONDS, "a worker imports a package that takes seconds"


@pytest.mark.integration
async def test_a_worker_of_a_users_function_has_no_torch() -> None:
    """Also of one that imports ``Prompt``, as the documentation shows."""
    async with pooling(function="tests.support.reward_functions:has_torch") as pool:
        assert (await pool.score(prompt(), "a response", 2)).reward == 0.0


def test_the_types_with_tensors_are_found_where_users_look_for_them() -> None:
    for name in ("COLUMNS", "Column", "MicroBatch", "SearchedLoss", "TokenFn", "TokenStats", "UpdateResult"):
        assert getattr(types, name) is getattr(tensor_types, name)
    assert get_type_hints(types.Rollout)["reward"] is float
    with pytest.raises(AttributeError, match="has no attribute 'MiniBatch'"):
        _ = types.MiniBatch  # type: ignore[attr-defined]
