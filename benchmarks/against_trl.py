"""Benchmark of our step against a step of TRL's GRPOTrainer, in CPU seconds per sampled token.

    make trl                                  # TRL into .venv-trl, a folder of its own
    make real-model                           # for --models real, SmolLM2-135M-Instruct: about 9 GB of memory
    python -m benchmarks.against_trl          # the demo's policy: ten minutes of a core
    python -m benchmarks.against_trl --models real --updates 1 --rounds 2 --warm-up 0 --results trl_135m
    python -m benchmarks.against_trl --quick --rounds 1

Each side has a process (``against_trl_sides.py``), one thread and the same core, and they make steps in
turns. CPU time depends less than the clock on other load. Before the first step both must agree on the
log-probs of the same sequences and on GRPO's loss; otherwise nothing is timed. Writes
benchmarks/results/against_trl.md after each round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import distributions, version
from multiprocessing import Pipe
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.against_trl_sides import MAX_PROMPT_TOKENS, PHASES, Batch, Settings
from benchmarks.common import machine, write

ROOT = Path(__file__).parents[1]
TRL_FOLDER = ROOT / ".venv-trl"
PROMPTS = ROOT / "recipes/demo/train.jsonl"
MODELS = {
    "demo": ROOT / "recipes/demo/policy_rambles",
    "real": ROOT / "models/SmolLM2-135M-Instruct",
}
NAMES = {"demo": "The demo's policy (0.23 M parameters)", "real": "SmolLM2-135M-Instruct"}
PROMPTS_PER_STEP = {"demo": 4, "real": 1}

LOG_PROB_LIMIT, LOSS_LIMIT = 1e-4, 1e-5
"""Largest differences between the sides for a valid timing, in nats."""

SMALLEST_PART = 0.01
"""Smallest share of a step with which a phase gets a ratio: CPU time of other processes ticks at 10 ms."""

END = "<|never|>"
"""End token of both: its id is outside the model's vocabulary, so that no response ends early."""

_END_S = 120


@dataclass(frozen=True)
class Step:
    """Cost of one step of a side."""

    cpu_s: dict[str, float]
    tokens: int
    prompt_tokens: int

    def per_token(self, phase: str | None = None) -> float:
        """CPU microseconds per sampled token, of a phase or of the step."""
        seconds = sum(self.cpu_s.values()) if phase is None else self.cpu_s.get(phase, 0.0)
        return 1e6 * seconds / self.tokens


@dataclass
class Case:
    """A model and a number of updates per step: the agreement of both sides, then their steps in turns."""

    model: str
    settings: Settings
    warm_up: int = 0
    """Rounds before the measured ones."""
    log_prob_gap: float = 0.0
    loss_gap: float = 0.0
    ours: list[Step] = field(default_factory=list)
    trl: list[Step] = field(default_factory=list)
    start_s: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, dict[str, float]] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return self.log_prob_gap <= LOG_PROB_LIMIT and self.loss_gap <= LOSS_LIMIT

    def costs(self, side: Side) -> Step:
        """Make the next step of a side. Returns its cost."""
        cost = side.step()
        self.peak_mib[side.name] = cost["peak_mib"]
        return Step(cost["cpu_s"], cost["tokens"], cost["prompt_tokens"])

    def ratios(self, phase: str | None = None) -> list[float]:
        """TRL's cost over ours, for the two steps of each round."""
        pairs = zip(self.ours, self.trl, strict=True)
        return [theirs.per_token(phase) / own.per_token(phase) for own, theirs in pairs]


