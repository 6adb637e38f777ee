"""The responses of an evaluation: each is asked for once and judged, and again where an engine was lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.errors import RunStopped
from bapo_megatron.evaluation import run as evaluation_run
from bapo_megatron.evaluation.run import SuiteSampler
from bapo_megatron.evaluation.scoring import vote_of
from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.pool_state import EngineTimeouts
from bapo_megatron.rollout.sampler.response import MOST_LOSSES, Sampling
from bapo_megatron.types import FinishReason, GenerateRequest, Generation, Prompt
from tests.support.sampling import ScriptedEngine

STOP = 9


class Scripted(ScriptedEngine):
    """An engine that answers with what ``says`` makes of the request, or fails with its error."""

    def __init__(self, says: Callable[[GenerateRequest, int], tuple[list[int], FinishReason]]) -> None:
        super().__init__(lambda _prompt, _sample: "")
        self._says = says
        self.told: int | None = None
        """The version that its tokens claim, if that is not the truth."""

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.append(request)
        await asyncio.sleep(0)
        tokens, reason = self._says(request, len(self.asked))
        ids = np.array(tokens, np.int32)
        versions = np.full(len(ids), self.version if self.told is None else self.told, np.int32)
        zeros = np.zeros(len(ids), np.float32)
        return Generation(ids, zeros, versions, request_id=request.request_id, finish_reason=reason)


def failing(error: Exception, *times: int) -> Scripted:
    """Fails always, or at these requests."""

    def answer(request: GenerateRequest, n: int) -> tuple[list[int], FinishReason]:
        if not times or n in times:
            raise error
        return [STOP], "stop"

    return Scripted(answer)


LOST = OSError("it fell over")


class Words:
    """Token ids as text."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return f"\\boxed{{{sum(ids)}}}"


class Equal:
    """Judges a response right if its box is the ground truth."""

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        if prompt.ground_truth == "broken":
            return RewardResult(0.0, "time")
        score = float(vote_of(response) == prompt.ground_truth)
        return RewardResult(score, score=score)


def ask(
    engine: Scripted,
    truths: Sequence[str],
    places: Sequence[tuple[int, int]],
    keep: Any = None,
    lost_minutes: float = 5.0,
    thinks: bool = False,
) -> list[dict[str, Any]]:
    prompts = [
        Prompt(n, np.array([n + 1], np.int32), truth, "t", opens_thinking=thinks)
        for n, truth in enumerate(truths)
    ]
    params = Sampling(temperature=1.0, max_response_tokens=4, seed=3, stop_token_ids=(STOP,))
    kept: list[dict[str, Any]] = []

    async def everything() -> None:
        timeouts = EngineTimeouts(heartbeat_s=0.01)
        pool = EnginePool([engine], 2, lambda kind, **fields: None, timeouts)
        await pool.update(Path(), 1)
        try:
            asker = SuiteSampler(prompts, Words(), pool, Equal(), params, 1, lost_minutes)
            await asker.ask(places, keep or kept.extend)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(everything(), 60))
    return kept


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_run, "_LOOK_S", 0.02)
    monkeypatch.setattr("bapo_megatron.rollout.sampler.held_out._POLL_S", 0.02)


def test_every_place_is_asked_once_and_judged() -> None:
    engine = Scripted(lambda request, n: ([int(request.input_ids[0]), STOP], "stop"))
    places = [(problem, sample) for problem in range(3) for sample in range(4)]
    rows = ask(engine, ["10", "11", "broken"], places)
    assert sorted((one["problem"], one["sample"]) for one in rows) == places
    found = Counter((one["problem"] < 2, one["correct"], one["failure"]) for one in rows)
    assert found == {(True, True, None): 8, (False, False, "time"): 4}
    assert {(one["finish_reason"], one["tokens"]) for one in rows} == {("stop", 2)}
    assert rows[0]["text"].startswith("\\boxed{")
    assert len({request.params.seed for request in engine.asked}) == len(places)


def test_a_response_goes_on_after_an_abort_and_is_cut_at_its_limit() -> None:
    engine = Scripted(lambda request, n: ([1], "abort") if n == 1 else ([2, 2, 2], "length"))
    (found,) = ask(engine, ["7"], [(0, 0)])
    first, second = engine.asked
    assert second.input_ids.tolist() == [1, 1]
    assert (first.params.max_new_tokens, second.params.max_new_tokens, second.prefix_tokens) == (4, 3, 1)
    assert first.params.seed == second.params.seed
    assert (found["tokens"], found["finish_reason"], found["correct"]) == (4, "length", True)


def test_a_stop_token_at_the_limit_is_no_truncation_and_a_box_within_thoughts_no_answer() -> None:
    engine = Scripted(lambda request, n: ([1, 1, 1, STOP], "length"))
    for thinks, answer in ((False, "12"), (True, None)):
        (found,) = ask(engine, ["12"], [(0, 0)], thinks=thinks)
        assert (found["finish_reason"], found["answer"]) == ("stop", answer)


def test_a_lost_engine_is_asked_again() -> None:
    assert len(ask(failing(LOST, 1, 3), ["9"] * 4, [(n, 0) for n in range(4)])) == 4


@pytest.mark.parametrize(
    ("engine", "lost_minutes", "says"),
    [
        (failing(LOST), 5.0, f"{MOST_LOSSES} engines were lost with request '0-0'"),
        (failing(LOST), 0.0, "no engine has worked"),
        (failing(ValueError("no such request")), 5.0, "a request of an evaluation was refused: no such"),
        (failing(LOST, 99), 5.0, "disk is full"),
    ],
)
def test_what_ends_an_evaluation(
    engine: Scripted, lost_minutes: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(rows: Sequence[Any]) -> None:
        raise RunStopped("the disk is full")

    monkeypatch.setattr("bapo_megatron.rollout.engines.pool._MAX_BACKOFF_S", 0.0)
    with pytest.raises(RunStopped, match=says):
        ask(engine, ["9"], [(0, 0)], full, lost_minutes)


def test_a_failure_to_store_that_was_not_noted_yet_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task's callbacks run after its end: the sampler may see the end before them."""

    def full(rows: Sequence[Any]) -> None:
        raise RunStopped("the disk is full")

    monkeypatch.setattr(SuiteSampler, "_ended", lambda *_: None)
    with pytest.raises(RunStopped, match="disk is full"):
        ask(failing(LOST, 99), ["9"], [(0, 0)], full)


@pytest.mark.parametrize("always", [False, True])
def test_tokens_of_other_weights_are_not_evaluated(always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers with weights that the evaluation did not load: asked again after its recovery."""

    def answer(request: GenerateRequest, n: int) -> tuple[list[int], FinishReason]:
        engine.told = 0 if n == 1 or always else None
        return [n, STOP], "stop"

    engine = Scripted(answer)
    monkeypatch.setattr("bapo_megatron.rollout.engines.pool._MAX_BACKOFF_S", 0.0)
    if always:
        with pytest.raises(RunStopped, match="tokens of weights 0 after a load of 1"):
            ask(engine, ["11"], [(0, 0)])
    else:
        (found,) = ask(engine, ["11"], [(0, 0)])
        assert (found["text"], found["correct"]) == ("\\boxed{11}", True), "the answer of the right weights"
