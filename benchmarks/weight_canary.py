"""Planted mistakes of a weight hand-over: what the digests of sent weights see, and what a canary would.

    python -m benchmarks.weight_canary            # half an hour on two cores; needs `make sglang real-model`
    python -m benchmarks.weight_canary --quick    # the first model alone

A real SGLang server on the CPU takes weights from disk, with one mistake. Then it reports its digests, and
scores the canary: a few fixed sequences with ``max_new_tokens=0``, whose log-probs are compared with those of
the trainer's policy at that version. *Poisoned*: before the hand-over the server fills its weights with
random numbers (``reset_tensors`` of ``/weights_checker``), and then lacks the tensor of the mistake.

A step moves each weight by four updates of AdamW at a learning rate of 1e-6, all in the direction of the
gradient's sign: the most that they can. Writes the tables of benchmarks/results/weight_canary.md, whose
reading it leaves as it is.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bapo_megatron.rollout.engines.sent_weights import DigestMismatch, SentCheck, SentDigests
from bapo_megatron.rollout.engines.sglang.fused_weights import fused_digests
from bapo_megatron.rollout.engines.sglang.http_client import HttpSessions, SglangServer
from bapo_megatron.rollout.engines.sglang.server_process import (
    ServerProcess,
    server_command,
    server_environment,
    sglang_python,
)
from bapo_megatron.runtime.distributed import free_port
from benchmarks.common import RESULTS, is_quick, machine, one_process, write
from benchmarks.weight_canary_cases import (
    LEARNING_RATE,
    MLP,
    SETUPS,
    UPDATES,
    Scores,
    Setup,
    Weights,
    canary_of,
    edits,
    gradient_signs,
    in_fp8,
    not_loaded,
    read_weights,
    save_version,
    trainer_scores,
)

STEPS = (1, 10)
"""Steps since the version that the server has kept. Ten in one direction are a random walk of a hundred."""
SEEN = 2.0
"""Seen: the mean or the largest difference is more than so many times the worst of the honest hand-overs."""
TIMEOUT_S = 600.0
PAGE, MEASURED = RESULTS / "weight_canary.md", "## Measured"


@dataclass
class Row:
    """What was found of one planted mistake."""

    name: str
    digest: str
    mean: float
    largest: float
    note: str = ""


@dataclass
class Result:
    """All that was found of one setup."""

    setup: Setup
    changed: Mapping[int, float]
    """Steps to the share of elements that differ from the first version, in the weights' type."""
    honest: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def noise(self) -> tuple[float, float]:
        return max(row.mean for row in self.honest), max(row.largest for row in self.honest)

    def times_noise(self, row: Row) -> float:
        mean, largest = self.noise
        times = max(row.mean / mean, row.largest / largest)
        return times if math.isfinite(times) else math.inf


# --- the server ------------------------------------------------------------------------------------


