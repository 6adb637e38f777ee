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

from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.endpoint_client import EndpointError, JsonClient, with_path
from bapo_megatron.reward.sandbox import plain
from bapo_megatron.reward.sandbox.sandbox import CLOCK_FACTOR, START_LIMIT_S, Ended, Sandbox, SandboxError

_CALL_S = 120.0
"""Time limit of a call in seconds; only an overloaded server reaches it."""

_TRIAL_S = 30.0

# Appended to the source of `plain`.
_CASE = """
import os, sys, types

def _tell(case):
    module = types.ModuleType("solution")
    sys.modules[module.__name__] = module
    return told(case, case["prelude"], case.get("source", ""), module.__dict__)

def _end(text, out=os.fdopen(os.dup(1), "w", encoding="utf-8"), leave=os._exit):
    sys.stdout.flush()
    out.write(text)
    out.flush()
    leave(0)

os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the server keeps the first MiB, and the value comes last

"""


class FusionServer:
    """Client of one SandboxFusion server, for one reward worker: ``run`` executes code there and returns an
    ``Ended``, or None past a case's time limit; raises SandboxError if the server fails. Calls block, and
    each opens its own connection."""

    def __init__(self, url: str) -> None:
        """``url``: server address, with or without ``/run_code``."""
        self._client = JsonClient(with_path(url, "/run_code"), _CALL_S, _CALL_S)

    def check(self) -> None:
        """Run a one-line program. Raises ConfigError if the server fails or returns a wrong result."""
        try:
            ended = self.run("print(6 * 7)", "", 256, 10.0, _TRIAL_S)
            problem = "" if ended and ended.output.strip() == "42" else f"`print(6 * 7)` gave {ended}"
        except SandboxError as error:
            problem = str(error)
        if problem:
            raise ConfigError(
                f"reward.sandbox_url: the server does not run programs: {problem}; start it "
                "(docs/rewards.md#a-sandboxfusion-server), or mend the address"
            )

    def run(
        self, code: str, stdin: str, memory_mb: int, case_limit_s: float, clock_limit_s: float
    ) -> Ended | None:
        """Run the code. Returns None if it does not finish within ``case_limit_s`` there or prints too much.
        Raises SandboxError without an answer within ``clock_limit_s``, or if the server cannot run it."""
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "run_timeout": case_limit_s,
            "memory_limit_MB": memory_mb,
        }
        try:
            answer = asyncio.run(self._asked(body, clock_limit_s))
        except EndpointError as error:
            if error.place == "long answer":  # the program printed too much
                return None
            raise SandboxError(str(error)) from error
        return self._ended(answer)

    async def _asked(self, body: dict[str, Any], limit_s: float) -> Any:
        try:
            return await self._client.ask(body, limit_s)
        finally:
            await self._client.close()

    def _ended(self, answer: Any) -> Ended | None:
        is_run = isinstance(answer, dict) and answer.get("status") != "SandboxError"
        run = answer.get("run_result") if is_run else None
        if not isinstance(run, dict) or run.get("status") not in ("Finished", "TimeLimitExceeded"):
            raise SandboxError(f"{self._client.address}: it could not run the program: {str(answer)[:300]}")
        if run["status"] == "TimeLimitExceeded":
            return None
        code = run.get("return_code")
        took_s = run.get("execution_time")
        took_s = float(took_s) if isinstance(took_s, (int, float)) else 0.0
        return Ended(code if isinstance(code, int) else 1, str(run.get("stdout") or ""), None, took_s)


class FusionSandbox(Sandbox):
    """``Sandbox`` of one program (``source``) on a SandboxFusion server: same calls, but each test case is
    sent as a separate program, and cases share no files."""

    def __init__(
        self,
        server: FusionServer,
        source: str,
        prelude: str,
        memory_mb: int,
        case_limit_s: float,
        recursion_limit: int,
    ) -> None:
        # Skips the base class, which would start a process.
        self._server, self._source, self._prelude = server, source, prelude
        self._memory_mb, self._case_limit_s = memory_mb, case_limit_s
        self._first = f"import sys\nsys.setrecursionlimit({recursion_limit})\n"
        self.used_s = 0.0

    def run(self, stdin: str, limit_s: float) -> Ended | None:
        program = f"exec(compile({self._source!r}, '<solution>', 'exec', dont_inherit=True), globals())\n"
        return self._run(f"{self._first}del sys\n{self._prelude}\n{program}", stdin, limit_s)

    def close(self) -> None:
        """Do nothing: the server keeps no state."""

    def _run(self, code: str, stdin: str, limit_s: float) -> Ended | None:
        limit_s = min(limit_s, self._case_limit_s)
        clock_limit_s = CLOCK_FACTOR * limit_s + START_LIMIT_S
        ended = self._server.run(code, stdin, self._memory_mb, limit_s, clock_limit_s)
        self.used_s += limit_s if ended is None else ended.time_s
        return ended

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
