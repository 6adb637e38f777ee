"""Cost of the pool of reward workers, beside threads that ask a process each and wait for its answer.

The threads are the arrangement of earlier versions, without retries: a free process is taken from a queue,
and ``AnsweringChild.ask`` runs in a thread.

    python -m benchmarks.worker_pool [--quick]
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bapo_megatron.config import RewardConfig
from bapo_megatron.reward.math import COMMAND
from bapo_megatron.reward.pool import RewardPool
from bapo_megatron.runtime.child_process import AnsweringChild, with_import_path
from bapo_megatron.types import Prompt
from bapo_megatron.workers.process import START_LIMIT_S
from benchmarks.common import is_quick, machine, write

CONFIG = RewardConfig(workers=2)
PROMPT = Prompt(0, np.arange(8, dtype=np.int32), "12345", "benchmark")
CASES = {"short": (2000, 20), "of 200,000 characters": (100, 200_000)}
"""Number of responses, and characters of each."""


class Threads:
    """As many processes as the pool has, and a thread for each."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(CONFIG.workers)
        self._free: asyncio.Queue[AnsweringChild] = asyncio.Queue()
        for _ in range(CONFIG.workers):
            child = AnsweringChild(COMMAND, with_import_path(os.environ))
            child.ask({"reward": dataclasses.asdict(CONFIG), "functions": ["math"]}, START_LIMIT_S)
            self._free.put_nowait(child)

    async def score(self, text: str) -> None:
        """Score a response in the next free process."""
        prompt = {"ground_truth": PROMPT.ground_truth, "opens_thinking": False}
        question = {"function": "math", "prompt": prompt, "response": text}
        call = {"id": 0, "function": "score", "question": question}
        child, loop = await self._free.get(), asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, child.ask, call, CONFIG.time_limit_s)
        self._free.put_nowait(child)

    def close(self) -> None:
        """End the processes."""
        while not self._free.empty():
            self._free.get_nowait().close()
        self._threads.shutdown()


async def timed(scores: list[Coroutine[Any, Any, Any]]) -> tuple[float, float]:
    """Seconds for all scores, and seconds of this process's processor time."""
    began, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*scores)
    return time.perf_counter() - began, time.process_time() - processor


async def compare(threads: Threads, pool: RewardPool, texts: list[str], rounds: int) -> list[float]:
    """Medians of pool / threads, in turns: time, processor time of the asking process."""
    found = []
    for _ in range(rounds):
        before = await timed([threads.score(text) for text in texts])
        now = await timed([pool.score(PROMPT, text, 1) for text in texts])
        found.append([mine / least for mine, least in zip(now, before, strict=True)])
    return [statistics.median(column) for column in zip(*found, strict=True)]


async def main(quick: bool) -> None:
    """Measure, and write the page."""
    rounds, rows = (3 if quick else 15), []
    threads, pool = Threads(), RewardPool(CONFIG, 100)
    await pool.start()
    for name, (number, length) in CASES.items():
        texts = [f"{'x' * length} \\boxed{{{n}}}" for n in range(number)]
        wall, processor = await compare(threads, pool, texts, rounds)
        rows.append(f"| {name} | {wall:.2f} | {processor:.2f} |")
    await pool.close()
    threads.close()
    text = PAGE.format(machine=machine(), rounds=rounds, rows="\n".join(rows))
    print(text) if quick else write("worker_pool", text)


PAGE = """# The pool of reward workers

Command: `python -m benchmarks.worker_pool`

{machine}. Two workers score responses with the reward `math`; the answers are plain integers,
so the scores themselves cost little. Pool / threads: `RewardPool`, whose event loop asks, beside threads that
ask a process each, as in earlier versions. Medians of {rounds} rounds, in turns.

| responses | time | processor time of the asking process |
|---|---:|---:|
{rows}
"""

if __name__ == "__main__":
    asyncio.run(main(is_quick(__doc__)))
