"""A server on this machine that speaks SandboxFusion's API, and runs programs without any sandbox."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from aiohttp import web

from tests.support.judge_server import says


async def run_code(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """``POST /run_code``, as sandbox/server/sandbox_api.py and sandbox/runners of SandboxFusion answer it."""
    assert request.path == "/run_code"
    assert (body["language"], body["memory_limit_MB"] > 0) == ("python", True)
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", body["code"], stdin=pipe, stdout=pipe, stderr=pipe
    )
    run = program.communicate(body["stdin"].encode())
    try:
        printed, errors = await asyncio.wait_for(run, body["run_timeout"])
    except TimeoutError:
        program.kill()
        await program.wait()
        result: dict[str, Any] = {"status": "TimeLimitExceeded", "return_code": None, "stdout": ""}
    else:
        texts = {
            "stdout": printed[: 1 << 20].decode(errors="replace"),
            "stderr": errors.decode(errors="replace"),
        }
        result = {"status": "Finished", "return_code": program.returncode, "execution_time": 0.1, **texts}
    whole = {"status": "Failed" if result["return_code"] else "Success", "message": "", "files": {}}
    return await says({**whole, "run_result": result})(body, request)


BROKEN = {"status": "SandboxError", "message": "exception on running code", "run_result": None}
"""What it answers if it could not run a program."""