class Side:
    """Process of one side, a context manager. Raises RuntimeError with the end of its output if it fails."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self._log = name, settings.folder / f"{name}.log"
        here, there = Pipe()
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.against_trl_sides", name]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if name == "trl":
            environment["PYTHONPATH"] = str(TRL_FOLDER)
        with self._log.open("w") as log, there:
            self._process = subprocess.Popen(
                [*command, str(there.fileno())],
                pass_fds=[there.fileno()],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._pipe = here
        here.send(settings)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._pipe.close()
        if kind is None:
            self._process.wait(_END_S)
        else:
            self._process.terminate()
            self._process.wait()

    def answer(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            code, output = self._process.wait(_END_S), self._log.read_text()[-4000:]
            raise RuntimeError(f"{self.name} ended with exit code {code}:\n{output}") from None

    def ask(self, what: str, batch: Batch) -> Any:
        self._pipe.send((what, batch))
        return self.answer()

    def step(self) -> dict[str, Any]:
        """Make a step. Returns its cost."""
        self._pipe.send("step")
        cost: dict[str, Any] = self.answer()
        return cost

    def end(self) -> None:
        self._pipe.send(None)


def prepared_model(source: Path, folder: Path, positions: int) -> Path:
    """Copy of a model with room for ``positions`` tokens and an end token that is never sampled."""
    from transformers import AutoTokenizer

    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": END})
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        settings["eos_token_id"] = tokenizer.eos_token_id
        if name == "config.json":
            settings["max_position_embeddings"] = max(positions, settings["max_position_embeddings"])
            if tokenizer.eos_token_id < settings["vocab_size"]:
                raise RuntimeError(f"{source}: {END} is a token that the model can sample")
        (folder / name).write_text(json.dumps(settings, indent=2))
    return folder


def random_batch(model: Path, settings: Settings) -> Batch:
    """Random sequences and advantages of both signs, one micro-batch in size."""
    generator = np.random.default_rng(0)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    count, tokens = settings.micro_batch, settings.response_tokens
    return Batch(
        list(generator.integers(0, vocabulary, (count, 24))),
        list(generator.integers(0, vocabulary, (count, tokens))),
        generator.normal(size=count).astype(np.float32),
        np.zeros((count, tokens), np.float32),
    )


def compare(case: Case, ours: Side, trl: Side) -> None:
    """Store the largest log-prob difference, and that of the loss at ratios of which a third are clipped."""
    batch = random_batch(case.settings.model, case.settings)
    log_probs = ours.ask("log_probs", batch)
    case.log_prob_gap = float(np.abs(log_probs - trl.ask("log_probs", batch)).max())
    noise = np.random.default_rng(1).normal(scale=0.2, size=log_probs.shape)
    batch = Batch(batch.prompts, batch.responses, batch.advantages, (log_probs + noise).astype(np.float32))
    case.loss_gap = abs(ours.ask("loss", batch) - trl.ask("loss", batch))


def measure(case: Case, rounds: int, done: Callable[[], None]) -> None:
    """Run the check, then steps in turns. Fills in the case; calls ``done`` after each measured round."""
    with Side("ours", case.settings) as ours, Side("trl", case.settings) as trl:
        sides = (ours, trl)
        for side in sides:
            case.start_s[side.name] = sum(side.answer()["cpu_s"].values())
        compare(case, ours, trl)
        for number in range(case.warm_up + rounds if case.agrees else 0):
            steps = [case.costs(side) for side in sides]
            if steps[0].prompt_tokens != steps[1].prompt_tokens:
                raise RuntimeError("the sides had other prompts: nothing is compared")
            if number >= case.warm_up:
                case.ours.append(steps[0])
                case.trl.append(steps[1])
                case.load.append(os.getloadavg()[0])
                done()
        for side in sides:
            side.end()


# --- the page --------------------------------------------------------------------------------------


def section(case: Case) -> str:
    """A case's part of the page; without figures if the sides disagree."""
    run = case.settings
    head = f"## {NAMES[case.model]}, {run.updates} update{'s' * (run.updates > 1)} a step\n"
    agreement = (
        "Agreement before the timing: log-probs of the same tokens differ by at most "
        f"{case.log_prob_gap:.1e}\nnats, the loss of the same batch by {case.loss_gap:.1e}."
    )
    if not case.agrees:
        return f"{head}\n{agreement} That is more than {LOG_PROB_LIMIT:g} or {LOSS_LIMIT:g}: not timed.\n"
    tokens = case.ours[0].tokens
    lines = [
        head,
        f"{run.prompts_per_step} prompts of {run.group_size} responses, {tokens:,} sampled tokens a step "
        f"({case.trl[0].tokens:,} of TRL).",
        f"Rounds: {len(case.ours)}, after {case.warm_up} that did not count.",
        agreement,
        f"Load of the machine: {min(case.load):.1f} to {max(case.load):.1f}.\n",
        "| CPU µs a token | ours | TRL | TRL / ours |",
        "|---|---:|---:|---:|",
        *(row(case, phase, phase) for phase in PHASES),
        row(case, "**all**", None),
        "",
        f"Start-up, not above: {case.start_s['ours']:.0f} CPU s of ours, {case.start_s['trl']:.0f} of TRL. "
        "Peak of resident memory:",
        f"{memory(case.peak_mib['ours'])} of ours; {memory(case.peak_mib['trl'])} of TRL.",
    ]
    return "\n".join(lines) + "\n"


def row(case: Case, name: str, phase: str | None) -> str:
    """A phase's table row; without a ratio if it is less than a hundredth of a side's step."""
    sides = (case.ours, case.trl)
    cells = [spread([step.per_token(phase) for step in steps]) for steps in sides]
    parts = [median(step.per_token(phase) / step.per_token() for step in steps) for steps in sides]
    ratio = spread(case.ratios(phase)) if min(parts) >= SMALLEST_PART else ""
    return f"| {name} | {cells[0]} | {cells[1]} | {ratio} |"


