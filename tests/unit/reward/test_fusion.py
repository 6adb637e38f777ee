"""Programs on a SandboxFusion server: verdicts as in this machine's sandbox, and the server's failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from bapo_megatron.config import RewardConfig
from bapo_megatron.reward.code import program_is_right
from bapo_megatron.reward.functions import needs_sandbox
from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.reward.sandbox.sandbox import SandboxError
from bapo_megatron.types import Prompt
from tests.support.fusion_server import BROKEN, run_code
from tests.support.judge_server import Answer, JudgeServer, judge_server, raw, says
from tests.unit.reward.test_code_reward import FUNCTIONS, SCRIPTS
from tests.unit.reward.test_code_tests import ADD, CALL
from tests.unit.reward.test_forged_asserts import FORGERIES
from tests.unit.reward.test_reward_pool import pooling

pytestmark = pytest.mark.integration

PROGRAMS = [
    *((ADD, source, is_it) for source, is_it in SCRIPTS.items() if "sleep" not in source),
    *FUNCTIONS,
    (CALL, "import os\nprint('[1, 2, 3]')\nos._exit(0)", False),
    (
        ADD,
        "from __future__ import annotations\nassert 'sys' not in globals()\n"
        "def deep(n):\n    return 0 if n == 0 else 1 + deep(n - 1)\n"
        "deep(20_000)\nprint(sum(map(int, input().split())))",
        True,
    ),
    (CALL, "def order(x, n=20_000):\n    return sorted(x) if n == 0 else order(x, n - 1)", True),
    ('["assert all(f(i) == i for i in range(3))"]', FORGERIES["json"], False),
    (CALL, "print('3' * 5_000_000)\ndef order(items):\n    return sorted(items)", True),
    (ADD, "print(chr(0) * 5_000_000)", False),
    (ADD, "while True:\n    pass", False),
]


@pytest.fixture(scope="module")
def fusion() -> Iterator[JudgeServer]:
    with judge_server(run_code) as server:
        yield server


def root(server: JudgeServer) -> str:
    return server.url.removesuffix("/v1")


def right(url: str, ground_truth: str, source: str, case_s: float = 20.0) -> bool:
    response = f"So:\n```python\n{source}\n```"
    return program_is_right(ground_truth, response, 512, case_s, 200.0, url)


@pytest.mark.parametrize(("ground_truth", "source", "is_it"), PROGRAMS)
def test_verdicts_are_those_of_this_machines_sandbox(
    fusion: JudgeServer, ground_truth: str, source: str, is_it: bool
) -> None:
    case_s = 1.0 if source.startswith("while True") else 20.0
    assert right(root(fusion), ground_truth, source, case_s) is is_it


def test_what_is_expected_is_not_sent(fusion: JudgeServer) -> None:
    secret = 987654321
    truth = json.dumps([f"assert f(1) == {secret}", f"assert f(1) - {secret} < 1"])
    fusion.bodies.clear()
    assert right(f"{root(fusion)}/run_code", truth, "def f(x):\n    return 987654320 + x")
    asked = [body["code"] for body in fusion.bodies if "987654320 + x" in body["code"]]
    assert len(asked) == 2  # the judgement of the second came third, without the program
    assert len(fusion.bodies) == 3
    assert not any(str(secret) in code for code in asked)


@pytest.mark.parametrize(
    ("answer", "says_"),
    [
        (says(BROKEN), "could not run the program: .*SandboxError"),
        (says({"status": "Failed", "run_result": {"status": "Error"}}), "could not run the program"),
        (says({"status": "SandboxError", "run_result": {"status": "Finished"}}), "could not run the program"),
        (says([1]), "could not run the program"),
        (raw("<html>"), "its answer is not JSON"),
        (says({"detail": "no such path"}, 404), "HTTP 404: .*no such path"),
    ],
    ids=["broken", "error of the run", "error around a run", "list", "html", "404"],
)
def test_a_server_that_is_wrong_makes_no_program_wrong(answer: Answer, says_: str) -> None:
    with judge_server(answer) as server, pytest.raises(SandboxError, match=says_):
        right(root(server), ADD, "print(3)")


async def slow(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """A server that has others before."""
    await asyncio.sleep(1.5)
    return await run_code(body, request)


async def test_the_servers_queue_is_not_the_programs_time() -> None:
    with judge_server(slow) as server:
        limits = {"time_limit_s": 1.0, "code_case_limit_s": 1.0}
        async with pooling(function="code", sandbox_url=root(server), **limits) as pool:
            assert await pool.score(prompt(), f"```python\n{SUM}\n```", 1) == RewardResult(1.0)
        first, second = [body["run_timeout"] for body in server.bodies]
        assert (first, round(second, 6)) == (0.9, 0.8)  # each program took 0.1 s


SUM = "print(sum(map(int, input().split())))"


def prompt() -> Prompt:
    return Prompt(0, np.array([1], np.int32), ADD, "")


async def test_a_pool_runs_programs_there_and_counts_what_fails() -> None:
    """Also where this machine's kernel has no walls: none are needed."""
    with judge_server(run_code) as server:
        config: dict[str, Any] = {"function": "code", "sandbox_url": root(server), "failed": -2.0}
        assert not needs_sandbox(RewardConfig(**config), ["code"])
        texts = [f"```python\n{source}\n```" for source in (SUM, "print(3)")]
        async with pooling(**config) as pool:
            found = [await pool.score(prompt(), text, 1) for text in texts]
            server._answers[:] = [says(BROKEN)]
            failed = await pool.score(prompt(), texts[0], 1)
    assert [(one.reward, one.failure) for one in found] == [(1.0, None), (0.0, None)]
    assert (failed.reward, failed.failure) == (-2.0, "raised")
    assert "SandboxError" in failed.detail
