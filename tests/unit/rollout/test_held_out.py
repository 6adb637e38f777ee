"""Held-out evaluation during training: its requests, schedule, file and metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config import EvaluationConfig
from bapo_megatron.data.problem_sets import Suite
from bapo_megatron.errors import RunStopped
from bapo_megatron.evaluation.scoring import evaluation_metrics
from bapo_megatron.rollout.sampler.held_out import HeldOut
from bapo_megatron.types import Generation, Prompt
from tests.support.episodes import EpisodeWorld
from tests.support.sampling import ScriptedEngine, World, mixed
from tests.support.virtual_time import run_virtually


def suite(name: str, *numbers: int, truth: str = "", thinks: bool = False) -> Suite:
    prompts = (Prompt(n, np.array([n], np.int32), truth, name, opens_thinking=thinks) for n in numbers)
    return Suite(name, Path(), "", tuple(prompts))


SUITES = (suite("easy", 1, 2), suite("hard", 5))


def world(folder: Path, **evaluation: Any) -> World:
    """Prompts below 5 have a right first response; the others have none."""
    engine = ScriptedEngine(lambda prompt, sample: mixed(prompt, sample) if prompt < 5 else "never")
    made = World(folder, [engine], segment_tokens=2)
    settings = EvaluationConfig(**{"every": 2, "suites": ("easy",), "samples": 2, **evaluation})
    made.config = dataclasses.replace(made.config, evaluation=settings)
    return made


def held_out(made: World) -> HeldOut:
    return HeldOut(made.config, SUITES, made.dataset, made.pool, made.scorer)


async def evaluated(asked: HeldOut, step: int, waits: int = 5) -> Path | None:
    asked.expect(step, 0)
    asked.begin()
    for _ in range(waits):
        if path := await asked.responses(step, 1.0):
            return path
    return None


async def written(made: World, suites: tuple[Suite, ...] = SUITES, waits: int = 5) -> Path:
    """The results of an evaluation at step 2."""
    async with made.sampling():
        asked = HeldOut(made.config, suites, made.dataset, made.pool, made.scorer, made.environments)
        path = await evaluated(asked, 2, waits)
    assert path is not None
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_every_problem_is_sampled_n_times_by_segments(tmp_path: Path) -> None:
    made = world(tmp_path, temperature=0.25, max_response_tokens=3)
    path = await written(made)
    assert path == tmp_path / "evaluation/step_000002.jsonl"
    rows = rows_of(path)
    assert [(row["suite"], row["problem"], row["sample"]) for row in rows] == [
        *(("easy", problem, sample) for problem in (0, 1) for sample in (0, 1)),
        *(("hard", 0, sample) for sample in (0, 1)),
    ]
    found = [(row["response"], row["correct"], row["tokens"], row["finish_reason"]) for row in rows]
    assert found == [
        *[("y", True, 2, "stop"), ("no", False, 3, "stop")] * 2,
        *[("nev", False, 3, "length")] * 2,
    ]
    asked = [one for one in made.engines[0].asked if one.request_id.startswith("evaluation.")]
    assert {one.params.temperature for one in asked} == {0.25}
    assert max(one.params.max_new_tokens for one in asked) == 2
    assert len({one.request_id for one in asked}) == len(asked)
    assert len({one.params.seed for one in asked}) == 2 * 2 + 2 - 2  # problem 0 of both suites has the same


class Boxes:
    """Any token ids as a box."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "\\boxed{5}"


async def test_what_counts_as_unanswered(tmp_path: Path) -> None:
    """No box outside a thinking part that the prompt opened. A program's box is not an answer."""
    made = world(tmp_path)
    made.dataset = dataclasses.replace(made.dataset, tokenizer=Boxes())
    reward = dataclasses.replace(made.config.reward, function="math_or_code")
    made.config = dataclasses.replace(made.config, reward=reward)
    program = suite("programs", 5, truth="assert f(1) == 2")
    suites = (SUITES[0], suite("thinks", 5, thinks=True), program)
    path = await written(made, suites)
    metrics = evaluation_metrics(path)
    assert [metrics[f"eval/{one.name}/unanswered"] for one in suites] == [0.0, 1.0, None]
    assert [metrics[f"eval/{one.name}/maj@2"] is None for one in suites] == [False, True, True]
    rows = rows_of(path)
    assert {row.pop("answer") for row in rows} == {"5", None}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))  # as earlier versions wrote them
    assert evaluation_metrics(path)["eval/thinks/unanswered"] == 0.0


async def test_only_due_and_missing_evaluations_run_and_those_of_a_resume_again(tmp_path: Path) -> None:
    """It continues before step 3: step 2 made the weights it starts from, step 4 is yet to come."""
    made = world(tmp_path)
    async with made.sampling():
        asked = held_out(made)
        assert await evaluated(asked, 1) is None
        assert not asked.is_busy
        assert await evaluated(asked, 2) is not None
        before = len(made.engines[0].asked)
        assert await evaluated(asked, 2) is not None
        assert len(made.engines[0].asked) == before
        (later := tmp_path / "evaluation/step_000004.jsonl").touch()
        asked.delete(first=3)
        assert not later.exists()
        (earlier := tmp_path / "evaluation/step_000001.jsonl").touch()
        asked.delete(0, 1)
        assert not earlier.exists()
        assert (tmp_path / "evaluation/step_000002.jsonl").exists()


