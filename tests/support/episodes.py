"""Episodes of the sampler on scripted engines, with environments in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config import EnvironmentConfig
from bapo_megatron.environment import Environment, SampledTurn
from bapo_megatron.environment.pool import Question, StepResult
from bapo_megatron.environment.worker import Episodes
from bapo_megatron.rollout.sampler.turns import Stepping
from bapo_megatron.rollout.sampler.write_ahead_log import Record, read_records
from bapo_megatron.types import GenerateRequest, Generation, StepBatch
from tests.support.accounts import state_of
from tests.support.environments import Async
from tests.support.sampling import EOS, ScriptedEngine, World
from tests.support.virtual_time import T, run_virtually

Say = Callable[[int, int, int], str]
"""From the numbers of prompt, sample and turn to what the model says."""


class Brackets:
    """The rule for observations: ``[text]``, one token a character; several are ``[one|two]``."""

    def given_ids(self, observation: str | Sequence[str], last_token: int) -> np.ndarray:
        """The ids of the observation in brackets."""
        assert last_token == EOS
        said = observation if isinstance(observation, str) else "|".join(observation)
        return np.array([*map(ord, f"[{said}]")], np.int32)


class TurnEngine(ScriptedEngine):
    """An engine whose turns are scripted; it counts those before by the brackets in the request."""

    def __init__(self, say: Say, name: str = "turns") -> None:
        super().__init__(lambda *_: "", name)
        self.say = say

    def _answer(self, request: GenerateRequest, aborted: bool) -> Generation:
        sample, start = int(request.request_id.split("-")[1]), request.prefix_tokens
        text = "".join(map(chr, request.input_ids[1 : start + 1].tolist()))
        _, _, begun = text.rpartition("]")
        whole = [*map(ord, self.say(int(request.input_ids[0]), sample, text.count("]"))), EOS]
        assert [*map(ord, begun)] == whole[: len(begun)], "a turn continues from another beginning"
        ids = whole[len(begun) :][: 1 if aborted else request.params.max_new_tokens]
        places = np.arange(start, start + len(ids))
        return Generation(
            request_id=request.request_id,
            token_ids_R=np.array(ids, np.int32),
            log_probs_R=(-(places + 1) / 100).astype(np.float32),
            versions_R=np.full(len(ids), self.version, np.int32),
            finish_reason="stop" if ids[-1] == EOS else "length",
        )


class HereSteps:
    """The environments of a worker in this process, in place of the pool."""

    def __init__(self, kind: type[Environment] = Async, settings: dict[str, Any] | None = None) -> None:
        self.episodes = Episodes(kind, settings or {})
        self.asked: list[tuple[str, str]] = []
        self.forgotten: list[str] = []
        self.wait_s: Callable[[], float] = lambda: 0.0
        self.gate = asyncio.Event()
        self.gate.set()

    async def step(self, question: Question) -> StepResult:
        """The answer, after a while."""
        name = question.task.episode
        self.asked.append((name, question.turn))
        await self.gate.wait()
        await asyncio.sleep(self.wait_s())
        try:
            asked = {"episode": name, "replies": question.replies, "turn": SampledTurn.as_json(question.turn)}
            answer = await self.episodes.step(asked)
            if "missing" in answer:
                turns = [list(turn) for turn in question.turns()]
                whole = {"task": asdict(question.task), "turns": turns, "note": question.note}
                answer = await self.episodes.resume(whole)
        except Exception as error:
            return StepResult(failure="raised", detail=repr(error))
        if "diverged" in answer:
            return StepResult(failure="diverged", detail=answer["diverged"])
        return StepResult(**{**answer, "seconds": 0.0})

    def forget(self, episode: str) -> None:
        self.forgotten.append(episode)


class EpisodeWorld(World):
    """A world with an environment: five groups of two, three of which are a step."""

    def __init__(self, folder: Path, say: Say, steps: HereSteps | None = None, **settings: Any) -> None:
        rollout = {"prompts_per_step": 3, "group_size": 2, "max_response_tokens": 200, **settings}
        rollout = {"drop_uniform_groups": False, "segment_tokens": 3, **rollout}
        max_turns = rollout.pop("max_turns", 8)
        environment = EnvironmentConfig("tests.support.environments:Async", max_turns=max_turns)
        super().__init__(folder, [TurnEngine(say)], environment=environment, **rollout)
        self.steps = steps or HereSteps()
        self.stepping = Stepping(self.steps, Brackets(), self._note, (EOS,), max_turns)
        self.environments = {"": self.stepping}


def run(coroutine: Coroutine[Any, Any, T], patch: pytest.MonkeyPatch) -> T:
    """The result in virtual time."""
    return run_virtually(asyncio.wait_for(coroutine, 1000), None, patch)


async def step_of(world: World, **sampling: Any) -> StepBatch:
    """The first batch of a world."""
    async with world.sampling(rounds=False, **sampling):
        return await world.batch(1)


def check_cuts(
    of: Callable[[Path], World], folder: Path, plain: Callable[[StepBatch], Any], patch: pytest.MonkeyPatch
) -> None:
    """Check that a step is the same from each beginning of its journal, as a kill leaves one."""
    whole = of(folder / "whole")
    expected = plain(run(step_of(whole), patch))
    (log,) = whole.journal.glob("segments-*.log")
    content = log.read_bytes()
    found = [one for one in read_records(log) if isinstance(one, Record)]
    inside = np.random.default_rng(0).integers(found[1].offset, found[-1].offset, 20)
    for cut in sorted({*(record.offset for record in found[1:-1]), *inside.tolist()}):
        world = of(folder / str(cut))
        world.journal.mkdir(parents=True)
        (world.journal / log.name).write_bytes(content[:cut])
        assert plain(run(step_of(world), patch)) == expected, cut
        state_of(world.journal, [*world.dataset.prompts] * 3, 2)


def counting(_prompt: int, sample: int, turn: int) -> str:
    """Turns that differ; the first sample has one more."""
    return "end" if turn == 2 - sample else f"turn{turn}"
