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

import json
import secrets
from dataclasses import asdict

from bapo_megatron.environment import SampledTurn
from bapo_megatron.environment.adapters import agent_program
from bapo_megatron.environment.adapters.conversation import Conversation
from bapo_megatron.environment.adapters.loop import Ask, LoopEnvironment
from bapo_megatron.environment.protocols import server
from bapo_megatron.environment.protocols.chat import ChatRequest, Refused
from bapo_megatron.environment.protocols.server import EpisodeQuestions
from bapo_megatron.environment.settings import AgentSettings


class EndpointEnvironment(LoopEnvironment):
    """An episode that is a run of a program, made by the worker of environments.

    Subclass it with another ``run`` for an agent without a process.
    """

    settings_type = AgentSettings
    wants_tokens = True

    async def run(self, base_url: str, key: str) -> float | None:
        """Run the agent against the endpoint; its reward, or None."""
        command = self.settings["command"]
        # langchain and older litellm read OPENAI_API_BASE, which may be that of a real service.
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": key}
        code, last = await agent_program.run_agent(command, json.dumps(asdict(self.task)).encode(), variables)
        if code != 0:
            raise RuntimeError(f"{command} ended with {code}. {self._questions.problem}".strip())
        try:
            return float(last) if last else None
        except ValueError:
            raise RuntimeError(
                f"{command} has printed {last[:80]!r} last, which is no reward: print a number at the end, "
                "or nothing on stdout"
            ) from None

    async def play(self, ask: Ask) -> float | None:
        """Give the program an endpoint for as long as it runs."""
        self._takes_tools = bool(self.settings.get("tools_in_prompts"))
        self._conversation = Conversation(self.task.messages, self.role, self.question)
        self._questions = EpisodeQuestions(self._answer)
        key = secrets.token_hex(16)
        try:
            return await self.run(await server.opened(key, self._questions), key)
        finally:
            server.closed(key)

    async def _answer(self, request: ChatRequest) -> SampledTurn:
        if request.tools and not self._takes_tools:
            raise Refused(400, "it has tools, and tools_in_prompts in environment.settings is not set")
        return await self._conversation.answer(request.messages)
