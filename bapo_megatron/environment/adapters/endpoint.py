"""Environment that runs an agent program, in any language, and makes the policy its language model.

    environment.function = "bapo_megatron.environment.adapters.endpoint:EndpointEnvironment"
    environment.settings = {"command": ["python", "agent.py"]}

A worker starts the program, with the task as JSON on stdin, and in environment variables the address and key
of a loopback HTTP endpoint, where the policy answers OpenAI's chat completions and responses and Anthropic's
messages. Each request is a model turn; messages that it adds to the conversation are the observation. The
reward is in the file named by BAPO_REWARD_FILE, else the last printed word or, by a setting, 1 for exit code
0 and 0 for others; without any, ``reward.function`` judges.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from bapo_megatron.environment import PROMPT_TOOLS, SampledTurn
from bapo_megatron.environment.adapters import agent_program
from bapo_megatron.environment.adapters.agent_program import REWARD_FILE, AgentEnd, keep_log, log_path
from bapo_megatron.environment.adapters.conversation import Conversation
from bapo_megatron.environment.adapters.loop import Ask, LoopEnvironment
from bapo_megatron.environment.protocols import server
from bapo_megatron.environment.protocols.chat import ChatRequest
from bapo_megatron.environment.protocols.server import EpisodeQuestions
from bapo_megatron.environment.settings import AgentSettings
from bapo_megatron.errors import NO_REQUEST, ProgramError

_SHOWN = 500


class EndpointEnvironment(LoopEnvironment):
    """Episode of one agent program, which starts at the first turn; its end ends the episode. For an agent
    without a process override ``run``, which gets the endpoint's address and key and returns the reward."""

    settings_type = AgentSettings
    wants_tokens = True

    async def run(self, base_url: str, key: str) -> float | None:
        """Run the agent against the endpoint. Return its reward, or None. Raises ProgramError if it fails."""
        task, variables = agent_program.given_task(self.task), agent_program.given_variables(base_url, key)
        keeps_log = self.logs_dir is not None
        end = await agent_program.run_agent(
            self.settings["command"],
            task,
            variables,
            self.settings.get("memory_mb"),
            keeps_errors=keeps_log,
            log=self._keep_log if keeps_log else None,
        )
        return self._reward(end)

    def _keep_log(self, end: AgentEnd) -> None:
        keep_log(Path(self.logs_dir or ""), self.task.episode, end.log(self.settings["command"]))

    def _reward(self, end: AgentEnd) -> float | None:
        by_exit_code = self.settings.get("reward") == "exit_code"
        if not self._turns and not self._questions.problem:
            raise self._failure(end, NO_REQUEST)
        if not self._turns or (end.code != 0 and not by_exit_code):
            raise self._failure(end)
        last = end.reward_file or ("" if by_exit_code else end.output)
        if by_exit_code and not last:
            return float(end.code == 0)
        word = (last.split() or [""])[-1]
        try:
            return float(word) if word else None
        except ValueError:
            problem = (
                f"wrote {word[:80]!r}, which is not a reward: write a number into the file of {REWARD_FILE}, "
                "print it at the end, or print nothing on stdout"
            )
            raise self._failure(end, problem) from None

    def _failure(self, end: AgentEnd, problem: str = "") -> ProgramError:
        parts = [f"{self.settings['command']} ended with {end.code}{problem and f' and {problem}'}."]
        if self._questions.problem:
            parts.append(f"{self._questions.problem}.")
        if self.logs_dir is not None:
            parts.append(f"Its output is in {log_path(Path(self.logs_dir), self.task.episode)}.")
        return ProgramError(" ".join([*parts, end.errors[-_SHOWN:].strip()]).strip())

    async def play(self, ask: Ask) -> float | None:
        """Open an endpoint for the episode, and return the reward of ``run``."""
        self._takes_tools = bool(self.settings.get("tools_in_prompts"))
        self._row_tools = [] if self._takes_tools else self.task.extra_info.get(PROMPT_TOOLS, [])
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
