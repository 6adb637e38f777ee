"""The pool of reward workers, under everything that a response can do to its judge."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from bapo_megatron.config import RewardConfig
from bapo_megatron.errors import ConfigError
from bapo_megatron.reward.functions import ground_truth_check, load_function
from bapo_megatron.reward.pool import RewardPool, RewardResult
from bapo_megatron.types import Prompt

pytestmark = pytest.mark.integration

SCORE = "tests.support.reward_functions:score"
REPOSITORY = Path(__file__).parents[3]


def prompt(ground_truth: str = "12345") -> Prompt:
    return Prompt(7, np.array([3, 4], np.int32), ground_truth, "test", {"level": {"deep": [1, None]}})


@asynccontextmanager
async def pooling(max_response_tokens: int = 100, **config: Any) -> AsyncIterator[RewardPool]:
    """A running pool of one worker with these settings."""
    pool = RewardPool(RewardConfig(**{"workers": 1, "function": SCORE, **config}), max_response_tokens)
    await pool.start()
    await asyncio.sleep(0)  # each place takes its process
    try:
        yield pool
    finally:
        await pool.close()


async def test_a_failure_loses_one_response_and_is_reported() -> None:
    kinds = {"wait 1000": "time", "die": "died", "crash": "died"}
    kinds |= dict.fromkeys(("raise", "exit", "memory"), "raised")
    kinds |= dict.fromkeys(("nan", "inf", "none", "text", "digits", "unnamed"), "not finite")
    details = {"raise": "IndexError('list index out of range')", "die": "exit code 0", "text": "'much'"}
    details |= {"crash": "signal SIGSEGV", "digits": "'1.0'"}
    details["wait 1000"] = "exceeded reward.time_limit_s=2.0 in both tries"
    responses = [line for word in kinds for line in (word, "0.5")]

    limits = {"workers": 2, "time_limit_s": 2.0, "memory_limit_mb": 512, "failed": -3.0}
    async with pooling(overlong_tokens=10, overlong_penalty=0.1, **limits) as pool:
        results = await asyncio.gather(*(pool.score(prompt(), text, 100) for text in responses))
    for text, result in zip(responses, results, strict=True):
        if text in kinds:
            assert (result.reward, result.failure) == (-3.0, kinds[text]), text
            assert result.detail == details.get(text, result.detail)
            assert result.detail
        else:
            assert result == RewardResult(0.4), text


async def test_what_a_worker_gives() -> None:
    """Named rewards add up; what a function prints is not an answer; it sees the whole prompt, and no torch.

    No other process may look into a worker (PR_SET_DUMPABLE is 0): it holds the answers, and keys.
    """
    async with pooling(overlong_tokens=10, overlong_penalty=0.1) as pool:
        named, plain = [await pool.score(prompt(), text, 100) for text in ("named", "0.5")]
        talked = [(await pool.score(prompt(), text, 1)).reward for text in ("talk", "0.5", "talk", "true")]
        dumpable, whole = [await pool.score(prompt(), text, 1) for text in ("dumpable", "prompt")]
    assert (named.score, named.reward, named.named) == (1.5, 1.4, {"correct": 1.0, "format": 0.5})
    assert plain.named == {}
    assert talked == [0.25, 0.5, 0.25, 1.0]
    assert (dumpable.reward, whole) == (0.0, RewardResult(3 + 4 + 7 + 5.0))


async def test_a_worker_that_is_killed_costs_no_response(tmp_path: Path) -> None:
    """What a response is worth does not hang on who was killed."""
    async with pooling(time_limit_s=300.0) as pool:
        asking = asyncio.create_task(pool.score(prompt(), f"once {tmp_path / 'asked'}", 1))
        while not (tmp_path / "asked").exists():
            await asyncio.sleep(0.01)
        worker = pool._workers._workers[0]._process
        assert worker is not None
        os.kill(worker.pid, signal.SIGKILL)
        assert await asking == RewardResult(1.0)


async def test_a_worker_whose_memory_is_full_is_replaced() -> None:
    """As by a cache of the user's function: each later response would fail, whatever it is."""
    async with pooling(memory_limit_mb=512) as pool:
        found = [await pool.score(prompt(), "keep", 1) for _ in range(5)]
    assert found == [RewardResult(1.0)] * 5


async def test_a_failure_has_its_traceback_and_its_place() -> None:
    """From the user's function on; the place tells its mistakes apart, whatever the message says."""
    async with pooling() as pool:
        texts = ("quote \x1b[31mred", "quote green", "bug", "none")
        red, green, bug, none = [await pool.score(prompt(), text, 1) for text in texts]
    assert red.traceback.splitlines()[0] == "Traceback (most recent call last):"
    assert "worker.py" not in red.traceback
    assert red.traceback.endswith("ValueError: \\x1b[31mred"), "control characters must not reach a terminal"
    assert "x" * 10 not in red.traceback
    assert red.place == green.place != bug.place
    assert red.place.startswith("ValueError at ")
    assert (none.traceback, none.place) == ("", "NoneType")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one", r"is \(prompt: .Any.\) -> .float., which cannot be called with a prompt and a response"),
        ("of_verl", "missing a required argument.*for verl's functions: docs/customize.md#files-of-verl"),
        ("later", "is an async function.*make it a plain function"),
        ("LATER", "is an async function"),
        ("LATER_IN_PART", "is an async function"),
        ("in_steps", "is a generator function.*make it a plain function"),
        ("Verdict", "is a class, whose calls make objects.*make it a plain function"),
        ("nothing", "tests.support.reward_functions has no function nothing"),
        *((name, None) for name in ("score", "with_more", "OBJECT")),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_start(name: str, message: str | None) -> None:
    path = f"tests.support.reward_functions:{name}"
    if message is None:
        assert callable(load_function(path))
        assert name != "with_more" or load_function(path, {"scale": 7.0})(prompt(), "") == 7.0
        return
    with pytest.raises(ConfigError, match=f"reward.function={path}.*{message}"):
        load_function(path)


