"""Environment that runs an agent program, in any language, and makes the policy its language model.

    environment.function = "bapo_megatron.environment.adapters.endpoint:EndpointEnvironment"
    environment.settings = {"command": ["python", "agent.py"]}

The program gets the task as JSON on stdin, and in its environment variables the address and key of a loopback
HTTP endpoint: a server of OpenAI's chat completions and responses and of Anthropic's messages, which the
policy answers. Each request is a model turn; messages that it adds to the conversation are the observation.
The reward is the content of the BAPO_REWARD_FILE file, the exit code, or the last printed word; without any,
``reward.function`` judges.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from bapo_megatron.environment import PROMPT_TOOLS, SampledTurn
from bapo_megatron.environment.adapters import agent_program
from bapo_megatron.environment.adapters.agent_program import REWARD_FILE, AgentEnd, keep_log
from bapo_megatron.environment.adapters.conversation import Conversation
from bapo_megatron.environment.adapters.loop import Ask, LoopEnvironment
from bapo_megatron.environment.protocols import server
from bapo_megatron.environment.protocols.chat import ChatRequest
from bapo_megatron.environment.protocols.server import EpisodeQuestions
from bapo_megatron.environment.settings import AgentSettings

_SHOWN = 500


class EndpointEnvironment(LoopEnvironment):
    """Episode of one agent program, which runs from the first turn to its own end. For an agent without a
    process override ``run``, which gets the endpoint's address and key and returns the reward or None."""

    settings_type = AgentSettings
    wants_tokens = True

    async def run(self, base_url: str, key: str) -> float | None:
        """Run the agent against the endpoint. Returns its reward, or None."""
        command, logs = self.settings["command"], self.logs_dir
        task, variables = agent_program.given_task(self.task), agent_program.given_variables(base_url, key)
        memory_mb = self.settings.get("memory_mb")
        end = await agent_program.run_agent(
            command, task, variables, memory_mb, keeps_errors=logs is not None
        )
        if logs is not None:
            await asyncio.to_thread(keep_log, Path(logs), self.task.episode, end.log(command))
        return self._reward(end)

    def _reward(self, end: AgentEnd) -> float | None:
        command, by_exit_code = self.settings["command"], self.settings.get("reward") == "exit_code"
        if end.code != 0 and not by_exit_code:
            said = f"{self._questions.problem} {end.errors[-_SHOWN:]}".strip()
            raise RuntimeError(f"{command} ended with {end.code}. {said}".strip())
        last = end.reward_file or ("" if by_exit_code else end.output)
        if by_exit_code and not last:
            return float(end.code == 0)
        word = (last.split() or [""])[-1]
        try:
            return float(word) if word else None
        except ValueError:
            raise RuntimeError(
                f"{command} has printed {word[:80]!r} last, which is not a reward: write a number into "
                "the file "
                f"of {REWARD_FILE}, print it at the end, or print nothing on stdout"
            ) from None

    async def play(self, ask: Ask) -> float | None:
        """Give the program an endpoint while it runs."""
        self._takes_tools = bool(self.settings.get("tools_in_prompts"))
        self._row_tools = self.task.extra_info.get(PROMPT_TOOLS, [])
        tools = [*self.tools, *self._row_tools]
        self._conversation = Conversation(self.task.messages, self.role, self.question, tools)
        self._questions = EpisodeQuestions(self._answer)
        key = secrets.token_hex(16)
        try:
            return await self.run(await server.opened(key, self._questions), key)
        finally:
            server.closed(key)

    async def _answer(self, request: ChatRequest) -> SampledTurn:
        of_prompt = self._takes_tools or not (request.tools or self._row_tools)
        return await self._conversation.answer(request.messages, None if of_prompt else request.tools)
