"""Benchmark of what routes cost a sampler: processor time a token, with those of Qwen3-30B-A3B and without.

    python -m benchmarks.route_cost               # about five minutes
    python -m benchmarks.route_cost --quick       # a short one, which is only printed

The parts of the way in this process first; then the whole sampler with simulated engines over real HTTP, as
``sampler_scale.py``. A processor's seconds are counted, not the clock's: other programs may run beside it.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.data.routes import route_problem, write_routes
from bapo_megatron.rollout.engines.sglang.wire import decoded_routes, generation_of
from bapo_megatron.rollout.sampler.events import Segment, groups_opened, segments_arrived
from bapo_megatron.rollout.sampler.process import keep_freed_memory
from bapo_megatron.rollout.sampler.state import SamplerState
from bapo_megatron.rollout.sampler.write_ahead_log import WriteAheadLog
from bapo_megatron.types import GenerateRequest, Prompt, RouteShape, SamplingParams
from benchmarks.common import is_quick, machine, write
from benchmarks.fake_engines import EXPERTS, LAYERS, PER_TOKEN
from benchmarks.sampler_scale import Load, measure

SHAPE = RouteShape(LAYERS, PER_TOKEN, EXPERTS)
GOAL = 400_000
"""Tokens a second that a sampler should handle on two cores."""


def main() -> None:
    """Measure, and write the report."""
    quick = is_quick(__doc__)
    keep_freed_memory()  # as a sampler does that gets routes
    lines = [
        "# What routes cost a sampler",
        "",
        "Command: `python -m benchmarks.route_cost`",
        "",
        f"{machine()}. Routes of Qwen3-30B-A3B: {LAYERS} layers, {PER_TOKEN} of {EXPERTS} experts; "
        f"{LAYERS * PER_TOKEN} bytes a token, 2,048 on the wire.",
        "",
        "## The parts",
        "",
        *_parts(repeats=3 if quick else 20),
        "",
        "## The whole sampler",
        "",
        *_whole(quick),
    ]
    text = "\n".join(lines) + "\n"
    if quick:
        print(text)
    else:
        write("route_cost", text)


def _parts(repeats: int, tokens: int = 1024) -> list[str]:
    generator = np.random.default_rng(0)
    order = generator.random((tokens * LAYERS, EXPERTS), np.float32).argsort(-1)
    wide = order[:, :PER_TOKEN].astype(np.int32)
    text = base64.b64encode(wide.tobytes())
    routes = wide.astype(np.uint8).reshape(tokens, LAYERS, PER_TOKEN)
    body, plain = _answer(tokens, text), _answer(tokens, None)
    request = GenerateRequest("r", np.arange(9), SamplingParams(1.0, tokens, ()), routes=SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        log = WriteAheadLog(path / "segments.log")

        def journal(answer: Any) -> None:
            """One segment through the log into the state; the file is emptied, or it would fill a disk."""
            state = SamplerState([Prompt(0, np.arange(9, dtype=np.int32), "", "")], 2)
            state.apply(groups_opened([(0, 0, 0)], 1))
            record = segments_arrived([Segment(state.open[0], 0, 0, answer, None)])
            log.write([record])
            log._file.truncate(0)
            log.size = 0
            state.apply(record)

        routed = generation_of(request, body)
        bare = replace(routed, routes_R=None)
        ways: dict[str, Callable[[], Any]] = {
            "`base64.b64decode` and a cast, for comparison": lambda: np.frombuffer(
                base64.b64decode(text), np.int32
            ).astype(np.uint8),
            "decode and check": lambda: decoded_routes(memoryview(text), tokens, SHAPE),
            "of that: in range, no expert twice": lambda: route_problem(routes, SHAPE),
            "an answer with routes, all of it": lambda: generation_of(request, body),
            "an answer without": lambda: generation_of(replace(request, routes=None), plain),
            "log (fsync) and state, with routes": lambda: journal(routed),
            "log and state, without": lambda: journal(bare),
            "file of a step's routes (fsync)": lambda: write_routes(path / "routes.npy", [routes] * 16),
        }
        rows = [f"| {name} | {_seconds(way, repeats) / tokens * 1e6:.2f} |" for name, way in ways.items()]
        rows[-1] = (
            rows[-1].rsplit("|", 2)[0] + f"| {_seconds(ways[list(ways)[-1]], 3) / tokens / 16 * 1e6:.2f} |"
        )
        log.close()
    return [f"Segments of {tokens} tokens.", "", "| part | microseconds a token |", "|---|---:|", *rows]


def _answer(tokens: int, routes: bytes | None) -> bytes:
    meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "weight_version": "0"}
    if routes is not None:
        meta["routed_experts"] = routes.decode()
    meta["output_token_logprobs"] = [[-(n % 7) - 0.123456789, 5 + n, None] for n in range(tokens)]
    ids = list(range(5, 5 + tokens))
    return json.dumps({"output_ids": ids, "meta_info": meta}, separators=(",", ":")).encode()


def _seconds(way: Callable[[], Any], repeats: int) -> float:
    """Processor seconds of one call: the smallest of a few rounds."""
    way()
    found = []
    for _ in range(3):
        start = time.process_time()
        for _ in range(repeats):
            way()
        found.append((time.process_time() - start) / repeats)
    return min(found)


def _whole(quick: bool) -> list[str]:
    half = Load(32, 16, 244.0, 1000, 0.8, 8192, 1024, 4, 32, 1.0, warm_s=25, measured_s=45)
    if quick:
        half = replace(half, warm_s=8, measured_s=10)
    full = replace(half, rate=600.0)
    rows = []
    for load in (half, replace(half, routes=True), full, replace(full, routes=True)):
        found = measure(load)
        offered, cores = load.engines * load.places * load.rate, found.tokens_per_s / found.processor * 2
        rows.append(
            f"| {offered:,.0f} | {'with' if load.routes else 'without'} | {found.filled:.0%} "
            f"| {found.tokens_per_s:,.0f} | {found.processor:.2f} | {cores:,.0f} | {found.peak_gib:.1f} GiB "
            f"| {found.lost} |"
        )
    return [
        f"{half.engines} engines with {half.places} requests each, over real HTTP; segments of "
        f"{half.segment} tokens. The goal with routes: {GOAL:,} tokens a second of two cores. The second "
        "load is about what one core handles with routes; at the first a token also pays for a process that "
        "mostly waits.",
        "",
        "| offered, tokens a second | routes | places filled | handled | processor, cores "
        "| handled by two cores, if all are as busy | peak memory | engines lost |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f}. Beside other programs, above 2, a token "
        "takes more of a processor's time: caches are cold, and commits small.",
    ]


if __name__ == "__main__":
    main()