async def test_training_requests_are_held_during_an_evaluation_in_rounds(tmp_path: Path) -> None:
    """No training request is sent to an engine during an evaluation."""
    made = world(tmp_path, every=1)
    engine = made.engines[0]
    engine.holds = lambda request: request.request_id.startswith("evaluation.")
    engine.gate.clear()

    evaluations: list[HeldOut] = []
    training = lambda: sum(not engine.holds(one) for one in engine.asked)  # noqa: E731
    async with made.sampling(is_held=lambda: any(one.is_busy for one in evaluations)) as sampler:
        await made.batch(1)
        asked = held_out(made)
        evaluations.append(asked)
        asked.expect(1, 1)
        await made.weights(1)
        asked.begin()
        sent = training()
        assert await sampler.next_batch(2, 0.2) is None
        assert training() == sent
        assert await asked.responses(1, 0.1) is None
        engine.gate.set()
        assert await asked.responses(1, 5.0) is not None
        assert not asked.is_busy
        assert len((await made.batch(2)).groups) == 4


async def test_newer_weights_cancel_an_evaluation(tmp_path: Path) -> None:
    made = world(tmp_path)
    [engine] = made.engines
    engine.gate.clear()
    async with made.sampling():
        asked = held_out(made)
        for step in (2, 3):
            asked.expect(step, 0)
            asked.begin()
            await asyncio.sleep(0.05)
        engine.gate.set()
        assert await asked.responses(2, 0.1) is None
    assert not (tmp_path / "evaluation").exists()


@pytest.mark.virtual_time
@pytest.mark.parametrize("times", [1, 20])
async def test_tokens_of_other_weights_are_not_evaluated(
    tmp_path: Path, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine counts as lost, and is asked again 20 times. It has version 0, and such an answer has 4."""
    monkeypatch.setattr("bapo_megatron.rollout.engines.pool._MAX_BACKOFF_S", 0.0)
    made, left = world(tmp_path), times
    [engine] = made.engines
    right = engine._answer

    def answer(request: Any, aborted: bool) -> Generation:
        nonlocal left
        found = right(request, aborted)
        if not request.request_id.startswith("evaluation.2.hard.0-1") or not left:
            return found
        left -= 1
        return dataclasses.replace(found, versions_R=np.full_like(found.versions_R, 4))

    engine._answer = answer  # type: ignore[method-assign]
    says = "answers with tokens of weights 4, not of the evaluation's weights 0"
    if times == 20:
        lost = "20 engines were lost with request 'evaluation.2.hard.0-1"
        with pytest.raises(RunStopped, match=f"^{lost}.*{says}"):
            await written(made, waits=60)
        return
    metrics = evaluation_metrics(await written(made, waits=60))
    numbers = {"eval/mean": 0.25, "eval/easy/avg@2": 0.5, "eval/hard/avg@2": 0.0, "eval/easy/problems": 2}
    numbers |= {"eval/easy/response_tokens/mean": 2.5, "eval/hard/response_tokens/mean": 6.0}
    numbers |= {"eval/hard/truncated": 0.0}
    assert {name: metrics[name] for name in numbers} == numbers  # by hand
    [reason] = [event["reason"] for event in made.events if event["kind"] == "engine_lost"]
    assert says in reason


async def test_an_evaluation_uses_half_of_the_capacity(tmp_path: Path) -> None:
    made = world(tmp_path)
    [engine] = made.engines
    async with made.sampling(most=4):
        await made.batch(1)
        engine.gate.clear()
        asked = held_out(made)
        asked.expect(2, 0)
        asked.begin()
        await asyncio.sleep(0.3)
        at_once = sum(one.request_id.startswith("evaluation.") for one in engine.asked)
        engine.gate.set()
        assert await asked.responses(2, 5.0) is not None
        assert at_once == 2


def test_an_evaluation_has_the_runs_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its responses have turns, its environment's rewards are the scores, and nothing given is a length."""
    say = lambda prompt, sample, turn: "end" if turn == 1 + sample else ("raise" if prompt == 5 else "a")  # noqa: E731
    made = EpisodeWorld(tmp_path, say)
    made.config = dataclasses.replace(made.config, evaluation=EvaluationConfig(2, ("easy",), 2))
    rows = rows_of(run_virtually(written(made), None, monkeypatch))
    found = [(row["response"], row["correct"], row["tokens"], row["failure"]) for row in rows]
    assert found == [
        *[("a[1:a]end", True, 6, None), ("a[1:a]a[2:a]end", True, 8, None)] * 2,
        *[("raise", False, 6, "environment")] * 2,
    ]
    episodes = {name for name, _ in made.steps.asked if name.startswith("evaluation.2.")}
    assert len(episodes) == 6
    assert episodes <= {*made.steps.forgotten}