async def test_a_path_that_leads_nowhere_is_named() -> None:
    """Also the path of a file, by which verl names a reward."""
    with pytest.raises(ConfigError, match=r"is a file; name its module, mine:score, .*PYTHONPATH=/lab/code$"):
        load_function("/lab/code/mine.py:score")
    absent = "no_such_package.rewards:score"
    with pytest.raises(ConfigError, match=f"reward.function={absent}.*ModuleNotFoundError.*PYTHONPATH"):
        async with pooling(function=absent):
            pass


PARENT = """
import asyncio, sys
from bapo_megatron.config import RewardConfig
from bapo_megatron.reward.pool import RewardPool
from tests.unit.reward.test_reward_pool import SCORE, prompt

async def main():
    pool = RewardPool(RewardConfig(function=SCORE, workers=2), 100)
    await pool.start()
    texts = (f"{kind} {sys.argv[1]}/{kind}" for kind in ("hold", "child"))
    await asyncio.gather(*(pool.score(prompt(), text, 1) for text in texts))

asyncio.run(main())
"""


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    files, deadline = [tmp_path / "hold", tmp_path / "child"], time.monotonic() + 120
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment) as parent:
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert len(found) >= 3
    assert not psutil.wait_procs(found, timeout=30)[1]


ZONE = {"format_pattern": "1.*", "format_penalty": 0.3, "overlong_tokens": 10, "overlong_penalty": 0.2}


@pytest.mark.parametrize(
    ("config", "responses", "rewards"),
    [
        # 0.9 - 0.3 for the form; - 0.2 * (95 - 90) / 10 for the length
        (ZONE, [("0.9", 90), ("0.9", 95), ("1.5", 95), ("1.5", 10)], [0.6, 0.5, 1.4, 1.5]),
        # A format may begin with the tag that the prompt has opened: else no such response would learn.
        ({"format_pattern": r"<think>0.*"}, [("0.9", 1), ("1.9", 1)], [0.9, 1.6, 0.6, 1.6]),
        ({"format_pattern": r"0.*"}, [("0.9", 1), ("1.9", 1)], [0.9, 1.6, 0.9, 1.6]),
        # It is that of the whole response, with its lines.
        (
            {"function": "math", "format_pattern": r"0|.0\.9"},
            [("0.9", 1), ("\n0.9", 1), ("0.9\n", 1), ("", 1)],
            [-0.3, 0.0, -0.3, -0.3],
        ),
    ],
)
async def test_penalties_come_off_the_reward(
    config: dict[str, Any], responses: list[tuple[str, int]], rewards: list[float]
) -> None:
    opens = dataclasses.replace(prompt(), opens_thinking=True)
    asked = [opens, prompt()] if len(responses) == 2 else [prompt()]
    async with pooling(**{"format_penalty": 0.3, **config}) as pool:
        results = [await pool.score(one, *response) for one in asked for response in responses]
    assert [j.reward for j in results] == pytest.approx(rewards)


UNJUDGED = "bapo_megatron.environment:unjudged"


def test_each_function_checks_the_ground_truths_it_reads() -> None:
    """A row without an answer is for an environment: what judges such rows, and what says so."""
    tests, broken = '{"inputs": ["1"], "outputs": ["2"]}', '{"inputs": ["1"]}'
    for function, fine, wrong in (
        ("math", [r"\frac12"], [tests]),
        ("code", [tests], [r"\frac12", broken]),
        ("math_or_code", [r"\frac12", tests, "assert f(1) == 2"], [r"\frac{", broken, "assert f("]),
    ):
        check = ground_truth_check(function)
        assert check is not None
        assert [check(truth) for truth in fine] == [None] * len(fine)
        assert all(check(truth) for truth in wrong), function
        assert re.match(f"'-' stands for no answer: .* set reward.function={UNJUDGED}", str(check("-")))
    assert ground_truth_check(SCORE) is ground_truth_check(UNJUDGED) is None
    assert load_function(UNJUDGED)(None, "\\boxed{-}") == 0.0  # type: ignore[arg-type]


PROGRAM = """
import sys
import time
import bapo_megatron.reward.worker
from bapo_megatron.types import Generation, Group, Prompt, Rollout
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_neither_the_worker_nor_the_types_of_its_prompts_import_torch() -> None:
    """Each of a run's starts within a second."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = set(run.stdout.split())
    assert "bapo_megatron" in found
    take_seconds = {"torch", "transformers", "megatron", "datasets", "safetensors", "pandas", "aiohttp"}
    assert not found & take_seconds, "a worker imports a package that takes seconds"
