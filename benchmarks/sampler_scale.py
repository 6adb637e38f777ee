"""Benchmark of the sampler with hundreds of simulated engines: tokens/s, and utilization of the engines.

    python -m benchmarks.sampler_scale                  # all parts, forty minutes
    python -m benchmarks.sampler_scale --part tools     # one of: rate, busy, tools; the page keeps the others

Part 1: 256 engines with 64 requests each, offering up to a million tokens/s in all.
Part 2: the share of engine places in use, with partial rollout on and off, at long-tailed lengths.
Part 3: the same share with environments: turns of four seconds, and tools that take up to a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import uvloop

from bapo_megatron.config import DataConfig, EnvironmentConfig, ModelConfig, RolloutConfig, RunConfig
from bapo_megatron.environment.pool import EnvironmentPool, Question, StepResult, read_traits
from bapo_megatron.reward.pool import RewardResult
from bapo_megatron.rollout.engines.pool import EnginePool
from bapo_megatron.rollout.engines.requests import Dataset, ModelLimits
from bapo_megatron.rollout.engines.sglang.engine import SglangEngine
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, SglangServer
from bapo_megatron.rollout.sampler.group_sampler import GroupSampler
from bapo_megatron.rollout.sampler.scoring import Scorer
from bapo_megatron.rollout.sampler.turns import Stepping
from bapo_megatron.runtime.garbage import collect_rarely
from bapo_megatron.runtime.run_paths import RunPaths, step_entries
from bapo_megatron.types import Prompt
from benchmarks.common import RESULTS, in_a_process, machine, write
from benchmarks.fake_engines import EOS, Integral
from tests.support.fake_sglang import Keyless

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Load:
    """A load: number and speed of the engines, and settings of the run."""

    engines: int
    places: int
    """Requests in flight per engine."""
    rate: float
    """Tokens/s of one request."""
    median: float
    sigma: float
    longest: int
    segment: int | None
    staleness: int
    prompts: int
    """Groups per step."""
    train_s: float
    """Seconds of training per step."""
    warm_s: float
    measured_s: float
    group: int = 16
    """Responses per group."""
    tool_s: float | None = None
    """Mean seconds of a tool after each turn; None: a response is one turn."""
    turns: int = 1

    @property
    def turn_s(self) -> float:
        """Sampling seconds of a turn of ``median`` tokens."""
        return self.median / self.rate


@dataclass(frozen=True)
class Found:
    """Measurements of one load, over the measured seconds."""

    tokens_per_s: float
    """Tokens/s written to the journal."""
    working: float
    """Share of the engines' time with at least one request."""
    filled: float
    """Share of the engines' places with a request."""
    processor: float
    """CPU seconds per second of the sampler process."""
    peak_gib: float
    steps: int
    lost: int
    """Engines given up, including warm-up; all engines are healthy."""
    stepping: float = 0.0
    """Mean environment steps in flight."""


class Tokenizer:
    """Tokenizer that decodes nothing: decoding is one call per response."""

    eos_token_id = EOS

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return ""


class Coin:
    """Scorer with random rewards of 0 or 1, so that groups are kept."""

    async def score(self, prompt: Prompt, response: str, tokens: int) -> RewardResult:
        return RewardResult(float(random.random() < 0.5))


class CountedSteps:
    """Environment pool that counts its steps in flight."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self.in_flight = Integral()

    async def step(self, question: Question) -> StepResult:
        self.in_flight.add(1)
        try:
            return await self._pool.step(question)
        finally:
            self.in_flight.add(-1)

    def forget(self, episode: str) -> None:
        self._pool.forget(episode)


class FewTokens:
    """Observation tokenizer that always returns the same 20 tokens."""

    def given_ids(self, observation: str, last_token: int) -> np.ndarray:
        return np.arange(3, 23, dtype=np.int32)


def main() -> None:
    """Measure and write the report, or print one row of the tools part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="all, if none is named")
    parser.add_argument("--row", nargs=2, type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(asdict(measure(tool_load(*options.row)))))
        return
    page = RESULTS / "sampler_scale.md"
    before = page.read_text().split("\n## ")[1:] if page.exists() else []
    kept = {text.partition("\n")[0]: text.partition("\n")[2].strip() for text in before}
    lines = [
        "# One sampler process and hundreds of engines",
        "",
        "Command: `python -m benchmarks.sampler_scale`",
        "",
        "Engines are simulated by a second process over real HTTP (`fake_engines.py`); rewards are drawn,",
        "and nothing is decoded. The rest is the product: requests, parsing, checks, journal with fsync,",
        "step files, weight updates.",
        "",
    ]
    for name, (title, part) in PARTS.items():
        lines += [f"## {title}", ""]
        lines += [f"{machine()}.", "", *part(), ""] if options.part in (name, None) else [kept[title], ""]
    write("sampler_scale", "\n".join(lines[:-1]) + "\n")


