"""An agent program that does to its endpoint what programs do, for runs that are killed: a calculator's user.

    python unruly_agent.py LOG

After its first request it asks three at a time, cancels streams and comes back for them, repeats requests
with an idempotency key or after a disconnection, and begins again from a summary. What it does follows from
the name of its episode, so a program that is started again does the same. It notes what it asked and was
answered in LOG, against which ``agent_accounts.py`` holds the journal. Its reward follows from all that it
was told. Only the standard library is imported.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NUMBER = r"-?(0|[1-9]\d{0,8})"  # Python takes no 012
EXPRESSION = re.compile(rf"\s*{NUMBER}(\s*[-+*]\s*{NUMBER}){{1,9}}\s*")
LIMIT_S = 600.0
HABITS = ("plain", "streams", "cancels", "disconnects", "repeats")
"""What it may do with a request: ask it whole; as a stream; end the stream before the answer, and retry;
end the connection, and ask again with the idempotency key; ask at last twice with that key."""


class Agent:
    """The program of an episode."""

    def __init__(self, task: dict[str, Any], log: Path) -> None:
        self._episode, self._messages, self._log = task["episode"], task["messages"], log
        self._address = urlsplit(os.environ["OPENAI_BASE_URL"])

    def play(self) -> float:
        """The reward."""
        talk = [*self._messages]
        critics = {"critic 1": "12+30", "critic 2": "7+55"}
        first = self._ask("first", talk)  # alone: an episode begins with the dataset's prompt
        value = str(eval(first)) if EXPRESSION.fullmatch(first) else "0"
        talk += [{"role": "assistant", "content": first}, _user(value)]
        requests = [*((name, [_user(text)]) for name, text in critics.items()), ("second", talk)]
        with ThreadPoolExecutor() as threads:
            said = threads.map(lambda request: self._ask(*request), requests)
            answers = [first, *said, self._ask("summary", [*self._messages, _user(value)])]
        return zlib.crc32("\n".join(answers).encode()) % 5 / 4

    def _ask(self, name: str, messages: list[dict[str, str]]) -> str:
        """The model's message, however it is asked."""
        habit = HABITS[hashlib.sha256(f"{self._episode} {name}".encode()).digest()[0] % len(HABITS)]
        self._note("asked", name, habit=habit)
        key = f"{self._episode} {name}" if habit in ("disconnects", "repeats") else ""
        if habit in ("cancels", "disconnects"):
            connection = self._sent(messages, key, is_stream=habit == "cancels")
            connection.close()
            self._note(habit, name)
        is_retry, is_stream = habit == "cancels", habit in ("streams", "cancels")
        said = self._said(self._sent(messages, key, is_stream, is_retry))
        if habit == "repeats":
            again = self._said(self._sent(messages, key, is_stream=True))
            assert again == said, f"{name}: a retry got {again!r} for {said!r}"
        self._note("answered", name, said=said)
        return said

    def _sent(
        self, messages: list[dict[str, str]], key: str, is_stream: bool, is_retry: bool = False
    ) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(str(self._address.netloc), timeout=LIMIT_S)
        headers = {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
            **({"Idempotency-Key": key} if key else {}),
            # Without it the server cannot know whether an answer that it has written was read.
            **({"x-stainless-retry-count": "1"} if is_retry else {}),
        }
        body = json.dumps({"model": "policy", "messages": messages, "stream": is_stream})
        connection.request("POST", f"{self._address.path}/chat/completions", body, headers)
        return connection

    def _said(self, connection: http.client.HTTPConnection) -> str:
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        if "event-stream" not in answer.headers["Content-Type"]:
            return str(json.loads(answer.read())["choices"][0]["message"]["content"])
        lines = [line.decode().strip().removeprefix("data: ") for line in answer]
        parts = [json.loads(line)["choices"][0]["delta"] for line in lines if line.startswith("{")]
        assert "[DONE]" in lines, f"a stream ended early: {lines}"
        return "".join(part.get("content") or "" for part in parts)

    def _note(self, what: str, name: str, **more: str) -> None:
        line = json.dumps({"what": what, "episode": self._episode, "request": name, **more}) + "\n"
        with self._log.open("ab", buffering=0) as log:  # one write, which a kill does not divide
            log.write(line.encode())


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def main() -> None:
    """Play an episode."""
    print(Agent(json.load(sys.stdin), Path(sys.argv[1])).play())


if __name__ == "__main__":
    main()
