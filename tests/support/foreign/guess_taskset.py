"""A taskset of verifiers with an environment of its own: a game of guessing, with a draw in each answer."""

import random

import verifiers.v1 as vf

TRANSCRIPTS = []
"""What the reward has seen of each episode."""


class GuessData(vf.TaskData):
    """The number to find."""

    number: int = 0


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    """A game."""

    @vf.reward
    async def found(self, task, trace) -> float:
        """Whether the last turn is the number."""
        TRANSCRIPTS.append(trace.transcript)
        return float(trace.last_reply.strip() == str(task.number))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """Three games."""

    def load(self):
        """Draws, as some do that shuffle."""
        for number in (4, 6, 8):
            random.random()
            yield GuessTask(GuessData(prompt="Guess my number.", number=number), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    """One player."""

    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Says higher or lower until the number is found."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            while (guess := int(segment.last_reply)) != task.data.number:
                way = "higher" if guess < task.data.number else "lower"
                segment = await game.turn(f"{way} {random.random()}")
        game.trace.record_reward("speed", 0.5)


__all__ = ["GuessEnv", "GuessTaskset"]
