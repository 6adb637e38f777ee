"""Agent program of demo_agent.py: lets a model use a calculator, with streamed chat completions.

It could be in any language (this one has only the standard library) and is unaware of the training. It reads
a task from standard input, requests chat completions from OPENAI_BASE_URL, answers an expression with its
value, and ends at the first message that is not an expression. It drops old messages, as agents with a full
context do. It prints no reward: the run's reward function judges the model's last turn.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request

NUMBER = r"-?(0|[1-9]\d{0,8})"  # Python rejects 012
EXPRESSION = re.compile(rf"\s*{NUMBER}(\s*[-+*]\s*{NUMBER}){{1,9}}\s*")

KEPT = 5
"""Messages that it keeps, including the first."""


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's next message, from a streamed chat completion."""
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    body = json.dumps({"model": "policy", "messages": messages, "stream": True}).encode()
    text = ""
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=3600) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data.startswith("{"):
                text += json.loads(data)["choices"][0]["delta"].get("content", "")
    return text


def main() -> None:
    """Answer the model's messages until one is not an expression."""
    messages = json.load(sys.stdin)["messages"]
    while EXPRESSION.fullmatch(said := ask(messages)):
        value = str(eval(said))  # digits and three operators
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": value}]
        messages[1:-KEPT] = []


if __name__ == "__main__":
    main()
