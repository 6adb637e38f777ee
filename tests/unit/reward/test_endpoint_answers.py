"""Rewards behind an endpoint: degenerate answers, keys that a server repeats, and who is asked of several."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bapo_megatron.config import DataConfig, ModelConfig, RewardConfig, RunConfig, SourceConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward import endpoint_client as client
from bapo_megatron.reward.endpoint_scorer import LlmJudge
from bapo_megatron.reward.endpoint_settings import LlmJudgeSettings, read_settings
from bapo_megatron.reward.pool import RewardPool, RewardResult
from tests.support.judge_server import completion, judge_server, judged, says
from tests.support.virtual_time import run_virtually
from tests.unit.reward.test_endpoints import CHAT, KEY, POLICY, pooled, prompt

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(client, "LONGEST_WAIT_S", 0.05)


def test_a_reply_of_blanks_takes_no_time_that_grows_with_its_square() -> None:
    """A judge that repeats itself: half a million blanks, of which a square would be days."""
    settings = LlmJudgeSettings(url="http://judge:1", model="m")
    reply = completion("Score:" + " \n" * 250_000 + "** 0.5")
    assert LlmJudge(settings, 0.0, 1.0).value(reply) == 0.5


def test_messages_that_a_reward_models_template_refuses_are_a_failure(tmp_path: Path) -> None:
    """Many templates know no system message. The sampler must not die of it."""
    tokenizer = shutil.copytree(POLICY, tmp_path / "model")
    (tokenizer / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    settings = {"url": "http://127.0.0.1:9", "protocol": "sglang", "tokenizer": str(tokenizer)}
    asked = replace(prompt(), messages=CHAT)
    with judge_server(says([{"embedding": [1.0]}])) as server:
        reward = RewardConfig("reward_model", settings={**settings, "url": server.url})
        found = pooled(lambda pool: pool.score(asked, "two", 10), reward)
    assert (found.failure, found.place) == ("endpoint", "chat template")
    assert "refuses messages of the roles system, user, assistant: no system role here" in found.detail


def run_of(reward: RewardConfig, **rewards: str | None) -> RunConfig:
    """A run with a source of each name, and its reward."""
    sources = tuple(SourceConfig(Path(f"{name}.jsonl"), reward=one) for name, one in rewards.items())
    return RunConfig("run", ModelConfig(Path("model")), DataConfig(sources=sources), reward=reward)


def test_each_response_goes_to_the_judge_or_to_a_worker_by_its_source() -> None:
    """The judge says 0, math-verify says right, and the users' functions get no setting of the judge's. A
    worker has no torch, also not by ``Prompt``, which the pages import; functions see sources."""
    torch, own = (f"tests.support.reward_functions:{name}" for name in ("has_torch", "by_source"))
    rewards = ("math", "", own, torch, "llm_judge")

    async def act(pool: RewardPool) -> list[RewardResult]:
        assert len(pool._workers._workers) == 1
        calls = [pool.score(replace(prompt(), reward=one, source="own"), r"\boxed{2}", 1) for one in rewards]
        return await asyncio.gather(*calls)

    with judge_server(judged("Score: 0")) as server:
        settings = {"url": server.url, "model": "m"}
        reward = RewardConfig("llm_judge", settings=settings, correct=3.0, wrong=-1.0, workers=1)
        config = run_of(reward, sums="math", essays=None, own=own, torch=torch)
        config.check()
        found: list[RewardResult] = pooled(act, reward, config.reward_functions)
        assert len(server.bodies) == 1  # equal questions are asked once
    assert [(one.reward, one.failure) for one in found] == [
        (3, None),
        (-1, None),
        (0.25, None),
        (0, None),
        (-1, None),
    ]


@pytest.mark.parametrize("function", ["math", "llm_judge"])
def test_an_endpoint_without_settings_is_refused(function: str) -> None:
    settings = {} if function == "math" else {"url": "http://judge/v1"}
    config = run_of(RewardConfig(function, settings=settings), sums=None, essays="reward_model")
    says = (
        rf"^data.sources\[essays\].reward=reward_model has no settings: .* of reward.function={function}; set"
    )
    with pytest.raises(ConfigError, match=says):
        config.check()
    run_of(RewardConfig("reward_model"), sums="math", essays="reward_model").check()


JUDGE = {"url": "http://judge:8000/v1", "model": "m"}
MODEL = {"url": "http://rm:8000/x", "protocol": "slime"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({**JUDGE, "modell": 1}, r"reward.settings.modell=1: .*no such setting; its settings: "),
        ({"model": "m"}, r"reward.settings.url is missing"),
        ({**JUDGE, "url": "judge:8000"}, r"reward.settings.url is not an address: give http://HOST"),
        ({**JUDGE, "url": f"http://u:{KEY}@h/v1"}, "holds a user or a password"),
        ({**JUDGE, "verdict": "a("}, r"verdict='a\(' is not a regular expression"),
        ({**JUDGE, "verdict": "a"}, r"verdict='a' has 0 groups"),
        ({**JUDGE, "template": "{prompt}"}, r"template has neither \{response\} nor \{conversation\}"),
        ({**JUDGE, "lowest": 1.0}, r"lowest=1.0 must be below highest=1.0"),
        ({**JUDGE, "api_key_env": "NOT_THERE_7"}, r"api_key_env=NOT_THERE_7: there is no such env"),
        ({**JUDGE, "api_key_env": KEY}, "not the key itself"),
        ({**MODEL, "protocol": "sglang"}, r"tokenizer is missing"),
        ({**MODEL, "tokenizer": "/nowhere"}, r"tokenizer=/nowhere is not a folder"),
    ],
)
def test_wrong_settings_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        read_settings("reward_model" if "protocol" in changed else "llm_judge", changed)
    assert KEY not in str(told.value)


def test_planning_needs_neither_key_nor_tokenizer() -> None:
    elsewhere = {**MODEL, "tokenizer": "/nowhere", "api_key_env": "NOT_THERE_7"}
    assert read_settings("reward_model", elsewhere, here=False).api_key_env == "NOT_THERE_7"


def test_the_base_address_will_do() -> None:
    for url in ("http://h/v1", "http://h/v1/", "http://h/v1/chat/completions"):
        assert client.with_path(url, "/chat/completions") == "http://h/v1/chat/completions"
    asked = client.with_path("http://h/o/x?api-version=1", "/chat/completions")
    assert asked == "http://h/o/x/chat/completions?api-version=1"


async def test_a_server_that_starts_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[object] = []

    async def open_connection(*place: object) -> tuple[None, Mock]:
        places.append(place)
        if len(places) < 3:
            raise ConnectionRefusedError
        return None, Mock()

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    await client.JsonClient("https://127.0.0.1/v1", 60, 100).connect()
    assert places == 3 * [("127.0.0.1", 443)]
    places.clear()
    with pytest.raises(client.EndpointError, match="https://127.0.0.1/v1: ConnectionRefusedError"):
        await client.JsonClient("https://127.0.0.1/v1", 60, 0.001).connect()


def test_retries_end_within_their_limit_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of 1, 2, 4, 8, 16, 30 ... s without chance: in 100 s calls at 0, 1, 3, 7, 15, 31, 61 and 91."""
    monkeypatch.setattr(client, "FIRST_WAIT_S", 1.0)
    monkeypatch.setattr(client, "LONGEST_WAIT_S", 30.0)
    monkeypatch.setattr(client.random, "uniform", lambda low, high: high)
    asked: list[float] = []

    async def main() -> None:
        one = client.JsonClient("http://nowhere/", 60, 100)
        for error, calls in ((client._Passing("HTTP", "down"), 8), (client.EndpointError("HTTP", "down"), 1)):
            before = len(asked)

            async def once(
                body: bytes, limit_s: float, error: Exception = error, before: int = before
            ) -> None:
                asked.append(asyncio.get_running_loop().time())
                assert limit_s == min(60, 100 - asked[-1] + asked[before])
                raise error

            monkeypatch.setattr(one, "_once", once)
            with pytest.raises(client.EndpointError, match="down"):
                await one.ask({})
            assert len(asked) == before + calls

    run_virtually(main(), None, monkeypatch)
    assert asked == [0, 1, 3, 7, 15, 31, 61, 91, 91]
