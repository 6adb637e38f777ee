"""The teacher of a distillation: answers that are read or refused, servers that fail, and the journal."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from bapo_megatron.algo.reference_kl_config import DistillationConfig
from bapo_megatron.config import AlgorithmConfig, RunConfig
from bapo_megatron.errors import ConfigError, RunStopped
from bapo_megatron.reward import endpoint_client as client
from bapo_megatron.rollout.engines.requests import Dataset
from bapo_megatron.rollout.sampler.branches import NOTHING
from bapo_megatron.rollout.sampler.response import Response
from bapo_megatron.rollout.sampler.state import OpenGroup
from bapo_megatron.rollout.sampler.teacher import Teacher, check_teacher, group_log_probs
from bapo_megatron.runtime.distributed import free_port
from bapo_megatron.types import Prompt
from tests.support.judge_server import Answer, JudgeServer, judge_server, says
from tests.support.responses import asked as branched
from tests.support.responses import turn
from tests.support.sampling import ScriptedEngine, World, uniform_on, until

PROMPT, RESPONSE = np.array([5, 6], np.int32), np.array([7, 8, 9], np.int32)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(client, "LONGEST_WAIT_S", 0.05)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def rows(*log_probs: float | None, ids: tuple[int, ...] = (6, 7, 8, 9)) -> dict[str, Any]:
    """An answer of SGLang from the last token of the prompt on, which has no log-prob."""
    listed = [[value, one, None] for value, one in zip((None, *log_probs), ids, strict=False)]
    return {"text": "", "meta_info": {"input_token_logprobs": listed}}


@asynccontextmanager
async def teaching(*urls: str, longest: int = 100, **settings: Any) -> AsyncIterator[Teacher]:
    teacher = Teacher(DistillationConfig(1.0, urls=urls, **{"give_up_s": 20.0, **settings}), longest)
    try:
        yield teacher
    finally:
        await teacher.close()


def url_of(server: JudgeServer) -> str:
    return server.url.removesuffix("/v1")


async def asked(*servers: JudgeServer, **settings: Any) -> np.ndarray:
    """The log-probs of RESPONSE after PROMPT, by a teacher on these servers."""
    async with teaching(*map(url_of, servers), **settings) as teacher:
        return await asyncio.wait_for(teacher.log_probs(PROMPT, RESPONSE), 120)


async def test_a_branch_without_the_prompt_begins_with_a_token_that_has_no_log_prob() -> None:
    """No position predicts it, and it was given."""
    own = branched(turn(Response(), 8), 6, 7, after=NOTHING)
    asks: list[Any] = []

    class Counting:
        async def log_probs(self, prompt_ids: np.ndarray, response_ids: np.ndarray) -> np.ndarray:
            asks.append((prompt_ids.tolist(), response_ids.tolist()))
            return -response_ids.astype(np.float32)

    teacher: Any = Counting()
    group = OpenGroup(0, 0, 0, [turn(own, 9)], 0)
    found = await group_log_probs(teacher, PROMPT, group)
    assert asks == [([5, 6], [8]), ([6], [7, 9])]
    assert [one.tolist() for one in found] == [[-8.0], [0.0, -7.0, -9.0]]
    assert {one.dtype for one in found} == {np.dtype(np.float32)}


async def test_log_probs_of_the_responses_tokens_are_asked_and_read() -> None:
    with judge_server(says(rows(-0.5, -1.25, -3.0))) as server:
        found_R = await asked(server)
    assert found_R.dtype == np.float32
    assert found_R.tolist() == [-0.5, -1.25, -3.0]
    [body] = server.bodies
    assert server.headers[0]["path"] == "/generate"
    assert body["input_ids"] == [5, 6, 7, 8, 9]
    assert body["logprob_start_len"] == 1
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (rows(-0.5, -1.0, -3.0, ids=(6, 7, 8, 10)), "of other tokens than were sent"),
        (rows(-0.5, 0.5, -3.0), "above 0 or not finite"),
        ({"meta_info": {}}, "KeyError"),
    ],
)
async def test_an_answer_that_is_not_the_responses_stops_the_run(answer: Any, match: str) -> None:
    with judge_server(says(answer)) as server, pytest.raises(RunStopped, match=match):
        await asked(server)


async def test_a_key_that_a_server_sends_back_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "k" * 40)
    echo = {"headers": {"Authorization": f"Bearer {'k' * 40}"}}
    with judge_server(says(echo)) as server, pytest.raises(RunStopped, match=r"Bearer \[key\]") as raised:
        await asked(server, api_key_env="TEACHER_KEY")
    assert server.headers[0]["Authorization"] == f"Bearer {'k' * 40}"
    assert "kkk" not in str(raised.value)


async def test_a_server_that_refuses_is_passed_over_and_all_that_refuse_stop_the_run() -> None:
    with judge_server(says({"error": "too long"}, 400)) as bad, judge_server(says(rows(-1, -1, -1))) as good:
        assert (await asked(bad, good)).tolist() == [-1, -1, -1]
        with pytest.raises(RunStopped, match=r"sequence of 5 tokens: .*HTTP 400.*too long.*What is sampled"):
            await asked(bad)


@pytest.mark.parametrize("how", ["refuses connections", "answers 503"])
async def test_a_dead_server_holds_no_response_up(how: str) -> None:
    """It is not waited for while another server answers, and is then tried last."""
    with judge_server(says({}, 503)) as busy, judge_server(says(rows(-1, -1, -1))) as good:
        dead = url_of(busy) if how == "answers 503" else f"http://127.0.0.1:{free_port()}"
        async with teaching(dead, url_of(good), give_up_s=3600.0) as teacher:
            for _ in range(2):
                await asyncio.wait_for(teacher.log_probs(PROMPT, RESPONSE), 120)
        assert len(good.bodies) == 2
        assert len(busy.bodies) == (how == "answers 503")


async def test_groups_of_before_the_teacher_are_dropped(tmp_path: Path) -> None:
    """Scored and waiting when the run got a teacher: no step could train on them."""
    world = World(tmp_path, [ScriptedEngine(uniform_on(0, 3))], prompts=40, max_staleness=1)
    async with world.sampling(rounds=False):
        await until(lambda: len(world.sampler._state.finished) >= 4)
        world.kill()
    async with world.sampling(rounds=False, teacher=Halves()):
        batch = await world.batch(1)
    taught = [one.teacher_log_probs_R for group in batch.groups for one in group.rollouts]
    assert len(taught) == 12
    assert all(column_R is not None for column_R in taught)
    assert world.sampler._state.tokens["dropped_untaught"] > 0


async def test_a_long_answer_has_room() -> None:
    """64,000 tokens: 3 MB of log-probs, and the limit goes with the sequence."""
    count = 64_000
    listed = [[None, 6, None], *([-12.345678901234567, 151_643, None] for _ in range(count))]
    response = np.full(count, 151_643, np.int32)

    async def found(longest: int) -> np.ndarray:
        async with teaching(url_of(server), longest=longest) as teacher:
            return await teacher.log_probs(PROMPT, response)

    with judge_server(says({"meta_info": {"input_token_logprobs": listed}})) as server:
        assert len(await found(count + 2)) == count
        with pytest.raises(RunStopped, match="more than"):
            await found(100)


class Words:
    """A tokenizer: a word is an id."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]


