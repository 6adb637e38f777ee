"""The same tasks in an environment that begins two conversations, of which a policy sees one."""

import verifiers.v1 as vf
from guess_taskset import GuessEnvConfig, GuessTaskset


class TwiceEnv(vf.Env[GuessEnvConfig]):
    """Asks two times."""

    async def run(self, task, agents):
        """Two answers to one prompt."""
        await agents.player.run(task)
        await agents.player.run(task)


__all__ = ["GuessTaskset", "TwiceEnv"]
