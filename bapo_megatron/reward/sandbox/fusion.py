"""Client of a SandboxFusion server, which runs tested programs instead of this machine's sandbox.

``FusionSandbox`` has the calls of ``Sandbox``, which block and raise SandboxError if the server fails. API
(github.com/bytedance/SandboxFusion): ``POST /run_code`` takes ``code``, ``stdin``, ``run_timeout`` and
``memory_limit_MB`` and returns ``status`` and ``run_result`` (``status``, ``return_code``, ``stdout``).
Expected outputs stay on this machine, except where the server must evaluate an assert (code.py).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from dataclasses import replace
from typing import Any

from bapo_megatron.reward.endpoint_client import EndpointError, JsonClient, with_path
from bapo_megatron.reward.sandbox import plain
from bapo_megatron.reward.sandbox.sandbox import CLOCK_FACTOR, START_LIMIT_S, Ended, Sandbox, SandboxError

_MOST_BYTES = 8 << 20
"""Maximum size of an answer: the server keeps a program's first MiB, in JSON up to six bytes a character."""

# Appended to the source of `plain`.
_CASE = """
import os, sys, types

def _tell(case):
    module = types.ModuleType("solution")
    sys.modules[module.__name__] = module
    return told(case, case["prelude"], case.get("source", ""), module.__dict__)

def _end(text, out=os.fdopen(os.dup(1), "w", encoding="utf-8"), leave=os._exit):
    out.write(text)
    out.flush()
    leave(0)

os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the server keeps the first MiB, and the value comes last

"""


class FusionSandbox(Sandbox):
    """``Sandbox`` of one program (``source``) on the SandboxFusion server at ``url``: same calls, but each
    test case is sent as a separate program, and cases share no files."""

    def __init__(
        self,
        url: str,
        source: str,
        prelude: str,
        memory_mb: int,
        case_limit_s: float,
        recursion_limit: int,
    ) -> None:
        """``url``: with or without ``/run_code``. Skips the base class, which would start a process."""
        self._url, self._source, self._prelude = with_path(url, "/run_code"), source, prelude
        self._memory_mb, self._case_limit_s = memory_mb, case_limit_s
        self._first = f"import sys\nsys.setrecursionlimit({recursion_limit})\n"
        self.used_s = 0.0

    def run(self, stdin: str, limit_s: float) -> Ended | None:
        program = f"exec(compile({self._source!r}, '<solution>', 'exec', dont_inherit=True), globals())\n"
        return self._run(f"{self._first}del sys\n{self._prelude}\n{program}", stdin, limit_s)

    def close(self) -> None:
        """Do nothing: the server keeps no state."""

    def _ask(self, case: dict[str, Any], limit_s: float) -> Ended | None:
        """Run a case that prints its value after a random mark. Judgements never see the source."""
        mark = os.urandom(16).hex()
        source = {} if "judgements" in case else {"source": self._source}
        told = json.dumps({**case, **source, "prelude": self._prelude})
        code = f"{inspect.getsource(plain)}{_CASE}{self._first}_end({mark!r} + _tell(json.loads({told!r})))\n"
        ended = self._run(code, "", limit_s)
        if ended is None or ended.code != 0 or mark not in ended.output:
            return ended
        return replace(ended, output="", value=ended.output.rpartition(mark)[2].strip())

    def _run(self, code: str, stdin: str, limit_s: float) -> Ended | None:
        """Run the code. Returns None if the server's clock stops it. Raises SandboxError if the server does
        not run it within ten times the limit."""
        limit_s = min(limit_s, self._case_limit_s)
        body = {"code": code, "language": "python", "stdin": stdin, "memory_limit_MB": self._memory_mb}
        clock_limit_s = CLOCK_FACTOR * limit_s + START_LIMIT_S
        client = JsonClient(self._url, clock_limit_s, clock_limit_s, most_bytes=_MOST_BYTES)
        try:
            answer = asyncio.run(_asked(client, {**body, "run_timeout": limit_s}))
        except EndpointError as error:
            raise SandboxError(str(error)) from error
        is_run = isinstance(answer, dict) and answer.get("status") != "SandboxError"
        run = answer.get("run_result") if is_run else None
        if not isinstance(run, dict) or run.get("status") not in ("Finished", "TimeLimitExceeded"):
            raise SandboxError(f"{client.address}: it could not run the program: {str(answer)[:300]}")
        if run["status"] == "TimeLimitExceeded":
            return None
        took_s = float(run.get("execution_time") or 0.0)
        self.used_s += took_s
        return Ended(run.get("return_code", 1), run.get("stdout") or "", None, took_s)


async def _asked(client: JsonClient, body: dict[str, Any]) -> Any:
    try:
        return await client.ask(body)
    finally:
        await client.close()
