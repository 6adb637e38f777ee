"""An agent that uses OpenAI's own client, as an episode over kills. Prints what a test compares.

With ``agent`` as its last argument it is the agent: a tool's loop, whose result the policy has to say.
"""

import json
import os
import sys


def agent():
    """Ask, run the tools that are called, ask again; the reward is whether the last answer is the truth."""
    from openai import OpenAI

    task, client = json.load(sys.stdin), OpenAI()
    messages = [*task["messages"]]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    while True:
        answer = client.chat.completions.create(
            model="policy", messages=messages, tools=tools, temperature=0.2
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)
            total = str(numbers["a"] + numbers["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": total})
    print(float(message.content == task["ground_truth"]))


def main():
    from bapo_megatron.environment import Task
    from bapo_megatron.environment.adapters.endpoint import EndpointEnvironment
    from tests.support.scripted_episodes import check_durable

    class Agent(EndpointEnvironment):
        role = "tool"

    task = Task([{"role": "user", "content": "2+3? You have a tool, add."}], ground_truth="5")
    call = '<think>Hm.</think><tool_call>{"name": "add", "arguments": {"a": 2, "b": %d}}</tool_call>'
    settings = {"command": [sys.executable, __file__, "agent"], "tools_in_prompts": True}
    replies = check_durable(Agent, task, settings, [call % 2, call % 3, "5"])
    print("FOUND", json.dumps([[one.observation, one.reward] for one in replies]))


if __name__ == "__main__":
    os.environ.pop("OPENAI_API_BASE", None)
    agent() if sys.argv[-1] == "agent" else main()