async def opened(server: JudgeServer) -> None:
    async with teaching(url_of(server), give_up_s=5.0) as teacher:
        await teacher.open(Dataset([Prompt(0, PROMPT, "", "test")], Words(), (3,)))


def tokenizing(shift: int) -> Answer:
    """A server whose ids are shifted."""

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        assert request.path == "/tokenize"
        return web.json_response({"tokens": [int(word) + shift for word in body["prompt"].split()]})

    return answer


async def test_a_teacher_with_another_vocabulary_is_refused_before_the_run() -> None:
    with judge_server(tokenizing(0)) as same:
        await opened(same)
    assert same.bodies == [{"prompt": "5 6", "add_special_tokens": False}]
    with judge_server(tokenizing(1)) as other, pytest.raises(ConfigError, match="another vocabulary"):
        await opened(other)
    with judge_server(says({"error": "no tokenizer"}, 404)) as bare, pytest.raises(RunStopped, match="404"):
        await opened(bare)


class Halves:
    """A teacher that gives each token of ``n`` tokens -1/n, and counts the responses."""

    def __init__(self) -> None:
        self.asked = 0

    async def log_probs(self, _prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
        self.asked += 1
        await asyncio.sleep(0)
        return np.full(len(response), -1 / len(response), np.float32)


async def test_the_log_probs_of_groups_that_count_are_in_the_journal(tmp_path: Path) -> None:
    """Uniform groups are dropped and not asked for; after a kill no finished group is asked for again."""
    teacher = Halves()
    world = World(tmp_path, [ScriptedEngine(uniform_on(0, 3))], prompts=30)
    for _ in range(2):
        async with world.sampling(teacher=teacher):
            batch = await world.batch(1)
            world.kill()
        rollouts = [one for group in batch.groups for one in group.rollouts]
        for one in rollouts:
            assert one.teacher_log_probs_R == pytest.approx(-np.ones(count := len(one.token_ids_R)) / count)
        assert teacher.asked == len(rollouts) == 4 * 3


async def test_a_teacher_that_is_gone_ends_the_sampling(tmp_path: Path) -> None:
    class Gone:
        async def log_probs(self, _prompt: np.ndarray, _response: np.ndarray) -> np.ndarray:
            raise RunStopped("no server")

    world = World(tmp_path, [ScriptedEngine(uniform_on(0, 3))], prompts=30)
    async with world.sampling(teacher=Gone()):
        with pytest.raises(RunStopped, match="no server"):
            await world.batch(1)


def config(temperature: float = 1.0, **settings: Any) -> RunConfig:
    distillation = DistillationConfig(**{"coefficient": 1.0, "urls": ("http://h:1",), **settings})
    made = World(Path("unused"), [], temperature=temperature).config
    return dataclasses.replace(made, algorithm=AlgorithmConfig(distillation=distillation))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"urls": ()}, r"algorithm\.distillation\.urls is empty"),
        ({"temperature": 0.7}, r"needs rollout\.temperature=1, not 0\.7"),
        ({"estimator": "k1"}, "does not depend on the teacher"),
        ({"concurrency": 0}, r"distillation\.concurrency=0"),
        ({"urls": ("h:1",)}, r"distillation\.urls=.*not an address"),
        ({"urls": ("http://me:secret@h:1",)}, r"user or a password"),
        ({"api_key_env": "sk-123"}, "must be the name of an environment variable"),
        ({"api_key_env": "NO_SUCH_KEY_HERE"}, "is not set"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_run(settings: dict[str, Any], match: str) -> None:
    """Where a teacher is asked: not without a coefficient, nor in a replay."""

    def check(run: RunConfig) -> None:
        run.check()
        check_teacher(run)

    with pytest.raises(ConfigError, match=match) as found:
        check(config(**settings))
    assert "secret" not in str(found.value)
    check(config(**{**settings, "coefficient": 0.0, "concurrency": 1}))
    replay = dataclasses.replace(config().rollout, replay=Path("/nowhere"))
    check_teacher(dataclasses.replace(config(**settings), rollout=replay))
