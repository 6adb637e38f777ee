"""An agent program, with nothing but the standard library, whose conversations form a tree.

It answers its task, asks two critics at a time, continues with what they say, and at last from a summary. Its
reward is the share of its answers that differ. With a file as argument it waits while that is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]


def ask(messages: list[dict[str, object]]) -> str:
    """The text of the endpoint's message."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{BASE}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def main() -> None:
    """Four turns and a summary."""
    task = json.load(sys.stdin)
    talk: list[dict[str, object]] = [*task["messages"]]
    first = ask(talk)
    critics: list[list[dict[str, object]]] = [
        [{"role": "user", "content": "2+2="}],
        [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+1="}],
    ]
    with ThreadPoolExecutor() as threads:
        said = [*threads.map(ask, critics)]
    while len(sys.argv) > 1 and Path(sys.argv[1]).exists():
        time.sleep(0.05)
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": " ".join(said)[:40]}]
    second = ask(talk)
    third = ask([{"role": "user", "content": "1+1="}, *talk[-2:-1], {"role": "user", "content": "5+5="}])
    print(len({first, second, third, *said}) / 5)


if __name__ == "__main__":
    main()
