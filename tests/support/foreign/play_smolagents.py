"""The wrapper of docs/environments.md for an unchanged agent of smolagents, over kills. Prints what a test
compares."""

import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.support.pages import ROOT, blocks


def main():
    from bapo_megatron.environment import PROMPT_TOOLS, Task
    from bapo_megatron.environment.adapters.endpoint import EndpointEnvironment
    from bapo_megatron.environment.protocols.chat import Refused
    from tests.support.scripted_episodes import check_durable, play

    asked = []

    class Recorder(EndpointEnvironment):
        async def _answer(self, request):
            asked.append(request)
            raise Refused(400, "recorded")

        def _reward(self, end):
            return None

    problem = [{"role": "user", "content": "2+3?"}]
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder) / "wrapper.py"
        page = blocks(ROOT / "docs/environments.md")
        wrapper.write_text(next(block.text for block in page if "from smolagents" in block.text))
        command = {"command": [sys.executable, str(wrapper)], "tools_in_prompts": True}
        with suppress(ValueError):  # it has asked, and was told nothing
            play(Recorder, Task(problem), command, ["?"])
        more = {"problem": problem, PROMPT_TOOLS: asked[0].tools}  # as `agent_rows` writes them
        task = Task(asked[0].messages, ground_truth="5", extra_info=more)
        calls = [("calculator", {"expression": "2+3"}), ("final_answer", {"answer": "5"})]
        turns = [
            f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"
            for name, given in calls
        ]
        replies = check_durable(EndpointEnvironment, task, command, turns)
    tools = [one["function"]["name"] for one in asked[0].tools]
    print("FOUND", json.dumps([tools, replies[0].observation, replies[-1].reward]))


if __name__ == "__main__":
    main()
