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


def asked(bodies: list[tuple[Any, bool]], turns: list[str], **settings: Any) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []

    class Own(Raw):
        def __init__(self, task: Task, _: Any) -> None:
            super().__init__(task, {})

        async def run(self, base_url: str, key: str) -> float | None:
            assert base_url.startswith("http://127.0.0.1:")
            self.settings = {"bodies": bodies, "found": found}
            return await super().run(base_url, key)

    play(Own, TASK, settings, turns)
    return found


def test_requests_by_hand() -> None:
    """Calls in OpenAI's form, a tool's answer as the observation, and a reason for each refusal."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    question = TASK.messages[0]
    second = [question, {"role": "assistant", "content": "Hm."}, {"role": "tool", "content": "2"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Guess my number."}]}]
    found = asked(
        [
            ({"messages": [question]}, False),
            ("{", True),
            ({"messages": "x"}, True),
            ({"messages": [question], "n": 2}, True),
            ({"messages": [question], "logprobs": True}, True),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, True),
            ({"messages": second}, True),
            ({"messages": parts}, True),
            ({"messages": [*second[:2], question]}, True),
            ({"messages": second}, True),
        ],
        ["I add. " + call, "Done."],
    )
    assert [status for status, _ in found] == [401, 400, 400, 400, 400, 400, 409, 200, 409, 200]
    reasons = [answer["error"]["message"] for status, answer in found if status != 200]
    assert reasons == [
        "no episode has this key",
        "the request is no JSON",
        "the request has no list of messages",
        "n=2 is not offered here: leave it out",
        "logprobs=True is not offered here: leave it out",
        "a message has content that is no text",
        "it rewrites what was said before, or does not begin with the dataset's prompt",
        "it adds a message that is no tool's: set `role` in a subclass",
    ]
    first, last = (answer["choices"][0] for status, answer in found if status == 200)
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["content"] == "I add."
    assert first["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert last["message"] == {"role": "assistant", "content": "Done."}
