"""Adapter of an agent program: any program that speaks OpenAI's chat completions, its requests as turns.

    environment.function = "bapo_megatron.environment.adapters.endpoint:EndpointEnvironment"
    environment.settings = {"command": ["python", "agent.py"]}

The program gets OPENAI_BASE_URL and OPENAI_API_KEY, an address on loopback and a key of this episode alone,
and the task as JSON on stdin. What a request adds to the conversation is the observation. The last word of
its stdout is its reward; without output ``reward.function`` judges. Sampled tokens are kept: a program that
rewrites what was said is refused (409), as are ``stream``, ``n`` and ``logprobs`` (400), and ``tools`` unless
the setting ``tools_in_prompts`` says that prompts describe them. Workers load it by that name.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

from bapo_megatron.environment.adapters import chat_server
from bapo_megatron.environment.adapters.agent_process import run_agent
from bapo_megatron.environment.adapters.chat_server import Refused, Said
from bapo_megatron.environment.adapters.loop import Ask, LoopEnvironment
from bapo_megatron.environment.tools.calls import settings_of


@dataclass(frozen=True)
class EndpointSettings:
    """``environment.settings`` of an agent program. Made for each episode."""

    command: list = field(default_factory=list)  # type: ignore[type-arg]
    """The program and its arguments."""
    tools_in_prompts: bool = False
    """Whether the prompts of the dataset describe the ``tools`` of the program's requests."""


class EndpointEnvironment(LoopEnvironment):
    """An episode that is a run of a program, made by the worker of environments.

    Subclass it with another ``run`` for an agent without a process.
    """

    async def run(self, base_url: str, key: str) -> float | None:
        """Run the agent against the endpoint; its reward, or None."""
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}
        task = json.dumps(asdict(self.task)).encode()
        code, last = await run_agent(self._own.command, task, variables)
        if code != 0:
            raise RuntimeError(f"{self._own.command} ended with {code}. {self._refusal}".strip())
        return float(last) if last else None

    async def play(self, ask: Ask) -> float | None:
        """Give the program an endpoint for as long as it runs."""
        self._own = settings_of(EndpointSettings, self.settings)
        self._policy, self._refusal, self._asking = ask, "", asyncio.Lock()
        self._history, self._has_asked = chat_server.said(self.task.messages), False
        key = secrets.token_hex(16)
        try:
            return await self.run(await chat_server.opened(key, self._answer), key)
        finally:
            chat_server.closed(key)

    async def _answer(self, body: dict[str, Any]) -> str:
        """The policy's turn for a request."""
        try:
            if body.get("tools") and not self._own.tools_in_prompts:
                raise Refused(400, "it has tools, and tools_in_prompts in environment.settings is not set")
            if self._asking.locked():
                raise Refused(409, "an episode is one conversation: ask one question at a time")
            async with self._asking:
                turn = await self._policy(self._new(chat_server.said(body["messages"])))
                self._history = [*self._history, ("assistant", "")]
                return turn
        except Refused as error:
            self._refusal = f"Its request was refused: {error}"
            raise

    def _new(self, messages: list[Said]) -> str | None:
        """What the messages add to the conversation; None for the first, which are the prompt."""
        old, new = messages[: len(self._history)], messages[len(self._history) :]
        if old != self._history or bool(new) != self._has_asked:
            raise Refused(
                409, "it rewrites what was said before, or does not begin with the dataset's prompt"
            )
        if any(role != self.role for role, _ in new):
            raise Refused(409, f"it adds a message that is no {self.role}'s: set `role` in a subclass")
        self._has_asked, self._history = True, messages
        return "\n".join(text for _, text in new) if new else None
