"""The responses of an evaluation: each is asked for once and judged; what ends an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.errors import RunStopped
from bapo_megatron.evaluation import run as evaluation_run
from bapo_megatron.evaluation.run import SuiteSampler
from bapo_megatron.reward.answer_text import final_answer
from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.pool_state import EngineTimeouts
from bapo_megatron.rollout.sampler.response import MOST_LOSSES, Sampling
from bapo_megatron.types import Prompt
from tests.support.sampling import EOS, Letters, ScriptedEngine


class Equal:
    """Judges a response right if its box is the ground truth."""

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        if prompt.ground_truth == "broken":
            return RewardResult(0.0, "time")
        score = float(final_answer(response) == prompt.ground_truth)
        return RewardResult(score, score=score)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_run, "_LOOK_S", 0.02)
    monkeypatch.setattr("bapo_megatron.rollout.sampler.held_out._POLL_S", 0.02)


def sample(engine: ScriptedEngine, samples: int, keep: Any, lost_minutes: float = 5.0) -> None:
    async def everything() -> None:
        pool = EnginePool([engine], 2, lambda kind, **fields: None, EngineTimeouts(heartbeat_s=0.01))
        await pool.update(Path(), 1)
        try:
            prompt = Prompt(0, np.array([0], np.int32), "0", "t")
            params = Sampling(temperature=1.0, max_response_tokens=20, seed=3, stop_token_ids=(EOS,))
            sampler = SuiteSampler([prompt], Letters(), pool, Equal(), params, 1, lost_minutes)
            await asyncio.wait_for(sampler.ask([(0, one) for one in range(samples)], keep), 60)
        finally:
            await pool.close()

    asyncio.run(everything())


def test_samples_of_a_problem_have_seeds_of_their_own() -> None:
    engine, rows = ScriptedEngine(lambda *_: "\\boxed{0}"), list[Any]()
    sample(engine, 4, rows.extend)
    assert [(one["sample"], one["correct"]) for one in sorted(rows, key=str)] == [(n, True) for n in range(4)]
    assert len({request.params.seed for request in engine.asked}) == 4


@pytest.mark.parametrize(
    ("error", "lost_minutes", "says"),
    [
        (OSError("it fell over"), 5.0, f"{MOST_LOSSES} engines were lost with request '0-0'"),
        (OSError("it fell over"), 0.0, "no engine has worked"),
        (ValueError("no such request"), 5.0, "a request of an evaluation was refused: no such"),
        (None, 5.0, "disk is full"),
    ],
)
def test_what_ends_an_evaluation(
    error: Exception | None, lost_minutes: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_request: object) -> None:
        if error is not None:
            raise error

    def full(rows: Sequence[Any]) -> None:
        raise RunStopped("the disk is full")

    monkeypatch.setattr("bapo_megatron.rollout.engines.pool._MAX_BACKOFF_S", 0.0)
    engine = ScriptedEngine(lambda *_: "\\boxed{0}")
    engine.trouble = fail
    with pytest.raises(RunStopped, match=says):
        sample(engine, 1, full, lost_minutes)
