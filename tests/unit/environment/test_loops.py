"""Loops and agent programs as environments: by hand, over kills, and what they may not do."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from bapo_megatron.environment import Reply, Task
from bapo_megatron.environment.adapters import agent_program, conversation
from bapo_megatron.environment.adapters.endpoint import EndpointEnvironment
from bapo_megatron.environment.adapters.loop import Ask, LoopEnvironment
from tests.support.scripted_episodes import check_durable, play

pytestmark = pytest.mark.integration

AGENT = str(Path(__file__).parents[2] / "support/agent_program.py")
TASK = Task([{"role": "user", "content": "Guess my number."}], ground_truth="6")


class Guessing(LoopEnvironment):
    """A loop by hand."""

    async def play(self, ask: Ask) -> float | None:
        """Say higher or lower; half the reward for each question."""
        turn, asked = await ask(self.settings.get("opening")), 1
        while turn != "6":
            await asyncio.sleep(0)
            if turn == "quit":
                raise RuntimeError("no more")
            turn, asked = await ask("higher" if int(turn) < 6 else "lower"), asked + 1
        return 1 / asked


def test_a_loop_over_kills() -> None:
    replies = check_durable(Guessing, TASK, {}, ["3", "9", "6"])
    assert replies == [Reply("higher"), Reply("lower"), Reply(None, reward=1 / 3)]
    assert check_durable(Guessing, TASK, {"opening": "Guess my number."}, ["6"]) == [Reply(None, reward=1.0)]


def test_a_loop_that_asks_something_else_first_is_refused() -> None:
    with pytest.raises(
        ValueError, match="asks first 'Guess.', and the prompt's last message is 'Guess my num"
    ):
        play(Guessing, TASK, {"opening": "Guess."}, ["6"])


def test_a_loop_that_asks_nothing_is_refused() -> None:
    class Mute(LoopEnvironment):
        async def play(self, ask: Ask) -> float | None:
            return 1.0

    with pytest.raises(ValueError, match="ended before it asked the model"):
        play(Mute, TASK, {}, ["6"])


def test_what_a_loop_raises_is_raised_by_its_step() -> None:
    with pytest.raises(RuntimeError, match="no more"):
        play(Guessing, TASK, {}, ["3", "quit"])


def test_a_closed_loop_ends() -> None:
    ended: list[str] = []

    class Careful(Guessing):
        async def play(self, ask: Ask) -> float | None:
            try:
                return await super().play(ask)
            finally:
                ended.append("closed")

    assert play(Careful, TASK, {}, ["3"]) == [Reply("higher")]
    assert ended == ["closed"]


def test_two_questions_at_a_time_are_refused() -> None:
    """The second would get the turn that answers the first, and all behind it those of others."""

    class Both(LoopEnvironment):
        async def play(self, ask: Ask) -> float | None:
            await ask(None)
            await asyncio.gather(ask("one"), ask("two"))
            return 1.0

    with pytest.raises(RuntimeError, match="asks while its last question has no answer, or was given up"):
        play(Both, TASK, {}, ["3", "4", "5"])


def test_a_question_that_was_given_up_is_the_last() -> None:
    class Hasty(LoopEnvironment):
        async def play(self, ask: Ask) -> float | None:
            await ask(None)
            first = asyncio.ensure_future(ask("one"))
            await asyncio.sleep(0)
            first.cancel()
            await ask("two")
            return 1.0

    with pytest.raises(RuntimeError, match="asks while its last question has no answer, or was given up"):
        play(Hasty, TASK, {}, ["3", "4", "5"])


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
def test_a_loop_that_leaves_without_an_exception_fails_alone(error: BaseException) -> None:
    """Its step would wait for its whole limit, or the worker would end with all that it holds."""

    class Leaves(LoopEnvironment):
        async def play(self, ask: Ask) -> float | None:
            await ask(None)
            raise error

    with pytest.raises(RuntimeError, match=rf"play\(\) ended with {type(error).__name__}"):
        play(Leaves, TASK, {}, ["3"])


# --- agent programs ------------------------------------------------------------------------------


def program(*arguments: str, **settings: Any) -> dict[str, Any]:
    return {"command": [sys.executable, AGENT, *arguments], **settings}


def test_a_program_over_kills() -> None:
    """Its requests are turns, what they add is the observation, its last line is the reward."""
    replies = check_durable(EndpointEnvironment, TASK, program(), ["3", "9", "6"])
    assert replies == [Reply("higher"), Reply("lower"), Reply(None, reward=1 / 3)]
    assert play(EndpointEnvironment, TASK, program("silent"), ["6"]) == [Reply(None)]


@pytest.mark.parametrize("argument", ["spied", "prints"])
def test_what_a_program_runs_cannot_read_its_task_again(argument: str) -> None:
    """It holds the ground truth. Standard input is inherited, into sandboxes too, and a file has a start."""
    assert play(EndpointEnvironment, TASK, program(argument), ["6"]) == [Reply(None, reward=1.0)]


def test_a_program_that_never_reads_its_task_holds_nothing_up() -> None:
    long = replace(TASK, extra_info={"text": "x" * 1_000_000})
    with pytest.raises(ValueError, match="ended before it asked the model"):
        play(EndpointEnvironment, long, {"command": [sys.executable, "-c", "pass"]}, ["6"])


def test_a_program_reaches_the_endpoint_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would see the turns and the key of the episode."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert play(EndpointEnvironment, TASK, program(), ["6"]) == [Reply(None, reward=1.0)]


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("rewrites", "ended with 1. Its request was refused: it rewrites what was said before"),
        ("streams", "ended with 1"),
        ("tools", "ended with 1. Its request was refused: it has tools, and tools_in_prompts"),
        ("dies", "ended with 3"),
    ],
)
def test_programs_that_are_refused(argument: str, problem: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=problem):
        play(EndpointEnvironment, TASK, program(argument), ["3", "6"])


def test_tools_that_the_prompts_describe() -> None:
    settings = program("tools", tools_in_prompts=True)
    assert play(EndpointEnvironment, TASK, settings, ["6"]) == [Reply(None, reward=1.0)]


def test_a_program_without_a_reward_is_named() -> None:
    with pytest.raises(RuntimeError, match="has printed 'done' last, which is no reward: print a number"):
        play(EndpointEnvironment, TASK, program("chats"), ["6"])


def first(code: str) -> dict[str, Any]:
    """The settings of a program that runs ``code``, and then plays."""
    play_it = f"import runpy; runpy.run_path({AGENT!r}, run_name='__main__')"
    return {"command": [sys.executable, "-c", f"import os; {code}; {play_it}"]}


def test_of_a_long_output_the_end_is_read() -> None:
    long = first("os.write(1, b'x' * 10**6)")
    assert play(EndpointEnvironment, TASK, long, ["6"]) == [Reply(None, reward=1.0)]


def test_no_address_of_a_real_service_is_left_to_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """langchain and older litellm read its other name."""
    monkeypatch.setenv("OPENAI_API_BASE", "https://api.example/v1")
    same = first("assert os.environ['OPENAI_API_BASE'] == os.environ['OPENAI_BASE_URL']")
    assert play(EndpointEnvironment, TASK, same, ["6"]) == [Reply(None, reward=1.0)]


def _is_waiting(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has ended: a child of another test
        return "waits" in process.cmdline()
    return False


def test_a_program_ends_with_its_episode(tmp_path: Path) -> None:
    async def closed_early() -> list[psutil.Process]:
        environment = EndpointEnvironment(TASK, program("waits"))
        step = asyncio.create_task(environment.step("3"))
        found: list[psutil.Process] = []
        while len(found) < 2:  # its guardian, and itself
            await asyncio.sleep(0.01)
            found = [one for one in psutil.Process().children(True) if _is_waiting(one)]
        environment.close()
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(environment._playing, return_exceptions=True)  # type: ignore[arg-type]
        return found

    assert not psutil.wait_procs(asyncio.run(closed_early()), timeout=60)[1]


class Raw(EndpointEnvironment):
    """An agent in this process, for requests by hand."""

    role = "tool"

    async def run(self, base_url: str, key: str) -> float | None:
        """Send each of the settings' bodies; note the answers."""
        found = self.settings["found"]
        async with aiohttp.ClientSession() as session:
            for body, use in self.settings["bodies"]:
                headers = {"Authorization": f"Bearer {key if use else 'guessed'}"}
                data = body if isinstance(body, str) else json.dumps(body)
                async with session.post(f"{base_url}/chat/completions", data=data, headers=headers) as answer:
                    found.append((answer.status, await answer.json()))
        return None


