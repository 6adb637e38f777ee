"""Adapter of OpenEnv: an episode is a session of a server; a new session replays the actions after a kill.

    environment.function = "bapo_megatron.environment.adapters.openenv:OpenEnv"
    environment.settings = {"url": "http://localhost:8000", "action": "message", "observation": "text"}

A row's ``extra_info`` may have ``reset``, arguments of the server's reset: without ``{"seed": 3}`` or so a
server that draws cannot replay. A lost session is replayed in a new one. Rewards of the steps add up. Tried
with openenv-core 0.3.0. Workers of environments load it by that name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from openenv.core import GenericEnvClient
from websockets.exceptions import ConnectionClosed

from bapo_megatron.environment import Environment, Reply, Task
from bapo_megatron.environment.settings import OpenEnvSettings
from bapo_megatron.environment.tools.calls import answer_part


class OpenEnv(Environment):
    """An episode that is a session. Made by a worker of environments; async, so thousands wait in one."""

    role: ClassVar[Literal["tool", "user"]] = "user"
    settings_type = OpenEnvSettings

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        super().__init__(task, settings)
        self._settings = OpenEnvSettings(**settings)
        self._client: Any = None
        self._acted: list[tuple[str, str]] = []
        """Actions so far, and what was shown after each."""

    async def step(self, turn: str) -> Reply:
        """Act in the session, which the first step opens."""
        action = answer_part(turn).strip()
        try:
            reply = await self._reply(action)
        except (ConnectionError, ConnectionClosed):
            if self._client is None:  # a new one could not be opened
                raise
            await self.close()
            reply = await self._reply(action)
        if isinstance(reply.observation, str):
            self._acted.append((action, reply.observation))
        return reply

    async def _reply(self, action: str) -> Reply:
        """What the server answers to an action, in a session that has had those before it."""
        if self._client is None:
            client = GenericEnvClient(base_url=self._settings.url)
            await client.connect()
            self._client = client
            await client.reset(**self.task.extra_info.get("reset", {}))
            for action_before, shown in self._acted:
                if (again := (await self._sent(action_before)).observation) != shown:
                    difference = (
                        f"{str(again)[:100]!r} in place of {shown[:100]!r}: give extra_info.reset a seed"
                    )
                    raise ValueError(f"a session was lost, and a new one answers {difference}")
        return await self._sent(action)

    async def _sent(self, action: str) -> Reply:
        result = await self._client.step({self._settings.action: action})
        said = None if result.done else self._shown(result.observation)
        return Reply(said, reward=None if result.reward is None else float(result.reward))

    async def close(self) -> None:  # type: ignore[override]
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        field = self._settings.observation
        if not field:
            return json.dumps(observation, ensure_ascii=False, sort_keys=True)
        if not isinstance(observation.get(field), str):
            raise ValueError(
                f"the server's observation has no text {field!r}, but {sorted(observation)}: name one in "
                "`observation` of environment.settings"
            )
        return str(observation[field])
