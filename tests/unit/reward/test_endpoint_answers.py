"""Rewards behind an endpoint: answers that are cut off or degenerate, and keys that a server repeats."""

from __future__ import annotations

import logging
import shutil
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.config import RewardConfig
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
        settings = {"url": url, "model": "m", "give_up_s": 0.5}
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
