"""An agent program, with nothing but the standard library: it plays a guessing game over chat completions.

It reads its task on stdin, asks the endpoint of OPENAI_BASE_URL, and prints its reward. Arguments change
what it does: ``rewrites`` (its history), ``streams``, ``tools``, ``two`` (answers), ``dies``, ``waits``,
``silent``, ``chats``, ``spied`` (it ends with 4 if a program that it runs can read its task).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request

BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]


def ask(messages: list[dict[str, object]], **more: object) -> dict[str, object]:
    """The endpoint's message."""
    body = json.dumps({"model": "policy", "messages": messages, "temperature": 0.3, **more}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{BASE}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]  # type: ignore[no-any-return]


def main() -> None:
    """Play until the number is found."""
    task = json.load(sys.stdin)
    if "spied" in sys.argv and subprocess.run(["cat", "/proc/self/fd/0"], capture_output=True).stdout:
        sys.exit(4)
    messages = [*task["messages"]]
    options = {"streams": {"stream": True}, "tools": {"tools": [{}]}, "two": {"n": 2}}
    more = next((options[name] for name in sys.argv if name in options), {})
    asked = 0
    while True:
        asked += 1
        message = ask(messages, **more)
        messages.append({"role": "assistant", "content": None, **message})
        if "dies" in sys.argv:
            sys.exit(3)
        if "waits" in sys.argv:
            time.sleep(1000)
        guess, number = int(str(message["content"])), int(task["ground_truth"])
        if guess == number:
            break
        if "rewrites" in sys.argv:
            messages[0] = {"role": "user", "content": "Guess again."}
        messages.append({"role": "user", "content": "higher" if number > guess else "lower"})
    if "chats" in sys.argv:
        print("done")
    elif "silent" not in sys.argv:
        print(f"done\n{1 / asked}")


if __name__ == "__main__":
    main()