def _rate_part() -> Iterator[str]:
    load = Load(256, 64, 61.0, 4000, 1.2, 65_536, 1024, 4, 512, 20.0, warm_s=50, measured_s=40)
    longer = replace(load, segment=4096, warm_s=100, measured_s=60)
    yield f"{load.engines} engines with {load.places} requests each."
    yield ""
    columns = ("tokens a segment", "offered", "handled", "of the offer", "places filled", "processor")
    yield f"| {' | '.join(columns)} | peak memory | engines lost |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|"
    for way in (replace(load, rate=30.5), load, longer):
        result = measure(way)
        offered, handled = way.rate * way.engines * way.places, result.tokens_per_s
        yield (
            f"| {way.segment} | {offered:,.0f} | {handled:,.0f} | {handled / offered:.2f} "
            f"| {result.filled:.1%} | {result.processor:.2f} cores | {result.peak_gib:.1f} GiB "
            f"| {result.lost} |"
        )


def _busy_part() -> Iterator[str]:
    load = Load(32, 16, 244.0, 250, 1.2, 4096, 256, 1, 32, 1.5, warm_s=25, measured_s=50)
    ways = {
        "off: each step waits for its longest": replace(load, staleness=0, segment=None),
        **{f"on: {s} steps of staleness": replace(load, staleness=s) for s in (1, 3, 7)},
    }
    yield f"{load.engines} engines with {load.places} requests each, lengths log-normal (median"
    yield f"{load.median:.0f}, sigma {load.sigma}), cut at {load.longest}; {load.prompts} groups of 16 a"
    yield f"step, {load.train_s} s of training a step; to sample one takes 2.1 s if all places are filled."
    yield "Admitted: responses that may be open for each place, (staleness + 1) x responses of a step"
    yield "/ places."
    yield ""
    yield "| partial rollout | admitted | engines busy | places filled | tokens/s | steps | engines lost |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, way in ways.items():
        result = measure(way)
        admitted = (way.staleness + 1) * way.prompts * 16 / (way.engines * way.places)
        yield (
            f"| {name} | {admitted:.0f} | {result.working:.1%} | {result.filled:.1%} "
            f"| {result.tokens_per_s:,.0f} | {result.steps} | {result.lost} |"
        )


TOOL_SECONDS = (0, 5, 15, 30, 60)
ADMITTED = (0.5, 1.0, 1.25, 1.5, 2.0)
"""Open responses while a step trains, as a multiple of the number that fills all places."""


def tool_load(tool_s: float, admitted: float) -> Load:
    """128 places and turns of 4 s; a training step takes a quarter of the sampling time of a step."""
    load = Load(16, 8, 61.0, 244, 0.0, 4096, None, 4, 0, 0.0, warm_s=0, measured_s=0, group=8)
    load = replace(load, tool_s=tool_s, turns=3)
    places, turn_s = load.engines * load.places, load.turn_s
    needed = places * (1 + tool_s / turn_s)
    prompts = math.ceil(admitted * needed / (load.staleness * load.group))
    sampling_s = prompts * load.group * load.turns * turn_s / places
    episode_s = load.turns * (turn_s + tool_s)
    return replace(
        load,
        prompts=prompts,
        train_s=sampling_s / 4,
        warm_s=20 + 1.5 * episode_s,
        measured_s=max(60, 1.5 * episode_s),
    )


def _tools_part() -> Iterator[str]:
    load = tool_load(0, 1)
    places = load.engines * load.places
    yield f"{load.engines} engines with {load.places} requests each; responses of {load.turns} turns, each of"
    yield f"{load.median:.0f} tokens in {load.turn_s:.0f} s, and then of an async tool in one of two worker"
    yield "processes, which takes a mean time, give or take a half. A step of training takes a quarter of the"
    yield "time in which its responses are sampled. Admitted: responses that may be open while a step trains,"
    yield f"staleness {load.staleness} x prompts x {load.group}, for each of the {places} x (1 + tool / turn)"
    yield "that fill all places. Rows ran side by side, up to five, beside other programs."
    yield ""
    columns = ("tool", "admitted", "prompts a step", "open at most", "tools at work", "places filled")
    yield f"| {' | '.join(columns)} | processor | engines lost |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|"
    for tool_s in TOOL_SECONDS:
        with ThreadPoolExecutor(len(ADMITTED)) as beside:
            ways = [tool_load(tool_s, admitted) for admitted in ADMITTED]
            rows = beside.map(
                lambda admitted: in_a_process("benchmarks.sampler_scale", "--row", tool_s, admitted),  # noqa: B023
                ADMITTED,
            )
            for admitted, way, row in zip(ADMITTED, ways, rows, strict=True):
                most = way.staleness * way.prompts * way.group
                yield (
                    f"| {tool_s} s | {admitted:g} | {way.prompts} | {most:,} | {row['stepping']:,.0f} "
                    f"| {row['filled']:.1%} | {row['processor']:.2f} cores | {row['lost']} |"
                )


