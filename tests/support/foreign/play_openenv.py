"""Sessions of an OpenEnv server over kills, and fields that it does not have. Prints what a test compares."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from bapo_megatron.environment import Task
from bapo_megatron.environment.adapters.openenv import OpenEnv
from tests.support.scripted_episodes import check_durable, play


async def interrupted(settings, seeds):
    """An episode whose session is lost after the first action: what the rest is, or why there is none."""
    task = Task([{"role": "user", "content": "Guess my number."}], extra_info={"reset": seeds})
    game = OpenEnv(task, {**settings, "observation": "text"})
    try:
        said = [(await game.step("0")).observation]
        await game._client._ws.close()
        for turn in ("0", "10"):
            said.append((await game.step(turn)).observation)
        return said
    except ValueError as error:
        return str(error)
    finally:
        await game.close()


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
        kept, lost = (asyncio.run(interrupted(settings, seeds)) for seeds in ({"seed": 3}, {}))
        try:
            play(OpenEnv, task, {**settings, "observation": "board"}, ["1"])
        except ValueError as error:
            refused = str(error)
    finally:
        server.kill()
played = [[one.observation, one.reward] for one in text]
print("FOUND", json.dumps([played, whole[0].observation, refused, kept, lost]))
