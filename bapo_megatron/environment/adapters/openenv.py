"""Environment on an OpenEnv server: an episode is a session, and each model turn is an action.

    environment.function = "bapo_megatron.environment.adapters.openenv:OpenEnv"
    environment.settings = {"url": "http://localhost:8000", "action": "message", "observation": "text"}

``extra_info.reset`` of a dataset row has the arguments of the server's reset. After the loss of a session the
actions are replayed in a new one and must give the same observations: a server with random draws needs a
seed, ``{"reset": {"seed": 3}}``. The server's step rewards are summed. Tested with openenv-core 0.3.0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openenv.core import GenericEnvClient
from websockets.exceptions import ConnectionClosed

from bapo_megatron.environment import Environment, Reply, Task
from bapo_megatron.environment.settings import OpenEnvSettings
from bapo_megatron.environment.tools.calls import answer_part


class OpenEnv(Environment):
    """Episode on an OpenEnv server. ``step`` is async, so one worker holds thousands of episodes."""

    role = "user"
    settings_type = OpenEnvSettings

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        super().__init__(task, settings)
        self._settings = OpenEnvSettings(**settings)
        self._client: Any = None
        self._acted: list[tuple[str, str]] = []
        """Actions so far, with the observation after each."""

    async def step(self, turn: str) -> Reply:
        """Send the action to the session; the first step opens it. Raises ValueError if a replay differs."""
        action = answer_part(turn).strip()
        try:
            reply = await self._reply(action)
        except (ConnectionError, ConnectionClosed):
            if self._client is None:  # no new session opened
                raise
            await self.close()
            reply = await self._reply(action)
        if isinstance(reply.observation, str):
            self._acted.append((action, reply.observation))
        return reply

    async def _reply(self, action: str) -> Reply:
        """Return the server's reply to an action, in a session that has replayed the earlier ones."""
        if self._client is None:
            client = GenericEnvClient(base_url=self._settings.url)
            await client.connect()
            self._client = client
            await client.reset(**self.task.extra_info.get("reset", {}))
            for action_before, shown in self._acted:
                if (again := (await self._sent(action_before)).observation) != shown:
                    raise ValueError(
                        f"a session was lost, and a new one answers {str(again)[:100]!r} in place of "
                        f"{shown[:100]!r}: give extra_info.reset a seed"
                    )
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
