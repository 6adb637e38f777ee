"""Verifiers' own environments over kills: a game, and a task of one answer. Prints what a test compares."""

import json

import guess_taskset

from bapo_megatron.environment import Task
from bapo_megatron.environment.adapters.verifiers_v1 import VerifiersV1, rows
from tests.support.scripted_episodes import check_durable


def played(taskset, turns):
    """Observations, and the reward of the last reply."""
    settings = {"taskset": {"id": taskset}}
    row = list(rows(settings, 3))[1]
    replies = check_durable(VerifiersV1, Task(row["prompt"], extra_info=row["extra_info"]), settings, turns)
    return [row["prompt"], [reply.observation for reply in replies], replies[-1].reward]


transcripts = guess_taskset.TRANSCRIPTS
found = {
    "game": played("guess-taskset", ["3", "9", "6"]),
    "right": played("plain-taskset", ["6"]),
    "wrong": played("plain-taskset", ["5"]),
}
thoughts = ["<think>\nLow.\n</think>\n\n3", "6"]
found["thoughts"] = played("guess-taskset", thoughts)
found["transcript"] = transcripts[-1]
for taskset in ("twice-taskset", "other-taskset"):
    try:
        played(taskset, ["6", "6"])
    except ValueError as error:
        found[taskset] = str(error)
print("FOUND", json.dumps(found))
