"""Games of TextArena over kills, two at a time, and a prompt of another game. Prints what a test compares."""

import json
import random

from bapo_megatron.environment import Task
from bapo_megatron.environment.adapters.textarena import TextArena, rows
from tests.support.scripted_episodes import check_durable, play

GAMES = {
    "GuessTheNumber-v0": ["[3]", "<think>[4]</think>I guess [12]", "[17]"],
    "Bandit-v0": ["[red]", "[blue]", "[red]", "[red]"],
    "2048-v0": ["[up]", "[left]", "[down]", "[right]", "[up]"],
    "TowerOfHanoi-v0": ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"],
    "FrozenLake-v0": ["[right]", "[down]", "[up]"],
    "Blackjack-v0": ["[Hit]", "[Stand]", "[Stand]"],
    "ThreeCardMonte-v0": ["I take one.", "I take one."],
    "Secretary-v0": ["[continue]", "[continue]", "[accept]"],
}
found = {}
for game, moves in GAMES.items():
    row, other = rows(game, [3, 4])
    task = Task(row["prompt"], extra_info=row["extra_info"])
    for new_text_only in (True, False):
        replies = play(TextArena, task, {"new_text_only": new_text_only}, moves)
        check_durable(TextArena, task, {"new_text_only": new_text_only}, moves[: len(replies)])
        found.setdefault(game, []).append([[one.observation, one.reward] for one in replies])
    random.seed()  # nothing of it depends on the state that is there
    same = play(TextArena, task, {"new_text_only": False}, moves)
    assert [[one.observation, one.reward] for one in same] == found[game][1], game
try:
    play(
        TextArena,
        Task([{"role": "user", "content": "Hello"}], extra_info={"env_id": game, "seed": 3}),
        {},
        moves,
    )
except ValueError as error:
    found["refused"] = str(error)
print("FOUND", json.dumps(found))