class Server:
    """A real server, by blocking calls."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._sessions = self._wait(self._made())
        self._server = SglangServer(url, self._sessions, control_timeout=TIMEOUT_S)
        self.cached_tokens = 0

    def load(self, folder: Path, flush: bool = True) -> None:
        self._wait(self._server.update_from_disk(folder, 1, flush, TIMEOUT_S))

    def poison(self) -> None:
        self._wait(self._server._control("/weights_checker", {"action": "reset_tensors"}, TIMEOUT_S))

    def checksum(self) -> str:
        return self._wait(self._server.checksum(TIMEOUT_S))

    def score(self, canary: np.ndarray, start: int = 0) -> Scores:
        """Log-probs from the token after ``start`` on: one HTTP call."""
        body = {
            "input_ids": canary.tolist(),
            "return_logprob": True,
            "logprob_start_len": start,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        }
        answers = self._wait(self._server._control("/generate", body, TIMEOUT_S))
        self.cached_tokens = sum(one["meta_info"]["cached_tokens"] for one in answers)
        told = [one["meta_info"]["input_token_logprobs"][1:] for one in answers]
        return np.asarray([[nan_of(token[0]) for token in row] for row in told], dtype=np.float64)

    def close(self) -> None:
        self._wait(self._sessions.close())

    async def _made(self) -> HttpSessions:
        return HttpSessions()

    def _wait(self, call: Any) -> Any:
        return self._loop.run_until_complete(call)


def nan_of(value: float | None) -> float:
    return math.nan if value is None else value


@contextmanager
def server_of(folder: Path, dtype: str) -> Iterator[Server]:
    port = free_port()
    flags = ["--dtype", dtype, "--max-total-tokens", "20000", "--skip-server-warmup", "--enable-fp32-lm-head"]
    command = server_command(sglang_python(), folder, "127.0.0.1", port, cuda=False, flags=flags)
    environment = server_environment(cuda=False, threads=2)
    process = ServerProcess(command, environment, f"http://127.0.0.1:{port}", folder.parent / "server.log")
    try:
        process.wait_ready(TIMEOUT_S)
        server = Server(process.url)
        yield server
        server.close()
    finally:
        process.stop(seconds=1)


class Experiment:
    """One setup: its versions, the trainer's log-probs of each, a server, and the rows."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self._folder = setup, folder
        self._model = setup.make(folder)
        both = canary_of(self._model, setup)
        self._canary = both[: setup.sequences]
        base, signs = read_weights(self._model), gradient_signs(self._model, both[setup.sequences :])
        self._versions = {0: base}
        for steps in STEPS:
            moved = steps * UPDATES * LEARNING_RATE
            self._versions[steps] = {name: one - moved * signs[name] for name, one in base.items()}
        self._trainer: dict[int, Scores] = {}
        self._scores: dict[int, Scores] = {}
        self._sent: dict[int, SentDigests] = {}
        kind = getattr(torch, setup.dtype)
        changed = {
            steps: sum(
                int((self._versions[steps][name].to(kind) != one.to(kind)).sum())
                for name, one in base.items()
            )
            / sum(one.numel() for one in base.values())
            for steps in STEPS
        }
        self.result = Result(setup, changed)
        self._events: list[dict[str, Any]] = []
        self._check = SentCheck(lambda kind, **fields: self._events.append({"kind": kind, **fields}))

    def run(self) -> Result:
        for version, weights in self._versions.items():
            folder = self._save(weights, f"v{version}")
            self._trainer[version], seconds = trainer_scores(folder, self.setup.dtype, self._canary)
            self.result.seconds["trainer scores the canary"] = seconds
            self._sent[version] = self._digests(weights)
        with server_of(self._folder / "v0", self.setup.dtype) as server:
            self._server = server
            for version in self._versions:
                self._honest(version)
            for steps in reversed(STEPS):
                self._stale(steps)
            if not self.setup.in_fp8:
                self._edited()
                self._stale_cache()
            else:
                self._stale_scales()
            self._poisoned()
        return self.result

    def _honest(self, version: int) -> None:
        start = time.perf_counter()
        self._load(self._versions[version])
        loaded = time.perf_counter()
        digest = self._digest(version)
        digested = time.perf_counter()
        self._scores[version] = self._server.score(self._canary)
        seconds = self.result.seconds
        seconds["server loads"] = loaded - start
        seconds["server reports digests"] = digested - loaded
        seconds["server scores the canary"] = time.perf_counter() - digested
        row = self._row(f"honest, version {version}", digest, self._scores[version], version)
        self.result.honest.append(row)

    def _stale(self, steps: int) -> None:
        """Each mistake by which the server keeps tensors of version 0, and the whole server."""
        new = self._versions[steps]
        self._load(new)
        for name, parts in not_loaded(self.setup).items():
            names = [one for one in new if one.startswith(parts)]
            self._load({one: self._versions[0][one] for one in names})
            self._measure(f"{name}, {steps} steps old", steps)
            self._load({one: new[one] for one in names})
        # The digest of a server that took nothing is that of version 0, by the honest hand-over.
        whole = self._row(f"one whole stale server, {steps} steps old", "seen", self._scores[0], steps)
        self._load(self._versions[0])
        whole.digest = self._digest(steps)
        self._add(whole)

    def _edited(self) -> None:
        new = self._versions[1]
        self._load(new)
        for name, changed in edits(self.setup, new).items():
            self._load(changed)
            self._measure(name, 1)
            self._load({one: new[one] for one in changed})

    def _stale_cache(self) -> None:
        """The server keeps keys and values of version 0 for the canary's first half."""
        half, steps = self.setup.tokens // 2, STEPS[-1]
        self._load(self._versions[0])
        self._server.score(self._canary)
        self._load(self._versions[steps], flush=False)
        for start in (0, half):
            scores = self._server.score(self._canary, start)
            where = "all tokens scored" if start == 0 else "second half scored"
            name = f"stale prefix cache, {steps} steps old, {where}"
            row = self._row(name, self._digest(steps), scores, steps, start)
            row.note = f"{self._server.cached_tokens} tokens from the cache"
            self._add(row)

    def _stale_scales(self) -> None:
        new = self._versions[STEPS[-1]]
        self._load(new)
        name = MLP + "down_proj.weight"
        old_scales = {name: in_fp8({name: new[name]}, {name: self._versions[0][name]})[name]}
        other = {name: in_fp8({name: new[name]}, {name: new["model.layers.2.mlp.down_proj.weight"]})[name]}
        for title, changed in (("10 steps old", old_scales), ("of another layer", other)):
            self._load(changed, rounds=False)
            self._measure(f"fp8 scales {title}", STEPS[-1])

    def _poisoned(self) -> None:
        new = self._versions[1]
        self._server.poison()
        self._load(new)
        self._measure("poisoned, and all loaded", 1)
        for name, parts in not_loaded(self.setup).items():
            rest = {one: tensor for one, tensor in new.items() if not one.startswith(parts)}
            digests = []
            for _ in range(2):
                self._server.poison()
                self._load(rest)
                digests.append(self._server.checksum())
            self._measure(f"poisoned: {name.replace('stale', 'no new')}", 1)
            if digests[0] != digests[1]:
                self.result.rows[-1].note = "a second time: another digest"

    def _measure(self, name: str, version: int) -> None:
        self._add(self._row(name, self._digest(version), self._server.score(self._canary), version))

    def _add(self, row: Row) -> None:
        self.result.rows.append(row)
        print(self.setup.name, self.setup.dtype, row, f"{self.result.times_noise(row):.3g}", flush=True)

    def _row(self, name: str, digest: str, scores: Scores, version: int, start: int = 0) -> Row:
        gap = np.abs(scores - self._trainer[version][:, start:])
        if not np.isfinite(gap).all():
            return Row(name, digest, math.inf, math.inf)
        return Row(name, digest, float(gap.mean()), float(gap.max()))

    def _load(self, weights: Weights, flush: bool = True, rounds: bool = True) -> None:
        if self.setup.in_fp8 and rounds:
            weights = in_fp8(weights)
        self._server.load(self._save(weights, "sent"), flush)

    def _save(self, weights: Weights, name: str) -> Path:
        return save_version(self._model, self._folder / name, weights, self.setup.dtype)

    def _digests(self, weights: Weights) -> SentDigests:
        if self.setup.in_fp8:
            return SentDigests(unknown="servers with --quantization have another weight layout")
        digester = fused_digests(self._model, 1, "cpu")
        start = time.perf_counter()
        for name, tensor in weights.items():
            digester.add(name, tensor.to(getattr(torch, self.setup.dtype)))
        self.result.seconds["trainer hashes"] = time.perf_counter() - start
        return digester.result()

    def _digest(self, version: int) -> str:
        """What the pool would find: 'same', 'seen' for another digest, or 'off'."""
        try:
            same = self._check.is_sent(self._sent[version], "server", self._server.checksum())
        except DigestMismatch:
            return "seen"
        return "same" if same else "off"


