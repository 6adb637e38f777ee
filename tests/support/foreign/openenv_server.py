"""An OpenEnv server on a port that it prints: a game of guessing, whose number comes from the seed."""

import random
import socket

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A number as text."""

    message: str


class Hint(Observation):
    """What the player is told."""

    text: str = ""
    asked: int = 0


class Game(Environment):
    """One session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.draw = random.Random(seed)
        self.number, self.asked = self.draw.randint(1, 9), 0
        return Hint(text="Guess my number.")

    def step(self, action, **_):
        """Half a point for each hint less."""
        self.asked += 1
        guess = int(action.message)
        if guess == self.number:
            return Hint(text="Right.", asked=self.asked, done=True, reward=1 / self.asked)
        way = "higher" if guess < self.number else "lower"
        return Hint(text=f"{way} {self.draw.random()}", asked=self.asked)

    @property
    def state(self):
        return State(step_count=self.asked)


if __name__ == "__main__":
    door = socket.create_server(("127.0.0.1", 0))
    print(door.getsockname()[1], flush=True)
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, fd=door.fileno(), log_level="warning")
