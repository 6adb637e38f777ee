"""The server of agent programs: requests by hand, questions that are asked again, clients that are gone."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from bapo_megatron.environment import PROMPT_TOOLS, Reply, SampledTurn, Task
from bapo_megatron.environment.adapters import conversation
from bapo_megatron.environment.adapters.endpoint import EndpointEnvironment
from bapo_megatron.environment.protocols import chat, server
from tests.support.scripted_episodes import play

pytestmark = pytest.mark.integration

TASK = Task([{"role": "user", "content": "Guess my number."}], ground_truth="6")


@pytest.fixture(autouse=True)
def no_wait_for_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "FIRST_S", 0.01)


def asked(
    bodies: list[Any], turns: list[str], seen: list[Any] | None = None, task: Task = TASK, **settings: Any
) -> list[tuple[int, Any]]:
    """The answers to requests by hand, to chat completions or with a path."""
    found: list[tuple[int, Any]] = []

    class Raw(EndpointEnvironment):
        role = "tool"

        def __init__(self, task: Task, _: Any) -> None:
            super().__init__(task, settings)

        async def run(self, base_url: str, key: str) -> float | None:
            assert base_url.startswith("http://127.0.0.1:")
            async with aiohttp.ClientSession() as session:
                for body in bodies:
                    headers = {"Authorization": f"Bearer {key}"}
                    path, body = body if isinstance(body, tuple) else ("chat/completions", body)
                    data = body if isinstance(body, str) else json.dumps(body)
                    sent = session.post(f"{base_url}/{path}", data=data, headers=headers)
                    async with sent as answer:
                        found.append((answer.status, await answer.json()))
            return None

    replies = play(Raw, task, settings, turns)
    if seen is not None:
        seen += replies
    return found


QUESTION = TASK.messages[0]
TURN = {"role": "assistant", "content": "3"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


SECOND = [QUESTION, TURN, {"role": "tool", "content": "2"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Guess my number."}]}]
FIRST = "its first request is not the dataset's prompt, but "
OTHER_PATHS: list[tuple[Any, int, str]] = [
    (("responses", {"input": "x", "tools": [{"type": "web_search"}]}), 400, "only functions are"),
    (("responses", {"input": [{"type": "computer_call"}]}), 400, "item 0 of input is not a message"),
    (("responses", {"input": []}), 400, "the request has no input"),
    (("messages", {"messages": "x"}), 400, "the request has no list of messages"),
    (("messages", {"messages": [{"role": "tool"}]}), 400, "message 0 is not an object with a role"),
    (("messages", {"messages": [{"role": "user", "content": 5}]}), 400, "neither text nor a list of blocks"),
    (("messages", {"messages": [], "tools": [{"type": "bash"}]}), 400, "only those of the program"),
    (("messages", {"messages": [], "tools": [{}]}), 400, "it has a tool without a name"),
]
BY_HAND: list[tuple[Any, int, str]] = [
    *OTHER_PATHS,
    ("{", 400, "is not JSON"),
    ({"messages": "x"}, 400, "no list of messages"),
    ({"messages": [QUESTION], "top_logprobs": 2}, 400, "top_logprobs=2 is not offered here"),
    ({"messages": ["hello"]}, 400, "message 0 is not an object with a role"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "message 0 has a content that is neither text nor"),
    ({"messages": SECOND}, 409, FIRST + '3 messages, the first {"role": "user", "content": "Guess my'),
    ({"messages": [{"role": "system", "content": "Be brief."}, QUESTION]}, 409, FIRST + "2 messages"),
    ({"messages": PARTS}, 200, "I add."),
    ({"messages": PARTS}, 200, "Again."),
    ({"messages": SECOND[:2]}, 400, "it ends with no message for the model to answer"),
    ({"messages": [*SECOND[:2], QUESTION]}, 200, "Other."),
    ({"messages": SECOND}, 200, "Done."),
    ({"messages": SECOND[2:]}, 200, "Bare."),
]


def test_requests_by_hand() -> None:
    """Calls in OpenAI's form, a tool's answer as the observation, and a reason for each refusal, in the form
    of its API. (What the clients read: test_public_environments.py.)"""
    turns = ["I add. " + CALL, "Again.", "Other.", "Done.", "Bare."]
    found = asked([body for body, _, _ in BY_HAND], turns)
    for (status, answer), (body, expected, said) in zip(found, BY_HAND, strict=True):
        assert status == expected, body
        if status != 200:
            assert said in answer["error"]["message"]
            assert answer.get("type") == (
                "error" if isinstance(body, tuple) and body[0] == "messages" else None
            )
        else:
            assert answer["choices"][0]["message"]["content"] == said


def test_answers_and_calls_have_names_of_their_own() -> None:
    """Programs keep answers and calls by their ids, and add up what they used."""
    tool = {"role": "tool", "content": "2"}
    add = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [add, add]}
    bodies = [{"messages": [QUESTION]}, {"messages": [QUESTION, turn, tool, tool]}]
    seen: list[Any] = []
    found = [answer for _, answer in asked(bodies, [CALL + CALL, CALL], seen)]
    assert [reply.observation for reply in seen] == [["2", "2"], None], "each result is a message"
    calls = [call["id"] for one in found for call in one["choices"][0]["message"]["tool_calls"]]
    assert len({*calls, *(one["id"] for one in found)}) == 5
    again = [answer for _, answer in asked(bodies, [CALL + CALL, CALL])]
    assert [one["id"] for one in again] == [one["id"] for one in found], "the same after a replay"


def test_a_call_that_cannot_be_read_stays_in_the_text() -> None:
    broken = '<tool_call>{"name": </tool_call>'
    [(_, answer)] = asked([{"messages": [QUESTION]}], [f"I add. {CALL} {broken}"])
    message = answer["choices"][0]["message"]
    assert message["content"] == f"I add.  {broken}"
    assert len(message["tool_calls"]) == 1


def test_the_call_of_a_llama_model_is_one_where_the_request_has_tools() -> None:
    turn = '{"name": "add", "parameters": {"a": 1}}'
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    for tools, calls in (([tool], 1), ([], 0)):
        body = {"messages": [QUESTION], "tools": tools}
        [(_, answer)] = asked([body], [turn], tools_in_prompts=True)
        message = answer["choices"][0]["message"]
        assert len(message.get("tool_calls", [])) == calls
        assert message["content"] == ("" if calls else turn)


def test_the_tools_of_requests_reach_the_template() -> None:
    """Those of the row, which the prompt shows, and other ones in a branch."""
    add, sub = ({"type": "function", "function": {"name": one, "parameters": {}}} for one in ("add", "sub"))
    bodies = [
        {"messages": [QUESTION], "tools": [sub]},
        {"messages": [QUESTION]},
        {"messages": [QUESTION], "tools": [add]},
        {"messages": SECOND, "tools": [add]},
        {"messages": SECOND, "tools": [sub]},
        {"messages": [*SECOND, TURN, QUESTION], "tools": [sub]},
    ]
    seen: list[Reply] = []
    task = replace(TASK, extra_info={PROMPT_TOOLS: [add]})
    found = asked(bodies, ["3"] * 4, seen, task)
    assert [status for status, _ in found] == [409, 409, 200, 200, 200, 200]
    assert "other tools than the prompt" in found[0][1]["error"]["message"]
    assert seen[0] == Reply("2")
    contexts = [(one.context.after, one.context.tools) for one in seen if one.context is not None]
    assert contexts == [(0, [sub]), (3, [sub])]


def test_answers_are_kept_for_retries_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEPT_ANSWERS", 2)
    turns: list[str] = []

    async def ask(request: chat.ChatRequest) -> SampledTurn:
        turns.append(request.messages[0])
        return SampledTurn(str(len(turns)))

    async def main() -> list[str]:
        questions, found = server.EpisodeQuestions(ask), []
        for said, is_retry in (*((one, False) for one in "abcdef"), ("e", True), ("f", True)):
            found.append((await questions.answer(chat.ChatRequest([said]), said, "", is_retry)).text)
        assert len(questions._answers) <= 3
        return found

    assert asyncio.run(main()) == ["1", "2", "3", "4", "5", "6", "5", "6"]


async def test_a_retry_gets_the_newest_equal_answer() -> None:
    """A refusal is none: the same key may ask again. The end of the episode ends what is still asked."""
    turns: list[str] = []

    async def ask(request: chat.ChatRequest) -> SampledTurn:
        turns.append(request.messages[0])
        if turns == ["early"]:
            raise chat.Refused(409, "the prompt comes first")
        if request.messages == ["slow"]:
            await asyncio.Event().wait()
        return SampledTurn(str(len(turns)))

    questions = server.EpisodeQuestions(ask)

    async def said(text: str, key: str = "", is_retry: bool = False) -> str:
        return (await questions.answer(chat.ChatRequest([text]), text, key, is_retry)).text

    with pytest.raises(chat.Refused):
        await said("early", "k")
    assert [await said("early", "k"), await said("early", "k")] == ["2", "2"]
    assert [await said("a"), await said("a"), await said("a", is_retry=True)] == ["3", "4", "4"]
    slow = [questions.answer(chat.ChatRequest(["slow"]), "slow", "", False) for _ in range(2)]
    await asyncio.sleep(0)
    questions.close()
    await asyncio.wait(slow, timeout=60)
    assert [one.cancelled() for one in slow] == [True, True]


HIGHER, LOWER = ([QUESTION, TURN, {"role": "user", "content": one}] for one in ("higher", "lower"))


class Patient(EndpointEnvironment):
    """An agent in this process, which asks twice, the second time as ``second`` does."""

    def __init__(self, task: Task, settings: Any) -> None:
        super().__init__(task, {})
        self.go_on = asyncio.Event()
        self.found: list[Any] = []

    async def run(self, base_url: str, key: str) -> float | None:
        """Ask for the first turn, then again."""
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(base_url + "/", headers=headers) as self.session:
            await self.post(QUESTION)
            await self.second()
        return None

    async def post(self, *messages: dict[str, Any], **headers: str) -> None:
        """Send a request; note its status and its text."""
        body = {"messages": messages}
        async with self.session.post("chat/completions", json=body, headers=headers) as answer:
            self.found.append((answer.status, await answer.text()))

    async def until_asked(self, questions: int) -> None:
        """Wait for so many questions so far."""
        while self._questions._asked.total() != questions:
            await asyncio.sleep(0)

    async def until_left(self) -> None:
        """Wait until a client has gone before its answer."""
        while not self._questions.problem.startswith("Its client gave up a request"):
            await asyncio.sleep(0)
        self._questions.problem = ""

    async def second(self) -> None:
        """Ask the second question."""
        await self.post(*HIGHER)


async def played(kind: type[Patient], goes_on: bool = True) -> list[Any]:
    """What an agent of two turns has found; the second comes when its ``go_on`` is set."""
    agent = kind(TASK, {})
    if goes_on:
        agent.go_on.set()
    replies = [await agent.step("3")]
    await agent.go_on.wait()
    assert [*replies, await agent.step("6")] == [Reply("higher"), Reply(None)]
    return agent.found


MARK = {"x-stainless-retry-count": "1"}


async def test_only_an_episodes_key_opens_the_endpoint() -> None:
    class Curious(Patient):
        async def second(self) -> None:
            for path in ("models", "nothing"):
                for headers in ({}, {"Authorization": "Bearer other"}):
                    async with self.session.get(path, headers=headers) as answer:
                        self.found.append((answer.status, await answer.text()))
            self.found.append((0, self._questions.problem))
            await super().second()

    _, models, unknown, absent, stranger, (_, problem), _ = await played(Curious)
    assert [one[0] for one in (models, unknown, absent, stranger)] == [200, 401, 404, 401]
    assert [one["id"] for one in json.loads(models[1])["data"]] == ["policy"]
    assert "GET /v1/nothing is not there; offered here are POST to /v1/chat/completions" in problem


@pytest.mark.parametrize("headers", [MARK, {"Idempotency-Key": "the second"}])
async def test_a_question_whose_client_has_gone_may_be_asked_again(headers: dict[str, str]) -> None:
    """Clients have limits of time, and ask again; the model's turn may take longer. (With a mark of a retry,
    also after the answer: tests/support/unruly_agent.py.)"""

    class Impatient(Patient):
        async def second(self) -> None:
            first = {} if headers is MARK else headers
            gone = asyncio.ensure_future(self.post(*HIGHER, **first))
            await self.until_asked(2)
            gone.cancel()
            await self.until_left()
            again = asyncio.ensure_future(self.post(*HIGHER, **headers))
            await asyncio.sleep(0.05)
            self.go_on.set()
            await again
            await self.post(*HIGHER, **headers)
            await self.until_asked(2)

    found = await played(Impatient, goes_on=False)
    said = [json.loads(text)["choices"][0]["message"]["content"] for _, text in found]
    assert said == ["3", "6", "6"]


async def test_questions_at_a_time_are_branches() -> None:
    """The same one without a mark, too: it wants a second answer."""

    class Twice(Patient):
        async def second(self) -> None:
            asked = []
            for number, messages in enumerate((HIGHER, HIGHER, LOWER), 2):
                asked.append(asyncio.ensure_future(self.post(*messages)))
                await self.until_asked(number)
            self.go_on.set()
            await asyncio.gather(*asked)

    agent = Twice(TASK, {})
    replies = [await agent.step("3")]
    await agent.go_on.wait()
    replies += [await agent.step(turn) for turn in ("6", "7", "8")]
    assert replies[0] == Reply("higher")
    said = [reply.context.messages[-1]["content"] for reply in replies[1:3] if reply.context]
    assert (said, replies[3]) == (["higher", "lower"], Reply(None))
    assert [status for status, _ in agent.found] == [200] * 4
    texts = [json.loads(text)["choices"][0]["message"]["content"] for _, text in agent.found]
    assert sorted(texts) == ["3", "6", "7", "8"]


COMMENT, PING = b": the model answers\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'


@pytest.mark.parametrize(
    ("path", "asked", "ping", "end"),
    [
        ("chat/completions", {"messages": HIGHER}, b" ", b'"total_tokens": 0}}'),
        ("chat/completions", {"messages": HIGHER, "stream": True}, COMMENT, b"data: [DONE]\n\n"),
        ("responses", {"input": HIGHER, "stream": True}, COMMENT, b'"total_tokens": 0}}}\n\n'),
        ("messages", {"messages": HIGHER, "stream": True}, PING, b'data: {"type": "message_stop"}\n\n'),
    ],
)
async def test_pings_keep_a_connection_alive(
    path: str, asked: dict[str, Any], ping: bytes, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's limit is on silence. JSON may begin with white space; streams have comments, or pings. A
    stream whose client has gone is asked for again, whole or as a stream, and is the same turn."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.01)

    class Slow(Patient):
        async def second(self) -> None:
            async with self.session.post(path, json=asked) as answer:
                self.found.append(await answer.content.readexactly(len(2 * ping)))
            await self.until_left()
            other = {**asked, "stream": not asked.get("stream")}
            async with self.session.post(path, json=other, headers=MARK) as answer:
                await answer.content.readexactly(1)
                self.go_on.set()
            async with self.session.post(path, json=asked, headers=MARK) as answer:
                self.found.append((await answer.read()).lstrip())
            await self.until_asked(2)

    (_, pings, text) = await played(Slow, goes_on=False)
    assert pings == 2 * ping
    assert b'"6"' in text
    assert text.endswith(end)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_refusal_after_pings(is_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is sent: the client loses its connection, asks again, and reads why."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.01)

    class Late(Patient):
        async def _answer(self, request: chat.ChatRequest) -> SampledTurn:
            if request.messages[-1]["content"] != "lower":
                return await super()._answer(request)
            await self.go_on.wait()
            raise chat.Refused(409, "it comes too late")

        async def second(self) -> None:
            first = asyncio.ensure_future(super().second())
            await self.until_asked(2)
            body = {"messages": LOWER, "stream": is_stream}
            async with self.session.post("chat/completions", json=body) as answer:
                await answer.content.readexactly(1)
                self.go_on.set()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.text()
            await first
            await self.post(*LOWER)

    found = await asyncio.wait_for(played(Late, goes_on=False), 60)
    assert "it comes too late" in found[-1][1]
