"""The same tasks in an environment that asks something else than their prompts."""

import verifiers.v1 as vf
from guess_taskset import GuessEnvConfig, GuessTaskset


class OtherEnv(vf.Env[GuessEnvConfig]):
    """Asks a question of its own."""

    async def run(self, task, agents):
        await agents.player.run(task.with_data(prompt="Guess again."))


__all__ = ["GuessTaskset", "OtherEnv"]
