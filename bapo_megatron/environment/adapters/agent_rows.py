"""Command that makes a dataset for an agent program: each prompt is the first request that the program sends.

    python -m bapo_megatron.environment.adapters.agent_rows data/sums.jsonl data/agent.jsonl -- node agent.js

Reads a file of problems (dataset rows), runs the program once per row, refuses its requests, and writes a row
whose prompt has the messages of the first. `extra_info.problem` keeps the problem's own messages, which the
program gets on standard input in a run; `extra_info.prompt_tools` has the request's tools, which the chat
template writes into the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.data.rows import RowError, messages_of, read_rows
from bapo_megatron.environment import PROMPT_TOOLS, SampledTurn, Task
from bapo_megatron.environment.adapters.agent_program import PROBLEM, given_task, given_variables, run_agent
from bapo_megatron.environment.adapters.conversation import read_messages
from bapo_megatron.environment.protocols import server
from bapo_megatron.environment.protocols.chat import ChatRequest, Refused
from bapo_megatron.environment.protocols.server import EpisodeQuestions
from bapo_megatron.errors import ConfigError
from bapo_megatron.runtime.files import check_output_file, write_atomically

AT_A_TIME = 8


async def rows(command: Sequence[str], problems: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of problems, with the fields of ``data.path``. Raises ConfigError if the program sends
    no request or one that is not text, RowError for a problem without messages."""
    places = asyncio.Semaphore(AT_A_TIME)

    async def row(problem: dict[str, Any]) -> dict[str, Any]:
        async with places:
            return await _row(command, problem)

    return await asyncio.gather(*map(row, problems))


async def _row(command: Sequence[str], problem: dict[str, Any]) -> dict[str, Any]:
    asked: list[ChatRequest] = []

    async def note(request: ChatRequest) -> SampledTurn:
        asked.append(request)
        raise Refused(400, "its first request is noted, and nothing is answered here")

    key, more = secrets.token_hex(16), dict(problem.get("extra_info") or {})
    truth = str(problem.get("reward_model", {}).get("ground_truth", ""))
    messages = messages_of(problem)
    task = Task(messages, truth, problem.get("data_source", ""), more)
    try:
        base_url = await server.opened(key, EpisodeQuestions(note))
        end = await run_agent(command, given_task(task), given_variables(base_url, key), keeps_errors=True)
    finally:
        server.closed(key)
    if not asked:
        raise ConfigError(f"{command} ended with {end.code}, and has asked nothing: {end.errors[-500:]}")
    first, more = asked[0], {**more, PROBLEM: messages}
    try:
        prompt = read_messages(first.messages)
    except Refused as refused:
        raise ConfigError(f"{command} asks first what cannot be a prompt: {refused}; send text") from None
    tools = {PROMPT_TOOLS: first.tools} if first.tools else {}
    return {**problem, "prompt": prompt, "extra_info": {**more, **tools}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: write the rows for a file of problems. Exits with code 2 for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", type=Path, help="a file of prepared problems, data.jsonl")
    parser.add_argument("output", type=Path, help="the file of rows to write")
    parser.add_argument("command", nargs="+", help="the program and its arguments, behind --")
    settings = parser.parse_args(arguments)
    try:
        check_output_file("output", settings.output)
        if settings.output.exists():
            raise ConfigError(f"output {settings.output} exists: name another file, or delete it")
        result = asyncio.run(rows(settings.command, read_rows(settings.problems)))
    except (ConfigError, RowError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    write_atomically(settings.output, "".join(json.dumps(row) + "\n" for row in result))
    print(f"{settings.output}: {len(result)} rows")


if __name__ == "__main__":
    main()
