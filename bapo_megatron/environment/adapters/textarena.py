"""Environment that plays a single-player TextArena game, in the worker's process; each model turn is a move.

    environment.function = "bapo_megatron.environment.adapters.textarena:TextArena"

A row's ``extra_info`` has the game and its seed, ``{"env_id": "GuessTheNumber-v0", "seed": 3}``, and its
prompt ends with the game's first observation; ``rows`` generates such rows. A lost game is replayed from its
moves. Tested with textarena 0.7.4; games with word lists need nltk's, which textarena downloads.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import textarena

from bapo_megatron.environment import Environment, Reply, Task
from bapo_megatron.environment.settings import TextArenaSettings
from bapo_megatron.environment.tools.calls import answer_part


class TextArena(Environment):
    """Episode of one game, from the seed in ``extra_info``. Raises ValueError for another game's prompt."""

    role = "user"
    settings_type = TextArenaSettings
    own_random = True  # games draw from the global generator, even between moves

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        super().__init__(task, settings)
        self._new_text_only = TextArenaSettings(**settings).new_text_only
        game, seed = task.extra_info["env_id"], int(task.extra_info["seed"])
        self._game = started(game, seed)
        self._shown = observed(self._game)
        if not str(task.messages[-1]["content"]).endswith(self._shown):
            told = f"the prompt's last message does not end with the first observation of {game}, seed {seed}"
            raise ValueError(f"{told}: make the dataset with `rows` of {__name__}")

    def step(self, turn: str) -> Reply:
        """Make the move: the turn without its thinking part. The game's end gives the player's reward."""
        over, _ = self._game.step(action=answer_part(turn).strip())
        if over:
            return Reply(None, reward=reward_of(*self._game.close()))
        before, self._shown = self._shown, observed(self._game)
        said = self._shown.removeprefix(before).strip() if self._new_text_only else self._shown
        return Reply(said)


def started(env_id: str, seed: int) -> Any:
    """Return a new game. All its draws follow from the seed, even those from ``random``."""
    game = textarena.make(env_id)
    random.seed(seed)
    game.reset(num_players=1, seed=seed)
    return game


def observed(game: Any) -> str:
    """Return the player's current observation."""
    _, observation = game.get_observation()
    return str(observation)


def reward_of(rewards: Mapping[int, Any], about: Mapping[int, Mapping[str, Any]]) -> float:
    """Return the player's reward. Some games of 0.7.4 (Countdown, Cryptarithm, Slitherlink, ThreeCardMonte)
    swap reward and reason after invalid moves."""
    reward = rewards[0]
    if isinstance(reward, str):
        reward = str(about[0]["reason"]).removeprefix("Invalid Move: ")
    return float(reward)


def rows(env_id: str, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield rows with the fields of ``data.path``: one game per seed."""
    for seed in seeds:
        yield {
            "data_source": f"textarena/{env_id}",
            "prompt": [{"role": "user", "content": observed(started(env_id, seed))}],
            "reward_model": {"ground_truth": "-", "style": "rule"},
            "extra_info": {"env_id": env_id, "seed": seed},
        }
