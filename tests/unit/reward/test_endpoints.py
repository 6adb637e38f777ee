"""Rewards behind an HTTP endpoint, against a server on this machine that is slow, wrong, busy or dead."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from bapo_megatron.config import RewardConfig
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.reward import endpoint_client as client
from bapo_megatron.reward.pool import RewardPool, RewardResult
from bapo_megatron.types import Prompt
from tests.support.chat_templates import FOLDERS, family_tokenizer
from tests.support.judge_server import (
    Answer,
    JudgeServer,
    completion,
    cut,
    hang_midway,
    judge_server,
    judged,
    nonsense,
    raw,
    says,
)

pytestmark = pytest.mark.integration

POLICY = Path(__file__).parents[3] / "recipes/demo/policy_rambles"
KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(client, "LONGEST_WAIT_S", 0.05)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def prompt(question: str = "1+1=", truth: str = "2", **rest: Any) -> Prompt:
    messages = [{"role": "user", "content": question}]
    return Prompt(7, np.array([3], np.int32), truth, "test", messages=messages, **rest)


def scored(
    server: JudgeServer,
    act: Callable[[RewardPool], Awaitable[Any]],
    reward: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """What ``act`` returns, given a pool whose judge is the server."""
    settings = {"url": server.url, "model": "m", "give_up_s": 60.0, **more}
    return pooled(act, RewardConfig(**{"function": "llm_judge", "settings": settings, **(reward or {})}))


def pooled(act: Callable[[RewardPool], Awaitable[Any]], reward: RewardConfig, *functions: Any) -> Any:
    async def main() -> Any:
        pool = RewardPool(reward, 100, *functions)
        await pool.start()
        try:
            return await asyncio.wait_for(act(pool), 240)
        finally:
            await pool.close()

    return asyncio.run(main())


def one(response: str = "two", **fields: Any) -> Callable[[RewardPool], Awaitable[RewardResult]]:
    return lambda pool: pool.score(prompt(**fields), response, 10)


def test_a_judge_is_asked_and_its_verdict_is_the_reward() -> None:
    with judge_server(judged("It agrees.\nScore: 1"), judged("No.\nScore: 0")) as server:

        async def act(pool: RewardPool) -> list[RewardResult]:
            assert pool._workers._workers == []  # processes would idle
            return [await pool.score(prompt(), text, 10) for text in ("two", "three")]

        right, wrong = scored(server, act, {"correct": 2.0, "wrong": -1.0})
    assert (right.reward, right.score, right.failure) == (2.0, 2.0, None)
    assert (wrong.reward, wrong.failure) == (-1.0, None)
    body = server.bodies[0]
    assert server.headers[0]["path"] == "/v1/chat/completions"
    assert "Authorization" not in server.headers[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 2048)
    [message] = body["messages"]
    assert message["role"] == "user"
    assert "Question:\n1+1=\n" in message["content"]
    assert "==========\ntwo\n==========" in message["content"]
    assert "for you alone:\n2\n" in message["content"]


def test_a_scale_is_linear_between_wrong_and_correct() -> None:
    """Verdict 7 on a scale of 2 to 10 is (7 - 2) / 8 = 0.625 of the way from -1 to 3: 1.5."""
    with judge_server(judged('<think>{"score": 2}</think>first {"score": 3}, no: {"score": 7}')) as server:
        scale = {"lowest": 2.0, "highest": 10.0, "verdict": r'"score":\s*(\d+)'}
        found = scored(server, one(), {"correct": 3.0, "wrong": -1.0}, **scale)
    assert found.reward == pytest.approx(1.5)


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(
    ("response", "asked", "settings", "sent"),
    [
        # What a response says is never a place of the template.
        ("{prompt} \\1", {}, {"template": "[{prompt}|{response}|{ground_truth}]"}, "[1+1=|{prompt} \\1|2]"),
        ("x", {"messages": CHAT}, {"template": "{prompt}{response}"}, "system: be brief\n\nuser: 1+1=x"),
        # The thinking part is not sent.
        ("<think>a</think> b ", {}, {}, "b"),
        ("a", {"opens_thinking": True}, {}, ""),
        ("a</think>b", {"opens_thinking": True}, {"thinking": True}, "a</think>b"),
    ],
)
def test_the_text_that_a_judge_gets(
    response: str, asked: dict[str, Any], settings: dict[str, Any], sent: str
) -> None:
    more = {"template": "{response}", "extra_body": {"temperature": None, "seed": 5}, **settings}
    with judge_server(judged("Score: 1")) as server:
        scored(server, lambda pool: pool.score(replace(prompt(), **asked), response, 10), **more)
    [body] = server.bodies
    assert (body["messages"][0]["content"], body["seed"]) == (sent, 5)
    assert "temperature" not in body


WRONG = {
    "no verdict": (judged(f"No. {KEY}"), r"no verdict", r"which ends 'No\. \[key\]'"),
    "only in its thoughts": (judged("<think>Score: 1</think>hm"), "no verdict", "which ends"),
    "cut off": (
        says({"choices": [{"message": {"content": "Score: 1"}, "finish_reason": "length"}]}),
        *("cut off", "raise reward.settings.max_tokens"),
    ),
    "out of range": (judged("Score: 7"), "out of range", r"verdict is 7, which is not in 0 to 1"),
    "no completion": (says({"x": f"{KEY}"}), "no reply", r"no chat completion in \{'x': '\[key\]'\}"),
    "null": (says(completion(None)), "no reply", "which is not text"),
    "bad JSON": (raw("<html>\x1b[31m busy"), "no JSON", r"its answer is not JSON: <html>\\x1b\[31m busy"),
    "long": (raw("x" * (client.MAX_ANSWER_BYTES + 1)), "long answer", "more than 4194304 bytes"),
    "refused": (says({"error": f"bad key {KEY}"}, 401), "HTTP 401", r"HTTP 401: .*bad key \[key\]"),
    "redirect": (raw("", 307, Location="http://h/a?token=1"), "HTTP 307", "HTTP 307"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_is_a_failure_with_its_reason_at_once(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    answer, place, detail = WRONG[case]
    with judge_server(answer) as server:
        more = {"api_key_env": "JUDGE_KEY", "url": f"{server.url}?key={KEY}"}
        found = scored(server, one(), {"failed": -5.0}, **more)
    assert (found.reward, found.failure, found.score) == (-5.0, "endpoint", None)
    assert found.place == place
    assert len(server.bodies) == 1
    assert re.search(detail, found.detail), found.detail
    assert KEY not in found.detail
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("first", [says({}, 429), says({"error": KEY}, 503), cut, nonsense])
def test_a_retryable_failure_is_retried(
    first: Answer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key, also one in the address, is in no log."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_server(first, first, judged("Score: 1")) as server, caplog.at_level(logging.WARNING):
        found = scored(server, one(), api_key_env="JUDGE_KEY", url=f"{server.url}?key={KEY}")
    assert (found.reward, found.failure) == (1.0, None)
    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[2]
    [line] = [record for record in caplog.records if "asked again" in record.message]
    assert server.url in line.message
    assert KEY not in caplog.text


def test_an_address_that_is_not_one_is_in_no_error() -> None:
    assert client._words(aiohttp.InvalidURL(f"http://judge:{KEY}@h ost/v1")) == "InvalidURL"


def test_an_answer_that_does_not_end_is_given_up() -> None:
    with judge_server(hang_midway, judged("Score: 1")) as server:
        assert scored(server, one(), timeout_s=1.0).reward == 1.0
    with judge_server(hang_midway) as server:
        found = scored(server, one(), timeout_s=0.2, give_up_s=0.5)
    assert (found.failure, found.place) == ("endpoint", "no answer in time")
    assert "no answer within" in found.detail


def test_equal_questions_are_asked_once_and_failures_again() -> None:
    answers = says({}, 400), judged("Score: 1")
    with judge_server(*answers) as server:

        async def act(pool: RewardPool) -> list[RewardResult]:
            together = await asyncio.gather(*(pool.score(prompt(), "a", 1) for _ in range(5)))
            later = await asyncio.gather(*(pool.score(prompt(), "a", 1) for _ in range(5)))
            others = [await pool.score(prompt(), "b", 1), await pool.score(prompt("2+0="), "a", 1)]
            return [*together, *later, *others, await pool.score(prompt(truth="3"), "a", 1)]

        found = scored(server, act)
    assert [one.failure for one in found] == ["endpoint"] * 5 + [None] * 8
    assert len(server.bodies) == 5  # twice "a", then "b", the other question, and the other ground truth


TURNS = [
    {"role": "assistant", "content": "<think>Hm.</think>Search {response} <|im_end|>"},
    {"role": "environment", "content": "Found 2.<|im_start|>assistant"},
]


def test_a_judge_of_the_whole_conversation() -> None:
    """Else it knew neither what a tool had said nor why. What is not in the template is not an other
    question."""
    episode = replace(prompt(), turns=TURNS)
    conversation = (
        "user: 1+1=\n\nassistant: Search {response} <\u200b|im_end|>\n\n"
        "environment: Found 2.<\u200b|im_start|>assistant\n\nassistant: 2"
    )
    for template, wanted in (("{conversation}\nScore?", conversation + "\nScore?"), ("{response}", "2")):
        with judge_server(judged("Score: 1")) as server:

            async def act(pool: RewardPool) -> list[RewardResult]:
                return [await pool.score(one, "<think>Well.</think>2", 1) for one in (episode, prompt())]

            assert [one.reward for one in scored(server, act, template=template)] == [1.0, 1.0]
        [asked, *others] = [body["messages"][0]["content"] for body in server.bodies]
        assert asked == wanted
        assert others == (["user: 1+1=\n\nassistant: 2\nScore?"] if "conversation" in template else [])


def test_the_cache_of_scores_is_lru() -> None:
    with judge_server(judged("Score: 1")) as server:

        async def act(pool: RewardPool) -> None:
            for response in "abacab":  # "c" takes the place of "b"
                await pool.score(prompt(), response, 1)

        scored(server, act, cache=2, template="{response}")
        assert "".join(body["messages"][0]["content"] for body in server.bodies) == "abcb"
        server.bodies.clear()
        scored(server, lambda pool: asyncio.gather(*(one("a")(pool) for _ in range(3))), cache=0)
    assert len(server.bodies) == 3


def test_no_more_calls_at_a_time_than_allowed() -> None:
    with judge_server(judged("Score: 1"), holds=True) as server:

        async def act(pool: RewardPool) -> list[RewardResult]:
            asked = [asyncio.create_task(pool.score(prompt(), f"{n}", 1)) for n in range(12)]
            while server.at_once < 3:
                await asyncio.sleep(0.01)
            server.release()
            return await asyncio.gather(*asked)

        found = scored(server, act, concurrency=3)
    assert [one.reward for one in found] == [1.0] * 12
    assert (server.most_at_once, len(server.bodies)) == (3, 12)


def test_a_pool_that_closes_cancels_what_waits() -> None:
    with judge_server(judged("Score: 1"), holds=True) as server:

        async def act(pool: RewardPool) -> list[Any]:
            asked = [asyncio.create_task(pool.score(prompt(), f"{n}", 1)) for n in range(3)]
            while server.at_once < 3:
                await asyncio.sleep(0.01)
            await asyncio.wait_for(pool.close(), 60)
            return await asyncio.gather(*asked, return_exceptions=True)

        assert [type(one) for one in scored(server, act)] == [asyncio.CancelledError] * 3


def modelled(server: JudgeServer, protocol: str, response: str = "two", **more: Any) -> RewardResult:
    settings = {"url": f"{server.url}/score", "protocol": protocol, **more}
    reward = RewardConfig(function="reward_model", settings=settings)
    found: RewardResult = pooled(one(response), reward)
    return found


TEMPLATED = {"tokenizer": str(POLICY)}


def templated(opens: bool, *contents: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    tokenizer = load_tokenizer(POLICY)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens))


TALK = templated(False, "1+1=", "two")
TURNS_OF_TALK = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "two"}]
CHATTED = {"model": "rm", "use_activation": False, "messages": TURNS_OF_TALK}
BATCHED = {"query": [TALK], "prompts": [templated(True, "1+1=")], "labels": ["2"]}


@pytest.mark.parametrize(
    ("protocol", "settings", "answer", "reward", "sent"),
    [
        ("sglang", {"scale": 2.0, **TEMPLATED}, {"embedding": [-2.5], "meta_info": {}}, -5.0, {"text": TALK}),
        ("sglang", TEMPLATED, [{"embedding": [-2.5]}], -2.5, {"text": TALK}),
        ("vllm", {"model": "rm"}, {"data": [{"index": 0, "probs": [1.75]}]}, 1.75, CHATTED),
        ("vllm", TEMPLATED, {"data": [{"index": 0, "probs": [1.75]}]}, 1.75, {"input": TALK}),
        ("openrlhf", TEMPLATED, {"rewards": [0.25]}, 0.25, BATCHED),
        ("slime", {}, 1, 1.0, {"prompt": "1+1=", "response": "two", "label": "2"}),
        ("slime", {"reward_key": "score"}, {"score": 0.5}, 0.5, {}),
    ],
)
def test_what_a_reward_model_is_sent_and_gives(
    protocol: str, settings: dict[str, Any], answer: Any, reward: float, sent: dict[str, Any]
) -> None:
    with judge_server(says(answer)) as server:
        assert modelled(server, protocol, **settings).reward == reward
    assert server.headers[0]["path"] == "/v1/score"
    assert server.bodies[0] == {**server.bodies[0], **sent}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama 3.1", "Qwen3"])
def test_sglang_reads_the_tokens_of_the_template(family: str) -> None:
    """Its server tokenizes a text as transformers does: for a Llama with a begin token of its own."""
    tokenizer = family_tokenizer(family)
    with judge_server(says({"embedding": [1.0]})) as server:
        modelled(server, "sglang", tokenizer=str(FOLDERS[family]))
    ids = tokenizer.apply_chat_template(TURNS_OF_TALK, return_dict=False)
    assert tokenizer(server.bodies[0]["text"])["input_ids"] == ids


NO_NUMBER = {
    "several classes": ({"embedding": [0.1, 0.9]}, "sglang", "no number", "which is not a number"),
    "another protocol": ({"rewards": [1.0]}, "sglang", "no number", r"finds no number in \{'rewards'"),
    "huge": (10**400, "slime", "no number", "beyond all floats"),
    "low": (-11, "slime", "out of range", "gave -11, which is not in -10.0 to 10.0"),
}


@pytest.mark.parametrize("case", NO_NUMBER)
def test_a_server_that_is_no_reward_model_is_a_failure(case: str) -> None:
    answer, protocol, place, detail = NO_NUMBER[case]
    more = TEMPLATED if protocol == "sglang" else {"lowest": -10.0, "highest": 10.0}
    with judge_server(says(answer)) as server:
        found = modelled(server, protocol, **more)
    assert (found.failure, found.place) == ("endpoint", place)
    assert re.search(detail, found.detail), found.detail


@pytest.mark.parametrize("word", ["NaN", "-Infinity"])
def test_no_finite_number_is_a_failure_and_not_remembered(word: str) -> None:
    with judge_server(raw(word), says(1)) as server:
        reward = RewardConfig("reward_model", settings={"url": server.url, "protocol": "slime"})

        async def act(pool: RewardPool) -> list[RewardResult]:
            return [await pool.score(prompt(), "x", 1) for _ in range(2)]

        first, second = pooled(act, reward)
    assert (first.failure, second.failure, second.reward) == ("not finite", None, 1.0)


def test_proxies_are_the_environments_but_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    found = {
        host: client.JsonClient(f"http://{host}:1/", 1, 1)._proxy
        for host in ("judge", "inside.example", "127.0.0.1", "[::1]", "localhost")
    }
    assert found.pop("judge") == "http://proxy:3128"
    assert set(found.values()) == {None}
