"""GPU check of a colocated SGLang server: a run of three steps by ``bapo train``, as a user starts it.

The server starts, samples, releases its memory, wakes with the step's new weights through IPC handles, and
samples again. The engine gap, mean |log pi_trainer - log pi_engine| of sampled tokens, shows whether it has
them: at this learning rate an update moves log-probs by far more than the limit.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo_megatron.errors import ConfigError
from bapo_megatron.policy.device import release_cached_memory
from bapo_megatron.rollout.engines.sglang.server_process import PYTHON_VARIABLE, sglang_python
from bapo_megatron.runtime.child_process import ChildProcess, exit_text
from bapo_megatron.runtime.jsonl_log import read_jsonl
from bapo_megatron.runtime.run_paths import RunPaths
from bapo_megatron.types import Prompt
from benchmarks.gpu import memory_and_speed
from benchmarks.gpu.rows import Row, Size, commands_environment

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "recipes/demo"
STEPS = 3
END_S = {"cuda": 420.0, "cpu": 1800.0}
"""Longest run, after which it is killed with its server. SGLang's first start on a GPU compiles kernels for
minutes (FlashInfer's sampling, its own by tvm-ffi) into caches in the user's home; a start on a busy CPU
takes minutes, too."""
LIMIT = {"bfloat16": 0.02, "float32": 1e-3}
"""Largest mean engine gap, in nats."""
MOVED = 5.0
"""Smallest log-prob change by updates, as a multiple of the limit: otherwise old weights would pass."""
TROUBLES = {
    *("server_ended", "memory_kept", "engine_lost", "engine_refused", "handover_failed"),
    *("engine_gap", "digests_not_compared"),
}
_RECIPE = """\
from pathlib import Path

from bapo_megatron.config import (
    AlgorithmConfig, BatchConfig, CheckpointConfig, DataConfig, EvaluationConfig, ModelConfig,
    OptimizerConfig, ParallelConfig, RewardConfig, RolloutConfig, RunConfig, SglangConfig
)


def recipe() -> RunConfig:
    server = SglangConfig(colocated=True, sync="ipc", memory_fraction=0.3)
    return RunConfig(
        name="gpu-check-server",
        steps={steps},
        model=ModelConfig(Path(__file__).with_name("model"), dtype="{dtype}"),
        data=DataConfig(Path({data!r}), max_prompt_tokens=48),
        parallel=ParallelConfig(offload=True),
        reward=RewardConfig("benchmarks.gpu.server:score"),
        rollout=RolloutConfig(
            engine="sglang", sglang=server, prompts_per_step=8, group_size=8, max_response_tokens=32
        ),
        algorithm=AlgorithmConfig(updates_per_epoch=2),
        optimizer=OptimizerConfig(lr={rate}),
        batch=BatchConfig(pack_tokens=4096),
        evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every={steps}),
    )
"""


def score(prompt: Prompt, response: str) -> float:
    """Reward of 0 or 1, equally likely for any response: a group with equal rewards would train nothing."""
    return float(zlib.crc32(f"{prompt.prompt_id} {response}".encode()) % 2)


def rows(size: Size, folder: Path) -> Iterator[Row]:
    try:
        sglang_python()
    except ConfigError as error:
        variable = f" (or {PYTHON_VARIABLE})" if PYTHON_VARIABLE not in str(error) else ""
        yield Row("SGLang server", f"not run: {str(error).splitlines()[0][:200]}{variable}")
        return
    dtype = "bfloat16" if size.cuda else "float32"
    work = folder / "server"
    recipe = prepared(size, work, dtype)
    gc.collect()
    release_cached_memory()  # the run's processes need it
    ended = run(recipe, work, END_S[size.device])
    yield Row(
        f"{STEPS} steps of bapo train", ended or "exit code 0", f"ends in {END_S[size.device]:g} s", not ended
    )
    yield from judged(work / "run", dtype)


def prepared(size: Size, work: Path, dtype: str) -> Path:
    """The recipe's path, beside a model of random weights with real head widths for the demo's bytes."""
    shape = {"hidden": 512, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 1024, "vocab": 264, "pack": 256}
    model = memory_and_speed.save(dataclasses.replace(size, **shape), work / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DEMO / "policy" / name, model)
    recipe = work / "recipe.py"
    data = str(DEMO / "train.jsonl")
    recipe.write_text(_RECIPE.format(steps=STEPS, dtype=dtype, data=data, rate=1e-3))
    return recipe


def run(recipe: Path, work: Path, limit_s: float) -> str:
    """Run the recipe, for ``limit_s`` at most. Returns the error text, empty for exit code 0."""
    environment = commands_environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "bapo_megatron.cli", "train", str(recipe), f"--run-dir={work / 'run'}"]
    log = work / "output.log"
    with log.open("wb") as output:
        child = ChildProcess(command, environment, guarded=True, cwd=ROOT, stdout=output, stderr=output)
        try:
            code = child.wait_end(limit_s)
        finally:
            child.close()
    if code == 0:
        return ""
    print_ends(log, RunPaths(work / "run").server_log(0))
    lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    how = f"killed after {limit_s:g} s" if code is None else exit_text(code)
    return f"{how}: {last}"[:300]


def print_ends(*logs: Path) -> None:
    """Print the ends of the logs to stderr: their folder is removed with this program."""
    for log in logs:
        if log.exists():
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}", file=sys.stderr, flush=True)


def judged(run_dir: Path, dtype: str) -> Iterator[Row]:
    """Rows from the run's logs: engine gap of each step, effect of the updates, memory hand-over events."""
    paths = RunPaths(run_dir)
    metrics, updates, events = (
        read_jsonl(path) if path.exists() else [] for path in (paths.metrics, paths.updates, paths.events)
    )
    limit = LIMIT[dtype]
    for number in range(1, STEPS + 1):
        row: dict[str, Any] = next((row for row in metrics if row["step"] == number), {})
        gap = row.get("rollout/engine_gap_mean")
        said = "no such step" if gap is None else f"{gap:.1e} nats"
        name = "the first weights" if number == 1 else f"after wake {number - 1}, with new weights"
        yield Row(f"step {number}: engine gap, {name}", said, f"{limit}", gap is not None and gap < limit)
    # A failed update has None in the log and counts as no change.
    change = max((row.get("policy/ratio_gap") or 0.0 for row in updates if row["step"] < STEPS), default=0.0)
    enough = MOVED * limit
    yield Row("what updates moved", f"{change:.1e} nats", f"more than {enough:g}", change > enough)
    wakes = [row["time/wake_s"] for row in metrics if row.get("time/wake_s")]
    releases = [row["time/release_s"] for row in metrics if row.get("time/release_s")]
    times = "; ".join(
        f"{max(some):.1f} s at most to {what}"
        for some, what in ((releases, "release"), (wakes, "wake"))
        if some
    )
    troubles = sorted({row["kind"] for row in events} & TROUBLES)
    said = ", ".join(troubles) or times or "never"
    yield Row(
        "memory changes hands", said, f"no trouble in {paths.events.name}", bool(wakes) and not troubles
    )
