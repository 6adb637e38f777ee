"""Rewards behind an endpoint: degenerate answers, keys that a server repeats, and who is asked of several."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.config import DataConfig, ModelConfig, RewardConfig, RunConfig, SourceConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward import endpoint_client as client
from bapo_megatron.reward.endpoint_scorer import LlmJudge
from bapo_megatron.reward.endpoint_settings import LlmJudgeSettings
from bapo_megatron.reward.pool import RewardPool, RewardResult
from bapo_megatron.types import Prompt
from tests.support.judge_server import Answer, completion, judge_server, judged, says
from tests.unit.reward.test_endpoints import KEY, POLICY, one, pooled, scored

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(client, "LONGEST_WAIT_S", 0.05)


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_reply_that_is_cut_off_has_no_verdict(reason: str) -> None:
    """Of "Score: 10" it may have "Score: 1", which is a number of the scale, too."""
    cut = completion("It is right in the main. Score: 1")
    cut["choices"][0]["finish_reason"] = reason
    with judge_server(says(cut)) as server:
        found = scored(server, one(), highest=10.0)
    if reason == "stop":
        assert (found.failure, found.reward) == (None, pytest.approx(0.1))
    else:
        assert (found.failure, found.place) == ("endpoint", "cut off")
        assert "raise reward.settings.max_tokens" in found.detail


def test_a_reply_of_blanks_takes_no_time_that_grows_with_its_square() -> None:
    """A judge that repeats itself: half a million blanks, of which a square would be days."""
    settings = LlmJudgeSettings(url="http://judge:1", model="m")
    reply = completion("Score:" + " \n" * 250_000 + "** 0.5")
    assert LlmJudge(settings, 0.0, 1.0).value(reply) == 0.5


@pytest.mark.parametrize("answer", [says({"error": f"{KEY} is not known"}), judged(f"No. {KEY}")])
def test_a_key_that_an_answer_repeats_is_in_no_detail(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_server(answer) as server:
        found = scored(server, one(), api_key_env="JUDGE_KEY")
    assert found.failure == "endpoint"
    assert "[key]" in found.detail
    assert KEY not in found.detail


def test_an_answer_that_is_no_http_does_not_show_the_query(caplog: pytest.LogCaptureFixture) -> None:
    """The address may have a key there."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_nonsense, args=(listening,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1?key={KEY}"
        settings = {"url": url, "model": "m", "give_up_s": 3.0}
        found = pooled(one(), RewardConfig(function="llm_judge", settings=settings))
    assert (found.failure, found.place) == ("endpoint", "ClientResponseError")
    assert KEY not in found.detail + caplog.text
    assert any(record.levelno == logging.WARNING for record in caplog.records)


def _nonsense(listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 nonsense\r\n\r\n")


def test_messages_that_a_reward_models_template_refuses_are_a_failure(tmp_path: Path) -> None:
    """Many templates know no system message. The sampler must not die of it."""
    tokenizer = shutil.copytree(POLICY, tmp_path / "model")
    (tokenizer / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1="}]
    asked = Prompt(7, np.array([3], np.int32), "2", "test", messages=messages)

    async def act(pool: RewardPool) -> RewardResult:
        return await pool.score(asked, "two", 10)

    with judge_server(says([{"embedding": [1.0]}])) as server:
        settings = {"url": server.url, "protocol": "sglang", "tokenizer": str(tokenizer)}
        found = pooled(act, RewardConfig(function="reward_model", settings=settings))
    assert (found.failure, found.place) == ("endpoint", "chat template")
    assert "refuses messages of the roles system, user, assistant: no system role here" in found.detail


MINE = "tests.support.reward_functions:with_more"
"""Its keyword argument `scale` is the reward; 1 without settings."""


def run_of(reward: RewardConfig, **rewards: str | None) -> RunConfig:
    """A run with a source of each name, and its reward."""
    sources = tuple(SourceConfig(Path(f"{name}.jsonl"), reward=one) for name, one in rewards.items())
    return RunConfig("run", ModelConfig(Path("model")), DataConfig(sources=sources), reward=reward)


def scored_by_source(config: RunConfig, *rewards: str) -> tuple[list[RewardResult], int]:
    """The response `\\boxed{2}` to 1+1, scored for prompts with these rewards; and the workers."""
    messages = [{"role": "user", "content": "1+1="}]

    async def main() -> tuple[list[RewardResult], int]:
        pool = RewardPool(config.reward, 100, config.reward_functions)
        await pool.start()
        try:
            prompts = [
                Prompt(0, np.array([3], np.int32), "2", "", messages=messages, reward=one) for one in rewards
            ]
            calls = [pool.score(prompt, r"\boxed{2}", 1) for prompt in prompts]
            return list(await asyncio.wait_for(asyncio.gather(*calls), 240)), len(pool._workers._workers)
        finally:
            await pool.close()

    return asyncio.run(main())


def test_each_response_goes_to_the_judge_or_to_a_worker_by_its_source() -> None:
    """The judge says 0, math-verify says right, and the user's function gets no setting of the judge's."""
    with judge_server(judged("Score: 0")) as server:
        settings = {"url": server.url, "model": "m"}
        reward = RewardConfig("llm_judge", settings=settings, correct=3.0, wrong=-1.0, workers=1)
        config = run_of(reward, sums="math", essays=None, others=MINE)
        config.check()
        found, workers = scored_by_source(config, "math", "", MINE, "llm_judge")
        assert len(server.bodies) == 1  # equal questions are asked once
    assert [one.reward for one in found] == [3.0, -1.0, 1.0, -1.0]
    assert not any(one.failure for one in found)
    assert workers == 1


def test_no_judge_is_asked_where_no_source_has_it() -> None:
    """Nothing listens at its address, and the pool starts."""
    settings = {"url": "http://127.0.0.1:9/v1", "model": "m", "give_up_s": 0.1}
    config = run_of(RewardConfig("llm_judge", settings=settings, workers=1), sums="math")
    assert [one.reward for one in scored_by_source(config, "math")[0]] == [1.0]


def test_settings_of_a_function_are_not_another_ones() -> None:
    config = run_of(
        RewardConfig(MINE, settings={"scale": 7.0}, workers=1), plain=None, named=MINE, sums="math"
    )
    assert [one.reward for one in scored_by_source(config, "", MINE, "math")[0]] == [7.0, 7.0, 1.0]


@pytest.mark.parametrize("function", ["math", "llm_judge", MINE])
def test_an_endpoint_without_settings_is_refused(function: str) -> None:
    settings = {} if function == "math" else {"url": "http://judge/v1"}
    config = run_of(RewardConfig(function, settings=settings), sums=None, essays="reward_model")
    with pytest.raises(
        ConfigError,
        match=rf"^data.sources\[essays\].reward=reward_model has no settings: reward.settings are those of "
        rf"reward.function={function}; set reward.function=reward_model, and name {function} as the reward",
    ):
        config.check()
    run_of(RewardConfig("reward_model"), sums="math", essays="reward_model").check()
