"""An agent of smolagents, unchanged, as an episode over kills. Prints what a test compares.

With ``agent`` as its last argument it is the program: a tool's loop of that package, with its own prompts.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path


def agent():
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    task = json.load(sys.stdin)
    found = ToolCallingAgent(tools=[add], model=OpenAIServerModel("policy"), max_steps=4).run("2+3?")
    Path(os.environ["BAPO_REWARD_FILE"]).write_text(str(float(str(found) == task["ground_truth"])))


def main():
    from bapo_megatron.environment import Task
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

    command = {"command": [sys.executable, __file__, "agent"], "tools_in_prompts": True}
    with suppress(ValueError):  # it has asked, and was told nothing
        play(Recorder, Task([{"role": "user", "content": "?"}]), command, ["?"])
    task = Task(asked[0].messages, ground_truth="5")
    calls = [("add", {"a": 2, "b": 3}), ("final_answer", {"answer": "5"})]
    turns = [
        f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls
    ]
    replies = check_durable(EndpointEnvironment, task, command, turns)
    said = replies[0].observation
    tools = [one["function"]["name"] for one in asked[0].tools]
    print("FOUND", json.dumps([tools, said, replies[-1].reward]))


if __name__ == "__main__":
    agent() if sys.argv[-1] == "agent" else main()