# --- the page --------------------------------------------------------------------------------------


def tables(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        mean, largest = result.noise
        changed = ", ".join(f"{share:.1%} after {steps}" for steps, share in result.changed.items())
        seconds = "; ".join(f"{name} {value:.2f} s" for name, value in result.seconds.items())
        setup = result.setup
        lines = [
            f"| {row.name}{f' ({row.note})' if row.note else ''} | {row.digest} | {row.mean:.2g} | "
            f"{row.largest:.2g} | {result.times_noise(row):.2g} | "
            f"{'seen' if result.times_noise(row) > SEEN else 'no'} |"
            for row in [*result.honest, *result.rows]
        ]
        parts.append(
            f"""### {setup.name}, {setup.dtype}

Canary: {setup.sequences} x {setup.tokens} tokens. Noise: mean {mean:.2g}, largest {largest:.2g}.
Elements that differ from the first version: {changed} steps. {seconds[0].upper() + seconds[1:]}.

| mistake | digest | mean | largest | x noise | canary |
|---|---|---:|---:|---:|---|
"""
            + "\n".join(lines)
            + "\n"
        )
    return "\n".join(parts)


def report(results: Sequence[Result]) -> str:
    """The page: its reading, which is kept, and the measured tables, which are new."""
    reading = PAGE.read_text().partition(MEASURED)[0]
    return f"{reading}{MEASURED}\n\n{machine()}, on a machine with other work.\n\n{tables(results)}"


def main() -> None:
    quick = is_quick(__doc__)
    results = []
    with one_process():
        for setup in SETUPS[:1] if quick else SETUPS:
            with tempfile.TemporaryDirectory() as folder:
                results.append(Experiment(setup, Path(folder)).run())
    if quick:
        print(report(results))
    else:
        write("weight_canary", report(results))


if __name__ == "__main__":
    main()
