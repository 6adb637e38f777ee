"""Sessions of an OpenEnv server over kills, and fields that it does not have. Prints what a test compares."""

import json
import subprocess
import sys
from pathlib import Path

from bapo_megatron.environment import Task
from bapo_megatron.environment.adapters.openenv import OpenEnv
from tests.support.scripted_episodes import check_durable, play

task = Task([{"role": "user", "content": "Guess my number."}], extra_info={"reset": {"seed": 3}})
with subprocess.Popen(
    [sys.executable, Path(__file__).with_name("openenv_server.py")], stdout=subprocess.PIPE, text=True
) as server:
    try:
        settings = {"url": f"http://127.0.0.1:{int(server.stdout.readline())}"}
        text = check_durable(
            OpenEnv, task, {**settings, "observation": "text"}, ["1", "9", "<think>5</think>4"]
        )
        whole = play(OpenEnv, task, settings, ["1"])
        try:
            play(OpenEnv, task, {**settings, "observation": "board"}, ["1"])
        except ValueError as error:
            refused = str(error)
    finally:
        server.kill()
print("FOUND", json.dumps([[[one.observation, one.reward] for one in text], whole[0].observation, refused]))