PARTS: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "rate": ("Tokens a second", _rate_part),
    "busy": ("Engines kept busy", _busy_part),
    "tools": ("Engines kept busy while tools work", _tools_part),
}


def measure(load: Load) -> Found:
    """Run the sampler under ``load``."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    collect_rarely()
    with tempfile.TemporaryDirectory() as folder, _engines(load) as url:
        return uvloop.run(_measure(load, url, Path(folder)))


@contextlib.contextmanager
def _engines(load: Load) -> Iterator[str]:
    arguments = (load.engines, load.rate, load.median, load.sigma, load.longest)
    command = [sys.executable, "-m", "benchmarks.fake_engines", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
    process.kill()
    process.wait()


async def _measure(load: Load, url: str, folder: Path) -> Found:
    events: Counter[str] = Counter()
    async with _sampler(load, url, folder, events) as (sampler, session, counted):
        steps: list[int] = []
        trainer = asyncio.create_task(_train(load, sampler, RunPaths(folder).journal, steps))
        await asyncio.sleep(load.warm_s)
        process = psutil.Process()
        before, taken = sampler.state()["tokens"]["sampled"], len(steps)
        busy_before, start = sum(process.cpu_times()[:2]), time.monotonic()
        await session.get(f"{url}/idle")
        if counted:
            counted.in_flight.take()
        await asyncio.sleep(load.measured_s)
        async with session.get(f"{url}/idle") as answer:
            seen: dict[str, Any] = await answer.json()
        seconds = time.monotonic() - start
        result = Found(
            tokens_per_s=(sampler.state()["tokens"]["sampled"] - before) / seconds,
            working=seen["working"] / load.engines,
            filled=seen["in_flight"] / (load.engines * load.places),
            processor=(sum(process.cpu_times()[:2]) - busy_before) / seconds,
            peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            steps=len(steps) - taken,
            lost=events["engine_lost"],
            stepping=counted.in_flight.take() if counted else 0.0,
        )
        trainer.cancel()
        await asyncio.gather(trainer, return_exceptions=True)
        return result


async def _train(load: Load, sampler: GroupSampler, journal: Path, steps: list[int]) -> None:
    """Trainer that only waits, and deletes its steps' files."""
    step = 0
    while True:
        step += 1
        while await sampler.next_batch(step, 30.0) is None:
            pass
        steps.append(step)
        await asyncio.sleep(load.train_s)
        await sampler.load_weights(Path(f"v{step}"), step, step)
        await sampler.checkpointed(0)
        for _, path in step_entries(journal, ".npz"):
            path.unlink()


@contextlib.asynccontextmanager
async def _sampler(
    load: Load, url: str, folder: Path, events: Counter[str]
) -> AsyncIterator[tuple[GroupSampler, aiohttp.ClientSession, CountedSteps | None]]:
    config = RunConfig(
        name="scale",
        model=ModelConfig(Path("model")),
        data=DataConfig(Path("data")),
        rollout=RolloutConfig(
            prompts_per_step=load.prompts,
            group_size=load.group,
            max_response_tokens=load.longest,
            segment_tokens=load.segment,
            max_staleness=load.staleness,
            on_stale="train",
        ),
        environment=_environment(load),
        run_dir=folder,
    )
    generator = np.random.default_rng(0)
    prompts = [Prompt(n, generator.integers(3, 150_000, 200).astype(np.int32), "", "") for n in range(4096)]
    sessions = HttpSessions()
    limits = ModelLimits(200_000, 1 << 20)
    engines = [
        SglangEngine(SglangServer(f"{url}/{n}", sessions, Keyless()), limits) for n in range(load.engines)
    ]

    def report(kind: str, **_: Any) -> None:
        events[kind] += 1

    pool = EnginePool(engines, load.places, report)
    environments, counted, by_source = None, None, {}
    if load.tool_s is not None:
        environments = EnvironmentPool(config.environment, read_traits(config.environment))
        await environments.start()
        counted = CountedSteps(environments)
        most = config.environment.max_turns
        by_source[""] = Stepping(counted, FewTokens(), report, (EOS,), most)
    dataset = Dataset(prompts, Tokenizer(), (EOS,))
    sampler = GroupSampler(config, dataset, pool, Scorer(Coin(), 0.0, report), report, environments=by_source)
    await sampler.start(1, None)
    await sampler.load_weights(Path("v0"), 0, 0)
    yield sampler, sessions.new, counted
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if environments:
        await environments.close()
    await sessions.close()


def _environment(load: Load) -> EnvironmentConfig:
    """Configuration of the waiting tool; without a tool, the default."""
    if load.tool_s is None:
        return EnvironmentConfig()
    return EnvironmentConfig(
        "benchmarks.waiting_tool:WaitingTool",
        settings={"mean_s": load.tool_s, "turns": load.turns},
        max_turns=load.turns,
        step_limit_s=600.0,
        episode_limit_s=3600.0,
    )


if __name__ == "__main__":
    main()
