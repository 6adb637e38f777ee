"""Agents that use OpenAI's and Anthropic's own clients, as episodes over kills. Prints what a test compares.

With an argument it is an agent: a tool's loop, whose result the policy has to say. It notes what its client
has read of each answer in the file READ.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

ADD = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": ADD}


def chat(messages, stream):
    """The text, the calls (id, name, arguments), and what else the answer has."""
    from openai import OpenAI

    asked = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
    client = OpenAI().chat.completions
    if stream:
        with client.stream(**asked, logprobs=True, stream_options={"include_usage": True}) as events:
            answer = events.get_final_completion()
    else:
        answer = client.create(**asked, logprobs=True, tool_choice="auto", n=1)
    [choice] = answer.choices
    messages.append(choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
    calls = [(one.id, one.function.name, one.function.arguments) for one in choice.message.tool_calls or []]
    usage = [answer.usage.prompt_tokens, answer.usage.completion_tokens]
    tokens = [(one.token, one.logprob) for one in choice.logprobs.content]
    more = [choice.finish_reason, usage, tokens]
    return (
        choice.message.content,
        calls,
        more,
        lambda found: [{"role": "tool", "tool_call_id": call, "content": result} for call, result in found],
    )


def responses(items, stream):
    from openai import OpenAI

    client, include = OpenAI().responses, ["message.output_text.logprobs"]
    asked = {
        "model": "policy",
        "input": items,
        "tools": [{"type": "function", **FUNCTION}],
        "include": include,
    }
    if stream:
        with client.stream(**asked) as events:
            answer = events.get_final_response()
    else:
        answer = client.create(**asked)
    items += [one.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for one in answer.output]
    calls = [(one.call_id, one.name, one.arguments) for one in answer.output if one.type == "function_call"]
    parts = [part for one in answer.output if one.type == "message" for part in one.content]
    tokens = [(one.token, one.logprob) for part in parts for one in part.logprobs]
    more = [answer.status, [answer.usage.input_tokens, answer.usage.output_tokens], tokens]
    return (
        answer.output_text,
        calls,
        more,
        lambda found: [
            {"type": "function_call_output", "call_id": call, "output": result} for call, result in found
        ],
    )


def messages(said, stream):
    from anthropic import Anthropic

    tool = {"name": "add", "description": "Adds.", "input_schema": ADD}
    asked = {"model": "policy", "max_tokens": 1000, "messages": said, "tools": [tool]}
    client = Anthropic().messages
    if stream:
        with client.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = client.create(**asked)
    said.append(
        {"role": "assistant", "content": [one.model_dump(exclude_none=True) for one in answer.content]}
    )
    calls = [(one.id, one.name, json.dumps(one.input)) for one in answer.content if one.type == "tool_use"]
    text = "".join(one.text for one in answer.content if one.type == "text")
    more = [answer.stop_reason, [answer.usage.input_tokens, answer.usage.output_tokens]]
    return (
        text,
        calls,
        more,
        lambda found: [
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": call,
                        "content": [{"type": "text", "text": result}],
                    }
                    for call, result in found
                ],
            }
        ],
    )


def note(read):
    with open(os.environ["READ"], "a") as file:
        file.write(json.dumps(read) + "\n")


def agent(protocol, stream):
    """Ask, run the tools that are called, ask again; the reward is whether the last answer is the truth."""
    task = json.load(sys.stdin)
    history = [*task["messages"]]
    while True:
        text, calls, more, results = {"chat": chat, "responses": responses, "messages": messages}[protocol](
            history, stream
        )
        note([text, [name for _, name, _ in calls], more])
        if not calls:
            break
        sums = [(call, json.loads(arguments)) for call, _, arguments in calls]
        history += results([(call, str(one["a"] + one["b"])) for call, one in sums])
    print(float(text == task["ground_truth"]))


def errors():
    """What the clients raise; then one question, so that the episode has a turn."""
    import anthropic
    import openai

    openai_client, anthropic_client = openai.OpenAI(), anthropic.Anthropic()
    prompt = json.load(sys.stdin)["messages"]
    asks = {
        "n": lambda: openai_client.chat.completions.create(model="policy", messages=prompt, n=2),
        "state": lambda: openai_client.responses.create(
            model="policy", input="2+3?", previous_response_id="resp_1"
        ),
        "image": lambda: anthropic_client.messages.create(
            model="policy",
            max_tokens=9,
            messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}],
        ),
        "count": lambda: anthropic_client.messages.count_tokens(model="policy", messages=prompt),
        "key": lambda: anthropic.Anthropic(api_key="x").messages.create(
            model="policy", max_tokens=9, messages=prompt
        ),
    }
    found = {}
    for name, ask in asks.items():
        try:
            ask()
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            body = error.body if isinstance(error, openai.APIStatusError) else error.body["error"]
            found[name] = [type(error).__name__, body["message"]]
    found["models"] = [
        [one.id for one in openai_client.models.list()],
        [one.id for one in anthropic_client.models.list()],
    ]
    note(found)
    openai_client.chat.completions.create(model="policy", messages=prompt)


def main():
    from bapo_megatron.environment import SampledTurn, Task
    from bapo_megatron.environment.adapters.endpoint import EndpointEnvironment
    from tests.support.scripted_episodes import check_durable, play

    class Agent(EndpointEnvironment):
        role = "tool"

    task = Task([{"role": "user", "content": "2+3? You have a tool, add."}], ground_truth="5")
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": %d}}</tool_call>'
    texts = [f"<think>Hm.</think>I add. {call % 2}", call % 3 + call % 4, "5"]
    turns = [
        SampledTurn.of(text, 10 + place, [(7, text[:1], -0.5), (8, text[1:], -0.25 * place)])
        for place, text in enumerate(texts)
    ]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for protocol in ("chat", "responses", "messages"):
            for stream in ("whole", "stream"):
                os.environ["READ"] = f"{folder}/{protocol}-{stream}"
                settings = {"command": [sys.executable, __file__, protocol, stream], "tools_in_prompts": True}
                replies = check_durable(Agent, task, settings, turns, cuts=[2])
                read = [*map(json.loads, Path(os.environ["READ"]).read_text().splitlines())][: len(turns)]
                found[f"{protocol}-{stream}"] = [[[one.observation, one.reward] for one in replies], read]
        os.environ["READ"] = f"{folder}/errors"
        play(Agent, task, {"command": [sys.executable, __file__, "errors"]}, ["5"])
        found["errors"] = json.loads(Path(os.environ["READ"]).read_text())
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    os.environ.pop("OPENAI_API_BASE", None)
    if sys.argv[1:] == ["errors"]:
        errors()
    elif sys.argv[1:]:
        agent(sys.argv[1], sys.argv[2] == "stream")
    else:
        main()