def spread(values: Sequence[float]) -> str:
    """Median and range; a dash if all values are 0."""
    if not max(values):
        return "-"
    digits = 0 if median(values) >= 100 else 1 if median(values) >= 10 else 2
    shown = [f"{value:,.{digits}f}" for value in (median(values), min(values), max(values))]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def memory(peaks: dict[str, float]) -> str:
    return ", ".join(f"{name} {peak / 1024:.2f} GiB" for name, peak in peaks.items() if peak)


def page(cases: Sequence[Case], command: str, versions: str, today: str) -> str:
    run = cases[0].settings
    sections = "\n".join(map(section, cases))
    return f"""# A step of ours and one of TRL's GRPOTrainer

Command: `{command}`

{machine()}, {versions}; {today}.
A step is all from one batch to the next: sampling, rewards, advantages, updates, weights to the engine, logs.
Both make steps in turns, in a process each, on the same core and with one thread; the other waits meanwhile.
CPU time (user and system, of all processes of a side), because others used this machine; medians over the
rounds, with the range. A ratio is that of the two steps of a round: above 1 ours costs less.

**Equal**: the model and its weights in float32; the prompts and their order; {run.group_size} responses of
{run.response_tokens} tokens to each (the end token lies outside of the vocabulary of both copies of the
model); temperature 1; a reward that costs nothing; {run.micro_batch} responses in a forward and backward
pass; GRPO's loss with bounds 0.8 and 1.2, its mean over tokens, no KL; AdamW without weight decay, gradients
cut at norm 1; nothing recomputed; no checkpoint; metrics of every step.

**TRL's settings** are those of `trl_config` in `benchmarks/against_trl_sides.py`: bf16, gradient
checkpointing and pinned memory off, `num_iterations=1`, `beta=0`, `use_vllm=False`, so that `generate` of
transformers samples, with its dynamic cache (the static one was slower here); all others are its defaults.
With one update a step TRL needs no old log-probs; with more it computes them. Ours are the engine's.

**Not comparable**: ours is a run that survives a kill. It has a second copy of the model (the embedded
engine, in the sampler's process), a journal of every token, digests of the weights that go to the engine,
scores in a process of their own, and measures ratios, entropies and more by staleness in every update. TRL
samples with the weights that it trains, and keeps nothing. None of this says anything of GPUs, of SGLang or
vLLM, of several processes, or of longer responses.
Resident memory counts pages that processes share once in each.

{sections}"""


def versions_text() -> str:
    """Package versions of both sides."""
    of_trl = {item.name: item.version for item in distributions(path=[str(TRL_FOLDER)])}
    theirs = [f"{name} {of_trl[name]}" for name in ("trl", "accelerate")]
    return ", ".join([*theirs, *(f"{name} {version(name)}" for name in ("transformers", "megatron-core"))])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["demo"])
    parser.add_argument("--updates", nargs="+", type=int, default=[1, 4], help="of a step; a case for each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--results", default="against_trl", help="name of the page in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="a small version, which is only printed")
    options = parser.parse_args()
    if not (TRL_FOLDER / "trl").is_dir():
        parser.error(f"{TRL_FOLDER} has no trl: run `make trl`")
    cases: list[Case] = []

    def show() -> None:
        command = f"python -m benchmarks.against_trl {' '.join(sys.argv[1:])}".strip()
        text = page(cases, command, versions_text(), f"{date.today()}")
        print(text) if options.quick else write(options.results, text)

    for model in options.models:
        for updates in options.updates:
            with tempfile.TemporaryDirectory() as name:
                cases.append(Case(model, settings_of(model, updates, options, Path(name)), options.warm_up))
                measure(cases[-1], options.rounds, show)
            if not cases[-1].agrees:
                show()
                sys.exit(1)


def settings_of(model: str, updates: int, options: argparse.Namespace, folder: Path) -> Settings:
    tokens = 16 if options.quick else 256
    return Settings(
        model=prepared_model(MODELS[model], folder / "model", MAX_PROMPT_TOKENS + tokens),
        prompts=PROMPTS,
        folder=folder,
        core=options.core,
        steps=options.warm_up + options.rounds + 1,
        prompts_per_step=PROMPTS_PER_STEP[model],
        group_size=16,
        response_tokens=tokens,
        updates=updates,
        micro_batch=4,
    )


if __name__ == "__main__":
    main()