def asked(
    bodies: list[tuple[Any, bool]], turns: list[str], seen: list[Any] | None = None, **settings: Any
) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []

    class Own(Raw):
        def __init__(self, task: Task, _: Any) -> None:
            super().__init__(task, settings)

        async def run(self, base_url: str, key: str) -> float | None:
            assert base_url.startswith("http://127.0.0.1:")
            self.settings = {"bodies": bodies, "found": found}
            return await super().run(base_url, key)

    replies = play(Own, TASK, settings, turns)
    if seen is not None:
        seen += replies
    return found


QUESTION = TASK.messages[0]
TURN = {"role": "assistant", "content": "Hm."}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_requests_by_hand() -> None:
    """Calls in OpenAI's form, a tool's answer as the observation, and a reason for each refusal."""
    second = [QUESTION, TURN, {"role": "tool", "content": "2"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Guess my number."}]}]
    found = asked(
        [
            ({"messages": [QUESTION]}, False),
            ("{", True),
            ({"messages": "x"}, True),
            ({"messages": [QUESTION], "n": 2}, True),
            ({"messages": [QUESTION], "logprobs": True}, True),
            ({"messages": ["hello"]}, True),
            ({"messages": [{"role": "user", "content": 5}]}, True),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, True),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, True),
            ({"messages": second}, True),
            ({"messages": [{"role": "system", "content": "Be brief."}, QUESTION]}, True),
            ({"messages": parts}, True),
            ({"messages": parts}, True),
            ({"messages": second[:2]}, True),
            ({"messages": [*second[:2], QUESTION]}, True),
            ({"messages": second}, True),
            ({"messages": second[2:]}, True),
        ],
        ["I add. " + CALL, "Done."],
    )
    assert [status for status, _ in found] == [401, *[400] * 8, 409, 409, 200, 409, 409, 409, 200, 409]
    reasons = [answer["error"]["message"] for status, answer in found if status != 200]
    rewrites = "it rewrites what was said before, or does not begin with the dataset's prompt: message 0 is "
    assert reasons == [
        "no episode has this key",
        "the request is no JSON",
        "the request has no list of messages",
        "n=2 is not offered here: leave it out",
        "logprobs=True is not offered here: leave it out",
        "message 0 is no object with a role",
        "message 0 has a content that is neither text nor a list of parts",
        "message 0 has content that is no text",
        "message 0 has content that is no text",
        "it begins with more than the dataset's prompt: the model's turn",
        f"{rewrites}system: 'Be brief.', and was user: 'Guess my number.'",
        "it asks the same again, and has the answer: a turn is sampled once",
        "it adds no message to the conversation",
        "it adds a message that is no tool's: set `role` in a subclass, or leave out user: 'Guess my "
        "number.'",
        f"{rewrites}tool: '2', and was user: 'Guess my number.'",
    ]
    first, last = (answer["choices"][0] for status, answer in found if status == 200)
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["content"] == "I add."
    assert first["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert last["message"] == {"role": "assistant", "content": "Done."}


def test_answers_and_calls_have_names_of_their_own() -> None:
    """Programs keep answers and calls by their ids, and add up what they used."""
    tool = {"role": "tool", "content": "2"}
    bodies = [{"messages": [QUESTION]}, {"messages": [QUESTION, TURN, tool, tool]}]
    seen: list[Any] = []
    found = [answer for _, answer in asked([(one, True) for one in bodies], [CALL + CALL, CALL], seen)]
    assert [reply.observation for reply in seen] == [["2", "2"], None], "each result is a message"
    assert [one["id"] for one in found] == ["chatcmpl-0", "chatcmpl-1"]
    calls = [call["id"] for one in found for call in one["choices"][0]["message"]["tool_calls"]]
    assert calls == ["call_0_0", "call_0_1", "call_1_0"]
    assert found[0]["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def test_a_call_that_cannot_be_read_stays_in_the_text() -> None:
    broken = '<tool_call>{"name": </tool_call>'
    [(_, answer)] = asked([({"messages": [QUESTION]}, True)], [f"I add. {CALL} {broken}"])
    message = answer["choices"][0]["message"]
    assert message["content"] == f"I add.  {broken}"
    assert len(message["tool_calls"]) == 1


def test_the_call_of_a_llama_model_is_one_where_the_request_has_tools() -> None:
    turn = '{"name": "add", "parameters": {"a": 1}}'
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    for tools, calls in (([tool], 1), ([], 0)):
        body = {"messages": [QUESTION], "tools": tools}
        [(_, answer)] = asked([(body, True)], [turn], tools_in_prompts=True)
        message = answer["choices"][0]["message"]
        assert len(message.get("tool_calls", [])) == calls
        assert message["content"] == ("" if calls else turn)


def test_what_a_request_cannot_have_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    agent_program._TOLD.clear()
    body = {"messages": [QUESTION], "stop": ["\n"], "max_tokens": None, "tool_choice": "auto", "top_p": 1}
    for _ in range(2):
        asked([(body, True)], ["3"])
    assert capfd.readouterr().err == (
        "environment: the agent's requests have stop=['\\n'], which does nothing here: the run's settings "
        "say how its model samples\n"
    )


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

    async def post(self, *messages: dict[str, Any]) -> None:
        """Send a request; note its status, its text, and whether a client should ask again."""
        async with self.session.post("chat/completions", json={"messages": messages}) as answer:
            again = answer.headers.get("x-should-retry")
            self.found.append((answer.status, await answer.text(), again))

    async def second(self) -> None:
        """Ask the second question."""
        await self.post(QUESTION, TURN, {"role": "user", "content": "higher"})


async def two_turns(agent: Patient) -> list[Reply]:
    """Its replies; the second turn of the model comes when ``go_on`` is set."""
    replies = [await agent.step("3")]
    await agent.go_on.wait()
    return [*replies, await agent.step("6")]


async def test_a_question_whose_client_has_gone_may_be_asked_again() -> None:
    """Clients have limits of time, and ask again; the model's turn may take longer."""

    class Impatient(Patient):
        async def second(self) -> None:
            gone = asyncio.ensure_future(super().second())
            while not self._conversation._waits.locked():
                await asyncio.sleep(0)
            gone.cancel()
            while self._conversation._waits.locked():
                await asyncio.sleep(0)
            again = asyncio.ensure_future(super().second())
            while not self._conversation._waits.locked():
                await asyncio.sleep(0)
            self.go_on.set()
            await again

    agent = Impatient(TASK, {})
    assert await two_turns(agent) == [Reply("higher"), Reply(None)]
    found = agent.found
    assert [status for status, _, _ in found] == [200, 200]
    assert json.loads(found[1][1])["choices"][0]["message"]["content"] == "6"


async def test_another_api_is_named() -> None:
    class Responses(Patient):
        async def second(self) -> None:
            async with self.session.post("responses", json={"input": "higher"}) as answer:
                self.found.append((answer.status, await answer.json()))
            await super().second()

    agent = Responses(TASK, {})
    agent.go_on.set()
    assert await two_turns(agent) == [Reply("higher"), Reply(None)]
    (_, (status, answer), _) = agent.found
    assert status == 404
    assert answer["error"]["message"] == (
        "POST /v1/responses is not there; POST /v1/chat/completions alone is offered here: set the client to "
        "chat completions"
    )


def test_a_refusal_that_was_mended_is_not_the_reason_of_a_later_end() -> None:
    class Mended(Patient):
        async def second(self) -> None:
            await self.post(TURN)
            await super().second()
            raise RuntimeError(f"broken. {self._refusal}".strip())

    async def played() -> list[Reply]:
        agent = Mended(TASK, {})
        agent.go_on.set()
        return await two_turns(agent)

    with pytest.raises(RuntimeError, match=r"^broken\.$"):
        asyncio.run(asyncio.wait_for(played(), 60))


async def test_one_question_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same one, too: who asks twice at a time wants two answers. OpenAI's client is told not to ask
    again, which it does after 409."""
    monkeypatch.setattr(conversation, "TAKE_OVER_S", 0.01)

    class Twice(Patient):
        async def second(self) -> None:
            first = asyncio.ensure_future(super().second())
            while not self._conversation._waits.locked():
                await asyncio.sleep(0)
            await super().second()
            await self.post(QUESTION, TURN, {"role": "user", "content": "lower"})
            self.go_on.set()
            await first

    agent = Twice(TASK, {})
    assert await two_turns(agent) == [Reply("higher"), Reply(None)]
    found = agent.found
    assert [(status, again) for status, _, again in found] == [
        (200, None),
        (409, "false"),
        (409, "false"),
        (200, None),
    ]
    assert "one conversation: ask one question at a time" in found[1][1]


async def test_blanks_keep_a_connection_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's limit is on silence; JSON may begin with white space."""
    monkeypatch.setattr(agent_program, "KEEP_ALIVE_S", 0.01)

    class Slow(Patient):
        async def second(self) -> None:
            body = {"messages": [QUESTION, TURN, {"role": "user", "content": "higher"}]}
            async with self.session.post("chat/completions", json=body) as answer:
                self.found.append(await answer.content.readexactly(2))
                self.go_on.set()
                self.found.append(json.loads(await answer.text()))

    agent = Slow(TASK, {})
    assert await two_turns(agent) == [Reply("higher"), Reply(None)]
    (_, blanks, answer) = agent.found
    assert blanks == b"  "
    assert answer["choices"][0]["message"]["content"] == "6"
